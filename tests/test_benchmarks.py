"""Each benchmark starts at its smallest size. What it measures is not checked here."""

import runpy
import shlex
import sys

import pytest
from conftest import ROOT

TINY = "'--flags=--eval-tasks 2 --num-tasks 1 --max-new-tokens 8' --num-iterations 1 --seeds 1 --scripts magrpo"
PEERS = "--shrink --rounds 1 --updates 1 --workloads a --sides ours --comparisons magrpo-comlrl"


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs a benchmark in this process, which has imported torch already, and gives what it prints."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))

    def start(name, flags):
        monkeypatch.setattr(sys, "argv", [name, *shlex.split(flags.replace("TMP", str(tmp_path)))])
        runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return start


@pytest.mark.parametrize("name, flags, printed", [
    ("compare", f"{TINY} --name TMP/rows", "magrpo seed 1: "),
    ("throughput", "--shrink --rounds 1 --updates 1 --workloads a --baseline HEAD", "| a | iteration_s |"),
    ("peers", f"{PEERS} --folder TMP", "| magrpo.py |"),
    ("gpu", "--device cpu --shrink --rounds 1 --workloads qwen3-1.7b", "| qwen3-1.7b |"),
    ("card", "--rows tldr --eval-tasks 2 --eval-generations 1", "| tldr | 0."),
])  # fmt: skip
def test_it_starts(name, flags, printed, run):
    """A flag, function or metric of the scripts that has another name now."""
    found = run(name, flags)
    assert printed in found and "exit code" not in found


def test_plot_compares_at_equal_tokens(run, tmp_path):
    """The last evaluation of a run that sampled more."""
    pytest.importorskip("matplotlib")
    rows = [f"{name},1,{tokens},{tokens / 9}" for name, most in (("a", 9), ("b", 6)) for tokens in (0, most)]
    (tmp_path / "rows.csv").write_text("\n".join(["# made up", "script,seed,tokens,return", *rows]))
    assert run("plot", "TMP/rows.csv --output TMP/curves").count("| return | 1 | 0.00 | **0.67**") == 2
