"""The engine's three actors without a thread: whoever is next is drawn from a seed.

`ManualStream` is a list of submitted work that is done when it is told to. `HashSteps` is the
device made of hashes behind the real packet: what it knows of a slot came through the ring. An
`Interleaver` is a `World` whose steps go through the real `Runner`: the host plans, commits,
delivers, adds and aborts, the device thread launches, the stream does one piece of work, in any
order that threads could bring about, also in the middle of a launch.

Ring slots are poisoned: the packet the moment that its step's event fires, the result until the
copy has run and again once it was read.
"""

import os
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.test_scheduler_fuzz import World, random_request, random_world
from hashmodel import FREE, STAGES, Device, Slot, StepFailed
from nanodflash.decoding.packet import apply
from nanodflash.decoding.plan import RECORD, Admission, PageDelta, StepPlan
from nanodflash.decoding.state import DeviceState
from nanodflash.engine.runner import BITS, RingSlot, Runner, Ticket
from nanodflash.engine.streams import InlineStream, Work

SCHEDULES = int(os.environ.get("NANODFLASH_INTERLEAVINGS", "2000"))
GARBAGE = -(2**40) - 7
HOST = ("add", "abort", "plan", "commit", "wait", "deliver")
ACTIONS = (*HOST, "launch", "work")


class ManualEvent:
    """Fires when its work has been done. Whoever waits gives the stream its turn."""

    def __init__(self, stream: "ManualStream", into: Tensor | None) -> None:
        self.stream, self.into, self.time = stream, into, 0.0
        self.fired, self.error = False, None

    def wait(self, timeout: float | None = None) -> None:
        while not self.fired:
            self.stream.step()
        if self.error is not None:
            self.stream.errors.remove(self.error)
            raise self.error


class ManualStream(InlineStream):
    """Work waits until `step`.

    Attributes:
        turn:   called before anything is submitted: the others may be faster.
        passed: called with the destination of every copy when its event has just fired.
        errors: of work whose event nobody has waited for.
    """

    def __init__(self) -> None:
        self.queue: deque[tuple[Work, ManualEvent]] = deque()
        self.turn: Callable[[], None] = lambda: None
        self.passed: Callable[[Tensor], None] = lambda into: None
        self.errors: list[Exception] = []

    def submit(self, work: Work, into: Tensor | None = None) -> ManualEvent:
        self.turn()
        event = ManualEvent(self, into)
        self.queue.append((work, event))
        return event

    def copy(self, into: Tensor, source: Tensor) -> ManualEvent:
        return self.submit(lambda: into.copy_(source), into)

    def call(self, make: Callable[[], Any]) -> Any:
        self.close()
        return make()

    def close(self) -> None:
        while self.queue:
            self.step()

    def step(self) -> None:
        """Do the oldest work."""
        work, event = self.queue.popleft()
        try:
            work()
        except Exception as error:
            self.errors.append(error)
            event.error = error
        event.fired = True
        if event.into is not None:
            self.passed(event.into)


