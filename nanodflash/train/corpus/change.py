"""Word problems about quantities that change: tanks, heights, temperatures, sequences."""

from __future__ import annotations

from nanodflash.train.corpus.words import DAYS, Draw, Made, times


def temperature(d: Draw) -> Made:
    x, up, day, where = d.n(3, 25), d.n(2, 14), d.pick(*DAYS), d.name()
    down = min(d.n(2, x + up - 2), 20)
    place = d.pick("garden", "town", "village", "house", "valley")
    story = d.pick(
        f"On {day} morning it is {x} degrees in {where}'s {place}. By noon it is {up} degrees "
        f"warmer, and by night it drops by {down} degrees.",
        f"In {where}'s {place} it is {x} degrees on {day} morning. It rises by {up} degrees until "
        f"noon and falls by {down} degrees until night.",
    )
    ask = d.pick("How many degrees is it at night?", "What is the temperature at night?")
    return (
        f"{story} {ask}",
        [
            f"We want the temperature at night in {where}'s {place}.",
            f"On {day} morning it is {x} degrees in {where}'s {place}.",
            f"At noon it is {x} + {up} = {x + up} degrees.",
            f"At night it is {x + up} - {down} = {x + up - down} degrees.",
        ],
        x + up - down,
    )


def fuel(d: Draw) -> Made:
    a, u, h = d.name(), d.n(2, 12), d.n(2, 9)
    total = u * h + d.n(2, 50)
    what = d.pick("car", "boat", "truck", "tractor", "van", "bus", "pump", "heater")
    story = d.pick(
        f"{a}'s {what} has {total} litres of fuel and uses {u} litres an hour.",
        f"The {what} of {a} burns {u} litres an hour. Its tank holds {total} litres.",
        f"{d.when()}{a} puts {total} litres in a {what} that needs {u} litres an hour.",
    )
    ask = d.pick(
        f"How many litres are left after {h} hours?",
        f"How much fuel does the {what} have after {h} hours?",
    )
    return (
        f"{story} {ask}",
        [
            f"We want to know how much fuel the {what} of {a} has after {h} hours.",
            f"In {h} hours the {what} uses {times(h, u)} litres.",
            f"{a} started with {total} litres.",
            f"After {h} hours, {total} - {h * u} = {total - h * u} litres are left in the {what}.",
        ],
        total - h * u,
    )


def stairs(d: Draw) -> Made:
    a, k, s = d.name(), d.n(2, 9), d.n(8, 20)
    back = d.n(2, min(40, k * s - 2))
    where = d.pick("tower", "hotel", "school", "castle", "lighthouse", "museum", "house")
    story = d.pick(
        f"{a} climbs {k} stairs of {s} steps each in a {where} and then goes down {back} steps.",
        f"In a {where} each stair has {s} steps. {a} goes up {k} stairs and comes down {back} "
        "steps.",
    )
    ask = d.pick(f"How many steps up is {a} now?", f"On which step of the {where} is {a}?")
    return (
        f"{story} {ask}",
        [
            f"We want to know how many steps up {a} is in the {where}.",
            f"{k} stairs of {s} steps each have {times(k, s)} steps.",
            f"Then {a} goes down {back} steps.",
            f"In the {where}, {a} is now {k * s} - {back} = {k * s - back} steps up.",
        ],
        k * s - back,
    )


def sequence(d: Draw) -> Made:
    a, x, step = d.name(), d.n(2, 80), d.n(2, 15)
    w, y, z, end = x + step, x + 2 * step, x + 3 * step, x + 4 * step
    story = d.pick(
        f"{a} writes the numbers {x}, {w}, {y}, {z}.",
        f"A sequence by {a} starts with {x}, {w}, {y}, {z}.",
        f"{a} counts {x}, {w}, {y}, {z} and goes on in the same way.",
    )
    ask = d.pick("What is the next number?", "Which number comes next?", "What number follows?")
    return (
        f"{story} {ask}",
        [
            f"We want the number that comes after {z}, so we look at the steps.",
            f"From {x} to {w} the step is {w} - {x} = {step}.",
            f"From {y} to {z} the step is {z} - {y} = {step}.",
            f"So every step of {a} adds {step}.",
            f"After {z} comes {z} + {step} = {end}.",
        ],
        end,
    )


