"""Checks an environment before a model is loaded, by playing a few of its tasks.

    python -m envs                             lists the built-in ones
    python -m envs tldr                        checks it, and shows what agents read first and what parts mean
    python -m envs my:Env --num-turns 2        the same for class Env in my.py of the working folder

A check ends at the first fault, with a sentence that says what is wrong.
"""

import re
import sys
from dataclasses import dataclass, field
from types import NoneType

import numpy as np
import tyro

from envs import ENVIRONMENTS, describe_span, find_class, make

# names that the scripts log
METRICS = r"return(_se)?|reward_turn\d+|zero_variance_groups|agent_\d+/.*"


@dataclass
class Args:
    env: tyro.conf.Positional[str] = ""  # a built-in environment, several joined by +, or module:Class; "": a list
    env_kwargs: dict[str, str] = field(default_factory=dict)  # its keyword arguments, e.g. reward grounded
    num_agents: int = 2
    num_turns: int = 1
    dataset: str = "sample"
    seed: int = 1


def demand(holds, rule, value):
    """Ends the program if a rule does not hold for a value."""
    if not holds:
        sys.exit(f"error: {rule}, not {value!r:.300}")


def is_finite(value, *shapes):
    """Whether it is a finite number, or an array of such, in one of these shapes."""
    array = np.asarray(value)
    return array.shape in shapes and array.dtype.kind in "biuf" and np.isfinite(array).all()


def check_step(step, N, meanings):
    """meanings: PARTS of its class, or None."""
    demand(is_finite(step.reward, (), (N,)), f"reward has to be a finite number, or a list of {N}", step.reward)
    demand(isinstance(step.parts, dict), "parts has to be a dict, name -> number", step.parts)
    for name, number in step.parts.items():
        demand(not re.fullmatch(METRICS, name), "a part has to have a name that no metric has", name)
        demand(is_finite(number, ()), f"part {name} has to be a finite number", number)
        demand(meanings is None or name in meanings, "each part has to have a meaning in PARTS", name)
    demand(step.done in (True, False), "done has to be True or False", step.done)


def play(env, tasks, N, T, meanings):
    """Plays tasks together, and scores each branch alone too: both have to give the same prompts and rewards.

    At each task and history agents give no answer in one branch, and repeat their prompts in another one. A third of
    the branches go on. Returns all Steps.
    """
    places = [(task, []) for task in tasks]
    played = []
    for _ in range(T):
        branches = []
        seen = []
        before = repr(places)
        for task, history in places:
            prompts = env.observe(task, history)
            holds = (
                isinstance(prompts, list) and len(prompts) == N and {*map(type, prompts), NoneType} == {str, NoneType}
            )
            demand(holds, f"observe() has to return a list of {N} strings, or None for some of them", prompts)
            for actions in [""] * N, [prompt or "" for prompt in prompts]:
                branches.append((task, history, actions))
                seen.append(prompts)
        sent = repr(branches)
        steps = env.step(branches)
        demand(len(steps) == len(branches), "step() has to return a list with a Step for each branch", steps)
        same = repr(places) == before and repr(branches) == sent
        demand(same, f"observe() and step() have to leave task, history and actions as {sent:.300}", branches)
        played += steps
        children = []
        for branch, prompts, step in zip(branches, seen, steps):
            check_step(step, N, meanings)
            task, history, actions = branch
            again = env.observe(task, history)
            alone = env.step([branch])[0].reward
            # a reward model may round in another way
            same = again == prompts and np.allclose(alone, step.reward, atol=1e-4)
            demand(
                same,
                "alone, a branch has to give the same prompts and reward as among others, "
                f"{prompts!r:.300} and {step.reward}",
                (again, alone),
            )
            if not step.done:
                children.append((task, [*history, (actions, step)]))
        places = children[::3]
        if not places:
            break
    return played


def print_list():
    """What the built-in environments are."""
    for name, about in ENVIRONMENTS.items():
        print(f"{name}: {about.sentence}")
        agents = describe_span(*about.agents)
        turns = describe_span(*about.turns)
        print(f"    agents: {agents}; turns: {turns}; return: up to {about.largest_return}")
        if about.needs:
            print(f"    needs {about.needs}")


def print_parts(name, meanings):
    """What the parts of an environment mean; those that are paid come first."""
    print(f"parts of {name}:")
    for part, (most, meaning) in sorted(meanings.items(), key=lambda item: item[1][0] == 0):
        kind = f"paid, up to {most:g}" if most else "only logged"
        print(f"    {part} ({kind}): {meaning}")


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    N = args.num_agents
    if not args.env:
        print_list()
        sys.exit()
    try:
        env = make(args.env, N, args.num_turns, args.dataset, args.seed, **args.env_kwargs)
    except (ModuleNotFoundError, ValueError) as error:
        sys.exit(f"error: {error}")
    T = getattr(env, "num_turns", args.num_turns)
    train = env.tasks("train")
    test = env.tasks("test")
    demand(train and test, "tasks() has to return a list of tasks for train and for test", (train, test))
    meanings = {name: getattr(find_class(name), "PARTS", None) for name in args.env.split("+")}
    # a mixture's parts have other names
    steps = play(env, train[:4] + test[:4], N, T, meanings.get(args.env))
    rewards = [np.mean(step.reward) for step in steps]
    for i, prompt in enumerate(env.observe(test[0], [])):
        print(f"agent {i} reads:\n{prompt}\n")
    for name, parts in meanings.items():
        if parts:
            print_parts(name, parts)
    print(f"{args.env}: no fault found; {len(train)} + {len(test)} tasks, turns: {T}")
    print(f"rewards of no answer, and of the prompt as the answer: {min(rewards):g} to {max(rewards):g}")
    if all(step.parts.get("unparsed") for step in steps):
        print("in none of these could a verdict be read: the part unparsed is 1; ask the judge what it answers")
