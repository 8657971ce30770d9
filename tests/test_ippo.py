"""ippo.py: its estimates and its update against the slow, obvious ones.

The reference knows nothing of rows, batches, caches or masks: it takes one completion at a time after its prompt, in
float64, and computes old log-probabilities and values again, with the weights that the rollout had.
"""

import math
import runpy
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, load_policy, metrics_of, save_model, trained_by
from transformers import AutoModelForCausalLM, MistralForCausalLM

SCRIPT = ROOT / "ippo.py"
TOY = "--env toy:Letters --num-iterations 1 --num-generations 3 --num-tasks 2 --max-new-tokens 24 --eval-tasks 1"
TOY = f"{TOY} --max-grad-norm 1e9 --no-anneal-lr --update-epochs 1 --num-minibatches 1".split()
LARGE_STEPS = "--update-epochs 2 --num-minibatches 2 --learning-rate 0.003 --critic-learning-rate 0.1"


@pytest.fixture(scope="module")
def script():
    """The functions of the script."""
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def slow_gae(rewards, values, gamma, gae_lambda):
    """A_t = sum over l >= t of (product over t..l-1 of gamma_k lambda) delta_l, as a double sum over all tokens.

    From a token of turn a to the next one, of turn b, the rewards of turns a..b-1 arrive, and gamma applies b-a times.
    """
    turns = [turn for turn, row in enumerate(values) for _ in row]  # of each token
    turns.append(len(rewards))
    following = [*chain(*values), 0.0]
    deltas, discounts = [], []
    for t in range(len(turns) - 1):
        a, b = turns[t], turns[t + 1]
        discount = gamma ** (b - a)
        reward = sum(gamma ** (turn - a) * rewards[turn] for turn in range(a, b))
        deltas.append(reward + discount * following[t + 1] - following[t])
        discounts.append(discount)

    advantages = [[] for _ in values]
    for t, turn in enumerate(turns[:-1]):
        advantage = 0.0
        for k in range(t, len(deltas)):
            weight = math.prod(discount * gae_lambda for discount in discounts[t:k])
            advantage += weight * deltas[k]
        advantages[turn].append(advantage)
    return advantages


GAE_BY_HAND = [  # gamma, lambda, and the advantages of two tokens of the first turn and one of the second
    (1.0, 1.0, [[11 - 3, 11 - 4], [10 - 5]]),  # the return minus the value
    (0.5, 0.0, [[4 - 3, 1 + 0.5 * 5 - 4], [10 - 5]]),  # one-step errors
    (0.5, 1.0, [[1 + 0.5 * 10 - 3, 1 + 0.5 * 10 - 4], [10 - 5]]),
]


@pytest.mark.parametrize("gamma, gae_lambda, expected", GAE_BY_HAND)
def test_gae_by_hand(gamma, gae_lambda, expected, script):
    """Fails if a discount or a reward is at the wrong token."""
    rewards, values = [1.0, 10.0], [[3.0, 4.0], [5.0]]
    assert script.gae(rewards, values, gamma, gae_lambda) == expected


def test_gae_of_silent_turns_by_hand(script):
    """Fails if a turn without tokens does not hand its reward back to the turn before."""
    rewards, values = [100.0, 1.0, 8.0, 16.0, 32.0, 64.0], [[], [3.0], [], [], [5.0], []]
    first = 1 + 8 / 2 + 16 / 4 + 5 / 8 - 3
    last = 32 + 64 / 2 - 5
    assert script.gae(rewards, values, 0.5, 0.0) == [[], [first], [], [], [last], []]  # 100 is nobody's


@dataclass
class Update:
    """What led to an optimizer step."""

    policy: tuple  # iteration, first agent
    agents: list  # those that the policy plays
    turns: list  # the rollout: the nodes of each turn
    minibatch: list  # numbers of trajectories
    weights: dict  # name -> tensor
    gradients: dict  # name -> tensor
    learning_rates: list  # of the actor and of the critic


