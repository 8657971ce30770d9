"""Draws learning curves and writes a table from the results/*.csv of benchmarks/compare.py. Needs matplotlib.

    python benchmarks/plot.py                                          the curves and the table of tldr
    python benchmarks/plot.py --scaling results/scaling_curves.csv     the curves of benchmarks/scaling.py

A curve is the interquartile mean over seeds (Agarwal et al., 2021: the mean of the middle half), interpolated at equal
numbers of sampled tokens; the band is its 95% bootstrap interval over seeds. The table compares the runs at an
equal number of tokens: the total of the run that sampled least.
"""

import csv
import itertools
import sys
from dataclasses import dataclass, field

import numpy as np
import tyro
from stamp import ROOT, Count

try:
    import matplotlib
except ImportError:
    sys.exit("plot.py: error: matplotlib is missing; pip install matplotlib")
matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = ["#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#9c6b4e", "#a463f2"]


@dataclass
class Args:
    results: list[str] = field(  # a script's last file counts
        default_factory=lambda: [f"{ROOT}/results/tldr.csv", f"{ROOT}/results/tldr_ippo.csv"]
    )
    output: str = f"{ROOT}/docs/tldr"  # .png and .md are added
    metric: str = "return"
    samples: Count = 2000  # of the bootstrap
    tokens: float = float("inf")  # draw and compare up to this many, if no run ends earlier
    scaling: str | None = None  # instead draw this CSV of scaling.py to docs/scaling.png


def interquartile_mean(values):  # (..., seeds) -> (...)
    """Mean of the middle half; if the number of seeds is not a multiple of four, edge seeds count partially."""
    values, n = np.sort(values, axis=-1), values.shape[-1]
    edges = np.arange(n + 1) / n
    weights = np.clip(np.minimum(edges[1:], 0.75) - np.maximum(edges[:-1], 0.25), 0, None)
    return (values * weights).sum(-1) / weights.sum()


def interval(values, samples, rng):  # (points, seeds) -> (2, points)
    """95% bootstrap interval of the interquartile mean over seeds."""
    seeds = values.shape[-1]
    draws = interquartile_mean(values[:, rng.integers(seeds, size=(samples, seeds))])  # (points, samples)
    return np.percentile(draws, [2.5, 97.5], axis=-1)


def read(flag, path, column):
    """A CSV file's first line, and its rows; exits with a sentence if there is no such file or no such column."""
    try:
        with open(path) as file:
            stamp, rows = file.readline().removeprefix("# ").strip(), list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"plot.py: error: {flag} {path}: {error}; give a CSV file of the benchmarks.")
    if not rows or column not in rows[0]:
        sys.exit(f"plot.py: error: {flag} {path}: no column {column!r}, only {[*rows[0]] if rows else []}.")
    return stamp, rows


def draw_scaling(path):
    """A panel per quantity: time over computed tokens, with linear extrapolations of the first point."""
    rows = [row for row in read("--scaling", path, "gflop")[1] if row["part"] == "curves"]
    if not rows:
        sys.exit(f"plot.py: error: --scaling {path} has no curves; give a file of scaling.py --parts curves.")
    names = list(dict.fromkeys(row["what"] for row in rows))
    figure, panels = plt.subplots(2, 3, figsize=(9, 5), dpi=150)
    for name, axes in zip(names, panels.flat):
        points = [(row["tokens"], row["seconds"], row["gflop"]) for row in rows if row["what"] == name]
        tokens, seconds, gflop = np.array(points, float).T
        values = [row["value"] for row in rows if row["what"] == name]
        axes.loglog(tokens, seconds, "o-", color=COLORS[0], linewidth=2)
        axes.loglog(tokens, seconds[0] * tokens / tokens[0], "--", color="gray", linewidth=1)
        axes.loglog(tokens, seconds[0] * gflop / gflop[0], ":", color="gray", linewidth=1)
        for value, *point in zip(values, tokens, seconds):
            axes.annotate(value, point, textcoords="offset points", xytext=(4, -10), fontsize=7)
        axes.minorticks_off()
        axes.set_xticks(tokens[[0, -1]], [f"{x:,.0f}" for x in tokens[[0, -1]]], fontsize=7)
        axes.set_yticks(seconds[[0, -1]], [f"{y:.1f}" for y in seconds[[0, -1]]], fontsize=7)
        axes.set_title(name.replace("_", " "), fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.supxlabel("tokens computed (of prompts once, of completions)", fontsize=9)
    figure.supylabel("seconds to sample and train\ndashed: as tokens, dotted: as products", fontsize=9)
    figure.tight_layout()
    figure.savefig(f"{ROOT}/docs/scaling.png")


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    if args.scaling:
        draw_scaling(args.scaling)
        sys.exit()
    runs, from_file = {}, {}  # script -> its runs; script -> the stamp of their file
    for path in args.results:
        stamp, rows = read("--results", path, args.metric)
        runs |= {row["script"]: {} for row in rows}
        from_file |= dict.fromkeys((row["script"] for row in rows), stamp)
        for row in rows:
            points = runs[row["script"]].setdefault(row["seed"], [])
            points.append((float(row["tokens"]), float(row[args.metric])))
    most = min(args.tokens, *(points[-1][0] for seeds in runs.values() for points in seeds.values()))
    grid, rng = np.linspace(0, most, 100), np.random.default_rng(0)
    figure, axes = plt.subplots(figsize=(7, 4.2), dpi=150)
    lines = [
        f"| script | seeds | {args.metric} at first | at {most:,.0f} tokens (95% interval) | lowest, highest seed |",
        "|---|---|---|---|---|",
    ]
    for color, (script, seeds) in zip(itertools.cycle(COLORS), runs.items()):
        curves = np.array([np.interp(grid, *zip(*points)) for points in seeds.values()]).T  # (100, seeds)
        middle, (low, high) = interquartile_mean(curves), interval(curves, args.samples, rng)
        axes.plot(grid / 1000, middle, label=script, color=color, linewidth=2)
        axes.fill_between(grid / 1000, low, high, color=color, alpha=0.15, linewidth=0)
        last = f"**{middle[-1]:.2f}** ({low[-1]:.2f} to {high[-1]:.2f})"
        lines.append(
            f"| {script} | {len(seeds)} | {middle[0]:.2f} | {last} | {curves[-1].min():.2f}, {curves[-1].max():.2f} |"
        )
    axes.set(xlabel="sampled tokens, thousands", ylabel=f"evaluation {args.metric}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(args.output + ".png")
    lines += ["", "Interquartile means over seeds."]
    for stamp in dict.fromkeys(from_file.values()):
        lines.append(f"- {', '.join(script for script in runs if from_file[script] == stamp)}: {stamp}")
    with open(args.output + ".md", "w") as file:
        file.write("\n".join(lines) + "\n")
    print("\n".join(lines))
