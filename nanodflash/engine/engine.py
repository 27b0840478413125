"""The loop around scheduler and runner, in a thread of its own; handles reach into it.

Only that thread touches scheduler and device. Other threads put requests and aborts into the
inbox and take chunks out of their handle's queue.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from queue import SimpleQueue

import torch

from nanodflash.config import EngineConfig
from nanodflash.decoding.cycle import Decoder
from nanodflash.engine.paging import PageStats
from nanodflash.engine.runner import Runner
from nanodflash.engine.scheduler import Scheduler
from nanodflash.engine.sequence import Chunk, Sequence


class RequestHandle:
    """One request, seen from outside the engine. Any one thread may iterate it."""

    def __init__(self, engine: "Engine", sequence: Sequence) -> None:
        self._engine, self._sequence = engine, sequence
        self._chunks: SimpleQueue[Chunk | BaseException] = SimpleQueue()
        self._done = threading.Event()
        self._failure: BaseException | None = None
        self._notify: Callable[[], object] = lambda: None

    def put(self, item: Chunk | BaseException) -> None:
        """Hand a chunk, or what ended the request, to whoever reads. Called by the engine."""
        if isinstance(item, BaseException):
            self._failure = item
        self._chunks.put(item)
        if isinstance(item, BaseException) or item.finish_reason is not None:
            self._done.set()
        self._notify()

    def __iter__(self) -> Iterator[Chunk]:
        """Chunks as they come; the last one has a finish reason. Raises what ended the request."""
        while not (self.done and self._chunks.empty()):  # what was read is not given again
            item = self._chunks.get()
            if isinstance(item, BaseException):
                raise item
            yield item
            if item.finish_reason is not None:
                return

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """The same for asyncio; a reader that is cancelled ends the request."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def notify() -> None:
            with suppress(RuntimeError):  # the loop may be gone before the request is
                loop.call_soon_threadsafe(arrived.set)

        self._notify = notify
        try:
            while not (self.done and self._chunks.empty()):
                arrived.clear()  # before looking: what is put later sets it again
                while not self._chunks.empty():
                    item = self._chunks.get()
                    if isinstance(item, BaseException):
                        raise item
                    yield item
                    if item.finish_reason is not None:
                        return
                await arrived.wait()
        finally:
            self.abort()

    def result(self) -> Sequence:
        """Wait for the end; the sequence is then no longer the engine's. Raises as iterating."""
        self._done.wait()
        if self._failure is not None:
            raise self._failure
        return self._sequence

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

    The models are loaded in the engine's thread too: a second thread that has run parallel
    operations keeps a pool of its own, and OpenMP then puts every idle worker to sleep between
    two small operations (a step takes twice as long).

    Args:
        make_decoder: loads the models; called in the engine's thread, its errors are raised here.
        draft_limit:  first position at which proposals are not counted.
        drafts:       whether there is a drafter.
        graphs:       replay cycles where that is possible.
    """

    def __init__(
        self,
        make_decoder: Callable[[], Decoder],
        config: EngineConfig,
        draft_limit: int,
        drafts: bool,
        graphs: bool = True,
    ) -> None:
        self.scheduler = Scheduler(config, draft_limit, drafts, self._emit)
        self._handles: dict[int, RequestHandle] = {}  # by identity of the sequence
        self._inbox: SimpleQueue[tuple[str, Sequence | None]] = SimpleQueue()
        self._lock = threading.Lock()  # of submitting and closing
        self._closed = False
        self._error: BaseException | None = None
        self._threads = torch.get_num_threads()
        loaded: SimpleQueue[Runner | BaseException] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, args=(make_decoder, graphs, loaded), name="nanodflash", daemon=True
        )
        self._thread.start()
        runner = loaded.get()
        if isinstance(runner, BaseException):
            raise runner
        self.runner = runner

    def submit(self, sequence: Sequence) -> RequestHandle:
        """Take a request; RuntimeError once closed."""
        handle = RequestHandle(self, sequence)
        with self._lock:
            self.require_open()
            self._handles[id(sequence)] = handle
            self._inbox.put(("add", sequence))
        return handle

    def require_open(self) -> None:
        """RuntimeError once closed, or once the engine's thread has failed."""
        if self._error is not None:
            raise RuntimeError("this LLM's engine has failed") from self._error
        if self._closed:
            raise RuntimeError("this LLM is closed")

    def abort(self, sequence: Sequence) -> None:
        """Ask for the end of a request."""
        self._inbox.put(("abort", sequence))

    def close(self) -> None:
        """End all requests and the thread. Closing twice is fine."""
        with self._lock:
            self._closed = True
        self._inbox.put(("close", None))
        if self._thread is not threading.current_thread():
            self._thread.join()

    def page_stats(self) -> PageStats:
        """Pages by use. Exact when nothing runs."""
        self.require_open()
        return self.scheduler.pages.stats()

    # ------------------------------------------------------------------ the engine's thread

    def _run(
        self,
        make_decoder: Callable[[], Decoder],
        graphs: bool,
        loaded: "SimpleQueue[Runner | BaseException]",
    ) -> None:
        torch.set_num_threads(self._threads)  # a new thread would run small matmuls far slower
        try:
            runner = Runner(make_decoder(), graphs)
        except BaseException as error:
            loaded.put(error)
            return
        loaded.put(runner)
        try:
            while self._read_inbox(wait=not self.scheduler.busy):
                self._step(runner)
            for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
                self.scheduler.abort(sequence)
        except BaseException as error:  # a fault of ours: nobody may wait for ever
            with self._lock:
                self._error = error
            for handle in list(self._handles.values()):
                handle.put(error)

    def _read_inbox(self, wait: bool) -> bool:
        """Take all messages, waiting for the first where there is nothing else to do."""
        while wait or not self._inbox.empty():
            what, sequence = self._inbox.get()
            wait = False
            if sequence is None:
                return False
            if what == "add":
                self.scheduler.add(sequence)
            else:
                self.scheduler.abort(sequence)
        return True

    def _step(self, runner: Runner) -> None:
        """Plan, run, commit."""
        plan = self.scheduler.plan()
        if plan is None:
            return
        try:
            results = runner.run(plan)
        except Exception as error:  # whatever a step raises ends the requests in it, and only them
            self.scheduler.fail(error)
        else:
            self.scheduler.commit(results.finals, results.rows, results.logprobs)

    def _emit(self, sequence: Sequence, item: Chunk | BaseException) -> None:
        handle = self._handles[id(sequence)]
        if isinstance(item, BaseException) or item.finish_reason is not None:
            del self._handles[id(sequence)]
        handle.put(item)
