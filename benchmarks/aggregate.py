"""One figure a script over tldr, humaneval and gsm8k with roles split, of the runs behind docs/results.md.

    python benchmarks/aggregate.py

A run's score is (return - b) / (largest return - b), with b the mean return before training. tldr and gsm8k are
read at equal numbers of tokens, humaneval at equal numbers of iterations. A row of results/aggregate.csv is a script:

- iqm: the interquartile mean of its scores, that is of the middle 9 of 3 tasks x 5 seeds;
- better: the chance that a run of it has a higher return than one of magrpo.py on the same task, mean over tasks;
- low, high: 95% intervals of both, by a bootstrap that draws seeds within each task (a little narrow for five seeds);
- p: of the mean difference of its scores to magrpo.py's of the same task and seed, by an exact sign-flip test, since a
  seed has its own held-out tasks, the same for all scripts;
- corrected: p after Holm's correction for the six comparisons.

Agarwal et al. 2021, Deep Reinforcement Learning at the Edge of the Statistical Precipice (arXiv 2108.13264).
"""

import itertools

import numpy as np
import pandas as pd
from plot import figures_of
from stamp import ROOT, stamp, write_rows

TASKS = [  # the largest return, where a run is read, and files of the critic-free scripts and of those with critics
    (2.98, "251593", "results/tldr.csv", "results/tldr.csv"),
    (4.0, "end", "results/humaneval.csv", "results/humaneval.csv"),
    (1.0, "end", "results/gsm8k_split_measured.csv", "results/gsm8k_split.csv"),
]
SCRIPTS = ["magrpo", "marloo", "maremax", "mareinforce", "ippo", "mappo", "madpo"]
DRAWS = 10_000


def load_scores():
    """Scores (script, task, seed)."""
    scores = []
    for most, place, critic_free, with_critics in TASKS:
        sources = []
        for script in SCRIPTS:
            path = with_critics if script in ("ippo", "mappo") else critic_free
            sources.append(f"{path}: script == '{script}'")
        before = np.mean([figures_of("return seeds first", source, source) for source in sources])
        returns = np.array([figures_of(f"return seeds {place}", source, source) for source in sources])
        scores.append((returns - before) / (most - before))
    return np.stack(scores, 1)


def iqm(scores):
    """Interquartile means (...) of scores (..., task, seed); as usual, of n values n / 4 at each end are left out."""
    values = np.sort(scores.reshape(*scores.shape[:-2], -1))
    cut = values.shape[-1] // 4
    return values[..., cut:-cut].mean(-1)


def better(scores, others):
    """Shares (...) of pairs of runs of a task in which the first is higher, ties half; mean over tasks."""
    differences = scores[..., :, None] - others[..., None, :]
    return ((np.sign(differences) + 1) / 2).mean((-3, -2, -1))


def sign_flip_test(differences):
    """Exact two-sided p of a mean of differences (n,): the share of the 2^n choices of signs with a mean as large."""
    signs = np.array(list(itertools.product([1, -1], repeat=len(differences))))
    sums = signs @ np.asarray(differences)  # (2^n,)
    return np.mean(abs(sums) > abs(sums[0]) - 1e-9)


def holm(p):
    """A Series of p corrected for their number, each at least as large as those before it in ascending order."""
    ascending = p.dropna().sort_values()
    factors = np.arange(len(ascending), 0, -1)
    return (ascending * factors).cummax().clip(upper=1)


def main():
    about = stamp({"draws": DRAWS})
    rng = np.random.default_rng(1)
    scores = load_scores()
    _, num_tasks, num_seeds = scores.shape

    def bootstrap(values):
        """Values (task, seed) drawn again: (DRAWS, task, seed)."""
        drawn = rng.integers(num_seeds, size=(DRAWS, num_tasks, num_seeds))
        return np.take_along_axis(np.broadcast_to(values, drawn.shape), drawn, -1)

    rows = []
    for script, own in zip(SCRIPTS, scores):
        row = {"script": script, "seed": 0, "iqm": iqm(own)}  # of all seeds; plot.py --check needs the column
        row["iqm_low"], row["iqm_high"] = np.quantile(iqm(bootstrap(own)), [0.025, 0.975])
        if script != "magrpo":
            row["better"] = better(own, scores[0])
            chances = better(bootstrap(own), bootstrap(scores[0]))
            row["better_low"], row["better_high"] = np.quantile(chances, [0.025, 0.975])
            row["p"] = sign_flip_test((own - scores[0]).ravel())
        rows.append(row)
    frame = pd.DataFrame(rows)
    frame["corrected"] = holm(frame["p"])
    write_rows(f"{ROOT}/results/aggregate.csv", about, frame.to_dict("records"))
    print(frame.round(3).to_string())


if __name__ == "__main__":
    main()
