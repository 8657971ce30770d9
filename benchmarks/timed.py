"""What the processes that are measured have in common: their job, a clock, and an environment for --env timed:Timed.

workloads.py writes the job, a JSON file whose path is in BENCH_JOB, and reads the result, which is next to it.
"""

import json
import os
import re
import time
import zlib
from pathlib import Path

import torch

import envs


def read_job():
    with open(os.environ["BENCH_JOB"]) as file:
        return json.load(file)


def read_clock():
    """Seconds: on a GPU those after its queued work, on a CPU those of this process, whatever else runs there."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def read_peak_mib():
    """Peak memory of the tensors on a GPU, or else of this process in main memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    # of Linux; ru_maxrss would begin at the peak of the process that started this one
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s*(\d+)", status)[1]) / 1024  # from KiB


def write_result(**result):
    """Only the process itself can tell its peak on a GPU."""
    with open(f"{read_job()['folder']}/result.json", "w") as file:
        json.dump(result | {"peak_mib": [read_peak_mib()]}, file)


def score(actions):
    """A number that differs between texts and costs nothing."""
    return zlib.crc32(repr(actions).encode()) * 1e-9


class Prompts:
    """Random prompts, the same for all agents. The last one evaluates."""

    def __init__(self, job, num_agents):
        self.num_agents = num_agents
        self.all_tasks = [{"prompt": prompt} for prompt in job["prompts"]]

    def tasks(self, split):
        return self.all_tasks[:-1] if split == "train" else self.all_tasks[-1:]

    def observe(self, task, history):
        return [task["prompt"]] * self.num_agents

    def step(self, branches):
        return [envs.Step(score(actions), {}, done=False) for _, _, actions in branches]


class Timed:
    """The random prompts, or an environment that the job names; notes the times of each iteration.

    marks: a list for each iteration, of which the first is the evaluation before training: when the script asks for
    its first prompt, and when each turn is scored.
    """

    def __init__(self, num_agents, num_turns, dataset, seed):
        self.job = read_job()
        self.marks = []
        self.env = Prompts(self.job, num_agents)
        if self.job["env"]:
            self.env = envs.make(num_agents=num_agents, seed=seed, **self.job["env"])
        self.num_turns = getattr(self.env, "num_turns", num_turns)
        self.tasks = self.env.tasks

    def observe(self, task, history):
        if not history and (not self.marks or len(self.marks[-1]) > 1):
            self.marks.append([read_clock()])
            # all that is measured has been logged by now; what would follow is a checkpoint, 55 GB for large agents
            if len(self.marks) == self.job["updates"] + 3:
                write_result(marks=self.marks)
                os._exit(0)
        return self.env.observe(task, history)

    def step(self, branches):
        steps = self.env.step(branches)
        self.marks[-1].append(read_clock())
        return steps
