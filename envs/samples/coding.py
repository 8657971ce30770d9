"""Functions and classes to write, made offline from a small grammar: filter x map x fold."""

import itertools
import random
import re

from envs.samples import find_split, pair_up, read_records, read_table

# ---------------------------------------------------------------- functions to write

# name | words | condition on x
FILTERS = read_records("""
even     | even numbers       | x % 2 == 0
odd      | odd numbers        | x % 2 == 1
positive | positive numbers   | x > 0
negative | negative numbers   | x < 0
nonzero  | nonzero numbers    | x != 0
third    | multiples of three | x % 3 == 0
""")
# name | words | words for one | value of x
MAPS = read_records("""
squares      | squares         | square         | x * x
cubes        | cubes           | cube           | x * x * x
doubles      | doubles         | double         | 2 * x
halves       | floored halves  | floored half   | x // 2
negations    | negations       | negation       | -x
successors   | successors      | successor      | x + 1
predecessors | predecessors    | predecessor    | x - 1
sizes        | absolute values | absolute value | abs(x)
""")
# name | words | expression around a list
FOLDS = read_records("""
sum      | sum            | sum([{}])
largest  | largest        | max([{}], default=0)
smallest | smallest       | min([{}], default=0)
list     | list           | [{}]
sorted   | sorted list    | sorted([{}])
distinct | distinct count | len(set([{}]))
""")
# for the tests of functions whose own lists do not tell a right answer from one that lacks a part
_drawn = random.Random(0)
SHORT_LISTS = [[_drawn.randint(-3, 3) for _ in range(_drawn.randint(1, 5))] for _ in range(200)]
TASK_WORDINGS = {
    "humaneval": [
        "Return the {fold} of the {map} of the {filter}.",
        "Take the {filter}, compute their {map} and return the {fold}.",
        "Compute the {fold} of all {map} of {filter} in the list.",
    ],
    "coophumaneval": [
        "Return the {fold} of the {filter} among the {map}.",
        "Compute the {map}, take the {filter} of these and return the {fold}.",
        "Compute the {fold} of all {filter} in the list of {map}.",
    ],
    "mbpp": [
        "Write a function to find the {fold} of the {map} of the {filter}.",
        "Write a function that takes the {filter}, computes their {map} and returns the {fold}.",
    ],
}
# what is folded: whole, and with each convention for the helper
BEFORE = {  # the filter before the map
    "whole": "{value} for x in {source} if {condition}",
    "map": "aux(x) for x in {source} if {condition}",
    "condition": "{value} for x in {source} if aux(x)",
    "filter": "{value} for x in aux(numbers)",
}
AFTER = {  # the filter after the map
    "whole": "x for x in [{value} for x in {source}] if {condition}",
    "map": "x for x in [aux(x) for x in {source}] if {condition}",
    "condition": "x for x in [{value} for x in {source}] if aux(x)",
    "filter": "x for x in aux([{value} for x in {source}])",
}
HELPERS = {
    "map": "def aux(x):\n    return {value}\n",
    "condition": "def aux(x):\n    return {condition}\n",
    "filter": "def aux(numbers):\n    return [x for x in {source} if {condition}]\n",
}
# where a function of mbpp finds its numbers | the argument that holds a list of numbers | its numbers
PLACES = read_table("""
in a tuple | tuple(numbers) | numbers
among the keys of a dictionary | {x: x * x % 7 for x in numbers} | numbers
in a counter, each as often as it is counted | {x: 2 + x % 3 for x in numbers} | \
[x for x, count in numbers.items() for _ in range(count)]
that come first in a list of pairs | [(x, x * x % 7) for x in numbers] | [x for x, _ in numbers]
in a string, with spaces between them | ' '.join(map(str, numbers)) | map(int, numbers.split())
""")


def make_coding_tasks(split, count, seed, benchmark="humaneval"):
    """Functions over integers, filter x map x fold, in the columns of a benchmark; one of the three below.

    humaneval: over a list; the filter comes before the map
    coophumaneval: over a list; the filter comes after the map, so it takes two steps, of which the helper does one
    mbpp: over a tuple, the keys of a dictionary, a counter, the first numbers of pairs or a string

    Returns `count` dicts with a correct answer by two agents in two more columns: helper (source of `aux`) and main
    (the task's function, without aux). In 65 of 100 tasks, and in all of coophumaneval, main calls aux. The convention
    for aux varies: in four of ten tasks it is the map, in three the filter's condition, in three the whole filter. So
    agents that each imitate their column see only good answers, but still have to agree on a convention. Of the five
    tests (mbpp: three, of which one is shown), none is an example of a docstring, and an answer without the filter or
    the map, or with the two in the wrong order, fails one, where that makes it wrong. If `count` exceeds the number of
    compositions (192 train, 48 test; fewer of coophumaneval), they repeat with other words and numbers.
    """
    rng = random.Random(f"coding {split} {seed}")
    chosen = enumerate(_draw_compositions(split, count, rng, after=benchmark == "coophumaneval"))
    return [_make_coding_task(benchmark, f"sample/{split}/{i}", *composition, rng) for i, composition in chosen]


