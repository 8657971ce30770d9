"""Credit over turns and among agents: exact means by enumeration, and trajectories against the slow gradient."""

import sys

import numpy as np
import pytest
import torch
from conftest import CRITIC_FREE, ROOT, slow_logprobs
from test_gradient import MAX_NEW_TOKENS, TOY, advantages_of, updates  # noqa: F401
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(ROOT / "benchmarks"))
import credit

GAMMA = 0.5
FLAGS = f"--branching trajectories --gamma {GAMMA} --num-turns 3 --num-generations 4".split()


def scales(env, branching, G=2, patch=None, gamma=GAMMA):
    """The mean gradient of nano.py, or a patched copy, as shares of the true one: prompt -> number."""
    mean = credit.moments(env, G, branching, credit.source_of(patch), gamma=gamma)[0]
    true = credit.true_gradient(env, gamma)
    return {prompt: mean[prompt] / true[prompt] for prompt in true}


class Leaving(credit.Game):
    """Agent 1 says nothing after a "b" of its own."""

    def observe(self, task, history):
        first, second = super().observe(task, history)
        return [first, None if history and history[-1][0][1] == "b" else second]


ENVS = [credit.Game(1), Leaving(3)]


@pytest.mark.parametrize("env", ENVS, ids=["ending", "leaving"])
@pytest.mark.parametrize("branching", ["tree", "trajectories"])
@pytest.mark.parametrize("patch", [None, "nano_difference"])
def test_all_turns_and_agents_have_one_scale(env, branching, patch):
    """Fails if a turn or agent weighs more where others have ended or are silent, or a baseline is no baseline."""
    found = scales(env, branching, patch=patch)
    np.testing.assert_allclose(list(found.values()), 1 / 2)


def test_maxrl_learns_more_from_what_seldom_succeeds():
    """Fails if its scale is not the likelihood's to order G - 1 = 2, or one turn has another than the next."""
    env = credit.Passing(7)
    # less a baseline of 1, only failures have a gradient
    source = credit.source_of("nano_rae")
    alone = credit.outcomes(env, 1, "tree", source)
    failure = sum(p for p, gradient, _ in alone if any(gradient.values()))
    found = scales(env, "trajectories", G=3, patch="nano_maxrl", gamma=1.0)
    np.testing.assert_allclose(list(found.values()), 1 + failure)


def test_gigpo_compares_visits_of_a_state():
    """Fails if a state is not what the agent reads, or the visits weigh anything but their share of others."""
    found = scales(ENVS[0], "trajectories", patch="nano_gigpo")
    # in the first turn both trajectories; in the second, with the chance that the other begins with the same words too
    assert found["1 []"] == pytest.approx(1)
    meets = credit.chance("0 []", "a") * credit.chance("1 []", "b")
    assert found["1 [['a', 'b']]"] == pytest.approx(1 / 2 + meets / 2)


class Louder(credit.Game):
    """One part is a hundred times as large."""

    def parts(self, history, actions):
        parts = super().parts(history, actions)
        parts["together"] *= 100
        return parts


def test_gdpo_does_not_see_the_size_of_a_part():
    """Fails if parts are added up before they are normalised, or their sum is not whitened."""
    source = credit.source_of("nano_gdpo")
    mean, *_ = credit.moments(ENVS[0], 2, "tree", source)
    louder = Louder(1)
    assert credit.moments(louder, 2, "tree", source)[0] == pytest.approx(mean)
    louder.num_turns = 1
    # agent 0's "a" is worth more; advantages are 1 and -1, and two words' scores differ by 1
    outcomes = credit.outcomes(louder, 2, "tree", source)
    lowest = min(gradient["0 []"] for _, gradient, _ in outcomes)
    assert lowest == pytest.approx(-1 / 2)


def test_a_moving_mean_is_unbiased():
    """Fails if a baseline depends on the returns that it is subtracted from."""
    found = scales(ENVS[0], "tree", G=1, patch="nano_rae")
    np.testing.assert_allclose(list(found.values()), 1)


def path(node, j):
    """A trajectory: a node, the index of its joint action, and what follows."""
    return [(node, j), *path(node.children[j], 0)] if node else []


def slow_objective(script, model, trajectories, turn, i):
    """Of a turn of a task's trajectories: the mean of advantage * log-probability / max_new_tokens."""
    to_go = []
    for pairs in trajectories:
        # one that has ended stays with its last turn
        rest = pairs[turn:] or pairs[-1:]
        rewards = [np.broadcast_to(node.steps[j].reward, 2)[i] for node, j in rest]
        to_go.append(np.polyval(rewards[::-1], GAMMA))
    advantages = advantages_of(script, np.array(to_go))
    total = 0.0
    for pairs, advantage in zip(trajectories, advantages):
        for node, j in pairs[turn : turn + 1]:
            if i in node.groups:
                group = node.groups[i]
                total += advantage * slow_logprobs(model, group.prompt_ids, group.completion_ids[j]).sum()
    return total / len(trajectories) / MAX_NEW_TOKENS


@pytest.mark.parametrize("env", ["toy:Letters", "toy:Sequential", "toy:Selfish", "toy:SelfishInTurn"])
@pytest.mark.parametrize("script", [ROOT / "nano.py", *CRITIC_FREE], ids=lambda path: path.stem)
def test_gradient_of_trajectories_is_the_slow_one(script, env, run, updates, model_dir):  # noqa: F811
    """Fails if a trajectory is compared with others' turns or tasks, or not at all once it has ended."""
    run(script, *TOY, "--model", model_dir, *FLAGS, "--env", env)
    if script not in CRITIC_FREE:
        script = CRITIC_FREE[0]
    assert len(updates) == 2
    for i, update in enumerate(updates):
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64, attn_implementation="eager")
        trajectories = [path(root, j) for root in update.turns[0] for j in range(len(root.joint))]
        assert len(trajectories) == 8
        loss = 0.0
        for turn in range(3):
            for own in trajectories[:4], trajectories[4:]:
                loss -= GAMMA**turn * slow_objective(script, model, own, turn, i) / 2
        loss.backward()
        for ours, p in zip(update.gradients, model.parameters()):
            torch.testing.assert_close(ours.double(), p.grad, rtol=1e-3, atol=1e-6)
