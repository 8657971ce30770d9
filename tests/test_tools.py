"""Tools: who speaks when, which calls are run, and that nothing but a right answer in the right place is paid."""

import json
from collections import Counter

import pytest

import envs
from rewards.tools import calculator, read_call

QUESTION = {"question": "How many?", "answer": "106", "tools": "calculator search read_file write_file list_files"}
QUESTION |= {"needed": "calculator", "files": {"a.csv": "1\n2"}}
SUMS = {"2 * (3 + 4) - -1": "15", "7 // 2 + 7 % 2 + 2 ** 10": "1028", "0.1 + 0.2": "0.3", "1 / 3": "0.3333333333"}
SUMS |= {"sqrt(16) + abs(-2) + max(1, 2.5) - min(3, 4)": "5.5", "round(2.567, 1) + round(7.6)": "10.6"}
TOWERS = ["9**9**9", "2**65", "10**20 * 10**20", "9**64", "1e999999999", "round(1, 10**9)", "(" * 5000 + ")" * 5000]
TOWERS += ["(" * 199, "-" * 198 + "1", "abs(" * 49 + "1" + ")" * 49, "0 ** -1", "2 ** 0.5", "sqrt(-1)", "abs(*[1])"]
WORDS = ["__import__('os')", "(1).real", "'a' * 9", "True + 1", "x = 1", "9j", "\0", "\ud800", "min(1)", "1,000", ""]


def call(tool, **arguments):
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


ADD, BOX = call("calculator", expression="53 * 2"), "\\boxed{106}"
LOOK, NOTE, READ = call("search", query=BOX), call("write_file", name="a", text=BOX), call("read_file", name="a")


def play(env, *said, task=QUESTION):
    """(steps, prompts) of a branch in which the one agent who may speak says this in each turn."""
    steps, prompts = [], []
    for text in said:
        prompts.append(env.observe(task, steps))
        assert sum(prompt is not None for prompt in prompts[-1]) == 1 and not any(step.done for step in steps)
        steps += env.step([(task, [*steps], [text if prompt else "" for prompt in prompts[-1]])])
    return steps, prompts


def outputs(env, *said, task=QUESTION):
    return [step.feedback["output"] for step in play(env, *said, task=task)[0]]


def test_calculator():
    """A wrong value, an error that is raised, a name that is evaluated, or a number that never ends."""
    assert {text: calculator(text) for text in SUMS} == SUMS
    assert [text for text in [*TOWERS, *WORDS] if not calculator(text).startswith("error: ")] == []


def test_a_call_ends_where_its_json_does():
    """Tags within a string that end a call or begin another, and objects that are no call."""
    found, error, rest = read_call(call("search", query=f"</tool_call>{ADD}") + " behind")
    assert found["arguments"] == {"query": f"</tool_call>{ADD}"} and not error and rest == " behind"
    for text in "[1]", "{}", '{"name": "a"}', '{"name": [], "arguments": {}}', "[" * 1999, ADD[11:-13], "":
        assert read_call(f"<tool_call>{text}</tool_call> behind")[::2] == (None, " behind"), text
    assert read_call(ADD.removesuffix("</tool_call>"))[0] is None and read_call(call("a", b="c" * 2000))[0] is None


def test_who_speaks():
    """An answerer that never speaks or that calls, a caller that reads no outputs."""
    _, prompts = play(envs.make("tools", 2, 3), ADD, "DONE", BOX)
    assert [[prompt is None for prompt in turn] for turn in prompts] == [[False, True], [False, True], [True, False]]
    assert "search(query)" in prompts[0][0] and "search(query)" not in prompts[2][1]
    assert ["53 * 2" in "".join(filter(None, turn)) for turn in prompts] == [False, True, True]
    (_, step), _ = play(envs.make("tools"), "DONE.", ADD)
    assert step.done and step.reward == step.parts["calls"] == 0
    _, prompts = play(envs.make("tools", 3, 4), "word " * 41, ADD, ADD, BOX)
    assert [[prompt is None for prompt in turn].index(False) for turn in prompts] == [0, 1, 1, 2]
    assert play(envs.make("tools", 1), ADD, BOX)[0][-1].done


