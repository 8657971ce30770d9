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

import numpy as np
import pytest
import torch
from conftest import CRITIC_FREE, ROOT, STOP, metrics_of, save_model, two_scripts
from processes import start
from safetensors.torch import load_file
from toy import Letters, Sequential, Step
from transformers import AutoModelForCausalLM, AutoTokenizer

SCRIPT = CRITIC_FREE[0]
TOY = ("--env", "test_runs:Noisy", "--num-turns", 2, "--num-generations", 3, "--num-tasks", 2, "--max-new-tokens", 12)
TOY = (*TOY, "--learning-rate", 0.01, "--eval-tasks", 2, "--eval-every", 2, "--num-iterations", 2)
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


class Fixed(Letters):
    """A reward that depends on the task alone; all tasks but one end in the first turn."""

    def step(self, branches):
        letters = [task["letter"] for task, _, _ in branches]
        return [Step(b[2], float(ord(letter)), {}, letter != "f") for b, letter in zip(branches, letters)]


def lines_of(run_dir):
    return [json.loads(line) for line in open(f"{run_dir}/rollouts.jsonl")]


def same(one, two):
    """Two runs left the same, bit for bit, but for what depends on the clock."""
    assert metrics_of(one) == metrics_of(two)
    assert pathlib.Path(one, "rollouts.jsonl").read_text() == pathlib.Path(two, "rollouts.jsonl").read_text()
    for path in (f"agent_{i}/model.safetensors" for i in range(2)):
        weights, others = load_file(f"{one}/{path}"), load_file(f"{two}/{path}")
        assert all(torch.equal(weights[name], others[name]) for name in weights | others)


