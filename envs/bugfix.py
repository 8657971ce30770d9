"""Agents repair a program: one says in which line the bug is, another rewrites the function.

The programs are those of HumanEvalFix (Muennighoff et al., 2023), whose functions are HumanEval's (so do not evaluate
here what was trained there), and QuixBugs (Lin et al., 2017); roles, prompts and reward are ours.
"""

import ast
import itertools
import random
import re

from envs import UNPAID, Step, need_sample, one_of
from envs.coding import HUMANEVAL, find_definition, make_answer
from envs.data import load_tasks
from envs.samples import PROGRAM_COUNTS, pair_up
from envs.samples import bugfix as samples
from envs.vetting import RULES, load_or_find, read_examples, read_limits, vet
from rewards.bugfix import PARTS, Repair, bugfix_rewards
from rewards.coding import coding_rewards
from rewards.texts import drop_thoughts

WORDS = 30  # of a note that are read
PUBLISHED = {
    "columns": ["docstring"],  # of HumanEvalFix and of QuixBugs; _task reads the others
    "hub": "bigcode/humanevalpack",
    "hub_config": "python",
    "hub_splits": {"all": "test"},
    "published": (r"Python/(\d{1,9})", HUMANEVAL),
}


class BugFix:
    """Each agent speaks once, in a turn of its own: a localiser, with three agents a reviewer, and a fixer.

    The localiser reads the program with line numbers and writes `LINE k: why`, of which WORDS words are read. The
    reviewer reads that too, and writes such a note of its own. The fixer reads the last note, and writes the whole
    function. One agent is the fixer alone.

    dataset: "sample", "hub" (HumanEvalFix), a hub id, or a file with its columns or those of QuixBugs
    feedback: "level" (the first agent also reads the first example of the prompt that fails), or "plain"
    timeout, allow_unsafe_code: as in envs/coding.py
    """

    PARTS = PARTS

    def __init__(
        self,
        num_agents,
        num_turns,
        dataset,
        seed,
        feedback="level",
        timeout=10,
        allow_unsafe_code="no",
    ):
        one_of("feedback", feedback, "plain", "level")
        self.limits = read_limits(timeout, allow_unsafe_code)
        self.num_agents = num_agents
        self.num_turns = num_agents
        self.dataset = dataset
        self.seed = seed
        self.feedback = feedback
        self.splits = load_tasks(dataset, seed, _make_sample_tasks, PROGRAM_COUNTS, judge=self._judge, **PUBLISHED)

    def tasks(self, split):
        return self.splits[split]

    def observe(self, task, history):
        """The prompt of the agent whose turn it is; the others are silent."""
        fixes = len(history) == self.num_agents - 1
        lines = task["program"].splitlines()
        numbered = "\n".join(f"{number} {line}" for number, line in enumerate(lines, 1))
        parts = [task["description"], task["program"] if fixes else numbered]
        if self.feedback == "level" and not history:
            parts.append(task["symptom"])
        about = "This program has a bug."
        if history:
            about += f" A colleague says:\n{_read_note(history)}"
            number = _read_line(history)
            if fixes and 0 < number <= len(lines):
                about += f"\nLine {number} is: {lines[number - 1].strip()}"
        parts.append(about)
        if fixes:
            parts.append(f"Write {task['entry_point']} without the bug. Function code only.")
        else:
            parts.append(f"Write LINE k: and why, in at most {WORDS} words.")
        prompts = [None] * self.num_agents
        prompts[len(history)] = "\n\n".join(filter(None, parts))
        return prompts

    def step(self, branches):
        """Only what the fixer writes is scored: see rewards/bugfix.py. Of the notes, part `located` says whether the
        last one names the line of the bug or one next to it.
        """
        repairs = []
        for task, history, actions in branches:
            if len(history) == self.num_agents - 1:
                answer = make_answer(task, actions[-1:], [])
                repairs.append(Repair(answer, task["program"], task["passing"], task["failing"]))
        scores = iter(bugfix_rewards(repairs, *self.limits))
        steps = []
        for task, history, _ in branches:
            if len(history) < self.num_agents - 1:
                steps.append(UNPAID)
                continue
            score = next(scores)
            parts = dict(score.parts)
            if history:
                parts["located"] = float(abs(_read_line(history) - task["line"]) <= 1)
            steps.append(Step(score.reward, parts, done=True))
        return steps

    def demonstrations(self):
        """Prompts of every role for the sample training tasks, with completions: list of dict(prompt, completion).

        The answers are not all right: see envs/samples/bugfix.py. Raises ValueError for other datasets.
        """
        need_sample(self.dataset, "it holds no answers for each role")
        rng = random.Random(f"repairs {self.seed}")
        pairs = []
        for task in self.tasks("train"):
            notes, answer = samples.demonstrate(task, self.num_agents - 1, rng)
            history = [([note] * self.num_agents, UNPAID) for note in notes]
            for turn, completion in enumerate([*notes, answer]):
                pairs += pair_up(self.observe(task, history[:turn]), [completion] * self.num_agents)
        return pairs

    def _judge(self, rows):
        """For each row its task, or why it cannot be used; its reference and its program are run once."""
        tasks = vet(rows, _make_task, make_answer, coding_rewards, self.limits)
        usable = [task for task in tasks if isinstance(task, dict)]

        def run_programs():
            scores = coding_rewards([make_answer(task, [task["program"]], []) for task in usable], *self.limits)
            return [[score.findings[key] for key in ("passing", "total", "examples")] for score in scores]

        outcomes = iter(load_or_find(["programs with a bug", RULES, self.limits, usable], run_programs))
        return [_add_outcomes(task, *next(outcomes)) if isinstance(task, dict) else task for task in tasks]


