"""The sandbox under attack. Beside the attacks run two controls: a correct solution and a plainly wrong one."""

import contextlib
import ctypes
import os
import pathlib
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
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
    assert all(r.reason == "" and r.passed == r.total for r in results[::3])
    assert all(r.reason and r.passed == 0 for r in results[2::3])
    return dict(zip(attacks, results[1::3]))


def sections(text):
    """name -> what follows a line "## name"."""
    parts = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


ANY = """
class Any{base}:
    def __eq__(self, other): return True
    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
    __hash__ = object.__hash__
    __sub__ = __rsub__ = __abs__ = lambda self, *a: 0.0
"""
PLAIN = ["int", "str", "float", "list", "tuple", "dict", "set", "frozenset", "bytes", "complex"]
# Each must not pass a single assert.
HACKS = {
    "loop at import": "while True: pass",
    "loop that swallows all": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "C stack": "import sys\nsys.setrecursionlimit(10**9)\nclass A: __repr__ = lambda s: repr([s])\nrepr(A())",
    "limit raised": "import resource as r\ntry: r.setrlimit(0, (10**9, 10**9))\nexcept ValueError: sum(range(10**15))",
    "lying class": "class M(type): __name__ = 'StopIteration'\nclass E(Exception, metaclass=M): 0\ndef f(x): raise E",
    "threads": "from threading import Event, Thread\nwhile True: Thread(target=Event().wait).start()",
    "uninterruptible C loop": "def f(x): return sum(range(10 ** 15))",
    "endless sleep": "import time\ntime.sleep(1e6)",
    "80 forked sleepers": "import os, time\nfor _ in range(80):\n    if os.fork() == 0: time.sleep(1e6)\n" + GOOD,
    "a daemon": "import os\nif os.fork() == 0 and not os.setsid() and os.fork() == 0:\n    while True: pass\n" + GOOD,
    "3 GiB": "def f(x): return len(bytearray(3 << 30))",
    "memory, filled and kept": "kept = []\ndef f(x):\n    while True: kept.append(bytes([1]) * (1 << 24))",
    "5,000 descriptors": "import os\nkept = [os.open('/dev/null', 0) for _ in range(5000)]\n" + GOOD,
    "200 MB file": "open('large', 'wb').write(bytes(200 << 20))\n" + GOOD,
    "200 MB string": "def f(x): return 'x' * 200_000_000",
    "300 MB printed": "print('PASSED 6 of 6')\ndef f(x):\n    for _ in range(300): print('OK' * 500_000)",
    "nested deeply": "def f(x):\n    r = []\n    for _ in range(200_000): r = [r]\n    return r",
    "shared lists with 2 ** 40 leaves": "def f(x):\n    r = 3\n    for _ in range(40): r = [r, r]\n    return r",
    "iterator that never yields": "def f(x):\n    while True: pass\n    yield x + 1",
    "iterator that fills the memory": "def f(x):\n    while True: yield bytes([x % 7]) * (1 << 24)",
    "sys.exit at import": "import sys\nsys.exit(0)",
    "sys.exit in the call": "import sys\ndef f(x): sys.exit(0)",
    "os._exit at import": "import os\nos._exit(0)",
    "os._exit in the call": "import os\ndef f(x): os._exit(0)",
    "null pointer": "import ctypes\ndef f(x): ctypes.string_at(0)",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return None",
    **{kind: f"def f(x): raise {kind}" for kind in ["KeyboardInterrupt", "GeneratorExit", "StopIteration"]},
    "SkipTest": "import unittest\ndef f(x): raise unittest.SkipTest('no')",
    "text that never ends": "class E(Exception):\n    def __str__(self):\n        while True: pass\ndef f(x): raise E",
    "exception without text": "class E(ValueError):\n    def __str__(self): raise SystemExit\ndef f(x): raise E",
    "equal to everything": ANY.format(base="") + "def f(x): return Any()",
    **{f"{kind} equal to everything": ANY.format(base=f"({kind})") + "def f(x): return Any()" for kind in PLAIN},
    "a type that lies": ANY.format(base="(int)") + "    __class__ = int\ndef f(x): return Any()",
    "mock.ANY": "from unittest.mock import ANY\ndef f(x): return ANY",
    "early verdict": "import os\nos.write(3, b'[\"end\", \"\"]\\n[\"outcome\", 0, true, \"\"]\\n' * 3)\nf = None",
    "nested reply": "import os\ndef f(x):\n    os.write(3, b'[' * 1_000_000 + b'\\n')\n    os._exit(0)",
    "a number of 14 million digits": "import os\ndef f(x): os.write(3, b'[' + b'9' * 14_000_000 + b']\\n')",
    "reply that never ends": "import os\ndef f(x):\n    while True: os.write(3, b' ')",
    "the channel closed": "import os\ndef f(x):\n    os.close(3)\n    return x + 1",
    "the channel does not block": "import os\nos.set_blocking(3, False)\ndef f(x): return 3",
    "import hooks": "import builtins, sys\nbuiltins.__import__ = sys.exit\ndef f(x):\n    import wave",
    "x32 interface": "import ctypes\nassert ctypes.CDLL(None).syscall(ctypes.c_long(0x40000000 | 39)) > 0\n" + GOOD,
} | sections(r"""
## signals ignored, timers cleared
import signal
for s in {*range(1, 32)} - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(s, signal.SIG_IGN)
signal.alarm(0); signal.setitimer(signal.ITIMER_REAL, 0)
while True: pass
## patched modules
import builtins, json, sys, unittest
builtins.abs = builtins.bool = builtins.eval = builtins.compile = builtins.len = lambda *a, **k: True
unittest.TestCase.assertEqual = lambda *a: None
json.dumps = lambda *a, **k: '["value", true, []]'
main = sys.modules['__main__']
main.check = main._grader = main.pack = main.OPERATIONS['call'] = lambda *a, **k: True
main.Channel.send = lambda self, value: self.sock.sendall(b'["value",9,[]]\n')
def f(x): return 9
## everything written everywhere
import os
def f(x):
    for fd in range(300):
        try: os.write(fd, b'["end", ""]\n["value", 2, []]\n' * 20)
        except OSError: pass
## replies of another shape
import os
def f(x):
    for text in (b'{}', b'["value"]', b'[[], [], []]', b'["value", ["list", ["object", "x"]], 5]', b'\xff', b'5', b'',
                 b'["value", ["object", 0, ["list"]], []]', b'["value", ["object", ["list"]], []]', b'[true, {}]',
                 b'["value", ["keys", ["list"]], []]', b'["value", ["Fraction", 1, 0], []]', b'["error", 5, "x"]',
                 b'["value", ["type", "eval"], []]', b'["value", 3, [[7, 1], ["x", 2], [0, ["list"]]]]',
                 b'["value", ["Decimal", "sNaN"], []]', b'["error", ["type"], "x"]', b'["error", [[], 3], "x"]',
                 b'["error", ["SystemExit"], "x"]', b'["error", [], "x"]', b'["error", ["KeyError"], [[{}]]]'):
        os.write(3, text + b'\n')
## threads that answer for ever
import os, threading
def spam():
    while True: os.write(3, b'["value", 9, []]\n')
for _ in range(8): threading.Thread(target=spam, daemon=True).start()
def f(x): return 9
""")  # fmt: skip
UNREADABLE = {
    "NUL": "def f(x):\n    return x + 1\0",
    "lone surrogate": "def f(x):\n    return x + 1 # \ud800",
    "parentheses": "def f(x): return " + "(" * 100_000 + "x + 1" + ")" * 100_000,
    "unary operators": "def f(x): return " + "-" * 300_000 + "x + 1",
    "attributes": "def f(x): return x" + ".a" * 200_000,
    "20 MB": GOOD + "\n" + "#" * 20_000_000,
    "empty": "",
}


