"""Captured cycles, on a tape: what a CUDA graph is, as far as a CPU can tell.

A `Tape` notes every operation of a capture with the very tensors it was given, and a replay does
them again on these tensors and writes into the tensors that came out. So whatever Python decided
while it was captured is baked in, as in a CUDA graph: a length, a slot, a buffer that was replaced.
"""

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.test_closures import LENGTHS, prompt, run_batches
from nanodflash import SamplingParams, ops
from nanodflash.decoding.plan import Facts
from nanodflash.engine import steps
from nanodflash.engine.closures import EagerCycle
from nanodflash.engine.graphs import CapturedCycle
from nanodflash.engine.width import bucket

SAMPLING = {
    "greedy": SamplingParams(max_new_tokens=30),
    "sampled": SamplingParams(max_new_tokens=30, temperature=1.0, top_p=0.9, seed=5),
    "full": SamplingParams(max_new_tokens=30, presence_penalty=0.5, logprobs=3),
}


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Tape(TorchDispatchMode):
    """Notes what is done; `replay` does it again, over whatever the pool was used for meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, list[Any]]] = []
        self.own: dict[int, Tensor] = {}  # what the capture has allocated, by storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        given = {storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        self.own |= {storage(x): x for x in made if storage(x) not in given}
        self.done.append((func, args, kwargs or {}, tree_leaves(result)))
        return result

    def replay(self) -> None:
        with torch.inference_mode():
            for tensor in self.own.values():
                tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
            for func, args, kwargs, made in self.done:
                for old, new in zip(made, tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(old, Tensor) and storage(old) != storage(new):
                        old.copy_(new)


def capture(work: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
    tape = Tape()
    with tape:
        made = work()
    for tensor in tree_leaves(made):  # kept by whoever captures; the rest goes back to the pool
        if isinstance(tensor, Tensor):
            tape.own.pop(storage(tensor), None)
    return tape.replay, made


@pytest.fixture
def taped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine captures what it can. Attention is no definition that is told how far to read:
    as with a kernel, one graph serves all lengths.
    """
    table = ops.Ops(attention=lambda *given: ops.attention(*given))
    monkeypatch.setattr("nanodflash.llm.choose_ops", lambda *_: table)
    make = steps.ModelSteps.__init__

    def with_capture(self: Any, decoder: Any, graphs: bool = True, _: Any = None) -> None:
        make(self, decoder, graphs, capture)

    monkeypatch.setattr(steps.ModelSteps, "__init__", with_capture)


def captured(llm: Any) -> dict[Any, CapturedCycle]:
    cycles = llm.engine.runner.steps.cycles
    assert all(type(cycle) is CapturedCycle for cycle in cycles.values())
    return cycles


@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_replays_are_the_oracles(
    open_llm: Any, expect: Any, taped: None, name: str, speculate: bool
) -> None:
    """At lengths, slots and pages that were not there when the cycle was captured."""
    llm = open_llm(page_size=16, max_seqs=3)
    for length in LENGTHS:
        (output,) = llm.generate(prompt(length), SAMPLING[name], speculate)
        assert (output.token_ids, output.finish_reason) == expect(prompt(length), SAMPLING[name])
    assert len(captured(llm)) == 1
    assert llm.metrics.seconds["capture"] > 0  # apart from the cycle's own time


def test_batches_are_filled_with_padding_rows(open_llm: Any, expect: Any, taped: None) -> None:
    llm = open_llm(page_size=16, max_seqs=6)
    run_batches(llm, expect)
    assert {rows for rows, _ in captured(llm)} >= {4, 8}


def test_penalties_and_logprobs(open_llm: Any, taped: None) -> None:
    """The counts are made by the first request that asks: what was captured before has none."""
    plain, full = SAMPLING["greedy"], SAMPLING["full"]
    asked = [plain, full, full, plain]
    runs = []
    for graphs in (False, True):
        llm = open_llm(page_size=16, max_seqs=3, graphs=graphs)
        outputs = [llm.generate(prompt(9), params)[0] for params in asked]
        outputs += llm.generate([prompt(length) for length in (5, 6, 7)], [full, plain, full])
        runs.append([(output.token_ids, output.logprobs) for output in outputs])
        assert bool(captured(llm)) == graphs
    assert runs[0] == runs[1]
    samplers = {facts.sampler for _, facts in captured(llm)}
    assert samplers == {"greedy", "full"}


@pytest.mark.parametrize("pattern", ["right", "third wrong", "random"])
def test_a_callers_proposer_runs_beside(
    scripted: Any, expect: Any, taped: None, pattern: str
) -> None:
    engine = scripted(8, page_size=5, max_seqs=2)
    params = SamplingParams(max_new_tokens=40)
    for length in LENGTHS:
        output = engine.run(prompt(length), params, pattern)
        assert output.token_ids == expect(prompt(length), params)[0]
    assert captured(engine.llm)


@pytest.mark.parametrize("width", [1, 3, 16])
def test_any_width(open_llm: Any, expect: Any, taped: None, width: int) -> None:
    llm = open_llm(page_size=16, verify_width=width)
    outputs = llm.generate([prompt(length) for length in LENGTHS], SAMPLING["greedy"])
    for output, length in zip(outputs, LENGTHS, strict=True):
        assert output.token_ids == expect(prompt(length), SAMPLING["greedy"])[0]
    assert {facts.width for _, facts in captured(llm)} == {width}


