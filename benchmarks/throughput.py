"""Processor time and memory of an iteration: a script against nano.py, an earlier commit of it, or another library.

    python benchmarks/throughput.py                       magrpo.py against nano.py
    python benchmarks/throughput.py --baseline HEAD~1    against magrpo.py at that commit, dc29dbd or later
    python benchmarks/throughput.py --baseline comlrl     against comlrl's trainer, or trl's (see peers.py)

Every run is a process of its own, on one thread. Our scripts play timed.py's environment, which notes the processor
time when the script asks for prompts (sampling begins), when the last turn is scored (advantages, update and log
begin), and when it asks for the next prompts. The evaluation before training and the first iteration are not counted;
our runs end before they would save.

The two sides alternate, and what counts is their ratio within a round; a row is the median of a round's iterations.
Workloads are those of workloads.py. Where completions stop by themselves the sides sample other ones, so see how far
their tokens differ.
"""

import itertools
import math
import os
import tempfile
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

import pandas as pd
import tyro
from stamp import ROOT, checkout, make_stamp, write_rows
from workloads import PEERS, measure, prepare

MEASURES = ["sampling_s", "update_s", "iteration_s", "tokens", "peak_mib"]


@dataclass
class Args:
    script: str = "magrpo"
    baseline: str = "nano"  # what it is compared with: another script, a commit, comlrl, trl, or nothing ("")
    workloads: list[str] = field(default_factory=lambda: ["tldr", "split", "a", "b", "c"])
    rounds: int = 5
    updates: int = 6  # measured in each process, after one that warms up; at most 18
    seed: int = 1  # for models and prompts; sampling uses seed + round
    flags: str = ""  # further arguments of the script, not of its baseline: --flags="--batch-size 64"
    device: Literal["cpu", "cuda"] = "cpu"
    shrink: bool = False  # tiny sizes: measures nothing
    seconds: float | None = None  # ends a process after so many
    output: str = ""  # where to write the rows, as CSV


def commands_of(args, work):
    """The commands of the two sides, by the names of their columns."""
    commands = {"baseline": [], "present": [f"{ROOT}/{args.script}.py", *args.flags.split()]}
    if args.baseline in PEERS:
        commands["baseline"] = [f"{ROOT}/benchmarks/peers.py", args.baseline]
    elif os.path.exists(f"{ROOT}/{args.baseline}.py"):
        commands["baseline"] = [f"{ROOT}/{args.baseline}.py"]
    elif args.baseline:
        commands["baseline"] = [f"{checkout(args.baseline, work)}/{args.script}.py"]
    return commands


def compare(args, job, commands, folder):
    """A row for each measure; the two sides alternate. nan where a process failed."""
    results = {"baseline": {}, "present": {}}
    for side in sorted(commands, reverse=job["seed"] % 2):
        if commands[side]:
            results[side] = measure(job, commands[side], f"{folder}/{side}", args.seconds)
    rows = []
    for key in MEASURES:
        old, new = [median(result.get(key, [math.nan])) for result in results.values()]
        row = {"workload": job["workload"], "seed": job["seed"], "measure": key}
        rows.append(row | {"baseline": old, "present": new, "ratio": old / new})
    return rows


def main(args):
    about = make_stamp(args)  # before the runs, which take long: the code may change meanwhile
    rows = []
    with tempfile.TemporaryDirectory() as work:
        commands = commands_of(args, work)
        jobs = [prepare(name, f"{work}/{name}", args) for name in args.workloads]
        for round, job in itertools.product(range(args.rounds), jobs):
            job["seed"] = args.seed + round
            rows += compare(args, job, commands, f"{work}/{round}/{job['workload']}")
            print(pd.DataFrame(rows[-len(MEASURES) :]).to_string(header=False, index=False), flush=True)
            if args.output:
                write_rows(args.output, about, rows)
    print(f"{about}\n\nMedian, lowest and highest round:\n")
    frame = pd.DataFrame(rows).groupby(["workload", "measure"], sort=False)
    print(frame[["baseline", "present", "ratio"]].agg(["median", "min", "max"]).to_string())


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
