"""MAGRPO as small as it can be: each agent follows the group-relative advantage of the return that all agents share.

    python nano.py --env tldr --num-agents 2    (from the top: data, sampling, the rollout tree, then the loop)

    A_g = R_g - mean(R_1 .. R_G)
    L_i = - sum over nodes and g of  w * gamma^turn * A_g * sum_t log pi_i(y_g,t | x, y_g,<t) / max_new_tokens

At a node of the rollout tree agent i draws G completions y_1 .. y_G of its own prompt x. A joint action has one of
each agent; its return is its reward plus gamma times the mean return of its child, the node of the next turn, where
agents have read what was written. R_g is the mean return of the joint actions that contain y_g, and w is the
probability that a trajectory of a random task passes through y_g. Turns count from 0. As the baseline includes R_g,
E[-grad L_i] = (G-1)/G * grad E[return] / max_new_tokens. With --branching trajectories, G start from each task and do
not branch: R_1 .. R_G are their returns from the same turn on (docs/credit.md).

Left out on purpose: division by the group's standard deviation or the completion's length (biased), the clipped ratio
(1 with one step per rollout), a KL penalty. magrpo.py adds speed, resuming, LoRA and several GPUs.
"""

import json
import os
import sys
from collections import Counter, defaultdict
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
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, set_seed

# Shapes: N agents, B tasks, G generations, J joint actions, T turns, P prompt and C completion tokens, V vocabulary


@dataclass
class Args:
    seed: int = 1
    num_iterations: int = 120  # rollouts, each followed by an update of every agent; 0: only evaluate
    env: str = "tldr"  # name of a built-in environment, or module:Class of your own, without envs/
    env_kwargs: dict[str, str] = field(default_factory=dict)  # its keyword arguments, e.g. reward grounded
    num_agents: int = 2  # N, each with its own prompt and its own policy
    num_turns: int = 1  # T, joint actions in a trajectory
    model: str = "models/tiny"  # folder or hub id of every agent's initial model
    num_tasks: int = 4  # B, tasks per iteration
    num_generations: int = 8  # G, completions per agent in a group
    branching: Literal["tree", "trajectories"] = "tree"  # G at every node; or G at the first, then one at each
    joint_mode: Literal["align", "cross"] = "cross"  # cross: all G^N; align: g-th with g-th, as in trajectories
    max_new_tokens: int = 96
    temperature: float = 1.0
    learning_rate: float = 4e-4  # of AdamW, decayed linearly to 0; 5e-6 for large models
    gamma: float = 1.0  # discount per turn
    max_grad_norm: float = 1.0  # gradient clipping, per agent; 0: none
    eval_every: int = 20  # iterations between evaluations
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

    prompt_ids: list  # (P,)
    completion_ids: list  # G lists of tokens, up to and including the stop token
    completions: list  # (G,), their texts
    returns: Any = None  # (G,), mean return of the joint actions that contain the completion
    compared: Any = None  # what they are compared with: in a tree the same, else those of all trajectories
    advantages: Any = None  # (G,)


@dataclass
class Node:
    """A place in the rollout tree of a task: agents speak, and each of J joint actions leads to a child."""

    task: dict
    history: list  # of the earlier turns: pairs of the joint action and its Step (reward, done, feedback)
    weight: float  # probability that a trajectory of a random task visits this node
    groups: dict = field(default_factory=dict)  # agent -> Group; a silent agent has none
    joint: Any = None  # J tuples, the index of each agent's completion
    steps: list = field(default_factory=list)  # J Steps
    children: list = field(default_factory=list)  # J Nodes; None where the branch ends
    returns: Any = None  # (J, N); equal columns if the reward is shared
    value: Any = None  # (N,), mean return of each agent


def load_policy(args):
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    stop_ids = np.ravel(model.generation_config.eos_token_id).tolist()
    # base models do not list the template's end-of-turn token
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ANSWER"}]
    ending = tokenizer.apply_chat_template(chat, tokenize=False).partition("ANSWER")[2].lstrip()
    stop_ids += [k for k, token in tokenizer.added_tokens_decoder.items() if ending.startswith(token.content)]
    # sample the full distribution; ignore the model's own generation config
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=args.temperature, top_k=0, eos_token_id=stop_ids, pad_token_id=stop_ids[0]
    )
    return Policy(model, tokenizer, torch.optim.AdamW(model.parameters(), weight_decay=0.0))


