"""What a rollout is worth: returns, credit, weights, advantages and metrics by hand, and unbiasedness by enumeration.

All scripts share this code byte for byte, except their advantages (test_copies.py). Here one of them grows its trees
without a model: completions are the numbers that a test writes.
"""

import functools
import itertools
from collections import defaultdict

import numpy as np
import pytest
import torch
from conftest import CRITIC_FREE, lines_of
from test_gradient import advantages_of
from toy import Step, rows_of

import magrpo


class Paid:
    """Completion g of an agent is the text "g". What a joint action pays, and who speaks, is up to the test.

    pay(task number, earlier actions, actions) -> a reward or a Step; speakers: for each turn, by default all
    """

    def __init__(self, num_agents, pay, done=(), speakers=None, tasks=1):
        self.num_agents = num_agents
        self.pay = pay
        self.done = done
        self.speakers = speakers
        self.tasks = list(enumerate(range(tasks)))

    def observe(self, task, history):
        speaking = self.speakers[len(history)] if self.speakers else range(self.num_agents)
        before = tuple(tuple(step.actions) for step in history)
        return [before if i in speaking else None for i in range(self.num_agents)]

    def step(self, branches):
        steps = []
        for task, history, actions in branches:
            before = [step.actions for step in history]
            payment = self.pay(task, before, actions)
            if not isinstance(payment, Step):
                payment = Step(actions, payment, {}, done=actions[0] in self.done)
            steps.append(payment)
        return steps


def write_numbers(agent, before, G):
    """Token ids and log-probabilities of each completion."""
    return [([g], [-1.0]) for g in range(G)]


def complete(args, write, prompts, G):
    """Stands for the script's: a Group of what is written after each prompt; token 2 stops a completion."""
    groups = []
    for prompt in prompts:
        completion_ids, logprobs = zip(*write(prompt, G))
        completions = ["".join(map(str, ids)) for ids in completion_ids]
        stopped = [ids[-1] == 2 for ids in completion_ids]
        groups.append(magrpo.Group(prompt, [], completions, completion_ids, logprobs, stopped))
    return groups


@pytest.fixture
def grow(monkeypatch):
    """grow(env, generations, joint_mode, gamma, write) returns the nodes of each turn."""
    monkeypatch.setattr(magrpo, "complete", complete)

    def grow(env, generations, joint_mode="align", gamma=1.0, write=write_numbers):
        writers = [functools.partial(write, i) for i in range(env.num_agents)]
        return magrpo.rollout(magrpo.Args(gamma=gamma), env, writers, env.tasks, generations, joint_mode)

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


def test_two_turns_by_hand(grow):
    """Fails if a discount, a mean or the end of a branch is missed."""
    rewards = {(): [1, 2], ("0",): [10, 30]}  # what agent 0 wrote before -> what its two answers pay

    def pay(task, before, now):
        path = tuple(actions[0] for actions in before)
        return rewards[path][int(now[0])]

    (root,), (child,) = grow(Paid(2, pay, done=["1"]), [2, 2], gamma=0.5)
    assert len(grow(Paid(2, pay, done=["0", "1"]), [2, 2])) == 1
    assert returns_of(child) == {0: [10, 30], 1: [10, 30]}
    first = 1 + 0.5 * 20
    assert returns_of(root) == {0: [first, 2], 1: [first, 2]}
    assert root.value.tolist() == [(first + 2) / 2] * 2
    assert [root.weight, child.weight] == [1, 1 / 2]
    assert root.children == [child, None]


def test_only_those_who_speak_multiply(grow):
    """Fails if cross multiplies silent agents, or a silent agent has an action or a group."""

    def pay(task, before, now):
        numbers = [int(text) for text in now if text]
        return sum(numbers)

    env = Paid(3, pay, speakers=[[1], [0, 2]])
    (root,), children = grow(env, [3, 2], "cross")
    assert root.joint == [(0, 0, 0), (0, 1, 0), (0, 2, 0)]
    assert [step.actions for step in root.steps] == [["", "0", ""], ["", "1", ""], ["", "2", ""]]
    assert returns_of(root) == {1: [1.0, 2.0, 3.0]}  # with a later mean of 1
    for child in children:
        assert child.joint == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)]
        assert returns_of(child) == {0: [0.5, 1.5], 2: [0.5, 1.5]}
    _, (child, *_) = grow(env, [3, 2])
    assert [step.actions for step in child.steps] == [["0", "", "0"], ["1", "", "1"]]


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
    """Fails if a task counts for more with more joint actions."""

    def pay(task, before, now):
        done = now[0] == "0" and not before
        return Step(now, task, {"depth": len(before)}, done)

    env = Paid(2, pay, tasks=2)
    env.observe = lambda task, history: [(), () if task else None]  # two joint actions, or four
    metrics = magrpo.summarize("eval", grow(env, [2, 3], "cross"))
    assert metrics["eval/reward_turn1"] == metrics["eval/reward_turn2"] == pytest.approx(1 / 2)
    assert metrics["eval/return"] == pytest.approx((0 + 1.5) / 2)
    assert metrics["eval/depth"] == pytest.approx(1 / 2)  # where a branch ends


