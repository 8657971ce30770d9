"""Whole runs: what they leave behind, resuming, interruption, several processes, bad arguments."""

import builtins
import decimal
import itertools
import json
import math
import os
import pathlib
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import CRITIC_FREE, END, ROOT, SCRIPTS, STOP, make_tokenizer, metrics_of, save_model, two_scripts
from processes import Started, printed_by
from toy import Step
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

TOY = (
    "--env",
    "toy:Letters",
    "--num-generations",
    3,
    "--num-tasks",
    2,
    "--max-new-tokens",
    12,
    "--learning-rate",
    0.01,
)
TOY = (*TOY, "--eval-tasks", 2, "--eval-every", 2, "--num-turns", 2)


def weights_of(run_dir, agent=0):
    return AutoModelForCausalLM.from_pretrained(os.path.join(run_dir, f"agent_{agent}")).state_dict()


def torchrun(script, *args, code, cwd):
    """What the script prints in two processes; `code` is run before it, to break something."""
    launcher = cwd / "launcher.py"
    begin, end = (
        f"import runpy, sys; sys.argv[0] = {str(script)!r}",
        "runpy.run_path(sys.argv[0], run_name='__main__')",
    )
    launcher.write_text(f"{begin}\n{code}\n{end}")
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    command += ["--standalone", str(launcher), *map(str, args)]
    done = subprocess.run(
        command, cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@two_scripts
def test_a_run_leaves_what_the_readme_says(script, run, model_dir, capsys):
    names = run(script, *TOY, "--model", model_dir, "--num-iterations", 3)
    run_dir = pathlib.Path(names["run_dir"])
    assert run_dir.name.startswith(f"toy.Letters__{script.stem}__1__")
    about = json.loads((run_dir / "args.json").read_text())
    assert about["args"]["num_generations"] == 3 and about["versions"]["torch"] == torch.__version__
    if shutil.which("git"):
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
        assert about["commit"] == commit.strip()
    lines = metrics_of(run_dir, but=())
    assert [line["iteration"] for line in lines] == [0, 1, 2, 3]
    assert ["eval/return" in line for line in lines] == [True, False, True, True]
    wanted = (
        "train/return train/reward_turn1 train/reward_turn2 train/share train/zero_variance_groups tokens_per_second "
    )
    wanted += "agent_0/loss agent_1/grad_norm agent_0/entropy agent_1/completion_length agent_1/stopped "
    wanted += "time/sample time/reward time/update"
    assert set(wanted.split()) <= set(lines[1])
    for i in range(2):
        model = AutoModelForCausalLM.from_pretrained(run_dir / f"agent_{i}")
        for name, weight in names["agents"][i].model.state_dict().items():
            assert torch.equal(model.state_dict()[name], weight)
        assert AutoTokenizer.from_pretrained(run_dir / f"agent_{i}").chat_template
    for agent in names["agents"]:
        assert set(agent.stop_ids.tolist()) == {2, *range(10, 30)}  # the tokenizer's and the generation_config's
        assert agent.optimizer.param_groups[0]["weight_decay"] == 0
    assert "train/zero_variance_groups" in lines[2] and "eval/zero_variance_groups" not in lines[2]  # a group of one
    lines = [json.loads(line) for line in open(run_dir / "rollouts.jsonl")]
    assert (
        max(Counter((x["iteration"], x["turn"]) for x in lines if x["split"] == "train").values()) == 2
    )  # log_groups
    for group in (group for line in lines for group in line["agents"]):
        assert len(group["stopped"]) == len(group["completions"])
    assert {stopped for line in lines for group in line["agents"] for stopped in group["stopped"]} == {True, False}
    assert "<|im_end|>" not in "".join(text for line in lines for a in line["agents"] for text in a["completions"])
    lines = metrics_of(run_dir, but=())
    assert not torch.equal(weights_of(run_dir, 0)["lm_head.weight"], weights_of(run_dir, 1)["lm_head.weight"])
    printed = capsys.readouterr()
    assert f"--resume {run_dir}" in printed.out and " tokens/s" in printed.err


@two_scripts
def test_metrics_follow_from_the_rollouts(script, run, model_dir, monkeypatch):
    from toy import Letters

    rewarded, step = [], Letters.step  # a clock that only rewards move, by a second a turn
    monkeypatch.setattr(time, "perf_counter", lambda: len(rewarded))
    monkeypatch.setattr(Letters, "step", lambda self, branches: rewarded.append(1) or step(self, branches))
    names = run(script, *TOY, "--model", model_dir, "--num-iterations", 2, "--log-groups", 99)
    lines = [json.loads(line) for line in open(os.path.join(names["run_dir"], "rollouts.jsonl"))]
    metrics = metrics_of(names["run_dir"], but=())
    groups = [group for nodes in names["turns"] for node in nodes for group in node.groups]
    assert metrics[2]["tokens"] == sum(len(ids) for group in groups for ids in group.completion_ids)
    assert metrics[2]["tokens_per_second"] == metrics[2]["tokens"] / 2
    assert [metrics[2][f"time/{part}"] for part in ("sample", "reward", "update")] == [0, 2, 0]
    for iteration in (1, 2):
        first = [x for x in lines if (x["iteration"], x["split"], x["turn"]) == (iteration, "train", 1)]
        assert len(first) == 2 and all(len(x["rewards"]) == 3 for x in first)
        mean = sum(sum(x["rewards"]) for x in first) / 6
        assert metrics[iteration]["train/reward_turn1"] == pytest.approx(mean)
        for line in first:
            for agent in line["agents"]:
                assert len(agent["completions"]) == len(agent["returns"]) == len(agent["advantages"]) == 3
            letter = line["task"]["letter"]
            assert [agent["prompt"] for agent in line["agents"]] == [f"Say {letter}.", f"Say {letter * 2}."]
            assert [part["share"] for part in line["parts"]] == line["rewards"]  # of the first turn
            for joint, reward in zip(line["joint"], line["rewards"]):
                texts = [agent["completions"][g] for agent, g in zip(line["agents"], joint)]
                assert reward == pytest.approx(sum(t.count(letter) + 0.1 * len(t) for t in texts) / 10)
    held_out = [x["task"]["letter"] for x in lines if x["split"] == "eval" and x["turn"] == 1]
    assert held_out[:2] == held_out[2:4] and set(held_out) <= set("ghij")


@two_scripts
def test_every_epoch_visits_every_task_once_in_its_own_order(script, run, model_dir):
    """Also where an iteration begins in one epoch and ends in the next: six tasks, four at a time."""
    flags = ("--num-tasks", 4, "--num-iterations", 3, "--log-groups", 99)
    names = run(script, *TOY, "--model", model_dir, *flags)
    lines = [json.loads(line) for line in open(os.path.join(names["run_dir"], "rollouts.jsonl"))]
    letters = "".join(x["task"]["letter"] for x in lines if x["split"] == "train" and x["turn"] == 1)
    assert sorted(letters[:6]) == sorted(letters[6:]) == list("abcdef")
    assert letters[:6] != letters[6:] and letters[:6] != "abcdef"


@pytest.fixture
def noisy(monkeypatch):
    """An environment may draw from any generator."""
    from toy import Letters

    reward = Letters.step

    def step(self, branches):
        noise = random.random() + np.random.rand()
        return [step._replace(reward=step.reward + noise) for step in reward(self, branches)]

    monkeypatch.setattr(Letters, "step", step)


@two_scripts
def test_same_seed_same_numbers(script, run, model_dir, noisy):
    flags = (*TOY, "--model", model_dir, "--num-iterations", 1)
    runs = [run(script, *flags, "--seed", seed) for seed in (1, 1, 2)]
    first, second, other = (metrics_of(names["run_dir"]) for names in runs)
    assert first == second and first[1]["train/return"] != other[1]["train/return"]
    first, second, other = ([node.task for node in names["turns"][0]] for names in runs)
    assert first == second != other


@two_scripts
def test_each_gpu_draws_with_its_own_random_numbers(script, run, model_dir, monkeypatch):
    """Agents on two GPUs that were seeded alike would draw joint actions from no product of policies."""
    seeds = [], []
    gpus = [SimpleNamespace(manual_seed=of_one.append) for of_one in seeds]
    monkeypatch.setattr(torch.cuda, "default_generators", gpus)
    run(script, *TOY, "--model", model_dir, "--num-iterations", 1)
    for first, train, last in seeds:  # evaluation, iteration 1, evaluation
        assert first == last != train
    assert not {*seeds[0]} & {*seeds[1]}


@two_scripts
def test_the_environment_gets_its_arguments(script, run, monkeypatch):
    from toy import Letters

    seen = []

    def init(self, num_agents, **given):
        self.num_agents = num_agents
        seen.append({"num_agents": num_agents, **given})

    monkeypatch.setattr(Letters, "__init__", init)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: sys.exit("the environment is made"))
    flags = ("--env", "toy:Letters", "--num-agents", 3, "--num-turns", 2, "--dataset", "mine", "--seed", 7)
    given = {"num_agents": 3, "num_turns": 2, "dataset": "mine", "seed": 7}
    optional = ("--reward", "odd", "--feedback", "level", "--allow-unsafe-code")
    for more in [(), optional]:
        with pytest.raises(SystemExit):
            run(script, *flags, *more)
    assert seen == [given, given | {"reward": "odd", "feedback": "level", "allow_unsafe_code": True}]


