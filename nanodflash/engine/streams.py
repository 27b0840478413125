"""Where steps run, in order: one small interface, four backends.

A stream takes work and does it later, in order; the event that it returns fires when the work is
done. What work reads it reads when it executes: whoever hands a buffer to a stream may not write
it before the event has fired. So a race that a GPU would show, a CPU shows too.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html (streams, events, pinned memory).
"""

import gc
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

T = TypeVar("T")
CAPTURING = threading.Lock()  # torch captures one graph at a time in a process
RENEW = 10.0  # seconds, after which CUDA times are counted from a newer event
Work = Callable[[], object]


class Event(Protocol):
    """A place in a stream's order."""

    def wait(self, timeout: float | None = None) -> None:
        """Return once the stream has passed it. Raises what the work there raised.

        Args:
            timeout: seconds; TimeoutError after them on a CPU. Elsewhere there is no limit.
        """
        ...

    @property
    def fired(self) -> bool:
        """Whether the stream has passed it."""
        ...

    @property
    def time(self) -> float:
        """When it did, in seconds of `time.perf_counter`; only once it has fired."""
        ...


class Stream(Protocol):
    """Work in order. One thread submits; any thread may wait for an event.

    Attributes:
        own_thread: `submit` only queues the work for a thread of the stream's. Elsewhere it costs
                    the submitting thread time, of which the host's other work should be free.
    """

    own_thread: bool

    def submit(self, work: Work) -> Event:
        """Do `work` after all that was submitted before."""
        ...

    def copy(self, into: Tensor, source: Tensor) -> Event:
        """Copy in order. Both tensors are the stream's until the event has fired."""
        ...

    def mark(self) -> Event:
        """Inside work: an event here. It costs next to nothing and is there to be timed."""
        ...

    def pinned(self, size: int) -> Tensor:
        """Host memory, int64 [size], that `copy` can read and write without stopping the host."""
        ...

    def call(self, make: Callable[[], T]) -> T:
        """Do `make` where the stream's work is done, wait, and return or raise what it gives."""
        ...

    def capture(self, work: Callable[[], T]) -> tuple[Callable[[], object], T]:
        """Inside work: hold `work` as a graph.

        Returns:
            What replays it, and what it gives: tensors that every replay writes again, and that
            are the caller's to keep for as long as it may be replayed.
        """
        ...

    def close(self) -> None:
        """Finish what was submitted; no thread is left behind."""
        ...


class PassedEvent:
    """An event of the past."""

    fired = True

    def __init__(self, error: BaseException | None = None) -> None:
        self.time, self._error = time.perf_counter(), error

    def wait(self, timeout: float | None = None) -> None:
        """Raises what the work raised."""
        if self._error is not None:
            raise self._error


class InlineStream:
    """Everything happens at once, in the thread that submits."""

    own_thread = False

    def submit(self, work: Work) -> Event:
        """Done on return."""
        try:
            work()
        except BaseException as error:
            return PassedEvent(error)
        return PassedEvent()

    def copy(self, into: Tensor, source: Tensor) -> Event:
        """Done on return."""
        return self.submit(lambda: into.copy_(source))

    def mark(self) -> Event:
        """Now."""
        return PassedEvent()

    def pinned(self, size: int) -> Tensor:
        """Plain memory."""
        return torch.zeros(size, dtype=torch.int64)

    def call(self, make: Callable[[], T]) -> T:
        """A plain call."""
        return make()

    def capture(self, work: Callable[[], T]) -> tuple[Callable[[], object], T]:
        """A closure over the same buffers: `work` is run again, into the tensors of its first run.

        Unlike a device it runs `work` when it captures: that must leave no trace.
        """
        made = work()

        def replay() -> None:
            for old, new in zip(tree_leaves(made), tree_leaves(work()), strict=True):
                if isinstance(old, Tensor):
                    old.copy_(new)

        return replay, made

    def close(self) -> None:
        """Nothing to end."""


