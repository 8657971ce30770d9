"""Sizes, in syntax nodes and nodes a code line, so that nothing is gained by writing more into a line."""

import ast
import re

import pytest
from conftest import ROOT

PATHS = []
for pattern in "*.py", "envs/**/*.py", "rewards/*.py", "models/*/*.py", "tests/*.py", "benchmarks/*.py":
    PATHS += sorted(ROOT.glob(pattern))
MOST = {  # nodes of a file; of a folder, all together
    "nano.py": 1780,
    "magrpo.py": 4650,
    "marloo.py": 4670,
    "maremax.py": 4650,
    "mareinforce.py": 4650,
    "ippo.py": 5700,
    "mappo.py": 5760,
    "madpo.py": 5490,
    "magrpo_fsdp.py": 5050,
    "sft.py": 1700,
    "envs": 21660,
    "rewards": 11390,
    "tests": 27500,
    "benchmarks": 7970,
}
MOST_A_LINE = dict.fromkeys(MOST, 7.9)  # of a file, or of each in a folder; else 8.6
MOST_A_LINE |= {"nano.py": 7.6, "sft.py": 8.2, "envs": 8.2, "rewards": 8.2, "tests": 9.0, "benchmarks": 9.0}


def count(source):
    """Syntax nodes, and lines that are not blank, a comment, or of a docstring."""
    nodes = [node for node in ast.walk(ast.parse(source)) if not isinstance(node, ast.Load | ast.Store | ast.Del)]
    code = {number for number, line in enumerate(source.splitlines(), 1) if re.match(r"\s*[^\s#]", line)}
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
            code.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(nodes), len(code)


@pytest.mark.parametrize("name", MOST)
def test_files_and_folders_stay_small(name):
    """Fails if there is more than somebody reads in an hour, or maintains."""
    paths = [path for path in PATHS if path.relative_to(ROOT).parts[0] == name]
    assert sum(count(path.read_text())[0] for path in paths) <= MOST[name]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_and_functions_can_be_read(path):
    """Fails if lines are stacked, or a function is longer than a page."""
    source = path.read_text()
    most = MOST_A_LINE.get(path.relative_to(ROOT).parts[0], 8.6)
    nodes, lines = count(source)
    assert round(nodes / max(1, lines), 1) <= most
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 60, node.name


def test_the_page_of_the_viewer_can_be_read():
    """Fails if its lines are longer than a screen."""
    lines = (ROOT / "view.html").read_text().splitlines()
    assert max(map(len, lines)) <= 119
