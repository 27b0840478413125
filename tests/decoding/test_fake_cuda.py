"""The steps run on fake CUDA tensors, which need no GPU: a host sync or a device mix raises."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorDeviceMismatchError,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode

import kit
from decoding.test_capture import LIMIT, PAGE, SIZE, WIDTHS
from nanodflash.config import EngineConfig
from nanodflash.decoding.cycle import (
    Decoder,
    commit_step,
    draft_step,
    prefill_step,
    prompt_step,
    verify_step,
)
from nanodflash.decoding.plan import RECORD, Facts, Sampler, Span
from nanodflash.models.config import DraftConfig, TargetConfig
from nanodflash.models.dflash import DFlash
from nanodflash.models.qwen3 import Qwen3


class Indexing(TorchFunctionMode):
    """`x[...]` in operators: its binding asks for a device guard that a CPU build lacks."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not Tensor.__getitem__:
            return func(*args, **(kwargs or {}))
        x, given = args
        given = given if isinstance(given, tuple) else (given,)
        kept = sum(part is not None and part is not Ellipsis for part in given)
        if Ellipsis in [part for part in given if not isinstance(part, Tensor)]:
            at = next(i for i, part in enumerate(given) if part is Ellipsis)
            given = (*given[:at], *[slice(None)] * (x.dim() - kept), *given[at + 1 :])
        aten, dim, indices = torch.ops.aten, 0, []
        for part in given:
            if isinstance(part, int):
                x = aten.select(x, dim, part)
                continue
            if part is None:
                x = aten.unsqueeze(x, dim)
            elif isinstance(part, slice) and part != slice(None):
                bounds = (part.start, part.stop)
                x = aten.slice(x, dim, *(b.item() if isinstance(b, Tensor) else b for b in bounds))
            elif isinstance(part, Tensor) and part.dtype == torch.bool:
                part = aten.nonzero(part)
            indices.append(part if isinstance(part, Tensor) else None)
            dim += 1
        return aten.index(x, indices) if any(i is not None for i in indices) else x


@contextmanager
def fake_cuda() -> Iterator[None]:
    with FakeTensorMode(), Indexing(), torch.inference_mode():
        yield


def fake_decoder(**changes: Any) -> Decoder:
    """Of tensors that hold nothing and say that they are on a GPU; none is needed."""
    config = EngineConfig(max_model_len=LIMIT, block_size=SIZE, page_size=PAGE, max_seqs=4)
    with torch.device("cuda:0"):
        target = Qwen3(TargetConfig.from_dict(kit.TARGET))
        draft = DFlash(DraftConfig.from_dict(kit.DRAFT | changes))
    return Decoder(target, draft, config)


@pytest.mark.parametrize(("width", "speculate"), WIDTHS)
@pytest.mark.parametrize("sampler", ["greedy", "sampled", "full"])
def test_a_cycle_runs_on_fake_cuda_tensors(sampler: Sampler, width: int, speculate: bool) -> None:
    """A host sync, or an operand that is on the host, raises."""
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
    with fake_cuda():
        decoder = fake_decoder(**sliding)
        if sampler == "full":
            decoder.state.count_tokens(decoder.vocab_size)
        slots = torch.zeros(3, dtype=torch.int64, device="cuda:0")
        facts = Facts(width, sampler, speculate, 64)
        proposals = draft_step(decoder, slots, facts) if width > 1 else None
        result = commit_step(decoder, slots, verify_step(decoder, slots, proposals, facts))
        assert result.record.shape == (3, RECORD + width)
        assert result.record.device.type == "cuda"
        spans = [Span(0, 0, 5, True), Span(1, 2, 4, False)]
        first = prefill_step(decoder, spans, slots[:1], slots[:1], facts)
        assert first is not None
        assert first.record.shape == (1, RECORD + 1)
        one = prompt_step(decoder, slots[:1], slots[:1], 16, facts)
        assert one.record.shape == (1, RECORD + 1)
        assert one.record.device.type == "cuda"


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (lambda state: state.len.tolist(), DataDependentOutputException),
        (lambda state: state.len[0].item(), DataDependentOutputException),
        (lambda state: 1 if state.budget[0] > 0 else 2, DataDependentOutputException),
        (lambda state: state.tokens[:, : state.len[0]], DataDependentOutputException),
        (lambda state: state.tokens[state.state == 1], DynamicOutputShapeException),
        (lambda state: state.len + torch.arange(5), FakeTensorDeviceMismatchError),
    ],
)
def test_fake_cuda_tensors_raise(step: Callable[[Any], Any], error: type[Exception]) -> None:
    """Each for its own reason: that a CPU build lacks something would be another."""
    with fake_cuda():
        state = fake_decoder().state
        with pytest.raises(error):
            step(state)
