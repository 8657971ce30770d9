"""The loss and its gradient, end to end: a script's own update against the slow, obvious one.

The reference knows nothing of rows, packing, batches or masks: it takes one completion at a time behind its prompt,
in float64, sums the log-probabilities of its tokens, and weighs them with the chance of that completion.
"""

import sys

import pytest
import torch
from conftest import CRITIC_FREE, END, ROOT, START, STOP, make_tokenizer, save_model
from transformers import AutoModelForCausalLM, Lfm2ForCausalLM, MistralForCausalLM


@pytest.fixture
def updates(monkeypatch):
    """Gradients of each agent at its optimizer steps, with the rollout that made them; no step is taken."""
    seen = []

    def step(optimizer, closure=None):
        frame = sys._getframe(1)
        while "turns" not in frame.f_globals:  # torch wraps step()
            frame = frame.f_back
        names = frame.f_globals
        gradients = [p.grad.clone() for group in optimizer.param_groups for p in group["params"]]
        seen.append((names["i"], names["turns"], gradients))

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    return seen


def advantages_of(script, returns):
    """The script's algorithm block, run on `returns`."""
    block = script.read_text().split("# >>> ALGORITHM\n")[1].split("# <<< ALGORITHM")[0]
    names = {"returns": returns, "torch": torch}
    exec("\n".join(line.strip() for line in block.splitlines()), names)
    return names["advantages"]


def slow_gradient(script, model, i, turns, gamma, temperature, max_new_tokens):
    """The loss and its gradients."""
    loss = 0.0

    def visit(node, chance, discount):
        nonlocal loss
        group = node.groups[i]
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
    for i, turns, gradients in seen:
        model = AutoModelForCausalLM.from_pretrained(model_dirs[i % len(model_dirs)], dtype=torch.float64)
        loss, expected = slow_gradient(script, model, i, turns, gamma, temperature, max_new_tokens)
        logged.append((loss, torch.cat([g.flatten() for g in expected]).norm().item()))
        scale = max(g.abs().max() for g in expected)
        assert scale > 1e-4
        for ours, theirs in zip(gradients, expected):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-5 * float(scale))
    return logged


TOY = ("--env", "toy:Letters", "--num-iterations", 1, "--num-generations", 3, "--num-tasks", 2, "--max-new-tokens", 24)
TOY = (*TOY, "--max-grad-norm", 1e9, "--eval-tasks", 1)


