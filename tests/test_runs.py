"""Whole runs: what they leave behind, resuming, signals, several processes, refusals."""

import json
import math
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
from itertools import chain

import numpy as np
import pytest
import torch
from conftest import ROOT, STOP, lines_of, metrics_of, policies_of, refused, save_model, two_scripts
from processes import start
from safetensors.torch import load_file
from toy import Letters, Sequential
from transformers import AutoModelForCausalLM, AutoTokenizer

MAGRPO = ROOT / "magrpo.py"
TOY = "--env test_runs:Noisy --num-turns 2 --num-generations 3 --num-tasks 2 --max-new-tokens 12 --learning-rate 0.01"
TOY = f"{TOY} --eval-tasks 2 --eval-every 2 --num-iterations 2".split()
LOGS = {"args.json", "metrics.jsonl", "rollouts.jsonl"}


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
    for i in range(2):
        weights = load_file(f"{one}/agent_{i}/model.safetensors")
        for name, weight in load_file(f"{two}/agent_{i}/model.safetensors").items():
            assert torch.equal(weights[name], weight)


METRICS = """
agent_0/loss agent_0/grad_norm agent_1/loss agent_1/grad_norm tokens time/iteration time/rollout
train/agent_0/entropy train/agent_0/completion_length train/agent_0/stopped train/agent_0/return
train/return train/reward_turn1 train/reward_turn2 train/share
"""


@two_scripts
def test_files_of_a_run(script, run, model_dir):
    """Fails if a file, a field, or a metric is missing, or agents are saved mixed up."""
    names = run(script, *TOY, "--model", model_dir, "--num-iterations", 3)
    folder = names["run_dir"]
    assert set(os.listdir(folder)) == {*LOGS, "state.pt", "agent_0", "agent_1"}
    about = json.loads(pathlib.Path(folder, "args.json").read_text())
    assert (about["script"], about["args"]["num_generations"]) == (script.name, 3)
    lines = metrics_of(folder, without=())
    assert [line["iteration"] for line in lines] == [0, 1, 2, 3]
    assert ["eval/return" in line for line in lines] == [True, False, True, True]
    assert lines[1].keys() >= set(METRICS.split())
    groups = [group for node in chain(*names["turns"]) for group in node.groups.values()]
    assert lines[3]["tokens"] == sum(len(ids) for group in groups for ids in group.completion_ids)
    for i, policy in enumerate(policies_of(names)):
        saved = AutoModelForCausalLM.from_pretrained(f"{folder}/agent_{i}").state_dict()
        for name, weight in policy.trained.items():
            assert name.startswith("critic.") or torch.equal(saved[name], weight)
        assert AutoTokenizer.from_pretrained(f"{folder}/agent_{i}").chat_template


class OddParts(Sequential):
    """Only answers that end their branch in Letters have a part; feedback is the number of earlier turns."""

    def step(self, branches):
        steps = []
        for step, (_, history, _) in zip(Letters.step(self, branches), branches):
            parts = step.parts if step.done else {}
            steps.append(step._replace(done=False, parts=parts, feedback={"turns": len(history)}))
        return steps


@pytest.mark.parametrize("env", ["toy:Letters", "test_runs:OddParts"])
def test_a_tree_can_be_rebuilt_from_the_rollouts(env, run, model_dir):
    """Fails if a line is at another place of the tree, or has prompts, rewards, parts or feedback of another."""
    flags = "--joint-mode cross --eval-generations 3 --eval-tasks 0 --num-iterations 1 --max-new-tokens 24"
    names = run(MAGRPO, *TOY, "--model", model_dir, "--env", env, *flags.split())
    env = names["env"]
    lines = lines_of(names["run_dir"])
    assert len(lines) > 20
    histories = {}  # place of a node -> the Steps that lead there
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
        assert line["parts"].get("share", [None] * len(steps)) == [step.parts.get("share") for step in steps]
        assert line["feedback"] == [step.feedback for step in steps]
        for j, step in enumerate(steps):
            histories[(*place, j)] = [*history, step]
        speaker = agents[0] or agents[1]
        assert ("advantages" in speaker) == (line["split"] == "train")
        if len(steps) == 1:  # in an evaluation's last turn
            assert speaker["returns"] == line["rewards"]


