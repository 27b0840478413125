"""From launched steps to what a reader gets: records, then text, stop strings, counts."""

from collections.abc import Callable
from collections.abc import Sequence as Ids
from dataclasses import dataclass

from nanodflash.decoding.plan import StepPlan
from nanodflash.engine.sequence import Chunk, Sequence, TokenLogprobs

Record = Ids[int]
Logprobs = Callable[[str, int, int], list[TokenLogprobs]]


@dataclass
class Launched:
    """A plan and the sequences behind its slots, until it is committed."""

    plan: StepPlan
    spans: list[Sequence]
    rows: list[Sequence]


@dataclass(slots=True)
class Committed:
    """A record whose text is not made yet.

    Attributes:
        width: rows that were verified; None for the first token, which belongs to no cycle.
        start: length before it.
        now:   host clock when it was committed.
    """

    sequence: Sequence
    ids: Ids[int]
    accepted: int
    finish_reason: str | None
    logprobs: list[TokenLogprobs] | None
    width: int | None
    start: int
    now: float


def show(one: Committed, draft_limit: int) -> Chunk | Exception:
    """The chunk of a record, or what its tokenizer raised: the others live on.

    Args:
        draft_limit: first position at which proposals are not counted.
    """
    sequence, metrics = one.sequence, one.sequence.metrics
    try:
        chunk = sequence.show(one.ids, one.accepted, one.finish_reason, one.logprobs)
    except Exception as error:
        del sequence.token_ids[len(sequence.token_ids) - len(one.ids) :]  # nobody has seen them
        return error
    kept = len(chunk.token_ids)
    if one.width is None:
        metrics.prompt_tokens = len(sequence.prompt)
        metrics.prefill_seconds = one.now - sequence.started
    else:
        proposed = max(0, min(one.width - 1, draft_limit - one.start - 1))
        metrics.count_cycle(kept, min(one.accepted, kept), proposed)
        metrics.decode_seconds += one.now - sequence.latest
    sequence.latest = one.now
    return chunk


def aborted(sequence: Sequence) -> Chunk | Exception:
    """The last chunk of a request that is ended from outside, or what its tokenizer raised."""
    try:
        return sequence.show([], 0, "abort")
    except Exception as error:
        return error
