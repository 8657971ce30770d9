"""The processes of rewards/sandbox.py: the template, and its clones, each a candidate or a grader.

Only `send` and `receive` also run in the trainer.
"""

import ast
import atexit
import builtins
import collections
import contextlib
import datetime
import decimal
import fractions
import functools
import gc
import itertools
import json
import marshal
import operator
import os
import random
import re
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import types

from rewards import sandbox_kernel as kernel

MAX_FRAME = 16_000_000  # bytes of one message
MAX_FOLDER = 4_000_000  # bytes of all files that candidate and grader share
MAX_FILES = 100
STACK = 8 << 20  # bytes of address space for each of a job's threads

# Modules that models and tests often import: templates import them before any job, so clones have them at once.
PRELOADED = """
bisect copy decimal fractions functools hashlib heapq itertools math operator re statistics string typing unittest
"""


# Messages -----------------------------------------------------------------------------------------------------------
# A message is its length in four bytes, then JSON. Values that JSON lacks become lists that begin with a name.


def send(sock, value):
    data = json.dumps(value).encode()
    if len(data) > MAX_FRAME:
        raise ValueError("too large")
    sock.sendall(struct.pack(">I", len(data)) + data)


def receive(sock, deadline=None):
    """Raises TimeoutError at the deadline (time.monotonic), EOFError at the end, ValueError for an invalid message."""

    def read(size):
        data = bytearray()
        while len(data) < size:
            if deadline is not None:
                sock.settimeout(max(deadline - time.monotonic(), 1e-3))
            block = sock.recv(min(size - len(data), 1 << 20))
            if deadline is not None and time.monotonic() > deadline:  # else single bytes could go on forever
                raise TimeoutError
            if not block:
                raise EOFError
            data += block
        return bytes(data)

    (size,) = struct.unpack(">I", read(4))
    if size > MAX_FRAME:
        raise ValueError("too large")
    try:
        return json.loads(read(size))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


PLAIN = {type(None), bool, float, str}
SEQUENCES = {t.__name__: t for t in (list, tuple, set, frozenset)}
MAPPINGS = {t.__name__: t for t in (dict, collections.OrderedDict, collections.Counter)}
TYPES = {t.__name__: t for t in (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, type(None))}
# Types sent as their parts, and types sent as a text: one function writes it, the other reads it.
BY_PARTS = {
    complex: ["real", "imag"],
    range: ["start", "stop", "step"],
    fractions.Fraction: ["numerator", "denominator"],
    datetime.timedelta: ["days", "seconds", "microseconds"],
    slice: ["start", "stop", "step"],
}
BY_TEXT = {t: (t.hex, t.fromhex) for t in (bytes, bytearray)} | {decimal.Decimal: (str, decimal.Decimal)}
BY_TEXT |= {t: (t.isoformat, t.fromisoformat) for t in (datetime.datetime, datetime.date, datetime.time)}
NAMES = {t.__name__: t for t in [*BY_PARTS, *BY_TEXT]}
VIEWS = {type(getattr(d, n)()): n for d in ({}, collections.OrderedDict()) for n in ("keys", "values", "items")}
# Types sent as their items, and types sent as alternating keys and values; each with its name in a message.
BY_ITEMS = {t: name for name, t in SEQUENCES.items()} | VIEWS
BY_PAIRS = {t: name for name, t in MAPPINGS.items()} | {collections.defaultdict: "dict"}


def _pack(value, handle):
    """Plain data for JSON. Only exact types count as plain: a subclass could redefine equality.

    handle(value) packs everything else.
    """
    kind = type(value)
    if kind is str and re.search("[\ud800-\udfff]", value):  # JSON would join two surrogates into one character
        return ["str", value.encode("utf-8", "surrogatepass").hex()]
    if kind in PLAIN:
        return value
    if kind is int:  # long ones as hexadecimal: linear in the length, and without a limit on digits
        return value if -(2**53) < value < 2**53 else ["int", hex(value)]
    if kind in BY_ITEMS:
        return [BY_ITEMS[kind], *[_pack(item, handle) for item in value]]
    if kind in BY_PAIRS:
        return [BY_PAIRS[kind], *[_pack(item, handle) for pair in value.items() for item in pair]]
    if kind is collections.deque:
        return ["deque", value.maxlen, *[_pack(item, handle) for item in value]]
    if kind in BY_PARTS:
        return [kind.__name__, *[_pack(getattr(value, part), handle) for part in BY_PARTS[kind]]]
    if kind in BY_TEXT:
        return [kind.__name__, BY_TEXT[kind][0](value)]
    if kind is type and value in TYPES.values():
        return ["type", value.__name__]
    return handle(value)


