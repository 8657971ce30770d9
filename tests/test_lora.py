"""--lora-rank: agents that share one model's frozen weights, each with an adapter of its own."""

import os

import pytest
import torch
from conftest import CRITIC_FREE, save_model, two_scripts
from safetensors.torch import load_file
from test_gradient import slow_gradient, updates  # noqa: F401, a fixture
from transformers import AutoModelForCausalLM, DeepseekV3ForCausalLM

peft = pytest.importorskip("peft", reason="optional, for --lora-rank; .ci/run installs it")
SCRIPT = CRITIC_FREE[0]
TOY = ("--env", "toy:Letters", "--num-generations", 3, "--num-tasks", 2, "--max-new-tokens", 24, "--eval-tasks", 4)
TOY = (*TOY, "--num-iterations", 2, "--learning-rate", 0.01, "--lora-rank", 3, "--model")


@two_scripts
def test_agents_share_frozen_weights_and_train_and_save_their_own(script, run, model_dir):
    """A base in memory twice, or trained, or saved; adapters that agents share; rows of a base in a checkpoint."""
    names = run(script, *TOY, model_dir)
    first, second = (dict(agent.model.named_parameters()) for agent in names["agents"])
    base = AutoModelForCausalLM.from_pretrained(model_dir).state_dict()
    frozen = [name for name in first if "lora_" not in name]
    assert len(frozen) == len(base) and len(first) == len(base) + 2 * 7 * 2  # A and B of seven matrices in two layers
    for name in frozen:
        assert first[name] is second[name] and not first[name].requires_grad
        assert torch.equal(first[name], base[name.replace(".base_layer", "")])
    for name in (name for name in first if "lora_B" in name):  # which starts at 0
        assert first[name].abs().max() > 1e-3 and not torch.equal(first[name], second[name])
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    for i, agent in enumerate(names["agents"]):
        folder = f"{names['run_dir']}/agent_{i}"
        assert all("lora_" in name for name in load_file(f"{folder}/adapter_model.safetensors"))
        assert not os.path.exists(f"{folder}/model.safetensors")
        torch.testing.assert_close(
            peft.AutoPeftModelForCausalLM.from_pretrained(folder)(ids).logits, agent.model(ids).logits
        )
    for weights in torch.load(f"{names['run_dir']}/state.pt")["models"]:
        assert sum("lora_" in name for name in weights) == 28 and len(weights) - 28 in (0, 2)  # ippo.py: a value head


@two_scripts
def test_resume_gives_the_same_numbers(script, run, model_dir):
    """Adapters that start anew, or their moments."""
    whole = run(script, *TOY, model_dir, "--output-dir", "whole", "--num-iterations", 3, "--no-anneal-lr")
    part = run(script, *TOY, model_dir, "--no-anneal-lr")["run_dir"]
    run(script, "--resume", part, "--num-iterations", 3)
    for path in (f"agent_{i}/adapter_model.safetensors" for i in range(2)):
        ours, theirs = load_file(f"{part}/{path}"), load_file(f"{whole['run_dir']}/{path}")
        assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())


def test_gradient_of_an_adapter_is_that_of_the_merged_weights(run, updates, model_dir, monkeypatch):  # noqa: F811
    """A scale, or a factor that is left out: with W + 2 B A, dL/dB = 2 dL/dW A^T and dL/dA = 2 B^T dL/dW."""
    monkeypatch.setattr(torch.nn.init, "zeros_", lambda tensor: torch.nn.init.normal_(tensor, std=0.1))  # B is 0 else
    names = run(SCRIPT, *TOY, model_dir, "--num-iterations", 1, "--num-turns", 2, "--max-grad-norm", 1e9)
    for seats, turns, gradients in updates:
        adapters = {key: p.double() for key, p in names["agents"][seats[0]].trained.items()}
        assert len(adapters) == len(gradients) == 28
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
        of_layer = {name: name.removesuffix("weight") + "lora_" for name in model.state_dict()}
        pairs = {name: [key for key in adapters if key.startswith(layer)] for name, layer in of_layer.items()}
        for name, (a, b) in ((name, pair) for name, pair in pairs.items() if pair):
            model.get_parameter(name).data += 2 * adapters[b] @ adapters[a]
        _, slow = slow_gradient(SCRIPT, model, seats, turns, 1.0, 1.0, 24)
        ours = dict(zip(adapters, gradients))
        for (name, _), of_weight in zip(model.named_parameters(), slow):
            for a, b in filter(None, [pairs[name]]):
                for key, expected in ((a, adapters[b].T @ of_weight), (b, of_weight @ adapters[a].T)):
                    assert expected.abs().max() > 1e-6
                    torch.testing.assert_close(ours[key].double(), 2 * expected, rtol=1e-3, atol=1e-6)


def test_linear_layers_without_an_adapter_are_named(run, tmp_path, capsys):
    """Layers that peft passes over in silence, and are not trained."""
    sizes = {"first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    sizes |= {"n_group": 1, "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4}
    sizes |= {"num_key_value_heads": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
    path = save_model(tmp_path / "model", model_class=DeepseekV3ForCausalLM, **sizes)
    run(SCRIPT, *TOY, path, "--num-iterations", 0)
    (said, _) = (line for line in capsys.readouterr().out.splitlines() if "no LoRA for" in line)
    assert all(name in said for name in ("layers.0.mlp.up_proj", "layers.1.mlp.shared_experts.down_proj")), said
