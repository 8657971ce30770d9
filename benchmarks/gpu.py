"""How close a script comes to a GPU's limits, at the size of real models, and how it compares with comlrl and trl.

    python benchmarks/gpu.py               Qwen2.5-0.5B and Qwen3-1.7B, then the peers (see peers.py)
    python benchmarks/gpu.py --no-peers

The floor for sampling is the time to read what each decoding step has to read, at the measured bandwidth; that for
training is the time of the matrix products that a gradient needs, at the measured rates. decode_bytes and
training_flops have the formulas. Weights and prompts are random: speed does not depend on what a model has learnt. No
completion stops early, so all have the same length. The first round warms up and is reported separately, because a
real run pays its costs (choosing or building kernels for a shape) again for every new shape.

Writes results/gpu.md. `--device cpu --shrink 16` only checks on any machine that everything runs; it measures nothing.
"""

import gc
import importlib
import math
import os
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Literal

import torch
import tyro
from peers import WORKLOADS  # shared, so that both files measure the same models and lengths
from stamp import ROOT, Count, Script, stamp
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, ROOT)


@dataclass
class Args:
    models: list[str] = field(default_factory=lambda: ["qwen2.5-0.5b", "qwen3-1.7b"])  # workloads of peers.py
    max_batch_tokens: list[Count] = field(default_factory=lambda: [4096, 8192])  # the scripts' default, and twice that
    script: Script = "magrpo"  # whose functions are measured
    rounds: Count = 5  # for medians; one more warms up
    seed: int = 1  # of weights, prompts and sampling
    device: Literal["cuda", "cpu"] = "cuda"
    shrink: Count = 1  # divides layers, widths, vocabulary, lengths and the machine's test sizes; above 1, only a test
    peers: bool = True  # run peers.py too, which installs comlrl and trl
    peers_args: str = ""  # further arguments of peers.py, as one string
    output: str | None = None  # by default results/gpu.md, or none if --shrink is above 1


def fail(sentence):
    print(f"gpu.py: error: {sentence}", file=sys.stderr)
    sys.exit(2)