@two_scripts
def test_evaluation_does_not_disturb(script, run, model_dir, noisy):
    flags = (*TOY, "--model", model_dir, "--num-iterations", 3)
    keep = lambda line: {k: v for k, v in line.items() if not k.startswith("eval/")}
    runs = [run(script, *flags, *more) for more in [(), ("--eval-every", 1)]]
    first, evaluated = (metrics_of(names["run_dir"]) for names in runs)
    assert [keep(line) for line in first] == [keep(line) for line in evaluated]
    assert first[0]["eval/return"] == evaluated[0]["eval/return"]


@two_scripts
def test_devices_for_all_and_for_each(script, run, model_dir):
    """Numbers stay on "cpu"; where devices differ is shown in test_pretend.py."""
    flags = (*TOY, "--model", model_dir, "--num-iterations", 2)
    runs = [run(script, *flags, *more) for more in [(), ("--devices", "cpu"), ("--devices", "cpu", "cpu")]]
    first, second, third = (metrics_of(names["run_dir"]) for names in runs)
    assert first == second == third


@two_scripts
def test_resume_gives_the_same_numbers_bit_for_bit(script, run, model_dir, tmp_path, monkeypatch, noisy):
    copies, replace = [], os.replace

    def replace_and_copy(source, target):
        replace(source, target)
        if target.endswith("state.pt"):
            copies.append(shutil.copytree(pathlib.Path(target).parent.parent, tmp_path / f"copy{len(copies)}"))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace_and_copy)
        critic = ("--use-separate-critic",) if script.stem == "ippo" else ()
        whole = run(script, *TOY, "--model", model_dir, "--save-every", 2, "--num-iterations", 5, *critic)["run_dir"]
    killed = copies[0]  # as the run stood after iteration 2 ...
    for name in ("metrics.jsonl", "rollouts.jsonl"):  # ... but killed in the fourth, while it wrote a line
        text = pathlib.Path(whole, name).read_text().splitlines(keepends=True)
        (killed / name).write_text("".join(line for line in text if json.loads(line)["iteration"] < 4) + text[-1][:20])
    run(script, "--resume", killed)
    assert metrics_of(killed) == metrics_of(whole)
    assert (killed / "rollouts.jsonl").read_text() == pathlib.Path(whole, "rollouts.jsonl").read_text()
    for agent in range(2):
        for name, weight in weights_of(whole, agent).items():
            assert torch.equal(weights_of(killed, agent)[name], weight)


