"""Agents write about one text, each in more detail than the one before (tldr).

Roles, data and reward follow the TLDR experiment of MAGRPO (Liu et al., 2025), with prompts of our own; the reward and
what differs from the published code are in rewards/writing.py.
"""

from envs import Step, read_rows, samples
from rewards.writing import TLDR, ladder_reward

SAMPLE_COUNTS = {"train": 1000, "test": 200}
DEMONSTRATED_POSTS = 4000
MARKER = "---"  # between the two paragraphs of a single agent

CONCISE = "Write a concise, factual summary in one or a few sentences."
DETAILED = "Write a detailed summary with more different words and some transition words."
RUNG = "Write summary {i} of {n}: more detailed than summary {before}, with more different words and transition words."
ALONE = f"Write a concise, factual summary, then a line {MARKER}, then a detailed summary with more different words."


class Writing:
    """Summaries of a post: a concise one by agent 1, a detailed one by agent 2. No agent sees another's text.

    name: "tldr"
    num_agents: 1 or more. One agent writes both summaries, two paragraphs parted by a line with MARKER. More than two
        form a ladder, each more detailed than the one before, and the reward is the mean over neighbours.
    num_turns: 1
    dataset: "sample", "hub" (trl-lib/tldr, train[:1000] and test[:1000]), a hub id or a file; columns `prompt` (the
        post) and `completion` (a human summary, used for diagnostics and demonstrations only)
    seed: int, of the sample tasks
    reward: "plain", or "grounded", which asks that half of the content words come from the post

    Raises ValueError, one sentence, for other arguments and for a dataset that cannot be used.
    """

    def __init__(self, name="tldr", num_agents=2, num_turns=1, dataset="sample", seed=1, reward="plain"):
        if num_turns != 1:
            raise ValueError(f"--num-turns {num_turns}: {name} has one turn; use --num-turns 1.")
        if reward not in ("plain", "grounded"):
            raise ValueError(f"--reward {reward}: {name} knows plain and grounded; use one of them.")
        self.num_agents, self.num_turns, self.dataset, self.seed = num_agents, num_turns, dataset, seed
        self.grounded = reward == "grounded"
        if dataset == "sample":
            self.splits = {split: samples.posts(split, count, seed) for split, count in SAMPLE_COUNTS.items()}
        else:
            hub_splits = {"train": "train[:1000]", "test": "test[:1000]"}
            self.splits = read_rows(dataset, ["prompt", "completion"], "trl-lib/tldr", hub_splits)

    def tasks(self, split):
        """The posts of "train" or "test": prompt and completion."""
        return self.splits[split]

    def observe(self, task, history):
        post = task["prompt"].removesuffix("TL;DR:").strip()
        if self.num_agents == 1:
            roles = [ALONE]
        elif self.num_agents == 2:
            roles = [CONCISE, DETAILED]
        else:
            rungs = range(2, self.num_agents + 1)
            roles = [CONCISE] + [RUNG.format(i=i, n=self.num_agents, before=i - 1) for i in rungs]
        return [f"{post}\n\n{role}" for role in roles]

    def step(self, branches):
        steps = []
        for task, _, actions in branches:
            texts = actions[0].split(MARKER, 1) if self.num_agents == 1 else actions
            texts = texts if len(texts) > 1 else [*texts, ""]  # without the marker there is no second paragraph
            reward, parts = ladder_reward(texts, TLDR, task["prompt"], task["completion"], self.grounded)
            steps.append(Step(actions, reward, parts, done=True))
        return steps

    def demonstrations(self):
        """Texts to imitate for posts of the train split: list of dict(prompt, completion).

        For the sample posts they are summaries of 1 to 5 sentences that take no notice of the role, so that a model
        which imitates them still has the roles to learn. For other datasets they are the human summaries.
        """
        per_post = max(2, self.num_agents)
        if self.dataset == "sample":
            rows = samples.demonstrated_posts(DEMONSTRATED_POSTS, per_post, self.seed)
        else:
            rows = [{**row, "demonstrations": [row["completion"].strip()] * per_post} for row in self.splits["train"]]
        pairs = []
        for row in rows:
            texts = row["demonstrations"]
            if self.num_agents == 1:
                texts = [f"\n{MARKER}\n".join(texts)]
            pairs += [{"prompt": p, "completion": c} for p, c in zip(self.observe(row, []), texts)]
        return pairs
