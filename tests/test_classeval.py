"""The class reward and its environment: levels, how a class is put together, feedback, real and sample tasks."""

import ast
import json
import os
import textwrap

import datasets
import pytest

from envs import classeval, make, samples
from envs.classeval import _task
from rewards.classeval import ClassAnswer, class_rewards

DATA = os.path.join(os.path.dirname(__file__), "..", "..", "shared", "data", "classeval.jsonl")
BASE = '''
import math

LIMIT = 10

class Box:
    """Numbers."""

    def __init__(self):
        self.items = []

    def add(self, x):
        """Keeps x."""

    def size(self):
        """How many."""

    @staticmethod
    def double(x):
        """Twice x."""
        pass

    def area(self, r):
        raise NotImplementedError
'''
METHODS = ["add", "size", "double", "area"]
TESTS = """
import unittest

class TestOne(unittest.TestCase):
    def setUp(self): self.box = Box()
    def test_add(self): self.box.add(3); self.assertEqual(self.box.items, [3])
    def test_size(self): self.box.items = [1, 2]; self.assertEqual(self.box.size(), 2)

class TestTwo(unittest.TestCase):
    def test_double(self): self.assertEqual(Box.double(4), 8)
    def test_area(self): self.assertAlmostEqual(Box().area(1), 3.14159, 4)
    def test_init(self): self.assertEqual(Box().items, [])
"""
ADD = "def add(self, x):\n    self.items.append(x)\n"
SIZE = "def size(self):\n    return len(self.items)\n"
DOUBLE = "def double(x):\n    return 2 * x\n"
AREA = "def area(self, r):\n    return math.pi * r * r\n"
ONE, TWO = ADD + DOUBLE, SIZE + AREA  # agent 1 has add and double, agent 2 size and area


def score(*texts, base=BASE, tests=TESTS, **options):
    assigned = [METHODS[i :: len(texts)] for i in range(len(texts))]
    return class_rewards([ClassAnswer(list(texts), assigned, "Box", base, tests, ["Box"], **options)])[0]


def test_long_lists_are_not_compared_line_by_line():
    tests = TESTS.replace("test_add(self):", "test_add(self): self.assertEqual([*range(9000)], self.box.size());")
    parts = score(ONE, SIZE.replace("len(self.items)", "list(range(10**5, 10**5 + 9000))") + AREA, tests=tests).parts
    assert parts["tests"] == pytest.approx(4 * 3 / 5)  # test_double, test_area and test_init, all in time


def test_test_methods_that_a_busy_grader_does_not_reach_have_failed():
    tests = TESTS.replace("test_size(self):", "test_size(self): sum(self.box.size());")
    endless = SIZE.replace("len(self.items)", "range(10**15)") + AREA
    answer = ClassAnswer([ONE, endless], [METHODS[::2], METHODS[1::2]], "Box", BASE, tests, ["Box"])
    (scored,) = class_rewards([answer], timeout=2)
    assert scored.parts["tests"] == 4 / 5  # test_add passes, and test_size comes next