@two_scripts
def test_a_run_on_a_file_can_be_resumed_in_another_folder(script, run, model_dir, tmp_path):
    rows = [json.dumps({"prompt": f"Say {i}.", "completion": str(i)}) for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    flags = ("--model", model_dir, "--num-tasks", 1, "--num-generations", 2, "--max-new-tokens", 4, "--eval-tasks", 1)
    run_dir = run(script, "--env", "tldr", "--dataset", "rows.jsonl", *flags, "--num-iterations", 1)["run_dir"]
    (tmp_path / "sample").touch()  # a file that happens to be called as the sample tasks are
    assert run(script, *TOY, *flags, "--num-iterations", 0)["args"].dataset == "sample"
    (tmp_path / "elsewhere").mkdir()
    more = ("--resume", run_dir, "--num-iterations", 2)
    printed_by(script, *more, cwd=tmp_path / "elsewhere")
    assert len(metrics_of(run_dir)) == 3


@two_scripts
def test_a_resume_derives_defaults_from_its_own_arguments(script, run, model_dir):
    """Evaluation still draws at the temperature of training, and cross ends with too many joint actions."""
    run_dir = run(script, *TOY, "--num-turns", 1, "--model", model_dir, "--num-iterations", 1)["run_dir"]
    changed = ("--temperature", 0.5, "--num-generations", 11, "--num-iterations", 2)
    args = run(script, "--resume", run_dir, *changed)["args"]
    assert (args.temperature, args.eval_temperature, args.learning_rate) == (0.5, 0.5, 0.01)
    assert script.stem == "ippo" or args.joint_mode == "align"  # 3^2 joint actions before, 11^2 now


@two_scripts
def test_a_resume_remembers_what_the_one_before_changed(script, run, model_dir, capsys):
    run_dir = run(script, *TOY, "--model", model_dir, "--num-iterations", 1)["run_dir"]
    again = re.search(r"--resume (\S+) --num-iterations 2\n", capsys.readouterr().out)
    assert again.group(1) == run_dir
    changes = {"num_iterations": 2, "eval_every": 1, "save_every": 3, "gamma": 0.5, "devices": ["cpu"]}
    flags = [x for name, value in changes.items() for x in (f"--{name}".replace("_", "-"), *np.ravel(value))]
    run(script, "--resume", run_dir, *flags)
    about = json.loads(pathlib.Path(run_dir, "args.json").read_text())
    assert {name: about["args"][name] for name in changes} == changes
    assert [(before["until"], before["args"]["gamma"]) for before in about["earlier"]] == [(1, 1.0)]
    saved, logged = weights_of(run_dir, 1), metrics_of(run_dir, but=())
    shutil.rmtree(os.path.join(run_dir, "agent_1"))  # as where the disk was full when agents were saved
    run(script, "--resume", run_dir, "--num-iterations", 2)  # nothing is left to do but to save them
    assert all(torch.equal(weights_of(run_dir, 1)[name], weight) for name, weight in saved.items())
    assert metrics_of(run_dir, but=()) == logged and "--num-iterations 4\n" in capsys.readouterr().out
    run(script, "--resume", run_dir, "--num-iterations", 3)
    assert [line["iteration"] for line in metrics_of(run_dir)] == [0, 1, 2, 3]
    about = json.loads(pathlib.Path(run_dir, "args.json").read_text())
    assert [(before["until"], before["args"]["gamma"]) for before in about["earlier"]] == [(1, 1.0), (2, 0.5)]
    for fewer in 0, 2:  # only evaluate: it would not
        with pytest.raises(SystemExit) as stop:
            run(script, "--resume", run_dir, "--num-iterations", fewer)
        said = f"--num-iterations {fewer}: the run has made 3; give more, or evaluate with --num-iterations 0 --model"
        assert stop.value.code == 2 and f"{said} {run_dir}" in capsys.readouterr().err
    assert json.loads(pathlib.Path(run_dir, "args.json").read_text()) == about


@pytest.mark.parametrize("script", CRITIC_FREE[:1], ids=lambda path: path.stem)
def test_a_model_is_found_from_other_folders_too(script, run, tmp_path):
    save_model(tmp_path / "random")
    run_dir = run(script, *TOY, "--model", "random", "--num-iterations", 0)["run_dir"]
    args = json.loads(pathlib.Path(run_dir, "args.json").read_text())["args"]
    assert args["model"] == [str(tmp_path / "random")]


NUMBERS = {
    "numpy": np.float32,
    "an array": np.array,
    "a tensor": torch.tensor,
    "a reward model's": lambda reward: torch.tensor([reward], requires_grad=True),
    "exact": decimal.Decimal,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_rewards_and_parts_may_be_other_numbers(name, run, model_dir, monkeypatch):
    from toy import Letters

    def other(self, branches):
        of = NUMBERS[name]
        return [s._replace(reward=of(s.reward), parts={"x": of(1.0)}) for s in step(self, branches)]

    step = Letters.step
    monkeypatch.setattr(Letters, "step", other)
    run_dir = run(SCRIPTS[0], *TOY, "--model", model_dir, "--num-iterations", 1)["run_dir"]
    with open(os.path.join(run_dir, "rollouts.jsonl")) as file:
        lines = [json.loads(line) for line in file]
    assert {type(x) for line in lines for x in [*line["rewards"], *(part["x"] for part in line["parts"])]} == {float}
    assert metrics_of(run_dir)[1]["train/x"] == 1.0


@two_scripts
def test_zero_iterations_only_evaluate(script, run, model_dir, capsys):
    zeros = [x for name in ("num-iterations", "seed", "gamma", "log-groups", "eval-tasks") for x in (f"--{name}", 0)]
    zeros += ("--gae-lambda", 0, "--vf-coef", 0, "--ent-coef", 0) if script.stem == "ippo" else ()
    names = run(script, *TOY, "--model", model_dir, *zeros)
    with open(os.path.join(names["run_dir"], "rollouts.jsonl")) as file:
        lines = [json.loads(line) for line in file]
    assert sorted(line["task"]["letter"] for line in lines if line["turn"] == 1) == list("ghij")  # 0 tasks: all
    assert [line["iteration"] for line in metrics_of(names["run_dir"])] == [0]
    assert sorted(os.listdir(names["run_dir"])) == ["args.json", "checkpoint", "metrics.jsonl", "rollouts.jsonl"]
    assert "evaluation" in capsys.readouterr().out


ODD_TASKS = {
    "an array": lambda: np.array(["a", "b", "c"]),
    "a generator": lambda: (letter for letter in "abcdef"),
    "keys that JSON does not know": lambda: [{("a", 1): {"b"}}] * 3,
}


@pytest.mark.parametrize("kind", ODD_TASKS)
def test_tasks_may_be_anything(kind, run, model_dir, monkeypatch):
    from toy import Letters, Step

    monkeypatch.setattr(Letters, "tasks", lambda self, split: ODD_TASKS[kind]())
    monkeypatch.setattr(Letters, "observe", lambda self, task, history: ["Say a.", "Say b."])
    monkeypatch.setattr(Letters, "step", lambda self, branches: [Step(b[2], 1.0, {}, False) for b in branches])
    names = run(SCRIPTS[0], *TOY, "--model", model_dir, "--num-iterations", 1)
    assert len(names["train_tasks"]) >= 3 and len(metrics_of(names["run_dir"])) == 2
    with open(os.path.join(names["run_dir"], "rollouts.jsonl")) as file:
        assert {line["split"] for line in map(json.loads, file)} == {"train", "eval"}


@two_scripts
@pytest.mark.parametrize("num_agents", [1, 3])
def test_other_numbers_of_agents(script, run, model_dir, num_agents):
    names = run(script, *TOY, "--model", model_dir, "--num-iterations", 1, "--num-agents", num_agents)
    assert len(names["agents"]) == num_agents
    assert {f"agent_{i}/loss" for i in range(num_agents)} <= set(metrics_of(names["run_dir"])[1])


@two_scripts
def test_several_trajectories_per_evaluation_task(script, run, model_dir):
    # pass@k is of independent ones, however training joins its own
    cross = ("--joint-mode", "cross") if script.stem != "ippo" else ()
    names = run(script, *TOY, "--model", model_dir, "--num-iterations", 0, "--eval-generations", 4, *cross)
    lines = [json.loads(line) for line in open(os.path.join(names["run_dir"], "rollouts.jsonl"))]
    assert [len(x["rewards"]) for x in lines if x["turn"] == 1] == [4, 4]
    assert all(len(x["rewards"]) == 1 for x in lines if x["turn"] == 2)


@two_scripts
def test_evaluation_is_greedy_at_temperature_zero(script, run, model_dir):
    said = {}
    for temperature, seed in itertools.product((0, 1), (1, 2)):
        flags = ("--eval-temperature", temperature, "--num-iterations", 0, "--seed", seed)
        names = run(script, *TOY, "--model", model_dir, *flags)
        with open(os.path.join(names["run_dir"], "rollouts.jsonl")) as file:
            lines = [json.loads(line) for line in file]
        texts = str([agent["completions"] for line in lines for agent in line["agents"]])
        said.setdefault(temperature, set()).add(texts)
        (line,) = metrics_of(names["run_dir"])
        assert (line["eval/agent_0/entropy"] == 0) == (temperature == 0)  # of a choice that is certain
    assert len(said[0]) == 1 and len(said[1]) == 2


@two_scripts
def test_evaluation_draws_the_same_each_time_on_the_same_tasks(script, run, model_dir):
    letters = []
    for seed in (1, 2):
        flags = ("--learning-rate", 1e-30, "--eval-every", 1, "--num-iterations", 2, "--seed", seed)
        names = run(script, *TOY, "--model", model_dir, *flags)
        assert len({line["eval/return"] for line in metrics_of(names["run_dir"])}) == 1
        lines = [json.loads(line) for line in open(os.path.join(names["run_dir"], "rollouts.jsonl"))]
        letters.append([x["task"]["letter"] for x in lines if x["split"] == "eval" and x["turn"] == 1])
    assert letters[0] == letters[1]
    assert letters[0][:2] == ["ghij"[k] for k in np.random.default_rng(0).permutation(4)[:2]]


@two_scripts
def test_large_seeds_work(script, run, model_dir):
    run(script, *TOY, "--model", model_dir, "--num-iterations", 0, "--seed", 2**63 - 1)


@two_scripts
def test_the_gradient_is_clipped(script, run, model_dir, monkeypatch):
    norms, step = [], torch.optim.AdamW.step

    def watched(optimizer, closure=None):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norms.append(torch.stack([grad.norm() for grad in grads]).norm().item())
        return step(optimizer, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    names = run(script, *TOY, "--model", model_dir, "--num-iterations", 1, "--max-grad-norm", 1e-3)
    assert max(norms) <= 1.001e-3 < names["metrics"]["agent_0/grad_norm"]


@two_scripts
def test_defaults_depend_on_the_model(script, run, model_dir):
    names = run(script, *TOY[:6], "--model", model_dir, "--num-iterations", 0, "--temperature", 0.7)
    assert names["args"].learning_rate == 5e-6
    assert names["args"].eval_temperature == 0.7  # the policy that is trained, and saved
    assert all(agent.optimizer.param_groups[0]["lr"] == 5e-6 for agent in names["agents"])
    assert names["args"].max_new_tokens == 256
    if script.stem == "ippo":  # a head learns from a state of its own making, ten times as fast
        assert all(agent.optimizer.param_groups[1]["lr"] == 5e-5 for agent in names["agents"])


@two_scripts
@pytest.mark.parametrize("env, agents, max_new_tokens", [("toy:Letters", 2, 96), ("arxiv", 2, 256), ("arxiv", 1, 512)])
def test_defaults_of_the_tiny_model(script, env, agents, max_new_tokens, run):
    run_dir = run(script, "--env", env, "--num-agents", agents, "--num-iterations", 0, "--eval-tasks", 1)["run_dir"]
    args = json.loads(pathlib.Path(run_dir, "args.json").read_text())["args"]
    assert args["learning_rate"] == (2e-4 if script.stem == "ippo" else 4e-4)
    assert (args["max_new_tokens"], args["max_batch_tokens"]) == (max_new_tokens, 4096)


@pytest.mark.parametrize(
    "name, broken, said",
    [
        ("step", lambda self, branches: [], "0 Steps for"),
        ("step", lambda self, branches: None, "step() must return a list with a Step"),
        ("step", lambda self, branches: [1.0 for _ in branches], "step() must return a list with a Step"),
        ("step", lambda self, branches: (1.0 for _ in branches), "step() must return a list with a Step"),
        (
            "step",
            lambda self, branches: [Step(b[2], 10**400, {}, False) for b in branches],
            "step() must return a list with a Step",
        ),
        (
            "step",
            lambda self, branches: [Step(b[2], torch.ones(2), {}, False) for b in branches],
            "must return a list with a Step",
        ),
        (
            "step",
            lambda self, branches: [Step(b[2], "1", {}, False) for b in branches],
            "step() must return a list with a Step",
        ),
        (
            "step",
            lambda self, branches: [Step(b[2], 1.0, None, False) for b in branches],
            "step() must return a list with a Step",
        ),
        (
            "step",
            lambda self, branches: [Step(b[2], 1.0, {}, None) for b in branches],
            "step() must return a list with a Step",
        ),
        (
            "step",
            lambda self, branches: [Step(b[2], 1, {"x": math.inf}, False) for b in branches],
            "not finite: [inf]",
        ),
        ("tasks", lambda self, split: None, "0 tasks to train on"),
        ("observe", lambda self, task, history: None, "observe() gave None; let it return 2 prompts"),
        ("observe", lambda self, task, history: "Say a.", "observe() gave 'Say a.'"),
        ("observe", lambda self, task, history: [1, 2], "observe() gave [1, 2]"),
        ("observe", lambda self, task, history: 7, "observe() gave 7"),
        ("observe", lambda self, task, history: ["a", ""], "observe() gave ['a', '']; let it return 2 prompts"),
        ("observe", lambda self, task, history: ["a", "\ud800"], "observe() gave ['a', '\\ud800']; let it"),
        ("observe", lambda self, task, history: ["?"], "observe() gave ['?']"),
        ("observe", lambda self, task, history: ["a", "b", "c"], "gave ['a', 'b', 'c']; let it return 2 prompts"),
        ("observe", None, "let it return 2 prompts"),  # in the second turn
        (
            "step",
            lambda self, branches: [Step(b[2], 1.0, {"a": 1.0, "a_turn1": 5.0}, False) for b in branches],
            "part logged as 'a_turn1'",  # which is also what a's in turn 1 is called
        ),
        *(
            ("step", lambda self, branches, name=name: [Step(b[2], 1.0, {name: 9.0}, False) for b in branches], said)
            for name, said in (
                ("return", "part logged as 'return'"),
                ("reward", "part logged as 'reward_turn1'"),  # with several turns
                ("agent_0/loss", "part logged as 'agent_0/loss"),
                (3, "part logged as 3"),
            )
        ),
    ],
)
def test_environments_that_break_their_contract_are_told(name, broken, said, run, model_dir, monkeypatch, capsys):
    from toy import Letters

    original = Letters.observe
    if broken is None:
        broken = lambda self, task, history: original(self, task, history)[: 1 + (not history)]
    monkeypatch.setattr(Letters, name, broken)
    with pytest.raises(SystemExit) as stop:
        run(SCRIPTS[0], *TOY, "--model", model_dir)
    assert stop.value.code == 2 and said in capsys.readouterr().err


def test_an_error_of_an_environment_of_the_users_own_keeps_its_traceback(run, model_dir, monkeypatch):
    from toy import Letters

    monkeypatch.setattr(Letters, "tasks", lambda self, split: [int("x")])
    with pytest.raises(ValueError, match="invalid literal"):
        run(SCRIPTS[0], *TOY, "--model", model_dir)


@pytest.mark.parametrize("when", ["tasks = lambda self, split", "step = lambda self, branches"])
def test_an_interrupt_before_the_first_iteration_needs_no_traceback(when, model_dir, tmp_path):
    """Also during the first evaluation, which would have nothing to save."""
    code = f"import os, signal, toy\ntoy.Letters.{when}: os.kill(os.getpid(), signal.SIGINT)"
    process = Started(SCRIPTS[0], *TOY, "--model", model_dir, cwd=tmp_path, code=code)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 1 and "interrupted before the first iteration" in printed
    assert "Traceback" not in printed


@two_scripts
def test_a_signal_finishes_the_iteration_saves_and_says_how_to_go_on(script, model_dir, tmp_path):
    flags = (*TOY, "--model", model_dir, "--num-iterations", 100_000, "--output-dir", tmp_path / "runs")
    process = Started(script, *flags, cwd=tmp_path)
    while not (found := list(tmp_path.glob("runs/*/metrics.jsonl"))) or found[0].read_text().count("\n") < 3:
        assert process.poll() is None, process.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT if script.stem == "ippo" else signal.SIGTERM)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0, printed
    run_dir = re.search(r"--resume (\S+)", printed).group(1)
    last = metrics_of(run_dir)[-1]["iteration"]
    assert torch.load(os.path.join(run_dir, "checkpoint", "state.pt"), weights_only=False)["iteration"] == last
    assert os.path.exists(os.path.join(run_dir, "agent_1", "config.json"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_ends_the_program_at_once(number, run, model_dir):
    names = run(SCRIPTS[0], *TOY, "--model", model_dir, "--num-iterations", 0)
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, names["on_signal"])
        names["on_signal"](number, None)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


SIGNALLED = """
import os, signal, sys, toy
step, calls = toy.Letters.step, []
def signalled(self, branches):
    calls.append(None)
    if len(calls) == 4:  # in the first iteration: an evaluation has two turns
        interrupt()
    return step(self, branches)
toy.Letters.step = signalled
"""


def test_a_second_sigterm_does_not_keep_a_run_from_saving(model_dir, tmp_path):
    """Schedulers send one to torchrun and to its processes, to which torchrun then sends another."""
    code = SIGNALLED + "interrupt = lambda: [os.kill(os.getpid(), signal.SIGTERM) for _ in range(2)]"
    flags = (*TOY, "--model", model_dir, "--num-iterations", 9, "--output-dir", tmp_path / "runs")
    printed_by(SCRIPTS[0], *flags, cwd=tmp_path, processes=2, code=code)
    (run_dir,) = tmp_path.glob("runs/*")
    assert torch.load(run_dir / "checkpoint" / "state.pt", weights_only=False)["iteration"] == 1


@two_scripts
def test_a_signal_saves_though_nobody_reads_what_is_printed(script, model_dir, tmp_path):
    """Ctrl-C ends the reader too in `python magrpo.py 2>&1 | tee log`."""
    code = (
        SIGNALLED
        + """
reading, writing = os.pipe()
sys.stdout = sys.stderr = open(writing, "w", buffering=1)
interrupt = lambda: (os.close(reading), os.kill(os.getpid(), signal.SIGINT))
"""
    )
    flags = (*TOY, "--model", model_dir, "--num-iterations", 9, "--output-dir", tmp_path / "runs")
    Started(script, *flags, cwd=tmp_path, code=code).communicate(timeout=120)
    (run_dir,) = tmp_path.glob("runs/*")
    assert [line["iteration"] for line in metrics_of(run_dir)] == [0, 1]
    assert torch.load(run_dir / "checkpoint" / "state.pt", weights_only=False)["iteration"] == 1
    assert len(list(run_dir.glob("agent_*"))) == 2


def test_a_ctrl_c_that_ends_the_reader_of_a_pipe_still_tells_how_to_go_on(model_dir, tmp_path):
    """Here only stdout is the pipe: `python magrpo.py | tee log`."""
    ends = "reading, writing = os.pipe()\nos.dup2(writing, 1)\n"
    ends += "interrupt = lambda: (os.close(reading), os.kill(os.getpid(), signal.SIGINT))\n"
    flags = (*TOY, "--model", model_dir, "--num-iterations", 9, "--output-dir", tmp_path / "runs")
    printed = printed_by(SCRIPTS[0], *flags, cwd=tmp_path, code=SIGNALLED + ends)
    (run_dir,) = tmp_path.glob("runs/*")
    assert f"--resume {run_dir}\n" in printed and "Traceback" not in printed


def test_what_is_printed_after_a_signal_goes_where_it_went_before(model_dir, tmp_path):
    """`python magrpo.py > log 2> errors`, which no reader can leave."""
    ends = "os.dup2(os.open('log', os.O_CREAT | os.O_WRONLY), 1)\n"
    ends += "interrupt = lambda: os.kill(os.getpid(), signal.SIGTERM)\n"
    flags = (*TOY, "--model", model_dir, "--num-iterations", 9, "--output-dir", tmp_path / "runs")
    errors = printed_by(SCRIPTS[0], *flags, cwd=tmp_path, code=SIGNALLED + ends)
    (run_dir,) = tmp_path.glob("runs/*")
    printed = (tmp_path / "log").read_text()
    assert f"--resume {run_dir}\n" in printed and "finishing the iteration" in printed
    assert "finishing the iteration" not in errors


def test_a_model_as_small_as_tiny_has_one_thread_unless_told_otherwise(run, monkeypatch):
    threads = torch.get_num_threads()
    try:
        for told, expected in ({}, 1), ({"OMP_NUM_THREADS": "2"}, 2):
            torch.set_num_threads(2)  # as torch does at its import
            monkeypatch.delenv("OMP_NUM_THREADS")
            for name, value in told.items():
                monkeypatch.setenv(name, value)
            run(SCRIPTS[0], "--num-iterations", 0, "--eval-tasks", 1, "--max-new-tokens", 2)
            assert torch.get_num_threads() == expected
            monkeypatch.setenv("OMP_NUM_THREADS", "1")
    finally:
        torch.set_num_threads(threads)


@two_scripts
def test_a_disk_that_is_full_at_a_checkpoint(script, run, model_dir, tmp_path, monkeypatch, capsys):
    save = torch.save

    def full(state, path):
        if state["iteration"] == 3:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 7540352 vs 7540240")
        save(state, path)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(SystemExit) as stop:
        run(script, *TOY, "--model", model_dir, "--num-iterations", 4, "--save-every", 1)
    said = capsys.readouterr().err
    run_dir = re.search(r"The last checkpoint: iteration 2 in (\S+)\.\n", said)[1]
    assert stop.value.code == 2 and f"cannot write {run_dir}/checkpoint/state.pt.tmp: is the disk full?" in said
    monkeypatch.undo()
    names = run(script, "--resume", run_dir)
    assert [line["iteration"] for line in metrics_of(names["run_dir"])] == [0, 1, 2, 3, 4]


@two_scripts
def test_a_start_that_is_refused_leaves_no_run_folder(script, run, tmp_path, capsys):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    with pytest.raises(SystemExit) as stop:
        run(script, *TOY, "--model", tmp_path / "broken", "--output-dir", tmp_path / "runs")
    assert stop.value.code == 2 and "agent 0 cannot use it" in capsys.readouterr().err
    assert os.listdir(tmp_path / "runs") == []


@two_scripts
def test_a_run_folder_as_a_model(script, run, model_dir, capsys):
    run_dir = run(script, *TOY, "--model", model_dir, "--num-iterations", 1)["run_dir"]
    with pytest.raises(SystemExit) as stop:
        run(script, *TOY, "--model", run_dir)
    assert stop.value.code == 2
    assert f"there is no model in {run_dir}; give a folder that has one, such as agent_0" in capsys.readouterr().err


def test_a_resume_where_nothing_can_be_written(run, model_dir, monkeypatch, capsys):
    run_dir = run(SCRIPTS[0], *TOY, "--model", model_dir, "--num-iterations", 1)["run_dir"]
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode, **keys: path != run_dir and access(path, mode, **keys))
    with pytest.raises(SystemExit) as stop:
        run(SCRIPTS[0], "--resume", run_dir, "--num-iterations", 2)
    assert stop.value.code == 2
    assert f"error: --resume: cannot write to {run_dir} (it is read-only); name another." in capsys.readouterr().err


@two_scripts
def test_a_resumed_run_does_not_hold_on_to_the_checkpoint_that_it_replaces(script, run, model_dir):
    """The file system would keep its space."""
    run_dir = run(script, *TOY, "--model", model_dir, "--num-iterations", 1)["run_dir"]
    state_file = os.path.realpath(os.path.join(run_dir, "checkpoint", "state.pt"))
    names = run(script, "--resume", run_dir, "--num-iterations", 2)  # `names` holds all that the run still refers to
    assert names["saved"] == 2 and state_file not in pathlib.Path("/proc/self/maps").read_text()


@two_scripts
def test_kill_during_a_checkpoint_leaves_the_one_before(script, run, model_dir, tmp_path):
    code = """
import os, signal, torch
save, count = torch.save, []
def killed_half_way(state, path):
    count.append(path)
    if len(count) < 2:
        return save(state, path)
    import io
    whole = io.BytesIO()
    save(state, whole)
    with open(path, "wb") as file:
        file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
torch.save = killed_half_way
"""
    flags = (*TOY, "--model", model_dir, "--num-iterations", 4, "--save-every", 1, "--output-dir", tmp_path / "runs")
    process = Started(script, *flags, cwd=tmp_path, code=code)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, printed
    (run_dir,) = tmp_path.glob("runs/*")
    assert torch.load(run_dir / "checkpoint" / "state.pt", weights_only=False)["iteration"] == 1
    names = run(script, "--resume", run_dir, "--num-iterations", 3)
    assert [line["iteration"] for line in metrics_of(names["run_dir"])] == [0, 1, 2, 3]


@two_scripts
def test_a_checkpoint_refers_to_nothing_that_a_power_failure_would_lose(script, run, model_dir, monkeypatch):
    """A file system may rename a file long before it has written it, or what was added to the logs."""
    synced, checked, replace, fsync = {}, [], os.replace, os.fsync

    def noted(file):
        fsync(file)
        stat = os.stat(file if isinstance(file, int) else file.fileno())
        synced[stat.st_ino] = stat.st_size

    def replacing(source, target):
        run_dir = pathlib.Path(target).parent.parent
        for path in (pathlib.Path(source), run_dir / "metrics.jsonl", run_dir / "rollouts.jsonl"):
            checked.append(synced.get(path.stat().st_ino) == path.stat().st_size)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replacing)
        run(script, *TOY, "--model", model_dir, "--num-iterations", 2, "--save-every", 1)
    assert checked == [True] * 6


RECORD = """
import os, sys, torch
def step(optimizer, closure=None):
    frame = sys._getframe(1)
    while "turns" not in frame.f_globals:
        frame = frame.f_back
    names = frame.f_globals
    learner = vars(names["agent"]).get("learner", names["agent"].model)
    gradients = {name: p.grad.clone() for name, p in learner.named_parameters()}
    seeds = {torch.initial_seed(), names["seed_of"](0)}
    update = (names["i"], names["turns"], learner.state_dict(), gradients, seeds)
    torch.save(update, f"update_{names['i']}_{os.environ['RANK']}.pt")
torch.optim.AdamW.step = step
"""


CLOCK = """
import time, toy
rewarded, reward = [], toy.Letters.step  # a clock that only rewards move, by a second a turn
time.perf_counter = lambda: len(rewarded)
toy.Letters.step = lambda self, branches: rewarded.append(1) or reward(self, branches)
"""


@two_scripts
def test_two_processes_make_the_update_of_one(script, model_dir, tmp_path):
    """From the trees that two processes grew of one task each, the update is the slow one of both tasks together."""
    import test_gradient
    import test_ippo

    flags = (*TOY, "--model", model_dir, "--num-iterations", 1, "--output-dir", tmp_path / "runs")
    flags += ("--update-epochs", 1, "--num-minibatches", 1, "--norm-adv") if script.stem == "ippo" else ()
    code = RECORD + CLOCK
    printed_by(script, *flags, "--max-grad-norm", 1e9, cwd=tmp_path, processes=2, code=code)
    (run_dir,) = tmp_path.glob("runs/*")
    metrics, speed = metrics_of(run_dir)[1], metrics_of(run_dir, but=())[1]["tokens_per_second"]
    for i in range(2):
        (_, turns0, weights, gradients0, seeds0), (_, turns1, _, gradients1, seeds1) = (
            torch.load(tmp_path / f"update_{i}_{rank}.pt", weights_only=False) for rank in range(2)
        )
        assert all(torch.equal(gradients0[name], gradients1[name]) for name in gradients0)
        assert turns0[0][0].task != turns1[0][0].task
        assert len(seeds0 | seeds1) == 4  # training and evaluation of each process
        assert turns0[0][0].groups[i].completion_ids != turns1[0][0].groups[i].completion_ids  # no shared seed
        both = [[*turns0[0], *turns1[0]]]
        if script.stem == "ippo":
            seen = [(i, both, weights, gradients0)]
            logged = test_ippo.means(test_ippo.check(seen, [model_dir], max_new_tokens=12, norm_adv=True))
            of_turns = [[node.groups[i] for node in (*nodes0, *nodes1)] for nodes0, nodes1 in zip(turns0, turns1)]
            logged[f"agent_{i}/explained_variance"] = test_ippo.explained_variance(of_turns)
        else:
            ((loss, grad_norm),) = test_gradient.check(
                [(i, both, gradients0.values())], script, [model_dir], max_new_tokens=12
            )
            logged = {f"agent_{i}/loss": loss, f"agent_{i}/grad_norm": grad_norm}
        assert {name: metrics[name] for name in logged} == pytest.approx(logged, rel=1e-3, abs=1e-5)
    lines = [json.loads(line) for line in open(run_dir / "rollouts.jsonl")]
    letters = [x["task"]["letter"] for x in lines if (x["iteration"], x["split"], x["turn"]) == (0, "eval", 1)]
    assert len(letters) == len(set(letters)) == 2  # the evaluation tasks are shared out
    mean = sum(step.reward for node in both[0] for step in node.steps) / 6
    assert metrics["train/reward_turn1"] == pytest.approx(mean)
    groups = [group for nodes in (*turns0, *turns1) for node in nodes for group in node.groups]
    assert speed * len(turns0) == sum(len(ids) for group in groups for ids in group.completion_ids)


LOST = """
import gc, os, torch
backward = torch.Tensor.backward
def lost(*args, **kwargs):
    backward(*args, **kwargs)
    for p in gc.get_objects() if os.environ["RANK"] == "1" else ():
        if isinstance(p, torch.nn.Parameter) and p.shape == (48, 32):
            p.grad = None
torch.Tensor.backward = lost
"""


@two_scripts
def test_a_process_without_some_gradient_takes_part(script, model_dir, tmp_path):
    """As where no token of a process came to an expert: what it lacks counts as zero, and all weights stay equal."""
    flags = (*TOY, "--model", model_dir, "--num-iterations", 1, "--output-dir", tmp_path / "runs")
    printed_by(script, *flags, cwd=tmp_path, processes=2, code=LOST)
    (run_dir,) = tmp_path.glob("runs/*")
    old = AutoModelForCausalLM.from_pretrained(model_dir).state_dict()
    new = AutoModelForCausalLM.from_pretrained(run_dir / "agent_0").state_dict()
    assert all(not torch.equal(old[name], new[name]) for name in old if "up_proj" in name)  # by the other process


def test_a_signal_to_one_process_ends_all(model_dir, tmp_path):
    """None waits for the next iteration of another that has left."""
    code = SIGNALLED + "interrupt = lambda: os.environ['RANK'] == '1' and os.kill(os.getpid(), signal.SIGTERM)"
    flags = (*TOY, "--model", model_dir, "--num-iterations", 9, "--output-dir", tmp_path / "runs")
    printed_by(SCRIPTS[0], *flags, cwd=tmp_path, processes=2, code=code)
    (run_dir,) = tmp_path.glob("runs/*")
    assert [line["iteration"] for line in metrics_of(run_dir)] == [0, 1]
    assert torch.load(run_dir / "checkpoint" / "state.pt", weights_only=False)["iteration"] == 1


def test_two_processes_resume(model_dir, tmp_path):
    script = SCRIPTS[0]
    code = """
import os, shutil
replace = os.replace
def replace_and_copy(source, target):
    replace(source, target)
    if target.endswith("state.pt") and not os.path.exists("copy"):
        shutil.copytree(os.path.dirname(os.path.dirname(target)), "copy")
os.replace = replace_and_copy
"""
    flags = (*TOY, "--model", model_dir, "--output-dir", tmp_path / "runs", "--save-every", 2, "--num-iterations", 3)
    first = torchrun(script, *flags, code=code, cwd=tmp_path)
    for printed in first, printed_by(script, "--resume", "copy", cwd=tmp_path, processes=2):
        assert f"to go on: torchrun --nproc-per-node 2 {os.path.relpath(script, tmp_path)} --resume" in printed
    assert first.count("iteration 0: evaluation return") == 1  # by the first process only
    (whole,) = tmp_path.glob("runs/*")
    assert metrics_of(whole) == metrics_of(tmp_path / "copy")
    assert all(torch.equal(w, weights_of(tmp_path / "copy")[name]) for name, w in weights_of(whole).items())


@two_scripts
def test_learning_rate_anneals_and_each_iteration_has_its_own_seed(script, run, model_dir, monkeypatch):
    seen, seeds, step = [], set(), torch.optim.AdamW.step

    def watched(optimizer, closure=None):
        seen.append([group["lr"] for group in optimizer.param_groups])
        seeds.add(torch.initial_seed())
        return step(optimizer, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    run(script, *TOY, "--model", model_dir, "--num-iterations", 4, "--num-agents", 1, "--save-every", 2)
    highest = [0.01, 0.1] if script.stem == "ippo" else [0.01]  # 0.1: of its value head
    for k, rate in enumerate(highest):
        rates = sorted({rates[k] for rates in seen}, reverse=True)
        assert rates == pytest.approx([rate, 0.75 * rate, 0.5 * rate, 0.25 * rate])
    assert len(seeds) == 4
    seen.clear()
    run(script, *TOY, "--model", model_dir, "--num-iterations", 2, "--num-agents", 1, "--no-anneal-lr")
    assert all(rates == highest for rates in seen)


@pytest.mark.parametrize("save_every, kept, poison", [(2, "iteration 2 in", "nan"), (5, "none yet", "inf")])
@two_scripts
def test_a_loss_that_is_not_finite_stops_the_run(script, save_every, kept, poison, run, tmp_path, capsys):
    path = save_model(tmp_path / "model")
    calls = []
    original = torch.nn.utils.clip_grad_norm_  # poisoned at the third iteration, in the second agent

    def poisoned(parameters, max_norm):
        parameters = list(parameters)
        calls.append(None)
        if len(calls) == 6:
            parameters[0].grad[0] = float(poison)
        return original(parameters, max_norm)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", poisoned)
        one_step = ("--update-epochs", 1, "--num-minibatches", 1) if script.stem == "ippo" else ()
        run(script, *TOY, "--model", path, "--num-iterations", 9, "--save-every", save_every, *one_step)
    said = rf"error: at iteration 3 agent_1/\w+ is {poison}.*lower --learning-rate.* The last checkpoint: {kept}"
    assert stop.value.code == 2 and re.search(said, capsys.readouterr().err)


@pytest.mark.parametrize(
    "iterations, said",
    [(3, "at iteration 2 agent_0/entropy is nan"), (1, "at iteration 1 eval/agent_0/entropy is nan")],
)
@pytest.mark.parametrize("script", CRITIC_FREE[:1], ids=lambda path: path.stem)
def test_weights_that_are_not_finite_stop_a_run_and_are_not_saved(
    script, iterations, said, run, tmp_path, monkeypatch, capsys
):
    """All rewards are equal, so that loss and gradient are 0."""
    from toy import Letters

    @torch.no_grad()
    def step(optimizer, closure=None):
        optimizer.param_groups[0]["params"][0].fill_(float("nan"))

    monkeypatch.setattr(Letters, "step", lambda self, branches: [Step(b[2], 0.7, {}, False) for b in branches])
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    with pytest.raises(SystemExit) as stop:
        run(script, *TOY, "--model", save_model(tmp_path / "model"), "--num-iterations", iterations)
    found = capsys.readouterr().err
    assert stop.value.code == 2 and f"error: {said}. " in found and "The last checkpoint: none yet." in found
    assert not list(tmp_path.glob("runs/*/checkpoint/*")) and not list(tmp_path.glob("runs/*/agent_0"))


def test_an_advantage_that_is_no_number_stops_the_run(run, model_dir, tmp_path, capsys):
    """Such as 0 / 0, of equal returns in a copy that divides by their standard deviation."""
    source, line = (ROOT / "magrpo.py").read_text(), "advantages = returns - returns.mean()"
    assert source.count(line) == 1
    copy = tmp_path / "normalised.py"
    copy.write_text(source.replace(line, "advantages = 0 * returns / 0"))
    with pytest.raises(SystemExit) as stop:
        run(copy, *TOY, "--model", model_dir, "--num-iterations", 2)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and re.search("error: at iteration 1 agent_0/loss is nan", said)


@two_scripts
def test_a_first_evaluation_that_is_not_finite_is_no_result(script, run, model_dir, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        run(script, *TOY, "--model", model_dir, "--num-iterations", 0, "--eval-temperature", 1e-40)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and "error: at iteration 0 eval/agent_0/entropy is nan" in said
    assert "other temperatures or rewards" in said and not list(tmp_path.glob("runs/*/metrics.jsonl"))


@pytest.mark.parametrize("script", CRITIC_FREE[:1], ids=lambda path: path.stem)
def test_many_tasks_ask_nothing_more_of_the_model(script, run, model_dir, monkeypatch):
    from toy import Letters

    asked, to_dict, tasks = [], PreTrainedConfig.to_dict, Letters.tasks
    monkeypatch.setattr(PreTrainedConfig, "to_dict", lambda config: asked.append(None) or to_dict(config))
    counts = []
    for times in (1, 50):
        monkeypatch.setattr(Letters, "tasks", lambda env, split, times=times: tasks(env, split) * times)
        asked.clear()
        run(script, *TOY, "--model", model_dir, "--num-iterations", 0, "--eval-tasks", 1)
        counts.append(len(asked))
    assert counts[0] == counts[1] > 0


@two_scripts
def test_each_evaluation_is_printed(script, run, model_dir, capsys):
    run_dir = run(script, *TOY, "--model", model_dir, "--num-iterations", 2)["run_dir"]
    said = re.findall(r"iteration (\d): evaluation return (.*)", capsys.readouterr().out)
    evaluated = [line for line in metrics_of(run_dir) if "eval/return" in line]
    assert said == [(str(line["iteration"]), f"{line['eval/return']:.3f}") for line in evaluated]
    assert [iteration for iteration, _ in said] == ["0", "2"]


@two_scripts
def test_only_evaluating_shows_no_bar_and_nothing_to_go_on(script, run, model_dir, capsys):
    run_dir = run(script, *TOY, "--model", model_dir, "--num-iterations", 0)["run_dir"]
    printed = capsys.readouterr()
    assert "it/s" not in printed.err and printed.out.endswith(f"see {run_dir}\n")


@two_scripts
def test_a_model_without_a_stop_token_is_told(script, run, tmp_path, capsys):
    tokenizer = make_tokenizer(chat_template=None)  # which would end a turn with one
    tokenizer.eos_token = None
    path = save_model(tmp_path / "m", stops=(), tokenizer=tokenizer)
    names = run(script, *TOY, "--model", path, "--num-iterations", 0)
    said = f"agent 1: neither {path} nor its tokenizer has an end-of-sequence token"
    assert said in capsys.readouterr().out
    assert metrics_of(names["run_dir"])[0]["eval/agent_1/stopped"] == 0


@pytest.mark.parametrize("script", CRITIC_FREE[:1], ids=lambda path: path.stem)
def test_agents_are_saved_before_anything_is_printed_of_them(script, run, model_dir, tmp_path, monkeypatch):
    """A terminal may not know their characters."""

    def printing(*texts, **options):
        if any(" wrote: " in text for text in texts):
            raise UnicodeEncodeError("latin-1", "\ufffd", 0, 1, "ordinal not in range(256)")

    monkeypatch.setattr(builtins, "print", printing)
    with pytest.raises(UnicodeEncodeError):
        run(script, *TOY, "--model", model_dir, "--num-iterations", 1)
    assert len(list(tmp_path.glob("runs/*/agent_[01]/model.safetensors"))) == 2


@pytest.mark.parametrize("script", CRITIC_FREE[:1], ids=lambda path: path.stem)
def test_the_command_to_go_on_can_be_pasted(script, run, model_dir, tmp_path, capsys):
    run(script, *TOY, "--model", model_dir, "--num-iterations", 1, "--output-dir", str(tmp_path / "my runs"))
    *_, command = capsys.readouterr().out.strip().partition("to go on: ")
    (folder,) = (tmp_path / "my runs").iterdir()
    assert shlex.split(command)[2:] == ["--resume", str(folder), "--num-iterations", "2"]


@two_scripts
def test_a_reward_that_is_not_finite_stops_the_run(script, run, model_dir, monkeypatch, capsys):
    from toy import Letters

    monkeypatch.setattr(
        Letters, "step", lambda self, branches: [Step(b[2], float("nan"), {}, False) for b in branches]
    )
    with pytest.raises(SystemExit) as stop:
        run(script, *TOY, "--model", model_dir)
    assert stop.value.code == 2 and "finite" in capsys.readouterr().err


BAD = {
    "unknown environment": (("--env", "nosuch"), "--env"),
    "unknown module": (("--env", "nosuch:Env"), "--env"),
    "unknown class": (("--env", "toy:Nosuch"), "error: --env toy:Nosuch: the module toy has"),
    "turns": (("--env", "tldr", "--num-turns", 2), "--num-turns"),
    "reward": (("--env", "tldr", "--reward", "nosuch"), "--reward"),
    "empty reward": (("--env", "tldr", "--reward", ""), "--reward : tldr knows plain and grounded"),
    "columns": (("--env", "tldr", "--dataset", "columns.jsonl"), "prompt"),
    "empty file": (("--env", "tldr", "--dataset", "empty.jsonl"), "empty.jsonl"),
    "no file": (("--env", "tldr", "--dataset", "nosuch.jsonl"), "--dataset"),
    "hub": (("--env", "tldr", "--dataset", "hub"), "--dataset"),
    "generations": (("--num-generations", 0), "--num-generations"),
    "models": (("--model", "a", "b", "c"), "--model"),
    "no folder": (("--model", "/nowhere/at/all"), "--model: there is no model in /nowhere/at/all"),
    "no folder for one": (("--model", "tiny", "/nowhere/at/all"), "--model: there is no model in /nowhere/at/all"),
    "no folder here": (("--model", "./nowhere"), "--model: there is no model in ./nowhere"),
    "no folder that deep": (("--model", "runs/run/agent_0"), "--model: there is no model in runs/run/agent_0"),
    "no dataset": (("--env", "tldr", "--dataset", ""), "--dataset"),
    "temperature": (("--temperature", 0), "--temperature"),
    "agents": (("--num-agents", 0), "--num-agents"),
    "negative": (("--eval-every", -1), "--eval-every"),
    "learning rate": (("--learning-rate", 0), "--learning-rate"),
    "no number": (("--learning-rate", "nan"), "--learning-rate nan"),
    "no end": (("--gamma", "inf"), "--gamma inf"),
    "no discount": (("--gamma", 1.5), "--gamma 1.5"),
    "device": (("--devices", "nowhere"), "--devices nowhere"),
    "gpu that is not there": (("--devices", "cuda:9"), "--devices cuda:9: this machine has cpu"),
    "device of no use": (("--devices", "meta"), "--devices meta"),
    "greedy and several": (("--eval-temperature", 0, "--eval-generations", 2), "--eval-generations"),
    "devices": (("--devices", "cpu", "cpu", "cpu"), "--devices names 3 for 2 agents"),
    "too few": (("--devices", "cpu", "cpu", "--num-agents", 3), "--devices names 2 for 3 agents"),
    "output": (("--output-dir", "columns.jsonl/runs"), "--output-dir"),
    "track": (("--track", "trackio"), "pip install trackio"),
    "resume": (("--resume", "nosuch"), "--resume"),
    "resume of nothing": (("--resume", ""), "--resume : no checkpoint"),
    "seed": (("--seed", 2**63), "below 2^63"),
    "not a flag": (("--no-such-flag",), "no-such-flag"),
    "not a number": (("--seed", "x"), "--seed"),
}


@two_scripts
@pytest.mark.parametrize(
    "flags, said",
    [
        (("--num-tasks", 3), "--num-tasks 3: 2 processes cannot share them equally"),
        (("--devices", "cpu"), "--devices is for one process"),
        (("--eval-tasks", 1), "--env toy:Letters, --eval-tasks 1: 6 tasks to train on, 1 of "),
    ],
)
def test_arguments_that_two_processes_cannot_take(script, flags, said, run, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as stop:
        run(script, "--env", "toy:Letters", *flags)
    assert stop.value.code == 2 and said in capsys.readouterr().err


@two_scripts
@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_give_one_sentence_before_a_model_loads(script, case, run, tmp_path, monkeypatch, capsys):
    (tmp_path / "columns.jsonl").write_text('{"text": "a"}\n' * 20)
    (tmp_path / "empty.jsonl").write_text("")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("a model was loaded"))
    monkeypatch.setitem(sys.modules, "trackio", None)
    flags, named = BAD[case]
    base = () if "--env" in flags else ("--env", "toy:Letters")
    with pytest.raises(SystemExit) as stop:
        run(script, *base, *flags)
    assert stop.value.code == 2
    printed = capsys.readouterr()
    said = printed.err + printed.out  # tyro, which reads the flags, prints to either
    assert named in said
    if case not in ("not a flag", "not a number"):
        assert printed.err.startswith(f"{script.name}: error: ") and printed.err.count("\n") == 1


@pytest.mark.parametrize("script", CRITIC_FREE, ids=lambda path: path.stem)
def test_a_group_of_one_has_nothing_to_compare(script, run, capsys):
    with pytest.raises(SystemExit) as stop:
        run(script, "--num-generations", 1)
    assert stop.value.code == 2 and "--num-generations" in capsys.readouterr().err


@two_scripts
def test_bad_models_give_one_sentence(script, run, tmp_path, capsys):
    path = save_model(tmp_path / "model", max_position_embeddings=40)
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(os.path.join(path, "config.json"), bare)
    (bare / "nothing").mkdir()
    for model, flag in [
        (bare, "--model"),
        (bare / "nothing", "--model"),
        ("nosuch/model", "--model"),
        (path, "--max-new"),
    ]:
        with pytest.raises(SystemExit) as stop:
            run(script, *TOY, "--model", model)
        printed = capsys.readouterr().err
        assert stop.value.code == 2 and flag in printed, printed
        assert "Traceback" not in printed and printed.splitlines()[-1].startswith(f"{script.name}: error: ")


@two_scripts
def test_resume_of_another_configuration_is_refused(script, run, model_dir, tmp_path, monkeypatch, capsys):
    run_dir = run(script, *TOY, "--model", model_dir, "--num-iterations", 1)["run_dir"]
    before = {path: path.read_bytes() for path in pathlib.Path(run_dir).rglob("*") if path.is_file()}
    load = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("a model was loaded"))
    for flag, value in [("--num-agents", 3), ("--lora-rank", 2), ("--env", "tldr")]:
        with pytest.raises(SystemExit) as stop:
            run(script, "--resume", run_dir, "--num-iterations", 2, flag, value)
        assert stop.value.code == 2 and f"error: {flag}: the run to --resume has" in capsys.readouterr().err
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    other = save_model(tmp_path / "wider", hidden_size=64)
    with pytest.raises(SystemExit) as stop:
        run(script, "--resume", run_dir, "--num-iterations", 2, "--model", other)
    assert stop.value.code == 2 and "its weights do not fit; use its arguments" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in pathlib.Path(run_dir).rglob("*") if path.is_file()}
    path = os.path.join(run_dir, "checkpoint", "state.pt")
    state = torch.load(path, weights_only=False)
    about = state["about"]
    for other in ({"args": about["args"] | {"new": 1}}, {"script": "other.py"}):
        torch.save(state | {"about": about | other}, path)
        with pytest.raises(SystemExit) as stop:
            run(script, "--resume", run_dir)
        said = f"use {other.get('script', script.name)} (commit {about['commit']}), as before"
        assert stop.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ("--num-agents", 7),
        ("--num-agents", 3, "--num-turns", 2),  # where each starts a branch of as many
        ("--num-agents", 6),  # those of one task alone would be few enough
        ("--num-agents", 5000),
        ("--num-turns", 10**18),
        ("--num-tasks", 10**6),
    ],
)
def test_more_joint_actions_than_can_be_scored_are_refused(flags, run, monkeypatch, capsys):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit) as stop:
        run(CRITIC_FREE[0], "--env", "toy:Letters", "--joint-mode", "cross", *flags)
    assert stop.value.code == 2
    said = "--joint-mode cross: more than a million joint actions an iteration; lower --num-tasks, "
    assert said in capsys.readouterr().err


