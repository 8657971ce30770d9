"""envs.make and the writing environment: what they return, and the one sentence for everything that can be wrong."""

import inspect
import json
import os
import subprocess
import sys

import datasets
import pyarrow
import pytest
from pyarrow import parquet

import envs
from envs import Step, samples, writing
from rewards.writing import ARXIV, pair_reward

DATA = os.path.join(os.path.dirname(__file__), "..", "..", "shared", "data")
SCITLDR, ABSTRACTS = os.path.join(DATA, "scitldr.jsonl"), os.path.join(DATA, "arxiv.jsonl")

USER_MODULE = """
from envs import Step

class Echo:
    def __init__(self, num_agents, num_turns, dataset, seed, reward="plain"):
        self.num_agents, self.num_turns, self.given = num_agents, num_turns, (dataset, seed, reward)

    def tasks(self, split):
        return [{"say": split}]

    def observe(self, task, history):
        return [task["say"]] * self.num_agents

    def step(self, branches):
        return [Step(actions, float(actions[0] == task["say"]), {}, True) for task, _, actions in branches]
"""


@pytest.fixture
def user_folder(tmp_path, monkeypatch):
    """A folder with the user's module, as where `python script.py --env tutti_user_env:Echo` is run."""
    (tmp_path / "tutti_user_env.py").write_text(USER_MODULE)
    (tmp_path / "tutti_broken_env.py").write_text("import tutti_absent_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tutti_user_env", raising=False)


def rows(count):
    return [{"prompt": f"POST: text {i}\n\nTL;DR:", "completion": f"sum {i}"} for i in range(count)]


def write_jsonl(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


# ---------------------------------------------------------------- make


def test_users_class_gets_the_arguments_and_the_options(user_folder):
    env = envs.make("tutti_user_env:Echo", num_agents=3, num_turns=2, dataset="mine", seed=7, reward="odd")
    assert (env.num_agents, env.num_turns, env.given) == (3, 2, ("mine", 7, "odd"))
    task = env.tasks("test")[0]
    assert env.step([(task, [], env.observe(task, []))])[0].reward == 1.0


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"name": "tdlr"}, ["tdlr", "tldr, arxiv", "module:Class"]),
        ({"name": "tldr+"}, ["tldr, arxiv"]),
        ({"name": "tutti_user_env:Ehco"}, ["Ehco"]),
        ({"name": "tutti_user_env:Echo", "feedback": "plain"}, ["--env-kwargs feedback", "reward"]),
        ({"name": "tldr+arxiv", "feedback": "plain"}, ["--env-kwargs feedback", "reward"]),
        ({"name": "tldr", "reward": "best"}, ["--env-kwargs reward best", "plain", "grounded"]),
        ({"name": "tldr", "num_agents": 0}, ["--num-agents 0"]),
        ({"name": "tldr", "num_turns": 0}, ["--num-turns 0"]),
        ({"name": "tldr", "num_turns": 2}, ["--num-turns 2"]),
        ({"name": "arxiv", "num_agents": 5}, ["--num-agents 5", "at most 4"]),
        ({"name": "tldr", "dataset": "nowhere.jsonl"}, ["--dataset nowhere.jsonl"]),
    ],
)
def test_one_sentence_names_the_argument(user_folder, arguments, words):
    """A misspelt name or option that is a traceback, or is ignored in silence."""
    with pytest.raises(ValueError) as caught:
        envs.make(**arguments)
    message = str(caught.value)
    assert all(word in message for word in words) and "\n" not in message and message.endswith("."), message


def test_an_error_inside_the_users_module_is_not_hidden(user_folder):
    with pytest.raises(ModuleNotFoundError, match="tutti_absent_dependency"):
        envs.make("tutti_broken_env:Env")


def test_sample_tasks_need_no_datasets_library():
    code = "import sys, envs; envs.make('tldr'); assert not {'datasets', 'torch', 'envs.coding'} & set(sys.modules)"
    root = os.path.dirname(os.path.dirname(os.path.abspath(envs.__file__)))
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)


# ---------------------------------------------------------------- mixtures


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

    def demonstrations(self):
        return [{"prompt": str(self.counts["train"]), "completion": ""}]


def test_a_mixture_has_equal_shares():
    """A large set that crowds out a small one, in training or in evaluation, or a task of one for another's."""
    mixture = envs.Mixture({"small": Few(2, 9), "large": Few(5, 3)})
    for split, count in ("train", 5), ("test", 3):
        tasks = mixture.tasks(split)
        assert [task["env"] for task in tasks] == ["small", "large"] * count
        assert [mixture.observe(task, ["a step"])[0] for task in tasks[:4]] == ["0 1", "0 1", "1 1", "1 1"]
    numbers = [task["task"]["number"] for task in mixture.tasks("train") if task["env"] == "small"]
    assert numbers == [0, 1, 0, 1, 0]  # again and again
    assert [pair["prompt"] for pair in mixture.demonstrations()] == ["2", "5"]


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
    two.step = lambda branches: [Step(actions, [1.0, 4.0], {}, True) for _, _, actions in branches]
    (step,) = mixture.step([(tasks[1], [], ["", ""])])
    assert step.reward == [1.0, 4.0] and step.parts == {"two/reward": 2.5} and step.done


