"""Many requests at once, and whatever befalls some of them: the others' texts are the oracle's."""

import asyncio
import functools
import math
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import nanodflash.llm
import oracle
from nanodflash import LLM, SamplingParams
from nanodflash.config import EngineConfig
from nanodflash.decoding.plan import StepPlan
from nanodflash.engine.steps import ModelSteps

SIZE, PAGE, COUNT = 4, 4, 24
SHARED = [(17 * i + 3) % 300 for i in range(14)]  # what many prompts begin with


@dataclass(eq=False)
class Job:
    """A request and the oracle's answer."""

    prompt: list[int]
    params: SamplingParams
    speculate: bool
    ids: list[int]
    reason: str

    def check(self, out: Any) -> None:
        """`out` is whole."""
        assert (out.token_ids, out.finish_reason) == (self.ids, self.reason)
        assert len(out.token_ids) == 1 + out.metrics.decoded_tokens
        assert out.metrics.prompt_tokens == len(self.prompt)
        if not self.speculate:
            assert (out.metrics.proposed, out.metrics.cached_tokens) == (0, 0)

    def check_start(self, ids: list[int], reason: str | None) -> None:
        """`ids` may have been cut by an abort."""
        assert ids == self.ids[: len(ids)]
        assert reason in ("abort", self.reason)
        assert reason == "abort" or ids == self.ids


def draw(dice: random.Random, place: int) -> tuple[list[int], SamplingParams, bool]:
    """Greedy, sampled, full and plain requests of any length."""
    start = SHARED[: dice.choice([0, 5, 8, 14])]
    prompt = [*start, *(dice.randrange(320) for _ in range(dice.randint(1, 16)))]
    changes: dict[str, Any] = {"max_new_tokens": dice.randint(1, 22)}
    if place % 4 in (1, 2):
        changes |= {"temperature": dice.choice([0.5, 1.0]), "seed": dice.getrandbits(64)}
        changes |= {"top_k": dice.choice([0, 5]), "top_p": dice.choice([1.0, 0.9])}
    if place % 4 in (2, 3):
        changes |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {3: 2.0}}
        changes |= {"stop_token_ids": tuple(dice.sample(range(320), 14))}
        changes |= {"min_new_tokens": changes["max_new_tokens"] // 3}
    return prompt, SamplingParams(**changes), place % 5 != 4


@pytest.fixture(scope="module")
def jobs(expect: Any) -> list[Job]:
    dice, made = random.Random(3), []
    for place in range(COUNT):
        prompt, params, speculate = draw(dice, place)
        ids, reason = oracle.decode(expect.target, prompt, params)
        made.append(Job(prompt, params, speculate, ids, reason))
    assert len({tuple(job.prompt) for job in made}) == COUNT
    return made


class Book:
    """Proposes to every row what comes next in its text, spoiled at every fifth position."""

    def __init__(self, jobs: list[Job]) -> None:
        self.texts = [[*job.prompt, *job.ids] for job in jobs]
        self.before: Callable[[list[list[int]]], None] = lambda _: None

    def __call__(self, tokens: Tensor, length: Tensor) -> Tensor:
        rows = [row[: n + 1] for row, n in zip(tokens.tolist(), length.tolist(), strict=True)]
        self.before(rows)
        return torch.tensor([self.next(row) for row in rows])

    def next(self, row: list[int]) -> list[int]:
        text = next(text for text in self.texts if text[: len(row)] == row)
        right = [*text[len(row) :], *[0] * SIZE][: SIZE - 1]
        return [(x + ((len(row) + i) % 5 == 0)) % 320 for i, x in enumerate(right)]


@pytest.fixture
def batched(open_llm: Any, jobs: list[Job], monkeypatch: Any) -> Callable[..., tuple[LLM, Book]]:
    """An LLM in small pages with a `Book` of the jobs; `max_prefill` is an option too."""

    def make(max_prefill: int = 512, **options: Any) -> tuple[LLM, Book]:
        config = functools.partial(EngineConfig, max_prefill=max_prefill)
        monkeypatch.setattr(nanodflash.llm, "EngineConfig", config)
        book = Book(jobs)
        options = {"block_size": SIZE, "page_size": PAGE, "proposer": book} | options
        return open_llm(**options), book

    return make


def submit(llm: LLM, job: Job) -> Any:
    return llm.submit(job.prompt, job.params, job.speculate)


def finish(handle: Any) -> Any:
    """What came of a request, whoever has read its chunks; never waits for ever."""
    assert handle.wait(60), "it never ended"
    return handle._sequence


def fits(jobs: list[Job]) -> int:
    """Pages, the dummy page included, that the longest of the jobs needs."""
    return 1 + max(
        math.ceil((len(job.prompt) + job.params.max_new_tokens + SIZE) / PAGE) for job in jobs
    )


SETUPS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "few pages": {"num_pages": 19},
    "few pages, small chunks": {"num_pages": 17, "max_prefill": 5, "max_seqs": 5},
    "two slots": {"max_seqs": 2, "max_prefill": 7},
    "one token a chunk": {"page_size": 1, "num_pages": 75, "max_prefill": 1},
    "large pages": {"page_size": 32, "num_pages": 5},
    "nothing cached": {"prefix_cache": False, "num_pages": 24, "max_prefill": 9},
}


