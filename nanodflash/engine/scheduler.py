"""Who gets what in the next step: plain Python over slots, pages and lengths.

`plan` makes the next step from what the host knows, `commit` takes a step's records, `deliver`
makes texts of them: later, so that the next plan need not wait for it. Several steps may be
launched and not committed; the host then knows lengths only as bounds, and every rule below holds
for bounds. First come, first served: a later request never takes pages
or a slot that an earlier one waits for, and is the first to be preempted.
"""

import bisect
import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Ids

from nanodflash.config import BUDGET, RUNNING, STOP, EngineConfig
from nanodflash.decoding.plan import (
    ACCEPTED,
    EMITTED,
    EPOCH,
    FINISH,
    LENGTH,
    RECORD,
    Admission,
    Facts,
    PageDelta,
    Sampler,
    Span,
    StepPlan,
)
from nanodflash.engine.delivery import Committed, Launched, Logprobs, Record, aborted, show
from nanodflash.engine.paging import PagePool
from nanodflash.engine.sequence import Chunk, Phase, Sequence

FINISH_REASON = {RUNNING: None, STOP: "stop", BUDGET: "length"}
PlannedRows = tuple[list[Sequence], bool, int, int]
SAMPLERS: tuple[Sampler, ...] = ("greedy", "sampled", "full")  # each serves those before it


