"""sft.py: the loss against one sequence at a time, what is trained, the data filters, and a run from end to end."""

import glob
import itertools
import json
import os
import runpy
import shutil
import signal
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import STOP, make_tokenizer, save_model
from processes import Started, printed_by
from safetensors import SafetensorError
from tokenizers import Regex, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertLMHeadModel,
    CohereForCausalLM,
    GPT2LMHeadModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import envs
import sft
from rewards.writing import content_words

ROOT = os.path.dirname(os.path.abspath(sft.__file__))
PAD = 0


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.5,  # far from uniform, so that a wrong position or token shows
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


ROWS = [([3, 4, 5, 6, 7], [8, 9, 2]), ([10, 0, 11], [12, 13, 14, 15, 2]), ([16], [2])]  # a prompt may hold the pad id


def reference(model, prompt, completion):
    """The obvious way: the whole sequence through the model, and each completion token from the position before."""
    logprobs = model(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
    return torch.stack([-logprobs[len(prompt) + t - 1, token] for t, token in enumerate(completion)])


def test_loss_equals_one_sequence_at_a_time(model):
    losses = sft.token_losses(model, ROWS, PAD)
    expected = torch.cat([reference(model, *row) for row in ROWS])
    assert losses.shape == (9,)
    torch.testing.assert_close(losses, expected, atol=1e-5, rtol=0)


def test_gradient_does_not_depend_on_the_micro_batches(model):
    grads = []
    num_tokens = sum(len(completion) for _, completion in ROWS)
    for max_batch_tokens in (1, 10_000):
        model.zero_grad()
        batches = list(sft.micro_batches(ROWS, max_batch_tokens))
        for rows in batches:
            (sft.token_losses(model, rows, PAD).sum() / num_tokens).backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        assert len(batches) == (3 if max_batch_tokens == 1 else 1)
    torch.testing.assert_close(*grads, atol=1e-6, rtol=1e-5)
    model.zero_grad()
    torch.cat([reference(model, *row) for row in ROWS]).mean().backward()
    torch.testing.assert_close(
        grads[0], torch.cat([p.grad.flatten() for p in model.parameters()]), atol=1e-6, rtol=1e-5
    )


def test_stop_token_is_trained_and_the_pad_is_not(model):
    before = sft.token_losses(model, ROWS, PAD)
    assert torch.equal(before, sft.token_losses(model, ROWS, pad_id=49))
    changed = [(prompt, [*completion[:-1], 20]) for prompt, completion in ROWS]
    differs = sft.token_losses(model, changed, PAD) != before
    assert differs.tolist() == [False, False, True, False, False, False, False, True, True]


def test_prompt_is_read_and_not_trained(model):
    embedding = model.get_input_embeddings().weight
    losses = sft.token_losses(model, [([3, 4], [5, 2])], PAD)
    assert len(losses) == 2
    other = sft.token_losses(model, [([7, 4], [5, 2])], PAD)
    assert (losses != other).all()  # read
    # lm_head's gradient is that of one prediction, from the last prompt token: no prompt token is a target.
    (gradient,) = torch.autograd.grad(sft.token_losses(model, [([3, 4], [5])], PAD).sum(), model.lm_head.weight)
    probabilities = model(torch.tensor([[3, 4]])).logits[0, -1].softmax(-1)
    hidden = model.base_model(torch.tensor([[3, 4]])).last_hidden_state[0, -1]
    one_hot = torch.nn.functional.one_hot(torch.tensor(5), len(embedding))
    torch.testing.assert_close(gradient, (probabilities - one_hot)[:, None] * hidden, atol=1e-5, rtol=1e-4)


def rollout_line(split="train"):
    agents = [
        {"prompt": "p0", "completions": ["a", "b", "c"], "stopped": [True] * 3},
        {"prompt": "p1", "completions": ["x", "y", "z"], "stopped": [True] * 3},
    ]
    line = {"iteration": 1, "split": split, "turn": 1, "task": {}, "agents": agents, "parts": [{}] * 4}
    return line | {"joint": [[0, 0], [1, 2], [0, 1], [2, 2]], "rewards": [1.0, 2.5, 2.0, 1.9]}


def test_rollouts_filter_keeps_the_parts_of_good_joint_actions_once():
    pairs = sft.pairs_of_rollouts([rollout_line(), rollout_line(), rollout_line("eval")], 2.0)
    assert pairs == [("p0", "b"), ("p1", "z"), ("p0", "a"), ("p1", "y")]
    assert sft.pairs_of_rollouts([rollout_line("eval")], 0.0) == []
    assert len(sft.pairs_of_rollouts([rollout_line()], 0.0)) == 6
    cut = rollout_line()
    cut["agents"][1]["stopped"][2] = False
    assert sft.pairs_of_rollouts([cut], 2.0) == [("p0", "b"), ("p0", "a"), ("p1", "y")]


def test_rows_of_other_splits_than_train_are_left_out(tmp_path, capsys):
    rows = [{"prompt": f"p{i}", "completion": "c", "split": split} for i, split in enumerate(["train", "test"] * 2)]
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert sft.demonstrations(sft.Args(data=str(data))) == [[("p0", "c"), ("p2", "c")]]
    assert "2 rows of other splits than train are left out" in capsys.readouterr().out


def run(folder, *arguments):
    program = os.path.join(ROOT, "sft.py")
    return printed_by(program, "--output-dir", folder, "--device", "cpu", *arguments, cwd=folder)


def fails(folder, monkeypatch, capsys, *arguments):
    """Exit code and message of a run that ends in one sentence, inside this process: a start takes seconds."""
    monkeypatch.setattr(sys, "argv", ["sft.py", "--output-dir", str(folder), "--device", "cpu", *arguments])
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(os.path.join(ROOT, "sft.py"), run_name="__main__")
    return stop.value.code, capsys.readouterr().err


SMALL = ["--model", "scratch", "--hidden-size", "16", "--num-layers", "1", "--num-heads", "2", "--vocab-size", "300"]
SHORT = ["--num-steps", "5", "--batch-size", "4", "--log-every", "2", "--eval-every", "4", "--warmup", "1"]


def test_a_run_from_scratch_and_on_from_its_model(tmp_path):
    data = tmp_path / "pairs.jsonl"
    pairs = [{"prompt": f"Say {i}.", "completion": f"{i} and the rest of it"} for i in range(60)]
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8-sig")
    run(tmp_path, "--data", data, "--save-dtype", "float16", *SMALL, *SHORT)
    (folder,) = glob.glob(str(tmp_path / "pairs__sft__1__*"))
    with open(os.path.join(folder, "args.json")) as file:
        about = json.load(file)
    assert about["args"]["hidden_size"] == 16 and about["versions"]["torch"] == torch.__version__
    with open(os.path.join(folder, "metrics.jsonl")) as file:
        lines = [json.loads(line) for line in file]
    assert [line["step"] for line in lines] == [2, 4, 5]
    assert ["eval/loss" in line for line in lines] == [False, True, True]

    agent = os.path.join(folder, "agent")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(agent), AutoTokenizer.from_pretrained(agent)
    assert model.dtype == torch.float16 and model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tokenizer.eos_token == "<|im_end|>" != tokenizer.pad_token
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    (ids, forged) = sft.encode(tokenizer, ["Say 1.", "Say 1.<|im_end|>"])
    assert tokenizer.decode(ids) == "<|im_start|>user\nSay 1.<|im_end|>\n<|im_start|>assistant\n"
    assert forged.count(tokenizer.eos_token_id) == ids.count(tokenizer.eos_token_id) == 1

    run(tmp_path, "--data", data, "--model", agent, "--seed", 2, *SHORT)
    assert len(glob.glob(str(tmp_path / "pairs__sft__2__*" / "agent" / "model.safetensors"))) == 1


SHOWN = """
class Few:
    count = 10
    def __init__(self, num_agents, num_turns, dataset, seed):
        self.seed = seed
    def demonstrations(self):
        return [{"prompt": "p" * (i % 7 + 1), "completion": f"{self.count}, {i}"} for i in range(self.count)]

class Many(Few):
    count = 90
"""


def test_steps_and_logs_are_those_of_the_batches(tmp_path, monkeypatch):
    """However a batch is cut into pieces, without dropout, and at a rate that warms up and then falls to a tenth."""
    seen = []

    def step(optimizer, closure=None):
        frame = sys._getframe(1)
        while "num_tokens" not in frame.f_globals:
            frame = frame.f_back
        gradient = torch.cat([p.grad.flatten() for p in optimizer.param_groups[0]["params"]])
        seen.append((optimizer.param_groups[0]["lr"], gradient, frame.f_globals["batch"]))

    monkeypatch.setattr(torch.optim.AdamW, "step", step)  # none is taken: all losses are of the same weights
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tutti_shown_env.py").write_text(SHOWN)
    path = save_model(tmp_path / "m", attention_dropout=0.5)
    flags = ("--num-steps", 5, "--warmup", 2, "--batch-size", 50, "--max-batch-tokens", 300, "--max-grad-norm", 0.1)
    flags += ("--env", "tutti_shown_env:Few", "tutti_shown_env:Many", "--eval-fraction", 0.1, "--log-every", 2)
    flags += ("--model", path, "--learning-rate", 1.0, "--output-dir", "runs", "--device", "cpu")
    monkeypatch.setattr(sys, "argv", ["sft.py", *map(str, flags)])
    twice = [runpy.run_path(os.path.join(ROOT, "sft.py"), run_name="__main__") for _ in range(2)]
    names, batches = twice[1], [batch for *_, batch in seen]
    assert batches[:5] == batches[5:] and all(a != b for a, b in itertools.combinations(batches[:5], 2))
    del seen[5:]
    assert [lr for lr, *_ in seen] == pytest.approx([0.5, 1.0, 0.775, 0.325, 0.1])
    few, many = names["train"]
    assert (len(few), len(many), len(names["held_out"])) == (9, 81, 1 + 9)
    assert not any(row in source for source in (few, many) for row in names["held_out"])
    model, losses = AutoModelForCausalLM.from_pretrained(path), []
    for _, gradient, batch in seen:
        assert 15 <= sum(row in few for row in batch) <= 35  # every source has an equal chance
        model.zero_grad()
        loss = torch.cat([reference(model, *row) for row in batch]).mean()
        loss.backward()
        losses.append(loss.item())
        expected = torch.cat([p.grad.flatten() for p in model.parameters()])
        torch.testing.assert_close(gradient, 0.1 * expected / expected.norm(), atol=1e-6, rtol=1e-3)
    with open(os.path.join(names["run"], "metrics.jsonl")) as file:
        logged = [json.loads(line) for line in file]
    means = [sum(losses[:2]) / 2, sum(losses[2:4]) / 2, losses[4]]
    assert [line["train/loss"] for line in logged] == pytest.approx(means, rel=1e-4)
    held_out = torch.cat([reference(model, *row) for row in names["held_out"]]).mean().item()
    assert logged[-1]["eval/loss"] == pytest.approx(held_out, rel=1e-4)


def test_a_trained_model_says_its_one_sentence_and_stops(tmp_path):
    data = tmp_path / "pairs.jsonl"
    data.write_text((json.dumps({"prompt": "Say it.", "completion": "one two three"}) + "\n") * 20)
    run(tmp_path, "--data", data, *SMALL, "--num-steps", 80, "--learning-rate", 1e-2)
    (agent,) = glob.glob(str(tmp_path / "*" / "agent"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(agent), AutoTokenizer.from_pretrained(agent)
    ids = torch.tensor(sft.encode(tokenizer, ["Say it."]))
    said = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)[
        0, ids.shape[1] :
    ]
    assert tokenizer.decode(said) == "one two three<|im_end|>"


def test_reloaded_tokenizer_is_the_one_that_was_trained(tmp_path):
    tokenizer = sft.new_tokenizer(["It's 12 x\n\n  y_z, don't."] * 9, 400)
    model = sft.new_model(sft.Args(hidden_size=16, num_layers=1, num_heads=2), tokenizer)
    sft.save(model, tokenizer, str(tmp_path), torch.float32)
    text = "It's 123 x \n\n   y_z 日本 e\u0301 <|im_end|> DON'T\t\r\n ."
    assert AutoTokenizer.from_pretrained(str(tmp_path))(text).input_ids == tokenizer(text).input_ids
    assert (
        tokenizer.decode(tokenizer("  def f(x):\n    return x , 1 .").input_ids) == "  def f(x):\n    return x , 1 ."
    )


def test_turns_belong_to_their_environments(monkeypatch):
    """The second of two environments is made with two turns, each with one and two agents."""
    made, seeds = [], []

    def make(name, num_agents, num_turns, dataset, seed, **options):
        made.append((name, num_agents, num_turns, *options.items()))
        seeds.append(seed)
        return SimpleNamespace(demonstrations=lambda: [{"prompt": p, "completion": "c"} for p in ("same", f"p{seed}")])

    monkeypatch.setattr(envs, "make", make)
    sources = sft.demonstrations(sft.Args(env=["tldr", "mbpp"], num_agents=[1, 2], num_turns=[1, 2]))
    assert made == [("tldr", 1, 1), ("tldr", 2, 1), ("mbpp", 1, 2), ("mbpp", 2, 2)] and len(sources) == 4
    sft.demonstrations(sft.Args(env=["mbpp", "humaneval"], num_turns=[3]))
    assert made[4:] == [("mbpp", 2, 3), ("humaneval", 2, 3)]
    sft.demonstrations(sft.Args(env=["mbpp"], allow_unsafe_code=True))
    assert made[6:] == [("mbpp", 2, 1, ("allow_unsafe_code", True))]
    (source,) = sft.demonstrations(sft.Args(draws=3))  # each draw has a seed of its own
    assert len(set(seeds[7:])) == 3 and seeds[7] == 1
    assert source == [("same", "c"), *((f"p{seed}", "c") for seed in seeds[7:])]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--data", "nowhere.jsonl"], ["--data nowhere.jsonl", "No such file"]),
        # as an unset variable of the shell gives it
        (["--data", "", "--num-steps", "1"], ["--data :", "No such file"]),
        (["--data", "ROLLOUTS"], ["--min-reward"]),
        (
            ["--data", "ROLLOUTS", "--min-reward", "9"],
            ["Fewer than two pairs whose answers are whole", "--min-reward"],
        ),
        (["--min-reward", "1"], ["--min-reward", "--data"]),
        (["--env", "tdlr"], ["--env tdlr"]),
        (["--env", "tutti_silent_env:Silent"], ["--env tutti_silent_env:Silent", "no demonstrations()", "--data"]),
        (["--num-steps", "0"], ["--num-steps 0"]),
        (["--learning-rate", "0"], ["--learning-rate 0", "above 0"]),
        (["--num-heads", "5"], ["--num-heads 5", "--hidden-size"]),
        (["--model", "./nowhere"], ["there is no model in ./nowhere"]),
        (["--model", "."], ["--model .: there is no model in ."]),
        (["--model", "runs/run/agent"], ["there is no model in runs/run/agent"]),
        (["--device", "nowhere"], ["--device nowhere"]),
        (["--device", "meta"], ["--device meta"]),
        (["--seed", str(2**32)], ["--seed 4294967296", "below 2^32"]),
        (["--env"], ["Fewer than two pairs", "--env"]),
        (["--env", "tutti_bare_env:Bare"], ["error: --env tutti_bare_env:Bare: nothing to imitate"]),
        (["--env", "tutti_lame_env:Lame"], ["error: --env tutti_lame_env:Lame", "nosuch"]),
        (["--data", "deep.jsonl"], ["--data deep.jsonl", "give a .jsonl file"]),
        (["--model", "scratch", "--vocab-size", "258"], ["--vocab-size 258", "259"]),
        (["--data", "numbers.jsonl"], ["--data numbers.jsonl", "object"]),
        (["--data", "null.jsonl"], ["--data null.jsonl", "row 2 lacks the texts prompt and completion"]),
        (["--data", "cut.jsonl"], ["--data cut.jsonl", "after 2 rows", "give a .jsonl file"]),
        (["--data", "half.jsonl"], ["--data or --env", "not UTF-8 text"]),
        (["--data", "half.jsonl", "--model", "scratch"], ["--data or --env", "not UTF-8 text"]),
        (["--data", "mixed.jsonl", "--min-reward", "0"], ["--data mixed.jsonl", "KeyError('split')"]),
        (["--data", "ROLLOUTS", "--min-reward", "0", "--num-agents", "3"], ["--num-agents is of environments"]),
        (["--hidden-size", "64"], ["--hidden-size is of a new model: give --model scratch"]),
        (["--warmup", "-1"], ["--warmup -1", "0 or more"]),
        (["--eval-fraction", "1"], ["--eval-fraction 1", "0.5 or less"]),
        (
            ["--data", "ROLLOUTS", "--min-reward", "0", "--output-dir", "rollouts.jsonl"],
            ["--output-dir rollouts.jsonl"],
        ),
        (["--num-turns", "1", "2"], ["--num-turns", "2 numbers for 1 environments"]),
        (["--num-turns", "2"], ["--num-turns 2", "tldr has one turn"]),
        (["--model", "no/such/folder", "--data", "ROLLOUTS", "--min-reward", "0"], ["--model no/such/folder"]),
        (
            ["--model", "/no/such/folder", "--data", "ROLLOUTS", "--min-reward", "0"],
            ["there is no model in /no/such/folder"],
        ),
    ],
)
def test_one_sentence_for_what_is_wrong(tmp_path, arguments, words, monkeypatch, capsys):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps(rollout_line()) + "\n")
    (tmp_path / "tutti_silent_env.py").write_text(
        "class Silent:\n    def __init__(self, num_agents, num_turns, dataset, seed):\n        pass\n"
    )
    bare = "    def demonstrations(self):\n        raise ValueError('nothing to imitate')\n"
    text = (tmp_path / "tutti_silent_env.py").read_text()
    (tmp_path / "tutti_bare_env.py").write_text(text.replace("Silent", "Bare") + bare)
    (tmp_path / "tutti_lame_env.py").write_text("import nosuch\n")
    (tmp_path / "numbers.jsonl").write_text("1\n2\n")
    (tmp_path / "deep.jsonl").write_text("[" * 100_000 + "]" * 100_000)
    pair = {"prompt": "a", "completion": "b"}
    (tmp_path / "half.jsonl").write_text(json.dumps(pair) + "\n" + json.dumps(pair | {"prompt": "\ud800"}) + "\n")
    (tmp_path / "mixed.jsonl").write_text(json.dumps(rollout_line()) + "\n" + json.dumps(pair) + "\n")
    (tmp_path / "null.jsonl").write_text(json.dumps(pair) + '\n{"prompt": "a", "completion": null}\n' * 2)
    (tmp_path / "cut.jsonl").write_text((json.dumps(pair) + "\n") * 2 + json.dumps(pair)[:-5] + "\n")
    code, said = fails(tmp_path, monkeypatch, capsys, *[str(path) if a == "ROLLOUTS" else a for a in arguments])
    assert code == 2 and all(word in said for word in ["sft.py: error:", *words]), said