# ---------------------------------------------------------------------- all of them


@pytest.mark.parametrize("name", SETUPS)
def test_from_several_threads(batched: Any, jobs: list[Job], no_leak: Any, name: str) -> None:
    assert fits(jobs) <= 17
    llm, _ = batched(**SETUPS[name])

    def client(mine: list[Job]) -> list[Any]:
        handles = [submit(llm, job) for job in mine]
        return [finish(handle) for handle in handles]

    order = random.Random(name).sample(jobs, COUNT)
    with ThreadPoolExecutor(4) as pool:
        parts = [order[i::4] for i in range(4)]
        done = list(pool.map(client, parts))
    total = 0
    for part, outs in zip(parts, done, strict=True):
        for job, out in zip(part, outs, strict=True):
            job.check(out)
            total += out.metrics.preemptions
    assert total or "num_pages" not in SETUPS[name], "nothing was preempted"
    accepted = sum(out.metrics.accepted for outs in done for out in outs)
    assert accepted > COUNT, "the proposals are good here"
    no_leak(llm)


@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize("proposer", [True, False])
def test_generate(batched: Any, jobs: list[Job], proposer: bool, speculate: bool) -> None:
    """By its own drafter and by the book; outputs in the order of the prompts."""
    llm, _ = batched(num_pages=24, max_prefill=6, **({} if proposer else {"proposer": None}))
    outs = llm.generate([job.prompt for job in jobs], [job.params for job in jobs], speculate)
    for job, out in zip(jobs, outs, strict=True):
        replace(job, speculate=speculate).check(out)
    assert sum(out.metrics.preemptions for out in outs) > 0


def test_requests_that_come_one_by_one(batched: Any, jobs: list[Job]) -> None:
    """Every one is submitted when an earlier one has just shown a chunk."""
    llm, _ = batched(num_pages=30, max_seqs=3)
    handles = [submit(llm, jobs[0])]
    for place, job in enumerate(jobs[1:]):
        next(iter(handles[place]), None)
        handles.append(submit(llm, job))
    for job, handle in zip(jobs, handles, strict=True):
        job.check(finish(handle))


