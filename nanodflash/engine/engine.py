"""The loop around scheduler and runner, in threads of its own; handles reach into it.

The bookkeeping thread alone touches the scheduler. With overlap steps are launched two ahead, by
a device thread where launching takes the host's time: while the device runs step n, the numbers of
n-1 are committed, n+1 is handed over, and then the texts of n-1 are made. Without overlap one
thread does the same in turn.
Other threads put requests and aborts into the inbox and take chunks out of their handle's queue.
"""

import asyncio
import atexit
import copy
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from queue import SimpleQueue

from nanodflash.config import EngineConfig
from nanodflash.decoding.plan import EMITTED, RAW_ACCEPTED, StepPlan
from nanodflash.engine.metrics import EngineMetrics
from nanodflash.engine.paging import PageStats
from nanodflash.engine.runner import DEPTH, Runner, Steps, Ticket
from nanodflash.engine.scheduler import Scheduler
from nanodflash.engine.sequence import Chunk, GenerationOutput, Sequence
from nanodflash.engine.streams import Stream
from nanodflash.engine.trace import Trace
from nanodflash.engine.width import VerifyWidth

NO_CYCLE = ("prefill", "capture")  # parts of a step that have nothing to do with its rows
THREADS = ("nanodflash", "nanodflash-device", "nanodflash-stream")


