"""MARLOO: each agent follows the leave-one-out advantage of the return that all agents share.

    python marloo.py --env tldr --num-agents 2    (nano.py: MAGRPO in two fifths of the code; read that first)

    A_g = R_g - mean of the G-1 others
    L_i = - sum over nodes and g of  w * gamma^turn * A_g * sum_t log pi_i(y_g,t | x, y_g,<t) / max_new_tokens

At a node of the rollout tree agent i draws G completions y_1 .. y_G of its own prompt x. A joint action, one of each
agent, returns its reward plus gamma times the mean return of its child node, and R_g is the mean return of those that
contain y_g. w is the probability that a trajectory of a random task passes through y_g. The first turn is 0, logged
as 1. With --branching trajectories, G start from each task and do not branch: R_1 .. R_G are their returns from the
same turn on, and an ended one keeps its last return (docs/credit.md).

E[-grad L_i] = grad E[return] / max_new_tokens: unbiased, and G/(G-1) times MAGRPO's. Adam all but cancels this factor:
nearly equal curves are no bug. With one agent this is RLOO (Kool et al., 2019; arXiv 2402.14740).

Left out on purpose: division by the group's standard deviation or by the completion's length (both bias the
gradient), the clipped ratio (there is one optimizer step per rollout, so it is always 1), a KL penalty.
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
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import tyro
import yaml
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig, set_seed
from transformers.cache_utils import Cache, StaticLayer

# N agents, B tasks, G generations, J joint actions, T turns, P prompt tokens, C completion tokens, V vocabulary,
# R rows of a batch, L columns of its cache. An agent is a seat; the policy is who plays it.

RANK = int(os.environ.get("RANK", 0))  # rank under torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if ON_GPU else "cpu")
AUTOCAST = torch.autocast(DEVICE.type, torch.bfloat16, enabled=ON_GPU)
CHECK_EVERY = 16 if ON_GPU else 1  # tokens between looks at which rows have stopped; a GPU has to wait for each


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
    branching: Literal["tree", "trajectories"] = "tree"  # G at every node; or G at the first, then one at each
    joint_mode: Literal["align", "cross"] | None = None  # cross: all G^N (default if T=1, G^N <= 100); align: g with g
    temperature: float = 1.0  # for sampling and for the trained log-probabilities; 0: greedy, to evaluate
    max_new_tokens: int | None = None  # C; default 256, and 96 for tiny
    batch_size: int = 16  # completions in a training batch; sampling takes 16 times as many
    cuda_graphs: bool = True  # on a GPU, replay a decoding step as one CUDA graph
    # optimization
    num_tasks: int = 4  # B, tasks per iteration; a multiple of the number of processes
    learning_rate: list[float] = field(default_factory=list)  # of AdamW; one, or one per agent; 0 freezes it
    anneal_lr: bool = True  # decay the learning rate linearly to 0
    gamma: float = 1.0  # discount per turn
    max_grad_norm: float = 1.0  # gradient clipping, per agent; 0: none
    # evaluation
    eval_every: int = 20  # iterations between evaluations, each with a checkpoint; 0: only before and after training
    eval_tasks: int = 64  # held-out tasks, the same in each evaluation; 0: all
    eval_split: Literal["test", "train"] = "test"  # train, with --num-iterations 0: collect answers for sft.py
    eval_generations: int = 1  # trajectories per held-out task


# ---- set-up (to read the algorithm, skip to "the algorithm")


def read_args():
    """The command line, with defaults from the run that is resumed and from a config file."""
    args = tyro.cli(Args, description=__doc__)
    # the files' values as command-line arguments, so that tyro converts and checks them; the last one wins
    words = []
    for path in filter(None, [args.resume and f"{args.resume}/args.json", args.config]):
        with open(path) as file:
            values = yaml.safe_load(file)
        for name, value in values.get("args", values).items():
            if isinstance(value, bool):
                words.append(f"--{name}" if value else f"--no-{name}")
            else:
                value = list(value.items()) if isinstance(value, dict) else value
                words += [f"--{name}", *map(str, np.ravel(value))]
    return tyro.cli(Args, description=__doc__, args=words + sys.argv[1:])


def load_environment(args):
    """An instance of the environment's class."""
    options = {name: getattr(args, name) for name in ("num_agents", "num_turns", "dataset", "seed")} | args.env_kwargs
    module, _, class_name = args.env.partition(":")
    # your own class works without envs/
    if class_name and "+" not in args.env:
        return getattr(import_module(module), class_name)(**options)
    return import_module("envs").make(args.env, **options)


