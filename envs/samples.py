"""Sample tasks made offline from small grammars: posts to summarize, abstracts to expand, functions and classes to
write.

Everything follows from `split`, `count` and `seed`. Train and test differ by composition, whatever the seed: certain
combinations of choices (person x problem x attempt, method x obstacle x field, filter x map x fold) occur only in
"test", others only in "validation". Each choice, and each pair of choices, also occurs in "train", so test asks for a
new combination of known pieces.
"""

import itertools
import random
import re
from collections.abc import Iterator


def _split_of(*choices: int) -> str:
    """The split of a combination of three choices, given as indices: test and validation get a sixth each."""
    return {0: "test", 1: "validation"}.get(sum(choices) % 6, "train")


def _check_split(split: str) -> None:
    if split not in ("train", "validation", "test"):
        raise ValueError(f"A split is 'train', 'validation' or 'test', not {split!r}.")


# ---------------------------------------------------------------- posts

PERSONS = {  # person -> subreddit
    "roommate": "roommates",
    "neighbor": "neighbors",
    "landlord": "neighbors",
    "sister": "family",
    "brother": "family",
    "mother": "family",
    "cousin": "family",
    "girlfriend": "relationships",
    "boyfriend": "relationships",
    "friend": "relationships",
    "boss": "work",
    "coworker": "work",
}
PROBLEMS = [
    "plays loud music at night",
    "keeps borrowing money from me",
    "reads my private messages",
    "never pays the shared bills",
    "forgets every single promise",
    "talks about me behind my back",
    "leaves dirty dishes everywhere",
    "is always an hour late",
    "ignores all my calls",
    "brings strangers into the house",
    "lies about small things",
    "breaks things and hides it",
]
DURATIONS = ["two weeks", "a month", "three months", "half a year", "a year", "two years", "ten days", "five years"]
FEELINGS = ["angry", "tired", "lonely", "confused", "guilty", "nervous", "hurt", "ashamed"]
ATTEMPTS = [
    "asked them to stop",
    "wrote a long letter",
    "set a clear rule",
    "offered to help",
    "made a shared plan",
    "complained to a manager",
    "stayed silent",
    "bought a small gift",
]
OUTCOMES = [
    "nothing changed",
    "it only got worse",
    "they laughed at me",
    "they cried and apologized",
    "we had a big fight",
    "it helped for one week",
    "they stopped talking to me",
    "they promised to change",
]
QUESTIONS = [
    "move out",
    "end it now",
    "ask a counselor",
    "say it again",
    "forgive them",
    "wait a little longer",
    "tell the others",
    "look for a new place",
]

POST_WORDINGS = [
    "My {person} {problem}. This has been going on for {duration} and I feel {feeling}. I {attempt}, but {outcome}. "
    "Should I {question}?",
    "I feel {feeling}. For {duration} now my {person} {problem}. I {attempt} and {outcome}. "
    "Is it right to {question}?",
    "I need advice. My {person} {problem} and it makes me {feeling}. It started {duration} ago. I {attempt}. "
    "After that {outcome}. Do I {question}?",
]

# One list per fact, in the order of a summary. Some sentences get opening words from OPENERS.
SENTENCES = [
    ["My {person} {problem}.", "The post is about a {person} who {problem}.", "The writer's {person} {problem}."],
    [
        "It has been going on for {duration}.",
        "This started {duration} ago and the writer feels {feeling}.",
        "I have felt {feeling} for {duration}.",
    ],
    ["I {attempt}.", "The writer {attempt} to make things better.", "I {attempt} and hoped for a change."],
    ["After that {outcome}.", "In the end {outcome}.", "The answer was clear and {outcome}."],
    ["Should I {question}?", "Now the question is whether to {question}.", "I wonder if I should {question}."],
]
OPENERS = [
    ["In short,", "Basically,", "In general,"],
    ["In fact,", "Meanwhile,", "Moreover,"],
    ["Therefore", "At first", "For example,"],
    ["However,", "As a result,", "Unfortunately,"],
    ["Finally,", "Overall,", "For this reason,"],
]


