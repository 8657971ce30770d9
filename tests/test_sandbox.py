"""The sandbox under attack. Beside the attacks run two controls: a correct solution and a plainly wrong one."""

import contextlib
import os
import pathlib
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest

from rewards import jail, sandbox
from rewards.sandbox import Job, run_tests

if sys.platform != "linux":
    pytest.skip("the layers are Linux's", allow_module_level=True)

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TESTS = """
import math
def check(candidate):
    assert candidate(1) == 2
    assert abs(candidate(10) - 11) < 0.5
    assert math.isclose(candidate(2.5), 3.5)
    for x, y in zip([-5, 7, 70], map(candidate, [-5, 7, 70])): assert y == x + 1
check(f)
"""
GOOD = "def f(x):\n    return x + 1"
BAD = "def f(x):\n    return 3"
HIDDEN = "needle" + "_that_only_the_tests_hold"


def job(code, tests=TESTS, names=("f",), **more):
    return Job([textwrap.dedent(code)], tests, list(names), **more)


def beside_controls(attacks, good, bad, timeout):
    """name -> Result. Beside each attack run the controls, which must be what they should be."""
    results = run_tests([j for attack in attacks.values() for j in (good, attack, bad)], timeout)
    assert all(not r.reason and r.passed == r.total for r in results[::3])
    assert all(r.reason and r.passed == 0 for r in results[2::3])
    return dict(zip(attacks, results[1::3]))


def sections(text, **codes):
    """name -> what follows a line "## name", with the code of this name for a line that is one."""
    for name, code in codes.items():
        text = text.replace(f"{name}\n", code)
    parts = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


ANY = """
class Any(BASE):
    def __eq__(self, other): return True
    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
    __hash__ = object.__hash__
    __sub__ = __rsub__ = __abs__ = lambda self, *a: 0.0
def f(x): return Any()
"""
BASES = ["object", "int", "list", "dict", "complex"]
# Each must not pass a single assert.
HACKS = {
    **{f"{base} equal to everything": ANY.replace("BASE", base) for base in BASES},
    "a type that lies": ANY.replace("BASE", "int").replace("def f", "    __class__ = int\ndef f"),
    "parentheses": "def f(x): return " + "(" * 100_000 + "x + 1" + ")" * 100_000,
    "unary operators": "def f(x): return " + "-" * 300_000 + "x + 1",
} | sections(r"""
## loop at import
while True: pass
## C stack
import sys
sys.setrecursionlimit(10**9)
class A: __repr__ = lambda s: repr([s])
repr(A())
## limit raised
import resource as r
try: r.setrlimit(0, (10**9, 10**9))
except ValueError: sum(range(10**15))
## lying class
class M(type): __name__ = 'StopIteration'
class E(Exception, metaclass=M): 0
def f(x): raise E
## threads
from threading import Event, Thread
while True: Thread(target=Event().wait).start()
## endless sleep
import time
time.sleep(1e6)
## memory, filled and kept
kept = []
def f(x):
    while True: kept.append(bytes([1]) * (1 << 24))
## 300 MB printed
print('PASSED 6 of 6')
def f(x):
    for _ in range(300): print('OK' * 500_000)
## sys.exit in the call
import sys
def f(x): sys.exit(0)
## os._exit in the call
import os
def f(x): os._exit(0)
## null pointer
import ctypes
def f(x): ctypes.string_at(0)
## StopIteration
def f(x): raise StopIteration
## KeyboardInterrupt
def f(x): raise KeyboardInterrupt
## early verdict
import os
os.write(3, b'["end", ""]\n["outcome", 0, true, ""]\n' * 3)
f = None
## nested reply
import os
def f(x):
    os.write(3, b'[' * 1_000_000 + b'\n')
    os._exit(0)
## reply that never ends
import os
def f(x):
    while True: os.write(3, b' ')
## the channel closed
import os
def f(x):
    os.close(3)
    return x + 1
## x32 interface
import ctypes
assert ctypes.CDLL(None).syscall(ctypes.c_long(0x40000000 | 39)) > 0
def f(x): return x + 1
## signals ignored, timers cleared
import signal
for s in {*range(1, 32)} - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(s, signal.SIG_IGN)
signal.alarm(0); signal.setitimer(signal.ITIMER_REAL, 0)
while True: pass
## patched modules
import builtins, sys
builtins.abs = builtins.bool = builtins.eval = builtins.compile = builtins.len = lambda *a, **k: True
main = sys.modules['__main__']
main.check = main._run_grader = main._pack = main.OPERATIONS['call'] = lambda *a, **k: True
def f(x): return 9
## replies of another shape
import os
def f(x):
    for text in (b'["value", ["type", "eval"], []]', b'["value", ["Decimal", "sNaN"], []]',
                 b'["error", ["SystemExit"], "x"]', b'["value", 3, [[7, 1]]]'):  # one for each assert
        os.write(3, text + b'\n')
""")  # fmt: skip


