"""Writes one page to look at runs: learning curves, and what the agents read, wrote and earned.

    python view.py runs/*                 (writes runs.html, which any browser opens, without a server or a network)
    python view.py runs/A runs/B --output ab.html --nodes 64

A run in progress can be looked at too, and so can an evaluation (--num-iterations 0). view.html is the page: its
script begins with the shape of the data that this file puts into it.
"""

import argparse
import base64
import gc
import gzip
import json
import math
import os
import sys
from itertools import groupby

SAMPLE = 32  # iterations: the size of their page tells how many iterations a page of --megabytes can hold


class Progress:
    """A bar on the terminal, drawn again with each percent of the work."""

    def __init__(self, title, whole):
        self.title = title
        self.whole = whole
        self.done = 0
        self.percent = -1

    def add(self, amount):
        self.done += amount
        percent = 100 * self.done // self.whole
        if percent > self.percent:
            self.percent = percent
            bar = "#" * (percent // 4)
            print(f"\r{self.title} [{bar:<25}] {percent:3}%", end="", file=sys.stderr, flush=True)

    def end(self):
        print(file=sys.stderr)


def read(path, progress=None):
    """The lines of a log, each as a dict. The last line of a run in progress may be incomplete."""
    with open(path, "rb") as file:
        for line in file:
            if progress:
                progress.add(len(line))
            if line.endswith(b"\n"):
                yield json.loads(line)


def shorten(x):
    """A number with five digits, or a list of such numbers; None for what JSON has no word for."""
    if isinstance(x, list):
        return [shorten(value) for value in x]
    if isinstance(x, float):
        return float(f"{x:.5g}") if math.isfinite(x) else None
    return x


def load_metrics(path):
    """name -> its value in each line (None where a line lacks it), with what was spent until then."""
    lines = list(read(path))
    tokens = 0
    seconds = 0.0
    for line in lines:
        tokens += line.get("tokens", 0)
        seconds += line.get("time/iteration", 0.0)
        line["sampled tokens"] = tokens
        line["seconds"] = seconds
    names = dict.fromkeys(name for line in lines for name in line)
    return {name: [shorten(line.get(name)) for line in lines] for name in names}


def place_of(node):
    """Where a node is in the trees of its iteration and split."""
    return (node["task_number"], *node["path"])


def add_returns(nodes, gamma):
    """Makes rewards J lists (of one number if all agents share it), and adds as many returns: a joint action's reward
    plus gamma times the mean return of the node that it leads to."""
    mean_returns = {}  # place -> mean return of the node there, one number or one per agent
    for node in reversed(nodes):  # children before parents
        place = place_of(node)
        node["rewards"] = [reward if isinstance(reward, list) else [reward] for reward in node["rewards"]]
        node["returns"] = []
        for j, reward in enumerate(node["rewards"]):
            later = mean_returns.get((*place, j), [0.0] * len(reward))
            node["returns"].append([now + gamma * then for now, then in zip(reward, later)])
        mean_returns[place] = [sum(column) / len(column) for column in zip(*node["returns"])]


def choose(nodes, most):
    """At most so many nodes of each turn, spread evenly over those whose parent was chosen: always the same tasks."""

    def turn_of(node):
        return node["turn"]

    places = set()
    for _, turn in groupby(sorted(nodes, key=turn_of), key=turn_of):
        pool = [node for node in turn if not node["path"] or place_of(node)[:-1] in places]
        step = max(1.0, len(pool) / most)
        for k in range(min(most, len(pool))):
            node = pool[int(k * step)]
            places.add(place_of(node))
            yield node


def load(folder, most, progress):
    """A run as the page has it, except for its nodes, which are still whole."""
    with open(f"{folder}/args.json", encoding="utf-8") as file:
        about = json.load(file)
    nodes = []
    logged = 0
    rollouts = read(f"{folder}/rollouts.jsonl", progress)
    for _, group in groupby(rollouts, key=lambda node: (node["iteration"], node["split"])):
        group = list(group)
        logged += len(group)
        add_returns(group, about["args"]["gamma"])
        nodes += choose(group, most)
    return {
        "folder": os.path.normpath(folder),
        "script": about["script"].removesuffix(".py"),
        "commit": about["commit"][:7],
        "args": about["args"],
        "columns": load_metrics(f"{folder}/metrics.jsonl"),
        "logged": logged,
        "nodes": nodes,
    }


def pack_node(node, texts):
    """A node with short numbers, and with places in `texts` instead of strings, of which many are equal."""

    def place(x):
        if x is None:
            return None
        string = x if isinstance(x, str) else json.dumps(x, ensure_ascii=False)
        return texts.setdefault(string, len(texts))

    packed = {key: node[key] for key in ("iteration", "split", "turn", "task_number", "path", "joint")}
    packed["task"] = place(node.get("task"))  # only turn 1 has it, and logs of earlier versions have none
    packed["rewards"] = shorten(node["rewards"])
    packed["returns"] = shorten(node["returns"])
    packed["parts"] = {name: shorten(values) for name, values in node["parts"].items()}
    packed["feedback"] = [place(x) for x in node["feedback"]]
    packed["agents"] = []
    for agent in node["agents"]:
        if agent is not None:
            agent = {key: shorten(value) for key, value in agent.items()}
            agent["prompt"] = place(agent["prompt"])
            agent["completions"] = [place(completion) for completion in agent["completions"]]
        packed["agents"].append(agent)
    return packed


def thin(nodes, every):
    """The nodes of every so manieth logged iteration of each split, and of the last one."""
    iterations = {}  # split -> its iterations, in order
    for node in nodes:
        iterations.setdefault(node["split"], {})[node["iteration"]] = None
    kept = set()
    for split, times in iterations.items():
        times = list(times)
        kept |= {(split, time) for time in [*times[::every], times[-1]]}
    return [node for node in nodes if (node["split"], node["iteration"]) in kept]


def pack(runs, every):
    """The data of the page (gzip, base64), with the rollouts of every so manieth logged iteration."""
    thinned = [thin(run["nodes"], every) for run in runs]
    progress = Progress(f"packing every {every}. iteration", sum(map(len, thinned)) or 1)
    texts = {}  # string -> its place
    packed = []
    for run, nodes in zip(runs, thinned):
        packed.append(run | {"nodes": []})
        for node in nodes:
            packed[-1]["nodes"].append(pack_node(node, texts))
            progress.add(1)
    progress.end()
    data = {"every": every, "runs": packed, "texts": list(texts)}
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(errors="replace"), compresslevel=6, mtime=0)).decode()


