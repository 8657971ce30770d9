"""MAGRPO: each agent follows the group-relative advantage of the return that all agents share.

    python magrpo.py --env tldr --num-agents 2    (nano.py shows it in two fifths of the code: read that first)

    A_g = R_g - mean(R_1 .. R_G)
    L_i = - sum over nodes and g of  w * gamma^turn * A_g * sum_t log pi_i(y_g,t | x, y_g,<t) / max_new_tokens

A node is a state that a rollout has reached, turn the number of turns before it. There agent i draws G completions
y_1 .. y_G of its own prompt x. A joint action is one completion of each agent; its return is its reward plus gamma
times the mean return of the joint actions at the node that it leads to. R_g is the mean return of the joint actions
that contain y_g, and w is the probability that a trajectory of a random task passes through y_g. With --branching
trajectories, G trajectories start from each task and do not branch: R_1 .. R_G are their returns from the same turn
on, and an ended one keeps its last return (docs/credit.md).

E[-grad L_i] = (G-1)/G * grad E[return] / max_new_tokens, as the baseline includes R_g. Source: MAGRPO, arXiv
2508.04652. With one agent this is GRPO, arXiv 2402.03300, in the form of Dr. GRPO, arXiv 2503.20783.

Left out on purpose: division by the group's standard deviation or by the completion's length (both bias the
gradient), the clipped ratio (there is one optimizer step per rollout, so it is always 1), a KL penalty.

This variant is for models that one GPU cannot hold. FSDP2 shards weights, gradients and Adam's moments among the
processes of torchrun. A policy's weights are gathered for rollouts, evaluations and its own update, so that processes
wait for each other only in backward passes, of which each makes as many. Decoding steps are not captured as CUDA
graphs, because FSDP's streams would have to join them. Run on CPUs with gloo; not yet on GPUs.
"""

import copy
import json
import os
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from importlib import import_module
from itertools import chain, product
from time import perf_counter
from typing import Any, Literal, NamedTuple
from unicodedata import normalize

import numpy as np
import torch
import torch.distributed as dist
import tyro
import yaml
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, PreTrainedTokenizerFast, set_seed
from transformers.cache_utils import Cache, StaticLayer

# N agents, B tasks, G generations, J joint actions, T turns, P prompt tokens, C completion tokens, V vocabulary,
# R rows of a batch, L columns of its cache

FOLDER, SCRIPT = os.path.split(os.path.abspath(__file__))
RANK = int(os.environ.get("RANK", 0))  # rank under torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if ON_GPU else "cpu")
AUTOCAST = torch.autocast(DEVICE.type, torch.bfloat16, enabled=ON_GPU)
CHECK_EVERY = 16 if ON_GPU else 1  # decoding steps between checks of which rows have ended; at each the CPU waits


@dataclass
class Args:
    # experiment
    seed: int = 1  # seeds sampling, the order of the tasks and the environment
    num_iterations: int = 120  # rollouts, each followed by an update of every agent; 0: only evaluate
    config: str | None = None  # YAML or JSON file of defaults, e.g. the args.json of a run
    output_dir: str = "runs"  # where the run folder is made
    resume: str | None = None  # run folder to continue from its last checkpoint
    track: Literal["none", "wandb", "trackio"] = "none"  # tracker, besides metrics.jsonl
    # environment and agents
    env: str = "tldr"  # name of a built-in environment, several joined by +, or module:Class of your own
    env_kwargs: dict[str, str] = field(default_factory=dict)  # its keyword arguments, e.g. reward grounded
    num_agents: int = 2  # N, each with its own prompt and its own policy
    num_turns: int = 1  # T, joint actions in a trajectory; environments with a fixed number of turns override it
    dataset: str = "sample"  # sample (offline), hub, a hub id, or a .jsonl, .json, .csv or .parquet file
    model: list[str] = field(default_factory=lambda: ["tiny"])  # tiny, a folder or a hub id; one, or one per agent
    share_policy: bool = False  # one model and one optimizer for all agents; gradients add up over them
    lora_rank: int = 0  # one adapter per agent on shared frozen weights; 0: full fine-tuning
    # sampling
    num_generations: int = 8  # G, completions per agent in a group
    branching: Literal["tree", "trajectories"] = "tree"  # G at every node; or G at the first, then one, aligned
    joint_mode: Literal["align", "cross"] | None = None  # cross: all G^N (default if T=1, G^N <= 100); align: g with g
    temperature: float = 1.0  # for sampling and for the trained log-probabilities; 0: greedy, to evaluate
    max_new_tokens: int | None = None  # C; default 256, and 96 for tiny
    batch_size: int = 16  # completions in a training batch, and prompts read for it; sampling takes 16 times as many
    cuda_graphs: bool = True  # on a GPU, replay a decoding step as one CUDA graph
    # optimization
    num_tasks: int = 4  # B, tasks per iteration; a multiple of the number of processes
    # of AdamW; one, or one per agent; 0 freezes it; default 5e-6, for tiny 4e-4, with LoRA ten times that
    learning_rate: list[float] = field(default_factory=list)
    anneal_lr: bool = True  # decay the learning rate linearly to 0
    gamma: float = 1.0  # discount per turn
    max_grad_norm: float = 1.0  # gradient clipping, per agent; 0: none
    # evaluation
    eval_every: int = 20  # iterations between evaluations, each with a checkpoint; 0: only before and after training
    eval_tasks: int = 64  # held-out tasks, the same in each evaluation; 0: all
    eval_split: Literal["test", "train"] = "test"  # train, with --num-iterations 0: collect answers for sft.py
    eval_generations: int = 1  # trajectories per held-out task