def encode(tokenizer, prompt):
    """Token ids of a prompt, as a user's message: (P,)."""
    chat = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    if prompt.strip() not in text:
        sys.exit("error: --model: its chat template leaves out the prompt; give one that takes content as a string.")
    return tokenizer(text, add_special_tokens=False).input_ids


@torch.inference_mode()
def complete(args, policy, prompts, G):
    """Draws G completions of each prompt from the policy's full distribution: a Group for each."""
    groups = [Group(encode(policy.tokenizer, prompt), [], []) for prompt in prompts]
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
        # after the text come only stop tokens: the completion's, if any, then padding
        kept = [token for token in ids if token not in policy.model.generation_config.eos_token_id]
        group.completion_ids.append(ids[: len(kept) + 1])
        # the template opened a thought: put it back, so that environments can drop it
        opening = "<think>" if policy.tokenizer.decode(group.prompt_ids).rstrip().endswith("<think>") else ""
        group.completions.append(opening + policy.tokenizer.decode(kept))
    return groups


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


def rollout(args, env, policies, tasks, generations, joint_mode):
    """Grows a tree of joint actions for each task; G = generations[t] at turn t. Returns the nodes of each turn."""
    N = len(policies)
    turns = []
    nodes = [Node(task, [], 1 / len(tasks)) for task in tasks]
    for t, G in enumerate(generations):
        # each agent draws G completions of its own prompts: of the nodes at which it has one
        prompts = [env.observe(node.task, node.history) for node in nodes]
        for i, (policy, own) in enumerate(zip(policies, zip(*prompts), strict=True)):
            speaking = [k for k, prompt in enumerate(own) if prompt is not None]
            if speaking:
                for k, group in zip(speaking, complete(args, policy, [own[k] for k in speaking], G)):
                    nodes[k].groups[i] = group

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
            node.steps.append(step)
            child = Node(task, [*history, (actions, step)], node.weight / len(node.joint))
            node.children.append(None if step.done or t + 1 == len(generations) else child)
        turns.append(nodes)
        nodes = [child for node in nodes for child in node.children if child]
        if not nodes:
            break

    # returns, from the leaves to the roots; a reward is a shared number, or one per agent
    for node in chain(*reversed(turns)):
        node.returns = np.zeros((len(node.joint), N))
        for returns, step, child in zip(node.returns, node.steps, node.children):
            returns += step.reward
            if child:
                returns += args.gamma * child.value
        node.value = node.returns.mean(0)
        for i, group in node.groups.items():
            member = np.array(node.joint)[:, i]  # (J,), agent i's completion in each; bincount sums and counts by it
            group.returns = group.compared = np.bincount(member, weights=node.returns[:, i]) / np.bincount(member)
    return turns