# Of five tests one passes without any method.
CASES = {
    "all": ([ONE, TWO], 2, 4, 0),
    "one agent": ([ADD + SIZE + DOUBLE + AREA], 2, 4, 0),
    "too deep to be written again": ([ONE, TWO.rstrip() + " + 0" * 400 + "\n"], 2, 4, 0),
    "nothing": (["", ""], 0, 0.8, 0),
    "half": ([ONE, ""], 1, 2.4, 0),
    "stubs": (
        [
            "def add(self, x): pass\ndef double(x): return None\n",
            "def size(self):\n    '''S.'''\ndef area(self, r): ...",
        ],
        *(0, 0.8, 0),
    ),
    "wrong": ([ONE.replace("2 * x", "3 * x"), TWO], 2, 3.2, 0),
    "another agent's": ([ONE + SIZE, TWO], 2, 4, -0.25),
    "all that both could": ([ADD + SIZE + DOUBLE + AREA] * 2, 2, 4, -1),
    "a stub of another agent's": ([ONE + "def size(self): pass", TWO], 2, 4, 0),
    "what does nothing": (
        [
            "def add(self, x):\n    if x:\n        pass\ndef double(x):\n    return ...",
            "def size(self):\n    self\ndef area(self, r):\n    if r:\n        0\n    else:\n        return",
        ],
        *(0, 0.8, 0),
    ),
    "nothing, in the class": (
        [
            "class Box:\n    add: int\n    del double",
            "class Box:\n    for size in (): pass\n    try: area = 1\n    finally: pass",
        ],
        *(0, 0.8, 0),
    ),
    "assigned": ([ADD + "Box.double = staticmethod(lambda x: 2 * x)", TWO], 2, 4, 0),
    "another agent's, assigned": ([ONE + "Box.size = lambda self: 2", TWO], 2, 4, -0.25),
    "another agent's, assigned twice": ([ONE + "Box.size = lambda self: 7\n" * 2, TWO], 2, 4, -0.25),
    "another agent's, assigned in a branch": ([ONE + "if 1:\n    Box.size, x = lambda self: 2, 0", TWO], 2, 4, -0.25),
    "another agent's, by setattr": ([ONE + "setattr(Box, 'size', lambda self: 2)", TWO], 2, 4, -0.25),
    "another agent's, left to do by it": ([ONE + "Box.size = lambda self: 2", AREA], 1.5, 3.2, 0),
    "another agent's, in the class": (["class Box:\n    size = lambda self: 2\n" + ONE, TWO], 2, 4, -0.25),
    "another way to find methods": (
        [
            ONE + "def __getattribute__(self, name):\n    return 7\ndef __new__(cls): return 7\n"
            "Box.__getattr__ = Box.__getattribute__ = lambda self, name: 7",
            TWO,
        ],
        *(2, 4, 0),
    ),
    "its own left to the other": ([ADD, TWO + DOUBLE], 1.5, 3.2, 0),
    "what was given": (["def __init__(self):\n    self.items = [7]\n" + ONE, TWO], 2, 4, 0),
    "no Python": ([ONE, "This adds numbers."], 0, 0, 0),
    "no Python that begins like it": ([ONE, "The methods:\nimport them here\n"], 0, 0, 0),
    "a text that breaks off": ([ONE, TWO + "def n("], 0, 0, 0),
    "a bracket": ([ONE, "def size(self):\n    return (len(self.items)"], 0, 0, 0),
    "does not compile": ([ONE, TWO + "return 5"], 0, 0, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_levels(name):
    texts, written, tests, doubled = CASES[name]
    found = score(*texts)
    levels = {key: found.parts[key] for key in ("written", "tests", "doubled")}
    assert levels == {"written": written, "tests": pytest.approx(tests), "doubled": doubled}
    assert found.reward == pytest.approx(written + tests + doubled)
    assert found.parts["all_passed"] == (tests == 4) and found.parts["compiles"] == (tests > 0)
    assert "-0.0" not in str(found.parts)  # as it would be logged


def test_range():
    assert score(ONE, TWO).reward == 6
    fails = "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(Box().size(), -1)"
    worst = score(*[ADD + SIZE + DOUBLE + AREA] * 2, tests=fails)
    assert (worst.reward, worst.parts["doubled"]) == (1, -1)  # what is doubled was also written
    two_write = [["add"], ["size"]]  # the bound itself: neither agent writes its own, and three others write both
    texts = ["", "", ADD + SIZE, ADD + SIZE]
    answer = ClassAnswer(texts, [*two_write, ["double"], ["area"]], "Box", BASE, fails, ["Box"])
    assert class_rewards([answer])[0].reward == -0.5


FIRST_TRY = f"{DOUBLE}\ndef add(self, x):\n    return self.items + [x]\n"


@pytest.mark.parametrize("call", ["self.count()", "getattr(self, 'count')()"])
def test_what_an_asked_method_needs_must_not_fail(call):
    code = f"import absent\ndef size(self): return {call}\ndef count(self): return absent.total(self.items)\n"
    found = score(ONE, code + AREA)
    assert found.findings["passed"] == 0 and "No module named 'absent'" in found.findings["reason"]


CORRECTED = {
    "in one text": f"{FIRST_TRY}\n{ADD}",
    "in another block": f"```\n{FIRST_TRY}```\nThis changes nothing. Better:\n```\n{ADD}```",
    "by setting an item": f"{FIRST_TRY}\ndef add(self, x):\n    self.items[len(self.items):] = [x]\n",
    "by setting an attribute": f"{FIRST_TRY}\ndef add(self, x):\n    self.items = self.items + [x]\n",
    "and explained": f"{FIRST_TRY}\n{ADD}\ndef add(self, x):\n    n = len(self.items)\n",
}


@pytest.mark.parametrize("how", CORRECTED)
def test_a_corrected_method_need_not_return_anything(how):
    assert score(CORRECTED[how], TWO).reward == 6


FORMS = {
    "class around it": "class Box:\n    def size(self):\n        return len(self.items)\n",
    "indented": "    def size(self):\n        return len(self.items)\n",
    "indented, a comment first": "    def size(self):\n        # How many\n        return len(self.items)\n",
    "fence": "Here:\n```python\ndef size(self):\n    return len(self.items)\n```\nDone.",
    "two fences": "```\nimport os\n```\nand\n```python\ndef size(self):\n    return len(self.items)\n```",
    "first line not indented": "def size(self):\n        return self.n()\n\n"
    "    def n(self):\n        return len(self.items)",
    "first line not indented, prose": "def size(self):\n        return self.n()\n\n"
    "    def n(self):\n        return len(self.items)\n\nThe method doesn't (fail.",
    "first line not indented, an example": "@staticmethod\n    def n(x):\n        return len(x)\n\n"
    "    def size(self):\n        return self.n(self.items)\n\nbox = Box()\nprint(box.size())\n\nIt's (done.",
    "imports not indented": "import operator\nfrom math import inf\n\n    def size(self):\n        # How many\n"
    "        return min(inf, self.n())\n\n    def n(self):\n        return operator.length_hint(self.items)",
    "imports not indented, other ends of lines": "import operator\r\n\r\n    def size(self):\r\n"
    "        return self.n()\r\n\r\n    def n(self):\r\n        return operator.length_hint(self.items)",
    "comments not indented": "# How many\n    def size(self):\n        return self.n()\n\n"
    "# A further method\n# of one line\n    def n(self): return len(self.items)",
    "blank line, first line not indented": "```python\n\ndef size(self):\n        return self.n()\n\n"
    "    def n(self):\n        return len(self.items)\n```",
    "blocks of different indentation": "```\nimport operator\n```\n```\n    def size(self):\n"
    "        return operator.length_hint(self.items)\n```",
    "a shell's block": "```sh\n$ python box.py\n```\n```python\ndef size(self):\n    return len(self.items)\n```",
    "a session": "```\n>>> Box().size()\n0\n```\n```python\ndef size(self):\n    return len(self.items)\n```",
    "an example of use": "```\ndef size(self):\n    return len(self.items)\n```\n```\nprint(box.size())\n```",
    "tests apart": "```\ndef size(self):\n    return len(self.items)\n```\nTests:\n```\nimport absent\n"
    "from solution import Box\n\n@absent.mark\ndef test_size():\n    assert Box().size() == 0\n```",
    "what it needs apart": "```\nimport operator\nONE = 1\ndef n(x):\n    return ONE * operator.length_hint(x)\n```\n"
    "```\ndef size(self):\n    return self.n()\n```\n```\ndef n(self):\n    return n(self.items)\n```",
    "byte order mark": "\ufeffdef size(self):\n    return len(self.items)\n",
    "assignment in the class": "class Box:\n    one: int = 1\n    def size(self): return self.one * len(self.items)",
    "default from the class": "class Box:\n    one = 1\n    def size(self, by=one): return by * len(self.items)",
    "another name": "class Box:\n    def count(self): return len(self.items)\n    number = count\n"
    "    def size(self): return self.number()",
    "a class in the class that says :=": "class Box:\n    class C:\n        def n(self, x): return (y := len(x))\n"
    "    def size(self): return self.C().n(self.items)",
    "assigned in the class": "class Box:\n    size = lambda self: len(self.items)",
    "import": "import operator\ndef size(self):\n    return operator.length_hint(self.items)",
    "import after thoughts, the method indented": "<think>Easy.</think>\nimport operator\n\n    def size(self):\n"
    "        return operator.length_hint(self.items)",
    "import named as a method": "from operator import add\ndef size(self): return add(0, len(self.items))",
    "import of the future": "from __future__ import annotations\ndef size(self) -> No:\n    return len(self.items)",
    "constant": "ONE = 1\ndef size(self):\n    return ONE * len(self.items)",
    "constant apart": "```\nONE = 1\nn = absent(ONE)\n```\n```\ndef size(self):\n    n = len(self.items)\n"
    "    return ONE * n\n```",
    "further function": "def count(x):\n    return len(x)\n\ndef size(self):\n    return count(self.items)",
    "further method": "def count(self):\n    return len(self.items)\n\ndef size(self):\n    return self.count()",
    "further static method": "@staticmethod\ndef n(x): return len(x)\ndef size(self):\n    return self.n(self.items)",
    "class in the class": "class Box:\n    class C:\n        def n(self, x): return len(x)\n"
    "    def size(self): return self.C().n(self.items)",
    "another class": "class C:\n    def n(self, x): return len(x)\ndef size(self):\n    return C().n(self.items)",
    "twice": "def size(self):\n    return 77\ndef size(self):\n    return len(self.items)",
    "parameters with names of functions": "def size(self, vars=0, *, modules=0):\n    return len(self.items)\n\n"
    "def further(globals):\n    pass",
    "a part explained": "```\ndef size(self):\n    return len(self.items)\n```\nIt begins with\n"
    "```\ndef size(self):\n    n = 0\n```",
    "a branch explained": "```\ndef size(self):\n    if not self.items:\n        return 0\n    else:\n"
    "        return len(self.items)\n```\nFirst\n```\ndef size(self):\n    if not self.items:\n        return 0\n```",
    "a try explained": "```\ndef size(self):\n    try:\n        n = len(self.items)\n        return n\n"
    "    except TypeError:\n        return 0\n```\nIt has\n"
    "```\ntry:\n    n = len(self.items)\n    return n\nexcept TypeError:\n    return 0\n```",
    "the end explained": "```\ndef size(self):\n    return len(self.items)\n```\nAt its end:\n"
    "```\ndef size(self):\n    if self.items:\n        ...\n    return n\n```",
    "comments in what others write": "```\nclass Box:\n    def add(self, x):\n        # As given\n\n"
    "    def size(self):\n        return len(self.items)\n\n    def area(self, r):\n        # Not asked for\n```",
    "its constructor too": "class Box:\n    def __init__(self): 1 / 0\n    def size(self): return len(self.items)",
    "redefined constant": "def Box(): pass\ndef size(self): return len(self.items)",
    "decorated": "import functools\n@functools.wraps(len)\ndef size(self):\n    return len(self.items)",
    "an example": "def size(self): return len(self.items)\nbox = Box(1, 2)\nn = box.size()\nprint(n / 0)",
    "prose around": "The methods:\n\ndef size(self):\n    return len(self.items)\n\nThis counts the box's items.",
    "an example that fails": "python\ndef n(x): return x\ndef size(self): return n(len(self.items))\nassert n(1) == 2",
    "import of the class": "from box import Box\ndef size(self): return len(self.items)",
    "an example in a function": "def size(self): return len(self.items)\ndef main(): Box(1, 2)\nmain()",
    "an example in a further function": "def size(self): return len(self.items)\ndef main(): run()\n"
    "def run(): Box(1, 2)\nmain()",
    "an example in a loop": "def size(self): return len(self.items)\nfor x in Box(1, 2).items:\n    x.size()",
    "guarded import": "try:\n    import absent as o\nexcept ImportError:\n    import operator as o\n"
    "def size(self): return o.length_hint(self.items)",
    "table filled by a loop": "T = {}\nfor i in range(9):\n    T[i] = i\ndef size(self): return T[len(self.items)]",
    "table filled by a call": "T = []\nT.extend(range(9))\ndef size(self): return T[len(self.items)]",
    "expression": "import re\nEACH = re.compile('[0-9]')\ndef size(self): return len(EACH.findall(str(self.items)))",
    "named tuple": "import collections\nN = collections.namedtuple('N', 'n')\n"
    "def size(self): return N(len(self.items)).n",
    "enumeration": "import enum\nclass E(enum.Enum):\n    A = 1\nONE = E.A.value\n"
    "def size(self): return ONE * len(self.items)",
    "data class": "import dataclasses\n@dataclasses.dataclass\nclass D:\n    n: int\nONE = D(1)\n"
    "def size(self): return ONE.n * len(self.items)",
    "class that knows the class": "class N:\n    def n(self, box): return isinstance(box, Box) and len(box.items)\n"
    "def size(self): return N().n(self)",
    "types without their import": "def size(self, other: Box = None) -> Optional[List[int]]: return len(self.items)",
    "types that are not there": "import absent as no\n"
    "def size(self, by: no.N = 1) -> no.N: return by * len(self.items)",
    "import of what is not there, for a further method": "import absent\n"
    "def size(self): return len(self.items)\ndef plot(self): return absent.draw(self.items)",
    "import of what is not there": "import nothing_of_this_name\ndef size(self): return len(self.items)",
    "a test's exit": "import unittest\ndef size(self): return len(self.items)\nunittest.main()",
    "an example's input": "def size(self): return len(self.items)\nn = int(input())",
    "assigned to the class too": "def size(self): return len(self.items)\nBox.size = size",
    "reads its own attributes": "def size(self): return len(vars(self)['items'])",
    "nested": "def size(self):\n    def f():\n        return len(self.items)\n    return f()",
    "a decorator in the class": "class Box:\n    def same(f):\n        return f\n"
    "    @same\n    def size(self): return len(self.items)",
    "a default of the class": "class Box:\n    class Start:\n        n = 0\n"
    "    def zero(): return 0\n    NONE = zero()\n"
    "    def size(self, start=Start.n, more=NONE, most=zero()): return len(self.items) + start + more + most",
    "a function of self": "def n(self):\n    return len(self.items)\ndef size(self): return n(self)",
    "a function of self, set": "def n(self):\n    return len(self.items)\nBox.size = n",
    "attributes that read methods": "class Box:\n    def size(self): return len(self.items)\n"
    "    def check(self, f=size): return f(self)\n    both = check\n    def twice(self, g=check): return g(self)",
    "a built-in's name in another block": "```\nlen = sum([1, 2])\n```\n"
    "```\ndef size(self):\n    return len(self.items)\n```",
    "a method that is a name, too": "def n(self):\n    return len(self.items)\n"
    "def size(self):\n    n = 0\n    return n + self.n()",
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_an_answer(name):
    found = score(ONE, FORMS[name])
    assert found.findings["written"] == [[True, True], [True, False]]
    assert found.findings["passed"] == 4, found


def test_a_test_case_may_set_up_its_class():
    own, shared = (
        "    def setUp(self): self.box = Box()\n",
        "    @classmethod\n    def setUpClass(cls): cls.box = Box()\n",
    )
    tests = TESTS.replace(own, shared)
    assert tests != TESTS and score(ONE, TWO, tests=tests).reward == 6


def test_tests_have_their_setup_and_a_skipped_one_is_not_passed():
    assert score(ONE, TWO, tests=TESTS.replace("import unittest", ""), setup="import unittest").reward == 6
    skipped = TESTS.replace("    def test_init", "    @unittest.skip('not here')\n    def test_init")
    assert score(ONE, TWO, tests=skipped).parts["tests"] == pytest.approx(4 * 4 / 5)


def test_a_method_of_ones_own_is_there_for_the_others():
    """Though its name is also that of a variable."""
    two = "def total(self):\n    return len(self.items)\n"
    two += "def size(self):\n    total = len(self.items)\n    return total\n"
    one = ADD.replace("self.items.append(x)", "self.total(), self.items.append(x)") + DOUBLE
    assert score(one, two + AREA).reward == 6


def test_what_is_added_may_read_the_skeletons_attributes():
    base = BASE.replace('"""Numbers."""', "MOST = 0")
    assert score(ONE, "def n(self, start=MOST): return start\n" + TWO, base=base).reward == 6


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    "way",
    [
        "{}.__code__ = (lambda self, r: 3.14159).__code__",
        "x = setattr({}, '__code__', (lambda self, r: 3.14159).__code__)",
    ],
)
def test_a_part_of_anothers_method_is_not_ones_own(inside, way):
    one, wrong = ONE, AREA.replace("math.pi", "0")
    line = way.format("area" if inside else "Box.area")
    one = "class Box:\n" + textwrap.indent(one + line, "    ") if inside else one + line
    found = score(one, SIZE + wrong)
    assert found.parts["tests"] == pytest.approx(3.2) and found.parts["doubled"] < 0


def test_a_property_may_be_made_behind_its_method():
    base, tests = (
        BASE.replace("def size", "@property\n    def size"),
        TESTS.replace("self.box.size()", "self.box.size"),
    )
    for two in (SIZE, "@property\n" + SIZE, SIZE + "size = property(size)\n"):
        for form in (two + AREA, "class Box:\n" + textwrap.indent(two + AREA, "    ")):
            assert score(ONE, form, base=base, tests=tests).reward == 6, form


@pytest.mark.parametrize("getter", ["return 2 * self.items[0]", "pass"])
def test_a_property_keeps_its_setter(getter):
    base = BASE.replace("def size", "@property\n    def size")
    tests = "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        box = Box()\n"
    tests += "        box.size = 3\n        self.assertEqual(box.items, [3])"
    setter = "@size.setter\ndef size(self, n):\n    self.items = [n]\n"
    for decorator in "", "@property\n":
        two = f"def size(self): 1 / 0\n{decorator}def size(self):\n    {getter}\n{setter}{AREA}"
        assert score(ONE, two, base=base, tests=tests).reward == 6
    # Another agent's stays.
    two = "@property\ndef size(self): return 7\n" + AREA
    found = score(
        ONE + setter, two, base=base, tests=tests.replace("box.size = 3", "").replace("items, [3]", "size, 7")
    )
    assert (found.parts["tests"], found.parts["doubled"]) == (4, -0.25)


def test_a_method_dispatches_by_type():
    one = "from functools import singledispatchmethod\n@singledispatchmethod\n"
    one += "def add(self, x):\n    raise NotImplementedError\n"
    one += "@add.register\ndef _(self, x: int):\n    self.items.append(x)\n" + DOUBLE
    assert score(one, TWO).reward == 6
    idle = score(one.replace("self.items.append(x)", "pass"), TWO)
    assert idle.parts["written"] == 1.5


def test_a_draft_of_a_method_is_left_out():
    draft = "def size(self) -> Absent:\n    return 7\n@absent\ndef area(self, r): return 7\n"
    assert score(ONE, f"```\n{draft}```\n```\n{TWO}```").reward == 6


NEEDED_AT_ONCE = {  # while the class is made
    "constant": "ONE = 1\ndef size(self, by=ONE): return by * len(self.items)",
    "constant of the skeleton's": "TEN = LIMIT\ndef size(self, by=TEN): return by * len(self.items) // 10",
    "enumeration": "import enum\nclass E(enum.Enum):\n    A = 1\n"
    "def size(self, e: E = E.A): return e.value * len(self.items)",
    "decorator": "import functools\ndef same(f):\n    @functools.wraps(f)\n    def g(*a):\n        return f(*a)\n"
    "    return g\n@same\ndef size(self): return len(self.items)",
    "class in an annotation": "class C: pass\ndef size(self, c: C = None): return len(self.items)",
    "alias": "from typing import Any\nV = Any\ndef size(self) -> V: return len(self.items)",
    "named tuple": "from collections import namedtuple\nN = namedtuple('N', 'n')\n"
    "def size(self) -> N: return N(len(self.items)).n",
    "type variable": "from typing import TypeVar\nT = TypeVar('T')\ndef size(self: T) -> T: return len(self.items)",
    "table filled by a loop": "T = {}\nfor i in range(9):\n    T[i] = i\n"
    "def size(self, one=T[1]): return one * len(self.items)",
    "guarded import": "try:\n    from absent import x\nexcept ImportError:\n    x = 1\n"
    "def size(self, by=x): return by * len(self.items)",
    "in the class": "ONE = 1\nclass Box:\n    one = ONE\n    def size(self): return self.one * len(self.items)",
    "beside one that knows the class": "def made(): return Box()\nONE = 1\n"
    "def size(self, by=ONE): return by * len(self.items) + len(made().items)",
    "beside one that reaches further": "def names(x): return vars(x)\nONE = 1\nLIMIT = ONE\n"
    "def size(self, by=ONE): return by * LIMIT * len(names(self)['items'])",
}


@pytest.mark.parametrize("name", NEEDED_AT_ONCE)
def test_what_the_class_needs_while_it_is_made(name):
    assert score(ONE, NEEDED_AT_ONCE[name] + "\n" + AREA).reward == 6


LEN = "lambda self: len(self.items)"
UNSAID = {  # by the agent that has neither size nor area to write, in what the class evaluates while it is made
    "default": f"def more(self, x=(size := {LEN})): pass",
    "default that reaches the class": f"def more(self, x=locals().update(size={LEN})): pass",
    "annotation": f"def more(self, x: (size := {LEN})): pass",
    "decorator": f"@[size := {LEN}, lambda f: f][1]\ndef more(self): pass",
    "base of a class": f"class Box:\n    class More((size := {LEN}) and object): pass",
    "body of a class": f"class Box:\n    class More:\n        import sys\n"
    f"        sys._getframe(1).f_locals['size'] = {LEN}",
    "its own method": f"class Box:\n    double = (locals().update(size={LEN}), staticmethod(lambda x: 2 * x))[1]",
}


@pytest.mark.parametrize("name", UNSAID)
def test_a_method_is_not_written_beside_another(name):
    for two, passed in ("", 3), (TWO.replace("len(", "7 + len("), 4):
        assert score(ONE + UNSAID[name], two).findings["passed"] == passed


SMUGGLED = {  # into the class, while it is made, by the agent that has neither size nor area to write
    "by a decorator's frame": f"import sys\ndef d(f):\n    sys._getframe(1).f_locals['size'] = {LEN}\n    return f\n",
    "by a descriptor": f"class D:\n    def __set_name__(self, o, n): setattr(o, 'size', {LEN})\n"
    "class Box:\n    n = D()\n",
    "by a class that it inherits from": "class Mine:\n    def __getattribute__(self, name):\n"
    "        it = object.__getattribute__(self, name)\n"
    "        return (lambda: len(self.items)) if name == 'size' else it\nGiven = Mine\n",
    "by a class that it inherits from, in a branch": "class Mine:\n    def __getattribute__(self, name):\n"
    "        it = object.__getattribute__(self, name)\n"
    "        return (lambda: len(self.items)) if name == 'size' else it\nif 1:\n    Given = Mine\n",
    "by a builtin": "def classmethod(f): return lambda self, r: 3.14159 * r * r\n",
    "by a builtin of the module": "import builtins as b\nb.classmethod = lambda f: lambda self, r: 3.14159 * r * r\n",
    "by a builtin, later": "def d(f):\n    global classmethod\n"
    "    classmethod = lambda f: lambda self, r: 3.14159 * r * r\n    return f\n",
    "by a function's names": "def d(f):\n"
    "    d.__globals__['classmethod'] = lambda f: lambda self, r: 3.14159 * r * r\n    return f\n",
    "by the function that makes classes": "import builtins\nreal = builtins.__build_class__\n"
    f"def make(f, name, *a):\n    c = real(f, name, *a)\n    c.size = {LEN}\n    return c\n"
    "builtins.__build_class__ = make\n",
}


@pytest.mark.parametrize("name", SMUGGLED)
def test_nothing_before_the_class_writes_another_agents_methods(name):
    base = BASE.replace("class Box:", "class Given: pass\n\nclass Box(Given):")
    base = base.replace("    def area(", "    @classmethod\n    def area(")
    decorator = "@d\n@staticmethod\n" if "def d(" in SMUGGLED[name] else ""
    found = score(SMUGGLED[name] + ADD + decorator + DOUBLE, "", base=base)
    assert found.findings["passed"] <= 3 and found.parts["written"] == 1


TAKEOVERS = {  # of the class, with all methods in it, by the agent that has two of them to write
    "its name": "Box = Whole",
    "its name, among others": "Box, Box.more = Whole, 0",
    "its name, in a branch": "if 1:\n    Box = Box.more = Whole",
    "its name, in a function": "def take():\n    global Box\n    Box = Whole\n_ = take()",
    "its name, in the module": "import sys\nsetattr(sys.modules[__name__], 'Box', Whole)",
    "an attribute of the module": "import sys\nsys.modules[__name__].Box = Whole",
    "globals": "globals()['Box'] = Whole",
    "globals, in a value": "Box.more = globals().update(Box=Whole)",
    "exec": "exec('Box = Whole')",
    "a loop over its methods": "for k, v in vars(Whole).items():\n    if k[0] != '_': setattr(Box, k, v)",
    "a loop over names": "for name in ('size', 'area'):\n    setattr(Box, name, getattr(Whole, name))",
    "a loop that sets more": "for name in ('size', 'area'):\n    Box.more = 0\n"
    "    setattr(Box, name, getattr(Whole, name))",
    "the type's setattr": "type.__setattr__(Box, 'size', Whole.size); type.__setattr__(Box, 'area', Whole.area)",
    "an import": "if 1:\n    from candidate import Whole as Box",
    "an import in a function": "def take():\n    global Box\n    from candidate import Whole as Box\ntake()",
    "a keyword": "import sys\nsys.modules[__name__].__dict__.update(Box=Whole)",
    "a keyword, by a function's names": "def take(): pass\ntake.__globals__.update(Box=Whole)",
    "another name": "Other = Box\nOther.size, Other.area = Whole.size, Whole.area",
}


@pytest.mark.parametrize("name", TAKEOVERS)
def test_no_agent_writes_the_whole_class_by_another_name(name):
    whole = "class Whole:\n    def __init__(self): self.items = []\n"
    whole += textwrap.indent(ADD + SIZE + "@staticmethod\n" + DOUBLE + AREA, "    ")
    found = score(ONE + whole + TAKEOVERS[name], "")
    assert (found.findings["passed"], found.parts["written"], found.findings["error"]) == (3, 1, "")


def test_a_static_method_stays_one_and_may_say_so_itself():
    tests = TESTS.replace("Box.double(4)", "Box().double(4)")  # on an instance it matters
    for decorator in "", "@staticmethod\n":
        assert score(ADD + decorator + DOUBLE, TWO, tests=tests).reward == 6
    assert score(ADD + "@classmethod\ndef double(cls, x):\n    return 2 * x\n", TWO, tests=tests).reward == 6
    itself = ADD + "def double(self, x):\n    return 2 * x\n"  # no static method
    assert score(itself, TWO, tests=tests).reward == 6
    assert score(itself, TWO).findings["passed"] == 4
    base = BASE.replace("@staticmethod", "@classmethod").replace("def double(x)", "def double(cls, x)")
    assert score(itself, TWO, base=base).reward == 6  # a class method is one whatever its first argument is called


def test_the_text_of_an_agent_without_methods_is_not_read():
    found = score(ADD, SIZE, DOUBLE, AREA, "(" * 50 + ADD, "no Python")
    assert found.reward == 6


def test_hostile_text_is_a_low_reward_and_no_error():
    texts = ["\0", "\ud800", "(" * 100_000, "x" + ".a" * 200_000, "-" * 300_000 + "1", "#" * 2_000_000, "`" * 5000]
    found = [score(ONE, text) for text in texts[:-1]]
    assert [one.reward for one in found] == [0] * 6
    assert all(list(map(len, one.findings["written"])) == [2, 2] for one in found)  # which the next prompt is made of
    equal = """
class Any(int):
    def __eq__(self, other): return True
def size(self): return Any()
def area(self, r): return Any()
"""
    assert score(ONE, equal).parts["tests"] == pytest.approx(4 * 3 / 5)
    ends = "import os\ndef size(self): os._exit(0)\ndef area(self, r): raise SystemExit"
    # add, then the end: of the tests behind it none passes
    assert score(ONE, ends).parts["passed_share"] == 1 / 5
    assert score(ONE, TWO).reward == 6


def test_examples_lead_to_an_assert():
    examples = ["box = Box()\nbox.add(4)\nassert box.size() == 1", "assert Box.double(2) == 4"]
    assert score(ONE, TWO, examples=examples).findings["examples"] == []
    wrong = score(ONE, TWO.replace("len(", "77 + len("), examples=examples)
    assert wrong.findings["examples"] == [(examples[0], "returned 78")]
    given_back = score(ONE, "def size(self): return self", examples=examples)
    assert given_back.findings["examples"][0][1] == "returned <object>"  # without an address: prompts are repeatable


# The environment


@pytest.mark.parametrize("num_agents", [1, 2, 3, 4, 5])
def test_agents_take_turns(num_agents):
    env = make("classeval", num_agents)
    task = env.tasks("train")[0]
    prompts = env.observe(task, [])
    assert len(prompts) == num_agents and all(task["problem"].strip() in prompt for prompt in prompts)
    asked = [p.split("Write these methods of ")[1].split(": ")[1].split(".")[0] for p in prompts if "Write these" in p]
    shares = [names.split(", ") for names in asked]
    dealt = [name for turn in range(4) for share in shares for name in share[turn : turn + 1]]
    assert dealt == task["methods"] == ["add", "keeps", "kept", "result"]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    demos = env.demonstrations()[:num_agents]
    assert [d["prompt"] for d in demos] == prompts
    step = env.step([(task, [], [d["completion"] for d in demos])])[0]
    assert step.parts["all_passed"] == 1 and step.parts["written"] == 2 and step.done


def test_the_methods_to_write_are_those_without_a_body(capsys):
    row = {"task_id": "x", "skeleton": BASE, "class_name": "Box", "test": TESTS}
    solution = BASE.replace('"""Keeps x."""', "self.items.append(x)")
    assert _task({**row, "solution_code": solution}, "x")["methods"] == ["add"]  # the reference leaves the others so
    solution = "class Box:\n" + "".join(f"    def {name}(self): return 1\n" for name in METHODS)
    task = _task({**row, "solution_code": solution}, "x")
    assert task["methods"] == METHODS and task["setup"] == "import math" and task["names"] == ["Box"]
    # What only the solution imports, agents who are to write methods cannot.
    task = _task({**row, "solution_code": f"import sys as s\nimport math\n{solution}"}, "x")
    for text in task["problem"], task["base"], task["setup"]:
        assert text.startswith("import sys as s\n") and text.count("import math") == 1
    # A property and its setter are one method, and one agent's.
    setter = "    @property\n    def {0}(self):{1}\n    @{0}.setter\n    def {0}(self, x):{1}\n".format
    pair = {"skeleton": BASE + setter("width", " pass"), "solution_code": solution + setter("width", " return 1")}
    assert _task({**row, **pair}, "x")["methods"] == [*METHODS, "width"]
    # A skeleton that does not parse: the solution's, emptied but for the constructor.
    made = solution.replace("class Box:", "class Box:\n    def __init__(self): self.items = []")
    cut = {**row, "skeleton": BASE.replace("class Box:", "class Box"), "solution_code": made}
    assert capsys.readouterr().out == ""
    task = _task(cut, "x")
    assert "--dataset x: the skeleton of x is not Python" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"task x .*the skeleton, which agents read, does not name add"):
        _task({**cut, "skeleton": cut["skeleton"].replace("def add(", "def ")}, "x")
    assert task["methods"] == METHODS and "return" not in task["base"] and "self.items = []" in task["base"]
    for broken in {"test": "class ("}, {"class_name": "Bag"}, {"solution_code": "def ("}, {"skeleton": solution}:
        with pytest.raises(ValueError, match=r"--dataset here: task x .*fix it"):
            _task({**row, "solution_code": solution, **broken}, "here")


def test_sample_demonstrations_pass_and_some_write_too_much():
    env = make("classeval")
    demos, tasks = env.demonstrations(), env.tasks("train")[:60]
    steps = env.step([(t, [], [d["completion"] for d in demos[2 * i : 2 * i + 2]]) for i, t in enumerate(tasks)])
    assert all(step.done for step in steps)
    assert {step.reward for step in steps} == {5.75, 6.0}
    assert 0.1 < sum(step.reward < 6 for step in steps) / len(steps) < 0.5


@pytest.mark.parametrize("num_agents", [1, 2, 5])
def test_demonstrations_of_the_second_turn_correct_what_failed(num_agents, monkeypatch):
    monkeypatch.setitem(classeval.SAMPLE_COUNTS, "train", 26)
    env = make("classeval", num_agents, 2)
    tasks, demos = {task["problem"].strip(): task for task in env.tasks("train")}, env.demonstrations()
    groups = [demos[i : i + num_agents] for i in range(0, len(demos), num_agents)]
    second = [group for group in groups if "Your answer:" in group[0]["prompt"]]
    assert [group for group in groups if group not in second] == [
        make("classeval", num_agents).demonstrations()[i : i + num_agents]
        for i in range(0, 26 * num_agents, num_agents)
    ]
    assert 13 < len(second) <= 26  # of some, the wrong answer passes as well
    branches, wrong = [], []
    for group in second:
        task = tasks[group[0]["prompt"].split("\n\nWrite these ")[0]]
        writers = [demo for demo in group if "Your answer:" in demo["prompt"]]
        assert len(writers) == min(num_agents, 4)
        wrong.append(
            sum(
                demo["prompt"].split("Your answer:\n")[1].split("\n\nAll ")[0] != demo["completion"].strip()
                for demo in writers
            )
        )
        for demo in writers:
            assert "All your methods were found." in demo["prompt"] and "of 8 tests passed." in demo["prompt"]
        branches.append((task, [], [demo["completion"] for demo in group]))
    assert set(wrong) == {1}  # one agent had answered for another class
    assert all(step.done for step in env.step(branches))


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_sample_references_pass_with_their_examples_and_stubs_do_not(split):
    env = make("classeval", 1, seed=3)
    tasks = env.tasks(split)[:20]
    steps = env.step([(task, [], [task["solution"]]) for task in tasks] + [(task, [], ["x = 1"]) for task in tasks])
    assert [step.reward for step in steps[:20]] == [6.0] * 20
    assert all(step.reward == 0 for step in steps[20:])
    assert all(task["examples"] and not step.feedback["examples"] for task, step in zip(tasks, steps))
    # A method that returns the same whatever it is asked does not pass its own tests.
    constant = "".join(f"def {m}(self, *x):\n    return {{}}\n" for m in tasks[0]["methods"])
    steps = env.step([(task, [], [constant.replace("{}", v)]) for task in tasks for v in ("True", "0", "[]")])
    assert max(step.parts["passed_share"] for step in steps) < 0.5


def test_sample_classes_are_disjoint_by_composition():
    def compositions(split, count, seed):
        return {row["class_name"] for row in samples.class_tasks(split, count, seed)}

    train, other = compositions("train", 400, 0), compositions("test", 100, 1) | compositions("validation", 100, 1)
    assert len(train) > 150 and len(other) > 80 and not train & other
    assert samples.class_tasks("test", 9, 3) == samples.class_tasks("test", 9, 3) != samples.class_tasks("test", 9, 4)
    with pytest.raises(ValueError, match="split"):
        samples.class_tasks("dev", 1, 0)


@pytest.mark.parametrize("feedback", ["plain", "level"])
def test_feedback_reaches_the_next_prompt_and_shows_no_test(feedback):
    env = make("classeval", 2, 2, feedback=feedback)
    task = env.tasks("train")[0]
    secrets = [line.split("assert")[1] for line in task["tests"].splitlines() if "self.assert" in line]
    secrets += [line.split("c.items = ")[1] for line in task["tests"].splitlines() if "c.items = [" in line[:-1]]
    one = "def add(self, x):\n    return 'mine'\n"
    two = "def result(self):\n    raise KeyError('told')\n" + one
    step = env.step([(task, [], [one, two])])[0]
    assert not step.done
    prompts = env.observe(task, [step])
    for prompt, text, missing in zip(prompts, (one, two), ("kept", "keeps")):
        assert prompt.startswith(env.observe(task, [])[0].split("\n\nWrite")[0])
        assert text.strip() in prompt and "again, better" in prompt
        known = prompt.replace(task["problem"].strip(), "")
        assert not any(secret in known for secret in secrets if secret != "[]")
        assert (f"Not found: {missing}." in prompt) == (feedback == "level")
        assert ("Written by more than one agent: add." in prompt) == (feedback == "level")
        assert ("0 of 8 tests passed." in prompt) == (feedback == "level")
        assert ("fails: raised KeyError: 'told'." in prompt) == (feedback == "level")
    assert "raise KeyError" not in prompts[0]
    assert env.observe(task, [step, step])[0].count("Your answer:") == 2
    broken = env.observe(task, env.step([(task, [], [one, "def 1"])]))
    assert ("The answer of another agent is not Python." in broken[0]) == (feedback == "level")
    assert ("Your answer is not Python: invalid syntax (line 1)." in broken[1]) == (feedback == "level")


def test_arguments_that_make_no_sense():
    with pytest.raises(ValueError, match="--env-kwargs feedback"):
        make("classeval", feedback="loud")
    with pytest.raises(ValueError, match="--dataset"):
        make("classeval").tasks("valid")


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_what_the_reference_cannot_pass_is_left_out_and_named(tmp_path, capsys):
    rows = [{**row, "task_id": f"ClassEval_{i}"} for i, row in enumerate(samples.class_tasks("train", 100, 1))]
    rows[3]["solution_code"] = "import tutti_absent_package\n" + rows[3]["solution_code"]
    rows[5]["solution_code"] = rows[5]["solution_code"].replace(
        "def add(self, x):", "def add(self, x):\n        x += 1"
    )
    rows[7]["skeleton"] = rows[7]["skeleton"].replace("c.items = [", "c.items = [99, ")  # an example that is wrong
    path = write_rows(tmp_path / "all.jsonl", rows)
    env = make("classeval", dataset=path)
    ids = {split: [int(task["task_id"].split("_")[1]) for task in env.tasks(split)] for split in env.splits}
    assert ids["train"] == [i for i in range(66) if i not in (3, 5)]
    assert (ids["test"], ids["validation"]) == ([*range(66, 82)], [*range(82, 100)])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "left out" in line)
    assert "ClassEval_3 (" in line and "tutti_absent_package" in line and "ClassEval_5 (" in line
    assert "ClassEval_7" not in line
    assert [bool(task["examples"]) for task in env.tasks("train")[2:7]] == [True] * 3 + [False] + [True]
    few = write_rows(tmp_path / "few.jsonl", [rows[3], rows[70]])
    with pytest.raises(ValueError, match=r"--dataset .* no reference solution of the split train"):
        make("classeval", dataset=few)


