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
import os
import re
from itertools import chain, groupby
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

HERE = Path(__file__).resolve().parent
MEANINGS = {  # of what is logged: a pattern of lines in docs/, with environments ("-": of all), name and meaning
    "environments.md": r"^\| (`[^|]+`|all) \| `(\w+)` \| (.+) \|$",
    "critic_free.md": r"^(-) .*`(?:agent_0/)?(\w+)`: (.+)$",
}


class Iteration(NamedTuple):
    """Where in the rollouts.jsonl of a run the nodes of an iteration and split are."""

    run: int  # number of the run
    start: int  # bytes
    size: int  # bytes
    nodes: int


def shorten(digits):
    """A number of a log. Six decimals are enough, and make the page smaller."""
    return float(digits) if len(digits) < 9 or "e" in digits else round(float(digits), 6)


def parse(line):
    """A line of a log as a dict, with None for NaN and infinity, which a page cannot read."""
    return json.loads(line, parse_float=shorten, parse_constant={}.get)


def load_metrics(path):
    """name -> its value in each line (None where a line lacks it), with what was spent until then."""
    with open(path, "rb") as file:
        lines = [parse(line) for line in file if line.endswith(b"\n")]
    tokens = 0
    seconds = 0.0
    for line in lines:
        tokens += line.get("tokens", 0)
        seconds += line.get("time/iteration", 0.0)
        line["sampled tokens"] = tokens
        line["seconds"] = round(seconds, 2)
    names = dict.fromkeys(name for line in lines for name in line)
    return {name: [line.get(name) for line in lines] for name in names}


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


def load(folder, iterations):
    """A run as the page has it, which puts its nodes in."""
    with open(f"{folder}/args.json", encoding="utf-8") as file:
        about = json.load(file)
    columns = load_metrics(f"{folder}/metrics.jsonl")
    return {
        "folder": os.path.normpath(folder),
        "script": about["script"].removesuffix(".py"),
        "commit": about["commit"][:7],
        "args": about["args"],
        "columns": columns,
        "warnings": list(find_warnings(folder, columns)),
        "logged": sum(iteration.nodes for iteration in chain(*iterations.values())),
        "nodes": [],
    }


def read_meanings():
    """environment (or "all") -> name -> what it means, as far as docs/ is there."""
    meanings = {}
    for file, pattern in MEANINGS.items():
        path = HERE / "docs" / file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        for environments, name, meaning in re.findall(pattern, text, re.MULTILINE):
            for environment in re.findall(r"\w+", environments) or ["all"]:
                meanings.setdefault(environment, {})[name] = meaning.replace("`", "")
    return meanings


def place_of(node):
    """Where a node is in the trees of its iteration and split."""
    return (node["task_number"], *node["path"])


def add_returns(nodes, gamma):
    """Makes rewards J lists (of one number if all agents share it), and adds as many returns to nodes with children: a
    joint action's reward plus gamma times the mean return of the node that it leads to."""
    mean_returns = {}  # place -> mean return of the node there, one number or one per agent
    for node in reversed(nodes):  # children before parents
        place = place_of(node)
        node["rewards"] = [reward if isinstance(reward, list) else [reward] for reward in node["rewards"]]
        later = [mean_returns.get((*place, j)) for j in range(len(node["rewards"]))]
        if any(later):
            node["returns"] = []
            for reward, returns in zip(node["rewards"], later):
                returns = returns or [0.0] * len(reward)
                node["returns"].append([round(now + gamma * then, 6) for now, then in zip(reward, returns)])
        columns = zip(*node.get("returns", node["rewards"]))
        mean_returns[place] = [sum(column) / len(column) for column in columns]


def choose(nodes, most):
    """At most so many nodes of each turn, spread evenly over those whose parent was chosen: always the same tasks. The
    nodes of a task that have one joint action each count as one, since they are compared with each other."""

    def turn_of(node):
        return node["turn"]

    places = set()
    for _, turn in groupby(sorted(nodes, key=turn_of), key=turn_of):
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

    node["task"] = place(node.get("task"))  # only turn 1 has it, and logs of earlier versions have none
    node["feedback"] = [place(x) for x in node["feedback"]]
    for agent in filter(None, node["agents"]):
        agent["prompt"] = place(agent["prompt"])
        agent["completions"] = [place(completion) for completion in agent["completions"]]
    return json.dumps(node, ensure_ascii=False, separators=(",", ":"))


def pack_iteration(iteration, run, most, texts):
    """Its nodes, each as a line."""
    with open(f"{run['folder']}/rollouts.jsonl", "rb") as file:
        file.seek(iteration.start)
        nodes = [parse(line) for line in file.read(iteration.size).splitlines()]
    add_returns(nodes, run["args"]["gamma"])
    return [pack_node(node | {"run": iteration.run}, texts) for node in choose(nodes, most)]


def compress(head, lines=()):
    """JSON and lines of JSON as a line of the page: gzip, base64."""
    text = "\n".join([json.dumps(head, ensure_ascii=False, separators=(",", ":")), *lines])
    data = gzip.compress(text.encode(errors="replace"), compresslevel=6, mtime=0)
    return base64.b64encode(data).decode() + "\n"


def pack(folders, most, room):
    """The data of the page, and all warnings. It has the rollouts of as many iterations as fit into so many bytes: of
    the first and the last one of each split, then of one half-way between, then of two between these three, and so on.
    """
    series = [find_iterations(f"{folder}/rollouts.jsonl", number) for number, folder in enumerate(folders)]
    runs = [load(folder, iterations) for folder, iterations in zip(folders, series)]
    splits = [iterations for run in series for iterations in run.values()]
    every = 1 << max(map(len, splits), default=1).bit_length()
    texts = {}  # string -> its place
    packed = set()  # iterations
    data = compress({"runs": runs, "meanings": read_meanings()})
    with tqdm(total=sum(map(len, splits)), unit=" iterations", disable=None) as progress:
        while every:
            known = len(texts)
            lines = []
            for iteration in sorted({x for times in splits for x in [*times[::every], times[-1]]} - packed):
                packed.add(iteration)
                lines += pack_iteration(iteration, runs[iteration.run], most, texts)
                progress.update()
            more = compress({"every": every, "texts": list(texts)[known:]}, lines)
            if known and len(data) + len(more) > room:
                break
            data += more
            if len(data) + 1.8 * len(more) > room:  # the next step has twice as many iterations, and texts repeat
                break
            every //= 2
    return data, chain(*(run["warnings"] for run in runs))


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
    template = HERE / "view.html"
    if not template.is_file():
        parser.error("view.html, the page without data, is not in the folder of view.py; copy it there")

    page = template.read_text(encoding="utf-8")
    data, warnings = pack(folders, args.nodes, 1e6 * args.megabytes - len(page))
    with open(args.output, "w", encoding="utf-8") as file:
        file.write(page.replace("@DATA@", data))  # base64 has no letter that ends a <script>
    print(f"{args.output}: {(len(page) + len(data)) / 1e6:.1f} MB, runs: {len(folders)}", *warnings, sep="\n")
