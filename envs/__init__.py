"""The environments: what each agent is asked, and what the joint answer is worth.

An environment is any class with these members; a user's own class needs only `Step` from this package.

    __init__(num_agents, num_turns, dataset, seed, **options)    options are strings; a built-in may also take its name
    tasks(split) -> list[dict]                    "train" or "test"
    observe(task, history) -> list[str | None]    the prompt of each agent; None: it is silent in this turn (at least
                                                  one speaks); history: pairs (actions, Step) of earlier turns
    step(branches) -> list[Step]                  branches: list of (task, history, actions), scored as one batch
    demonstrations() -> list[dict]                optional, for sft.py: prompts of train tasks, and a completion each
    state(task, history) -> str                   optional, for critics of mappo.py; not in mixtures or protocols
    num_turns: int                                optional: how many turns it has, in place of --num-turns
    PARTS: dict                                   optional: name of a part -> (the most that it pays, or less than 0 if
                                                  it only costs, 0 if it is only logged; what it means)

An environment keeps no mutable state, so a rollout can branch: one task and history may continue in many ways.
"""

import importlib
import inspect
from math import inf
from typing import Any, NamedTuple

import numpy as np

from envs.data import read_training_rows as read_training_rows  # for --data of the scripts


class Step(NamedTuple):
    """What came of a joint action."""

    reward: float | list[float]  # shared by all agents, or one for each
    parts: dict[str, float]  # the reward's components and diagnostics, for the log
    done: bool  # ends the branch, even before num_turns
    feedback: Any = None  # for the environment's own use in the next observe()


UNPAID = Step(0.0, {}, done=False)  # of a turn before the one that is scored


def one_of(option, value, *allowed):
    """Raises ValueError with one sentence if an option has another value."""
    if value not in allowed:
        raise ValueError(f"--env-kwargs {option} {value}: use one of {', '.join(allowed)}.")


def need_sample(dataset, why):
    """Raises ValueError with one sentence for all but the sample tasks."""
    if dataset != "sample":
        raise ValueError(f"--dataset {dataset}: {why}; use sample.")


class BuiltIn(NamedTuple):
    """A built-in environment: what `make` checks and `python -m envs` lists."""

    path: str  # module:Class
    sentence: str
    agents: tuple[int, float]  # fewest and most
    turns: tuple[int, float]
    largest_return: str  # with two agents, or as many as there have to be
    needs: str = ""  # beyond requirements.txt


ANY = (1, inf)
ONE = (1, 1)
SANDBOX = "Linux, or --env-kwargs allow_unsafe_code yes"
ENVIRONMENTS = {
    "tldr": BuiltIn(
        "envs.writing:Writing",
        "The first agent writes a concise summary of a post, each further agent a more detailed one.",
        ANY,
        ONE,
        "2.98",
    ),
    "arxiv": BuiltIn(
        "envs.writing:Writing",
        "Agents divide the background, motivation, methods and implications of an introduction.",
        (1, 4),
        ONE,
        "2.98",
    ),
    "humaneval": BuiltIn(
        "envs.coding:Coding",
        "The last agent writes a Python function for a docstring, each other agent a helper.",
        ANY,
        ANY,
        "4 for each turn",
        SANDBOX,
    ),
    "coophumaneval": BuiltIn(
        "envs.coding:Coding",
        "Helpers, and a function whose two steps can be divided between helper and function.",
        ANY,
        ANY,
        "4 for each turn",
        SANDBOX,
    ),
    "mbpp": BuiltIn(
        "envs.coding:Coding",
        "Helpers, and a function that a sentence and one example describe.",
        ANY,
        ANY,
        "4 for each turn",
        SANDBOX,
    ),
    "classeval": BuiltIn(
        "envs.classeval:ClassEval",
        "Agents divide the methods of a class, and each writes its own.",
        ANY,
        ANY,
        "6 for each turn",
        SANDBOX,
    ),
    "gsm8k": BuiltIn(
        "envs.reasoning:Reasoning",
        "Solvers answer a word problem; then a checker reads and judges their solutions, and answers.",
        ANY,
        (1, 2),
        "1.2",
    ),
    "reasoning": BuiltIn(
        "envs.generated:Generated",
        "The roles of gsm8k for problems of one of reasoning-gym's generators.",
        ANY,
        (1, 2),
        "1.2",
        "pip install reasoning-gym",
    ),
    "debate": BuiltIn(
        "envs.debate:Debate",
        "Agents answer a question, read each other's answers, and answer again.",
        ANY,
        (2, inf),
        "1.3",
    ),
    "tools": BuiltIn(
        "envs.tools:Tools",
        "A caller uses tools, one in each turn; then an answerer reads what came out.",
        (1, 3),
        (2, inf),
        "1",
        SANDBOX,
    ),
    "bfcl": BuiltIn(
        "envs.bfcl:Parallel",
        "Agents write parts of the function calls that a request needs.",
        ANY,
        ONE,
        "1",
    ),
    "bugfix": BuiltIn(
        "envs.bugfix:BugFix",
        "A localiser says in which line a bug is; then a fixer rewrites the function.",
        (1, 3),
        (1, 3),
        "2",
        SANDBOX,
    ),
    "reference": BuiltIn(
        "envs.games:Reference",
        "Speakers tell a listener with one word each which of four people is meant.",
        (2, 3),
        (2, 2),
        "1",
    ),
    "dilemma": BuiltIn(
        "envs.games:Dilemma",
        "Two suspects each say whether the other is guilty or a friend: the prisoner's dilemma.",
        (2, 2),
        ONE,
        "3",
    ),
    "judged": BuiltIn(
        "envs.judged:Judged",
        "Agents write parts of an answer to any task, and another model scores it by a rubric.",
        ANY,
        ONE,
        "1",
        "--dataset FILE --env-kwargs url URL model NAME rubric TEXT",
    ),
    "remote": BuiltIn(
        "envs.remote:Remote",
        "Any environment, graded on another machine.",
        ANY,
        ANY,
        "what the other machine's environment pays",
        "a server: python -m envs.remote NAME",
    ),
}


