"""The sandbox under attack. Around most attacks run two controls: a correct solution and a plainly wrong one."""

import concurrent.futures
import contextlib
import ctypes
import fcntl
import itertools
import os
import pathlib
import platform
import signal
import socket
import stat
import struct
import subprocess
import sys
import textwrap
import threading
import time
import zlib
from types import SimpleNamespace

import pytest

from rewards import sandbox, sandbox_jobs
from rewards import sandbox_kernel as kernel
from rewards.sandbox import Job, run_tests

if sys.platform != "linux":
    pytest.skip("the layers are Linux's", allow_module_level=True)

TESTS = """
import math
def check(candidate):
    assert candidate(1) == 2
    assert abs(candidate(10) - 11) < 0.5
    assert math.isclose(candidate(2.5), 3.5)
    for x, y in zip([-5, 7, 70], map(candidate, [-5, 7, 70])):
        assert y == x + 1
check(f)
"""
GOOD = "def f(x):\n    return x + 1"
BAD = "def f(x):\n    return 3"
HIDDEN = "needle" + "_that_only_the_tests_hold"


def job(code, tests=TESTS, names=("f",)):
    return Job([textwrap.dedent(code)], tests, list(names))


def run_beside_controls(attack, timeout=1.0):
    """The attack's result; the controls, which run before and after it, must be what they should be."""
    good, bad, *results, good_after, bad_after = run_tests([job(GOOD), job(BAD), attack, job(GOOD), job(BAD)], timeout)
    assert good.reason == good_after.reason == ""
    assert good.passed == good.total == 6
    assert bad.passed == bad_after.passed == 0
    assert bad.reason
    return results[0]


# Each must not pass a single assert.
HACKS = {
    # exhaustion
    "loop at import": "while True: pass",
    "loop in the call": "def f(x):\n    while True: pass",
    "loop that swallows every exception": """
        def f(x):
            while True:
                try:
                    while True: pass
                except BaseException: pass
    """,
    "signals ignored, timers cleared": """
        import signal
        for s in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGXCPU): signal.signal(s, signal.SIG_IGN)
        signal.alarm(0); signal.setitimer(signal.ITIMER_REAL, 0)
        def f(x):
            while True: pass
    """,
    "uninterruptible C loop": "def f(x):\n    return sum(range(10 ** 15))",
    "memory": "def f(x):\n    return len(bytearray(3 << 30))",
    "memory, filled and kept": "kept = []\ndef f(x):\n    while True: kept.append(bytes([1]) * (1 << 24))",
    "C stack": """
        import sys
        sys.setrecursionlimit(10 ** 9)
        class A:
            def __repr__(self): return repr([self])
        def f(x): return repr(A())
    """,
    "long string": "def f(x):\n    return 'x' * 200_000_000",
    "nested deeply": "def f(x):\n    r = []\n    for _ in range(200_000): r = [r]\n    return r",
    "list that holds itself": "def f(x):\n    r = []\n    r.append(r)\n    return r",
    "endless sleep": "import time\ntime.sleep(1e6)",
    "threads": """
        import threading, time
        def f(x):
            while True: threading.Thread(target=time.sleep, args=(1e6,)).start()
    """,
    # ending early
    "sys.exit at import": "import sys\nsys.exit(0)",
    "sys.exit in the call": "import sys\ndef f(x): sys.exit(0)",
    "os._exit at import": "import os\nos._exit(0)",
    "os._exit in the call": "import os\ndef f(x): os._exit(0)",
    "KeyboardInterrupt": "def f(x): raise KeyboardInterrupt",
    "GeneratorExit": "def f(x): raise GeneratorExit",
    "abort": "import os\ndef f(x): os.abort()",
    "null pointer": "import ctypes\ndef f(x): ctypes.string_at(0)",
    "StopIteration ends the tests' loop": "def f(x): raise StopIteration",
    "AssertionError": "def f(x): raise AssertionError",
    "SkipTest": "import unittest\ndef f(x): raise unittest.SkipTest('no')",
    "exception whose text never ends": """
        class E(Exception):
            def __str__(self):
                while True: pass
        def f(x): raise E
    """,
    "exception of a lying class": """
        class Meta(type):
            __name__ = property(lambda self: 'StopIteration')
        class E(Exception, metaclass=Meta): pass
        def f(x): raise E
    """,
    # objects
    "equal to everything": """
        class Any:
            def __eq__(self, other): return True
            __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__
            __hash__ = object.__hash__
        def f(x): return Any()
    """,
    "int equal to everything": """
        class Any(int):
            def __eq__(self, other): return True
            __hash__ = int.__hash__
            def __sub__(self, other): return 0
        def f(x): return Any(3)
    """,
    "number whose differences vanish": """
        class Any:
            __sub__ = __rsub__ = __abs__ = lambda self, *a: 0.0
            __float__ = lambda self: 3.5
            __index__ = lambda self: 0
            __bool__ = lambda self: True
        def f(x): return Any()
    """,
    "list of such": """
        class Any(int):
            def __eq__(self, other): return True
        def f(x): return [Any()]
    """,
    "a type that lies": """
        class Any(int):
            __class__ = int
            def __eq__(self, other): return True
        def f(x): return Any()
    """,
    "nan": "def f(x): return float('nan')",
    # reporting
    "pass marker": "print('PASSED 6 of 6', flush=True)\ndef f(x): print('OK')",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return None",
    "patched modules": """
        import ast, builtins, json, unittest
        builtins.abs = builtins.bool = builtins.eval = builtins.exec = builtins.compile = lambda *a, **k: True
        unittest.TestCase.assertEqual = lambda *a: None
        json.dumps = lambda *a, **k: '["value", true, []]'
        import sys
        main = sys.modules['rewards.sandbox_jobs']
        main.check = main._grader = main._pack = lambda *a: True
        def f(x): return None
    """,
    "everything written everywhere": """
        import os
        def f(x):
            for fd in range(300):
                try: os.write(fd, b'\\x00\\x00\\x00\\x04true' * 20)
                except OSError: pass
            os._exit(0)
    """,
    "an early verdict": """
        import os, struct
        for text in (b'[6, 6, [true], "", {}, []]', b'["value", [6, 6], []]') * 3:
            os.write(3, struct.pack('>I', len(text)) + text)
        def f(x): return None
    """,
    "oversized reply": "import os\nos.write(3, b'\\xff\\xff\\xff\\xff' + b'x' * 1000)\ndef f(x): return None",
    "nested reply": """
        import os, struct
        def f(x):
            text = b'[' * 1_000_000
            os.write(3, struct.pack('>I', len(text)) + text)
            os._exit(0)
    """,
    "reply of another shape": """
        import os, struct
        def f(x):
            for text in (b'{}', b'["value"]', b'[[], [], []]', b'["value", ["list", ["object", "x"]], 5]', b'\\xff',
                         b'["value", ["object", 0, ["list"]], []]', b'["value", ["object", 0, ["object", 0]], []]',
                         b'["value", ["keys", ["list"]], []]', b'["value", ["Fraction", 1, 0], []]',
                         b'["value", ["Decimal", "sNaN"], []]', b'["value", ["iterator", 2], []]'):
                os.write(3, struct.pack('>I', len(text)) + text)
    """,
    "reply that never ends": """
        import os, struct
        def f(x):
            os.write(3, struct.pack('>I', 15_000_000))
            while True: os.write(3, b' ')
    """,
    "descriptors sent along": """
        import array, os, socket
        channel = socket.socket(fileno=3)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0, 1, 2, 3] * 60))]
        for _ in range(1000): channel.sendmsg([b'x'], rights)
        def f(x): return None
    """,
    "machine code that enters the kernel by its 32-bit door": """
        import ctypes, mmap
        page = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 7)  # read, write, execute
        page.write(bytes([0xb8, 20, 0, 0, 0, 0xcd, 0x80, 0xc3]))  # mov eax, getpid; int 0x80; ret
        enter = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
        def f(x): return x + 1 if enter() else x + 1
    """,
    "numbers of the x32 interface": """
        import ctypes
        def f(x): return x + 1 if ctypes.CDLL(None).syscall(ctypes.c_long(0x40000000 | 39)) else x + 1
    """,
    "arguments that are not there": """
        import os, struct
        text = b'["value", 3, [[7, 1], ["x", 2], [0, ["list"]]]]'
        def f(x):
            os.write(3, struct.pack('>I', len(text)) + text)
    """,
    "frames: the sandbox's own functions replaced": """
        import sys
        frame = sys._getframe()
        while 'OPERATIONS' not in frame.f_globals: frame = frame.f_back
        frame.f_globals['_pack'] = lambda value, handle: ['type', 'int']
        frame.f_globals['OPERATIONS']['call'] = lambda *a, **k: True
        frame.f_globals['send'].__code__ = (lambda sock, value: sock.sendall(b'\\0\\0\\0\\x0e["value",9,[]]')).__code__
        def f(x): return 9
    """,
    "frames: the channel closed": """
        import sys
        def f(x):
            frame = sys._getframe()
            while frame:
                for value in frame.f_locals.values():
                    if type(value).__name__ == 'socket': value.close()
                frame = frame.f_back
            return x + 1
    """,
    "the channel does not block": "import os\nos.set_blocking(3, False)\ndef f(x): return 3",
    "the reader's and writer's builtins replaced": """
        import builtins
        class Any(int):
            def __eq__(self, other): return True
        for name in 'len isinstance issubclass all any sum type id zip map sorted AssertionError Exception'.split():
            setattr(builtins, name, lambda *a, **k: Any(1))
        def f(x): return Any(1)
    """,
    "small numbers overwritten in memory": """
        import ctypes
        for number in range(-5, 257): ctypes.c_int.from_address(id(number) + 24).value = 2
        def f(x): return 9
    """,
    "subclasses of all plain types": """
        import itertools
        def subclass(base):
            def yes(self, *a): return True
            body = dict.fromkeys(['__eq__', '__lt__', '__le__', '__gt__', '__ge__', '__bool__', '__contains__'], yes)
            body |= dict.fromkeys(['__sub__', '__rsub__', '__abs__', '__hash__', '__len__'], lambda self, *a: 0)
            return type('Any', (base,), {**body, '__float__': lambda self: 3.5, '__ne__': lambda self, other: False})
        bases = str, float, list, tuple, dict, set, frozenset, bytes, complex
        values = itertools.cycle(subclass(base)() for base in bases)
        def f(x): return next(values)
    """,
    "subclasses whose own methods lie": """
        import itertools
        class Int(int): __int__ = __index__ = __trunc__ = __neg__ = __pos__ = lambda self: self.right
        class Float(float): __float__ = __pos__ = lambda self: float(self.right)
        class Str(str): __str__ = __repr__ = lambda self: self.right
        class Tuple(tuple):
            __iter__ = lambda self: iter([self.right])
            __getitem__ = lambda self, place: self.right
            __len__ = lambda self: 1
        kinds = itertools.cycle([Int, Float, Str, Tuple])
        def f(x):
            value = next(kinds)()
            value.right = x + 1
            return value
    """,
    "iterator without end": "import itertools\ndef f(x): return itertools.repeat(x + 1)",
    "iterator that never yields": "def f(x):\n    while True: pass\n    yield x + 1",
    "iterator that fills the memory": "def f(x):\n    while True: yield bytes([x % 7]) * (1 << 24)",
    "mock.ANY": "from unittest.mock import ANY\ndef f(x): return ANY",
    "coroutine": "async def f(x): return x + 1",
    "generator": "def f(x): yield x + 1",
    "threads that answer for ever": """
        import os, struct, threading
        text = b'["value", 9, []]'
        def spam():
            while True: os.write(3, struct.pack('>I', len(text)) + text)
        for _ in range(8): threading.Thread(target=spam, daemon=True).start()
        def f(x): return 9
    """,
    "a thread that outlives the main thread": """
        import ctypes, threading, time
        def f(x):
            threading.Thread(target=time.sleep, args=(1e6,)).start()
            ctypes.CDLL(None).pthread_exit(0)
    """,
    "trace and profile functions": """
        import sys
        def trace(frame, event, arg):
            for name in 'value', 'packed', 'reply', 'changed': frame.f_locals[name] = 9
            return trace
        sys.settrace(trace), sys.setprofile(trace)
        def f(x): return 9
    """,
    "import hooks": """
        import builtins, sys
        class Finder:
            def find_spec(self, *a): sys.exit(0)
        sys.meta_path.insert(0, Finder())
        builtins.__import__ = lambda *a, **k: Finder()
        def f(x):
            import json
            return json
    """,
    "codecs and the JSON encoder": """
        import codecs, json
        codecs.register(lambda name: (lambda *a: (b'["value", 9, []]', 1),) * 4)
        json.encoder.c_make_encoder = None
        json.encoder.JSONEncoder.iterencode = lambda self, value, **k: ['["value", 9, []]']
        def f(x): return None
    """,
    "time stands still": """
        import time
        time.monotonic = time.time = time.perf_counter = lambda: 0.0
        def f(x):
            while True: pass
    """,
    "every exception of endless recursion caught": """
        import sys
        sys.setrecursionlimit(10 ** 9)
        def f(x):
            while True:
                try: f(x)
                except BaseException: pass
    """,
    "a finalizer that never ends": """
        class Last:
            def __del__(self):
                while True: pass
        def f(x):
            Last()
            return x + 1
    """,
    "exceptions that are of every class": """
        class Meta(type):
            __instancecheck__ = __subclasscheck__ = lambda self, other: True
        class E(BaseException, metaclass=Meta): pass
        def f(x): raise E
    """,
    "exception group": "def f(x): raise BaseExceptionGroup('g', [SystemExit(0), KeyboardInterrupt()])",
    "errors that are none": """
        import os, struct
        def f(x):
            for names in b'["type"]', b'["__import__"]', b'["SystemExit"]', b'"type"', b'[]', b'[[], 3]', b'{}', b'5':
                text = b'["error", ' + names + b', "os"]'
                os.write(3, struct.pack('>I', len(text)) + text)
    """,
    "shared lists with 2 ** 40 leaves": "def f(x):\n    r = 3\n    for _ in range(40): r = [r, r]\n    return r",
    "a number of 14 million digits": """
        import os, struct
        def f(x):
            text = b'["value", ' + b'9' * 14_000_000 + b', []]'
            os.write(3, struct.pack('>I', len(text)) + text)
    """,
    "facts once more": """
        import os
        os.write(3, b'\\0\\0\\0\\x0d[true, {"a":1}]')
        def f(x): return 9
    """,
    "a module that lies": """
        import sys, types
        class Module(types.ModuleType):
            def __getattribute__(self, name): return {'f': lambda x: True}
        class Name(str):
            def __eq__(self, other): return True
            __hash__ = str.__hash__
        sys.modules['candidate'].__class__ = Module
        sys.modules['candidate'] = sys.modules['rewards.sandbox_jobs'] = None
        globals()[Name('f')] = lambda x: 9
    """,
    "limits lowered to nothing": """
        import resource
        for limit in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_STACK, resource.RLIMIT_DATA):
            resource.setrlimit(limit, (0, 0))
        def f(x): return [3] * 1000
    """,
    # parsing
    "NUL": "def f(x):\n    return x + 1\0",
    "lone surrogate": "def f(x):\n    return x + 1 # \ud800",
    "parentheses": "def f(x): return " + "(" * 100_000 + "x + 1" + ")" * 100_000,
    "unary operators": "def f(x): return " + "-" * 300_000 + "x + 1",
    "attributes": "def f(x): return x" + ".a" * 200_000,
    "20 MB": GOOD + "\n" + "#" * 20_000_000,
    "empty": "",
    "only blanks": " \t\n" * 1000,
}


