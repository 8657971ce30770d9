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

import csv
import glob
import json
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, field, replace
from datetime import date, datetime
from importlib.metadata import version
from typing import Literal

import tyro
from stamp import ROOT, Count, commit, machine, versions

# This process does not import torch, to stay small: Linux counts its peak memory as its children's too.

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
    rounds: Count = 5  # of all contestants
    updates: Count = 3  # measured per process, after one that warms up; the median counts
    device: Literal["cpu", "cuda"] = "cpu"
    threads: Count = 1  # per process
    seed: int = 1  # for model and prompts; sampling uses seed + round
    max_batch_tokens: Count = 4096  # of ours, as in the scripts. Theirs: the whole rollout
    cuda_graphs: bool = False  # run ours with this flag
    trl_rows: int = 0  # completions per training batch of trl, if the whole rollout does not fit; 0: the workload's
    shrink: bool = False  # tiny sizes, to check that everything runs; measures nothing
    pip_args: str = ""  # pip's arguments for the peers, as one string, such as an index with CPU builds of torch
    output: str | None = None  # CSV of the rows; by default results/peers.csv, with --shrink in the run's folder


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
        completion_tokens=64,
        num_generations=4,
        num_tasks=2,
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
        **LONG,
        trl_rows=8,  # the activations of all 32 would take 92 GB
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


def install(args):
    """The peers' interpreter; makes its environment unless one with exactly PACKAGES is there."""
    python, marker = os.path.join(VENV, "bin", "python"), os.path.join(VENV, "packages.txt")
    wanted = "\n".join(PACKAGES)
    if os.path.exists(marker):
        with open(marker) as file:
            if file.read() == wanted:
                return python
    print(f"installing {', '.join(PACKAGES)} and what they need in {VENV} (gigabytes; git ignores it)", flush=True)
    shutil.rmtree(VENV, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
    with open(os.path.join(VENV, ".gitignore"), "w") as file:
        file.write("*\n")
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES, *args.pip_args.split()], check=True)
    with open(marker, "w") as file:
        file.write(wanted)
    return python


