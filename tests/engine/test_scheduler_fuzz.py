"""The real scheduler, pages, plans and commits on a device made of hashes, under random schedules.

A `World` is one engine without threads: its actions (add, abort, plan, run, commit, fail) come in
any order that the engine's threads could bring about, and everything that must always hold is
checked after each. Two drivers choose the actions: seeded random ones by the thousand, and
hypothesis, which shrinks what it finds. NANODFLASH_FUZZ sets the number of schedules; a failure
names its seed, and `run_schedule(seed)` runs that one.
"""

import math
import os
import random
from collections import Counter
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hashmodel import STAGES, Device, HashPool, StepFailed, reference
from nanodflash.config import EngineConfig, SamplingParams
from nanodflash.decoding.plan import EPOCH, StepPlan
from nanodflash.engine.scheduler import SAMPLERS, Scheduler
from nanodflash.engine.sequence import Chunk, Phase, Sequence, TokenLogprobs

SCHEDULES = int(os.environ.get("NANODFLASH_FUZZ", "2500"))
PARTS = 10
PARAMS = [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(logprobs=0)]


class HostStop:
    """Stands in for `StreamDecoder`: a stop string, or an error, after so many tokens."""

    def __init__(self, stop: int, error: int) -> None:
        self.stop, self.error, self.num_tokens = stop, error, 0
        self.stopped: str | None = None

    def push(self, ids: list[int]) -> str:
        shown = ""
        for token in ids:
            if self.stopped is None:
                self.num_tokens += 1
                shown += chr(ord("a") + token)
            if self.num_tokens == self.error:
                raise LookupError("a token without text")
            if self.num_tokens == self.stop:
                self.stopped = "stop"
        return shown

    def finish(self) -> str:
        return "."


@dataclass
class Request:
    """A sequence, what it must give, and what came of it."""

    sequence: Sequence
    ids: list[int]
    reason: str
    chunks: list[Chunk] = field(default_factory=list)
    error: BaseException | None = None
    aborted: bool = False

    @property
    def ended(self) -> bool:
        return self.error is not None or bool(self.chunks and self.chunks[-1].finish_reason)


@dataclass
class Step:
    """A launched plan, the sequences in it, and its records once it has run."""

    plan: StepPlan
    members: list[Sequence]
    results: tuple[list[list[int]], list[list[int]]] | StepFailed | None = None


class TextPool(HashPool):
    """Knows the whole text up to the end of every cached page: its rows hang on all of it."""

    def __init__(self, num_pages: int, page_size: int, drafts: bool) -> None:
        super().__init__(num_pages, page_size, drafts)
        self.texts: dict[int, list[int]] = {0: []}

    def publish(self, before: int, ids: Ids[int], page: int) -> bool:
        new = super().publish(before, ids, page)
        if new:
            self.texts[page] = [*self.texts[before], *ids]
        return new

    def match(self, ids: Ids[int]) -> list[int]:
        taken = super().match(ids)
        for place, page in enumerate(taken, 1):
            text = list(ids[: place * self.page_size])
            assert self.texts[page] == text, f"page {page} ends {self.texts[page]}, not {text}"
        return taken


