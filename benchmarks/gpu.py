"""What one GPU does with our scripts and with others', next to what its bandwidth and matrix products allow.

    python benchmarks/gpu.py --baseline 001bde1               all steps; each writes FOLDER/gpu_STEP.csv, a row at once
    python benchmarks/gpu.py --device cpu --shrink            a rehearsal: measures nothing
    python benchmarks/gpu.py --steps trl                      one step, of at most 9 minutes

Steps, in this order: check (do all scripts run, and are tokens and log-probabilities right, for several kinds of
models); decoding (milliseconds of a decoding step); qwen2.5-0.5b, qwen2.5-0.5b-turns and qwen3-1.7b (updates, with
models of these shapes); comlrl and trl (where they are installed, see peers.py). --baseline adds magrpo.py of an older
commit.
Then a pretrained model, with the same command until its runs are finished: python benchmarks/real.py --dataset FILE
--name gpu_real --seeds 3 --jobs 9 --eval-every 5 --keep runs/gpu_real --minutes 7

Weights and prompts are random, and all completions have the same length. The floor of sampling is the time to read, at
the measured bandwidth, what each decoding step has to read: all weights, and the keys and values of the tokens so far.
That of training is the time of its products of weights and tokens, at the measured rate of bfloat16, each computed
once and a prompt once for its group. Its share of the time that the update takes is the MFU.
"""

import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from statistics import median
from typing import Literal

import torch
import tyro
from stamp import ROOT, stamp, write_rows
from throughput import compare, sides_of
from transformers import AutoConfig, AutoModelForCausalLM
from workloads import PEERS, TINY, make_tokenizer, prepare, run

import magrpo

SECONDS = 510  # at most, of a step
# step -> number of agents
UPDATES = {"qwen2.5-0.5b": 2, "qwen2.5-0.5b-turns": 2, "qwen3-1.7b": 1, "comlrl": 2, "trl": 1}
# what is tried with each script, on models/tiny; resume continues the first
OPTIONS = {
    "defaults": [],
    "resume": ["--num-iterations", 3, "--resume"],
    "two turns": ["--env", "gsm8k", "--env-kwargs", "roles", "split"],
    "shared policy": ["--share-policy"],
    "LoRA": ["--lora-rank", 8],
}
# kinds of random models, which are compared with a plain forward pass and with generate()
GEMMA = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
MODELS = {
    "sliding windows": GEMMA | {"model_type": "gemma3_text", "vocab_size": 65_536, "sliding_window": 32},
    "mixture of experts": TINY | {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 128},
    "not captured": TINY | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
}


@dataclass
class Args:
    steps: list[str] = field(default_factory=lambda: ["check", "decoding", *UPDATES])
    baseline: str = ""  # a commit
    flags: str = ""  # further arguments of our script in updates, not of its baseline: --flags="--batch-size 64"
    updates: int = 2  # measured in each process, after one that warms up; the median counts
    seed: int = 1
    device: Literal["cpu", "cuda"] = "cuda"
    shrink: bool = False  # tiny sizes: measures nothing
    folder: str = "results"


# Is it right?


def check(args, work):
    """Yields whether scripts run with each option, and how far sampling is from what transformers computes."""
    scripts = [path for path in Path(ROOT).glob("*.py") if "# 6 CHECKPOINT" in path.read_text()]
    with ThreadPoolExecutor(2 if args.shrink else 7) as threads:
        for rows in threads.map(lambda path: check_script(args, path, work), sorted(scripts)):
            yield from rows
    for name in ["tiny", *MODELS]:
        yield {"option": name, "result": compare_samples(args, name, f"{work}/{name}")}


def check_script(args, path, work):
    """Rows of a script: two iterations with each option."""
    rows = []
    for option, flags in OPTIONS.items():
        folder = f"{work}/{path.stem} {option}"
        command = [path, "--num-iterations", 2, "--eval-tasks", 4, "--num-tasks", 2, "--output-dir", folder, *flags]
        if option == "resume":
            command += glob(f"{work}/{path.stem} defaults/*/")
        if args.shrink:
            command += ["--max-new-tokens", 8]
        result = run({"device": args.device}, command, folder)
        rows.append({"option": f"{path.name}, {option}", "result": result.get("error", "runs")})
    return rows


