"""madpo.py: its pairs, its gradient against DPO written out for each pair in float64, and files of answers."""

import copy
import math
from itertools import product

import numpy as np
import pytest
import test_faults
import torch
from conftest import CHAT, END, ROOT, STOP, lines_of, load_policy, metrics_of, policies_of, save_model, slow_logprobs
from test_faults import GEMMA, both_branchings, with_tokens
from torch.nn.functional import softplus
from toy import Letters, Step
from transformers import AutoModelForCausalLM

import madpo

SCRIPT = ROOT / "madpo.py"
TOY = "--env toy:Letters --num-generations 3 --num-tasks 2 --max-new-tokens 24 --eval-tasks 1 --max-grad-norm 0"
PAIR = '{"prompt": "Say a.", "chosen": "ab", "rejected": "ba"}\n'
TOY = f"{TOY} --no-anneal-lr --num-iterations 2".split()


def test_pairs_are_of_strict_preferences_and_half_differ_in_one_answer():
    """Fails if a pair is of equal returns, turned round or drawn twice, or shows no single answer's worth."""
    joint = np.array(list(product(range(4), repeat=2)))
    answers = [[(0, None, first), (1, None, second)] for first, second in joint]

    def draw(returns, most):
        node = madpo.Node(0, {}, [], [], 1.0, returns=returns)
        pairs = madpo.choose_pairs(node, answers, most)
        assert sum(pair.weight for pair in pairs) in (pytest.approx(1), 0)
        return [(answers.index(pair.better), answers.index(pair.worse)) for pair in pairs]

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
    for equal in np.ones((16, 2)), zero_sum:
        assert draw(equal, 12) == []
    # returns of 0, 1 and 4: in proportion to their differences
    drawn = [draw(np.array([[0.0], [1.0], [4.0]]), 1)[0] for _ in range(4000)]
    shares = [drawn.count(pair) / 4000 for pair in ((1, 0), (2, 0), (2, 1))]
    assert shares == pytest.approx([1 / 8, 4 / 8, 3 / 8], abs=0.04)


def slow_losses(models, references, root, args):
    """What DPO loses on each preference of a task, and the likelihood term of each: (pairs,), (pairs,)."""
    answers = []  # of each joint answer: its return, log pi - log ref, and the likelihood term
    for j, joint_return in enumerate(root.returns.mean(1)):
        drift = likelihood = 0.0
        node = root
        while node:
            for i, group in node.groups.items():
                ids = group.completion_ids[node.joint[j][i]]
                own = slow_logprobs(models[i], group.prompt_ids, ids).sum()
                drift += own - slow_logprobs(references[i], group.prompt_ids, ids).sum().detach()
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
two models
--num-agents 1
--share-policy --num-agents 3 --batch-size 5
--label-smoothing 0.2 --nll-coef 0.3
--branching trajectories --num-turns 3 --gamma 0.5 --nll-coef 0.3
--branching trajectories --num-turns 3 --env toy:Sequential
"""


@pytest.mark.parametrize("flags", FLAGS.strip().splitlines())
def test_the_gradient_is_that_of_joint_dpo(flags, run, steps, model_dir, tmp_path):
    """Fails if an agent, its own reference, a sign, a last token or a mean is missing in the margin.

    In the second step, where margins are not 0; with so many pairs that all preferences are taken.
    """
    paths = [model_dir]
    if flags == "two models":
        paths.append(save_model(tmp_path / "other", seed=1))
        flags = ""
    more = f"{flags} --num-pairs 1000 --learning-rate 0.01 --beta 0.5"
    names = run(SCRIPT, *TOY, "--model", *paths, *more.split())
    second = steps[len(names["policies"]) :]
    references = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for path in paths] * names["N"]
    models = []
    for update, reference in zip(second, references):
        model = copy.deepcopy(reference)
        model.load_state_dict(update.weights)
        models.append(model)
    all_losses = []
    for node in names["turns"][0]:
        losses, likelihoods = slow_losses(models * names["N"], references, node, names["args"])
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


@both_branchings
def test_without_pairs_there_is_no_step(branching, run, steps, model_dir):
    """Fails if momentum moves weights where all returns are equal, or a mean over no pairs ends the run."""
    test_faults.Silent.calls, test_faults.Silent.size = 0, 1.0
    flags = ["--env", "test_faults:Silent", "--branching", branching, "--model", model_dir]
    names = run(SCRIPT, *test_faults.TOY, *flags)
    assert len(steps) == 2  # one of each agent, in the first iteration
    pairs = [line["preference/pairs"] > 0 for line in metrics_of(names["run_dir"])[1:]]
    assert pairs == [True, False, False]


@both_branchings
def test_completions_that_are_all_alike_move_nothing(branching, run, steps, model_dir, monkeypatch):
    """Fails if rounding errors of equal completions, which sum to 0, are a gradient."""
    monkeypatch.setattr(torch, "rand_like", lambda x: torch.full_like(x, 0.5))
    flags = ["--env", "test_faults:Same", "--branching", branching, "--model", model_dir]
    names = run(SCRIPT, *test_faults.TOY, *flags)
    assert steps == []
    assert metrics_of(names["run_dir"])[1]["preference/pairs"] > 0


def test_a_return_that_is_nan_ends_the_run(run, steps, model_dir):
    """Fails if it is a preference, or passed by in silence."""
    with pytest.raises(SystemExit, match="train/return is nan"):
        run(SCRIPT, *test_faults.TOY, "--env", "test_faults:Broken", "--num-pairs", 3, "--model", model_dir)
    assert steps == []


# ---- --data


def test_it_learns_from_a_file_of_pairs(run, tmp_path):
    """Fails if the answers of a file are not learned, or a row that comes twice in an iteration counts four times."""
    path = save_model(tmp_path / "model", stops=(END, STOP))
    (tmp_path / "pairs.jsonl").write_text(PAIR)
    flags = "--num-agents 1 --num-iterations 4 --learning-rate 0.002 --data pairs.jsonl"
    names = run(SCRIPT, *TOY, "--model", path, *flags.split())
    assert names["metrics"]["preference/margin"] > 0.01
    assert names["metrics"]["preference/pairs"] == 1
    # of the only row, in an iteration of two
    (group,) = names["groups"]
    gain, loss = group.advantages
    doubt = 1 - math.exp(-names["metrics"]["preference/loss"])
    assert gain == -loss == pytest.approx(0.5 * 0.1 * doubt)


def read_group(tokenizer, tmp_path, *completions, **record):
    """The Group of an agent's record, and what its token ids say."""
    path = save_model(tmp_path / "m", tokenizer=tokenizer, vocab_size=len(tokenizer), stops=[STOP])
    policy = load_policy(madpo, path)
    record = {"prompt": "p", "completions": completions, "stopped": [True] * len(completions)} | record
    group = madpo.read_group(policy, **record)
    return policy.tokenizer.decode(group.prompt_ids), policy.tokenizer.batch_decode(group.completion_ids)


