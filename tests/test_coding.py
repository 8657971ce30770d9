"""The coding reward and environments: levels, cooperation on the syntax tree, published faults, whole benchmarks."""

import ast
import json
import os
import re
import sys
import textwrap

import pytest

import rewards.coding
from envs import coding, make, samples
from envs.coding import BENCHMARKS, Coding
from rewards import sandbox
from rewards.coding import Answer, coding_rewards

DATA = os.path.join(os.path.dirname(__file__), "..", "..", "shared", "data")
TESTS = """
def check(candidate):
    assert candidate([1, 2, 3]) == 12
    assert candidate([5]) == 10
    assert candidate([]) == 0
    assert candidate([-1]) == -2
check(f)
"""
AUX = "def aux(x):\n    return 2 * x\n"
MAIN = "def f(numbers):\n    return sum(aux(x) for x in numbers)\n"
ALONE = "def f(numbers):\n    return 2 * sum(numbers)\n"


def scores(*answers, tests=TESTS, **options):
    """The Score of each answer, a list of texts: the last is the asked function's, the others are helpers'."""
    several = [["aux"] if len(a) == 2 else [f"aux{i}" for i in range(1, len(a))] for a in answers]
    return coding_rewards([Answer(list(a), h, "f", tests, ["f"], **options) for a, h in zip(answers, several)])


def reward(*texts):
    return scores(texts)[0].reward


def test_levels():
    broken = "def f(numbers):\n    return 2 * sum(numbers\n"
    cases = [
        ([AUX, MAIN], 4.0),
        ([AUX, "no code"], 0.4),
        ([AUX, broken], 0.4),
        (["no code", ALONE], 0.6),
        (["", ""], 0.0),
        ([AUX, "def f(numbers):\n    sum(numbers)\n"], 0.4),  # nothing returned
        (["def aux(x):\n    print(x)\n", ALONE], 0.6 + 0.5 + 1),
        (["def aux(x):\n    return None\n", ALONE], 0.6 + 0.5 + 1),
        (["def aux(x):\n    yield 2 * x\n", MAIN.replace("aux(x)", "next(aux(x))")], 4.0),  # yielding is returning
        (["aux = lambda x: 2 * x\n", MAIN], 0.6 + 0.5 + 1),  # not defined as a function: no bonus
        ([AUX, "def f(numbers):\n    return aux(len(numbers)) * 0 + 7"], 1.5),  # no test passed: no bonus
        ([AUX, ALONE], 2.5),
        ([AUX, "def f(numbers):\n    return aux(numbers[0]) if len(numbers) == 1 else 0"], 1.5 + 0.75 + 1.5),
        ([ALONE], 2.1),
        (["def f(numbers):\n    return 3"], 1.1),
        (["nothing"], 0.0),
    ]
    found = scores(*(texts for texts, _ in cases))
    assert [pytest.approx(score.reward) for score in found] == [value for _, value in cases]
    for (texts, value), score in zip(cases, found):
        levels = ["main_defined", "syntax", "tests"]
        levels += ["helper_defined", "uses_helper", "no_wrapper", "ignored"] if len(texts) > 1 else []
        assert sum(score.parts[level] for level in levels) == pytest.approx(value)
        assert set(score.parts) - set(levels) <= {"all_passed", "passed_share", "useful_helper"}
        assert score.parts["all_passed"] == (score.parts["tests"] == 1)
        assert "-0.0" not in str(score.parts)  # as it would be logged


def test_code_too_deep_to_be_written_again_still_runs():
    """A policy that repeats itself writes `+ 0 + 0 + 0`; Python computes hundreds of these."""
    deep = MAIN.rstrip() + " + 0" * 400 + "\n"
    endless = MAIN.rstrip() + " + 0" * 40_000 + "\n"
    raising = "def f(numbers):\n    raise ValueError(0" + " + 0" * 400 + ")\n"
    found = scores([AUX, deep], [AUX, deep + MAIN], [AUX, endless], [AUX, raising])
    assert [score.reward for score in found] == [4.0, 4.0, 0.4, 0.4]


@pytest.mark.parametrize("blank", ["\u00a0", "\u3000", "\u200d"])
def test_code_with_an_f_string_that_cannot_be_written_again_still_runs(blank):
    text = f"f\"{{'{blank}'.join(map(str, numbers))}}\""
    main = f"def f(numbers):\n    if None in numbers:\n        raise ValueError({text})\n    text = {text}\n"
    main += f"    assert text.count('{blank}') == max(0, len(numbers) - 1)\n    return sum(map(aux, numbers))\n"
    assert reward(AUX, main) == reward(AUX, main + MAIN) == 4


USES = {
    "call": "return sum(aux(x) for x in numbers)",
    "map": "return sum(map(aux, numbers))",
    "another name": "double = aux\n    return sum(double(x) for x in numbers)",
    "a variable": "doubled = [aux(x) for x in numbers]\n    return sum(doubled)",
    "a loop": "total = 0\n    for x in numbers:\n        total += aux(x)\n    return total",
    "append": "r = []\n    for x in numbers:\n        r.append(aux(x))\n    return sum(r)",
    "index": "r = [0] * len(numbers)\n    for i, x in enumerate(numbers):\n        r[i] = aux(x)\n    return sum(r)",
    "condition": "t = 0\n    for x in numbers:\n        if aux(x) == x + x:\n            t += 2 * x\n    return t",
    "continue": "t = 0\n    for x in numbers:\n        if aux(x) != x + x: continue\n        t += 2 * x\n    return t",
    "nested function": "def g(x):\n        return aux(x)\n    return sum(g(x) for x in numbers)",
    "further function": "return sum(g(x) for x in numbers)\ndef g(x):\n    return aux(x)",
    "method": "return sum(G().double(x) for x in numbers)\nclass G:\n    def double(self, x): return aux(x)",
    "while True": "t = 0\n    while 1:\n        if not numbers: break\n        t += aux(numbers.pop())\n    return t",
    "lambda": "g = lambda x: aux(x)\n    return sum(g(x) for x in numbers)",
    "while": "t, i = 0, 0\n    while i < len(numbers):\n        t += aux(numbers[i])\n        i += 1\n    return t",
    "walrus": "return sum(y for x in numbers if (y := aux(x)) or True)",
    "with and try": "try:\n        return sum(aux(x) for x in numbers)\n    except ValueError:\n        return 0",
    "guarded": "if not numbers:\n        return 0\n    return sum([aux(x) for x in numbers])",
    "changed by a nested function": "out = []\n    def go(i):\n        if i < len(numbers):\n"
    "            out.append(aux(numbers[i]))\n            go(i + 1)\n    go(0)\n    return sum(out)",
    "changed by a further function": "r = []\n    fill(r, numbers)\n    return sum(r)\n"
    "def fill(r, ns):\n    for x in ns:\n        r.append(aux(x))",
    "changed through a dict": "s = {'t': 0}\n    def g(x):\n        s['t'] += aux(x)\n"
    "    for x in numbers:\n        g(x)\n    return s['t']",
    "changed by a method": "s = S()\n    for x in numbers:\n        s.add(x)\n    return s.t\nclass S:\n"
    "    def __init__(self):\n        self.t = 0\n    def add(self, x):\n        self.t += aux(x)",
    "append in a list": "r = []\n    [r.append(aux(x)) for x in numbers]\n    return sum(r)",
    "append in an expression": "r = []\n    for x in numbers:\n"
    "        r.append(aux(x)) if x else None\n    return sum(r)",
    "a part of what is returned": "d = {}\n    r = d.setdefault('r', [])\n    for x in numbers:\n"
    "        r.append(aux(x))\n    return sum(d.get('r'))",
    "a method's name": "r = []\n    push = r.append\n    for x in numbers:\n        push(aux(x))\n    return sum(r)",
    "argument of a function of its own": "r = []\n    def push(x):\n        r.append(x)\n"
    "    for x in numbers:\n        push(aux(x))\n    return sum(r)",
    "table": "return sum(TABLE[x] for x in numbers)\nTABLE = {x: aux(x) for x in range(-9, 9)}",
    "default": "return g(numbers)\ndef g(n, h=aux):\n    return sum(h(x) for x in n)",
    "heap": "import heapq\n    h = []\n    for x in numbers:\n        heapq.heappush(h, aux(x))\n    return sum(h)",
    "function made of another": "return sum(map(solve, numbers))\ndef _solve(x):\n    return aux(x)\n"
    "import functools\nsolve = functools.lru_cache(None)(_solve)",
    "list of functions": "return sum(g(x) for x in numbers for g in STEPS)\ndef step(x):\n    return aux(x)\n"
    "STEPS = [step]",
    "object of the module": "return sum(map(c.double, numbers))\nclass C:\n    def double(self, x): return aux(x)\n"
    "c = C()",
    "table filled by a function": "return sum(TABLE[x] for x in numbers)\nTABLE = {}\ndef fill():\n"
    "    for x in range(-9, 9):\n        TABLE[x] = aux(x)\nfill()",
    "table given to a function": "return sum(TABLE[x] for x in numbers)\nTABLE = {}\ndef fill(t):\n"
    "    for x in range(-9, 9):\n        t[x] = aux(x)\nfill(TABLE)",
    "a class's function": "return sum(map(C.h, numbers))\nclass C:\n    h = staticmethod(aux)",
    "a class's table": "return sum(C.T[x] for x in numbers)\nclass C:\n    T = {i: aux(i) for i in range(-9, 9)}",
    "argument of its name": "return g(aux, numbers)\ndef g(aux, n):\n    return sum(map(aux, n))",
    "method of its name": "return sum(map(C().aux, numbers))\nclass C:\n    def aux(self, x): return aux(x)",
    "nonlocal": "t = 0\n    def g(x):\n        nonlocal t\n        t += aux(x)\n    [*map(g, numbers)]\n    return t",
}


@pytest.mark.parametrize("name", USES)
def test_uses(name):
    score = scores([AUX, f"def f(numbers):\n    {USES[name]}\n"])[0]
    assert score.findings["uses"] == [True]
    assert score.reward == pytest.approx(4.0), score
    assert score.parts["useful_helper"] > 0


