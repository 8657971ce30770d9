"""Parallel function calls: what a joint answer earns, and attacks on that."""

import json

import datasets
import pytest

import envs
from envs.bfcl import gold_call, written
from rewards.bfcl import is_accepted, parallel_reward

GOLD = [{"set": {"lamp": [k], "level": [10 * k]}} for k in (1, 2, 3, 4)]
A, B, C, D = (written(gold_call(call)) for call in GOLD)
WRONG, HALF = (written({"name": "set", "arguments": {"lamp": lamp, "level": 9}}) for lamp in (8, 1))


@pytest.mark.parametrize(
    "messages, parts",
    [
        ([A + B, C + D], (0.5, 0.3, 0.2)),
        ([A + B + C, D], (0.5, 0.3, 0.1)),
        ([A + B + C + D, ""], (0.5, 0.3, 0)),  # one agent does all
        ([A + B + C + D] * 2, (0.25, 0, 0)),  # both write the same
        ([A, A], (0.125, 0, 0.05)),
        ([WRONG * 2, WRONG * 2], (0, 0, 0)),  # right name, wrong arguments, divided evenly
        ([HALF, ""], (0.0625, 0, 0)),
        ([A + B + WRONG, C + D], (0.4, 0, 0.16)),  # a call too many
        ([A + B, C + D[:-9]], (0.375, 0, 0.15)),  # cut off
        ([A + B, f"<think>{C}</think>{D}"], (0.375, 0, 0.15)),
        ([A + B + C + D], (0.5, 0.3, 0.2)),  # alone
    ],
)
def test_what_a_joint_answer_earns(messages, parts):
    """Fails if names, an even division of wrong calls, or what is written twice is paid, or one agent earns it all."""
    reward, levels = parallel_reward(messages, GOLD)
    assert [levels[name] for name in ("arguments", "exact", "division")] == pytest.approx(parts)
    assert reward == pytest.approx(sum(parts))
    assert levels["all_passed"] == (parts[1] > 0)


def test_calls_are_matched_for_the_greatest_sum():
    """Fails if a call takes the gold call of another, whichever comes first, or two gold calls are one."""
    gold = [{"f": {"x": ["a", "b"]}}, {"f": {"x": ["a"]}}]
    a, b = (written({"name": "f", "arguments": {"x": text}}) for text in "ab")
    for messages in [a, b], [b, a]:
        assert parallel_reward(messages, gold)[0] == parallel_reward(messages, gold[::-1])[0] == 1
    assert parallel_reward([A, A], [GOLD[0]] * 2)[0] == 1
    assert parallel_reward([A, B], [GOLD[0]] * 2)[0] < 0.5


@pytest.mark.parametrize(
    "value, gold, same",
    [
        (5.0, 5, True),
        ("new york,ny", "New York, NY", True),
        ([1, 2.0], [1, 2], True),
        ({"a": "B"}, {"a": ["b", "c"], "b": ["", 1]}, True),
        ("5", 5, False),
        (True, 1, False),
        ("ab", "a", False),
        ([1], [1, 2], False),
        ("", "x", False),
        ({"a": "B", "c": 1}, {"a": ["b", "c"]}, False),
        ({}, {"a": ["b"]}, False),
    ],
)
def test_values(value, gold, same):
    """Fails if a string is taken for a number, True for 1, or a spelling that BFCL accepts is refused."""
    assert is_accepted(value, ["", gold]) == same


def test_an_optional_argument_may_be_left_out_and_not_be_wrong():
    """Fails if a call without an argument for which gold lists "" costs marks, or a wrong one does not."""
    gold = [{"f": {"x": [1], "unit": ["km", ""], "year": [""]}}]
    assert gold_call(gold[0])["arguments"] == {"x": 1, "unit": "km"}
    for arguments, levels in (
        ({"x": 1}, (0.5, 0.3)),
        ({"x": 1, "unit": "km"}, (0.5, 0.3)),
        ({"x": 1, "unit": "mi"}, (0.25, 0)),
        ({"unit": "km"}, (0.25, 0)),
    ):
        _, parts = parallel_reward([written({"name": "f", "arguments": arguments})], gold)
        assert (parts["arguments"], parts["exact"]) == pytest.approx(levels), arguments


@pytest.mark.parametrize("roles", ["self_select", "split_by_order"])
def test_samples(roles):
    """Fails if a task refuses its own gold answer, roles cannot be told apart, or agents start out perfect."""
    for agents in 1, 2, 3:
        env = envs.make("bfcl", agents, roles=roles)
        train, test = ({task["user_prompt"] for task in env.tasks(split)} for split in ("train", "test"))
        assert not train & test
        assert len(set(env.observe(env.tasks("train")[0], []))) == agents
        completions = [pair["completion"] for pair in env.demonstrations()]
        answers = [completions[k : k + agents] for k in range(0, len(completions), agents)]
        rewards = [step.reward for step in env.step(list(zip(env.tasks("train"), [[]] * len(answers), answers)))]
        assert 0.3 < sum(rewards) / len(rewards) < 0.8
        assert max(rewards) == 1


def test_rows(tmp_path):
    """Fails if columns that hold objects are refused or mixed up, or a row without calls ends the run."""
    row = {"user_prompt": "Set them.", "function": [{"name": "set"}], "ground_truth": GOLD}
    last = row | {"ground_truth": [{"get": {"x": [1], "year": [""]}}]}
    bad = [row | {"ground_truth": gold} for gold in ([], [{}], [{"f": 1}], [{"f": {"x": []}}], GOLD * 3)]
    # in a table each call has the names of all rows
    datasets.Dataset.from_list([row, last]).to_parquet(str(tmp_path / "a.parquet"))
    strings = row | {key: json.dumps(row[key]) for key in ("function", "ground_truth")}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in [*bad, strings, last]))
    for name in "a.parquet", "a.jsonl":
        env = envs.make("bfcl", dataset=str(tmp_path / name))
        golds = [task["gold"] for split in ("train", "test") for task in env.tasks(split)]
        assert golds == [GOLD, last["ground_truth"]]
