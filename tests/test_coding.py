"""The coding reward: its levels, what counts as cooperation, how an answer is read, public reference solutions."""

import pytest
from test_sandbox import sections

import envs
from rewards.coding import Answer, coding_rewards

SCHEMES = ["fallback", "strategy_filter", "coordinator", "decorator"]
ASSERTS = "assert f([1, 2, 3]) == 12\nassert f([5]) == 10\nassert f([]) == 0\nassert f([-1]) == -2"
AUX = "def aux(x):\n    return 2 * x\n"
USER = "def f(numbers):\n    return sum(aux(x) for x in numbers)\n"
ALONE = "def f(numbers):\n    return 2 * sum(numbers)\n"


def scores(*pairs, **options):
    """The Score of each answer, a list of texts: the last is the asked function's, the others are helpers'."""
    several = [["aux"] if len(p) == 2 else [f"aux{i}" for i in range(1, len(p))] for p in pairs]
    return coding_rewards([Answer(p, h, "f", ASSERTS, ["f"], **options) for p, h in zip(pairs, several)], timeout=2)


def check(table):
    """The Scores of a table: after each line "## name: reward" come texts, divided by ---."""
    texts = sections(table.encode().decode("raw_unicode_escape"), AUX=AUX, USER=USER, ALONE=ALONE)
    found = scores(*[text.split("---\n") for text in texts.values()])
    for name, score in zip(texts, found):
        assert f"{score.reward:.6g}" == name.rpartition(": ")[2], name
    return found


LEVELS = r"""
## all: 4
AUX
---
USER
## ends before its second line: 0.4
AUX
---
def f(numbers):
    return 2 * sum(numbers
## no helper: 0.6
This is prose.
---
ALONE
## nothing returned: 0.4
AUX
---
def f(numbers):
    sum(numbers)
## a generator: 4
def aux(x):
    yield 2 * x
---
def f(numbers):
    return sum(next(aux(x)) for x in numbers)
## helper not used: 2.5
AUX
---
ALONE
## three of four tests: 3.75
AUX
---
def f(numbers):
    return aux(numbers[0]) if len(numbers) == 1 else 0
## Python, but it does not compile: 1
AUX
---
ALONE
def g():
    break
## one agent: 2.1
ALONE
## one agent, one test: 1.35
def f(numbers):
    return 12
"""


def test_each_level_is_worth_what_the_docstring_says():
    """Fails if a level has another worth, is paid without the one that it presupposes, or levels do not add up."""
    for score in check(LEVELS):
        levels = score.parts.keys() - {"all_passed", "passed_share", "useful_helper", *SCHEMES}
        assert sum(score.parts[level] for level in levels) == pytest.approx(score.reward)
        assert score.parts["all_passed"] == (score.parts["tests"] == 1)
        assert "-0.0" not in str(score.parts)  # as it would be logged


# After each reward: what the helper returns for x | the lines of f that follow `n = 2 * sum(numbers)`
COOPERATION = r"""
## 4: the tests need the helper, and what f does with it
2 * x | return sum(aux(x) for x in numbers)
2 * x | return sum(2 * x for x in numbers if aux(x) == x + x)
2 * x | return sum(g(x) for x in numbers)\ndef g(x):\n    return aux(x)
x.extend(x) or x | aux(numbers)\n    return sum(numbers)
sum(x[1:], x[0]) | return aux([2 * x for x in numbers] or [0])
## 3: the helper alone passes as many
2 * sum(x) | return aux(numbers)
2 * sum(x) | return g(numbers)\ndef g(n):\n    return h(n)\ndef h(n):\n    return aux(n)
2 * sum(x) | return aux(numbers[:1]) + aux(numbers[1:])
## 2.5: as many pass with a stub, which is a constant that changes nothing, hands back an argument, or is not needed
1 | return n // aux()
0 | return n + 7 * aux()
-1 | return aux() & n
-10**9 | return max(n, aux())
'' | return int(aux().join(str(n)))
[None][0] | return 2 * sum(numbers[:aux()])
0 | return 2 * sum(numbers[aux():])
[] | return 2 * sum(numbers + aux() + [*aux()])
True | return n if aux() else None
x | return aux(2 * sum(numbers))
x | return sum(aux(2 * x) for x in numbers)
2 * x | t = aux(0)\n    t = 2 * sum(numbers)\n    return t
2 * x | aux(3)\n    y = aux(3)\n    return n
2 * x | return 2 * sum(sorted(numbers, key=aux))
2 * x | def aux(x): return 2 * x\n    return sum(map(aux, numbers))
2 * x | 'aux(3)'  # aux(3)\n    return n
2 * x | return n\naux(3)\naux(4)
## 2: all calls stand alone, in vain
2 * x | aux(3)\n    return n
"""