def _unpack(data, handle):
    """The inverse of _pack; handle(list) unpacks the rest. Hostile data may raise any exception."""
    if type(data) is not list:
        if type(data) is int or type(data) in PLAIN:
            return data
        raise ValueError("not a packed value")
    kind, *rest = data
    if kind in SEQUENCES:
        return SEQUENCES[kind](_unpack(item, handle) for item in rest)
    if kind in MAPPINGS:
        items = [_unpack(item, handle) for item in rest]
        return MAPPINGS[kind](dict(zip(items[::2], items[1::2])))
    if kind == "deque":
        return collections.deque([_unpack(item, handle) for item in rest[1:]], rest[0])
    if kind == "int":
        return int(rest[0], 16)
    if kind == "str":
        return bytes.fromhex(rest[0]).decode("utf-8", "surrogatepass")
    if NAMES.get(kind) in BY_PARTS:
        return NAMES[kind](*[_unpack(part, handle) for part in rest])
    if NAMES.get(kind) in BY_TEXT:
        return BY_TEXT[NAMES[kind]][1](rest[0])
    if kind in VIEWS.values():
        items = [_unpack(item, handle) for item in rest]
        pairs = {"keys": zip(items, items), "values": enumerate(items), "items": items}[kind]
        return getattr(dict(pairs), kind)()
    if kind == "iterator":
        return Iterator([_unpack(item, handle) for item in rest])
    if kind == "type":
        return TYPES[rest[0]]
    return handle(data)


class Iterator(itertools.chain):  # the remaining items of an iterator
    def __repr__(self):
        return "<iterator>"  # an address would differ between runs


# The built-in iterators: their remaining items can be taken out before the tests ask for them.
VIEWED = [d for d in ({}, collections.OrderedDict()) for d in (d, d.values(), d.items())]
ITERATED = [[], (), set(), "", "\xe9", b"", bytearray(), range(0), range(1 << 70), collections.deque(), *VIEWED]
ITERATORS = {type(iter(empty)) for empty in ITERATED} | {type(reversed(d)) for d in VIEWED}
# the type of iter(int, 0) is also that of re.finditer's result
ITERATORS |= {type(iter(int, 0)), type(reversed([])), type(reversed(collections.deque()))}
ITERATORS |= {t for m in (builtins, itertools) for t in vars(m).values() if hasattr(t, "__next__")}
ITERATORS |= {types.GeneratorType, Iterator}
# The plain value of an object whose class inherits from a plain type and does not redefine ==, taken by a method of
# the base, which the class cannot replace. And the grader's types for such values, so it can pass the object back.
PLAIN_PARTS = {int: int.__int__, float: float.__float__, str: str.__str__, tuple: lambda x: tuple(tuple.__iter__(x))}
LIKENESSES = {base: type(base.__name__, (base,), {}) for base in PLAIN_PARTS}
MUTABLE = (list, bytearray, set, dict, collections.deque)
UNICODE_ERRORS = (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError)


def _refill(old, new):
    """Replaces the content of a container by that of another one of its type."""
    if isinstance(old, (list, bytearray)):
        old[:] = new
    else:
        old.clear()
        (old.extend if isinstance(old, collections.deque) else old.update)(new)


def _follow(old, new):
    """Repeats in the argument `old` what a call changed in it, also inside tuples."""
    if type(old) is type(new) and isinstance(old, MUTABLE):
        _refill(old, new)
    elif type(old) is type(new) is tuple:
        for pair in zip(old, new):
            _follow(*pair)


