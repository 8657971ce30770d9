"""Our gradients and returns against trl's and comlrl's: same model, tasks, prompts, reward and learning rate.

    benchmarks/.peers-venv/bin/python benchmarks/parity.py --num-iterations 60

peers.py prints how to make that environment, which needs tyro, too. One agent is compared with trl, with a learning
rate that decays linearly; two agents, aligned, with comlrl, at a constant one, since comlrl has no schedule. The peers
are as they are, except comlrl_cut, which tells why comlrl_alike differs: the padding is cut off what comlrl trains,
and the last token is doubled, since comlrl does not train the last one.

A row of results/parity_gradient.csv compares, on an agent's first rollout by a peer, the peer's gradient before it is
clipped with ours. comlrl does not divide by max_new_tokens, so its gradient is divided here. Then all rollouts of the
peer are trained on by magrpo.py's update. distance: between the weights that the peer and ours end with, over the
distance that the peer's have moved. A row of results/parity_returns.csv is the mean return of 4 answers to each
held-out task after training, by magrpo.py's evaluation. All are judged with two samplers: full, the whole
distribution, and narrow, comlrl's default. difference: to magrpo.py with the same seed, which also has the same tasks,
and sampler; p: of a sign-flip test of the differences. What is in --folder is not trained again.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from glob import glob
from importlib.metadata import version

import numpy as np
import pandas as pd
import torch
import transformers
import tyro
from aggregate import sign_flip_test
from comlrl.trainers.reinforce import MAGRPOConfig, MAGRPOTrainer
from datasets import Dataset
from stamp import ROOT, stamp, write_rows
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, ROOT)

import magrpo

TINY = f"{ROOT}/models/tiny"
RATE = 4e-4  # of magrpo.py for this model
LENGTH = 96  # max_new_tokens


@dataclass
class Args(magrpo.Args):  # num_iterations, num_tasks and num_generations are used
    seeds: tuple[int, int] = (8, 5)  # how many of one agent, and of two
    folder: str = "runs/parity"  # of what is trained


# The contestants


def train_magrpo(args, folder):
    command = [sys.executable, f"{ROOT}/magrpo.py", "--output-dir", folder, "--joint-mode", "align"]
    command += ["--anneal-lr" if args.anneal_lr else "--no-anneal-lr"]
    for name in "seed", "num_agents", "num_tasks", "num_generations", "num_iterations":
        command += [f"--{name}", str(getattr(args, name))]
    subprocess.run(command, check=True)


def load(args, name):
    return magrpo.load_policy(args, name, {})


def load_inputs(args):
    """What the peers need: tokenizer, tasks of all updates with their prompts, as in magrpo.py, and reward."""
    env = magrpo.load_environment(args)
    tasks = env.tasks("train")
    policy = load(args, TINY)
    order = np.random.default_rng(args.seed).permutation(len(tasks))[: args.num_iterations * args.num_tasks]
    rows = []
    for k in order.tolist():
        prompt_ids = [magrpo.encode(policy, prompt) for prompt in env.observe(tasks[k], [])]
        prompts = policy.tokenizer.batch_decode(prompt_ids)
        rows.append({"k": k, "prompt": prompts[0], "all_prompts": prompts})

    def reward(k, completions):
        return env.step([(tasks[k], [], completions)])[0].reward

    return policy.tokenizer, Dataset.from_list(rows), reward


def keep_update(folder, i, model, rollout, length):
    """Adds to agent i's file a rollout, triples of prompt_ids, completion_ids and return, and the first gradient."""
    path = f"{folder}/updates_{i}"
    updates = torch.load(path) if os.path.exists(path) else []
    gradient = None if updates else parameters_to_vector(p.grad for p in model.parameters()).double() / length
    torch.save([*updates, (list(rollout), gradient)], path)