@two_scripts
def test_a_resume_with_another_model_or_number_of_processes_says_so(script, run, model_dir, tmp_path, capsys):
    run_dir = run(script, *TOY, "--model", model_dir, "--num-iterations", 1)["run_dir"]
    run(script, "--resume", run_dir, "--num-iterations", 2)
    assert "can differ from an uninterrupted run" not in capsys.readouterr().out
    said = f"{run_dir}: another number of processes or --model (trained weights come from the checkpoint) than before"
    path = os.path.join(run_dir, "checkpoint", "state.pt")
    state = torch.load(path, weights_only=False)
    torch.save(state | {"about": state["about"] | {"processes": 2}}, path)
    run(script, "--resume", run_dir)
    assert said in capsys.readouterr().out
    torch.save(state, path)
    run(script, "--resume", run_dir, "--model", shutil.copytree(model_dir, tmp_path / "moved"))
    assert said in capsys.readouterr().out


@two_scripts
def test_a_damaged_checkpoint_is_told_and_left_as_it_is(script, run, model_dir, capsys):
    run_dir = pathlib.Path(run(script, *TOY, "--model", model_dir, "--num-iterations", 1)["run_dir"])
    path = run_dir / "checkpoint" / "state.pt"
    whole = path.read_bytes()
    weight = max(torch.load(path, weights_only=False)["models"][0].values(), key=torch.numel)
    place = whole.index(weight.detach().numpy().tobytes())
    one_bit = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
    for damaged in (whole[: len(whole) // 2], one_bit):
        path.write_bytes(damaged)
        before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
        with pytest.raises(SystemExit) as stop:
            run(script, "--resume", run_dir, "--num-iterations", 2)
        assert stop.value.code == 2 and "no checkpoint, or a damaged one" in capsys.readouterr().err
        assert before == {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    path.write_bytes(whole)
    run(script, "--resume", run_dir, "--num-iterations", 2)
    assert [line["iteration"] for line in metrics_of(run_dir)] == [0, 1, 2]


@two_scripts
def test_a_run_goes_on_though_its_logs_were_shortened_or_deleted(script, run, model_dir):
    run_dir = pathlib.Path(run(script, *TOY, "--model", model_dir, "--num-iterations", 1)["run_dir"])
    (run_dir / "rollouts.jsonl").write_text("")  # they take the most space
    (run_dir / "metrics.jsonl").unlink()
    run(script, "--resume", run_dir, "--num-iterations", 2)
    assert {json.loads(line)["iteration"] for line in open(run_dir / "rollouts.jsonl")} == {2}
    assert [line["iteration"] for line in metrics_of(run_dir)] == [2]
    (run_dir / "metrics.jsonl").unlink()
    shutil.rmtree(run_dir / "agent_0")
    run(script, "--resume", run_dir)  # only saves
    assert (run_dir / "agent_0" / "config.json").exists()


@two_scripts
def test_logits_that_are_not_the_heads_are_refused(script, run, tmp_path, capsys):
    """A model whose forward does more than its head says would be trained on other log-probabilities than it has."""
    from transformers import CohereForCausalLM

    path = save_model(tmp_path / "m", model_class=CohereForCausalLM, logit_scale=0.5)
    with pytest.raises(SystemExit) as stop:
        run(script, *TOY, "--model", path)
    assert stop.value.code == 2 and "log-probabilities would be off by" in capsys.readouterr().err


@two_scripts
def test_models_that_count_what_pads_a_shorter_prompt_are_refused(script, run, tmp_path, capsys):
    """BART's decoder takes its positions from the length of the row, whatever position_ids say."""
    from transformers import BartForCausalLM

    sizes = {"decoder_layers": 2, "decoder_ffn_dim": 48, "decoder_attention_heads": 4, "init_std": 0.2}
    path = save_model(tmp_path / "m", model_class=BartForCausalLM, **sizes)
    with pytest.raises(SystemExit) as stop:
        run(script, *TOY, "--model", path)
    assert stop.value.code == 2 and "log-probabilities would be off by" in capsys.readouterr().err


@two_scripts
def test_layers_that_would_drop_out_when_they_are_recomputed_are_refused(script, run, tmp_path, capsys):
    from transformers import OPTForCausalLM

    sizes = {"ffn_dim": 48, "word_embed_proj_dim": 16}  # its head is narrower than its layers
    path = save_model(tmp_path / "m", model_class=OPTForCausalLM, dropout=0.5, **sizes)
    run(script, *TOY, "--model", path, "--num-iterations", 1)
    with pytest.raises(SystemExit) as stop:
        run(script, *TOY, "--model", path, "--gradient-checkpointing")
    assert stop.value.code == 2 and "dropout with --gradient-checkpointing" in capsys.readouterr().err


@two_scripts
def test_models_that_cannot_be_trained_are_told(script, run, model_dir, tmp_path, monkeypatch, capsys):
    def quantized(*args, **kwargs):
        model = load(*args, **kwargs)
        model.config.quantization_config = {"quant_method": "bitsandbytes"}
        return model

    load = AutoModelForCausalLM.from_pretrained
    said = {"broken": "cannot use it on cpu (", "refusing": "cannot use it on cpu (TemplateError: no system"}
    said |= {"unread": "makes no tokens", "whole": "quantized"}
    for name in said:
        shutil.copytree(model_dir, tmp_path / name)
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"nothing")
    (tmp_path / "unread" / "tokenizer.json").unlink()
    (tmp_path / "refusing" / "chat_template.jinja").write_text("{{ raise_exception('no system') }}")
    for name, sentence in said.items():
        if name == "whole":
            monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", quantized)
        with pytest.raises(SystemExit) as stop:
            run(script, *TOY, "--model", tmp_path / name)
        assert stop.value.code == 2 and sentence in capsys.readouterr().err


@two_scripts
def test_the_end_of_a_turn_stops_a_base_model(script, run, tmp_path):
    """A base model may name another end-of-sequence token than its chat template ends a turn with."""
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    path = save_model(tmp_path / "base", stops=[END], tokenizer=tokenizer)
    names = run(script, *TOY, "--model", path, "--num-iterations", 0)
    assert [set(agent.stop_ids.tolist()) for agent in names["agents"]] == [{END, STOP}] * 2
    tokenizer.chat_template += "{% if not add_generation_prompt %}<|im_start|>{% endif %}"  # what begins the next one
    path = save_model(tmp_path / "next", stops=[END], tokenizer=tokenizer)
    names = run(script, *TOY, "--model", path, "--num-iterations", 0)
    assert [set(agent.stop_ids.tolist()) for agent in names["agents"]] == [{END, STOP}] * 2
    tokenizer.unk_token = "<|im_end|>"  # which stands for whatever the tokenizer does not know
    path = save_model(tmp_path / "unknown", stops=[END], tokenizer=tokenizer)
    names = run(script, *TOY, "--model", path, "--num-iterations", 0)
    assert STOP not in names["agents"][0].stop_ids


@two_scripts
def test_saved_agents_sample_what_was_trained(script, run, model_dir, tmp_path):
    """Whatever its base model's generation_config recommends, which transformers and vLLM would follow."""
    shutil.copytree(model_dir, path := tmp_path / "choosy")
    config = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps(config | {"top_k": 1, "top_p": 0.1, "temperature": 0.3}))
    flags = ("--model", path, "--num-iterations", 1, "--temperature", 0.7)
    run_dir = pathlib.Path(run(script, *TOY, *flags)["run_dir"])
    config = AutoModelForCausalLM.from_pretrained(run_dir / "agent_1").generation_config
    assert config.do_sample and (config.temperature, config.top_k, config.top_p) == (0.7, 0, 1.0)
    assert config.eos_token_id == [STOP, *range(10, 30)] and config.pad_token_id == END


@two_scripts
def test_a_saved_agent_without_a_stop_token_can_generate(script, run, tmp_path):
    tokenizer = make_tokenizer(chat_template=None, pad=None)
    tokenizer.eos_token = None
    path = save_model(tmp_path / "m", stops=(), tokenizer=tokenizer)
    run_dir = pathlib.Path(run(script, *TOY, "--model", path, "--num-iterations", 1)["run_dir"])
    model = AutoModelForCausalLM.from_pretrained(run_dir / "agent_0")
    assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=4).shape == (1, 6)