def test_options_go_to_the_environments_that_know_them(user_folder):
    """An option of one environment that stops, or does not reach, the others."""
    mixture = envs.make("tldr+mbpp+tutti_user_env:Echo", num_agents=1, seed=3, reward="grounded", feedback="plain")
    tldr, mbpp, echo = mixture.environments.values()
    assert tldr.grounded and mbpp.feedback == "plain" and echo.given == ("sample", 3, "grounded")
    tasks = [next(task for task in mixture.tasks("test") if task["env"] == name) for name in mixture.environments]
    prompts = [mixture.observe(task, []) for task in tasks]
    assert prompts == [env.observe(task["task"], []) for env, task in zip((tldr, mbpp, echo), tasks)]
    assert mixture.step([(tasks[2], [], ["test"])])[0].parts == {"tutti_user_env:Echo/reward": 1.0}


# ---------------------------------------------------------------- datasets


def test_jsonl_is_split_into_a_disjoint_train_and_test(tmp_path, capsys):
    env = envs.make("tldr", dataset=write_jsonl(tmp_path / "posts.jsonl", rows(25)))
    assert env.tasks("train") == rows(25)[:23] and env.tasks("test") == rows(25)[23:]
    assert "rows 1 to 23 are train, rows 24 to 25 are test" in capsys.readouterr().out
    env = envs.make("tldr", dataset=write_jsonl(tmp_path / "two.jsonl", rows(2)))
    assert len(env.tasks("train")) == len(env.tasks("test")) == 1


def test_json_and_parquet_hold_the_same(tmp_path):
    (tmp_path / "posts.json").write_text(json.dumps(rows(10)))
    datasets.Dataset.from_list(rows(10)).to_parquet(str(tmp_path / "posts.parquet"))
    for name in ("posts.json", "posts.parquet"):
        env = envs.make("tldr", dataset=str(tmp_path / name))
        assert env.tasks("train") == rows(10)[:9] and env.tasks("test") == rows(10)[9:]


def test_a_split_column_is_obeyed(tmp_path, capsys):
    lines = [{**row, "split": "test" if i < 3 else "train"} for i, row in enumerate(rows(9))]
    env = envs.make("tldr", dataset=write_jsonl(tmp_path / "posts.jsonl", lines))
    assert env.tasks("test") == lines[:3] and env.tasks("train") == lines[3:]
    assert "left out" not in capsys.readouterr().out
    env = envs.make(
        "tldr", dataset=write_jsonl(tmp_path / "more.jsonl", [*lines, *(x | {"split": "dev"} for x in rows(2))])
    )
    assert env.tasks("test") == lines[:3] and env.tasks("train") == lines[3:]
    assert "2 rows of other splits are left out" in capsys.readouterr().out


def test_what_train_and_test_share_is_said(tmp_path, capsys):
    envs.make("tldr", dataset=write_jsonl(tmp_path / "new.jsonl", rows(20)))
    assert "of a row of train" not in capsys.readouterr().out
    lines = [{**row, "split": "test"} for row in rows(5)] + [{**row, "split": "train"} for row in rows(9)[3:]]
    envs.make("tldr", dataset=write_jsonl(tmp_path / "shared.jsonl", lines))
    assert "shared.jsonl: 2 rows of test have the prompt of a row of train" in capsys.readouterr().out
    for env, row, asked in ("humaneval", HUMANEVAL, "prompt"), ("classeval", CLASSEVAL, "skeleton"):
        tasks = [{**row, "task_id": f"mine {i}"} for i in range(20)]
        envs.make(env, dataset=write_jsonl(tmp_path / "own.jsonl", tasks))
        assert f"own.jsonl: 2 rows of test have the {asked} of a row of train" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content, words",
    [
        ("", ["0 rows", "at least 2"]),
        ('{"prompt": "a", "completion": "b"}\n', ["1 rows", "at least 2"]),
        ('{"prompt": "a"}\n{"prompt": "b"}\n', ["missing column completion", "found prompt"]),
        ('{"text": "a"}\n{"text": "b"}\n', ["missing column prompt, completion", "found text"]),
        ('{"prompt": "a", "completion": null}\n' * 2, ["row 1 of the split train has no text", "in completion;"]),
        (
            '{"prompt": "a", "completion": "b", "split": "train"}\n' * 2,
            ["split test is empty; call some rows test in its column split"],
        ),
        (
            '{"prompt": "a", "completion": "b", "split": "train"}\n{"prompt": "a", "completion": "b"}\n' * 2,
            ["only 2 of 4 rows have a split"],
        ),
        ('{"prompt": "a", "completion": "b"}\n' * 12 + '{"prompt": "a"}\n', ["row 1 of the split test"]),
        ('{"prompt": "a", "completion": "b"}\n' * 2 + '{"prompt": "a"}\n' * 12, ["row 3 of the split train"]),
        ("{'prompt'\n", ["not valid jsonl"]),
        (json.dumps(rows(1)[0]) + '\n\n{"prompt": "a"', ["not valid jsonl after row 1 ("]),
        ("[1]\n[2]\n", ["one JSON object per row"]),
        ('{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}\n", ["not valid jsonl"]),
        (
            json.dumps(rows(1)[0]) + '\n{"prompt": "a", "completion": 3}\n' * 2,
            ["row 2 of the split train", "completion"],
        ),
        ('{"prompt": ["a"], "completion": "b"}\n' * 2, ["row 1 of the split train", "prompt"]),
        ('{"prompt": {"a": 1}, "completion": "b"}\n' * 2, ["row 1 of the split train", "prompt"]),
        ('{"prompt": " \\n", "completion": "b"}\n' * 2, ["row 1 of the split train has no text", "in prompt;"]),
        ('{"prompt": "half \\ud83d", "completion": "b"}\n' * 2, ["row 1 of the split train", "prompt", "UTF-8"]),
    ],
)
def test_what_a_file_can_lack(tmp_path, content, words):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError) as caught:
        envs.make("tldr", dataset=str(path))
    message = str(caught.value)
    assert all(word in message for word in [f"--dataset {path}", *words]), message
    assert "\n" not in message


