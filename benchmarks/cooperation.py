"""Asks whether saved agents use what they tell each other: held-out tasks with messages kept, removed and exchanged.

    python benchmarks/cooperation.py --agents runs/RUN runs/MODEL --env reference --flags="--num-agents 3"

For environments of two turns, where the texts of the first are messages and the last agent's text of the second is
the answer: reference, and gsm8k with roles split. A row of results/<name>.csv is one answer: the agents, the task,
what happened to the messages (kept; removed: all are empty; exchanged: those written for the next task), what the
last agent read, the answer and its reward. Tasks, written messages and seeds are the same for all three.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from glob import glob

import pandas as pd
import tyro
from stamp import ROOT, stamp, write_rows

import envs


@dataclass
class Args:
    agents: list[str] = field(kw_only=True)  # run folders with agent_0, agent_1 ..., or models: all agents are copies
    env: str = "reference"
    env_kwargs: str = ""  # such as: roles split
    seed: int = 1
    flags: str = ""  # further arguments of magrpo.py, as one string
    name: str = "cooperation"  # of the file in results/


class Changed:
    """An environment whose messages of the first turn are changed before anybody reads them."""

    def __init__(self, base, messages, **options):
        self.env = envs.make(base, **options)
        self.messages = messages
        self.num_turns = self.env.num_turns
        self.tasks = self.env.tasks
        self.observe = self.env.observe

    def step(self, branches):
        tasks, histories, texts = zip(*branches)
        if not histories[0]:
            silence = [[""] * len(texts[0])] * len(texts)
            texts = {"kept": texts, "removed": silence, "exchanged": texts[1:] + texts[:1]}[self.messages]
        return self.env.step(list(zip(tasks, histories, texts)))


def evaluate(args, source, messages):
    """Yields a row for each answer of a team: the agents of a run folder, or copies of one model."""
    models = sorted(glob(f"{os.path.abspath(source)}/agent_*")) or [os.path.abspath(source)]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, f"{ROOT}/magrpo.py", "--num-iterations", "0", "--output-dir", folder]
        command += ["--seed", str(args.seed)]
        command += ["--env", "cooperation:Changed", "--model", *models, *args.flags.split()]
        command += ["--env-kwargs", "base", args.env, "messages", messages, *args.env_kwargs.split()]
        paths = f"{ROOT}:{ROOT}/benchmarks"
        subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, check=True, stdout=subprocess.DEVNULL)
        (path,) = glob(f"{folder}/*/rollouts.jsonl")
        with open(path) as file:
            lines = [json.loads(line) for line in file]
    for line in lines:
        if line["turn"] == 2:
            row = {"agents": os.path.basename(source), "seed": args.seed, "messages": messages}
            last = line["agents"][-1]
            row |= {"task_number": line["task_number"], "read": last["prompt"]}
            yield row | {"answer": last["completions"][0], "reward": line["rewards"][0]}


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    about = stamp(args)
    rows = []
    for source in args.agents:
        for messages in ("kept", "removed", "exchanged"):
            rows += evaluate(args, source, messages)
    print(pd.DataFrame(rows).groupby(["agents", "messages"], sort=False)["reward"].agg(["mean", "size"]))
    write_rows(os.path.join(ROOT, "results", f"{args.name}.csv"), about, rows)
