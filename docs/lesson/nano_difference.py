"""nano.py with difference rewards: from an agent's return is subtracted the reward had it written nothing."""

from itertools import chain

import numpy as np

import nano

rollout = nano.rollout


def difference_rollout(args, env, policies, *rest):
    """The values of nodes, which earlier turns are paid for, remain those of the team."""
    N = len(policies)
    turns = rollout(args, env, policies, *rest)
    edges = [(node, child) for node in chain(*turns) for child in node.children]
    for i in range(N):
        # agent i's completion is replaced by ""
        without = [[*child.actions[:i], "", *child.actions[i + 1 :]] for _, child in edges]
        steps = env.step([(node.task, node.history, actions) for (node, _), actions in zip(edges, without)])
        for (_, child), step in zip(edges, steps):
            child.returns[i] -= np.broadcast_to(step.reward, N)[i]
    for node in chain(*turns):
        for i, group in node.groups.items():
            chosen = [child.choice[i] for child in node.children]
            own_returns = [child.returns[i] for child in node.children]
            group.returns = np.bincount(chosen, weights=own_returns) / np.bincount(chosen)
            group.peer_returns = group.returns
    return turns


nano.rollout = difference_rollout

if __name__ == "__main__":
    nano.main()
