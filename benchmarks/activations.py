"""How many bytes the backward pass of a training batch keeps per token: what limits --max-batch-tokens on a GPU.

    python benchmarks/activations.py

Counts, on a CPU, the tensors that autograd keeps under bfloat16 autocast, as on a GPU, when a script computes the
hidden states of one prompt's completions. A third layer keeps what each further layer keeps, so three layers of each
model are enough. The weights and their bfloat16 copies are not counted, nor are logits (at most 256 MB at a time) or
what a GPU's kernels use for themselves.
"""

import importlib
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
import tyro
from peers import WORKLOADS
from stamp import ROOT, Count, Script, stamp
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, ROOT)


@dataclass
class Args:
    models: list[str] = field(default_factory=lambda: ["qwen2.5-0.5b", "qwen3-1.7b"])  # workloads of peers.py
    script: Script = "magrpo"  # whose functions are counted
    prompt_tokens: Count = 400  # P
    completion_tokens: Count = 256  # C
    num_generations: Count = 8  # G
    max_batch_tokens: Count = 4096  # the scripts' default


def kept(function, weights):
    """Bytes that autograd keeps for the backward pass of function(), but for `weights` and their bfloat16 copies."""
    excluded = {weight.untyped_storage().data_ptr() for weight in weights}
    shapes = {tuple(shape) for weight in weights if weight.dim() > 1 for shape in (weight.shape, weight.mT.shape)}
    found = {}

    def pack(tensor):
        copied = tensor.dtype == torch.bfloat16 and tuple(tensor.shape) in shapes
        if not copied and tensor.untyped_storage().data_ptr() not in excluded:
            found[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no other tensor gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


def count(args, script, config, num_layers, checkpointing):
    """(bytes that a batch of one prompt's completions keeps, its tokens)."""
    config = AutoConfig.for_model(**(config | {"num_hidden_layers": num_layers, "vocab_size": 1000}))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    if checkpointing:
        model.gradient_checkpointing_enable()
    P, C, G = args.prompt_tokens, args.completion_tokens, args.num_generations
    prompt, *completions = (torch.randint(1000, (size,)).tolist() for size in (P, *[C] * G))
    rows = [(prompt, completion, 0.0) for completion in completions]
    agent = SimpleNamespace(model=model, share=not checkpointing)
    with torch.autocast("cpu", torch.bfloat16):
        size = kept(lambda: script.completion_states(agent, rows), list(model.parameters()))
    return size, G * (P + C) if checkpointing else P + G * C


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    script = importlib.import_module(args.script)
    torch.manual_seed(0)
    print(f"{stamp(args)}\n")
    print("| model | | kB a token and layer | kB a token, all layers | GB a batch |\n|---|---|---|---|---|")
    for name in args.models:
        config = WORKLOADS[name].config
        for checkpointing in (False, True):
            (two, tokens), (three, _) = (count(args, script, config, n, checkpointing) for n in (2, 3))
            layer = (three - two) / tokens / 1e3  # kB
            token = config["num_hidden_layers"] * layer
            cells = [name, "--gradient-checkpointing" if checkpointing else ""]
            cells += [f"{layer:.0f}", f"{token:.0f}", f"{token * args.max_batch_tokens / 1e6:.1f}"]
            print(f"| {' | '.join(cells)} |")