def test_no_hack_passes_an_assert():
    """Whatever a candidate does, is or sends, no assert may hold; code that crashes its parser harms nobody else."""
    results = beside_controls({name: job(code) for name, code in HACKS.items()}, job(GOOD), job(BAD), timeout=1)
    assert {name: r for name, r in results.items() if r.passed or not r.reason or r.total != 4} == {}


# name: passed of total, the beginning of the reason if there is one; lines of the candidate's, marked >; the tests
JUDGED = sections(r"""
## plain data crosses unchanged: 2 of 2
> def f(x): return x
import collections, datetime, math
from decimal import Decimal
from fractions import Fraction
values = [None, True, 0, -1, 2**53, -(2**200), 1.5, float('inf'), 'a\ud800\0', b'\xff', bytearray(b'x'), 3 + 4j, int,
    dict, slice(1, None, 2), [], [1, [2, (3, {4})]], (), ((),), set(), frozenset({1}), {}, ['list', 1], ['object', 0],
    {1: {'a': [None]}, (1, 2): 'x', 'dict': ['list']}, range(1, 10, 3), collections.deque([1, 2]),
    datetime.datetime(2020, 1, 2, 3, 4, 5), datetime.date(2020, 1, 2), datetime.time(3, 4, 5, 6),
    datetime.timedelta(-3, 4, 5), Fraction(-1, 3**200), Decimal('-1.10'), Decimal('Infinity')]
for value in values: assert f(value) == value and type(f(value)) is type(value), value
assert math.isnan(f(float('nan'))) and str(f(-0.0)) == '-0.0' and f(collections.Counter('aab')) == {'a': 2, 'b': 1}
## objects are true and equal nothing: 2 of 5, a wrong result
> class T: __bool__ = __eq__ = lambda *a: False; __sub__ = lambda self, other: 0
> def f(): return T()
assert f(); assert not f(); assert abs(f() - 5) < 1; assert f() > 3; assert f() != 3
## objects cross by identity, and what the tests change in their containers is changed: 4 of 4
> class N:
>     def __init__(self): self.log = []
>     def same(self): return self
>     def __delitem__(self, place): del self.log[place]
> class f(N): N = N
a, b = f.N(), f()
assert a.same() is a and a != b and len({a, a.same(), b}) == 2
assert isinstance(b, f.N) and not isinstance(a, f) and not isinstance(7, f)
a.log.append([]); a.log[0].append(1); assert a.log == [[1]] and b.log == []
del a[0]; assert a.log == []
## arguments that the call changes are changed: 1 of 1
> def f(a, b, c, d): a.append(4); b.add(4); c['x'] = 4; d[0][0] = 4; a = [9]
same, _ = (a := [1]), f(a, b := {1}, c := {}, d := [[0]])
assert (same, b, c, d) == ([1, 4], {1, 4}, {'x': 4}, [[4]])
## an assert is one test and must hold each time: 2 of 4, a wrong result
> def f(x):
>     if x == 3: raise ValueError('three')
>     return x if x < 5 else -x
for i in 1, 2: assert f(i) == i
for i in 1, 5: assert f(i) == i
assert f(3); assert f(4) == 4
## after an error only the top level, and that of check, keeps what it earned: 2 of 4, ValueError: three
> def f(x):
>     if x == 3: raise ValueError('three')
>     return x if x < 5 else -x
assert f(1) == 1
def check(f):
    assert f(1) == 1
    for i in 1, 2: assert f(i)
    f(3); assert f(1)
check(f)
## an expected error, and constants that count nothing: 1 of 1
> def f(x):
>     if x == 3: raise ValueError('three')
>     return x if x < 5 else -x
try:
    f(3)
    assert False
except ValueError: assert True
assert f(1) == 1
## rounds of the candidate's choice, and an assert that does not run: 0 of 2, a wrong result
> def f(x): return range(10 ** 6)
for x in f(0): assert x < 9
if f(0) == 1: assert f(0)
## a busy grader: 1 of 2, out of time
> def f(x): return range(10 ** 15) if x > 2 else range(x)
assert sum(f(1)) == 0
for y in 1, 3: assert sum(f(y)) >= 0
## random numbers are not those of the tests: 1 of 1
> def f(): return __import__('random').random()
import random
assert f() != random.random()
## only objects are instances of a class that says that all is: 1 of 1
> class M(type): __instancecheck__ = lambda *a: True
> class f(metaclass=M): pass
assert not isinstance(7, f) and isinstance(f(), f)
## methods of a TestCase are tests, which use objects and a shared folder: 2 of 4, a wrong result
> import unittest
> class f:
>     def __init__(self): self.log = []
>     def copy(self): open('out', 'w').write(open('in').read() + '!')
>     def skip(self): raise unittest.SkipTest('no')
>     def __iter__(self): return iter(self.log)
import unittest
class T(unittest.TestCase):
    def setUp(self): self.box = f(); self.box.log = [6]
    def test_in(self): self.assertIn(6, self.box); self.assertNotIn(5, self.box)
    def test_assert(self): assert 5 in self.box
    def test_skip(self): self.box.skip()
    def test_files(self):
        with open('in', 'w') as file: file.write('31')
        self.box.copy()
        with open('out') as file: self.assertEqual(file.read(), '31!')
## a dead candidate passes nothing: 0 of 2, the code ended the interpreter
> import os
> def f(): os._exit(0)
assert f() is None; assert 1 == 1
## only the channel is open: 1 of 1
> def f(fd): return __import__('ctypes').CDLL(None).fcntl(fd, 1) >= 0
assert [fd for fd in range(999) if f(fd)] == [0, 1, 2, 3]
## what the candidate was told, such as a stub, is out of its reach: 1 of 1
> import sys
> frame, told = sys._getframe(), ''
> while frame: told, frame = told + repr(frame.f_locals), frame.f_back
> def f(name): return name in told
assert not f('prepare_text') and f('seconds')
## the tests are not in the candidate's memory: 2 of 2
> import os, zlib, ctypes
> mine, libc = '_'.join(['needle', 'that', 'the', 'candidate', 'holds']), ctypes.CDLL(None)
> def f(length, checksum):
>     file, found = os.open('page', os.O_RDWR | os.O_CREAT), False
>     for start in {id(object()) >> 28, id(os) >> 28, id(mine) >> 28}:
>         for page in range((start << 28) - (1 << 26), (start << 28) + (1 << 28) + (1 << 26), 4096):
>             if libc.pwrite(file, ctypes.c_void_p(page), 4096, 0) == 4096:  # else nothing is there
>                 at = (block := os.pread(file, 4096, 0)).find(b'needle')
>                 while at >= 0:
>                     found |= zlib.crc32(block[at:at + length]) == checksum
>                     at = block.find(b'needle', at + 1)
>     return found
import zlib
own, hidden = b'needle_that_the_candidate_holds', b'HIDDEN'
assert f(len(own), zlib.crc32(own))
assert not f(len(hidden), zlib.crc32(hidden)), 'HIDDEN'
""")


