"""IPPO: each agent is trained by PPO on the return that all agents share, with a value function of its own.

    python ippo.py --env tldr --num-agents 2    (read the loop at the end first, from `# 1 ROLLOUT` on)

Every task has G independent trajectories. A state of agent i is its prompt and the tokens y_<t that it wrote in this
turn; the reward arrives with a turn's last token (that of a turn in which it is silent, with the turn before), and the
next turn's first state follows it. Over the tokens t of a trajectory, across its turns, with gamma_t = gamma after a
turn's last token and 1 elsewhere,

    delta_t = r_t + gamma_t V_i(s_t+1) - V_i(s_t)              A_t = delta_t + gamma_t * gae_lambda * A_t+1
    rho_t = pi_i(y_t | s_t) / pi_i,old(y_t | s_t)              R_t = A_t + V_i,old(s_t)
    L_i = - sum gamma^turn min(rho_t A_t, clip(rho_t) A_t) + vf_coef * value loss - ent_coef * entropy

summed over tokens, averaged over trajectories, divided by max_new_tokens; turns count from 0. V_i is a linear head for
each turn on the actor's last hidden states, or on those of a critic with weights of its own (--use-separate-critic);
it reads the state before a token, never the token. pi_i,old is what the sampling loop used. Left out on purpose: a
centralised critic (MAPPO), a KL penalty, division by a completion's length, normalised advantages. Sources: PPO, arXiv
1707.06347; GAE, arXiv 1506.02438; IPPO, arXiv 2011.09533. With one agent this is PPO.
"""

import copy
import json
import math
import os
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import chain, groupby, product
from signal import SIG_DFL, SIGINT, SIGTERM, signal
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import transformers
import tyro
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig

# N agents, B tasks, G generations, J joint actions, T turns, P prompt tokens, C completion tokens, V vocabulary,
# K tokens of a batch, R rows of it, L columns of its cache. An agent is a seat; the policy is who plays it.

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
    env_kwargs: dict[str, str] = field(default_factory=dict)  # its own options, such as: reward grounded
    num_agents: int = 2  # N, each with its own prompt and its own policy
    num_turns: int = 1  # T, joint actions in a trajectory; environments that need more take more
    dataset: str = "sample"  # sample (offline), hub, a hub id, or a .jsonl, .json, .csv or .parquet file
    model: list[str] = field(default_factory=lambda: ["tiny"])  # tiny, a folder or a hub id; one for all, or one each
    share_policy: bool = False  # one model and one optimizer for all agents; gradients add up over them
    lora_rank: int = 0  # rank of a LoRA for each agent, on frozen weights that agents share; 0: train all weights
    devices: list[str] = field(default_factory=list)  # such as cuda:0 cuda:1; one for all, or one each
    # sampling
    num_generations: int = 8  # G, completions per agent in a group
    temperature: float = 1.0  # for sampling and for the trained log-probabilities
    max_new_tokens: int | None = None  # C; by default 96 for tiny, 256 for others and for arxiv
    max_batch_tokens: int | None = None  # in training; by default 4096, on a GPU what half of its free memory holds
    # optimization
    num_tasks: int = 4  # B, tasks per iteration, of all processes together
    learning_rate: list[float] = field(default_factory=list)  # of AdamW, one for all or one each; 0: it is not trained
    anneal_lr: bool = True  # decay the learning rate linearly to 0
    gamma: float = 1.0  # discount per turn
    max_grad_norm: float = 1.0  # each agent's gradient is clipped to this norm
    use_separate_critic: bool = False  # a critic with weights of its own, instead of a head on the actor
    critic_learning_rate: float | None = None  # by default the actor's, or 10 times that for a head on it without LoRA
    gae_lambda: float = 1.0  # per token; at 1, A = return - value
    update_epochs: int = 2  # passes over a rollout
    num_minibatches: int = 2  # optimizer steps in each pass
    clip_coef: float = 0.2  # clips the ratio to 1 +- this, and a value's change to +- this
    clip_vloss: bool = True  # clip the value's change
    vf_coef: float = 0.1  # weight of the value loss
    ent_coef: float = 0.0  # weight of the entropy bonus
    target_kl: float | None = None  # the optimizer step that finds approx_kl above it is the last on this rollout
    # evaluation
    eval_every: int = 20  # iterations between evaluations; there is always one before and one after training
    eval_tasks: int = 64  # held-out tasks, the same in each evaluation; 0: all
    eval_split: Literal["test", "train"] = "test"  # train, with --num-iterations 0: collect answers for sft.py
    eval_generations: int = 1  # n, trajectories per held-out task; where code is tested, pass@1 and pass@n are logged
    eval_temperature: float | None = None  # by default that of training; 0: greedy


def fail(sentence):
    """Exits with status 2 and one sentence that names the argument and the remedy."""
    # print would garble the progress bar
    tqdm.write(f"error: {sentence}", file=sys.stderr)
    sys.exit(2)


# ---- set-up: arguments, processes, environment, policies (a reader of the algorithm goes on at its heading below)


def read_args():
    """Reads the command line, fills in and checks what depends on several arguments."""
    args = tyro.cli(Args, description=__doc__)
    if args.resume:
        args.config = f"{args.resume}/args.json"
        if not os.path.isfile(f"{args.resume}/state.pt"):
            fail("--resume: give the run folder itself, which has a state.pt after its first checkpoint.")
    if args.config:
        # the command line again, after the file's values
        args = tyro.cli(Args, description=__doc__, args=words_of(args.config) + sys.argv[1:])
    if args.max_new_tokens is None:
        args.max_new_tokens = 96 if set(args.model) == {"tiny"} and args.env != "arxiv" else 256
    if args.lora_rank and not find_spec("peft"):
        fail("--lora-rank: pip install peft.")
    if args.track != "none" and not find_spec(args.track):
        fail(f"--track: pip install {args.track}.")
    if args.num_tasks % WORLD_SIZE:
        fail("--num-tasks: give a multiple of the number of processes, which share them equally.")
    num_policies = 1 if args.share_policy else args.num_agents
    if not {len(args.model), len(args.devices or [0]), len(args.learning_rate or [0])} <= {1, num_policies}:
        fail("--model, --devices, --learning-rate: give one for all, or (without --share-policy) one for each agent.")
    return args


def words_of(path):
    """The values of a JSON file as words of a command line."""
    try:
        with open(path) as file:
            config = json.load(file)
    except ValueError as error:
        fail(f"--config: {path} is no JSON ({error}); give a file like the args.json of a run.")
    words = []
    for name, value in config.get("args", config).items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
            continue
        if isinstance(value, dict):
            value = [*chain(*value.items())]
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


