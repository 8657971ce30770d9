"""Our scripts against comlrl and trl: same model, prompts, lengths, generations, agents and updates, alternating.

    python benchmarks/peers.py
    python benchmarks/peers.py --device cuda --workloads qwen2.5-0.5b qwen3-1.7b

The first run makes a virtual environment for the peers in benchmarks/.peers-venv. Every contestant is a process of its
own, in every round; ours is `python magrpo.py ...` as a user would run it. What counts is the ratio theirs/ours within
a round: the two run one right after the other, and which one goes first alternates. Seconds are per update, from
sampling to the optimizer step, without loading, evaluation and saving; the first update of a process warms up.

Models have random weights: speed depends on what a model has learnt only through where its completions end. That is
fixed: in workloads a and b, and in those for a GPU, completions run to their full length; in c they stop with the same
probability at every token. Prompts are random words. One GPU is used, if any. Our runs end before they would save.
"""

import glob
import itertools
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, field, replace
from datetime import date, datetime
from importlib.metadata import version
from typing import Literal

import tyro
from peers_child import read, write
from stamp import ROOT, commit, machine, versions, write_rows

CHILD = os.path.join(ROOT, "benchmarks", "peers_child.py")
VENV = os.path.join(ROOT, "benchmarks", ".peers-venv")
# torch and transformers as ours, so both sides compute with the same kernels. One environment has both peers, which
# work with the versions of requirements.txt.
OURS = [f"{package}=={version(package).partition('+')[0]}" for package in ("torch", "transformers")]
PACKAGES = (*OURS, "comlrl==1.4.3", "trl==1.16.0")
LEARNING_RATE = 1e-6  # so small that the probability of stopping does not change


@dataclass
class Args:
    workloads: list[str] = field(default_factory=lambda: ["a", "b", "c"])  # keys of WORKLOADS
    comparisons: list[str] = field(default_factory=lambda: list(COMPARISONS))  # keys of COMPARISONS
    sides: list[Literal["ours", "theirs"]] = field(default_factory=lambda: ["ours", "theirs"])
    rounds: int = 5  # of all contestants
    updates: int = 3  # measured per process, after one that warms up; the median counts
    device: Literal["cpu", "cuda"] = "cpu"
    seed: int = 1  # for model and prompts; sampling uses seed + round
    max_batch_tokens: int = 4096  # of ours, as in the scripts. Theirs: the whole rollout
    shrink: bool = False  # tiny sizes, to check that everything runs; measures nothing
    folder: str = "runs"  # for models and logs
    output: str = ""  # CSV of the rows; by default results/peers.csv, with --shrink in that folder


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

# name: (our script, its further arguments, the peer, number of agents)
COMPARISONS = {
    "magrpo-comlrl": ("magrpo", ("--joint-mode", "align"), "comlrl MAGRPOTrainer", 2),
    # one optimizer step per rollout, as in the peer; ours makes four by default
    "ippo-comlrl": ("ippo", ("--update-epochs", "1", "--num-minibatches", "1"), "comlrl IACTrainer", 2),
    "magrpo-trl": ("magrpo", (), "trl GRPOTrainer", 1),
    "marloo-trl": ("marloo", (), "trl RLOOTrainer", 1),
}


def shrunk(workload):
    small = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    if "head_dim" in workload.config:
        small["head_dim"] = 8
    config = workload.config | small
    return replace(workload, config=config, prompt_tokens=40, completion_tokens=8, num_generations=4, num_tasks=2)


