"""The coding reward: its levels, what counts as cooperation, how an answer is read, public reference solutions."""

import ast
import json
import os

import pytest

from rewards import answers
from rewards.coding import HELPER, IGNORED, MAIN, NO_WRAPPER, SYNTAX, TESTS, USES, Answer, coding_rewards

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ASSERTS = "assert f([1, 2, 3]) == 12\nassert f([5]) == 10\nassert f([]) == 0\nassert f([-1]) == -2"
AUX = "def aux(x):\n    return 2 * x\n"
USER = "def f(numbers):\n    return sum(aux(x) for x in numbers)\n"
ALONE = "def f(numbers):\n    return 2 * sum(numbers)\n"


def scores(*pairs, **options):
    """The Score of each answer, a list of texts: the last is the asked function's, the others are helpers'."""
    several = [["aux"] if len(p) == 2 else [f"aux{i}" for i in range(1, len(p))] for p in pairs]
    return coding_rewards([Answer(list(p), h, "f", ASSERTS, ["f"], **options) for p, h in zip(pairs, several)])


def rewards_of(table):
    """{name: reward} of {name: texts}, so that a failing assert names its rows."""
    return {name: round(score.reward, 6) for name, score in zip(table, scores(*table.values()))}


def body(code):
    """f with these lines, indented by four blanks except for the first."""
    return f"def f(numbers):\n    {code}\n"


def test_each_level_is_worth_what_the_docstring_says():
    """Fails if a constant changes, a level is paid without the one that it presupposes, or levels do not add up."""
    assert (HELPER, MAIN, SYNTAX, TESTS, USES, NO_WRAPPER, IGNORED) == (0.4, 0.6, 0.5, 1.0, 0.5, 1.0, -0.5)
    cases = [
        ([AUX, USER], 4.0),
        ([AUX, "def f(numbers):\n    return 2 * sum(numbers\n"], 0.4),  # ends before its second line
        (["This is prose.", ALONE], 0.6),
        ([AUX, body("sum(numbers)")], 0.4),  # nothing returned
        (["def aux(x):\n    yield 2 * x\n", USER.replace("aux(x)", "next(aux(x))")], 4.0),
        ([AUX, ALONE], 2.5),
        ([AUX, body("return aux(numbers[0]) if len(numbers) == 1 else 0")], 1.5 + 0.75 + 1.5),
        ([AUX, ALONE + "def g():\n    break\n"], 1.0),  # Python, but it does not compile
        ([ALONE], 2.1),
        ([body("return 12")], 1.35),
    ]
    for (_, value), score in zip(cases, scores(*[texts for texts, _ in cases])):
        levels = score.parts.keys() - {"all_passed", "passed_share", "useful_helper"}
        assert [score.reward, sum(score.parts[level] for level in levels)] == pytest.approx([value, value])
        assert score.parts["all_passed"] == (score.parts["tests"] == 1)
        assert "-0.0" not in str(score.parts)  # as it would be logged


