"""Processor time and memory of an iteration: against the plain way of writing it, or against an earlier commit.

    python benchmarks/throughput.py                       one agent, against generate() and padded rows
    python benchmarks/throughput.py --baseline af23b82    two agents, whole runs, against the script at that commit

The plain way samples with `generate(num_return_sequences=G)` and trains on padded batches, one row per completion: a
prompt is computed G times, and every position goes through lm_head. Both run in this process.

With --baseline every run is a process of its own. An environment of peers_child.py notes the processor time when the
script asks for prompts (sampling begins), calls step() (scoring begins), gets its answer (advantages, update and log
begin), and asks for the next prompts. The evaluation before training and the first iteration are not counted.

The two sides alternate, and what counts is the ratio of the medians. Workloads are those of peers.py, and `tldr`, the
script's default run. In c and tldr the sides sample other completions, so see how far their tokens differ.
"""

import importlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field

import torch
import tyro
from peers import flags_of, prepare, run_script
from peers_child import read
from stamp import ROOT, stamp, write_rows

sys.path.insert(0, ROOT)


@dataclass
class Args:
    script: str = "magrpo"
    baseline: str = ""  # a commit
    workloads: list[str] = field(default_factory=lambda: ["a", "b", "c", "tldr"])  # tldr: only with --baseline
    rounds: int = 5
    updates: int = 6  # with --baseline: measured in each process, after one that warms up; twice as many of tldr
    seed: int = 1  # for models and prompts; sampling uses seed + round
    max_batch_tokens: int = 4096  # as in the scripts
    shrink: bool = False  # tiny sizes, to check that everything runs; measures nothing
    output: str = ""  # where to write the rows, as CSV


def report(rows, rounds, above, below):
    """Prints a table of medians of the two sides, and the range of their ratio over the rounds."""
    print(f"| workload | what | {above} | {below} | {above}/{below} | lowest to highest round |")
    print("|---|---|---|---|---|---|")
    measures = [key for key in rows[0] if key not in ("workload", "round", "side", "iteration")]
    for workload, key in itertools.product(dict.fromkeys(row["workload"] for row in rows), measures):
        values = defaultdict(list)  # side, round
        for row in rows:
            if row["workload"] == workload:
                values[row["side"], row["round"]].append(row[key])
                values[row["side"], 0].append(row[key])  # of all rounds, which count from 1
        middle = {where: statistics.median(numbers) for where, numbers in values.items()}
        ratio, *ratios = [middle[above, k] / middle[below, k] for k in range(1 + rounds)]
        medians = f"{middle[above, 0]:.4g} | {middle[below, 0]:.4g}"
        print(f"| {workload} | {key} | {medians} | **{ratio:.2f}** | {min(ratios):.2f} to {max(ratios):.2f} |")


# Against a commit


def run_side(args, workload, job, round, tree, folder):
    """One run of the script in `tree`: a row for each measured iteration."""
    updates, command = args.updates, [f"{args.script}.py", "--seed", args.seed + round]
    if workload == "tldr":
        updates *= 2
        command += ["--env", "peers_child:Posts"]
    else:
        command += ["--env", "peers_child:Prompts", *flags_of(job, args.max_batch_tokens)]
    os.makedirs(folder)
    # both sides take the environment from here
    result = run_script("cpu", command, updates, folder, tree, PYTHONPATH=os.path.join(ROOT, "benchmarks"))
    if "error" in result:
        sys.exit(f"throughput.py: error: {args.script}.py in {tree}: {result['error']}")
    rows = []
    for k, line in enumerate(result["lines"], start=2):  # 0 is the evaluation, 1 warms up
        asked, drawn, scored, asked_again = result["marks"][3 * k : 3 * k + 4]
        row = {"iteration": k, "sampling_s": drawn - asked, "scoring_s": scored - drawn}
        row |= {"update_s": asked_again - scored, "iteration_s": asked_again - asked}
        rows.append(row | {"tokens": line["tokens"], "peak_mib": result["peak_mib"]})
    return rows


