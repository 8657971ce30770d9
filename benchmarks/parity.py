"""Our gradients against trl's and comlrl's: same model, tasks, prompts, reward, rollouts and learning rate.

    python benchmarks/parity.py --num-iterations 30        (peers.py says what has to be installed)

One agent is compared with trl, with a learning rate that decays linearly; two agents, aligned, with comlrl, at a
constant one, since comlrl has no schedule. comlrl_cut tells why comlrl differs: the padding is cut off what it trains,
and the last token is doubled, since comlrl does not train the last one.

A row of results/parity_gradient.csv is a peer and a seed. On the first rollout of its agent 0, cosine compares its
gradient before it is clipped with ours. Then all rollouts of this agent are trained on by magrpo.py's update.
distance: between the weights that the peer and ours end with, over the distance that the peer's have moved. What is in
--folder is not trained again.
"""

import os
import shutil
from collections import defaultdict
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import transformers
import tyro
from comlrl.trainers.reinforce import MAGRPOTrainer
from datasets import Dataset
from peers import make_comlrl_arguments, make_trl_arguments
from stamp import ROOT, make_stamp, write_rows
from torch.nn.utils import parameters_to_vector
from trl import GRPOTrainer

import magrpo

TINY = f"{ROOT}/models/tiny"
RATE = 4e-4  # of magrpo.py for this model
LENGTH = 96  # max_new_tokens


@dataclass
class Args(magrpo.Args):  # num_iterations, num_tasks and num_generations are used
    seeds: int = 3
    folder: str = "runs/parity"  # of what is trained


# The peers


def load_inputs(args, folder):
    """What the peers need: the job of peers.py, all tasks with their prompts, as in magrpo.py, and the reward."""
    job = {"model": TINY, "learning_rate": RATE, "completion_tokens": LENGTH, "device": "cpu", "folder": folder}
    job |= {"num_tasks": args.num_tasks, "num_generations": args.num_generations}
    job |= {"updates": args.num_iterations, "seed": args.seed}
    env = magrpo.load_environment(args)
    tasks = env.tasks("train")
    policy = magrpo.load_policy(args, TINY, {})
    order = np.random.default_rng(args.seed).permutation(len(tasks))[: args.num_iterations * args.num_tasks]
    rows = []
    for k in order.tolist():
        prompt_ids = [magrpo.encode(policy, prompt) for prompt in env.observe(tasks[k], [])]
        prompts = policy.tokenizer.batch_decode(prompt_ids)
        rows.append({"k": k, "prompt": prompts[0], "all_prompts": prompts})

    def reward(k, completions):
        return env.step([(tasks[k], [], completions)])[0].reward

    return job, Dataset.from_list(rows), reward


def keep_update(folder, model, rollout, length):
    """Adds to a file a rollout, triples of prompt_ids, completion_ids and return, and the first gradient."""
    path = f"{folder}/updates"
    updates = torch.load(path) if os.path.exists(path) else []
    gradient = None if updates else parameters_to_vector(p.grad for p in model.parameters()).double() / length
    torch.save([*updates, (list(rollout), gradient)], path)


def train_trl(args, folder):
    job, tasks, reward = load_inputs(args, folder)
    arguments = make_trl_arguments(job)
    rollout = []

    class Trainer(GRPOTrainer):
        def _clip_grad_norm(self, model):
            keep_update(folder, model, rollout, 1)
            rollout.clear()
            return super()._clip_grad_norm(model)

    def rewards_of(prompts, completions, completion_ids, k, **_):
        rewards = [reward(number, [completion]) for number, completion in zip(k, completions)]
        rollout.extend(zip(arguments["processing_class"](prompts).input_ids, completion_ids, rewards))
        return rewards

    trainer = Trainer(reward_funcs=rewards_of, train_dataset=tasks, **arguments)
    trainer.train()
    trainer.save_model(f"{folder}/agent_0")


