"""Protocols around environments of one turn: who answers when, who reads what, and what it earns."""

import re

import pytest
from toy import play, rows_of

from envs import Step
from envs.protocols import SHOWN, Protocol

# A protocol | who speaks in each turn | whose answers they read there
TURNS = """
sequential | 0 2 3   | - 0 02
discussion | 023 023 | - 023
"""


class Silent:
    """The second of four agents has nothing to say. Later turns earn more."""

    def observe(self, task, history):
        return ["one", None, "three", "four"]

    def step(self, branches):
        return [Step(1.0 + len(history), {}, False, feedback=actions) for _, history, actions in branches]


@pytest.mark.parametrize("protocol, speakers, read", rows_of(TURNS))
def test_who_speaks_and_reads_whom(protocol, speakers, read):
    """Fails if an answer is missing, leaks backwards or is not cut off, nobody speaks in a turn, or thoughts are read.

    Or if an agent speaks out of turn, or if first answers, or turns that are saved, are paid.
    """
    answers = [f"<think>text 9</think> text {i}{'b' * SHOWN}" for i in range(4)]
    env = Protocol(Silent(), "silent", protocol, 4, 1)
    turns, steps = play(env, {}, lambda turn, i, prompt: answers[i])
    for prompts, speaking, shown in zip(turns, speakers.split(), read.split(), strict=True):
        asked = [i for i, prompt in enumerate(prompts) if prompt]
        assert asked == [int(i) for i in speaking]
        for i in asked:
            assert re.findall(r"text (\d)b+ \[cut off\]\n", prompts[i]) == list(shown.strip("-"))
    assert "Answer of agent 1:\ntext 0b" in turns[-1][3]
    assert [step.reward for step in steps] == [0.0] * (len(turns) - 1) + [1.0]
    assert steps[-1].feedback == [answers[0], "", *answers[2:]]
