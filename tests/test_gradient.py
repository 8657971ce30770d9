"""The loss and its gradient, end to end: a script's own update against the slow, obvious one.

The reference knows nothing of rows, packing, batches or masks: it takes one completion at a time behind its prompt,
in float64, sums the log-probabilities of its tokens, and weighs them with the chance of that completion.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import CRITIC_FREE, STOP, make_tokenizer, names_of_script, save_model
from transformers import AutoModelForCausalLM, Gemma2ForCausalLM, GraniteForCausalLM, MistralForCausalLM

TOY = ("--env", "toy:Letters", "--num-iterations", 1, "--num-generations", 3, "--num-tasks", 2, "--max-new-tokens", 24)
TOY = (*TOY, "--max-grad-norm", 1e9, "--eval-tasks", 1)


@pytest.fixture
def updates(monkeypatch):
    """Gradients of each policy at its optimizer steps, with the rollout that made them; no step is taken."""
    seen = []

    def step(optimizer, closure=None):
        names = names_of_script()
        gradients = [p.grad.clone() for group in optimizer.param_groups for p in group["params"]]
        seats = [k for k, player in enumerate(names["agents"]) if player is names["agent"]]
        seen.append((seats, names["turns"], gradients))

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    return seen


def advantages_of(script, returns):
    """The script's algorithm block, run on `returns`."""
    block = script.read_text().split("# >>> ALGORITHM\n")[1].split("# <<< ALGORITHM")[0]
    names = {"returns": returns, "np": np}
    exec("\n".join(line.strip() for line in block.splitlines()), names)
    return names["advantages"]


def slow_gradient(script, model, seats, turns, gamma, temperature, max_new_tokens):
    """The loss of a policy that plays these seats, and its gradients."""
    loss = torch.zeros((), dtype=torch.float64)

    def visit(node, chance, discount):
        nonlocal loss
        for group in (node.groups[k] for k in seats if k in node.groups):
            advantages = advantages_of(script, group.returns)
            for completion, advantage in zip(group.completion_ids, advantages.tolist()):
                ids = torch.tensor([[*group.prompt_ids, *completion]])
                logprobs = (model(ids).logits[0] / temperature).log_softmax(-1)
                total = sum(logprobs[len(group.prompt_ids) + k - 1, token] for k, token in enumerate(completion))
                loss = loss - chance * discount / len(advantages) * advantage * total / max_new_tokens
        for child in node.children:
            if child is not None:
                visit(child, chance / len(node.joint), discount * gamma)

    for node in turns[0]:
        visit(node, 1 / len(turns[0]), 1.0)
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return loss.item(), gradients


def check(seen, script, model_dirs, gamma=1.0, temperature=1.0, max_new_tokens=24):
    """Compares gradients, and returns what is to be logged: a loss and a norm for each."""
    logged = []
    for seats, turns, gradients in seen:
        path = model_dirs[seats[0] % len(model_dirs)]
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
        loss, expected = slow_gradient(script, model, seats, turns, gamma, temperature, max_new_tokens)
        logged.append((loss, torch.cat([g.flatten() for g in expected]).norm().item()))
        scale = max(g.abs().max() for g in expected)
        assert scale > 1e-4
        for ours, theirs in zip(gradients, expected):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=3e-5 * float(scale))
    return logged


