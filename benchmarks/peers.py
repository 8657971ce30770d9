"""Our scripts against comlrl and trl: same model, prompts, lengths, generations, agents and updates, alternating.

    python benchmarks/peers.py
    python benchmarks/peers.py --device cuda --workloads qwen2.5-0.5b qwen3-1.7b

comlrl and trl are in this environment, or in one of their own, benchmarks/.peers-venv; without them peers.py prints
how to make it. Every contestant is a process of its own, in every round; ours is `python magrpo.py ...` as a user
would run it. The two run one right after the other, and which one goes first alternates; what counts is the ratio
theirs/ours within a round. Seconds are per update, from sampling to the optimizer step, without loading, evaluation
and saving; the first update of a process warms up.

Models have random weights: speed depends on what a model has learnt only through where its completions end. That is
fixed: in workloads a and b, and in those for a GPU, completions run to their full length; in c they stop with the same
probability at every token. Prompts are random words. One GPU is used, if any. Our runs end before they would save.
"""

import glob
import itertools
import math
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from importlib.metadata import version
from importlib.util import find_spec
from typing import Literal

import tyro
from peers_child import read, write
from stamp import ROOT, print_ratios, stamp, write_rows

CHILD = f"{ROOT}/benchmarks/peers_child.py"
VENV = f"{ROOT}/benchmarks/.peers-venv"
# torch and transformers as ours, so both sides compute with the same kernels
PACKAGES = [f"{package}=={version(package).partition('+')[0]}" for package in ("torch", "transformers")]
PACKAGES += ["comlrl==1.4.3", "trl==1.16.0"]
LEARNING_RATE = 1e-6  # so small that the probability of stopping does not change


@dataclass
class Args:
    workloads: list[str] = field(default_factory=lambda: ["a", "b", "c"])  # keys of WORKLOADS
    comparisons: list[str] = field(default_factory=lambda: list(COMPARISONS))  # keys of COMPARISONS
    rounds: int = 5  # of all contestants
    updates: int = 3  # measured per process, after one that warms up; the median counts
    device: Literal["cpu", "cuda"] = "cpu"
    seed: int = 1  # for model and prompts; sampling uses seed + round
    shrink: bool = False  # tiny sizes, to check that everything runs; measures nothing
    folder: str = "runs"  # for models and logs


@dataclass
class Workload:
    config: dict  # of the model
    prompt_tokens: int = 400  # P, with the chat template
    completion_tokens: int = 100  # C
    num_generations: int = 8  # G
    num_tasks: int = 4  # B, per update
    stop: float = 0.0  # probability of the stop token at every step
    trl_rows: int = 0  # completions per training batch of trl; 0: the whole rollout


TINY = {
    "model_type": "qwen2", "vocab_size": 1075, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-6}
LONG = {"prompt_tokens": 512, "completion_tokens": 256}
WORKLOADS = {
    # the shape of models/tiny, with a vocabulary of 1,075
    "a": Workload(TINY),
    # a real vocabulary on a small model, so that the head is most of the work
    "b": Workload(
        TINY | {"vocab_size": 151_936, "hidden_size": 256, "intermediate_size": 768},
        completion_tokens=64, num_generations=4, num_tasks=2,
    ),
    # completions of 1 to 100 tokens, 30 on average
    "c": Workload(TINY, num_tasks=8, stop=1 / 31),
    # the shapes of the real models, from their config.json
    "qwen2.5-0.5b": Workload(
        {
            "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864,
            "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
            "max_position_embeddings": 32_768, "tie_word_embeddings": True, **ROPE,
        },
        **LONG,
    ),
    "qwen3-1.7b": Workload(
        {
            "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144,
            "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
            "max_position_embeddings": 40_960, "tie_word_embeddings": True, **ROPE,
        },
        **LONG, trl_rows=8,  # the activations of all 32 would take 92 GB
    ),
}  # fmt: skip


@dataclass
class Comparison:
    script: str
    trainer: str  # of the peer
    num_agents: int
    flags: tuple = ()  # further ones of our script


