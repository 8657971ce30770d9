"""ippo.py: its estimates and its update against the slow, obvious ones.

The reference knows nothing of rows, batches, caches or masks: it takes one completion at a time behind its prompt, in
float64, and computes old log-probabilities and values again, with the weights that the rollout had.
"""

import math
import runpy
from itertools import chain, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, metrics_of, names_of_script, save_model
from transformers import AutoModelForCausalLM, MistralForCausalLM

SCRIPT = ROOT / "ippo.py"
TOY = ("--env", "toy:Letters", "--num-iterations", 1, "--num-generations", 3, "--num-tasks", 2, "--max-new-tokens", 24)
TOY = (*TOY, "--max-grad-norm", 1e9, "--eval-tasks", 1, "--no-anneal-lr")
ONE_STEP = ("--update-epochs", 1, "--num-minibatches", 1)
LARGE_STEPS = ("--update-epochs", 2, "--num-minibatches", 2, "--learning-rate", 0.003, "--critic-learning-rate", 0.1)


@pytest.fixture(scope="module")
def script():
    """The functions of the script."""
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def slow_gae(rewards, values, gamma, gae_lambda):
    """A_t = sum over l >= t of (product over t..l-1 of gamma_k lambda) delta_l, as a double sum over all tokens.

    From a token of turn a to the next one, of turn b, the rewards of turns a..b-1 arrive, and gamma applies b-a times.
    """
    turn_of = [a for a, turn in enumerate(values) for _ in turn]
    pairs = list(zip(turn_of, [*turn_of[1:], len(rewards)]))
    flat = [*(value for turn in values for value in turn), 0.0]
    discounts = [gamma ** (b - a) for a, b in pairs]
    paid = [sum(gamma ** (u - a) * rewards[u] for u in range(a, b)) for a, b in pairs]
    deltas = [r + d * after - value for r, d, value, after in zip(paid, discounts, flat, flat[1:])]
    weight = lambda t, k: math.prod(d * gae_lambda for d in discounts[t:k])
    sums = iter([sum(weight(t, k) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))])
    return [[next(sums) for _ in turn] for turn in values]


def test_gae_by_hand(script):
    """A discount or a reward at the wrong token, and what a turn without tokens hands back to the turn before."""
    rewards, values = [1.0, 10.0], [[3.0, 4.0], [5.0]]  # two tokens, then one in the next turn
    assert script.gae(rewards, values, 1.0, 1.0) == [[11 - 3, 11 - 4], [10 - 5]]  # the return minus the value
    assert script.gae(rewards, values, 0.5, 0.0) == [[4 - 3, 1 + 0.5 * 5 - 4], [10 - 5]]  # one-step errors
    assert script.gae(rewards, values, 0.5, 1.0) == [[1 + 0.5 * 10 - 3, 1 + 0.5 * 10 - 4], [10 - 5]]
    silent = [[], [3.0], [], [], [5.0], []]  # the first reward is nobody's
    found = script.gae([100.0, 1.0, 8.0, 16.0, 32.0, 64.0], silent, 0.5, 0.0)
    assert found == [[], [1 + 8 / 2 + 16 / 4 + 5 / 8 - 3], [], [], [32 + 64 / 2 - 5], []]


