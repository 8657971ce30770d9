"""What the benchmarks share: the first line of a results file, files, old commits, and how a script is run."""

import os
import platform
import re
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)  # of the scripts and envs, which benchmarks import


def describe_commit():
    """The current commit, with -dirty if the working tree differs from it."""
    git = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "unknown"


def list_versions():
    packages = [name for name in ("torch", "transformers", "comlrl", "trl") if find_spec(name)]
    return ", ".join(f"{name} {version(name)}" for name in packages)


def describe_machine():
    processor = platform.processor()
    if os.path.exists("/proc/cpuinfo"):
        processor, *_ = re.findall("model name\\s*: (.*)", Path("/proc/cpuinfo").read_text()) or [processor]
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        processor = f"{processor}, {device}"
    return f"Python {platform.python_version()}, {platform.machine()}, {processor}, {os.cpu_count()} cores"


def make_stamp(args):
    return f"commit {describe_commit()}; {list_versions()}, {describe_machine()}; {date.today()}; {args}"


def write_rows(path, stamp, rows):
    """A CSV file after a line with the stamp."""
    with open(path, "w") as file:
        file.write(f"# {stamp}\n")
        pd.DataFrame(rows).to_csv(file, index=False)


def checkout(commit, folder):
    """A folder with the files of a commit."""
    tree = os.path.join(folder, commit)
    os.makedirs(tree, exist_ok=True)
    subprocess.run(f"git archive {commit} | tar -x -C {tree}", shell=True, check=True, cwd=ROOT)
    return tree


def run_script(*words, seconds=None, **variables):
    """Runs a Python script on one thread, with classes of this folder for --env. Returns its exit status.

    124: it was ended after so many seconds. The end of what it printed is shown unless the status is 0.
    """
    command = [sys.executable, *map(str, words)]
    env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": f"{ROOT}/benchmarks:{ROOT}", **variables}
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        try:
            status = subprocess.run(command, env=env, stdout=log, stderr=log, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            status = 124
        if status:
            log.seek(0)
            print(f"{' '.join(command)}: exit status {status}\n{log.read()[-2000:]}", file=sys.stderr, flush=True)
    return status