X86_ONLY = {"machine code that enters the kernel by its 32-bit door", "numbers of the x32 interface"}


@pytest.mark.parametrize("name", HACKS)
def test_hack(name):
    if name in X86_ONLY and platform.machine() != "x86_64":
        pytest.skip("x86_64 only")
    result = run_beside_controls(job(HACKS[name]))
    assert result.passed == 0, result
    assert result.total >= 1
    assert result.reason


def test_a_candidate_cannot_end_the_tests_loop():
    code = "def f(x):\n    if x > 2: raise StopIteration\n    return x"
    tests = "assert f(0) == 0\nfor y in map(f, [1, 2, 3, 4]):\n    assert y in (1, 2)\nassert f(2) == 2"
    result = run_beside_controls(job(code, tests))
    assert result.outcomes == [True, True, True, False]  # the last assert was not reached
    assert result.reason == "StopIteration: "


def test_questions_that_are_never_read():
    # It answers by itself and reads no more; the next question is larger than a socket holds.
    code = """
        import os, struct, time
        def f(x):
            text = b'["value", 1, []]'
            os.write(3, struct.pack('>I', len(text)) + text)
            time.sleep(1e6)
    """
    result = run_beside_controls(job(code, "assert f(0) == 1\nassert f('x' * 9_000_000) == 1"))
    assert (result.outcomes, result.reason) == ([True, False], "out of time")


def test_a_value_that_keeps_the_grader_busy_costs_only_what_comes_after():
    code = "def f(x):\n    return range(10 ** 15) if x > 2 else range(x)"
    tests = "assert sum(f(1)) == 0\nfor y in (1, 2):\n    assert len(f(y)) == y\n"
    tests += "assert sum(f(3)) == 3\nassert sum(f(1)) == 0"
    prepare = "def prepare(texts):\n    return texts[0], {'found': [True]}"
    result = run_beside_controls(job(code, tests)._replace(prepare=prepare))
    assert result.outcomes == [True, True, True, False, False] and result[:2] == (3, 5)
    assert (result.reason, result.facts) == ("out of time", {"found": [True]})


@pytest.mark.parametrize("first, passed", [(0, 1), (2, 3)])
def test_rounds_that_a_busy_grader_does_not_reach_have_failed(first, passed):
    code = f"def f(x):\n    return range(10 ** 15) if x >= {first} else range(x)"
    tests = "assert f(-1) == range(-1)\nfor y in [0, 1, 2, 3, 4]:\n    assert sum(f(y)) >= 0\nassert f(-2)"
    assert run_beside_controls(job(code, tests))[:2] == (passed, 7)


@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize("first, passed", [((0, 0), 0), ((0, 3), 6), ((1, 0), 8), ((4, 3), 38)])
def test_rounds_of_rounds_that_a_busy_grader_does_not_reach_have_failed(first, passed, in_function):
    code = f"def f(*xs):\n    return range(10 ** 15) if xs >= {first} else range(9)"
    tests = "for x in range(5):\n    for y in [0, 1, 2, 3]:\n        assert sum(f(x, y)) == 36\n        assert x < 9"
    if in_function:
        head, inner = tests.split("\n", 1)
        tests = f"def rounds(x):\n{inner}\n{head}\n    rounds(x)"
    assert run_beside_controls(job(code, tests))[:2] == (passed, 40)


def test_a_candidate_cannot_have_endless_rounds():
    tests = "for y in f(0):\n    assert sum(f(y)) == 0"
    result = run_beside_controls(job("def f(x):\n    return range(10 ** 18)", tests))
    assert result.passed == 0 and result.total <= sandbox_jobs.MAX_ITEMS


def test_an_oversized_reply_is_not_waited_for():
    assert run_beside_controls(job(HACKS["oversized reply"])).reason == "an unreadable answer (too large)"


def test_a_candidate_has_no_descriptor_but_its_channel():
    code = """
        import os, stat
        def f():
            found = {}
            for fd in range(1000):
                try: status = os.fstat(fd)
                except OSError: continue
                device = os.major(status.st_rdev), os.minor(status.st_rdev)
                found[fd] = 'socket' if stat.S_ISSOCK(status.st_mode) else device
            return found
    """
    null = (1, 3)
    result = run_beside_controls(job(code, f"assert f() == { ({0: null, 1: null, 2: null, 3: 'socket'}) }"))
    assert result.reason == ""


def test_a_coding_cookie_means_nothing():
    # A cookie in a str means nothing to Python, so these are correct solutions, and must pass.
    for code in "# -*- coding: rot13 -*-\n" + GOOD, "# coding: latin-1\n" + GOOD:
        assert run_beside_controls(job(code)).reason == ""


