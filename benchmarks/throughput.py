"""One iteration of a script against the plain way of writing it: same model, same prompts, same lengths.

The plain way samples with `generate(num_return_sequences=G)`, and trains on padded batches, one row per completion: a
prompt is computed G times, and every position goes through lm_head. Both run in this process, alternating; what
counts is the ratio of the medians, not the seconds of one machine.

The floor is the time of the script's own matrix products, including attention, as bare calls: all products of one
iteration are recorded with their shapes, and each is then called by itself on tensors of that shape. Time above the
floor is everything else: norms, activations, copies, masks, random numbers, the optimizer, Python. A profile lists the
ten most expensive operators. Bare calls may find their tensors in a closer cache than a real run does.

    python benchmarks/throughput.py              fixed lengths: P = 400, C = 100, G = 8, B = 4
    python benchmarks/throughput.py --natural    sample posts, and completions that end where the model ends them
    python benchmarks/throughput.py --hidden-size 512    random weights, wider and deeper than the model
"""

import importlib
import math
import os
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import transformers
import tyro
from stamp import ROOT, Count, Script, stamp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

sys.path.insert(0, ROOT)


@dataclass
class Args:
    script: Script = "magrpo"  # whose functions are measured
    model: str = os.path.join(ROOT, "models", "tiny")  # a folder or a hub id
    hidden_size: Count | None = None  # a multiple of 16: random weights, 8 layers of this width instead of the model's
    prompt_tokens: Count = 400  # P
    completion_tokens: Count = 100  # C
    num_generations: Count = 8  # G
    num_tasks: Count = 4  # B
    max_batch_tokens: Count = 4096  # of training, as in the script; four times as many in sampling
    rounds: Count = 5  # of both, alternating
    threads: Count = 1  # of torch
    natural: bool = False  # sample posts and the model's own stop token, instead of fixed lengths