@two_scripts
def test_attention_that_sampling_does_not_know_is_refused(script, run, tmp_path, capsys, monkeypatch):
    """Completions see their prompt by the script's own attention, which has to be the model's."""
    split = torch.Tensor.tensor_split  # which that attention calls, and no model does
    monkeypatch.setattr(torch.Tensor, "tensor_split", lambda x, *args: [part / 2 for part in split(x, *args)])
    path = save_model(tmp_path / "m", stops=range(259))  # whose completions all stop at once
    with pytest.raises(SystemExit) as stop:
        run(script, *TOY, "--model", path)
    assert stop.value.code == 2 and "log-probabilities would be off by" in capsys.readouterr().err


@two_scripts
def test_tracker_gets_the_metrics(script, run, model_dir, monkeypatch):
    seen = []
    fake = SimpleNamespace(init=lambda **kwargs: seen.append(kwargs), log=lambda m, step: seen.append((step, m)))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    names = run(script, *TOY, "--model", model_dir, "--num-iterations", 2, "--track", "wandb")
    assert [step for step, _ in seen[1:]] == [0, 1, 2] and seen[0]["config"]["num_generations"] == 3
    assert {"iteration": 2} | seen[3][1] == metrics_of(names["run_dir"], but=())[2]


def test_tensorboard_gets_the_metrics(run, model_dir, monkeypatch):
    seen, purged = defaultdict(dict), []  # by folder and step

    def writer(folder, purge_step):
        purged.append(purge_step)
        return SimpleNamespace(add_scalar=lambda name, value, step: seen[folder, step].update({name: value}))

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=writer))
    run_dir = run(SCRIPTS[0], *TOY, "--model", model_dir, "--num-iterations", 1, "--track", "tensorboard")["run_dir"]
    assert [{"iteration": k} | seen[run_dir, k] for k in (0, 1)] == metrics_of(run_dir, but=())
    run(SCRIPTS[0], "--resume", run_dir, "--num-iterations", 2)
    assert purged == [1, 2] and {"iteration": 2} | seen[run_dir, 2] == metrics_of(run_dir, but=())[2]