class World:
    """Scheduler, device and requests. Every action ends with `check`."""

    def __init__(
        self,
        config: EngineConfig,
        drafts: bool,
        draft_limit: int,
        depth: int = 2,
        vocab: int = 11,
        skill: float = 0.7,
        seed: int = 0,
    ) -> None:
        self.config, self.drafts, self.draft_limit = config, drafts, draft_limit
        self.depth, self.vocab = depth, vocab
        self.scheduler = Scheduler(config, draft_limit, drafts, self._emit)
        self.pool = TextPool(config.total_pages, config.page_size, drafts)
        self.scheduler.pages = self.pool
        rng = random.Random(seed)
        self.stems = [[rng.randrange(vocab) for _ in range(config.max_model_len)] for _ in "ab"]
        self.device = Device(config, self.pool, vocab, skill, rng)
        self.requests: list[Request] = []
        self.launched: list[Step] = []
        self.broken = False  # a step failed in a way that takes those behind it along
        self.log: list[str] = [f"{config} {drafts=} {draft_limit=} {depth=} {vocab=} {seed=}"]
        self._epochs: set[int] = set()
        self._first: tuple[Request, int] | None = None  # earliest request, steps it may take

    # ------------------------------------------------------------------ actions

    def add(
        self,
        stem: int,
        length: int,
        tail: list[int],
        budget: int,
        stop: int | None = None,
        host_stop: int = 0,
        host_error: int = 0,
        speculate: bool = True,
        seed: int = 0,
        kind: int = 0,
    ) -> None:
        """A request that `LLM` would take: what does not fit is made shorter.

        Args:
            stem:   a common text, or from 2 on what an earlier request holds, whose start it asks.
            stop:   the id at this place of the answer ends it; host_stop and host_error likewise.
        """
        self._note(f"add({stem}, {length}, {tail}, {budget}, {stop}, {host_stop}, {host_error}, "
                   f"{speculate}, {seed}, {kind})")  # fmt: skip
        config = self.config
        text = self.stems[stem % 2]
        if stem >= 2 and self.requests:
            sequence = self.requests[stem % len(self.requests)].sequence
            text = sequence.prompt + sequence.token_ids
        pages = (config.total_pages - 1) * config.page_size
        room = min(config.max_model_len, pages - config.block_size)
        prompt = (text[:length] + tail)[: room - 1] or [0]
        budget = min(budget, room - len(prompt))
        answer, _ = reference(prompt, budget, (), seed, self.vocab)
        stops = [answer[stop]] if stop is not None and stop < len(answer) else []
        ids, reason = reference(prompt, budget, stops, seed, self.vocab)
        if 0 < host_stop <= len(ids) - (reason == "stop"):
            ids, reason = ids[:host_stop], "stop"
        decoder: Any = HostStop(host_stop, host_error) if host_stop or host_error else None
        speculate = speculate and config.block_size > 1
        sequence = Sequence(prompt, PARAMS[kind], budget, seed, stops, speculate, decoder)
        self.requests.append(Request(sequence, ids, reason))
        self.scheduler.add(sequence)
        self.check()

    def abort(self, place: int) -> None:
        """The end of any request, at any time, also when it has ended by itself."""
        self._note(f"abort({place})")
        request = self.requests[place % len(self.requests)]
        over = request.ended
        self.scheduler.abort(request.sequence)
        assert request.ended
        request.aborted |= not over and request.sequence.finish_reason == "abort"
        self.check()

    def plan(self) -> bool:
        """Launch a step if there is one; False if not."""
        assert len(self.launched) < self.depth
        plan = self.scheduler.plan()
        self._note(f"plan() -> {plan}")
        if plan is None:
            stuck = self.scheduler.busy and not self.launched and not self.scheduler._committed
            assert not stuck, "nothing can be planned"
            self.check()
            return False
        by_slot = {s.slot: s for s in self.scheduler.running}
        members = [by_slot[slot] for slot in [span.slot for span in plan.spans] + plan.rows]
        self.launched.append(Step(plan, members))
        self._check_plan(plan, by_slot)
        self.check()
        return True

    def run(self, fails: str | None = None) -> None:
        """The device gets to the oldest launched step that it has not run.

        Args:
            fails: the stage where it raises. Before its admissions are through, the state of
                   their slots is not theirs, and no step launched behind it may run.
        """
        step = next((step for step in self.launched if step.results is None), None)
        if step is None:
            return
        self._note(f"run({fails!r}) of {step.plan.number}")
        self.broken = self.broken or fails == "start"
        try:
            step.results = self.device.run(step.plan, "start" if self.broken else fails)
        except StepFailed as error:
            step.results = error

    def commit(self) -> None:
        """The host takes the oldest launched step."""
        while self.launched[0].results is None:
            self.run()
        step = self.launched.pop(0)
        self._note(f"commit() of {step.plan.number}")
        if isinstance(step.results, StepFailed):
            self.scheduler.fail(step.results)
        else:
            assert step.results is not None
            finals, rows = step.results
            for record, slot in zip(rows, step.plan.rows, strict=True):
                assert record[EPOCH] == self.device.slots[slot].epoch
            parts = {"finals": finals, "rows": rows}
            self.scheduler.commit(
                finals,
                rows,
                lambda part, place, count: [
                    TokenLogprobs(float(token), []) for token in parts[part][place][EPOCH + 1 :]
                ],
            )
        self.broken = self.broken and bool(self.launched)
        self._check_progress()
        self.check()

    def deliver(self) -> None:
        """The host makes the texts: now, or after the next plan."""
        self._note("deliver()")
        self.scheduler.deliver()
        self.check()

    def drain(self) -> None:
        """Run to the end, and check what came out."""
        while self.scheduler.busy:
            if len(self.launched) == self.depth or not self.plan():
                if self.launched:
                    self.commit()
            self.deliver()
        self._check_end()

    # ------------------------------------------------------------------ checks

    def check(self) -> None:
        """What holds between any two actions."""
        scheduler, stats = self.scheduler, self.pool.stats()
        scheduler.check()
        assert stats.free + stats.cached + stats.live == self.config.total_pages - 1
        line = [s.arrival for s in scheduler.running + scheduler.waiting]
        assert all(a < b for a, b in pairwise(line)), f"out of line: {line}"
        inflight = Counter(id(s) for step in self.launched for s in step.members)
        for s in scheduler.waiting:
            assert (s.phase, s.slot, s.pages, s.inflight) == (Phase.WAITING, -1, [], 0)
        for s in scheduler.leaving:
            assert s.phase is Phase.FINISHED, "leaving without an end"
            assert s.inflight, "leaving, but nothing names it"
        for s in scheduler.running:
            assert s.phase in (Phase.PREFILL, Phase.DECODE, Phase.DRAINING), "running, but how?"
            assert set(s.pages[: s.published]) <= self.pool.published
            assert not set(s.pages[s.published :]) & self.pool.published
        for s in scheduler.running + scheduler.leaving:
            assert s.inflight == inflight.pop(id(s), 0), "launched steps are miscounted"
        assert not inflight, "a launched step names what holds no slot"

    def _check_plan(self, plan: StepPlan, by_slot: dict[int, Sequence]) -> None:
        config, members = self.config, self.launched[-1].members
        size, line = config.page_size, self.scheduler.running
        for admission in plan.admissions:
            assert admission.epoch not in self._epochs, "an epoch came twice"
            self._epochs.add(admission.epoch)
        tokens = sum(span.stop - span.start for span in plan.spans)
        floor = min(size, config.max_prefill)
        assert tokens <= max(config.max_prefill - len(plan.rows) * plan.facts.width, floor)
        assert all(s.speculate == plan.facts.speculate for s in members), "two kinds in a step"
        assert plan.facts.width == (config.block_size if plan.facts.speculate else 1)
        assert plan.facts.sampler == max((s.params.sampler for s in members), key=SAMPLERS.index)
        assert plan.facts.kv_bound <= config.max_model_len + config.block_size
        for delta in plan.deltas:
            assert delta.slot in plan.rows, "pages for a row that takes no part"
            assert len(delta.pages) <= math.ceil(config.block_size / size) + 1
        if any(s.phase is Phase.PREFILL and s.speculate == plan.facts.speculate for s in line):
            assert plan.spans, "a prompt gets nothing"
        if any(s.phase is Phase.DRAINING for s in line):
            assert not plan.admissions, "admitted before an earlier one that is drained"
        # None takes pages that an earlier one waits for.
        taking = [by_slot[given.slot].arrival for given in [*plan.deltas, *plan.admissions]]
        for s in line:
            if s.phase is Phase.DECODE and s.speculate == plan.facts.speculate and s not in members:
                assert all(arrival < s.arrival for arrival in taking), "pages of an earlier one"

    def _check_progress(self) -> None:
        """The earliest request ends within a bounded number of steps."""
        living = [request for request in self.requests if not request.ended]
        if not living:
            self._first = None
        elif self._first is None or self._first[0] is not living[0]:
            s = living[0].sequence
            chunk = min(self.config.page_size, self.config.max_prefill)
            chunks = math.ceil((len(s.prompt) + len(s.token_ids)) / chunk)
            self._first = (living[0], 4 * (chunks + s.budget - len(s.token_ids)) + 8)
        else:
            self._first = (living[0], self._first[1] - 1)
            assert self._first[1] > 0, "the earliest request gets nowhere"

    def _check_end(self) -> None:
        scheduler, stats = self.scheduler, self.pool.stats()
        self.check()
        assert not self.launched, "a step was never committed"
        assert not scheduler.running + scheduler.waiting + scheduler.leaving
        assert (stats.live, stats.free + stats.cached) == (0, stats.total)
        assert sorted(scheduler._slots) == list(range(self.config.max_seqs))
        for request in self.requests:
            self._check_request(request)

    def _check_request(self, request: Request) -> None:
        s, metrics, chunks = request.sequence, request.sequence.metrics, request.chunks
        assert request.ended, "a request was lost"
        assert s.token_ids == request.ids[: len(s.token_ids)]
        assert s.token_ids == [token for chunk in chunks for token in chunk.token_ids]
        assert s.text == "".join(chunk.text for chunk in chunks)
        if request.aborted:
            assert s.finish_reason == "abort"
        elif request.error is None:
            assert (s.token_ids, s.finish_reason) == (request.ids, request.reason)
        if s.params.logprobs is not None:
            assert [one.chosen for one in s.logprobs] == s.token_ids
        if request.error is None:
            assert chunks[-1].metrics is metrics
        assert len(s.token_ids) == metrics.decoded_tokens + bool(s.token_ids)
        accepted = sum(sum(chunk.accepted) for chunk in chunks)
        assert metrics.accepted == accepted
        assert len(metrics.accepted_at) <= len(metrics.proposed_at) < self.config.block_size
        pairs = zip(metrics.accepted_at, metrics.proposed_at, strict=False)
        assert all(a <= b <= metrics.cycles for a, b in pairs)
        # A cycle proposes what its block holds below the limit; the first chunk is the prompt's.
        width = self.config.block_size if s.speculate else 1
        known = accumulate((len(chunk.token_ids) for chunk in chunks), initial=len(s.prompt))
        counted = [max(0, min(width - 1, self.draft_limit - tokens)) for tokens in known]
        assert metrics.proposed == sum(counted[1 : metrics.cycles + 1])
        if s.token_ids:
            assert metrics.prompt_tokens == len(s.prompt)
        if self.drafts and not s.speculate:
            assert metrics.cached_tokens == 0

    def _emit(self, sequence: Sequence, item: Chunk | BaseException) -> None:
        request = next(request for request in self.requests if request.sequence is sequence)
        assert not request.ended, "something after the end"
        if isinstance(item, Chunk):
            assert item.token_ids or item.finish_reason, "an empty chunk"
            request.chunks.append(item)
        else:
            assert isinstance(item, (StepFailed, LookupError)), f"{item!r}"
            request.error = item

    def _note(self, action: str) -> None:
        self.log.append(action)


