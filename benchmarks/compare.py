"""Trains algorithm scripts on the sample posts from several seeds, and writes results/*.csv.

    python benchmarks/compare.py --seeds 5 --jobs 2
    python benchmarks/plot.py results/tldr.csv

A row of results/<env>.csv is one evaluation of a run: script, seed, iteration, tokens (sampled by all agents so far),
seconds (of training so far), update_seconds (its part that is spent in updates), train_zero_variance_groups and, of
critics, train_explained_variance (means since the previous row), the evaluation's metrics, and peak_mib_0 (main memory
of the process). The file's first line, after a #, has commit, versions and arguments. All scripts run with one thread,
their defaults, and equal numbers of tasks, generations and iterations.
"""

import glob
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import tyro
from stamp import ROOT, stamp, write_rows


@dataclass
class Args:
    scripts: list[str] = field(default_factory=lambda: ["magrpo", "marloo", "maremax", "mareinforce", "ippo"])
    env: str = "tldr"
    seeds: int = 5  # 1, 2, ...
    jobs: int = 2  # runs at a time
    num_iterations: int = 120
    eval_every: int = 10
    flags: str = ""  # further arguments of every script, as one string: --flags="--num-turns 2"
    name: str = ""  # of the file in results/; by default the environment
    keep: str = ""  # a folder for the run folders, which are deleted otherwise; a run that is there is continued
    minutes: float = 0.0  # after so many a run saves and ends; with --keep the same command continues it. 0: no limit


def train(args, folder, script, seed):
    """Rows of one run; none if it fails, so that hours of other runs are not lost."""
    command = [sys.executable, f"{ROOT}/{script}.py", "--env", args.env, "--seed", str(seed)]
    command += ["--num-iterations", str(args.num_iterations), "--eval-every", str(args.eval_every)]
    command += ["--output-dir", folder, *args.flags.split()]
    if script != "nano":  # which has no checkpoints
        command += ["--save-every", str(args.num_iterations)]
    name = f"{folder}/{args.env.replace(':', '.')}__{script}__{seed}__*"
    checkpoints = glob.glob(f"{name}/state.pt")
    if checkpoints:
        command += ["--resume", os.path.dirname(max(checkpoints))]
    if args.minutes:
        command = ["timeout", "--preserve-status", f"{args.minutes}m", *command]
    with tempfile.TemporaryFile("w+") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)  # only this tells the memory of one process
        if status != 0:
            log.seek(0)
            print(f"{' '.join(command)} failed:\n{log.read()[-2000:]}", file=sys.stderr, flush=True)
            return []
    rows = rows_of(max(glob.glob(name)), script, seed)  # the last one by its time
    first, last = rows[0], rows[-1]
    print(f"{script} seed {seed}: {first['return']:.3f} -> {last['return']:.3f}, {last['seconds']} s", flush=True)
    return [row | {"peak_mib_0": usage.ru_maxrss // 2**10} for row in rows]  # from KiB


def rows_of(run_dir, script, seed):
    """A row for each evaluation of a run."""
    with open(f"{run_dir}/metrics.jsonl") as file:
        lines = [json.loads(line) for line in file]
    rows = []
    tokens = 0
    seconds = 0.0
    update_seconds = 0.0
    recent = defaultdict(list)  # metric -> its values since the previous row
    for line in lines:
        if line["iteration"] > 0:
            tokens += line["tokens"]
            if "time/iteration" in line:  # not of nano.py
                seconds += line["time/iteration"]
                update_seconds += line["time/iteration"] - line["time/rollout"]
            for name, value in line.items():
                if name == "train/zero_variance_groups" or name.endswith("/explained_variance"):
                    recent[f"train_{name.split('/')[-1]}"].append(value)
        if "eval/return" in line:
            row = {"script": script, "seed": seed, "iteration": line["iteration"], "tokens": tokens}
            row |= {"seconds": round(seconds, 1), "update_seconds": round(update_seconds, 1)}
            for name in ("train_zero_variance_groups", "train_explained_variance"):
                values = recent.pop(name, [])
                row[name] = round(sum(values) / len(values), 3) if values else None
            row |= {name.removeprefix("eval/"): value for name, value in line.items() if name.startswith("eval/")}
            rows.append(row)
    return rows


def write_runs(args, about, function, runs):
    """Calls function(*run) for each run, several at a time, and writes the rows that they return."""
    with ThreadPoolExecutor(args.jobs) as threads:
        parts = list(threads.map(function, *zip(*runs)))
    rows = [row for part in parts for row in part]
    path = os.path.join(ROOT, "results", f"{args.name or args.env}.csv")
    if rows:
        write_rows(path, about, rows)
        print(path)
    failures = parts.count([])
    if failures:
        sys.exit(f"error: {failures} of {len(runs)} runs failed, as printed above; the file lacks them.")


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    about = stamp(args)  # before the runs, which take long: the code may change meanwhile
    runs = [(script, seed) for seed in range(1, args.seeds + 1) for script in args.scripts]
    with tempfile.TemporaryDirectory() as temporary:
        folder = os.path.abspath(args.keep or temporary)
        write_runs(args, about, lambda script, seed: train(args, folder, script, seed), runs)
