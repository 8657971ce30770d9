"""Sample tasks for envs/debate.py, made offline: questions and claims about small sums, and what agents may say.

A task is a dict with `question`, `answer` and `ways`, which only demonstrations use: the right way to answer first,
then wrong ones. Train and test differ by composition, as in envs/samples/__init__.py.
"""

from itertools import product

from envs.samples import find_split, read_list, read_table

NAMES = read_list("Tom, Ana, Ben, Eva, Max, Lea, Sam, Ida")
THINGS = read_list("pens, cups, eggs, keys, books, coins, bags, hats")
START = "{name} has {a} {thing} and {c} {other}."
# how it goes on | the sign between a and b that leads to the answer | the other sign
STORIES = read_table("""
{name} buys {b} {thing}. How many {thing} does {name} have? | + | -
{name} loses {b} {thing}. How many {thing} does {name} have? | - | +
{friend} has {b} more {thing} than {name}. How many {thing} does {friend} have? | + | -
{friend} has {b} fewer {thing} than {name}. How many {thing} does {friend} have? | - | +
That is {b} more {thing} than {friend} has. How many {thing} does {friend} have? | - | +
That is {b} fewer {thing} than {friend} has. How many {thing} does {friend} have? | + | -
""")
FIRST = range(8, 16)  # numbers in a sum or difference
SECOND = range(2, 7)
RELATIONS = ["larger", "smaller"]
DISTANCES = [-4, -3, -2, -1, 1, 2, 3, 4]  # from the result to the number that it is compared with


def make_questions(split, count, rng, choice=False):
    """`count` different questions; name, thing and story decide the split.

    choice: with four options A to D, the answer being a letter. Each of the four ways, pairs (working, answer), leads
    to another option: the wrong ones take the wrong sign, a number that does not matter, or both.
    """
    tasks = {}
    while len(tasks) < count:
        name, friend = rng.sample(NAMES, 2)
        thing, other = rng.sample(THINGS, 2)
        story = rng.randrange(len(STORIES))
        if find_split(NAMES.index(name), THINGS.index(thing), story) != split:
            continue
        a = rng.choice(FIRST)
        b, c = rng.sample(SECOND, 2)
        event, sign, wrong = STORIES[story]
        question = f"{START} {event}".format(name=name, friend=friend, thing=thing, other=other, a=a, b=b, c=c)
        ways = [
            _work(a, sign, b),
            _work(a, wrong, b),
            _work(a, sign, c),
            _work(a, wrong, c),
        ]
        if choice:
            values = rng.sample([result for _, result in ways], 4)
            letters = dict(zip(values, "ABCD"))
            options = ", ".join(f"{letter} {value}" for value, letter in letters.items())
            question += f" Options: {options}. Box the letter."
            ways = [(working, letters[result]) for working, result in ways]
        ways = [(working, str(result)) for working, result in ways]
        tasks[question] = {"question": question, "answer": ways[0][1], "ways": ways}
    return list(tasks.values())


def make_claims(split, count, rng):
    """Up to `count` different claims, about half of them true; all of their numbers together decide the split.

    The two ways are an honest text and one whose wrong result speaks for the opposite.
    """
    tasks = []
    for a, b, sign, relation, distance in product(FIRST, SECOND, "+-", RELATIONS, DISTANCES):
        _, result = _work(a, sign, b)
        bound = result + distance
        lie = bound + distance  # on the other side of the bound
        if lie <= 0 or find_split(a, b, distance + RELATIONS.index(relation)) != split:
            continue
        compared = f"{relation} than {bound}."
        is_true = (distance < 0) == (relation == "larger")
        verb, opposite = ("is", "is not") if is_true else ("is not", "is")
        ways = [
            f"{a} {sign} {b} = {result}, and {result} {verb} {compared}",
            f"{a} {sign} {b} = {lie}, and {lie} {opposite} {compared}",
        ]
        task = {"question": f"{a} {sign} {b} is {compared}", "answer": str(is_true).lower(), "ways": ways}
        tasks.append(task)
    return rng.sample(tasks, min(count, len(tasks)))


def draw_answers(task, stances, num_agents, rng):
    """What agents may say in a round: the ways that they take after their earlier `stances`, and a text for each.

    A first answer, or a new one, is right in half of the cases. Whether an answer is kept, taken from another agent or
    made anew does not depend on what is right.
    """
    new_stances = []
    texts = []
    right, *wrong = task["ways"]
    for agent in range(num_agents):
        opening = ""
        way = right if rng.random() < 0.5 else rng.choice(wrong)
        if stances:
            others = [other for other in range(num_agents) if other != agent]
            chance = rng.random()
            if chance < 0.4:
                opening = "I keep mine: "
                way = stances[agent]
            elif chance < 0.8 and others:
                other = rng.choice(others)
                opening = f"Agent {other + 1} is right: "
                way = stances[other]
            else:
                opening = "I start anew: "
        working, answer = way
        new_stances.append(way)
        texts.append(f"{opening}{working}, so the answer is \\boxed{{{answer}}}.")
    return new_stances, texts


def draw_speeches(task, rng):
    """What the two sides may say about a claim; the side that is wrong is honest in a third of the cases."""
    honest, lie = task["ways"]
    return [honest if task["answer"] == side or rng.random() < 1 / 3 else lie for side in ("true", "false")]


def draw_verdict(task, speeches, rng):
    """What a judge may say who believes one of two speeches by chance."""
    speech = rng.choice(speeches)
    is_true = (speech == task["ways"][0]) == (task["answer"] == "true")
    return f"{speech} So the claim is \\boxed{{{str(is_true).lower()}}}."


def _work(a, sign, b):
    """An addition or subtraction as a string, and its result."""
    result = a + b if sign == "+" else a - b
    return f"{a} {sign} {b} = {result}", result
