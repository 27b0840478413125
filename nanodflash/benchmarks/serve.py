"""Many requests at once: throughput, latency, pages, the prefix cache, the scheduler's own cost."""

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from nanodflash import LLM, SamplingParams
from nanodflash.benchmarks import decode
from nanodflash.engine.closures import MAX_ROWS

REQUESTS_EACH = 3  # requests a client sends, one after another
# A cycle of few rows is traced once its key was used often, which takes a second: so many passes
# over 8 prompts, one by one, leave none for the next.
WARM_UP = 10


def run_concurrency(
    llm: LLM, prompts: list[list[int]], clients: int, speculate: bool, max_new: int
) -> dict[str, Any]:
    """`clients` threads that each keep one request running, taking prompts in turn.

    Returns:
        A JSON object: total tokens/s, milliseconds to the first token and a token after it
        (median, p99), most pages in use, the share of the time spent outside the steps.
    """
    params = SamplingParams(max_new_tokens=max_new)
    first: list[float] = []
    later: list[float] = []
    tokens, most, lock = 0, 0, threading.Lock()
    work = iter([prompts[i % len(prompts)] for i in range(clients * REQUESTS_EACH)])

    def client() -> None:
        nonlocal tokens, most
        while True:
            with lock:
                prompt = next(work, None)
            if prompt is None:
                return
            began, count, last = time.perf_counter(), 0, 0.0
            for chunk in llm.stream(prompt, params, speculate):
                now = time.perf_counter()
                if not count:
                    first.append(now - began)
                last, count = now, count + len(chunk.token_ids)
                most = max(most, llm.page_stats().live)
            with lock:
                tokens += count
                if count > 1:
                    later.append((last - began - first[-1]) / (count - 1))

    before = llm.metrics.copy()
    threads = [threading.Thread(target=client) for _ in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    return {
        "clients": clients,
        "speculate": speculate,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "first_ms": _spread(first),
        "token_ms": _spread(later),
        "most_pages": most,
        "outside_steps": 1 - (llm.metrics - before).busy_seconds / seconds,
    }


def run_prefix(llm: LLM, length: int, rounds: int) -> dict[str, Any]:
    """Milliseconds to the first token of a prompt of `length`, cold and with its prefix cached."""
    params = SamplingParams(max_new_tokens=1)
    cold: list[float] = []
    hit: list[float] = []
    for turn in range(rounds):
        prompt = [5 + (turn * 7919 + i * 31) % 1000 for i in range(length)]
        for times in (cold, hit):
            output = llm.generate([prompt], params)[0]
            times.append(1e3 * output.metrics.prefill_seconds)
    a, b = statistics.median(cold), statistics.median(hit)
    return {"tokens": length, "cold_ms": a, "cached_ms": b, "ratio": a / b}


def run_overlap(
    llm_of: Callable[[bool], LLM], count: int, clients: int, rounds: int, max_new: int
) -> dict[str, Any]:
    """Tokens/s with overlap and without, in turns, `count` prompts of fixed length of answer.

    One engine at a time: two would keep two pools of OpenMP workers, each asleep when wanted.

    Returns:
        A JSON object: samples, medians, median ratio, surplus rows a request.
    """
    params = SamplingParams(max_new_tokens=max_new, ignore_eos=True)
    samples: dict[str, list[float]] = {"off": [], "on": []}
    surplus, rows = 0, 1
    for turn in range(rounds):
        for name in ("off", "on") if turn % 2 == 0 else ("on", "off"):
            with llm_of(name == "on") as llm:
                prompts = decode.prompt_set(llm, count)
                work = [prompts[i : i + clients] for i in range(0, count, clients)]
                for some in work * (WARM_UP if clients <= MAX_ROWS else 1):
                    llm.generate(some, params)
                before, began = llm.metrics.copy(), time.perf_counter()
                for some in work:
                    llm.generate(some, params)
                samples[name].append(count * max_new / (time.perf_counter() - began))
                if name == "on":
                    spent = llm.metrics - before
                    surplus, rows = spent.surplus, spent.rows
    return {
        "clients": clients,
        "requests": count,
        "samples": samples,
        "off": statistics.median(samples["off"]),
        "on": statistics.median(samples["on"]),
        "ratio": statistics.median(
            on / off for on, off in zip(samples["on"], samples["off"], strict=True)
        ),
        "surplus_rows": surplus,
        "surplus_share": surplus / rows,
    }


def _spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "median": 1e3 * statistics.median(ordered),
        "p99": 1e3 * ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))],
    }
