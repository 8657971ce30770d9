"""The processes of rewards/sandbox.py and the layers around them. It needs Linux and libseccomp, and no root.

One *template* per trainer: a fresh interpreter that forks a *grader* for each job and otherwise does nothing. It gets
a socket and no byte of any job, so a fork finds neither tests nor answers in the memory that it inherits. The grader
forks its *candidate* before it reads the job; the candidate dies with it (PR_SET_PDEATHSIG), it with the template,
and the template ends when the trainer's end of its socket is closed.
"""

import ast
import builtins
import collections
import contextlib
import ctypes
import datetime
import decimal
import fractions
import functools
import json
import math
import operator
import os
import random
import resource
import signal
import socket
import struct
import sys
import types
import unittest
from dataclasses import dataclass, field
from errno import ENOSYS, EPERM
from operator import attrgetter

MEMORY, FILE, MESSAGE = 512 << 20, 16 << 20, 16_000_000  # bytes: address space, one file, one message
WALL = 6  # seconds by the clock for each second of processor time: for code that sleeps, and busy machines


# The layers ----------------------------------------------------------------------------------------------------------
# rlimits: how much memory, processor time, descriptors ... the kernel lets a process have.
# seccomp: a process hands the kernel a small program that judges each of its later system calls (open, fork, kill ...)
#   by number and arguments.
# Landlock: a process gives up, for good, the right to open files outside of a list of folders.
# Namespaces, where there is no Landlock: a process gets a tree of files of its own, that holds nothing but Python.

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_SET_THP_DISABLE = 1, 4, 36, 38, 41
# Python's own files and the libraries that its modules load: all that a job can read, with /dev/null.
READABLE = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", f"{sys.base_prefix}/lib"]
# The system calls that a job may make; every other one fails. So no fork, exec, kill, socket, pipe, link, mount ...
ALLOWED = """
read write readv writev pread64 pwrite64 lseek close stat fstat lstat newfstatat statx access faccessat faccessat2
readlink readlinkat getdents getdents64 getcwd chdir fchdir umask dup dup2 dup3 poll ppoll select pselect6 ftruncate
fsync fdatasync rename renameat unlink unlinkat munmap mprotect mremap madvise brk set_robust_list rseq gettid
sched_yield sched_getaffinity getpid getppid getuid geteuid getgid getegid uname getrlimit getrusage times getrandom
exit exit_group wait4 rt_sigaction rt_sigprocmask rt_sigpending rt_sigtimedwait rt_sigsuspend rt_sigreturn sigaltstack
restart_syscall pause alarm setitimer getitimer nanosleep clock_gettime clock_nanosleep clock_getres gettimeofday time
futex flock
"""
# Calls that are allowed only if `argument number & mask` is one of these values.
JUDGED = {
    "open": (1, 0x203, [0, 1, 2, 0x201, 0x202]),  # no truncation without write access, which old Landlocks let pass
    "openat": (2, 0x203, [0, 1, 2, 0x201, 0x202]),
    "mmap": (3, 0x21, [0, 1, 0x20]),  # no shared memory without a file: the limit on memory does not count it
    "clone": (0, 0x10F00, [0x10F00]),  # threads only
    "fcntl": (1, 0xFFFFFFFF, [0, 1, 2, 3, 4, 5, 6, 7, 1030]),  # nothing that makes a descriptor send signals
    "prlimit64": (0, 0xFFFFFFFF, [0]),  # its own limits
    "sendto": (3, 0xFFFFFFFF, [0]),  # no flags
    "recvfrom": (3, 0xFFFFFFFF, [0]),
}
ALLOW, REFUSE = 0x7FFF0000, 0x50000  # what the filter can answer; to REFUSE belongs the number of an error
NEW_MOUNTS, NEW_USER = 0x20000, 0x10000000  # for unshare: namespaces
READ_ONLY, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 32, 4096, 1 << 14, 1 << 18  # for mount
JOB_FOLDER = "/job"  # the folder of a job in its own tree of files