@pytest.fixture
def updates(monkeypatch):
    """Every optimizer step of a run, which is taken. Value heads start random, to have values to test."""
    updates, original = [], torch.optim.AdamW.step

    def random(tensor):
        tensor.data.normal_(std=0.3, generator=torch.Generator().manual_seed(0))

    def step(optimizer, closure=None):
        names, policy, agents = trained_by(optimizer)
        weights = {name: p.detach().clone() for name, p in policy.trained.items()}
        gradients = {name: p.grad.clone() for name, p in policy.trained.items()}
        rates = [group["lr"] for group in optimizer.param_groups]
        key, minibatch = (names["iteration"], agents[0]), names["minibatch"].tolist()
        updates.append(Update(key, agents, names["turns"], minibatch, weights, gradients, rates))
        return original(optimizer, closure)

    monkeypatch.setattr(torch.nn.init, "zeros_", random)
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
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
        num_turns = len(weights["critic.0.bias"])
        self.head = torch.nn.Linear(self.actor.config.hidden_size, num_turns, dtype=torch.float64)
        parts = {"": self.actor, "critic.0.": self.head}
        if any(name.startswith("critic.1.") for name in weights):
            self.critic = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
            parts["critic.1."] = self.critic
        self.trained = {}
        for prefix, part in parts.items():
            self.trained |= {prefix + name: p for name, p in part.named_parameters()}
        assert self.trained.keys() == weights.keys()
        for name, p in self.trained.items():
            p.data.copy_(weights[name])

    def read(self, speech, temperature):
        """Log-probabilities, entropies and values of a completion: (C,) each."""
        ids = torch.tensor([[*speech.prompt_ids, *speech.ids]])
        before = slice(len(speech.prompt_ids) - 1, -1)  # the states before each token
        logprobs = (self.actor(ids).logits[0, before] / temperature).log_softmax(-1)  # (C, V)
        chosen = logprobs[range(len(speech.ids)), list(speech.ids)]
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        states = self.critic.base_model(ids).last_hidden_state[0, before]
        return chosen, entropies, self.head(states)[:, speech.turn]


def speeches_of(node, j, agent, slow, args):
    """An agent's speeches in the trajectory that starts with the j-th joint action of a root."""
    speeches, rewards, values = [], [], []
    while node:
        reward = node.steps[j].reward
        rewards.append(reward[agent] if isinstance(reward, list) else reward)
        values.append([])
        if agent in node.groups:
            group = node.groups[agent]
            speech = Speech(len(rewards) - 1, group.prompt_ids, group.completion_ids[j])
            speech.logprobs, _, speech.values = slow.read(speech, args.temperature)
            speeches.append(speech)
            values[-1] = speech.values.tolist()
        node, j = node.children[j], 0
    advantages = slow_gae(rewards, values, args.gamma, args.gae_lambda)
    for speech in speeches:
        speech.advantages = torch.tensor(advantages[speech.turn], dtype=torch.float64)
    return speeches


@torch.no_grad()
def memories_of(update, path, args):
    """Agent -> its speeches in each trajectory of a rollout."""
    slow = Slow(update.weights, path)
    memories = {agent: [] for agent in update.agents}
    for agent, memory in memories.items():
        for root in update.turns[0]:
            for j in range(args.num_generations):
                memory.append(speeches_of(root, j, agent, slow, args))
    return memories


