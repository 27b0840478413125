"""What the host tells a step, and what a step tells the host. No torch here.

A plan names slots, never requests; a record carries the epoch of the slot's request, so that a
late one is recognised.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from nanodflash.config import SamplingParams

Sampler = Literal["greedy", "sampled", "full"]

# Columns of a result record; the W ids of the row follow.
EMITTED, ACCEPTED, RAW_ACCEPTED, FINISH, LENGTH, EPOCH, RECORD = range(7)


@dataclass(frozen=True)
class Facts:
    """What the host knows of a step and what is baked into it: the key of a captured graph.

    Attributes:
        width:     W, rows the target verifies a request: S, or 1 when nothing is drafted.
        sampler:   "greedy" when every row is at temperature 0, "full" when one asks for
                   penalties, bias, a minimum or logprobs.
        speculate: draft, tap and inject; otherwise the target alone, which leaves no draft rows.
        kv_bound:  upper bound of len + S over the rows, for the reference ops.
    """

    width: int
    sampler: Sampler
    speculate: bool
    kv_bound: int


class Span(NamedTuple):
    """A chunk of a prompt: its tokens `start:stop`.

    `last` when the prompt ends with it: then the first token is chosen, or, for a request that is
    `resumed`, the anchor it had is taken up again and nothing is chosen.
    """

    slot: int
    start: int
    stop: int
    last: bool
    resumed: bool = False


@dataclass(frozen=True)
class Admission:
    """A request gets a slot: everything that is per slot on the device.

    Attributes:
        ids:        prompt and what was emitted before a preemption.
        prompt_len: how many of them are the prompt.
        budget:     new tokens still allowed.
        pages:      its first pages; the rest of the row is the dummy page.
    """

    slot: int
    epoch: int
    ids: Sequence[int]
    prompt_len: int
    params: SamplingParams
    budget: int
    seed: int
    stop_ids: Sequence[int]
    draft_limit: int
    pages: Sequence[int]


class PageDelta(NamedTuple):
    """Page ids for a slot's table, from column `first` on."""

    slot: int
    first: int
    pages: list[int]


@dataclass(frozen=True)
class StepPlan:
    """One step: admissions and page deltas first, then prompt chunks, then a cycle."""

    number: int
    facts: Facts
    admissions: list[Admission] = field(default_factory=list)
    deltas: list[PageDelta] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