def test_how_tests_are_judged():
    """Values, counting, time, and what is in reach of the candidate: each name says what would be wrong."""
    jobs = {}
    for name, text in JUDGED.items():
        text = text.replace("HIDDEN", HIDDEN)
        code = "\n".join(re.findall(r"^> (.*)$", text, re.MULTILINE))
        jobs[name] = job(code, re.sub(r"^> .*\n", "", text, flags=re.MULTILINE), folder=True)
    results = beside_controls(jobs, job(GOOD, TESTS + f"hidden = {HIDDEN!r}"), job(BAD), timeout=3)
    for name, result in results.items():
        judged = f"{result.passed} of {result.total}" + (result.reason and f", {result.reason}")
        expected = name.partition(": ")[2]
        assert judged.startswith(expected), (name, result)
        assert bool(result.reason) == ("," in expected), (name, result)


def test_examples_are_short_and_do_not_count():
    """What agents are shown must be ASCII too: a lone surrogate, which no tokenizer takes, would end the run."""
    examples = ["assert f(0) == ''", "assert f(300) == 5"]
    (result,) = run_tests([job("def f(x): return '\\ud800' * x", "assert f(0) == ''", examples=examples)])
    assert result.total == 1
    assert result.examples == ["", ("returned '" + r"\ud800" * 300)[:200]]


