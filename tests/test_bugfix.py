"""bugfix: what a repair is worth, and who speaks when."""

import pytest
from toy import play

import envs
from rewards.bugfix import Repair, bugfix_rewards
from rewards.coding import Answer

TESTS = "assert f([]) == 0\nassert f([2, 3]) == 5\nassert f([1]) == 1\nassert f([1, 1, -1]) == 2"
BUGGY = "def f(n):\n    total = 0\n    for x in n:\n        if x > 1:\n            total += x\n    return total\n"
RIGHT = BUGGY.replace("> 1", "> 0")
SPY = """def f(n):
    import gc
    seen = [repr(x).split(f"f({n}) == ")[1] for x in gc.get_objects() if f"f({n}) == " in repr(x)]
    return int(seen[0][0]) if seen else 0
"""
CONSTANT = "def f(n):\n    return 1\n"
VALUES = {  # answer -> reward; BUGGY passes two of four tests
    RIGHT: 2.0,
    BUGGY.replace("    total = 0", "    if n == [1]:\n        return 1\n    total = 0"): 0.2 + 0.5 + 0.15,
    "def f(n):\n    return 5 if n == [2, 3] else n.count(1) or 9\n": 0.2 + 0.5,  # all fixed, one of two lost
    # the same program: as it is, with other layout and strings, with what does nothing, with more, as the last of two
    BUGGY: 0,
    BUGGY.replace("total = 0", '"""Sums."""\n\n    total = (0)  # a start').replace("    ", "  "): 0,
    f"{BUGGY}\nprint(f([1]))": 0,
    f"{BUGGY}\ndef test():\n    assert f([1]) == 1": 0,
    f"{BUGGY}\ndef g(n):\n    return sum(x for x in n if x > 0)\n\nf.__code__ = g.__code__": 2.0,
    RIGHT + BUGGY: 0,
    BUGGY.replace("total", "result"): 0.2,  # acts the same
    CONSTANT: 0.2,  # one of two fixed, both lost
    SPY: 0.2,
    "": 0,
    f"{RIGHT}def g():\n    break\n": 0.1,  # does not compile
}


def scores(texts, passing, failing):
    answers = [Answer([text], [], "f", TESTS, ["f"]) for text in texts]
    return bugfix_rewards([Repair(answer, BUGGY, passing, failing) for answer in answers])


def test_a_repair_is_worth_what_the_docstring_says():
    """Fails, row by row, if a level is paid for doing nothing, a constant or a trade of tests, or is not paid."""
    score_of = dict(zip(VALUES, scores(VALUES, [0, 1], [2, 3])))
    assert {text: score.reward for text, score in score_of.items()} == pytest.approx(VALUES)
    assert score_of[CONSTANT].parts["edit_distance"] == 5
    # where nothing can be lost, one test of four is not worth all of `kept`
    (score,) = scores(["def f(n):\n    return 0\n"], [], [0, 1, 2, 3])
    assert score.reward == pytest.approx(0.2 + 1.3 / 4)


@pytest.mark.parametrize("count, offset, located", [(1, 0, None), (2, -1, 1), (2, 2, 0), (3, 0, 1)])
def test_each_agent_speaks_once_and_reads_the_note_before_it(count, offset, located):
    """Fails if an agent speaks twice or reads too much, if there is a reward before the fixer, or any line will do."""
    env = envs.make("bugfix", num_agents=count)
    task = next(task for task in env.tasks("train") if task["symptom"])
    notes = ["LINE 1: no.", f"<think>LINE 1</think>LINE {task['line'] + offset}: " + "why " * 40]
    completions = [*notes, task["reference"]][3 - count :]
    turns, steps = play(env, task, lambda turn, i, prompt: completions[turn])
    assert steps[-1].parts.get("located") == located
    for turn, prompts in enumerate(turns):
        fixes = turn == count - 1
        text = prompts.pop(turn)
        assert prompts == [None] * (count - 1)
        assert (task["symptom"] in text) == (turn == 0)
        assert (task["program"] in text) == fixes
        assert text.count("why ") == (27 if fixes and turn else 0)
        assert steps[turn].reward == pytest.approx(2.0 * fixes)