class RequestHandle:
    """One request, seen from outside the engine. Any one thread may iterate it.

    Args:
        streams: keep the chunks for a reader; without, only the last one. What nobody reads would
                 pile up, and long pauses of the garbage collector with it.
    """

    def __init__(self, engine: "Engine", sequence: Sequence, streams: bool) -> None:
        self._engine, self._sequence, self._streams = engine, sequence, streams
        self._chunks: SimpleQueue[Chunk | BaseException] = SimpleQueue()
        self._done, self._read = threading.Event(), False
        self._failure: BaseException | None = None
        self._notify: Callable[[], object] = lambda: None

    def put(self, item: Chunk | BaseException) -> None:
        """Hand a chunk, or what ended the request, to whoever reads. Called by the engine."""
        if isinstance(item, BaseException):
            self._failure = item
        last = isinstance(item, BaseException) or item.finish_reason is not None
        if self._streams or last:
            self._chunks.put(item)
        if last:
            self._done.set()
        self._notify()

    def __iter__(self) -> Iterator[Chunk]:
        """Chunks as they come; the last one has a finish reason. Raises what ended the request."""
        while not self._read:  # what was read is not given again
            item = self._chunks.get()
            self._read = isinstance(item, BaseException) or item.finish_reason is not None
            if isinstance(item, BaseException):
                raise _own(item)
            yield item
        if self._failure is not None:
            raise _own(self._failure)

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """The same for asyncio; a reader that is cancelled ends the request."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def notify() -> None:
            with suppress(RuntimeError):  # the loop may be gone before the request is
                loop.call_soon_threadsafe(arrived.set)

        self._notify = notify
        try:
            while not self._read:
                arrived.clear()  # before looking: what is put later sets it again
                while not self._chunks.empty():
                    item = self._chunks.get()
                    self._read = isinstance(item, BaseException) or item.finish_reason is not None
                    if isinstance(item, BaseException):
                        raise _own(item)
                    yield item
                if not self._read:
                    await arrived.wait()
            if self._failure is not None:
                raise _own(self._failure)
        finally:
            self.abort()

    def result(self) -> GenerationOutput:
        """Wait for the end and return all of it. Raises as iterating."""
        self._done.wait()
        if self._failure is not None:
            raise _own(self._failure)
        return self._sequence.output()

    def abort(self) -> None:
        """End the request wherever it stands; its last chunk says "abort"."""
        self._engine.abort(self._sequence)

    def wait(self, seconds: float) -> bool:
        """Wait for the end, at most so long; whether it has come."""
        return self._done.wait(seconds)

    @property
    def done(self) -> bool:
        """Whether the request has ended."""
        return self._done.is_set()


class Engine:
    """Takes requests at any time from any thread and keeps the device full.

    Args:
        make_steps:  loads what does the work of steps, given their stream; its errors are raised
                     here.
        open_stream: opens the stream that they run on.
        draft_limit: first position at which proposals are not counted.
        drafts:      whether there is a drafter.
        overlap:     launch from a thread of its own, two steps ahead.
        trace:       record what happens when.
        width:       rows of a block that are verified; None is all of it.
    Attributes:
        metrics: of the engine's life so far.
    """

    def __init__(
        self,
        make_steps: Callable[[Stream], Steps],
        open_stream: Callable[[], Stream],
        config: EngineConfig,
        draft_limit: int,
        drafts: bool,
        overlap: bool = False,
        trace: Trace | None = None,
        width: VerifyWidth | None = None,
    ) -> None:
        self._width = width or VerifyWidth(config.block_size, config.block_size)
        self.scheduler = Scheduler(config, draft_limit, drafts, self._emit, self._width.choose)
        self.metrics, self.trace = EngineMetrics(), trace or Trace(enabled=False)
        self._depth = DEPTH if overlap else 1
        self._handles: dict[int, RequestHandle] = {}  # by identity of the sequence
        self._inbox: SimpleQueue[tuple[str, Sequence | None]] = SimpleQueue()
        self._lock = threading.RLock()  # of submitting and closing; a signal may do both at once
        self._closed, self._over = False, threading.Event()
        self._error: BaseException | None = None
        self._ended = 0.0  # of the latest committed step, on the device's clock
        self._plans: SimpleQueue[StepPlan | None] = SimpleQueue()
        self._tickets: SimpleQueue[Ticket | BaseException] = SimpleQueue()
        self._launcher = threading.Thread(
            target=self._launch_all, name="nanodflash-device", daemon=True
        )
        opened: SimpleQueue[Runner | BaseException] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._live,
            args=(lambda: Runner(make_steps, open_stream(), config), opened),
            name="nanodflash",
            daemon=True,
        )
        try:
            try:
                self._thread.start()
            except RuntimeError:  # the system gives no thread: there is none to wait for
                self._over.set()
                raise
            runner = opened.get()
        except BaseException:  # interrupted, perhaps again while it closes
            atexit.register(self.close)  # no thread may be in the middle of torch at exit
            self.close()
            raise
        if isinstance(runner, BaseException):
            self._thread.join()
            raise runner
        self.runner = runner

    def submit(self, sequence: Sequence, streams: bool = True) -> RequestHandle:
        """Take a request; RuntimeError once closed."""
        handle = RequestHandle(self, sequence, streams)
        with self._lock:
            self.require_open()
            self._handles[id(sequence)] = handle
            self._inbox.put(("add", sequence))
        if self._over.is_set():  # closed in between, by a signal: nobody reads the inbox any more
            handle.put(RuntimeError("this LLM is closed"))
        return handle

    def require_open(self) -> None:
        """RuntimeError once closed, or once one of the engine's threads has failed."""
        if self._error is not None:
            raise RuntimeError("this LLM's engine has failed") from self._error
        if self._closed:
            raise RuntimeError("this LLM is closed")

    def abort(self, sequence: Sequence) -> None:
        """Ask for the end of a request."""
        self._inbox.put(("abort", sequence))

    def close(self) -> None:
        """End all requests and the threads. Closing twice is fine."""
        with self._lock:
            self._closed = True
        self._inbox.put(("close", None))
        # The collector of garbage may call this from one of the threads that would be waited for.
        if threading.current_thread().name not in THREADS:
            self._over.wait()  # a `join` that is interrupted takes the thread for ended (3.11)
            if self._thread.ident is not None:
                self._thread.join()
            atexit.unregister(self.close)  # it would keep the engine

    def page_stats(self) -> PageStats:
        """Pages by use. Exact when nothing runs."""
        self.require_open()
        return self.scheduler.pages.stats()

    # ------------------------------------------------------------------ the bookkeeping thread

    def _live(
        self, open_runner: Callable[[], Runner], opened: "SimpleQueue[Runner | BaseException]"
    ) -> None:
        try:
            self.runner = open_runner()
        except BaseException as error:
            opened.put(error)
        else:
            opened.put(self.runner)
            self._run()
        finally:
            self._over.set()

    def _run(self) -> None:
        """Until it is closed, or has failed."""
        try:
            if self._depth > 1 and not self.runner.stream.own_thread:
                self._launcher.start()
            while self._read_inbox():
                self._hand_over()
                with self.trace.span("bookkeeping", "text"):
                    self.scheduler.deliver()
                self._commit()
            for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
                self.scheduler.abort(sequence)
            while self.scheduler.launched:  # pages and slots come back behind the last step
                self._commit()
        except BaseException as error:  # a fault of ours: nobody may wait for ever
            with self._lock:
                self._error = error
            for handle in list(self._handles.values()):
                handle.put(error)
        finally:
            if self._launcher.ident is not None:
                self._plans.put(None)
                self._launcher.join()
            self.runner.close()

    def _read_inbox(self) -> bool:
        """Take all messages, waiting for the first where there is nothing else to do."""
        resting = not self.scheduler.busy
        while resting or not self._inbox.empty():
            what, sequence = self._inbox.get()
            if resting:
                self._ended = 0.0  # what the device waited for was a request, not the host
            resting = False
            if sequence is None:
                return False
            if what == "add":
                self.scheduler.add(sequence)
            else:
                self.scheduler.abort(sequence)
        return True

    def _hand_over(self) -> None:
        """Plan and launch until enough steps are on their way."""
        while self.scheduler.launched < self._depth:
            with self.trace.span("bookkeeping", "plan"):
                plan = self.scheduler.plan()
            if plan is None:
                return
            self.metrics.count_launch(self.scheduler.launched)
            if self._launcher.ident is not None:
                self._plans.put(plan)
            else:
                self._tickets.put(self._launch(plan))

    def _commit(self) -> None:
        """Wait for the oldest step, commit its numbers or its failure, and count it."""
        if not self.scheduler.launched:
            return
        queues = len(self.scheduler.waiting), len(self.scheduler.running)
        began = time.perf_counter()
        with self.trace.span("bookkeeping", "wait"):
            ticket = self._tickets.get()
            if isinstance(ticket, BaseException):
                raise ticket
            self.runner.wait(ticket)
        waited = time.perf_counter() - began
        with self.trace.span("bookkeeping", "read"):
            times = ticket.times()
            try:
                results = self.runner.results(ticket)
            except BaseException as error:
                if ticket.error is not error:  # not of the step's work: the device itself
                    raise
        with self.trace.span("bookkeeping", "commit"):
            if ticket.error is not None:  # ends the requests in this step, and only them
                self.scheduler.fail(ticket.error)
            else:
                self.scheduler.commit(results.finals, results.rows, results.logprobs)
                self._learn(ticket.plan, times, results.rows)
        self.trace.step(times)
        rows, surplus = len(ticket.plan.rows), self.scheduler.surplus
        self.metrics.count_step(times, rows, self._ended, waited, queues, surplus)
        self._ended = times[-1][1]

    def _learn(self, plan: StepPlan, times: list[tuple[str, float]], rows: list[list[int]]) -> None:
        """What a cycle with proposals took and kept."""
        if plan.rows and plan.facts.speculate:
            parts = [(part, b - a) for (_, a), (part, b) in pairwise(times)]
            took = sum(seconds for part, seconds in parts if part not in NO_CYCLE)
            kept = [row[RAW_ACCEPTED] for row in rows if row[EMITTED]]
            self._width.count(len(rows), plan.facts.width, took, kept)
            self.metrics.count_width(plan.facts.width)

    def _emit(self, sequence: Sequence, item: Chunk | BaseException) -> None:
        handle = self._handles[id(sequence)]
        if isinstance(item, BaseException) or item.finish_reason is not None:
            del self._handles[id(sequence)]
        handle.put(item)

    # ------------------------------------------------------------------ the device thread

    def _launch_all(self) -> None:
        """Launch plans in order; a fault is the bookkeeping thread's to raise."""
        try:
            while (plan := self._plans.get()) is not None:
                self._tickets.put(self._launch(plan))
        except BaseException as error:
            self._tickets.put(error)

    def _launch(self, plan: StepPlan) -> Ticket:
        with self.trace.span("device thread", "launch"):
            return self.runner.launch(plan)


def _own(error: BaseException) -> BaseException:
    """The same error for one reader, to raise: what is raised gets the frames of who reads, and
    the engine, which keeps the first, would keep all that these frames know.
    """
    with suppress(Exception):
        own = copy.copy(error)  # made of its arguments, of which some classes make other words
        if (type(own), str(own)) == (type(error), str(error)):
            own.__cause__, own.__context__ = error.__cause__, error.__context__
            own.__suppress_context__ = error.__suppress_context__
            return own.with_traceback(error.__traceback__)
    return error
