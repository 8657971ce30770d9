"""Draws learning curves, from files of benchmarks/compare.py or from run folders. Needs matplotlib.

    python benchmarks/plot.py results/tldr.csv results/tldr_ippo.csv --output docs/tldr
    python benchmarks/plot.py runs/* --metrics return
    python benchmarks/plot.py runs/*magrpo* --metrics structure length unique style
    python benchmarks/plot.py --check        recomputes the tables of the documents below
    python benchmarks/plot.py --aggregate    one figure a script over tldr, humaneval and gsm8k with roles split

A run is named by its script and --labels. A metric is named as in metrics.jsonl; without a prefix it is that of the
evaluations. A metric has a panel, a name a line. A run folder without returns, such as one of sft.py, is left out. The
last value of each seed is printed.

A curve is the mean over seeds of each evaluation, at the mean of the tokens sampled until then. Its band is the 95% t
interval of the mean, drawn for at most three lines in a panel.

--aggregate: a run's score is (return - b) / (largest return - b), with b the mean return before training. tldr and
gsm8k are read at equal numbers of tokens, humaneval at equal numbers of iterations. A row has a seed's mean score.
corrected: p of the mean difference of a script's scores to magrpo.py's of the same task and seed, by an exact
sign-flip test, since a seed has its own held-out tasks, the same for all scripts; after Holm's correction.

--check needs a comment of one line before a table of a document, such as

    <!-- figures {"rows": "results/tldr.csv: script == '{0}'", "columns": ["return mean end", "seconds range end"]} -->

rows: a file and the rows of it that count, with {0} for the first word of the table's row; or a list with one for each
row. columns, from the table's second: metric, statistic and place, as in "return range end" or, from another file,
"return mean end of results/tldr.csv"; null is not checked; a list: several in one cell. A statistic is mean, interval
(95% t), range or seeds; a place first, end, all rows or a number of tokens, between two evaluations.
"""

import itertools
import json
import math
import os
import re
import sys
from dataclasses import dataclass, field
from glob import glob

import numpy as np
import pandas as pd
import tyro
from stamp import ROOT, stamp, write_rows

# 97.5% quantiles of Student's t distribution for 2 to 10 seeds; more seeds take the last, which is a little too wide
T_QUANTILES = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262]
SCRIPTS = ["magrpo", "marloo", "maremax", "mareinforce", "ippo", "mappo", "madpo"]
TASKS = [  # the largest return, where a run is read, and files of the critic-free scripts and of those with critics
    (2.98, "230960", "results/tldr.csv", "results/tldr.csv"),
    (4.0, "end", "results/humaneval.csv", "results/humaneval.csv"),
    (1.0, "end", "results/gsm8k_split_tree.csv", "results/gsm8k_split_critics.csv"),
]
DOCUMENTS = ["README.md", *sorted(glob("docs/*.md", root_dir=ROOT))]


@dataclass
class Args:
    # files of compare.py, or run folders; of equal names and seeds the last counts
    sources: tyro.conf.Positional[list[str]] = field(default_factory=list)
    labels: list[str] = field(default_factory=lambda: ["env_kwargs"])  # arguments that are part of a name
    output: str = "curves"  # .png is added
    metrics: list[str] = field(default_factory=lambda: ["return"])
    aggregate: bool = False  # one figure a script over all tasks, as results/aggregate.csv
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


def sign_flip_test(differences):
    """p of a mean of differences: the share of the choices of their signs with a mean as large."""
    signs = np.array(list(itertools.product([1, -1], repeat=len(differences))))
    sums = abs(signs @ differences)
    return np.mean(sums > sums[0] - 1e-9)


# Reading


def frame_of(path, labels):
    """A row for each evaluation (of a run folder also for each iteration): name, seed, tokens, metrics."""
    if not os.path.isdir(path):
        frame = pd.read_csv(path, skiprows=1).rename(columns={"script": "name"})
        for label in set(labels) & set(frame):
            frame["name"] += " " + frame[label]
        return frame
    with open(f"{path}/args.json") as file:
        about = json.load(file)
    frame = pd.read_json(f"{path}/metrics.jsonl", lines=True)
    frame = frame.rename(columns=lambda name: name.removeprefix("eval/"))
    frame["tokens"] = frame["tokens"].fillna(0).cumsum()
    name = about["script"].removesuffix(".py")
    for label in labels:
        value = about["args"][label]
        if isinstance(value, dict):
            value = " ".join(itertools.chain(*value.items()))
        name += f" {value}" if value else ""
    return frame.assign(name=name, seed=about["args"]["seed"])


