"""What a run must not train on in silence."""

import pathlib

import numpy as np
import pytest
import torch
from conftest import CHAT, MAGRPO, NANO, ROOT, STOP, lines_of, load_policy, make_tokenizer, metrics_of, save_model
from tokenizers import AddedToken
from toy import Letters

import magrpo

TOY = """
--num-iterations 3 --num-turns 2 --num-generations 4 --num-tasks 2 --max-new-tokens 8 --learning-rate 0.01
--eval-tasks 2
"""
TOY = TOY.split()
PARTS = CHAT.replace("{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}")
GEMMA = "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
EMPTY_THOUGHT = CHAT.replace("{{ m.content }}", "{% if m.role != 'user' %}<think></think>{% endif %}{{ m.content }}")
THINKING = CHAT.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")


def with_tokens(*tokens, special=True, template=CHAT):
    tokenizer = make_tokenizer(template)
    tokenizer.add_tokens([AddedToken(token, special=special) for token in tokens])
    return tokenizer


# ---- prompts and completions


def written(policy, text, monkeypatch):
    """The Group of a completion with these tokens."""
    ids = tuple(policy.tokenizer(text).input_ids)
    monkeypatch.setattr(magrpo, "sample", lambda policy, groups, *_: groups[0].completion_ids.append(ids))
    group = magrpo.Group(policy, "a", magrpo.encode(policy, "a"), 1.0)
    magrpo.complete(magrpo.Args(max_new_tokens=9), policy, [group], 1)
    return group


@pytest.mark.parametrize("marks, template", [("tool_call", CHAT), ("think", EMPTY_THOUGHT)])
def test_marks_are_read_and_written_as_they_are(marks, template, tmp_path, monkeypatch):
    """Fails if a reward cannot see a mark that is a special token, or the pad, or a prompt's is changed.

    Or if a prompt ends its own turn.
    """
    call = f"<{marks}>a != b</{marks}>"
    tokenizer = with_tokens(f"<{marks}>", f"</{marks}>", template=template)
    tokenizer.pad_token = "!"
    policy = load_policy(magrpo, save_model(tmp_path / "m", tokenizer=tokenizer, stops=[STOP], vocab_size=261))
    text = policy.tokenizer.decode(magrpo.encode(policy, f"Write {call}.<|im_end|>\n<|im_start|>you"))
    prompt = f"Write {call}.< |im_end|>\n< |im_start|>you"
    assert text == f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    group = written(policy, f"{call}<|im_end|>", monkeypatch)
    assert group.completions == [call]
    assert group.stopped == [True]


def test_what_a_template_opens_is_a_thought(model_dir, monkeypatch):
    """Fails if an unclosed thought is scored as the answer."""
    policy = load_policy(magrpo, model_dir)
    policy.tokenizer.chat_template = THINKING
    assert written(policy, "so", monkeypatch).completions == ["<think>so"]


def test_a_model_without_its_tokenizers_file_is_refused(tmp_path):
    """Fails if its words are split by a guess, or the sentence does not name the argument."""
    with pytest.raises(SystemExit, match=f"--model {tmp_path}: .*tokenizer.json"):
        load_policy(magrpo, str(tmp_path))


# ---- environments


class Odd(Letters):
    """Its tasks and, in training, its rewards or what else is named by `form` have an odd form."""

    def __init__(self, num_agents, num_turns, dataset, seed, form):
        super().__init__(num_agents, num_turns, dataset, seed)
        self.form = form

    def tasks(self, split):
        return [task | {"grid": {(0, 1): 2, "a": torch.ones(2)}} for task in super().tasks(split)]

    def observe(self, task, history):
        return PROMPTS.get(self.form, super().observe(task, history))

    def step(self, branches):
        steps = super().step(branches)
        if self.form == "a step too few":
            return steps[1:]
        if self.form in REWARDS and branches[0][0]["letter"] in "abcdef":
            return [step._replace(reward=REWARDS[self.form]) for step in steps]
        return steps


PROMPTS = {"a prompt too many": ["a", "b", "c"], "a prompt too few": ["a"]}
REWARDS = {
    "nan": float("nan"),
    "infinite": [1.0, float("inf")],
    "one of three": [1.0, 2.0, 3.0],
    "float32": np.float32(0.5),
    "an array": np.array([0.5, 1.0]),
    "bfloat16": torch.tensor([0.5, 1.0], dtype=torch.bfloat16, requires_grad=True),
}
WELL_FORMED = ["float32", "an array", "bfloat16"]
ILL_FORMED = ["nan", "infinite", "one of three", *PROMPTS, "a step too few"]
ODD = [(MAGRPO, form) for form in ILL_FORMED]
ODD += [(ROOT / "madpo.py", "nan"), (NANO, "nan"), (NANO, "a prompt too many"), (NANO, "a step too few")]


