"""What the agents are for: their returns rise; and games, where each has a reward and a turn of its own."""

import itertools

import pytest
from conftest import SCRIPTS, metrics_of, save_model, two_scripts
from toy import value_of_kuhn

SMALL = ("--num-iterations", 2, "--num-tasks", 2, "--num-generations", 2, "--max-new-tokens", 8, "--eval-every", 1)


@two_scripts
def test_agents_learn_different_roles_from_a_shared_reward(script, run, tmp_path):
    """One is paid for small letters, the other for capitals, both by the sum; a tenth of random bytes is either."""
    path = save_model(tmp_path / "model", stops=[2])
    sizes = ("--max-new-tokens", 8, "--num-iterations", 30, "--eval-every", 30, "--eval-generations", 16)
    names = run(script, "--env", "toy:Cases", "--model", path, "--learning-rate", 0.01, *sizes)
    first, last = (line["eval/return"] for line in metrics_of(names["run_dir"]) if "eval/return" in line)
    # one evaluation's mean of 64 returns has a standard error near 0.01 at first and 0.03 at last
    assert first < 0.2 and last > 0.4


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_agents_may_speak_in_turn(script, run, model_dir):
    """An agent that is trained, or counted, where it was silent; one that never speaks."""
    flags = (*SMALL, "--env", "toy:Sequential", "--model", model_dir, "--num-agents", 3)
    names = run(script, *flags, "--num-turns", 2)
    for line in metrics_of(names["run_dir"])[1:]:
        assert line["agent_0/grad_norm"] > 0 and line["agent_1/grad_norm"] > 0 == line["agent_2/grad_norm"]
        assert [f"train/agent_{i}/entropy" in line for i in range(3)] == [True, True, False]


@pytest.mark.parametrize("share", [(), ("--share-policy",)], ids=["own policies", "shared policy"])
@two_scripts
def test_rewards_of_a_zero_sum_game_go_to_their_own_players(script, share, run, model_dir):
    """A mean over players, or a player who gets the other's reward."""
    flags = (*SMALL, "--env", "toy:Kuhn", "--num-turns", 3, "--model", model_dir, "--eval-generations", 5)
    lines = metrics_of(run(script, *flags, *share)["run_dir"])
    for line, split in [(line, "eval") for line in lines] + [(line, "train") for line in lines[1:]]:
        assert line[f"{split}/agent_0/return"] == pytest.approx(-line[f"{split}/agent_1/return"])
        assert line[f"{split}/return"] == pytest.approx(0)
    assert any(abs(line["eval/agent_0/return"]) > 0.01 for line in lines)
    assert "agent_1/loss" not in lines[1] if share else lines[1]["agent_1/grad_norm"] > 0


@pytest.mark.parametrize("bluff", [0, 0.2, 1 / 3])
def test_kuhn_poker_has_its_known_value_and_no_player_gains_by_leaving_it(bluff):
    """Cards, pots or lines of play that are not those of the game: -1/18 is known for cards J, Q, K."""
    first = {0: (bluff, 0), 1: (0, bluff + 1 / 3), 2: (3 * bluff, 1)}
    second = {0: (1 / 3, 0), 1: (0, 1 / 3), 2: (1, 1)}
    assert value_of_kuhn(first, second) == pytest.approx(-1 / 18)
    moves = list(itertools.product((0, 1), repeat=2))
    pure = [dict(enumerate(choice)) for choice in itertools.product(moves, repeat=3)]
    assert max(value_of_kuhn(player, second) for player in pure) == pytest.approx(-1 / 18)
    assert min(value_of_kuhn(first, player) for player in pure) == pytest.approx(-1 / 18)
