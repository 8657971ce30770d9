"""MAGRPO: each agent follows the group-relative advantage of the return that all agents share.

    python magrpo_cuda.py --env tldr --num-agents 2 --model Qwen/Qwen3-1.7B --dataset hub

For large models on a GPU (docs/performance.md has times). A decoding step changes tensors in place, so that a CUDA
graph repeats it. Keys and values have their final size and dtype: no copies, no casts. The GPU is asked only every 16
tokens who has stopped: else it never waits for Python. A batch may hold several prompts: fewer launches. To save
memory, logits (in pieces) and MLPs are computed twice.

    A_g = R_g - mean(R_1 .. R_G)
    L_i = - sum over nodes and g of  w * gamma^turn * A_g * sum_t log pi_i(y_g,t | x, y_g,<t) / max_new_tokens

At a node of the rollout tree agent i draws G completions y_1 .. y_G of its own prompt x. The return of a joint action
is its reward plus gamma times the mean return of the node that it leads to, and R_g is the mean over those that
contain y_g. w is the probability that a trajectory drawn from the tree passes through y_g. Turns count from 0.

E[-grad L_i] = (G-1)/G * grad E[return] / max_new_tokens, with (G-1)/G because the mean includes R_g. Source: MAGRPO,
arXiv 2508.04652. With one agent this is GRPO, arXiv 2402.03300, in the form of Dr. GRPO, arXiv 2503.20783.

Left out on purpose: the division by the group's standard deviation and by the completion's length (they bias the
gradient), the clipped ratio (there is one optimizer step per rollout, so it is always 1), a KL penalty.
"""

import copy
import json
import math
import os
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from functools import partial
from importlib import import_module
from itertools import chain, product
from signal import SIG_DFL, SIGINT, SIGTERM, signal
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import transformers
import tyro
from huggingface_hub import model_info, try_to_load_from_cache
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

# N agents, B tasks, G generations, J joint actions, T turns, P prompt tokens, C completion tokens, V vocabulary,
# R rows of a batch, S completions in a row, L cached tokens. An agent is a seat; the policy is who plays it.

RANK = int(os.environ.get("RANK", 0))  # of this process among those of torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


@dataclass
class Args:
    # experiment
    seed: int = 1  # seeds sampling, the order of the tasks and the environment
    num_iterations: int = 120  # rollouts, each followed by an update of every agent; 0: only evaluate
    config: str | None = None  # args.json of a run, or a JSON file like it, whose values replace the defaults
    output_dir: str = "runs"  # where the run folder is made
    resume: str | None = None  # run folder to continue; with unchanged arguments, as if it had never stopped
    save_every: int = 20  # iterations between checkpoints
    track: Literal["none", "wandb", "trackio"] = "none"  # where metrics go in addition to metrics.jsonl
    # environment and agents
    env: str = "tldr"  # a name that envs/ knows, several joined by +, or module:Class of your own
    env_kwargs: dict[str, str] | None = None  # its own options, such as: reward grounded
    num_agents: int = 2  # N, each with its own prompt and its own policy
    num_turns: int = 1  # T, joint actions in a trajectory; environments that need more take more
    dataset: str = "sample"  # sample (offline), hub, a hub id, or a .jsonl, .json, .csv or .parquet file
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
    max_grad_norm: float = 1.0  # each agent's gradient is clipped to this norm
    # evaluation
    eval_every: int = 20  # iterations between evaluations; there is always one before and one after training
    eval_tasks: int = 64  # held-out tasks, always the same ones; 0: all
    eval_split: Literal["test", "train"] = "test"  # train, with --num-iterations 0: collect answers for sft.py
    eval_generations: int = 1  # trajectories per held-out task; pass@k is estimated for k = 1, 2, 4 ... up to this
    eval_temperature: float | None = None  # by default that of training; 0: greedy


def fail(sentence):
    """Exits with status 2 and one sentence that names the argument and the remedy."""
    tqdm.write(f"error: {sentence}", file=sys.stderr)  # print would garble the progress bar
    sys.exit(2)


# ---- set-up: arguments, processes, environment, policies (a reader of the algorithm goes on at its heading below)


def read_args():
    """Reads the command line, and the file that it names; fills in and checks what depends on several arguments."""
    args = tyro.cli(Args, description=__doc__)
    if args.resume:
        args.config = f"{args.resume}/args.json"
        if not os.path.isfile(f"{args.resume}/state.pt"):
            fail("--resume: give the run folder itself, which has a state.pt after its first checkpoint.")
    if args.config:  # read the command line again, with the file's values as defaults
        if not os.path.isfile(args.config):
            fail(f"--config: there is no {args.config}; give the args.json of a run.")
        with open(args.config) as file:
            config = json.load(file)
        args = tyro.cli(Args, description=__doc__, default=Args(**config.get("args", config)))
    if args.max_new_tokens is None:
        args.max_new_tokens = 96 if set(args.model) == {"tiny"} and args.env != "arxiv" else 256
    if args.num_tasks % WORLD_SIZE:
        fail("--num-tasks: give a multiple of the number of processes, which share them equally.")
    num_policies = 1 if args.share_policy else args.num_agents
    if not {len(args.model), len(args.devices or [0])} <= {1, num_policies}:
        fail("--model, --devices: give one for all agents, or (without --share-policy) one each.")
    return args