# Each is code that tries something, and an expression of what came of it, which must be as on the right. `{...}` is
# replaced by facts of the test; "allowed" controls show that the attempt itself works where it may.
REFUSED = "'refused'"
ATTEMPT = """
import os, sys, ctypes
libc = ctypes.CDLL(None, use_errno=True)
def attempt(function, *args):
    try:
        value = function(*args)
    except (OSError, ValueError):  # ValueError: how setrlimit says it
        return 'refused'
    return 'refused' if value == -1 else 'done'
"""
NUMBERS = {"x86_64": (101, 425, 319, 250, 302), "aarch64": (117, 425, 279, 219, 261)}[platform.machine()]
PTRACE, IO_URING_SETUP, MEMFD_CREATE, KEYCTL, PRLIMIT64 = NUMBERS
ESCAPES = {
    "environment": ("def f(): return 'SECRET_TOKEN' in os.environ", "False"),
    "environments of others": (
        """
        def f():
            found = []
            for pid in [os.getppid(), {pid}, *range(1, 40000, 97)]:
                for name in 'environ', 'mem', 'maps':
                    found.append(attempt(os.open, f'/proc/{{pid}}/{{name}}', os.O_RDONLY))
            return set(found)
        """,
        "{'refused'}",
    ),
    "read": ("def f(): return attempt(os.open, {secret!r}, os.O_RDONLY)", REFUSED),
    "read by the C library": ("def f(): return attempt(libc.open, {secret!r}.encode(), 0)", REFUSED),
    "list": ("def f(): return attempt(os.listdir, {home!r})", REFUSED),
    "read the repository": (
        "def f(): return attempt(os.open, {root!r} + '/rewards/sandbox.py', os.O_RDONLY)",
        REFUSED,
    ),
    "list the repository": (
        "def f(): return [attempt(os.listdir, {root!r} + p) for p in ('', '/rewards')]",
        "2 * ['refused']",
    ),
    "import from the repository": (
        """
        def f():
            found = sorted(n for n in sys.modules if n.startswith('rewards'))
            sys.path.append({root!r})
            for name in 'rewards.coding', 'envs', 'tutti':
                try: found.append(__import__(name).__name__)
                except (ImportError, OSError): pass
            return found
        """,
        "['rewards', 'rewards.sandbox_jobs', 'rewards.sandbox_kernel']",
    ),
    "list another folder": ("def f(): return attempt(os.listdir, '/etc')", REFUSED),
    "write": ("def f(): return attempt(os.open, {home!r} + '/new', os.O_WRONLY | os.O_CREAT)", REFUSED),
    "truncate": ("def f(): return attempt(os.truncate, {secret!r}, 0)", REFUSED),
    "delete": ("def f(): return attempt(os.unlink, {secret!r})", REFUSED),
    "rename": ("def f(): return attempt(os.rename, {secret!r}, {secret!r} + '2')", REFUSED),
    # Granted, and not done: check_escapes looks at both.
    "change the mode": ("def f(): return attempt(libc.chmod, {secret!r}.encode(), 0o777)", "'done'"),
    "change the times": ("def f(): return attempt(libc.utime, {secret!r}.encode(), bytes(16))", "'done'"),
    "link": ("def f(): return attempt(os.link, {secret!r}, 'here')", REFUSED),
    "write into Python": (
        "def f(): return attempt(os.open, os.path.dirname(os.__file__) + '/x.py', os.O_WRONLY | os.O_CREAT)",
        REFUSED,
    ),
    "symbolic link": (
        """
        def f():
            if attempt(os.symlink, {secret!r}, 'link') == 'refused': return 'refused'
            return attempt(os.open, 'link', os.O_RDONLY)
        """,
        REFUSED,
    ),
    "shared memory folder": ("def f(): return attempt(os.open, '/dev/shm/note', os.O_WRONLY | os.O_CREAT)", REFUSED),
    "TCP": (
        "import socket\ndef f(): return attempt(lambda: socket.create_connection(('127.0.0.1', {port}), 1))",
        REFUSED,
    ),
    "UDP": (
        "import socket\ndef f(): return attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))",
        REFUSED,
    ),
    "Unix socket": ("import socket\ndef f(): return attempt(socket.socketpair)", REFUSED),
    "kill the parent": ("def f(): return attempt(os.kill, os.getppid(), 9)", REFUSED),
    "kill the trainer": ("def f(): return attempt(os.kill, {pid}, 9)", REFUSED),
    "kill all": ("def f(): return attempt(os.kill, -1, 9)", REFUSED),
    "kill the group": ("def f(): return attempt(os.killpg, 0, 9)", REFUSED),
    "limits of the trainer": (
        "def f(): return attempt(libc.syscall, {PRLIMIT64}, {pid}, 0, b'\\x01' + bytes(15), None)",
        REFUSED,
    ),
    "priority of the trainer": ("def f(): return attempt(os.setpriority, os.PRIO_PROCESS, {pid}, 19)", REFUSED),
    "ptrace": ("def f(): return attempt(libc.syscall, {PTRACE}, 16, {pid}, 0, 0)", REFUSED),
    "posix_spawn": ("def f(): return attempt(os.posix_spawn, '/bin/sh', ['sh', '-c', 'true'], {{}})", REFUSED),
    "exec": ("def f(): return attempt(os.execv, sys.executable, ['python', '-c', ''])", REFUSED),
    "fork": ("def f(): return attempt(os.fork)", REFUSED),
    "clone": ("def f(): return attempt(libc.syscall, {CLONE}, 17, 0, 0, 0, 0)", REFUSED),
    "clone3": ("def f(): return attempt(libc.syscall, 435, bytes(88), 88)", REFUSED),
    "system": ("def f(): return 'done' if os.system('true') == 0 else 'refused'", REFUSED),
    "signals by a descriptor": (
        """
        import fcntl, struct
        def f():
            r = 1
            me = os.getpid()
            commands = [(8, me), (10, 9), (15, struct.pack('ii', 1, me)), (1026, 1)]
            done = [attempt(fcntl.fcntl, r, *command) for command in commands]
            return set(done + [attempt(fcntl.ioctl, 3, c, struct.pack('i', me)) for c in (0x8901, 0x8902, 0x5452)])
        """,
        "{'refused'}",
    ),
    "marks on a file": (
        """
        import fcntl, struct
        def f():
            lock = struct.pack('hhqqi4x', fcntl.F_RDLCK, 0, 0, 1, 0)
            commands = [(36, lock), (37, lock), (38, lock), (1024, 0), (1036, bytes(8))]
            with open(os.__file__) as file:
                done = [attempt(fcntl.fcntl, file, *command) for command in commands]
                done += [attempt(fcntl.ioctl, file, c, bytes(8)) for c in (0x80086601, 0x40086602, 0x40087604)]
            return set(done)
        """,
        "{'refused'}",
    ),
    "what lies in memory of a file": (
        """
        def f():
            with open(os.__file__) as file:
                calls = [lambda: os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)]
                calls += [lambda: os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)]
                calls += [lambda: libc.readahead(file.fileno(), 0, 4096), lambda: libc.mincore(0, 4096, bytes(1))]
                return [attempt(call) for call in calls]
        """,
        "4 * ['refused']",
    ),
    "pages kept in a pipe": ("def f(): return attempt(libc.vmsplice, 1, bytes(16), 1, 0)", REFUSED),
    "a pipe, whose number is a note": ("def f(): return attempt(os.pipe)", REFUSED),
    "emptied, opened to read": ("def f(): return attempt(os.open, {secret!r}, os.O_RDONLY | os.O_TRUNC)", REFUSED),
    "emptied, opened for nothing": ("def f(): return attempt(os.open, {secret!r}, 3 | os.O_TRUNC)", REFUSED),
    "opened for nothing": ("def f(): return attempt(os.open, '/etc/passwd', 3)", REFUSED),
    "Python's file emptied": ("def f(): return attempt(os.open, os.__file__, os.O_RDONLY | os.O_TRUNC)", REFUSED),
    "its own file emptied, opened to read": (
        "def f(): return attempt(os.open, 'own', os.O_CREAT | os.O_TRUNC)",
        REFUSED,
    ),
    "something urgent": ("def f(): return attempt(libc.send, 3, b'x', 1, 1)", REFUSED),
    "a thread with descriptors of its own": (
        "CALLS = (436, 900, 900, 2), ({CLONE}, 0x10900, 0, 0, 0, 0)\n"
        "def f(): return [attempt(libc.syscall, *call) for call in CALLS]",
        "2 * ['refused']",
    ),
    "all disks written to": ("def f(): return [attempt(libc.syscall, n, 1) for n in {SYNCS}]", "2 * ['refused']"),
    "io_uring": ("def f(): return attempt(libc.syscall, {IO_URING_SETUP}, 4, bytes(120))", REFUSED),
    "memory file": ("def f(): return attempt(libc.syscall, {MEMFD_CREATE}, b'x', 0)", REFUSED),
    "a note in the keyring": ("def f(): return attempt(libc.syscall, {KEYCTL}, 0, -4, 1)", REFUSED),
    "namespaces of its own": ("def f(): return attempt(libc.unshare, 0x10000000)", REFUSED),
    "mount": ("def f(): return attempt(libc.mount, b'tmpfs', b'.', b'tmpfs', 0, None)", REFUSED),
    "higher limits": (
        "import resource\ndef f(): return attempt(resource.setrlimit, resource.RLIMIT_AS, (1 << 40, 1 << 40))",
        REFUSED,
    ),
    "descriptors": (
        "def f():\n    kept = []\n    return attempt(lambda: [kept.append(os.dup(1)) for _ in range(5000)])",
        REFUSED,
    ),
    "what the kernel counts by user": (
        """
        def f():
            timer = ctypes.byref(ctypes.c_long())
            calls = (libc.inotify_init,), (libc.inotify_init1, 0), (libc.timer_create, 0, None, timer)
            return [attempt(*call) for call in calls]
        """,
        "3 * ['refused']",
    ),
    "large file": (
        "def f():\n    def write():\n        with open('large', 'wb') as file:\n            for _ in range(200):"
        " file.write(bytes(1 << 20))\n    return attempt(write)",
        REFUSED,
    ),
    "threads of another job, by a page of Python's library": (
        """
        def f():
            libc.mmap.restype, file = ctypes.c_void_p, open(os.__file__, 'rb')
            page = ctypes.c_void_p(libc.mmap(None, 4096, 1, 2, file.fileno(), ctypes.c_long(0)))
            words, seconds, said = int.from_bytes(file.read(4), 'little'), (ctypes.c_long * 2)(0, 1), []
            for operation, value in [(0, words), (9, words), (1, 1), (0x81, 1)]:  # wait, wait, wake, wake in here
                ctypes.set_errno(0)
                libc.syscall({FUTEX}, page, operation, value, seconds, None, -1)
                said.append(ctypes.get_errno())
            return said
        """,
        "3 * [11] + [0]",  # "try again" in place of "timed out" and of none who waits
    ),
    "the machine's threads, counted": ("def f(): return attempt(libc.sysinfo, bytes(200))", REFUSED),
    "memory that stays when most of it is given back": (
        "import mmap\ndef f(): return attempt(mmap.mmap, -1, 4096)",
        REFUSED,
    ),
    "the number of its socket, and a descriptor of who made it": (
        "def f():\n    size = ctypes.byref(ctypes.c_int(8))\n"
        "    return [attempt(libc.getsockopt, 3, 1, option, bytes(8), size) for option in (57, 77)]",
        "2 * ['refused']",
    ),
    "the trainer's processor time": (
        "import time\ndef f(): return attempt(time.clock_gettime, ~{pid} << 3 | 2)",
        REFUSED,
    ),
    "allowed: the null device": (
        "def f():\n    with open(os.devnull, 'w') as file: file.write('x')\n    return open(os.devnull).read()",
        "''",
    ),
    "allowed: a file of its own": (
        "def f():\n    with open('own', 'w') as file: file.write('x')\n"
        "    return open('own').read() + str(os.listdir('.'))",
        "\"x['own']\"",
    ),
    "allowed: what Python does with descriptors": (
        """
        import fcntl, sqlite3
        def f():
            r = os.open('own', os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            os.set_blocking(r, False), os.set_inheritable(r, True), fcntl.ioctl(r, 0x541B, bytes(4))
            with open('own', 'w') as file: fcntl.lockf(file, fcntl.LOCK_EX), fcntl.flock(file, fcntl.LOCK_UN)
            with sqlite3.connect('store.db') as db: db.execute('create table t (x)')
            return [os.isatty(r), attempt(os.get_terminal_size), os.get_inheritable(r), os.get_blocking(r)]
        """,
        "[False, 'refused', True, False]",
    ),
    "allowed: copies of files, and what Python's own databases do": (
        """
        import pathlib, shelve, shutil
        def f():
            pathlib.Path('a').touch()
            open('a', 'a').write('x')
            pathlib.Path('a').touch()
            assert attempt(os.utime, 'b') == attempt(os.chmod, 'b', 0) == 'refused'
            shutil.copy('a', 'b'), shutil.copy2('b', 'c')
            with shelve.open('store') as store: store['key'] = 'y'
            return open('c').read() + shelve.open('store')['key']
        """,
        "'xy'",
    ),
    "allowed: a library": ("def f():\n    import sqlite3, wave, difflib\n    return difflib.__name__", "'difflib'"),
    "allowed: threads": (
        "import threading\ndef f():\n    r = []\n    t = threading.Thread(target=r.append, args=(5,))\n    t.start()\n"
        "    t.join()\n    return r",
        "[5]",
    ),
    "allowed: time zones, and an exit": (
        """
        import zoneinfo
        def f():
            zoneinfo.TZPATH, zoneinfo.ZoneInfo  # read where there are any
            try: exit()
            except SystemExit: return attempt(os.listdir, '/usr/share/zoneinfo')
        """,
        repr("done" if os.path.isdir("/usr/share/zoneinfo") else "refused"),
    ),
    "allowed: many threads": (
        """
        import threading
        def f():
            go, threads = threading.Event(), []
            for _ in range(50):
                threads.append(threading.Thread(target=go.wait))
                threads[-1].start()
            go.set()
            return len([t.join() for t in threads])
        """,
        "50",
    ),
    "allowed: arguments of the command line, of which there are none": (
        "import sys\ndef f(): return len(sys.argv)",
        "1",
    ),
    "allowed: much output": ("def f():\n    for _ in range(300): print('x' * 1_000_000)\n    return 1", "1"),
}


def escape_jobs(home, port):
    os.environ["SECRET_TOKEN"] = "hf_secret"
    secret = os.path.join(home, "secret")
    with open(secret, "w") as file:
        file.write("treasure")
    os.utime(secret, (2e9, 2e9))
    facts = {
        "secret": secret, "home": str(home), "pid": os.getpid(), "port": port, "root": sandbox.ROOT,
        "SYNCS": [(162, 306), (81, 267)][kernel.COLUMN],
        "PTRACE": PTRACE, "IO_URING_SETUP": IO_URING_SETUP, "MEMFD_CREATE": MEMFD_CREATE, "KEYCTL": KEYCTL,
        "CLONE": kernel.JUDGED["clone"][kernel.COLUMN], "FUTEX": kernel.JUDGED["futex"][kernel.COLUMN],
        "PRLIMIT64": PRLIMIT64,
    }  # fmt: skip
    return {
        name: job(ATTEMPT + textwrap.dedent(code).format(**facts), f"assert f() == {right}", ["f"])
        for name, (code, right) in ESCAPES.items()
    }


def check_escapes(home):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        jobs = escape_jobs(home, server.getsockname()[1])
        results = run_tests([job(GOOD), job(BAD), *jobs.values(), job(GOOD), job(BAD)], 10)
        with pytest.raises(BlockingIOError):
            server.accept()
    for good in results[0], results[-2]:
        assert good.reason == ""
    for bad in results[1], results[-1]:
        assert bad.passed == 0
    failed = {name: r for name, r in zip(jobs, results[2:]) if r.reason}
    assert not failed, failed
    assert os.listdir(home) == ["secret"]
    secret = os.path.join(home, "secret")
    assert (stat.S_IMODE(os.stat(secret).st_mode) & 0o111, os.stat(secret).st_mtime) == (0, 2e9)
    with open(secret) as file:
        assert file.read() == "treasure"


def test_escapes(tmp_path):
    check_escapes(tmp_path)


