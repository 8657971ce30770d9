"""madpo.py: its pairs, its gradient against DPO written out for each pair in float64, and files of answers."""

import copy
import math
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import END, ROOT, STOP, lines_of, load_policy, metrics_of, save_model, slow_logprobs
from processes import start
from test_faults import EMPTY_THOUGHT, GEMMA, THINKING, with_tokens
from test_sft import NO_END, QUOTED
from torch.nn.functional import softplus
from transformers import AutoModelForCausalLM

import madpo

SCRIPT = ROOT / "madpo.py"
TOY = """
--env toy:Letters --num-generations 3 --num-tasks 2 --max-new-tokens 24 --eval-tasks 1 --max-grad-norm 0
--no-anneal-lr --num-iterations 2
"""
TOY = TOY.split()
PAIR = '{"prompt": "Say a.", "chosen": "ab", "rejected": "ba"}\n'


def test_pairs_are_of_strict_preferences_and_half_differ_in_one_answer():
    """Fails if a pair is of equal returns, turned round or drawn twice, or shows no single answer's worth."""
    joint = np.array(list(product(range(4), repeat=2)))

    def draw(returns, most):
        children = [SimpleNamespace(returns=row, choice=choice) for row, choice in zip(returns, joint)]
        node = SimpleNamespace(weight=1.0, groups={0: None, 1: None}, children=children)
        pairs = madpo.choose_pairs(node, most, False)
        assert sum(pair.weight for pair in pairs) in (pytest.approx(1), 0)
        numbers = []
        for better, worse, *_ in pairs:
            numbers.append(tuple(4 * first.index + second.index for first, second in (better, worse)))
        return numbers

    np.random.seed(0)
    returns = np.tile([0.0, 1.0, 1.0, 3.0], 4) + joint[:, 0]
    pairs = draw(returns[:, None], 12)
    assert len(set(pairs)) == 12
    assert all(returns[better] > returns[worse] for better, worse in pairs)
    differences = [np.count_nonzero(joint[better] != joint[worse]) for better, worse in pairs]
    assert differences[:6] == [1] * 6
    assert 2 in differences
    zero_sum = np.stack([0.1 * returns, 0.2 * returns, -0.3 * returns], 1)
    assert np.ptp(zero_sum.mean(1)) > 0  # rounding errors
    assert draw(zero_sum, 12) == []
    # returns of 0, 1 and 4: in proportion to their differences
    drawn = [draw([[0.0], [1.0], [4.0]], 1)[0] for _ in range(4000)]
    shares = [drawn.count(pair) / 4000 for pair in ((1, 0), (2, 0), (2, 1))]
    assert shares == pytest.approx([1 / 8, 4 / 8, 3 / 8], abs=0.04)


def slow_losses(models, references, root, args):
    """What DPO loses on each preference of a task, and the likelihood term of each: (pairs,), (pairs,)."""
    answers = []  # of each joint answer: its return, log pi - log ref, and the likelihood term
    for first in root.children:
        drift = likelihood = 0.0
        node, child = root, first
        while child:
            for i, group in node.groups.items():
                ids = group.completion_ids[child.choice[i]]
                own = slow_logprobs(models[i], group.prompt_ids, ids).sum()
                drift += own - slow_logprobs(references[i], group.prompt_ids, ids).sum().detach()
                likelihood += args.nll_coef * own / len(ids)
            node, child = child, child.children[0] if child.children else None
        answers.append((first.returns.mean(), drift, likelihood))
    losses, likelihoods = [], []
    for (better, drift, likelihood), (worse, other_drift, _) in product(answers, repeat=2):
        if better - worse > 1e-6:  # more than a rounding error
            margin = args.beta * (drift - other_drift)
            losses.append(softplus(-margin))
            likelihoods.append(likelihood)
    return torch.stack(losses), torch.stack(likelihoods)


FLAGS = """
two models
--num-agents 1
--share-policy --num-agents 3 --batch-size 5
--nll-coef 0.3
--branching trajectories --num-turns 3 --gamma 0.5 --nll-coef 0.3
--branching trajectories --num-turns 3 --env toy:Sequential
"""


@pytest.mark.parametrize("flags", FLAGS.strip().splitlines())
def test_the_gradient_is_that_of_joint_dpo(flags, run, updates, model_dir, tmp_path):
    """Fails if an agent, its own reference, a sign, a last token or a mean is missing in the margin.

    In the second step, where margins are not 0; with so many pairs that all preferences are taken.
    """
    paths = [model_dir]
    if flags == "two models":
        paths.append(save_model(tmp_path / "other", seed=1))
        flags = ""
    more = f"{flags} --num-pairs 1000 --learning-rate 0.01 --beta 0.5"
    names = run(SCRIPT, *TOY, "--model", *paths, *more.split())
    second = updates[len(names["learners"]) :]
    num_agents = len(names["policies"])
    references = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for path in paths] * num_agents
    models = []
    for update, reference in zip(second, references):
        model = copy.deepcopy(reference)
        model.load_state_dict(update.weights)
        models.append(model)
    all_losses = []
    for node in names["turns"][0]:
        losses, likelihoods = slow_losses(models * num_agents, references, node, names["args"])
        loss = (losses - likelihoods).mean() / 2  # two tasks
        loss.backward()
        all_losses.append(losses)
    for model, update in zip(models, second, strict=True):
        expected = {name: p.grad for name, p in model.named_parameters()}
        scale = max(p.abs().max().item() for p in expected.values())
        for name, gradient in update.gradients.items():
            torch.testing.assert_close(gradient.double(), expected[name], rtol=0, atol=1e-4 * scale)
    first = metrics_of(names["run_dir"])[1]
    assert first["preference/loss"] == pytest.approx(math.log(2))  # all margins are 0
    loss = torch.cat(all_losses).mean().item()
    assert names["metrics"]["preference/loss"] == pytest.approx(loss, rel=1e-3)


