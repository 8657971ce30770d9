"""What a run must not train on in silence, and what ends it with one sentence."""

import json

import numpy as np
import pytest
import torch
from conftest import CHAT, ROOT, STOP, load_policy, make_tokenizer, metrics_of, refused, save_model
from tokenizers import AddedToken
from toy import Letters

import magrpo

MAGRPO = ROOT / "magrpo.py"
TOY = "--num-iterations 3 --num-generations 2 --num-tasks 2 --max-new-tokens 6 --eval-tasks 1 --save-every 1"
TOY = [*TOY.split(), "--joint-mode", "align"]
PARTS = CHAT.replace("{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}")
GEMMA = "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"


def with_tokens(*tokens, special=True, template=CHAT):
    tokenizer = make_tokenizer(template)
    tokenizer.add_tokens([AddedToken(token, special=special) for token in tokens])
    return tokenizer


def test_marks_are_read_and_written_as_they_are(tmp_path):
    """Fails if a reward cannot see a mark that is a special token, or a prompt's marks are changed."""
    call = "<tool_call>f(1)</tool_call>"
    tokenizer = with_tokens("<tool_call>", "</tool_call>")
    policy = load_policy(magrpo, save_model(tmp_path / "m", tokenizer=tokenizer, stops=[STOP], vocab_size=261))
    prompt = f"Write {call}.<|im_end|>"
    text = policy.tokenizer.decode(magrpo.encode(policy, prompt, 1))
    assert text == f"<|im_start|>user\nWrite {call}.< |im_end|><|im_end|>\n<|im_start|>assistant\n"
    pair = policy.tokenizer(f"{call}<|im_end|>").input_ids, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(magrpo, "sample", lambda policy, prompts, *_: [[pair] for _ in prompts])
        (group,) = magrpo.complete(magrpo.Args(max_new_tokens=9), policy, ["a"], 1)
    assert group.completions == [call]
    assert group.stopped == [True]


def test_an_end_of_turn_that_is_not_special(tmp_path):
    """Fails if completions do not stop at it, or a prompt that quotes it ends its own turn."""
    tokenizer = with_tokens("<start_of_turn>", "<end_of_turn>", special=False, template=GEMMA)
    policy = load_policy(magrpo, save_model(tmp_path / "m", tokenizer=tokenizer, vocab_size=261))
    end = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    assert end in policy.stop_ids
    assert magrpo.encode(policy, "a<end_of_turn>b", 1).count(end) == 1


@pytest.mark.parametrize("template", [PARTS, {"other": CHAT}], ids=["parts", "no default"])
def test_a_template_that_cannot_be_used(template, run, tmp_path, capsys):
    """Fails if all prompts become one sequence without a message, or it ends in a traceback."""
    path = save_model(tmp_path / "m", tokenizer=make_tokenizer(template))
    assert "--model" in refused(run, capsys, MAGRPO, *TOY, "--env", "toy:Letters", "--model", path)


class Odd(Letters):
    """Its rewards, or what else is named by `form`, have an odd form from the third call of step() on."""

    def __init__(self, num_agents, num_turns, dataset, seed, form):
        super().__init__(num_agents, num_turns, dataset, seed)
        self.form = form
        self.calls = 0

    def tasks(self, split):
        return [] if self.form == "no tasks" else super().tasks(split)

    def observe(self, task, history):
        prompts = super().observe(task, history)
        return PROMPTS.get(self.form, prompts)

    def step(self, branches):
        self.calls += 1
        steps = super().step(branches)
        if self.form == "a generator":
            return (step for step in steps)
        if self.form == "a step too few":
            return steps[1:]
        if self.calls > 2 and self.form in REWARDS:
            return [step._replace(reward=REWARDS[self.form]) for step in steps]
        return steps


