"""sft.py: its loss against a slow, obvious one; which texts are imitated; and runs from end to end."""

import json

import datasets
import pytest
import torch
from conftest import ROOT, STOP, make_tokenizer, metrics_of, save_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

import envs
import sft
from envs import read_training_rows

ROWS = [([3, 4, 5, 6, 7], [8, 9, 2]), ([10, 0, 11], [12, 13, 14, 15, 2]), ([16], [2])]  # token 2 stops, 0 pads
FLAGS = ("--warmup", 2, "--batch-size", 8, "--log-every", 1)


class Shown:
    """An environment that demonstrates 40 pairs whatever its seed, fewer with more agents, and one of its own."""

    def __init__(self, num_agents, num_turns, dataset, seed, word="one"):
        self.pairs = [{"prompt": f"seed {seed}", "completion": "own"}]
        for i in range(40 // num_agents):
            self.pairs.append({"prompt": f"Say {i}.", "completion": f"{word} two three"})

    def demonstrations(self):
        return self.pairs


def save_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def obvious(model, prompt, completion):
    """-log pi of each token of a completion: the whole sequence alone, each token from the position before it."""
    logprobs = model(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
    return torch.stack([-logprobs[len(prompt) + t - 1, token] for t, token in enumerate(completion)])


def flat_gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("max_batch_tokens, batches", [(1, 3), (10_000, 1)])
def test_loss_and_gradient_equal_the_obvious_ones_however_a_batch_is_split(max_batch_tokens, batches):
    """Fails if positions are off by one, a prompt or a pad is trained, a last token is not, or rows are lost."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen2Config(vocab_size=50, num_hidden_layers=2, initializer_range=0.5, **sizes)
    model = Qwen2ForCausalLM(config).double().eval()
    expected = torch.cat([obvious(model, *row) for row in ROWS]).mean()
    expected.backward()
    gradient = flat_gradient(model)
    model.zero_grad()
    parts = list(sft.micro_batches(ROWS, max_batch_tokens))
    losses = torch.cat([sft.token_losses(model, part) for part in parts])
    losses.mean().backward()
    assert (len(parts), len(losses)) == (batches, 9)
    assert abs(losses.mean() - expected) < 1e-6
    assert abs(sft.evaluate(model, ROWS, max_batch_tokens) - expected) < 1e-6
    assert (flat_gradient(model) - gradient).abs().max() < 1e-6 * gradient.abs().max()


SPEAKER = {"prompt": "p0", "completions": ["a", "b", "c"], "stopped": [True] * 3}
OTHER = {"prompt": "p1", "completions": ["x", "y", "z"], "stopped": [True, True, False]}
LINE = {
    "split": "train",
    "agents": [SPEAKER, OTHER],
    "joint": [[0, 0], [1, 2], [0, 1], [2, 1]],
    "rewards": [1.0, 2.5, 2.0, 1.9],
}


@pytest.mark.parametrize(
    "changes, agent, expected",
    [
        ({}, None, "p0b p0a p1y"),  # z, which earned 2.5 with b, is truncated
        ({"agents": [SPEAKER, None]}, None, "p0b p0a"),
        ({}, 0, "p0b p0a"),
        ({"rewards": [[2, 0], [0, 9], [0, 3], [0, 0]]}, None, "p0a p1y"),  # one reward per agent
    ],
)
def test_of_rollouts_only_whole_training_texts_that_earned_enough_are_imitated(changes, agent, expected, tmp_path):
    """Fails if texts of evaluation tasks, of other agents, cut off, or paid for by another's reward are imitated."""
    held_out = LINE | {"split": "eval", "rewards": [9, 9, 9, 9]}
    path = save_lines(tmp_path / "rollouts.jsonl", [LINE | changes, held_out] * 2)
    pairs = sft.pairs_of_file(path, sft.Args(min_reward=2.0, agent=agent))
    assert [prompt + completion for prompt, completion in pairs] == expected.split()


def save_in_all_forms(folder, rows):
    """Files that hold the same rows, which are strings."""
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "blank.jsonl").write_text(f"\n{lines}\n \n")
    (folder / "mark.jsonl").write_text(lines, encoding="utf-8-sig")
    (folder / "list.json").write_text(json.dumps(rows))
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(folder / "table.parquet")
    table.to_csv(folder / "table.csv", encoding="utf-8-sig")
    return list(folder.iterdir())


def test_all_forms_of_files_give_the_same_rows(tmp_path):
    """Fails if a form of file is refused, a row lost, a string changed, or a row of another split trained on."""
    rows = [
        {"prompt": 'a\n"b", é', "chosen": "c\r\nd", "rejected": "5"},
        {"prompt": "f", "chosen": "g", "rejected": " h"},
    ]
    marked = [row | {"split": split} for split in ("test", "train") for row in rows]
    paths = save_in_all_forms(tmp_path, marked)
    assert len(paths) == 5
    for path in paths:
        assert read_training_rows(str(path), ["chosen", "rejected"]) == {3: rows[0], 4: rows[1]}, path


@pytest.mark.parametrize(
    "name, text",
    [
        ("no.jsonl", None),
        ("a.txt", "{}"),
        ("a.jsonl", ""),
        ("a.jsonl", '{"prompt": "p"'),
        ("a.json", '{"prompt": "p"}'),
    ],
)
def test_a_file_that_cannot_be_read_is_named(name, text, tmp_path):
    """Fails if a missing, an empty, a broken or an unknown file ends in a traceback, or is looked for on the hub."""
    if text is not None:
        (tmp_path / name).write_text(text)
    path = str(tmp_path / name)
    with pytest.raises(ValueError, match=f"--data {path}: "):
        read_training_rows(path, ["completion"])
    with pytest.raises(ValueError, match=f"--dataset {path}: "):
        envs.make("tldr", dataset=path)


ASK = {"role": "user", "content": "p"}
OTHER_ASK = {"role": "user", "content": "q"}
GOOD = {"role": "assistant", "content": "c"}
BAD = {"role": "assistant", "content": "r"}
PREFERENCE = {"prompt": "p", "chosen": "c", "rejected": "r"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "p", "chosen": [ASK, GOOD], "rejected": "r"},
        {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": [ASK], "completion": [GOOD]},
        {"messages": [ASK, GOOD]},
    ],
)
def test_messages_are_read_as_the_strings_in_them(row, tmp_path):
    """Fails if a usual form of a row is refused, or its prompt is lost."""
    path = save_lines(tmp_path / "rows.jsonl", [row])
    if "chosen" in row:
        assert read_training_rows(path, ["chosen", "rejected"]) == {1: PREFERENCE}
    else:
        assert sft.pairs_of_file(path, sft.Args()) == [("p", "c")]


