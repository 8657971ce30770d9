"""Protocols around environments of one turn: who answers when, who reads what, and what it earns."""

from types import SimpleNamespace

import pytest
from conftest import ROOT

import envs
from envs.protocols import SHOWN, Protocol


@pytest.fixture(autouse=True)
def few(monkeypatch):
    for module in "coding", "classeval", "writing":
        monkeypatch.setattr(f"envs.{module}.SAMPLE_COUNTS", {"train": 12, "validation": 2, "test": 2})
    monkeypatch.setattr("envs.writing.DEMONSTRATED_POSTS", 12)


def play(env, task, say):
    """The prompts of each turn and the Steps of a branch in which agent i says say(turn, i)."""
    asked, history = [], []
    while not (history and history[-1].done):
        asked.append(env.observe(task, history))
        actions = ["" if p is None else say(len(history), i) for i, p in enumerate(asked[-1])]
        history += env.step([(task, history, actions)])
    return asked, history


@pytest.mark.parametrize("protocol", ["sequential", "discussion"])
@pytest.mark.parametrize("num_agents", [1, 2, 3])
def test_an_agent_reads_earlier_answers_and_no_others(num_agents, protocol):
    """An answer that is missing, that leaks backwards or sideways, or an agent that speaks out of turn."""
    agents, names = range(num_agents), [f"said{t}{i}" for t in range(3) for i in range(3)]
    env, plain = envs.make("humaneval", num_agents, protocol=protocol), envs.make("humaneval", num_agents)
    task = env.tasks("train")[0]
    (asked, _), inner = play(env, task, "said{}{}".format), plain.observe(task, [])
    read = [[p and [name for name in names if name in p] for p in prompts] for prompts in asked]
    in_turn = [[[f"said{k}{k}" for k in range(t)] if i == t else None for i in agents] for t in agents]
    at_once = [[[]] * num_agents, [[f"said0{k}" for k in agents]] * num_agents]
    assert read == {"sequential": in_turn, "discussion": at_once}[protocol]
    assert len(read) == env.num_turns
    assert asked[0][0] == inner[0]
    assert protocol == "sequential" or "Your answer:\nsaid00\n" in asked[1][0]
    assert all(p.startswith(own) for prompts in asked for p, own in zip(prompts, inner) if p)


@pytest.mark.parametrize("protocol", ["sequential", "discussion"])
@pytest.mark.parametrize("name", ["tldr", "arxiv", "humaneval", "classeval", "tldr+humaneval"])
def test_the_last_answers_earn_what_they_earn_at_once(name, protocol):
    """A reward for first answers, for another agent's answers, or for turns that are saved (twice that of code)."""
    inner, env = envs.make(name, 2), envs.make(name, 2, protocol=protocol)
    task = inner.tasks("train")[1 if "+" in name else 0]  # of the mixture a function
    shown = {pair["prompt"]: pair["completion"] for pair in inner.demonstrations()}
    right = [shown.get(p, f"Text {i} is for a reader. " * 25) for i, p in enumerate(inner.observe(task, []))]
    _, (first, last) = play(env, task, lambda t, i: right[i] if t or protocol == "sequential" else "first")
    (expected,) = inner.step([(task, [], right)])
    assert first.parts.keys() <= {"humaneval/reward"} and (first.reward, first.done) == (0, False)
    assert expected.reward > 0 and last.actions == (right if protocol == "discussion" else ["", right[1]])
    assert last == expected._replace(actions=last.actions, done=True)


def test_silent_agents_have_no_turn_and_answers_are_cut():
    """A turn in which nobody speaks, a silent agent that takes another's turn, or thoughts in place of an answer."""
    env = SimpleNamespace(observe=lambda task, history: ["one", None, "three"])
    env.step = lambda branches: [envs.Step(said, [*map(len, said)], {}, False, said) for _, _, said in branches]
    env = Protocol(env, "silent", "sequential", 3, 1)
    _, (first, last) = play(env, {}, "said{}{}".format)
    assert last.feedback == ["said00", "", "said12"] and last.reward == [6, 0, 6]
    for text, shown in ("<think>a</think> b", "b"), ("c <think>d", "c"), ("e" * 9999, "e" * SHOWN + " [cut off]"):
        prompt = env.observe({}, [first._replace(actions=[text, "", ""])])[2]
        assert f"Answer of agent 1:\n{shown}\n" in prompt and "think" not in prompt


@pytest.mark.parametrize("name, protocol", [("tldr", "sequential"), ("humaneval", "discussion")])
def test_a_run_and_its_resume(name, protocol, run):
    """Turns that the script does not see, a mean with unpaid turns, and a resume that is refused for its turns."""
    flags = ("--num-iterations", 2, "--num-tasks", 2, "--eval-tasks", 2, "--num-generations", 2, "--max-new-tokens", 8)
    names = run(ROOT / "magrpo.py", "--env", name, "--env-kwargs", "protocol", protocol, *flags)
    metrics = names["metrics"]
    assert metrics["eval/reward_turn1"] == 0 and metrics["eval/reward_turn2"] == metrics["eval/return"]
    assert metrics["train/agent_1/completion_length"] > 0
    run(ROOT / "magrpo.py", "--resume", names["run_dir"], "--num-iterations", 3)