@pytest.mark.parametrize("name, rows", sections(COOPERATION).items())
def test_cooperation_is_what_the_tests_lose_without_it(name, rows):
    """Fails, row by row, at a stub that is missing: without "nothing", most uses of a constant earn 4.0, not 2.5."""
    table = ""
    for row in rows.splitlines():
        returned, code = row.replace("\\n", "\n").split(" | ")
        helper = f"def aux(x=None):\n    return {returned}\n"
        table += (
            f"## {row}: {name.partition(':')[0]}\n{helper}---\ndef f(numbers):\n    n = 2 * sum(numbers)\n    {code}\n"
        )
    check(table)


# How f uses its helper: the cooperation schemes that this shows
SHOWN = """
## the result is the answer:
def f(numbers):
    return aux(numbers)
## after a guard:
def f(numbers):
    if not numbers:
        return 0
    return aux(numbers)
## tested by its length: fallback
def f(numbers):
    t = aux(numbers)
    if len(t) > 9:
        return 0
    return t
## tried: fallback
def f(numbers):
    try:
        return aux(numbers)
    except TypeError:
        return 0
## replaced if it is None: fallback
def f(numbers):
    t = aux(numbers)
    if t is None:
        t = sum(numbers)
    return t
## returned if it is true: fallback
def f(numbers):
    t = aux(numbers)
    if t:
        return t
    return sum(numbers)
## replaced in an expression: fallback
def f(numbers):
    t = aux(numbers)
    return sum(numbers) if not t else t
## called in an if: strategy_filter
def f(numbers):
    if numbers:
        return aux(numbers)
    return 0
## called in a conditional expression: strategy_filter
def f(numbers):
    return aux(numbers) if numbers else 0
## a filter: strategy_filter
def f(numbers):
    return sum(2 * x for x in numbers if aux(x))
## a condition in a loop: strategy_filter coordinator
def f(numbers):
    for x in numbers:
        if aux(x):
            return x
## a filter, and more work elsewhere: strategy_filter coordinator
def f(numbers):
    return sum(x for x in numbers if aux(x)) if numbers else aux(0) + 1
## in a generator: coordinator
def f(numbers):
    return sum(aux(x) for x in numbers)
## in a loop: coordinator
def f(numbers):
    t = 0
    for x in numbers:
        t += aux(x)
    return t
## in a while: coordinator
def f(numbers):
    while numbers:
        numbers = aux(numbers)
## in a list: coordinator
def f(numbers):
    return [aux(x) for x in numbers]
## tested in a loop: fallback coordinator
def f(numbers):
    for x in numbers:
        t = aux(x)
        if t:
            return t
## twice: coordinator
def f(numbers):
    return aux(numbers[:1]) + aux(numbers[1:])
## in a call: decorator
def f(numbers):
    return sum(aux(numbers))
## compared: decorator
def f(numbers):
    return aux(numbers) == 3
## added: decorator
def f(numbers):
    numbers += aux(numbers)
    return numbers
## formatted: decorator
def f(numbers):
    return f"{aux(numbers)}"
## its items: decorator
def f(numbers):
    return [x + 1 for x in aux(numbers)]
"""


def test_cooperation_schemes_are_told_apart():
    """Fails, use by use, if a scheme has another definition, or a program that only looks similar shows it."""
    texts = sections(SHOWN)
    found = scores(*[[AUX, text] for text in texts.values()])
    for name, score in zip(texts, found):
        shown = [scheme for scheme in SCHEMES if score.parts[scheme]]
        assert shown == name.partition(":")[2].split(), name


# Several helpers share their levels, and none may do it all
SEVERAL = r"""
## both: 4
def aux1(x): return 2 * x
---
def aux2(x): return 2 * x
---
def f(numbers): return sum(map(aux1, numbers[:1])) + sum(map(aux2, numbers[1:]))
## one: 3.75
def aux1(x): return 2 * x
---
def aux2(x): return 2 * x
---
def f(numbers): return sum(aux1(x) for x in numbers)
## one in vain: 2.25
def aux1(x): return 2 * x
---
def aux2(x): return 2 * x
---
def f(numbers):
    aux2(numbers)
    return 2 * sum(numbers)
## one missing: 2.3
def aux1(x): return 2 * x
---
---
def f(numbers): return sum(aux1(x) for x in numbers)
## the first does it all: 3
def aux1(numbers): return 2 * sum(numbers)
---
def aux2(numbers): return 0
---
def f(numbers): return aux1(numbers) + aux2(numbers)
## the second does it all: 3
def aux1(numbers): return 0
---
def aux2(numbers): return 2 * sum(numbers)
---
def f(numbers): return aux1(numbers) + aux2(numbers)
"""


