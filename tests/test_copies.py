"""The algorithm scripts are copies of each other, but for what makes the algorithm."""

import ast
import re
import subprocess
import sys

import pytest
from conftest import ROOT, SCRIPTS

CRITIC_FREE = ("magrpo", "marloo", "maremax", "mareinforce")
BLOCK = re.compile(r"( *# >>> ALGORITHM\n).*?( *# <<< ALGORITHM\n)", re.S)
WHOLE = {path.stem: path.read_text() for path in SCRIPTS}


def without_algorithm(text):
    """The script without its module docstring and the insides of its marked blocks."""
    docstring = ast.parse(text).body[0]
    lines = text.splitlines(keepends=True)
    return BLOCK.sub(r"\1\2", "".join(lines[docstring.end_lineno :]))


def drift(one, two):
    """The first shared line in which two critic-free scripts differ, or None."""
    ours, theirs = without_algorithm(one).splitlines(), without_algorithm(two).splitlines()
    for number, (a, b) in enumerate(zip(ours, theirs)):
        if a != b:
            return number, a, b
    return None if len(ours) == len(theirs) else (min(len(ours), len(theirs)), None, None)


def functions(text):
    """Source of each function and class of the script, and of each field of Args with its comment."""
    tree, lines = ast.parse(text), text.splitlines()
    source = lambda node: "\n".join(lines[node.lineno - 1 - len(node.decorator_list) : node.end_lineno])
    found = {node.name: source(node) for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    (args,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args")
    del found["Args"]
    return found | {f"Args.{field.target.id}": lines[field.lineno - 1] for field in args.body}


def diff_lines(one, two):
    """What `diff one two | wc -l` counts."""
    done = subprocess.run(["diff", one, two], cwd=ROOT, capture_output=True, text=True)
    return len(done.stdout.splitlines())


def test_all_five_are_there():
    assert set(WHOLE) == {*CRITIC_FREE, "ippo"}


@pytest.mark.parametrize("name", CRITIC_FREE[1:])
def test_critic_free_scripts_are_equal_outside_the_algorithm(name):
    assert drift(WHOLE["magrpo"], WHOLE[name]) is None
    assert len(without_algorithm(WHOLE[name]).splitlines()) > 400  # that many lines were compared
    assert diff_lines("magrpo.py", f"{name}.py") <= 25


@pytest.mark.parametrize("name", CRITIC_FREE)
def test_at_most_two_small_blocks_make_the_algorithm(name):
    blocks = BLOCK.findall(WHOLE[name])
    assert 1 <= len(blocks) <= 2
    inside = WHOLE[name].count("\n") - without_algorithm(WHOLE[name]).count("\n")
    assert inside <= 35  # docstring and blocks


def test_a_planted_drift_is_found():
    text = WHOLE["marloo"]
    in_args = text.replace("gamma: float = 1.0", "gamma: float = 0.99")
    in_loop = text.replace("agent.optimizer.zero_grad()", "agent.optimizer.zero_grad(set_to_none=True)")
    longer = text + "\n# one more line\n"
    in_block = text.replace("# >>> ALGORITHM\n", "# >>> ALGORITHM\n                returns = returns * 1\n")
    assert len({text, in_args, in_loop, longer, in_block}) == 5
    for planted in (in_args, in_loop, longer):
        assert drift(WHOLE["magrpo"], planted) is not None
    assert drift(WHOLE["magrpo"], in_block) is None


def test_ippo_shares_what_has_the_same_name():
    ours, theirs = functions(WHOLE["magrpo"]), functions(WHOLE["ippo"])
    shared = set(ours) & set(theirs)
    different = {name for name in shared if ours[name] != theirs[name]}
    assert different == {"Args.learning_rate"}  # whose default is lower where a rollout gives several steps
    assert len(shared) >= 40  # functions, classes and arguments
    assert set(ours) - set(theirs) == {"Args.joint_mode"}  # trajectories are independent in ippo.py


def test_a_planted_drift_in_ippo_is_found():
    planted = WHOLE["ippo"].replace("torch.isin(", "torch.isin (", 1)
    assert functions(planted)["sample"] != functions(WHOLE["magrpo"])["sample"]


@pytest.mark.parametrize("name", WHOLE)
def test_no_script_knows_its_own_name(name):
    text, names = WHOLE[name], "|".join(WHOLE)
    code = text.replace(ast.get_docstring(ast.parse(text), clean=False), "")
    assert re.findall(rf"(?i){names}", code) == []


@pytest.mark.parametrize("name", WHOLE)
def test_scripts_import_only_envs_of_this_repository(name):
    ours = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    names = set()
    for node in ast.walk(ast.parse(WHOLE[name])):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    assert not names & ours  # envs is imported by name where the environment is made
    assert WHOLE[name].count('importlib.import_module("envs")') == 1
    assert names - {"numpy", "torch", "tqdm", "transformers", "tyro"} <= set(sys.stdlib_module_names)
