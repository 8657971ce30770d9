"""What models/tiny can do before RL training: the table in its model card.

    python benchmarks/card.py

Each cell is a run of magrpo.py that only evaluates, with seed 1, on 48 test tasks with four joint answers each.
humaneval has two turns; classeval has one, since with two, the first reward would also pay for the turn it saves.
"""

import glob
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field

import tyro
from stamp import ROOT, stamp


@dataclass
class Args:
    envs: list[str] = field(default_factory=lambda: list(RUNS))  # rows
    most_agents: int = 3  # columns
    eval_tasks: int = 48
    eval_generations: int = 4  # joint answers per task


# environment: (maximum of agents, further arguments, {row label: evaluation metric})
RUNS = {
    "tldr": (3, ["--max-new-tokens", "128"], {"tldr: mean reward, of 2.98": "return"}),
    "arxiv": (2, [], {"arxiv: mean reward, of 2.98": "return"}),
    "humaneval": (
        3,
        ["--num-turns", "2"],
        {
            "humaneval: first answers that pass every test": "all_passed_turn1",
            "humaneval: second answers, after a failed first, that pass": "all_passed_turn2",
            "humaneval: what the second turn adds to the reward, of 4 (one agent: 2.1)": "gain_turn2",
        },
    ),
    "classeval": (
        2,
        [],
        {"classeval: answers that pass every test": "all_passed", "classeval: mean reward, of 6": "return"},
    ),
}


def evaluation(args, env, num_agents, flags):
    """The metrics of one run's evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["magrpo.py", "--env", env, "--num-agents", num_agents, "--num-iterations", 0, *flags]
        command += ["--eval-tasks", args.eval_tasks, "--eval-generations", args.eval_generations]
        command = [sys.executable, *map(str, command), "--output-dir", folder]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        (path,) = glob.glob(os.path.join(folder, "*", "metrics.jsonl"))
        with open(path) as file:
            return json.loads(file.readline())


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    columns = range(1, args.most_agents + 1)
    print(f"{stamp(args)}\n\n| agents | {' | '.join(map(str, columns))} |\n|---|{'---|' * len(columns)}")
    for env in args.envs:
        most, flags, rows = RUNS[env]
        metrics = {n: evaluation(args, env, n, flags) for n in columns if n <= most}
        for label, metric in rows.items():
            cells = [f"{metrics[n].get(f'eval/{metric}', math.nan):.2f}" if n in metrics else "" for n in columns]
            print(f"| {label} | {' | '.join(cells)} |", flush=True)
