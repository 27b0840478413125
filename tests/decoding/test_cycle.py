"""What the cycle emits is what the oracle emits, token for token, in fp64.

Whatever is proposed, whatever the block, the pages, the chunks and the neighbours: only the
number of cycles may differ, and that is counted here a second time, from the script alone.
"""

from collections import Counter
from collections.abc import Sequence as Ids
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import kit
import oracle
from kit import PATTERNS, Alone, Script, make_draft, make_target
from nanodflash import SamplingParams
from nanodflash.config import EngineConfig
from nanodflash.decoding.cycle import (
    Decoder,
    Proposer,
    draft_step,
    prompt_step,
)
from nanodflash.decoding.kv_cache import KVPool, row_index
from nanodflash.decoding.plan import (
    EMITTED,
    Facts,
    Span,
)
from nanodflash.engine.sequence import Sequence

LIMIT, NEW = 128, 24
TARGET = {"num_hidden_layers": 3, "intermediate_size": 64}
DRAFT = {
    "num_target_layers": 3,
    "intermediate_size": 64,
    "dflash_config": {"mask_token_id": 319, "target_layer_ids": [2, 0]},
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "plain": {"temperature": 1.0, "seed": 11},
    "top_k": {"temperature": 1.5, "top_k": 5, "seed": -7},
    "top_p": {"temperature": 0.75, "top_p": 0.625, "seed": 2**40},
    "all": {"temperature": 2.0, "top_k": 40, "top_p": 0.9375, "min_p": 0.125, "seed": 0},
}
PROMPTS = dict(
    zip(SAMPLINGS, ([7, 3, 300, 41, 5], [9] * 11, [17], [*range(23)], [1, 2, 319]), strict=True)
)

target = cache(lambda: make_target(**TARGET))  # of the engines: each Decoder makes its rotary table
draft = cache(lambda: make_draft(**DRAFT))


@cache
def judge() -> Any:
    """The oracle's target: the same weights, a rotary table of its own."""
    model = make_target(**TARGET)
    model.prepare(2 * LIMIT)
    return model


@cache
def text(sampling: str) -> list[int]:
    """What follows a sampling's prompt, by the oracle; longer than any budget and its block."""
    params = SamplingParams(max_new_tokens=NEW + 16, **SAMPLINGS[sampling])
    return oracle.decode(judge(), PROMPTS[sampling], params)[0]


def simulate(
    anchor: int, count: int, size: int, pattern: str | None, limit: int = LIMIT
) -> list[tuple[int, int, int]]:
    """(emitted, accepted, proposed) of every cycle that emits `count` tokens behind `anchor`."""
    end, cycles, places = anchor + count, [], torch.arange(1, size)
    while anchor < end:
        spoiled = [True]
        if pattern is not None:
            spoiled = [*PATTERNS[pattern](anchor + places[None], places)[0].tolist(), True]
        proposed = max(0, min(size - 1, limit - anchor - 1))
        accepted = min(spoiled.index(True), proposed)
        emitted = min(accepted + 1, end - anchor)
        cycles.append((emitted, min(accepted, emitted), proposed))
        anchor += emitted
    return cycles


def test_the_texts_have_power() -> None:
    assert len(set(text("greedy"))) >= 20
    assert len({tuple(text(sampling)) for sampling in SAMPLINGS}) == len(SAMPLINGS)


# ---------------------------------------------------------------------- one request


def make_engine(
    size: int,
    page: int = 4,
    chunk: int = 512,
    proposer: Proposer | None = None,
    with_draft: bool = True,
    poison: bool = False,
) -> Alone:
    config = EngineConfig(
        max_model_len=LIMIT, block_size=size, page_size=page, max_prefill=chunk, max_seqs=2
    )
    decoder = Decoder(target(), draft() if with_draft else None, config, proposer)
    if poison:
        fill(decoder)
    return Alone(decoder, config)


def fill(decoder: Decoder, value: float = float("nan")) -> None:
    for pool in (decoder.target_pool, decoder.draft_pool):
        if pool is not None:
            pool.rows[:, :-1].fill_(value)


def make_sequence(sampling: str, new: int = NEW, speculate: bool = True) -> Sequence:
    params = SamplingParams(max_new_tokens=new, **SAMPLINGS[sampling])
    return Sequence(PROMPTS[sampling], params, new, params.seed or 0, [], speculate, None)


def check_against_script(sequence: Sequence, sampling: str, size: int, pattern: str | None) -> None:
    """Ids by the oracle; every count of the metrics by the script alone."""
    assert sequence.token_ids == text(sampling)[:NEW]
    assert sequence.finish_reason == "length"
    cycles = simulate(len(sequence.prompt), NEW - 1, size, pattern)
    metrics = sequence.metrics
    assert metrics.prompt_tokens == len(sequence.prompt)
    assert metrics.emitted == Counter(emitted for emitted, _, _ in cycles)
    kept = [sum(accepted >= place for _, accepted, _ in cycles) for place in range(1, size)]
    assert metrics.accepted_at + [0] * (size - 1 - len(metrics.accepted_at)) == kept
    assert metrics.proposed_at == [len(cycles)] * (size - 1)
    assert metrics.cycles == len(cycles)
    assert metrics.accepted == sum(accepted for _, accepted, _ in cycles)
    assert metrics.proposed == sum(proposed for _, _, proposed in cycles)
    assert NEW == 1 + metrics.decoded_tokens == 1 + sum(emitted for emitted, _, _ in cycles)
    assert metrics.tau == (NEW - 1) / len(cycles)


