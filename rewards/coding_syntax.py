"""Analyses the syntax trees of a joint answer, and builds the program to test. Runs in the sandbox: see Job.prepare.

Model-written text is never parsed in the trainer, because deep enough nesting crashes the interpreter that parses it.
The sandbox gets the source of this file, so the file imports only the standard library.
"""

import ast
import builtins
import itertools
import keyword
import re
import sys

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
IMPORTS = (ast.Import, ast.ImportFrom)
ASSIGNING = (ast.Assign, ast.AnnAssign)
NAMING = (*DEFINITIONS, *IMPORTS)
FUTURE = "from __future__ import annotations\n"  # annotations may name what is not imported, such as List


# A function and its helpers ------------------------------------------------------------------------------------------

# Stubs that replace a helper, to see how the tests do without it. The values of NOTHING act as nothing: they are empty
# and 0 as numbers, no comparison of order holds, adding one or dividing by one changes nothing, only () equals one.
# ECHO returns its argument: with it, `return aux(result)` does as well as with a helper if the asked function has done
# all the work.
NOTHING = """
class {name}(tuple):
    __new__ = lambda cls, *args, **keywords: tuple.__new__(cls)
    __add__ = __radd__ = __sub__ = __rsub__ = __or__ = __ror__ = __xor__ = __rxor__ = lambda self, other: other
    __and__ = __rand__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __rpow__ = __radd__
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __radd__
    __mul__ = __rmul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = lambda self, *args: self
    __neg__ = __pos__ = __abs__ = __round__ = lambda self, *args: self
    __call__ = __getattr__ = __getitem__ = lambda self, *args, **keywords: self
    __lt__ = __le__ = __gt__ = __ge__ = lambda self, other: False
    __int__ = __index__ = lambda self: 0
    __float__ = lambda self: 0.0
    __str__ = __format__ = lambda self, *args: ""
    join = lambda self, texts: "".join(texts)
"""
ECHO = """
def {name}(*args, **keywords):
    return [*args, *keywords.values(), None][0]
"""
STUBS = [NOTHING, ECHO]


def prepare(texts, helpers, entry_point, prelude="", stub="", alone=None):
    """The program that the answers make together, and facts about them.

    texts: one per agent: the helpers' in order, then the asked function's
    prelude: trusted source that goes before them, such as the imports of the task's prompt
    stub: one of STUBS, defined under each helper's name after its text, or ""; the rest of the text stays as it is
    alone: name of a helper that replaces the asked function, or None

    Returns (syntax tree, or None if no program compiles; facts). Facts:
    defined: list[bool], whether each text defines its function and the function returns something
    syntax: bool, whether the program compiles
    uses: list[bool] by helper: the asked function calls the helper or passes it on, and uses some of what it returns
    ignored: list[bool] by helper: the asked function calls the helper and drops all that it returns
    errors: list[str], the first syntax error of each text; "" if it is Python
    error: str, the first of these, or what keeps the texts from compiling together
    """
    owned = [*helpers, entry_point]
    bodies, defined, errors, may_fail = [], [], [], set()
    for i, (name, text) in enumerate(zip(owned, texts)):
        others = {*owned} - {name}  # this agent may not define what others were asked for
        body, error = read_function(text, name, others)
        errors.append(error[:200])
        body = [n for n in body if not (isinstance(n, FUNCTIONS) or _is_constant(n)) or not _gives(n) & others]
        body = _joined(body, others, owned)
        # A statement that reads a function defined only later is an example of use.
        later = {*owned[i + 1 :]}.difference(dir(builtins), *map(_gives, body))
        examples = _leading(body, lambda node, _, names, later=later: _reads(node) & (later | names))
        function = next(reversed(_definitions(body, name)), None)  # the one that Python would call
        defined.append(_returns(function))
        body = [node for node in body if isinstance(node, DEFINITIONS) or node not in examples]
        needed = []  # what must not fail: the function, what runs before it, and what these read
        if function:
            run = [n for n in body[: body.index(function)] if not isinstance(n, (*NAMING, ast.Expr))] + [function]
            needed = run + _named(body, run)
            # A later example such as `list = [1, 2]` would hide the built-in from all agents' code.
            taken = {*dir(builtins)}.difference(owned)
            body = [n for n in body if n in needed or isinstance(n, DEFINITIONS) or not _gives(n) & taken]
        may_fail.update({*body}.difference(needed))
        bodies.append(body)
    facts = {"defined": defined, "syntax": False, "uses": [], "ignored": []}
    facts |= {"errors": errors, "error": next(filter(None, errors), "")}
    program = None
    if defined[-1] and not facts["error"]:
        instead = [stub.format(name=helper) for helper in helpers] + [f"{entry_point} = {alone}" if alone else ""]
        body = ast.parse(prelude).body
        for own, source in zip(bodies, instead):
            body += own + ast.parse(source).body
        program, facts["error"] = _compiled(body, may_fail)
    if program:
        facts.update(syntax=True, **_cooperation(bodies[-1], entry_point, helpers))
    return program, facts


