"""The environments: what make() returns, what is read from data sets, and what agents are asked and paid."""

import json
import os

import datasets
import pytest

import envs
from envs import Step, data, samples, tried, writing
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


# ---------------------------------------------------------------- make and mixtures


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"name": "tdlr"}, ["tdlr", "tldr, arxiv", "module:Class"]),
        ({"name": "tldr+arxiv", "feedback": "plain"}, ["--env-kwargs feedback", "reward"]),
        ({"name": "humaneval", "feedback": "much"}, ["--env-kwargs feedback much", "plain", "level"]),
        ({"name": "arxiv", "num_agents": 5}, ["--num-agents 5", "at most 4"]),
        ({"name": "tldr", "dataset": "nowhere.jsonl"}, ["--dataset nowhere.jsonl"]),
    ],
)
def test_one_sentence_names_the_argument(arguments, words):
    """A misspelt name or option that is a traceback, or is ignored in silence."""
    with pytest.raises(ValueError) as caught:
        envs.make(**arguments)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


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
    mixture = envs.Mixture({"small": Few(2, 9), "large": Few(5, 3)})
    for split, count in ("train", 5), ("test", 3):
        tasks = mixture.tasks(split)
        assert [task["env"] for task in tasks] == ["small", "large"] * count
        assert [mixture.observe(task, ["a step"])[0] for task in tasks[:4]] == ["0 1", "0 1", "1 1", "1 1"]
    numbers = [task["task"]["number"] for task in mixture.tasks("train") if task["env"] == "small"]
    assert numbers == [0, 1, 0, 1, 0]  # again and again


def test_a_mixture_scores_each_environment_as_one_batch():
    """Steps of one branch for another, parts of two environments as one metric, and no pass@k."""
    one, two, idle = Few(4, 4, {"all_passed": 1.0, "share": 0.5}), Few(4, 4, {"share": 0.25}), Few(4, 4)
    mixture = envs.Mixture({"one": one, "two": two, "idle": idle})
    tasks = [task for task in mixture.tasks("train") if task["env"] != "idle"]
    steps = mixture.step([(task, [], [str(k), ""]) for k, task in enumerate(tasks)])
    assert (one.batches, two.batches, idle.batches) == ([4], [4], [])
    assert [step.actions[0] for step in steps] == [step.feedback[0] for step in steps] == list("01234567")
    assert [step.reward for step in steps] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert steps[2].parts == {"all_passed": 1.0, "one/share": 0.5, "one/reward": 1.0}
    assert steps[3].parts == {"two/share": 0.25, "two/reward": 1.0}


# ---------------------------------------------------------------- data sets


def test_each_form_of_a_file_holds_the_same(tmp_path, written):
    """A form that is refused, or read with other rows, and a train split that holds test rows."""
    table = datasets.Dataset.from_list(posts(25))
    table.to_parquet(str(tmp_path / "a.parquet"))
    table.to_csv(str(tmp_path / "a.csv"))
    (tmp_path / "a.json").write_text(json.dumps(posts(25)))
    path = written(posts(25))
    for name in path, "a.parquet", "a.csv", "a.json":
        env = envs.make("tldr", dataset=str(tmp_path / name))
        assert env.tasks("train") == posts(25)[:23] and env.tasks("test") == posts(25)[23:], name


def test_a_split_column_is_obeyed(written):
    names = ["test"] * 3 + ["train"] * 5 + ["dev", None]
    lines = [{**row, "split": split} for row, split in zip(posts(10), names)]
    env = envs.make("tldr", dataset=written(lines))
    assert env.tasks("test") == lines[:3] and env.tasks("train") == lines[3:8]
    numbered = [{**HUMANEVAL, "task_id": f"HumanEval/{i}", "split": ("test", "train")[i % 2]} for i in range(4)]
    assert ids(envs.make("humaneval", dataset=written(numbered)), "train") == ["HumanEval/1", "HumanEval/3"]


ODD_POSTS = {
    "no text in prompt": [{"completion": "b"}, {"prompt": " \n", "completion": "b"}],
    "no text in completion": [{"prompt": "a"}, {"prompt": "a", "completion": ["b"]}],
    "conversation": [
        {"prompt": [{"role": "user", "content": "a"}] * 2, "completion": "b"},
        {"prompt": ["a"], "completion": "b"},
    ],
}


