"""The environments: what make() returns, what is read from data sets, and what agents are asked and paid."""

import json
import runpy
import sys

import datasets
import pytest
from test_sft import save_lines
from toy import Cases, Letters, Step, rows_of

import envs
from envs.samples import PROGRAM_COUNTS
from envs.samples.coding import make_class_tasks, make_coding_tasks
from envs.vetting import load_or_find

HUMANEVAL = make_coding_tasks("train", 1, 1)[0]
CLASSEVAL = make_class_tasks("train", 1, 1)[0]
MBPP = {"task_id": 7, "prompt": "Add one.", "code": "def f(x):\n    return x + 1", "test_imports": []}
MBPP["test_list"] = ["assert f(1) == 2", "assert f(2) == 3"]


@pytest.fixture(autouse=True)
def few_tasks(tmp_path, monkeypatch):
    """Few, so that these tests are quick, and a place of its own for the verdicts, so that each tries its tasks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for split, count in {"train": 24, "validation": 2, "test": 2}.items():
        monkeypatch.setitem(PROGRAM_COUNTS, split, count)


def posts(count):
    return [{"prompt": f"POST: text {i}\n\nTL;DR:", "completion": str(i)} for i in range(count)]


class Passed(Cases):
    """Every answer passes."""

    def step(self, branches):
        return [step._replace(parts={"all_passed": 1.0}) for step in super().step(branches)]


def test_a_mixture_has_equal_shares_and_each_environment_scores_its_own():
    """Fails if a large set crowds out a small one, a branch gets the Step of another, or pass@k is lost.

    Or if an environment gets turns that it does not have.
    """
    environments = {"letters": Letters(2, 3, "", 1), "passed": Passed(2, 1, "", 1)}
    mixture = envs.Mixture(environments, 1)
    branches = [(task, [], [chr(97 + k), "A"]) for k, task in enumerate(mixture.tasks("train"))]
    assert [task["env"] for task, *_ in branches] == ["letters", "passed"] * 6
    for (task, *rest), step in zip(branches, mixture.step(branches)):
        (alone,) = environments[task["env"]].step([(task["task"], *rest)])
        assert (step.reward, step.done) == (alone.reward, task["env"] == "passed")
    assert step.parts == {"all_passed": 1.0, "passed/reward": step.reward}


# What is asked for | its options | what is said of it
REFUSED = """
tldr+arxiv | {"feedback": "much"} | --env-kwargs feedback
humaneval | {"feedback": "much"} | --env-kwargs feedback
judged | {"model": "m"} | --env-kwargs rubric VALUE url VALUE.
arxiv | {"num_agents": 5} | --num-agents 5: .* 1 to 4
gsm8k+arxiv | {"num_turns": 2} | --num-turns 2: arxiv
examples.shout | {} | examples.shout:Shout .
examples/shout.py | {} | examples.shout:Shout .
"""


@pytest.mark.parametrize("name, options, said", rows_of(REFUSED))
def test_what_an_environment_does_not_take_is_refused(name, options, said):
    """Fails if an option or a number is ignored in silence or a traceback, or if what is advised cannot be used."""
    with pytest.raises(ValueError, match=said):
        envs.make(name, **json.loads(options))


def check(monkeypatch, *words):
    """python -m envs with these words."""
    monkeypatch.setattr(sys, "argv", ["envs", *words])
    runpy.run_module("envs", run_name="__main__")


# all forms of the built-in ones that have other parts
RIGHT = """
tldr
arxiv --num-agents 1
tldr+gsm8k --num-agents 3
mbpp --num-turns 2
mbpp --num-agents 1 --env-kwargs protocol discussion
classeval --num-turns 2 --env-kwargs deal choose
gsm8k --env-kwargs roles split
debate
debate --num-agents 3 --env-kwargs form judge
tools
bfcl
bugfix
reference
dilemma
toy:SelfishInTurn --num-turns 3
examples.proposer:Proposer --num-agents 3
examples.router:Router --num-agents 3
test_envs:Faulty --env-kwargs fault unparsed
"""


@pytest.mark.parametrize("words", RIGHT.strip().splitlines())
def test_a_right_environment_passes_its_check(words, monkeypatch, capsys):
    """Fails if an environment with silent agents, rewards of their own or several turns is refused.

    Or if a part of a built-in one has no meaning, or a judge whose verdicts cannot be read looks like a strict one.
    """
    check(monkeypatch, *words.split())
    output = capsys.readouterr().out
    assert words.split()[0] in output
    assert ("unparsed" in output) == ("unparsed" in words)


class Faulty(Letters):
    """Has the fault of this name, or a judge whose verdicts cannot be read."""

    def __init__(self, num_agents, num_turns, dataset, seed, fault):
        super().__init__(num_agents, num_turns, dataset, seed)
        self.fault = fault

    def observe(self, task, history):
        self.last = task
        if self.fault == "history":
            history.clear()
        return super().observe(task, history)

    def step(self, branches):
        if self.fault == "state":
            branches = [(self.last, *rest) for _, *rest in branches]
        steps = super().step(branches)
        for k, (task, history, actions) in enumerate(branches):
            # a reward that depends on other branches, and only here; its mean and agent 0's do not
            if self.fault == "rare" and task["letter"] in "abcdef" and history and history[0][0][1]:
                steps[k] = steps[k]._replace(reward=[0, k, -k])
            if self.fault == "actions":
                actions.reverse()
            if self.fault == "unparsed":
                steps[k] = steps[k]._replace(parts={"unparsed": 1.0})
        return steps[::-1] if self.fault == "order" else steps


# A method that returns what it must not, in JSON; or a field of a Step, and its value | what the error names
FAULTS = """
tasks | [] | tasks
observe | "ab" | observe
observe | ["a"] | observe
observe | ["a", 5] | observe
observe | [null, null] | observe
step | [] | step
reward | [1.0] | reward
reward | "1" | reward
reward | NaN | reward
parts | [1.0] | parts
parts | {"odd": null} | odd
parts | {"odd": Infinity} | odd
parts | {"return": 1.0} | return
parts | {"agent_0/entropy": 1.0} | agent_0/entropy
parts | {"known": 1.0, "unknown": 1.0} | unknown
done | null | done
"""


@pytest.mark.parametrize("place, value, named", rows_of(FAULTS))
def test_the_check_names_what_is_wrong(place, value, named, monkeypatch):
    """Fails if a fault that would end a run, or spoil it in silence, passes."""
    value = json.loads(value)
    if place in Step._fields:
        value = [Step(0.0, {}, False)._replace(**{place: value})] * 16  # two branches of eight tasks
        place = "step"
    monkeypatch.setattr(Letters, place, lambda *args: value)
    monkeypatch.setattr(Letters, "PARTS", {"known": (0, "it has a meaning")}, raising=False)
    with pytest.raises(SystemExit, match=f"error: .*{named}"):
        check(monkeypatch, "toy:Letters")


@pytest.mark.parametrize("fault", ["state", "order", "rare", "history", "actions"])
def test_the_check_plays_all_that_a_run_does(fault, monkeypatch):
    """Fails if a branch may be scored as another one, or changed, even of a train task or after an answer only."""
    with pytest.raises(SystemExit, match="error: "):
        check(monkeypatch, *f"test_envs:Faulty --num-turns 2 --num-agents 3 --env-kwargs fault {fault}".split())


def test_a_split_column_is_obeyed(tmp_path, capsys):
    """Fails if a train split holds test rows, or if it is not said that a test row is also in train."""
    rows = [row | {"split": ("test", "train", "dev")[k % 3]} for k, row in enumerate(posts(9))]
    expected = {"train": rows[1::3], "test": rows[::3], "dev": rows[2::3]}
    assert envs.make("tldr", dataset=save_lines(tmp_path / "rows.jsonl", rows)).splits == expected
    assert "also in train" not in capsys.readouterr().out
    rows[0] |= {"prompt": rows[1]["prompt"]}
    envs.make("tldr", dataset=save_lines(tmp_path / "rows.jsonl", rows))
    assert "1 test rows are also in train" in capsys.readouterr().out


def test_half_an_emoji_is_replaced(tmp_path):
    """Fails if a row that has it in a text or a name ends the run when it is drawn."""
    row = {"prompt": "a \ud83d", "completion": "\ude00 b", "more": [{"\ud83d": None, "b\ude00": "\ud83d"}]}
    env = envs.make("tldr", dataset=save_lines(tmp_path / "rows.jsonl", [row] * 2))
    assert json.dumps(env.splits["train"], ensure_ascii=False).encode()


def test_a_line_with_more_cells_than_columns_is_refused(tmp_path):
    """Fails if a text without quotes loses what stands after its comma."""
    path = tmp_path / "rows.csv"
    path.write_text("prompt,completion\na,b\nHello, world,c")
    with pytest.raises(ValueError, match="row 2 "):
        envs.make("tldr", dataset=str(path))


def test_a_row_that_cannot_be_used_is_left_out_and_named(tmp_path, capsys):
    """Fails if a row's fault refuses the file, or has another row's number, or a number is not written out."""
    rows = posts(12)
    odd = [{"prompt": " \n"}, {"prompt": [{"role": "user", "content": "a"}] * 2, "completion": "b"}]
    path = save_lines(tmp_path / "rows.jsonl", [*rows[:7], *odd, rows[7] | {"completion": 1e-5}, *rows[8:]])
    rows[7] |= {"completion": "0.00001"}
    assert envs.make("tldr", dataset=path).splits == {"train": rows[:11], "test": rows[11:]}
    assert "2 rows are left out (at most ten are shown): row 8: no text in prompt; row 9: " in capsys.readouterr().out


SKELETON = CLASSEVAL["skeleton"]
# For each public set: an ordinary row, the form of its ids, the first and last number of train and of test, and odd
# rows in its columns.
PUBLIC = {
    "mbpp": (MBPP, "{}", (601, 974), (11, 510)),
    "humaneval": (HUMANEVAL, "HumanEval/{}", (33, 132), (133, 163)),
    "classeval": (CLASSEVAL, "ClassEval_{}", (0, 65), (66, 81)),
}
ODD = {
    "mbpp": [
        {"code": "def f(x):\n    return x + 2"},  # the reference fails
        {"code": "def f(x):\n    return x"},  # and so does one that a trivial answer equals
        {"test_imports": ["import numpy"]},
        {"test_list": MBPP["test_list"][:1]},  # none is left to score
    ],
    "humaneval": [
        {"test": "def check(candidate:\n    assert candidate([1])"},
        {"test": "def check(candidate):\n    assert candidate([]) != [[]]"},  # a trivial answer passes
        {"entry_point": None},
        {"test": f"def check(candidate):\n    assert candidate([0]) == {HUMANEVAL['entry_point']}([0])"},
    ],
    "classeval": [
        {"skeleton": "'''\n" + SKELETON.replace("'''", '"""') + "\n'''"},  # as ClassEval_5: Python without a class
        {"test": "import unittest\nclass T(unittest.TestCase):\n    def test(self): pass"},
        {"solution_code": SKELETON},  # nothing is left to write
        # as ClassEval_25: the whole solution passes, but the tests call what no agent is asked for
        {
            "solution_code": CLASSEVAL["solution_code"] + "\n    def more(self):\n        return 5\n",
            "test": CLASSEVAL["test"] + f"\n    def test_x(self):\n        {CLASSEVAL['class_name']}().more()\n",
        },
    ],
}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_set_loads_except_for_its_odd_rows(name, monkeypatch, capsys):
    """Fails if a bad row or a null refuses a set, or a task that no answer, or every answer, passes is trained on."""
    row, form, train, test = PUBLIC[name]
    rows = [{**row, "task_id": form.format(number), "split": None} for number in (*test, *train)]
    odd = [{**row, "task_id": form.format(train[0] + 1 + k), **change} for k, change in enumerate(ODD[name])]
    odd.append({**row, "task_id": "odd"})
    monkeypatch.setattr(datasets, "load_dataset", lambda path, config, split: [*rows[:1], *odd, *rows[1:]])
    env = envs.make(name, dataset="hub", timeout="2")
    tasks = env.tasks("test") + env.tasks("train")
    assert [task["task_id"] for task in tasks] == [row["task_id"] for row in rows]
    output = capsys.readouterr().out
    for place, each in enumerate(odd, 2):
        assert f"row {place} (task {each['task_id']}): " in output