def without(*names):
    """Takes system calls from this process and its children, as Docker or an old kernel does."""
    numbers = {"unshare": (272, 97), "seccomp": (317, 277), "landlock": [kernel.LANDLOCK_CREATE_RULESET] * 2}
    steps = [(0x20, 0, 0, 0)]
    for name in names:
        steps += [(0x15, 0, 1, numbers[name][kernel.COLUMN]), (6, 0, 0, 0x50001)]
    if "seccomp" in names:  # which has a second door, prctl: refuse its option 22
        steps += [(0x15, 0, 3, (157, 167)[kernel.COLUMN]), (0x20, 0, 0, 16), (0x15, 0, 1, 22), (6, 0, 0, 0x50016)]
    steps.append((6, 0, 0, 0x7FFF0000))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    kernel.call(kernel.libc.prctl, kernel.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    filter_ = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    kernel.call(kernel.libc.prctl, kernel.PR_SET_SECCOMP, 2, ctypes.c_char_p(filter_), 0, 0)


def in_a_process(body, *arguments):
    """Runs lines of Python in a fresh process, in this folder's parent; returns its output and errors."""
    program = "import sys\nsys.path.insert(0, sys.argv[1])\nfrom tests.test_sandbox import *\n" + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-c", program, sandbox.ROOT, *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_escapes_without_namespaces(tmp_path):
    said = in_a_process("without('unshare')\ncheck_escapes(sys.argv[2])", str(tmp_path))
    assert "sandbox: namespaces NO, Landlock yes, seccomp yes\n" in said


def test_escapes_without_landlock(tmp_path):
    said = in_a_process("without('landlock')\ncheck_escapes(sys.argv[2])", str(tmp_path))
    assert "sandbox: namespaces yes, Landlock NO, seccomp yes\n" in said


def test_threads_where_the_trainer_has_many():
    # Without namespaces the kernel counts all of the user's.
    in_a_process("""
        without('unshare')
        hard = kernel.resource.getrlimit(kernel.resource.RLIMIT_NPROC)[1]
        code = 'import resource\\ndef f(): return resource.getrlimit(resource.RLIMIT_NPROC)'
        limit = 4096 if hard == -1 else min(4096, hard)
        assert run_tests([job(code, f'assert f() == ({limit}, {limit})')])[0].reason == ''
    """)


def test_threads_where_stacks_are_large():
    # As in containers that are started with NVIDIA's `--ulimit stack=67108864`.
    in_a_process("""
        from resource import RLIMIT_STACK, getrlimit, setrlimit
        hard = getrlimit(RLIMIT_STACK)[1]
        setrlimit(RLIMIT_STACK, (64 << 20 if hard == -1 else min(64 << 20, hard), hard))
        code, right = ESCAPES["allowed: many threads"]
        assert run_tests([job(code, f'assert f() == {right}')])[0].reason == ''
    """)


def test_mounts_below_pythons_files_are_read_only():
    in_a_process("""
        maps = ('setgroups', 'deny'), ('uid_map', f'0 {os.getuid()} 1'), ('gid_map', f'0 {os.getgid()} 1')
        kernel.call(kernel.libc.unshare, kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
        for name, text in maps:
            with open(f'/proc/self/{name}', 'w') as file: file.write(text)
        place = os.path.join(os.path.dirname(os.__file__), 'ensurepip')
        kernel.call(kernel.libc.mount, b'tmpfs', place.encode(), b'tmpfs', 0, None)
        without('landlock')
        write = job(f'''
            def f():
                try: open({place!r} + '/x.py', 'w')
                except OSError as error: return error.errno
        ''', 'assert f() == 30')  # EROFS
        assert run_beside_controls(write).reason == ''
        assert os.listdir(place) == []
    """)


def test_unprotected_only_when_allowed():
    said = in_a_process("""
        without('unshare', 'landlock', 'seccomp')
        with pytest.raises(ValueError, match="allow_unsafe_code"):
            run_tests([job(GOOD)])
        results = run_tests([job(GOOD), job(BAD), job(HACKS["equal to everything"])], allow_unsafe_code=True)
        assert [r.passed for r in results] == [6, 0, 0]
        with pytest.raises(ValueError, match="allow_unsafe_code"):
            run_tests([job(GOOD)])  # the interpreters that were started for the others serve none of these
    """)
    assert said == "sandbox: namespaces NO, Landlock NO, seccomp NO: model-written code runs UNPROTECTED\n"


@pytest.mark.parametrize("name", ["mbpp", "classeval"])
def test_an_environment_refuses_at_once_where_nothing_protects(name):
    said = in_a_process(
        """
        import envs
        without('unshare', 'landlock', 'seccomp')
        with pytest.raises(ValueError, match="allow_unsafe_code") as at_once:
            envs.make(sys.argv[2])
        env = envs.make(sys.argv[2], allow_unsafe_code="yes")
        env.allow_unsafe_code = False
        with pytest.raises(ValueError) as later:
            env.step([(env.tasks('test')[0], [], ['', ''])])
        assert str(at_once.value) == str(later.value)
        envs.make('tldr')  # runs no code
    """,
        name,
    )
    assert said == ""  # nothing ran unprotected


def test_environments_probe_the_system_once_and_leave_no_process():
    in_a_process("""
        import envs
        started = []
        sys.addaudithook(lambda event, args: started.append(event) if event == 'subprocess.Popen' else None)
        envs.make('humaneval'), envs.make('classeval'), envs.make('mbpp')
        assert len(started) == 1 and descendants() == set()
    """)


def test_a_launcher_may_have_had_the_ends_of_children_ignored():
    said = in_a_process("""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # which a new interpreter inherits
        assert [r.passed for r in run_tests([job(GOOD), job(BAD)])] == [6, 0]
    """)
    assert said == "sandbox: namespaces yes, Landlock yes, seccomp yes\n"


def test_an_interpreter_that_does_not_start_is_no_missing_layer(monkeypatch):
    sandbox.close()
    sandbox._probed.cache_clear()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    for ask in sandbox.require_protection, lambda: run_tests([job(GOOD)]):
        with pytest.raises(RuntimeError, match="/bin/false did not start"):
            ask()


@pytest.mark.parametrize("missing", ["landlock", "seccomp"])
def test_landlock_and_seccomp_protect_together_only(missing):
    in_a_process(f"""
        without('unshare', {missing!r})
        with pytest.raises(ValueError, match="allow_unsafe_code"):
            run_tests([job(GOOD)])
    """)


def test_an_environment_is_content_with_landlock_and_seccomp():
    in_a_process("import envs\nwithout('unshare')\nenvs.make('humaneval')")


def test_namespaces_alone_kill_what_was_forked():
    # Where seccomp is missing, processes can be forked; none outlives its job.
    in_a_process("""
        without('seccomp')
        forks = job('''
            import os, time
            for _ in range(80):
                if os.fork() == 0: time.sleep(1e6)
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0: time.sleep(1e6)
                os._exit(0)
            def f(x): return x + 1
        ''')
        reasons = [r.reason for r in run_tests([forks, job(GOOD)])]
        assert reasons == ["", ""], reasons
        workers = min(2, sandbox._cores())
        assert len(descendants()) == 2 * workers, descendants()  # two templates each
    """)


def test_namespaces_alone_limit_timers():
    # Where seccomp is missing, timers can be made; each holds one of the signals that may wait for the user.
    in_a_process("""
        without('seccomp')
        timers = job('''
            import ctypes
            def f():
                timer, made = ctypes.c_long(), 0
                while made < 1000 and ctypes.CDLL(None).timer_create(0, None, ctypes.byref(timer)) == 0: made += 1
                return made
        ''', 'assert 0 < f() <= 64')
        assert [r.reason for r in run_tests([job(GOOD), timers, job(GOOD)])] == [''] * 3
    """)


KEPT = "environment, environments of others, read, read by the C library, list, read the repository, write, truncate"
KEPT += ", list another folder, delete, rename, write into Python, shared memory folder, TCP, kill the trainer, mount"


def test_namespaces_alone_keep_the_system_out_of_reach(tmp_path):
    # They count as protection where Landlock and seccomp are missing.
    in_a_process(
        """
        without('landlock', 'seccomp')
        with socket.create_server(('127.0.0.1', 0)) as server:
            jobs = escape_jobs(sys.argv[2], server.getsockname()[1])
            jobs = {name: jobs[name] for name in KEPT.split(', ')}
            null = 'import os\\ndef f():\\n    try: os.chmod(os.devnull, 0o666)\\n    except OSError: return True'
            jobs['mode of the null device'] = job(null, 'assert f()')
            failed = {name: r.reason for name, r in zip(jobs, run_tests(jobs.values())) if r.reason}
        assert not failed, failed
        assert os.listdir(sys.argv[2]) == ['secret']
        shared = job('import ctypes\\ndef f(flags): return ctypes.CDLL(None).shmget(77, 4096, flags) >= 0')
        for flags, found in (0o1600, True), (0, False), (0, False):  # made, then looked for by later jobs
            assert run_tests([shared._replace(tests=f'assert f({flags}) is {found}')] * 4)[0].reason == ''
    """,
        str(tmp_path),
    )


def test_a_jobs_folder_is_small():
    code = """
        def f(count, size):
            try:
                for i in range(count):
                    with open(str(i), 'wb') as file: file.write(bytes(size))
            except OSError as error: return error.errno
    """
    calls = "f(9, 4 << 20)", "f(2000, 0)"
    results = run_tests([job(code, f"assert {call} == 28") for call in calls])  # ENOSPC
    assert [r.reason for r in results] == ["", ""]


def test_without_protection_what_was_forked_is_killed():
    in_a_process("""
        without('unshare', 'landlock', 'seccomp')
        fork = 'import os, time\\npid = os.fork()\\nif not pid: time.sleep(100)\\ndef f(): return pid'
        forks = Job([fork], 'assert f() > 0', ['f'], examples=['assert f() == 0'])
        (result,) = run_tests([forks], allow_unsafe_code=True)
        path, end = pathlib.Path(f"/proc/{result.examples[0].split()[1]}/stat"), time.monotonic() + 10
        state = lambda: path.read_text().rpartition(")")[2].split()[0] if path.exists() else "X"
        while state() not in "ZX":  # Z: dead, and nobody has asked
            assert time.monotonic() < end
            time.sleep(0.01)
    """)


def test_a_message_in_single_bytes_ends_at_the_deadline(monkeypatch):
    clock, said = itertools.count(), itertools.chain(struct.pack(">I", 1000), itertools.repeat(ord("x")))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    sock = SimpleNamespace(settimeout=lambda _: None, recv=lambda _: bytes([next(said)]))
    with pytest.raises(TimeoutError):
        sandbox_jobs.receive(sock, 100)


def test_processes_of_a_machine_share_its_cores(monkeypatch):
    at_once, semaphore = [], threading.Semaphore
    monkeypatch.setattr(sandbox, "_cores", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(threading, "Semaphore", lambda n: at_once.append(n) or semaphore(n))
    run_tests([job(GOOD)] * 8)
    assert at_once[0] == 2


@pytest.mark.parametrize(
    "version, texts, right",
    [
        (0, ["150000 100000"], 2),
        (0, ["max 100000"], 4),
        (0, ["900000 100000"], 4),
        (1, ["20000", "100000"], 1),
        (1, ["-1", "100000"], 4),
    ],
)
def test_a_container_with_a_quota_of_time_has_fewer_cores(version, texts, right, tmp_path, monkeypatch):
    # Else many jobs would run at once, and slow but correct answers among them be out of time.
    files = [tmp_path / str(i) for i in range(len(texts))]
    for file, text in zip(files, texts):
        file.write_text(text + "\n")
    absent = [str(tmp_path / "absent")]
    monkeypatch.setattr(sandbox, "CPU_QUOTA", [absent, files] if version else [files, absent])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    at_once, semaphore = [], threading.Semaphore
    monkeypatch.setattr(threading, "Semaphore", lambda n: at_once.append(n) or semaphore(n))
    assert [r.reason for r in run_tests([job(GOOD)] * 8)] == [""] * 8
    assert at_once[0] == right


def test_an_endless_text_is_not_run():
    result = run_tests([job("x = 1\n" * 200_000 + GOOD)])[0]
    assert (result.passed, result.reason) == (0, "more than 1000000 characters")


def test_the_standard_library_is_all_there_is():
    code = "import sys\ndef f(): return [path for path in sys.path if 'packages' in path]"
    assert run_tests([job(code, "assert f() == []")])[0].reason == ""


def test_limits_of_the_kernel():
    """For when the grader is not there to mind them; a memory dump would be written where the system says."""
    code = """
        import resource
        def f(name): return resource.getrlimit(getattr(resource, "RLIMIT_" + name))[1]
    """
    tests = "assert 0 < f('CPU') <= 7 and 0 < f('NPROC') <= 4096 and f('CORE') == 0"
    assert run_tests([job(code, tests)], timeout=5)[0].reason == ""


def test_system_calls_of_another_kind_end_the_process():
    """x86's 32-bit pointers have numbers of their own for all calls."""
    if platform.machine() != "x86_64":
        pytest.skip("x86_64 only")
    code = "import ctypes\ndef f(): return ctypes.CDLL(None).syscall(0x40000000 + 39)"
    assert run_tests([job(code, "assert f()")])[0].reason == "the code ended the interpreter"


def parent_of(pid):
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def descendants():
    """Processes whose ancestor this one is, without those of tests/processes.py."""
    parents = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if "from multiprocessing" not in pathlib.Path(f"/proc/{pid}/cmdline").read_text():
                parents[pid] = parent_of(pid)
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


# pwrite(2) of a bad address is an error and no crash, so a heap can be searched. The search knows the beginning of the
# text, its length and its checksum, and so does not find itself.
SEARCH = """
import gc, os, sys, zlib, ctypes
libc = ctypes.CDLL(None)
mine = '_'.join(['needle', 'that', 'the', 'candidate', 'holds'])
def in_memory(length, checksum):
    file = os.open('page', os.O_RDWR | os.O_CREAT)
    for start in {id(object()) >> 28, id(os) >> 28, id(mine) >> 28}:
        before = b''
        for page in range((start << 28) - (1 << 26), (start << 28) + (1 << 28) + (1 << 26), 4096):
            if libc.pwrite(file, ctypes.c_void_p(page), 4096, 0) == 4096:
                block = before + os.pread(file, 4096, 0)
                at = block.find(b'needle')
                while at >= 0:
                    if zlib.crc32(block[at:at + length]) == checksum: return True
                    at = block.find(b'needle', at + 1)
                before = block[-100:]
    return False
def in_objects(length, checksum):
    found, seen = gc.get_objects(), set()
    for _ in range(3):
        found = [o for o in gc.get_referents(*found) if id(o) not in seen]
        seen.update(map(id, found))
        for o in found:
            if type(o) is str and o.isascii() and 'needle' in o:
                at = o.index('needle')
                if zlib.crc32(o[at:at + length].encode()) == checksum: return True
    return False
def in_frames(length, checksum):
    frame = sys._getframe()
    while frame:
        for o in [*frame.f_locals.values(), *frame.f_globals.values(), *frame.f_code.co_consts]:
            if type(o) is str and len(o) == length and zlib.crc32(o.encode()) == checksum: return True
        frame = frame.f_back
    return False
"""


@pytest.mark.parametrize("search", ["in_memory", "in_objects", "in_frames"])
def test_the_tests_are_not_where_the_candidate_can_look(search):
    own = b"needle_that_the_candidate_holds"
    tests = f"""
hidden = {HIDDEN!r}
assert {search}({len(own)}, {zlib.crc32(own)})
assert not {search}({len(HIDDEN)}, {zlib.crc32(HIDDEN.encode())}), {HIDDEN!r}
"""
    # The jobs around hold it too: the template must not have passed it on.
    around = [Job([GOOD + f"\nx = {HIDDEN!r}"], TESTS + f"\nhidden = {HIDDEN!r}", ["f"])] * 4
    results = run_tests([*around, Job([SEARCH], tests, [search]), *around])
    assert [r.reason for r in results] == [""] * 9


def test_a_note_for_a_later_job():
    leave = """
        import builtins, os, sys, tempfile
        def f(x):
            builtins.note = sys.note = x
            for descriptor in 0, 1, 2: os.set_blocking(descriptor, False)
            for place in '.', '/', '/tmp', '/dev/shm', '/var/tmp', os.path.dirname(os.__file__):
                try: open(os.path.join(place, 'note'), 'w').close()
                except OSError: pass
    """
    find = """
        import builtins, os, sys
        def f():
            found = [hasattr(builtins, 'note'), hasattr(sys, 'note')]
            found += [not os.get_blocking(descriptor) for descriptor in (0, 1, 2)]
            for place in '.', '/', '/tmp', '/dev/shm', '/var/tmp', os.path.dirname(os.__file__):
                found.append(os.path.exists(os.path.join(place, 'note')))
            return any(found)
    """
    found = job(find, "assert not f()")
    results = run_tests([job(leave, "assert f(5) is None"), found, found, found, found])
    assert [r.reason for r in results] == [""] * 5


def test_a_lock_is_seen_by_nobody():
    """A job beside could read it, and the kernel would keep as many as are asked for."""
    code = """
        import fcntl, os, time
        def f(seconds):
            with open(os.__file__) as file:
                fcntl.lockf(file, fcntl.LOCK_SH, 1, 1000), fcntl.flock(file, fcntl.LOCK_EX)
                time.sleep(seconds)
            return True
    """
    with concurrent.futures.ThreadPoolExecutor() as pool:
        job_of = pool.submit(run_tests, [job(code, "assert f(1.5)")])
        time.sleep(0.7)
        with open(os.__file__) as file:
            asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 1000, 1, 0)
            found, *_ = struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_GETLK, asked))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert not job_of.done() and found == fcntl.F_UNLCK
        assert job_of.result()[0].reason == ""


