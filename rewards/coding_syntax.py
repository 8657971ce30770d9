"""What the syntax trees of a joint answer say. It runs in the sandbox, beside the text: see Job.prepare.

Model-written text is never parsed in the trainer, because enough nesting ends the interpreter that parses it.
The sandbox gets the source of this file, which therefore imports nothing but the standard library.
"""

import ast
import re
import textwrap

NONE = ast.dump(ast.Constant(None))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
CONVERSIONS = {"list", "tuple", "int", "float", "str", "bool", "iter", "next"}


def prepare(texts, helpers, entry_point, prelude="", stub=False):
    """The program that the answers make together, and what is to be known of them.

    texts: one per agent: the helpers' in order, then the asked function's
    prelude: trusted source that goes before them, such as the imports of the task's prompt
    stub: bool, whether each helper's text is replaced by a function of its name that returns None

    Returns (syntax tree, None where there is no program that compiles; facts). Facts:
    defined: list[bool], whether each text defines its function, with something returned
    syntax: bool, whether the program compiles
    uses, ignored: list[bool] by helper: a value of the helper reaches what the asked function does; the function
        calls it, but no value of it does
    wrapper: bool, whether the asked function only hands on what a helper returns
    errors: list[str], the first syntax error of each text; empty where it is Python
    error: str, the first of these, or what keeps the texts from compiling together
    """
    owned = [*helpers, entry_point]
    bodies, defined, errors = [], [], []
    for name, text in zip(owned, texts):
        body, error = _parse(code_of(text, name))
        errors.append(error[:200])
        # What another agent was asked for is not this one's to define.
        body = [
            node for node in body if not (isinstance(node, FUNCTIONS) and node.name in owned and node.name != name)
        ]
        bodies.append(body)
        defined.append(_returns(_function(body, name)))
    facts = {"defined": defined, "syntax": False, "uses": [], "ignored": [], "wrapper": False}
    facts |= {"errors": errors, "error": next(filter(None, errors), "")}
    if defined[-1] and not any(errors):
        if stub:
            bodies[:-1] = [ast.parse(f"def {name}(*args, **keywords): return None").body for name in helpers]
        body = ast.parse(prelude).body + [node for part in bodies for node in part]
        body.sort(key=lambda node: not (isinstance(node, ast.ImportFrom) and node.module == "__future__"))  # stable
        program = ast.Module(body=body, type_ignores=[])
        try:
            compile(program, "<answer>", "exec")
        except (SyntaxError, ValueError) as error:
            facts["error"] = str(error)[:200]
        else:
            facts.update(syntax=True, **_cooperation(bodies[-1], entry_point, helpers))
    return (program if facts["syntax"] else None), facts


def prepare_class(texts, assigned, class_name, base):
    """The module that arises when the methods that the agents wrote are put into the skeleton of a class.

    texts: one per agent; a text whose agent has no method to write is not looked at
    assigned: list[list[str]], by agent: the names of the methods that are its to write
    class_name: the class in `base` that the methods belong to
    base: trusted source of the skeleton

    An agent's definitions count wherever they stand, also inside a class of that name. Of those in the skeleton only
    the agent's own are taken; of its imports, further functions and other statements all.

    Returns (syntax tree, None where there is no program that compiles; facts). Facts:
    written: list[list[bool]], for each assigned method whether its agent wrote it, with more than a stub for a body
    doubled: list[str], the methods, of all assigned, that more than one agent wrote
    syntax: bool, whether all texts are Python and the module compiles
    errors, error: as in `prepare`
    """
    program = ast.parse(base)
    owner = next(node for node in program.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    methods = {node.name: i for i, node in enumerate(owner.body) if isinstance(node, FUNCTIONS)}
    given = {node.name for node in program.body if isinstance(node, (*FUNCTIONS, ast.ClassDef))} | methods.keys()
    written, writers, errors, imports, further = [], {}, [], [], []
    for text, names in zip(texts, assigned):
        body, unread = _parse(textwrap.dedent("\n".join(blocks_of(text)))) if names else ([], "")
        errors.append(unread[:200])
        found = {}
        for node in body:
            if isinstance(node, ast.ClassDef) and node.name == class_name:
                inside, outside = node.body, []
            else:
                is_method = isinstance(node, FUNCTIONS) and node.args.args and node.args.args[0].arg in ("self", "cls")
                inside, outside = ([node], []) if is_method else ([], [node])
            for function in inside + outside:
                if isinstance(function, FUNCTIONS) and function.name in methods and not is_stub(function):
                    found[function.name] = function
            owner.body += [n for n in inside if isinstance(n, FUNCTIONS) and n.name not in given]
            imports += [n for n in outside if isinstance(n, (ast.Import, ast.ImportFrom))]
            further += [
                n
                for n in outside
                if not isinstance(n, (ast.Import, ast.ImportFrom)) and getattr(n, "name", None) not in given
            ]
        for name, function in found.items():
            writers[name] = writers.get(name, 0) + 1
            if name in names:
                asked = owner.body[methods[name]]
                function.decorator_list = function.decorator_list or asked.decorator_list
                owner.body[methods[name]] = function
        written.append([name in found for name in names])
    program.body = imports + program.body + further
    program.body.sort(key=lambda node: not (isinstance(node, ast.ImportFrom) and node.module == "__future__"))
    error = next(filter(None, errors), "")
    if not error:
        try:
            compile(program, "<answer>", "exec")
        except (SyntaxError, ValueError) as caught:
            error = str(caught)[:200]
    doubled = [name for names in assigned for name in names if writers.get(name, 0) > 1]
    facts = {"written": written, "doubled": doubled, "syntax": not error, "errors": errors, "error": error}
    return (None if error else program), facts


def is_stub(function):
    """Whether a function holds nothing but a docstring, pass, ..., a bare return or raise NotImplementedError."""

    def idle(node):
        if isinstance(node, ast.Raise):
            return "NotImplemented" in ast.unparse(node)
        if isinstance(node, ast.Return):
            return node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None)
        return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))

    return all(map(idle, function.body))


