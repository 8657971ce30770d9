"""How time and memory grow with agents, generations, tasks, turns, prompts, processes and data, and with LoRA.

    python benchmarks/scaling.py                          all parts
    python benchmarks/scaling.py --parts curves lora      some of them

curves: `sample` and the gradient of a script with models/tiny as in throughput.py, in one process per point.
    A later turn answers the turn before: its prompts are prompt plus completion, one per joint action (G of them).
    GFLOP/s counts the matrix products that have to be computed, including attention to visible tokens (formula in
    gpu.py): if a token takes longer only because it needs more products, the rate stays the same.
processes: tokens/s of one process and of two under torchrun, a thread each, alternating, with 8 and 32 tasks in all.
start: seconds from the command to the end of an evaluation of one task, with data files of different lengths.
lora: two agents, with full weights each and with adapters on one shared model; random weights.

Each process has one thread. Rows go to --output, results/scaling.csv; `plot.py --scaling FILE` draws its curves.
"""

import csv
import glob
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace

import tyro
from gpu import training_flops
from stamp import ROOT, Count, Script, stamp
from throughput import Args as Point
from throughput import ours_sample, ours_train, prepare, timed

CURVES = {
    "num_agents": (1, 2, 4, 8),
    "num_tasks": (2, 4, 8, 16, 32),
    "num_generations": (2, 4, 8, 16, 32, 64),
    "num_turns": (1, 2, 3),
    "prompt_tokens": (250, 500, 1000, 2000, 4000),
    "completion_tokens": (50, 100, 200, 400),
}
SMALLER = {  # so that the largest point of the curve takes seconds
    "num_turns": {"num_generations": 4, "num_tasks": 2, "prompt_tokens": 100, "completion_tokens": 50},
    # a batch large enough for a prompt with its generations, so that the prompt is computed once
    "prompt_tokens": {"num_tasks": 2, "completion_tokens": 50, "max_batch_tokens": 16384},
    "completion_tokens": {"num_tasks": 2},
}


@dataclass
class Args:
    parts: list[str] = field(default_factory=lambda: ["curves", "processes", "start", "lora"])
    script: Script = "magrpo"  # whose functions and runs are measured
    rounds: Count = 3  # for medians; lora makes one run each
    lora_hidden: Count = 512  # hidden size of the model in lora, of 8 layers
    output: str = os.path.join(ROOT, "results", "scaling.csv")  # rows of the requested parts


