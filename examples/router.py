"""A router names who speaks next, and all others are silent: an orchestrator, as an environment.

    python magrpo.py --env examples.router:Router --num-agents 3 --model FOLDER    (of a model that can do sums)

Agent 0, the router, speaks in every other turn. Each further agent knows one number and reads what was said: the first
to say the sum of all numbers ends the branch, and all agents earn 1. If the router names nobody, it ends with 0.
"""

import random
import re

from envs import Step
from rewards.texts import drop_thoughts


class Router:
    def __init__(self, num_agents, num_turns, dataset, seed):
        if num_agents < 2:
            raise ValueError(f"--num-agents {num_agents}: a router needs somebody to name.")
        self.num_agents = num_agents
        self.num_turns = 2 * (num_agents - 1)  # so that each can be heard once
        self.numbers = {"train": range(10, 30), "test": range(30, 50)}

    def tasks(self, split):
        rng = random.Random(split)
        return [{"numbers": rng.choices(self.numbers[split], k=self.num_agents - 1)} for _ in range(64)]

    def observe(self, task, history):
        speaker = 0
        lines = ["Each agent except for the router knows a number. What is the sum of all?"]
        for actions, step in history:
            if speaker:
                lines.append(f"Agent {speaker} says: {drop_thoughts(actions[speaker])}")
            speaker = step.feedback
        if speaker:
            lines.append(f"You are agent {speaker}, and your number is {task['numbers'][speaker - 1]}.")
        else:
            lines.append(f"You are the router. Say who speaks next: write a number from 1 to {self.num_agents - 1}.")
        prompts = [None] * self.num_agents
        prompts[speaker] = "\n".join(lines)
        return prompts

    def step(self, branches):  # feedback: who speaks next
        steps = []
        for task, history, actions in branches:
            text = drop_thoughts("".join(actions))  # only one of them is not empty
            numbers = re.findall("[0-9]{1,6}", text)
            last = int(numbers[-1]) if numbers else 0
            if len(history) % 2:
                right = last == sum(task["numbers"])
                steps.append(Step(float(right), {"right": float(right)}, done=right, feedback=0))
            else:
                named = 0 < last < self.num_agents
                steps.append(Step(0.0, {"right": 0.0}, done=not named, feedback=last))
        return steps
