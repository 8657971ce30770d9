"""Agents write one Python class together; each writes some of its methods.

The tasks are those of ClassEval (Du et al., 2023); the reward follows MAGRPO (Liu et al., 2025), with prompts of our
own. The reward is in rewards/classeval.py. In the published partition, agent 1 gets the methods with no argument but
self and agent 2 all others, so in a third of the classes agent 1 has no work; here the agents take turns, or choose.
"""

import ast
import re
from functools import partial

from envs import UNPAID, need_sample, one_of
from envs.coding import find_definition, make_step
from envs.data import load_tasks
from envs.samples import PROGRAM_COUNTS
from envs.samples import coding as samples
from envs.vetting import TRIVIAL, read_examples, read_limits, vet
from rewards.classeval import PARTS, ClassAnswer, class_rewards
from rewards.coding import remark_on_syntax
from rewards.programs import FUNCTIONS, IMPORTS, is_stub
from rewards.texts import drop_thoughts

# The published slices, train [:66] and evaluation [66:82], by task number; the rest is validation.
BENCHMARK = {
    "hub": "FudanSELab/ClassEval",
    "hub_splits": {"all": "test"},
    "columns": ["skeleton", "task_id", "test", "class_name", "solution_code"],
    "published": (r"ClassEval_(\d{1,9})", {"train": range(66), "validation": range(82, 100), "test": range(66, 82)}),
}


