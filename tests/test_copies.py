"""The algorithm scripts are copies of each other, except for what makes the algorithm."""

import re
import subprocess

import pytest
from conftest import ROOT, SCRIPTS
from toy import rows_of

BLOCK = re.compile(r"( *# >>> ALGORITHM\n).*?( *# <<< ALGORITHM\n)", re.S)
CODE = {path.stem: path.read_text().split('"""', 2)[2] for path in SCRIPTS}  # without the module docstrings
# Two scripts | the lines that their diff may have
DIFFERENCES = """
magrpo | marloo      | 25
magrpo | maremax     | 25
magrpo | mareinforce | 25
magrpo | madpo       | 230
magrpo | magrpo_fsdp | 160
ippo   | mappo       | 70
"""
SAME_NAMES = """
magrpo | ippo
magrpo | mappo
magrpo | madpo
ippo   | mappo
"""


def without_algorithm(code):
    """The lines of a script outside its marked block."""
    return BLOCK.sub(r"\1\2", code).splitlines()


def parts(source):
    """The source of each function and class of a script, and of each field of Args with its comment."""
    parts = {}
    for block in source.split("\n\n\n"):
        head = re.search(r"^(?:@.*\n)*(?:def|class) (\w+)", block, re.M)
        if head and head[1] == "Args":
            parts.update(re.findall(r"^    (\w+: )(.*)$", block, re.M))
        elif head:
            parts[head[1]] = block[head.start() :]
    return parts


@pytest.mark.parametrize("name", ["marloo", "maremax", "mareinforce"])
def test_critic_free_scripts_are_equal_outside_the_algorithm(name):
    """Fails if one of the copies missed a change, or has more of an algorithm than its block."""
    lines = without_algorithm(CODE[name])
    assert lines == without_algorithm(CODE["magrpo"])
    assert len(lines) > 0.9 * CODE[name].count("\n")


@pytest.mark.parametrize("first, second, most", rows_of(DIFFERENCES))
def test_the_difference_is_the_algorithm(first, second, most):
    """Fails if a reader of two algorithms has to read more than their difference."""
    result = subprocess.run(["diff", f"{first}.py", f"{second}.py"], cwd=ROOT, capture_output=True, text=True)
    assert 0 < result.stdout.count("\n") <= int(most)


def test_planted_drift_is_found():
    """Fails if the comparisons do not see what they are there for."""
    code = CODE["magrpo"]
    block = BLOCK.search(code)
    for k in (block.end(1), *range(0, len(code), 500)):
        is_seen = without_algorithm(f"{code[:k]} {code[k:]}") != without_algorithm(code)
        assert is_seen == (not block.end(1) <= k < block.start(2))
    for name, source in list(parts(code).items())[::10]:
        changed = code.replace(source, f"{source} ")
        assert parts(changed)[name] != source


@pytest.mark.parametrize("first, second", rows_of(SAME_NAMES))
def test_what_has_the_same_name_is_the_same_in_other_scripts(first, second):
    """Fails if a function, class or argument was changed in one of them only."""
    ours, theirs = parts(CODE[first]), parts(CODE[second])
    shared = ours.keys() & theirs.keys()
    assert len(shared) >= 40
    assert [name for name in sorted(shared) if ours[name] != theirs[name]] == []


@pytest.mark.parametrize("name", CODE)
def test_a_script_knows_no_algorithms_name_and_imports_only_envs_of_this_repository(name):
    """Fails if a copy would have to change a name, or to bring another file."""
    assert re.findall("|".join(CODE), CODE[name], re.I) == []
    others = {path.stem for path in ROOT.iterdir()} - {"envs"}
    imported = re.findall(r"^ *(?:from|import) (\w+)", CODE[name], re.M)
    assert others.isdisjoint(imported)
