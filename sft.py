"""Supervised warm start: one model imitates demonstrations before its copies, the agents, learn from a shared reward.

With prompt x and completion y, whose last token is the stop token, a step minimizes the mean over the batch's tokens

    L = - sum over (x, y) of  sum_t log pi(y_t | x, y_<t) / number of completion tokens in the batch

    python sft.py --env tldr --model Qwen/Qwen3-1.7B --dataset hub
    python sft.py --env tldr humaneval --model scratch            (models/tiny was made this way, see its README.md)
    python sft.py --data runs/RUN/rollouts.jsonl --min-reward 2.5 (imitate the best that an earlier run logged)

Left out on purpose: the prompt in the loss, truncation (pairs that are too long are left out, or their stop token
would be cut off), several pairs in one row, resuming, and many processes: a warm start takes minutes.
"""

import copy
import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Literal

import numpy as np
import tokenizers
import torch
import transformers
import tyro
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass
class Args:
    # experiment
    seed: int = 1  # seeds the model, the order of the pairs and the environment
    num_steps: int = 1000  # optimizer steps
    output_dir: str = "runs"  # where the run folder is made
    log_every: int = 20  # steps between lines of metrics.jsonl; each evaluation also writes one
    eval_every: int = 200  # steps between held-out losses; there is always one at the end
    save_every: int = 200  # steps between saves of the model; there is always one at the end
    save_dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of the saved weights; training uses float32
    device: str = "auto"  # cpu, cuda, cuda:1, mps; auto: CUDA if there is one

    # demonstrations
    env: list[str] = field(default_factory=lambda: ["tldr"])  # environments that demonstrate, in equal shares
    num_agents: list[int] = field(default_factory=lambda: [2])  # agents in them; several numbers also get equal shares
    num_turns: list[int] = field(default_factory=lambda: [1])  # turns in them; one number for all, or one each
    dataset: str = "sample"  # sample (offline), hub, a hub id, or a .jsonl, .json or .parquet file
    allow_unsafe_code: bool = False  # make coding environments even if the system offers no sandbox
    draws: int = 1  # times an environment is made, each with its own seed: gives more varied sample demonstrations
    data: str | None = None  # .jsonl with prompt and completion, or a rollouts.jsonl, instead of environments
    min_reward: float | None = None  # for a rollouts.jsonl: keep joint actions of at least this reward
    max_length: int = 1024  # tokens of prompt plus completion; longer pairs are left out
    eval_fraction: float = 0.02  # held-out share of each source, at least one pair; at most 128 of each are evaluated

    # model
    model: str = "tiny"  # tiny, a folder, a hub id, or scratch: a new tokenizer and a new model of this size
    vocab_size: int = 1536  # scratch: tokens of the byte-level BPE, fewer if the texts have no more to merge
    hidden_size: int = 128  # scratch
    num_layers: int = 4  # scratch
    num_heads: int = 4  # scratch: attention heads, half as many for keys and values

    # optimization
    learning_rate: float | None = None  # AdamW's peak; by default 3e-3 for scratch, 1e-3 for tiny, else 1e-5
    warmup: int = 50  # steps up to the peak; a cosine then decays to a tenth of it
    batch_size: int = 32  # pairs per step
    max_batch_tokens: int = 8192  # tokens per forward pass, with padding
    max_grad_norm: float = 1.0  # gradient clipping


def fail(message):
    """Exits with status 2 and one sentence that says what to change."""
    tqdm.write(f"{os.path.basename(__file__)}: error: {message}", file=sys.stderr)  # print would garble the bar
    sys.exit(2)


def autocast(model):
    return torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda")


def logits(model, hidden):  # (..., D) -> (..., V)
    # always float32: with bfloat16 logits, log-probabilities would be off by several hundredths of a nat
    with torch.autocast(model.device.type, enabled=False):
        return model.get_output_embeddings()(hidden.float())


