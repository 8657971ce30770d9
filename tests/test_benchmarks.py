"""A benchmark starts at its smallest size, and documents show what was measured."""

import importlib
import runpy
import sys
from types import SimpleNamespace

from conftest import ROOT
from transformers import PreTrainedTokenizerFast

FLAGS = "--scripts magrpo --seeds 1 --num-iterations 1"


def test_compare_starts(monkeypatch, capsys, tmp_path):
    """Fails if a flag or a metric of the scripts has another name now."""
    tiny = ["--flags=--eval-tasks 2 --num-tasks 1 --max-new-tokens 8"]
    files = ["--name", f"{tmp_path}/rows", "--keep", f"{tmp_path}/runs"]
    monkeypatch.setattr(sys, "argv", ["compare.py", *FLAGS.split(), *tiny, *files])
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    runpy.run_path(str(ROOT / "benchmarks/compare.py"), run_name="__main__")
    assert "tldr magrpo seed 1: " in capsys.readouterr().out
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 4  # versions, names and two evaluations


def test_prompts_have_their_length(monkeypatch, tmp_path):
    """Fails if the tokenizer that a script loads from the folder of a workload splits its prompts otherwise."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    workloads = importlib.import_module("workloads")
    job = workloads.prepare(
        "b", f"{tmp_path}/b", SimpleNamespace(shrink=True, device="cpu", seed=1, updates=1, baseline="trl")
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(job["model"])
    # the template adds three
    assert len(tokenizer(job["prompts"][0]).input_ids) == job["prompt_tokens"] - 3


def test_tables_show_the_figures_of_their_files(monkeypatch):
    """Fails if a document or a file in results/ was changed without the other."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    check = importlib.import_module("check")
    assert sum(map(check.check, check.DOCUMENTS)) == 0
