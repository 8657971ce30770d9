"""The README's promises: its environment runs beside one copied script, and its flags exist."""

import ast
import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, SCRIPTS, two_scripts

README = (ROOT / "README.md").read_text()


@two_scripts
def test_a_copied_script_trains_on_the_readmes_environment_in_an_empty_folder(script, tmp_path, model_dir):
    (block,) = re.findall(r"```python\n(.*?)```", README, re.S)
    (tmp_path / "shout.py").write_text(block)
    copied = tmp_path / ("scripts" if script.stem == "ippo" else ".") / script.name  # beside its environment, or not
    copied.parent.mkdir(exist_ok=True)
    shutil.copy(script, copied)
    command = [sys.executable, copied, "--env", "shout:Shout", "--model", model_dir, "--num-iterations", "2"]
    command += ["--max-new-tokens", "8", "--num-turns", "2"]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "evaluation return" in done.stdout and list(tmp_path.glob("runs/shout.Shout__*/agent_1"))


def test_a_copied_script_says_that_it_has_no_environments(run, tmp_path, capsys):
    shutil.copy(SCRIPTS[0], tmp_path)
    for name in "tldr", ":Class", ".module:Class":
        with pytest.raises(SystemExit):
            run(tmp_path / SCRIPTS[0].name, "--env", name)
        said = f"error: --env {name}: no such class, and no envs/ beside this file; use module:Class of your own."
        assert capsys.readouterr().err == f"{SCRIPTS[0].name}: {said}\n"


def test_every_flag_in_the_readme_exists():
    trees = [ast.parse(path.read_text()) for path in (*ROOT.glob("*.py"), *ROOT.glob("benchmarks/*.py"))]
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args"]
    known = {field.target.id for node in classes for field in node.body if isinstance(field, ast.AnnAssign)}
    known |= {"nproc_per_node", "shutdown_timeout", "help"}  # torchrun's, tyro's
    flags = {flag.replace("-", "_") for flag in re.findall(r"(?<![-\w])--([a-z][a-z-]+)", README)}
    assert flags and flags <= known


def test_files_named_in_the_readme_exist():
    for name in map("".join, re.findall(r"`(\w+\.py)`|\]\(([\w/]+\.md)[#)]", README)):
        assert name == "shout.py" or (ROOT / name).exists(), name