def test_hub_asks_for_the_whole_set(monkeypatch):
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        rows = [{**row, "task_id": f"ClassEval_{60 + i}"} for i, row in enumerate(samples.class_tasks("train", 12, 1))]
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    env = make("classeval", dataset="hub")
    assert asked == [(("FudanSELab/ClassEval", None), {"split": "test"})]
    assert [len(env.tasks(split)) for split in ("train", "validation", "test")] == [6, 0, 6]


def test_references_run_once_in_a_process(tmp_path, monkeypatch):
    import envs.classeval

    path = write_rows(tmp_path / "rows.jsonl", samples.class_tasks("train", 20, 77))
    ran = []
    run_classes = envs.classeval.run_classes
    monkeypatch.setattr(
        envs.classeval, "run_classes", lambda answers, *a: ran.append(len(answers)) or run_classes(answers, *a)
    )
    assert make("classeval", dataset=path).tasks("test") == make("classeval", dataset=path).tasks("test")
    assert sum(ran) == 20
    make("classeval")
    assert sum(ran) == 20  # sample tasks are right by construction


def test_an_example_that_spoils_the_tests_is_dropped(tmp_path):
    base = 'class Log:\n    def write(self):\n        """Once.\n        >>> Log().write()\n        1\n        """\n'
    row = {
        "skeleton": base,
        "class_name": "Log",
        "solution_code": "class Log:\n    def write(self):\n        open('log', 'x').close()\n        return 1\n",
        "test": "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(Log().write(), 1)",
    }
    rows = [{**row, "task_id": "a"}, {**row, "task_id": "b"}]
    env = make("classeval", 1, dataset=write_rows(tmp_path / "rows.jsonl", rows))
    assert env.tasks("train")[0]["examples"] == []
    assert env.step([(env.tasks("test")[0], [], [row["solution_code"]])])[0].reward == 6