SIZES, PAGES, CHUNKS = (1, 2, 4, 8, 16), (1, 4, 64, 3, 16), (1, 2, 7, 16, 512)
# An orthogonal array: every two levels of every two columns meet in one of the 25 rows.
PAIRWISE = [
    (
        SIZES[i],
        [*PATTERNS][j],
        [*SAMPLINGS][(i + j) % 5],
        PAGES[(i + 2 * j) % 5],
        CHUNKS[(i + 3 * j) % 5],
        (i + 4 * j) % 5 < 3,
    )
    for i in range(5)
    for j in range(5)
]


@pytest.mark.parametrize(("size", "pattern", "sampling", "page", "chunk", "with_draft"), PAIRWISE)
def test_one_request(
    size: int, pattern: str, sampling: str, page: int, chunk: int, with_draft: bool
) -> None:
    script = Script(PROMPTS[sampling] + text(sampling), size, pattern) if size > 1 else None
    engine = make_engine(size, page, chunk, script, with_draft)
    sequence = make_sequence(sampling)
    list(engine.run(sequence))
    check_against_script(sequence, sampling, size, pattern if size > 1 else None)


@pytest.mark.parametrize(
    ("size", "sampling", "page", "chunk"),
    [
        (2, "greedy", 3, 2),
        (16, "greedy", 64, 512),
        (8, "plain", 1, 7),
        (4, "top_k", 4, 1),
        (8, "top_p", 16, 16),
        (16, "all", 5, 3),
    ],
)
def test_the_random_drafter_itself(size: int, sampling: str, page: int, chunk: int) -> None:
    sequence = make_sequence(sampling)
    list(make_engine(size, page, chunk).run(sequence))
    assert sequence.token_ids == text(sampling)[:NEW]
    metrics = sequence.metrics
    assert metrics.proposed == metrics.cycles * (size - 1)
    assert NEW == 1 + metrics.decoded_tokens
    # every cycle but the last emits what it accepted and one more
    assert metrics.accepted + metrics.cycles - metrics.decoded_tokens in (0, 1)


@pytest.mark.parametrize("sampling", ["greedy", "top_p"])
@pytest.mark.parametrize("size", [1, 8])
def test_speculation_off_leaves_the_draft_pool_alone(size: int, sampling: str) -> None:
    engine = make_engine(size)
    decoder = engine.runner.steps.decoder
    fill(decoder, 7.0)
    sequence = make_sequence(sampling, speculate=False)
    list(engine.run(sequence))
    check_against_script(sequence, sampling, 1, None)
    assert decoder.draft_pool is not None
    assert (decoder.draft_pool.rows[:, :-1] == 7.0).all()


@pytest.mark.parametrize("size", [1, 8, 16])
@pytest.mark.parametrize("pattern", ["right", "third wrong", "random"])
def test_unwritten_places_never_count(size: int, pattern: str) -> None:
    script = Script(PROMPTS["plain"] + text("plain"), size, pattern) if size > 1 else None
    sequence = make_sequence("plain")
    list(make_engine(size, 5, 4, script, poison=True).run(sequence))
    check_against_script(sequence, "plain", size, pattern if size > 1 else None)


@pytest.mark.parametrize("sampling", ["greedy", "all"])
def test_the_drafter_sees_no_unwritten_place(sampling: str) -> None:
    """Its proposals, too, are those of clean pools: NaN would be token 0 everywhere."""
    runs = []
    for poison in (False, True):
        engine = make_engine(8, 5, 4, poison=poison)
        sequence, seen = make_sequence(sampling), []
        for _ in engine.run(sequence):
            batch = torch.tensor([sequence.slot])
            sampler = "greedy" if sampling == "greedy" else "sampled"
            if sequence.finish_reason:
                break
            engine.reserve(sequence, len(sequence) + 8)
            facts = Facts(8, sampler, True, len(sequence) + 8)
            seen += draft_step(engine.runner.steps.decoder, batch, facts).tolist()
        runs.append(seen)
    assert runs[0] == runs[1]
    assert len({token for block in runs[0] for token in block}) > 10


# ---------------------------------------------------------------------- what the pools hold


@torch.no_grad()
def fresh_rows(ids: Ids[int]) -> tuple[Tensor, Tensor]:
    """K/V of all `ids` in one uncached forward, and of one injection of its features."""
    positions = torch.arange(len(ids))
    seen, injected = kit.Kept(), kit.Kept()
    _, features = judge()(torch.tensor(ids), positions, seen, draft().config.target_layer_ids)
    draft().inject(features, positions, injected)
    return tuple(torch.stack([*kept.rows.values()]) for kept in (seen, injected))


