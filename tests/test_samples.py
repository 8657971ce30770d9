"""Sample tasks of the environments: the right answer earns all, a guess does not, and no test task was trained on."""

import json
import re

import pytest
from toy import rows_of

import envs
from envs.bfcl import make_gold_call, write_call
from envs.samples import PROGRAM_COUNTS, writing

# environment | options | highest reward | share of the tasks for which a guess may earn it
# No answer is known to earn the highest reward of tldr and arxiv.
CASES = """
tldr | {} | | 0
arxiv | {} | | 0
humaneval | {"num_agents": 1} | 2.1 | 0.2
coophumaneval | {"num_agents": 1} | 2.1 | 0.2
mbpp | {"num_agents": 1} | 2.1 | 0.2
classeval | {"num_agents": 1} | 6 | 0
bugfix | {"num_agents": 1} | 2 | 0.2
gsm8k | {} | 1.2 | 0.1
gsm8k | {"roles": "split"} | 1 | 0.1
debate | {"num_agents": 1} | 1.3 | 0.2
debate | {"num_agents": 1, "topic": "choice"} | 1.3 | 0.35
debate | {"num_agents": 3, "form": "judge"} | 1 | 0.6
tools | {"num_agents": 1, "num_turns": 4} | 1 | 0.05
tools | {"num_agents": 2, "num_turns": 3} | 1 | 0.05
bfcl | {"num_agents": 2} | 1 | 0.05
bfcl | {"num_agents": 3, "roles": "split_by_order"} | 1 | 0.05
"""
# what in a task decides its split: if it is not a whole question or the like, PARTS names it
COLUMNS = r"(?:question|answer|user_prompt|entry_point|class_name)': '.*?'"
PARTS = {
    "tldr": "|".join(["TITLE: My .*?POST", *writing.ATTEMPTS]),
    "arxiv": "|".join([*writing.METHODS, *writing.OBSTACLES, *writing.FIELDS]),
    "gsm8k": r"How many \w+|buys|finds|gives|loses|keeps|times",
    "debate": r"question': '(\w+) has \d+ (\w+) .*?\. \w+ (\w+) \d+ (\w+)|question': '(\d.*?)'",
}

# The wrong answer that comes nearest: without the filter; of a class, a method that repeats what another one does
NO_FILTER = r"if [^\]:]+", "if True"
REPEATED = r"(keeps\(self, x\):\s+return (.*)(?s:.*) if )self.keeps\(x\)", r"\1\2"


def write(known, num_agents, turn, i):
    """What agent i writes in a turn if it knows the answer to a task."""
    if "reference" in known:
        return known["reference"]
    if "gold" in known:
        return "".join(write_call(make_gold_call(call)) for call in known["gold"][i::num_agents])
    if turn < len(known.get("calls", [])):
        return write_call(known["calls"][turn])
    return f"VERDICT: right\nDONE\n\\boxed{{{known['answer'].rpartition('#### ')[2]}}}"


def last_step(env, task, known):
    """The last Step of a branch of a task in which the agents know the answer to the task `known`."""
    history = []
    for turn in range(getattr(env, "num_turns", 1)):
        actions = [write(known, env.num_agents, turn, i) for i in range(env.num_agents)]
        (step,) = env.step([(task, history, actions)])
        history.append((actions, step))
    return step


@pytest.mark.parametrize("name, options, best, share", rows_of(CASES))
def test_right_answers_earn_all_and_test_tasks_are_new(name, options, best, share, monkeypatch):
    """Fails if a right answer is refused, if the nearest wrong one, or the same one for all tasks, earns as much, or
    if a test task was trained on."""
    for split, count in {"train": 96, "validation": 1, "test": 24}.items():  # fewer, since tests are run
        monkeypatch.setitem(PROGRAM_COUNTS, split, count)
    env = envs.make(name, **json.loads(options))
    train, test = map(env.tasks, ("train", "test"))
    parts = PARTS.get(name, COLUMNS)
    trained, tested = ({frozenset(re.findall(parts, str(task))) for task in tasks} for tasks in (train, test))
    assert trained.isdisjoint(tested)
    guesses = 0
    tasks = train[::24] + test[::6] if best else []
    for task in tasks:
        guess = train[0] | {"calls": []}
        if "reference" in task:
            pattern, instead = REPEATED if name == "classeval" else NO_FILTER
            guess = {"reference": re.sub(pattern, instead, task["reference"])}
        right, guessed = (last_step(env, task, known) for known in (task, guess))
        assert right.reward == pytest.approx(float(best))
        guesses += guessed.reward == right.reward
    assert guesses <= float(share) * len(tasks)