def slow_losses(slow, speeches, weight, args):
    """What is logged of a minibatch."""
    sums = dict.fromkeys(["policy_loss", "value_loss", "approx_kl", "clipfrac"], 0.0)
    entropy = 0.0
    clip = args.clip_coef
    tokens = sum(len(speech.ids) for speech in speeches)
    for speech in speeches:
        logprobs, entropies, values = slow.read(speech, args.temperature)
        ratios = (logprobs - speech.logprobs).exp()
        # PPO's objective case by case: no gradient where the ratio already went too far in its advantage's favour
        advantages = speech.advantages
        too_far = torch.where(advantages > 0, ratios > 1 + clip, ratios < 1 - clip)
        ratios_left = torch.where(too_far, 1 + clip * advantages.sign(), ratios)
        targets = advantages + speech.values
        errors = (values - targets) ** 2
        if args.clip_vloss:
            change = values - speech.values
            near = torch.where(change.abs() > clip, speech.values + clip * change.sign(), values)
            errors = torch.maximum(errors, (near - targets) ** 2)
        sums["policy_loss"] += -weight * args.gamma**speech.turn * (ratios_left * advantages).sum()
        sums["value_loss"] += weight * 0.5 * errors.sum()
        sums["approx_kl"] += (ratios - 1 - ratios.log()).sum() / tokens
        sums["clipfrac"] += ((ratios - 1).abs() > clip).sum() / tokens
        entropy += weight * entropies.sum()
    loss = sums["policy_loss"] + args.vf_coef * sums["value_loss"] - args.ent_coef * entropy
    return sums | {"loss": loss}


def check(updates, names, path):
    """Compares all gradients and the last iteration's metrics; returns what is to be logged of each policy's steps."""
    args = names["args"]
    memories, logged = {}, defaultdict(list)
    for update in updates:
        if update.policy not in memories:
            memories[update.policy] = memories_of(update, path, args)
        speeches = []
        for memory in memories[update.policy].values():
            for m in update.minibatch:
                speeches += memory[m]
        slow = Slow(update.weights, path)
        losses = slow_losses(slow, speeches, 1 / len(update.minibatch) / args.max_new_tokens, args)
        if speeches:
            losses["loss"].backward()
        expected = {}
        for name, p in slow.trained.items():
            expected[name] = torch.zeros_like(p) if p.grad is None else p.grad
        scale = max(gradient.abs().max().item() for gradient in expected.values())
        assert scale > 1e-3 or not speeches
        for name, gradient in update.gradients.items():
            torch.testing.assert_close(gradient.double(), expected[name], rtol=2e-3, atol=2e-5 * scale)
        losses["grad_norm"] = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
        logged[update.policy].append({name: float(value) for name, value in losses.items()})

    metrics = names["metrics"]
    for (iteration, agent), steps in logged.items():
        if iteration == args.num_iterations:
            for name in steps[0]:
                mean = sum(step[name] for step in steps) / len(steps)
                assert metrics[f"agent_{agent}/{name}"] == pytest.approx(mean, rel=1e-3, abs=1e-5), name
    return logged


@pytest.mark.parametrize(
    "flags",
    [
        "--num-turns 2 --gamma 0.5 --gae-lambda 0.9 --ent-coef 0.1 --temperature 0.7",
        "--num-turns 2 --use-separate-critic --vf-coef 2.0",
        "--num-iterations 2 --use-separate-critic --critic-learning-rate 0.01 --num-agents 1",
        "--num-turns 2 --share-policy --max-batch-tokens 1",
        "--env toy:Sequential --num-turns 4 --num-agents 3 --gamma 0.5 --gae-lambda 0.9",
        "--env toy:SelfishInTurn --num-turns 3 --share-policy --gamma 0.5 --gae-lambda 0.9",
        f"{LARGE_STEPS} --num-turns 2 --gae-lambda 0.9",
        f"{LARGE_STEPS} --num-turns 2 --no-clip-vloss --clip-coef 0.1 --ent-coef 0.1",
        f"{LARGE_STEPS} --use-separate-critic --temperature 0.7 --max-batch-tokens 150",
        f"{LARGE_STEPS} --env toy:SelfishInTurn --num-turns 3 --share-policy --gamma 0.5",
    ],
)
def test_steps_are_the_slow_ones(flags, run, updates, model_dir):
    """Fails if an advantage, value, turn, discount, reward, agent, slice or weight is wrong, or what is clipped."""
    names = run(SCRIPT, *TOY, "--model", model_dir, *flags.split())
    check(updates, names, model_dir)
    args = names["args"]
    steps = args.num_iterations * args.update_epochs * args.num_minibatches
    assert len(updates) == steps * len(names["policies"])
    assert (names["metrics"]["agent_0/clipfrac"] > 0.05) == (args.update_epochs > 1)


