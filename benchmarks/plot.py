"""Draws learning curves, from files of benchmarks/compare.py or from run folders. Needs matplotlib.

    python benchmarks/plot.py results/tldr.csv results/tldr_ippo.csv --output docs/tldr
    python benchmarks/plot.py runs/* --metrics return
    python benchmarks/plot.py runs/*magrpo* --metrics structure length unique style
    python benchmarks/plot.py --check        recomputes the tables of the documents below

A run is named by its script and --labels. A metric is named as in metrics.jsonl; without a prefix it is that of the
evaluations. One metric: a line for each name. Several: a panel for each name with a line for each metric. A run folder
without returns, such as one of sft.py, is left out. The last value of each seed is printed.

A curve is the mean over seeds of each evaluation, at the mean of the tokens sampled until then. Its band is the 95% t
interval of the mean, drawn for at most three lines in a panel. --over seconds: by wall clock, without evaluations.

--check needs a comment of one line before a table of a document, such as

    <!-- figures {"rows": "results/tldr.csv: script == '{0}'", "columns": ["return mean end", "seconds range end"]} -->

rows: a file and the rows of it that count, with {0} for the first word of the table's row; or a list with one for each
row. columns, from the table's second: metric, statistic and place, as in "return range end" or, from another file,
"return mean end of results/tldr.csv"; null is not checked; a list: several in one cell. A statistic is mean, interval
(95% t), range or seeds, or p (exact permutation test over seeds against the table's first row, two-sided, of the
means); a place first, end, all rows or a number of tokens, which needs evaluations within a tenth of the run.
"""

import itertools
import json
import math
import os
import re
import sys
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pandas as pd
import tyro
from stamp import ROOT

# 97.5% quantiles of Student's t distribution for 2 to 10 seeds; more seeds take the last, which is a little too wide
T_QUANTILES = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262]
PAGES = ["results", "performance", "teaching", "credit", "details"]
DOCUMENTS = ["README.md", *[f"docs/{page}.md" for page in PAGES]]


@dataclass
class Args:
    # files of compare.py, or run folders; of equal names and seeds the last counts
    sources: tyro.conf.Positional[list[str]] = field(default_factory=list)
    labels: list[str] = field(default_factory=lambda: ["env_kwargs"])  # arguments that are part of a name
    output: str = "curves"  # .png is added
    metrics: list[str] = field(default_factory=lambda: ["return"])
    over: Literal["tokens", "seconds"] = "tokens"  # sampled by all agents, or of training
    check: bool = False  # compare documents with the files that they rest on, and draw nothing


# Statistics


def t_interval(values):
    """Mean of values (seeds,), and its 95% t interval; the mean alone for one seed."""
    n = len(values)
    mean = np.mean(values)
    if n == 1:
        return [mean]
    half = T_QUANTILES[min(n, 10) - 2] * np.std(values, ddof=1) / math.sqrt(n)
    return [mean, mean - half, mean + half]


def permutation_test(first, second):
    """p of the difference of two means: the share of the divisions of all values in two that differ as much."""
    pool = np.array([*first, *second])
    observed = abs(np.mean(first) - np.mean(second))
    differences = []
    for chosen in itertools.combinations(range(len(pool)), len(first)):
        rest = np.delete(pool, chosen)
        differences.append(abs(pool[list(chosen)].mean() - rest.mean()))
    return np.mean(np.array(differences) > observed - 1e-12)


def value_at(points, N):
    """The value at N tokens, between two evaluations at most a tenth of the run apart; nan if there are none."""
    tokens = points["tokens"].to_numpy()
    after = np.searchsorted(tokens, N)  # the first evaluation that is not before
    if after == len(tokens) or (tokens[after] != N and after == 0):
        return math.nan
    if tokens[after] != N and tokens[after] - tokens[after - 1] > 0.1 * tokens[-1]:
        return math.nan
    return np.interp(N, tokens, points["value"])


# Reading


def frame_of(path, labels):
    """A row for each evaluation (of a run folder also for each iteration): name, seed, origin, tokens, metrics."""
    if not os.path.isdir(path):
        with open(path) as file:
            origin = file.readline().removeprefix("# ").strip()
        frame = pd.read_csv(path, skiprows=1).rename(columns={"script": "name"})
        for label in set(labels) & set(frame):
            frame["name"] += " " + frame[label]
        return frame.assign(origin=origin)
    with open(f"{path}/args.json") as file:
        about = json.load(file)
    with open(f"{path}/metrics.jsonl") as file:  # the last line of a run in progress may be incomplete
        logged = [json.loads(line) for line in file if line.endswith("\n")]
    frame = pd.DataFrame([{"tokens": 0} | line for line in logged])  # an evaluation samples none
    frame = frame.rename(columns=lambda name: name.removeprefix("eval/"))
    frame["tokens"] = frame["tokens"].cumsum()
    frame["seconds"] = frame.get("time/iteration", pd.Series(0, frame.index)).fillna(0).cumsum()
    name = about["script"].removesuffix(".py")
    for label in labels:
        value = about["args"][label]
        if isinstance(value, dict):
            value = " ".join(itertools.chain(*value.items()))
        name += f" {value}" if value else ""
    origin = f"run folders, commit {about.get('commit', '-')[:7]}"
    return frame.assign(name=name, seed=about["args"]["seed"], origin=origin)


