"""The reward for a class that several agents write together, each some of its methods.

After MAGRPO's ClassEval experiment (Liu et al., 2025), -1 to 6. Each agent's own methods are put into the given
skeleton of the class; an answer that is not Python, or a class that does not compile, is worth 0.

    level                                                                    value
    methods that their agent wrote / all methods to be written               0 to 2
    tests passed / tests                                                     0 to 4
    methods that more than one agent wrote / all methods to be written      -1 to 0

Unlike in the published code, a stub (pass, a bare return, raise NotImplementedError) does not count as a written
method, and the class cannot reach the tests; see docs/sandbox.md.
"""

from typing import NamedTuple

from rewards.coding import equal_ones_once, make_score
from rewards.sandbox import Job, run_tests

WRITTEN, TESTS, DOUBLED = 2.0, 4.0, -1.0


class ClassAnswer(NamedTuple):
    """A joint answer and its tests; base, tests, setup and examples are trusted source."""

    texts: list[str]  # one completion per agent; fences are accepted
    assigned: list[list[str]]  # by agent: names of the methods that it is to write
    class_name: str
    base: str  # the module with the skeleton of the class
    tests: str  # classes of unittest; every test method counts
    names: list[str]  # the module's functions and classes that the tests use
    setup: str = ""  # what the tests need, such as imports
    examples: list[str] | tuple = ()  # sources that end in an assert, which may be shown to the agents


def run_classes(answers, timeout=10.0, allow_unsafe_code=False):
    """Runs the tests of each answer: list of Result. See rewards/sandbox.py for Result, arguments and errors."""
    return run_tests([_job(answer) for answer in answers], timeout, allow_unsafe_code)


@equal_ones_once
def class_rewards(answers, timeout=10.0, allow_unsafe_code=False):
    """Scores the answers in parallel: list of Score, in order; arguments as in `run_classes`.

    Diagnostics in `parts` that are not in the reward: `compiles`, `all_passed` (0 or 1) and `passed_share`.
    """
    results = run_classes(answers, timeout, allow_unsafe_code)
    return [_score(answer, result) for answer, result in zip(answers, results)]


def _job(answer):
    options = {"assigned": answer.assigned, "class_name": answer.class_name, "base": answer.base}
    return Job(
        texts=answer.texts,
        tests=answer.tests,
        names=answer.names,
        prepare="prepare_class",
        options=options,
        examples=answer.examples,
        setup=answer.setup,
        folder=True,
    )


def _score(answer, result):
    facts = {"written": [[False] * len(names) for names in answer.assigned], "doubled": [], "syntax": False}
    facts |= {"errors": [""] * len(answer.texts), "error": result.reason}
    facts |= result.facts  # empty if reading the text killed the process
    total = sum(map(len, answer.assigned))
    levels = dict.fromkeys(("written", "tests", "doubled"), 0.0)
    if facts["syntax"]:
        levels["written"] = WRITTEN * sum(map(sum, facts["written"])) / total
        levels["tests"] = TESTS * result.passed / result.total
        levels["doubled"] = 0 + DOUBLED * len(facts["doubled"]) / total  # never -0.0
    return make_score(levels, {"compiles": float(facts["syntax"])}, facts, answer.examples, result)