def test_a_file_of_another_form_is_not_asked_of_the_hub(tmp_path):
    with pytest.raises(ValueError, match=r"absent\.csv: a file of unknown form"):
        envs.make("tldr", dataset="absent.csv")
    (tmp_path / "a.csv").write_text("prompt,completion\na,b\n")
    with pytest.raises(ValueError, match=r"a\.csv: a file of unknown form; make it a \.jsonl"):
        envs.make("tldr", dataset=str(tmp_path / "a.csv"))


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="no /proc")
def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path):
    path = str(tmp_path / "a.jsonl")
    os.symlink("/proc/self/mem", path)  # reading it fails, also for root
    with pytest.raises(ValueError, match=r"--dataset .*a\.jsonl: it cannot be read \(Input/output error\).*\.$"):
        envs.make("arxiv", dataset=path)


def test_a_parquet_file_that_does_not_load_is_to_be_fixed(tmp_path):
    broken, empty = tmp_path / "broken.parquet", tmp_path / "empty.parquet"
    broken.write_bytes(b"PAR1")
    parquet.write_table(pyarrow.table({"abstract_text": []}), empty)
    for path in broken, empty:  # what datasets says of the second is that an error occurred
        with pytest.raises(ValueError, match=r"could not be loaded \(Arrow.*\); fix the file\.$"):
            envs.make("arxiv", dataset=str(path))


def test_binary_text_is_refused(tmp_path):
    path = str(tmp_path / "posts.parquet")
    datasets.Dataset.from_list([{"abstract_text": b"a"}] * 2).to_parquet(path)
    with pytest.raises(ValueError, match=r"--dataset .*row 1 of the split train.*UTF-8.*abstract_text.*\.$"):
        envs.make("arxiv", dataset=path)


