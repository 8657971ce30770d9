"""Workloads of throughput.py and gpu.py: random models and prompts, and how a contestant runs on them.

Speed depends on what a model has learnt only through where its completions end, so weights are random and that is
fixed: completions run to their full length, in c they stop with the same probability at every token.
"""

import glob
import json
import math
import os
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from string import ascii_lowercase

import pandas as pd
import torch
import transformers
from stamp import run_script
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Tokenizer

LEARNING_RATE = 1e-6  # so small that the probability of stopping does not change
PEERS = {"comlrl": 2, "trl": 1}  # trainers of peers.py -> agents
CHAT = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
PAD, STOP = 0, 2  # ids of <|endoftext|> and <|im_end|>
FIRST_WORD = 259  # the id after those of 3 special tokens and 256 bytes
SPACE = "Ġ"  # as the byte level writes it


@dataclass
class Workload:
    config: dict = field(default_factory=dict)  # of a random model
    env: dict = field(default_factory=dict)  # in its place: options of envs.make, for the script's default run there
    num_agents: int = 2  # N
    prompt_tokens: int = 400  # P, with the chat template
    completion_tokens: int = 100  # C
    num_generations: int = 8  # G
    num_tasks: int = 4  # B, per update
    stop: float = 0.0  # probability of the stop token at every step


