"""Runs the exercises of docs/teaching.md as they stand there, and writes results/teaching.csv. Needs matplotlib.

    python benchmarks/teaching.py --exercises 1 3    (default: all), and the runs of section 0, which they compare with

A section's diffs change copies of the scripts in runs/teaching/ (what makes magrpo_z.py of magrpo.py makes marloo_z.py
of marloo.py), and its commands run there once for each seed. It prints plot.py's table and the lesson's: for each seed
the last evaluation's value, of a gradient norm that of the first update.
"""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from glob import glob
from importlib import import_module
from pathlib import Path

import pandas as pd
import plot
import tyro
from stamp import ROOT, stamp, write_rows


@dataclass
class Args:
    exercises: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 5, 6])
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3])
    jobs: int = 2  # runs at a time


def lesson():
    """Of each section its runs and its plot as lists of words, its changed scripts by name, its table's columns."""
    for text in re.split(r"^## \d\. ", Path(ROOT, "docs/teaching.md").read_text(), flags=re.M)[1:]:
        commands, scripts = [line.split() for line in re.findall(r"^python (.*)", text, re.M)], {}
        for suffix, diff in re.findall(r"^\+\+\+ [a-z]+(_\w+\.py)\n(.*?)^```", text, re.M | re.S):
            old, new = (re.sub(rf"^[{mark}].*\n|^.", "", diff, flags=re.M) for mark in "+-")
            for name in {words[0] for words in commands if words[0].endswith(suffix)}:
                before = Path(ROOT, name.replace(suffix, ".py")).read_text()
                assert before.count(old) == 1, f"docs/teaching.md: {name}: not in the script, or not once:\n{old}"
                scripts[name] = before.replace(old, new)
        drawing = next((words[1:] for words in commands if words[0] == "benchmarks/plot.py"), [])
        columns = re.search(r"^\| run \| (.*) \|$|\Z", text, re.M)[1]
        yield [words for words in commands if "--output-dir" in words], drawing, scripts, columns


def start(words):
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    print(*words, done.stderr[-2000:] if done.returncode else "", flush=True)
    for path in glob(f"{words[words.index('--output-dir') + 1]}/*/state.pt"):
        os.remove(path)  # the larger part of a run folder


def show(number, words, columns):
    """Draws the picture of a section, prints its tables, and returns rows for the results file."""
    given = tyro.cli(plot.Args, args=[path for word in words for path in sorted(glob(word)) or [word]])
    plot.main(given)
    picture = import_module("PIL.Image").open(f"{given.output}.png")  # comes with matplotlib
    picture.quantize(64).save(f"{ROOT}/docs/teaching_{number}.png", optimize=True)
    frame = pd.concat([plot.frame_of(path, given.labels) for path in given.sources])
    print(f"\nExercise {number}\n\n| run | {columns} |\n" + "|---" * (2 + columns.count("|")) + "|")
    for name, rows in frame.groupby("name", sort=False):
        for column in columns.split(" | "):
            values = rows.groupby("seed")[column].agg("first" if "grad" in column else "last")
            name += " | " + ", ".join(f"{value:.3g}" for value in values)
        print(f"| {name} |", flush=True)
    rows = frame[frame["return"].notna() | (frame["iteration"] == 1)].filter(regex="^(?!train/|time/|origin)")
    return rows.assign(exercise=number).rename(columns={"name": "script"}).to_dict("records")


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    about, folder = stamp(args), f"{ROOT}/runs/teaching"
    sections, commands = list(lesson()), []
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    os.chdir(folder)
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in ("envs", "rewards", "models", *glob("*.py", root_dir=ROOT)):
        os.symlink(f"{ROOT}/{name}", name)
    for number in {0, *args.exercises}:
        runs, _, scripts, _ = sections[number]
        for name, text in scripts.items():
            Path(name).write_text(text)
        commands += [[*words, "--seed", str(seed)] for words in runs for seed in args.seeds]
    list(ThreadPoolExecutor(args.jobs).map(start, commands))
    rows = [row for number in args.exercises for row in show(number, *sections[number][1::2])]
    write_rows(f"{ROOT}/results/teaching.csv", about, rows)
