"""What the benchmarks share: the stamp on every figure, with commit, versions, machine and date, and CSV files."""

import csv
import os
import platform
import subprocess
from datetime import date
from importlib.metadata import version

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
