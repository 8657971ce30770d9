"""What one GPU does with our scripts and with others', next to what its bandwidth and matrix products allow.

    python benchmarks/gpu.py --all                            on one GPU; each step writes results/gpu_STEP.csv
    python benchmarks/gpu.py --all --device cpu --shrink      a rehearsal: measures nothing
    python benchmarks/gpu.py --steps trl                      one step, of at most 9 minutes
    python benchmarks/gpu.py                                  only prints the table of the files that there are

Steps, in this order: check (does magrpo_cuda.py run, and are its log-probabilities those of a plain forward pass);
qwen2.5-0.5b and qwen3-1.7b (our scripts, with models of these shapes); comlrl and trl (where they are installed, see
peers.py); real (a pretrained model by real.py, with --dataset; repeat the step until its runs are finished).

Weights and prompts are random, and all completions have the same length. The floor of sampling is the time to read, at
the measured bandwidth, what each decoding step has to read: all weights, and the keys and values of the tokens so far.
That of training is the time of its matrix products at the measured rate, each computed once and a prompt once for its
group, and the time of the optimizer to read weight, gradient and two moments, and to write all but the gradient.
"""

import glob
import importlib
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

import pandas as pd
import torch
import tyro
from peers import WORKLOADS, Comparison, find_peers, phases, prepare, row_of, run, run_ours, run_theirs
from stamp import ROOT, print_table, stamp, write_rows
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, ROOT)

SECONDS = 510  # at most, of a step
LARGE = "magrpo_cuda --max-batch-tokens 16384"
# step -> contestants (our script with flags, or their trainer; number of agents)
STEPS = {
    "check": [],
    "qwen2.5-0.5b": [("magrpo_cuda", 2), ("magrpo", 2), ("magrpo_cuda", 1), ("magrpo", 1), (LARGE, 2)],
    "qwen3-1.7b": [("magrpo_cuda", 1), ("magrpo", 1)],
    "comlrl": [("comlrl MAGRPOTrainer", 2)],
    "trl": [("trl GRPOTrainer", 1)],
    "real": [],
}
COLUMNS = ["workload", "agents", "contestant", "tokens_per_second", "seconds", "over_floor", "sampling_s"]
COLUMNS += ["sampling_over_floor", "update_s", "update_over_floor", "peak_mib", "error"]


@dataclass
class Args:
    all: bool = False  # every step
    steps: list[str] = field(default_factory=list)  # keys of STEPS
    updates: int = 2  # measured in each process, after one that warms up; the median counts
    device: Literal["cpu", "cuda"] = "cuda"
    shrink: bool = False  # tiny sizes: measures nothing
    dataset: str = ""  # of the step real; see real.py
    folder: str = "results"


def seconds_of(args, function, *more):
    """Median of five calls, after one that warms up."""
    seconds = []
    for _ in range(6):
        began = time.perf_counter()
        function(*more)
        if args.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return median(seconds[1:])


