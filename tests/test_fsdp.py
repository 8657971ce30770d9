"""magrpo_fsdp.py trains as magrpo.py does, in one process and in several, with weights that are divided."""

import shutil
import subprocess

import pytest
import torch
from conftest import CRITIC_FREE, ROOT, metrics_of
from processes import start
from safetensors.torch import load_file
from toy import Letters

MAGRPO, *OTHERS = CRITIC_FREE
FSDP = ROOT / "magrpo_fsdp.py"
TOY = "--env test_fsdp:OneIsSilent --num-turns 2 --num-generations 3 --max-new-tokens 12 --eval-tasks 3 --save-every 1"
TOY = f"{TOY} --learning-rate 0.01 --max-grad-norm 0.05 --max-batch-tokens 60".split()


class OneIsSilent(Letters):
    """Agent 1 is silent in half of the tasks, so that processes have other numbers of batches, or none."""

    def observe(self, task, history):
        prompts = super().observe(task, history)
        return prompts if task["letter"] in "ace" else [prompts[0], None]


COUNTS = [  # processes that begin, processes that resume, tasks of an iteration, further flags
    (2, 1, 2, "--branching trajectories"),
    (1, 2, 2, "--lora-rank 2"),
    (3, 3, 3, "--share-policy"),
]


@pytest.mark.parametrize("first, then, num_tasks, flags", COUNTS)
def test_it_trains_as_magrpo_does(first, then, num_tasks, flags, model_dir, tmp_path):
    """Fails if a gradient, a norm or a moment is of one share only or lost at a resume, or processes wait for ever."""
    if "lora" in flags:
        pytest.importorskip("peft")
    saved = []
    for script in MAGRPO, FSDP:
        folder = tmp_path / script.stem
        more = ["--model", model_dir, "--num-tasks", num_tasks, "--output-dir", folder, *flags.split()]
        start(script, *TOY, *more, "--num-iterations", 2, cwd=tmp_path, count=first)
        (run_dir,) = folder.iterdir()
        start(script, "--resume", run_dir, "--num-iterations", 3, cwd=tmp_path, count=then)
        assert [line["iteration"] for line in metrics_of(run_dir)] == [0, 1, 2, 3]
        agents = sorted(run_dir.glob("agent_*/*.safetensors"))
        saved.append({str(path.relative_to(run_dir)): load_file(path) for path in agents})
    plain, divided = saved
    assert plain.keys() == divided.keys()
    for name, weights in plain.items():
        assert weights.keys() == divided[name].keys()
        for key, weight in weights.items():
            torch.testing.assert_close(divided[name][key], weight, rtol=0, atol=1e-4)


@pytest.mark.parametrize("script", OTHERS, ids=lambda path: path.stem)
def test_other_algorithms_are_a_patch_away(script, tmp_path):
    """Fails if the lines that a patch of magrpo.py changes are others here."""
    if not shutil.which("patch"):
        pytest.skip("patch is not installed")
    difference = subprocess.run(["diff", MAGRPO, script], capture_output=True).stdout
    target = tmp_path / "patched.py"
    subprocess.run(["patch", FSDP, "-o", target], input=difference, check=True)
    block = script.read_text().partition("# >>> ALGORITHM")[2].partition("# <<< ALGORITHM")[0]
    assert block in target.read_text()
    compile(target.read_text(), target, "exec")