@pytest.fixture
def updates(monkeypatch):
    """Every optimizer step, which is taken, with what led to it. Value heads start random, to have values to test."""
    seen, original = [], torch.optim.AdamW.step
    random = lambda tensor: tensor.data.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(torch.nn.init, "zeros_", random)

    def step(optimizer, closure=None):
        names = names_of_script()
        this = SimpleNamespace(policy=(names["iteration"], names["i"]), turns=names["turns"])
        this.seats = [k for k, player in enumerate(names["agents"]) if player is names["agent"]]
        this.minibatch = names["minibatch"].tolist()
        this.weights = {name: p.detach().clone() for name, p in names["agent"].trained.items()}
        this.gradients = {name: p.grad.clone() for name, p in names["agent"].trained.items()}
        this.rates = [group["lr"] for group in optimizer.param_groups]
        seen.append(this)
        return original(optimizer, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    return seen


class Slow:
    """Actor, value head and critic in float64."""

    def __init__(self, weights, path):
        self.actor = self.critic = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        self.head = torch.nn.Linear(self.actor.config.hidden_size, len(weights["critic.0.bias"]), dtype=torch.float64)
        parts = {"": self.actor, "critic.0.": self.head}
        if any(name.startswith("critic.1.") for name in weights):
            self.critic = parts["critic.1."] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        self.trained = {start + name: p for start, part in parts.items() for name, p in part.named_parameters()}
        assert self.trained.keys() == weights.keys()
        for name, p in self.trained.items():
            p.data.copy_(weights[name])

    def read(self, said, temperature):
        """Log-probabilities, entropies and values of a completion: (C,) each."""
        prompt_ids, completion_ids = said.group.prompt_ids, said.group.completion_ids[said.k]
        ids, states = torch.tensor([[*prompt_ids, *completion_ids]]), slice(len(prompt_ids) - 1, -1)
        logprobs = (self.actor(ids).logits[0, states] / temperature).log_softmax(-1)
        values = self.head(self.critic.base_model(ids).last_hidden_state[0, states])[:, said.turn]
        chosen = torch.stack([logprobs[k, token] for k, token in enumerate(completion_ids)])
        return chosen, -(logprobs.exp() * logprobs).sum(-1), values


def recall(old, seat, turns, args):
    """For each trajectory what a seat said in it, with old log-probabilities, values and advantages."""
    recalled = []
    for node, k in product(turns[0], range(args.num_generations)):
        recalled.append([])
        rewards, values = [], []
        while node:
            said, reward = SimpleNamespace(turn=len(rewards), group=node.groups.get(seat), k=k), node.steps[k].reward
            rewards.append(reward[seat] if isinstance(reward, list) else reward)
            values.append([])
            if said.group:
                said.logprobs, _, said.values = old.read(said, args.temperature)
                recalled[-1].append(said)
                values[-1] = said.values.tolist()
            node, k = node.children[k], 0
        estimates = slow_gae(rewards, values, args.gamma, args.gae_lambda)
        for said in recalled[-1]:
            said.advantages = torch.tensor(estimates[said.turn], dtype=torch.float64)
    return recalled


def slow_losses(new, spoken, weight, args):
    """What is logged of a minibatch, from all that was said in it."""
    sums = dict.fromkeys(("loss", "policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac"), 0.0)
    clip, tokens = args.clip_coef, sum(len(said.values) for said in spoken)
    for said in spoken:
        logprobs, entropies, values = new.read(said, args.temperature)
        ratios, advantages, moved = (logprobs - said.logprobs).exp(), said.advantages, values - said.values
        # PPO's objective case by case: no gradient where the ratio already went too far in its advantage's favour
        gone = torch.where(advantages > 0, ratios > 1 + clip, ratios < 1 - clip)
        kept = torch.where(gone, 1 + clip * advantages.sign(), ratios)
        targets = advantages + said.values
        errors = (values - targets) ** 2
        if args.clip_vloss:
            near = torch.where(moved.abs() > clip, said.values + clip * moved.sign(), values)
            errors = torch.maximum(errors, (near - targets) ** 2)
        sums["policy_loss"] += -weight * args.gamma**said.turn * (kept * advantages).sum()
        sums["value_loss"] += weight * 0.5 * errors.sum()
        sums["entropy"] += weight * entropies.sum()
        sums["approx_kl"] += (ratios - 1 - ratios.log()).sum() / tokens
        sums["clipfrac"] += ((ratios - 1).abs() > clip).sum() / tokens
    sums["loss"] = sums["policy_loss"] + args.vf_coef * sums["value_loss"] - args.ent_coef * sums.pop("entropy")
    return {name: torch.as_tensor(value) for name, value in sums.items()}


def check(seen, names, path):
    """Compares all gradients and the last iteration's metrics; returns what is to be logged of each step."""
    args, memories, logged = names["args"], {}, {}
    for this in seen:
        if this.policy not in memories:
            old = Slow(this.weights, path)
            with torch.no_grad():
                memories[this.policy] = {seat: recall(old, seat, this.turns, args) for seat in this.seats}
        new, memory = Slow(this.weights, path), memories[this.policy]
        spoken = [said for recalled in memory.values() for m in this.minibatch for said in recalled[m]]
        losses = slow_losses(new, spoken, 1 / len(this.minibatch) / args.max_new_tokens, args)
        if spoken:
            losses["loss"].backward()
        expected = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in new.trained.items()}
        scale = max(float(g.abs().max()) for g in expected.values())
        assert scale > 1e-3 or not spoken
        for name, gradient in this.gradients.items():
            torch.testing.assert_close(gradient.double(), expected[name], rtol=2e-3, atol=2e-5 * scale)
        losses["grad_norm"] = torch.stack([g.norm() for g in expected.values()]).norm()
        logged.setdefault(this.policy, []).append({name: value.item() for name, value in losses.items()})
    for policy, steps in logged.items():
        due = {f"agent_{policy[1]}/{name}": np.mean([step[name] for step in steps]) for name in steps[0]}
        for seat, recalled in memories[policy].items():
            if spoken := list(chain(*recalled)):
                errors, values = (torch.cat([vars(said)[x] for said in spoken]) for x in ("advantages", "values"))
                due[f"agent_{seat}/explained_variance"] = 1 - (errors.var() / (errors + values).var()).item()
        for name, value in due.items() if policy[0] == args.num_iterations else ():
            assert names["metrics"][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    return logged


@pytest.mark.parametrize(
    "flags",
    [
        ("--num-turns", 2, "--gamma", 0.5, "--gae-lambda", 0.9, "--ent-coef", 0.1, "--temperature", 0.7),
        ("--num-turns", 2, "--use-separate-critic", "--vf-coef", 2.0),
        ("--num-iterations", 2, "--use-separate-critic", "--critic-learning-rate", 0.01, "--num-agents", 1),
        ("--num-turns", 2, "--share-policy", "--max-batch-tokens", 1),
        ("--env", "toy:Sequential", "--num-turns", 4, "--num-agents", 3, "--gamma", 0.5, "--gae-lambda", 0.9),
        ("--env", "toy:SelfishInTurn", "--num-turns", 3, "--share-policy", "--gamma", 0.5, "--gae-lambda", 0.9),
        (*LARGE_STEPS, "--num-turns", 2, "--gae-lambda", 0.9),
        (*LARGE_STEPS, "--num-turns", 2, "--no-clip-vloss", "--clip-coef", 0.1, "--ent-coef", 0.1),
        (*LARGE_STEPS, "--use-separate-critic", "--temperature", 0.7, "--max-batch-tokens", 150),
        (*LARGE_STEPS, "--env", "toy:SelfishInTurn", "--num-turns", 3, "--share-policy", "--gamma", 0.5),
    ],
    ids=lambda flags: " ".join(map(str, flags)),
)
def test_steps_are_the_slow_ones(flags, run, updates, model_dir):
    """A wrong advantage, value, turn, discount, reward, seat, slice, weight; what is clipped on a wrong side; a pass
    that leaves trajectories out or takes them twice, and passes that are all alike."""
    names = run(SCRIPT, *TOY, "--model", model_dir, *ONE_STEP, *flags)
    check(updates, names, model_dir)
    args, policies = names["args"], 1 if "--share-policy" in flags else names["N"]
    assert len(updates) == args.num_iterations * args.update_epochs * args.num_minibatches * policies
    assert (names["metrics"]["agent_0/clipfrac"] > 0.05) == (args.update_epochs > 1)
    passes = [this.minibatch for this in updates[: args.update_epochs * args.num_minibatches]]
    if args.update_epochs > 1:
        first, second = chain(*passes[:2]), chain(*passes[2:])
        assert sorted(first) == sorted(second) == list(range(6)) and passes[:2] != passes[2:]


def test_target_kl_ends_all_passes(run, updates, model_dir):
    """Steps after the one that found too large a divergence, in this pass or the next."""
    more = ("--update-epochs", 6, "--num-minibatches", 2, "--learning-rate", 0.0001, "--num-agents", 1)
    names = run(SCRIPT, *TOY, "--model", model_dir, *more, "--target-kl", 0.01)
    *earlier, last = (step["approx_kl"] for step in check(updates, names, model_dir)[1, 0])
    assert 2 < len(earlier) < 10 and max(earlier) <= 0.01 < last  # a whole pass was left


def test_steps_with_windows_are_the_slow_ones(run, updates, tmp_path):
    """A value of another state where a window forgets the prompt."""
    path = save_model(tmp_path / "model", model_class=MistralForCausalLM, sliding_window=9)
    check(updates, run(SCRIPT, *TOY, "--model", path, *ONE_STEP, "--num-turns", 2), path)


def test_values_are_float32(script, model_dir):
    """On CUDA the model runs in bfloat16, where a value of 0.7 is 0.6992, and values are clipped around such."""
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    agent = SimpleNamespace(model=model, trained={}, optimizer=torch.optim.AdamW(model.parameters()))
    args = SimpleNamespace(num_turns=1, temperature=1.0, critic_learning_rate=1.0)
    script.add_critic(args, agent, separate=False)
    agent.value_head.bias.data.fill_(0.7)
    with torch.autocast("cpu", torch.bfloat16):
        values = script.evaluate_tokens(args, agent, [5, 6], [5, 6], [[7, 8]])[2].tolist()
    assert values == pytest.approx([0.7, 0.7], rel=1e-6)


def test_values_start_at_the_first_rewards(run, model_dir):
    """Values that start at 0, or at the return of another turn, or that each iteration sets again."""
    flags = ("--num-iterations", 2, "--num-turns", 2, "--learning-rate", 0.01, "--critic-learning-rate", 1e-30)
    names = run(SCRIPT, *TOY, "--model", model_dir, *flags)
    first = metrics_of(names["run_dir"])[1]
    starts = [first["train/reward_turn1"] + first["train/reward_turn2"], first["train/reward_turn2"]]
    speeches = [said for paths in names["paths"] for path in paths for said in path]
    assert {said.state[0] for said in speeches} == {0, 1} and abs(starts[0] - starts[1]) > 0.1
    assert all(set(said.values) == {np.float32(starts[said.state[0]])} for said in speeches)


@pytest.mark.parametrize("more", [(), ("--use-separate-critic",)], ids=len)
def test_learning_rates_decay_together(more, run, updates, model_dir):
    """A critic whose learning rate stays, or follows the actor's, or is that of the actor's parameters."""
    flags = ("--num-iterations", 4, "--anneal-lr", "--learning-rate", 0.001, "--critic-learning-rate", 0.1, *more)
    (agent,) = run(SCRIPT, *TOY, "--model", model_dir, "--num-agents", 1, *ONE_STEP, *flags)["policies"]
    assert [this.rates for this in updates] == [pytest.approx([0.001 * x, 0.1 * x]) for x in (1, 0.75, 0.5, 0.25)]
    rates = [{id(p) for p in group["params"]} for group in agent.optimizer.param_groups]
    critic = agent.critic.parameters() if more else ()
    assert rates == [{*map(id, agent.model.parameters())}, {*map(id, [*agent.value_head.parameters(), *critic])}]