def start_processes(args):
    """Joins the processes that torchrun started, and returns the devices: one for all policies, or one each."""
    transformers.utils.logging.disable_progress_bar()
    own_device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    devices = [torch.device(name) for name in args.devices or [own_device]]
    if devices[0].type == "cuda":
        torch.cuda.set_device(devices[0])
        # TF32, for the output head
        torch.set_float32_matmul_precision("high")
    elif set(args.model) == {"tiny"}:
        # so small a model gains little from more threads
        torch.set_num_threads(1)
    if WORLD_SIZE > 1:
        # others wait while one runs tests
        dist.init_process_group(timeout=timedelta(days=1))
    return devices


def all_gather(value):
    """The values of all processes, in the order of their ranks."""
    values = [value] * WORLD_SIZE
    if WORLD_SIZE > 1:
        dist.all_gather_object(values, value)
    return values


def load_environment(args):
    """The environment, its training tasks and the held-out ones, as pairs (number, task)."""
    options = {"num_agents": args.num_agents, "num_turns": args.num_turns, "dataset": args.dataset, "seed": args.seed}
    options |= args.env_kwargs
    module, _, class_name = args.env.partition(":")
    # where a class of your own may be
    sys.path.append("")
    try:
        # a class of your own needs no envs/
        if class_name and "+" not in args.env:
            env = getattr(import_module(module), class_name)(**options)
        else:
            env = import_module("envs").make(args.env, **options)
        train_tasks = list(enumerate(env.tasks("train")))
        eval_tasks = list(enumerate(env.tasks(args.eval_split)))
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        fail(f"--env {args.env}: {error}")
    if not train_tasks or not eval_tasks:
        fail(f"--env {args.env}: tasks() has to return one task or more for each split.")
    return env, train_tasks, eval_tasks


@dataclass(eq=False)
class Policy:
    """A model with its tokenizer and its optimizer, which plays one agent or, shared, all of them."""

    model: Any
    tokenizer: Any
    stop_ids: list[int]  # tokens that end a completion
    windows: dict  # kind of layer -> how many tokens it sees
    stream: Any  # where CUDA graphs are captured; None without a GPU, or if Python looks at values in a decoding step
    autocast: Any  # bfloat16 on a GPU
    trained: dict  # name -> parameter
    optimizer: Any


class Float32Head(torch.nn.Linear):
    """An output head that autocast leaves alone: in bfloat16, log-probabilities are off by hundredths of a nat."""

    def forward(self, hidden):
        with torch.autocast(hidden.device.type, enabled=False):
            return super().forward(hidden.float())


def load_policy(args, name, device, base_models):
    """Loads a model; LoRA policies with the same model share its frozen weights, kept in base_models."""
    path = f"{os.path.dirname(__file__)}/models/tiny" if name == "tiny" else name
    if os.path.isfile(f"{path}/adapter_config.json"):
        fail(f"--model: {name} is an adapter; merge it (docs/running.md).")
    model = base_models.get((name, device))
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        stop = turn_end_of(tokenizer)
        if model is None:
            dtype = torch.bfloat16 if args.lora_rank and device.type == "cuda" else torch.float32
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)
    except Exception as error:
        # of many kinds
        reason = str(error).partition("\n")[0]
        fail(f"--model: {name} cannot be loaded ({reason}); give tiny, a folder of save_pretrained or a hub id.")
    model.get_output_embeddings().float().__class__ = Float32Head
    if args.lora_rank:
        base_models[name, device] = model
        model = add_lora(model, args.lora_rank)
    # no dropout, in training either
    model.eval()
    trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
    for p in trained.values():
        # an adapter has its base's dtype
        p.data = p.data.float()
    # base models do not list what ends a turn of the chat
    ends = np.ravel(model.generation_config.eos_token_id).tolist()
    return Policy(
        model=model,
        tokenizer=tokenizer,
        stop_ids=sorted({stop, tokenizer.eos_token_id, *ends} - {None}),
        windows=windows_of(model),
        stream=capture_stream(model),
        autocast=torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"),
        trained=trained,
        optimizer=torch.optim.AdamW(trained.values(), weight_decay=0.0, fused=True),
    )


def windows_of(model):
    """How many tokens each kind of layer sees: full_attention, sliding_attention or both."""
    config = model.config.get_text_config()
    unknown = set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if unknown or model._is_stateful or not model.is_backend_compatible():
        fail("--model: its layers keep a state, or take no mask of ours; use nano.py, or another model.")
    windows = {}
    for layer in DynamicCache(config=config).layers:
        if layer.is_sliding:
            windows["sliding_attention"] = layer.sliding_window
        else:
            windows["full_attention"] = math.inf
    return windows


def capture_stream(model):
    """Where CUDA graphs are captured, which cannot repeat a decoding step in which Python looks at lengths."""
    rope = str(getattr(model.config.get_text_config(), "rope_parameters", None))
    if model.device.type == "cpu":
        return None
    if not model._can_compile_fullgraph or "dynamic" in rope or "longrope" in rope:
        tqdm.write("--model: it looks at lengths, so it decodes without CUDA graphs, several times as slowly")
        return None
    return torch.cuda.Stream(model.device)


def add_lora(model, rank):
    """A copy of the model with an adapter of its own: new modules, but the same frozen weights."""
    weights = {id(p): p for p in model.parameters()}
    # what is in memo counts as copied
    model = copy.deepcopy(model, memo=weights)
    peft = import_module("peft")
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model.add_adapter(config)
    return model


# one message of each role, which shows what a chat template writes around them
EXCHANGE = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ANSWER"}]


def turn_end_of(tokenizer):
    """The token that ends an answer: the added one, special or not, that follows it in the chat template, or else eos.

    In Gemma's template that is <end_of_turn>, while its eos is <eos>.
    """
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(EXCHANGE, tokenize=False)
        ending = text.partition("ANSWER")[2].lstrip()
        for token_id, token in tokenizer.added_tokens_decoder.items():
            if ending.startswith(token.content):
                return token_id
    return tokenizer.eos_token_id


@cache  # some have thousands of added tokens
def turn_tokens(tokenizer):
    """The tokens, as strings, that open or close a turn or a document. Others, as <tool_call>, are marks in one."""
    text = tokenizer.apply_chat_template(EXCHANGE, tokenize=False) if tokenizer.chat_template else ""
    ends = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, turn_end_of(tokenizer)]
    tokens = []
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token_id in ends or (token.special and token.content in text):
            tokens.append(token.content)
    return tokens


