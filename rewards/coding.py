"""The reward for a program that several agents write together: helpers, and a function that may call them.

After MAGRPO (Liu et al., 2025), 0 to 4, and 0 to 2.1 for one agent. In the published code, regular expressions take
the functions out of the texts, and a comment that says "aux(" counts as a call; here syntax trees decide.

    level                                                                    value
    each helper is defined and returns something                             0.4, shared among them
    the asked function is defined and returns something                      0.6, or else nothing more
    the joint program compiles                                               0.5, or else nothing more
    tests passed, by assert                                                  0 to 1
    if at least one assert passed, and all helpers are defined:
      the asked function calls a helper, and fewer tests pass with stubs     0.5, shared among the helpers
      ... and fewer pass with a helper in place of the asked function        1.0
      it calls a helper and drops all that comes of it                      -0.5, shared among the helpers

The last three are ours: in the published formula, a call whose result is thrown away still earns 1.0. Calls are found
in the syntax tree, so calls by eval() or globals() do not count. To see what a call is worth, the tests run again with
stubs for the helpers, one kind whose values act as nothing, one that returns its argument, and then with a helper in
place of the asked function. A call that makes no difference and is not dropped, as in `0 if True else aux(x)`, neither
earns nor costs. Only a def defines a function: not a lambda, nor another name for a function.
"""

import functools
import inspect
from typing import NamedTuple

from rewards import coding_syntax
from rewards.sandbox import Job, run_tests

HELPER, MAIN, SYNTAX, TESTS, USES, NO_WRAPPER, IGNORED = 0.4, 0.6, 0.5, 1.0, 0.5, 1.0, -0.5


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
    share of tests that pass with the helpers less the share that pass with stubs in their place (the better of the two
    kinds of stubs): negative if the helper does harm.
    """
    results = run_tests([_job(answer) for answer in answers], timeout, allow_unsafe_code)
    # Without a call, or without a passed test, stubs cannot make the result worse.
    asked = [i for i, r in enumerate(results) if r.passed and any(r.facts["uses"] + r.facts["ignored"])]

    def again(changes):
        """Runs answers again, given (answer number, replacement of a function): (answer number, result)."""
        # With a stub, a loop that the helper ends may run forever; an answer this much slower needs its helper.
        times = [min(timeout, 1 + 5 * results[i].seconds) for i, _ in changes]
        found = run_tests([_job(answers[i], **instead) for i, instead in changes], times, allow_unsafe_code)
        return [(i, result) for (i, _), result in zip(changes, found)]

    without = {}  # answer number -> the better of its results with stubs for all helpers
    for i, result in again([(i, {"stub": stub}) for i in asked for stub in coding_syntax.STUBS]):
        without[i] = max(without.get(i, result), result, key=_share)
    for i in asked:
        facts, real = results[i].facts, _share(without[i]) < _share(results[i])
        uses, dropped = facts["uses"], facts["ignored"]
        facts["called"] = uses  # by its syntax tree, whatever it is worth
        # If only dropped calls can have made the difference, the helper has changed its argument.
        facts["uses"] = [real and (use or (drop and not any(uses))) for use, drop in zip(uses, dropped)]
        facts["ignored"] = [drop and not real for drop in dropped]
    used = [(i, helper) for i in asked for helper, use in zip(answers[i].helpers, results[i].facts["uses"]) if use]
    for i, result in again([(i, {"alone": helper}) for i, helper in used]):
        if _share(result) >= _share(results[i]):
            results[i].facts["wrapper"] = True
    return [_score(answer, result, without.get(i)) for i, (answer, result) in enumerate(zip(answers, results))]


@functools.cache
def _prepare():
    return inspect.getsource(coding_syntax)


def _job(answer, **instead):
    options = {"helpers": answer.helpers, "entry_point": answer.entry_point, "prelude": answer.prelude, **instead}
    # with the examples each time: by the number of its calls, a program could tell whether a stub is in place
    return Job(answer.texts, answer.tests, answer.names, _prepare(), options, answer.examples, answer.setup)


def _share(result):
    return result.passed / result.total  # 0 for what does not compile


def _score(answer, result, without):
    facts = {"defined": [False] * len(answer.texts), "syntax": False, "uses": [], "ignored": [], "wrapper": False}
    facts |= {"errors": [""] * len(answer.texts), "error": result.reason, "called": [False] * len(answer.helpers)}
    facts |= result.facts  # empty if reading the text killed the process
    *helpers_defined, main_defined = facts["defined"]
    share, count = _share(result), len(answer.helpers)
    levels = {"helper_defined": HELPER * sum(helpers_defined) / count} if count else {}
    levels |= {"main_defined": MAIN * main_defined, "syntax": SYNTAX * facts["syntax"], "tests": TESTS * share}
    diagnostics = {}
    if count:
        paid = result.passed > 0 and all(helpers_defined)
        levels["uses_helper"] = paid * USES * sum(facts["uses"]) / count
        levels["no_wrapper"] = paid * NO_WRAPPER * (any(facts["uses"]) and not facts["wrapper"])
        levels["ignored"] = 0 + paid * IGNORED * sum(facts["ignored"]) / count  # never -0.0
        diagnostics["useful_helper"] = share - _share(without) if without else 0.0
    return make_score(levels, diagnostics, facts, answer.examples, result)


def make_score(levels, diagnostics, facts, examples, result):
    """The Score with these levels, and what both coding rewards report about the tests."""
    diagnostics = {"all_passed": float(not result.reason), "passed_share": _share(result), **diagnostics}
    findings = {
        **facts,
        "passed": result.passed,
        "total": result.total,
        "reason": result.reason,
        "examples": [(source, what) for source, what in zip(examples, result.examples) if what],
    }
    return Score(sum(levels.values()), {**levels, **diagnostics}, findings)
