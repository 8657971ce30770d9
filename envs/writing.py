"""Agents write complementary texts about one text: summaries of a post (tldr), an abstract's introduction (arxiv).

Roles, data and reward follow the TLDR and arXiv experiments of MAGRPO (Liu et al., 2025), with prompts of our own; the
reward and what differs from the published code are in rewards/writing.py.
"""

import re
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from envs import Step, one_of
from envs.data import load_tasks
from envs.samples import pair_up
from envs.samples import writing as samples
from rewards.texts import drop_thoughts
from rewards.writing import ARXIV, PARTS, TLDR, Scale, ladder_reward

DEMONSTRATED_POSTS = 4000
MARKER = "---"  # between the two paragraphs of a single agent
FIELD = re.compile(r"^(SUBREDDIT|TITLE|POST|TL;DR):", re.MULTILINE)  # labels of a post's form, not words of the post
MARKER_LINE = re.compile(rf"^[ \t]*{MARKER}[ \t\r]*$", re.MULTILINE)
LEADING_MARKERS = re.compile(rf"\A(?:\s*^[ \t]*{MARKER}[ \t\r]*$)+", re.MULTILINE)  # before the first paragraph

CONCISE = "Write a concise, factual summary in one or a few sentences."
DETAILED = "Write a detailed summary with more different words and some transition words."
RUNG = "Write summary {i} of {n}: more detailed than summary {before}, with more different words and transition words."
ALONE = f"Write a concise, factual summary, then a line {MARKER}, then a detailed summary with more different words."

SECTIONS = ["background", "motivation", "methods", "implications"]  # of an introduction, in order
SECTION = "Expand this abstract into the {mine} of an introduction. Other writers cover {others}: leave that to them."
ALL_SECTIONS = (
    f"Expand this abstract into an introduction: a paragraph with background and motivation, then a line {MARKER}, "
    "then a paragraph with methods and implications."
)


def _make_ladder_roles(num_agents):
    """A concise summary, a detailed one, and then each more detailed than the one before."""
    if num_agents == 1:
        return [ALONE]
    if num_agents == 2:
        return [CONCISE, DETAILED]
    rungs = range(2, num_agents + 1)
    return [CONCISE] + [RUNG.format(i=i, n=num_agents, before=i - 1) for i in rungs]


