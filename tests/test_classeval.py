"""The class reward: how a class is put together, what its levels are worth, how methods are read."""

import textwrap

import pytest

from rewards.classeval import DOUBLED, TESTS, WRITTEN, ClassAnswer, class_rewards

BASE = '''
import math
class Box:
    def __init__(self): self.items = []
    def add(self, x):
        """Keeps x."""
    def size(self): pass
    @staticmethod
    def double(x):
        """Twice x."""
        pass
    def area(self, r): raise NotImplementedError
'''
METHODS = ["add", "size", "double", "area"]
CASES = """
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
WHOLE = ADD + SIZE + DOUBLE + AREA


def scores(*answers, **options):
    """The Score of each answer, a list of texts."""
    dealt = [[METHODS[i :: len(texts)] for i in range(len(texts))] for texts in answers]
    return class_rewards(
        [ClassAnswer(list(t), names, "Box", BASE, CASES, ["Box"], **options) for t, names in zip(answers, dealt)]
    )


NO = "def add(self, x): pass\ndef double(x): return None", "def size(self):\n    'S.'\ndef area(self, r): ..."
RAISES = "def add(self, x): raise NotImplementedError('add')\n"
LEVELS = {  # name: (texts, written, tests, doubled); of five tests one passes without any method
    "all": ([ONE, TWO], 2, 4, 0),
    "one agent": ([WHOLE], 2, 4, 0),
    "nothing": (["", ""], 0, 0.8, 0),
    "stubs": (NO, 0, 0.8, 0),
    "a stub that raises": ([RAISES + DOUBLE, TWO], 1.5, 3.2, 0),
    "another agent's too": ([ONE + SIZE, TWO], 2, 4, -0.25),
    "all that both could": ([WHOLE, WHOLE], 2, 4, -1),
    "a stub of another agent's": ([ONE + "def size(self): pass", TWO], 2, 4, 0),
    "its own left to the other": ([ADD, TWO + DOUBLE], 1.5, 3.2, 0),
    "what was given": (["math = None\ndef __init__(self):\n    self.items = [7]\n" + ONE, TWO], 2, 4, 0),
    "no Python": ([ONE, "This adds numbers."], 0, 0, 0),
    "does not compile": ([ONE, TWO + "    break\n"], 0, 0, 0),
}


def test_each_level_is_worth_what_the_docstring_says():
    """Fails if a constant changes, a stub is paid for, or a level is paid for what does not compile."""
    assert (WRITTEN, TESTS, DOUBLED) == (2.0, 4.0, -1.0)
    for (name, row), score in zip(LEVELS.items(), scores(*[texts for texts, *_ in LEVELS.values()])):
        levels = [score.parts[key] for key in ("written", "tests", "doubled")]
        assert [*levels, score.reward] == pytest.approx([*row[1:], sum(row[1:])]), name
        assert (score.parts["all_passed"], score.parts["compiles"]) == (row[2] == 4, row[2] > 0), name
        assert "-0.0" not in str(score.parts)  # as it would be logged


def test_methods_are_doubled_once_whoever_writes_them():
    """Fails if methods are counted as doubled once a writer, or the share is of the wrong total."""
    fails = "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(Box().size(), -1)"
    texts = [ADD, "", ADD + SIZE, ADD + SIZE, ADD + SIZE]  # the last three write what is the first two's
    dealt = [["add"], ["size"], ["double"], ["area"], ["more"]]
    (score,) = class_rewards([ClassAnswer(texts, dealt, "Box", BASE, fails, ["Box"])])
    assert score.findings["doubled"] == ["add", "size"]
    assert (score.parts["written"], score.parts["doubled"], score.reward) == (0.4, -0.4, 0.0)


def test_each_agent_is_told_of_its_own_methods():
    """Fails if an agent is blamed for another's error, or an example is not run with all that comes before it."""
    good, broken = scores([ONE, SIZE], [ONE, "It adds."], examples=["b = Box()\nb.add(1)\nassert b.size() == 2"])
    assert good.findings["written"] == [[True, True], [True, False]]
    assert [what for _, what in good.findings["examples"]] == ["returned 1"]
    assert [bool(error) for error in broken.findings["errors"]] == [False, True]


START = "def __init__(self):\n    1 / 0\n"
COUNT = "def size(self):\n    return self.count()\n\ndef count(self):\n    return len(self.items)\n"
FORMS = {  # of size; the agent writes no area
    "alone": SIZE,
    "indented": textwrap.indent("# How many\n" + COUNT, "    "),
    "in the class": "class Box:\n" + textwrap.indent(COUNT, "    "),
    "with all else": "import math\n\n\nclass Box:\n" + textwrap.indent(f"{START}\n{COUNT}\n{RAISES}", "    "),
    "an example that fails": f"{SIZE}\nbox = Box(1, 2)\nn = box.size()\nprint(n / 0)\n",
    "import named as a method": "from operator import add\ndef size(self): return add(0, len(self.items))",
    "attribute": "class Box:\n    one: int = 1\n    def size(self, by=one): return by * len(self.items)",
    "static method": "class Box:\n    @staticmethod\n    def n(x): return len(x)\n"
    "    def size(self): return self.n(self.items)",
}


def test_methods_are_found_in_the_forms_that_models_write():
    """Fails, row by row, if a form of an answer earns nothing though it holds the method."""
    passed = [score.findings["passed"] for score in scores(*[[ONE, text] for text in FORMS.values()])]
    assert dict(zip(FORMS, passed)) == dict.fromkeys(FORMS, 4)
