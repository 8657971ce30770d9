"""What each of a script's speed-ups gains: the same work with all of them and with one left out, alternating.

    python benchmarks/ablation.py --rounds 9

Each row is the time without a speed-up over the time with it, for the part of the work that it affects: per round, and
the median. Leaving one out does not change what is computed, only which random numbers are drawn.
"""

import statistics
from types import SimpleNamespace

import torch
import tyro
from stamp import stamp
from throughput import Args, ours_sample, ours_train, prepare, timed
from transformers.integrations.sdpa_attention import sdpa_attention_forward

VOCABULARY = 151_936  # Qwen's


def multinomial(weights):
    return torch.multinomial(weights, 1)


def ablations(args, script, agent, prompts):
    """For each speed-up: name -> functions that do the same work (with it, without it)."""

    def working(work, **others):
        """Does the work with some of the script's functions replaced."""
        own = {name: vars(script)[name] for name in others}
        vars(script).update(others)
        try:
            work()
        finally:
            vars(script).update(own)

    drawn = ours_sample(args, script, agent, prompts)
    alone = SimpleNamespace(**vars(agent) | {"share": False})
    wide = torch.rand(args.num_tasks * args.num_generations, VOCABULARY)
    fused, single = (torch.optim.AdamW(agent.model.parameters(), lr=0.0, fused=fused) for fused in (True, False))
    sampling = lambda: ours_sample(args, script, agent, prompts)
    training = lambda agent=agent: ours_train(args, script, agent, prompts, drawn)
    rows, trunk = {"grouped": lambda model: False}, script.trunk
    copied = {"trunk": lambda *inputs: trunk(*inputs[:5], sdpa_attention_forward)}
    return {
        "sampling: completions of a prompt as one row": (sampling, lambda: working(sampling, **rows)),
        "sampling: drawing by inversion": (sampling, lambda: working(sampling, draw=multinomial)),
        f"a draw of {VOCABULARY:,}: by inversion": (lambda: script.draw(wide), lambda: multinomial(wide)),
        "training: a prompt once for its completions": (training, lambda: training(alone)),
        "training: no copy of keys for each query head": (training, lambda: working(training, **copied)),
        "optimizer: fused": (fused.step, single.step),  # on the gradients that training left
    }


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    print(stamp(args))
    print("| speed-up | time without it over time with it, median | by round |\n|---|---|---|")
    for name, (with_it, without_it) in ablations(args, *prepare(args)).items():
        pairs = [(timed(with_it)[1], timed(without_it)[1]) for _ in range(args.rounds + 1)][1:]  # the first warms up
        ratios = [without / with_ for with_, without in pairs]
        shown = " ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"| {name} | **{statistics.median(ratios):.2f}** | {shown} |", flush=True)
