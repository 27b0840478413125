"""Two threads and a stream, disturbed: the same outputs as one thread, or an error that is told.

Chaos is the tiny pair with a random pause in every stream operation and around every action of the
host. Failures happen in a step, in either thread, in the stream and while loading.
"""

import asyncio
import json
import math
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nanodflash.llm
from nanodflash import LLM, SamplingParams
from nanodflash.benchmarks.simulate import Simulation
from nanodflash.engine.metrics import EngineMetrics
from nanodflash.engine.paging import PagePool
from nanodflash.engine.runner import Runner
from nanodflash.engine.scheduler import Scheduler
from nanodflash.engine.steps import ModelSteps
from nanodflash.engine.streams import CpuStream

SIZE, PAGE, COUNT, LIMIT = 4, 4, 20, 30.0
OPTIONS: dict[str, Any] = {"dtype": "fp64", "block_size": SIZE, "page_size": PAGE}
SHARED = [(17 * i + 3) % 300 for i in range(14)]  # what many prompts begin with
Request = tuple[list[int], SamplingParams, bool]
BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["one thread", "overlap"])


def within(make: Callable[[], Any], seconds: float = LIMIT) -> Any:
    """What `make` gives or raises; a failure if it takes longer."""
    made: list[Any] = []

    def run() -> None:
        try:
            made.append((make(), None))
        except BaseException as error:
            made.append((None, error))

    thread = threading.Thread(target=run, name="a caller", daemon=True)
    thread.start()
    thread.join(seconds)
    assert made, f"it did not return within {seconds} s"
    if made[0][1] is not None:
        raise made[0][1]
    return made[0][0]


def finish(handle: Any) -> Any:
    """The output of a request; never waits for ever."""
    assert handle.wait(LIMIT), "it never ended"
    return within(handle.result)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    until = time.monotonic() + 5
    while time.monotonic() < until and mine(before):
        time.sleep(0.01)
    assert not mine(before), "threads are left behind"


def mine(before: set[threading.Thread]) -> list[str]:
    """Names of the engine's threads that are alive and were not there before."""
    left = set(threading.enumerate()) - before
    return [thread.name for thread in left if thread.name.startswith("nanodflash")]


# ---------------------------------------------------------------------- chaos


class Pauses:
    """Waits 0 to 2 ms, as often as not."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)

    def __call__(self) -> None:
        if self.dice.random() < 0.5:
            time.sleep(self.dice.uniform(0, 0.002))

    def around(self, method: Any) -> Any:
        """The method, with a pause before it and one behind it."""

        def paused(*args: Any) -> Any:
            self()
            made = method(*args)
            self()
            return made

        return paused


class ChaoticStream(CpuStream):
    """A CPU stream that pauses in every operation."""

    def __init__(self, pause: Pauses) -> None:
        self.pause = pause
        super().__init__()

    def submit(self, work: Any) -> Any:
        return super().submit(self.pause.around(work))


class PoisonedPool(PagePool):
    """The real pool. What nobody has is NaN from there on in the stream where it was given back."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm.config.total_pages, llm.config.page_size)
        decoder = llm.engine.runner.steps.decoder
        self.rows = [pool.rows for pool in (decoder.target_pool, decoder.draft_pool) if pool]
        self.stream = llm.engine.runner.stream
        self.poison(range(llm.config.total_pages))

    def poison(self, pages: Any) -> None:
        def work() -> None:
            for rows in self.rows:
                rows[:, list(pages)] = math.nan

        self.stream.submit(work)

    def allocate(self, count: int) -> list[int]:
        pages = super().allocate(count)
        self.poison(pages)  # evicted ones among them
        return pages

    def release(self, pages: Any) -> None:
        super().release(pages)
        self.poison([0, *(page for page in pages if page in self._free)])