def install():
    """The peers' interpreter; makes its environment unless one with exactly PACKAGES is there."""
    python, marker = os.path.join(VENV, "bin", "python"), os.path.join(VENV, "packages.txt")
    wanted = "\n".join(PACKAGES)
    if os.path.exists(marker) and pathlib.Path(marker).read_text() == wanted:
        return python
    print(f"installing {', '.join(PACKAGES)} and what they need in {VENV} (gigabytes; git ignores it)", flush=True)
    shutil.rmtree(VENV, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
    pathlib.Path(VENV, ".gitignore").write_text("*\n")
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    pathlib.Path(marker).write_text(wanted)
    return python


def run(device, command, log, cwd=ROOT, **variables):
    """Runs a process. Returns None, or why it failed: the last line that it wrote, and where its log is."""
    env = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", **os.environ, "HF_HUB_OFFLINE": "1", **variables}
    # none for the CPU, since our scripts use a GPU if they see one; else one, since trl refuses several in one process
    env["CUDA_VISIBLE_DEVICES"] = "" if device == "cpu" else env.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    with open(log, "w") as file:
        done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode == 0:
        return None
    last = pathlib.Path(log).read_text(errors="replace").strip().splitlines()[-1:]
    return f"{''.join(last)} (exit code {done.returncode}; {log})"


def run_child(python, job, folder):
    path = os.path.join(folder, "job.json")
    write(path, job)
    return run(job["device"], [python, CHILD, path], os.path.join(folder, "log.txt"))


def prepare(name, folder, seed, shrink, device="cpu", updates=1):
    """Makes model and prompts of a workload; returns the job that all contestants share."""
    os.makedirs(folder)
    workload = shrunk(WORKLOADS[name]) if shrink else WORKLOADS[name]
    job = {"model": os.path.join(folder, "model"), "prompts": os.path.join(folder, "prompts.jsonl")}
    job |= {"workload": name, "seed": seed, "device": device, "bf16": device == "cuda"}
    # gradients clipped to 1, as ours are by default
    job |= {"updates": updates, "learning_rate": LEARNING_RATE, "max_grad_norm": 1.0}
    # as many prompts as tasks, each used once, plus one for our evaluation, which always runs
    job |= asdict(workload) | {"num_prompts": workload.num_tasks * (updates + 1) + 1}
    if error := run_child(sys.executable, job | {"task": "prepare"}, folder):
        sys.exit(f"workload {name} could not be made: {error}")
    return job


def flags_of(job, max_batch_tokens):
    """Of our scripts, for a workload."""
    flags = ["--model", job["model"], "--dataset", job["prompts"], "--num-tasks", job["num_tasks"]]
    flags += ["--num-generations", job["num_generations"], "--max-new-tokens", job["completion_tokens"]]
    return [*flags, "--learning-rate", job["learning_rate"], "--max-batch-tokens", max_batch_tokens]


def run_script(device, command, updates, folder, cwd=ROOT, **variables):
    """Runs one of our scripts for so many updates after one that warms up, in an environment of peers_child.py.

    Returns the measured updates' metrics, and what the environment wrote; or an error.
    """
    # evaluation cannot be switched off: one task before the first update, which is not timed
    command = [sys.executable, *command, "--eval-tasks", 1, "--eval-every", 10**6, "--save-every", 10**6]
    command += ["--num-iterations", updates + 2, "--output-dir", folder]
    variables |= {"BENCH_RESULT": os.path.join(folder, "result.json"), "BENCH_LAST": str(updates + 2)}
    if error := run(device, command, os.path.join(folder, "log.txt"), cwd, **variables):
        return {"error": error}
    (metrics,) = glob.glob(os.path.join(folder, "*", "metrics.jsonl"))
    (result,) = read(variables["BENCH_RESULT"])
    return {"lines": [line for line in read(metrics) if line["iteration"] > 1], **result}


def run_ours(args, job, comparison, folder):
    """Seconds and tokens of each measured update, and peak memory; or an error."""
    script, more, _, num_agents = COMPARISONS[comparison]
    command = [f"{script}.py", "--env", "benchmarks.peers_child:Prompts", "--num-agents", num_agents]
    command += ["--seed", job["seed"], *flags_of(job, args.max_batch_tokens), *more]
    result = run_script(args.device, command, job["updates"], folder)
    if "error" not in result:
        result["tokens"] = [line["tokens"] for line in result["lines"]]
        result["seconds"] = [line["time/iteration"] for line in result["lines"]]
    return result


def run_theirs(python, job, comparison, folder):
    _, _, peer, num_agents = COMPARISONS[comparison]
    result = os.path.join(folder, "result.json")
    if error := run_child(python, job | {"task": peer, "num_agents": num_agents, "result": result}, folder):
        return {"error": error}
    return read(result)[0]


def row_of(job, round, comparison, side, result):
    """A line of the table of rows. An error leaves the numbers empty."""
    script, _, peer, num_agents = COMPARISONS[comparison]
    row = {"workload": job["workload"], "round": round, "comparison": comparison, "side": side}
    row |= {"contestant": f"{script}.py" if side == "ours" else peer, "agents": num_agents, "seed": job["seed"]}
    numbers = dict.fromkeys(("seconds", "tokens_per_second", "completion_length", "peak_mib"), "")
    if "error" not in result:
        completions = len(result["seconds"]) * job["num_tasks"] * job["num_generations"] * num_agents
        numbers["seconds"] = statistics.median(result["seconds"])
        numbers["tokens_per_second"] = sum(result["tokens"]) / sum(result["seconds"])
        numbers["completion_length"] = sum(result["tokens"]) / completions
        numbers["peak_mib"] = result["peak_mib"]
    return row | numbers | {"error": result.get("error", "")}


def median(rows, key, form):
    return format(statistics.median(row[key] for row in rows), form) if rows else "failed"


def table(rows):
    """Markdown: medians over the rounds, and the ratio theirs/ours of each round."""
    lines = ["| workload | agents | ours | theirs | ours, s | theirs, s | theirs/ours, median (lowest to highest) |"]
    lines[0] += " ours, tokens/s | theirs, tokens/s | ours, MiB | theirs, MiB |"
    lines.append("|---" * 11 + "|")
    good = [row for row in rows if not row["error"]]
    for workload, comparison in dict.fromkeys((row["workload"], row["comparison"]) for row in rows):
        both = [row for row in good if (row["workload"], row["comparison"]) == (workload, comparison)]
        ours, theirs = ([row for row in both if row["side"] == side] for side in ("ours", "theirs"))
        seconds = {row["round"]: row["seconds"] for row in ours}
        ratios = [row["seconds"] / seconds[row["round"]] for row in theirs if row["round"] in seconds]
        ratio = ""
        if ratios:
            ratio = f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f})"
        script, _, peer, num_agents = COMPARISONS[comparison]
        cells = [workload, str(num_agents), f"{script}.py", peer]
        cells += [median(ours, "seconds", ".3f"), median(theirs, "seconds", ".3f"), ratio]
        cells += [median(side, key, ".0f") for key in ("tokens_per_second", "peak_mib") for side in (ours, theirs)]
        lines.append("| " + " | ".join(cells) + " |")
    failed = [row for row in rows if row["error"]]
    lines += [f"\n{row['contestant']}, {row['workload']}, round {row['round']}: {row['error']}" for row in failed]
    return "\n".join(lines)


