"""What a rollout is worth: returns, credit, weights, advantages and metrics by hand, and unbiasedness by enumeration.

All scripts share this code byte for byte, except their advantages (test_copies.py). Here one of them grows its trees
without a model: completions are the numbers that a test writes.
"""

import functools
import itertools
from collections import defaultdict

import numpy as np
import pytest
from conftest import CRITIC_FREE, MAGRPO, lines_of
from test_credit import Own, credit
from test_gradient import advantages_of
from toy import Step, rows_of

import magrpo


class Paid:
    """Completion g of an agent is the text "g". What a joint action pays, and who speaks, is up to the test.

    pay(task number, earlier actions, actions) -> a reward or a Step; speakers: for each turn, by default all
    """

    def __init__(self, num_agents, pay, speakers=None, tasks=1):
        self.num_agents = num_agents
        self.pay = pay
        self.speakers = speakers
        self.tasks = list(enumerate(range(tasks)))

    def observe(self, task, history):
        speaking = self.speakers[len(history)] if self.speakers else range(self.num_agents)
        before = tuple(tuple(actions) for actions, _ in history)
        return [before if i in speaking else None for i in range(self.num_agents)]

    def step(self, branches):
        steps = []
        for task, history, actions in branches:
            before = [earlier for earlier, _ in history]
            payment = self.pay(task, before, actions)
            if not isinstance(payment, Step):
                payment = Step(payment, {}, False)
            steps.append(payment)
        return steps


def write_numbers(agent, before, G):
    """Token ids and log-probabilities of each completion."""
    return [([g], [-1.0]) for g in range(G)]


def complete(args, write, groups, G):
    """Stands for the script's: fills each Group with what is written after its prompt; token 2 stops a completion."""
    for group in groups:
        group.completion_ids, group.logprobs = zip(*write(group.prompt, G))
        group.completions = ["".join(map(str, ids)) for ids in group.completion_ids]
        group.stopped = [ids[-1] == 2 for ids in group.completion_ids]


@pytest.fixture
def grow(monkeypatch):
    """grow(env, group_sizes, joint_mode, gamma, write) returns the nodes of each turn."""
    monkeypatch.setattr(magrpo, "complete", complete)
    monkeypatch.setattr(magrpo, "encode", lambda policy, prompt: ())

    def grow(env, group_sizes, joint_mode="align", gamma=1.0, write=write_numbers):
        writers = [functools.partial(write, i) for i in range(env.num_agents)]
        return magrpo.rollout(magrpo.Args(gamma=gamma), env, writers, env.tasks, group_sizes, joint_mode)

    return grow


def returns_of(node):
    return {i: group.returns.tolist() for i, group in node.groups.items()}


BY_HAND = {  # advantages of the returns 1, 2 and 6
    "magrpo": [-2.0, -1.0, 3.0],
    "marloo": [-3.0, -1.5, 4.5],
    "maremax": [-5.0, -4.0, 0.0],
    "mareinforce": [1.0, 2.0, 6.0],
}


@pytest.mark.parametrize("script", CRITIC_FREE, ids=lambda path: path.stem)
def test_advantages_by_hand(script):
    """Fails if the baseline is that of another algorithm."""
    assert advantages_of(script, np.array([1.0, 2.0, 6.0])).tolist() == BY_HAND[script.stem]


def test_only_those_who_speak_multiply(grow):
    """Fails if cross multiplies silent agents, or a silent agent has an action or a group."""

    def pay(task, before, now):
        numbers = [int(text) for text in now if text]
        return sum(numbers)

    env = Paid(3, pay, speakers=[[1], [0, 2]])
    (root,), children = grow(env, [3, 2], "cross")
    assert [child.choice for child in root.children] == [(0, 0, 0), (0, 1, 0), (0, 2, 0)]
    ((first, _),), *_ = [child.history for child in children]
    assert first == ["", "0", ""]
    assert returns_of(root) == {1: [1.0, 2.0, 3.0]}  # with a later mean of 1
    for child in children:
        assert [leaf.choice for leaf in child.children] == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)]
        assert returns_of(child) == {0: [0.5, 1.5], 2: [0.5, 1.5]}


METRICS = """
agent_0/entropy           | 3.1   | (1 + 3 * 2 + 6 * 4) / (4 + 6)
agent_1/entropy           | 1     |
agent_0/completion_length | 1.25  | (4 + 6) / (2 + 6)
agent_1/completion_length | 2     |
agent_0/stopped           | 0.125 | 1 of 8
agent_1/stopped           | 0     |
agent_0/return            | 3     |
agent_1/return            | 2     |
return                    | 2.5   | (3 + 2) / 2
reward_turn1              | 1.5   | means over agents and completions
reward_turn2              | 1     |
"""