def against_commit(args, work):
    """Rows of all runs; the two sides alternate."""
    baseline = os.path.join(work, "baseline")
    os.mkdir(baseline)
    command = f"git archive {args.baseline} | tar -x -C {baseline}"
    subprocess.run(command, shell=True, check=True, cwd=ROOT)
    jobs, rows = {}, []
    for name in [name for name in args.workloads if name != "tldr"]:
        folder = os.path.join(work, name)
        jobs[name] = prepare(name, folder, args.seed, args.shrink, updates=args.updates)
    for round in range(1, args.rounds + 1):
        sides = [("baseline", baseline), ("present", ROOT)]
        for name, (side, tree) in itertools.product(args.workloads, sides if round % 2 == 0 else sides[::-1]):
            folder = os.path.join(work, f"{name}-{side}-{round}")
            measured = run_side(args, name, jobs.get(name), round, tree, folder)
            rows += [{"workload": name, "round": round, "side": side, **row} for row in measured]
            print(f"round {round}, {name}, {side}: {measured[-1]['iteration_s']:.3f} s", file=sys.stderr, flush=True)
    return rows


# Against the plain way, by the script's functions


def sample_plain(agent, prompts, G, C):
    input_ids = torch.tensor(prompts)  # (B, P): all have the same length
    mask = torch.ones_like(input_ids)
    return agent.model.generate(input_ids, attention_mask=mask, num_return_sequences=G, max_new_tokens=C)


def train(script, agent, prompts, drawn, max_batch_tokens):
    """Gradients of all log-probabilities, in the script's batches."""
    for prompt, group in zip(prompts, drawn):
        group = sorted(group, key=len)
        size = max(1, (max_batch_tokens - len(prompt)) // len(group[-1]))
        for k in range(0, len(group), size):
            with agent.autocast:
                logprobs = script.token_logprobs(agent, prompt, group[k : k + size], 1.0)
            torch.cat(logprobs).sum().backward()


def train_plain(agent, prompts, drawn, max_batch_tokens):
    P, C = len(prompts[0]), max(len(ids) for group in drawn for ids in group)
    rows = [prompt + ids + [0] * (C - len(ids)) for prompt, group in zip(prompts, drawn) for ids in group]
    size = max(1, max_batch_tokens // (P + C))
    for k in range(0, len(rows), size):
        batch = torch.tensor(rows[k : k + size])  # (R, P + C)
        logprobs = agent.model(batch).logits[:, P - 1 : -1].log_softmax(-1)  # (R, C, V)
        logprobs.gather(-1, batch[:, P:, None]).sum().backward()


def timed(function, *args):
    began = time.process_time()
    result = function(*args)
    return result, time.process_time() - began


def load(script, job, device):
    """(an agent as the script makes one, B prompts as token ids)"""
    settings = script.Args(learning_rate=job["learning_rate"])
    agent = script.load_agent(args=settings, name=job["model"], device=torch.device(device), shared={})
    texts = [line["text"] for line in read(job["prompts"])[: job["num_tasks"]]]
    return agent, agent.tokenizer(texts).input_ids


def against_plain(args, work):
    """Rows of all rounds; the two ways alternate in this process."""
    torch.set_num_threads(1)
    script, rows = importlib.import_module(args.script), []
    for name in [name for name in args.workloads if name != "tldr"]:
        job = prepare(name, os.path.join(work, name), args.seed, args.shrink)
        agent, prompts = load(script, job, "cpu")
        G, C, most = job["num_generations"], job["completion_tokens"], args.max_batch_tokens
        for round in range(args.rounds + 1):
            pairs, sampling = timed(script.sample, agent, prompts, G, 1.0, C)
            drawn = [[ids for ids, _ in group] for group in pairs]
            _, training = timed(train, script, agent, prompts, drawn, most)
            _, plain_sampling = timed(sample_plain, agent, prompts, G, C)
            _, plain_training = timed(train_plain, agent, prompts, drawn, most)
            agent.model.zero_grad()
            for side, a, b in [("ours", sampling, training), ("plain", plain_sampling, plain_training)]:
                row = {"workload": name, "round": round, "side": side}
                rows.append(row | {"sampling_s": a, "training_s": b, "iteration_s": a + b})
    return [row for row in rows if row["round"] > 0]  # the first warms up


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    about = stamp(args)  # before the runs, which take long: the code may change meanwhile
    with tempfile.TemporaryDirectory() as work:
        rows = against_commit(args, work) if args.baseline else against_plain(args, work)
    if args.output:
        write_rows(args.output, about, rows)
    print(f"\n{about}\n\nProcessor seconds of an iteration of {args.script}.py, medians.\n")
    above, below = ("present", "baseline") if args.baseline else ("plain", "ours")
    report(rows, args.rounds, above, below)