# ---- --data


def test_it_learns_from_a_file_of_pairs(run, tmp_path):
    """Fails if a file's answers are not learned, are another agent's, or a row that comes twice counts four times."""
    path = save_model(tmp_path / "model", stops=(END, STOP))
    (tmp_path / "pairs.jsonl").write_text(PAIR)
    flags = [*TOY, "--model", path, "--data", "pairs.jsonl", "--num-iterations", 4, "--learning-rate", 0.002]
    with pytest.raises(SystemExit, match="--num-agents"):
        run(SCRIPT, *flags)
    names = run(SCRIPT, *flags, "--num-agents", 1)
    assert names["metrics"]["preference/margin"] > 0.01
    assert names["metrics"]["preference/pairs"] == 1
    # of the only row, in an iteration of two
    (group,) = names["groups"]
    gain, loss = group.advantages
    doubt = 1 - math.exp(-names["metrics"]["preference/loss"])
    assert gain == -loss == pytest.approx(0.5 * 0.1 * doubt)


def test_two_processes_learn_from_a_file_as_one(run, model_dir, tmp_path):
    """Fails if rows weigh more or less in two processes, or both read the same."""
    (tmp_path / "pairs.jsonl").write_text(PAIR + PAIR.replace("Say a.", "Say b."))
    flags = [*TOY, "--model", model_dir, "--data", "pairs.jsonl", "--num-agents", 1, "--num-iterations", 1]
    one = run(SCRIPT, *flags)["run_dir"]
    start(SCRIPT, *flags, "--output-dir", "two", cwd=tmp_path, count=2)
    (two,) = tmp_path.glob("two/*")
    expected, ours = [metrics_of(run_dir)[1]["agent_0/grad_norm"] for run_dir in (one, two)]
    assert ours == pytest.approx(expected, rel=1e-4)


ANSWERS = [  # chat template, an answer of a file, and what is trained
    (EMPTY_THOUGHT, QUOTED, f"{QUOTED}<|im_end|>"),
    (EMPTY_THOUGHT, f"{QUOTED}<|im_end|>", f"{QUOTED}<|im_end|>"),
    (EMPTY_THOUGHT, f"{QUOTED}<|im_end|>\n<|endoftext|>", f"{QUOTED}<|im_end|>"),
    (EMPTY_THOUGHT, "cut off", "cut off"),
    (EMPTY_THOUGHT, "", "<|im_end|>"),
    (THINKING, "<think>a</think>b", "a</think>b<|im_end|>"),  # the prompt has opened the thought
    (GEMMA, "a", "a<end_of_turn>"),
    (NO_END, "a", "a<|im_end|>"),
    (None, "a", "a<|im_end|>"),
]


@pytest.mark.parametrize("template, answer, trained", ANSWERS)
def test_an_answer_of_a_file_is_trained_as_it_is(template, answer, trained, tmp_path):
    """Fails if a mark, a thought or an ordinary pad is broken up, or an answer has no end, two, or one of its own."""
    names = ["<think>", "</think>", "<tool_call>", "<start_of_turn>", "<end_of_turn>"]
    tokenizer = with_tokens(*names, template=template)
    tokenizer.pad_token = "!"
    path = save_model(tmp_path / "m", tokenizer=tokenizer, vocab_size=len(tokenizer), stops=[STOP])
    policy = load_policy(madpo, path)
    group = madpo.read_group(policy, "p", [answer], [answer not in ("cut off", "")])
    assert policy.tokenizer.batch_decode(group.completion_ids) == [trained]


@pytest.mark.parametrize("flags", ["", "--env toy:SelfishInTurn --num-turns 2", "--share-policy --num-agents 3"])
def test_it_learns_from_the_training_lines_of_a_run(flags, run, model_dir):
    """Fails if it trains on held-out answers, or reads others, or other rewards, than the run wrote."""
    flags = [*TOY, "--model", model_dir, "--max-new-tokens", 8, *flags.split()]
    run_dir = run(SCRIPT, *flags)["run_dir"]
    names = run(SCRIPT, *flags, "--data", f"{run_dir}/rollouts.jsonl")
    lines = [line for line in lines_of(run_dir) if line["split"] == "train"]
    for node, line in zip(names["train_tasks"], lines, strict=True):
        assert [child.returns.mean() for child in node.children] == [np.mean(reward) for reward in line["rewards"]]
        assert [child.choice for child in node.children] == line["joint"]
        assert list(node.groups) == [i for i, agent in enumerate(line["agents"]) if agent]
        for i, group in node.groups.items():
            texts = group.policy.tokenizer.batch_decode(group.completion_ids)
            agent = line["agents"][i]
            expected = []
            for completion, stopped in zip(agent["completions"], agent["stopped"]):
                expected.append(completion + "<|im_end|>" * stopped)
            assert texts == expected
    assert names["metrics"]["preference/pairs"] > 0
