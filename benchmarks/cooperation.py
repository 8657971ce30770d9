"""Asks whether saved agents use what they tell each other: held-out tasks with messages kept, removed and exchanged.

    python benchmarks/cooperation.py --agents runs/RUN runs/MODEL --env reference --num-agents 3

For environments of two turns, where the texts of the first are messages and the last agent's text of the second is
the answer: reference, and gsm8k with roles split. A row of results/<name>.csv is one answer: the agents, the task,
what happened to the messages (kept; removed: all are empty; exchanged: those written for the next task), what was
read, the answer and its reward. Tasks, written messages and seeds are the same for all three.
"""

import os
import sys
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
import tyro
from stamp import ROOT, stamp, write_rows

sys.path.insert(0, ROOT)

import magrpo


@dataclass
class Args(magrpo.Args):  # those of environment, sampling and eval_tasks are used
    agents: list[str] = field(kw_only=True)  # run folders with agent_0, agent_1 ..., or models: all agents are copies
    name: str = "cooperation"  # of the file in results/


class SecondTurn:
    """An environment from its second turn on. A task is a pair: the task, and the Step of its first turn."""

    def __init__(self, env):
        self.env = env

    def observe(self, pair, history):
        task, first = pair
        return self.env.observe(task, [first])

    def step(self, branches):
        return self.env.step([(task, [first], actions) for (task, first), _, actions in branches])


def play(args, policies, env, tasks):
    """The Step of each task, in one turn."""
    torch.manual_seed(args.seed)
    (nodes,) = magrpo.rollout(args, env, policies, tasks, [1], "align", args.temperature)
    return [node.steps[0] for node in nodes]


def evaluate(args, source, env, tasks):
    """Rows of one team: the agents of a run folder, or copies of one model."""
    saved = [os.path.join(source, f"agent_{i}") for i in range(args.num_agents)]
    folders = saved if os.path.isdir(saved[0]) else [source] * args.num_agents
    policies = [magrpo.load_policy(args, folder, torch.device("cpu"), {}) for folder in folders]
    written = play(args, policies, env, tasks)
    variants = {
        "kept": written,
        "removed": [step._replace(actions=[""] * args.num_agents) for step in written],
        "exchanged": written[1:] + written[:1],
    }
    rows = []
    for messages, read in variants.items():
        pairs = [(number, (task, first)) for (number, task), first in zip(tasks, read)]
        answers = play(args, policies, SecondTurn(env), pairs)
        for (number, (_, first)), last in zip(pairs, answers):
            row = {"agents": os.path.basename(source), "seed": args.seed, "messages": messages, "task_number": number}
            row["read"] = " | ".join(first.actions[:-1])
            rows.append(row | {"answer": last.actions[-1], "reward": last.reward})
    return rows


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    args.max_new_tokens = args.max_new_tokens or 96
    args.learning_rate = 0.0  # nothing is trained
    about = stamp(args)
    env, _, held_out = magrpo.load_environment(args)
    chosen = np.random.default_rng(0).permutation(len(held_out))[: args.eval_tasks]
    tasks = [held_out[k] for k in chosen]
    rows = [row for source in args.agents for row in evaluate(args, source, env, tasks)]
    for team, group in groupby(rows, key=lambda row: (row["agents"], row["messages"])):
        rewards = [row["reward"] for row in group]
        print(*team, f"mean reward {np.mean(rewards):.3f} of {len(rewards)} answers")
    write_rows(os.path.join(ROOT, "results", f"{args.name}.csv"), about, rows)
