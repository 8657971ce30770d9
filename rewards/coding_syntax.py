"""What the syntax trees of a joint answer say. It runs in the sandbox, beside the text: see Job.prepare.

Model-written text is never parsed in the trainer, because enough nesting ends the interpreter that parses it.
The sandbox gets the source of this file, which therefore imports nothing but the standard library.
"""

import ast
import builtins
import itertools
import keyword
import re
import sys
import textwrap

NONE = ast.dump(ast.Constant(None))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
IMPORTS = (ast.Import, ast.ImportFrom)
ASSIGNING = (ast.Assign, ast.AnnAssign)
NAMING = (*DEFINITIONS, *IMPORTS)
FUTURE = "from __future__ import annotations\n"  # an annotation may read what is not imported, such as List


# A function and its helpers ------------------------------------------------------------------------------------------

# What takes a helper's place, to see what is done without it. One whose values are nothing: empty, 0 as a number, less
# and more than none; to add one changes nothing; as a result one equals () only. And one that hands back its argument:
# with it `return aux(result)` is as good, if another agent has done all the work.
NOTHING = """
class {name}(tuple):
    __new__ = lambda cls, *args, **keywords: tuple.__new__(cls)
    __add__ = __radd__ = __sub__ = __rsub__ = __or__ = __ror__ = __xor__ = __rxor__ = lambda self, other: other
    __mul__ = __rmul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = lambda self, *args: self
    __neg__ = __pos__ = __abs__ = __round__ = lambda self, *args: self
    __call__ = __getattr__ = __getitem__ = lambda self, *args, **keywords: self
    __lt__ = __le__ = __gt__ = __ge__ = lambda self, other: False
    __int__ = __index__ = lambda self: 0
    __float__ = lambda self: 0.0
"""
ECHO = """
def {name}(*args, **keywords):
    return [*args, *keywords.values(), None][0]
"""
STUBS = [NOTHING, ECHO]


def prepare(texts, helpers, entry_point, prelude="", stub="", alone=None):
    """The program that the answers make together, and what is to be known of them.

    texts: one per agent: the helpers' in order, then the asked function's
    prelude: trusted source that goes before them, such as the imports of the task's prompt
    stub: one of STUBS, which takes each helper's name behind its text, or ""; what else the text holds is no use of it
    alone: name of the helper that takes the asked function's place, or None

    Returns (syntax tree, None where there is no program that compiles; facts). Facts:
    defined: list[bool], whether each text defines its function, with something returned
    syntax: bool, whether the program compiles
    uses: list[bool] by helper: the asked function calls the helper or hands it on, and does not drop all that it gets
    ignored: list[bool] by helper: it calls the helper and drops all that it gets
    errors: list[str], the first syntax error of each text; empty where it is Python
    error: str, the first of these, or what keeps the texts from compiling together
    """
    owned = [*helpers, entry_point]
    bodies, defined, errors, may_fail = [], [], [], set()
    for i, (name, text) in enumerate(zip(owned, texts)):
        others = {*owned} - {name}  # what another agent was asked for is not this one's to define
        body, error = read_function(text, name, others)
        errors.append(error[:200])
        body = [n for n in body if not (isinstance(n, FUNCTIONS) or _is_constant(n)) or not _gives(n) & others]
        body = _joined(body, others, owned)
        # What reads a function that is not there yet is an example of use.
        later = {*owned[i + 1 :]}.difference(dir(builtins), *map(_gives, body))
        examples = _leading(body, lambda node, _, names, later=later: _reads(node) & (later | names))
        function = _function(body, name)
        defined.append(_returns(function))
        body = [node for node in body if isinstance(node, DEFINITIONS) or node not in examples]
        needed = []  # what has to work: the function, what stands before it to be run, and what these read
        if function:
            run = [node for node in body[: body.index(function)] if not isinstance(node, NAMING)] + [function]
            needed = run + _named(body, run)
            # An example behind it, as `list = [1, 2]`, would take the built-in from all that the agents wrote.
            taken = {*dir(builtins)}.difference(owned)
            body = [n for n in body if n in needed or isinstance(n, DEFINITIONS) or not _gives(n) & taken]
        may_fail.update({*body}.difference(needed))
        bodies.append(body)
    facts = {"defined": defined, "syntax": False, "uses": [], "ignored": []}
    facts |= {"errors": errors, "error": next(filter(None, errors), "")}
    if defined[-1] and not any(errors):
        if stub:
            bodies[:-1] = [body + ast.parse(stub.format(name=name)).body for name, body in zip(helpers, bodies)]
        body = ast.parse(FUTURE + prelude).body + [node for part in bodies for node in part]
        body += ast.parse(f"{entry_point} = {alone}").body if alone else []
        program = ast.Module(body=_robust(body, may_fail), type_ignores=[])
        facts["error"] = _compile_error(program)
        if not facts["error"]:
            facts.update(syntax=True, **_cooperation(bodies[-1], entry_point, helpers))
    return (program if facts["syntax"] else None), facts


