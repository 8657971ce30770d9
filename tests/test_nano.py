"""nano.py: what it samples, trains and refuses; its gradient is in test_gradient.py."""

import json
import shutil
import subprocess

import pytest
import test_gradient
from conftest import CHAT, CRITIC_FREE, ROOT, STOP, make_tokenizer, save_model
from toy import Letters

NANO = ROOT / "nano.py"
TOY = test_gradient.TOY
updates = test_gradient.updates
PARTS = "{% for part in messages[0].content %}{{ part.text }}{% endfor %}"  # a string has none


def test_the_whole_distribution_is_sampled(run, tmp_path):
    """Fails if the model's own settings cut or bend what is sampled."""
    save_model(tmp_path / "model")
    completions = []
    for settings in {}, {"repetition_penalty": 1.7, "min_p": 0.2, "suppress_tokens": [50, 60]}:
        (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": STOP} | settings))
        names = run(NANO, *TOY, "--model", tmp_path / "model", "--output-dir", tmp_path / str(settings))
        completions.append([group.completions for group in names["groups"]])
    assert completions[0] == completions[1]


def test_marks_inside_a_completion_stay(run, tmp_path):
    """Fails if rewards cannot read a special token, or the stop token is left, or a tokenizer needs a pad token."""
    tokenizer = make_tokenizer(pad=None)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<tool_call>"]})
    path = save_model(tmp_path / "model", tokenizer=tokenizer, vocab_size=260, stops=[STOP])
    completions = ""
    for group in run(NANO, *TOY, "--model", path, "--max-new-tokens", 90)["groups"]:
        expected = [tokenizer.decode([token for token in ids if token != STOP]) for ids in group.completion_ids]
        assert group.completions == expected
        completions += "".join(expected)
    assert "<tool_call>" in completions


def test_without_a_baseline_equal_returns_are_trained(run, updates, model_dir, tmp_path):
    """Fails if a group is left out because its returns are equal, where these are its advantages."""
    shutil.copy(NANO, tmp_path / "nano_none.py")
    subprocess.run(["git", "apply", ROOT / "docs/lesson/nano_none.patch"], cwd=tmp_path, check=True)
    run(tmp_path / "nano_none.py", *TOY, "--env", "test_gradient:Equal", "--model", model_dir)
    test_gradient.check(updates, CRITIC_FREE[3], [model_dir])


def test_equal_returns_leave_no_gradient(run, model_dir):
    """Fails if rounding errors of equal returns are trained on."""
    flags = ("--env", "test_gradient:Equal", "--joint-mode", "align")
    metrics = run(NANO, *TOY, *flags, "--model", model_dir)["metrics"]
    assert metrics["agent_0/grad_norm"] == 0


class Faulty(Letters):
    """Prompts or Steps of another number than asked for."""

    def __init__(self, fault, **setup):
        super().__init__(**setup)
        self.fault = fault

    def observe(self, task, history):
        prompts = super().observe(task, history)
        return {"a string": prompts[0], "few prompts": prompts[:1], "many prompts": prompts * 2}.get(
            self.fault, prompts
        )

    def step(self, branches):
        return super().step(branches)[self.fault == "few steps" :]


@pytest.mark.parametrize("fault", ["a string", "few prompts", "many prompts", "few steps"])
def test_an_environment_that_miscounts_is_refused(fault, run, model_dir):
    """Fails if letters of a string are taken for prompts, one prompt is left out, or a Step is missing."""
    with pytest.raises(ValueError, match="zip"):
        run(NANO, *TOY, "--model", model_dir, "--env", "test_nano:Faulty", "--env-kwargs", "fault", fault)


@pytest.mark.parametrize("template", [PARTS, {"rag": CHAT}, None])
def test_a_model_that_cannot_be_used_is_refused(template, run, tmp_path):
    """Fails if a chat template without the prompt is trained on, or there is no sentence about a missing one."""
    path = save_model(tmp_path / "model", tokenizer=make_tokenizer(template))
    with pytest.raises(SystemExit, match="--model"):
        run(NANO, *TOY, "--model", path)
