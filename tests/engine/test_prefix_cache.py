"""Pages kept for their contents: whose they are, which go first, and what may be in them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nanodflash.engine.closures as closures
from nanodflash import LLM, SamplingParams
from nanodflash.config import ACTIVE
from nanodflash.decoding.cycle import Decoder
from nanodflash.decoding.plan import Facts
from nanodflash.engine.paging import OutOfPages, PagePool

SIZE = 2
FEW = SamplingParams(max_new_tokens=10)
P = 8  # tokens a page of the engines below


def hold(pool: PagePool, ids: Sequence[int], shares: bool = True) -> list[int]:
    """What a request does: match, allocate the rest, publish every full page."""
    size = pool.page_size
    pages = pool.match(ids) if shares else []
    cached = len(pages)
    pages += pool.allocate(-(-len(ids) // size) - cached)
    for place in range(cached, len(ids) // size if shares else 0):
        before = pages[place - 1] if place else 0
        if not pool.publish(before, ids[place * size : (place + 1) * size], pages[place]):
            break
    pool.check()
    return pages


# ---------------------------------------------------------------------- the pool


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_last_token_is_never_covered(size: int) -> None:
    pool, ids = PagePool(20, size), [*range(4 * size)]
    pages = hold(pool, ids)
    for length in range(1, 4 * size + 1):
        matched = pool.match(ids[:length])
        assert matched == pages[: (length - 1) // size]
        pool.release(matched)
    assert pool.match([*ids, 99]) == pages
    assert pool.match([]) == pool.match([0]) == []
    assert [pool.owners(page) for page in pages] == [2] * 4


def test_a_match_ends_at_the_first_difference() -> None:
    pool = PagePool(20, SIZE)
    pages = hold(pool, [1, 2, 3, 4, 5, 6])
    for ids, count in (
        ([1, 2, 3, 4, 5, 6, 7], 3),
        ([1, 2, 3, 4, 9, 6, 7], 2),
        ([1, 2, 3, 4, 5, 9, 7], 2),
        ([1, 9, 3, 4, 5, 6, 7], 0),
        ([2, 1, 3, 4, 5, 6, 7], 0),
        ([3, 4, 5, 6, 7], 0),
    ):
        assert pool.match(ids) == pages[:count]


def test_equal_content_behind_different_pages() -> None:
    pool = PagePool(20, SIZE)
    one, two = hold(pool, [1, 1, 7, 7, 7, 7, 0]), hold(pool, [2, 2, 7, 7, 7, 7, 0])
    assert not {*one} & {*two}
    assert pool.match([1, 1, 7, 7, 7, 7, 0]) == one[:3]
    assert pool.match([2, 2, 7, 7, 7, 7, 0]) == two[:3]
    assert pool.match([7, 7, 7, 7, 0]) == []


def test_ids_are_compared_not_hashes() -> None:
    """In Python -1 and -2 hash alike, and so do 0 and 2**61 - 1."""
    for a, b in ((-1, -2), (0, 2**61 - 1)):
        assert hash((a, a)) == hash((b, b))
        pool = PagePool(20, SIZE)
        one = hold(pool, [a, a, a, a, 5])
        assert pool.match([b, b, b, b, 5]) == []
        two = hold(pool, [b, b, b, b, 5])
        assert (pool.match([a] * 5), pool.match([b] * 5)) == (one[:2], two[:2])


def test_a_second_page_of_the_same_content_is_refused() -> None:
    pool = PagePool(10, SIZE)
    first, second = pool.allocate(2)
    assert pool.publish(0, [1, 2], first)
    assert not pool.publish(0, [1, 2], second)
    assert not pool.publish(0, [1, 2], first)
    assert pool.publish(first, [1, 2], second)  # content at another place is another key
    (third,) = pool.allocate(1)
    assert not pool.publish(first, (1, 2), third)
    pool.release([first, second])
    pool.release([third])
    assert (pool.stats().cached, pool.stats().free) == (2, 7)
    assert pool.match([1, 2, 1, 2, 0]) == [first, second]
    pool.check()


def test_a_refused_page_is_free_once_released() -> None:
    pool = PagePool(10, SIZE)
    a = pool.allocate(2)
    b = pool.allocate(2)
    assert pool.publish(0, [1, 2], a[0])
    assert not pool.publish(0, [1, 2], b[0])
    pool.release(b)
    assert (pool.stats().free, pool.stats().cached, pool.stats().live) == (7, 0, 2)
    pool.release(a)
    assert (pool.stats().free, pool.stats().cached, pool.stats().live) == (8, 1, 0)


def test_the_least_recently_used_go_first() -> None:
    pool = PagePool(7, SIZE)
    old, new = hold(pool, [1, 1, 2, 2, 3, 3]), hold(pool, [4, 4, 5, 5, 6, 6])
    pool.release(old)
    pool.release(new)
    pool.release(pool.match([1, 1, 2, 2, 0]))  # used again: its first two pages are the newest
    wanted = [old[2], new[2], new[1], new[0], old[1], old[0]]
    assert [pool.allocate(1)[0] for _ in range(6)] == wanted
    assert pool.match([1, 1, 2, 2, 0]) == pool.match([4, 4, 0]) == []
    with pytest.raises(OutOfPages):
        pool.allocate(1)


def test_free_pages_go_before_cached_ones_and_held_ones_never() -> None:
    pool = PagePool(7, SIZE)
    kept, idle = hold(pool, [1, 1, 2, 2]), hold(pool, [3, 3, 4, 4])
    pool.release(idle)
    assert pool.available == 4
    assert not {*pool.allocate(2)} & {*idle, *kept}
    assert pool.allocate(1) == [idle[1]]  # the child first
    assert pool.match([3, 3, 4, 4, 0]) == [idle[0]]
    with pytest.raises(OutOfPages):
        pool.allocate(1)
    assert pool.match([1, 1, 2, 2, 0]) == kept
    pool.check()


def test_a_shared_page_stays_until_the_last_owner_goes() -> None:
    pool = PagePool(10, SIZE)
    a = hold(pool, [1, 1, 2, 2, 3])
    b, c = hold(pool, [1, 1, 2, 2, 4]), hold(pool, [1, 1, 9, 9])
    assert (b[:2], c[:1]) == (a[:2], a[:1])
    assert [pool.owners(page) for page in a] == [3, 2, 1]
    for pages, cached in ((a, 0), (c, 1), (b, 3)):
        pool.release(pages)
        pool.check()
        assert pool.stats().cached == cached
    assert pool.stats().live == 0


def test_check_tells_of_a_lost_page() -> None:
    pool = PagePool(10, SIZE)
    hold(pool, [1, 2, 3])
    pool._owners.popitem()
    with pytest.raises(RuntimeError, match="lost or doubled"):
        pool.check()


@dataclass
class Model:
    """The pool again, by whole contents: a page's content is all ids up to its end."""

    content: dict[int, tuple[int, ...]] = field(default_factory=dict)
    idle: list[int] = field(default_factory=list)  # oldest first

    def match(self, ids: tuple[int, ...]) -> list[int]:
        by = {content: page for page, content in self.content.items()}
        pages = []
        for end in range(SIZE, len(ids), SIZE):
            if ids[:end] not in by:
                break
            pages.append(by[ids[:end]])
        return pages


