"""What estimators do to the policy gradient, exactly: writes results/credit.csv for docs/credit.md.

    python benchmarks/credit.py        (needs git; a few minutes)

Two agents play small random games, in which an answer is one of two words. Every outcome of their sampling is
enumerated, and on each the rollout and the advantages of nano.py run, or of a variant in docs/lesson/. So mean and
variance of a task's gradient are those of the code itself, in float64.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from importlib.util import module_from_spec, spec_from_file_location
from itertools import chain, product
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
from stamp import ROOT, make_stamp, write_rows

from envs import Step

VARIANTS = [
    "nano_z",
    "nano_difference",
    "nano_rae",
    "nano_drmas",
    "nano_gdpo",
    "nano_maxrl",
    "nano_gigpo",
    "nano_by_task",
    "nano_at_grpo",
]
# the first changes only trajectories, the second only trees
UNUSED = [("nano_by_task", "tree"), ("nano_at_grpo", "trajectories")]
SEEDS = range(1, 11)  # of the games


def draw_number(*key):
    """A number between 0 and 1 that depends on the key alone."""
    return int(hashlib.md5(repr(key).encode()).hexdigest()[:8], 16) / 2**32


class Game:
    """What each word adds, and (if all speak) what the words add together, is random; "" adds nothing."""

    num_agents = 2
    num_turns = 2

    def __init__(self, seed):
        self.seed = seed

    def observe(self, task, history):
        return [f"{i} {[actions for actions, _ in history]}" for i in range(self.num_agents)]

    def parts(self, history, actions):
        past = [earlier for earlier, _ in history]
        alone = [draw_number(self.seed, past, i, text) for i, text in enumerate(actions) if text]
        together = draw_number(self.seed, past, actions) if all(actions) else 0.0
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
    b = 1 / (1 + np.exp(1.2 - 2.4 * draw_number(prompt)))
    return b if word == "b" else 1 - b


def score(prompt, word):
    """The derivative of the word's log-probability by the logit of "b"."""
    return (word == "b") - chance(prompt, "b")


def find_true_gradient(env, gamma=1.0):
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


def script_of(name, folder):
    """The path of a script, of a variant in docs/lesson/, or of a copy in the folder with one of its patches."""
    variant = f"{ROOT}/docs/lesson/{name}"
    if os.path.exists(f"{variant}.py"):
        return f"{variant}.py"
    path = shutil.copy(f"{ROOT}/{name.partition('_')[0]}.py", f"{folder}/{name}.py")
    if os.path.exists(f"{variant}.patch"):
        subprocess.run(["git", "apply", f"{variant}.patch"], cwd=folder, check=True)
    return path


def load(name):
    """A new module of nano.py, or of a variant, which imports a new one."""
    sys.modules.pop("nano", None)
    with TemporaryDirectory() as folder:
        spec = spec_from_file_location(name, script_of(name, folder))
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def enumerate_outcomes(env, G, branching, variant, gamma=1.0):
    """Of each outcome of a task's sampling: its probability, gradient (prompt -> number) and completions."""
    nano = getattr(variant, "nano", variant)
    # the parts are for nano_gdpo
    args = SimpleNamespace(gamma=gamma, parts=["alone", "together"])
    policies = [SimpleNamespace(tokenizer=None) for _ in range(env.num_agents)]
    later = 1 if branching == "trajectories" else G
    group_sizes = [G] + [later] * (env.num_turns - 1)

    def encode(tokenizer, prompt):
        return prompt

    def complete(args, policy, groups, G):
        for group in groups:
            for _ in range(G):
                # the words that are given, and after them "a"
                word = given[len(drawn)] if len(drawn) < len(given) else "a"
                group.completions.append(word)
                drawn.append((group.prompt_ids, word))

    nano.encode = encode
    nano.complete = complete
    unseen = [[]]
    while unseen:
        given = unseen.pop()
        drawn = []  # pairs of prompt and word
        # of nano_rae, which moves them
        variant.baselines = defaultdict(lambda: 1.0)
        turns = nano.rollout(args, env, policies, [{}], group_sizes, "align")
        # later, a "b" instead of each "a" that was not given
        words = [word for _, word in drawn]
        unseen += [[*words[:k], "b"] for k in range(len(given), len(words))]
        if branching == "trajectories":
            nano.compare_trajectories(turns)
        groups = [group for node in chain(*turns) for group in node.groups.values()]
        nano.set_advantages(groups)
        gradient = defaultdict(float)
        for group in groups:
            for word, advantage in zip(group.completions, group.advantages):
                gradient[group.prompt_ids] += group.weight * advantage * score(group.prompt_ids, word)
        yield np.prod([chance(*word) for word in drawn]), gradient, len(drawn)


def find_moments(*what, **options):
    """The mean gradient of a task (prompt -> number), the trace of its covariance, and the mean of completions."""
    mean = defaultdict(float)
    square = 0.0
    completions = 0.0
    for p, gradient, drawn in enumerate_outcomes(*what, **options):
        square += p * sum(value**2 for value in gradient.values())
        completions += p * drawn
        for prompt, value in gradient.items():
            mean[prompt] += p * value
    return mean, square - sum(value**2 for value in mean.values()), completions


def row_of(method, env, *what):
    """The angle between the mean gradient and the true one, their ratio, and the variance at equal completions."""
    mean, variance, completions = find_moments(env, *what)
    true = find_true_gradient(env)
    x = np.array([mean[prompt] for prompt in true])
    y = np.array(list(true.values()))
    scale = x @ y / (y @ y)
    return {
        "method": method,
        "game": type(env).__name__,
        "seed": env.seed,
        "cosine": x @ y / np.linalg.norm(x) / np.linalg.norm(y),
        "scale": scale,
        "variance": variance / scale**2 * completions,
    }


def rows_of(env):
    for name in "nano", *VARIANTS:
        for branching, G in ("tree", 2), ("trajectories", 3):
            if (name, branching) not in UNUSED:
                yield row_of(f"{name}, {branching}", env, G, branching, load(name))


if __name__ == "__main__":
    rows = []
    for game, seed in product([Game, Passing], SEEDS):
        own = list(rows_of(game(seed)))
        tree = own[0]["variance"]
        for row in own:
            row["variance"] /= tree
        rows += own
    write_rows(f"{ROOT}/results/credit.csv", make_stamp(SEEDS), rows)