# The public set


@pytest.fixture(scope="module")
def public():
    if not os.path.exists(DATA):
        pytest.skip("no data folder beside the repository")
    with open(DATA) as file:
        return [json.loads(line) for line in file]


# They import packages that are not here; 48 wants a certain host.
IMPOSSIBLE = {28, 30, 34, 38, 44, 48, 52}


def test_reference_solutions_of_the_public_set(public):
    env = make("classeval", dataset=DATA)
    possible = {row["task_id"] for row in public} - {f"ClassEval_{n}" for n in IMPOSSIBLE}
    tasks = [task for part in env.splits.values() for task in part]
    assert len(possible) == 43
    assert len({task["task_id"] for task in tasks} & possible) >= 0.8 * len(possible)
    # As two agents would give them: each its own methods.
    actions = []
    for task in tasks:
        tree = ast.parse(task["solution"])
        owner = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == task["class_name"])
        sources = {node.name: ast.unparse(node) for node in owner.body if isinstance(node, ast.FunctionDef)}
        actions.append(["\n\n".join(map(sources.get, task["methods"][i::2])) for i in (0, 1)])  # and no imports
    steps = env.step([(task, [], texts) for task, texts in zip(tasks, actions)])
    assert [task["task_id"] for task, step in zip(tasks, steps) if step.reward != 6] == []
    # The methods of both agents by turns differ in number by one at most, and none of the prompts is empty-handed.
    assert all("Write these methods" in prompt for task in tasks for prompt in env.observe(task, [])[:1])


