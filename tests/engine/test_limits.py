"""The drafter's reach, the model's length, the pool: met exactly, never passed."""

from typing import Any

import pytest

from nanodflash import LLM, SamplingParams

REACH = 64


def prompt(length: int) -> list[int]:
    return [(11 * i + length) % 320 for i in range(length)]


def new(count: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=count)


@pytest.fixture(scope="module")
def short(pair: Any) -> Any:
    """A drafter with positions below 64 only; the target has 256."""
    return pair.variant(pair.draft, "short", max_position_embeddings=REACH)


@pytest.mark.parametrize(
    ("length", "params"),
    [
        (50, new(60)),
        (62, new(9)),
        (63, new(9)),
        (64, new(9)),
        (70, new(30)),
        (50, SamplingParams(max_new_tokens=25, temperature=1.0, seed=2)),
        (70, SamplingParams(max_new_tokens=9, temperature=1.0, seed=2)),
    ],
)
def test_past_the_drafters_reach(
    short: Any, open_llm: Any, expect: Any, length: int, params: SamplingParams
) -> None:
    llm = open_llm(draft=short, page_size=8)
    out = llm.generate(prompt(length), params)[0]
    assert (out.token_ids, out.finish_reason) == expect(prompt(length), params)
    if params.max_new_tokens == 30:
        off = llm.generate(prompt(length), params, speculate=False)[0]
        assert (off.token_ids, off.finish_reason) == (out.token_ids, out.finish_reason)
    if length >= REACH - 1:
        assert out.metrics.proposed == out.metrics.accepted == 0
        assert out.metrics.cycles == params.max_new_tokens - 1


@pytest.mark.parametrize("size", [2, 8, 16])
def test_no_proposal_counts_past_the_reach(
    short: Any, scripted: Any, expect: Any, size: int
) -> None:
    """All proposals are right: those at positions below 64 are kept, and only those made count."""
    engine = scripted(size, draft=short)
    out = engine.run(prompt(50), new(40))
    assert out.token_ids == expect(prompt(50), new(40))[0]
    anchor, end, proposed, cycles = 50, 50 + 39, 0, 0
    while anchor < end:
        made = max(0, min(size - 1, REACH - 1 - anchor))
        anchor, proposed, cycles = anchor + made + 1, proposed + made, cycles + 1
    assert anchor == end, "the last cycles emit one token each"
    assert (out.metrics.cycles, out.metrics.proposed) == (cycles, proposed)
    assert out.metrics.accepted == proposed


@pytest.mark.parametrize("size", [2, 16])
@pytest.mark.parametrize("page", [1, 5, 64])
@pytest.mark.parametrize("pattern", ["right", "wrong"])
def test_the_model_length_is_filled_exactly(
    scripted: Any, expect: Any, no_leak: Any, size: int, page: int, pattern: str
) -> None:
    limit = 45
    engine = scripted(size, max_model_len=limit, page_size=page)
    for length in (1, limit - 18, limit - 2, limit - 1):
        if pattern == "wrong" and length == 1:
            continue  # the same places one by one, slowly
        out = engine.run(prompt(length), new(10**9), pattern)
        assert len(out.token_ids) == limit - length
        assert (out.token_ids, out.finish_reason) == expect(prompt(length), new(limit), limit=limit)
        if pattern == "right":
            assert out.metrics.cycles == -(-(limit - length - 1) // size)
        # no proposal at a position that does not exist
        assert out.metrics.proposed <= out.metrics.cycles * (size - 1)
        assert out.metrics.accepted <= out.metrics.proposed
        no_leak(engine.llm)


def test_the_targets_own_length_is_filled_exactly(scripted: Any, expect: Any) -> None:
    """256 positions and a block of 16 behind them: rotary and page table reach that far."""
    engine = scripted(16, page_size=5)
    assert engine.llm.config.max_model_len == 256
    for length in (240, 255):
        out = engine.run(prompt(length), new(300))
        assert (out.token_ids, out.finish_reason) == expect(prompt(length), new(300))
        assert len(out.token_ids) == 256 - length


@pytest.mark.parametrize("size", [2, 16])
def test_a_prompt_that_leaves_no_room(scripted: Any, no_leak: Any, size: int) -> None:
    limit = 45
    llm = scripted(size, max_model_len=limit, page_size=5).llm
    for length in (limit, limit + 1, 3 * limit):
        with pytest.raises(ValueError, match=f"{length} tokens.*max_model_len {limit}"):
            llm.generate(prompt(length), new(1))
        with pytest.raises(ValueError, match="max_model_len"):
            llm.stream(prompt(length), new(1))
    no_leak(llm)


@pytest.mark.parametrize("page", [4, 64])
def test_a_pool_that_just_fits(open_llm: Any, expect: Any, page: int) -> None:
    """prompt + new + S places are enough, one page less is refused with the counts."""
    length, count, size = 20, 30, 8
    wanted = -(-(length + count + size) // page)
    llm = open_llm(block_size=size, page_size=page, num_pages=wanted + 1)
    assert llm.page_stats().total == wanted
    for _ in range(2):
        out = llm.generate(prompt(length), new(count))[0]
        assert out.token_ids == expect(prompt(length), new(count))[0]
    if wanted > 1:
        small = open_llm(block_size=size, page_size=page, num_pages=wanted)
        told = rf"needs {wanted} pages \(prompt {length}, new tokens {count}\).*has {wanted - 1}"
        with pytest.raises(ValueError, match=told):
            small.generate(prompt(length), new(count))
        out = small.generate(prompt(length), new(count - page))[0]
        assert out.token_ids == expect(prompt(length), new(count - page))[0]


def test_a_pool_that_others_hold(open_llm: Any, expect: Any, no_leak: Any) -> None:
    """A request that finds no pages waits for those before it."""
    llm = open_llm(block_size=8, page_size=4, num_pages=20)
    first = llm.stream(prompt(40), new(20))
    head = [*next(first).token_ids]
    (second,) = llm.generate(prompt(30), new(30))
    assert second.token_ids == expect(prompt(30), new(30))[0]
    rest = [token for chunk in first for token in chunk.token_ids]
    assert head + rest == expect(prompt(40), new(20))[0]
    no_leak(llm)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_model_len": 257}, "max_model_len"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"max_model_len": 64.0}, "max_model_len"),
        ({"page_size": 0}, "page_size"),
        ({"page_size": True}, "page_size"),
        ({"num_pages": 1}, "num_pages"),
        ({"num_pages": "9"}, "num_pages"),
        ({"block_size": 17}, "block_size"),
        ({"block_size": 1}, "block_size"),
        ({"block_size": 2.0}, "block_size"),
    ],
)
def test_sizes_that_are_refused(pair: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        LLM(pair.target, pair.draft, **options)
