"""Grade-school word problems with worked steps: the set of templates and how one is drawn."""

from __future__ import annotations

import random

from nanodflash.train.corpus import change, counting, groups, measure, money
from nanodflash.train.corpus.words import Draw, Made, Template


def _templates() -> dict[str, Template]:
    found: dict[str, Template] = {}
    for module in (money, counting, groups, measure, change):
        for name, item in vars(module).items():
            if callable(item) and getattr(item, "__module__", "") == module.__name__:
                found[name] = item
    return found


TEMPLATES: dict[str, Template] = _templates()
_ORDER = sorted(TEMPLATES)


def make(name: str, rng: random.Random) -> Made:
    """Make one problem of a template: its prompt, worked lines and result."""
    return TEMPLATES[name](Draw(rng))


def draw(rng: random.Random) -> tuple[str, str, str, int]:
    """Draw a template and one of its problems: template, prompt, answer, result."""
    name = rng.choice(_ORDER)
    prompt, lines, result = make(name, rng)
    return name, prompt, "\n".join([*lines, f"The answer is {result}."]), result