def test_stubs_pass_few_tests_of_the_public_set(public):
    env = make("classeval", dataset=DATA)
    tasks = [task for part in env.splits.values() for task in part]
    steps = env.step([(task, [], ["x = None", ""]) for task in tasks])
    assert not any(step.done for step in steps)
    assert sum(step.parts["passed_share"] for step in steps) / len(steps) < 0.15
    assert all(step.parts["written"] == step.parts["doubled"] == 0 for step in steps)


@pytest.mark.parametrize(
    "tests",
    [
        "class TestBox(unittest.TestCase):\n    def test_size(self): self.assertEqual(Box().size(), 0)\n",
        "class TestBox(unittest.TestCase):\n    def setUp(self): self.box = Box()\nunittest.main()\n",
        "import absent\n@absent.fixture\ndef box(): return Box()\ndef test_size(box): assert not box.size()\n",
        "from absent import mark\n@mark.slow\ndef test_size():\n    assert True\n",
    ],
)
def test_tests_beside_the_methods_cost_nothing(tests):
    assert score(ONE, f"{TWO}\n{tests}").reward == 6
    assert score(f"So:\n```python\n{ONE}\n{tests}```", TWO).reward == 6
    # What a method reads has to work.
    needed = "import absent\n", "class C(No): pass\n"
    two = TWO.replace("return len", "if len(self.items) > 5:\n        absent, C\n    return len")
    assert [score(ONE, line + two).findings["passed"] for line in needed] == [0, 0]


