"""The documents name only flags and files that exist."""

import ast
import re

import pytest
from conftest import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHERS_FLAGS = {"nproc_per_node", "shutdown_timeout", "help", "enable_lora", "lora_modules"}  # of torchrun, tyro, vLLM
USERS_FILES = {"shout.py"}


def known_flags():
    """The arguments of all scripts."""
    flags = set(re.findall(r'add_argument\(\s*"--([a-z]+)"', (ROOT / "view.py").read_text()))
    paths = [*ROOT.glob("*.py"), *ROOT.glob("benchmarks/*.py"), *ROOT.glob("envs/*.py")]
    for path in paths:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name == "Args":
                fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
                flags |= {field.target.id for field in fields}
    return flags | OTHERS_FLAGS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_and_files_exist(page):
    """Fails if a flag or a file was renamed or dropped, and is still recommended."""
    text = page.read_text()
    flags = re.findall(r"(?<![-\w])--(?:no-)?([a-z][a-z-]+)", text)
    assert {flag.replace("-", "_") for flag in flags} <= known_flags()
    names = set(re.findall(r"`([\w/]+\.(?:py|md|csv|html))`", text)) - USERS_FILES
    for name in names:
        assert (ROOT / name).exists() or (ROOT / "docs" / name).exists(), name
    for link in re.findall(r"\]\(([^):#]+)[^):]*\)", text):
        assert (page.parent / link).exists(), link
