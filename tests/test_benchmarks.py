"""Each benchmark starts at its smallest size. What it measures is not checked here."""

import runpy
import sys

import pytest
from conftest import ROOT


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a benchmark in this process, which has imported torch already, and gives what it prints."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))

    def start(name, *flags):
        monkeypatch.setattr(sys, "argv", [name, *map(str, flags)])
        runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return start


def test_compare(run, tmp_path):
    flags = ("--flags=--eval-tasks 2 --num-tasks 1 --max-new-tokens 8", "--num-iterations", 1, "--seeds", 1)
    run("compare", *flags, "--scripts", "magrpo", "--name", tmp_path / "rows", "--keep", tmp_path / "runs")
    stamp, columns, *rows = (tmp_path / "rows.csv").read_text().splitlines()
    assert stamp.startswith("# commit") and "script,seed,iteration,tokens" in columns and len(rows) == 2
    assert list((tmp_path / "runs").glob("*/state.pt"))


def test_plot(run, tmp_path):
    pytest.importorskip("matplotlib")
    lines = [f"magrpo,{seed},{tokens},{tokens / 9}" for seed in (1, 2) for tokens in (0, 5, 9)]
    (tmp_path / "rows.csv").write_text("\n".join(["# made up", "script,seed,tokens,return", *lines]))
    assert "**1.00**" in run("plot", "--results", tmp_path / "rows.csv", "--output", tmp_path / "curves")
    assert (tmp_path / "curves.png").exists() and (tmp_path / "curves.md").exists()


@pytest.mark.parametrize("flags", [(), ("--baseline", "HEAD", "--updates", 1)], ids=["plain", "baseline"])
def test_throughput(run, flags):
    assert "| a | iteration_s |" in run("throughput", "--shrink", "--rounds", 1, "--workloads", "a", *flags)


def test_peers_on_our_side(run, tmp_path):
    flags = ("--shrink", "--rounds", 1, "--updates", 1, "--workloads", "a", "--folder", tmp_path)
    printed = run("peers", *flags, "--sides", "ours", "--comparisons", "magrpo-comlrl")
    assert "| magrpo.py |" in printed and "exit code" not in printed


def test_gpu_on_a_cpu(run):
    printed = run("gpu", "--device", "cpu", "--shrink", "--rounds", 1, "--workloads", "qwen3-1.7b")
    assert printed.count("| qwen3-1.7b |") == 4


def test_card(run):
    printed = run("card", "--envs", "arxiv", "--most-agents", 1, "--eval-tasks", 2, "--eval-generations", 1)
    assert "| arxiv: mean reward" in printed
