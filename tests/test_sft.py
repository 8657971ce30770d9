"""sft.py: its loss against a slow, obvious one; which texts are imitated; and runs from end to end."""

import json
from string import Template

import datasets
import pytest
import torch
from conftest import CHAT, END, ROOT, STOP, load_policy, metrics_of, save_model, slow_logprobs
from test_faults import EMPTY_THOUGHT, GEMMA, THINKING, with_tokens
from toy import rows_of
from transformers import AutoModelForCausalLM, AutoTokenizer

import madpo
import sft
from envs import read_training_rows

FLAGS = ("--warmup", 2, "--batch-size", 8, "--log-every", 1)


class Shown:
    """An environment that demonstrates 40 pairs, fewer with more agents."""

    def __init__(self, num_agents, num_turns, dataset, seed, word="one"):
        self.pairs = []
        for i in range(40 // num_agents):
            self.pairs.append({"prompt": f"Say {i}.", "completion": f"{word} two three"})

    def demonstrations(self):
        return self.pairs


def save_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


LINE = """{"split": "train",
    "agents": [{"prompt": "p0", "completions": ["a", "b", "c"], "stopped": [true, true, true]},
    {"prompt": "p1", "completions": ["x", "y", "z"], "stopped": [true, true, false]}],
    "joint": [[0, 0], [1, 2], [0, 1], [2, 1]], "rewards": [1.0, 2.5, 2.0, 1.9]}"""
# What differs in the line | the agent asked for | what is imitated; z, which earned 2.5 with b, is truncated
IMITATED = """
{} | null | p0b p0a p1y
{"agents": [{"prompt": "p0", "completions": ["a", "b", "c"], "stopped": [true, true, true]}, null]} | null | p0b p0a
{} | 0 | p0b p0a
{"rewards": [[2, 0], [0, 9], [0, 3], [0, 0]]} | null | p0a p1y
"""


@pytest.mark.parametrize("changes, agent, expected", rows_of(IMITATED))
def test_of_rollouts_only_whole_training_texts_that_earned_enough_are_imitated(changes, agent, expected, tmp_path):
    """Fails if texts of evaluation tasks, of other agents, cut off, or paid for by another's reward are imitated."""
    line = json.loads(LINE)
    held_out = line | {"split": "eval", "rewards": [9, 9, 9, 9]}
    path = save_lines(tmp_path / "rollouts.jsonl", [line | json.loads(changes), held_out] * 2)
    pairs = sft.pairs_of_file(path, sft.Args(min_reward=2.0, agent=json.loads(agent)))
    assert [prompt + completion for prompt, completion in pairs] == expected.split()


def save_in_all_forms(folder, rows):
    """Files that hold the same rows."""
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    texts = {"a.jsonl": f"\ufeff\n{lines}\n \n", "lines.json": lines, "list.json": json.dumps(rows)}
    for name, text in texts.items():
        (folder / name).write_text(text)
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(folder / "table.parquet")
    for name, separator in ("comma", ","), ("semicolon", ";"), ("tab", "\t"):
        if "split" in rows[0]:  # else they have lists, which a .csv cannot hold
            table.to_csv(folder / f"{name}.csv", sep=separator, encoding="utf-8-sig")
    return sorted(folder.iterdir())


PAIR = {"prompt": "p", "completion": "c"}
SHORT = {  # of the tables below
    "ask": '{"role": "user", "content": "p"}',
    "other": '{"role": "user", "content": "q"}',
    "good": '{"role": "assistant", "content": "c"}',
    "bad": '{"role": "assistant", "content": "r"}',
    "c_or_r": '"chosen": "c", "rejected": "r"',
    "long": r'"prompt": "a\n\"b\", é", "rejected": " 5", "chosen": "c\r\nd' + "g" * 150_000 + '"',
}
# Rows | the number of the only one that is trained on, and what it is; two equal answers teach nothing
FORMS = """
[{"split": "test", $long}, {"split": "train", $long}] | 2 | {$long}
[{"prompt": [$ask], "chosen": [$good], "rejected": [$bad]}] | 1 | {"prompt": "p", $c_or_r}
[{"chosen": [$ask, $good], "rejected": [$ask, $bad]}] | 1 | {"prompt": "p", $c_or_r}
[{"prompt": [$ask], "completion": [$good]}] | 1 | {"prompt": "p", "completion": "c"}
[{"messages": [$ask, $good]}] | 1 | {"prompt": "p", "completion": "c"}
[{"prompt": "p", $c_or_r}, {"prompt": "p", "chosen": "r", "rejected": "r"}] | 1 | {"prompt": "p", $c_or_r}
"""


def written_out(text):
    """What a cell of these tables stands for."""
    return json.loads(Template(text).substitute(SHORT))


@pytest.mark.parametrize("rows, number, expected", rows_of(FORMS))
def test_all_forms_of_files_and_rows_give_the_same_strings(rows, number, expected, tmp_path):
    """Fails if a form is refused, a string changed, a prompt lost, a row of another split or a list trained on."""
    rows = written_out(rows)
    answers = ["chosen", "rejected"] if "chosen" in rows[0] else ["completion"]
    for path in save_in_all_forms(tmp_path, rows):
        assert read_training_rows(str(path), answers) == {int(number): written_out(expected)}, path


# A row | its column that is named
OTHER_FORMS = r"""
{$c_or_r} | prompt
{"prompt": "[{'role': 'user', ...", $c_or_r} | prompt
{"chosen": [$ask, $good], "rejected": [$other, $bad]} | rejected
{"prompt": "p", "chosen": [$ask, $good, $ask, $good], "rejected": "r"} | chosen
{"prompt": "p", "chosen": "[{\"content\": \"c\", \"role\": \"assistant\"}]", "rejected": "r"} | chosen
"""


@pytest.mark.parametrize("row, column", rows_of(OTHER_FORMS))
def test_a_row_of_another_form_is_named(row, column, tmp_path):
    """Fails if such a row is trained on, or ends in another error than a sentence with its place."""
    good = {"prompt": "p", "chosen": "c", "rejected": "r"}
    path = save_lines(tmp_path / "rows.jsonl", [good, written_out(row)])
    with pytest.raises(ValueError, match=f"--data {path}: row 2, column {column}: "):
        read_training_rows(path, ["chosen", "rejected"])


QUOTED = "<think>a != b</think><tool_call>"
LONGER = f"{QUOTED}<|im_end|>\n<|endoftext|>"
SHOWN = f"{QUOTED}< |im_end|>!"  # of a prompt that ends its turn
CHATTED = f"<|im_start|>user\n{SHOWN}<|im_end|>\n<|im_start|>assistant\n"
NO_END = CHAT.replace("<|im_end|>", "")
TEXTS = [  # chat template, eos, stop token, completion, what is read and what is trained
    (NO_END, "<|im_end|>", STOP, "a", CHATTED.replace("<|im_end|>", ""), "a<|im_end|>"),
    (None, "<|im_end|>", STOP, LONGER, SHOWN, f"{QUOTED}<|im_end|>"),
    (CHAT, "<|im_end|>", STOP, LONGER, CHATTED, f"{QUOTED}<|im_end|>"),
    (EMPTY_THOUGHT, "<|im_end|>", STOP, LONGER, CHATTED, f"{QUOTED}<|im_end|>"),
    (THINKING, "<|im_end|>", STOP, "<think>a</think>b", f"{CHATTED}<think>\n", "a</think>b<|im_end|>"),
    (GEMMA, "<|im_end|>", STOP, "a", f"<start_of_turn>user\n{SHOWN}<end_of_turn>\n", "a<end_of_turn>"),
    (CHAT, "<|endoftext|>", END, "a", CHATTED, "a<|im_end|>"),
    (None, None, STOP, "a", SHOWN, "a<|im_end|>"),
]


@pytest.mark.parametrize("template, eos, stop, completion, read, trained", TEXTS)
def test_marks_stay_and_an_answer_ends_as_in_the_chat_template(
    template, eos, stop, completion, read, trained, tmp_path
):
    """Fails if a prompt ends its own turn, an answer has no end or two, a second thought, or a mark is broken up.

    Or if an answer ends in eos where what is sampled ends in another token, as with Gemma.
    """
    names = ["<tool_call>", "<think>", "</think>", "<start_of_turn>", "<end_of_turn>"]
    tokenizer = with_tokens(*names, template=template)
    tokenizer.pad_token = "!"
    tokenizer.eos_token = eos
    path = save_model(tmp_path / "m", tokenizer=tokenizer, vocab_size=len(tokenizer), stops=[stop])
    tokenizer = AutoTokenizer.from_pretrained(path)
    special_tokens = sft.read_special_tokens(tokenizer, AutoModelForCausalLM.from_pretrained(path))
    prompt = f"{QUOTED}<|im_end|>!"
    row = sft.encode_pair(tokenizer, *special_tokens, prompt, completion)
    assert tokenizer.batch_decode(row) == [read, trained]
    assert tokenizer.decode(madpo.encode(load_policy(madpo, path), prompt)) == read


@pytest.mark.parametrize(
    "rows, flags, reason",
    [
        ([PAIR | {"prompt": "<|im_start|>user\np"}], "", "give the user's message"),
        ([PAIR, PAIR | {"prompt": "q" * 99}], "--max-length 60", "higher --max-length"),
        ([json.loads(LINE)], "--min-reward 1 --agent 5", "--agent: .* agents 0 to 1"),
        ([json.loads(LINE)], "", "--min-reward"),
    ],
)
def test_what_cannot_be_imitated_is_refused_with_its_reason(rows, flags, reason, run, model_dir, tmp_path):
    """Fails if a prompt is put into the template twice, or the sentence names another cause."""
    data = save_lines(tmp_path / "pairs.jsonl", rows)
    with pytest.raises(SystemExit, match=reason):
        run(ROOT / "sft.py", "--data", data, "--model", model_dir, *flags.split())


def test_a_step_takes_the_mean_over_all_tokens_of_its_batch(run, tmp_path):
    """Fails if the mean is one per micro-batch, dropout is on, or a pair is lost.

    Or if positions are off by one, or a prompt or what fills a row is trained.
    """
    path = save_model(tmp_path / "m", attention_dropout=0.5)
    rows = [{"prompt": "Say it" + "." * (1 + k % 2), "completion": "c" * k} for k in range(40)]
    data = save_lines(tmp_path / "pairs.jsonl", rows)
    flags = "--max-length 56 --learning-rate 1e-9 --num-steps 4 --max-batch-tokens 150 --eval-fraction 0.2"
    names = run(ROOT / "sft.py", "--data", data, "--model", path, *flags.split(), *FLAGS)
    completions = [completion for _, completion in names["train"][0] + names["held_out"]]
    assert {len(completion) for completion in completions} == set(range(1, 30))  # prompts have 26 or 27 tokens
    model = AutoModelForCausalLM.from_pretrained(path)
    logged = metrics_of(names["run_dir"])
    assert [metrics["learning_rate"] * 1e9 for metrics in logged] == pytest.approx([0.5, 1, 0.55, 0.1])
    for rows, name in (names["batch"], "train/loss"), (names["held_out"], "eval/loss"):
        mean = torch.cat([-slow_logprobs(model, *row) for row in rows]).mean().item()
        assert logged[-1][name] == pytest.approx(mean, rel=1e-5)


def test_a_model_made_from_nothing_learns_to_answer(run, tmp_path):
    """Fails if steps are not taken, sources have unequal shares, or other weights are saved."""
    sources = ("--sources", *(f"test_sft:Shown {agents} 1 word don't-77" for agents in (1, 10)))
    sizes = "--hidden-size 32 --num-layers 1 --num-heads 2 --vocab-size 300"
    run(ROOT / "models" / "tiny" / "make.py", *sources, *sizes.split())
    flags = ("--model", tmp_path / "runs", "--num-steps", 100, "--learning-rate", 1e-2)
    files = sorted((tmp_path / "runs" / "demonstrations").iterdir())
    names = run(ROOT / "sft.py", "--data", *files, *flags, *FLAGS, "--save-dtype", "float16")
    assert 2 <= sum(row in names["train"][1] for row in names["batch"]) <= 6  # each source has an equal chance
    model = AutoModelForCausalLM.from_pretrained(f"{names['run_dir']}/agent", dtype=torch.float32)
    assert sft.evaluate(model, names["held_out"], 10_000) < 0.01