def _post_choices(split: str, count: int, rng: random.Random) -> list[dict]:
    """`count` different combinations of facts; person, problem and attempt decide the split."""
    persons = list(PERSONS)
    chosen = []
    seen = set()
    while len(chosen) < count:
        p, q, a = (rng.randrange(len(options)) for options in (persons, PROBLEMS, ATTEMPTS))
        if _split_of(p, q, a) != split:
            continue
        facts = {
            "person": persons[p],
            "problem": PROBLEMS[q],
            "attempt": ATTEMPTS[a],
            "duration": rng.choice(DURATIONS),
            "feeling": rng.choice(FEELINGS),
            "outcome": rng.choice(OUTCOMES),
            "question": rng.choice(QUESTIONS),
        }
        if tuple(facts.values()) not in seen:
            seen.add(tuple(facts.values()))
            chosen.append(facts)
    return chosen


def _post(facts: dict, rng: random.Random) -> str:
    body = rng.choice(POST_WORDINGS).format(**facts)
    title = f"My {facts['person']} {facts['problem']}"
    return f"SUBREDDIT: r/{PERSONS[facts['person']]}\n\nTITLE: {title}\n\nPOST: {body}\n\nTL;DR:"


def _summary(facts: dict, num_sentences: int, opener_rate: float, rng: random.Random) -> str:
    """`num_sentences` of the five facts, in order, one sentence each."""
    sentences = []
    for k in sorted(rng.sample(range(len(SENTENCES)), num_sentences)):
        sentence = rng.choice(SENTENCES[k]).format(**facts)
        if rng.random() < opener_rate:
            first = sentence if sentence.startswith("I ") else sentence[0].lower() + sentence[1:]
            sentence = f"{rng.choice(OPENERS[k])} {first}"
        sentences.append(sentence)
    return " ".join(sentences)


def posts(split: str, count: int, seed: int) -> list[dict]:
    """Posts in the columns of trl-lib/tldr.

    Returns `count` dicts: prompt ("SUBREDDIT: ... TITLE: ... POST: ... TL;DR:") and completion (a summary of two
    sentences). Raises ValueError for any split but "train", "validation" and "test".
    """
    _check_split(split)
    rng = random.Random(f"posts {split} {seed}")
    return [
        {"prompt": _post(facts, rng), "completion": _summary(facts, 2, 0.0, rng)}
        for facts in _post_choices(split, count, rng)
    ]


def demonstrated_posts(count: int, per_post: int, seed: int) -> list[dict]:
    """Train posts with texts to imitate: prompt, completion as in `posts`, and `demonstrations`.

    The demonstrations of a post are `per_post` summaries of 1 to 5 sentences, drawn independently of each other; about
    a quarter of the sentences open with a transition word. They do not teach which agent should be brief.
    """
    rng = random.Random(f"demonstrated posts {seed}")
    return [
        {
            "prompt": _post(facts, rng),
            "completion": _summary(facts, 2, 0.0, rng),
            "demonstrations": [_summary(facts, rng.randint(1, 5), 0.25, rng) for _ in range(per_post)],
        }
        for facts in _post_choices("train", count, rng)
    ]


# ---------------------------------------------------------------- abstracts

METHODS = [
    "a simple linear model",
    "a small neural network",
    "a random walk",
    "a greedy search",
    "a mixture of experts",
    "a tree of decisions",
    "a sparse matrix method",
    "a sampling scheme",
]
OBSTACLES = [
    "missing data",
    "slow convergence",
    "label noise",
    "high cost",
    "class imbalance",
    "constant change",
    "model error",
    "signal delay",
    "low resolution",
]
FIELDS = [
    "weather forecasts",
    "traffic lights",
    "protein maps",
    "star catalogs",
    "translation systems",
    "power networks",
    "crop yields",
    "river floods",
    "crystal structures",
]
FINDINGS = [
    "the error falls by half",
    "ten samples are enough",
    "the cost grows only slowly",
    "the result holds for all sizes",
    "old methods fail early",
    "the answer does not depend on the start",
]
CHECKS = ["a public benchmark", "three real records", "a long simulation", "a field study", "a large survey"]

ABSTRACT_WORDINGS = [
    "We study {obstacle} in {field}. We propose {method} and test it on {check}. We find that {finding}.",
    "In {field}, {obstacle} is a common problem. Here we use {method}. On {check} we show that {finding}.",
    "This paper presents {method} for {field} with {obstacle}. With {check} we show that {finding}.",
]