@pytest.mark.parametrize("why", ODD_POSTS)
def test_a_row_that_cannot_be_used_is_left_out_and_named(why, written, capsys):
    """A row's fault that refuses the file, or that is named by another number than its own in the file."""
    for odd in ODD_POSTS[why]:
        env = envs.make("tldr", dataset=written([*posts(7), odd, *posts(12)[7:]]))
        assert env.tasks("train") + env.tasks("test") == posts(12) and len(env.tasks("test")) == 1
        said = capsys.readouterr().out
        assert "1 rows are left out: row 8: " in said and why in said
    with pytest.raises(ValueError, match=rf"has no row that can be used.*row 2: .*{why}"):
        envs.make("tldr", dataset=written([posts(1)[0], odd]))


def test_a_prompt_may_be_a_message_of_a_user(tmp_path, written):
    """Data as TRL and verl write it."""
    rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in posts(4)]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    for path in written(rows), str(tmp_path / "a.parquet"):
        assert envs.make("tldr", dataset=path).tasks("train") == posts(3)


@pytest.mark.parametrize("content", ["", "{'prompt'\n", "[1]\n[2]\n", '{"prompt": "half \\ud83d"}\n'])
def test_a_file_that_does_not_load_is_one_sentence(content, tmp_path):
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(ValueError, match=r"^--dataset .*bad\.jsonl: it could not be loaded .*mend the file\.$"):
        envs.make("tldr", dataset=str(tmp_path / "bad.jsonl"))


def serve(monkeypatch, rows):
    """Serves rows in place of the hub; returns what was asked of it."""
    asked = []

    def load_dataset(path, config, split):
        asked.append((path, config, split))
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_the_hub_is_asked_for_the_documented_slices(monkeypatch):
    for name, hub, held_out, row in (
        ("tldr", "trl-lib/tldr", "test", posts(1)[0]),
        ("arxiv", "OpenMLRL/arXiv_abstract", "val", {"abstract_text": "a"}),
    ):
        asked = serve(monkeypatch, [row])
        assert envs.make(name, dataset="hub").tasks("test") == [row]
        assert asked == [(hub, None, f"{part}[:1000]") for part in ("train", held_out)]
    envs.make("arxiv", dataset="someone/own")
    assert asked[2:] == [("someone/own", None, part) for part in ("train", "test")]


# ---------------------------------------------------------------- what is tried before a task is used

