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


def scales(env, branching, G=2, **change):
    """The mean gradient of nano.py, or a changed copy, as shares of the true one: prompt -> number."""
    source = credit.source_of(**change)
    mean = credit.moments(env, G, branching, source, gamma=GAMMA)[0]
    true = credit.true_gradient(env, GAMMA)
    return {prompt: mean[prompt] / true[prompt] for prompt in true}


class Leaving(credit.Game):
    """Agent 1 says nothing after a "b" of its own."""

    def observe(self, task, history):
        first, second = super().observe(task, history)
        return [first, None if history and history[-1][0][1] == "b" else second]


ENVS = [credit.Game(1), Leaving(3)]
CHANGES = [
    ({}, 1 / 2),
    ({"changes": credit.LEAVE_ONE_OUT}, 1),
    ({"patch": "nano_difference"}, 1 / 2),
]


@pytest.mark.parametrize("env", ENVS, ids=["ending", "leaving"])
@pytest.mark.parametrize("branching", ["tree", "trajectories"])
@pytest.mark.parametrize("change, scale", CHANGES, ids=str)
def test_all_turns_and_agents_have_one_scale(env, branching, change, scale):
    """Fails if a turn or agent weighs more where others have ended or are silent, or a baseline is no baseline."""
    found = scales(env, branching, **change)
    np.testing.assert_allclose(list(found.values()), scale)


def test_comparing_only_what_is_alive_shrinks_late_turns():
    """Fails if the enumeration cannot see a known bias: the share of trajectories alive becomes a factor."""
    alive = credit.chance("0 []", "a")
    for prompt, scale in scales(ENVS[0], "trajectories", changes=credit.ALIVE).items():
        np.testing.assert_allclose(scale, 1 / 2 if "[]" in prompt else alive / 2)


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
