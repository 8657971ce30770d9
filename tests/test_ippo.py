"""ippo.py: its estimates and its loss against slow, obvious versions, in float64, one completion at a time."""

import itertools
import json
import math
import os
import sys
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from conftest import ROOT, save_model
from test_math import agent_of, load
from transformers import AutoModelForCausalLM, MistralForCausalLM, OPTForCausalLM, Qwen2ForCausalLM

SCRIPT = ROOT / "ippo.py"
TOY = ("--env", "toy:Letters", "--num-iterations", 1, "--num-generations", 3, "--num-tasks", 2, "--max-new-tokens", 24)
TOY = (*TOY, "--max-grad-norm", 1e9, "--eval-tasks", 1, "--no-anneal-lr")


def slow_gae(rewards, values, ends, gamma, gae_lambda):
    """A_t = sum over l >= t of (product over t..l-1 of gamma_k lambda) delta_l, as a double sum."""
    discounts = [gamma if end else 1.0 for end in ends]
    following = [*values[1:], 0.0]
    deltas = [r + d * f - v for r, d, f, v in zip(rewards, discounts, following, values)]
    return [
        sum(math.prod(d * gae_lambda for d in discounts[t:k]) * deltas[k] for k in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


def test_gae_is_the_double_sum():
    gae, rng = load(SCRIPT).gae, np.random.default_rng(0)
    turns, paid = [rng.normal(size=length).tolist() for length in (4, 1, 6)], rng.normal(size=3).tolist()
    values, ends, rewards = [value for turn in turns for value in turn], [False] * 11, [0.0] * 11
    for last, reward in zip((3, 4, 10), paid):
        ends[last], rewards[last] = True, reward
    for gamma, gae_lambda in itertools.product([0.0, 0.5, 1.0], [0.0, 0.7, 1.0]):
        ours = gae(paid, turns, gamma, gae_lambda)
        assert list(map(len, ours)) == [4, 1, 6]
        flat = list(itertools.chain.from_iterable(ours))
        assert flat == pytest.approx(slow_gae(rewards, values, ends, gamma, gae_lambda))


def test_gae_by_hand():
    """Two tokens, then one in the next turn; reward 1 after the second and 10 after the third."""
    gae = load(SCRIPT).gae
    rewards, values = [1.0, 10.0], [[3.0, 4.0], [5.0]]
    assert gae(rewards, values, 1.0, 1.0) == [[11 - 3, 11 - 4], [10 - 5]]  # the return minus the value
    assert gae(rewards, values, 0.5, 0.0) == [[4 - 3, 1 + 0.5 * 5 - 4], [10 - 5]]  # one-step errors
    assert gae(rewards, values, 0.5, 1.0) == [[1 + 0.5 * 10 - 3, 1 + 0.5 * 10 - 4], [10 - 5]]


@pytest.fixture
def updates(monkeypatch):
    """Every optimizer step, taken for real: (agent, rollout, weights of the learner before it, gradients).

    The value head starts from random weights instead of zeros, so that there are values to test.
    """
    seen, original = [], torch.optim.AdamW.step
    random = lambda tensor: tensor.data.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(torch.nn.init, "zeros_", random)

    def step(optimizer, closure=None):
        frame = sys._getframe(1)
        while "turns" not in frame.f_globals:
            frame = frame.f_back
        names = frame.f_globals
        learner = names["agent"].learner
        computing = [*names["agent"].model.modules(), *names["agent"].critic.model.modules()]
        assert all(m.training == getattr(m, "gradient_checkpointing", False) for m in computing)
        gradients = {k: p.grad.clone() if p.grad is not None else None for k, p in learner.named_parameters()}
        weights = {name: weight.clone() for name, weight in learner.state_dict().items()}
        seen.append((names["i"], names["turns"], weights, gradients))
        return original(optimizer, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    return seen


def slow_learner(weights, path, separate):
    """Actor, value head and the critic's trunk in float64, with these weights."""
    actor = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    head = torch.nn.Linear(actor.config.hidden_size, len(weights["1.bias"]), dtype=torch.float64)
    trunk = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).base_model if separate else actor.base_model
    )
    learner = torch.nn.ModuleList([actor, head, *([trunk] if separate else [])])
    learner.load_state_dict({name: weight.double() for name, weight in weights.items()})
    return learner, trunk


def slow_pass(learner, trunk, prompt, completion, turn, temperature):
    """Log-probabilities, entropies and values of one completion, from its full forward pass: (C,) each."""
    actor, head = learner[0], learner[1]
    ids = torch.tensor([[*prompt, *completion]])
    logprobs = (actor(ids).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
    values = head(trunk(ids).last_hidden_state[0, len(prompt) - 1 : -1])[:, turn]
    chosen = torch.stack([logprobs[k, token] for k, token in enumerate(completion)])
    return chosen, -(logprobs.exp() * logprobs).sum(-1), values


def slow_loss(learner, trunk, old_learner, old_trunk, i, turns, o):
    trajectories = []
    for root in turns[0]:
        for g in range(len(root.joint)):
            node, k, trajectory = root, g, []
            while node is not None:
                trajectory.append((node.groups[i], k, node.steps[k].reward))
                node, k = node.children[k], 0
            trajectories.append(trajectory)
    advantages, parts = [], []
    for trajectory in trajectories:
        with torch.no_grad():
            texts = [(g.prompt_ids, g.completion_ids[k], t) for t, (g, k, _) in enumerate(trajectory)]
            old = [slow_pass(old_learner, old_trunk, *text, o["temperature"]) for text in texts]
        values = [value for _, _, v in old for value in v.tolist()]
        rewards = [r for _, (g, k, r) in zip(old, trajectory) for r in [0.0] * (len(g.completion_ids[k]) - 1) + [r]]
        ends = [e for g, k, _ in trajectory for e in [False] * (len(g.completion_ids[k]) - 1) + [True]]
        estimates = iter(slow_gae(rewards, values, ends, o["gamma"], o["gae_lambda"]))
        for t, ((g, k, _), (logprobs, _, v)) in enumerate(zip(trajectory, old)):
            a = torch.tensor(list(itertools.islice(estimates, len(v))), dtype=torch.float64)
            advantages.append(a)
            parts.append((t, g, k, logprobs, v, a))
    flat = torch.cat(advantages)
    sums = Counter()
    for t, g, k, old_logprobs, old_values, a in parts:
        target = a + old_values
        a = (a - flat.mean()) / flat.std(unbiased=False) if o["norm_adv"] else a
        text = g.prompt_ids, g.completion_ids[k], t
        logprobs, entropies, values = slow_pass(learner, trunk, *text, o["temperature"])
        for c in range(len(a)):
            ratio = (logprobs[c] - old_logprobs[c]).exp()
            # PPO's objective case by case: no gradient where the ratio already went too far in its advantage's favour
            most = 1 + o["clip_coef"] if a[c] > 0 else 1 - o["clip_coef"]
            gone = ratio > most if a[c] > 0 else ratio < most
            sums["policy_loss"] += -(o["gamma"] ** t) * (most if gone else ratio) * a[c]
            error = (values[c] - target[c]) ** 2
            moved = values[c] - old_values[c]
            if o["clip_vloss"] and abs(moved) > o["clip_coef"]:
                near = old_values[c] + moved.sign() * o["clip_coef"]
                error = max(error, (near - target[c]) ** 2)
            sums["value_loss"] += 0.5 * error
            sums["entropy"] += entropies[c]
            sums["approx_kl"] += ratio - 1 - ratio.log()
            sums["clipfrac"] += abs(ratio - 1) > o["clip_coef"]
    sums["loss"] = sums["policy_loss"] + o["vf_coef"] * sums["value_loss"] - o["ent_coef"] * sums["entropy"]
    by_tokens = {"approx_kl", "clipfrac"}
    return {k: v / (len(flat) if k in by_tokens else len(trajectories) * o["max_new_tokens"]) for k, v in sums.items()}


DEFAULTS = {"gamma": 1.0, "gae_lambda": 1.0, "clip_coef": 0.2, "vf_coef": 0.1, "ent_coef": 0.0, "max_new_tokens": 24}
DEFAULTS |= {"norm_adv": False, "clip_vloss": True, "temperature": 1.0}


def check(seen, paths, separate=False, **options):
    """Compares gradients, and returns what is to be logged of each agent's steps."""
    o, first, logged = DEFAULTS | options, {}, defaultdict(list)
    for i, turns, weights, gradients in seen:
        first.setdefault(i, weights)
        old, old_trunk = slow_learner(first[i], paths[i % len(paths)], separate)
        learner, trunk = slow_learner(weights, paths[i % len(paths)], separate)
        parts = slow_loss(learner, trunk, old, old_trunk, i, turns, o)
        parts["loss"].backward()
        logged[i].append({name: part.item() for name, part in parts.items() if name != "entropy"})
        expected = dict(learner.named_parameters())
        norms = [p.grad.norm().item() for p in expected.values() if p.grad is not None]
        logged[i][-1]["grad_norm"] = math.hypot(*norms)
        scale = max(float(p.grad.abs().max()) for p in expected.values() if p.grad is not None)
        assert scale > 1e-3
        for name, ours in gradients.items():
            if ours is None:  # the lm_head of a critic, say
                assert expected[name].grad is None or expected[name].grad.abs().max() == 0
            else:
                torch.testing.assert_close(ours.double(), expected[name].grad, rtol=2e-3, atol=2e-5 * scale)
    return logged


def means(logged):
    """As in metrics.jsonl."""
    names = [(i, name) for i, steps in logged.items() for name in steps[0]]
    return {f"agent_{i}/{name}": sum(step[name] for step in logged[i]) / len(logged[i]) for i, name in names}


ONE_STEP = ("--update-epochs", 1, "--num-minibatches", 1)


@pytest.mark.parametrize(
    "flags, options",
    [
        ((), {}),
        (
            ("--num-turns", 2, "--gamma", 0.5, "--gae-lambda", 0.9, "--ent-coef", 0.1),
            {"gamma": 0.5, "gae_lambda": 0.9, "ent_coef": 0.1},
        ),
        (("--num-turns", 2, "--use-separate-critic"), {"separate": True}),
        (("--num-turns", 3, "--gamma", 0.5), {"gamma": 0.5}),
        (("--temperature", 0.7, "--ent-coef", 0.1), {"temperature": 0.7, "ent_coef": 0.1}),
        (("--norm-adv", "--ent-coef", 0.1, "--vf-coef", 2.0), {"norm_adv": True, "ent_coef": 0.1, "vf_coef": 2.0}),
        (("--norm-adv", "--num-turns", 2, "--gamma", 0.5), {"norm_adv": True, "gamma": 0.5}),
        (("--max-batch-tokens", 70, "--num-agents", 3), {}),
        (("--gradient-checkpointing", "--use-separate-critic"), {"separate": True}),
    ],
    ids=lambda x: " ".join(map(str, x)) if isinstance(x, tuple) else "",
)
def test_first_step_is_the_slow_one(flags, options, run, updates, model_dir):
    """Ratios are 1 here, so the policy's part is the advantage-weighted gradient of the log-probability."""
    names = run(SCRIPT, *TOY, "--model", model_dir, *ONE_STEP, *flags)
    assert len(updates) == names["N"]
    assert not any(module.training for agent in names["agents"] for module in agent.model.modules())
    for name, mean in means(check(updates, [model_dir], **options)).items():
        assert names["metrics"][name] == pytest.approx(mean, rel=1e-3, abs=1e-5), name
    assert all(len(node.joint) == 1 for nodes in names["turns"][1:] for node in nodes)  # no tree: trajectories
    assert abs(names["metrics"]["agent_0/approx_kl"]) < 1e-6 and names["metrics"]["agent_0/clipfrac"] == 0


def test_step_of_the_second_rollout_is_the_slow_one(run, updates, model_dir):
    """In the first, all agents' value functions are alike, and each critic has its actor's weights."""
    more = ("--use-separate-critic", "--critic-learning-rate", 0.01, "--num-iterations", 2)
    run(SCRIPT, *TOY, "--model", model_dir, *ONE_STEP, *more)
    assert len(updates) == 4
    check(updates[2:], [model_dir], separate=True)


def test_step_of_a_model_that_repeats_itself_is_the_slow_one(run, updates, tmp_path):
    path = save_model(tmp_path / "sure", initializer_range=0.4, stops=range(20, 259))
    more = (
        "--update-epochs",
        2,
        "--num-minibatches",
        1,
        "--learning-rate",
        0.003,
        "--num-generations",
        12,
        "--num-agents",
        1,
    )
    names = run(SCRIPT, *TOY, "--model", path, *more, "--num-turns", 2)
    groups = [group for nodes in names["turns"] for node in nodes for group in node.groups]
    assert min(len(set(map(tuple, group.completion_ids))) / len(group.completion_ids) for group in groups) < 1
    check(updates, [path])


@pytest.mark.parametrize("flags", [(), ("--no-clip-vloss",)])
def test_later_steps_are_clipped_as_they_should_be(flags, run, updates, model_dir):
    more = ("--update-epochs", 4, "--num-minibatches", 1, "--learning-rate", 0.003, "--critic-learning-rate", 0.1)
    names = run(SCRIPT, *TOY, "--model", model_dir, *more, *flags, "--num-turns", 2)
    assert len(updates) == 8 and names["metrics"]["agent_0/clipfrac"] > 0.05
    for name, mean in means(check(updates, [model_dir], clip_vloss=not flags)).items():
        assert names["metrics"][name] == pytest.approx(mean, rel=1e-3, abs=1e-5), name


def test_minibatches_take_every_trajectory_once(run, updates, model_dir):
    """The gradients of the minibatches of one pass average to that of one minibatch, where no step changes them.

    Each is a mean over its own trajectories, here 2, 2, 1 and 1 of 6. Each pass has minibatches of its own.
    """
    pinned = ("--learning-rate", 1e-20, "--critic-learning-rate", 1e-20, "--num-agents", 1)
    for count, epochs in [(1, 1), (4, 2)]:
        run(SCRIPT, *TOY, "--model", model_dir, *pinned, "--num-minibatches", count, "--update-epochs", epochs)
    whole, *parts = (gradients for _, _, _, gradients in updates)
    assert len(parts) == 8
    for name, gradient in whole.items():
        if gradient is not None:
            for one_pass in (parts[:4], parts[4:]):
                mean = sum(count * part[name] for count, part in zip((2, 2, 1, 1), one_pass)) / 6
                torch.testing.assert_close(mean, gradient, rtol=1e-3, atol=1e-6 + 1e-4 * float(gradient.abs().max()))
    heads = [part["0.lm_head.weight"] for part in parts]
    assert not any(torch.allclose(heads[0], other, rtol=1e-3) for other in heads[4:])


def test_target_kl_ends_the_passes(run, updates, model_dir):
    more = ("--update-epochs", 9, "--num-minibatches", 1, "--learning-rate", 0.0001, "--num-agents", 1)
    names = run(SCRIPT, *TOY, "--model", model_dir, *more, "--target-kl", 0.01)
    assert 2 < names["metrics"]["agent_0/optimizer_steps"] == len(updates) < 9
    logged = check(updates, [model_dir])
    *earlier, last = (step["approx_kl"] for step in logged[0])
    assert max(earlier) <= 0.01 < last
    for name, mean in means(logged).items():  # over the steps that were taken
        assert names["metrics"][name] == pytest.approx(mean, rel=1e-3, abs=1e-5), name


def test_value_loss_reaches_exactly_its_parameters(run, updates, model_dir):
    """Without advantages only the value loss is left. With a critic of its own the actor must not move at all."""
    names = run(SCRIPT, *TOY, "--model", model_dir, *ONE_STEP, "--use-separate-critic", "--vf-coef", 0)
    for _, _, _, gradients in updates:
        assert all(g is None or not g.any() for k, g in gradients.items() if not k.startswith("0."))
        assert gradients["0.lm_head.weight"].any()
    updates.clear()
    names = run(SCRIPT, *TOY, "--model", model_dir, *ONE_STEP, "--use-separate-critic")
    assert names["args"].critic_learning_rate == names["args"].learning_rate  # by default that of the actor
    groups = names["agents"][0].optimizer.param_groups
    actor = {id(p) for p in names["agents"][0].model.parameters()}
    assert {id(p) for p in groups[0]["params"]} == actor and not actor & {id(p) for p in groups[1]["params"]}
    updates.clear()
    run(SCRIPT, *TOY, "--model", model_dir, *ONE_STEP, "--norm-adv", "--num-agents", 1, "--vf-coef", 1e-9)
    policy_only = updates.pop()[3]
    run(SCRIPT, *TOY, "--model", model_dir, *ONE_STEP, "--norm-adv", "--num-agents", 1)
    both = updates.pop()[3]
    torch.testing.assert_close(policy_only["0.lm_head.weight"], both["0.lm_head.weight"])  # no value in the logits
    assert not torch.allclose(policy_only["0.model.embed_tokens.weight"], both["0.model.embed_tokens.weight"])


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_values_are_of_the_state_before_the_token(kind, share, model_dir, tmp_path):
    module = load(SCRIPT)
    if kind == "sliding":
        model_dir = save_model(tmp_path / "m", model_class=MistralForCausalLM, sliding_window=9)
    agent = agent_of(model_dir, share=share, value_head=torch.nn.Linear(32, 3))
    agent.critic = agent
    rows = [*(([5, 6, 7] * 4, ids, 1) for ids in ([8, 9, 10], [8, 9, 11], [8])), ([4], [30, 31], 0)]
    logprobs, entropies, values = module.evaluate_tokens(agent, rows, 0.7)
    torch.testing.assert_close(logprobs, module.token_logprobs(agent, rows, 0.7))
    without = module.evaluate_tokens(agent, rows, 0.7, with_entropy=False)
    torch.testing.assert_close(without, torch.stack([logprobs, torch.zeros_like(entropies), values]))
    assert values[:3].tolist() == pytest.approx(values[3:6].tolist(), abs=1e-5)  # the last token changes no value
    assert values[6].item() == pytest.approx(values[0].item(), abs=1e-5)
    full = agent.model(torch.tensor([[5, 6, 7] * 4 + [8, 9, 10]]), output_hidden_states=True)
    expected = (full.logits[0, 11:14] / 0.7).log_softmax(-1)
    assert entropies[:3].tolist() == pytest.approx((-(expected.exp() * expected).sum(-1)).tolist(), abs=1e-4)
    of_turn = agent.value_head(full.hidden_states[-1][0, 11:14]).T.tolist()
    assert values[:3].tolist() == pytest.approx(of_turn[1], abs=1e-5)
    last = module.evaluate_tokens(agent, [(*rows[0][:2], 2), *rows], 0.7)[2]  # the same text in two turns
    assert last[:3].tolist() == pytest.approx(of_turn[2], abs=1e-5)
    torch.testing.assert_close(last[3:], values)


@pytest.mark.parametrize("with_entropy", [True, False])
def test_tokens_in_pieces_are_the_whole(with_entropy, model_dir, monkeypatch):
    """As in test_head_in_pieces_is_the_whole: logits of a piece are computed again for its gradient."""
    agent, module, sizes, seen = agent_of(model_dir, value_head=torch.nn.Linear(32, 1)), load(SCRIPT), [], []
    agent.critic, head = agent, module.head
    watched = lambda model, hidden, temperature: sizes.append(len(hidden)) or head(model, hidden, temperature)
    monkeypatch.setattr(module, "head", watched)
    rows = [([5, 6, 7], [8, 9], 0), ([5, 6, 7], [11, 12, 13, 2], 0)]
    for vocab_size in (259, 2**30):
        monkeypatch.setattr(agent.model.config, "vocab_size", vocab_size)
        computed = module.evaluate_tokens(agent, rows, 0.7, with_entropy)
        (sum(computed) * torch.arange(1.0, 7.0)).sum().backward()
        seen.append([*(x.detach() for x in computed), *(p.grad.clone() for p in agent.model.parameters())])
        agent.model.zero_grad()
    assert sizes == [6] + 2 * [1] * 6
    for whole, pieces in zip(*seen):
        torch.testing.assert_close(whole, pieces, rtol=1e-4, atol=1e-4)


def test_values_are_exact_where_the_last_layer_is_a_projection(tmp_path, monkeypatch):
    """Its states are bfloat16 under autocast, as on CUDA; the value head is float32."""
    sizes = {"ffn_dim": 48, "word_embed_proj_dim": 16}
    module, agent = load(SCRIPT), agent_of(save_model(tmp_path / "m", model_class=OPTForCausalLM, **sizes))
    agent.critic, agent.value_head = agent, torch.nn.Linear(16, 1)
    rows = [([5, 6, 7], [8, 9], 0), ([5, 6, 7], [11], 0)]
    exact = module.evaluate_tokens(agent, rows, 1.0)[2]
    monkeypatch.setattr(module, "autocast", lambda model: torch.autocast("cpu", torch.bfloat16))
    rough = module.evaluate_tokens(agent, rows, 1.0)[2]
    assert rough.dtype == torch.float32 and torch.allclose(rough, exact, atol=0.3) and not torch.equal(rough, exact)


def test_values_start_at_the_turns_first_mean_return(run, model_dir):
    flags = ("--num-iterations", 2, "--save-every", 1, "--learning-rate", 1e-30)  # only once, also after a checkpoint
    names = run(SCRIPT, *TOY[:2], *TOY[4:], "--model", model_dir, *flags, "--num-turns", 2)
    with open(os.path.join(names["run_dir"], "metrics.jsonl")) as file:
        _, first, second = map(json.loads, file)
    for t, name in enumerate(("train/return", "train/reward_turn2")):
        nodes = names["turns"][t]
        values = {value for node in nodes for group in node.groups for row in group.values for value in row}
        assert first[name] != second[name] and len(values) == 1 and values.pop() == pytest.approx(first[name])
    assert first["train/return"] > first["train/reward_turn2"] + 0.1


def test_values_of_a_turn_start_when_it_is_first_reached(run, model_dir, monkeypatch):
    from toy import Letters, Step

    def step(self, branches):  # the first training rollout ends in turn one, the second goes on
        rounds.append(len(branches))
        done = len([size for size in rounds if size == 6]) < 2
        return [Step(b[2], 1.5 if not b[1] else 0.25, {}, done) for b in branches]

    monkeypatch.setattr(Letters, "step", step)
    for iterations, second in (1, 0.0), (2, 0.25):
        rounds = []
        flags = ("--num-turns", 2, "--num-iterations", iterations, "--learning-rate", 1e-30)
        names = run(SCRIPT, *TOY[:2], *TOY[4:], "--model", model_dir, *flags)
        assert not names["turns"][1:] or len(names["turns"][1]) == 6
        assert all(agent.value_head.bias.tolist() == [1.5, second] for agent in names["agents"])


@pytest.mark.parametrize(
    "reward, flags", [(0.7, ()), (0.7, ("--norm-adv",)), (100.1, ()), (0.7, ("--num-turns", 3, "--gamma", 0.9))]
)
def test_equal_returns_train_nothing(reward, flags, run, model_dir, monkeypatch):
    """These are no float32: the values, which begin at the mean return, differ from it by rounding."""
    from toy import Letters, Step

    equal = lambda self, branches: [Step(actions, reward, {}, done=False) for _, _, actions in branches]
    monkeypatch.setattr(Letters, "step", equal)
    names = run(SCRIPT, *TOY, "--model", model_dir, *flags)
    first = json.loads(open(os.path.join(names["run_dir"], "metrics.jsonl")).readlines()[1])
    for i in range(2):
        assert first[f"agent_{i}/grad_norm"] == first[f"agent_{i}/value_loss"] == 0
    before, after = (AutoModelForCausalLM.from_pretrained(x) for x in (model_dir, f"{names['run_dir']}/agent_0"))
    for old, new in zip(before.parameters(), after.parameters()):
        assert torch.equal(old, new)


def test_nearly_equal_returns_train(run, model_dir, monkeypatch):
    """They differ by more than rounding."""
    from toy import Letters, Step

    nearly = lambda self, branches: [Step(b[2], 0.7 + 1e-5 * k, {}, False) for k, b in enumerate(branches)]
    monkeypatch.setattr(Letters, "step", nearly)
    names = run(SCRIPT, *TOY, "--model", model_dir)
    for root in names["turns"][0]:
        for advantages in (group.advantages for group in root.groups):
            assert all(a for row in advantages for a in row)


@pytest.mark.parametrize("model_class", [Qwen2ForCausalLM, OPTForCausalLM])
def test_old_values_are_as_exact_as_the_new_ones(model_class, run, tmp_path, monkeypatch):
    """On CUDA the model runs in bfloat16. The value head must not: values would be clipped around rounded ones."""
    from toy import Letters

    autocast, step, started = torch.autocast, Letters.step, []  # from the first evaluation on as on CUDA

    def as_on_cuda(device, dtype=None, enabled=True, **kwargs):
        return autocast(device, dtype, enabled=enabled or (bool(started) and dtype is torch.bfloat16), **kwargs)

    monkeypatch.setattr(torch, "autocast", as_on_cuda)
    monkeypatch.setattr(Letters, "step", lambda self, branches: started.append(1) or step(self, branches))
    # OPT's last layer may be a projection, which autocast computes in bfloat16
    sizes = {"ffn_dim": 48, "word_embed_proj_dim": 16} if model_class is OPTForCausalLM else {}
    path = save_model(tmp_path / "m", model_class=model_class, **sizes)
    names = run(SCRIPT, *TOY, "--model", path, "--num-iterations", 2, "--learning-rate", 0.01)
    values = torch.tensor([v for group in names["turns"][0][0].groups for row in group.values for v in row])
    assert (values != values.bfloat16().float()).float().mean() > 0.9


def explained_variance(turns):
    """From the groups of each turn: around the turn's own mean."""
    errors, spreads = [], []
    for groups in turns:
        pairs = [pair for g in groups for rows in zip(g.targets, g.values) for pair in zip(*rows)]
        wrong, targets = np.array([(target - value, target) for target, value in pairs]).T
        errors += [*(wrong - wrong.mean())]
        spreads += [*(targets - targets.mean())]
    return 1 - np.square(errors).sum() / np.square(spreads).sum()


def test_advantages_are_normalised_over_all_tokens_of_an_agent(run, updates, model_dir):
    names = run(SCRIPT, *TOY, "--model", model_dir, "--norm-adv", "--num-turns", 2)
    for i in range(2):
        groups = [node.groups[i] for nodes in names["turns"] for node in nodes]
        flat = np.array([a for group in groups for row in group.advantages for a in row])
        assert flat.mean() == pytest.approx(0, abs=1e-9) and flat.std() == pytest.approx(1, abs=1e-6)
        explained = explained_variance([[node.groups[i] for node in nodes] for nodes in names["turns"]])
        assert names["metrics"][f"agent_{i}/explained_variance"] == pytest.approx(explained)


@pytest.mark.parametrize("reward", [1.5, 0.1])  # the second is no binary fraction
def test_equal_returns_have_no_variance_to_explain(reward, run, model_dir, monkeypatch):
    from toy import Letters, Step

    monkeypatch.setattr(Letters, "step", lambda self, branches: [Step(b[2], reward, {}, False) for b in branches])
    names = run(SCRIPT, *TOY, "--model", model_dir, "--norm-adv")  # of which no deviation is left to divide by
    assert "agent_0/explained_variance" not in names["metrics"]


def test_a_discount_of_tokens_is_at_most_one(run, capsys):
    with pytest.raises(SystemExit) as stop:
        run(SCRIPT, *TOY, "--gae-lambda", 1.5)
    assert stop.value.code == 2 and "--gae-lambda 1.5: discounts are at most 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["clip-coef", "critic-learning-rate", "num-minibatches", "target-kl", "update-epochs"]
)
def test_what_would_stop_all_learning_is_refused(name, run, capsys):
    with pytest.raises(SystemExit) as stop:
        run(SCRIPT, *TOY, f"--{name}", 0)
    assert stop.value.code == 2 and f"--{name} 0" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [("--num-turns", 3), ("--use-separate-critic",)])
