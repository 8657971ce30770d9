"""magrpo_fsdp.py: processes that divide the weights train as those of magrpo.py, where each has all of them."""

import pytest
import torch
from conftest import MAGRPO, ROOT, metrics_of, save_model
from processes import start
from safetensors.torch import load_file
from toy import Letters
from transformers import LlamaForCausalLM

FSDP = ROOT / "magrpo_fsdp.py"
TOY = """
--env test_fsdp:Uneven --num-turns 2 --num-generations 2 --num-tasks 6 --max-new-tokens 8 --batch-size 3
--learning-rate 0.01 --max-grad-norm 0.01 --eval-tasks 1 --num-iterations 3
"""


class Uneven(Letters):
    """Processes have unequal work: agent 1 is silent in most tasks, and prompts of one task are longer."""

    def observe(self, task, history):
        first, second = super().observe(task, history)
        if task["letter"] == "a":
            return [first * 3, second * 3]
        return [first, second if task["letter"] == "f" else None]


def run_of(script, *flags, cwd, count):
    """A run on a model without biases (the gradient of a key's is 0 except for rounding, which Adam blows up)."""
    path = save_model(cwd / "model", model_class=LlamaForCausalLM, tie_word_embeddings=True)
    start(script, *TOY.split(), "--model", path, *flags, "--output-dir", script.stem, cwd=cwd, count=count)
    (run_dir,) = cwd.glob(f"{script.stem}/*")
    return run_dir


CASES = [  # processes, flags, how far weights may be apart, of the largest one
    (2, [], 1e-4),
    (3, ["--branching", "trajectories", "--share-policy"], 1e-4),
    # from weights that are 0, steps are signs of gradients
    pytest.param(2, ["--lora-rank", 4, "--learning-rate", 0, 0.01], 1e-3, marks=pytest.mark.optional("peft")),
]


@pytest.mark.parametrize("count, flags, most", CASES)
def test_processes_that_divide_weights_train_as_those_that_do_not(count, flags, most, tmp_path):
    """Fails if unequal batches block a process, or a gradient or saved weight is lost or stale."""
    folders = [run_of(script, *flags, cwd=tmp_path, count=count) for script in (MAGRPO, FSDP)]
    expected, ours = map(metrics_of, folders)
    assert ours == [pytest.approx(line, rel=1e-3, abs=1e-6) for line in expected]
    last = max(key for key in ours[3] if key.endswith("grad_norm"))
    assert ours[3][last] > 0.01  # it was clipped
    files = sorted(folders[0].glob("agent_*/*.safetensors"))
    for path in files:
        weights, others = load_file(path), load_file(folders[1] / path.relative_to(folders[0]))
        assert weights.keys() == others.keys()
        for key, weight in weights.items():
            torch.testing.assert_close(others[key], weight, rtol=0, atol=most * weight.abs().max().item())
    assert len(files) == 1 + ("--share-policy" not in flags)


@pytest.mark.parametrize("before, after", [(1, 2), (2, 1)])
def test_another_number_of_processes_resumes(before, after, tmp_path):
    """Fails if a share of the weights or of the moments is lost, or is another's."""
    run_dir = run_of(FSDP, cwd=tmp_path, count=before)
    earlier = torch.load(run_dir / "state.pt")
    # agent 0 is frozen: what is loaded of it is saved again; agent 1 goes on
    flags = ["--num-iterations", 4, "--learning-rate", 0, 0.01]
    start(FSDP, "--resume", run_dir, *flags, cwd=tmp_path, count=after)
    later = torch.load(run_dir / "state.pt")
    for name in "models", "optimizers":
        torch.testing.assert_close(later[name][0], earlier[name][0], rtol=0, atol=0)
    assert later["optimizers"][1]["state"][0]["step"] == 4
