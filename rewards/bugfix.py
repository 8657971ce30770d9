"""The reward for a program with a bug, rewritten: which of its tests pass now and which passed before. Ours, 0 to 2.

The program with the bug, as it is or with more beside it, earns nothing, and what behaves as it does earns `defined`
and `parses`. A share of all tests would pay for doing nothing: HumanEvalFix's programs pass 39% of theirs. Why the
losses count in `fixed`: where one test failed, `return []` may pass it and no other. Why `kept` depends on what was
fixed: where no test passed before, none can be lost. As in the coding reward, examples of a prompt may be scored too.
"""

from typing import NamedTuple

from rewards.coding import TESTED, Answer, equal_ones_once, find_facts, make_score
from rewards.sandbox import Job, run_tests

PARTS = {  # as in rewards/coding.py
    "defined": (0.1, "the function is defined and returns something"),
    "parses": (0.1, "the answer compiles"),
    "fixed": (1, "share of the failing tests that pass now, minus that of the passing ones that fail now"),
    "kept": (0.3, "the share that was fixed, if no passing test fails now"),
    "complete": (0.5, "all tests pass"),
    "regressed": (0, "share of the tests that passed before and fail now"),
    "unchanged": (0, "the answer is the program with the bug, which earns nothing"),
    "edit_distance": (0, "number of lines in which the answer differs from the program"),
    "located": (0, "the last note names the line of the bug or one next to it"),
    **TESTED,
}


class Repair(NamedTuple):
    """An answer, and what it is compared with."""

    answer: Answer  # of one agent
    program: str  # trusted source with the bug
    passing: list[int]  # the numbers of the tests that this passes
    failing: list[int]  # and of those that it fails, at least one


@equal_ones_once
def bugfix_rewards(repairs, timeout=10.0, allow_unsafe_code=False):
    """Scores the repairs in parallel: list of Score, in order; arguments as in `coding_rewards`."""
    results = run_tests(map(_make_job, repairs), timeout, allow_unsafe_code)
    return list(map(_score, repairs, results))


def _make_job(repair):
    answer = repair.answer
    options = {"entry_point": answer.entry_point, "prelude": answer.prelude, "program": repair.program}
    return Job(answer.texts, answer.tests, answer.names, "prepare_repair", options, setup=answer.setup)


def _score(repair, result):
    facts = {"edits": 0} | find_facts(repair.answer, result)
    fixed = sum(number in result.passing for number in repair.failing) / len(repair.failing)
    lost = sum(number not in result.passing for number in repair.passing) / max(1, len(repair.passing))
    # what was added to it may be what it lacked
    unchanged = facts["syntax"] and not facts["edits"] and not fixed
    paid = not unchanged
    shares = {
        "defined": paid and facts["defined"][0],
        "parses": paid and facts["syntax"],
        "fixed": max(0.0, fixed - lost),
        "kept": fixed * (lost == 0),
        "complete": not result.reason,
    }
    diagnostics = {"regressed": lost, "unchanged": float(unchanged), "edit_distance": float(facts["edits"])}
    return make_score(PARTS, shares, diagnostics, facts, [], result)
