"""Word problems about time, distance, size, age, temperature and sequences."""

from __future__ import annotations

from nanodflash.train.corpus.words import Draw, Made, times

GROUNDS = ("garden", "field", "park", "yard", "room", "pool", "playground", "carpet", "wall")


def perimeter(d: Draw) -> Made:
    a, x, y, what = d.name(), d.n(5, 60), d.n(3, 40), d.pick(*GROUNDS)
    story = d.pick(
        f"The {what} of {a} is a rectangle {x} metres long and {y} metres wide.",
        f"{a} has a rectangular {what} with a length of {x} metres and a width of {y} metres.",
        f"{a} measures a {what} with four square corners: it is {x} metres by {y} metres.",
    )
    ask = d.pick(
        f"What is the perimeter of the {what} in metres?",
        f"How many metres is it once around the {what}?",
    )
    return (
        f"{story} {ask}",
        [
            f"We want the perimeter of the {what} of {a}.",
            f"The {what} is {x} metres long and {y} metres wide.",
            f"Length and width together are {x} + {y} = {x + y} metres.",
            f"The perimeter of the {what} is {times(2, x + y)} metres.",
        ],
        2 * (x + y),
    )


def area(d: Draw) -> Made:
    a, x, y, what = d.name(), d.n(5, 25), d.n(3, 9), d.pick(*GROUNDS)
    z = d.n(2, min(30, x * y - 3))
    part = d.pick("pond", "path", "bench", "tree", "statue", "shed", "mat", "table")
    story = d.pick(
        f"{a}'s {what} is {x} metres long and {y} metres wide. A {part} covers {z} square metres.",
        f"A {part} covers {z} square metres of {a}'s {what}, which is {x} metres by {y} metres.",
    )
    ask = d.pick(
        f"How many square metres of the {what} are free?",
        f"How many square metres are not covered by the {part}?",
    )
    return (
        f"{story} {ask}",
        [
            f"We want the free area of the {what} without the {part}.",
            f"The area of the {what} is {times(x, y)} square metres.",
            f"The {part} covers {z} square metres.",
            f"So {x * y} - {z} = {x * y - z} square metres of {a}'s {what} are free.",
        ],
        x * y - z,
    )


def square(d: Draw) -> Made:
    a, s, what = d.name(), d.n(2, 14), d.pick(*GROUNDS)
    story = d.pick(
        f"The perimeter of {a}'s square {what} is {4 * s} metres.",
        f"{a} has a square {what}. It is {4 * s} metres around the {what}.",
        f"{d.when()}{a} walks once around a square {what}, which is {4 * s} metres.",
    )
    ask = d.pick(
        f"What is the area of the {what} in square metres?",
        f"How many square metres does the {what} of {a} have?",
    )
    return (
        f"{story} {ask}",
        [
            f"We want the area of the {what}, so we find one side first.",
            f"The square {what} of {a} has 4 equal sides.",
            f"Each side is {4 * s} / 4 = {s} metres long.",
            f"The area of the {what} is {times(s, s)} square metres.",
        ],
        s * s,
    )


def minutes(d: Draw) -> Made:
    a, h, m, pause = d.name(), d.n(2, 5), d.n(5, 55), d.n(5, 40)
    doing = d.pick("hikes", "studies", "paints", "trains", "reads", "cleans", "swims", "cooks")
    story = d.pick(
        f"{d.when()}{a} {doing} for {h} hours and {m} minutes, with a break of {pause} minutes.",
        f"{a} {doing} for {h} hours and {m} minutes, but {pause} minutes of that time is a break.",
    )
    ask = d.pick(
        "How many minutes are left without the break?",
        f"For how many minutes is {a} not on a break?",
    )
    all_of_it = 60 * h + m
    return (
        f"{story} {ask}",
        [
            f"We want to know for how many minutes {a} {doing} without the break.",
            f"{h} hours are {h} * 60 = {60 * h} minutes.",
            f"With {m} more minutes, that is {60 * h} + {m} = {all_of_it} minutes.",
            f"Without the break of {pause} minutes, {a} {doing} for {all_of_it} - {pause} = "
            f"{all_of_it - pause} minutes.",
        ],
        all_of_it - pause,
    )


def pages_left(d: Draw) -> Made:
    a, p, k = d.name(), d.n(4, 25), d.n(2, 9)
    total = p * k + d.n(2, 60)
    what = d.pick("novel", "comic", "story", "diary", "guide", "report", "play")
    story = d.pick(
        f"{a} reads {p} pages a day of a {what} with {total} pages.",
        f"A {what} has {total} pages. {a} reads {p} pages every day.",
        f"Every day {a} reads {p} of the {total} pages of a {what}.",
    )
    ask = d.pick(
        f"How many pages are left after {k} days?",
        f"How many pages does {a} still have to read after {k} days?",
    )
    return (
        f"{story} {ask}",
        [
            f"We want to know how many pages {a} has left after {k} days.",
            f"In {k} days, {a} reads {times(k, p)} pages.",
            f"The {what} has {total} pages.",
            f"So {total} - {k * p} = {total - k * p} pages of the {what} are left for {a}.",
        ],
        total - k * p,
    )