def _joined(body, others, owned):
    """The statements without imports of the other agents' functions, whatever module these are imported from.

    `from helpers import aux` is removed, `from helpers import aux as h` becomes h = aux, and after `import helpers` or
    `from lib import helpers`, helpers.aux becomes aux. But `from math import gcd` in a function imports the library's,
    from which the agent may make its own gcd.
    """
    nodes = [(n, part) for n in body for part in ast.walk(n)]
    module = lambda node, part: getattr(node, "module", part.name) or ""  # "" for `from . import`
    library = lambda node: all(module(node, p).partition(".")[0] in sys.stdlib_module_names for p in node.names)
    imports = [node for _, node in nodes if isinstance(node, IMPORTS) and not library(node)]
    modules = set().union(*map(_gives, imports)) - sys.stdlib_module_names
    there = lambda part: part.name in owned and part.asname in (None, part.name)
    joined = set()  # modules that stand for the other agents' code
    for _, node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in others and _root(node.value) in modules:
            joined.add(_root(node.value))
            node.__class__, node.id = ast.Name, node.attr
    for top, node in nodes:
        if node not in imports:
            continue
        kept = [p for p in node.names if not there(p) and (p.asname or p.name.partition(".")[0]) not in joined]
        if kept:
            node.names = kept
        elif isinstance(top, DEFINITIONS):
            node.__class__ = ast.Pass  # it may be the only statement of its block
        if len(kept) == 1 and kept[0].name in others:
            node.__class__, node.value = ast.Assign, ast.Name(kept[0].name, ast.Load())
            node.targets = [ast.Name(kept[0].asname, ast.Store())]
            ast.fix_missing_locations(node)
    return [node for node in body if not _is_idle(node, owned)]


# A class -------------------------------------------------------------------------------------------------------------

# Methods that would let a class find its other methods elsewhere.
HOOKS = {"__getattribute__", "__getattr__", "__new__", "__init_subclass__", "__set_name__"}
# What reaches a name without mentioning it; and what reaches the class, or its making, while it is made.
UNSAID = {"globals", "locals", "vars", "exec", "eval"}
REACH = UNSAID | {"builtins", "__builtins__", "__globals__", "f_globals", "f_locals", "modules", "__set_name__"}
REACH |= {"_getframe", "currentframe"}
LOOKUPS = REACH | {"getattr", "setattr", "__setattr__", "__dict__"}  # these take a name as a string
# Fields of a node that hold names, also those of `import a as name` and f(name=1), but not a function's parameters.
SAYING = "id", "attr", "value", "name", "asname", "arg", "module", "__class__"