def _draw_compositions(split, count, rng, after=False):
    """`count` combinations of filter, map and fold: each one of the split occurs once before any repeats.

    after: the filter comes after the map, and has something to select there
    A new round is drawn only when the last one is used up, since the tasks draw from `rng` in between.
    """
    compositions = []
    for choices in itertools.product(*map(enumerate, (FILTERS, MAPS, FOLDS))):
        indices, names = zip(*choices)
        if find_split(*indices) == split and not (after and not _selects(*names[:2])):
            compositions.append(names)
    while count > 0:
        chosen = rng.sample(compositions, min(len(compositions), count))
        yield from chosen
        count -= len(chosen)


def _selects(filter_name, map_name):
    """Whether a filter keeps some values of a map and not all, and not just those other than 0, as `if x` would."""
    values = eval(f"[{MAPS[map_name][-1]} for x in range(-9, 10)]")
    outcomes = {(x != 0, eval(FILTERS[filter_name][1], {"x": x})) for x in values}
    return len({kept for _, kept in outcomes}) == 2 and outcomes != {(True, True), (False, False)}


def _make_coding_task(benchmark, task_id, filter_name, map_name, fold_name, rng):
    name = f"{fold_name}_{filter_name}_{map_name}"
    filter_words, condition = FILTERS[filter_name]
    given = source = "numbers"
    if benchmark == "mbpp":
        where, given, source = rng.choice(PLACES)
        filter_words += f" {where}"
    fold_words, fold = FOLDS[fold_name]
    map_words, _, value = MAPS[map_name]
    parts = {"value": value, "source": source, "condition": condition}
    forms = AFTER if benchmark == "coophumaneval" else BEFORE
    expression = fold.format(forms["whole"].format(**parts))
    reference = eval(f"lambda numbers: {expression}")
    inputs = [[rng.randint(-9, 9) for _ in range(rng.randint(5, 8))] for _ in range(6)]
    examples = [inputs[0][:3], inputs[1][:4]]
    # An answer without the filter, without the map, with x itself as the condition (what is left of a helper that only
    # returns its argument) or with the filter before the map fails a test, unless it is right for all of these lists.
    others = [{"condition": "True"}, {"value": "x"}, {"condition": "x"}]
    wrong = [forms["whole"].format(**{**parts, **other}) for other in others]
    wrong += [BEFORE["whole"].format(**parts)] if forms is AFTER else []
    argument = eval(f"lambda numbers: {given}")
    asserted = [[]]
    for part in wrong:
        answer = eval(f"lambda numbers: {fold.format(part)}")
        lists = (*inputs[2:], *SHORT_LISTS)
        tells = (numbers for numbers in lists if answer(argument(numbers)) != reference(argument(numbers)))
        first = next(tells, [])  # which is asserted anyway
        if first not in asserted:
            asserted.append(first)
    asserted += [numbers for numbers in inputs[2:] if numbers not in asserted]
    words = rng.choice(TASK_WORDINGS[benchmark]).format(fold=fold_words, map=map_words, filter=filter_words)
    if "default=0" in expression:
        words += " It is 0 if there are none."
    convention = rng.choices(["map", "condition", "filter"], weights=[4, 3, 3])[0]
    calls = rng.random() < 0.65 or forms is AFTER
    body = fold.format(forms[convention].format(**parts)) if calls else expression
    answer = {"helper": HELPERS[convention].format(**parts), "main": f"def {name}(numbers):\n    return {body}\n"}
    cases = [(argument(numbers), reference(argument(numbers))) for numbers in (*examples, *asserted[:5])]
    columns = _write_mbpp_columns if benchmark == "mbpp" else _write_humaneval_columns
    return {"task_id": task_id, **columns(name, words, expression, cases), **answer}


def _write_humaneval_columns(name, words, expression, cases):
    """cases: (argument, value), first those of the two examples."""
    shown = "".join(f"    >>> {name}({argument!r})\n    {value}\n" for argument, value in cases[:2])
    asserts = "".join(f"    assert candidate({argument!r}) == {value}\n" for argument, value in cases[2:])
    return {
        "prompt": f'def {name}(numbers):\n    """{words}\n\n{shown}    """\n',
        "entry_point": name,
        "canonical_solution": f"    return {expression}\n",
        "test": f"def check(candidate):\n{asserts}",
    }


