"""madpo.py: its pairs, and its loss and gradient against DPO written out for each pair, in float64."""

import json
import math
import runpy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from conftest import END, ROOT, STOP, metrics_of, policies_of, save_model, trained_by
from transformers import AutoModelForCausalLM

SCRIPT = ROOT / "madpo.py"
TOY = "--env toy:Letters --num-generations 3 --num-tasks 2 --max-new-tokens 24 --eval-tasks 1 --max-grad-norm 1e9"
TOY = f"{TOY} --no-anneal-lr --num-iterations 2".split()


def test_pairs_are_of_strict_preferences_and_half_differ_in_one_answer():
    """Fails if a pair is of equal returns, turned round or drawn twice, or shows no single answer's worth."""
    choose_pairs = runpy.run_path(str(SCRIPT))["choose_pairs"]
    joint = np.array([(a, b) for a in range(4) for b in range(4)])
    returns = np.array([0.0, 1.0, 1.0, 3.0] * 4) + joint[:, 0]
    np.random.seed(0)
    better, worse = choose_pairs(joint, returns, 12)
    assert (returns[better] > returns[worse]).all()
    assert len(set(zip(better, worse))) == 12
    differences = (joint[better] != joint[worse]).sum(1)
    assert (differences[:6] == 1).all()
    assert (differences == 2).any()
    better, worse = choose_pairs(joint, np.ones(16), 12)
    assert len(better) == len(worse) == 0


@dataclass
class Update:
    """What led to an optimizer step."""

    agent: int
    turns: list  # the rollout: the nodes of each turn
    gradients: list
    weights: list  # of each agent's policy


@pytest.fixture
def updates(monkeypatch):
    """Every optimizer step of a run, which is taken."""
    updates, original = [], torch.optim.AdamW.step

    def step(optimizer, closure=None):
        names, policy, (agent,) = trained_by(optimizer)
        gradients = [p.grad.clone() for p in policy.trained.values()]
        weights = []
        for policy in names["policies"]:
            weights.append([p.data.clone() for p in policy.trained.values()])
        updates.append(Update(agent, names["turns"], gradients, weights))
        return original(optimizer)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    return updates


def slow_logprobs(model, group):
    """log pi of each completion: (G,)."""
    totals = []
    for completion in group.completion_ids:
        P = len(group.prompt_ids)
        ids = torch.tensor([[*group.prompt_ids, *completion]])
        logprobs = model(ids).logits[0, P - 1 : -1].log_softmax(-1)
        totals.append(logprobs.gather(-1, ids[0, P:, None]).sum())
    return torch.stack(totals)


def slow_losses(models, reference, node, args):
    """What DPO loses on each preference of a node, and the likelihood term of each: (pairs,), (pairs,)."""
    logprobs = {i: slow_logprobs(models[i], group) for i, group in node.groups.items()}
    with torch.no_grad():
        reference_logprobs = {i: slow_logprobs(reference, group) for i, group in node.groups.items()}
    losses, likelihoods = [], []
    for better, step in zip(node.joint, node.steps):
        for worse, other in zip(node.joint, node.steps):
            if step.reward - other.reward > 1e-6:  # more than a rounding error
                margin = likelihood = 0.0
                for i, group in node.groups.items():
                    drift = logprobs[i] - reference_logprobs[i]
                    margin += drift[better[i]] - drift[worse[i]]
                    likelihood += logprobs[i][better[i]] / len(group.completion_ids[better[i]])
                right = torch.nn.functional.softplus(-args.beta * margin)
                wrong = torch.nn.functional.softplus(args.beta * margin)
                losses.append((1 - args.label_smoothing) * right + args.label_smoothing * wrong)
                likelihoods.append(args.nll_coef * likelihood)
    return torch.stack(losses), torch.stack(likelihoods)


@pytest.mark.parametrize("flags", ["--num-agents 2", "--num-agents 1", "--label-smoothing 0.2 --nll-coef 0.3"])
def test_the_gradient_is_that_of_joint_dpo(flags, run, updates, model_dir):
    """Fails if an agent, a sign, a last token or a mean is missing in the margin.

    In the second step, where margins are not 0; with so many pairs that all preferences are taken.
    """
    more = f"{flags} --num-pairs 1000 --learning-rate 0.01 --beta 0.5"
    names = run(SCRIPT, *TOY, "--model", model_dir, *more.split())
    N = names["N"]
    second = updates[N:]
    assert len(second) == N
    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    models = []
    for weights in second[0].weights:
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
        for p, weight in zip(model.parameters(), weights):
            p.data.copy_(weight)
        models.append(model)

    all_losses = []
    for node in second[0].turns[0]:
        losses, likelihoods = slow_losses(models, reference, node, names["args"])
        loss = (losses - likelihoods).mean() / 2  # two tasks
        loss.backward()
        all_losses.append(losses)
    for update in second:
        expected = [p.grad for p in models[update.agent].parameters()]
        scale = max(gradient.abs().max() for gradient in expected)
        for ours, slow in zip(update.gradients, expected):
            assert (ours - slow).abs().max() < 1e-4 * scale
    _, first, last = metrics_of(names["run_dir"])
    assert first["train/margin"] == 0
    assert first["train/preference_loss"] == pytest.approx(math.log(2))
    assert last["train/preference_loss"] == pytest.approx(torch.cat(all_losses).mean().item(), rel=1e-3)


def test_it_learns_from_a_file_of_pairs(run, tmp_path):
    """Fails if the answers of a file lose their stop token, or are not learned."""
    path = save_model(tmp_path / "model", stops=(END, STOP))  # END is the lower id, and ends no turn
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "Say a.", "chosen": "ab", "rejected": "ba"}) + "\n")
    flags = "--num-agents 1 --num-iterations 4 --learning-rate 0.002"
    names = run(SCRIPT, *TOY, "--model", path, "--data", pairs, *flags.split())
    ((node, *_),) = names["turns"]
    chosen_ids = node.groups[0].completion_ids[0]
    assert len(chosen_ids) == 3
    assert chosen_ids[-1] == STOP
    metrics = metrics_of(names["run_dir"])
    assert metrics[4]["train/margin"] > 0.01
    assert metrics[4]["train/accuracy"] == 1


def test_a_row_that_is_too_long_is_refused_at_the_start(run, model_dir, tmp_path, capsys):
    """Fails if an answer beyond the model's context is trained on."""
    rows = [{"prompt": "Say a.", "chosen": "ab", "rejected": "ba" * times} for times in (1, 600)]
    (tmp_path / "pairs.json").write_text(json.dumps(rows))
    with pytest.raises(SystemExit):
        run(SCRIPT, *TOY, "--model", model_dir, "--num-agents", 1, "--data", "pairs.json")
    assert "error: --data: shorten row 2" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_it_learns_from_the_training_lines_of_a_run(run, model_dir):
    """Fails if it trains on held-out answers, or reads others than the run wrote."""
    run_dir = run(SCRIPT, *TOY, "--model", model_dir)["run_dir"]
    names = run(SCRIPT, *TOY, "--model", model_dir, "--data", f"{run_dir}/rollouts.jsonl")
    rows = names["rows"]
    assert [row["split"] for row in rows.values()] == ["train"] * 4
    node = names["turns"][0][0]
    line = rows[node.task_number]
    assert node.joint == line["joint"]
    assert [step.reward for step in node.steps] == line["rewards"]
    for i, agent in enumerate(line["agents"]):
        tokenizer = policies_of(names)[i].tokenizer
        ids = node.groups[i].completion_ids
        assert tokenizer.batch_decode(ids, skip_special_tokens=True) == agent["completions"]