def read(args):
    """A row for each name, metric, seed and iteration: with tokens and value."""
    frames = []
    for path in args.sources:
        frame = frame_of(path, args.labels)
        if "return" not in frame:
            print(f"{path} is left out: it has no returns")
            continue
        frames.append(frame.melt(["name", "seed", "iteration", "tokens"], args.metrics, "metric").dropna())
    return pd.concat(frames).drop_duplicates(["name", "metric", "seed", "iteration"], keep="last")


# Drawing


def draw(args, points):
    """Saves the figure."""
    import matplotlib.pyplot as plt

    size = (3 + 4 * len(args.metrics), 4.2)
    figure, axes = plt.subplots(1, len(args.metrics), figsize=size, dpi=150, squeeze=False, layout="tight")
    for metric, plot in zip(args.metrics, axes[0]):
        lines = points[points["metric"] == metric].groupby("name", sort=False)
        for name, own in lines:
            # of each evaluation that all seeds have: the mean of their tokens, and mean and interval of their values
            curve = own.groupby("iteration").agg({"tokens": "mean", "value": list})
            curve = curve[curve["value"].map(len) == own["seed"].nunique()]
            x = curve["tokens"] / 1000
            values = np.array([t_interval(each) for each in curve["value"]])  # (points, 3); of one seed (points, 1)
            plot.plot(x, values[:, 0], label=name, linewidth=2)
            if len(lines) <= 3 and values.shape[1] > 1:
                plot.fill_between(x, *values[:, 1:].T, alpha=0.15, linewidth=0)
        plot.set(title=metric, xlabel="sampled tokens, thousands")
        plot.spines[["top", "right"]].set_visible(False)
        plot.grid(alpha=0.25)
        plot.legend(frameon=False)
    figure.savefig(args.output + ".png")


# Checking documents


def figures_of(column, source):
    """The numbers of a cell, from the rows of its runs."""
    figure, _, own_source = column.partition(" of ")
    metric, statistic, place = figure.split()
    values = values_of(metric, place, own_source or source)
    if statistic == "seeds":
        return values
    if statistic == "range":
        return [min(values), max(values)]
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
            values.append(np.interp(float(place), points["tokens"], points["value"], math.nan, math.nan))
    return values


def differs(cell, numbers):
    """Whether the numbers in a cell are others, after rounding to the digits that it shows."""
    figures = re.findall(r"(-?\d+(?:,\d{3})*(?:\.(\d+))?)", cell)
    if len(figures) != len(numbers):
        return True
    for (digits, decimals), number in zip(figures, numbers):
        if not abs(float(digits.replace(",", "")) - number) < 0.5001 * 10 ** -len(decimals):  # so that nan differs
            return True
    return False


def check(document):
    """Prints the cells of a document's tables that differ from their files; returns how many."""
    with open(f"{ROOT}/{document}") as file:
        text = file.read()
    differences = 0
    for marker, lines in re.findall(r"^<!-- figures ([\s\S]*?) -->\n+((?:^\|.*\n)+)", text, re.MULTILINE):
        _, _, *rows = lines.splitlines()
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
                parts = [figures_of(column.format(*own), source) for column in columns]
                numbers = [number for part in parts for number in part]
                if differs(cell, numbers):
                    differences += 1
                    print(f"{document}: {row[0]}: {cell}, but {', '.join(columns)}: {np.round(numbers, 4)}")
    return differences


# All tasks together


def aggregate():
    """Writes results/aggregate.csv: a row for each script, compared with the first."""
    tables = []
    for most, place, *paths in TASKS:
        sources = [f"{paths[script in ('ippo', 'mappo')]}: script == '{script}'" for script in SCRIPTS]
        before = np.mean([values_of("return", "first", source) for source in sources])
        returns = np.array([values_of("return", place, source) for source in sources])
        tables.append((returns - before) / (most - before))
    scores = np.stack(tables, 1)  # (script, task, seed)
    tests = {script: sign_flip_test((own - scores[0]).ravel()) for script, own in zip(SCRIPTS[1:], scores[1:])}
    p = pd.Series(tests).sort_values()
    # Holm: times the number of comparisons that are left, and at least as large as those before it
    corrected = (p * np.arange(len(p), 0, -1)).cummax().clip(upper=1)
    rows = []
    for script, own in zip(SCRIPTS, scores):
        about = {"script": script, "corrected": corrected.get(script)}
        rows += [about | {"seed": k, "score": score} for k, score in enumerate(own.mean(0), 1)]
    frame = pd.DataFrame(rows)
    write_rows(f"{ROOT}/results/aggregate.csv", stamp("aggregate"), frame)
    print(frame.round(3).to_string())


def main(args):
    if args.aggregate:
        aggregate()
        return
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