class Book:
    """Proposes what comes next in the right text, spoiled at every fourth position."""

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts

    def __call__(self, tokens: Tensor, length: Tensor) -> Tensor:
        rows = [row[: n + 1] for row, n in zip(tokens.tolist(), length.tolist(), strict=True)]
        return torch.tensor([self.next(row) for row in rows])

    def next(self, row: list[int]) -> list[int]:
        text = next((text for text in self.texts if text[: len(row)] == row), [])
        right = [*text[len(row) :], *[0] * SIZE][: SIZE - 1]
        return [(x + ((len(row) + i) % 4 == 0)) % 320 for i, x in enumerate(right)]


def draw(dice: random.Random, place: int) -> Request:
    """Greedy, sampled, full, with stop strings, with logprobs, and without drafts."""
    start = SHARED[: dice.choice([0, 5, 8, 14])]
    prompt = [*start, *(dice.randrange(300) for _ in range(dice.randint(1, 12)))]
    changes: dict[str, Any] = {"max_new_tokens": dice.randint(6, 26), "ignore_eos": place % 2 == 0}
    if place % 5 in (1, 2):
        changes |= {"temperature": dice.choice([0.5, 1.0]), "seed": dice.getrandbits(64)}
        changes |= {"top_k": dice.choice([0, 9]), "top_p": dice.choice([1.0, 0.9])}
    if place % 5 in (2, 3):
        changes |= {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {3: 2.0}}
        changes |= {"stop_token_ids": tuple(dice.sample(range(320), 9))}
    if place % 3 == 0:
        changes |= {"stop": tuple(dice.sample("abcdefghijklmnopqrstuvwxyz", 2))}
    if place % 4 == 1:
        changes |= {"logprobs": 3}
    return prompt, SamplingParams(**changes), place % 6 != 5


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    dice = random.Random(8)
    return [draw(dice, place) for place in range(COUNT)]


@pytest.fixture(scope="module")
def alone(pair: Any, requests: list[Request]) -> list[Any]:
    """The outputs in one thread, with room for all; `whole` ones, without stop strings, too."""
    with LLM(pair.worded, pair.draft, dtype="fp64", block_size=SIZE, overlap=False) as llm:
        handles = [llm.submit(*request) for request in requests]
        outs = [finish(handle) for handle in handles]
    reasons = [out.finish_reason for out in outs]
    assert min(reasons.count("stop"), reasons.count("length")) > 3, "too tame"
    return outs


@pytest.fixture(scope="module")
def texts(pair: Any, requests: list[Request]) -> list[list[int]]:
    """Prompts and what follows, past the stops."""
    with LLM(pair.worded, pair.draft, dtype="fp64", block_size=SIZE, overlap=False) as llm:
        free = [
            (p, replace(q, stop=(), stop_token_ids=(), ignore_eos=True)) for p, q, _ in requests
        ]
        outs = llm.generate([p for p, _ in free], [q for _, q in free])
    return [[*prompt, *out.token_ids] for (prompt, _), out in zip(free, outs, strict=True)]


def same(out: Any, wanted: Any) -> None:
    """Ids, text, reason and logprobs; a GEMM's bits depend on its rows, so those up to 1e-9."""
    assert (out.token_ids, out.finish_reason) == (wanted.token_ids, wanted.finish_reason)
    assert out.text == wanted.text
    assert (out.logprobs is None) == (wanted.logprobs is None)
    for one, two in zip(out.logprobs or [], wanted.logprobs or [], strict=True):
        assert one.chosen == pytest.approx(two.chosen, abs=1e-9)
        assert [token for token, _ in one.top] == [token for token, _ in two.top]
        assert [x for _, x in one.top] == pytest.approx([x for _, x in two.top], abs=1e-9)


def disturb(patch: pytest.MonkeyPatch, seed: int) -> None:
    """A pause in everything that both threads and the stream do."""
    pause = Pauses(seed)
    for owner, names in (
        (Scheduler, ("plan", "commit", "deliver")),
        (Runner, ("launch", "results")),
    ):
        for name in names:
            patch.setattr(owner, name, pause.around(getattr(owner, name)))
    patch.setattr(nanodflash.llm, "open_stream", lambda *_: ChaoticStream(pause))


