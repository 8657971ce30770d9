"""Draws learning curves and a table, from files of benchmarks/compare.py or from run folders. Needs matplotlib.

    python benchmarks/plot.py results/tldr.csv results/tldr_ippo.csv --output docs/tldr
    python benchmarks/plot.py runs/* --metrics return
    python benchmarks/plot.py runs/*magrpo* --metrics structure length unique style
    python benchmarks/plot.py --check        recomputes the tables of the documents below

A run is named by its script and --labels. A metric is named as in metrics.jsonl; without a prefix it is that of the
evaluations. One metric: a line for each name. Several: a panel for each name with a line for each metric. A run folder
without returns, such as one of sft.py, is left out.

A curve is the mean over seeds of each evaluation, at the mean of the tokens sampled until then. Its band is the 95% t
interval of the mean, drawn for at most three lines in a panel. The table compares all at N tokens, the total of the
run that sampled least; p is that of a permutation test over seeds against the first name (two-sided, of the means).
There is a dash where a run has no evaluation within a tenth of it on both sides of N, and where one seed has no
interval.

--check needs a comment of one line before a table of a document, such as

    <!-- figures {"rows": "results/tldr.csv: script == '{0}'", "columns": ["return mean end", "seconds range end"]} -->

rows: a file and the rows of it that count, with {0} for the first word of the table's row; or a list with one for each
row. columns, from the table's second: metric, statistic (mean, interval, range or seeds) and place (first, end, all
rows or a number of tokens), as in "pass@1 range end" or, from another file, "return mean end of results/tldr.csv";
null is not checked; a list: several in one cell.
"""

import itertools
import json
import math
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import tyro
from stamp import ROOT

# 97.5% quantiles of Student's t distribution for 2 to 10 seeds; more seeds take the last, which is a little too wide
T_QUANTILES = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262]
DOCUMENTS = ["README.md", "docs/results.md", "docs/performance.md", "docs/teaching.md"]


@dataclass
class Args:
    # files of compare.py, or run folders; of equal names and seeds the last counts
    sources: tyro.conf.Positional[list[str]] = field(default_factory=list)
    labels: list[str] = field(default_factory=lambda: ["env_kwargs"])  # arguments that are part of a name
    output: str = "curves"  # .png and .md are added
    metrics: list[str] = field(default_factory=lambda: ["return"])
    check: bool = False  # compare documents with the files that they rest on, and draw nothing


@dataclass
class Line:
    """A metric of the runs with one name."""

    name: str
    metric: str
    origin: str
    seeds: dict = field(default_factory=dict)  # seed -> frame with iteration, tokens and value


def fail(sentence):
    print(f"plot.py: error: {sentence}", file=sys.stderr)
    sys.exit(2)


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
    name = about["script"].removesuffix(".py")
    for label in labels:
        if label not in about["args"]:
            fail(f"--labels {label}: no argument of {path}, which has {', '.join(about['args'])}.")
        value = about["args"][label]
        if isinstance(value, dict):
            value = " ".join(f"{key} {option}" for key, option in value.items())
        name += f" {value}" if value else ""
    return frame.assign(
        name=name, seed=about["args"]["seed"], origin=f"run folders, commit {about.get('commit', '-')[:7]}"
    )


def read(args):
    """A Line for each name and metric."""
    lines = {}
    for path in args.sources:
        if os.path.isdir(path) and "eval/return" not in Path(path, "metrics.jsonl").read_text():
            print(f"{path} is left out: it has no returns")
            continue
        frame = frame_of(path, args.labels)
        for metric in args.metrics:
            if metric not in frame:
                fail(f"--metrics {metric}: not in {path}, which has {', '.join(frame)}.")
            points = frame.rename(columns={metric: "value"})
            points = points[["name", "seed", "origin", "iteration", "tokens", "value"]].dropna()
            for (name, seed, origin), own in points.groupby(["name", "seed", "origin"], sort=False):
                line = lines.setdefault((name, metric), Line(name, metric, origin))
                line.seeds[seed] = own
    if not lines:
        fail("nothing is left to draw; give files of compare.py, or run folders.")
    return list(lines.values())


# Drawing


def curve_of(line):
    """Of each evaluation that all seeds have: tokens (points,), and mean and interval (points, 3; of one seed 1)."""
    points = pd.concat(line.seeds.values()).groupby("iteration").agg({"tokens": "mean", "value": list})
    points = points[points["value"].map(len) == len(line.seeds)]
    return points["tokens"].to_numpy(), np.array([t_interval(values) for values in points["value"]])


