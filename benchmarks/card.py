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
from typing import Literal

import tyro
from stamp import ROOT, Count, stamp


@dataclass
class Args:
    eval_tasks: Count = 48
    eval_generations: Count = 4  # joint answers per task
    most_agents: Count = 3  # columns
    envs: list[Literal["tldr", "arxiv", "humaneval", "classeval"]] = field(
        default_factory=lambda: ["tldr", "arxiv", "humaneval", "classeval"]
    )  # rows


# (environment, maximum of agents, further arguments, [(row label, evaluation metric), ...])
RUNS = [
    ("tldr", 3, ["--max-new-tokens", "128"], [("tldr: mean reward, of 2.98", "return")]),
    ("arxiv", 2, [], [("arxiv: mean reward, of 2.98", "return")]),
    (
        "humaneval",
        3,
        ["--num-turns", "2"],
        [
            ("humaneval: first answers that pass every test", "all_passed_turn1"),
            ("humaneval: second answers, after a failed first, that pass", "all_passed_turn2"),
            ("humaneval: what the second turn adds to the first one's reward, of 4 (one agent: 2.1)", "gain_turn2"),
        ],
    ),
    (
        "classeval",
        2,
        [],
        [
            ("classeval: answers that pass every test", "all_passed"),
            ("classeval: mean reward, of 6", "return"),
        ],
    ),
]


def evaluation(args, env, num_agents, flags):
    """The metrics of one run's evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, os.path.join(ROOT, "magrpo.py"), "--env", env, "--num-agents", str(num_agents)]
        command += ["--num-iterations", "0", "--eval-tasks", str(args.eval_tasks), "--output-dir", folder, *flags]
        command += ["--eval-generations", str(args.eval_generations)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"card.py: error: {' '.join(command)} failed:\n{done.stderr[-2000:]}")
        (path,) = glob.glob(os.path.join(folder, "*", "metrics.jsonl"))
        with open(path) as file:
            return json.loads(file.readline())


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    print(stamp(args))
    columns = range(1, args.most_agents + 1)
    print(f"\n| | {' | '.join(f'{n} agent' + 's' * (n > 1) for n in columns)} |\n|---|{'---|' * len(columns)}")
    for env, most, flags, rows in (run for run in RUNS if run[0] in args.envs):
        metrics = {n: evaluation(args, env, n, flags) for n in columns if n <= most}
        for what, metric in rows:
            cells = [f"{metrics[n].get(f'eval/{metric}', math.nan):.2f}" if n in metrics else "" for n in columns]
            print(f"| {what} | {' | '.join(cells)} |", flush=True)
