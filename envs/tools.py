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

TOOLS = {  # name -> (its arguments, what it gives)
    "calculator": (["expression"], "the value of arithmetic, such as 2 * (3 + 4)"),
    "search": (["query"], "the articles that fit best"),
    "python": (["code"], "what the code prints; names of earlier code are known, a dict files holds the files"),
    "write_file": (["name", "text"], "keeps a text"),
    "read_file": (["name"], "the text of a file"),
    "list_files": ([], "the names of all files"),
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
FILE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MOST_FILES, LONGEST_FILE = 8, 10_000
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
        ones: needed (the tools of a shortest way, one for each call), files (an object of texts, or its JSON), kind
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
        sample = partial(samples.make_tool_tasks, seed=seed, most_calls=self.num_turns - (2 if num_agents == 3 else 1))
        judge = partial(parse_rows, parse=_make_task)
        self.splits = load_tasks(dataset, sample, columns=["question", "tools", "answer"], judge=judge)
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
            tools = [f"{name}({', '.join(TOOLS[name][0])}): {TOOLS[name][1]}" for name in task["tools"].split()]
            prompt.append("\n".join(["Tools:", *tools]))
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
        output = None if call["name"] == "python" else self._run(call, _find_files(task, _list_calls(history)))
        return message | {"call": call, "output": output}

    def _run(self, call, files):
        run = {
            "calculator": calculator,
            "search": self.search,
            "write_file": partial(_write, files),
            "read_file": lambda name: files.get(name, "error: there is no such file"),
            "list_files": lambda: ", ".join(files),
        }
        # JSON can name half of a surrogate pair, which no tokenizer takes
        return run[call["name"]](**call["arguments"]).encode(errors="replace").decode() or "nothing"

    def demonstrations(self):
        """What agents could say in sample training tasks, flawed in three of ten texts: dict(prompt, completion)."""
        need_sample(self.dataset, "it holds no calls to imitate")
        return samples.demonstrate(self, self.tasks("train"), self.seed)


def _list_calls(history):
    """The messages so far that are calls, also malformed ones."""
    return [step.feedback for _, step in history if step.feedback["output"]]


def _list_arguments(tool, calls):
    """The arguments of the calls of one tool."""
    return [each["call"]["arguments"] for each in calls if each["call"] and each["call"]["name"] == tool]


def _show(message):
    call = message["call"]
    if not call:
        return message["output"]
    arguments = ", ".join(json.dumps(text) for text in call["arguments"].values())
    return f"{call['name']}({arguments}): {message['output'][:SHOWN]}"


def _find_refusal(call, tools):
    """Why a well-formed call cannot be run, or ""."""
    if call["name"] not in tools:
        return f"the tools are {', '.join(tools)}"
    arguments = TOOLS[call["name"]][0]
    if call["arguments"].keys() != {*arguments}:
        return f"the arguments of {call['name']} are {', '.join(arguments) or 'none'}"
    return "" if all(isinstance(text, str) for text in call["arguments"].values()) else "an argument is no text"


def _find_files(task, calls):
    """The files as they are after the calls so far."""
    files = dict(task["files"])
    for arguments in _list_arguments("write_file", calls):
        _write(files, **arguments)
    return files


def _write(files, name, text):
    if not FILE_NAME.fullmatch(name):
        return "error: a name has at most 64 letters, digits and the signs _ . -"
    if len(text) > LONGEST_FILE or len({*files, name}) > MOST_FILES:
        return f"error: there is room for {MOST_FILES} files of {LONGEST_FILE} characters"
    files[name] = text
    return f"{len(text)} characters are in {name}"


def _make_job(task, calls):
    cells = [arguments["code"] for arguments in _list_arguments("python", calls)]
    source = CELLS.format(files=_find_files(task, calls), cells=cells)
    # what an example shows is the candidate's word, cut by the grader: agents may read it, and nothing scores it
    return Job([source], "", ["printed"], "prepare_text", examples=["assert printed() is None"])


def _make_task(row):
    """The task of a row. Raises what a malformed one raises."""
    files = row.get("files") or {}
    needed = row.get("needed") or ""
    gold = row["answer"]
    files = dict(json.loads(files) if isinstance(files, str) else files)
    unknown = {*row["tools"].split(), *needed.split()} - TOOLS.keys()
    if unknown:
        raise ValueError(f"it names the tool {min(unknown)}, and there are only {', '.join(TOOLS)}")
    if not is_right(read_answer(f"\\boxed{{{gold}}}"), gold):
        raise ValueError("its answer is no number and no string")
    files = {name: text for name, text in files.items() if isinstance(text, str)}  # others are names of other rows
    return row | {"needed": needed, "files": files}