# By reward: what the helper returns for x, and the lines of f that follow `n = 2 * sum(numbers)`.
COOPERATION = {
    4.0: {  # the tests need the helper, and what f does with it
        "call": ("2 * x", "return sum(aux(x) for x in numbers)"),
        "condition": ("2 * x", "return sum(2 * x for x in numbers if aux(x) == x + x)"),
        "further function": ("2 * x", "return sum(g(x) for x in numbers)\ndef g(x):\n    return aux(x)"),
        "in place": ("x.extend(x) or x", "aux(numbers)\n    return sum(numbers)"),
        "another argument": ("sum(x[1:], x[0])", "return aux([2 * x for x in numbers] or [0])"),
    },
    3.0: {  # the helper alone passes as many
        "plain": ("2 * sum(x)", "return aux(numbers)"),
        "functions": ("2 * sum(x)", "return g(numbers)\ndef g(n):\n    return h(n)\ndef h(n):\n    return aux(n)"),
        "two calls": ("2 * sum(x)", "return aux(numbers[:1]) + aux(numbers[1:])"),
    },
    2.5: {  # as many pass with a stub: a constant that changes nothing,
        "divided": ("1", "return n // aux()"),
        "plus nothing": ("0", "return n + 7 * aux()"),
        "all bits": ("-1", "return aux() & n"),
        "the greater": ("-10**9", "return max(n, aux())"),
        "joined by": ("''", "return int(aux().join(str(n)))"),
        "cut to": ("[None][0]", "return 2 * sum(numbers[:aux()])"),
        "cut from": ("0", "return 2 * sum(numbers[aux():])"),
        "extended": ("[]", "return 2 * sum(numbers + aux() + [*aux()])"),
        "a condition": ("True", "return n if aux() else None"),
        # an argument that is handed back,
        "the result": ("x", "return aux(2 * sum(numbers))"),
        "each item": ("x", "return sum(aux(2 * x) for x in numbers)"),
        # a result that is kept and not needed, and another function of that name
        "overwritten": ("2 * x", "t = aux(0)\n    t = 2 * sum(numbers)\n    return t"),
        "once kept": ("2 * x", "aux(3)\n    y = aux(3)\n    return n"),
        "sorted by it": ("2 * x", "return 2 * sum(sorted(numbers, key=aux))"),
        "written inside": ("2 * x", "def aux(x): return 2 * x\n    return sum(map(aux, numbers))"),
        "comment and text": ("2 * x", "'aux(3)'  # aux(3)\n    return n"),
    },
    2.0: {  # all calls stand alone, in vain
        "statement": ("2 * x", "aux(3)\n    return n"),
    },
}


@pytest.mark.parametrize("value", COOPERATION)
def test_cooperation_is_what_the_tests_lose_without_it(value):
    """Fails, row by row, at a stub that is missing: without "nothing", most uses of a constant earn 4.0, not 2.5."""
    table = {}
    for name, (returned, code) in COOPERATION[value].items():
        table[name] = [f"def aux(x=None):\n    return {returned}\n", body(f"n = 2 * sum(numbers)\n    {code}")]
    assert rewards_of(table) == dict.fromkeys(table, value)


def test_several_helpers_share_their_levels():
    """Fails if one helper of two, or a dropped call, is paid whole, or the second helper may do it all."""
    first, second = (AUX.replace("aux", name) for name in ("aux1", "aux2"))
    one, both = body("return sum(aux1(x) for x in numbers)"), body("return aux1(numbers) + aux2(numbers)")
    half, none = [f"def NAME(numbers):\n    return {n} * sum(numbers)\n" for n in (2, 0)]
    table = {
        "both": ([first, second, body("return sum(map(aux1, numbers[:1])) + sum(map(aux2, numbers[1:]))")], 4.0),
        "one": ([first, second, one], 3.75),
        "one in vain": ([first, second, body("aux2(numbers)\n    return 2 * sum(numbers)")], 2.25),
        "one missing": ([first, "", one], 0.2 + 0.6 + 0.5 + 1),
        "the first does it all": ([half.replace("NAME", "aux1"), none.replace("NAME", "aux2"), both], 3.0),
        "the second does it all": ([none.replace("NAME", "aux1"), half.replace("NAME", "aux2"), both], 3.0),
    }
    rewards = rewards_of({name: texts for name, (texts, _) in table.items()})
    assert rewards == pytest.approx({name: value for name, (_, value) in table.items()})


def test_feedback_names_the_agent_that_broke_the_program_and_the_example_that_fails():
    """Fails if an agent is blamed for another's error, an example is scored, or no stub was tried and none is used."""
    shown = ["assert f([2]) == 4", "assert f([]) == 1"]
    failing = ["def aux(x):\n    return None or x + 5\n", USER.replace("sum", "str")]
    broken, wrong, failed = scores(["Let us think.", USER], [AUX, USER], failing, examples=shown)
    assert [bool(error) for error in broken.findings["errors"]] == [True, False]
    assert wrong.findings["examples"] == [(shown[1], "returned 0")]
    assert wrong.reward == 4.0
    assert wrong.parts["useful_helper"] == 0.75
    assert (failed.findings["passed"], failed.findings["uses"]) == (0, [True])


