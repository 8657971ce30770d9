"""The documents name only flags and files that exist."""

import ast
import re
from importlib import import_module

import pytest
from conftest import ROOT, SCRIPTS

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_and_files_exist(page):
    """A flag or a file that was renamed or dropped, and is still recommended."""
    text = page.read_text()
    trees = [
        ast.parse(path.read_text())
        for path in (*ROOT.glob("*.py"), *ROOT.glob("benchmarks/*.py"), *ROOT.glob("envs/*.py"))
    ]
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args"]
    known = {field.target.id for node in classes for field in node.body if isinstance(field, ast.AnnAssign)}
    known |= {"nproc_per_node", "shutdown_timeout", "help", "enable_lora", "lora_modules"}  # of torchrun, tyro, vLLM
    known |= set(re.findall(r'add_argument\(\s*"--([a-z]+)"', (ROOT / "view.py").read_text()))
    flags = {flag.removeprefix("no-") for flag in re.findall(r"(?<![-\w])--([a-z][a-z-]+)", text)}
    assert {flag.replace("-", "_") for flag in flags} <= known
    files = set(re.findall(r"`([\w/]+\.(?:py|md|csv|html))`", text)) - {"shout.py"}
    assert [name for name in files if not (ROOT / name).exists() and not (ROOT / "docs" / name).exists()] == []
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^):]+)\)", text)} - {""}
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_exercises_apply(monkeypatch):
    """A lesson whose changes no longer fit the scripts or make no Python; or one is not found: a script is missing."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for runs, _, changed, _ in import_module("teaching").lesson():  # which finds them
        for text in changed.values():
            ast.parse(text)
        assert {words[0] for words in runs} <= {path.name for path in SCRIPTS} | changed.keys()
