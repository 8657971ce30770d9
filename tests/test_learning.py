"""What the agents are for: their returns rise."""

from conftest import metrics_of, save_model, two_scripts


@two_scripts
def test_agents_learn_different_roles_from_a_shared_reward(script, run, tmp_path):
    """Fails if agents do not learn: one is paid for small letters, the other for capitals, both by the sum."""
    path = save_model(tmp_path / "model", stops=[2])
    flags = "--env toy:Cases --max-new-tokens 8 --num-iterations 20 --eval-every 20 --eval-generations 16"
    names = run(script, "--model", path, "--learning-rate", 0.01, *flags.split())
    first, *_, last = metrics_of(names["run_dir"])
    # a tenth of random bytes is either; a mean of 64 returns has a standard error near 0.01 at first and 0.03 at last
    assert first["eval/return"] < 0.2
    assert last["eval/return"] > 0.3
