"""Word problems about groups, sharing, comparing and parts of a whole."""

from __future__ import annotations

from nanodflash.train.corpus.words import Draw, Made, times

MULTIPLES = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}


def give_away(d: Draw) -> Made:
    a, b, t, c, k, m = d.name(), d.name(), d.thing(), d.box(), d.n(2, 9), d.n(3, 20)
    g = d.n(2, min(60, k * m - 2))
    story = d.pick(
        f"{a} has {k} {c.many} with {m} {t.many} each. {a} gives {g} {t.many} to {b}.",
        f"{d.when()}{a} fills {k} {c.many} with {m} {t.many} each and then gives {b} {g} {t.many}.",
        f"There are {m} {t.many} in each of {a}'s {k} {c.many}. {b} gets {g} {t.many} from {a}.",
    )
    ask = d.pick(f"How many {t.many} does {a} have left?", f"How many {t.many} does {a} keep?")
    return (
        f"{story} {ask}",
        [
            f"We want to know how many {t.many} {a} has after giving some to {b}.",
            f"{k} {c.many} with {m} {t.many} each hold {times(k, m)} {t.many}.",
            f"{a} gives {g} {t.many} to {b}.",
            f"{a} has {k * m} - {g} = {k * m - g} {t.many} left.",
        ],
        k * m - g,
    )


def share(d: Draw) -> Made:
    a, t, k, q, r = d.name(), d.thing(), d.n(2, 9), d.n(2, 18), d.n(2, 25)
    total = k * q + r
    who = d.pick("friends", "cousins", "neighbours", "classmates", "children")
    story = d.pick(
        f"{a} has {total} {t.many}, keeps {r} and shares the rest equally among {k} {who}.",
        f"{d.when()}{a} picks {r} out of {total} {t.many} to keep. The rest is shared equally by "
        f"{k} {who}.",
        f"Out of {total} {t.many}, {a} keeps {r}. {k} {who} share the others equally.",
    )
    ask = d.pick(f"How many {t.many} does each of the {who} get?", "How many does each one get?")
    return (
        f"{story} {ask}",
        [
            f"We want to know how many {t.many} each of the {k} {who} gets from {a}.",
            f"{a} keeps {r} of the {total} {t.many}.",
            f"That leaves {total} - {r} = {k * q} {t.many} to share.",
            f"Each of the {k} {who} gets {k * q} / {k} = {q} {t.many}.",
        ],
        q,
    )


def leftovers(d: Draw) -> Made:
    a, t, c, k, q = d.name(), d.thing(), d.box(), d.n(3, 10), d.n(2, 12)
    r = d.n(2, k - 1)
    total = k * q + r
    story = d.pick(
        f"{a} packs {total} {t.many} into {c.many} of {k}.",
        f"{a} has {total} {t.many} and puts {k} of them in each {c.one}.",
        f"Each {c.one} holds {k} {t.many}. {d.when()}{a} packs {total} {t.many}.",
    )
    ask = d.pick(
        f"How many {t.many} are left over when no more {c.many} can be filled?",
        f"{a} fills as many {c.many} as possible. How many {t.many} are left over?",
    )
    return (
        f"{story} {ask}",
        [
            f"We want to know how many {t.many} are left when {a} fills {c.many} of {k}.",
            f"{q} {c.many} hold {times(q, k)} {t.many}.",
            f"{q + 1} {c.many} would hold {times(q + 1, k)} {t.many}, which is more than {total}.",
            f"So {a} fills {q} {c.many}, and {total} - {q * k} = {r} {t.many} are left over.",
        ],
        r,
    )


def boxes_needed(d: Draw) -> Made:
    a, t, c, k, q = d.name(), d.thing(), d.box(), d.n(3, 10), d.n(2, 12)
    total = k * q + d.n(1, k - 1)
    story = d.pick(
        f"One {c.one} holds {k} {t.many}. {a} must pack {total} {t.many}.",
        f"{d.when()}{a} has to store {total} {t.many} in {c.many} that hold {k} {t.many} each.",
        f"{a} has {total} {t.many} and wants to put all of them into {c.many} of {k}.",
    )
    ask = d.pick(f"How many {c.many} does {a} need?", f"How many {c.many} are needed for all?")
    return (
        f"{story} {ask}",
        [
            f"We want to know how many {c.many} of {k} {a} needs for {total} {t.many}.",
            f"{q} {c.many} hold {times(q, k)} {t.many}, which is less than {total}.",
            f"{q + 1} {c.many} hold {times(q + 1, k)} {t.many}, which is enough for {total}.",
            f"So {a} needs {q} + 1 = {q + 1} {c.many}.",
        ],
        q + 1,
    )


