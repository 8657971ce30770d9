"""Whole runs: what they leave behind, resuming, signals, several processes, refusals."""

import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from itertools import chain

import numpy as np
import pytest
import torch
from conftest import MAGRPO, ROOT, STOP, lines_of, metrics_of, save_model, two_scripts
from processes import start
from safetensors.torch import load_file
from toy import Letters, Sequential
from transformers import AutoModelForCausalLM, AutoTokenizer

TOY = """
--env test_runs:Noisy --num-turns 2 --num-generations 3 --num-tasks 2 --max-new-tokens 12 --learning-rate 0.01
--eval-tasks 2 --eval-every 2 --num-iterations 2
"""
TOY = TOY.split()


class Noisy(Letters):
    """Draws from generators of its own, and sends a signal to its own process where STOP asks for it."""

    calls = 0  # two an evaluation, two an iteration

    def step(self, branches):
        Noisy.calls += 1
        number, call, rank = os.environ.get("STOP", "0 0 0").split()
        if Noisy.calls == int(call) and os.environ["RANK"] == rank:
            os.kill(os.getpid(), int(number))
        noise = random.random() + np.random.rand()
        return [step._replace(reward=step.reward + noise) for step in super().step(branches)]


def check_same(one, two):
    """Two runs left the same, bit for bit, except what depends on the clock."""
    assert metrics_of(one) == metrics_of(two)
    assert lines_of(one) == lines_of(two)
    paths = list(pathlib.Path(one).glob("agent_*/*.safetensors"))
    assert paths
    for path in paths:
        weights = load_file(path)
        for name, weight in load_file(two / path.relative_to(one)).items():
            assert torch.equal(weights[name], weight)


FILES = "args.json metrics.jsonl rollouts.jsonl state.pt agent_0 agent_1"
METRICS = """
agent_0/grad_norm agent_1/grad_norm tokens time/iteration
train/agent_0/entropy train/agent_0/completion_length train/agent_0/stopped train/agent_0/return
train/return train/reward_turn1 train/reward_turn2 train/share
"""


@two_scripts
def test_files_of_a_run(script, run, model_dir):
    """Fails if a file, a field, or a metric is missing, or agents are saved mixed up.

    Or if the error of an evaluation is not the standard error of the mean over tasks.
    """
    names = run(script, *TOY, "--model", model_dir, "--num-iterations", 3, "--eval-tasks", 3)
    folder = names["run_dir"]
    assert set(os.listdir(folder)) == set(FILES.split())
    about = json.loads(pathlib.Path(folder, "args.json").read_text())
    assert about["script"] == script.name
    lines = metrics_of(folder, without=())
    assert [line["iteration"] for line in lines] == [0, 1, 2, 3]
    assert ["eval/return" in line for line in lines] == [True, False, True, True]
    assert lines[1].keys() >= set(METRICS.split())
    returns = defaultdict(float)
    for line in lines_of(folder):
        if line["iteration"] == 3 and line["split"] == "test":
            returns[line["task_number"]] += line["rewards"][0]
    deviation = np.std(list(returns.values()), ddof=1)
    assert lines[3]["eval/return_se"] * 3**0.5 == pytest.approx(deviation)
    groups = [group for node in chain(*names["turns"]) for group in node.groups.values()]
    assert lines[3]["tokens"] == sum(len(ids) for group in groups for ids in group.completion_ids)
    for i, policy in enumerate(names["policies"]):
        saved = AutoModelForCausalLM.from_pretrained(f"{folder}/agent_{i}").state_dict()
        for name, weight in saved.items():
            assert torch.equal(weight, policy.trained[name])
        assert AutoTokenizer.from_pretrained(f"{folder}/agent_{i}").chat_template


class OddParts(Sequential):
    """Short answers have no part; feedback is the number of characters."""

    def step(self, branches):
        steps = []
        for step, (_, _, actions) in zip(super().step(branches), branches):
            size = sum(map(len, actions))
            steps.append(step._replace(parts=step.parts if size > 14 else {}, feedback={"size": size}))
        return steps