def train_trl(args, folder, options):
    tokenizer, tasks, reward = load_inputs(args)
    rollout = []

    class Trainer(GRPOTrainer):
        def _clip_grad_norm(self, model):
            keep_update(folder, 0, model, rollout, 1)
            rollout.clear()
            return super()._clip_grad_norm(model)

    def rewards_of(prompts, completions, completion_ids, k, **_):
        rewards = [reward(number, [completion]) for number, completion in zip(k, completions)]
        rollout.extend(zip(tokenizer(prompts).input_ids, completion_ids, rewards))
        return rewards

    # by default gradients are clipped to 1 and the learning rate decays linearly, as ours
    config = GRPOConfig(
        max_steps=args.num_iterations,
        per_device_train_batch_size=args.num_tasks * args.num_generations,
        num_generations=args.num_generations,
        max_completion_length=LENGTH,
        learning_rate=RATE,
        seed=args.seed,
        shuffle_dataset=False,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        output_dir=folder,
        **options,
    )
    trainer = Trainer(TINY, rewards_of, config, tasks, processing_class=tokenizer)
    trainer.train()
    trainer.save_model(f"{folder}/agent_0")


def train_comlrl(args, folder, options, cut=False):
    tokenizer, tasks, reward = load_inputs(args)
    transformers.set_seed(args.seed)

    class Trainer(MAGRPOTrainer):
        def _update_from_samples(self, i, samples):
            rollout = []
            for sample in samples:
                data = sample.completions_data
                rows = [ids[ids != tokenizer.pad_token_id] for ids in data["completion_input_ids"][0]]
                for ids, value in zip(rows, sample.returns):
                    rollout.append((data["prompt_input_ids"][0].tolist(), ids.tolist(), value))
                if cut:
                    data["completion_input_ids"] = [[torch.cat([ids, ids[-1:]]) for ids in rows]]
            super()._update_from_samples(i, samples)
            keep_update(folder, i, self.agents[i], rollout, LENGTH)

    def reward_of(*completions, batch_items):
        return [reward(batch_items[0]["k"], [strings[0] for strings in completions])]

    config = MAGRPOConfig(
        num_train_epochs=1,
        num_turns=1,
        num_agents=args.num_agents,
        num_generations=args.num_generations,
        max_new_tokens=LENGTH,
        agent_learning_rate=RATE,
        rollout_buffer_size=args.num_tasks,
        **options,
    )
    trainer = Trainer(
        TINY,
        num_agents=args.num_agents,
        tokenizer=tokenizer,
        model_config={"torch_dtype": "float32"},
        train_dataset=tasks,
        reward_func=reward_of,
        formatters=[lambda row, i=i: row["all_prompts"][i] for i in range(args.num_agents)],
        args=config,
    )
    trainer.train()
    trainer.save_model(folder)