# For each part of an introduction, its sentences in order.
INTRODUCTION = [
    [
        "Over many years {field} have become an important subject of research in science and in daily life.",
        "Most of the work on {field} assumes that everything that matters can be measured without any error.",
        "In practice, however, those who work with {field} often have to deal with {obstacle} from the first day.",
        "Earlier studies described {obstacle} in detail, but they did not say what should be done about it.",
    ],
    [
        "This is a serious problem because {obstacle} can hide the very effect that we would like to see.",
        "As a result, decisions about {field} are still made by hand, which is slow and sometimes wrong.",
        "A better answer to {obstacle} would therefore help everyone who has to rely on {field} in their work.",
        "We ask whether there is a way to handle {obstacle} that is easy to explain and cheap to use.",
    ],
    [
        "To this end we propose {method}, which takes {obstacle} into account from the beginning.",
        "First we describe {method} in general, and then we show how its few parameters can be chosen.",
        "We test {method} on {check}, and compare it with what is commonly used for {field} today.",
        "In particular, we look at how {method} behaves when {obstacle} becomes more and more severe.",
    ],
    [
        "Our main result is that {finding}, and that this remains true when the setting is changed.",
        "Since {finding}, it seems possible to use {method} for {field} without any further preparation.",
        "For example, those who plan with {field} could spend less time on {obstacle} and more on what follows.",
        "Although our study is limited to {check}, we expect that {method} is of use for similar questions.",
    ],
]


def _abstract_choices(split: str, count: int, rng: random.Random) -> list[dict]:
    """`count` sets of facts; method, obstacle and field decide the split."""
    chosen = []
    while len(chosen) < count:
        m, o, f = (rng.randrange(len(options)) for options in (METHODS, OBSTACLES, FIELDS))
        if _split_of(m, o, f) == split:
            facts = {"method": METHODS[m], "obstacle": OBSTACLES[o], "field": FIELDS[f]}
            chosen.append({**facts, "finding": rng.choice(FINDINGS), "check": rng.choice(CHECKS)})
    return chosen


def _abstract(number: int, facts: dict, rng: random.Random) -> dict:
    return {"article_id": f"sample.{number}", "abstract_text": rng.choice(ABSTRACT_WORDINGS).format(**facts)}


def abstracts(split: str, count: int, seed: int) -> list[dict]:
    """Abstracts in the columns of OpenMLRL/arXiv_abstract that are read: article_id and abstract_text.

    Returns `count` dicts. Raises ValueError for any split but "train", "validation" and "test".
    """
    _check_split(split)
    rng = random.Random(f"abstracts {split} {seed}")
    return [_abstract(i, facts, rng) for i, facts in enumerate(_abstract_choices(split, count, rng))]


def demonstrated_abstracts(count: int, per_abstract: int, seed: int) -> list[dict]:
    """Train abstracts with texts to imitate: the columns of `abstracts`, and `demonstrations`.

    The demonstrations of an abstract are `per_abstract` paragraphs of 7 to 14 sentences (126 to 284 words), drawn
    independently of each other from all parts of an introduction: agents that imitate them still have to learn to
    keep to their own parts, and to the length that the reward asks for.
    """
    rng = random.Random(f"demonstrated abstracts {seed}")
    sentences = [sentence for part in INTRODUCTION for sentence in part]
    return [
        {
            **_abstract(i, facts, rng),
            "demonstrations": [
                " ".join(sentences[k].format(**facts) for k in sorted(rng.sample(range(16), rng.randint(7, 14))))
                for _ in range(per_abstract)
            ],
        }
        for i, facts in enumerate(_abstract_choices("train", count, rng))
    ]


# ---------------------------------------------------------------- functions to write

FILTERS = {  # name -> (words, condition on x)
    "even": ("even numbers", "x % 2 == 0"),
    "odd": ("odd numbers", "x % 2 == 1"),
    "positive": ("positive numbers", "x > 0"),
    "negative": ("negative numbers", "x < 0"),
    "nonzero": ("nonzero numbers", "x != 0"),
    "third": ("multiples of three", "x % 3 == 0"),
}
MAPS = {  # name -> (words, value of x)
    "squares": ("squares", "x * x"),
    "cubes": ("cubes", "x * x * x"),
    "doubles": ("doubles", "2 * x"),
    "halves": ("floored halves", "x // 2"),
    "negations": ("negations", "-x"),
    "successors": ("successors", "x + 1"),
    "predecessors": ("predecessors", "x - 1"),
    "sizes": ("absolute values", "abs(x)"),
}
FOLDS = {  # name -> (words, expression around a list)
    "sum": ("sum", "sum([{}])"),
    "largest": ("largest", "max([{}], default=0)"),
    "smallest": ("smallest", "min([{}], default=0)"),
    "list": ("list", "[{}]"),
    "sorted": ("sorted list", "sorted([{}])"),
    "distinct": ("distinct count", "len(set([{}]))"),
}
# for the tests of functions whose own lists do not tell a right answer from one that lacks a part
_drawn = random.Random(0)
SHORT_LISTS = [[_drawn.randint(-3, 3) for _ in range(_drawn.randint(1, 5))] for _ in range(200)]
TASK_WORDINGS = [
    "Return the {fold} of the {map} of the {filter}.",
    "Take the {filter}, compute their {map} and return the {fold}.",
    "Compute the {fold} of all {map} of {filter} in the list.",
]