def test_an_end_of_sequence_token_that_a_tokenizer_puts_behind_a_prompt_is_taken_off():
    tokenizer = make_tokenizer(chat_template=None)
    (bare,) = sft.encode(tokenizer, ["Say it."])
    added = [("<|endoftext|>", 0), ("<|im_end|>", STOP)]
    both = processors.TemplateProcessing("<|endoftext|> $A <|im_end|>", special_tokens=added)
    tokenizer.backend_tokenizer.post_processor = both
    assert sft.encode(tokenizer, ["Say it."]) == [[0, *bare]]


@pytest.mark.parametrize(
    "template",
    [None, "{{ messages[0].content }} {{ enable_thinking }} {{ date_string or strftime_now('%Y') }}"],  # as Llama's
)
def test_prompts_are_those_that_agents_are_asked_later(template):
    tokenizer, model = make_tokenizer(template), SimpleNamespace(config=Qwen2Config(max_position_embeddings=100))
    asked = runpy.run_path(f"{ROOT}/magrpo.py")["encode"](SimpleNamespace(tokenizer=tokenizer, model=model), ["hi"], 1)
    assert sft.encode(tokenizer, ["hi"]) == asked


def test_a_prompt_without_tokens_is_told(capsys):
    """Its first token would be predicted by another row's last position."""
    with pytest.raises(SystemExit):
        sft.encode(make_tokenizer(chat_template=None), ["Say it.", ""])
    assert "--model makes no tokens of a prompt" in capsys.readouterr().err
    unread = make_tokenizer()
    unread.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(".+"), "removed")  # as where files are missing
    with pytest.raises(SystemExit):
        sft.encode(unread, ["Say it."])
    assert "are its tokenizer's files missing" in capsys.readouterr().err