@pytest.mark.parametrize("env", ["toy:Letters", "test_runs:OddParts"])
def test_a_tree_can_be_rebuilt_from_the_rollouts(env, run, model_dir):
    """Fails if a line is at another place of the tree, or has prompts, rewards, parts or feedback of another."""
    flags = "--joint-mode cross --eval-generations 3 --eval-tasks 0 --num-iterations 1 --max-new-tokens 24"
    names = run(MAGRPO, *TOY, "--model", model_dir, "--env", env, *flags.split())
    env = names["env"]
    lines = lines_of(names["run_dir"])
    assert len(lines) > 20
    histories = {}  # place of a node -> its history
    for line in lines:  # parents before children
        place = (line["iteration"], line["split"], line["task_number"], *line["path"])
        task = env.tasks(line["split"])[line["task_number"]]
        history = histories[place] if line["path"] else []
        agents = line["agents"]
        assert [agent and agent["prompt"] for agent in agents] == env.observe(task, history)
        branches = []
        for choice in line["joint"]:
            actions = [agent["completions"][g] if agent else "" for agent, g in zip(agents, choice)]
            branches.append((task, history, actions))
        steps = env.step(branches)
        assert line["rewards"] == [step.reward for step in steps]
        assert line["parts"] == [step.parts for step in steps]
        assert line["feedback"] == [step.feedback for step in steps]
        for j, step in enumerate(steps):
            histories[(*place, j)] = [*history, (branches[j][2], step)]
        speaker = agents[0] or agents[1]
        assert (speaker["advantages"] is not None) == (line["split"] == "train")


def test_saved_agents_sample_as_in_training(run, tmp_path):
    """Fails if the model's own generation_config cuts or bends the distribution, or a stop token is lost.

    Or if --eval-split train plays other tasks, or its lines are not for sft.py.
    """
    path = save_model(tmp_path / "model")
    odd = {"do_sample": True, "top_k": 5, "top_p": 0.5, "repetition_penalty": 1.7, "eos_token_id": [STOP, 11]}
    pathlib.Path(path, "generation_config.json").write_text(json.dumps(odd))
    flags = "--temperature 0.7 --num-iterations 1 --eval-split train"
    run_dir = run(MAGRPO, *TOY, "--model", path, *flags.split())["run_dir"]
    for line in lines_of(run_dir):
        assert line["split"] == "train"
        assert line["task"]["letter"] in "abcdef"
    model = AutoModelForCausalLM.from_pretrained(f"{run_dir}/agent_0")
    assert set(model.generation_config.eos_token_id) == {STOP, 11}
    ids = torch.tensor([[5, 6, 7, 8]])
    options = {"output_scores": True, "return_dict_in_generate": True, "pad_token_id": 0, "max_new_tokens": 1}
    (scores,) = model.generate(ids, **options).scores
    torch.testing.assert_close(scores, model(ids).logits[:, -1].detach() / 0.7)


@pytest.mark.parametrize("script", ["nano.py", "magrpo.py", "ippo.py", "mappo.py", "madpo.py"])
def test_a_copied_script_trains_on_the_readmes_environment_in_an_empty_folder(tmp_path, model_dir, script):
    """Fails if a script needs envs/ or another file next to it, the README's example does not run, or a copy without
    --model ends in a traceback."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    (example,) = [block for block in blocks if "class Shout" in block]
    assert example == (ROOT / "examples/shout.py").read_text()
    (tmp_path / "shout.py").write_text(example)
    shutil.copy(ROOT / script, tmp_path)
    shutil.copytree(model_dir, tmp_path / "model")
    flags = "--env shout:Shout --num-iterations 1 --max-new-tokens 8"
    options = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": ""}, "capture_output": True}
    # by runpy, as %run starts it, where __file__ is a relative path
    command = [sys.executable, "-c", "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')", script]
    if script in ("nano.py", "magrpo.py"):
        refused = subprocess.run([*command, *flags.split()], **options)
        assert b"--model" in refused.stderr + refused.stdout and b"Traceback" not in refused.stderr
    subprocess.run([*command, *flags.split(), "--model", "model"], **options, check=True)
    assert list(tmp_path.glob("runs/shout.Shout__*/agent_1"))


KILLED = [  # script, further flags; each is killed in iteration 4, after the checkpoint of iteration 2
    ("magrpo.py", []),
    ("magrpo.py", ["--share-policy"]),
    ("magrpo.py", ["--branching", "trajectories"]),
    pytest.param("magrpo.py", ["--lora-rank", 2], marks=pytest.mark.optional("peft")),
    ("ippo.py", ["--use-separate-critic", "--update-epochs", 1]),
    ("ippo.py", ["--share-policy"]),
    ("madpo.py", []),
]


@pytest.mark.parametrize("name, more", KILLED)
def test_a_killed_run_resumes_bit_for_bit(name, more, model_dir, tmp_path):
    """Fails if moments, a critic, a generator or the order of tasks starts anew, or lines come twice."""
    flags = [*TOY, "--model", model_dir, "--no-anneal-lr", *more]
    # at the 11th call of step()
    killed = {"code": -signal.SIGKILL, "STOP": f"{int(signal.SIGKILL)} 11 0"}
    start(ROOT / name, *flags, "--num-iterations", 4, "--output-dir", "killed", cwd=tmp_path, **killed)
    (run_dir,) = tmp_path.glob("killed/*")
    assert torch.load(run_dir / "state.pt")["iteration"] == 2
    assert len(metrics_of(run_dir)) == 4
    start(ROOT / name, *flags, "--num-iterations", 5, "--output-dir", "whole", cwd=tmp_path)
    (whole,) = tmp_path.glob("whole/*")
    start(ROOT / name, "--resume", run_dir, "--num-iterations", 5, cwd=tmp_path)
    check_same(run_dir, whole)


MAIN = 'if __name__ == "__main__":'
WRAPPED = f"""
grow = rollout
def rollout(*arguments):
    group_sizes = arguments[4]
    if group_sizes[0] == 1:  # an evaluation
        return grow(*arguments)
    return training_rollout(*arguments)

