"""Sample tasks, made offline: a module for each family of environments.

Everything follows from `split`, `count` and `seed`. Train and test differ by composition, whatever the seed: certain
combinations of choices (person x problem x attempt, method x obstacle x field, filter x map x fold) occur only in
"test", others only in "validation". Each choice, and (of lists of three or more) each pair of choices, also occurs in
"train", so test asks for a new combination of known choices.
"""

SAMPLE_COUNTS = {"train": 1000, "test": 200}


def split_of(*choices):
    """The split of a combination of choices, given as indices: test and validation get a sixth each."""
    kind = sum(choices) % 6
    if kind == 0:
        return "test"
    if kind == 1:
        return "validation"
    return "train"