def compare_trajectories(turns):
    """Compares each completion with all trajectories of its task: with their returns from the same turn on."""
    for root in turns[0]:
        nodes = root.children
        returns = root.returns  # (G, N)
        while any(nodes):
            # a trajectory that has ended stays in the comparison with its last return
            returns = np.array([node.returns[0] if node else last for node, last in zip(nodes, returns)])
            for node in filter(None, nodes):
                for i, group in node.groups.items():
                    group.compared = returns[:, i]
            nodes = [node and node.children[0] for node in nodes]


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    N = args.num_agents
    G = args.num_generations
    if G < 2 or args.learning_rate < 0:
        sys.exit("error: --num-generations has to be 2 or more, to compare, and --learning-rate 0 or more.")
    set_seed(args.seed)
    options = {"num_agents": N, "num_turns": args.num_turns, "dataset": "sample", "seed": args.seed} | args.env_kwargs
    module, _, class_name = args.env.partition(":")
    if class_name:
        env = getattr(import_module(module), class_name)(**options)
    else:
        env = import_module("envs").make(args.env, **options)
    T = getattr(env, "num_turns", args.num_turns)
    train_tasks = env.tasks("train")
    eval_tasks = np.random.default_rng(0).permutation(env.tasks("test"))[: args.eval_tasks]
    policies = [load_policy(args) for _ in range(N)]

    run_dir = f"{args.output_dir}/{args.env.replace(':', '.')}__nano__{args.seed}__{datetime.now():%Y%m%d-%H%M%S.%f}"
    os.makedirs(run_dir)
    print(run_dir)
    with open(f"{run_dir}/args.json", "w") as file:
        json.dump({"script": "nano.py", "args": vars(args)}, file)
    for iteration in range(args.num_iterations + 1):
        metrics = {"iteration": iteration}
        if iteration > 0:
            # 1 ROLLOUT: a tree per task, or G trajectories
            tasks = np.random.choice(train_tasks, args.num_tasks)
            if args.branching == "tree":
                turns = rollout(args, env, policies, tasks, [G] * T, args.joint_mode)
            else:
                turns = rollout(args, env, policies, tasks, [G] + [1] * (T - 1), "align")
                compare_trajectories(turns)
            nodes = list(chain(*turns))
            groups = [group for node in nodes for group in node.groups.values()]
            metrics["train/return"] = np.mean([root.value for root in turns[0]])
            metrics["tokens"] = sum(len(ids) for group in groups for ids in group.completion_ids)

            # 2 ADVANTAGES: returns minus the mean of what they are compared with
            for group in groups:
                group.advantages = group.returns - group.compared.mean()

            # 3 UPDATE: one optimizer step for each policy
            for i, policy in enumerate(policies):
                # equal completions of a prompt are trained once, with the sum of their factors
                examples = defaultdict(Counter)  # prompt_ids -> completion_ids -> factor
                for node in nodes:
                    group = node.groups.get(i)
                    # a silent agent has none
                    if group:
                        w = node.weight / len(group.completions)
                        discount = args.gamma ** len(node.history)
                        for completion_ids, advantage in zip(group.completion_ids, group.advantages):
                            factor = w * discount * advantage / args.max_new_tokens
                            examples[tuple(group.prompt_ids)][tuple(completion_ids)] += factor
                policy.optimizer.zero_grad()
                for prompt_ids, factors in examples.items():
                    logprobs = token_logprobs(args, policy, prompt_ids, list(factors))
                    loss = -sum(factor * values.sum() for factor, values in zip(factors.values(), logprobs))
                    loss.backward()
                decay = 1 - (iteration - 1) / args.num_iterations
                policy.optimizer.param_groups[0]["lr"] = decay * args.learning_rate
                max_norm = args.max_grad_norm if args.max_grad_norm > 0 else torch.inf
                grad_norm = clip_grad_norm_(policy.model.parameters(), max_norm).item()
                if not np.isfinite(grad_norm):
                    sys.exit(f"error: agent {i} has no finite gradient: lower --learning-rate, or fix the reward.")
                # without a gradient (1e-12: rounding errors), Adam's momentum alone would move the parameters
                if grad_norm > 1e-12:
                    policy.optimizer.step()
                metrics[f"agent_{i}/grad_norm"] = grad_norm

        # 4 EVALUATE: one trajectory per held-out task; it draws random numbers, so --eval-every changes the run
        if iteration % args.eval_every == 0 or iteration == args.num_iterations:
            roots = rollout(args, env, policies, eval_tasks, [1] * T, "align")[0]
            metrics["eval/return"] = np.mean([root.value for root in roots])
            print("answers to a held-out task:", ascii([group.completions for group in roots[0].groups.values()]))

        # 5 LOG
        print(json.dumps(metrics))
        with open(f"{run_dir}/metrics.jsonl", "a") as file:
            file.write(json.dumps(metrics) + "\n")

    for i, policy in enumerate(policies):
        policy.model.save_pretrained(f"{run_dir}/agent_{i}")
        policy.tokenizer.save_pretrained(f"{run_dir}/agent_{i}")
