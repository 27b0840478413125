"""Names, things and the spelled-out arithmetic that the problem templates share."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

Made = tuple[str, list[str], int]
"""What a maths template makes: the prompt, the worked lines and the result."""

NAMES = (
    "Anna Ben Carla David Emma Felix Grace Henry Iris Jack Karen Leo Maria Noah Olivia Paul "
    "Quinn Rosa Sam Tina Uma Victor Wendy Xavier Yara Zoe Adam Bella Chen Diana Eli Fatima "
    "George Hana Ivan Julia Kofi Lucy Mark Nina Omar Priya Ravi Sara Tom Ursula Vera Will "
    "Yusuf Amy Boris Clara Dan Ella Frank Gina Hugo Ines Jonas Kate Liam Mina"
).split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
THINGS = (
    "apple pear orange lemon peach:peaches plum mango melon banana carrot onion potato:potatoes "
    "tomato:tomatoes cookie muffin cupcake bagel pie sandwich:sandwiches candy:candies pencil pen "
    "crayon marker eraser ruler notebook book magazine postcard stamp sticker card poster photo "
    "marble ball kite puzzle doll robot balloon ribbon button bead shell stone coin key badge "
    "brush:brushes cup plate spoon bowl candle lamp hat scarf:scarves sock glove shirt flower "
    "rose tulip seed toy magnet whistle"
).split()
BOXES = "bag box:boxes basket crate jar tray packet case".split()


class Thing(NamedTuple):
    """A countable noun: its singular and its plural."""

    one: str
    many: str


def noun(entry: str) -> Thing:
    """Read 'box:boxes' or, for a regular plural, 'bag'."""
    one, _, many = entry.partition(":")
    return Thing(one, many or one + "s")


class Draw:
    """Random choices for one problem; names and things never repeat within it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._used: set[str] = set()

    def n(self, low: int, high: int) -> int:
        """Draw a whole number from low to high, both included."""
        return self.rng.randint(low, high)

    def pick(self, *options: str) -> str:
        """Draw one of the options."""
        return options[int(self.rng.random() * len(options))]

    def _fresh(self, options: list[str]) -> str:
        while True:
            word = self.pick(*options)
            if word not in self._used:
                self._used.add(word)
                return word

    def name(self) -> str:
        """Draw a first name not yet used in this problem."""
        return self._fresh(NAMES)

    def thing(self) -> Thing:
        """Draw an object not yet used in this problem."""
        return noun(self._fresh(THINGS))

    def box(self) -> Thing:
        """Draw a container."""
        return noun(self._fresh(BOXES))

    def when(self) -> str:
        """Draw an opening such as 'On Monday, ', or none."""
        return f"On {self.pick(*DAYS)}, " if self.rng.random() < 0.3 else ""


Template = Callable[[Draw], Made]


def times(a: int, b: int) -> str:
    """Spell out a product, splitting a two-digit factor into tens and ones."""
    if b > 10 and b % 10 and a != 10:
        left, right = a * (b - b % 10), a * (b % 10)
        split = f"{a} * {b - b % 10} + {a} * {b % 10}"
    elif a > 10 and a % 10 and b != 10:
        left, right = (a - a % 10) * b, (a % 10) * b
        split = f"{a - a % 10} * {b} + {a % 10} * {b}"
    else:
        return f"{a} * {b} = {a * b}"
    return f"{a} * {b} = {split} = {left} + {right} = {a * b}"
