"""Streams and their events: order, errors, when a copy reads, time. The CUDA one by a stand-in."""

import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from nanodflash.engine import streams
from nanodflash.engine.streams import (
    CpuStream,
    CudaStream,
    InlineStream,
    SimulatedStream,
    open_stream,
)

LIMIT = 20.0


@pytest.fixture(params=[CpuStream, InlineStream, SimulatedStream])
def stream(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = request.param()
    yield made
    made.close()


@pytest.fixture
def cpu() -> Iterator[CpuStream]:
    made = CpuStream()
    yield made
    made.close()


# ---------------------------------------------------------------------- all that run here


def test_work_is_done_in_order(stream: Any) -> None:
    done: list[int] = []
    events = [stream.submit(lambda n=n: done.append(n)) for n in range(200)]
    events[100].wait(LIMIT)
    assert done[:101] == [*range(101)]
    events[-1].wait(LIMIT)
    assert done == [*range(200)]
    assert all(event.fired for event in events)
    times = [event.time for event in events]
    assert times == sorted(times)


def test_a_copy_is_work_like_any_other(stream: Any) -> None:
    source, into = stream.pinned(4), stream.pinned(8)[:4]
    assert (source.dtype, source.shape, int(source.sum())) == (torch.int64, (4,), 0)
    stream.submit(lambda: source.fill_(3))
    event = stream.copy(into, source)
    stream.submit(lambda: source.fill_(9)).wait(LIMIT)
    assert event.fired
    assert into.tolist() == [3] * 4


def test_an_event_inside_work_is_between_begin_and_end(stream: Any) -> None:
    marks: list[Any] = []
    before = stream.submit(lambda: None)
    after = stream.submit(lambda: marks.append(stream.mark()))
    after.wait(LIMIT)
    assert marks[0].fired
    assert before.time <= marks[0].time <= after.time


def test_call_gives_what_it_makes_behind_what_was_submitted(stream: Any) -> None:
    done: list[int] = []
    stream.submit(lambda: done.append(1))
    assert stream.call(lambda: [*done, 2]) == [1, 2]
    with pytest.raises(ArithmeticError, match="scripted"):
        stream.call(raise_error)
    assert stream.call(lambda: 5) == 5


def raise_error() -> None:
    raise ArithmeticError("scripted")


@pytest.mark.parametrize("make", [CpuStream, InlineStream])
def test_an_error_is_its_own_events_and_work_goes_on(make: Callable[[], Any]) -> None:
    """`wait` raises what the work raised, with its traceback, as often as it is asked."""
    stream = make()
    first, second = stream.submit(raise_error), stream.submit(lambda: None)
    second.wait(LIMIT)
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="scripted") as caught:
            first.wait(LIMIT)
        assert caught.traceback[-1].name == "raise_error"
    assert first.fired
    with pytest.raises(RuntimeError):
        stream.copy(torch.zeros(2), torch.zeros(3)).wait(LIMIT)
    stream.close()


# ---------------------------------------------------------------------- the worker


def test_a_copy_reads_its_source_when_it_executes(cpu: CpuStream) -> None:
    """What a pinned buffer does on a GPU: who writes it before the event has spoiled it."""
    gate, source, into = threading.Event(), cpu.pinned(3), cpu.pinned(3)
    cpu.submit(lambda: gate.wait(LIMIT))
    source.fill_(1)
    event = cpu.copy(into, source)
    source.fill_(2)
    assert not event.fired
    gate.set()
    event.wait(LIMIT)
    assert into.tolist() == [2, 2, 2]


def test_submitting_does_not_wait(cpu: CpuStream) -> None:
    gate = threading.Event()
    event = cpu.submit(lambda: gate.wait(LIMIT))
    assert not event.fired
    with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
        event.wait(0.01)
    gate.set()
    event.wait(LIMIT)
    event.wait()


def test_one_thread_does_it_all(cpu: CpuStream) -> None:
    threads = {cpu.call(threading.get_ident) for _ in range(3)}
    cpu.submit(lambda: threads.add(threading.get_ident())).wait(LIMIT)
    assert len(threads) == 1
    assert threads != {threading.get_ident()}
    assert cpu.call(lambda: threading.current_thread().name) == "nanodflash-stream"


