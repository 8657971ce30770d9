"""The reward for a program with a bug, rewritten: which of its tests pass now and which passed before. Ours, 0 to 2.

    level                                                                            value
    defined: the asked function is defined and returns something                     0.1
    parses: the answer compiles                                                      0.1
    fixed: of the tests that failed before, the share that passes now, less that
        of the tests that passed before and fail now; not below 0                    0 to 1
    kept: no test that passed before fails now                                       0.3 times the share that was fixed
    complete: all tests pass                                                         0.5

The program with the bug, as it is or with more beside it, earns nothing, and what behaves as it does earns the first
two levels. A share of all tests would pay for doing nothing: HumanEvalFix's programs pass 39% of theirs. Why the
losses count in `fixed`: where one test failed, `return []` may pass it and no other. Why `kept` depends on what was
fixed: where no test passed before, none can be lost. As in the coding reward, examples of a prompt may be scored too.
"""

from typing import NamedTuple

from rewards.coding import Answer, equal_ones_once, make_score
from rewards.sandbox import Job, run_tests

DEFINED, PARSES, FIXED, KEPT, COMPLETE = 0.1, 0.1, 1.0, 0.3, 0.5


class Repair(NamedTuple):
    """An answer, and what it is compared with."""

    answer: Answer  # of one agent
    program: str  # trusted source with the bug
    passing: list[int]  # the numbers of the tests that this passes
    failing: list[int]  # and of those that it fails, at least one


@equal_ones_once
def bugfix_rewards(repairs, timeout=10.0, allow_unsafe_code=False):
    """Scores the repairs in parallel: list of Score, in order; arguments as in `coding_rewards`.

    Diagnostics in `parts` that are not in the reward: `all_passed` (0 or 1), `passed_share` (of all tests),
    `regressed` (the share of the tests that passed before and fail now), `unchanged` (0 or 1), and `edit_distance`
    (lines of what the program binds that are not its own).
    """
    results = run_tests(map(_job, repairs), timeout, allow_unsafe_code)
    return list(map(_score, repairs, results))


def _job(repair):
    answer = repair.answer
    options = {"entry_point": answer.entry_point, "prelude": answer.prelude, "program": repair.program}
    return Job(answer.texts, answer.tests, answer.names, "prepare_repair", options, setup=answer.setup)


def _score(repair, result):
    # the facts are empty if reading the text killed the process
    facts = {"defined": [False], "syntax": False, "edits": 0, "error": result.reason} | result.facts
    fixed = sum(number in result.passing for number in repair.failing) / len(repair.failing)
    lost = sum(number not in result.passing for number in repair.passing) / max(1, len(repair.passing))
    # what was added to it may be what it lacked
    unchanged = facts["syntax"] and not facts["edits"] and not fixed
    levels = {
        "defined": DEFINED * facts["defined"][0],
        "parses": PARSES * facts["syntax"],
        "fixed": FIXED * max(0.0, fixed - lost),
        "kept": KEPT * fixed * (lost == 0),
        "complete": COMPLETE * (not result.reason),
    }
    if unchanged:
        levels = dict.fromkeys(levels, 0.0)
    diagnostics = {"regressed": lost, "unchanged": float(unchanged), "edit_distance": float(facts["edits"])}
    return make_score(levels, diagnostics, facts, [], result)
