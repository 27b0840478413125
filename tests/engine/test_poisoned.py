"""Random schedules on a real tiny pair whose fresh, freed and evicted pages are all NaN.

Scheduler, runner, pages and models are the real ones; a `World` is an engine's loop without its
thread, with up to `depth` steps launched. Both pools begin as NaN, a page is NaN again from the
moment it is free or handed out, and so is the dummy page before every step: what is read and was
not written by its own request shows.
"""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import kit
import oracle
from nanodflash import SamplingParams, ops
from nanodflash.config import EngineConfig
from nanodflash.decoding.cycle import Decoder
from nanodflash.decoding.plan import StepPlan
from nanodflash.engine import closures
from nanodflash.engine.paging import PagePool
from nanodflash.engine.runner import Results, Runner
from nanodflash.engine.scheduler import Scheduler
from nanodflash.engine.sequence import Chunk
from nanodflash.engine.sequence import Sequence as HostSequence
from nanodflash.engine.steps import ModelSteps
from nanodflash.engine.streams import InlineStream

SCHEDULES, PARTS = 50, 5
LIMIT, NEW, VOCAB = 44, 22, 320  # prompt and new tokens; new tokens of a text
TARGET = {"num_hidden_layers": 3, "intermediate_size": 64}
DRAFT = {
    "num_target_layers": 3,
    "intermediate_size": 64,
    "dflash_config": {"mask_token_id": 319, "target_layer_ids": [2, 0]},
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
}
SHARED = [(17 * i + 3) % 300 for i in range(14)]  # what many prompts begin with
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=1.5, top_k=9, top_p=0.9, seed=2**40 + 3),
    SamplingParams(logprobs=2),
]

target = cache(lambda: kit.make_target(**TARGET))
draft = cache(lambda: kit.make_draft(**DRAFT))


@cache
def judge() -> Any:
    """The oracle's target: the same weights, a rotary table of its own."""
    model = kit.make_target(**TARGET)
    model.prepare(2 * LIMIT)
    return model


@dataclass(frozen=True)
class Text:
    """A prompt, and what follows it by the oracle.

    A token depends on the tokens before it, the seed and its position alone, so what follows any
    longer start of the text is known too.
    """

    ids: list[int]
    start: int
    params: SamplingParams


@cache
def texts() -> list[Text]:
    """Prompts that share starts, greedy and seeded."""
    dice, made = random.Random(11), []
    for place in range(16):
        tail = [dice.randrange(VOCAB) for _ in range(dice.randint(1, 8))]
        prompt = SHARED[: dice.choice([0, 6, 9, 14])] + tail
        params = replace(PARAMS[place % len(PARAMS)], max_new_tokens=NEW)
        made.append(Text(prompt + oracle.decode(judge(), prompt, params)[0], len(prompt), params))
    return made


# ---------------------------------------------------------------------- pages of NaN


class PoisonedPool(PagePool):
    """The real pool; every page that is nobody's, or has just become somebody's, is NaN."""

    def __init__(self, num_pages: int, page_size: int, rows: list[Tensor]) -> None:
        super().__init__(num_pages, page_size)
        self.rows, self.evicted = rows, 0
        self.poison(range(num_pages))

    def poison(self, pages: Sequence[int]) -> None:
        for rows in self.rows:
            rows[:, list(pages)] = math.nan

    def allocate(self, count: int) -> list[int]:
        self.evicted += max(count - len(self._free), 0)
        pages = super().allocate(count)
        self.poison(pages)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        super().release(pages)
        self.poison([page for page in pages if page in self._free])

    def publish(self, before: int, ids: Sequence[int], page: int) -> bool:
        for rows in self.rows:
            assert rows[:, page].isfinite().all(), f"page {page} is published with NaN in it"
        return super().publish(before, ids, page)

    def chains(self) -> list[tuple[list[int], list[int]]]:
        """(ids, pages) of every cached page that no cached page hangs on, from the start."""
        found = []
        for page in self._key_of.keys() - {before for before, _ in self._key_of.values()}:
            ids, pages = [], []
            while page:
                before, own = self._key_of[page]
                ids, pages, page = [*own, *ids], [page, *pages], before
            found.append((ids, pages))
        return found


@torch.no_grad()
def fresh_rows(ids: Sequence[int]) -> list[Tensor]:
    """[L, len(ids), 2, Hkv, D] of both models, by one uncached forward and one injection."""
    positions, seen, injected = torch.arange(len(ids)), kit.Kept(), kit.Kept()
    draft().prepare(2 * LIMIT)
    _, features = judge()(torch.tensor(ids), positions, seen, draft().config.target_layer_ids)
    draft().inject(features, positions, injected)
    return [torch.stack([*kept.rows.values()]) for kept in (seen, injected)]


attend = ops.paged_attention


def watched(q: Tensor, rows: Tensor, places: Tensor, mask: Tensor) -> Tensor:
    """Attention that tells of a NaN in what a live row sees: one with a page of its own."""
    seen = attend(q, rows, places, mask)
    assert seen[places[:, 0] >= rows.shape[1]].isfinite().all(), "a row has seen NaN"
    return seen


