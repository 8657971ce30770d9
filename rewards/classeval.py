"""The reward for a class that several agents write together, each some of its methods.

After MAGRPO's ClassEval experiment (Liu et al., 2025), -1 to 6. Each agent's own methods are put into the given
skeleton of the class; an answer that is not Python, or a class that does not compile, is worth 0.

Unlike in the published code, a stub (pass, a bare return, raise NotImplementedError) does not count as a written
method, and the class cannot reach the tests; see docs/sandbox.md.
"""

from dataclasses import dataclass

from rewards.coding import TESTED, equal_ones_once, make_score
from rewards.sandbox import Job, run_tests

PARTS = {  # as in rewards/coding.py; shares are those of the methods that are to be written
    "written": (2, "share of the methods that their agent wrote"),
    "tests": (4, "share of the tests that pass"),
    "doubled": (-1, "share of the methods that several agents wrote"),
    "compiles": (0, "the class compiles"),
    "balance": (0, "with deal choose: the smallest number of methods that an agent has, divided by the largest"),
    "repaired": (0, "after turns that failed, this one passes all tests"),
    **TESTED,
}


@dataclass
class ClassAnswer:
    """A joint answer and its tests; base, tests, setup and examples are trusted source."""

    texts: list[str]  # one completion per agent; fences are accepted
    assigned: list[list[str]]  # by agent: names of the methods that it is to write
    class_name: str
    base: str  # the module with the skeleton of the class
    tests: str  # classes of unittest; every test method counts
    names: list[str]  # the module's functions and classes that the tests use
    setup: str = ""  # what the tests need, such as imports
    examples: list[str] | tuple = ()  # sources that end in an assert, which may be shown to the agents


@equal_ones_once
def class_rewards(answers, timeout=10.0, allow_unsafe_code=False):
    """Scores the answers in parallel: list of Score, in order; arguments as in `coding_rewards`."""
    results = run_tests(map(_make_job, answers), timeout, allow_unsafe_code)
    return list(map(_score, answers, results))


def _make_job(answer):
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
    compiles = float(facts["syntax"])
    shares = {
        "written": compiles * sum(map(sum, facts["written"])) / total,
        "tests": compiles * result.passed / result.total,
        "doubled": compiles * len(facts["doubled"]) / total,
    }
    return make_score(PARTS, shares, {"compiles": compiles}, facts, answer.examples, result)
