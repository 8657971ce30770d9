"""nano.py with advantages divided by the standard deviation of all that an agent compares (Dr. MAS, 2602.08847)."""

from collections import defaultdict

import numpy as np

import nano

subtract_means = nano.set_advantages


def dr_mas(groups):
    subtract_means(groups)
    groups_of = defaultdict(list)  # agent -> its Groups
    for group in groups:
        groups_of[id(group.policy)].append(group)
    for own in groups_of.values():
        std = np.concatenate([group.advantages for group in own]).std()
        for group in own:
            group.advantages /= max(std, 1e-4)


nano.set_advantages = dr_mas

if __name__ == "__main__":
    nano.main()
