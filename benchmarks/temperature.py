"""Asks what a lower temperature buys: agents trained at temperature 1 and at 0.6, each judged at both.

    python benchmarks/temperature.py --seeds 3

A row of results/temperature.csv is the mean return of 4 answers to each of 64 held-out tasks after training, by
magrpo.py's evaluation: the script, at which temperature it was trained (sampling and loss), on how many sampled
tokens, the seed, at which temperature the agents were judged, and with what entropies, in nats a token. What is in
--folder is not trained again.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from glob import glob
from itertools import product

import pandas as pd
import tyro
from stamp import ROOT, stamp, write_rows

SCRIPTS = ["magrpo", "marloo", "maremax", "mareinforce", "ippo", "mappo", "madpo"]
TEMPERATURES = ["1.0", "0.6"]


@dataclass
class Args:
    env: str = "tldr"
    seeds: int = 3  # 1, 2, ...
    num_iterations: int = 30
    folder: str = "runs/temperature"  # of what is trained


def run(script, folder, *flags):
    command = [sys.executable, f"{ROOT}/{script}.py", "--output-dir", folder, *flags]
    subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)


def judge(args, agents, folder, seed, temperature):
    """Return and entropies of agents at a temperature."""
    pattern = f"{folder}/*/metrics.jsonl"
    if not glob(pattern):
        flags = ["--env", args.env, "--seed", str(seed), "--num-iterations", "0", "--model", *agents]
        run("magrpo", folder, *flags, "--temperature", temperature, "--eval-generations", "4")
    metrics = pd.read_json(*glob(pattern), lines=True).iloc[0]
    return {name: metrics[f"eval/{name}"] for name in ("return", "agent_0/entropy", "agent_1/entropy")}


def rows_of(args, script, trained_at, seed):
    """Trains, unless the agents are there, and yields a row for each temperature that they are judged at."""
    folder = f"{args.folder}/{args.env}_{args.num_iterations}_{script}_{trained_at}_{seed}"
    if not os.path.exists(folder):
        flags = ["--env", args.env, "--seed", str(seed), "--temperature", trained_at]
        numbers = ["--num-iterations", str(args.num_iterations), "--eval-every", str(args.num_iterations)]
        unfinished = f"{folder}_unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        run(script, unfinished, *flags, *numbers)
        os.rename(unfinished, folder)
    agents = sorted(glob(f"{folder}/*/agent_*"))
    tokens = pd.read_json(*glob(f"{folder}/*/metrics.jsonl"), lines=True)["tokens"].sum()
    for temperature in TEMPERATURES:
        row = {
            "script": script,
            "trained_at": trained_at,
            "tokens": int(tokens),
            "seed": seed,
            "judged_at": temperature,
        }
        yield row | judge(args, agents, f"{folder}_judged_{temperature}", seed, temperature)


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    about = stamp(args)
    rows = []
    for seed, script, temperature in product(range(1, args.seeds + 1), SCRIPTS, TEMPERATURES):
        rows += rows_of(args, script, temperature, seed)
        write_rows(f"{ROOT}/results/temperature.csv", about, rows)