def about(args, measured, theirs):
    """Commit, versions and machine; the first line of the table of rows."""
    device = machine()
    if args.device == "cuda":  # nvidia-smi is not everywhere, and does not know CUDA_VISIBLE_DEVICES
        query = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
        device += ", " + subprocess.run(query, capture_output=True, text=True).stdout.strip()
    named = ", ".join(f"{package} {number}" for package, number in theirs.items()) or "unknown"
    return f"commit {measured}; ours: {versions()}; theirs: {named}; {device}; {date.today()}; {args}"


def main(args):
    python = install() if "theirs" in args.sides else None
    measured = commit()  # before the runs, which take long
    work = os.path.join(ROOT, args.folder, f"peers-{datetime.now():%Y%m%d-%H%M%S}")
    output = args.output or os.path.join(work if args.shrink else os.path.join(ROOT, "results"), "peers.csv")
    sizes = (args.seed, args.shrink, args.device, args.updates)
    jobs = [prepare(name, os.path.join(work, name), *sizes) for name in args.workloads]
    rows, theirs = [], {}  # theirs: versions
    for round in range(args.rounds):
        for job, comparison in itertools.product(jobs, args.comparisons):
            job = job | {"seed": args.seed + round}
            for side in args.sides if round % 2 == 0 else args.sides[::-1]:
                folder = os.path.join(work, job["workload"], f"{comparison}-{side}-{round}")
                os.makedirs(folder)
                if side == "ours":
                    result = run_ours(args, job, comparison, folder)
                else:
                    result = run_theirs(python, job, comparison, folder)
                    theirs |= result.get("versions", {})
                rows.append(row_of(job, round, comparison, side, result))
                what = rows[-1]["error"] or f"{rows[-1]['seconds']:.3f} s, {rows[-1]['peak_mib']:.0f} MiB"
                print(f"round {round}, {job['workload']}, {comparison}, {side}: {what}", flush=True)
        # after every round, so that an interruption loses only one
        write_rows(output, about(args, measured, theirs), rows)
    for job in jobs:
        shutil.rmtree(job["model"])
    print(f"\n{about(args, measured, theirs)}\n\n{table(rows)}\n\nrows in {output}, logs in {work}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