def coding_tasks(split: str, count: int, seed: int) -> list[dict]:
    """Functions over lists of integers, filter x map x fold, in the columns of openai_humaneval.

    Returns `count` dicts: task_id, prompt (signature and docstring with two >>> examples), entry_point,
    canonical_solution (the body), test (`def check(candidate)` with five asserts, none of them a docstring example; an
    answer without the filter or the map fails one, where that makes it wrong), and two more columns with a correct
    answer by two agents: helper (source of `aux`) and main (the task's function, without aux). In 65 of 100 tasks main
    calls aux. The convention for aux varies: in four of ten tasks it is the map, in three the filter's condition, in
    three the whole filter. So agents that each imitate their column see only good answers, but still have to agree on
    a convention. If `count` exceeds the number of compositions (192 train, 48 test), they repeat with other words and
    numbers. Raises ValueError for any split but "train", "validation" and "test".
    """
    rng = random.Random(f"coding {split} {seed}")
    chosen = enumerate(_compositions(split, count, rng))
    return [_coding_task(f"sample/{split}/{i}", *composition, rng) for i, composition in chosen]


def _compositions(split: str, count: int, rng: random.Random) -> Iterator[tuple[str, str, str]]:
    """`count` combinations of filter, map and fold: each one of the split occurs once before any repeats.

    A new round is drawn only when the last one is used up, since the tasks draw from `rng` in between.
    """
    _check_split(split)
    indices = itertools.product(range(len(FILTERS)), range(len(MAPS)), range(len(FOLDS)))
    compositions = [c for c, i in zip(itertools.product(FILTERS, MAPS, FOLDS), indices) if _split_of(*i) == split]
    while count > 0:
        chosen = rng.sample(compositions, min(len(compositions), count))
        yield from chosen
        count -= len(chosen)


def _coding_task(task_id: str, filter_name: str, map_name: str, fold_name: str, rng: random.Random) -> dict:
    name = f"{fold_name}_{filter_name}_{map_name}"
    condition = FILTERS[filter_name][1]
    value = MAPS[map_name][1]
    expression = FOLDS[fold_name][1].format(f"{value} for x in numbers if {condition}")
    reference = eval(f"lambda numbers: {expression}")
    inputs = [[rng.randint(-9, 9) for _ in range(rng.randint(5, 8))] for _ in range(6)]
    examples = [inputs[0][:3], inputs[1][:4]]
    # An answer without the filter, without the map or with x itself as the condition (what is left of a helper that
    # only returns its argument) fails a test, unless it is right for all of these lists.
    telling = []
    for part in (f"{value} for x in numbers", f"x for x in numbers if {condition}", f"{value} for x in numbers if x"):
        wrong = eval(f"lambda numbers: {FOLDS[fold_name][1].format(part)}")
        tells = (numbers for numbers in (*inputs[2:], *SHORT_LISTS) if wrong(numbers) != reference(numbers))
        telling += [numbers for numbers in itertools.islice(tells, 1) if numbers not in telling]
    asserted = [[], *telling, *(numbers for numbers in inputs[2:] if numbers not in telling)][:5]
    words = rng.choice(TASK_WORDINGS).format(
        fold=FOLDS[fold_name][0], map=MAPS[map_name][0], filter=FILTERS[filter_name][0]
    )
    if "default=0" in expression:
        words += " It is 0 if there are none."
    # convention -> (source of aux, the main function's expression that calls it)
    convention = rng.choices(["map", "condition", "filter"], weights=[4, 3, 3])[0]
    helper, calling = {
        "map": (f"def aux(x):\n    return {value}\n", f"aux(x) for x in numbers if {condition}"),
        "condition": (f"def aux(x):\n    return {condition}\n", f"{value} for x in numbers if aux(x)"),
        "filter": (
            f"def aux(numbers):\n    return [x for x in numbers if {condition}]\n",
            f"{value} for x in aux(numbers)",
        ),
    }[convention]
    answer = FOLDS[fold_name][1].format(calling) if rng.random() < 0.65 else expression
    shown = "".join(f"    >>> {name}({numbers})\n    {reference(numbers)}\n" for numbers in examples)
    asserts = "".join(f"    assert candidate({numbers}) == {reference(numbers)}\n" for numbers in asserted)
    return {
        "task_id": task_id,
        "prompt": f'def {name}(numbers):\n    """{words}\n\n{shown}    """\n',
        "entry_point": name,
        "canonical_solution": f"    return {expression}\n",
        "test": f"def check(candidate):\n{asserts}",
        "helper": helper,
        "main": f"def {name}(numbers):\n    return {answer}\n",
    }