class _Folder:
    """The plain files of this process's folder, kept in sync with those of another process.

    They cross the socket as data: in a folder that both could open, one could leave links, pipes and devices for the
    other.
    """

    def __init__(self):
        self.path, self.known = os.getcwd(), {}

    def changes(self):
        """What changed since the last exchange: name -> content in hexadecimal, or None if the file is gone."""
        found = {}
        with os.scandir(self.path) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    with open(entry.path, "rb") as file:
                        found[entry.name] = file.read()
        changed = {name: content.hex() for name, content in found.items() if self.known.get(name) != content}
        changed.update(dict.fromkeys(self.known.keys() - found.keys()))
        self._keep(found)
        return changed

    def apply(self, changes):
        """Writes the changes to the folder. Hostile changes may raise any exception."""
        known = dict(self.known)
        for name, content in changes.items():
            if os.path.basename(name) != name or name in ("", ".", ".."):
                raise ValueError("not the name of a file")
            known.pop(name, None)
            if content is not None:
                known[name] = bytes.fromhex(content)
        self._keep(known)  # before anything is written
        for name in changes:
            path = os.path.join(self.path, name)
            if name in known:  # overwrite the same file, which may be open
                with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644), "wb") as file:
                    file.truncate()
                    file.write(known[name])
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.remove(path)

    def _keep(self, known):
        if len(known) > MAX_FILES or sum(map(len, known.values())) > MAX_FOLDER:
            raise ValueError("too many or too large files")
        self.known = known


# The template's side ------------------------------------------------------------------------------------------------


def template():
    """Clones a process for each job and kills it on request, until the trainer is gone."""
    control = socket.socket(fileno=0)
    kernel.die_first()
    layers = kernel.probe()
    for module in PRELOADED.split():
        __import__(module)
    os.umask(0o077)  # the trainer's may make folders that their owner cannot enter
    threading.stack_size(STACK)  # else as `ulimit -s` says: often 64 MB in containers, and of those few fit in a job
    place = None  # of the jobs' folders on the disk
    if layers["namespaces"]:
        kernel.enter_namespaces()
    else:
        place = tempfile.mkdtemp()  # if nothing can be written, it raises here, and not in each job
        atexit.register(shutil.rmtree, place, ignore_errors=True)  # the trainer does it if this process is killed
    os.environ.pop("TMPDIR", None)  # a job has a folder of its own
    kernel.hide_memory()
    send(control, [layers, place])
    gc.collect()
    gc.freeze()  # a garbage collection in a job then touches, and so copies, less memory
    control.settimeout(None)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 3, 2)
        if not message:
            return
        with contextlib.ExitStack() as at_end:
            folder = kernel.JOB_FOLDER
            if place:
                folder = os.path.join(place, "job")
                os.mkdir(folder)
                # with Landlock it has only plain files
                at_end.callback(shutil.rmtree, folder, ignore_errors=not layers["Landlock"])
            pid = kernel.clone(layers["namespaces"])
            if pid == 0:
                try:
                    _job(message, descriptors, layers, folder)
                finally:  # a clone must never return into the loop above
                    os._exit(0)
            for descriptor in descriptors:
                os.close(descriptor)
            stop = control.recv(1)  # empty when the trainer is gone
            os.kill(pid, signal.SIGKILL)  # the pid cannot be reused: it is ours until we wait for it
            if not (layers["namespaces"] or layers["seccomp"]):
                with contextlib.suppress(ProcessLookupError, PermissionError):  # what it forked, if allowed
                    os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if not stop:
            return
        control.sendall(b"D")


def _job(message, descriptors, layers, folder):
    role, seconds = struct.unpack(">cH", message)
    null = os.open(os.devnull, os.O_RDWR)  # opened anew: the next clone could read marks on the template's
    for place in range(3):  # 0 was the control socket, which a job must not have
        os.dup2(null, place)
    for place, descriptor in enumerate(sorted(descriptors), start=3):
        os.dup2(descriptor, place)
    os.closerange(3 + len(descriptors), 256)
    kernel.confine(layers, folder, seconds)
    random.seed(0)  # the same code, the same reward
    tempfile.tempdir = None  # the job cannot write to the template's choice
    sys.argv[1:] = []
    os.utime, os.chmod = _on_a_file(os.utime), _on_a_file(os.chmod)
    if role == b"C":
        _candidate(socket.socket(fileno=3))
    else:
        _grader(socket.socket(fileno=3), socket.socket(fileno=4))


