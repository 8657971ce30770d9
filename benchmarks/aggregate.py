"""One figure for each script over three tasks, from the files of benchmarks/compare.py: writes results/aggregate.csv.

    python benchmarks/aggregate.py

A run's score is (return - b) / (largest return - b), with b the mean return before training. tldr and gsm8k (roles
split) are read at equal numbers of tokens, humaneval at equal numbers of iterations. A row has a seed's mean score.
corrected: p of the mean difference of a script's scores to magrpo.py's of the same task and seed, by an exact
sign-flip test, since a seed has its own held-out tasks, the same for all scripts; after Holm's correction.
"""

from itertools import product

import numpy as np
import pandas as pd
from check import read_rows, read_values
from compare import SCRIPTS
from stamp import ROOT, make_stamp, write_rows

TASKS = [  # the largest return, where a run is read, and files
    (2.98, "248769", ["results/tldr.csv"]),
    (4.0, "end", ["results/humaneval.csv"]),
    (1.0, "end", ["results/gsm8k_split_tree.csv", "results/gsm8k_split_critics.csv"]),
]


def read_scores(largest, place, paths):
    """The scores of a task: (script, seed)."""
    rows = pd.concat(map(read_rows, paths))
    runs = [rows[rows["script"] == script] for script in SCRIPTS]
    before = np.mean([read_values(own, "return", "first") for own in runs])
    returns = np.array([read_values(own, "return", place) for own in runs])
    return (returns - before) / (largest - before)


def find_p(differences):
    """p of a mean of differences: the share of the choices of their signs with a mean as large."""
    signs = np.array(list(product([1, -1], repeat=len(differences))))
    sums = abs(signs @ differences)
    return np.mean(sums > sums[0] - 1e-9)


if __name__ == "__main__":
    scores = np.stack([read_scores(*task) for task in TASKS])  # (task, script, seed)
    differences = scores - scores[:, :1]
    p = pd.Series({script: find_p(differences[:, k].ravel()) for k, script in enumerate(SCRIPTS) if k > 0})
    p = p.sort_values()
    # Holm: times the number of comparisons that are left, and at least as large as those before it
    corrected = (p * np.arange(len(p), 0, -1)).cummax().clip(upper=1)
    rows = []
    for script, means in zip(SCRIPTS, scores.mean(0)):
        for seed, score in enumerate(means, 1):
            row = {
                "script": script,
                "corrected": corrected.get(script),
                "seed": seed,
                "score": score,
            }
            rows.append(row)
    write_rows(f"{ROOT}/results/aggregate.csv", make_stamp("aggregate"), rows)
