"""Word problems about buying, saving and earning."""

from __future__ import annotations

from nanodflash.train.corpus.words import Draw, Made, times


def change(d: Draw) -> Made:
    a, t, k, p = d.name(), d.thing(), d.n(2, 9), d.n(2, 12)
    cost = k * p
    pay = next(note for note in (20, 50, 100, 150) if note > cost + 1)
    story = d.pick(
        f"{d.when()}{a} buys {k} {t.many} at {p} dollars each and pays with {pay} dollars.",
        f"One {t.one} costs {p} dollars. {a} takes {k} {t.many} and pays with {pay} dollars.",
        f"{a} has {pay} dollars and spends some on {k} {t.many}. Each {t.one} costs {p} dollars.",
    )
    ask = d.pick(
        f"How many dollars does {a} have left?", f"How much change does {a} get in dollars?"
    )
    return (
        f"{story} {ask}",
        [
            f"We want to know what {a} has left after buying {k} {t.many}.",
            f"{k} {t.many} at {p} dollars each cost {times(k, p)} dollars.",
            f"{a} has {pay} dollars to pay with.",
            f"After paying, {a} has {pay} - {cost} = {pay - cost} dollars left.",
        ],
        pay - cost,
    )


def two_items(d: Draw) -> Made:
    a, t, u = d.name(), d.thing(), d.thing()
    k, p, m, q = d.n(2, 9), d.n(2, 12), d.n(2, 9), d.n(2, 9)
    story = d.pick(
        f"{d.when()}{a} buys {k} {t.many} at {p} dollars each and {m} {u.many} at {q} dollars "
        "each.",
        f"One {t.one} costs {p} dollars and one {u.one} costs {q} dollars. {a} buys {k} {t.many} "
        f"and {m} {u.many}.",
    )
    ask = d.pick(f"How many dollars does {a} spend?", f"How much does {a} pay in total?")
    return (
        f"{story} {ask}",
        [
            f"We want the price of {k} {t.many} and {m} {u.many} for {a}.",
            f"The {k} {t.many} cost {times(k, p)} dollars.",
            f"The {m} {u.many} cost {times(m, q)} dollars.",
            f"Together the {t.many} and the {u.many} cost "
            f"{k * p} + {m * q} = {k * p + m * q} dollars.",
        ],
        k * p + m * q,
    )


def saving(d: Draw) -> Made:
    a, b, s, w = d.name(), d.n(5, 60), d.n(2, 15), d.n(2, 9)
    unit = d.pick("day", "week", "month")
    story = d.pick(
        f"{a} has {b} dollars and saves {s} dollars every {unit}.",
        f"{a} saves {s} dollars each {unit} and starts with {b} dollars.",
        f"There are {b} dollars in {a}'s piggy bank. Every {unit}, {a} adds {s} dollars.",
    )
    ask = d.pick(
        f"How many dollars does {a} have after {w} {unit}s?",
        f"How much money does {a} have when {w} {unit}s are over?",
    )
    return (
        f"{story} {ask}",
        [
            f"We want to know what {a} has after {w} {unit}s of saving {s} dollars.",
            f"In {w} {unit}s, {a} saves {times(w, s)} dollars.",
            f"{a} had {b} dollars at the start.",
            f"After {w} {unit}s, {a} has {b} + {w * s} = {b + w * s} dollars.",
        ],
        b + w * s,
    )


def goal(d: Draw) -> Made:
    a, t, b, s, w = d.name(), d.thing(), d.n(3, 50), d.n(2, 10), d.n(2, 12)
    price = b + s * w
    story = d.pick(
        f"{a} wants to buy a set of {t.many} that costs {price} dollars. {a} has {b} dollars and "
        f"saves {s} dollars a week.",
        f"{a} has {b} dollars and saves {s} dollars a week for a set of {t.many} at {price} "
        "dollars.",
    )
    ask = d.pick(
        f"How many weeks does {a} need to save?",
        f"After how many weeks can {a} buy the {t.many}?",
    )
    return (
        f"{story} {ask}",
        [
            f"We want to know how many weeks {a} has to save for the {t.many}.",
            f"The {t.many} cost {price} dollars and {a} has {b} dollars.",
            f"{a} still needs {price} - {b} = {s * w} dollars.",
            f"Saving {s} dollars a week, {a} needs {s * w} / {s} = {w} weeks.",
        ],
        w,
    )


