"""benchmarks/peers.py on its smallest sizes: what it says of lengths and ratios is so. It needs no peers."""

import csv
import io
import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from transformers import AutoTokenizer

sys.path.insert(0, str(ROOT / "benchmarks"))
import peers
import peers_child


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """The smallest workload, and the job that all contestants get."""
    args = peers.Args(updates=2, shrink=True)
    workload = peers.shrunk(peers.WORKLOADS["a"])
    folder = tmp_path_factory.mktemp("peers")
    job = peers.job_of(args, "a", workload, str(folder))
    peers_child.prepare(job)  # in this process, since a new one takes seconds to start
    return args, workload, job, folder


def test_prompts_have_exactly_the_asked_number_of_tokens(prepared):
    args, workload, job, _ = prepared
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    with open(job["prompts"]) as file:
        prompts = [json.loads(line) for line in file]
    assert len(prompts) == len({prompt["user"] for prompt in prompts}) == workload.num_tasks * (args.updates + 1) + 1
    for prompt in prompts:
        messages = [{"role": "user", "content": prompt["user"]}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        # ours and theirs read the same tokens
        assert len(ids) == workload.prompt_tokens and ids == tokenizer(prompt["text"]).input_ids


def test_the_tokenizer_has_the_models_vocabulary():
    tokenizer, words = peers_child.make_tokenizer(1075)
    assert len(tokenizer) == 1075 == 3 + 256 + len(words)
    assert [tokenizer(word).input_ids for word in words] == [[k] for k in range(259, 1075)]


def test_our_row_says_what_was_asked_for(prepared):
    args, workload, job, folder = prepared
    work = folder / "ours"
    work.mkdir()
    result = peers.run_ours(args, job, "magrpo", (), 2, str(work))
    assert "error" not in result, result
    expected = 2 * workload.num_tasks * workload.num_generations * workload.completion_tokens  # none stops by itself
    assert result["tokens"] == [expected] * args.updates and len(result["seconds"]) == args.updates
    assert all(seconds > 0 for seconds in result["seconds"])
    row = peers.row_of(job, 0, "magrpo-comlrl", "ours", "magrpo.py", 2, result)
    assert row["completion_length"] == workload.completion_tokens
    assert row["tokens_per_second"] == pytest.approx(args.updates * expected / sum(result["seconds"]))
    assert row["seconds"] == pytest.approx(sum(result["seconds"]) / 2)  # the median of two
    assert 100 < row["peak_mib"] < 10_000
    assert not list(work.glob("*/checkpoint/*")) and not list(work.glob("*/agent_*"))  # gigabytes with large models


def test_a_contestant_that_fails_is_reported_with_its_last_line(tmp_path):
    code = "import sys; print('it begins', flush=True); sys.exit('there is no such file')"
    error = peers.run(peers.Args(), [sys.executable, "-c", code], str(tmp_path / "log.txt"))
    assert error.startswith("there is no such file (exit code 1; ") and "log.txt" in error
    assert peers.run(peers.Args(), [sys.executable, "-c", ""], str(tmp_path / "log.txt")) is None


def test_each_contestant_sees_one_gpu_or_none(tmp_path, monkeypatch):
    """trl refuses several, and our scripts use one if they see it."""
    code = "import os, sys; sys.exit(os.environ['CUDA_VISIBLE_DEVICES'] + '.')"
    seen = lambda device: peers.run(peers.Args(device=device), [sys.executable, "-c", code], str(tmp_path / "log.txt"))
    for given, first in (None, "0"), ("2,3", "2"), ("1", "1"):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if given:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        assert seen("cuda").startswith(f"{first}. (exit") and seen("cpu").startswith(". (exit")


def test_trl_trains_on_as_many_rows_as_fit():
    rows = lambda args, name: peers.job_of(args, name, peers.WORKLOADS[name], "folder")["trl_rows"]
    assert rows(peers.Args(), "a") == rows(peers.Args(), "qwen2.5-0.5b") == 0  # the whole rollout
    assert rows(peers.Args(), "qwen3-1.7b") == 8 and rows(peers.Args(trl_rows=4), "qwen3-1.7b") == 4


@pytest.mark.parametrize("stop, mean, rows", [(1 / 31, (1 - (30 / 31) ** 100) * 31, 200), (0.0, 100, 20)])
def test_completions_have_the_expected_lengths(stop, mean, rows):
    """By generate(), which is not how our scripts sample."""
    workload = peers.WORKLOADS["c"]
    torch.manual_seed(0)
    model = peers_child.make_model(workload.config, stop)
    drawn = model.generate(torch.randint(259, 1075, (rows, 6)), max_new_tokens=workload.completion_tokens)[:, 6:]
    ended = (drawn == peers_child.STOP).any(1)
    lengths = torch.where(ended, (drawn == peers_child.STOP).int().argmax(1) + 1, drawn.shape[1]).double()
    # a length's standard deviation is 26, so the mean's of 200 is 1.9: four of them
    assert abs(lengths.mean().item() - mean) <= (7.4 if stop else 0)
    inside = torch.arange(drawn.shape[1]) < lengths[:, None]
    assert not (drawn[inside] == peers_child.PAD).any()  # comlrl ends a completion at a pad


def test_the_chance_to_stop_is_the_same_after_every_prompt():
    workload = peers.WORKLOADS["c"]
    torch.manual_seed(0)
    model = peers_child.make_model(workload.config, workload.stop)
    with torch.no_grad():
        logits = model(torch.randint(259, 1075, (4, 200))).logits
    chances = logits.softmax(-1)[..., peers_child.STOP]
    assert workload.stop == 1 / 31 and chances.min() * 31 > 0.95 and chances.max() * 31 < 1.05


def test_the_table_has_the_ratio_of_each_round():
    seconds = {"ours": [1.0, 2.0, 4.0], "theirs": [3.0, 4.0, 20.0]}  # 3, 2, 5: the ratio of the medians would be 2
    rows = [
        {"workload": "a", "round": k, "comparison": "x", "side": side, "contestant": side, "agents": 2, "error": ""}
        | {"seconds": value, "tokens_per_second": 100 / value, "completion_length": 5.0, "peak_mib": 7.0}
        for side, values in seconds.items()
        for k, value in reversed(list(enumerate(values)))
    ]
    line = peers.table(rows).splitlines()[2]
    assert "| **3.00** (2.00 to 5.00) |" in line and "| 2.000 | 4.000 |" in line and "| 50 | 25 |" in line
    rows[3] |= {"error": "it broke"}  # theirs in round 2
    text = peers.table(rows)
    assert "**2.50** (2.00 to 3.00)" in text and "failed 1 times" in text and "round 2: it broke" in text
    text = peers.table([row | ({"error": "it broke"} if row["side"] == "theirs" else {}) for row in rows])
    assert "| failed | failed |" in text.splitlines()[2]


def test_every_workload_can_be_shrunk_and_every_peer_is_known():
    for name, workload in peers.WORKLOADS.items():
        small = peers_child.make_model(peers.shrunk(workload).config, workload.stop)
        assert small.num_parameters() < 50_000, name
    assert {peer for _, _, peer, _ in peers.COMPARISONS.values()} == set(peers_child.TRAINERS)
    text = io.StringIO(peers.about(peers.Args(), "abc123", {"comlrl": "1.4.3"}))
    assert len(list(csv.reader(text))) == 1  # a single line


def test_the_gpu_is_named_where_there_is_no_nvidia_smi(monkeypatch, tmp_path):
    run = subprocess.run
    (tmp_path / "torch.py").write_text("class cuda:\n    get_device_name = lambda: 'Some GPU'")
    env = os.environ | {"PATH": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    monkeypatch.setattr(subprocess, "run", lambda command, **kwargs: run(command, **kwargs, env=env))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ", Some GPU, " in peers.about(peers.Args(device="cuda"), "x", {}).replace(";", ",")
