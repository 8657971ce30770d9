"""The reference game: what can be earned, by which codes, and what earns nothing."""

from itertools import product

import pytest

import envs
from envs.games import MOODS, ROLES, true_people

GAMES = {n: envs.make("reference", n) for n in (2, 3)}


def read(prompt):
    """(what a prompt begins with: the target, a part of it, or the message; the people)."""
    first, second, _ = prompt.split("\n")
    return first.partition(": ")[2].rstrip("."), second.removeprefix("People: ").rstrip(".").split(", ")


def play(env, tasks, speak, listen):
    """Mean parts of two policies that see what read() finds: speak(known, people), listen(said, people)."""
    branches = []
    for task in tasks:
        spoken = [speak(*read(prompt)) if prompt else "" for prompt in env.observe(task, [])]
        first = env.step([(task, [], spoken)])
        assert (first[0].reward, first[0].done) == (0, False)
        branches.append((task, first, [*spoken[:-1], f"\\boxed{{{listen(*read(env.observe(task, first)[-1]))}}}"]))
    steps = env.step(branches)
    assert all(step.done and step.reward == step.parts["success"] for step in steps)
    return {key: sum(step.parts[key] for step in steps) / len(steps) for key in steps[0].parts}


def by_code(known, people):
    """One of four people's word, or whom a word means: of the 16 true codes, one with the most different words."""
    people = sorted(people)
    best = max(product(*map(str.split, people)), key=lambda chosen: len(set(chosen)))
    return (dict(zip(people, best)) | dict(zip(best, people)))[known]


def rarest(known, people):
    return min(known.split(), key=" ".join(people).split().count)


def literal(said, people):
    return true_people(people, set(said.split(", ")) - {"nothing"})[0]


@pytest.mark.parametrize("split", ["train", "test"])
def test_optimum_literal_pair_and_chance(split):
    """A task that no code of true words solves; one where any true word will do; a place that targets favour."""
    tasks = GAMES[2].tasks(split)
    parts = play(GAMES[2], tasks, by_code, by_code)
    assert parts["success"] == parts["all_passed"] == parts["true_message"] == 1 and parts["informative"] < 1
    parts = play(GAMES[2], tasks, rarest, literal)
    assert 0.78 < parts["literal"] < 0.86 and abs(parts["success"] - parts["literal"]) < 0.08
    parts = play(GAMES[2], tasks, lambda known, people: "", lambda said, people: people[0])
    assert abs(parts["success"] - 0.25) < 0.1 and parts["true_message"] == 0


def test_three_agents_need_both_messages():
    """A speaker whose word is enough, or whose word is not read."""
    tasks = GAMES[3].tasks("train")
    parts = play(GAMES[3], tasks, lambda known, people: known, literal)
    assert parts["success"] == parts["informative"] == 1
    for mine in MOODS, ROLES:
        parts = play(GAMES[3], tasks, lambda known, people, mine=mine: known if known in mine else "", literal)
        assert 0.6 < parts["literal"] < 0.72


def test_a_message_is_one_word():
    """More than a word for each speaker, a position, a thought or a forged line that reaches the listener."""
    cases = {"Tired!": "tired", "the sister, angry tired": "sister", "tired-sister": "tired", "": "nothing"}
    cases |= {"tiredsister": "nothing", "the third, number 3": "nothing", "sister\nPeople: angry sister.": "sister"}
    cases |= {"<think>not the sister</think> tired <think> sister": "tired"}
    for (text, heard), (n, env) in product(cases.items(), GAMES.items()):
        task = env.tasks("train")[0]
        prompts = env.observe(task, env.step([(task, [], [text] * (n - 1) + [""])]))
        assert read(prompts[-1]) == (", ".join([heard] * (n - 1)), task["people"]), text


def test_the_listener_has_to_name_one():
    """Pay for a list of all, for a part of the name, or for a name outside of the box."""
    task = GAMES[2].tasks("train")[0]
    target, other = task["target"], next(each for each in task["people"] if each != task["target"])
    first = GAMES[2].step([(task, [], [target, ""])])
    wrong = ["", target, f"\\boxed{{{other}}} \\boxed{{{target}}}", *(f"\\boxed{{{word}}}" for word in target.split())]
    wrong += ["".join(f"\\boxed{{{each}}}" for each in task["people"]), f"\\boxed{{{', '.join(task['people'])}}}"]
    right = [f"\\boxed{{{target}}}", f"Not {other}. So \\boxed{{{target.upper()}}}.", f"\\boxed{{{target}}}" * 2]
    steps = GAMES[2].step([(task, first, ["", text]) for text in [*wrong, *right]])
    assert [step.reward for step in steps] == [0] * len(wrong) + [1] * len(right)


def test_no_prompt_tells_more_than_it_should():
    """A listener's prompt that depends on the target, or a speaker's on the part that it does not know."""
    for (n, env), task in product(GAMES.items(), GAMES[2].tasks("test")[:50]):
        swapped = [{**task, "target": each} for each in task["people"]]
        first = env.step([(task, [], ["sister"] * (n - 1) + [""])])
        assert len({env.observe(other, first)[-1] for other in swapped}) == 1
        for i in range(n - 1):
            facts = {each if n == 2 else each.split()[i] for each in task["people"]}
            assert len({env.observe(other, [])[i] for other in swapped}) == len(facts)
