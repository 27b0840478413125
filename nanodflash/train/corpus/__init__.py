"""The training corpus: an endless stream of problems with answers, and a disjoint held-out set."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from nanodflash.train.corpus import code, maths

MATHS_SHARE = 0.85
HELD_OUT_ONE_IN = 50
_ANSWER = re.compile(r"The answer is (-?\d+)\.")


@dataclass(frozen=True)
class Problem:
    """One problem; `result` is the number asked for, or None for code."""

    kind: str
    template: str
    prompt: str
    answer: str
    result: int | None


def _sample(rng: random.Random, kind: str) -> Problem:
    if kind == "maths":
        name, prompt, answer, result = maths.draw(rng)
        return Problem(kind, name, prompt, answer, result)
    if kind == "code":
        return Problem(kind, *code.draw(rng), None)
    raise ValueError(f"kind must be 'maths' or 'code', not {kind!r}")


def sample(rng: random.Random) -> Problem:
    """Draw one problem, held out or not."""
    return _sample(rng, "maths" if rng.random() < MATHS_SHARE else "code")


def is_held_out(answer: str) -> bool:
    """Tell from the answer's text alone whether its problem is kept out of training.

    By the answer, since one set of facts is asked for in several wordings: a held-out problem's
    facts then occur in no training document.
    """
    digest = hashlib.blake2b(answer.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def stream(seed: int) -> Iterator[Problem]:
    """Yield training problems without end; none of them is held out."""
    rng = random.Random(seed)
    while True:
        problem = sample(rng)
        if not is_held_out(problem.answer):
            yield problem


def held_out(count: int, seed: int, kind: str | None = None) -> list[Problem]:
    """Return `count` distinct held-out problems, the same ones for the same arguments."""
    rng = random.Random(seed)
    found: dict[str, Problem] = {}
    tries = 0
    while len(found) < count:
        if tries > 20_000 + 1_000 * count:
            raise ValueError(f"only {len(found)} of {count} distinct held-out problems found")
        tries += 1
        problem = sample(rng) if kind is None else _sample(rng, kind)
        if is_held_out(problem.answer):
            found.setdefault(problem.prompt, problem)
    return list(found.values())


def score(problem: Problem, text: str) -> bool:
    """Tell whether a generated text answers the problem."""
    if problem.result is None:
        return text.strip() == problem.answer
    numbers = _ANSWER.findall(text)
    return bool(numbers) and int(numbers[-1]) == problem.result