@pytest.mark.parametrize("seed", range(4))
def test_chaos(
    pair: Any,
    requests: list[Request],
    alone: list[Any],
    texts: list[list[int]],
    no_leak: Any,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    """Pauses everywhere, few pages, poisoned ones, aborts: outputs are those of one thread."""
    disturb(monkeypatch, seed)
    dice = random.Random(seed)
    options = OPTIONS | {"num_pages": 21, "max_seqs": 4, "max_prefill": dice.choice([5, 40])}
    llm = LLM(pair.worded, pair.draft, overlap=True, proposer=Book(texts), **options)
    try:
        llm.engine.scheduler.pages = PoisonedPool(llm)
        order = dice.sample(range(COUNT), COUNT) * 2
        doomed = set(dice.sample(range(2 * COUNT), COUNT // 2))
        handles = [llm.submit(*requests[place]) for place in order]
        for number in sorted(doomed, key=lambda _: dice.random()):
            for _ in range(dice.randint(0, 2)):
                next(iter(handles[number]), None)
            handles[number].abort()
        preempted = aborted = 0
        for number, (place, handle) in enumerate(zip(order, handles, strict=True)):
            out = finish(handle)
            preempted += out.metrics.preemptions
            if number in doomed and out.finish_reason == "abort":
                aborted += 1
                assert out.token_ids == alone[place].token_ids[: len(out.token_ids)]
            else:
                same(out, alone[place])
        assert preempted, "too much room"
        assert aborted, "too late to abort"
        no_leak(llm)
        assert llm.metrics.launched[2], "never two steps ahead"
        state = llm.engine.runner.steps.decoder.state
        assert (int(state.state[-1]), int(state.page_table[-1].sum())) == (0, 0), "the spare slot"
    finally:
        within(llm.close)


def test_the_poison_bites(
    pair: Any, requests: list[Request], alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages given back and poisoned while a launched step still has them: the outputs tell."""
    retire = Scheduler._retire

    def early(self: Scheduler, sequence: Any) -> None:
        retire(self, sequence)
        self.pages.poison([*range(1, self.pages.total)])  # of all, not of this one's

    monkeypatch.setattr(Scheduler, "_retire", early)
    with LLM(pair.worded, pair.draft, dtype="fp64", block_size=SIZE, overlap=True) as llm:
        llm.engine.scheduler.pages = PoisonedPool(llm)
        outs = [finish(llm.submit(*request)) for request in requests[:1]]
        handles = [llm.submit(*request) for request in requests]
        outs = [finish(handle) for handle in handles]
    assert any(out.token_ids != one.token_ids for out, one in zip(outs, alone, strict=True))


# ---------------------------------------------------------------------- failures in a step

FEW = 9  # requests
STAGES = ("start", "plan", "prefill", "draft", "verify", "commit", "pack")


class Fault:
    """Makes one step raise behind one of its parts, once another step is launched behind it."""

    def __init__(self, stage: str, carries: str, patch: pytest.MonkeyPatch) -> None:
        self.stage, self.carries, self.scheduler = stage, carries, None
        self.armed, self.failed = True, []
        run = ModelSteps.run
        fault = self

        def faulty(steps: Any, plan: Any, sections: Any, result: Any, mark: Any) -> None:
            def told(name: str) -> None:
                mark(name)
                fault.reach(name, plan)

            fault.reach("start", plan)
            run(steps, plan, sections, result, told)

        patch.setattr(ModelSteps, "run", faulty)

    def reach(self, stage: str, plan: Any) -> None:
        wanted = bool(plan.rows) and bool(plan.admissions) == (self.carries == "admission")
        if not self.armed or self.scheduler is None or stage != self.stage or not wanted:
            return
        until = time.monotonic() + 1
        while len(self.scheduler._launched) < 2 and time.monotonic() < until:
            time.sleep(0.001)
        launched = list(self.scheduler._launched)
        mine = [step for step in launched if step.plan is plan]
        if len(launched) < 2 or not mine:
            return
        self.armed, self.failed = False, [*mine[0].spans, *mine[0].rows]
        raise LookupError("scripted failure")


CARRIES = [(stage, what) for stage in STAGES for what in ("admission", "rows")]
CARRIES.remove(("prefill", "rows"))  # a step without prompts has no such part


@pytest.mark.parametrize(("stage", "carries"), CARRIES)
def test_a_failing_step_ends_only_its_requests(
    pair: Any,
    requests: list[Request],
    alone: list[Any],
    no_leak: Any,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    carries: str,
) -> None:
    """Whatever is done of it, and with a step behind it that names the same slots."""
    fault = Fault(stage, carries, monkeypatch)
    llm = LLM(pair.worded, pair.draft, overlap=True, max_seqs=3, num_pages=48, **OPTIONS)
    jobs = list(zip(requests, alone, strict=True))[:FEW]
    try:
        fault.scheduler = llm.engine.scheduler
        handles = [llm.submit(*request) for request, _ in jobs]
        assert all(handle.wait(LIMIT) for handle in handles)
        failed = set(map(id, fault.failed))
        assert failed, "no step failed"
        for handle, (_, wanted) in zip(handles, jobs, strict=True):
            # One that ended in the step before is in this one too, as a surplus row.
            if id(handle._sequence) in failed and handle._sequence.finish_reason is None:
                with pytest.raises(LookupError, match="scripted failure") as caught:
                    within(handle.result)
                assert "reach" in frames(caught.value)
            else:
                same(finish(handle), wanted)
        no_leak(llm)
        for request, wanted in jobs[:4]:  # by what is cached since then
            same(finish(llm.submit(*request)), wanted)
    finally:
        within(llm.close)


@pytest.mark.parametrize("error", [LookupError, SystemExit, asyncio.CancelledError])
def test_a_proposer_that_raises(open_llm: Any, no_leak: Any, error: type[BaseException]) -> None:
    """Anything, also what is no Exception: its requests end with that, plain ones live on."""

    def propose(tokens: Tensor, length: Tensor) -> Tensor:
        raise error("scripted failure")

    llm = open_llm(block_size=SIZE, proposer=propose)
    doomed = [llm.submit([5 + i, 6], SamplingParams(max_new_tokens=9)) for i in range(3)]
    plain = [llm.submit([5 + i, 6], SamplingParams(max_new_tokens=9), False) for i in range(3)]
    for handle in doomed:
        with pytest.raises(error, match="scripted failure") as caught:
            within(handle.result)
        assert "propose" in frames(caught.value)
    assert all(len(finish(handle).token_ids) == 9 for handle in plain)
    no_leak(llm)


class Odd(Exception):
    """Cannot be made again of its own arguments."""

    def __init__(self, number: int) -> None:
        super().__init__(f"odd {number}")


@pytest.mark.parametrize(
    "make", [partial(OSError, 2, "scripted failure", "a file"), partial(Odd, 3)], ids=["", "odd"]
)
def test_every_reader_has_an_error_of_his_own(open_llm: Any, make: Callable[[], Any]) -> None:
    """Of the same class, with the same words and the frames behind it, whoever read before."""
    raised, seen = [], []

    def propose(tokens: Tensor, length: Tensor) -> Tensor:
        raised.append(make())
        raise raised[-1] from KeyError("the cause")

    handle = open_llm(block_size=SIZE, proposer=propose).submit([5, 6])
    for _ in range(3):
        with pytest.raises((OSError, Odd)) as caught:
            finish(handle)
        seen.append(caught.value)
    error = raised[0]  # with overlap a step behind it raises too
    for one in seen:
        assert (type(one), str(one), one.args) == (type(error), str(error), error.args)
        assert type(one.__cause__) is KeyError
        assert frames(one).count("propose") == 1
    if type(error) is not Odd:
        assert len({id(one) for one in [*seen, error]}) == 4
        assert frames(seen[2]).count("result") == 1
        assert "result" not in frames(error)


# ---------------------------------------------------------------------- what is counted


def test_reading_is_no_slack(pair: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The host waits for the device, and then has work of its own."""
    results = Runner.results

    def slow(*given: Any) -> Any:
        time.sleep(0.02)
        return results(*given)

    monkeypatch.setattr(Runner, "results", slow)
    file = tmp_path / "trace.json"
    with LLM(pair.target, pair.draft, overlap=False, trace=file, **OPTIONS) as llm:
        llm.generate([5, 6], SamplingParams(max_new_tokens=12))
    steps = llm.metrics.steps
    assert traced(file, "read") >= 0.02 * steps > 0
    assert llm.metrics.slack_seconds < 0.01 * steps  # in one thread there is nothing to wait for
    assert traced(file, "wait") == pytest.approx(llm.metrics.slack_seconds, abs=0.005 * steps)


def test_waiting_is_slack() -> None:
    """A device that takes 5 ms a step, and a host that takes far less."""
    simulation = Simulation(2, 0.005, True)
    counted = within(lambda: simulation.run(20))
    within(simulation.engine.close)
    assert 1 < counted["slack_ms"] < 10


def traced(file: Path, name: str) -> float:
    """Seconds of all spans of a name in a trace."""
    events = json.loads(file.read_text())["traceEvents"]
    return sum(1e-6 * event["dur"] for event in events if event["name"] == name and "dur" in event)


@BOTH
def test_steps_that_fail_are_counted(pair: Any, tmp_path: Path, overlap: bool) -> None:
    def propose(tokens: Tensor, length: Tensor) -> Tensor:
        time.sleep(0.02)
        raise LookupError("scripted failure")

    options = OPTIONS | {"overlap": overlap, "trace": tmp_path / "trace.json"}
    with LLM(pair.target, pair.draft, proposer=propose, **options) as llm:
        for _ in range(3):
            with pytest.raises(LookupError):
                llm.generate([5, 6])
    metrics = llm.metrics
    assert metrics.steps >= 6  # a prompt and a cycle each
    assert metrics.busy_seconds >= 0.06
    assert metrics.seconds["failed"] >= 0.06
    assert traced(options["trace"], "failed") == pytest.approx(metrics.seconds["failed"], abs=1e-4)
    assert sum(metrics.seconds.values()) == pytest.approx(metrics.busy_seconds)


@BOTH
def test_waiting_and_running_requests_are_counted(pair: Any, overlap: bool) -> None:
    with LLM(pair.target, pair.draft, overlap=overlap, max_seqs=2, **OPTIONS) as llm:
        llm.generate([[5 + i, 6] for i in range(6)], SamplingParams(max_new_tokens=20))
    counted = llm.metrics.as_dict()
    assert 1 < counted["running"] <= 2
    assert 0.5 < counted["waiting"] <= 4


def test_the_mean_of_what_waits_and_runs() -> None:
    metrics, kept = EngineMetrics(), []
    for waiting in (5, 3, 1):
        metrics.count_step([("begin", 1.0), ("step", 2.0)], 2, 0.0, 0.0, (waiting, 2), 0)
        kept.append(metrics.copy())
    assert (metrics.as_dict()["waiting"], metrics.as_dict()["running"]) == (3.0, 2.0)
    assert ((metrics - kept[0]).as_dict()["waiting"], (metrics - kept[0]).steps) == (2.0, 2)


def test_metrics_are_copied_while_they_change() -> None:
    """New parts and depths come meanwhile; a copy is of one moment."""
    metrics, over = EngineMetrics(), threading.Event()

    def count() -> None:
        number = 0
        while not over.is_set():
            number += 1
            metrics.count_launch(number % 1000)
            times = [("begin", 0.0), *((f"{(number + i) % 1000}", i + 1.0) for i in range(8))]
            metrics.count_step(times, 1, 0.0, 0.0, (1, 1), 0)

    interval, thread = sys.getswitchinterval(), threading.Thread(target=count, daemon=True)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for _ in range(300):
            copied, shown = metrics.copy(), metrics.as_dict()
            assert copied.steps == copied.rows == copied.waiting
            assert sum(copied.seconds.values()) == copied.busy_seconds == 8.0 * copied.steps
            assert sum(shown["part_ms"].values()) == pytest.approx(shown["step_ms"], rel=1e-9)
    finally:
        sys.setswitchinterval(interval)
        over.set()
        thread.join()


# ---------------------------------------------------------------------- failures of the engine


def frames(error: BaseException) -> list[str]:
    """Functions that the traceback of an error names."""
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


class Boom:
    """Raises at its n-th call, and does what it replaces until then."""

    def __init__(self, method: Any, at: int = 4) -> None:
        self.method, self.left = method, at

    def bound(self) -> Any:
        def boom(*args: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise ArithmeticError("scripted fault")
            return self.method(*args)

        return boom


class FaultyStream(CpuStream):
    """A stream where one kind of operation fails, from the fourth of them on."""

    def __init__(self, kind: str) -> None:
        self.kind, self.left, self.number = kind, 4, 0
        super().__init__()

    def submit(self, work: Any) -> Any:
        in_copy = getattr(work, "__qualname__", "").startswith("Runner._copy_in")
        if self.kind == "submit" or (self.kind == "packet" and in_copy):
            self.left -= 1
        if self.left <= 0 and self.kind == "submit":
            self.boom()
        if self.left <= 0 and self.kind == "packet" and in_copy:
            return super().submit(self.boom)
        return super().submit(work)

    def copy(self, into: Tensor, source: Tensor) -> Any:
        self.left -= self.kind == "copy"
        if self.left <= 0 and self.kind == "copy":
            return super().submit(self.boom)
        return super().copy(into, source)

    def boom(self) -> None:
        raise ArithmeticError("scripted fault")


PLACES = {
    "bookkeeping, plan": (Scheduler, "plan"),
    "bookkeeping, commit": (Scheduler, "commit"),
    "bookkeeping, text": (Scheduler, "deliver"),
    "bookkeeping, results": (Runner, "results"),
    "device thread, launch": (Runner, "launch"),
    "stream, submit": (FaultyStream, "submit"),
    "stream, copy of results": (FaultyStream, "copy"),
    "stream, copy of the packet": (FaultyStream, "packet"),
}


def break_engine(patch: pytest.MonkeyPatch, place: str) -> None:
    owner, name = PLACES[place]
    if owner is FaultyStream:
        patch.setattr(nanodflash.llm, "open_stream", lambda *_: FaultyStream(name))
    else:
        patch.setattr(owner, name, Boom(getattr(owner, name)).bound())


@BOTH
@pytest.mark.parametrize("place", PLACES)
def test_a_fault_reaches_every_caller(
    pair: Any, monkeypatch: pytest.MonkeyPatch, overlap: bool, place: str
) -> None:
    """With its traceback; more work is refused with the reason, and closing works."""
    break_engine(monkeypatch, place)
    llm = LLM(pair.target, pair.draft, overlap=overlap, max_seqs=2, **OPTIONS)
    try:
        meet_the_fault(llm)
    finally:
        within(llm.close)
    within(llm.close)


def meet_the_fault(llm: LLM) -> None:
    """Requests that wait in three ways, and those that come too late."""
    handles, seen = [], []
    with suppress(RuntimeError):  # it may be faster
        for number in range(6):
            handles.append(llm.submit([5 + number, 6, 7], SamplingParams(max_new_tokens=40)))

    async def read(handle: Any) -> None:
        async for chunk in handle:
            seen.append(chunk)

    callers = (
        lambda handle: handle.result(),
        lambda handle: seen.extend(handle),
        lambda handle: asyncio.run(asyncio.wait_for(read(handle), LIMIT)),
    )
    for number, handle in enumerate(handles):
        with pytest.raises(ArithmeticError, match="scripted fault") as caught:
            within(partial(callers[number % 3], handle))
        assert "boom" in frames(caught.value)
    for refused in (partial(llm.submit, [5]), partial(llm.generate, [5]), llm.page_stats):
        with pytest.raises(RuntimeError, match="engine has failed") as refusal:
            within(refused)
        assert isinstance(refusal.value.__cause__, ArithmeticError)
        assert "boom" in frames(refusal.value.__cause__)
    for handle in handles:
        handle.abort()  # of no use, and no harm


@BOTH
@pytest.mark.parametrize("seed", range(3))
def test_submitting_while_it_fails(
    pair: Any, monkeypatch: pytest.MonkeyPatch, overlap: bool, seed: int
) -> None:
    """Every request is refused or ends with the fault; nobody waits for ever."""
    break_engine(monkeypatch, random.Random(seed).choice(list(PLACES)[:5]))
    llm = LLM(pair.target, pair.draft, overlap=overlap, **OPTIONS)
    ends: list[str] = []

    def client(number: int) -> None:
        for turn in range(200):
            try:
                llm.submit([number, turn], SamplingParams(max_new_tokens=2)).result()
                ends.append("output")
            except ArithmeticError:
                ends.append("fault")
            except RuntimeError:
                ends.append("refused")
                return

    threads = [threading.Thread(target=client, args=(n,), daemon=True) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    late = [thread for thread in threads if thread.is_alive()]
    within(llm.close)
    assert not late, "it waits for ever"
    assert ends.count("refused") == 4
    assert "fault" in ends


@BOTH
@pytest.mark.parametrize("place", ["load_model", "open_stream", "Decoder"])
def test_a_fault_while_loading(
    pair: Any, monkeypatch: pytest.MonkeyPatch, overlap: bool, place: str
) -> None:
    """It is the caller's, with its traceback, and the stream that was opened is closed."""

    def boom(*_: Any) -> Any:
        raise ArithmeticError("scripted fault")

    monkeypatch.setattr(nanodflash.llm, place, boom)
    with pytest.raises(ArithmeticError, match="scripted fault") as caught:
        within(lambda: LLM(pair.target, pair.draft, dtype="fp64", overlap=overlap))
    assert "boom" in frames(caught.value)


@BOTH
@pytest.mark.parametrize("after", [0, 1, 5, 20])
def test_closing_while_two_steps_are_launched(
    pair: Any, requests: list[Request], alone: list[Any], overlap: bool, after: int
) -> None:
    """All requests end, and pages and slots are given back, also those of launched steps."""
    llm = LLM(pair.worded, pair.draft, overlap=overlap, max_seqs=3, num_pages=24, **OPTIONS)
    handles = [llm.submit(*request) for request in requests]
    until = time.monotonic() + LIMIT
    while llm.metrics.steps < after and time.monotonic() < until:
        time.sleep(0.0005)
    within(llm.close)
    reasons = []
    for handle, wanted in zip(handles, alone, strict=True):
        out = finish(handle)
        reasons.append(out.finish_reason)
        assert out.token_ids == wanted.token_ids[: len(out.token_ids)]
        assert out.finish_reason in ("abort", wanted.finish_reason)
    assert "abort" in reasons
    stats = llm.engine.scheduler.pages.stats()
    assert (stats.live, stats.free + stats.cached) == (0, 23)
    llm.engine.scheduler.check()


@BOTH
def test_a_wait_can_be_limited(pair: Any, overlap: bool) -> None:
    """A step that does not end: whoever waits with a limit goes on."""
    gate = threading.Event()

    def propose(tokens: Tensor, length: Tensor) -> Tensor:
        assert gate.wait(LIMIT)
        return tokens[:, : SIZE - 1]

    llm = LLM(pair.target, pair.draft, overlap=overlap, proposer=propose, **OPTIONS)
    handle = llm.submit([5], SamplingParams(max_new_tokens=3))
    assert not handle.wait(0.05)
    gate.set()
    assert finish(handle).finish_reason == "length"
    within(llm.close)
