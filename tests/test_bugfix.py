"""bugfix: what a repair is worth, who speaks when, the sample programs and public ones."""

import pytest
from conftest import ROOT

import envs
from envs.bugfix import _answer
from rewards.bugfix import Repair, bugfix_rewards
from rewards.coding import Answer, coding_rewards

DATA = ROOT.parent / "shared" / "data"
TESTS = "assert f([]) == 0\nassert f([2, 3]) == 5\nassert f([1]) == 1\nassert f([1, 1, -1]) == 2"
BUGGY = "def f(n):\n    total = 0\n    for x in n:\n        if x > 1:\n            total += x\n    return total\n"
RIGHT = BUGGY.replace("> 1", "> 0")
SPY = """def f(n):
    import gc
    found = [repr(x).split(f"f({n}) == ")[1] for x in gc.get_objects() if f"f({n}) == " in repr(x)]
    return int(found[0][0]) if found else 0
"""
VALUES = {  # answer -> reward; BUGGY passes two of four tests
    RIGHT: 2.0,
    BUGGY.replace("    total = 0", "    if n == [1]:\n        return 1\n    total = 0"): 0.2 + 0.5 + 0.15,
    "def f(n):\n    return 5 if n == [2, 3] else n.count(1) or 9\n": 0.2 + 0.5,  # all fixed, one of two lost
    # the same program: as it is, with other layout and texts, with what does nothing, as the last of two
    BUGGY: 0,
    BUGGY.replace("total = 0", '"""Sums."""\n\n    total = (0)  # a start').replace("    ", "  "): 0,
    f"{BUGGY}\nprint(f([1]))": 0,
    RIGHT + BUGGY: 0,
    BUGGY.replace("total", "result"): 0.2,  # these two act the same
    f"import math\n{BUGGY}": 0.2,
    "def f(n):\n    return 0\n": 0.2,
    "def f(n):\n    return 1\n": 0.2,  # one of two fixed, both lost
    SPY: 0.2,
    "": 0,
    f"{RIGHT}def g():\n    break\n": 0.1,  # does not compile
}


def scores(texts, passing=(0, 1), failing=(2, 3)):
    return bugfix_rewards([Repair(Answer([t], [], "f", TESTS, ["f"]), BUGGY, [*passing], [*failing]) for t in texts])


def test_a_repair_is_worth_what_the_docstring_says():
    """Row by row a level that is paid for doing nothing, for a constant, for a trade of tests, or not at all."""
    found = dict(zip(VALUES, scores(VALUES)))
    assert {text: score.reward for text, score in found.items()} == pytest.approx(VALUES)
    for text, expected in (RIGHT, [1, 0, 0]), (BUGGY, [0, 1, 0]), ("def f(n):\n    return 1\n", [5, 0, 1]):
        assert [found[text].parts[key] for key in ("edit_distance", "unchanged", "regressed")] == expected
    # where nothing can be lost, one test of four is not worth all of `kept`
    assert scores(["def f(n):\n    return 0\n"], (), range(4))[0].reward == pytest.approx(0.2 + 1.3 / 4)


@pytest.fixture(autouse=True)
def few(monkeypatch, tmp_path):
    monkeypatch.setattr("envs.bugfix.SAMPLE_COUNTS", {"train": 40, "validation": 2, "test": 9})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_agent_speaks_once_and_reads_the_note_before_it(count):
    """An agent that speaks twice or reads too much, a reward before the fixer."""
    env = envs.make("bugfix", num_agents=count)
    task = next(task for task in env.tasks("train") if task["symptom"])
    history = []
    notes = [f"line {task['line'] + 3}: no.", f"<think>LINE 1</think>LINE {task['line'] - 1}: " + "why " * 40]
    texts = [*notes[3 - count :], task["reference"]]
    for turn, text in enumerate(texts):
        prompts, last = env.observe(task, history), turn == count - 1
        assert [prompt is not None for prompt in prompts] == [agent == turn for agent in range(count)]
        assert (task["symptom"] in prompts[turn]) == (turn == 0)
        assert (f"\n{task['line']} " in prompts[turn]) == (task["program"] not in prompts[turn]) == (not last)
        assert ("why " * 27 in prompts[turn], "why " * 28 in prompts[turn]) == (count > 1 and last, False)
        (step,) = env.step([(task, history, [text if agent == turn else "" for agent in range(count)])])
        assert (step.done, step.reward) == (last, pytest.approx(2.0 * last))
        history = [*history, step]
    assert env.num_turns == count and step.parts.get("located") == (None if count == 1 else 1.0)
    assert task["symptom"] not in envs.make("bugfix", count, feedback="plain").observe(task, [])[0]
    for off, located in ((2, 0), (1, 1), (-2, 0)) if count > 1 else ():
        told = [*history[:-2], history[-2]._replace(actions=[f"LINE {task['line'] + off}"] * count)]
        assert env.step([(task, told, texts[-1:] * count)])[0].parts["located"] == located


def test_sample_programs_have_one_bug_that_some_tests_find():
    """A mutant that passes or fails all, verdicts that are not the sandbox's, test programs that occur in train."""
    env = envs.make("bugfix", num_agents=1)
    assert not {t["entry_point"] for t in env.tasks("train")} & {t["entry_point"] for t in env.tasks("test")}
    tasks = env.tasks("train") + env.tasks("test")
    for task, score in zip(tasks, coding_rewards([_answer(task, [task["program"]]) for task in tasks])):
        assert task["passing"] == score.findings["passing"] and task["passing"] and task["failing"]
        assert task["symptom"] == "".join(f"{a} fails: {b}." for a, b in score.findings["examples"][:1])
        pairs = zip(task["program"].splitlines(), task["reference"].splitlines())
        assert [k for k, (a, b) in enumerate(pairs, 1) if a != b] == [task["line"]]
    assert {step.reward for step in env.step([(task, [], [task["reference"]]) for task in tasks])} == {2.0}


@pytest.mark.parametrize("name, test, count", [("humanevalfix", 15, 81), ("quixbugs", 2, 19)])
def test_public_references_earn_all_and_their_programs_nothing(name, test, count):
    """A program of people's that the sandbox or a rule of reading refuses, and pay for leaving the bug in."""
    if not (path := DATA / f"{name}.jsonl").exists():
        pytest.skip("no data folder beside the repository")
    env = envs.make("bugfix", num_agents=1, dataset=str(path), timeout=1)  # seconds; the reference of one takes two
    tasks = [task for part in env.splits.values() for task in part if task["task_id"] != "levenshtein"]
    assert (len(env.tasks("test")), len(tasks)) == (test, count)
    steps = env.step([(task, [], [task[key]]) for task in tasks for key in ("reference", "program")])
    assert [step.reward for step in steps] == pytest.approx([2.0, 0.0] * count)