def make_plain(tokenizer, text):
    """A message whose turn tokens, if it quotes any, have become plain text, by a space."""
    for token in turn_tokens(tokenizer):
        text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


@dataclass(eq=False)
class Critic:
    """Values of the states of a policy: a linear head for each turn on the last hidden states of a model."""

    model: Any  # the policy's own, or one that starts from its weights
    head: Any  # (D,) -> (T,)


def add_critic(args, policy, separate):
    """Makes a critic, whose parameters the policy's optimizer trains too, at a learning rate of their own."""
    hidden_size = policy.model.get_output_embeddings().weight.shape[1]
    head = Float32Head(hidden_size, args.num_turns).to(policy.model.device)
    for p in head.parameters():
        # the bias is set after the first rollout
        torch.nn.init.zeros_(p)
    model = copy.deepcopy(policy.model) if separate else policy.model
    modules = torch.nn.ModuleList([head, model] if separate else [head])
    trained = {f"critic.{key}": p for key, p in modules.named_parameters() if p.requires_grad}
    policy.trained |= trained
    policy.optimizer.add_param_group({"params": trained.values()})
    return Critic(model, head)


def reseed(seed, iteration):
    """Each iteration and process has a seed of its own, so that a resumed run needs no generator's state."""
    seed = int(np.random.SeedSequence([seed, RANK, iteration]).generate_state(1)[0])
    transformers.set_seed(seed)
    # or policies on two GPUs would draw the same
    for k, generator in enumerate(torch.cuda.default_generators):
        generator.manual_seed(seed + k)


# ---- engine: prompts, sampling, log-probabilities


def encode(policy, prompt, max_new_tokens, remedy="--max-new-tokens: lower it, or shorten prompts"):
    """Token ids of a prompt: as a user message, or as bare text if the tokenizer has no chat template."""
    tokenizer = policy.tokenizer
    # a prompt may quote an agent
    message = text = make_plain(tokenizer, prompt)
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": message}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, enable_thinking=False)
        if message.strip() not in text:
            fail("--model: its chat template leaves out the prompt; use one that takes content as a string.")
    prompt_ids = tokenizer(text, add_special_tokens=not tokenizer.chat_template).input_ids
    length = len(prompt_ids)
    context = getattr(policy.model.config.get_text_config(), "max_position_embeddings", math.inf)
    if length + max_new_tokens > context:
        fail(f"{remedy}: {length} tokens and a completion of {max_new_tokens} are more than the model's {context}.")
    return prompt_ids


def draw(logits, temperature):
    """A token for each row of logits (R, V), and its log-probability: (R,), (R,). Temperature 0: the likeliest one."""
    probs = (logits.float() / max(temperature, 1e-6)).softmax(-1)
    # inverse CDF in float64: the first token whose cumulative probability exceeds a uniform random number
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    threshold = cumulative[:, -1:] * torch.rand_like(cumulative[:, :1])
    tokens = torch.searchsorted(cumulative, threshold, right=True)
    # of NaN, too, until a metric ends the run
    tokens = tokens.clamp(max=probs.shape[-1] - 1)  # (R, 1)
    logprobs = probs.gather(-1, tokens).log()
    return tokens[:, 0], logprobs[:, 0]


def prefill(model, prompts, copies):
    """Computes each of B prompts (token ids) once, and makes `copies` rows of it, R in all.

    Returns the cache, the last logits (R, V), and which cached tokens are not padding (R, P).
    """
    prompt_rows = [torch.tensor(ids, device=model.device) for ids in prompts]
    padded = pad_sequence(prompt_rows, batch_first=True, padding_value=-1, padding_side="left")  # (B, P)
    real = (padded >= 0).long()
    inputs = {"attention_mask": real, "position_ids": (real.cumsum(1) - 1).clamp(min=0)}
    cache = DynamicCache()
    logits = model(padded.clamp(min=0), past_key_values=cache, logits_to_keep=1, **inputs).logits[:, 0]  # (B, V)
    cache.batch_repeat_interleave(copies)
    return cache, logits.repeat_interleave(copies, 0), real.repeat_interleave(copies, 0)


class FixedCache(DynamicCache):
    """The cache of R rows with room for C more tokens, and all else that a decoding step changes in place."""

    def __init__(self, policy, cache, real, C):
        super().__init__()
        P = real.shape[1]
        # kernels of attention want multiples of 16
        room = C + -(P + C) % 16
        self.policy = policy
        self.graph = None
        self.input_ids = real[:, :1].clone()  # (R, 1), the latest tokens
        self.padding = P - real.sum(1, keepdim=True)  # (R, 1), columns on the left
        self.columns = torch.arange(P + room, device=real.device)  # (L,)
        self.column = torch.tensor([P], device=real.device)  # of the latest tokens
        # the dtype that attention computes in: rotations leave float32 in a cache, to be cast at every step
        self.dtype = torch.bfloat16 if torch.is_autocast_enabled(real.device.type) else torch.float32
        self.layers = cache.layers
        for layer in self.layers:
            layer.keys = pad(layer.keys.to(self.dtype), (0, 0, 0, room))  # (R, heads, L, dimension)
            layer.values = pad(layer.values.to(self.dtype), (0, 0, 0, room))

    def keep(self, rows):
        """Drops all but these rows."""
        self.reorder_cache(rows)
        self.input_ids = self.input_ids[rows]
        self.padding = self.padding[rows]
        # it knows only the old tensors
        self.graph = None

    def update(self, keys, values, layer_idx, *args, **kwargs):
        layer = self.layers[layer_idx]
        layer.keys.index_copy_(2, self.column, keys.to(self.dtype))
        layer.values.index_copy_(2, self.column, values.to(self.dtype))
        return layer.keys, layer.values

    def decode_step(self):
        """What a graph repeats: it looks at no value, and changes in place what the next step needs."""
        ages = self.column - self.columns  # (L,)
        masks = {}
        for kind, window in self.policy.windows.items():
            seen = (ages >= 0) & (ages < window) & (self.columns >= self.padding)  # (R, L)
            mask = torch.zeros_like(seen, dtype=self.dtype).masked_fill_(~seen, -torch.inf)
            masks[kind] = mask[:, None, None]  # (R, 1, 1, L)
        inputs = {"attention_mask": masks if len(masks) > 1 else masks[kind]}
        inputs["position_ids"] = self.column - self.padding  # (R, 1)
        logits = self.policy.model(self.input_ids, past_key_values=self, **inputs).logits[:, 0]  # (R, V)
        self.column.add_(1)
        return logits

    def read(self, tokens):
        """Reads the latest tokens (R,), and returns the logits after them (R, V)."""
        self.input_ids.copy_(tokens[:, None])
        if self.graph:
            self.graph.replay()
            return self.logits
        # the first step is no graph, which cannot hold what libraries set up
        logits = self.decode_step()
        if self.policy.stream:
            self.graph = torch.cuda.CUDAGraph()
            # weights were cast in the prefill, in the same autocast; NCCL's thread may go on during the capture
            with torch.cuda.graph(self.graph, stream=self.policy.stream, capture_error_mode="thread_local"):
                self.logits = self.decode_step()
        return logits