def refused(run, capsys, script, *args):
    """The sentence with which the script ends; it must be one line, and the exit status 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run(script, *args)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    (line,) = (line for line in lines if "it/s" not in line and "s/it" not in line)  # but for the bar
    assert stop.value.code == 2 and line.startswith("error: ")
    return line


@two_scripts
def test_files_of_a_run(script, run, model_dir):
    """A file, a field, or a metric that is missing; agents that are saved mixed up."""
    names = run(script, *TOY, "--model", model_dir, "--num-iterations", 3)
    folder = pathlib.Path(names["run_dir"])
    assert {*os.listdir(folder)} == {*LOGS, "state.pt", "agent_0", "agent_1"}
    about = json.loads((folder / "args.json").read_text())
    assert about["script"] == script.name and about["args"]["num_generations"] == 3
    logged = metrics_of(folder, but=())
    assert [line["iteration"] for line in logged] == [0, 1, 2, 3]
    assert ["eval/return" in line for line in logged] == [True, False, True, True]
    of_agents = ("train/agent_{}/" + x for x in ("entropy", "completion_length", "stopped", "return"))
    wanted = {x.format(i) for x in ("agent_{}/loss", "agent_{}/grad_norm", *of_agents) for i in (0, 1)}
    wanted |= {f"train/{x}" for x in ("return", "reward_turn1", "reward_turn2", "share", "zero_variance_groups")}
    assert wanted | {"tokens", "time/iteration", "time/rollout"} <= logged[1].keys()
    groups = [group for nodes in names["turns"] for node in nodes for group in node.groups.values()]
    assert logged[3]["tokens"] == sum(len(ids) for group in groups for ids in group.completion_ids)
    for i, agent in enumerate(names["agents"]):
        saved = AutoModelForCausalLM.from_pretrained(folder / f"agent_{i}").state_dict()
        assert all(torch.equal(saved[name], weight) for name, weight in agent.model.state_dict().items())
        assert AutoTokenizer.from_pretrained(folder / f"agent_{i}").chat_template


def test_a_tree_can_be_rebuilt_from_the_rollouts(run, model_dir):
    """A line at another place of the tree, with the rewards, parts or prompts of another."""
    flags = ("--model", model_dir, "--max-new-tokens", 24, "--gamma", 0.5, "--eval-generations", 3, "--eval-tasks", 0)
    names = run(SCRIPT, *TOY, *flags, "--env", "toy:Letters", "--joint-mode", "cross", "--num-iterations", 1)
    tasks = {split: names["env"].tasks(split) for split in ("train", "test")}
    nodes = {(x["iteration"], x["split"], x["task_number"], *x["path"]): x for x in lines_of(names["run_dir"])}
    assert len(nodes) == len(lines_of(names["run_dir"])) > 20
    for (iteration, split, number, *path), node in reversed(nodes.items()):
        joint = node["joint"]
        children = [nodes.get((iteration, split, number, *path, j)) for j in range(len(joint))]
        assert len(joint) == {"train": 9, "test": 3 if node["turn"] == 1 else 1}[split]
        texts = [[agent["completions"][g] for agent, g in zip(node["agents"], choice)] for choice in joint]
        letter = tasks[split][number]["letter"]
        shares = [sum(text.count(letter) + 0.1 * len(text) for text in actions) / 10 for actions in texts]
        assert node["parts"] == {"share": pytest.approx(shares)}
        assert node["rewards"] == pytest.approx([share * node["turn"] for share in shares])
        before = nodes[iteration, split, number, *path[:-1]] if path else None
        said = before and [a["completions"][g] for a, g in zip(before["agents"], before["joint"][path[-1]])]
        for i, agent in enumerate(node["agents"]):
            assert agent["prompt"] == f"Say {letter * (i + 1)}." + (f" You said {said}." if said else "")
            assert ("advantages" in agent) == (split == "train")
        if split == "test":  # of a training rollout only some nodes are kept
            node["value"] = 0.0
            for child, reward, choice in zip(children, node["rewards"], joint):
                value = reward + (0.5 * child["value"] if child else 0)
                node["value"] += value / len(joint)
                assert [agent["returns"][g] for agent, g in zip(node["agents"], choice)] == pytest.approx([value] * 2)


def test_rollouts_with_silent_agents_and_feedback(run, model_dir, monkeypatch):
    """A silent agent that is recorded as one that spoke; parts that only some steps have; feedback that is lost."""
    step = Sequential.step

    def with_parts(self, branches):
        steps = [x._replace(feedback={"turn": len(b[1])}) for b, x in zip(branches, step(self, branches))]
        return [x._replace(parts={"odd": 1.0} if k % 2 else {}) for k, x in enumerate(steps)]

    monkeypatch.setattr(Sequential, "step", with_parts)
    for line in lines_of(run(SCRIPT, *TOY, "--model", model_dir, "--env", "toy:Sequential")["run_dir"]):
        J, second = len(line["joint"]), line["turn"] == 2
        assert [agent is None for agent in line["agents"]] == [second, not second]
        assert line["feedback"] == [{"turn": line["turn"] - 1}] * J
        assert J == 1 or (len(line["parts"]["odd"]) == J and {*line["parts"]["odd"]} == {None, 1.0})


def test_saved_agents_sample_as_in_training(run, tmp_path):
    """A generation_config of the model that cuts or bends the distribution, or that has lost a stop token."""
    path = save_model(tmp_path / "model")
    odd = {"do_sample": True, "top_k": 5, "top_p": 0.5, "repetition_penalty": 1.7, "eos_token_id": [STOP, 11]}
    pathlib.Path(path, "generation_config.json").write_text(json.dumps(odd))
    run_dir = run(SCRIPT, *TOY, "--model", path, "--temperature", 0.7)["run_dir"]
    model = AutoModelForCausalLM.from_pretrained(f"{run_dir}/agent_0")
    assert {*model.generation_config.eos_token_id} == {STOP, 11} and model.generation_config.do_sample
    ids = torch.tensor([[5, 6, 7, 8]])
    said = model.generate(ids, max_new_tokens=1, output_scores=True, return_dict_in_generate=True, pad_token_id=0)
    torch.testing.assert_close(said.scores[0], model(ids).logits[:, -1].detach() / 0.7)


def test_configs_are_defaults_and_flags_win(run, model_dir, tmp_path, monkeypatch):
    """1e-5, which YAML takes for a text; switches, lists and texts that are lost or win over flags."""
    monkeypatch.setattr(Letters, "__init__", lambda self, reward, **setup: vars(self).update(setup))
    text = "max-grad-norm: 1e-5\nanneal_lr: false\nseed: 7\nmodel: [{0}, {0}]\ngamma: 1\neval_temperature: 0\n"
    (tmp_path / "mine.yaml").write_text(text.format(model_dir) + "env_kwargs: {reward: an odd one}\n")
    names = run(SCRIPT, *TOY, "--num-iterations", 0, "--config", "mine.yaml", "--seed", 8)
    args = names["args"]
    assert (args.max_grad_norm, args.anneal_lr, args.seed) == (1e-5, False, 8)
    assert (args.learning_rate, args.gamma, args.eval_temperature) == (0.01, 1.0, 0.0)
    assert (args.model, args.env_kwargs) == ([model_dir] * 2, {"reward": "an odd one"})
    again = run(SCRIPT, "--config", f"{names['run_dir']}/args.json", "--gamma", 0.5, "--anneal-lr")
    changed = {"config": f"{names['run_dir']}/args.json", "gamma": 0.5, "anneal_lr": True}
    assert vars(again["args"]) == vars(args) | changed | {"output_dir": again["args"].output_dir}


def test_wandb_gets_the_metrics_and_a_resumed_run_goes_on_in_its_own(run, model_dir, tmp_path, monkeypatch):
    """Metrics at the wrong step, or a second run on the tracker's page after a resume."""
    noted = "init = lambda **options: seen.append((os.environ['WANDB_RUN_ID'], options))"
    noted = f"import os\nseen = []\n{noted}\nlog = lambda metrics, step: seen.append((step, metrics))"
    (tmp_path / "wandb.py").write_text(noted)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("WANDB_RUN_ID", "")  # to be restored
    del os.environ["WANDB_RUN_ID"]
    run_dir = run(SCRIPT, *TOY, "--model", model_dir, "--track", "wandb")["run_dir"]
    del os.environ["WANDB_RUN_ID"]  # a resume has a new process
    run(SCRIPT, "--resume", f"{run_dir}/", "--num-iterations", 3)
    seen, name = sys.modules.pop("wandb").seen, os.path.basename(run_dir)
    assert [k for k, _ in seen] == [name, 0, 1, 2, name, 3]
    assert seen[0][1]["name"] == name and seen[4][1]["resume"] == "allow"
    assert [{"iteration": k} | metrics for k, metrics in seen if k != name] == metrics_of(run_dir, but=())