def test_a_byte_order_mark_is_no_text(tmp_path):
    for name, text in (
        ("a.jsonl", '{"abstract_text": "é"}\n' * 2),
        ("a.json", json.dumps([{"abstract_text": "é"}] * 2)),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert envs.make("arxiv", dataset=str(tmp_path / name)).tasks("test") == [{"abstract_text": "é"}]


HUMANEVAL, CLASSEVAL = samples.coding_tasks("train", 1, 1)[0], samples.class_tasks("train", 1, 1)[0]
MBPP = {"task_id": 7, "prompt": "Add one.", "code": "def f(x):\n    return x + 1", "test_imports": []}
MBPP["test_list"] = ["assert f(1) == 2", "assert f(2) == 3"]
# Tests of HumanEval's form by which every answer would fail, and so earn nothing, for as long as it is trained.
UNUSABLE_TESTS = {
    "syntax error": "def check(candidate:\n    assert candidate(1)",
    "byte order mark": "\ufeff" + HUMANEVAL["test"],
    "indented": "    " + HUMANEVAL["test"].strip(),
    "NUL": HUMANEVAL["test"] + "\0",
    "surrogate": HUMANEVAL["test"] + "# \ud83d",
    "empty": "",
    "number": 5,
    "list": [],
    "no check": "def test(candidate):\n    assert candidate(1) == 1",
    "a check without an assert": "def check(candidate):\n    candidate(1)",
    "asserts alone": "assert f(1) == 1",
}
DEEP = {"signs": "-" * 20_000 + "x", "attributes": "x" + ".a" * 20_000}
MALFORMED = {
    **{f"test: {name}": ("humaneval", HUMANEVAL, {"test": test}) for name, test in UNUSABLE_TESTS.items()},
    **{
        f"prompt: {name}": ("humaneval", HUMANEVAL, {"prompt": f"y = {deep}\n{HUMANEVAL['prompt']}"})
        for name, deep in DEEP.items()
    },
    **{f"code: {name}": ("mbpp", MBPP, {"code": f"{MBPP['code']}\ny = {deep}"}) for name, deep in DEEP.items()},
    "test: a package": ("humaneval", HUMANEVAL, {"test": f"import numpy as np\n{HUMANEVAL['test']}"}),
    "test: a package in its function": (
        "humaneval",
        HUMANEVAL,
        {"test": HUMANEVAL["test"].replace("(candidate):\n", "(candidate):\n    import numpy\n", 1)},
    ),
    "prompt: a package": ("humaneval", HUMANEVAL, {"prompt": f"from numpy import array\n{HUMANEVAL['prompt']}"}),
    "imports of a package": ("mbpp", MBPP, {"test_imports": ["import math, numpy.linalg"]}),
    "code: a package": ("mbpp", MBPP, {"code": f"import numpy\n{MBPP['code']}"}),
    "imports in one text": ("mbpp", MBPP, {"test_imports": "import math"}),
    "imports that are no text": ("mbpp", MBPP, {"test_imports": [5]}),
    "imports that are no Python": ("mbpp", MBPP, {"test_imports": ["import"]}),
    "a test that is a loop": ("mbpp", MBPP, {"test_list": [*MBPP["test_list"], "while f(1) < 2: pass"]}),
    "imports that are names": ("mbpp", MBPP, {"test_imports": ["math"]}),
    "tests in one text": ("mbpp", MBPP, {"test_list": "\n".join(MBPP["test_list"])}),
    "tests that are no text": ("mbpp", MBPP, {"test_list": [*MBPP["test_list"], {}]}),
    **{
        f"{column}: {value!r}": ("classeval", CLASSEVAL, {column: value})
        for column in ("skeleton", "test", "solution_code", "class_name")
        for value in (5, ["a"], {"a": 1}, "\ud83d")
    },
    **{
        f"{column}: {name}": ("classeval", CLASSEVAL, {column: f"{CLASSEVAL[column]}\ny = {deep}"})
        for column in ("skeleton", "test", "solution_code")
        for name, deep in DEEP.items()
    },
    "a test of a tuple": ("mbpp", MBPP, {"test_list": [*MBPP["test_list"], "assert (f(3) == 4, 'no')"]}),
    "a test of nothing": ("mbpp", MBPP, {"test_list": ["assert f(1) == 2", "assert True"]}),
    "test: asserts only of constants": (
        "humaneval",
        HUMANEVAL,
        {"test": "def check(candidate):\n    try: candidate(1)\n    except TypeError: pass\n    else: assert False"},
    ),
    "two equal tests": ("mbpp", MBPP, {"test_list": MBPP["test_list"][:1] * 2}),
    "a test that has the answer": ("mbpp", MBPP, {"test_list": [*MBPP["test_list"], "assert f(3) == 4\nf = abs"]}),
    "test: the answer": (
        "humaneval",
        HUMANEVAL,
        {"test": f"from math import prod as {HUMANEVAL['entry_point']}\n{HUMANEVAL['test']}"},
    ),
    "test: asserts only in a class": (
        "humaneval",
        HUMANEVAL,
        {"test": "class A:\n    def eq(self, x): assert x\ndef check(candidate):\n    A().eq(candidate(1) == 2)"},
    ),
    "test: a function beside its class": (
        "classeval",
        CLASSEVAL,
        {"test": f"{CLASSEVAL['test']}\n\ndef test_more():\n    assert False\n"},
    ),
    "a name without UTF-8": ("humaneval", HUMANEVAL, {"task_id": "\ud83d"}),
    "a function of the tests' name": (
        "humaneval",
        HUMANEVAL,
        {"entry_point": "check", "prompt": HUMANEVAL["prompt"].replace(" f(", " check(")},
    ),
    "a function of a helper's name": (
        "humaneval",
        HUMANEVAL,
        {"entry_point": "aux", "prompt": HUMANEVAL["prompt"].replace(" f(", " aux(")},
    ),
    "MBPP's function of a helper's name": (
        "mbpp",
        MBPP,
        {"code": "def aux(x):\n    return x + 1", "test_list": ["assert aux(1) == 2", "assert aux(2) == 3"]},
    ),
    "a class that is not there": ("classeval", CLASSEVAL, {"class_name": "Nowhere"}),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_rows_that_cannot_be_trained_on_are_named(name, tmp_path):
    env, row, change = MALFORMED[name]
    path = write_jsonl(tmp_path / "rows.jsonl", [{**row, "task_id": "good"}, {**row, "task_id": "odd", **change}] * 2)
    with pytest.raises(ValueError) as caught:
        envs.make(env, dataset=path)
    message = str(caught.value)
    assert message.startswith(f"--dataset {path}: ") and "\n" not in message and message.endswith(".")
    column = "".join(change)
    assert "task odd is not in" in message or ("row 2 of the split train" in message and f" in {column};" in message)


def test_a_test_without_an_assert_is_told(tmp_path):
    rows = [{**MBPP, "task_id": "odd", "test_list": [*MBPP["test_list"], more]} for more in ("", "f(1)")]
    with pytest.raises(ValueError, match=r"odd is not in .* form .*test_list has an item that is not an assert"):
        envs.make("mbpp", dataset=write_jsonl(tmp_path / "rows.jsonl", rows))


@pytest.mark.parametrize(
    "env, row, change",
    [
        ("humaneval", HUMANEVAL, {"entry_point": "g"}),
        ("mbpp", MBPP, {"code": "def g(x):\n    return x + 1"}),
        ("classeval", CLASSEVAL, {"class_name": "Nowhere"}),
    ],
)
def test_a_name_without_its_definition_is_told(env, row, change, tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{**row, "task_id": "odd", **change}] * 2)
    with pytest.raises(
        ValueError, match=r"odd is not in .* form \(a function or class that it names is missing\); fix"
    ):
        envs.make(env, dataset=path)


def test_a_reference_may_be_blank(tmp_path):
    path = write_jsonl(tmp_path / "posts.jsonl", [{"prompt": "a", "completion": ""}] * 2)
    assert envs.make("tldr", dataset=path).tasks("train")[0]["completion"] == ""


def test_a_package_may_be_tried(tmp_path):
    """What the tests import in a try block need not be there."""
    test = "try:\n    import numpy\nexcept ImportError:\n    numpy = None\n" + HUMANEVAL["test"]
    path = write_jsonl(tmp_path / "rows.jsonl", [{**HUMANEVAL, "task_id": str(i), "test": test} for i in range(2)])
    assert len(envs.make("humaneval", dataset=path).tasks("train")) == 1


@pytest.mark.parametrize(
    "tests, shown",
    [
        (("f(1) == 2", "f(2) == 3", "f(3) == 4"), 0),
        (("f(1) == True", "f(2) == False", "f(3) == False"), 1),
        (("f(1) == 5", "f(2) == 6", "f(3) == 5"), 0),
        (("f(1)", "not f(2)", "not f(3)"), 1),
        (("f(1) == 5", "f(2) == 5"), 0),
        (("f(1) == 0", "f(2) == 2", "f(3) == 3"), 1),
        (("f(5, 9) == 9", "f(1, 2) == 1", "f(4, 3) == 4"), 1),
        (("f(1, 2) == 2", "f(3, 4) == 4", "f(5, 6) == 6"), 0),
        (("f(1) == 5", "f(2) == 2", "f(3) == 2"), 1),
        (("f(1, 1) == 1", "f(2, 5) == 5", "f(5, 3) == 5"), 1),  # rather an argument than a constant
    ],
)
def test_no_constant_and_no_argument_passes_the_tests_of_mbpp_where_that_can_be_had(tests, shown, tmp_path):
    asserts = [f"assert {test}" for test in tests]
    path = write_jsonl(tmp_path / "rows.jsonl", [{**MBPP, "task_id": f"t{i}", "test_list": asserts} for i in range(2)])
    (task,) = envs.make("mbpp", dataset=path).tasks("train")
    assert task["examples"] == [asserts[shown]]
    assert task["tests"].splitlines() == [source for i, source in enumerate(asserts) if i != shown]


def test_a_post_may_end_in_blanks():
    task = envs.make("tldr").tasks("test")[0]
    prompts = [envs.make("tldr").observe({**task, "prompt": task["prompt"] + end}, []) for end in ("", " \n")]
    assert prompts[0] == prompts[1]


def test_a_task_number_may_be_long(tmp_path):
    lines = [{**HUMANEVAL, "task_id": "HumanEval/" + "9" * 5000}] * 2
    env = envs.make("humaneval", dataset=write_jsonl(tmp_path / "rows.jsonl", lines))
    assert len(env.tasks("train")) == len(env.tasks("test")) == 1


def test_a_malformed_doctest_is_no_example(tmp_path):
    prompt = 'def f(x):\n    """One more.\n    >>>f(1)\n    2\n    """\n'
    row = {"task_id": "odd", "prompt": prompt, "entry_point": "f", "test": "def check(f):\n    assert f(1) == 2"}
    env = envs.make("humaneval", 1, dataset=write_jsonl(tmp_path / "rows.jsonl", [row] * 2))
    task = env.tasks("test")[0]
    assert task["examples"] == [] and env.step([(task, [], ["def f(x):\n    return x + 1"])])[0].done


def test_asserts_may_stand_in_a_function_beside_check(tmp_path):
    """As in HumanEval+, where each of a loop's rounds counts."""
    test = "def assertion(out, exp):\n    assert out == exp\n\n"
    test += (
        "def check(candidate):\n    for x, y in [(1, 2), (2, 3), (5, 6), (0, 7)]:\n        assertion(candidate(x), y)"
    )
    row = {"task_id": "plus", "prompt": 'def f(x):\n    """One more."""\n', "entry_point": "f", "test": test}
    env = envs.make("humaneval", 1, dataset=write_jsonl(tmp_path / "rows.jsonl", [row] * 2))
    step = env.step([(env.tasks("test")[0], [], ["def f(x):\n    return x + 1"])])[0]
    assert step.parts["passed_share"] == 0.75


@pytest.mark.parametrize("env, row", [("humaneval", HUMANEVAL), ("mbpp", MBPP), ("classeval", CLASSEVAL)])
def test_a_task_without_an_id_is_told(env, row, tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{**row, "task_id": None}] * 2)
    with pytest.raises(ValueError, match=r"row 1 of the split train has no text, .* in task_id; fix the column"):
        envs.make(env, dataset=path)