@two_scripts
def test_help_shows_every_argument(script, run, capsys):
    names_of_args = re.findall(
        r"^    (\w+): .*  # (.+)$", script.read_text().split("class Args:")[1].split("\n\n\n")[0], re.M
    )
    with pytest.raises(SystemExit) as stop:
        run(script, "--help")
    assert stop.value.code == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert len(names_of_args) > 25
    for name, comment in names_of_args:
        assert f"--{name.replace('_', '-')}" in printed
        assert " ".join(comment.split()[:4]) in printed
        assert len(re.findall(rf"\bargs\.{name}\b", script.read_text())) >= 1, f"{name} is never read"


@pytest.mark.parametrize(
    "flags, joint_mode, joint_actions",
    [
        (("--num-agents", 2), "cross", 9),  # G is 3 in TOY
        (("--num-agents", 4), "cross", 81),
        (("--num-generations", 10), "cross", 100),
        (("--num-agents", 5), "align", 3),  # where 3^5 would have to be scored
        (("--num-turns", 2), "align", 3),  # where each would start a branch
        (("--num-turns", 2, "--joint-mode", "cross"), "cross", 9),
        (("--joint-mode", "align"), "align", 3),
    ],
)
def test_joint_mode_is_cross_by_default_where_that_costs_little(
    flags, joint_mode, joint_actions, run, model_dir, capsys
):
    flags = ("--num-turns", 1, *flags, "--model", model_dir, "--num-iterations", 1)
    run_dir = run(CRITIC_FREE[0], *TOY, *flags)["run_dir"]
    assert json.loads(open(os.path.join(run_dir, "args.json")).read())["args"]["joint_mode"] == joint_mode
    lines = [json.loads(line) for line in open(os.path.join(run_dir, "rollouts.jsonl"))]
    assert {len(line["joint"]) for line in lines if line["split"] == "train"} == {joint_actions}
    assert f"joint mode {joint_mode}: {joint_actions} joint actions a group" in capsys.readouterr().out