def prepare_class(texts, assigned, class_name, base):
    """The module made by putting the methods that the agents wrote into the skeleton of a class.

    texts: one per agent; the text of an agent without methods to write is ignored
    assigned: list[list[str]], by agent: the names of the methods that it is to write
    class_name: the class in `base` that the methods belong to
    base: trusted source of the skeleton

    An agent's definitions count wherever they stand, also inside a class of that name; so do assignments to methods.
    Of the skeleton's methods, an agent may define only its own. Its imports, new functions and other statements are
    kept, but inside the class only definitions and assignments (none of HOOKS), and outside none that uses or
    replaces the class. A method that is called by its bare name is also put outside. What is added to the class comes
    before the methods, or after them if it reads or replaces one. Of a block without methods, only what the blocks
    with methods read is kept. What is outside goes before the class, as defaults may read it, unless it leads to the
    class or to REACH, or rebinds a known name.

    Returns (syntax tree, or None if no program compiles; facts). Facts:
    written: list[list[bool]], for each assigned method whether its agent wrote it, with more than a stub as its body
    doubled: list[str], the assigned methods that more than one agent wrote
    syntax: bool, whether all texts are Python and the module compiles
    errors, error: as in `prepare`
    """
    program = ast.parse(base)
    owner = next(node for node in program.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    methods = {node.name: node for node in owner.body if isinstance(node, FUNCTIONS)}
    given = {node.name for node in program.body if isinstance(node, DEFINITIONS)} | methods.keys()
    place = program.body.index(owner)
    known = _loaded(program).union(dir(builtins), *map(_gives, program.body))
    behind = REACH.union([ast.Global], *map(_gives, program.body[place:]))  # must not be mentioned before the class
    wrote, filled, errors, imports, added, further = [], {}, [], [], [], []

    for text, names in zip(texts, assigned):
        statements, error = read_methods(text, names, given, class_name) if names else ([], "")
        errors.append(error[:200])
        functions = [f for n in statements for f in ast.walk(n) if isinstance(f, FUNCTIONS) and not is_stub(f)]
        begun = {_root(decorator) for f in functions for decorator in f.decorator_list}  # as in @count.setter
        # Names read bare: a method of that name also goes outside, even if its first argument is self.
        bodies = [part for f in functions for part in f.body] + [n for n in statements if n not in functions]
        elsewhere = given.union(dir(builtins), *[_gives(n) for n in statements if not _is_method(n)])
        bare = set().union(*map(_loaded, bodies)) - elsewhere
        found = {}  # method -> the nodes that define it
        for node in statements:
            whole = isinstance(node, ast.ClassDef) and node.name == class_name
            inside = whole or _is_method(node)
            if inside and not whole and node.name in bare:
                further.append(node)
            for part in node.body if whole else [node]:
                name = getattr(part, "name", None)
                # Evaluating the part, while the class is made, may bind no names but its own.
                alone = isinstance(part, ASSIGNING) or (isinstance(part, DEFINITIONS) and _gives(part) == {name})
                if inside and not (alone and REACH.isdisjoint(_said(_at_once(part)))):
                    continue  # it is not kept, so it writes nothing either
                if isinstance(part, FUNCTIONS):
                    stored = {name} & methods.keys() if name in begun or not is_stub(part) else set()
                else:
                    stored = _stored(part, class_name, methods if inside else ()) & (methods.keys() | HOOKS)
                for method in stored:
                    found.setdefault(method, []).append(part)
                if not stored.issubset(names):  # it sets another agent's method
                    continue
                new = isinstance(part, DEFINITIONS) and name not in given | HOOKS
                if inside and (new or isinstance(part, ASSIGNING)):
                    added.append(part)
                elif not inside and isinstance(part, IMPORTS):
                    imports.append(part)
                elif not inside and name not in given:
                    further.append(part)
        for name in found.keys() & names:
            parts = [part for part in found[name] if isinstance(part, FUNCTIONS)]
            if parts:
                # A version goes on with the definitions that build on it, as @count.setter does.
                starts = [i for i, part in enumerate(parts) if i == 0 or name not in map(_root, part.decorator_list)]
                versions = [parts[i:j] for i, j in zip(starts, [*starts[1:], None])]
                filled[methods[name]] = _last_version(versions, _acts)
                again = any(name in _gives(n) for n in added)  # as in size = property(size)
                for part in [] if again else parts:
                    static = "staticmethod" in map(_root, methods[name].decorator_list)
                    takes_self = [arg.arg for arg in part.args.args[:1]] == ["self"]  # so the agent's is not static
                    if not (part.decorator_list or (static and takes_self)):
                        part.decorator_list = methods[name].decorator_list
        wrote.append(found)
    # Additions may read the skeleton's attributes, and methods' decorators and defaults may read the additions. But
    # additions that read or replace a method come last, and so do those that read or replace these.
    last, names = [], {*methods}
    for node in added:
        read = {getattr(n, "id", None) for n in _at_once(node)}
        if (_stored(node, class_name, methods) | _gives(node) | read) & names:
            last.append(node)
            names |= _gives(node)
    first = list(itertools.takewhile(lambda node: not isinstance(node, FUNCTIONS), owner.body))
    body = [part for node in owner.body[len(first) :] for part in filled.get(node, [node])]
    owner.body = first + [node for node in added if node not in last] + body + last

    def is_late(statement, said, names):
        replaces = not isinstance(statement, IMPORTS) and _gives(statement) & known
        return replaces or not (behind | names).isdisjoint(said)

    further = _not_using(further, class_name)
    late = _leading(imports + further, is_late)
    # What only a further method reads may fail, unless its name is said elsewhere or means something to Python.
    said = {getattr(n, part, None) for n in ast.walk(program) for part in ("id", "attr", "value")}
    extra = [n for n in added if _is_method(n) and not n.decorator_list and n.name not in said and n.name[:2] != "__"]
    asked = [n for n in [*program.body, *owner.body] if n is not owner and n not in extra]
    may_fail = {*imports, *further}.difference(_named(imports + further, asked))
    program.body[place:place] = [n for n in further if n not in late]
    program, error = _compiled(imports + program.body + [n for n in further if n in late], may_fail)
    error = next(filter(None, errors), error)
    written = [[name in found for name in names] for names, found in zip(assigned, wrote)]
    doubled = [name for names in assigned for name in names if sum(name in found for found in wrote) > 1]
    facts = {"written": written, "doubled": doubled, "syntax": not error, "errors": errors, "error": error}
    return (None if error else program), facts


def _at_once(part):
    """The nodes of a statement in a class that are evaluated while the class is made: of a function, not its body."""
    body = part.body if isinstance(part, FUNCTIONS) else []
    return [node for child in ast.iter_child_nodes(part) if child not in body for node in ast.walk(child)]


def _said(nodes):
    return [getattr(node, field, None) for node in nodes if not isinstance(node, ast.arg) for field in SAYING]


def _stored(statement, class_name, methods):
    """Names of the class that a statement binds or changes a part of, such as __code__, also by setattr.

    methods: the class's methods for a statement inside it; empty for one outside, where bare names mean other things
    """
    nodes = [] if _is_idle(statement, ()) else list(_walk([statement]))  # `size: int` binds nothing
    calls = [n for n in nodes if isinstance(n, ast.Call) and _root(n.func) == "setattr" and len(n.args) > 2]
    targets = [n for n in nodes if not isinstance(getattr(n, "ctx", ast.Load()), ast.Load)]
    names = {n.id for n in targets if methods and isinstance(n, ast.Name)}
    for path in map(_path, [*targets, *[call.args[0] for call in calls]]):  # Box.size.__code__; inside, size.__code__
        names.update(path[1:2] if path[0] == class_name else {path[0]} & {*methods})
    attributes = [call.args[1] for call in calls if _path(call.args[0]) == [class_name]]
    return names | {a.value for a in attributes if isinstance(a, ast.Constant)}


def _not_using(statements, class_name):
    """The statements outside a class that define something, or name the class at most to set an attribute of it.

    The others are dropped: an example of use may fail, and `Box = Whole` would replace the class.
    """

    def is_example(statement, said, names):
        # A string names the class only if something looks names up: not in logging.getLogger("Box").
        texts = [n for n in ast.walk(statement) if isinstance(n, ast.Constant) and n.value == class_name]
        count = said.count(class_name) - (len(texts) if LOOKUPS.isdisjoint(said) else 0)
        only_sets = count == len(_stored(statement, class_name, methods=()))
        return not only_sets or not (UNSAID | names).isdisjoint(said)

    examples = _leading(statements, is_example)
    return [node for node in statements if isinstance(node, DEFINITIONS) or node not in examples]


# Whether the helpers are used ----------------------------------------------------------------------------------------

DROPPING = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign)


