"""Writes one page to look at runs: learning curves, and what the agents read, wrote and earned.

    python view.py runs/*                 (writes runs.html, which any browser opens, without a server or a network)
    python view.py runs/A runs/B --output ab.html --nodes 64

A run in progress can be looked at too, and so can an evaluation (--num-iterations 0). view.html is the page: its
script begins with the shape of the data that this file puts into it.
"""

import base64
import gzip
import json
import os
import re
import sys
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tyro
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
METRICS = {  # what metrics.jsonl has, of rollouts after train/ or eval/, by the names of agent 0 and turn 1
    "return": "mean return of the trajectories, over agents or of one",
    "return_se": "standard error of return over tasks (evaluation)",
    "reward": "what the environment pays; in a mixture its mean over the tasks of this environment",
    "reward_turn1": "mean reward of this turn, over the branches that reached it, and over agents",
    "all_passed": "1 if the task is solved completely, else 0",
    "pass@1": "share of the trajectories with all_passed; pass@n: of the tasks with one among n that has it",
    "zero_variance_groups": "share of comparisons (at a node, or of a task's trajectories) of equal returns only",
    "agent_0/entropy": "mean of -log pi over the sampled tokens, in nats; 0 in a greedy evaluation",
    "agent_0/completion_length": "tokens, with the stop token",
    "agent_0/stopped": "share of the completions that ended by themselves",
    "agent_0/grad_norm": "norm of the gradient before clipping; 0: no step; with --share-policy of all agents",
    "time/iteration": "seconds, without evaluation",
    "tokens": "tokens that all agents sampled",
    # of ippo.py and mappo.py, means over the optimizer steps
    "agent_0/loss": "policy_loss + vf_coef * value_loss - ent_coef * entropy",
    "agent_0/policy_loss": "PPO's clipped objective, to be minimized",
    "agent_0/value_loss": "half the squared error of the values, or of the clipped ones where that is larger",
    "agent_0/approx_kl": "mean of rho - 1 - log rho over tokens, before each optimizer step",
    "agent_0/clipfrac": "share of tokens whose ratio was clipped",
    "agent_0/explained_variance": "share of the variance of the returns over tokens that the old values explain",
    # of madpo.py, means over the pairs before the update
    "preference/pairs": "number of pairs of joint answers",
    "preference/loss": "DPO's loss on the joint answers; log 2 at the start",
    "preference/margin": "beta times the log-ratio to the reference, of the better minus of the worse answer",
    "preference/accuracy": "share of pairs whose margin is positive; 0 at the start",
    "preference/chosen_logprob": "log-probability of the better joint answer",
    "preference/rejected_logprob": "log-probability of the worse joint answer",
}


@dataclass
class Args:
    runs: tyro.conf.Positional[list[str]]  # run folders
    output: str = "runs.html"  # the page
    nodes: int = 8  # most nodes per iteration, split and turn
    megabytes: float = 20.0  # a larger page has fewer iterations with rollouts


class Iteration(NamedTuple):
    """Where in the rollouts.jsonl of a run the nodes of an iteration and split are."""

    run: int  # number of the run
    start: int  # bytes
    size: int  # bytes
    nodes: int


def shorten(digits):
    """A number of a log. Seven digits are enough, and make the page smaller."""
    return float(f"{float(digits):.7g}")


def parse(line):
    """A line of a log as a dict, with None for NaN and infinity, which a page cannot read."""
    return json.loads(line, parse_float=shorten, parse_constant={}.get)


def find_warnings(folder, columns):
    """Why the reward of a run may not rise, as docs/debugging.md says: a sentence for each metric that shows it."""
    for name, column in columns.items():
        values = [value for value in column if value is not None]
        if name == "train/zero_variance_groups" and min(values[-10:]) == 1:
            cause = (
                "stays at 1: completions that are compared all earn the same, so nothing is learned; if they earn "
                "little, pay for parts of the answer or take easier tasks."
            )
        elif re.fullmatch(r"eval/agent_\d+/stopped", name) and values[-1] == 0:
            cause = "is 0: no answer of this agent ended before --max-new-tokens; raise it, or ask for less."
        elif re.fullmatch(r"train/agent_\d+/entropy", name) and values[-1] < values[0] / 100:
            cause = (
                "fell below a hundredth of its first value: answers of this agent became alike; if the return is "
                "low, lower --learning-rate."
            )
        else:
            continue
        yield f"{folder}: {name} {cause}"


