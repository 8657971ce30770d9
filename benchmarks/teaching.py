"""Runs the exercises of docs/teaching.md as they are there, and writes results/teaching.csv. Needs git and matplotlib.

    python benchmarks/teaching.py --exercises 1 3    (default: all), and the runs of section 0, which they compare with

A copy of the last commit in runs/teaching/, with the scripts that the patches of docs/lesson/ make of others, runs a
section's commands once for each seed. Its commands with plot.py then draw there; the rows are the evaluations of all
runs that they draw, and their first updates.
"""

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from glob import glob
from pathlib import Path

import pandas as pd
import plot
import tyro
from stamp import ROOT, checkout, make_stamp, run_script, write_rows


@dataclass
class Args:
    exercises: tuple[int, ...] = tuple(range(1, 12))
    seeds: tuple[int, ...] = (1, 2, 3)
    jobs: int = 2  # runs at a time


def start(words):
    print(*words, flush=True)
    run_script(*words)
    for path in glob(f"{words[words.index('--output-dir') + 1]}/*/state.pt"):
        os.remove(path)  # the larger part of a run folder


def rows_of(number, words):
    """Draws a picture of a section, and returns rows for the results file."""
    sources = [path for word in words for path in sorted(glob(word)) or [word]]
    args = tyro.cli(plot.Args, args=sources)
    plot.main(args)
    frame = pd.concat([plot.read_frame(path, args.labels) for path in args.sources])
    frame = frame[frame["return"].notna() | (frame["iteration"] == 1)].filter(regex="^(?!train/|time/)")
    return frame.assign(exercise=number).rename(columns={"name": "script"}).to_dict("records")


def main(args):
    about = make_stamp(args)
    shutil.rmtree(f"{ROOT}/runs/teaching", ignore_errors=True)
    os.chdir(checkout("HEAD", f"{ROOT}/runs/teaching"))
    for patch in Path("docs/lesson").glob("*.patch"):
        # nano_kl.patch makes nano_kl.py of nano.py
        shutil.copy(f"{patch.stem.partition('_')[0]}.py", f"{patch.stem}.py")
        subprocess.run(["patch", "-p1", "-i", patch], check=True)
    sections = re.split(r"^## \d+\. ", Path("docs/teaching.md").read_text(), flags=re.MULTILINE)[1:]
    commands = [[line.split() for line in re.findall("^python (.*)", text, re.MULTILINE)] for text in sections]
    runs = []
    plots = []
    for number in [0, *args.exercises]:
        for words in commands[number]:
            if "plot" in words[0]:
                plots.append((number, words[1:]))
            else:
                runs += [[*words, "--seed", str(seed)] for seed in args.seeds]
    with ThreadPoolExecutor(args.jobs) as threads:
        list(threads.map(start, runs))
    rows = []
    for number, words in plots:
        rows += rows_of(number, words)
    write_rows(f"{ROOT}/results/teaching.csv", about, rows)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