def test_the_worker_has_as_many_torch_threads_as_its_maker() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        stream = CpuStream()
        assert stream.call(torch.get_num_threads) == before + 1
        stream.close()
    finally:
        torch.set_num_threads(before)


def test_close_ends_the_worker_behind_its_work() -> None:
    stream, done = CpuStream(), []
    for number in range(50):
        stream.submit(lambda number=number: done.append(number))
    stream.close()
    assert len(done) == 50
    assert not stream._worker.is_alive()


def test_several_threads_may_wait(cpu: CpuStream) -> None:
    gate, seen = threading.Event(), []
    event = cpu.submit(lambda: gate.wait(LIMIT))

    def wait() -> None:
        event.wait(LIMIT)
        seen.append(event.fired)

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join(LIMIT)
    assert seen == [True] * 4


def test_open_stream() -> None:
    cpu = torch.device("cpu")
    assert type(open_stream(cpu, overlap=False)) is InlineStream
    opened = open_stream(cpu, overlap=True)
    assert type(opened) is CpuStream
    opened.close()


# ---------------------------------------------------------------------- the timeline


class Clock:
    """`time` under control: sleeping is what makes it pass."""

    def __init__(self) -> None:
        self.now, self.slept = 100.0, []

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(streams, "time", made)
    return made


def test_simulated_work_starts_when_what_came_before_has_ended(clock: Clock) -> None:
    stream, begins = SimulatedStream(), []

    def step(seconds: float) -> Callable[[], None]:
        def work() -> None:
            begins.append(stream.mark().time)
            stream.spend(seconds)

        return work

    first = stream.submit(step(2.0))
    clock.now = 100.5  # the host is early: the second step waits for the first
    second = stream.submit(step(3.0))
    assert (begins, first.time, second.time) == ([100.0, 102.0], 102.0, 105.0)
    clock.now = 110.0  # the host is late: the device has stood still since 105
    third = stream.submit(step(1.0))
    assert (begins[-1], third.time) == (110.0, 111.0)


def test_simulated_events_fire_at_their_time(clock: Clock) -> None:
    stream, done = SimulatedStream(), []
    event = stream.submit(lambda: (done.append(1), stream.spend(4.0)))
    assert done == [1]  # what the work gives is there at once
    assert not event.fired
    clock.now = 103.0
    assert not event.fired
    event.wait()
    assert (clock.now, clock.slept, event.fired) == (104.0, [1.0], True)
    event.wait()
    assert clock.now == 104.0
    copied = stream.copy(stream.pinned(2), stream.pinned(2) + 1)
    assert copied.time == 104.0  # takes no time


def test_a_late_timer_is_not_counted_as_idle(clock: Clock) -> None:
    """The host that wakes up too late finds the event where it was."""
    stream = SimulatedStream()
    first = stream.submit(lambda: stream.spend(1.0))
    second = stream.submit(lambda: stream.spend(1.0))
    clock.now = 101.7
    first.wait()
    assert (first.time, second.time, clock.now) == (101.0, 102.0, 101.7)


# ---------------------------------------------------------------------- CUDA, by a stand-in