def _joined(body, others, owned):
    """The statements without imports of what the agents write together, whatever module theirs is taken for.

    `from helpers import aux` adds nothing, `from helpers import aux as h` is h = aux, and after `import helpers` or
    `from lib import helpers` helpers.aux is aux. But `from math import gcd` in a function is the library's, of which a
    gcd may be made.
    """
    nodes = [(n, part) for n in body for part in ast.walk(n)]
    module = lambda node, part: getattr(node, "module", part.name) or ""  # of `from . import`: none
    library = lambda node: all(module(node, p).partition(".")[0] in sys.stdlib_module_names for p in node.names)
    imports = [node for _, node in nodes if isinstance(node, IMPORTS) and not library(node)]
    modules = set().union(*map(_gives, imports)) - sys.stdlib_module_names
    there = lambda part: part.name in owned and part.asname in (None, part.name)
    joined = set()  # those of the modules that stand for the others' code
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

# What would let a class find its methods elsewhere.
HOOKS = {"__getattribute__", "__getattr__", "__new__", "__init_subclass__", "__set_name__"}
# What reaches a name without saying it, and what reaches the class, or what it is made with, while it is made.
UNSAID = {"globals", "locals", "vars", "exec", "eval"}
REACH = UNSAID | {"builtins", "__builtins__", "__globals__", "f_globals", "f_locals", "modules", "__set_name__"}
REACH |= {"_getframe", "currentframe"}
LOOKUPS = REACH | {"getattr", "setattr", "__setattr__", "__dict__"}  # take a name as a text
SAYING = "id", "attr", "value", "name", "module", "__class__"  # fields of a node that hold names


