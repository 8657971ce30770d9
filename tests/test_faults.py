"""What a run must not train on in silence, and no step without a gradient."""

import json

import numpy as np
import pytest
import torch
from conftest import CHAT, ROOT, STOP, lines_of, load_policy, make_tokenizer, metrics_of, save_model
from tokenizers import AddedToken
from toy import Letters
from transformers import GenerationConfig

import magrpo

MAGRPO = ROOT / "magrpo.py"
TOY = "--num-iterations 3 --num-turns 2 --num-generations 4 --num-tasks 2 --max-new-tokens 8 --learning-rate 0.01"
TOY = [*TOY.split(), "--eval-tasks", "2", "--eval-every", "0"]
PARTS = CHAT.replace("{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}")
GEMMA = "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
EMPTY_THOUGHT = CHAT.replace("{{ m.content }}", "{% if m.role != 'user' %}<think></think>{% endif %}{{ m.content }}")
both_branchings = pytest.mark.parametrize("branching", ["tree", "trajectories"])


def with_tokens(*tokens, special=True, template=CHAT):
    tokenizer = make_tokenizer(template)
    tokenizer.add_tokens([AddedToken(token, special=special) for token in tokens])
    return tokenizer


# ---- prompts and completions


def written(policy, text, monkeypatch):
    """The Group of a completion with these tokens."""
    pair = policy.tokenizer(text).input_ids, []
    monkeypatch.setattr(magrpo, "sample", lambda policy, prompt_ids, *_: [[pair] for _ in prompt_ids])
    (group,) = magrpo.complete(magrpo.Args(max_new_tokens=9), policy, ["a"], 1)
    return group


@pytest.mark.parametrize("marks, template", [("tool_call", CHAT), ("think", EMPTY_THOUGHT)])
def test_marks_are_read_and_written_as_they_are(marks, template, tmp_path, monkeypatch):
    """Fails if a reward cannot see a mark that is a special token, or a prompt's marks are changed."""
    call = f"<{marks}>f(1)</{marks}>"
    tokenizer = with_tokens(f"<{marks}>", f"</{marks}>", template=template)
    policy = load_policy(magrpo, save_model(tmp_path / "m", tokenizer=tokenizer, stops=[STOP], vocab_size=261))
    text = policy.tokenizer.decode(magrpo.encode(policy, f"Write {call}.<|im_end|>"))
    assert text == f"<|im_start|>user\nWrite {call}.< |im_end|><|im_end|>\n<|im_start|>assistant\n"
    group = written(policy, f"{call}<|im_end|>", monkeypatch)
    assert group.completions == [call]
    assert group.stopped == [True]


def test_an_exclamation_mark_for_padding_is_text(tmp_path, monkeypatch):
    """Fails if it is taken out of a completion, changed in a prompt, or ends a completion."""
    tokenizer = make_tokenizer(pad="!")
    policy = load_policy(magrpo, save_model(tmp_path / "m", tokenizer=tokenizer))
    assert "Stop! if a != b" in policy.tokenizer.decode(magrpo.encode(policy, "Stop! if a != b"))
    group = written(policy, "a != b", monkeypatch)
    assert group.completions == ["a != b"]
    assert group.stopped == [False]


def test_an_end_of_turn_that_is_not_special(tmp_path):
    """Fails if completions do not stop at it, or a prompt that quotes it ends its own turn."""
    tokenizer = with_tokens("<start_of_turn>", "<end_of_turn>", special=False, template=GEMMA)
    policy = load_policy(magrpo, save_model(tmp_path / "m", tokenizer=tokenizer, vocab_size=261))
    end = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    assert end in policy.stop_ids
    assert magrpo.encode(policy, "a<end_of_turn>b").count(end) == 1


def test_a_template_that_leaves_out_the_message_is_refused(run, tmp_path):
    """Fails if all prompts become one sequence."""
    path = save_model(tmp_path / "m", tokenizer=make_tokenizer(PARTS))
    with pytest.raises(SystemExit, match="template"):
        run(MAGRPO, *TOY, "--env", "toy:Letters", "--model", path)


def test_no_end_is_refused(tmp_path):
    """Fails if every completion would run to its limit."""
    tokenizer = make_tokenizer(chat_template=None)
    tokenizer.eos_token = None
    path = save_model(tmp_path / "m", tokenizer=tokenizer)
    GenerationConfig().save_pretrained(path)
    with pytest.raises(SystemExit, match="no token ends"):
        load_policy(magrpo, path)


# ---- environments