def test_no_hack_passes_an_assert():
    """Whatever a candidate does, is or sends, no assert may hold."""
    results = beside_controls({name: job(code) for name, code in HACKS.items()}, job(GOOD), job(BAD), timeout=1)
    assert {name: r for name, r in results.items() if r.passed or not r.reason or r.total != 4} == {}
    late = ["loop at import", "loop that swallows all", "limit raised", "uninterruptible C loop", "endless sleep"]
    assert {results[name].reason for name in late} == {"out of time"}


@pytest.mark.parametrize("prepare, options", [("prepare_text", {}), ("prepare", {"helpers": [], "entry_point": "f"})])
def test_no_text_crashes_the_trainer(prepare, options):
    """Deep nesting crashes the process that parses it: that must be the candidate. A coding cookie means nothing."""
    good, bad, *attacks = (job(code, prepare=prepare, options=options) for code in (GOOD, BAD, *UNREADABLE.values()))
    results = beside_controls(dict(zip(UNREADABLE, attacks)), good, bad, timeout=1)
    assert {name: r for name, r in results.items() if r.passed or not r.reason} == {}
    cookies = [good._replace(texts=[f"# -*- coding: {name} -*-\n{GOOD}"]) for name in ("rot13", "latin-1")]
    assert [r.reason for r in run_tests(cookies)] == ["", ""]