# The tests of a function | what it returns | the number of the test that agents are shown
TRIVIAL = """
f(1) == 2, f(2) == 3, f(3) == 4 | x + 1 | 0
f(1) == 5, f(2) == 2, f(3) == 2 | {1: 5}.get(x, 2) | 1
f(5) == 9, f(1) == 1, f(4) == 4 | {5: 9}.get(x, x) | 1
"""


@pytest.mark.parametrize("tests, value, shown", rows_of(TRIVIAL))
def test_no_trivial_answer_passes_the_tests_that_are_scored(tests, value, shown, tmp_path):
    """Fails if `return 0`, another constant or the argument earns full marks."""
    asserts = [f"assert {test}" for test in tests.split(", ")]
    row = MBPP | {"task_id": "a", "code": f"def f(x):\n    return {value}", "test_list": asserts}
    (task,) = envs.make("mbpp", dataset=save_lines(tmp_path / "rows.jsonl", [row, MBPP])).tasks("train")
    assert task["examples"] == [asserts.pop(int(shown))]
    assert task["tests"].splitlines() == asserts


def test_verdicts_are_kept_and_made_anew_from_a_broken_file(tmp_path):
    """Fails if a file that was cut off ends each later start, or if a resumed run has other tasks."""
    key = ["answers", ["two", "tasks"]]
    for broken in "", "null", "[3]":
        assert load_or_find(key, lambda: [3, 4]) == load_or_find(key, list) == [3, 4]
        (path,) = tmp_path.glob("cache/*/*.json")
        path.write_text(broken)


@pytest.mark.parametrize("name", ["humaneval", "coophumaneval", "mbpp", "classeval"])
def test_a_second_turn(name):
    """Fails if it shows a scored test, or pays to fail first, or if demonstrations fail or lack it."""
    env = envs.make(name, 2, 2)
    # the first completion of each prompt
    completions = {pair["prompt"]: pair["completion"] for pair in reversed(env.demonstrations())}
    for task in env.tasks("train"):
        answer = [completions.pop(prompt) for prompt in env.observe(task, [])]
        branches = [([], answer), (["a step"], answer), ([], [answer[0], ""])]
        at_once, last, failed = env.step([(task, *branch) for branch in branches])
        assert at_once.done
        assert at_once.reward == 2 * last.reward
        prompts = "".join(env.observe(task, [(branches[-1][1], failed)]))
        assert not [line for line in task["tests"].splitlines() if "assert" in line and line in prompts]
    assert completions
