"""The race checklist: every rule is named by a test that fails when the rule is taken out.

Where a broken rule can show on a CPU, the interleaver must find it within a few schedules, with
the bookkeeping's own checks off: by what the device sees and by what comes out. What only a GPU
would show is tested by structure (test_races_structure.py). The numbers are those of the design's
list; I, A: its invariants that are no races.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from manual import HashSteps, Interleaver, ManualStream, PoisonedRing, interleave
from nanodflash.decoding import packet
from nanodflash.decoding.plan import Span, StepPlan
from nanodflash.engine.paging import PagePool
from nanodflash.engine.runner import RingSlot, Runner
from nanodflash.engine.scheduler import Scheduler
from nanodflash.engine.sequence import Phase
from nanodflash.engine.sequence import Sequence as HostSequence
from nanodflash.engine.streams import PassedEvent

WITHIN = 150  # schedules in which a broken rule must show
Patch = pytest.MonkeyPatch
RULES: dict[str, Callable[[Patch], None]] = {}  # what must hold -> what breaks it


def rule(name: str) -> Callable[[Callable[[Patch], None]], None]:
    """A rule, broken by the function below."""
    return lambda breaker: RULES.update({name: breaker})


# ---------------------------------------------------------------------- rules, broken


@rule("R1 a ring slot is written again only behind its step's event")
def _(patch: Patch) -> None:
    class OneSlot(PoisonedRing):
        def get_nowait(self) -> RingSlot:
            return self.slots[0]

    patch.setattr(Interleaver, "ring", OneSlot)


@rule("R1 a ring slot goes back when it was read, not before")
def _(patch: Patch) -> None:
    launch = Runner.launch

    def eager(self: Runner, plan: StepPlan) -> Any:
        ticket = launch(self, plan)
        self._free.put(ticket.slot)
        return ticket

    patch.setattr(Runner, "launch", eager)


@rule("R2 results are read behind the event")
def _(patch: Patch) -> None:
    results = Runner.results

    def early(self: Runner, ticket: Any, timeout: float | None = None) -> Any:
        ticket.done = PassedEvent()
        return results(self, ticket, timeout)

    patch.setattr(Runner, "results", early)


@rule("R3 the packet is copied in by the stream")
def _(patch: Patch) -> None:
    copy_in = Runner._copy_in

    def direct(self: Runner, slot: RingSlot, values: Any, *given: Any) -> None:
        copy_in(self, slot, values, *given)
        self._packet[: len(values)] = torch.from_numpy(values)[: len(self._packet)]

    patch.setattr(Runner, "_copy_in", direct)


@rule("R4 a slot is given out behind the last step that names it")
def _(patch: Patch) -> None:
    retire, release = Scheduler._retire, Scheduler._release

    def early(self: Scheduler, sequence: HostSequence) -> None:
        retire(self, sequence)
        if sequence in self.leaving:
            self._slots.append(sequence.slot)

    def rest(self: Scheduler, sequence: HostSequence) -> None:
        given = sequence.slot in self._slots or any(
            s.slot == sequence.slot for s in self.running if s is not sequence
        )
        release(self, sequence)
        if given:
            self._slots.pop()

    patch.setattr(Scheduler, "_retire", early)
    patch.setattr(Scheduler, "_release", rest)


@rule("R5 pages are given back behind the last step that names them")
def _(patch: Patch) -> None:
    retire = Scheduler._retire

    def early(self: Scheduler, sequence: HostSequence) -> None:
        retire(self, sequence)
        self.pages.release(sequence.pages)
        sequence.pages = []

    patch.setattr(Scheduler, "_retire", early)


@rule("R6 pages are given back once")
def _(patch: Patch) -> None:
    abort = Scheduler.abort

    def twice(self: Scheduler, sequence: HostSequence) -> None:
        abort(self, sequence)
        self.pages.release(sequence.pages)

    patch.setattr(Scheduler, "abort", twice)


@rule("R7 pages reserved past the end are given back")
def _(patch: Patch) -> None:
    release = Scheduler._release

    def some(self: Scheduler, sequence: HostSequence) -> None:
        used = math.ceil(len(sequence) / self.config.page_size)
        sequence.pages = sequence.pages[:used]
        release(self, sequence)

    patch.setattr(Scheduler, "_release", some)


@rule("R8 only committed lengths publish")
def _(patch: Patch) -> None:
    publish = Scheduler._publish

    def hopeful(self: Scheduler, sequence: HostSequence, committed: int) -> None:
        publish(self, sequence, self._upper(sequence))

    patch.setattr(Scheduler, "_publish", hopeful)


@rule("R9 a row with launched steps is drained before it is preempted")
def _(patch: Patch) -> None:
    def at_once(self: Scheduler, sequence: HostSequence) -> bool:
        for victim in reversed(self.running):
            if victim is not sequence:
                inflight, victim.inflight = victim.inflight, 0
                self._to_waiting(victim)
                victim.inflight = inflight
            return victim is not sequence
        return False

    patch.setattr(Scheduler, "_preempt_after", at_once)


@rule("R10 results are copied out before the next step writes them")
def _(patch: Patch) -> None:
    class LateCopy(ManualStream):
        late: Any = None  # waits until the next step's work is in front of it

        def copy(self, into: Tensor, source: Tensor) -> Any:
            event = super().copy(into, source)
            self.late = self.queue.pop()
            return event

        def submit(self, work: Any, into: Tensor | None = None) -> Any:
            event = super().submit(work, into)
            if self.late is not None and len(self.queue) >= 2:
                self._flush()
            return event

        def step(self) -> None:
            if not self.queue:
                self._flush()
            super().step()

        def _flush(self) -> None:
            self.queue.append(self.late)
            self.late = None

    patch.setattr(Interleaver, "stream", LateCopy)


@rule("R12 the dummy page is nobody's")
def _(patch: Patch) -> None:
    make = PagePool.__init__

    def with_dummy(self: PagePool, num_pages: int, page_size: int) -> None:
        make(self, num_pages, page_size)
        self._free.append(0)

    patch.setattr(PagePool, "__init__", with_dummy)


def with_bound(patch: Patch, bound: Callable[[Scheduler, list[HostSequence]], int]) -> None:
    """Plans with another `kv_bound`."""
    make = Scheduler.plan

    def bounded(self: Scheduler) -> StepPlan | None:
        plan = make(self)
        if plan is not None:
            launched = self._launched[-1]
            facts = replace(plan.facts, kv_bound=bound(self, launched.rows))
            plan = launched.plan = replace(plan, facts=facts)
        return plan

    patch.setattr(Scheduler, "plan", bounded)


@rule("R13 the bound of a step counts what is launched before it")
def _(patch: Patch) -> None:
    with_bound(patch, lambda made, rows: max([len(s) + made.config.block_size for s in rows] + [1]))


@rule("R15 a page is published when it is written, not when that is planned")
def _(patch: Patch) -> None:
    plan_span = Scheduler._plan_span

    def early(self: Scheduler, sequence: HostSequence, budget: int, spans: list[Span]) -> int:
        taken = plan_span(self, sequence, budget, spans)
        self._publish(sequence, sequence.planned)
        return taken

    patch.setattr(Scheduler, "_plan_span", early)


@rule("R15 a page without draft rows is not published")
def _(patch: Patch) -> None:
    patch.setattr(Scheduler, "_may_share", lambda self, sequence: self.config.prefix_cache)


@rule("R16 what lies behind a stop string is dropped")
def _(patch: Patch) -> None:
    show = HostSequence.show

    def keep(self: HostSequence, ids: Any, *given: Any) -> Any:
        before = self.token_ids[:]
        chunk = show(self, ids, *given)
        self.token_ids[:] = before
        return replace(chunk, token_ids=list(ids)) if chunk.finish_reason == "stop" else chunk

    patch.setattr(HostSequence, "show", keep)


@rule("R16 late tokens of a request that has ended are dropped")
def _(patch: Patch) -> None:
    take = Scheduler._take

    def always(self: Scheduler, sequence: HostSequence, *given: Any) -> None:
        phase = sequence.phase
        if phase is Phase.FINISHED and sequence.slot >= 0:
            sequence.phase = Phase.DECODE
            self.running.append(sequence)
            self.leaving.remove(sequence)
        take(self, sequence, *given)

    patch.setattr(Scheduler, "_take", always)


@rule("R17 every slot has its own parameters")
def _(patch: Patch) -> None:
    admit = packet.admit

    def broadcast(admissions: Any, values: Tensor, *given: Any) -> None:
        values = values.clone()
        first = 1 + packet.INTS.index("top_k")
        values[:, first : first + 2] = values[0, first : first + 2].clone()  # top_k, seed
        admit(admissions, values, *given)

    patch.setattr(packet, "admit", broadcast)


@rule("R18 an abort finds its request wherever it stands")
def _(patch: Patch) -> None:
    abort = Scheduler.abort

    def only_running(self: Scheduler, sequence: HostSequence) -> None:
        if sequence.phase is not Phase.PREFILL:
            abort(self, sequence)

    patch.setattr(Scheduler, "abort", only_running)


@rule("I1 pages are reserved for what is launched and for what comes next")
def _(patch: Patch) -> None:
    upper = Scheduler._upper

    def without_launched(self: Scheduler, sequence: HostSequence) -> int:
        inflight, sequence.inflight = sequence.inflight, 0
        try:
            return upper(self, sequence)
        finally:
            sequence.inflight = inflight

    patch.setattr(Scheduler, "_upper", without_launched)
    with_bound(patch, lambda made, rows: made.config.max_model_len + made.config.block_size)


@rule("A slots of a step that failed are made inert for the steps behind it")
def _(patch: Patch) -> None:
    patch.setattr(HashSteps, "forget", lambda self, slots: None)


@rule("A plans are not changed while they are on their way")
def _(patch: Patch) -> None:
    plan_rows = Scheduler._plan_rows

    def shared(self: Scheduler, kind: bool, deltas: list[Any]) -> Any:
        made = plan_rows(self, kind, deltas)
        for place, delta in enumerate(deltas):
            (owner,) = [s for s in self.running if s.slot == delta.slot]
            deltas[place] = delta._replace(first=0, pages=owner.pages)
        return made

    patch.setattr(Scheduler, "_plan_rows", shared)


@pytest.mark.parametrize("name", RULES)
def test_a_broken_rule_is_found(name: str, monkeypatch: Patch) -> None:
    RULES[name](monkeypatch)
    for seed in range(WITHIN):
        try:
            interleave(seed, True, 0.2 if "fail" in name else None)
        except AssertionError:
            return
    pytest.fail(f"not found in {WITHIN} schedules")


@pytest.mark.parametrize("fail", [None, 0.2])
def test_nothing_is_found_where_all_hold(fail: float | None) -> None:
    for seed in range(WITHIN):
        interleave(seed, True, fail)