def blocks_of(text):
    """The pieces of code in a completion: its fenced blocks, or all of it."""
    return re.findall(r"^[ \t]*```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", text, re.DOTALL | re.MULTILINE) or [text]


def code_of(text, name):
    """The code in a completion: all of it, or the fenced block that defines `name`, or else the first block."""
    blocks = blocks_of(text)
    return next((block for block in blocks if re.search(rf"\bdef\s+{name}\b", block)), blocks[0])


def _parse(code):
    """(statements, error): of code that does not parse, the statements of its longest beginning that does."""
    error, lines = "", code.splitlines()
    for _ in range(20):
        try:
            return ast.parse("\n".join(lines)).body, error
        except SyntaxError as caught:
            error = error or f"{caught.msg} (line {caught.lineno})"
            lines = lines[: max(0, min(len(lines), caught.lineno or 1) - 1)]
        except ValueError as caught:  # a NUL, a lone surrogate
            return [], str(caught)
    return [], error


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


def _walk(nodes):
    """All nodes but those in functions and classes that are defined inside."""
    todo = list(nodes)
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            todo.extend(ast.iter_child_nodes(node))


def _cooperation(body, entry_point, helpers):
    """Uses, ignored and wrapper: the facts about how the asked function treats the helpers."""
    defined = {node.name: node for node in body if isinstance(node, (*FUNCTIONS, ast.ClassDef))}
    # The asked function and what it reaches in its own text, such as a further function that calls the helper.
    reached, todo, seen = [], [entry_point], set()
    while todo:
        name = todo.pop()
        if name in defined and name not in seen:
            seen.add(name)
            parts = defined[name].body if isinstance(defined[name], ast.ClassDef) else [defined[name]]
            reached += [part for part in parts if isinstance(part, FUNCTIONS)]
            todo += [n.id for n in ast.walk(defined[name]) if isinstance(n, ast.Name)]
    # Who gives a name another meaning at the outermost level does not use what it meant.
    top = {node for node in body if isinstance(node, FUNCTIONS)}
    rebound = {name for node in _walk(body) if node not in top for name in _binds(node)}
    genuine = [] if entry_point in rebound else [helper for helper in helpers if helper not in rebound]
    flows = [_Flow(function, genuine) for function in reached]
    uses = [any(helper in flow.used for flow in flows) for helper in helpers]
    called = [any(helper in flow.called for flow in flows) for helper in helpers]
    return {
        "uses": uses,
        "ignored": [c and not u for c, u in zip(called, uses)],
        "wrapper": any(uses) and _hands_on(flows[0], _passing(flows[1:], helpers)),
    }


