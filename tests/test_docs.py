"""The documents name only flags and files that exist, and functions that there are."""

import re

import pytest
from conftest import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# of torchrun, tyro, vLLM, pip, and of the lesson's patches
OTHERS_FLAGS = "nnodes nproc_per_node rdzv_backend rdzv_endpoint help enable_lora lora_modules deps kl_coef parts"
FLAGS = {*OTHERS_FLAGS.split()}
for path in [*ROOT.glob("*.py"), *ROOT.glob("benchmarks/*.py"), *ROOT.glob("envs/*.py")]:
    FLAGS |= {*re.findall(r"^    (\w+): .* = ", path.read_text(), re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_and_files_exist(page):
    """Fails if a flag or a file was renamed or dropped, and is still recommended."""
    text = page.read_text()
    flags = re.findall(r"(?<![-\w])--(?:no-)?([a-z][a-z-]+)", text)
    assert {flag.replace("-", "_") for flag in flags} <= FLAGS
    names = set(re.findall(r"`([\w/]+\.(?:py|md|csv|html))`", text)) - {"runs.html"}
    for name in names:
        assert (ROOT / name).exists() or (ROOT / "docs" / name).exists(), name
    for link in re.findall(r"\]\(([^):#]+)[^):]*\)", text):
        assert (page.parent / link).exists(), link


def test_the_details_are_in_the_code():
    """Fails if a page says that something is in a function or class that a script does not have."""
    links = re.findall(r"\[`(\w+)`\]\(\.\./(\w+\.py)\)", (ROOT / "docs/algorithms.md").read_text())
    assert links
    for name, script in links:
        assert re.search(rf"^(def|class) {name}\b", (ROOT / script).read_text(), re.MULTILINE), name