def encode(tokenizer, prompts):
    """Token ids of each prompt: as a user message, or as bare text if the tokenizer has no chat template."""
    for token in tokenizer.added_tokens_decoder.values():
        if token.special:  # in a prompt it must be plain text, hence the space
            text = f"{token.content[0]} {token.content[1:]}"
            prompts = [prompt.replace(token.content, text) for prompt in prompts]
    if not all(tokenizer(prompts, add_special_tokens=False).input_ids):
        fail("--model makes no tokens of a prompt: are its tokenizer's files missing, or is a prompt of --data empty?")
    if tokenizer.chat_template is None:
        prompt_ids = tokenizer(prompts).input_ids
        # some tokenizers append an end token to every text
        return [ids[:-1] if ids[-1] == tokenizer.eos_token_id else ids for ids in prompt_ids]
    # templates of reasoning models read enable_thinking; else every token would be spent on thoughts. Llama's read
    # date_string: the date that the algorithm scripts give them too, so that prompts stay the same
    chat = {"add_generation_prompt": True, "tokenize": False, "enable_thinking": False, "date_string": "26 Jul 2024"}
    texts = [tokenizer.apply_chat_template([{"role": "user", "content": prompt}], **chat) for prompt in prompts]
    return tokenizer(texts, add_special_tokens=False).input_ids


def pairs_of_rollouts(lines, min_reward):
    """The distinct pairs (prompt, completion) of all agents in training joint actions of at least `min_reward`.

    Truncated completions are left out: a stop token after them would teach the model to stop anywhere.
    """
    pairs = {}
    for line in lines:
        if line["split"] != "train":
            continue  # answers to evaluation tasks would spoil the evaluation
        for joint, reward in zip(line["joint"], line["rewards"]):
            if reward >= min_reward:
                for agent, g in zip(line["agents"], joint):
                    if agent["stopped"][g]:
                        pairs[agent["prompt"], agent["completions"][g]] = None
    return list(pairs)


def demonstrations(args):
    """Lists of (prompt, completion): one for the file, or one for each environment and number of agents."""
    if args.data is not None:  # also an empty name, which an unset variable of the shell gives
        lines = []
        try:
            with open(args.data, encoding="utf-8-sig") as file:
                for line in filter(str.strip, file):
                    lines.append(json.loads(line))
        except (OSError, ValueError, RecursionError) as error:  # RecursionError: nested too deeply
            after = f"after {len(lines)} rows: " if lines else ""
            fail(f"--data {args.data}: {after}{error}; give a .jsonl file.")
        if not all(isinstance(line, dict) for line in lines):
            fail(f"--data {args.data}: every line needs to be an object, such as of prompt and completion.")
        if lines and "agents" in lines[0]:
            if args.min_reward is None:
                fail(f"--data {args.data} holds rollouts: say with --min-reward which of them to imitate.")
            try:
                return [pairs_of_rollouts(lines, args.min_reward)]
            except (KeyError, IndexError, TypeError) as error:
                fail(f"--data {args.data}: a line is not of a rollouts.jsonl ({error!r}); give one that a run wrote.")
        if args.min_reward is not None:
            fail(f"--min-reward: {args.data} holds no rewards; leave it out, or give a rollouts.jsonl.")
        for number, line in enumerate(lines, 1):
            if not all(isinstance(line.get(name), str) for name in ("prompt", "completion")):
                fail(f"--data {args.data}: row {number} lacks the texts prompt and completion; rename or fill them.")
        train = [line for line in lines if line.get("split", "train") == "train"]
        if len(train) < len(lines):
            print(f"--data {args.data}: {len(lines) - len(train)} rows of other splits than train are left out")
        return [[(line["prompt"], line["completion"]) for line in train]]

    try:
        import envs  # here, so that a copy of this file works by itself with --data
    except ModuleNotFoundError as error:
        fail(f"--env: {error}; copy envs/ and rewards/ beside this file too, or give pairs with --data.")
    sources = []
    for name, num_turns in zip(args.env, itertools.cycle(args.num_turns)):
        unsafe = {"allow_unsafe_code": True} if args.allow_unsafe_code and name not in ("tldr", "arxiv") else {}
        for num_agents in args.num_agents:
            sources.append([])
            for draw in range(args.draws):
                try:
                    env = envs.make(name, num_agents, num_turns, args.dataset, args.seed + 1000 * draw, **unsafe)
                    if not hasattr(env, "demonstrations"):  # the interface's one optional member
                        fail(f"--env {name}: it has no demonstrations(); add it to the class, or give --data.")
                    sources[-1] += [(pair["prompt"], pair["completion"]) for pair in env.demonstrations()]
                except (ValueError, ModuleNotFoundError) as error:
                    fail(error if str(error).startswith("--") else f"--env {name}: {error}")
            sources[-1] = list(dict.fromkeys(sources[-1]))  # a pair of two draws could also be held out
    return sources


