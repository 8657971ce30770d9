"""Environments of the lesson, for --env examples.variants:CLASS."""

from envs.games import Reference
from envs.reasoning import Reasoning, deal


class Split(Reasoning):
    """Problems dealt out: agent 0 writes what it knows, agent 1 reads it and answers."""

    def __init__(self, **options):
        super().__init__(roles="split", **options)

    def message(self, task, text):
        """What agent 1 reads of agent 0's text."""
        return text

    def observe(self, task, history):
        if history:
            (text, _), step = history[0]
            history = [([self.message(task, text), ""], step)]
        return super().observe(task, history)


class Muted(Split):
    """Agent 1 reads nothing."""

    def message(self, task, text):
        return ""


class Exchanged(Split):
    """Agent 1 reads what agent 0 should say about another problem: always the same one for a task."""

    def message(self, task, text):
        problems = self.tasks("train")
        other = problems[len(task["question"]) % len(problems)]
        (facts, _), _ = deal(other["question"], self.num_agents)
        return facts


class Rival(Reference):
    """Two speakers and a listener; agent 1, who knows the role, is paid when the listener is wrong."""

    def step(self, branches):
        steps = []
        for step in super().step(branches):
            success = step.reward
            steps.append(step._replace(reward=[success, 1 - success, success] if step.done else 0.0))
        return steps
