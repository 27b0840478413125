"""More counting problems: games, recipes, farms, buses and chains of people."""

from __future__ import annotations

from nanodflash.train.corpus.words import Draw, Made, times


def game_points(d: Draw) -> Made:
    a, k, p = d.name(), d.n(2, 9), d.n(3, 20)
    lost = d.n(2, min(50, k * p - 2))
    unit = d.pick("level", "round", "stage", "match:matches", "quest")
    one, _, many = unit.partition(":")
    many = many or one + "s"
    story = d.pick(
        f"{a} wins {k} {many} of a game and gets {p} points for each. Then {a} loses {lost} "
        "points.",
        f"In a game, each {one} brings {p} points. {a} wins {k} {many} but loses {lost} points.",
        f"{d.when()}{a} plays a game, wins {k} {many} at {p} points each and loses {lost} points.",
    )
    ask = d.pick(f"How many points does {a} have?", f"What is the score of {a}?")
    return (
        f"{story} {ask}",
        [
            f"We want to know how many points {a} has after {k} {many}.",
            f"For {k} {many} at {p} points each, {a} gets {times(k, p)} points.",
            f"Then {a} loses {lost} points.",
            f"The score of {a} is {k * p} - {lost} = {k * p - lost} points.",
        ],
        k * p - lost,
    )


def recipe(d: Draw) -> Made:
    a, s, f, m = d.name(), d.n(2, 8), d.n(2, 9), d.n(2, 12)
    what = d.pick("eggs", "cups of flour", "spoons of sugar", "cups of milk", "carrots", "onions")
    dish = d.pick("soup", "cake", "stew", "bread", "curry", "salad", "pudding", "pie")
    story = d.pick(
        f"A {dish} recipe for {s} people needs {m} {what}.",
        f"To make {dish} for {s} people, {a} uses {m} {what}.",
        f"{a}'s {dish} for {s} people takes {m} {what}.",
    )
    ask = d.pick(
        f"{a} cooks {dish} for {s * f} people. How many {what} does {a} need?",
        f"How many {what} does {a} need to make {dish} for {s * f} people?",
    )
    return (
        f"{story} {ask}",
        [
            f"We want to know how many {what} {a} needs for {s * f} people.",
            f"The {dish} recipe is for {s} people and {a} cooks for {s * f} people.",
            f"That is {s * f} / {s} = {f} times as many people.",
            f"So {a} needs {times(f, m)} {what}.",
        ],
        f * m,
    )


def baking(d: Draw) -> Made:
    a, e, c = d.name(), d.n(2, 9), d.n(2, 15)
    have = d.n(2, e * c - 2)
    what = d.pick("eggs", "apples", "lemons", "nuts", "cherries", "bananas", "plums")
    dish = d.pick("cakes", "pies", "tarts", "loaves", "puddings", "waffles")
    story = d.pick(
        f"{a} wants to bake {c} {dish}. Each one needs {e} {what}. {a} has {have} {what}.",
        f"{a} has {have} {what} and plans {c} {dish} with {e} {what} each.",
        f"{d.when()}{a} is baking {c} {dish} with {e} {what} each and has {have} {what}.",
    )
    ask = d.pick(f"How many more {what} does {a} need?", f"How many {what} must {a} still buy?")
    return (
        f"{story} {ask}",
        [
            f"We want to know how many more {what} {a} needs for {c} {dish}.",
            f"{c} {dish} with {e} {what} each need {times(c, e)} {what}.",
            f"{a} already has {have} {what}.",
            f"So {a} still needs {c * e} - {have} = {c * e - have} {what}.",
        ],
        c * e - have,
    )


def library(d: Draw) -> Made:
    a, t, x = d.name(), d.thing(), d.n(30, 150)
    y, z = d.n(2, 28), d.n(2, 40)
    story = d.pick(
        f"{a} has {x} {t.many}, lends out {y} and gets {z} new ones.",
        f"A shelf holds {x} {t.many}. {d.when()}{a} takes away {y} {t.many} and adds {z} new ones.",
        f"There are {x} {t.many} in the shop of {a}. Then {y} are sold and {z} new ones arrive.",
    )
    ask = d.pick(f"How many {t.many} are there now?", f"How many {t.many} is that in the end?")
    return (
        f"{story} {ask}",
        [
            f"We want to know how many {t.many} there are in the end.",
            f"At the start there are {x} {t.many}.",
            f"After {y} {t.many} are gone, {x} - {y} = {x - y} {t.many} are left.",
            f"With {z} new ones, there are {x - y} + {z} = {x - y + z} {t.many}.",
        ],
        x - y + z,
    )


def bus(d: Draw) -> Made:
    x = d.n(15, 70)
    off, on = d.n(2, x - 10), d.n(2, 25)
    off2 = d.n(2, x - off + on - 3)
    what = d.pick("bus", "train", "tram", "ferry", "ship", "plane")
    stop, last = d.pick("first", "next", "second"), d.pick("park", "school", "station", "market")
    story = d.pick(
        f"A {what} has {x} passengers. At the {stop} stop {off} get off and {on} get on. At the "
        f"{last} {off2} get off.",
        f"{x} people are on a {what}. {off} people leave and {on} people enter at the {stop} stop. "
        f"Then {off2} people leave at the {last}.",
    )
    ask = d.pick(f"How many people are on the {what} now?", "How many passengers are left?")
    y, z = x - off, x - off + on
    return (
        f"{story} {ask}",
        [
            f"We want to know how many people are on the {what} after the {last}.",
            f"After {off} people get off at the {stop} stop, {x} - {off} = {y} people are left.",
            f"After {on} people get on, there are {y} + {on} = {z} people.",
            f"After {off2} people get off at the {last}, {z} - {off2} = {z - off2} "
            f"people are on the {what}.",
        ],
        z - off2,
    )


