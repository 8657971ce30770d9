"""The reward for a program that several agents write together: helpers, and a function that may call them.

After MAGRPO (Liu et al., 2025), 0 to 4, and 0 to 2.1 for one agent. In the published code, regular expressions take
the functions out of the texts, and a comment that says "aux(" counts as a call; here the tests decide.

    level                                                                    value
    each helper is defined and returns something                             0.4, shared among them
    the asked function is defined and returns something                      0.6, or else nothing more
    the joint program compiles                                               0.5, or else nothing more
    tests passed                                                             0 to 1
    if at least one test passed, and all helpers are defined:
      the asked function's text names a helper, and fewer pass with stubs    0.5, shared among the helpers
      ... and fewer pass with a helper in place of the asked function        1.0
      it only calls a helper and drops the result, and as many pass         -0.5, shared among the helpers

The last three are ours: in the published formula, a call whose result is thrown away still earns 1.0. What the helpers
are worth is what the tests lose with the best kind of stubs in their place. So a call that changes no test earns
nothing, however it looks; but a program that fails on purpose when it meets a stub goes undetected.
"""

import functools
from typing import NamedTuple

from rewards.programs import SCHEMES
from rewards.sandbox import Job, run_tests

HELPER, MAIN, SYNTAX, TESTS, USES, NO_WRAPPER, IGNORED = 0.4, 0.6, 0.5, 1.0, 0.5, 1.0, -0.5

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


class Answer(NamedTuple):
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

    Diagnostics in `parts` that are not in the reward: `all_passed` (0 or 1), `passed_share`, and `useful_helper`, the
    share of tests that pass with the helpers less the share that pass with stubs: negative if the helpers do harm;
    and with helpers, 0 or 1 for each of SCHEMES in rewards/programs.py, of which a program may show several or none.
    """
    run = functools.partial(run_tests, timeout=timeout, allow_unsafe_code=allow_unsafe_code)
    results = run([_job(answer) for answer in answers])
    # Without a call, or without a passed test, stubs cannot make the result worse.
    calling = [i for i, result in enumerate(results) if result.passed and any(result.facts["called"])]
    stubbed = iter(run([_job(answers[i], stub=stub) for i in calling for stub in STUBS]))
    without = {i: max(_share(next(stubbed)) for _ in STUBS) for i in calling}  # the share that passes with stubs
    pairs = []  # (i, helper): the tests need helpers, and this one is called
    for i in calling:
        if without[i] < _share(results[i]):
            called = zip(answers[i].helpers, results[i].facts["called"])
            pairs += [(i, helper) for helper, is_called in called if is_called]
    alone = run([_job(answers[i], alone=helper) for i, helper in pairs])
    wrappers = {i for (i, _), result in zip(pairs, alone) if _share(result) >= _share(results[i])}
    return [_score(answer, results[i], without.get(i), i in wrappers) for i, answer in enumerate(answers)]


def _job(answer, **instead):
    options = {"helpers": answer.helpers, "entry_point": answer.entry_point, "prelude": answer.prelude, **instead}
    # with the examples each time: by the number of its calls, a program could tell whether a stub is in place
    return Job(answer.texts, answer.tests, answer.names, "prepare", options, answer.examples, answer.setup)


def _share(result):
    return result.passed / result.total  # 0 for what does not compile


def _score(answer, result, without, wrapper):
    """without: the share of tests that pass with stubs; None if these were not tried."""
    count = len(answer.helpers)
    facts = {
        "defined": [False] * len(answer.texts),
        "syntax": False,
        "called": [False] * count,
        "ignored": [False] * count,
        "schemes": dict.fromkeys(SCHEMES, 0.0),
        "errors": [""] * len(answer.texts),
        "error": result.reason,
        **result.facts,  # empty if reading the text killed the process
    }
    *helpers_defined, main_defined = facts["defined"]
    share = _share(result)
    useful = without is not None and without < share
    # A helper whose result is dropped did something only if no other helper can have made the difference.
    kept = [called and not ignored for called, ignored in zip(facts["called"], facts["ignored"])]
    # where no test passed, no stub was tried: then a call is taken for a use
    facts["uses"] = [(useful or without is None) and use for use in (kept if any(kept) else facts["called"])]
    facts["ignored"] = [ignored and not useful for ignored in facts["ignored"]]
    facts["wrapper"] = wrapper
    levels = {"helper_defined": HELPER * sum(helpers_defined) / count} if count else {}
    levels |= {"main_defined": MAIN * main_defined, "syntax": SYNTAX * facts["syntax"], "tests": TESTS * share}
    diagnostics = {}
    if count:
        paid = result.passed > 0 and all(helpers_defined)
        levels["uses_helper"] = paid * USES * sum(facts["uses"]) / count
        levels["no_wrapper"] = paid * NO_WRAPPER * (useful and not wrapper)
        levels["ignored"] = 0 + paid * IGNORED * sum(facts["ignored"]) / count  # never -0.0
        diagnostics["useful_helper"] = 0.0 if without is None else share - without
        diagnostics |= facts["schemes"]
    return make_score(levels, diagnostics, facts, answer.examples, result)


def make_score(levels, diagnostics, facts, examples, result):
    """The Score with these levels, and what both coding rewards report about the tests."""
    diagnostics = {"all_passed": float(not result.reason), "passed_share": _share(result), **diagnostics}
    findings = {
        **facts,
        "passed": result.passed,
        "total": result.total,
        "passing": [*result.passing],
        "reason": result.reason,
        "examples": [(source, what) for source, what in zip(examples, result.examples) if what],
    }
    return Score(sum(levels.values()), {**levels, **diagnostics}, findings)