def multiple_total(d: Draw) -> Made:
    a, b, t, m, f = d.name(), d.name(), d.thing(), d.n(3, 30), d.n(2, 5)
    word = MULTIPLES[f]
    story = d.pick(
        f"{a} has {m} {t.many} and {b} has {word} as many.",
        f"{b} has {word} as many {t.many} as {a}. {a} has {m} {t.many}.",
        f"{d.when()}{a} collects {m} {t.many}, and {b} collects {word} as many.",
    )
    ask = d.pick(f"How many {t.many} do they have together?", f"How many {t.many} is that in all?")
    return (
        f"{story} {ask}",
        [
            f"We want to know how many {t.many} {a} and {b} have together.",
            f"{a} has {m} {t.many}.",
            f"{b} has {word} as many, which is {times(f, m)} {t.many}.",
            f"Together {a} and {b} have {m} + {f * m} = {m + f * m} {t.many}.",
        ],
        m + f * m,
    )


def how_many_more(d: Draw) -> Made:
    a, b, t, c, k, m = d.name(), d.name(), d.thing(), d.box(), d.n(2, 9), d.n(4, 20)
    x = d.n(2, k * m - 2)
    story = d.pick(
        f"{a} has {k} {c.many} of {m} {t.many} and {b} has {x} {t.many}.",
        f"{b} owns {x} {t.many}. {a} owns {k} {c.many} with {m} {t.many} in each.",
        f"{d.when()}{a} brings {k} {c.many} with {m} {t.many} each, and {b} brings {x} {t.many}.",
    )
    ask = d.pick(
        f"How many more {t.many} does {a} have than {b}?",
        f"How many fewer {t.many} does {b} have than {a}?",
    )
    return (
        f"{story} {ask}",
        [
            f"We compare the number of {t.many} that {a} and {b} have.",
            f"{k} {c.many} of {m} {t.many} hold {times(k, m)} {t.many}, so {a} has {k * m}.",
            f"{b} has {x} {t.many}.",
            f"The difference between {a} and {b} is {k * m} - {x} = {k * m - x} {t.many}.",
        ],
        k * m - x,
    )


def find_more(d: Draw) -> Made:
    a, b, t, x, y, z = d.name(), d.name(), d.thing(), d.n(5, 70), d.n(2, 50), d.n(5, 70)
    story = d.pick(
        f"{a} has {x} {t.many} and gets {y} more. {b} has {z} {t.many}.",
        f"{d.when()}{a} starts with {x} {t.many} and finds {y} more, while {b} has {z} {t.many}.",
        f"{b} has {z} {t.many}. {a} had {x} {t.many} and then bought {y} more.",
    )
    ask = d.pick(f"How many {t.many} do {a} and {b} have together?", "How many do both have now?")
    return (
        f"{story} {ask}",
        [
            f"We want to know how many {t.many} {a} and {b} have together.",
            f"{a} now has {x} + {y} = {x + y} {t.many}.",
            f"{b} has {z} {t.many}.",
            f"Together {a} and {b} have {x + y} + {z} = {x + y + z} {t.many}.",
        ],
        x + y + z,
    )


def fraction_left(d: Draw) -> Made:
    a, b, t, q = d.name(), d.name(), d.thing(), d.n(4, 20)
    k, word = d.rng.choice([(2, "half"), (3, "a third"), (4, "a quarter"), (5, "a fifth")])
    total = k * q
    m = d.n(2, max(2, total - q - 2))
    story = d.pick(
        f"{a} has {total} {t.many}. {a} gives {word} of them to {b} and then loses {m}.",
        f"{d.when()}{a} gives {b} {word} of {total} {t.many} and later loses {m} {t.many}.",
        f"Of {total} {t.many}, {a} hands {word} to {b}. After that, {a} loses {m} of the rest.",
    )
    ask = d.pick(f"How many {t.many} does {a} have now?", f"How many {t.many} are left for {a}?")
    return (
        f"{story} {ask}",
        [
            f"We want to know how many {t.many} {a} has after giving some to {b}.",
            f"{word.capitalize()} of {total} {t.many} is {total} / {k} = {q} {t.many} for {b}.",
            f"After giving them away, {a} has {total} - {q} = {total - q} {t.many}.",
            f"After losing {m}, {a} has {total - q} - {m} = {total - q - m} {t.many}.",
        ],
        total - q - m,
    )


def class_part(d: Draw) -> Made:
    q = d.n(2, 20)
    k, word = d.rng.choice([(2, "Half"), (3, "A third"), (4, "A quarter"), (5, "A fifth")])
    total = k * q
    who = d.pick("students", "teachers", "players", "guests", "workers", "singers")
    verb = d.pick("like tea", "play chess", "speak French", "wear glasses", "own a bike", "swim")
    where = f"{d.name()}'s {d.pick('group', 'club', 'village', 'house')}"
    story = d.pick(
        f"There are {total} {who} in {where}. {word} of the {who} {verb}.",
        f"{word} of the {total} {who} in {where} {verb}.",
    )
    ask = d.pick(
        f"How many {who} do not {verb}?", f"How many of the {who} in {where} do not {verb}?"
    )
    return (
        f"{story} {ask}",
        [
            f"We want to know how many {who} in {where} do not {verb}.",
            f"There are {total} {who} in {where}.",
            f"{word} of them {verb}, which is {total} / {k} = {q} {who}.",
            f"So {total} - {q} = {total - q} {who} do not {verb}.",
        ],
        total - q,
    )


