"""Runs the exercises of docs/teaching.md as they are there, and writes results/teaching.csv. Needs git and matplotlib.

    python benchmarks/teaching.py --exercises 1 3    (default: all), and the runs of section 0, which they compare with

A copy of the last commit in runs/teaching/, with the scripts that the patches of docs/lesson/ make of others, runs a
section's commands once for each seed. Each section's last command draws its picture there; the rows are the
evaluations of all runs, and their first updates.
"""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path

import pandas as pd
import plot
import tyro
from stamp import ROOT, checkout, stamp, write_rows


@dataclass
class Args:
    exercises: list[int] = field(default_factory=lambda: list(range(1, 9)))
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3])
    jobs: int = 2  # runs at a time


def patch_scripts():
    """Makes the changed scripts: nano_z.patch makes nano_z.py of nano.py."""
    for patch in Path("docs/lesson").glob("*.patch"):
        shutil.copy(f"{patch.stem.partition('_')[0]}.py", f"{patch.stem}.py")
        folder = os.path.relpath(os.getcwd(), ROOT)
        subprocess.run(["git", "apply", f"--directory={folder}", patch.resolve()], cwd=ROOT, check=True)


def start(words):
    process = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    print(*words, process.stderr[-2000:] if process.returncode else "", flush=True)
    for path in glob(f"{words[words.index('--output-dir') + 1]}/*/state.pt"):
        os.remove(path)  # the larger part of a run folder


def rows_of(number, words):
    """Draws the picture of a section, and returns rows for the results file."""
    sources = [path for word in words for path in sorted(glob(word)) or [word]]
    args = tyro.cli(plot.Args, args=sources)
    plot.main(args)
    frame = pd.concat([plot.frame_of(path, args.labels) for path in args.sources])
    frame = frame[frame["return"].notna() | (frame["iteration"] == 1)].filter(regex="^(?!train/|time/|origin)")
    return frame.assign(exercise=number).rename(columns={"name": "script"}).to_dict("records")


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    about = stamp(args)
    shutil.rmtree(f"{ROOT}/runs/teaching", ignore_errors=True)
    os.chdir(checkout("HEAD", f"{ROOT}/runs/teaching"))
    os.environ["OMP_NUM_THREADS"] = "1"
    patch_scripts()
    sections = re.split(r"^## \d\. ", Path("docs/teaching.md").read_text(), flags=re.MULTILINE)[1:]
    commands = [[line.split() for line in re.findall("^python (.*)", text, re.MULTILINE)] for text in sections]
    runs = [words for number in sorted({0, *args.exercises}) for words in commands[number]]
    runs = [[*words, "--seed", str(seed)] for words in runs if "plot" not in words[0] for seed in args.seeds]
    with ThreadPoolExecutor(args.jobs) as threads:
        list(threads.map(start, runs))
    rows = [row for number in args.exercises for row in rows_of(number, commands[number][-1][1:])]
    write_rows(f"{ROOT}/results/teaching.csv", about, rows)