# ---------------------------------------------------------------------- seeded schedules


def random_world(rng: random.Random) -> World:
    """Small sizes of everything: the edges meet at once."""
    block, page, seqs = rng.randint(1, 6), rng.randint(1, 5), rng.choice([1, 2, 3, 3, 4, 4])
    longest = rng.randint(4, 40)
    alone = math.ceil((longest + block) / page)  # pages of one full sequence
    least = math.ceil((2 + block) / page)
    plenty = rng.randint(alone, seqs * alone + 4)
    pages = rng.choice(
        [alone, alone + 1, alone + rng.randint(0, alone), rng.randint(least, alone), plenty]
    )
    config = EngineConfig(
        max_model_len=longest,
        block_size=block,
        page_size=page,
        num_pages=1 + max(pages, 1),
        max_seqs=seqs,
        max_prefill=rng.randint(1, 16),
    )
    limit = rng.choice([longest + block, rng.randint(1, longest)])
    skill = rng.choice([0.0, 0.5, 0.8, 1.0])
    vocab = rng.choice([3, 11, 20, 20])
    return World(
        config, rng.random() < 0.7, limit, rng.choice([1, 2, 2]), vocab, skill, rng.getrandbits(32)
    )


def random_request(world: World, rng: random.Random, mixed: bool) -> None:
    longest = world.config.max_model_len
    world.add(
        stem=rng.choice([0, 0, 1, rng.randint(2, 9)]),
        length=rng.choice([rng.randint(0, longest), rng.randint(0, longest // 3)]),
        tail=[rng.randrange(world.vocab) for _ in range(rng.choice([0, 0, 1, 3]))],
        budget=rng.choice([1, rng.randint(1, longest), longest, longest]),
        stop=rng.choice([None, None, rng.randint(0, longest)]),
        host_stop=rng.choice([0, 0, 0, 0, rng.randint(1, longest)]),
        host_error=rng.choice([0] * 12 + [rng.randint(1, longest)]),
        speculate=not mixed or rng.random() < 0.6,
        seed=rng.choice([0, 0, rng.getrandbits(40)]),
        kind=rng.choice([0, 0, 1, 2]),
    )


def drive(world: World, rng: random.Random) -> None:
    """One schedule: actions at random until all requests have come, then to the end."""
    left, mixed = rng.randint(1, 14), rng.random() < 0.5
    add, abort = rng.choice([0.1, 0.3, 0.9]), rng.choice([0.0, 0.03, 0.1])
    fail, eager = rng.choice([0.0, 0.0, 0.03]), rng.random()
    while left or (world.scheduler.busy and rng.random() < 0.995):
        if left and rng.random() < add:
            random_request(world, rng, mixed)
            left -= 1
        if world.requests and rng.random() < abort:
            world.abort(rng.randrange(len(world.requests)))
        if rng.random() < eager:
            world.run(rng.choice(STAGES) if rng.random() < fail else None)
        full = len(world.launched) == world.depth
        if not full and rng.random() < 0.6:
            world.plan()
        elif world.launched:
            world.commit()
        if rng.random() < 0.5:
            world.deliver()
    world.drain()


def run_schedule(seed: int) -> World:
    """One seeded schedule; an AssertionError names the seed and the last actions."""
    rng = random.Random(seed)
    world = random_world(rng)
    try:
        drive(world, rng)
    except Exception as error:
        actions = "\n  ".join([world.log[0], *world.log[1:][-40:]])
        raise AssertionError(f"run_schedule({seed}): {error!r}, after\n  {actions}") from error
    return world


@pytest.mark.parametrize("part", range(PARTS))
def test_random_schedules(part: int) -> None:
    for seed in range(part, SCHEDULES, PARTS):
        run_schedule(seed)


# ---------------------------------------------------------------------- hypothesis


class Schedules(RuleBasedStateMachine):
    """The same actions, chosen by hypothesis."""

    @initialize(
        block=st.integers(1, 4),
        page=st.integers(1, 4),
        seqs=st.integers(1, 3),
        longest=st.integers(4, 16),
        spare=st.integers(0, 16),
        prefill=st.integers(1, 8),
        drafts=st.booleans(),
        skill=st.sampled_from([0.0, 0.7, 1.0]),
        seed=st.integers(0, 3),
    )
    def begin(
        self,
        block: int,
        page: int,
        seqs: int,
        longest: int,
        spare: int,
        prefill: int,
        drafts: bool,
        skill: float,
        seed: int,
    ) -> None:
        config = EngineConfig(
            max_model_len=longest,
            block_size=block,
            page_size=page,
            num_pages=1 + math.ceil((longest + block) / page) + spare,
            max_seqs=seqs,
            max_prefill=prefill,
        )
        self.world = World(config, drafts, longest + block, skill=skill, seed=seed)

    @rule(
        stem=st.integers(0, 4),
        length=st.integers(0, 16),
        tail=st.lists(st.integers(0, 10), max_size=2),
        budget=st.integers(1, 16),
        stop=st.none() | st.integers(0, 16),
        host_stop=st.sampled_from([0, 0, 1, 3]),
        speculate=st.booleans(),
    )
    def add(self, **request: Any) -> None:
        self.world.add(**request)

    @precondition(lambda self: self.world.requests)
    @rule(place=st.integers(0, 9))
    def abort(self, place: int) -> None:
        self.world.abort(place)

    @precondition(lambda self: len(self.world.launched) < self.world.depth)
    @rule()
    def plan(self) -> None:
        self.world.plan()

    @precondition(lambda self: self.world.launched)
    @rule(fails=st.sampled_from([None, None, None, *STAGES]))
    def run(self, fails: str | None) -> None:
        self.world.run(fails)

    @precondition(lambda self: self.world.launched)
    @rule()
    def commit(self) -> None:
        self.world.commit()

    @precondition(lambda self: self.world.launched)
    @rule(steps=st.integers(1, 6))
    def go_on(self, steps: int) -> None:
        """Full pipeline for a while."""
        for _ in range(steps):
            if len(self.world.launched) == self.world.depth or not self.world.plan():
                if not self.world.launched:
                    break
                self.world.commit()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


def test_shrinkable_schedules() -> None:
    run_state_machine_as_test(
        Schedules,
        settings=settings(
            max_examples=max(SCHEDULES // 25, 1),
            stateful_step_count=40,
            deadline=None,
            database=None,
            derandomize=True,
        ),
    )