def start_processes(args):
    """Joins the processes that torchrun started, and returns the devices: one for all policies, or one each."""
    transformers.utils.logging.disable_progress_bar()
    own_device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    devices = [torch.device(name) for name in args.devices or [own_device]]
    if devices[0].type == "cuda":
        if not torch.cuda.is_available():
            fail("--devices: torch sees no GPU here; leave it out.")
        torch.cuda.set_device(devices[0])
        torch.set_float32_matmul_precision("high")  # TF32, for the output head
    elif set(args.model) == {"tiny"}:
        torch.set_num_threads(1)  # so small a model gains little from more threads
    if WORLD_SIZE > 1:
        dist.init_process_group(timeout=timedelta(days=1))  # others wait while one runs tests
    return devices


def gather(value):
    """The values of all processes, in the order of their ranks."""
    values = [value] * WORLD_SIZE
    if WORLD_SIZE > 1:
        dist.all_gather_object(values, value)
    return values


def load_environment(args):
    """The environment, its training tasks and the held-out ones, as pairs (number, task)."""
    options = {"num_agents": args.num_agents, "num_turns": args.num_turns, "dataset": args.dataset, "seed": args.seed}
    options |= args.env_kwargs or {}
    module, _, class_name = args.env.partition(":")
    sys.path.append("")  # where a class of your own may be
    try:
        if class_name and "+" not in args.env:  # a class of your own needs no envs/
            own_class = vars(import_module(module)).get(class_name)
            if own_class is None:
                fail(f"--env: {module} has no {class_name}.")
            env = own_class(**options)
        else:
            env = import_module("envs").make(args.env, **options)
        train_tasks = list(enumerate(env.tasks("train")))
        eval_tasks = list(enumerate(env.tasks(args.eval_split)))
    except (ModuleNotFoundError, ValueError) as error:  # envs raises the last with one sentence
        fail(f"--env {args.env}: {error}")
    return env, train_tasks, eval_tasks


@dataclass(eq=False)
class Policy:
    """A model with its tokenizer and its optimizer, which plays one agent or, shared, all of them."""

    model: Any
    tokenizer: Any
    stop_ids: list[int]  # tokens that end a completion
    full_attention: bool  # whether a mask of ours decides what each layer sees
    capturable: bool  # whether a CUDA graph can repeat a decoding step: not if Python looks at lengths in it
    stream: Any  # where graphs are captured; None on a CPU
    autocast: Any  # bfloat16 on a GPU
    trained: dict  # name -> parameter
    owner: dict  # name -> rank of the process that keeps the parameter's moments and updates it
    optimizer: Any  # of this process's share


def load_policy(args, name, device, base_models):
    """Loads a model; LoRA policies with the same model share its frozen weights, kept in base_models."""
    path = f"{os.path.dirname(__file__)}/models/tiny" if name == "tiny" else name
    if os.path.isfile(f"{path}/adapter_config.json"):
        fail(f"--model: {name} is an adapter; merge it (docs/running.md).")
    model = base_models.get((name, device))
    try:
        if not os.path.isdir(path) and not try_to_load_from_cache(path, "config.json"):
            model_info(path)  # asks the hub once, where from_pretrained would try for half a minute
        tokenizer = AutoTokenizer.from_pretrained(path)
        if model is None:
            dtype = torch.bfloat16 if args.lora_rank and device.type == "cuda" else torch.float32
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)
    except Exception as error:  # of many kinds
        reason = str(error).partition("\n")[0]
        fail(f"--model: {name} cannot be loaded ({reason}); give tiny, a folder of save_pretrained or a hub id.")
    head = model.get_output_embeddings().float()

    def float32_head(hidden):  # in bfloat16, log-probabilities would be off by hundredths of a nat
        with torch.autocast(device.type, enabled=False):
            return torch.nn.Linear.forward(head, hidden.float())

    head.forward = float32_head  # of a LoRA's copy of the model, too: the head has no adapter
    if args.lora_rank:
        base_models[name, device] = model
        model = add_lora(model, args.lora_rank)
    model.eval()  # no dropout, in training either
    layers = {type(layer) for layer in DynamicCache(config=model.config).layers}
    if model._is_stateful or layers - {DynamicLayer, DynamicSlidingWindowLayer}:
        fail("--model: it has layers of neither full nor sliding attention; use one without them.")
    for key, module in model.named_modules():
        if key.endswith(".mlp"):  # half of what layers keep for the backward pass
            module.forward = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)
    full_attention = layers == {DynamicLayer} and model.is_backend_compatible()
    rope = str(getattr(model.config.get_text_config(), "rope_parameters", None))
    capturable = full_attention and model._can_compile_fullgraph and not ("dynamic" in rope or "longrope" in rope)
    if not capturable:
        tqdm.write(f"--model: {name} decodes without CUDA graphs: its attention or its rotations look at lengths")

    trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
    for p in trained.values():
        p.data = p.data.float()  # an adapter has its base's dtype
    owner = divide(trained)
    own_share = [p for key, p in trained.items() if owner[key] == RANK]
    return Policy(
        model=model,
        tokenizer=tokenizer,
        stop_ids=stop_ids_of(tokenizer, model),
        full_attention=full_attention,
        capturable=capturable,
        stream=torch.cuda.Stream(device) if device.type == "cuda" else None,
        autocast=torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"),
        trained=trained,
        owner=owner,
        optimizer=torch.optim.AdamW(own_share, lr=args.learning_rate, weight_decay=0.0, fused=True),
    )


def add_lora(model, rank):
    """A copy of the model with an adapter of its own: new modules, but the same frozen weights."""
    weights = {id(p): p for p in model.parameters()}
    model = copy.deepcopy(model, memo=weights)  # what is in memo counts as copied
    peft = import_module("peft")
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model.add_adapter(config)
    return model