@dataclass(eq=False)  # hashable, and compared by identity
class Policy:
    """A model with its tokenizer and its optimizer. An agent is a seat; a policy plays one or, shared, all of them."""

    model: Any
    tokenizer: Any
    stop_ids: list[int]  # tokens that end a completion
    chat_markers: list[str]  # special tokens that open or close a turn or a document
    cuda_graphs: bool  # whether decoding steps are captured
    trained: dict  # name -> parameter
    optimizer: Any


@dataclass(eq=False)
class Group:
    """An agent's G completions of its prompt at a node."""

    policy: Policy
    prompt: str
    prompt_ids: tuple  # (P,)
    weight: float  # w * gamma^turn
    completion_ids: list = field(default_factory=list)  # G tuples, up to and including the stop token
    logprobs: list = field(default_factory=list)  # G lists, of the policy that sampled
    completions: list = field(default_factory=list)  # (G,), their texts
    stopped: list = field(default_factory=list)  # (G,), whether it ended with a stop token
    returns: Any = None  # (G,), mean return of the joint actions that contain the completion
    peer_returns: Any = None  # those whose mean is the baseline: the same, or those of the task's trajectories
    advantages: Any = None  # (G,)


@dataclass(eq=False)
class Node:
    """A joint action in the rollout tree of a task, and the state that it led to; a root is a state only."""

    path: list  # number of the task in tasks(split), then which child it is at each turn
    task: dict
    weight: float  # probability that a trajectory of a random task passes here
    # the joint action
    choice: tuple = ()  # (N,), the index of each agent's completion
    actions: Any = None  # (N,), their texts; "" of a silent agent
    step: Any = None  # what the environment returned: reward, parts, done, feedback
    reward: Any = None  # array: () if agents share it, (N,) if each has one
    returns: Any = None  # (N,), the reward plus gamma times the value
    # the state
    history: list = field(default_factory=list)  # of the turns up to here: pairs of actions and step
    groups: dict = field(default_factory=dict)  # agent -> Group; a silent agent has none
    children: list = field(default_factory=list)  # J Nodes, of the joint actions here; none where the branch ends
    value: Any = 0.0  # (N,), mean return of the children; 0 where the branch ends


class Example(NamedTuple):
    """A completion to train on, after its prompt."""

    prompt_ids: tuple  # (P,)
    completion_ids: tuple  # (C,)
    factor: float  # what multiplies its log-probability


# ---- set-up (to read the algorithm, skip to "the algorithm")


def read_args():
    """The command line, with defaults from the run that is resumed and from a config file."""
    args = tyro.cli(Args, description=__doc__)  # for --resume and --config
    words = []
    if args.resume:
        words += words_of(f"{args.resume}/args.json")
    if args.config:
        words += words_of(args.config)
    # of an argument that comes twice the last one counts
    return tyro.cli(Args, description=__doc__, args=words + sys.argv[1:])


def words_of(path):
    """The values in a file as words of a command line, so that tyro converts and checks them."""
    with open(path) as file:
        values = yaml.safe_load(file)
    words = []
    # an args.json has them under args
    for name, value in values.get("args", values).items():
        if name in ("resume", "config") and value:
            sys.exit(f"error: {path}: a file of arguments cannot hold {name}; give it on the command line.")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
            continue
        if isinstance(value, dict):
            value = chain(*value.items())
        elif not isinstance(value, list):
            value = [value]
        words += [f"--{name}", *map(str, value)]
    return words


def load_environment(args):
    """An instance of the environment's class."""
    options = {
        "num_agents": args.num_agents,
        "num_turns": args.num_turns,
        "dataset": args.dataset,
        "seed": args.seed,
        **args.env_kwargs,
    }
    module, _, class_name = args.env.partition(":")
    if class_name and "+" not in args.env:
        # your own class, so that a copy of this file needs no envs/
        return getattr(import_module(module), class_name)(**options)
    return import_module("envs").make(args.env, **options)


class Float32Head(torch.nn.Linear):
    """An output head that autocast leaves alone: in bfloat16, log-probabilities are off by hundredths of a nat."""

    def forward(self, hidden):
        with torch.autocast(DEVICE.type, enabled=False):
            return super().forward(hidden.float())


def load_policy(args, name, base_models):
    """Loads a model. base_models: path -> model whose frozen weights LoRA policies share."""
    path = f"{FOLDER}/models/tiny" if name == "tiny" else name
    try:
        # not AutoTokenizer, which may split words otherwise than the model's own file says
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    except Exception as error:
        sys.exit(f"error: --model {path}: give a hub id or folder that has tokenizer.json, as models/tiny ({error}).")
    model = base_models.get(path)
    if model is None:
        dtype = torch.bfloat16 if args.lora_rank and ON_GPU else torch.float32
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(DEVICE)
    # rows of a recurrent state cannot be dropped, and a model's own attention may not know the masks used here
    if model._is_stateful or not model.is_backend_compatible():
        sys.exit(f"error: --model {path}: recurrent layers or custom attention masks are not supported; use nano.py.")
    stop_ids, chat_markers = special_tokens_of(tokenizer, model)
    # the head is changed in place, so that it stays tied to the embeddings, which then are float32, too
    head = model.get_output_embeddings().float()
    head.__class__ = Float32Head
    if args.lora_rank:
        base_models[path] = model
        model = add_lora(model, args.lora_rank)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for p in trained.values():
        # adapters may be bfloat16, as their base model
        p.data = p.data.float()
    if WORLD_SIZE > 1:
        shard_model(model)
        # sharding replaces parameters
        trained = {name: model.get_parameter(name) for name in trained}
    # saved agents sample as in training
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=args.temperature, top_k=0, eos_token_id=stop_ids
    )
    optimizer = torch.optim.AdamW(trained.values(), weight_decay=0.0, fused=True)
    return Policy(model, tokenizer, stop_ids, chat_markers, ON_GPU and args.cuda_graphs, trained, optimizer)


