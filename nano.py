"""MAGRPO as small as it can be: each agent follows the group-relative advantage of the return that all agents share.

    python nano.py --env tldr --num-agents 2    (from the top: data, sampling, the rollout tree, then the loop)

    A_g = R_g - mean(R_1 .. R_G)
    L_i = - sum over nodes and g of  w * gamma^turn * A_g * sum_t log pi_i(y_g,t | x, y_g,<t) / max_new_tokens

A node is a state that a rollout has reached, turn the number of turns before it. There agent i draws G completions
y_1 .. y_G of its own prompt x. A joint action is one completion of each agent; its return is its reward plus gamma
times the mean return of the joint actions at the node that it leads to. R_g is the mean return of the joint actions
that contain y_g, and w is the probability that a trajectory of a random task passes through y_g. As the baseline
includes R_g, E[-grad L_i] = (G-1)/G * grad E[return] / max_new_tokens. With --branching trajectories, G trajectories
start from each task and do not branch: R_1 .. R_G are their returns from the same turn on (docs/credit.md).

Left out on purpose: division by the group's standard deviation or the completion's length (biased), the clipped ratio
(1 with one step per rollout), a KL penalty. magrpo.py adds speed, resuming, LoRA and several GPUs.
"""

import json
import os
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime
from importlib import import_module
from itertools import chain, product
from typing import Any, Literal

import numpy as np
import torch
import tyro
from torch.distributions import Categorical
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast, set_seed

# Shapes: N agents, B tasks, G generations, J joint actions, T turns, P prompt and C completion tokens, V vocabulary

TINY = os.path.join(os.path.dirname(__file__), "models/tiny")  # a copy of this file alone has no default model


@dataclass
class Args:
    seed: int = 1
    num_iterations: int = 120  # rollouts, each followed by an update of every agent; 0: only evaluate
    env: str = "tldr"  # name of a built-in environment, or module:Class of your own
    env_kwargs: dict[str, str] = field(default_factory=dict)  # its keyword arguments, e.g. reward grounded
    num_agents: int = 2  # N, each with its own prompt and its own policy
    num_turns: int = 1  # T, joint actions in a trajectory; some environments override it
    # folder or hub id of every agent's initial model
    model: str = TINY if os.path.exists(TINY) else tyro.MISSING
    num_tasks: int = 4  # B, tasks per iteration
    num_generations: int = 8  # G, completions per agent in a group; 2 or more, to be compared
    branching: Literal["tree", "trajectories"] = "tree"  # G at every node; or G at the first, then one, aligned
    joint_mode: Literal["align", "cross"] | None = None  # cross: all G^N (default if T=1, G^N <= 100); align: g with g
    max_new_tokens: int = 96
    temperature: float = 1.0
    learning_rate: float = 4e-4  # of AdamW, decayed linearly to 0; 5e-6 for large models
    gamma: float = 1.0  # discount per turn
    max_grad_norm: float = 1.0  # gradient clipping, per agent; 0: none
    eval_every: int = 20  # iterations between evaluations, 1 or more
    eval_tasks: int = 64  # held-out tasks, the same in each evaluation
    output_dir: str = "runs"


@dataclass
class Policy:
    """A model with its tokenizer and optimizer: one for each agent."""

    model: Any
    tokenizer: Any
    optimizer: Any


@dataclass
class Group:
    """An agent's G completions of its prompt at a node."""

    policy: Policy
    prompt_ids: tuple  # (P,)
    weight: float  # w * gamma^turn
    completion_ids: list = field(default_factory=list)  # G tuples, up to and including the stop token
    completions: list = field(default_factory=list)  # (G,), their texts
    returns: Any = None  # (G,), mean return of the joint actions that contain the completion
    peer_returns: Any = None  # those whose mean is the baseline: the same, or those of the task's trajectories
    advantages: Any = None  # (G,)


@dataclass
class Node:
    """A joint action in the rollout tree of a task, and the state that it led to; a root is a state only."""

    task: dict
    weight: float  # probability that a trajectory of a random task passes here
    # the joint action
    choice: tuple = ()  # (N,), the index of each agent's completion
    actions: Any = None  # (N,), their texts; "" of a silent agent
    step: Any = None  # what the environment returned: reward, done, feedback
    returns: Any = None  # (N,), the reward plus gamma times the value
    # the state
    history: list = field(default_factory=list)  # of the turns up to here: pairs of actions and step
    groups: dict = field(default_factory=dict)  # agent -> Group; a silent agent has none
    children: list = field(default_factory=list)  # J Nodes, of the joint actions here; none where the branch ends
    value: Any = 0.0  # (N,), mean return of the children; 0 where the branch ends