@pytest.mark.parametrize(
    "dataset, asked",
    [
        ("hub", [("google-research-datasets/mbpp", "sanitized", "train+test+validation+prompt")]),
        ("someone/tasks", [("someone/tasks", None, "train"), ("someone/tasks", None, "test")]),
    ],
)
def test_only_the_benchmarks_own_set_has_its_configuration(dataset, asked, monkeypatch):
    seen, numbered = [], [{**MBPP, "task_id": number} for number in (11, 601)]
    load_dataset = lambda path, config, split: (
        seen.append((path, config, split)) or datasets.Dataset.from_list(numbered)
    )
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    envs.make("mbpp", dataset=dataset)
    assert seen == asked


def test_hub_asks_for_the_documented_slices(monkeypatch):
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return datasets.Dataset.from_list(rows(3))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert envs.make("tldr", dataset="hub").tasks("train") == rows(3)
    assert asked == [(("trl-lib/tldr", None), {"split": f"{s}[:1000]"}) for s in ("train", "test")]
    asked.clear()
    envs.make("tldr", dataset="someone/posts")
    assert asked == [(("someone/posts", None), {"split": s}) for s in ("train", "test")]


@pytest.mark.parametrize("beside", [None, os.mkdir, lambda path: open(path, "w").close()])
def test_unreachable_hub_is_one_sentence(beside, tmp_path, monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("Couldn't reach it\nafter five tries")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    if beside:
        beside("hub")  # a file or folder of the user's by this name is not what is loaded
    with pytest.raises(ValueError) as caught:
        envs.make("tldr", dataset="hub")
    message = str(caught.value)
    assert "--dataset hub" in message and "Couldn't reach it" in message and "sample" in message
    assert "\n" not in message and caught.value.__suppress_context__


@pytest.mark.skipif(not os.path.exists(SCITLDR), reason="no data folder beside the repository")
def test_real_file():
    env = envs.make("tldr", dataset=SCITLDR)
    train, test = env.tasks("train"), env.tasks("test")
    assert len(test) == (len(train) + len(test)) // 10
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in test}
    step = env.step([(test[0], [], [test[0]["completion"], test[0]["prompt"]])])[0]
    assert step.parts["structure"] == 0.5 and 0 < step.parts["rouge"] <= 1