def test_methods_between_prose():
    pieces = "First size:\n\n{}\nThen area:\n\n{}\nThat's all."
    assert score(ONE, pieces.format(SIZE, AREA)).reward == 6
    assert score(ONE, pieces.format(*(textwrap.indent(method, "    ") for method in (SIZE, AREA)))).reward == 6
    assert (
        score(ONE, pieces.format(f"import operator\n{SIZE.replace('len', 'operator.length_hint')}", AREA)).reward == 6
    )
    assert score(ONE, pieces.format(SIZE.replace("len(", "7 + len("), SIZE + AREA)).reward == 6
    assert score(ONE, pieces.format(f"```\n{SIZE}```", AREA)).reward == 6
    assert score(ONE, pieces.format(f"```\n{SIZE}{AREA}```", AREA.replace("math.pi", "7"))).reward == 6


@pytest.mark.parametrize("template", ["{}", "```python\n{}```", "The methods:\n\n{}"])
@pytest.mark.parametrize(
    "last", ["for x in [1]:\n    print(x)\n", "if Box:\n    Box(1, 2)\n", "def main():\n    pass\n"]
)
def test_what_stands_at_the_margin_behind_indented_methods(template, last):
    assert score(ONE, template.format(textwrap.indent(f"{SIZE}\n{AREA}", "    ") + "\n" + last)).reward == 6


