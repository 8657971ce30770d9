"""What a rollout is worth: returns, credit, weights, advantages and metrics by hand, and unbiasedness by enumeration.

All scripts share this code byte for byte, but for their advantages (test_copies.py). Here one of them grows its trees
without a model: completions are the numbers that a test writes.
"""

import functools
import itertools
import math
from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import CRITIC_FREE, ROOT
from test_gradient import advantages_of
from toy import Letters, Step

import magrpo


class Paid:
    """Completion g of an agent is the text "g". What a joint action pays, and who speaks, is up to the test.

    pay(history, actions) -> a reward or Step; speakers: for each turn, who speaks, by default all
    """

    def __init__(self, num_agents, pay, done=(), speakers=None, tasks=1):
        self.num_agents, self.pay, self.done, self.speakers = num_agents, pay, done, speakers
        self.all_tasks = list(enumerate([{"number": k} for k in range(tasks)]))

    def observe(self, task, history):
        speaking = self.speakers[len(history)] if self.speakers else range(self.num_agents)
        before = tuple(tuple(step.actions) for step in history)
        return [before if i in speaking else None for i in range(self.num_agents)]

    def step(self, branches):
        steps = []
        for task, history, actions in branches:
            paid = self.pay(task["number"], [step.actions for step in history], actions)
            steps += [paid if isinstance(paid, Step) else Step(actions, paid, {}, actions[0] in self.done)]
        return steps


def write_numbers(agent, prompt, G):
    return [([g], [-1.0]) for g in range(G)]


@pytest.fixture
def grow(monkeypatch):
    """grow(env, generations, joint_mode, gamma, write): the nodes of each turn; write gives pairs as sample() does."""
    monkeypatch.setattr(magrpo, "encode", lambda agent, prompt, _: [prompt])
    monkeypatch.setattr(magrpo, "sample", lambda agent, prompts, G, *_: [agent.write(*ids, G) for ids in prompts])
    texts = lambda rows, skip_special_tokens: ["".join(map(str, ids)) for ids in rows]
    tokenizer = SimpleNamespace(batch_decode=texts, decode=str)
    common = {"tokenizer": tokenizer, "autocast": nullcontext(), "stop_ids": [2]}

    def grow(env, generations, joint_mode="align", gamma=1.0, write=write_numbers):
        agents = [SimpleNamespace(write=functools.partial(write, i), **common) for i in range(env.num_agents)]
        args = magrpo.Args(gamma=gamma, max_new_tokens=1)
        return magrpo.rollout(args, env, agents, env.all_tasks, generations, joint_mode, 1.0)

    return grow


def returns_of(node):
    return {i: group.returns.tolist() for i, group in node.groups.items()}


BY_HAND = {"magrpo": [-2.0, -1.0, 3.0], "marloo": [-3.0, -1.5, 4.5]}
BY_HAND |= {"maremax": [-5.0, -4.0, 0.0], "mareinforce": [1.0, 2.0, 6.0]}


@pytest.mark.parametrize("script", CRITIC_FREE, ids=lambda path: path.stem)
def test_advantages_by_hand(script):
    """A baseline of another algorithm."""
    assert advantages_of(script, np.array([1.0, 2.0, 6.0])).tolist() == BY_HAND[script.stem]


def test_two_turns_by_hand(grow):
    """Turn 1 pays 1, then (10, 30) in turn 2; or 2, and is done: a discount, a mean or an end that is missed."""
    pay = lambda _, before, now: {(): (1, 2), ("0",): (10, 30)}[tuple(actions[0] for actions in before)][int(now[0])]
    (root,), (child,) = grow(Paid(2, pay, done=["1"]), [2, 2], gamma=0.5)
    assert returns_of(root) == {0: [1 + 20 / 2, 2], 1: [1 + 20 / 2, 2]}
    assert returns_of(child) == {0: [10, 30], 1: [10, 30]}
    assert root.value.tolist() == [(11 + 2) / 2] * 2
    assert (root.weight, child.weight) == (1, 1 / 2)
    assert root.children == [child, None]
    assert child.path == [0] and child.history == [root.steps[0]]
    assert len(grow(Paid(1, lambda *_: 1.0, done=["0", "1"]), [2, 2])) == 1  # nothing is sampled after the ends