COMPARISONS = {
    "magrpo-comlrl": Comparison("magrpo", "comlrl MAGRPOTrainer", 2, ("--joint-mode", "align")),
    "magrpo-trl": Comparison("magrpo", "trl GRPOTrainer", 1),
}


def shrunk(workload):
    small = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    if "head_dim" in workload.config:
        small["head_dim"] = 8
    config = workload.config | small
    return replace(workload, config=config, prompt_tokens=40, completion_tokens=8, num_generations=4, num_tasks=2)


def find_peers():
    """The peers' interpreter: this one, or that of the environment VENV. None if they are not installed."""
    if find_spec("comlrl") and find_spec("trl"):
        return sys.executable
    python = f"{VENV}/bin/python"
    if os.path.exists(python):
        return python
    print(f"comlrl and trl are missing: python -m venv {VENV} && {python} -m pip install {' '.join(PACKAGES)}")
    return None


def run(device, command, log, cwd=ROOT, timeout=None, **variables):
    """Runs a process. Returns None, or why it failed: the last line that it wrote, and where its log is."""
    env = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", **os.environ, "HF_HUB_OFFLINE": "1"}
    # none for the CPU, since our scripts use a GPU if they see one; else one, since trl refuses several in one process
    env["CUDA_VISIBLE_DEVICES"] = "" if device == "cpu" else env.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    env |= variables
    command = [str(word) for word in command]
    with open(log, "w") as file:
        try:
            process = subprocess.run(command, cwd=cwd, env=env, stdout=file, stderr=file, timeout=timeout)
        except subprocess.TimeoutExpired:
            return f"ended after {timeout:.0f} s ({log})"
    if process.returncode == 0:
        return None
    last = pathlib.Path(log).read_text(errors="replace").strip().splitlines()[-1:]
    return f"{''.join(last)} (exit code {process.returncode}; {log})"


def run_child(python, job, folder, timeout=None):
    path = f"{folder}/job.json"
    write(path, job)
    return run(job["device"], [python, CHILD, path], f"{folder}/log.txt", timeout=timeout)


def prepare(name, folder, seed, shrink, device="cpu", updates=1):
    """Makes model and prompts of a workload; returns the job that all contestants share."""
    os.makedirs(folder)
    workload = shrunk(WORKLOADS[name]) if shrink else WORKLOADS[name]
    job = {"model": f"{folder}/model", "prompts": f"{folder}/prompts.jsonl"}
    job |= {"workload": name, "seed": seed, "device": device, "bf16": device == "cuda"}
    # gradients clipped to 1, as ours are by default
    job |= {"updates": updates, "learning_rate": LEARNING_RATE, "max_grad_norm": 1.0}
    # as many prompts as tasks, each used once, plus one for our evaluation, which always runs
    job |= asdict(workload) | {"num_prompts": workload.num_tasks * (updates + 1) + 1}
    if error := run_child(sys.executable, job | {"task": "prepare"}, folder):
        sys.exit(f"workload {name} could not be made: {error}")
    return job


def run_script(job, script, flags, folder, cwd=ROOT, timeout=None):
    """Runs one of our scripts for the job's updates after one that warms up, in an environment of peers_child.py.

    A job without a model is the script's default run. Returns what the environment wrote and the run's metrics, or an
    error.
    """
    # an evaluation cannot be left out: one task before the first update, which is not timed
    command = [sys.executable, f"{script}.py", "--eval-tasks", 1, "--eval-every", 10**6, "--output-dir", folder]
    command += ["--num-iterations", job["updates"] + 2, "--seed", job["seed"], *flags]
    if "model" in job:
        command += ["--env", "peers_child:Prompts", "--model", job["model"], "--num-tasks", job["num_tasks"]]
        command += ["--num-generations", job["num_generations"], "--max-new-tokens", job["completion_tokens"]]
        command += ["--learning-rate", job["learning_rate"]]
    else:
        command += ["--env", "peers_child:Posts"]
    variables = {
        "PYTHONPATH": f"{ROOT}/benchmarks",
        "BENCH_DEVICE": job["device"],
        "BENCH_PROMPTS": job.get("prompts", ""),
        "BENCH_RESULT": f"{folder}/result.json",
        "BENCH_LAST": str(job["updates"] + 2),
    }
    if error := run(job["device"], command, f"{folder}/log.txt", cwd, timeout, **variables):
        return {"error": error}
    (path,) = glob.glob(f"{folder}/*/metrics.jsonl")
    (result,) = read(variables["BENCH_RESULT"])
    metrics = [line for line in read(path) if line["iteration"] > 1]
    return result | {"tokens": [line["tokens"] for line in metrics]}


