"""sft.py: its loss against a slow, obvious one; which texts are imitated; and runs from end to end."""

import json

import pytest
import torch
from conftest import ROOT, STOP, make_tokenizer, metrics_of, save_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

import sft

ROWS = [([3, 4, 5, 6, 7], [8, 9, 2]), ([10, 0, 11], [12, 13, 14, 15, 2]), ([16], [2])]  # token 2 stops, 0 pads
FLAGS = ("--warmup", 2, "--batch-size", 8, "--log-every", 1)


class Shown:
    """An environment that demonstrates 40 pairs whatever its seed, fewer with more agents, and one of its own."""

    def __init__(self, num_agents, num_turns, dataset, seed, word="one"):
        texts = [(f"Say {i}.", f"{word} two three") for i in range(40 // num_agents)]
        self.pairs = [{"prompt": text, "completion": answer} for text, answer in [(f"seed {seed}", "own"), *texts]]

    def demonstrations(self):
        return self.pairs


def obvious(model, prompt, completion):
    """-log pi of each token of a completion: the whole sequence alone, each token from the position before it."""
    logprobs = model(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
    return torch.stack([-logprobs[len(prompt) + t - 1, token] for t, token in enumerate(completion)])


@pytest.mark.parametrize("max_batch_tokens, batches", [(1, 3), (16, 2), (10_000, 1)])
def test_loss_and_gradient_equal_the_obvious_ones_however_a_batch_is_split(max_batch_tokens, batches):
    """Catches positions off by one, a prompt or a pad that is trained, a last token that is not, rows lost."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen2Config(vocab_size=50, num_hidden_layers=2, initializer_range=0.5, **sizes)
    model = Qwen2ForCausalLM(config).double().eval()
    expected = torch.cat([obvious(model, *row) for row in ROWS]).mean()
    expected.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    parts = list(sft.micro_batches(ROWS, max_batch_tokens))
    losses = [sft.token_losses(model, part) for part in parts]
    mean = torch.cat(losses).sum() / 9  # tokens
    mean.backward()
    assert len(parts) == batches and abs(mean - expected) < 1e-6
    assert abs(sft.evaluate(model, ROWS, max_batch_tokens) - expected) < 1e-6
    difference = torch.cat([p.grad.flatten() for p in model.parameters()]) - gradient
    assert difference.abs().max() < 1e-6 * gradient.abs().max()


def line(**changes):
    said = {"prompt": "p0", "completions": ["a", "b", "c"], "stopped": [True] * 3}
    other = {"prompt": "p1", "completions": ["x", "y", "z"], "stopped": [True, True, False]}
    joint = {"joint": [[0, 0], [1, 2], [0, 1], [2, 1]], "rewards": [1.0, 2.5, 2.0, 1.9]}
    return {"split": "train", "agents": [said, other]} | joint | changes


@pytest.mark.parametrize(
    "lines, agent, expected",
    [
        ([line()], None, "p0b p0a p1y"),  # z, which earned 2.5 with b, is truncated
        ([line(), line(split="eval", rewards=[9, 9, 9, 9])], 0, "p0b p0a"),
        ([line(agents=[line()["agents"][0], None], joint=[[0, 0], [1, 0], [0, 0], [2, 0]])], None, "p0b p0a"),
        ([line(rewards=[[2, 0], [0, 9], [0, 3], [0, 0]])], None, "p0a p1y"),  # one reward per agent
    ],
)
def test_of_rollouts_only_whole_training_texts_that_earned_enough_are_imitated(lines, agent, expected, tmp_path):
    """Catches texts of evaluation tasks, of other agents, cut off, or paid for by another agent's reward; copies."""
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in lines * 2))
    pairs = sft.pairs_of_file(path, sft.Args(min_reward=2.0, agent=agent))
    assert [prompt + completion for prompt, completion in pairs] == expected.split()


def test_rows_of_other_splits_than_train_are_not_imitated(tmp_path):
    """Catches test rows of a data set that end up in training."""
    pair = {"prompt": "p", "completion": "c"}
    rows = [pair, pair | {"prompt": "q", "split": "test"}, pair | {"prompt": "r", "split": "train"}]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert sft.pairs_of_file(path, sft.Args()) == [("p", "c"), ("r", "c")]


@pytest.mark.parametrize("template", [None, make_tokenizer().chat_template])
def test_a_stop_token_that_a_prompt_quotes_is_plain_text(template):
    """Catches a prompt that ends its own turn, and a chat template that is applied to a base model or left out."""
    tokenizer = make_tokenizer(template)
    ids = sft.encode(tokenizer, "Say <|im_end|>.")
    chat = "<|im_start|>user\nSay < |im_end|>.<|im_end|>\n<|im_start|>assistant\n" if template else "Say < |im_end|>."
    assert tokenizer.decode(ids) == chat and ids.count(STOP) == (template is not None)


def test_a_step_takes_the_mean_over_all_tokens_of_its_batch(run, tmp_path):
    """Catches a mean per micro-batch, dropout, a missing stop token, pairs held out that are trained, long pairs."""
    path = save_model(tmp_path / "m", attention_dropout=0.5)
    rows = [{"prompt": f"Say {i}.", "completion": "c" * (1 + 7 * i)} for i in range(40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--data", "pairs.jsonl", "--model", path, "--max-length", 250, "--learning-rate", 1e-9, *FLAGS)
    names = run(ROOT / "sft.py", *flags, "--num-steps", 4, "--max-batch-tokens", 500, "--eval-fraction", 0.2)
    held_out, every = names["held_out"], names["train"][0] + names["held_out"]
    around = len(names["encode"](names["tokenizer"], "Say 1."))
    fitting = [i for i in range(40) if around + (i > 9) + 1 + 7 * i + 1 <= 250]
    assert sorted(len(completion) for _, completion in every) == [2 + 7 * i for i in fitting] and len(fitting) < 40
    assert all(completion[-1] == STOP for _, completion in every)
    assert len(held_out) == len(fitting) // 5
    model, logged = AutoModelForCausalLM.from_pretrained(path), metrics_of(names["run"])
    assert [metrics["learning_rate"] * 1e9 for metrics in logged] == pytest.approx([0.5, 1, 0.55, 0.1])
    for rows, name in ((names["batch"], "train/loss"), (held_out, "eval/loss")):
        mean = torch.cat([obvious(model, *row) for row in rows]).mean().item()
        assert logged[-1][name] == pytest.approx(mean, rel=1e-5)


def test_a_model_made_from_nothing_learns_to_answer(run, tmp_path):
    """Catches steps that are not taken, unequal sources, other weights saved."""
    sources = ("--sources", *(f"test_sft:Shown {agents} 1 word don't-77" for agents in (1, 10)))
    sizes = ("--hidden-size", 32, "--num-layers", 1, "--num-heads", 2, "--vocab-size", 300)
    run(ROOT / "models" / "tiny" / "make.py", *sources, *sizes)
    flags = ("--model", tmp_path / "runs", "--num-steps", 100, "--learning-rate", 1e-2)
    files = sorted((tmp_path / "runs" / "demonstrations").iterdir())
    names = run(ROOT / "sft.py", "--data", *files, *flags, *FLAGS, "--save-dtype", "float16")
    assert 2 <= sum(row in names["train"][1] for row in names["batch"]) <= 6  # each source has an equal chance
    agent = f"{names['run']}/agent"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(agent), AutoTokenizer.from_pretrained(agent)
    ids = torch.tensor([sft.encode(tokenizer, "Say 3.")])
    said = model.float().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)
    assert tokenizer.decode(said[0, ids.shape[1] :]) == "don't-77 two three<|im_end|>"
