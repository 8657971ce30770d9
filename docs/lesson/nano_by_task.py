"""nano.py with one group a task: a return is compared with those of all agents, trajectories and turns of its task.

For --branching trajectories. Where rewards are paid at the end, it is one reward for all that a trajectory holds.
"""

import numpy as np

import nano


def compare_all(turns):
    for root in turns[0]:
        nodes = [root]
        groups = []
        while nodes:
            groups += [group for node in nodes for group in node.groups.values()]
            nodes = [child for node in nodes for child in node.children]
        for group in groups:
            group.peer_returns = np.concatenate([peer.returns for peer in groups])


nano.compare_trajectories = compare_all

if __name__ == "__main__":
    nano.main()
