"""--lora-rank: agents that share one model's frozen weights, each with an adapter of its own."""

import os

import pytest
import torch
from conftest import MAGRPO, two_scripts
from test_gradient import slow_gradient
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.optional("peft")
TOY = """
--env toy:Letters --num-generations 3 --num-tasks 2 --max-new-tokens 24 --eval-tasks 4 --no-anneal-lr
--num-iterations 2 --learning-rate 0.01 --lora-rank 3 --model
"""
IN_ADAPTER = 28  # A and B of seven matrices in two layers


@two_scripts
def test_agents_share_frozen_weights_and_train_and_save_their_own(script, run, model_dir):
    """Fails if a base is in memory twice, trained or saved, agents share an adapter, or one saves another's."""
    import peft

    names = run(script, *TOY.split(), model_dir)
    first, second = [dict(policy.model.named_parameters()) for policy in names["policies"]]
    for name, weight in first.items():
        if "lora_" not in name:
            assert second[name] is weight
        elif "lora_B" in name:  # which starts at 0
            assert weight.abs().max() > 1e-3
            assert not torch.equal(weight, second[name])
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    for i, policy in enumerate(names["policies"]):
        folder = f"{names['run_dir']}/agent_{i}"
        assert not os.path.exists(f"{folder}/model.safetensors")
        loaded = peft.AutoPeftModelForCausalLM.from_pretrained(folder)
        torch.testing.assert_close(loaded(ids).logits, policy.model(ids).logits)
    for weights in torch.load(f"{names['run_dir']}/state.pt")["models"]:
        assert all("lora_" in name or name.startswith("critic.") for name in weights)


def test_gradient_of_an_adapter_is_that_of_the_merged_weights(run, updates, model_dir, monkeypatch):
    """Fails if a scale or a factor is left out: with W + 2 B A, dL/dB = 2 dL/dW A^T and dL/dA = 2 B^T dL/dW."""
    monkeypatch.setattr(torch.nn.init, "zeros_", lambda tensor: torch.nn.init.normal_(tensor, std=0.1))  # B is 0 else
    run(MAGRPO, *TOY.split(), model_dir, "--num-iterations", 1, "--num-turns", 2, "--max-grad-norm", 1e9)
    assert len(updates) == 2
    for update in updates:
        assert len(update.weights) == len(update.gradients) == IN_ADAPTER
        adapter = {name: p.double() for name, p in update.weights.items()}
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
        pairs = {}  # name of a weight -> names of its A and B
        for name, p in model.named_parameters():
            layer = name.removesuffix("weight") + "lora_"
            pair = [key for key in adapter if key.startswith(layer)]
            if pair:
                a, b = pairs[name] = pair
                p.data += 2 * adapter[b] @ adapter[a]
        slow_gradient(MAGRPO, model, update)
        for name, (a, b) in pairs.items():
            of_weight = model.get_parameter(name).grad
            expected = {a: 2 * adapter[b].T @ of_weight, b: 2 * of_weight @ adapter[a].T}
            for key, gradient in expected.items():
                assert gradient.abs().max() > 1e-6
                torch.testing.assert_close(update.gradients[key].double(), gradient, rtol=1e-3, atol=1e-6)
