"""The environments: what make() returns, what is read from data sets, and what agents are asked and paid."""

import json
import os

import datasets
import pytest

import envs
from envs import Step, samples, tried
from rewards.writing import pair_reward

HUMANEVAL = samples.coding_tasks("train", 1, 1)[0]
CLASSEVAL = samples.class_tasks("train", 1, 1)[0]
for column in "helper", "main":  # of sample tasks only
    del HUMANEVAL[column]
MBPP = {"task_id": 7, "prompt": "Add one.", "code": "def f(x):\n    return x + 1", "test_imports": []}
MBPP["test_list"] = ["assert f(1) == 2", "assert f(2) == 3"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A place of its own for the verdicts, so that each test tries its tasks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for module in "coding", "classeval":  # few, so that these tests are quick
        monkeypatch.setattr(f"envs.{module}.SAMPLE_COUNTS", {"train": 12, "validation": 2, "test": 2})
    return tmp_path / "cache" / "tutti"


@pytest.fixture
def written(tmp_path):
    """written(rows) -> path of a .jsonl file."""

    def write(rows):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def posts(count):
    return [{"prompt": f"POST: text {i}\n\nTL;DR:", "completion": f"sum {i}"} for i in range(count)]


def ids(env, split):
    return [task["task_id"] for task in env.tasks(split)]


class Few:
    """Tasks whose numbers are the reward; agent 0 reads the number, the others are silent."""

    def __init__(self, train, test, parts=()):
        self.counts = {"train": train, "test": test}
        self.parts = dict(parts)
        self.batches = []

    def tasks(self, split):
        return [{"number": k} for k in range(self.counts[split])]

    def observe(self, task, history):
        return [f"{task['number']} {len(history)}", None]

    def step(self, branches):
        self.batches.append(len(branches))
        return [Step(actions, float(task["number"]), self.parts, False, actions) for task, _, actions in branches]


def test_a_mixture_has_equal_shares():
    """Fails if a large set crowds out a small one, or a task of one is taken for another's."""
    mixture = envs.Mixture({"small": Few(2, 9), "large": Few(5, 3)}, 1)
    for split, count in ("train", 5), ("test", 3):
        assert [task["env"] for task in mixture.tasks(split)] == ["small", "large"] * count
    assert mixture.observe(mixture.tasks("train")[5], ["a step"]) == ["2 1", None]


def test_a_mixture_scores_each_environment_as_one_batch():
    """Fails if a branch gets the Step of another, parts of two environments are one metric, or pass@k is lost."""
    one = Few(4, 4, {"all_passed": 1.0, "share": 0.5})
    two = Few(4, 4, {"share": 0.25})
    mixture = envs.Mixture({"one": one, "two": two}, 3)
    steps = mixture.step([(task, [], [k, ""]) for k, task in enumerate(mixture.tasks("train"))])
    assert (mixture.num_turns, one.batches, two.batches) == (3, [4], [4])
    assert [(step.actions[0], step.reward) for step in steps] == [(k, k // 2) for k in range(8)]
    assert steps[2].parts == {"all_passed": 1.0, "one/share": 0.5, "one/reward": 1.0}
    assert steps[3].parts == {"two/share": 0.25, "two/reward": 1.0}


@pytest.mark.parametrize(
    "name, option, value",
    [("tldr+arxiv", "feedback", "plain"), ("humaneval", "feedback", "much"), ("mbpp", "allow_unsafe_code", "perhaps")],
)
def test_an_option_that_nothing_knows_is_refused(name, option, value):
    """Fails if an option or its value is ignored in silence."""
    with pytest.raises(ValueError, match=f"--env-kwargs {option}"):
        envs.make(name, **{option: value})


def test_allow_unsafe_code_may_be_what_yaml_makes_of_yes():
    """Fails if True, from `yes` in a YAML file, is read as no."""
    words = {"yes": True, "True": True, "no": False, "FALSE": False}
    assert {word: tried.read_limits("2", word) for word in words} == {word: (2.0, yes) for word, yes in words.items()}


def test_a_split_column_is_obeyed_and_else_the_last_tenth_is_test(written):
    """Fails if a train split holds test rows."""
    names = ["test"] * 3 + ["train"] * 5 + ["dev", None]
    rows = [{**row, "split": split} for row, split in zip(posts(10), names)]
    assert envs.make("tldr", dataset=written(rows)).splits == {"train": rows[3:8], "test": rows[:3], "dev": rows[8:9]}
    rows = posts(25)
    assert envs.make("tldr", dataset=written(rows)).splits == {"train": rows[:23], "test": rows[23:]}


CHAT = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    "odd",
    [{"prompt": " \n"}, {"prompt": "a", "completion": ["b"]}, {"prompt": CHAT * 2, "completion": "b"}],
)
def test_a_row_that_cannot_be_used_is_left_out_and_named(odd, written, capsys):
    """Fails if a row's fault refuses the file, or is named by another number than its own in the file."""
    rows = posts(12)
    env = envs.make("tldr", dataset=written([*rows[:7], odd, *rows[7:]]))
    assert env.splits == {"train": rows[:11], "test": rows[11:]}
    assert "1 rows are left out: row 8: " in capsys.readouterr().out


SKELETON = CLASSEVAL["skeleton"]
# For each public set: an ordinary row, the form of its ids, the first and last number of train and of test, and odd
# rows in its columns.
PUBLIC = {
    "mbpp": (MBPP, "{}", (601, 974), (11, 510)),
    "humaneval": (HUMANEVAL, "HumanEval/{}", (33, 132), (133, 163)),
    "coophumaneval": (HUMANEVAL, "CoopHumanEval/{}", (0, 49), (66, 81)),
    "classeval": (CLASSEVAL, "ClassEval_{}", (0, 65), (66, 81)),
}
ODD = {
    "mbpp": [
        {"code": "def f(x):\n    return x + 2"},  # the reference fails
        {"code": "def f(x):\n    return x"},  # and so does one that a trivial answer equals
        {"code": "def aux(x):\n    return x + 1", "test_list": ["assert aux(1) == 2", "assert aux(2) == 3"]},
        {"test_imports": ["import numpy"]},
        {"test_list": MBPP["test_list"][:1]},  # none is left to score
    ],
    "humaneval": [
        {"canonical_solution": "    return None\n"},
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
        {"solution_code": CLASSEVAL["solution_code"].replace("return", "return not")},
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
    if name == "coophumaneval":
        row = {key: value for key, value in row.items() if key != "canonical_solution"}
    rows = [{**row, "task_id": form.format(number)} for number in (*test, *train)]
    odd = [{**row, "task_id": form.format(train[0] + 1 + k), **change} for k, change in enumerate(ODD[name])]
    odd.append({**row, "task_id": "odd"})
    monkeypatch.setattr(datasets, "load_dataset", lambda path, config, split: [*rows[:1], *odd, *rows[1:]])
    env = envs.make(name, dataset="hub", timeout="2")
    assert ids(env, "test") + ids(env, "train") == [row["task_id"] for row in rows]
    output = capsys.readouterr().out
    assert f"{len(odd)} rows are left out: " in output
    for place, each in enumerate(odd, 2):
        assert f"row {place} (task {each['task_id']}): " in output


@pytest.mark.parametrize(
    "tests, returned, shown",
    [
        (("f(1) == 2", "f(2) == 3", "f(3) == 4"), "x + 1", 0),
        (("f(1) == 5", "f(2) == 2", "f(3) == 2"), "{1: 5}.get(x, 2)", 1),
        (("f(5, 9) == 9", "f(1, 2) == 1", "f(4, 3) == 4"), "{5: 9}.get(x, x)", 1),
    ],
)
def test_no_trivial_answer_passes_the_tests_that_are_scored(tests, returned, shown, written):
    """Fails if `return 0`, another constant or the argument earns full marks."""
    asserts = [f"assert {test}" for test in tests]
    row = MBPP | {"code": f"def f(x, y=0):\n    return {returned}", "test_list": asserts}
    env = envs.make("mbpp", dataset=written([row | {"task_id": "a"}, MBPP]))
    (task,) = env.tasks("train")
    assert task["examples"] == [asserts.pop(shown)]
    assert task["examples"][0] in task["problem"]
    assert task["tests"].splitlines() == asserts


def test_a_resume_has_the_same_tasks(written, cache, monkeypatch):
    """Fails if references are run again, under other conditions."""
    rows = [{**MBPP, "task_id": f"t{k}"} for k in range(9)]
    rows[2]["code"] = "def f(x): pass"
    path = written(rows)
    before = envs.make("mbpp", dataset=path)
    monkeypatch.setattr(tried, "run_tests", None)
    after = envs.make("mbpp", dataset=path)
    assert before.splits == after.splits
    assert len(ids(after, "train")) == 7
    assert len(os.listdir(cache)) == 1


@pytest.mark.parametrize(
    "name, parts",
    [
        ("humaneval", ["Write "]),
        ("humaneval", ["function aux ", " aux(...) "]),
        ("humaneval", ["function aux1 ", "function aux2 ", " aux1(...), aux2(...) "]),
        ("classeval", [": add, keeps, kept, result."]),
        ("classeval", [": add, kept.", ": keeps, result."]),
        ("classeval", [": add.", ": keeps.", ": kept.", ": result.", "Answer with nothing."]),
    ],
)
def test_each_agent_is_asked_for_its_own_part(name, parts):
    """Fails if a function or a method has no agent, or two, or an agent does not know of its helpers."""
    env = envs.make(name, len(parts), 2)
    for part, prompt in zip(parts, env.observe(env.tasks("train")[0], []), strict=True):
        assert part in prompt


@pytest.mark.parametrize("name", ["humaneval", "classeval"])
def test_feedback_tells_what_became_of_the_answer_and_shows_no_test(name):
    """Fails if an agent reads another's answer or a scored test, or nothing of its own error."""
    for feedback, told in ("level", True), ("plain", False):
        env = envs.make(name, 2, 2, feedback=feedback)
        task = env.tasks("train")[0]
        answers = [["def aux(x):\n    return x", "nonsense ("], [env.demonstrations()[0]["completion"], ""]]
        broken, half = env.step([(task, [], answer) for answer in answers])
        one, two = env.observe(task, [broken])
        assert "Your answer:\ndef aux" in one and "nonsense" not in one
        assert "Your answer:\nnonsense (" in two
        assert ("another agent is not Python" in one) == ("not Python" in two) == told
        prompts = "".join(env.observe(task, [half]))
        assert not any(line in prompts for line in task["tests"].splitlines() if "assert" in line)


@pytest.mark.parametrize("name, best", [("humaneval", 2.1), ("classeval", 6.0)])
def test_passing_at_once_is_paid_for_the_turns_it_saves(name, best):
    """Fails if failing first and passing later earns more than passing at once."""
    env = envs.make(name, 1, 3)
    task = env.tasks("train")[0]
    right = [env.demonstrations()[0]["completion"]]
    first, late = env.step([(task, [], right), (task, ["a step"], right)])
    assert (first.reward, late.reward) == pytest.approx((3 * best, 2 * best))


@pytest.mark.parametrize("name, turns", [("humaneval", 1), ("classeval", 2)])
def test_demonstrations_answer_the_prompts_of_training_tasks(name, turns):
    """Fails if what sft.py imitates is for other prompts, wrong, or without a second turn."""
    env = envs.make(name, 2, turns)
    completions = {}  # prompt -> its completions
    for pair in env.demonstrations():
        completions.setdefault(pair["prompt"], []).append(pair["completion"])
    tasks = env.tasks("train")
    first = [[completions.pop(prompt)[0] for prompt in env.observe(task, [])] for task in tasks]
    assert bool(completions) == (turns == 2)
    assert all(step.done for step in env.step([(task, [], answer) for task, answer in zip(tasks, first)]))


def test_agents_get_the_reward_of_their_texts():
    """Fails if agents' paragraphs are exchanged, or compared with another post or summary."""
    env = envs.make("tldr")
    task = env.tasks("test")[0]
    texts = [task["completion"], task["prompt"]]
    post = "\n".join(line.split(":", 1)[1] for line in task["prompt"].splitlines() if ":" in line)  # without its form
    expected = pair_reward(*texts, source=post, reference=task["completion"])
    step, back = env.step([(task, [], texts), (task, [], texts[::-1])])
    assert (step.reward, step.parts) == expected
    assert back.reward != step.reward
