"""A benchmark starts at its smallest size, and documents show what was measured."""

import runpy
import sys
from types import SimpleNamespace

import check
import workloads
from conftest import ROOT
from transformers import PreTrainedTokenizerFast

FLAGS = "--scripts magrpo --seeds 1 --num-iterations 1"


def test_compare_starts(monkeypatch, capsys, tmp_path):
    """Fails if a flag or a metric of the scripts has another name now."""
    tiny = ["--flags=--eval-tasks 2 --num-tasks 1 --max-new-tokens 8"]
    files = ["--name", f"{tmp_path}/rows", "--keep", f"{tmp_path}/runs"]
    monkeypatch.setattr(sys, "argv", ["compare.py", *FLAGS.split(), *tiny, *files])
    runpy.run_path(str(ROOT / "benchmarks/compare.py"), run_name="__main__")
    assert "tldr magrpo seed 1: " in capsys.readouterr().out
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 4  # versions, names and two evaluations


def test_prompts_have_their_length(tmp_path):
    """Fails if the tokenizer that a script loads from the folder of a workload splits its prompts otherwise."""
    args = SimpleNamespace(shrink=True, device="cpu", seed=1, updates=1, baseline="trl")
    job = workloads.prepare("b", f"{tmp_path}/b", args)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(job["model"])
    # the template adds three
    assert len(tokenizer(job["prompts"][0]).input_ids) == job["prompt_tokens"] - 3


def test_tables_show_the_figures_of_their_files():
    """Fails if a document or a file in results/ was changed without the other."""
    assert sum(map(check.check, check.DOCUMENTS)) == 0