def shrunk(workload, shrink):
    """The workload with everything divided except heads, tasks and generations, so that the same code runs."""
    config = dict(workload.config)
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "head_dim"):
        if name in config:
            config[name] = max(2, config[name] // shrink)
    lengths = {name: max(2, getattr(workload, name) // shrink) for name in ("prompt_tokens", "completion_tokens")}
    return replace(workload, config=config, **lengths)


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def peak_mib(device):
    """Peak allocation since the last reset; on a CPU, the peak of the whole process, which never falls."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def measure(args, function, clear=lambda: None):
    """The last result of function(), its seconds and peak memory; None if it runs out of memory.

    clear() is called after each round, untimed.
    """
    seconds = []
    if args.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        for _ in range(args.rounds + 1):
            result = None  # frees the previous round's
            synchronize(args.device)
            began = time.perf_counter()
            result = function()
            synchronize(args.device)
            seconds.append(time.perf_counter() - began)
            clear()
    except torch.cuda.OutOfMemoryError:
        clear()
        return None  # the tables report this as a result
    median = statistics.median(seconds[1:])
    return SimpleNamespace(
        result=result, first=seconds[0], seconds=median, low=min(seconds[1:]), high=max(seconds[1:]),
        mib=peak_mib(args.device),
    )  # fmt: skip


def measure_machine(args):
    """Bytes/s of a copy, and FLOP/s of a product in the model's dtype and in the head's."""
    size, n, repeats = 2**30 // args.shrink, 4096 // args.shrink, 20
    source = torch.ones(size // 4, device=args.device)
    target = torch.empty_like(source)

    def copies():
        for _ in range(repeats):
            target.copy_(source)

    machine = SimpleNamespace(size=size, n=n, bandwidth=2 * size * repeats / measure(args, copies).seconds)
    for name, dtype in (("trunk", trunk_dtype(args.device)), ("head", torch.float32)):
        a, b = (torch.randn(n, n, device=args.device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)

        def products(a=a, b=b, out=out):
            for _ in range(repeats):
                torch.mm(a, b, out=out)

        setattr(machine, name, 2 * n**3 * repeats / measure(args, products).seconds)
    return machine


def trunk_dtype(device):
    """The dtype in which the script computes all but the head: on CUDA, that of its autocast."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def matrices(model):
    """The weight matrices of the trunk: the model without embeddings and head."""
    return {name: m.weight for name, m in model.base_model.named_modules() if isinstance(m, torch.nn.Linear)}


def shape_of(model):
    """(layers, heads, key-value heads, head size)"""
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, size


def cache_bytes_per_token(model, itemsize):
    """Keys in float32, values in the trunk's dtype, as `attention` holds them."""
    layers, _, kv_heads, size = shape_of(model)
    return layers * kv_heads * size * (4 + itemsize)


def decode_bytes(model, workload, max_batch_tokens, itemsize):
    """(weights, cache): bytes that `sample` has to read, if the trunk's numbers have `itemsize` bytes.

    weights: each forward pass of a batch reads all of them once, and there are C passes: the prefill, and one for each
        token but the last. The trunk's linear layers are read in the trunk's dtype (autocast keeps copies), its norms
        and the head in float32. Embeddings are not counted: only a few rows are looked up.
    cache: the pass that reads token t = 1 .. C - 1 of the completions reads the keys and values of the P tokens of the
        prompt, once for the S completions that decode as one row, and of t tokens of each completion.

    Not counted: the prefill's products, activations, and logits (V numbers, written and read several times a step).
    """
    P, C, G, B = (
        getattr(workload, name) for name in ("prompt_tokens", "completion_tokens", "num_generations", "num_tasks")
    )
    room = max(1, (max_batch_tokens - P) // C)
    pieces = math.ceil(G / room)  # rows per prompt
    S = math.ceil(G / pieces)
    rows = B * pieces
    batches = math.ceil(rows / max(1, max_batch_tokens // (P + S * C)))
    head = 4 * model.get_output_embeddings().weight.numel()
    linear = {p for m in model.base_model.modules() if isinstance(m, torch.nn.Linear) for p in m.parameters()}
    embeddings = model.get_input_embeddings().weight
    norms = sum(4 * p.numel() for p in model.base_model.parameters() if p not in linear and p is not embeddings)
    weights = batches * C * (head + norms + itemsize * sum(p.numel() for p in linear))
    tokens = rows * sum(P + S * t for t in range(1, C))
    return weights, tokens * cache_bytes_per_token(model, itemsize)


def training_flops(model, batches, checkpointing):
    """FLOPs of the gradient of micro batches, by part.

    A product costs 2 FLOPs per weight and token; backward makes two more of the same size, so 6 in all.

    trunk: 6 * weights of its matrices * tokens. A prompt is computed once for its completions, and a completion's last
        token is not fed in. With gradient checkpointing, every completion comes with its prompt and its last token.
    attention: 6 * 2 * head size * heads * layers * pairs of a token and one that it sees, itself included. The 2 is
        for the two products, of queries with keys and of weights with values. What a kernel computes for masked
        pairs, or again in its backward pass, is not counted.
    head: 6 * vocabulary * hidden size * completion tokens.
    head_again: 2 of these 6, if a micro batch predicts more than 2**26 / V tokens: then the backward pass recomputes
        the logits (see token_logprobs).
    trunk_again: with gradient checkpointing, each layer's forward products except its last (down_proj): recomputation
        ends once everything that backward needs is there.
    """
    layers, heads, _, size = shape_of(model)
    weight = sum(matrix.numel() for matrix in matrices(model).values())
    last = sum(matrix.numel() for name, matrix in matrices(model).items() if name.endswith("down_proj"))
    head = model.get_output_embeddings().weight.numel()
    seen = lambda length: length * (length + 1) // 2  # pairs in a text of this length
    flops = dict.fromkeys(("trunk", "attention", "head", "head_again", "trunk_again"), 0)
    for batch in batches:
        predicted, lengths_of = sum(len(ids) for _, ids, _ in batch), defaultdict(list)
        for prompt, ids, _ in batch:
            lengths_of[tuple(prompt)].append(len(ids))
        tokens = pairs = 0
        for prompt, lengths in lengths_of.items():
            P = len(prompt)
            if checkpointing:
                tokens += sum(P + C for C in lengths)
                pairs += sum(seen(P + C) for C in lengths)
            else:
                tokens += P + sum(C - 1 for C in lengths)
                pairs += seen(P) + sum(seen(P + C - 1) - seen(P) for C in lengths)
        attention = 2 * 2 * size * heads * layers * pairs  # forward
        flops["trunk"] += 6 * weight * tokens
        flops["attention"] += 3 * attention
        flops["head"] += 6 * head * predicted
        if predicted > 2**26 // model.config.vocab_size:
            flops["head_again"] += 2 * head * predicted
        if checkpointing:
            flops["trunk_again"] += 2 * (weight - last) * tokens + attention
    return flops


def make_agent(config, device):
    """An agent for the script's functions. Made on its device: a CPU is slow to draw billions of random numbers."""
    with torch.device(device):
        config = AutoConfig.for_model(**config)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
        return SimpleNamespace(model=model, share=True, graph_stream=None, stop_ids=torch.tensor([-1]))


def sampling(script, agent, prompts, workload, max_batch_tokens):
    G, C = workload.num_generations, workload.completion_tokens
    with script.autocast(agent.model):  # as in rollout(): weights are cast once
        return script.sample(agent, prompts, G, 1.0, C, max_batch_tokens)


def rows_of(prompts, drawn):
    """Prompts and completions with made-up advantages that sum to zero in a group, as real ones do."""
    angle = lambda g, group: math.cos(math.pi * (g + 0.5) / len(group))
    return [
        (prompt, ids, angle(g, group)) for prompt, group in zip(prompts, drawn) for g, (ids, _) in enumerate(group)
    ]


def training(script, agent, rows, max_batch_tokens):
    for batch in script.micro_batches(agent, rows, max_batch_tokens):
        weights = [weight for _, ids, weight in batch for _ in ids]
        logprobs = script.token_logprobs(agent, batch, 1.0)
        (-(torch.tensor(weights, device=logprobs.device) * logprobs).sum()).backward()


@torch.no_grad()
def disagreement(script, agent, workload, max_batch_tokens):
    """The largest difference between `sample`'s and `token_logprobs`' log-probabilities, on prompts of unequal length.

    Unequal lengths bring padding and masks, which the measured rounds do not have.
    """
    P, V = workload.prompt_tokens, agent.model.config.vocab_size
    prompts = [torch.randint(V, (max(1, P * k // 4),)).tolist() for k in range(1, 5)]
    short = replace(workload, completion_tokens=min(16, workload.completion_tokens))
    drawn = sampling(script, agent, prompts, short, max_batch_tokens)
    rows = [(prompt, ids) for prompt, group in zip(prompts, drawn) for ids, _ in group]
    theirs = script.token_logprobs(agent, rows, 1.0)
    ours = torch.tensor([value for group in drawn for _, values in group for value in values], device=theirs.device)
    return (ours - theirs).abs().max().item()


def cache_held(script, agent, prompt):
    """Bytes per token of the cache that `sample` fills, in the dtypes that it really uses."""
    held = {}
    with torch.no_grad(), script.autocast(agent.model):  # as in rollout(): else values would not be bfloat16 on CUDA
        script.prefill(agent, [prompt], None, partial(script.attention, held, None))
    return sum(states.nbytes for pair in held.values() for states in pair) / len(prompt)


def measure_model(args, script, machine, name, tables):
    """Adds this model's rows to the tables."""
    workload = shrunk(WORKLOADS[name], args.shrink)
    torch.manual_seed(args.seed)
    agent = make_agent(workload.config, args.device)
    model, itemsize = agent.model, trunk_dtype(args.device).itemsize
    prompts = torch.randint(model.config.vocab_size, (workload.num_tasks, workload.prompt_tokens)).tolist()
    completion_tokens = workload.num_tasks * workload.num_generations * workload.completion_tokens
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=True)  # as in the script

    def step():
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        optimizer.step()

    parameters = sum(p.numel() for p in model.parameters())
    # first, so that the moments are in memory while the rest is measured, as in a run
    stepped = measure(args, step)
    optimizer.zero_grad()
    if stepped is None:
        tables.step.append([name, number(parameters / 1e6), *["out of memory"] * 6])
        return
    synchronize(args.device)
    at_rest = torch.cuda.memory_allocated() / 2**20 if args.device == "cuda" else 12 * parameters / 2**20
    floor = 28 * parameters / machine.bandwidth  # reads weight, gradient and two moments; writes all but the gradient
    tables.step.append(
        [name, number(parameters / 1e6), *times(stepped), number(floor), ratio(stepped.seconds / floor)]
    )
    tables.step[-1] += [number(at_rest), number(stepped.mib)]

    stream = torch.cuda.Stream() if args.device == "cuda" else None
    for most in args.max_batch_tokens:
        most = max(1, most // args.shrink)
        weights, cache = decode_bytes(model, workload, 4 * most, itemsize)
        floor, drawn = (weights + cache) / machine.bandwidth, None
        for graphs in (False, True) if args.device == "cuda" else (False,):
            agent.graph_stream = stream if graphs else None
            try:  # four times the training batch, as in rollout()
                sampled = measure(args, partial(sampling, script, agent, prompts, workload, 4 * most))
                why_not = "out of memory"
            except SystemExit:  # the script has said why; the rest is still measured
                sampled, why_not = None, "cannot be recorded"
                print("what follows on this device was measured after a failed recording: doubtful", file=sys.stderr)
                if args.device == "cuda":
                    # torch up to 2.13 leaves the stream of the recording current, and the generator as it is inside of
                    # a recording: it would refuse the next random number
                    torch.cuda.set_stream(torch.cuda.default_stream())
                    generator = torch.cuda.default_generators[torch.cuda.current_device()]
                    generator.graphsafe_set_state(torch.Generator("cuda"))
            row = [name, most, "yes" if graphs else "no", number(weights / 1e9), number(cache / 1e9), number(floor)]
            if sampled is None:
                tables.sampling.append(row + [why_not] * 7)
                continue
            gap = disagreement(script, agent, workload, most)  # not earlier: `first` must include choosing kernels
            held = cache_held(script, agent, prompts[0]) / cache_bytes_per_token(model, itemsize)
            row += [*times(sampled), number(completion_tokens / sampled.seconds), ratio(sampled.seconds / floor)]
            tables.sampling.append([*row, number(held), number(sampled.mib), f"{gap:.1e}"])
            drawn = sampled.result
        if drawn is None:
            continue
        rows = rows_of(prompts, drawn)
        needed = training_flops(model, [rows], checkpointing=False)
        floor = (needed["trunk"] + needed["attention"]) / machine.trunk + needed["head"] / machine.head
        for checkpointing in (False, True):
            agent.share = not checkpointing  # as in the script
            if checkpointing:
                model.gradient_checkpointing_enable()
            batches = list(script.micro_batches(agent, rows, most))
            computed = training_flops(model, batches, checkpointing)
            train = partial(training, script, agent, rows, most)
            trained = measure(args, train, clear=optimizer.zero_grad)
            row = [name, most, "yes" if checkpointing else "no", len(batches)]
            row += [number(needed[part] / 1e12) for part in ("trunk", "attention", "head")]
            other = sum(computed.values()) - computed["head_again"] - sum(needed.values())
            row += [number(computed["head_again"] / 1e12), number(other / 1e12), number(floor)]
            if trained is None:
                tables.training.append(row + ["out of memory"] * 5)
            else:
                row += [*times(trained), number(completion_tokens / trained.seconds)]
                tables.training.append([*row, ratio(trained.seconds / floor), number(trained.mib)])
            if checkpointing:
                model.gradient_checkpointing_disable()
        agent.share = True


COLUMNS = {
    "machine": "what | rate",
    "sampling": "model | max batch tokens | --cuda-graphs | weights, GB | cache, GB | floor, s | first, s | "
    "s (lowest to highest) | tokens/s | s/floor | cache held/floor's | peak, MiB | largest difference",
    "training": "model | max batch tokens | checkpointing | micro batches | trunk, TFLOP | attention, TFLOP | "
    "lm_head, TFLOP | lm_head again, TFLOP | else again, TFLOP | floor, s | first, s | s (lowest to highest) | "
    "tokens/s | s/floor | peak, MiB",
    "step": "model | parameters, M | first, s | s (lowest to highest) | floor, s | s/floor | at rest, MiB | peak, MiB",
}


def number(x):
    return f"{x:.0f}" if abs(x) >= 100 else f"{x:.3g}"


def ratio(x):
    return f"**{number(x)}**"


def times(measured):
    return [number(measured.first), f"{number(measured.seconds)} ({number(measured.low)} to {number(measured.high)})"]


def table(name, rows):
    columns = COLUMNS[name].split(" | ")
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def about(args):
    if args.device == "cpu":
        return stamp(args)
    cuda = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    return f"{torch.cuda.get_device_name()}, {cuda}; {stamp(args)}"


def report(args, header, machine, tables, peers):
    trunk = str(trunk_dtype(args.device)).removeprefix("torch.")
    head = "float32 (TF32)" if args.device == "cuda" else "float32"
    of = f"of {machine.n} x {machine.n} matrices"
    rates = [
        [f"copy of {number(machine.size / 2**20)} MiB, read and written", f"{number(machine.bandwidth / 1e9)} GB/s"],
        [f"{trunk} product {of}", f"{number(machine.trunk / 1e12)} TFLOP/s"],
        [f"{head} product {of}", f"{number(machine.head / 1e12)} TFLOP/s"],
    ]
    memory = "Peak memory is what torch has allocated at most."
    at_rest = "weights and two moments"
    if args.device == "cpu":
        memory = "Peak memory is the most that the process has held so far."
        at_rest += ", counted"
    parts = ["# A GPU's limits, and how near the script comes", header]
    parts.append(
        f"Made by `python benchmarks/gpu.py`, whose formulas say what a floor counts. {memory} `first` is the round "
        "that warms up."
    )
    if args.shrink > 1:
        parts.append(f"Everything was divided by {args.shrink}: these figures show that it runs, and measure nothing.")
    parts += ["## Machine", table("machine", rates), "## Sampling"]
    parts.append(
        "The floor is the time of reading weights and cache. `cache held/floor's` is the size of the cache as it is "
        f"held, over that of keys in float32 and values in {trunk}. `largest difference` is that between "
        "log-probabilities of `sample` and `token_logprobs`, of prompts whose lengths differ."
    )
    parts += [table("sampling", tables.sampling), "## Training"]
    parts.append(
        "The floor is the time of the products of trunk, attention and lm_head at the rates above, each computed once "
        "and a prompt once for its group. What the script computes beyond that is in the columns `again`. tokens/s "
        "are of completions."
    )
    parts += [table("training", tables.training), "## Optimizer step"]
    parts.append(
        f"AdamW. The floor is the time of reading and writing 28 bytes a parameter. At rest are {at_rest}; the peak "
        "has a gradient too."
    )
    parts += [table("step", tables.step), "## Peers", peers]
    return "\n\n".join(parts) + "\n"


def run_peers(args):
    """(exit code, header and table of peers.py). Its output is shown as it comes: this takes long."""
    command = [sys.executable, os.path.join(ROOT, "benchmarks", "peers.py"), "--device", args.device]
    command += ["--workloads", *args.models, "--rounds", str(args.rounds), "--seed", str(args.seed)]
    if args.shrink > 1:
        command.append("--shrink")
    else:  # results/peers.csv is for the CPU
        command += ["--output", os.path.join("results", "peers-gpu.csv")]
    command += shlex.split(args.peers_args)
    lines = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip("\n"))
    if process.returncode:
        return process.returncode, f"peers.py ended with exit code {process.returncode}; there is no comparison."
    begin = max((k for k, line in enumerate(lines) if line.startswith("commit ")), default=0)
    end = next(
        (k for k, line in enumerate(lines) if line.startswith("rows in ")), len(lines)
    )  # folders of this machine
    return 0, "\n".join(lines[begin:end]).strip()


def main(args):
    if unknown := [name for name in args.models if name not in WORKLOADS]:
        fail(f"--models {' '.join(unknown)}: use some of {', '.join(WORKLOADS)}.")
    if args.device == "cuda" and not torch.cuda.is_available():
        fail("this machine has no CUDA device, so nothing was measured; --device cpu --shrink 16 shows that it runs.")
    if args.device == "cpu" and args.shrink < 2:
        fail("--device cpu takes hours at full size and says nothing of a GPU; give --shrink 16 with it.")
    for name in args.models:
        config = shrunk(WORKLOADS[name], args.shrink).config
        if "head_dim" not in config and config["hidden_size"] % (2 * config["num_attention_heads"]):
            fail(f"--shrink {args.shrink}: the hidden size of {name} is no longer divided by its heads; give 16.")
    if args.rounds < 1:
        fail(f"--rounds {args.rounds}: must be 1 or more.")
    header = about(args)  # before the run, which takes long
    output = args.output or (os.path.join(ROOT, "results", "gpu.md") if args.shrink == 1 else None)
    if args.device == "cuda":
        torch.set_float32_matmul_precision("high")  # as in the script: TF32, for the head
        torch.backends.cuda.enable_cudnn_sdp(False)  # as in the script
    script = importlib.import_module(args.script)
    machine = measure_machine(args)
    tables = SimpleNamespace(step=[], sampling=[], training=[])

    def write(peers):
        text = report(args, header, machine, tables, peers)
        if output:  # after each model, so that an interruption loses only one
            os.makedirs(os.path.dirname(os.path.abspath(output)), exist_ok=True)
            with open(output, "w") as file:
                file.write(text)
        return text

    for name in args.models:
        print(f"measuring {name}", flush=True)
        gc.collect()  # else the previous model, if kept alive by cycles, would count as this one's memory
        measure_model(args, script, machine, name, tables)
        text = write("Not measured yet." if args.peers else "Not measured (--no-peers).")
    code = 0
    if args.peers:
        print(text, flush=True)
        if args.device == "cuda":
            torch.cuda.empty_cache()  # the peers need the memory
        code, peers = run_peers(args)
        text = write(peers)
    print(text + (f"\nwritten to {output}" if output else ""))
    sys.exit(code)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
