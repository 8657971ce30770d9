"""Sample tasks: splits disjoint by composition, and references that pass their own tests."""

import doctest
import random
from operator import itemgetter

import pytest

from envs import samples

PERSONS = [f"My {person} " for person in samples.PERSONS]  # "friend" is part of others


def composition(text, choices):
    """Which of its choices a text was made of; the name of a function tells."""
    return tuple(next(choice for choice in options if choice in text) for options in choices) or tuple(text.split("_"))


@pytest.mark.parametrize("held_out", ["validation", "test"])
@pytest.mark.parametrize(
    "make, column, count, choices",
    [
        (samples.posts, "prompt", 3000, (PERSONS, samples.PROBLEMS, samples.ATTEMPTS)),
        (samples.abstracts, "abstract_text", 3000, (samples.METHODS, samples.OBSTACLES, samples.FIELDS)),
        (samples.coding_tasks, "entry_point", 400, ()),
    ],
)
def test_compositions_are_disjoint_whatever_the_seed_and_their_pairs_are_known(held_out, make, column, count, choices):
    """Fails if a held-out task occurs in training, or a pair of its parts does not."""
    train = {composition(row[column], choices) for row in make("train", count, 0)}
    others = {composition(row[column], choices) for row in make(held_out, count // 4, 1)}
    assert len(others) > 40
    assert train.isdisjoint(others)
    for pair in itemgetter(0, 1), itemgetter(0, 2), itemgetter(1, 2):
        assert set(map(pair, others)) <= set(map(pair, train))


def function_of(fold, condition, value):
    folded = samples.FOLDS[fold][1].format(f"{value} for x in numbers if {condition}")
    return eval(f"lambda numbers: {folded}")


@pytest.mark.parametrize("split", ["train", "test"])
def test_references_and_examples_hold_and_no_other_answer_passes(split):
    """Fails if an answer without the filter or the map passes, except where that makes no difference to any list."""
    rng = random.Random(0)
    lists = [rng.choices(range(-9, 10), k=rng.randint(0, 8)) for _ in range(2000)]
    wrong = 0
    for task in samples.coding_tasks(split, 200, 5):
        names = {}
        for code in task["helper"] + task["main"], task["prompt"] + task["canonical_solution"]:
            exec(f"{code}\n{task['test']}", names)
            names["check"](names[task["entry_point"]])
        examples = doctest.DocTestParser().get_doctest(names[task["entry_point"]].__doc__, names, "task", None, 0)
        assert doctest.DocTestRunner(verbose=False).run(examples) == (0, 2)  # failed, of
        fold, condition, value = task["entry_point"].split("_")
        condition, value = samples.FILTERS[condition][1], samples.MAPS[value][1]
        right = function_of(fold, condition, value)
        for other in (
            function_of(fold, "True", value),
            function_of(fold, condition, "x"),
            function_of(fold, "x", value),
        ):
            if any(other(numbers) != right(numbers) for numbers in lists):
                wrong += 1
                with pytest.raises(AssertionError):
                    names["check"](other)
    assert wrong > 300
