"""nano.py without a baseline (REINFORCE)."""

import nano


def no_baseline(groups):
    for group in groups:
        group.advantages = group.returns


nano.set_advantages = no_baseline

if __name__ == "__main__":
    nano.main()
