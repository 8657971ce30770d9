"""What benchmarks/agreement.py runs in child processes: one update of ours, and one of theirs on our completions.

    python benchmarks/agreement_child.py job.json

job.json holds what benchmarks/peers_child.py needs, and our command line. Both save the gradients that the optimizer
gets at its step. Heavy imports are inside the functions, since the peers have their own interpreter.
"""

import json
import os
import runpy
import sys
from types import SimpleNamespace

from peers_child import PAD, TRAINERS, Clock


def flat(parameters):
    from torch.nn.utils import parameters_to_vector

    return parameters_to_vector([p.grad for p in parameters]).clone()


def ours(job):
    """Runs the script; returns per agent the gradient, the completions by prompt, and the gradients with slips."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    gradients = []
    register_optimizer_step_pre_hook(lambda optimizer, *_: gradients.append(flat(optimizer.param_groups[0]["params"])))
    sys.argv = job["command"]
    sys.path.insert(0, os.path.dirname(job["command"][0]))  # as if started by its path
    nodes = runpy.run_path(job["command"][0], run_name="__main__")["turns"][0]
    groups = [[node.groups[i] for node in nodes] for i in range(job["num_agents"])]
    samples = [{tuple(group.prompt_ids): group.completion_ids for group in of_agent} for of_agent in groups]
    slips = [[with_slips(job, of_agent, left_out) for left_out in (0, 1)] for of_agent in groups]
    return {"gradients": gradients, "samples": samples, "slips": slips}


def with_slips(job, groups, left_out):
    """The gradient of a loss that trains padding, but not the last `left_out` positions (in comlrl's loss: 1)."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    for group in groups:
        P, C = len(group.prompt_ids), max(map(len, group.completion_ids))
        rows = torch.tensor([[*group.prompt_ids, *ids, *[PAD] * (C - len(ids))] for ids in group.completion_ids])
        logprobs = model(rows).logits[:, P - 1 : -1].log_softmax(-1)  # (G, C, V)
        logprobs = logprobs.gather(-1, rows[:, P:, None])[:, : C - left_out, 0]
        (-(group.advantages * logprobs.sum(1)).mean() / len(groups)).backward()
    return flat(model.parameters())


def theirs(job):
    """Makes one update on our completions; returns each agent's gradient."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    from transformers import GenerationMixin

    pending = torch.load(job["ours"], weights_only=False)["samples"]
    pending = [{prompt: list(group) for prompt, group in of_agent.items()} for of_agent in pending]
    models, gradients = [], [None] * job["num_agents"]  # models in the order in which they first generate

    def generate(model, input_ids, attention_mask, num_return_sequences=1, return_dict_in_generate=False, **_):
        """Replaces transformers' own: returns what ours drew, with the same padding as there."""
        if model not in models:
            models.append(model)
        of_agent = pending[models.index(model)]
        prompts = [tuple(ids[mask.bool()].tolist()) for ids, mask in zip(input_ids, attention_mask)]
        drawn = [of_agent[prompt].pop(0) for prompt in prompts for _ in range(num_return_sequences)]
        C = max(map(len, drawn))
        drawn = torch.tensor([[*ids, *[PAD] * (C - len(ids))] for ids in drawn])
        sequences = torch.cat([input_ids.repeat_interleave(num_return_sequences, 0), drawn], 1)
        return SimpleNamespace(sequences=sequences) if return_dict_in_generate else sequences

    def before_step(optimizer, *_):
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for i, model in enumerate(models):
            if {id(p) for p in model.parameters()} <= stepped:
                gradients[i] = flat(model.parameters())

    class Uncounted(Clock):
        def count(self, prompt_tokens, lengths):  # no check: prompts of posts differ in length
            pass

    GenerationMixin.generate = generate
    hook = register_optimizer_step_pre_hook(before_step)
    TRAINERS[job["task"]](job, Uncounted(job))
    hook.remove()
    return {"gradients": gradients, "left": sum(len(group) for of_agent in pending for group in of_agent.values())}


if __name__ == "__main__":
    import torch

    with open(sys.argv[1]) as file:
        job = json.load(file)
    torch.save((ours if job["task"] == "ours" else theirs)(job), job["result"])