def test_each_epoch_has_every_task_once_in_an_order_of_its_own(run, model_dir):
    """Fails if tasks repeat in an epoch or never come up, or their order depends on the epoch or the length."""
    sizes = "--env toy:Letters --num-agents 1 --num-tasks 2 --num-generations 2 --max-new-tokens 1 --eval-tasks 1"

    def order(*flags):
        lines = lines_of(run(magrpo.__file__, "--model", model_dir, *sizes.split(), *flags)["run_dir"])
        return [line["task_number"] for line in lines if line["split"] == "train"]

    long = order("--num-iterations", 12)
    epochs = [tuple(long[k : k + 6]) for k in range(0, 24, 6)]
    assert len(set(epochs)) == 4
    for epoch in epochs:
        assert sorted(epoch) == list(range(6))
    assert order("--num-iterations", 3) == long[:6]
    assert order("--num-iterations", 3, "--seed", 2) != long[:6]


# A game of two turns: two agents with random rewards of their own, two arms. In each state (an agent and the history)
# an agent writes "0" if a random number of range(3) is below its threshold; logits_of is of the same distribution.
GAMMA = 0.9
LAST_WORD = ("1", "0")  # the joint action that ends a branch in the first turn


def generator_of(*key):
    return np.random.default_rng(list(repr(key).encode()))


@functools.cache
def reward_of(history, actions):
    return generator_of(history, actions).normal(size=2)


@functools.cache
def threshold_of(i, history):
    return int(generator_of(i, history).integers(1, 3))


@functools.cache
def logits_of(i, history):
    threshold = threshold_of(i, history)
    return torch.tensor([threshold, 3 - threshold]).double().log().requires_grad_()


def pay_both(task, before, now):
    actions = tuple(now)
    return Step(now, reward_of(tuple(map(tuple, before)), actions), {}, done=actions == LAST_WORD)


def write_by(draw, i, history, G):
    """What an agent writes with a draw of random numbers: a dict (turn, agent) -> G numbers.

    Nodes of the second turn share theirs, which changes no expectation: each enters the update by itself.
    """
    threshold = threshold_of(i, history)
    return [([int(number >= threshold)], [0.0]) for number in draw[len(history), i]]


def value_of(speakers, history=()):
    """The expected return of each agent from here on: the slow, obvious way."""
    total = torch.zeros(2, dtype=torch.float64)
    arms = [["0", "1"] if i in speakers[len(history)] else [""] for i in range(2)]
    for actions in itertools.product(*arms):
        value = torch.tensor(reward_of(history, actions))
        if not history and actions != LAST_WORD:
            value = value + GAMMA * value_of(speakers, (actions,))
        for i, arm in enumerate(actions):
            if arm:
                value = value * logits_of(i, history).softmax(-1)[int(arm)]
        total = total + value
    return total


@functools.cache
def cached_advantages(script, returns):
    return advantages_of(script, np.array(returns)).tolist()


@pytest.mark.parametrize("joint_mode", ["align", "cross"])
@pytest.mark.parametrize("speakers, G", [([[0, 1], [0, 1]], 2), ([[0], [1]], 3)])
def test_the_expected_update_is_the_policy_gradient(speakers, G, joint_mode, grow):
    """Fails if the update is biased: by a baseline, discount, branch that is done, partner or silent turn.

    All rollouts of a game are enumerated.
    """
    places = [(turn, i) for turn, who in enumerate(speakers) for i in who]
    draws = list(itertools.product(itertools.product(range(3), repeat=G), repeat=len(places)))
    expected = {script: defaultdict(float) for script in CRITIC_FREE}  # (agent, history, arm) -> its coefficient
    for numbers in draws:  # all equally likely
        write = functools.partial(write_by, dict(zip(places, numbers)))
        for node in itertools.chain(*grow(Paid(2, pay_both, speakers=speakers), [G, G], joint_mode, GAMMA, write)):
            weight = node.weight / len(draws) / G * GAMMA ** len(node.history)
            for i, group in node.groups.items():
                for script, coefficients in expected.items():
                    advantages = cached_advantages(script, tuple(group.returns))
                    for text, advantage in zip(group.completions, advantages):
                        coefficients[i, group.prompt, int(text)] += weight * advantage

    values = value_of(speakers)
    logits = {(i, history): logits_of(i, history) for i, history, _ in expected[CRITIC_FREE[0]]}
    gradients = []  # of each agent's own value
    for (i, _), own in logits.items():
        gradients += torch.autograd.grad(values[i], own, retain_graph=True)
        assert gradients[-1].abs().max() > 1e-3
    for script, coefficients in expected.items():
        objective = 0.0
        for (i, history, arm), coefficient in coefficients.items():
            objective += coefficient * logits[i, history].log_softmax(-1)[arm]
        updates = torch.autograd.grad(objective, list(logits.values()))
        factors = torch.stack(updates) / torch.stack(gradients)
        if script.stem == "maremax":  # is biased on purpose: no factor explains it
            assert not torch.allclose(factors, factors.mean())
        else:
            factor = (G - 1) / G if script.stem == "magrpo" else 1.0
            assert torch.allclose(factors, torch.full_like(factors, factor))
