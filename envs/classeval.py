"""Agents write one Python class together; each writes some of its methods.

The tasks are those of ClassEval (Du et al., 2023); the reward follows MAGRPO (Liu et al., 2025), with prompts of our
own. The reward is in rewards/classeval.py. In the published partition, agent 1 gets the methods with no argument but
self and agent 2 all others, so in a third of the classes agent 1 has no work; here the agents take turns.
"""

import ast
import random
from functools import partial

from envs import samples
from envs.coding import benchmark_rows, demonstrated, example_asserts, parsed, scored_step, syntax_remarks
from rewards.classeval import ClassAnswer, class_rewards, run_classes
from rewards.coding_syntax import FUNCTIONS, is_stub
from rewards.sandbox import require_protection

SAMPLE_COUNTS = {"train": 512, "validation": 64, "test": 64}
# The published slices, train [:66] and evaluation [66:82], by task number; the rest is validation.
BENCHMARK = {
    "hub": "FudanSELab/ClassEval",
    "hub_config": None,
    "hub_splits": {"all": "test"},
    "columns": ["task_id", "skeleton", "test", "class_name", "solution_code"],
    "number": r"ClassEval_(\d{1,9})",
    "splits": {"train": range(66), "validation": range(82, 100), "test": range(66, 82)},
}
_verdicts = {}  # (solution, test) -> (why the reference solution fails or "", the examples that hold for it)