def divide(parameters):
    """Divides parameters (name -> tensor) equally among the processes: name -> rank of its owner."""
    owner = {}
    sizes = [0] * WORLD_SIZE
    for name in sorted(parameters, key=lambda name: parameters[name].numel(), reverse=True):
        owner[name] = sizes.index(min(sizes))
        sizes[owner[name]] += parameters[name].numel()
    return owner


def turn_end_of(tokenizer):
    """The token that ends an answer: what follows it in the chat template, if that is a special token, else eos."""
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ANSWER"}]
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        ending = text.partition("ANSWER")[2].lstrip()
        for token_id, token in tokenizer.added_tokens_decoder.items():
            if token.special and ending.startswith(token.content):
                return token_id
    return tokenizer.eos_token_id


def stop_ids_of(tokenizer, model):
    """All tokens that end a completion; base models do not list what ends a turn of the chat."""
    ends = np.ravel(model.generation_config.eos_token_id).tolist()
    return sorted({turn_end_of(tokenizer), tokenizer.eos_token_id, *ends} - {None})


def reseed(seed, iteration):
    """Each iteration and process has a seed of its own, so that a resumed run needs no generator's state."""
    seed = int(np.random.SeedSequence([seed, RANK, iteration]).generate_state(1)[0])
    transformers.set_seed(seed)
    for k, generator in enumerate(torch.cuda.default_generators):  # or policies on two GPUs would draw the same
        generator.manual_seed(seed + k)


# ---- engine: prompts, sampling, log-probabilities


def encode(policy, prompt, max_new_tokens, remedy="--max-new-tokens: lower it, or shorten prompts"):
    """Token ids of a prompt: as a user message, or as bare text if the tokenizer has no chat template."""
    tokenizer = policy.tokenizer
    text = prompt
    for token in tokenizer.added_tokens_decoder.values():
        if token.special:  # a prompt may quote an agent: a space makes its special tokens plain text
            text = text.replace(token.content, f"{token.content[0]} {token.content[1:]}")
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    prompt_ids = tokenizer(text, add_special_tokens=not tokenizer.chat_template).input_ids
    length = len(prompt_ids)
    context = getattr(policy.model.config.get_text_config(), "max_position_embeddings", math.inf)
    if length + max_new_tokens > context:
        fail(f"{remedy}: {length} tokens and a completion of {max_new_tokens} are more than the model's {context}.")
    return prompt_ids


def draw(logits, temperature):
    """A token for each row of logits (..., V), and its log-probability; temperature 0: the likeliest one."""
    probs = (logits.float() / max(temperature, 1e-6)).softmax(-1)
    # inverse CDF in float64: the first token whose cumulative probability exceeds a uniform random number
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    threshold = cumulative[..., -1:] * torch.rand_like(cumulative[..., :1])
    tokens = torch.searchsorted(cumulative, threshold, right=True)
    tokens = tokens.clamp(max=probs.shape[-1] - 1)  # (..., 1)
    logprobs = probs.gather(-1, tokens).log()
    return tokens[..., 0], logprobs[..., 0]


PROMPT, PADDING = -1, -2  # the source of a cached token that belongs to no completion


def read_prompts(model, prompts, copies):
    """Computes each of the prompts (token ids) once, and makes R rows of it, `copies` for each.

    Returns the cache, the last logits (R, 1, V), the last positions (R, 1) and the source of each cached token (R, L).
    """
    prompt_rows = [torch.tensor(ids, device=model.device) for ids in prompts]
    padded = pad_sequence(prompt_rows, batch_first=True, padding_value=-1, padding_side="left")  # (B, P)
    real = (padded >= 0).long()
    position_ids = (real.cumsum(1) - 1).clamp(min=0)
    inputs = {"attention_mask": real, "position_ids": position_ids}
    cache = DynamicCache(config=model.config)
    logits = model(padded.clamp(min=0), past_key_values=cache, logits_to_keep=1, **inputs).logits  # (B, 1, V)
    prompt_of_row = torch.arange(len(prompts), device=model.device).repeat_interleave(copies)  # (R,)
    cache.reorder_cache(prompt_of_row)
    source = torch.where(real > 0, PROMPT, PADDING)
    return cache, logits[prompt_of_row], position_ids[prompt_of_row, -1:], source[prompt_of_row]


class FixedCache(DynamicCache):
    """A cache with room for C more tokens a row, and all else that a decoding step reads and changes in place."""

    def __init__(self, cache, logits, position_ids, source, C):
        super().__init__()
        self.layers = cache.layers
        self.logits = logits  # (R, 1, V), after the tokens so far
        self.graph = None
        self.column = torch.tensor([source.shape[1]], device=source.device)  # of the next token
        room = C + -(source.shape[1] + C) % 16  # kernels of attention want multiples of 16
        visible = torch.nn.functional.pad(source, (0, room), value=PADDING) == PROMPT  # (R, L)
        # what attention computes with: rotations leave float32 in a cache, to be cast at every step
        dtype = torch.bfloat16 if torch.is_autocast_enabled(source.device.type) else torch.float32
        mask = torch.where(visible, 0.0, -torch.inf).to(dtype)[:, None, None]  # (R, 1, 1, L)
        self.inputs = {"input_ids": position_ids.clone(), "position_ids": position_ids, "attention_mask": mask}
        for layer in self.layers:
            layer.keys = torch.nn.functional.pad(layer.keys.to(dtype), (0, 0, 0, room))  # (R, heads, L, dimension)
            layer.values = torch.nn.functional.pad(layer.values.to(dtype), (0, 0, 0, room))

    def update(self, keys, values, layer_idx, *args, **kwargs):
        layer = self.layers[layer_idx]
        layer.keys.index_copy_(2, self.column, keys.to(layer.keys.dtype))
        layer.values.index_copy_(2, self.column, values.to(layer.values.dtype))
        return layer.keys, layer.values

    def reorder_cache(self, rows):
        super().reorder_cache(rows)
        self.logits = self.logits[rows]
        self.inputs = {name: tensor[rows] for name, tensor in self.inputs.items()}
        self.graph = None  # which knows only the old tensors

    def decode_step(self, model):
        """What a graph repeats: no value is looked at, and what the next step needs is changed in place."""
        self.inputs["position_ids"].add_(1)
        self.inputs["attention_mask"].index_fill_(3, self.column, 0.0)
        self.logits.copy_(model(past_key_values=self, **self.inputs).logits)
        self.column.add_(1)

    def read(self, policy, chosen):
        """Reads a token of each row (R, 1), and returns the logits after it."""
        self.inputs["input_ids"].copy_(chosen)
        if self.graph:
            self.graph.replay()
            return self.logits
        self.decode_step(policy.model)  # the first time without a graph, which cannot hold what libraries set up
        if policy.stream:
            self.graph = torch.cuda.CUDAGraph()
            # weights were cast when the prompts were read, in the same autocast; NCCL's thread may go on meanwhile
            with torch.cuda.graph(self.graph, stream=policy.stream, capture_error_mode="thread_local"):
                self.decode_step(policy.model)
        return self.logits


