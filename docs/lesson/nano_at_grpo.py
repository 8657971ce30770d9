"""nano.py with AT-GRPO (2510.11062): only the best joint action of a node goes on, and a turn is paid its own reward.

    A_g = r_g - mean(r_1 .. r_G)

For --branching tree. A reading for agents that act at once. In the paper they act in turn: the best of an agent's
completions is kept before the next one reads it, r_g = alpha * reward of the team + reward of the agent, and its code
divides by their std.
"""

from collections import defaultdict
from itertools import chain
from types import SimpleNamespace

import numpy as np

import nano

rollout = nano.rollout


def greedy_rollout(args, env, policies, tasks, *rest):
    """One trajectory a task, with G completions at each node; a node's value is what it earns from there on."""

    def step(branches):
        steps = env.step(branches)
        siblings = defaultdict(list)  # node -> its joint actions, to which nano gives one and the same list
        for k, (_, history, _) in enumerate(branches):
            siblings[id(history)].append(k)
        for ks in siblings.values():
            ks.remove(max(ks, key=lambda k: np.mean(steps[k].reward)))
            for k in ks:
                steps[k] = steps[k]._replace(done=True)
        return steps

    # with gamma 0 a return is the turn's reward
    own_turn = SimpleNamespace(**{**vars(args), "gamma": 0.0})
    turns = rollout(own_turn, SimpleNamespace(observe=env.observe, step=step), policies, tasks, *rest)
    for node in chain(*reversed(turns)):
        best = max(node.children, key=lambda child: np.mean(child.returns))
        node.value = best.returns + args.gamma * best.value
        for group in node.groups.values():
            group.weight = args.gamma ** len(node.history) / len(tasks) / len(group.completions)
    return turns


nano.rollout = greedy_rollout

if __name__ == "__main__":
    nano.main()