def test_random_numbers_are_not_shared_with_the_tests():
    # Both processes are seeded, so that a reward repeats; from the same seed the candidate would know what is asked.
    tests = "import random\nassert [random.random() for _ in range(3)] != f()"
    guess = "import random\ndef f(): return [random.random() for _ in range(3)]"
    assert run_tests([job(guess, tests)])[0].reason == ""


def test_an_exception_is_caught_by_its_built_in_base():
    code = """
        import json
        class Bad(ValueError): pass
        class Worse(Bad): pass
        class Own(Exception): pass
        class End(StopIteration): pass
        class Exit(SystemExit): pass
        kinds = [ValueError, Bad, Worse, Own, End, Exit]
        def f(x): json.loads('{') if x < 0 else exec('raise kinds[x]("text")', {'kinds': kinds, 'x': x})
    """
    tests = """
def caught(x, kind):
    try:
        f(x)
    except kind as error:
        return str(error)
for x in -1, 0, 1, 2:
    assert "property name" in caught(x, ValueError) if x < 0 else caught(x, ValueError) == "text"
assert "text" in caught(3, Exception)
for x in 4, 5:  # the one would end a loop of the tests, the other the grader
    assert caught(x, Exception) == ["End: text", "Exit: text"][x - 4]
"""
    result = run_tests([job(code, tests)._replace(examples=["assert f(1)", "assert f(3)"])])[0]
    assert result.outcomes == [True] * 7, result
    assert result.examples == ["raised Bad: text", "raised Own: text"]


def test_an_exception_keeps_its_arguments():
    """Those of some have to be of certain types, and two of an OSError are its number and its text."""
    code = """
        class Own(KeyError):
            def __str__(self): return "own words"
        def f(x): return [lambda: b"\\xff".decode(), lambda: {}["a"], lambda: open("/none"), lambda: 1 / 0, own][x]()
        def own(): raise Own([f], 1)
    """
    tests = """
def caught(x, kind):
    try:
        f(x)
    except kind as error:
        return error
assert isinstance(caught(0, ValueError), UnicodeDecodeError)
assert caught(1, KeyError).args == ("a",) and str(caught(1, KeyError)) == "'a'"
assert caught(2, FileNotFoundError).errno == 2
assert str(caught(3, ArithmeticError)) == "division by zero"
assert caught(4, KeyError).args == ("own words",)
"""
    assert run_tests([job(code, tests)])[0].outcomes == [True] * 5


def test_an_exception_may_have_no_text():
    """Of 10**5000 str is an error, in the candidate and in the grader."""
    code = """
        class Wordless(ValueError):
            def __str__(self): return 5
        class Ending(ValueError):
            def __str__(self): raise SystemExit
        def f(x):
            if x < 4: return x
            raise [Wordless("a"), Ending("b"), ValueError(10 ** 5000), KeyError((1, (2, [3])))][x - 4]
        def g(text): return eval(text)
    """
    tests = """
for x in range(10):
    assert f(x) == x
try:
    f(7)
except KeyError as error:
    assert error.args == ((1, (2, "[3]")),)
try:
    g("1 +")
except SyntaxError as error:
    assert error.lineno == 1
assert f(1) == 1
"""
    for cause in "", "import sys\nsys.set_int_max_str_digits(0)\n":
        result = run_tests([Job([cause + textwrap.dedent(code)], tests, ["f", "g"])])[0]
        assert result.outcomes == [True] * 4 + [False] * 6 + [True] * 3, result


def test_an_error_of_the_candidates_is_not_read_from_the_graders_memory():
    """Python reads the byte that a UnicodeDecodeError names wherever it lies."""
    code = """
        import json, os, struct
        def f(x):
            if x == 0: return 0
            kinds = ["UnicodeDecodeError", "UnicodeError", "ValueError"]
            text = json.dumps(["error", kinds, "t", ["utf-8", ["bytes", "78"], -x, 1 - x, "r"]]).encode()
            os.write(3, struct.pack(">I", len(text)) + text)
            return 0
    """
    for place in 1, 10**15:
        result = run_tests([job(code, f"assert f(0) == 0\nassert f({place}) == 1")])[0]
        assert (result.outcomes, result.reason) == ([True, False], "UnicodeDecodeError: t")


def test_no_huge_pages():
    """One stays whole while a part of it is mapped, and only the part is counted."""
    run_tests([job(GOOD)])
    templates, without, ended = descendants(), set(), threading.Event()

    def look():  # a process begins without limits
        while not ended.is_set():
            for pid in descendants() - templates:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/status") as file:
                    without.update({pid} if "THP_enabled:\t0\n" in file else ())

    looker = threading.Thread(target=look)
    looker.start()
    run_tests([job("import time\ndef f(x):\n    time.sleep(60)")], 1)
    ended.set()
    looker.join()
    assert len(without) >= 2  # the candidate and the grader


def test_a_module_path_may_hold_a_file(tmp_path):
    """As python311.zip, where there is one: its rights are those of a folder, which Landlock gives to no file."""
    (tmp_path / "some.zip").touch()
    said = in_a_process(f"""
        kernel.READABLE.append({str(tmp_path / "some.zip")!r})
        kernel.call(kernel.libc.prctl, kernel.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        kernel.restrict_files([])
        print("restricted")
    """)
    assert "restricted" in said


def test_code_may_ask_for_its_folder():
    code = "import os\nHERE = os.path.dirname(__file__)\ndef f(): return os.path.samefile(HERE, os.getcwd())"
    assert run_tests([job(code, "assert f()")])[0].reason == ""


def test_same_code_same_outcome():
    code = "import random\ndef f(): return [random.random(), list({'a', 'b', 'c', 'd'}), hash('x')]"
    tests = "value = f()\nassert value == 0, value\nraise ValueError(repr(value))"
    first, second = run_tests([job(code, tests)] * 2)
    sandbox.close()
    (third,) = run_tests([job(code, tests)])
    examples = [r._replace(seconds=0) for r in (first, second, third)]
    assert examples[0] == examples[1] == examples[2]


def test_without_namespaces_too_random_numbers_repeat_and_temporary_files_are_ones_own():
    in_a_process("""
        without('unshare')
        code = "import random, tempfile\\nX = random.random()\\ndef f(): return X"
        code += "\\ndef g():\\n    with tempfile.TemporaryFile() as file: return file.write(b'abc')"
        first, second = run_tests([job(code, 'raise ValueError(f())')] * 2)
        assert first.reason == second.reason and first.reason.startswith('ValueError: 0.')
        assert run_tests([job(code, 'assert g() == 3', ['g'])])[0].reason == ''
    """)


def test_plain_data_crosses_unchanged():
    values = """
import collections, datetime, math
from decimal import Decimal
from fractions import Fraction
values = [None, True, 0, -1, 2**53, -(2**200), 1.5, -0.0, float('inf'), 'a\\ud800\\0', b'\\xff', bytearray(b'x'),
    3 + 4j, slice(1, None, 2), [], [1, [2, (3, {4})]], (), ((),), set(), frozenset({1}), {},
    {1: {'a': [None]}, (1, 2): 'x', 'dict': ['list']},
    range(1, 10, 3), collections.deque([1, 2], 5), collections.Counter('abca'), collections.OrderedDict(b=1, a=2),
    datetime.datetime(2020, 1, 2, 3, 4, 5), datetime.date(2020, 1, 2), datetime.time(3, 4, 5, 6), ['list', 1],
    datetime.timedelta(-3, 4, 5), Fraction(-1, 3**200), Decimal('-1.10'), Decimal('Infinity'), {1: 2, 'a': []}.keys(),
    {1: 2, 'a': (3,)}.items(), ['object', 0], 'é', 10**5000]
for value in values:
    assert f(value) == value and type(f(value)) is type(value), value
assert math.isnan(f(float('nan')))
assert len(f('\\ud83d\\ude00')) == 2
assert str(f(-0.0)) == '-0.0'
assert f(collections.deque([1], 7)).maxlen == 7
assert str(f(Decimal('1.10'))) == '1.10'
values = {1: [2], 3: [2]}.values()
assert list(f(values)) == [[2], [2]] and len(f(values)) == 2 and type(f(values)) is type(values)
"""
    result = run_tests([job("def f(x): return x", values)])[0]
    assert (result.reason, result.total) == ("", 39 + 6)


def test_iterators_cross_as_what_is_left_of_them():
    code = """
        import collections, itertools, re
        def f(x): yield from x
        def g(x): return [map(str, x), filter(None, x), zip(x, x), reversed(x), iter(x), itertools.chain(x)]
        def take(iterator, n): return list(itertools.islice(iterator, n))
        def kinds(x): return [iter(x), reversed(dict.fromkeys(x)), re.finditer("a", x), iter(collections.deque(x))]
        count = itertools.count
        def endless():
            yield from count()
        class Own:
            def __iter__(self): return self
            def __next__(self): raise ValueError
    """
    tests = """
assert set(f([1, 2, 1])) == {1, 2}
assert [list(part) for part in g([1, 0])] == [['1', '0'], [1], [(1, 1), (0, 0)], [0, 1], [1, 0], [1, 0]]
assert next(f([5])) == 5
assert [len(list(part)) for x in ("ab", "\\xe9b") for part in kinds(x)] == [2, 2, 1, 2, 2, 2, 0, 2]
assert f([1]) != [1] and f([]) and f([1]) != f([1])  # as in Python
iterator = f([1, 2])
assert [*iterator, *iterator] == [1, 2]
assert take(f([1, 2, 3]), 2) == [1, 2]
for start in count(), endless():
    for after in 0, 3:  # what was given back goes on where it was
        assert take(start, 3) == [after, after + 1, after + 2]
assert take([7], 1) == [7] and Own() != 3
"""
    names = ["f", "g", "kinds", "take", "count", "endless", "Own"]
    result = run_tests([job(code, tests, names)._replace(examples=["assert f([1]) == [1]"])])[0]
    assert (result.reason, result.total) == ("", 12)
    assert result.examples == ["returned <iterator>"]


def test_tests_may_pass_iterators():
    code = """
        def f(x): return sum(x)
        def first(x): return next(x)
    """
    tests = """
assert f(iter([1, 2])) == 3
assert f(map(abs, (-1, -2))) == 3
assert f(n * n for n in range(3)) == 5
assert f(itertools.repeat(2, 4)) == 8
assert first(reversed("ab")) == "b"
"""
    whole = job(code, tests, ["f", "first"])._replace(setup="import itertools")
    endless = job(code, "assert first(itertools.count()) == 0", ["first"])._replace(setup="import itertools")
    held, too_many = run_tests([whole, endless])
    assert (held.reason, held.total) == ("", 5)
    assert too_many.passed == 0 and "100000 items" in too_many.reason


def test_an_attribute_of_an_object_that_tests_only_pass_on_is_not_set():
    code = """
        class Node:
            def __init__(self, value): self.value, self.left = value, None
        def total(node): return node.value + (total(node.left) if node.left else 0)
    """
    tests = "root = Node(1)\nroot.left = Node(2)\nassert total(root) == 3\nassert total(Node(1)) == 1"
    result = run_tests([job(code, tests, ["Node", "total"])])[0]
    assert (result.passed, result.total) == (0, 2) and "set left of an object" in result.reason


def test_tests_may_exit_when_all_of_them_ran():
    tests = "assert f(1) == 2\nif f(2) != 3: exit(1)\nquit()"
    right, wrong = run_tests([job(code, tests) for code in ("def f(x): return x + 1", "def f(x): return 2")])
    assert (right.passed, right.reason) == (1, "")
    assert (wrong.passed, wrong.total) == (1, 2) and "exit status 1" in wrong.reason


def test_subclasses_of_plain_types_are_compared_by_the_plain_part():
    code = """
        import collections, enum
        Pair = collections.namedtuple('Pair', 'a b')
        class Level(enum.IntEnum): low, high = 0, 9
        class Name(str, enum.Enum): red = 'r'
        class Length(float):
            def twice(self): return 2 * self
        class Colour(enum.Enum): red = 1
        class Odd(int):
            __eq__ = lambda self, other: True
            __hash__ = int.__hash__
        def level(x): return Level(x)
        def values(): return [Pair(1, Pair(Level.high, 'x')), Name.red, Length(1.5), Level.low]
        def total(pairs): return sum(p.a * p.b for p in pairs)
        def twice(length): return length.twice()
        def others(): return [Colour.red, Odd(1)]
    """
    tests = """
assert level(9) == 9 and not level(0) and level(9) + 1 == 10
assert values() == [(1, (9, 'x')), 'r', 1.5, 0]
assert total([Pair(1, 2), Pair(3, 4)]) == 14  # given back as the objects that they are
assert twice(values()[2]) == 3.0
assert type(Pair(1, 2)) is not tuple and hash(Pair(1, 2)) == hash((1, 2))
assert 1 not in others()
"""
    names = ["Pair", "level", "values", "total", "twice", "others"]
    result = run_tests([job(code, tests, names)._replace(examples=["assert Pair(1, 2) == 3"])])[0]
    assert (result.reason, result.total, result.examples) == ("", 6, ["returned (1, 2)"])