ALIKE = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "advantage_normalization": False}
CONTESTANTS = {  # name -> number of agents, how they are trained, and its options; ours before those compared with it
    "magrpo_1": (1, train_magrpo),
    "trl_dr_grpo": (1, train_trl, {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "trl_default": (1, train_trl, {}),
    "magrpo_2": (2, train_magrpo),
    "comlrl_alike": (2, train_comlrl, ALIKE),
    "comlrl_default": (2, train_comlrl, {}),
    "comlrl_cut": (2, train_comlrl, ALIKE, True),
}


# Comparisons


def replay(args, path, name):
    """Numbers of a row: a peer's rollouts trained on by magrpo.py's log-probabilities, loss and optimizer step."""
    updates = torch.load(path)
    policy = load(args, TINY)
    if args.num_agents == 2:
        # AdamW of comlrl, whose gradients are not divided by the length
        policy.optimizer.param_groups[0] |= {"eps": 1e-8 / LENGTH, "weight_decay": 0.01}
    gradients = []
    for number, (rollout, _) in enumerate(updates):
        prompt_ids, completion_ids, returns = zip(*rollout)
        groups = np.reshape(returns, (-1, args.num_generations))
        advantages = groups - groups.mean(1, keepdims=True)
        logprobs = magrpo.token_logprobs(policy, prompt_ids, completion_ids, args.temperature)
        loss = 0.0
        for advantage, values in zip(advantages.flat, logprobs):
            loss -= advantage / len(rollout) / LENGTH * values.sum()
        loss.backward()
        if not gradients:
            gradients = [parameters_to_vector(p.grad for p in policy.trained.values()).double(), updates[0][1]]
        policy.optimizer.param_groups[0]["lr"] = RATE * (1 - number / len(updates) if args.anneal_lr else 1.0)
        clip_grad_norm_(policy.trained.values(), args.max_grad_norm)
        policy.optimizer.step()
        policy.optimizer.zero_grad()
    ours, theirs = gradients
    start, end, replayed = [weights_of(each) for each in (load(args, TINY), load(args, name), policy)]
    return {
        "our_norm": ours.norm().item(),
        "their_norm": theirs.norm().item(),
        "cosine": torch.cosine_similarity(ours, theirs, 0).item(),
        "largest_difference": (ours - theirs).abs().max().item(),
        "updates": len(updates),
        "distance": ((replayed - end).norm() / (end - start).norm()).item(),
    }


@torch.no_grad()
def weights_of(policy):
    return parameters_to_vector(policy.trained.values())


draw_full = magrpo.draw


def draw_narrow(logits, temperature):
    """A token as comlrl draws it by default: temperature 0.6, of the 50 likeliest those that have 0.6 together."""
    logits = transformers.TopKLogitsWarper(50)(None, logits / 0.6)
    return draw_full(transformers.TopPLogitsWarper(0.6)(None, logits), temperature)


def compare(args, contestant, gradients, returns):
    """Trains agents, unless they are there, and adds rows for them."""
    args.num_agents, train, *options = CONTESTANTS[contestant]
    args.anneal_lr = args.num_agents == 1
    folder = f"{args.folder}/{contestant}_{args.num_iterations}_{args.seed}"
    if not os.path.exists(folder):
        unfinished = f"{folder}_unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        os.makedirs(unfinished)
        train(args, unfinished, *options)
        os.rename(unfinished, folder)
    row = {"contestant": contestant, "agents": args.num_agents, "seed": args.seed}
    names = sorted(glob(f"{folder}/**/agent_*", recursive=True))
    for path, name in zip(sorted(glob(f"{folder}/updates_*")), names):  # there are none of ours
        gradients.append(row | {"agent": path[-1]} | replay(args, path, name))
    env = magrpo.load_environment(args)
    tasks = list(enumerate(env.tasks("test")))
    policies = [load(args, name) for name in names]
    for sampler, draw in ("full", draw_full), ("narrow", draw_narrow):
        magrpo.draw = draw
        metrics, _ = magrpo.evaluate(args, env, policies, tasks, 0)
        returns.append(row | {"sampler": sampler, "return": metrics["eval/return"]})


def main(args):
    about = f"{stamp(args)}; trl {version('trl')}, comlrl {version('comlrl')}"
    torch.set_num_threads(1)
    args.max_new_tokens = LENGTH
    args.eval_generations = 4  # with one, chance moves a mean over 200 tasks by 0.04
    gradients = []
    returns = []
    for contestant, (num_agents, *_) in CONTESTANTS.items():
        for seed in range(1, args.seeds[num_agents - 1] + 1):
            args.seed = seed
            compare(args, contestant, gradients, returns)
    frame = pd.DataFrame(returns)
    ours = frame.groupby(["agents", "seed", "sampler"])["return"].transform("first")
    frame["difference"] = frame["return"] - ours
    frame["p"] = frame.groupby(["contestant", "sampler"])["difference"].transform(sign_flip_test)
    write_rows(f"{ROOT}/results/parity_gradient.csv", about, gradients)
    write_rows(f"{ROOT}/results/parity_returns.csv", about, frame.to_dict("records"))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
