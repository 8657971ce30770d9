"""Environments whose outcome is known, for --env examples.probes:CLASS. What has to be seen is in debugging.md."""

from typing import NamedTuple

WORDS = ["angry", "tired", "lonely", "nervous"]


class Step(NamedTuple):
    reward: float
    parts: dict
    done: bool
    feedback: object = None


class Constant:
    """Whatever the agents write earns 1: there is nothing to learn, so no weight may change."""

    def __init__(self, num_agents, num_turns, dataset, seed):
        self.num_agents = num_agents

    def tasks(self, split):
        return [{"word": word} for word in WORDS]

    def observe(self, task, history):
        return [f"Write a sentence about somebody who is {task['word']}."] * self.num_agents

    def step(self, branches):
        return [Step(1.0, {}, done=False) for _ in branches]


class GoodWord(Constant):
    """Each agent earns by the word "the": neither its prompt nor its partner matters."""

    def step(self, branches):
        steps = []
        for _, _, actions in branches:
            count = sum("the" in text.lower().split() for text in actions)
            steps.append(Step(count / self.num_agents, {}, done=False))
        return steps


class PartnersWord(Constant):
    """Agent 0 alone knows a word. It is paid if agent 1, who reads what agent 0 wrote, names it, and no other one."""

    num_turns = 2

    def observe(self, task, history):
        if history:
            (message, _), _ = history[0]
            return [None, f"Message: {message}\nWrite one word, the mood."]
        return [f"Mood: {task['word']}.\nWrite one word, the mood.", None]

    def step(self, branches):
        steps = []
        for task, history, actions in branches:
            names = [word for word in WORDS if word in actions[1].lower()]
            steps.append(Step(float(names == [task["word"]]), {}, done=bool(history)))
        return steps
