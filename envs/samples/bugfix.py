"""Sample tasks of envs/bugfix.py: functions of envs/samples/coding.py, written as loops, with one bug each."""

import ast
import random
import re
import textwrap

from envs.samples import read_records, read_table
from envs.samples.coding import FILTERS, MAPS, make_coding_tasks
from envs.vetting import read_examples

# fold of envs/samples/coding.py | first value of result | what is done with each value | what is returned
LOOPS = read_records("""
sum      | 0  | result += {}      | result
largest  | [] | result.append({}) | max(result, default=0)
smallest | [] | result.append({}) | min(result, default=0)
list     | [] | result.append({}) | result
sorted   | [] | result.append({}) | sorted(result)
distinct | [] | result.append({}) | len(set(result))
""")
# pattern in a line | what replaces it
BUGS = read_table(r"""
(?<= )==(?= ) | !=
(?<= )!=(?= ) | ==
(?<= )>(?= ) | >=
(?<= )>(?= ) | <
(?<= )<(?= ) | <=
(?<= )<(?= ) | >
\b0\b | 1
\b1\b | 0
\b1\b | 2
\b2\b | 1
\b2\b | 3
\b3\b | 2
(?<= )\*(?= ) | +
(?<= )\+(?= ) | -
(?<= )-(?= ) | +
// | *
\+= | -=
-x | x
max | min
min | max
abs\(x\) | x
= \[\] | = [0]
(\w+) (-|%|//) (\w+) | \3 \2 \1
""")


def make_mutants(split, count, seed):
    """Programs with a bug that some of their tests find and some do not.

    Returns `count` tuples: row (in HumanEvalFix's columns; `test` holds five asserts), the numbers of the tests that
    the program passes, how many there are, and pairs (example of the prompt that fails, what happens instead). No
    composition is in two splits: see `make_coding_tasks` in envs/samples/coding.py.
    """
    rng = random.Random(f"mutants {split} {seed}")
    return [_make_mutant(row, rng) for row in make_coding_tasks(split, count, seed)]


def demonstrate(task, num_notes, rng):
    """(notes, answer) to imitate; the task is one of envs/bugfix.py, made from a mutant.

    In 6 of 10 notes the line is right. Half of the answers do what the last note says (or one that nobody wrote), a
    quarter are right whatever it says, and a quarter leave the bug where it is.
    """
    buggy = task["program"].splitlines()
    right = task["reference"].splitlines()
    proposals = []  # pairs (number of a line, what it should be)
    for _ in range(max(1, num_notes)):
        place = task["line"] - 1
        wrong = rng.choice([bug for bug in _list_bugs(right) if bug[0] != place])
        proposals.append((place, right[place]) if rng.random() < 0.6 else wrong)
    place, line = proposals[-1]
    obedient = [*buggy[:place], line, *buggy[place + 1 :]]
    lines = rng.choice([obedient, obedient, right, buggy])
    notes = [f"LINE {place + 1}: it should be {line.strip()}" for place, line in proposals]
    return notes[:num_notes], "\n".join([lines[0], *lines[_find_body(lines) :]])


def _make_mutant(row, rng):
    name = row["entry_point"]
    prompt = row["prompt"]
    fold, filter_name, map_name = name.split("_")
    first, step, returned = LOOPS[fold]
    step = step.format(MAPS[map_name][-1])
    condition = FILTERS[filter_name][-1]
    code = f"result = {first}\nfor x in numbers:\n    if {condition}:\n        {step}\nreturn {returned}\n"
    code = textwrap.indent(code, "    ")
    tests = re.findall("assert .*", row["test"].replace("candidate", name))
    examples = read_examples(ast.get_docstring(ast.parse(prompt).body[0]))
    lines = (prompt + code).splitlines()
    bugs = _list_bugs(lines)
    for place, line in rng.sample(bugs, len(bugs)):
        program = "\n".join([*lines[:place], line, *lines[place + 1 :], ""])
        passing = [number for number, outcome in enumerate(_run_asserts(program, tests)) if not outcome]
        if 0 < len(passing) < len(tests):
            outcomes = zip(examples, _run_asserts(program, examples))
            failing = [(example, outcome) for example, outcome in outcomes if outcome]
            buggy = {"buggy_solution": program.removeprefix(prompt), "canonical_solution": code}
            return {**row, **buggy, "test": "\n".join(tests)}, passing, len(tests), failing
    raise AssertionError(f"{name} has no such bug")


def _find_body(lines):
    """The number of lines up to the end of the docstring."""
    return lines.index('    """') + 1


def _list_bugs(lines):
    """All (number of a line after the docstring, counted from 0; the line with a bug)."""
    bugs = []
    for place in range(_find_body(lines), len(lines)):
        right = lines[place]
        for pattern, wrong in BUGS:
            for match in re.finditer(pattern, right):
                line = right[: match.start()] + match.expand(wrong) + right[match.end() :]
                if line != right:
                    bugs.append((place, line))
    return bugs


def _run_asserts(program, asserts):
    """For each assert "" if it holds, else what happens instead, in the words of rewards/jail.py.

    Runs in this process: a mutant of such a loop ends, and does no harm.
    """
    space = {}
    exec(program, space)
    outcomes = []
    for source in asserts:
        call, _, expected = source.removeprefix("assert ").partition(" == ")
        try:
            value = eval(call, space)
            outcomes.append("" if value == eval(expected) else f"returned {value!r}")
        except Exception as error:
            outcomes.append(f"raised {type(error).__name__}: {error}")
    return outcomes
