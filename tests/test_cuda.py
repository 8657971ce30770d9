"""magrpo_cuda.py does what magrpo.py does: that script's tests on this one. On a CPU a graph is a plain call."""

from types import SimpleNamespace

import pytest
import test_gradient
import test_lora
import test_runs
import test_sampling
import torch
from conftest import ROOT, load_policy
from test_gradient import updates  # noqa: F401, a fixture
from torch.utils._python_dispatch import TorchDispatchMode

import magrpo
import magrpo_cuda

SCRIPT = ROOT / "magrpo_cuda.py"
KINDS = [kind for kind in test_sampling.KINDS if kind != "chunks"]  # transformers does not say which its decoder is
GRADIENTS = [
    "--num-turns 2 --joint-mode align --gamma 0.5",
    "--num-turns 1 --joint-mode cross --temperature 0.7 --num-agents 3",
    "--max-batch-tokens 1",
    "--share-policy --num-turns 2 --max-batch-tokens 150",
]


@pytest.fixture(autouse=True)
def subject(monkeypatch):
    """Lets the tests of sampling and of gradients see this script in place of magrpo.py."""

    def of_one_prompt(policy, prompt_ids, completion_ids, temperature):
        return magrpo_cuda.token_logprobs(policy, [prompt_ids], [completion_ids], temperature)

    names = vars(magrpo_cuda) | {"token_logprobs": of_one_prompt}
    monkeypatch.setattr(test_sampling, "magrpo", SimpleNamespace(**names))
    monkeypatch.setattr(test_gradient, "MAGRPO", SCRIPT)


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_and_trained_logprobs_are_the_models(kind, tmp_path, capsys):
    """Fails if a column, position, mask or row is wrong, or a stop token is passed by until the device is asked."""
    test_sampling.test_sampled_and_trained_logprobs_are_the_models(kind, tmp_path)
    assert ("without CUDA graphs" in capsys.readouterr().out) == (kind in test_sampling.ROW_EACH)


def test_rotations_that_look_at_the_length_are_not_captured(tmp_path):
    """Fails if a graph would repeat the rotations of the length at which it was captured."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    path = test_sampling.save_model(tmp_path / "m", rope_parameters=rope)
    assert not load_policy(magrpo_cuda, path).capturable


def test_greedy_and_the_draw(model_dir, tmp_path):
    """Fails if the logits of a step are those of another, or are drawn from in part."""
    test_sampling.test_greedy_is_what_generate_gives(model_dir)
    test_sampling.test_the_draw_is_the_whole_distribution(tmp_path)


class Operators(TorchDispatchMode):
    """Lists the operators that are not of a decoding step, which a GPU repeats as one graph."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.names = []
        self.outside = True
        step = magrpo_cuda.FixedCache.decode_step

        def decode_step(cache, model):
            self.outside = False
            step(cache, model)
            self.outside = True

        monkeypatch.setattr(magrpo_cuda.FixedCache, "decode_step", decode_step)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if self.outside:
            self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_a_step_is_one_graph_and_few_operators_without_a_wait(tmp_path, monkeypatch):
    """Fails if something small is launched from Python for each token, or the device is asked at each."""
    policy = load_policy(magrpo_cuda, test_sampling.save_model(tmp_path / "m", stops=[3]))
    operators = []
    for C in 6, 16:
        with Operators(monkeypatch) as mode:
            magrpo_cuda.sample(policy, [[5, 6, 7]], 4, 1.0, C)
        operators.append(mode.names)
    short, long = operators
    assert len(long) - len(short) <= 10 * 25
    assert long.count("_local_scalar_dense") == short.count("_local_scalar_dense")


def test_bfloat16_cache(model_dir):
    """Fails if keys or the mask have another dtype than attention, or are rounded more than once."""
    policy = load_policy(magrpo_cuda, model_dir)
    with torch.autocast("cpu", torch.bfloat16):
        (group,) = magrpo_cuda.sample(policy, [[5, 6, 7]], 8, 1.0, 20)
        cache = magrpo_cuda.FixedCache(*magrpo_cuda.read_prompts(policy.model, [[5]], 2), 20)
    assert cache.layers[0].keys.dtype == torch.bfloat16
    for ids, logprobs in group:
        exact = test_sampling.exact_logprobs(model_dir, [5, 6, 7], ids)
        assert logprobs == pytest.approx(exact, abs=0.1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_pieces_of_several_prompts_are_what_the_plain_script_computes(temperature, model_dir):
    """Fails if a piece of the logits, or a prompt of another length, is lost, misplaced or without a gradient."""
    torch.manual_seed(0)
    prompts = test_sampling.PROMPTS
    completions = [torch.randint(259, (30, length)).tolist() for length in (9, 12, 4, 14)]  # 1,170 tokens
    policy = load_policy(magrpo, model_dir)
    other = load_policy(magrpo_cuda, model_dir)
    plain = []
    for pair in zip(prompts, completions):
        plain += magrpo.token_logprobs(policy, *pair, temperature)
    ours = magrpo_cuda.token_logprobs(other, prompts, completions, temperature)
    for logprobs in plain, ours:
        torch.cat(list(logprobs)).square().mean().backward()
    torch.testing.assert_close(list(ours), plain, atol=1e-5, rtol=1e-5)
    for name, p in policy.trained.items():
        scale = p.grad.abs().max().item()
        torch.testing.assert_close(other.trained[name].grad, p.grad, atol=1e-4 * scale, rtol=1e-3)


@pytest.mark.parametrize("flags", GRADIENTS)
def test_gradient_is_the_slow_one(flags, run, updates, model_dir):  # noqa: F811
    """Fails if a weight or a completion is another's where prompts share a batch, or a batch is left out."""
    test_gradient.test_gradient_is_the_slow_one(SCRIPT, flags, run, updates, model_dir)


def test_resume(run, model_dir, tmp_path):
    """Fails if sampling or training depends on anything that a checkpoint does not have."""
    _, *stop = test_runs.STOPS[1]
    test_runs.test_a_stopped_run_resumes_bit_for_bit(SCRIPT.stem, *stop, run, model_dir, tmp_path)


def test_two_processes(run, model_dir, tmp_path):
    """Fails if gradients are of one process only."""
    test_runs.test_two_processes_make_the_update_of_one(SCRIPT, run, model_dir, tmp_path)


def test_adapters(run, model_dir):
    """Fails if an adapter's copy of the model computes with another one's layers again, or is not trained."""
    test_lora.test_agents_share_frozen_weights_and_train_and_save_their_own(SCRIPT, run, model_dir)


def test_batches_are_bounded():
    """Fails if padding to the longest prompt or completion makes a batch larger than the memory."""
    parts = [([5] * 30, [[6]], [0.1]), ([5], [[6] * 30], [0.1])] * 2
    assert [len(magrpo_cuda.join(parts, most)) for most in (1, 119, 120, 240)] == [4, 4, 2, 1]
    assert magrpo_cuda.join([], 1) == []