def find_iterations(path, run):
    """split -> its iterations in rollouts.jsonl. The last line of a run in progress may be incomplete."""
    iterations = {}
    start = 0
    with open(path, "rb") as file:
        lines = (line for line in file if line.endswith(b"\n"))
        for head, group in groupby(lines, key=lambda line: line.partition(b', "turn"')[0]):
            sizes = list(map(len, group))
            split = json.loads(head + b"}")["split"]
            iterations.setdefault(split, []).append(Iteration(run, start, sum(sizes), len(sizes)))
            start += sum(sizes)
    return iterations


def read_nodes(folder, iteration):
    """The lines of an iteration as dicts."""
    with open(f"{folder}/rollouts.jsonl", "rb") as file:
        file.seek(iteration.start)
        return [parse(line) for line in file.read(iteration.size).splitlines()]


def find_pass_rates(folder, evaluations):
    """iteration -> pass@1, the share of trajectories that pass, and pass@n, of tasks with one among n that does."""
    rates = {}
    for evaluation in evaluations:
        passed = {}  # task -> trajectory -> whether it passes
        for node in read_nodes(folder, evaluation):
            for j, parts in enumerate(node["parts"]):
                if "all_passed" in parts:
                    # later turns of a trajectory come later
                    trajectory = (node["path"] or [j])[0]
                    passed.setdefault(node["task_number"], {})[trajectory] = parts["all_passed"] == 1
        tasks = [trajectories.values() for trajectories in passed.values()]
        if tasks:
            rates[node["iteration"]] = {
                "eval/pass@1": np.mean([*chain(*tasks)]),
                f"eval/pass@{len(tasks[0])}": np.mean([*map(any, tasks)]),
            }
    return rates


def load(folder, iterations):
    """A run as the page has it, which puts its nodes in, and its last evaluation as a line for the terminal."""
    about = json.loads(Path(folder, "args.json").read_text(encoding="utf-8"))
    rates = find_pass_rates(folder, iterations.get(about["args"]["eval_split"], []))
    with open(f"{folder}/metrics.jsonl", "rb") as file:
        lines = [parse(line) for line in file if line.endswith(b"\n")]
    last = {}  # name -> value in the last line that has it
    for line in lines:
        line |= rates.get(line["iteration"], {})
        last |= line
    columns = {name: [line.get(name) for line in lines] for name in last}
    results = [f"{name[5:]} {last[name]:.3f}" for name in last if re.match(r"eval/(return$|pass@)", name)]
    error = last.get("eval/return_se", 0.0)
    # 0 where all answers earn the same
    if error > 0:
        results[0] += f" +- {error:.3f}"
    return {
        "folder": os.path.normpath(folder),
        "script": about["script"].removesuffix(".py"),
        "args": about["args"],
        "columns": columns,
        "warnings": list(find_warnings(folder, columns)),
        "result": f"{folder}: {', '.join(results)}",
        "logged": sum(iteration.nodes for iteration in chain(*iterations.values())),
    }


def read_parts(environments):
    """environment -> name of a part of its reward -> [the most that it pays, 0 for a diagnostic, and its meaning]."""
    parts = {}
    for environment in sorted(environments):
        try:
            from envs import find_class  # a copy of this file may stand alone

            parts[environment] = find_class(environment).PARTS
        except (AttributeError, ImportError, ValueError) as error:
            print(f"{environment}: the page shows the parts of its reward without their meaning ({error})")
    return parts


def place_of(node):
    """Where a node is in the trees of its iteration and split."""
    return (node["task_number"], *node["path"])


def add_returns(nodes, gamma):
    """Makes rewards J lists (of one number if all agents share it), and adds as many returns: a joint action's reward
    plus gamma times the mean return of the node that it leads to."""
    mean_returns = {}  # place -> mean return of the node there, one number or one per agent
    for node in reversed(nodes):  # children before parents
        place = place_of(node)
        rewards = list(map(np.ravel, node["rewards"]))
        returns = [now + gamma * mean_returns.get((*place, j), 0.0) for j, now in enumerate(rewards)]
        node["rewards"] = [values.tolist() for values in rewards]
        node["returns"] = [values.round(6).tolist() for values in returns]
        mean_returns[place] = sum(returns) / len(returns)


