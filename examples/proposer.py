"""A proposer sets a problem, then solvers answer it: self-play, which makes its own curriculum.

    python magrpo.py --env examples.proposer:Proposer --num-agents 3 --model FOLDER    (of a model that can multiply)

A solver earns 1 if it is right. The proposer earns 4 p (1 - p), with p the share of right solvers: 1 if half of them
are, 0 if all or none. Only the solvers of its own branch count, of which there have to be two or more: further answers
to a problem are in other branches, and what a branch earns must not depend on which others are scored with it. If each
of K solvers is right with chance q, the proposer's mean is (1 - 1/K) 4 q (1 - q), so the best problems have q = 1/2.
With --share-policy one model learns both roles.
"""

import re

from envs import Step
from rewards.boxed import is_right, read_answer
from rewards.texts import drop_thoughts


class Proposer:
    num_turns = 2

    def __init__(self, num_agents, num_turns, dataset, seed):
        if num_agents < 3:
            raise ValueError(f"--num-agents {num_agents}: a proposer needs two or more solvers.")
        self.num_solvers = num_agents - 1
        self.numbers = {"train": range(11, 75), "test": range(75, 99)}

    def tasks(self, split):
        return [{"number": number} for number in self.numbers[split]]

    def observe(self, task, history):
        number = task["number"]
        if not history:
            demand = f"Pupils compute {number} * a number. Choose it so that half of them can: {number} * 4, say."
            return [demand, *[None] * self.num_solvers]
        _, proposed = history[0]  # solvers read the number, and nothing else that the proposer wrote
        problem = f"Compute {number} * {proposed.feedback}. Write the result in \\boxed{{}}."
        return [None, *[problem] * self.num_solvers]

    def step(self, branches):
        steps = []
        for task, history, actions in branches:
            if history:
                _, proposed = history[0]
                result = task["number"] * proposed.feedback
                right = [float(is_right(read_answer(text), str(result))) for text in actions[1:]]
                p = sum(right) / self.num_solvers
                steps.append(Step([4 * p * (1 - p), *right], {"right": p}, done=True))
            else:
                problem = rf"(?<![\d.]){task['number']} ?(?:[*x×]|\\times) ?([0-9]{{1,4}})(?![.,]?\d)"
                numbers = re.findall(problem, drop_thoughts(actions[0]))
                choice = int(numbers[-1]) if numbers else None
                steps.append(Step(0.0, {"right": 0.0}, done=choice is None, feedback=choice))
        return steps
