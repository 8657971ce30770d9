"""Small environments for the tests, as a user would write them; how tests play others, and read tables."""

from typing import NamedTuple


class Step(NamedTuple):
    reward: object
    parts: dict
    done: bool
    feedback: object = None


def rows_of(table):
    """The cells of a table of plain text, one row a line, with | between cells."""
    return [[cell.strip() for cell in line.split("|")] for line in table.strip("\n").splitlines()]


def play(env, task, write):
    """The prompts of each turn and the Steps of a branch in which agent i writes write(turn, i, prompt)."""
    turns, steps, history = [], [], []
    while not (steps and steps[-1].done):
        prompts = env.observe(task, history)
        actions = [write(len(turns), i, prompt) if prompt else "" for i, prompt in enumerate(prompts)]
        steps += env.step([(task, history, actions)])
        history.append((actions, steps[-1]))
        turns.append(prompts)
    return turns, steps


PARTS = {"odd": (0, "a diagnostic"), "size": (0.5, "half of the reward")}


class Paying:  # what a page shows of its runs
    PARTS = PARTS


class Letters:
    """Agents earn by using a given letter; more than 14 characters of agent 0 end the branch. Any number of turns."""

    def __init__(self, num_agents, num_turns, dataset, seed):
        self.num_agents, self.num_turns = num_agents, num_turns

    def tasks(self, split):
        return [{"letter": letter} for letter in ("abcdef" if split == "train" else "ghij")]

    def observe(self, task, history):
        earlier = "".join(f" You said {actions}." for actions, _ in history)
        return [f"Say {task['letter'] * (i + 1)}.{earlier}" for i in range(self.num_agents)]

    def step(self, branches):
        steps = []
        for task, history, actions in branches:
            share = sum(text.count(task["letter"]) + 0.1 * len(text) for text in actions) / 10
            reward = share * (1 + len(history))
            steps.append(Step(reward, {"share": share}, done=len(actions[0]) > 14))
        return steps


class Sequential(Letters):
    """In turn k agent k alone speaks (modulo the number of agents), and reads what was said before."""

    def observe(self, task, history):
        prompts = super().observe(task, history)
        return [prompt if i == len(history) % self.num_agents else None for i, prompt in enumerate(prompts)]

    def step(self, branches):
        return [step._replace(done=False) for step in super().step(branches)]


class Selfish(Letters):
    """Every agent has a reward of its own: it earns by its length, and pays for all lengths."""

    def step(self, branches):
        steps = []
        for _, _, actions in branches:
            lengths = [len(text) / 10 for text in actions]
            rewards = [1.5 * length - sum(lengths) / 2 for length in lengths]
            steps.append(Step(rewards, {}, done=len(actions[0]) > 14))
        return steps


class SelfishInTurn(Selfish, Sequential):
    """Rewards of their own, and one speaker a turn."""


class Cases(Letters):
    """The first agent earns by small letters, the others by capitals, up to eight each."""

    def step(self, branches):
        steps = []
        for _, _, actions in branches:
            count = sum(map(str.islower, actions[0])) + sum(map(str.isupper, "".join(actions[1:])))
            steps.append(Step(count / 8 / self.num_agents, {}, done=False))
        return steps