def choose(nodes, most):
    """At most so many nodes of each turn, spread evenly over those whose parent was chosen: always the same tasks. The
    nodes of a task that have one joint action each count as one, since they are compared with each other."""

    places = set()
    for _, turn in groupby(nodes, key=itemgetter("turn")):
        pool = {}
        for node in turn:
            if not node["path"] or place_of(node)[:-1] in places:
                key = place_of(node) if len(node["joint"]) > 1 else node["task_number"]
                pool.setdefault(key, []).append(node)
        groups = list(pool.values())
        step = max(1.0, len(groups) / most)
        for k in range(min(most, len(groups))):
            for node in groups[int(k * step)]:
                places.add(place_of(node))
                yield node


def pack_node(node, texts):
    """A node as a line of JSON, with places in `texts` instead of strings, of which many are equal."""

    def place(x):
        if x is None:
            return None
        string = x if isinstance(x, str) else json.dumps(x, ensure_ascii=False)
        return texts.setdefault(string, len(texts))

    node["task"] = place(node["task"])
    node["feedback"] = [place(x) for x in node["feedback"]]
    for agent in filter(None, node["agents"]):
        agent["prompt"] = place(agent["prompt"])
        agent["completions"] = [place(completion) for completion in agent["completions"]]
    return json.dumps(node, ensure_ascii=False, separators=(",", ":"))


def compress(head, lines=()):
    """JSON and lines of JSON as a line of the page: gzip, base64."""
    text = "\n".join([json.dumps(head, ensure_ascii=False, separators=(",", ":")), *lines])
    data = gzip.compress(text.encode(errors="replace"), compresslevel=6, mtime=0)
    return base64.b64encode(data).decode() + "\n"


def pack_iterations(iterations, runs, most, texts):
    """Yields the chosen nodes of some iterations as lines of JSON, and adds their strings to `texts`."""
    for iteration in tqdm(iterations, unit=" iterations", leave=False, disable=None):
        run = runs[iteration.run]
        nodes = read_nodes(run["folder"], iteration)
        add_returns(nodes, run["args"]["gamma"])
        for node in choose(nodes, most):
            node["run"] = iteration.run
            yield pack_node(node, texts)


def pack(folders, most, room):
    """The data of the page, and its runs. It has the rollouts of as many iterations as fit into so many bytes: of the
    first and the last one of each split, then of one half-way between, then of two between these three, and so on.
    """
    series = [find_iterations(f"{folder}/rollouts.jsonl", number) for number, folder in enumerate(folders)]
    runs = [load(folder, iterations) for folder, iterations in zip(folders, series)]
    splits = [iterations for run in series for iterations in run.values()]
    texts = {}  # string -> its place
    packed = set()  # iterations
    environments = set("+".join(run["args"]["env"] for run in runs).split("+"))
    data = compress({"runs": runs, "metrics": METRICS, "parts": read_parts(environments)})
    # from every 2^k-th iteration of a split, beginning with the largest 2^k, to each
    every = 1
    while every < max(map(len, splits), default=1):
        every *= 2
    while every >= 1:
        more = set()
        for iterations in splits:
            more.update(iterations[::every], iterations[-1:])
        more -= packed
        known = len(texts)
        lines = list(pack_iterations(sorted(more), runs, most, texts))
        level = compress({"every": every, "texts": list(texts)[known:]}, lines)
        # the first level is packed in any case
        if packed and len(data) + len(level) > room:
            break
        data += level
        packed |= more
        every //= 2
    return data, runs


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    folders = [folder for folder in args.runs if os.path.isfile(f"{folder}/rollouts.jsonl")]
    for folder in args.runs:
        if folder not in folders:
            print(f"{folder} is left out: it is no folder, or has no rollouts.jsonl")
    if not folders:
        sys.exit("error: no run folder has answers to show: nano.py does not write them, the other scripts do.")
    if not (HERE / "view.html").exists():
        sys.exit(f"error: view.py needs view.html beside it; copy it to {HERE}.")
    page = (HERE / "view.html").read_text(encoding="utf-8")
    data, runs = pack(folders, args.nodes, 1e6 * args.megabytes - len(page))
    page = page.replace("@DATA@", data)  # base64 has no letter that ends a <script>
    Path(args.output).write_text(page, encoding="utf-8")
    print(f"{args.output}: {len(page) / 1e6:.1f} MB, runs: {len(folders)}")
    for run in runs:
        print(run["result"], *run["warnings"], sep="\n")