def test_a_save_that_breaks_off_leaves_the_last_one_whole(tmp_path, monkeypatch):
    folder = str(tmp_path / "agent")
    model, tokenizer = Qwen2ForCausalLM.from_pretrained(save_model(tmp_path / "m")), make_tokenizer()
    sft.save(model, tokenizer, folder, torch.float32)
    whole = Qwen2ForCausalLM.save_pretrained

    def half(model, to):
        whole(model, to)
        os.truncate(os.path.join(to, "model.safetensors"), 1000)
        raise OSError("No space left on device")

    first = model.model.norm.weight.detach().clone()
    torch.nn.init.zeros_(model.model.norm.weight)
    monkeypatch.setattr(Qwen2ForCausalLM, "save_pretrained", half)
    with pytest.raises(OSError, match="No space left"):
        sft.save(model, tokenizer, folder, torch.float32)
    assert torch.equal(Qwen2ForCausalLM.from_pretrained(folder).model.norm.weight, first)

    # what has been left beside it does not hinder the next save
    monkeypatch.undo()
    sft.save(model, tokenizer, folder, torch.float32)
    assert not Qwen2ForCausalLM.from_pretrained(folder).model.norm.weight.any()
    assert AutoTokenizer.from_pretrained(folder)("one two").input_ids == tokenizer("one two").input_ids
    assert sorted(os.listdir(tmp_path)) == ["agent", "m"]


