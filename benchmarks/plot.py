"""Draws learning curves and writes a table from the results/*.csv of benchmarks/compare.py. Needs matplotlib.

    python benchmarks/plot.py

A curve is the interquartile mean over seeds (Agarwal et al., 2021: the mean of the middle half), interpolated at equal
numbers of sampled tokens; the band is its 95% bootstrap interval over seeds. The table compares the runs at an
equal number of tokens: the total of the run that sampled least.
"""

import csv
import itertools
from dataclasses import dataclass, field

import matplotlib
import numpy as np
import tyro
from stamp import ROOT

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = ["#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#9c6b4e", "#a463f2"]


@dataclass
class Args:
    results: list[str] = field(default_factory=lambda: [f"{ROOT}/results/tldr.csv"])  # a script's last file counts
    output: str = f"{ROOT}/docs/tldr"  # .png and .md are added
    metric: str = "return"
    samples: int = 2000  # of the bootstrap
    tokens: float = float("inf")  # draw and compare up to this many, if no run ends earlier


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


def read(args):
    """Script -> seed -> points (tokens, metric); and script -> the stamp of its file."""
    runs, stamps = {}, {}
    for path in args.results:
        with open(path) as file:
            stamp, rows = file.readline().removeprefix("# ").strip(), list(csv.DictReader(file))
        for script in dict.fromkeys(row["script"] for row in rows):
            runs[script], stamps[script] = {}, stamp
        for row in rows:
            point = float(row["tokens"]), float(row[args.metric])
            runs[row["script"]].setdefault(row["seed"], []).append(point)
    return runs, stamps


def main(args):
    runs, stamps = read(args)
    most = min(args.tokens, *(points[-1][0] for seeds in runs.values() for points in seeds.values()))
    grid, rng = np.linspace(0, most, 100), np.random.default_rng(0)
    figure, axes = plt.subplots(figsize=(7, 4.2), dpi=150)
    lines = [f"| script | seeds | {args.metric} at first | at {most:,.0f} tokens (95% interval) "]
    lines[0] += "| lowest, highest seed |"
    lines.append("|---|---|---|---|---|")
    for color, (script, seeds) in zip(itertools.cycle(COLORS), runs.items()):
        curves = np.array([np.interp(grid, *zip(*points)) for points in seeds.values()]).T  # (100, seeds)
        middle = interquartile_mean(curves)
        low, high = interval(curves, args.samples, rng)
        axes.plot(grid / 1000, middle, label=script, color=color, linewidth=2)
        axes.fill_between(grid / 1000, low, high, color=color, alpha=0.15, linewidth=0)
        last = f"**{middle[-1]:.2f}** ({low[-1]:.2f} to {high[-1]:.2f})"
        extremes = f"{curves[-1].min():.2f}, {curves[-1].max():.2f}"
        lines.append(f"| {script} | {len(seeds)} | {middle[0]:.2f} | {last} | {extremes} |")
    axes.set(xlabel="sampled tokens, thousands", ylabel=f"evaluation {args.metric}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(args.output + ".png")
    lines += ["", "Interquartile means over seeds."]
    for stamp in dict.fromkeys(stamps.values()):
        lines.append(f"- {', '.join(script for script in runs if stamps[script] == stamp)}: {stamp}")
    with open(args.output + ".md", "w") as file:
        file.write("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
