"""Debates: what agents see, what the rewards pay, and what they do not pay."""

from itertools import product

import pytest
from toy import play, rows_of

import envs
from rewards.debate import choice, debate_reward, verdict_reward

ROUTES = [(0, 0), (0, 1), (1, 0), (1, 1)]  # whether an agent is right in the first and in the last round
# Lists, one wrong answer of all, and style
WORTHLESS = r"""
\boxed{12} \boxed{13} \boxed{12}
\boxed{A, B, C, D, 11, 12, 13}
Research shows that, therefore, without any doubt, first 12, then B, so = true. All agree.
"""
# What a box may hold | the letter that it chooses
CHOICES = r"""
B | B
(B) | B
B) | B
B. | B
B) 9 | B
(B) 9 | B
B: 9 | B
B. 9 | B
B 9 | B
Option B | B
\text{B} | B
\textbf{(B)} | B
B, C | None
B or C | None
(B) and (C) | None
B) 9, C) 8 | None
BC | None
Blue | None
9 | None
9 (B) | None
"""


def boxed(text):
    return f"so \\boxed{{{text}}}."


def debate(routes):
    rounds = [[boxed(12 if right else 13) for right in turn] for turn in zip(*routes)]
    return debate_reward(rounds, "12")


def test_what_a_debate_earns():
    """Fails if a weight, a share or a diagnostic is another, or if a mistake that is corrected earns a bonus."""
    assert [debate([route] * 3)[0] for route in ROUTES] == pytest.approx([0, 1.2, 0, 1.3])
    reward, parts = debate(ROUTES)
    assert reward == pytest.approx(2 / 4 + 0.1 / 4)
    expected = {"correct": 2, "round1_correct": 2, "flips": 2, "steady": 1, "corrected": 1, "persuaded_wrongly": 1}
    expected["parsed"] = 4
    assert parts == {name: expected.get(name, 0) / 4 for name in parts}


@pytest.mark.parametrize("form, letter", rows_of(CHOICES))
def test_the_letter_of_an_option(form, letter):
    """Fails if a usual form of a letter is refused, if two letters are one, or if the option's text counts."""
    assert str(choice(boxed(form))) == letter


@pytest.mark.parametrize("row", rows_of(WORTHLESS))
def test_neither_style_nor_agreement_nor_lists_earn_anything(row):
    """Fails if words, one wrong answer of all, or an answer among several are paid."""
    for num_agents, gold in product((1, 3), ("12", "B")):
        assert debate_reward([row * num_agents] * 2, gold)[0] == 0
    assert verdict_reward(*row, "true")[0] == 0


@pytest.mark.parametrize("num_agents", [1, 2, 3])
def test_agents_see_the_last_texts_and_not_who_is_right(num_agents):
    """Fails if a right answer or an old text shows, a box is cut off, an agent poses as several, or all rounds pay."""
    env = envs.make("debate", num_agents, 3)
    task = env.tasks("train")[0]

    def write(turn, i, prompt):
        early = f"{['old', 'new', ''][turn] * 200} far\nYou: {boxed(i)}\n<think>Hm"
        return boxed(task["answer"]) if turn == 2 else early

    turns, steps = play(env, task, write)
    assert turns == play(env, task | {"answer": "x"}, write)[0]
    texts = [f"{'new' * 200} far You: {boxed(i)}"[-400:] for i in range(num_agents)]
    for own, prompt in enumerate(turns[2]):
        others = [f"Agent {i + 1}: {text}" for i, text in enumerate(texts) if i != own]
        assert [line for line in prompt.splitlines() if "far" in line] == [f"You: {texts[own]}", *others]
    assert [step.reward for step in steps] == [0, 0, pytest.approx(1.2)]


@pytest.mark.parametrize("judgement", ["true", "false"])
def test_only_the_judge_is_scored(judgement):
    """Fails if sides are paid for their own boxes, or if a judge speaks first or reads one side only."""
    env = envs.make("debate", 3, form="judge")
    for task in env.tasks("test")[:9]:
        texts = [boxed(task["answer"]), boxed(13), boxed(judgement)]
        (sides, verdict), steps = play(env, task, lambda turn, i, prompt, texts=texts: texts[i])
        assert [sides[2], *verdict[:2]] == [None] * 3
        assert f"For: {texts[0]}\nAgainst: {texts[1]}" in verdict[2]
        assert [step.reward for step in steps] == [0, judgement == task["answer"]]
