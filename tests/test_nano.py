"""nano.py: what it samples, trains and refuses; its gradient is in test_gradient.py."""

import json
import shutil
import subprocess

import pytest
import test_gradient
import torch
from conftest import CHAT, CRITIC_FREE, END, ROOT, STOP, STOP_IDS, make_tokenizer, save_model
from toy import Letters
from transformers import AutoModelForCausalLM, GenerationMixin

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


class Equal(Letters):
    """From the third call on, after the first evaluation and the first rollout, all answers earn 0.7."""

    calls = 0

    def step(self, branches):
        self.calls += 1
        steps = super().step(branches)
        return [step._replace(reward=0.7) for step in steps] if self.calls > 2 else steps


@pytest.mark.parametrize("alike", [False, True], ids=["equal returns", "equal answers"])
def test_without_a_gradient_a_policy_does_not_move(alike, run, model_dir, tmp_path, monkeypatch):
    """Fails if momentum or rounding errors move a policy whose answers earn the same, or are alike."""
    original, calls = GenerationMixin.generate, []

    def generate(model, *args, **options):
        calls.append(model)
        sequences = original(model, *args, **options)
        # of agent 0 in the second update; agent 1's answers differ, and so do returns
        return sequences[:1].expand_as(sequences) if alike and len(calls) == 5 else sequences

    monkeypatch.setattr(GenerationMixin, "generate", generate)
    flags = ("--model", model_dir, "--joint-mode", "align", "--num-tasks", 1)
    flags = (*flags, "--env", "toy:Letters" if alike else "test_nano:Equal")
    weights = [AutoModelForCausalLM.from_pretrained(model_dir).lm_head.weight]
    for num_iterations in 1, 2:
        calls.clear()
        names = run(
            NANO, *TOY, *flags, "--num-iterations", num_iterations, "--output-dir", tmp_path / str(num_iterations)
        )
        weights.append(names["policies"][0].model.lm_head.weight)
    if alike:
        assert abs(names["turns"][0][0].groups[0].advantages).max() > 1e-3
    assert not torch.equal(weights[0], weights[1])
    assert torch.equal(weights[1], weights[2])


def test_the_templates_end_of_turn_ends_a_completion(run, tmp_path):
    """Fails if a base model, whose own stop token is another one, writes on after its turn."""
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    path = save_model(tmp_path / "model", tokenizer=tokenizer, stops=[END])
    groups = run(NANO, *TOY, "--model", path, "--num-generations", 20, "--max-new-tokens", 50)["groups"]
    rows = [ids for group in groups for ids in group.completion_ids]
    assert any(ids[-1] == STOP for ids in rows)
    assert not any(STOP in ids[:-1] for ids in rows)


def test_an_opened_thought_is_put_back(run, tmp_path):
    """Fails if environments cannot see that a completion begins inside a thought, and grade it as the answer."""
    tokenizer = make_tokenizer(CHAT.replace("assistant\n{% endif", "assistant\n<think>\n{% endif"))
    path = save_model(tmp_path / "model", tokenizer=tokenizer)
    for group in run(NANO, *TOY, "--model", path)["groups"]:
        for text, ids in zip(group.completions, group.completion_ids):
            assert text == "<think>" + tokenizer.decode([token for token in ids if token not in STOP_IDS])


@pytest.mark.parametrize("most", [1e-3, 0, -1])
def test_a_gradient_is_clipped_to_its_norm(most, run, updates, model_dir):
    """Fails if it is not, or if 0 or less, which is no clipping, makes it 0 or turns it round."""
    names = run(NANO, *TOY, "--model", model_dir, "--max-grad-norm", most)
    assert len(updates) == 2
    for i, update in enumerate(updates):
        norm = torch.cat([gradient.flatten() for gradient in update.gradients]).norm()
        assert norm == pytest.approx(most if most > 0 else names["metrics"][f"agent_{i}/grad_norm"], rel=1e-3)


class Infinite(Letters):
    """Rewards that are no numbers."""

    def step(self, branches):
        return [step._replace(reward=float("nan")) for step in super().step(branches)]


REFUSED = ["--num-generations 1", "--learning-rate -0.1", "--env test_nano:Infinite"]


@pytest.mark.parametrize("flags", REFUSED)
def test_what_cannot_be_trained_ends_the_run(flags, run, model_dir):
    """Fails if a run goes on that trains nothing, or away from the reward."""
    with pytest.raises(SystemExit, match="error: "):
        run(NANO, *TOY, "--model", model_dir, *flags.split())


class Careless(Letters):
    """Gives a string in place of a list."""

    def observe(self, task, history):
        return super().observe(task, history)[0]


def test_letters_are_no_prompts(run, model_dir):
    """Fails if each agent gets a letter of a string as its prompt."""
    with pytest.raises(ValueError):
        run(NANO, *TOY, "--model", model_dir, "--env", "test_nano:Careless")


def test_a_template_without_the_prompt_is_refused(run, tmp_path):
    """Fails if completions of an empty chat are trained."""
    path = save_model(tmp_path / "model", tokenizer=make_tokenizer(PARTS))
    with pytest.raises(SystemExit, match="--model"):
        run(NANO, *TOY, "--model", path)
