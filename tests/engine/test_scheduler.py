"""First come, first served, step by step: small traces on the hash model.

A page is one place, a block two, nothing is shared and every cycle emits one token, so that pages
can be counted by hand: a prompt of n tokens is admitted with n + 2 pages, and a row of length n
needs n + 2 for its next cycle, and two more for each launched step that names it.
"""

import random
from typing import Any

from hashmodel import Device, HashPool
from nanodflash.config import EngineConfig, SamplingParams
from nanodflash.decoding.plan import StepPlan
from nanodflash.engine.scheduler import Scheduler
from nanodflash.engine.sequence import Phase, Sequence

VOCAB = 10_000


class Line:
    """A scheduler with `pages` pages and `seqs` slots; steps run when they are launched."""

    def __init__(self, pages: int, seqs: int = 3, prefix_cache: bool = False) -> None:
        config = EngineConfig(
            max_model_len=40,
            block_size=2,
            page_size=1,
            num_pages=1 + pages,
            max_seqs=seqs,
            prefix_cache=prefix_cache,
        )
        self.scheduler = Scheduler(config, 40, True, lambda *_: None)
        self.pool = self.scheduler.pages = HashPool(config.total_pages, 1, True)
        self.device = Device(config, self.pool, VOCAB, 0.0, random.Random(0))
        self.launched: list[Any] = []

    def add(self, length: int, budget: int, speculate: bool = True, seed: int = 0) -> Sequence:
        """A request in line; prompts of one length are the same."""
        assert length + budget + 2 <= self.pool.total, "it can never fit"
        prompt = [100 * length + i for i in range(length)]
        sequence = Sequence(prompt, SamplingParams(), budget, seed, [], speculate, None)
        self.scheduler.add(sequence)
        return sequence

    def plan(self) -> StepPlan | None:
        """Launch a step, if there is one."""
        plan = self.scheduler.plan()
        self.scheduler.check()
        if plan is not None:
            self.launched.append(self.device.run(plan))
        return plan

    def commit(self) -> None:
        self.scheduler.commit(*self.launched.pop(0))
        self.scheduler.deliver()
        self.scheduler.check()

    def step(self) -> StepPlan:
        """One step from plan to commit."""
        plan = self.plan()
        assert plan is not None
        self.commit()
        return plan

    def finish(self) -> list[int]:
        """Run to the end, two steps launched at a time; prompt lengths in order of admission."""
        admitted = []
        for _ in range(500):
            if not self.scheduler.busy:
                return admitted
            plan = self.plan() if len(self.launched) < 2 else None
            if plan is None:
                self.commit()
            else:
                admitted += [admission.prompt_len for admission in plan.admissions]
        raise AssertionError("a live-lock")


def test_pages_that_an_earlier_row_waits_for_are_not_taken_by_growing() -> None:
    """One page is left: the first row wants two, the next, near the end of its budget, one."""
    line = Line(pages=13)
    first, second, last = line.add(2, 9), line.add(2, 1), line.add(2, 9)
    assert line.plan() is not None
    assert line.pool.available == 1
    assert line.plan() is None
    assert (len(first.pages), len(second.pages), line.pool.available) == (4, 4, 1)
    assert last.phase is Phase.DRAINING
    line.commit()
    plan = line.plan()
    assert plan is not None
    assert plan.rows == [first.slot]


def test_a_victim_with_launched_steps_is_drained_first() -> None:
    """It keeps slot and pages, gets no further step, and leaves at the commit of its last."""
    line = Line(pages=9)
    first, last = line.add(2, 5), line.add(2, 5)
    assert line.plan() is not None
    assert line.plan() is None  # the first wants two pages more, one is left
    assert (last.phase, len(last.pages), last.inflight) == (Phase.DRAINING, 4, 1)
    assert (last.slot, line.scheduler.running) == (1, [first, last])
    assert last.metrics.preemptions == 0
    assert line.plan() is None
    line.commit()
    assert (last.phase, last.pages, last.slot) == (Phase.WAITING, [], -1)
    assert (last.metrics.preemptions, len(last.token_ids)) == (1, 1)
    assert line.scheduler.waiting == [last]
    plan = line.plan()
    assert plan is not None
    assert plan.rows == [first.slot]
    line.finish()
    assert (len(first.token_ids), len(last.token_ids)) == (5, 5)


def test_a_preempted_one_goes_before_all_that_came_later() -> None:
    """Also before one that would fit where it does not."""
    line = Line(pages=14)
    first, big, small = line.add(2, 9), line.add(8, 4), line.add(1, 9)
    line.step()
    assert (line.pool.available, line.scheduler.waiting) == (0, [small])
    line.step()
    plan = line.step()  # the first grows by a page
    assert big.metrics.preemptions == 1
    assert line.scheduler.waiting == [big, small]
    assert line.pool.available > len(small.prompt) + 2
    assert (plan.admissions, plan.rows) == ([], [first.slot])
    assert line.finish()[:2] == [8, 1]


def test_a_draining_one_goes_before_all_that_wait() -> None:
    """An abort frees slot and pages for one that waits while an earlier one is drained."""
    line = Line(pages=16)
    other, first = line.add(6, 8, speculate=False), line.add(2, 12)
    last, waits = line.add(2, 12), line.add(1, 12)
    line.step()
    for _ in range(2):
        assert line.plan() is not None
    line.commit()
    assert line.plan() is not None
    line.commit()
    assert line.plan() is None  # the other wants a page
    assert (last.phase, last.inflight, other.inflight) == (Phase.DRAINING, 1, 0)
    line.scheduler.abort(other)
    assert line.pool.available == 8
    plan = line.plan()
    assert plan is not None
    assert (plan.admissions, plan.rows) == ([], [first.slot])
    line.commit()
    assert line.scheduler.waiting == [last, waits]
    assert line.finish()[:2] == [2, 1]


def test_what_published_no_more_publishes_again_after_a_preemption() -> None:
    """Of two equal prompts side by side the second fills no cached page; from the cache it can."""
    line = Line(pages=8, prefix_cache=True)
    line.add(2, 3)
    second = line.add(2, 4, seed=1)
    line.step()
    assert (second.published, second.may_publish) == (0, False)
    line.step()
    line.step()
    assert second.metrics.preemptions == 1
    line.finish()
    text = (second.prompt + second.token_ids)[:-1]
    assert len(line.pool.match([*text, 0])) == len(text) == 5


def test_pages_that_an_earlier_row_waits_for_are_not_given_to_the_other_kind() -> None:
    """The second row waits for one page; what the first gives back is not for a newcomer."""
    line = Line(pages=9)
    first, second = line.add(2, 3), line.add(2, 5)
    newcomer = line.add(3, 4, speculate=False)
    line.step()
    line.step()
    plan = line.step()
    assert (plan.rows, first.finish_reason) == ([0], "length")
    assert line.pool.available == 5
    plan = line.step()
    assert newcomer.phase is Phase.WAITING
    assert plan.rows == [second.slot]


def test_with_pages_for_all_the_kinds_take_turns() -> None:
    """What a row will take in its turn is kept for it, and no page more."""
    line = Line(pages=36)
    first, plain = line.add(2, 9), line.add(3, 9, speculate=False)
    kinds = [line.step().facts.speculate for _ in range(16)]
    assert kinds == [True, False] * 8
    assert (len(first.token_ids), len(plain.token_ids)) == (8, 8)