def test_arguments_that_the_call_changes_are_changed_for_the_tests():
    code = """
        def f(a, b, c, d, e, g=([],)):
            a.append(4); b.add(4); c['x'] = 4; d.appendleft(4); e[0][0] = 4; g[0].append(4)
            a, b = [9], {9}
            return None
    """
    tests = """
from collections import deque
a, b, c, d, e = [1], {1}, {}, deque([1]), [[0]]
g, same = ([1], {}), a
assert f(a, b, c, d, e, g) is None
assert same is a and a == [1, 4]
assert b == {1, 4}
assert c == {'x': 4}
assert d == deque([4, 1])
assert e == [[4]]
assert g == ([1, 4], {})
a, b = [], [2]
assert f(b={1}, e=[b], d=deque(), c={}, a=a) is None
assert a == [4]
"""
    assert run_tests([job(code, tests)])[0].reason == ""


def test_objects_can_be_given_back_but_equal_nothing():
    code = """
        class Pair:
            def __init__(self, a, b): self.a, self.b = a, b
            def __eq__(self, other): return True
        def total(pairs): return sum(p.a * p.b for p in pairs)
    """
    tests = """
assert total([Pair(1, 2), Pair(3, 4)]) == 14
assert not (Pair(1, 2) == Pair(1, 2))
assert not (Pair(1, 2) == 3)
assert [Pair(1, 2)] != [3]
"""
    assert run_tests([job(code, tests, ["Pair", "total"])])[0].reason == ""
    lies = "class T:\n    __bool__ = lambda self: False\n    __sub__ = lambda self, other: 0\ndef f(): return T()"
    truth = run_tests([job(lies, "assert f()\nassert not f()\nassert abs(f() - 5) < 1\nassert f() > 3")])[0]
    assert truth.outcomes == [True, False, False, False]


# ---------------------------------------------------------------- classes and their objects

# The tests keep to what a test of a class does: they construct, call, read, set, count, iterate, and read a file.
CLASS_TESTS = """
import unittest

class Test(unittest.TestCase):
    def setUp(self): self.account = Account("Ann", 5)
    def test_result(self): self.assertEqual(self.account.deposit(7), 12)
    def test_attribute(self): self.account.deposit(8); self.assertEqual(self.account.balance, 13)
    def test_set(self): self.account.balance = 20; self.assertEqual(self.account.deposit(1), 21)
    def test_container(self): self.account.deposit(3); self.assertEqual(self.account.log, [3])
    def test_changed_container(self): self.account.log.append(4); self.assertEqual(self.account.total(), 4)
    def test_almost(self): self.assertAlmostEqual(self.account.deposit(0.5), 5.5)
    def test_greater(self): self.assertGreater(self.account.deposit(1), 5)
    def test_true(self): self.account.deposit(2); self.assertTrue(self.account.balance == 7)
    def test_false(self): self.assertFalse(abs(self.account.deposit(4) - 9) > 0.1)
    def test_in(self): self.account.deposit(6); self.assertIn(6, self.account); self.assertNotIn(5, self.account)
    def test_len(self): self.account.deposit(6); self.assertEqual(len(self.account), 1)
    def test_item(self): self.account.deposit(6); self.account[0] = 9; self.assertEqual(self.account[0], 9)
    def test_raises(self): self.assertRaises(ValueError, self.account.deposit, -1)
    def test_file(self):
        self.account.deposit(5)
        self.account.save("log.txt")
        with open("log.txt") as file: self.assertEqual(file.read(), "5")
    def test_file_in(self):
        with open("in.txt", "w") as file: file.write("31")
        self.assertEqual(self.account.load("in.txt"), 36)

for test in unittest.defaultTestLoader.loadTestsFromTestCase(Test):
    result = unittest.TestResult()
    test.run(result)
    assert result.wasSuccessful()
"""
GOOD_CLASS = """
class Account:
    def __init__(self, name, balance): self.name, self.balance, self.log = name, balance, []
    def deposit(self, amount):
        if amount < 0: raise ValueError(amount)
        self.balance += amount
        self.log.append(amount)
        return self.balance
    def total(self): return sum(self.log)
    def save(self, path):
        with open(path, "w") as file: file.write(" ".join(map(str, self.log)))
    def load(self, path):
        with open(path) as file: return self.deposit(int(file.read()))
    def __len__(self): return len(self.log)
    def __iter__(self): return iter(self.log)
    def __getitem__(self, i): return self.log[i]
    def __setitem__(self, i, value): self.log[i] = value
"""
BAD_CLASS = "class Account:\n    def __init__(self, *a): pass\n    def __getattr__(self, name): return lambda *a: 3"


def class_job(code, tests=CLASS_TESTS, names=("Account",)):
    return job(code, tests, names)._replace(objects=True)


CLASS_HACKS = {
    "instance equal to everything": """
        class Account:
            def __new__(cls, *a): return object.__new__(cls)
            def __init__(self, *a): pass
            def __getattr__(self, name): return self
            def __call__(self, *a): return self
            def __eq__(self, other): return True
            __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
            __sub__ = __rsub__ = __abs__ = __round__ = lambda self, *a: 0
            __hash__ = object.__hash__
            __len__ = lambda self: self
            __getitem__ = lambda self, i: self
            __setitem__ = lambda self, *a: None
            __iter__ = lambda self: iter([self])
    """,
    "int equal to everything": """
        class Any(int):
            def __eq__(self, other): return True
            __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__
            __sub__ = __rsub__ = lambda self, other: 0
            __hash__ = int.__hash__
        class Log(list):
            def __eq__(self, other): return True
            __contains__ = __eq__
        class Account:
            def __init__(self, *a): self.balance, self.log = Any(), Log()
            def __getattr__(self, name): return lambda *a: Any()
            def __len__(self): return Any(2)
            def __iter__(self): return iter([Any()])
            def __getitem__(self, i): return Any()
            def __setitem__(self, *a): pass
    """,
    "attributes that lie": """
        class Account:
            def __init__(self, *a): pass
            def __getattribute__(self, name):
                if name == '__class__': return int
                if name in ('assertEqual', 'wasSuccessful', '_testMethodName'): return lambda *a: True
                return type(name, (), {'__call__': lambda s, *a: True, '__eq__': lambda s, other: True})()
            def __setattr__(self, *a): pass
    """,
    "a class that is an instance of everything": """
        class Meta(type):
            def __instancecheck__(cls, x): return True
            def __eq__(cls, x): return True
            def __hash__(cls): return 0
            def __call__(cls, *a): return cls
            def __getattr__(cls, name): return cls
        class Account(metaclass=Meta): pass
    """,
    "no method returns": """
        class Account:
            def __init__(self, *a):
                while True: pass
    """,
    "an attribute that never arrives": """
        class Account:
            def __init__(self, *a): pass
            def __getattr__(self, name):
                while True: pass
    """,
    "endless iteration, endless length": """
        class Account:
            def __init__(self, *a): pass
            def __iter__(self):
                while True: yield 1
            def __len__(self): return 10 ** 30
    """,
    "the process ends in the constructor": "import os\nclass Account:\n    def __init__(self, *a): os._exit(0)",
    "exit in the constructor": "class Account:\n    def __init__(self, *a): raise SystemExit(0)",
    "SkipTest": "import unittest\nclass Account:\n    def __init__(self, *a): raise unittest.SkipTest('no')",
    "unittest patched": """
        import unittest
        for name in dir(unittest.TestCase):
            if name.startswith('assert') or name == 'run': setattr(unittest.TestCase, name, lambda *a, **k: None)
        unittest.TestResult.wasSuccessful = lambda self: True
        class Account:
            def __init__(self, *a): pass
    """,
    "replies with containers and files that are none": """
        import os, struct
        replies = [b'["value", ["list"], [], 5, []]', b'["value", ["list", 3], [], "x", {"../x": "41"}]',
                   b'["value", 3, [], null, {"/tmp/x": "41"}]', b'["value", 3, [], 1, {"a/b": null}]',
                   b'["value", ["object", "Account"], [], {}]', b'["value", ["object", [0]], [], {"": ""}]',
                   b'["value", 3, [], 0, {"\\u0000": "41"}]', b'["value", 3, [], 0, {".": "41"}]',
                   b'["value", 3, [], 0, {"x": 5}]', b'["value", ["type", "eval"], [], {}]']
        class Account:
            def __init__(self, *a):
                for text in replies: os.write(3, struct.pack('>I', len(text)) + text)
    """,
    "many files": """
        class Account:
            def __init__(self, *a):
                for i in range(500): open(f'file{i}', 'w').close()
    """,
    "large files": """
        class Account:
            def __init__(self, *a):
                with open('large', 'wb') as file: file.write(bytes(5_000_000))
    """,
    "a file that is a link, a folder, a pipe": """
        import os
        class Account:
            def __init__(self, *a): self.balance = 0
            def deposit(self, amount): return None
            def save(self, path):
                for make in (lambda: os.symlink('/proc/self/environ', path), lambda: os.mkfifo(path),
                             lambda: os.mkdir(path)):
                    try: make(); return
                    except OSError: pass
            load = save
    """,
}


@pytest.mark.parametrize("name", CLASS_HACKS)
def test_class_hack(name):
    attack = class_job(CLASS_HACKS[name])
    good, bad, hacked, good_after, bad_after = run_tests(
        [class_job(GOOD_CLASS), class_job(BAD_CLASS), attack, class_job(GOOD_CLASS), class_job(BAD_CLASS)], 1.0
    )
    assert good.reason == good_after.reason == "" and good.total == 15
    assert bad.passed == bad_after.passed == 0 and bad.total == 15
    assert hacked.passed == 0, hacked
    assert hacked.reason


def test_the_tests_own_data_is_out_of_the_candidates_reach():
    # Whatever it was given or has returned, it changes later: the tests' arguments are theirs again after the call,
    # and what it returned was a copy.
    code = """
        class Thief:
            def __init__(self): self.seen = []
            def keep(self, x): self.seen.append(x); return x
            def mine(self): self.seen.append([1]); return self.seen[-1]
            def spoil(self):
                for x in self.seen: x.clear()
    """
    tests = """
thief = Thief()
given = [1, 2]
returned = thief.keep(given)
mine = thief.mine()
thief.spoil()
assert given == [1, 2]
assert returned == [1, 2]
assert mine == [1]
"""
    assert run_tests([class_job(code, tests, ["Thief"])])[0].reason == ""


def test_expected_values_never_reach_the_candidate():
    # It writes down all that it is ever told: names, arguments, operators, files.
    code = """
        heard = []
        class Spy:
            def __getattribute__(self, name): heard.append(name); return self
            def __call__(self, *a, **k): heard.append((a, k)); return self
            def __len__(self): return 3
            def __iter__(self): return iter([1, 2])
        names = 'eq ne lt le gt ge contains sub rsub add radd mul rmul mod rmod and or xor round bool float index'
        for name in names.split():
            setattr(Spy, f'__{name}__', lambda self, *a, name=name: heard.append((name, a)) or NotImplemented)
        Spy.__hash__ = lambda self: heard.append('hash') or 0
        def report(): return repr(heard)
    """
    lines = ["s.x == 4711", "4711 == s", "s != 4711", "s < 4711", "abs(s.f(1) - 4711) < 1", "4711 in s", "s in [4711]"]
    lines += [
        "{s: 1}.get(4711)",
        "s.g(2) + 4711",
        "4711 - s",
        "round(s, 4711)",
        "sorted([s, 4711])",
        "divmod(s, 4711)",
    ]
    lines += ["isinstance(4711, s)", "s in {4711: 1}", "bool(s)", "float(s)", "4711 % s", "'4711' % s", "s & 4711"]
    guarded = "".join(f"try: {line}\nexcept Exception: pass\n" for line in lines)
    assert_equal = (
        "for name in ('Equal', 'AlmostEqual', 'Greater', 'In', 'ListEqual', 'Is', 'CountEqual', 'IsInstance'):\n"
    )
    assert_equal += "    for pair in ((s, 4711), (4711, s), ([s], [4711]), (s.h(), '4711')):\n"
    assert_equal += (
        "        try: getattr(unittest.TestCase(), 'assert' + name)(*pair)\n        except Exception: pass\n"
    )
    tests = f"import unittest\ns = Spy()\n{guarded}{assert_equal}assert '4711' not in report()\n"
    tests += "assert 'f' in report() and '(1,)' in report()\nassert s(4711) is not None\nassert '4711' in report()"
    result = run_tests([class_job(code, tests, ["Spy", "report"])])[0]
    assert (result.reason, result.total) == ("", 4)


def test_objects_of_classes_cross_by_identity():
    code = """
        class Node:
            kinds = {'a': int, 'b': [str, dict], 'n': type(None)}
            def __init__(self, value, *children): self.value, self.children = value, list(children)
            def first(self): return self.children[0]
            def same(self): return self
            def grow(self, child): self.children.append(child)
            def convert(self, function): return function(self.value)
            __call__ = convert
        class Leaf(Node):
            def __init__(self, value): super().__init__(value)
            def __len__(self): return 0
            @property
            def twice(self): return [self.value] * 2
    """
    tests = """
leaf, other = Leaf('7'), Leaf('7')
node = Node(1, leaf, other)
assert node.first() == leaf and node.same() == node and node.children == [leaf, other]
assert not node.first() == other and leaf != other and not leaf == 7
assert len({leaf, node.first(), other}) == 2
assert isinstance(leaf, Node) and not isinstance(node, Leaf) and not isinstance(7, Node)
assert bool(leaf) and len(leaf) == 0
assert Node.kinds == {'a': int, 'b': [str, dict], 'n': type(None)}
assert leaf.convert(int) == 7 and leaf(len) == 1
node.children.append(leaf)
assert len(node.children) == 3
node.children[0].value = '9'
assert leaf.value == '9' and leaf.twice == ['9', '9']
children = node.children
children.pop()
node.first()
node.grow(other)
assert node.children == [leaf, other, other] and children == [leaf, other]
leaf.twice.append(1)
assert leaf.twice == ['9', '9']
for change in lambda x: None, object():
    try:
        leaf.convert(change)
        assert False
    except TypeError:
        pass
"""
    result = run_tests([class_job(code, tests, ["Node", "Leaf"])])[0]
    assert result.reason == "", result
    assert result.total == 11


