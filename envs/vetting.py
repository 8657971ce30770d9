"""Which tasks of a data set can be trained on: a reference solution passes the tests, and trivial answers do not."""

import ast
import doctest
import hashlib
import json
import os
import tempfile
from contextlib import suppress
from itertools import product

from envs import one_of
from envs.data import parse_rows
from rewards.sandbox import Job, require_protection, run_tests

# What the trivial answers return: a constant, or their first argument. An object equal to everything is none of them:
# the sandbox lets no object of an answer's be equal to another.
TRIVIAL = ["None", "True", "False", "0", "1", "''", "[]", "{}", "[*arguments, None][0]"]
# Runs in a grader, together with the tests: the trivial answers are ours, so they need no process of their own.
TRIAL = """
import unittest

def passes(returned, number):
    space = {"__name__": "tests"}
    trivial = f"{BOUND} = lambda *arguments, **named: {returned}"
    try:
        for source in (BASE, trivial, TESTS[number]):
            exec(source, space)
    except BaseException:
        return False
    cases = [c for c in space.values() if isinstance(c, type) and issubclass(c, unittest.TestCase)]
    suite = unittest.TestSuite(map(unittest.defaultTestLoader.loadTestsFromTestCase, cases))
    suite.run(outcome := unittest.TestResult())
    return outcome.wasSuccessful()
"""
RULES = 3  # counts the changes of how tasks are vetted


def read_limits(timeout, allow_unsafe_code, runs_code=True):
    """(processor seconds, whether code may run unprotected) from two options, which may be strings.

    Raises ValueError if code runs, and neither is it allowed nor does the system offer protection.
    """
    word = str(allow_unsafe_code).lower()  # YAML makes True of yes
    one_of("allow_unsafe_code", word, "yes", "no", "true", "false")
    allowed = word in ("yes", "true")
    if runs_code:
        require_protection(allowed)
    return float(timeout), allowed


def vet(rows, parse, answer, score, limits):
    """For each row its task, or why it cannot be used: its reference and trivial answers are run once.

    parse: (row) -> task, with tests, setup, examples and reference, the completion of a single agent, or None. What it
        may have besides, with what stands for it otherwise: asserts (the tests one by one; all as one), trivial (what
        trivial answers return; TRIVIAL), base (source before these; setup), bound (what is bound to them;
        entry_point), others (what else `answer` takes; [])
    answer: (task, completions, others) -> what `score` takes a list of
    score: (answers, *limits) -> list of Score

    Left out: a row that does not parse, whose reference fails, or whose tests a trivial answer passes. Of several
    asserts one is to be shown and not scored: the first without which no trivial answer passes. What `trivial` holds
    beyond TRIVIAL, such as the constants of the asserts, is only a preference.
    """
    results = parse_rows(rows, parse)
    parsed = [place for place, result in enumerate(results) if isinstance(result, dict)]
    tasks = [results[place] for place in parsed]
    key = ["references and trivial answers", RULES, limits, tasks]
    verdicts = load_or_find(key, lambda: _find_verdicts(tasks, answer, score, limits))
    for place, task, (fault, examples, shown) in zip(parsed, tasks, verdicts):
        results[place] = fault or show_assert(task | {"examples": examples}, shown)
    return results


def show_assert(task, shown=0):
    """A task with several asserts, of which one is in the problem and not scored; any other task as it is."""
    if "asserts" not in task or shown is None:
        return task
    source = task["asserts"][shown]
    rest = task["asserts"][:shown] + task["asserts"][shown + 1 :]
    problem = f"{task['problem']}\nExample: {source.strip()}"
    return {**task, "problem": problem, "examples": [source], "tests": "\n".join(rest)}


def _find_verdicts(tasks, answer, score, limits):
    """For each task: why it cannot be used or "", its examples that hold, the number of the assert to show or None."""
    tasks = [_add_defaults(task) for task in tasks]
    solved = [task for task in tasks if task["reference"] is not None]
    scores = iter(score([answer(task, [task["reference"]], task["others"]) for task in solved], *limits))
    trials = run_tests(map(_make_trial, tasks), *limits)
    verdicts = []
    for task, trial in zip(tasks, trials):
        passed = {case for case, failure in zip(_list_cases(task), trial.examples) if not failure}
        shown, returned = _choose_shown(task, passed)
        findings = {"reason": "", "examples": []}
        if task["reference"] is not None:
            findings = next(scores).findings
        fault = ""
        if findings["reason"]:
            fault = f"its reference solution fails in the grader: {findings['reason'].splitlines()[0]}"
        elif returned:
            fault = f"an answer that returns {returned} passes its tests"
        elif trial.reason:
            fault = f"its tests fail on trivial answers by an error of their own: {trial.reason}"
        failing = [source for source, _ in findings["examples"]]
        verdicts.append([fault, [source for source in task["examples"] if source not in failing], shown])
    return verdicts