def test_saved_agents_sample_as_in_training(run, tmp_path):
    """Fails if the model's own generation_config cuts or bends the distribution, or a stop token is lost."""
    path = save_model(tmp_path / "model")
    odd = {"do_sample": True, "top_k": 5, "top_p": 0.5, "repetition_penalty": 1.7, "eos_token_id": [STOP, 11]}
    pathlib.Path(path, "generation_config.json").write_text(json.dumps(odd))
    run_dir = run(MAGRPO, *TOY, "--model", path, "--temperature", 0.7)["run_dir"]
    model = AutoModelForCausalLM.from_pretrained(f"{run_dir}/agent_0")
    config = model.generation_config
    assert set(config.eos_token_id) == {STOP, 11}
    assert config.do_sample
    config.update(output_scores=True, return_dict_in_generate=True, pad_token_id=0, max_new_tokens=1)
    ids = torch.tensor([[5, 6, 7, 8]])
    (scores,) = model.generate(ids).scores
    torch.testing.assert_close(scores, model(ids).logits[:, -1].detach() / 0.7)


def test_configs_are_defaults_and_flags_win(run, model_dir, tmp_path, monkeypatch):
    """Fails if a number, switch, list or dict of a file is lost, or wins over a flag."""
    monkeypatch.setattr(Letters, "__init__", lambda self, reward, **setup: vars(self).update(setup))
    config = {"env": "toy:Letters", "max_grad_norm": 1e-5, "anneal_lr": False, "seed": 7, "num_iterations": 0}
    config |= {"model": [model_dir, model_dir], "env_kwargs": {"reward": "an odd one"}}
    (tmp_path / "mine.json").write_text(json.dumps(config))
    names = run(MAGRPO, "--config", "mine.json", "--seed", 8)
    args = vars(names["args"])
    assert config | {"seed": 8} == {name: args[name] for name in config}
    source = f"{names['run_dir']}/args.json"
    again = run(MAGRPO, "--config", source, "--gamma", 0.5, "--anneal-lr")["args"]
    changes = {"config": source, "gamma": 0.5, "anneal_lr": True, "output_dir": again.output_dir}
    assert vars(again) == args | changes


WANDB = """
import os
calls = []
def init(**options):
    calls.append((os.environ["WANDB_RUN_ID"], options))
def log(metrics, step):
    calls.append((step, metrics))
"""