def test_same_code_same_outcome():
    """Sets, hashes and random numbers must repeat, or an answer's reward would not."""
    code = "import random\ndef f(): return [random.random(), list({'a', 'b', 'c', 'd'}), hash('x')]"
    first, second = run_tests([job(code, "raise ValueError(repr(f()))")] * 2)
    sandbox.close()
    assert first == second == run_tests([job(code, "raise ValueError(repr(f()))")])[0] and "[0." in first.reason


def test_no_note_for_a_later_job():
    """One job could tell the next what it has learnt of the tests."""
    code = """
        import builtins, fcntl, os
        def f():
            places = [os.path.join(place, 'note') for place in ('.', '/', '/tmp', os.__file__[:-5])]
            found = [*map(os.path.exists, places), fcntl.fcntl(1, 3) & 2048, hasattr(builtins, 'note')]
            for place in places:
                try: open(place, 'w').close()
                except OSError: pass
            return any(found), fcntl.fcntl(1, 4, 2048), setattr(builtins, 'note', 1)
    """
    results = run_tests([job(code, "assert not f()[0]\nassert f()[0]", folder=True)] * 9)
    assert [r.reason for r in results] == [""] * 9


def family(pid):
    """It and all processes under it."""
    children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *[member for child in children for member in family(int(child))]]


def template():
    sandbox.require_protection()
    return sandbox._running[0].process.pid


