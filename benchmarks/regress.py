"""Do the scripts still learn what they did? One seed of each on tldr, ten minutes, against five stored ones.

    FLAGS="--num-iterations 40 --eval-every 40"
    python benchmarks/compare.py $FLAGS --seeds 1 --name regress_now
    python benchmarks/regress.py results/regress.csv results/regress_now.csv

Prints how many standard deviations (pooled over scripts) the last returns are from the stored means; fails beyond 3.
results/regress.csv is made by the same FLAGS with --seeds 5.
"""

import sys

import pandas as pd


def read_last_returns(path):
    """The last return of each run, grouped by script."""
    rows = pd.read_csv(path, skiprows=1)
    last = rows.groupby(["script", "seed"])["return"].last()
    return last.groupby("script")


if __name__ == "__main__":
    stored, now = map(read_last_returns, sys.argv[1:])
    deviation = stored.var().mean() ** 0.5
    distances = (now.mean() - stored.mean()) / deviation
    print(distances.round(1).to_string())
    sys.exit(not (distances.abs() <= 3).all())