def train_comlrl(args, folder, cut=False):
    job, tasks, reward = load_inputs(args, folder)
    arguments = make_comlrl_arguments(job)
    pad = arguments["tokenizer"].pad_token_id
    transformers.set_seed(args.seed)

    class Trainer(MAGRPOTrainer):
        def _update_from_samples(self, i, samples):
            rollout = []
            for sample in samples:
                data = sample.completions_data
                rows = [ids[ids != pad] for ids in data["completion_input_ids"][0]]
                for ids, value in zip(rows, sample.returns):
                    rollout.append((data["prompt_input_ids"][0].tolist(), ids.tolist(), value))
                if cut:
                    data["completion_input_ids"] = [[torch.cat([ids, ids[-1:]]) for ids in rows]]
            super()._update_from_samples(i, samples)
            if i == 0:
                keep_update(folder, self.agents[i], rollout, LENGTH)

    def reward_of(*completions, batch_items):
        return [reward(batch_items[0]["k"], [texts[0] for texts in completions])]

    formatters = [lambda row, i=i: row["all_prompts"][i] for i in range(args.num_agents)]
    trainer = Trainer(train_dataset=tasks, reward_func=reward_of, formatters=formatters, **arguments)
    trainer.train()
    trainer.save_model(folder)


PEERS = {  # name -> number of agents, and how they are trained
    "trl": (1, train_trl),
    "comlrl": (2, train_comlrl),
    "comlrl_cut": (2, partial(train_comlrl, cut=True)),
}


# Comparisons


def replay(args, folder):
    """Numbers of a row: a peer's rollouts trained on by magrpo.py's log-probabilities, loss and optimizer step."""
    updates = torch.load(f"{folder}/updates")
    policy = magrpo.load_policy(args, TINY, {})
    start = weights_of(policy)
    if args.num_agents == 2:
        # AdamW of comlrl, whose gradients are not divided by the length
        policy.optimizer.param_groups[0] |= {"eps": 1e-8 / LENGTH, "weight_decay": 0.01}
    row = {}
    for number, (rollout, gradient) in enumerate(updates):
        prompt_ids, completion_ids, returns = zip(*rollout)
        groups = np.reshape(returns, (-1, args.num_generations))
        advantages = groups - groups.mean(1, keepdims=True)
        factors = defaultdict(float)
        for prompt, completion, advantage in zip(prompt_ids, completion_ids, advantages.ravel().tolist()):
            factors[tuple(prompt), tuple(completion)] += advantage / len(rollout) / LENGTH
        magrpo.accumulate_gradients(args, policy, [magrpo.Example(*ids, factor) for ids, factor in factors.items()])
        # of the first rollout, which both sample from the same weights
        if gradient is not None:
            ours = parameters_to_vector(p.grad for p in policy.trained.values()).double()
            row["cosine"] = torch.cosine_similarity(ours, gradient, 0).item()
        decay = 1 - number / len(updates) if args.anneal_lr else 1.0
        policy.optimizer.param_groups[0]["lr"] = RATE * decay
        magrpo.optimizer_step(args, policy)
    end = weights_of(magrpo.load_policy(args, f"{folder}/agent_0", {}))
    return row | {"distance": ((weights_of(policy) - end).norm() / (end - start).norm()).item()}


@torch.no_grad()
def weights_of(policy):
    return parameters_to_vector(policy.trained.values())


def compare(args, peer):
    """A row; trains the peer's agents, unless they are there."""
    args.num_agents, train = PEERS[peer]
    args.anneal_lr = args.num_agents == 1
    folder = f"{args.folder}/{peer}_{args.num_iterations}_{args.seed}"
    if not os.path.exists(f"{folder}/agent_0"):
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        train(args, folder)
    return {"contestant": peer, "seed": args.seed} | replay(args, folder)


def main(args):
    about = make_stamp(args)
    torch.set_num_threads(1)
    rows = []
    for peer in PEERS:
        for seed in range(1, args.seeds + 1):
            args.seed = seed
            rows.append(compare(args, peer))
            print(*rows[-1].values(), flush=True)
    write_rows(f"{ROOT}/results/parity_gradient.csv", about, rows)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
