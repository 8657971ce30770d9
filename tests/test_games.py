"""The reference game: what can be earned, by which codes, and what earns nothing."""

from itertools import product

import pytest
from toy import play

import envs

GAMES = {n: envs.make("reference", n) for n in (2, 3)}


def read(prompt):
    """(what a prompt begins with: the target, a part of it, or the message; the people)."""
    fact, people, _ = [line.partition(": ")[2].removesuffix(".") for line in prompt.split("\n")]
    return fact, people.split(", ")


def by_code(known, people):
    """One of four people's word, or whom a word means: of the 16 true codes, one with the most different words."""
    people = sorted(people)
    codes = product(*[each.split() for each in people])
    best = max(codes, key=lambda code: len(set(code)))
    return (dict(zip(people, best)) | dict(zip(best, people)))[known]


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_code_of_true_words_solves_every_task(split):
    """Fails if nothing that the agents can say earns the reward."""

    def write(turn, i, prompt):
        return f"\\boxed{{{by_code(*read(prompt))}}}" if turn else by_code(*read(prompt))

    for task in GAMES[2].tasks(split):
        _, (first, last) = play(GAMES[2], task, write)
        assert (first.reward, last.reward, last.parts["true_message"]) == (0, 1, 1)


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
    assert read(prompt) == (", ".join([MESSAGES[completion]] * (num_agents - 1)), task["people"])


# What a listener writes, and what it earns where a tired boss is meant
CHOICES = {
    "\\boxed{tired boss}": 1,
    "Not the angry boss. So \\boxed{Tired BOSS}.": 1,
    "\\boxed{tired boss} \\boxed{tired boss}": 1,
    "": 0,
    "tired boss": 0,
    "\\boxed{tired}": 0,
    "\\boxed{boss}": 0,
    "\\boxed{angry boss} \\boxed{tired boss}": 0,
    "\\boxed{angry boss, angry sister, tired boss, hurt friend}": 0,
}


@pytest.mark.parametrize("completion", CHOICES)
def test_the_listener_has_to_name_one(completion):
    """Fails if a list of all, a part of the name, or a name outside of the box is paid."""
    people = ["angry boss", "angry sister", "tired boss", "hurt friend"]
    task = {"people": people, "shown": people, "target": "tired boss"}
    _, (_, last) = play(GAMES[2], task, lambda turn, *_: completion if turn else "tired")
    assert last.reward == CHOICES[completion]


@pytest.mark.parametrize("num_agents", GAMES)
def test_no_prompt_tells_more_than_it_should(num_agents):
    """Fails if a listener's prompt depends on the target, or a speaker's on the part that it does not know."""
    for task in GAMES[num_agents].tasks("test")[:50]:
        plays = [play(GAMES[num_agents], task | {"target": each}, lambda *_: "sister") for each in task["people"]]
        firsts, seconds = zip(*[turns for turns, _ in plays])
        assert len({prompts[-1] for prompts in seconds}) == 1
        for i in range(num_agents - 1):
            facts = {each if num_agents == 2 else each.split()[i] for each in task["people"]}
            assert len({prompts[i] for prompts in firsts}) == len(facts)