# Nothing that these do is needed for a test: the helper has done it all.
SUM = "def aux(numbers):\n    return 2 * sum(numbers)\n"
WRAPPERS = {
    "plain": "return aux(numbers)",
    "dummy line": "n = 0\n    return aux(numbers)",
    "dummy computation": "n = [x * x for x in numbers]\n    print(n)\n    return aux(numbers)",
    "docstring": "'''Twice the sum.'''\n    return aux(numbers)",
    "variable": "result = aux(numbers)\n    return result",
    "renamed argument": "values = numbers\n    return aux(values)",
    "other names": "a = numbers\n    b = a\n    c = aux(b)\n    d = c\n    return d",
    "keyword": "return aux(numbers=numbers)",
    "star": "args = (numbers,)\n    return aux(*args)",
    "conversion": "return int(aux(numbers))",
    "constant condition": "if True:\n        return aux(numbers)\n    return 5",
    "try": "try:\n        return aux(numbers)\n    except Exception:\n        return None",
    "overwritten": "r = None\n    r = aux(numbers)\n    return r",
    "code behind the return": "return aux(numbers)\n    return sum(numbers)",
    "renamed helper": "g = aux\n    return g(numbers)",
    "nested function": "def g(n):\n        return aux(n)\n    return g(numbers)",
    "further function": "return g(numbers)\ndef g(n):\n    return h(n)\ndef h(n):\n    return aux(n)",
    "lambda": "return (lambda *a: aux(*a))(numbers)",
    "named lambda": "g = lambda n: aux(n)\n    return g(numbers)",
    "map": "return next(map(aux, [numbers]))",
    "partial": "from functools import partial\n    return partial(aux, numbers)()",
    "method of the function": "return aux.__call__(numbers)",
    "list and index": "return [aux(numbers), 0][0]",
    "unpacked": "r, _ = aux(numbers), 0\n    return r",
    "walrus": "return (r := aux(numbers))",
    "if expression": "return aux(numbers) if True else 0",
    "the same in both branches": "if numbers:\n        return aux(numbers)\n    else:\n        return aux(numbers)",
    "or": "return aux(numbers) or aux(numbers)",
    "match": "match numbers:\n        case n:\n            return aux(n)",
    "while True": "while True:\n        return aux(numbers)",
    "a loop of one": "for n in [numbers]:\n        return aux(n)",
    "plus nothing": "return 0 + aux(numbers) * 1",
    "no bits": "return (aux(numbers) | 0) >> 0",
    "total": "total = 0\n    total += aux(numbers)\n    return total",
    "assert and del": "n = 0\n    assert n == 0\n    del n\n    return aux(numbers)",
    "copied argument": "return aux(list(numbers))",
    "dict and stars": "return aux(**{'numbers': numbers})",
    "full-width letters": "return \uff41\uff55\uff58(numbers)",
    "twice": "if numbers:\n        return aux(numbers)\n    return aux(numbers)",
    "or nothing": "return aux(numbers) or 0",
    "unary": "return +aux(numbers)",
    "sum of one": "return sum([aux(numbers)])",
    "rounded": "return round(aux(numbers))",
    "dict and key": "return {0: aux(numbers)}[0]",
    "slice": "return aux(numbers[:])",
    "copy": "return aux(numbers.copy())",
    "comprehension": "return aux([x for x in numbers])",
    "range of one": "for _ in range(1):\n        return aux(numbers)",
    "with": "import contextlib\n    with contextlib.suppress(Exception):\n        return aux(numbers)",
    "method": "return S().f(numbers)\nclass S:\n    def f(self, n):\n        return aux(n)",
    "a case that is none": "if not numbers:\n        return 0\n    return aux(numbers)",
    "choice of arguments": "return aux(numbers) if numbers else aux([0])",
    "two calls": "a = aux(numbers[:1])\n    return a + aux(numbers[1:])",
    "sorted": "return aux(sorted(numbers))",
    "arithmetic": "return aux(numbers) + 1 - 1",
    "each item": "return sum(aux([x]) for x in numbers)",
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_thin_wrappers(name):
    score = scores([SUM, f"def f(numbers):\n    {WRAPPERS[name]}\n"])[0]
    assert score.reward == pytest.approx(3.0), score
    assert score.findings["wrapper"]


NO_WRAPPERS = {  # the helper sums up, and raises where there are no numbers
    "doubled": "return aux(numbers) * 2 if numbers else 0",
    "two calls": "return aux(numbers) + aux(numbers) if numbers else 0",
    "other argument": "return aux([2 * x for x in numbers] or [0])",
    "each item": "return sum(2 * aux([x]) for x in numbers)",
    "loop": "t = 0\n    for x in numbers:\n        t += aux([x, x])\n    return t",
    "further function": "return g(numbers) - g([-x for x in numbers])\ndef g(n):\n    return aux(n) if n else 0",
    "a case of its own": "if not numbers:\n        return 0\n    return aux(numbers)",
}


@pytest.mark.parametrize("name", NO_WRAPPERS)
def test_what_is_more_than_a_wrapper(name):
    helper = "def aux(numbers):\n    return sum(numbers[1:], numbers[0])\n"
    if name == "a case of its own":
        helper = helper.replace("return", "return 2 *")
    score = scores([helper, f"def f(numbers):\n    {NO_WRAPPERS[name]}\n"])[0]
    assert score.reward == pytest.approx(4.0), score


def test_a_wrapper_is_one_whatever_it_wraps():
    wrong = "def aux(numbers):\n    return 2 * len(numbers)\n"  # passes where there is nothing to add
    found = scores([wrong, "def f(numbers):\n    return aux(numbers)"], [SUM, "def f(n):\n    return aux(n) / 1"])
    assert [score.parts["tests"] for score in found] == [0.25, 1]
    assert [score.parts["no_wrapper"] for score in found] == [0, 0]
    first, second = (SUM.replace("aux", name) for name in ("aux1", "aux2"))
    both = "def f(numbers):\n    return aux1(numbers) + aux2(numbers)"
    for texts in ([first, second.replace("2 *", "0 *")], [first.replace("2 *", "0 *"), second]):
        assert scores([*texts, both])[0].findings["wrapper"]


UNREAL = {  # what the syntax takes for a use makes no difference
    "branch never taken": "return 2 * sum(numbers) if True else aux(numbers)",
    "named only": "return (2 * sum(numbers), aux)[0]",
    "assert": "assert aux\n    return 2 * sum(numbers)",
    "overwritten": "t = aux(0)\n    t = 2 * sum(numbers)\n    return t",
    "never true": "if not True:\n        return aux(numbers)\n    return 2 * sum(numbers)",
    "after if and else": "if numbers:\n        return 2 * sum(numbers)\n"
    "    else:\n        return 0\n    return aux(0)",
    "never raised": "try:\n        return 2 * sum(numbers)\n    except Exception:\n        return aux(numbers)",
    "behind an endless loop": "while True:\n        return 2 * sum(numbers)\n    return aux(numbers)",
    "never fires": "if aux(sum(numbers)) > 10**6:\n        return None\n    return 2 * sum(numbers)",
    "never raises": "n = abs(aux(3)) - 1\n    if n < 0:\n        raise ValueError\n    return 2 * sum(numbers)",
    "times nothing": "return 2 * sum(numbers) + 0 * aux(3)",
    "minus itself": "return 2 * sum(numbers) + aux(3) - aux(3)",
    "rounds of nothing": "for _ in range(aux(3)):\n        pass\n    return 2 * sum(numbers)",
    "sorted by it": "return 2 * sum(sorted(numbers, key=aux))",
    "empty branch": "if aux(3):\n        pass\n    return 2 * sum(numbers)",
    "default never read": "return g(numbers)\ndef g(n, h=aux):\n    return 2 * sum(n)",
}


@pytest.mark.parametrize("name", UNREAL)
def test_a_use_that_changes_no_test_gains_nothing(name):
    score = scores([AUX, f"def f(numbers):\n    {UNREAL[name]}\n"])[0]
    assert score.reward == pytest.approx(2.5), score
    assert (score.findings["uses"], score.findings["ignored"]) == ([False], [False])


NEUTRAL = {  # a helper's constant, and what changes nothing with it
    "divided": ("1", "n // aux() / aux()"),
    "modulo": ("100", "(n + 50) % aux() - 50"),
    "to the power": ("1", "n ** aux()"),
    "all bits": ("-1", "aux() & (n & aux())"),
    "shifted": ("0", "n << aux() >> aux()"),
    "an empty text": ("''", "int(f'{n}{aux()}' + str(aux()))"),
    "joined": ("''", "int(aux().join(str(n)))"),
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_constant_that_changes_nothing_gains_nothing(name):
    value, result = NEUTRAL[name]
    main = f"def f(numbers):\n    n = 2 * sum(numbers)\n    return {result}"
    score = scores([f"def aux():\n    return {value}\n", main])[0]
    assert score.reward == pytest.approx(2.5) and score.parts["all_passed"] == 1, score


BESIDE = {  # what the helper's text holds beside the helper makes the difference
    "import": ("import math", "return math.trunc(2 * sum(numbers)) if True else aux(1)", 2.5),
    "constant": ("TWO = 2", "return TWO * sum(numbers) + 0 * aux(1)", 2.5),
    "function": ("def double(n):\n    return 2 * sum(n)", "n = aux(1)\n    return double(numbers)", 2.0),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_stands_beside_a_helper_is_no_use_of_it(name):
    beside, main, value = BESIDE[name]
    for helper in f"{beside}\n{AUX}", f"{AUX}{beside}\n":
        assert reward(helper, f"def f(numbers):\n    {main}\n") == pytest.approx(value)


@pytest.mark.parametrize(
    "helper",
    [
        f"import functools\n{AUX}aux = functools.cache(aux)\n",
        f"{AUX}double = aux\ndef aux(x):\n    return double(x)\n",
        f"{AUX}TABLE = [aux(x) for x in range(9)]\ndef aux(x):\n    return TABLE[x] if x >= 0 else -TABLE[-x]\n",
        AUX + "try:\n    aux = absent(aux)\nexcept NameError:\n    pass\n",
    ],
)
def test_a_helper_that_its_text_binds_again_is_used(helper):
    assert reward(helper, MAIN) == pytest.approx(4.0)


def test_a_method_of_what_is_not_needed_is_no_use():
    main = "def f(numbers):\n    return 2 * sum(numbers) + 0 * len(aux(3).strip())"
    assert reward("def aux(x):\n    return str(x)\n", main) == pytest.approx(2.5)


def test_what_a_helper_does_in_place_is_a_use():
    helper = "def aux(numbers):\n    numbers[:] = [2 * x for x in numbers]\n    return numbers\n"
    real, none = scores(
        [helper, "def f(numbers):\n    aux(numbers)\n    return sum(numbers)"],
        [AUX, "def f(numbers):\n    aux(numbers)\n    return 2 * sum(numbers)"],
    )
    assert (real.reward, none.reward) == (pytest.approx(4.0), pytest.approx(2.0))
    assert (real.findings["ignored"], none.findings["ignored"]) == ([False], [True])


REBOUND = {  # the asked function does without the helper, or is not what was written under its name
    "assigned": "aux = lambda x: 2 * x\n" + MAIN,
    "assigned later": MAIN + "aux = lambda x: 2 * x\n",
    "defined in a branch": "if True:\n    def aux(x):\n        return 2 * x\n" + MAIN,
    "class": "class aux:\n    def __new__(cls, x):\n        return 2 * x\n" + MAIN,
    "imported": "from math import trunc as aux\ndef f(numbers):\n    return 2 * sum(aux(x) for x in numbers)",
    "code replaced": "aux.__code__ = (lambda x: 2 * x).__code__\n" + MAIN,
    "loop": "for aux in [lambda x: 2 * x]:\n    pass\n" + MAIN,
    "walrus": "(aux := lambda x: 2 * x)\n" + MAIN,
    "full-width letters": "\uff41\uff55\uff58 = lambda x: 2 * x\n" + MAIN,
    "inside": MAIN.replace("return", "def aux(x): return 2 * x\n    return"),
    "class inside": MAIN.replace("return", "class aux(int):\n        def __new__(c, x): return 2 * x\n    return"),
    "import inside": MAIN.replace("return", "from math import trunc as aux\n    return 2 *"),
    "match": "def f(numbers):\n    match lambda x: 2 * x:\n        case aux: return sum(map(aux, numbers))\n",
    "global": MAIN.replace("return", "global aux\n    aux = lambda x: 2 * x\n    return"),
    "argument": MAIN.replace("(numbers)", "(numbers, aux=lambda x: 2 * x)"),
    "asked function assigned": MAIN + "f = lambda numbers: 2 * sum(numbers)\n",
    "asked function in a branch": MAIN + "if True:\n    def f(numbers):\n        return 2 * sum(numbers)\n",
    "asked function's code replaced": MAIN + "f.__code__ = (lambda numbers: 2 * sum(numbers)).__code__\n",
    "by name": "def f(numbers):\n    return sum(map(globals()['aux'], numbers))\n",
    "by eval": "def f(numbers):\n    return sum(eval('aux')(x) for x in numbers)\n",
}


@pytest.mark.parametrize("name", REBOUND)
def test_another_meaning_of_the_name_is_no_use(name):
    score = scores([AUX, REBOUND[name]])[0]
    assert score.parts["all_passed"] == 1
    assert score.reward == pytest.approx(2.5), score


IGNORES = {
    "statement": "aux(3)",
    "variable": "y = aux(3)",
    "underscore": "_ = aux(3)",
    "several variables": "y = aux(3)\n    z = y + 1",
    "in a sum": "aux(3) + 1",
    "in a sum, with an argument": "aux(len(numbers)) + 1",
    "added up": "t = 0\n    t += aux(3)",
    "in a set": "t = {1}\n    t |= {aux(3) + 1}",
    "deleted": "y = aux(3) + 1\n    del y",
    "in a branch of its own": "if numbers:\n        y = aux(3) + 1\n    else:\n        y = 2",
    "given to a function of its own": "g(aux(3))\n    return 2 * sum(numbers)\ndef g(y):\n    return y + 1\ndef h():",
    "table never read": "pass\n    return 2 * sum(numbers)\nTABLE = [aux(3) + 1]\ndef g():",
    "list never read": "r = []\n    for x in numbers:\n        r.append(aux(x))",
    "list never read, of the argument": "r = []\n    r.append(aux(len(numbers)))",
    "printed": "print(aux(3))",
    "printed beside an argument": "print(numbers, aux(3))",
    "statement with an argument": "aux(numbers)",
    "never reached": "if False:\n        aux(3)",
    "len": "len([aux(3)])",
    "statement in a class": "class C:\n        n = 3\n        aux(n)\n    numbers[C.n:]",
}


@pytest.mark.parametrize("name", IGNORES)
def test_ignored(name):
    score = scores([AUX, f"def f(numbers):\n    {IGNORES[name]}\n    return 2 * sum(numbers)\n"])[0]
    assert score.reward == pytest.approx(2.0), score
    assert (score.findings["uses"], score.findings["ignored"]) == ([False], [True])
    assert score.parts["useful_helper"] == 0


NEITHER = {
    "comment": "# aux(x)",
    "string": "'aux(x)'",
    "bare mention": "aux",
    "nested function never called": "def g(x):\n        return aux(x)",
    "further function never called": "pass\n    return 2 * sum(numbers)\ndef g():\n    aux(3)\ndef h():",
    "another table filled": "r = []\n    return 2 * sum(numbers, sum(r))\n"
    "def g():\n    r = []\n    r.append(1)\n    aux(3)\ndef h():",
    "where it is run": "pass\n    return 2 * sum(numbers)\nif __name__ == '__main__':\n    print(aux(3))\ndef h():",
    "attribute": "numbers = numbers + []\n    type('T', (), {'aux': lambda self, x: x})().aux(3)",
    "variable of that name": "aux = lambda x: x\n    aux(3)",
    "argument of that name": "def g(aux):\n        aux(3)\n    g(str)",
}


@pytest.mark.parametrize("name", NEITHER)
def test_no_call_at_all(name):
    score = scores([AUX, f"def f(numbers):\n    {NEITHER[name]}\n    return 2 * sum(numbers)\n"])[0]
    assert score.reward == pytest.approx(2.5), score
    assert (score.findings["uses"], score.findings["ignored"]) == ([False], [False])


def test_a_thought_that_is_cut_off_is_no_answer():
    thought = f"<think>\nMaybe\n```python\n{MAIN}```\nbut wait, at the edge"
    answers = [Answer([AUX, text], ["aux"], "f", TESTS, ["f"]) for text in (thought, f"{MAIN}\n{thought}")]
    assert [score.reward for score in coding_rewards(answers)] == pytest.approx([0.4, 4.0])


def test_a_docstring_may_hold_fences():
    doc = 'def aux(x):\n    """Twice.\n\n```\n    aux(1)\n```\n    """\n    return 2 * x\n'
    helper = f"```python\ndef aux(x):\n    return 3 * x\n```\nBetter:\n```python\n{doc}```\nThis is right."
    assert reward(helper, MAIN) == pytest.approx(4.0)


def test_a_second_version_that_is_cut_off_does_not_replace_the_first():
    second = (
        "def f(numbers):\n    if not numbers:\n        return 0\n    total = 0\n    for x in numbers:\n        total"
    )
    for end in range(len(second)):
        for first in f"```python\n{MAIN}```", MAIN:
            assert reward(AUX, f"{first}\nAlternatively:\n```python\n{second[:end]}") == pytest.approx(4)
    assert reward(AUX, f"```python\n{second}\n```\nBetter:\n```python\n{MAIN}```") == pytest.approx(4)


def test_many_words_in_a_row_cost_nothing_but_themselves():
    """So many that Python's parser is out of memory."""
    words = "the " * 2000
    assert reward(words, ALONE) == reward("the the", ALONE) == pytest.approx(0.6)
    assert reward(AUX, f"{words}\n```\n{MAIN}```") == pytest.approx(4)


def test_a_loop_that_only_its_helper_ends_is_not_waited_for(monkeypatch):
    waited = []

    def watched(jobs, timeout, *rest):
        waited.append(timeout)
        return sandbox.run_tests(jobs, timeout, *rest)

    monkeypatch.setattr(rewards.coding, "run_tests", watched)
    main = "def f(numbers):\n    n = sum(numbers)\n    while aux(n) is None: pass\n    return aux(n)"
    slow = f"import time\n{MAIN}time.sleep(3)"  # which the others do not wait for
    answers = [Answer([AUX, text], ["aux"], "f", TESTS, ["f"]) for text in (main, slow)]
    assert [score.reward for score in coding_rewards(answers, timeout=600)] == pytest.approx([4.0, 4.0])
    assert waited[0] == 600 and len(waited) == 3
    for times in waited[1:]:
        assert times[0] < times[-1] < 600 and times[-1] > 15


@pytest.mark.parametrize(
    "line",
    [
        "import nothing_of_this_name",
        "from nothing_of_this_name import this, that as other",
        "from nothing_of_this_name import annotations",
    ],
)
def test_an_import_that_nothing_reads_costs_nothing(line):
    assert reward(f"{line}\n{AUX}", f"from __future__ import annotations\n{line}\n{MAIN}") == pytest.approx(4.0)
    assert scores([AUX, f"{line}\n{MAIN}nothing_of_this_name, other\n"])[0].parts["tests"] == 1
    assert (
        scores([AUX, f"{line}\n{MAIN.replace('return', 'nothing_of_this_name, other; return')}"])[0].parts["tests"]
        == 0
    )


def test_an_import_of_the_future_is_no_error_where_the_function_is_missing():
    assert scores(["import math\nfrom __future__ import annotations\n", ALONE])[0].parts["tests"] == 1


def test_an_import_that_only_annotations_read_costs_nothing():
    lines = "import absent as no\nfrom absent.types import Vector\n"
    main = MAIN.replace("(numbers)", "(numbers: no.Array, n: Vector = None) -> no.Number")
    assert reward(AUX, lines + main) == reward(AUX, f"```\n{lines}```\n```\n{main}```") == 4
    typed = lines + main.replace("return", "total: no.Number = 0\n    return")
    assert reward("from absent import Number\n" + AUX.replace("(x)", "(x: Number)"), typed) == 4
    # What is there, is: some decorators evaluate annotations.
    main = "import functools\nfrom decimal import Decimal\n@functools.singledispatch\ndef g(x):\n    return aux(x)\n"
    main += "@g.register\ndef _(x: Decimal):\n    return x\ndef f(numbers):\n    return sum(map(g, numbers))\n"
    assert reward(AUX, main) == 4
    used = typed.replace("= 0", "= no.Number(0)")
    assert scores([AUX, used])[0].parts["tests"] == 0


def test_a_long_chain_of_assignments_is_read_in_time():
    chain = "".join(f"    y{i + 1} = y{i}\n" for i in range(700))
    main = f"def f(numbers):\n    y0 = [aux(x) for x in numbers]\n{chain}    return sum(y700)"
    assert reward(AUX, main) == pytest.approx(4.0)


HANDED = {  # through a helper that gives back what it is given
    "the result": "return aux(2 * sum(numbers))",
    "each item": "return sum(aux(2 * x) for x in numbers)",
    "the argument": "return 2 * sum(aux(numbers))",
    "a condition": "return 2 * sum(numbers) if aux(True) else None",
    "by its name": "return aux(x=2 * sum(numbers))",
}


@pytest.mark.parametrize("name", HANDED)
@pytest.mark.parametrize("idle", ["return x", "y = x\n    return y or x", "return [x][0]"])
def test_what_a_helper_only_hands_back_gains_nothing(name, idle):
    score = scores([f"def aux(x):\n    {idle}\n", f"def f(numbers):\n    {HANDED[name]}\n"])[0]
    assert score.reward == pytest.approx(2.5), score
    assert score.parts["useful_helper"] == 0


def test_useful_helper_is_what_a_stub_would_cost():
    full, idle, harmful = scores(
        [AUX, MAIN],
        [AUX, "def f(numbers):\n    return 2 * sum(numbers) + (0 if aux(1) else 0)"],  # reads it, needs it not
        [
            "def aux(x):\n    return x\n",
            "def f(numbers):\n    return 2 * sum(numbers) + (1 if aux(len(numbers)) else 0)",
        ],
    )
    assert full.parts["useful_helper"] == pytest.approx(0.75)  # the empty list asks nothing of the helper
    assert idle.parts["useful_helper"] == 0
    assert harmful.parts["useful_helper"] == pytest.approx(-0.75)


def test_each_agent_defines_its_own_function_only():
    # Main redefines aux: the helper's stays. The helper writes the asked function too: main's stays.
    assert reward(AUX, "def aux(x):\n    return 7\n" + MAIN) == pytest.approx(4)
    assert reward(AUX + "def f(numbers):\n    return 7\n", MAIN) == pytest.approx(4)
    assert reward(AUX, MAIN + "def extra(x=(aux := int)):\n    return x\n") == pytest.approx(4)
    assert reward(AUX, "def aux(x):\n    return 2 * x\n") == pytest.approx(0.4)


def test_what_an_agent_imports_of_another_is_there_already():
    assert reward(AUX, "from helpers import aux\n" + MAIN) == pytest.approx(4)
    assert reward("from solution import f as f\n" + AUX, f"```\nfrom aux import aux\n\n{MAIN}```") == pytest.approx(4)
    first, second = (AUX.replace("aux", name) for name in ("aux1", "aux2"))
    both = "from .helpers import aux1, aux2\ndef f(n):\n    return sum(map(aux1, n[1:])) + sum(map(aux2, n[:1]))"
    assert reward(first, second, both) == pytest.approx(4)
    mixed = "from helpers import aux, other\n" + MAIN  # where what is not there is not read
    assert reward(AUX, mixed) == 4
    assert scores([AUX, mixed.replace("return", "return other and")])[0].parts["tests"] == 0
    for instead in "pass", "from .helpers import aux", AUX.replace("\n", "\n    "), "aux = None":
        assert reward(AUX, f"try:\n    from helpers import aux\nexcept ImportError:\n    {instead}\n{MAIN}") == 4
    assert reward(AUX, "import aux\n" + MAIN) == 4
    assert reward("from .main import *\n" + AUX, "from helpers import *\n" + MAIN) == 4
    assert scores([AUX, "from helpers import *\n" + MAIN.replace("return", "return other and")])[0].parts["tests"] == 0
    inside = "from helpers import aux", "try:\n        from helpers import aux\n    except ImportError:\n        pass"
    for line in inside:
        assert reward(AUX, MAIN.replace("return", f"{line}\n    return")) == 4
    modules = {"import helpers": "helpers", "import team.helpers as h": "h", "import aux": "aux"}
    modules |= {"from . import helpers": "helpers", "from team import helpers as h": "h", "import team.h": "team.h"}
    modules |= {"import helpers, math": "helpers"}
    for line, module in modules.items():
        main = MAIN.replace("aux(", f"{module}.aux(")
        assert reward(AUX, f"{line}\n{main}") == 4, line
        assert reward(AUX, main.replace("return", f"{line}\n    return")) == 4, line
    for line in "from helpers import aux as h", "from .helpers import aux as h":
        assert reward(AUX, f"{line}\n{MAIN.replace('aux(', 'h(')}") == 4
        assert reward(AUX, MAIN.replace("aux(", "h(").replace("return", f"{line}\n    return")) == 4
    assert (
        scores([AUX, f"from math import gcd as h\n{MAIN.replace('aux(x)', 'h(x, x)')}"])[0].parts["uses_helper"] == 0
    )
    other = "import helpers\n" + MAIN.replace("aux(x)", "helpers.aux(x) + helpers.other")
    assert scores([AUX, other])[0].parts["tests"] == 0
    # What else is tried there counts.
    more = "try:\n    from helpers import aux\n    n = 1\nexcept ImportError:\n    n = 2\n"
    assert scores([AUX, more + MAIN.replace("aux(x)", "aux(x) * n // 2")])[0].parts["tests"] == 1
    used = MAIN.replace("aux(x)", "math.trunc(aux(x))")
    assert reward(AUX, f"try:\n    math\nexcept NameError:\n    import math\n{used}") == 4


NEEDS = {  # what a function reads, and the value that it returns
    "an import": ("import math", "math.trunc(2 * x)"),
    "one of several imports": ("from math import floor, trunc", "trunc(2 * x)"),
    "a further function": ("import math\n\ndef g(y):\n    return math.trunc(y)", "g(2 * x)"),
    "a class": ("class C:\n    two = 2", "C.two * x"),
    "a constant": ("TWO = 2", "TWO * x"),
    "a pattern": ("import re\nP = re.compile('x')", "2 * int(P.sub('', f'x{x}'))"),
    "a table of a comprehension": ("P = {n: 2 * n for n in range(-9, 9)}", "P[x]"),
    "a table of a function": ("def twice(x):\n    return 2 * x\n\nP = {n: twice(n) for n in range(-9, 9)}", "P[x]"),
    "a lambda": ("P = lambda n: 2 * n", "P(x)"),
    "where results are kept": ("from collections import defaultdict\nP: dict = defaultdict(int)", "P[x] + 2 * x"),
}


@pytest.mark.parametrize("name", NEEDS)
def test_what_a_function_reads_may_be_made_in_another_block(name):
    made, value = NEEDS[name]
    helper = f"First\n```python\n{made}\n```\nand then\n```python\ndef aux(x):\n    return {value}\n```"
    assert reward(helper, MAIN) == 4
    table = "```\nP = {n: aux(n) for n in range(-9, 9)}\n```\n```\n" + MAIN.replace("aux(x)", "P[x]") + "```"
    assert reward(AUX, table) == 4


@pytest.mark.parametrize("name", NEEDS)
@pytest.mark.parametrize("template", ["```python\n{}\n{}```\nSo\n```python\n{}```\nis it.", "{}\n{}\nAgain:\n\n{}\n"])
def test_a_function_is_written_again_without_what_it_needs(name, template):
    beside, value = NEEDS[name]
    last = f"def aux(x):\n    return {value}\n"
    for first in last, "def aux(x):\n    return 7\n":
        assert reward(template.format(beside, first, last), MAIN) == 4
    # What the last version has of its own counts.
    own = f"def g(y):\n    return y\n{AUX}    g(x)\n"
    assert reward(template.format("from absent import g", last, own), MAIN) == 4
    assert reward(template.format("ONE = 7", last, f"ONE = 2\n{AUX.replace('2', 'ONE')}"), MAIN) == 4


def test_an_example_in_another_block_is_not_the_functions_variable():
    shown = "```\n{main}```\nAn example:\n```\n{line}\n```"
    main = MAIN.replace(
        "    return", "    total = 0\n    try: len([], 1)\n    except TypeError as e: total -= total\n    return"
    )
    main = main.replace("return", "import math\n    def g(x): return math.trunc(x)\n    return g(total) +")
    for name in ("total", "x", "e", "math", "g", "f", "aux", "sum", "len"):
        for value in ("f([1, 2])", "undefined", "aux(1)", "lambda x: 2 * x"):
            assert reward(AUX, shown.format(main=main, line=f"{name} = {value}")) == 4, (name, value)


def test_a_program_cannot_tell_the_runs_with_stubs_by_the_number_of_its_calls():
    counting = "calls = []\ndef f(numbers):\n    calls.append(1)\n    return sum(map({}, numbers))"
    once = counting.format("aux if len(calls) == 1 else (2).__mul__")  # the first call is the example's
    found = scores((AUX, once), (AUX, counting.format("aux")), examples=["assert f([1]) == 2"])
    assert [score.reward for score in found] == [2.5, 4]


def test_a_function_may_be_made_of_the_librarys_of_the_same_name():
    tests, inside = "assert gcd(4, 6) == 2\nassert gcd(3, 5) == 1", "    from math import gcd\n    return"
    helper, main = f"def aux(a, b):\n{inside} [gcd(a, b)]", "def gcd(a, b):\n    return aux(a, b)[0]"
    answers = [Answer([helper, main], ["aux"], "gcd", tests, ["gcd"])]
    answers += [Answer([f"def gcd(a, b):\n{inside} gcd(a, b)"], [], "gcd", tests, ["gcd"])]
    for line, module in ("import math", "math"), ("import os.path, math as m", "m"):
        helper = f"def aux(a, b):\n    {line}\n    return [{module}.gcd(a, b)]"
        assert coding_rewards([Answer([helper, main], ["aux"], "gcd", tests, ["gcd"])])[0].reward == 4
    helper = "import math\ndef aux(a, b):\n    return [math.gcd(a, b)]"
    answers += [Answer([helper, main], ["aux"], "gcd", tests, ["gcd"])]
    assert [score.reward for score in coding_rewards(answers)] == [4, 2.1, 4]


@pytest.mark.parametrize(
    "example", ["print(f([3]))", "assert f([3]) == 6", "assert aux(1) == 7, 'wrong'", "python", "-it", "[END]"]
)
def test_examples_in_the_text_are_not_run(example):
    assert reward(f"{example}\n{AUX}{example}\n", f"{example}\n{MAIN}{example}\n") == pytest.approx(4)


FAILING = {  # examples of use behind the code
    "wrong test": "def test_f():\n    assert f([1]) == 3\ntest_f()",
    "check": "def check(candidate):\n    assert candidate([1]) == 3\ncheck(f)",
    "wrong call": "result = f(1, 2)\nprint(result)",
    "helper's wrong call": "result = aux(1, 2)",
    "input": "n = int(input('How many? '))\nfor i in range(n):\n    print(f([i]))",
    "test cases": "import unittest\nclass T(unittest.TestCase):\n    def test(self): pass\nunittest.main()",
    "exit": "import sys\nsys.exit(0)",
}


@pytest.mark.parametrize("head", ["def f(numbers):  # doubles", "def f(numbers,\n      start=0):"])
def test_a_head_with_a_comment_or_of_two_lines_before_prose(head):
    assert reward(AUX, MAIN.replace("def f(numbers):", head) + "\nIt doesn't (fail.\n") == pytest.approx(4)


@pytest.mark.parametrize("line", ["f([3]) == 6", "f([3])", "O(n)", "print(absent)"])
def test_a_line_before_the_code_that_fails_costs_nothing(line):
    for template in "{}", "```python\n{}```":
        texts = [template.format(f"{line}\n\n{code}") for code in (AUX, MAIN)]
        assert reward(*texts) == pytest.approx(4)


@pytest.mark.parametrize("name", FAILING)
def test_an_example_that_fails_costs_nothing(name):
    assert [score.reward for score in scores([AUX, MAIN + FAILING[name]], [AUX + FAILING[name], MAIN])] == [4, 4]


USAGES = {  # of the asked function, in the text of a helper that wrote one too
    "value": "result = f([1, 2])\nprint(result)\ntotal = result + 1",
    "call": "f([1])",
    "loop": "for case in ([1], [2]):\n    print(case, f(case))",
    "function": "def main():\n    print(f([1]))\nmain()",
    "function of a function": "def main():\n    test()\ndef test():\n    assert f([1]) == 2\nmain()",
    "another name": "answer = f\nprint(answer([1]))",
    "class": "class T:\n    def run(self): return f([1])\nT().run()",
    "try": "try:\n    n = f([1])\nfinally:\n    print(n)",
    "with what is needed": "n = 2\nn = f([n])\nTHREE = n",
}


@pytest.mark.parametrize("name", USAGES)
def test_a_helper_may_use_the_asked_function_as_an_example(name):
    helper = "TWO = 2\nTABLE = {}\nTABLE[1] = TWO\ndef aux(x):\n    return TABLE[1] * x\n"
    texts = [helper + f"{definition}{USAGES[name]}\n" for definition in (MAIN, "")]
    assert [score.reward for score in scores(*[[text, MAIN] for text in texts])] == [4, 4]
    first, second = (AUX.replace("aux", name) for name in ("aux1", "aux2"))
    both = "def f(n):\n    return sum(map(aux1, n[1:])) + sum(map(aux2, n[:1]))"
    assert reward(first + USAGES[name].replace("f(", "aux2("), second, both) == 4


def test_what_a_helper_needs_is_no_example():
    # A name that is there already: the text's own, a builtin.
    own = "f = lambda x: 2 * x\nTWO = f(1)\ndef aux(x):\n    return TWO * x\n"
    assert reward(own, MAIN) == 4
    tests, sums = TESTS.replace("check(f)", "check(sum)"), "TWO = sum([1, 1])\ndef aux(x):\n    return TWO * x\n"
    main = "def sum(n):\n    t = 0\n    for x in n:\n        t += aux(x)\n    return t"
    assert coding_rewards([Answer([sums, main], ["aux"], "sum", tests, ["sum"])])[0].reward == 4
    # And who gives the asked function's name, or the helper's, another meaning gains nothing by it.
    assert reward(AUX + "f = None\nif f: f()\n", MAIN) == 4
    assert reward(AUX, ALONE + "aux = f\n") == 2.5


def test_several_helpers_share_their_levels():
    first, second = (AUX.replace("aux", name) for name in ("aux1", "aux2"))
    one = "def f(numbers):\n    return sum(aux1(x) for x in numbers)\n"
    both = "def f(numbers):\n    return sum(aux1(x) for x in numbers[:1]) + sum(aux2(x) for x in numbers[1:])\n"
    assert reward(first, second, both) == pytest.approx(4)
    assert reward(first, second, one) == pytest.approx(3.75)
    beside = one.replace("    return", "    aux2(numbers)\n    return")  # what is dropped is not paid for
    assert reward(first, second, beside) == pytest.approx(3.75)
    assert reward(first, second, ALONE.replace("    return", "    aux2(numbers)\n    return")) == pytest.approx(2.25)
    assert reward(first, "", one) == pytest.approx(0.2 + 0.6 + 0.5 + 1)


# What is wrong in the published code, and right here.


def test_nested_functions_imports_and_further_helpers_are_kept():
    helper = """
import math
from functools import reduce
TWO = 2

def aux(x):
    def g(y):
        return y * TWO

    return g(math.trunc(x))
"""
    main = """
from __future__ import annotations
import itertools

def plus(a, b):
    return a + b

def f(numbers: list[Unknown]):
    def accumulate(values):
        total = 0
        for v in values:
            total = plus(total, v)
        return total

    return accumulate(itertools.chain([aux(x) for x in numbers]))

if __name__ == "__main__":
    raise SystemExit(f([1]))
"""
    assert reward(helper, main) == pytest.approx(4)


def test_fences_and_prose_around_them():
    for template in (
        "```python\n{}```",
        "```\n{}```",
        "Here it is:\n\n```python\n{}\n```\nIt doubles.",
        "```python\n{}",
        "First an example:\n```\nprint(1)\n```\nand now\n```py\n{}\n```",
        "  ```python\n{}  ```\n",
    ):
        assert reward(template.format(AUX), template.format(MAIN)) == pytest.approx(4), template


EXAMPLE = (
    'def f(numbers):\n    """Twice.\n\n    ```\n    f([1])\n    ```\n    """\n    return sum(map(aux, numbers))\n'
)
FORMATS = {
    "byte order mark": "\ufeff" + MAIN,
    "byte order mark and fence": f"\ufeff```python\n{MAIN}```",
    "indented": textwrap.indent(MAIN, "    "),
    "only its first line indented": f"\n    {MAIN}",
    "a copy, cut off": f"{MAIN}\ndef f(numbers):\n    total = 0\n    for x in numbers:\n        total += aux(x)\n",
    "a copy, cut off behind an early return": "def f(n):\n    if not n:\n        return 0\n"
    "    return sum(map(aux, n))\n\ndef f(n):\n    if not n:\n        return 0\n",
    "indented, and a remnant": textwrap.indent(MAIN, "    ") + " [/INST]\n",
    "only its first line indented, and prose": f"    {MAIN}\nIt sums.\n",
    "indented in a list": "1. The function:\n\n" + textwrap.indent(MAIN, " " * 8) + "\n   It doesn't (fail.\n",
    "import deleted": f"import os\ndel os\n{MAIN}",
    "ends of lines": f"So:\n```python\n{MAIN.rstrip()}```\nIt sums.".replace("\n", "\r\n"),
    "in a list": "1. The function:\n\n" + textwrap.indent(f"```python\n{MAIN}```\n", "   ") + "2. It sums.",
    "fence behind the code": f"```python\n{MAIN.rstrip()}```\nIt sums.",
    "tildes": f"~~~python\n{MAIN}~~~",
    "fences in a docstring": EXAMPLE,
    "fences in a docstring in a fence": f"So:\n```python\n{EXAMPLE}```\nIt sums.",
    "imports apart": "```\nfrom functools import reduce\n```\nand\n"
    "```\ndef f(n):\n    return reduce(int.__add__, map(aux, n), 0)\n```",
    "further function apart": "```\ndef g(x):\n    return aux(x)\n```\n```\ndef f(n):\n    return sum(map(g, n))\n```",
    "signature first": f"The signature is\n```python\ndef f(numbers):\n```\nso\n```python\n{MAIN}```",
    "stub first": f"```python\ndef f(numbers): ...\n```\nso\n```python\n{MAIN}```",
    "stub last": f"```python\n{MAIN}```\nIts signature:\n```python\ndef f(numbers): ...\n```",
    "a part explained": f"```python\n{MAIN}```\nIt begins with\n```python\ndef f(numbers):\n    total = 0\n```",
    "two lines explained": "```\ndef f(str):\n    t = str + [0]\n    t[-1] = 0\n    return sum(map(aux, t))\n```\n"
    "First\n```\nt = str + [0]\n```\nand then\n```\nt[-1] = 0\n```",
    "a default apart": "```\nkept = {}\n```\nand\n```\ndef f(n, kept=kept):\n    return sum(map(aux, n))\n```",
    "the end explained": f"```python\n{MAIN}```\nIt ends\n```python\ndef f(numbers):\n    ...\n    return total\n```",
    "an outline": f"```python\n{MAIN}```\nSo it\n```python\ndef f(numbers):\n    t = ...\n    return sum(t)\n```",
    "... in a type": "```python\ndef f(numbers):\n    return 0\n```\nNow right:\n"
    f"```python\n{MAIN.replace('return', 'pair: tuple[int, ...] = (); return')}```",
    "a part explained, without fences": f"{MAIN}\nIt begins with\n\ndef f(numbers):\n    total = 0\n\nThen it sums.",
    "an example that imports": f"```\nimport math\nprint(math.floor(f([1])))\n```\n```\n{MAIN}```",
    "a shell and an example": f"```sh\n$ python f.py\n```\n```\n{MAIN}```\n```\nn = f([1])\nprint(n)\n```",
    "thoughts": "<think>Perhaps\n```python\ndef f(numbers):\n    return 7\n```\nno.</think>\n" + MAIN,
    "thoughts, and statements before the function": "<think>Easy.</think>\nTABLE = [0]\nTABLE.append(1)\n\n"
    + MAIN.replace("aux(x)", "aux(TABLE[1] * x)"),
    "types without their import": MAIN.replace("(numbers)", "(numbers: List[int], n: Optional[int] = None) -> Any"),
    "draft": f"```python\ndef f(numbers):\n    return 7\n```\nBetter:\n```python\n{MAIN}```",
    "other ends of lines in a string": MAIN.replace("return", "'\u2028\u2029\x0b\x0c\x85'\n    return"),
    "other ends of lines in a fence": "```\n" + MAIN.replace("return", "'\u2028\x0c'\n    return") + "```",
    "tests behind it": f"```\n{MAIN}```\nTests:\n```\nimport absent\nfrom solution import f\n\n"
    "@absent.mark\ndef test_f():\n    assert f([1]) == 2\n```",
    "prose before": "Here's the function. It is\n(as asked) short:\n\n" + MAIN,
    "prose behind": MAIN + "\nThis function uses the helper's result.\n\n- It doesn't fail.\n",
    "prose around": "Sure! The code:\n\nimport math\n" + MAIN + "# So\n\n**Explanation:** `aux(x)` doubles.",
    "constants between prose": "So:\nONE = 1\nT = {\n    2: ONE,\n}\n\n"
    + MAIN.replace("aux(x)", "aux(T[2] * x)")
    + "\nIt sums.",
    "a guarded import between prose": f"It's:\n\ntry:\n    import absent\nexcept ImportError:\n    absent = None\n\n"
    f"{MAIN}\nIt sums.",
    "a word and a colon": f"Answer: this\n{MAIN}\nIt sums.",
    "a heading that is an annotation": f"Answer: Python\n\n{MAIN}",
    "a heading in the block": f"```\nLanguage: Python\n{MAIN}```",
    "a type that is not there": f"from collections.abc import Callable\naux: Callable[[Number], Number]\n{MAIN}",
    "a stand-in between prose": f"So:\nif 'aux' not in globals():\n    def aux(x): return x\n{MAIN}\nIt sums.",
    "indented between prose": f"The function:\n\n{textwrap.indent(MAIN, '    ')}\nIt sums.",
    "no fence but that of a test": f"{MAIN}\nTests:\n```python\nfrom solution import f\nprint(f([1]))\n```",
    "prose, no fence but that of a test": f"So:\n{MAIN}```\nTests:\n```\ndef test_f():\n    assert f([1]) == 2\n```",
    "prose and a fence that ends": MAIN + "```\nThis sums.",
    "prose and a fence that begins": "So:\n```python\n" + MAIN + "\nIt sums (twice.",
    "the future apart": "```\nfrom __future__ import annotations\nfrom math import *\n```\nand\n"
    "```\ndef f(n: list[Unknown]):\n    return trunc(sum(map(aux, n)))\n```",
    "constants apart": "```\nTWO: int = 2\nn = 5\nx = n * f([1])\n```\nand\n"
    "```\nONE = 1\nimport math\n```\nso\n"
    "```\ndef f(n):\n    x = [aux(y) for y in n]\n    return TWO * ONE * sum(x) // 2\n```",
    "values of an example, named as built-ins": f"```\nsum = 3\n```\n```\n{MAIN}```\n```\nsum: int = 5\nf(sum)\n```",
    "values of an example": f"```\nnumbers = [1]\naux = 2\n```\n```\n{MAIN}```",
    "a stand-in for the helper where it is run": MAIN
    + "if __name__ == '__main__':\n    def aux(x):\n        return x\n    print(f([1]))",
    "a stand-in that is not taken": "if 'aux' not in globals():\n    def aux(x): return x\n" + MAIN,
    "a stand-in in a try": "try:\n    aux\nexcept NameError:\n    aux = lambda x: x\n" + MAIN,
    "a stand-in that is a comment": f"def aux(x):\n    # Another agent's\n\n{MAIN}",
    "stand-ins that are comments": f"```python\nclass C:\n    # Left out\n\n    # for now\n"
    f"def aux(\n    # a number\n    x,\n):\n# Another agent's\n{MAIN}def test_f():\n    # Here\n```",
    "a stand-in that is a comment, between prose": f"So:\n\nasync def g(x):\n    # Later\n{MAIN}\nIt sums.",
    "an import for types": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from helpers import aux\n" + MAIN,
    "the helper's type": "from collections.abc import Callable\naux: Callable[[int], int]\n" + MAIN,
    "the signature as a heading": f"def f(numbers: list) -> int\n\nIt's here:\n\n{MAIN}",
    "prose that begins like code": f"import statements aren't needed.\n\n{MAIN}",
    "a value that is read": f"```\n{MAIN}```\nFor example:\n```\nn = int(input())\nnumbers = [n]\n"
    "print(f(numbers))\n```",
    "constants that are made": "```\nSIX = 2 * 3\n```\nand\n```\nVOWELS = 'a e'.split()\nFAR = float('inf')\n```\nso\n"
    "```\ndef f(n):\n    return sum(map(aux, n)) if len(set(VOWELS)) < SIX < FAR else 7\n```",
    "a number behind it": MAIN + "\nFor example\n```\nn = 3\n```\n",
    "what another block needs": "```\nimport operator\ndef g(x):\n    return operator.add(h(x), 0)\n```\nand\n"
    "```\ndef h(x):\n    return aux(x)\n```\nso\n```\ndef f(n):\n    return sum(map(g, n))\n```",
}


@pytest.mark.parametrize(
    "line",
    [
        *(
            "1. It sums.",
            "2) it sums",
            "- calls aux",
            "* It",
            "`aux(x)` doubles.",
            "note that it sums.",
            "das ist alles.",
        ),
        *("---", "====", "</s>", "<|im_end|>", "[/PYTHON]", "[END]", "(It sums.)", ">>> f([1])", "$ python f.py"),
        *(
            "这个函数使用 aux。",
            "Это всё.",
            "✅ done",
            "Here, n = 3 items.",
            "aux, the helper, doubles",
            "explanation: it sums",
        ),
        *(
            "for each number, aux is called.",
            "if the list is empty, 0 is returned",
            "with this, it works",
            "in short: it sums",
            "def f(numbers): the function's name",
            "from numbers, aux makes their doubles",
            '"f" returns the sum.',
            "'aux' is called for each number.",
            "'f' works.",
            "f([1, 2]) returns 6, aux('x') fails",
            "numbers[0] may be 'none'",
            "f([1, 2]) -> 6",
            "f([1, 2]) => 6",
            "f([1, 2]): 6",
            "f([1, 2]): it's the doubled sum",
            "[1, 2] \u2192 6",
            "n = 5 gives 10",
            "n = 5 \u2192 10",
            "f([1, 2])\u7684\u7ed3\u679c\u4e3a6\u3002",
            "assert f([3]) == 6 passes.",
        ),
    ],
)
def test_prose_behind_the_code(line):
    assert reward(AUX, f"{MAIN}\n{line}\n\nIt doesn't (fail.\n") == pytest.approx(4)


@pytest.mark.parametrize(
    "line",
    [
        *(
            "def g(",
            "def g(x)",
            "class",
            "@",
            "return (1",
            "if f([1]",
            "for x in (",
            "else:",
            "elif x",
            "if(x):",
            "import",
            "with",
        ),
        *(
            "x = [1,",
            "x += (",
            "x.y = (",
            "T[0",
            "print(f([1",
            "r.append(",
            "a, b = (",
            "x == (",
            "x: int = [",
            ")",
            "]",
        ),
        *("x = 5, 'the \u2192 sum", "return 5 if x and 6", "x = (5  # is 6 \u2192"),
        *("'''Now", '"""It is', '"It', "(a, b) = (", "[x for x in", "{1:", "    Else x", "\tIt is", "größe = ("),
        *("    return aux(n) => 2", "    def g(x) -> int", "if f(3) => 2:", "async def g(x) -> int"),
        *("x = 'the sum", "for x in y if z and", "import a as b, c as", "    the sum", "with x as y, z as # the sum"),
    ],
)
def test_broken_code_is_no_prose(line):
    for end in "", "\nThis is it.\n":
        assert reward(AUX, f"{ALONE}\n{line}{end}") == pytest.approx(1.0)


@pytest.mark.parametrize("name", FORMATS)
def test_formats_of_an_answer(name):
    assert reward(AUX, FORMATS[name]) == pytest.approx(4)


def test_a_helper_may_show_how_it_is_used():
    usage = "```\nfrom helpers import aux\n\ndef main():\n    return aux(2)\n```"
    assert reward(f"```\n{AUX}```\nFor example:\n{usage}", MAIN) == pytest.approx(4)


def test_the_other_agents_function_may_be_a_comment():
    left_out = "def f(numbers):\n    # To be written with aux\n"
    assert [score.reward for score in scores([AUX + left_out, MAIN], [left_out + AUX, MAIN])] == [4, 4]
    # Its own may not, nor may another block.
    assert reward(AUX, left_out) == pytest.approx(0.4)
    assert reward(AUX, ALONE + "if f([1]):\n    # Nothing\n") == pytest.approx(1.0)


def test_a_text_that_breaks_off_counts_as_defined_but_not_as_a_program():
    assert reward(AUX, ALONE + "\ndef g(") == pytest.approx(1.0)
    assert reward(AUX + "# Then\ndef g(", ALONE) == pytest.approx(1.0)
    assert reward(AUX + "    Else x", ALONE) == pytest.approx(1.0)


def test_prose_alone_is_no_program():
    for text in (
        "Sure, here it is.",
        "The function\ndef f is short.",
        "from here\nimport it",
        "Note:\nimport math\nThis is it.",
    ):
        assert reward(AUX, text) == pytest.approx(0.4)


def test_asserts_over_several_lines_in_loops_and_with_helpers():
    tests = """
def close(a, b):
    return abs(a - b) < 1e-6

def check(candidate):
    assert True, "nothing"
    assert candidate(
        [1, 2],
    ) == 6, "a (text) = with == brackets ("
    for i in range(4):
        assert close(candidate([i]), 2 * i)
check(f)
"""
    score = scores([AUX, "def f(numbers):\n    return sum(map(aux, numbers)) if numbers != [3] else 0"], tests=tests)[
        0
    ]
    assert score.parts["passed_share"] == 4 / 5
    assert score.findings["passed"] == 4


def test_an_object_equal_to_everything_passes_nothing():
    code = "class A(int):\n    def __eq__(self, other): return True\ndef f(numbers):\n    return A()"
    assert scores([AUX, code])[0].parts["tests"] == 0


def test_an_exit_ends_nothing_but_the_answer():
    exits = ["exit()", "import os; os._exit(0)", "raise SystemExit", "raise KeyboardInterrupt"]
    answers = [[AUX, f"def f(numbers):\n    {code}\n    return 2 * sum(numbers)"] for code in exits]
    found = scores(*answers, [AUX, MAIN], *[[f"{code}\n{AUX}", MAIN] for code in exits])
    # a call before the code may fail, as an example does
    assert [score.parts["tests"] for score in found] == [0, 0, 0, 0, 1, 1, 0, 0, 0]


def test_hostile_text_is_a_low_reward_and_no_error():
    texts = [
        "\0",
        "\ud800",
        "(" * 100_000,
        "x" + ".a" * 200_000,
        "-" * 300_000 + "1",
        "#" * 2_000_000,
        "`" * 5000,
        "def aux",
    ]
    found = scores(*[[AUX, text] for text in texts], *[[text, MAIN] for text in texts])
    assert all(score.reward <= 1.0 for score in found)
    assert all(score.findings["reason"] for score in found)


# The environments


def sample_answers(task):
    return [task["helper"], task["main"]]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_sample_tasks_are_solved_by_their_demonstrations(name):
    env = make(name, 2, 1, "sample", 3)
    tasks = env.tasks("train")[:20] + env.tasks("test")[:20]
    steps = env.step([(task, [], sample_answers(task)) for task in tasks])
    assert all(step.done for step in steps)
    # Some of the demonstrated functions call the helper, and none of them wraps it.
    assert {step.reward for step in steps} == {2.5, 4.0}
    assert all((step.parts["useful_helper"] > 0) == (step.reward == 4.0) for step in steps)


@pytest.mark.parametrize("num_agents", [1, 2, 3])
def test_demonstrations_answer_the_prompts(num_agents):
    env = make("humaneval", num_agents)
    tasks, demos = env.tasks("train"), env.demonstrations()
    assert len(demos) == num_agents * len(tasks)
    first = demos[:num_agents]
    assert [d["prompt"] for d in first] == env.observe(tasks[0], [])
    step = env.step([(tasks[0], [], [d["completion"] for d in first])])[0]
    assert step.parts["all_passed"] == 1


@pytest.mark.parametrize("num_agents", [1, 2, 3])
def test_demonstrations_of_the_second_turn_correct_what_failed(num_agents, monkeypatch):
    monkeypatch.setitem(coding.SAMPLE_COUNTS, "train", 40)
    env = make("humaneval", num_agents, 2)
    tasks = {task["problem"].strip(): task for task in env.tasks("train")}
    first = make("humaneval", num_agents).demonstrations()
    demos = env.demonstrations()
    assert [demo for demo in demos if "Your answer:" not in demo["prompt"]] == first
    demos = [demo for demo in demos if "Your answer:" in demo["prompt"]]
    second = [demos[i : i + num_agents] for i in range(0, len(demos), num_agents)]
    assert 10 < len(second) < 40
    branches, kept = [], 0
    for group in second:
        problem = group[0]["prompt"].split("\n\nWrite ")[0]
        said = [demo["prompt"].split("Your answer:\n")[1].split("\n\n")[0] for demo in group]
        kept += sum(text == demo["completion"].strip() for text, demo in zip(said, group))
        for demo in group:
            assert demo["prompt"].startswith(problem) and demo["prompt"].endswith("again, better. Function code only.")
            assert "of 5 tests passed." in demo["prompt"] and "5 of 5" not in demo["prompt"]
        branches.append((tasks[problem], [], [demo["completion"] for demo in group]))
    assert all(step.done for step in env.step(branches))
    # All agents but one had answered well.
    assert num_agents == 1 or kept >= (num_agents - 1) * len(second)
    assert demos == [demo for demo in env.demonstrations() if "Your answer:" in demo["prompt"]]


@pytest.mark.parametrize("name, best", [("humaneval", 4.0), ("classeval", 6.0)])
@pytest.mark.parametrize("num_turns", [1, 2, 3])
def test_no_way_of_failing_first_is_worth_more_than_passing_at_once(name, best, num_turns):
    """The best answer ends the task, and is worth more than one that fails and the best in every turn after it."""
    env = make(name, 1 if name == "classeval" else 2, num_turns)
    tasks = env.tasks("train")[:12]
    good = [[task["solution"]] if name == "classeval" else [task["helper"], task["main"]] for task in tasks]
    bad = [[*helpers, main.replace("return ", "return 7 or ")] for *helpers, main in good]
    for turn in range(num_turns):
        passing, failing = (
            env.step([(task, [None] * turn, answer) for task, answer in zip(tasks, answers)])
            for answers in (good, bad)
        )
        assert all(step.done for step in passing)
        assert max(step.reward for step in passing) == best * (num_turns - turn)
        failed = [step.reward for step in failing if not step.done]
        assert len(failed) > 8 and max(failed) + best * (num_turns - turn - 1) < best * (num_turns - turn)


def test_prompts_tell_each_agent_what_it_may_know():
    env = make("humaneval", 3)
    task = env.tasks("test")[0]
    one, two, main = env.observe(task, [])
    assert "aux1" in one and "aux2" not in one and "aux1" not in two and "aux2" in two
    assert "aux1(...)" in main and "aux2(...)" in main
    assert all(task["problem"].strip() in prompt for prompt in (one, two, main))
    alone = f"def {task['entry_point']}(numbers):\n    return 7"
    one, two, main = env.observe(task, env.step([(task, [], [AUX, AUX, alone])]))
    assert "does not use aux1" in one and "aux2" not in one and "aux1" not in two and "does not use aux2" in two
    assert "does not use aux1" in main and "does not use aux2" in main
    alone = make("humaneval", 1).observe(task, [])
    assert len(alone) == 1
    assert "aux" not in alone[0]


def test_feedback_shows_prompt_examples_and_never_a_test():
    task = make("humaneval").tasks("train")[0]
    lines = [line.strip() for line in task["tests"].splitlines() if "assert" in line]
    secrets = [line.split("candidate(")[1].split(")")[0] for line in lines if "candidate([])" not in line]
    main = f"def {task['entry_point']}(numbers):\n    raise ValueError('told ' + str(numbers))\n    return aux(1)"
    for feedback in "plain", "level":
        env = make("humaneval", 2, 2, feedback=feedback)
        step = env.step([(task, [], [AUX, main])])[0]
        prompts = env.observe(task, [step])
        assert not step.done
        assert AUX.strip() in prompts[0] and main not in prompts[0]
        assert main.strip() in prompts[1] and AUX.strip() not in prompts[1]
        for prompt in prompts:
            assert not any(secret in prompt for secret in secrets)
            assert ("0 of 5 tests passed" in prompt) == (feedback == "level")
            assert ("fails: raised ValueError: told [" in prompt) == (feedback == "level")
    assert env.observe(task, [step, step])[0].count("Your answer:") == 2


def test_feedback_levels():
    env = make("humaneval", 2, 2)
    task = env.tasks("train")[0]
    name = task["entry_point"]
    cases = {
        ("x", "y"): ("No aux that returns something was found.", f"No {name} that returns something was found."),
        (AUX, f"def {name}(n):\n    return 1\n)"): (
            "of another agent is not Python.",
            "not Python: unmatched ')' (line 3).",
        ),
        (AUX, f"def {name}(n):\n    return"): (
            f"{name} was not found.",
            f"No {name} that returns something was found.",
        ),
        (AUX, f"def {name}(n):\n    return 1\nbreak"): ("aux was found.", "does not compile: 'break' outside loop"),
        (AUX, f"def {name}(n):\n    return 77"): (f"{name} does not use aux.", "fails: returned 77."),
        (AUX, f"def {name}(n):\n    aux(1)\n    return 77"): ("calls but ignores aux", "calls but ignores aux"),
        (AUX, f"def {name}(n):\n    return 77 + aux(1)"): (f"{name} uses aux.", "0 of 5 tests passed."),
        ("def aux(n):\n    return 0", f"def {name}(n):\n    return aux(n)"): ("only hands on", "only hands on"),
    }
    for texts, expected in cases.items():
        prompts = env.observe(task, env.step([(task, [], list(texts))]))
        for prompt, part in zip(prompts, expected):
            assert part in prompt


def test_a_call_without_which_as_many_tests_pass_is_not_said_to_be_missing():
    env = make("humaneval", 2, 2)
    task = next(task for task in env.tasks("train") if "aux(" in task["main"])
    head, body = task["main"].replace("aux(", "own(").split("\n", 1)
    own = task["helper"].replace("aux", "own")
    # the wrong answer still passes some tests
    for wrong in "", "    if len(numbers) > 3: return None\n":
        main = f"{head}\n    if aux(1) == 'never': return 0\n{wrong}{body}\n\n{own}"
        step = env.step([(task, [], [task["helper"], main])])[0]
        assert step.parts["uses_helper"] == 0 < step.parts["tests"] <= 1
        said = f"{task['entry_point']} calls but does not need aux."
        assert all(said in prompt for prompt in env.observe(task, [step]))


def test_an_example_is_worth_what_its_docstring_says():
    row = samples.coding_tasks("train", 1, 1)[0]
    lines = [">>> g([1]) # a comment", "2", ">>> g([2]) == 4", "True", ">>> g([3]) if 1 else 0", "6", ">>> x = 1", "1"]
    lines += [">>> x = [3]", ">>> x.append(4)", ">>> g(x)", "14 # as above"]
    row["prompt"] = 'def g(n):\n    """Twice.\n' + "".join(f"    {line}\n" for line in lines) + '    """\n'
    task = coding._task({**row, "entry_point": "g"}, "here")
    assert task["examples"] == [
        "assert g([1]) == 2",
        "assert (g([2]) == 4) == True",
        "assert (g([3]) if 1 else 0) == 6",
        "x = [3]\nx.append(4)\nassert g(x) == 14",
    ]
    answer = Answer(["def g(n):\n    return 7"], [], "g", "assert g([1]) == 2", ["g"], examples=task["examples"])
    assert len(coding_rewards([answer])[0].findings["examples"]) == 4  # that all of them fail is shown


def test_observe_and_step_change_nothing():
    env = make("humaneval", 2, 2)
    task = env.tasks("train")[0]
    before = json.dumps(task)
    step = env.step([(task, [], [AUX, "def x(): pass"])])
    assert env.observe(task, step) == env.observe(task, step)
    assert json.dumps(task) == before


@pytest.mark.parametrize("name, function", [("humaneval", "coding_rewards"), ("classeval", "class_rewards")])
def test_answers_run_within_the_environments_limits(name, function, monkeypatch):
    env, limits = make(name, timeout="3.0", allow_unsafe_code="yes"), []
    monkeypatch.setattr(
        sys.modules[type(env).__module__], function, lambda answers, *given: limits.append(given) or []
    )
    assert env.step([]) == [] and limits == [(3.0, True)]


def test_arguments_that_make_no_sense():
    with pytest.raises(ValueError, match="--env-kwargs feedback"):
        make("humaneval", 2, 2, feedback="loud")
    with pytest.raises(ValueError, match="--dataset"):
        make("humaneval").tasks("valid")
    with pytest.raises(ValueError, match="--env"):
        Coding("tldr")


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_tasks_whose_tests_hand_over_a_lambda_are_named(tmp_path, capsys):
    prompt = 'def f(g, x):\n    """g(x)"""\n'
    test = "def check(asked):\n    assert asked(lambda y: y + 1, 1) == 2\n"
    row = {"prompt": prompt, "entry_point": "f", "test": test}
    harmless = {**row, "test": "def check(asked):\n    assert sorted(asked(str, x=[]), key=lambda y: y) == []\n"}
    rows = [{**(row if i == 3 else harmless), "task_id": f"own {i}"} for i in range(20)]
    env = make("humaneval", num_agents=1, dataset=write_rows(tmp_path / "rows.jsonl", rows))
    assert re.findall("own [0-9]+", capsys.readouterr().out.partition("pass one")[2]) == ["own 3"]
    (task,) = [task for part in env.splits.values() for task in part if task["task_id"] == "own 3"]
    (step,) = env.step([(task, [], ["def f(g, x):\n    return g(x)"])])
    assert not step.done


def test_files_keep_the_benchmarks_split(tmp_path, capsys):
    rows = [{**row, "task_id": f"HumanEval/{i}"} for i, row in enumerate(samples.coding_tasks("train", 164, 1))]
    env = make("humaneval", dataset=write_rows(tmp_path / "all.jsonl", rows[::-1]))
    ids = {split: sorted(int(t["task_id"].split("/")[1]) for t in env.tasks(split)) for split in env.splits}
    assert ids == {"train": [*range(33, 133)], "validation": [*range(32)], "test": [*range(133, 164)]}
    env = make("humaneval", dataset=write_rows(tmp_path / "part.jsonl", rows[100:150:7]))
    assert [t["task_id"] for t in env.tasks("test")] == ["HumanEval/135", "HumanEval/142", "HumanEval/149"]
    # Tasks of other numbering are split as any other file.
    own = [{**row, "task_id": f"HumanEval/{i} of mine"} for i, row in enumerate(rows[:20])]
    said = capsys.readouterr().out
    assert "split by task number" in said and "rows 1 to" not in said
    env = make("humaneval", dataset=write_rows(tmp_path / "own.jsonl", own))
    said_of_own = capsys.readouterr().out
    assert "rows 1 to 18 are train, rows 19 to 20 are test" in said_of_own
    assert (len(env.tasks("train")), len(env.tasks("test"))) == (18, 2)
    assert "task HumanEval/0 of mine is not numbered as the benchmark's are" in said_of_own
    same = [{**row, "task_id": f"HumanEval/{i}"} for row in rows[:2] for i in (40, 140, 240)]
    make("humaneval", dataset=write_rows(tmp_path / "same.jsonl", same))
    said = capsys.readouterr().out
    assert "2 rows of test have the prompt of a row of train" in said and "2 with other numbers are left out" in said
    few = tmp_path / "few.jsonl"
    with pytest.raises(ValueError, match=r"--dataset .*: no task has a number of the benchmark's split train"):
        make("humaneval", dataset=write_rows(few, rows[:20]))
    told = [{**row, "split": ("train", "test")[i % 2]} for i, row in enumerate(rows[:20])]
    env = make("humaneval", dataset=write_rows(few, told))
    assert [t["task_id"] for t in env.tasks("test")] == [f"HumanEval/{i}" for i in range(1, 20, 2)]
    with pytest.raises(ValueError, match="--dataset"):
        make("humaneval", dataset=write_rows(tmp_path / "bad.jsonl", [{**row, "prompt": "def ("} for row in rows]))


def test_tests_may_make_objects_of_the_prompts_classes(tmp_path):
    prompt = "class Node:\n    def __init__(self, after=None):\n        self.after = after\n\n"
    row = {"prompt": f'{prompt}def f(node):\n    """The length of a list."""\n', "entry_point": "f"}
    row["test"] = "def check(candidate):\n    assert candidate(Node(Node())) == 2\n    assert candidate(Node()) == 1"
    rows = [{**row, "task_id": f"own {i}"} for i in range(20)]
    env = make("humaneval", num_agents=1, dataset=write_rows(tmp_path / "rows.jsonl", rows))
    texts = ["def f(node):\n    return 1 + f(node.after) if node else 0", "def f(node):\n    return 1"]
    steps = env.step([(env.tasks("train")[0], [], [text]) for text in texts])
    assert [step.parts["passed_share"] for step in steps] == [1, 0.5]


POINT = "class P:\n    def __init__(self, v): self.v = v\n    def __eq__(self, other): return self.v == other.v\n"
SAME = "def P(*a):\n    return 0\n\ndef sq(x):\n    return 0\n"
COMPARE_OWN = {
    "directly": "assert candidate(2) == P(4)",
    "by a variable": "want = P(4)\n    assert candidate(2) == want",
    "by an annotated variable": "want: P = P(4)\n    assert candidate(2) == want",
    "by a loop": "for x, want in [(2, P(4)), (3, P(9))]:\n        assert candidate(x) == want",
    "by a loop over a zip": "for x, want in zip([2], [P(4)]):\n        assert candidate(x) == want",
    "in a list": "assert [candidate(2)] == [P(4)]",
    "in a list that grows": "wanted = []\n    wanted.append(P(4))\n    assert [candidate(2)] == wanted",
    "in a comprehension": "wanted = [P(i) for i in (4, 9)]\n    assert [candidate(2), candidate(3)] == wanted",
    "in a dict": "wanted = {}\n    wanted['a'] = P(4)\n    assert candidate(2) == wanted['a']",
    "as a member": "assert candidate(2) in (P(4),)",
    "by a function that makes it": "def build():\n        return P(4)\n    assert candidate(2) == build()",
    "by a function that compares": "def same(f, x, y):\n        assert f(x) == y\n    same(candidate, 2, P(4))",
}
COMPARE_PLAIN = {
    "an argument": "assert candidate(P(2)) == 4",
    "a variable": "root = P(2)\n    assert candidate(root) == 4",
    "an unpacked one": "root, want = P(2), 4\n    assert candidate(root) == want",
    "a loop": "for root, want in [(P(2), 4), (P(3), 9)]:\n        assert candidate(root) == want",
    "another name": "f = candidate\n    assert f(P(2)) == 4",
    "a function that compares": "def same(f, x, y):\n        assert f(x) == y\n    same(candidate, P(2), 4)",
    "a comprehension": "assert [candidate(P(i)) for i in (1, 2)] == [1, 4]",
}


@pytest.mark.parametrize("how", [*COMPARE_OWN, *COMPARE_PLAIN])
def test_tasks_whose_tests_an_answer_could_make_true_are_left_out(how, tmp_path, capsys):
    """An answer redefines the prompt's class, so what it returns and what is expected are both 0."""
    prompt = f'{POINT}\ndef sq(x):\n    """Squared."""\n'
    row = {
        "prompt": prompt,
        "entry_point": "sq",
        "test": f"def check(candidate):\n    {(COMPARE_OWN | COMPARE_PLAIN)[how]}\n",
    }
    safe = {**row, "test": "def check(candidate):\n    assert candidate(P(2)) == 4\n"}
    rows = [{**(row if i == 3 else safe), "task_id": f"own {i}"} for i in range(20)]
    env = make("humaneval", num_agents=1, dataset=write_rows(tmp_path / "rows.jsonl", rows))
    kept = [task["task_id"] for part in env.splits.values() for task in part]
    assert ("own 3" not in kept) == (how in COMPARE_OWN) and len(kept) == 20 - (how in COMPARE_OWN)
    assert re.findall("own [0-9]+", capsys.readouterr().out.partition("left out")[2]) == ["own 3"][: 20 - len(kept)]
    if how in COMPARE_PLAIN:
        (task,) = [task for part in env.splits.values() for task in part if task["task_id"] == "own 3"]
        right, same = [env.step([(task, [], [code])])[0] for code in ("def sq(x):\n    return x.v * x.v\n", SAME)]
        assert right.done and not same.done


def test_tests_may_be_nested_deeply(tmp_path):
    row = {"prompt": f'{POINT}\ndef sq(x):\n    """Squared."""\n', "entry_point": "sq"}
    row["test"] = f"def check(candidate):\n    assert candidate(P(2)) == {'+'.join('1' * 1500)}\n"
    rows = [{**row, "task_id": f"own {i}"} for i in range(20)]
    assert make("humaneval", num_agents=1, dataset=write_rows(tmp_path / "rows.jsonl", rows)).tasks("train")


def test_mbpps_tests_do_not_compare_the_answers_own_either(tmp_path, capsys):
    code, tests = f"{POINT}\ndef sq(x):\n    return P(x * x)\n", [f"assert sq({x}) == P({x * x})" for x in (2, 3)]
    rows = [{**MBPP_ROW, "task_id": f"own {i}"} for i in range(20)]
    rows[3] |= {"code": code, "test_list": tests}
    env = make("mbpp", num_agents=1, dataset=write_rows(tmp_path / "rows.jsonl", rows))
    assert [part for part in env.splits.values() for task in part if task["task_id"] == "own 3"] == []
    assert "left out" in (said := capsys.readouterr().out) and "own 3" in said


@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_reference_solutions_that_fail_are_named(name, tmp_path, capsys):
    rows = [{**MBPP_ROW, "task_id": f"own {i}"} for i in range(coding.TRIED + 20)]
    wrong = {"code": "def f(x):\n    return 5"}
    if name == "humaneval":
        test = "def check(candidate):\n    assert candidate(str.upper, 'a') == 'A'\n"
        row = {
            "prompt": 'def f(g, x):\n    """g of x."""\n',
            "entry_point": "f",
            "canonical_solution": "    return g(x)\n",
        }
        plain = {**row, "test": "def check(candidate):\n    assert candidate(abs, -1) == 1\n"}
        rows, wrong = [{**plain, "task_id": line["task_id"]} for line in rows], {"test": test}
    for k in (3, 17, len(rows) - 1):  # the last is not tried
        rows[k] |= wrong
    rows[5].pop("canonical_solution", None)
    env = make(name, num_agents=1, dataset=write_rows(tmp_path / "rows.jsonl", rows))
    said = capsys.readouterr().out.partition("reference solutions")[2]
    assert re.findall("own [0-9]+", said) == ["own 3", "own 17"] and "(" in said
    assert sum(map(len, env.splits.values())) == len(rows)  # a test may also be right, and its solution wrong


MBPP_ROW = {"prompt": "p", "code": "def f(x):\n    return x", "test_imports": []}
MBPP_ROW["test_list"] = ["assert f(1) == 1", "assert f(2) == 2"]


@pytest.mark.parametrize(
    "name, form, row, splits",
    [
        *(
            ("mbpp", form, MBPP_ROW, {"train": [601, 974], "validation": [511, 600], "test": [11, 510]})
            for form in ("{}", "{}.0", "Mbpp/{}", " {}")
        ),
        (
            *("coophumaneval", "CoopHumanEval/{}", samples.coding_tasks("train", 1, 1)[0]),
            {"train": [0, 49], "validation": [50, 65], "test": [66, 81]},
        ),
    ],
)
def test_published_splits_have_these_first_and_last_tasks(name, form, row, splits, tmp_path):
    """MBPP's tasks 1 to 10 are in none: they are for prompts."""
    numbers = {max(0, number + k) for ends in splits.values() for number in ends for k in (-1, 0, 1)}
    rows = [{**row, "task_id": form.format(number)} for number in numbers]
    env = make(name, dataset=write_rows(tmp_path / "rows.jsonl", rows))
    found = {
        split: sorted(int(float(task["task_id"].split("/")[-1])) for task in env.tasks(split)) for split in splits
    }
    assert {split: found[split][:: len(found[split]) - 1] for split in splits} == splits


def test_a_class_that_mbpps_tests_use_is_known_and_is_not_what_is_asked_for():
    code, tests = "class P:\n    x = 1\ndef f(p):\n    return p.x", ["assert P() != f(P())", "assert f(P()) == 1"]
    task = coding._task({**MBPP_ROW, "task_id": 1, "code": code, "test_list": tests}, "here")
    assert task["names"] == ["P", "f"] and task["entry_point"] == "f"


@pytest.mark.parametrize("head", ["def test(candidate):", "def check(candidate, size):"])
def test_tests_are_a_function_check_of_one_argument(head):
    row = samples.coding_tasks("train", 1, 1)[0]
    with pytest.raises(ValueError, match="no function check of one argument"):
        coding._task({**row, "test": f"{head}\n    assert candidate([1]) == 1"}, "here")
    more = "def check(candidate, size=1):\n    assert candidate([size]) == 1"
    assert coding._task({**row, "test": more}, "here")["tests"].startswith(more)


def test_tasks_may_import_modules_of_packages_and_what_they_can_do_without():
    row = samples.coding_tasks("train", 1, 1)[0]
    imports = "import os.path\ntry:\n    import absent\nexcept ImportError:\n    pass\n"
    assert coding._task({**row, "prompt": imports + row["prompt"]}, "here")["entry_point"] == row["entry_point"]


def benchmark(name):
    path = os.path.join(DATA, name)
    if not os.path.exists(path):
        pytest.skip(f"{name} is not here")
    with open(path) as file:
        rows = [json.loads(line) for line in file]
    env = Coding("mbpp" if name.startswith("mbpp") else "humaneval")
    from envs.coding import _task

    return env, rows, [_task(row, name) for row in rows]


def without_returns(code):
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            # At the outermost level of each function the first statement returns None.
            node.body = [ast.Return(ast.Constant(None)), *node.body]
    return ast.unparse(ast.fix_missing_locations(tree))


@pytest.mark.parametrize("name, needed", [("humaneval.jsonl", 82), ("mbpp_sanitized.jsonl", 213)])
def test_reference_solutions(name, needed):
    env, rows, tasks = benchmark(name)
    codes = [row["code"] if "code" in row else row["prompt"] + row["canonical_solution"] for row in rows]
    steps = env.step([(task, [], ["def aux(x):\n    return x", code]) for task, code in zip(tasks, codes)])
    assert sum(step.parts["tests"] == 1 for step in steps) >= needed
    assert all(step.reward == pytest.approx(2.5) for step in steps if step.done)
    # The examples that are shown hold for the reference.
    assert sum(bool(step.feedback["examples"]) for step in steps) == 0
    steps = env.step([(task, [], ["", without_returns(code)]) for task, code in zip(tasks, codes)])
    assert [task["task_id"] for task, step in zip(tasks, steps) if step.parts["all_passed"]] == []


@pytest.mark.parametrize("tests", [["assert f(1) == 1"], ["assert f(1) == 1", ""], ["x = 1", "assert f(x) == 1"], 5])
def test_tasks_that_no_answer_could_pass_are_named(tests, tmp_path):
    row = {"task_id": "mine", "prompt": "p", "code": "def f(x):\n    return x", "test_imports": [], "test_list": tests}
    with pytest.raises(ValueError, match=r"--dataset .*: task mine is not in the benchmark's form"):
        make("mbpp", dataset=write_rows(tmp_path / "rows.jsonl", [row] * 20))


def test_mbpp_shows_one_assert_and_scores_the_others():
    _, rows, tasks = benchmark("mbpp_sanitized.jsonl")
    for row, task in zip(rows, tasks):
        (example,) = task["examples"]
        assert example.strip() in task["problem"]
        scored = task["tests"].split("\n")
        assert sorted([example, *scored]) == sorted("\n".join({*row["test_list"]}).split("\n"))
        assert task["entry_point"] in example


def test_coophumaneval_can_be_read():
    _, rows, tasks = benchmark("coophumaneval.jsonl")
    assert len(tasks) == len(rows)
    assert sum(bool(task["examples"]) for task in tasks) > 0.9 * len(tasks)


TEST_PYTEST = "@pytest.mark.parametrize('n, e', [([1], 2)])\ndef test_f(n, e):\n    assert f(n) == e\n"
TESTED = {  # behind the code that they test, in one block, and without what they are written with
    "pytest": TEST_PYTEST,
    "pytest, imported": "import pytest\n" + TEST_PYTEST,
    "not there, imported": "import absent\n" + TEST_PYTEST.replace("pytest", "absent"),
    "not there, imported from": "from absent import mark\n" + TEST_PYTEST.replace("pytest.", ""),
    "raises": "import absent\ndef test_f():\n    with absent.raises(TypeError):\n        f(1)\n",
    "fixture": "@pytest.fixture\ndef some():\n    return [1]\ndef test_f(some):\n    assert f(some)\n",
    "unittest": "class TestF(unittest.TestCase):\n    def test_f(self): self.assertEqual(f([1]), 2)\n",
    "unittest, run": "class TestF(unittest.TestCase):\n    def test_f(self): pass\nunittest.main()\n",
    "arrays": "import absent as np\ndef test_f():\n    assert f(np.array([1])) == 2\n",
}


@pytest.mark.parametrize("name", TESTED)
def test_tests_beside_the_code_cost_nothing(name):
    above = "".join(line + "\n" for line in TESTED[name].split("\n") if "import" in line)
    below = TESTED[name].removeprefix(above)
    for text in "{0}{1}", "{2}\n{0}{3}", "So:\n```python\n{2}{0}\n{3}```":
        aux, main = (text.format(code, TESTED[name], above, below) for code in (AUX, MAIN))
        assert [score.reward for score in scores([AUX, main], [aux, MAIN])] == [4, 4]


def test_what_the_code_needs_has_to_work():
    for line in (
        "import absent",
        "from absent import twice",
        "@absent\ndef twice(x): return x",
        "class twice(No): pass",
    ):
        main = MAIN.replace("aux(x)", "aux(x) if x else (absent, twice)")
        assert scores([AUX, f"{line}\n{main}"])[0].parts["tests"] == 0
        assert scores([AUX, f"{line}\ndef g():\n    return absent, twice\nT = g\n{MAIN}"])[0].parts["tests"] == 0
    # What is only named in a string is there, and so is what changes something where it is made.
    main = "def g(x):\n    return aux(x)\ndef f(numbers):\n    return sum(map(globals()['g'], numbers))\n"
    assert scores([AUX, main])[0].parts["tests"] == 1
    main = "T = {}\ndef put(g):\n    T[0] = g\n@put\ndef g(x):\n    return aux(x)\n"
    main += "def f(numbers):\n    return sum(map(T[0], numbers))\n"
    assert scores([AUX, main])[0].parts["tests"] == 1


def test_a_long_chain_of_functions_is_read_in_time():
    chain = "".join(f"def g{i}(x):\n    return g{i + 1}(x)\n" for i in range(300))
    main = f"def f(numbers):\n    return sum(map(g0, numbers))\n{chain}def g300(x):\n    return aux(x)\n"
    assert reward(AUX, main) == 4


PIECES = {  # of code without fences, with prose between them
    "import": f"First:\n\nimport math\n\nNow the function:\n\n{MAIN}",
    "import that is needed": "First:\n\nimport math\n\nNow the function:\n\n"
    + MAIN.replace("aux(x)", "math.trunc(aux(x))"),
    "further function": "First a helper:\n\ndef g(x):\n    return aux(x)\n\nNow the function (it's short):\n\n"
    "def f(n):\n    return sum(map(g, n))\n\nThat's all.",
    "further function behind": "The function:\n\ndef f(n):\n    return sum(map(g, n))\n\nIt needs this:\n\n"
    "ONE = 1\ndef g(x):\n    return aux(x) * ONE\n",
    "draft": f"{ALONE}\nBetter, with the helper:\n\n{MAIN}",
    "draft, then indented": f"{ALONE}\nBetter, with the helper:\n\n{textwrap.indent(MAIN, '    ')}\nThat's all.",
    "draft before a fence": f"{ALONE}\nBetter, with the helper:\n\n{MAIN}\nTest:\n```python\nassert f([1]) == 2\n```",
    "stub behind": f"{MAIN}\nIts signature is\n\ndef f(numbers): ...\n\nas asked.",
    "imports in a block": "First:\n```python\nimport math\n```\nThen:\n\n"
    + MAIN.replace("aux(x)", "math.trunc(aux(x))"),
    "example in a block": f"So:\n```python\nfrom main import f\nprint(f([1]))\n```\nwith\n\n{MAIN}\nIt's short.",
    "draft behind a block": f"```python\n{MAIN}```\nWithout the helper it's\n\n{ALONE}\nor shorter.",
    "broken code behind a block": f"```python\n{MAIN}```\nAt first I had\n\n{ALONE}\ndef g(\n",
    "first line repeated": f"{MAIN}\nLine by line:\n\ndef f(numbers):\nThis is the function's name.",
    "words that begin code": f"{MAIN}\nNow you can\nimport it, or\nfrom it import f, the\nclass is not needed.",
    "test behind": f"{MAIN}\nA test:\n\nimport absent\nfrom solution import f\nassert absent.close(f([1]), 2)\n",
    "broken test behind": f"{MAIN}\nA test:\n\ndef test_f():\n    assert f([1]) == (2",
}


@pytest.mark.parametrize("name", PIECES)
def test_code_in_pieces_between_prose(name):
    assert reward(AUX, PIECES[name]) == pytest.approx(4)


def test_many_spaces_are_read_in_time():
    assert reward(AUX, f"So{' ' * 200_000}it is:\n\n{MAIN}") == pytest.approx(4)


def test_many_tags_are_read_in_time():
    assert reward(AUX, f"{MAIN}# {'<s>' * 100_000}x\n\nThat's it.") == pytest.approx(4)


def test_many_tildes_are_read_in_time():
    assert reward("~" * 50_000, ALONE) == pytest.approx(0.6)


def test_many_pieces_between_prose_are_read_in_time():
    assert reward(AUX, "Word.\n\nimport math\n\nIt's (more.\n\n" * 2000 + MAIN) == 0.4


LINE = "def f(n): return sum(map(aux, n))"
GLUED = {  # to the code, or not seen in it
    "a fence on both sides": f"```{LINE}```",
    "a fence and a language": f"So: \n```python {LINE}```\nIt sums.",
    "a fence before": f"```{MAIN}```",
    "spaces that do not break": MAIN.replace("    ", "\u00a0" * 4),
    "spaces that do not break, between prose": f"So:\n```\n{MAIN}```\n".replace("    ", "\u00a0 " * 2),
    "no width": "\u200b" + MAIN,
    "no width, between prose": f"It's short:\n\n\u200b{MAIN}\nThat's all.",
    "no width at the ends": f"It's short:\n\n{MAIN}\nThat's all.".replace("\n", "\u200b\r\n"),
    "answer": f"<answer>{MAIN.rstrip()}</answer>",
    "answer in lines": f"<answer>\n{MAIN}</answer>",
    "answer and fence": f"<answer>```python\n{MAIN.rstrip()}```</answer>",
    "answer behind thoughts": f"<think>It's easy.</think>\n<answer>{MAIN.rstrip()}</answer></s>",
    "tag of a tool": "<|python_tag|>" + MAIN,
    "end": MAIN.rstrip() + "</s>",
    "end of the text": MAIN.rstrip() + "<|endoftext|>",
    "end of the sentence": MAIN.rstrip() + "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "end behind a fence": f"```python\n{MAIN}```<|im_end|>\n",
    "a template": f"<|im_start|>assistant\n{MAIN.rstrip()}<|im_end|>\n<|im_start|>user\nIt's (short.",
}


@pytest.mark.parametrize("name", GLUED)
def test_what_is_glued_to_the_code(name):
    assert reward(AUX, GLUED[name]) == pytest.approx(4)


def test_tags_in_a_string_stay():
    tests = "assert f('x') == '<answer>x</answer>'\nassert f('') == '''\n</s>\n\u200b\u00a0\u200b'''"
    main = "def f(x):\n    '''It's'''\n    if x:\n        return '<answer>' + x + '</answer>'\n    return {}\n"
    whole = main.format("'''\n</s>\n\u200b\u00a0\u200b'''")
    fenced = "So:\n```python\n{}```\nThat's it.".format(main.format("'\\n</s>\\n\u200b\u00a0\u200b'"))
    assert [score.parts["tests"] for score in scores([AUX, whole], [AUX, fenced], tests=tests)] == [1, 1]


SIEVE = """def sieve(n):
    {0} = [True] * n
    for i in range(2, n):
        {0}[2 * i :: i] = [False] * len({0}[2 * i :: i])
    return [i for i in range(2, n) if {0}[i]]

PRIMES = sieve(100)

def aux(n):
    return [p for p in PRIMES if n % p == 0]
"""


@pytest.mark.parametrize("name", ["marks", "prime"])
def test_a_variable_that_is_named_as_the_asked_function_makes_no_example(name):
    main = "def prime(n):\n    return aux(n) == [n]\n"
    answer = Answer([SIEVE.format(name), main], ["aux"], "prime", "assert prime(7)\nassert not prime(8)", ["prime"])
    assert coding_rewards([answer])[0].reward == 4
    assert reward("TABLE = {f: 2 * f for f in range(-9, 9)}\ndef aux(x):\n    return TABLE[x]\n", MAIN) == 4


@pytest.mark.parametrize(
    "line", ["sum = {}([1])", "list = [1, 2]", "for map in [1]:\n    print(map)", "max = 3\nmin = max"]
)
def test_an_example_that_is_named_as_a_built_in_takes_it_from_nobody(line):
    main = "def f(numbers):\n    return max(sum(list(map(aux, numbers))), -99)\n"
    for texts in [AUX + line.format("aux"), main], [AUX, main + line.format("f")]:
        assert reward(*texts) == 4
    assert reward(AUX, "max = lambda *x: 7\n" + main) < 4  # what stands before it to be run counts


@pytest.mark.parametrize("first", ["import math", "def g(x):\n    return x"])
@pytest.mark.parametrize("last", ["print(f([1]))", "import math\nprint(math.pi)", "def test_f():\n    assert f([1])"])
def test_code_without_a_fence_between_two_fences(first, last):
    assert reward(AUX, f"First:\n```python\n{first}\n```\nThen:\n\n{MAIN}\nTest:\n```python\n{last}\n```\nDone.") == 4


EXAMPLE_LINES = ["f('abc') -> 3", "f(5) = 120", "'abc' \u2192 3", 'f("it\'s") => 4', "T(n) = O(n)"]
EXAMPLE_LINES += ["f([1]) --> 2", "f([1]) \u279e 2", "f([1]) \u27f6 2", "f((1, 2)) = 6", "f(abs(-1)) = 1"]
EXAMPLE_LINES += ["n = 5 -> 120", "n = 5 => 120"]


@pytest.mark.parametrize("line", EXAMPLE_LINES)
def test_examples_that_are_no_code(line):
    assert reward(AUX, f"{MAIN}\n{line}\n") == 4
    assert reward(AUX, f"import the helper (it's there)\nand go on\n\n{MAIN}\n{line}\nThat is it.") == 4


@pytest.mark.parametrize("comment", ["    # It sums the doubles\n", "    # f([1]) -> 2\n\n    # f([]) -> 0\n"])
def test_a_comment_may_end_a_function(comment):
    for before in "", "Here it is:\n\n":
        assert reward(AUX, f"{before}{MAIN}{comment}\nThis function uses the helper.\n") == 4
    assert reward(AUX, f"{MAIN}{comment}    return =\n") == 1  # broken code ends the program as before


@pytest.mark.parametrize("template", ["{}", "```python\n{}```", "Here it is:\n\n{}"])
@pytest.mark.parametrize(
    "last", ["if __name__ == '__main__':\n    print(f([1]))\n", "def test():\n    assert f([])\n"]
)
def test_what_stands_at_the_margin_behind_indented_code(template, last):
    assert reward(AUX, template.format(textwrap.indent(MAIN, "    ") + "\n" + last)) == 4


@pytest.mark.parametrize("end", ["", "    ...\n", "    # the rest as above\n"])
@pytest.mark.parametrize(
    "template",
    ["```python\n{}```\nBase case:\n```python\n{}```\nIt ends here.", "{}\nThe base case:\n\n{}\nIt ends here."],
)
def test_the_beginning_of_a_function_does_not_replace_it(end, template):
    begins = "def f(numbers):\n    if not numbers:\n        return 0\n"
    whole = begins + "    return aux(numbers[0]) + f(numbers[1:])\n"
    assert reward(AUX, template.format(whole, begins + end)) == 4
    assert reward(AUX, template.format(begins + "    return 7\n", whole)) == 4  # what is last counts otherwise
    branch = whole.replace("    return aux(", "    else:\n        return aux(")
    assert reward(AUX, template.format(branch, begins + end)) == 4
