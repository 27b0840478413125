"""Replays from traces: what the engine emits is what the oracle emits, at lengths never traced."""

from typing import Any

import pytest
import torch

from nanodflash import SamplingParams
from nanodflash.decoding.plan import Facts
from nanodflash.engine import closures
from nanodflash.engine.closures import EagerCycle, TracedCycle, round_pages

LENGTHS = (40, 7, 1, 90, 23)


def cycles(llm: Any) -> list[TracedCycle]:
    return list(llm.engine.runner.steps.cycles.values())


def traced(llm: Any) -> list[str]:
    """Names of what is traced."""
    return [name for name, _ in llm.engine.runner.steps._traces.made]


def prompt(length: int) -> list[int]:
    return [(7 * i * i + length) % 300 for i in range(length)]


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closures, "AFTER", 1)


@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=30),
        SamplingParams(max_new_tokens=30, temperature=1.0, top_p=0.9, seed=5),
        SamplingParams(max_new_tokens=30, stop_token_ids=tuple(range(0, 320, 40))),
    ],
    ids=["greedy", "sampled", "stops"],
)
def test_replays_are_the_oracles(
    open_llm: Any, expect: Any, early: None, params: SamplingParams, speculate: bool
) -> None:
    llm = open_llm(page_size=16)
    for length in LENGTHS * 2:
        (output,) = llm.generate(prompt(length), params, speculate)
        assert (output.token_ids, output.finish_reason) == expect(prompt(length), params)
    assert set(traced(llm)) == {"prefill", "verify"} | ({"draft"} if speculate else set())


@pytest.mark.parametrize("pattern", ["right", "third wrong", "random"])
def test_scripted_acceptance(scripted: Any, expect: Any, early: None, pattern: str) -> None:
    engine = scripted(8, page_size=5)
    params = SamplingParams(max_new_tokens=40)
    for length in LENGTHS:
        assert (
            engine.run(prompt(length), params, pattern).token_ids
            == expect(prompt(length), params)[0]
        )
    assert set(traced(engine.llm)) == {"verify"}  # a caller's proposer is never traced


def run_batches(llm: Any, expect: Any) -> None:
    """Six requests of several lengths, twice, beside the oracle: the batch shrinks as they end."""
    params = [SamplingParams(max_new_tokens=new) for new in (5, 9, 33, 20, 12, 28)]
    prompts = [prompt(length) for length in (*LENGTHS, 11)]
    for _ in range(2):
        outputs = llm.generate(prompts, params)
        for output, asked, wanted in zip(outputs, prompts, params, strict=True):
            assert output.token_ids == expect(asked, wanted)[0]


def test_batches_of_several_sizes(open_llm: Any, expect: Any, early: None) -> None:
    llm = open_llm(page_size=16, max_seqs=6)
    run_batches(llm, expect)
    rows = {key[0] for name, key in llm.engine.runner.steps._traces.made if name == "verify"}
    assert len(rows) > 1
    assert max(rows) <= closures.MAX_ROWS


@pytest.mark.parametrize("page_size", [4, 16])
def test_prompts_of_one_shape(
    open_llm: Any, expect: Any, early: None, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a prefix that is cached, or none; the last shape that is traced, and one behind it."""
    monkeypatch.setattr(closures, "MOST", 64)  # these are small, and every shape shall have one
    llm, params = open_llm(page_size=page_size), SamplingParams(max_new_tokens=6)
    whole, cached = prompt(100), []
    lengths = (16, 17, 31, 32, 1, 2, 48, 63, 64, 65, 100, 97, 80, 33, 49, 50, 51)
    for ids in [prompt(length) for length in lengths] + [whole[:length] for length in lengths]:
        (output,) = llm.generate(ids, params)
        assert output.token_ids == expect(ids, params)[0]
        cached.append(output.metrics.cached_tokens)
    shapes = {key[0] for name, key in llm.engine.runner.steps._traces.made if name == "prefill"}
    assert shapes == {16, 32, 48, 64}
    assert len(set(cached)) > 3


def test_the_draft_pool_is_written_by_replays(open_llm: Any, early: None) -> None:
    """Cycles and acceptance, not only ids, are those of a run from Python."""
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    for length in LENGTHS:
        runs = []
        for graphs in (True, False):
            # A new engine: which slot and pages a later request gets depends on when the steps
            # past an earlier one's end come back.
            llm = open_llm(page_size=16, graphs=graphs, prefix_cache=False)
            (output,) = llm.generate(prompt(length), params)
            assert bool(cycles(llm)) == graphs
            decoder = llm.engine.runner.steps.decoder
            rows = decoder.draft_pool.rows[:, decoder.state.page_table[0]].flatten(1, 2)
            written = int(decoder.state.len[0])
            assert written >= length + 60 - 1
            metrics = output.metrics
            runs.append((output.token_ids, metrics.emitted, metrics.accepted_at, written))
            runs.append(rows[:, : written - 1].clone())
        assert runs[0] == runs[2]
        torch.testing.assert_close(runs[1], runs[3], rtol=0, atol=1e-10)


def test_there_are_not_more_traces_than_may_be(
    open_llm: Any, expect: Any, early: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes later runs from Python."""
    monkeypatch.setattr(closures, "MOST", 3)
    llm, params = open_llm(page_size=16), SamplingParams(max_new_tokens=30)
    for length in LENGTHS * 2:
        assert (
            llm.generate(prompt(length), params)[0].token_ids == expect(prompt(length), params)[0]
        )
    assert len(traced(llm)) == 3
    assert len(cycles(llm)) > 2


def test_what_is_not_traced(open_llm: Any, early: None) -> None:
    llm = open_llm(max_seqs=6)
    penalised = SamplingParams(max_new_tokens=20, presence_penalty=0.5)
    llm.generate([prompt(5)] * 3, penalised)
    llm.generate([prompt(5)] * 6, SamplingParams(max_new_tokens=1))
    assert cycles(llm) == []
    facts = Facts(16, "greedy", True, 64)
    assert type(llm.engine.runner.steps.cycle_of(closures.MAX_ROWS + 1, facts)) is EagerCycle
    assert type(llm.engine.runner.steps.cycle_of(closures.MAX_ROWS, facts)) is TracedCycle


@pytest.mark.parametrize("pages", range(1, 200))
def test_rounding(pages: int) -> None:
    rounded = round_pages(pages)
    assert pages <= rounded <= pages * 1.5 + 1
    assert round_pages(rounded) == rounded


def test_few_sizes() -> None:
    assert sorted({round_pages(pages) for pages in range(1, 33)}) == [
        2,
        4,
        6,
        8,
        12,
        16,
        24,
        32,
    ]