@dataclass(eq=False)
class Policy:
    """A model with its tokenizer and its optimizer, which plays one agent or, shared, all of them."""

    model: Any
    tokenizer: Any
    stop_ids: list[int]  # tokens that end a completion
    chat_markers: list[str]  # special tokens that open or close a turn or a document
    cuda_graphs: bool  # whether decoding steps are captured
    trained: dict  # name -> parameter
    optimizer: Any


class Float32Head(torch.nn.Linear):
    """An output head that autocast leaves alone: in bfloat16, log-probabilities are off by hundredths of a nat."""

    def forward(self, hidden):
        with torch.autocast(DEVICE.type, enabled=False):
            return super().forward(hidden.float())


def load_policy(args, name, base_models):
    """Loads a model; LoRA policies of the same model share its frozen weights, kept in base_models."""
    path = f"{os.path.dirname(__file__)}/models/tiny" if name == "tiny" else name
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = base_models.get(path)
    if model is None:
        dtype = torch.bfloat16 if args.lora_rank and ON_GPU else torch.float32
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(DEVICE)
    if model._is_stateful or not model.is_backend_compatible():
        sys.exit(f"error: --model {path}: recurrent layers or custom attention masks are not supported; use nano.py.")
    stop_ids, chat_markers = special_tokens_of(tokenizer, model)
    if not stop_ids:
        sys.exit(f"error: --model {path}: no token ends a completion; set eos_token_id in its generation_config.json.")
    # changes the head in place, so that it stays tied to the embeddings
    model.get_output_embeddings().float().__class__ = Float32Head
    if args.lora_rank:
        base_models[path] = model
        model = add_lora(model, args.lora_rank)
    # disables dropout, also in training
    model.eval()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for p in trained.values():
        # adapters have the base model's dtype
        p.data = p.data.float()
    # saved agents sample as in training
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=args.temperature, top_k=0, eos_token_id=stop_ids
    )
    optimizer = torch.optim.AdamW(trained.values(), weight_decay=0.0, fused=True)
    return Policy(model, tokenizer, stop_ids, chat_markers, ON_GPU and args.cuda_graphs, trained, optimizer)


