"""The algorithm scripts are copies of each other, but for what makes the algorithm."""

import ast
import re
import subprocess
import sys

import pytest
from conftest import CRITIC_FREE, ROOT, SCRIPTS

BLOCK = re.compile(r"( *# >>> ALGORITHM\n).*?( *# <<< ALGORITHM\n)", re.S)
WHOLE = {path.stem: path.read_text() for path in SCRIPTS}
FIRST = WHOLE["magrpo"]


def without_algorithm(text):
    """The lines of a script without its module docstring and the inside of its marked block."""
    after = "".join(text.splitlines(keepends=True)[ast.parse(text).body[0].end_lineno :])
    return BLOCK.sub(r"\1\2", after).splitlines()


def drift(one, two):
    """The first line in which two critic-free scripts differ, with its number, or None."""
    ours, theirs = without_algorithm(one), without_algorithm(two)
    for number, (a, b) in enumerate(zip([*ours, "END"], [*theirs, "END"])):
        if a != b:
            return number, a, b
    return None


def parts(text):
    """The source of each function and class of a script, and of each field of Args with its comment."""
    tree, lines = ast.parse(text), text.splitlines()
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "\n".join(lines[start - 1 : node.end_lineno])
    (args,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args")
    del found["Args"]
    return found | {f"Args.{field.target.id}": lines[field.lineno - 1] for field in args.body}


@pytest.mark.parametrize("path", CRITIC_FREE, ids=lambda path: path.stem)
def test_critic_free_scripts_are_equal_outside_the_algorithm(path):
    """A change that one of the copies missed, or more of an algorithm than its block."""
    assert drift(FIRST, WHOLE[path.stem]) is None
    assert WHOLE[path.stem].count("# >>> ALGORITHM\n") == 1 and len(BLOCK.findall(WHOLE[path.stem])) == 1
    done = subprocess.run(["diff", "magrpo.py", path.name], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.count("\n") <= 25
    print(f"{path.name}: {len(without_algorithm(FIRST))} lines compared, of {len(FIRST.splitlines())}")


def test_the_four_are_there_and_most_of_each_is_compared():
    """A comparison of nothing: a script without its marks, or with all of it between them."""
    assert {path.stem for path in CRITIC_FREE} == {"magrpo", "marloo", "maremax", "mareinforce"}
    assert all(len(without_algorithm(WHOLE[path.stem])) > 0.9 * FIRST.count("\n") for path in CRITIC_FREE)


def test_planted_drift_is_found():
    """A comparison that does not see what it is there for."""
    for old in ("weight_decay", "num_tasks: int = 4", "if __name__"):
        assert drift(FIRST, FIRST.replace(old, f"{old} ", 1)) is not None
    assert drift(FIRST, FIRST + "more = 1\n") is not None and drift(FIRST + "more = 1\n", FIRST) is not None
    assert drift(FIRST, FIRST.replace("# >>> ALGORITHM\n", "# >>> ALGORITHM\n            more = 1\n")) is None
    for old in ("torch.isin(", "@torch.no_grad()", "# B, tasks per iteration"):
        assert parts(FIRST.replace(old, f"{old} ", 1)) != parts(FIRST)


@pytest.mark.parametrize("first, name", [*((FIRST, x) for x in ("ippo", "mappo", "madpo")), (WHOLE["ippo"], "mappo")])
def test_what_has_the_same_name_is_the_same_in_other_scripts(first, name):
    """A function, class or argument that was changed in one of them only."""
    ours, theirs = parts(first), parts(WHOLE[name])
    shared = ours.keys() & theirs.keys()
    assert {key for key in shared if ours[key] != theirs[key]} <= {"add_critic"} and len(shared) >= 40
    print(f"{name}.py: {len(shared)} functions, classes and arguments compared, of {len(theirs)}")


@pytest.mark.parametrize("name", WHOLE)
def test_a_script_knows_no_algorithms_name_and_imports_only_envs_of_this_repository(name):
    """A name that a copy would have to change; a file that would have to be copied too."""
    tree = ast.parse(WHOLE[name])
    code = WHOLE[name].replace(ast.get_docstring(tree, clean=False), "")
    assert re.findall(rf"(?i){'|'.join(WHOLE)}", code) == []
    imported = re.findall(r"^ *(?:from|import) (\w+)", code, re.M) + re.findall(r'import_module\("(\w+)', code)
    ours = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert {*imported} & {*ours, "rewards", "benchmarks", "tests"} == {"envs"}
    others = {"numpy", "peft", "torch", "tqdm", "transformers", "tyro", "yaml", "envs"}
    assert {*imported} - others <= sys.stdlib_module_names