def test_three_turns_by_hand(grow):
    """They pay 1, 4 and 16: returns of children that are not yet known, or a discount of another turn."""
    turns = grow(Paid(1, lambda _, before, now: 4 ** len(before)), [2, 1, 1], gamma=0.5)
    middle = 4 + 0.5 * 16
    values = [[node.value.item() for node in nodes] for nodes in turns]
    assert values == [[1 + middle / 2], [middle] * 2, [16] * 2]
    assert [[node.path for node in nodes] for nodes in turns] == [[[]], [[0], [1]], [[0, 0], [1, 0]]]


def test_only_those_who_speak_multiply(grow):
    """cross with silent agents: G^N joint actions, a text of a silent agent, or a group for it."""
    env = Paid(3, lambda _, before, now: sum(int(text or 0) for text in now), speakers=[[1], [0, 2]])
    (root,), children = grow(env, [3, 2], "cross")
    assert root.joint == [(0, 0, 0), (0, 1, 0), (0, 2, 0)]
    assert [step.actions for step in root.steps] == [["", "0", ""], ["", "1", ""], ["", "2", ""]]
    both = [["0", "", "0"], ["0", "", "1"], ["1", "", "0"], ["1", "", "1"]]
    assert [[step.actions for step in node.steps] for node in children] == [both] * 3
    assert [list(node.groups) for node in (root, *children)] == [[1], *[[0, 2]] * 3]
    assert returns_of(root) == {1: [1.0, 2.0, 3.0]}  # a later mean of 1
    assert returns_of(children[2]) == {0: [0.5, 1.5], 2: [0.5, 1.5]}
    (root,), children = grow(env, [3, 2], "align")
    assert [step.actions for step in children[0].steps] == [["0", "", "0"], ["1", "", "1"]]


def test_each_agent_has_the_returns_of_its_own_rewards(grow):
    """A reward of another agent, or the sum, and a reward of a turn in which an agent is silent that is lost."""
    env = Paid(2, lambda _, before, now: [int(now[0]), 10.0 + len(before)])
    (root,), _ = grow(env, [2, 2], gamma=0.5)
    assert returns_of(root) == {0: [0.25, 1.25], 1: [15.5, 15.5]} and root.value.tolist() == [0.75, 15.5]
    env = Paid(2, lambda _, before, now: [1.0, int(now[1])] if before else 2.0, speakers=[[0], [1]])
    (root,), _ = grow(env, [2, 2])
    assert returns_of(root) == {0: [3, 3]} and root.value.tolist() == [3, 2.5]


def test_cross_has_the_counterfactual_baseline_of_coma(grow):
    """COMA subtracts, for each joint answer of the partners, its mean over the own: a sum, or a lost partner."""
    rewards = np.random.default_rng(0).normal(size=(3, 3, 3))
    ((node,),) = grow(Paid(3, lambda _, before, now: rewards[tuple(map(int, now))]), [3], "cross")
    for agent, group in node.groups.items():
        own_first = np.moveaxis(rewards, agent, 0)  # (G, of each partner G)
        mean_of_all, mean_of_others = own_first.mean(0), (own_first.sum(0) - own_first) / 2
        for script, baseline in ("magrpo", mean_of_all), ("marloo", mean_of_others):
            counterfactual = (own_first - baseline).mean((1, 2))
            ours = advantages_of(ROOT / f"{script}.py", group.returns)
            np.testing.assert_allclose(ours, counterfactual, atol=1e-12)


def test_messages_in_turn_are_credited_as_in_c3(grow):
    """C3: the mean of the leaves behind a message, less the mean of its siblings': a leaf of another context."""
    leaves = np.random.default_rng(0).normal(size=(3, 3, 3))  # the return behind three messages in turn
    pay = lambda _, before, now: leaves[tuple(int(max(said)) for said in [*before, now])] if len(before) == 2 else 0.0
    turns = grow(Paid(2, pay, speakers=[[0], [1], [0]]), [3, 3, 3], "align")
    assert [len(nodes) for nodes in turns] == [1, 3, 9]
    for node in itertools.chain(*turns):
        (group,) = node.groups.values()
        behind = [leaves[(*node.path, g)].mean() for g in range(3)]
        expected = [behind[g] - (sum(behind) - behind[g]) / 2 for g in range(3)]
        ours = advantages_of(ROOT / "marloo.py", group.returns)
        np.testing.assert_allclose(ours, expected, atol=1e-12)


def test_weights_are_the_chances_of_a_trajectory(grow):
    """Weights that are renormalised over those that go on, or do not sum to one."""
    env = Paid(2, lambda *_: 0.0, done=["0"], speakers=[[0, 1], [0], [0, 1]], tasks=3)
    turns = grow(env, [3, 2, 2], "cross")
    for nodes, chance in zip(turns, (1, 2 / 3, 1 / 3), strict=True):
        assert sum(node.weight for node in nodes) == pytest.approx(chance)
    ends = [node.weight * node.children.count(None) / len(node.joint) for nodes in turns for node in nodes]
    assert sum(ends) == pytest.approx(1)
    assert {node.task_number for node in turns[2]} == {0, 1, 2}