def load_policy(args):
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    # not AutoTokenizer, which may split words otherwise than the model's own file says
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.model)
    # stop tokens of the tokenizer and the model, if any, and of the template's turn, which base models do not list
    stop_ids = {tokenizer.eos_token_id, *np.ravel(model.generation_config.eos_token_id).tolist()} - {None}
    chat = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "ANSWER"},
    ]
    ending = tokenizer.apply_chat_template(chat, tokenize=False).partition("ANSWER")[2].lstrip()
    stop_ids |= {k for k, token in tokenizer.added_tokens_decoder.items() if ending.startswith(token.content)}
    # sample the full distribution; ignore the model's own generation config
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=args.temperature, top_k=0, eos_token_id=list(stop_ids), pad_token_id=min(stop_ids)
    )
    return Policy(model, tokenizer, torch.optim.AdamW(model.parameters(), weight_decay=0.0))


def encode(tokenizer, prompt):
    """Token ids of a prompt, as a user's message: (P,)."""
    chat = [{"role": "user", "content": prompt}]
    return tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True, enable_thinking=False).input_ids)


@torch.inference_mode()
def complete(args, policy, groups, G):
    """Draws G completions of the prompt of each of a policy's Groups, from the full distribution."""
    tensors = [torch.tensor(group.prompt_ids, device=policy.model.device) for group in groups]  # (P,) each
    padded = pad_sequence(tensors, batch_first=True, padding_value=-1, padding_side="left")  # (B, P)
    sequences = policy.model.generate(
        padded.clamp(min=0),
        attention_mask=(padded >= 0).long(),
        num_return_sequences=G,
        max_new_tokens=args.max_new_tokens,
    )  # (B * G, P + C)
    for k, ids in enumerate(sequences[:, padded.shape[1] :].tolist()):
        group = groups[k // G]
        # the text, then its stop token unless it was cut off, then padding, which is a stop token, too
        text_ids = [token for token in ids if token not in policy.model.generation_config.eos_token_id]
        group.completion_ids.append(tuple(ids[: len(text_ids) + 1]))
        group.completions.append(policy.tokenizer.decode(text_ids))


def token_logprobs(args, policy, prompt_ids, completion_ids):
    """Log-probabilities of the tokens of completions of one prompt: one tensor (C,) each."""
    sequences = [torch.tensor(prompt_ids + ids, device=policy.model.device) for ids in completion_ids]
    # right padding needs no mask: attention is causal
    padded = pad_sequence(sequences, batch_first=True)  # (G, P + C)
    target = padded[:, len(prompt_ids) :]  # (G, C)
    # the logits at a position predict the next token
    logits = policy.model(padded, logits_to_keep=target.shape[1] + 1).logits[:, :-1]  # (G, C, V)
    logprobs = Categorical(logits=logits / args.temperature).log_prob(target)  # (G, C)
    return [values[: len(ids)] for values, ids in zip(logprobs, completion_ids)]


def rollout(args, env, policies, tasks, group_sizes, joint_mode):
    """Grows a tree of joint actions for each task; G = group_sizes[t] at turn t. Returns the nodes of each turn."""
    N = len(policies)
    turns = []
    nodes = [Node(task, 1 / len(tasks)) for task in tasks]
    for G in group_sizes:
        # each agent that has a prompt at a node draws G completions of it
        requests = defaultdict(list)  # agent -> its Groups
        for node in nodes:
            weight = node.weight / G * args.gamma ** len(node.history)  # w * gamma^turn
            prompts = env.observe(node.task, node.history)
            for i, (policy, prompt) in enumerate(zip(policies, prompts, strict=True)):
                if prompt is not None:
                    node.groups[i] = Group(policy, encode(policy.tokenizer, prompt), weight)
                    requests[i].append(node.groups[i])
        for i, groups in requests.items():
            complete(args, policies[i], groups, G)

        # each joint action leads to a child
        for node in nodes:
            if joint_mode == "align":
                choices = [(g,) * N for g in range(G)]
            else:  # cross: all combinations, in which a silent agent has one choice
                choices = list(product(*[range(G if i in node.groups else 1) for i in range(N)]))
            for choice in choices:
                actions = [""] * N
                for i, group in node.groups.items():
                    actions[i] = group.completions[choice[i]]
                node.children.append(Node(node.task, node.weight / len(choices), choice, actions))

        # all are scored in one call, since some environments run tests
        edges = [(node, child) for node in nodes for child in node.children]
        steps = env.step([(node.task, node.history, child.actions) for node, child in edges])
        for (node, child), step in zip(edges, steps):
            child.step = step
            child.history = [*node.history, (child.actions, step)]
        turns.append(nodes)
        nodes = [child for _, child in edges if not child.step.done]
        if not nodes:
            break

    # returns, from the leaves to the roots
    for node in chain(*reversed(turns)):
        for child in node.children:
            # a reward is a number that agents share, or one of each
            child.returns = np.zeros(N) + child.step.reward + args.gamma * child.value
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
        nodes = root.children  # where the task's trajectories are after the first turn
        for _ in turns[1:]:
            # an ended trajectory keeps its last return: unbiased, as no completion of this turn changes it
            peers = [node.children[0] if node.children else node for node in nodes]  # and after the next
            for node in nodes:
                for i, group in node.groups.items():
                    group.peer_returns = np.array([peer.returns[i] for peer in peers])  # (G,)
            nodes = peers


def set_advantages(groups):
    """MAGRPO's: returns minus the mean of what they are compared with. Other algorithms put theirs in this place."""
    for group in groups:
        group.advantages = group.returns - group.peer_returns.mean()


def update(args, policy, groups, learning_rate):
    """One optimizer step of a policy. Returns the norm of its gradient before clipping."""
    # equal completions of a prompt are trained once, with the sum of their factors
    examples = defaultdict(lambda: defaultdict(float))  # prompt_ids -> completion_ids -> factor
    for group in groups:
        if group.policy is policy:
            for completion_ids, advantage in zip(group.completion_ids, group.advantages):
                examples[group.prompt_ids][completion_ids] += group.weight * advantage / args.max_new_tokens
    policy.optimizer.zero_grad()
    # a batch has the completions of one prompt
    for prompt_ids, factors in examples.items():
        logprobs = token_logprobs(args, policy, prompt_ids, list(factors))
        loss = -sum(factor * values.sum() for factor, values in zip(factors.values(), logprobs))
        loss.backward()
    policy.optimizer.param_groups[0]["lr"] = learning_rate
    max_norm = args.max_grad_norm or torch.inf
    grad_norm = clip_grad_norm_(policy.model.parameters(), max_norm, error_if_nonfinite=True).item()
    # below this it is rounding errors, and Adam's momentum alone would move the parameters
    if grad_norm > 1e-12:
        policy.optimizer.step()
    return grad_norm


def evaluate(args, env, policies, tasks):
    """Mean return of a trajectory per held-out task; prints the first. Random, so --eval-every changes a run."""
    roots = rollout(args, env, policies, tasks, [1] * args.num_turns, "align")[0]
    for group in roots[0].groups.values():
        print(group.policy.tokenizer.decode(group.prompt_ids + group.completion_ids[0]))
    return np.mean([root.value for root in roots])


def log(run_dir, metrics):
    line = json.dumps(metrics)
    print(line)
    with open(f"{run_dir}/metrics.jsonl", "a") as file:
        print(line, file=file)


def main():
    args = tyro.cli(Args, description=__doc__)
    set_seed(args.seed)
    options = {"num_agents": args.num_agents, "num_turns": args.num_turns, "dataset": "sample", "seed": args.seed}
    options |= args.env_kwargs
    module, _, class_name = args.env.partition(":")
    if class_name:  # your own, so that a copy of this file needs no envs/
        env = getattr(import_module(module), class_name)(**options)
    else:
        env = import_module("envs").make(args.env, **options)
    T = args.num_turns = getattr(env, "num_turns", args.num_turns)
    train_tasks = env.tasks("train")
    eval_tasks = np.random.default_rng(0).permutation(env.tasks("test"))[: args.eval_tasks]
    policies = [load_policy(args) for _ in range(args.num_agents)]
    joint_mode = args.joint_mode or ("cross" if T == 1 and args.num_generations**args.num_agents <= 100 else "align")
    group_sizes = [args.num_generations] * T
    trajectories = args.branching == "trajectories"
    if trajectories:
        joint_mode = "align"
        group_sizes[1:] = [1] * (T - 1)

    run_dir = f"{args.output_dir}/{args.env.replace(':', '.')}__nano__{args.seed}__{datetime.now():%Y%m%d-%H%M%S.%f}"
    os.makedirs(run_dir)
    print(run_dir)
    with open(f"{run_dir}/args.json", "w") as file:
        json.dump({"script": "nano.py", "args": vars(args)}, file)
    log(run_dir, {"iteration": 0, "eval/return": evaluate(args, env, policies, eval_tasks)})
    for iteration in range(1, args.num_iterations + 1):
        # 1 ROLLOUT: a tree per task, or G trajectories
        tasks = np.random.choice(train_tasks, args.num_tasks)
        turns = rollout(args, env, policies, tasks, group_sizes, joint_mode)
        if trajectories:
            compare_trajectories(turns)
        groups = [group for node in chain(*turns) for group in node.groups.values()]
        metrics = {"iteration": iteration, "train/return": np.mean([root.value for root in turns[0]])}

        # 2 ADVANTAGES: what algorithms differ in
        set_advantages(groups)

        # 3 UPDATE: one optimizer step for each policy
        learning_rate = (1 - (iteration - 1) / args.num_iterations) * args.learning_rate
        for i, policy in enumerate(policies):
            metrics[f"agent_{i}/grad_norm"] = update(args, policy, groups, learning_rate)

        # 4 LOG
        metrics["tokens"] = sum(len(ids) for group in groups for ids in group.completion_ids)

        # 5 EVALUATE: logged in the same line
        if iteration % args.eval_every == 0 or iteration == args.num_iterations:
            metrics["eval/return"] = evaluate(args, env, policies, eval_tasks)
        log(run_dir, metrics)

    # 6 CHECKPOINT: what --model and from_pretrained() load
    for i, policy in enumerate(policies):
        policy.model.save_pretrained(f"{run_dir}/agent_{i}")
        policy.tokenizer.save_pretrained(f"{run_dir}/agent_{i}")


if __name__ == "__main__":
    main()
