"""Batch 1, greedy, held-out prompts: with the drafter, without it, and through the reference.

Each round runs every contestant over all prompts, so that a slow minute of a shared machine
falls on all of them; ratios are taken inside a round, and their median is what counts.
"""

import hashlib
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from nanodflash import LLM, GenerationOutput, SamplingParams
from nanodflash.engine.metrics import Metrics
from nanodflash.train import corpus

CYCLE = ("draft", "verify", "commit")
WARM_UP = 2  # whole rounds, never samples: cycles are traced when they were used often


def prompt_set(llm: LLM, count: int) -> list[list[int]]:
    """Ids of held-out problems, laid out as chats; none was in the training stream."""
    assert llm.tokenizer is not None
    problems = corpus.held_out(count, seed=11)
    chats = [[{"role": "user", "content": problem.prompt}] for problem in problems]
    return [llm.tokenizer.encode(llm.render(chat)) for chat in chats]


def one_by_one(
    llm: LLM, prompts: list[list[int]], params: SamplingParams, speculate: bool = True
) -> list[GenerationOutput]:
    """Batch 1: a prompt only when the one before it has ended."""
    return [llm.generate(prompt, params, speculate)[0] for prompt in prompts]


def run_decode(llm: LLM, prompts: list[list[int]], rounds: int, max_new: int) -> dict[str, Any]:
    """Decode with and without the drafter.

    Returns:
        A JSON object: samples (end-to-end and decode-only tokens/s a round), medians, the speed-up,
        tau with its histogram, milliseconds of a cycle by step, whether the tokens are identical.
    """
    params = SamplingParams(max_new_tokens=max_new)
    for speculate in (True, False) * WARM_UP:
        one_by_one(llm, prompts, params, speculate)
    samples: dict[str, list[dict[str, float]]] = {"speculative": [], "plain": []}
    tokens: dict[str, list[list[int]]] = {}
    metrics = Metrics()
    cycle_ms: dict[str, float] = {}
    for turn in range(rounds):
        for name in ("speculative", "plain") if turn % 2 == 0 else ("plain", "speculative"):
            before = llm.metrics.copy()
            began = time.perf_counter()
            outputs = one_by_one(llm, prompts, params, speculate=name == "speculative")
            seconds = time.perf_counter() - began
            total = sum((o.metrics for o in outputs), Metrics())
            tokens[name] = [o.token_ids for o in outputs]
            count = sum(map(len, tokens[name]))
            samples[name].append({"total": count / seconds, "decode": total.tokens_per_second})
            if name == "speculative":
                metrics = total
                parts = (llm.metrics - before).seconds
                cycle_ms = {k: 1e3 * parts[k] / total.cycles for k in CYCLE if parts.get(k)}
    return {
        "prompts": len(prompts),
        "prompt_set": fingerprint(prompts),
        "max_new_tokens": max_new,
        "block_size": llm.config.block_size,
        "dtype": str(llm.dtype).removeprefix("torch."),
        "tokens": sum(map(len, tokens["plain"])),
        "identical": sum(a == b for a, b in zip(*tokens.values(), strict=True)),
        "samples": samples,
        "speculative": _median(samples["speculative"]),
        "plain": _median(samples["plain"]),
        "speedup": _ratio(samples["speculative"], samples["plain"]),
        "metrics": metrics.as_dict(),
        "cycle_ms": cycle_ms,
    }


def run_peer(
    generate: Callable[[list[int]], tuple[list[int], int]],
    llm: LLM,
    prompts: list[list[int]],
    rounds: int,
    max_new: int,
) -> dict[str, Any]:
    """The reference and this engine in turns, end to end, on the same prompts and weights.

    Args:
        generate: prompt ids -> (new ids, target forwards without prefill).
    """
    params = SamplingParams(max_new_tokens=max_new)
    for prompt in prompts:
        generate(prompt)
    one_by_one(llm, prompts, params)
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    identical, cycles, emitted = 0, 0, 0
    for turn in range(rounds):
        began = time.perf_counter()
        outputs = [generate(prompt) for prompt in prompts]
        seconds = time.perf_counter() - began
        emitted = sum(len(ids) for ids, _ in outputs)
        theirs.append({"total": emitted / seconds})
        began = time.perf_counter()
        mine = one_by_one(llm, prompts, params)
        seconds = time.perf_counter() - began
        ours.append({"total": sum(len(o.token_ids) for o in mine) / seconds})
        if turn == 0:
            cycles = sum(count for _, count in outputs)
            identical = sum(a.token_ids == b for a, (b, _) in zip(mine, outputs, strict=True))
    return {
        "samples": {"nanodflash": ours, "peer": theirs},
        "nanodflash": _median(ours),
        "peer": _median(theirs),
        "ratio": _ratio(ours, theirs),
        "peer_tau": (emitted - len(prompts)) / cycles,
        "identical": identical,
    }


def run_context(llm_of: Callable[[int], LLM], lengths: list[int], steps: int) -> dict[str, Any]:
    """Milliseconds of a plain step at 200 tokens of context, for several `max_model_len`."""
    result = {}
    for length in lengths:
        with llm_of(length) as llm:
            params = SamplingParams(max_new_tokens=steps, ignore_eos=True)
            prompt = list(range(5, 205))
            llm.generate(prompt, params, speculate=False)
            runs = [llm.generate(prompt, params, speculate=False)[0].metrics for _ in range(5)]
            result[str(length)] = 1e3 * statistics.median(m.decode_seconds / m.cycles for m in runs)
    return result


def fingerprint(prompts: list[list[int]]) -> str:
    """A short hash of a prompt set."""
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:12]


def _median(samples: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(s[key] for s in samples) for key in samples[0]}


def _ratio(a: list[dict[str, float]], b: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Median, smallest and largest ratio of two contestants, round by round."""
    result = {}
    for key in a[0]:
        ratios = [x[key] / y[key] for x, y in zip(a, b, strict=True)]
        result[key] = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
    return result