def _make_sample_tasks(split, count, seed):
    return [_add_outcomes(_make_task(row), *outcomes) for row, *outcomes in samples.make_mutants(split, count, seed)]


def _read_note(history):
    """What the agent that speaks next reads of the last note."""
    actions, _ = history[-1]
    note = drop_thoughts(actions[len(history) - 1])
    return " ".join(note.split()[:WORDS])


def _read_line(history):
    """The number of the line that the last note names, or 0."""
    match = re.search(r"\bLINE (\d{1,6})\b", _read_note(history), re.IGNORECASE | re.ASCII)
    return int(match[1]) if match else 0


def _make_task(row):
    """Brings the rows of both sets into one form: the keys of Answer, those that envs/vetting.py needs, and program,
    description (unless the program's docstring is one) and line, the first in which program and reference differ.
    """
    if "buggy_solution" in row:
        entry_point = row["entry_point"]
        tests = row["test"]
        description = ""
        program = row["prompt"] + row["buggy_solution"]
        reference = row["prompt"] + row["canonical_solution"]
    else:
        entry_point = row["name"]
        tests = row["tests"]
        description = row["docstring"].strip('"\n')
        program = row["buggy_program"]
        reference = row["solution"]
    program = program.strip()
    reference = reference.strip()
    body = ast.parse(program).body
    checks = ast.parse(tests).body
    function = find_definition(entry_point, ast.FunctionDef, body)
    # Objects of the tests' own classes cannot cross to the candidate, so it makes them.
    classes = [node for node in checks if isinstance(node, ast.ClassDef)]
    prelude = ast.unparse(ast.Module([node for node in body if node is not function] + classes, []))
    tests = ast.unparse(ast.Module([node for node in checks if node not in classes], []))
    pairs = itertools.zip_longest(program.splitlines(), reference.splitlines())
    return {
        "task_id": row.get("task_id", entry_point),
        "description": description,
        "program": program,
        "line": next((number for number, (before, after) in enumerate(pairs, 1) if before != after), 0),
        "entry_point": entry_point,
        "names": [entry_point, *[node.name for node in classes]],
        "tests": tests,
        "examples": read_examples(description or ast.get_docstring(function) or ""),
        "prelude": prelude,
        "setup": prelude,
        "reference": reference,
    }


def _add_outcomes(task, passing, total, examples):
    """The task with what its program's tests say, or why it cannot be used."""
    if len(passing) == total:
        return "its program with the bug passes its tests"
    symptom = " fails: ".join(examples[0]) + "." if examples else ""
    failing = [number for number in range(total) if number not in passing]
    return {**task, "passing": passing, "failing": failing, "symptom": symptom}
