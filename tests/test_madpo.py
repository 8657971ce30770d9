"""madpo.py: its pairs, and its loss and gradient against DPO written out for each pair, in float64."""

import json
import math
import runpy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import END, ROOT, STOP, metrics_of, names_of_script, save_model
from transformers import AutoModelForCausalLM

SCRIPT = ROOT / "madpo.py"
TOY = ("--env", "toy:Letters", "--num-generations", 3, "--num-tasks", 2, "--max-new-tokens", 24, "--eval-tasks", 1)
TOY = (*TOY, "--max-grad-norm", 1e9, "--no-anneal-lr")


def test_pairs_are_of_strict_preferences_and_half_differ_in_one_answer():
    """Pairs of equal returns, turned round, drawn twice, or without what one agent's answer was worth."""
    choose_pairs = runpy.run_path(str(SCRIPT))["choose_pairs"]
    joint = np.array([(a, b) for a in range(4) for b in range(4)])
    returns = np.array([0.0, 1.0, 1.0, 3.0] * 4) + joint[:, 0]
    np.random.seed(0)
    better, worse = choose_pairs(joint, returns, 12)
    assert (returns[better] > returns[worse]).all() and len({*zip(better, worse)}) == 12
    differ = (joint[better] != joint[worse]).sum(1)
    assert (differ[:6] == 1).all() and (differ == 2).any()
    assert [len(part) for part in choose_pairs(joint, np.ones(16), 12)] == [0, 0]


@pytest.fixture
def updates(monkeypatch):
    """The gradients, the tree and all weights at each optimizer step, which is taken."""
    seen, original = [], torch.optim.AdamW.step

    def step(optimizer, closure=None):
        names = names_of_script()
        gradients = [p.grad.clone() for p in names["agent"].trained.values()]
        weights = [[p.data.clone() for p in agent.trained.values()] for agent in names["policies"]]
        seen.append(SimpleNamespace(turns=names["turns"], gradients=gradients, weights=weights))
        return original(optimizer)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    return seen


def likelihood(path, weights, group, g):
    """log pi of one completion, in float64, and the model."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    for p, value in zip(model.parameters(), weights or model.parameters()):
        p.data = value.data.double()
    prompt, ids = group.prompt_ids, group.completion_ids[g]
    logprobs = model(torch.tensor([[*prompt, *ids]])).logits[0].log_softmax(-1)
    return sum(logprobs[len(prompt) + k - 1, token] for k, token in enumerate(ids)), model


@pytest.mark.parametrize("agents, more", [(2, ()), (1, ()), (2, ("--label-smoothing", 0.2, "--nll-coef", 0.3))])
def test_the_gradient_is_that_of_joint_dpo(agents, more, run, updates, model_dir, monkeypatch):
    """A missing agent in the margin, a sign, a last token, a mean; the second step, where margins are not 0."""
    flags = ("--model", model_dir, "--num-agents", agents, "--num-iterations", 2, "--num-pairs", 4, *more)
    pairs, original = [], np.divmod  # choose_pairs ends with it
    monkeypatch.setattr(np, "divmod", lambda *args: pairs.append(original(*args)) or pairs[-1])
    names = run(SCRIPT, *TOY, *flags, "--learning-rate", 0.01, "--beta", 0.5)
    args = names["args"]
    assert len(pairs) == 4 and len(updates) == 2 * agents
    for i, seen in enumerate(updates[agents:]):
        total, expected = 0.0, [torch.zeros_like(p, dtype=torch.float64) for p in seen.gradients]
        for node, (better, worse) in zip(seen.turns[0], pairs[2:]):
            for w, z in zip(better, worse):
                values = {}  # agent, completion -> log pi, log ref
                for k, group in node.groups.items():
                    weights = updates[agents].weights[k]
                    for j in (w, z):
                        own, model = likelihood(model_dir, weights, group, node.joint[j][k])
                        values[k, j] = own, likelihood(model_dir, None, group, node.joint[j][k])[0].detach(), model
                m = sum(values[k, w][0] - values[k, w][1] - values[k, z][0] + values[k, z][1] for k in node.groups)
                right, wrong = (torch.nn.functional.softplus(sign * args.beta * m) for sign in (-1, 1))
                loss = (1 - args.label_smoothing) * right + args.label_smoothing * wrong
                total += loss.item() / len(better) / 2
                for k, group in node.groups.items():
                    loss = loss - args.nll_coef * values[k, w][0] / len(group.completion_ids[node.joint[w][k]])
                (loss / len(better) / 2).backward()
                for j in (w, z):
                    for p, sum_of in zip(values[i, j][2].parameters(), expected):
                        sum_of += p.grad
        scale = max(p.abs().max() for p in expected)
        assert all((a - b).abs().max() < 1e-4 * scale for a, b in zip(seen.gradients, expected))
    lines = metrics_of(names["run_dir"])
    assert lines[1]["train/margin"] == 0
    assert lines[1]["train/preference_loss"] == pytest.approx(math.log(2))
    assert lines[2]["train/preference_loss"] == pytest.approx(total, rel=1e-3)


def test_it_learns_from_a_file_and_never_from_evaluations(run, model_dir, tmp_path):
    """Held-out answers in training; a stop token that is lost; answers of a silent agent."""
    path = save_model(tmp_path / "model", stops=(END, STOP))  # END is the lower id, and ends no turn
    flags = ("--model", path, *TOY, "--num-iterations", 4, "--learning-rate", 0.002)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "Say a.", "chosen": "ab", "rejected": "ba"}) + "\n")
    names = run(SCRIPT, *flags, "--num-agents", 1, "--data", rows)
    lines = metrics_of(names["run_dir"])
    assert names["turns"][0][0].groups[0].completion_ids[0][-1] == STOP
    assert lines[1]["train/chosen_length"] == 3
    assert lines[4]["train/margin"] > 0.01 and lines[4]["train/accuracy"] == 1
    ours = run(SCRIPT, "--model", model_dir, *TOY, "--num-iterations", 2)
    names = run(SCRIPT, *flags, "--data", f"{ours['run_dir']}/rollouts.jsonl")
    assert [line["split"] for line in names["train_tasks"]] == ["train"] * 4
    again, group = names["turns"][0][0], names["tasks"][0]
    assert [again.joint, [step.reward for step in again.steps]] == [group["joint"], group["rewards"]]
    for i, said in enumerate(group["agents"]):
        texts = names["agents"][i].tokenizer.batch_decode(again.groups[i].completion_ids, skip_special_tokens=True)
        assert texts == said["completions"]
