"""A caller uses tools, one call a message, and an answerer reads what came out and answers.

The protocol is that of Hermes and Qwen models. What tools give back is in the next prompt and never in a
completion, so no tool's token is ever trained. Reward, calculator and search are in rewards/tools.py.
"""

import json
import re
from functools import partial
from urllib.parse import unquote

from envs import Step, need_sample
from envs.data import load_tasks, parse_rows
from envs.samples import tools as samples
from envs.vetting import read_limits
from rewards.boxed import is_right, read_answer
from rewards.sandbox import Job, run_tests
from rewards.texts import drop_thoughts
from rewards.tools import PARTS, Search, calculator, read_call, split_message, tools_reward

TOOLS = {  # name -> (its argument, what it gives)
    "calculator": ("expression", "the value of arithmetic, such as 2 * (3 + 4)"),
    "search": ("query", "the articles that fit best"),
    "python": ("code", "what the code prints; names of earlier code are known, a dict files holds the files"),
    "read_file": ("name", "the text of a file"),
}
FORM = '<tool_call>{"name": "...", "arguments": {"...": "..."}}</tool_call>'
REQUESTS = {  # of each role
    "planner": "Write a plan in a few words: which tools to call for what. A colleague will follow it.",
    "caller": f"Write one call, as {FORM}, or DONE if the outputs hold the answer.",
    "answerer": "Give the answer that the outputs hold, as \\boxed{...}.",
    "alone": f"Write one call, as {FORM}, or the answer, as \\boxed{{...}}.",
}
SEATS = {"planner": 0, "caller": -2, "answerer": -1, "alone": 0}
SHOWN = 400  # characters of an output that agents see
STOP = re.compile(r"^\s*DONE\W*$", re.MULTILINE)
# What runs in the sandbox: all code of a branch, in order, of which the last one's output counts. The grader shows the
# repr of what it returns: quoted, any text is its own repr.
CELLS = """
def printed():
    import contextlib, io, urllib.parse
    scope = {{"files": {files!r}}}
    for code in {cells!r}:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            try:
                exec(code, scope)
            except BaseException as error:
                print(f"{{type(error).__name__}}: {{error}}")
    return urllib.parse.quote(out.getvalue().strip(), " !#$&()*+,/:;<=>?@[]^`{{|}}", errors="replace")[:180]
"""


