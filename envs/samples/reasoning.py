"""Sample word problems of two steps, made offline from a small grammar.

A start and two operations, each a sentence that is needed: without its number the answer is unknown. "First" and
"Then" keep their order where they are told apart. A third of the problems also name an hour or a day, which is not
needed. Operation x operation x thing decides the split, as in envs/samples/__init__.py: test asks for new
combinations of known choices.
"""

import random

from envs.samples import find_split, read_list, read_table

NAMES = read_list("Ana, Ben, Cleo, Dan, Eva, Finn, Gia, Hugo, Ida, Jon, Kim, Leo")
THINGS = read_list("apples, books, cards, coins, eggs, flowers, keys, pens, shells, stamps, stones, toys")
OPERATIONS = read_table("""
buys {n} more | +
finds {n} | +
gives {n} to {friend} | -
loses {n} | -
keeps one of {n} equal parts | /
has {n} times as many | *
""")
CONFUSED = {"+": "-", "-": "+", "/": "-", "*": "+"}  # what a flawed solution takes for an operation


def make_problems(split, count, seed):
    """`count` different problems of "train", "validation" or "test".

    Returns dicts in the columns of GSM8K, question and answer (a line for each step, then #### and the result), and
    with `flawed`, a wrong answer: it stops after one step, or takes the second for another one.
    """
    rng = random.Random(f"problems {split} {seed}")
    rows = {}
    while len(rows) < count:
        first = rng.randrange(len(OPERATIONS))
        second = rng.randrange(len(OPERATIONS))
        thing = rng.randrange(len(THINGS))
        if find_split(first, second, thing) == split:
            row = _make_problem(OPERATIONS[first], OPERATIONS[second], THINGS[thing], rng)
            rows[row["question"]] = row
    return list(rows.values())


def _make_problem(first, second, thing, rng):
    name, friend = rng.sample(NAMES, 2)
    start, n, m, one, two = _draw_numbers(first[1], second[1], rng)
    facts = [
        f"{name} has {start} {thing}",
        f"First {name} {first[0].format(n=n, friend=friend)}",
        f"Then {name} {second[0].format(n=m, friend=friend)}",
    ]
    if rng.random() < 1 / 3:  # a number that is not needed
        place = rng.randrange(3)
        surplus = rng.choice([" at {} o'clock", " on day {}"])
        facts[place] += surplus.format(rng.randint(1, 9))
    steps = [(start, first[1], n, one), (one, second[1], m, two)]
    flawed = steps[:1]
    wrong = _compute(one, CONFUSED[second[1]], m)
    if wrong not in (0, two) and rng.random() < 0.5:
        flawed = [*flawed, (one, CONFUSED[second[1]], m, wrong)]
    question = ". ".join([*facts, f"How many {thing} does {name} have now?"])
    return {"question": question, "answer": _write_working(steps), "flawed": _write_working(flawed)}


def _draw_numbers(first, second, rng):
    """A start, the numbers of two operations, and both results, which a very small model can learn to compute."""
    while True:
        start = rng.randint(2, 30)
        n = rng.randint(2, 9)
        m = rng.randint(2, 9)
        one = _compute(start, first, n)
        two = one and _compute(one, second, m)
        if two:
            return start, n, m, one, two


def _compute(value, sign, n):
    """The result of an operation, 0 where it is no number from 1 to 99 or needs more than the times table."""
    if sign == "+":
        result = value + n
    elif sign == "-":
        result = value - n
    elif sign == "*":
        result = value * n if value <= 9 else 0
    else:
        result = value // n if value % n == 0 and value // n <= 9 else 0
    return result if 1 <= result <= 99 else 0


def _write_working(steps):
    lines = []
    for value, sign, n, result in steps:
        lines.append(f"{value} {sign} {n} = <<{value}{sign}{n}={result}>>{result}")
    return "\n".join([*lines, f"#### {result}"])
