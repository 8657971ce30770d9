"""Sample tasks: splits disjoint by composition, and references that pass their own tests."""

import random

import pytest

from envs import samples


def composition(entry_point):
    return tuple(entry_point.split("_"))


def post_composition(prompt):
    person = next(p for p in samples.PERSONS if f"My {p} " in prompt)
    problem = next(p for p in samples.PROBLEMS if p in prompt)
    attempt = next(a for a in samples.ATTEMPTS if a in prompt)
    return person, problem, attempt


def abstract_composition(text):
    return tuple(
        next(choice for choice in choices if choice in text)
        for choices in (samples.METHODS, samples.OBSTACLES, samples.FIELDS)
    )


def test_same_seed_same_tasks_other_seed_other_tasks():
    assert samples.posts("train", 20, 3) == samples.posts("train", 20, 3)
    assert samples.posts("train", 20, 3) != samples.posts("train", 20, 4)
    assert samples.coding_tasks("test", 20, 3) == samples.coding_tasks("test", 20, 3)
    assert samples.coding_tasks("test", 20, 3) != samples.coding_tasks("test", 20, 4)


@pytest.mark.parametrize("held_out", ["validation", "test"])
def test_compositions_are_disjoint_whatever_the_seed_and_their_pairs_are_known(held_out):
    train_posts = {post_composition(p["prompt"]) for p in samples.posts("train", 3000, 0)}
    other_posts = {post_composition(p["prompt"]) for p in samples.posts(held_out, 300, 1)}
    train_code = {composition(t["entry_point"]) for t in samples.coding_tasks("train", 400, 0)}
    other_code = {composition(t["entry_point"]) for t in samples.coding_tasks(held_out, 100, 1)}
    train_abstracts = {abstract_composition(a["abstract_text"]) for a in samples.abstracts("train", 3000, 0)}
    other_abstracts = {abstract_composition(a["abstract_text"]) for a in samples.abstracts(held_out, 300, 1)}
    for train, other in ((train_posts, other_posts), (train_abstracts, other_abstracts), (train_code, other_code)):
        assert len(other) > 40 and not train & other
        for drop in range(3):  # every pair of choices that is asked about was seen
            pairs = {c[:drop] + c[drop + 1 :] for c in train}
            assert {c[:drop] + c[drop + 1 :] for c in other} <= pairs


def test_demonstrations_come_in_all_lengths_and_repeat_facts_of_the_post():
    rows = samples.demonstrated_posts(200, 2, 0)
    counts = {sum(text.count(end) for end in ".?") for row in rows for text in row["demonstrations"]}
    assert counts == {1, 2, 3, 4, 5}
    facts = [*samples.PROBLEMS, *samples.ATTEMPTS, *samples.OUTCOMES, *samples.QUESTIONS, *samples.FEELINGS]
    for row in rows:
        for text in row["demonstrations"]:
            assert all(fact in row["prompt"] for fact in facts if fact in text)


@pytest.mark.parametrize("split", ["train", "test"])
def test_reference_and_cooperative_answer_pass_and_a_wrong_one_fails(split):
    for task in samples.coding_tasks(split, 200, 5):
        for code in (task["prompt"] + task["canonical_solution"], task["helper"] + task["main"]):
            names = {}
            exec(code, names)
            exec(task["test"], names)
            names["check"](names[task["entry_point"]])
        with pytest.raises(AssertionError):
            names["check"](lambda numbers: None)
        for line in task["prompt"].splitlines():  # no docstring example is also an assert
            if ">>>" in line:
                assert line.split("(", 1)[1] not in task["test"]


@pytest.mark.parametrize("split", ["train", "test"])
def test_no_answer_passes_that_lacks_the_filter_or_the_map(split):
    """Unless it gives the same for every list, as a sum does without nonzero."""
    rng = random.Random(0)
    lists = [[rng.randint(-9, 9) for _ in range(rng.randint(0, 8))] for _ in range(2000)]
    wrong = 0
    for task in samples.coding_tasks(split, 200, 5):
        fold, condition, value = task["entry_point"].split("_")
        condition, value = samples.FILTERS[condition][1], samples.MAPS[value][1]
        folded = samples.FOLDS[fold][1]
        right = eval(f"lambda numbers: {folded.format(f'{value} for x in numbers if {condition}')}")
        names = {}
        exec(task["test"], names)
        assert task["test"].count("assert") == 5
        for kept, made in (("True", value), (condition, "x"), ("x", value)):
            other = eval(f"lambda numbers: {folded.format(f'{made} for x in numbers if {kept}')}")
            if any(other(numbers) != right(numbers) for numbers in lists):
                wrong += 1
                with pytest.raises(AssertionError):
                    names["check"](other)
    assert wrong > 300


def test_docstring_examples_are_true():
    import doctest

    for task in samples.coding_tasks("test", 60, 2):
        names = {}
        exec(task["prompt"] + task["canonical_solution"], names)
        examples = doctest.DocTestParser().get_doctest(names[task["entry_point"]].__doc__, names, "task", None, 0)
        assert len(examples.examples) == 2 and doctest.DocTestRunner(verbose=False).run(examples).failed == 0
