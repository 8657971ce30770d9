"""Draws learning curves and a table, from files of benchmarks/compare.py or from run folders. Needs matplotlib.

    python benchmarks/plot.py results/tldr.csv results/tldr_ippo.csv --output docs/tldr
    python benchmarks/plot.py runs/* --metrics return
    python benchmarks/plot.py runs/*magrpo* --metrics structure length unique style --relative
    python benchmarks/plot.py runs/*magrpo* --metrics reward_turn1 reward_turn2

A run is named by its script and --labels. A metric is named as in metrics.jsonl; without a prefix it is that of the
evaluations. One metric: a line for each name. Several: a panel for each name with a line for each metric; --relative
divides each by its largest value.

A curve is the interquartile mean over seeds (Agarwal et al., 2021: the mean of the middle half), interpolated at equal
numbers of sampled tokens; the band is its 95% bootstrap interval over seeds. The table compares the runs at an
equal number of tokens: the total of the run that sampled least.
"""

import itertools
import json
import os
import sys
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import tyro

COLORS = ["#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#9c6b4e", "#a463f2", "#9498a0"]


@dataclass
class Args:
    sources: tyro.conf.Positional[
        list[str]
    ]  # files of compare.py, or run folders; of equal names and seeds the last counts
    labels: list[str] = field(default_factory=lambda: ["env_kwargs"])  # arguments that are part of a name
    output: str = "curves"  # .png and .md are added
    metrics: list[str] = field(default_factory=lambda: ["return"])
    relative: bool = False  # each metric divided by its largest value
    samples: int = 2000  # of the bootstrap


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


def frame_of(path, labels):
    """A row for each evaluation (of a run folder also for each iteration): name, seed, origin, tokens, metrics."""
    if os.path.isdir(path):
        with open(os.path.join(path, "args.json")) as file:
            about = json.load(file)
        frame = pd.read_json(os.path.join(path, "metrics.jsonl"), lines=True)
        frame = frame.rename(columns=str_after_eval)
        frame["tokens"] = frame["tokens"].fillna(0).cumsum()
        frame["name"] = about["script"].removesuffix(".py")
        for label in labels:
            value = about["args"][label]
            frame["name"] += f" {shown(value)}" if value else ""
        return frame.assign(seed=about["args"]["seed"], origin=f"run folders, commit {about['commit'][:7]}")
    with open(path) as file:
        origin = file.readline().removeprefix("# ").strip()
    frame = pd.read_csv(path, skiprows=1).rename(columns={"script": "name"})
    for label in set(labels) & set(frame):
        frame["name"] += " " + frame[label]
    return frame.assign(origin=origin)


def str_after_eval(name):
    return name.removeprefix("eval/")


def shown(value):
    return " ".join(f"{key} {text}" for key, text in value.items()) if isinstance(value, dict) else str(value)


def read(args):
    """(name, metric) -> seed -> points (tokens, value); and name -> the origin of its rows."""
    runs, origins = {}, {}
    for path in args.sources:
        frame = frame_of(path, args.labels)
        if unknown := set(args.metrics) - set(frame):
            sys.exit(f"plot.py: error: --metrics {min(unknown)}: not in {path}, which has {', '.join(frame)}.")
        for (name, seed), rows in frame.groupby(["name", "seed"], sort=False):
            origins[name] = rows["origin"].iloc[0]
            for metric in args.metrics:
                points = rows[["tokens", metric]].dropna().to_numpy()  # (points, 2)
                runs.setdefault((name, metric), {})[seed] = points
    return runs, origins


def draw(args, runs, most):
    """Saves the figure; returns (script, metric) -> curves (100, seeds), their middle (100,) and interval (2, 100)."""
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError:
        sys.exit("plot.py: error: the figure needs matplotlib; pip install matplotlib.")
    grid, rng, drawn = np.linspace(0, most, 100), np.random.default_rng(0), {}
    panels = list(dict.fromkeys(script for script, _ in runs)) if len(args.metrics) > 1 else [""]
    figure, axes = plt.subplots(1, len(panels), figsize=(7 + 4 * (len(panels) - 1), 4.2), dpi=150, squeeze=False)
    for panel, plot in zip(panels, axes[0]):
        own = {key: seeds for key, seeds in runs.items() if panel in ("", key[0])}
        for color, (key, seeds) in zip(itertools.cycle(COLORS), own.items()):
            curves = np.array([np.interp(grid, *points.T) for points in seeds.values()]).T  # (100, seeds)
            curves = curves / np.abs(curves).max() if args.relative else curves
            middle, (low, high) = interquartile_mean(curves), interval(curves, args.samples, rng)
            drawn[key] = curves, middle, (low, high)
            plot.plot(grid / 1000, middle, label=key[1] if panel else key[0], color=color, linewidth=2)
            plot.fill_between(grid / 1000, low, high, color=color, alpha=0.15, linewidth=0)
        value = "share of the largest value" if args.relative else args.metrics[0]
        plot.set(title=panel, xlabel="sampled tokens, thousands", ylabel=f"evaluation {value}" if not panel else value)
        plot.spines[["top", "right"]].set_visible(False)
        plot.grid(alpha=0.25)
        plot.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(args.output + ".png")
    return drawn


def main(args):
    runs, origins = read(args)
    most = min(points[-1][0] for seeds in runs.values() for points in seeds.values())
    lines = [f"| script | metric | seeds | at first | at {most:,.0f} tokens (95% interval) | lowest, highest seed |"]
    lines.append("|---" * 6 + "|")
    for (script, metric), (curves, middle, (low, high)) in draw(args, runs, most).items():
        last = f"**{middle[-1]:.2f}** ({low[-1]:.2f} to {high[-1]:.2f})"
        extremes = f"{curves[-1].min():.2f}, {curves[-1].max():.2f}"
        lines.append(f"| {script} | {metric} | {curves.shape[1]} | {middle[0]:.2f} | {last} | {extremes} |")
    lines += ["", "Interquartile means over seeds."]
    for origin in dict.fromkeys(origins.values()):
        lines.append(f"- {', '.join(script for script in origins if origins[script] == origin)}: {origin}")
    with open(args.output + ".md", "w") as file:
        file.write("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