CLASS_TESTS = """
import unittest
class Test(unittest.TestCase):
    def setUp(self): self.account = Account("Ann", 5)
    def test_result(self): self.assertEqual(self.account.deposit(7), 12)
    def test_attribute(self): self.account.deposit(8); self.assertEqual(self.account.balance, 13)
    def test_set(self): self.account.balance = 20; self.assertEqual(self.account.deposit(1), 21)
    def test_container(self): self.account.deposit(3); self.assertEqual(self.account.log, [3])
    def test_in(self): self.account.deposit(6); self.assertIn(6, self.account); self.assertNotIn(5, self.account)
    def test_len(self): self.account.deposit(6); self.assertEqual(len(self.account), 1)
    def test_raises(self): self.assertRaises(ValueError, self.account.deposit, -1)
    def test_files(self):
        with open("in.txt", "w") as file: file.write("31")
        self.account.copy("in.txt", "out.txt")
        with open("out.txt") as file: self.assertEqual(file.read(), "31!")
"""
CLASSES = sections("""
## good
class Account:
    def __init__(self, name, balance): self.name, self.balance, self.log = name, balance, []
    def deposit(self, amount):
        if amount < 0: raise ValueError(amount)
        self.balance += amount
        self.log.append(amount)
        return self.balance
    def copy(self, old, new): open(new, "w").write(open(old).read() + "!")
    def __len__(self): return len(self.log)
    def __iter__(self): return iter(self.log)
## bad
class Account: __init__ = deposit = copy = __len__ = lambda *a: None
## instance equal to everything
class Account:
    def __new__(cls, *a): return object.__new__(cls)
    def __init__(self, *a): pass
    __getattr__ = __call__ = __len__ = __getitem__ = lambda self, *a: self
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = lambda self, *a: True
    __sub__ = __rsub__ = __abs__ = __round__ = __hash__ = lambda self, *a: 0
    __setitem__ = lambda self, *a: None
    __iter__ = lambda self: iter([self])
## a class that is an instance of everything
class Meta(type):
    __instancecheck__ = __eq__ = lambda cls, x: True
    __hash__ = lambda cls: 0
    __call__ = __getattr__ = lambda cls, *a: cls
class Account(metaclass=Meta): pass
## unittest patched
import unittest
for name in dir(unittest.TestCase):
    if name.startswith('assert') or name == 'run': setattr(unittest.TestCase, name, lambda *a, **k: None)
unittest.TestResult.wasSuccessful = lambda self: True
class Account:
    def __init__(self, *a): raise unittest.SkipTest('no')
""")