@pytest.mark.parametrize(  # all scripts with the first, for their advantages; what else there is they share
    "script, flags",
    [
        *((script, ("--num-turns", 2, "--gamma", 0.5)) for script in CRITIC_FREE),
        (CRITIC_FREE[0], ("--num-turns", 3, "--gamma", 0.5, "--num-generations", 2)),
        (CRITIC_FREE[0], ("--num-turns", 2, "--joint-mode", "cross", "--num-agents", 2)),
        (CRITIC_FREE[0], ("--temperature", 0.7, "--num-agents", 3)),
        (CRITIC_FREE[0], ("--max-batch-tokens", 1)),
        (CRITIC_FREE[0], ("--share-policy", "--num-turns", 2, "--max-batch-tokens", 150)),
        *((script, ("--env", "toy:Sequential", "--num-turns", 2, "--gamma", 0.5)) for script in CRITIC_FREE),
        (CRITIC_FREE[0], ("--env", "toy:Sequential", "--num-turns", 3, "--joint-mode", "cross", "--share-policy")),
        (CRITIC_FREE[0], ("--env", "toy:Selfish", "--num-turns", 2, "--joint-mode", "cross", "--gamma", 0.5)),
        (CRITIC_FREE[0], ("--env", "toy:SelfishInTurn", "--num-turns", 3, "--share-policy", "--gamma", 0.5)),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else value.stem,
)
def test_gradient_is_the_slow_one(script, flags, run, updates, model_dir):
    """A wrong weight, discount, credit, mask, slice or seat: any of them changes a gradient."""
    names = run(script, *TOY, "--model", model_dir, *flags)
    options = dict(pairwise(flags))
    logged = check(updates, script, [model_dir], options.get("--gamma", 1.0), options.get("--temperature", 1.0))
    assert len(updates) == len(names["policies"]) == (1 if "--share-policy" in flags else names["N"])
    for i, (loss, grad_norm) in enumerate(logged):
        assert names["metrics"][f"agent_{i}/loss"] == pytest.approx(loss, rel=1e-3, abs=1e-5)
        assert names["metrics"][f"agent_{i}/grad_norm"] == pytest.approx(grad_norm, rel=1e-3)
    groups = [group for _, turns, _ in updates for nodes in turns for node in nodes for group in node.groups.values()]
    ends = {ids[-1] for group in groups for ids in group.completion_ids}
    assert ends & {STOP, *range(10, 30)}  # the case of a trained stop token did occur


@pytest.mark.parametrize(
    "options",
    [
        {"tokenizer": make_tokenizer(pad="<|im_end|>")},
        {"tokenizer": make_tokenizer(chat_template=None)},
        {"tokenizer": make_tokenizer("<|im_start|><|endoftext|>{{ messages[0].content }}<|im_end|>c")},
        {"stops": [STOP]},
        {"attention_dropout": 0.5},
        {"tie_word_embeddings": True},
        {"model_class": MistralForCausalLM, "sliding_window": 20},
        {"model_class": GraniteForCausalLM, "logits_scaling": 3.0},
        {"model_class": Gemma2ForCausalLM, "sliding_window": 20, "head_dim": 8, "final_logit_softcapping": 2.0},
    ],
    ids=lambda options: " ".join(options),
)
def test_gradient_of_other_models(options, run, updates, tmp_path):
    """A prompt cut at its own pad or stop token, dropout, a window that the cache does not keep, scaled logits."""
    path = save_model(tmp_path / "model", **options)
    run(CRITIC_FREE[0], *TOY, "--model", path, "--num-turns", 2)
    check(updates, CRITIC_FREE[0], [path])


def test_gradient_with_different_models(run, updates, tmp_path):
    """An agent that is trained with another one's model or stop tokens."""
    other = {"seed": 1, "vocab_size": 300, "num_hidden_layers": 1, "stops": range(10, 30)}
    paths = [save_model(tmp_path / "a"), save_model(tmp_path / "b", **other)]
    names = run(CRITIC_FREE[0], *TOY, "--model", *paths)
    check(updates, CRITIC_FREE[0], paths)
    assert STOP in names["agents"][1].stop_ids  # by its tokenizer alone


def test_equal_rewards_leave_no_gradient(run, updates, model_dir, monkeypatch):
    """Rounding errors of equal returns, which Adam would blow up to whole steps."""
    from toy import Letters, Step

    pay = lambda branch, branches: 0.7 if branch[0] == branches[0][0] else 0.9  # the mean of three is another number
    equal = lambda self, branches: [Step(b[2], pay(b, branches), {}, False) for b in branches]
    monkeypatch.setattr(Letters, "step", equal)
    for script in (path for path in CRITIC_FREE if path.stem != "mareinforce"):
        names = run(script, *TOY, "--model", model_dir, "--joint-mode", "align")
        assert names["metrics"]["train/zero_variance_groups"] == 1
    assert len(updates) == 6
    assert all(gradient.abs().max() == 0 for _, _, gradients in updates for gradient in gradients)
