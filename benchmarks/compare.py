"""Trains every algorithm script on the sample posts from several seeds, and writes results/*.csv.

    python benchmarks/compare.py --seeds 5 --jobs 2
    python benchmarks/plot.py

Each run is a process of its own with one thread. A row of results/<env>.csv is one evaluation of a run: script, seed,
iteration, tokens (sampled by all agents so far), seconds (of training so far), update_seconds (of these, in updates),
train_zero_variance_groups (mean since the previous row), and the evaluation's metrics. The file's first line, after a
#, has commit, versions and arguments. All scripts run with their defaults and equal numbers of tasks, generations and
iterations; since completion lengths change, plot.py compares runs at equal numbers of tokens.
"""

import csv
import glob
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import tyro
from stamp import ROOT, Count, Script, stamp


@dataclass
class Args:
    scripts: list[Script] = field(default_factory=lambda: ["magrpo", "marloo", "maremax", "mareinforce", "ippo"])
    env: str = "tldr"
    seeds: Count = 5  # 1, 2, ...
    jobs: Count = 2  # runs at a time
    num_iterations: Count = 120
    eval_every: Count = 10
    flags: str = ""  # further arguments of every script, as one string: --flags="--num-turns 2"
    name: str = ""  # of the file in results/; by default the environment


def train(args, script, seed):
    """Rows of one run; none if it fails, so that hours of other runs are not lost."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, os.path.join(ROOT, f"{script}.py"), "--env", args.env, "--seed", str(seed)]
        command += ["--num-iterations", str(args.num_iterations), "--eval-every", str(args.eval_every)]
        command += ["--output-dir", folder, "--save-every", str(args.num_iterations), *args.flags.split()]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        if done.returncode != 0:
            print(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}", file=sys.stderr, flush=True)
            return []
        (run_dir,) = glob.glob(os.path.join(folder, "*"))
        with open(os.path.join(run_dir, "metrics.jsonl")) as file:
            lines = [json.loads(line) for line in file]
    rows, tokens, seconds, updating, equal = [], 0, 0.0, 0.0, []
    for line in lines:
        if line["iteration"]:
            tokens += line["tokens"]
            seconds += sum(value for key, value in line.items() if key.startswith("time/"))
            updating += line["time/update"]
            equal.append(line["train/zero_variance_groups"])
        if "eval/return" in line:
            scores = {key.removeprefix("eval/"): value for key, value in line.items() if key.startswith("eval/")}
            row = {"script": script, "seed": seed, "iteration": line["iteration"]}
            row |= {"tokens": tokens, "seconds": round(seconds, 1), "update_seconds": round(updating, 1)}
            row["train_zero_variance_groups"] = round(sum(equal) / len(equal), 3) if equal else None
            rows.append(row | scores)
            equal.clear()
    print(f"{script} seed {seed}: {rows[0]['return']:.3f} -> {rows[-1]['return']:.3f}, {seconds:.0f} s", flush=True)
    return rows


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    about = stamp(args)  # before the runs, which take long: the code may change meanwhile
    runs = [(script, seed) for seed in range(1, args.seeds + 1) for script in args.scripts]
    with ThreadPoolExecutor(args.jobs) as threads:
        parts = list(threads.map(lambda run: train(args, *run), runs))
    rows = [row for part in parts for row in part]
    if not rows:
        sys.exit("compare.py: error: all runs failed, as printed above; nothing is written.")
    os.makedirs(os.path.join(ROOT, "results"), exist_ok=True)
    path = os.path.join(ROOT, "results", f"{args.name or args.env}.csv")
    with open(path, "w", newline="") as file:
        file.write(f"# {about}\n")
        names = dict.fromkeys(name for row in rows for name in row)
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    print(path)
    if failed := parts.count([]):
        sys.exit(f"compare.py: error: {failed} of {len(runs)} runs failed, as printed above; the file lacks them.")