def make_model(path, hidden_size):
    """A model of the same kind and vocabulary, with random weights and 8 layers of another width."""
    config = AutoConfig.from_pretrained(path)
    config.update({"hidden_size": hidden_size, "intermediate_size": 3 * hidden_size})
    config.update({"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4})
    config.layer_types = ["full_attention"] * 8
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")


def prepare(args):
    """(the script as a module, an agent as it makes one, B prompts as token ids)."""
    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    script = importlib.import_module(args.script)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if args.hidden_size:
        model = make_model(args.model, args.hidden_size).eval()
    else:
        options = {"dtype": torch.float32, "attn_implementation": "sdpa"}
        model = AutoModelForCausalLM.from_pretrained(args.model, **options).eval()
    agent = SimpleNamespace(
        model=model,
        tokenizer=tokenizer,
        share=True,
        graph_stream=None,
        stop_ids=torch.tensor([tokenizer.eos_token_id]),
    )
    if args.natural:
        env = importlib.import_module("envs").make("tldr", num_agents=2)
        posts = [env.observe(task, [])[1] for task in env.tasks("train")[: args.num_tasks]]
        prompts = script.encode(agent, posts, args.completion_tokens)
    else:
        agent.stop_ids = torch.tensor([-1])  # nothing stops, so that every length is C
        prompts = torch.randint(3, model.config.vocab_size, (args.num_tasks, args.prompt_tokens)).tolist()
    return script, agent, prompts


def ours_sample(args, script, agent, prompts):
    """As the script's `sample`: for each prompt, G pairs (token ids, log-probabilities)."""
    budget = 4 * args.max_batch_tokens
    return script.sample(agent, prompts, args.num_generations, 1.0, args.completion_tokens, budget)


def plain_sample(args, agent, prompts):
    """Token ids of the completions, padded: (B * G, C)."""
    P = max(map(len, prompts))
    ids = torch.tensor([[0] * (P - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (P - len(p)) + [1] * len(p) for p in prompts])
    config = GenerationConfig(
        do_sample=True, top_k=0, top_p=1.0, temperature=1.0, num_return_sequences=args.num_generations,
        max_new_tokens=args.completion_tokens, pad_token_id=0,
        eos_token_id=agent.tokenizer.eos_token_id if args.natural else None,
    )  # fmt: skip
    agent.model.generation_config = config
    return agent.model.generate(ids, attention_mask=mask, generation_config=config)[:, P:]


def weights_of(drawn):
    """A made-up advantage for each completion, summing to zero as real ones do."""
    return [[math.cos(math.pi * (g + 0.5) / len(group)) for g in range(len(group))] for group in drawn]


def ours_train(args, script, agent, prompts, drawn):
    """Gradient by the script's functions; returns {(b, g): log-probabilities of that completion}."""
    rows = [
        (prompt, ids, (weight, b, g))
        for b, (prompt, group, weights) in enumerate(zip(prompts, drawn, weights_of(drawn)))
        for g, ((ids, _), weight) in enumerate(zip(group, weights))
    ]
    logprobs = {}
    for batch in script.micro_batches(agent, rows, args.max_batch_tokens):
        values = script.token_logprobs(agent, batch, 1.0)
        weights = torch.tensor([weight for _, ids, (weight, _, _) in batch for _ in ids])
        (-(weights * values).sum()).backward()
        for (_, _, (_, b, g)), piece in zip(batch, values.detach().split([len(ids) for _, ids, _ in batch])):
            logprobs[b, g] = piece
    return logprobs


def plain_train(args, agent, prompts, drawn):
    """As `ours_train`, on padded rows."""
    P, C = max(map(len, prompts)), max(len(ids) for group in drawn for ids, _ in group)
    logprobs = {}
    rows = [(b, g, prompts[b], ids) for b, group in enumerate(drawn) for g, (ids, _) in enumerate(group)]
    size = max(1, args.max_batch_tokens // (P + C))
    weights = weights_of(drawn)
    for batch in (rows[k : k + size] for k in range(0, len(rows), size)):
        input_ids = torch.tensor([[0] * (P - len(p)) + p + ids + [0] * (C - len(ids)) for _, _, p, ids in batch])
        mask = torch.tensor(
            [[0] * (P - len(p)) + [1] * (len(p) + len(i)) + [0] * (C - len(i)) for _, _, p, i in batch]
        )
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = agent.model(input_ids, attention_mask=mask, position_ids=positions).logits[:, P - 1 : -1]
        values = logits.log_softmax(-1).gather(-1, input_ids[:, P:, None])[:, :, 0]  # (R, C)
        scale = torch.tensor([weights[b][g] for b, g, _, _ in batch])[:, None]
        (-(scale * values * mask[:, P:]).sum()).backward()
        for (b, g, _, ids), row in zip(batch, values.detach()):
            logprobs[b, g] = row[: len(ids)]
    return logprobs


def timed(function, *args):
    began = time.perf_counter()
    result = function(*args)
    return result, time.perf_counter() - began


class Products(TorchDispatchMode):
    """Counts the matrix products that run inside, by operator and shapes."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        # inference mode dispatches `linear` and `matmul` as such; otherwise their component operators arrive
        if name in ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm") or "scaled_dot_product" in name:
            shape = lambda x: ("tensor", tuple(x.shape), x.stride(), x.dtype, x.device)
            shapes = tree_map_only(torch.Tensor, shape, (tuple(args), tuple((kwargs or {}).items())))
            self.calls[func, shapes] += 1
        return func(*args, **(kwargs or {}))

    def seconds(self):
        """The time of all products as bare calls: for each, the best of three means times its number of calls."""

        def build(x):
            if isinstance(x, tuple) and x and x[0] == "tensor":
                _, shape, stride, dtype, device = x
                # filled before it is strided: in an expanded view, elements share memory
                size = 1 + sum((n - 1) * step for n, step in zip(shape, stride)) if all(shape) else 0
                flat = torch.empty(size, dtype=dtype, device=device)
                flat = flat.normal_() if dtype.is_floating_point else flat.fill_(1)
                return flat.as_strided(shape, stride)
            return type(x)(map(build, x)) if isinstance(x, (tuple, list)) else x

        total = 0.0
        for (func, (args, kwargs)), count in self.calls.items():
            args, kwargs, times = build(args), dict(build(kwargs)), []
            for _ in range(3):
                began = time.perf_counter()
                for _ in range(min(count, 20)):
                    func(*args, **kwargs)
                times.append((time.perf_counter() - began) / min(count, 20))
            total += min(times) * count
        return total


def compare(args):
    script, agent, prompts = prepare(args)
    optimizer = torch.optim.AdamW(agent.model.parameters(), lr=0.0, fused=True)
    seconds, rates = {}, {"ours": [], "plain": []}
    for round in range(args.rounds + 1):  # the first warms up
        drawn, ours_sampling = timed(ours_sample, args, script, agent, prompts)
        texts, plain_sampling = timed(plain_sample, args, agent, prompts)
        ours, ours_training = timed(ours_train, args, script, agent, prompts, drawn)
        ours_gradient = [p.grad.clone() for p in agent.model.parameters()]
        _, step = timed(optimizer.step)
        optimizer.zero_grad()
        plain, plain_training = timed(plain_train, args, agent, prompts, drawn)
        plain_gradient = [p.grad.clone() for p in agent.model.parameters()]
        optimizer.zero_grad()
        if round:
            for name, value in [
                ("sampling", (plain_sampling, ours_sampling)),
                ("training", (plain_training, ours_training)),
            ]:
                seconds.setdefault(name, []).append(value)
            whole = (plain_sampling + plain_training + step, ours_sampling + ours_training + step)
            seconds.setdefault("whole iteration", []).append(whole)
        ours_count = sum(len(ids) for group in drawn for ids, _ in group)
        plain_count = (texts != 0).sum().item() if args.natural else texts.numel()
        rates["ours"].append(ours_count / ours_sampling)
        rates["plain"].append(plain_count / plain_sampling)
    print("| part | plain, s | ours, s | ratio of medians | ratio by round |\n|---|---|---|---|---|")
    for name, pairs in seconds.items():
        plain_median, ours_median = (statistics.median(column) for column in zip(*pairs))
        ratios = " ".join(f"{plain / ours:.1f}" for plain, ours in pairs)
        print(f"| {name} | {plain_median:.3f} | {ours_median:.3f} | **{plain_median / ours_median:.2f}** | {ratios} |")
    with Products() as of_sampling:
        drawn = ours_sample(args, script, agent, prompts)
    with Products() as of_training:
        ours_train(args, script, agent, prompts, drawn)
    optimizer.zero_grad()
    floors = {"sampling": of_sampling.seconds(), "training": of_training.seconds()}
    floors["whole iteration"] = sum(floors.values())
    print("\n| part | products alone, s | ours over that |\n|---|---|---|")
    for name, floor in floors.items():
        ours_median = statistics.median(ours for _, ours in seconds[name])
        print(f"| {name} | {floor:.3f} | **{ours_median / floor:.2f}** |")
    for part, run, more in (("sampling", ours_sample, ()), ("training", ours_train, (drawn,))):
        with torch.profiler.profile() as profile:
            run(args, script, agent, prompts, *more)
        events = sorted(profile.key_averages(), key=lambda event: -event.self_cpu_time_total)
        total = sum(event.self_cpu_time_total for event in events)
        shares = (
            f"{event.key.removeprefix('aten::')} {event.self_cpu_time_total / total:.0%}" for event in events[:10]
        )
        print(f"\n{part} by operator, of the time in all of them: {', '.join(shares)}")
    optimizer.zero_grad()
    print("\ntokens/s of sampling:", ", ".join(f"{name} {statistics.median(r[1:]):.0f}" for name, r in rates.items()))
    worst = max((ours[key] - plain_row).abs().max().item() for key, plain_row in plain.items())
    scale = max(g.abs().max() for g in plain_gradient)
    gap = max((a - b).abs().max() for a, b in zip(ours_gradient, plain_gradient)) / scale
    print(f"largest difference of a log-probability: {worst:.1e}; of a gradient, over the largest entry: {gap:.1e}")


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    if args.hidden_size and args.hidden_size % 16:
        sys.exit(f"throughput.py: error: --hidden-size {args.hidden_size}: 8 heads need a multiple of 16.")
    print(stamp(args) + "\n")
    compare(args)
