"""ippo.py: its estimates and its update against the slow, obvious ones.

The reference knows nothing of rows, batches, caches or masks: it takes one completion at a time after its prompt, in
float64, and computes old log-probabilities and values again, with the weights that the rollout had.
"""

from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, load_policy, metrics_of, save_model, slow_distributions
from toy import rows_of
from transformers import AutoModelForCausalLM, MistralForCausalLM

import ippo

SCRIPT = ROOT / "ippo.py"
TOY = """
--env toy:Letters --num-iterations 1 --num-generations 3 --num-tasks 2 --max-new-tokens 24 --eval-tasks 1
--max-grad-norm 1e9 --no-anneal-lr --update-epochs 1 --num-minibatches 1
"""
TOY = TOY.split()
LARGE_STEPS = "--update-epochs 2 --num-minibatches 2 --learning-rate 0.003 --critic-learning-rate 0.1"


# gamma and lambda | rewards of the turns | values of their tokens | the advantages of these
GAE_BY_HAND = """
1.0 1.0 | 1 10           | 3 4, 5       | 8 7, 5
0.5 0.0 | 1 10           | 3 4, 5       | 1 -0.5, 5
0.5 1.0 | 1 10           | 3 4, 5       | 3 2, 5
0.5 0.5 | 1 10           | 3 4, 5       | 1.375 0.75, 5
0.5 0.0 | 100 1 8 16 32  | , 3, , , 5   | , 6.625, , , 27
0.5 0.5 | 1 8 16 32      | 3, , 5,      | 6.625, , 27,
"""


def advantages_of(gamma, gae_lambda, rewards, values):
    """The script's advantages of the tokens of a trajectory of one agent, a list for each turn as the values are."""
    turns = range(len(rewards) + 1)
    nodes = [ippo.Node([0], {}, 1.0, choice=(0,), returns=[0.0], history=[None] * turn) for turn in turns]
    for turn, reward in enumerate(rewards):
        if values[turn]:
            nodes[turn].groups[0] = ippo.Group(None, "", (), 1.0, [()], [[]])
        nodes[turn].children.append(nodes[turn + 1])
        nodes[turn + 1].reward = reward
    (path,) = ippo.trajectory_of(SimpleNamespace(gamma=gamma), *nodes[:2], defaultdict(tuple))
    for experience in path:
        experience.old_values = torch.tensor(values[experience.turn])
    ippo.gae(path, gae_lambda)
    advantages = [[] for _ in rewards]
    for experience in path:
        advantages[experience.turn] = experience.advantages.tolist()
    return advantages


@pytest.mark.parametrize("options, rewards, values, advantages", rows_of(GAE_BY_HAND))
def test_gae_by_hand(options, rewards, values, advantages):
    """Fails if a discount or a reward is at the wrong token, or a silent turn's is not that of the turn before."""

    def turns(cell):
        return [list(map(float, turn.split())) for turn in cell.split(",")]

    (rewards,) = turns(rewards)
    (options,) = turns(options)
    assert advantages_of(*options, rewards, turns(values)) == turns(advantages)


@pytest.fixture
def updates(updates, monkeypatch):
    """Every optimizer step of a run. Value heads start random, to have values to test."""

    def random(tensor):
        tensor.data.normal_(std=0.3, generator=torch.Generator().manual_seed(0))

    monkeypatch.setattr(torch.nn.init, "zeros_", random)
    return updates


@dataclass
class Speech:
    """What an agent writes in a turn of a trajectory, and what it was worth to the policy that sampled it."""

    turn: int
    prompt_ids: list
    ids: list
    logprobs: torch.Tensor | None = None  # (C,)
    values: torch.Tensor | None = None  # (C,)
    advantages: torch.Tensor | None = None  # (C,)


class Slow:
    """Actor, value head and critic in float64."""

    def __init__(self, weights, path):
        self.actor = self.critic = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        num_turns = len(weights["critic.head.bias"])
        self.head = torch.nn.Linear(self.actor.config.hidden_size, num_turns, dtype=torch.float64)
        parts = {"": self.actor, "critic.head.": self.head}
        if "critic.model.lm_head.weight" in weights:
            self.critic = parts["critic.model."] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        self.trained = {}
        for prefix, part in parts.items():
            self.trained |= {prefix + name: p for name, p in part.named_parameters()}
        assert self.trained.keys() == weights.keys()
        for name, p in self.trained.items():
            p.data.copy_(weights[name])
            p.grad = torch.zeros_like(p)

    def read(self, speech, temperature):
        """Log-probabilities, entropies and values of a completion: (C,) each."""
        logprobs = slow_distributions(self.actor, speech.prompt_ids, speech.ids, temperature)  # (C, V)
        chosen = logprobs[range(len(speech.ids)), list(speech.ids)]
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        ids = torch.tensor([[*speech.prompt_ids, *speech.ids]])
        states = self.critic.base_model(ids).last_hidden_state[0, len(speech.prompt_ids) - 1 : -1]
        return chosen, entropies, self.head(states)[:, speech.turn]


