"""nano.py: what it samples; its gradient is in test_gradient.py, what it refuses in test_faults.py."""

import json
from itertools import chain

from conftest import END, ROOT, STOP, save_model
from test_faults import with_tokens
from test_gradient import TOY

NANO = ROOT / "nano.py"


def test_the_whole_distribution_is_sampled(run, tmp_path):
    """Fails if the model's own settings cut or bend what is sampled."""
    save_model(tmp_path / "model")
    completions = []
    for settings in {}, {"repetition_penalty": 1.7, "min_p": 0.2, "suppress_tokens": [50, 60]}:
        (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": STOP} | settings))
        names = run(NANO, *TOY, "--model", tmp_path / "model", "--output-dir", tmp_path / str(settings))
        completions.append([group.completions for node in names["turns"][0] for group in node.groups.values()])
    assert completions[0] == completions[1]


def test_a_completion_ends_with_its_turn_and_is_read_as_it_is(run, tmp_path):
    """Fails if a base model, whose own stop token is another one, writes on after its turn, or needs a pad token.

    Or if rewards cannot see a special token.
    """
    tokenizer = with_tokens("<tool_call>")
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.pad_token = None
    path = save_model(tmp_path / "model", tokenizer=tokenizer, vocab_size=260, stops=[END])
    texts = ""
    last_ids = set()
    (nodes,) = run(NANO, *TOY, "--model", path, "--num-generations", 10, "--max-new-tokens", 90)["turns"]
    for group in chain(*[node.groups.values() for node in nodes]):
        for text, ids in zip(group.completions, group.completion_ids):
            *earlier, last = ids
            assert {STOP, END}.isdisjoint(earlier)
            assert text == tokenizer.decode([token for token in ids if token not in (STOP, END)])
            last_ids.add(last)
            texts += text
    assert STOP in last_ids
    assert "<tool_call>" in texts