@pytest.mark.parametrize(  # all scripts with the first, for their advantages; what else there is they share
    "script, flags",
    [
        *((script, ("--num-turns", 2, "--gamma", 0.5)) for script in CRITIC_FREE),
        (CRITIC_FREE[0], ("--num-turns", 3, "--gamma", 0.5, "--num-generations", 2)),
        (CRITIC_FREE[0], ("--num-iterations", 2)),
        (CRITIC_FREE[0], ("--num-turns", 2, "--joint-mode", "cross", "--num-agents", 2)),
        (CRITIC_FREE[0], ("--temperature", 0.7, "--num-agents", 3)),
        (CRITIC_FREE[0], ("--max-batch-tokens", 1)),
        (CRITIC_FREE[0], ("--max-batch-tokens", 150, "--num-turns", 2)),
        (CRITIC_FREE[0], ("--gradient-checkpointing",)),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else value.stem,
)
def test_gradient_is_the_slow_one(script, flags, run, updates, model_dir):
    names = run(script, *TOY, "--model", model_dir, *flags)
    options = dict(zip(flags[::2], flags[1::2]))
    logged = check(updates, script, [model_dir], options.get("--gamma", 1.0), options.get("--temperature", 1.0))
    assert len(updates) == names["N"] * options.get("--num-iterations", 1)
    # samples come from models that compute nothing again: doing so, some forget their cache
    assert not any(module.training for agent in names["agents"] for module in agent.model.modules())
    for i, (loss, grad_norm) in enumerate(logged[-names["N"] :]):
        assert names["metrics"][f"agent_{i}/loss"] == pytest.approx(loss, rel=1e-3, abs=1e-5)
        assert names["metrics"][f"agent_{i}/grad_norm"] == pytest.approx(grad_norm, rel=1e-3)
    ends = [
        ids[-1]
        for _, turns, _ in updates
        for nodes in turns
        for node in nodes
        for ids in node.groups[0].completion_ids
    ]
    assert any(end == STOP or end in range(10, 30) for end in ends)  # the case of a trained stop token did occur


@pytest.mark.parametrize(
    "case",
    [
        "pad is eos",
        "no chat template",
        "one stop id",
        "dropout",
        "dropout, recomputed",
        "sliding window",
        "convolutions",
        "tied",
    ],
)
def test_gradient_of_other_models(case, run, updates, tmp_path):
    options = {
        "pad is eos": {"tokenizer": make_tokenizer(pad="<|im_end|>")},
        "no chat template": {"tokenizer": make_tokenizer(chat_template=None)},
        "one stop id": {"stops": [STOP]},
        "dropout": {"attention_dropout": 0.5},
        "dropout, recomputed": {"attention_dropout": 0.5},
        "sliding window": {"model_class": MistralForCausalLM, "sliding_window": 20},
        "convolutions": {"model_class": Lfm2ForCausalLM, "layer_types": ["conv", "full_attention"]},
        "tied": {"tie_word_embeddings": True},
    }[case]
    path = save_model(tmp_path / "model", **options)
    flags = ("--gradient-checkpointing",) if "recomputed" in case else ()
    names = run(CRITIC_FREE[0], *TOY, "--model", path, "--num-turns", 2, *flags)
    assert {agent.share for agent in names["agents"]} == {case not in ("dropout, recomputed", "convolutions")}
    check(updates, CRITIC_FREE[0], [path])


def test_gradient_with_different_models(run, updates, tmp_path):
    other = {"seed": 1, "vocab_size": 300, "num_hidden_layers": 1, "stops": range(10, 30)}
    paths = [save_model(tmp_path / "a"), save_model(tmp_path / "b", **other)]
    names = run(CRITIC_FREE[0], *TOY, "--model", *paths)
    check(updates, CRITIC_FREE[0], paths)
    assert STOP in names["agents"][1].stop_ids  # by its tokenizer alone


def test_prompt_may_hold_the_pad_and_stop_tokens(run, updates, tmp_path):
    template = "<|im_start|><|endoftext|>{{ messages[0].content }}<|im_end|>c"
    path = save_model(tmp_path / "model", tokenizer=make_tokenizer(chat_template=template))
    names = run(CRITIC_FREE[0], *TOY, "--model", path)
    assert START not in names["agents"][0].stop_ids  # though it stands in a template that says no answer
    assert {START, STOP, END} <= set(updates[0][1][0][0].groups[0].prompt_ids)
    check(updates, CRITIC_FREE[0], [path])


def test_gradient_of_a_model_that_repeats_itself(run, updates, tmp_path):
    """Equal completions, and those of equal prompts in the second turn, are computed once for all."""
    script = CRITIC_FREE[0]
    path = save_model(tmp_path / "sure", initializer_range=0.4, stops=range(20, 259))
    run(script, *TOY, "--model", path, "--num-turns", 2, "--num-generations", 12, "--num-agents", 1)
    for _, turns, _ in updates:
        counts = [len(set(map(tuple, group.completion_ids))) for node in turns[0] for group in node.groups]
        assert min(counts) < 12 < sum(counts)
        assert len({node.groups[0].prompt for node in turns[1]}) < len(turns[1])
    check(updates, script, [path])


def test_an_evaluation_before_training_computes_nothing_again(run, model_dir):
    """Though what training would compute was compared before: doing so, some models forget their cache."""
    names = run(CRITIC_FREE[0], *TOY, "--model", model_dir, "--num-iterations", 0, "--gradient-checkpointing")
    assert not any(module.training for agent in names["agents"] for module in agent.model.modules())


@pytest.fixture
def backward_passes(monkeypatch):
    calls, backward = [], torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: calls.append(backward(loss)))
    return calls


@pytest.mark.parametrize("unit", [1, 10**10 + 7])
def test_equal_rewards_leave_no_gradient_and_cost_no_backward_pass(
    unit, run, updates, backward_passes, model_dir, monkeypatch
):
    from toy import Letters, Step

    # the mean of three of these is another number: of 0.7 units in float64, of 0.9 in float32
    pay = lambda branch, branches: (0.7 if branch[0] == branches[0][0] else 0.9) * unit
    equal = lambda self, branches: [Step(b[2], pay(b, branches), {}, False) for b in branches]
    monkeypatch.setattr(Letters, "step", equal)
    for script in (path for path in CRITIC_FREE if path.stem != "mareinforce"):
        names = run(script, *TOY, "--model", model_dir, "--joint-mode", "align")
        assert names["metrics"]["train/zero_variance_groups"] == 1
    assert len(updates) == 6
    assert all(gradient.abs().max() == 0 for _, _, gradients in updates for gradient in gradients)
    assert not backward_passes


@pytest.mark.parametrize("script", [ROOT / "magrpo.py", ROOT / "maremax.py"], ids=lambda path: path.stem)
def test_only_completions_with_an_advantage_are_computed(script, run, updates, backward_passes, model_dir):
    # one token a batch: each completion is a batch of its own
    names = run(script, *TOY, "--model", model_dir, "--max-batch-tokens", 1)
    groups = [group for node in names["turns"][0] for group in node.groups]
    advantages = torch.stack([group.advantages for group in groups])  # (4, 3)
    trained = (advantages.abs() > 1e-9).sum()
    assert len(backward_passes) == trained
    assert trained <= 8 if script.stem == "maremax" else trained >= 8  # it lets the best of each group be
    check(updates, script, [model_dir])
