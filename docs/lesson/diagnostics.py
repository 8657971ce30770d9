"""Whose words make a difference: credit of each agent in a run, in the spirit of the diagnostics of C3 (2603.06859).

python docs/lesson/diagnostics.py runs/RUN
"""

import json
import sys
from collections import defaultdict

import numpy as np


def diagnostics(lines):
    """Of each agent, from lines of rollouts.jsonl: (variance, explained).

    variance: of the returns of its completions at a node, which are alternatives in the same context; mean over nodes.
    explained: the share of it that the text explains, estimated without bias from texts that were drawn several times.
    The rest is luck: the others' words and what was drawn later. Where a text has no consequence it is about 0.
    """
    found = defaultdict(list)
    for line in lines:
        for i, group in enumerate(line["agents"]):
            if group is None or line["split"] != "train":
                continue
            returns = defaultdict(list)  # text -> numbers
            for text, number in zip(group["completions"], group["returns"]):
                returns[text].append(number)
            free = len(group["returns"]) - len(returns)
            if free > 0 and len(returns) > 1:
                luck = sum(len(own) * np.var(own) for own in returns.values()) / free
                found[i].append([np.var(group["returns"], ddof=1), luck])
    summary = {}
    for i, pairs in sorted(found.items()):
        variance, luck = np.mean(pairs, 0)
        summary[i] = (variance, 1 - luck / variance) if variance else (0.0, np.nan)
    return summary


if __name__ == "__main__":
    with open(f"{sys.argv[1]}/rollouts.jsonl") as file:
        for i, (variance, explained) in diagnostics(map(json.loads, file)).items():
            print(f"agent {i}: variance of returns {variance:.3f}, explained by its text {explained:.2f}")