class ClassEval:
    """Agents divide the methods of a class, and each writes its own.

    num_agents: an agent left without a method is asked for nothing, and its completion is not read
    deal: "fixed": agent 1 writes the first method, agent 2 the second, and so on in turn. "choose": in the first turn,
        which pays nothing, each agent names the methods that it takes: every name in its text counts. What several
        take is the first one's, who may take all; what nobody takes is missing. All read who has which
    dataset: "sample", "hub" (FudanSELab/ClassEval), a hub id or a file with the same columns; tasks numbered as in the
        benchmark get its splits
    feedback: "plain" (revise) or "level" (what was found, how many tests passed, the first docstring example that
        fails)
    num_turns: with deal "choose" at least 2, as the first turn is for choosing
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
        deal="fixed",
        timeout=10,
        allow_unsafe_code="no",
    ):
        one_of("feedback", feedback, "plain", "level")
        one_of("deal", deal, "fixed", "choose")
        self.limits = read_limits(timeout, allow_unsafe_code)
        self.num_agents = num_agents
        self.turns_of_choosing = 1 if deal == "choose" else 0
        self.num_turns = max(num_turns, 1 + self.turns_of_choosing)
        self.dataset = dataset
        self.seed = seed
        self.feedback = feedback
        judge = partial(vet, parse=_make_task, answer=_make_answer, score=class_rewards, limits=self.limits)
        self.splits = load_tasks(dataset, seed, _make_sample_tasks, PROGRAM_COUNTS, judge=judge, **BENCHMARK)

    def tasks(self, split):
        return self.splits[split]

    def observe(self, task, history):
        """The prompt of each agent: the skeleton and the names of the methods to write, or to choose from.

        After a turn of writing it also holds the agent's own answers and, with feedback "level", what became of them.
        """
        problem = task["problem"].strip()
        if len(history) < self.turns_of_choosing:
            ask = f"Choose the methods of {task['class_name']} that you write. Answer with their names only."
            return [f"{problem}\n\nYou are agent {i + 1} of {self.num_agents}. {ask}" for i in range(self.num_agents)]
        assigned = self._assigned(task, history)
        if self.turns_of_choosing:
            shares = (f"Agent {i} writes {', '.join(names) or 'nothing'}." for i, names in enumerate(assigned, 1))
            problem += "\n\n" + " ".join(shares)
        prompts = []
        for agent, names in enumerate(assigned):
            ask = f"Write these methods of {task['class_name']}: {', '.join(names)}. Function definitions only."
            if not names:
                ask = f"The methods of {task['class_name']} are written by others. Answer with nothing."
            prompt = f"{problem}\n\n{ask}"
            for actions, step in history[self.turns_of_choosing :] if names else []:
                prompt += f"\n\nYour answer:\n{drop_thoughts(actions[agent]).strip()}\n\n"
                if self.feedback == "level":
                    prompt += " ".join(_remark(agent, names, step.feedback)) + "\n\n"
                prompt += f"Write {', '.join(names)} again, better. Function definitions only."
            prompts.append(prompt)
        return prompts

    def step(self, branches):
        """Runs the answers of all branches at once; see rewards/classeval.py for reward and parts, and make_step.

        With deal "choose" there is one more part, not paid: `balance`, the smallest number of methods that an agent
        has / the largest.
        """
        steps = [UNPAID] * len(branches)  # of the turn of choosing
        answers = {}  # number of a branch -> what was written in it
        for k, (task, history, actions) in enumerate(branches):
            if len(history) >= self.turns_of_choosing:
                answers[k] = _make_answer(task, actions, self._assigned(task, history))
        for (k, answer), score in zip(answers.items(), class_rewards(list(answers.values()), *self.limits)):
            _, history, _ = branches[k]
            steps[k] = make_step(score, history[self.turns_of_choosing :], self.num_turns - self.turns_of_choosing)
            if self.turns_of_choosing:
                counts = [len(names) for names in answer.assigned[: self.num_agents]]
                steps[k].parts["balance"] = min(counts) / max(1, *counts)
        return steps

    def demonstrations(self):
        """Prompts and answers to imitate for the sample training tasks: list of dict(prompt, completion).

        The code is correct, but with several agents three of ten answers hold one method too many, which is another
        agent's: agents that imitate them still have to learn to keep to their own. With two turns or more there are
        also prompts of a second turn, after one that failed. Raises ValueError for other datasets.
        """
        need_sample(self.dataset, "it holds no answers for each role")
        tasks = self.tasks("train")
        rows = samples.make_class_tasks("train", len(tasks), self.seed)
        # who chooses takes the first method in one task and not in the next, so agents have to agree
        dealt = [self._in_turn(task, k * self.turns_of_choosing) for k, task in enumerate(tasks)]
        choices = [[", ".join(names) for names in shares] for shares in dealt] if self.turns_of_choosing else []
        return samples.demonstrate(self, *samples.make_class_answers(rows, tasks, dealt, self.seed), choices)

    def _in_turn(self, task, first=0):
        """The methods of a task, dealt out in source order, from agent number `first` on."""
        agents = range(first, first + self.num_agents)
        return [task["methods"][agent % self.num_agents :: self.num_agents] for agent in agents]

    def _assigned(self, task, history):
        """For each agent, the methods that it is to write."""
        if not self.turns_of_choosing:
            return self._in_turn(task)
        choices, _ = history[0]
        assigned = []
        taken = set()
        for text in choices:
            words = {*re.findall(r"\w+", drop_thoughts(text))}
            assigned.append([name for name in task["methods"] if name in words - taken])
            taken |= words
        return assigned


def _make_sample_tasks(split, count, seed):
    return [_make_task(row) for row in samples.make_class_tasks(split, count, seed)]  # right by construction


def _make_answer(task, texts, assigned):
    # Methods that nobody has count as those of one more agent, who writes nothing.
    left = [name for name in task["methods"] if not any(name in names for names in assigned)]
    keys = ["class_name", "base", "tests", "names", "setup", "examples"]
    return ClassAnswer(texts=[*texts, ""], assigned=[*assigned, left], **{key: task[key] for key in keys})


def _remark(agent, names, findings):
    """What agent number `agent` reads of the findings. Of the scored tests, that is only how many passed.

    An example of the skeleton that a benchmark's tests repeat is still shown: agents can read it in the skeleton.
    """
    missing = [name for name, written in zip(names, findings["written"][agent]) if not written]
    remarks = [f"Not found: {', '.join(missing)}." if missing else "All your methods were found."]
    if findings["doubled"]:
        remarks.append(f"Written by more than one agent: {', '.join(findings['doubled'])}.")
    if not findings["syntax"]:
        return remarks + remark_on_syntax(agent, findings)
    remarks.append(f"{findings['passed']} of {findings['total']} tests passed.")
    if findings["examples"]:
        source, what = findings["examples"][0]
        remarks.append(f"{'; '.join(source.splitlines())} fails: {what}.")
    return remarks


def _make_task(row):
    """What the agents read and what tests their answers; rows are trusted, so they are parsed here.

    Keys: task_id, problem, class_name, methods (the names to be written, in order), base (source of the module
    that they are put into), names (defined in that module, for the tests), tests, setup, examples, reference (only the
    asked methods, as agents write them); and for envs/vetting.py trivial, bound and others.
    """
    solution = ast.parse(row["solution_code"])
    base = ast.parse(row["skeleton"])
    reference = find_definition(row["class_name"], ast.ClassDef, solution.body)
    owner = find_definition(row["class_name"], ast.ClassDef, base.body)
    # Methods that are stubs in the reference too, such as constructors, are not asked for.
    idle = {node.name for node in reference.body if isinstance(node, FUNCTIONS) and is_stub(node)}
    todo = [n for n in owner.body if isinstance(n, FUNCTIONS) and is_stub(n) and n.name not in idle]
    names = list(dict.fromkeys(node.name for node in todo))  # once: one agent writes a property and its setter
    if not names:
        raise ValueError("no method is left to be written")
    imports = [ast.unparse(node) for node in base.body if isinstance(node, IMPORTS)]
    needed = [ast.unparse(node) for node in solution.body if isinstance(node, IMPORTS)]
    # put into the skeleton, since agents write methods only and could not import it
    missing = sorted({*needed} - {*imports})
    base.body = ast.parse("\n".join(missing)).body + base.body
    methods = [ast.unparse(n) for n in reference.body if isinstance(n, FUNCTIONS) and n.name in names]
    return {
        "task_id": row["task_id"],
        "problem": "\n".join([*missing, row["skeleton"]]),
        "class_name": row["class_name"],
        "methods": names,
        "base": ast.unparse(base),
        "names": [node.name for node in base.body if isinstance(node, (*FUNCTIONS, ast.ClassDef))],
        "tests": row["test"],
        "setup": "\n".join([*missing, *imports]),
        "examples": [e for node in todo for e in read_examples(ast.get_docstring(node) or "", after_all=True)],
        "reference": "\n\n".join(methods),
        "trivial": [TRIVIAL[k] for k in (0, 1, 3, 6)],  # few: some tests take seconds
        "bound": " = ".join(f"{row['class_name']}.{name}" for name in names),
        "others": [names],
    }