def _make_part_roles(num_agents):
    """The four parts of an introduction in order, divided as evenly as possible; later agents get larger shares."""
    if num_agents == 1:
        return [ALL_SECTIONS]
    cuts = [len(SECTIONS) * i // num_agents for i in range(num_agents + 1)]
    return [
        SECTION.format(mine=" and ".join(SECTIONS[start:end]), others=" and ".join(SECTIONS[:start] + SECTIONS[end:]))
        for start, end in pairwise(cuts)
    ]


class _Kind(NamedTuple):
    """What one of the writing tasks consists of."""

    hub: str
    hub_splits: dict
    columns: list  # the first holds the text that all agents read
    reference: str | None  # the column with a human answer, if there is one
    scale: Scale
    roles: Callable  # (number of agents) -> list of str
    sample: Callable  # (split, count, seed) -> list of dict
    demonstrated: Callable  # (count, texts for each, seed) -> list of dict


KINDS = {
    "tldr": _Kind(
        hub="trl-lib/tldr",
        hub_splits={"train": "train[:1000]", "test": "test[:1000]"},
        columns=["prompt", "completion"],
        reference="completion",
        scale=TLDR,
        roles=_make_ladder_roles,
        sample=samples.make_posts,
        demonstrated=samples.demonstrate_posts,
    ),
    "arxiv": _Kind(
        hub="OpenMLRL/arXiv_abstract",
        hub_splits={"train": "train[:1000]", "test": "val[:1000]"},
        columns=["abstract_text"],
        reference=None,
        scale=ARXIV,
        roles=_make_part_roles,
        sample=samples.make_abstracts,
        demonstrated=samples.demonstrate_abstracts,
    ),
}


class Writing:
    """Agents write summaries of a post, or parts of the introduction to an abstract, without seeing each other's.

    name: "tldr": summaries of a post, a concise one by agent 1, a detailed one by agent 2. More than two agents form a
        ladder, each more detailed than the one before.
        "arxiv": the introduction to an abstract, background and motivation by agent 1, methods and implications by
        agent 2. Three or four agents divide these four parts.
    num_agents: 1 or more; arxiv: 1 to 4. A single agent writes both texts, separated by a line with MARKER. For more
        than two agents the reward is the mean over pairs of neighbours.
    num_turns: 1
    dataset: "sample", "hub", a hub id or a file. tldr: trl-lib/tldr, train[:1000] and test[:1000], columns `prompt`
        (the post) and `completion` (a human summary, used for diagnostics and demonstrations only). arxiv:
        OpenMLRL/arXiv_abstract, train[:1000] and val[:1000] for test, column `abstract_text`
    seed: int, seeds the sample tasks
    reward: "plain", or "grounded", which also requires that half of the content words come from the source text, and
        that answers are neither repetitive nor mostly stop words; copies of the source and lists of its words still
        earn most of the reward

    Raises ValueError with one sentence for other arguments and for a dataset that cannot be used.
    """

    PARTS = PARTS

    def __init__(self, name, num_agents, num_turns, dataset, seed, reward="plain"):
        one_of("reward", reward, "plain", "grounded")
        self.kind = kind = KINDS[name]
        self.num_agents = num_agents
        self.dataset = dataset
        self.seed = seed
        self.grounded = reward == "grounded"
        self.roles = kind.roles(num_agents)
        self.splits = load_tasks(
            dataset, seed, kind.sample, columns=kind.columns, hub=kind.hub, hub_splits=kind.hub_splits
        )

    def tasks(self, split):
        return self.splits[split]

    def observe(self, task, history):
        text = task[self.kind.columns[0]].rstrip().removesuffix("TL;DR:").strip()
        return [f"{text}\n\n{role}" for role in self.roles]

    def step(self, branches):
        kind = self.kind
        steps = []
        for task, _, actions in branches:
            texts = self._read_texts(actions)
            reference = task[kind.reference] if kind.reference else None
            source = FIELD.sub("", task[kind.columns[0]])
            reward, parts = ladder_reward(texts, kind.scale, source, reference, self.grounded)
            steps.append(Step(reward, parts, done=True))
        return steps

    def _read_texts(self, actions):
        """The texts that are compared, without thoughts; a single agent's are on both sides of its marker."""
        texts = [drop_thoughts(action) for action in actions]
        if self.num_agents > 1:
            return texts
        paragraphs = MARKER_LINE.split(LEADING_MARKERS.sub("", texts[0]), 1)
        return [*paragraphs, ""][:2]

    def demonstrations(self):
        """Texts to imitate for the train split: list of dict(prompt, completion).

        For the sample tasks they ignore the role, so a model that imitates them still has to learn it: summaries of 1
        to 5 sentences, and paragraphs that mix all parts of an introduction. For other datasets of tldr they are the
        human summaries. Raises ValueError for other datasets of arxiv, which hold no answers.
        """
        per_task = max(2, self.num_agents)
        reference = self.kind.reference
        if self.dataset == "sample":
            rows = self.kind.demonstrated(DEMONSTRATED_POSTS, per_task, self.seed)
        elif reference is None:
            raise ValueError(f"--dataset {self.dataset}: it holds no introductions to imitate; use sample.")
        else:
            rows = [{**row, "demonstrations": [row[reference].strip()] * per_task} for row in self.splits["train"]]
        pairs = []
        for row in rows:
            texts = row["demonstrations"]
            if self.num_agents == 1:
                texts = [f"\n{MARKER}\n".join(texts)]
            pairs += pair_up(self.observe(row, []), texts)
        return pairs