# ---------------------------------------------------------------- classes to write

CLASS_WORDINGS = [
    ("Store the {map} of x and return it.", "The {fold} of what kept() returns."),
    ("Keep the {map} of x in items and return it.", "Return the {fold} of kept()."),
]
SINGULAR = {  # name of a map -> words
    "squares": "square",
    "cubes": "cube",
    "doubles": "double",
    "halves": "floored half",
    "negations": "negation",
    "successors": "successor",
    "predecessors": "predecessor",
    "sizes": "absolute value",
}


def class_tasks(split: str, count: int, seed: int) -> list[dict]:
    """Classes that store, select and sum up numbers, map x filter x fold, in the columns of FudanSELab/ClassEval.

    Returns `count` dicts: task_id, skeleton (a class with four methods to write: add, keeps, kept, result),
    class_name, solution_code, test (a class of unittest with eight tests); and two more columns for demonstrations:
    methods (dict of name -> source; in half of the tasks kept calls keeps and result calls kept) and surplus (in three
    of ten tasks the name of a method, otherwise ""). If `count` exceeds the number of compositions, they repeat with
    other words and numbers. Raises ValueError for any split but "train", "validation" and "test".
    """
    rng = random.Random(f"classes {split} {seed}")
    chosen = enumerate(_compositions(split, count, rng))
    return [_class_task(f"sample/{split}/{i}", *composition, rng) for i, composition in chosen]


def _class_task(task_id: str, filter_name: str, map_name: str, fold_name: str, rng: random.Random) -> dict:
    name = "".join(part.capitalize() for part in (fold_name, filter_name, map_name))
    (filter_words, condition), value = FILTERS[filter_name], MAPS[map_name][1]
    fold_words, fold = FOLDS[fold_name]
    stored = eval(f"lambda x: {value}")
    keeps = eval(f"lambda x: {condition}")
    folded = eval(f"lambda items: {fold.format('*items')}")
    add_words, result_words = (w.format(map=SINGULAR[map_name], fold=fold_words) for w in rng.choice(CLASS_WORDINGS))
    if "default=0" in fold:
        result_words += " It is 0 if there are none."

    inline = f"x for x in self.items if {condition}"
    asking = rng.random() < 0.5
    bodies = {
        "add(self, x)": f"self.items.append({value})\n        return self.items[-1]",
        "keeps(self, x)": f"return {condition}",
        "kept(self)": "return [x for x in self.items if self.keeps(x)]" if asking else f"return [{inline}]",
        "result(self)": f"return {fold.format('*self.kept()' if asking else inline)}",
    }
    words = [add_words, f"Whether x is one of the {filter_words}.", "The list of all items that keeps(x) accepts."]
    numbers = [[rng.randint(-9, 9) for _ in range(rng.randint(4, 7))] for _ in range(5)]
    example = [stored(x) for x in numbers[0][:3]]
    shown = f">>> c = {name}()\n        >>> c.items = {example}\n        >>> c.result()\n"
    shown += f"        {folded([x for x in example if keeps(x)])}"
    docstrings = [*(f'"""{w}"""' for w in words), f'"""{result_words}\n        {shown}\n        """']

    head = f"class {name}:\n    def __init__(self):\n        self.items = []\n\n"
    skeleton = "\n\n".join(f"    def {d}:\n        {text}" for d, text in zip(bodies, docstrings))
    methods = {d.split("(")[0]: f"def {d}:\n    {body.replace(' ' * 8, ' ' * 4)}\n" for d, body in bodies.items()}
    solution = "\n\n".join(f"    def {d}:\n        {body}" for d, body in bodies.items())
    tests = [f"self.assertEqual(c.add({x}), {stored(x)})" for x in numbers[1][:2]]
    accepted = [rng.choice([x for x in range(-9, 10) if keeps(x) is want]) for want in (True, False)]
    tests += [f"self.assertIs(c.keeps({x}), {keeps(x)})" for x in accepted]
    items = numbers[2]
    tests += [f"c.items = {items}\n        self.assertEqual(c.kept(), {[x for x in items if keeps(x)]})"]
    for items in numbers[3], []:
        expected = folded([x for x in items if keeps(x)])
        tests += [f"c.items = {items}\n        self.assertEqual(c.result(), {expected!r})"]
    items = numbers[4]
    expected = folded([stored(x) for x in items if keeps(stored(x))])
    tests += [f"for x in {items}:\n            c.add(x)\n        self.assertEqual(c.result(), {expected!r})"]
    cases = "\n\n".join(
        f"    def test_{i}(self):\n        c = {name}()\n        {test}" for i, test in enumerate(tests)
    )
    return {
        "task_id": task_id,
        "skeleton": f"{head}{skeleton}\n",
        "class_name": name,
        "solution_code": f"{head}{solution}\n",
        "test": f"import unittest\n\n\nclass Test{name}(unittest.TestCase):\n{cases}\n",
        "methods": methods,
        "surplus": rng.choice(list(methods)) if rng.random() < 0.3 else "",
    }


