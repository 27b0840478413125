"""How many rows of a block the target verifies: decided from what steps cost and what they keep.

A cycle of width W emits 1 + a_1 + ... + a_(W-1) tokens, where a_i is the share of cycles that keep
the proposal at block position i. It costs next to nothing more than a narrow one while the weights
are what is read, and in proportion to W once the batch makes it arithmetic. So the width with the
most tokens a second is a fact of the batch size; it is measured for each, and again now and then.
"""

from collections import Counter
from collections.abc import Iterable

TRIES = 3  # steps of each width, before they are compared; the first, which warms up, counts not
AGAIN = 256  # choices at a batch size, after which a width that was not chosen is tried once more
FORGET = 0.9  # of a mean, what the next step leaves of it
DECAY = 0.999  # likewise of the counts of kept proposals


def bucket(rows: int) -> int:
    """Steps of these sizes are one to the policy, and one graph: 1, 2, 4, 8, then every eighth."""
    return 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8


class VerifyWidth:
    """Chooses the width of steps. Owned by the bookkeeping side.

    Args:
        block_size: S.
        wanted:     a fixed width; None chooses among a full block, half of it, and 1.
    """

    def __init__(self, block_size: int, wanted: int | None) -> None:
        widths = (block_size, -(-block_size // 2), 1) if wanted is None else (wanted,)
        self.widths = tuple(dict.fromkeys(widths))
        self._seconds: dict[tuple[int, int], float] = {}  # batch size, width: mean of a cycle
        self._tries: Counter[tuple[int, int]] = Counter()  # steps that were chosen so
        self._choices: Counter[int] = Counter()  # at a batch size
        self._reached = [0.0] * block_size  # cycles that kept the proposal at a block position
        self._verified = [0.0] * block_size  # cycles that verified it

    def choose(self, rows: int) -> int:
        """The width of a step with so many rows."""
        if len(self.widths) == 1 or not rows:
            return self.widths[0]
        size = bucket(rows)
        tries = {width: self._tries[size, width] for width in self.widths}
        fresh = [width for width in self.widths if tries[width] < TRIES]
        self._choices[size] += 1
        if fresh:
            width = fresh[0]
        elif self._choices[size] % AGAIN == 0:
            width = min(self.widths, key=lambda width: tries[width])
        else:
            width = max(self.widths, key=lambda width: self._worth(size, width))
        self._tries[size, width] += 1
        return width

    def _worth(self, size: int, width: int) -> float:
        """Tokens a second, and infinite for what is launched and not measured yet."""
        seconds = self._seconds.get((size, width))
        return self.emitted(width) / seconds if seconds else float("inf")

    def emitted(self, width: int) -> float:
        """Tokens a cycle of this width emits, by what was kept so far."""
        shares = zip(self._reached[1:width], self._verified[1:width], strict=True)
        return 1 + sum(kept / made for kept, made in shares if made)

    def count(self, rows: int, width: int, seconds: float, accepted: Iterable[int]) -> None:
        """Learn from a step: what its cycle took, and the proposals that each row kept."""
        if len(self.widths) == 1:
            return
        key = bucket(rows), width
        before = self._seconds.get(key)
        if before is None:  # warmed up: compiled, captured
            self._seconds[key] = 0.0
        elif not before:
            self._seconds[key] = seconds
        else:  # an outlier is somebody else's: a pause, a compilation
            self._seconds[key] += (1 - FORGET) * (min(seconds, 2 * before) - before)
        counts = Counter(accepted)
        keep, reached = DECAY ** counts.total(), 0
        for place in range(width - 1, 0, -1):
            reached += counts[place]
            self._verified[place] = keep * self._verified[place] + counts.total()
            self._reached[place] = keep * self._reached[place] + reached