@pytest.mark.parametrize("step, kept", [(2, "none is saved"), (4, "the last one is whole")])
def test_a_disk_that_is_full_at_a_save(step, kept, tmp_path, monkeypatch, capsys):
    whole, saves = Qwen2ForCausalLM.save_pretrained, []

    def full(model, to):
        saves.append(to)
        if len(saves) == step // 2:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        whole(model, to)

    data = tmp_path / "pairs.jsonl"
    data.write_text((json.dumps({"prompt": "Say it.", "completion": "one two three"}) + "\n") * 20)
    model = save_model(tmp_path / "m")
    monkeypatch.setattr(Qwen2ForCausalLM, "save_pretrained", full)
    flags = ("--data", str(data), "--model", model, "--save-every", "2", *SHORT)
    code, said = fails(tmp_path, monkeypatch, capsys, *flags)
    assert (
        code == 2
        and f"step {step}: cannot save" in said
        and f"No space left on device (os error 28)) Make room; {kept}." in said
    )
    assert "Traceback" not in said


def test_completions_that_a_stop_token_ends_already(tmp_path):
    data = tmp_path / "pairs.jsonl"
    pairs = [{"prompt": "Say <|im_end|>.", "completion": f"one{'<|im_end|>' * (i == 19)}"} for i in range(20)]
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    started = Started(os.path.join(ROOT, "sft.py"), "--data", data, *SMALL, *SHORT, cwd=tmp_path)
    printed, _ = started.communicate(timeout=60)
    assert started.returncode == 2 and "a completion has <|im_end|>, which is added to the end" in printed


