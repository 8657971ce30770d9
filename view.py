"""Writes one page to look at runs: learning curves, and what the agents read, wrote and earned.

    python view.py runs/*                 (writes runs.html, which any browser opens, without a server or a network)
    python view.py runs/A runs/B --output ab.html --nodes 64

A run in progress can be looked at too, and so can an evaluation (--num-iterations 0). view.html is the page: its
script begins with the shape of the data that this file puts into it.
"""

import argparse
import base64
import gzip
import json
import math
import os
from itertools import groupby


def read(path):
    """The lines of a log, each as a dict. The last line of a run in progress may be incomplete."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def brief(x):
    """A number with five digits, or a list of such; None for what JSON has no word for."""
    if isinstance(x, list):
        return [brief(value) for value in x]
    if isinstance(x, float):
        return float(f"{x:.5g}") if math.isfinite(x) else None
    return x


def load_metrics(path):
    """name -> its value in each line (None where a line lacks it), with what was spent until then."""
    lines, tokens, seconds = list(read(path)), 0, 0.0
    for line in lines:
        tokens += line.get("tokens", 0)
        seconds += line.get("time/iteration", 0.0)
        line |= {"sampled tokens": tokens, "seconds": seconds}
    names = dict.fromkeys(name for line in lines for name in line)
    return {name: [brief(line.get(name)) for line in lines] for name in names}


def add_returns(nodes, gamma):
    """Makes rewards J lists (of one number if all agents share it), and adds as many returns: a joint action's reward
    plus gamma times the mean return of the node that it leads to."""
    means = {}  # place in the tree -> mean return of the node there
    for node in reversed(nodes):  # children before parents
        place, returns = (node["task_number"], *node["path"]), []
        node["rewards"] = [reward if isinstance(reward, list) else [reward] for reward in node["rewards"]]
        for j, reward in enumerate(node["rewards"]):
            later = means.get((*place, j), [0.0] * len(reward))
            returns.append([now + gamma * then for now, then in zip(reward, later)])
        node["returns"] = returns
        means[place] = [sum(column) / len(returns) for column in zip(*returns)]


def choose(nodes, most):
    """At most so many nodes of each turn, spread evenly over those whose parent was chosen: always the same tasks."""
    places = set()
    for _, turn in groupby(sorted(nodes, key=lambda node: node["turn"]), key=lambda node: node["turn"]):
        pool = [node for node in turn if not node["path"] or (node["task_number"], *node["path"][:-1]) in places]
        step = max(1.0, len(pool) / most)
        chosen = [pool[int(k * step)] for k in range(min(most, len(pool)))]
        places |= {(node["task_number"], *node["path"]) for node in chosen}
        yield from chosen


def load(folder, most):
    """A run as the page has it, but for texts, which are still whole."""
    with open(f"{folder}/args.json", encoding="utf-8") as file:
        about = json.load(file)
    nodes, logged = [], 0
    rollouts = read(f"{folder}/rollouts.jsonl")
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
    """A node with short numbers, and with places in `texts` instead of texts, of which many are equal."""

    def place(text):
        return texts.setdefault(text, len(texts))

    packed = {key: node[key] for key in ("iteration", "split", "turn", "path", "joint")}
    packed |= {"task": node["task_number"], "rewards": brief(node["rewards"]), "returns": brief(node["returns"])}
    packed["parts"] = {name: brief(values) for name, values in node["parts"].items()}
    shown = [x if x is None or isinstance(x, str) else json.dumps(x, ensure_ascii=False) for x in node["feedback"]]
    packed["feedback"] = [None if x is None else place(x) for x in shown]
    packed["agents"] = []
    for agent in node["agents"]:
        if agent is not None:
            agent = {key: brief(value) for key, value in agent.items()}
            agent |= {"prompt": place(agent["prompt"]), "completions": [place(x) for x in agent["completions"]]}
        packed["agents"].append(agent)
    return packed


def pack(runs, every):
    """The data of the page as JSON, with the rollouts of every so manieth logged iteration, and of the last."""
    texts, packed = {}, []
    for run in runs:
        kept = set()
        for split in {node["split"] for node in run["nodes"]}:
            iterations = sorted({node["iteration"] for node in run["nodes"] if node["split"] == split})
            kept |= {(split, iteration) for iteration in [*iterations[::every], iterations[-1]]}
        nodes = [pack_node(node, texts) for node in run["nodes"] if (node["split"], node["iteration"]) in kept]
        packed.append(run | {"nodes": nodes})
    data = {"every": every, "runs": packed, "texts": list(texts)}
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


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
    runs, every, packed = [load(folder, args.nodes) for folder in folders], 1, ""
    most = max((len(run["nodes"]) for run in runs), default=0)
    with open(f"{os.path.dirname(os.path.abspath(__file__))}/view.html", encoding="utf-8") as file:
        page = file.read()
    while not packed or (len(page) + len(packed) > 1e6 * args.megabytes and every < most):
        every *= 2 if packed else 1
        packed = base64.b64encode(gzip.compress(pack(runs, every).encode(errors="replace"), mtime=0)).decode()
    with open(args.output, "w", encoding="utf-8") as file:
        file.write(page.replace("@DATA@", packed))  # base64 has no letter that ends a <script>
    print(f"{args.output}: {len(runs)} runs, {(len(page) + len(packed)) / 1e6:.1f} MB")
