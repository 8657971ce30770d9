"""MARLOO: each agent follows the leave-one-out advantage of the return that all agents share.

    python marloo.py --env tldr --num-agents 2

The algorithm is the loop at the end of this file, from `# 1 ROLLOUT` on; read it first.

    A_g = R_g - mean of the G-1 others
    L_i = - sum over nodes and g of  w * gamma^turn * A_g * sum_t log pi_i(y_g,t | x, y_g,<t) / max_new_tokens

At a node of the rollout tree agent i draws G completions y_1 .. y_G of its own prompt x. The return of a joint action
is its reward plus gamma times the mean return of the node that it leads to, and R_g is the mean over those that
contain y_g. w is the probability that a trajectory drawn from the tree passes through y_g. Turns count from 0.

E[-grad L_i] = grad E[return] / max_new_tokens: unbiased, and G/(G-1) times MAGRPO's. Adam all but cancels this factor:
nearly equal curves are no bug. With one agent this is RLOO (Kool et al., 2019; arXiv 2402.14740).

Parts of GRPO left out on purpose: division by the group's standard deviation and by the completion's length (both bias
the gradient: Dr. GRPO, arXiv 2503.20783), the clipped ratio (always 1 with one optimizer step per rollout), and the KL
penalty to a reference model.
"""

import atexit
import copy
import importlib
import itertools
import json
import math
import os
import shlex
import signal
import stat
import subprocess
import sys
import time
import zipfile
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from functools import partial
from types import SimpleNamespace
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import transformers
import tyro
from torch.nn.functional import cross_entropy, pad
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

# N agents, B tasks, G generations, J joint actions, T turns, P prompt tokens, C completion tokens, V vocabulary,
# R rows of a batch, U distinct rows, S completions of a row, W of their tokens attended to, L tokens of a row,
# D hidden size, H heads, K key-value heads, E head size. A node belongs to all agents; per-agent data are lists of N.


@dataclass
class Args:
    # experiment
    seed: int = 1  # seeds sampling, the order of the tasks and the environment
    num_iterations: int = 120  # rollouts, each followed by an update of every agent; 0: only evaluate
    output_dir: str = "runs"  # where the run folder is made
    resume: str | None = None  # run folder to continue; with unchanged arguments, as if it had never stopped
    save_every: int = 20  # iterations between checkpoints
    log_groups: int = 2  # tree nodes per turn that are written to rollouts.jsonl each iteration
    track: Literal["none", "tensorboard", "wandb", "trackio"] = "none"  # where metrics go besides metrics.jsonl

    # environment and agents
    env: str = "tldr"  # a name that envs/ knows, or module:Class of your own
    num_agents: int = 2  # N, each with its own prompt and its own policy
    num_turns: int = 1  # T, joint actions in a trajectory
    dataset: str = "sample"  # sample (offline), hub, a hub id, or a .jsonl, .json or .parquet file
    reward: str | None = None  # for tldr and arxiv: plain (default) or grounded
    feedback: str | None = None  # what is said of the last turn; for code: level (default) or plain
    allow_unsafe_code: bool = False  # run model-written code even if the system offers no sandbox
    model: list[str] = field(default_factory=lambda: ["tiny"])  # tiny, a folder or a hub id; one for all, or one each
    lora_rank: int = 0  # rank of a LoRA for each agent, on frozen weights that agents share; 0: train all weights
    devices: list[str] | None = None  # such as cuda:0 cuda:1; one for all, or one each; by default the GPU, if any
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: less memory, more time
    cuda_graphs: bool = False  # replay a decoding step's kernels as one graph, so the GPU does not wait for Python

    # sampling
    num_generations: int = 8  # G, completions per agent in a group
    joint_mode: Literal["align", "cross"] | None = None  # cross: all G^N (default if T=1, G^N <= 100); align: g with g
    temperature: float = 1.0  # for sampling and for the trained log-probabilities
    max_new_tokens: int | None = None  # C; by default 96 for tiny, 256 for others and arxiv (one agent: 512)
    max_batch_tokens: int = 4096  # tokens of a training batch; sampling takes four times as many at once

    # optimization
    num_tasks: int = 4  # B, tasks per iteration, of all processes together
    learning_rate: float | None = None  # of AdamW; by default 4e-4 for tiny, 5e-6 for others; 10 times that for a LoRA
    anneal_lr: bool = True  # decay the learning rate linearly to 0
    gamma: float = 1.0  # discount per turn
    max_grad_norm: float = 1.0  # each agent's gradient is clipped to this norm

    # evaluation
    eval_every: int = 20  # iterations between evaluations; there is always one before and one after training
    eval_tasks: int = 64  # held-out tasks, always the same ones; 0: all
    eval_generations: int = 1  # trajectories per held-out task; pass@k is estimated for k = 1, 2, 4 ... up to this
    eval_temperature: float | None = None  # by default that of training; 0: greedy


def fail(sentence):
    """Exits with status 2 and one sentence that says what to change."""
    tqdm.write(f"{os.path.basename(__file__)}: error: {sentence}", file=sys.stderr)  # print would garble the bar
    sys.exit(2)


def gather(value):
    """The values of all processes, in the order of their ranks."""
    values = [value] * int(os.environ.get("WORLD_SIZE", 1))
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def average(tensors):
    """Replaces each tensor by its mean over processes; a single message pays the latency once."""
    flat = torch.nn.utils.parameters_to_vector(tensors)
    dist.all_reduce(flat)
    torch.nn.utils.vector_to_parameters(flat.div_(dist.get_world_size()), tensors)


def set_seed(seed):
    """Seeds all libraries, and each GPU differently: agents on two GPUs must not draw the same random numbers."""
    transformers.set_seed(seed)
    for k, generator in enumerate(torch.cuda.default_generators):
        generator.manual_seed(seed + k)


def max_context(model):
    """How many tokens the model can read."""
    config = model.config.get_text_config()
    rope = config.to_dict().get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":  # beyond it, the rotary factors of all keys change, cached ones too
        return rope["original_max_position_embeddings"]
    # sparse attention reads index_topk tokens: in a longer text, which ones depends on how much padding it has
    return min(config.max_position_embeddings, getattr(config, "index_topk", None) or math.inf)


def encode(agent, prompts, max_new_tokens):
    """Token ids of each prompt: as a user message, or as bare text if the tokenizer has no chat template."""
    if not all(agent.tokenizer(prompts, add_special_tokens=False).input_ids):
        fail("--model makes no tokens of a prompt: are its tokenizer's files missing, or is a prompt of --env empty?")
    for token in agent.tokenizer.added_tokens_decoder.values():
        if token.special:  # a prompt may quote an agent: a space makes its special tokens plain text
            text = f"{token.content[0]} {token.content[1:]}"
            prompts = [prompt.replace(token.content, text) for prompt in prompts]
    if agent.tokenizer.chat_template:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        more = {"enable_thinking": False, "date_string": "26 Jul 2024"}  # ignored by most templates
        prompt_ids = agent.tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False, **more)
    else:  # some tokenizers append an end token to every text
        prompt_ids = agent.tokenizer(prompts).input_ids
        prompt_ids = [ids[:-1] if ids[-1] == agent.tokenizer.eos_token_id else ids for ids in prompt_ids]
    longest, prompt = max(zip(map(len, prompt_ids), prompts))
    if longest + max_new_tokens > (most := max_context(agent.model)):
        too_long = f"--max-new-tokens {max_new_tokens} after a prompt of {longest} tokens exceeds the model's {most}"
        fail(f"{too_long}; lower it, or use --env and --dataset with shorter prompts ({prompt!r:.80} ...).")
    return prompt_ids


