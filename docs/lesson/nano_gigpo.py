"""nano.py with advantages of GiGPO (2505.10978) without standard deviations, R being returns from the same turn on:

    A = R - mean over trajectories + STEP_WEIGHT * (R - mean over visits of the same state)

A state is an agent's prompt: equal ones are compared over all tasks, turns and trajectories of the batch.
"""

from collections import defaultdict

import numpy as np

import nano

STEP_WEIGHT = 1.0


def gigpo(groups):
    visits = defaultdict(list)  # (agent, prompt_ids) -> returns
    for group in groups:
        visits[id(group.policy), group.prompt_ids] += list(group.returns)
    for group in groups:
        step_advantages = group.returns - np.mean(visits[id(group.policy), group.prompt_ids])
        group.advantages = group.returns - group.peer_returns.mean() + STEP_WEIGHT * step_advantages


nano.set_advantages = gigpo

if __name__ == "__main__":
    nano.main()
