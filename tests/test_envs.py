"""The environments: what make() returns, what is read from data sets, and what agents are asked and paid."""

import json
import runpy
import sys

import datasets
import pytest
from toy import Cases, Letters, Step

import envs
from envs import samples
from rewards.writing import pair_reward

HUMANEVAL = samples.coding_tasks("train", 1, 1)[0]
CLASSEVAL = samples.class_tasks("train", 1, 1)[0]
COOPHUMANEVAL = {column: HUMANEVAL[column] for column in ("prompt", "entry_point", "test")}
MBPP = {"task_id": 7, "prompt": "Add one.", "code": "def f(x):\n    return x + 1", "test_imports": []}
MBPP["test_list"] = ["assert f(1) == 2", "assert f(2) == 3"]


@pytest.fixture(autouse=True)
def few_tasks(tmp_path, monkeypatch):
    """Few, so that these tests are quick, and a place of its own for the verdicts, so that each tries its tasks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for module in "coding", "classeval":
        monkeypatch.setattr(f"envs.{module}.SAMPLE_COUNTS", {"train": 12, "validation": 2, "test": 2})


@pytest.fixture
def written(tmp_path):
    """written(rows) -> path of a .jsonl file."""

    def write(rows):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def posts(count):
    return [{"prompt": f"POST: text {i}\n\nTL;DR:", "completion": str(i)} for i in range(count)]


class Passed(Cases):
    """Every answer passes."""

    def step(self, branches):
        return [step._replace(parts={"all_passed": 1.0}) for step in super().step(branches)]


def test_a_mixture_has_equal_shares_and_each_environment_scores_its_own():
    """Fails if a large set crowds out a small one, a branch gets the Step of another, or pass@k is lost."""
    environments = {"letters": Letters(2, 3, "", 1), "passed": Passed(2, 1, "", 1)}
    mixture = envs.Mixture(environments, 1)
    tasks = mixture.tasks("train")
    assert [task["env"] for task in tasks] == ["letters", "passed"] * 6
    branches = [(task, [], [chr(97 + k), "A"]) for k, task in enumerate(tasks)]
    for (task, *rest), step in zip(branches, mixture.step(branches)):
        (alone,) = environments[task["env"]].step([(task["task"], *rest)])
        assert (step.actions, step.reward) == (alone.actions, alone.reward)
    assert step.parts == {"all_passed": 1.0, "passed/reward": step.reward}


@pytest.mark.parametrize(
    "name, options, remedy",
    [
        ("tldr+arxiv", {"feedback": "plain"}, "--env-kwargs feedback"),
        ("humaneval", {"feedback": "much"}, "--env-kwargs feedback"),
        ("shout.py", {}, "shout:Shout"),
    ],
)
def test_what_nothing_knows_is_refused(name, options, remedy):
    """Fails if an option or its value is ignored in silence, or a file is taken for an environment."""
    with pytest.raises(ValueError, match=remedy):
        envs.make(name, **options)


def check(monkeypatch, *words):
    """python -m envs with these words."""
    monkeypatch.setattr(sys, "argv", ["envs", *words])
    runpy.run_module("envs", run_name="__main__")


@pytest.mark.parametrize("words", ["tldr", "tldr+gsm8k --num-agents 3", "toy:SelfishInTurn --num-turns 3"])
def test_a_right_environment_passes_its_check(words, monkeypatch, capsys):
    """Fails if an environment with silent agents, rewards of their own or several turns is refused."""
    check(monkeypatch, *words.split())
    assert words.split()[0] in capsys.readouterr().out


class Forgetful(Letters):
    """Scores all branches by the task that it was asked about last."""

    def observe(self, task, history):
        self.last = task
        return super().observe(task, history)

    def step(self, branches):
        return super().step([(self.last, history, actions) for _, history, actions in branches])


def steps(**fields):
    return [Step(["", ""], 0.0, {}, False)._replace(**fields)] * 2


@pytest.mark.parametrize("method, returned, named", [
    ("tasks", [], "tasks"),
    ("observe", "ab", "observe"),
    ("observe", ["a"], "observe"),
    ("observe", ["a", 5], "observe"),
    ("observe", [None, None], "observe"),
    ("step", steps()[:1], "step"),
    ("step", steps(reward=[1.0]), "reward"),
    ("step", steps(reward="1"), "reward"),
    ("step", steps(reward=float("nan")), "reward"),
    ("step", steps(parts=[1.0]), "parts"),
    ("step", steps(parts={"odd": None}), "odd"),
    ("step", steps(parts={"odd": float("inf")}), "odd"),
    ("step", steps(parts={"return": 1.0}), "return"),
    ("step", steps(parts={"agent_0/entropy": 1.0}), "agent_0/entropy"),
    ("step", steps(done=None), "done"),
])  # fmt: skip
def test_the_check_names_what_is_wrong(method, returned, named, monkeypatch):
    """Fails if a fault that would end a run, or spoil it in silence, passes."""
    monkeypatch.setattr(Letters, method, lambda *args: returned)
    with pytest.raises(SystemExit, match=f"error: .*{named}"):
        check(monkeypatch, "toy:Letters")


def test_the_check_finds_state(monkeypatch):
    """Fails if an environment may score a branch by the task of another one."""
    with pytest.raises(SystemExit, match="error: played again"):
        check(monkeypatch, "test_envs:Forgetful")


def test_a_client_says_at_once_that_it_waits_for_its_server(monkeypatch, capsys):
    """Fails if a minute goes by without a word."""
    monkeypatch.setattr("time.sleep", None)  # which a client cannot call
    with pytest.raises(TypeError):
        envs.make("remote", url="http://127.0.0.1:1")
    assert "http://127.0.0.1:1" in capsys.readouterr().err


def test_a_split_column_is_obeyed(written):
    """Fails if a train split holds test rows."""
    rows = [row | {"split": ("test", "train", "dev")[k % 3]} for k, row in enumerate(posts(9))]
    expected = {"train": rows[1::3], "test": rows[::3], "dev": rows[2::3]}
    assert envs.make("tldr", dataset=written(rows)).splits == expected


CHAT = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    "odd",
    [{"prompt": " \n"}, {"prompt": CHAT * 2, "completion": "b"}],
)
def test_a_row_that_cannot_be_used_is_left_out_and_named(odd, written, capsys):
    """Fails if a row's fault refuses the file, or has another row's number, or a number is no answer."""
    rows = posts(12)
    env = envs.make("tldr", dataset=written([*rows[:7], odd, rows[7] | {"completion": 7}, *rows[8:]]))
    assert env.splits == {"train": rows[:11], "test": rows[11:]}
    assert "1 rows are left out: row 8: " in capsys.readouterr().out


SKELETON = CLASSEVAL["skeleton"]
# For each public set: an ordinary row, the form of its ids, the first and last number of train and of test, and odd
# rows in its columns.
PUBLIC = {
    "mbpp": (MBPP, "{}", (601, 974), (11, 510)),
    "humaneval": (HUMANEVAL, "HumanEval/{}", (33, 132), (133, 163)),
    "coophumaneval": (COOPHUMANEVAL, "CoopHumanEval/{}", (0, 49), (66, 81)),
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
        {"test": f"def check(candidate):\n    assert candidate([0]) == {HUMANEVAL['entry_point']}([0])"},
    ],
    "coophumaneval": [
        {"test": "def check(candidate):\n    assert candidate([]) == 0"},  # a trivial answer passes
        {"entry_point": None},
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
    """Fails if one bad row refuses a set, or a task that no answer, or every answer, passes is trained on."""
    row, form, train, test = PUBLIC[name]
    rows = [{**row, "task_id": form.format(number)} for number in (*test, *train)]
    odd = [{**row, "task_id": form.format(train[0] + 1 + k), **change} for k, change in enumerate(ODD[name])]
    odd.append({**row, "task_id": "odd"})
    monkeypatch.setattr(datasets, "load_dataset", lambda path, config, split: [*rows[:1], *odd, *rows[1:]])
    env = envs.make(name, dataset="hub", timeout="2")
    tasks = env.tasks("test") + env.tasks("train")
    assert [task["task_id"] for task in tasks] == [row["task_id"] for row in rows]
    output = capsys.readouterr().out
    for place, each in enumerate(odd, 2):
        assert f"row {place} (task {each['task_id']}): " in output


@pytest.mark.parametrize(
    "tests, code, shown",
    [
        ("f(1) == 2, f(2) == 3, f(3) == 4", "return x + 1", 0),
        ("f(1) == 5, f(2) == 2, f(3) == 2", "return {1: 5}.get(x, 2)", 1),
        ("f(5) == 9, f(1) == 1, f(4) == 4", "return {5: 9}.get(x, x)", 1),
    ],
)
def test_no_trivial_answer_passes_the_tests_that_are_scored(tests, code, shown, written):
    """Fails if `return 0`, another constant or the argument earns full marks."""
    asserts = [f"assert {test}" for test in tests.split(", ")]
    row = MBPP | {"task_id": "a", "code": f"def f(x):\n    {code}", "test_list": asserts}
    (task,) = envs.make("mbpp", dataset=written([row, MBPP])).tasks("train")
    assert task["examples"] == [asserts.pop(shown)]
    assert task["tests"].splitlines() == asserts


@pytest.mark.parametrize("name", ["humaneval", "classeval"])
def test_later_prompts_show_no_test_that_is_scored(name):
    """Fails if an agent could learn the tests by heart."""
    env = envs.make(name, 2, 2)
    task = env.tasks("train")[0]
    steps = env.step([(task, [], [env.demonstrations()[0]["completion"], ""])])
    prompts = "".join(env.observe(task, steps))
    assert not [line for line in task["tests"].splitlines() if "assert" in line and line in prompts]


@pytest.mark.parametrize("name, turns", [("humaneval", 1), ("classeval", 2)])
def test_demonstrations_pass_and_passing_at_once_is_paid_for_the_turns_it_saves(name, turns):
    """Fails if what sft.py imitates is for other prompts, wrong, without a second turn, or if it pays to fail."""
    env = envs.make(name, 2, turns)
    # the first completion of each prompt
    completions = {pair["prompt"]: pair["completion"] for pair in reversed(env.demonstrations())}
    tasks = env.tasks("train")
    answers = [[completions.pop(prompt) for prompt in env.observe(task, [])] for task in tasks]
    assert bool(completions) == (turns == 2)
    for task, answer in zip(tasks, answers):
        at_once, last = env.step([(task, [], answer), (task, ["a step"] * (turns - 1), answer)])
        assert at_once.done
        assert at_once.reward == turns * last.reward


def test_agents_get_the_reward_of_their_texts():
    """Fails if agents' paragraphs are exchanged."""
    env = envs.make("tldr")
    task = env.tasks("test")[0]
    texts = [task["completion"], task["prompt"]]
    (step,) = env.step([(task, [], texts)])
    reward, _ = pair_reward(*texts)
    assert step.reward == reward != pair_reward(*texts[::-1])[0]