def phases(job, result, clock):
    """Of each measured iteration the seconds of sampling, scoring and update. Clock 0: processor time; 1: wall."""
    times = [mark[clock] for mark in result["marks"]]
    seconds = []
    for k in range(2, job["updates"] + 2):  # 0 is the evaluation, 1 warms up
        began, sampled, scored, ended = times[3 * k : 3 * k + 4]
        seconds.append((sampled - began, scored - sampled, ended - scored))
    return seconds


def run_ours(job, comparison, folder, timeout=None):
    """Seconds and tokens of each measured update, and peak memory; or an error."""
    flags = ["--num-agents", comparison.num_agents, *comparison.flags]
    result = run_script(job, comparison.script, flags, folder, timeout=timeout)
    if "error" not in result:
        result["seconds"] = [sum(parts) for parts in phases(job, result, clock=1)]
    return result


def run_theirs(python, job, comparison, folder, timeout=None):
    if python is None:
        return {"error": "comlrl and trl are not installed"}
    job = job | {"num_agents": comparison.num_agents, "result": f"{folder}/result.json"}
    if error := run_child(python, job | {"task": comparison.trainer}, folder, timeout):
        return {"error": error}
    return read(job["result"])[0]


def row_of(job, comparison, contestant, result):
    """A line of the results file. An error leaves the numbers empty."""
    row = {"workload": job["workload"], "agents": comparison.num_agents, "contestant": contestant, "seed": job["seed"]}
    row |= dict.fromkeys(("seconds", "tokens_per_second", "peak_mib"), math.nan)
    if "error" not in result:
        row["seconds"] = statistics.median(result["seconds"])
        row["tokens_per_second"] = sum(result["tokens"]) / sum(result["seconds"])
        row["peak_mib"] = result["peak_mib"]
    return row | {"error": result.get("error", "")}


def main(args):
    about = f"{stamp(args)}; theirs: {', '.join(PACKAGES)}"  # before the runs, which take long
    python = find_peers()
    work = os.path.join(ROOT, args.folder, f"peers-{datetime.now():%Y%m%d-%H%M%S}")
    output = os.path.join(work if args.shrink else f"{ROOT}/results", "peers.csv")
    jobs = []
    for name in args.workloads:
        jobs.append(prepare(name, f"{work}/{name}", args.seed, args.shrink, args.device, args.updates))
    rows = []
    for round in range(args.rounds):
        for job, name in itertools.product(jobs, args.comparisons):
            job = job | {"seed": args.seed + round}
            comparison = COMPARISONS[name]
            for side in ["ours", "theirs"][:: 1 if round % 2 == 0 else -1]:
                folder = os.path.join(work, job["workload"], f"{name}-{side}-{round}")
                os.makedirs(folder)
                if side == "ours":
                    row = row_of(job, comparison, f"{comparison.script}.py", run_ours(job, comparison, folder))
                else:
                    row = row_of(job, comparison, comparison.trainer, run_theirs(python, job, comparison, folder))
                rows.append({"comparison": name, "round": round, "side": side} | row)
                print(f"round {round}, {row['workload']}, {row['contestant']}: {row['error'] or row['seconds']}")
        # after every round, so that an interruption loses only one
        write_rows(output, about, rows)
    for job in jobs:
        shutil.rmtree(job["model"])
    print(f"\n{about}\n\nrows in {output}, logs in {work}\n")
    print_ratios(rows, ["workload", "comparison"], ["theirs", "ours"], ["seconds", "tokens_per_second", "peak_mib"])


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
