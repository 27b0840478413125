"""Score a pair on held-out problems: are the answers right, do they end, and what is tau.

tau says nothing of the target's quality (a bad one that repeats itself is easy to draft for), so
the three are always given together.
"""

from functools import reduce
from operator import add
from typing import Any

from nanodflash.config import SamplingParams
from nanodflash.llm import LLM
from nanodflash.train import corpus


def score_pair(llm: LLM, count: int, seed: int, kind: str, max_new: int) -> dict[str, Any]:
    """Decode held-out problems greedily, speculating where the model has a drafter.

    Returns:
        right:      share solved exactly.
        stopped:    share that ended by themselves.
        distinct_8: share of distinct 8-grams of ids inside the answers; low means repetition.
        and the metrics of all answers together.
    """
    problems = corpus.held_out(count, seed, kind)
    params = SamplingParams(max_new_tokens=max_new)
    outputs = [llm.chat([{"role": "user", "content": p.prompt}], params) for p in problems]
    right = [corpus.score(p, o.text) for p, o in zip(problems, outputs, strict=True)]
    grams = [
        (row, *o.token_ids[i : i + 8])
        for row, o in enumerate(outputs)
        for i in range(len(o.token_ids) - 7)
    ]
    wrong: dict[str, int] = {}
    for problem, good in zip(problems, right, strict=True):
        if not good:
            wrong[problem.template] = wrong.get(problem.template, 0) + 1
    return {
        "kind": kind,
        "problems": count,
        "seed": seed,
        "right": sum(right) / count,
        "stopped": sum(o.finish_reason == "stop" for o in outputs) / count,
        "distinct_8": len(set(grams)) / max(len(grams), 1),
        "mean_tokens": sum(len(o.token_ids) for o in outputs) / count,
        "wrong_by_template": wrong,
        "metrics": reduce(add, (o.metrics for o in outputs)).as_dict(),
    }
