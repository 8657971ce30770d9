"""How near a script's sampling and training come to a GPU's limits, at the size of real models.

    python benchmarks/gpu.py                         Qwen2.5-0.5B and Qwen3-1.7B, on one GPU
    python benchmarks/gpu.py --device cpu --shrink   only checks that everything runs

The floor of sampling is the time to read, at the measured bandwidth, what each decoding step has to read: all weights,
and the keys and values of the tokens so far. That of training is the time of its matrix products at the measured rate,
each computed once and a prompt once for its group. That of the optimizer is the time to read weight, gradient and two
moments, and to write all but the gradient. Weights and prompts are random, and all completions have the same length.

Writes results/gpu.md. For comlrl and trl on the same GPU: python benchmarks/peers.py --device cuda --workloads ...
"""

import importlib
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Literal

import torch
import tyro
from peers import prepare
from peers_child import peak_mib
from stamp import ROOT, stamp
from throughput import load, train


@dataclass
class Args:
    script: str = "magrpo"
    workloads: list[str] = field(default_factory=lambda: ["qwen2.5-0.5b", "qwen3-1.7b"])  # of peers.py
    rounds: int = 5  # after one that warms up
    max_batch_tokens: int = 4096  # of a training batch, as in the script
    device: Literal["cpu", "cuda"] = "cuda"
    shrink: bool = False  # tiny sizes: measures nothing
    seed: int = 1
    output: str = ""  # by default results/gpu.md, with --shrink only printed


def measure(args, function, *more):
    """The last result of function(), and its median seconds."""
    seconds = []
    for _ in range(args.rounds + 1):
        result = None  # frees the previous round's
        if args.device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        result = function(*more)
        if args.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return result, statistics.median(seconds[1:])


def measure_machine(args):
    """Bytes/s of a copy, and FLOP/s of a product in the dtypes of the layers and of the head."""
    size, n = (2**20, 128) if args.shrink else (2**30, 8192)
    source = torch.ones(size // 4, device=args.device)
    _, seconds = measure(args, torch.empty_like(source).copy_, source)
    rates = SimpleNamespace(bandwidth=2 * size / seconds)
    for name, dtype in (("layers", layers_dtype(args)), ("head", torch.float32)):
        a, b = (torch.randn(n, n, device=args.device, dtype=dtype) for _ in range(2))
        _, seconds = measure(args, torch.mm, a, b)
        setattr(rates, name, 2 * n**3 / seconds)
    return rates


def layers_dtype(args):
    """On CUDA that of the script's autocast. The head is in float32, on CUDA as TF32."""
    return torch.bfloat16 if args.device == "cuda" else torch.float32


def floors(args, model, job, rates):
    """The least seconds of sampling and of training."""
    config, itemsize = model.config, layers_dtype(args).itemsize
    P, C, G, B = (job[key] for key in ("prompt_tokens", "completion_tokens", "num_generations", "num_tasks"))
    trunk = sum(m.weight.numel() for m in model.base_model.modules() if isinstance(m, torch.nn.Linear))
    head = model.get_output_embeddings().weight.numel()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # each of C steps reads all weights, and keys and values: of a prompt once for its completions, and of these
    cached = B * sum(P + G * t for t in range(1, C)) * 2 * size * config.num_hidden_layers * config.num_key_value_heads
    sampling = (C * (trunk * itemsize + head * 4) + cached * itemsize) / rates.bandwidth
    # 2 operations a weight and token, 4 a number and pair of tokens in attention; backward is twice forward
    pairs = B * (P * (P + 1) / 2 + G * (C * P + C * (C + 1) / 2))
    attention = 4 * pairs * size * config.num_hidden_layers * config.num_attention_heads
    forward = (2 * trunk * B * (P + G * C) + attention) / rates.layers + 2 * head * B * G * C / rates.head
    return sampling, 3 * forward


def sampling(script, agent, prompts, G, C):
    with agent.autocast:  # one context for all tokens, as in rollout(): weights are cast once
        return script.sample(agent, prompts, G, 1.0, C)


@torch.no_grad()
def disagreement(script, agent, prompt, pairs):
    """Largest difference between the log-probabilities of sampling and those of training."""
    ids, sampled = zip(*sorted(pairs, key=lambda pair: len(pair[0])))
    with agent.autocast:
        trained = torch.cat(script.token_logprobs(agent, prompt, list(ids), 1.0)).cpu()
    sampled = torch.tensor([value for values in sampled for value in values])
    return (trained - sampled).abs().max().item()


def measure_model(args, script, rates, name, work):
    """The model's lines of the table."""
    job = prepare(name, os.path.join(work, name), args.seed, args.shrink)
    agent, prompts = load(script, job, args.device)
    for p in agent.trained.values():
        p.grad = torch.zeros_like(p)
    # first, so that the moments are in memory while the rest is measured, as in a run
    _, seconds = measure(args, agent.optimizer.step)
    floor = 28 * sum(p.numel() for p in agent.trained.values()) / rates.bandwidth
    lines = [line_of(name, "optimizer step", "", seconds, floor)]

    G, C = job["num_generations"], job["completion_tokens"]
    tokens = len(prompts) * G * C
    least_sampling, least_training = floors(args, agent.model, job, rates)
    groups, seconds = measure(args, sampling, script, agent, prompts, G, C)
    lines.append(line_of(name, "sampling", f"{tokens / seconds:.4g}", seconds, least_sampling))
    drawn = [[ids for ids, _ in group] for group in groups]
    _, seconds = measure(args, train, script, agent, prompts, drawn, args.max_batch_tokens)
    lines.append(line_of(name, "training", f"{tokens / seconds:.4g}", seconds, least_training))
    gap = disagreement(script, agent, prompts[0], groups[0])
    return [*lines, f"| {name} | log-probabilities of sampling and training differ by at most {gap:.1e} | | | | | |"]


def line_of(name, what, per_second, seconds, floor):
    cells = [name, what, per_second, f"{seconds:.4g}", f"{floor:.4g}", f"**{seconds / floor:.2f}**"]
    return f"| {' | '.join(cells)} | {peak_mib():.0f} |"


def main(args):
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu.py: error: torch finds no GPU; --device cpu --shrink shows that it runs.")
    torch.set_float32_matmul_precision("high")  # TF32 for the head, as in the script
    script = importlib.import_module(args.script)
    rates = measure_machine(args)
    device = torch.cuda.get_device_name() if args.device == "cuda" else "no GPU"
    lines = ["# A GPU's limits, and how near the script comes", "", f"{device}; {stamp(args)}", ""]
    lines += [f"Memory {rates.bandwidth / 1e9:.4g} GB/s. Products {rates.layers / 1e12:.4g} TFLOP/s in the layers"]
    lines[-1] += f" ({layers_dtype(args)}), {rates.head / 1e12:.4g} TFLOP/s in the head (float32; TF32 on a GPU)."
    lines += ["", "| model | what | tokens/s | s | floor, s | s/floor | peak so far, MiB |", "|---" * 7 + "|"]
    for name in args.workloads:
        if args.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with tempfile.TemporaryDirectory() as work:
            try:
                lines += measure_model(args, script, rates, name, work)
            except torch.cuda.OutOfMemoryError:
                lines.append(f"| {name} | out of memory | | | | | |")
        print("\n".join(lines), flush=True)
        output = args.output or ("" if args.shrink else os.path.join(ROOT, "results", "gpu.md"))
        if output:  # after each model, so that an interruption loses only one
            with open(output, "w") as file:
                file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
