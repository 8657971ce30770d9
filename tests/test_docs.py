"""The documents name only flags and files that exist, and show the code that there is."""

import ast
import json
import re
import runpy
import shutil
import subprocess

import pytest
from conftest import ROOT, metrics_of

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# of torchrun, tyro, vLLM, pip, and a patch of the lesson
OTHERS_FLAGS = {
    "nnodes",
    "nproc_per_node",
    "rdzv_backend",
    "rdzv_endpoint",
    "help",
    "enable_lora",
    "lora_modules",
    "kl_coef",
    "deps",
}
USERS_FILES = {"shout.py"}


def known_flags():
    """The arguments of all scripts."""
    flags = set()
    paths = [*ROOT.glob("*.py"), *ROOT.glob("benchmarks/*.py"), *ROOT.glob("envs/*.py")]
    for path in paths:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name == "Args":
                fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
                flags |= {field.target.id for field in fields}
    return flags


FLAGS = known_flags() | OTHERS_FLAGS


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


def test_the_readmes_loop_is_nanos():
    """Fails if README shows other lines than nano.py has, or in another order."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    (loop,) = [block for block in blocks if "group.advantages" in block]
    nano = iter([line.strip() for line in (ROOT / "nano.py").read_text().splitlines()])
    for line in map(str.strip, loop.splitlines()):
        if line and not line.startswith("#"):
            assert line in nano  # what comes before it in nano.py has been passed


@pytest.mark.parametrize("name", ["Constant", "GoodWord", "PartnersWord"])
def test_probes_show_what_the_page_says(name, run):
    """Fails if a probe cannot be loaded, has nothing to learn, or the constant one trains something."""
    flags = ["--num-iterations", 2, "--eval-every", 10, "--max-new-tokens", 16]
    names = run(ROOT / "magrpo.py", "--env", f"docs.probes:{name}", *flags)
    for line in metrics_of(names["run_dir"])[1:]:
        constant = name == "Constant"
        assert (line["train/zero_variance_groups"] == 1) == constant
        assert (line["agent_0/grad_norm"] == line["agent_1/grad_norm"] == 0) == constant


def test_the_details_are_in_the_code():
    """Fails if a page quotes a line that a script no longer has, or that is not the only one."""
    quotes = re.findall(r"\[`([^`]+)`\]\(\.\./(\w+\.py)\)", (ROOT / "docs/details.md").read_text())
    assert len(quotes) >= 20
    for fragment, name in quotes:
        assert (ROOT / name).read_text().count(fragment) == 1, fragment


def test_the_notebook_is_the_lesson():
    """Fails if docs/teaching.md or benchmarks/notebook.py was changed, and the notebook was not made again."""
    made = runpy.run_path(str(ROOT / "benchmarks/notebook.py"))["cells"]()
    cells = json.loads((ROOT / "docs/lesson.ipynb").read_text())["cells"]
    assert [(cell["cell_type"], "".join(cell["source"])) for cell in cells] == made