def _write_mbpp_columns(name, words, expression, cases):
    """The assert with the second example comes first; the case of no numbers is left out."""
    return {
        "prompt": words,
        "code": f"def {name}(numbers):\n    return {expression}\n",
        "test_imports": [],
        "test_list": [f"assert {name}({argument!r}) == {value}" for argument, value in (cases[1], *cases[3:5])],
    }


# ---------------------------------------------------------------- classes to write

CLASS_WORDINGS = [
    ("Store the {map} of x and return it.", "The {fold} of what kept() returns."),
    ("Keep the {map} of x in items and return it.", "Return the {fold} of kept()."),
]


# Given in the skeleton: with another keeps, kept and result are only right if they call it, and do not repeat it.
REST = """

class Rest({}):
    def keeps(self, x):
        return not super().keeps(x)
"""


def make_class_tasks(split, count, seed):
    """Classes that store, select and sum up numbers, map x filter x fold, in the columns of FudanSELab/ClassEval.

    Returns `count` dicts: task_id, skeleton (a class with four methods to write: add, keeps, kept, result; and a
    subclass Rest with another keeps), class_name, solution_code, test (a class of unittest with eight tests); and two
    more columns for demonstrations: methods (dict of name -> source: kept calls keeps and result calls kept) and
    surplus (in three of ten tasks the name of a method, otherwise ""). Six tests use Rest, so they find methods that
    repeat what another one does. If `count` exceeds the number of compositions, they repeat with other words and
    numbers.
    """
    rng = random.Random(f"classes {split} {seed}")
    chosen = enumerate(_draw_compositions(split, count, rng))
    return [_make_class_task(f"sample/{split}/{i}", *composition, rng) for i, composition in chosen]


def _make_class_task(task_id, filter_name, map_name, fold_name, rng):
    filter_words, condition = FILTERS[filter_name]
    _, map_words, value = MAPS[map_name]
    fold_words, fold = FOLDS[fold_name]
    name = f"{fold_name} {filter_name} {map_words}".title().replace(" ", "")
    stored = eval(f"lambda x: {value}")
    keeps = eval(f"lambda x: {condition}")
    folded = eval(f"lambda items: {fold.format('*items')}")
    add_words, result_words = (w.format(map=map_words, fold=fold_words) for w in rng.choice(CLASS_WORDINGS))
    if "default=0" in fold:
        result_words += " It is 0 if there are none."

    bodies = {
        "add(self, x)": f"self.items.append({value})\n        return self.items[-1]",
        "keeps(self, x)": f"return {condition}",
        "kept(self)": "return [x for x in self.items if self.keeps(x)]",
        "result(self)": f"return {fold.format('*self.kept()')}",
    }
    words = [add_words, f"Whether x is one of the {filter_words}.", "The list of all items that keeps(x) accepts."]
    example = [stored(rng.randint(-9, 9)) for _ in range(3)]
    shown = f">>> c = {name}()\n        >>> c.items = {example}\n        >>> c.result()\n"
    shown += f"        {folded([x for x in example if keeps(x)])}"
    docstrings = [*(f'"""{w}"""' for w in words), f'"""{result_words}\n        {shown}\n        """']

    head = f"class {name}:\n    def __init__(self):\n        self.items = []\n\n"
    skeleton = "\n\n".join(f"    def {d}:\n        {text}" for d, text in zip(bodies, docstrings))
    methods = {d.split("(")[0]: f"def {d}:\n    {body.replace(' ' * 8, ' ' * 4)}\n" for d, body in bodies.items()}
    solution = "\n\n".join(f"    def {d}:\n        {body}" for d, body in bodies.items())

    tests = _make_class_tests(name, stored, keeps, folded, rng)
    cases = "\n\n".join(f"    def test_{i}(self):\n        {test}" for i, test in enumerate(tests))
    return {
        "task_id": task_id,
        "skeleton": f"{head}{skeleton}\n{REST.format(name)}",
        "class_name": name,
        "solution_code": f"{head}{solution}\n{REST.format(name)}",
        "test": f"import unittest\n\n\nclass Test{name}(unittest.TestCase):\n{cases}\n",
        "methods": methods,
        "surplus": rng.choice(list(methods)) if rng.random() < 0.3 else "",
    }