def pack_within(runs, room):
    """The data of the page with as many iterations as fit into so many bytes. Packing all of a large log again and
    again would take minutes; so a sample is packed first. Half the step between iterations makes nearly twice the
    size: repeated texts are stored once, which `generous` allows for."""
    generous = 1.25 * room
    most = max(len({node["iteration"] for node in run["nodes"]}) for run in runs)
    every = 1
    while most > SAMPLE * every:
        every *= 2
    packed = pack(runs, every)
    while every > 1 and 2 * len(packed) <= generous:
        halvings = int(math.log2(generous / len(packed)))
        every = max(1, every >> halvings)
        packed = pack(runs, every)
    while every < most and len(packed) > room:
        every *= 2
        packed = pack(runs, every)
    return packed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="run folders")
    parser.add_argument("--output", default="runs.html", help="the page")
    parser.add_argument("--nodes", type=int, default=8, help="most nodes per iteration, split and turn")
    parser.add_argument("--megabytes", type=float, default=20, help="a larger page has fewer iterations with rollouts")
    args = parser.parse_args()
    folders = [folder for folder in args.runs if os.path.isfile(f"{folder}/rollouts.jsonl")]
    for folder in sorted({*args.runs} - {*folders}):
        print(f"{folder} is left out: it has no rollouts.jsonl")
    if not folders:
        parser.error("no run folder is left; give one that a script made")

    gc.disable()  # a large log is millions of lists that all stay; looking for garbage among them takes half the time
    reading = Progress("reading", sum(os.path.getsize(f"{folder}/rollouts.jsonl") for folder in folders) or 1)
    runs = [load(folder, args.nodes, reading) for folder in folders]
    reading.end()
    with open(f"{os.path.dirname(os.path.abspath(__file__))}/view.html", encoding="utf-8") as file:
        page = file.read()
    packed = pack_within(runs, 1e6 * args.megabytes - len(page))
    with open(args.output, "w", encoding="utf-8") as file:
        file.write(page.replace("@DATA@", packed))  # base64 has no letter that ends a <script>
    print(f"{args.output}: {len(runs)} runs, {(len(page) + len(packed)) / 1e6:.1f} MB")
