"""Parallel function calls: what a joint answer earns, and attacks on that."""

import json

import datasets
import pytest
from toy import rows_of

import envs
from envs.bfcl import make_gold_call, write_call
from rewards.bfcl import parallel_reward

GOLD = [{"set": {"lamp": [k], "level": [10 * k]}} for k in (1, 2, 3, 4)]
CALLS = {letter: write_call(make_gold_call(call)) for letter, call in zip("ABCD", GOLD)}
CALLS["w"] = CALLS["A"].replace("1", "8")  # the right name, wrong arguments
CALLS["c"] = CALLS["A"].removesuffix("</tool_call>")


# The calls of each agent | arguments, exact, division
ANSWERS = """
AB CD | 0.5 0.3 0.2
ABC D | 0.5 0.3 0.1
ABCD none | 0.5 0.3 0.0
ABCD ABCD | 0.25 0.0 0.0
A A | 0.125 0.0 0.05
ww ww | 0.0 0.0 0.0
ABw CD | 0.4 0.0 0.16
Bc CD | 0.375 0.0 0.15
ABCD | 0.5 0.3 0.2
"""


def test_what_a_joint_answer_earns():
    """Fails if names, an even division of wrong calls, or what is written twice is paid, or one agent earns it all."""
    for words, levels in rows_of(ANSWERS):
        answer = ["".join(CALLS.get(letter, "") for letter in word) for word in words.split()]
        reward, parts = parallel_reward(answer, GOLD)
        found = [parts["arguments"], parts["exact"], parts["division"]]
        assert " ".join(str(round(level, 9)) for level in found) == levels, words
        assert reward == pytest.approx(sum(found))
        assert parts["all_passed"] == (parts["exact"] > 0)


# What gold accepts for the arguments of each call | those of the calls, one an agent | what right arguments earn
ARGUMENTS = """
[{"x": ["a", "b"]}, {"x": ["a"]}] | [{"x": "a"}, {"x": "b"}] | 0.5
[{"x": ["a", "b"]}, {"x": ["a"]}] | [{"x": "b"}, {"x": "a"}] | 0.5
[{"x": [1], "unit": ["km", ""], "year": [""]}] | [{"x": 1}] | 0.5
[{"x": [1], "unit": ["km", ""], "year": [""]}] | [{"x": 1, "unit": "mi"}] | 0.25
[{"x": [1], "unit": ["km", ""], "year": [""]}] | [{"unit": "km"}] | 0.25
[{"x": [5]}] | [{"x": 5.0}] | 0.5
[{"x": ["New York, NY"]}] | [{"x": "new york,ny"}] | 0.5
[{"x": [{"a": ["b", "c"], "b": ["", 1]}]}] | [{"x": {"a": "B"}}] | 0.5
[{"x": [{"a": ["b", "c"], "b": ["", 1]}]}] | [{"x": {"a": "B", "c": 1}}] | 0
[{"x": [5]}] | [{"x": "5"}] | 0
[{"x": [1]}] | [{"x": true}] | 0
[{"x": [[1, 2]]}] | [{"x": [1]}] | 0
[{"x": ["x", ""]}] | [{"x": ""}] | 0
"""


def test_calls_are_matched_for_the_greatest_sum_and_arguments_as_bfcl_does():
    """Fails if a call takes another's gold one, or if a missing optional argument costs marks and a wrong one none.

    Or if a string is taken for a number, True for 1, or a spelling that BFCL accepts is refused.
    """
    for row in rows_of(ARGUMENTS):
        accepted, calls, level = map(json.loads, row)
        gold = [{"f": arguments} for arguments in accepted]
        _, parts = parallel_reward([write_call({"name": "f", "arguments": arguments}) for arguments in calls], gold)
        assert parts["arguments"] == level, row


# The first two have no gold call that an answer can equal
ROWS = """
{"user_prompt": "a", "ground_truth": [], "function": []}
{"user_prompt": "b", "ground_truth": [{"f": {"x": []}}], "function": []}
{"user_prompt": "c", "ground_truth": [{"f": {"x": [1], "y": [""]}}], "function": [{"p": {"x": {"t": 1}}, "name": "f"}]}
{"user_prompt": "d", "ground_truth": [{"g": {"z": [{"u": [2]}]}}], "function": [{"name": "g", "p": {"z": {"t": 2}}}]}
{"user_prompt": "e", "ground_truth": [{"f": {"x": [3]}}, {"g": {}}], "function": [{"name": "f", "p": {}}]}
"""


def test_rows_are_the_same_in_every_form(tmp_path):
    """Fails if the objects of a table have the names of all rows, or another order, or a row without gold is used."""
    rows = list(map(json.loads, ROWS.strip().splitlines()))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text(ROWS)
    table, lines = (envs.make("bfcl", dataset=str(tmp_path / name)).splits for name in ("a.parquet", "a.jsonl"))
    assert table == lines
    assert [task["gold"] for task in lines["train"] + lines["test"]] == [row["ground_truth"] for row in rows[2:]]