def _candidate(channel):
    """Runs the model's code and answers calls. From its first line on, that code may do anything here."""
    texts, prepare, options, share = receive(channel)
    folder = _Folder() if share else None
    scope = {}
    exec(marshal.loads(bytes.fromhex(prepare)), scope)
    program, facts = scope["prepare"](texts, **(options or {}))
    send(channel, [program is not None, facts])
    del scope, texts, prepare, options
    builtins.exit = builtins.quit = sys.exit  # as if Python had started without -S
    module = types.ModuleType("candidate")
    module.__file__ = os.path.abspath("candidate.py")  # does not exist, but its folder does
    sys.modules["candidate"] = module
    objects = []  # not plain data, or changeable by the tests: the grader knows them by number
    numbers = {}  # id(object) -> its number; the objects are kept alive, so no id is reused

    def number(value):
        if id(value) not in numbers:
            numbers[id(value)] = len(objects)
            objects.append(value)
        return numbers[id(value)]

    def token(value):
        return ["object", number(value)]

    def handle(value):
        if share:  # the tests may use the object itself
            return token(value)
        kind = type(value)
        if kind in ITERATORS:
            items = list(itertools.islice(value, MAX_ITEMS + 1))
            if len(items) > MAX_ITEMS:  # it may have no end
                return token(itertools.chain(items, value))
            return ["iterator", *[_pack(item, handle) for item in items]]
        bases = [base for base in PLAIN_PARTS if issubclass(kind, base) and kind.__eq__ is base.__eq__]
        return token(value) + [_pack(PLAIN_PARTS[base](value), handle) for base in bases]

    def find(key):  # a name of the program's, or a number
        return vars(module)[key] if isinstance(key, str) else objects[key]

    def given(data):  # passed by the tests: one of our objects, or a built-in such as `len`
        return getattr(builtins, data[1]) if data[0] == "builtin" else find(data[1])

    def argument(x):  # of an exception; long ones are cut
        if type(x) in (str, bytes):
            x = x[:1000]
        elif type(x) is tuple:  # such as a key of two parts, or a SyntaxError's position
            return ["tuple", *map(argument, x[:10])]
        elif type(x) not in (int, float, bool, type(None)):
            x = _text(x)[:200]
        return _pack(x, token)

    def answer(function):
        try:
            send(channel, [*function(), *([folder.changes()] if share else [])])
        except BaseException as error:  # also SystemExit and KeyboardInterrupt: the call failed
            kinds, args = type(error).__mro__, [_text(error)[:200]]
            if vars(builtins).get(kinds[0].__name__) is kinds[0]:  # keep an OSError's errno, a KeyError's key
                args = [argument(x) for x in error.args]
            names = [kind.__name__ for kind in kinds]
            send(channel, ["error", names, _text(error)[:200], args, *([folder.changes()] if share else [])])

    def load():
        exec(compile(program, "<candidate>", "exec"), vars(module))
        return ["value", None, []]

    def operate(name, key, packed_args, packed_keywords, files, edits):
        if share:
            folder.apply(files)
        for place, content in edits:
            _refill(objects[place], _unpack(content, given))
        args, keywords = (_unpack(p, given) for p in (packed_args, packed_keywords))
        value = OPERATIONS[name](find(key), *args, **keywords)
        packed = _pack(value, handle)
        # Send back arguments that the call changed in place. Packing by `token` does not consume iterators.
        _, *after = _pack([*args, *keywords.values()], token)
        before = [*packed_args[1:], *packed_keywords[2::2]]
        changed = [[i, new] for i, (new, old) in enumerate(zip(after, before)) if new != old]
        return ["value", packed, changed, *([number(value)] if share and issubclass(type(value), MUTABLE) else [])]

    answer(load)
    while True:
        request = receive(channel)
        answer(lambda request=request: operate(*request))


def _on_a_file(function):
    """Makes the call fail if the file is missing: seccomp always grants it, but Path.touch() relies on failure."""

    @functools.wraps(function)
    def checked(path, *args, **keywords):
        os.stat(path, dir_fd=keywords.get("dir_fd"))
        return function(path, *args, **keywords)

    return checked


def _items(thing):
    items = list(itertools.islice(thing, MAX_ITEMS + 1))
    if len(items) > MAX_ITEMS:
        raise ValueError(f"more than {MAX_ITEMS} items")
    return items


# What the grader may ask for. Nothing here compares: that would tell the candidate the expected value.
MAX_ITEMS = 100_000
OPERATIONS = {
    "call": lambda function, *args, **keywords: function(*args, **keywords),
    "get": getattr,
    "set": setattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "len": len,
    "items": _items,
    "instance": lambda kind, thing: isinstance(thing, kind),
}


# The grader's side --------------------------------------------------------------------------------------------------


