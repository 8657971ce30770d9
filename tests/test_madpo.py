"""madpo.py: its pairs, and its loss and gradient against DPO written out for each pair, in float64."""

import copy
import math
import runpy
from itertools import product

import numpy as np
import pytest
import torch
from conftest import END, ROOT, STOP, lines_of, metrics_of, policies_of, save_model, slow_logprobs
from torch.nn.functional import softplus
from transformers import AutoModelForCausalLM

SCRIPT = ROOT / "madpo.py"
TOY = "--env toy:Letters --num-generations 3 --num-tasks 2 --max-new-tokens 24 --eval-tasks 1 --max-grad-norm 1e9"
PAIR = '{"prompt": "Say a.", "chosen": "ab", "rejected": "ba"}\n'
TOY = f"{TOY} --no-anneal-lr --num-iterations 2".split()


def test_pairs_are_of_strict_preferences_and_half_differ_in_one_answer():
    """Fails if a pair is of equal returns, turned round or drawn twice, or shows no single answer's worth."""
    choose_pairs = runpy.run_path(str(SCRIPT))["choose_pairs"]
    joint = np.array(list(product(range(4), repeat=2)))
    returns = np.tile([0.0, 1.0, 1.0, 3.0], 4) + joint[:, 0]
    np.random.seed(0)
    better, worse = choose_pairs(joint, returns[:, None], 12)
    assert (returns[better] > returns[worse]).all()
    assert len(set(zip(better, worse))) == 12
    differences = (joint[better] != joint[worse]).sum(1)
    assert (differences[:6] == 1).all()
    assert (differences == 2).any()
    zero_sum = np.stack([returns, -2 * returns, returns], 1) / 3  # means are rounding errors
    for equal in np.ones((16, 2)), zero_sum:
        better, worse = choose_pairs(joint, equal, 12)
        assert len(better) == len(worse) == 0


def slow_losses(models, reference, root, args):
    """What DPO loses on each preference of a task, and the likelihood term of each: (pairs,), (pairs,)."""
    answers = []  # of each joint answer: its return, log pi - log ref, and the likelihood term
    for j, joint_return in enumerate(root.returns.mean(1)):
        drift = likelihood = 0.0
        node = root
        while node:
            for i, group in node.groups.items():
                ids = group.completion_ids[node.joint[j][i]]
                own = slow_logprobs(models[i], group.prompt_ids, ids).sum()
                drift += own - slow_logprobs(reference, group.prompt_ids, ids).sum().detach()
                likelihood += args.nll_coef * own / len(ids)
            node = node.children[j]
            j = 0
        answers.append((joint_return, drift, likelihood))
    losses, likelihoods = [], []
    for (better, drift, likelihood), (worse, other_drift, _) in product(answers, repeat=2):
        if better - worse > 1e-6:  # more than a rounding error
            margin = args.beta * (drift - other_drift)
            smoothing = args.label_smoothing
            losses.append((1 - smoothing) * softplus(-margin) + smoothing * softplus(margin))
            likelihoods.append(likelihood)
    return torch.stack(losses), torch.stack(likelihoods)


FLAGS = """
--num-agents 2
--num-agents 1
--label-smoothing 0.2 --nll-coef 0.3
--branching trajectories --num-turns 3 --gamma 0.5 --nll-coef 0.3
--branching trajectories --num-turns 3 --env toy:Sequential
"""


@pytest.mark.parametrize("flags", FLAGS.strip().splitlines())
def test_the_gradient_is_that_of_joint_dpo(flags, run, steps, model_dir):
    """Fails if an agent, a sign, a last token or a mean is missing in the margin.

    In the second step, where margins are not 0; with so many pairs that all preferences are taken.
    """
    more = f"{flags} --num-pairs 1000 --learning-rate 0.01 --beta 0.5"
    names = run(SCRIPT, *TOY, "--model", model_dir, *more.split())
    second = steps[names["N"] :]
    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    models = []
    for update in second:
        model = copy.deepcopy(reference)
        model.load_state_dict(update.weights)
        models.append(model)
    all_losses = []
    for node in names["turns"][0]:
        losses, likelihoods = slow_losses(models, reference, node, names["args"])
        loss = (losses - likelihoods).mean() / 2  # two tasks
        loss.backward()
        all_losses.append(losses)
    for model, update in zip(models, second):
        expected = {name: p.grad for name, p in model.named_parameters()}
        scale = max(p.abs().max().item() for p in expected.values())
        for name, gradient in update.gradients.items():
            torch.testing.assert_close(gradient.double(), expected[name], rtol=0, atol=1e-4 * scale)
    first = metrics_of(names["run_dir"])[1]
    assert first["train/preference_loss"] == pytest.approx(math.log(2))  # all margins are 0
    loss = torch.cat(all_losses).mean().item()
    assert names["metrics"]["train/preference_loss"] == pytest.approx(loss, rel=1e-3)


def test_it_learns_from_a_file_of_pairs(run, tmp_path):
    """Fails if the answers of a file lose their stop token, or are not learned."""
    path = save_model(tmp_path / "model", stops=(END, STOP))  # END is the lower id, and ends no turn
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(PAIR)
    flags = "--num-agents 1 --num-iterations 4 --learning-rate 0.002"
    names = run(SCRIPT, *TOY, "--model", path, "--data", pairs, *flags.split())
    ((node, *_),) = names["turns"]
    (chosen_ids, _) = node.groups[0].completion_ids
    assert len(chosen_ids) == 3
    assert chosen_ids[-1] == STOP
    assert names["metrics"]["train/margin"] > 0.01


def test_a_row_that_is_too_long_is_refused_at_the_start(run, model_dir, tmp_path, capsys):
    """Fails if an answer beyond the model's context is trained on."""
    (tmp_path / "pairs.jsonl").write_text(PAIR + PAIR.replace("ba", "ba" * 600))
    flags = "--num-agents 1 --data pairs.jsonl"
    with pytest.raises(SystemExit):
        run(SCRIPT, *TOY, "--model", model_dir, *flags.split())
    assert "error: --data: shorten row 2" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_it_learns_from_the_training_lines_of_a_run(run, model_dir):
    """Fails if it trains on held-out answers, or reads others than the run wrote."""
    run_dir = run(SCRIPT, *TOY, "--model", model_dir)["run_dir"]
    names = run(SCRIPT, *TOY, "--model", model_dir, "--data", f"{run_dir}/rollouts.jsonl")
    assert [row["split"] for row in names["rows"].values()] == ["train"] * 4
    node, *_ = names["turns"][0]
    line = lines_of(run_dir)[node.task_number - 1]
    assert [step.reward for step in node.steps] == line["rewards"]
    for i, policy in enumerate(policies_of(names)):
        ids = node.groups[i].completion_ids
        completions = policy.tokenizer.batch_decode(ids, skip_special_tokens=True)
        assert completions == line["agents"][i]["completions"]