def read(args):
    """A row for each name, metric, seed and iteration: with tokens or seconds, value and origin."""
    frames = []
    for number, path in enumerate(args.sources):
        frame = frame_of(path, args.labels)
        if "return" not in frame:
            print(f"{path} is left out: it has no returns")
            continue
        names = ["name", "seed", "origin", "iteration", args.over]
        frames.append(frame.melt(names, args.metrics, "metric").dropna().assign(number=number))
    points = pd.concat(frames)
    last = points.groupby(["name", "metric", "seed"])["number"].transform("max")
    return points[points["number"] == last]


# Drawing


def draw(args, points):
    """Saves the figure."""
    import matplotlib.pyplot as plt

    panels = list(points["name"].unique()) if len(args.metrics) > 1 else [args.metrics[0]]
    figure, axes = plt.subplots(1, len(panels), figsize=(7 + 4 * (len(panels) - 1), 4.2), dpi=150, squeeze=False)
    lines = points.groupby(["name", "metric"], sort=False)
    unit, label = (1000, "sampled tokens, thousands") if args.over == "tokens" else (60, "minutes of training")
    for panel, plot in zip(panels, axes[0]):
        own_lines = [line for line in lines if panel in line[0]]
        for (name, metric), own in own_lines:
            # of each evaluation that all seeds have: the mean of their tokens, and mean and interval of their values
            curve = own.groupby("iteration").agg({args.over: "mean", "value": list})
            curve = curve[curve["value"].map(len) == own["seed"].nunique()]
            x = curve[args.over] / unit
            values = np.array([t_interval(each) for each in curve["value"]])  # (points, 3); of one seed (points, 1)
            marker = "o" if len(x) == 1 else None  # an evaluation without training
            plot.plot(x, values[:, 0], label=name if panel == metric else metric, linewidth=2, marker=marker)
            if len(own_lines) <= 3 and values.shape[1] > 1:
                plot.fill_between(x, *values[:, 1:].T, alpha=0.15, linewidth=0)
        plot.set(title=panel, xlabel=label)
        plot.spines[["top", "right"]].set_visible(False)
        plot.grid(alpha=0.25)
        plot.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(args.output + ".png")


# Checking documents


def figures_of(column, source, first_source):
    """The numbers of a cell, from the rows of its runs; first_source has those of the table's first row."""
    figure, _, own_source = column.partition(" of ")
    metric, statistic, place = figure.split()
    values = values_of(metric, place, own_source or source)
    if statistic == "seeds":
        return values
    if statistic == "range":
        return [min(values), max(values)]
    if statistic == "p":
        return [permutation_test(values_of(metric, place, first_source), values)]
    return t_interval(values)[: 1 if statistic == "mean" else None]


def values_of(metric, place, source):
    """A number for each seed."""
    path, _, query = source.partition(": ")
    frame = pd.read_csv(f"{ROOT}/{path}", skiprows=1)
    frame = frame.query(query) if query else frame
    values = []
    for _, rows in frame.groupby("seed"):
        points = rows.rename(columns={metric: "value"}).dropna(subset="value")
        if place in ("first", "end"):
            values.append(points["value"].iloc[0 if place == "first" else -1])
        elif place == "all":
            values.append(points["value"].mean())
        else:
            values.append(value_at(points, float(place)))
    return values


def differs(cell, numbers):
    """Whether the numbers in a cell are others, after rounding to the digits that it shows; 42k is 42 thousand."""
    if cell == "-":
        return not np.isnan(numbers).any()
    figures = re.findall(r"(-?\d+(?:,\d{3})*(?:\.(\d+))?)(k?)", cell)
    if len(figures) != len(numbers):
        return True
    for (digits, decimals, thousand), number in zip(figures, numbers):
        difference = float(digits.replace(",", "")) - (number / 1000 if thousand else number)
        if not abs(difference) < 0.5001 * 10 ** -len(decimals):  # so that nan differs
            return True
    return False


def check(document):
    """Prints the cells of a document's tables that differ from their files; returns how many."""
    with open(f"{ROOT}/{document}") as file:
        text = file.read()
    differences = 0
    for marker, lines in re.findall(r"(?:^<!-- figures (.*) -->\n+)?((?:^\|.*\n)+)", text, re.MULTILINE):
        head, _, *rows = lines.splitlines()
        if not marker:
            print(f"{document}: no figures are named for the table {head}")
            continue
        marker = json.loads(marker)
        sources = marker["rows"] if isinstance(marker["rows"], list) else [marker["rows"]] * len(rows)
        table = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
        words = [re.findall(r"\w+", row[0]) for row in table]
        sources = [source.format(*own) for source, own in zip(sources, words, strict=True)]
        for row, own, source in zip(table, words, sources):
            for cell, columns in zip(row[1:], marker["columns"]):
                columns = columns if isinstance(columns, list) else [columns]
                if not cell or columns == [None]:
                    continue
                parts = [figures_of(column.format(*own), source, sources[0]) for column in columns]
                numbers = [number for part in parts for number in part]
                if differs(cell, numbers):
                    differences += 1
                    print(f"{document}: {row[0]}: {cell}, but {', '.join(columns)}: {np.round(numbers, 4)}")
    return differences


def main(args):
    if args.check:
        differences = sum(check(document) for document in DOCUMENTS)
        print(f"{differences} cells differ")
        sys.exit(differences > 0)
    points = read(args)
    draw(args, points)
    values = points.groupby(["name", "metric", "seed"], sort=False)["value"].last()
    print(values.unstack().to_string())


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