def test_each_pass_has_every_trajectory_once_in_an_order_of_its_own(run, updates, model_dir):
    """Fails if a pass leaves trajectories out or takes them twice, or all passes are alike."""
    run(SCRIPT, *TOY, "--model", model_dir, *LARGE_STEPS.split(), "--num-agents", 1)
    first, second, third, fourth = [update.minibatch for update in updates]
    assert sorted(first + second) == sorted(third + fourth) == list(range(6))
    assert (first, second) != (third, fourth)


def test_target_kl_ends_all_passes(run, updates, model_dir):
    """Fails if steps follow the one with too large a divergence, in this pass or the next."""
    flags = "--update-epochs 6 --num-minibatches 2 --learning-rate 0.0001 --num-agents 1 --target-kl 0.01"
    names = run(SCRIPT, *TOY, "--model", model_dir, *flags.split())
    steps = check(updates, names, model_dir)[1, 0]
    *earlier, last = [step["approx_kl"] for step in steps]
    assert max(earlier) <= 0.01 < last
    assert 2 < len(earlier) < 10  # more than one pass, and a whole pass was left


def test_steps_with_windows_are_the_slow_ones(run, updates, tmp_path):
    """Fails if a value is that of another state where a window forgets the prompt."""
    path = save_model(tmp_path / "model", model_class=MistralForCausalLM, sliding_window=9)
    names = run(SCRIPT, *TOY, "--model", path, "--num-turns", 2)
    check(updates, names, path)


def test_values_are_float32(script, model_dir):
    """Fails if values are bfloat16 as the model on CUDA, where 0.7 is 0.6992, and values are clipped around such."""
    policy = load_policy(script, model_dir)
    args = script.Args(critic_learning_rate=1.0)
    critic = script.add_critic(args, policy, separate=False)
    critic.head.bias.data.fill_(0.7)
    speech = script.Speech(0, [5, 6], [5, 6], [7, 8], None)
    with torch.autocast("cpu", torch.bfloat16):
        _, _, values = script.evaluate_tokens(args, policy, critic, [speech])
    assert values.tolist() == pytest.approx([0.7, 0.7], rel=1e-6)


def test_values_start_at_the_first_rewards(run, model_dir):
    """Fails if values start at 0 or at the return of another turn, or each iteration sets them again."""
    flags = "--num-iterations 2 --num-turns 2 --learning-rate 0.01 --critic-learning-rate 1e-30"
    names = run(SCRIPT, *TOY, "--model", model_dir, *flags.split())
    first = metrics_of(names["run_dir"])[1]
    second_turn = first["train/reward_turn2"]
    both_turns = first["train/reward_turn1"] + second_turn
    assert both_turns - second_turn > 0.1
    for critic in names["critics"]:
        assert critic.head.bias.tolist() == pytest.approx([both_turns, second_turn])


@pytest.mark.parametrize("separate", [False, True])
def test_learning_rates_decay_together(separate, run, updates, model_dir):
    """Fails if the critic's learning rate stays, follows the actor's, or is that of the actor's parameters."""
    flags = "--num-iterations 4 --anneal-lr --learning-rate 0.001 --critic-learning-rate 0.1 --num-agents 1"
    separate_flag = ["--use-separate-critic"] if separate else []
    names = run(SCRIPT, *TOY, "--model", model_dir, *flags.split(), *separate_flag)
    (policy,) = names["policies"]
    (critic,) = names["critics"]
    for update, decay in zip(updates, [1, 0.75, 0.5, 0.25], strict=True):
        assert update.learning_rates == pytest.approx([0.001 * decay, 0.1 * decay])
    actor_ids, critic_ids = [set(map(id, group["params"])) for group in policy.optimizer.param_groups]
    expected = list(critic.head.parameters())
    if separate:
        expected += critic.model.parameters()
    assert actor_ids == set(map(id, policy.model.parameters()))
    assert critic_ids == set(map(id, expected))