def test_a_method_that_is_written_a_thousand_times_is_read_in_time():
    assert score(ONE, AREA + SIZE * 1000).reward == 6


def test_methods_that_end_in_a_comment():
    assert score(ONE, f"{SIZE}    # counts\n\nThen area:\n\n{AREA}").reward == 6


@pytest.mark.parametrize("name", ["len", "list"])
def test_a_further_method_named_as_a_built_in_takes_it_from_nobody(name):
    own = f"def {name}(self):\n    return {name}(self.items)\n"
    one = ONE.replace("self.items.append(x)", "self.items = list(self.items) + [x]")
    assert score(one, own + TWO).reward == 6


def test_methods_at_unequal_depths():
    deeper = textwrap.indent(AREA, "    ")
    for two in f"{SIZE}\n{deeper}", f"{textwrap.indent(SIZE, '    ')}\n{AREA}", f"class Box:\n{deeper}\n{deeper}":
        for template in "{}", "So:\n```python\n{}```\nThat's it.":
            found = score(ONE, template.format(two))
            assert (found.reward == 6) == ("def size" in two), two
    assert score(f"{ADD}\n{textwrap.indent(DOUBLE, '    ')}", TWO).reward == 6
    assert score(ADD + SIZE + DOUBLE + AREA.replace("def", "    def")[4:]).reward == 6
    three = SIZE + textwrap.indent(ADD + textwrap.indent(AREA, "    "), "    ")
    assert score(f"{DOUBLE}\n{three}").reward == 6
    # What the method reads is its own, and what is written beside it comes before what it holds.
    own = "def size(self):\n    def area(self, r):\n        return len(self.items) - r\n    return area(self, 0)\n"
    assert score(ONE, own).findings["written"] == [[True, True], [True, False]]
    assert score(ONE, AREA + SIZE + deeper.replace("math.pi", "7")).reward == 6
    # Of another agent's methods none is written so.
    assert score(ADD + deeper + DOUBLE, SIZE).parts["written"] == 1.5


