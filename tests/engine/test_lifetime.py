"""An engine's threads end with it: closed, dropped, or interrupted while it loads."""

import gc
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from nanodflash import LLM, SamplingParams
from nanodflash.benchmarks.simulate import SimulatedSteps
from nanodflash.config import EngineConfig
from nanodflash.engine.engine import Engine
from nanodflash.engine.scheduler import Scheduler
from nanodflash.engine.streams import SimulatedStream

ROOT = Path(__file__).parents[2]
INTERRUPTED = """
import os, signal, sys, time
import nanodflash.llm as llm
import generate

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
load = llm.load_model
def slow(*arguments):
    os.kill(os.getpid(), signal.SIGINT)  # arrives in the main thread, which waits for the loading
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        model = load(*arguments)
    return model
llm.load_model = slow
code = generate.main([{arguments}])
print("code", code)
"""


def engine_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("nanodflash")]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_dropped_engine_is_collected(pair: Any, overlap: bool) -> None:
    before = len(engine_threads())
    llm = LLM(pair.target, pair.draft, overlap=overlap)
    llm.generate([5, 6], SamplingParams(max_new_tokens=3))
    assert len(engine_threads()) == before + (2 if overlap else 1)
    gone = weakref.ref(llm)
    del llm
    gc.collect()
    assert gone() is None
    assert len(engine_threads()) == before


def test_a_closed_engine_is_not_kept_for_the_exit(pair: Any) -> None:
    with LLM(pair.target, pair.draft) as llm:
        assert llm._finalizer.alive
    assert not llm._finalizer.alive


def fails(*arguments: Any) -> None:
    raise LookupError("scripted failure")


def meet_a_fault(llm: LLM) -> None:
    """Errors are raised through frames that know the LLM."""
    with pytest.raises(LookupError, match="scripted failure"):
        llm.generate([5, 6], SamplingParams(max_new_tokens=3))
    with pytest.raises(RuntimeError, match="engine has failed"):
        llm.page_stats()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("closed", [False, True])
def test_a_failed_engine_is_collected(
    pair: Any, overlap: bool, closed: bool, monkeypatch: Any
) -> None:
    """It keeps its error, but nothing of those who were told."""
    monkeypatch.setattr(Scheduler, "commit", fails)
    before = len(engine_threads())
    llm = LLM(pair.target, pair.draft, overlap=overlap)
    meet_a_fault(llm)
    if closed:
        llm.close()
    gone = [weakref.ref(one) for one in (llm, llm.engine, llm.engine.runner.steps.decoder)]
    del llm
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3
    assert len(engine_threads()) == before


def engines() -> set[int]:
    gc.collect()
    return {id(one) for one in gc.get_objects() if type(one) is Engine}


def open_interrupted() -> None:
    """An engine whose maker is interrupted while it waits for the loading."""
    config, stream = EngineConfig(max_model_len=64), SimulatedStream()

    def make(_: Any) -> SimulatedSteps:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        interrupted.wait(10)
        return SimulatedSteps(stream, config, 0.0, [1])

    interrupted = threading.Event()

    def interrupt(*_: Any) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    handler = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            Engine(make, lambda: stream, config, 64, True)
    finally:
        signal.signal(signal.SIGINT, handler)


def test_an_engine_interrupted_while_it_loads_is_collected() -> None:
    """Exit has to wait for it only until it is closed."""
    before = engines()
    open_interrupted()
    assert engines() <= before


@pytest.mark.parametrize("overlap", ["--overlap", "--no-overlap"])
def test_interrupted_while_it_loads(pair: Any, overlap: str) -> None:
    """In the middle of torch, in another thread: the process ends in order."""
    flags = ["--model", str(pair.worded), "--draft", str(pair.draft), overlap, "a1"]
    code = INTERRUPTED.replace("{arguments}", ", ".join(map(repr, flags)))
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (run.returncode, run.stdout.strip()) == (0, "code 130"), run.stderr
    assert run.stderr == ""


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failed_loading_leaves_no_thread(pair: Any, overlap: bool, monkeypatch: Any) -> None:
    before = len(engine_threads())
    monkeypatch.setattr("nanodflash.llm.load_model", fails)
    with pytest.raises(LookupError, match="scripted failure"):
        LLM(pair.target, pair.draft, overlap=overlap)
    assert len(engine_threads()) == before