# How an answer is read


def fenced(code, language="python"):
    return f"```{language}\n{code}```\n"


SECOND = "def f(numbers):\n    total = 0\n    for x in numbers:\n        tot"
FORMS = {  # each holds USER
    "bare": USER,
    "fence": fenced(USER),
    "prose around a fence": f"Sure! Here's the function:\n\n{fenced(USER)}\nThis doesn't (need more.",
    "unclosed fence, cut off": f"```python\n{USER}\nprint(f([1, 2",
    "no fence opened": f"{USER}```\nThis sums (twice.",
    "an example behind": f"{fenced(USER)}For example\n{fenced('print(f([1]))')}gives 2.",
    "a draft first": f"{fenced(body('return 7'))}But that's wrong. Better:\n{fenced(USER)}",
    "a copy cut off": f"{USER}\n{SECOND}",
    "prints": f"print('Hello')\n{USER}\nprint(f(1, 2))\nassert f([1]) == 7\nf(None)\n",
    "an example that fails": f"{USER}\nresult = f(1, 2)\nprint(result)\n",
    "an example hides a built-in": f"{USER}\nsum = f([1])\nlist = [1, 2]\nprint(sum)\n",
    "an import that is not there": f"import numpy as np\nfrom absent import this\n{USER}",
    "the helper imported": f"# f\nfrom __future__ import annotations\nfrom helpers import aux\n{USER}",
    "types not imported": USER.replace("(numbers)", "(numbers: List[int], n: Optional[int] = None) -> Any"),
    "thoughts": f"<think>Perhaps\n{fenced(body('return 7'))}no.</think>\n{USER}",
}
FOREIGN = {  # texts of one agent that give another's name
    "the helper again": [AUX, f"def aux(x):\n    return 7\n\n\n{USER}"],
    "the helper assigned": [AUX, f"{USER}\naux = lambda x: 7\n"],
    "the asked function too": [f"{AUX}\n\ndef f(numbers):\n    return 7\n", USER],
    "an example of the asked function": [f"{AUX}\nresult = f([1])\nf = None\n", USER],
    "a class": [f"{AUX}\nclass f:\n    pass\n", USER],
}
NOTHING = ["Sure, def f is here.", "def f(numbers):", "def f(numbers):\nIt sums.", "f = sum", "class f:\n    pass"]
NOTHING += [f"<think>\n{fenced(USER)}", "\0", "\ud800", "class S:\n    def f(self, numbers):\n        return 0"]


def test_the_function_is_found_in_the_forms_that_models_write():
    """Fails, row by row, at a form of an answer that earns nothing, and an agent's text that undoes another's."""
    table = {**{name: [AUX, text] for name, text in FORMS.items()}, **FOREIGN}
    assert rewards_of(table) == dict.fromkeys(table, 4.0)


def test_what_is_no_function_is_not_read_as_one():
    """Fails if prose, a head without a body or a thought counts as a definition."""
    assert rewards_of({text: [AUX, text] for text in NOTHING}) == dict.fromkeys(NOTHING, 0.4)


def test_real_answers_are_read_as_a_careful_reader_does():
    """Fails if the rules of reading fit imagined answers and not those of a real model."""
    with open(os.path.join(ROOT, "tests", "data", "real_answers.jsonl")) as file:
        rows = list(map(json.loads, file))
    missed = []
    for row in rows:
        tree, _ = answers.prepare([row["text"]], [], row["entry"])
        body = tree.body if tree else answers.read_code(row["text"], [row["entry"]])[0]
        if definition(body, row["entry"]) != definition(ast.parse(row["expected"]).body, row["entry"]):
            missed.append(row["text"])
    assert len(missed) <= 0.05 * len(rows), missed


def definition(body, name):
    return [ast.dump(node) for node in body if isinstance(node, answers.FUNCTIONS) and node.name == name][-1:]
