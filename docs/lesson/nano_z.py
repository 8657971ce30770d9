"""nano.py with advantages in standard deviations (GRPO)."""

import nano


def z_score(groups):
    for group in groups:
        std = group.peer_returns.std()
        group.advantages = (group.returns - group.peer_returns.mean()) / max(std, 1e-4)


nano.set_advantages = z_score

if __name__ == "__main__":
    nano.main()
