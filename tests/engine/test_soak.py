"""Many requests of all kinds in one engine with overlap: nothing is lost, and nothing piles up.

NANODFLASH_SOAK sets the number of requests of the long one.
"""

import gc
import os
import random
import threading
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest

from nanodflash import LLM, SamplingParams

LIMIT = 120.0
COUNT = int(os.environ.get("NANODFLASH_SOAK", "2000"))
STATUS = Path("/proc/self/status")


def resident() -> float:
    """MiB of memory that this process holds."""
    gc.collect()
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


def request(dice: random.Random, vocab: int) -> tuple[list[int], SamplingParams, bool]:
    """1 to 24 tokens, half of them often seen before, and 1 to 48 new ones."""
    start = [7] * dice.choice([0, 0, 9, 16])
    prompt = [*start, *(dice.randrange(vocab) for _ in range(dice.randint(1, 8)))]
    params: dict[str, Any] = {"max_new_tokens": dice.randint(1, 48), "ignore_eos": True}
    if dice.random() < 0.3:
        params |= {"temperature": 1.0, "seed": dice.getrandbits(64), "top_p": 0.9}
    if dice.random() < 0.1:
        params |= {"logprobs": 1, "frequency_penalty": 0.2}
    return prompt, SamplingParams(**params), dice.random() < 0.9


def soak(llm: LLM, count: int, dice: random.Random) -> Counter[str]:
    """Requests with aborts, no more than 24 under way; every one of them ends as it should."""
    seen: Counter[str] = Counter()
    running: deque[tuple[Any, SamplingParams, bool]] = deque()

    def take() -> None:
        handle, params, doomed = running.popleft()
        assert handle.wait(LIMIT), "a request was lost"
        out = handle.result()
        if not doomed or out.finish_reason != "abort":
            assert (out.finish_reason, len(out.token_ids)) == ("length", params.max_new_tokens)
        if params.logprobs is not None:
            assert len(out.logprobs) == len(out.token_ids)
        seen[out.finish_reason] += 1
        seen["preempted"] += out.metrics.preemptions
        seen["cached"] += out.metrics.cached_tokens
        seen["tokens"] += len(out.token_ids)

    for _ in range(count):
        prompt, params, speculate = request(dice, llm.vocab_size)
        running.append((llm.submit(prompt, params, speculate), params, dice.random() < 0.1))
        if running[-1][2]:
            if dice.random() < 0.5:
                time.sleep(dice.uniform(0, 0.02))
            running[-1][0].abort()
        if len(running) == 24:
            take()
    while running:
        take()
    return seen


def check(llm: LLM, count: int, spare: float, no_leak: Any) -> Counter[str]:
    """A third of the requests to warm up, the others to compare with."""
    dice = random.Random(4)
    seen = soak(llm, count // 3, dice)
    before = resident() if STATUS.exists() else 0.0
    seen += soak(llm, count - count // 3, dice)
    after = resident() if STATUS.exists() else 0.0
    no_leak(llm)
    assert seen["length"] + seen["abort"] == count
    assert not llm.engine._handles
    assert after - before < spare, f"{before} MiB at first, {after} MiB in the end"
    return seen


def run(llm: LLM, count: int, spare: float, no_leak: Any) -> Counter[str]:
    with llm:
        seen = check(llm, count, spare, no_leak)
    assert llm.metrics.launched[2] > llm.metrics.launched[1], "seldom two steps ahead"
    return seen


def left(before: set[threading.Thread]) -> list[str]:
    """The engine's threads that were not there before."""
    fresh = set(threading.enumerate()) - before
    return [thread.name for thread in fresh if thread.name.startswith("nanodflash")]


def test_a_short_one(pair: Any, no_leak: Any) -> None:
    """The tiny pair, with a fifth of the pages that all would need."""
    before = set(threading.enumerate())
    options = {"block_size": 8, "page_size": 8, "max_seqs": 6, "num_pages": 20, "overlap": True}
    seen = run(LLM(pair.target, pair.draft, **options), 60, 60.0, no_leak)
    assert min(seen["preempted"], seen["cached"], seen["abort"]) > 0, f"too tame: {seen}"
    assert not left(before)


@pytest.mark.slow
def test_a_long_one(no_leak: Any) -> None:
    """The bundled pair on a CPU."""
    before = set(threading.enumerate())
    options: dict[str, Any] = {"page_size": 16, "max_seqs": 8, "num_pages": 28, "overlap": True}
    seen = run(LLM(max_model_len=128, **options), COUNT, 100.0, no_leak)
    assert min(seen["preempted"], seen["cached"], seen["abort"]) > 0, f"too tame: {seen}"
    assert not left(before)
