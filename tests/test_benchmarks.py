"""A benchmark starts at its smallest size, and statistics are what their names say. Measurements are not checked."""

import itertools
import runpy
import sys

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT

FLAGS = "--scripts magrpo --seeds 1 --num-iterations 1 --minutes 9"


def test_compare_starts(monkeypatch, capsys, tmp_path):
    """Fails if a flag or a metric of the scripts has another name now."""
    tiny = ["--flags=--eval-tasks 2 --num-tasks 1 --max-new-tokens 8"]
    files = ["--name", f"{tmp_path}/rows", "--keep", f"{tmp_path}/runs"]
    monkeypatch.setattr(sys, "argv", ["compare.py", *FLAGS.split(), *tiny, *files])
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    runpy.run_path(str(ROOT / "benchmarks/compare.py"), run_name="__main__")
    assert "magrpo seed 1: " in capsys.readouterr().out
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 4  # versions, names and two evaluations


def test_statistics_are_those_of_loops(monkeypatch):
    """Fails if one leaves out other values, counts ties or pairs of other tasks, or corrects in another order."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    aggregate = runpy.run_path(str(ROOT / "benchmarks/aggregate.py"))
    scores, others = np.random.default_rng(1).normal(size=(2, 3, 5)).round()  # (task, seed), with ties
    assert aggregate["iqm"](scores) == pytest.approx(sum(sorted(scores.flat)[3:12]) / 9)
    wins = 0
    for task, other_task in zip(scores, others):
        for a, b in itertools.product(task, other_task):
            if a > b:
                wins += 1
            elif a == b:
                wins += 0.5
    assert aggregate["better"](scores, others) == pytest.approx(wins / 75)
    # with all signs the sums are 0.8, 0.6, 0.4, 0.2 and their opposites
    assert aggregate["sign_flip_test"]([0.5, 0.2, -0.1]) == 0.5
    corrected = aggregate["holm"](pd.Series([0.04, 0.01, 0.5, 0.03]))
    assert corrected.sort_index().tolist() == pytest.approx([0.09, 0.04, 0.5, 0.09])
