"""The reward for a program that several agents write together: helpers, and a function that may call them.

After MAGRPO (Liu et al., 2025), 0 to 4, and 0 to 2.1 for one agent. In the published code, regular expressions take
the functions out of the texts, and a comment that says "aux(" counts as a call; here the tests decide.

Without the asked function only helpers are paid, and nothing more if the program does not compile. `uses_helper`,
`no_wrapper` and `ignored` count if at least one test passes and all helpers are defined. They are ours: in the
published formula, a call whose result is thrown away still earns 1.0. What the helpers are worth is what the tests
lose with the best kind of stubs in their place. So a call that changes no test earns nothing, however it looks; but a
program that fails on purpose when it meets a stub goes undetected.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

from rewards.programs import prepare
from rewards.sandbox import Job, run_tests

TESTED = {  # of all rewards that run tests
    "all_passed": (0, "all tests pass"),
    "passed_share": (0, "share of the tests that pass"),
}
# Part -> (the most that it pays, or takes if it is below 0; 0 if it is only logged, what it means)
PARTS = {
    "helper_defined": (0.4, "share of the helpers that are defined and return something"),
    "main_defined": (0.6, "the asked function is defined and returns something"),
    "syntax": (0.5, "the joint program compiles"),
    "tests": (1, "share of the tests that pass"),
    "uses_helper": (0.5, "share of the helpers that the function names, if fewer tests pass with dummies for them"),
    "no_wrapper": (1, "the helpers are needed, and fewer tests pass with one of them in place of the function"),
    "ignored": (-0.5, "share of the helpers that the function calls for nothing, dropping the result"),
    "useful_helper": (0, "share of the tests that need the helpers, below 0 if these do harm"),
    "fallback": (0, "a helper is used in a try, or an if tests its kept result"),
    "strategy_filter": (0, "a helper is used in an if or a condition"),
    "coordinator": (0, "a helper is used in a loop, or helpers several times"),
    "decorator": (0, "none of these three, but more is done with a helper's result, as in sorted(aux(x))"),
    "repaired": (0, "after turns that failed, this one passes all tests"),
    **TESTED,
}

# A stub raises after so many calls, since a loop that only the helper would end would otherwise run forever.
STUB = """
_left_NAME = [None] * 100_000
def NAME(*arguments, **keywords):
    _left_NAME.pop()
    return VALUE
"""
# What acts as nothing: empty, false, 0 as a number; adding it or dividing by it changes nothing.
NOTHING = """
class _Nothing(str):
    def itself(self, *_, **keywords): return self
    def other(self, other, *_): return other
    def zero(self, *_): return 0
    def __eq__(self, other): return not other
    def __ne__(self, other): return bool(other)
    __hash__ = __index__ = __int__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = zero
    __call__ = __getattr__ = __getitem__ = __neg__ = __pos__ = __abs__ = __round__ = itself
    __mul__ = __rmul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = itself
    __add__ = __radd__ = __sub__ = __rsub__ = __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = other
    __rtruediv__ = __rfloordiv__ = __rmod__ = __rpow__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = other