TINY = {
    "model_type": "qwen2", "vocab_size": 1075, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
# the shapes of the real models, from their config.json
LARGE = TINY | {"vocab_size": 151_936}
QWEN_05B = LARGE | {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
}  # fmt: skip
QWEN_17B = LARGE | {
    "model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
WORKLOADS = {
    # the script's default run, with models/tiny; and one of two turns
    "tldr": Workload(env={"name": "tldr"}),
    "split": Workload(env={"name": "gsm8k", "roles": "split"}),
    # the shape of models/tiny, with a vocabulary of 1,075
    "a": Workload(TINY),
    # a real vocabulary on a small model, so that the head is most of the work
    "b": Workload(
        TINY | {"vocab_size": 151_936, "hidden_size": 256, "intermediate_size": 768},
        completion_tokens=64,
        num_generations=4,
        num_tasks=2,
    ),
    # completions of 1 to 100 tokens, 30 on average
    "c": Workload(TINY, num_tasks=8, stop=1 / 31),
    # for a GPU
    "qwen2.5-0.5b": Workload(QWEN_05B, prompt_tokens=512, completion_tokens=256),
    "qwen3-1.7b": Workload(QWEN_17B, num_agents=1, prompt_tokens=512, completion_tokens=256),
}


# Models and prompts


def make_tokenizer(size):
    """A byte-level BPE in which every word, a space and letters, is one token."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet())]
    words = [SPACE]
    # each word has 26 that are a letter longer, until there are enough
    for stem in words:
        words += [stem + letter for letter in ascii_lowercase][: size - FIRST_WORD + 1 - len(words)]
    tokens += words[1:]
    tokenizer = Qwen2Tokenizer(
        {token: k for k, token in enumerate(tokens)},
        [(word[:-1], word[-1]) for word in words[1:]],
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHAT
    return tokenizer


def make_model(config, stop):
    """A random model that stops with probability `stop` at every token, whatever it has read.

    Coordinate 0 of every embedding is 8, far above the others, which are about 0.02. So it dominates every hidden
    state, and because the head is the embedding (tied, as in the models that this stands for), all logits share the
    same large term. In the stop token's row, coordinate 0 is chosen so that this token gets probability `stop`; the
    pad token, which some trainers take for the end of a completion, gets practically none.
    """
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
    model.generation_config.update(eos_token_id=STOP, pad_token_id=PAD)
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        weight[:, 0] = 8.0
        weight[PAD, 0] = 0.0
        shared = model.base_model(torch.arange(3, 23)[None]).last_hidden_state[0, -1, 0]
        # the stop logit less that of the other tokens, which are all but stop and pad
        above = math.log(stop / (1 - stop) * (len(weight) - 2)) if stop else -100.0
        weight[STOP, 0] = 8.0 + above / shared
    return model


def make_prompts(job, tokenizer):
    """As many as tasks, each used once, and one for our evaluation, which always runs."""
    # the template adds a token before the words, and two after them
    shape = (job["num_tasks"] * (job["updates"] + 1) + 1, job["prompt_tokens"] - 3)
    ids = torch.randint(FIRST_WORD, len(tokenizer), shape).tolist()
    return ["".join(tokenizer.convert_ids_to_tokens(row)).replace(SPACE, " ") for row in ids]


def prepare(name, folder, args):
    """Makes model and prompts of a workload; returns the job: what all processes are told that run it."""
    os.makedirs(folder)
    workload = WORKLOADS[name]
    if args.shrink and workload.config:
        workload = replace(workload, config=TINY, prompt_tokens=40, completion_tokens=8)
    job = {"workload": name, "device": args.device, "seed": args.seed, "updates": args.updates}
    job |= asdict(workload) | {"learning_rate": LEARNING_RATE, "prompts": []}
    job["num_agents"] = PEERS.get(args.baseline, workload.num_agents)
    if workload.config:
        torch.manual_seed(args.seed)
        transformers.utils.logging.disable_progress_bar()
        job["model"] = f"{folder}/model"
        make_model(workload.config, workload.stop).save_pretrained(job["model"])
        tokenizer = make_tokenizer(workload.config["vocab_size"])
        tokenizer.save_pretrained(job["model"])
        job["prompts"] = make_prompts(job, tokenizer)
    return job


# Processes


def run(job, words, folder, seconds=None):
    """What a process wrote to result.json; {} if it failed."""
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/job.json", "w") as file:
        json.dump(job | {"folder": folder}, file)
    # none for the CPU, since our scripts use a GPU if they see one; else one, since trl refuses several in one process
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] if job["device"] == "cuda" else ""
    variables = {"HF_HUB_OFFLINE": "1", "BENCH_JOB": f"{folder}/job.json", "CUDA_VISIBLE_DEVICES": visible}
    if run_script(*words, seconds=seconds, **variables):
        return {}
    with open(f"{folder}/result.json") as file:
        return json.load(file)


def measure(job, command, folder, seconds=None):
    """Lists of numbers, {} if it failed: iteration_s and tokens of each update after one that warms up, and peak_mib.

    Of our scripts also sampling_s, with the reward, and update_s.
    """
    if command[0].endswith("peers.py"):
        return run(job, command, folder, seconds)
    words = [*command, "--env", "timed:Timed", "--joint-mode", "align", "--output-dir", folder]
    words += ["--num-agents", job["num_agents"], "--seed", job["seed"]]
    # an evaluation cannot be left out: one task before the first update, which is not timed
    words += ["--num-iterations", job["updates"] + 2, "--eval-tasks", 1, "--eval-every", 10**6]
    if job["config"]:
        words += ["--model", job["model"], "--num-tasks", job["num_tasks"], "--learning-rate", job["learning_rate"]]
        words += ["--num-generations", job["num_generations"], "--max-new-tokens", job["completion_tokens"]]
    result = run(job, words, folder, seconds)
    if not result:
        return {}
    (path,) = glob.glob(f"{folder}/*/metrics.jsonl")
    tokens = pd.read_json(path, lines=True)["tokens"].tolist()[2:]
    # the evaluation and the first iteration are left out
    marks = result.pop("marks")[2:]
    result |= {"tokens": tokens, "sampling_s": [], "update_s": [], "iteration_s": []}
    for (began, *scored), (after, *_) in pairwise(marks):
        result["sampling_s"].append(scored[-1] - began)
        result["update_s"].append(after - scored[-1])
        result["iteration_s"].append(after - began)
    return result
