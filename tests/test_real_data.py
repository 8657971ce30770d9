"""Real text and a real vocabulary: SciTLDR rows and the Qwen2.5 tokenizer, where they lie beside the repository."""

import pytest
import torch
from conftest import ROOT, two_scripts
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

import envs

DATA, TOKENIZER = ROOT.parent / "shared" / "data" / "scitldr.jsonl", ROOT.parent / "shared" / "tokenizers" / "qwen2.5"
needs_data = pytest.mark.skipif(not DATA.exists(), reason="no ../shared/data/scitldr.jsonl")


@needs_data
@pytest.mark.skipif(not TOKENIZER.exists(), reason="no ../shared/tokenizers/qwen2.5")
@two_scripts
def test_scitldr_with_a_real_vocabulary(script, run, tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=151936, num_key_value_heads=1, tie_word_embeddings=True, **sizes))
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(tmp_path / "model")
    flags = ["--num-iterations", 1, "--eval-tasks", 2, "--max-new-tokens", 16]
    flags += ["--num-generations", 2, "--num-tasks", 2]
    names = run(script, "--dataset", DATA, "--model", tmp_path / "model", *flags)
    assert len(names["train_tasks"]) == 270
    assert names["policies"][0].tokenizer.eos_token_id in names["policies"][0].stop_ids
    entropy = names["metrics"]["train/agent_0/entropy"]
    assert 11 < entropy < 12  # a random model of 151,936 tokens is nearly uniform: log V = 11.93


@needs_data
@pytest.mark.parametrize(
    "name, file, counts",
    [
        ("humaneval", "humaneval", (50, 15)),
        ("coophumaneval", "coophumaneval", (25, 8)),
        ("mbpp", "mbpp_sanitized", (60, 127)),
        ("classeval", "classeval", (19, 8)),
        ("arxiv", "arxiv", (23, 2)),
    ],
)
def test_public_rows_load(name, file, counts, monkeypatch, tmp_path):
    """A set that is refused for one of its rows, or tasks that are left out without need."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    env = envs.make(name, dataset=str(DATA.parent / f"{file}.jsonl"))
    missing = [count - len(env.tasks(split)) for split, count in zip(("train", "test"), counts)]
    assert max(missing) <= 2 and min(missing) >= -6  # some references need root, or pass by chance