def test_a_copied_script_trains_on_the_readmes_environment_in_an_empty_folder(tmp_path, model_dir):
    """A script that needs envs/ or another file beside it, and an example that does not run."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    (tmp_path / "shout.py").write_text(next(block for block in blocks if "class Shout" in block))
    shutil.copy(SCRIPT, tmp_path)
    command = [sys.executable, SCRIPT.name, "--env", "shout:Shout", "--model", model_dir, "--num-iterations", "2"]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([*command, "--max-new-tokens", "8"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (run_dir,) = tmp_path.glob("runs/shout.Shout__*")
    assert (run_dir / "agent_1").is_dir() and f"--resume runs/{run_dir.name}" in done.stdout


@pytest.mark.parametrize(
    "name, number", [("ippo", signal.SIGKILL), ("magrpo", signal.SIGKILL), ("magrpo", signal.SIGINT)]
)
def test_a_stopped_run_resumes_bit_for_bit(name, number, run, model_dir, tmp_path):
    """Moments, a critic, a generator or order of tasks that starts anew; doubled lines; a signal without a save."""
    script, flags = ROOT / f"{name}.py", (*TOY, "--model", model_dir, "--no-anneal-lr", "--save-every", 2)
    flags += ("--use-separate-critic",) if name == "ippo" else ()
    killed = number == signal.SIGKILL  # in the fourth iteration; the others come in the third
    how = {"cwd": tmp_path, "code": -9 if killed else 0, "STOP": f"{number} {11 if killed else 9} 0"}
    start(script, *flags, "--num-iterations", 4, "--output-dir", "stopped", **how)
    (stopped,) = tmp_path.glob("stopped/*")
    assert torch.load(stopped / "state.pt")["iteration"] == (2 if killed else 3)
    assert len(metrics_of(stopped)) == 4 and (stopped / "agent_0").is_dir() == (not killed)
    whole = run(script, *flags, "--num-iterations", 5)["run_dir"]
    run(script, "--resume", stopped, "--num-iterations", 5)
    same(stopped, whole)


def test_a_resume_that_cannot_go_on_is_refused(run, model_dir, capsys):
    """A new run, or other agents with a stranger's weights, where a run was to be continued."""
    run_dir = run(SCRIPT, *TOY, "--model", model_dir)["run_dir"]
    assert "--resume: " in refused(run, capsys, SCRIPT, *TOY, "--resume", f"{run_dir}/agent_0")
    for flags in (["--num-agents", 3], ["--share-policy"], ["--lora-rank", 2]):
        assert "--resume: " in refused(run, capsys, SCRIPT, "--resume", run_dir, *flags)


