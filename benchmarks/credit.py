"""What estimators do to the policy gradient, exactly: writes results/credit.csv for docs/credit.md.

    python benchmarks/credit.py        (needs git; a few minutes)

Two agents play small random games, in which an answer is one of two words. Every outcome of their sampling is
enumerated, and on each the sections "# 1 ROLLOUT" and "# 2 ADVANTAGES" of nano.py run, or of a copy with a change. So
mean and variance of a task's gradient are those of the code itself, in float64.
"""

import hashlib
import re
import shutil
import subprocess
import tempfile
import textwrap
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import tyro
from stamp import ROOT, stamp, write_rows

from envs import Step

FLAGS = {"step_weight": 1.0, "parts": {"alone": 1.0, "together": 1.0}}  # of nano_gigpo.py and nano_gdpo.py
PATCHES = ["nano_z", "nano_difference", "nano_rae", "nano_drmas", "nano_gdpo", "nano_maxrl", "nano_gigpo"]


@dataclass
class Args:
    seeds: list[int] = field(default_factory=lambda: list(range(1, 11)))  # of the games


def uniform(*key):
    """A number between 0 and 1 that depends on the key alone."""
    return int(hashlib.md5(repr(key).encode()).hexdigest()[:8], 16) / 2**32


class Game:
    """What each word adds, and (if all speak) what the words add together, is random; "" adds nothing."""

    def __init__(self, seed):
        self.seed, self.num_turns, self.num_agents = seed, 2, 2

    def observe(self, task, history):
        return [f"{i} {[actions for actions, _ in history]}" for i in range(self.num_agents)]

    def parts(self, history, actions):
        past = [earlier for earlier, _ in history]
        alone = [uniform(self.seed, past, i, text) for i, text in enumerate(actions) if text]
        together = uniform(self.seed, past, actions) if all(actions) else 0.0
        return {"alone": sum(alone), "together": together}

    def reward(self, history, actions):
        return sum(self.parts(history, actions).values())

    def step(self, branches):
        steps = []
        for _, history, actions in branches:
            # agent 0 may end the game
            done = actions[0] == "b"
            steps.append(Step(self.reward(history, actions), self.parts(history, actions), done))
        return steps


class Passing(Game):
    """Nothing is paid until a trajectory ends; then 1 or 0, at random."""

    def parts(self, history, actions):
        ended = actions[0] == "b" or len(history) + 1 == self.num_turns
        return {"alone": 0.0, "together": float(ended and sum(super().parts(history, actions).values()) > 1.5)}


def chance(prompt, word):
    """The policies: a logit for each prompt, which names the agent."""
    b = 1 / (1 + np.exp(1.2 - 2.4 * uniform(prompt)))
    return b if word == "b" else 1 - b


def score(prompt, word):
    """The derivative of the word's log-probability by the logit of "b"."""
    return (word == "b") - chance(prompt, "b")


def true_gradient(env, gamma=1.0):
    """The derivative of each agent's expected return by its own logits: prompt -> number. Without nano.py."""
    gradient = defaultdict(float)

    def visit(history, weight):
        """The value (N,) of what is played from here on."""
        prompts = env.observe(None, history)
        value = 0.0
        for words in product(*["ab" if prompt else [""] for prompt in prompts]):
            spoken = [(i, prompt, word) for i, (prompt, word) in enumerate(zip(prompts, words)) if prompt]
            p = np.prod([chance(prompt, word) for _, prompt, word in spoken])
            (step,) = env.step([(None, history, list(words))])
            returns = np.zeros(len(prompts)) + step.reward
            if not step.done and len(history) + 1 < env.num_turns:
                returns += gamma * visit([*history, (list(words), step)], weight * p * gamma)
            value += p * returns
            for i, prompt, word in spoken:
                gradient[prompt] += weight * p * returns[i] * score(prompt, word)
        return value

    visit([], 1.0)
    return gradient


