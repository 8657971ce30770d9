"""The documents name only flags and files that exist, and show the code that there is."""

import ast
import re
import shutil
import subprocess

import pytest
from conftest import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# of torchrun, tyro, vLLM, pip, and of the lesson's patches
OTHERS_FLAGS = "nnodes nproc_per_node rdzv_backend rdzv_endpoint help enable_lora lora_modules deps"
OTHERS_FLAGS += " kl_coef parts"
USERS_FILES = {"runs.html"}
FLAGS = {*OTHERS_FLAGS.split()}
for path in [*ROOT.glob("*.py"), *ROOT.glob("benchmarks/*.py"), *ROOT.glob("envs/*.py")]:
    FLAGS |= {*re.findall(r"^    (\w+): .* = ", path.read_text(), re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_and_files_exist(page):
    """Fails if a flag or a file was renamed or dropped, and is still recommended."""
    text = page.read_text()
    flags = re.findall(r"(?<![-\w])--(?:no-)?([a-z][a-z-]+)", text)
    assert {flag.replace("-", "_") for flag in flags} <= FLAGS
    names = set(re.findall(r"`([\w/]+\.(?:py|md|csv|html))`", text)) - USERS_FILES
    for name in names:
        assert (ROOT / name).exists() or (ROOT / "docs" / name).exists(), name
    for link in re.findall(r"\]\(([^):#]+)[^):]*\)", text):
        assert (page.parent / link).exists(), link


def test_patches_apply(tmp_path):
    """Fails if a script was changed where the lesson changes it, or the result is no Python."""
    for patch in (ROOT / "docs/lesson").glob("*.patch"):
        changed = tmp_path / f"{patch.stem}.py"
        shutil.copy(ROOT / re.sub("_.*", ".py", patch.name), changed)
        subprocess.run(["git", "apply", patch], cwd=tmp_path, check=True)
        ast.parse(changed.read_text())


def test_the_details_are_in_the_code():
    """Fails if a page quotes a line that a script no longer has, or that is not the only one."""
    quotes = re.findall(r"\[`([^`]+)`\]\(\.\./(\w+\.py)\)", (ROOT / "docs/details.md").read_text())
    assert quotes
    for fragment, name in quotes:
        assert (ROOT / name).read_text().count(fragment) == 1, fragment
