"""nano.py: what it samples; its gradient is in test_gradient.py, what it refuses in test_faults.py."""

import json

from conftest import END, NANO, STOP, save_model
from test_faults import with_tokens
from test_gradient import TOY


def test_the_whole_distribution_is_sampled_up_to_the_end_of_a_turn(run, tmp_path):
    """Fails if the model's own settings cut or bend what is sampled, or rewards cannot see a special token.

    Or if a model needs a pad token, or more is trained after the end of its turn.
    """
    tokenizer = with_tokens("<tool_call>")
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.pad_token = None
    path = tmp_path / "model"
    save_model(path, tokenizer=tokenizer, vocab_size=260)
    written = []
    for settings in {}, {"repetition_penalty": 1.7, "min_p": 0.2, "suppress_tokens": [50, 60]}:
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": END} | settings))
        flags = ["--num-generations", 10, "--max-new-tokens", 90, "--output-dir", tmp_path / str(settings)]
        (nodes,) = run(NANO, *TOY, "--model", path, *flags)["turns"]
        groups = [group for node in nodes for group in node.groups.values()]
        written.append([pair for group in groups for pair in zip(group.completions, group.completion_ids)])
    assert written[0] == written[1]
    for text, (*earlier, last) in written[0]:
        assert {STOP, END}.isdisjoint(earlier)
        assert text == tokenizer.decode([token for token in (*earlier, last) if token not in (STOP, END)])
    assert any("<tool_call>" in text for text, _ in written[0])