def test_a_capture_leaves_no_trace(open_llm: Any, no_leak: Any, taped: None) -> None:
    """Warming up and capturing run on the spare slot: no live row and no page but 0 changes."""
    llm = open_llm(page_size=16, max_seqs=2)
    llm.generate(prompt(20), SAMPLING["greedy"])
    no_leak(llm)  # no step is on its way
    decoder = llm.engine.runner.steps.decoder
    pools = (decoder.target_pool.rows, decoder.draft_pool.rows)
    state = [value for value in vars(decoder.state).values() if value is not None]
    before = [pool[:, 1:].clone() for pool in pools] + [value[:-1].clone() for value in state]
    CapturedCycle(decoder, Facts(16, "greedy", True, 64), 2).capture(capture)
    after = [pool[:, 1:] for pool in pools] + [value[:-1] for value in state]
    assert all(a.equal(b) for a, b in zip(after, before, strict=True))


def test_a_baked_length_is_found(open_llm: Any, expect: Any, monkeypatch: Any) -> None:
    """The tape would tell: a step that asked the device is captured with what it heard."""
    draft = EagerCycle.draft

    def asks(self: EagerCycle, slots: Tensor) -> Tensor:
        return draft(self, slots) + min(self.decoder.state.len[slots].tolist())  # a host sync

    monkeypatch.setattr(EagerCycle, "draft", asks)
    make = steps.ModelSteps.__init__
    monkeypatch.setattr(
        steps.ModelSteps,
        "__init__",
        lambda self, decoder, graphs=True, _=None: make(self, decoder, graphs, capture),
    )
    llm = open_llm(page_size=16)
    cycle = llm.engine.runner.steps.cycle_of(1, Facts(16, "greedy", True, 64))
    state = llm.engine.runner.steps.decoder.state
    for length in (3, 5):
        state.len[0] = length
        cycle._slots.fill_(0)
        cycle._draft()
        wanted = draft(cycle, cycle._slots)
        assert cycle._proposals.equal(wanted)  # with the length of the spare slot, 0
        assert not cycle._proposals.equal(wanted + length)
    state.len[0] = 0


def test_captured_ahead(open_llm: Any, taped: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch size and width, the largest first; a greedy request then captures nothing."""
    llm = open_llm(page_size=16, max_seqs=12)
    decoder, chunks = llm.engine.runner.steps.decoder, list[tuple[int, bool]]()
    before = [pool.rows[:, 1:].clone() for pool in (decoder.target_pool, decoder.draft_pool)]
    prefill = steps.prefill_step

    def noted(decoder: Any, spans: Any, *rest: Any) -> Any:
        chunks.extend((span.stop - span.start, span.last) for span in spans)
        assert {span.slot for span in spans} == {12}  # the spare one
        return prefill(decoder, spans, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(steps, "prefill_step", noted)
        llm.engine.runner.steps.prepare(12, 100, (16, 8))
    assert chunks == [*((length, False) for length in (1, 2, 4, 8, 16, 32, 64, 100)), (1, True)]
    keys = [(rows, facts.width) for rows, facts in captured(llm)]
    assert keys == [(rows, width) for rows in (16, 8, 4, 2, 1) for width in (16, 8)]
    for pool, rows in zip((decoder.target_pool, decoder.draft_pool), before, strict=True):
        assert pool.rows[:, 1:].equal(rows)  # prompts of the spare slot lie on the dummy page
    llm.generate([prompt(length) for length in LENGTHS], SAMPLING["greedy"])
    assert len(captured(llm)) == 10


@pytest.mark.parametrize("at", range(4))
def test_a_capture_that_fails(
    open_llm: Any, expect: Any, taped: None, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """What is captured goes on; what is new runs from Python, and nothing is captured any more."""
    calls = 0

    def fails(work: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        nonlocal calls
        calls += 1
        if calls > at:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return capture(work)

    llm = open_llm(page_size=16, max_seqs=3)
    monkeypatch.setattr(llm.engine.runner.steps, "capture", fails)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for some in ([9], [9, 40], [7], [1, 23, 90]):
            outputs = llm.generate([prompt(length) for length in some], SAMPLING["greedy"])
            for output, length in zip(outputs, some, strict=True):
                assert output.token_ids == expect(prompt(length), SAMPLING["greedy"])[0]
    assert ["no more graphs" in str(one.message) for one in told] == [True]
    assert calls == at + 1
    # What was half made stays: the end of a graph may harm others.
    (half,) = llm.engine.runner.steps._broken
    assert isinstance(half, CapturedCycle)
    assert (half._draft is not None) == bool(at % 2)
    kinds = Counter(type(cycle) for cycle in llm.engine.runner.steps.cycles.values())
    assert kinds[CapturedCycle] == at // 2


@pytest.mark.parametrize("rows", range(1, 70))
def test_buckets(rows: int) -> None:
    assert rows <= bucket(rows) < rows + 8
    assert bucket(bucket(rows)) == bucket(rows)