# ---------------------------------------------------------------- tldr


@pytest.mark.parametrize("num_agents", [1, 2, 3, 4])
def test_each_agent_has_its_own_prompt_with_the_post_in_it(num_agents):
    env = envs.make("tldr", num_agents=num_agents)
    task = env.tasks("train")[0]
    prompts = env.observe(task, [])
    assert len(set(prompts)) == num_agents == env.num_agents
    assert task["prompt"].endswith("TL;DR:") and not any("TL;DR:" in prompt for prompt in prompts)
    for i, prompt in enumerate(prompts[1:] if num_agents > 2 else [], start=2):
        assert f"summary {i} of {num_agents}: more detailed than summary {i - 1}," in prompt
    assert all(prompt.startswith(task["prompt"].removesuffix("\n\nTL;DR:") + "\n\n") for prompt in prompts)


def test_two_agents_get_the_reward_of_their_texts():
    env = envs.make("tldr")
    task = env.tasks("test")[0]
    texts = [task["completion"], task["prompt"]]
    post = "\n".join(line.split(":", 1)[1] for line in task["prompt"].splitlines() if ":" in line)  # without its form
    expected = pair_reward(*texts, source=post, reference=task["completion"])
    steps = env.step([(task, [], texts), (task, [], texts[::-1])])
    assert (steps[0].reward, steps[0].parts) == expected and steps[0].done and steps[0].actions == texts
    assert steps[1].reward != steps[0].reward