class ClassEval:
    """Agents take turns at the methods of a class: agent 1 writes the first, agent 2 the second, and so on.

    name: "classeval"
    num_agents: 1 or more; an agent left without a method is asked for nothing, and its text is not read
    num_turns: 1 or more; a later turn shows each agent its own answers and what became of them
    dataset: "sample", "hub" (FudanSELab/ClassEval), a hub id or a file with the same columns; tasks numbered as in the
        benchmark get its splits. Tasks whose own reference solution fails here, for lack of a package or a network,
        are left out and reported.
    seed: int, seeds the sample tasks
    feedback: "plain" (revise) or "level" (what was found, how many tests passed, the first docstring example that
        fails)
    timeout: seconds that the tests of one answer may take
    allow_unsafe_code: "yes" or "no", run model-written code even if the system offers no protection from it

    Raises ValueError with one sentence for other arguments, for a system that offers no protection, and for a dataset
    that cannot be used.
    """

    def __init__(
        self,
        name="classeval",
        num_agents=2,
        num_turns=1,
        dataset="sample",
        seed=1,
        feedback="level",
        timeout=10.0,
        allow_unsafe_code="no",
    ):
        if feedback not in ("plain", "level"):
            raise ValueError(f"--env-kwargs feedback {feedback}: it is plain or level; use one of them.")
        self.timeout, self.allow_unsafe_code = float(timeout), allow_unsafe_code == "yes"
        require_protection(self.allow_unsafe_code)
        self.num_agents, self.num_turns, self.dataset, self.feedback = num_agents, num_turns, dataset, feedback
        self.seed = seed
        if dataset == "sample":  # its reference solutions pass by construction
            rows = {split: samples.class_tasks(split, count, seed) for split, count in SAMPLE_COUNTS.items()}
            self.splits = {split: [_task(row, dataset) for row in part] for split, part in rows.items()}
        else:
            rows = benchmark_rows(dataset, **BENCHMARK)
            tasks = {split: [_task(row, dataset) for row in part] for split, part in rows.items()}
            self.splits = self._solvable(tasks)

    def tasks(self, split):
        """The tasks of "train", "validation" or "test"."""
        if split not in self.splits:
            raise ValueError(f"--dataset {self.dataset}: it has no split {split}; use {', '.join(self.splits)}.")
        return self.splits[split]

    def observe(self, task, history):
        """The prompt of each agent: the skeleton and the names of the methods to write.

        After the first turn it also holds the agent's own answers and, with feedback "level", what became of them.
        """
        prompts = []
        for agent, names in enumerate(self._assigned(task)):
            ask = f"Write these methods of {task['class_name']}: {', '.join(names)}. Function definitions only."
            if not names:
                ask = f"The methods of {task['class_name']} are written by others. Answer with nothing."
            prompt = f"{task['problem'].strip()}\n\n{ask}"
            for step in history if names else []:
                prompt += f"\n\nYour answer:\n{step.actions[agent].strip()}\n\n"
                if self.feedback == "level":
                    prompt += " ".join(_remarks(agent, names, step.feedback)) + "\n\n"
                prompt += f"Write {', '.join(names)} again, better. Function definitions only."
            prompts.append(prompt)
        return prompts

    def step(self, branches):
        """Runs the answers of all branches at once; see rewards/classeval.py for reward and parts, and scored_step."""
        answers = [_answer(task, actions, self._assigned(task)) for task, _, actions in branches]
        scores = class_rewards(answers, self.timeout, self.allow_unsafe_code)
        return [
            scored_step(actions, score, self.num_turns - len(history))
            for (_, history, actions), score in zip(branches, scores)
        ]

    def demonstrations(self):
        """Prompts and answers to imitate for the sample training tasks: list of dict(prompt, completion).

        The code is correct, but with several agents three of ten answers hold one method too many, which is another
        agent's: agents that imitate them still have to learn to keep to their own. With two turns or more there are
        also prompts of a second turn, after a first turn in which one agent answered for another class. These first
        turns are run in the sandbox; those that pass anyway yield no prompt. Raises ValueError for other datasets,
        which need models with a longer context.
        """
        if self.dataset != "sample":
            raise ValueError(f"--dataset {self.dataset}: it holds no answers for each role; use sample.")
        rows, tasks = samples.class_tasks("train", SAMPLE_COUNTS["train"], self.seed), self.tasks("train")
        answers = [self._sample_answer(row, task) for row, task in zip(rows, tasks)]
        return demonstrated(self, tasks, answers, self._flawed_answers(tasks, answers))

    def _sample_answer(self, row, task):
        """The text of each agent."""
        answer = []
        for names in self._assigned(task):
            surplus = [row["surplus"]] if names else []
            answer.append("\n\n".join(row["methods"][n] for n in task["methods"] if n in [*names, *surplus]))
        return answer

    def _flawed_answers(self, tasks, answers):
        """For each task its answer, except that one agent's text is taken from another task."""
        rng = random.Random(f"flawed answers {self.seed}")
        for task, answer in zip(tasks, answers):
            agent = rng.randrange(min(self.num_agents, len(task["methods"])))
            yield [*answer[:agent], rng.choice(answers)[agent], *answer[agent + 1 :]]

    def _assigned(self, task):
        """For each agent, the methods that it is to write: they are dealt out in source order."""
        return [task["methods"][agent :: self.num_agents] for agent in range(self.num_agents)]

    def _solvable(self, splits):
        """Leaves out tasks whose reference solution fails the tests, and examples that it fails."""
        tasks = [task for part in splits.values() for task in part]
        unknown = [task for task in tasks if (task["solution"], task["tests"]) not in _verdicts]
        results = self._run_references(unknown)
        # An example can spoil something that the tests need, such as a file: then the tests run without examples.
        failed = [i for i, result in enumerate(results) if result.reason and unknown[i]["examples"]]
        again = self._run_references([{**unknown[i], "examples": []} for i in failed])
        for i, result in zip(failed, again):
            results[i] = result
        for task, result in zip(unknown, results):
            holding = [source for source, what in zip(task["examples"], result.examples) if not what]
            _verdicts[task["solution"], task["tests"]] = result.reason, holding
        left_out, solvable = [], {split: [] for split in splits}
        for split, part in splits.items():
            for task in part:
                reason, examples = _verdicts[task["solution"], task["tests"]]
                if reason:
                    left_out.append(f"{task['task_id']} ({reason.splitlines()[0]})")
                else:
                    solvable[split].append({**task, "examples": examples})
        if left_out:
            why = "their reference solution fails in the sandbox (docs/sandbox.md says what it lacks)"
            print(f"--dataset {self.dataset}: left out, as {why}: {', '.join(left_out)}")
        for split, part in solvable.items():
            if not part and splits[split]:
                raise ValueError(
                    f"--dataset {self.dataset}: no reference solution of the split {split} passes here; use another "
                    "dataset, or install what the tasks import."
                )
        return solvable

    def _run_references(self, tasks):
        answers = [_answer(task, [task["solution"]], [task["methods"]]) for task in tasks]
        return run_classes(answers, self.timeout, self.allow_unsafe_code)


