"""Credit over turns and among agents: exact means by enumeration, and what trajectories are compared with.

And the variants of nano.py and magrpo.py in docs/lesson/.
"""

import sys
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import credit
import numpy as np
import pytest
import torch
from conftest import CRITIC_FREE, MAGRPO, NANO, ROOT, metrics_of
from test_gradient import TOY, advantages_of, slow_gradient
from torch.nn.utils import parameters_to_vector
from transformers import AutoModelForCausalLM

GAMMA = 0.5
TRAJECTORIES = f"--branching trajectories --gamma {GAMMA} --num-turns 3 --num-generations 4".split()


def scales(env, branching, name, G=2, gamma=GAMMA):
    """The mean gradient of nano.py, or of a variant, as shares of the true one: prompt -> number."""
    mean, *_ = credit.find_moments(env, G, branching, credit.load(name), gamma=gamma)
    true = credit.find_true_gradient(env, gamma)
    return {prompt: mean[prompt] / true[prompt] for prompt in true}


class Leaving(credit.Game):
    """Agent 1 says nothing after a "b" of its own."""

    def observe(self, task, history):
        first, second = super().observe(task, history)
        return [first, None if history and history[-1][0][1] == "b" else second]


@pytest.mark.parametrize("env", [credit.Game(1), Leaving(3)], ids=["ending", "leaving"])
@pytest.mark.parametrize("branching", ["tree", "trajectories"])
@pytest.mark.parametrize(
    "name, G, scale",
    [
        ("nano", 2, 1 / 2),
        ("nano_difference", 2, 1 / 2),
        ("nano_rae", 1, 1),
    ],
)
def test_all_turns_and_agents_have_one_scale(env, branching, name, G, scale):
    """Fails if a turn or agent weighs more where others have ended or are silent, or a baseline is no baseline.

    A moving mean is none if it holds the returns that it is subtracted from.
    """
    found = scales(env, branching, name, G)
    np.testing.assert_allclose(list(found.values()), scale)


def test_maxrl_learns_more_from_what_seldom_succeeds():
    """Fails if its scale is not the likelihood's to order G - 1 = 2, or one turn has another than the next."""
    env = credit.Passing(7)
    failure = 0.0
    for p, gradient, _ in credit.enumerate_outcomes(env, 1, "tree", credit.load("nano_rae")):
        # less a baseline of 1, only failures have a gradient
        if any(gradient.values()):
            failure += p
    found = scales(env, "trajectories", "nano_maxrl", G=3, gamma=1.0)
    np.testing.assert_allclose(list(found.values()), 1 + failure)


class Own(credit.Game):
    """Each agent has a reward of its own."""

    def reward(self, history, actions):
        past = [earlier for earlier, _ in history]
        return np.array([credit.draw_number(self.seed, past, actions, i) for i in range(2)])


class Alike(Own):
    """Both agents read the same."""

    def observe(self, task, history):
        return [str([actions for actions, _ in history])] * 2


def test_gigpo_compares_visits_of_a_state():
    """Fails if a state is not what the agent reads, or visits are another's, or weigh anything but their share."""
    found = scales(Alike(1), "trajectories", "nano_gigpo")
    # in the first turn both trajectories; in the second, with the chance that the other begins with the same words too
    assert found["[]"] == pytest.approx(1)
    meets = credit.chance("[]", "a") * credit.chance("[]", "b")
    assert found["[['a', 'b']]"] == pytest.approx(1 / 2 + meets / 2)


def test_at_grpo_learns_for_the_turn_alone_and_goes_on_with_the_best():
    """Fails if a turn is also paid for later ones, or not the best joint action goes on, or the next turn weighs less.

    In this game agent 0's better paid first word costs more later than it earns, and ("a", "a") is paid most.
    """
    found = scales(credit.Game(1), "tree", "nano_at_grpo", gamma=1.0)
    assert found["0 []"] < 0
    # 0.5 if it went on as often as it is played
    assert found["1 [['a', 'a']]"] > 0.5


