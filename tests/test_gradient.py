"""The loss and its gradient, end to end: a script's own update against the slow, obvious one.

The reference knows nothing of rows, packing, batches or masks: it takes one completion at a time after its prompt,
in float64, sums the log-probabilities of its tokens, and weighs them with the chance of that completion.
"""

import os
import re
import textwrap
from itertools import chain, pairwise, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import (
    CRITIC_FREE,
    MAGRPO,
    NANO,
    ROOT,
    STOP,
    load_policy,
    make_tokenizer,
    metrics_of,
    save_model,
    slow_logprobs,
)
from toy import Letters
from transformers import AutoModelForCausalLM, MistralForCausalLM

import magrpo

OTHERS = MARLOO, MAREMAX, MAREINFORCE = CRITIC_FREE[1:]
MADPO = ROOT / "madpo.py"
MAX_NEW_TOKENS = 24
TOY = "--env toy:Letters --num-iterations 1 --num-generations 3 --num-tasks 2 --eval-tasks 1 --max-grad-norm 1e9"
TOY = (*TOY.split(), "--max-new-tokens", MAX_NEW_TOKENS)
FIRST = "--num-turns 2 --joint-mode align --gamma 0.5"
IN_TURN = "--num-turns 2 --joint-mode align --gamma 0.5 --env toy:Sequential"
# configurations that all scripts have
PLAIN = [
    FIRST,
    IN_TURN,
    "--num-turns 3 --joint-mode align --gamma 0.5 --num-generations 2",
    "--num-turns 3 --branching trajectories --gamma 0.5",
    "--num-turns 2 --joint-mode cross",
    "--num-turns 2 --joint-mode cross --gamma 0.5 --env toy:Selfish",
    "--num-turns 1 --joint-mode cross --temperature 0.7 --num-agents 3",
]
# configurations of magrpo.py and its copies
MORE = [
    "--batch-size 1",
    "--share-policy --num-turns 2 --batch-size 3 --num-agents 3",
    "--share-policy --num-turns 3 --joint-mode cross --env toy:Sequential",
    "--share-policy --num-turns 3 --gamma 0.5 --env toy:SelfishInTurn",
]
SUBJECTS = [(MAGRPO, flags) for flags in PLAIN + MORE]
SUBJECTS += [(script, flags) for script in OTHERS for flags in (FIRST, IN_TURN)]  # their advantages; the rest is equal
SUBJECTS.append((MAREINFORCE, f"{FIRST} --env test_gradient:Equal"))  # of which equal returns are the advantages
SUBJECTS += [(NANO, flags) for flags in PLAIN]


def advantages_of(script, returns, peer_returns=None):
    """The script's algorithm block, with the line of its loop over groups, run on `returns`."""
    block = re.search(r"\n( *for .*\n *# >>> ALGORITHM\n[\s\S]*?)# <<< ALGORITHM", script.read_text())[1]
    group = SimpleNamespace(returns=returns, peer_returns=returns if peer_returns is None else peer_returns)
    exec(textwrap.dedent(block), {"groups": [group]})
    return group.advantages


def visits(node, chance, turn):
    """A node and all that follow it, each with the chance that a trajectory drawn from the tree passes there."""
    yield node, chance, turn
    for child in node.children:
        yield from visits(child, chance / len(node.children), turn + 1)


def slow_objective(script, model, group, temperature):
    """The mean over a group's completions of advantage * log-probability / max_new_tokens."""
    advantages = advantages_of(script, group.returns, group.peer_returns).tolist()
    total = 0.0
    for completion_ids, advantage in zip(group.completion_ids, advantages):
        total += advantage * slow_logprobs(model, group.prompt_ids, completion_ids, temperature).sum()
    return total / len(advantages) / MAX_NEW_TOKENS


def slow_gradient(script, model, update, gamma=1.0, temperature=1.0):
    """The gradients of a policy's loss."""
    loss = torch.zeros((), dtype=torch.float64)
    roots = update.names["turns"][0]
    for root in roots:
        for node, chance, turn in visits(root, 1 / len(roots), 0):
            for i, group in node.groups.items():
                if i in update.agents:
                    loss = loss - chance * gamma**turn * slow_objective(script, model, group, temperature)
    loss.backward()
    return [p.grad for p in model.parameters()]