def test_no_class_hack_passes_a_test():
    """Whatever the objects of a class claim, the comparisons are the grader's."""
    hacks = {name: job(code, CLASS_TESTS, ["Account"], folder=True) for name, code in CLASSES.items()}
    good, bad = hacks.pop("good"), hacks.pop("bad")
    results = beside_controls(hacks, good, bad, timeout=1)
    assert {name: r for name, r in results.items() if r.passed or not r.reason or r.total != 8} == {}


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
## objects cross by identity, containers as copies: 3 of 3
> class N:
>     def __init__(self): self.log = []
>     def same(self): return self
> class f(N): N = N
a, b = f.N(), f()
assert a.same() is a and a != b and len({a, a.same(), b}) == 2
assert isinstance(b, f.N) and not isinstance(a, f) and not isinstance(7, f)
a.log.append(1); assert a.log == []
## arguments that the call changes are changed: 1 of 1
> def f(a, b, c, d): a.append(4); b.add(4); c['x'] = 4; d[0][0] = 4; a = [9]
same, _ = (a := [1]), f(a, b := {1}, c := {}, d := [[0]])
assert (same, b, c, d) == ([1, 4], {1, 4}, {'x': 4}, [[4]])
## an assert is one test and must hold each time: 2 of 4, a wrong result
> PARTLY
for i in 1, 2: assert f(i) == i
for i in 1, 5: assert f(i) == i
assert f(3); assert f(4) == 4
## after an error only the top level keeps what it earned: 1 of 3, ValueError: three
> PARTLY
assert f(1) == 1
for i in 1, 2: assert f(i)
f(3); assert f(1)
## and that of check: 1 of 2, ValueError: three
> PARTLY
def check(f):
    assert f(1) == 1
    f(3); assert f(2)
check(f)
## an expected error, and constants that count nothing: 1 of 1
> PARTLY
try:
    f(3)
    assert False
except ValueError: assert True
assert f(1) == 1
## an expected error that does not come: 0 of 1, AssertionError
> def f(x): return 1
def test(): assert f(1) == 1
test(); f(3); assert False
## rounds of the candidate's choice, and an assert that does not run: 0 of 2, a wrong result
> def f(x): return range(10 ** 6)
for x in f(0): assert x < 9
if f(0) == 1: assert f(0)
## a busy grader: 1 of 2, out of time
> def f(x): return range(10 ** 15) if x > 2 else range(x)
assert sum(f(1)) == 0
for y in 1, 3: assert sum(f(y)) >= 0
## errors have their built-in base: 1 of 1
> class Own(KeyError): pass
> def f(x): raise Own(x)
try: f(1)
except LookupError: seen = 1
assert seen
## random numbers are not those of the tests: 1 of 1
> def f(): return __import__('random').random()
import random
assert f() != random.random()
## an assert in a TestCase fails the method: 1 of 2, a wrong result
> def f(x): return 1
import unittest
class T(unittest.TestCase):
    def test_a(self): assert f(1) == 1
    def test_b(self): assert f(1) == 1 and f(2) == 2
