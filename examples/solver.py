"""A solver, then a checker who reads what it wrote."""

from envs import Step
from rewards.texts import drop_thoughts


class Sums:
    def __init__(self, num_agents, num_turns, dataset, seed):
        self.numbers = {"train": range(10, 40), "test": range(40, 60)}

    def tasks(self, split):
        return [{"question": f"{n} + {n + 7}", "answer": str(2 * n + 7)} for n in self.numbers[split]]

    def observe(self, task, history):
        if not history:
            return [f"Compute {task['question']}.", None]  # the checker is silent
        (answer, _), _ = history[0]
        return [None, f"Compute {task['question']}. A colleague says: {drop_thoughts(answer)} Check it, and answer."]

    def step(self, branches):
        steps = []
        for task, history, actions in branches:
            right = float(task["answer"] in drop_thoughts(actions[len(history)]))
            steps.append(Step(right if history else 0.0, {"right": right}, done=False))
        return steps
