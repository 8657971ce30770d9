"""--lora-rank: agents that share one model's frozen weights, each with an adapter of its own."""

import glob
import os
import sys

import pytest
import torch
from conftest import CRITIC_FREE, SCRIPTS, metrics_of, save_model, two_scripts
from processes import printed_by
from safetensors.torch import load_file
from test_gradient import TOY, slow_gradient, updates  # noqa: F401, a fixture
from test_math import exact_logprobs
from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM

peft = pytest.importorskip("peft", reason="optional, for --lora-rank; .ci/run installs it")


def flags(model_dir, *more):
    return (*TOY, "--model", model_dir, "--learning-rate", 0.01, "--lora-rank", 3, *more)


def own(model):
    return {name: p for name, p in model.state_dict().items() if "lora_" in name}


@two_scripts
def test_agents_share_frozen_weights_and_train_their_own(script, run, model_dir, capsys):
    names = run(script, *flags(model_dir, "--num-iterations", 2))
    first, second = (agent.model for agent in names["agents"])
    frozen = [{name: p for name, p in model.named_parameters() if "lora_" not in name} for model in (first, second)]
    assert all(p is frozen[1][name] and not p.requires_grad for name, p in frozen[0].items())  # in memory once
    assert capsys.readouterr().out.count("0.00M parameters to train") == 2  # the whole model has 0.03M
    # rank 3: A and B of q, k, v, o, gate, up and down in two layers
    size = 2 * 3 * (64 + 48 + 48 + 64 + 80 + 80 + 80)
    assert [sum(p.numel() for p in own(model).values()) for model in (first, second)] == [size, size]
    base = AutoModelForCausalLM.from_pretrained(model_dir).state_dict()
    state = first.state_dict()
    for name, weight in base.items():
        name = (
            name
            if name in state
            else name.replace(".weight", ".base_layer.weight").replace(".bias", ".base_layer.bias")
        )
        assert torch.equal(state[name], weight)
    factors = [torch.cat([p.flatten() for key, p in own(m).items() if "lora_B" in key]) for m in (first, second)]
    assert all(factor.abs().max() > 1e-3 for factor in factors) and not torch.equal(*factors)  # B starts at 0
    tasks = names["train_tasks"][:2]
    (nodes,), _ = names["rollout"](names["args"], names["env"], names["agents"], tasks, [3], "align", 1.0)
    for i, model in enumerate((first, second)):  # each samples with its own
        for group in (node.groups[i] for node in nodes):
            for ids, logprobs in zip(group.completion_ids, group.logprobs):
                assert logprobs == pytest.approx(exact_logprobs(model, group.prompt_ids, ids), abs=1e-4)


@two_scripts
def test_saved_adapters_load_with_peft_and_a_checkpoint_holds_nothing_else(script, run, model_dir):
    names = run(script, *flags(model_dir, "--num-iterations", 2))
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    for i, agent in enumerate(names["agents"]):
        folder = os.path.join(names["run_dir"], f"agent_{i}")
        assert not glob.glob(os.path.join(folder, "model*.safetensors"))
        assert all("lora_" in name for name in load_file(os.path.join(folder, "adapter_model.safetensors")))
        loaded = peft.AutoPeftModelForCausalLM.from_pretrained(folder)
        torch.testing.assert_close(loaded(ids).logits, agent.model(ids).logits)
        with loaded.disable_adapter():
            assert (loaded(ids).logits - agent.model(ids).logits).abs().max() > 1e-4
    state = torch.load(os.path.join(names["run_dir"], "checkpoint", "state.pt"), weights_only=False)
    for weights in state["models"]:
        of_model = {name for name in weights if not name.startswith(("1.", "2."))}  # those are ippo's value functions
        assert of_model and all("lora_" in name for name in of_model)


@two_scripts
def test_resume_gives_the_same_numbers(script, run, model_dir):
    more = ("--save-every", 1, "--no-anneal-lr")
    whole = run(script, *flags(model_dir, "--num-iterations", 3, *more))
    part = run(script, *flags(model_dir, "--num-iterations", 2, *more))
    rest = run(script, "--resume", part["run_dir"], "--num-iterations", 3)
    for i in range(2):
        ours, theirs = own(rest["agents"][i].model), own(whole["agents"][i].model)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@two_scripts
def test_a_checkpoint_of_other_names_or_shapes_is_refused(script, run, model_dir, capsys):
    run_dir = run(script, *flags(model_dir, "--num-iterations", 1))["run_dir"]
    path = os.path.join(run_dir, "checkpoint", "state.pt")
    state = torch.load(path, weights_only=False)
    weights = state["models"][1]
    for changed in (
        {name.replace("lora_A", "lora_a"): weight for name, weight in weights.items()},
        {name: weight[:1] for name, weight in weights.items()},
    ):
        state["models"][1] = changed
        torch.save(state, path)
        with pytest.raises(SystemExit):
            run(script, "--resume", run_dir, "--num-iterations", 2)
        assert "its weights do not fit; use its arguments" in capsys.readouterr().err


