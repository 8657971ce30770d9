"""Scripts on a GPU that is not there: no operation mixes devices."""

import pytest
import torch
from conftest import ROOT, save_model, two_scripts
from pretend import Graph, pretended_gpu
from transformers import MistralForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

TOY = ("--env", "toy:Letters", "--num-generations", 3, "--num-tasks", 2, "--max-new-tokens", 8, "--num-turns", 2)
TOY = (*TOY, "--learning-rate", 0.01, "--eval-tasks", 2, "--num-iterations", 1)


@two_scripts
def test_no_operation_mixes_devices(script, run, model_dir):
    with pretended_gpu() as mode:
        names = run(script, *TOY, "--model", model_dir)
    assert mode.marked > 1000 and all(agent.stop_ids.pretends for agent in names["agents"])
    with pretended_gpu():
        names = run(script, "--resume", names["run_dir"], "--num-iterations", 2)
    assert names["iteration"] == 2


@two_scripts
@pytest.mark.parametrize(
    "flags",
    [
        ("--gradient-checkpointing",),
        ("--lora-rank", 2),
        ("--lora-rank", 2, "--devices", "cuda:0", "cpu"),
        ("--cuda-graphs", "--lora-rank", 2),
    ],
    ids=lambda flags: " ".join(map(str, flags)),
)
def test_no_operation_mixes_devices_with(flags, script, run, model_dir):
    if "--lora-rank" in flags:
        pytest.importorskip("peft")
    with pretended_gpu():
        names = run(script, *TOY, "--model", model_dir, *flags)
        assert (Graph.made > 0) == ("--cuda-graphs" in flags)
    for agent, there in zip(names["agents"], [True, "--devices" not in flags]):
        parameters = dict(agent.model.named_parameters())
        assert any("pretends" in vars(p) for p in parameters.values()) == there
        small = {key for key, p in parameters.items() if p.dtype == torch.bfloat16}
        frozen = {key for key in parameters if "base_layer" in key}  # what a LoRA stands on
        assert small == (frozen if there else set()) and bool(frozen) == ("--lora-rank" in flags)


def test_decoding_that_cannot_be_recorded_is_told(run, model_dir, tmp_path, monkeypatch, capsys):
    script = ROOT / "magrpo.py"
    windows = save_model(tmp_path / "windows", model_class=MistralForCausalLM, sliding_window=20)
    forward = Qwen2RotaryEmbedding.forward

    def waiting(self, x, position_ids):
        return forward(self, x, position_ids + 0 * position_ids.max().item())

    with pretended_gpu():
        with pytest.raises(SystemExit):
            run(script, *TOY, "--cuda-graphs", "--model", windows)
        assert "see all earlier tokens: not for" in capsys.readouterr().err
        monkeypatch.setattr(Qwen2RotaryEmbedding, "forward", waiting)
        with pytest.raises(SystemExit):
            run(script, *TOY, "--cuda-graphs", "--model", model_dir)
        assert "cannot be recorded (operation not permitted" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(script, *TOY, "--cuda-graphs", "--model", model_dir)
    assert "on cpu." in capsys.readouterr().err


def test_what_pretends_refuses_company():
    with pretended_gpu():
        here, there, module = torch.ones(2, device="cuda:0"), torch.ones(2), torch.nn.Linear(2, 1)
        assert (here + here[:1]).device == (here.cpu().to("cuda") * 2.0).device == torch.device("cuda:0")
        assert there.device == (here.cpu() + there).device == torch.device("cpu") and here.tolist() == [1.0, 1.0]
        index = torch.zeros(1, dtype=torch.long, device="cuda")
        mixed = [
            lambda: here + there,
            lambda: module(here),
            lambda: torch.stack([here, there]),
            lambda: here.mul_(there),
        ]
        for mix in (*mixed, lambda: there[index], lambda: there.__setitem__(index, 1.0)):
            with pytest.raises(RuntimeError, match="two devices"):
                mix()
        assert here[index.cpu()].tolist() == here[index].tolist() == [1.0]
        assert module.to("cuda")(here).device.type == module.weight.device.type == "cuda"