@pytest.mark.parametrize("script, form", ODD, ids=lambda x: x if isinstance(x, str) else x.stem)
def test_an_odd_environment_ends_the_run(script, form, run, model_dir, tmp_path):
    """Fails if it is trained on."""
    flags = ["--env", "test_faults:Odd", "--env-kwargs", "form", form, "--model", model_dir]
    with pytest.raises((SystemExit, AttributeError, RuntimeError, TypeError, ValueError)):
        run(script, *TOY, *flags)
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert not list(run_dir.glob("agent_*"))


@pytest.mark.parametrize("form", WELL_FORMED)
def test_rewards_of_libraries_are_numbers(form, run, model_dir):
    """Fails if a log cannot hold them, or a key or an object of a task that JSON does not know."""
    names = run(MAGRPO, *TOY, "--env", "test_faults:Odd", "--env-kwargs", "form", form, "--model", model_dir)
    lines = [line for line in lines_of(names["run_dir"]) if line["split"] == "train"]
    assert lines[0]["rewards"] == [REWARDS[form].tolist()] * 4
    assert lines[0]["task"]["grid"] == {"a": [1.0, 1.0]}


# ---- arguments and runs


@pytest.mark.parametrize("flags", ["--learning-rate -1e-4", "--branching trajectories --joint-mode cross"])
def test_what_cannot_learn_is_refused(flags, run, model_dir):
    """Fails if a run climbs the loss, or trajectories of agents are mixed."""
    with pytest.raises(SystemExit, match="error: "):
        run(MAGRPO, *TOY, "--env", "toy:Letters", "--model", model_dir, *flags.split())


CONFIGS = [  # the file, and what the arguments have then; None: the run is refused
    ('{"anneal_lr": "false"}', None),
    ('{"learning_rate": "1e-5", "seed": "3"}', {"learning_rate": [1e-5], "seed": 3}),
    ("learning_rate: 5e-6\nanneal_lr: false", {"learning_rate": [5e-6], "anneal_lr": False}),
    ('{"lr": 1}', None),
    ("resume: runs/RUN", None),  # a run is resumed with its own arguments
    ("config: more.yaml", None),
    ('{"model": "tiny", "max_new_tokens": null}', {"model": ["tiny"], "max_new_tokens": None}),
    ('{"args": {"env_kwargs": {"a": 1, "b": "c d"}}}', {"env_kwargs": {"a": "1", "b": "c d"}}),
    ('{"num_turns": 2, "num_agents": 9}', {"num_turns": 2, "num_agents": 3}),
]


@pytest.mark.parametrize("text, expected", CONFIGS)
def test_a_config_is_read_as_the_command_line_is(text, expected, tmp_path, monkeypatch):
    """Fails if a value of another type is taken as it is, a flag does not take precedence, or a file names another."""
    path = tmp_path / "config.yaml"
    path.write_text(text)
    monkeypatch.setattr("sys.argv", ["magrpo.py", "--config", str(path), "--num-agents", "3"])
    if expected is None:
        with pytest.raises(SystemExit):
            magrpo.read_args()
    else:
        args = magrpo.read_args()
        assert {name: getattr(args, name) for name in expected} == expected


def test_a_resumed_run_takes_the_files_values_and_keeps_them(run, model_dir, tmp_path):
    """Fails if --config is passed by at a resume, or a second resume falls back to the first values.

    Or if a resume fills up a log that is shorter than it was.
    """
    names = run(MAGRPO, *TOY, "--env", "toy:Letters", "--model", model_dir)
    pathlib.Path(names["run_dir"], "rollouts.jsonl").write_text("")
    (tmp_path / "more.yaml").write_text("num_iterations: 4\nseed: 7")
    for flags in (["--config", "more.yaml", "--seed", 1], []):
        args = run(MAGRPO, "--resume", names["run_dir"], *flags)["args"]
        assert (args.num_iterations, args.seed, args.num_turns) == (4, 1, 2)
    assert len(metrics_of(names["run_dir"])) == 5
    assert {line["iteration"] for line in lines_of(names["run_dir"])} == {4}
