"""The proposer and the router: what they pay, and that they can be trained."""

import pytest
from conftest import MAGRPO
from toy import play, rows_of

# Flags | what its three agents write in one turn & in the next | the rewards of each turn
BRANCHES = r"""
--env=examples.proposer:Proposer | 19 | [0.0]
--env=examples.proposer:Proposer | 11 * 5, or 11 * 12 & ; \boxed{132}; \boxed{131} | [0.0, [1.0, 1.0, 0.0]]
--env=examples.proposer:Proposer | 11x12 <think> 11 * 5 & ; \boxed{132}; \boxed{132} | [0.0, [0.0, 1.0, 1.0]]
--env=examples.router:Router | 3 | [0.0]
--env=examples.router:Router | 1 & ; I have 12 & Agent 2 & ; ; 12 + 20 = 32 | [0.0, 0.0, 0.0, 1.0]
"""


@pytest.mark.parametrize("example, texts, rewards", rows_of(BRANCHES))
def test_an_example_trains_and_pays(example, texts, rewards, run, model_dir):
    """Fails if p is of other answers, a thought counts, somebody else speaks, or a branch goes on when it is over."""
    flags = "--num-agents 3 --num-iterations 1 --num-generations 2 --eval-tasks 1 --max-new-tokens 8 --model"
    env = run(MAGRPO, example, *flags.split(), model_dir)["env"]
    _, steps = play(
        env, {"number": 11, "numbers": [12, 20]}, lambda turn, i, prompt: texts.split("&")[turn].split(";")[i]
    )
    assert str([step.reward for step in steps]) == rewards
