"""Draws learning curves, from files of benchmarks/compare.py or from run folders. Needs matplotlib.

    python benchmarks/plot.py results/tldr.csv results/tldr_ippo.csv --output docs/tldr
    python benchmarks/plot.py runs/* --metrics return
    python benchmarks/plot.py runs/*magrpo* --metrics structure length unique style

A run is named by its script and --labels. A metric is named as in metrics.jsonl; without a prefix it is that of the
evaluations. A metric has a panel, a name a line. A run folder without returns, such as one of sft.py, is left out. The
last value of each seed is printed.

A curve is the mean over seeds of each evaluation, at the mean of the tokens sampled until then. Its band is the 95% t
interval of the mean, drawn for at most three lines in a panel.
"""

import json
import math
import os
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import pandas as pd
import tyro

# 97.5% quantiles of Student's t distribution for 2 to 10 seeds; more seeds take the last, which is a little too wide
T_QUANTILES = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262]


@dataclass
class Args:
    # files of compare.py, or run folders; of equal names and seeds the last counts
    sources: tyro.conf.Positional[list[str]]
    labels: list[str] = field(default_factory=lambda: ["env_kwargs"])  # arguments that are part of a name
    output: str = "curves"  # .png is added
    metrics: list[str] = field(default_factory=lambda: ["return"])


def estimate_mean(values):
    """Mean of values (seeds,), and its 95% t interval; the mean alone for one seed."""
    n = len(values)
    mean = np.mean(values)
    if n == 1:
        return [mean]
    half = T_QUANTILES[min(n, 10) - 2] * np.std(values, ddof=1) / math.sqrt(n)
    return [mean, mean - half, mean + half]


def read_frame(path, labels):
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
            value = " ".join(chain(*value.items()))
        name += f" {value}" if value else ""
    return frame.assign(name=name, seed=about["args"]["seed"])


def read(args):
    """A row for each name, metric, seed and iteration: with tokens and value."""
    frames = []
    for path in args.sources:
        frame = read_frame(path, args.labels)
        if "return" not in frame:
            print(f"{path} is left out: it has no returns")
            continue
        frames.append(frame.melt(["name", "seed", "iteration", "tokens"], args.metrics, "metric").dropna())
    return pd.concat(frames).drop_duplicates(["name", "metric", "seed", "iteration"], keep="last")


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
            values = np.array([estimate_mean(each) for each in curve["value"]])  # (points, 3); of one seed (points, 1)
            plot.plot(x, values[:, 0], label=name, linewidth=2)
            if len(lines) <= 3 and values.shape[1] > 1:
                plot.fill_between(x, *values[:, 1:].T, alpha=0.15, linewidth=0)
        plot.set(title=metric, xlabel="sampled tokens, thousands")
        plot.grid()
        plot.legend()
    figure.savefig(args.output + ".png")


def main(args):
    points = read(args)
    draw(args, points)
    values = points.groupby(["name", "metric", "seed"], sort=False)["value"].last()
    print(values.unstack().to_string())


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
