"""The environments: what each agent is asked, and what the joint answer is worth.

An environment is any class with these members; a user's own needs nothing from this package but `Step`.

    num_agents: int
    num_turns: int
    tasks(split) -> list[dict]                "train" or "test"
    observe(task, history) -> list[str]       the prompt of each agent; history: the earlier Steps of this branch
    step(branches) -> list[Step]              branches: list of (task, history, actions), scored as one batch

Nothing in it is mutable, so a rollout can branch: the same task and history may be continued in many ways.
"""

from typing import Any, NamedTuple


class Step(NamedTuple):
    """One joint action and what came of it."""

    actions: list[str]  # one text per agent
    reward: float  # shared by all agents
    parts: dict[str, float]  # the reward's components and diagnostics, for the log
    done: bool  # nothing is left to do: the branch ends before num_turns
    feedback: Any = None  # whatever the environment's next observe() wants to know
