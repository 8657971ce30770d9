"""What the agents are for: their returns rise, also where they speak in turn."""

import pytest
from conftest import ROOT, metrics_of, save_model, two_scripts

SMALL = "--num-iterations 2 --num-tasks 2 --num-generations 2 --max-new-tokens 8 --eval-every 1"


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


@pytest.mark.parametrize("name", ["magrpo.py", "mappo.py", "madpo.py"])  # of the others, test_gradient and test_ippo
def test_agents_may_speak_in_turn(name, run, model_dir):
    """Fails if an agent is trained, or counted, where it was silent, or one never speaks."""
    flags = f"{SMALL} --env toy:Sequential --num-agents 3 --num-turns 2"
    run_dir = run(ROOT / name, "--model", model_dir, *flags.split())["run_dir"]
    for metrics in metrics_of(run_dir)[1:]:
        assert [metrics[f"agent_{i}/grad_norm"] > 0 for i in range(3)] == [True, True, False]
        speaking = [i for i in range(3) if f"train/agent_{i}/entropy" in metrics]
        assert speaking == [0, 1]
