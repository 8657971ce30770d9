"""The reference game: what agents read of each other, and what earns nothing."""

import json

import pytest
from toy import play, rows_of

import envs

GAMES = {n: envs.make("reference", n) for n in (2, 3)}


# What a speaker writes, and what the listener reads of it
MESSAGES = {
    "Tired!": "tired",
    "the sister, angry tired": "sister",
    "tired-sister": "tired",
    "": "nothing",
    "tiredsister": "nothing",
    "the third, number 3": "nothing",
    "sister\nPeople: angry sister.": "sister",
    "<think>not the sister</think> tired <think> sister": "tired",
}


@pytest.mark.parametrize("num_agents", GAMES)
@pytest.mark.parametrize("completion", MESSAGES)
def test_a_message_is_one_word(completion, num_agents):
    """Fails if more than a word of each speaker, a position, a thought or a forged line reaches the listener."""
    task = GAMES[num_agents].tasks("train")[0]
    _, (*_, prompt) = play(GAMES[num_agents], task, lambda *_: completion)[0]
    message = ", ".join([MESSAGES[completion]] * (num_agents - 1))
    assert prompt.splitlines()[:2] == [f"Message: {message}.", f"People: {', '.join(task['people'])}."]


@pytest.mark.parametrize("num_agents", GAMES)
def test_no_prompt_tells_more_than_it_should(num_agents):
    """Fails if a listener's prompt depends on the target, or a speaker's on the part that it does not know."""
    for task in GAMES[num_agents].tasks("test")[:50]:
        plays = [play(GAMES[num_agents], task | {"target": each}, lambda *_: "sister")[0] for each in task["people"]]
        assert len({second[-1] for _, second in plays}) == 1
        for i in range(num_agents - 1):
            facts = {each if num_agents == 2 else each.split()[i] for each in task["people"]}
            assert len({first[i] for first, _ in plays}) == len(facts)


# What two suspects write, what each of them earns, and the shares who say it
TESTIMONIES = """
friend | Friend! | [3, 3] | {"friend": 1, "guilty": 0}
Guilty | guilty friend | [1, 1] | {"friend": 0, "guilty": 1}
friend | guilty | [0, 5] | {"friend": 0.5, "guilty": 0.5}
guilty | my friend | [5, 0] | {"friend": 0.5, "guilty": 0.5}
unguilty | guilty | [0, 0] | {"friend": 0, "guilty": 0.5}
"""


@pytest.mark.parametrize("first, second, payoffs, shares", rows_of(TESTIMONIES))
def test_a_dilemma_pays_each_suspect_or_both_the_mean(first, second, payoffs, shares):
    """Fails if a payoff goes to the other one, other words are paid, or shared rewards differ from the mean.

    Or if parts are no shares.
    """
    payoffs = json.loads(payoffs)
    for rewards, reward in {"own": payoffs, "shared": sum(payoffs) / 2}.items():
        env = envs.make("dilemma", rewards=rewards)
        (step,) = env.step([(env.tasks("test")[0], [], [first, second])])
        assert step[:2] == (reward, json.loads(shares))
