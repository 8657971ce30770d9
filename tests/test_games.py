"""The reference game: what can be earned, by which codes, and what earns nothing."""

from itertools import product

import pytest

import envs
from envs.games import MOODS, ROLES, true_people

GAMES = {n: envs.make("reference", n) for n in (2, 3)}


def read(prompt):
    """(what a prompt begins with: the target, a part of it, or the message; the people)."""
    fact, people, _ = [line.partition(": ")[2].removesuffix(".") for line in prompt.split("\n")]
    return fact, people.split(", ")


def speak(env, task, messages):
    """(what the listener reads, the history) after these messages."""
    history = env.step([(task, [], [*messages, ""])])
    assert (history[0].reward, history[0].done) == (0, False)
    return read(env.observe(task, history)[-1]), history


def play(env, tasks, tell, choose):
    """Mean parts of two policies that see what read() finds: tell(fact, people), choose(message, people)."""
    branches = []
    for task in tasks:
        *prompts, _ = env.observe(task, [])
        observation, history = speak(env, task, [tell(*read(prompt)) for prompt in prompts])
        branches.append((task, history, ["", "", f"\\boxed{{{choose(*observation)}}}"]))
    steps = env.step(branches)
    assert all(step.done and step.reward == step.parts["success"] for step in steps)
    return {name: sum(step.parts[name] for step in steps) / len(steps) for name in steps[0].parts}


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


@pytest.mark.parametrize("split", ["train", "test"])
def test_optimum_literal_pair_and_chance(split):
    """Fails if no code of true words solves a task, if any true word will do, or if targets favour a place."""
    tasks = GAMES[2].tasks(split)
    code = play(GAMES[2], tasks, by_code, by_code)
    assert code["success"] == code["all_passed"] == code["true_message"] == 1 > code["informative"]
    words = play(GAMES[2], tasks, rarest, literal)
    assert 0.78 < words["literal"] < 0.86
    assert words["success"] == pytest.approx(words["literal"], abs=0.08)
    chance = play(GAMES[2], tasks, rarest, lambda message, people: people[0])
    assert chance["success"] == pytest.approx(0.25, abs=0.1)


def test_three_agents_need_both_messages():
    """Fails if one speaker's word is enough, or is not read."""
    tasks = GAMES[3].tasks("train")
    parts = play(GAMES[3], tasks, lambda fact, people: fact, literal)
    assert parts["success"] == parts["informative"] == 1
    for words in MOODS, ROLES:
        parts = play(GAMES[3], tasks, lambda fact, people, words=words: fact if fact in words else "", literal)
        assert 0.6 < parts["literal"] < 0.72


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
def test_a_message_is_one_word(num_agents):
    """Fails if more than a word of each speaker, a position, a thought or a forged line reaches the listener."""
    task = GAMES[num_agents].tasks("train")[0]
    speakers = num_agents - 1
    for completion, word in MESSAGES.items():
        (message, people), _ = speak(GAMES[num_agents], task, [completion] * speakers)
        assert message == ", ".join([word] * speakers), completion
        assert people == task["people"]


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


def test_the_listener_has_to_name_one():
    """Fails if a list of all, a part of the name, or a name outside of the box is paid."""
    people = ["angry boss", "angry sister", "tired boss", "hurt friend"]
    task = {"people": people, "shown": people, "target": "tired boss"}
    _, history = speak(GAMES[2], task, ["tired"])
    for completion, reward in CHOICES.items():
        (step,) = GAMES[2].step([(task, history, ["", completion])])
        assert step.reward == reward, completion


@pytest.mark.parametrize("num_agents", GAMES)
def test_no_prompt_tells_more_than_it_should(num_agents):
    """Fails if a listener's prompt depends on the target, or a speaker's on the part that it does not know."""
    env = GAMES[num_agents]
    for task in env.tasks("test")[:50]:
        swapped = [{**task, "target": each} for each in task["people"]]
        listeners = [speak(env, other, ["sister"] * (num_agents - 1))[0] for other in swapped]
        assert listeners == listeners[:1] * 4
        for i in range(num_agents - 1):
            facts = {each if num_agents == 2 else each.split()[i] for each in task["people"]}
            prompts = {env.observe(other, [])[i] for other in swapped}
            assert len(prompts) == len(facts)