def draw(args, lines):
    """Saves the figure."""
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError:
        fail("the figure needs matplotlib; pip install matplotlib.")
    panels = list(dict.fromkeys(line.name for line in lines)) if len(args.metrics) > 1 else [""]
    figure, axes = plt.subplots(1, len(panels), figsize=(7 + 4 * (len(panels) - 1), 4.2), dpi=150, squeeze=False)
    for panel, plot in zip(panels, axes[0]):
        own = [line for line in lines if panel in ("", line.name)]
        for line in own:
            tokens, values = curve_of(line)
            label = line.metric if panel else line.name
            marker = "o" if len(tokens) == 1 else None  # an evaluation without training
            plot.plot(tokens / 1000, values[:, 0], label=label, linewidth=2, marker=marker)
            if len(own) <= 3 and len(line.seeds) > 1:
                plot.fill_between(tokens / 1000, *values[:, 1:].T, alpha=0.15, linewidth=0)
        plot.set(title=panel, xlabel="sampled tokens, thousands", ylabel="" if panel else args.metrics[0])
        plot.spines[["top", "right"]].set_visible(False)
        plot.grid(alpha=0.25)
        plot.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(args.output + ".png")


def cell_of(values):
    """The mean and its interval; dashes for what there is not."""
    if np.isnan(values).any():
        return "-"
    mean, *interval = [f"{number:.2f}" for number in t_interval(values)]
    return f"**{mean}** ({' to '.join(interval) or '-'})"


def table(lines):
    """Lines of markdown."""
    totals = [points["tokens"].max() for line in lines for points in line.seeds.values()]
    N = min([total for total in totals if total > 0], default=0)
    rows = [f"| script | metric | seeds | at first | at {N:,.0f} tokens | lowest, highest seed | p | at the end |"]
    rows.append("|---" * 8 + "|")
    references = {}  # metric -> values at N tokens of the first name
    for line in lines:
        values = [value_at(points, N) for points in line.seeds.values()]
        reference = references.setdefault(line.metric, values)
        p = "-"
        if (
            values is not reference
            and len(values) + len(reference) <= 10
            and not np.isnan([*values, *reference]).any()
        ):
            p = f"{permutation_test(reference, values):.3f}"
        extremes = "-" if np.isnan(values).any() else f"{min(values):.2f}, {max(values):.2f}"
        first = np.mean([points["value"].iloc[0] for points in line.seeds.values()])
        last = [points["value"].iloc[-1] for points in line.seeds.values()]
        cells = [line.name, line.metric, str(len(values)), f"{first:.2f}", cell_of(values), extremes, p, cell_of(last)]
        rows.append(f"| {' | '.join(cells)} |")
    rows += ["", "Means over seeds, with their 95% t interval; p: permutation test against the first."]
    for origin in dict.fromkeys(line.origin for line in lines):
        names = dict.fromkeys(line.name for line in lines if line.origin == origin)
        rows.append(f"- {', '.join(names)}: {origin}")
    return rows


# Checking documents


def figures_of(column, source):
    """The numbers of a cell, from the rows of its runs."""
    figure, _, own_source = column.partition(" of ")
    path, _, query = (own_source or source).partition(": ")
    frame = pd.read_csv(f"{ROOT}/{path}", skiprows=1)
    frame = frame.query(query) if query else frame
    metric, statistic, place = figure.split()
    values = []
    for _, rows in frame.groupby("seed"):
        points = rows.rename(columns={metric: "value"}).dropna(subset="value")
        if place in ("first", "end"):
            values.append(points["value"].iloc[0 if place == "first" else -1])
        elif place == "all":
            values.append(points["value"].mean())
        else:
            values.append(value_at(points, float(place)))
    if statistic == "seeds":
        return values
    if statistic == "range":
        return [min(values), max(values)]
    return t_interval(values)[: 1 if statistic == "mean" else None]


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
    tables = re.findall(r"(?:^<!-- figures (.*) -->\n+)?((?:^\|.*\n)+)", text, re.MULTILINE)
    for marker, lines in tables:
        head, _, *rows = lines.splitlines()
        if not marker:
            print(f"{document}: no figures are named for the table {head}")
            continue
        marker = json.loads(marker)
        sources = marker["rows"] if isinstance(marker["rows"], list) else [marker["rows"]] * len(rows)
        for row, source in zip(rows, sources, strict=True):
            name, *cells = [cell.strip() for cell in row.strip("|").split("|")]
            words = re.findall(r"\w+", name)
            for cell, columns in zip(cells, marker["columns"]):
                columns = columns if isinstance(columns, list) else [columns]
                if not cell or columns == [None]:
                    continue
                numbers = [n for column in columns for n in figures_of(column.format(*words), source.format(*words))]
                if differs(cell, numbers):
                    differences += 1
                    print(f"{document}: {name}: {cell}, but {', '.join(columns)}: {np.round(numbers, 4)}")
    return differences


def main(args):
    if args.check:
        differences = sum(check(document) for document in DOCUMENTS)
        print(f"{differences} cells differ")
        sys.exit(differences > 0)
    lines = read(args)
    draw(args, lines)
    rows = table(lines)
    with open(args.output + ".md", "w") as file:
        file.write("\n".join(rows) + "\n")
    print("\n".join(rows))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
