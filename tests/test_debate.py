"""Debates: what agents see, what the rewards pay, and what they do not pay."""

import pytest
from toy import play, rows_of

import envs
from rewards.debate import debate_reward, read_choice

# What agents box in each round | the reward | the parts that are not 0; the gold answer is 2
DEBATES = """
3 3 3 / 3 3 3 | 0 | parsed 1 agree 1
3 3 3 / 2 2 2 | 1.2 | correct 1 all_passed 1 parsed 1 corrected 1 majority_correct 1 agree 1 flips 1
2 2 2 / 3 3 3 | 0 | parsed 1 round1_correct 1 persuaded_wrongly 1 agree 1 flips 1
2 2 2 / 2 2 2 | 1.3 | correct 1 all_passed 1 steady 1 parsed 1 round1_correct 1 majority_correct 1 agree 1
3 2 / 2 3 | 0.5 | correct 0.5 parsed 1 round1_correct 0.5 corrected 0.5 persuaded_wrongly 0.5 flips 1
3 2 2 4 / 3 2 3 4 | 0.275 | correct 0.25 steady 0.25 parsed 1 round1_correct 0.5 persuaded_wrongly 0.25 flips 0.25
3 4 / 3.0 answer | 0 | parsed 0.5 flips 0.5
answer / answer | 0 |
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


def test_what_a_debate_earns():
    """Fails if a weight or a share is another, or if a corrected mistake earns a bonus.

    Or if 3 and 3.0 are two answers, or the box of a prompt is one.
    """
    for rounds, reward, diagnostics in rows_of(DEBATES):
        texts = [[boxed(attempt) for attempt in each.split()] for each in rounds.split("/")]
        total, parts = debate_reward(texts, "2")
        assert total == pytest.approx(float(reward)), rounds
        levels = [f"{name} {share:g}" for name, share in parts.items() if share]
        assert " ".join(levels) == diagnostics, rounds


@pytest.mark.parametrize("form, letter", rows_of(CHOICES))
def test_the_letter_of_an_option(form, letter):
    """Fails if a usual form of a letter is refused, if two letters are one, or if the option's text counts."""
    assert str(read_choice(boxed(form))) == letter


@pytest.mark.parametrize("num_agents", [1, 2, 3])
def test_agents_see_the_last_texts_and_not_who_is_right(num_agents):
    """Fails if a right answer or an old text shows, a box is cut off, an agent poses as several, or all rounds pay."""
    env = envs.make("debate", num_agents, 3)
    task = {"question": "What is 1 + 0?", "answer": "1"}

    def write(turn, i, prompt):
        return boxed(1) if turn == 2 else f"{['old', 'new'][turn] * 200} far\nYou: {boxed(i)}\n<think>Hm"

    turns, steps = play(env, task, write)
    assert turns == play(env, task | {"answer": "x"}, write)[0]
    texts = [f"{'new' * 200} far You: {boxed(i)}"[-400:] for i in range(num_agents)]
    for own, prompt in enumerate(turns[2]):
        others = [f"Agent {i + 1}: {text}" for i, text in enumerate(texts) if i != own]
        assert [line for line in prompt.splitlines() if "far" in line] == [f"You: {texts[own]}", *others]
    assert [step.reward for step in steps[:2]] == [0, 0]


def test_only_the_judge_is_scored():
    """Fails if sides are paid for their own boxes, or if a judge speaks first or reads one side only."""
    env = envs.make("debate", 3, form="judge")
    for truth in "true", "false":
        texts = [boxed(truth), boxed(13), boxed("true")]
        task = {"question": "1 = 1", "answer": truth}
        (sides, verdict), steps = play(env, task, lambda turn, i, prompt, texts=texts: texts[i])
        assert [sides[2], *verdict[:2]] == [None] * 3
        assert f"For: {texts[0]}\nAgainst: {texts[1]}" in verdict[2]
        assert [step.reward for step in steps] == [0, truth == "true"]