class CandidateError(Exception):
    """The candidate raised an exception that is not built in, or does not answer."""


class TooManyAsserts(BaseException):
    """A test loops over what the candidate returned, so the candidate chooses how many asserts count."""


class Opaque:
    """An object of the candidate's. It can be passed back, is true, as most objects are, and equals only itself.

    The tests never call the object's own methods: a subtraction, say, would tell it the expected value.
    """

    def __init__(self, remote, key):
        vars(self)["__handle__"] = remote, key  # no attribute of the candidate's can hide this name

    def __eq__(self, other):
        return isinstance(other, Opaque) and vars(self)["__handle__"] == vars(other)["__handle__"]

    def __hash__(self):
        return hash(vars(self)["__handle__"])

    def __bool__(self):
        return True

    def __setattr__(self, name, value):  # it would be set here only, and the candidate would never see it
        raise TypeError(f"the tests set {name} of an object that they can only pass on")

    def __repr__(self):
        return "<object>"


class Object(Opaque):
    """An object that the tests may use: call it, read and set its attributes and items, take its length and iterate.

    Comparisons and arithmetic are those of Opaque. `x in object` compares here in the grader, item by item.
    """

    def _ask(self, operation, *args, **keywords):
        remote, key = vars(self)["__handle__"]
        return remote.ask(operation, key, args, keywords)

    __call__ = functools.partialmethod(_ask, "call")
    __setattr__ = functools.partialmethod(_ask, "set")
    __getitem__ = functools.partialmethod(_ask, "getitem")
    __setitem__ = functools.partialmethod(_ask, "setitem")
    __delitem__ = functools.partialmethod(_ask, "delitem")
    __len__ = functools.partialmethod(_ask, "len")

    def __getattr__(self, name):
        if name.startswith("__") and name.endswith("__"):  # what copy, pickle, unittest ... ask of any object
            raise AttributeError(name)
        return Object._ask(self, "get", name)

    def __instancecheck__(self, thing):
        return isinstance(thing, Object) and Object._ask(self, "instance", thing)

    def __iter__(self):
        return iter(Object._ask(self, "items"))


class _Remote:
    """The candidate, seen from the grader."""

    def __init__(self, channel, deadline, share):
        self.channel, self.deadline = channel, deadline
        self.folder = _Folder() if share else None
        self.kind = Object if share else Opaque
        self.dead = ""  # why the candidate no longer answers
        self.last = None  # what the last call returned, or a CandidateError that says what happened instead
        # The latest containers from the candidate: what the tests change in them is changed there too.
        self.lent = collections.deque(maxlen=32)  # [number, container, its content at the last sync]

    def receive(self, *request):
        if not self.dead:
            try:
                if request:
                    self.channel.settimeout(max(self.deadline - time.monotonic(), 1e-3))
                    send(self.channel, *request)
                return receive(self.channel, self.deadline)
            except TimeoutError:
                self.dead = "out of time"
            except (OSError, EOFError):
                self.dead = "the code ended the interpreter"
            except ValueError as error:
                self.dead = f"an unreadable answer ({error})"
        self.last = CandidateError(self.dead)
        raise self.last

    def ask(self, operation, key, args=(), keywords=None):
        if self.dead:
            self.receive()  # raises, before anything large is packed
        edits = []
        for lent in self.lent:
            number, container, before = lent
            now = _pack(container, self.own)
            if now != before:
                edits.append([number, now])
                lent[2] = now
        files = self.folder.changes() if self.folder else {}
        packed = [_pack(list(args), self.own), _pack(keywords or {}, self.own)]
        return self.result(self.receive([operation, key, *packed, files, edits]), [*args, *(keywords or {}).values()])

    def result(self, reply, args=()):
        """The value of a reply, or raises its exception; a hostile reply may raise anything."""
        if self.folder:
            *reply, files = reply
            self.folder.apply(files)
        if reply[0] != "value":
            _, names, text, args = reply
            self.last = CandidateError(f"raised {names[0]}: {text}"[:200])
            kinds = [vars(builtins).get(name) for name in names]
            kind = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Exception)), None)
            # StopIteration would end a loop in the tests, and other BaseExceptions the grader.
            if kind is None or issubclass(kind, StopIteration):
                raise CandidateError(f"{names[0]}: {text}")
            error = kind(*[_unpack(part, self.opaque) for part in args])
            if isinstance(error, UNICODE_ERRORS) and not 0 <= error.start <= len(error.object):
                raise CandidateError(f"{names[0]}: {text}")  # its text would show memory beside the object
            raise error
        _, value, changed, *numbers = reply
        for index, new in changed:
            _follow(args[index], _unpack(new, self.opaque))
        self.last = _unpack(value, self.opaque)
        if self.folder and numbers and isinstance(self.last, MUTABLE):
            self.lent.append([*numbers, self.last, _pack(self.last, self.own)])
        return self.last

    def function(self, name):
        return lambda *args, **keywords: self.ask("call", name, args, keywords)

    def opaque(self, data):
        kind, key, *parts = data
        if kind != "object" or type(key) is not int:
            raise ValueError("not a packed value")
        if not parts:
            return self.kind(self, key)
        part = _unpack(parts[0], self.opaque)
        value = LIKENESSES[type(part)](part)
        vars(value)["__handle__"] = self, key
        return value

    def own(self, value):
        if isinstance(value, (Opaque, *LIKENESSES.values())):
            return ["object", vars(value)["__handle__"][1]]
        if type(value) in ITERATORS:
            return ["iterator", *[_pack(item, self.own) for item in _items(value)]]
        if type(value) is types.BuiltinFunctionType and vars(builtins).get(value.__name__) is value:
            return ["builtin", value.__name__]
        raise TypeError(f"the tests pass a {type(value).__name__}, which is no plain data")