def _cooperation(body, entry_point, helpers):
    """The facts `uses` and `ignored` of `prepare`.

    This looks at names only: not at the order of statements, nor at whether they are ever reached. The tests show
    whether a use makes a difference.
    """
    definitions = [node for node in body if isinstance(node, DEFINITIONS)]
    at_once = [node for node in body if node not in definitions]
    reached = at_once + _needed(definitions, [*at_once, ast.Name(entry_point, ast.Load())])
    nodes = [node for part in reached for node in ast.walk(part)]
    # A variable with a helper's name is not the helper; the tests show which of the two is used. But code that changes
    # a part of the helper, such as its __code__, does not use the original helper.
    rebound = {name for node in nodes for name in _binds(node)}
    changed = {name for node in nodes if isinstance(node, (ast.Attribute, ast.Subscript)) for name in _binds(node)}
    # `drop`: statements whose values are dropped, or go only into names and objects that no other statement reads.
    reads = {node: _read(node) for node in nodes if isinstance(node, ast.stmt)}
    inert = {*helpers, *dir(builtins)}
    drop, read = {s: _alters(s, inert) for s in reads if isinstance(s, DROPPING)}, set()
    matter = reads.keys() - drop
    while matter:
        read.update(*[reads[s] for s in matter])
        matter = {s for s in drop if not read.isdisjoint(drop[s])}
        drop = {s: altered for s, altered in drop.items() if s not in matter}
    called = set().union(*reads.values())
    return {
        "uses": [helper in read - changed for helper in helpers],
        "ignored": [helper in called - read - rebound for helper in helpers],
    }


