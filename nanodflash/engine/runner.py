"""Launches plans: a ring of host buffers, one stream, tickets.

A step is: copy the plan in, do it, copy the results out. Nothing here waits for the device but
`wait` and `results`. What does a step's work is a `Steps`: the models (`steps.py`), or a stand-in.

Who owns a ring slot: the launching side from `launch` on, which hands it to the stream; the
waiting side once the step's event has fired; nobody again after `results`.
"""

from collections.abc import Callable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from nanodflash.config import MAX_LOGPROBS, EngineConfig
from nanodflash.decoding.packet import pack
from nanodflash.decoding.plan import RECORD, StepPlan
from nanodflash.engine.sequence import TokenLogprobs
from nanodflash.engine.streams import Event, Stream

DEPTH = 2  # steps launched and not committed, at most
BITS = 1 + 2 * MAX_LOGPROBS  # of a token's logprobs: the chosen one's, the likeliest, their ids
Mark = Callable[[str], None]


class Steps(Protocol):
    """What does the work of steps. Every method is called where the stream's work is done."""

    device: torch.device

    def run(self, plan: StepPlan, sections: Ids[Tensor], result: Tensor, mark: Mark) -> None:
        """Do one step.

        Args:
            sections: of `decoding.packet`, on the device; valid for this step only.
            result:   int64, to be filled: records of the finals, of the rows, their logprobs.
            mark:     called with the name of a part when it ends.
        """
        ...

    def forget(self, slots: Ids[int]) -> None:
        """A step that named these slots failed: steps behind it must not touch what is others'."""
        ...


@dataclass(frozen=True)
class Results:
    """What a step gave, on the host.

    Attributes:
        finals, rows: records (columns of `plan`, then W ids) of final chunks and of rows.
    """

    finals: list[list[int]]
    rows: list[list[int]]
    bits: np.ndarray

    def logprobs(self, part: str, place: int, count: int) -> list[TokenLogprobs]:
        """Of all W tokens of one record, chosen and the `count` likeliest.

        Args:
            part: "finals" or "rows".
        """
        width = len(self.rows[0]) - RECORD if self.rows else 1
        first = place if part == "finals" else len(self.finals) + place * width
        found = []
        for row in self.bits[first : first + (1 if part == "finals" else width)]:
            chosen, *values = row[: 1 + count].view(np.float64).tolist()
            ids = row[1 + MAX_LOGPROBS : 1 + MAX_LOGPROBS + count].tolist()
            found.append(TokenLogprobs(chosen, list(zip(ids, values, strict=True))))
        return found


@dataclass
class RingSlot:
    """Host buffers of one step, pinned where that means something."""

    packet: Tensor
    result: Tensor


@dataclass
class Ticket:
    """A launched step; the waiting side's from the moment it is handed on.

    Attributes:
        marks: name and end of each part but the last; the first is the begin of the step.
        done:  the end of the copy out; `copied` and `worked` are those of the copy in and of the
               work, kept for what they may raise.
        error: what the step raised, known once `done` has fired.
    """

    plan: StepPlan
    slot: RingSlot
    done: Event | None = None
    copied: Event | None = None
    worked: Event | None = None
    marks: list[tuple[str, Event]] = field(default_factory=list)
    error: BaseException | None = None

    def times(self) -> list[tuple[str, float]]:
        """Name and end of each part behind the begin, once the step is done; also of one that
        failed. Seconds on the device's clock.
        """
        assert self.done is not None
        return [(name, mark.time) for name, mark in [*self.marks, ("copy out", self.done)]]


