"""What is counted of a request, and the figures made of it.

One word each (design: words): `num_emitted` is a cycle's tokens, tau its mean over all cycles,
`acceptance_rate` the accepted share of the proposals. The first token is prefill's and belongs
to no cycle: tokens = 1 + the sum of `num_emitted`.
"""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol


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


class Timing(Protocol):
    """When a step ran: what `runner.Results` says of it, seconds on the device's clock."""

    @property
    def rows(self) -> list[list[int]]:
        """Records of its cycle."""
        ...

    @property
    def began(self) -> float:
        """Its begin."""
        ...

    @property
    def ended(self) -> float:
        """Its end."""
        ...

    @property
    def seconds(self) -> dict[str, float]:
        """Of each part."""
        ...


@dataclass
class EngineMetrics:
    """What is counted of an engine, all requests together.

    Attributes:
        steps:         committed.
        rows:          that took part in their cycles, surplus ones included.
        busy_seconds:  that the device worked.
        idle_seconds:  that it waited for the host between two steps while there was work.
        slack_seconds: that the host waited for the device.
        host_seconds:  CPU time of the bookkeeping thread.
        surplus:       rows of cycles that ran past the end of their request: launched before the
                       host knew of it.
        launched:      steps on their way, the new one included -> how often a plan made it so many.
        seconds:       of each part of the steps.
    """

    steps: int = 0
    rows: int = 0
    busy_seconds: float = 0.0
    idle_seconds: float = 0.0
    slack_seconds: float = 0.0
    host_seconds: float = 0.0
    surplus: int = 0
    launched: Counter[int] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)

    def count_step(self, step: Timing, before: float, waited: float, surplus: int) -> None:
        """Count one step; called by the bookkeeping thread.

        Args:
            before:  when the device ended the step before it; 0 where it had nothing to do since.
            waited:  seconds that the host waited for this one.
            surplus: rows past an end, ever since.
        """
        self.steps += 1
        self.rows += len(step.rows)
        self.host_seconds = time.thread_time()
        self.busy_seconds += step.ended - step.began
        self.idle_seconds += max(0.0, step.began - before) if before else 0.0
        self.slack_seconds += waited
        self.surplus = surplus
        for part, seconds in step.seconds.items():
            self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    @property
    def idle_share(self) -> float:
        """Share of the time that the device waited for the host; 0 before the first step."""
        total = self.busy_seconds + self.idle_seconds
        return self.idle_seconds / total if total else 0.0

    def __sub__(self, before: "EngineMetrics") -> "EngineMetrics":
        """What came after a copy of these was taken."""
        return EngineMetrics(
            self.steps - before.steps,
            self.rows - before.rows,
            self.busy_seconds - before.busy_seconds,
            self.idle_seconds - before.idle_seconds,
            self.slack_seconds - before.slack_seconds,
            self.host_seconds - before.host_seconds,
            self.surplus - before.surplus,
            self.launched - before.launched,
            {part: s - before.seconds.get(part, 0.0) for part, s in self.seconds.items()},
        )

    def copy(self) -> "EngineMetrics":
        """These, as they are now."""
        return self - EngineMetrics()

    def as_dict(self) -> dict[str, object]:
        """All counts and figures, for JSON; milliseconds a step."""
        steps = max(self.steps, 1)
        return {
            "steps": self.steps,
            "rows": self.rows,
            "idle_share": self.idle_share,
            "step_ms": 1e3 * self.busy_seconds / steps,
            "slack_ms": 1e3 * self.slack_seconds / steps,
            "host_ms": 1e3 * self.host_seconds / steps,
            "surplus_rows": self.surplus,
            "launched": {str(n): self.launched[n] for n in sorted(self.launched)},
            "part_ms": {part: 1e3 * self.seconds[part] / steps for part in self.seconds},
        }


def _total(counts: Counter[int]) -> int:
    return sum(n * count for n, count in counts.items())


def _reaching(counts: Counter[int]) -> list[int]:
    """How many reach 1, 2, ... up to the largest."""
    return [
        sum(count for n, count in counts.items() if n >= place)
        for place in range(1, max(counts, default=0) + 1)
    ]
