"""Small Python functions to write: prompts and the one right answer to each."""

from __future__ import annotations

import random
from collections.abc import Callable

Made = tuple[str, str, str, list[str]]
"""Signature ('name(args)'), what it does, its docstring and the lines of its body."""
Template = Callable[[random.Random], Made]

LISTS = ("numbers", "values", "items", "data", "nums", "scores", "prices")
TEXTS = ("text", "string", "word", "line", "sentence", "message")
SIGNS = (("greater than", ">", "above"), ("less than", "<", "below"), ("equal to", "==", "equal"))
SUMS = (("plus", "+"), ("minus", "-"), ("times", "*"))


def _compare(r: random.Random) -> tuple[str, str, str, int]:
    words, sign, short = r.choice(SIGNS)
    return words, sign, short, r.randint(2, 40)


def count_if(r: random.Random) -> Made:
    words, sign, short, k = _compare(r)
    x, fn = r.choice(LISTS), r.choice(["count", "number", "how_many"])
    does = f"returns how many elements of the list are {words} {k}"
    return (
        f"{fn}_{short}({x})",
        does,
        f"Count the elements {words} {k}.",
        [
            "count = 0",
            f"for item in {x}:",
            f"    if item {sign} {k}:",
            "        count += 1",
            "return count",
        ],
    )


def keep_if(r: random.Random) -> Made:
    words, sign, short, k = _compare(r)
    x, fn = r.choice(LISTS), r.choice(["keep", "filter", "select", "pick"])
    does = f"returns a list of the elements that are {words} {k}"
    return (
        f"{fn}_{short}({x})",
        does,
        f"Return the elements {words} {k}.",
        [
            "result = []",
            f"for item in {x}:",
            f"    if item {sign} {k}:",
            "        result.append(item)",
            "return result",
        ],
    )


def sum_if(r: random.Random) -> Made:
    words, sign, short, k = _compare(r)
    x, fn = r.choice(LISTS), r.choice(["sum", "total", "add"])
    does = f"returns the sum of the elements that are {words} {k}"
    return (
        f"{fn}_{short}({x})",
        does,
        f"Add up the elements {words} {k}.",
        [
            "total = 0",
            f"for item in {x}:",
            f"    if item {sign} {k}:",
            "        total += item",
            "return total",
        ],
    )


def first_if(r: random.Random) -> Made:
    words, sign, short, k = _compare(r)
    x, fn = r.choice(LISTS), r.choice(["first", "find", "find_first"])
    does = f"returns the first element that is {words} {k}, or None"
    return (
        f"{fn}_{short}({x})",
        does,
        f"Return the first element {words} {k}.",
        [
            f"for item in {x}:",
            f"    if item {sign} {k}:",
            "        return item",
            "return None",
        ],
    )


def any_if(r: random.Random) -> Made:
    words, sign, short, k = _compare(r)
    x, fn = r.choice(LISTS), r.choice(["has", "any", "contains"])
    does = f"returns whether some element is {words} {k}"
    return (
        f"{fn}_{short}({x})",
        does,
        f"Tell whether some element is {words} {k}.",
        [
            f"for item in {x}:",
            f"    if item {sign} {k}:",
            "        return True",
            "return False",
        ],
    )


def all_if(r: random.Random) -> Made:
    words, sign, short, k = _compare(r)
    x, fn = r.choice(LISTS), r.choice(["all", "only", "every"])
    does = f"returns whether every element is {words} {k}"
    return (
        f"{fn}_{short}({x})",
        does,
        f"Tell whether every element is {words} {k}.",
        [
            f"for item in {x}:",
            f"    if not item {sign} {k}:",
            "        return False",
            "return True",
        ],
    )


def count_multiples(r: random.Random) -> Made:
    k, x, fn = r.randint(2, 30), r.choice(LISTS), r.choice(["count", "number_of", "how_many"])
    does = f"returns how many elements of the list are divisible by {k}"
    return (
        f"{fn}_multiples({x})",
        does,
        f"Count the elements divisible by {k}.",
        [
            "count = 0",
            f"for item in {x}:",
            f"    if item % {k} == 0:",
            "        count += 1",
            "return count",
        ],
    )


def count_parity(r: random.Random) -> Made:
    word, rest = r.choice([("even", 0), ("odd", 1)])
    x, fn = r.choice(LISTS), r.choice(["count", "number_of", "how_many"])
    does = f"returns how many {word} numbers are in the list"
    return (
        f"{fn}_{word}({x})",
        does,
        f"Count the {word} numbers.",
        [
            "count = 0",
            f"for item in {x}:",
            f"    if item % 2 == {rest}:",
            "        count += 1",
            "return count",
        ],
    )