def test_metrics_of_agents_by_hand(grow):
    """Agents that are taken for each other, means over completions in place of tokens, a silent agent that counts."""
    said = {(0, 1): [([1], [-1.0]), ([3, 3, 2], [-2.0] * 3)], (1, 1): [([7, 7], [-0.5, -1.5])] * 2}
    said[0, 2] = [([5], [-4.0])] * 3
    env = Paid(2, lambda _, before, now: [len(now[0]), 1.0], speakers=[[0, 1], [0]])
    turns = grow(env, [2, 3], write=lambda agent, before, G: said[agent, len(before) + 1])
    expected = {"agent_0/entropy": (1 + 3 * 2 + 6 * 4) / (4 + 6), "agent_1/entropy": 1, "return": (3 + 2) / 2}
    expected |= {"agent_0/completion_length": (4 + 6) / (2 + 6), "agent_1/completion_length": 2, "reward_turn2": 1}
    expected |= {"agent_0/stopped": 1 / 8, "agent_1/stopped": 0, "agent_0/return": 3, "agent_1/return": 2}
    expected |= {"reward_turn1": 1.5, "zero_variance_groups": 3 / 4}
    assert magrpo.summarize("train", turns) == pytest.approx({f"train/{name}": x for name, x in expected.items()})


def test_metrics_weigh_tasks_equally(grow, monkeypatch):
    """Tasks that count for more: with more joint actions, or in a process with fewer tasks; parts of no ends."""
    pay = lambda task, before, now: Step(now, task, {"depth": len(before)}, now[0] == "0" and not before)
    env = Paid(2, pay, tasks=2)
    env.observe = lambda task, history: [(), () if task["number"] else None]
    other = list(magrpo.terms("eval", grow(Paid(2, lambda *_: 5.0, done=["0"]), [2, 3])))
    monkeypatch.setattr(magrpo, "gather", lambda mine: [mine, other])
    metrics = magrpo.summarize("eval", grow(env, [2, 3], "cross"))
    assert [metrics[f"eval/reward_turn{t}"] for t in (1, 2)] == pytest.approx([(0 + 1 + 5) / 3] * 2)
    assert [metrics["eval/return"], metrics["eval/depth"]] == pytest.approx([(0 + 1.5 + 7.5) / 3, 1 / 2])


def test_pass_at_k_is_the_mean_over_all_choices_of_k_trajectories(grow):
    """Seven trajectories a task: some pass at once and are done, some in turn two, some never."""

    def pay(task, before, now):
        passed = now == ["5"] if task == 0 else task == 1 and bool(before) and before[0][0] in "013"
        return Step(now, 0.0, {"all_passed": float(passed) if task < 3 else 0.5}, passed)

    outcomes = [[g == 5 for g in range(7)], [g in (0, 1, 3) for g in range(7)], [False] * 7, [False] * 7]
    turns = grow(Paid(1, pay, tasks=4), [7, 1])
    metrics = magrpo.summarize("eval", turns)
    assert {name for name in metrics if "pass@" in name} == {"eval/pass@1", "eval/pass@2", "eval/pass@4"}
    for k in 1, 2, 4:
        chances = [np.mean([any(chosen) for chosen in itertools.combinations(passed, k)]) for passed in outcomes]
        assert metrics[f"eval/pass@{k}"] == pytest.approx(np.mean(chances))
    del turns[0][3].ends[0].parts["all_passed"]  # then nothing is known of this task
    assert magrpo.summarize("eval", turns)["eval/pass@1"] == pytest.approx(metrics["eval/pass@1"] * 4 / 3)


class Told(Letters):
    """Letters that tells which tasks are rolled out."""

    seen = None

    def step(self, branches):
        Told.seen.append("".join(task["letter"] for task, _, _ in branches)[::2])  # of two completions each
        return super().step(branches)