def run(args, command, log, **variables):
    """Runs a contestant. Returns None, or why it failed: the last line that it wrote, and where its log is."""
    env = os.environ | {"OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    # none for the CPU, since our scripts use a GPU if they see one; else one, since trl refuses several in one process
    visible = "" if args.device == "cpu" else env.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    env["CUDA_VISIBLE_DEVICES"] = visible
    with open(log, "w") as file:
        done = subprocess.run(command, cwd=ROOT, env=env | variables, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode == 0:
        return None
    with open(log, errors="replace") as file:
        lines = [line.strip() for line in file if line.strip()]
    return f"{lines[-1] if lines else 'nothing written'} (exit code {done.returncode}; {os.path.relpath(log, ROOT)})"


def run_child(args, python, job, folder):
    path = os.path.join(folder, "job.json")
    with open(path, "w") as file:
        json.dump(job, file)
    return run(args, [python, CHILD, path], os.path.join(folder, "log.txt"))


def job_of(args, name, workload, folder):
    """What all contestants of a workload share."""
    job = {"model": os.path.join(folder, "model"), "prompts": os.path.join(folder, "prompts.jsonl")}
    job |= {"workload": name, "seed": args.seed, "device": args.device, "bf16": args.device == "cuda"}
    # gradients clipped to 1, as ours are by default
    job |= {"updates": args.updates, "learning_rate": LEARNING_RATE, "max_grad_norm": 1.0}
    # as many prompts as tasks, each used once, plus one for our evaluation, which always runs
    job |= asdict(workload) | {"num_prompts": workload.num_tasks * (args.updates + 1) + 1}
    return job | {"trl_rows": args.trl_rows or workload.trl_rows}


def prepare(args, name, workload, folder):
    """Makes model and prompts of a workload; returns the job that all contestants share."""
    os.makedirs(folder)
    job = job_of(args, name, workload, folder)
    if error := run_child(args, sys.executable, job | {"task": "prepare"}, folder):
        sys.exit(f"workload {name} could not be made: {error}")
    return job


def run_ours(args, job, script, more, num_agents, folder):
    """Seconds and tokens of each measured update, and peak memory; or an error."""
    command = [sys.executable, f"{script}.py", "--env", "benchmarks.peers_child:Prompts", "--dataset", job["prompts"]]
    command += ["--model", job["model"], "--num-agents", num_agents, "--num-iterations", job["updates"] + 2]
    command += ["--num-tasks", job["num_tasks"], "--num-generations", job["num_generations"]]
    command += ["--max-new-tokens", job["completion_tokens"], "--learning-rate", job["learning_rate"]]
    command += ["--max-batch-tokens", args.max_batch_tokens]
    # evaluation cannot be switched off: one task before the first update, which is not timed
    command += ["--eval-tasks", 1, "--eval-every", 10**6, "--save-every", 10**6]
    command += ["--seed", job["seed"], "--output-dir", folder, *more]
    command += ["--cuda-graphs"] * args.cuda_graphs
    peak = os.path.join(folder, "peak.json")
    # the environment ends the run in the iteration after the last update, before it is saved
    last = {"PEERS_PEAK": peak, "PEERS_LAST": str(1 + job["updates"] + 2)}
    if error := run(args, list(map(str, command)), os.path.join(folder, "log.txt"), **last):
        return {"error": error}
    (metrics,) = glob.glob(os.path.join(folder, "*", "metrics.jsonl"))
    with open(metrics) as file:
        lines = [json.loads(line) for line in file]
    lines = [line for line in lines if line["iteration"] > 1]  # 0 is the evaluation before training, 1 warms up
    seconds = [line["tokens"] / line["tokens_per_second"] for line in lines]
    with open(peak) as file:
        return {"seconds": seconds, "tokens": [line["tokens"] for line in lines], **json.load(file)}


def run_theirs(args, python, job, peer, num_agents, folder):
    result = os.path.join(folder, "result.json")
    if error := run_child(args, python, job | {"task": peer, "num_agents": num_agents, "result": result}, folder):
        return {"error": error}
    with open(result) as file:
        return json.load(file)


def row_of(job, round, comparison, side, contestant, num_agents, result):
    """A line of the table of rows. An error leaves the numbers empty."""
    row = {"workload": job["workload"], "round": round, "comparison": comparison, "side": side}
    row |= {"contestant": contestant, "agents": num_agents, "seed": job["seed"]}
    numbers = dict.fromkeys(("seconds", "tokens_per_second", "completion_length", "peak_mib"), "")
    if "error" not in result:
        completions = len(result["seconds"]) * job["num_tasks"] * job["num_generations"] * num_agents
        numbers["seconds"] = statistics.median(result["seconds"])
        numbers["tokens_per_second"] = sum(result["tokens"]) / sum(result["seconds"])
        numbers["completion_length"] = sum(result["tokens"]) / completions
        numbers["peak_mib"] = result["peak_mib"]
    return row | numbers | {"error": result.get("error", "")}


def table(rows):
    """Markdown: medians over the rounds, and the ratio theirs/ours of each round."""
    lines = ["| workload | agents | ours | theirs | ours, s | theirs, s | theirs/ours, median (lowest to highest) |"]
    lines[0] += " ours, tokens/s | theirs, tokens/s | ours, MiB | theirs, MiB |"
    lines.append("|---" * 11 + "|")
    for workload, comparison in dict.fromkeys((row["workload"], row["comparison"]) for row in rows):
        both = [row for row in rows if (row["workload"], row["comparison"]) == (workload, comparison)]
        sides = {side: [row for row in both if row["side"] == side] for side in ("ours", "theirs")}

        def cell(side, key, form, sides=sides):
            good = [row[key] for row in sides[side] if not row["error"]]
            bad = len(sides[side]) - len(good)
            parts = [format(statistics.median(good), form)] if good else []
            parts += [f"failed{f' {bad} times' if good else ''}"] if bad else []
            return ", ".join(parts)

        seconds = {side: {row["round"]: row["seconds"] for row in sides[side] if not row["error"]} for side in sides}
        ratios = [seconds["theirs"][r] / ours for r, ours in seconds["ours"].items() if r in seconds["theirs"]]
        ratio = "failed"
        if ratios:
            ratio = f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f})"
        names = [sides[side][0]["contestant"] if sides[side] else "" for side in sides]
        cells = [workload, str(both[0]["agents"]), *names, cell("ours", "seconds", ".3f")]
        cells += [cell("theirs", "seconds", ".3f"), ratio]
        cells += [cell(side, key, ".0f") for key in ("tokens_per_second", "peak_mib") for side in sides]
        lines.append("| " + " | ".join(cells) + " |")
    failures = [f"{row['contestant']}, workload {row['workload']}, round {row['round']}" for row in rows]
    lines += [f"\nfailed: {what}: {row['error']}" for what, row in zip(failures, rows) if row["error"]]
    return "\n".join(lines)


