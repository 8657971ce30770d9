"""Runs model-written Python against tests, and believes nothing that it says.

Code that is trained to raise a reward will sooner or later attack whatever computes the reward. So every job has two
processes. The *candidate* holds the model's code and never sees a test; the *grader* holds the tests and calls the
candidate through a socket, as one calls a server. Only plain data crosses it, so that no object of the candidate's
can pretend to equal an expected value, and only the grader's verdict counts: exit codes and output mean nothing.

    trainer --- template C --- candidate       A template is a small fresh interpreter, started once, that clones a
        \\                         |            process per job (a millisecond instead of the thirty of a new
         `----- template G --- grader          interpreter). C never holds a test, nor any model's code: a clone
                                               could find either in the memory that it inherits.

Around both processes stand what layers the kernel offers (Linux; each is probed when a template starts):

- Namespaces: a process sees only a part of the system. Here: itself, no network, no files but Python's, read-only,
  and an empty folder in memory. When the first process in it is killed, all die.
- Landlock: a process gives up, for good, the right to open files outside of a list of folders.
- seccomp: a small program that the kernel runs before each system call, and that can refuse it.

rewards/sandbox_jobs.py holds the processes, rewards/sandbox_kernel.py the layers. docs/sandbox.md lists the attacks,
and says which layer stops each.
"""

import ast
import atexit
import contextlib
import functools
import itertools
import marshal
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from rewards import sandbox_kernel as kernel
from rewards.sandbox_jobs import receive, send

PATIENCE = 10  # seconds for a template to end by itself
KILLING = 60  # seconds for a template to end its job
MAX_SOURCE = 1_000_000  # characters of model text in one job
SLOW = 0.1  # seconds, after which the next job starts beside this one
SHARE = 3  # jobs at most for each core, so that a slow one has a third of a core at least
MOST_SLOW = 32  # slow jobs at most beside those of the cores: each needs two templates, and descriptors in the trainer
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# How an interpreter of ours begins. The folder that holds this package is in its path for the one import only.
BOOT = """
import sys
sys.path[0:1] = []
sys.path.append(sys.argv[1])
from rewards.{module} import {function}
sys.path.pop()
"""
TEMPLATE = BOOT.format(module="sandbox_jobs", function="template") + "template()"
PROBE = BOOT.format(module="sandbox_kernel", function="probe") + "print(probe())"
UNPROTECTED = (
    "--allow-unsafe-code: this system offers neither namespaces nor Landlock with seccomp to contain model-written "
    "code; use Linux 5.13 or later, or set it and let the code do all that you can."
)


class Job(NamedTuple):
    """One piece of model-written code, and what is done with it.

    texts: what the models wrote, as it is; more than MAX_SOURCE characters fail
    tests: trusted source; each `assert` outside of classes counts, also one that a loop runs again
    names: the candidate's functions and classes that the tests use
    prepare: trusted source of `prepare(texts, **options) -> (program, facts)`, run beside the model's text where a
        crash does no harm: `program` is the source or syntax tree to run, or None; `facts`, plain data, are reported
    options: for `prepare`
    examples: trusted sources that end in an `assert` whose outcome may be shown to the model; they are not counted
    setup: trusted source that the tests need, such as functions that the task's prompt defines
    objects: whether the tests may use the candidate's classes and objects (call them, read and set attributes and
        items), and files that it writes; without it they can only give objects back
    """

    texts: list[str]
    tests: str
    names: list[str]
    prepare: str = "def prepare(texts):\n    return texts[0], {}"
    options: dict | None = None
    examples: list[str] | tuple = ()
    setup: str = ""
    objects: bool = False


class Result(NamedTuple):
    """What became of a job. `reason` is empty exactly when every test passed."""

    passed: int
    total: int  # at least 1; asserts that an error kept from running are counted as failed
    outcomes: list[bool]  # of each assert that ran, in the order in which they ran
    reason: str
    facts: dict  # what `prepare` found; empty when it did not get so far
    examples: list[str]  # for each example: "" if it holds, or what happened instead
    seconds: float