def test_one_agent_is_scored_on_its_two_paragraphs():
    pair, single = envs.make("tldr"), envs.make("tldr", num_agents=1)
    task = pair.tasks("test")[0]
    one, two = task["completion"], task["prompt"]
    joined = f"{one}\n{writing.MARKER}\n{two}"
    assert single.step([(task, [], [joined])])[0].reward == pair.step([(task, [], [one, two])])[0].reward > 0
    assert single.step([(task, [], [one + " " + two])])[0].reward == 0  # no marker, no second paragraph
    within = f"{one}{writing.MARKER}{two}\n{writing.MARKER}{writing.MARKER}\n{two}"
    assert single.step([(task, [], [within])])[0].reward == 0  # no line of its own
    dashed, spaced = f"a{writing.MARKER}b {one}", f"\n\n {writing.MARKER} \n\n"
    steps = single.step([(task, [], [dashed + spaced + two])]) + pair.step([(task, [], [dashed, two])])
    assert steps[0].reward == steps[1].reward > 0
    thrice = f"{joined}\n{writing.MARKER}\n{two}"  # a second marker is a part of the second paragraph
    steps = single.step([(task, [], [thrice])]) + pair.step([(task, [], thrice.split(f"\n{writing.MARKER}\n", 1))])
    assert steps[0].parts == steps[1].parts
    for before in f"{writing.MARKER}\n", f"\n\n {writing.MARKER} \n{writing.MARKER}\n\n":
        assert single.step([(task, [], [before + joined])])[0].parts == single.step([(task, [], [joined])])[0].parts
    ends = single.step([(task, [], [joined]), (task, [], [joined.replace("\n", "\r\n")])])
    assert ends[0].reward == ends[1].reward


def test_thoughts_are_no_part_of_a_text():
    pair, single = envs.make("tldr"), envs.make("tldr", num_agents=1)
    task = pair.tasks("test")[0]
    texts = [task["completion"], task["prompt"]]
    thought = f"<think>\nPerhaps {'so ' * 300}\n{writing.MARKER}\nor not.\n</think>\n\n"
    plain, thoughtful = pair.step([(task, [], texts), (task, [], [thought + text for text in texts])])
    assert plain[1:] == thoughtful[1:] and plain.reward > 0
    joined = f"\n{writing.MARKER}\n".join(texts)
    assert pair.step([(task, [], ["<think>\n" + text for text in texts])])[0].reward == 0  # cut off in its thoughts
    assert single.step([(task, [], [thought + joined])])[0].reward == plain.reward


def test_three_agents_are_scored_as_neighbours():
    pair, three = envs.make("tldr"), envs.make("tldr", num_agents=3)
    task = pair.tasks("test")[0]
    texts = [task["completion"], task["prompt"], task["prompt"] * 2]
    neighbours = [pair.step([(task, [], texts[i : i + 2])])[0].reward for i in (0, 1)]
    assert three.step([(task, [], texts)])[0].reward == pytest.approx(sum(neighbours) / 2)


def test_grounded_reads_the_post():
    task = envs.make("tldr").tasks("test")[0]
    own, other = " ".join(f"stone{i}" for i in range(10)), " ".join(f"stone{i}" for i in range(22))
    plain = envs.make("tldr").step([(task, [], [own, other])])[0].reward
    grounded = envs.make("tldr", reward="grounded").step([(task, [], [own, other])])[0].reward
    assert plain > 2 and grounded == 0.5
    form = "post title tl dr subreddit " * 2
    step = envs.make("tldr", reward="grounded").step([(task, [], [form, form + form])])[0]
    assert step.parts["grounded"] == 0 and "TITLE:" in task["prompt"]


@pytest.mark.parametrize("num_agents", [1, 2, 3])
def test_demonstrations_use_the_prompts_of_observe(num_agents, monkeypatch):
    monkeypatch.setattr(writing, "DEMONSTRATED_POSTS", 20)
    env = envs.make("tldr", num_agents=num_agents)
    pairs = env.demonstrations()
    assert len(pairs) == 20 * num_agents
    roles = {prompt.split("\n\n")[-1] for prompt in env.observe(env.tasks("train")[0], [])}
    assert {pair["prompt"].split("\n\n")[-1] for pair in pairs} == roles
    if num_agents == 1:
        assert all(writing.MARKER in pair["completion"] for pair in pairs)


