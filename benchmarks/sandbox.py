"""How long it takes to score answers: one, 100, 64 on one core and on all, and 64 with endless loops among them.

    python benchmarks/sandbox.py                              sample functions
    python benchmarks/sandbox.py --dataset humaneval.jsonl    the reference solutions of HumanEval

Medians over rounds of step() of the environment humaneval with one agent, whose answers are correct solutions.
"""

import json
import os
import statistics
import sys
import time
from dataclasses import dataclass

import tyro
from stamp import ROOT, Count, stamp

sys.path.insert(0, ROOT)

from envs.coding import Coding
from rewards import sandbox


@dataclass
class Args:
    dataset: str = "sample"  # or a .jsonl file of HumanEval's columns
    rounds: Count = 5
    timeout: float = 2.0  # seconds per answer, in batches with endless loops


def branches_of(env, count):
    """`count` tasks with their solutions; starts over if there are fewer tasks."""
    tasks = [task for split in env.splits for task in env.tasks(split)]
    if env.dataset == "sample":
        solutions = [f"{task['helper']}\n\n{task['main']}" for task in tasks]
    else:
        with open(env.dataset) as file:
            rows = {row["task_id"]: row["prompt"] + row["canonical_solution"] for row in map(json.loads, file)}
        solutions = [rows[task["task_id"]] for task in tasks]
    return [(tasks[i % len(tasks)], [], [solutions[i % len(tasks)]]) for i in range(count)]


def seconds(args, env, branches):
    env.step(branches[-8:])  # starts the interpreters
    spent = []
    for _ in range(args.rounds):
        began = time.perf_counter()
        env.step(branches)
        spent.append(time.perf_counter() - began)
    return statistics.median(spent)


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    cores = sorted(os.sched_getaffinity(0))
    print(stamp(args))
    env = Coding("humaneval", num_agents=1, dataset=args.dataset)
    branches = branches_of(env, 100)
    if failed := [step for step in env.step(branches) if not step.done]:
        sys.exit(f"sandbox.py: error: {len(failed)} of the solutions fail; --dataset must hold correct ones.")
    print("\n| what | seconds |\n|---|---|")
    print(f"| one answer | {statistics.median(seconds(args, env, [branch]) for branch in branches[:20]):.4f} |")
    print(f"| 100 answers | {seconds(args, env, branches):.2f} |")
    for some in [cores[:1], cores][: len(cores)]:
        sandbox.close()  # new interpreters inherit the new set of cores
        os.sched_setaffinity(0, some)
        print(f"| 64 answers, {len(some)} core(s) | {seconds(args, env, branches[:64]):.2f} |")
    env.timeout = args.timeout
    for loops in sorted({2, 2 * len(cores), 6 * len(cores)}):
        loop = "def {}(*_):\n    while True: pass\n    return 0"
        endless = [(task, [], [loop.format(task["entry_point"])]) for task, _, _ in branches]
        mixed = seconds(args, env, endless[:loops] + branches[loops:64])
        print(f"| 64 answers, {loops} of them endless loops of {args.timeout:.0f} s | {mixed:.2f} |")
