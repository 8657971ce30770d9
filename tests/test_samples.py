"""Sample tasks: splits disjoint by composition, and references that pass their own tests."""

import doctest
import random

import pytest

from envs import samples

PERSONS = [f"My {person} " for person in samples.PERSONS]  # "friend" is part of others


def composition(text, choices):
    """Which of its choices a text was made of; the name of a function says it."""
    return tuple(next(choice for choice in options if choice in text) for options in choices) or tuple(text.split("_"))


@pytest.mark.parametrize("held_out", ["validation", "test"])
def test_compositions_are_disjoint_whatever_the_seed_and_their_pairs_are_known(held_out):
    for make, column, count, *choices in (
        (samples.posts, "prompt", 3000, PERSONS, samples.PROBLEMS, samples.ATTEMPTS),
        (samples.abstracts, "abstract_text", 3000, samples.METHODS, samples.OBSTACLES, samples.FIELDS),
        (samples.coding_tasks, "entry_point", 400),
    ):
        rows = make("train", count, 0), make(held_out, count // 4, 1)
        train, other = ({composition(row[column], choices) for row in part} for part in rows)
        assert len(other) > 40
        assert not train & other
        for drop in range(3):  # every pair of choices that is asked about was seen
            pairs = {c[:drop] + c[drop + 1 :] for c in train}
            assert {c[:drop] + c[drop + 1 :] for c in other} <= pairs


@pytest.mark.parametrize("split", ["train", "test"])
def test_references_and_examples_hold_and_no_other_answer_passes(split):
    """Other answers lack the filter or the map, unless they give the same for every list, as a sum without nonzero."""
    rng = random.Random(0)
    lists = [[rng.randint(-9, 9) for _ in range(rng.randint(0, 8))] for _ in range(2000)]
    wrong = 0
    for task in samples.coding_tasks(split, 200, 5):
        names = {}
        for code in (task["prompt"] + task["canonical_solution"], task["helper"] + task["main"]):
            exec(code + "\n" + task["test"], names)
            names["check"](names[task["entry_point"]])
        exec(task["prompt"] + task["canonical_solution"], names)
        examples = doctest.DocTestParser().get_doctest(names[task["entry_point"]].__doc__, names, "task", None, 0)
        assert len(examples.examples) == 2 and doctest.DocTestRunner(verbose=False).run(examples).failed == 0
        assert not any(example.source.split("(", 1)[1].strip() in task["test"] for example in examples.examples)
        fold, condition, value = task["entry_point"].split("_")
        condition, value = samples.FILTERS[condition][1], samples.MAPS[value][1]
        folded = samples.FOLDS[fold][1]
        right = eval(f"lambda numbers: {folded.format(f'{value} for x in numbers if {condition}')}")
        assert task["test"].count("assert") == 5
        for kept, made in (("True", value), (condition, "x"), ("x", value)):
            other = eval(f"lambda numbers: {folded.format(f'{made} for x in numbers if {kept}')}")
            if any(other(numbers) != right(numbers) for numbers in lists):
                wrong += 1
                with pytest.raises(AssertionError):
                    names["check"](other)
    assert wrong > 300