## a dead candidate passes nothing: 0 of 2, the code ended the interpreter
> import os
> def f(): os._exit(0)
assert f() is None; assert 1 == 1
## sleep is no processor time: 1 of 1
> import time
> def f(x): time.sleep(2.5); return x
assert f(1) == 1
## only the channel is open: 1 of 1
> def f(fd): return __import__('ctypes').CDLL(None).fcntl(fd, 1) >= 0
assert [fd for fd in range(999) if f(fd)] == [0, 1, 2, 3]
## no other system call is allowed: 1 of 1
> import ctypes
> libc = ctypes.CDLL(None, use_errno=True)
> def f(n): return libc.syscall(n, *[-1] * 6), ctypes.get_errno()
for n in OTHER: assert f(n) in ((-1, 1), (-1, 38))
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
    library, other = ctypes.CDLL("libseccomp.so.2"), {*range(600)} - {335, 336}  # x86's, which end who is not probed
    other -= {library.seccomp_syscall_resolve_name(name.encode()) for name in [*jail.ALLOWED.split(), *jail.JUDGED]}
    partly = "def f(x):\n    if x == 3: raise ValueError('three')\n    return x if x < 5 else -x"
    jobs = {}
    for name, text in JUDGED.items():
        lines = text.replace("OTHER", str(sorted(other))).replace("HIDDEN", HIDDEN).splitlines()
        code = "\n".join(line[2:] for line in lines if line.startswith("> ")).replace("PARTLY", partly)
        jobs[name] = job(code, "\n".join(line for line in lines if not line.startswith("> ")), folder=True)
    results = beside_controls(jobs, job(GOOD, TESTS + f"hidden = {HIDDEN!r}"), job(BAD), timeout=1)
    for name, result in results.items():
        count, _, reason = name.partition(": ")[2].partition(", ")
        assert f"{result.passed} of {result.total}" == count and result.reason.startswith(reason), (name, result)
        assert bool(result.reason) == bool(reason), (name, result)


def test_examples_say_what_happened_and_do_not_count():
    """What agents are shown must be right, short, and ASCII: no tokenizer takes a lone surrogate."""
    code = "class Own(Exception): pass\ndef f(x):\n    if x == 3: raise Own('\\ud800' * 300)\n    return '\\ud800' * x"
    examples = ["assert f(0) == ''", "assert f(1) == 5", "assert f(3) == 3", "assert g(3) == 3"]
    (result,) = run_tests([job(code, "assert f(0) == ''", examples=examples)])
    assert result.examples[:2] == ["", r"returned '\ud800'"] and result.examples[2].startswith(r"raised Own: \ud800")
    assert result.examples[3] == "NameError: name 'g' is not defined" and len(result.examples[2]) <= 200
    assert result[:3] == (1, 1, "")


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
    return sandbox._running[0][0].pid


def test_nothing_is_left_behind(monkeypatch, tmp_path):
    """Processes (dead ones too), descriptors and files would add up over the 10,000 jobs of a run."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_tests([job(GOOD)] * 8)
    alone = [template()], len(os.listdir("/proc/self/fd"))
    write = job("def f(): open('x', 'w').write('x')", "assert f() is None", folder=True)
    ends = [job(HACKS[name]) for name in ("os._exit in the call", "null pointer", "the channel closed")]
    assert len({r.reason for r in run_tests([job(GOOD), job(BAD), write, *ends] * 40)}) == 3
    wait_for(lambda: (family(template()), len(os.listdir("/proc/self/fd"))) == alone)
    assert os.listdir(tmp_path) == []


def wait_for(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_killed_template_is_replaced():
    """The kernel may kill it for want of memory: no right answer must fail for that."""
    slow = job("import time\ndef f(x):\n    time.sleep(1)\n    return x + 1", "assert f(1) == 2")
    killer = threading.Timer(0.5, os.kill, [template(), signal.SIGKILL])
    killer.start()
    assert [r.reason for r in run_tests([slow] * 3)] == [""] * 3 and not killer.is_alive()


def test_templates_end_with_the_trainer():
    """Also where it is killed, and with all jobs that run."""
    body = """if True:
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


def test_the_trainer_cannot_be_read_by_its_children():
    """It holds HF_TOKEN, and whoever is dumpable can be read by all processes of the user."""
    assert template()
    assert jail.call(jail.libc.prctl, 3, 0, 0, 0, 0) == 0  # PR_GET_DUMPABLE


