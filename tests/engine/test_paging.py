"""Pages are conserved, nobody's twice, and never page 0."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanodflash.engine.paging import OutOfPages, PagePool

# To allocate so many, or to release a share of what is held, from some place on.
STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.integers(0, 2**16)), max_size=40)


@settings(database=None, deadline=None, max_examples=60)
@given(num_pages=st.integers(2, 40), steps=STEPS)
def test_any_order_of_allocate_and_release(
    num_pages: int, steps: list[tuple[bool, int, int]]
) -> None:
    pool, held = PagePool(num_pages, 4), []
    for take, count, place in steps:
        free = num_pages - 1 - len(held)
        if take and count > free:
            told = f"wanted {count} pages, {free} of {num_pages - 1} are available"
            with pytest.raises(OutOfPages, match=told):
                pool.allocate(count)
        elif take:
            pages = pool.allocate(count)
            assert len(pages) == count
            held += pages
        else:
            turned = held[place % (len(held) + 1) :] + held[: place % (len(held) + 1)]
            pool.release(turned[:count])
            held = turned[count:]
        assert len(set(held)) == len(held)
        assert all(1 <= page < num_pages for page in held)
        stats = pool.stats()
        assert (stats.live, stats.cached, stats.total) == (len(held), 0, num_pages - 1)
        assert stats.free + stats.cached + stats.live == stats.total
    pool.release(held)
    assert sorted(pool.allocate(num_pages - 1)) == [*range(1, num_pages)]


@pytest.mark.parametrize("page", [0, 3, 4, 99, -1])
def test_only_live_pages_can_be_released(page: int) -> None:
    pool = PagePool(5, 4)
    first, second = pool.allocate(2)
    assert {first, second} == {1, 2}
    with pytest.raises(KeyError):
        pool.release([page])
    pool.release([first])
    with pytest.raises(KeyError):
        pool.release([first])
    assert (pool.stats().free, pool.stats().live) == (3, 1)


def test_nothing_is_taken_when_there_is_too_little() -> None:
    pool = PagePool(4, 4)
    with pytest.raises(OutOfPages):
        pool.allocate(4)
    assert pool.allocate(0) == []
    assert len(pool.allocate(3)) == 3
    with pytest.raises(OutOfPages, match="wanted 1 pages, 0 of 3 are available"):
        pool.allocate(1)