@torch.no_grad()
def sample(policy, prompts, G, temperature, C):
    """Draws G completions of each of B prompts (token ids) from the model's full distribution; temperature 0: greedy.

    Returns B lists of G pairs (token ids, log-probabilities), up to and including the first stop token. A row of the
    batch is a prompt with its S = G completions: the model reads the latest token of each at once, and a mask lets it
    see the prompt and its own completion's tokens, not the others'. (With sliding windows a row has one completion.)
    """
    model = policy.model
    device = model.device
    B = len(prompts)
    S = G if policy.full_attention and not policy.capturable else 1
    stop_ids = torch.tensor(policy.stop_ids, device=device)
    cache, logits, position_ids, source = read_prompts(model, prompts, G // S)
    cache = FixedCache(cache, logits, position_ids, source, C) if policy.capturable else cache
    logits = logits.expand(-1, S, -1)  # (R, S, V)
    completion = torch.arange(B * G, device=device).view(-1, S)  # (R, S), numbers of those that still decode
    running = torch.ones_like(completion, dtype=torch.bool)  # (R, S), which of these have not stopped
    tokens = torch.zeros(B * G, C, dtype=torch.long, device=device)
    logprobs = torch.zeros(B * G, C, device=device)
    lengths = torch.zeros(B * G, dtype=torch.long, device=device)  # stop tokens count
    for t in range(C):
        chosen, chosen_logprobs = draw(logits, temperature)  # (R, S)
        tokens[completion, t] = chosen
        logprobs[completion, t] = chosen_logprobs
        lengths[completion] += running
        running = running & ~torch.isin(chosen, stop_ids)
        if policy.capturable and t % 16 and t + 1 < C:  # to ask a GPU is to wait for it
            logits = cache.read(policy, chosen)  # also of completions that have stopped; their tokens do not count
            continue
        if t + 1 == C or not running.any():
            break
        # drop rows without a running completion, and in the others the places that none of them needs any more
        rows = running.any(1).nonzero().flatten()
        width = int(running.sum(1).max())
        if len(rows) * width <= 0.5 * running.numel():  # seldom: it copies the cache, and another graph follows
            places = running[rows].int().topk(width).indices  # those that run come first
            completion = completion[rows].gather(1, places)
            chosen = chosen[rows].gather(1, places)
            running = running[rows].gather(1, places)
            source = source[rows]
            position_ids = position_ids[rows]
            cache.reorder_cache(rows)
        if policy.capturable:
            logits = cache.read(policy, chosen)
            continue
        source = torch.cat([source, completion], 1)  # tokens of dropped completions stay, and nobody sees them
        position_ids = position_ids + 1
        if policy.full_attention:
            own = source[:, None] == completion[..., None]  # (R, S, L)
            visible = own | (source[:, None] == PROMPT)
            mask = torch.where(visible, 0.0, -torch.inf)[:, None]  # (R, 1, S, L)
        else:
            mask = (source > PADDING).long()  # (R, L)
        inputs = {"attention_mask": mask, "position_ids": position_ids.expand_as(chosen)}
        logits = model(chosen, past_key_values=cache, **inputs).logits  # (R, S, V)

    pairs = []
    for ids, values, length in zip(tokens.tolist(), logprobs.tolist(), lengths.tolist()):
        pairs.append((ids[:length], values[:length]))
    return [pairs[k : k + G] for k in range(0, len(pairs), G)]


def complete(args, policy, prompts, G, temperature):
    """Draws a policy's G completions of each prompt: a Group for each."""
    C = args.max_new_tokens
    all_prompt_ids = [encode(policy, prompt, C) for prompt in prompts]
    longest = max(map(len, all_prompt_ids))
    # four times the training batch: sampling keeps only keys and values, not all activations
    size = max(1, 4 * args.max_batch_tokens // (longest + G * C))
    samples = []
    # one context for all tokens, so that weights are cast once; inference mode, faster on a CPU, would cast each time
    with policy.autocast, torch.inference_mode(not torch.cuda.is_available()):
        for k in range(0, len(prompts), size):
            samples += sample(policy, all_prompt_ids[k : k + size], G, temperature, C)
    groups = []
    for prompt, prompt_ids, pairs in zip(prompts, all_prompt_ids, samples):
        completion_ids, logprobs = zip(*pairs)
        completions = policy.tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        if policy.tokenizer.decode(prompt_ids[-8:]).rstrip().endswith("<think>"):
            # the chat template opened a thought: until it ends, nothing is an answer
            completions = ["<think>" + completion for completion in completions]
        stopped = [ids[-1] in policy.stop_ids for ids in completion_ids]
        groups.append(Group(prompt, prompt_ids, completions, completion_ids, logprobs, stopped))
    return groups


def token_logprobs(policy, prompt_ids, completion_ids, temperature):
    """Log-probabilities of the tokens of R completions, a list of them for each prompt: one tensor (C,) each.

    They continue from the prompt's cache, with gradients. Causal attention never sees padding on the right.
    """
    model = policy.model
    decoder = model.get_decoder()
    copies = torch.tensor([len(completions) for completions in completion_ids], device=model.device)
    cache, _, _, source = read_prompts(model, [ids[:-1] for ids in prompt_ids], copies)
    # the last token of a prompt predicts the first one of its completions
    rows = []
    for prompt, completions in zip(prompt_ids, completion_ids):
        rows += [torch.tensor([prompt[-1], *ids], device=model.device) for ids in completions]
    padded = pad_sequence(rows, batch_first=True, padding_value=-1)  # (R, 1 + C)
    real = padded[:, 1:] >= 0  # (R, C)
    mask = torch.cat([source == PROMPT, torch.ones_like(real)], 1).long()  # (R, P - 1 + C)
    inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1)[:, -real.shape[1] :]}
    outputs = decoder(padded[:, :-1].clamp(min=0), past_key_values=cache, **inputs)

    def piece_logprobs(hidden, target):  # (K, D), (K,)
        # runs only what follows the decoder, such as scaled or capped logits: the decoder returns `hidden`
        decoder.forward = lambda *args, **kwargs: type(outputs)(last_hidden_state=hidden[None])
        logits = model(inputs_embeds=hidden[None]).logits[0]  # (K, V)
        del decoder.forward
        logits = logits if temperature == 1 else logits / temperature  # which makes a copy
        return logits.log_softmax(-1).gather(-1, target[:, None])[:, 0]

    pieces = zip(outputs.last_hidden_state[real].split(1024), padded[:, 1:][real].split(1024))
    logprobs = [checkpoint(piece_logprobs, *piece, use_reentrant=False) for piece in pieces]
    return torch.cat(logprobs).split([len(ids) - 1 for ids in rows])