class _Count(ast.NodeTransformer):
    """Rewrites tests so that each assert reports its outcome instead of ending the run at the first failure."""

    def __init__(self):
        self.asserts, self.handled = 0, False
        self.functions = {}  # name of a function with asserts -> the first and the last of these
        self.called = []  # the same of each of their calls so far

    def _guarded(self, statements, place):
        """Statements that may raise elsewhere: those of these asserts that it keeps from running have failed."""
        guard = ast.parse(f"try: __begin__{place}\nexcept Exception: __lost__{place}").body[0]
        guard.body += statements
        return guard

    def visit_Assert(self, node):
        if isinstance(node.test, ast.Constant) and node.test.value:
            return ast.copy_location(ast.Pass(), node)  # `assert True, "..."` tests nothing
        self.asserts += 1
        report = ast.parse(f"try: __assert__({self.asserts})\nexcept Exception: __failed__({self.asserts})").body[0]
        report.body[0].value.args.append(node.test)  # inline: it may bind names, or yield
        return ast.copy_location(report, node)

    def visit_ClassDef(self, node):
        return node  # a failing assert fails its test method, and these are counted instead

    def visit_Try(self, node):  # its handlers, or a context such as assertRaises, may expect what a loop raises
        before, self.handled = self.handled, True
        self.generic_visit(node)
        self.handled = before
        return node

    visit_With = visit_Try

    def visit_FunctionDef(self, node):
        before = self.asserts
        self.generic_visit(node)
        if self.asserts > before:
            self.functions[node.name] = before + 1, self.asserts
        return node

    def visit_Expr(self, node):  # each call of a function with asserts is a test, and after an error the next begins
        place = self.functions.get(getattr(getattr(node.value, "func", None), "id", None))
        if not place or self.handled:
            return node
        self.called.append(place)
        return self._guarded([node], place)

    def visit_For(self, node):
        before, called = self.asserts, len(self.called)
        node.body = [self.visit(part) for part in node.body]
        places = self.called[called:] + ([(before + 1, self.asserts)] if self.asserts > before else [])
        if places and not self.handled:  # each round is a test, too
            node.body = [self._guarded(node.body, places[-1])]
            rounds = ast.parse(f"__rounds__{places[-1]}", mode="eval").body
            rounds.args.append(node.iter)
            node.iter = rounds
        node.orelse = [self.visit(part) for part in node.orelse]
        return node