def legs(d: Draw) -> Made:
    a, x, y = d.name(), d.n(2, 30), d.n(2, 20)
    birds = d.pick("chickens", "ducks", "hens", "turkeys", "parrots", "swans")
    beasts = d.pick("cows", "goats", "pigs", "horses", "rabbits", "dogs", "cats", "donkeys")
    story = d.pick(
        f"{a} has {x} {birds} and {y} {beasts} on a farm.",
        f"On the farm of {a} there are {x} {birds} and {y} {beasts}.",
        f"{d.when()}{a} counts {x} {birds} and {y} {beasts} in a field.",
    )
    ask = d.pick("How many legs do the animals have?", "How many legs are there in all?")
    return (
        f"{story} {ask}",
        [
            f"We want to know how many legs {x} {birds} and {y} {beasts} have.",
            f"{x} {birds} with 2 legs each have {times(x, 2)} legs.",
            f"{y} {beasts} with 4 legs each have {times(y, 4)} legs.",
            f"In all, there are {2 * x} + {4 * y} = {2 * x + 4 * y} legs.",
        ],
        2 * x + 4 * y,
    )


def garden(d: Draw) -> Made:
    a, r, m, s, k = d.name(), d.n(2, 9), d.n(3, 15), d.n(2, 9), d.n(3, 9)
    p, q = d.rng.sample(
        ["roses", "tulips", "beans", "peas", "leeks", "herbs", "lilies", "beets", "daisies"], 2
    )
    story = d.pick(
        f"{a} plants {r} rows of {m} {p} and {s} rows of {k} {q}.",
        f"In {a}'s garden there are {r} rows with {m} {p} each and {s} rows with {k} {q} each.",
        f"{d.when()}{a} sets {r} rows with {m} {p} in each and {s} rows with {k} {q} in each.",
    )
    ask = d.pick(f"How many plants does {a} have?", "How many plants are in the garden?")
    return (
        f"{story} {ask}",
        [
            f"We want to know how many {p} and {q} {a} has in total.",
            f"{r} rows of {m} {p} are {times(r, m)} {p}.",
            f"{s} rows of {k} {q} are {times(s, k)} {q}.",
            f"In total {a} has {r * m} + {s * k} = {r * m + s * k} plants.",
        ],
        r * m + s * k,
    )


def trays(d: Draw) -> Made:
    a, rows, each, b = d.name(), d.n(3, 8), d.n(5, 12), d.n(2, 5)
    total = rows * each
    sold = total - b * d.n(2, min(18, (total - 2) // b))
    left = total - sold
    what = d.pick("muffins", "rolls", "cookies", "buns", "bagels", "pies", "tarts", "scones")
    story = d.pick(
        f"{a} bakes {rows} trays of {each} {what}, sells {sold} and packs the rest in bags of {b}.",
        f"There are {each} {what} on each of {a}'s {rows} trays. {a} sells {sold} {what} and puts "
        f"the rest in bags of {b}.",
    )
    ask = d.pick("How many bags are there?", f"How many bags does {a} fill?")
    return (
        f"{story} {ask}",
        [
            f"We want to know how many bags of {b} {what} {a} can fill.",
            f"{rows} trays of {each} {what} hold {times(rows, each)} {what}.",
            f"After {a} sells {sold}, {total} - {sold} = {left} {what} are left.",
            f"In bags of {b}, that makes {left} / {b} = {left // b} bags.",
        ],
        left // b,
    )


def chain(d: Draw) -> Made:
    a, b, c, t, x = d.name(), d.name(), d.name(), d.thing(), d.n(10, 50)
    less, f = d.n(2, 8), d.n(2, 3)
    word = "twice" if f == 2 else "three times"
    y = x - less
    story = d.pick(
        f"{a} has {x} {t.many}. {b} has {less} fewer than {a}, and {c} has {word} as many as {b}.",
        f"{b} has {less} {t.many} fewer than {a}. {c} has {word} as many as {b}. {a} has {x} "
        f"{t.many}.",
        f"{d.when()}{a} finds {x} {t.many}, {b} finds {less} fewer than {a}, and {c} finds {word} "
        f"as many as {b}.",
    )
    ask = d.pick(f"How many {t.many} does {c} have?", f"How many {t.many} is that for {c}?")
    return (
        f"{story} {ask}",
        [
            f"We want to know how many {t.many} {c} has, so we start with {a}.",
            f"{a} has {x} {t.many}.",
            f"{b} has {less} fewer, which is {x} - {less} = {y} {t.many}.",
            f"{c} has {word} as many as {b}, which is {times(f, y)} {t.many}.",
        ],
        f * y,
    )
