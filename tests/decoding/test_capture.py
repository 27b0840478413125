"""The steps can be captured: a CUDA graph could hold them, judged here without a GPU.

A mode watches every operator below autograd. Composite operators are taken apart, so that what
is judged is what a device would run. The mode is tested itself: it raises on each thing that a
step must not do.
"""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kit
from kit import make_draft, make_target
from nanodflash import SamplingParams
from nanodflash.config import EngineConfig
from nanodflash.decoding.cycle import (
    Decoder,
    commit_step,
    draft_step,
    prompt_step,
    verify_step,
)
from nanodflash.decoding.plan import ACCEPTED, EMITTED, RAW_ACCEPTED, Facts, Sampler, Span

SIZE, PAGE, LIMIT = 8, 4, 96
WRITABLE = {"len", "anchor", "budget", "state", "tokens", "target_pool", "draft_pool"}
# Read on the host without an operator, as `tolist` of a CPU tensor is.
HOST_READS = {"tolist", "numpy", "__array__", "__dlpack__", "data_ptr", "cpu", "cuda"}

Trace = list[tuple[Any, ...]]


class NotCapturable(Exception):
    """A step did what no captured graph can."""


class HostReads(TorchFunctionMode):
    """Raises on what reads a tensor from Python without an operator."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in HOST_READS:
            raise NotCapturable(f"{func.__name__} reads a tensor on the host")
        return func(*args, **(kwargs or {}))


class Watch(TorchDispatchMode):
    """Raises `NotCapturable` on what a graph cannot hold, and keeps the operators and shapes.

    Args:
        inputs:   name -> tensor that was there before: the only ones that may be read.
        writable: names of those that may be written.
    """

    def __init__(self, inputs: dict[str, Tensor], writable: set[str]) -> None:
        super().__init__()
        self.trace: Trace = []
        self.device = next(iter(inputs.values())).device
        # A storage is known by its address; what was made stays alive here, so that no address
        # is given twice.
        self.names = {address(tensor): name for name, tensor in inputs.items()}
        self.made: dict[int, Tensor] = {}
        self.writable = writable

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        self._check_kind(func, args, kwargs)
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in read:
            self._check_input(func, tensor)
        self._check_writes(func, args, kwargs)
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for tensor in made:
            self._check_device(func, tensor)
            if address(tensor) not in self.names:
                self.made.setdefault(address(tensor), tensor)
        layout = [(tuple(t.shape), t.stride(), t.dtype) for t in (*read, *made)]
        numbers = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, (int, float))]
        self.trace.append((str(func), layout, numbers))
        return result

    def _check_kind(self, func: Any, args: Any, kwargs: Any) -> None:
        packet = func.overloadpacket.__name__
        indexing = packet in ("index", "index_put", "index_put_", "_index_put_impl_")
        if indexing:
            if any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]):
                raise NotCapturable(f"{func} with a mask: its shape depends on data")
        elif {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
            raise NotCapturable(f"{func} waits for data on the device")
        if packet in ("lift", "lift_fresh", "lift_fresh_copy"):
            raise NotCapturable(f"{func}: a tensor made from Python data")
        # attention has the tag for its dropout
        if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in packet:
            raise NotCapturable(f"{func} draws from a generator")

    def _check_input(self, func: Any, tensor: Tensor) -> None:
        self._check_device(func, tensor)
        if address(tensor) not in self.names and address(tensor) not in self.made:
            shape = tuple(tensor.shape)
            raise NotCapturable(f"{func} reads {shape}, no buffer of the decoder or of the step")

    def _check_device(self, func: Any, tensor: Tensor) -> None:
        if tensor.device != self.device:
            raise NotCapturable(f"{func} crosses from {self.device} to {tensor.device}")

    def _check_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = args[place] if place < len(args) else kwargs[argument.name]
            name = self.names.get(address(written), "")
            if name and name not in self.writable:
                raise NotCapturable(f"{func} writes {name}")


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def watched(
    inputs: dict[str, Tensor], writable: set[str], step: Callable[[], Any]
) -> tuple[Any, Trace]:
    """Run a step under both modes: what it returns, and its operators."""
    watch = Watch(inputs, writable)
    with watch, HostReads():
        result = step()
    return result, watch.trace


# ---------------------------------------------------------------------- the mode itself

BUFFERS = {
    "rows": torch.arange(12.0).view(3, 4),
    "index": torch.tensor([0, 2]),
    "mask": torch.tensor([True, False, True]),
    "fixed": torch.zeros(3),
}
rows, index, mask, fixed = BUFFERS.values()
FOREIGN = torch.ones(4)

FORBIDDEN: dict[str, Callable[[], Any]] = {
    "item": lambda: rows[0, 0].item(),
    "float": lambda: float(rows[0, 0]),
    "int as index": lambda: [1, 2, 3][index[0]],
    "tensor as slice": lambda: rows[: index[1]],
    "range": lambda: range(index[1]),
    "branch": lambda: 1 if mask[0] else 2,
    "any as branch": lambda: bool(mask.any()),
    "comparison as branch": lambda: 1 if (rows > 0).all() else 2,
    "tolist": lambda: index.tolist(),
    "numpy": lambda: rows.numpy(),
    "format": lambda: f"{rows[0, 0]}",
    "equal": lambda: torch.equal(rows, rows),
    "allclose": lambda: torch.allclose(rows, rows),
    "nonzero": lambda: mask.nonzero(),
    "where with one argument": lambda: torch.where(mask),
    "masked_select": lambda: rows.masked_select(rows > 3),
    "mask as index": lambda: rows[mask],
    "write through a mask": lambda: (rows + 1).index_put_((mask,), rows[0, 0]),
    "unique": lambda: index.unique(),
    "unique_consecutive": lambda: index.unique_consecutive(),
    "bincount": lambda: torch.bincount(index),
    "repeat by data": lambda: rows[0, :2].repeat_interleave(index),
    "one_hot of unknown width": lambda: torch.nn.functional.one_hot(index),
    "torch.tensor": lambda: torch.tensor([1.0]),
    "as_tensor": lambda: torch.as_tensor([1.0]),
    "new_tensor": lambda: rows.new_tensor([1.0]),
    "list as index": lambda: rows[[0, 1]],
    "number written to a place": lambda: (rows + 1).__setitem__((0, 0), 5.0),
    "to another device": lambda: rows.to("meta"),
    "made on another device": lambda: torch.zeros(3, device="meta"),
    "copied from another device": lambda: (rows + 1).copy_(torch.empty(3, 4, device="meta")),
    "cpu": lambda: rows.cpu(),
    "foreign tensor": lambda: rows + FOREIGN,
    "foreign view": lambda: rows + FOREIGN[None, :1],
    "foreign index": lambda: rows[FOREIGN.long()],
    "constant written": lambda: fixed.add_(1),
    "constant written through a view": lambda: fixed[1:].zero_(),
    "constant as out": lambda: torch.add(fixed, 1, out=fixed),
    "random": lambda: torch.rand(3),
    "random in place": lambda: (rows + 1).exponential_(),
    "multinomial": lambda: torch.multinomial(rows, 1),
}
FINE: dict[str, Callable[[], Any]] = {
    "arithmetic": lambda: (rows * 2 + 1) % 3,
    "where with numbers": lambda: torch.where(mask, 1, 2) + torch.where(mask, fixed, 0.5),
    "gather": lambda: rows[index] + rows.gather(1, index[None].expand(3, 2)).sum(),
    "masked_fill": lambda: rows.masked_fill(mask[:, None], 0.0),
    "own temporary": lambda: (rows + 1).add_(torch.zeros(4)).masked_fill_(mask[:, None], 1.0),
    "writable": lambda: rows.index_copy_(0, index, rows[index]),
    "attention": lambda: torch.nn.functional.scaled_dot_product_attention(
        rows[None, None], rows[None, None], rows[None, None]
    ),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_the_mode_raises(name: str) -> None:
    with torch.inference_mode(), pytest.raises(NotCapturable):
        watched(BUFFERS, {"rows"}, FORBIDDEN[name])


@pytest.mark.parametrize("name", FINE)
def test_the_mode_lets_pass(name: str) -> None:
    with torch.inference_mode():
        _, trace = watched(BUFFERS, {"rows"}, FINE[name])
    assert trace


# ---------------------------------------------------------------------- the steps

PROMPTS = ([5, 9, 300], [*range(11)], [7])


def copying(tokens: Tensor, length: Tensor) -> Tensor:
    """Proposes the start of the sequence again: a proposer that a graph could hold."""
    return tokens[:, : SIZE - 1]


@pytest.fixture(scope="module", params=["drafter", "proposer alone"])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    with_draft = request.param == "drafter"
    config = EngineConfig(max_model_len=LIMIT, block_size=SIZE, page_size=PAGE, max_seqs=4)
    target = make_target(torch.float32, num_hidden_layers=2)
    if not with_draft:
        return Decoder(target, None, config, copying)
    draft = make_draft(
        torch.float32,
        num_target_layers=2,
        dflash_config={"mask_token_id": 319, "target_layer_ids": [1, 0]},
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=6,
    )
    return Decoder(target, draft, config)


def admit(decoder: Decoder, sampler: Sampler) -> None:
    """Three requests with pages and prompts in place, on slots 0 .. 2."""
    wanted = {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.01}
    params = SamplingParams(**wanted) if sampler == "sampled" else SamplingParams()
    for slot, prompt in enumerate(PROMPTS):
        count = LIMIT // PAGE
        kit.admit(
            decoder.state,
            slot,
            prompt,
            params,
            budget=60,
            seed=slot,
            stop_ids=[310],
            epoch=slot,
            draft_limit=LIMIT,
            pages=range(1 + count * slot, 1 + count * (slot + 1)),
        )
        span = Span(slot, 0, len(prompt), last=True)
        kit.prefill(decoder, [span], Facts(1, sampler, True, LIMIT))


def registered(decoder: Decoder) -> dict[str, Tensor]:
    """Every tensor that was made when the engine was: what a graph may have baked in."""
    tensors = {k: v for k, v in vars(decoder.state).items() if v is not None}
    tensors |= {k: v for k, v in vars(decoder).items() if isinstance(v, Tensor)}
    for name in ("target", "draft"):
        model, pool = getattr(decoder, name), getattr(decoder, f"{name}_pool")
        if model is not None:
            tensors |= {f"{name}.{k}": v for k, v in model.named_parameters()}
            tensors |= {f"{name}.{k}": v for k, v in model.named_buffers()}
            tensors[f"{name}_pool"] = pool.rows
    if decoder.draft is not None and decoder.draft.context is not None:
        tensors |= dict(zip(("context", "context_norms"), decoder.draft.context, strict=True))
    return tensors


def one_cycle(
    decoder: Decoder, slots: Tensor, facts: Facts, proposals: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Trace]:
    """Draft, then verify with commit, each watched: the record, the proposals, the operators."""
    inputs = registered(decoder) | {"slots": slots}
    trace: Trace = []
    if facts.width > 1 and proposals is None:
        step = lambda: draft_step(decoder, slots, facts)  # noqa: E731
        proposals, trace = watched(inputs, {"draft_pool"}, step)
    if proposals is not None:
        inputs["proposals"] = proposals

    def verify_and_commit() -> Tensor:
        return commit_step(decoder, slots, verify_step(decoder, slots, proposals, facts)).record

    record, more = watched(inputs, WRITABLE, verify_and_commit)
    return record, proposals, trace + more


WIDTHS = ((SIZE, True), (SIZE, False), (3, True), (1, True), (1, False))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("width", "speculate"), WIDTHS)
@pytest.mark.parametrize("sampler", ["greedy", "sampled"])
def test_a_cycle_can_be_captured(
    decoder: Decoder, sampler: Sampler, width: int, speculate: bool, batch: int
) -> None:
    admit(decoder, sampler)
    facts = Facts(width, sampler, speculate, 64)
    slots = torch.tensor([*range(batch), decoder.state.len.shape[0] - 1])  # and a padding row
    for _ in range(2):  # as a capture is warmed
        proposals = draft_step(decoder, slots, facts) if width > 1 else None
        commit_step(decoder, slots, verify_step(decoder, slots, proposals, facts))
    before = {k: (v.data_ptr(), v.shape, v.stride()) for k, v in registered(decoder).items()}
    lengths = decoder.state.len[slots].tolist()
    record, _, _ = one_cycle(decoder, slots, facts)
    after = {k: (v.data_ptr(), v.shape, v.stride()) for k, v in registered(decoder).items()}
    assert after == before
    assert record[:batch, EMITTED].gt(0).all(), "the step did nothing"
    assert decoder.state.len[slots[:batch]].gt(torch.tensor(lengths[:batch])).all()


@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize("sampler", ["greedy", "sampled"])
def test_a_prompt_in_one_shape_can_be_captured(
    decoder: Decoder, sampler: Sampler, speculate: bool
) -> None:
    admit(decoder, sampler)
    slots, start = torch.tensor([1]), torch.tensor([PAGE])
    decoder.state.len[1] = len(PROMPTS[1]) - 1  # as if it had no first token yet
    inputs = registered(decoder) | {"slots": slots, "start": start}
    facts = Facts(1, sampler, speculate, 32)
    step = lambda: prompt_step(decoder, slots, start, 16, facts).record  # noqa: E731
    record, _ = watched(inputs, WRITABLE, step)
    assert record[0, EMITTED] == 1
    assert decoder.state.len[1] == len(PROMPTS[1])


@pytest.mark.parametrize("sampler", ["greedy", "sampled"])
def test_nothing_outlives_a_step_but_its_results(decoder: Decoder, sampler: Sampler) -> None:
    admit(decoder, sampler)
    slots, facts = torch.tensor([0, 1, 2]), Facts(SIZE, sampler, True, 64)

    def alive() -> dict[int, Tensor]:
        gc.collect()
        kinds = (Tensor, torch.nn.Parameter)
        return {address(x): x for x in gc.get_objects() if type(x) in kinds}

    one_cycle(decoder, slots, facts)
    before = set(alive())
    record, proposals, _ = one_cycle(decoder, slots, facts)
    assert proposals is not None
    assert set(alive()) - before <= {address(record), address(proposals)}


@pytest.mark.parametrize("sampler", ["greedy", "sampled"])
def test_operators_do_not_depend_on_the_outcome(decoder: Decoder, sampler: Sampler) -> None:
    """One key, one graph: all right, all wrong, mixed; other lengths; rows that have finished."""
    slots, facts = torch.tensor([0, 1, 2]), Facts(SIZE, sampler, True, 64)
    admit(decoder, sampler)
    texts = torch.zeros(3, SIZE, dtype=torch.int64)  # what plain decoding emits next
    plain = Facts(1, sampler, True, 64)
    for place in range(SIZE):
        texts[:, place] = one_cycle(decoder, slots, plain)[0][:, -1]
    right = texts[:, :-1].contiguous()
    wrong = (right + 1) % 320
    mixed = torch.where(torch.arange(3)[:, None] == 1, wrong, right)

    traces, accepted = [], []
    for proposals in (right, wrong, mixed):
        admit(decoder, sampler)
        record, _, trace = one_cycle(decoder, slots, facts, proposals)
        traces.append(trace)
        accepted.append(record[:, ACCEPTED].tolist())
    assert accepted == [[SIZE - 1] * 3, [0] * 3, [SIZE - 1, 0, SIZE - 1]]

    decoder.state.budget[0] = 2  # this row finishes before the others
    assert len(set(decoder.state.len[slots].tolist())) == 3
    for _ in range(3):
        record, _, trace = one_cycle(decoder, slots, facts, right)
        traces.append(trace)
    assert record[0, [EMITTED, RAW_ACCEPTED]].tolist() == [0, 0]
    assert len(traces[0]) > 100
    assert all(trace == traces[0] for trace in traces)


@pytest.mark.parametrize("sampler", ["greedy", "sampled"])
def test_the_draft_step_is_the_same_at_any_length(decoder: Decoder, sampler: Sampler) -> None:
    slots, facts = torch.tensor([0, 1, 2]), Facts(SIZE, sampler, True, 64)
    admit(decoder, sampler)
    traces = [one_cycle(decoder, slots, facts)[2] for _ in range(3)]
    assert all(trace == traces[0] for trace in traces)
