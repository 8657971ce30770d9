"""One update of ours against one of trl's and of comlrl's: do equal completions and rewards give equal gradients?

    python benchmarks/agreement.py

Our script runs first, for one iteration of models/tiny on sample posts. Then each peer's trainer makes its update on
the same completions: only its generate() is replaced, by one that returns them. We compare the gradients that the
optimizers get, before clipping. Neither the peers' loss nor ours is written again here, except for one check: to see
whether two slips in comlrl's source explain how its gradient differs, the same slips are made in a loss of ours.

It uses the peers' virtual environment of benchmarks/peers.py, and makes it if necessary.
"""

import json
import os
import sys
from dataclasses import dataclass, field
from datetime import datetime

import torch
import tyro
from peers import COMPARISONS, install, run
from peers import Args as PeersArgs
from stamp import ROOT, Count, stamp
from transformers import AutoTokenizer

sys.path.insert(0, ROOT)
CHILD = os.path.join(ROOT, "benchmarks", "agreement_child.py")
MODEL = os.path.join(ROOT, "models", "tiny")
# comparison in peers.py -> the factor that turns our gradient into theirs, by the definitions of the two losses
FACTORS = {"magrpo-trl": "1", "marloo-trl": "C", "magrpo-comlrl": "C"}


@dataclass
class Args:
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3])  # of sampling; each gives other completions
    num_tasks: Count = 4  # B
    num_generations: Count = 8  # G
    completion_tokens: Count = 96  # C, at most
    pip_args: str = ""  # for installing the peers, as in peers.py


def write_prompts(path, num_tasks):
    """Writes sample posts in the form of benchmarks/peers_child.py; the last one is for our evaluation."""
    import envs

    env, tokenizer = envs.make("tldr", num_agents=1), AutoTokenizer.from_pretrained(MODEL)
    with open(path, "w") as file:
        for task in env.tasks("train")[: num_tasks + 1]:
            (user,) = env.observe(task, [])
            chat = [{"role": "user", "content": user}]
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            file.write(json.dumps({"user": user, "text": text}) + "\n")


def child(python, job, folder, name):
    """The result of a child process for this job; if it fails, the program ends."""
    path = os.path.join(folder, f"{name}.json")
    job = job | {"result": os.path.join(folder, f"{name}.pt")}
    with open(path, "w") as file:
        json.dump(job, file)
    if error := run(PeersArgs(), [python, CHILD, path], os.path.join(folder, f"{name}.txt")):
        sys.exit(f"{name}: {error}")
    return torch.load(job["result"], weights_only=False) | {"path": job["result"]}


def job_of(args, seed, script, more, num_agents, folder):
    """The job: a command for one iteration of ours, and what the peers need to know of it."""
    command = [os.path.join(ROOT, f"{script}.py"), "--env", "benchmarks.peers_child:Prompts", "--seed", seed]
    command += ["--dataset", os.path.join(folder, "prompts.jsonl"), "--model", MODEL, "--num-agents", num_agents]
    command += ["--num-iterations", 1, "--num-tasks", args.num_tasks, "--num-generations", args.num_generations]
    command += ["--max-new-tokens", args.completion_tokens, "--max-grad-norm", 1e9, "--output-dir", folder, *more]
    job = {"command": list(map(str, command)), "model": MODEL, "prompts": os.path.join(folder, "prompts.jsonl")}
    job |= {"num_tasks": args.num_tasks, "num_generations": args.num_generations, "num_agents": num_agents}
    job |= {"completion_tokens": args.completion_tokens, "updates": 0, "learning_rate": 1e-6, "max_grad_norm": 1e9}
    return job | {"seed": seed, "device": "cpu", "bf16": False, "trl_rows": 0}


def difference(theirs, ours):
    """(factor, rest): theirs is factor times ours, up to a remainder whose norm is that share of theirs."""
    theirs, ours = theirs.double(), ours.double()
    factor = (theirs @ ours / (ours @ ours)).item()
    return factor, ((theirs - factor * ours).norm() / theirs.norm()).item()


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    python = install(PeersArgs(pip_args=args.pip_args))
    about = stamp(args)
    folder = os.path.join(ROOT, "runs", f"agreement-{datetime.now():%Y%m%d-%H%M%S}")
    os.makedirs(folder)
    write_prompts(os.path.join(folder, "prompts.jsonl"), args.num_tasks)
    print("| ours | theirs | seed, agent | factor expected | factor | rest | if ours trained pads |", end="")
    print(" and not the last position |\n" + "|---" * 8 + "|")
    for comparison, factor in FACTORS.items():
        script, more, peer, num_agents = COMPARISONS[comparison]
        for seed in args.seeds:
            job = job_of(args, seed, script, more, num_agents, folder)
            ours = child(sys.executable, job | {"task": "ours"}, folder, f"{script}-{num_agents}-{seed}")
            theirs = child(python, job | {"task": peer, "ours": ours["path"]}, folder, f"{comparison}-{seed}")
            if theirs["left"]:
                sys.exit(f"{peer} left {theirs['left']} completions untrained; see {folder}")
            for i, gradient in enumerate(theirs["gradients"]):
                ratio, rest = difference(gradient, ours["gradients"][i])
                slips = ["", ""]
                if "comlrl" in peer:
                    slips = [f"{difference(gradient, slip)[1]:.1e}" for slip in ours["slips"][i]]
                cells = [f"{script}.py", peer, f"{seed}, {i}", factor, f"{ratio:.4f}", f"{rest:.1e}", *slips]
                print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\nC = {args.completion_tokens}; {about}")