def discount(d: Draw) -> Made:
    a, t = d.name(), d.thing()
    percent, share, part = d.rng.choice(
        [(10, 10, "tenth"), (20, 5, "fifth"), (25, 4, "quarter"), (50, 2, "half")]
    )
    off = d.n(2, 20)
    price = off * share
    story = d.pick(
        f"{d.when()}{a} buys a set of {t.many} with a discount of {percent} percent. The full "
        f"price is {price} dollars.",
        f"A set of {t.many} costs {price} dollars. {a} gets {percent} percent off.",
        f"The price of a set of {t.many} is {price} dollars, but {a} has a coupon for {percent} "
        "percent off.",
    )
    ask = d.pick(f"How many dollars does {a} pay?", f"What does {a} pay for the {t.many}?")
    one = "one half" if share == 2 else f"one {part}"
    return (
        f"{story} {ask}",
        [
            f"We want the price of the {t.many} for {a} with {percent} percent off.",
            f"{percent} percent is {one}, so we divide by {share}.",
            f"{percent} percent of {price} dollars is {price} / {share} = {off} dollars.",
            f"For the {t.many}, {a} pays {price} - {off} = {price - off} dollars.",
        ],
        price - off,
    )


def unit_price(d: Draw) -> Made:
    a, t, k, m, u = d.name(), d.thing(), d.n(2, 9), d.n(2, 9), d.n(2, 12)
    m = m if m != k else k + 1
    story = d.pick(
        f"{k} {t.many} cost {k * u} dollars.",
        f"A shop sells {k} {t.many} for {k * u} dollars.",
        f"{d.name()} paid {k * u} dollars for {k} {t.many}.",
    )
    ask = d.pick(
        f"How many dollars does {a} pay for {m} {t.many}?",
        f"At the same price, what do {m} {t.many} cost {a}?",
        f"{a} wants {m} {t.many}. How much does {a} pay?",
    )
    return (
        f"{story} {ask}",
        [
            f"We want the price of {m} {t.many} for {a}, so we find the price of one.",
            f"{k} {t.many} cost {k * u} dollars.",
            f"One {t.one} costs {k * u} / {k} = {u} dollars.",
            f"For {m} {t.many}, {a} pays {times(m, u)} dollars.",
        ],
        m * u,
    )


def tickets(d: Draw) -> Made:
    where = d.pick("zoo", "museum", "circus", "cinema", "theatre", "pool", "castle", "fair")
    x, y, p, q = d.n(2, 9), d.n(2, 9), d.n(6, 15), d.n(2, 9)
    story = d.pick(
        f"A ticket for the {where} costs {p} dollars for an adult and {q} dollars for a child.",
        f"At the {where}, adults pay {p} dollars and children pay {q} dollars.",
        f"The {where} charges each adult {p} dollars and each child {q} dollars.",
    )
    ask = d.pick(
        f"How many dollars do {x} adults and {y} children pay?",
        f"What do tickets for {x} adults and {y} children cost?",
        f"{d.name()} buys tickets for {x} adults and {y} children. What is the total?",
    )
    return (
        f"{story} {ask}",
        [
            f"We want the price of the {where} for {x} adults and {y} children.",
            f"The tickets for {x} adults cost {times(x, p)} dollars.",
            f"The tickets for {y} children cost {times(y, q)} dollars.",
            f"All the tickets for the {where} cost {x * p} + {y * q} = {x * p + y * q} dollars.",
        ],
        x * p + y * q,
    )


def wages(d: Draw) -> Made:
    a, t, p, h = d.name(), d.thing(), d.n(5, 20), d.n(2, 9)
    s = min(d.n(2, p * h - 2), 80)
    story = d.pick(
        f"{d.when()}{a} works for {h} hours at {p} dollars an hour and then spends {s} dollars on "
        f"{t.many}.",
        f"{a} earns {p} dollars an hour. After {h} hours of work, {a} buys {t.many} for {s} "
        "dollars.",
    )
    ask = d.pick(f"How many dollars does {a} have left?", f"How much of the pay does {a} keep?")
    return (
        f"{story} {ask}",
        [
            f"We want to know what {a} has after {h} hours of work and buying {t.many}.",
            f"In {h} hours, {a} earns {times(h, p)} dollars.",
            f"{a} spends {s} dollars on {t.many}.",
            f"{a} has {h * p} - {s} = {h * p - s} dollars left.",
        ],
        h * p - s,
    )


def split_bill(d: Draw) -> Made:
    k, share = d.n(2, 8), d.n(4, 18)
    total = k * share
    x = d.n(2, total - 2)
    food, drink = d.pick("pizza", "pasta", "rice", "salad"), d.pick("juice", "tea", "water", "milk")
    story = d.pick(
        f"{k} friends buy {food} for {x} dollars and {drink} for {total - x} dollars.",
        f"A meal for {k} friends has {food} for {x} dollars and {drink} for {total - x} dollars.",
        f"{d.when()}{d.name()} orders {food} for {x} dollars and {drink} for {total - x} dollars "
        f"for a group of {k} friends.",
    )
    ask = d.pick(
        "They share the bill equally. How many dollars does each friend pay?",
        "If the cost is split equally, what does each friend pay?",
    )
    return (
        f"{story} {ask}",
        [
            f"We want to know what each of the {k} friends pays for {food} and {drink}.",
            f"The {food} and the {drink} cost {x} + {total - x} = {total} dollars together.",
            f"The {k} friends share {total} dollars equally.",
            f"Each friend pays {total} / {k} = {share} dollars.",
        ],
        share,
    )