def test_feedback_names_the_agent_that_broke_the_program_and_the_example_that_fails():
    """Fails if an agent is blamed for another's error, an example is scored, or no stub was tried and none is used."""
    shown = ["assert f([2]) == 4", "assert f([]) == 1"]
    failing = ["def aux(x):\n    return None or x + 5\n", USER.replace("sum", "str")]
    broken, wrong, failed = scores(["Let us think.", USER], [AUX, USER], failing, examples=shown)
    assert [bool(error) for error in broken.findings["errors"]] == [True, False]
    assert wrong.findings["examples"] == [[shown[1], "returned 0"]]
    assert wrong.reward == 4.0
    assert wrong.parts["useful_helper"] == 0.75
    assert (failed.findings["passed"], failed.findings["uses"]) == (0, [True])


def test_what_each_agent_reads_of_a_turn():
    """Fails if feedback shows more than its name says, twice, a thought or a wrong count, or leaves an agent out."""
    env = envs.make("humaneval", 2, 2)
    task = env.tasks("test")[0]
    codes = ["def aux(x):\n    return 7", f"def {task['entry_point']}(x):\n    return 2"]
    answers = [f"<think>Hm.</think>{code}\n" for code in codes]
    (step,) = env.step([(task, [], answers)])
    count = f"{step.feedback['passed']} of {step.feedback['total']}"

    def prompts(feedback):
        return envs.make("humaneval", 2, 2, feedback=feedback).observe(task, [(answers, step)])

    first = env.observe(task, [])
    assert prompts("none") == first
    for feedback in "plain", "passed", "level", "group", "code":
        for agent, prompt in enumerate(prompts(feedback)):
            assert prompt.startswith(first[agent]) and "Hm" not in prompt
            assert prompt.count(codes[agent]) == 1
            assert prompt.count(codes[1 - agent]) == (feedback == "code")
            assert (count in prompt) == (feedback in ("passed", "level", "group"))
    own_remarks = [prompt.split("\n\n")[-2] for prompt in prompts("level")]
    assert own_remarks[0] != own_remarks[1]
    assert all(remarks in prompt for remarks in own_remarks for prompt in prompts("group"))