@pytest.mark.parametrize(
    "name, expected",
    [
        ("nano_z", 1),
        ("nano_drmas", 3 / np.std([1, 3, 6])),
        ("nano_gdpo", 0.5**0.5),  # of 1, 2 and 2, whitened
    ],
)
def test_what_advantages_are_divided_by(name, expected):
    """Fails if not by the standard deviation of what is compared (z), of an agent's (Dr. MAS), or of both (GDPO).

    In a later turn of trajectories.
    """
    groups = []
    for policy, returns in ("learner", [1, 3]), ("learner", [0, 6]), ("learner", [0, 12]), ("idle", [5, 5]):
        returns = np.array(returns)
        if name == "nano_gdpo":
            # the reward, which is only logged, and two parts, of which the larger is equal for 1 and 3
            returns = np.stack([returns % 12, returns, returns // 6 * 100], 1)
        groups.append(SimpleNamespace(policy=policy, returns=returns[1:], peer_returns=returns))
    variant = credit.load(name)
    getattr(variant, "nano", variant).set_advantages(groups)
    assert [groups[k].advantages[0] for k in (1, 3)] == pytest.approx([expected, 0])


def path(node):
    """The nodes of a trajectory, from this one on."""
    return [node, *path(node.children[0])] if node.children else [node]


COMPARED = [
    *product([NANO, MAGRPO], ["toy:Letters", "toy:Sequential", "toy:SelfishInTurn"]),
    *product(CRITIC_FREE[1:], ["toy:Selfish"]),  # their advantages; the rest is equal
]


@pytest.mark.parametrize("script, env", COMPARED, ids=str)
def test_trajectories_of_a_task_are_compared(script, env, run, model_dir):
    """Fails if a trajectory is compared with others' turns or tasks, or not at all once it has ended."""
    names = run(script, *TOY, "--model", model_dir, *TRAJECTORIES, "--env", env)
    algorithm = script if script in CRITIC_FREE else MAGRPO
    for root, turn, i in product(names["turns"][0], range(3), range(2)):
        trajectories = [[root, *path(child)] for child in root.children]
        # one that has ended stays with its last return
        returns = [nodes[: turn + 2][-1].returns[i] for nodes in trajectories]
        expected = advantages_of(algorithm, np.array(returns))
        for nodes, advantage in zip(trajectories, expected):
            if turn + 1 < len(nodes) and i in nodes[turn].groups:
                group = nodes[turn].groups[i]
                g = nodes[turn + 1].choice[i]
                assert group.advantages[g] == pytest.approx(advantage)
                # of two tasks, each of four trajectories
                assert group.weight == pytest.approx(GAMMA**turn / 2 / 4)


@pytest.mark.parametrize("base", ["nano", "magrpo"])
def test_each_variant_of_the_lesson_runs_and_is_another(base, run, model_dir, tmp_path, monkeypatch):
    """Fails if a patch no longer applies or runs, or a script no longer calls what a variant replaces."""
    flags = [*TOY, "--model", model_dir, "--num-iterations", 2, *TRAJECTORIES]
    needed = {
        "nano_gdpo": ["--parts", "share"],
        "magrpo_seats": ["--share-policy"],
    }
    last = {}
    for name in [base, *{path.stem for path in ROOT.glob(f"docs/lesson/{base}_*")}]:
        monkeypatch.delitem(sys.modules, "nano", raising=False)
        script = credit.script_of(name, tmp_path)
        folder = tmp_path / name
        run(script, *flags, *needed.get(name, []), "--output-dir", folder)
        (run_dir,) = folder.iterdir()
        last[name] = str(metrics_of(run_dir)[-1])
    assert len(set(last.values())) == len(last) > 1, last


def test_the_cosine_is_that_of_two_seats(run, updates, model_dir, tmp_path):
    """Fails if a gradient is not that of the first or the last agent alone, or moves a weight."""
    script = credit.script_of("magrpo_seats", tmp_path)
    names = run(script, *TOY, "--model", model_dir, "--num-agents", 3, "--share-policy")
    (update,) = updates
    gradients = []
    for agent in 0, 2:
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
        gradient = slow_gradient(MAGRPO, model, replace(update, agents=[agent]))
        gradients.append(parameters_to_vector(gradient))
    cosine = torch.cosine_similarity(*gradients, dim=0).item()
    assert names["metrics"]["seats_cosine"] == pytest.approx(cosine, abs=1e-4)
