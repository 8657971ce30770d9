"""The class reward: how a class is put together, what its levels are worth, how methods are read."""

import pytest
from test_sandbox import sections
from toy import rows_of

import envs
from rewards.classeval import ClassAnswer, class_rewards

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


def scores(*answers, **options):
    """The Score of each answer, a list of texts."""
    dealt = [[METHODS[i :: len(texts)] for i in range(len(texts))] for texts in answers]
    return class_rewards(
        [ClassAnswer(list(t), names, "Box", BASE, CASES, ["Box"], **options) for t, names in zip(answers, dealt)]
    )


# After each "## name: written, tests, doubled": the texts of the agents; of five tests one passes without any method
LEVELS = """
## all: 2, 4, 0
ONE
---
TWO
## one agent: 2, 4, 0
ONE
TWO
## each method in a block: 2, 4, 0
```python
ADD
```
```python
DOUBLE
```
---
First
```python
from math import pi
```
```python
class Box:
    def area(self, r): return pi * r * r
```
```python
class Box:
    def size(self): return len(self.items)
```
```python
class Box:
    def size(self): ...
```
```python
box = Box()
size = box.size()
```
## one corrected in a later block: 2, 4, 0
```
def add(self, x): self.items = [7]
DOUBLE
```
Better:
```
ADD
```
---
TWO
## nothing: 0, 0.8, 0
---
## stubs: 0, 0.8, 0
def add(self, x): pass
def double(x): return None
---
def size(self):
    'S.'
def area(self, r): ...
## a stub that raises: 1.5, 3.2, 0
def add(self, x): raise NotImplementedError('add')
DOUBLE
---
TWO
## another agent's too: 2, 4, -0.25
ONE
SIZE
---
TWO
## all that both could: 2, 4, -1
ONE
TWO
---
ONE
TWO
## three agents, of whom two write what is another's: 1, 2.4, -0.5
ADD
---
ADD
SIZE
---
ADD
SIZE
## a stub of another agent's: 2, 4, 0
ONE
def size(self): pass
---
TWO
## its own left to the other: 1.5, 3.2, 0
ADD
---
TWO
DOUBLE
## what was given: 2, 4, 0
math = None
def __init__(self):
    self.items = [7]
ONE
---
TWO
## no Python: 0, 0, 0
ONE
---
This adds numbers.
## does not compile: 0, 0, 0
ONE
---
TWO
    break
"""


def test_each_level_is_worth_what_the_docstring_says():
    """Fails if a stub is paid for, a level is paid for what does not compile, or each writer doubles a method."""
    texts = sections(LEVELS, ONE=ONE, TWO=TWO, ADD=ADD, SIZE=SIZE, DOUBLE=DOUBLE)
    for name, score in zip(texts, scores(*[text.split("---\n") for text in texts.values()])):
        levels = [score.parts[key] for key in ("written", "tests", "doubled")]
        assert ", ".join(f"{level:g}" for level in levels) == name.partition(": ")[2], name
        assert score.reward == pytest.approx(sum(levels)), name
        assert (score.parts["all_passed"], score.parts["compiles"]) == (levels[1] == 4, levels[1] > 0), name
        assert "-0.0" not in str(score.parts)  # as it would be logged


# What two agents choose | `written` if agent 1 then writes all methods, and agent 2 none | `balance`
CHOICES = """
add, keeps | `keeps`, "kept" | 1 | 0.5
I take kept and result: keeps. | <think>add</think> none | 1.5 | 0
 | None of them | 0 | 0
"""


def test_a_turn_of_choosing_is_no_turn_of_writing():
    """Fails if an agent does not read who has what, if choosing or failing first pays more, or what both take or
    nobody takes is another's."""
    env = envs.make("classeval", 2, 3, deal="choose")
    task = env.tasks("test")[0]
    for *choices, written, balance in rows_of(CHOICES):
        (step,) = env.step([(task, [(choices, None)], [task["reference"], ""])])
        assert (step.parts["written"], step.parts["balance"]) == (float(written), float(balance))
    history = [(["add, keeps", "kept, result"], None)]
    first, second = env.observe(task, history)
    assert "kept, result" in first and "add, keeps" in second
    answers = ["<think>Hm.</think>" + task["reference"], ""], [task["reference"]] * 2
    wrong, right = env.step([(task, history, actions) for actions in answers])
    history.append((answers[0], wrong))
    again, repaired = env.step([(task, history, actions) for actions in answers])
    assert "Hm" not in env.observe(task, history)[0]
    assert (wrong.reward, right.reward) == (again.reward, 2 * repaired.reward)


# Of size; the agent writes no area
FORMS = """
## indented
    # How many
    def size(self):
        return self.count()

    def count(self):
        return len(self.items)
## in the class, with all else
import math


class Box:
    '''Holds things.'''
    print(absent)

    def __init__(self):
        1 / 0

    def size(self):
        return self.count()

    def count(self):
        return len(self.items)

    def area(self, r): raise NotImplementedError
## an example that fails
def size(self): return len(self.items)
box = Box(1, 2)
size = box.size()
print(size / 0)
## an example in a fence of its own
```
def size(self): return len(self.items)
```
```
size = Box().size()
```
## a table that a loop fills
table = {}
for n in range(9):
    table[n] = n
def size(self): return table[len(self.items)]
## import named as a method
from operator import add
def size(self): return add(0, len(self.items))
## attribute
class Box:
    one: int = 1
    def size(self, by=one): return by * len(self.items)
## static method
class Box:
    @staticmethod
    def n(x): return len(x)
    def size(self): return self.n(self.items)
"""


def test_methods_are_found_in_the_forms_that_models_write():
    """Fails, row by row, if a form of an answer earns nothing though it holds the method."""
    texts = sections(FORMS)
    for name, score in zip(texts, scores(*[[ONE, text] for text in texts.values()])):
        assert score.findings["passed"] == 4, name
