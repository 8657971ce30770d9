"""Each benchmark starts at its smallest size. What it measures is not checked here."""

import json
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
    """A file of compare.py and a run folder: evaluations at their tokens, runs told apart by their options."""
    pytest.importorskip("matplotlib")
    lines = [f"magrpo,{seed},{tokens},{tokens / 9}" for seed in (1, 2) for tokens in (0, 5, 9)]
    (tmp_path / "rows.csv").write_text("\n".join(["# made up", "script,seed,tokens,return", *lines]))
    about = {"script": "ippo.py", "commit": "abc", "args": {"seed": 3, "env_kwargs": {"reward": "plain"}}}
    (tmp_path / "args.json").write_text(json.dumps(about))
    metrics = [{"iteration": 0, "eval/return": 0.5}, {"tokens": 4, "train/return": 9}, {"tokens": 8, "eval/return": 2}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, metrics)))
    printed = run("plot", tmp_path / "rows.csv", tmp_path, "--output", tmp_path / "curves")
    assert "| magrpo | return | 2 | 0.00 | **1.00**" in printed
    assert "| ippo reward plain | return | 1 | 0.50 | **1.62**" in printed  # at 9 of 12 tokens
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
    printed = run("card", "--rows", "tldr", "--eval-tasks", 2, "--eval-generations", 1)
    assert "| tldr | 0." in printed