class FakeCuda:
    """`torch.cuda` as a notebook of what was asked of it."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        cuda = self

        class Stream:
            def __init__(self, device: Any) -> None:
                cuda.log.append(("stream", str(device)))

            def synchronize(self) -> None:
                cuda.log.append("wait for the stream")

        class Event:
            def __init__(self, **options: bool) -> None:
                self.options = options

            def record(self, stream: Any) -> None:
                assert isinstance(stream, Stream)
                cuda.log.append(("record", self.options))

            def synchronize(self) -> None:
                cuda.log.append(("wait", self.options))

            def query(self) -> bool:
                cuda.log.append("query")
                return False

            def elapsed_time(self, other: Any) -> float:
                return 1500.0

        self.Stream, self.Event = Stream, Event
        self.device, self.stream = self._under("device"), self._under("under")

    def _under(self, name: str) -> Any:
        @contextmanager
        def under(what: Any) -> Iterator[None]:
            self.log.append(name)
            yield
            self.log.append(f"end of {name}")

        return under

    @contextmanager
    def seen(self) -> Iterator[list[Any]]:
        """What the body asks."""
        del self.log[:]
        yield self.log


UNDER, BACK = ["device", "under"], ["end of under", "end of device"]
TIMED = {"enable_timing": True, "blocking": True}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda()
    for name in ("Stream", "Event", "device", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    return made


def test_cuda_work_is_enqueued_under_its_stream_and_then_marked(cuda: FakeCuda) -> None:
    stream = open_stream(torch.device("cuda:0"), overlap=False)
    assert isinstance(stream, CudaStream)
    assert cuda.log[0] == ("stream", "cuda:0")
    with cuda.seen() as log:
        event = stream.submit(lambda: log.append("work"))
    assert log == [*UNDER, "work", *BACK, ("record", TIMED)]
    with cuda.seen() as log:
        assert not event.fired
    assert log == ["query"]
    with cuda.seen() as log:
        event.wait(1.0)
    assert log == ["query", ("wait", TIMED)]  # blocking: it sleeps
    assert event.time == stream._began + 1.5


def test_cuda_copies_do_not_wait(cuda: FakeCuda) -> None:
    class Into:
        def copy_(self, source: Any, non_blocking: bool = False) -> None:
            cuda.log.append((source, non_blocking))

    stream = CudaStream(torch.device("cuda:0"))
    with cuda.seen() as log:
        stream.copy(Into(), "source")  # type: ignore[arg-type]
    assert log == [*UNDER, ("source", True), *BACK, ("record", TIMED)]


def test_cuda_host_memory_is_pinned(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(torch, "zeros", lambda *size, **options: seen.append((size, options)))
    CudaStream(torch.device("cuda:0")).pinned(7)
    assert seen == [((7,), {"dtype": torch.int64, "pin_memory": True})]


def test_cuda_call_and_close_wait_for_the_device(cuda: FakeCuda) -> None:
    stream = CudaStream(torch.device("cuda:0"))
    with cuda.seen() as log:
        assert stream.call(lambda: 5) == 5
    assert log == [*UNDER, *BACK, "wait for the stream"]
    with cuda.seen() as log:
        stream.mark()
    assert log == [("record", TIMED)]
    with cuda.seen() as log:
        stream.close()
    assert log == ["wait for the stream"]


def test_cuda_work_that_raises_on_the_host_is_raised_there(cuda: FakeCuda) -> None:
    with pytest.raises(ArithmeticError, match="scripted"):
        CudaStream(torch.device("cuda:0")).submit(raise_error)


class LateCuda:
    """`torch.cuda` on a clock: `busy` says until when it works; times are fp32 milliseconds."""

    def __init__(self, clock: Clock) -> None:
        self.busy = self.longest = 0.0  # the longest time between two events that was asked for
        self.waits, self.alive = 0, weakref.WeakSet[Any]()
        cuda = self

        class Stream(NamedTuple):
            device: Any

            def query(self) -> bool:
                return clock.now >= cuda.busy

        class Event:
            def __init__(self, **options: bool) -> None:
                cuda.alive.add(self)

            def record(self, stream: Any) -> None:
                self.at = max(clock.now, cuda.busy)

            def query(self) -> bool:
                return clock.now >= self.at

            def synchronize(self) -> None:
                cuda.waits += not self.query()
                clock.now = max(clock.now, self.at)

            def elapsed_time(self, other: Any) -> float:
                cuda.longest = max(cuda.longest, abs(other.at - self.at))
                return float(np.float32(1e3 * (other.at - self.at)))

        self.Stream, self.Event = Stream, Event


def test_cuda_times_are_exact_after_hours(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Busy hours, an idle one, and steps that each find the device at rest; nobody waits for it."""
    cuda, dice = LateCuda(clock), random.Random(1)
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    stream, marks = CudaStream(torch.device("cuda:0")), deque[Any]()
    for work, pause in ((0.6, 3600.0), (0.1, 20.0), (0.6, 0.0), (0.1, 3600.0), (0.6, 0.0)):
        for _ in range(3000):  # steps, two ahead
            marks.append(stream.mark())
            cuda.busy = max(clock.now, cuda.busy) + work
            marks.append(stream.mark())
            clock.now += dice.uniform(0.3, 0.5)
            if len(marks) > 4:
                clock.now = max(clock.now, marks[1].event.at)
            while marks and marks[0].fired:
                event = marks.popleft()
                assert abs(event.time - event.event.at) < 1e-4
        clock.now += pause
    assert clock.now > 4 * 3600
    assert cuda.longest < streams.RENEW + 3
    assert len(cuda.alive) < 12, "events pile up"
    assert cuda.waits == 0
