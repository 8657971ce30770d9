"""What is code in a completion, and the program that several completions make.

This runs in the sandbox (see Job.prepare), as text that nests deeply enough crashes the interpreter that parses it.
An agent is asked for names, a function or some methods of a class. Three rules, the same for every environment:
1. The code of a completion is its last closed fenced block that defines an asked name, or else the unclosed block at
   its end, the whole text, or the text from the first line that begins like code, whichever first defines one; or
   else the last block. Thoughts and common indentation do not count.
2. What is not Python ends before its first syntax error, such as prose, if an asked name is defined there.
3. Of the top level only imports, definitions and assignments are kept, but none that gives a name which another agent
   was asked for, and no assignment that hides a built-in. So calls, prints, asserts and `if __name__ == ...` are not
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


def read(text, names):
    """(statements of rule 3, error): the code of a completion that is to define one of the `names`."""
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    blocks = BLOCK.findall(text)  # pairs: code, and the fence that closes it
    closed = [code for code, fence in blocks if fence]
    unclosed = [code for code, fence in blocks if not fence]
    candidates = [*reversed(closed), *unclosed, text, BEFORE_CODE.sub("", text)]
    for code in candidates:
        body, _ = parse(code)
        if defined_in(body) & {*names}:
            return body, ""
    body, error = parse(candidates[0])
    return ([], error) if error else (body, "")


def parse(code):
    """(statements of rule 3, error): of the lines before the first syntax error, if there is one."""
    lines, first = textwrap.dedent(code).split("\n"), ""
    for _ in range(20):  # the first error that Python reports may stand behind others
        try:
            body = ast.parse("\n".join(lines)).body
        except SyntaxError as error:
            first = first or f"{error.msg} (line {error.lineno})"[:200]
            lines = lines[: min(len(lines), error.lineno or 1) - 1]
        except UNREAD as error:
            return [], str(error)[:200] or "too deep for Python"
        else:
            kept = [node for node in body if isinstance(node, KEPT)]
            return [node for node in kept if getattr(node, "module", "") != "__future__"], first
    return [], first


def defined_in(body):
    """The names of the functions among these statements, and of the methods of the classes among them."""
    methods = [part for node in body if isinstance(node, ast.ClassDef) for part in node.body]
    return {node.name for node in [*body, *methods] if isinstance(node, FUNCTIONS)}


def gives(statement):
    """The names that a statement of rule 3 binds."""
    if isinstance(statement, DEFINITIONS):
        return {statement.name}
    if isinstance(statement, IMPORTS):
        return {part.asname or part.name.partition(".")[0] for part in statement.names}
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}


def own(body, foreign):
    """The statements without those that give one of the names `foreign`, or hide a built-in by an assignment."""
    hidden = {*dir(builtins), *foreign}
    return [n for n in body if not gives(n) & (hidden if isinstance(n, ASSIGNMENTS) else {*foreign})]


def guarded(statement):
    """The statement; an import or assignment in a `try`, as it may be an example, or nothing may need it."""
    if isinstance(statement, DEFINITIONS):
        return statement
    attempt = ast.parse("try: pass\nexcept Exception: pass").body[0]
    attempt.body = [statement]
    return attempt


def returns(function):
    """Whether a function yields or returns something else than None."""
    nodes = [n for n in ast.walk(function) if isinstance(n, (ast.Return, ast.Yield, ast.YieldFrom))]
    return any(getattr(node.value, "value", node.value) is not None for node in nodes)


def is_stub(function):
    """Whether a function has only a docstring, pass, ..., a bare return or raise NotImplementedError."""
    return all(map(is_idle, function.body))


def is_idle(statement):
    value = getattr(statement, "value", None)
    if isinstance(statement, ast.Raise):
        raised = getattr(statement.exc, "func", statement.exc)
        return getattr(raised, "id", "") == "NotImplementedError"
    if isinstance(statement, ast.Return):
        return getattr(value, "value", value) in (None, ...)
    if isinstance(statement, ast.Expr):
        return isinstance(value, ast.Constant)
    return isinstance(statement, ast.Pass)


def is_method(statement):
    arguments = statement.args.args if isinstance(statement, FUNCTIONS) else []
    return [argument.arg for argument in arguments[:1]] in (["self"], ["cls"])


def compiled(body, errors):
    tree, error = ast.Module(body, []), next(filter(None, errors), "")
    try:
        compile(tree, "<answer>", "exec")
    except UNREAD as unread:
        error = error or str(unread)[:200] or "too deep for Python"
    return (None if error else tree), error


def prepare_text(texts):
    return texts[0], {}


def prepare(texts, helpers, entry_point, prelude="", stub="", alone=""):
    """The program that the answers make together, in the order of the agents, and facts about them.

    texts: one per agent: the helpers' in order, then the asked function's
    prelude: trusted source that goes before them
    stub: source of what replaces each helper, with NAME for its name, or ""
    alone: name of a helper that replaces the asked function, or ""

    Returns (syntax tree, or None if no program compiles; facts):
    defined: list[bool], whether each text defines its function and the function returns something
    syntax: bool, whether the program compiles
    called: list[bool] by helper: the text of the asked function reads the helper's name
    ignored: list[bool] by helper: it does so only in calls that stand alone, as statements
    errors: list[str], the syntax error of each text, or ""
    error: str, the first of these, or what keeps the texts from compiling together
    """
    owned = [*helpers, entry_point]
    program, defined, errors = ast.parse(FUTURE + prelude).body, [], []
    for name, text in zip(owned, texts):
        body, error = read(text, [name])
        body = own(body, {*owned} - {name})
        versions = [node for node in body if isinstance(node, FUNCTIONS) and node.name == name]
        # The last one may be cut off: then an earlier one that returns something counts.
        whole = [node for node in versions if returns(node)][-1:]
        body = [node for node in body if node not in versions or node in (whole or versions)]
        defined.append(bool(whole))
        errors.append(error)
        program += map(guarded, body)
        program += ast.parse(stub.replace("NAME", name) if name in helpers else "").body
    program += ast.parse(f"{entry_point} = {alone}" if alone else "").body
    tree, error = compiled(program, errors)  # None if there is an error
    nodes = [n for part in body for n in ast.walk(part)]  # of the asked function's text
    names = [n.id for n in nodes if isinstance(n, ast.Name)]
    statements = [n.value for n in nodes if isinstance(n, ast.Expr)]
    dropped = [getattr(n.func, "id", "") for n in statements if isinstance(n, ast.Call)]
    facts = {"defined": defined, "syntax": bool(tree) and defined[-1], "errors": errors, "error": error}
    facts["called"] = [helper in names for helper in helpers]
    facts["ignored"] = [0 < names.count(helper) == dropped.count(helper) for helper in helpers]
    return (tree if defined[-1] else None), facts


def prepare_repair(texts, entry_point, prelude, program):
    """As `prepare` for the asked function alone, with one more fact about the answer.

    program: trusted source with a bug, which the answer is to replace
    edits: int, the lines in which they differ; layout, comments and docstrings do not count
    """
    tree, facts = prepare(texts, [], entry_point, prelude)
    before, after = _versions(prepare([program], [], entry_point, prelude)[0]), _versions(tree)
    changed = [difflib.SequenceMatcher(None, before.get(name, []), lines, False) for name, lines in after.items()]
    spans = [span for matcher in changed for span in matcher.get_opcodes() if span[0] != "equal"]
    facts["edits"] = sum(max(span[2] - span[1], span[4] - span[3]) for span in spans)
    return tree, facts


def _versions(tree):
    """name -> lines of the last statement of a program that gives it."""
    versions = {}
    for node in tree.body if tree else []:
        node = node.body[0] if isinstance(node, ast.Try) else node  # see guarded()
        for part in ast.walk(node):
            if isinstance(part, DEFINITIONS) and ast.get_docstring(part) is not None and part.body[1:]:
                del part.body[0]
        if isinstance(node, KEPT):
            versions[" ".join(sorted(gives(node)))] = ast.unparse(node).splitlines()
    return versions


def prepare_class(texts, assigned, class_name, base):
    """The module made by putting the methods that the agents wrote into the skeleton of a class.

    texts: one per agent; the text of an agent without methods to write is ignored
    assigned: list[list[str]], by agent: the names of the methods that it is to write
    base: trusted source of the skeleton, in which the methods belong to the class `class_name`

    An agent's methods may stand alone or in a class of that name. What else it wrote is kept if the skeleton does not
    give its name: attributes and further methods in the class, the rest before it. Returns as `prepare`, with facts
    syntax, errors, error: as there
    written: list[list[bool]], for each assigned method whether its agent wrote it, with more than a stub as its body
    doubled: list[str], the assigned methods that more than one agent wrote
    """
    program = ast.parse(FUTURE + base)
    owner = next(node for node in program.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    skeleton = {node.name: node for node in owner.body if isinstance(node, FUNCTIONS)}
    given = {name for node in program.body if isinstance(node, KEPT) for name in gives(node)}
    wrote, filled, errors, before, added = [], {}, [], [], []
    for text, names in zip(texts, assigned):
        body, error = read(text, names) if names else ([], "")
        errors.append(error)
        found = {}  # name -> its definitions: a property may have several
        whole = [node for node in body if isinstance(node, ast.ClassDef) and node.name == class_name]
        parts = [(part, True) for node in whole for part in node.body if isinstance(part, KEPT)]
        parts += [(node, is_method(node)) for node in own(body, [class_name])]
        for node, inside in parts:  # inside: its place is in the class
            if isinstance(node, FUNCTIONS) and node.name in skeleton:
                if not is_stub(node):
                    node.decorator_list = node.decorator_list or skeleton[node.name].decorator_list
                    found.setdefault(node.name, []).append(node)
            elif inside:  # before the skeleton's own
                added.append(node)
            elif not gives(node) & given:
                before.append(guarded(node))
        wrote.append(found)
        filled |= {name: found[name] for name in names if name in found}
    owner.body = added + [part for n in owner.body for part in filled.get(getattr(n, "name", ""), [n])]
    place = program.body.index(owner)
    program.body[place:place] = before
    tree, error = compiled(program.body, errors)
    facts = {"syntax": bool(tree), "errors": errors, "error": error}
    facts["written"] = [[name in found for name in names] for names, found in zip(assigned, wrote)]
    writers = [name for found in wrote for name in found]
    facts["doubled"] = [name for names in assigned for name in names if writers.count(name) > 1]
    return tree, facts
