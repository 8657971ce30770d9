"""Tools: who speaks when, which calls are run, and that nothing but a right answer in the right place is paid."""

import json
import re

from toy import play, rows_of

import envs
from rewards.tools import calculator, read_call, tools_reward

QUESTION = {
    "question": "How many?",
    "answer": "106",
    "tools": "calculator search read_file",
    "needed": "calculator",
    "files": {"a.csv": "1\n2"},
}
# An expression | its value
SUMS = """
2 * (3 + 4) - -1 | 15
7 // 2 + 7 % 2 + 2 ** 10 | 1028
(7 // 2) / (9 // 2) | 0.75
0.1 + 0.2 | 0.3
1 / 3 | 0.3333333333
abs(-2) + max(1, 2.5) - min(3, 4) | 1.5
"""
NO_SUMS = """
9**9**9
2**65
10**20 * 10**20
9**64
1e999999999
0 ** -1
2 ** 0.5
sqrt(4)
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
READ = call("read_file", name="a")
WORDS = {"ADD": ADD, "BOX": BOX, "READ": READ}
WORDS |= {"LOOK": call("search", query=BOX), "NOTE": call("read_file", name=BOX)}


def say(env, *messages, task=QUESTION):
    """The prompts and Steps of a branch in which whoever may speak in a turn writes its message."""
    return play(env, task, lambda turn, *_: messages[turn])


def test_calculator():
    """Fails if a value is wrong, an error is raised, a name is evaluated, or a number never ends."""
    for expression, value in rows_of(SUMS):
        assert calculator(expression) == value, expression
    for expression in NO_SUMS.splitlines() + NESTED:
        assert calculator(expression).startswith("error: "), expression


# What comes between the tags | the arguments
CALLS = r"""
{"name": "a", "arguments": {"x": "</tool_call> <tool_call>"}} | {'x': '</tool_call> <tool_call>'}
{"name": "a", "arguments": {"x": "two\nlines"}} | {'x': 'two\nlines'}
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
    for row, arguments in rows_of(CALLS):
        text = row.replace("NESTED", "[" * 1998).replace("\\n", "\n")
        message, error, rest = read_call(f"<tool_call>{text}</tool_call> rest")
        assert (str(message and message["arguments"]), rest) == (arguments, " rest"), row
        assert bool(error) == (message is None), row
    assert read_call(ADD.removesuffix("</tool_call>"))[0] is None


# Agents | what they say | who speaks in each turn, and whether tools are offered | the reward
PLAYS = r"""
1 | ADD BOX | 0 True, 0 True | 1.0
1 | ADD ADD ADD BOX | 0 True, 0 True, 0 True, 0 False | 0.9
3 | <think>Hm</think>plan ADD ADD BOX | 0 True, 1 True, 1 True, 2 False | 0.95
2 | ADD DONE BOX | 0 True, 0 True, 1 False | 1.0
2 | DONE. BOX | 0 True, 1 False | 1.0
2 | <think>READ</think>DONE BOX | 0 True, 1 False | 1.0
2 | ADD ADD ADD BOX | 0 True, 0 True, 0 True, 1 False | 0.9
2 | ADD no <tool_call> BOX | 0 True, 0 True, 0 True, 1 False | 0.9
2 | ADD ADD ADD ADD | 0 True, 0 True, 0 True, 1 False | 0.0
2 | ADD ADD ADD \boxed{105}BOX | 0 True, 0 True, 0 True, 1 False | 0.0
2 | ADD ADD ADD ADDBOX | 0 True, 0 True, 0 True, 1 False | 0.0
2 | ADD ADD ADD <think>BOX | 0 True, 0 True, 0 True, 1 False | 0.0
2 | BOXADD DONE Yes. | 0 True, 0 True, 1 False | 0.0
2 | NOTE READ DONE There. | 0 True, 0 True, 0 True, 1 False | 0.0
2 | LOOK BOX DONE Yes. | 0 True, 0 True, 0 True, 1 False | 0.0
"""


def test_only_a_right_box_of_the_answerer_is_paid():
    """Fails if a call, its repetition, or an answer of the wrong agent, in a call, an output or a thought is paid.

    Or if an answerer never speaks, is offered tools or reads no outputs, if two speak at once, or a thought is read.
    """
    for num_agents, row, speakers, reward in rows_of(PLAYS):
        messages = [re.sub("|".join(WORDS), lambda word: WORDS[word[0]], each) for each in row.split()]
        turns, steps = say(envs.make("tools", int(num_agents), 4), *messages)
        spoken = [f"{i} {'search(query)' in text}" for prompts in turns for i, text in enumerate(prompts) if text]
        assert ", ".join(spoken) == speakers, row
        assert ("53 * 2" in turns[-1][-1]) == ("ADD" in row)
        assert "Hm" not in str(turns)
        assert [str(step.reward) for step in steps] == ["0.0"] * (len(messages) - 1) + [reward], row
        assert steps[-1].parts["all_passed"] == (reward != "0.0")


def test_many_calls():
    """Fails if a right answer is worth less than half, or if calls cost where the least number is not known."""
    calls = [{"call": None, "output": "error"}] * 14
    assert tools_reward("106", "106", calls, ["calculator"])[0] == 0.5
    assert tools_reward("106", "106", calls, [])[0] == 1


def test_files():
    """Fails if a file is not read, if one that is not there ends the run, or a call holds what no prompt can hold."""
    env = envs.make("tools", 2, 4)
    prompts, (text, error, *_) = say(
        env, call("read_file", name="a.csv"), call("read_file", name="\ud800"), "DONE", BOX
    )
    assert text.feedback["output"] == "1\n2"
    assert error.feedback["output"].startswith("error: ")
    assert json.dumps(prompts, ensure_ascii=False).encode()


# Cells of one branch, and what agents read of each
CELLS = {
    "x = int(files['a.csv'])": "nothing",
    "x += 1\nprint(x)\n1 / 0": "13\nZeroDivisionError: division by zero",
    "print('\"é\\'', 50, '%41')": "\"é' 50 %41",
    "raise SystemExit(3)": "SystemExit: 3",
}


def test_python_cells_are_replayed():
    """Fails if a later cell lacks names, another branch has them, or output is not what was printed."""
    env = envs.make("tools", 2, 5)
    task = QUESTION | {"tools": "python", "files": {"a.csv": "12"}}
    cells = [call("python", code=code) for code in CELLS]
    _, steps = say(env, *cells, BOX, task=task)
    assert [step.feedback["output"] for step in steps[:4]] == list(CELLS.values())
    history = [([cells[0], ""], steps[0])]
    steps = env.step([(task, history, [call("python", code=f"print(x + {k})"), ""]) for k in (1, 2)])
    assert [step.feedback["output"] for step in steps] == ["13", "14"]