def test_nothing_is_left_behind(monkeypatch, tmp_path):
    """Processes (dead ones too), descriptors and files would add up over the 10,000 jobs of a run."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_tests([job(GOOD)] * 8)
    alone = [template()], len(os.listdir("/proc/self/fd"))
    write = job("def f(): open('x', 'w').write('x')", "assert f() is None", folder=True)
    ends = [job(HACKS[name]) for name in ("os._exit in the call", "null pointer", "the channel closed")]
    run_tests([job(GOOD), job(BAD), write, *ends] * 40)
    wait_for(lambda: (family(template()), len(os.listdir("/proc/self/fd"))) == alone)
    assert os.listdir(tmp_path) == []


def wait_for(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_templates_end_with_the_trainer():
    """Also where it is killed, and with all jobs that run."""
    body = """if True:
        import threading
        from test_sandbox import *
        threading.Thread(target=run_tests, args=([job("while True: pass")] * 2, 60), daemon=True).start()
        wait_for(lambda: len(family(template())) == 5) or time.sleep(1)  # until the code runs
        print(*family(template()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    done = subprocess.run([sys.executable, "-c", body], env=environment, stdout=subprocess.PIPE, text=True, timeout=60)
    pids = list(map(int, done.stdout.split()))
    assert done.returncode == -signal.SIGKILL and len(pids) == 5
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


# Each is code that tries something outside, an expression or lines that define f, and must be refused.
ATTEMPT = """
import fcntl, mmap, os, resource, socket, struct, sys, ctypes
libc = ctypes.CDLL(None, use_errno=True)
def attempt(function, *args):
    try:
        value = function(*args)
    except (ImportError, OSError, ValueError):  # ValueError: how setrlimit says it
        return 'refused'
    return 'refused' if value == -1 else 'done'
def each(function, *calls):
    return '+'.join({{attempt(function, *args) for args in calls}})
"""
PRLIMIT, CLONE = {"x86_64": (302, 56), "aarch64": (261, 220)}[platform.machine()]
ESCAPES = sections(r"""
## environment
'done' if 'SECRET_TOKEN' in os.environ else 'refused'
## environments of others
def f():
    pids = [os.getppid(), {pid}, *range(1, 40000, 97)]
    return each(os.open, *[(f'/proc/{{p}}/{{name}}', 0) for p in pids for name in ('environ', 'mem', 'maps')])
## read
each(os.open, ({secret!r}, 0), ({root!r} + '/rewards/sandbox.py', 0), ('/etc/passwd', 0))
## list
each(os.listdir, ({home!r},), ({root!r},), ({root!r} + '/rewards',), ('/etc',))
## write
attempt(os.open, {home!r} + '/new', os.O_WRONLY | os.O_CREAT)
## truncate
attempt(os.truncate, {secret!r}, 0)
## delete
each(os.unlink, ({secret!r},), (os.__file__,))
## rename
attempt(os.rename, {secret!r}, {secret!r} + '2')
## link
each(os.link, ({secret!r}, 'here'))
## write into Python
each(os.open, (os.__file__ + 'x', os.O_WRONLY | os.O_CREAT), (os.__file__, os.O_WRONLY))
## emptied, opened to read
each(os.open, ({secret!r}, os.O_TRUNC), (os.__file__, os.O_TRUNC))
## opened for nothing
each(os.open, ('/etc/passwd', 3), ({secret!r}, 3 | os.O_TRUNC))
## sockets
each(socket.socket, (), (socket.AF_INET, 2), (socket.AF_UNIX,), (socket.AF_NETLINK,))
## kill
each(os.kill, (os.getppid(), 9), ({pid}, 9), (-1, 9), (0, 9))
## limits of the trainer
attempt(libc.syscall, {PRLIMIT}, {pid}, 0, b'\x01' + bytes(15), None)
## exec
attempt(os.execv, sys.executable, ['python', '-c', ''])
## clone
each(libc.syscall, ({CLONE}, 17, 0, 0, 0, 0), ({CLONE}, 0x10900, 0, 0, 0, 0), (435, bytes(88), 88))
## signals by a descriptor
each(fcntl.fcntl, (1, 8, os.getpid()), (1, 10, 9), (1, 15, bytes(8)), (1, 1026, 1))
## shared memory
attempt(mmap.mmap, -1, 4096)
## higher limits
each(resource.setrlimit, *[(r, (1 << 40, 1 << 40)) for r in (resource.RLIMIT_AS, 0)])
## descriptors
attempt(lambda: [os.dup(1) for _ in range(99)])
## large file
attempt(lambda: open('large', 'wb').write(bytes(20 << 20)))
## ordinary code works
import sqlite3, threading, wave, zoneinfo
def f():
    done = [open(os.devnull, 'w').write('x'), open('a', 'w').write('x'), open('a').read(), *os.listdir()]
    threads = [threading.Thread(target=done.append, args=(n,)) for n in range(9)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    sqlite3.connect('db').execute('create table t (x)')
    return 'refused' if sorted(map(str, done)) == [*'01', '1', '1', *'2345678', 'a', 'x'] else done
""")  # fmt: skip


ABSENT = {"Landlock": "444, 445, 446", "namespaces": "libc.unshare", "seccomp": "libseccomp.so.2"}


@contextlib.contextmanager
def without(layers, monkeypatch, folder):
    """In this context templates find a layer missing, as in a container or with an old kernel."""
    copy = pathlib.Path(shutil.copytree(f"{ROOT}/rewards", f"{folder}/rewards"), "jail.py")
    source = copy.read_text()
    for layer in layers:
        assert ABSENT[layer] in source
        source = source.replace(ABSENT[layer], "9, 9, 9" if layer == "Landlock" else "libc.absent")
    copy.write_text(source)
    with monkeypatch.context() as patch:
        patch.setattr(jail, "__file__", str(copy))
        sandbox.close()
        yield
        sandbox.close()


@pytest.mark.parametrize("absent", [[], ["Landlock"]])
def test_escapes(absent, monkeypatch, tmp_path_factory):
    """Nothing outside may be read, changed, reached or ended, by Landlock or by namespaces; ordinary code works.

    The trainer holds HF_TOKEN, and whoever is dumpable can be read by all processes of the user.
    """
    os.environ["SECRET_TOKEN"] = "hf_secret"
    secret = pathlib.Path(home := tmp_path_factory.mktemp("home"), "secret")
    secret.write_text("treasure")
    facts = {"secret": str(secret), "home": str(home), "pid": os.getpid(), "root": ROOT, "PRLIMIT": PRLIMIT}
    facts["CLONE"] = CLONE
    with without(absent, monkeypatch, tmp_path_factory.mktemp("copy")):
        jobs = {}
        for name, code in ESCAPES.items():
            code = ATTEMPT + (code if "def f()" in code else f"def f(): return {code}")
            jobs[name] = job(code.format(**facts), "assert f() == 'refused'", folder=True)
        results = beside_controls(jobs, job(GOOD, folder=True), job(BAD, folder=True), timeout=10)
    assert {name: r for name, r in results.items() if r.reason} == {}
    assert os.listdir(home) == ["secret"] and secret.read_text() == "treasure"


@pytest.mark.parametrize("layers", ["Landlock namespaces", "seccomp"])
def test_unprotected_only_when_allowed(layers, monkeypatch, tmp_path):
    """Fails if code runs where nothing contains it, or does not run where that is allowed."""
    jobs = [job(GOOD), job(BAD), job(HACKS["object equal to everything"]), job("while True: pass")]
    with without(layers.split(), monkeypatch, tmp_path):
        with pytest.raises(ValueError, match="allow_unsafe_code"):
            run_tests(jobs)
        assert [result.passed for result in run_tests(jobs, 1, True)] == [4, 0, 0, 0]