class Scheduler:
    """Waiting and running requests, their slots and their pages.

    Args:
        draft_limit: first position at which proposals are not counted.
        drafts:      whether rows that speculate share pages with draft rows in them; without a
                     drafter every row may use the prefix cache.
        emit:        called with (sequence, chunk) for every chunk, in order, or with the
                     exception that ended the request.
        width:       rows of a step -> how much of each block the target verifies.
    Attributes:
        surplus: rows of cycles that were launched before the host knew of the end of a request.
    """

    def __init__(
        self,
        config: EngineConfig,
        draft_limit: int,
        drafts: bool,
        emit: Callable[[Sequence, Chunk | BaseException], None],
        width: Callable[[int], int] | None = None,
    ) -> None:
        self.width = width or (lambda rows: config.block_size)
        self.config, self.draft_limit, self.drafts, self.emit = config, draft_limit, drafts, emit
        self.pages = PagePool(config.total_pages, config.page_size)
        self.waiting: list[Sequence] = []  # both in order of arrival
        self.running: list[Sequence] = []
        self.leaving: list[Sequence] = []  # finished, still named by launched steps
        self._slots = list(range(config.max_seqs - 1, -1, -1))
        self._launched: list[Launched] = []
        self._committed: list[Committed] = []
        self.surplus = self._arrivals = self._epochs = self._steps = 0
        self._last_kind = False

    # ------------------------------------------------------------------ requests

    def add(self, sequence: Sequence) -> None:
        """Take a request in line. It must fit the pool alone; `LLM` has checked that."""
        self._arrivals += 1
        sequence.arrival = self._arrivals
        sequence.started = sequence.latest = time.perf_counter()
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence) -> None:
        """End a request wherever it stands; nothing is emitted after the last chunk of this."""
        self.deliver()  # what it was given before comes first
        if sequence.phase is Phase.FINISHED:
            return
        self._finish(sequence, aborted(sequence))

    @property
    def busy(self) -> bool:
        """Whether any request is not finished, or a launched step not committed."""
        return bool(self.waiting or self.running or self._launched or self._committed)

    @property
    def launched(self) -> int:
        """Steps that are planned and not committed."""
        return len(self._launched)

    # ------------------------------------------------------------------ planning

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can be done before a commit."""
        return self._plan_kind(not self._last_kind) or self._plan_kind(self._last_kind)

    def _plan_kind(self, kind: bool) -> StepPlan | None:
        """A step of rows that speculate, or of rows that do not: the two kinds take turns."""
        deltas: list[PageDelta] = []
        rows, short, bound, kept = self._plan_rows(kind, deltas)
        width = self.width(len(rows)) if kind else 1
        # Prompts get what the rows leave of the step's tokens, and never nothing.
        floor = min(self.config.page_size, self.config.max_prefill)
        budget = max(self.config.max_prefill - len(rows) * width, floor)
        admissions: list[Admission] = []
        spans: list[Span] = []
        members: list[Sequence] = []
        for sequence in self.running:
            if sequence.speculate == kind and sequence.phase is Phase.PREFILL and budget:
                budget -= self._plan_span(sequence, budget, spans)
                members.append(sequence)
        draining = any(s.phase is Phase.DRAINING for s in self.running)  # earlier than all waiting
        free = not draining and not short
        while free and budget and self.waiting and self.waiting[0].speculate == kind:
            admission = self._admit(self.waiting[0], kept)
            if admission is None:
                break
            admissions.append(admission)
            budget -= self._plan_span(self.running[-1], budget, spans)
            members.append(self.running[-1])
        if not rows and not spans:
            return None
        self._last_kind = kind
        self._steps += 1
        sampler = max({s.sampler for s in rows + members}, key=SAMPLERS.index)
        facts = Facts(width, sampler, kind, bound)
        slots = [sequence.slot for sequence in rows]
        plan = StepPlan(self._steps, facts, admissions, deltas, spans, slots)
        for sequence in rows + members:
            sequence.inflight += 1
        self._launched.append(Launched(plan, members, rows))
        return plan

    def _upper(self, sequence: Sequence) -> int:
        """Places that the next step may write: every launched step may have emitted a block."""
        size = self.config.block_size
        most = len(sequence.prompt) + sequence.budget
        return min(len(sequence) + sequence.inflight * size, most) + size

    def _plan_rows(self, kind: bool, deltas: list[PageDelta]) -> PlannedRows:
        """Rows of the cycle: every decoding sequence whose next block has its pages.

        Returns:
            The rows; whether one waits for pages (later ones then go on with what they hold, and
            nobody is admitted); the most places that one may write; pages kept for the other kind.
        """
        rows, short, bound, kept, size = [], False, 1, 0, self.config.page_size
        for sequence in list(self.running):
            if sequence.phase is not Phase.DECODE:
                continue
            missing = -(-(upper := self._upper(sequence)) // size) - len(sequence.pages)
            if sequence.speculate != kind:  # it takes them in its turn: not for later ones now
                kept += max(missing, 0)
                continue
            if missing > 0:
                short = short or not self._make_room(sequence, missing + kept)
                if short:
                    continue  # it waits for a commit, and no later one takes the pages
                fresh = self.pages.allocate(missing)
                deltas.append(PageDelta(sequence.slot, len(sequence.pages), fresh))
                sequence.pages += fresh
            first = sequence.pages[len(sequence) // size]  # later ones were never published
            assert self.pages.owners(first) == 1, "a row would write a shared page"
            rows.append(sequence)
            bound = upper if upper > bound else bound
        return rows, short, bound, kept

    def _plan_span(self, sequence: Sequence, budget: int, spans: list[Span]) -> int:
        """Plan the next chunk of a prompt; how many tokens it has."""
        start, total = sequence.planned, len(sequence)
        stop = min(start + budget, total)
        resumed = bool(sequence.token_ids)
        spans.append(Span(sequence.slot, start, stop, stop == total, resumed))
        sequence.planned = stop
        if stop == total:
            sequence.phase = Phase.DECODE
        return stop - start

    def _admit(self, sequence: Sequence, kept: int) -> Admission | None:
        """Give the first in line a slot and the pages of its prompt and first block, or nothing."""
        if not self._slots:
            return None
        ids = sequence.prompt + sequence.token_ids
        known = ids[: len(sequence)]
        cached = self.pages.match(known) if self._may_share(sequence) else []
        wanted = math.ceil((len(known) + self.config.block_size) / self.config.page_size)
        if wanted - len(cached) > self.pages.available - kept:
            self.pages.release(cached)
            return None
        self.waiting.pop(0)
        self.running.append(sequence)  # it came later than all that run: see _preempt_after
        sequence.pages = cached + self.pages.allocate(wanted - len(cached))
        sequence.published, sequence.may_publish = len(cached), self._may_share(sequence)
        sequence.planned = len(cached) * self.config.page_size
        if not sequence.token_ids:
            sequence.metrics.cached_tokens = sequence.planned
        sequence.slot, sequence.phase = self._slots.pop(), Phase.PREFILL
        self._epochs += 1
        sequence.epoch = self._epochs
        return Admission(
            sequence.slot,
            sequence.epoch,
            ids,
            len(sequence.prompt),
            sequence.params,
            sequence.budget - len(sequence.token_ids),
            sequence.seed,
            sequence.stop_ids,
            self.draft_limit,
            sequence.pages.copy(),
        )

    def _may_share(self, sequence: Sequence) -> bool:
        """Rows that neither tap nor inject would leave pages without draft rows."""
        return self.config.prefix_cache and (sequence.speculate or not self.drafts)

    # ------------------------------------------------------------------ preemption

    def _make_room(self, sequence: Sequence, missing: int) -> bool:
        """Preempt later requests until so many pages are available; whether they are now."""
        while missing > self.pages.available and self._preempt_after(sequence):
            continue
        return missing <= self.pages.available

    def _preempt_after(self, sequence: Sequence) -> bool:
        """Preempt the latest request that came after this one; True if pages came free.

        One with launched steps is drained first: it gets no further step, and its pages when the
        last of them is committed.
        """
        for victim in reversed(self.running):
            if victim is sequence:
                return False
            if victim.inflight == 0:
                self._to_waiting(victim)
                return True
            victim.phase = Phase.DRAINING
            return False
        return False

    def _to_waiting(self, sequence: Sequence) -> None:
        """Take slot and pages away; it will be prefilled again with all that it emitted."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.phase, sequence.planned = Phase.WAITING, 0
        bisect.insort(self.waiting, sequence, key=lambda s: s.arrival)
        sequence.metrics.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        """The one place where slot and pages go back: no launched step names them any more."""
        assert sequence.inflight == 0, "a launched step names this slot"
        self.pages.release(sequence.pages)
        self._slots.append(sequence.slot)
        sequence.pages, sequence.slot, sequence.published = [], -1, 0

    # ------------------------------------------------------------------ commit

    def commit(
        self,
        finals: Ids[Record],
        rows: Ids[Record],
        logprobs: Logprobs | None = None,
    ) -> None:
        """Take the records of the oldest launched step.

        Args:
            finals: of its prompt chunks that chose a first token, in order.
            rows:   of its cycle, in order.
            logprobs: ("finals" or "rows", place, likeliest) -> those of a record's tokens.
        """
        self.deliver()
        launched = self._launched.pop(0)
        now = time.perf_counter()
        for sequence in launched.spans + launched.rows:
            sequence.inflight -= 1
        first = 0
        for span, sequence in zip(launched.plan.spans, launched.spans, strict=True):
            if span.last and not span.resumed:
                self._take(sequence, finals[first], None, now, logprobs, ("finals", first))
                first += 1
            if sequence.phase in (Phase.PREFILL, Phase.DECODE):
                self._publish(sequence, span.stop)
        width = launched.plan.facts.width
        for place, sequence in enumerate(launched.rows):
            self._take(sequence, rows[place], width, now, logprobs, ("rows", place))
        self._settle()

    def _settle(self) -> None:
        """Take slots and pages from those that no launched step names any more."""
        for sequence in [*self.running, *self.leaving]:
            if sequence.inflight == 0 and sequence.phase is Phase.DRAINING:
                self._to_waiting(sequence)
            elif sequence.inflight == 0 and sequence.phase is Phase.FINISHED:
                self.leaving.remove(sequence)
                self._release(sequence)

    def _take(
        self,
        sequence: Sequence,
        record: Record,
        width: int | None,
        now: float,
        logprobs: Logprobs | None,
        place: tuple[str, int],
    ) -> None:
        """Apply one record: lengths, and the end that the device knows of."""
        if sequence.phase is Phase.FINISHED or record[EPOCH] != sequence.epoch:
            self.surplus += width is not None
            return  # a step that was launched before the host knew of the end
        start = len(sequence)
        ids = record[RECORD : RECORD + record[EMITTED]]
        wanted = sequence.params.logprobs
        extra = logprobs(*place, wanted)[: len(ids)] if logprobs and wanted is not None else None
        reason = FINISH_REASON[record[FINISH]]
        sequence.commit(ids)
        self._committed.append(
            Committed(sequence, ids, record[ACCEPTED], reason, extra, width, start, now)
        )
        length = len(sequence)
        self._publish(sequence, length)
        if reason is not None:
            self._retire(sequence)
        else:
            assert record[LENGTH] == length, "host and device disagree on a length"

    def deliver(self) -> None:
        """Make the texts of what was committed, find stop strings, and emit."""
        committed, self._committed = self._committed, []
        for one in committed:
            item = show(one, self.draft_limit)
            if isinstance(item, Chunk) and item.finish_reason is None:
                self.emit(one.sequence, item)
            else:
                self._finish(one.sequence, item)

    def fail(self, error: BaseException) -> None:
        """The oldest launched step raised: its requests end with that, the others live on."""
        self.deliver()
        launched = self._launched.pop(0)
        members = launched.spans + launched.rows
        for sequence in members:
            sequence.inflight -= 1
        for sequence in members:
            if sequence.phase is not Phase.FINISHED:
                self._finish(sequence, error)
        self._settle()

    def _finish(self, sequence: Sequence, chunk: Chunk | BaseException) -> None:
        """End a request with its last chunk, or with what ended it."""
        if sequence.phase is not Phase.FINISHED:
            self._retire(sequence)
        self.emit(sequence, chunk)

    def _retire(self, sequence: Sequence) -> None:
        """Plan nothing more for it; slot and pages follow once no launched step names them."""
        if sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            if sequence.inflight:
                self.leaving.append(sequence)
            else:
                self._release(sequence)
        sequence.phase = Phase.FINISHED

    def _publish(self, sequence: Sequence, committed: int) -> None:
        """Offer full pages below a committed length to the prefix cache."""
        size = self.config.page_size
        while sequence.may_publish and (sequence.published + 1) * size <= committed:
            first = sequence.published
            ids = (sequence.prompt + sequence.token_ids)[first * size : (first + 1) * size]
            before = sequence.pages[first - 1] if first else 0
            sequence.may_publish = self.pages.publish(before, ids, sequence.pages[first])
            sequence.published += sequence.may_publish

    def check(self) -> None:
        """Raise unless pages and slots are conserved, for tests and at idle."""
        self.pages.check()
        held = [s for s in [*self.running, *self.leaving] if s.slot >= 0]
        slots = sorted([*self._slots, *(s.slot for s in held)])
        if slots != list(range(self.config.max_seqs)):
            raise RuntimeError(f"slots are lost or doubled: {slots}")
        owners: dict[int, int] = {}
        for sequence in held:
            for page in sequence.pages:
                owners[page] = owners.get(page, 0) + 1
        if any(self.pages.owners(page) != count for page, count in owners.items()):
            raise RuntimeError("a page's owners and its count differ")
        if len(owners) != self.pages.stats().live:
            raise RuntimeError("a page is held by nobody")