"""
STUBS = [
    NOTHING + STUB.replace("VALUE", "_Nothing()"),
    STUB.replace("VALUE", "True"),  # a condition or a factor that changes nothing
    STUB.replace("VALUE", "[*arguments, *keywords.values(), None][0]"),  # hands back what the asked function did
]


@dataclass
class Answer:
    """A joint answer and its tests; tests, setup and prelude are trusted source."""

    texts: list[str]  # one completion per agent: the helpers' in order, then the asked function's; fences are accepted
    helpers: list[str]  # names of the helper functions; may be empty
    entry_point: str  # name of the asked function
    tests: str  # every assert counts
    names: list[str]  # the answer's functions and classes that the tests use
    setup: str = ""  # what the tests need, such as imports and functions that the prompt defines
    prelude: str = ""  # source put before the answer, which may use it
    examples: list[str] | tuple = ()  # asserts that may be shown to the agents


class Score(NamedTuple):
    reward: float
    parts: dict[str, float]  # the levels, which sum to the reward, and diagnostics
    findings: dict  # for feedback: what was found in the answer, and what became of its tests and examples


def equal_ones_once(rewards):
    """Decorator: runs equal answers of a batch only once, since agents that become certain repeat themselves."""

    @functools.wraps(rewards)
    def of_all(answers, *args, **kwargs):
        distinct = {repr(answer): answer for answer in answers}
        scores = dict(zip(distinct, rewards(list(distinct.values()), *args, **kwargs)))
        return [scores[repr(answer)] for answer in answers]

    return of_all


@equal_ones_once
def coding_rewards(answers, timeout=10.0, allow_unsafe_code=False):
    """Scores the answers in parallel: list of Score, in order.

    timeout: seconds for each answer's tests
    allow_unsafe_code: see rewards/sandbox.py, also for what is raised
    """
    run = functools.partial(run_tests, timeout=timeout, allow_unsafe_code=allow_unsafe_code)
    results = run([_make_job(answer) for answer in answers])
    # Without a call, or without a passed test, stubs cannot make the result worse.
    calling = [i for i, result in enumerate(results) if result.passed and any(result.facts["called"])]
    stubbed = iter(run([_make_job(answers[i], stub=stub) for i in calling for stub in STUBS]))
    without = {i: max(_find_share(next(stubbed)) for _ in STUBS) for i in calling}  # the share that passes with stubs
    pairs = []  # (i, helper): the tests need helpers, and this one is called
    for i in calling:
        if without[i] < _find_share(results[i]):
            called = zip(answers[i].helpers, results[i].facts["called"])
            pairs += [(i, helper) for helper, is_called in called if is_called]
    alone = run([_make_job(answers[i], alone=helper) for i, helper in pairs])
    wrappers = {i for (i, _), result in zip(pairs, alone) if _find_share(result) >= _find_share(results[i])}
    return [_score(answer, results[i], without.get(i), i in wrappers) for i, answer in enumerate(answers)]


def _make_job(answer, **instead):
    options = {"helpers": answer.helpers, "entry_point": answer.entry_point, "prelude": answer.prelude, **instead}
    # with the examples each time: by the number of its calls, a program could tell whether a stub is in place
    return Job(answer.texts, answer.tests, answer.names, "prepare", options, answer.examples, answer.setup)


def _find_share(result):
    return result.passed / result.total  # 0 for what does not compile


def _score(answer, result, without, wrapper):
    """without: the share of tests that pass with stubs; None if these were not tried."""
    count = len(answer.helpers)
    facts = find_facts(answer, result)
    *helpers_defined, main_defined = facts["defined"]
    share = _find_share(result)
    useful = without is not None and without < share
    # A helper whose result is dropped did something only if no other helper can have made the difference.
    kept = [called and not ignored for called, ignored in zip(facts["called"], facts["ignored"])]
    # where no test passed, no stub was tried: then a call is taken for a use
    facts["uses"] = [(useful or without is None) and use for use in (kept if any(kept) else facts["called"])]
    facts["ignored"] = [ignored and not useful for ignored in facts["ignored"]]
    facts["wrapper"] = wrapper
    shares = {"helper_defined": sum(helpers_defined) / count} if count else {}
    shares |= {"main_defined": main_defined, "syntax": facts["syntax"], "tests": share}
    diagnostics = {}
    if count:
        paid = result.passed > 0 and all(helpers_defined)
        shares["uses_helper"] = paid * sum(facts["uses"]) / count
        shares["no_wrapper"] = paid and useful and not wrapper
        shares["ignored"] = paid * sum(facts["ignored"]) / count
        diagnostics["useful_helper"] = 0.0 if without is None else share - without
        diagnostics |= facts["schemes"]
    return make_score(PARTS, shares, diagnostics, facts, answer.examples, result)


def remark_on_syntax(agent, findings):
    """Agent number `agent` reads its own syntax error, but only whether another agent made one."""
    if findings["errors"][agent]:
        return [f"Your answer is not Python: {findings['errors'][agent]}."]
    if any(findings["errors"]):
        return ["The answer of another agent is not Python."]
    return [f"The program does not compile: {findings['error']}."] if findings["error"] else []


def find_facts(answer, result):
    """What was found in an answer; if reading it killed the process, the facts of an empty one."""
    _, facts = prepare([""] * len(answer.texts), answer.helpers, answer.entry_point)
    return result.facts or {**facts, "error": result.reason}


def make_score(meanings, shares, diagnostics, facts, examples, result):
    """The Score where each part is paid by its share, 0 to 1, and what all rewards of code report about the tests."""
    levels = {name: 0.0 + meanings[name][0] * share for name, share in shares.items()}  # never -0.0
    diagnostics = {"all_passed": float(not result.reason), "passed_share": _find_share(result), **diagnostics}
    findings = {
        **facts,
        "passed": result.passed,
        "total": result.total,
        "passing": [*result.passing],
        "reason": result.reason,
        "examples": [pair for pair in map(list, zip(examples, result.examples)) if pair[1]],
    }
    return Score(sum(levels.values()), {**levels, **diagnostics}, findings)