def gpu():
    """The GPU's name, or ""; nvidia-smi is not everywhere, and does not know CUDA_VISIBLE_DEVICES."""
    query = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
    return subprocess.run(query, capture_output=True, text=True).stdout.strip()


def about(args, measured, theirs):
    """Commit, versions and machine; the first line of the table of rows."""
    device = f"{machine()}, {gpu()}" if args.device == "cuda" else machine()
    named = ", ".join(f"{package} {number}" for package, number in theirs.items()) or "unknown"
    return f"commit {measured}; ours: {versions()}; theirs: {named}; {device}; {date.today()}; {args}"


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    for what, known in (("workloads", WORKLOADS), ("comparisons", COMPARISONS)):
        if unknown := [name for name in getattr(args, what) if name not in known]:
            sys.exit(f"peers.py: error: --{what} {' '.join(unknown)}: use some of {', '.join(known)}.")
    if args.device == "cuda" and not gpu():
        sys.exit("peers.py: error: --device cuda: torch finds no GPU here; leave it out.")
    python = install(args)
    measured = commit()  # before the runs, which take long
    work = os.path.join(ROOT, "runs", f"peers-{datetime.now():%Y%m%d-%H%M%S}")
    output = args.output or os.path.join(work if args.shrink else os.path.join(ROOT, "results"), "peers.csv")
    workloads = {name: shrunk(WORKLOADS[name]) if args.shrink else WORKLOADS[name] for name in args.workloads}
    jobs = {name: prepare(args, name, workload, os.path.join(work, name)) for name, workload in workloads.items()}
    rows, theirs = [], {}  # theirs: versions
    for round in range(args.rounds):
        for name, job in jobs.items():
            for comparison in args.comparisons:
                script, more, peer, num_agents = COMPARISONS[comparison]
                sampling = job | {"seed": args.seed + round}
                for side in ("ours", "theirs") if round % 2 == 0 else ("theirs", "ours"):
                    folder = os.path.join(work, name, f"{comparison}-{side}-{round}")
                    os.makedirs(folder)
                    if side == "ours":
                        result = run_ours(args, sampling, script, more, num_agents, folder)
                        # delete a finished run's logs; failed runs stay for inspection
                        for path in [] if "error" in result else glob.glob(os.path.join(folder, "*", "")):
                            shutil.rmtree(path)
                    else:
                        result = run_theirs(args, python, sampling, peer, num_agents, folder)
                        theirs |= result.get("versions", {})
                    contestant = f"{script}.py" if side == "ours" else peer
                    rows.append(row_of(sampling, round, comparison, side, contestant, num_agents, result))
                    what = rows[-1]["error"] or f"{rows[-1]['seconds']:.3f} s, {rows[-1]['peak_mib']:.0f} MiB"
                    print(f"round {round}, {name}, {contestant}, {num_agents} agent(s): {what}", flush=True)
        os.makedirs(os.path.dirname(os.path.abspath(output)), exist_ok=True)
        with open(output, "w", newline="") as file:  # after every round, so that an interruption loses only one
            file.write(f"# {about(args, measured, theirs)}\n")
            writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    for job in jobs.values():
        shutil.rmtree(job["model"])
    print(f"\n{about(args, measured, theirs)}\n\n{table(rows)}\n\nrows in {output}, logs in {work}")
    if not args.shrink and theirs.get("torch", version("torch")) != version("torch"):
        print(f"torch differs: ours {version('torch')}, theirs {theirs['torch']}; --pip-args can choose its build")
