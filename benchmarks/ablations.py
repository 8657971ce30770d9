"""Takes details of docs/details.md out of the scripts, trains, and writes results/ablations.csv.

    python benchmarks/ablations.py --folder runs/ablations

A copy of the last commit in the folder runs each changed script, and the unchanged one (ablation none), with equal
flags and seeds. A run that has ended is not repeated. A row is a run: setting, ablation, seed, before (return of the
first evaluation), difference (of the last one's return, to that of the unchanged script with this seed), the last
evaluation as in benchmarks/compare.py, the first update's metrics of each agent, and moved (by how much the first
agent's weights, as a vector, have moved).
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path

import pandas as pd
import torch
import tyro
from compare import evaluations
from safetensors.torch import load_file
from stamp import ROOT, checkout, stamp, write_rows

COMMON = "--num-iterations 20 --eval-every 20 --eval-generations 8"
REFERENCE = "--env reference --num-agents 3"
STILL = "--env tldr --num-iterations 1 --learning-rate 1e-12"  # too low to change anything

# name -> script and flags, which come after COMMON
SETTINGS = {
    "constant": ("magrpo", "--env docs.probes:Constant --num-turns 2 --gamma 0.7 --num-generations 6"),
    "precision": ("ippo", f"{STILL} --update-epochs 1 --num-minibatches 1"),
    "still": ("magrpo", f"{STILL} --eval-generations 1"),
    "reference": ("magrpo", REFERENCE),
    "silent": ("ippo", REFERENCE),
    "tldr": ("magrpo", "--env tldr --max-batch-tokens 1024"),
    "shared": ("magrpo", f"{REFERENCE} --share-policy --joint-mode cross --num-generations 4 --gamma 0.5"),
    "critic": ("ippo", "--env tldr"),
    "cool": ("magrpo", "--env tldr --temperature 0.6"),
}

# name -> setting, and pairs of an old text and a new one
LOSS = "batch_loss -= weight * values.sum()"
PART = "parts.append((group.prompt_ids, completion_ids, weight))"
PADDED = "(completion_ids + [0] * args.max_new_tokens)[: max(map(len, group.completion_ids))]"
STOPS = "stop_ids=sorted({stop, tokenizer.eos_token_id, *ends} - {None})"
LENGTHS = "[*map(len, group.completion_ids)]"
AUTOCAST = ('enabled=device.type == "cuda"', "enabled=True")
ABLATIONS = {
    "float32_returns": ("constant", ("# >>> ALGORITHM", 'returns = returns.astype("float32")')),
    "autocast": ("precision", AUTOCAST),
    "bfloat16_head": ("precision", AUTOCAST, (".float().__class__ = Float32Head", "")),
    "eval_seed": ("still", ("reseed(args.seed, 0)", "pass")),
    "turn_end": ("still", (STOPS, "stop_ids=[0]")),
    "first_token": ("reference", (LOSS, "batch_loss -= weight * values[1:].sum()")),
    "silent_turn": ("silent", ("reward = turn_reward + gamma * reward", "reward = turn_reward")),
    "stop_token": ("tldr", (LOSS, "batch_loss -= weight * values[:-1].sum()")),
    "after_stop": ("tldr", (PART, PART.replace("completion_ids", PADDED))),
    "length": ("tldr", ("advantages / args.max_new_tokens", f"advantages / {LENGTHS}")),
    "temperature": ("cool", ("(logits / temperature)", "logits")),
    "values_from_0": ("critic", ("critic.head.bias.data[turn] = sum(rewards)", "pass")),
    "partner_sum": ("shared", ("group.returns = sums / np.bincount(member)", "group.returns = sums")),
}


@dataclass
class Args:
    folder: str = "runs/ablations"  # of the copy and its runs
    seeds: int = 3  # 1, 2, ...
    settings: list[str] = field(default_factory=lambda: [*SETTINGS])


def weights(folder):
    """All weights of a model, as a vector."""
    return torch.cat([values.flatten() for values in load_file(f"{folder}/model.safetensors").values()])


def train(tree, seed, ablation, setting, *changes):
    """The row of a run, which may be there already."""
    script, flags = SETTINGS[setting]
    code = Path(tree, f"{script}.py").read_text()
    for old, new in changes:
        assert code.count(old) == 1, f"{ablation}: {script}.py has {code.count(old)} times {old}"
        code = code.replace(old, new)
    name = f"{script}_{ablation}"
    Path(tree, f"{name}.py").write_text(code)
    folder = f"{tree}/runs/{setting}_{ablation}_{seed}"
    if not os.path.exists(folder):
        shutil.rmtree(f"{folder}.part", ignore_errors=True)
        words = f"{name}.py {COMMON} {flags} --seed {seed} --output-dir {folder}.part".split()
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *words], cwd=tree, env=environment, check=True)
        os.replace(f"{folder}.part", folder)
    (run_dir,) = glob(f"{folder}/*")
    before, after = evaluations(run_dir)
    update = pd.read_json(f"{run_dir}/metrics.jsonl", lines=True).filter(regex="^agent_").iloc[1]
    about = {"setting": setting, "ablation": ablation, "seed": seed, "before": before["return"]}
    moved = (weights(f"{run_dir}/agent_0") - weights(f"{ROOT}/models/tiny")).norm().item()
    return about | after | update.to_dict() | {"moved": moved}


def main(args):
    about = stamp(args)
    tree = checkout("HEAD", os.path.join(ROOT, args.folder))
    runs = [("none", setting) for setting in args.settings]
    runs += [(name, *ablation) for name, ablation in ABLATIONS.items() if ablation[0] in args.settings]
    rows = [train(tree, seed, *run) for run in runs for seed in range(1, args.seeds + 1)]
    frame = pd.DataFrame(rows)
    unchanged = frame[frame["ablation"] == "none"].set_index(["setting", "seed"])["return"]
    frame.insert(4, "difference", frame["return"] - unchanged[zip(frame["setting"], frame["seed"])].to_numpy())
    write_rows(f"{ROOT}/results/ablations.csv", about, frame)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