def prepare_class(texts, assigned, class_name, base):
    """The module that arises when the methods that the agents wrote are put into the skeleton of a class.

    texts: one per agent; a text whose agent has no method to write is not looked at
    assigned: list[list[str]], by agent: the names of the methods that are its to write
    class_name: the class in `base` that the methods belong to
    base: trusted source of the skeleton

    An agent's definitions count wherever they stand, also inside a class of that name; so does a method that is
    assigned. Of those in the skeleton only the agent's own are taken; of its imports, further functions and other
    statements all, but in the class only definitions and assignments, and none of HOOKS, and outside none that uses or
    replaces the class. A method that is called by its bare name stands outside as well. What is added in the class
    comes before the methods, and behind them where it reads or replaces one. Of a block without methods only what the
    blocks with methods read. What is outside goes before the class, as defaults may read it, unless it leads to the
    class or to REACH, or gives a known name a meaning.

    Returns (syntax tree, None where there is no program that compiles; facts). Facts:
    written: list[list[bool]], for each assigned method whether its agent wrote it, with more than a stub for a body
    doubled: list[str], the methods, of all assigned, that more than one agent wrote
    syntax: bool, whether all texts are Python and the module compiles
    errors, error: as in `prepare`
    """
    program = ast.parse(base)
    owner = next(node for node in program.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    methods = {node.name: node for node in owner.body if isinstance(node, FUNCTIONS)}
    given = {node.name for node in program.body if isinstance(node, DEFINITIONS)} | methods.keys()
    place = program.body.index(owner)
    known = _loaded(program).union(dir(builtins), *map(_gives, program.body))
    behind = REACH.union([ast.Global], *map(_gives, program.body[place:]))  # is not to be said before the class
    wrote, filled, errors, imports, added, further = [], {}, [], [], [], []

    for text, names in zip(texts, assigned):
        statements, error = read_methods(text, names, given, class_name) if names else ([], "")
        errors.append(error[:200])
        functions = [f for n in statements for f in ast.walk(n) if isinstance(f, FUNCTIONS) and not is_stub(f)]
        begun = {_root(decorator) for f in functions for decorator in f.decorator_list}  # as in @count.setter
        # What may be called by its bare name stands outside as well, though its argument is called self.
        bodies = [part for f in functions for part in f.body] + [n for n in statements if n not in functions]
        elsewhere = given.union(dir(builtins), *[_gives(n) for n in statements if not _is_method(n)])
        bare = set().union(*map(_loaded, bodies)) - elsewhere
        found = {}  # by method: what defines it
        for node in statements:
            whole = isinstance(node, ast.ClassDef) and node.name == class_name
            inside = whole or _is_method(node)
            if inside and not whole and node.name in bare:
                further.append(node)
            for part in node.body if whole else [node]:
                if inside and _binds_unsaid(part):
                    continue
                name = getattr(part, "name", None)
                if isinstance(part, FUNCTIONS):
                    stored = {name} & methods.keys() if name in begun or not is_stub(part) else set()
                else:
                    stored = _stored(part, class_name, methods if inside else ()) & (methods.keys() | HOOKS)
                for method in stored:
                    found.setdefault(method, []).append(part)
                if not stored.issubset(names):  # it sets another agent's
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
                filled[methods[name]] = _last_version(parts, name)
                again = any(name in _gives(n) for n in added)  # as in size = property(size)
                for part in [] if again else parts:
                    part.decorator_list = part.decorator_list or methods[name].decorator_list
        wrote.append(found)
    # What is added may read the skeleton's attributes, and decorators and defaults of methods may read it; but what
    # replaces or reads a method, or what does so, comes last.
    last, names = [], {*methods}
    for node in added:
        if (_stored(node, class_name, methods) | _gives(node) | _loaded_at_once(node)) & names:
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
    may_fail = {*imports, *further}.difference(_named(imports + further, program.body))
    program.body[place:place] = [n for n in further if n not in late]
    body = ast.parse(FUTURE).body + imports + program.body + [n for n in further if n in late]
    program.body = _robust(body, may_fail)
    error = next(filter(None, errors), "") or _compile_error(program)
    written = [[name in found for name in names] for names, found in zip(assigned, wrote)]
    doubled = [name for names in assigned for name in names if sum(name in found for found in wrote) > 1]
    facts = {"written": written, "doubled": doubled, "syntax": not error, "errors": errors, "error": error}
    return (None if error else program), facts


def _last_version(parts, name):
    """The last of a method's definitions, and where that goes on with what the name meant, those before it.

    So does @count.setter. But rather one that returns something: a part of it may be shown once more, to explain it.
    """
    starts = [i for i, part in enumerate(parts) if i == 0 or name not in map(_root, part.decorator_list)]
    versions = [parts[i:j] for i, j in zip(starts, [*starts[1:], None])]
    versions = [version for version in versions if not any(_begins(version[0], whole[0]) for whole in versions)]
    return [*versions, *[version for version in versions if _returns(version[0])]][-1]


def _loaded_at_once(part):
    """The names that a statement of a class reads while the class is made: of a function not those in its body."""
    body = part.body if isinstance(part, FUNCTIONS) else []
    return set().union(*[_loaded(child) for child in ast.iter_child_nodes(part) if child not in body])


def _binds_unsaid(part):
    """Whether the class, while it is made, evaluates what could bind other names in it than that of the part.

    Of a method that is its decorators, defaults and annotations.
    """
    body = part.body if isinstance(part, DEFINITIONS) else []
    heads = [node for child in ast.iter_child_nodes(part) if child not in body for node in ast.walk(child)]
    at_once = ast.walk(part) if isinstance(part, ast.ClassDef) else heads
    walrus = body and any(isinstance(node, ast.NamedExpr) for node in heads)
    return walrus or not REACH.isdisjoint(getattr(node, field, None) for node in at_once for field in SAYING)


def _stored(statement, class_name, methods):
    """Names of the class to which a statement gives a meaning or a part, such as __code__, also by setattr.

    methods: in the class those that it has; outside, where names mean something else, none
    """
    nodes = list(_walk([statement]))
    calls = [n for n in nodes if isinstance(n, ast.Call) and _root(n.func) == "setattr" and len(n.args) > 2]
    targets = [n for n in nodes if not isinstance(getattr(n, "ctx", ast.Load()), ast.Load)]
    names = {n.id for n in targets if methods and isinstance(n, ast.Name)}
    for path in map(_path, [*targets, *[call.args[0] for call in calls]]):  # Box.size.__code__, or size.__code__
        names.update(path[1:2] if path[0] == class_name else {path[0]} & {*methods})
    attributes = [call.args[1] for call in calls if _path(call.args[0]) == [class_name]]
    return names | {a.value for a in attributes if isinstance(a, ast.Constant)}


def _not_using(statements, class_name):
    """Those statements outside of a class that define something, or say its name only to set an attribute of it.

    Of the others an example of use may fail, and one like `Box = Whole` puts another class in its place.
    """

    def is_example(statement, said, names):
        # A text is the name where it is looked up, and no more than a text in logging.getLogger("Box").
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

    All goes by names: neither the order of statements is looked at, nor whether they are ever reached. Whether a use
    makes a difference is for the tests to say.
    """
    definitions = [node for node in body if isinstance(node, DEFINITIONS)]
    at_once = [node for node in body if node not in definitions]
    reached = at_once + _needed(definitions, [*at_once, ast.Name(entry_point, ast.Load())])
    nodes = [node for part in reached for node in ast.walk(part)]
    # A variable of that name is no helper. Whether it is the one that is used, the tests say; but who changes a part
    # of the helper, such as its code, does not use what it was.
    rebound = {name for node in nodes for name in _binds(node)}
    changed = {name for node in nodes if isinstance(node, (ast.Attribute, ast.Subscript)) for name in _binds(node)}
    # Statements that drop what they get, or bind it to names and put it into objects that no other statement reads.
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
    """Names that a statement reads itself, not by the statements inside it; a bare mention is nothing."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Name):
        return set()
    nodes = [statement]
    for node in nodes:
        nodes += [n for n in ast.iter_child_nodes(node) if not isinstance(n, ast.stmt)]
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def _alters(statement, inert):
    """What a statement binds, and what its calls may change: of functions that are not named in `inert`."""
    calls = [n for n in ast.walk(statement) if isinstance(n, ast.Call) and getattr(n.func, "id", None) not in inert]
    parts = [part for call in calls for part in (call.func, *call.args, *[k.value for k in call.keywords])]
    return _gives(statement).union(_root(part) for part in parts if not isinstance(part, ast.Call))


# Which statements count ----------------------------------------------------------------------------------------------


def _needed(others, code, hints=True):
    """Those of the other statements that the code reads, or that one of them reads in turn.

    What is left out may be a test or an example, which imports what is not there. `hints` as in _loaded.
    """
    loaded = {node: _loaded(node, hints) for node in others + code}
    read, before = {"*", "annotations"}.union(*map(loaded.get, code)), None  # import * may be read, the future always
    gives = {node: _gives(node) for node in others}
    while read != before:
        read, before = read.union(*[loaded[node] for node in others if gives[node] & read]), read
    return [node for node in others if gives[node] & read]


def _named(statements, code):
    """The definitions and imports of the statements that the code needs: those have to work.

    Of `import *` only what is read has to be there: it may stand for what another agent wrote. What only annotations
    read need not be, such as numpy's types: the future leaves them alone.
    """
    needed = _needed(statements, code, hints=False)
    return [node for node in needed if isinstance(node, NAMING) and "*" not in _gives(node)]


def _leading(statements, leads):
    """The statements for which `leads` holds, given what they say and what others of these define, or bound before."""
    said = {s: [getattr(node, field, None) for node in ast.walk(s) for field in SAYING] for s in statements}
    found, before = [], None
    while found != before:
        found, before, names = [], found, {node.name for node in found if isinstance(node, DEFINITIONS)}
        for statement in statements:
            if leads(statement, said[statement], names):
                found.append(statement)
                names |= _gives(statement)
    return found


def _robust(body, may_fail):
    """The statements without imports of what nothing reads, which may not be there; those in `may_fail` are tried.

    An example of use fails for want of input or of the right answer, a test for want of what it is written with.
    """
    read = {"*", "annotations"}.union(*map(_loaded, body))  # of the future
    body = [node for node in body if not isinstance(node, IMPORTS) or _gives(node) & read]
    return [_tried(node) if node in may_fail else node for node in body]


def _tried(statement):
    tried = ast.parse("try: pass\nexcept BaseException: pass").body[0]
    tried.body = [statement]
    return tried


def _compile_error(program):
    """What keeps the program from compiling, once its imports of the future come first; "" where nothing does."""
    program.body.sort(key=lambda node: not (isinstance(node, ast.ImportFrom) and node.module == "__future__"))
    try:
        compile(program, "<answer>", "exec")
    except UNREAD as error:
        return str(error)[:200] or TOO_LARGE
    return ""


def _is_idle(statement, known):
    """Whether a statement adds nothing, but may fail: an assert, a print, what calls nothing, an import of `known`.

    Nor does `if __name__ == "__main__"` add anything: an answer is imported, not run.
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
    if isinstance(statement, ast.Try):  # to import known names, which therefore does not fail
        parts = statement.body + statement.orelse + statement.finalbody
        return all(isinstance(part, IMPORTS) and _is_idle(part, known) for part in parts)
    return isinstance(statement, ast.Assert)


def _is_constant(statement):
    """Whether a statement assigns what reads no name but those of built-in types: set("aeiou"), "a b".split()."""
    value = isinstance(statement, ASSIGNING) and statement.value
    return bool(value) and all(isinstance(vars(builtins).get(name), type) for name in _loaded(value))


def _is_method(node):
    if not isinstance(node, FUNCTIONS):
        return False
    static = any(_root(decorator) == "staticmethod" for decorator in node.decorator_list)
    return static or any(first.arg in ("self", "cls") for first in node.args.args[:1])


def is_stub(function):
    """Whether a function only has a docstring, names, pass, ..., a bare return or raise NotImplementedError.

    Conditions do not count: `if x: pass` is a stub.
    """

    def idle(node):
        if isinstance(node, ast.Raise):
            return "NotImplemented" in ast.unparse(node)
        if isinstance(node, ast.Return):
            return node.value is None or (isinstance(node.value, ast.Constant) and node.value.value in (None, ...))
        if isinstance(node, ast.If):
            return all(map(idle, node.body + node.orelse))
        mention = isinstance(node, ast.Expr) and isinstance(node.value, (ast.Constant, ast.Name))
        return mention or isinstance(node, ast.Pass)

    return all(map(idle, function.body))


def _begins(function, whole):
    """Whether a function is no more than the beginning of another one, without what does nothing."""
    idle = lambda n: isinstance(n, ast.Pass) or (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
    first, all_of_it = ([ast.dump(n) for n in f.body if not idle(n)] for f in (function, whole))
    return 0 < len(first) < len(all_of_it) and all_of_it[: len(first)] == first


def _function(body, name):
    """The last definition of the name: the one that Python would call."""
    return next((node for node in reversed(body) if isinstance(node, FUNCTIONS) and node.name == name), None)


def _returns(function):
    if function is None:
        return False
    for node in _walk(function.body):
        if isinstance(node, (ast.Yield, ast.YieldFrom)):
            return True
        if isinstance(node, ast.Return) and node.value is not None and ast.dump(node.value) != NONE:
            return True
    return False


# What is code in a completion ----------------------------------------------------------------------------------------

NEWLINE = r"\r\n|\r|\n"  # str.splitlines would know more of them, which a string may hold
FENCE = r"[ \t]*(?:`{3,}|~{3,})[^`\r\n]*"  # a whole line, with its language
BLANK = r"[ \t\xa0\u200b\ufeff]"
UNSEEN = {0xA0: " ", 0x200B: None, 0xFEFF: None}  # those that Python takes for no blanks
TAGS = r"(?:</?(?:answer|s)>|<[|\uff5c][^|\uff5c\r\n]{1,30}[|\uff5c]>)+"  # </answer>, <|im_end|>
CODE = r"(?:async )?def \w|class \w|import \w|from [\w.]+ import |@\w"  # how a line of code may begin in prose
KEYWORDS = "|".join(filter(str.islower, keyword.kwlist))
NAME = rf"\b(?!({KEYWORDS})\b)[^\W\d]\w*"
# "for each number", "f(3) returns", "'f' is": right behind a name, a bracket or a string code has no name
PROSE = rf"(?=\S)(?:'[^'\n]*'|\"[^\"\n]*\"|[^'\"#])*?(?:{NAME}|['\")\]]) +{NAME}"
# How a line begins that is code and does not parse: indented, else, f(, a[, a.b += , a, b = , ), "a, (a
BEGINS = rf"\s|$|({KEYWORDS})\b|[\w.]+(\(|\[| ?[^\w\s]{{0,3}}=)|[a-z]\w*[,:].*=|[\])}}@'\"]|[\[({{](?![A-Z/])"
STRING = r"'[^'\n]*'|\"[^\"\n]*\""
# f([1, 2]) -> 3 and f("a") = 3, as prose has it
ARROWS = r"-+>|=+>|[\u2190-\u21ff\u2794-\u27be\u27f0-\u27ff]"
ARROW = rf"(?=\S)(?!({KEYWORDS})\b)(?:{STRING}|[^'\"#])+?(?<=[)\]}}'\"]) *(?:{ARROWS})"
EQUATION = rf"[\w.]+\((?:{STRING}|[^'\"#])*\) *=(?!=)"
BROKEN = rf"(?!{PROSE}|{ARROW}|{EQUATION})({BEGINS})"
# What the parser and compiler raise: a NUL or a lone surrogate, much nesting, thousands of words in a row.
UNREAD = (SyntaxError, ValueError, MemoryError, RecursionError)
TOO_LARGE = "too deep or too long for Python"


def read_function(text, name, foreign=()):
    """(statements, first syntax error): the code of a completion that is to define the function `name`.

    foreign: names that are others' to define

    It is the whole text, or else its last block that defines the function with something returned, or at least with
    something in it, behind what it needs of the imports, definitions and assignments in other blocks; or else the
    beginning of the first block.
    """
    bodies = read_blocks(text)
    functions = [_function(body, name) for body in bodies]
    chosen = [body for body, function in zip(bodies, functions) if function and not is_stub(function)]
    # A part of it may be shown once more, to explain it.
    chosen = [body for body in chosen if _returns(_function(body, name))] or chosen
    versions = [_function(body, name) for body in chosen]
    chosen = [b for b, f in zip(chosen, versions) if not any(_begins(f, whole) for whole in versions)]
    if not chosen:
        blocks = _fenced(text)
        return _parse(next((block for block in blocks if re.search(rf"\bdef\s+{name}\b", block)), blocks[0]))
    others = [node for body, function in zip(bodies, functions) if function is None for node in body]
    # Also a table that is made, as by re.compile; but no `result = f(1)`, and none whose name means something here.
    nodes = [n for part in chosen[-1] for n in ast.walk(part) if not isinstance(n, (ast.Attribute, ast.Subscript))]
    own = {name, *foreign}.union(dir(builtins), *map(_binds, nodes))
    made = lambda node: isinstance(node, ASSIGNING) and name not in _loaded(node) and own.isdisjoint(_gives(node))
    others = [node for node in others if isinstance(node, NAMING) or _is_constant(node) or made(node)]
    return _needed(others, chosen[-1]) + chosen[-1], ""


def read_methods(text, names, given, class_name):
    """(statements, first syntax error): the code of a completion that is to define the methods `names` of a class.

    given: the names that the skeleton defines

    It is the whole text, or else the blocks that define a method or a name of the skeleton's, behind what they need of
    the other blocks; or else the beginning of what stands in fences.
    """
    bodies, error = read_blocks(text), ""
    if not bodies:
        body, error = _parse("\n".join(_fenced(text)))
        bodies = [body]
    for body in bodies:
        # An example behind the first definition, as `list = [1, 2]`, would take the built-in from all that there is.
        begins = next((i for i, node in enumerate(body) if isinstance(node, DEFINITIONS)), 0)
        body[begins:] = [n for n in body[begins:] if isinstance(n, NAMING) or not _gives(n) & {*dir(builtins)}]
    chosen = [b for b in bodies if any(_is_method(n) or getattr(n, "name", None) in given for n in b)] or bodies
    others = [node for body in bodies if body not in chosen for node in body]
    chosen = list(itertools.chain(*chosen))
    # One step too deep below another method, which does not read it.
    functions = [f for n in chosen for f in ast.walk(n) if isinstance(f, FUNCTIONS) and not is_stub(f)]
    deeper = [f for o in functions for f in o.body if getattr(f, "name", None) in {*names}.difference(_loaded(o))]
    statements = _needed(others, deeper + chosen) + deeper + chosen
    return [node for node in statements if not _is_idle(node, [class_name])], error


def read_blocks(text):
    """The statements of a completion: all of it, or else those of each fenced block that defines or imports something.

    A block ends at the first fence that leaves Python behind, since a docstring may hold fences. Beside such blocks,
    of others the assignments. Outside of the fences, and where no block is such, the code may stand in prose. Of two
    definitions the last one counts: such code comes first, and so does a block without an end, which may be cut.
    """
    plain = _plain(text)
    for form in (text, plain):
        whole = _statements_of(form)
        if whole is not None:
            return [whole]
    lines = re.split(NEWLINE, _unwrapped(plain))
    fences = [i for i, line in enumerate(lines) if re.fullmatch(FENCE, line)][:100]
    ends = [i for i in fences if not lines[i].strip(" \t`~")] + [len(lines)]
    bodies, end, between = [], -1, []
    for start in fences:
        for stop in [i for i in ends if i > start > end][:8]:
            body = _statements_of("\n".join(lines[start + 1 : stop])) or []
            if any(isinstance(node, NAMING) for node in body):
                between += _between_prose(lines[end + 1 : start])
                end = stop
            else:
                body = [node for node in body if isinstance(node, ASSIGNING)]
            if body:
                bodies.insert(0 if stop == len(lines) else len(bodies), body)
                break
    if end < 0:
        return _between_prose(lines)
    return [*between, *_between_prose(lines[end + 1 :]), *bodies]


def _between_prose(lines, most=20):
    """The statements from the first line that begins code to one that is none; then of what follows, the same.

    [] where broken code ends them. Assignments may stand before the first line.
    """
    begins = [i for i, line in enumerate(lines) if re.match(rf"\s*({CODE})", line)]
    if not begins or not most:
        return []
    indent = re.match(r"\s*", lines[begins[0]])[0]
    # what stands at the margin behind indented code, as a main guard, keeps its own indentation
    outside = (i for i in range(begins[0], len(lines)) if lines[i].strip() and not lines[i].startswith(indent))
    margin = next(outside, len(lines))
    even = [line.removeprefix(indent) for line in lines[:margin]] + lines[margin:]
    before = {i: _parse("\n".join(even[i : begins[0]])) for i in range(begins[0])[-50:]}
    assigned = [i for i, (body, error) in before.items() if body and not error and all(map(_gives, body))]
    first = [*assigned, *begins][0]
    body, error = _parse("\n".join(even[first:]))
    heading = re.match(r"[^\n]*\n\s*\n(?=\S)", "\n".join(even[first:]))  # such as the signature alone
    if heading and not body:
        return _between_prose(lines[first + 1 :], most - 1)
    behind = even[first + (body[-1].end_lineno if body else 0) :]
    rest = list(itertools.dropwhile(lambda line: line.lstrip()[:1] in ("", "#"), behind))
    if error and re.match(BROKEN, [*rest, ""][0]):
        return []
    return [body, *_between_prose(lines[len(lines) - len(rest) + 1 :], most - 1)]


def _unwrapped(text):
    """What follows the thoughts, of which the last may have no end, with each fence in a line of its own."""
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    return re.sub(r"(?<=[^\s`~])[ \t]*(```|~~~)[ \t\r]*$", r"\n\1", text, flags=re.MULTILINE)


def _plain(text):
    """The text without tags and unseen characters at the edges of its lines, and with each fence apart from code."""
    edges = rf"^{BLANK}+|(?<!{BLANK}){BLANK}+(?=\r?$)"
    text = re.sub(edges, lambda found: found[0].translate(UNSEEN), text, flags=re.MULTILINE)
    text = re.sub(rf"^([ \t]*){TAGS}|{TAGS}(?=[ \t\r]*$)", r"\1", text, flags=re.MULTILINE)
    return re.sub(rf"^([ \t]*(?:`{{3,}}|~{{3,}}))(?:py\w*)? *(?={CODE})", r"\1\n", text, flags=re.MULTILINE)


def _fenced(text):
    """The fenced blocks of a text, or all of it, whether they are Python or not."""
    pattern = rf"^{FENCE}\r?\n(.*?)(?:^[ \t]*(?:```|~~~)|\Z)"
    text = _unwrapped(_plain(text))
    return list(map(textwrap.dedent, re.findall(pattern, text, re.DOTALL | re.MULTILINE) or [text]))


def _statements_of(code):
    """The statements, or None where it is no Python; it may be indented, also in the first or all other lines only."""
    pieces = re.split(r"^(?=\S)", code, flags=re.MULTILINE)
    # In this order: where the first line alone is moved, a body of comments and more could be read as one of comments.
    for form in (code, textwrap.dedent(code), textwrap.dedent("    " + code), "".join(map(textwrap.dedent, pieces))):
        try:
            return _tree(form).body
        except UNREAD:
            pass


def _tree(code):
    """The syntax tree of code whose functions and classes may hold comments only, as what others write often does."""
    for _ in range(20):
        try:
            return ast.parse(code)
        except IndentationError as error:
            found = re.search(r"(?:function|class) definition on line (\d+)", error.msg)
            lines = re.split(NEWLINE, code)
            head = int(found[1]) if found else len(lines)
            comments = [i for i in range(head, min(error.lineno, len(lines))) if lines[i].lstrip().startswith("#")]
            if not comments:
                raise
            lines[comments[-1]] = re.match(r"\s*", lines[head - 1])[0] + " pass"
            code = "\n".join(lines)
    return ast.parse(code)


def _parse(code):
    """(statements, error): of code that does not parse, the statements of its longest beginning that does."""
    error, lines = "", re.split(NEWLINE, code)
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
    """The names to which a statement gives a meaning where it stands, or of which it assigns a part."""
    nodes = list(_walk([statement]))
    inner = {n for node in nodes if isinstance(node, ast.comprehension) for n in ast.walk(node.target)}
    return {name for node in nodes if node not in inner for name in _binds(node)}


def _binds(node):
    """Names to which this node itself gives a meaning; also that of an object whose parts it changes."""
    if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
        return set() if isinstance(node.ctx, ast.Load) else {_root(node)} - {None}
    if isinstance(node, ast.alias):  # of an import
        return {node.asname or node.name.partition(".")[0]}
    if isinstance(node, ast.arg):
        return {node.arg}
    # A function, a class, `except ... as name`, `case [name, *name]`, `case {**rest}`.
    return {getattr(node, field, None) for field in ("name", "rest")} - {None}


def _loaded(node, hints=True):
    """The names that a node reads; `hints`: also in annotations."""
    roots = [] if hints else [getattr(n, part, None) for n in ast.walk(node) for part in ("annotation", "returns")]
    skip = {n for root in filter(None, roots) for n in ast.walk(root)}
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name) and n not in skip]
    return {n.id for n in names if isinstance(n.ctx, ast.Load)}


def _reads(statement):
    """The names that a statement reads, without those that a function or comprehension in it binds for itself."""
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
    """All nodes but those in functions and classes that are defined inside."""
    todo = list(nodes)
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, ast.Lambda):
            todo.extend(filter(None, node.args.defaults + node.args.kw_defaults))  # evaluated where it stands
        elif not isinstance(node, DEFINITIONS):
            todo.extend(ast.iter_child_nodes(node))