def test_each_epoch_has_every_task_once_in_an_order_of_its_own(run, model_dir, monkeypatch):
    """Tasks that are drawn with repetition or never come up, one order of all epochs, one by the length."""
    sizes = "--num-agents 1 --num-tasks 4 --num-generations 2 --max-new-tokens 1 --eval-tasks 3"

    def seen(*flags):
        monkeypatch.setattr(Told, "seen", [])
        run(magrpo.__file__, "--env", "test_tree:Told", "--model", model_dir, *sizes.split(), *flags)
        return Told.seen[1:-1]  # between the evaluations

    long = seen("--num-iterations", 6)
    epochs = ["".join(long)[k : k + 6] for k in range(0, 24, 6)]
    assert {"".join(sorted(epoch)) for epoch in epochs} == {"abcdef"}
    assert len(long) == 6 and len(set(epochs)) == 4
    assert seen("--num-iterations", 2) == long[:2]
    assert seen("--num-iterations", 2, "--seed", 2) != long[:2]


@pytest.mark.parametrize("joint_mode", ["align", "cross"])
@pytest.mark.parametrize("speakers, G", [(((0, 1), (0, 1)), 2), (((0,), (1,)), 3)], ids=["both", "in turn"])
def test_the_expected_update_is_the_policy_gradient(speakers, G, joint_mode, grow):
    """A bias: of the baseline, of the discount, of branches that are done, of partners or of silent turns.

    Two turns, two agents with rewards of their own, two arms. In each state an agent writes "0" if a random number of
    range(3) is below its threshold. All rollouts are enumerated with their chances. Nodes of the second turn share
    their random numbers, which changes no expectation, for each enters the update by itself; in the first turn 0 and 2
    stand for all that is below a threshold or not.
    """
    gamma, done, generator = 0.9, ("1", "0"), np.random.default_rng(1)
    joint = [list(itertools.product(*("01" if i in who else [""] for i in range(2)))) for who in speakers]
    histories = [(), *((first,) for first in joint[0] if first != done)]
    states = [(i, history) for history in histories for i in speakers[len(history)]]
    threshold = {state: int(generator.integers(1, 3)) for state in states}
    logits = {state: torch.tensor([k, 3.0 - k]).double().log().requires_grad_() for state, k in threshold.items()}
    table = {(h, actions): generator.normal(size=2) for h in histories for actions in joint[len(h)]}

    def value(history):
        """The expected return of each agent: the slow, obvious way."""
        total = torch.zeros(2, dtype=torch.float64)
        for actions in joint[len(history)]:
            chance = math.prod(logits[i, history].softmax(-1)[int(arm)] for i, arm in enumerate(actions) if arm)
            later = 0 if history or actions == done else gamma * value((actions,))
            total = total + chance * (torch.tensor(table[history, actions]) + later)
        return total

    pay = lambda _, before, now: Step(now, table[tuple(map(tuple, before)), tuple(now)], {}, tuple(now) == done)
    env, expected = Paid(2, pay, speakers=speakers), {path.stem: defaultdict(float) for path in CRITIC_FREE}
    speeches = [(t, i) for t, who in enumerate(speakers) for i in who]
    draws = [itertools.product(range(3) if t else (0, 2), repeat=G) for t, _ in speeches]
    advantages = functools.cache(lambda path, returns: advantages_of(path, np.array(returns)).tolist())
    for drawn in itertools.product(*draws):
        number = dict(zip(speeches, drawn))
        chance = 1 / 3 ** (G * len(speakers[1]))
        for i in speakers[0]:
            chance *= math.prod((3 - threshold[i, ()] if k else threshold[i, ()]) / 3 for k in number[0, i])
        write = lambda i, h, G, number=number: [([int(k >= threshold[i, h])], [0.0]) for k in number[len(h), i]]
        for node in itertools.chain(*grow(env, [G, G], joint_mode, gamma, write)):
            for (i, group), path in itertools.product(node.groups.items(), CRITIC_FREE):
                weight = chance * node.weight / G * gamma ** len(node.history)
                for text, advantage in zip(group.completions, advantages(path, tuple(group.returns))):
                    expected[path.stem][i, group.prompt, int(text)] += weight * advantage
    values, leaves = value(()), [logits[state] for state in states]
    own = [torch.autograd.grad(values[i], logits[i, h], retain_graph=True)[0] for i, h in states]
    assert all(gradient.abs().max() > 1e-3 for gradient in own)
    for script, coefficients in expected.items():
        surrogate = sum(c * logits[i, h].log_softmax(-1)[arm] for (i, h, arm), c in coefficients.items())
        updates = torch.stack(torch.autograd.grad(surrogate, leaves))
        factors = updates / torch.stack(own)
        if script == "maremax":  # is biased on purpose: no factor explains it
            assert not torch.allclose(factors, factors.mean())
        else:
            assert torch.allclose(factors, torch.tensor((G - 1) / G if script == "magrpo" else 1.0).double())
