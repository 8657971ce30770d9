"""Protocols around environments of one turn: who answers when, who reads what, and what it earns."""

import pytest
from toy import play

import envs
from envs.protocols import SHOWN, Protocol

# Who speaks in each turn, and whose answers they read
TURNS = {
    "sequential": ([[0], [1], [2]], [[], [0], [0, 1]]),
    "discussion": ([[0, 1, 2]] * 2, [[], [0, 1, 2]]),
}


@pytest.mark.parametrize("protocol", TURNS)
def test_who_speaks_and_reads_whom(protocol):
    """Fails if an answer is missing or leaks backwards, or if an agent speaks out of turn."""
    env = envs.make("humaneval", 3, protocol=protocol)
    turns, _ = play(env, env.tasks("train")[0], "text {1}".format)
    for prompts, speakers, read in zip(turns, *TURNS[protocol], strict=True):
        assert [i for i in range(3) if prompts[i]] == speakers
        for i in speakers:
            assert [j for j in range(3) if f":\ntext {j}" in prompts[i]] == read


@pytest.mark.parametrize("protocol", TURNS)
@pytest.mark.parametrize("number", [0, 1])
def test_the_last_answers_earn_what_they_earn_at_once(number, protocol):
    """Fails if first answers, another agent's answers, or turns that are saved (twice that of code) are paid."""
    name = "tldr+humaneval"
    inner = envs.make(name, 2)
    task = inner.tasks("train")[number]
    demonstrations = {pair["prompt"]: pair["completion"] for pair in inner.demonstrations()}
    text = "This text is for a reader. " * 25
    answers = [demonstrations.get(prompt, text) for prompt in inner.observe(task, [])]
    early = answers if protocol == "sequential" else ["first", "first"]
    env = envs.make(name, 2, protocol=protocol)
    _, (first, last) = play(env, task, lambda turn, i, prompt: [early, answers][turn][i])
    (at_once,) = inner.step([(task, [], answers)])
    assert at_once.reward > 0
    assert first.reward == 0
    assert last == at_once._replace(done=True)


class Silent:
    """The second agent has nothing to say."""

    def observe(self, task, history):
        return ["one", None, "three"]

    def step(self, branches):
        return [envs.Step(0.0, {}, False, feedback=actions) for _, _, actions in branches]


def test_silent_agents_have_no_turn_and_answers_are_cut():
    """Fails if nobody speaks in a turn, a silent agent takes another's turn, or thoughts are read."""
    answers = ["<think>a</think> " + "b" * 9999, "", "c"]
    env = Protocol(Silent(), "silent", "sequential", 3, 1)
    turns, (_, last) = play(env, {}, lambda turn, i, prompt: answers[i])
    assert last.feedback == answers
    assert f"Answer of agent 1:\n{'b' * SHOWN} [cut off]\n" in turns[1][2]