# How the text of one agent is read
FORMS = r"""
## a fence: 2.1
```python
ALONE
```
## prose around a fence: 2.1
Sure! Here's the function:

```python
ALONE
```
This doesn't (need more.
## an unclosed fence, cut off: 2.1
```python
ALONE

print(f([1, 2
## no fence opened: 2.1
ALONE
```
This sums (twice.
## an example in a fence of its own: 2.1
```python
ALONE
```
For example
```
f = f([1])
print(f)
```
gives 2.
## a draft first: 2.1
```
def f(numbers):
    return 7
```
But that's wrong. Better:
```
ALONE
```
## what it needs in blocks of its own, and more: 2.1
```bash
pip install numpy
```
1. At first
   ```python title="f.py"
   from math import prod
   ```
2. and then
   ```python
   FACTOR, table = 2, {}
   for n in range(9):
       table[n] = n
   ```
```python
def f(numbers):
    return times(sum(table[n + 1] - 1 for n in numbers))
```
with
```python
def times(x):
    return prod([FACTOR, x])
```
```python
FACTOR = f([1])
f = times = table = FACTOR
print(f)
```
```
2
```
## the last block is not closed: 2.1
```
FACTOR = 2
```
```
def f(numbers):
    return FACTOR * sum(numbers)
## the last block is cut off: 2.1
```
ALONE
```
```
def f(numbers):
    if numbers:
        return 7
## a stub in a later block: 2.1
```
ALONE
```
in short
```
def f(numbers):
    ...
```
## a method of that name in a later block: 2.1
```
ALONE
```
```
class F:
    def f(self, numbers):
        return f(numbers)
```
## a constant that is filled: 2.1
```
FACTORS = {}
FACTORS[0] = 2
print(FACTORS)
```
```
def f(numbers):
    return FACTORS[0] * sum(numbers)
```
## a lambda, and an example: 2.1
```
f = lambda numbers: 2 * sum(numbers)
```
```
f = f([1])
```
## a copy cut off: 2.1
ALONE

def f(numbers):
    total = 0
    for x in numbers:
        tot
## thoughts: 2.1
<think>Perhaps
```
def f(numbers):
    return 7
```
no.</think>
ALONE
## types not imported: 2.1
def f(numbers: List[int], n: Optional[int] = None) -> Any:
    return 2 * sum(numbers)
## a lambda: 2.1
f = lambda numbers: 2 * sum(numbers)
## another name: 2.1
def double(numbers):
    return 2 * sum(numbers)
f = g = double
## a name for what a call gives: 2.1
from functools import partial
f = partial(lambda factor, numbers: factor * sum(numbers), 2)
## in a block: 2.1
if True:
    def f(numbers):
        return 2 * sum(numbers)
## an import with another way: 2.1
try:
    from absent import mul
except ImportError:
    from operator import mul
import sys
if sys.version_info >= (3,):
    from functools import reduce
def f(numbers):
    return mul(2, reduce(lambda x, y: x + y, numbers, 0))
## tables that a loop, a call and a sum fill: 2.1
table = {}
for id in range(-9, 9):
    table[id] = id
def fill():
    more.extend([2])
more = [0]
fill()
more += [1]
def f(numbers):
    return more[1] * sum(table[x] for x in numbers) * more[2]
## a limit that is raised: 2.1
import sys
sys.setrecursionlimit(10**6)
def count(n):
    return n and 1 + count(n - 1)
def f(numbers):
    return 2 * sum(numbers) * count(5000) // 5000
## examples that fail: 2.1
print('Hello')
ALONE
print(f(1, 2))
assert f([1]) == 7
result = f(None)
@absent
def example(): return f([1])
raise SystemExit
## examples that hide built-ins: 2.1
ALONE
sum = f([1])
for list in [[1]]:
    print(f(list))
## a main part: 2.1
ALONE
if __name__ == '__main__':
    f = None
## what asks for input: 2.1
ALONE
def main():
    while True:
        try:
            print(f([int(input('n: '))]))
        except Exception:
            print('Not a number')
main()
## examples that do not end: 2.1
ALONE
while True: pass
while f([1]): 1
## a return at the top level: 2.1
ALONE
return f([1])
## imports that are not there: 2.1
# f
from __future__ import annotations
import numpy as np
from absent import this
ALONE
## other blanks and quotes: 2.1
\ufeffdef f(numbers):
\u00a0\u00a0\u00a0\u00a0factor = len(\u201cab\u201d) + len(\u2018\u2019)
\u00a0\u00a0\u00a0\u00a0return\u2002factor\u200b * sum(numbers)
## and those in strings: 2.1
def f(numbers):
    return 2 * sum(numbers) * ('\u00bd\u00a0\u2019' == chr(189) + chr(160) + chr(8217))
It\u2019s \u201cdone.
"""
FOREIGN = r"""
## the helper again: 4
AUX
---
def aux(x):
    return 7


USER
## the helper again, in other blocks: 4
AUX
---
```
aux = lambda x: 7
```
```
USER
```
```
def aux(x):
    return 7
```
## a draft that calls the helper in vain: 2.5
AUX
---
```
def f(numbers):
    aux(numbers)
    return 2 * sum(numbers)
```
```
ALONE
```
## the helper assigned: 4
AUX
---
USER
aux = lambda x: 7
for aux in [7]: print(aux)
## the helper imported, or written: 4
AUX
---
try:
    from helpers import aux
except ImportError:
    def aux(x):
        return 7
USER
## the asked function too: 4
AUX
def f(numbers):
    return 7
---
USER
## an example of the asked function: 4
AUX
result = f([1])
f = None
---
USER
## a class: 4
AUX
class f:
    pass
---
USER
"""
NOTHING = r"""
## prose: 0
Sure, def f is here.
## a head: 0
def f(numbers):
## a head and prose: 0
def f(numbers):
It sums.
## a number: 0
f = 3
## a class: 0
class f:
    pass
## a thought: 0
<think>
```
ALONE
```
## NUL: 0
\u0000
## a lone surrogate: 0
\ud800
## a method: 0
class S:
    def f(self, numbers):
        return 0
"""


@pytest.mark.parametrize("table", [SEVERAL, FORMS, FOREIGN, NOTHING], ids=["several", "forms", "foreign", "nothing"])
def test_the_function_is_found_in_the_forms_that_models_write(table):
    """Fails at a helper that is paid for another, a form that earns nothing, a text that undoes another agent's."""
    check(table)