class Odd(Letters):
    """Its rewards, or what else is named by `form`, have an odd form from the third call of step() on."""

    def __init__(self, num_agents, num_turns, dataset, seed, form):
        super().__init__(num_agents, num_turns, dataset, seed)
        self.form = form
        self.calls = 0

    def observe(self, task, history):
        return PROMPTS.get(self.form, super().observe(task, history))

    def step(self, branches):
        self.calls += 1
        steps = super().step(branches)
        if self.form == "a step too few":
            return steps[1:]
        if self.form in PARTS_NAMED:
            return [step._replace(parts={self.form: -100.0}) for step in steps]
        if self.calls > 2 and self.form in REWARDS:
            return [step._replace(reward=REWARDS[self.form]) for step in steps]
        return steps


PROMPTS = {"one string": "ab", "a prompt too many": ["a", "b", "c"], "a prompt too few": ["a"]}
PARTS_NAMED = ["return", "reward_turn1", "agent_0/entropy", "return_se"]
REWARDS = {
    "nan": float("nan"),
    "infinite": [1.0, float("inf")],
    "a string": "a",
    "None": None,
    "one of three": [1.0, 2.0, 3.0],
    "float32": np.float32(0.5),
    "an array": np.array([0.5, 1.0]),
    "a torch scalar": torch.tensor(0.5),
}
WELL_FORMED = ["float32", "an array", "a torch scalar"]
ILL_FORMED = [*(form for form in REWARDS if form not in WELL_FORMED), *PROMPTS, *PARTS_NAMED, "a step too few"]


@pytest.mark.parametrize("form", ILL_FORMED)
def test_an_odd_environment_ends_the_run(form, run, model_dir, tmp_path):
    """Fails if it is trained on: the letters of a string as prompts, or two things averaged under one name."""
    flags = ["--env", "test_faults:Odd", "--env-kwargs", "form", form, "--model", model_dir]
    with pytest.raises((SystemExit, ValueError, TypeError)):
        run(MAGRPO, *TOY, *flags)
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert not list(run_dir.glob("agent_*"))


@pytest.mark.parametrize("form", WELL_FORMED)
def test_rewards_of_libraries_are_numbers(form, run, model_dir, tmp_path):
    """Fails if a log cannot hold them."""
    run(MAGRPO, *TOY, "--env", "test_faults:Odd", "--env-kwargs", "form", form, "--model", model_dir)
    (run_dir,) = (tmp_path / "runs").iterdir()
    last = json.loads((run_dir / "rollouts.jsonl").read_text().splitlines()[-1])
    assert last["rewards"] == [REWARDS[form].tolist()]


class Tupled(Letters):
    def tasks(self, split):
        return [task | {"grid": {(0, 1): 2, "a": torch.ones(2)}} for task in super().tasks(split)]


