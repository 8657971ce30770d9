"""Supervised warm start: one model imitates demonstrations before its copies, the agents, learn from a shared reward.

With prompt x and completion y, whose last token is the stop token, a step minimizes the mean over the batch's tokens

    L = - sum over (x, y) of  sum_t log pi(y_t | x, y_<t) / number of completion tokens in the batch

    python sft.py --env tldr --model Qwen/Qwen3-1.7B --dataset hub
    python sft.py --data runs/RUN/rollouts.jsonl --min-reward 2.5   (imitate the best that an earlier run logged)
    python sft.py --data one.jsonl another.jsonl                    (sources in equal shares)

Left out on purpose: the prompt in the loss, truncation (pairs that are too long are left out, or their stop token
would be cut off), several pairs in one sequence, resuming, and many processes: a warm start takes minutes.
"""

import copy
import json
import math
import os
import random
import sys
from dataclasses import asdict, dataclass, field
from datetime import datetime
from itertools import takewhile
from typing import Literal
from unicodedata import normalize

import numpy as np
import torch
import tyro
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, set_seed

import envs

# R examples of a forward pass, L tokens of the longest, V vocabulary. An example is a pair as token ids.


@dataclass
class Args:
    # experiment
    seed: int = 1  # seeds the order of the pairs and the environment
    num_steps: int = 1000  # optimizer steps
    output_dir: str = "runs"  # where the run folder is made
    log_every: int = 20  # steps between lines of metrics.jsonl; each evaluation also writes one
    eval_every: int = 200  # steps between held-out losses, each with a save of the model; 0: only at the end
    save_dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of the saved weights; training uses float32

    # demonstrations
    env: str = "tldr"  # the environment that demonstrates, as in the scripts that train agents
    num_agents: int = 2  # agents in it
    num_turns: int = 1  # turns in it
    dataset: str = "sample"  # sample (offline), hub, a hub id, or a .jsonl, .json, .csv or .parquet file
    env_kwargs: dict[str, str] = field(default_factory=dict)  # its keyword arguments, e.g. reward grounded
    data: list[str] = field(default_factory=list)  # instead: files with prompt and completion, or rollouts.jsonl
    min_reward: float | None = None  # for a rollouts.jsonl: keep joint actions of at least this reward
    agent: int | None = None  # for a rollouts.jsonl: keep only the completions of this agent, counted from 0
    max_length: int = 1024  # tokens of prompt plus completion; longer pairs are left out
    eval_fraction: float = 0.02  # held-out share of each source, at least one pair; at most 128 of each are evaluated

    # model
    model: str = "tiny"  # tiny, a folder or a hub id

    # optimization
    learning_rate: float | None = None  # AdamW's peak; by default 1e-3 for tiny, 1e-5 for others
    warmup: int = 50  # steps up to the peak; a cosine then decays to a tenth of it
    batch_size: int = 32  # pairs per step
    max_batch_tokens: int = 8192  # tokens of a forward pass, with padding; lower it if memory runs out
    max_grad_norm: float = 1.0  # gradient clipping; 0: none


def read_special_tokens(tokenizer, model):
    """Ids of the tokens that end an answer, first that of the chat template, and the special tokens of turns."""
    text = ""
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ANSWER"}]
        text = tokenizer.apply_chat_template(chat, tokenize=False)
    ending = text.partition("ANSWER")[2].lstrip()
    # the model's: one id, a list of ids, or None
    stop_ids = [tokenizer.eos_token_id, *np.ravel(model.generation_config.eos_token_id).tolist()]
    chat_markers = []
    for token_id, token in tokenizer.added_tokens_decoder.items():
        # Gemma's is <end_of_turn>, while its eos is <eos>
        if ending.startswith(token.content):
            stop_ids.insert(0, token_id)
        # a thought is part of a message, even where its marks are special tokens
        in_template = token.special and token.content in text and "think" not in token.content
        if in_template or token_id in [tokenizer.bos_token_id, *stop_ids]:
            chat_markers.append(token.content)
    return [token_id for token_id in stop_ids if token_id is not None], chat_markers


def letters_of(text):
    """A text without what a tokenizer's normalizer may change: case, blanks, and the Unicode form of letters."""
    return "".join(normalize("NFKC", text).casefold().split())


