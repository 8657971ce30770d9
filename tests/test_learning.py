"""Every algorithm raises the return on sample posts that it was not trained on, magrpo from three seeds.

The runs are short; benchmarks/compare.py measures how far each gets.
"""

import pytest
from conftest import SCRIPTS

SEEDS = {"magrpo": (1, 2, 3)}  # the others: one
ITERATIONS = {"maremax": 60}  # without a positive advantage it learns more slowly


@pytest.mark.parametrize(
    "script, seed",
    [(script, seed) for script in SCRIPTS for seed in SEEDS.get(script.stem, (1,))],
    ids=lambda value: getattr(value, "stem", value),
)
def test_the_evaluation_return_rises_on_the_sample_posts(script, seed, run):
    count = ITERATIONS.get(script.stem, 20)
    names = run(script, "--seed", seed, "--num-iterations", count, "--eval-every", count, "--eval-tasks", 48)
    first, last = names["evaluations"]
    # one evaluation's mean of 48 returns has a standard error near 0.13
    assert last > first + 0.3


def test_no_agent_was_better_than_this_before_training(run):
    """models/tiny starts with room to learn: between gibberish and a good pair of summaries."""
    names = run(SCRIPTS[0], "--num-iterations", 0, "--eval-tasks", 100)
    assert 0.5 < names["evaluations"][0] < 1.5
