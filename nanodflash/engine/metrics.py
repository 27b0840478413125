"""What is counted of a request, and the figures made of it.

One word each (design: words): `num_emitted` is a cycle's tokens, tau its mean over all cycles,
`acceptance_rate` the accepted share of the proposals. The first token is prefill's and belongs
to no cycle: tokens = 1 + the sum of `num_emitted`.
"""

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass
class Metrics:
    """Counts of one request, or of several added up.

    Attributes:
        prompt_tokens:   tokens of the prompt.
        emitted:         `num_emitted` -> cycles that emitted so many.
        kept:            proposals kept -> cycles that kept so many.
        made:            proposals made -> cycles that made so many.
        cached_tokens:   tokens of the prompt that came from the prefix cache.
        preemptions:     times that it lost its pages and was prefilled again.
        prefill_seconds: from the start of the request to its first token.
        decode_seconds:  of all cycles after it.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    emitted: Counter[int] = field(default_factory=Counter)
    kept: Counter[int] = field(default_factory=Counter)
    made: Counter[int] = field(default_factory=Counter)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def count_cycle(self, emitted: int, accepted: int, proposed: int) -> None:
        """Count one cycle: tokens emitted, proposals kept after the cut, proposals made."""
        self.emitted[emitted] += 1
        self.kept[accepted] += 1
        self.made[proposed] += 1

    def __add__(self, other: "Metrics") -> "Metrics":
        return Metrics(
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.preemptions + other.preemptions,
            self.emitted + other.emitted,
            self.kept + other.kept,
            self.made + other.made,
            self.prefill_seconds + other.prefill_seconds,
            self.decode_seconds + other.decode_seconds,
        )

    @property
    def cycles(self) -> int:
        """Rounds of draft, verify, commit; one a token without a drafter."""
        return sum(self.emitted.values())

    @property
    def proposed(self) -> int:
        """Proposals in all cycles."""
        return _total(self.made)

    @property
    def accepted(self) -> int:
        """Proposals that were kept."""
        return _total(self.kept)

    @property
    def accepted_at(self) -> list[int]:
        """Cycles that kept the proposal at each block position, from position 1."""
        return _reaching(self.kept)

    @property
    def proposed_at(self) -> list[int]:
        """Cycles that proposed there."""
        return _reaching(self.made)

    @property
    def decoded_tokens(self) -> int:
        """Tokens that cycles emitted: all but the first of a request."""
        return _total(self.emitted)

    @property
    def tau(self) -> float:
        """Acceptance length: mean `num_emitted` over all cycles; 0 before the first."""
        return self.decoded_tokens / self.cycles if self.cycles else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the proposals; 0 without any."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of the proposals kept at each block position, from position 1."""
        padded = self.accepted_at + [0] * (len(self.proposed_at) - len(self.accepted_at))
        return [kept / made for kept, made in zip(padded, self.proposed_at, strict=True)]

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed, prefill and its token left out."""
        return self.decoded_tokens / self.decode_seconds if self.decode_seconds else 0.0

    def as_dict(self) -> dict[str, object]:
        """All counts and figures, for JSON."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "preemptions": self.preemptions,
            "cycles": self.cycles,
            "proposed": self.proposed,
            "accepted": self.accepted,
            "tau": self.tau,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_per_position": self.acceptance_per_position,
            "emitted_histogram": {str(n): self.emitted[n] for n in sorted(self.emitted)},
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass
class EngineMetrics:
    """What is counted of an engine, all requests together. Any thread may copy it at any time.

    Attributes:
        steps:         that have ended, failed ones included.
        rows:          that took part in their cycles, surplus ones included.
        busy_seconds:  that the device worked.
        idle_seconds:  that it waited for the host between two steps while there was work.
        slack_seconds: that the host waited for the device; reading what it gave is not in it.
        host_seconds:  CPU time of the bookkeeping thread.
        surplus:       rows of cycles that ran past the end of their request: launched before the
                       host knew of it.
        waiting:       requests that waited while a step ran, summed over the steps.
        running:       requests that ran meanwhile, summed likewise.
        launched:      steps on their way, the new one included -> how often a plan made it so many.
        seconds:       of each part of the steps.
        widths:        rows of a block that were verified -> steps of so many.
    """

    steps: int = 0
    rows: int = 0
    busy_seconds: float = 0.0
    idle_seconds: float = 0.0
    slack_seconds: float = 0.0
    host_seconds: float = 0.0
    surplus: int = 0
    waiting: int = 0
    running: int = 0
    launched: Counter[int] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    widths: Counter[int] = field(default_factory=Counter)
    _lock: threading.Lock = field(
        default_factory=threading.Lock, init=False, repr=False, compare=False
    )

    def count_launch(self, launched: int) -> None:
        """Count one plan that made so many steps be on their way."""
        with self._lock:
            self.launched[launched] += 1

    def count_width(self, width: int) -> None:
        """Count one cycle with proposals that verified so much of its blocks."""
        with self._lock:
            self.widths[width] += 1

    def count_step(
        self,
        times: list[tuple[str, float]],
        rows: int,
        before: float,
        waited: float,
        queues: tuple[int, int],
        surplus: int,
    ) -> None:
        """Count one step; called by the bookkeeping thread.

        Args:
            times:   name and end of each part, behind its begin; seconds on the device's clock.
            rows:    of its cycle.
            before:  when the device ended the step before it; 0 where it had nothing to do since.
            waited:  seconds that the host waited for this one.
            queues:  requests that waited and that ran meanwhile.
            surplus: rows past an end, ever since.
        """
        began, ended = times[0][1], times[-1][1]
        with self._lock:
            self.steps += 1
            self.rows += rows
            self.host_seconds = time.thread_time()
            self.busy_seconds += ended - began
            self.idle_seconds += max(0.0, began - before) if before else 0.0
            self.slack_seconds += waited
            self.waiting += queues[0]
            self.running += queues[1]
            self.surplus = surplus
            for (_, begin), (part, end) in pairwise(times):
                self.seconds[part] = self.seconds.get(part, 0.0) + end - begin

    @property
    def idle_share(self) -> float:
        """Share of the time that the device waited for the host; 0 before the first step."""
        total = self.busy_seconds + self.idle_seconds
        return self.idle_seconds / total if total else 0.0

    def __sub__(self, before: "EngineMetrics") -> "EngineMetrics":
        """What came after a copy of these was taken."""
        with self._lock:
            return EngineMetrics(
                self.steps - before.steps,
                self.rows - before.rows,
                self.busy_seconds - before.busy_seconds,
                self.idle_seconds - before.idle_seconds,
                self.slack_seconds - before.slack_seconds,
                self.host_seconds - before.host_seconds,
                self.surplus - before.surplus,
                self.waiting - before.waiting,
                self.running - before.running,
                self.launched - before.launched,
                {part: s - before.seconds.get(part, 0.0) for part, s in self.seconds.items()},
                self.widths - before.widths,
            )

    def copy(self) -> "EngineMetrics":
        """These, as they are now."""
        return self - EngineMetrics()

    def as_dict(self) -> dict[str, object]:
        """All counts and figures, for JSON; milliseconds a step, mean requests in a queue."""
        now = self.copy()
        steps = max(now.steps, 1)
        return {
            "steps": now.steps,
            "rows": now.rows,
            "idle_share": now.idle_share,
            "step_ms": 1e3 * now.busy_seconds / steps,
            "slack_ms": 1e3 * now.slack_seconds / steps,
            "host_ms": 1e3 * now.host_seconds / steps,
            "surplus_rows": now.surplus,
            "waiting": now.waiting / steps,
            "running": now.running / steps,
            "launched": {str(n): now.launched[n] for n in sorted(now.launched)},
            "verify_widths": {str(n): now.widths[n] for n in sorted(now.widths)},
            "part_ms": {part: 1e3 * now.seconds[part] / steps for part in now.seconds},
        }


def _total(counts: Counter[int]) -> int:
    return sum(n * count for n, count in counts.items())


def _reaching(counts: Counter[int]) -> list[int]:
    """How many reach 1, 2, ... up to the largest."""
    return [
        sum(count for n, count in counts.items() if n >= place)
        for place in range(1, max(counts, default=0) + 1)
    ]
