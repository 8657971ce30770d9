"""MADPO: agents learn which of two joint answers is better, by DPO on the product of their policies.

    python madpo.py --env tldr --num-agents 2    (read the loop at the end first, from `# 1 ROLLOUT` on)

    m = sum_i log pi_i(y_i | x_i) - log ref_i(y_i | x_i) - log pi_i(z_i | x_i) + log ref_i(z_i | x_i)
    L = - log sigmoid(beta m) - nll_coef * sum_i log pi_i(y_i | x_i) / length of y_i

At a node of the rollout tree joint answer y has a higher return than z, as a mean over agents. Agents write on their
own given their prompts x_i, so a joint log-probability is the sum of theirs; ref_i is what agent i started from. In
cross, half of the pairs or more are counterfactual, if there are enough: equal but for one agent's answer. Agent i's
gradient is -beta sigmoid(-beta m) times that of log pi_i(y_i) - log pi_i(z_i): the others enter as a number.

With --data the pairs are of a file: the training lines of a run's rollouts.jsonl (by the reward of each turn alone)
or rows with prompt, chosen and rejected for one agent. Left out on purpose: several passes over a rollout, a division
by lengths inside m. Sources: DPO, arXiv 2305.18290; the NLL term, arXiv 2404.19733.
"""

import atexit
import copy
import json
import math
import os
import sys
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from functools import partial
from importlib import import_module
from itertools import chain, product
from signal import SIG_DFL, SIGINT, SIGTERM, signal
from time import perf_counter
from types import SimpleNamespace
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import transformers
import tyro
import yaml
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

# N agents, B tasks, G generations, J joint actions, T turns, P prompt tokens, C completion tokens, V vocabulary,
# R rows of a batch, S completions in a row, L cached tokens. A node belongs to all agents, its groups to one each.


@dataclass
class Args:
    # experiment
    seed: int = 1  # seeds sampling, the order of the tasks and the environment
    num_iterations: int = 120  # rollouts, each followed by an update of every agent; 0: only evaluate
    config: str | None = None  # args.json of a run, or a YAML file, whose values take the place of the defaults
    output_dir: str = "runs"  # where the run folder is made
    resume: str | None = None  # run folder to continue; with unchanged arguments, as if it had never stopped
    save_every: int = 20  # iterations between checkpoints
    track: Literal["none", "tensorboard", "wandb", "trackio"] = "none"  # where metrics go besides metrics.jsonl
    # environment and agents
    env: str = "tldr"  # a name that envs/ knows, several joined by +, or module:Class of your own
    env_kwargs: dict[str, str] = field(default_factory=dict)  # its own options, such as: reward grounded
    num_agents: int = 2  # N, each with its own prompt and its own policy
    num_turns: int = 1  # T, joint actions in a trajectory; environments that need more take more
    dataset: str = "sample"  # sample (offline), hub, a hub id, or a .jsonl, .json or .parquet file
    model: list[str] = field(default_factory=lambda: ["tiny"])  # tiny, a folder or a hub id; one for all, or one each
    share_policy: bool = False  # one model and one optimizer for all agents; gradients add up over them
    lora_rank: int = 0  # rank of a LoRA for each agent, on frozen weights that agents share; 0: train all weights
    devices: list[str] | None = None  # such as cuda:0 cuda:1; one for all, or one each; by default the GPU, if any
    # sampling
    num_generations: int = 8  # G, completions per agent in a group
    joint_mode: Literal["align", "cross"] | None = None  # cross: all G^N (default if T=1, G^N <= 100); align: g with g
    temperature: float = 1.0  # for sampling and for the trained log-probabilities
    max_new_tokens: int | None = None  # C; by default 96 for tiny, 256 for others and for arxiv
    max_batch_tokens: int = 4096  # in training; bounds the memory, which large vocabularies need; sampling: 4 times
    # optimization
    num_tasks: int = 4  # B, tasks per iteration, of all processes together
    learning_rate: float | None = None  # of AdamW; the default is low for large models, and 10 times higher for a LoRA
    anneal_lr: bool = True  # decay the learning rate linearly to 0
    gamma: float = 1.0  # discount per turn
    data: str | None = None  # a .jsonl file of answers to learn from, in place of sampling
    num_pairs: int = 16  # per node, at most; drawn in proportion to the difference of the returns
    beta: float = 0.1  # how strongly the policy is held to the one that it started from
    label_smoothing: float = 0.0  # the chance that a preference is wrong
    nll_coef: float = 0.0  # weight of the likelihood of the better answers
    max_grad_norm: float = 1.0  # each agent's gradient is clipped to this norm
    # evaluation
    eval_every: int = 20  # iterations between evaluations; there is always one before and one after training
    eval_tasks: int = 64  # held-out tasks, always the same ones; 0: all
    eval_split: Literal["test", "train"] = "test"  # train, with --num-iterations 0: collect answers for sft.py
    eval_generations: int = 1  # trajectories per held-out task; pass@k is estimated for k = 1, 2, 4 ... up to this
    eval_temperature: float | None = None  # by default that of training; 0: greedy