def speeches_of(update, slow, agent, node, j):
    """An agent's speeches in the trajectory that starts with the j-th joint action of a root."""
    args = update.names["args"]
    speeches, rewards, values = [], [], []
    while node.children:
        rewards.append(np.broadcast_to(node.children[j].step.reward, args.num_agents)[agent])
        values.append([])
        if agent in node.groups:
            group = node.groups[agent]
            speech = Speech(len(rewards) - 1, group.prompt_ids, group.completion_ids[j])
            speech.logprobs, _, speech.values = slow.read(speech, args.temperature)
            speeches.append(speech)
            values[-1] = speech.values.tolist()
        node, j = node.children[j], 0
    advantages = advantages_of(args.gamma, args.gae_lambda, rewards, values)  # by hand above
    for speech in speeches:
        speech.advantages = torch.tensor(advantages[speech.turn], dtype=torch.float64)
    return speeches


@torch.no_grad()
def memory_of(update, slow):
    """The speeches of all of the policy's agents in each trajectory of a rollout."""
    memory = []
    for root in update.names["turns"][0]:
        for j in range(len(root.children)):
            memory.append([])
            for agent in update.agents:
                memory[-1] += speeches_of(update, slow, agent, root, j)
    return memory


def slow_losses(slow, speeches, weight, args):
    """What is logged of a minibatch."""
    sums = dict.fromkeys(["policy_loss", "value_loss", "approx_kl", "clipfrac"], 0.0)
    entropy = 0.0
    low, high = 1 - args.clip_coef, 1 + args.clip_coef
    tokens = sum(len(speech.ids) for speech in speeches)
    for speech in speeches:
        logprobs, entropies, values = slow.read(speech, args.temperature)
        ratios = (logprobs - speech.logprobs).exp()
        objective = torch.min(ratios * speech.advantages, ratios.clamp(low, high) * speech.advantages)
        targets = speech.advantages + speech.values
        errors = (values - targets) ** 2
        if args.clip_vloss:
            near = values.clamp(speech.values - args.clip_coef, speech.values + args.clip_coef)
            errors = torch.maximum(errors, (near - targets) ** 2)
        sums["policy_loss"] += -weight * args.gamma**speech.turn * objective.sum()
        sums["value_loss"] += weight * 0.5 * errors.sum()
        sums["approx_kl"] += (ratios - 1 - ratios.log()).sum() / tokens
        sums["clipfrac"] += ((ratios - 1).abs() > args.clip_coef).sum() / tokens
        entropy += weight * entropies.sum()
    loss = sums["policy_loss"] + args.vf_coef * sums["value_loss"] - args.ent_coef * entropy
    return sums | {"loss": loss}


def check(updates, names, path):
    """Compares all gradients and the last iteration's metrics; returns what is to be logged of each policy's steps."""
    args = names["args"]
    memories = {}
    logged = defaultdict(list)
    for update in updates:
        slow = Slow(update.weights, path)
        rollout = update.names["iteration"], update.agents[0]
        if rollout not in memories:  # before its first step, with the weights that sampled it
            memories[rollout] = memory_of(update, slow)
        minibatch = update.names["minibatch"].tolist()
        speeches = []
        for m in minibatch:
            speeches += memories[rollout][m]
        losses = slow_losses(slow, speeches, 1 / len(minibatch) / args.max_new_tokens, args)
        losses["loss"].backward()
        expected = {name: p.grad for name, p in slow.trained.items()}
        scale = max(gradient.abs().max().item() for gradient in expected.values())
        assert scale > 1e-3
        for name, gradient in update.gradients.items():
            torch.testing.assert_close(gradient.double(), expected[name], rtol=2e-3, atol=2e-5 * scale)
        losses["grad_norm"] = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
        logged[rollout].append({name: value.item() for name, value in losses.items()})

    for (iteration, agent), steps in logged.items():
        if iteration < args.num_iterations:
            continue
        for name in steps[0]:
            mean = np.mean([step[name] for step in steps])
            assert names["metrics"][f"agent_{agent}/{name}"] == pytest.approx(mean, rel=1e-3, abs=1e-5), name
    return logged