def seats(d: Draw) -> Made:
    r, s = d.n(3, 9), d.n(6, 24)
    x = d.n(2, r * s - 2)
    where = d.pick("theatre", "cinema", "hall", "church", "tent", "stadium", "bus", "train")
    story = d.pick(
        f"A {where} has {r} rows with {s} seats each. {x} seats are taken.",
        f"In a {where} there are {r} rows of {s} seats, and {x} people sit down.",
        f"{d.when()}{x} people sit in a {where} that has {s} seats in each of its {r} rows.",
    )
    ask = d.pick("How many seats are empty?", f"How many free seats does the {where} have?")
    return (
        f"{story} {ask}",
        [
            f"We want to know how many seats in the {where} are empty.",
            f"{r} rows with {s} seats each make {times(r, s)} seats.",
            f"In the {where}, {x} seats are taken.",
            f"So {r * s} - {x} = {r * s - x} seats are empty.",
        ],
        r * s - x,
    )


def teams(d: Draw) -> Made:
    k, q = d.n(2, 10), d.n(3, 15)
    x = d.n(2, k * q - 2)
    y = k * q - x
    sport = d.pick("football", "tennis", "hockey", "chess", "rowing", "relay", "dance", "quiz")
    story = d.pick(
        f"{x} boys and {y} girls form {sport} teams of {k}.",
        f"For a {sport} day, {x} boys and {y} girls are put into teams of {k}.",
        f"{d.name()} puts {x} boys and {y} girls into {sport} teams of {k} children.",
    )
    ask = d.pick("How many teams are there?", f"How many {sport} teams can they form?")
    return (
        f"{story} {ask}",
        [
            f"We want to know how many {sport} teams of {k} the boys and girls can form.",
            f"There are {x} + {y} = {x + y} children in total.",
            f"Each {sport} team has {k} children.",
            f"So there are {x + y} / {k} = {q} {sport} teams.",
        ],
        q,
    )


def average3(d: Draw) -> Made:
    a, b, c, t, q = d.name(), d.name(), d.name(), d.thing(), d.n(4, 20)
    x, y = d.n(2, q + 4), d.n(2, q + 4)
    z = 3 * q - x - y
    if z < 2:
        x, y, z = q, q - 2, q + 2
    story = d.pick(
        f"{a} has {x} {t.many}, {b} has {y} and {c} has {z}.",
        f"{d.when()}{a} finds {x} {t.many}, {b} finds {y} and {c} finds {z}.",
        f"{a}, {b} and {c} count their {t.many}: {x}, {y} and {z}.",
    )
    ask = d.pick(f"What is the average number of {t.many}?", "How many is that on average?")
    return (
        f"{story} {ask}",
        [
            f"We want the average number of {t.many} of {a}, {b} and {c}.",
            f"{a} and {b} have {x} + {y} = {x + y} {t.many}.",
            f"With the {t.many} of {c}, that is {x + y} + {z} = {3 * q} {t.many}.",
            f"The average of the 3 numbers is {3 * q} / 3 = {q}.",
        ],
        q,
    )


def average4(d: Draw) -> Made:
    a, q, i, j = d.name(), d.n(7, 20), d.n(1, 5), d.n(1, 5)
    marks = [q - i, q + j, q + i, q - j]
    d.rng.shuffle(marks)
    w, x, y, z = marks
    what = d.pick("points", "goals", "pages", "laps", "kilometres", "coins", "fish", "words")
    story = d.pick(
        f"In 4 rounds, {a} gets {w}, {x}, {y} and {z} {what}.",
        f"{a} writes down {w}, {x}, {y} and {z} {what} for 4 rounds.",
        f"The results of {a} in 4 rounds are {w}, {x}, {y} and {z} {what}.",
    )
    ask = d.pick("What is the average?", f"How many {what} does {a} get on average?")
    return (
        f"{story} {ask}",
        [
            f"We want the average number of {what} that {a} gets in 4 rounds.",
            f"The first two rounds give {w} + {x} = {w + x} {what}.",
            f"The last two rounds give {y} + {z} = {y + z} {what}.",
            f"All 4 rounds give {w + x} + {y + z} = {4 * q} {what}.",
            f"The average for {a} is {4 * q} / 4 = {q} {what}.",
        ],
        q,
    )