def source_of(patch=None):
    """The source of nano.py, or with one of the patches of docs/lesson/."""
    path = Path(ROOT, "nano.py")
    with tempfile.TemporaryDirectory() as folder:
        if patch:
            path = Path(shutil.copy(path, f"{folder}/{patch}.py"))
            subprocess.run(["git", "apply", f"{ROOT}/docs/lesson/{patch}.patch"], cwd=folder, check=True)
        return path.read_text()


class Missing(Exception):
    """More words are drawn than are given: so many."""


def outcomes(env, G, branching, source, gamma=1.0):
    """Of each outcome of a task's sampling: its probability, gradient (prompt -> number) and completions."""
    names = {"__name__": "nano", "env": env, "N": env.num_agents, "T": env.num_turns, "G": G}
    names["args"] = SimpleNamespace(branching=branching, joint_mode="align", gamma=gamma, num_tasks=1, **FLAGS)
    names |= {"policies": [None] * env.num_agents, "train_tasks": [{}], "metrics": {}}
    exec(compile(source, "nano.py", "exec"), names)
    section = re.search(r"( +# 1 ROLLOUT.*?) +# 3 UPDATE", source, re.S)[1]
    code = compile(textwrap.dedent(section), "nano.py", "exec")

    def complete(args, policy, prompts, G):
        groups = []
        for prompt in prompts:
            end = len(drawn) + G
            if end > len(given):
                raise Missing(end - len(given))
            words = given[len(drawn) : end]
            drawn.extend((prompt, word) for word in words)
            groups.append(names["Group"](prompt, list(words), list(words)))
        return groups

    names["complete"] = complete
    unseen = [""]
    while unseen:
        given = unseen.pop()
        drawn = []
        # of nano_rae.py, which changes it
        run = names | {"baselines": np.ones((env.num_turns, env.num_agents))}
        try:
            exec(code, run)
        except Missing as missing:
            unseen += [given + "".join(words) for words in product("ab", repeat=missing.args[0])]
            continue
        gradient = defaultdict(float)
        for node in run["nodes"]:
            for group in node.groups.values():
                w = node.weight / len(group.completions) * gamma ** len(node.history)
                for word, advantage in zip(group.completions, group.advantages):
                    gradient[group.prompt_ids] += w * advantage * score(group.prompt_ids, word)
        yield np.prod([chance(*word) for word in drawn]), gradient, len(drawn)


def moments(*what, **options):
    """The mean gradient of a task (prompt -> number), the trace of its covariance, and the mean of completions."""
    mean = defaultdict(float)
    square = 0.0
    completions = 0.0
    for p, gradient, drawn in outcomes(*what, **options):
        square += p * sum(value**2 for value in gradient.values())
        completions += p * drawn
        for prompt, value in gradient.items():
            mean[prompt] += p * value
    return mean, square - sum(value**2 for value in mean.values()), completions


def row_of(method, env, *what):
    """The angle between the mean gradient and the true one, their ratio, and the variance at equal completions."""
    mean, variance, completions = moments(env, *what)
    true = true_gradient(env)
    x = np.array([mean[prompt] for prompt in true])
    y = np.array(list(true.values()))
    cosine = x @ y / np.linalg.norm(x) / np.linalg.norm(y)
    scale = x @ y / (y @ y)
    row = {"method": method, "game": type(env).__name__, "seed": env.seed, "cosine": cosine, "scale": scale}
    return row | {"variance": variance / scale**2 * completions}


def rows_of(env):
    for patch in None, *PATCHES:
        for branching, G in ("tree", 2), ("trajectories", 3):
            yield row_of(f"{patch or 'nano'}, {branching}", env, G, branching, source_of(patch))


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    rows = []
    for game, seed in product([Game, Passing], args.seeds):
        own = list(rows_of(game(seed)))
        tree = own[0]["variance"]
        for row in own:
            row["variance"] /= tree
        rows += own
    write_rows(f"{ROOT}/results/credit.csv", stamp(args), rows)
