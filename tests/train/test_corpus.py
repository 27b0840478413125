"""The corpus: right arithmetic, code that runs, and held-out problems that stay out."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from nanodflash.train import corpus
from nanodflash.train.corpus import code, maths
from nanodflash.train.corpus.words import NAMES

CHAIN = re.compile(r"\d+(?: [-+*/] \d+)*(?: = \d+(?: [-+*/] \d+)*)+")
SAMPLES = [corpus.sample(rng) for rng in [random.Random(1)] for _ in range(3000)]


def value(expression: str) -> int:
    """Evaluate '2 * 30 + 4': products and exact quotients first, then left to right."""
    total, sign = 0, 1
    for term in re.split(r" ([-+]) ", expression):
        if term in "+-":
            sign = 1 if term == "+" else -1
            continue
        first, *rest = re.split(r" ([*/]) ", term)
        part = int(first)
        for op, number in zip(rest[::2], rest[1::2], strict=True):
            if op == "/":
                assert part % int(number) == 0, expression
            part = part * int(number) if op == "*" else part // int(number)
        total += sign * part
    return total


def drawn(name: str, count: int) -> list[tuple[str, list[str], int]]:
    """Make some problems of one maths template."""
    rng = random.Random(7)
    return [maths.make(name, rng) for _ in range(count)]


def function(problem: corpus.Problem) -> Callable[[Any], Any]:
    """Run a code answer and return the function it defines."""
    space: dict[str, Any] = {}
    exec(problem.answer, space)
    name = problem.answer[4 : problem.answer.index("(")]
    found: Callable[[Any], Any] = space[name]
    return found


def test_there_are_enough_templates() -> None:
    assert len(maths.TEMPLATES) >= 36
    assert len(code.TEMPLATES) >= 14


@pytest.mark.parametrize("name", sorted(maths.TEMPLATES))
def test_arithmetic_is_right_and_ends_in_the_result(name: str) -> None:
    for prompt, lines, result in drawn(name, 300):
        text = "\n".join(lines)
        chains = [match.group() for match in CHAIN.finditer(text)]
        for chain in chains:
            assert len({value(side) for side in chain.split(" = ")}) == 1, (prompt, chain)
        assert CHAIN.sub("", text).count("=") == 0, text
        assert chains[-1].endswith(f"= {result}"), text
        assert not re.search(r"\b1 [a-z]+s\b", prompt + text), prompt + text
        assert not re.search(r"(?<![-\d] )-\d|\b[aA] [aeiou]", prompt + text), prompt + text
        assert all(int(number) <= 400 for number in re.findall(r"\d+", prompt + text)), text


@pytest.mark.parametrize("name", sorted(maths.TEMPLATES))
def test_names_in_the_answer_come_from_the_prompt(name: str) -> None:
    for prompt, lines, _ in drawn(name, 100):
        copied = set(NAMES) & set(re.findall(r"\b[A-Z][a-z]+\b", "\n".join(lines)))
        assert copied <= set(re.findall(r"\b[A-Z][a-z]+\b", prompt)), (prompt, lines)


def test_lengths_stay_within_bounds() -> None:
    assert max(len(p.prompt) for p in SAMPLES) <= 330
    assert max(len(p.answer) for p in SAMPLES) <= 520
    for problem in SAMPLES:
        if problem.kind == "maths":
            assert problem.answer.endswith(f"\nThe answer is {problem.result}.")
            assert 4 <= len(problem.answer.splitlines()) <= 6


def test_the_same_prompt_has_the_same_answer() -> None:
    answers: dict[str, str] = {}
    for problem in SAMPLES:
        assert answers.setdefault(problem.prompt, problem.answer) == problem.answer


def test_maths_prompts_are_mostly_distinct_and_the_mix_is_right() -> None:
    kinds = Counter(p.kind for p in SAMPLES)
    assert 0.8 < kinds["maths"] / len(SAMPLES) < 0.9
    prompts = {p.prompt for p in SAMPLES if p.kind == "maths"}
    assert len(prompts) > 0.95 * kinds["maths"]


def test_all_code_compiles_and_defines_the_function_asked_for() -> None:
    for problem in SAMPLES:
        if problem.kind == "code":
            assert f"{problem.answer[4 : problem.answer.index(':')]} " in problem.prompt
            assert callable(function(problem))
            assert 4 <= len(problem.answer.splitlines()) <= 10


RUNS: dict[str, Callable[[str, Any], Any]] = {
    "count_parity": lambda p, v: sum(x % 2 == ("odd" in p) for x in v),
    "count_multiples": lambda p, v: sum(x % number(p) == 0 for x in v),
    "largest": lambda p, v: max(v) if "largest element" in p else min(v),
    "count_if": lambda p, v: sum(holds(p, x) for x in v),
    "keep_if": lambda p, v: [x for x in v if holds(p, x)],
    "sum_if": lambda p, v: sum(x for x in v if holds(p, x)),
    "first_if": lambda p, v: next((x for x in v if holds(p, x)), None),
    "any_if": lambda p, v: any(holds(p, x) for x in v),
    "all_if": lambda p, v: all(holds(p, x) for x in v),
}


def number(prompt: str) -> int:
    """Return the one number in a code prompt."""
    return int(re.findall(r"\d+", prompt)[0])


def holds(prompt: str, x: int) -> bool:
    """Apply the comparison that a code prompt names."""
    k = number(prompt)
    return x > k if "greater" in prompt else x < k if "less" in prompt else x == k


@pytest.mark.parametrize("name", sorted(RUNS))
def test_code_runs_correctly(name: str) -> None:
    rng = random.Random(3)
    problems = [p for p in SAMPLES if p.template == name]
    assert problems
    for problem in problems:
        values = [rng.randint(0, 45) for _ in range(30)]
        assert function(problem)(values) == RUNS[name](problem.prompt, values), problem


def test_text_functions_run_correctly() -> None:
    for problem in (p for p in SAMPLES if p.template in {"reverse_text", "repeat_text"}):
        want = "abc"[::-1] if problem.template == "reverse_text" else "abc" * number(problem.prompt)
        assert function(problem)("abc") == want


def test_streams_are_deterministic_and_never_held_out() -> None:
    first = list(itertools.islice(corpus.stream(5), 3000))
    assert first == list(itertools.islice(corpus.stream(5), 3000))
    assert first != list(itertools.islice(corpus.stream(6), 3000))
    assert not any(corpus.is_held_out(p.answer) for p in first)


@pytest.mark.parametrize("kind", [None, "maths", "code"])
def test_held_out_problems_are_distinct_deterministic_and_disjoint(kind: str | None) -> None:
    found = corpus.held_out(25, seed=2, kind=kind)
    assert found == corpus.held_out(25, seed=2, kind=kind)
    assert len({p.prompt for p in found}) == 25
    assert all(corpus.is_held_out(p.answer) for p in found)
    assert kind is None or {p.kind for p in found} == {kind}


def test_the_held_out_share_is_about_one_in_fifty() -> None:
    share = sum(corpus.is_held_out(p.answer) for p in SAMPLES) / len(SAMPLES)
    assert 0.01 < share < 0.03
    assert corpus.is_held_out("prompt 0") == corpus.is_held_out("prompt 0")


def test_held_out_refuses_what_it_cannot_find() -> None:
    with pytest.raises(ValueError, match="kind must be"):
        corpus.held_out(1, seed=0, kind="poetry")


@pytest.mark.parametrize("problem", SAMPLES[:40], ids=lambda p: p.template)
def test_score_accepts_the_answer_and_rejects_a_changed_one(problem: corpus.Problem) -> None:
    assert corpus.score(problem, problem.answer)
    assert corpus.score(problem, problem.answer + "\n")
    assert not corpus.score(problem, "")
    if problem.result is not None:
        assert not corpus.score(problem, f"{problem.answer}\nThe answer is {problem.result + 1}.")
        assert corpus.score(problem, f"The answer is 0.\n{problem.answer}")
    else:
        assert not corpus.score(problem, problem.answer.replace("return", "yield"))
