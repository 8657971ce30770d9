"""Runs the exercises of docs/teaching.md as they are there, and writes results/teaching.csv. Needs git and matplotlib.

    python benchmarks/teaching.py --exercises 1 3    (default: all), and the runs of section 0, which they compare with

The patches of docs/lesson/ change copies of the scripts in runs/teaching/, and a section's commands run there once for
each seed. Each section's last command draws its picture there; the rows are the evaluations of all runs, and their
first updates.
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
from stamp import ROOT, stamp, write_rows


@dataclass
class Args:
    exercises: list[int] = field(default_factory=lambda: list(range(1, 9)))
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3])
    jobs: int = 2  # runs at a time


def lesson():
    """Of each section its runs and its plots, as lists of words."""
    for section in re.split(r"^## \d\. ", Path(ROOT, "docs/teaching.md").read_text(), flags=re.M)[1:]:
        commands = [line.split() for line in re.findall(r"^python (.*)", section, re.M)]
        runs = [words for words in commands if "--output-dir" in words]
        drawing = [words[1:] for words in commands if words[0] == "benchmarks/plot.py"]
        yield runs, drawing


def make_scripts(folder):
    """Copies of the scripts, changed by the patches."""
    for patch in sorted(Path(ROOT, "docs/lesson").glob("*.patch")):
        shutil.copy(f"{ROOT}/{patch.stem.partition('_')[0]}.py", f"{folder}/{patch.stem}.py")
        relative = os.path.relpath(folder, ROOT)
        subprocess.run(["git", "apply", f"--directory={relative}", str(patch)], cwd=ROOT, check=True)


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
    folder = f"{ROOT}/runs/teaching"
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    os.chdir(folder)
    os.environ["OMP_NUM_THREADS"] = "1"
    make_scripts(folder)
    for name in ("envs", "rewards", "models", "docs", *glob("*.py", root_dir=ROOT)):
        if not os.path.exists(name):
            os.symlink(f"{ROOT}/{name}", name)
    sections = list(lesson())
    commands = []  # words of all runs
    for number in sorted({0, *args.exercises}):
        runs, _ = sections[number]
        commands += [[*words, "--seed", str(seed)] for words in runs for seed in args.seeds]
    with ThreadPoolExecutor(args.jobs) as threads:
        list(threads.map(start, commands))
    rows = [row for number in args.exercises for words in sections[number][1] for row in rows_of(number, words)]
    write_rows(f"{ROOT}/results/teaching.csv", about, rows)