def countdown(d: Draw) -> Made:
    a, step, end = d.name(), d.n(2, 12), d.n(2, 90)
    x, y, z, q = (end + k * step for k in (5, 4, 3, 2))
    story = d.pick(
        f"{a} counts backwards: {x}, {y}, {z}, {q}.",
        f"The numbers {x}, {y}, {z}, {q} get smaller by the same step, {a} says.",
        f"{a} writes {x}, {y}, {z}, {q} and goes on in the same way.",
    )
    ask = d.pick("What is the second number after these?", "Which number comes after the next one?")
    return (
        f"{story} {ask}",
        [
            f"We want the second number after {q}, so we look at the steps.",
            f"From {x} to {y} the step is {x} - {y} = {step}.",
            f"So every step of {a} takes away {step}.",
            f"After {q} comes {q} - {step} = {q - step}.",
            f"After {q - step} comes {q - step} - {step} = {end}.",
        ],
        end,
    )


def tank(d: Draw) -> Made:
    a, r, m, b = d.name(), d.n(2, 10), d.n(2, 18), d.n(3, 40)
    total = r * m + b
    what = d.pick("tank", "pool", "barrel", "bath", "bucket", "pond", "tub", "basin")
    story = d.pick(
        f"A {what} holds {total} litres and has {b} litres in it. {a} adds {r} litres a minute.",
        f"{a} fills a {what} of {total} litres with {r} litres a minute. {b} litres are already in "
        "it.",
    )
    ask = d.pick(
        f"How many minutes does it take to fill the {what}?",
        f"After how many minutes is the {what} full?",
    )
    return (
        f"{story} {ask}",
        [
            f"We want to know how many minutes {a} needs to fill the {what}.",
            f"The {what} holds {total} litres and has {b} litres in it.",
            f"It still needs {total} - {b} = {r * m} litres.",
            f"At {r} litres a minute, {a} needs {r * m} / {r} = {m} minutes.",
        ],
        m,
    )


def rope(d: Draw) -> Made:
    a, k, q, c = d.name(), d.n(2, 9), d.n(2, 18), d.n(2, 30)
    total = k * q + c
    what = d.pick("rope", "ribbon", "cable", "string", "board", "pipe", "cloth", "wire")
    story = d.pick(
        f"{a} cuts {c} metres off a {what} of {total} metres and cuts the rest into {k} equal "
        "pieces.",
        f"A {what} is {total} metres long. {a} uses {c} metres and cuts the rest into {k} equal "
        "pieces.",
    )
    ask = d.pick("How many metres long is each piece?", "What is the length of one piece?")
    return (
        f"{story} {ask}",
        [
            f"We want the length of each of the {k} pieces of the {what}.",
            f"{a} takes {c} metres off the {what} of {total} metres.",
            f"That leaves {total} - {c} = {k * q} metres of the {what}.",
            f"Each of the {k} pieces is {k * q} / {k} = {q} metres long.",
        ],
        q,
    )


def growth(d: Draw) -> Made:
    a, x, g, w = d.name(), d.n(5, 80), d.n(2, 12), d.n(2, 9)
    what = d.pick("sunflower", "bean plant", "bamboo", "tomato plant", "vine", "young tree", "bush")
    unit = d.pick("day", "week", "month", "year")
    story = d.pick(
        f"{a}'s {what} is {x} cm tall and grows {g} cm every {unit}.",
        f"A {what} in {a}'s garden grows {g} cm each {unit}. It is {x} cm tall today.",
        f"{d.when()}{a} measures a {what} at {x} cm. It grows {g} cm a {unit}.",
    )
    ask = d.pick(f"How many cm tall is it after {w} {unit}s?", f"How tall is it in {w} {unit}s?")
    return (
        f"{story} {ask}",
        [
            f"We want to know how tall the {what} of {a} is after {w} {unit}s.",
            f"In {w} {unit}s the {what} grows {times(w, g)} cm.",
            f"The {what} of {a} was {x} cm tall.",
            f"After {w} {unit}s it is {x} + {w * g} = {x + w * g} cm tall.",
        ],
        x + w * g,
    )


