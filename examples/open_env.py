"""An OpenEnv environment for these scripts: see docs/environments.md."""

import json

from openenv.core import GenericEnvClient

from envs import Step


class OpenEnv:
    """The agents act in turn. Each branch starts again from the seed and repeats its history."""

    def __init__(self, num_agents, num_turns, dataset, seed, url="http://127.0.0.1:8000", key="message"):
        self.num_agents, self.key, self.client = num_agents, key, GenericEnvClient(base_url=url).sync()

    def tasks(self, split):
        return [{"seed": number} for number in (range(100) if split == "train" else range(100, 120))]

    def observe(self, task, history):
        if history:
            _, step = history[-1]
            seen = step.feedback
        else:
            seen = self.client.reset(seed=task["seed"]).observation
        return [json.dumps(seen) if len(history) % self.num_agents == i else None for i in range(self.num_agents)]

    def act(self, actions):
        return self.client.step({self.key: "".join(actions)})  # all but one are ""

    def step(self, branches):
        steps = []
        for task, history, actions in branches:
            self.client.reset(seed=task["seed"])
            if any(self.act(earlier).observation != step.feedback for earlier, step in history):
                raise RuntimeError("its seed and actions do not determine what this environment does")
            result = self.act(actions)
            steps.append(Step(result.reward or 0.0, {}, result.done, result.observation))
        return steps
