"""What a GPU does: two iterations of each script, then time and memory of an update, also of comlrl and trl.

    python benchmarks/gpu.py                                  all steps
    python benchmarks/gpu.py --steps trl                      one step, of at most 9 minutes
    python benchmarks/gpu.py --device cpu --shrink            a rehearsal: measures nothing

Steps, in this order: scripts (whether each runs, with models/tiny); qwen2.5-0.5b and qwen3-1.7b (shapes of these
models, against --baseline if there is one); comlrl and trl (see peers.py), with the first shape. Each writes
FOLDER/gpu_STEP.csv, as compare.py and throughput.py do. Whether sampling is right there, CUDA graphs and all, is
tested by

    CUDA_VISIBLE_DEVICES=0 python -m pytest tests/test_sampling.py

A pretrained model: python benchmarks/real.py --name gpu_real --jobs 5 --keep runs/gpu_real
"""

import os
import sys
from dataclasses import dataclass, field
from typing import Literal

import compare
import throughput
import torch
import tyro
from workloads import PEERS

STEPS = ["scripts", "qwen2.5-0.5b", "qwen3-1.7b", *PEERS]


@dataclass
class Args:
    steps: list[str] = field(default_factory=lambda: STEPS)
    baseline: str = ""  # a commit
    device: Literal["cpu", "cuda"] = "cuda"
    shrink: bool = False  # tiny sizes: measures nothing
    folder: str = "results"


def main(args):
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu.py: error: torch finds no GPU; --device cpu --shrink shows that it runs.")
    os.makedirs(args.folder, exist_ok=True)
    for step in args.steps:
        print(f"step {step}", flush=True)
        if step == "scripts":
            compare.main(
                compare.Args(
                    scripts=[*compare.SCRIPTS, "magrpo_fsdp", "nano"],
                    seeds=1,
                    jobs=2 if args.shrink else 9,
                    num_iterations=2,
                    flags="--num-tasks 2 --eval-tasks 4 --max-new-tokens 64",
                    name=f"{os.path.abspath(args.folder)}/gpu_scripts",
                )
            )
            continue
        step_args = throughput.Args(
            baseline=step if step in PEERS else args.baseline,
            workloads=["qwen2.5-0.5b" if step in PEERS else step],
            rounds=1,
            updates=2,
            device=args.device,
            shrink=args.shrink,
            seconds=250,  # for each side
            output=f"{args.folder}/gpu_{step}.csv",
        )
        throughput.main(step_args)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