def map_each(r: random.Random) -> Made:
    (words, sign), k = r.choice(SUMS), r.randint(2, 40)
    x, fn = r.choice(LISTS), r.choice(["change", "map", "update", "shift"])
    does = f"returns a list with each element {words} {k}"
    return (
        f"{fn}_each({x})",
        does,
        f"Return each element {words} {k}.",
        [
            "result = []",
            f"for item in {x}:",
            f"    result.append(item {sign} {k})",
            "return result",
        ],
    )


def largest(r: random.Random) -> Made:
    word, sign = r.choice([("largest", ">"), ("smallest", "<")])
    x, fn = r.choice(LISTS), r.choice(["find", "get", "pick"])
    does = f"returns the {word} element of the list"
    return (
        f"{fn}_{word}({x})",
        does,
        f"Return the {word} element.",
        [
            f"best = {x}[0]",
            f"for item in {x}:",
            f"    if item {sign} best:",
            "        best = item",
            "return best",
        ],
    )


def count_char(r: random.Random) -> Made:
    c, x, fn = r.choice("abcdefghiklmnoprstuw"), r.choice(TEXTS), r.choice(["count", "number_of"])
    does = f"returns how often the letter {c} is in the text"
    return (
        f"{fn}_{c}({x})",
        does,
        f"Count the letter {c}.",
        [
            "count = 0",
            f"for char in {x}:",
            f"    if char == '{c}':",
            "        count += 1",
            "return count",
        ],
    )


def remove_char(r: random.Random) -> Made:
    c, x, fn = r.choice("abcdefghiklmnoprstuw"), r.choice(TEXTS), r.choice(["remove", "drop"])
    does = f"returns the text without the letter {c}"
    return (
        f"{fn}_{c}({x})",
        does,
        f"Return the text without the letter {c}.",
        [
            "result = ''",
            f"for char in {x}:",
            f"    if char != '{c}':",
            "        result += char",
            "return result",
        ],
    )


def repeat_text(r: random.Random) -> Made:
    k, x, fn = r.randint(2, 12), r.choice(TEXTS), r.choice(["repeat", "copy", "echo"])
    does = f"returns the text repeated {k} times"
    return (
        f"{fn}_text({x})",
        does,
        f"Repeat the text {k} times.",
        [
            "result = ''",
            f"for _ in range({k}):",
            f"    result += {x}",
            "return result",
        ],
    )


def reverse_text(r: random.Random) -> Made:
    x, fn = r.choice(TEXTS), r.choice(["reverse", "flip", "turn", "mirror"])
    does = "returns the text in reverse order"
    return (
        f"{fn}_text({x})",
        does,
        "Return the text in reverse order.",
        [
            "result = ''",
            f"for char in {x}:",
            "    result = char + result",
            "return result",
        ],
    )


def power_sum(r: random.Random) -> Made:
    (word, k), n = r.choice([("squares", 2), ("cubes", 3)]), r.choice(["n", "limit", "end", "last"])
    fn = r.choice(["sum", "total", "add"])
    does = f"returns the sum of the {word} from 1 to {n}"
    return (
        f"{fn}_{word}({n})",
        does,
        f"Add up the {word} from 1 to {n}.",
        [
            "total = 0",
            f"for i in range(1, {n} + 1):",
            f"    total += i ** {k}",
            "return total",
        ],
    )


def clamp(r: random.Random) -> Made:
    low, x = r.randint(0, 20), r.choice(["x", "n", "value", "number"])
    high, fn = low + r.randint(5, 60), r.choice(["clamp", "limit", "bound"])
    does = f"returns {x} limited to the range from {low} to {high}"
    return (
        f"{fn}({x})",
        does,
        f"Limit {x} to the range from {low} to {high}.",
        [
            f"if {x} < {low}:",
            f"    return {low}",
            f"if {x} > {high}:",
            f"    return {high}",
            f"return {x}",
        ],
    )


TEMPLATES: dict[str, Template] = {
    f.__name__: f
    for f in (
        count_if,
        keep_if,
        sum_if,
        first_if,
        any_if,
        all_if,
        count_multiples,
        count_parity,
        map_each,
        largest,
        count_char,
        remove_char,
        repeat_text,
        reverse_text,
        power_sum,
        clamp,
    )
}
_ORDER = sorted(TEMPLATES)
OPENINGS = (
    "Write a Python function {} that {}.",
    "Write the function {} in Python. It {}.",
    "In Python, define a function {} that {}.",
    "I need a Python function {} that {}.",
)


def draw(rng: random.Random) -> tuple[str, str, str]:
    """Draw a template and one of its problems: template, prompt, answer."""
    name = rng.choice(_ORDER)
    signature, does, doc, body = TEMPLATES[name](rng)
    lines = [f"def {signature}:", f'    """{doc}"""', *(f"    {line}" for line in body)]
    return name, rng.choice(OPENINGS).format(signature, does), "\n".join(lines)