def add_lora(model, rank):
    """A copy of the model with an adapter of its own: new modules, but the same frozen weights."""
    # parameters in memo are shared, not copied
    model = copy.deepcopy(model, memo={id(p): p for p in model.parameters()})
    peft = import_module("peft")
    model.add_adapter(peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model


def special_tokens_of(tokenizer, model):
    """Ids of the tokens that end a completion, and the special tokens that open or close a turn or a document."""
    stop_ids = {tokenizer.eos_token_id, *np.ravel(model.generation_config.eos_token_id).tolist()} - {None}
    text = ""
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ANSWER"}]
        text = tokenizer.apply_chat_template(chat, tokenize=False)
    chat_markers = []
    for token_id, token in tokenizer.added_tokens_decoder.items():
        # base models do not list the template's end-of-turn token
        if text.partition("ANSWER")[2].lstrip().startswith(token.content):
            stop_ids.add(token_id)
        # thoughts are part of a message
        written = token.special and token.content in text and "think" not in token.content
        if written or token_id in {tokenizer.bos_token_id, *stop_ids}:
            chat_markers.append(token.content)
    return sorted(stop_ids), chat_markers


def reseed(seed, iteration):
    """Each iteration and process has a seed of its own, so that a resumed run needs no generator's state."""
    set_seed(np.random.SeedSequence([seed, RANK, iteration]).generate_state(1).item())


# ---- engine: prompts, sampling, log-probabilities


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
    if not prompt_ids or prompt.strip() not in text:
        sys.exit("error: --model: a prompt is empty, or the chat template leaves it out; use one that takes a string.")
    return prompt_ids


def draw(logits, temperature):
    """A token for each row of logits (R, V), and its log-probability: (R,), (R,). Temperature 0: greedy."""
    probs = (logits.float() / max(temperature, 1e-6)).softmax(-1)
    # inverse CDF in float64: the first token whose cumulative probability exceeds a uniform random number
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    threshold = cumulative[:, -1:] * torch.rand_like(cumulative[:, :1])
    tokens = torch.searchsorted(cumulative, threshold, right=True)
    # NaN logits give index V: clamp it; the NaN metric ends the run
    tokens = tokens.clamp(max=probs.shape[-1] - 1)  # (R, 1)
    logprobs = probs.gather(-1, tokens).log()
    return tokens[:, 0], logprobs[:, 0]


def prefill(model, cache, prompt_ids):
    """Reads R prompts into R rows of the cache; equal ones are computed once.

    Returns the last logits (R, V), and which columns are not padding (R, P).
    """
    distinct = list(dict.fromkeys(map(tuple, prompt_ids)))
    sequences = [torch.tensor(ids, device=DEVICE) for ids in distinct]
    padded = pad_sequence(sequences, batch_first=True, padding_value=-1, padding_side="left")
    real = (padded >= 0).long()
    inputs = {"attention_mask": real, "position_ids": (real.cumsum(1) - 1).clamp(min=0)}
    outputs = model(padded.clamp(min=0), past_key_values=cache, logits_to_keep=1, **inputs)
    rows = torch.tensor([distinct.index(tuple(ids)) for ids in prompt_ids], device=DEVICE)  # (R,)
    cache.reorder_cache(rows)
    return outputs.logits[rows, 0], real[rows]


class FixedCache(Cache):
    """Keys and values of L tokens per row, changed in place, so that a CUDA graph can repeat a decoding step.

    Layers with a sliding window keep all tokens, too; the model's masks hide the old ones.
    """

    def __init__(self, model, length):
        layers = model.config.get_text_config().num_hidden_layers
        super().__init__([StaticLayer(length) for _ in range(layers)])

    def update(self, keys, values, *args, **kwargs):
        # store in attention's dtype: RoPE returns float32, also under autocast
        return super().update(keys.to(values.dtype), values, *args, **kwargs)


def capture(policy, step):
    """Returns a function that repeats step() as a CUDA graph, by one launch; step itself if it cannot be captured."""
    config = str(policy.model.config)
    try:
        # a graph would repeat the rotations of one length
        if not policy.model._can_compile_fullgraph or '"dynamic"' in config or '"longrope"' in config:
            raise RuntimeError("a decoding step depends on the length")
        graph = torch.cuda.CUDAGraph()
        # thread_local lets NCCL's thread run
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            logits = step()
    except RuntimeError as error:
        tqdm.write(f"--model: no CUDA graph, so decoding is several times slower: {error}")
        policy.cuda_graphs = False
        # a failed capture leaves its own stream behind
        torch.cuda.set_stream(torch.cuda.default_stream())
        return step

    def replay():
        graph.replay()
        return logits

    return replay


@torch.no_grad()
def sample(policy, prompt_ids, G, temperature, C):
    """Draws G completions of each of B prompts from the model's full distribution; temperature 0: greedy.

    Returns B lists of G pairs (token ids, log-probabilities), up to and including the first stop token.
    """
    # attention kernels need multiples of 16
    L = (max(map(len, prompt_ids)) + C + 15) // 16 * 16
    cache = FixedCache(policy.model, L)
    logits, real = prefill(policy.model, cache, [ids for ids in prompt_ids for _ in range(G)])
    inputs = {
        "input_ids": real[:, :1].clone(),  # (R, 1), overwritten by sampled tokens
        "position_ids": real.sum(1, keepdim=True),  # (R, 1)
        # the model's causal mask hides the columns that are still empty
        "attention_mask": pad(real, (0, L - real.shape[1]), value=1),  # (R, L)
    }

    def step():
        logits = policy.model(past_key_values=cache, **inputs).logits[:, 0]  # (R, V)
        inputs["position_ids"].add_(1)
        return logits

    stop_ids = torch.tensor(policy.stop_ids, device=DEVICE)
    numbers = torch.arange(len(real), device=DEVICE)  # (R,), the completion of each row
    running = torch.ones_like(numbers, dtype=torch.bool)  # (R,), True until the stop token
    all_tokens = torch.zeros(len(real), C, dtype=torch.long, device=DEVICE)
    all_logprobs = torch.zeros(len(real), C, device=DEVICE)
    lengths = torch.zeros_like(numbers)
    for t in range(C):
        tokens, logprobs = draw(logits, temperature)  # (R,)
        all_tokens[numbers, t] = tokens
        all_logprobs[numbers, t] = logprobs
        lengths[numbers] += running
        running = running & ~torch.isin(tokens, stop_ids)
        # finished rows decode on; their tokens are ignored
        inputs["input_ids"].copy_(tokens[:, None])
        if t % CHECK_EVERY == 0:
            rows = running.nonzero()[:, 0]
            if len(rows) == 0:
                break
            # on a CPU, drop finished rows when an eighth is done (it copies the cache); step() reads the new inputs
            if not ON_GPU and len(rows) <= 0.875 * len(running):
                numbers = numbers[rows]
                running = running[rows]
                cache.reorder_cache(rows)
                inputs = {name: tensor[rows] for name, tensor in inputs.items()}
        logits = step()
        # the first step is eager: libraries initialise lazily, which cannot be captured
        if t == 0 and policy.cuda_graphs:
            step = capture(policy, step)

    sampled = zip(all_tokens.tolist(), all_logprobs.tolist(), lengths.tolist())
    pairs = [(ids[:length], logprobs[:length]) for ids, logprobs, length in sampled]
    return [pairs[k : k + G] for k in range(0, len(pairs), G)]


def complete(args, policy, prompts, G):
    """Draws a policy's G completions of each prompt: a Group for each."""
    all_prompt_ids = [encode(policy, prompt) for prompt in prompts]
    size = max(1, 16 * args.batch_size // G)
    samples = []
    # one autocast context, so that weights are cast once; inference mode, faster on a CPU, would cast them each time
    with AUTOCAST, torch.inference_mode(not ON_GPU):
        for k in range(0, len(prompts), size):
            samples += sample(policy, all_prompt_ids[k : k + size], G, args.temperature, args.max_new_tokens)
    groups = []
    for prompt, prompt_ids, pairs in zip(prompts, all_prompt_ids, samples):
        completion_ids, logprobs = zip(*pairs)
        stopped = [ids[-1] in policy.stop_ids for ids in completion_ids]
        # keep special tokens that environments parse; drop only the stop token
        kept = [[token for token in ids if token not in policy.stop_ids] for ids in completion_ids]
        completions = policy.tokenizer.batch_decode(kept)
        # the template opened a thought: put it back, so that environments can drop it
        if policy.tokenizer.decode(prompt_ids[-8:]).rstrip().endswith("<think>"):
            completions = ["<think>" + completion for completion in completions]
        groups.append(Group(prompt, prompt_ids, completions, completion_ids, logprobs, stopped))
    return groups


def token_logprobs(policy, prompt_ids, completion_ids, temperature):
    """Log-probabilities of the tokens of R completions, given the prompt of each: (R, C), 0 after their ends.

    Gradients flow through the prompts' cache, too.
    """
    cache = DynamicCache()
    # the last token of a prompt predicts the first one of its completions; -1 is padding, for prompts of one token
    _, real = prefill(policy.model, cache, [ids[:-1] or [-1] for ids in prompt_ids])
    sequences = [torch.tensor([prompt[-1], *ids]) for prompt, ids in zip(prompt_ids, completion_ids)]
    padded = pad_sequence(sequences, batch_first=True, padding_value=-1).to(DEVICE)  # (R, 1 + C)
    # causal attention never sees padding on the right
    mask = torch.cat([real, torch.ones_like(padded[:, 1:])], 1)  # (R, P - 1 + C)
    inputs = {"attention_mask": mask, "position_ids": mask.cumsum(1)[:, real.shape[1] :] - 1}
    logits = policy.model(padded[:, :-1].clamp(min=0), past_key_values=cache, **inputs).logits / temperature
    tokens = padded[:, 1:]
    losses = cross_entropy(logits.flatten(0, 1), tokens.flatten(), ignore_index=-1, reduction="none")
    return -losses.view(tokens.shape)


# ---- logging and checkpoints


def summarize(split, turns):
    """The logged metrics of a rollout: weighted means, each a sum of values divided by a sum of weights."""
    sums = defaultdict(lambda: np.zeros(2))  # name -> the two sums
    parts = defaultdict(lambda: np.zeros(2))  # the same, of the environment's own names
    for root in turns[0]:
        for i, value in enumerate(root.value):
            sums["return"] += value, 1
            sums[f"agent_{i}/return"] += value, 1
    for t, nodes in enumerate(turns, 1):
        for node in nodes:
            for i, group in node.groups.items():
                G = len(group.completions)
                tokens = sum(map(len, group.completion_ids))
                # an estimate, in nats per token
                sums[f"agent_{i}/entropy"] += -sum(map(sum, group.logprobs)), tokens
                sums[f"agent_{i}/completion_length"] += tokens, G
                sums[f"agent_{i}/stopped"] += sum(group.stopped), G
            # probability of a joint action
            chance = node.weight / len(node.steps)
            for choice, step, reward, child in zip(node.joint, node.steps, node.rewards, node.children):
                sums[f"reward_turn{t}"] += chance * reward.mean(), chance
                # agents answer at the same time, so a turn takes as long as its longest completion
                longest = max(len(group.completion_ids[choice[i]]) for i, group in node.groups.items())
                sums["critical_tokens"] += chance * longest, chance if t == 1 else 0
                # parts are logged where a branch ends
                if child is None:
                    for name, value in step.parts.items():
                        parts[name] += chance * float(value), chance
    for name in parts.keys() & {*sums, "return_se", "zero_variance_groups"}:
        sys.exit(f"error: --env: {name} is the name of a metric; give that part of the reward another.")
    return {f"{split}/{name}": total / weight for name, (total, weight) in (sums | parts).items()}


def records(iteration, split, turns, num_roots=None):
    """Lines for rollouts.jsonl, one per node of the first tasks: what agents read and wrote, and what it was worth."""
    shown = {root.task_number for root in turns[0][:num_roots]}
    for node in chain(*turns):
        if node.task_number not in shown:
            continue
        names = dict.fromkeys(chain(*[step.parts for step in node.steps]))
        line = {
            "iteration": iteration,
            "split": split,
            "turn": len(node.path) + 1,
            "task_number": node.task_number,
            "task": node.task,
            "path": node.path,
            "weight": node.weight,
            "joint": node.joint,
            "rewards": node.rewards,
            "parts": {name: [step.parts.get(name) for step in node.steps] for name in names},
            "feedback": [step.feedback for step in node.steps],
            "agents": [record_of(node.groups.get(i)) for i in range(len(node.value))],
        }
        # keys that are tuples are left out
        yield json.dumps(line, default=to_json, skipkeys=True) + "\n"


def to_json(value):
    """Arrays and tensors as lists, other objects as strings."""
    return value.tolist() if isinstance(value, (np.ndarray, np.generic, torch.Tensor)) else str(value)


def record_of(group):
    """A group without its tokens; None for a silent agent."""
    names = ["prompt", "completions", "stopped", "returns", "advantages"]
    return group and {name: getattr(group, name) for name in names}


def evaluate(args, env, players, tasks, iteration):
    """Metrics and lines for rollouts.jsonl of the held-out tasks. One seed, so that evaluations can be compared."""
    reseed(args.seed, 0)
    generations = [args.eval_generations, *[1] * (args.num_turns - 1)]
    turns = rollout(args, env, players, tasks, generations, "align")
    metrics = summarize("eval", turns)
    # standard error of the mean over tasks
    returns = [root.value.mean() for root in turns[0]]
    error = np.std(returns) / max(1, len(returns) - 1) ** 0.5
    metrics["eval/return_se"] = error
    # print would garble the progress bar
    tqdm.write(f"iteration {iteration}: evaluation return {metrics['eval/return']:.3f} +- {error:.3f}")
    return metrics, records(iteration, args.eval_split, turns)


def log(args, run_dir, iteration, metrics, lines):
    """Writes metrics and rollouts of an iteration; ends the run at the first metric that is not finite."""
    for name, value in metrics.items():
        if not np.isfinite(value):
            sys.exit(f"error: {name} is {value}: resume with a lower --learning-rate, or fix the reward of --env.")
    with open(f"{run_dir}/metrics.jsonl", "a") as file:
        file.write(json.dumps({"iteration": iteration, **metrics}) + "\n")
    with open(f"{run_dir}/rollouts.jsonl", "a") as file:
        file.writelines(lines)
    if args.track != "none":
        import_module(args.track).log(metrics, step=iteration)


def save_checkpoint(run_dir, iteration, policies):
    """Writes state.pt, from which any number of processes resumes."""
    state = {
        "iteration": iteration,
        "models": [policy.trained for policy in policies],
        "optimizers": [policy.optimizer.state_dict() for policy in policies],
        "sizes": {name: os.path.getsize(f"{run_dir}/{name}") for name in ("metrics.jsonl", "rollouts.jsonl")},
    }
    torch.save(state, f"{run_dir}/state.tmp")
    # atomic: a crash keeps the old checkpoint
    os.replace(f"{run_dir}/state.tmp", f"{run_dir}/state.pt")


def load_checkpoint(run_dir, policies):
    """Restores weights and moments, cuts the logs back to the checkpoint, and returns its iteration."""
    state = torch.load(f"{run_dir}/state.pt", map_location="cpu")
    try:
        for policy, weights, moments in zip(policies, state["models"], state["optimizers"], strict=True):
            policy.model.load_state_dict(weights, strict=False)  # with LoRA, only the adapter
            policy.optimizer.load_state_dict(moments)
    except (KeyError, RuntimeError, ValueError):
        sys.exit("error: --resume: the checkpoint has different agents; leave out --model, --num-agents, --lora-rank.")
    for name, size in state["sizes"].items():
        os.truncate(f"{run_dir}/{name}", size)
    return state["iteration"]


# ---- the algorithm: the rollout tree, then the loop


@dataclass(eq=False)
class Group:
    """An agent's G completions of its prompt at a node."""

    prompt: str
    prompt_ids: list[int]  # (P,)
    completions: list[str]  # (G,)
    completion_ids: list[list[int]]  # G lists, up to and including the stop token
    logprobs: list[list[float]]  # G lists, of the policy that sampled
    stopped: list[bool]  # (G,), whether it ended with a stop token
    returns: Any = None  # (G,), mean return of the joint actions that contain the completion
    compared: Any = None  # what they are compared with: in a tree the same, else those of all trajectories
    advantages: Any = None  # (G,)


@dataclass(eq=False)
class Node:
    """A place in the rollout tree of a task: agents speak, and each of J joint actions leads to a child."""

    task_number: int
    task: dict
    path: list[int]  # the position in joint of each joint action that led here
    history: list  # of the earlier turns: pairs of the joint action and its Step (reward, parts, done, feedback)
    weight: float  # probability that a trajectory of a random task visits this node
    groups: dict = field(default_factory=dict)  # agent -> Group; a silent agent has none
    joint: list = field(default_factory=list)  # J tuples, the index of each agent's completion
    steps: list = field(default_factory=list)  # J Steps
    rewards: list = field(default_factory=list)  # J arrays: () if agents share the reward, (N,) if each has one
    children: list = field(default_factory=list)  # J Nodes; None where the branch ends
    returns: Any = None  # (J, N); equal columns if the reward is shared
    value: Any = None  # (N,), mean return of each agent


def generate(args, env, players, nodes, G):
    """At each node each agent that has a prompt draws G completions of it."""
    requests = defaultdict(list)  # policy -> triples of node, agent and prompt
    for node in nodes:
        prompts = env.observe(node.task, node.history)
        for i, (policy, prompt) in enumerate(zip(players, prompts, strict=True)):
            if prompt is not None:
                requests[policy].append((node, i, prompt))
    # one batch per policy, for all agents that it plays
    for policy, own in requests.items():
        groups = complete(args, policy, [prompt for _, _, prompt in own], G)
        for (node, i, _), group in zip(own, groups, strict=True):
            node.groups[i] = group


def rollout(args, env, players, tasks, generations, joint_mode):
    """Grows a tree for each (number, task), with G = generations[t] at turn t. Returns the nodes of each turn.

    players: the policy of each agent.
    """
    N = len(players)
    turns = []
    nodes = [Node(number, task, [], [], 1 / len(tasks)) for number, task in tasks]
    for t, G in enumerate(generations):
        generate(args, env, players, nodes, G)

        # joint actions, scored in one call, since some environments run tests
        branches = []
        parents = []  # node of each branch
        for node in nodes:
            if joint_mode == "align":
                node.joint = [(g,) * N for g in range(G)]
            else:  # cross: a silent agent has one choice
                node.joint = list(product(*[range(G) if i in node.groups else [0] for i in range(N)]))
            for choice in node.joint:
                actions = [""] * N
                for i, group in node.groups.items():
                    actions[i] = group.completions[choice[i]]
                branches.append((node.task, node.history, actions))
                parents.append(node)

        # a child for each joint action, unless it ends the branch
        for node, (task, history, actions), step in zip(parents, branches, env.step(branches), strict=True):
            path = [*node.path, len(node.steps)]
            child = Node(node.task_number, task, path, [*history, (actions, step)], node.weight / len(node.joint))
            node.steps.append(step)
            # a number, list, array or tensor of any type, on any device
            node.rewards.append(np.array(torch.as_tensor(step.reward, dtype=torch.float64).tolist()))
            node.children.append(None if step.done or t + 1 == len(generations) else child)
        turns.append(nodes)
        nodes = [child for node in nodes for child in node.children if child]
        if not nodes:
            break

    # returns, from the leaves to the roots; float64, as advantages are small differences
    for node in chain(*reversed(turns)):
        node.returns = np.zeros((len(node.joint), N))
        for j, (reward, child) in enumerate(zip(node.rewards, node.children)):
            node.returns[j] += reward
            if child:
                node.returns[j] += args.gamma * child.value
        node.value = node.returns.mean(0)
        for i, group in node.groups.items():
            # bincount sums, and counts, the joint actions of each completion
            member = np.array(node.joint)[:, i]  # (J,), index of agent i's completion
            sums = np.bincount(member, weights=node.returns[:, i])  # (G,)
            group.returns = group.compared = sums / np.bincount(member)
    return turns


def compare_trajectories(turns):
    """Compares each completion with all trajectories of its task: with their returns from the same turn on."""
    for root in turns[0]:
        nodes = root.children
        values = root.returns  # (J, N)
        for _ in turns[1:]:
            # a trajectory that has ended stays in the comparison with its last return
            values = np.array([node.value if node else value for node, value in zip(nodes, values)])
            for node in filter(None, nodes):
                for i, group in node.groups.items():
                    group.compared = values[:, i]
            nodes = [node.children[0] if node else None for node in nodes]


if __name__ == "__main__":
    args = read_args()
    tiny = set(args.model) == {"tiny"}
    args.max_new_tokens = args.max_new_tokens or (96 if tiny else 256)
    args.learning_rate = args.learning_rate or [(4e-4 if tiny else 5e-6) * (10 if args.lora_rank else 1)]
    N = args.num_agents
    B = args.num_tasks
    G = args.num_generations
    num_policies = 1 if args.share_policy else N
    if not {len(args.model), len(args.learning_rate)} <= {1, num_policies} or min(args.learning_rate) < 0:
        sys.exit("error: --model, --learning-rate (from 0): give one, or (without --share-policy) one for each agent.")
    if WORLD_SIZE > 1:
        # long timeout: other ranks wait while the first evaluates
        dist.init_process_group(timeout=timedelta(days=1))
    if ON_GPU:
        torch.cuda.set_device(DEVICE)
        torch.set_float32_matmul_precision("high")  # TF32, for the output head
    elif tiny:
        # it is too small to gain from threads
        torch.set_num_threads(1)
    folder, script = os.path.split(__file__)
    run_name = f"{args.env}__{script[:-3]}__{args.seed}__{datetime.now():%Y%m%d-%H%M%S.%f}".replace(":", ".")
    run_dir = args.resume or f"{os.path.expanduser(args.output_dir)}/{run_name}"
    # before loading models, so that a missing API key fails early
    if args.track != "none" and RANK == 0:
        # a resumed run continues the same tracker run
        name = os.environ["WANDB_RUN_ID"] = os.path.basename(os.path.normpath(run_dir))
        import_module(args.track).init(project="tutti", name=name, config=asdict(args), resume="allow")

    # environment
    env = load_environment(args)
    T = args.num_turns = getattr(env, "num_turns", args.num_turns)
    train_tasks = list(enumerate(env.tasks("train")))  # pairs (number, task)
    eval_tasks = list(enumerate(env.tasks(args.eval_split)))
    np.random.default_rng(0).shuffle(eval_tasks)
    eval_tasks = eval_tasks[: args.eval_tasks or None]
    # task order: shuffled epochs, concatenated
    rng = np.random.default_rng(args.seed)
    num_epochs = args.num_iterations * B // len(train_tasks) + 1
    order = np.concatenate([rng.permutation(len(train_tasks)) for _ in range(num_epochs)])
    # cross scores G^N joint actions, each of which may start a branch
    joint_mode = args.joint_mode or ("cross" if T == 1 and G**N <= 100 else "align")
    trajectories = args.branching == "trajectories"
    generations = [G, *[1 if trajectories else G] * (T - 1)]

    # policies
    torch.manual_seed(args.seed)  # identical adapters in all processes
    base_models = {}
    policies = [load_policy(args, name, base_models) for name in (args.model * N)[:num_policies]]
    players = (policies * N)[:N]  # the policy of each agent
    rates = args.learning_rate * N  # the learning rate of each policy

    # run folder
    start = load_checkpoint(run_dir, policies) if args.resume else 0
    if RANK == 0:
        os.makedirs(run_dir, exist_ok=True)
        with open(f"{run_dir}/args.json", "w") as file:
            commit = os.popen(f"git -C '{folder}' rev-parse HEAD 2>/dev/null").read().strip()
            json.dump({"script": script, "args": {**asdict(args), "resume": None}, "commit": commit}, file, indent=2)
        if not args.resume:
            log(args, run_dir, 0, *evaluate(args, env, players, eval_tasks, 0))

    last = args.num_iterations
    for iteration in tqdm(range(start + 1, last + 1), initial=start, total=last, disable=RANK > 0):
        # 1 ROLLOUT: for each of this process's tasks a tree, or G trajectories
        began = perf_counter()
        reseed(args.seed, iteration)
        numbers = order[(iteration - 1) * B : iteration * B]  # (B,)
        tasks = [train_tasks[k] for k in numbers[RANK::WORLD_SIZE]]
        turns = rollout(args, env, players, tasks, generations, joint_mode)
        metrics = summarize("train", turns)

        # 2 ADVANTAGES: the critic-free scripts differ between the two marks
        if trajectories:
            compare_trajectories(turns)
        nodes = list(chain(*turns))
        groups = list(chain(*[node.groups.values() for node in nodes]))
        for group in groups:
            # >>> ALGORITHM
            group.advantages = group.returns - (group.compared.sum() - group.returns) / (len(group.compared) - 1)
            # <<< ALGORITHM
        metrics["train/zero_variance_groups"] = np.mean([np.ptp(group.compared) < 1e-9 for group in groups])

        # 3 UPDATE: one optimizer step for each policy: that of agent i or, if it is shared, of all agents
        for i, policy in enumerate(policies):
            if rates[i] == 0:
                continue
            # equal completions of a prompt are trained once, with the sum of their factors
            factors = defaultdict(float)  # pair of prompt_ids and completion_ids -> factor
            for node in nodes:
                discount = args.gamma ** len(node.history)
                for agent, group in node.groups.items():
                    if players[agent] is not policy:
                        continue
                    w = node.weight / len(group.completions)
                    for completion_ids, advantage in zip(group.completion_ids, group.advantages.tolist()):
                        pair = tuple(group.prompt_ids), tuple(completion_ids)
                        factors[pair] += w * discount * advantage / args.max_new_tokens
            # leave out rounding errors of float64, but no NaN, which has to end the run
            rounding = 1e-15 * max(np.abs(group.returns).max() for group in groups)
            examples = [(*pair, factor) for pair, factor in factors.items() if not abs(factor) <= rounding]
            # completions of like length share a batch
            examples.sort(key=lambda example: len(example[1]))
            # zero gradients, so that a rank without examples joins the all-reduce
            for p in policy.trained.values():
                p.grad = torch.zeros_like(p)
            for k in range(0, len(examples), args.batch_size):
                prompt_ids, completion_ids, batch_factors = zip(*examples[k : k + args.batch_size])
                with AUTOCAST:
                    logprobs = token_logprobs(policy, prompt_ids, completion_ids, args.temperature)  # (R, C)
                loss = -torch.tensor(batch_factors, device=DEVICE) @ logprobs.sum(1)
                loss.backward()
            # the mean of all processes' gradients
            if WORLD_SIZE > 1:
                for p in policy.trained.values():
                    dist.all_reduce(p.grad.div_(WORLD_SIZE))
            decay = 1 - (iteration - 1) / args.num_iterations if args.anneal_lr else 1.0
            policy.optimizer.param_groups[0]["lr"] = decay * rates[i]
            max_norm = args.max_grad_norm if args.max_grad_norm > 0 else torch.inf
            grad_norm = clip_grad_norm_(policy.trained.values(), max_norm).item()
            # without a gradient, Adam's momentum alone would move the parameters
            if grad_norm > 0:
                policy.optimizer.step()
            policy.optimizer.zero_grad()
            metrics[f"agent_{i}/grad_norm"] = grad_norm

        # 4 LOG: the first process, which writes below
        if RANK > 0:
            continue
        metrics["tokens"] = sum(len(ids) for group in groups for ids in group.completion_ids)
        metrics["time/iteration"] = perf_counter() - began
        lines = list(records(iteration, "train", turns, num_roots=2))

        # 5 EVALUATE
        milestone = iteration == last or iteration % (args.eval_every or last) == 0
        if milestone:
            eval_metrics, eval_lines = evaluate(args, env, players, eval_tasks, iteration)
            metrics |= eval_metrics
            lines += eval_lines
        log(args, run_dir, iteration, metrics, lines)

        # 6 CHECKPOINT
        if milestone:
            save_checkpoint(run_dir, iteration, policies)

    if RANK == 0 and args.num_iterations > 0:
        for i, policy in enumerate(policies):
            policy.model.save_pretrained(f"{run_dir}/agent_{i}")
            policy.tokenizer.save_pretrained(f"{run_dir}/agent_{i}")
        print(f"the agents are in {run_dir}/agent_*; to see what they wrote: python view.py {run_dir!r}")
    if WORLD_SIZE > 1:
        # pending collectives must release their tensors before exit, or Python aborts (pytorch 179291)
        dist.barrier()
        dist.destroy_process_group()