def _grader(channel, trainer):
    """Runs the tests and sends the trainer what it learns, and in the end the fields of a Result but the seconds."""
    deadline, texts, tests, names, prepare, options, examples, setup, objects = receive(trainer)
    random.seed(tests)  # repeatable, but unpredictable without seeing the tests
    remote = _Remote(channel, deadline, objects)
    counter = _Count()
    tree = ast.fix_missing_locations(counter.visit(ast.parse(tests)))
    outcomes, ran, errors, facts, shown, begun = [], [], [], {}, [], {}  # ran: assert number of each outcome
    left = {*range(1, counter.asserts + 1)}  # asserts that have not run yet
    loops = {}  # that run, outermost first: the asserts in them, how many ran before this round, further rounds

    def to_come():  # if each further round holds as many asserts as this one
        ahead, inside = 0, set()
        for numbers, before, further in reversed(loops.values()):
            done = len(ran) - before
            in_round = max(len(numbers), done + ahead)
            ahead = in_round - done + further * in_round
            inside.update(left.intersection(numbers))
        return min(MAX_ITEMS, len(left) - len(inside) + ahead)

    def count(number, held):
        if len(outcomes) == MAX_ITEMS:
            raise TooManyAsserts
        ran.append(number)
        outcomes.append(held)
        left.discard(number)
        # at once: the next value may keep this process busy for ever
        send(trainer, ["outcome", held, to_come()])

    def check(number, value):
        count(number, bool(value) and not remote.dead)  # its death is not an exception that a test may expect

    def failed(*numbers):  # whatever a test raises
        for number in numbers:
            count(number, False)
        errors.append(_describe(sys.exc_info()[1]))

    def rounds(first, last, things):  # of a loop; those to come are counted where their number is known
        length = len(things) if isinstance(things, (range, *MUTABLE, *SEQUENCES.values())) else 0
        loop, numbers = object(), range(first, last + 1)
        try:
            for k, thing in enumerate(things, start=1):
                loops[loop] = numbers, len(ran), max(0, length - k)
                if k == 1:
                    send(trainer, ["left", to_come()])
                yield thing
        finally:
            loops.pop(loop, None)

    def begin(*place):
        begun[place] = len(ran)

    def lost(first, last):  # of a round or a call: its asserts that did not run yet have failed
        failed(*({*range(first, last + 1)}.difference(ran[begun[first, last] :]) or [last]))

    def example(source):
        remote.last = CandidateError("")
        *before, last = ast.parse(source).body
        names = dict(scope)
        try:
            exec(compile(ast.Module(before, type_ignores=[]), "<example>", "exec"), names)
            if eval(compile(ast.Expression(last.test), "<example>", "eval"), names):
                return ""
            return _plain(f"returned {remote.last!r}")
        except Exception as error:
            return _describe(remote.last if isinstance(remote.last, CandidateError) and str(remote.last) else error)

    builtins.exit = builtins.quit = sys.exit  # as in the candidate
    scope = {"__name__": "tests", "__assert__": check, "__failed__": failed}
    scope |= {"__rounds__": rounds, "__begin__": begin, "__lost__": lost}
    try:
        ready, facts = remote.receive([texts, prepare, options, objects])
        if not ready:
            raise CandidateError(facts.get("error") or "no program")
        send(trainer, ["facts", facts, to_come()])
        remote.result(remote.receive())
        exec(setup, scope)
        scope.update({name: (Object(remote, name) if objects else remote.function(name)) for name in names})
        shown = [example(source) for source in examples]
        try:
            exec(compile(tree, "<tests>", "exec"), scope)
        except SystemExit as end:
            if end.code or left:  # not after all tests, or because one failed
                raise CandidateError(f"the tests ended with exit status {end.code}") from None
    except TooManyAsserts:
        outcomes, errors = [False], [f"more than {MAX_ITEMS} asserts"]
    except Exception as error:  # outside of any assert: asserts that it kept from running have failed
        outcomes += [False] * max(1, len(left))
        errors.append(_describe(error))
    if not outcomes:
        outcomes, errors = [False], ["no assert ran"]
    reason = "" if all(outcomes) else remote.dead or next(iter(errors), "a wrong result")
    shown += ["not run"] * (len(examples) - len(shown))
    send(trainer, ["verdict", sum(outcomes), len(outcomes), outcomes, reason, facts, shown])


def _describe(error):
    return _plain(_text(error) if isinstance(error, CandidateError) else f"{type(error).__name__}: {_text(error)}")


def _text(error):
    """str of an exception or of its argument; it may raise, as for 10**5000 or by a __str__ of its class."""
    try:
        return str(error)
    except BaseException as why:
        return f"<{type(why).__name__}>"


def _plain(text):
    """Short ASCII text: agents see it in prompts, and no tokenizer takes lone surrogates."""
    return text.encode("ascii", "backslashreplace").decode()[:200]
