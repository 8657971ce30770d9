"""Protocols around environments of one turn: who answers when, who reads what, and what it earns."""

from types import SimpleNamespace

import pytest
from toy import play

import envs
from envs.protocols import SHOWN, Protocol

SMALL = "--num-tasks 2 --eval-tasks 2 --num-generations 2 --max-new-tokens 8"


@pytest.fixture(autouse=True)
def few(monkeypatch):
    for module in "coding", "classeval", "writing":
        monkeypatch.setattr(f"envs.{module}.SAMPLE_COUNTS", {"train": 12, "validation": 2, "test": 2})
    monkeypatch.setattr("envs.writing.DEMONSTRATED_POSTS", 12)


@pytest.mark.parametrize("num_agents", [1, 2, 3])
def test_sequential(num_agents):
    """Fails if an answer is missing or leaks backwards, or if an agent speaks out of turn."""
    env = envs.make("humaneval", num_agents, protocol="sequential")
    turns, _ = play(env, env.tasks("train")[0], "answer {} of {};".format)
    assert len(turns) == env.num_turns == num_agents
    for turn, prompts in enumerate(turns):
        assert [i for i, prompt in enumerate(prompts) if prompt] == [turn]
        earlier = [i for i in range(num_agents) if f"answer {i} of {i};" in prompts[turn]]
        assert earlier == list(range(turn))


@pytest.mark.parametrize("num_agents", [1, 2, 3])
def test_discussion(num_agents):
    """Fails if an answer is missing in the second turn, or if agents read anything in the first."""
    env = envs.make("humaneval", num_agents, protocol="discussion")
    task = env.tasks("train")[0]
    (first, second), _ = play(env, task, "answer {} of {};".format)
    assert first == envs.make("humaneval", num_agents).observe(task, [])
    for i, prompt in enumerate(second):
        assert prompt.startswith(first[i])
        assert f"Your answer:\nanswer 0 of {i};\n" in prompt
        assert prompt.count("answer 0 of") == num_agents


@pytest.mark.parametrize("protocol", ["sequential", "discussion"])
@pytest.mark.parametrize("name", ["tldr", "arxiv", "humaneval", "classeval", "tldr+humaneval"])
def test_the_last_answers_earn_what_they_earn_at_once(name, protocol):
    """Fails if first answers, another agent's answers, or turns that are saved (twice that of code) are paid."""
    inner = envs.make(name, 2)
    task = inner.tasks("train")[1 if "+" in name else 0]  # of the mixture a function
    demonstrations = {pair["prompt"]: pair["completion"] for pair in inner.demonstrations()}
    answers = []
    for prompt in inner.observe(task, []):
        answers.append(demonstrations.get(prompt, "This text is for a reader. " * 25))
    early = answers if protocol == "sequential" else ["first", "first"]
    env = envs.make(name, 2, protocol=protocol)
    _, (first, last) = play(env, task, lambda turn, i, prompt: [early, answers][turn][i])
    (at_once,) = inner.step([(task, [], answers)])
    assert at_once.reward > 0
    assert (first.reward, first.done) == (0, False)
    assert first.parts.keys() <= {"humaneval/reward"}
    assert last == at_once._replace(actions=last.actions, done=True)


def test_silent_agents_have_no_turn_and_answers_are_cut():
    """Fails if nobody speaks in a turn, a silent agent takes another's turn, or thoughts are read."""
    inner = SimpleNamespace(
        observe=lambda task, history: ["one", None, "three"],
        step=lambda branches: [envs.Step([], 0.0, {}, False, feedback=actions) for _, _, actions in branches],
    )
    answers = ["<think>a</think> " + "b" * 9999, "", "c"]
    env = Protocol(inner, "silent", "sequential", 3, 1)
    turns, (_, last) = play(env, {}, lambda turn, i, prompt: answers[i])
    assert last.feedback == answers
    assert f"Answer of agent 1:\n{'b' * SHOWN} [cut off]\n" in turns[1][2]
