"""What is code in a completion, and the program that several completions make.

This runs in the sandbox (see Job.prepare), as text that nests deeply enough crashes the interpreter that parses it.
An agent is to define names: a function, or some methods of a class. Three rules, the same for every environment:
1. The code of a completion is its last closed fenced block that defines one of its names, or else the unclosed block
   at its end, the whole text, or the text from the first line that begins like code, whichever first defines one; or
   else the last block. Thoughts and common indentation do not count.
2. What is not Python ends before its first syntax error, such as prose, if one of the names is defined there.
3. Of the top level only imports, definitions and assignments are kept, but none that binds a name which another agent
   is to define, and no assignment that hides a built-in. So calls, prints, asserts and `if __name__ == ...` are not
   run, and an example such as `total = f(1)` that fails costs nothing.
"""

import ast
import builtins
import difflib
import re
import textwrap

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
IMPORTS = (ast.Import, ast.ImportFrom)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
ASSIGNMENTS = (ast.Assign, ast.AnnAssign)
KEPT = (*IMPORTS, *DEFINITIONS, *ASSIGNMENTS)
FUTURE = "from __future__ import annotations\n"  # annotations may name what is not imported, such as List
UNREAD = (SyntaxError, ValueError, MemoryError, RecursionError)  # raised for a NUL, a surrogate, deep nesting ...
BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(```|\Z)", re.DOTALL | re.MULTILINE)
CODE = r"^(?=[ \t]*(?:(?:async )?def |class |import |from [\w.]+ import |@\w))"  # how lines of code begin
BEFORE_CODE = re.compile(rf"\A.*?{CODE}", re.DOTALL | re.MULTILINE)


def read_code(text, names):
    """(statements of rule 3, error): the code of a completion that is to define one of the `names`."""
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    blocks = BLOCK.findall(text)  # pairs: code, and the fence that closes it
    closed = [code for code, fence in blocks[::-1] if fence]
    unclosed = [code for code, fence in blocks if not fence]
    candidates = [*closed, *unclosed, text, BEFORE_CODE.sub("", text)]
    for code in candidates:
        body, _ = parse(code)
        if find_functions(body) & {*names}:
            return body, ""
    body, error = parse(candidates[0])
    return ([], error) if error else (body, "")


def parse(code):
    """(statements of rule 3, error): of the lines before the first syntax error, if there is one."""
    lines = textwrap.dedent(code).split("\n")
    first_error = ""
    for _ in range(20):  # the first error that Python reports may come after others
        try:
            body = ast.parse("\n".join(lines)).body
        except SyntaxError as error:
            first_error = first_error or f"{error.msg} (line {error.lineno})"[:200]
            lines = lines[: min(len(lines), error.lineno or 1) - 1]
        except UNREAD as error:
            return [], describe(error)
        else:
            kept = [n for n in body if isinstance(n, KEPT) and getattr(n, "module", "") != "__future__"]
            return kept, first_error
    return [], first_error


def describe(error):
    return str(error)[:200] or "too deep for Python"


def find_functions(body):
    """The names of the functions among these statements, and of the methods of the classes among them."""
    methods = [part for node in body if isinstance(node, ast.ClassDef) for part in node.body]
    return {node.name for node in [*body, *methods] if isinstance(node, FUNCTIONS)}


def find_names(statement):
    """The names that a statement of rule 3 binds."""
    if isinstance(statement, DEFINITIONS):
        return {statement.name}
    if isinstance(statement, IMPORTS):
        return {part.asname or part.name.partition(".")[0] for part in statement.names}
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}


def drop_foreign(body, foreign):
    """The statements without those that bind one of the names `foreign`, or hide a built-in by an assignment."""
    hidden = {*dir(builtins), *foreign}
    return [n for n in body if not find_names(n) & (hidden if isinstance(n, ASSIGNMENTS) else {*foreign})]


def guard(statement):
    """The statement; an import or assignment in a `try`, as it may be an example, or nothing may need it."""
    if isinstance(statement, DEFINITIONS):
        return statement
    attempt = ast.parse("try: pass\nexcept Exception: pass").body[0]
    attempt.body = [statement]
    return attempt


def returns_something(function):
    """Whether a function yields or returns something else than None."""
    nodes = [n for n in ast.walk(function) if isinstance(n, (ast.Return, ast.Yield, ast.YieldFrom))]
    return any(getattr(node.value, "value", node.value) is not None for node in nodes)


def is_stub(function):
    """Whether a function has only a docstring, pass, ..., a bare return or raise NotImplementedError."""
    return all(map(is_idle, function.body))


def is_idle(statement):
    match statement:
        case ast.Pass() | ast.Expr(value=ast.Constant()) | ast.Return(value=None):
            return True
        case ast.Return(value=ast.Constant(value=constant)):
            return constant in (None, ...)
        case ast.Raise(exc=ast.Name(id="NotImplementedError") | ast.Call(func=ast.Name(id="NotImplementedError"))):
            return True
    return False


def is_method(statement):
    arguments = statement.args.args if isinstance(statement, FUNCTIONS) else []
    return bool(arguments) and arguments[0].arg in ("self", "cls")


def compile_body(body, errors):
    """(syntax tree, "") of a program, or (None, error): the first of `errors`, or what keeps it from compiling."""
    tree = ast.Module(body, [])
    error = next(filter(None, errors), "")
    try:
        compile(tree, "<answer>", "exec")
    except UNREAD as unread:
        error = error or describe(unread)
    return (None if error else tree), error


def prepare_text(texts):
    return texts[0], {}


def prepare(texts, helpers, entry_point, prelude="", stub="", alone=""):
    """The program that the answers make together, in the order of the agents, and facts about them.

    texts: one per agent: that of each helper in order, then that of the main function
    entry_point: the name of the main function
    prelude: trusted source that goes before them
    stub: source of what replaces each helper, with NAME for its name, or ""
    alone: name of a helper that replaces the main function, or ""

    Returns (syntax tree, or None if no program compiles; facts):
    defined: list[bool], whether each text defines its function and the function returns something
    syntax: bool, whether the program compiles
    called: list[bool] by helper: the text of the main function reads the helper's name
    ignored: list[bool] by helper: it does so only in calls that stand alone, as statements
    errors: list[str], the syntax error of each text, or ""
    error: str, the first of these, or what keeps the texts from compiling together
    """
    owned = [*helpers, entry_point]
    program = ast.parse(FUTURE + prelude).body
    defined = []
    errors = []
    for name, text in zip(owned, texts):
        body, error = read_code(text, [name])
        body = drop_foreign(body, {*owned} - {name})
        versions = [node for node in body if isinstance(node, FUNCTIONS) and node.name == name]
        # The last one may be cut off: then an earlier one that returns something counts.
        whole = [node for node in versions if returns_something(node)][-1:]
        body = [node for node in body if node not in versions or node in (whole or versions)]
        defined.append(bool(whole))
        errors.append(error)
        program += map(guard, body)
        if name in helpers:
            program += ast.parse(stub.replace("NAME", name)).body
    if alone:
        program += ast.parse(f"{entry_point} = {alone}").body
    tree, error = compile_body(program, errors)
    nodes = [n for part in body for n in ast.walk(part)]  # of the main function's text
    names = [n.id for n in nodes if isinstance(n, ast.Name)]
    lone_calls = [n.value for n in nodes if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)]
    dropped = [getattr(call.func, "id", "") for call in lone_calls]
    facts = {
        "defined": defined,
        "syntax": bool(tree) and defined[-1],
        "errors": errors,
        "error": error,
        "called": [helper in names for helper in helpers],
        "ignored": [0 < names.count(helper) == dropped.count(helper) for helper in helpers],
    }
    return (tree if defined[-1] else None), facts


def prepare_repair(texts, entry_point, prelude, program):
    """As `prepare` for the main function alone, with one more fact about the answer.

    program: trusted source with a bug, which the answer is to replace
    edits: int, the lines in which they differ; layout, comments and docstrings do not count
    """
    tree, facts = prepare(texts, [], entry_point, prelude)
    original, _ = prepare([program], [], entry_point, prelude)
    before = lines_of(original)
    edits = 0
    for name, lines in lines_of(tree).items():
        matcher = difflib.SequenceMatcher(None, before.get(name, []), lines, False)
        for kind, start, end, new_start, new_end in matcher.get_opcodes():
            if kind != "equal":
                edits += max(end - start, new_end - new_start)
    facts["edits"] = edits
    return tree, facts


def lines_of(tree):
    """name -> lines of the last statement of a program that binds it."""
    lines = {}
    for node in tree.body if tree else []:
        node = node.body[0] if isinstance(node, ast.Try) else node  # see guard()
        for part in ast.walk(node):
            if isinstance(part, DEFINITIONS) and ast.get_docstring(part) is not None and part.body[1:]:
                del part.body[0]
        if isinstance(node, KEPT):
            lines[" ".join(sorted(find_names(node)))] = ast.unparse(node).splitlines()
    return lines


def prepare_class(texts, assigned, class_name, base):
    """The module made by putting the methods that the agents wrote into the skeleton of a class.

    texts: one per agent; the text of an agent without methods to write is ignored
    assigned: list[list[str]], by agent: the names of the methods that it is to write
    base: trusted source of the skeleton, in which the methods belong to the class `class_name`

    An agent's methods may stand alone or in a class of that name. What else it wrote is kept if the skeleton does not
    bind its name: attributes and further methods in the class, the rest before it. Returns as `prepare`, with facts
    syntax, errors, error: as there
    written: list[list[bool]], for each assigned method whether its agent wrote it, with more than a stub as its body
    doubled: list[str], the assigned methods that more than one agent wrote
    """
    program = ast.parse(FUTURE + base)
    owner = next(node for node in program.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    skeleton = {node.name: node for node in owner.body if isinstance(node, FUNCTIONS)}
    taken = {name for node in program.body if isinstance(node, KEPT) for name in find_names(node)}
    errors = []
    methods = []  # by agent: name -> its definitions, of which a property may have several
    before = []  # statements that go before the class
    added = []  # and into it, before the skeleton's own
    for text, names in zip(texts, assigned):
        body, error = read_code(text, names) if names else ([], "")
        errors.append(error)
        definitions = {}
        for node, in_class in split_class(body, class_name):
            if isinstance(node, FUNCTIONS) and node.name in skeleton:
                if not is_stub(node):
                    node.decorator_list = node.decorator_list or skeleton[node.name].decorator_list
                    definitions.setdefault(node.name, []).append(node)
            elif in_class:
                added.append(node)
            elif not find_names(node) & taken:
                before.append(guard(node))
        methods.append(definitions)

    filled = {name: own[name] for names, own in zip(assigned, methods) for name in names if name in own}
    owner.body = added + [part for n in owner.body for part in filled.get(getattr(n, "name", ""), [n])]
    place = program.body.index(owner)
    program.body[place:place] = before
    tree, error = compile_body(program.body, errors)
    writers = [name for own in methods for name in own]
    facts = {
        "syntax": bool(tree),
        "errors": errors,
        "error": error,
        "written": [[name in own for name in names] for names, own in zip(assigned, methods)],
        "doubled": [name for names in assigned for name in names if writers.count(name) > 1],
    }
    return tree, facts


def split_class(body, class_name):
    """Pairs (statement, whether its place is in the class) of what an agent wrote."""
    classes = [node for node in body if isinstance(node, ast.ClassDef) and node.name == class_name]
    inside = [(part, True) for node in classes for part in node.body if isinstance(part, KEPT)]
    return inside + [(node, is_method(node)) for node in drop_foreign(body, [class_name])]