@torch.no_grad()
def sample(policy, prompts, G, temperature, C):
    """Draws G completions of each of B prompts (token ids) from the model's full distribution; temperature 0: greedy.

    Returns B lists of G pairs (token ids, log-probabilities), up to and including the first stop token.
    """
    cache, logits, real = prefill(policy.model, prompts, G)
    cache = FixedCache(policy, cache, real, C)
    device = real.device
    stop_ids = torch.tensor(policy.stop_ids, device=device)
    # to ask a GPU who has stopped is to wait for it, and to drop rows there is to capture another graph
    period, share = (16, 0.5) if policy.stream else (1, 0.875)
    numbers = torch.arange(len(real), device=device)  # (R,), of the completions that the rows decode
    running = torch.ones_like(numbers, dtype=torch.bool)  # (R,), which of them have not stopped
    all_tokens = torch.zeros(len(real), C, dtype=torch.long, device=device)
    all_logprobs = torch.zeros(len(real), C, device=device)
    lengths = torch.zeros_like(numbers)
    for t in range(C):
        tokens, logprobs = draw(logits, temperature)  # (R,)
        all_tokens[numbers, t] = tokens
        all_logprobs[numbers, t] = logprobs
        lengths[numbers] += running
        running = running & ~torch.isin(tokens, stop_ids)
        if t + 1 == C:
            break
        if t % period == 0:
            rows = running.nonzero().flatten()
            if len(rows) == 0:
                break
            # not at every token: it copies the cache
            if len(rows) <= share * len(running):
                numbers = numbers[rows]
                tokens = tokens[rows]
                running = running[rows]
                cache.keep(rows)
        # also of completions that have stopped; their tokens do not count
        logits = cache.read(tokens)

    pairs = []
    for ids, logprobs, length in zip(all_tokens.tolist(), all_logprobs.tolist(), lengths.tolist()):
        pairs.append((ids[:length], logprobs[:length]))
    return [pairs[k : k + G] for k in range(0, len(pairs), G)]


def room_for_tokens(policy, size, on_cpu):
    """How many tokens half of a GPU's free memory holds, at `size` bytes for each layer and hidden unit."""
    device = policy.model.device
    if device.type == "cpu":
        return on_cpu
    free = torch.cuda.get_device_properties(device).total_memory - torch.cuda.memory_allocated(device)
    config = policy.model.config.get_text_config()
    return free // (2 * size * config.num_hidden_layers * config.hidden_size)


