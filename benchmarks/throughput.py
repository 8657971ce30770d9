"""Processor time and memory of an iteration: of magrpo.py against nano.py, or of a script against an earlier commit.

    python benchmarks/throughput.py                       nano.py and magrpo.py
    python benchmarks/throughput.py --baseline af23b82    magrpo.py at that commit and now
    python benchmarks/throughput.py --operators magrpo    counts the operators of a decoding step

Every run is a process of its own with two agents. An environment of peers_child.py notes the processor time when the
script asks for prompts (sampling begins), calls step() (scoring begins), gets its answer (advantages, update and log
begin), and asks for the next prompts. The evaluation before training and the first iteration are not counted.

The two sides alternate, and what counts is their ratio within a round. Workloads are those of peers.py, and `tldr`,
the script's default run. In c and tldr the sides sample other completions, so see how far their tokens differ.
"""

import importlib
import itertools
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field

import torch
import tyro
from peers import WORKLOADS, phases, prepare, run_script, shrunk
from peers_child import make_model
from stamp import ROOT, print_ratios, stamp, write_rows
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, ROOT)

# script -> class and method whose operators a CUDA graph repeats, so that Python launches none of them
CAPTURED = {"magrpo_cuda": ("FixedCache", "decode_step")}
MEASURES = ["sampling_s", "scoring_s", "update_s", "iteration_s", "tokens", "peak_mib"]


@dataclass
class Args:
    script: str = "magrpo"
    baseline: str = ""  # a commit; by default nano.py is what the script is compared with
    operators: str = ""  # a script whose operators are counted; measures no time
    workloads: list[str] = field(default_factory=lambda: ["a", "b", "c", "tldr"])
    rounds: int = 5
    updates: int = 6  # measured in each process, after one that warms up; twice as many of tldr; at most 9
    seed: int = 1  # for models and prompts; sampling uses seed + round
    shrink: bool = False  # tiny sizes, to check that everything runs; measures nothing
    output: str = ""  # where to write the rows, as CSV


@dataclass
class Side:
    name: str
    script: str
    tree: str  # the folder with the script


def measure(job, side, folder):
    """One run: a row for each measured iteration."""
    os.makedirs(folder)
    result = run_script(job, side.script, [], folder, side.tree)
    if "error" in result:
        sys.exit(f"throughput.py: error: {side.script}.py in {side.tree}: {result['error']}")
    rows = []
    parts = zip(result["tokens"], phases(job, result, clock=0))
    for iteration, (tokens, (sampling, scoring, update)) in enumerate(parts, start=2):
        row = {"iteration": iteration, "sampling_s": sampling, "scoring_s": scoring, "update_s": update}
        row |= {"iteration_s": sampling + scoring + update}
        rows.append(row | {"tokens": tokens, "peak_mib": result["peak_mib"]})
    return rows


def sides_of(args, work):
    if not args.baseline:
        return [Side("nano", "nano", ROOT), Side(args.script, args.script, ROOT)]
    tree = f"{work}/baseline"
    os.mkdir(tree)
    subprocess.run(f"git archive {args.baseline} | tar -x -C {tree}", shell=True, check=True, cwd=ROOT)
    return [Side("baseline", args.script, tree), Side("present", args.script, ROOT)]


def compare(args, sides, work):
    """Rows of all runs; the two sides alternate."""
    rows = []
    jobs = {}
    for name in args.workloads:
        jobs[name] = {"updates": 2 * args.updates, "device": "cpu"}
        if name != "tldr":
            jobs[name] = prepare(name, f"{work}/{name}", args.seed, args.shrink, updates=args.updates)
    for round in range(1, args.rounds + 1):
        for name, side in itertools.product(args.workloads, sides[:: 1 if round % 2 == 0 else -1]):
            job = jobs[name] | {"seed": args.seed + round}
            measured = measure(job, side, f"{work}/{name}-{side.name}-{round}")
            rows += [{"workload": name, "round": round, "side": side.name} | row for row in measured]
            print(f"round {round}, {name}, {side.name}: {measured[-1]['iteration_s']:.3f} s", file=sys.stderr)
    return rows


class Counter(TorchDispatchMode):
    """Counts the operators that Python launches."""

    count = 0
    paused = False  # in a captured function

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += not self.paused
        return operator(*args, **(kwargs or {}))

    def without(self, function):
        def uncounted(*args, **kwargs):
            self.paused = True
            result = function(*args, **kwargs)
            self.paused = False
            return result

        return uncounted


def operators_of_step(name):
    """Operators of a decoding step, views too, with the layers of Qwen2.5-0.5B and bfloat16 autocast as on a GPU."""
    script = importlib.import_module(name)
    counter = Counter()
    if name in CAPTURED:
        class_name, method = CAPTURED[name]
        captured_class = getattr(script, class_name)
        setattr(captured_class, method, counter.without(getattr(captured_class, method)))
    workload = WORKLOADS["qwen2.5-0.5b"]
    config = shrunk(workload).config | {"num_hidden_layers": workload.config["num_hidden_layers"]}
    counts = []
    with tempfile.TemporaryDirectory() as folder:
        job = prepare("qwen2.5-0.5b", f"{folder}/workload", seed=1, shrink=True)
        make_model(config, stop=0.0).save_pretrained(job["model"])
        policy = script.load_policy(script.Args(learning_rate=1e-6), job["model"], torch.device("cpu"), {})
    for steps in (8, 40):
        counter.count = 0
        with counter, torch.autocast("cpu", torch.bfloat16):
            script.sample(policy, [list(range(3, 23))], 4, 1.0, steps)
        counts.append(counter.count)
    return (counts[1] - counts[0]) / 32


def main(args):
    if args.operators:
        print(f"{args.operators}.py: {operators_of_step(args.operators):.0f} operators a decoding step")
        return
    about = stamp(args)  # before the runs, which take long: the code may change meanwhile
    with tempfile.TemporaryDirectory() as work:
        sides = sides_of(args, work)
        rows = compare(args, sides, work)
    if args.output:
        write_rows(args.output, about, rows)
    print(f"\n{about}\n\nProcessor seconds of an iteration, medians.\n")
    print_ratios(rows, ["workload"], [side.name for side in sides], MEASURES)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