def test_a_resume_cannot_change_the_critic(flags, run, model_dir, capsys):
    run_dir = run(SCRIPT, *TOY, "--model", model_dir, "--num-iterations", 1)["run_dir"]
    with pytest.raises(SystemExit) as stop:
        run(SCRIPT, "--resume", run_dir, *flags)
    assert stop.value.code == 2 and f"error: {flags[0]}: the run to --resume has" in capsys.readouterr().err


def test_a_lower_learning_rate_at_a_resume_is_also_that_of_the_values(run, model_dir):
    run_dir = run(SCRIPT, *TOY, "--model", model_dir, "--num-iterations", 1)["run_dir"]
    names = run(SCRIPT, "--resume", run_dir, "--learning-rate", 1e-6)
    assert names["args"].critic_learning_rate == pytest.approx(1e-5)


def test_a_minibatch_may_be_one_trajectory(run, model_dir):
    names = run(SCRIPT, *TOY, "--model", model_dir, "--num-minibatches", 6, "--update-epochs", 1)
    assert names["metrics"]["agent_0/optimizer_steps"] == len(names["trajectories"]) == 6


@pytest.mark.parametrize("count, processes", [(7, 1), (4, 2)])
def test_more_minibatches_than_trajectories_is_one_sentence(count, processes, run, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    with pytest.raises(SystemExit) as stop:
        run(SCRIPT, *TOY, "--num-minibatches", count)
    said = f"--num-minibatches {count}: give at most {6 // processes}, one for a trajectory"
    assert stop.value.code == 2 and said in capsys.readouterr().err