class _Flow:
    """Which statements of a function matter to what it returns or changes, and which helpers occur in those.

    A name matters if a statement that matters reads it; a statement matters if it returns, yields or raises, binds or
    changes a name that matters, or contains such a statement. The order of statements is not looked at.
    """

    def __init__(self, function, helpers):
        self.function, self.used, self.called = function, set(), set()
        # A variable of that name is no helper.
        self.helpers = set(helpers) - {name for node in ast.walk(function) for name in _binds(node)}
        self.names = {name for node in ast.walk(function) for name in _written_outside(node)}
        self.matters = set()  # statements, by identity
        before = None
        while before != (len(self.names), len(self.matters)):  # both only grow
            before = len(self.names), len(self.matters)
            self._visit(function.body, loop_matters=False)
        for statement in _statements(function.body):
            found = self._helpers_in(statement)
            self.called |= found
            if statement in self.matters:
                self.used |= found

    def _visit(self, block, loop_matters):
        """Marks what matters in a block; returns whether anything does."""
        found = False
        for statement in _block(block):
            matters = statement in self.matters or self._itself(statement, loop_matters)
            if isinstance(statement, (*FUNCTIONS, ast.ClassDef)) and not matters:
                continue  # nobody asks for it, so what it would do is nothing
            is_loop = isinstance(statement, (ast.For, ast.AsyncFor, ast.While))
            for inner in _blocks(statement):
                matters |= self._visit(inner, statement in self.matters if is_loop else loop_matters)
            if matters:
                self.matters.add(statement)
                self.names |= _read(statement)
                found = True
        return found

    def _itself(self, statement, loop_matters):
        if isinstance(statement, (ast.Return, ast.Raise, ast.Assert, ast.Delete)):
            return True
        if isinstance(statement, (ast.Break, ast.Continue)):
            return loop_matters
        if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
            return statement.name in self.names
        expressions = list(_expressions(statement))
        if any(isinstance(n, (ast.Yield, ast.YieldFrom, ast.Await)) for e in expressions for n in ast.walk(e)):
            return True
        if _bound(statement) & self.names:
            return True
        if isinstance(statement, ast.Expr) and isinstance(
            statement.value, ast.Call
        ):  # result.append(...), push(heap, ...)
            call = statement.value
            roots = {_root(a) for a in [call.func, *call.args]} if _root(call.func) != "print" else set()
            return bool(roots & self.names - {None})
        return False

    def _helpers_in(self, statement):
        """Helpers that a statement calls or passes on; a bare mention is nothing."""
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Name):
            return set()
        return {n for e in _expressions(statement) for n in _loaded(e)} & self.helpers


def _passing(flows, helpers):
    """Names of the helpers, and of the functions of the text that only hand on what one of these returns."""
    passing, before = set(helpers), None
    while passing != before:
        before = set(passing)
        passing |= {flow.function.name for flow in flows if _hands_on(flow, passing)}
    return passing


def _hands_on(flow, passing):
    """Whether nothing that matters in a function does any work, but for one call of a passing function.

    Names, assignments, conversions, nested functions, lambdas, partial() and the like only carry values around.
    """
    kept = [s for s in _statements(flow.function.body) if s in flow.matters]
    expressions = [e for s in kept if not isinstance(s, (ast.Assert, ast.Delete)) for e in _expressions(s)]
    nodes = [n for e in expressions for n in ast.walk(e)]
    own = {name for n in ast.walk(flow.function) for name in _binds(n)}  # bound to nothing but what is carried
    carriers = passing | CONVERSIONS | own
    # Names that start as 0, "" or []: adding to them is assigning to them.
    empty = {name for s in kept if isinstance(s, ast.Assign) and _is_empty(s.value) for name in _bound(s)}

    def carries(node):
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Attribute):
                return function.attr in ("__call__", "partial")
            if isinstance(function, ast.Name) and function.id == "map":
                return all(isinstance(values, (ast.List, ast.Tuple)) for values in node.args[1:])
            return not isinstance(function, ast.Name) or function.id in carriers | {"partial"}
        if isinstance(node, ast.Attribute):
            return node.attr in ("__call__", "partial")
        if isinstance(node, ast.Subscript):  # [aux(x), 0][0]
            return isinstance(node.value, (ast.List, ast.Tuple)) and isinstance(node.slice, ast.Constant)
        if isinstance(node, ast.IfExp):
            return isinstance(node.test, ast.Constant) or ast.dump(node.body) == ast.dump(node.orelse)
        if isinstance(node, ast.BoolOp):
            return len(set(map(ast.dump, node.values))) == 1
        if isinstance(node, ast.BinOp):
            if isinstance(node.op, (ast.Add, ast.Sub, ast.BitOr, ast.BitXor, ast.LShift, ast.RShift)):
                return _is_empty(node.right) or (isinstance(node.op, ast.Add) and _is_empty(node.left))
            if isinstance(node.op, (ast.Mult, ast.Div, ast.FloorDiv, ast.Pow)):
                return _is_one(node.right) or (isinstance(node.op, ast.Mult) and _is_one(node.left))
            return False
        inert = (ast.Name, ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Starred, ast.NamedExpr, ast.Lambda)
        return isinstance(node, inert) or not isinstance(node, ast.expr)

    def passes(statement):
        if isinstance(statement, ast.Return):
            return not isinstance(statement.value, (ast.List, ast.Tuple, ast.Dict))
        if isinstance(statement, ast.AugAssign):  # in a nested function it may add more than once
            once = statement in flow.function.body and isinstance(statement.op, ast.Add)
            return once and _bound(statement) <= empty
        if isinstance(statement, ast.If):
            return list(map(ast.dump, statement.body)) == list(map(ast.dump, statement.orelse))
        if isinstance(statement, ast.For):
            return isinstance(statement.iter, (ast.List, ast.Tuple))
        if isinstance(statement, ast.Match):
            return ast.unparse(statement.cases[0].pattern).isidentifier() and statement.cases[0].guard is None
        simple = (ast.Assign, ast.AnnAssign, ast.Expr, ast.Try, ast.Delete, ast.Assert, ast.While, *FUNCTIONS)
        return isinstance(statement, simple)

    calls = {ast.dump(n): _loaded(n.func) for n in nodes if isinstance(n, ast.Call) and type(n.func) is not ast.Lambda}
    several = sum(bool(names & passing) for names in calls.values()) > 1
    several |= any(sum(name in names for names in calls.values()) > 1 for name in own - {"partial"})
    return not several and all(map(carries, nodes)) and all(map(passes, kept))