def test_odd_tasks_are_logged_and_a_home_is_found(run, model_dir, tmp_path, monkeypatch):
    """Fails if a key or an object that JSON does not know ends the run, or ~ becomes a folder."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    flags = ["--env", "test_faults:Tupled", "--num-iterations", 0, "--output-dir", "~/runs"]
    names = run(MAGRPO, *TOY, *flags, "--model", model_dir)
    assert names["run_dir"].startswith(str(tmp_path / "home"))
    assert lines_of(names["run_dir"])[0]["task"]["grid"] == {"a": [1.0, 1.0]}


# ---- steps


class Silent(Letters):
    """Rewards that differ in the first iteration of training, and are equal, up to rounding, afterwards."""

    calls = 0
    size = 1.0

    def step(self, branches):
        steps = super().step(branches)
        Silent.calls += 1
        if Silent.calls in (3, 4):
            return [step._replace(reward=Silent.size * (k + step.reward), done=False) for k, step in enumerate(steps)]
        rounding = 1e-16 * Silent.size
        return [step._replace(reward=0.1 * Silent.size + k * rounding, done=False) for k, step in enumerate(steps)]


class Same(Letters):
    """Noise for a reward, whatever is written."""

    def step(self, branches):
        return [step._replace(reward=float(torch.rand(()))) for step in super().step(branches)]


class Broken(Same):
    """A reward that is NaN in training, for one of the agents."""

    def step(self, branches):
        nan = float("nan")
        return [step._replace(reward=[nan, 1.0] if len(branches) > 2 else 1.0) for step in super().step(branches)]


@pytest.mark.parametrize("size", [1.0, 1e9])
@both_branchings
def test_momentum_alone_moves_nothing(branching, size, run, steps, model_dir):
    """Fails if a policy steps where all returns are equal, up to rounding."""
    Silent.calls, Silent.size = 0, size
    flags = ["--env", "test_faults:Silent", "--branching", branching, "--no-anneal-lr"]
    names = run(MAGRPO, *TOY, *flags, "--model", model_dir)
    assert len(steps) == 2  # one of each agent, in the first iteration
    lines = metrics_of(names["run_dir"])
    assert [line["agent_0/grad_norm"] > 0 for line in lines[1:]] == [True, False, False]
    assert ["eval/return" in line for line in lines] == [True, False, False, True]


@both_branchings
def test_completions_that_are_all_alike_move_nothing(branching, run, steps, model_dir, monkeypatch):
    """Fails if rounding errors of equal completions, which sum to 0, are a gradient."""
    monkeypatch.setattr(torch, "rand_like", lambda x: torch.full_like(x, 0.5))
    names = run(MAGRPO, *TOY, "--env", "test_faults:Same", "--branching", branching, "--model", model_dir)
    assert steps == []
    assert metrics_of(names["run_dir"])[1]["train/zero_variance_groups"] < 1


def test_a_weight_that_is_nan_ends_the_run(run, steps, model_dir):
    """Fails if it is left out as a rounding error, or a step is made with it."""
    with pytest.raises(SystemExit, match="nan"):
        run(MAGRPO, *TOY, "--env", "test_faults:Broken", "--model", model_dir)
    assert len(steps) <= 1  # of the other agent


def test_a_bound_of_0_does_not_clip(run, steps, model_dir):
    """Fails if no weight moves."""
    Silent.calls, Silent.size = 0, 1.0
    flags = ["--env", "test_faults:Silent", "--max-grad-norm", 0]
    names = run(MAGRPO, *TOY, *flags, "--model", model_dir)
    policy = names["policies"][0]
    assert any(not torch.equal(p, steps[0].weights[name]) for name, p in policy.trained.items())


def test_a_negative_rate_is_refused(run, model_dir):
    """Fails if a run climbs the loss."""
    with pytest.raises(SystemExit, match="--learning-rate"):
        run(MAGRPO, *TOY, "--env", "toy:Letters", "--model", model_dir, "--learning-rate", -1e-4)


# ---- arguments and runs


CONFIGS = [  # the file, and what the arguments have then; None: the run is refused
    ('{"anneal_lr": "false"}', None),
    ('{"learning_rate": "1e-5", "seed": "3"}', {"learning_rate": [1e-5], "seed": 3}),
    ("learning_rate: 5e-6\nanneal_lr: false", {"learning_rate": [5e-6], "anneal_lr": False}),
    ('{"lr": 1}', None),
    ('{"model": "tiny", "max_new_tokens": null}', {"model": ["tiny"], "max_new_tokens": None}),
    ('{"args": {"env_kwargs": {"a": 1, "b": "c d"}}}', {"env_kwargs": {"a": "1", "b": "c d"}}),
    ('{"num_turns": 2, "num_agents": 9}', {"num_turns": 2, "num_agents": 3}),
]


@pytest.mark.parametrize("text, expected", CONFIGS)
def test_a_config_is_read_as_the_command_line_is(text, expected, tmp_path, monkeypatch):
    """Fails if a value of another type is taken as it is, or a flag does not take precedence."""
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
    """Fails if --config is passed by at a resume, or a second resume falls back to the first values."""
    names = run(MAGRPO, *TOY, "--env", "toy:Letters", "--model", model_dir)
    (tmp_path / "more.yaml").write_text("num_iterations: 4\nseed: 7")
    for flags in (["--config", "more.yaml", "--seed", 1], []):
        args = run(MAGRPO, "--resume", names["run_dir"], *flags)["args"]
        assert (args.num_iterations, args.seed, args.num_turns) == (4, 1, 2)
    assert len(metrics_of(names["run_dir"])) == 5


@pytest.mark.optional("peft")
def test_another_rank_is_refused_at_a_resume(run, model_dir):
    """Fails if a moment has another shape than its weight."""
    flags = ["--env", "toy:Letters", "--num-iterations", 1, "--lora-rank", 2]
    names = run(MAGRPO, *TOY, *flags, "--model", model_dir)
    for rank in 1, 4:
        with pytest.raises(SystemExit, match="--resume"):
            run(MAGRPO, "--resume", names["run_dir"], "--lora-rank", rank)


def test_the_error_of_an_evaluation(run, model_dir):
    """Fails if it is not the standard error of the mean over tasks."""
    names = run(MAGRPO, *TOY, "--env", "test_faults:Same", "--eval-tasks", 3, "--model", model_dir)
    returns = {}
    for line in lines_of(names["run_dir"]):
        if line["iteration"] == 3 and line["split"] == "test":
            returns[line["task_number"]] = returns.get(line["task_number"], 0) + line["rewards"][0]
    expected = torch.tensor(list(returns.values())).std() / len(returns) ** 0.5
    assert metrics_of(names["run_dir"])[-1]["eval/return_se"] == pytest.approx(expected.item(), rel=1e-4)