def test_processes_of_a_machine_share_its_cores(monkeypatch):
    """More than three jobs a core at once, and slow right answers would run out of time."""
    at_once, pool = [], sandbox.ThreadPoolExecutor
    monkeypatch.setattr(sandbox, "ThreadPoolExecutor", lambda n: at_once.append(n) or pool(n))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert run_tests([job(GOOD)])[0].reason == "" and at_once == [6]


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
ESCAPES = {
    "environment": "'done' if 'SECRET_TOKEN' in os.environ else 'refused'",
    "environments of others": """
        def f():
            pids = [os.getppid(), {pid}, *range(1, 40000, 97)]
            return each(os.open, *[(f'/proc/{{p}}/{{name}}', 0) for p in pids for name in ('environ', 'mem', 'maps')])
    """,
    "read": "each(os.open, ({secret!r}, 0), ({root!r} + '/rewards/sandbox.py', 0), ('/etc/passwd', 0))",
    "read by the C library": "attempt(libc.open, {secret!r}.encode(), 0)",
    "list": "each(os.listdir, ({home!r},), ({root!r},), ({root!r} + '/rewards',), ('/etc',))",
    "import": "attempt(lambda: [sys.path.append({root!r}), __import__('envs')])",
    "write": "attempt(os.open, {home!r} + '/new', os.O_WRONLY | os.O_CREAT)",
    "truncate": "attempt(os.truncate, {secret!r}, 0)",
    "delete": "each(os.unlink, ({secret!r},), (os.__file__,))",
    "rename": "attempt(os.rename, {secret!r}, {secret!r} + '2')",
    "link": "each(os.link, ({secret!r}, 'here'))",
    "symbolic link": "attempt(os.symlink, {secret!r}, 'link')",
    "write into Python": "each(os.open, (os.__file__ + 'x', os.O_WRONLY | os.O_CREAT), (os.__file__, os.O_WRONLY))",
    "emptied, opened to read": "each(os.open, ({secret!r}, os.O_TRUNC), (os.__file__, os.O_TRUNC))",
    "opened for nothing": "each(os.open, ('/etc/passwd', 3), ({secret!r}, 3 | os.O_TRUNC))",
    "shared memory folder": "attempt(os.open, '/dev/shm/note', os.O_WRONLY | os.O_CREAT)",
    "TCP": "attempt(lambda: socket.create_connection(('127.0.0.1', {port}), 1))",
    "sockets": "each(socket.socket, (socket.AF_INET, socket.SOCK_DGRAM), (socket.AF_UNIX,), (socket.AF_NETLINK,))",
    "kill": "each(os.kill, (os.getppid(), 9), ({pid}, 9), (-1, 9), (0, 9))",
    "limits of the trainer": "attempt(libc.syscall, {PRLIMIT}, {pid}, 0, b'\\x01' + bytes(15), None)",
    "priority of the trainer": "attempt(os.setpriority, os.PRIO_PROCESS, {pid}, 19)",
    "posix_spawn": "attempt(os.posix_spawn, '/bin/sh', ['sh', '-c', 'true'], {{}})",
    "exec": "attempt(os.execv, sys.executable, ['python', '-c', ''])",
    "fork": "attempt(os.fork)",
    "clone": "each(libc.syscall, ({CLONE}, 17, 0, 0, 0, 0), ({CLONE}, 0x10900, 0, 0, 0, 0), (435, bytes(88), 88))",
    "system": "'done' if os.system('true') == 0 else 'refused'",
    "signals by a descriptor": "each(fcntl.fcntl, (1, 8, os.getpid()), (1, 10, 9), (1, 15, bytes(8)), (1, 1026, 1))",
    "shared memory": "attempt(mmap.mmap, -1, 4096)",
    "higher limits": "each(resource.setrlimit, *[(r, (1 << 40, 1 << 40)) for r in (resource.RLIMIT_AS, 0)])",
    "descriptors": "attempt(lambda: [os.dup(1) for _ in range(99)])",
    "large file": "attempt(lambda: open('large', 'wb').write(bytes(20 << 20)))",
    "ordinary code works": """
        import sqlite3, threading, wave, zoneinfo
        def f():
            done = [open(os.devnull, 'w').write('x'), open('a', 'w').write('x'), open('a').read(), *os.listdir()]
            threads = [threading.Thread(target=done.append, args=(n,)) for n in range(9)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
            sqlite3.connect('db').execute('create table t (x)')
            return 'refused' if sorted(map(str, done)) == [*'01', '1', '1', *'2345678', 'a', 'x'] else done
    """,
}


