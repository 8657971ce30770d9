"""nano.py with a moving mean of each agent's returns as its baseline (RAE of SPIRAL, 2506.24119), for G = 1."""

from collections import defaultdict

import numpy as np

import nano

baselines = defaultdict(float)  # agent -> moving mean


def rae(groups):
    returns = defaultdict(list)  # agent -> of all its completions
    for group in groups:
        agent = id(group.policy)
        group.advantages = group.returns - baselines[agent]
        returns[agent] += list(group.returns)
    # afterwards: a baseline must not depend on the returns that it is subtracted from
    for agent, own in returns.items():
        baselines[agent] += 0.05 * (np.mean(own) - baselines[agent])


nano.set_advantages = rae

if __name__ == "__main__":
    nano.main()
