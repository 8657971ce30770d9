"""magrpo_cuda.py does what magrpo.py does: tests of that script on this one. On a CPU a graph is a plain call."""

from types import SimpleNamespace

import pytest
import test_gradient
import test_sampling
from conftest import ROOT
from test_gradient import updates  # noqa: F401, a fixture

import magrpo_cuda

SCRIPT = ROOT / "magrpo_cuda.py"


@pytest.fixture(autouse=True)
def subject(monkeypatch):
    """Lets the tests of sampling and of gradients see this script in place of magrpo.py."""

    def of_one_prompt(policy, prompt_ids, completion_ids, temperature):
        return magrpo_cuda.token_logprobs(policy, [prompt_ids], [completion_ids], temperature)

    names = vars(magrpo_cuda) | {"token_logprobs": of_one_prompt}
    monkeypatch.setattr(test_sampling, "magrpo", SimpleNamespace(**names))
    monkeypatch.setattr(test_gradient, "MAGRPO", SCRIPT)


@pytest.mark.parametrize("kind", test_sampling.KINDS)
def test_sampled_and_trained_logprobs_are_the_models(kind, tmp_path):
    """Fails if a position, mask, column, scale or row is wrong, or a stop token is left out or passed by."""
    test_sampling.test_sampled_and_trained_logprobs_are_the_models(kind, tmp_path)


@pytest.mark.parametrize("flags", test_gradient.PLAIN + test_gradient.MORE)
def test_gradient_is_the_slow_one(flags, run, updates, model_dir):  # noqa: F811
    """Fails if a weight, prompt, mask, slice or piece is wrong when several prompts share a batch."""
    test_gradient.test_gradient_is_the_slow_one(SCRIPT, flags, run, updates, model_dir)