def test_an_answer_of_a_file_is_trained_as_it_is(tmp_path):
    """Fails if a mark, a thought or an ordinary pad is broken up, or an answer has no end, two, or one of its own."""
    tokenizer = with_tokens("<think>", "</think>", "<tool_call>", template=test_faults.EMPTY_THOUGHT)
    tokenizer.pad_token = "!"
    text = "<think>a != b</think><tool_call>"
    answers = [text, f"{text}<|im_end|>", f"{text}<|im_end|>\n", f"{text}<|im_end|>\n<|endoftext|>"]
    _, texts = read_group(tokenizer, tmp_path, *answers)
    assert texts == [f"{text}<|im_end|>"] * 4
    _, texts = read_group(tokenizer, tmp_path, "cut off", "", stopped=[False, False])
    assert texts == ["cut off", "<|im_end|>"]


@pytest.mark.parametrize(
    "template, end",
    [(GEMMA, "<end_of_turn>"), (CHAT.replace("<|im_end|>", ""), "<|im_end|>"), (None, "<|im_end|>")],
)
def test_an_answer_ends_as_in_the_chat_template(template, end, tmp_path):
    """Fails if it ends in eos where the template has another token, as Gemma's, or in nothing where it has none."""
    _, (text,) = read_group(with_tokens("<start_of_turn>", "<end_of_turn>", template=template), tmp_path, "a")
    assert text == f"a{end}"


def test_a_thought_that_the_template_opened_is_opened_once(tmp_path):
    """Fails if answers that a run has logged are trained with a second <think>."""
    template = CHAT.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    prompt, (text,) = read_group(with_tokens("<think>", template=template), tmp_path, "<think>a</think>b")
    assert prompt.endswith("<think>\n")
    assert text == "a</think>b<|im_end|>"


def test_the_number_of_agents_in_a_file_is_checked_at_the_start(run, model_dir, tmp_path):
    """Fails if answers of one agent are trained into another, or the evaluation comes first."""
    (tmp_path / "pairs.jsonl").write_text(PAIR)
    with pytest.raises(SystemExit, match="--num-agents"):
        run(SCRIPT, *TOY, "--model", model_dir, "--data", "pairs.jsonl")
    assert not (tmp_path / "runs").exists()


class Mixed(Letters):
    """The second agent is silent in the first turn; with two, each has a reward of its own."""

    def observe(self, task, history):
        prompts = super().observe(task, history)
        return prompts if history else [prompts[0], *[None] * (self.num_agents - 1)]

    def step(self, branches):
        steps = []
        for _, _, actions in branches:
            lengths = [len(text) / 10 for text in actions]
            reward = lengths if self.num_agents == 2 else lengths[0]
            steps.append(Step(actions, reward, {}, done=False))
        return steps


@pytest.mark.parametrize("flags", ["", "--env test_madpo:Mixed --num-turns 2", "--share-policy --num-agents 3"])
def test_it_learns_from_the_training_lines_of_a_run(flags, run, model_dir):
    """Fails if it trains on held-out answers, or reads others, or other rewards, than the run wrote."""
    flags = [*TOY, "--model", model_dir, "--max-new-tokens", 8, *flags.split()]
    run_dir = run(SCRIPT, *flags)["run_dir"]
    names = run(SCRIPT, *flags, "--data", f"{run_dir}/rollouts.jsonl")
    lines = [line for line in lines_of(run_dir) if line["split"] == "train"]
    for node, line in zip(names["train_tasks"], lines, strict=True):
        rewards = np.array(line["rewards"])
        assert node.returns.mean(1).tolist() == (rewards.mean(1) if rewards.ndim == 2 else rewards).tolist()
        assert node.joint == line["joint"]
        assert list(node.groups) == [i for i, agent in enumerate(line["agents"]) if agent]
        for i, group in node.groups.items():
            texts = policies_of(names)[i].tokenizer.batch_decode(group.completion_ids)
            agent = line["agents"][i]
            stored = zip(agent["completions"], agent["stopped"])
            assert texts == [text + "<|im_end|>" * stopped for text, stopped in stored]
    assert names["metrics"]["preference/pairs"] > 0
