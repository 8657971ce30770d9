"""Tools: who speaks when, which calls are run, and that nothing but a right answer in the right place is paid."""

import json
import re

import pytest

import envs
from rewards.tools import calculator, read_call

QUESTION = {
    "question": "How many?",
    "answer": "106",
    "tools": "calculator search read_file write_file list_files",
    "needed": "calculator",
    "files": {"a.csv": "1\n2"},
}
# An expression | its value
SUMS = """
2 * (3 + 4) - -1 | 15
7 // 2 + 7 % 2 + 2 ** 10 | 1028
0.1 + 0.2 | 0.3
1 / 3 | 0.3333333333
sqrt(16) + abs(-2) + max(1, 2.5) - min(3, 4) | 5.5
round(2.567, 1) + round(7.6) | 10.6
"""
NO_SUMS = """
9**9**9
2**65
10**20 * 10**20
9**64
1e999999999
round(1, 10**9)
0 ** -1
2 ** 0.5
sqrt(-1)
abs(*[1])
min(1)
__import__('os')
(1).real
'a' * 9
True + 1
x = 1
1,000
"""
NESTED = ["(" * 5000 + ")" * 5000, "(" * 199, "-" * 198 + "1", "\0", "\ud800", ""]


def call(tool, **arguments):
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


ADD = call("calculator", expression="53 * 2")
BOX = "\\boxed{106}"
LOOK = call("search", query=BOX)
READ = call("read_file", name="a")
WORDS = {"ADD": ADD, "BOX": BOX, "LOOK": LOOK, "NOTE": call("write_file", name="a", text=BOX), "READ": READ}


def play(env, *messages, task=QUESTION):
    """(steps, prompts) of a branch: the one agent who may speak writes these messages; prompts: (agent, prompt)."""
    steps, prompts = [], []
    for message in messages:
        observed = env.observe(task, steps)
        ((agent, prompt),) = [(i, prompt) for i, prompt in enumerate(observed) if prompt]
        actions = [message if i == agent else "" for i in range(env.num_agents)]
        steps += env.step([(task, [*steps], actions)])
        prompts.append((agent, prompt))
    assert not any(step.done for step in steps[:-1])
    return steps, prompts


def outputs(env, *messages, task=QUESTION):
    steps, _ = play(env, *messages, task=task)
    return [step.feedback["output"] for step in steps]


def test_calculator():
    """Fails if a value is wrong, an error is raised, a name is evaluated, or a number never ends."""
    for row in SUMS.strip().splitlines():
        expression, value = row.split(" | ")
        assert calculator(expression) == value, row
    for expression in NO_SUMS.splitlines() + NESTED:
        assert calculator(expression).startswith("error: "), expression


# What comes between the tags | the arguments
CALLS = r"""
{"name": "a", "arguments": {"x": "</tool_call> <tool_call>"}} | {'x': '</tool_call> <tool_call>'}
{"name": "a", "arguments": {"x": "two\nlines\tand a tab"}} | {'x': 'two\nlines\tand a tab'}
{"name": "a", "arguments": {"x": 1,}} | None
{"name": [], "arguments": {}} | None
{"name": "a"} | None
53 * 2 | None
[1] | None
[NESTED | None
 | None
"""


def test_a_call_ends_where_its_json_does():
    """Fails if a tag or a line break in a string ends a call, an object that is no call is one, or nobody says why."""
    for row in CALLS.strip("\n").splitlines():
        text, arguments = row.replace("NESTED", "[" * 1998).split(" | ")
        text = text.replace("\\n", "\n").replace("\\t", "\t")
        message, error, rest = read_call(f"<tool_call>{text}</tool_call> rest")
        assert (str(message and message["arguments"]), rest) == (arguments, " rest"), row
        assert bool(error) == (message is None), row
    assert "Expecting property name" in read_call("<tool_call>{1}")[1]  # the parser's own words
    assert read_call(ADD.removesuffix("</tool_call>"))[0] is None