libc = ctypes.CDLL(None, use_errno=True)


def call(function, *arguments):
    """A C function with 64-bit integers; raises OSError for a negative result (libseccomp returns -errno)."""
    result = function(*[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    if result < 0:
        raise OSError(ctypes.get_errno(), f"the kernel refused {function.__name__}")
    return result


def _compile_filter():
    """A function without arguments that filters the system calls of this process from then on, for good."""
    library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(REFUSE | EPERM))
    rules = [(ALLOW, name) for name in ALLOWED.split()]
    for name, (argument, mask, values) in JUDGED.items():
        masked_equal = 7
        rules += [(ALLOW, name, struct.pack("=IIQQ", argument, masked_equal, mask, value)) for value in values]
    rules.append((REFUSE | ENOSYS, "clone3"))  # then threads start by clone, whose flags can be judged
    for answer, name, *conditions in rules:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:  # else this machine has no such call
            call(library.seccomp_rule_add_array, context, answer, number, len(conditions), *conditions or [None])
    return functools.partial(call, library.seccomp_load, context)


def _restrict_files(folder=""):
    """Landlock: from now on READABLE can be read, plain files in `folder` also written, nothing else opened."""
    create, add, restrict = 444, 445, 446  # the numbers of its system calls, which the C library does not know
    version = call(libc.syscall, create, None, 0, 1)
    call(libc.prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # no program gives back what is given up here
    rights = (1 << 13 + (version >= 2) + (version >= 3) + (version >= 5)) - 1  # one bit each; these are denied
    ruleset = call(libc.syscall, create, struct.pack("Q", rights), 8, 0)
    read, change = 1 << 2 | 1 << 3, 1 << 1 | (1 << 14 if version >= 3 else 0)  # read and list; write and truncate
    rules = {path: read for path in READABLE if os.path.isdir(path)} | {"/dev/null": 1 << 2 | change}
    rules |= {folder: read | change | 1 << 5 | 1 << 8} if folder else {}  # also remove and make plain files
    for path, allowed in rules.items():
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        call(libc.syscall, add, ruleset, 1, struct.pack("=Qi", allowed, place), 0)
        os.close(place)
    call(libc.syscall, restrict, ruleset, 0)
    os.close(ruleset)


def _mount(source, target, flags, kind=None, options=None):
    call(libc.mount, *[text and os.fsencode(text) for text in (source, target, kind)], flags, options)


def _use_private_root():
    """Namespaces: from now on this process and its forks see READABLE, read-only, and no other file."""
    user, group = os.getuid(), os.getgid()
    call(libc.unshare, NEW_USER | NEW_MOUNTS)  # in a user namespace of its own, anyone may mount
    for name, text in {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    with open("/proc/self/mountinfo", "rb") as file:  # there, a space in a path is \040
        mounts = [os.fsdecode(line.split()[4].decode("unicode_escape").encode("latin-1")) for line in file]
    _mount(None, "/", RECURSIVE | PRIVATE)  # what is mounted here is seen nowhere else
    root = "/proc"  # an empty folder in memory covers it, gets what may be seen, and becomes the root
    _mount("tmpfs", root, 0, "tmpfs", b"size=64k")
    os.mkdir(f"{root}/dev")
    open(root + os.devnull, "w").close()
    for path in [*filter(os.path.isdir, READABLE), os.devnull]:
        if path != os.devnull:
            os.makedirs(root + path, exist_ok=True)
        _mount(path, root + path, BIND | RECURSIVE)
        real = os.path.realpath(path)
        for inner in ["", *[m.removeprefix(real) for m in mounts if m.startswith(f"{real}/") and os.path.exists(m)]]:
            keep = os.statvfs(root + path + inner).f_flag & 0b1110  # nosuid, nodev, noexec: not ours to take back
            _mount(None, root + path + inner, REMOUNT | BIND | READ_ONLY | keep)
    os.mkdir(root + JOB_FOLDER)
    _mount(None, root, REMOUNT | BIND | READ_ONLY)
    os.chroot(root)  # each job goes to its folder, or to "/", in here


def _use_private_folder():
    """An empty folder in memory at JOB_FOLDER, which this process and its forks see, and which goes with them."""
    call(libc.unshare, NEW_MOUNTS)
    _mount("tmpfs", JOB_FOLDER, 0b110, "tmpfs", b"nr_inodes=1k,size=%d" % FILE)  # nosuid, nodev


def _confine(layers, folder, seconds):
    """Limits this process for good. layers: see _find_layers."""
    # At the limit of processor time the kernel kills it; nothing that runs in it can raise the limit or catch that.
    limits = {"CPU": math.ceil(seconds), "FSIZE": FILE, "NOFILE": 64, "CORE": 0, "MEMLOCK": 0}
    limits |= {"AS": MEMORY, "NPROC": 4096} if sys.platform == "linux" else {}  # NPROC counts the user's threads
    for name, value in limits.items():
        with contextlib.suppress(ValueError):  # the limit is lower already
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    os.chdir(folder or "/")
    if layers["seccomp"]:
        call(libc.capset, struct.pack("Ii", 0x20080522, 0), bytes(24))  # drop root's privileges
        if layers["Landlock"]:
            _restrict_files(folder)
        layers["seccomp"]()


def _fork(function, *arguments):
    """Runs function(*arguments) in a fork that dies with this process and never returns from here."""
    parent = os.getpid()
    if not (pid := os.fork()):
        try:
            if sys.platform == "linux":
                call(libc.prctl, PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() == parent:  # else it has died already
                function(*arguments)
        finally:
            os._exit(0)
    return pid


# Template ------------------------------------------------------------------------------------------------------------
def _serve_template(unsafe):
    """Forks a grader for each socket that arrives, until the trainer is gone."""
    control = socket.socket(fileno=0)
    for module in ["bisect", "copy", "hashlib", "heapq", "itertools", "re", "statistics", "string", "typing"]:
        __import__(module)
    for number in (signal.SIGALRM, signal.SIGCHLD):  # a launcher may have had them ignored
        signal.signal(number, signal.SIG_DFL)
    layers = {"seccomp": None}
    safe = False
    if sys.platform == "linux":
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # if memory runs out, the kernel kills jobs before the trainer
        call(libc.prctl, PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # candidates whose grader has ended become its children
        libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)  # a huge page stays while a bit of it is used; MEMORY counts bits
        layers = _find_layers()
        safe = bool(layers["seccomp"] and (layers["Landlock"] or layers["namespaces"]))
        if safe and not layers["Landlock"]:
            _use_private_root()
        call(libc.prctl, PR_SET_DUMPABLE, 0, 0, 0, 0)  # no other process of this user can look into it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps its children
    Channel(control).send({name: bool(holds) for name, holds in layers.items()})
    while (safe or unsafe) and (received := socket.recv_fds(control, 1, 1))[0]:
        # If there are too many processes for a fork, the trainer sees the end of its socket and tries again.
        with socket.socket(fileno=received[1][0]) as trainer, contextlib.suppress(OSError):
            _fork(_run_grader, Channel(trainer), layers if safe else {"seccomp": None})


def _find_layers():
    """Which layers this system has, each tried in a process of its own; for seccomp, the function that applies it."""
    layers = {"seccomp": None}
    with contextlib.suppress(OSError):  # no libseccomp
        layers["seccomp"] = _compile_filter() if _is_refused(_compile_filter(), os.fork) else None
    layers["Landlock"] = _is_refused(_restrict_files, os.listdir, "/etc")
    if not layers["Landlock"]:
        layers["namespaces"] = _is_refused(lambda: [_use_private_root(), _use_private_folder()], os.listdir, "/etc")
    return layers


def _is_refused(layer, function, *arguments):
    """Whether a process that has applied the layer is refused a call."""

    def attempt():
        layer()
        try:
            function(*arguments)
        except OSError:
            os._exit(1)

    return os.waitpid(_fork(attempt), 0)[1] == 1 << 8


# Messages between the processes --------------------------------------------------------------------------------------
@dataclass
class Job:
    """One piece of model-written code, and what is done with it. Only `texts` are not to be trusted."""

    texts: list[str]  # what the models wrote, unchanged; more than MAX_SOURCE characters in all fail
    # Each assert outside of classes is one test, which passes if it held each time that it ran; if an error ends the
    # tests, only asserts at the top level, or at that of a function check(), keep what they earned. Each method of a
    # unittest.TestCase is one test.
    tests: str
    names: list[str]  # the candidate's functions and classes that the tests use
    # Name of a function in rewards/programs.py, prepare(texts, **options) -> (program, facts), that runs in the
    # candidate, where a crash does no harm. `program`: the source or syntax tree to run, or None. `facts`: to report.
    prepare: str = "prepare_text"
    options: dict = field(default_factory=dict)
    examples: list[str] | tuple = ()  # each ends in an assert whose outcome the model may see; they do not count
    setup: str = ""  # what the tests need, such as functions that the task's prompt defines
    folder: bool = False  # whether candidate and tests share a folder in which they may write plain files


def write_job(job, seconds, folder):
    """The message to a grader. seconds: of processor time; folder: the path of the job's folder, or ""."""
    return {"job": vars(job), "seconds": seconds, "folder": folder}


def _read_job(message):
    """(job, seconds, folder) of the message that write_job made."""
    return Job(**message["job"]), message["seconds"], message["folder"]


class Channel:
    """A socket for JSON, one message a line. receive raises EOFError at the end, ValueError for what is no message."""

    def __init__(self, sock):
        self.sock = sock
        self.lines = sock.makefile("rb")

    def send(self, message):
        data = json.dumps(message).encode() + b"\n"
        if len(data) > MESSAGE:
            raise ValueError("too large")
        self.sock.sendall(data)

    def receive(self):
        line = self.lines.readline(MESSAGE)
        if not line:
            raise EOFError
        return json.loads(line)


ATOMS = {type(None), bool, int, float, str}
SEQUENCES = {list, tuple, set, frozenset, collections.deque}
# Other types: how a value is taken apart, and how it is made again.
PARTS = {
    **{t: (lambda x: [x.hex()], t.fromhex) for t in (bytes, bytearray)},
    complex: (attrgetter("real", "imag"), complex),
    **{t: (attrgetter("start", "stop", "step"), t) for t in (range, slice)},
    decimal.Decimal: (lambda x: [str(x)], decimal.Decimal),
    fractions.Fraction: (attrgetter("numerator", "denominator"), fractions.Fraction),
    datetime.timedelta: (attrgetter("days", "seconds", "microseconds"), datetime.timedelta),
    **{t: (lambda x: [x.isoformat()], t.fromisoformat) for t in (datetime.datetime, datetime.date, datetime.time)},
}
DICTS = {dict, collections.OrderedDict, collections.Counter, collections.defaultdict}  # all arrive as dict
TYPES = {kind.__name__: kind for kind in [*ATOMS, *SEQUENCES, *PARTS, dict]}
MUTABLE = (list, set, dict, bytearray, collections.deque)


def _pack(value, reference):
    """Plain data for JSON; only exact types are plain: a subclass could redefine equality. The rest by reference."""
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind in DICTS:
        return ["dict", *[_pack(part, reference) for pair in value.items() for part in pair]]
    if kind in SEQUENCES:
        return [kind.__name__, *[_pack(part, reference) for part in value]]
    if kind in PARTS:
        return [kind.__name__, *PARTS[kind][0](value)]
    if kind is type and TYPES.get(value.__name__) is value:
        return ["type", value.__name__]
    return ["object", reference(value)]


def _unpack(data, refer):
    """The inverse of pack. Hostile data may raise any exception, but makes only plain data and refer(number)."""
    if type(data) in ATOMS:
        return data
    kind, *parts = data
    if kind == "object":
        return refer(*parts)
    if kind == "type":
        return TYPES[parts[0]]
    if (kind := TYPES[kind]) in PARTS:
        return PARTS[kind][1](*parts)
    parts = [_unpack(part, refer) for part in parts]
    return kind(parts) if kind in SEQUENCES else dict(zip(parts[::2], parts[1::2]))


# Candidate -----------------------------------------------------------------------------------------------------------
# What the grader may ask for. Nothing here compares: that would tell the candidate the expected value.
OPERATIONS = {
    "call": operator.call,
    "get": getattr,
    "set": setattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "len": len,
    "items": lambda thing: [item for item, _ in zip(thing, range(100_000))],
    "instance": lambda kind, thing: isinstance(thing, kind),
}


def _run_candidate(channel, layers):
    """Runs the model's code and answers calls. From its first line on, that code may do anything here."""
    null = os.open(os.devnull, os.O_RDWR)
    for place, descriptor in enumerate([null, null, null, channel.fileno()]):
        os.dup2(descriptor, place)
    os.closerange(4, 256)  # above all the trainer's socket
    channel.detach()
    channel = Channel(socket.socket(fileno=3))
    job, seconds, folder = _read_job(channel.receive())
    _confine(layers, folder, seconds)
    random.seed(0)  # the same code, the same reward
    program, facts = vars(programs)[job.prepare](job.texts, **job.options)
    channel.send([program is not None, facts])
    del job, facts  # else the code could read here whether its helper is a stub
    builtins.exit = builtins.quit = sys.exit
    module = sys.modules["candidate"] = types.ModuleType("candidate")
    kept = {}  # id -> object. What is no plain data stays here, and the grader knows it by its id

    def reference(value):
        kept[id(value)] = value
        return id(value)

    def find(key):
        return getattr(module, key) if isinstance(key, str) else kept[key]

    def operate(name, key, packed, keywords):
        arguments = [_unpack(part, find) for part in packed]
        value = OPERATIONS[name](find(key), *arguments, **{k: _unpack(v, find) for k, v in keywords.items()})
        changed = []  # pairs (place of an argument, what it is after the call)
        value = _pack(value, reference)
        for place, argument in enumerate(arguments):
            if isinstance(argument, MUTABLE):
                after = _pack(argument, reference)
                if after != packed[place]:
                    changed.append([place, after])
        return ["value", value, changed]

    def answer(function, *arguments):
        try:
            channel.send(function(*arguments) or ["value", None, []])
        except BaseException as error:  # also SystemExit: the call failed
            channel.send(["error", [kind.__name__ for kind in type(error).__mro__], str(error)[:200]])

    answer(lambda: exec(compile(program, "<candidate>", "exec"), vars(module)))
    while True:
        answer(operate, *channel.receive())


# Grader --------------------------------------------------------------------------------------------------------------
class CandidateError(Exception):
    """The candidate raised what is no built-in exception, or does not answer."""


class _Object:
    """An object of the candidate's. No comparison or arithmetic reaches it: it is true, and equals only itself."""

    def __init__(self, candidate, key):
        vars(self)["__handle__"] = candidate, key

    def __ask__(self, operation, *arguments, **keywords):
        candidate, key = vars(self)["__handle__"]
        candidate.send_changes()
        packed = [_pack(argument, _find_key) for argument in arguments]
        keywords = {name: _pack(value, _find_key) for name, value in keywords.items()}
        return candidate.result(candidate.exchange(operation, key, packed, keywords), arguments)

    def __getattr__(self, name):
        if name.startswith("__"):  # what copy, unittest ... ask of any object
            raise AttributeError(name)
        value = self.__ask__("get", name)
        if isinstance(value, MUTABLE):
            candidate, key = vars(self)["__handle__"]
            candidate.copies[key, name] = value, _pack(value, _find_key)
        return value

    __call__ = functools.partialmethod(__ask__, "call")
    __setattr__ = functools.partialmethod(__ask__, "set")
    __getitem__ = functools.partialmethod(__ask__, "getitem")
    __setitem__ = functools.partialmethod(__ask__, "setitem")
    __delitem__ = functools.partialmethod(__ask__, "delitem")
    __len__ = functools.partialmethod(__ask__, "len")

    def __iter__(self):
        return iter(self.__ask__("items"))

    def __instancecheck__(self, thing):
        return isinstance(thing, _Object) and self.__ask__("instance", thing) is True

    def __bool__(self):
        return True

    def __repr__(self):
        return "<object>"


class _Candidate:
    """The grader's end of the channel to the candidate, which may answer anything."""

    def __init__(self, channel, pid):
        self.channel = channel
        self.pid = pid
        self.objects = {}  # key -> its Object
        # The tests have a copy of an attribute that is a container: (key, name) -> copy, what it was when it came.
        self.copies = {}
        self.last = None  # what it last answered
        self.dead = ""  # why it answers no more

    def exchange(self, *question):
        """The next message, after a question if there is one."""
        if not self.dead:
            try:
                if question:
                    self.channel.send(question)
                return self.channel.receive()
            except (OSError, EOFError):  # only the kernel can kill it, at its limit of processor time
                killed = os.WTERMSIG(os.waitpid(self.pid, 0)[1]) in (signal.SIGKILL, signal.SIGXCPU)
                self.dead = "out of time" if killed else "the code ended the interpreter"
            except (ValueError, RecursionError, MemoryError):
                self.dead = "an unreadable answer"
        self.last = CandidateError(self.dead)
        raise self.last

    def send_changes(self):
        """Sets the attributes of which the tests have changed their copy, as in `box.items.append(1)`."""
        for (key, name), (value, before) in list(self.copies.items()):
            after = _pack(value, _find_key)
            if after != before:
                self.copies[key, name] = value, after
                self.exchange("set", key, [name, after], {})

    def result(self, reply, arguments=()):
        """The value in a reply, or its exception raised; arguments that the call changed are changed here too."""
        if reply[0] == "value":
            _, value, changed = reply
            for place, new in changed:
                old, new = arguments[place], _unpack(new, self.object)
                if isinstance(old, MUTABLE) and isinstance(old, type(new)):
                    old.clear()
                    (old.update if isinstance(old, (set, dict)) else old.extend)(new)
            self.last = _unpack(value, self.object)
            return self.last
        _, kinds, text = reply
        self.last = CandidateError(f"raised {kinds[0]}: {text}"[:200])
        builtin = [k for k in map(vars(builtins).get, kinds) if isinstance(k, type) and issubclass(k, Exception)]
        if not builtin or issubclass(builtin[0], StopIteration):  # which would end a loop of the tests
            raise self.last
        raise builtin[0](text)

    def object(self, key):
        return self.objects.setdefault(key, _Object(self, key))


def _find_key(value):
    """What the candidate knows an object by."""
    if isinstance(value, _Object):
        return vars(value)["__handle__"][1]
    raise TypeError(f"the tests pass a {type(value).__name__}, which is no plain data")


class _Asserts(ast.NodeTransformer):
    """Makes each assert report its outcome, so that one failure does not end the tests."""

    def __init__(self, tree):
        checks = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
        self.outermost = {node for part in [tree, *checks] for node in part.body}
        self.count = 0  # of all asserts
        self.straight = []  # the numbers of those outside of loops and other functions

    def visit_Assert(self, node):
        if isinstance(node.test, ast.Constant):  # `assert True` tests nothing, and `assert False` ends the tests
            return node
        number, self.count = self.count, self.count + 1
        if node in self.outermost:
            self.straight.append(number)
        source = f"try: __check__({number}, 0)\nexcept Exception as __error__: __check__({number}, None, __error__)"
        report = ast.parse(source).body[0]
        report.body[0].value.args[1] = node.test
        return ast.copy_location(report, node)

    def visit_ClassDef(self, node):  # a failing assert fails its test method, and these are counted instead
        return node


def _run_grader(trainer, layers):
    """Reads a job and runs its tests; see `_run_one` in rewards/sandbox.py for what becomes of its messages."""
    signal.setitimer(signal.ITIMER_REAL, 60)  # the kernel ends this process then, and with it the candidate
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # so that it learns how the candidate ended
    if layers.get("namespaces"):
        _use_private_folder()
    channel, theirs = socket.socketpair()
    # before this process has read anything
    process = _fork(_run_candidate, theirs, layers)
    candidate = _Candidate(Channel(channel), process)
    theirs.close()
    job, seconds, folder = _read_job(trainer.receive())
    signal.setitimer(signal.ITIMER_REAL, WALL * seconds)
    folder = JOB_FOLDER if folder and layers.get("namespaces") else folder
    _confine(layers, folder, seconds)
    random.seed(job.tests)
    seen = {}  # number of a test -> whether it has always passed; its first outcome is sent, and a later failure

    def check(number, value, error=None):
        passed = error is None and bool(value) and not candidate.dead
        if number not in seen or passed < seen[number]:
            seen[number] = passed
            trainer.send(["outcome", [number, passed, describe(error or CandidateError("a wrong result"))]])

    try:
        tree = ast.parse(job.tests)
        asserts = _Asserts(tree)
        tree = ast.fix_missing_locations(asserts.visit(tree))
        trainer.send(["tests", [asserts.count, asserts.straight]])
        # all that the candidate may know of the job
        told = Job(job.texts, tests="", names=[], prepare=job.prepare, options=job.options)
        candidate.channel.send(write_job(told, seconds, folder))
        ready, facts = candidate.exchange()
        trainer.send(["facts", facts])
        if not ready:
            raise CandidateError(facts.get("error") or "no program")
        candidate.result(candidate.exchange())
        scope = {"__name__": "tests", "__check__": check}
        exec(job.setup, scope)
        scope.update({name: candidate.object(name) for name in job.names})
        trainer.send(["examples", [_try_example(source, candidate, dict(scope)) for source in job.examples]])
        exec(compile(tree, "<tests>", "exec"), scope)
        cases = [c for c in scope.values() if isinstance(c, type) and issubclass(c, unittest.TestCase)]
        methods = [method for case in cases for method in unittest.defaultTestLoader.loadTestsFromTestCase(case)]
        total = asserts.count + len(methods)
        trainer.send(["tests", [total, [*asserts.straight, *range(asserts.count, total)]]])
        for number, method in enumerate(methods, start=asserts.count):
            outcome = unittest.TestResult()
            unittest.TestSuite([method]).run(outcome)
            error = CandidateError(outcome.errors[0][1].splitlines()[-1]) if outcome.errors else None
            check(number, outcome.wasSuccessful() and not outcome.skipped, error)
        trainer.send(["end", ""])
    except (Exception, SystemExit) as error:
        trainer.send(["end", describe(error)])


def _try_example(source, candidate, scope):
    """What an assert that may be shown finds: "" if it holds."""
    candidate.last = None
    *before, final = ast.parse(source).body
    try:
        exec(compile(ast.Module(before, []), "<example>", "exec"), scope)
        holds = eval(compile(ast.Expression(final.test), "<example>", "eval"), scope)
        return "" if holds else describe(CandidateError(f"returned {candidate.last!r}"))
    except Exception as error:
        return describe(candidate.last if isinstance(candidate.last, CandidateError) else error)


def describe(error):
    """Short ASCII: agents see it in prompts, and no tokenizer takes lone surrogates."""
    name = "" if isinstance(error, CandidateError) else f"{type(error).__name__}: "
    return f"{name}{error}".encode("ascii", "backslashreplace").decode()[:200]


if __name__ == "__main__":
    sys.path[0] = os.path.dirname(sys.path[0])  # of this folder, only for this import
    from rewards import programs

    sys.path.pop(0)
    _serve_template(unsafe="--unsafe" in sys.argv)
