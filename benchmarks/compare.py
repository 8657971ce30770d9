"""Trains algorithm scripts from several seeds, and writes results/*.csv. With --num-iterations 0 it only evaluates.

    python benchmarks/compare.py --seeds 5 --jobs 2
    python benchmarks/plot.py results/tldr.csv

A row of results/<env>.csv is one evaluation of a run: env with its flags, script, seed, iteration, tokens (sampled by
all agents so far), seconds (of training so far), and the evaluation's metrics. The file's first line, after a #, has
commit, versions and arguments. All scripts run with one thread, their defaults, and equal numbers of tasks,
generations and iterations.
"""

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from glob import glob
from itertools import chain, product

import pandas as pd
import tyro
from stamp import ROOT, make_stamp, run_script, write_rows

SCRIPTS = ("magrpo", "marloo", "maremax", "mareinforce", "ippo", "mappo", "madpo")


@dataclass
class Args:
    scripts: tuple[str, ...] = SCRIPTS
    env: tuple[str, ...] = ("tldr",)  # each is trained on, with flags of its own: "gsm8k --num-turns 2"
    seeds: int = 5  # how many
    first_seed: int = 1
    jobs: int = 2  # runs at a time
    num_iterations: int = 120
    eval_every: int = 10
    flags: str = ""  # further arguments of every script, as one string: --flags="--num-turns 2"
    name: str = ""  # of the file in results/; by default the first environment
    keep: str = ""  # a folder for the run folders, else deleted; runs in it go on, also with other --flags


def train(args, folder, seed, env, script):
    """Rows of one run; none if it fails, so that hours of other runs are not lost."""
    folder = os.path.join(folder, env.replace(" ", "_"))
    words = [f"{ROOT}/{script}.py", "--env", *env.split(), "--seed", seed, "--output-dir", folder]
    words += ["--num-iterations", args.num_iterations, "--eval-every", args.eval_every, *args.flags.split()]
    runs = f"{folder}/{env.split()[0].replace(':', '.')}__{script}__{seed}__*"
    if checkpoints := glob(f"{runs}/state.pt"):
        words += ["--resume", os.path.dirname(max(checkpoints))]
    if run_script(*words):
        return []
    logs = glob(f"{runs}/metrics.jsonl")
    rows = read_evaluations(os.path.dirname(max(logs)))  # the last one by its time
    print(f"{env} {script} seed {seed}: {rows[0]['return']:.3f} -> {rows[-1]['return']:.3f}", flush=True)
    return [{"env": env, "script": script, "seed": seed} | row for row in rows]


def read_evaluations(run_dir):
    """A row for each evaluation of a run."""
    lines = pd.read_json(f"{run_dir}/metrics.jsonl", lines=True)
    # nano.py logs no times
    totals = lines.reindex(columns=["tokens", "time/iteration"]).fillna(0).cumsum()
    rows = lines[["iteration"]].assign(tokens=totals["tokens"].astype(int))
    rows["seconds"] = totals["time/iteration"].round(1)
    metrics = lines.filter(regex="^eval/").rename(columns=lambda name: name.removeprefix("eval/"))
    return rows.join(metrics)[lines["eval/return"].notna()].to_dict("records")


def main(args):
    """Trains several runs at a time, and writes the rows of all."""
    about = make_stamp(args)  # before the runs, which take long: the code may change meanwhile
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    runs = list(product(seeds, args.env, args.scripts))
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(args.jobs) as threads:
        parts = list(threads.map(lambda run: train(args, args.keep or temporary, *run), runs))
    name = args.name or args.env[0].split()[0]
    path = os.path.join(ROOT, "results", f"{name}.csv")
    if any(parts):
        write_rows(path, about, chain(*parts))
        print(path)
    if failures := parts.count([]):
        sys.exit(f"error: {failures} of {len(runs)} runs failed, as printed above; the file lacks them.")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