def test_only_a_right_box_of_the_answerer_is_paid():
    """Pay for calls, for their repetition, for an answer of the wrong agent, in a call, an output or a thought."""
    env, wrong = envs.make("tools", 2, 4), "\\boxed{105} \\boxed{106}"
    paid = {(ADD, "DONE", BOX): 1, ("DONE", BOX): 1, (ADD, ADD, ADD, BOX): 0.9, (ADD, "no", "<tool_call>", BOX): 0.9}
    unpaid = [(ADD, ADD, ADD, said) for said in ("", ADD, "106", wrong, ADD + BOX, f"<think>{BOX}")]
    unpaid += [(f"{BOX} {ADD}", "DONE", "Yes."), (NOTE, READ, "DONE", "See there."), (LOOK, BOX, "DONE", "Yes.")]
    for said, reward in [*paid.items(), *((said, 0) for said in unpaid)]:
        steps, _ = play(env, *said)
        assert [step.reward for step in steps] == [0] * (len(said) - 1) + [reward], said
        assert steps[-1].parts["all_passed"] == (reward > 0) and steps[-1].done
    for needed, reward in ("calculator", 0.5), ("", 1):  # the least pay; and where the least number is not known
        (*_, step), _ = play(envs.make("tools", 2, 20), *[ADD] * 14, "DONE", BOX, task=QUESTION | {"needed": needed})
        assert step.reward == reward


def test_files_belong_to_their_branch():
    """A file that another branch reads, and a text that no prompt can hold."""
    env, write = envs.make("tools", 2, 5), call("write_file", name="a", text="seven\ud800" + "x" * 900)
    steps, prompts = play(env, write, call("list_files"), READ, "DONE")
    assert steps[1].feedback["output"] == "a.csv, a" and steps[2].feedback["output"].startswith("seven?x")
    assert prompts[3][0].count("x") < 1500
    assert outputs(env, READ, call("read_file", name="a.csv")) == ["error: there is no such file", "1\n2"]


def test_python_cells_are_replayed(tmp_path, monkeypatch):
    """Names that a later cell lacks or another branch has, an error that ends the run, no need for a sandbox."""
    row = {"question": "How many?", "answer": 7, "tools": "python", "files": '{"a.csv": "12"}'}
    (tmp_path / "a.json").write_text(json.dumps([row] * 2))
    env = envs.make("tools", 2, 5, str(tmp_path / "a.json"), timeout="1")
    task, codes = env.tasks("train")[0], ["x = int(files['a.csv'])", "x += 1\nprint(x)\n1 / 0", "raise SystemExit(3)"]
    found = outputs(env, *(call("python", code=code) for code in [*codes, "while True: pass"]), task=task)
    assert found == ["''", "'13\\nZeroDivisionError: division by zero'", "'SystemExit: 3'", "out of time"]
    history, _ = play(env, call("python", code=codes[0]), task=task)
    steps = env.step([(task, history, [call("python", code=f"x += {k}\nprint(x)"), ""]) for k in (1, 2)])
    assert [step.feedback["output"] for step in steps] == ["'13'", "'14'"]
    monkeypatch.setattr("envs.tools.require_protection", lambda *_: 1 / 0)
    envs.make("tools")
    with pytest.raises(ZeroDivisionError):
        envs.make("tools", dataset=str(tmp_path / "a.json"))


@pytest.mark.parametrize("agents, kinds", [(1, 6), (2, 6), (3, 5)])
def test_sample_tasks_need_their_tools(agents, kinds):
    """A task that its calls do not solve, that takes more calls than there are turns, or that a guess solves."""
    env = envs.make("tools", agents, 4)
    train, test = env.tasks("train"), env.tasks("test")
    for task in [*train[::9], *test[::9]]:
        said = ["plan"] * (agents == 3) + [call(each["name"], **each["arguments"]) for each in task["calls"]]
        said += ["DONE"] * (env.role(play(env, *said, task=task)[0]) == "caller")
        (*_, step), _ = play(env, *said, f"\\boxed{{{task['answer']}}}", task=task)
        assert step.reward == 1 and step.parts["answer_in_output"] and not step.parts["tool_errors"]
    assert max(Counter(task["answer"] for task in train).values()) < 10 and kinds == len({t["kind"] for t in train})
    assert not {task["question"] + task["answer"] for task in train} & {t["question"] + t["answer"] for t in test}