def encode_pair(tokenizer, stop_ids, chat_markers, prompt, completion):
    """Token ids of a prompt, as a user message or, without a chat template, as bare text, and of its completion."""
    if prompt.lstrip().startswith(tuple(chat_markers)):
        sys.exit(f"error: --data: prompt {prompt[:80]!r} is in the chat template; give the user's message alone.")
    # prompts can quote other agents: a space turns what opens or closes a turn into plain text
    for marker in chat_markers:
        prompt = prompt.replace(marker, f"{marker[0]} {marker[1:]}")
    text = prompt
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    prompt_ids = tokenizer(text, add_special_tokens=not tokenizer.chat_template).input_ids
    # the template opened the thought already
    if text.rstrip().endswith("<think>"):
        completion = completion.removeprefix("<think>")
    # an answer ends at its first stop token, which data may bring along
    ids = tokenizer(completion, add_special_tokens=False).input_ids
    read = letters_of(tokenizer.decode(prompt_ids + ids))
    for part in prompt, completion:
        if letters_of(part) not in read:
            sys.exit(f"error: --model: its template or vocabulary loses a part of {part!r:.300}; use another model.")
    ids = list(takewhile(lambda token: token not in stop_ids, ids))
    return prompt_ids, ids + stop_ids[:1]


def demonstrations(args):
    """What the environment demonstrates: a list of (prompt, completion)."""
    env = envs.make(args.env, args.num_agents, args.num_turns, args.dataset, args.seed, **args.env_kwargs)
    pairs = [(pair["prompt"], pair["completion"]) for pair in env.demonstrations()]
    # one that occurs twice could be trained and held out
    return list(dict.fromkeys(pairs))


def pairs_of_rollouts(lines, args):
    """(prompt, completion) of all agents, or of one, in joint actions that earned it at least --min-reward."""
    pairs = []
    for line in lines:
        if args.agent is not None and args.agent not in range(len(line["agents"])):
            sys.exit(f"error: --agent: the rollouts of --data have agents 0 to {len(line['agents']) - 1}.")
        for joint, reward in zip(line["joint"], line["rewards"]):
            for i, (group, g) in enumerate(zip(line["agents"], joint)):
                agent_reward = reward[i] if isinstance(reward, list) else reward
                wanted = args.agent in (None, i) and agent_reward >= args.min_reward
                # a silent agent has no group; a stop token after a truncated completion would teach to stop anywhere
                if group and wanted and group["stopped"][g]:
                    pairs.append((group["prompt"], group["completions"][g]))
    return pairs


def pairs_of_file(path, args):
    """The distinct pairs (prompt, completion) of a file, without those of other splits than train."""
    rows = envs.read_training_rows(path, ["completion"]).values()
    if any("agents" in row for row in rows):
        if args.min_reward is None:
            sys.exit(f"error: --data {path} holds rollouts: say with --min-reward which of them to imitate.")
        pairs = pairs_of_rollouts(rows, args)
    else:
        pairs = [(row["prompt"], row["completion"]) for row in rows]
    return list(dict.fromkeys(pairs))


def split_examples(args, sources, tokenizer, model):
    """Encodes the pairs of all sources: (training examples, one list per source; held-out examples of all)."""
    stop_ids, chat_markers = read_special_tokens(tokenizer, model)
    train = []
    held_out = []
    for pairs in sources:
        examples = [encode_pair(tokenizer, stop_ids, chat_markers, *pair) for pair in pairs]
        fitting = [example for example in examples if sum(map(len, example)) <= args.max_length]
        print(f"{len(examples)} pairs, {len(fitting)} of them with at most {args.max_length} tokens")
        if len(fitting) < 2:
            sys.exit(
                "error: two pairs are needed, one of them held out: "
                "give more --data, a higher --max-length or a lower --min-reward."
            )
        # the last pairs, not random ones: pairs of one task are neighbours, so at most one task is split (more if a
        # rollouts.jsonl visits tasks several times)
        cut = len(fitting) - max(1, int(args.eval_fraction * len(fitting)))
        last = fitting[cut:]
        train.append(fitting[:cut])
        held_out += random.sample(last, min(128, len(last)))
    return train, held_out


def token_losses(model, examples):
    """-log pi of each completion token, the stop token included, of R examples: (tokens,)."""
    device = model.device
    first = min(len(prompt) for prompt, _ in examples)  # no token before it is a target
    tokens = [torch.tensor(prompt + completion) for prompt, completion in examples]
    targets = [torch.tensor([-1] * len(prompt) + completion) for prompt, completion in examples]  # -1: no target
    input_ids = pad_sequence(tokens, batch_first=True).to(device)  # (R, L)
    target = pad_sequence(targets, batch_first=True, padding_value=-1)[:, first:].to(device)  # (R, L - first)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        # no attention mask: padding is on the right, which causal attention never sees
        # each token is predicted one position before it: (R, L - first, V)
        logits = model(input_ids, use_cache=False, logits_to_keep=target.shape[1] + 1).logits[:, :-1]
    is_target = target >= 0
    return cross_entropy(logits[is_target].float(), target[is_target], reduction="none")


