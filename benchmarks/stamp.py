"""What the benchmarks share: the stamp of a results file (commit, versions, machine, date), and files and tables."""

import csv
import math
import os
import platform
import subprocess
from datetime import date
from importlib.metadata import version

import pandas as pd
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def commit():
    """The current commit, with -dirty if the working tree differs from it."""
    git = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "unknown"


def versions():
    return ", ".join(f"{package} {version(package)}" for package in ("torch", "transformers"))


def machine():
    processor = platform.processor()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        processor = names[0] if names else processor
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        processor = f"{processor}, {device}"
    return f"Python {platform.python_version()}, {platform.machine()}, {processor}, {os.cpu_count()} cores"


def stamp(args):
    return f"commit {commit()}; {versions()}, {machine()}; {date.today()}; {args}"


def write_rows(path, stamp, rows):
    """A CSV file after a line with the stamp."""
    with open(path, "w", newline="") as file:
        file.write(f"# {stamp}\n")
        writer = csv.DictWriter(file, dict.fromkeys(name for row in rows for name in row), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def print_table(names, rows):
    """A markdown table; an empty cell for what is not a number."""
    print(f"| {' | '.join(names)} |\n" + "|---" * len(names) + "|")
    for row in rows:
        cells = []
        for cell in row:
            if isinstance(cell, float):
                cell = "" if math.isnan(cell) else f"{cell:.4g}"
            cells.append(str(cell))
        print(f"| {' | '.join(cells)} |")


def print_ratios(rows, by, sides, measures):
    """A table of both sides' medians, and of the ratio within a round: median, lowest and highest."""
    left, right = sides
    table = []
    for group, frame in pd.DataFrame(rows).groupby(by, sort=False):
        for measure in measures:
            medians = frame.groupby(["round", "side"])[measure].median().unstack().reindex(columns=sides)
            ratios = medians[left] / medians[right]
            numbers = [medians[left].median(), medians[right].median(), ratios.median(), ratios.min(), ratios.max()]
            table.append([*group, measure, *numbers])
    print_table([*by, "", left, right, f"{left}/{right}", "lowest round", "highest round"], table)