def test_without_objects_the_tests_can_only_give_them_back():
    tests = "a = Account('Ann', 5)\nassert a.balance == 5\nassert a.deposit(3) == 8\nassert len(a) == 0"
    plain = run_tests([job(GOOD_CLASS, tests, ["Account"])])[0]
    assert plain.outcomes == [False] * 3


def test_files_cross_both_ways_and_go_with_the_job():
    code = """
        import os, sqlite3
        class Store:
            def __init__(self): self.db = sqlite3.connect('store.db')
            def run(self, sql):
                rows = self.db.execute(sql).fetchall()
                self.db.commit()
                return rows
            def listing(self): return sorted(os.listdir('.'))
            def remove(self, name): os.remove(name)
    """
    tests = """
import os, sqlite3
store = Store()
store.run('create table t (x)')
store.run('insert into t values (1)')
db = sqlite3.connect('store.db')
assert db.execute('select * from t').fetchall() == [(1,)]
db.execute('insert into t values (2)')
db.commit()
assert store.run('select * from t') == [(1,), (2,)]
store.run('insert into t values (3)')
assert db.execute('select count(*) from t').fetchall() == [(3,)]
open('own.txt', 'w').close()
assert store.listing() == ['own.txt', 'store.db']
store.remove('own.txt')
assert not os.path.exists('own.txt')
os.remove('store.db')
assert store.listing() == []
"""
    assert [r.reason for r in run_tests([class_job(code, tests, ["Store"])] * 3)] == [""] * 3


@pytest.mark.parametrize("missing", ["unshare", "landlock", "seccomp"])
def test_classes_and_their_files_with_a_layer_less(missing):
    in_a_process(f"""
        without({missing!r})
        attack = class_job(CLASS_HACKS["a file that is a link, a folder, a pipe"])
        results = run_tests([class_job(GOOD_CLASS), class_job(BAD_CLASS), attack, class_job(GOOD_CLASS)])
        assert [(r.passed, r.total) for r in results] == [(15, 15), (0, 15), (0, 15), (15, 15)], results
    """)


@pytest.mark.parametrize(
    "changes",
    [
        {"../x": "41"},
        {"/tmp/tutti_x": "41"},
        {"a/b": "41"},
        {"..": None},
        {"": "41"},
        {"good": "41", "../x": None},
        {"x\0": "41"},
        {"x": "4"},
        {"x": 5},
        {f"file{i}": "" for i in range(sandbox_jobs.MAX_FILES + 1)},
        {"x": "00" * (sandbox_jobs.MAX_FOLDER + 1)},
        [],
    ],
)
def test_hostile_files_are_not_written(changes, tmp_path, monkeypatch):
    (tmp_path / "x").write_text("outside")
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    with pytest.raises((ValueError, TypeError, AttributeError)):
        sandbox_jobs._Folder().apply(changes)
    assert os.listdir(".") == [] and sorted(os.listdir("..")) == ["inside", "x"]
    assert (tmp_path / "x").read_text() == "outside" and not os.path.exists("/tmp/tutti_x")


def test_modules_that_the_candidate_leaves_in_the_folder_are_not_imported():
    # The tests run where the candidate's files arrive, and may import what is not loaded yet, or not there at all.
    code = """
        import os
        class Planter:
            def __init__(self):
                for name in 'wave', 'tutti_absent', 'usercustomize':
                    with open(name + '.py', 'w') as file: file.write('import os; os._exit(0)')
    """
    tests = """
import os
Planter()
assert sorted(os.listdir('.')) == ['tutti_absent.py', 'usercustomize.py', 'wave.py']
import wave
assert wave.open
try: import tutti_absent
except ModuleNotFoundError as error: missing = error.name
assert missing == 'tutti_absent'
"""
    assert run_tests([class_job(code, tests, ["Planter"])])[0].outcomes == [True] * 3


def test_a_file_is_not_written_through_a_link(tmp_path, monkeypatch):
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    folder = sandbox_jobs._Folder()
    os.symlink("../outside", "link")
    os.symlink("/proc/self/status", "other")
    assert folder.changes() == {}  # a link is no plain file
    with pytest.raises(OSError):
        folder.apply({"link": "41"})
    assert os.listdir("..") == ["inside"]


def test_a_dead_candidate_passes_nothing_more():
    code = "import os\nclass C:\n    def end(self): os._exit(0)"
    tests = """
c = C()
def raises():
    try: c.end()
    except Exception: return True
assert isinstance(c, C)
assert raises()
assert raises()
"""
    assert run_tests([class_job(code, tests, ["C"])])[0].outcomes == [True, False, False]


def test_asserts_are_counted_one_by_one():
    code = "def f(x):\n    if x == 3: raise ValueError('three')\n    return x if x < 5 else -x"
    tests = """
def close(a, b):
    assert abs(a - b) < 1e-6
def check(candidate):
    assert True, "this says nothing and does not count"
    assert candidate(1) == 1
    assert candidate(5) == 5
    for i in range(6):
        y = candidate(i)
        assert y == i
    close(candidate(2), 2)
    try:
        candidate(3)
        assert False
    except ValueError:
        pass
    assert candidate(
        4
    ) == 4, "over several lines"
check(f)
"""
    result = run_tests([job(code, tests)])[0]
    assert result.outcomes == [True, False, True, True, True, False, True, False, True, True]
    assert (result.passed, result.total) == (7, 10)
    # Nor are there fewer in a round that an error ends. What stands behind a loop is none of its rounds.
    tests = (
        "for i in range(5):\n    y = f(i)\n    assert y == i\n    for k in 0, 1: assert f(k) == k\n    assert y < 9"
    )
    result = run_tests([job(code, tests)])[0]
    assert (result.passed, result.total) == (4 * 4, 4 * 4 + 3)
    inner = "for i in 3, 1:\n    for k in 0, 1: assert f(k) == k\n    y = f(i)\n    assert y == 1\n    assert y == i"
    result = run_tests([job(code, f"{inner}\nelse:\n    assert f(2) == 2")])[0]
    assert (result.passed, result.total) == (2 + 4 + 1, 2 + 2 + 4 + 1)
    # An error between the asserts ends the run; the asserts behind it have failed.
    tests = "assert f(1) == 1\ny = f(3)\nassert f(2) == 2\nassert f(4) == 4"
    result = run_tests([job(code, tests)])[0]
    assert (result.passed, result.total, result.reason) == (1, 3, "ValueError: three")
    # An assert may bind names, and tests may end the interpreter.
    tests = "import sys\ndef check(f):\n    assert (y := f(1)) == 1\n    assert y == 1\ncheck(f)\nsys.exit(0)\n"
    assert run_tests([job(code, tests)])[0].outcomes == [True, True]
    # But not with an error, nor before all asserts have run.
    for ends in tests.replace("exit(0)", "exit(1)"), tests + "assert f(2) == 2", tests + "assert f(2) == 2\n" * 2:
        result = run_tests([job(code, ends)])[0]
        assert result.passed == 2 < result.total and result.reason.startswith("the tests ended with exit status ")
    # What a loop raises may be expected around it.
    expects = "    for x in 3, 1:\n        f(x)\n        assert False, 'no error'"
    for tests in f"try:\n{expects}\nexcept ValueError: pass", f"with contextlib.suppress(ValueError):\n{expects}":
        tests = f"import contextlib\nassert f(1) == 1\n{tests}\nassert f(2) == 2"
        assert run_tests([job(code, tests)])[0].outcomes == [True, True]
        result = run_tests([job("def f(x): return x", tests)])[0]
        assert (result.passed, result.total) == (2, 4)
    # Nor are there fewer asserts if a function of the tests is called several times.
    tests = "def close(a, b):\n    got = f(a)\n    assert got == b\n    assert got < 9\nfor k in 1, 3: close(k, k)\n"
    tests += "close(3, 3)\nclose(4, 4)\ntry: close(3, 3)\nexcept ValueError: pass\nassert f(2) == 2"
    assert run_tests([job(code, tests)])[0].outcomes == [True] * 2 + [False] * 4 + [True] * 3
    # A test that asserts nothing is not passed.
    assert run_tests([job(code, "f(1)")])[0].reason == "no assert ran"


def test_a_test_may_touch_a_file():
    tests = "import pathlib\npathlib.Path('k').touch()\nassert pathlib.Path('k').exists()\nassert f(1) == 2"
    assert run_tests([job(GOOD, tests)])[0].reason == ""


def test_a_candidate_cannot_have_endless_asserts():
    tests = "assert f(1)\nfor x in f(30): assert x"
    endless = run_tests([job("def f(n): return range(1, 10**6)", tests)], timeout=60)[0]
    assert (endless.passed, endless.total, endless.reason) == (0, 1, "more than 100000 asserts")
    # Nor if the one that is too many raises.
    code = "def f(n): return [1] * 99_999 + [None] + [1] * 100"
    raises = run_tests([job(code, tests.replace("assert x", "assert x > 0"))], timeout=60)[0]
    assert (raises.passed, raises.total, raises.reason) == (0, 1, "more than 100000 asserts")


def test_an_assert_in_a_test_method_fails_the_method():
    # It must not be counted beside a method that then passes, or wrong answers would earn half.
    tests = """
import unittest
class Test(unittest.TestCase):
    def test_one(self):
        assert f(1) == 1
    def test_rounds(self):
        for i in range(3):
            assert f(i) == i
for test in unittest.defaultTestLoader.loadTestsFromTestCase(Test):
    result = unittest.TestResult()
    test.run(result)
    assert result.wasSuccessful()
"""
    outcomes = [run_tests([job(f"def f(x): return {x}", tests)])[0].outcomes for x in ("x", "-x", "1")]
    assert outcomes == [[True, True], [False, False], [True, False]]


def test_examples_say_what_happened_and_do_not_count():
    code = "def f(x):\n    if x == 3: raise ValueError('three')\n    return x"
    examples = ["assert f(1) == 1", "assert f(2) == 5", "assert f(3) == 3", "assert g(3) == 3"]
    result = run_tests([Job([code], "assert f(1) == 1", ["f"], examples=examples)])[0]
    assert result.examples == ["", "returned 2", "raised ValueError: three", "NameError: name 'g' is not defined"]
    assert (result.passed, result.total, result.reason) == (1, 1, "")


@pytest.mark.parametrize("text", ["\ud800", "\U0001f600", "\ud800" * 300, "\x1b\x85é"])
def test_what_others_are_shown_is_ascii(text):
    code = f"""
        class Own(Exception): pass
        def f(x):
            if x == 1: return {text!a}
            raise (Own if x == 2 else ValueError)({text!a})
    """
    for first in 2, 3:
        tests = f"value = f({first})\nassert value"
        result = run_tests([job(code, tests)._replace(examples=[f"assert f({n}) == 5" for n in (1, 2, 3)])])[0]
        for shown in result.reason, *result.examples:
            assert shown.isascii() and len(shown) <= 200
            assert ascii(text[0])[1:-1] in shown or text[0].isascii()


def test_prepare_runs_beside_the_text_and_its_crash_is_a_failure():
    prepare = """
import ast
def prepare(texts, names):
    tree = ast.parse(texts[0])
    return (texts[0] if names else None), {"functions": [n.name for n in tree.body], "error": ""}
"""
    ran, none, crash = run_tests(
        [
            Job([GOOD], TESTS, ["f"], prepare, {"names": ["f"]}),
            Job([GOOD], TESTS, ["f"], prepare, {"names": []}),
            Job(["f(" * 90_000], TESTS, ["f"], prepare, {"names": ["f"]}),
        ]
    )
    assert (ran.reason, ran.facts["functions"]) == ("", ["f"])
    assert (none.passed, none.reason, none.facts["functions"]) == (0, "no program", ["f"])
    assert crash.passed == 0
    assert crash.facts == {}


def test_quick_jobs_do_not_wait_for_slow_ones(monkeypatch):
    monkeypatch.setattr(sandbox, "_cores", lambda: 1)
    run, begun, ended, most = sandbox._Worker.run, [], [], []

    def watched(self, asked, *rest):
        begun.append(asked)
        most.append(len(begun) - len(ended))
        verdict = run(self, asked, *rest)
        ended.append(asked)
        return verdict

    monkeypatch.setattr(sandbox._Worker, "run", watched)
    slow, quick = job("import time\ndef f(x):\n    time.sleep(60)"), job(GOOD)
    results = run_tests([slow, slow, quick, quick, slow, slow, slow], timeout=3)
    late = "out of time"
    assert [r.reason for r in results] == [late, late, "", "", late, late, late]
    assert ended[:2] == [quick, quick]
    assert max(most) == sandbox.SHARE
    assert len(descendants()) == 2  # those that were started for the slow ones have ended
    monkeypatch.setattr(sandbox, "MOST_SLOW", 1)
    most.clear(), begun.clear(), ended.clear()
    run_tests([slow] * 3, timeout=1.5)
    assert max(most) == 2