def check(updates, script, model_dirs, **options):
    """Compares gradients, and returns the norms that are to be logged."""
    logged = []
    for update in updates:
        path = model_dirs[update.agents[0] % len(model_dirs)]
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
        expected = slow_gradient(script, model, update, **options)
        norm = torch.cat([gradient.flatten() for gradient in expected]).norm()
        logged.append(norm.item())
        scale = max(gradient.abs().max().item() for gradient in expected)
        assert scale > 1e-4
        for ours, slow in zip(update.gradients.values(), expected, strict=True):
            torch.testing.assert_close(ours.double(), slow, rtol=1e-3, atol=3e-5 * scale)
    return logged


@pytest.mark.parametrize("script, flags", SUBJECTS, ids=lambda x: x if isinstance(x, str) else x.stem)
def test_gradient_is_the_slow_one(script, flags, run, updates, model_dir):
    """Fails if a weight, discount, credit, mask, slice or agent is wrong, or the last token has no gradient."""
    words = flags.split()
    names = run(script, *TOY, "--model", model_dir, *words)
    options = dict(pairwise(words))
    gamma, temperature = float(options.get("--gamma", 1)), float(options.get("--temperature", 1))
    algorithm = script if script in CRITIC_FREE else MAGRPO
    logged = check(updates, algorithm, [model_dir], gamma=gamma, temperature=temperature)
    assert len(updates) == (1 if "--share-policy" in words else len(names["policies"]))
    for i, grad_norm in enumerate(logged):
        assert names["metrics"][f"agent_{i}/grad_norm"] == pytest.approx(grad_norm, rel=1e-3)


class Saved:
    """A tensor that a backward pass needs; counts the bytes of those that are alive, and the most at once."""

    alive = most = 0

    def __init__(self, tensor):
        self.tensor = tensor.detach()  # without the graph, or the two would keep each other alive
        Saved.alive += tensor.nbytes
        Saved.most = max(Saved.most, Saved.alive)

    def __del__(self):
        Saved.alive -= self.tensor.nbytes


def gradient_and_memory(policy, num_prompts, batch_size):
    """The gradient of seven completions of each of some prompts, flat, and the bytes saved for it at once."""
    draw = np.random.default_rng(0).integers
    examples = []
    for _ in range(num_prompts):
        prompt_ids = tuple(draw(5, 200, 9).tolist())
        for length in range(1, 8):
            examples.append(magrpo.Example(prompt_ids, tuple(draw(5, 200, length).tolist()), float(draw(1, 5))))
    Saved.most = 0
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        magrpo.accumulate_gradients(SimpleNamespace(batch_size=batch_size, temperature=1.0), policy, examples)
    return torch.cat([p.grad.flatten() for p in policy.trained.values()]), Saved.most


def test_batches_change_memory_only(model_dir):
    """Fails if a prompt has the gradient of one batch of completions only, or those of all tasks are kept at once."""
    policy = load_policy(magrpo, model_dir)
    expected, _ = gradient_and_memory(policy, 5, 100)
    for batch_size in 1, 3, 16:
        gradient, _ = gradient_and_memory(policy, 5, batch_size)
        assert (gradient - expected).norm() < 1e-5 * expected.norm()
    # blocks of two prompts
    assert gradient_and_memory(policy, 12, 2)[1] == gradient_and_memory(policy, 4, 2)[1]


@pytest.mark.parametrize(
    "options",
    [
        {"tokenizer": make_tokenizer(pad="<|im_end|>")},
        {"tokenizer": make_tokenizer(chat_template=None)},
        {"tokenizer": make_tokenizer("<|im_start|><|endoftext|>{{ messages[0].content }}<|im_end|>c")},
        {"stops": [STOP]},
        {"attention_dropout": 0.5},
        {"model_class": MistralForCausalLM, "sliding_window": 20},
        {"seed": 1, "vocab_size": 300, "num_hidden_layers": 1, "stops": range(10, 30)},
    ],
    ids=lambda options: " ".join(options),
)
def test_gradient_of_other_models(options, run, updates, tmp_path):
    """Fails if a prompt is cut at its own pad or stop token, dropout or a window is missed, or models are mixed up.

    Or if agents read another prompt than their own, in chunks of five.
    """
    paths = [save_model(tmp_path / "plain"), save_model(tmp_path / "other", **options)]
    names = run(MAGRPO, *TOY, "--model", *paths, "--num-turns", 2, "--batch-size", 1)
    check(updates, MAGRPO, paths)
    models = list(map(AutoModelForCausalLM.from_pretrained, paths))
    for node in chain(*names["turns"]):
        for i, group in node.groups.items():
            assert group.prompt in group.policy.tokenizer.decode(group.prompt_ids)
            logprobs = slow_logprobs(models[i], group.prompt_ids, group.completion_ids[0])
            assert group.logprobs[0] == pytest.approx(logprobs.tolist(), abs=1e-3)


