"""Debates: what agents see, what the rewards pay, and what they do not pay."""

import re
from itertools import combinations_with_replacement, product
from operator import itemgetter

import pytest

import envs
from rewards.debate import debate_reward, verdict_reward

CHOICE, JUDGE = {"topic": "choice"}, {"form": "judge", "num_agents": 3}
ROUTES = [(0, 0), (0, 1), (1, 0), (1, 1)]  # whether an agent is right in the first and in the last round
STORY = (0, 3, 8, 10)  # the words of a question that decide its split: name, thing, and two of what happens
WORTHLESS = [
    "\\boxed{12} \\boxed{13} \\boxed{12}",
    "\\boxed{A, B, C, D, 11, 12, 13}",
    "Research shows that, therefore, without any doubt, first 12, then B, so = true. All agree.",
]


def debate(routes):
    rounds = [[f"\\boxed{{{12 if right else 13}}}" for right in row] for row in zip(*routes)]
    return debate_reward(rounds, "12")


@pytest.mark.parametrize("num_agents", range(1, 6))
def test_failing_on_purpose_never_pays(num_agents):
    """A bonus for a correction, such as 0.1 x share of agents wrong in round 1 and right at the end."""
    for others in combinations_with_replacement(ROUTES, num_agents - 1):
        pays = {route: debate([route, *others])[0] for route in ROUTES}
        assert pays[1, 1] > pays[0, 1] and pays[1, 0] == pays[0, 0]
        assert pays[0, 1] - pays[1, 0] > 0.999 / num_agents  # the last answer is what counts


def test_what_a_debate_earns():
    """A weight, a share or a diagnostic that is another."""
    assert [debate([route] * 3)[0] for route in ROUTES] == pytest.approx([0, 1.2, 0, 1.3])
    reward, parts = debate(ROUTES)
    assert reward == pytest.approx(2 / 4 + 0.1 / 4)
    half, quarter = ["correct", "round1_correct", "flips"], ["steady", "corrected", "persuaded_wrongly"]
    assert parts == dict.fromkeys(parts, 0) | dict.fromkeys(half, 0.5) | dict.fromkeys(quarter, 0.25)


@pytest.mark.parametrize("text", WORTHLESS)
def test_neither_style_nor_agreement_nor_lists_earn_anything(text):
    """Paying for words, for one wrong answer of all, or for an answer among several."""
    assert not any(debate_reward([[text] * N] * 2, gold)[0] for N, gold in product((1, 3), ("12", "B")))
    assert verdict_reward(text, "true")[0] == verdict_reward(text, "false")[0] == 0


def solve(question):
    """The answer to a sample question or claim, found in another way than where it was made."""
    words = question.replace(".", "").partition(" Options: ")[0].split()
    numbers = [int(word) for word in words if word.isdigit()]
    if words[1] in "+-":  # a claim
        excess = numbers[0] + (numbers[1] if words[1] == "+" else -numbers[1]) - numbers[2]
        return str(excess > 0 if "larger" in words else excess < 0).lower()
    has_more = ("That" in words) == ("fewer" in words) and "loses" not in words
    value = numbers[0] + (numbers[2] if has_more else -numbers[2])
    return re.search(rf"([A-D]) {value}\b", question)[1] if "Options" in question else str(value)


@pytest.mark.parametrize("options, most, k", [({}, 0.2, STORY), (CHOICE, 0.35, STORY), (JUDGE, 0.6, range(7))])
def test_sample_tasks_are_right_and_test_tasks_are_new(options, most, k):
    """A story with the wrong sign, the letter of another option, a constant that wins, a test task trained on."""
    env = envs.make("debate", **options)
    golds = [task["answer"] for task in env.tasks("train")]
    assert golds == [solve(task["question"]) for task in env.tasks("train")]
    assert max(map(golds.count, golds)) < most * len(golds)
    train, test = ({itemgetter(*k)(task["question"].split()) for task in env.tasks(s)} for s in ("train", "test"))
    assert train and test and not train & test


@pytest.mark.parametrize("num_agents", [1, 2, 3])
def test_agents_see_the_last_texts_and_not_who_is_right(num_agents):
    """A right answer that shows, an old text, a box cut off, an agent that speaks as several, rounds that all pay."""
    env, history = envs.make("debate", num_agents, 3), []
    task = env.tasks("train")[0]
    for age in "old", "new":
        said = [f"{age * 200} far\nYou: \\boxed{{{i}}}\n<think>Hm" for i in range(num_agents)]
        assert env.observe(task, history) == env.observe({**task, "answer": "x"}, history)
        history += env.step([(task, history, said)])
    prompts = env.observe(task, history)
    for own, prompt in enumerate(prompts):
        quoted = [line.split(": ", 1) for line in prompt.splitlines() if "far" in line]
        order = [own, *(i for i in range(num_agents) if i != own)]
        for i, (name, text) in zip(order, quoted, strict=True):
            assert name == ("You" if i == own else f"Agent {i + 1}") and len(text) == 400
            assert text.endswith(f"newnew far You: \\boxed{{{i}}}")
        assert "old" not in prompt
    history += env.step([(task, history, [f"\\boxed{{{task['answer']}}}"] * num_agents)])
    assert [(step.reward, step.done) for step in history] == [(0, False), (0, False), (pytest.approx(1.2), True)]


def test_only_the_judge_is_scored():
    """Sides that are paid for their own boxes, a judge that speaks first or reads one side only."""
    env = envs.make("debate", **JUDGE)
    for task, said in product(env.tasks("test")[:9], ("true", "false")):
        *sides, judge = env.observe(task, [])
        assert judge is None and sides[0] != sides[1] and all(task["question"] in side for side in sides)
        history = env.step([(task, [], [f"{side} \\boxed{{{task['answer']}}}" for side in "12"] + [""])])
        *sides, judge = env.observe(task, history)
        assert sides == [None, None] and "1 \\boxed" in judge and "2 \\boxed" in judge
        (step,) = env.step([(task, history, ["", "", f"\\boxed{{{said}}}"])])
        assert (history[0].reward, step.reward, step.done) == (0, said == task["answer"], True)