class HashSteps(Device):
    """A `Steps` of hashes. Of a plan it reads what `ModelSteps` reads: facts, counts and spans."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.device = torch.device("cpu")
        self.unpacked = DeviceState.allocate(self.config, self.device)
        self.fails: dict[int, str] = {}  # number of a step -> the stage where it raises
        self.planned: dict[int, str] = {}  # number of a step -> the plan as it was made
        self.forgotten: set[int] = set()

    def run(self, plan: StepPlan, sections: Any, result: Tensor, mark: Any) -> None:  # type: ignore
        assert self.planned.get(plan.number) in (None, repr(plan)), "a plan was changed on its way"
        read = self._read(plan, sections)
        mark("plan")
        try:
            finals, rows = super().run(read, self.fails.get(plan.number))
        except StepFailed:
            for slot in [*(span.slot for span in plan.spans), *read.rows]:
                self.slots[slot].doomed = slot in self.forgotten
            raise
        flat = [value for record in (*finals, *rows) for value in record]
        if plan.facts.sampler == "full":
            ids = np.array([token for record in (*finals, *rows) for token in record[RECORD:]])
            bits = np.zeros((len(ids), BITS), np.int64)
            bits[:, 0] = ids.astype(np.float64).view(np.int64)
            flat += bits.flatten().tolist()
        result.numpy()[:] = flat
        mark("cycle")

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.forgotten.add(slot)
            self.slots[slot].doomed, self.slots[slot].state = True, FREE
            self.slots[slot].table = [0] * self.config.pages_per_seq

    def _read(self, plan: StepPlan, sections: Any) -> StepPlan:
        """The plan as the packet has it."""
        rows, ready, finals, slots, columns, pages, values, _ = sections
        apply(plan, sections, self.unpacked)
        assert ready.tolist() == [span.slot for span in plan.spans if span.last]
        assert finals.tolist() == [s.slot for s in plan.spans if s.last and not s.resumed]
        admissions = []
        if plan.admissions:
            for slot in values.view(len(plan.admissions), -1)[:, 0].tolist():
                admissions.append(self._admission(slot))
                self.forgotten.discard(slot)
        named = zip(slots.tolist(), columns.tolist(), pages.tolist(), strict=True)
        deltas = [PageDelta(slot, column, [page]) for slot, column, page in named]
        return StepPlan(plan.number, plan.facts, admissions, deltas, plan.spans, rows.tolist())

    def _admission(self, slot: int) -> Admission:
        state = self.unpacked
        assert state.state[slot] == FREE
        length = int(state.len[slot]) + 1
        return Admission(
            slot,
            int(state.epoch[slot]),
            state.tokens[slot, :length].tolist(),
            int(state.prompt_len[slot]),
            None,  # type: ignore[arg-type]  # a hash has no temperature
            int(state.budget[slot]),
            int(state.seed[slot]),
            [token for token in state.stop_ids[slot].tolist() if token >= 0],
            int(state.draft_limit[slot]),
            state.page_table[slot].tolist(),
        )

    def _write(self, slot: Slot, start: int, ids: list[int], pools: list) -> None:
        size = self.config.page_size
        places = range(start, start + len(ids))
        if slot.doomed and all(slot.table[place // size] == 0 for place in places):
            return  # the dummy page's
        super()._write(slot, start, ids, pools)


class PoisonedRing:
    """The runner's ring; what is nobody's, or not written yet, is garbage."""

    def __init__(self, free: Any) -> None:
        self.free = free
        self.slots: list[RingSlot] = [free.get_nowait() for _ in range(free.qsize())]
        for slot in self.slots:
            self.put(slot)

    def get_nowait(self) -> RingSlot:
        slot = self.free.get_nowait()
        slot.packet.fill_(GARBAGE)
        slot.result.fill_(GARBAGE)
        return slot

    def put(self, slot: RingSlot) -> None:
        slot.packet.fill_(GARBAGE)
        slot.result.fill_(GARBAGE)
        self.free.put(slot)

    def passed(self, into: Tensor) -> None:
        """The event behind a step fired: its packet is free to be overwritten, so it is."""
        for slot in self.slots:
            if slot.result.data_ptr() == into.data_ptr():
                slot.packet.fill_(GARBAGE)


class Interleaver(World):
    """A `World` that is an engine with two threads and a stream, none of which is a thread.

    Args:
        quiet: leave bookkeeping unchecked: then only the device and the outputs tell.
    """

    ring = PoisonedRing
    stream = ManualStream

    def __init__(self, *args: Any, quiet: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.quiet, self.seen = quiet, Counter[str]()
        self.steps = HashSteps(
            self.config, self.pool, self.vocab, self.device.skill, self.device.rng
        )
        self.device = self.steps
        self.line = self.stream()
        self.runner = Runner(lambda _: self.steps, self.line, self.config)
        self.runner._free = self.buffers = self.ring(self.runner._free)
        self.line.passed = self.buffers.passed
        self.plans: deque[StepPlan] = deque()
        self.tickets: deque[Ticket] = deque()
        self.launching = False

    def shorten(self, size: int) -> None:
        """Begin with buffers for packets of `size` numbers: they must grow under way."""
        self.runner._packet = self.runner._packet[:size].clone()
        for slot in self.buffers.slots:
            slot.packet = slot.packet[:size].clone()

    # ------------------------------------------------------------------ actions

    def plan(self, fails: str | None = None) -> bool:
        """The host hands a step over."""
        if not super().plan():
            return False
        *others, step = self.launched
        named = {s for other in others for s in (*other.plan.rows, *map(slot_of, other.plan.spans))}
        held = {page for other in others for s in other.members for page in s.pages}
        for admission in step.plan.admissions:
            fresh = [p for p in admission.pages if p not in self.pool.published]
            assert self.quiet or admission.slot not in named, "a slot that a launched step names"
            assert self.quiet or not held & set(fresh), "pages that a launched step writes"
        self.steps.planned[step.plan.number] = repr(step.plan)
        if fails is not None:
            self.steps.fails[step.plan.number] = fails
        self.plans.append(step.plan)
        return True

    def launch(self) -> None:
        """The device thread gets to the oldest plan."""
        plan, self.launching = self.plans.popleft(), True
        self._note(f"launch() of {plan.number}")
        self.tickets.append(self.runner.launch(plan))
        self.launching = False

    def work(self) -> None:
        """The stream does one piece of work."""
        self._note("work()")
        self.line.step()

    def commit(self) -> None:
        """The host takes the oldest launched step, once it has ended."""
        while not self.tickets:
            self.launch()
        ticket, step = self.tickets.popleft(), self.launched.pop(0)
        self._note(f"commit() of {ticket.plan.number}")
        assert ticket.plan is step.plan, "tickets out of order"
        before = self.scheduler.surplus
        try:
            results = self.runner.results(ticket, 1.0)
        except StepFailed as error:
            self.seen["failed"] += 1
            self.scheduler.fail(error)
        else:
            for record, slot in zip(results.rows, step.plan.rows, strict=True):
                assert record[RECORD - 1] == self.steps.slots[slot].epoch, "a slot was reused"
            self.scheduler.commit(results.finals, results.rows, results.logprobs)
        self.seen["surplus"] += self.scheduler.surplus - before
        self._check_progress()
        self.check()

    def check(self) -> None:
        """What holds between any two actions."""
        if not self.quiet:
            super().check()

    def drain(self) -> None:
        """Run to the end, and check what came out."""
        super().drain()
        assert [*self.plans, *self.tickets, *self.line.queue, *self.line.errors] == []
        for request in self.requests:
            self.seen["preempted"] += request.sequence.metrics.preemptions
            self.seen["cached"] += request.sequence.metrics.cached_tokens
            self.seen[str(request.sequence.finish_reason)] += 1

    def _check_request(self, request: Any) -> None:
        super()._check_request(request)
        if type(request.error) is LookupError:
            return
        assert request.error is None or type(request.error) is StepFailed, repr(request.error)

    # ------------------------------------------------------------------ who is next

    def possible(self) -> list[str]:
        """Actions that some actor could do now."""
        able = ["abort"] * bool(self.requests) + ["deliver"] * bool(self.scheduler._committed)
        able += ["plan"] * (len(self.launched) < self.depth)
        if self.tickets:
            able.append("commit" if self.tickets[0].done.fired else "wait")
        able += ["launch"] * (bool(self.plans) and not self.launching)
        return able + ["work"] * bool(self.line.queue)


def slot_of(span: Any) -> int:
    return span.slot


def drive(world: Interleaver, rng: random.Random, fail: float | None = None) -> None:
    """One schedule: the next actor at random until all requests have come, then to the end.

    Args:
        fail: share of the steps that fail; None: few or none.
    """
    left, mixed, acts = rng.randint(1, 8), rng.random() < 0.5, 0
    weights = {name: rng.choice([0.3, 1.0, 1.0, 3.0]) for name in ACTIONS}
    weights |= {"add": rng.choice([0.1, 0.3, 1.0]), "abort": rng.choice([0.0, 0.02, 0.05])}
    weights["wait"] = rng.choice([0.1, 0.5])
    usual, inside = rng.choice([0.0, 0.0, 0.05]), rng.choice([0.0, 0.3, 0.6])
    share = usual if fail is None else fail

    def act() -> None:
        nonlocal left, acts
        acts += 1
        assert acts < 20_000, "it never ends"
        able = world.possible() + ["add"] * bool(left)
        able = [name for name in able if weights[name]]
        if not able:
            return
        (name,) = rng.choices(able, [weights[name] for name in able])
        if name == "add":
            random_request(world, rng, mixed)
            left -= 1
        elif name == "abort":
            world.abort(rng.randrange(len(world.requests)))
        elif name == "plan":
            world.plan(rng.choice(STAGES) if rng.random() < share else None)
        elif name in ("commit", "wait"):
            world.commit()
        else:
            getattr(world, name)()

    def turn() -> None:
        while world.launching and rng.random() < inside:
            act()

    world.line.turn = turn
    while left or (world.scheduler.busy and rng.random() < 0.995):
        act()
    world.line.turn = lambda: None
    world.drain()


def make_world(seed: int, quiet: bool = False) -> tuple[Interleaver, random.Random]:
    """The engine of a seed, and what its schedule is drawn from."""
    rng = random.Random(seed)
    plain = random_world(rng)
    world = Interleaver(
        plain.config,
        plain.drafts,
        plain.draft_limit,
        plain.depth,
        plain.vocab,
        plain.device.skill,
        rng.getrandbits(32),
        quiet=quiet,
    )
    if rng.random() < 0.3:
        world.shorten(rng.choice([16, 200]))
    return world, rng


def interleave(seed: int, quiet: bool = False, fail: float | None = None) -> Counter[str]:
    """One seeded schedule; an AssertionError names the seed and the last actions."""
    world, rng = make_world(seed, quiet)
    try:
        drive(world, rng, fail)
    except Exception as error:
        actions = "\n  ".join([world.log[0], *world.log[1:][-40:]])
        raise AssertionError(f"interleave({seed}): {error!r}, after\n  {actions}") from error
    return world.seen