{MAIN}"""
SAVING = """
def training_rollout(*arguments):
    torch.save(torch.initial_seed(), f"seed_{RANK}.pt")
    turns = grow(*arguments)
    torch.save(turns, f"turns_{RANK}.pt")
    return turns
"""
LOADING = """
def training_rollout(*arguments):
    first, second = [torch.load(f"turns_{rank}.pt", weights_only=False) for rank in (0, 1)]
    turns = [[*nodes, *others] for nodes, others in __import__("itertools").zip_longest(first, second, fillvalue=[])]
    for nodes in turns:
        for node in nodes:
            node.weight /= 2
            for i, group in node.groups.items():
                group.weight /= 2
                group.policy = arguments[2][i]
    return turns
"""
AFTER = """
torch.save([policy.trained for policy in policies], f"weights_{RANK}.pt")
"""


def gradients_of(run_dir):
    """The first moments, which after one step are a tenth of the gradients."""
    moments = []
    for optimizer in torch.load(f"{run_dir}/state.pt")["optimizers"]:
        moments += [state["exp_avg"].flatten() for state in optimizer["state"].values()]
    return torch.cat(moments)


@pytest.mark.parametrize("name", ["magrpo", "ippo", "madpo"])
def test_two_processes_make_the_update_of_one(name, run, model_dir, tmp_path):
    """Fails if gradients or metrics are of one process only, or a sum, or both processes draw the same.

    From the trees that two processes grew of one task each, one process makes the same update.
    """
    before, after = (ROOT / f"{name}.py").read_text().split(MAIN)
    (tmp_path / "two.py").write_text(before + SAVING + WRAPPED + after + AFTER)
    (tmp_path / "one.py").write_text(before + LOADING + WRAPPED + after)
    flags = [*TOY, "--model", model_dir, "--num-iterations", 1]
    if name == "ippo":
        flags += ["--update-epochs", 2, "--num-minibatches", 1]
    if name == "madpo":
        flags += ["--num-pairs", 1000]  # all
    start(tmp_path / "two.py", *flags, "--output-dir", "two", cwd=tmp_path, count=2)
    (two,) = tmp_path.glob("two/*")
    weights, others = [torch.load(tmp_path / f"weights_{rank}.pt") for rank in (0, 1)]
    torch.testing.assert_close(weights, others, rtol=0, atol=0)
    names = run(tmp_path / "one.py", *flags)
    assert len({node.path[0] for node in names["turns"][0]}) == 2
    assert torch.load(tmp_path / "seed_0.pt") != torch.load(tmp_path / "seed_1.pt")
    ours, expected = gradients_of(two), gradients_of(names["run_dir"])
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
    _, of_two = metrics_of(two)
    _, of_one = metrics_of(names["run_dir"])
    for metric in of_one:
        if re.fullmatch(r"agent_\d/(grad_norm|loss|approx_kl|clipfrac)", metric):
            assert of_two[metric] == pytest.approx(of_one[metric], rel=1e-4, abs=1e-6)


def test_a_crash_while_saving_leaves_the_checkpoint(run, model_dir, monkeypatch):
    """Fails if a full disk costs the checkpoint that was there."""
    save = torch.save

    def save_half(state, path):
        if state["iteration"] == 2:
            pathlib.Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save(state, path)

    monkeypatch.setattr(torch, "save", save_half)
    with pytest.raises((OSError, SystemExit)):
        run(MAGRPO, *TOY, "--model", model_dir, "--eval-every", 1)
    (run_dir,) = pathlib.Path("runs").iterdir()
    assert torch.load(run_dir / "state.pt")["iteration"] == 1


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.yaml")), ids=lambda path: path.stem)
def test_the_example_files_run(path, run, model_dir):
    """Fails if a flag of theirs was renamed, or a value is no longer possible."""
    small = "--dataset sample --lora-rank 0 --num-iterations 1 --num-tasks 1 --num-generations 2 --eval-tasks 1"
    names = run(MAGRPO, "--config", path, *small.split(), "--max-new-tokens", 8, "--model", model_dir)
    assert "train/return" in metrics_of(names["run_dir"])[1]
