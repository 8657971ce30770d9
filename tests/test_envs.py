"""The environments: what make() returns, what is read from data sets, and what agents are asked and paid."""

import json
import os

import datasets
import pytest

import envs
from envs import Step, samples, tried, writing
from rewards.writing import pair_reward

HUMANEVAL, CLASSEVAL = samples.coding_tasks("train", 1, 1)[0], samples.class_tasks("train", 1, 1)[0]
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
        self.counts, self.parts, self.batches = {"train": train, "test": test}, dict(parts), []

    def tasks(self, split):
        return [{"number": k} for k in range(self.counts[split])]

    def observe(self, task, history):
        return [f"{task['number']} {len(history)}", None]

    def step(self, branches):
        self.batches.append(len(branches))
        return [Step(said, float(task["number"]), dict(self.parts), False, said) for task, _, said in branches]


def test_a_mixture_has_equal_shares():
    """A large set that crowds out a small one, in training or in evaluation, or a task of one for another's."""
    mixture = envs.Mixture({"small": Few(2, 9), "large": Few(5, 3)}, 1)
    for split, count in ("train", 5), ("test", 3):
        tasks = mixture.tasks(split)
        assert [task["env"] for task in tasks] == ["small", "large"] * count
        assert [mixture.observe(task, ["a step"])[0] for task in tasks[:4]] == ["0 1", "0 1", "1 1", "1 1"]


def test_a_mixture_scores_each_environment_as_one_batch():
    """Steps of one branch for another, parts of two environments as one metric, and no pass@k."""
    one, two, idle = Few(4, 4, {"all_passed": 1.0, "share": 0.5}), Few(4, 4, {"share": 0.25}), Few(4, 4)
    mixture = envs.Mixture({"one": one, "two": two, "idle": idle}, 3)
    assert mixture.num_turns == 3  # though none of them names a number
    tasks = [task for task in mixture.tasks("train") if task["env"] != "idle"]
    steps = mixture.step([(task, [], [str(k), ""]) for k, task in enumerate(tasks)])
    assert (one.batches, two.batches, idle.batches) == ([4], [4], [])
    assert [step.actions[0] for step in steps] == [step.feedback[0] for step in steps] == list("01234567")
    assert [step.reward for step in steps] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert steps[2].parts == {"all_passed": 1.0, "one/share": 0.5, "one/reward": 1.0}
    assert steps[3].parts == {"two/share": 0.25, "two/reward": 1.0}


def test_an_option_that_nothing_knows_is_refused():
    """An option that is ignored in silence."""
    for name, feedback in ("tldr+arxiv", "plain"), ("humaneval", "much"):
        with pytest.raises(ValueError, match="--env-kwargs feedback"):
            envs.make(name, feedback=feedback)


def test_a_split_column_is_obeyed_and_else_the_last_tenth_is_test(written):
    """A train split that holds test rows."""
    names = ["test"] * 3 + ["train"] * 5 + ["dev", None]
    lines = [{**row, "split": split} for row, split in zip(posts(10), names)]
    env = envs.make("tldr", dataset=written(lines))
    assert env.tasks("test") == lines[:3] and env.tasks("train") == lines[3:8]
    env = envs.make("tldr", dataset=written(posts(25)))
    assert env.tasks("train") == posts(25)[:23] and env.tasks("test") == posts(25)[23:]