def test_wandb_gets_the_metrics_and_a_resumed_run_goes_on_in_its_own(run, model_dir, tmp_path, monkeypatch):
    """Fails if metrics are at the wrong step, or a resume makes a second run on the tracker's page."""
    (tmp_path / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("WANDB_RUN_ID", "")  # to be restored
    run_dir = run(MAGRPO, *TOY, "--model", model_dir, "--track", "wandb")["run_dir"]
    os.environ["WANDB_RUN_ID"] = ""  # a resume has a new process
    run(MAGRPO, "--resume", f"{run_dir}/", "--num-iterations", 3)
    calls = sys.modules.pop("wandb").calls
    name = os.path.basename(run_dir)
    assert [key for key, _ in calls] == [name, 0, 1, 2, name, 3]
    _, options = calls[4]
    assert options["resume"] == "allow"
    metrics = [{"iteration": key} | values for key, values in calls if key != name]
    assert metrics == metrics_of(run_dir, without=())


def test_a_copied_script_trains_on_the_readmes_environment_in_an_empty_folder(tmp_path, model_dir):
    """Fails if a script needs envs/ or another file next to it, or the README's example does not run."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    (example,) = [block for block in blocks if "class Shout" in block]
    (tmp_path / "shout.py").write_text(example)
    shutil.copy(MAGRPO, tmp_path)
    flags = "--env shout:Shout --num-iterations 2 --max-new-tokens 8 --model"
    command = [sys.executable, "magrpo.py", *flags.split(), model_dir]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (run_dir,) = tmp_path.glob("runs/shout.Shout__*")
    assert (run_dir / "agent_1").is_dir()


STOPS = [  # script, processes, signal, at which call of step(), last iteration that is saved, further flags
    ("ippo.py", 1, signal.SIGKILL, 11, 2, ["--use-separate-critic", "--update-epochs", 1]),  # in iteration 4
    ("magrpo.py", 1, signal.SIGINT, 9, 3, []),  # in iteration 3
    ("magrpo.py", 2, signal.SIGTERM, 3, 1, []),  # in iteration 1, and only the second process
]


@pytest.mark.parametrize("name, count, number, call, saved, more", STOPS)
def test_a_stopped_run_resumes_bit_for_bit(name, count, number, call, saved, more, model_dir, tmp_path):
    """Fails if moments, a critic, a generator or the order of tasks starts anew, lines come twice, or a process waits
    for one that was stopped."""
    flags = [*TOY, "--model", model_dir, "--no-anneal-lr", "--save-every", 2, *more]
    killed = number == signal.SIGKILL

    def start_all(*flags, **options):
        start(ROOT / name, *flags, cwd=tmp_path, count=count, **options)

    stop = {"code": -9 if killed else 0, "STOP": f"{int(number)} {call} {count - 1}"}
    start_all(*flags, "--num-iterations", 4, "--output-dir", "stopped", **stop)
    (stopped,) = tmp_path.glob("stopped/*")
    assert torch.load(stopped / "state.pt")["iteration"] == saved
    assert len(metrics_of(stopped)) == saved + 1 + killed
    assert (stopped / "agent_0").is_dir() == (not killed)
    start_all(*flags, "--num-iterations", 5, "--output-dir", "whole")
    (whole,) = tmp_path.glob("whole/*")
    start_all("--resume", stopped, "--num-iterations", 5)
    check_same(stopped, whole)


def test_a_resume_that_cannot_go_on_is_refused(run, model_dir, capsys):
    """Fails if a new run starts, or other agents with a stranger's weights, where a run was to be continued."""
    run_dir = run(MAGRPO, *TOY, "--model", model_dir)["run_dir"]
    assert "--resume: " in refused(run, capsys, MAGRPO, "--resume", f"{run_dir}/agent_0")
    assert "--resume: " in refused(run, capsys, MAGRPO, "--resume", run_dir, "--num-agents", 3)


MAIN = 'if __name__ == "__main__":'
WRAPPED = f"""
grow = rollout
def rollout(*arguments):
    generations = arguments[4]
    if generations[0] == 1:  # an evaluation
        return grow(*arguments)
    return training_rollout(*arguments)

{MAIN}"""
SAVING = """
def training_rollout(*arguments):
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
    return turns
"""
CHECKPOINT = "        # 6 CHECKPOINT"
ALIKE = f"""
        assert len(set(all_gather(torch.initial_seed()))) == WORLD_SIZE
        for policy in policies:
            for p in policy.trained.values():
                assert all(torch.equal(p, other) for other in all_gather(p.detach()))
{CHECKPOINT}"""


def gradients_of(run_dir):
    """The first moments, which after one step are a tenth of the gradients."""
    moments = []
    for optimizer in torch.load(f"{run_dir}/state.pt")["optimizers"]:
        moments += [state["exp_avg"].flatten() for state in optimizer["state"].values()]
    return torch.cat(moments)


@two_scripts
def test_two_processes_make_the_update_of_one(script, run, model_dir, tmp_path):
    """Fails if gradients or metrics are of one process only, or a sum, or both processes draw the same.

    From the trees that two processes grew of one task each, one process makes the same update.
    """
    before, after = script.read_text().replace(CHECKPOINT, ALIKE).split(MAIN)
    (tmp_path / "two.py").write_text(before + SAVING + WRAPPED + after)
    (tmp_path / "one.py").write_text(before + LOADING + WRAPPED + after)
    flags = [*TOY, "--model", model_dir, "--num-iterations", 1]
    if script.stem == "ippo":
        flags += ["--update-epochs", 2, "--num-minibatches", 1]
    printed = start(tmp_path / "two.py", *flags, "--output-dir", "two", cwd=tmp_path, count=2)
    assert printed.count("iteration 0: evaluation") == 1
    (two,) = tmp_path.glob("two/*")
    names = run(tmp_path / "one.py", *flags)
    assert len({node.task_number for node in names["turns"][0]}) == 2
    ours, expected = gradients_of(two), gradients_of(names["run_dir"])
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
    _, of_two = metrics_of(two, without=("time/", "eval/"))
    _, of_one = metrics_of(names["run_dir"], without=("time/", "eval/"))
    assert of_two == pytest.approx(of_one, rel=1e-4, abs=1e-6)


class Fixed(Letters):
    """A reward that depends on the task alone."""

    def step(self, branches):
        steps = super().step(branches)
        return [step._replace(reward=ord(task["letter"]), done=True) for step, (task, _, _) in zip(steps, branches)]


@pytest.mark.parametrize("tasks", [1, 3])
def test_answers_are_collected_on_training_tasks_by_all_processes(tasks, model_dir, tmp_path):
    """Fails if tasks are held out, a mean is over one process's tasks or of means, or lines are lost."""
    flags = "--env test_runs:Fixed --num-iterations 0 --eval-split train --eval-generations 4 --eval-tasks"
    start(MAGRPO, *TOY, *flags.split(), tasks, "--model", model_dir, cwd=tmp_path, count=2)
    (run_dir,) = tmp_path.glob("runs/*")
    assert set(os.listdir(run_dir)) == LOGS
    lines = lines_of(run_dir)
    letters = {"abcdef"[line["task_number"]] for line in lines}
    assert len(letters) == len(lines) == tasks
    assert {len(line["agents"][0]["completions"]) for line in lines} == {4}
    (metrics,) = metrics_of(run_dir)
    assert metrics["eval/return"] == pytest.approx(np.mean([ord(letter) for letter in letters]))


BAD = """
--env tdlr
--env toy:Nope
--num-generations 1
--model tiny tiny tiny
--model runs/nothing
--model ./adapter
--resume nothing
"""


@pytest.mark.parametrize("flags", BAD.strip().splitlines())
def test_a_bad_argument_is_one_sentence(flags, run, tmp_path, capsys):
    """Fails if it ends in a traceback, or in a run that nobody asked for."""
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    name, *values = flags.split()
    assert name in refused(run, capsys, MAGRPO, "--num-iterations", 0, name, *values)
    assert not (tmp_path / "runs").exists()


class Faulty(Letters):
    """Has a fault in the first turn of the second iteration."""

    calls, fault = 0, ""  # two calls an evaluation, two an iteration

    def step(self, branches):
        Faulty.calls += 1
        steps = super().step(branches)
        if Faulty.calls == 5 and Faulty.fault == "error":
            raise ConnectionError("the server is gone")
        if Faulty.calls == 5 and Faulty.fault:
            steps[0] = steps[0]._replace(reward=math.nan)
        return steps


@pytest.mark.parametrize("name, fault", [("magrpo.py", "error"), ("ippo.py", "nan")])
def test_a_fault_in_mid_training_leaves_the_checkpoint(name, fault, run, model_dir, monkeypatch, capsys):
    """Fails if an environment's error costs the last iteration, weights of NaN are saved, or lines come twice."""
    flags = [ROOT / name, *TOY, "--model", model_dir, "--num-iterations", 3, "--env", "test_runs:Faulty"]
    whole = run(*flags, "--save-every", 1, "--output-dir", "whole")["run_dir"]
    with monkeypatch.context() as patch:
        patch.setattr(Faulty, "calls", 0)
        patch.setattr(Faulty, "fault", fault)
        if fault == "nan":
            assert "--env" in refused(run, capsys, *flags, "--save-every", 1)
        else:
            with pytest.raises(ConnectionError):  # the traceback is the environment's own
                run(*flags)
    (run_dir,) = pathlib.Path("runs").iterdir()
    assert torch.load(run_dir / "state.pt")["iteration"] == 1
    run(ROOT / name, "--resume", run_dir)
    check_same(run_dir, whole)


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
        run(MAGRPO, *TOY, "--model", model_dir, "--save-every", 1)
    (run_dir,) = pathlib.Path("runs").iterdir()
    assert torch.load(run_dir / "state.pt")["iteration"] == 1