def _read(statement):
    """Names that a statement itself reads, without the statements inside it; a bare mention does not count."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Name):
        return set()
    nodes = [statement]
    for node in nodes:
        nodes += [n for n in ast.iter_child_nodes(node) if not isinstance(n, ast.stmt)]
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def _alters(statement, inert):
    """The names that a statement binds, and those that its calls of functions not in `inert` may change."""
    calls = [n for n in ast.walk(statement) if isinstance(n, ast.Call) and getattr(n.func, "id", None) not in inert]
    parts = [part for call in calls for part in (call.func, *call.args, *[k.value for k in call.keywords])]
    return _gives(statement).union(_root(part) for part in parts if not isinstance(part, ast.Call))


# Which statements count ----------------------------------------------------------------------------------------------


def _needed(others, code, hints=True):
    """The statements among `others` that the code reads, directly or through each other.

    The rest may be tests or examples that import missing modules. `hints` as in _loaded.
    """
    loaded = {node: _loaded(node, hints) for node in others + code}
    read, before = {"*"}.union(*map(loaded.get, code)), None  # what `import *` gives may be read
    gives = {node: _gives(node) for node in others}
    while read != before:
        read, before = read.union(*[loaded[node] for node in others if gives[node] & read]), read
    return [node for node in others if gives[node] & read]


def _named(statements, code):
    """The definitions and imports among the statements that the code needs: these must not fail.

    `import *` may fail, since it may stand for another agent's code. So may what only annotations read, such as
    numpy's types: with the __future__ import, annotations are not evaluated.
    """
    needed = _needed(statements, code, hints=False)
    return [node for node in needed if isinstance(node, NAMING) and "*" not in _gives(node)]


def _leading(statements, leads):
    """The statements for which `leads` holds, given their names and what the others define, or bind before them."""
    said = {s: _said(ast.walk(s)) for s in statements}
    found, before = [], None
    while found != before:
        found, before, names = [], found, {node.name for node in found if isinstance(node, DEFINITIONS)}
        for statement in statements:
            if leads(statement, said[statement], names):
                found.append(statement)
                names |= _gives(statement)
    return found


def _compiled(body, may_fail):
    """(syntax tree, or None if it does not compile; error): without unused imports, whose modules may be missing.

    The statements in `may_fail` go into a try block: an example of use may fail for lack of input or of a correct
    answer, a test for lack of its test framework.
    """
    read = {"*"}.union(*map(_loaded, body))
    program = ast.parse(FUTURE)
    for node in body:
        if isinstance(node, IMPORTS) and (not _gives(node) & read or getattr(node, "module", "") == "__future__"):
            continue
        if node in may_fail:
            tried = ast.parse("try: pass\nexcept BaseException: pass").body[0]
            tried.body, node = [node], tried
        program.body.append(node)
    try:
        compile(program, "<answer>", "exec")
    except UNREAD as error:
        return None, str(error)[:200] or TOO_LARGE
    return program, ""


def _is_idle(statement, known):
    """Whether a statement adds nothing but may fail: assert, print, an expression without calls, import of `known`.

    `if __name__ == "__main__"` adds nothing either: an answer is imported, not run.
    """
    if isinstance(statement, ast.If) and "__name__" in _loaded(statement.test):
        return True
    if isinstance(statement, IMPORTS):
        return all(part.name in known and part.asname in (None, part.name) for part in statement.names)
    if isinstance(statement, ast.Expr):
        acts = any(isinstance(node, (ast.Call, ast.NamedExpr)) for node in ast.walk(statement))
        return not acts or _root(statement.value) == "print"
    if isinstance(statement, ast.AnnAssign):
        return statement.value is None  # it may be a heading, as in `Answer: this`
    if isinstance(statement, ast.Try):  # imports of known names, which never fail here
        parts = statement.body + statement.orelse + statement.finalbody
        return all(isinstance(part, IMPORTS) and _is_idle(part, known) for part in parts)
    return isinstance(statement, ast.Assert)


def _is_constant(statement):
    """Whether a statement assigns a value that reads only names of built-in types: set("aeiou"), "a b".split()."""
    value = isinstance(statement, ASSIGNING) and statement.value
    return bool(value) and all(isinstance(vars(builtins).get(name), type) for name in _loaded(value))


def _is_method(node):
    if not isinstance(node, FUNCTIONS):
        return False
    static = any(_root(decorator) == "staticmethod" for decorator in node.decorator_list)
    return static or any(first.arg in ("self", "cls") for first in node.args.args[:1])


def _source(node):
    """The source of a statement, or "..." where Python can run what it cannot write: deep nesting, some f-strings."""
    try:
        return ast.unparse(node)
    except (RecursionError, ValueError):
        return "..."


def is_stub(function):
    """Whether a function has only a docstring, names, pass, ..., a bare return or raise NotImplementedError.

    Conditions do not count: `if x: pass` is a stub.
    """

    def idle(node):
        if isinstance(node, ast.Raise):
            return "NotImplemented" in _source(node)
        if isinstance(node, ast.Return):
            return node.value is None or (isinstance(node.value, ast.Constant) and node.value.value in (None, ...))
        if isinstance(node, ast.If):
            return all(map(idle, node.body + node.orelse))
        mention = isinstance(node, ast.Expr) and isinstance(node.value, (ast.Constant, ast.Name))
        return mention or isinstance(node, ast.Pass)

    return all(map(idle, function.body))


def _last_version(versions, works):
    """The last of several versions of a function, each a sequence that begins with its definition.

    Those whose definition `works` are preferred. A part of the function may be repeated as an explanation: with a ...
    for what is left out, or its beginning.
    """
    versions = [version for version in versions if works(version[0])] or versions
    # as in `result = ...` and `for x in ...`, but not in x[..., 0] or tuple[int, ...]
    parts = lambda body: (part for n in _walk(body) if isinstance(n, ast.stmt) for part in ast.iter_child_nodes(n))
    elided = lambda function: any(getattr(part, "value", None) is ... for part in parts(function.body))
    versions = [version for version in versions if not elided(version[0])] or versions
    idle = lambda n: isinstance(n, ast.Pass) or (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
    acts = ["".join(_source(n) + "\n" for n in function.body if not idle(n)) for function, *_ in versions]
    # in this order, a text is followed by those that begin with it
    begun = {some for some, other in itertools.pairwise(sorted({*acts})) if some and other.startswith(some)}
    return [version for version, some in zip(versions, acts) if some not in begun][-1]


def _definitions(body, name):
    return [node for node in body if isinstance(node, FUNCTIONS) and node.name == name]


def _returns(function):
    """Whether a function is there and returns or yields something, not just None."""
    nodes = list(_walk(function.body)) if function else []
    yields = any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in nodes)
    # None for `return` and `return None`
    return yields or any(getattr(n.value, "value", n.value) is not None for n in nodes if isinstance(n, ast.Return))


def _acts(method):
    """Whether a method returns something, calls something for its effect, or sets an attribute or an item."""
    nodes = list(_walk(method.body))
    calls = any(isinstance(n, ast.Expr) and isinstance(n.value, ast.Call) for n in nodes)
    sets = any(isinstance(n, (ast.Attribute, ast.Subscript)) and not isinstance(n.ctx, ast.Load) for n in nodes)
    return calls or sets or _returns(method)


# What is code in a completion ----------------------------------------------------------------------------------------

FENCE = r"[ \t]*(?:`{3,}|~{3})[^`\n]*"  # a whole line, with its language
BLANK = r"[ \t\xa0\u200b\ufeff]"
UNSEEN = {0xA0: " ", 0x200B: None, 0xFEFF: None}  # blanks that Python does not accept
TAGS = r"(?:</?(?:answer|s)>|<[|\uff5c][^|\uff5c\n]{1,30}[|\uff5c]>)+"  # </answer>, <|im_end|>
CODE = r"(?:async )?def \w|class \w|import \w|from [\w.]+ import |@\w|try:$"  # how code amid prose may begin
KEYWORD = rf"(?:{'|'.join(filter(str.islower, keyword.kwlist))})\b"
WORD = rf"\b(?!{KEYWORD})\w+"
STRING = r"'[^'\n]*'|\"[^\"\n]*\""
PARTS = rf"(?:{STRING}|[^'\"#])*"  # of a line: strings as wholes, and no comment
# "for each number", "n = 3 gives 4", "f(3) returns", "'f' is": in code, no word follows a word that is no keyword,
# a bracket or a string directly
PROSE = rf"{PARTS}?(?:{WORD}|{STRING}|[)\]]) +{WORD}"
SYMBOL = rf"{PARTS}?[^\w\x00-\x7f]"  # such as an arrow or a Chinese full stop
# f([1, 2]) -> 3, f("a") = 3 and f(3): 6, as prose writes them
ARROW = rf"(?!{KEYWORD}){PARTS}?[-=]>"
EQUATION = rf"(?!{KEYWORD})[\w.]+\({PARTS}\) *[:=](?!=)"
# How a line of code that does not parse begins, unless it is indented: else, f(, a[, a.b += , a, b = , ), "a, (a
BEGINS = rf"{KEYWORD}|[\w.]+(\(|\[| ?[^\w\s]{{0,3}}=)|[a-z]\w*[,:].*=|[\])}}@'\"]|[\[({{](?![A-Z/])"
BROKEN = rf"(?!\S)|(?!{PROSE}|{SYMBOL}|{ARROW}|{EQUATION})({BEGINS})"
# What parser and compiler raise, also for a NUL, a lone surrogate, deep nesting or thousands of words in a row.
UNREAD = (SyntaxError, ValueError, MemoryError, RecursionError)
TOO_LARGE = "too deep or too long for Python"


def read_function(text, name, foreign=()):
    """(statements, first syntax error): the code of a completion that is to define the function `name`.

    foreign: names that other agents are to define

    The code is the whole text; or else the block with the last version of the function, after the imports,
    definitions and assignments that it needs from other blocks; or else the beginning of the first block. What is
    written behind that version under its name is left out.
    """
    bodies = read_blocks(text)
    versions = [(function, body) for body in bodies for function in _definitions(body, name) if not is_stub(function)]
    if not versions:
        blocks = _fenced(text)
        return _parse(next((block for block in blocks if re.search(rf"\bdef\s+{name}\b", block)), blocks[0]))
    function, chosen = _last_version(versions, _returns)
    worse = _definitions(chosen[chosen.index(function) + 1 :], name)
    chosen = [node for node in chosen if node not in worse]
    # Also of blocks with other versions of the function, but nothing that the chosen block defines itself.
    given = set().union(*map(_gives, chosen))
    others = [node for body in bodies for node in body if not _gives(node) <= given]
    # Also computed tables, as by re.compile; but no names that mean something here, as in `result = f(1)`.
    nodes = [n for part in chosen for n in ast.walk(part) if not isinstance(n, (ast.Attribute, ast.Subscript))]
    taken = {name, *foreign, *dir(builtins)}
    own = taken.union(*map(_binds, nodes))
    free = lambda node: (own if _loaded(node) else taken).isdisjoint(_gives(node))
    others = [n for n in others if isinstance(n, NAMING) or (isinstance(n, ASSIGNING) and free(n))]
    return _needed(others, chosen) + chosen, ""


def read_methods(text, names, given, class_name):
    """(statements, first syntax error): the code of a completion that is to define the methods `names` of a class.

    given: the names that the skeleton defines

    The code is the whole text; or else the blocks that define a method or a name of the skeleton's, after what they
    need from other blocks; or else the beginning of all fenced text.
    """
    bodies, error = read_blocks(text), ""
    if not any(bodies):
        body, error = _parse("\n".join(_fenced(text)))
        bodies = [body]
    for body in bodies:
        # After the first definition, an example such as `list = [1, 2]` would hide the built-in from everything.
        begins = next((i for i, node in enumerate(body) if isinstance(node, DEFINITIONS)), 0)
        body[begins:] = [n for n in body[begins:] if isinstance(n, NAMING) or not _gives(n) & {*dir(builtins)}]
    chosen = [b for b in bodies if any(_is_method(n) or getattr(n, "name", None) in given for n in b)] or bodies
    # A `try` with a return is a part of a method, explained in a block of its own.
    returns = lambda node: any(isinstance(n, ast.Return) for n in _walk([node]))
    others = [node for body in bodies if body not in chosen for node in body if not returns(node)]
    chosen = list(itertools.chain(*chosen))
    # Methods indented too far, inside another method that does not read them.
    functions = [f for n in chosen for f in ast.walk(n) if isinstance(f, FUNCTIONS) and not is_stub(f)]
    unread = [(o, {*names}.difference(_loaded(o))) for o in functions]
    deeper = [f for o, free in unread for f in o.body if getattr(f, "name", None) in free]
    statements = _needed(others, deeper + chosen) + deeper + chosen
    return [node for node in statements if not _is_idle(node, [class_name])], error


def read_blocks(text):
    """The statements of a completion: all of it, or else those of each fenced block that defines or imports something.

    A block ends at the first fence that makes it valid Python, since a docstring may hold fences. Other blocks only
    contribute assignments. Code may also stand in prose outside of these blocks. Of two definitions the last counts,
    so code in prose comes first, and before it an unclosed block, which may be truncated.
    """
    plain = _plain(text)
    for form in (text, plain):
        whole = _statements_of(form)
        if whole is not None:
            return [whole]
    lines = plain.split("\n")
    fences = [i for i, line in enumerate(lines) if re.fullmatch(FENCE, line)][:100]
    ends = [i for i in fences if not lines[i].strip(" \t`~")] + [len(lines)]
    bodies, end, between, unclosed = [], -1, [], []
    for start in fences:
        for stop in [i for i in ends if i > start > end][:8]:
            body = _statements_of("\n".join(lines[start + 1 : stop])) or []
            if any(isinstance(node, NAMING) for node in body):
                between += _between_prose(lines[end + 1 : start])
                end = stop
            else:
                body = [node for node in body if isinstance(node, ASSIGNING)]
            if body:
                (unclosed if stop == len(lines) else bodies).append(body)
                break
    if end < 0:
        return _between_prose(lines)
    return [*unclosed, *between, *_between_prose(lines[end + 1 :]), *bodies]


def _between_prose(lines, most=20):
    """The statements from the first line that begins code up to prose, and so on with the rest, as a list of lists.

    [] if broken code ends them. Assignments may stand before the first such line.
    """
    begins = next((i for i, line in enumerate(lines) if re.match(rf"\s*({CODE})", line)), None)
    if begins is None or not most:
        return []
    indent = re.match(r"\s*", lines[begins])[0]
    level = [i for i in range(begins)[-50:] if re.match(rf"{indent}\S", lines[i])]
    before = {i: _parse(_at_margin("\n".join(lines[i:begins]))) for i in level}
    assigned = [i for i, (body, error) in before.items() if body and not error and all(map(_gives, body))]
    first = [*assigned, begins][0]
    body, error, behind = _beginning("\n".join(lines[first:]))
    heading = not body and re.match(r".*\n\s*\n(?=\S)", "\n".join(behind))  # such as a bare signature
    rest = list(itertools.dropwhile(lambda line: line.lstrip()[:1] in ("", "#"), behind))
    if error and not heading and re.match(BROKEN, [*rest, ""][0]):
        return []
    return [body, *_between_prose(lines[len(lines) - len(rest) + 1 :], most - 1)]


def _plain(text):
    """The text after the thoughts, without tags, with fences on lines of their own, and blanks as Python has them."""
    text = re.sub(r"\r\n?", "\n", text)  # as Python reads it; str.splitlines knows more, which may occur in strings
    text = text.rpartition("</think>")[2].partition("<think>")[0]  # the last thoughts may be unclosed
    edges = rf"^{BLANK}+|(?<!{BLANK}){BLANK}+$"
    text = re.sub(edges, lambda found: found[0].translate(UNSEEN), text, flags=re.MULTILINE)
    # (?<!>): from where all of them begin, as from each of them would be quadratic
    text = re.sub(rf"^([ \t]*){TAGS}|(?<!>){TAGS}(?=[ \t]*$)", r"\1", text, flags=re.MULTILINE)
    text = re.sub(rf"^([ \t]*(?:`{{3,}}|~{{3,}}))(?:py\w*)? *(?={CODE})", r"\1\n", text, flags=re.MULTILINE)
    return re.sub(r"(?<=[^\s`~])[ \t]*(```|~~~)[ \t]*$", r"\n\1", text, flags=re.MULTILINE)


def _fenced(text):
    """The fenced blocks of a text, or else the whole text, whether Python or not."""
    plain = _plain(text)
    blocks = re.findall(rf"^{FENCE}\n(.*?)(?:^[ \t]*(?:```|~~~)|\Z)", plain, re.DOTALL | re.MULTILINE)
    return list(map(_at_margin, blocks or [plain]))


def _statements_of(code):
    """The statements, or None if it is not Python."""
    for form in _forms(code):
        try:
            return _tree(form).body
        except UNREAD:
            pass


def _forms(code):
    """The code as it is, and as it may be meant: all lines may be indented, or the first too far or not enough."""
    yield code
    yield _at_margin(code)
    yield _at_margin("    " + code.lstrip())
    yield code.lstrip()  # last: a body that begins with comments could be read as just these


def _at_margin(code):
    """The code without the indentation of its parts, which begin at the margin and after imports.

    Less indented than their part are only lines behind it, such as prose in a list: these lose all indentation.
    """
    lines, indent, begins = [], "", True
    for line in code.split("\n"):
        bare = line.lstrip()
        if bare[:1] not in ("", "#") and (begins or bare == line):
            indent, begins = line.removesuffix(bare), line.startswith(("import ", "from "))
        lines.append(line.removeprefix(indent) if line.startswith(indent) else bare)
    return "\n".join(lines)


def _tree(code, most=20):
    """The syntax tree of code in which functions and classes may hold only comments, as stand-ins often do."""
    try:
        return ast.parse(code)
    except IndentationError as error:
        found = re.search(r"(?:function|class) definition on line (\d+)", error.msg)
        lines = code.split("\n")
        head = int(found[1]) if found else len(lines)
        comments = [i for i in range(head, min(error.lineno, len(lines))) if lines[i].lstrip().startswith("#")]
        if not comments or not most:
            raise
        lines[comments[-1]] = re.match(r"\s*", lines[head - 1])[0] + " pass"
        return _tree("\n".join(lines), most - 1)


def _beginning(code):
    """(statements, error, lines behind them) of the form of the code of which `_parse` reads most."""
    readings = []
    for form in dict.fromkeys(_forms(code)):
        body, error = _parse(form)
        readings.append((body, error, form.split("\n")[body[-1].end_lineno if body else 0 :]))
    # of several, the form with least indentation left
    return min(readings, key=lambda reading: (len(reading[2]), len("".join(reading[2]))))


def _parse(code):
    """(statements, error); if the code does not parse, the statements of its longest beginning that does."""
    error, lines = "", code.split("\n")
    for _ in range(20):
        try:
            return _tree("\n".join(lines)).body, error
        except SyntaxError as caught:
            error = error or f"{caught.msg} (line {caught.lineno})"
            lines = lines[: max(0, min(len(lines), caught.lineno or 1) - 1)]
        except UNREAD as caught:
            return [], str(caught) or TOO_LARGE
    return [], error


# Names ---------------------------------------------------------------------------------------------------------------


def _gives(statement):
    """The names that a statement binds in its own scope, or assigns a part of."""
    nodes = list(_walk([statement]))
    inner = {n for node in nodes if isinstance(node, ast.comprehension) for n in ast.walk(node.target)}
    inner.update(node for node in nodes if isinstance(node, ast.arg))
    return {name for node in nodes if node not in inner for name in _binds(node)}


def _binds(node):
    """Names that this node itself binds, and the name of an object whose parts it changes."""
    if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
        return set() if isinstance(node.ctx, ast.Load) else {_root(node)} - {None}
    if isinstance(node, ast.alias):  # in an import
        return {node.asname or node.name.partition(".")[0]}
    if isinstance(node, ast.arg):
        return {node.arg}
    # A function, a class, `except ... as name`, `case [name, *name]`, `case {**rest}`.
    return {getattr(node, field, None) for field in ("name", "rest")} - {None}


def _loaded(node, hints=True):
    """The names that a node reads or deletes; with `hints`, also in annotations."""
    roots = [] if hints else [getattr(n, part, None) for n in ast.walk(node) for part in ("annotation", "returns")]
    skip = {n for root in filter(None, roots) for n in ast.walk(root)}
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name) and n not in skip]
    return {n.id for n in names if not isinstance(n.ctx, ast.Store)}


def _reads(statement):
    """The names that a statement reads, without the local names of functions and comprehensions in it."""
    return _loaded(statement) - ({name for n in ast.walk(statement) for name in _binds(n)} - _gives(statement))


def _path(node):
    """The names of a.b[c].d(), from the left: a, b and d."""
    names = []
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call, ast.Starred)):
        names += [node.attr] if isinstance(node, ast.Attribute) else []
        node = node.func if isinstance(node, ast.Call) else node.value
    return [getattr(node, "id", None), *reversed(names)]


def _root(node):
    """The name at the left end of a.b[c].d()."""
    return _path(node)[0]


def _walk(nodes):
    """All nodes except those in the bodies of nested functions and classes."""
    todo = list(nodes)
    while todo:
        node = todo.pop()
        yield node
        inner = [node.body] if isinstance(node, ast.Lambda) else []
        if isinstance(node, DEFINITIONS):
            inner = node.body + getattr(node, "type_params", [])  # [T], since Python 3.12
        todo.extend({*ast.iter_child_nodes(node)}.difference(inner))
