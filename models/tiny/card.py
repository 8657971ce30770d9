"""What models/tiny can do before any reinforcement learning: the table in its card, README.md.

    python models/tiny/card.py

Each cell is a run of magrpo.py that only evaluates, with seed 1, on 48 test tasks with four joint answers each: the
mean return as a share of the largest that is possible, and the share of joint answers that pass, where there is one.
"""

import glob
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product

import tyro

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "benchmarks"))
from stamp import ROOT, make_stamp

# environment and its options -> (numbers of agents, largest return with one agent, with several)
RUNS = {
    "tldr": ((1, 2, 3), 2.98, 2.98),
    "tldr protocol sequential": ((2,), 2.98, 2.98),
    "tldr protocol discussion": ((2,), 2.98, 2.98),
    "arxiv": ((1, 2), 2.98, 2.98),
    "humaneval": ((1, 2, 3), 2.1, 4),
    "humaneval protocol sequential": ((2,), 2.1, 4),
    "humaneval protocol discussion": ((2,), 2.1, 4),
    "coophumaneval": ((1, 2, 3), 2.1, 4),
    "mbpp": ((1, 2, 3), 2.1, 4),
    "classeval": ((1, 2, 3), 6, 6),
    "classeval deal choose": ((2, 3), 6, 6),
    "gsm8k": ((1, 2, 3), 1, 1.2),
    "gsm8k roles split": ((2, 3), 1, 1),
    "debate": ((1, 2, 3), 1.3, 1.3),
    "debate form judge": ((3,), 1, 1),
    "tools": ((1, 2, 3), 1, 1),
    "bfcl": ((1, 2, 3), 1, 1),
    "bugfix": ((1, 2, 3), 2, 2),
    "reference": ((2, 3), 1, 1),
}


@dataclass
class Args:
    rows: list[str] = field(default_factory=lambda: list(RUNS))
    eval_tasks: int = 48
    eval_generations: int = 4  # joint answers per task
    jobs: int = 2  # runs at a time


def cell(args, row, num_agents):
    """The text of a cell."""
    numbers, alone, several = RUNS[row]
    if num_agents not in numbers:
        return ""
    env, *options = row.split()
    with tempfile.TemporaryDirectory() as folder:
        command = ["magrpo.py", "--env", env, "--num-agents", num_agents, "--num-iterations", 0]
        command += ["--eval-tasks", args.eval_tasks, "--eval-generations", args.eval_generations]
        command += ["--env-kwargs", *options] if options else []
        # for introductions, which do not end within the default
        command += ["--max-new-tokens", 512] if env == "arxiv" else []
        command = [sys.executable, *map(str, command), "--output-dir", folder]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        (path,) = glob.glob(os.path.join(folder, "*", "metrics.jsonl"))
        with open(path) as file:
            metrics = json.loads(file.readline())
    share = f"{metrics['eval/return'] / (alone if num_agents == 1 else several):.2f}"
    return f"{share} ({metrics['eval/all_passed']:.2f})" if "eval/all_passed" in metrics else share


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    print(f"{make_stamp(args)}\n\n| | 1 agent | 2 agents | 3 agents |\n|---|---|---|---|", flush=True)
    with ThreadPoolExecutor(args.jobs) as threads:
        cells = threads.map(lambda place: cell(args, *place), product(args.rows, (1, 2, 3)))
        for row in args.rows:
            print(f"| {row} | {next(cells)} | {next(cells)} | {next(cells)} |", flush=True)