def test_metrics_of_agents_by_hand(grow):
    """Fails if agents are mixed up, means are over completions in place of tokens, or a silent agent counts."""
    speech = {  # agent, turn -> what it writes: token ids and log-probabilities
        (0, 1): [([1], [-1.0]), ([3, 3, 2], [-2.0] * 3)],
        (1, 1): [([7, 7], [-0.5, -1.5])] * 2,
        (0, 2): [([5], [-4.0])] * 3,
    }

    def write(agent, before, G):
        turn = len(before) + 1
        return speech[agent, turn]

    def pay(task, before, now):
        return [len(now[0]), 1.0]

    turns = grow(Paid(2, pay, speakers=[[0, 1], [0]]), [2, 3], write=write)
    expected = {f"train/{name}": float(value) for name, value, _ in rows_of(METRICS)}
    assert magrpo.summarize("train", turns) == pytest.approx(expected)


def test_metrics_weigh_tasks_equally(grow):
    """Fails if a task counts for more with more joint actions, a part does where a branch goes on, or a turn in which
    nobody speaks ends the run."""

    def pay(task, before, now):
        done = now[0] == "0" and not before
        return Step(task, {"depth": len(before)}, done)

    env = Paid(2, pay, tasks=2)
    # two joint actions, or four; then silence
    env.observe = lambda task, history: [None, None] if history else [(), () if task else None]
    metrics = magrpo.summarize("eval", grow(env, [2, 3], "cross"))
    names = ["reward_turn1", "reward_turn2", "return", "depth"]
    assert [metrics[f"eval/{name}"] for name in names] == pytest.approx([0.5, 0.5, (0 + 1.5) / 2, 0.5])


def test_each_epoch_has_every_task_once_in_an_order_of_its_own(run, model_dir):
    """Fails if tasks repeat in an epoch or never come up, or their order depends on the epoch or the length."""
    sizes = "--env toy:Letters --num-agents 1 --num-tasks 2 --num-generations 2 --max-new-tokens 1 --eval-tasks 1"

    def order(*flags):
        lines = lines_of(run(MAGRPO, "--model", model_dir, *sizes.split(), *flags)["run_dir"])
        return [line["task_number"] for line in lines if line["split"] == "train"]

    long = order("--num-iterations", 12)
    epochs = {tuple(long[k : k + 6]) for k in range(0, 24, 6)}
    assert len(epochs) == 4
    assert {tuple(sorted(epoch)) for epoch in epochs} == {tuple(range(6))}
    assert order("--num-iterations", 3) == long[:6]
    assert order("--num-iterations", 3, "--seed", 2) != long[:6]


# ---- all rollouts of a game: credit.py's Game and its true gradient; a policy writes "b" with a chance of thirds

GAMMA = 0.9


class InTurn(Own):
    """Agent 0 speaks in the first turn, agent 1 in the second."""

    def observe(self, task, history):
        prompts = super().observe(task, history)
        return [prompt if i == len(history) else None for i, prompt in enumerate(prompts)]


@functools.cache
def chance_in_thirds(prompt, word):
    thirds = 1 + round(credit.draw_number(prompt))
    return (thirds if word == "b" else 3 - thirds) / 3


def write_by(draw, i, prompt, G):
    """What an agent writes with random numbers of range(3): draw[agent, whether it is the first turn].

    Nodes of the second turn share theirs, which changes no expectation: each enters the update by itself.
    """
    numbers = draw[i, "[]" in prompt]
    return [(["b" if number < 3 * credit.chance(prompt, "b") else "a"], [0.0]) for number in numbers]


@functools.cache
def cached_advantages(script, returns):
    return advantages_of(script, np.array(returns)).tolist()


@pytest.mark.parametrize("joint_mode", ["align", "cross"])
@pytest.mark.parametrize("env, G", [(Own(1), 2), (InTurn(2), 3)], ids=["together", "in turn"])
def test_the_expected_update_is_the_policy_gradient(env, G, joint_mode, grow, monkeypatch):
    """Fails if the update is biased: by a baseline, discount, branch that is done, partner or silent turn."""
    monkeypatch.setattr(credit, "chance", chance_in_thirds)
    env.tasks = [(0, {})]
    places = [(0, True), (1, False)] if isinstance(env, InTurn) else list(itertools.product([0, 1], [True, False]))
    draws = list(itertools.product(itertools.product(range(3), repeat=G), repeat=len(places)))
    gradients = {script: defaultdict(float) for script in CRITIC_FREE}  # of each: prompt -> number
    for numbers in draws:  # all equally likely
        write = functools.partial(write_by, dict(zip(places, numbers)))
        for node in itertools.chain(*grow(env, [G, G], joint_mode, GAMMA, write)):
            for group in node.groups.values():
                weight = group.weight / len(draws)
                scores = [credit.score(group.prompt, word) for word in group.completions]
                for script, gradient in gradients.items():
                    gradient[group.prompt] += weight * np.dot(cached_advantages(script, tuple(group.returns)), scores)
    true = credit.find_true_gradient(env, GAMMA)
    for script, gradient in gradients.items():
        scales = [gradient[prompt] / true[prompt] for prompt in true]
        if script.stem == "maremax":  # is biased on purpose
            assert abs(np.array(scales) - 1).max() > 0.1
        else:
            np.testing.assert_allclose(scales, (G - 1) / G if script.stem == "magrpo" else 1)