class CpuEvent:
    """Fires once, from the worker."""

    def __init__(self) -> None:
        self.time = 0.0
        self._fired = threading.Event()
        self._error: BaseException | None = None

    def fire(self, error: BaseException | None = None) -> None:
        """Called by the worker."""
        self.time, self._error = time.perf_counter(), error
        self._fired.set()

    @property
    def fired(self) -> bool:
        """Whether the worker has passed it."""
        return self._fired.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Sleeps, without the GIL. TimeoutError after `timeout` seconds."""
        if not self._fired.wait(timeout):
            raise TimeoutError(f"a step did not end within {timeout} s")
        if self._error is not None:
            raise self._error


class CpuStream(InlineStream):
    """One worker thread. All torch work of the engine is done in it, the loading too: two threads
    that run parallel operations keep two pools of OpenMP workers, each asleep when it is wanted.
    """

    own_thread = True

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[Work, CpuEvent] | None] = SimpleQueue()
        self._threads = torch.get_num_threads()
        self._worker = threading.Thread(target=self._run, name="nanodflash-stream", daemon=True)
        self._worker.start()

    def submit(self, work: Work) -> CpuEvent:
        """Queue it."""
        event = CpuEvent()
        self._work.put((work, event))
        return event

    def call(self, make: Callable[[], T]) -> T:
        """Done by the worker."""
        made: list[T] = []
        self.submit(lambda: made.append(make())).wait()
        return made[0]

    def close(self) -> None:
        """Joins the worker, behind all that was submitted."""
        self._work.put(None)
        self._worker.join()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # a new thread would run small products far slower
        while (item := self._work.get()) is not None:
            work, event = item
            try:
                work()
            except BaseException as error:
                event.fire(error)
            else:
                event.fire()


class CudaEvent:
    """A CUDA event that was just recorded.

    Args:
        origin: an event that had passed at `began` on the host's clock; it ties both clocks.
    """

    def __init__(self, stream: torch.cuda.Stream, origin: torch.cuda.Event, began: float) -> None:
        # blocking: a waiting thread sleeps instead of spinning on a core and on the GIL.
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)
        self.event.record(stream)
        self._origin, self._began = origin, began

    @property
    def fired(self) -> bool:
        """Whether the device has passed it."""
        return self.event.query()

    @property
    def time(self) -> float:
        """The device's clock, moved to the host's."""
        return self._began + 1e-3 * self._origin.elapsed_time(self.event)

    def wait(self, timeout: float | None = None) -> None:
        """Blocks in the driver, without the GIL; the driver knows no time limit."""
        if not self.fired:  # whoever gives the GIL away may wait long for it
            self.event.synchronize()


class CudaStream:
    """A CUDA stream, not the default one. `work` enqueues and returns; the host waits nowhere.

    A time is counted from an event before it, in milliseconds of fp32: exact to a microsecond over
    seconds, to half a millisecond over hours. So that event is renewed.
    """

    own_thread = False

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._latest: CudaEvent | None = None
        self._pool: Any = None  # of graphs, and gone with the last of them
        self._graphs = weakref.WeakSet[torch.cuda.CUDAGraph]()
        self._lost: list[torch.cuda.CUDAGraph] = []
        self._meet()

    def _meet(self) -> None:
        """Tie both clocks, where the stream rests."""
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record(self._stream)
        self._origin.synchronize()
        self._began = time.perf_counter()
        self._next: CudaEvent | None = None

    def _renew(self) -> None:
        """Count from a newer event: from now, or from one on its way once its time is known."""
        if self._stream.query():
            self._meet()
        elif self._next is None:
            self._next = self._latest
        elif self._next.fired:
            self._origin, self._began, self._next = self._next.event, self._next.time, None

    def submit(self, work: Work) -> CudaEvent:
        """Enqueue it from here, under the stream. What `work` raises on the host is raised."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            work()
        return self.mark()

    def copy(self, into: Tensor, source: Tensor) -> CudaEvent:
        """Asynchronous where the host's side is pinned."""
        return self.submit(lambda: into.copy_(source, non_blocking=True))

    def mark(self) -> CudaEvent:
        """Record an event."""
        if time.perf_counter() - self._began > RENEW:
            self._renew()
        self._latest = CudaEvent(self._stream, self._origin, self._began)
        return self._latest

    def pinned(self, size: int) -> Tensor:
        """Page-locked: the driver reads it while the host goes on."""
        return torch.zeros(size, dtype=torch.int64, pin_memory=True)

    def call(self, make: Callable[[], T]) -> T:
        """Under the stream, and done on return: later work may come from another thread."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            made = make()
        self._stream.synchronize()
        return made

    def capture(self, work: Callable[[], T]) -> tuple[Callable[[], object], T]:
        """A CUDA graph; all of a stream's share one pool, since it replays them one by one.

        The error mode is the thread's own: another one waits for events meanwhile.
        """
        with CAPTURING:
            if not self._graphs:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            self._graphs.add(graph)
            mode = "thread_local"
            collects = gc.isenabled()
            gc.disable()  # what it would free here may not be freed within a capture
            try:
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode=mode):
                    made = work()
            except BaseException:
                self._lost.append(graph)  # its end would clear a workspace that others use
                raise
            finally:
                if collects:
                    gc.enable()
        return graph.replay, made

    def close(self) -> None:
        """Waits for the device."""
        self._stream.synchronize()


class SimulatedEvent:
    """A place on a timeline."""

    def __init__(self, at: float) -> None:
        self.time = at

    @property
    def fired(self) -> bool:
        """Whether the clock has passed it."""
        return time.perf_counter() >= self.time

    def wait(self, timeout: float | None = None) -> None:
        """Sleeps until then."""
        time.sleep(max(0.0, self.time - time.perf_counter()))


class SimulatedStream(InlineStream):
    """A device that only takes time, on a timeline: work starts at the later of its enqueueing and
    the end of what came before, so a late timer of the host is not counted as idle.
    """

    def __init__(self) -> None:
        self._end = 0.0

    def spend(self, seconds: float) -> None:
        """Inside work: the device is busy for so long."""
        self._end = self.mark().time + seconds

    def submit(self, work: Work) -> SimulatedEvent:
        """What the work gives is there at once; the event fires at its end on the timeline."""
        work()
        return self.mark()

    def copy(self, into: Tensor, source: Tensor) -> SimulatedEvent:
        """Takes no time."""
        return self.submit(lambda: into.copy_(source))

    def mark(self) -> SimulatedEvent:
        """Where the device stands."""
        return SimulatedEvent(max(time.perf_counter(), self._end))


def open_stream(device: torch.device, overlap: bool) -> Stream:
    """The stream of a device. Without overlap a CPU does its work where it is submitted."""
    if device.type == "cuda":
        return CudaStream(device)
    return CpuStream() if overlap else InlineStream()