def test_demonstrations_of_a_file_are_its_summaries(tmp_path):
    lines = [{**row, "completion": f" {row['completion']}\n"} for row in rows(10)]
    env = envs.make("tldr", dataset=write_jsonl(tmp_path / "posts.jsonl", lines))
    pairs = env.demonstrations()
    assert len(pairs) == 18 and {pair["completion"] for pair in pairs} == {f"sum {i}" for i in range(9)}


# ---------------------------------------------------------------- arxiv


def arxiv_pair():
    """A task and two texts about it that pass the gates: 150 words each, mostly the same."""
    task = envs.make("arxiv").tasks("test")[0]
    return task, [" ".join(f"stone{i}" for i in range(first, first + 150)) for first in (0, 20)]


@pytest.mark.parametrize(
    "num_agents, mine",
    [
        (2, ["background and motivation", "methods and implications"]),
        (3, ["background", "motivation", "methods and implications"]),
        (4, ["background", "motivation", "methods", "implications"]),
    ],
)
def test_arxiv_agents_divide_the_introduction(num_agents, mine):
    env = envs.make("arxiv", num_agents=num_agents)
    task = env.tasks("train")[0]
    prompts = env.observe(task, [])
    assert len(prompts) == num_agents
    for prompt, part in zip(prompts, mine):
        asked, others = prompt.removeprefix(task["abstract_text"]).split("Other writers cover ")
        assert f"into the {part} of an introduction" in asked
        for word in writing.PARTS:  # each part is mine, or I am told that it is covered
            assert (word in others) == (word not in part.split())


def test_arxiv_reward_is_that_of_the_texts():
    task, texts = arxiv_pair()
    expected = pair_reward(*texts, ARXIV, source=task["abstract_text"])
    step = envs.make("arxiv").step([(task, [], texts)])[0]
    assert (step.reward, step.parts) == expected and step.done and "rouge" not in step.parts
    assert step.reward == pytest.approx(0.5 + 1 + 0.5 + 0.6)  # no transitions
    single = envs.make("arxiv", num_agents=1)
    assert writing.MARKER in single.observe(task, [])[0]
    assert single.step([(task, [], [f"\n{writing.MARKER}\n".join(texts)])])[0].reward == step.reward
    assert single.step([(task, [], [" ".join(texts)])])[0].reward == 0
    three = envs.make("arxiv", num_agents=3).step([(task, [], [*texts, "too short"])])[0]
    assert three.reward == pytest.approx(step.reward / 2)
    grounded = envs.make("arxiv", reward="grounded")
    assert grounded.step([(task, [], texts)])[0].reward == 0.5
    own = {"abstract_text": texts[0]}
    assert grounded.step([(own, [], texts)])[0].reward == step.reward


@pytest.mark.parametrize("num_agents", [1, 2, 3])
def test_arxiv_demonstrations_use_the_prompts_of_observe(num_agents, monkeypatch):
    monkeypatch.setattr(writing, "DEMONSTRATED_POSTS", 200)
    env = envs.make("arxiv", num_agents=num_agents)
    pairs = env.demonstrations()
    assert len(pairs) == 200 * num_agents
    assert {pair["prompt"].split("\n\n")[-1] for pair in pairs} == set(env.roles)
    words = [len(pair["completion"].split()) for pair in pairs]
    if num_agents > 1:  # some pass the reward's first level, and some do not
        passing = sum(128 <= n <= 256 for n in words)
        assert 0.5 * len(words) < passing < len(words)


def test_arxiv_asks_the_hub_for_the_documented_slices(monkeypatch):
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return datasets.Dataset.from_list([{"article_id": "1", "abstract_text": "a"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert envs.make("arxiv", dataset="hub").tasks("test") == [{"article_id": "1", "abstract_text": "a"}]
    assert asked == [(("OpenMLRL/arXiv_abstract", None), {"split": f"{s}[:1000]"}) for s in ("train", "val")]


@pytest.mark.skipif(not os.path.exists(ABSTRACTS), reason="no data folder beside the repository")
def test_real_abstracts():
    env = envs.make("arxiv", dataset=ABSTRACTS)
    train, test = env.tasks("train"), env.tasks("test")
    assert len(train) == 23 and len(test) == 2
    steps = env.step([(row, [], [row["abstract_text"]] * 2) for row in train])
    for row, step in zip(train, steps):
        assert step.parts["grounded"] == 1 and step.parts["overlap"] in (0, 1)
        assert (step.reward > 2) == (128 <= len(row["abstract_text"].split()) <= 256)
    assert {step.reward > 2 for step in steps} == {True, False}
    with pytest.raises(ValueError, match=r"--dataset .*; use sample"):
        env.demonstrations()


def test_classes_behind_the_names_take_the_common_arguments():
    for target in set(envs.ENVIRONMENTS.values()):
        module, _, name = target.partition(":")
        env_class = vars(__import__(module, fromlist=[name]))[name]
        assert {"name", "num_agents", "num_turns", "dataset", "seed"} <= set(inspect.signature(env_class).parameters)