ABSENT = {"Landlock": "444, 445, 446", "namespaces": "libc.unshare", "seccomp": "libseccomp.so.2"}


@contextlib.contextmanager
def without(layers, monkeypatch, folder):
    """In this context templates find a layer missing, as in a container or with an old kernel."""
    for name in "jail", "answers":
        source = pathlib.Path(ROOT, "rewards", f"{name}.py").read_text()
        for layer in layers if name == "jail" else []:
            assert ABSENT[layer] in source
            source = source.replace(ABSENT[layer], "9, 9, 9" if layer == "Landlock" else "libc.absent")
        pathlib.Path(folder, f"{name}.py").write_text(source)
    with monkeypatch.context() as patch:
        patch.setattr(jail, "__file__", os.path.join(folder, "jail.py"))
        sandbox.close()
        yield
        sandbox.close()


@pytest.mark.parametrize("absent", [[], ["Landlock"]])
def test_escapes(absent, monkeypatch, tmp_path_factory, capsys):
    """Nothing outside may be read, changed, reached or ended, by Landlock or by namespaces; ordinary code works."""
    os.environ["SECRET_TOKEN"] = "hf_secret"
    secret = pathlib.Path(home := tmp_path_factory.mktemp("home"), "secret")
    secret.write_text("treasure")
    missing = without(absent, monkeypatch, tmp_path_factory.mktemp("copy"))
    with missing, socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        facts = {"secret": str(secret), "home": str(home), "pid": os.getpid(), "root": ROOT}
        facts |= {"port": server.getsockname()[1], "PRLIMIT": PRLIMIT, "CLONE": CLONE}
        jobs = {}
        for name, code in ESCAPES.items():
            code = ATTEMPT + textwrap.dedent(code if "def f()" in code else f"def f(): return {code}")
            jobs[name] = job(code.format(**facts), "assert f() == 'refused'", folder=True)
        results = beside_controls(jobs, job(GOOD, folder=True), job(BAD, folder=True), timeout=10)
        hacks = ["limit raised", "C stack", "endless sleep", "int equal to everything", "early verdict", "threads"]
        hacked = beside_controls({name: job(HACKS[name]) for name in hacks}, job(GOOD), job(BAD), timeout=1)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert {name: r for name, r in results.items() if r.reason} == {}
    assert os.listdir(home) == ["secret"] and secret.read_text() == "treasure"
    assert not any(result.passed for result in hacked.values())
    assert capsys.readouterr().err == f"sandbox: seccomp yes, Landlock {'NO, namespaces yes' if absent else 'yes'}\n"


FILES, SECCOMP = "Landlock (Linux 5.13) and namespaces", "seccomp (libseccomp.so.2)"
LACKS = {"Landlock namespaces": FILES, "seccomp": SECCOMP, "seccomp Landlock namespaces": f"{SECCOMP} and {FILES}"}


@pytest.mark.parametrize("layers, lacks", LACKS.items())
def test_unprotected_only_when_allowed(layers, lacks, monkeypatch, tmp_path, capsys):
    """Code must not run where nothing contains it, and the error must say what is missing and what allows it."""
    jobs = [job(GOOD), job(BAD), job(HACKS["mock.ANY"]), job("while True: pass"), job(GOOD, folder=True)]
    with without(layers.split(), monkeypatch, tmp_path):
        for allowed in False, True, False:
            refused = pytest.raises(ValueError, match=re.escape(f"lacks {lacks}; --env-kwargs allow_unsafe_code yes"))
            with contextlib.nullcontext() if allowed else refused:
                assert [r.passed for r in run_tests(jobs, 1, allowed)] == [4, 0, 0, 0, 4]
            assert ("model-written code is NOT CONTAINED" in capsys.readouterr().err) == allowed