def test_it_is_one_process(tmp_path):
    started = Started(os.path.join(ROOT, "sft.py"), cwd=tmp_path, processes=2)
    printed, _ = started.communicate(timeout=60)
    assert started.returncode == 2 and "start it with python, not torchrun." in printed


def test_an_interrupt_is_no_traceback(tmp_path):
    data = tmp_path / "pairs.jsonl"
    data.write_text((json.dumps({"prompt": "Say it.", "completion": "one two three"}) + "\n") * 20)
    flags = ("--data", data, "--model", save_model(tmp_path / "m"), "--num-steps", 100_000)
    process = Started(os.path.join(ROOT, "sft.py"), *flags, cwd=tmp_path)
    while "step " not in process.read() and "/100000" not in process.read():
        assert process.poll() is None, process.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "interrupted; --save-every" in printed and "Traceback" not in printed


def test_a_context_as_short_as_max_length_suffices(tmp_path):
    save_model(tmp_path / "short", model_class=GPT2LMHeadModel, max_position_embeddings=64)
    data = tmp_path / "pairs.jsonl"
    pairs = [{"prompt": "p" * (40 if i == 0 else 9), "completion": "c" * (40 if i == 0 else 9)} for i in range(20)]
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    printed = run(tmp_path, "--data", data, "--model", "short", "--max-length", 64, *SHORT)
    assert "19 pairs, 1 left out for --max-length 64" in printed and "is used" not in printed
    printed = run(tmp_path, "--data", data, "--model", "short", "--max-length", 65, *SHORT)
    assert "--max-length 65: the model reads at most 64 tokens, so 64 is used\n19 pairs, 1 left out" in printed


