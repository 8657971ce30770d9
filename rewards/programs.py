"""What is code in a completion, and the program that several completions make.

This runs in the sandbox (see Job.prepare), as text that nests deeply enough crashes the interpreter that parses it.
An agent is to define names: a function, or some methods of a class. Four rules, the same for every environment:
1. The code of a completion is its last closed fenced block that defines one of its names, or else the unclosed block
   at its end, the whole text, or the text from the first line that begins like code, whichever first defines one; or
   else the last closed block. Thoughts and common indentation do not count.
2. Before it come the blocks above it, and what imports or defines a name (a function, a class, a lambda) in the blocks
   below it; the rest of those, such as examples and tests, does not run.
3. What is not Python ends before its first syntax error, such as prose, if one of the names is defined there. Blanks,
   quotes and signs that Python does not know are those of a keyboard, if more can be read so.
4. The top level runs in order, each statement by itself: one that fails, exits, asks for input or takes half of the
   time costs nothing. What binds a name that another agent is to define is left out. The module is not "__main__".
"""

import ast
import difflib
import re
import textwrap

from rewards.texts import as_typed, drop_thoughts

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
IMPORTS = (ast.Import, ast.ImportFrom)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
WRITTEN = (*FUNCTIONS, ast.Lambda)
SHARED = (*WRITTEN, ast.ClassDef, ast.alias)  # what a block below gives to the code
CALLABLES = (*WRITTEN, ast.Name, ast.Attribute, ast.Call)  # what is called, or may turn out to be
# Annotations may name what is not imported, such as List; an example that takes half of the time ends.
BEFORE = """from __future__ import annotations
import builtins as _known, resource as _resource, signal as _signal
_signal.signal(_signal.SIGVTALRM, _signal.default_int_handler)
_signal.setitimer(_signal.ITIMER_VIRTUAL, _resource.getrlimit(_resource.RLIMIT_CPU)[0] / 2, 0.1)
"""
AFTER = """_signal.setitimer(_signal.ITIMER_VIRTUAL, 0)
for _name in _known.dir(_known):  # such as `sum`, after the example `sum = f(1)`
    if _name[0] != "_" and not _known.callable(_known.globals().get(_name, _known.exit)):
        del _known.globals()[_name]
"""
UNREAD = (SyntaxError, ValueError, MemoryError, RecursionError)  # raised for a NUL, a surrogate, deep nesting ...
BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(```|\Z)", re.DOTALL | re.MULTILINE)
IDLE = re.compile(r"""pass|return|return None|(return )?\.{3}|['"].*|raise NotImplementedError(\(.*)?""", re.DOTALL)
BEFORE_CODE = re.compile(r"(?ms)\A.*?^(?=[ \t]*(?:(?:async )?def |class |import |from [\w.]+ import |@\w))")


def _read_code(text, names):
    """(statements of rule 4, error): the code of a completion that is to define one of the `names`."""
    text = drop_thoughts(text)
    blocks = BLOCK.findall(text)  # pairs: code, and the fence that closes it, which only the last block may lack
    codes = [code for code, _ in blocks]
    bodies, errors = zip(*map(_parse, [*codes, text, BEFORE_CODE.sub("", text)]))
    closed = sum(fence != "" for _, fence in blocks)
    places = [*reversed(range(closed)), *range(closed, len(bodies))]  # indices of bodies, in the order of rule 1
    # An example such as `area = box.area()` is only taken for want of a function.
    for kinds in WRITTEN, CALLABLES:
        for place in places:
            body = bodies[place]
            methods = [part for node in body if isinstance(node, ast.ClassDef) for part in node.body]
            if _find_names(body + methods, kinds) & {*names}:
                shared = _take_shared(bodies[: min(place, len(blocks))], bodies[place + 1 : len(blocks)])
                # other versions of a function are drafts, unless this one returns nothing
                whole = {n.name for n in body if isinstance(n, FUNCTIONS) and _returns_something(n)}
                return [node for node in shared if whole.isdisjoint(_find_names([node]))] + body, ""
    error = errors[places[0]]
    return [] if error else bodies[places[0]], error


def _take_shared(above, below):
    """The statements of rule 2, from the bodies of the blocks above and below the code."""
    shared = []
    for body in above:
        shared += body
    for body in below:
        shared += [node for node in body if _find_names([node], SHARED)]
    return shared


def _parse(code):
    """(statements of rule 4, error): of the code, or of how one would type it if that reads further."""
    readings = map(_parse_lines, [code, as_typed(code)])
    return max(readings, key=lambda parsed: [n.end_lineno for n in parsed[0]][-1:])


def _parse_lines(code):
    """(statements of rule 4, error): of the lines before the first syntax error, if there is one."""
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
            # A definition that does not compile is an error; a `return` at the top level is only left out.
            return [n for n in body if isinstance(n, DEFINITIONS) or _compile_body([_guard(n)])[0]], first_error
    return [], first_error


def describe(error):
    return str(error)[:200] or "too deep for Python"


def _find_bindings(node, value=None):
    """Pairs (name, what it is bound to: a definition, an import or a value), of a statement and the blocks in it."""
    if isinstance(node, DEFINITIONS):
        return [(node.name, node)]
    if isinstance(node, ast.alias):
        return [(node.asname or node.name.partition(".")[0], node)]
    if isinstance(node, ast.expr) and not isinstance(getattr(node, "ctx", None), ast.Store):
        return []
    if isinstance(node, ast.Name):
        return [(node.id, value)]
    value = getattr(node, "value", None)
    pairs = []
    for child in ast.iter_child_nodes(node):
        pairs += _find_bindings(child, value)
    return pairs


def _find_names(body, kinds=object):
    """The names that statements bind to nodes of these kinds."""
    names = set()
    for node in body:
        names |= {name for name, value in _find_bindings(node) if isinstance(value, kinds)}
    return names


def _guard(statement):
    """The statement in a `try`: it may be an example, or nothing may need it."""
    attempt = ast.parse("try: pass\nexcept BaseException: pass").body[0]
    attempt.body.append(statement)  # after `pass`: in Python 3.11 no `try` holds the jump of a loop that is its start
    return attempt


def _returns_something(function):
    """Whether a function yields or returns something else than None."""
    nodes = [n for n in ast.walk(function) if isinstance(n, (ast.Return, ast.Yield, ast.YieldFrom))]
    return any(getattr(node.value, "value", node.value) is not None for node in nodes)


def is_stub(function):
    """Whether a function has only a docstring, pass, ..., a bare return or raise NotImplementedError."""
    return all(IDLE.fullmatch(ast.unparse(node)) for node in function.body)


def _compile_body(body, errors=()):
    """(syntax tree, "") of a program, or (None, error): the first of `errors`, or what keeps it from compiling."""
    tree = ast.Module(body + ast.parse(AFTER).body, [])
    error = next(filter(None, errors), "")
    try:
        compile(tree, "<answer>", "exec")
    except UNREAD as unread:
        error = error or describe(unread)
    return (None if error else tree), error


def _find_schemes(tree, helpers):
    """How a function cooperates with its helpers, named as in MAGRPO's section on coding: dict(name -> 1.0 or 0.0).

    tree: the function's text
    fallback: a helper is named in a `try`, or an `if` tests a name that got its result
    strategy_filter: a helper is named in an `if`, a conditional expression or the condition of a comprehension
    coordinator: a helper is named in a loop or an element of a comprehension, or helpers are named several times
    decorator: a helper is named, as in none of these, and not in a `return` of its call alone
    """
    nodes = [*ast.walk(tree)]

    def find(*kinds):
        return [node for node in nodes if isinstance(node, kinds)]

    def count(parts, names=helpers):
        return sum(isinstance(n, ast.Name) and n.id in names for part in parts for n in ast.walk(part))

    results = _find_names([node for node in find(ast.Assign) if count([node.value])])
    choices = find(ast.If, ast.IfExp)
    filters = [part for node in find(ast.comprehension) for part in node.ifs]
    repeated = [part for node in find(ast.For) for part in node.body] + find(ast.While)
    repeated += [node.elt for node in find(ast.ListComp, ast.SetComp, ast.GeneratorExp)]
    calls = [node.value for node in find(ast.Return) if isinstance(node.value, ast.Call)]
    returned = [call.func for call in calls if isinstance(call.func, ast.Name)]
    schemes = {
        "fallback": count(find(ast.Try)) or count([node.test for node in choices], results),
        "strategy_filter": count(choices + filters),
        "coordinator": count(repeated) or count([tree]) > 1,
    }
    schemes["decorator"] = count([tree]) and not (any(schemes.values()) or count(returned))
    return {name: float(shown > 0) for name, shown in schemes.items()}


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
    defined: list[bool], whether each text binds its name to what can be called, and what returns something
    syntax: bool, whether the program compiles
    called: list[bool] by helper: the main function's text reads its name, beside bare calls and asserts at the top
    ignored: list[bool] by helper: it does so only in calls that stand alone, as statements
    schemes: dict, 1.0 for each scheme of cooperation that the main function's text shows, else 0.0
    errors: list[str], the syntax error of each text, or ""
    error: str, the first of these, or what keeps the texts from compiling together
    """
    owned = [*helpers, entry_point]
    program = ast.parse(BEFORE + prelude).body
    defined = []
    errors = []
    for name, text in zip(owned, texts):
        body, error = _read_code(text, [name])
        body = [node for node in body if _find_names([node]).isdisjoint({*owned} - {name})]
        # a version that returns nothing, perhaps cut off, does not hide one that does
        hollow = [n for n in body if isinstance(n, FUNCTIONS) and n.name == name and not _returns_something(n)]
        rest = [node for node in body if node not in hollow]
        defined.append(name in _find_names(rest, CALLABLES))
        body = rest if defined[-1] else body
        errors.append(error)
        program += map(_guard, body)
        if name in helpers:
            program += ast.parse(stub.replace("NAME", name)).body
    if alone:
        program += ast.parse(f"{entry_point} = {alone}").body
    tree, error = _compile_body(program, errors)
    # `body` is now the main function's; what is an example does not count.
    asked = ast.Module([n for n in body if not isinstance(n, (ast.Expr, ast.Assert))], [])
    nodes = [*ast.walk(asked)]
    names = [n.id for n in nodes if isinstance(n, ast.Name)]
    dropped = [ast.unparse(n).partition("(")[0] for n in nodes if isinstance(n, ast.Expr)]
    facts = {
        "defined": defined,
        "syntax": bool(tree) and defined[-1],
        "errors": errors,
        "error": error,
        "called": [helper in names for helper in helpers],
        "ignored": [0 < names.count(helper) == dropped.count(helper) for helper in helpers],
        "schemes": _find_schemes(asked, helpers),
    }
    return (tree if defined[-1] else None), facts


def prepare_repair(texts, entry_point, prelude, program):
    """As `prepare` for the main function alone, with one more fact about the answer.

    program: trusted source with a bug, which the answer is to replace
    edits: int, the lines in which what the program binds differs; layout, comments and docstrings do not count
    """
    tree, facts = prepare(texts, [], entry_point, prelude)
    original, _ = prepare([program], [], entry_point, prelude)
    after = _find_lines(tree)
    edits = 0
    for name, lines in _find_lines(original).items():
        matcher = difflib.SequenceMatcher(None, lines, after.get(name, []), False)
        for kind, start, end, new_start, new_end in matcher.get_opcodes():
            if kind != "equal":
                edits += max(end - start, new_end - new_start)
    return tree, facts | {"edits": edits}


def _find_lines(tree):
    """name -> lines of the last statement of a program that binds it."""
    lines = {}
    for node in tree.body if tree else []:
        node = node.body[-1] if isinstance(node, ast.Try) else node  # see _guard
        for part in ast.walk(node):
            if isinstance(part, DEFINITIONS) and ast.get_docstring(part) is not None and part.body[1:]:
                del part.body[0]
        if names := _find_names([node]):
            lines[" ".join(sorted(names))] = ast.unparse(node).splitlines()
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
    program = ast.parse(BEFORE + base)
    owner = next(node for node in program.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    skeleton = {node.name: node for node in owner.body if isinstance(node, FUNCTIONS)}
    taken = _find_names(program.body)
    errors = []
    methods = []  # by agent: name -> its definitions, of which a property may have several
    before = []  # statements that go before the class
    added = []  # and into it, before the skeleton's own
    for text, names in zip(texts, assigned):
        body, error = _read_code(text, names) if names else ([], "")
        errors.append(error)
        definitions = {}
        for node, in_class in _split_class(body, class_name):
            if isinstance(node, FUNCTIONS) and node.name in skeleton:
                if not is_stub(node):
                    node.decorator_list = node.decorator_list or skeleton[node.name].decorator_list
                    definitions.setdefault(node.name, []).append(node)
            elif in_class:
                added.append(_guard(node))
            elif not _find_names([node]) & taken:
                before.append(_guard(node))
        methods.append(definitions)

    filled = {}
    for names, own in zip(assigned, methods):
        filled |= {name: own[name] for name in names if name in own}
    owner.body = added + [part for n in owner.body for part in filled.get(getattr(n, "name", ""), [n])]
    place = program.body.index(owner)
    program.body[place:place] = before
    tree, error = _compile_body(program.body, errors)
    writers = [name for own in methods for name in own]
    facts = {
        "syntax": bool(tree),
        "errors": errors,
        "error": error,
        "written": [[name in own for name in names] for names, own in zip(assigned, methods)],
        "doubled": [name for names in assigned for name in names if writers.count(name) > 1],
    }
    return tree, facts


def _split_class(body, class_name):
    """Pairs (statement, whether its place is in the class) of what an agent wrote."""
    pairs = []
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            pairs += [(part, True) for part in node.body]
        elif class_name not in _find_names([node]):
            arguments = node.args.args if isinstance(node, FUNCTIONS) else []
            pairs.append((node, bool(arguments) and arguments[0].arg in ("self", "cls")))
    return pairs
