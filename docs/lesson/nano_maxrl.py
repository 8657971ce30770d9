"""nano.py with advantages of MaxRL (2602.02710) for rewards 0 or 1: A = (R - mean) / mean, and 0 where none succeeds.

Trajectories follow (1 + (1-p) + .. + (1-p)^(G-2)) grad p, near grad log p, if a task has success p.
"""

import nano


def maxrl(groups):
    for group in groups:
        mean = group.peer_returns.mean()
        group.advantages = (group.returns - mean) / max(mean, 1e-4)


nano.set_advantages = maxrl

if __name__ == "__main__":
    nano.main()
