"""Real scheduler, pages, runner, packets and ring; no thread: a seed says who is next.

NANODFLASH_INTERLEAVINGS sets the number of schedules; a failure names its seed, and
`manual.interleave(seed)` runs that one.
"""

from collections import Counter

import pytest

from manual import SCHEDULES, interleave

PARTS = 10


@pytest.mark.parametrize("part", range(PARTS))
def test_interleavings(part: int) -> None:
    """Whoever is next, every request gives what it would alone, and nothing is lost."""
    seen: Counter[str] = Counter()
    for seed in range(part, SCHEDULES, PARTS):
        seen += interleave(seed)
    wanted = {"preempted", "cached", "failed", "surplus", "stop", "length", "abort"}
    assert SCHEDULES < 1000 or wanted <= seen.keys(), f"too tame: {seen}"