def micro_batches(examples, max_batch_tokens):
    """Splits the examples into batches of similar length."""
    examples = sorted(examples, key=lambda example: -sum(map(len, example)))
    while examples:
        R = max(1, max_batch_tokens // sum(map(len, examples[0])))
        yield examples[:R]
        examples = examples[R:]


@torch.no_grad()
def evaluate(model, examples, max_batch_tokens):
    """Mean loss of the examples' completion tokens, in nats."""
    losses = [token_losses(model, batch) for batch in micro_batches(examples, max_batch_tokens)]
    return torch.cat(losses).mean().item()


if __name__ == "__main__":
    # arguments
    here, script = os.path.split(os.path.abspath(__file__))
    args = tyro.cli(Args, description=__doc__)
    if args.learning_rate is None:
        args.learning_rate = 1e-3 if args.model == "tiny" else 1e-5
    if not args.data and [args.min_reward, args.agent] != [None, None]:
        sys.exit("error: --min-reward and --agent filter rollouts: give them with --data.")
    set_seed(args.seed)

    # demonstrations and model
    sources = [pairs_of_file(path, args) for path in args.data] or [demonstrations(args)]
    path = f"{here}/models/tiny" if args.model == "tiny" else args.model
    # not AutoTokenizer, which may split words otherwise than the model's own file says
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.to("cuda" if torch.cuda.is_available() else "cpu")  # from_pretrained has turned dropout off
    train, held_out = split_examples(args, sources, tokenizer, model)

    # run folder
    name = os.path.basename(args.data[0]).partition(".")[0] if args.data else args.env.replace(":", ".")
    run_name = f"{name}__{script[:-3]}__{args.seed}__{datetime.now():%Y%m%d-%H%M%S.%f}"
    run_dir = f"{os.path.expanduser(args.output_dir)}/{run_name}"
    os.makedirs(run_dir)
    with open(f"{run_dir}/args.json", "w") as file:
        commit = os.popen(f"git -C '{here}' rev-parse HEAD 2>/dev/null").read().strip()
        json.dump({"script": script, "args": asdict(args), "commit": commit}, file, indent=2)
    agent_dir = f"{run_dir}/agent"
    print(f"{run_dir}, on {model.device}")

    # training
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    logged = []  # (loss, gradient norm) of the steps since the last line of metrics.jsonl
    for step in tqdm(range(1, args.num_steps + 1)):
        # 1 BATCH: a source uniformly at random, then one of its pairs
        batch = [random.choice(random.choice(train)) for _ in range(args.batch_size)]
        # counted before the batch is split, so that the split changes nothing
        num_tokens = sum(len(completion) for _, completion in batch)

        # 2 UPDATE: linear warm-up, then a cosine down to a tenth
        progress = max(0, step - args.warmup) / max(1, args.num_steps - args.warmup)
        decay = 0.55 + 0.45 * math.cos(math.pi * progress)
        lr = args.learning_rate * min(1, step / max(1, args.warmup)) * decay
        optimizer.param_groups[0]["lr"] = lr
        total = 0.0
        for examples in micro_batches(batch, args.max_batch_tokens):
            loss = token_losses(model, examples).sum() / num_tokens
            loss.backward()
            total += loss.item()
        max_norm = args.max_grad_norm if args.max_grad_norm > 0 else math.inf
        grad_norm = clip_grad_norm_(model.parameters(), max_norm).item()
        if not math.isfinite(total + grad_norm):
            sys.exit(f"error: step {step}: loss {total}, gradient norm {grad_norm}; lower --learning-rate.")
        optimizer.step()
        optimizer.zero_grad()

        # 3 LOG
        logged.append((total, grad_norm))
        milestone = step == args.num_steps or step % (args.eval_every or args.num_steps) == 0
        if not milestone and step % args.log_every > 0:
            continue
        mean_loss, mean_norm = np.mean(logged, axis=0)
        logged = []
        metrics = {
            "step": step,
            "train/loss": mean_loss,
            "grad_norm": mean_norm,
            "learning_rate": lr,
        }

        # 4 EVALUATE AND SAVE: a copy, since the weights being trained stay float32
        if milestone:
            metrics["eval/loss"] = evaluate(model, held_out, args.max_batch_tokens)
            tqdm.write(f"step {step}: loss {mean_loss:.3f}, held out {metrics['eval/loss']:.3f}")
            saved = copy.deepcopy(model).to(getattr(torch, args.save_dtype))
            saved.save_pretrained(agent_dir)
            tokenizer.save_pretrained(agent_dir)
        with open(f"{run_dir}/metrics.jsonl", "a") as file:
            print(json.dumps(metrics), file=file)
    print(f"use it with --model {agent_dir!r}")