def shard_model(model):
    """Shards the trained weights among the processes; each has all of the frozen ones."""
    frozen = {p for p in model.parameters() if not p.requires_grad}
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    precision = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in model.modules():
        if type(module).__name__ in model._no_split_modules:
            fully_shard(module, mp_policy=precision, ignored_params=frozen)
    # embeddings and head stay in float32; in one group, as they may be tied
    fully_shard(model, ignored_params=frozen)
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)


def fsdp_modules(policies):
    """The modules whose weights are gathered one by one."""
    return [module for policy in policies for module in policy.model.modules() if isinstance(module, FSDPModule)]


def unshard(policies):
    """Gathers the weights in all processes, until reshard(): no forward pass then waits for another process."""
    for module in fsdp_modules(policies):
        module.unshard()


def reshard(policies):
    """Keeps only this process's shards: what is gathered before an optimizer step is stale after it."""
    for module in fsdp_modules(policies):
        module.reshard()


def add_lora(model, rank):
    """A copy of the model with an adapter of its own: new modules, but the same frozen weights."""
    # parameters in memo are shared, not copied
    model = copy.deepcopy(model, memo={id(p): p for p in model.parameters()})
    peft = import_module("peft")
    model.add_adapter(peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model


def special_tokens_of(tokenizer, model):
    """Ids that end a completion (the chat template's first), and texts of special tokens that open or close a turn."""
    text = ""
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ANSWER"}]
        text = tokenizer.apply_chat_template(chat, tokenize=False)
    ending = text.partition("ANSWER")[2].lstrip()
    # the model's: one id, a list of ids, or None
    stop_ids = [tokenizer.eos_token_id, *np.ravel(model.generation_config.eos_token_id).tolist()]
    chat_markers = []
    for token_id, token in tokenizer.added_tokens_decoder.items():
        # base models do not list the template's end-of-turn token
        if ending.startswith(token.content):
            stop_ids.insert(0, token_id)
        # a thought is part of a message, even where its marks are special tokens
        in_template = token.special and token.content in text and "think" not in token.content
        if in_template or token_id in [tokenizer.bos_token_id, *stop_ids]:
            chat_markers.append(token.content)
    return [token_id for token_id in stop_ids if token_id is not None], chat_markers


def reseed(seed, iteration):
    """Each iteration and process has a seed of its own, so that a resumed run needs no generator's state."""
    set_seed(np.random.SeedSequence([seed, RANK, iteration]).generate_state(1).item())


# ---- engine: prompts, sampling, log-probabilities


def letters_of(text):
    """A text without what a tokenizer's normalizer may change: case, blanks, and the Unicode form of letters."""
    return "".join(normalize("NFKC", text).casefold().split())


def encode(policy, prompt):
    """Token ids of a prompt: as a user message, or as bare text if the tokenizer has no chat template."""
    tokenizer = policy.tokenizer
    # prompts can quote other agents: a space turns what opens or closes a turn into plain text
    for marker in policy.chat_markers:
        prompt = prompt.replace(marker, f"{marker[0]} {marker[1:]}")
    text = prompt
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    prompt_ids = tokenizer(text, add_special_tokens=not tokenizer.chat_template).input_ids
    if letters_of(prompt) not in letters_of(tokenizer.decode(prompt_ids)):
        sys.exit(f"error: --model: its template or its vocabulary loses a part of {prompt!r:.300}; use another model.")
    return tuple(prompt_ids)


def draw(logits, temperature):
    """A token for each row of logits (R, V), and its log-probability: (R,), (R,). Temperature 0: greedy."""
    probs = (logits / max(temperature, 1e-6)).softmax(-1)
    # inverse CDF: the first token whose cumulative probability exceeds a uniform random number; in float64, so that
    # rare tokens count (multinomial draws in float32, and NaN logits would break the GPU's context)
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    threshold = cumulative[:, -1:] * torch.rand_like(cumulative[:, :1])
    tokens = torch.searchsorted(cumulative, threshold, right=True)
    # NaN logits give index V: clamp it; the NaN metric ends the run
    tokens = tokens.clamp(max=probs.shape[-1] - 1)  # (R, 1)
    logprobs = probs.gather(-1, tokens).log()
    return tokens.squeeze(1), logprobs.squeeze(1)


class FixedLayer(StaticLayer):
    """Keys and values in memory that is changed in place, so that a CUDA graph can repeat a decoding step.

    Layers with a sliding window keep all tokens, too; the model's masks hide the old ones.
    """

    def update(self, keys, values, *args, **kwargs):
        # store in attention's dtype: RoPE returns float32, also under autocast
        return super().update(keys.to(values.dtype), values, *args, **kwargs)


def pad_ids(sequences, side):
    """R lists of ids as one tensor, padded with -1 on the left or on the right."""
    tensors = [torch.tensor(ids) for ids in sequences]
    return pad_sequence(tensors, batch_first=True, padding_value=-1, padding_side=side).to(DEVICE)


def forward(model, cache, ids, mask, **options):
    """The model's outputs at S further tokens of R rows, which follow those in the cache.

    ids (R, S): -1 is padding. mask (R, cached + S): 0 hides padding on the left of a prompt; padding on the right is
    never seen, as attention is causal.
    """
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    inputs = {"attention_mask": mask, "position_ids": position_ids, "past_key_values": cache}
    return model(ids.clamp(min=0), **inputs, **options)


def prefill(model, cache, prompt_ids):
    """Reads R prompts but for their last tokens into a cache. Returns which columns are no padding: (R, P - 1)."""
    # of a prompt of one token only padding remains
    padded = pad_ids([ids[:-1] or [-1] for ids in prompt_ids], "left")
    real = (padded >= 0).long()
    forward(model, cache, padded, real, logits_to_keep=1)
    return real


def decode_step(model, cache, inputs):
    """Logits after one more token of each row: (R, V). The CPU reads no value, so that a CUDA graph can repeat it."""
    logits = model(past_key_values=cache, **inputs).logits[:, 0]
    inputs["position_ids"].add_(1)
    return logits


def capture(policy, cache, inputs):
    """Records decode_step() on these tensors as a CUDA graph. Returns its replay, or decode_step if that fails."""
    try:
        if not policy.model._can_compile_fullgraph:
            raise RuntimeError("transformers cannot compile this model")
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's thread may call CUDA meanwhile
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            logits = decode_step(policy.model, cache, inputs)
    except RuntimeError as error:
        tqdm.write(f"--model: no CUDA graph, so decoding is several times slower: {error}")
        policy.cuda_graphs = False
        # a failed capture leaves its own stream behind
        torch.cuda.set_stream(torch.cuda.default_stream())
        return decode_step

    def replay(*_):
        graph.replay()
        return logits

    return replay


@torch.no_grad()
def sample(policy, groups, G, temperature, C):
    """Draws G completions of each Group's prompt from the model's full distribution; temperature 0: greedy."""
    # equal prompts are read once; then each row has its own: (R,)
    distinct = list({group.prompt_ids for group in groups})
    own_prompt = torch.tensor([distinct.index(group.prompt_ids) for group in groups for _ in range(G)], device=DEVICE)
    R = len(own_prompt)
    completion_index = torch.arange(R, device=DEVICE)  # (R,), the completion in each row
    # attention kernels need multiples of 16
    L = (max(map(len, distinct)) + C + 15) // 16 * 16
    num_layers = policy.model.config.get_text_config().num_hidden_layers
    cache = Cache([FixedLayer(L) for _ in range(num_layers)])
    real = prefill(policy.model, cache, distinct)[own_prompt]  # (R, P - 1)
    cache.reorder_cache(own_prompt)
    inputs = {
        "input_ids": torch.tensor([ids[-1:] for ids in distinct], device=DEVICE)[own_prompt],  # (R, 1)
        "position_ids": real.sum(1, keepdim=True),  # (R, 1)
        # the model's causal mask hides the columns that are still empty
        "attention_mask": pad(real, (0, L - real.shape[1]), value=1),  # (R, L)
    }
    decode = decode_step
    stop_ids = torch.tensor(policy.stop_ids, device=DEVICE)
    running = torch.ones_like(own_prompt, dtype=torch.bool)  # True until the stop token
    all_tokens = torch.zeros(R, C, dtype=torch.long, device=DEVICE)
    all_logprobs = torch.zeros(R, C, device=DEVICE)
    lengths = torch.zeros_like(completion_index)
    for t in range(C):
        logits = decode(policy.model, cache, inputs)  # (R, V)
        # the first step is eager: libraries initialise lazily, which cannot be captured
        if t == 0 and policy.cuda_graphs and WORLD_SIZE == 1:
            decode = capture(policy, cache, inputs)
        tokens, logprobs = draw(logits, temperature)  # (R,)
        all_tokens[completion_index, t] = tokens
        all_logprobs[completion_index, t] = logprobs
        lengths[completion_index] += running
        running = running & ~torch.isin(tokens, stop_ids)
        # finished rows decode on; their tokens are ignored
        inputs["input_ids"].copy_(tokens[:, None])
        if t % CHECK_EVERY == 0:
            rows = running.nonzero()[:, 0]
            if len(rows) == 0:
                break
            # on a CPU, drop finished rows when an eighth is done, as this copies the cache
            if not ON_GPU and len(rows) <= 0.875 * len(running):
                completion_index = completion_index[rows]
                running = running[rows]
                cache.reorder_cache(rows)
                inputs = {name: tensor[rows] for name, tensor in inputs.items()}

    sampled = zip(all_tokens.tolist(), all_logprobs.tolist(), lengths.tolist())
    for k, (ids, logprobs, length) in enumerate(sampled):
        group = groups[k // G]
        group.completion_ids.append(tuple(ids[:length]))
        group.logprobs.append(logprobs[:length])


def complete(args, policy, groups, G):
    """Draws G completions of the prompt of each Group of a policy."""
    size = max(1, 16 * args.batch_size // G)
    # on a GPU, one autocast context casts the weights once; in inference mode it would do so at each step
    # on a CPU, nothing is cast, and inference mode is faster
    with AUTOCAST, torch.inference_mode(not ON_GPU):
        for k in range(0, len(groups), size):
            sample(policy, groups[k : k + size], G, args.temperature, args.max_new_tokens)
    for group in groups:
        # a thought that the template opened is put back, so that environments can drop it
        prompt_text = policy.tokenizer.decode(group.prompt_ids)
        opening = "<think>" if prompt_text.rstrip().endswith("<think>") else ""
        for ids in group.completion_ids:
            stopped = ids[-1] in policy.stop_ids
            # special tokens that environments parse are kept; only the stop token is dropped
            text = policy.tokenizer.decode(ids[:-1] if stopped else ids)
            group.completions.append(opening + text)
            group.stopped.append(stopped)


@AUTOCAST
def token_logprobs(policy, cache, real, examples, temperature):
    """Log-probabilities of the tokens of R Examples after their cached prompts, row by row: (R, C), then 0."""
    # the last token of a prompt predicts the first one of its completion
    sequences = [[example.prompt_ids[-1], *example.completion_ids] for example in examples]
    padded = pad_ids(sequences, "right")  # (R, 1 + C)
    tokens = padded[:, 1:]
    mask = torch.cat([real, torch.ones_like(tokens)], 1)  # (R, P - 1 + C)
    logits = forward(policy.model, cache, padded[:, :-1], mask).logits / temperature  # (R, C, V)
    losses = cross_entropy(logits.flatten(0, 1), tokens.flatten(), ignore_index=-1, reduction="none")
    return -losses.view_as(tokens)


def accumulate_gradients(args, policy, examples):
    """Sets the gradients to those of a policy's loss: minus the sum of factor * log-probability of Examples."""
    # completions of like length share a batch
    examples = sorted(examples, key=lambda example: len(example.completion_ids))
    # zero gradients, to which FSDP adds the mean of all processes' at each backward pass
    for p in policy.trained.values():
        p.grad = torch.zeros_like(p)
    unshard([policy])
    # each prompt is read once, however many batches its completions fill; in blocks, to bound memory
    distinct = pad_to_longest(sorted({example.prompt_ids for example in examples}, key=len), (0,))
    for j in range(0, len(distinct), args.batch_size):
        block = distinct[j : j + args.batch_size]
        own = [example for example in examples if example.prompt_ids in block]
        own = pad_to_longest(own, Example(block[0], (0,), 0.0))
        cache = DynamicCache()
        with AUTOCAST:
            real = prefill(policy.model, cache, block)  # (prompts, P - 1)
        # keys and values of each layer, and the same cut off from their graph: there the gradients of batches add up
        tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        for k in range(0, len(own), args.batch_size):
            batch = own[k : k + args.batch_size]
            batch_factors = torch.tensor([example.factor for example in batch], device=DEVICE)  # (R,)
            rows = [block.index(example.prompt_ids) for example in batch]  # (R,), the prompt of each
            # zipped with itself, the iterator gives pairs of keys and values; nothing else holds them
            states = (leaf[rows] for leaf in leaves)
            logprobs = token_logprobs(policy, DynamicCache(zip(states, states)), real[rows], batch, args.temperature)
            loss = -(batch_factors @ logprobs.sum(1))
            loss.backward()
        # the prompts' own part of the backward pass
        torch.autograd.backward(tensors, [leaf.grad for leaf in leaves])
    reshard([policy])


def pad_to_longest(items, filler):
    """A list as long as that of the process with most items, so that all make as many backward passes."""
    length = torch.tensor(len(items), device=DEVICE)
    if WORLD_SIZE > 1:
        dist.all_reduce(length, dist.ReduceOp.MAX)
    return items + [filler] * (length.item() - len(items))


def optimizer_step(args, policy):
    """One step, unless the gradient is zero. Returns its norm before clipping."""
    grad_norm = clip_grad_norm_(policy.trained.values(), args.max_grad_norm or torch.inf).item()
    # without a gradient, Adam's momentum alone would move the parameters
    if grad_norm > 0:
        policy.optimizer.step()
    policy.optimizer.zero_grad()
    return grad_norm


# ---- logging and checkpoints


def summarize(split, turns):
    """The logged metrics of a rollout: weighted means, each a sum of values divided by a sum of weights."""
    sums = defaultdict(float)
    weights = defaultdict(float)

    def add(name, total, weight):
        sums[name] += total
        weights[name] += weight

    for root in turns[0]:
        for i, value in enumerate(root.value):
            add("return", value, 1)
            add(f"agent_{i}/return", value, 1)
    for t, nodes in enumerate(turns, 1):
        for node in nodes:
            for i, group in node.groups.items():
                G = len(group.completions)
                tokens = sum(map(len, group.completion_ids))
                # the entropy in nats per token, estimated from the tokens that were drawn
                add(f"agent_{i}/entropy", -sum(map(sum, group.logprobs)), tokens)
                add(f"agent_{i}/completion_length", tokens, G)
                add(f"agent_{i}/stopped", sum(group.stopped), G)
            for child in node.children:
                add(f"reward_turn{t}", child.weight * child.reward.mean(), child.weight)
                # parts are logged where a branch ends
                if not child.children:
                    for name, value in child.step.parts.items():
                        add(name, child.weight * float(value), child.weight)
    return {f"{split}/{name}": sums[name] / weights[name] for name in sums}


def log_rollouts(run_dir, iteration, split, turns, num_tasks):
    """A line of rollouts.jsonl for each node of the first tasks: what agents read and wrote, and what it was worth."""
    logged = {root.path[0] for root in turns[0][:num_tasks]}
    with open(f"{run_dir}/rollouts.jsonl", "a") as file:
        for node in chain(*turns):
            task_number, *path = node.path
            if task_number not in logged:
                continue
            line = {
                "iteration": iteration,
                "split": split,
                "turn": len(node.path),
                "task_number": task_number,
                "task": node.task,
                "path": path,
                "weight": node.weight,
                "joint": [child.choice for child in node.children],
                "rewards": [child.reward for child in node.children],
                "parts": [child.step.parts for child in node.children],
                "feedback": [child.step.feedback for child in node.children],
                "agents": [node.groups.get(i) for i in range(len(node.value))],
            }
            # skipkeys: JSON has no tuples as keys
            print(json.dumps(line, default=to_json, skipkeys=True), file=file)


def to_json(value):
    """A Group without its tokens, arrays and tensors as lists, other objects as strings."""
    if isinstance(value, Group):
        return {name: getattr(value, name) for name in ("prompt", "completions", "stopped", "returns", "advantages")}
    return value.tolist() if hasattr(value, "tolist") else str(value)


def evaluate(args, run_dir, env, policies, tasks, iteration):
    """Metrics of the held-out tasks; logs their rollouts. Always the same seed, so that evaluations compare."""
    reseed(args.seed, 0)
    group_sizes = [args.eval_generations] + [1] * (args.num_turns - 1)
    turns = rollout(args, env, policies, tasks, group_sizes, "align")
    log_rollouts(run_dir, iteration, args.eval_split, turns, len(tasks))
    metrics = summarize("eval", turns)
    # standard error of the mean over tasks
    returns = [root.value.mean() for root in turns[0]]
    error = np.std(returns) / max(1, len(returns) - 1) ** 0.5
    metrics["eval/return_se"] = error
    tqdm.write(f"iteration {iteration}: evaluation return {metrics['eval/return']:.3f} +- {error:.3f}")
    return metrics


def log_metrics(args, run_dir, iteration, metrics):
    """A line of metrics.jsonl; ends the run at the first metric that is not finite."""
    for name, value in metrics.items():
        if not np.isfinite(value):
            sys.exit(f"error: {name} is {value}: resume with a lower --learning-rate, or fix the reward of --env.")
    with open(f"{run_dir}/metrics.jsonl", "a") as file:
        print(json.dumps({"iteration": iteration, **metrics}), file=file)
    if args.track != "none":
        import_module(args.track).log(metrics, step=iteration)


@torch.no_grad()
def full_state_dict(tensors):
    """The full tensors, on the CPU of the first process. All processes take part."""
    full = {}
    for name, value in tensors.items():
        if isinstance(value, DTensor):
            value = value.full_tensor()
        # one after the other, as a GPU cannot hold all
        if RANK == 0:
            full[name] = value.cpu()
    return full


def shard_like(value, p):
    """What this process keeps of a full tensor that is sharded like the parameter p."""
    return distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)


def full_states(policies):
    """Weights and optimizer states for save_checkpoint(). All processes take part."""
    optimizers = [policy.optimizer.state_dict() for policy in policies]
    for optimizer in optimizers:
        optimizer["state"] = {k: full_state_dict(state) for k, state in optimizer["state"].items()}
    return {"models": [full_state_dict(policy.trained) for policy in policies], "optimizers": optimizers}


def save_checkpoint(run_dir, iteration, states):
    """Writes state.pt, from which any number of processes resumes."""
    state = states | {
        "iteration": iteration,
        "sizes": {name: os.path.getsize(f"{run_dir}/{name}") for name in ("metrics.jsonl", "rollouts.jsonl")},
    }
    torch.save(state, f"{run_dir}/state.tmp")
    os.replace(f"{run_dir}/state.tmp", f"{run_dir}/state.pt")  # atomic: a crash keeps the old checkpoint


def load_checkpoint(run_dir, learners):
    """Restores weights and moments, cuts the logs back to the checkpoint, and returns its iteration."""
    # each process reads only its shards
    state = torch.load(f"{run_dir}/state.pt", map_location="cpu", mmap=True)
    for policy, weights, moments in zip(learners, state["models"], state["optimizers"], strict=True):
        if WORLD_SIZE > 1:
            for name, p in policy.trained.items():
                weights[name] = shard_like(weights[name], p)
            for moment, p in zip(moments["state"].values(), policy.trained.values()):
                for name in "exp_avg", "exp_avg_sq":
                    moment[name] = shard_like(moment[name], p)
        policy.model.load_state_dict(weights, strict=False)  # with LoRA, only the adapter
        policy.optimizer.load_state_dict(moments)
    for name, size in state["sizes"].items():
        path = f"{run_dir}/{name}"
        # truncate() would pad a shorter file
        os.truncate(path, min(size, os.path.getsize(path)))
    return state["iteration"]


# ---- the algorithm: the rollout tree, the update, then the loop


def fill_groups(args, env, policies, nodes, G):
    """At each node each agent that has a prompt draws G completions of it."""
    requests = defaultdict(list)  # policy -> its Groups
    for node in nodes:
        weight = node.weight / G * args.gamma ** len(node.history)  # w * gamma^turn
        prompts = env.observe(node.task, node.history)
        for i, (policy, prompt) in enumerate(zip(policies, prompts, strict=True)):
            if prompt is not None:
                node.groups[i] = Group(policy, prompt, encode(policy, prompt), weight)
                requests[policy].append(node.groups[i])
    # one batch per policy, for all agents that it plays
    for policy, groups in requests.items():
        complete(args, policy, groups, G)


def rollout(args, env, policies, tasks, group_sizes, joint_mode):
    """Grows a tree of joint actions for each task; G = group_sizes[t] at turn t. Returns the nodes of each turn."""
    N = len(policies)
    turns = []
    nodes = [Node([number], task, 1 / len(tasks)) for number, task in tasks]
    for G in group_sizes:
        fill_groups(args, env, policies, nodes, G)

        # each joint action leads to a child
        for node in nodes:
            if joint_mode == "align":
                choices = [(g,) * N for g in range(G)]
            else:  # cross: all combinations, in which a silent agent has one choice
                choices = list(product(*[range(G if i in node.groups else 1) for i in range(N)]))
            for j, choice in enumerate(choices):
                actions = [""] * N
                for i, group in node.groups.items():
                    actions[i] = group.completions[choice[i]]
                child = Node([*node.path, j], node.task, node.weight / len(choices), choice, actions)
                node.children.append(child)

        # all are scored in one call, since some environments run tests
        edges = [(node, child) for node in nodes for child in node.children]
        steps = env.step([(node.task, node.history, child.actions) for node, child in edges])
        for (node, child), step in zip(edges, steps, strict=True):
            child.step = step
            child.history = [*node.history, (child.actions, step)]
            # a number, list, array or tensor of any type, on any device
            child.reward = torch.as_tensor(step.reward, dtype=torch.float64).numpy(force=True)
        turns.append(nodes)
        nodes = [child for _, child in edges if not child.step.done]
        if not nodes:
            break

    # returns, from the leaves to the roots; float64, as advantages are small differences
    for node in chain(*reversed(turns)):
        for child in node.children:
            child.returns = np.zeros(N) + child.reward + args.gamma * child.value
        joint_returns = np.array([child.returns for child in node.children])  # (J, N)
        node.value = joint_returns.mean(0)
        for i, group in node.groups.items():
            # bincount adds up, and counts, the joint actions of each completion
            chosen = [child.choice[i] for child in node.children]  # (J,), index of agent i's completion
            group.returns = np.bincount(chosen, weights=joint_returns[:, i]) / np.bincount(chosen)  # (G,)
            group.peer_returns = group.returns
    return turns


def compare_trajectories(turns):
    """Compares each completion with all trajectories of its task: with their returns from the same turn on."""
    for root in turns[0]:
        nodes = root.children
        for _ in turns[1:]:
            # an ended trajectory keeps its last return: unbiased, as no completion of this turn changes it
            peers = [node.children[0] if node.children else node for node in nodes]
            for node in nodes:
                for i, group in node.groups.items():
                    group.peer_returns = np.array([peer.returns[i] for peer in peers])  # (G,)
            nodes = peers


def update(args, policy, groups, learning_rate):
    """One optimizer step of a policy. Returns the norm of its gradient before clipping."""
    # equal completions of a prompt are trained once, with the sum of their factors
    factors = defaultdict(float)
    for group in groups:
        if group.policy is policy:
            for completion_ids, advantage in zip(group.completion_ids, group.advantages.tolist()):
                factors[group.prompt_ids, completion_ids] += group.weight * advantage / args.max_new_tokens
    # equal returns leave rounding errors, which Adam would turn into full steps; NaN stays, to end the run
    examples = [
        Example(*sequences, factor) for sequences, factor in factors.items() if abs(factor) > 1e-14 or np.isnan(factor)
    ]
    accumulate_gradients(args, policy, examples)
    policy.optimizer.param_groups[0]["lr"] = learning_rate
    return optimizer_step(args, policy)


if __name__ == "__main__":
    args = read_args()
    tiny = set(args.model) == {"tiny"}
    args.max_new_tokens = args.max_new_tokens or (96 if tiny else 256)
    args.learning_rate = args.learning_rate or [(4e-4 if tiny else 5e-6) * (10 if args.lora_rank else 1)]
    N = args.num_agents
    B = args.num_tasks
    G = args.num_generations
    num_policies = 1 if args.share_policy else N
    # one value is that of all policies
    models = args.model * num_policies if len(args.model) == 1 else args.model
    rates = args.learning_rate * num_policies if len(args.learning_rate) == 1 else args.learning_rate
    if len(models) != num_policies or len(rates) != num_policies or min(rates) < 0:
        sys.exit("error: --model, --learning-rate (from 0 on): give one or, without --share-policy, one per agent.")
    trajectories = args.branching == "trajectories"
    if trajectories and args.joint_mode == "cross":
        sys.exit("error: --joint-mode cross: the agents of --branching trajectories are aligned; leave it out.")
    if WORLD_SIZE > 1:
        # long timeout: other ranks wait while the first evaluates
        dist.init_process_group(timeout=timedelta(days=1))
    if ON_GPU:
        torch.cuda.set_device(DEVICE)
        torch.set_float32_matmul_precision("high")  # TF32, precise enough for the output head
    elif tiny:
        torch.set_num_threads(1)  # it is too small to gain from threads
    run_name = f"{args.env}__{SCRIPT[:-3]}__{args.seed}__{datetime.now():%Y%m%d-%H%M%S.%f}".replace(":", ".")
    run_dir = args.resume or f"{os.path.expanduser(args.output_dir)}/{run_name}"
    # before loading models, so that a missing API key fails early
    if args.track != "none" and RANK == 0:
        import_module(args.track).init(project="tutti", name=run_name, config=asdict(args))

    # environment
    env = load_environment(args)
    T = args.num_turns = getattr(env, "num_turns", args.num_turns)
    train_tasks = list(enumerate(env.tasks("train")))  # pairs (number, task)
    eval_tasks = list(enumerate(env.tasks(args.eval_split)))
    np.random.default_rng(0).shuffle(eval_tasks)
    eval_tasks = eval_tasks[: args.eval_tasks or None]  # 0: all
    # task order: shuffled epochs, concatenated
    rng = np.random.default_rng(args.seed)
    num_epochs = args.num_iterations * B // len(train_tasks) + 1
    order = np.concatenate([rng.permutation(len(train_tasks)) for _ in range(num_epochs)])
    # cross scores G^N joint actions, each of which may start a branch
    joint_mode = args.joint_mode or ("cross" if T == 1 and G**N <= 100 and not trajectories else "align")
    group_sizes = [G] + [1] * (T - 1) if trajectories else [G] * T

    # policies
    torch.manual_seed(args.seed)  # identical adapters in all processes
    base_models = {}
    learners = [load_policy(args, name, base_models) for name in models]
    policies = learners * N if args.share_policy else learners  # that of each agent

    # run folder
    start = load_checkpoint(run_dir, learners) if args.resume else 0
    unshard(learners)
    if RANK == 0:
        os.makedirs(run_dir, exist_ok=True)
        print("logs, texts and agents are in", run_dir)
        with open(f"{run_dir}/args.json", "w") as file:
            commit = os.popen(f"git -C '{FOLDER}' rev-parse HEAD 2>/dev/null").read().strip()
            values = {**asdict(args), "resume": None, "config": None}
            json.dump({"script": SCRIPT, "args": values, "commit": commit}, file, indent=2)
        if not args.resume:
            log_metrics(args, run_dir, 0, evaluate(args, run_dir, env, policies, eval_tasks, 0))

    last = args.num_iterations
    eval_every = args.eval_every or last
    for iteration in tqdm(range(start + 1, last + 1), disable=RANK > 0):
        # 1 ROLLOUT: for each of this process's tasks a tree, or G trajectories
        began = perf_counter()
        reseed(args.seed, iteration)
        tasks = [train_tasks[k] for k in order[(iteration - 1) * B : iteration * B]]  # (B,)
        turns = rollout(args, env, policies, tasks[RANK::WORLD_SIZE], group_sizes, joint_mode)
        if trajectories:
            compare_trajectories(turns)
        groups = [group for node in chain(*turns) for group in node.groups.values()]
        metrics = summarize("train", turns)

        # 2 ADVANTAGES: the critic-free scripts differ between the two marks
        for group in groups:
            # >>> ALGORITHM
            group.advantages = group.returns - group.peer_returns.mean()
            # <<< ALGORITHM
        metrics["train/zero_variance_groups"] = np.mean([np.ptp(group.peer_returns) < 1e-9 for group in groups])

        # 3 UPDATE: one optimizer step for each policy; one that all agents share is logged as agent 0's
        reshard(learners)
        decay = 1 - (iteration - 1) / last if args.anneal_lr else 1.0
        for i, policy in enumerate(learners):
            if rates[i] > 0:
                metrics[f"agent_{i}/grad_norm"] = update(args, policy, groups, decay * rates[i])
        metrics["tokens"] = sum(len(ids) for group in groups for ids in group.completion_ids)
        metrics["time/iteration"] = perf_counter() - began

        # all processes take part in gathering what the first one saves, and evaluates with
        milestone = iteration == last or iteration % eval_every == 0
        if milestone:
            states = full_states(learners)
        unshard(learners)
        if RANK == 0:
            # 4 LOG: what the agents wrote
            log_rollouts(run_dir, iteration, "train", turns, num_tasks=2)

            # 5 EVALUATE: logged in the same line of metrics.jsonl
            if milestone:
                metrics |= evaluate(args, run_dir, env, policies, eval_tasks, iteration)
            log_metrics(args, run_dir, iteration, metrics)

            # 6 CHECKPOINT
            if milestone:
                save_checkpoint(run_dir, iteration, states)
                del states

    if args.num_iterations > 0:
        for i, policy in enumerate(learners):
            weights = full_state_dict(policy.model.state_dict())
            if RANK > 0:
                continue
            # tied weights are saved once
            for name in policy.model.all_tied_weights_keys:
                weights.pop(name, None)
            policy.model.save_pretrained(f"{run_dir}/agent_{i}", state_dict=weights)
            policy.tokenizer.save_pretrained(f"{run_dir}/agent_{i}")
    if WORLD_SIZE > 1:
        # pending collectives must release their tensors before exit, or Python aborts (pytorch 179291)
        dist.barrier()
        dist.destroy_process_group()