SKELETON = CLASSEVAL["skeleton"]
# For each public set: an ordinary row, the form of its ids, the first and last number of train and of test, and odd
# rows in its columns.
PUBLIC = {
    "mbpp": (MBPP, "{}", (601, 974), (11, 510), ["google-research-datasets/mbpp", "sanitized"]),
    "humaneval": (HUMANEVAL, "HumanEval/{}", (33, 132), (133, 163), ["openai/openai_humaneval", None]),
    "coophumaneval": (HUMANEVAL, "CoopHumanEval/{}", (0, 49), (66, 81), ["OpenMLRL/CoopHumanEval", None]),
    "classeval": (CLASSEVAL, "ClassEval_{}", (0, 65), (66, 81), ["FudanSELab/ClassEval", None]),
}
DEEP = "y = " + "-" * 20_000 + "x\n"
ODD = {
    "mbpp": [
        {"code": "def f(x):\n    return x + 2"},  # the reference fails
        {"code": "def f(x):\n    return x"},  # and so does one that a trivial answer equals
        {"code": "def g(x):\n    return x + 1"},  # nothing that the tests call
        {"code": "def aux(x):\n    return x + 1", "test_list": ["assert aux(1) == 2", "assert aux(2) == 3"]},
        {"code": DEEP + MBPP["code"]},
        {"test_list": MBPP["test_list"][:1]},  # none is left to score
        {"test_list": MBPP["test_list"][:1] * 2},
        {"test_imports": ["import numpy"]},
    ],
    "humaneval": [
        {"canonical_solution": "    return None\n"},
        {"entry_point": "g"},
        {"test": "def check(candidate:\n    assert candidate([1])"},
        {"test": "import numpy as np\n" + HUMANEVAL["test"]},
        {"test": "def check(candidate):\n    candidate([])"},
        {"test": f"def check(candidate):\n    assert candidate([0]) == {HUMANEVAL['entry_point']}([0])"},
    ],
    "coophumaneval": [
        {"test": "def check(candidate):\n    assert candidate([]) == 0"},  # a trivial answer passes
        {"test": "def check(candidate):\n    while not candidate([1]): pass\n    assert candidate([]) == 1"},
        {"entry_point": None},
    ],
    "classeval": [
        {"skeleton": "'''\n" + SKELETON.replace("'''", '"""') + "\n'''"},  # as ClassEval_5: Python without a class
        {"class_name": "Nowhere"},
        {"solution_code": SKELETON},  # nothing is left to write
        {"solution_code": CLASSEVAL["solution_code"].replace("return", "return not")},
        {"test": "import unittest\nclass T(unittest.TestCase):\n    def test(self): pass"},
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
    row, form, train, test, hub = PUBLIC[name]
    row = {key: value for key, value in row.items() if key not in ("helper", "main", "methods", "surplus")}
    if name == "coophumaneval":
        del row["canonical_solution"]
    numbers = [*test, *train]
    rows = [{**row, "task_id": form.format(number)} for number in numbers]
    odd = [{**row, "task_id": form.format(train[0] + 1 + k), **change} for k, change in enumerate(ODD[name])]
    mixed = [*rows[:1], *odd, {**row, "task_id": "odd"}, *rows[1:]]
    whole = [{**({"task_id": None} | dict.fromkeys(row)), **each} for each in mixed]
    asked = serve(monkeypatch, whole)
    monkeypatch.setattr(datasets.Dataset, "from_list", list)  # a column of several types
    env = envs.make(name, dataset="hub", timeout="2")
    assert asked == [(*hub, "train+test+validation+prompt" if name == "mbpp" else "test")]
    assert ids(env, "train") == [form.format(number) for number in train]
    assert ids(env, "test") == [form.format(number) for number in test]
    said = capsys.readouterr().out
    assert f"{len(odd) + 1} rows are left out: " in said
    assert all(f"row {place} (task {each['task_id']}): " in said for place, each in enumerate(odd[:7], 2))


@pytest.mark.parametrize(
    "tests, returned, shown",
    [
        (("f(1) == 2", "f(2) == 3", "f(3) == 4"), "x + 1", 0),
        (("math.isclose(f(1), 0.18)", "math.isclose(f(2), 0)", "math.isclose(f(3), 0)"), "{1: 0.18}.get(x, 0)", 1),
        (("f(1) == 5", "f(2) == 2", "f(3) == 2"), "{1: 5}.get(x, 2)", 1),
        (("f(1)", "not f(2)", "not f(3)"), "x == 1", 1),
        (("f(5, 9) == 9", "f(1, 2) == 1", "f(4, 3) == 4"), "{5: 9}.get(x, x)", 1),
        (("f(1) == 0", "f(2) == 0"), "0", None),
    ],
)
def test_no_trivial_answer_passes_the_tests_that_are_scored(tests, returned, shown, written):
    """`return 0`, another constant or the argument for full marks."""
    asserts = [f"assert {test}" for test in tests]
    row = {"code": f"def f(x, y=0):\n    return {returned}", "test_list": asserts, "test_imports": ["import math"]}
    rows = [MBPP | {"task_id": "a"}, MBPP | row | {"task_id": "b"}, MBPP | {"task_id": "c"}]
    tasks = envs.make("mbpp", dataset=written(rows)).tasks("train")
    if shown is None:
        assert [task["task_id"] for task in tasks] == ["a"]
    else:
        assert tasks[1]["examples"] == [asserts[shown]] and asserts[shown] in tasks[1]["problem"]
        assert tasks[1]["tests"].splitlines() == [source for i, source in enumerate(asserts) if i != shown]


def test_a_resume_has_the_same_tasks(written, cache, monkeypatch, capsys):
    """References that are run again, under other conditions."""
    path = written([{**MBPP, "task_id": f"t{k}", **({"code": "def f(x): pass"} if k == 2 else {})} for k in range(9)])
    before = envs.make("mbpp", dataset=path)
    monkeypatch.setattr(tried, "run_tests", None)
    after = envs.make("mbpp", dataset=path)
    assert before.splits == after.splits and len(ids(after, "train")) == 7
    assert len(os.listdir(cache)) == 1
    assert capsys.readouterr().out.count("row 3 (task t2): its reference solution fails") == 2
    with pytest.raises(TypeError):  # other rows are tried
        envs.make("mbpp", dataset=written([{**MBPP, "task_id": f"t{k}"} for k in range(9)]))


def test_the_processes_of_a_run_have_the_same_tasks(cache):
    """The verdict of the first that has written counts, also for one that was trying then."""

    def slow():
        assert tried.remembered(["key", []], lambda: "first") == "first"
        return "second"

    assert tried.remembered(["key", []], slow) == "first"
    cache.joinpath("verdicts").mkdir()
    assert len(list(cache.iterdir())) == 2  # and no other file stays


def test_no_more_than_the_limit_are_tried_and_it_is_said(written, monkeypatch, capsys):
    monkeypatch.setattr(data, "LIMIT", 3)
    rows = [{**MBPP, "task_id": f"t{k}"} for k in range(20)]
    env = envs.make("mbpp", dataset=written(rows))
    assert ids(env, "train") == ["t0", "t1", "t2"] and ids(env, "test") == ["t18", "t19"]
    assert "train 3 of 18 rows" in capsys.readouterr().out
    assert len(envs.make("tldr", dataset=written(posts(20))).tasks("train")) == 18


def test_examples_that_the_reference_fails_are_not_shown(written):
    shown = CLASSEVAL["skeleton"].split(">>> ")[-1]
    wrong = {"skeleton": CLASSEVAL["skeleton"].replace(shown, f"c.result()\n        123456\n        >>> {shown}")}
    env = envs.make("classeval", dataset=written([{**CLASSEVAL, **wrong, "task_id": str(k)} for k in range(2)]))
    (example,) = env.tasks("test")[0]["examples"]
    assert "== 123456" not in example and "123456" in env.tasks("test")[0]["problem"]


# ---------------------------------------------------------------- code


def branches(env, answers):
    task = env.tasks("train")[0]
    return task, env.step([(task, [], answer) for answer in answers])


@pytest.mark.parametrize("num_agents", [1, 2, 3])
def test_each_agent_is_asked_for_its_own_function(num_agents):
    env = envs.make("humaneval", num_agents, 2)
    task = env.tasks("train")[0]
    *helpers, main = env.observe(task, [])
    names = [[], ["aux"], ["aux1", "aux2"]][num_agents - 1]
    problem = task["problem"].strip()
    assert helpers == [f"{problem}\n\nWrite a helper function {name} for this. Function code only." for name in names]
    assert main.startswith(f"{problem}\n\nWrite {task['entry_point']}.")
    assert all(f"{name}(...)" in main for name in names) and task["tests"].splitlines()[1] not in main


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
        assert prompt.startswith(task["problem"].strip())
        assert (f"Write these methods of {task['class_name']}: {own}." in prompt) == bool(own)
    assert len(prompts) == num_agents


@pytest.mark.parametrize("name, turns", [("humaneval", 1), ("humaneval", 2), ("classeval", 2)])
def test_demonstrations_answer_the_prompts_of_training_tasks(name, turns):
    env = envs.make(name, 2, turns)
    prompts = {prompt for task in env.tasks("train") for prompt in env.observe(task, [])}
    pairs = env.demonstrations()
    first = [pair for pair in pairs if pair["prompt"] in prompts]
    assert len(first) == 2 * len(env.tasks("train"))
    assert all("Your answer:" in pair["prompt"] for pair in pairs if pair not in first)
    assert (len(pairs) > len(first)) == (turns == 2)
    answers = ([pair["completion"] for pair in first[k : k + 2]] for k in range(0, len(first), 2))
    assert all(step.done for step in env.step([(task, [], said) for task, said in zip(env.tasks("train"), answers)]))


# ---------------------------------------------------------------- writing


def test_agents_get_the_reward_of_their_texts():
    pair, three, single = (envs.make("tldr", num_agents) for num_agents in (2, 3, 1))
    task = pair.tasks("test")[0]
    texts = [task["completion"], task["prompt"]]
    post = "\n".join(line.split(":", 1)[1] for line in task["prompt"].splitlines() if ":" in line)  # without its form
    expected = pair_reward(*texts, source=post, reference=task["completion"])
    step, back = pair.step([(task, [], texts), (task, [], texts[::-1])])
    assert (step.reward, step.parts) == expected and step.done and back.reward != step.reward
    (ladder,) = three.step([(task, [], [*texts, "too short"])])
    assert ladder.reward == pytest.approx(step.reward / 2)
    joined = f"\n{writing.MARKER}\n".join(texts)
    steps = single.step([(task, [], [joined]), (task, [], [" ".join(texts)])])
    assert [each.reward for each in steps] == [step.reward, 0]  # without the marker there is no second paragraph


def test_thoughts_are_no_part_of_a_text():
    env = envs.make("tldr")
    task = env.tasks("test")[0]
    texts = [task["completion"], task["prompt"]]
    said = texts, [f"<think>\nso {'so ' * 300}</think>\n\n{text}" for text in texts], [f"<think>\n{t}" for t in texts]
    plain, thoughtful, cut_off = env.step([(task, [], answer) for answer in said])
    assert plain[1:] == thoughtful[1:] and plain.reward > 0 == cut_off.reward