class Equal(Letters):
    """All answers earn the same, of which the mean of three is another number."""

    worth = 0.7

    def step(self, branches):
        return [step._replace(reward=self.worth, done=False) for step in super().step(branches)]


class Large(Equal):
    worth = 1e4 / 11


class Noise(Letters):
    """A reward that does not depend on what is written."""

    def step(self, branches):
        return [step._replace(reward=float(torch.rand(())), done=False) for step in super().step(branches)]


EQUAL = "--env test_gradient:Equal --num-turns 2 --joint-mode align"
LARGE = "--env test_gradient:Large --num-turns 2 --joint-mode align"
# so cold that all completions of a group are alike
ALIKE = "--env test_gradient:Noise --num-turns 2 --num-generations 4 --num-iterations 3 --temperature 0.0001"
STILL = [(script, flags) for script in (MAGRPO, MARLOO, NANO, MADPO) for flags in (EQUAL, ALIKE)]
STILL += [(script, f"{flags} --branching trajectories") for script in (MAGRPO, MADPO) for flags in (LARGE, ALIKE)]
STILL += [(MAREMAX, EQUAL), (MARLOO, LARGE)]


@pytest.mark.parametrize("script, flags", STILL, ids=lambda x: x if isinstance(x, str) else x.stem)
def test_without_a_gradient_there_is_no_step(script, flags, run, updates, model_dir):
    """Fails if momentum, or rounding errors of equal returns or completions, would move the weights.

    Or if an evaluation draws other numbers than the first one.
    """
    names = run(script, *TOY, "--model", model_dir, *flags.split())
    assert not updates
    if script != NANO:
        first, *_, last = metrics_of(names["run_dir"])
        for name in first.keys() - {"iteration"}:
            assert first[name] == last[name]
    if script in CRITIC_FREE:
        assert names["metrics"]["train/zero_variance_groups"] == ("Noise" not in flags)


@pytest.mark.parametrize("name", ["magrpo.py", "magrpo_fsdp.py"])
def test_an_advantage_that_is_not_a_number_ends_the_run(name, run, updates, model_dir, tmp_path):
    """Fails if NaN, as 0/0 is, is left out as a rounding error."""
    script = tmp_path / name
    end = "# <<< ALGORITHM"
    script.write_text((ROOT / name).read_text().replace(end, f"groups[0].advantages *= np.nan\n            {end}"))
    with pytest.raises(SystemExit, match="grad_norm"):
        run(script, *TOY, "--model", model_dir, "--num-agents", 1)
    assert not updates


RATES = "--num-agents 3 --learning-rate 0 0.001 0.0001"
RATED = [
    (MAGRPO, RATES),
    (MADPO, RATES),
    (ROOT / "ippo.py", f"{RATES} --update-epochs 1 --num-minibatches 1"),
    (NANO, "--learning-rate 0.001"),
]


@pytest.mark.parametrize("most", [1e-3, 0])
@pytest.mark.parametrize("script, flags", RATED, ids=["magrpo", "madpo", "ippo", "nano"])
def test_each_policy_has_its_rate_and_its_own_clipping(script, flags, most, run, updates, model_dir):
    """Fails if a policy is trained at another one's rate, or at 0, or not clipped, or by a bound of 0, which is none.

    Or if rates do not decay. A critic on the actor's model has ten times its rate.
    """
    flags = f"{flags} --num-iterations 2 --max-grad-norm {most}"
    names = run(script, *TOY, "--model", model_dir, *flags.split())
    expected = {0: 0.001, 1: 0.001} if script == NANO else {1: 0.001, 2: 0.0001}
    assert [update.agents for update in updates] == [[i] for i in expected] * 2
    lines = metrics_of(names["run_dir"])[1:]
    for update, (line, (i, rate)) in zip(updates, product(lines, expected.items())):
        # the whole rate, then half of it
        rate /= line["iteration"]
        assert update.learning_rates == pytest.approx([rate, 10 * rate][: len(update.learning_rates)])
        norm = torch.cat([gradient.flatten() for gradient in update.gradients.values()]).norm()
        assert norm == pytest.approx(most if most > 0 else line[f"agent_{i}/grad_norm"], rel=1e-3)
    assert os.path.exists(f"{names['run_dir']}/agent_0/config.json")
