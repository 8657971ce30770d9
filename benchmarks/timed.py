"""What the processes that are measured have in common: their job, a clock, and an environment for --env timed:Timed.

workloads.py writes the job, a JSON file whose path is in BENCH_JOB, and reads the result, which is next to it.

    python benchmarks/timed.py magrpo    (with a job: times the decoding steps of a script)
"""

import json
import os
import resource
import sys
import time
import zlib
from importlib import import_module
from statistics import median

import torch

import envs


def read_job():
    with open(os.environ["BENCH_JOB"]) as file:
        return json.load(file)


def clock():
    """Seconds: on a GPU those after its queued work, on a CPU those of this process, whatever else runs there."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def peak_mib():
    """Peak memory of the tensors on a GPU, or else of this process in main memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    unit = 2**20 if sys.platform == "darwin" else 2**10  # of ru_maxrss: bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def write_result(**result):
    """Only the process itself can tell its peak on a GPU."""
    path = os.path.join(os.path.dirname(os.environ["BENCH_JOB"]), "result.json")
    with open(path, "w") as file:
        json.dump(result | {"peak_mib": [peak_mib()]}, file)


def score(actions):
    """A number in [0, 1) that differs between texts and costs nothing; the same for every contestant."""
    return zlib.crc32("\n".join(actions).encode()) / 2**32


class Prompts:
    """Random prompts, the same for all agents, and in every turn in another order of words. The last one evaluates."""

    def __init__(self, job, num_agents):
        self.num_agents = num_agents
        with open(job["prompts"]) as file:
            self.all_tasks = json.load(file)

    def tasks(self, split):
        return self.all_tasks[:-1] if split == "train" else self.all_tasks[-1:]

    def observe(self, task, history):
        words = task["words"]
        for step in history:
            start = int(step.reward * len(words))
            words = words[start:] + words[:start]
        return [" ".join(words)] * self.num_agents

    def step(self, branches):
        return [envs.Step(actions, score(actions), {}, done=False) for _, _, actions in branches]


class Timed:
    """The random prompts, or an environment that the job names; notes the times of each iteration.

    marks: a list for each iteration, of which the first is the evaluation before training: when the script asks for
    its first prompt, and of each turn when it calls step() and when that returns.
    """

    def __init__(self, num_agents, num_turns, dataset, seed):
        self.job = read_job()
        self.num_agents = num_agents
        self.num_turns = self.job["num_turns"]
        self.marks = []
        self.env = Prompts(self.job, num_agents)
        if self.job["env"]:
            self.env = envs.make(num_agents=num_agents, num_turns=num_turns, seed=seed, **self.job["env"])
        self.tasks = self.env.tasks

    def observe(self, task, history):
        if not history and (not self.marks or len(self.marks[-1]) > 1):
            self.marks.append([clock()])
            # all that is measured has been logged by now; what would follow is a checkpoint, 55 GB for large agents
            if len(self.marks) == self.job["updates"] + 3:
                write_result(marks=self.marks)
                os._exit(0)
        return self.env.observe(task, history)

    def step(self, branches):
        self.marks[-1].append(clock())
        steps = self.env.step(branches)
        self.marks[-1].append(clock())
        return steps


def time_decoding(name):
    """Milliseconds of a decoding step for each number of completions: the difference of two lengths."""
    job = read_job()
    script = import_module(name)
    # scripts up to commit 001bde1 give each policy a device
    devices = [] if hasattr(script, "DEVICE") else [torch.device("cuda" if torch.cuda.is_available() else "cpu")]
    policy = script.load_policy(script.Args(), job["model"], *devices, {})
    autocast = policy.autocast if devices else script.AUTOCAST
    short, long = job["lengths"]
    milliseconds = {}
    for rows in job["rows"]:
        prompts = [list(range(3 + k, 3 + k + job["prompt_tokens"])) for k in range(rows // 8)]
        seconds = {short: [], long: []}
        # the first time warms up
        for length in [short, long] * 4:
            began = clock()
            with autocast:
                script.sample(policy, prompts, 8, 1.0, length)
            seconds[length].append(clock() - began)
        difference = median(seconds[long][1:]) - median(seconds[short][1:])
        milliseconds[rows] = 1000 * difference / (long - short)
    write_result(milliseconds=milliseconds)


if __name__ == "__main__":
    time_decoding(sys.argv[1])