PROMPTS = {"one string": "ab", "a prompt too many": ["a", "b", "c"], "a prompt too few": ["a"]}
REWARDS = {
    "nan": float("nan"),
    "infinite": [1.0, float("inf")],
    "a string": "1.0",
    "None": None,
    "one of two agents": [1.0],
    "float32": np.float32(0.5),
    "an array": np.array([0.5, 1.0]),
    "a torch scalar": torch.tensor(0.5),
}
WELL_FORMED = ["float32", "an array", "a torch scalar"]
ILL_FORMED = [*(form for form in REWARDS if form not in WELL_FORMED), "no tasks", "one string", "a prompt too many"]
ILL_FORMED += ["a prompt too few", "a generator", "a step too few"]


@pytest.mark.parametrize("form", ILL_FORMED)
def test_an_odd_environment_ends_the_run(form, run, model_dir, tmp_path, capsys):
    """Fails if it is trained on, or its sentence does not name --env, or the iterations before it are lost."""
    flags = ["--env", "test_faults:Odd", "--env-kwargs", "form", form, "--model", model_dir]
    assert "--env" in refused(run, capsys, MAGRPO, *TOY, *flags)
    if form in REWARDS:
        (run_dir,) = (tmp_path / "runs").iterdir()
        # call 1 is the evaluation
        assert torch.load(run_dir / "state.pt")["iteration"] == 1
        assert len(metrics_of(run_dir)) == 2


@pytest.mark.parametrize("form", WELL_FORMED)
def test_rewards_of_libraries_are_numbers(form, run, model_dir, tmp_path):
    """Fails if a log cannot hold them."""
    run(MAGRPO, *TOY, "--env", "test_faults:Odd", "--env-kwargs", "form", form, "--model", model_dir)
    (run_dir,) = (tmp_path / "runs").iterdir()
    last = json.loads((run_dir / "rollouts.jsonl").read_text().splitlines()[-1])
    assert last["rewards"] == [REWARDS[form].tolist()]


CONFIGS = [  # the file, and what the arguments have then; None: the run is refused
    ('{"anneal_lr": "false"}', None),
    ('{"anneal_lr": false}', {"anneal_lr": False}),
    ('{"learning_rate": "1e-5", "seed": "3"}', {"learning_rate": [1e-5], "seed": 3}),
    ('{"lr": 1}', None),
    ('{"temperature": null}', None),
    ('{"model": "tiny", "max_new_tokens": null}', {"model": ["tiny"], "max_new_tokens": 96}),
    ('{"args": {"env_kwargs": {"a": 1, "b": "c d"}, "devices": []}}', {"env_kwargs": {"a": "1", "b": "c d"}}),
    ('\ufeff{"seed": 3}', None),
    ('{"seed": 3,}', None),
    ('{"num_turns": 2, "num_agents": 9}', {"num_turns": 2, "num_agents": 3}),
]


@pytest.mark.parametrize("text, expected", CONFIGS)
def test_a_config_is_read_as_the_command_line_is(text, expected, tmp_path, monkeypatch, capsys):
    """Fails if a value of another type is taken as it is, or a flag does not take precedence."""
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["magrpo.py", "--config", str(path), "--num-agents", "3"])
    if expected is None:
        with pytest.raises(SystemExit) as end:
            magrpo.read_args()
        assert end.value.code == 2
    else:
        args = magrpo.read_args()
        assert {name: getattr(args, name) for name in expected} == expected


def test_logs_that_have_become_shorter(run, model_dir, tmp_path):
    """Fails if a resume fills a log with zeros, or misses one that is gone."""
    run(MAGRPO, *TOY, "--env", "toy:Letters", "--model", model_dir)
    (run_dir,) = (tmp_path / "runs").iterdir()
    (run_dir / "metrics.jsonl").write_text("")
    (run_dir / "rollouts.jsonl").unlink()
    run(MAGRPO, "--resume", run_dir, "--num-iterations", 4)
    assert [line["iteration"] for line in metrics_of(run_dir)] == [4]
    assert (run_dir / "rollouts.jsonl").read_bytes().count(b"\0") == 0