def notes(d: Draw) -> Made:
    a, k, m, v = d.name(), d.n(2, 9), d.n(2, 9), d.rng.choice([2, 20])
    story = d.pick(
        f"{a} has {k} notes of 5 dollars and {m} notes of {v} dollars.",
        f"In the wallet of {a} there are {k} notes of 5 dollars and {m} notes of {v} dollars.",
        f"{d.when()}{d.name()} gives {a} {k} notes of 5 dollars and {m} notes of {v} dollars.",
    )
    ask = d.pick(f"How many dollars does {a} have?", "How much money is that in total?")
    return (
        f"{story} {ask}",
        [
            f"We want to know how many dollars {a} has in notes of 5 and {v} dollars.",
            f"The {k} notes of 5 dollars are worth {k} * 5 = {k * 5} dollars.",
            f"The {m} notes of {v} dollars are worth {m} * {v} = {m * v} dollars.",
            f"In total that is {k * 5} + {m * v} = {k * 5 + m * v} dollars.",
        ],
        k * 5 + m * v,
    )


def profit(d: Draw) -> Made:
    a, t, k, p = d.name(), d.thing(), d.n(3, 30), d.n(2, 8)
    s = min(d.n(2, k * p - 2), 90)
    story = d.pick(
        f"{a} sells {k} {t.many} at {p} dollars each. Making them cost {a} {s} dollars.",
        f"{d.when()}{a} spends {s} dollars to make {t.many} and sells {k} of them for {p} dollars "
        "each.",
        f"{a} makes {k} {t.many} for {s} dollars in all and sells each {t.one} for {p} dollars.",
    )
    ask = d.pick(f"How many dollars of profit does {a} make?", f"What is the profit of {a}?")
    return (
        f"{story} {ask}",
        [
            f"We want the profit of {a} from selling {k} {t.many} at {p} dollars each.",
            f"Selling {k} {t.many} brings {a} {times(k, p)} dollars.",
            f"Making the {t.many} cost {s} dollars.",
            f"The profit of {a} is {k * p} - {s} = {k * p - s} dollars.",
        ],
        k * p - s,
    )


def cheaper(d: Draw) -> Made:
    a, b, t, q, gap, k = d.name(), d.name(), d.thing(), d.n(2, 30), d.n(2, 9), d.n(2, 9)
    story = d.pick(
        f"One {t.one} costs {q + gap} dollars in {a}'s shop and {q} dollars in {b}'s shop.",
        f"{a}'s shop sells each {t.one} for {q + gap} dollars, but {b}'s shop asks only {q} "
        "dollars.",
    )
    ask = d.pick(
        f"How many dollars do you save on {k} {t.many} in {b}'s shop?",
        f"{d.name()} buys {k} {t.many} in {b}'s shop. How many dollars does this save?",
    )
    return (
        f"{story} {ask}",
        [
            f"We compare the price of one {t.one} in the shops of {a} and {b}.",
            f"In {b}'s shop one {t.one} is {q + gap} - {q} = {gap} dollars cheaper "
            f"than in {a}'s shop.",
            f"We buy {k} {t.many} in {b}'s shop.",
            f"On {k} {t.many} we save {times(k, gap)} dollars.",
        ],
        k * gap,
    )


def taxi(d: Draw) -> Made:
    a, f, p, k = d.name(), d.n(2, 15), d.n(2, 6), d.n(3, 25)
    ride = d.pick("taxi", "boat", "carriage", "minibus")
    story = d.pick(
        f"A {ride} ride costs {f} dollars plus {p} dollars for each kilometre.",
        f"For a {ride} ride you pay {f} dollars at the start and {p} dollars for every kilometre.",
    )
    ask = d.pick(
        f"How many dollars does {a} pay for {k} kilometres?",
        f"{a} rides {k} kilometres. What does {a} pay?",
        f"{d.when()}{a} travels {k} kilometres. How many dollars does {a} pay?",
    )
    return (
        f"{story} {ask}",
        [
            f"We want the price of a {ride} ride of {k} kilometres for {a}.",
            f"For {k} kilometres at {p} dollars each, {a} pays {times(k, p)} dollars.",
            f"The {ride} costs {f} dollars at the start.",
            f"The whole {ride} ride costs {a} {k * p} + {f} = {k * p + f} dollars.",
        ],
        k * p + f,
    )
