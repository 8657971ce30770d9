"""Sample tasks, made offline: a module for each family of environments.

Everything follows from `split`, `count` and `seed`. Train and test differ by composition, whatever the seed: certain
combinations of choices (person x problem x attempt, method x obstacle x field, filter x map x fold) occur only in
"test", others only in "validation". Each choice, and (of lists of three or more) each pair of choices, also occurs in
"train", so test asks for a new combination of known choices.
"""

import re

SAMPLE_COUNTS = {"train": 1000, "test": 200}
PROGRAM_COUNTS = {"train": 512, "validation": 64, "test": 64}  # of environments whose answers are run


def read_list(text):
    """The parts of a text between commas and line ends."""
    return [part.strip() for part in re.split(r"[,\n]", text.strip())]


def read_groups(text):
    """The lines of a text, in groups that blank lines divide: list of list."""
    return [group.splitlines() for group in text.strip().split("\n\n")]


def read_table(text):
    """The rows of a table of plain text, each a list of cells."""
    return [[cell.strip() for cell in line.split(" | ")] for line in text.strip().splitlines()]


def read_records(text):
    """dict(first cell of a row -> the others) of a table of plain text."""
    return {name: cells for name, *cells in read_table(text)}


def pair_up(prompts, completions):
    """Demonstrations of a turn, list of dict(prompt, completion): those of the agents that speak."""
    return [{"prompt": p, "completion": c} for p, c in zip(prompts, completions) if p is not None]


def find_split(*choices):
    """The split of a combination of choices, given as indices: test and validation get a sixth each."""
    kind = sum(choices) % 6
    if kind == 0:
        return "test"
    if kind == 1:
        return "validation"
    return "train"