def run_tests(jobs, timeout=10.0, allow_unsafe_code=False):
    """Runs the jobs on all cores and returns their Results, in order.

    As many jobs run as there are cores, and beside them at most MOST_SLOW that have already taken longer than SLOW;
    all together at most SHARE for each core. So quick jobs do not wait for endless loops, nor endless loops for each
    other, and a slow but correct answer keeps a third of a core however many loops there are.

    timeout: seconds of wall clock for each job, from when it starts: one number for all, or one each
    allow_unsafe_code: also run where the kernel offers no protection (macOS): the code may then do what you may do
    Raises ValueError when there is no protection and allow_unsafe_code is not set, RuntimeError when no interpreter
    starts. Whatever the jobs do raises nothing.
    """
    jobs = list(jobs)
    if not jobs:
        return []
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    cores = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    workers = min(len(jobs), cores)
    require_protection(allow_unsafe_code)
    _pool.give(_pool.take())  # the first one here, for its error; others when needed
    _report()
    turns = threading.Semaphore(workers)
    with ThreadPoolExecutor(min(SHARE * workers, workers + MOST_SLOW)) as threads:
        timeouts = itertools.repeat(timeout) if isinstance(timeout, (int, float)) else timeout
        run = lambda job, seconds: _run_one(job, seconds, turns)
        results = list(threads.map(run, jobs, timeouts))
    _pool.close(cores)  # but for these, they were started for slow jobs
    return results


def require_protection(allow_unsafe_code=False):
    """Raises at once what run_tests would raise on this system, see there; the layers are probed once a process."""
    if not (_safe(_probed()) or allow_unsafe_code):
        raise ValueError(UNPROTECTED)


def close():
    """Ends the templates. They end by themselves with the trainer, and the next run_tests starts new ones."""
    _pool.close()


class _Pool:
    """The workers: idle ones, and the number of those that a job has or that are starting."""

    def __init__(self):
        self.idle, self.busy, self.changed, self.warned = [], 0, threading.Condition(), False

    def take(self):
        """An idle worker or a new one; where no new one starts, the next that is given back, while there are any."""
        while True:
            with self.changed:
                self.busy += 1
                if self.idle:
                    return self.idle.pop()
                alone = self.busy == 1
            try:
                return _Worker()
            except BaseException as error:
                self.give()
                if alone or not isinstance(error, RuntimeError):
                    raise
                with self.changed:
                    if not self.warned:
                        self.warned = True
                        print(f"sandbox: {error}; jobs wait for the interpreters that there are", file=sys.stderr)
                    # When all are gone, the next round is alone: it starts one, or raises.
                    self.changed.wait_for(lambda: self.idle or not self.busy)

    def give(self, *workers):
        """One of the busy workers is no longer: it is given back here, or was closed."""
        with self.changed:
            self.busy -= 1
            self.idle.extend(workers)
            self.changed.notify_all()

    def close(self, keep=0):
        with self.changed:
            surplus = self.idle[keep:]
            del self.idle[keep:]
        for worker in surplus:
            worker.close()


_pool = _Pool()
atexit.register(close)
if sys.platform != "win32":
    os.register_at_fork(after_in_child=_pool.__init__)  # a fork of the trainer must not talk to its templates


def _run_one(job, timeout, turns):
    if sum(map(len, job.texts)) > MAX_SOURCE:
        return Result(*_no_verdict(job, f"more than {MAX_SOURCE} characters"), 0.0)
    with contextlib.ExitStack() as turn:
        turn.enter_context(turns)
        worker, back = _pool.take(), []
        start = time.monotonic()
        try:
            verdict = worker.run(job, start + timeout, turn.close)
            back = [worker]
        except (OSError, EOFError, ValueError):  # a template was killed (out of memory?): start afresh, it failed
            worker.close()
            verdict = _no_verdict(job, "the sandbox was killed")
        finally:
            _pool.give(*back)
        return Result(*verdict, time.monotonic() - start)


def _no_verdict(job, reason):
    """The fields of a Result, but for the seconds, where no grader says them."""
    return [0, 1, [], reason, {}, ["not run"] * len(job.examples)]