def changed(before: Tensor, pool: KVPool) -> set[int]:
    """Places (page * P + offset) whose rows differ from `before`."""
    same = (before == pool.rows) | (before.isnan() & pool.rows.isnan())
    return set((~same.flatten(3).all(-1)).any(0).flatten().nonzero()[:, 0].tolist())


def check_pools(decoder: Decoder, slot: int, ids: Ids[int], tapped: bool = True) -> None:
    """Both pools hold the rows of `ids`, by the slot's page table."""
    table = decoder.state.page_table[slot : slot + 1]
    fresh = fresh_rows(ids)
    for pool, rows in zip((decoder.target_pool, decoder.draft_pool), fresh, strict=True):
        if pool is None or (pool is decoder.draft_pool and not tapped):
            continue
        index = row_index(table, torch.arange(len(ids))[None], pool.page_size)[0]
        held = pool.rows.flatten(1, 2)[:, index]
        torch.testing.assert_close(held, rows, rtol=0, atol=1e-10)


@pytest.mark.parametrize("pattern", [*PATTERNS, None])
@pytest.mark.parametrize(("size", "chunk", "page"), [(4, 1, 3), (8, 5, 4), (16, 512, 64)])
def test_pools_hold_fresh_rows(pattern: str | None, size: int, chunk: int, page: int) -> None:
    """At every step: refused rows, blocks and chunk borders leave nothing behind below `len`."""
    prompt = PROMPTS["plain"]
    script = Script(prompt + text("plain"), size, pattern) if pattern else None
    engine = make_engine(size, page, chunk, script, poison=True)
    sequence = make_sequence("plain", new=16)
    for step, _ in enumerate(engine.run(sequence)):
        ids = (prompt + sequence.token_ids)[:-1]
        slot = slot_of(engine, sequence)
        assert engine.runner.steps.decoder.state.len[slot] == len(ids)
        if step < 4 or sequence.finish_reason:
            check_pools(engine.runner.steps.decoder, slot, ids)
    assert sequence.token_ids == text("plain")[:16]


def slot_of(engine: Alone, sequence: Sequence) -> int:
    """The slot of a request, or the one that it has just given back: its row is still there."""
    return sequence.slot if sequence.slot >= 0 else engine.scheduler._slots[-1]


def test_the_prefill_chunks_hold_fresh_rows() -> None:
    prompt = PROMPTS["top_p"]
    for chunk in (1, 2, 5, 22, 23):
        engine = make_engine(8, 4, chunk, poison=True)
        sequence = make_sequence("top_p", new=1)
        for _ in engine.run(sequence):
            check_pools(engine.runner.steps.decoder, slot_of(engine, sequence), prompt)
        assert sequence.token_ids == text("top_p")[:1]


@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize("start", [0, 8])
@pytest.mark.parametrize("length", [9, 16, 23])
def test_a_prompt_in_one_shape(length: int, start: int, speculate: bool) -> None:
    """`prompt_step` is `prefill_step`: record and state, K/V below `len`, nobody's pages."""
    prompt, size, pages, ends = PROMPTS["top_p"][:length], 16, [5, 2, 7, 3, 9, 4, 8, 1, 6, 10], []
    facts, slots = Facts(1, "greedy", speculate, 40), torch.tensor([1])
    for fixed in (False, True):
        decoder = make_engine(size, 4, poison=True).runner.steps.decoder
        state = decoder.state
        kit.admit(state, 1, prompt, SamplingParams(), budget=9, draft_limit=LIMIT, pages=pages)
        if start:
            kit.prefill(decoder, [Span(1, 0, start, last=False)], facts)
        before = [pool.rows.clone() for pool in (decoder.target_pool, decoder.draft_pool)]
        if fixed:
            rows = -(-(length - start) // size) * size
            result = prompt_step(decoder, slots, torch.tensor([start]), rows, facts)
            own = {*pages[start // 4 : -(-(length + size) // 4)]}
            for old, pool in zip(before, (decoder.target_pool, decoder.draft_pool), strict=True):
                assert {place // 4 for place in changed(old, pool)} <= own
        else:
            result = kit.prefill(decoder, [Span(1, start, length, last=True)], facts)
        check_pools(decoder, 1, prompt, tapped=speculate)
        ends.append((result.record, *(v for v in vars(state).values() if v is not None)))
    assert all(a.equal(b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("stale", [0, 3, 60])
def test_a_prompt_whose_admission_failed(stale: int) -> None:
    """Its slot says what another request left there: nothing comes of the step, and it ends."""
    decoder = make_engine(16, 4).runner.steps.decoder
    decoder.state.len[1] = stale
    decoder.state.forget([1])
    facts = Facts(1, "greedy", True, 40)
    result = prompt_step(decoder, torch.tensor([1]), torch.tensor([20]), 16, facts)
    assert result.record[0, EMITTED] == 0