def _add_defaults(task):
    defaults = {"asserts": [task["tests"]], "trivial": TRIVIAL, "base": task["setup"], "others": []}
    return {**defaults, "bound": task.get("entry_point"), **task}


def _list_cases(task):
    """All pairs (what a trivial answer returns, number of an assert)."""
    return list(product(task["trivial"], range(len(task["asserts"]))))


def _make_trial(task):
    """The job whose examples are: this trivial answer passes this assert."""
    setup = f"BASE, BOUND, TESTS = {task['base']!r}, {task['bound']!r}, {task['asserts']!r}\n{TRIAL}"
    examples = [f"assert passes{case}" for case in _list_cases(task)]
    return Job([""], "assert passes", [], examples=examples, setup=setup, folder=True)


def _choose_shown(task, passed):
    """(the first assert without which no trivial answer passes; what one returns that passes whatever is shown).

    passed: the cases in which a trivial answer passes an assert
    """
    numbers = range(len(task["asserts"]))
    for values in task["trivial"], task["trivial"][: len(TRIVIAL)]:  # rather also without further constants
        for shown in numbers if len(numbers) > 1 else [None]:
            scored = [number for number in numbers if number != shown]
            passing = [value for value in values if passed.issuperset(product([value], scored))]
            if not passing:
                return shown, ""
    return None, passing[0]


def load_or_find(key, find):
    """find(), or what it returned when it was first called with this key on this machine.

    key: list, from the words for what is run to the tasks

    So a run and its resume, and the processes of a run, have the same tasks, also where a reference is out of time
    now and then. Where nothing can be written, find() is called each time.
    """
    cache = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "tutti")
    path = os.path.join(cache, f"verdicts-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:20]}.json")
    count = len(key[-1])
    verdicts = _read_verdicts(path, count)
    if verdicts is not None:
        return verdicts
    print(f"tries the {key[0]} of {count} tasks; the verdicts are kept in {path}")
    verdicts = find()
    with suppress(OSError):  # nothing can be written, or another process was first
        os.makedirs(cache, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=cache) as file:
            json.dump(verdicts, file)
            file.flush()
            os.link(file.name, path)  # whole or not at all
    return _read_verdicts(path, count) or verdicts


def _read_verdicts(path, count):
    """The verdicts in a file, or None if there is none, or a broken one, which is removed."""
    with suppress(OSError, ValueError, TypeError):
        with open(path) as file:
            verdicts = json.load(file)
        if len(verdicts) == count:
            return verdicts
    with suppress(OSError):
        os.remove(path)
    return None


def read_examples(docstring, after_all=False):
    """The >>> examples of a docstring that show a value, as asserts; [] if doctest cannot parse the docstring.

    Each assert comes after the earlier examples that show no value, such as `x = [1, 2]`; with `after_all`, after all
    earlier examples. Examples whose output is not a Python value, such as a traceback or prose, are left out.
    """
    asserts = []
    before = []
    try:
        examples = doctest.DocTestParser().get_examples(docstring)
    except ValueError:  # a line with no blank after >>>, or with another indentation
        return []
    for example in examples:
        source = example.source.strip()
        want = example.want.strip()
        try:
            if want:
                asserts.append("\n".join([*before, f"assert {_write_equation(source, want)}"]))
            if ast.parse(source).body and (after_all or not want):
                before.append(source)
        except (SyntaxError, ValueError):
            continue
    return asserts


def _write_equation(source, want):
    """The comparison of an expression with a value, both without a trailing comment, which would hide the rest."""
    ast.literal_eval(want)  # raises for what is no value
    expression = ast.parse(source, mode="eval").body
    left = ast.get_source_segment(source, expression)
    if not isinstance(expression, ast.Call):
        left = f"({left})"
    right = ast.get_source_segment(want, ast.parse(want, mode="eval").body)
    return f"{left} == {right}"
