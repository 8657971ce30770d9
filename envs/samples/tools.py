"""Sample tasks for the environment tools, and what its agents could say: made offline from a seed.

The corpus is about 400 invented towns: no fact can be known without a search. Train and test combine known pieces in
ways that do not overlap (see envs/samples/__init__.py): syllables and questions, numbers and wordings.
"""

import json
import random
import re

from envs.samples import find_split, pair_up, read_list

STARTS = read_list(
    "Bel, Tar, Sel, Mor, Kan, Dor, Fen, Gal, Hol, Jun, Lor, Nar, Pol, Bri, Ral, Sul, Tem, Vor, Wes, Zan"
)
ENDS = read_list("ba, dun, fel, gor, ik, lan, mar, nor, os, pen, ra, sta, tin, ul, va, wick, ym, zo, eth, ard")
THINGS = read_list("jars, pens, cups, maps, lamps, rings, boats, coats")
PRODUCTS = {"{} times {}, plus {}": "{} * {} + {}", "{} times {}, minus {}": "{} * {} - {}"}
QUESTIONS = {  # kind -> (question, plan)
    "founded": ("When was {town} founded?", "Search for {town}."),
    "mayor": ("Where does the mayor of {town} come from?", "Search for {town} and its mayor."),
    "hop": (
        "When was the home town of the mayor of {town} founded?",
        "Search for {town}, then for the home town of its mayor.",
    ),
    "years": (
        "How many years lie between the founding of {town} and of the home town of its mayor?",
        "Search for {town} and the home town of its mayor, then compare.",
    ),
}
TOOLS = "calculator search read_file"


def _make_towns(seed):
    """dict(name -> (year of its founding, where its mayor comes from)): every town is home of one mayor."""
    rng = random.Random(f"towns {seed}")
    names = [start + end for start in STARTS for end in ENDS]
    rng.shuffle(names)
    return {name: (rng.randint(1000, 1999), home) for name, home in zip(names, [*names[1:], names[0]])}


def read_articles(path, seed):
    """What can be searched: the lines of a text file, or without a path an article about each town."""
    if not path:
        article = "{0} was founded in {1}. The mayor of {0} comes from {2}."
        return [article.format(town, year, home) for town, (year, home) in _make_towns(seed).items()]
    with open(path, encoding="utf-8") as file:
        return file.read().splitlines()


def make_tool_tasks(split, count, seed, most_calls):
    """`count` tasks that take at most `most_calls` calls, dict with the columns that envs/tools.py reads.

    question, answer, tools, kind, needed (the tool of each call), files; and calls (those needed) and plan, which are
    for demonstrations only. No test task repeats another. Training tasks may: models/tiny was trained on them.
    """
    rng = random.Random(f"tools {split} {seed}")
    corpus = _make_towns(seed)
    tasks = []
    while len(tasks) < count:
        kind = rng.choice(["product", "column", *QUESTIONS])
        make = {"product": _make_product, "column": _make_column}.get(kind, _make_question)
        choices, parts = make(kind, corpus, rng)
        if find_split(*choices) != split or len(parts["calls"]) > most_calls:
            continue
        needed = " ".join(call["name"] for call in parts["calls"])
        task = {"kind": kind, "tools": TOOLS, "needed": needed, "files": {}, **parts}
        if split == "train" or task not in tasks:
            tasks.append(task)
    return tasks


def _make_call(name, argument, text):
    return {"name": name, "arguments": {argument: text}}


def _make_product(kind, corpus, rng):
    numbers = [rng.randint(100, 999), rng.randint(12, 99), rng.randint(12, 99)]
    wording = rng.randrange(len(PRODUCTS))
    words, expression = (text.format(*numbers) for text in list(PRODUCTS.items())[wording])
    task = {
        "question": f"What is {words}?",
        "answer": str(eval(expression)),
        "calls": [_make_call("calculator", "expression", expression)],
        "plan": "Use the calculator.",
    }
    return [*numbers, wording], task


