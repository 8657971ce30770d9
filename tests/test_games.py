"""The reference game: what can be earned, by which codes, and what earns nothing."""

from itertools import product

import pytest
from toy import play

import envs
from envs.games import MOODS, ROLES, true_people

GAMES = {n: envs.make("reference", n) for n in (2, 3)}


def read(prompt):
    """(what a prompt begins with: the target, a part of it, or the message; the people)."""
    fact, people, _ = [line.partition(": ")[2].removesuffix(".") for line in prompt.split("\n")]
    return fact, people.split(", ")


def mean_parts(env, split, tell, choose):
    """Mean parts of two policies that see what read() finds: tell(fact, people), choose(message, people)."""

    def write(turn, i, prompt):
        return f"\\boxed{{{choose(*read(prompt))}}}" if turn else tell(*read(prompt))

    parts = []
    for task in env.tasks(split):
        _, (first, last) = play(env, task, write)
        assert (first.reward, last.reward) == (0, last.parts["success"])
        parts.append(last.parts)
    return {name: sum(each[name] for each in parts) / len(parts) for name in parts[0]}


def by_code(known, people):
    """One of four people's word, or whom a word means: of the 16 true codes, one with the most different words."""
    people = sorted(people)
    codes = product(*[each.split() for each in people])
    best = max(codes, key=lambda code: len(set(code)))
    return (dict(zip(people, best)) | dict(zip(best, people)))[known]


def rarest(fact, people):
    return min(fact.split(), key=" ".join(people).split().count)


def literal(message, people):
    return true_people(people, set(message.split(", ")) - {"nothing"})[0]


def first(message, people):
    return people[0]


@pytest.mark.parametrize("split", ["train", "test"])
def test_optimum_literal_pair_and_chance(split):
    """Fails if no code of true words solves a task, if any true word will do, or if targets favour a place."""
    code = mean_parts(GAMES[2], split, by_code, by_code)
    assert code["success"] == code["all_passed"] == code["true_message"] == 1 > code["informative"]
    words = mean_parts(GAMES[2], split, rarest, literal)
    assert 0.78 < words["literal"] < 0.86
    assert words["success"] == pytest.approx(words["literal"], abs=0.08)
    assert mean_parts(GAMES[2], split, rarest, first)["success"] == pytest.approx(0.25, abs=0.1)


def test_three_agents_need_both_messages():
    """Fails if one speaker's word is enough, or is not read."""
    for known, least, most in (MOODS + ROLES, 1, 1), (MOODS, 0.6, 0.72), (ROLES, 0.6, 0.72):
        parts = mean_parts(GAMES[3], "train", lambda word, _, known=known: word if word in known else "", literal)
        assert least <= parts["literal"] <= most


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
