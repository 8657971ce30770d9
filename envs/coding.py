"""Two (or N) agents write one Python program: helpers `aux`, and the function that was asked for.

The tasks are those of HumanEval (Chen et al., 2021), MBPP sanitized (Austin et al., 2021) and CoopHumanEval
(OpenMLRL); the roles and the reward follow MAGRPO (Liu et al., 2025). See rewards/coding.py for the reward.
"""

import re

from envs import samples

SAMPLE_COUNTS = {"train": 512, "validation": 64, "test": 64}


class Coding:
    """Agents 1..N-1 each write a helper function, agent N the function that the task asks for.

    name: "humaneval", "mbpp" or "coophumaneval"
    num_agents: 1 or more; one agent writes the asked function alone
    num_turns: 1 or more; a later turn shows each agent its own answers and what became of them
    dataset: "sample", "hub", a path to .jsonl or .parquet, or a hub id with the same columns
    seed: of the sample tasks
    feedback: "plain" (revise) or "level" (what was found, how many tests passed, the first failing example)
    """

    def __init__(self, name, num_agents=2, num_turns=1, dataset="sample", seed=1, feedback="level"):
        if num_agents < 1:
            raise ValueError(f"--num-agents {num_agents}: {name} needs at least one agent")
        if feedback not in ("plain", "level"):
            raise ValueError(f"--feedback {feedback}: choose plain or level")
        self.name, self.num_agents, self.num_turns = name, num_agents, num_turns
        self.dataset, self.seed, self.feedback = dataset, seed, feedback
        self.helpers = helper_names(num_agents)

    def tasks(self, split):
        """The tasks of "train", "validation" or "test", each a dict with task_id, problem, entry_point and tests."""
        return [task_of_row(row) for row in samples.coding_tasks(split, SAMPLE_COUNTS[split], self.seed)]

    def observe(self, task, history):
        """The prompt of each agent: helpers first, the asked function's agent last."""
        return [helper_prompt(task, name) for name in self.helpers] + [main_prompt(task, self.helpers)]

    def demonstrations(self):
        """Prompts and good completions of every role for the sample training tasks: list of dict(prompt, completion).

        One agent writes helper and asked function together; with several helpers the first is the one that is used.
        """
        demos = []
        for task in self.tasks("train"):
            if self.helpers:
                codes = [re.sub(r"\baux\b", name, task["helper"]) for name in self.helpers]
                codes.append(re.sub(r"\baux\b", self.helpers[0], task["main"]))
            else:
                codes = [task["helper"].rstrip() + "\n\n\n" + task["main"]]
            demos += [{"prompt": p, "completion": c} for p, c in zip(self.observe(task, []), codes)]
        return demos


def helper_names(num_agents):
    """The names of the helper functions: none, "aux", or "aux1", "aux2" ..."""
    return ["aux"] * (num_agents - 1) if num_agents <= 2 else [f"aux{i}" for i in range(1, num_agents)]


def helper_prompt(task, name):
    return f"{task['problem'].strip()}\n\nWrite a helper function {name} for this. Function code only."


def main_prompt(task, helpers):
    ask = f"{task['problem'].strip()}\n\nWrite {task['entry_point']}."
    if len(helpers) == 1:
        ask += f" A helper {helpers[0]}(...) exists: you may call it, do not redefine it."
    elif helpers:
        ask += f" Helpers {', '.join(f'{h}(...)' for h in helpers)} exist: you may call them, do not redefine them."
    return ask + " Function code only."


def task_of_row(row):
    """One form for the rows of all datasets."""
    return {"problem": row["prompt"], **row}