def test_a_row_that_cannot_be_used_is_left_out_and_named(written, capsys):
    """A row's fault that refuses the file, or that is named by another number than its own in the file."""
    chat = [{"role": "user", "content": "a"}]
    for odd in {"prompt": " \n"}, {"prompt": "a", "completion": ["b"]}, {"prompt": chat * 2, "completion": "b"}:
        env = envs.make("tldr", dataset=written([*posts(7), odd, *posts(12)[7:]]))
        assert env.tasks("train") + env.tasks("test") == posts(12) and len(env.tasks("test")) == 1
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
        {"code": "def g(x):\n    return x + 1"},  # nothing that the tests call
        {"code": "def aux(x):\n    return x + 1", "test_list": ["assert aux(1) == 2", "assert aux(2) == 3"]},
        {"test_imports": ["import numpy"]},
        {"test_list": MBPP["test_list"][:1]},  # none is left to score
    ],
    "humaneval": [
        {"canonical_solution": "    return None\n"},
        {"entry_point": "g"},
        {"test": "def check(candidate):\n    candidate([])"},
        {"test": "def check(candidate:\n    assert candidate([1])"},
        {"test": f"def check(candidate):\n    assert candidate([0]) == {HUMANEVAL['entry_point']}([0])"},
    ],
    "coophumaneval": [
        {"test": "def check(candidate):\n    assert candidate([]) == 0"},  # a trivial answer passes
        {"entry_point": None},
    ],
    "classeval": [
        {"skeleton": "'''\n" + SKELETON.replace("'''", '"""') + "\n'''"},  # as ClassEval_5: Python without a class
        {"class_name": "Nowhere"},
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
def test_a_public_set_loads_whole_but_for_its_odd_rows(name, monkeypatch, capsys):
    """One bad row that refuses a set, or a task that no answer, or every answer, passes and that is trained on."""
    row, form, train, test = PUBLIC[name]
    row = {key: value for key, value in row.items() if key not in ("helper", "main", "methods", "surplus")}
    if name == "coophumaneval":
        del row["canonical_solution"]
    numbers = [*test, *train]
    rows = [{**row, "task_id": form.format(number)} for number in numbers]
    odd = [{**row, "task_id": form.format(train[0] + 1 + k), **change} for k, change in enumerate(ODD[name])]
    mixed = [*rows[:1], *odd, {**row, "task_id": "odd"}, *rows[1:]]
    monkeypatch.setattr(datasets, "load_dataset", lambda path, config, split: mixed)
    env = envs.make(name, dataset="hub", timeout="2")
    assert ids(env, "train") == [form.format(number) for number in train]
    assert ids(env, "test") == [form.format(number) for number in test]
    said = capsys.readouterr().out
    assert f"{len(odd) + 1} rows are left out: " in said
    assert all(f"row {place} (task {each['task_id']}): " in said for place, each in enumerate(odd[:7], 2))


@pytest.mark.parametrize(
    "tests, returned, shown",
    [
        (("f(1) == 2", "f(2) == 3", "f(3) == 4"), "x + 1", 0),
        (("f(1) == 5", "f(2) == 2", "f(3) == 2"), "{1: 5}.get(x, 2)", 1),
        (("f(1)", "not f(2)", "not f(3)"), "x == 1", 1),
        (("f(5, 9) == 9", "f(1, 2) == 1", "f(4, 3) == 4"), "{5: 9}.get(x, x)", 1),
    ],
)
def test_no_trivial_answer_passes_the_tests_that_are_scored(tests, returned, shown, written):
    """`return 0`, another constant or the argument for full marks."""
    asserts = [f"assert {test}" for test in tests]
    row = {"code": f"def f(x, y=0):\n    return {returned}", "test_list": asserts}
    rows = [MBPP | {"task_id": "a"}, MBPP | row | {"task_id": "b"}, MBPP | {"task_id": "c"}]
    tasks = envs.make("mbpp", dataset=written(rows)).tasks("train")
    assert tasks[1]["examples"] == [asserts[shown]]
    assert asserts[shown] in tasks[1]["problem"]
    assert asserts[shown] not in tasks[1]["tests"]
    assert tasks[1]["tests"].count("assert") == len(tests) - 1


def test_a_resume_has_the_same_tasks(written, cache, monkeypatch):
    """References that are run again, under other conditions."""
    rows = [{**MBPP, "task_id": f"t{k}"} for k in range(9)]
    rows[2]["code"] = "def f(x): pass"
    path = written(rows)
    before = envs.make("mbpp", dataset=path)
    monkeypatch.setattr(tried, "run_tests", None)
    after = envs.make("mbpp", dataset=path)
    assert before.splits == after.splits and len(ids(after, "train")) == 7
    assert len(os.listdir(cache)) == 1


def branches(env, answers):
    task = env.tasks("train")[0]
    return task, env.step([(task, [], answer) for answer in answers])


@pytest.mark.parametrize("num_agents", [1, 2, 3])
def test_each_agent_is_asked_for_its_own_function(num_agents):
    env = envs.make("humaneval", num_agents, 2)
    task = env.tasks("train")[0]
    *helpers, main = env.observe(task, [])
    names = [[], ["aux"], ["aux1", "aux2"]][num_agents - 1]
    assert all(f"function {name} " in helper for name, helper in zip(names, helpers, strict=True))
    assert all(f"{name}(...)" in main for name in names)
    assert task["tests"].splitlines()[1] not in main


@pytest.mark.parametrize("name", ["humaneval", "classeval"])
def test_feedback_says_what_became_of_the_answer_and_shows_no_test(name):
    for feedback, told in ("level", True), ("plain", False):
        env = envs.make(name, 2, 2, feedback=feedback)
        task, (step,) = branches(env, [["def aux(x):\n    return x", "nonsense ("]])
        one, two = env.observe(task, [step])
        assert "Your answer:\ndef aux" in one and "Your answer:\nnonsense (" in two and "nonsense" not in one
        assert ("not Python" in two) == told and ("another agent is not Python" in one) == told
        right = env.demonstrations()[:2]
        task, (step,) = branches(env, [[right[0]["completion"], ""]])
        prompts = "".join(env.observe(task, [step]))
        assert not any(line in prompts for line in task["tests"].splitlines() if "assert" in line)


@pytest.mark.parametrize("name, best", [("humaneval", 2.1), ("classeval", 6.0)])
def test_passing_at_once_is_paid_for_the_turns_it_saves(name, best):
    """Otherwise failing first and passing later earns more than passing at once."""
    env = envs.make(name, 1, 3)
    task = env.tasks("train")[0]
    right = next(pair["completion"] for pair in env.demonstrations() if pair["prompt"] == env.observe(task, [])[0])
    wrong, late = env.step([(task, [], ["x"]), (task, ["a step"], [right])])
    (first,) = env.step([(task, [], [right])])
    assert (first.reward, first.done) == (pytest.approx(3 * best), True) and late.reward == pytest.approx(2 * best)
    assert not wrong.done and wrong.reward < best


@pytest.mark.parametrize("num_agents", [1, 2, 5])
def test_the_methods_of_a_class_are_dealt_out_in_turn(num_agents):
    env = envs.make("classeval", num_agents)
    task = env.tasks("train")[0]
    assert task["methods"] == ["add", "keeps", "kept", "result"]
    prompts = env.observe(task, [])
    for agent, prompt in enumerate(prompts):
        own = ", ".join(task["methods"][agent::num_agents])
        assert (f": {own}." in prompt) == bool(own)


@pytest.mark.parametrize("name, turns", [("humaneval", 1), ("classeval", 2)])
def test_demonstrations_answer_the_prompts_of_training_tasks(name, turns):
    env = envs.make(name, 2, turns)
    prompts = {prompt for task in env.tasks("train") for prompt in env.observe(task, [])}
    pairs = env.demonstrations()
    first = [pair for pair in pairs if pair["prompt"] in prompts]
    assert len(first) == 2 * len(env.tasks("train"))
    assert (len(pairs) > len(first)) == (turns == 2)
    answers = ([pair["completion"] for pair in first[k : k + 2]] for k in range(0, len(first), 2))
    assert all(step.done for step in env.step([(task, [], said) for task, said in zip(env.tasks("train"), answers)]))


def test_agents_get_the_reward_of_their_texts():
    pair, single = (envs.make("tldr", num_agents) for num_agents in (2, 1))
    task = pair.tasks("test")[0]
    texts = [task["completion"], task["prompt"]]
    post = "\n".join(line.split(":", 1)[1] for line in task["prompt"].splitlines() if ":" in line)  # without its form
    expected = pair_reward(*texts, source=post, reference=task["completion"])
    step, back = pair.step([(task, [], texts), (task, [], texts[::-1])])
    assert (step.reward, step.parts) == expected and step.done and back.reward != step.reward
    joined = f"\n{writing.MARKER}\n".join(texts)
    steps = single.step([(task, [], [joined]), (task, [], [" ".join(texts)])])
    assert [each.reward for each in steps] == [step.reward, 0]  # without the marker there is no second paragraph