def test_models_that_it_would_train_wrongly_are_refused(tmp_path, monkeypatch, capsys):
    data = tmp_path / "pairs.jsonl"
    data.write_text((json.dumps({"prompt": "Say it.", "completion": "one two three"}) + "\n") * 20)
    save_model(tmp_path / "scaled", model_class=CohereForCausalLM, logit_scale=0.5)
    save_model(tmp_path / "sees", model_class=BertLMHeadModel, max_position_embeddings=512)
    save_model(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "deeper")
    config = json.loads((tmp_path / "deeper" / "config.json").read_text())
    config |= {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    (tmp_path / "deeper" / "config.json").write_text(json.dumps(config))
    shutil.copytree(tmp_path / "whole", tmp_path / "refusing")
    (tmp_path / "refusing" / "chat_template.jinja").write_text("{{ raise_exception('no system') }}")
    said = {"scaled": "other log-probabilities", "sees": "not causal?", "deeper": "lack model.layers.2"}
    for name, sentence in (said | {"refusing": "TemplateError: no system"}).items():
        code, printed = fails(tmp_path, monkeypatch, capsys, "--data", str(data), "--model", name, *SHORT)
        assert code == 2 and sentence in printed, printed


def test_embedded_model_keeps_to_its_limits_and_writes_a_summary():
    folder = os.path.join(ROOT, "models", "tiny")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert sum(p.numel() for p in model.parameters()) <= 2_000_000
    assert sum(os.path.getsize(path) for path in glob.glob(os.path.join(folder, "*"))) < 4_000_000
    assert model.config.max_position_embeddings >= 2048 and model.dtype == torch.float16
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id

    env = envs.make("tldr")
    task = env.tasks("test")[0]
    ids = torch.tensor(sft.encode(tokenizer, env.observe(task, [])[:1]))
    model.float()
    said = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=96, do_sample=False)[
        0, ids.shape[1] :
    ]
    assert said[-1] == tokenizer.eos_token_id
    text = tokenizer.decode(said, skip_special_tokens=True)
    assert text[-1] in ".?" and len(content_words(text) & content_words(task["prompt"])) >= 2, text