def _make_class_tests(name, stored, keeps, folded, rng):
    """The bodies of eight test methods: of add, of keeps, and six of Rest; the functions are what methods compute."""

    def rest(numbers):
        return [x for x in numbers if not keeps(x)]

    def telling(change):
        """Numbers, and what a change makes of them, of which the class and Rest have different results."""
        while True:
            numbers = [rng.randint(-9, 9) for _ in range(rng.randint(4, 7))]
            changed = list(map(change, numbers))
            if folded([x for x in changed if keeps(x)]) != folded(rest(changed)):
                return numbers, changed

    numbers, added = telling(stored)
    tests = [f"c = {name}()\n        self.assertEqual([c.add(x) for x in {numbers}], {added})"]
    accepted = [rng.choice([x for x in range(-9, 10) if keeps(x) is want]) for want in (True, False)]
    tests += [f"c = {name}()\n        self.assertEqual([c.keeps(x) for x in {accepted}], [True, False])"]
    for call, value_of in ("kept", list), ("kept", list), ("result", folded), ("result", folded):
        items, _ = telling(int)
        expected = value_of(rest(items))
        tests += [f"c = Rest()\n        c.items = {items}\n        self.assertEqual(c.{call}(), {expected!r})"]
    for _ in range(2):
        numbers, added = telling(stored)
        expected = folded([]), folded(rest(added))
        story = f"c = Rest()\n        results = [c.result()]\n        for x in {numbers}:\n            c.add(x)\n"
        tests += [f"{story}        self.assertEqual([*results, c.result()], {[*expected]})"]
    return tests


# ---------------------------------------------------------------- answers to imitate


def make_coding_answers(tasks, helpers, reads_code, seed):
    """(tasks, answers, flawed, corrected) for `demonstrate`; tasks of envs/coding.py, from make_coding_tasks.

    A flawed answer is the right one, except that one agent's completion is taken from another task; in four of five
    cases that task asks for the same function, and at most the split between helper and function differs.
    reads_code: whether agents read each other's code, so that a helper which is right for the function can stay, and
        the function is written anew for what it does
    """

    def answered(task):
        if not helpers:
            return [task["helper"].rstrip() + "\n\n\n" + task["main"]]
        codes = [re.sub(r"\baux\b", name, task["helper"]) for name in helpers]
        return [*codes, re.sub(r"\baux\b", helpers[0], task["main"])]

    rng = random.Random(f"flawed answers {seed}")
    answers = [answered(task) for task in tasks]
    flawed = []
    corrected = []
    same = {task["entry_point"]: [t for t in tasks if t["entry_point"] == task["entry_point"]] for task in tasks}
    for task, answer in zip(tasks, answers):
        other = rng.choice(same[task["entry_point"]] if rng.random() < 0.8 else tasks)
        place = rng.choice([len(answer) - 1, 0])  # the main function, or the helper that it uses
        others = [re.sub(rf"\b{other['entry_point']}\b", task["entry_point"], text) for text in answered(other)]
        flawed.append([*answer[:place], others[place], *answer[place + 1 :]])
        helper_stays = helpers and place == 0 and other["entry_point"] == task["entry_point"]
        corrected.append([others[0], *answer[1:-1], others[-1]] if reads_code and helper_stays else answer)
    return tasks, answers, flawed, corrected


def make_class_answers(rows, tasks, assigned, seed):
    """(tasks, answers, flawed, answers) for `demonstrate`; rows and tasks from make_class_tasks and envs/classeval.py.

    assigned: for each task and agent the methods that it is to write
    """
    rng = random.Random(f"flawed answers {seed}")
    answers = []
    flawed = []
    for row, task, shares in zip(rows, tasks, assigned):
        answers.append([])
        for names in shares:
            wanted = [*names, row["surplus"]] if names else []
            methods = [row["methods"][name] for name in task["methods"] if name in wanted]
            answers[-1].append("\n\n".join(methods))
    for task, answer in zip(tasks, answers):
        agent = rng.randrange(min(len(answer), len(task["methods"])))
        flawed.append([*answer[:agent], rng.choice(answers)[agent], *answer[agent + 1 :]])
    return tasks, answers, flawed, answers


def demonstrate(env, tasks, answers, flawed, corrected, choices=()):
    """The demonstrations() of an environment, given an answer to each task: list of dict(prompt, completion).

    flawed: for each task a first answer, used with two turns or more: if it fails, the next turn corrects it
    choices: for each task the actions of an unpaid turn that comes first, if there is one
    """
    histories = [[(actions, None)] for actions in choices] or [[]] * len(tasks)  # before the first answers
    steps = [None] * len(tasks)  # of the flawed answers
    if env.num_turns > len(histories[0]) + 1:
        steps = env.step(list(zip(tasks, histories, flawed)))
    pairs = []
    for task, history, answer, wrong, step, right in zip(tasks, histories, answers, flawed, steps, corrected):
        for actions, _ in history:
            pairs += pair_up(env.observe(task, []), actions)
        pairs += pair_up(env.observe(task, history), answer)
        if step and not step.done:
            pairs += pair_up(env.observe(task, [*history, (wrong, step)]), right)
    return pairs