# ---------------------------------------------------------------------- schedules


@dataclass
class Job:
    """A request, what it must give, and what came of it."""

    sequence: HostSequence
    ids: list[int]
    reason: str
    chunks: list[Chunk] = field(default_factory=list)


class World:
    """Scheduler, runner and requests: an engine's loop, its actions in any order."""

    def __init__(
        self, config: EngineConfig, drafts: bool, skill: float, depth: int = 1, graphs: bool = False
    ) -> None:
        self.config, self.depth, self.skill = config, depth, skill
        proposer = self._propose if skill and config.block_size > 1 else None
        decoder = Decoder(target(), draft() if drafts else None, config, proposer)
        self.runner = Runner(lambda _: ModelSteps(decoder, graphs), InlineStream(), config)
        self.scheduler = Scheduler(config, LIMIT, drafts, self._emit)
        pools = [pool for pool in (decoder.target_pool, decoder.draft_pool) if pool is not None]
        self.pages = PoisonedPool(
            config.total_pages, config.page_size, [pool.rows for pool in pools]
        )
        self.scheduler.pages = self.pages
        self.launched: list[tuple[StepPlan, list[Results]]] = []
        self.jobs: dict[int, Job] = {}

    def add(self, text: Text, start: int, budget: int, stop: int, speculate: bool) -> None:
        """Ask for what follows the first `start` ids; the id at place `stop` of it ends it."""
        answer, reason = text.ids[start : start + budget], "length"
        stops = answer[stop : stop + 1]
        if stops:
            answer, reason = answer[: answer.index(stops[0]) + 1], "stop"
        budget, speculate = min(budget, LIMIT - start), speculate and self.config.block_size > 1
        params, prompt = replace(text.params, max_new_tokens=budget), text.ids[:start]
        sequence = HostSequence(prompt, params, budget, params.seed or 0, stops, speculate, None)
        self.jobs[id(sequence)] = Job(sequence, answer, reason)
        self.scheduler.add(sequence)

    def plan(self) -> None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.launched.append((plan, []))
        assert self.launched or not self.scheduler.busy, "stuck: nothing can be planned"

    def run(self) -> None:
        """The device gets to the oldest launched step that it has not run."""
        for plan, results in self.launched:
            if not results:
                self.pages.poison([0])
                results.append(kit.run_plan(self.runner, plan))
                return

    def commit(self) -> None:
        _, results = self.launched[0]
        while not results:
            self.run()
        del self.launched[0]
        self.scheduler.commit(results[0].finals, results[0].rows, results[0].logprobs)
        self.scheduler.deliver()
        self.scheduler.check()

    def drain(self) -> Counter[str]:
        """Run to the end, check all that came out, and count what happened on the way."""
        while self.scheduler.busy:
            if len(self.launched) < self.depth:
                self.plan()
            if self.launched:
                self.commit()
        self.scheduler.check()
        assert self.pages.stats().live == 0
        seen, self.pages.evicted = Counter(evicted=self.pages.evicted), 0
        for job in self.jobs.values():
            self._check(job)
            metrics = job.sequence.metrics
            seen["accepted"] += metrics.accepted
            seen["cached"] += metrics.cached_tokens
            seen["preempted"] += metrics.preemptions
            seen[str(job.sequence.finish_reason)] += 1
            seen["tokens"] += len(job.sequence.token_ids)
        for ids, pages in self.pages.chains():
            for rows, fresh in zip(self.pages.rows, fresh_rows(ids), strict=False):
                held = rows[:, pages].flatten(1, 2)
                torch.testing.assert_close(held, fresh, rtol=0, atol=1e-10)
        return seen

    def _check(self, job: Job) -> None:
        sequence = job.sequence
        ids, reason = sequence.token_ids, sequence.finish_reason
        if reason == "abort":
            assert ids == job.ids[: len(ids)]
        else:
            assert (ids, reason) == (job.ids, job.reason)
        assert [token for chunk in job.chunks for token in chunk.token_ids] == ids
        if sequence.params.logprobs is not None:
            likely = [value for one in sequence.logprobs for _, value in one.top]
            chosen = [one.chosen for one in sequence.logprobs]
            assert len(chosen) == len(ids)
            assert all(map(math.isfinite, chosen + likely))

    def _emit(self, sequence: HostSequence, item: Any) -> None:
        assert isinstance(item, Chunk), repr(item)
        self.jobs[id(sequence)].chunks.append(item)

    def _propose(self, tokens: Tensor, length: Tensor) -> Tensor:
        """What comes next in a row's text, spoiled at some positions; 0 for what has no text."""
        rows = [row[: n + 1] for row, n in zip(tokens.tolist(), length.tolist(), strict=True)]
        return torch.tensor([self._next(row) for row in rows])

    def _next(self, row: list[int]) -> list[int]:
        text = next((text.ids for text in texts() if text.ids[: len(row)] == row), [])
        right = [*text[len(row) :], *[0] * LIMIT][: self.config.block_size - 1]
        dice = random.Random(len(row))
        return [x if dice.random() < self.skill else (x + 1) % VOCAB for x in right]