def _is_empty(node):
    literal = isinstance(node, ast.Constant) and not node.value
    return literal or (isinstance(node, (ast.List, ast.Tuple)) and not node.elts)


def _is_one(node):
    return isinstance(node, ast.Constant) and node.value == 1


def _block(statements):
    """The statements that can be reached: not behind a return, nor under a constant condition that is false."""
    reached = []
    for statement in statements:
        if isinstance(statement, (ast.If, ast.While)) and isinstance(statement.test, ast.Constant):
            taken = statement.body if statement.test.value else statement.orelse
            if isinstance(statement, ast.If) or not statement.test.value:
                reached += _block(taken)
                if taken and isinstance(taken[-1], (ast.Return, ast.Raise)):
                    break
                continue
        reached.append(statement)
        if isinstance(statement, (ast.Return, ast.Raise, ast.Break, ast.Continue)):
            break
        endless = isinstance(statement, ast.While) and isinstance(statement.test, ast.Constant)  # while True
        if endless and not any(isinstance(node, ast.Break) for node in _walk(statement.body)):
            break
    return reached


def _blocks(statement):
    blocks = [getattr(statement, field, []) for field in ("body", "orelse", "finalbody")]
    blocks += [part.body for field in ("handlers", "cases") for part in getattr(statement, field, [])]
    return [block for block in blocks if block]


def _statements(block):
    for statement in _block(block):
        yield statement
        for inner in _blocks(statement):
            yield from _statements(inner)


def _expressions(statement):
    """The expressions of a statement itself, not of the statements inside."""
    todo = [n for n in ast.iter_child_nodes(statement) if not isinstance(n, (ast.stmt, ast.arguments))]
    for node in todo:
        if isinstance(node, ast.expr):
            yield node
        else:  # a `with` item, an `except` clause, a `case`
            todo += [n for n in ast.iter_child_nodes(node) if not isinstance(n, ast.stmt)]


def _loaded(node):
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def _read(statement):
    return {name for e in _expressions(statement) for name in _loaded(e)}


def _root(node):
    """The name at the left end of a.b[c].d()."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call, ast.Starred)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def _bound(statement):
    """Names that a statement binds or changes, as in a = ..., a[i] += ..., for a in ..., with b as a, (a := b)."""
    targets = [e for e in _expressions(statement) if not isinstance(getattr(e, "ctx", ast.Load()), ast.Load)]
    walrus = [n.target for e in _expressions(statement) for n in ast.walk(e) if isinstance(n, ast.NamedExpr)]
    names = set()
    for target in targets + walrus:
        parts = [n for n in ast.walk(target) if not isinstance(getattr(n, "ctx", ast.Load()), ast.Load)]
        names |= {_root(part) for part in parts}
    return names - {None}


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


def _written_outside(node):
    """For a function that binds names outside of itself by global or nonlocal: those, and its own name."""
    if not isinstance(node, FUNCTIONS):
        return set()
    names = {name for n in _walk(node.body) if isinstance(n, (ast.Global, ast.Nonlocal)) for name in n.names}
    return names | {node.name} if names else names