def new_tokenizer(texts, vocab_size):
    """Byte-level BPE with ChatML messages. Pad and stop token differ, so no mask can confuse them."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    # Exactly Qwen2's: transformers loads a Qwen2 model's tokenizer with these, whatever was saved.
    bpe.normalizer = tokenizers.normalizers.NFC()
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(QWEN2_WORDS), "isolated")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, byte_level])
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(itertools.chain(texts, ["user\n", "assistant\n"] * 100), trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def new_model(args, tokenizer):
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        intermediate_size=3 * args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_heads,
        num_key_value_heads=max(1, args.num_heads // 2),
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def token_losses(model, rows, pad_id):
    """-log pi of each completion token, the stop token included, concatenated over rows: (tokens,).

    rows: list of R pairs (prompt token ids, completion token ids). Only completion positions go through lm_head.
    """
    L = max(len(prompt) + len(completion) for prompt, completion in rows)
    input_ids = torch.full((len(rows), L), pad_id)
    source, target = [], []
    for r, (prompt, completion) in enumerate(rows):
        end = len(prompt) + len(completion)
        input_ids[r, :end] = torch.tensor(prompt + completion)
        source += range(r * L + len(prompt) - 1, r * L + end - 1)  # each token is predicted one position before it
        target += completion
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # no TF32: in some versions rotary angles are a product
    with autocast(model):
        # No attention mask: padding is on the right, which causal attention never sees.
        hidden = model.base_model(input_ids.to(model.device), use_cache=False).last_hidden_state  # (R, L, D)
    torch.set_float32_matmul_precision(precision)
    hidden = hidden.flatten(0, 1).index_select(0, torch.tensor(source, device=model.device))  # (tokens, D)
    target = torch.tensor(target, device=model.device)
    return torch.nn.functional.cross_entropy(logits(model, hidden), target, reduction="none")


@torch.no_grad()
def check(model, row, pad_id):
    """Raises ValueError if the model computes its logits differently from token_losses, or sees later tokens."""
    prompt, completion = row
    own = model(torch.tensor([prompt + completion[:-1]])).logits[0, len(prompt) - 1 :]
    theirs = torch.nn.functional.cross_entropy(own.float(), torch.tensor(completion), reduction="none")
    if not torch.allclose(token_losses(model, [row], pad_id), theirs, atol=1e-3):
        raise ValueError("it has other log-probabilities than its head: scaled or capped logits? not causal?")


def micro_batches(rows, max_batch_tokens):
    """Splits the rows into batches of similar length."""
    rows = sorted(rows, key=lambda row: -len(row[0]) - len(row[1]))
    while rows:
        R = max(1, max_batch_tokens // (len(rows[0][0]) + len(rows[0][1])))
        yield rows[:R]
        rows = rows[R:]


@torch.no_grad()
def evaluate(model, rows, pad_id, max_batch_tokens):
    """Mean loss of the rows' completion tokens, in nats."""
    losses = [token_losses(model, batch, pad_id) for batch in micro_batches(rows, max_batch_tokens)]
    return torch.cat(losses).mean().item()


def save(model, tokenizer, folder, dtype):
    """Saves a copy in `dtype`; the weights being trained stay float32."""
    beside = folder + ".tmp"  # files are moved once all are whole: what breaks off a save leaves the last one
    copy.deepcopy(model).to(dtype).save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    os.makedirs(folder, exist_ok=True)
    for name in os.listdir(beside):
        os.replace(os.path.join(beside, name), os.path.join(folder, name))
    os.rmdir(beside)