def no_other_worker_starts(monkeypatch, how):
    """From now on, with one idle."""
    sandbox.close()
    run_tests([job(GOOD)])
    monkeypatch.setattr(sandbox, "_cores", lambda: 2)
    monkeypatch.setattr(sandbox._pool, "warned", False)
    if how == "too many open files":

        def refuse(*_, **__):
            raise OSError(how)

        monkeypatch.setattr(sandbox, "_start", refuse)
    else:
        monkeypatch.setattr(sys, "executable", "/bin/false")


HOWS = ["too many open files", "the interpreter ends at once"]


@pytest.mark.parametrize("how", HOWS)
def test_jobs_wait_where_no_other_worker_starts(monkeypatch, capsys, how):
    no_other_worker_starts(monkeypatch, how)
    descriptors = len(os.listdir("/proc/self/fd"))
    late = job("import time\ndef f(x):\n    time.sleep(60)")
    results = run_tests([job(GOOD), late, *[job(GOOD)] * 6, job(BAD)], timeout=1)
    assert [r.reason for r in results[:8]] == ["", "out of time"] + [""] * 6
    assert results[8].passed == 0
    assert capsys.readouterr().err.count("did not start") == 1
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_no_right_answer_fails_for_want_of_descriptors():
    in_a_process("""
        from resource import RLIMIT_NOFILE, getrlimit, setrlimit
        setrlimit(RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) + 60, getrlimit(RLIMIT_NOFILE)[1]))
        sandbox._cores = lambda: 16  # which would be 96 descriptors, and those of templates that start
        slow = job("import time\\ndef f(x):\\n    time.sleep(0.1)\\n    return x + 1")
        assert {r.reason for r in run_tests([slow] * 60)} == {""}
    """)


def test_a_job_that_finds_too_few_descriptors_has_not_begun(monkeypatch):
    # Others may hold them for as long as their interpreters take to start, so this is no try.
    pair, refused = socket.socketpair, []

    def refuse():
        if sys._getframe(1).f_code is sandbox._Worker.__init__.__code__ or len(refused) == 2 * sandbox.TRIES:
            return pair()
        refused.append(1)
        raise OSError("too many open files")

    monkeypatch.setattr(socket, "socketpair", refuse)
    assert run_tests([job(GOOD)])[0].reason == ""
    assert len(refused) == 2 * sandbox.TRIES


@pytest.mark.parametrize("how", HOWS)
def test_no_job_waits_for_ever_when_the_last_worker_dies(monkeypatch, how):
    no_other_worker_starts(monkeypatch, how)
    late = job("import time\ndef f(x):\n    time.sleep(60)")

    def kill_all():
        for pid in descendants():
            with contextlib.suppress(ProcessLookupError):  # a clone of a template that is dead already
                os.kill(pid, signal.SIGKILL)

    killer = threading.Timer(0.7, kill_all)
    killer.start()
    with pytest.raises(RuntimeError, match="did not start"):
        run_tests([late, *[job(GOOD)] * 6], timeout=20)
    killer.join()
    monkeypatch.undo()
    assert [r.reason for r in run_tests([job(GOOD)] * 4)] == [""] * 4


def test_the_clock_starts_when_there_is_a_worker(monkeypatch):
    sandbox.close()
    run_tests([job(GOOD)])
    monkeypatch.setattr(sandbox, "_cores", lambda: 2)
    start = sandbox._start
    monkeypatch.setattr(sandbox, "_start", lambda *a, **k: time.sleep(1) or start(*a, **k))
    late = job("import time\ndef f(x):\n    time.sleep(60)")
    assert [r.reason for r in run_tests([late, job(GOOD)], timeout=1)] == ["out of time", ""]
    worker = sandbox._pool.idle[-1]  # a clock that has run out already is no error
    sockets = [*socket.socketpair(), *socket.socketpair()]
    assert worker.run(job(GOOD), sockets, time.monotonic() - 9, lambda: None)[3] == "out of time"


def test_a_verdict_counts_however_late_it_is_read():
    # The trainer may be stopped (Ctrl-Z) or starved, while the grader keeps the deadline.
    code = "import time\ndef f(x):\n    time.sleep(0.2)\n    return x + 1"

    class Turn(contextlib.nullcontext):
        def __exit__(self, *_):
            time.sleep(4)

    assert sandbox._run_one(job(code, "assert f(1) == 2"), 2, Turn()).reason == ""


def test_a_worker_that_lacks_a_layer_of_the_first_is_not_used():
    in_a_process("""
        run_tests([job(GOOD)])
        without('landlock')
        with pytest.raises(RuntimeError, match='lost a layer'):
            sandbox._Worker()
        assert len(descendants()) == 2
    """)


def test_a_stopped_template_does_not_stop_the_trainer(monkeypatch):
    monkeypatch.setattr(sandbox, "PATIENCE", 0.3)
    monkeypatch.setattr(sandbox, "KILLING", 0.3)
    run_tests([job(GOOD)])
    for worker in sandbox._pool.idle:
        os.kill(worker.templates[1][0].pid, signal.SIGSTOP)
    long = GOOD + "#" + "x" * 900_000  # more than a socket holds
    jobs = [job(long)] * len(sandbox._pool.idle)  # one or two, depending on the tests before
    start = time.monotonic()
    assert {r.reason for r in run_tests(jobs, timeout=0.3)} == {""}  # they run again in other templates
    assert time.monotonic() - start > 0.6
    run_tests([job(GOOD)])
    pids = descendants()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    sandbox.close()
    assert descendants() & pids == set()


def test_a_job_whose_grader_is_killed_runs_again():
    run_tests([job(GOOD)])
    sandbox._pool.close(1)
    template, killed = sandbox._pool.idle[0].templates[1][0].pid, []

    def kill_the_first():
        while not killed:
            for pid in descendants():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    if parent_of(pid) == template:
                        os.kill(pid, signal.SIGKILL)
                        killed.append(pid)

    killer = threading.Thread(target=kill_the_first)
    killer.start()
    slow = "import time\ndef f(x):\n    time.sleep(0.5)\n    return x + 1"
    assert run_tests([job(slow, "assert f(1) == 2")])[0].reason == ""
    killer.join()
    assert len(killed) == 1


def test_jobs_are_what_the_kernel_kills_when_memory_is_short(monkeypatch):
    monkeypatch.setattr(sandbox, "TRIES", 1)
    late = job("import time\ndef f(x):\n    time.sleep(60)")
    run_tests([job(GOOD)])
    templates, scores = descendants(), {}

    def look_and_kill():
        for pid in descendants():
            with open(f"/proc/{pid}/oom_score_adj") as file:
                scores[pid] = file.read()
        os.kill(min(templates), signal.SIGKILL)

    killer = threading.Timer(0.5, look_and_kill)
    killer.start()
    assert run_tests([late], 5)[0].reason == "the sandbox was killed"
    killer.join()
    assert set(scores.values()) == {"1000\n"}
    assert len(scores) >= len(templates) + 2  # a candidate and a grader
    with open("/proc/self/oom_score_adj") as file:
        assert file.read() != "1000\n"


def test_nothing_is_left_behind():
    run_tests([job(GOOD)] * 8)
    processes, descriptors, folders = descendants(), len(os.listdir("/proc/self/fd")), sorted(os.listdir("/tmp"))
    for _ in range(5):
        run_tests([job(GOOD), job(BAD), job(HACKS["os._exit in the call"]), job(HACKS["null pointer"])] * 10)
    run_tests([job(HACKS["loop in the call"])] * 2, timeout=0.2)
    assert descendants() == processes
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert [f for f in os.listdir("/tmp") if f.startswith("tmp") and f not in folders] == []
    sandbox.close()
    assert descendants() & processes == set()


def test_a_template_that_is_killed_leaves_no_folder():
    in_a_process("""
        without('unshare')
        run_tests([job(GOOD)])
        templates, folders = descendants(), set()

        def look_and_kill():
            for pid in descendants() - templates:
                folders.add(pathlib.Path(*pathlib.Path(os.readlink(f'/proc/{pid}/cwd')).parts[:3]))
            for pid in templates:
                os.kill(pid, signal.SIGKILL)

        killer = threading.Timer(0.5, look_and_kill)
        killer.start()
        write = '''
            import time
            open('own', 'w').close()
            def f(x):
                time.sleep(1)
                return x + 1
        '''
        assert run_tests([job(write, 'assert f(1) == 2')])[0].reason == ''
        killer.join()
        sandbox.close()
        assert len(folders) == 2 and all(f.parent == pathlib.Path('/tmp') for f in folders), folders
        assert not any(map(os.path.exists, folders)), folders
    """)


def test_without_namespaces_nothing_runs_where_no_file_can_be_written():
    # As where /tmp is full: each job would fail, and so be worth nothing.
    in_a_process("""
        from resource import RLIMIT_FSIZE, setrlimit
        without('unshare')
        setrlimit(RLIMIT_FSIZE, (0, 0))
        with pytest.raises(RuntimeError, match="did not start"):
            run_tests([job(GOOD)])
    """)


def test_without_namespaces_jobs_have_their_folders_where_tmpdir_says(tmp_path):
    """In some containers /tmp cannot be written."""
    in_a_process(
        """
        without('unshare')
        os.environ['TMPDIR'] = sys.argv[2]
        code = 'import os\\ndef f(x): return os.getcwd(), os.environ.get("TMPDIR")'
        shown = f"folder, other = f(1)\\nassert folder.startswith({sys.argv[2]!r}) and other is None"
        assert run_tests([job(code, shown)])[0].reason == ''
    """,
        str(tmp_path),
    )


@pytest.mark.parametrize("setup", ["", "without('unshare')"])
def test_the_trainers_umask_makes_no_folder_unusable(setup):
    """Whoever is not root could not enter a folder of mode 0, and each job would be worth nothing."""
    in_a_process(f"""
        os.umask(0o777)
        {setup}
        code = 'import os\\ndef f(x): return os.stat(os.getcwd()).st_mode & 0o700'
        assert run_tests([job(code, 'assert f(1) == 0o700')])[0].reason == ''
    """)


def test_a_clone_that_fails_leaves_no_folder(tmp_path):
    in_a_process(
        """
        import tempfile
        def fail(namespaces): raise BlockingIOError('no more processes')
        without('unshare')
        tempfile.tempdir, kernel.clone = sys.argv[2], fail
        trainer, template = socket.socketpair()
        os.dup2(template.fileno(), 0)
        trainer.send(b'C' + bytes(2))
        with pytest.raises(BlockingIOError):
            sandbox_jobs.template()
        (place,) = pathlib.Path(sys.argv[2]).iterdir()  # the template's, which goes with it
        assert os.listdir(place) == []
    """,
        str(tmp_path),
    )
    assert os.listdir(tmp_path) == []


def test_a_killed_template_is_replaced():
    run_tests([job(GOOD)] * 4)
    for pid in descendants():
        os.kill(pid, signal.SIGKILL)
    assert [r.reason for r in run_tests([job(GOOD)] * 4)] == [""] * 4  # what had a killed template runs again
    assert [r.reason for r in run_tests([job(GOOD)] * 4)] == [""] * 4


def test_templates_end_with_the_trainer():
    said = in_a_process("""
        run_tests([job(GOOD)])
        print(*descendants(), flush=True)
        os._exit(0)  # no atexit
    """)
    pids = [int(word) for word in said.split() if word.isdigit()]
    assert pids
    end = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_trainer_cannot_be_read_by_its_children():
    run_tests([job(GOOD)])
    assert kernel.call(kernel.libc.prctl, 3, 0, 0, 0, 0) == 0  # PR_GET_DUMPABLE


@pytest.mark.parametrize(
    "column, header",
    [(0, "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), (1, "/usr/include/asm-generic/unistd.h")],
)
def test_system_call_numbers(column, header):
    # Against the kernel's headers where they are installed.
    if not os.path.exists(header):
        pytest.skip("no kernel headers here")
    with open(header) as file:
        words = [line.split() for line in file if line.startswith("#define __NR")]
    known = {w[1]: w[2] for w in words if len(w) == 3}
    known |= {name: known[other] for name, other in known.items() if other in known}  # __NR_lseek is __NR3264_lseek
    known = {name: number for name, number in known.items() if number.isdigit()}
    table = (kernel.ALLOWED + kernel.GRANTED).split()
    ours = dict(zip(table[::3], table[1 + column :: 3]))
    ours |= {name: str(row[column]) for name, row in kernel.JUDGED.items()}
    for name, number in ours.items():
        assert known.get(f"__NR_{name}", "-") == number.replace("-1", "-"), name


def test_all_other_system_calls_are_refused():
    listed = [int(n) for n in (kernel.ALLOWED + kernel.GRANTED).split()[1 + kernel.COLUMN :: 3] if n != "-"]
    listed += [row[kernel.COLUMN] for row in kernel.JUDGED.values()]
    assert len(listed) == len(set(listed))  # the first of two would hold
    passed_by = {335, 336} if kernel.COLUMN == 0 else set()  # x86's for probes, which end who is not probed
    tried = sorted({*range(600)} - {*listed} - passed_by)
    calls = f"""
        import ctypes, errno
        libc = ctypes.CDLL(None, use_errno=True)
        def f():
            done = []
            for number in {tried}:
                ctypes.set_errno(0)
                if libc.syscall(number, -1, -1, -1, -1, -1, -1) != -1 or ctypes.get_errno() not in (1, 38):
                    done.append(number)
            return done
    """
    assert run_tests([job(calls, "assert f() == []")])[0].reason == ""