def test_who_speaks():
    """Fails if an answerer never speaks or calls, or if a caller reads no outputs."""
    _, prompts = play(envs.make("tools", 2, 3), ADD, "DONE", BOX)
    assert [agent for agent, _ in prompts] == [0, 0, 1]
    assert ["search(query)" in prompt for _, prompt in prompts] == [True, True, False]
    assert ["53 * 2" in prompt for _, prompt in prompts] == [False, True, True]
    _, prompts = play(envs.make("tools", 3, 4), "word " * 41, ADD, ADD, BOX)
    assert [agent for agent, _ in prompts] == [0, 1, 1, 2]
    steps, _ = play(envs.make("tools", 1), ADD, BOX)
    assert steps[-1].done


# What agents say | the reward
PLAYS = r"""
ADD DONE BOX | 1.0
DONE. BOX | 1.0
ADD ADD ADD BOX | 0.9
ADD no <tool_call> BOX | 0.9
ADD ADD ADD ADD | 0.0
ADD ADD ADD \boxed{105}BOX | 0.0
ADD ADD ADD ADDBOX | 0.0
ADD ADD ADD <think>BOX | 0.0
BOXADD DONE Yes. | 0.0
NOTE READ DONE There. | 0.0
LOOK BOX DONE Yes. | 0.0
"""


def test_only_a_right_box_of_the_answerer_is_paid():
    """Fails if a call, its repetition, or an answer of the wrong agent, in a call, an output or a thought is paid."""
    env = envs.make("tools", 2, 4)
    for row in PLAYS.strip().splitlines():
        messages, reward = row.split(" | ")
        messages = [re.sub("|".join(WORDS), lambda word: WORDS[word[0]], each) for each in messages.split()]
        steps, _ = play(env, *messages)
        assert [str(step.reward) for step in steps] == ["0.0"] * (len(messages) - 1) + [reward], row
        assert steps[-1].parts["all_passed"] == (reward != "0.0")
        assert steps[-1].done


def test_many_calls():
    """Fails if a right answer is worth less than half, or if calls cost where the least number is not known."""
    env = envs.make("tools", 2, 20)
    for needed, reward in {"calculator": 0.5, "": 1}.items():
        steps, _ = play(env, *[ADD] * 14, "DONE", BOX, task={**QUESTION, "needed": needed})
        assert steps[-1].reward == reward


def test_files_belong_to_their_branch():
    """Fails if another branch reads a file, or if a text that no prompt can hold is in one."""
    env = envs.make("tools", 2, 5)
    write = call("write_file", name="a", text="seven\ud800" + "x" * 900)
    _, listed, text, _ = outputs(env, write, call("list_files"), READ, "DONE")
    assert listed == "a.csv, a"
    assert text.startswith("seven?x")
    assert outputs(env, READ, call("read_file", name="a.csv")) == ["error: there is no such file", "1\n2"]


# Cells of one branch, and what agents read of each
CELLS = {
    "x = int(files['a.csv'])": "nothing",
    "x += 1\nprint(x)\n1 / 0": "13\nZeroDivisionError: division by zero",
    "print('\"é\\'', 50, '%41')": "\"é' 50 %41",
    "raise SystemExit(3)": "SystemExit: 3",
}


def test_python_cells_are_replayed(tmp_path, monkeypatch):
    """Fails if a later cell lacks names, another branch has them, or output is not what was printed."""
    path = tmp_path / "a.json"
    row = {"question": "How many?", "answer": 7, "tools": "python", "files": '{"a.csv": "12"}'}
    path.write_text(json.dumps([row] * 2))
    env = envs.make("tools", 2, 6, str(path))
    task = env.tasks("train")[0]
    cells = [call("python", code=code) for code in CELLS]
    assert outputs(env, *cells, task=task) == list(CELLS.values())
    history, _ = play(env, cells[0], task=task)
    steps = env.step([(task, history, [call("python", code=f"print(x + {k})"), ""]) for k in (1, 2)])
    assert [step.feedback["output"] for step in steps] == ["13", "14"]
    monkeypatch.setattr("envs.tools.require_protection", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        envs.make("tools", dataset=str(path))