@two_scripts
def test_two_processes_make_the_update_of_one(script, run, model_dir, tmp_path):
    """Gradients or metrics of one process only, a sum for a mean, equal draws: from the trees that two processes grew
    of one task each, one process makes the same update."""
    text = script.read_text().replace('before[0][f"eval/agent_{i}/return"]', "0.0")  # from equal values, in ippo.py
    before, after = text.split('        metrics = summarize("train"')
    keep = '        torch.save(turns, f"turns_{rank}.pt")\n'
    last = "torch.initial_seed(), *([p.grad for p in agent.trained.values()] for agent in policies)"
    after = f'        metrics = summarize("train"{after}'
    (tmp_path / "two.py").write_text(f'{before}{keep}{after}\ntorch.save(({last}), f"last_{{rank}}.pt")')
    load = """
        import itertools
        pair = [torch.load(f"turns_{k}.pt", weights_only=False) for k in (0, 1)]
        turns = [[*a, *b] for a, b in itertools.zip_longest(*pair, fillvalue=[])]
        for node in chain(*turns):
            node.weight /= 2
"""
    (tmp_path / "one.py").write_text(before + load + after)
    flags = [*TOY, "--model", model_dir, "--num-iterations", 1, "--output-dir"]
    flags[:0] = ("--update-epochs", 1, "--num-minibatches", 1) if script.stem == "ippo" else ()
    printed = start(tmp_path / "two.py", *flags, "two", cwd=tmp_path, count=2)
    names = run(tmp_path / "one.py", *flags, "one")
    (seed, *ours), (other_seed, *theirs) = (torch.load(tmp_path / f"last_{rank}.pt") for rank in range(2))
    assert seed != other_seed  # or agents of the same task would draw the same
    for agent, *gradients in zip(names["policies"], ours, theirs):
        scale = max(p.grad.abs().max().item() for p in agent.trained.values())
        for p, gradient, other in zip(agent.trained.values(), *gradients):
            assert torch.equal(gradient, other)
            torch.testing.assert_close(gradient, p.grad, rtol=1e-4, atol=1e-5 * scale)
    folders = names["run_dir"], *tmp_path.glob("two/*")
    ours, theirs = (metrics_of(folder, but=("time/", "eval/"))[1] for folder in folders)
    assert theirs == pytest.approx(ours, rel=1e-4, abs=1e-6)
    assert len({node.task_number for node in names["turns"][0]}) == 2 and printed.count("iteration 0: evaluation") == 1


@two_scripts
def test_two_processes_stop_and_resume_with_sharded_moments(script, model_dir, tmp_path):
    """Moments of another process that are lost, an update that is not that of AdamW, a process that waits for one
    that has stopped."""
    flags = (*TOY, "--model", model_dir, "--output-dir")
    plain = script.read_text()
    for sharded in ("if dist.is_initialized():", "if world_size > 1 else ():\n                agent.optimizer"):
        assert plain.count(sharded) == 1
        plain = plain.replace(sharded, sharded.replace("dist.is_initialized()", "0").replace("world_size > 1", "0"))
    (tmp_path / "plain.py").write_text(plain)
    jobs = [(script, "whole", "0 0 0"), (tmp_path / "plain.py", "plain", "0 0 0"), (script, "part", "15 3 1")]
    for path, folder, stop in jobs:  # the last: only one of its processes is told to stop, in iteration 1
        start(path, *flags, folder, cwd=tmp_path, count=2, STOP=stop)
    whole, plain, part = (next(tmp_path.glob(f"{folder}/*")) for _, folder, _ in jobs)
    same(whole, plain)
    assert torch.load(part / "state.pt")["iteration"] == 1
    start(script, "--resume", part, cwd=tmp_path, count=2)
    same(whole, part)