def random_world(dice: random.Random) -> World:
    """Small pages and few of them."""
    block, page = dice.choice([1, 2, 4, 4, 6]), dice.randint(1, 6)
    alone = math.ceil((LIMIT + block) / page)  # pages of one full sequence
    config = EngineConfig(
        max_model_len=LIMIT,
        block_size=block,
        page_size=page,
        num_pages=1 + alone + dice.choice([0, 1, dice.randint(0, alone // 2)]),
        max_seqs=dice.randint(2, 4),
        max_prefill=dice.choice([1, 5, 16, 64]),
        prefix_cache=dice.random() < 0.9,
    )
    skill = dice.choice([0.0, 0.7, 0.7, 1.0])
    return World(config, not skill or dice.random() < 0.8, skill, dice.choice([1, 1, 2]))


def run_schedule(seed: int, world: World | None = None) -> Counter[str]:
    """One seeded schedule: actions at random until all requests have come, then to the end."""
    dice = random.Random(seed)
    world = world or random_world(dice)
    left, mixed = dice.randint(3, 9), dice.random() < 0.5
    add, abort = dice.choice([0.2, 0.5, 1.0]), dice.choice([0.0, 0.05])
    while left or (world.scheduler.busy and dice.random() < 0.99):
        if left and dice.random() < add:
            text = dice.choice(texts())
            start = dice.choice([text.start, dice.randrange(text.start, len(text.ids))])
            room = len(text.ids) - start
            budget, stop = dice.choice([room, dice.randint(1, room)]), dice.choice([NEW, room // 2])
            world.add(text, start, budget, stop, not mixed or dice.random() < 0.6)
            left -= 1
        if world.jobs and dice.random() < abort:
            world.scheduler.abort(dice.choice([*world.jobs.values()]).sequence)
        if dice.random() < 0.5:
            world.run()
        if len(world.launched) < world.depth and dice.random() < 0.7:
            world.plan()
        elif world.launched:
            world.commit()
    return world.drain()


@pytest.fixture
def _watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanodflash.ops.rows.paged_attention", watched)


def test_the_texts_have_power() -> None:
    assert len({tuple(text.ids) for text in texts()}) == len(texts())
    assert sum(len(set(text.ids[text.start :])) for text in texts()) > len(texts()) * NEW // 2


@pytest.mark.usefixtures("_watched")
@pytest.mark.parametrize("part", range(PARTS))
def test_schedules(part: int) -> None:
    """Tokens are the oracle's, nothing seen or published is NaN, cached pages hold fresh rows."""
    seen: Counter[str] = Counter()
    for seed in range(part, SCHEDULES, PARTS):
        seen += run_schedule(seed)
    wanted = {"accepted", "cached", "preempted", "evicted", "length", "stop", "abort"}
    assert wanted <= seen.keys(), f"too tame: {seen}"


@pytest.mark.parametrize(("size", "pages"), [(4, 14), (16, 17)])
def test_replayed_from_traces(monkeypatch: pytest.MonkeyPatch, size: int, pages: int) -> None:
    """Schedules one after another on one engine: its traces meet pages that were another's."""
    monkeypatch.setattr(closures, "AFTER", 1)
    monkeypatch.setattr(closures, "MOST", 64)  # these are small, and every shape shall have one
    config = EngineConfig(
        max_model_len=LIMIT,
        block_size=size,
        page_size=4,
        num_pages=pages,
        max_seqs=2,
        max_prefill=16,
    )
    world, seen = World(config, True, 0.0, depth=2, graphs=True), Counter[str]()
    for seed in range(5):
        seen += run_schedule(seed, world)
        world.jobs.clear()
    traced = Counter(name for name, _ in world.runner.steps._traces.made)
    assert traced.total() > 20
    assert bool(traced["prefill"]) == (size == 16)  # padding must fit in a block
    assert {"cached", "preempted", "evicted"} <= seen.keys()


# ---------------------------------------------------------------------- that it can fail


def uncleared(pages: Tensor, end: Tensor, keys: Tensor, like: Tensor) -> Tensor:
    """Places behind the block are read as they are; the mask alone hides them."""
    size = like.shape[-4]
    return (pages[:, :, None] * size + keys[:size]).flatten(1)


publish = Scheduler._publish


def early(self: Scheduler, sequence: HostSequence, committed: int) -> None:
    """Pages are offered with the anchor's place in them, which is not written yet."""
    publish(self, sequence, committed + 1)


def test_the_poison_bites(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clearing unwritten places is what keeps NaN out, and without NaN nobody would notice."""
    monkeypatch.setattr("nanodflash.ops.rows.row_places", uncleared)
    with pytest.raises(AssertionError):
        run_schedule(0)
    monkeypatch.setattr(PoisonedPool, "poison", lambda *_: None)
    assert run_schedule(0)["tokens"] > 20


def test_a_page_published_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_publish", early)
    with pytest.raises(AssertionError, match="published with NaN"):
        run_schedule(0)