def test_shared_prefixes(batched: Any, jobs: list[Job]) -> None:
    """What comes from the cache changes no text and no count of any cycle."""
    mine = [job for job in jobs if job.speculate]
    prompts, params = [job.prompt for job in mine], [job.params for job in mine]
    cold = batched(prefix_cache=False)[0].generate(prompts, params)
    llm, _ = batched(max_model_len=200)
    for again in range(3):
        warm = llm.generate(prompts, params)
        cached = [out.metrics.cached_tokens for out in warm]
        assert sum(cached) > 0
        if again == 2:  # side by side, the second to fill a page stops publishing: see once more
            assert cached == [(len(prompt) - 1) // PAGE * PAGE for prompt in prompts]
        for job, one, two in zip(mine, cold, warm, strict=True):
            job.check(two)
            assert one.metrics.cached_tokens == 0
            assert one.metrics.emitted == two.metrics.emitted
            assert one.metrics.accepted_at == two.metrics.accepted_at
            assert one.metrics.proposed_at == two.metrics.proposed_at


# ---------------------------------------------------------------------- aborts


@pytest.mark.parametrize("seed", range(4))
def test_aborts_at_any_moment(batched: Any, jobs: list[Job], no_leak: Any, seed: int) -> None:
    """While waiting, in a prompt, in cycles, under page pressure, twice, and after the end."""
    dice = random.Random(seed)
    llm, _ = batched(num_pages=18, max_prefill=5, max_seqs=4)
    handles = [submit(llm, job) for job in jobs]
    doomed = set(dice.sample(range(COUNT), COUNT // 2))

    def end(place: int) -> None:
        for _, _ in zip(range(place % 4), handles[place], strict=False):
            continue  # some see a few chunks first
        for _ in range(dice.randint(1, 2)):
            handles[place].abort()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(end, sorted(doomed, key=lambda _: dice.random())))
    aborted = 0
    for place, (job, handle) in enumerate(zip(jobs, handles, strict=True)):
        out = finish(handle)
        if place in doomed:
            job.check_start(out.token_ids, out.finish_reason)
            aborted += out.finish_reason == "abort"
        else:
            job.check(out)
        handle.abort()
    assert aborted > 2
    no_leak(llm)
    jobs[0].check(finish(submit(llm, jobs[0])))


def test_readers_that_go(batched: Any, jobs: list[Job], no_leak: Any) -> None:
    """Streams that are closed after any number of chunks, with others in the batch."""
    llm, _ = batched(num_pages=24, max_seqs=3)
    others = [submit(llm, job) for job in jobs[:6]]
    for count, job in enumerate(jobs[6:14]):
        stream: Any = llm.stream(job.prompt, job.params, job.speculate)
        chunks = [chunk for _, chunk in zip(range(count), stream, strict=False)]
        stream.close()
        ids = [token for chunk in chunks for token in chunk.token_ids]
        assert ids == job.ids[: len(ids)]
    for job, handle in zip(jobs, others, strict=False):
        job.check(finish(handle))
    no_leak(llm)


@pytest.mark.parametrize("cycles", [1, 4, 15])
def test_closing_while_they_run(pair: Any, jobs: list[Job], cycles: int) -> None:
    """Nobody waits for ever: running and waiting ones end with "abort", and no page is lost."""
    book, options = Book(jobs), {"block_size": SIZE, "page_size": PAGE, "num_pages": 24}
    llm = LLM(pair.target, pair.draft, dtype="fp64", max_seqs=3, proposer=book, **options)
    reached, seen = threading.Event(), []

    def count(rows: list[list[int]]) -> None:
        seen.append(rows)
        if len(seen) == cycles:
            reached.set()

    book.before = count
    handles = [submit(llm, job) for job in jobs]
    assert reached.wait(60)
    llm.close()
    reasons = []
    for job, handle in zip(jobs, handles, strict=True):
        assert handle.done
        out = finish(handle)
        job.check_start(out.token_ids, out.finish_reason)
        reasons.append(out.finish_reason)
    assert "abort" in reasons
    llm.engine.scheduler.check()
    stats = llm.engine.scheduler.pages.stats()
    assert (stats.live, stats.free + stats.cached) == (0, 23)
    with pytest.raises(RuntimeError, match="closed"):
        submit(llm, jobs[0])
    handles[0].abort()  # of no use, and no harm
    llm.close()


# ---------------------------------------------------------------------- failures


def test_a_failing_step_ends_only_its_requests(
    batched: Any, jobs: list[Job], no_leak: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain rows, those in line, and all that come later are not touched."""
    running: list[int] = []  # numbers of the steps that the device has begun
    run = ModelSteps.run

    def noted(self: ModelSteps, plan: StepPlan, *others: Any) -> None:
        running.append(plan.number)
        run(self, plan, *others)

    monkeypatch.setattr(ModelSteps, "run", noted)
    llm, book = batched(num_pages=40, max_seqs=4, max_prefill=6)
    gate, failed, calls = threading.Event(), set(), []

    def fail(rows: list[list[int]]) -> None:
        assert gate.wait(60)  # until all are in line
        calls.append(len(rows))
        if len(calls) in (3, 9):
            steps = list(llm.engine.scheduler._launched)
            (launched,) = (step for step in steps if step.plan.number == running[-1])
            assert launched.rows
            failed.update(map(id, launched.rows + launched.spans))
            raise RuntimeError("scripted failure")

    book.before = fail
    handles = [submit(llm, job) for job in jobs]
    gate.set()
    raised = 0
    for job, handle in zip(jobs, handles, strict=True):
        out = finish(handle)
        # One that had ended in the step before is in a failed step too, as a surplus row.
        if id(out) in failed and out.finish_reason is None:
            raised += 1
            with pytest.raises(RuntimeError, match="scripted failure"):
                handle.result()
        else:
            job.check(out)
    assert 2 <= raised <= len(failed) <= 8
    no_leak(llm)
    handles = [submit(llm, job) for job in jobs]  # pages of the failed ones are in the cache
    for job, handle in zip(jobs, handles, strict=True):
        job.check(finish(handle))
    no_leak(llm)


def test_generate_raises_and_ends_the_others(batched: Any, jobs: list[Job], no_leak: Any) -> None:
    llm, book = batched(max_seqs=2)
    mine = [replace(jobs[0], params=SamplingParams(max_new_tokens=20)), *jobs[1:8]]

    def fail(rows: list[list[int]]) -> None:
        if any(row[: len(mine[0].prompt)] == mine[0].prompt for row in rows):
            raise RuntimeError("scripted failure")

    book.before = fail
    with pytest.raises(RuntimeError, match="scripted failure"):
        llm.generate([job.prompt for job in mine], [job.params for job in mine])
    no_leak(llm)
    jobs[9].check(finish(submit(llm, jobs[9])))


@pytest.mark.parametrize(
    ("prompt", "new", "pages"), [(1, 16, 6), (17, 1, 6), (30, 200, 59), (12, 5, 6)]
)
def test_what_can_never_fit(
    batched: Any, jobs: list[Job], no_leak: Any, prompt: int, new: int, pages: int
) -> None:
    """Refused at once with the counts, whatever else runs; one page less is taken."""
    llm, book = batched(num_pages=6)
    small = SamplingParams(max_new_tokens=8)
    book.texts.append([5] * 300)
    book.next = lambda row: [0] * (SIZE - 1)
    running = llm.submit([5], small)
    params = SamplingParams(max_new_tokens=new)
    told = rf"needs {pages} pages \(prompt {prompt}, new tokens {new}\), the pool has 5"
    for call in (llm.submit, llm.generate, llm.stream):
        with pytest.raises(ValueError, match=told):
            call([5] * prompt, params)
    with pytest.raises(ValueError, match=told):
        llm.generate([[5], [5] * prompt], [small, params])
    assert finish(running).finish_reason == "length"
    if pages == 6 and new > 1:
        fewer = replace(params, max_new_tokens=new - 1)
        assert llm.generate([5] * prompt, fewer)[0].finish_reason == "length"
    no_leak(llm)


# ---------------------------------------------------------------------- asyncio


def test_asyncio(batched: Any, jobs: list[Job], no_leak: Any) -> None:
    """Several handles in one loop; a reader that is cancelled ends its own request alone."""
    llm, _ = batched(num_pages=24, max_seqs=3)

    async def read(job: Job, chunks: int = 10**9) -> tuple[list[int], str | None]:
        ids, handle = [], submit(llm, job)
        async for chunk in handle:
            ids += chunk.token_ids
            chunks -= 1
            if chunk.finish_reason is not None:
                return ids, chunk.finish_reason
            if not chunks:
                await asyncio.sleep(60)  # until it is cancelled
        raise AssertionError("no last chunk")

    async def main() -> None:
        longest = sorted(jobs, key=lambda job: -len(job.ids))[:3]
        doomed = [asyncio.create_task(read(job, 1)) for job in longest]
        tasks = [asyncio.create_task(read(job)) for job in jobs]
        await tasks[0]
        for task in doomed:
            task.cancel()
        for job, task in zip(jobs, tasks, strict=True):
            assert await asyncio.wait_for(task, 60) == (job.ids, job.reason)
        for task in doomed:
            with suppress(asyncio.CancelledError):
                await task
            assert task.cancelled()

    asyncio.run(main())
    no_leak(llm)


def test_asyncio_raises_what_ended_it(batched: Any, jobs: list[Job], no_leak: Any) -> None:
    llm, book = batched()

    def fail(rows: list[list[int]]) -> None:
        raise RuntimeError("scripted failure")

    book.before = fail

    async def main() -> list[Any]:
        async def read(job: Job) -> list[int]:
            return [token async for chunk in submit(llm, job) for token in chunk.token_ids]

        return await asyncio.gather(*map(read, jobs[:8]), return_exceptions=True)

    for job, out in zip(jobs, asyncio.run(main()), strict=False):
        if len(job.ids) == 1 or not job.speculate:
            assert out == job.ids or isinstance(out, RuntimeError)
        else:
            assert isinstance(out, RuntimeError)
    no_leak(llm)


def test_aborts_seen_from_asyncio(batched: Any, jobs: list[Job]) -> None:
    """An abort by another thread wakes the reader."""
    llm, _ = batched(max_seqs=1)
    long = max(jobs, key=lambda job: len(job.ids))

    async def main() -> Iterator[Any]:
        handles = [submit(llm, job) for job in (long, long)]
        timer = threading.Timer(0.01, handles[1].abort)
        timer.start()

        async def read(handle: Any) -> Any:
            return [chunk async for chunk in handle]

        return iter(await asyncio.wait_for(asyncio.gather(*map(read, handles)), 60))

    for chunks in asyncio.run(main()):
        long.check_start([t for c in chunks for t in c.token_ids], chunks[-1].finish_reason)