class Tools:
    """Agents find an answer with tools.

    num_agents: 2: a caller speaks in all turns except the last, alone: it reads the question, the tools and the
        outputs so far, and writes one call, or DONE, which makes the next turn the last. Then an answerer, alone,
        reads the question and the outputs, and boxes the answer. 3: before them a planner writes one plan, whose first
        40 words the caller reads. 1: one agent calls, and ends with a box.
    num_turns: (plan and) calls and answer; at least 2 (3 with a planner). Sample tasks take at most as many calls
    dataset: "sample", or a file with the columns question, answer and tools (names separated by blanks), and optional
        ones: needed (the tools of a shortest way, one for each call), files (an object of texts), kind
    corpus: a text file to search, one article a line; by default the invented towns of the sample tasks
    timeout, allow_unsafe_code: for a branch's Python code, as in envs/coding.py

    The reward, 0 to 1, comes with the answer and asks only whether that is right, less 0.05 for each superfluous call.
    """

    PARTS = PARTS

    def __init__(self, num_agents, num_turns, dataset, seed, corpus="", timeout=5, allow_unsafe_code="no"):
        self.num_agents = num_agents
        self.dataset = dataset
        self.seed = seed
        self.num_turns = max(num_turns, 3 if num_agents == 3 else 2)
        sample = partial(samples.make_tool_tasks, most_calls=self.num_turns - (2 if num_agents == 3 else 1))
        judge = partial(parse_rows, parse=_make_task)
        self.splits = load_tasks(dataset, seed, sample, columns=["question", "tools", "answer"], judge=judge)
        runs_code = any("python" in task["tools"].split() for part in self.splits.values() for task in part)
        self.limits = read_limits(timeout, allow_unsafe_code, runs_code)
        self.search = Search(samples.read_articles(corpus, seed))

    def tasks(self, split):
        return self.splits[split]

    def find_role(self, history):
        """Who speaks: "planner", "caller", "answerer", or "alone", who may call or answer."""
        if self.num_agents == 3 and not history:
            return "planner"
        if len(history) + 1 >= self.num_turns or any(step.feedback["stopped"] for _, step in history):
            return "answerer"
        return "alone" if self.num_agents == 1 else "caller"

    def observe(self, task, history):
        role = self.find_role(history)
        calls = _list_calls(history)
        prompt = [task["question"]]
        if role != "answerer":
            lines = ["Tools:"]
            for name in task["tools"].split():
                argument, gives = TOOLS[name]
                lines.append(f"{name}({argument}): {gives}")
            prompt.append("\n".join(lines))
        if role == "caller" and self.num_agents == 3:
            (plan, *_), _ = history[0]
            prompt.append(f"Plan: {' '.join(drop_thoughts(plan).split()[:40])}")
        if calls:
            prompt.append("\n".join(["Calls so far:", *map(_show, calls)]))
        prompts = [None] * self.num_agents
        prompts[SEATS[role]] = "\n\n".join([*prompt, REQUESTS[role]])
        return prompts

    def step(self, branches):
        """Reads the completions and runs the calls, Python code of all branches at once; see rewards/tools.py."""
        messages = [self._read(*branch) for branch in branches]
        coded = [k for k, message in enumerate(messages) if message["output"] is None]
        jobs = [_make_job(branches[k][0], [*_list_calls(branches[k][1]), messages[k]]) for k in coded]
        for k, result in zip(coded, run_tests(jobs, *self.limits) if jobs else []):
            shown = result.examples[0].removeprefix("returned ").strip("'")
            messages[k]["output"] = unquote(shown) or "nothing"
        steps = []
        for (task, history, _), message in zip(branches, messages):
            calls = _list_calls(history) + [message] * (message["output"] != "")
            reward, parts = tools_reward(message["answer"], task["answer"], calls, task["needed"].split())
            steps.append(Step(reward, parts, message["stopped"] == "answer", message))
        return steps

    def _read(self, task, history, actions):
        """dict: call (None if malformed), output (None: Python has to run; "": no call was meant), answer, stopped."""
        role = self.find_role(history)
        message = {"call": None, "output": "", "answer": None, "stopped": ""}
        before, text = split_message(actions[SEATS[role]])
        if role in ("answerer", "alone"):  # nobody else's box counts
            message["answer"] = read_answer(before)
        if role == "answerer" or message["answer"] is not None:
            return message | {"stopped": "answer"}
        if role == "planner":
            return message
        if role == "caller" and STOP.search(before):
            return message | {"stopped": "DONE"}
        call, error, _ = read_call(text) if text else (None, "there is no <tool_call>", "")
        error = error or _find_refusal(call, task["tools"].split())
        if error:
            return message | {"output": f"error: {error}"}
        return message | {"call": call, "output": self._run(call, task["files"])}

    def _run(self, call, files):
        """The output of a call, or None for Python."""
        (text,) = call["arguments"].values()
        if call["name"] == "calculator":
            return calculator(text)
        if call["name"] == "search":
            return self.search(text)
        if call["name"] == "read_file":
            return files.get(text, "error: there is no such file") or "nothing"
        return None

    def demonstrations(self):
        """What agents could say in sample training tasks, flawed in three of ten texts: dict(prompt, completion)."""
        need_sample(self.dataset, "it holds no calls to imitate")
        return samples.demonstrate(self, self.tasks("train"), self.seed)


def _list_calls(history):
    """The messages so far that are calls, also malformed ones."""
    return [step.feedback for _, step in history if step.feedback["output"]]


def _show(message):
    call = message["call"]
    if not call:
        return message["output"]
    (text,) = call["arguments"].values()
    return f"{call['name']}({json.dumps(text)}): {message['output'][:SHOWN]}"


def _find_refusal(call, tools):
    """Why a well-formed call cannot be run, or ""."""
    if call["name"] not in tools:
        return f"the tools are {', '.join(tools)}"
    argument, _ = TOOLS[call["name"]]
    if call["arguments"].keys() != {argument}:
        return f"the arguments of {call['name']} are {argument}"
    return "" if isinstance(call["arguments"][argument], str) else "an argument is no text"


def _make_job(task, calls):
    formed = [message["call"] for message in calls if message["call"]]
    cells = [call["arguments"]["code"] for call in formed if call["name"] == "python"]
    source = CELLS.format(files=task["files"], cells=cells)
    # what an example shows is the candidate's word, cut by the grader: agents may read it, and nothing scores it
    return Job([source], "", ["printed"], "prepare_text", examples=["assert printed() is None"])


def _make_task(row):
    """The task of a row. Raises what a malformed one raises."""
    needed = row.get("needed") or ""
    gold = row["answer"]
    if not TOOLS.keys() >= {*row["tools"].split()}:
        raise ValueError(f"it names other tools than {', '.join(TOOLS)}")
    if not is_right(read_answer(f"\\boxed{{{gold}}}"), gold):
        raise ValueError("its answer is no number and no string")
    return row | {"needed": needed, "files": dict(row.get("files") or {})}