@pytest.mark.parametrize(
    "row, column",
    [
        ({"prompt": "p", "completion": "c", "label": True}, "chosen"),
        ({"chosen": "c", "rejected": "r"}, "prompt"),
        ({"chosen": [ASK, GOOD], "rejected": [OTHER_ASK, BAD]}, "rejected"),
        ({"prompt": "p", "chosen": [ASK, GOOD, ASK, GOOD], "rejected": "r"}, "chosen"),
    ],
)
def test_a_row_of_another_form_is_named(row, column, tmp_path):
    """Fails if such a row is trained on, or ends in another error than a sentence with its place."""
    path = save_lines(tmp_path / "rows.jsonl", [PREFERENCE, row])
    with pytest.raises(ValueError, match=f"--data {path}: row 2, column {column}: "):
        read_training_rows(path, ["chosen", "rejected"])


@pytest.mark.parametrize("template", [None, make_tokenizer().chat_template])
def test_a_stop_token_that_a_prompt_quotes_is_plain_text(template):
    """Fails if a prompt ends its own turn, or if a chat template is left out or used with a base model."""
    tokenizer = make_tokenizer(template)
    ids = sft.encode(tokenizer, "Say <|im_end|>.")
    chat = "<|im_start|>user\nSay < |im_end|>.<|im_end|>\n<|im_start|>assistant\n" if template else "Say < |im_end|>."
    assert tokenizer.decode(ids) == chat
    assert ids.count(STOP) == (template is not None)


def test_an_answer_ends_as_in_the_chat_template():
    """Fails if an answer ends in eos where what is sampled ends in another token, as with Gemma."""
    for template, end in (make_tokenizer().chat_template, "<|im_end|>"), (None, "<|endoftext|>"):
        tokenizer = make_tokenizer(template)
        tokenizer.eos_token = "<|endoftext|>"
        assert tokenizer.decode(sft.end_of_answer(tokenizer)) == end


def test_a_step_takes_the_mean_over_all_tokens_of_its_batch(run, tmp_path):
    """Fails if the mean is one per micro-batch, dropout is on, or a stop token or a pair is in the wrong place."""
    path = save_model(tmp_path / "m", attention_dropout=0.5)
    rows = [{"prompt": "Say it.", "completion": "c" * length} for length in range(1, 240, 6)]
    data = save_lines(tmp_path / "pairs.jsonl", rows)
    flags = ("--data", data, "--model", path, "--max-length", 250, "--learning-rate", 1e-9, *FLAGS)
    names = run(ROOT / "sft.py", *flags, "--num-steps", 4, "--max-batch-tokens", 500, "--eval-fraction", 0.2)
    held_out = names["held_out"]
    completions = [completion for _, completion in names["train"][0] + held_out]
    around = len(sft.encode(make_tokenizer(), "Say it."))
    lengths = [length + 1 for length in range(1, 240, 6) if around + length + 1 <= 250]
    assert len(lengths) < 40
    assert [len(completion) for completion in completions[: -len(held_out)]] == lengths[: -len(held_out)]
    assert {completion[-1] for completion in completions} == {STOP}
    assert len(held_out) == len(lengths) // 5
    model = AutoModelForCausalLM.from_pretrained(path)
    logged = metrics_of(names["run"])
    assert [metrics["learning_rate"] * 1e9 for metrics in logged] == pytest.approx([0.5, 1, 0.55, 0.1])
    for rows, name in ((names["batch"], "train/loss"), (held_out, "eval/loss")):
        mean = torch.cat([obvious(model, *row) for row in rows]).mean().item()
        assert logged[-1][name] == pytest.approx(mean, rel=1e-5)


def test_a_model_made_from_nothing_learns_to_answer(run, tmp_path):
    """Fails if steps are not taken, sources have unequal shares, or other weights are saved."""
    sources = ("--sources", *(f"test_sft:Shown {agents} 1 word don't-77" for agents in (1, 10)))
    sizes = ("--hidden-size", 32, "--num-layers", 1, "--num-heads", 2, "--vocab-size", 300)
    run(ROOT / "models" / "tiny" / "make.py", *sources, *sizes)
    flags = ("--model", tmp_path / "runs", "--num-steps", 100, "--learning-rate", 1e-2)
    files = sorted((tmp_path / "runs" / "demonstrations").iterdir())
    names = run(ROOT / "sft.py", "--data", *files, *flags, *FLAGS, "--save-dtype", "float16")
    assert 2 <= sum(row in names["train"][1] for row in names["batch"]) <= 6  # each source has an equal chance
    folder = f"{names['run']}/agent"
    model = AutoModelForCausalLM.from_pretrained(folder).float()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([sft.encode(tokenizer, "Say 3.")])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)
    assert tokenizer.decode(output[0, ids.shape[1] :]) == "don't-77 two three<|im_end|>"
