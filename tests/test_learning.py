"""Every algorithm raises the return from several seeds on a small task, and one also on posts it was not trained on.

The runs are short; benchmarks/compare.py measures how far each gets.
"""

import pytest
from conftest import ROOT, SCRIPTS, metrics_of, save_model


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_agents_learn_different_roles_from_a_shared_reward(script, seed, run, tmp_path):
    """One is paid for small letters, the other for capitals, both by the sum; a tenth of random bytes is either."""
    path = save_model(tmp_path / "model", stops=[2])
    sizes = ("--max-new-tokens", 8, "--num-iterations", 30, "--eval-every", 30, "--eval-generations", 16)
    names = run(script, "--env", "toy:Cases", "--model", path, "--learning-rate", 0.01, "--seed", seed, *sizes)
    first, last = (line["eval/return"] for line in metrics_of(names["run_dir"]) if "eval/return" in line)
    # one evaluation's mean of 64 returns has a standard error near 0.01 at first and 0.03 at last
    assert first < 0.2 and last > 0.4


def test_the_evaluation_return_rises_on_the_sample_posts(run):
    names = run(ROOT / "magrpo.py", "--num-iterations", 20, "--eval-every", 20, "--eval-tasks", 48)
    first, last = (line["eval/return"] for line in metrics_of(names["run_dir"]) if "eval/return" in line)
    # one evaluation's mean of 48 returns has a standard error near 0.13
    assert last > first + 0.3


def test_no_agent_was_better_than_this_before_training(run):
    """models/tiny starts with room to learn: between gibberish and a good pair of summaries."""
    names = run(SCRIPTS[0], "--num-iterations", 0, "--eval-tasks", 100)
    assert 0.5 < metrics_of(names["run_dir"])[0]["eval/return"] < 1.5