@pytest.mark.parametrize("count, tasks", [(1, 3), (2, 3), (2, 1)])
def test_answers_are_collected_on_training_tasks_by_all_processes(count, tasks, model_dir, tmp_path):
    """Held-out tasks; a mean over one process's tasks, or of means; lost lines; fewer tasks than processes."""
    flags = ("--env", "test_runs:Fixed", "--num-iterations", 0, "--eval-split", "train", "--eval-tasks", tasks)
    start(SCRIPT, *TOY, *flags, "--eval-generations", 4, "--model", model_dir, cwd=tmp_path, count=count)
    chosen = [int(k) for k in np.random.default_rng(0).permutation(6)[:tasks]]
    (run_dir,) = tmp_path.glob("runs/*")
    (metrics,), lines = metrics_of(run_dir), [line for line in lines_of(run_dir) if line["turn"] == 1]
    assert metrics["eval/return"] == pytest.approx(np.mean([ord("abcdef"[k]) * (1 + (k == 5)) for k in chosen]))
    assert {line["agents"][0]["prompt"][4] for line in lines} == {"abcdef"[k] for k in chosen}
    assert sorted(line["task_number"] for line in lines) == sorted(chosen)
    assert {line["split"] for line in lines} == {"train"} and {len(line["joint"]) for line in lines} == {4}
    assert {*os.listdir(run_dir)} == LOGS


@pytest.mark.parametrize("flags", ["--env tdlr", "--model tiny tiny tiny"])
def test_a_bad_argument_is_one_sentence(flags, run, tmp_path, capsys):
    """A traceback, or a run that is not the one that was asked for."""
    assert flags.split()[0] in refused(run, capsys, SCRIPT, "--num-iterations", 0, *flags.split())
    assert not (tmp_path / "runs").exists()


def test_a_prompt_too_long_is_refused_before_training(run, model_dir, tmp_path, monkeypatch, capsys):
    """The longest prompt in characters, which is not the longest in tokens; one that the first iterations miss."""
    prompts = {"c": "\N{SLIGHTLY SMILING FACE}" * 300}  # 1,200 tokens
    monkeypatch.setattr(Letters, "observe", lambda self, task, _: [prompts.get(task["letter"], "long " * 150)] * 2)
    said = refused(run, capsys, SCRIPT, *TOY, "--model", model_dir)
    assert "1024" in said and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("fault", ["prompt", "nan", "nan in ippo"])
def test_a_fault_in_mid_training_leaves_the_checkpoint(fault, run, model_dir, monkeypatch, capsys):
    """A traceback, weights of NaN in a checkpoint, lines that come twice after a resume."""
    flags = (*TOY, "--model", model_dir, "--save-every", 1, "--num-iterations", 3, "--env", "toy:Letters")
    script, fault = ROOT / f"{'ippo' if 'ippo' in fault else 'magrpo'}.py", fault.split()[0]
    whole, calls, step = run(script, *flags, "--output-dir", "whole")["run_dir"], [], Letters.step

    def wrong(self, branches):
        calls.append(1)
        first, *others = step(self, branches)
        if len(calls) == 5:  # the first turn of the second iteration
            first = first._replace(**{"prompt": {"actions": ["x" * 1100]}, "nan": {"reward": math.nan}}[fault])
        return [first, *others]

    with monkeypatch.context() as patch:
        patch.setattr(Letters, "step", wrong)
        said = refused(run, capsys, script, *flags)
    assert {"prompt": "has 11", "nan": "is nan"}[fault] in said
    (run_dir,) = pathlib.Path("runs").iterdir()
    assert torch.load(run_dir / "state.pt")["iteration"] == 1
    run(script, "--resume", run_dir)
    same(run_dir, whole)


def test_a_full_disk_is_one_sentence_and_the_checkpoint_stays(run, model_dir, monkeypatch, capsys):
    """A traceback, a partial file that keeps the disk full, a checkpoint that is lost."""
    save = torch.save

    def full(state, path):
        if state["iteration"] == 2:
            os.mknod(path)
            raise OSError(28, "No space left on device")
        save(state, path)

    monkeypatch.setattr(torch, "save", full)
    said = refused(run, capsys, SCRIPT, *TOY, "--model", model_dir, "--save-every", 1)
    assert "No space left" in said and "--output-dir" in said
    (run_dir,) = pathlib.Path("runs").iterdir()
    assert not (run_dir / "state.tmp").exists() and torch.load(run_dir / "state.pt")["iteration"] == 1