def pages_days(d: Draw) -> Made:
    a, p, k, done = d.name(), d.n(3, 10), d.n(2, 16), d.n(5, 50)
    total = p * k + done
    what = d.pick("novel", "comic", "story", "diary", "guide", "report", "play")
    story = d.pick(
        f"{a} has read {done} of the {total} pages of a {what} and now reads {p} pages a day.",
        f"A {what} has {total} pages. {a} has read {done} of them and reads {p} more each day.",
    )
    ask = d.pick(
        f"How many days does {a} need for the rest?",
        f"In how many days does {a} finish the {what}?",
    )
    return (
        f"{story} {ask}",
        [
            f"We want to know how many days {a} needs for the rest of the {what}.",
            f"{a} has read {done} of the {total} pages.",
            f"There are {total} - {done} = {p * k} pages of the {what} left.",
            f"At {p} pages a day, {a} needs {p * k} / {p} = {k} days.",
        ],
        k,
    )


def distance(d: Draw) -> Made:
    a, v, t, w, u = d.name(), d.n(4, 25), d.n(2, 6), d.n(3, 20), d.n(2, 6)
    way, other = d.rng.choice([("rides", "walks"), ("sails", "rows"), ("drives", "cycles")])
    story = d.pick(
        f"{d.when()}{a} {way} for {t} hours at {v} km an hour and {other} for {u} hours at {w} km "
        "an hour.",
        f"{a} {way} at {v} km an hour for {t} hours. Then {a} {other} at {w} km an hour for {u} "
        "hours.",
    )
    ask = d.pick(f"How many km does {a} travel?", "How many km is that in total?")
    return (
        f"{story} {ask}",
        [
            f"We want to know how many km {a} travels in {t} and {u} hours.",
            f"In {t} hours at {v} km an hour, {a} {way} {times(t, v)} km.",
            f"In {u} hours at {w} km an hour, {a} {other} {times(u, w)} km.",
            f"In total {a} travels {t * v} + {u * w} = {t * v + u * w} km.",
        ],
        t * v + u * w,
    )


def travel_time(d: Draw) -> Made:
    a, v, t, s = d.name(), d.n(3, 10), d.n(2, 16), d.n(5, 50)
    total = v * t + s
    town = d.pick("coast", "lake", "capital", "border", "harbour", "mountain", "farm", "castle")
    story = d.pick(
        f"It is {total} km to the {town}. {a} has gone {s} km and goes on at {v} km an hour.",
        f"{a} is on the way to the {town}, {total} km from home. {s} km are done, and {a} now goes "
        f"{v} km an hour.",
    )
    ask = d.pick(
        f"How many hours does {a} still need?", f"In how many hours does {a} reach the {town}?"
    )
    return (
        f"{story} {ask}",
        [
            f"We want to know how many hours {a} still needs to the {town}.",
            f"{a} has gone {s} of the {total} km.",
            f"It is still {total} - {s} = {v * t} km to the {town}.",
            f"At {v} km an hour, {a} needs {v * t} / {v} = {t} hours.",
        ],
        t,
    )


def ages(d: Draw) -> Made:
    a, b, c, x, f = d.name(), d.name(), d.name(), d.n(4, 16), d.n(2, 5)
    less = min(d.n(2, x * f - 2), 30)
    word = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}[f]
    story = d.pick(
        f"{a} is {x} years old. {b} is {word} as old as {a}. {c} is {less} years younger than {b}.",
        f"{c} is {less} years younger than {b}, and {b} is {word} as old as {a}, who is {x}.",
    )
    ask = d.pick(f"How old is {c}?", f"What is the age of {c}?", f"How many years old is {c}?")
    return (
        f"{story} {ask}",
        [
            f"We want the age of {c}, so we start with {a} and then {b}.",
            f"{a} is {x} years old.",
            f"{b} is {word} as old, which is {times(f, x)} years.",
            f"{c} is {less} years younger than {b}, "
            f"which is {f * x} - {less} = {f * x - less} years.",
        ],
        f * x - less,
    )


def age_sum(d: Draw) -> Made:
    a, b, x, y, k = d.name(), d.name(), d.n(4, 60), d.n(4, 60), d.n(2, 20)
    story = d.pick(
        f"{a} is {x} years old and {b} is {y} years old.",
        f"{a} is {x} and {b} is {y}.",
        f"Today {a} turns {x} and {b} turns {y}.",
    )
    ask = d.pick(
        f"What is the sum of their ages in {k} years?",
        f"How old will they be together in {k} years?",
    )
    return (
        f"{story} {ask}",
        [
            f"We want the sum of the ages of {a} and {b} in {k} years.",
            f"In {k} years, {a} will be {x} + {k} = {x + k} years old.",
            f"In {k} years, {b} will be {y} + {k} = {y + k} years old.",
            f"The sum of the ages of {a} and {b} will be {x + k} + {y + k} = {x + y + 2 * k}.",
        ],
        x + y + 2 * k,
    )


def fence(d: Draw) -> Made:
    a, k, q = d.name(), d.n(2, 10), d.n(3, 20)
    what = d.pick("posts", "trees", "lamps", "flags", "bushes", "signs", "benches")
    line = d.pick("road", "path", "fence", "river", "street", "wall", "track")
    story = d.pick(
        f"{a} puts {what} along a {line} of {k * q} metres, {k} metres apart and at both ends.",
        f"A {line} is {k * q} metres long. {a} places {what} every {k} metres, also at both ends.",
    )
    ask = d.pick(f"How many {what} does {a} need?", f"How many {what} are there?")
    return (
        f"{story} {ask}",
        [
            f"We want to know how many {what} stand along the {line}.",
            f"The {line} of {k * q} metres has {k * q} / {k} = {q} gaps of {k} metres.",
            f"With {what} at both ends, there is one more than the gaps.",
            f"So {a} needs {q} + 1 = {q + 1} {what}.",
        ],
        q + 1,
    )