class Runner:
    """Owns the stream, the ring and the device's end of it. One thread launches, one waits.

    Args:
        make_steps: loads what does the work, given the stream; called where its work is done.
    """

    def __init__(
        self, make_steps: Callable[[Stream], Steps], stream: Stream, config: EngineConfig
    ) -> None:
        self.stream, self.config = stream, config
        try:
            self._open(make_steps)
        except BaseException:
            stream.close()
            raise

    def _open(self, make_steps: Callable[[Stream], Steps]) -> None:
        stream, config = self.stream, self.config
        self.steps: Any = stream.call(lambda: make_steps(stream))
        widest = config.max_seqs * max(RECORD + 1 + BITS, RECORD + config.block_size * (1 + BITS))
        # One more than can be launched: a slot is written again only behind its step's event.
        self._free: SimpleQueue[RingSlot] = SimpleQueue()
        for _ in range(DEPTH + 1):
            self._free.put(RingSlot(stream.pinned(1024), stream.pinned(widest)))
        self._packet, self._result = stream.call(
            lambda: [
                torch.zeros(size, dtype=torch.int64, device=self.steps.device)
                for size in (1024, widest)
            ]
        )

    def launch(self, plan: StepPlan) -> Ticket:
        """Hand a step to the stream. Whatever its work raises comes out of `results`."""
        ticket = Ticket(plan, self._free.get_nowait())
        named = [*(span.slot for span in plan.spans), *plan.rows]
        try:
            sections = pack(plan, self.config.pages_per_seq)
        except Exception as error:
            ticket.error = error
            ticket.done = self.stream.submit(lambda: self.steps.forget(named))
            return ticket
        sizes = [len(section) for section in sections]
        mark: Mark = lambda name: ticket.marks.append((name, self.stream.mark()))  # noqa: E731
        ticket.copied = self._copy_in(ticket.slot, np.concatenate(sections), mark)
        count = sum(_result_sizes(plan))

        def work() -> None:
            try:
                parts = self._packet[: sum(sizes)].split(sizes)
                self.steps.run(plan, parts, self._result[:count], mark)
            except BaseException as error:  # also what a caller's proposer raises
                ticket.error = _told(error, plan)
                self.steps.forget(named)
                mark("failed")

        ticket.worked = self.stream.submit(work)
        # In the stream, and before the next step writes the result again.
        ticket.done = self.stream.copy(ticket.slot.result[:count], self._result[:count])
        return ticket

    def _copy_in(self, slot: RingSlot, packet: np.ndarray, mark: Mark) -> Event:
        size = len(packet)
        if size > len(slot.packet):  # long prompts; never in the steady state
            slot.packet = self.stream.pinned(2 * size)
        source = slot.packet[:size]
        source.numpy()[:] = packet

        def work() -> None:
            mark("begin")
            if size > len(self._packet):
                self._packet = self._packet.new_zeros(2 * size)
            self._packet[:size].copy_(source, non_blocking=True)
            mark("copy in")

        return self.stream.submit(work)

    def wait(self, ticket: Ticket, timeout: float | None = None) -> None:
        """Wait for a step, at most so many seconds for each of its events. Raises what is wrong
        with the device; what the step's own work raised it leaves to `results`.
        """
        for event in (ticket.done, ticket.copied, ticket.worked):  # behind the first all are past
            if event is not None:
                event.wait(timeout)

    def results(self, ticket: Ticket, timeout: float | None = None) -> Results:
        """Wait for a step and read what it gave; its ring slot is free again.

        Raises:
            BaseException: `ticket.error`, where the step's own work raised it.
        """
        self.wait(ticket, timeout)
        plan, (head, body, logprobs) = ticket.plan, _result_sizes(ticket.plan)
        flat = ticket.slot.result.numpy()[: head + body + logprobs].copy()
        self._free.put(ticket.slot)
        if ticket.error is not None:
            raise ticket.error
        return Results(
            flat[:head].reshape(-1, RECORD + 1).tolist(),
            flat[head : head + body].reshape(-1, RECORD + plan.facts.width).tolist(),
            flat[head + body :].reshape(-1, BITS),
        )

    def close(self) -> None:
        """Wait for what is launched, and end the stream."""
        self.stream.close()


def _told(error: BaseException, plan: StepPlan) -> BaseException:
    """What a step raised; of memory that ran out, what to do."""
    if not isinstance(error, torch.OutOfMemoryError):
        return error
    tokens = sum(span.stop - span.start for span in plan.spans)
    told = MemoryError(
        f"the device ran out of memory in a step of {len(plan.rows)} blocks and {tokens} prompt "
        "tokens: lower gpu_memory_utilization, max_seqs or max_prefill"
    )
    told.__cause__ = error
    return told


def _result_sizes(plan: StepPlan) -> tuple[int, int, int]:
    """int64s of the finals' records, of the rows', of all logprobs."""
    finals, rows = sum(span.last and not span.resumed for span in plan.spans), len(plan.rows)
    width = plan.facts.width
    tokens = (finals + rows * width) if plan.facts.sampler == "full" else 0
    return finals * (RECORD + 1), rows * (RECORD + width), tokens * BITS
