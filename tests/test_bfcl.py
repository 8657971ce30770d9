"""Parallel calls: what a joint answer earns, and attacks on that."""

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
    """Pay for names, for an even division of wrong calls, for what is written twice; one agent that earns it all."""
    reward, found = parallel_reward(messages, GOLD)
    assert [found[name] for name in ("arguments", "exact", "division")] == pytest.approx(parts)
    assert reward == pytest.approx(sum(parts)) and found["all_passed"] == (parts[1] > 0)


def test_calls_are_matched_for_the_greatest_sum():
    """A call that takes the gold call of another, whichever comes first, and two equal gold calls."""
    gold = [{"f": {"x": ["a", "b"]}}, {"f": {"x": ["a"]}}]
    a, b = (written({"name": "f", "arguments": {"x": text}}) for text in "ab")
    assert all(parallel_reward(messages, each)[0] == 1 for messages in ([a, b], [b, a]) for each in (gold, gold[::-1]))
    assert parallel_reward([A, A], [GOLD[0]] * 2)[0] == 1
    assert parallel_reward([A, B], [GOLD[0]] * 2)[0] < 0.5


def test_values():
    """A text for a number, True for 1, another spelling that BFCL accepts, an object within an object."""
    equal = [
        (5.0, 5),
        ("new york,ny", "New York, NY"),
        ([1, 2.0], [1, 2]),
        ({"a": "B"}, {"a": ["b", "c"]}),
    ]
    other = [("5", 5), (True, 1), ("ab", "a"), ([1], [1, 2]), ("", "x")]
    assert all(is_accepted(given, ["", gold]) for given, gold in equal)
    assert not any(is_accepted(given, ["", gold]) for given, gold in other)
    optional = [{"f": {"x": [1], "unit": ["km", ""]}}]
    assert parallel_reward([written({"name": "f", "arguments": {"x": 1}})], optional)[1]["all_passed"] == 0


@pytest.mark.parametrize("roles", ["self_select", "split_by_order"])
def test_samples(roles):
    """A gold answer that its own task refuses, roles that cannot be told apart, agents that start out perfect."""
    for agents in 1, 2, 3:
        env = envs.make("bfcl", agents, roles=roles)
        train, test = env.tasks("train"), env.tasks("test")
        assert not {task["user_prompt"] for task in train} & {task["user_prompt"] for task in test}
        assert len(set(env.observe(train[0], []))) == agents
        pairs = iter(env.demonstrations())
        said = [(task, [], [next(pairs)["completion"] for _ in range(agents)]) for task in train]
        rewards = [step.reward for step in env.step(said)]
        assert 0.3 < sum(rewards) / len(rewards) < 0.8 and max(rewards) == 1


def test_rows(tmp_path):
    """Columns as objects that are refused or mixed up, and a row without calls that ends the run."""
    row = {"user_prompt": "Set them.", "function": [{"name": "set"}], "ground_truth": GOLD}
    texts = {key: value if key == "user_prompt" else json.dumps(value) for key, value in row.items()}
    bad = [row | {"ground_truth": gold} for gold in ([], [{}], [{"f": 1}], [{"f": {"x": [""]}}], GOLD * 3)]
    last = [{"get": {"x": [1]}}]
    # in a table each call has the names of all rows
    datasets.Dataset.from_list([row, row | {"ground_truth": last}]).to_parquet(str(tmp_path / "a.parquet"))
    rows = [*({**texts, **each} for each in bad), texts, texts | {"ground_truth": json.dumps(last)}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    for name in "a.parquet", "a.jsonl":
        env = envs.make("bfcl", dataset=str(tmp_path / name))
        assert [task["gold"] for split in ("train", "test") for task in env.tasks(split)] == [GOLD, last]
