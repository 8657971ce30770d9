"""magrpo_fsdp.py: two or three processes that share the weights train as those of magrpo.py, which do not."""

import re
import subprocess

import pytest
import torch
from conftest import ROOT, lines_of, metrics_of, save_model
from processes import start
from toy import Letters
from transformers import AutoModelForCausalLM, LlamaForCausalLM

FSDP = ROOT / "magrpo_fsdp.py"
FLAGS = (
    "--env test_fsdp:Uneven --num-turns 2 --num-generations 2 --num-tasks 6 --max-new-tokens 8 --max-batch-tokens 60"
)
FLAGS = f"{FLAGS} --learning-rate 0.01 --max-grad-norm 0.05 --eval-tasks 1 --num-iterations 3".split()


class Uneven(Letters):
    """Processes have unequal work: agent 1 is silent in most tasks, a has longer prompts, b has equal returns."""

    def observe(self, task, history):
        prompts = [prompt * (1 + 3 * (task["letter"] == "a")) for prompt in super().observe(task, history)]
        return prompts if task["letter"] in "af" else [prompts[0], *[None] * (self.num_agents - 1)]

    def step(self, branches):
        steps = super().step(branches)
        return [
            step._replace(reward=step.reward * (task["letter"] != "b")) for step, (task, *_) in zip(steps, branches)
        ]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """Without biases: the gradient of a key's is 0 except for rounding, which Adam blows up."""
    path = tmp_path_factory.mktemp("model") / "tied"
    return save_model(path, model_class=LlamaForCausalLM, tie_word_embeddings=True)


def run_of(script, folder, *flags, cwd, count):
    """The run folder, and state.pt."""
    start(script, *FLAGS, *flags, "--output-dir", folder, cwd=cwd, count=count)
    (run_dir,) = cwd.glob(f"{folder}/*")
    return run_dir, torch.load(run_dir / "state.pt")


CASES = {  # processes, flags, and how far weights may be apart, of the largest weight
    "tree": (2, [], 1e-5),
    "trajectories": (3, ["--branching", "trajectories", "--share-policy"], 1e-5),
    "lora": (2, ["--lora-rank", 4, "--learning-rate", 0, 0.01], 1e-3),  # its first steps are signs of gradients
}


@pytest.mark.parametrize("case", CASES)
def test_processes_that_share_weights_train_as_those_that_do_not(case, model_dir, tmp_path):
    """Fails if an unequal number of batches or of pieces of logits blocks a process, or a gradient is lost or stale."""
    count, flags, most = CASES[case]
    found = {}
    for name in "magrpo", "magrpo_fsdp":
        source = (ROOT / f"{name}.py").read_text()
        assert "2**27" in source
        # pieces of seven tokens
        (tmp_path / f"{name}.py").write_text(source.replace("2**27", "2**11"))
        found[name] = run_of(tmp_path / f"{name}.py", name, "--model", model_dir, *flags, cwd=tmp_path, count=count)
    (ours, state), (theirs, expected) = found["magrpo_fsdp"], found["magrpo"]
    assert metrics_of(ours) == [pytest.approx(line, rel=1e-3, abs=1e-6) for line in metrics_of(theirs)]
    norms = [line["agent_1/grad_norm"] for line in metrics_of(theirs) if "agent_1/grad_norm" in line]
    assert case == "trajectories" or max(norms) > 0.05
    for mine, other in zip(lines_of(ours), lines_of(theirs), strict=True):
        completions = [[agent and agent["completions"] for agent in line["agents"]] for line in (mine, other)]
        assert completions[0] == completions[1]
    for weights, others in zip(state["models"], expected["models"], strict=True):
        assert weights.keys() == others.keys()
        for key, weight in weights.items():
            torch.testing.assert_close(weight, others[key].data, rtol=0, atol=most * others[key].abs().max().item())
    for i, weights in enumerate(state["models"]):
        saved = AutoModelForCausalLM.from_pretrained(ours / f"agent_{i}").state_dict()
        # an adapter's names have no place in them for its own name
        names = [name.replace(".default", "") for name in weights]
        assert saved.keys() >= set(weights) or saved.keys() >= set(names)
        for name, weight in weights.items():
            assert torch.equal(saved[name if name in saved else name.replace(".default", "")], weight)


SIGNALS = "    signals = catch_signals()"
AGAIN = f"    if args.resume:\n        save_checkpoint(run_dir, start, policies)\n{SIGNALS}"


@pytest.mark.parametrize("before, after", [(1, 2), (2, 1)])
def test_another_number_of_processes_resumes(before, after, model_dir, tmp_path):
    """Fails if a share of the weights or of the moments is lost, or is another's."""
    (tmp_path / "again.py").write_text(FSDP.read_text().replace(SIGNALS, AGAIN))
    run_dir, expected = run_of(FSDP, "runs", "--model", model_dir, cwd=tmp_path, count=before)
    (run_dir / "state.pt").rename(tmp_path / "state.pt")
    (run_dir / "state.pt").hardlink_to(tmp_path / "state.pt")
    start(tmp_path / "again.py", "--resume", run_dir, cwd=tmp_path, count=after)
    state = torch.load(run_dir / "state.pt")
    assert not (run_dir / "state.pt").samefile(tmp_path / "state.pt")
    torch.testing.assert_close(state, expected, rtol=0, atol=0)
    start(FSDP, "--resume", run_dir, "--num-iterations", 4, cwd=tmp_path, count=after)
    assert torch.load(run_dir / "state.pt")["optimizers"][0]["state"][0]["step"] == 4


@pytest.mark.parametrize("name", ["marloo", "maremax", "mareinforce"])
def test_other_algorithms_are_a_patch_away(name, tmp_path):
    """Fails if the command of docs/running.md does not give the variant of another algorithm."""
    command = f"diff magrpo.py {name}.py | patch magrpo_fsdp.py -o {tmp_path}/patched.py"
    assert subprocess.run(command, shell=True, cwd=ROOT).returncode == 0
    patched = (tmp_path / "patched.py").read_text()
    block = re.compile(r"# >>> ALGORITHM.*# <<< ALGORITHM", re.S)
    assert block.findall(patched) == block.findall((ROOT / f"{name}.py").read_text())
    assert patched.count("\n") == FSDP.read_text().count("\n")
    compile(patched, name, "exec")