@pytest.mark.parametrize("line", ['LOGGER = logging.getLogger("Box")', 'NAMES = {"Box": 1}'])
def test_the_name_of_the_class_may_be_a_text(line):
    name = line.split(" =")[0]
    two = f"import logging\n{line}\n" + SIZE.replace("return", f"{name}\n    return")
    assert score(ONE, two + AREA).reward == 6


@pytest.mark.parametrize(
    "example", ["list = [1, 2]\nbox = Box(list)", "len = 3", "for len in range(3):\n    print(len)"]
)
def test_an_example_that_is_named_as_a_built_in_takes_it_from_nobody(example):
    one = ONE.replace("self.items.append(x)", "self.items = list(self.items) + [x]")
    assert score(one, f"{TWO}\n{example}\n").reward == 6
    assert score(one, f"```\n{TWO}\n{example}\n```").reward == 6
    own = "all = {'more': 0}\n" + TWO.replace("len(", "all['more'] + len(")  # before the methods that read it
    assert score(one, own).reward == 6


def test_a_default_of_a_lambda_writes_no_other_method():
    one = ADD + f"class Box:\n    double = staticmethod(lambda x, y=(size := {LEN}): 2 * x)\n"
    found = score(one, TWO.replace("len(", "7 + len("))
    assert found.findings["passed"] <= 4 and found.findings["doubled"] == ["size"]