# ---------------------------------------------------------------- answers to imitate


def coding_answers(tasks, helpers, seed):
    """(tasks, answers, flawed answers) for `demonstrated`; tasks are those of envs/coding.py, from coding_tasks.

    A flawed answer is the right one, except that one agent's completion is taken from another task; in half of the
    cases that task asks for the same function, and at most the split between helper and function differs.
    """

    def answered(task):
        if not helpers:
            return [task["helper"].rstrip() + "\n\n\n" + task["main"]]
        codes = [re.sub(r"\baux\b", name, task["helper"]) for name in helpers]
        return [*codes, re.sub(r"\baux\b", helpers[0], task["main"])]

    rng = random.Random(f"flawed answers {seed}")
    flawed = []
    same = {task["entry_point"]: [t for t in tasks if t["entry_point"] == task["entry_point"]] for task in tasks}
    for task in tasks:
        answer = answered(task)
        other = rng.choice(same[task["entry_point"]] if rng.random() < 0.5 else tasks)
        place = rng.choice([len(answer) - 1, 0])  # the main function, or the helper that it uses
        answer[place] = re.sub(rf"\b{other['entry_point']}\b", task["entry_point"], answered(other)[place])
        flawed.append(answer)
    return tasks, [answered(task) for task in tasks], flawed


def class_answers(rows, tasks, assigned, seed):
    """(tasks, answers, flawed answers) for `demonstrated`; rows and tasks from class_tasks and envs/classeval.py.

    assigned: (task) -> for each agent the methods that it is to write
    """
    rng = random.Random(f"flawed answers {seed}")
    answers = []
    flawed = []
    for row, task in zip(rows, tasks):
        answers.append([])
        for names in assigned(task):
            surplus = [row["surplus"]] if names else []
            methods = [row["methods"][name] for name in task["methods"] if name in [*names, *surplus]]
            answers[-1].append("\n\n".join(methods))
    for task, answer in zip(tasks, answers):
        agent = rng.randrange(min(len(answer), len(task["methods"])))
        flawed.append([*answer[:agent], rng.choice(answers)[agent], *answer[agent + 1 :]])
    return tasks, answers, flawed


def demonstrated(env, tasks, answers, flawed):
    """The demonstrations() of an environment, given an answer to each task: list of dict(prompt, completion).

    flawed: for each task a first-turn answer, used with two turns or more: if it fails, a second turn corrects it
    """
    histories = [[[]] for _ in tasks]
    if env.num_turns > 1:
        steps = env.step([(task, [], answer) for task, answer in zip(tasks, flawed)])
        histories = [[[]] if step.done else [[], [step]] for step in steps]
    return [
        {"prompt": prompt, "completion": code}
        for task, answer, turns in zip(tasks, answers, histories)
        for history in turns
        for prompt, code in zip(env.observe(task, history), answer)
    ]