def batches_of(group, weights, max_batch_tokens):
    """Splits the completions that have a weight into batches of similar length: lists of their indices."""
    lengths = [len(ids) for ids in group.completion_ids]
    # equal returns leave only rounding errors, which Adam would blow up
    weighted = [g for g in np.argsort(lengths, kind="stable") if abs(weights[g]) > 1e-12]
    size = max(1, (max_batch_tokens - len(group.prompt_ids)) // max(lengths))
    return [weighted[k : k + size] for k in range(0, len(weighted), size)]


def join(parts, max_batch_tokens):
    """Joins parts (prompt_ids, completion_ids, weights) into batches like them, which are bounded with all padding."""
    P = max((len(prompt_ids) for prompt_ids, _, _ in parts), default=1)
    R = max((len(completion_ids) for _, completion_ids, _ in parts), default=1)
    C = max((len(ids) for _, completion_ids, _ in parts for ids in completion_ids), default=1)
    size = max(1, max_batch_tokens // (P + R * C))
    return [zip(*parts[k : k + size]) for k in range(0, len(parts), size)]


def optimizer_step(policy, max_grad_norm):
    """A step on the mean of all processes' gradients; each updates its share and sends it to the others.

    Returns the norm of the gradient before it is clipped.
    """
    if WORLD_SIZE > 1:
        for p in policy.trained.values():
            dist.all_reduce(p.grad.div_(WORLD_SIZE))
    grad_norm = torch.nn.utils.clip_grad_norm_(policy.trained.values(), max_grad_norm)
    policy.optimizer.step()
    for name, p in policy.trained.items():
        p.grad = None
        if WORLD_SIZE > 1:
            dist.broadcast(p.data, policy.owner[name])
    return grad_norm.item()


# ---- logging and checkpoints


def terms(split, turns):
    """What is logged of a rollout, as triples (name, value, weight)."""
    passed = defaultdict(list)  # task number -> whether each trajectory passes all tests
    for t, nodes in enumerate(turns, 1):
        for node in nodes:
            for i, group in node.groups.items():
                G = len(group.completions)
                tokens = sum(map(len, group.completion_ids))
                entropy = -sum(map(sum, group.logprobs)) / tokens  # an estimate, in nats
                yield f"agent_{i}/entropy", entropy, tokens
                yield f"agent_{i}/completion_length", tokens / G, G
                yield f"agent_{i}/stopped", np.mean(group.stopped), G
                if G > 1:
                    yield "zero_variance_groups", np.ptp(group.returns) < 1e-9, 1
            chance = node.weight * len(turns[0]) / len(node.steps)  # of a joint action, given the task
            for step, child in zip(node.steps, node.children):
                yield f"reward_turn{t}", np.mean(step.reward), chance
                if child is None:  # where the branch ends
                    for name, value in step.parts.items():
                        yield name, value, chance
                    if "all_passed" in step.parts:
                        passed[node.task_number].append(step.parts["all_passed"])
    for root in turns[0]:
        for i, value in enumerate(root.value):
            yield f"agent_{i}/return", value, 1
            yield "return", value, 1
    if split == "eval":
        for outcomes in passed.values():  # unbiased estimates: Chen et al., 2021, arXiv 2107.03374
            n = len(outcomes)
            failed = sum(outcome < 1 for outcome in outcomes)
            for k in 2 ** np.arange(n.bit_length()):
                yield f"pass@{k}", 1 - math.comb(failed, k) / math.comb(n, k), 1


def summarize(split, turns):
    """The logged metrics: weighted means, over all processes."""
    sums = defaultdict(float)
    weights = defaultdict(float)
    for name, value, weight in chain(*gather(list(terms(split, turns)))):
        sums[name] += weight * value
        weights[name] += weight
    return {f"{split}/{name}": sums[name] / weights[name] for name in sums}


def records(iteration, split, turns, N, num_tasks=None):
    """Lines for rollouts.jsonl, one per node of the first tasks: what agents read and wrote, and what it was worth."""
    shown = {root.task_number for root in turns[0][:num_tasks]}
    for turn, nodes in enumerate(turns, 1):
        for node in nodes:
            if node.task_number not in shown:
                continue
            names = dict.fromkeys(name for step in node.steps for name in step.parts)
            line = {
                "iteration": iteration,
                "split": split,
                "turn": turn,
                "task_number": node.task_number,
                "path": node.path,
                "weight": node.weight,
                "joint": node.joint,
                "rewards": [step.reward for step in node.steps],
                "parts": {name: [step.parts.get(name) for step in node.steps] for name in names},
                "feedback": [step.feedback for step in node.steps],
                "agents": [record_of(node.groups.get(i)) for i in range(N)],
            }
            if turn == 1:
                line["task"] = node.task
            yield json.dumps(line, default=to_json) + "\n"


def record_of(group):
    """A group without its tokens; None for a silent agent."""
    names = ["prompt", "completions", "stopped", "returns", "advantages"]
    return group and {name: getattr(group, name) for name in names if getattr(group, name) is not None}


def to_json(value):
    """What JSON does not know, as what it knows."""
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else str(value)


def log(args, run_dir, iteration, metrics, lines):
    """Writes metrics and rollouts of an iteration; ends the run at the first metric that is not finite."""
    for name, value in metrics.items():
        if not math.isfinite(value):
            fail(f"{name} is {value}: resume with a lower --learning-rate, or fix the reward of --env.")
    if RANK > 0:
        return
    if "eval/return" in metrics:  # print would garble the progress bar
        tqdm.write(f"iteration {iteration}: evaluation return {metrics['eval/return']:.3f}")
    with open(f"{run_dir}/metrics.jsonl", "a") as file:
        file.write(json.dumps({"iteration": iteration} | metrics) + "\n")
    with open(f"{run_dir}/rollouts.jsonl", "a") as file:
        file.writelines(lines)
    if args.track != "none":
        import_module(args.track).log(metrics, step=iteration)


def make_run_dir(args, run_dir):
    """Makes the run folder, with args.json."""
    folder, script = os.path.split(__file__)
    about = {
        "script": script,
        "args": asdict(args) | {"resume": None},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "commit": os.popen(f"git -C '{folder}' rev-parse HEAD 2>/dev/null").read().strip(),
    }
    print(f"the run is in {run_dir}")
    os.makedirs(run_dir, exist_ok=True)
    with open(f"{run_dir}/args.json", "w") as file:
        json.dump(about, file, indent=2)


def catch_signals():
    """Returns a list to which Ctrl-C and SIGTERM are added: the loop then saves and ends."""
    signals = []

    def on_signal(number, _):
        signals.append(number)
        signal(SIGINT, SIG_DFL)  # another Ctrl-C ends at once
        tqdm.write("finishing the iteration, then saving; another Ctrl-C ends at once, without saving")

    signal(SIGINT, on_signal)
    signal(SIGTERM, on_signal)
    return signals


def moments_of(policy):
    """AdamW's state of each parameter: name -> dict of tensors, in process 0, to which their owners send them."""
    moments = {}
    for name, p in policy.trained.items():
        state = [{key: value.cpu() for key, value in policy.optimizer.state[p].items()}]  # empty, except in the owner
        if WORLD_SIZE > 1:
            dist.broadcast_object_list(state, policy.owner[name])
        if RANK == 0:
            moments[name] = state[0]
    return moments


def save_checkpoint(run_dir, iteration, policies):
    """Writes state.pt, from which any number of processes resumes."""
    moments = [moments_of(policy) for policy in policies]
    if RANK > 0:
        return
    state = {
        "iteration": iteration,
        "models": [policy.trained for policy in policies],
        "moments": moments,
        "sizes": {name: os.path.getsize(f"{run_dir}/{name}") for name in ("metrics.jsonl", "rollouts.jsonl")},
    }
    torch.save(state, f"{run_dir}/state.tmp")
    os.replace(f"{run_dir}/state.tmp", f"{run_dir}/state.pt")  # a crash leaves the old one intact
    tqdm.write(f"iteration {iteration}: checkpoint, which --resume {run_dir} continues from")


def load_checkpoint(run_dir, policies):
    """Restores weights and moments, cuts the logs back to the checkpoint, and returns its iteration."""
    state = torch.load(f"{run_dir}/state.pt", map_location="cpu")
    if [policy.trained.keys() for policy in policies] != [weights.keys() for weights in state["models"]]:
        fail("--resume: its agents are others; leave out --model, --num-agents and --lora-rank.")
    for policy, weights, moments in zip(policies, state["models"], state["moments"]):
        for name, p in policy.trained.items():
            p.data.copy_(weights[name])
            if policy.owner[name] == RANK:
                policy.optimizer.state[p] = {key: value.to(p.device) for key, value in moments[name].items()}
    for name, size in state["sizes"].items():
        os.truncate(f"{run_dir}/{name}", size)
    return state["iteration"]


def save_policies(args, run_dir, policies):
    """Writes a folder for each policy that transformers loads, and that samples as in training."""
    options = {"do_sample": True, "temperature": args.temperature, "top_k": 0, "top_p": 1.0}
    for i, policy in enumerate(policies):
        policy.model.generation_config = GenerationConfig(eos_token_id=policy.stop_ids, **options)
        policy.model.save_pretrained(f"{run_dir}/agent_{i}")
        policy.tokenizer.save_pretrained(f"{run_dir}/agent_{i}")


def evaluate(args, env, policy_of, tasks, iteration):
    """Metrics and lines for rollouts.jsonl of the held-out tasks. Always the same seed, so that it can be compared."""
    reseed(args.seed, 0)
    generations = [args.eval_generations, *[1] * (args.num_turns - 1)]
    temperature = args.temperature if args.eval_temperature is None else args.eval_temperature
    turns = rollout(args, env, policy_of, tasks, generations, "align", temperature)
    lines = gather(list(records(iteration, args.eval_split, turns, args.num_agents)))
    return summarize("eval", turns), list(chain(*lines))


# ---- the algorithm: the rollout tree, then the loop


@dataclass(eq=False)
class Group:
    """An agent's G completions of its prompt at a node."""

    prompt: str
    prompt_ids: list[int]  # (P,)
    completions: list[str]  # (G,)
    completion_ids: list[list[int]]  # G lists, each up to and including its stop token, if it has one
    logprobs: list[list[float]]  # G lists, of the policy that sampled
    stopped: list[bool]  # (G,), whether each ended by itself
    returns: Any = None  # (G,), of each the mean over the joint actions that contain it
    advantages: Any = None  # (G,), where there is no critic


@dataclass(eq=False)
class Node:
    """A place in the rollout tree of a task: agents speak, and each of J joint actions leads to a child."""

    task_number: int
    task: dict
    path: list[int]  # the joint actions that led here, as indices
    history: list  # what env.step() returned for them: Steps with reward, parts, done and feedback
    weight: float  # the probability that a trajectory, of a task drawn at random, passes here
    groups: dict = field(default_factory=dict)  # agent -> Group; a silent agent has none
    joint: list = field(default_factory=list)  # J tuples, the index of each agent's completion
    steps: list = field(default_factory=list)  # J Steps
    children: list = field(default_factory=list)  # J Nodes, None where the branch ends
    value: Any = None  # (N,), mean return of each agent


def rollout(args, env, policy_of, tasks, generations, joint_mode, temperature):
    """Grows a tree for each (number, task), with G = generations[t] at turn t. Returns the nodes of each turn."""
    N = len(policy_of)
    turns = []
    nodes = [Node(number, task, [], [], 1 / len(tasks)) for number, task in tasks]
    for t, G in enumerate(generations):
        # each agent that has a prompt draws G completions of it
        prompts = [env.observe(node.task, node.history) for node in nodes]
        for i, policy in enumerate(policy_of):
            speaking = [k for k in range(len(nodes)) if prompts[k][i] is not None]  # elsewhere it is silent
            if speaking:
                groups = complete(args, policy, [prompts[k][i] for k in speaking], G, temperature)
                for k, group in zip(speaking, groups):
                    nodes[k].groups[i] = group

        # joint actions, scored all at once: some environments run tests
        branches = []
        for node in nodes:
            if joint_mode == "align":
                node.joint = [(g,) * N for g in range(G)]
            else:  # cross, of the agents that speak
                node.joint = list(product(*[range(G) if i in node.groups else [0] for i in range(N)]))
            for choice in node.joint:
                actions = [""] * N
                for i, group in node.groups.items():
                    actions[i] = group.completions[choice[i]]
                branches.append((node.task, node.history, actions))
        steps = env.step(branches)
        if len(steps) != len(branches):
            fail("--env: step() has to return a Step for each branch.")

        # a child for each joint action that does not end its branch
        last = t + 1 == len(generations)
        for node in nodes:
            J = len(node.joint)
            node.steps = steps[:J]
            steps = steps[J:]
            for j, step in enumerate(node.steps):
                child = Node(node.task_number, node.task, [*node.path, j], [*node.history, step], node.weight / J)
                node.children.append(None if step.done or last else child)
        turns.append(nodes)
        nodes = [child for node in nodes for child in node.children if child]
        if not nodes:
            break

    # returns, from the leaves to the roots
    for node in chain(*reversed(turns)):
        returns = np.zeros((len(node.joint), N))  # (J, N), float64, so that equal returns stay equal
        for j, (step, child) in enumerate(zip(node.steps, node.children)):
            returns[j] = step.reward  # one that all share, or a list with one for each agent
            if child:
                returns[j] += args.gamma * child.value
        node.value = returns.mean(0)
        for i, group in node.groups.items():
            member = np.array(node.joint)[:, i]  # (J,), which of its completions
            sums = np.bincount(member, weights=returns[:, i])  # (G,)
            group.returns = sums / np.bincount(member)  # means over the joint actions that contain a completion
    return turns


if __name__ == "__main__":
    # set-up
    args = read_args()
    if args.learning_rate is None:
        args.learning_rate = (4e-4 if set(args.model) == {"tiny"} else 5e-6) * (10 if args.lora_rank else 1)
    if args.num_generations < 2:
        fail("--num-generations: a group needs at least 2 completions.")
    devices = start_processes(args)
    N = args.num_agents
    B = args.num_tasks
    G = args.num_generations
    script = os.path.basename(__file__).removesuffix(".py")
    run_name = f"{args.env.replace(':', '.')}__{script}__{args.seed}__{datetime.now():%Y%m%d-%H%M%S.%f}"
    run_dir = gather(args.resume or f"{args.output_dir}/{run_name}")[0]
    if args.track != "none" and RANK == 0:  # before models load, so that a missing key does not cost minutes
        name = os.path.basename(os.path.normpath(run_dir))
        os.environ["WANDB_RUN_ID"] = name  # a resumed run continues there too
        import_module(args.track).init(project="tutti", name=name, config=asdict(args), resume="allow")
    env, train_tasks, eval_tasks = load_environment(args)
    T = args.num_turns = getattr(env, "num_turns", args.num_turns)
    if args.joint_mode is None:  # cross scores G^N joint actions, and each may start a branch
        args.joint_mode = "cross" if T == 1 and G**N <= 100 else "align"
    held_out = np.random.default_rng(0).permutation(len(eval_tasks))[: args.eval_tasks or None]
    eval_tasks = [eval_tasks[k] for k in held_out[RANK::WORLD_SIZE]]
    torch.manual_seed(args.seed)  # new adapters are the same in all processes
    base_models = {}
    models = list(zip(args.model * N, devices * N))[: 1 if args.share_policy else N]  # with the device of each
    policies = [load_policy(args, name, device, base_models) for name, device in models]
    policy_of = (policies * N)[:N]  # the policy of each agent
    # the order of the training tasks in all iterations: shuffled passes over all tasks, one after the other
    passes = np.tile(range(len(train_tasks)), (args.num_iterations * B // len(train_tasks) + 1, 1))
    order = np.random.default_rng(args.seed).permuted(passes, axis=1).flatten()
    start = load_checkpoint(run_dir, policies) if args.resume else 0

    if RANK == 0:
        make_run_dir(args, run_dir)
    if not args.resume:
        log(args, run_dir, 0, *evaluate(args, env, policy_of, eval_tasks, 0))
    signals = catch_signals()

    last_iteration = args.num_iterations
    for iteration in tqdm(range(start + 1, last_iteration + 1), initial=start, total=last_iteration, disable=RANK > 0):
        # 1 ROLLOUT: a tree for each of this process's tasks
        began = perf_counter()
        reseed(args.seed, iteration)
        batch = order[(iteration - 1) * B : iteration * B]  # (B,)
        tasks = [train_tasks[k] for k in batch[RANK::WORLD_SIZE]]
        try:
            turns = rollout(args, env, policy_of, tasks, [G] * T, args.joint_mode, args.temperature)
        except (Exception, SystemExit):
            if WORLD_SIZE == 1:  # several processes would wait for each other
                save_checkpoint(run_dir, iteration - 1, policies)  # no weight has changed since
            raise
        metrics = summarize("train", turns) | {"time/rollout": perf_counter() - began}

        # 2 ADVANTAGES: of each agent's completions at each node
        nodes = list(chain(*turns))
        for node in nodes:
            for group in node.groups.values():
                returns = group.returns  # (G,)
                # >>> ALGORITHM
                advantages = returns - returns.mean()
                # <<< ALGORITHM
                group.advantages = advantages

        # 3 UPDATE: one optimizer step for each policy
        tokens = 0
        for i, policy in enumerate(policies):
            loss = 0.0
            for p in policy.trained.values():
                p.grad = torch.zeros_like(p)  # in every process, also without a completion to train on
            own_groups = [(node, node.groups[k]) for node in nodes for k in node.groups if policy_of[k] is policy]
            parts = []
            for node, group in own_groups:
                tokens += sum(map(len, group.completion_ids))
                w = node.weight / G
                discount = args.gamma ** len(node.history)
                weights = w * discount * group.advantages / args.max_new_tokens  # (G,)
                for batch in batches_of(group, weights, args.max_batch_tokens):
                    completion_ids = [group.completion_ids[g] for g in batch]
                    parts.append((group.prompt_ids, completion_ids, weights[batch].tolist()))
            for prompt_ids, completion_ids, weights in join(parts, args.max_batch_tokens):
                with policy.autocast:
                    logprobs = token_logprobs(policy, prompt_ids, completion_ids, args.temperature)
                batch_loss = 0.0
                for weight, values in zip(chain(*weights), logprobs):
                    batch_loss -= weight * values.sum()
                batch_loss.backward()
                loss += batch_loss.item()
            decay = 1 - (iteration - 1) / args.num_iterations if args.anneal_lr else 1.0
            policy.optimizer.param_groups[0]["lr"] = decay * args.learning_rate
            grad_norm = optimizer_step(policy, args.max_grad_norm)
            metrics |= {f"agent_{i}/loss": np.mean(gather(loss)), f"agent_{i}/grad_norm": grad_norm}

        # 4 LOG
        metrics |= {"time/iteration": perf_counter() - began, "tokens": sum(gather(tokens))}

        # 5 EVALUATE
        lines = list(records(iteration, "train", turns, N, num_tasks=2))
        last = iteration == last_iteration
        if last or iteration % args.eval_every == 0:
            eval_metrics, eval_lines = evaluate(args, env, policy_of, eval_tasks, iteration)
            metrics |= eval_metrics
            lines += eval_lines
        log(args, run_dir, iteration, metrics, lines)

        # 6 CHECKPOINT
        stopping = any(gather(len(signals)))
        if last or stopping or iteration % args.save_every == 0:
            save_checkpoint(run_dir, iteration, policies)
        if stopping:
            break

    if RANK == 0 and args.num_iterations > 0:
        save_policies(args, run_dir, policies)
    if WORLD_SIZE > 1:
        dist.destroy_process_group()