def measure(point, num_agents, num_turns, rounds):
    """Medians of one point: (sampling s, training s, tokens computed, GFLOP of products, peak resident MiB)."""
    script, first, prompts = prepare(point)
    agents = [first] + [prepare(point)[1] for _ in range(num_agents - 1)]
    sampling, training = [], []
    for _ in range(rounds + 1):  # the first warms up
        spent, tokens, flops = [0.0, 0.0], 0, 0.0
        for agent in agents:
            asked = prompts
            for _ in range(num_turns):
                drawn, seconds = timed(ours_sample, point, script, agent, asked)
                spent[0] += seconds
                spent[1] += timed(ours_train, point, script, agent, asked, drawn)[1]
                tokens += sum(map(len, asked)) + sum(len(ids) for group in drawn for ids, _ in group)
                groups = [[(prompt, ids, None) for ids, _ in group] for prompt, group in zip(asked, drawn)]
                needed = training_flops(agent.model, groups, False)  # per batch: within one, equal prompts count once
                # sampling adds a fourth pass to training's three: one forward, and a backward of twice its cost
                flops += 4 / 3 * (needed["trunk"] + needed["attention"] + needed["head"])
                asked = [prompt + ids for prompt, group in zip(asked, drawn) for ids, _ in group]
            agent.model.zero_grad()
        sampling.append(spent[0])
        training.append(spent[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return statistics.median(sampling[1:]), statistics.median(training[1:]), tokens, flops / 1e9, peak


def curves(args):
    print("\n| what | value | sampling, s | training, s | tokens | us a token | GFLOP/s | peak memory, MiB |")
    print("|---|---|---|---|---|---|---|---|")
    for name, values in CURVES.items():
        for value in values:
            sizes = SMALLER.get(name, {}) | {name: value}
            agents, turns = sizes.pop("num_agents", 1), sizes.pop("num_turns", 1)
            point = replace(Point(script=args.script), **sizes)
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                sampling, training, tokens, gflop, peak = pool.apply(measure, (point, agents, turns, args.rounds))
            seconds = sampling + training
            numbers = (
                f"{sampling:.2f} | {training:.2f} | {tokens} | {1e6 * seconds / tokens:.0f} | {gflop / seconds:.0f}"
            )
            print(f"| {name} | {value} | {numbers} | {peak:.0f} |", flush=True)
            yield {"part": "curves", "what": name, "value": value, "seconds": seconds} | {
                "sampling": sampling, "training": training, "tokens": tokens, "gflop": gflop, "peak_mib": peak
            }  # fmt: skip


def run(args, flags, processes=1):
    """Runs the script: (metrics per iteration, seconds, peak resident MiB of its largest process)."""
    with tempfile.TemporaryDirectory() as folder:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [sys.executable, *(torchrun if processes > 1 else []), os.path.join(ROOT, f"{args.script}.py")]
        command += ["--output-dir", folder, "--eval-every", "1000", "--save-every", "1000", *map(str, flags)]
        began = time.perf_counter()
        with open(os.path.join(folder, "log"), "w+") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log
            )
            _, status, usage = os.wait4(process.pid, 0)
            if status:
                log.seek(0)
                sys.exit(f"{' '.join(command)} failed:\n{log.read()[-2000:]}")
        (path,) = glob.glob(os.path.join(folder, "*", "metrics.jsonl"))
        with open(path) as file:
            lines = [json.loads(line) for line in file]
        return [line for line in lines if line["iteration"]], time.perf_counter() - began, usage.ru_maxrss / 1024


def processes(args):
    print("\n| tasks in all | round | tokens/s, one process | two processes | ratio |\n|---|---|---|---|---|")
    for tasks in (8, 32):
        flags = ("--env", "tldr", "--num-tasks", tasks, "--num-iterations", 8, "--eval-tasks", 2)
        for round in range(args.rounds):
            one, two = (
                statistics.median(line["tokens_per_second"] for line in run(args, flags, count)[0][2:])
                for count in (1, 2)
            )
            print(f"| {tasks} | {round + 1} | {one:.0f} | {two:.0f} | **{two / one:.2f}** |", flush=True)
            yield {"part": "processes", "what": "ratio", "value": tasks, "ratio": two / one}


def start(args):
    print("\n| tasks in the file | seconds to the end of an evaluation of one |\n|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for count in (100, 10_000):
            path = os.path.join(folder, f"{count}.jsonl")
            with open(path, "w") as file:
                for i in range(count):
                    text = f"SUBREDDIT: r/a\n\nTITLE: Post {i}\n\nPOST: {'My neighbor is loud. ' * 40}\n\nTL;DR:"
                    file.write(json.dumps({"prompt": text, "completion": f"My neighbor {i} is loud."}) + "\n")
            flags = ("--env", "tldr", "--dataset", path, "--num-iterations", 0, "--eval-tasks", 1)
            seconds = statistics.median(run(args, flags)[1] for _ in range(args.rounds))
            print(f"| {count} | {seconds:.1f} |", flush=True)
            yield {"part": "start", "what": "tasks", "value": count, "seconds": seconds}


def save_model(folder, hidden_size):
    _, agent, _ = prepare(Point(hidden_size=hidden_size))
    agent.model.save_pretrained(folder)
    agent.tokenizer.save_pretrained(folder)


def lora(args):
    print("\n| two agents train | s an iteration | peak memory, MiB |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        # in a process of its own: Linux counts this process's peak memory as its children's too
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            pool.apply(save_model, (folder, args.lora_hidden))
        flags = ("--env", "tldr", "--model", folder, "--num-iterations", 3, "--num-tasks", 2, "--eval-tasks", 1)
        flags += ("--max-new-tokens", 32)
        for what, more in (("all weights", ()), ("a LoRA of rank 8", ("--lora-rank", 8))):
            lines, _, peak = run(args, (*flags, *more))
            seconds = statistics.median(sum(v for k, v in x.items() if k.startswith("time/")) for x in lines[1:])
            print(f"| {what} | {seconds:.2f} | {peak:.0f} |", flush=True)
            yield {"part": "lora", "what": what, "seconds": seconds, "peak_mib": peak}


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    about = stamp(args)  # before the runs, which take long
    print(about)
    parts = {"curves": curves, "processes": processes, "start": start, "lora": lora}
    if unknown := set(args.parts) - set(parts):
        sys.exit(f"scaling.py: error: --parts {' '.join(unknown)}: the parts are {', '.join(parts)}.")
    os.makedirs(os.path.dirname(os.path.abspath(args.output)), exist_ok=True)
    rows = [row for name in args.parts for row in parts[name](args)]
    with open(args.output, "w", newline="") as file:
        file.write(f"# {about}\n")
        writer = csv.DictWriter(file, dict.fromkeys(name for row in rows for name in row))
        writer.writeheader()
        writer.writerows(rows)
    print(args.output)
