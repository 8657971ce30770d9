"""--lora-rank: agents that share one model's frozen weights, each with an adapter of its own."""

import os

import pytest
import torch
from conftest import two_scripts
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.optional("peft")
TOY = """
--env toy:Letters --num-generations 3 --num-tasks 2 --max-new-tokens 24 --eval-tasks 4 --no-anneal-lr
--num-iterations 2 --learning-rate 0.01 --lora-rank 3 --model
"""
IN_ADAPTER = 28  # A and B of seven matrices in two layers


@two_scripts
def test_agents_share_frozen_weights_and_train_and_save_their_own(script, run, updates, model_dir):
    """Fails if a base is in memory twice, trained or saved, agents share an adapter, or one saves another's.

    Or if a part of an adapter is not trained.
    """
    import peft

    names = run(script, *TOY.split(), model_dir)
    first, second = [dict(policy.model.named_parameters()) for policy in names["policies"]]
    before = next(update.weights for update in updates if update.agents == [1])
    moved = [name for name, weight in before.items() if "lora_" in name and not torch.equal(weight, second[name])]
    assert len(moved) == IN_ADAPTER
    base = AutoModelForCausalLM.from_pretrained(model_dir).state_dict()
    assert len(first) == len(base) + IN_ADAPTER
    for name, weight in first.items():
        if "lora_" not in name:
            assert second[name] is weight
            assert torch.equal(weight, base[name.replace(".base_layer", "")])
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