def measure_machine(args):
    """Bytes/s of a copy, and FLOP/s of a product in the dtypes of the layers and of the head."""
    torch.set_float32_matmul_precision("high")  # TF32 for the head, as in the scripts
    size, n = (2**20, 128) if args.shrink else (2**30, 8192)
    source = torch.ones(size // 4, device=args.device)
    rates = {"bandwidth": 2 * size / seconds_of(args, torch.empty_like(source).copy_, source)}
    for name, dtype in [("layers", layers_dtype(args)), ("head", torch.float32)]:
        a = torch.randn(n, n, device=args.device, dtype=dtype)
        rates[name] = 2 * n**3 / seconds_of(args, torch.mm, a, a)
    return rates


def layers_dtype(args):
    """On CUDA that of the scripts' autocast. The head is in float32, on CUDA as TF32."""
    return torch.bfloat16 if args.device == "cuda" else torch.float32


def floors(args, job, rates):
    """The least seconds of an agent's sampling and of its update."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(job["model"]))
    config = model.config
    itemsize = layers_dtype(args).itemsize
    P, C, G, B = (job[key] for key in ("prompt_tokens", "completion_tokens", "num_generations", "num_tasks"))
    trunk = sum(m.weight.numel() for m in model.base_model.modules() if isinstance(m, torch.nn.Linear))
    head = model.get_output_embeddings().weight.numel()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # each of C steps reads all weights, and keys and values: of a prompt once for its completions, and of these
    numbers = 2 * size * config.num_hidden_layers * config.num_key_value_heads  # cached for a token
    cached = numbers * B * sum(P + G * t for t in range(1, C))
    sampling = (C * (trunk * itemsize + head * 4) + cached * itemsize) / rates["bandwidth"]
    # 2 operations a weight and token, 4 a number and pair of tokens in attention; backward is twice forward
    pairs = B * (P * (P + 1) / 2 + G * (C * P + C * (C + 1) / 2))
    attention = 4 * pairs * size * config.num_hidden_layers * config.num_attention_heads
    forward = (2 * trunk * B * (P + G * C) + attention) / rates["layers"] + 2 * head * B * G * C / rates["head"]
    optimizer = 28 * sum(p.numel() for p in model.parameters()) / rates["bandwidth"]
    return sampling, 3 * forward + optimizer


def over_floors(args, job, result, num_agents, rates):
    """Further columns of a contestant: seconds over the floor and, of ours, of sampling and update."""
    sampling_floor, update_floor = (num_agents * floor for floor in floors(args, job, rates))
    columns = {"over_floor": median(result["seconds"]) / (sampling_floor + update_floor)}
    if "marks" in result:
        parts = phases(job, result, clock=1)
        columns["sampling_s"] = median(sampling for sampling, _, _ in parts)
        columns["sampling_over_floor"] = columns["sampling_s"] / sampling_floor
        columns["update_s"] = median(update for _, _, update in parts)
        columns["update_over_floor"] = columns["update_s"] / update_floor
    return columns | rates


def measure(args, step, work, jobs):
    """Yields the row of each contestant, which is a process of its own. Workloads are made once, and kept in jobs."""
    deadline = time.monotonic() + SECONDS
    workload = step if step in WORKLOADS else "qwen2.5-0.5b"
    if workload not in jobs:
        jobs[workload] = prepare(workload, f"{work}/{workload}", 1, args.shrink, args.device, args.updates)
    job = jobs[workload]
    rates = measure_machine(args)
    for k, (contestant, num_agents) in enumerate(STEPS[step]):
        folder = f"{work}/{step}-{k}"
        os.mkdir(folder)
        script, *flags = contestant.split()
        comparison = Comparison(script, contestant, num_agents, ("--joint-mode", "align", *flags))
        seconds_left = deadline - time.monotonic()
        if script in ("magrpo", "magrpo_cuda"):
            result = run_ours(job, comparison, folder, seconds_left)
        else:
            result = run_theirs(find_peers(), job, comparison, folder, seconds_left)
        row = row_of(job, comparison, contestant, result)
        yield row if row["error"] else row | over_floors(args, job, result, num_agents, rates)


# The other steps


def check(args, work):
    """Yields whether magrpo_cuda.py runs with each option, and how far sampling is from a plain forward pass."""
    options = {"defaults": [], "LoRA": ["--lora-rank", 8], "resume": ["--num-iterations", 3, "--resume"]}
    variables = {}
    if torch.cuda.device_count() > 1:
        options["two devices"] = ["--devices", "cuda:0", "cuda:1"]
        variables["CUDA_VISIBLE_DEVICES"] = "0,1"
    for option, flags in options.items():
        command = [sys.executable, "magrpo_cuda.py", "--num-iterations", 2, "--eval-tasks", 4, "--num-tasks", 2]
        command += ["--output-dir", f"{work}/{option}", *flags]
        if option == "resume":
            command += glob.glob(f"{work}/defaults/*")
        error = run(args.device, command, f"{work}/{option}.txt", **variables)
        yield {"option": option, "result": error or "runs"}
    for path in sorted(glob.glob("magrpo*.py", root_dir=ROOT)):
        difference = disagreement(args, path.removesuffix(".py"))
        yield {"option": f"{path} and a plain forward pass", "result": f"differ by at most {difference:.1e}"}


@torch.no_grad()
def disagreement(args, name):
    """Largest difference between the log-probabilities of sampling and those of a forward pass without a cache."""
    script = importlib.import_module(name)
    policy = script.load_policy(script.Args(), "tiny", torch.device(args.device), {})
    prompts = [list(range(3, 40)), list(range(3, 60))]
    differences = []
    with policy.autocast:
        groups = script.sample(policy, prompts, 4, 1.0, 24)
        for prompt, (ids, logprobs) in [(p, pair) for p, group in zip(prompts, groups) for pair in group]:
            logits = policy.model(torch.tensor([prompt + ids], device=args.device)).logits[0, len(prompt) - 1 : -1]
            plain = logits.float().log_softmax(-1).cpu()[range(len(ids)), ids]
            differences.append((plain - torch.tensor(logprobs)).abs())
    return torch.cat(differences).max().item()  # NaN if any is


def train_real(args):
    """Three seeds of a pretrained model; they are continued where the step before ended."""
    if not args.dataset:
        print("left out: --dataset is missing")
        return
    command = [sys.executable, f"{ROOT}/benchmarks/real.py", "--dataset", args.dataset, "--env-kwargs", "reward plain"]
    command += ["--name", os.path.abspath(f"{args.folder}/gpu_real")]
    if args.shrink:
        command += ["--model", f"{ROOT}/models/tiny", "--seeds", "1", "--scripts", "magrpo", "--num-iterations", "1"]
        command += ["--flags=--eval-tasks 2 --num-tasks 1 --max-new-tokens 8"]
    else:
        command += ["--seeds", "3", "--jobs", "9", "--eval-every", "5", "--keep", "runs/gpu_real", "--minutes", "7"]
    subprocess.run(command)


def report(args):
    """Prints the table of all results files."""
    paths = [f"{args.folder}/gpu_{step}.csv" for step in STEPS if STEPS[step]]
    frames = [pd.read_csv(path, skiprows=1).reindex(columns=COLUMNS) for path in paths if os.path.exists(path)]
    if frames:
        rows = pd.concat(frames).sort_values(["workload", "agents"], kind="stable")
        print_table([name.replace("_", " ") for name in COLUMNS], rows.to_numpy().tolist())


def main(args):
    os.makedirs(args.folder, exist_ok=True)
    steps = list(STEPS) if args.all else args.steps
    if steps and args.device == "cuda" and not torch.cuda.is_available():
        print("gpu.py: error: torch finds no GPU; --device cpu --shrink shows that it runs.", file=sys.stderr)
        sys.exit(2)
    jobs = {}
    with tempfile.TemporaryDirectory() as work:
        for step in steps:
            print(f"step {step}", flush=True)
            about = stamp(args)
            if step == "real":
                train_real(args)
                continue
            rows = []
            for row in measure(args, step, work, jobs) if STEPS[step] else check(args, work):
                rows.append(row)
                write_rows(f"{args.folder}/gpu_{step}.csv", about, rows)  # now, so that an interruption loses one row
                print(*row.values(), flush=True)
    report(args)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
