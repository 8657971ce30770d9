"""Sample tasks: splits disjoint by composition, and references that pass their own tests."""

import random

import pytest

import rewards.classeval
import rewards.coding
from envs import make, samples


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


def test_posts_are_distinct_and_shaped_like_the_public_set():
    posts = samples.posts("train", 200, 0)
    assert len({p["prompt"] for p in posts}) > 195
    for post in posts:
        assert set(post) == {"prompt", "completion"}
        assert post["prompt"].startswith("SUBREDDIT: r/") and post["prompt"].endswith("TL;DR:")
        assert "\n\nTITLE: " in post["prompt"] and "\n\nPOST: " in post["prompt"]
        assert "{" not in post["prompt"] + post["completion"]


def test_demonstrations_come_in_all_lengths_and_repeat_facts_of_the_post():
    rows = samples.demonstrated_posts(200, 2, 0)
    counts = {sum(text.count(end) for end in ".?") for row in rows for text in row["demonstrations"]}
    assert counts == {1, 2, 3, 4, 5}
    facts = [*samples.PROBLEMS, *samples.ATTEMPTS, *samples.OUTCOMES, *samples.QUESTIONS, *samples.FEELINGS]
    for row in rows:
        for text in row["demonstrations"]:
            assert all(fact in row["prompt"] for fact in facts if fact in text)


def test_demonstrated_abstracts_are_train_tasks_and_keep_to_their_facts():
    rows = samples.demonstrated_abstracts(200, 2, 0)
    lists = samples.METHODS, samples.OBSTACLES, samples.FIELDS, samples.FINDINGS, samples.CHECKS
    for row in rows:
        assert set(row) == {"article_id", "abstract_text", "demonstrations"}
        assert samples._split_of(*map(list.index, lists, abstract_composition(row["abstract_text"]))) == "train"
        for text in row["demonstrations"]:
            assert 7 <= text.count(".") <= 14 and "{" not in text
            assert all(fact in row["abstract_text"] for facts in lists for fact in facts if fact in text)


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


def test_two_thirds_call_the_helper_and_conventions_differ():
    tasks = samples.coding_tasks("train", 1000, 0)
    assert 0.6 < sum("aux(" in t["main"] for t in tasks) / 1000 < 0.7
    assert all("def aux" not in t["main"] and t["helper"].count("def ") == 1 for t in tasks)
    assert {t["helper"].split("\n")[0] for t in tasks} == {"def aux(x):", "def aux(numbers):"}
    assert any("if aux(x)" in t["main"] for t in tasks) and any("[aux(x)" in t["main"] for t in tasks)


def test_unknown_split():
    with pytest.raises(ValueError, match="split"):
        samples.posts("dev", 1, 0)
    with pytest.raises(ValueError, match="split"):
        samples.coding_tasks("dev", 1, 0)
    with pytest.raises(ValueError, match="split"):
        samples.abstracts("dev", 1, 0)


@pytest.mark.parametrize("name", ["humaneval", "classeval"])
def test_equal_answers_of_a_batch_are_run_once(name, monkeypatch):
    env, run_tests, jobs = make(name, num_agents=1), rewards.coding.run_tests, []

    def counted(batch, *args):
        jobs.extend(batch)
        return run_tests(batch, *args)

    monkeypatch.setattr(rewards.coding, "run_tests", counted)
    monkeypatch.setattr(rewards.classeval, "run_tests", counted)
    one, two = env.tasks("train")[:2]
    right = next(d["completion"] for d in env.demonstrations() if d["prompt"] == env.observe(one, [])[0])
    branches = [(one, [], [right]), (two, [], [right]), (one, [], [right]), (one, [], ["nothing"]), (one, [], [right])]
    steps = env.step(branches)
    assert len(jobs) == 3
    assert [step.reward for step in steps] == [env.step([branch])[0].reward for branch in branches]
    assert steps[0].reward > max(steps[1].reward, steps[3].reward)