def _make_column(kind, corpus, rng):
    numbers = [rng.randint(12, 499) for _ in range(rng.randint(3, 4))]
    name = f"{rng.choice(THINGS)}.csv"
    lines = [str(number) for number in numbers]
    task = {
        "question": f"What is the sum of the numbers in {name}?",
        "answer": str(sum(numbers)),
        "calls": [_make_call("read_file", "name", name), _make_call("calculator", "expression", " + ".join(lines))],
        "files": {name: "\n".join(lines)},
        "plan": f"Read {name}, then add.",
    }
    return numbers, task


def _make_question(kind, corpus, rng):
    start = rng.randrange(len(STARTS))
    end = rng.randrange(len(ENDS))
    town = STARTS[start] + ENDS[end]
    year, home = corpus[town]
    home_year, _ = corpus[home]
    searches = [_make_call("search", "query", name) for name in (town, home)]
    compare = _make_call("calculator", "expression", f"abs({year} - {home_year})")
    answer, calls = {
        "founded": (year, searches[:1]),
        "mayor": (home, searches[:1]),
        "hop": (home_year, searches),
        "years": (abs(year - home_year), [*searches, compare]),
    }[kind]
    question, plan = (text.format(town=town) for text in QUESTIONS[kind])
    task = {"question": question, "answer": str(answer), "calls": calls, "plan": plan}
    return [start, end, list(QUESTIONS).index(kind)], task


# ---------------------------------------------------------------- what agents could say


def _write_completion(role, task, messages, plan, tasks, rng):
    """A text to imitate, for the turn of a planner, a caller, an answerer or one who does both ("alone").

    messages: the dicts (call, output) so far; plan: what the planner wrote, if there is one. Some three of ten texts
    are flawed, whatever the prompt: a plan or a call for another task (which a caller may also have taken from a wrong
    plan), a malformed or superfluous call, DONE too early, a wrong number.
    """
    flawed = rng.random() < 0.28
    other = rng.choice(tasks)
    if role == "planner":
        return (other if flawed else task)["plan"]
    done = [message["call"] for message in messages]
    due = [call for call in task["calls"] if call not in done]
    if role == "answerer" or (role == "alone" and not due):
        outputs = "\n".join(message["output"] for message in messages)
        candidates = re.findall(r"\d+|[A-Z][a-z]+", outputs) or [other["answer"]]
        present = re.search(rf"\b{task['answer']}\b", outputs)
        answer = task["answer"] if present and not flawed else rng.choice(candidates)
        return f"\\boxed{{{answer}}}"
    if due and not done and plan and plan != task["plan"] and rng.random() < 0.5:
        planned = [call for each in tasks if each["plan"] == plan for call in each["calls"]]
        due = planned[:1] or due
    if flawed:
        early = due and role == "caller" and rng.random() < 0.3
        mistakes = [*other["calls"][:1], *done[-1:], None]
        due = [] if early else [rng.choice(mistakes)]
    if not due:
        return "DONE"
    text = json.dumps(due[0] or other["calls"][0])
    return f"<tool_call>{text if due[0] else text[:-1]}</tool_call>"


def demonstrate(env, tasks, seed):
    """list of dict(prompt, completion): a branch of each task, every turn of it."""
    rng = random.Random(f"said {seed}")
    pairs = []
    branches = [(task, []) for task in tasks]
    while branches:
        joint = []
        for task, history in branches:
            plan = ""
            if env.num_agents == 3 and history:
                (plan, *_), _ = history[0]
            messages = [step.feedback for _, step in history if step.feedback["output"]]
            text = _write_completion(env.find_role(history), task, messages, plan, tasks, rng)
            texts = [text] * env.num_agents  # all are silent except one
            joint.append((task, history, texts))
            pairs += pair_up(env.observe(task, history), texts)
        steps = env.step(joint)
        branches = [(task, [*turns, (a, step)]) for (task, turns, a), step in zip(joint, steps) if not step.done]
    return pairs
