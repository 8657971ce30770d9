"""Small environments for the tests, as a user would write them."""

from string import ascii_lowercase, ascii_uppercase
from typing import NamedTuple


class Step(NamedTuple):
    actions: list
    reward: float
    parts: dict
    done: bool
    feedback: object = None


class Letters:
    """Agents earn by using a given letter; more than 14 characters of agent 0 end the branch. Any number of turns."""

    def __init__(self, num_agents, num_turns, dataset, seed):
        self.num_agents, self.num_turns = num_agents, num_turns

    def tasks(self, split):
        return [{"letter": letter} for letter in ("abcdef" if split == "train" else "ghij")]

    def observe(self, task, history):
        said = "".join(f" You said {step.actions}." for step in history)
        return [f"Say {task['letter'] * (i + 1)}.{said}" for i in range(self.num_agents)]

    def step(self, branches):
        steps = []
        for task, history, actions in branches:
            share = sum(text.count(task["letter"]) + 0.1 * len(text) for text in actions) / 10
            reward = share * (1 + len(history))
            steps.append(Step(actions, reward, {"share": share}, done=len(actions[0]) > 14))
        return steps


class Cases:
    """The first agent earns by small letters, the others by capitals, up to eight each."""

    def __init__(self, num_agents, num_turns, dataset, seed):
        self.num_agents = num_agents

    def tasks(self, split):
        return [
            {"word": word} for word in (["tea", "sun", "sea"] if split == "train" else ["hat", "ant", "elm", "ivy"])
        ]

    def observe(self, task, history):
        return [f"{i} {task['word']}" for i in range(self.num_agents)]

    def step(self, branches):
        steps = []
        for _, _, actions in branches:
            earning = [ascii_lowercase] + [ascii_uppercase] * (self.num_agents - 1)
            shares = [sum(c in letters for c in text) / 8 for letters, text in zip(earning, actions)]
            steps.append(Step(actions, sum(shares) / self.num_agents, {}, done=False))
        return steps