def _start(code, **options):
    """A fresh interpreter without site-packages, our environment, folder or descriptors."""
    environment = {"PYTHONHASHSEED": "0"}  # a fixed seed: sets keep their order, and the same code its reward
    environment["MALLOC_ARENA_MAX"] = "1"  # else each thread reserves 64 MB of the address space that a job has
    if "LD_LIBRARY_PATH" in os.environ:  # some interpreters do not start without
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    # -I would also ignore PYTHONHASHSEED.
    command = [sys.executable, "-S", "-s", "-B", "-c", code, ROOT]
    return subprocess.Popen(command, env=environment, cwd="/", start_new_session=True, **options)


@functools.cache
def _probed():
    """Which layers hold, asked of an interpreter of its own: clones of a process that holds torch take longer."""
    with _start(PROBE, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        said = process.stdout.read()
    if process.returncode:
        raise RuntimeError(f"the sandbox's interpreter {sys.executable} did not start")
    return ast.literal_eval(said.decode())


def _safe(layers):
    return layers["namespaces"] or (layers["Landlock"] and layers["seccomp"])


@functools.cache
def _report():
    """Says once which layers hold."""
    held = ", ".join(f"{name} {'yes' if held else 'NO'}" for name, held in _probed().items())
    print(f"sandbox: {held}{'' if _safe(_probed()) else ': model-written code runs UNPROTECTED'}", file=sys.stderr)


@functools.cache
def _compiled(source):
    """Trusted source as the text of its bytecode, since compiling it takes longer than most jobs."""
    return marshal.dumps(compile(source, "<prepare>", "exec")).hex()


class _Worker:
    """The two templates that run one job at a time."""

    def __init__(self):
        kernel.hide_memory()
        self.templates = []
        try:
            for _ in "CG":
                ours, theirs = socket.socketpair()
                with theirs, contextlib.ExitStack() as on_error:
                    on_error.enter_context(ours)
                    process = _start(TEMPLATE, stdin=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                    on_error.pop_all()
                self.templates.append((process, ours))
            found = [receive(control, time.monotonic() + 60) for _, control in self.templates]
        except (OSError, EOFError) as error:
            self.close()
            raise RuntimeError(f"the sandbox's interpreter {sys.executable} did not start") from error
        if any(held and not layers[name] for layers in found for name, held in _probed().items()):
            self.close()  # a job that uses up what a probe needs must not get the next ones a weaker sandbox
            raise RuntimeError("the sandbox lost a layer that it had")

    def run(self, job, deadline, when_slow):
        candidate_end, grader_end = socket.socketpair()
        ours, grader_ours = socket.socketpair()
        with candidate_end, grader_end, ours, grader_ours:
            seconds = struct.pack(">H", min(65535, max(1, int(deadline - time.monotonic()) + 2)))
            (_, c), (_, g) = self.templates
            socket.send_fds(c, [b"C" + seconds], [candidate_end.fileno()])
            socket.send_fds(g, [b"G" + seconds], [grader_end.fileno(), grader_ours.fileno()])
            candidate_end.close(), grader_end.close(), grader_ours.close()  # so that their end means ours reads EOF
            try:
                ours.settimeout(max(deadline + 1 - time.monotonic(), 1e-3))  # a stopped template never reads
                send(ours, [deadline, *job._replace(prepare=_compiled(job.prepare))])
                reply = select.poll()
                reply.register(ours, select.POLLIN)
                if not reply.poll(1000 * SLOW):
                    when_slow()
                verdict = receive(ours, deadline + 1)  # the grader minds the deadline; this is for when it cannot
            except (OSError, EOFError, ValueError) as error:
                late = isinstance(error, TimeoutError)
                verdict = _no_verdict(job, "out of time" if late else "the grader ended early")
            for control in (c, g):
                control.sendall(b"K")
            for control in (c, g):
                control.settimeout(KILLING)
                if control.recv(1) != b"D":
                    raise EOFError("a template ended")
        return verdict

    def close(self):
        for _, control in self.templates:
            control.close()  # the template reads EOF, kills its job, and ends
        for process, _ in self.templates:
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:  # it is stopped; what it cloned dies with it
                process.kill()
                process.wait()