def autocast(model):
    return torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda")


def head(model, hidden, temperature):  # (..., D) -> (..., V)
    # always float32 (TF32 on CUDA): with bfloat16, log-probabilities would be off by hundredths of a nat
    with torch.autocast(model.device.type, enabled=False):
        logits = model.get_output_embeddings()(hidden.float())
    return logits if temperature in (0, 1) else logits / temperature  # 0: greedy


def sdpa(module, query, key, value, attention_mask, **kwargs):  # (R, H, L, E) -> (R, L, H, E)
    """transformers' sdpa, but if there is a mask, query heads that share keys become further queries of one head.

    transformers would copy the keys and values for each query head, and autograd would keep the copies.
    """
    (R, H, L, E), K = query.shape, key.shape[1]
    if attention_mask is None or attention_mask.shape[1] > 1:  # no mask, or one per head
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    # cached on the mask, which all layers share: otherwise each would keep a copy for the backward pass
    added = vars(attention_mask).setdefault("added", {})
    if H // K not in added:
        kind = query.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
        scores = attention_mask if attention_mask.is_floating_point() else torch.where(attention_mask, 0.0, -math.inf)
        scores = scores.to(dtype).repeat(1, 1, H // K, 1)
        # a view of rows padded to a multiple of 8, which CUDA's kernels need: otherwise each layer would copy it
        added[H // K] = pad(scores, (0, -scores.shape[-1] % 8))[..., : scores.shape[-1]]
    query = query.reshape(R, K, -1, E)
    states, _ = sdpa_attention_forward(None, query, key, value, added[H // K], **kwargs)  # (R, H / K * L, K, E)
    return states.transpose(1, 2).reshape(R, H, L, -1).transpose(1, 2).contiguous(), None


def attention(held, t, module, query, key, value, attention_mask, **kwargs):  # (rows, H, L, E) -> (rows, L, H, E)
    """Attention within prompts, and then of completions to their prompt and, as a separate product, to themselves.

    If t is None, rows are R prompts, and each module's keys (K, R, E, P) and values (K, R, P, E) are stored in `held`.
    Otherwise rows are R * S tokens, the t-th (1,) of each completion. `held` then also has buffers for completion keys
    (K, R * S, E, C) and values (K, R * S, C, E), of which the first W are read; the mask (R, 1, 1, P + W) is added to
    the scores. A prompt's keys are read once for its S completions, and never copied for each query head.
    """
    # as in training, where sdpa multiplies numbers that autocast rounded to bfloat16, and sums in float32
    rounded = lambda x: x.to(value.dtype).float()
    # keys are stored as columns: on a CPU, products with few queries are then faster
    new_keys, new_values = rounded(key).permute(1, 0, 3, 2), value.transpose(0, 1)  # (K, rows, E, L), (K, rows, L, E)
    if t is None:
        held[module] = [new_keys.contiguous(), new_values.contiguous()]
        return sdpa(module, query, key, value, attention_mask, **kwargs)
    (prompt_keys, prompt_values), (keys, values) = held[module]
    (K, R, E, P), rows, W = prompt_keys.shape, len(query), attention_mask.shape[-1] - prompt_keys.shape[3]
    keys = keys.index_copy_(3, t, new_keys)[..., :W]
    values = values.index_copy_(2, t, new_values)[:, :, :W]
    query = rounded(query).view(rows, K, -1, E) * kwargs["scaling"]
    query = query.transpose(0, 1).contiguous()  # (K, R * S, H / K, E)
    with torch.autocast(query.device.type, enabled=False):
        far = query.view(K, R, -1, E) @ prompt_keys  # of the prompt's tokens: (K, R, S * H / K, P)
        near = (query @ keys).view(K, R, -1, W)  # of the completion's own: (K, R, S * H / K, W)
    scores = torch.cat([far, near], -1) + attention_mask.transpose(0, 1)
    far, near = scores.softmax(-1).to(value.dtype).tensor_split([P], -1)
    near = near.reshape(K, rows, -1, W) @ values  # (K, R * S, H / K, E)
    return (near + (far @ prompt_values).view_as(near)).transpose(0, 1).flatten(1, 2)[:, None], None


def trunk(model, input_ids, mask, position_ids, cache, attend=sdpa):  # (R, L) -> (R, L, D)
    """The last hidden states, with `attend` as the attention of all layers and under the caller's autocast."""
    inputs = {"attention_mask": mask, "position_ids": position_ids, "past_key_values": cache}
    precision = torch.get_float32_matmul_precision()
    # TF32 is for the head only: attention scores, and rotary angles before transformers 5.19, need full float32
    torch.set_float32_matmul_precision("highest")
    AttentionInterface.register("sdpa", attend)  # models look up their attention by name
    try:
        return model.base_model(input_ids, **inputs, use_cache=cache is not None).last_hidden_state
    finally:
        torch.set_float32_matmul_precision(precision)
        AttentionInterface.register("sdpa", sdpa)  # the backward pass recomputes with this one


def prefill(agent, texts, cache, attend=sdpa):
    """Runs the U distinct texts among R: hidden states (U, P, D), mask (U, P), each text's row in them (R,)."""
    distinct = {text: b for b, text in enumerate(dict.fromkeys(map(tuple, texts)))}
    device, P = agent.model.device, max(map(len, distinct))  # padded on the left
    input_ids = torch.tensor([[0] * (P - len(ids)) + [*ids] for ids in distinct], device=device)
    mask = torch.tensor([[0] * (P - len(ids)) + [1] * len(ids) for ids in distinct], device=device)
    hidden = trunk(agent.model, input_ids, mask, (mask.cumsum(-1) - 1).clamp(min=0), cache, attend)
    return hidden, mask, torch.tensor([distinct[tuple(text)] for text in texts], device=device)


def draw(weights):  # (rows, V) -> (rows, 1)
    """Samples a column of each row in proportion to its weight, by inverse CDF: first a block of 256, then within it.

    This takes two random numbers per row, where torch.multinomial takes V.
    """

    def pick(weights):
        total = weights.cumsum(-1, dtype=torch.float64)
        column = torch.searchsorted(total, total[:, -1:] * torch.rand_like(total[:, :1]), right=True)
        return column.clamp(max=weights.shape[1] - 1)  # NaN lands past the end

    V = weights.shape[1]
    blocks = pad(weights, (0, -V % 256)).unflatten(1, (-1, 256))  # (rows, V / 256, 256)
    block = pick(blocks.sum(-1))
    column = pick(blocks[torch.arange(len(block), device=block.device), block[:, 0]])
    return (256 * block + column).clamp(max=V - 1)  # after NaN; the metrics then stop the run


def grouped(model):
    """Whether a prompt's completions can decode as one row: all attention is full, and can be replaced by ours."""
    layers, most = DynamicCache(config=model.config).layers, max_context(model)
    full = lambda layer: type(layer) is DynamicLayer or getattr(layer, "sliding_window", 0) >= most  # never slides
    return all(map(full, layers)) and model.is_backend_compatible()


def repeat(step, times, record):
    """Calls step `times` times; with a CUDA stream `record`, captures the second call as a graph and replays it."""
    step()  # also loads and plans what cannot be loaded during capture
    if record and times > 1:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=record):
                step()
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error.__context__ or error).splitlines()[0]
            fail(f"--cuda-graphs: this model's decoding cannot be recorded ({reason}); leave it out.")
        step = graph.replay
    for _ in range(times - 1):
        step()
    if record:
        torch.cuda.synchronize(record.device)  # the graph must outlive its replays


def decode(agent, texts, S, temperature, C):
    """Draws S completions of each of R prompts, as one batch: tokens and their log-probabilities, (R * S, C) each."""
    model, device = agent.model.eval(), agent.model.device  # eval: with caches, and no dropout
    held = {}  # keys and values as `attention` stores them, unless they are in a transformers cache
    cache = None if grouped(model) else DynamicCache(config=model.config)
    attend = lambda t: partial(attention, held, t) if cache is None else sdpa
    hidden, mask, of_row = prefill(agent, texts, cache, attend(None))
    hidden, P = hidden[of_row, -1].repeat_interleave(S, 0), mask.shape[1]  # (R * S, D)
    mask = pad(mask[of_row], (0, C))  # (R, P + C): 1 at the prompt's tokens and at those read since
    if cache is not None:
        cache.reorder_cache(of_row)
    for module, (keys, values) in held.items():
        # room for all tokens from the start: a DynamicCache copies everything for each new token
        (K, _, E, _), rows = keys.shape, len(texts) * S
        buffers = [keys.new_zeros(K, rows, E, C), values.new_zeros(K, rows, C, values.shape[3])]
        held[module] = [keys[:, of_row], values[:, of_row]], buffers
    tokens = torch.zeros(len(texts) * S, C, dtype=torch.long, device=device)
    logprobs = torch.zeros(len(texts) * S, C, device=device)
    batch = torch.arange(len(tokens), device=device).view(-1, S)  # (R, S), rows of `tokens` that decode: all at first
    running = torch.ones_like(batch, dtype=torch.bool)  # which of these have not stopped
    t = torch.zeros(1, dtype=torch.long, device=device)  # index of the token to read: a tensor, for recorded steps

    def choose(hidden):  # (R * S, D)
        probs = head(model, hidden, temperature).softmax(-1)  # (R * S, V)
        chosen = draw(probs) if temperature else probs.argmax(-1, keepdim=True)
        logprobs[batch, t] = (temperature > 0) * probs.gather(-1, chosen).log().view_as(batch)  # greedy: probability 1
        tokens[batch, t] = chosen.view_as(batch)
        running.logical_and_((chosen != agent.stop_ids).all(-1).view_as(batch))

    def step(read):  # reads each row's token t < read and draws the next, all in place, so that it can be recorded
        mask.index_fill_(1, P + t, 1)
        position_ids = (mask.sum(1, keepdim=True) - 1).expand_as(batch).reshape(-1, 1)
        seen = mask[:, None, None, : P + read].log() if cache is None else mask[:, : P + read]  # log(): 0 or -inf
        hidden = trunk(model, tokens[batch, t].view(-1, 1), seen, position_ids, cache, attend(t))[:, 0]
        t.add_(1)
        choose(hidden)

    choose(hidden)
    at_once = 64 if agent.graph_stream else 1  # tokens between checks for stopped rows, which make the CPU wait
    read = 0  # tokens of each completion that the model has read
    while read < C - 1 and len(remaining := running.any(1).nonzero()[:, 0]):
        # drop prompts whose completions have all stopped, and columns that no prompt needs any more
        most = running.sum(1).max()
        if 8 * len(remaining) * most <= 7 * running.numel():  # only if an eighth goes: the rest is copied
            columns = running[remaining].int().argsort(1, descending=True)[:, :most]
            index, mask = (remaining[:, None] * batch.shape[1] + columns).flatten(), mask[remaining]
            batch, running = (x[remaining].gather(1, columns) for x in (batch, running))
            for module, (states, buffers) in held.items():
                held[module] = [x[:, remaining] for x in states], [x[:, index] for x in buffers]
            if cache is not None:
                cache.reorder_cache(index)
        before, read = read, min(read + at_once, C - 1)
        repeat(partial(step, read), read - before, agent.graph_stream)
    return tokens, logprobs


def sample(agent, prompts, num_generations, temperature, max_new_tokens, max_batch_tokens):
    """Draws completions from the model's full distribution at `temperature`; 0 is greedy.

    prompts: B lists of token ids. Returns B lists of G pairs (token ids, log-probabilities), up to and including the
    first stop token. S completions of a prompt (all G, if `max_batch_tokens` allows) decode as one row, for which
    attention reads the prompt's keys once; unless all attention is full, each completion is a row of its own.
    """
    G, C, drawn = num_generations, max_new_tokens, [[] for _ in prompts]
    most = (max_batch_tokens - max(map(len, prompts))) // C  # completions that fit beside a prompt
    pieces = math.ceil(G / max(1, most)) if grouped(agent.model) else G  # rows per prompt
    S = math.ceil(G / pieces)
    # longest first, so that neighbours need little padding
    waiting = sorted([*range(len(prompts))] * pieces, key=lambda b: (-len(prompts[b]), b))
    while waiting:
        R = max(1, max_batch_tokens // (len(prompts[waiting[0]]) + S * C))
        rows, waiting = waiting[:R], waiting[R:]
        # inference mode is faster, but under autocast it casts all weights again for every token
        with torch.no_grad() if torch.is_autocast_enabled(agent.model.device.type) else torch.inference_mode():
            tokens, logprobs = decode(agent, [prompts[b] for b in rows], S, temperature, C)
        stops = torch.isin(tokens, agent.stop_ids)
        lengths = torch.where(stops.any(1), stops.int().argmax(1) + 1, C)
        for k, (ids, logprob, length) in enumerate(zip(*(x.tolist() for x in (tokens, logprobs, lengths)))):
            drawn[rows[k // S]].append((ids[:length], logprob[:length]))
    return [group[:G] for group in drawn]


def completion_states(agent, rows):
    """Hidden states that predict the completions' tokens, concatenated over completions: (tokens, D).

    rows: (prompt, completion, ...), as token ids, sorted by completion length. As in `sample`, a prompt is computed
    once and its completions continue from its cache, here with gradients; if the agent cannot share a cache, the
    prompt is computed again for each completion.
    """
    prompts, completions, *_ = zip(*rows)
    for module in agent.model.modules():  # transformers recomputes only in training mode; all others do no dropout
        module.training = getattr(module, "gradient_checkpointing", False)
    if not agent.share:
        hidden, _, of_row = prefill(agent, [[*prompt, *ids] for prompt, ids in zip(prompts, completions)], None)
        return torch.cat([hidden[b, -len(ids) - 1 : -1] for b, ids in zip(of_row.tolist(), completions)])
    cache, states = DynamicCache(config=agent.model.config), []
    hidden, mask, of_row = prefill(agent, prompts, cache)
    last = hidden[:, -1:]  # (U, 1, D), predicts the first tokens
    # completions of similar length together, so that there is little padding
    for _, part in itertools.groupby(zip(completions, of_row), key=lambda row: int(math.log(len(row[0]), 1.5))):
        chunk, owner = zip(*part)
        owner, C = torch.stack(owner), max(map(len, chunk))
        # the last token is not fed in, unless it is the only one; causal attention never sees padding on the right
        input_ids = torch.tensor([[*ids, *[0] * C][: max(1, C - 1)] for ids in chunk], device=owner.device)
        branch = copy.copy(cache)
        branch.layers = [copy.copy(layer) for layer in cache.layers]
        for layer in branch.layers:
            # as reorder_cache(owner), but flat: gradients that are not contiguous take a CPU several times as long
            both = layer.keys, layer.values  # (U, K, P, E) -> (R, K, P, E)
            layer.keys, layer.values = (x.flatten(1).index_select(0, owner).unflatten(1, x.shape[1:]) for x in both)
        seen = torch.cat([mask[owner], torch.ones_like(input_ids)], dim=1)  # (R, P + C - 1)
        later = trunk(agent.model, input_ids, seen, (seen.cumsum(-1) - 1)[:, mask.shape[1] :], branch)
        predicting = torch.cat([last[owner], later], dim=1)  # (R, C, D)
        states += [row[: len(ids)] for ids, row in zip(chunk, predicting)]
    return torch.cat(states)


def token_logprobs(agent, rows, temperature):
    """Log-probabilities of the completions' tokens, concatenated over completions: (tokens,)."""
    logprob = lambda hidden, target: -cross_entropy(head(agent.model, hidden, temperature), target, reduction="none")
    with autocast(agent.model):  # one context for all passes, so that weights are cast once
        hidden = completion_states(agent, rows)
    target = torch.tensor([token for _, ids, *_ in rows for token in ids], device=hidden.device)
    # Many logits are computed in pieces, which the backward pass recomputes: they are never all in memory.
    size = max(1, 2**26 // agent.model.config.get_text_config().vocab_size)
    compute = logprob if len(target) <= size else partial(checkpoint, logprob, use_reentrant=False)
    return torch.cat([compute(h, y) for h, y in zip(hidden.split(size), target.split(size))])


def micro_batches(agent, rows, max_batch_tokens):
    """Halves rows (prompt, completion, ...) until no batch has more than max_batch_tokens.

    Texts count with their padding. Completions of a shared prompt count without theirs, which adds at most half, but
    each with an eighth of the prompt, for its copy of the keys and values (its activations take eight times that).
    """
    # the unit of computation: a prompt shared by its completions, or prompt + completion
    text = lambda row: tuple(row[0]) if agent.share else (*row[0], *row[1])
    texts = sorted(dict.fromkeys(map(text, rows)), key=len)
    of_completions = sum(len(prompt) / 8 + len(ids) for prompt, ids, *_ in rows) if agent.share else 0
    if len(rows) < 2 or len(texts) * len(texts[-1]) + of_completions <= max_batch_tokens:
        return [sorted(rows, key=lambda row: len(row[1]))] if rows else []
    if len(texts) > 1:  # texts of similar length stay together, and rows of one prompt
        short = set(texts[: len(texts) // 2])
        halves = [row for row in rows if text(row) in short], [row for row in rows if text(row) not in short]
    else:
        halves = rows[::2], rows[1::2]
    return [batch for half in halves for batch in micro_batches(agent, half, max_batch_tokens)]


@torch.no_grad()
def disagreement(args, agent, prompt_ids):
    """How far sampling's and training's log-probabilities are from the model's own, on a prompt and its second half.

    Finds models that scale logits, attend in another way or count left padding: they would be trained wrongly.
    """
    probe = SimpleNamespace(model=agent.model, stop_ids=torch.tensor([-1]), graph_stream=None)  # never stops
    prompts = [prompt_ids, prompt_ids[len(prompt_ids) // 2 :]]
    drawn = sample(probe, prompts, 2, 1.0, min(8, args.max_new_tokens), args.max_batch_tokens)
    rows = [(prompt, *pair) for prompt, pairs in zip(prompts, drawn) for pair in pairs]
    theirs = []
    for prompt, ids, _ in rows:
        logits = agent.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        theirs += logits.log_softmax(-1)[range(len(ids)), ids]
    trained, sampled = token_logprobs(agent, rows, 1.0), torch.tensor([x for *_, logprobs in rows for x in logprobs])
    return (torch.stack([trained, sampled]) - torch.stack(theirs)).abs().max().item()


def observe(args, env, task, history):
    """The agents' prompts, checked."""
    prompts = env.observe(task, history)
    text = lambda x: isinstance(x, str) and x and x == x.encode(errors="ignore").decode()  # no lone surrogates
    if not isinstance(prompts, (list, tuple)) or len(prompts) != args.num_agents or not all(map(text, prompts)):
        asked = f"{args.num_agents} prompts (str, not empty, UTF-8)"
        fail(f"--env {args.env}: observe() gave {prompts!a:.60}; let it return {asked}.")
    return prompts


def rollout(args, env, agents, tasks, generations, joint_mode, temperature):
    """Grows a tree of joint actions for each task, with G = generations[t] at turn t.

    Returns (turns, seconds): turns[t] lists the nodes of turn t. A node has task, history (the Steps before it),
    weight (the probability that a trajectory drawn from the tree reaches it), value (its mean return), joint (J tuples
    of completion indices, one per agent), steps and children (J each), ends (J: the last Step of the path that always
    takes the first child) and groups, per agent: prompt, prompt_ids, G completions (text), completion_ids, logprobs
    (as sampled), stopped (whether with a stop token) and returns (G,).
    """
    turns, seconds, N = [], Counter(), len(agents)
    nodes = [SimpleNamespace(task=task, history=[], weight=1 / len(tasks)) for task in tasks]
    for t, G in enumerate(generations):
        began = time.perf_counter()
        for node in nodes:
            node.groups = [SimpleNamespace(prompt=prompt) for prompt in observe(args, env, node.task, node.history)]
        for i, agent in enumerate(agents):
            groups, stops = [node.groups[i] for node in nodes], set(agent.stop_ids.tolist())
            prompt_ids = encode(agent, [group.prompt for group in groups], args.max_new_tokens)
            with autocast(agent.model):  # one context for all tokens, so that weights are cast once
                # 4 times the training batch: sampling keeps only keys and values, not all activations
                drawn = sample(agent, prompt_ids, G, temperature, args.max_new_tokens, 4 * args.max_batch_tokens)
            for group, ids, pairs in zip(groups, prompt_ids, drawn):
                group.prompt_ids, (group.completion_ids, group.logprobs) = ids, zip(*pairs)
                group.stopped = [ids[-1] in stops for ids in group.completion_ids]
                group.completions = agent.tokenizer.batch_decode(group.completion_ids, skip_special_tokens=True)
        sampled = time.perf_counter()
        joint = list(itertools.product(range(G), repeat=N)) if joint_mode == "cross" else [(g,) * N for g in range(G)]
        said = lambda node, choice: [group.completions[g] for group, g in zip(node.groups, choice)]
        branches = [(node.task, node.history, said(node, choice)) for node in nodes for choice in joint]
        steps = env.step(branches)
        try:
            bad = [x for step in steps for x in (step.reward, step.done, *step.parts.values()) if not math.isfinite(x)]
            if bad or len(steps) != len(branches):
                raise ValueError(f"{len(steps)} Steps for {len(branches)} branches, not finite: {bad[:1]}")
            floats = lambda parts: {name: float(value) for name, value in parts.items()}  # from tensors, Decimals ...
            steps = [step._replace(reward=float(step.reward), parts=floats(step.parts)) for step in steps]
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            fail(f"--env {args.env}: step() must return a list with a Step of finite numbers per branch ({error}).")
        for k, node in enumerate(nodes):
            node.joint, node.steps, node.children = joint, steps[k * len(joint) : (k + 1) * len(joint)], []
            for step in node.steps:
                child = SimpleNamespace(task=node.task, history=[*node.history, step], weight=node.weight / len(joint))
                node.children.append(None if step.done or t + 1 == len(generations) else child)
        turns.append(nodes)
        nodes = [child for node in nodes for child in node.children if child]
        seconds["sample"] += sampled - began
        seconds["reward"] += time.perf_counter() - sampled
        if not nodes:
            break

    for node in itertools.chain.from_iterable(reversed(turns)):  # children before parents
        # float64: equal returns then differ by less than a billionth, and such advantages are not trained on
        rewards = torch.tensor([step.reward for step in node.steps], dtype=torch.float64)  # (J,)
        future = torch.tensor([child.value if child else 0.0 for child in node.children], dtype=torch.float64)
        joint_returns = rewards + args.gamma * future
        node.value = joint_returns.mean().item()
        node.ends = [child.ends[0] if child else step for step, child in zip(node.steps, node.children)]
        for group, member in zip(node.groups, torch.tensor(node.joint).T):  # (J,): each one's completion index
            # the mean over the joint actions that contain a completion
            group.returns = member.bincount(joint_returns) / member.bincount()  # (G,)
    return turns, seconds


def summarize(split, turns, num_turns):
    """The logged metrics: means over nodes, completions and (weighted by probability) trajectories of all processes.

    pass@k is the unbiased estimate from n >= k trajectories of a task (Chen et al., 2021, arXiv 2107.03374).
    """
    sums, parts, of_turns, totals = (defaultdict(lambda: np.zeros(2)) for _ in range(4))  # name -> (sum, weight)
    for t, nodes in enumerate(turns, start=1):
        for node in nodes:
            for i, group in enumerate(node.groups):
                if len(group.returns) > 1:  # up to rounding, as in the update
                    equal = np.ptp(group.returns.numpy()) <= 1e-9 * max(1.0, abs(node.value))
                    sums["zero_variance_groups"] += (equal, 1)
                for ids, logprobs, stopped in zip(group.completion_ids, group.logprobs, group.stopped):
                    sums[f"agent_{i}/entropy"] += (-sum(logprobs), len(ids))  # an estimate, in nats per token
                    sums[f"agent_{i}/completion_length"] += (len(ids), 1)
                    sums[f"agent_{i}/stopped"] += (stopped, 1)
            # probability of a joint action given its task: every task counts the same, also across processes
            chance = node.weight * len(turns[0]) / len(node.steps)
            for step, child in zip(node.steps, node.children):
                sums[f"reward_turn{t}"] += (chance * step.reward, chance)
                if t > 1:
                    sums[f"gain_turn{t}"] += (chance * (step.reward - node.history[-1].reward), chance)
                for name, value in step.parts.items():
                    if child is None:  # the branch ends here
                        parts[name] += (chance * value, chance)
                    if num_turns > 1:
                        of_turns[f"{name}_turn{t}"] += (chance * value, chance)
    for root in turns[0]:
        sums["return"] += (root.value, 1)
        if split == "eval" and all("all_passed" in step.parts for step in root.ends):
            n, failed = len(root.ends), sum(step.parts["all_passed"] < 1 for step in root.ends)
            for k in (2**j for j in range(n.bit_length())):
                sums[f"pass@{k}"] += (1 - math.comb(failed, k) / math.comb(n, k), 1)
    names = Counter([*sums, *parts, *of_turns])
    if bad := [x for x, n in names.items() if not isinstance(x, str) or n > 1 or ("/" in x and x not in sums)]:
        fail(f"--env: step() has a part logged as {bad[0]!r}; rename it: no slash, and not a metric's name.")
    for process in gather({**sums, **parts, **of_turns}):
        for name, total in process.items():
            totals[name] += total
    prefix = lambda name: "" if split == "train" and "/" in name else f"{split}/"  # agent_0/ is one already
    return {prefix(name) + name: float(total / weight) for name, (total, weight) in totals.items()}


def records(iteration, split, turns, most=None):
    """Lines for rollouts.jsonl, one per node: what each agent read and wrote, and what it was worth."""
    plain = lambda x: x.tolist() if isinstance(x, (torch.Tensor, np.ndarray, np.generic)) else str(x)
    keys = ("prompt", "completions", "stopped", "returns", "advantages")
    for t, nodes in enumerate(turns, start=1):
        for node in nodes[:most]:
            line = {"iteration": iteration, "split": split, "turn": t, "task": node.task, "joint": node.joint}
            line |= {"rewards": [step.reward for step in node.steps], "parts": [step.parts for step in node.steps]}
            line["agents"] = [{key: vars(group)[key] for key in keys if key in vars(group)} for group in node.groups]
            yield json.dumps(line, default=plain, skipkeys=True) + "\n"


def evaluate(args, env, agents, tasks, iteration, seed, lines):
    """Metrics of independent trajectories, drawn with their own seed; adds their rollouts.jsonl lines to `lines`."""
    set_seed(seed)
    generations = [args.eval_generations] + [1] * (args.num_turns - 1)
    turns, _ = rollout(args, env, agents, tasks, generations, "align", args.eval_temperature)
    lines += itertools.chain.from_iterable(gather(list(records(iteration, "eval", turns))))
    return summarize("eval", turns, args.num_turns)


if __name__ == "__main__":
    # arguments
    here, script = os.path.split(os.path.abspath(__file__))
    signal.signal(signal.SIGINT, lambda *_: sys.exit("interrupted before the first iteration"))
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    args = tyro.cli(Args, description=__doc__)
    saved = 0  # the last checkpoint's iteration
    if args.resume is not None:
        try:
            path = os.path.join(args.resume, "checkpoint", "state.pt")
            if damaged := zipfile.ZipFile(path).testzip():
                raise ValueError(f"{damaged} has another checksum than when it was written")
            state = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
            before, given, saved = state["about"], state["given"], state["iteration"]
        except Exception as error:  # missing and damaged files raise many types; all are reported
            fail(f"--resume {args.resume}: no checkpoint, or a damaged one ({error!r:.200}); name a run that has one.")
        if (before["script"], before["args"].keys()) != (script, vars(args).keys()):
            fail(f"--resume {args.resume}: use {before['script']} (commit {before['commit']}), as before.")
        args = tyro.cli(Args, description=__doc__, default=Args(**given))  # new arguments win
        for name in ("env", "num_agents", "lora_rank"):  # the run's curves and weights depend on these
            if vars(args)[name] != before["args"][name]:
                fail(f"--{name.replace('_', '-')}: the run to --resume has {before['args'][name]}; begin a new one.")
    N, T, B, G = args.num_agents, args.num_turns, args.num_tasks, args.num_generations
    # made absolute: the run may be resumed, or its agents loaded, from another working directory
    args.model = [os.path.abspath(name) if name != "tiny" and os.path.isdir(name) else name for name in args.model]
    if os.path.isfile(args.dataset) and args.dataset not in ("sample", "hub"):
        args.dataset = os.path.abspath(args.dataset)
    given = asdict(args)  # a resume may change what the defaults below depend on
    tiny = set(args.model) == {"tiny"}
    if args.learning_rate is None:
        args.learning_rate = (4e-4 if tiny else 5e-6) * (10 if args.lora_rank else 1)
    if args.max_new_tokens is None:
        args.max_new_tokens = 96 if tiny and args.env != "arxiv" else 256
        if args.env == "arxiv" and args.num_agents == 1:
            args.max_new_tokens = 512  # for both texts
    if args.eval_temperature is None:
        args.eval_temperature = args.temperature
    may_be_zero = ("seed", "num_iterations", "log_groups", "eval_tasks", "eval_temperature", "gamma", "lora_rank")
    for name, value in vars(args).items():
        if type(value) in (int, float) and not (0 < value < 2**63 or (value == 0 and name in may_be_zero)):
            least = "0 or more" if name in may_be_zero else "above 0"
            fail(f"--{name.replace('_', '-')} {value}: must be a number {least}, and below 2^63.")
    if args.num_iterations < saved:
        again = f"--num-iterations 0 --model {os.path.join(args.resume, 'agent_0')} ..."
        fail(f"--num-iterations {args.num_iterations}: the run has made {saved}; give more, or evaluate with {again}.")
    if args.gamma > 1:
        fail(f"--gamma {args.gamma}: a discount is at most 1.")
    if G < 2:
        fail(f"--num-generations {G}: a group needs 2 completions; give 2 or more.")
    if args.joint_mode is None:  # cross scores G^N joint actions, and each may start a branch
        args.joint_mode = "cross" if T == 1 and G**N <= 100 else "align"
    J = G**N if args.joint_mode == "cross" else G
    if math.log10(B) + T * math.log10(J) > 6:
        too_many = f"--joint-mode {args.joint_mode}: more than a million joint actions an iteration"
        fail(f"{too_many}; lower --num-tasks, --num-generations or --num-turns.")
    for flag, names in (("--model", args.model), ("--devices", args.devices or [None])):
        if len(names) not in (1, N):
            fail(f"{flag} names {len(names)} for {N} agents: give one for all, or one each.")
    if args.eval_temperature == 0 and args.eval_generations > 1:
        fail("--eval-temperature 0 draws the same each time; leave --eval-generations at 1.")
    if args.devices and world_size > 1:
        fail("--devices is for one process: under torchrun each takes a GPU of its own; leave one of the two out.")
    gpus = [f"cuda:{k}" for k in range(torch.cuda.device_count())]
    if unknown := set(args.devices or ()) - {"cpu", *gpus}:
        fail(f"--devices {min(unknown)}: this machine has {', '.join(['cpu', *gpus])}; name one of these.")
    if B % world_size:
        fail(f"--num-tasks {B}: {world_size} processes cannot share them equally; use a multiple of {world_size}.")
    try:
        if args.track != "none":
            tracker = importlib.import_module("torch.utils.tensorboard" if args.track == "tensorboard" else args.track)
        if args.lora_rank:
            peft = importlib.import_module("peft")
    except ImportError as error:
        fail(f"--track {args.track}, --lora-rank {args.lora_rank}: {error}; pip install {error.name}.")

    # environment
    setup = {"num_agents": N, "num_turns": T, "dataset": args.dataset, "seed": args.seed}
    optional = {"reward": args.reward, "feedback": args.feedback, "allow_unsafe_code": args.allow_unsafe_code}
    setup |= {name: value for name, value in optional.items() if value not in (None, False)}
    try:
        if os.path.exists(os.path.join(here, "envs", "writing.py")):
            env = importlib.import_module("envs").make(args.env, **setup)
        else:  # a copied script may have no envs/ beside it, and its environment be in the working directory
            sys.path.append(os.getcwd())
            module, colon, name = args.env.partition(":")
            found = vars(importlib.import_module(module)) if colon and module[:1] not in ("", ".") else {}
            if name not in found:
                fail(f"--env {args.env}: no such class, and no envs/ beside this file; use module:Class of your own.")
            env = found[name](**setup)
        given_tasks = (env.tasks(split) for split in ("train", "test"))
        train_tasks, test_tasks = (list(() if tasks is None else tasks) for tasks in given_tasks)
    except ModuleNotFoundError as error:
        fail(f"--env {args.env}: {error}; correct it, or name another.")
    except ValueError as error:
        if not str(error).startswith("--"):
            raise  # from the user's own class: show the traceback
        fail(error)
    order = np.random.default_rng(0).permutation(len(test_tasks))
    held_out = [test_tasks[k] for k in order[: args.eval_tasks or None]]
    eval_tasks = held_out[rank::world_size]
    first_prompts = [observe(args, env, task, []) for task in [*train_tasks, *held_out]]
    if not train_tasks or len(held_out) < world_size:
        counts = f"{len(train_tasks)} tasks to train on, {len(held_out)} of {len(test_tasks)} to evaluate"
        fail(f"--env {args.env}, --eval-tasks {args.eval_tasks}: {counts}; each process needs one.")

    # folders and processes
    paths = [os.path.join(here, "models", "tiny") if name == "tiny" else name for name in args.model]
    for path in paths:
        there = any(os.path.isfile(os.path.join(path, f"{kind}config.json")) for kind in ("", "adapter_"))
        if (os.path.isabs(path) or path.startswith(".") or path.count("/") > 1) and not there:
            fail(f"--model: there is no model in {path}; give a folder that has one, such as agent_0, or a hub id.")
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32, for the head
        torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN plans anew for each length, so at every token
    elif tiny and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # so small a model gains little from more threads, and loses much if a core is busy
    if world_size > 1:
        # nccl's default of ten minutes is too short: processes wait while one writes a checkpoint or runs tests
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(days=1))
    say = tqdm.write if rank == 0 else lambda _: None  # print would garble the bar
    name = f"{args.env.replace(':', '.')}__{script[:-3]}__{args.seed}__{datetime.now():%Y%m%d-%H%M%S.%f}"
    run_dir = gather(args.resume or os.path.join(args.output_dir, name))[0]
    state_file = os.path.join(run_dir, "checkpoint", "state.pt")
    git = subprocess.run("git rev-parse HEAD", shell=True, cwd=here, capture_output=True, text=True)
    about = {"script": script, "processes": world_size, "args": asdict(args), "commit": git.stdout.strip()}
    about["earlier"] = [*before["earlier"], {"until": saved, "args": before["args"]}] if args.resume else []
    about["versions"] = {name: sys.modules[name].__version__ for name in ("torch", "transformers", "numpy")}
    folder = args.resume or args.output_dir  # a new run's own is made once its agents have loaded
    try:
        os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("it is read-only")
    except OSError as error:
        fail(f"--{'resume' if args.resume else 'output-dir'}: cannot write to {folder} ({error}); name another.")

    # agents
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(args.seed)  # new adapters are the same in all processes
    say(f"loading {', '.join(dict.fromkeys(args.model))}")  # a large model's checks take a minute or more on the CPU
    agents, shared = [], {}  # shared: (name, device) -> the model whose frozen weights the adapters share
    for i, name, path, place in zip(range(N), args.model * N, paths * N, (args.devices or [device]) * N):
        try:
            if not (model := shared.get((name, place))):
                model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
                fixed = vars(model.config).get("quantization_config") or vars(model).get("peft_config")
                if fixed and (args.num_iterations or args.lora_rank):
                    fail(f"--model {name}: quantized or an adapter, which is not trained further; merge it first.")
            if args.lora_rank:
                shared[name, place] = model
                model = copy.deepcopy(model, {id(p): p for p in model.parameters()})  # new modules, the same weights
                form = {"lora_alpha": 2 * args.lora_rank, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
                model.add_adapter(peft.LoraConfig(r=args.lora_rank, **form))
            tokenizer = AutoTokenizer.from_pretrained(path)
            stops = [tokenizer.eos_token_id, *np.ravel(model.generation_config.eos_token_id)]
            if tokenizer.chat_template:  # its end-of-turn token also stops: base models do not list it
                turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ANSWER"}]
                _, found, behind = tokenizer.apply_chat_template(turn, tokenize=False).rpartition("ANSWER")
                ids = tokenizer(behind if found else "", add_special_tokens=False).input_ids
                special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
                stops += [id for id in ids if id in special - {tokenizer.unk_token_id}][:1]
            agent = SimpleNamespace(model=model, tokenizer=tokenizer)
            agent.stop_ids = torch.tensor([int(stop) for stop in stops if stop is not None], device=place)
            # Recurrent layers' caches cannot be shared, and gradient checkpointing works only without a cache.
            layers = {type(layer) for layer in DynamicCache(config=model.config).layers}
            agent.share = layers <= {DynamicLayer, DynamicSlidingWindowLayer} and not args.gradient_checkpointing
            if args.cuda_graphs and not (agent.stop_ids.device.type == "cuda" and grouped(model)):
                fail(f"--cuda-graphs needs a GPU, and layers that see all earlier tokens: not for {name} on {place}.")
            # one stream for all of an agent's graphs: torch may keep a workspace per stream
            agent.graph_stream = torch.cuda.Stream(place) if args.cuda_graphs else None
            if args.gradient_checkpointing:
                model.gradient_checkpointing_enable()
            # the longest in characters; one with more tokens, or of a later turn, is checked when it is sampled
            longest = max((prompts[i] for prompts in first_prompts), key=len)
            prompt_ids = encode(agent, [longest], args.max_new_tokens)[0][-64:]
            # models load on the CPU, in float32; one already on a GPU is shared, and was checked before
            if model.device.type == "cpu" and not (off := disagreement(args, agent, prompt_ids)) <= 1e-3:
                why = "scaled or capped? another attention? dropout with --gradient-checkpointing?"
                fail(f"--model {name}: log-probabilities would be off by {off:.2g} ({why}); use another.")
        except Exception as error:  # transformers, backends, the hub and templates raise many types; all are reported
            reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            fail(f"--model {name}: agent {i} cannot use it on {place} ({reason}); name one that works.")
        agent.trained = {key: p for key, p in model.to(place).named_parameters() if p.requires_grad}
        param_group = {"params": agent.trained.values()}  # may be empty: an adapter that is only evaluated
        agent.optimizer = torch.optim.AdamW([param_group], args.learning_rate, weight_decay=0.0, fused=True)
        agents.append(agent)
        size = f"{sum(p.numel() for p in agent.trained.values()) / 1e6:.2f}M parameters to train on {place}"
        slow = "" if grouped(agent.model) else ", completions decode as rows of their own"
        slow += "" if agent.share else ", a prompt is computed again for each completion"
        say(f"agent {i}: {name}, {size}{slow}")
        if not len(agent.stop_ids):
            say(f"agent {i}: neither {name} nor its tokenizer has an end-of-sequence token: no answer ends by itself")
    for agent in (agent for agent in agents if args.lora_rank and agent.model.device.type == "cuda"):
        for module in agent.model.modules():
            if isinstance(module, peft.tuners.lora.LoraLayer):
                module.get_base_layer().to(torch.bfloat16)  # frozen: no float32 copy is needed, and no cast per token
    say(f"{len(train_tasks)} tasks to train on, {len(held_out)} to evaluate, {torch.get_num_threads()} thread(s)")
    say(f"joint mode {args.joint_mode}: {J} joint actions a group")
    say(f"learning rate {args.learning_rate}, {args.max_new_tokens} new tokens, {args.max_batch_tokens} per batch")

    # state of the run
    if args.resume:
        shapes = lambda models: [{key: p.shape for key, p in trained.items()} for trained in models]
        if shapes(state["models"]) != shapes(agent.trained for agent in agents):
            fail(f"--resume {args.resume}: its weights do not fit; use its arguments and package versions.")
        for agent, weights, moments in zip(agents, state["models"], state["optimizers"]):
            agent.model.load_state_dict(weights, strict=False)
            agent.optimizer.load_state_dict(copy.deepcopy(moments))  # not views of the file, which will be replaced
        del weights, moments
        if (before["processes"], before["args"]["model"]) != (world_size, args.model):
            said = "another number of processes or --model (trained weights come from the checkpoint) than before"
            say(f"--resume {args.resume}: {said}, so results can differ from an uninterrupted run")
    if rank == 0:
        os.makedirs(os.path.dirname(state_file), exist_ok=True)
        with open(os.path.join(run_dir, "args.json"), "w") as file:
            json.dump(about, file, indent=2)
        for name, size in (state["sizes"] if args.resume else {}).items():
            with open(os.path.join(run_dir, name), "a") as file:  # lines after the checkpoint come again
                file.truncate(min(size, file.tell()))  # fewer, if the log was edited or deleted since
    # Each iteration and process reseeds its generators, and evaluation always uses iteration 0's seed: there is no
    # state to save, and training does not depend on how often evaluation runs.
    seed_of = lambda iteration: int(np.random.SeedSequence([args.seed, rank, iteration]).generate_state(1)[0])
    order_of = lambda epoch: np.random.default_rng([args.seed, epoch]).permutation(len(train_tasks))
    track = lambda metrics, step: None
    if args.track == "tensorboard" and rank == 0:
        writer = tracker.SummaryWriter(run_dir, purge_step=saved + 1)  # a crash may have left later steps
        track = lambda metrics, step: [writer.add_scalar(name, value, step) for name, value in metrics.items()]
    elif args.track != "none" and rank == 0:
        tracker.init(project="tutti", name=os.path.basename(os.path.normpath(run_dir)), config=asdict(args))
        track = tracker.log

    kept = lambda: f"The last checkpoint: {f'iteration {saved} in {run_dir}' if saved else 'none yet'}."

    def log(iteration, metrics, lines):
        if bad := [name for name, value in metrics.items() if not math.isfinite(value)]:
            remedy = "Begin anew or --resume a checkpoint with a lower --learning-rate, other temperatures or rewards."
            fail(f"at iteration {iteration} {bad[0]} is {metrics[bad[0]]}. {remedy} {kept()}")
        if rank == 0:
            with open(os.path.join(run_dir, "metrics.jsonl"), "a") as file:
                file.write(json.dumps({"iteration": iteration} | metrics) + "\n")
            with open(os.path.join(run_dir, "rollouts.jsonl"), "a") as file:
                file.writelines(lines)
            track(metrics, step=iteration)
        if "eval/return" in metrics:
            say(f"iteration {iteration}: evaluation return {metrics['eval/return']:.3f}")

    lines = []  # for rollouts.jsonl
    if not args.resume:
        metrics = evaluate(args, env, agents, eval_tasks, 0, seed_of(0), lines)
        log(0, metrics, lines)
    signals = []

    def on_signal(number, _):
        signals.append(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C then ends all at once; torchrun may send SIGTERM twice
        with suppress(OSError):  # Ctrl-C also ends the reader of `| tee log`, or of `2>&1 | tee log`
            if stat.S_ISFIFO(os.fstat(1).st_mode):
                os.dup2(2, 1)  # stdout becomes stderr
            say("finishing the iteration, then saving; another Ctrl-C ends at once, without saving")

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    total = args.num_iterations
    bar = tqdm(range(saved + 1, total + 1), initial=saved, total=total, disable=rank > 0 or not total)
    for iteration in bar:
        # 1 ROLLOUT: a tree for each of this process's tasks
        began = time.perf_counter()
        set_seed(seed_of(iteration))
        drawn = range((iteration - 1) * B + rank, iteration * B, world_size)  # counted across epochs
        tasks = [train_tasks[order_of(k // len(train_tasks))[k % len(train_tasks)]] for k in drawn]
        turns, seconds = rollout(args, env, agents, tasks, [G] * T, args.joint_mode, args.temperature)

        # 2 ADVANTAGES: of each agent's completions at each node
        nodes = [node for turn in turns for node in turn]
        for node in nodes:
            for group in node.groups:
                returns = group.returns  # (G,)
                # >>> ALGORITHM
                advantages = returns - (returns.sum() - returns) / (len(returns) - 1)
                # <<< ALGORITHM
                group.advantages = advantages

        # 3 UPDATE: one optimizer step for each agent
        metrics = summarize("train", turns, T)
        updating = time.perf_counter()
        for i, agent in enumerate(agents):
            weights = Counter()  # by prompt and completion: equal ones are computed only once
            for node in nodes:
                # normalised here, so that the gradient does not depend on the split into batches
                weight = node.weight / G * args.gamma ** len(node.history) / args.max_new_tokens
                group = node.groups[i]
                for ids, advantage in zip(group.completion_ids, group.advantages.tolist()):
                    # equal returns leave only rounding errors, which Adam would blow up; NaN passes and stops the run
                    if not abs(advantage) <= 1e-9 * max(1.0, abs(node.value)):
                        weights[tuple(group.prompt_ids), tuple(ids)] += weight * advantage
            rows = [(*texts, weight) for texts, weight in weights.items()]
            loss = torch.zeros((), device=agent.model.device)
            for batch in micro_batches(agent, rows, args.max_batch_tokens):
                of_token = torch.tensor([weight for _, ids, weight in batch for _ in ids], device=loss.device)
                batch_loss = -(of_token * token_logprobs(agent, batch, args.temperature)).sum()
                batch_loss.backward()
                loss += batch_loss.detach()
            for p in agent.trained.values():
                if p.grad is None:  # an expert without tokens, or no advantage in any row: AdamW still steps
                    p.grad = torch.zeros_like(p)
            if world_size > 1:  # each process has the mean over its own tasks
                average([*(p.grad for p in agent.trained.values()), loss])
            grad_norm = torch.nn.utils.clip_grad_norm_(agent.trained.values(), args.max_grad_norm)
            decay = 1 - (iteration - 1) / args.num_iterations if args.anneal_lr else 1.0
            agent.optimizer.param_groups[0]["lr"] = decay * args.learning_rate
            agent.optimizer.step()
            agent.optimizer.zero_grad()
            metrics |= {f"agent_{i}/loss": loss.item(), f"agent_{i}/grad_norm": grad_norm.item()}
        seconds["update"] = time.perf_counter() - updating

        # 4 LOG
        tokens = sum(len(ids) for node in nodes for group in node.groups for ids in group.completion_ids)
        metrics["tokens"] = sum(gather(tokens))
        metrics["tokens_per_second"] = metrics["tokens"] / (time.perf_counter() - began)
        metrics |= {f"time/{part}": spent for part, spent in seconds.items()}
        shown = f"return {metrics['train/return']:.2f}, {metrics['tokens_per_second']:.0f} tokens/s"
        bar.set_postfix_str(shown, refresh=False)  # it appears after the checkpoint

        # 5 EVALUATE
        lines = list(records(iteration, "train", turns, args.log_groups))
        last = iteration == args.num_iterations
        if last or iteration % args.eval_every == 0:
            metrics |= evaluate(args, env, agents, eval_tasks, iteration, seed_of(0), lines)
        log(iteration, metrics, lines)

        # 6 CHECKPOINT
        stopping = any(gather(len(signals)))
        if last or stopping or iteration % args.save_every == 0:
            if rank == 0:
                state = {"about": about, "given": given, "iteration": iteration}
                state["models"] = [agent.trained for agent in agents]
                state["optimizers"] = [agent.optimizer.state_dict() for agent in agents]
                logs = {name: os.path.join(run_dir, name) for name in ("metrics.jsonl", "rollouts.jsonl")}
                state["sizes"] = {name: os.path.getsize(path) for name, path in logs.items()}
                try:
                    torch.save(state, state_file + ".tmp")
                    for path in (*logs.values(), state_file + ".tmp"):
                        with open(path) as file:
                            os.fsync(file)  # a power failure would keep the new name, and lose what is not on the disk
                except (OSError, RuntimeError) as error:  # the latter is torch's, and names no reason
                    fail(f"cannot write {state_file}.tmp: is the disk full? ({error!s:.80}) {kept()}")
                os.replace(state_file + ".tmp", state_file)  # a crash leaves the old one intact
            saved = iteration
        if stopping:
            break
    bar.close()

    # final output
    if rank == 0:
        for i, agent in enumerate(agents if saved else ()):
            # the full trained policy: a base model's own generation_config may cut it to top-k or top-p
            policy = {"do_sample": True, "temperature": args.temperature, "top_k": 0, "top_p": 1.0}
            policy["eos_token_id"] = sorted({*agent.stop_ids.tolist()}) or None
            policy["pad_token_id"] = agent.tokenizer.pad_token_id
            agent.model.generation_config = transformers.GenerationConfig(**policy)
            agent.model.save_pretrained(os.path.join(run_dir, f"agent_{i}"))
            agent.tokenizer.save_pretrained(os.path.join(run_dir, f"agent_{i}"))
        for i, example in enumerate(json.loads(lines[-1])["agents"] if lines else ()):
            print(f"\nagent {i} wrote: {example['completions'][0]}")
        more = f" --num-iterations {2 * saved}" if saved == args.num_iterations else ""  # the run is complete
        how = "python" if world_size == 1 else f"torchrun --nproc-per-node {world_size}"
        how += f" {shlex.quote(os.path.relpath(__file__))} --resume {shlex.quote(run_dir)}{more}"
        print(f"\nsee {run_dir}; to go on: {how}" if saved else f"\nsee {run_dir}")
    if world_size > 1:
        dist.barrier()  # no process leaves while another still writes
        # gloo's threads sometimes abort a normal exit (pytorch/pytorch#179291): torchrun then reports a failed run
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(0)
