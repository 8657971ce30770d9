"""Trains algorithm scripts on the sample posts from several seeds, and writes results/*.csv.

    python benchmarks/compare.py --seeds 5 --jobs 2
    python benchmarks/plot.py results/tldr.csv

Each run has one process, or --processes of them, with one thread each. A row of results/<env>.csv is one evaluation of
a run: script, seed, iteration, tokens (sampled by all agents so far), seconds (of training so far), update_seconds (of
these, in updates), train_zero_variance_groups and, of critics, train_explained_variance (means since the previous
row), the evaluation's metrics, and peak_mib_0 (main memory of the process; of further ones peak_mib_1). The file's
first line, after a #, has commit, versions and arguments. All scripts run with their defaults and equal numbers of
tasks, generations and iterations; since completion lengths change, plot.py compares runs at equal numbers of tokens.
"""

import glob
import json
import os
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import tyro
from stamp import ROOT, stamp, write_rows


@dataclass
class Args:
    scripts: list[str] = field(default_factory=lambda: ["magrpo", "marloo", "maremax", "mareinforce", "ippo"])
    env: str = "tldr"
    seeds: int = 5  # 1, 2, ...
    jobs: int = 2  # runs at a time
    processes: int = 1  # of each run; they share its work, as torchrun's do
    num_iterations: int = 120
    eval_every: int = 10
    flags: str = ""  # further arguments of every script, as one string: --flags="--num-turns 2"
    name: str = ""  # of the file in results/; by default the environment
    keep: str = ""  # a folder for the run folders, which are deleted otherwise


def train(args, folder, script, seed):
    """Rows of one run; none if it fails, so that hours of other runs are not lost."""
    command = [sys.executable, os.path.join(ROOT, f"{script}.py"), "--env", args.env, "--seed", str(seed)]
    command += ["--num-iterations", str(args.num_iterations), "--eval-every", str(args.eval_every)]
    command += ["--output-dir", folder, "--save-every", str(args.num_iterations), *args.flags.split()]
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with tempfile.TemporaryFile("w+") as log:
        started, ended = [], []
        for rank in map(str, range(args.processes)):  # by hand, not by torchrun, to learn the memory of each
            ranked = environment | {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(args.processes)}
            started.append(subprocess.Popen(command, cwd=ROOT, env=ranked, stdout=log, stderr=log))
        for process in started:
            _, status, usage = os.wait4(process.pid, 0)
            ended.append((status, usage))
            if status != 0:  # the others would wait for it
                for other in started[len(ended) :]:
                    other.kill()
        if any(status for status, _ in ended):
            log.seek(0)
            print(f"{' '.join(command)} failed:\n{log.read()[-2000:]}", file=sys.stderr, flush=True)
            return []
    name = f"{args.env.replace(':', '.')}__{script}__{seed}__*"
    rows = rows_of(max(glob.glob(os.path.join(folder, name))), script, seed)  # the last one by its time
    first, last = rows[0], rows[-1]
    print(f"{script} seed {seed}: {first['return']:.3f} -> {last['return']:.3f}, {last['seconds']} s", flush=True)
    peaks = {f"peak_mib_{rank}": usage.ru_maxrss // 2**10 for rank, (_, usage) in enumerate(ended)}  # from KiB
    return [row | peaks for row in rows]


def rows_of(run_dir, script, seed):
    """A row for each evaluation of a run."""
    with open(os.path.join(run_dir, "metrics.jsonl")) as file:
        lines = [json.loads(line) for line in file]
    rows, tokens, seconds, updating, equal, explained = [], 0, 0.0, 0.0, [], []
    for line in lines:
        if line["iteration"]:
            tokens += line["tokens"]
            seconds += line["time/iteration"]
            updating += line["time/iteration"] - line["time/rollout"]
            equal.append(line["train/zero_variance_groups"])
            explained += [value for name, value in line.items() if name.endswith("/explained_variance")]
        if "eval/return" in line:
            row = {"script": script, "seed": seed, "iteration": line["iteration"]}
            row |= {"tokens": tokens, "seconds": round(seconds, 1), "update_seconds": round(updating, 1)}
            for name, values in ("zero_variance_groups", equal), ("explained_variance", explained):
                row[f"train_{name}"] = round(sum(values) / len(values), 3) if values else None
                values.clear()
            rows.append(row | {k.removeprefix("eval/"): v for k, v in line.items() if k.startswith("eval/")})
    return rows


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    about = stamp(args)  # before the runs, which take long: the code may change meanwhile
    runs = [(script, seed) for seed in range(1, args.seeds + 1) for script in args.scripts]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as threads:
        folder = os.path.abspath(args.keep) if args.keep else folder
        parts = list(threads.map(lambda run: train(args, folder, *run), runs))
    rows = [row for part in parts for row in part]
    path = os.path.join(ROOT, "results", f"{args.name or args.env}.csv")
    if rows:
        write_rows(path, about, rows)
    print(path)
    if failed := parts.count([]):
        sys.exit(f"compare.py: error: {failed} of {len(runs)} runs failed, as printed above; the file lacks them.")