def fail(sentence):
    """Exits with status 2 and one sentence that names the argument and the remedy."""
    tqdm.write(f"error: {sentence}", file=sys.stderr)  # print would garble the bar
    sys.exit(2)


@contextmanager
def writing(path):
    """Makes a full disk one sentence. A partial file goes; what was saved before stays."""
    try:
        yield
    except Exception as error:  # Python, torch and safetensors each raise their own
        if os.path.isfile(path):
            os.remove(path)
        fail(f"--output-dir: {path} cannot be written ({error}); make room.")


def gather(value):
    """The values of all processes, in the order of their ranks."""
    values = [value] * int(os.environ.get("WORLD_SIZE", 1))
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def load_agent(args, name, device, shared):
    """A policy with its tokenizer and optimizer. LoRA agents with the same model share its frozen weights."""
    path = f"{os.path.dirname(__file__)}/models/tiny" if name == "tiny" else name
    dtype = torch.bfloat16 if args.lora_rank and device.type == "cuda" else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = shared.get((name, device)) or AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)
    head = model.get_output_embeddings().float()

    def float32_head(hidden):  # in bfloat16, log-probabilities would be off by hundredths of a nat
        with torch.autocast(device.type, enabled=False):
            return torch.nn.Linear.forward(head, hidden.float())

    head.forward = float32_head
    if args.lora_rank:
        shared[name, device] = model
        model = copy.deepcopy(model, {id(p): p for p in model.parameters()})  # new modules, the same weights
        form = {"r": args.lora_rank, "lora_alpha": 2 * args.lora_rank, "target_modules": "all-linear"}
        model.add_adapter(import_module("peft").LoraConfig(task_type="CAUSAL_LM", **form))
        linears = [key for key, module in model.named_modules() if type(module) is torch.nn.Linear]
        tqdm.write(f"{name}: no LoRA for {[key for key in linears if not ('lora_' in key or 'base_layer' in key)]}")
    agent = SimpleNamespace(tokenizer=tokenizer, model=model.eval())  # no dropout, in training either
    agent.autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    agent.trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
    for p in agent.trained.values():
        p.data = p.data.float()  # an adapter has its base's dtype
    kind, options = torch.optim.AdamW, {"lr": args.learning_rate, "weight_decay": 0.0, "fused": True}
    if dist.is_initialized():  # each process keeps its share of the moments; the update is the same
        kind, options["optimizer_class"] = import_module("torch.distributed.optim").ZeroRedundancyOptimizer, kind
    agent.optimizer = kind(list(agent.trained.values()), **options)
    special = {key: token.content for key, token in tokenizer.added_tokens_decoder.items() if token.special}
    stops = {tokenizer.eos_token_id, *np.ravel(model.generation_config.eos_token_id).tolist()} - {None}
    if tokenizer.chat_template:  # what ends a turn there ends a completion too: base models do not list it
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ANSWER"}]
        behind = tokenizer.apply_chat_template(turn, tokenize=False).partition("ANSWER")[2].lstrip()
        stops |= {key for key, token in special.items() if behind.startswith(token)}
    agent.special, agent.stop_ids = list(special.values()), sorted(stops)
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers}
    if model._is_stateful or kinds - {DynamicLayer, DynamicSlidingWindowLayer}:
        fail("--model: it has layers of neither full nor sliding attention; use one without them.")
    # whether a mask of ours decides what each layer sees, so that completions of a prompt can share its cache
    agent.full_attention = kinds == {DynamicLayer} and model.is_backend_compatible()
    return agent


def encode(agent, prompt, max_new_tokens):
    """Token ids of a prompt: as a user message, or as bare text if the tokenizer has no chat template."""
    tokenizer, text = agent.tokenizer, prompt
    for token in agent.special:  # a prompt may quote an agent: a space makes its special tokens plain text
        text = text.replace(token, f"{token[0]} {token[1:]}")
    if tokenizer.chat_template:
        chat, plain = [{"role": "user", "content": text}], text.strip()
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, enable_thinking=False)
        if plain not in text:
            fail("--model: its chat template drops the prompt; use one that takes content as a text.")
    ids = tokenizer(text, add_special_tokens=not tokenizer.chat_template).input_ids
    most = getattr(agent.model.config.get_text_config(), "max_position_embeddings", math.inf)
    if len(ids) + max_new_tokens > most:
        fail(f"--max-new-tokens: lower it, or shorten prompts; one has {len(ids)} tokens, and the model reads {most}.")
    return ids


