"""Processor time and memory of an iteration: a script against nano.py, an earlier commit of it, or another library.

    python benchmarks/throughput.py                       magrpo.py against nano.py
    python benchmarks/throughput.py --baseline 001bde1    against magrpo.py at that commit
    python benchmarks/throughput.py --baseline comlrl     against comlrl's trainer, or trl's (see peers.py)

Every run is a process of its own, on one thread. Our scripts play timed.py's environment, which notes the processor
time when the script asks for prompts (sampling begins), when it calls step() (scoring begins), when that returns
(after the last turn, advantages, update and log begin), and when it asks for the next prompts. The evaluation before
training and the first iteration are not counted; our runs end before they would save.

The two sides alternate, and what counts is their ratio within a round; a row is the median of a round's iterations.
Workloads are those of workloads.py. Where completions stop by themselves the sides sample other ones, so see how far
their tokens differ.
"""

import itertools
import math
import os
import sys
import tempfile
from dataclasses import dataclass, field
from statistics import median
from typing import ClassVar

import pandas as pd
import tyro
from stamp import ROOT, checkout, stamp, write_rows
from workloads import PEERS, Contestant, measure, prepare

MEASURES = ["sampling_s", "scoring_s", "update_s", "iteration_s", "tokens", "peak_mib"]


@dataclass
class Args:
    script: str = "magrpo"
    baseline: str = "nano"  # what it is compared with: another script, a commit, COMMIT:SCRIPT, comlrl or trl
    workloads: list[str] = field(default_factory=lambda: ["tldr", "split", "a", "b", "c"])
    rounds: int = 5
    updates: int = 6  # measured in each process, after one that warms up; at most 18
    seed: int = 1  # for models and prompts; sampling uses seed + round
    flags: str = ""  # further arguments of the script, not of its baseline: --flags="--batch-size 64"
    output: str = ""  # where to write the rows, as CSV
    # gpu.py sets them
    device: ClassVar[str] = "cpu"
    shrink: ClassVar[bool] = False


def sides_of(script, baseline, work, num_agents=2, flags=""):
    """The contestants, by the names of their columns."""
    num_agents = PEERS.get(baseline, num_agents)
    sides = {"present": Contestant(script, ROOT, num_agents, flags)}
    if baseline in PEERS or os.path.exists(f"{ROOT}/{baseline}.py"):
        sides["baseline"] = Contestant(baseline, ROOT, num_agents)
    elif baseline:
        commit, _, old_script = baseline.partition(":")
        sides["baseline"] = Contestant(old_script or script, checkout(commit, work), num_agents)
    return sides


def compare(job, sides, folder, timeout=None):
    """A row for each measure; the two sides alternate."""
    medians = {"baseline": {}, "present": {}}
    for side in sorted(sides, reverse=job["seed"] % 2):
        result = measure(job, sides[side], f"{folder}/{side}", timeout)
        if "error" in result:
            print(f"{job['workload']}, {side}: {result['error']}", file=sys.stderr)
        medians[side] = {key: median(result[key]) for key in MEASURES if key in result}
    rows = []
    for key in MEASURES:
        old, new = [medians[side].get(key, math.nan) for side in medians]
        row = {"workload": job["workload"], "seed": job["seed"], "measure": key}
        rows.append(row | {"baseline": old, "present": new, "ratio": old / new})
    return rows


def main(args):
    about = stamp(args)  # before the runs, which take long: the code may change meanwhile
    rows = []
    with tempfile.TemporaryDirectory() as work:
        sides = sides_of(args.script, args.baseline, work, flags=args.flags)
        jobs = [prepare(name, f"{work}/{name}", args) for name in args.workloads]
        for round, job in itertools.product(range(args.rounds), jobs):
            rows += compare(job | {"seed": args.seed + round}, sides, f"{work}/{round}/{job['workload']}")
            print(pd.DataFrame(rows[-len(MEASURES) :]).to_string(header=False, index=False), flush=True)
            if args.output:
                write_rows(args.output, about, rows)
    print(f"{about}\n\nMedians over rounds, and the ratio in the lowest and in the highest round.\n")
    frame = pd.DataFrame(rows).groupby(["workload", "measure"], sort=False)
    print(frame[["baseline", "present", "ratio"]].median().join(frame["ratio"].agg(["min", "max"])).to_string())


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