def describe_span(fewest, most):
    """Two numbers as one reads them."""
    if fewest == most:
        return str(fewest)
    return f"{fewest} or more" if most == inf else f"{fewest} to {most}"


def find_class(name):
    """The class of an environment, by its key in ENVIRONMENTS or as module:Class."""
    path = ENVIRONMENTS[name].path if name in ENVIRONMENTS else name
    module, _, class_name = path.partition(":")
    if not class_name:
        path = name.removesuffix(".py").replace("/", ".")
        own = f"{path}:{path.split('.')[-1].capitalize()} for a class of your own"
        raise ValueError(f"unknown environment {name}; use {', '.join(ENVIRONMENTS)}, or {own}.")
    return getattr(importlib.import_module(module), class_name)


def _check_counts(name, num_agents, num_turns):
    """Raises ValueError with one sentence for numbers that a built-in environment does not take.

    The fewest turns are not checked: a class that needs more takes as many as it needs.
    """
    agents, turns = ENVIRONMENTS[name].agents, ENVIRONMENTS[name].turns
    if not agents[0] <= num_agents <= agents[1]:
        raise ValueError(f"--num-agents {num_agents}: {name} has {describe_span(*agents)}.")
    if not 1 <= num_turns <= turns[1]:
        raise ValueError(f"--num-turns {num_turns}: {name} has {describe_span(*turns)}.")


def make(name, num_agents=2, num_turns=1, dataset="sample", seed=1, protocol="simultaneous", **options):
    """An environment by name.

    name: a key of ENVIRONMENTS, "module:Class" of the user's own, or several of these joined by "+"
    dataset: "sample" (made offline), "hub" (the environment's public set), another hub id, or a file: see envs/data.py
    protocol: one of PROTOCOLS in envs/protocols.py, for environments of one turn
    options: further arguments of the environment's class, as strings, e.g. reward="grounded"; what no class names goes
        to those that take **options

    Raises ValueError with one sentence for what cannot be used.
    """
    from envs.protocols import PROTOCOLS, Protocol  # here, since it needs Step

    one_of("protocol", protocol, *PROTOCOLS)
    own_turns = num_turns if protocol == "simultaneous" else 1
    common = {"num_agents": num_agents, "num_turns": own_turns, "dataset": dataset, "seed": seed}
    names = name.split("+")
    parameters = {each: inspect.signature(find_class(each)).parameters for each in names}  # of each class
    known = set().union(*parameters.values()) - {*common, "name"}
    unknown = options.keys() - known
    takes_others = {each for each in names if any(p.kind == p.VAR_KEYWORD for p in parameters[each].values())}
    if unknown and not takes_others:
        knows = ", ".join(sorted({*known, "protocol"}))
        raise ValueError(f"--env-kwargs {min(unknown)}: {name} does not know it; it knows {knows}.")
    environments = {}
    for each in names:
        own = unknown.union(parameters[each]) if each in takes_others else parameters[each]
        arguments = common | {key: value for key, value in options.items() if key in own}
        if each in ENVIRONMENTS:
            _check_counts(each, num_agents, own_turns)
            if "name" in parameters[each]:
                arguments["name"] = each
        missing = []
        for key, p in parameters[each].items():
            required = p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            if required and key not in arguments:
                missing.append(f"{key} VALUE")
        if missing:
            raise ValueError(f"--env {each}: it needs --env-kwargs {' '.join(missing)}.")
        env = find_class(each)(**arguments)
        if protocol != "simultaneous":
            env = Protocol(env, each, protocol, num_agents, num_turns)
        environments[each] = env
    return Mixture(environments, num_turns) if "+" in name else environments[name]


class Mixture:
    """Several environments as one, dict(name -> environment); each has an equal share of the tasks."""

    def __init__(self, environments, num_turns):
        self.environments = environments
        self.turns = {name: getattr(env, "num_turns", num_turns) for name, env in environments.items()}
        self.num_turns = max(self.turns.values())

    def tasks(self, split):
        """Tasks of all environments in turn. Short train splits repeat; surplus test tasks are left out."""
        tasks = {name: list(env.tasks(split)) for name, env in self.environments.items()}
        count = (max if split == "train" else min)(map(len, tasks.values()))
        return [{"env": name, "task": rows[k % len(rows)]} for k in range(count) for name, rows in tasks.items()]

    def observe(self, task, history):
        return self.environments[task["env"]].observe(task["task"], history)

    def step(self, branches):
        """Parts bear their environment's name, except all_passed, which view.py counts.

        A branch ends with the turns of its own environment, which may have fewer than another one.
        """
        steps = [None] * len(branches)
        for name, env in self.environments.items():  # each scores its branches as one batch
            own = {k: (task["task"], *rest) for k, (task, *rest) in enumerate(branches) if task["env"] == name}
            batch = list(own.values())
            for (k, (_, history, _)), step in zip(own.items(), env.step(batch) if batch else []):
                parts = {key if key == "all_passed" else f"{name}/{key}": part for key, part in step.parts.items()}
                parts[f"{name}/reward"] = float(np.mean(step.reward))
                done = step.done or len(history) + 1 >= self.turns[name]
                steps[k] = step._replace(parts=parts, done=done)
        return steps

    def demonstrations(self):
        return [pair for env in self.environments.values() for pair in env.demonstrations()]