@torch.no_grad()
def sample(agent, prompts, G, temperature, C):
    """Draws G completions of each of B prompts (token ids) from the model's full distribution; temperature 0: greedy.

    Returns B lists of G pairs (token ids, log-probabilities), up to and including the first stop token. A prompt is
    computed once, and its completions decode together: they are the S tokens that the model reads of a row at a time,
    and attention lets each see the prompt and its own earlier tokens. (With sliding windows, S is 1: a row for each.)
    """
    model, device, S = agent.model, agent.model.device, G if agent.full_attention else 1
    rows = [torch.tensor(ids, device=device) for ids in prompts]
    padded = pad_sequence(rows, batch_first=True, padding_value=-1, padding_side="left")  # (B, P)
    real = (padded >= 0).long()
    position_ids, cache = (real.cumsum(1) - 1).clamp(min=0), DynamicCache(config=model.config)
    read = partial(model, past_key_values=cache)
    logits = read(padded.clamp(min=0), attention_mask=real, position_ids=position_ids, logits_to_keep=1).logits
    prompt_of = torch.arange(len(prompts), device=device).repeat_interleave(G // S)  # (R,)
    cache.reorder_cache(prompt_of)
    logits, position_ids = logits[prompt_of].expand(-1, S, -1), position_ids[prompt_of, -1:]  # (R, S, V), (R, 1)
    owner = real[prompt_of] - 2  # (R, L), of each token in the cache: -2 padding, -1 the prompt, or a completion
    number = torch.arange(len(prompts) * G, device=device).view(-1, S)  # (R, S), of the completions that still decode
    running = torch.ones_like(number, dtype=torch.bool)  # (R, S), which of these have not stopped
    tokens = torch.zeros(len(prompts) * G, C, dtype=torch.long, device=device)
    logprobs, lengths = torch.zeros(tokens.shape, device=device), tokens[:, 0].clone()
    stop_ids = torch.tensor(agent.stop_ids, device=device)
    for t in range(C):
        probs = (logits.float() / max(temperature, 1e-6)).softmax(-1)  # (R, S, V)
        # inverse CDF in float64: the first token whose cumulative probability exceeds a uniform random number
        cumulative = probs.cumsum(-1, dtype=torch.float64)
        threshold = cumulative[..., -1:] * torch.rand_like(cumulative[..., :1])
        chosen = torch.searchsorted(cumulative, threshold, right=True).clamp(max=probs.shape[-1] - 1)  # (R, S, 1)
        logprobs[number, t] = probs.gather(-1, chosen)[..., 0].log()
        tokens[number, t] = chosen = chosen[..., 0]  # (R, S)
        lengths[number] += running
        running = running & ~torch.isin(chosen, stop_ids)
        if t + 1 == C or not running.any():
            break
        # drop rows whose completions have all stopped, and columns that no row needs, once an eighth can go
        rows, width = running.any(1).nonzero().flatten(), int(running.sum(1).max())
        if len(rows) * width <= 0.875 * running.numel():
            first = running[rows].int().topk(width).indices
            number, chosen, running = (x[rows].gather(1, first) for x in (number, chosen, running))
            owner, position_ids = owner[rows], position_ids[rows]
            cache.reorder_cache(rows)
        owner, position_ids = torch.cat([owner, number], 1), position_ids + 1
        visible = (owner[:, None] == -1) | (owner[:, None] == number[..., None])  # (R, S, L)
        mask = torch.where(visible, 0.0, -torch.inf)[:, None] if agent.full_attention else (owner > -2).long()
        logits = read(chosen, attention_mask=mask, position_ids=position_ids.expand_as(chosen)).logits
    rows = zip(tokens.tolist(), logprobs.tolist(), lengths.tolist())
    pairs = [(ids[:length], values[:length]) for ids, values, length in rows]
    return [pairs[k : k + G] for k in range(0, len(pairs), G)]


def token_logprobs(agent, prompt, completions, temperature):
    """Log-probabilities of the tokens of completions: one tensor (C,) each.

    They continue from the prompt's cache, with gradients. Causal attention never sees padding on the right.
    """
    model, R, cache = agent.model, len(completions), DynamicCache(config=agent.model.config)
    prompt = torch.tensor([prompt], device=model.device)  # (1, P)
    first = model(prompt, past_key_values=cache, logits_to_keep=1).logits  # (1, 1, V)
    cache.batch_repeat_interleave(R)
    rows = [torch.tensor(ids, device=model.device) for ids in completions]
    target = pad_sequence(rows, batch_first=True)  # (R, C)
    later = model(target, past_key_values=cache).logits
    # each token is predicted one position before it, the first one by the prompt's last
    logits = torch.cat([first.expand(R, -1, -1), later[:, :-1]], 1).float() / temperature  # (R, C, V)
    values = logits.log_softmax(-1).gather(-1, target[..., None])[..., 0]  # (R, C)
    return [value[: len(ids)] for value, ids in zip(values, rows)]


@torch.no_grad()
def log_likelihoods(args, agent, group):
    """Log-probabilities of a group's whole completions: (G,)."""
    order = sorted(range(len(group.completion_ids)), key=lambda g: len(group.completion_ids[g]))
    size = max(1, (args.max_batch_tokens - len(group.prompt_ids)) // len(group.completion_ids[order[-1]]))
    totals = np.zeros(len(order))
    for k in range(0, len(order), size):
        completions = [group.completion_ids[g] for g in order[k : k + size]]
        with agent.autocast:
            logprobs = token_logprobs(agent, group.prompt_ids, completions, args.temperature)
        totals[order[k : k + size]] = [values.sum().item() for values in logprobs]
    return totals


def choose_pairs(joint, returns, most):
    """Indices of the better and the worse joint action of up to `most` pairs: (P,), (P,).

    joint: (J, agents that speak), returns: (J,). Half or more, rounded down, differ in one answer only, if enough do.
    """
    gaps = returns[:, None] - returns  # (J, J)
    gaps[gaps < 1e-6 * np.abs(returns).max()] = 0  # also rounding errors
    single = (joint[:, None] != joint).sum(-1) == 1  # (J, J)
    chosen = []
    for weights, count in ((gaps * single, most // 2), (gaps, most)):
        chances = weights.flatten()
        chances[chosen] = 0
        count = min(count - len(chosen), np.count_nonzero(chances))
        if count > 0:
            chosen += np.random.choice(len(chances), count, replace=False, p=chances / chances.sum()).tolist()
    return np.divmod(np.array(chosen, dtype=int), len(joint))


def node_of(args, agents, line, weight):
    """A node like those of rollout(), of what the loop needs, from a line of --data."""
    if "chosen" in line:
        said = {"prompt": line["prompt"], "completions": [line["chosen"], line["rejected"]], "stopped": [True, True]}
        line = {"agents": [said], "joint": [[0], [1]], "rewards": [1.0, 0.0]}
    node = SimpleNamespace(weight=weight, joint=line["joint"], groups={})
    node.steps = [SimpleNamespace(reward=reward) for reward in line["rewards"]]
    node.children = [None] * len(node.steps)
    if len(line["agents"]) != len(agents):
        fail("--num-agents: give the number of those in the lines of --data.")
    for i, (agent, said) in enumerate(zip(agents, line["agents"])):
        if said:
            group = SimpleNamespace(prompt_ids=encode(agent, said["prompt"], args.max_new_tokens), completion_ids=[])
            for text, stopped in zip(said["completions"], said["stopped"]):
                ids = agent.tokenizer(text, add_special_tokens=False).input_ids
                group.completion_ids.append([*ids, agent.tokenizer.eos_token_id] if stopped or not ids else ids)
            node.groups[i] = group
    return node


def complete(args, agent, groups, G, temperature):
    """Draws an agent's G completions of the prompt of each of its groups, which then have all but their returns."""
    prompts, C = [encode(agent, group.prompt, args.max_new_tokens) for group in groups], args.max_new_tokens
    # four times the training batch: sampling keeps only keys and values, not all activations
    size = max(1, 4 * args.max_batch_tokens // (max(map(len, prompts), default=0) + G * C))
    # one context for all tokens, so that weights are cast once; inference mode, faster on a CPU, would cast each time
    with agent.autocast, torch.inference_mode(not torch.cuda.is_available()):
        drawn = [sample(agent, prompts[k : k + size], G, temperature, C) for k in range(0, len(prompts), size)]
    for group, prompt_ids, pairs in zip(groups, prompts, chain(*drawn)):
        group.prompt_ids, (group.completion_ids, group.logprobs) = prompt_ids, zip(*pairs)
        group.stopped = [ids[-1] in agent.stop_ids for ids in group.completion_ids]
        group.completions = agent.tokenizer.batch_decode(group.completion_ids, skip_special_tokens=True)
        if agent.tokenizer.decode(prompt_ids[-8:]).rstrip().endswith("<think>"):
            # the chat template opened a thought: until it ends, nothing is an answer
            group.completions = ["<think>" + text for text in group.completions]


def rollout(args, env, agents, tasks, generations, joint_mode, temperature):
    """Grows a tree of joint actions for each task, with G = generations[t] at turn t; returns the nodes of each turn.

    tasks: pairs (number, task). A node has task_number, task, path (the joint actions that led here), history (their
    Steps), weight (the probability that a trajectory drawn from the tree reaches it), joint (J tuples of completion
    indices, one per agent), steps and children (J each), value (the return of each agent), and groups, one for each
    agent that speaks: prompt, prompt_ids, G completions, completion_ids, logprobs, stopped, and returns (G,).
    """
    turns, N, start = [], len(agents), {"path": [], "history": [], "weight": 1 / max(1, len(tasks))}
    nodes = [SimpleNamespace(task_number=number, task=task, **start) for number, task in tasks]
    for t, G in enumerate(generations):
        for node in nodes:
            prompts = zip(range(N), env.observe(node.task, node.history), strict=True)
            node.groups = {i: SimpleNamespace(prompt=prompt) for i, prompt in prompts if prompt is not None}
        for i, agent in enumerate(agents):
            complete(args, agent, [node.groups[i] for node in nodes if i in node.groups], G, temperature)
        branches = []
        for node in nodes:
            node.joint = [(g,) * N for g in range(G)]
            if joint_mode == "cross":  # of those who speak
                node.joint = list(product(*(range(G) if i in node.groups else [0] for i in range(N))))
            for choice in node.joint:
                actions = [node.groups[i].completions[g] if i in node.groups else "" for i, g in enumerate(choice)]
                branches.append((node.task, node.history, actions))
        steps = env.step(branches)
        if len(steps) != len(branches):
            fail("--env: step() has to return a Step for each branch.")
        steps = iter(steps)
        for node in nodes:
            node.steps, node.children = [next(steps) for _ in node.joint], []
            for j, step in enumerate(node.steps):
                child = SimpleNamespace(task_number=node.task_number, task=node.task, path=[*node.path, j])
                child.history, child.weight = [*node.history, step], node.weight / len(node.joint)
                node.children.append(None if step.done or t + 1 == len(generations) else child)
        turns.append(nodes)
        nodes = [child for node in nodes for child in node.children if child]
        if not nodes:
            break
    for node in chain(*reversed(turns)):  # children before parents
        returns = np.zeros((len(node.steps), N))  # (J, N), float64, so that equal returns stay equal
        for j, (step, child) in enumerate(zip(node.steps, node.children)):
            returns[j] = step.reward  # one that all share, or a list with one for each agent
            if child:
                returns[j] += args.gamma * child.value
        node.value = returns.mean(0)  # (N,)
        node.ends = [child.ends[0] if child else step for step, child in zip(node.steps, node.children)]  # of paths
        for i, group in node.groups.items():
            member = np.array(node.joint)[:, i]  # (J,), which of its completions
            # the mean over the joint actions that contain a completion
            group.returns = np.bincount(member, returns[:, i]) / np.bincount(member)  # (G,)
    return turns


def terms(split, turns):
    """What is logged of a rollout, as triples (name, value, weight)."""
    for t, nodes in enumerate(turns, 1):
        for node in nodes:
            for i, group in node.groups.items():
                G, tokens = len(group.completions), sum(map(len, group.completion_ids))
                yield f"agent_{i}/entropy", -sum(map(sum, group.logprobs)) / tokens, tokens  # an estimate, in nats
                yield f"agent_{i}/completion_length", tokens / G, G
                yield f"agent_{i}/stopped", np.mean(group.stopped), G
                if G > 1:
                    yield "zero_variance_groups", np.ptp(group.returns) < 1e-9, 1
            chance = node.weight * len(turns[0]) / len(node.steps)  # given the task
            for step, child in zip(node.steps, node.children):
                yield f"reward_turn{t}", np.mean(step.reward), chance
                for name, value in () if child else step.parts.items():  # where the branch ends
                    yield name, value, chance
    for root in turns[0]:
        for i, value in enumerate(root.value):
            yield f"agent_{i}/return", value, 1
            yield "return", value, 1
        if split == "eval" and all("all_passed" in step.parts for step in root.ends):
            n, failed = len(root.ends), sum(step.parts["all_passed"] < 1 for step in root.ends)
            for k in 2 ** np.arange(n.bit_length()):  # unbiased: Chen et al., 2021, arXiv 2107.03374
                yield f"pass@{k}", 1 - math.comb(failed, k) / math.comb(n, k), 1


def summarize(split, turns):
    """The logged metrics: weighted means, over all processes."""
    sums = defaultdict(lambda: np.zeros(2))
    for name, value, weight in chain(*gather(list(terms(split, turns)))):
        sums[name] += (weight * value, weight)
    return {f"{split}/{name}": total / weight for name, (total, weight) in sums.items()}


def records(iteration, split, turns, N, most=None):
    """Lines for rollouts.jsonl, one per node of the first tasks: what agents read and wrote, and what it was worth."""

    def plain(x):  # for what JSON does not know
        if isinstance(x, SimpleNamespace):  # a group
            keys = ("prompt", "completions", "stopped", "returns", "advantages")
            return {key: vars(x)[key] for key in keys if key in vars(x)}
        return x.tolist() if isinstance(x, (np.ndarray, np.generic)) else str(x)

    shown = {node.task_number for node in turns[0][:most]}
    for turn, nodes in enumerate(turns, 1):
        for node in nodes:
            if node.task_number not in shown:
                continue
            names = dict.fromkeys(name for step in node.steps for name in step.parts)
            line = {"iteration": iteration, "split": split, "turn": turn, "task_number": node.task_number}
            line |= {"path": node.path, "weight": node.weight, "joint": node.joint}
            line["rewards"] = [step.reward for step in node.steps]
            line["parts"] = {name: [step.parts.get(name) for step in node.steps] for name in names}
            line["feedback"] = [step.feedback for step in node.steps]
            line["agents"] = [node.groups.get(i) for i in range(N)]
            yield json.dumps(line, default=plain) + "\n"


if __name__ == "__main__":
    # arguments
    here, script = os.path.split(__file__)
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    args, saved = tyro.cli(Args, description=__doc__), 0  # saved: the last checkpoint's iteration
    if args.resume and not os.path.isfile(f"{args.resume}/state.pt"):
        fail("--resume: give the run folder itself, which has a state.pt after its first checkpoint.")
    if source := f"{args.resume}/args.json" if args.resume else args.config:
        with open(source) as file:
            defaults = yaml.safe_load(file)  # of which JSON is a part
        words = []  # as on the command line, where tyro checks them, and later ones win
        for name, value in defaults.get("args", defaults).items():
            if isinstance(value, bool):
                words.append(f"--{'' if value else 'no-'}{name}")
            elif value is not None:
                values = np.ravel(list(value.items()) if isinstance(value, dict) else value)
                words += [f"--{name}", *map(str, values)]
        args = tyro.cli(Args, description=__doc__, args=words + sys.argv[1:])
    N, B, G = args.num_agents, args.num_tasks, args.num_generations
    tiny = set(args.model) == {"tiny"}
    if args.learning_rate is None:
        args.learning_rate = (4e-4 if tiny else 5e-6) * (10 if args.lora_rank else 1)
    if args.max_new_tokens is None:
        args.max_new_tokens = 96 if tiny and args.env != "arxiv" else 256
    gpu = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    devices = [torch.device(name) for name in args.devices or [gpu]]
    if G < 2:
        fail("--num-generations: a group needs at least 2 completions.")
    if not {len(args.model), len(devices)} <= {1, 1 if args.share_policy else N}:
        fail("--model, --devices: give one for all agents, or (without --share-policy) one each.")
    if B % world_size:
        fail("--num-tasks: give a multiple of the number of processes, which share them equally.")

    # processes and tracker
    transformers.utils.logging.disable_progress_bar()
    if devices[0].type == "cuda":
        torch.cuda.set_device(devices[0])
        torch.set_float32_matmul_precision("high")  # TF32, for the output head
    elif tiny:
        torch.set_num_threads(1)  # so small a model gains little from more threads
    if world_size > 1:
        dist.init_process_group(timeout=timedelta(days=1))  # others wait while one runs tests or saves
    name = f"{args.env.replace(':', '.')}__{script[:-3]}__{args.seed}__{datetime.now():%Y%m%d-%H%M%S.%f}"
    run_dir = gather(args.resume or f"{args.output_dir}/{name}")[0]
    logs = f"{run_dir}/metrics.jsonl", f"{run_dir}/rollouts.jsonl"
    if args.track != "none" and rank == 0:  # before models load, so that a missing key does not cost minutes
        tracker = import_module("torch.utils.tensorboard" if args.track == "tensorboard" else args.track)
        if args.track != "tensorboard":
            name = os.path.basename(os.path.normpath(run_dir))
            os.environ["WANDB_RUN_ID"] = name  # a resumed run goes on there too
            tracker.init(project="tutti", name=name, config=asdict(args), resume="allow")

    # environment and agents
    sys.path.append("")  # where a class of your own may be
    setup = {key: vars(args)[key] for key in ("num_agents", "num_turns", "dataset", "seed")} | args.env_kwargs
    module, _, name = args.env.partition(":")
    try:
        if name and "+" not in args.env:  # a class of your own needs no envs/
            env = getattr(import_module(module), name)(**setup)
        else:
            env = import_module("envs").make(args.env, **setup)
        train_tasks, held_out = (list(enumerate(env.tasks(split))) for split in ("train", args.eval_split))
    except (ModuleNotFoundError, ValueError) as error:  # envs raises the last with one sentence
        fail(f"--env {args.env}: {error}")
    T = args.num_turns = getattr(env, "num_turns", args.num_turns)
    if args.joint_mode is None:  # cross scores G^N joint actions, and each may start a branch
        args.joint_mode = "cross" if T == 1 and G**N <= 100 else "align"
    if args.data:
        with open(args.data) as file:
            train_tasks = [line for line in map(json.loads, file) if line.get("split", "train") == "train"]
        if not train_tasks:
            fail("--data: it has no line of split train, and others are not trained on; give another file.")
    chosen = np.random.default_rng(0).permutation(len(held_out))[: args.eval_tasks or None]
    eval_tasks = [held_out[k] for k in chosen[rank::world_size]]
    epochs = np.tile(range(len(train_tasks)), (args.num_iterations * B // len(train_tasks) + 1, 1))
    order = np.random.default_rng(args.seed).permuted(epochs, axis=1).flatten()  # of all iterations, shuffled by epoch
    torch.manual_seed(args.seed)  # new adapters are the same in all processes
    shared, places = {}, list(zip(args.model * N, devices * N))[: 1 if args.share_policy else N]
    policies = [load_agent(args, name, device, shared) for name, device in places]
    agents = (policies * N)[:N]  # who plays each seat
    frozen = {place: load_agent(args, *place, shared) for place in dict.fromkeys(places)}  # what they start from
    references = [frozen[place] for place in (places * N)[:N]]
    prompts = {}  # agent -> one of its prompts as its model reads it
    # all first prompts, so that none is found too long in mid-training
    for line in train_tasks if args.data else ():
        node_of(args, agents, line, 1.0)
    for _, task in chain(() if args.data else train_tasks, eval_tasks):
        for i, prompt in enumerate(env.observe(task, [])):
            if prompt is not None:
                prompts[i] = agents[i].tokenizer.decode(encode(agents[i], prompt, args.max_new_tokens))
    if args.resume:
        state = torch.load(f"{run_dir}/state.pt", map_location="cpu")
        if [agent.trained.keys() for agent in policies] != [weights.keys() for weights in state["models"]]:
            fail("--resume: its agents are others; leave out --model, --num-agents and --lora-rank.")
        for agent, weights, moments in zip(policies, state["models"], state["optimizers"]):
            for p, value in zip(agent.trained.values(), weights.values()):
                p.data.copy_(value)
            agent.optimizer.load_state_dict(moments)
        for path, size in zip(logs, state["sizes"]):
            os.truncate(path, size)  # lines after the checkpoint come again
        saved = state["iteration"]

    # Each iteration and process reseeds, and evaluation always uses iteration 0's seed: no generator is saved.
    def reseed(iteration):
        seed = int(np.random.SeedSequence([args.seed, rank, iteration]).generate_state(1)[0])
        transformers.set_seed(seed)
        for k, generator in enumerate(torch.cuda.default_generators):  # or agents on two GPUs would draw the same
            generator.manual_seed(seed + k)

    def evaluate():
        reseed(0)
        generations = [args.eval_generations, *[1] * (T - 1)]
        temperature = args.temperature if args.eval_temperature is None else args.eval_temperature
        turns = rollout(args, env, agents, eval_tasks, generations, "align", temperature)
        lines = gather(list(records(iteration, args.eval_split, turns, N)))
        return summarize("eval", turns), list(chain(*lines))

    def log(metrics, lines):
        for name, value in metrics.items():
            if not math.isfinite(value):
                fail(f"{name} is {value}: resume with a lower --learning-rate, or mend the reward of --env.")
        if rank == 0:
            if "eval/return" in metrics:  # print would garble the bar
                tqdm.write(f"iteration {iteration}: evaluation return {metrics['eval/return']:.3f}")
            with writing(run_dir):
                for path, new in zip(logs, ([json.dumps({"iteration": iteration} | metrics) + "\n"], lines)):
                    with open(path, "a") as file:
                        file.writelines(new)
            if args.track == "tensorboard":
                for name, value in metrics.items():
                    writer.add_scalar(name, value, iteration)
            elif args.track != "none":
                tracker.log(metrics, step=iteration)

    signals = []

    def on_signal(number, _):
        signals.append(number)
        signal(SIGINT, SIG_DFL)  # another Ctrl-C ends at once
        tqdm.write("finishing the iteration, then saving; another Ctrl-C ends at once, without saving")

    # run folder
    iteration = saved
    before = None if args.resume else evaluate()  # now, so that a reward that fails leaves no empty folder
    if rank == 0:
        about = {
            "script": script,
            "args": asdict(args) | {"resume": None},
            "prompts": prompts,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "commit": os.popen(f"git -C '{here}' rev-parse HEAD 2>/dev/null").read().strip(),
        }
        os.makedirs(run_dir, exist_ok=True)
        with open(f"{run_dir}/args.json", "w") as file:
            json.dump(about, file, indent=2)
        if args.track == "tensorboard":
            writer = tracker.SummaryWriter(run_dir)
        atexit.register(print, f"the run is in {run_dir}; --resume {run_dir} goes on from its last checkpoint")
    if before:
        log(*before)
    signal(SIGINT, on_signal)
    signal(SIGTERM, on_signal)
    for iteration in tqdm(range(saved + 1, args.num_iterations + 1), disable=rank):
        # 1 ROLLOUT: a tree for each of this process's tasks, or a node of --data
        began = perf_counter()
        reseed(iteration)
        tasks = [train_tasks[k] for k in order[(iteration - 1) * B + rank : iteration * B : world_size]]
        if args.data:
            turns, metrics = [[node_of(args, agents, line, 1 / len(tasks)) for line in tasks]], {}
        else:
            turns = rollout(args, env, agents, tasks, [G] * T, args.joint_mode, args.temperature)
            metrics = summarize("train", turns)
        metrics["time/rollout"] = perf_counter() - began

        # 2 PREFERENCES: pairs of joint answers, and what each completion gains by them
        nodes, logged = list(chain(*turns)), []
        for node in nodes:
            joint = np.array(node.joint)[:, list(node.groups)]  # (J, agents that speak)
            returns = np.array([np.mean(step.reward) for step in node.steps])  # (J,)
            for j, child in enumerate(node.children):
                if child:
                    returns[j] += args.gamma * child.value.mean()
            better, worse = choose_pairs(joint, returns, args.num_pairs)  # (P,), (P,)
            total, drift, length = np.zeros((3, len(joint)))  # of joint answers: log pi, log pi - log ref, tokens
            for (i, group), member in zip(node.groups.items(), joint.T):
                group.lengths = np.array(list(map(len, group.completion_ids)))  # (G,)
                own = log_likelihoods(args, agents[i], group)
                total += own[member]
                drift += (own - log_likelihoods(args, references[i], group))[member]
                length += group.lengths[member]
            margins = args.beta * (drift[better] - drift[worse])  # (P,), beta m
            losses = np.logaddexp(0, -margins) + args.label_smoothing * margins  # -log sigmoid, smoothed
            gains = np.exp(-np.logaddexp(0, margins)) - args.label_smoothing  # -dL/d(beta m); exp: sigmoid(-beta m)
            for group, member in zip(node.groups.values(), joint.T):
                size = len(group.completion_ids)
                gained = np.bincount(member[better], gains, size)  # (G,)
                lost = np.bincount(member[worse], gains, size)
                liked = np.bincount(member[better], minlength=size) / group.lengths
                group.advantages = args.beta * (gained - lost) + args.nll_coef * liked
                group.advantages /= max(1, len(better))  # a mean over pairs
            logged.append({"preference_loss": losses, "margin": margins, "accuracy": margins > 0})
            for name, values in (("logprob", total), ("length", length)):
                logged[-1] |= {f"chosen_{name}": values[better], f"rejected_{name}": values[worse]}
        logged = list(chain(*gather(logged)))
        for name in logged[0]:
            values = np.concatenate([pairs[name] for pairs in logged])
            if len(values):
                metrics[f"train/{name}"] = values.mean()

        # 3 UPDATE: one optimizer step for each policy
        tokens = 0
        for i, agent in enumerate(policies):
            loss = 0.0
            for p in agent.trained.values():
                p.grad = torch.zeros_like(p)
            spoken = [(node, group) for node in nodes for k, group in node.groups.items() if agents[k] is agent]
            for node, group in spoken:
                tokens += sum(map(len, group.completion_ids))
                weights = node.weight * group.advantages
                # not those in no pair, or in both answers of one
                rows = [row for row in zip(group.completion_ids, weights.tolist()) if abs(row[1]) > 1e-12]
                rows.sort(key=lambda row: len(row[0]))  # neighbours need little padding
                longest = max(map(len, group.completion_ids))
                size = max(1, (args.max_batch_tokens - len(group.prompt_ids)) // longest)
                for k in range(0, len(rows), size):
                    completions, factors = zip(*rows[k : k + size])
                    with agent.autocast:
                        logprobs = token_logprobs(agent, group.prompt_ids, completions, args.temperature)
                    batch_loss = -sum(factor * values.sum() for factor, values in zip(factors, logprobs))
                    batch_loss.backward()
                    loss += batch_loss.item()
            if world_size > 1:  # each process has the mean over its own tasks
                for p in agent.trained.values():
                    dist.all_reduce(p.grad.div_(world_size))
            grad_norm = torch.nn.utils.clip_grad_norm_(agent.trained.values(), args.max_grad_norm)
            decay = 1 - (iteration - 1) / args.num_iterations if args.anneal_lr else 1.0
            agent.optimizer.param_groups[0]["lr"] = decay * args.learning_rate
            agent.optimizer.step()
            metrics |= {f"agent_{i}/loss": np.mean(gather(loss)), f"agent_{i}/grad_norm": grad_norm.item()}

        # 4 LOG
        metrics |= {"time/iteration": perf_counter() - began, "tokens": sum(gather(tokens))}

        # 5 EVALUATE
        lines = [] if args.data else list(records(iteration, "train", turns, N, most=2))
        last = iteration == args.num_iterations
        if last or iteration % args.eval_every == 0:
            eval_metrics, eval_lines = evaluate()
            metrics |= eval_metrics
            lines += eval_lines
        log(metrics, lines)

        # 6 CHECKPOINT
        stopping = any(gather(len(signals)))
        if last or stopping or iteration % args.save_every == 0:
            for agent in policies if world_size > 1 else ():
                agent.optimizer.consolidate_state_dict()  # to rank 0
            if rank == 0:
                state = {
                    "iteration": iteration,
                    "models": [agent.trained for agent in policies],
                    "optimizers": [agent.optimizer.state_dict() for agent in policies],
                    "sizes": [os.path.getsize(path) for path in logs],
                }
                with writing(f"{run_dir}/state.tmp"):
                    torch.save(state, f"{run_dir}/state.tmp")
                    os.replace(f"{run_dir}/state.tmp", f"{run_dir}/state.pt")  # a crash leaves the old one intact
        if stopping:
            break

    # final output
    for i, agent in enumerate(policies if rank == 0 and args.num_iterations else ()):
        # the trained policy: a model's own generation_config may cut it to top-k or top-p
        options = {"do_sample": True, "temperature": args.temperature, "top_k": 0, "top_p": 1.0}
        agent.model.generation_config = GenerationConfig(eos_token_id=agent.stop_ids, **options)
        with writing(run_dir):
            agent.model.save_pretrained(f"{run_dir}/agent_{i}")
            agent.tokenizer.save_pretrained(f"{run_dir}/agent_{i}")
    if world_size > 1:
        dist.destroy_process_group()