def test_gradient_of_an_adapter_follows_from_that_of_the_weights(run, updates, model_dir):  # noqa: F811
    """W + 2 B A with B = 0: dL/dB = 2 dL/dW A^T, and dL/dA = 0."""
    script = CRITIC_FREE[0]
    names = run(script, *TOY, "--model", model_dir, "--lora-rank", 3, "--num-turns", 2)
    assert len(updates) == 2
    for i, turns, gradients in updates:
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
        _, slow = slow_gradient(script, model, i, turns, 1.0, 1.0, 24)
        of_weights = dict(zip([name for name, _ in model.named_parameters()], slow))
        adapters = {name: p for name, p in names["agents"][i].model.named_parameters() if "lora_" in name}
        assert len(adapters) == len(gradients) == 2 * 7 * 2  # A and B of seven matrices in two layers
        for name, gradient in zip(adapters, gradients):
            if "lora_A" in name:
                assert gradient.abs().max() == 0
                continue
            A = adapters[name.replace("lora_B", "lora_A")].double()
            expected = 2 * of_weights[name.replace(".lora_B.default", "")] @ A.T
            assert expected.abs().max() > 1e-6
            torch.testing.assert_close(gradient.double(), expected, rtol=1e-3, atol=1e-7)


def test_adapters_of_two_processes_start_and_stay_equal(model_dir, tmp_path):
    """Gradients are averaged, and the first process alone is saved: the other has to hold the same."""
    more = ("--num-iterations", 2, "--eval-tasks", 2, "--output-dir", tmp_path / "runs")
    code = """
import os, torch
take_step, weights = torch.optim.AdamW.step, []
def step(optimizer, closure=None):
    weights.append([p.detach().clone() for p in optimizer.param_groups[0]["params"]])
    take_step(optimizer, closure)
    torch.save(weights, f"adapters_{os.environ['RANK']}.pt")
torch.optim.AdamW.step = step
"""
    printed_by(CRITIC_FREE[0], *flags(model_dir, *more), cwd=tmp_path, processes=2, code=code)
    first, second = (torch.load(tmp_path / f"adapters_{rank}.pt") for rank in range(2))
    assert len(first) == len(second) == 4  # two agents, two iterations
    assert all(torch.equal(one, other) for step in zip(first, second) for one, other in zip(*step))


def test_different_models_have_adapters_of_their_own(run, model_dir, tmp_path):
    other = save_model(tmp_path / "other", seed=1, num_hidden_layers=1)
    names = run(CRITIC_FREE[0], *TOY, "--model", model_dir, other, "--lora-rank", 3)
    models = [agent.model for agent in names["agents"]]
    assert [len([name for name in own(model) if "q_proj.lora_A" in name]) for model in models] == [2, 1]  # layers
    assert names["args"].learning_rate == 10 * 5e-6  # by default ten times that of these models


def test_a_value_head_learns_as_fast_as_adapters_do(run, model_dir):
    """They too start from a state of their own making, and have ten times the rate of whole models already."""
    (ippo,) = set(SCRIPTS) - set(CRITIC_FREE)
    names = run(ippo, *TOY, "--model", model_dir, "--lora-rank", 2, "--num-iterations", 0)
    assert [group["lr"] for group in names["agents"][0].optimizer.param_groups] == [10 * 5e-6] * 2


@two_scripts
def test_adapters_of_a_mixture_of_experts(script, run, tmp_path):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    path = save_model(tmp_path / "moe", model_class=Qwen3MoeForCausalLM, **sizes)
    names = run(script, *flags(path, "--num-iterations", 1))
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    base = AutoModelForCausalLM.from_pretrained(path)
    loaded = peft.PeftModel.from_pretrained(base, os.path.join(names["run_dir"], "agent_0"))
    assert torch.allclose(loaded(ids).logits, names["agents"][0].model(ids).logits, atol=1e-5)


def test_an_adapter_can_be_evaluated_but_not_trained_on(run, model_dir, capsys):
    many = ("--eval-tasks", 4, "--eval-generations", 8)  # which are hardly all the same after training
    trained = run(CRITIC_FREE[0], *flags(model_dir, "--num-iterations", 2, *many))
    folders = [os.path.join(trained["run_dir"], f"agent_{i}") for i in range(2)]
    names = run(CRITIC_FREE[0], *TOY, "--model", *folders, "--num-iterations", 0, *many)
    first, *_, last = (line["eval/return"] for line in metrics_of(trained["run_dir"]) if "eval/return" in line)
    assert [line["eval/return"] for line in metrics_of(names["run_dir"])] == pytest.approx([last]) and last != first
    with pytest.raises(SystemExit):
        run(CRITIC_FREE[0], *TOY, "--model", *folders)
    assert "an adapter, which is not trained further; merge it" in capsys.readouterr().err
    with pytest.raises(SystemExit):  # which would no longer be active
        run(CRITIC_FREE[0], *TOY, "--model", *folders, "--num-iterations", 0, "--lora-rank", 2)
    assert "an adapter, which is not trained further; merge it" in capsys.readouterr().err


@two_scripts
def test_without_peft_one_sentence(script, run, model_dir, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(SystemExit):
        run(script, *flags(model_dir))
    assert capsys.readouterr().err.endswith("; pip install peft.\n")


@two_scripts
def test_what_peft_lacks_is_not_blamed_on_another_flag(script, run, model_dir, tmp_path, monkeypatch, capsys):
    (tmp_path / "peft.py").write_text("import accelerate_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    with pytest.raises(SystemExit):
        run(script, *flags(model_dir))
    assert "--lora-rank 3: No module named 'accelerate_is_missing'" in capsys.readouterr().err


def test_a_critic_of_its_own_does_not_go_with_adapters(run, model_dir, capsys):
    (ippo,) = set(SCRIPTS) - set(CRITIC_FREE)
    with pytest.raises(SystemExit):
        run(ippo, *flags(model_dir, "--use-separate-critic"))
    assert "--use-separate-critic trains whole models, --lora-rank adapters" in capsys.readouterr().err