@torch.no_grad()
def compare_samples(args, name, folder):
    """Largest difference of sampled log-probabilities, and how many greedy completions are those of generate()."""
    path = name
    if name in MODELS:
        path = folder
        torch.manual_seed(args.seed)
        config = AutoConfig.for_model(**MODELS[name])
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
        make_tokenizer(config.vocab_size).save_pretrained(path)
    policy = magrpo.load_policy(magrpo.Args(), path, {})
    prompts = [list(range(3, 40)), list(range(3, 60))]
    differences = []
    with magrpo.AUTOCAST:
        for prompt, pairs in zip(prompts, magrpo.sample(policy, prompts, 4, 1.0, 24)):
            for ids, logprobs in pairs:
                ids_of_both = torch.tensor([prompt + ids], device=magrpo.DEVICE)
                logits = policy.model(ids_of_both).logits[0, len(prompt) - 1 : -1]
                plain = logits.float().log_softmax(-1).cpu()[range(len(ids)), ids]
                differences.append((plain - torch.tensor(logprobs)).abs().max().item())
    equal = 0
    # in float32: in bfloat16 the likeliest tokens are often equally likely
    for prompt, [(ids, _)] in zip(prompts, magrpo.sample(policy, prompts, 1, 0.0, 24)):
        options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": policy.stop_ids}
        row = policy.model.generate(torch.tensor([prompt], device=magrpo.DEVICE), **options)[0]
        equal += row[len(prompt) :].tolist() == ids
    captured = "captured" if policy.cuda_graphs else "not captured"
    return (
        f"{captured}; log-probabilities differ by at most {max(differences):.1e}; {equal} of 2 greedy ones are equal"
    )


# How fast is it?


def measure_decoding(args, work, jobs):
    """Yields the milliseconds of a decoding step of 8 to 512 completions."""
    sizes = {"rows": [8, 16], "lengths": [4, 8]} if args.shrink else {"rows": [8, 32, 128, 512], "lengths": [32, 96]}
    for workload in ("qwen2.5-0.5b", "qwen3-1.7b"):
        for side, contestant in sides_of("magrpo", args.baseline, work).items():
            command = [f"{ROOT}/benchmarks/timed.py", contestant.script]
            folder = f"{work}/{workload} {side} decoding"
            result = run(jobs[workload] | sizes, command, folder, contestant.tree, SECONDS / 4)
            for rows, milliseconds in result.get("milliseconds", {"": result.get("error")}).items():
                yield {"workload": workload, "side": side, "completions": rows, "milliseconds": milliseconds}


def measure_updates(args, work, step, jobs):
    """Yields the rows of throughput.py, and how far sampling and training are from their floors."""
    job = jobs["qwen2.5-0.5b" if step in PEERS else step]
    sides = sides_of("magrpo", step if step in PEERS else args.baseline, work, UPDATES[step], args.flags)
    rates = measure_machine(args)
    sampling, training = (UPDATES[step] * floor for floor in floors(job, rates))
    for row in compare(job, sides, f"{work}/{step}", SECONDS / 2):
        yield row | rates
        if row["measure"] == "sampling_s":
            over = {side: row[side] / sampling for side in sides}
            yield row | over | {"measure": "sampling_over_floor"}
        if row["measure"] == "update_s":
            yield row | {side: row[side] / training for side in sides} | {"measure": "update_over_floor"}
            yield row | {side: training / row[side] for side in sides} | {"measure": "mfu"}


def measure_machine(args):
    """Bytes/s of a copy, and FLOP/s of a product in bfloat16."""
    size, n = (2**20, 128) if args.shrink else (2**30, 8192)
    source = torch.ones(size // 4, device=args.device)
    target = torch.empty_like(source)
    a = torch.ones(n, n, device=args.device, dtype=torch.bfloat16)
    return {"bandwidth": 2 * size / seconds_of(target.copy_, source), "flops": 2 * n**3 / seconds_of(torch.mm, a, a)}


def seconds_of(function, *tensors):
    """Median of five calls, after one that warms up."""
    seconds = []
    for _ in range(6):
        began = time.perf_counter()
        function(*tensors)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return median(seconds[1:])


def floors(job, rates):
    """The least seconds of an agent's sampling and of its training."""
    config = AutoConfig.for_model(**job["config"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    P, C, G, T = (job[key] for key in ("prompt_tokens", "completion_tokens", "num_generations", "num_turns"))
    nodes = sum(job["num_tasks"] * G**t for t in range(T))
    head = config.vocab_size * config.hidden_size  # tied to the embedding
    trunk = sum(p.numel() for p in model.parameters() if p.dim() == 2) - head
    # each of C steps reads weights (of the head in float32), and keys and values: of a prompt once for its completions
    cached = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim  # numbers of a token
    keys_and_values = nodes * (P + G * C / 2) * cached
    sampling = C * (T * (2 * trunk + 4 * head) + 2 * keys_and_values) / rates["bandwidth"]
    # 2 operations a weight and token; backward is twice forward
    training = 6 * nodes * (trunk * (P + G * C) + head * G * C) / rates["flops"]
    return sampling, training


def main(args):
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu.py: error: torch finds no GPU; --device cpu --shrink shows that it runs.")
    os.makedirs(args.folder, exist_ok=True)
    about = stamp(args)
    with tempfile.TemporaryDirectory() as work:
        jobs = {name: prepare(name, f"{work}/{name}", args) for name in UPDATES if name not in PEERS}
        for step in args.steps:
            print(f"step {step}", flush=True)
            if step == "check":
                found = check(args, work)
            elif step == "decoding":
                found = measure_decoding(args, work, jobs)
            else:
                found = measure_updates(args, work, step, jobs)
            rows = []
            for row in found:
                rows.append(row)
                write_rows(f"{args.folder}/gpu_{step}.csv", about, rows)  # now, so that an interruption loses one row
                print(*row.values(), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
