"""An engine's threads end with it: closed, dropped, or interrupted while it loads."""

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from nanodflash import LLM, SamplingParams

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
    def fails(*arguments: Any) -> None:
        raise LookupError("scripted failure")

    before = len(engine_threads())
    monkeypatch.setattr("nanodflash.llm.load_model", fails)
    with pytest.raises(LookupError, match="scripted failure"):
        LLM(pair.target, pair.draft, overlap=overlap)
    assert len(engine_threads()) == before