if __name__ == "__main__":
    script = os.path.basename(__file__).removesuffix(".py")
    signal.signal(signal.SIGINT, lambda *_: sys.exit("interrupted; --save-every says how often the agent is saved"))
    args = tyro.cli(Args, description=__doc__)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        fail("one process trains one model; start it with python, not torchrun.")
    if args.learning_rate is None:
        args.learning_rate = {"scratch": 3e-3, "tiny": 1e-3}.get(args.model, 1e-5)
    for name, value in vars(args).items():
        least = {"seed": "0 or more", "warmup": "0 or more", "eval_fraction": "0 or more"}.get(name, "above 0")
        good = type(value) not in (int, float) or 0 < value < 2**32 or (value == 0 and least == "0 or more")
        if not good and name != "min_reward":
            fail(f"--{name.replace('_', '-')} {value}: must be a number {least}, and below 2^32.")
    if args.eval_fraction > 0.5:
        fail(f"--eval-fraction {args.eval_fraction}: at most half can be held out; give 0.5 or less.")
    if len(args.num_turns) not in (1, len(args.env)):
        fail(f"--num-turns: {len(args.num_turns)} numbers for {len(args.env)} environments; one for all, or one each.")
    if args.min_reward is not None and not args.data:
        fail("--min-reward filters rollouts: give them with --data.")
    said = {name for name, value in vars(args).items() if value != vars(Args())[name]}
    environments = {"env", "num_agents", "num_turns", "dataset", "draws", "allow_unsafe_code"}
    if args.data is not None and (unread := said & environments):
        fail(f"--{min(unread).replace('_', '-')} is of environments, and --data takes their place: leave one out.")
    if args.num_heads % max(1, args.num_heads // 2) or args.hidden_size % (2 * args.num_heads):
        fail(f"--num-heads {args.num_heads}: use 1 or an even number, and a multiple of twice it as --hidden-size.")
    if args.vocab_size < 259:
        fail(f"--vocab-size {args.vocab_size}: the 256 bytes and three special tokens are 259; give at least that.")
    if args.model != "scratch" and (unread := said & {"vocab_size", "hidden_size", "num_layers", "num_heads"}):
        fail(f"--{min(unread).replace('_', '-')} is of a new model: give --model scratch with it, or leave it out.")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    try:
        kind = torch.empty(0, device=device).device.type
    except (RuntimeError, AssertionError) as error:
        fail(f"--device {device}: {str(error).splitlines()[0]}; name a device of this machine, such as cpu.")
    if kind not in ("cpu", "cuda", "mps"):
        fail(f"--device {device}: the script knows cpu, cuda and mps; name one of these.")
    if kind == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32, for the head

    # seeds
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)

    # model and demonstrations
    transformers.utils.logging.disable_progress_bar()  # of saves too, which would garble ours
    sources = demonstrations(args)
    if min(map(len, sources), default=0) < 2:
        fail("Fewer than two pairs whose answers are whole: check --data and --min-reward, or --env and --num-agents.")
    whole = lambda text: isinstance(text, str) and text == text.encode(errors="ignore").decode()  # no lone surrogates
    if not all(whole(text) for source in sources for pair in source for text in pair):
        fail("--data or --env: a prompt or a completion is not UTF-8 text, which no tokenizer takes; fix it.")
    if args.model == "scratch":
        tokenizer = new_tokenizer((text for source in sources for pair in source for text in pair), args.vocab_size)
        model = new_model(args, tokenizer)
    else:
        here = os.path.dirname(os.path.abspath(__file__))
        path = os.path.join(here, "models", "tiny") if args.model == "tiny" else args.model
        there = any(os.path.isfile(os.path.join(path, f"{kind}config.json")) for kind in ("", "adapter_"))
        named = os.path.isdir(path) or os.path.isabs(path) or path.startswith(".") or path.count("/") > 1
        if named and not there:
            fail(f"--model {args.model}: there is no model in {path}; give a folder that has one, or a hub id.")
        try:
            tokenizer = AutoTokenizer.from_pretrained(path)
            if tokenizer.eos_token_id is None:
                fail(f"--model {args.model}: its tokenizer has no end-of-sequence token to stop with; set one.")
            model, report = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
            if report["missing_keys"]:
                fail(f"--model {args.model}: its files lack {min(report['missing_keys'])}; name one that is whole.")
            prompt, completion = sources[0][0]
            most = max(1, min(64, args.max_length // 2))
            ids = tokenizer(completion, add_special_tokens=False).input_ids[: most - 1]
            check(model.eval(), (encode(tokenizer, [prompt])[0][-most:], [*ids, tokenizer.eos_token_id]), 0)
        except Exception as error:  # transformers, backends, the hub and templates raise many types; all are reported
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            fail(f"--model {args.model}: it cannot be used ({reason}); use a folder or hub id that can.")
    most = getattr(model.config.get_text_config(), "max_position_embeddings", args.max_length)  # some have no limit
    if args.max_length > most:
        print(f"--max-length {args.max_length}: the model reads at most {most} tokens, so {most} is used")
        args.max_length = most
    model.to(device).eval()  # no dropout
    if not any(p.requires_grad for p in model.parameters()):
        fail(f"--model {args.model}: it is an adapter, whose weights are frozen; merge it into its base model first.")
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id

    train, held_out = [], []  # train: one list per source
    for source in sources:
        prompts = encode(tokenizer, [prompt for prompt, _ in source])
        completions = tokenizer([c for _, c in source], add_special_tokens=False).input_ids
        if any(tokenizer.eos_token_id in c for c in completions):
            fail(f"--data or --env: a completion has {tokenizer.eos_token}, which is added to the end; take it out.")
        rows = [(p, [*c, tokenizer.eos_token_id]) for p, c in zip(prompts, completions)]
        fitting = [row for row in rows if len(row[0]) + len(row[1]) <= args.max_length]
        print(f"{len(fitting)} pairs, {len(rows) - len(fitting)} left out for --max-length {args.max_length}")
        if len(fitting) < 2:
            fail(f"--max-length {args.max_length}: fewer than two pairs are that short; raise it.")
        # The last pairs, not random ones: pairs of one task are neighbours, and so at most one task is split (more if
        # a rollouts.jsonl visits tasks several times).
        cut = len(fitting) - max(1, int(args.eval_fraction * len(fitting)))
        train.append(fitting[:cut])
        held_out += random.sample(fitting[cut:], min(128, len(fitting) - cut))

    # run folder
    name = os.path.basename(args.data).removesuffix(".jsonl") if args.data else "+".join(args.env).replace(":", "-")
    run = os.path.join(args.output_dir, f"{name}__{script}__{args.seed}__{datetime.now():%Y%m%d-%H%M%S.%f}")
    git = ["git", "-C", os.path.dirname(os.path.abspath(__file__)), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    versions = {module.__name__: module.__version__ for module in (torch, transformers, tokenizers, np)}
    about = {"script": script, "args": asdict(args), "versions": versions | {"python": sys.version.split()[0]}}
    try:
        os.makedirs(run)
        with open(os.path.join(run, "args.json"), "w") as file:
            json.dump(about | {"git_commit": commit}, file, indent=2)
    except OSError as error:
        fail(f"--output-dir {args.output_dir}: cannot make {run} ({error.strerror}); name another folder.")
    print(f"{run}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters on {device}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    logged, tokens, start = [], 0, time.perf_counter()
    for step in tqdm(range(1, args.num_steps + 1)):
        # 1 BATCH: a source uniformly at random, then one of its pairs
        batch = [random.choice(random.choice(train)) for _ in range(args.batch_size)]
        num_tokens = sum(len(completion) for _, completion in batch)  # fixed before the batch is split

        # 2 UPDATE
        progress = max(0, step - args.warmup) / max(1, args.num_steps - args.warmup)
        lr = args.learning_rate * min(1, step / max(1, args.warmup)) * (0.55 + 0.45 * math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = lr
        total = 0.0
        for rows in micro_batches(batch, args.max_batch_tokens):
            loss = token_losses(model, rows, pad_id).sum() / num_tokens
            loss.backward()
            total += loss.item()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm).item()
        if not (math.isfinite(total) and math.isfinite(grad_norm)):
            fail(f"step {step}: loss {total}, gradient norm {grad_norm}; lower --learning-rate.")
        optimizer.step()
        optimizer.zero_grad()

        # 3 LOG AND EVALUATE
        logged.append((total, grad_norm))
        tokens += sum(len(prompt) + len(completion) for prompt, completion in batch)
        last = step == args.num_steps
        if step % args.log_every == 0 or step % args.eval_every == 0 or last:
            loss, norm = np.mean(logged, axis=0)
            metrics = {"step": step, "train/loss": loss, "grad_norm": norm, "learning_rate": lr}
            metrics["tokens_per_second"] = tokens / (time.perf_counter() - start)
            if step % args.eval_every == 0 or last:
                metrics["eval/loss"] = evaluate(model, held_out, pad_id, args.max_batch_tokens)
                tqdm.write(f"step {step}: loss {loss:.3f}, held out {metrics['eval/loss']:.3f}")
            with open(os.path.join(run, "metrics.jsonl"), "a") as file:
                file.write(json.dumps(metrics) + "\n")
            logged = []

        # 4 SAVE
        if step % args.save_every == 0 or last:
            try:
                save(model, tokenizer, os.path.join(run, "agent"), getattr(torch, args.save_dtype))
            except (OSError, SafetensorError) as error:
                kept = "the last one is whole" if os.path.exists(os.path.join(run, "agent")) else "none is saved"
                fail(f"step {step}: cannot save {run}/agent: is the disk full? ({error!s:.80}) Make room; {kept}.")
    print(f"{time.perf_counter() - start:.0f} s; use it with --model {os.path.join(run, 'agent')}")
