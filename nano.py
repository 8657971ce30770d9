"""MAGRPO as small as it can be: each agent follows the group-relative advantage of the return that all agents share.

    python nano.py --env tldr --num-agents 2    (from the top: data, sampling, the rollout tree, then the loop)

    A_g = R_g - mean(R_1 .. R_G)
    L_i = - sum over nodes and g of  w * gamma^turn * A_g * sum_t log pi_i(y_g,t | x, y_g,<t) / max_new_tokens

A joint action has a completion of each agent, and leads to a child: the node of the next turn, where agents have read
what was written. At a node agent i draws G completions y_1 .. y_G of its own prompt x. The return of a joint action is
its reward plus gamma times the mean return of its child. R_g is the mean return of the joint actions that contain y_g,
and w is the probability that a trajectory, of a task drawn at random, passes through y_g. Turns count from 0. As the
mean includes R_g, E[-grad L_i] is (G-1)/G of the gradient of the expected return, over max_new_tokens. With
--branching trajectories R_1 .. R_G are the returns, from a turn on, of a task's G trajectories, which do not branch.

Left out on purpose: the division by the group's standard deviation or the completion's length, which bias the
gradient; the clipped ratio, which is 1 with one step per rollout; a KL penalty. magrpo.py computes the same gradient
with less time and memory, resumes a run, and uses LoRA and several GPUs.
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from itertools import pairwise, product
from typing import Any, Literal

import numpy as np
import torch
import tyro
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, set_seed

# Shapes: N agents, B tasks, G generations, J joint actions, T turns, P prompt and C completion tokens, V vocabulary


@dataclass
class Args:
    seed: int = 1
    num_iterations: int = 120  # rollouts, each followed by an update of every agent
    env: str = "tldr"  # a name that envs/ knows, or module:Class of your own
    env_kwargs: dict[str, str] = field(default_factory=dict)  # its own options, such as: reward grounded
    num_agents: int = 2  # N, each with its own prompt and its own policy
    num_turns: int = 1  # T, joint actions in a trajectory
    model: str = "models/tiny"  # a folder or a hub id, from which every agent starts
    num_tasks: int = 4  # B, tasks per iteration
    num_generations: int = 8  # G, completions per agent in a group
    branching: Literal["tree", "trajectories"] = "tree"  # G at every node; or G trajectories of a task, one at a node
    joint_mode: Literal["align", "cross"] = "cross"  # all G^N joint actions, or g-th with g-th (cheaper if T > 1)
    max_new_tokens: int = 96  # at most, in a completion
    temperature: float = 1.0
    learning_rate: float = 4e-4  # of AdamW, decayed linearly to 0; for a large model 5e-6
    gamma: float = 1.0  # discount per turn
    max_grad_norm: float = 1.0  # each agent's gradient is clipped to this norm
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

    prompt_ids: list[int]  # (P,)
    completion_ids: list[list[int]]  # G lists, each up to and including its stop token, if it has one
    completions: list[str]  # (G,)
    returns: Any = None  # (G,), of each the mean over the joint actions that contain it
    advantages: Any = None  # (G,)


@dataclass
class Node:
    """A place in the rollout tree of a task: agents speak, and each of J joint actions leads to a child."""

    task: dict
    history: list  # what env.step() returned on the way here: Steps with reward, done and feedback
    weight: float  # the probability that a trajectory, of a task drawn at random, passes here
    groups: dict = field(default_factory=dict)  # agent -> Group; a silent agent has none
    joint: list = field(default_factory=list)  # J tuples, the index of each agent's completion
    steps: list = field(default_factory=list)  # J Steps
    children: list = field(default_factory=list)  # J Nodes, None where the task is done or after the last turn
    value: Any = None  # (N,), mean return of each agent


def load_policy(args):
    try:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        tokenizer.get_chat_template()
    except (OSError, ValueError):
        sys.exit(f"error: --model {args.model}: give a folder or hub id of a model that has a default chat template.")
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    stop_ids = np.ravel(model.generation_config.eos_token_id).tolist()  # one, or several
    # the full distribution, whatever the model's own configuration says
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=args.temperature,
        top_k=0,
        eos_token_id=stop_ids,
        pad_token_id=stop_ids[0],
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    return Policy(model, tokenizer, optimizer)


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
    model = policy.model
    groups = [Group(encode(policy.tokenizer, prompt), [], []) for prompt in prompts]
    rows = [torch.tensor(group.prompt_ids, device=model.device) for group in groups]  # (P,) each
    padded = pad_sequence(rows, batch_first=True, padding_value=-1, padding_side="left")  # (B, P)
    sequences = model.generate(
        padded.clamp(min=0),
        attention_mask=(padded >= 0).long(),
        num_return_sequences=G,
        max_new_tokens=args.max_new_tokens,
    )  # (B * G, P + C)
    for k, ids in enumerate(sequences[:, padded.shape[1] :].tolist()):
        # the rest is a stop token, and padding that looks like one; a completion may also have no stop token
        end = sum(token not in model.generation_config.eos_token_id for token in ids)
        group = groups[k // G]
        group.completion_ids.append(ids[: end + 1])
        group.completions.append(policy.tokenizer.decode(ids[:end]))
    return groups


def token_logprobs(args, policy, prompt_ids, completion_ids):
    """Log-probabilities of the tokens of completions of one prompt: one tensor (C,) each."""
    sequences = [torch.tensor(prompt_ids + ids, device=policy.model.device) for ids in completion_ids]
    rows = pad_sequence(sequences, batch_first=True)  # (G, P + C); causal attention never sees padding on the right
    target = rows[:, len(prompt_ids) :]  # (G, C)
    # each token is predicted one position before it, the first one at the prompt's last position
    logits = policy.model(rows, logits_to_keep=target.shape[1] + 1).logits[:, :-1]  # (G, C, V)
    logprobs = (logits.float() / args.temperature).log_softmax(-1)
    chosen = logprobs.gather(-1, target[..., None])  # (G, C, 1)
    return [values[: len(ids), 0] for values, ids in zip(chosen, completion_ids)]


def rollout(args, env, policies, tasks, generations, joint_mode):
    """Grows a tree of joint actions for each task; G = generations[t] at turn t. Returns the nodes of each turn."""
    N = len(policies)
    turns = []
    nodes = [Node(task, history=[], weight=1 / len(tasks)) for task in tasks]
    for t, G in enumerate(generations):
        # each agent that has a prompt draws G completions of it
        prompts = [env.observe(node.task, node.history) for node in nodes]
        for i, (policy, own) in enumerate(zip(policies, zip(*prompts, strict=True), strict=True)):
            speaking = [k for k, prompt in enumerate(own) if prompt is not None]  # elsewhere it is silent
            if speaking:
                for k, group in zip(speaking, complete(args, policy, [own[k] for k in speaking], G)):
                    nodes[k].groups[i] = group

        # joint actions, scored all at once: some environments run tests
        branches = []
        parents = []  # the node of each branch
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
        last = t + 1 == len(generations)
        for node, step in zip(parents, env.step(branches), strict=True):
            node.steps.append(step)
            child = Node(node.task, [*node.history, step], node.weight / len(node.joint))
            node.children.append(None if step.done or last else child)
        turns.append(nodes)
        nodes = [child for node in nodes for child in node.children if child]
        if not nodes:
            break

    # returns, from the leaves to the roots
    for nodes in reversed(turns):
        for node in nodes:
            returns = np.zeros((len(node.joint), N))  # (J, N)
            for row, step, child in zip(returns, node.steps, node.children):
                row += step.reward  # one that all share, or a list with one for each agent
                if child:
                    row += args.gamma * child.value
            node.value = returns.mean(0)
            for i, group in node.groups.items():
                member = np.array(node.joint)[:, i]  # (J,), which of its completions
                sums = np.bincount(member, weights=returns[:, i])  # (G,)
                group.returns = sums / np.bincount(member)  # means over the joint actions that contain a completion
    return turns


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    N, B, G = args.num_agents, args.num_tasks, args.num_generations
    set_seed(args.seed)

    # environment and policies
    options = {"num_agents": N, "num_turns": args.num_turns, "dataset": "sample", "seed": args.seed} | args.env_kwargs
    module, _, class_name = args.env.partition(":")
    if class_name:  # a class of your own needs no envs/
        env = getattr(import_module(module), class_name)(**options)
    else:
        env = import_module("envs").make(args.env, **options)
    T = getattr(env, "num_turns", args.num_turns)
    train_tasks = env.tasks("train")
    eval_tasks = np.random.default_rng(0).permutation(env.tasks("test"))[: args.eval_tasks]
    policies = [load_policy(args) for _ in range(N)]

    run_dir = f"{args.output_dir}/{args.env.replace(':', '.')}__nano__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    os.makedirs(run_dir)
    print(run_dir)
    with open(f"{run_dir}/args.json", "w") as file:
        json.dump({"script": "nano.py", "args": asdict(args)}, file, indent=2)

    for iteration in range(args.num_iterations + 1):  # 0 only evaluates
        metrics = {"iteration": iteration}
        if iteration > 0:
            # 1 ROLLOUT: for each task a tree, or S = G trajectories, which are trees without branches
            tasks = np.random.choice(train_tasks, B, replace=len(train_tasks) < B)
            S = G if args.branching == "trajectories" else 1
            turns = rollout(args, env, policies, np.repeat(tasks, S), [G // S] * T, args.joint_mode)
            if S > 1:
                # a trajectory that has ended says nothing more, and stays in the comparison with its last return;
                # in place, since the next pair begins with this list
                for before, nodes in pairwise(turns):
                    nodes[:] = [node.children[0] or replace(node, groups={}) for node in before]
            nodes = [node for nodes in turns for node in nodes]
            metrics["train/return"] = np.mean([root.value for root in turns[0]])
            groups = [group for node in nodes for group in node.groups.values()]
            metrics["tokens"] = sum(len(ids) for group in groups for ids in group.completion_ids)

            # 2 ADVANTAGES: of each agent's completions at a node, or in a turn of a task's trajectories
            for compared in np.reshape(nodes, (-1, S)):  # of a tree one node; else a task's trajectories in one turn
                for k, node in enumerate(compared):
                    for i, group in node.groups.items():
                        returns = group.returns if S == 1 else np.array([other.value[i] for other in compared])  # (G,)
                        # in marloo.py: returns - (returns.sum() - returns) / (G - 1)
                        # in maremax.py: returns - returns.max()
                        # in mareinforce.py: returns
                        advantages = returns - returns.mean()
                        group.advantages = np.split(advantages, S)[k]

            # 3 UPDATE: one optimizer step for each policy
            learning_rate = args.learning_rate * (1 - (iteration - 1) / args.num_iterations)
            for i, policy in enumerate(policies):
                loss = 0.0
                policy.optimizer.zero_grad()
                for node in nodes:
                    group = node.groups.get(i)
                    if group is None or abs(group.advantages).max() < 1e-9:  # silent, or nothing to prefer
                        continue
                    w = node.weight / (G // S)
                    discount = args.gamma ** len(node.history)
                    weights = w * discount * group.advantages / args.max_new_tokens  # (G,)
                    logprobs = token_logprobs(args, policy, group.prompt_ids, group.completion_ids)
                    group_loss = 0.0
                    for weight, values in zip(weights.tolist(), logprobs):
                        group_loss -= weight * values.sum()
                    group_loss.backward()
                    loss += group_loss.item()
                grad_norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), args.max_grad_norm)
                # for a rate of an agent's own multiply it by a number for each i; with 0 the agent stays as it is
                policy.optimizer.param_groups[0]["lr"] = learning_rate
                policy.optimizer.step()
                metrics |= {f"agent_{i}/loss": loss, f"agent_{i}/grad_norm": grad_norm.item()}

        # 4 EVALUATE: one joint answer to each held-out task; it draws random numbers, so --eval-every changes a run
        if iteration % args.eval_every == 0 or iteration == args.num_iterations:
            roots, *_ = rollout(args, env, policies, eval_tasks, [1] * T, "align")
            metrics["eval/return"] = np.mean([root.value for root in roots])
            for i, group in roots[0].groups.items():
                print(f"agent {i} on the first held-out task: {group.completions[0]}")

        # 5 LOG
        print(*[f"{name}={round(value, 4)}" for name, value in metrics.items()])
        with open(f"{run_dir}/metrics.jsonl", "a") as file:
            file.write(json.dumps(metrics) + "\n")

    for i, policy in enumerate(policies):
        policy.model.save_pretrained(f"{run_dir}/agent_{i}")
        policy.tokenizer.save_pretrained(f"{run_dir}/agent_{i}")
