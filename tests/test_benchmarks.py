"""Each benchmark starts at its smallest size. What it measures is not checked here."""

import json
import runpy
import shlex
import sys
from importlib import import_module

import pytest
import torch
from conftest import ROOT

TINY = "'--flags=--eval-tasks 2 --num-tasks 1 --max-new-tokens 8' --num-iterations 1 --seeds 1 --scripts magrpo"
SMALL = "--shrink --rounds 1 --updates 1 --workloads a"


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs a benchmark in this process, which has imported torch already, and gives what it prints."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.chdir(tmp_path)

    def start(path, flags):
        monkeypatch.setattr(sys, "argv", [path, *shlex.split(flags.replace("TMP", str(tmp_path)))])
        runpy.run_path(str(ROOT / path), run_name="__main__")
        return capsys.readouterr().out

    return start


STARTS = [  # script, flags, what it prints
    ("benchmarks/compare.py", f"{TINY} --name TMP/rows --keep TMP/runs --minutes 9", "magrpo seed 1: "),
    ("benchmarks/throughput.py", SMALL, "| a | update_s | "),
    ("benchmarks/peers.py", f"{SMALL} --folder TMP --comparisons magrpo-comlrl", "| a | magrpo-comlrl | seconds | "),
    ("models/tiny/card.py", "--rows tldr --eval-tasks 2 --eval-generations 1", "| tldr | 0."),
]


@pytest.mark.parametrize("path, flags, printed", STARTS, ids=[path for path, _, _ in STARTS])
def test_it_starts(path, flags, printed, run):
    """Fails if a flag, a function or a metric of the scripts has another name now."""
    output = run(path, flags)
    assert printed in output and "exit code" not in output


def test_operators_are_counted(run):
    """Fails if the counter sees nothing, or what a graph repeats too."""
    output = run("benchmarks/throughput.py", "--operators magrpo")
    assert 500 < int(output.split()[1]) < 5000  # of 24 layers
    counter = import_module("throughput").Counter()
    with counter:
        counter.without(torch.ones)(2)
        torch.ones(2)
    assert counter.count == 1


def test_gpu_steps_start(run, tmp_path):
    """Fails if a step of the list for a GPU does not run, or writes no file of its own."""
    posts = [json.dumps({"prompt": f"POST: This is post {k}.", "completion": "A post."}) + "\n" for k in range(20)]
    (tmp_path / "posts.jsonl").write_text("".join(posts))
    flags = "--device cpu --shrink --updates 1 --folder TMP --dataset TMP/posts.jsonl"
    output = run("benchmarks/gpu.py", f"{flags} --steps check qwen3-1.7b trl real")
    rows = {step: (tmp_path / f"gpu_{step}.csv").read_text() for step in ("check", "qwen3-1.7b", "trl", "real")}
    assert "magrpo.py and a plain forward pass,differ by at most" in rows["check"]
    assert "| qwen3-1.7b | 1 | magrpo | " in output and "| trl GRPOTrainer | " in output
    assert "defaults,runs" in rows["check"] and "resume,runs" in rows["check"]


@pytest.fixture
def plot(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("plot")


def write_run(folder, script, metrics):
    """A run folder with these lines of metrics.jsonl; the last one is cut off."""
    folder.mkdir()
    about = {"script": script, "commit": "abcdefgh", "args": {"seed": 1, "env_kwargs": None}}
    (folder / "args.json").write_text(json.dumps(about))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics) + '{"iteration": 9, "t')


def test_plot_reads_any_run_folder(run, tmp_path):
    """Fails at a run of sft.py, an evaluation, or a run in progress; or if one seed is given an interval."""
    pytest.importorskip("matplotlib")
    evaluations = [{"iteration": k, "eval/return": 1.0 + k} | ({"tokens": 50} if k else {}) for k in range(3)]
    write_run(tmp_path / "a", "magrpo.py", evaluations)
    write_run(tmp_path / "b", "ippo.py", evaluations[:1])
    write_run(tmp_path / "c", "sft.py", [{"step": 1, "eval/loss": 1.0}])
    output = run("benchmarks/plot.py", "TMP/a TMP/b TMP/c --output TMP/curves")
    assert "TMP/c is left out".replace("TMP", str(tmp_path)) in output
    assert "| magrpo | return | 1 | 1.00 | **3.00** (-) | 3.00, 3.00 | - | **3.00** (-) |" in output
    assert "| ippo | return | 1 | 1.00 | - | - | - | **1.00** (-) |" in output


def test_no_figure_is_read_off_a_long_line(plot):
    """Fails if a value is interpolated between evaluations that are more than a tenth of the run apart."""
    tokens = [0, 50, 95, 100]
    points = plot.pd.DataFrame({"tokens": tokens, "value": tokens})
    values = [plot.value_at(points, N) for N in (0, 20, 50, 96, 100, 101)]
    nan = float("nan")
    assert values == pytest.approx([0, nan, 50, 96, 100, nan], nan_ok=True)


def test_statistics_by_hand(plot):
    """Fails if the interval is of another distribution than t, or the test leaves out divisions as extreme."""
    assert plot.t_interval([1.0, 2.0, 3.0]) == pytest.approx([2.0, 2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5])
    assert plot.t_interval([1.0]) == [1.0]
    assert plot.permutation_test([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]) == 2 / 20
    assert plot.permutation_test([1.0, 2.0], [1.0, 2.0]) == 1


def test_check_finds_a_wrong_figure(plot, monkeypatch, tmp_path, capsys):
    """Fails if a figure that is not its file's passes, or a rounded one does not."""
    rows = "# stamp\nscript,seed,iteration,tokens,return\n" + "".join(f"a,{k},1,42100,0.{k}49\n" for k in (1, 2))
    (tmp_path / "rows.csv").write_text(rows)
    marker = {"rows": "rows.csv: script == '{0}'", "columns": ["return seeds end", "tokens range end"]}
    for cell, differences in [("0.15, 0.25 | 42k to 42k", 0), ("0.15, 0.26 | 42,100 to 43k", 2)]:
        lines = [f"<!-- figures {json.dumps(marker)} -->", "", "| | | |", "|---|---|---|", f"| `a.py` | {cell} |", ""]
        (tmp_path / "page.md").write_text("\n".join(lines))
        monkeypatch.setattr(plot, "ROOT", tmp_path)
        assert plot.check("page.md") == differences
    assert capsys.readouterr().out.count("page.md: `a.py`") == 2
