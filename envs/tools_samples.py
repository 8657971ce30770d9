"""Sample tasks for the environment tools, and what its agents could say: made offline from a seed.

400 invented towns make the corpus, so that no fact can be known without a search. As in envs/samples.py, train and
test combine known pieces in ways that do not overlap: syllables and questions, numbers and wordings.
"""

import json
import random
import re

from envs.samples import _split_of

STARTS = re.findall(r"\w+", "Bel Tar Sel Mor Kan Dor Fen Gal Hol Jun Lor Nar Pol Bri Ral Sul Tem Vor Wes Zan")
ENDS = re.findall(r"\w+", "ba dun fel gor ik lan mar nor os pen ra sta tin ul va wick ym zo eth ard")
THINGS = re.findall(r"\w+", "jars pens cups maps lamps rings boats coats")
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


def towns(seed):
    """dict(name -> (year of its founding, where its mayor comes from)): every town is home of one mayor."""
    rng = random.Random(f"towns {seed}")
    names = [start + end for start in STARTS for end in ENDS]
    rng.shuffle(names)
    return {name: (rng.randint(1000, 1999), home) for name, home in zip(names, [*names[1:], names[0]])}


def articles(path, seed):
    """What can be searched: the lines of a text file, or without a path what is known of the towns."""
    if not path:
        known = "{0} was founded in {1}. The mayor of {0} comes from {2}."
        return [known.format(town, year, home) for town, (year, home) in towns(seed).items()]
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--env-kwargs corpus {path}: {error}; give a text file, one article a line.") from None


def tool_tasks(split, count, seed, most_calls):
    """`count` tasks that take at most `most_calls` calls, dict with the columns that envs/tools.py reads.

    question, answer, tools, kind, needed (the tool of each call), files; and calls (those needed) and plan, which are
    for demonstrations only.
    """
    rng, known, tasks = random.Random(f"tools {split} {seed}"), towns(seed), []
    while len(tasks) < count:
        kind = rng.choice(["product", "column", *QUESTIONS])
        make = {"product": _product, "column": _column}.get(kind, _question)
        choices, task = make(kind, known, rng)
        if _split_of(*choices) == split and len(task["calls"]) <= most_calls:
            needed = " ".join(call["name"] for call in task["calls"])
            tasks.append({"kind": kind, "tools": TOOLS, "needed": needed, "files": {}, **task})
    return tasks


def _call(name, argument, text):
    return {"name": name, "arguments": {argument: text}}


def _product(kind, known, rng):
    numbers = [rng.randint(100, 999), rng.randint(12, 99), rng.randint(12, 99)]
    wording = rng.randrange(len(PRODUCTS))
    asked, expression = (text.format(*numbers) for text in list(PRODUCTS.items())[wording])
    calls = [_call("calculator", "expression", expression)]
    task = {"question": f"What is {asked}?", "answer": str(eval(expression)), "calls": calls}
    return [*numbers, wording], task | {"plan": "Use the calculator."}


def _column(kind, known, rng):
    numbers, name = [rng.randint(12, 499) for _ in range(rng.randint(3, 4))], f"{rng.choice(THINGS)}.csv"
    calls = [_call("read_file", "name", name), _call("calculator", "expression", " + ".join(map(str, numbers)))]
    task = {"question": f"What is the sum of the numbers in {name}?", "answer": str(sum(numbers)), "calls": calls}
    return numbers, task | {"files": {name: "\n".join(map(str, numbers))}, "plan": f"Read {name}, then add."}


def _question(kind, known, rng):
    start, end = rng.randrange(len(STARTS)), rng.randrange(len(ENDS))
    town = STARTS[start] + ENDS[end]
    year, home = known[town]
    searches = [_call("search", "query", name) for name in (town, home)]
    compare = _call("calculator", "expression", f"abs({year} - {known[home][0]})")
    answer, calls = {
        "founded": (year, searches[:1]),
        "mayor": (home, searches[:1]),
        "hop": (known[home][0], searches),
        "years": (abs(year - known[home][0]), [*searches, compare]),
    }[kind]
    question, plan = (text.format(town=town) for text in QUESTIONS[kind])
    task = {"question": question, "answer": str(answer), "calls": calls, "plan": plan}
    return [start, end, list(QUESTIONS).index(kind)], task


# ---------------------------------------------------------------- what agents could say


def said(role, task, made, plan, tasks, rng):
    """A text to imitate, for the turn of a planner, a caller, an answerer or one who does both ("alone").

    made: the dicts (call, output) so far; plan: what the planner said, if there is one. Some three of ten texts are
    flawed, whatever the prompt: a plan or a call for another task (which a caller may also have taken from a wrong
    plan), a malformed or superfluous call, DONE too early, a wrong number.
    """
    flawed, other = rng.random() < 0.28, rng.choice(tasks)
    if role == "planner":
        return (other if flawed else task)["plan"]
    done = [call["call"] for call in made]
    due = [call for call in task["calls"] if call not in done]
    if role == "answerer" or (role == "alone" and not due):
        outputs = "\n".join(call["output"] for call in made)
        found = re.findall(r"\d+|[A-Z][a-z]+", outputs) or [other["answer"]]
        present = re.search(rf"\b{task['answer']}\b", outputs)
        return f"\\boxed{{{task['answer'] if present and not flawed else rng.choice(found)}}}"
    if due and not done and plan and plan != task["plan"] and rng.random() < 0.5:
        due = [call for found in tasks if found["plan"] == plan for call in found["calls"]][:1] or due
    if flawed:
        mistakes = [*other["calls"][:1], *done[-1:], None]
        due = [] if due and role == "caller" and rng.random() < 0.3 else [rng.choice(mistakes)]
    if not due:
        return "DONE"
    text = json.dumps(due[0] or other["calls"][0])
    return f"<tool_call>{text if due[0] else text[:-1]}</tool_call>"


def demonstrated(env, tasks, seed):
    """list of dict(prompt, completion): what is said in a branch of each task, every turn of it."""
    rng, pairs, branches = random.Random(f"said {seed}"), [], [(task, []) for task in tasks]
    while branches:
        joint = []
        for task, history in branches:
            role, plan = env.role(history), history[0].actions[0] if env.num_agents == 3 and history else ""
            made = [step.feedback for step in history if step.feedback["output"]]
            prompts = env.observe(task, history)
            text = said(role, task, made, plan, tasks, rng)
            joint.append((task, history, ["" if prompt is None else text for prompt in prompts]))
            pairs += [{"prompt": prompt, "completion": text} for prompt in prompts if prompt is not None]
        steps = env.step(joint)
        branches = [(task, [*turns, step]) for (task, turns, _), step in zip(joint, steps) if not step.done]
    return pairs