def _answer(task, texts, assigned):
    return ClassAnswer(texts, assigned, **{key: task[key] for key in ClassAnswer._fields[2:]})


def _remarks(agent, names, findings):
    """What agent number `agent` is told. Of the scored tests, that is only how many passed.

    An example of the skeleton that a benchmark's tests repeat is still shown: agents can read it in the skeleton.
    """
    missing = [name for name, written in zip(names, findings["written"][agent]) if not written]
    remarks = [f"Not found: {', '.join(missing)}." if missing else "All your methods were found."]
    if findings["doubled"]:
        remarks.append(f"Written by more than one agent: {', '.join(findings['doubled'])}.")
    if not findings["syntax"]:
        return remarks + syntax_remarks(agent, findings)
    remarks.append(f"{findings['passed']} of {findings['total']} tests passed.")
    if findings["examples"]:
        source, what = findings["examples"][0]
        remarks.append(f"{'; '.join(source.splitlines())} fails: {what}.")
    return remarks


def _task(row, dataset):
    """What the agents read and what tests their answers; rows are trusted, so they are parsed here.

    Keys: task_id, problem, class_name, methods (the names to be written, in order), base (source of the module
    that they are put into), names (defined in that module, for the tests), tests, setup, examples, solution.
    """
    return parsed(partial(_parse, dataset=dataset), row, dataset, "ClassEval's")


def _parse(row, dataset):
    solution = ast.parse(row["solution_code"])
    base = _base(row, solution, dataset)
    functions = [n.name for n in ast.parse(row["test"]).body if isinstance(n, FUNCTIONS)]
    if stray := [name for name in functions if name.startswith("test") and row["test"].count(f"{name}(") < 2]:
        raise ValueError(f"{stray[0]} stands outside of a TestCase, so it would not run")
    owner, reference = [_class(tree, row["class_name"]) for tree in (base, solution)]
    # Methods that are stubs in the reference too, such as constructors, are not asked for.
    idle = {node.name for node in reference.body if isinstance(node, FUNCTIONS) and is_stub(node)}
    todo = [n for n in owner.body if isinstance(n, FUNCTIONS) and is_stub(n) and n.name not in idle]
    if not todo:
        raise ValueError("no method is left to be written")
    names = list(dict.fromkeys(node.name for node in todo))  # once: one agent writes a property and its setter
    if unseen := [name for name in [row["class_name"], *names] if name not in row["skeleton"]]:
        raise ValueError(f"the skeleton, which agents read, does not name {unseen[0]}")
    given, needed = (
        {ast.unparse(n): n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))}
        for tree in (base, solution)
    )
    missing = needed.keys() - given.keys()  # in the skeleton: agents write methods only and could not import it
    base.body = [needed[source] for source in sorted(missing)] + base.body
    return {
        "task_id": row["task_id"],
        "problem": "\n".join([*sorted(missing), row["skeleton"]]),
        "class_name": row["class_name"],
        "methods": names,
        "base": ast.unparse(base),
        "names": [node.name for node in base.body if isinstance(node, (*FUNCTIONS, ast.ClassDef))],
        "tests": row["test"],
        "setup": "\n".join([*sorted(missing), *given]),
        "examples": [e for node in todo for e in example_asserts(ast.get_docstring(node) or "", after_all=True)],
        "solution": row["solution_code"],
    }


def _class(tree, name):
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def _base(row, solution, dataset):
    """The skeleton's syntax tree, or if it has a syntax error, as a few do, the solution's with emptied methods."""
    try:
        return ast.parse(row["skeleton"])
    except SyntaxError as error:
        said = "answers are put into the solution's outline, and agents read the skeleton as it is"
        print(f"--dataset {dataset}: the skeleton of {row['task_id']} is not Python ({error.msg}): {said}")
        base = ast.parse(ast.unparse(solution))
        for node in _class(base, row["class_name"]).body:
            if isinstance(node, FUNCTIONS) and node.name != "__init__":
                node.body = [ast.Pass()]
        return base