def complete(args, policy, prompts, G):
    """Draws a policy's G completions of each prompt: a Group for each."""
    C = args.max_new_tokens
    all_prompt_ids = [encode(policy, prompt, C) for prompt in prompts]
    row = max(map(len, all_prompt_ids)) + C
    # 4 bytes: keys and values in bfloat16
    size = max(1, room_for_tokens(policy, 4, on_cpu=2**15) // (G * row))
    samples = []
    # one context for all tokens, so that weights are cast once; inference mode, faster on a CPU, would cast each time
    with policy.autocast, torch.inference_mode(policy.model.device.type == "cpu"):
        for k in range(0, len(prompts), size):
            samples += sample(policy, all_prompt_ids[k : k + size], G, args.temperature, C)
    ends = {*policy.stop_ids, policy.tokenizer.pad_token_id}
    groups = []
    for prompt, prompt_ids, pairs in zip(prompts, all_prompt_ids, samples):
        completion_ids, logprobs = zip(*pairs)
        # marks that an environment reads may be special tokens, so only what ends a completion is left out
        strings = [[token for token in ids if token not in ends] for ids in completion_ids]
        completions = policy.tokenizer.batch_decode(strings)
        if policy.tokenizer.decode(prompt_ids[-8:]).rstrip().endswith("<think>"):
            # the chat template opened a thought: until it ends, nothing is an answer
            completions = ["<think>" + completion for completion in completions]
        stopped = [ids[-1] in policy.stop_ids for ids in completion_ids]
        groups.append(Group(prompt, prompt_ids, completions, completion_ids, logprobs, stopped))
    return groups


def decode_states(model, prompt_ids, completion_ids):
    """The decoder's output before each of the K tokens of R completions, with the prompt of each: states (1, K, D).

    They continue from their prompt's cache, with gradients; equal prompts that follow each other are computed once.
    Causal attention never sees padding on the right.
    """
    # the last token of a prompt predicts the first one of its completions
    prompts, copies = zip(*[(ids[:-1] or [-1], len(list(same))) for ids, same in groupby(prompt_ids)])
    cache, _, real = prefill(model, prompts, torch.tensor(copies, device=model.device))
    rows = [torch.tensor([prompt[-1], *ids]) for prompt, ids in zip(prompt_ids, completion_ids)]
    padded = pad_sequence(rows, batch_first=True, padding_value=-1).to(model.device)  # (R, 1 + C)
    mask = torch.cat([real, torch.ones_like(padded[:, 1:])], 1)  # (R, P - 1 + C)
    inputs = {"attention_mask": mask, "position_ids": mask.cumsum(1)[:, real.shape[1] :] - 1}
    outputs = model.get_decoder()(padded[:, :-1].clamp(min=0), past_key_values=cache, **inputs)
    return type(outputs)(outputs.last_hidden_state[padded[:, 1:] >= 0][None])


def over_logits(function, policy, outputs, target):
    """Returns function(logits (K, V), target (K,)) for the outputs of a decoder, in pieces where logits are large."""
    model = policy.model
    decoder = model.get_decoder()

    def of_piece(states, target):
        # runs only what follows the decoder, such as scaled or capped logits: the decoder returns `states`
        decoder.forward = lambda *args, **kwargs: type(outputs)(states)
        logits = model(inputs_embeds=states).logits[0]
        del decoder.forward
        return function(logits, target)

    # half a GB of logits
    size = 2**27 // len(policy.tokenizer)
    pieces = [*zip(outputs.last_hidden_state.split(size, 1), target.split(size))]
    if len(pieces) == 1:
        return of_piece(*pieces[0])
    # logits are computed twice, and not kept
    return torch.cat([checkpoint(of_piece, *piece, use_reentrant=False) for piece in pieces])


def evaluate_tokens(args, policy, critic, speeches):
    """Log-probabilities, entropies and values of the tokens of Speeches: (K,) each."""
    completion_ids = [speech.completion_ids for speech in speeches]
    outputs = decode_states(policy.model, [speech.prompt_ids for speech in speeches], completion_ids)
    target = torch.tensor([*chain(*completion_ids)], device=policy.model.device)  # (K,)

    def logprobs_and_entropies(logits, target):
        logprobs = (logits / args.temperature).log_softmax(-1)  # (K, V)
        chosen = logprobs.gather(-1, target[:, None])[:, 0]
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        return torch.stack([chosen, entropies], 1)  # (K, 2)

    logprobs, entropies = over_logits(logprobs_and_entropies, policy, outputs, target).T
    own_outputs = outputs if critic.model is policy.model else None
    return logprobs, entropies, values_of(critic, speeches, own_outputs)


def values_of(critic, speeches, outputs=None):
    """Values of the tokens of Speeches (K,), from what the critic's decoder outputs before them."""
    completion_ids = [speech.completion_ids for speech in speeches]
    if outputs is None:
        outputs = decode_states(critic.model, [speech.critic_prompt_ids for speech in speeches], completion_ids)
    values = critic.head(outputs.last_hidden_state[0])  # (K, T)
    turns = [speech.turn for speech in speeches for _ in speech.completion_ids]
    return values.gather(1, torch.tensor(turns, device=values.device)[:, None])[:, 0]


@torch.no_grad()
def read_values(args, policy, critic, speeches):
    """Gives each Speech the values of its tokens."""
    for batch in speech_batches(args, policy, speeches):
        with policy.autocast:
            values = values_of(critic, batch).cpu()
        for speech, own in zip(batch, values.split([len(speech.completion_ids) for speech in batch])):
            speech.old_values = own


def gae(rewards, values, gamma, gae_lambda):
    """Generalized advantage estimates of the tokens of one trajectory, a list for each turn. arXiv 1506.02438.

    rewards: of each turn, received at its last token, or else at that of the turn before. values: a list per turn.
    """
    advantages = []
    advantage = 0.0
    next_value = 0.0  # nothing follows the last token
    reward = 0.0  # of a token: that of its turn, and of silent turns after it
    discount = 1.0  # gamma for each turn between a token and the next
    for turn_reward, turn_values in zip(reversed(rewards), reversed(values)):
        reward = turn_reward + gamma * reward
        discount *= gamma
        turn_advantages = []
        for value in reversed(turn_values):
            advantage = reward + discount * next_value - value + discount * gae_lambda * advantage
            turn_advantages.append(advantage)
            next_value = value
            reward = 0.0
            discount = 1.0
        advantages.append(turn_advantages[::-1])
    return advantages[::-1]


def set_advantages(speeches, rewards, gamma, gae_lambda):
    """Gives the Speeches of an agent in a trajectory their advantages and returns. rewards: of each turn."""
    values = [[] for _ in rewards]  # none in a turn in which the agent is silent
    for speech in speeches:
        values[speech.turn] = speech.old_values.tolist()
    advantages = gae(rewards, values, gamma, gae_lambda)
    for speech in speeches:
        speech.advantages = torch.tensor(advantages[speech.turn], dtype=torch.float32)
        speech.returns = speech.advantages + speech.old_values


def explained_variance(speeches):
    """The share of the variance of the returns that the values explain, None if all returns are equal."""
    errors = torch.cat(all_gather(torch.cat([torch.zeros(0), *[speech.advantages for speech in speeches]])))
    returns = torch.cat(all_gather(torch.cat([torch.zeros(0), *[speech.returns for speech in speeches]])))
    unexplained = (errors - errors.mean()).norm().item()
    total = (returns - returns.mean()).norm().item()
    return 1 - (unexplained / total) ** 2 if total > 1e-6 else None


def ppo_sums(args, policy, critic, batch):
    """Sums over the tokens of a batch: policy loss, value loss, entropy, approximate KL, clipped ratios, 1."""

    def stored(name):
        return torch.cat([getattr(speech, name) for speech in batch]).to(policy.model.device)  # (K,)

    # the discount is not negative, so it may be inside the minimum
    discounted = [args.gamma**speech.turn * speech.advantages for speech in batch]
    advantages = torch.cat(discounted).to(policy.model.device)
    returns = stored("returns")
    old_values = stored("old_values")
    with policy.autocast:
        logprobs, entropies, values = evaluate_tokens(args, policy, critic, batch)
    logratios = logprobs - stored("old_logprobs")
    ratios = logratios.exp()
    clipped = ratios.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_losses = -torch.min(ratios * advantages, clipped * advantages)
    errors = (values - returns) ** 2
    if args.clip_vloss:
        clipped_values = old_values + (values - old_values).clamp(-args.clip_coef, args.clip_coef)
        errors = torch.max(errors, (clipped_values - returns) ** 2)
    # joschu.net/blog/kl-approx.html
    approx_kl = ratios - 1 - logratios
    terms = [policy_losses, 0.5 * errors, entropies, approx_kl, (ratios != clipped).float(), torch.ones_like(ratios)]
    return torch.stack(terms).sum(1)


def loss_of(args, sums):
    """PPO's loss, of sums over tokens as ppo_sums gives them."""
    policy_loss, value_loss, entropy, *_ = sums
    return policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy


def speech_batches(args, policy, speeches):
    """Splits Speeches into batches; those with equal prompts of the critic come together."""
    parts = [(speech.critic_prompt_ids, speech.completion_ids, speech) for speech in speeches]
    return [[speech for *_, speech in batch] for batch in batches_of(args, policy, parts)]


def batches_of(args, policy, parts):
    """Splits parts (prompt_ids, completion_ids, ...) into batches of like ones, each bounded by its tokens."""
    # 60 bytes: the activations that a backward pass needs, without those of the output head
    most = args.max_batch_tokens or room_for_tokens(policy, 60, on_cpu=4096)
    batches = []
    for part in sorted(parts, key=lambda part: (len(part[0]), part[0], len(part[1]))):
        if not batches or num_tokens([*batches[-1], part]) > most:
            batches.append([])
        batches[-1].append(part)
    return batches


def num_tokens(batch):
    """How many tokens a batch of parts computes, with padding: of equal prompts one."""
    prompts = {tuple(part[0]) for part in batch}
    longest = max(len(part[1]) for part in batch)
    return len(prompts) * max(map(len, prompts)) + len(batch) * longest


def optimizer_step(policy, max_grad_norm):
    """A step on the mean of all processes' gradients; returns its norm before it is clipped."""
    if WORLD_SIZE > 1:
        for p in policy.trained.values():
            dist.all_reduce(p.grad.div_(WORLD_SIZE))
    grad_norm = torch.nn.utils.clip_grad_norm_(policy.trained.values(), max_grad_norm)
    policy.optimizer.step()
    policy.optimizer.zero_grad()
    return grad_norm.item()


# ---- logging and checkpoints


def terms(split, turns):
    """What is logged of a rollout, as triples (name, value, weight)."""
    passed = defaultdict(list)  # task number -> whether each of n trajectories passes all tests
    for t, nodes in enumerate(turns, 1):
        for node in nodes:
            for i, group in node.groups.items():
                yield from group_terms(i, group)
            # of a joint action, given the task
            chance = node.weight * len(turns[0]) / len(node.steps)
            for step, rewards, child in zip(node.steps, node.rewards, node.children):
                yield f"reward_turn{t}", rewards.mean(), chance
                # where the branch ends
                if child is None:
                    for name, value in step.parts.items():
                        yield name, float(value), chance
                    if split == "eval" and "all_passed" in step.parts:
                        passed[node.task_number].append(step.parts["all_passed"])
    for root in turns[0]:
        for i, value in enumerate(root.value):
            yield f"agent_{i}/return", value, 1
            yield "return", value, 1
    for values in passed.values():
        yield "pass@1", np.mean(values), 1
        yield f"pass@{len(values)}", max(values), 1


def group_terms(i, group):
    """Of agent i's completions at a node."""
    G = len(group.completions)
    tokens = sum(map(len, group.completion_ids))
    entropy = -sum(map(sum, group.logprobs)) / tokens  # an estimate, in nats
    yield f"agent_{i}/entropy", entropy, tokens
    yield f"agent_{i}/completion_length", tokens / G, G
    yield f"agent_{i}/stopped", np.mean(group.stopped), G


def summarize(split, turns):
    """The logged metrics: weighted means, over all processes."""
    sums = defaultdict(float)
    weights = defaultdict(float)
    for name, value, weight in chain(*all_gather(list(terms(split, turns)))):
        sums[name] += weight * value
        weights[name] += weight
    return {f"{split}/{name}": sums[name] / weights[name] for name in sums}


def records(iteration, split, turns, N, num_roots=None):
    """Lines for rollouts.jsonl, one per node of the first tasks: what agents read and wrote, and what it was worth."""
    shown = {root.task_number for root in turns[0][:num_roots]}
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
    return value.tolist() if isinstance(value, (np.ndarray, np.generic, torch.Tensor)) else str(value)


def log(args, run_dir, iteration, metrics, lines):
    """Writes metrics and rollouts of an iteration; ends the run at the first metric that is not finite."""
    for name, value in metrics.items():
        if not math.isfinite(value):
            fail(f"{name} is {value}: resume with a lower --learning-rate, or fix the reward of --env.")
    if RANK > 0:
        return
    # print would garble the progress bar
    if "eval/return" in metrics:
        tqdm.write(f"iteration {iteration}: evaluation return {metrics['eval/return']:.3f}")
    with open(f"{run_dir}/metrics.jsonl", "a") as file:
        file.write(json.dumps({"iteration": iteration} | metrics) + "\n")
    with open(f"{run_dir}/rollouts.jsonl", "a") as file:
        file.writelines(lines)
    if args.track != "none":
        import_module(args.track).log(metrics, step=iteration)


def describe(policy):
    """Prints what the model reads around a prompt, and what ends a completion."""
    text = policy.tokenizer.decode(encode(policy, "PROMPT", 1))
    ends = policy.tokenizer.convert_ids_to_tokens(policy.stop_ids)
    print(f"{policy.model.name_or_path} reads {text!r} and stops at {', '.join(ends)}")


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
        # another Ctrl-C ends at once
        signal(SIGINT, SIG_DFL)
        tqdm.write("finishing the iteration, then saving; another Ctrl-C ends at once, without saving")

    signal(SIGINT, on_signal)
    signal(SIGTERM, on_signal)
    return signals


def save_checkpoint(run_dir, iteration, policies):
    """Writes state.pt, from which any number of processes resumes."""
    if RANK > 0:
        return
    state = {
        "iteration": iteration,
        "models": [policy.trained for policy in policies],
        "optimizers": [policy.optimizer.state_dict() for policy in policies],
        "sizes": {name: os.path.getsize(f"{run_dir}/{name}") for name in ("metrics.jsonl", "rollouts.jsonl")},
    }
    torch.save(state, f"{run_dir}/state.tmp")
    # a crash leaves the old one intact
    os.replace(f"{run_dir}/state.tmp", f"{run_dir}/state.pt")
    tqdm.write(f"iteration {iteration}: checkpoint, which --resume {run_dir} continues from")


def load_checkpoint(run_dir, policies):
    """Restores weights and moments, cuts the logs back to the checkpoint, and returns its iteration."""
    state = torch.load(f"{run_dir}/state.pt", map_location="cpu")
    if [policy.trained.keys() for policy in policies] != [weights.keys() for weights in state["models"]]:
        fail("--resume: its agents are others; leave out --model, --num-agents and --lora-rank.")
    for policy, weights, moments in zip(policies, state["models"], state["optimizers"]):
        for name, p in policy.trained.items():
            p.data.copy_(weights[name])
        policy.optimizer.load_state_dict(moments)
    for name, size in state["sizes"].items():
        # a log that is missing is begun anew
        with open(f"{run_dir}/{name}", "ab") as file:
            file.truncate(min(size, file.tell()))
    return state["iteration"]


def save_policies(args, run_dir, policies):
    """Writes a folder for each policy that transformers loads, and that samples as in training."""
    options = {"do_sample": True, "temperature": args.temperature, "top_k": 0, "top_p": 1.0}
    for i, policy in enumerate(policies):
        policy.model.generation_config = GenerationConfig(eos_token_id=policy.stop_ids, **options)
        policy.model.save_pretrained(f"{run_dir}/agent_{i}")
        policy.tokenizer.save_pretrained(f"{run_dir}/agent_{i}")


def evaluate(args, env, players, tasks, iteration):
    """Metrics and lines for rollouts.jsonl of the held-out tasks. Always the same seed, so that it can be compared."""
    reseed(args.seed, 0)
    generations = [args.eval_generations, *[1] * (args.num_turns - 1)]
    if args.eval_temperature is not None:
        args = replace(args, temperature=args.eval_temperature)
    turns = rollout(args, env, players, tasks, generations, "align")
    lines = all_gather(list(records(iteration, args.eval_split, turns, args.num_agents)))
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
    rewards: list = field(default_factory=list)  # J arrays (N,)
    children: list = field(default_factory=list)  # J Nodes, None where the branch ends
    returns: Any = None  # (J, N)
    value: Any = None  # (N,), mean return of each agent


@dataclass(eq=False)
class Speech:
    """What an agent writes in one turn of a trajectory: C tokens, and what PPO has to know of each."""

    turn: int
    prompt_ids: list[int]  # (P,)
    # what the critic reads
    critic_prompt_ids: list[int]
    completion_ids: list[int]  # (C,)
    old_logprobs: torch.Tensor  # (C,), of the policy that sampled
    old_values: Any = None  # (C,), of the critic before the update
    advantages: Any = None  # (C,)
    returns: Any = None  # (C,), the targets of the values


def speak(args, env, players, nodes, G):
    """At each node each agent that has a prompt draws G completions of it."""
    seats = defaultdict(list)  # policy -> triples of node, agent and prompt
    for node in nodes:
        prompts = env.observe(node.task, node.history)
        if not isinstance(prompts, list) or len(prompts) != len(players):
            fail("--env: observe() has to return a list: a string for each agent, or None where it is silent.")
        for i, prompt in enumerate(prompts):
            if prompt is not None:
                seats[players[i]].append((node, i, prompt))
    # a policy draws those of all agents that it plays at once
    for policy, own_seats in seats.items():
        groups = complete(args, policy, [prompt for _, _, prompt in own_seats], G)
        for (node, i, _), group in zip(own_seats, groups):
            node.groups[i] = group


def score(env, branches, N):
    """The Steps that env.step() returns, and the rewards (N,) of the agents in each."""
    steps = env.step(branches)
    if not isinstance(steps, list) or len(steps) != len(branches):
        fail("--env: step() has to return a list with a Step for each branch.")
    rewards = []
    for step in steps:
        reward = np.asarray(step.reward)
        if reward.dtype.kind not in "biuf" or reward.shape not in ((), (N,)) or not np.isfinite(reward).all():
            fail(f"--env: the reward {step.reward!r} has to be a finite number, or a list with one for each agent.")
        rewards.append(np.broadcast_to(reward.astype(float), N))
    return steps, rewards


def rollout(args, env, players, tasks, generations, joint_mode):
    """Grows a tree for each (number, task), with G = generations[t] at turn t. Returns the nodes of each turn.

    players: the policy of each agent.
    """
    N = len(players)
    turns = []
    nodes = [Node(number, task, [], [], 1 / len(tasks)) for number, task in tasks]
    for t, G in enumerate(generations):
        speak(args, env, players, nodes, G)

        # joint actions, scored all at once: some environments run tests
        branches = []
        parents = []  # the node of each
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
                parents.append(node)

        # a child for each joint action that does not end its branch
        for node, step, rewards in zip(parents, *score(env, branches, N)):
            path = [*node.path, len(node.steps)]
            child = Node(node.task_number, node.task, path, [*node.history, step], node.weight / len(node.joint))
            node.steps.append(step)
            node.rewards.append(rewards)
            node.children.append(None if step.done or t + 1 == len(generations) else child)
        turns.append(nodes)
        nodes = [child for node in nodes for child in node.children if child]
        if not nodes:
            break

    # returns, from the leaves to the roots
    for node in chain(*reversed(turns)):
        node.returns = np.array(node.rewards)  # float64, so that equal returns stay equal
        for j, child in enumerate(node.children):
            if child:
                node.returns[j] += args.gamma * child.value
        node.value = node.returns.mean(0)
        for i, group in node.groups.items():
            member = np.array(node.joint)[:, i]  # (J,), which of its completions
            sums = np.bincount(member, weights=node.returns[:, i])  # (G,)
            group.returns = sums / np.bincount(member)  # means over the joint actions that contain a completion
    return turns


if __name__ == "__main__":
    # set-up
    args = read_args()
    if not args.learning_rate:
        args.learning_rate = [(2e-4 if set(args.model) == {"tiny"} else 5e-6) * (10 if args.lora_rank else 1)]
    if args.num_tasks // WORLD_SIZE * args.num_generations < args.num_minibatches:
        fail("--num-minibatches: give at most the number of a process's trajectories, its tasks times generations.")
    devices = start_processes(args)
    N = args.num_agents
    B = args.num_tasks
    G = args.num_generations
    script = os.path.basename(__file__).removesuffix(".py")
    run_name = f"{args.env.replace(':', '.')}__{script}__{args.seed}__{datetime.now():%Y%m%d-%H%M%S.%f}"
    run_dir = all_gather(args.resume or f"{args.output_dir}/{run_name}")[0]
    # before models load, so that a missing key does not cost minutes
    if args.track != "none" and RANK == 0:
        name = os.path.basename(os.path.normpath(run_dir))
        # a resumed run continues there too
        os.environ["WANDB_RUN_ID"] = name
        import_module(args.track).init(project="tutti", name=name, config=asdict(args), resume="allow")
    env, train_tasks, eval_tasks = load_environment(args)
    T = args.num_turns = getattr(env, "num_turns", args.num_turns)
    held_out = np.random.default_rng(0).permutation(len(eval_tasks))[: args.eval_tasks or None]
    eval_tasks = [eval_tasks[k] for k in held_out[RANK::WORLD_SIZE]]
    # new adapters are the same in all processes
    torch.manual_seed(args.seed)
    base_models = {}
    origins = list(zip(args.model * N, devices * N))[: 1 if args.share_policy else N]
    policies = [load_policy(args, name, device, base_models) for name, device in origins]
    critics = [add_critic(args, policy, args.use_separate_critic) for policy in policies]
    players = (policies * N)[:N]  # the policy of each agent
    rates = args.learning_rate * N  # the learning rate of each policy
    times = 1 if args.use_separate_critic or args.lora_rank else 10
    critic_rates = [rate * times if args.critic_learning_rate is None else args.critic_learning_rate for rate in rates]
    # the order of the training tasks in all iterations: shuffled passes over all tasks, one after the other
    passes = np.tile(range(len(train_tasks)), (args.num_iterations * B // len(train_tasks) + 1, 1))
    order = np.random.default_rng(args.seed).permuted(passes, axis=1).flatten()
    start = load_checkpoint(run_dir, policies) if args.resume else 0

    if RANK == 0:
        make_run_dir(args, run_dir)
        for policy in policies:
            describe(policy)
    if not args.resume:
        log(args, run_dir, 0, *evaluate(args, env, players, eval_tasks, 0))
    signals = catch_signals()

    last_iteration = args.num_iterations
    for iteration in tqdm(range(start + 1, last_iteration + 1), initial=start, total=last_iteration, disable=RANK > 0):
        # 1 ROLLOUT: G trajectories for each of this process's tasks
        began = perf_counter()
        reseed(args.seed, iteration)
        numbers = order[(iteration - 1) * B : iteration * B]  # (B,)
        tasks = [train_tasks[k] for k in numbers[RANK::WORLD_SIZE]]
        try:
            # G completions of the first prompt, then one of each: a tree is G chains
            turns = rollout(args, env, players, tasks, [G] + [1] * (T - 1), "align")
        except (Exception, SystemExit):
            # no weight has changed since the last iteration; several processes would wait for each other
            if WORLD_SIZE == 1:
                save_checkpoint(run_dir, iteration - 1, policies)
            raise
        metrics = summarize("train", turns) | {"time/rollout": perf_counter() - began}

        # 2 ADVANTAGES: of each token, along its trajectory
        trajectories = []  # lists of (node, index of a joint action), a pair for each turn
        for node, j in product(turns[0], range(G)):
            trajectory = []
            while node:
                trajectory.append((node, j))
                node = node.children[j]
                j = 0  # from the second turn on a node has one joint action
            trajectories.append(trajectory)
        # values start at the mean reward still to come: from 0, first advantages would be returns
        if iteration == 1:
            for critic, turn in product(critics, range(T)):
                rewards = [metrics.get(f"train/reward_turn{t}", 0.0) for t in range(turn + 1, T + 1)]
                critic.head.bias.data[turn] = sum(rewards)
        paths = []  # (N, trajectories), each a list of an agent's Speeches in a trajectory
        for i, (policy, critic) in enumerate(zip(players, critics * N)):
            paths.append([[] for _ in trajectories])
            for trajectory, path in zip(trajectories, paths[i]):
                for turn, (node, j) in enumerate(trajectory):
                    group = node.groups.get(i)
                    if group:
                        # what the critic reads
                        critic_prompt_ids = group.prompt_ids
                        old_logprobs = torch.tensor(group.logprobs[j])
                        completion_ids = group.completion_ids[j]
                        path.append(Speech(turn, group.prompt_ids, critic_prompt_ids, completion_ids, old_logprobs))
            speeches = list(chain(*paths[i]))
            read_values(args, policy, critic, speeches)
            for trajectory, path in zip(trajectories, paths[i]):
                rewards = [node.rewards[j][i] for node, j in trajectory]
                set_advantages(path, rewards, args.gamma, args.gae_lambda)
            explained = explained_variance(speeches)
            if explained is not None:
                metrics[f"agent_{i}/explained_variance"] = explained  # before this update

        # 3 UPDATE: passes over the rollout, an optimizer step for each minibatch of trajectories
        for i, (policy, critic) in enumerate(zip(policies, critics)):
            if rates[i] == 0:
                continue
            seats = [k for k in range(N) if players[k] is policy]
            decay = 1 - (iteration - 1) / args.num_iterations if args.anneal_lr else 1.0
            actor_options, critic_options = policy.optimizer.param_groups
            actor_options["lr"] = decay * rates[i]
            critic_options["lr"] = decay * critic_rates[i]
            minibatches = []
            for _ in range(args.update_epochs):
                minibatches += torch.randperm(len(trajectories)).tensor_split(args.num_minibatches)
            logged = []  # the metrics of each optimizer step
            for minibatch in minibatches:
                speeches = [speech for k in seats for m in minibatch for speech in paths[k][m]]
                weight = 1 / (len(minibatch) * args.max_new_tokens)  # agents that share a policy add up
                totals = torch.zeros(6, device=policy.model.device)
                # in every process, also without a completion to train on
                for p in policy.trained.values():
                    p.grad = torch.zeros_like(p)
                for batch in speech_batches(args, policy, speeches):
                    sums = ppo_sums(args, policy, critic, batch)
                    loss = loss_of(args, sums) * weight
                    loss.backward()
                    totals += sums.detach()
                # a loss is a mean over processes, what is counted by token one over all tokens
                if WORLD_SIZE > 1:
                    dist.all_reduce(totals)
                losses = totals[:3] * weight / WORLD_SIZE
                approx_kl, clipfrac = (totals[3:5] / totals[5].clamp(min=1)).tolist()
                grad_norm = optimizer_step(policy, args.max_grad_norm)
                logged.append([loss_of(args, losses).item(), *losses[:2].tolist(), approx_kl, clipfrac, grad_norm])
                if approx_kl > (args.target_kl or math.inf):
                    break
            names = ["loss", "policy_loss", "value_loss", "approx_kl", "clipfrac", "grad_norm"]
            for name, value in zip(names, np.mean(logged, 0)):
                metrics[f"agent_{i}/{name}"] = value

        # 4 LOG
        tokens = sum(len(speech.completion_ids) for path in chain(*paths) for speech in path)
        metrics |= {"time/iteration": perf_counter() - began, "tokens": sum(all_gather(tokens))}

        # 5 EVALUATE
        lines = list(records(iteration, "train", turns, N, num_roots=2))
        last = iteration == last_iteration
        if last or iteration % args.eval_every == 0:
            eval_metrics, eval_lines = evaluate(args, env, players, eval_tasks, iteration)
            metrics |= eval_metrics
            lines += eval_lines
        log(args, run_dir, iteration, metrics, lines)

        # 6 CHECKPOINT
        stopping = any(all_gather(len(signals)))
        if last or stopping or iteration % args.save_every == 0:
            save_checkpoint(run_dir, iteration, policies)
        if stopping:
            break

    if RANK == 0 and args.num_iterations > 0:
        save_policies(args, run_dir, policies)
        print(f"the agents are in {run_dir}/agent_*; to see what they wrote: python view.py {run_dir}")
    if WORLD_SIZE > 1:
        # a thread that still holds tensors of a collective when Python ends would abort the process (pytorch 179291)
        dist.barrier()
        dist.destroy_process_group()