@pytest.mark.parametrize(
    "flags",
    [
        "--num-turns 2 --gamma 0.5 --gae-lambda 0.9 --ent-coef 0.1 --temperature 0.7",
        "--num-turns 2 --use-separate-critic --vf-coef 2.0",
        "--num-iterations 2 --use-separate-critic --critic-learning-rate 0.01 --num-agents 1",
        "--num-turns 2 --share-policy --batch-size 1 --num-minibatches 4",
        "--env toy:Sequential --num-turns 4 --num-agents 3 --gamma 0.5 --gae-lambda 0.9",
        "--env toy:SelfishInTurn --num-turns 4 --num-agents 3 --share-policy --gamma 0.5 --gae-lambda 0.9",
        "--num-turns 2 --model windows",
        f"{LARGE_STEPS} --num-turns 2 --gae-lambda 0.9",
        f"{LARGE_STEPS} --num-turns 2 --no-clip-vloss --clip-coef 0.1 --ent-coef 0.1",
        f"{LARGE_STEPS} --use-separate-critic --temperature 0.7 --batch-size 2",
        f"{LARGE_STEPS} --env toy:SelfishInTurn --num-turns 3 --share-policy --gamma 0.5",
    ],
)
def test_steps_are_the_slow_ones(flags, run, updates, model_dir, tmp_path):
    """Fails if an advantage, value, turn, discount, reward, agent, slice or weight is wrong, or what is clipped.

    Or if a pass leaves trajectories out or takes them twice, or all passes are alike. Windows forget the prompt.
    """
    path = model_dir
    if "windows" in flags:
        path = save_model(tmp_path / "windows", model_class=MistralForCausalLM, sliding_window=9)
    names = run(SCRIPT, *TOY, "--model", model_dir, *flags.split())
    check(updates, names, path)
    args = names["args"]
    steps = args.update_epochs * args.num_minibatches
    assert len(updates) == args.num_iterations * len(names["learners"]) * steps
    passes = np.concatenate([update.names["minibatch"] for update in updates[:steps]])
    passes = passes.reshape(args.update_epochs, -1)
    assert (np.sort(passes) == np.arange(6)).all()
    assert len(np.unique(passes, axis=0)) == args.update_epochs
    assert (names["metrics"]["agent_0/clipfrac"] > 0.05) == (args.update_epochs > 1)


def test_target_kl_ends_all_passes(run, updates, model_dir):
    """Fails if steps follow the one with too large a divergence, in this pass or the next."""
    flags = "--update-epochs 6 --num-minibatches 2 --learning-rate 0.0001 --num-agents 1 --target-kl 0.01"
    names = run(SCRIPT, *TOY, "--model", model_dir, *flags.split())
    steps = check(updates, names, model_dir)[1, 0]
    *earlier, last = [step["approx_kl"] for step in steps]
    assert max(earlier) <= 0.01 < last
    assert 2 < len(earlier) < 10  # more than one pass, and a whole pass was left


def test_values_are_float32(model_dir):
    """Fails if values are bfloat16 as the model on CUDA, where 0.7 is 0.6992, and values are clipped around such."""
    critic = ippo.add_critic(ippo.Args(critic_learning_rate=1.0), load_policy(ippo, model_dir), separate=False)
    critic.head.bias.data.fill_(0.7)
    with torch.autocast("cpu", torch.bfloat16):
        assert critic.head(torch.zeros(1, 32)).item() == pytest.approx(0.7, rel=1e-6)


def test_values_start_at_the_first_rewards(run, model_dir):
    """Fails if values start at 0 or at the return of another turn, or each iteration sets them again."""
    flags = "--num-iterations 2 --num-turns 2 --learning-rate 0.01 --critic-learning-rate 1e-30"
    names = run(SCRIPT, *TOY, "--model", model_dir, *flags.split())
    first = metrics_of(names["run_dir"])[1]
    second_turn = first["train/reward_turn2"]
    both_turns = first["train/return"]
    assert both_turns - second_turn > 0.1
    for critic in names["critics"]:
        assert critic.head.bias.tolist() == pytest.approx([both_turns, second_turn])


@pytest.mark.parametrize("returns, expected", [([1.0, 2.0, 6.0], 1 - 2 / (14 / 3)), ([2.0, 2.0, 2.0], None)])
def test_explained_variance_by_hand(returns, expected):
    """Fails if it is a share of standard deviations, is of means, or is a number where all returns are equal."""
    errors = torch.tensor([2.0, 2.0, -1.0])  # whose variance is 2
    returns = torch.tensor(returns)
    parts = [SimpleNamespace(returns=returns[k], advantages=errors[k]) for k in (slice(2), slice(2, 3))]
    assert ippo.explained_variance(0, parts).get("agent_0/explained_variance") == pytest.approx(expected)