def weights(d: Draw) -> Made:
    a, c, k, w, x = d.name(), d.box(), d.n(2, 9), d.n(2, 15), d.n(4, 60)
    what = d.pick("rice", "sand", "flour", "corn", "salt", "sugar", "wheat", "coal", "wool")
    cart = d.pick("cart", "sled", "wagon", "trolley", "barrow")
    story = d.pick(
        f"{a} loads {k} {c.many} of {what} on a {cart}. Each {c.one} weighs {w} kg and the {cart} "
        f"weighs {x} kg.",
        f"A {cart} weighs {x} kg. {a} puts {k} {c.many} of {what} on it, each {w} kg.",
    )
    ask = d.pick(f"How many kg is the full {cart}?", "How many kg is that in total?")
    return (
        f"{story} {ask}",
        [
            f"We want the weight of the {cart} with {k} {c.many} of {what}.",
            f"{k} {c.many} of {what} at {w} kg each weigh {times(k, w)} kg.",
            f"The {cart} of {a} weighs {x} kg.",
            f"Together that is {k * w} + {x} = {k * w + x} kg.",
        ],
        k * w + x,
    )


def holiday(d: Draw) -> Made:
    a, w, x, t = d.name(), d.n(2, 12), d.n(2, 6), d.thing()
    y = min(d.n(2, 7 * w + x - 2), 40)
    place = d.pick("lake", "coast", "farm", "city", "forest", "island", "desert", "mountain")
    story = d.pick(
        f"{a} sells {t.many} at the {place} for {w} weeks and {x} days. It rains on {y} days.",
        f"For {w} weeks and {x} days, {a} paints {t.many} at the {place}. On {y} days it rains.",
        f"{a} stays at the {place} for {w} weeks and {x} days. It rains on {y} of the days.",
    )
    ask = d.pick("How many days are dry?", "On how many days does it not rain?")
    days = 7 * w + x
    return (
        f"{story} {ask}",
        [
            f"We want to know how many of the days at the {place} are dry for {a}.",
            f"{w} weeks are {times(w, 7)} days.",
            f"With {x} more days, {a} is at the {place} for {7 * w} + {x} = {days} days.",
            f"It rains on {y} days, so {days} - {y} = {days - y} days are dry.",
        ],
        days - y,
    )


def workers(d: Draw) -> Made:
    a, b, t, x, y, k = d.name(), d.name(), d.thing(), d.n(2, 12), d.n(2, 12), d.n(2, 9)
    unit, verb = d.pick("minute", "hour", "day"), d.pick("packs", "sorts", "counts", "cleans")
    story = d.pick(
        f"{a} {verb} {x} {t.many} a {unit} and {b} {verb} {y} {t.many} a {unit}.",
        f"Every {unit}, {a} {verb} {x} {t.many} and {b} {verb} {y} {t.many}.",
    )
    ask = d.pick(
        f"How many {t.many} is that together in {k} {unit}s?",
        f"They work for {k} {unit}s. How many {t.many} is that in total?",
    )
    return (
        f"{story} {ask}",
        [
            f"We want to know what {a} and {b} do together in {k} {unit}s.",
            f"In one {unit}, {a} {verb} {x} {t.many} and {b} {verb} {y} {t.many}.",
            f"Together that is {x} + {y} = {x + y} {t.many} in one {unit}.",
            f"In {k} {unit}s, that makes {times(k, x + y)} {t.many}.",
        ],
        k * (x + y),
    )