# A request (its ids, whether it shares), or the end of one of those that run.
TEXT = st.lists(st.integers(0, 1), min_size=1, max_size=11).map(tuple)
OPERATIONS = st.lists(
    st.one_of(st.tuples(TEXT, st.booleans()), st.integers(0, 2**16)), min_size=1, max_size=50
)


@settings(database=None, deadline=None, max_examples=200)
@given(num_pages=st.integers(2, 16), operations=OPERATIONS)
def test_any_order_of_requests(num_pages: int, operations: list[Any]) -> None:
    pool, model = PagePool(num_pages, SIZE), Model()
    running: list[list[int]] = []
    for operation in operations:
        if isinstance(operation, int):
            if running:
                pages = running.pop(operation % len(running))
                pool.release(pages)
                owned = {page for other in running for page in other}
                model.idle += [p for p in reversed(pages) if p in model.content and p not in owned]
        else:
            ids, shares = operation
            cached = pool.match(ids) if shares else []
            assert cached == (model.match(ids) if shares else [])
            assert len(cached) * SIZE < len(ids)
            was, model.idle = model.idle[:], [p for p in model.idle if p not in cached]
            count, free = -(-len(ids) // SIZE) - len(cached), pool.stats().free
            assert pool.available == free + len(model.idle)
            if count > pool.available:
                with pytest.raises(OutOfPages):
                    pool.allocate(count)
                pool.release(cached)
                model.idle += [p for p in reversed(cached) if p in was]
            else:
                fresh = pool.allocate(count)
                evicted = max(count - free, 0)
                assert fresh[count - evicted :] == model.idle[:evicted]  # the oldest, in order
                del model.idle[:evicted]
                for page in fresh:
                    model.content.pop(page, None)
                pages = cached + fresh
                for place in range(len(cached), len(ids) // SIZE if shares else 0):
                    end = (place + 1) * SIZE
                    before = pages[place - 1] if place else 0
                    known = ids[:end] in model.content.values()
                    taken = pool.publish(before, ids[place * SIZE : end], pages[place])
                    assert taken != known
                    if not taken:
                        break
                    model.content[pages[place]] = ids[:end]
                running.append(pages)
        pool.check()
        assert [*pool._idle] == model.idle
        assert {*pool._key_of} == {*model.content}
        for before, _ in pool._key_of.values():  # no child outlives its parent
            assert before == 0 or before in pool._key_of
        for pages in running:
            assert all(sum(p in other for other in running) == pool.owners(p) for p in pages)
    for pages in running:
        pool.release(pages)
    pool.check()
    stats = pool.stats()
    assert (stats.live, stats.cached, stats.free + stats.cached) == (
        0,
        len(model.content),
        num_pages - 1,
    )


# ---------------------------------------------------------------------- the engine


@pytest.fixture
def proposed(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """What every draft step proposed for rows that are alive: a surplus one may come later."""
    seen: list[list[list[int]]] = []

    def draft_step(decoder: Decoder, slots: torch.Tensor, facts: Facts) -> torch.Tensor:
        ids = step(decoder, slots, facts)
        alive = ids[decoder.state.state[slots] == ACTIVE].tolist()
        seen.extend([alive] if alive else [])
        return ids

    step = closures.draft_step
    monkeypatch.setattr(closures, "draft_step", draft_step)
    return seen


@pytest.mark.parametrize("pages", [1, 2, 4])
@pytest.mark.parametrize("extra", [0, 1, -1])
def test_a_prompt_three_times(
    open_llm: Any, expect: Any, proposed: Any, pages: int, extra: int
) -> None:
    """Of whole pages, and a token more or less; the drafter reads the cached pages too."""
    llm = open_llm(block_size=4, page_size=P)
    prompt = [(7 * i + pages) % 300 for i in range(pages * P + extra)]
    runs = []
    for again in range(3):
        proposed.clear()
        (out,) = llm.generate(prompt, FEW)
        assert out.token_ids == expect(prompt, FEW)[0]
        cached = (len(prompt) - 1) // P * P if again else 0
        assert out.metrics.cached_tokens == cached < len(prompt)
        assert out.metrics.prompt_tokens == len(prompt)
        runs.append((out.metrics.emitted, out.metrics.accepted_at, proposed[:]))
    assert runs[0] == runs[1] == runs[2]


def test_whole_pages_at_once(open_llm: Any, expect: Any) -> None:
    """Equal prompts side by side: a page that another published first is not published twice."""
    llm = open_llm(block_size=4, page_size=P)
    prompt = [(5 * i) % 300 for i in range(3 * P)]
    for _ in range(3):
        outs = llm.generate([prompt] * 5, FEW)
        assert {tuple(out.token_ids) for out in outs} == {tuple(expect(prompt, FEW)[0])}
    assert [out.metrics.cached_tokens for out in outs] == [2 * P] * 5


def test_what_was_decoded_is_cached_too(open_llm: Any, expect: Any, proposed: Any) -> None:
    """A conversation goes on: pages filled by cycles serve as well as those of a prompt."""
    prompt = [(3 * i) % 300 for i in range(P + 3)]
    long = SamplingParams(max_new_tokens=3 * P)
    text = [*prompt, *expect(prompt, long)[0], 9, 8]
    cold = open_llm(block_size=4, page_size=P).generate(text, FEW)[0]
    wanted, llm = proposed[:], open_llm(block_size=4, page_size=P)
    llm.generate(prompt, long)
    proposed.clear()
    (warm,) = llm.generate(text, FEW)
    assert warm.metrics.cached_tokens == (len(text) - 3) // P * P > len(prompt)
    assert warm.token_ids == cold.token_ids == expect(text, FEW)[0]
    assert proposed == wanted
    assert (warm.metrics.emitted, warm.metrics.accepted) == (
        cold.metrics.emitted,
        cold.metrics.accepted,
    )


def test_plain_requests_beside_a_drafter_neither_fill_nor_read(
    open_llm: Any, expect: Any, no_leak: Any
) -> None:
    llm, prompt = open_llm(block_size=4, page_size=P), [(11 * i) % 300 for i in range(3 * P + 2)]

    def cached(speculate: bool) -> int:
        (out,) = llm.generate(prompt, FEW, speculate)
        assert out.token_ids == expect(prompt, FEW)[0]
        return out.metrics.cached_tokens

    assert [cached(False) for _ in range(2)] == [0, 0]
    assert llm.page_stats().cached == 0
    assert [cached(True) for _ in range(2)] == [0, 3 * P]
    no_leak(llm)
    kept = llm.page_stats().cached
    assert cached(False) == 0
    no_leak(llm)
    assert llm.page_stats().cached == kept > 0
    assert cached(True) == 3 * P


@pytest.mark.parametrize("speculate", [True, False])
def test_without_a_drafter_all_may_share(pair: Any, expect: Any, speculate: bool) -> None:
    """A proposer or none: no page has draft rows that it could lack."""

    def proposer(tokens: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return tokens.new_zeros(len(tokens), 3)

    prompt = [(11 * i) % 300 for i in range(3 * P + 2)]
    for options in ({}, {"proposer": proposer, "block_size": 4}):
        with LLM(pair.target, None, dtype="fp64", page_size=P, **options) as llm:
            outs = [llm.generate(prompt, FEW, speculate)[0] for _ in range(2)]
        assert [out.metrics.cached_tokens for out in outs] == [0, 3 * P]
        assert [out.token_ids for out in outs] == [expect(prompt, FEW)[0]] * 2


def test_switched_off(open_llm: Any, expect: Any, no_leak: Any) -> None:
    llm = open_llm(block_size=4, page_size=P, prefix_cache=False)
    prompt = [(11 * i) % 300 for i in range(3 * P + 2)]
    for _ in range(3):
        outs = llm.generate([prompt] * 2, FEW)
        assert [out.metrics.cached_tokens for out in outs] == [0, 0]
        assert [out.token_ids for out in outs] == [expect(prompt, FEW)[0]] * 2
        no_leak(llm)
        assert llm.page_stats().cached == 0


def test_eviction_under_a_small_pool(open_llm: Any, expect: Any) -> None:
    """Prompts that share a start, one after another in too few pages for all of them."""
    llm, start = open_llm(block_size=4, page_size=P, num_pages=8), [(7 * i) % 300 for i in range(P)]
    cached = []
    for turn in range(12):
        prompt = [*start, *([turn % 3 + 1] * 2 * P)]
        (out,) = llm.generate(prompt, FEW)
        assert out.token_ids == expect(prompt, FEW)[0]
        cached.append(out.metrics.cached_tokens)
    assert cached[0] == 0
    assert all(count in (P, 2 * P) for count in cached[1:]), cached


def test_an_aborted_request_leaves_only_what_it_committed(open_llm: Any, expect: Any) -> None:
    llm, prompt = open_llm(block_size=4, page_size=P), [(13 * i) % 300 for i in range(2 * P + 1)]
    long = SamplingParams(max_new_tokens=60)
    for count in (1, 3, 6):
        stream = llm.stream([count, *prompt], long)
        taken = [token for _ in range(count) for token in next(stream).token_ids]
        stream.close()
        assert taken == expect([count, *prompt], long)[0][: len(taken)]
        (out,) = llm.generate([count, *prompt], long)
        assert out.token_ids == expect([count, *prompt], long)[0]
        assert out.metrics.cached_tokens == 2 * P
