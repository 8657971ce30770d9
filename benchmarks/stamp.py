"""What the benchmarks share: types of arguments, and the stamp on every figure: commit, versions, machine, date."""

import os
import platform
import subprocess
from datetime import date
from importlib.metadata import version
from typing import Annotated, Literal

from tyro.constructors import PrimitiveConstructorSpec

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def at_least_1(words):
    if int(words[0]) < 1:
        raise ValueError(f"{words[0]} is less than 1")
    return int(words[0])


Count = Annotated[
    int, PrimitiveConstructorSpec(1, "INT", at_least_1, lambda x: isinstance(x, int), lambda x: [str(x)])
]
Script = Literal["magrpo", "marloo", "maremax", "mareinforce", "ippo"]


def commit():
    """The current commit, with -dirty if the working tree differs from it."""
    git = "git describe --always --dirty --exclude '*'"
    return subprocess.run(git, shell=True, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "unknown"


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
