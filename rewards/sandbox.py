"""Runs model-written Python against tests, and trusts nothing that it reports.

Code that is trained to raise a reward will sooner or later attack whatever computes the reward. So every job has two
processes. The *candidate* holds the model's code and never sees a test; the *grader* holds the tests and calls the
candidate through a socket, as one calls a server. Only plain data crosses the socket, so no object of the candidate's
can pretend to equal an expected value, and only the grader's verdict counts: exit codes and output mean nothing.

    trainer --- template C --- candidate       A template is a small fresh interpreter, started once, that clones a
        \\                         |            process per job (one millisecond; a new interpreter takes
         `----- template G --- grader          thirty). C never holds a test or model-written code: a clone
                                               could find them in the memory that it inherits.

Around both processes are the layers that the kernel offers (Linux; each is probed when a template starts):

- Namespaces: a process sees only a part of the system. Here: itself, no network, Python's files (read-only), and an
  empty folder in memory. When the first process in a namespace is killed, all others in it die.
- Landlock: a process gives up, for good, the right to open files outside of a list of folders.
- seccomp: a small program that the kernel runs before each system call, and that can refuse the call.

rewards/sandbox_jobs.py holds the processes, rewards/sandbox_kernel.py the layers. docs/sandbox.md lists attacks
and the layer that stops each.
"""

import ast
import atexit
import contextlib
import functools
import itertools
import marshal
import math
import os
import pathlib
import select
import shutil
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

PATIENCE = 10  # seconds that a template gets to end by itself
KILLING = 60  # seconds that a template gets to kill its job
MAX_SOURCE = 1_000_000  # characters of model text in one job
SLOW = 0.1  # seconds after which a job counts as slow, and another one starts beside it
SHARE = 3  # at most so many jobs per core, so a slow job gets at least a third of a core
TRIES = 3  # so often a job is run if its templates or grader end, for which the job is hardly ever the cause
MOST_SLOW = 32  # at most so many slow jobs beside one job per core: each needs two templates, and descriptors here
# Where Linux says how much processor time this container has, and in which period: by cgroups of version 2, and 1.
CPU_QUOTA = [["/sys/fs/cgroup/cpu.max"]]
CPU_QUOTA += [["/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"]]
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# How our interpreters begin. The folder with this package is in their path only for this one import. Who inherits that
# SIGCHLD is ignored could wait for no child.
BOOT = """
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
sys.path[0:1] = []
sys.path.append(sys.argv[1])
from rewards.{module} import {function}
sys.path.pop()
"""
TEMPLATE = BOOT.format(module="sandbox_jobs", function="template") + "template()"
PROBE = BOOT.format(module="sandbox_kernel", function="probe") + "print(probe())"
UNPROTECTED = (
    "--env-kwargs allow_unsafe_code yes: this system offers neither namespaces nor Landlock with seccomp to contain "
    "model-written code; use Linux 5.13 or later, or set it and let the code do whatever you may do."
)


class Job(NamedTuple):
    """One piece of model-written code, and what is done with it.

    texts: what the models wrote, unchanged; more than MAX_SOURCE characters in all fail
    tests: trusted source; each `assert` outside of classes counts, each time that it runs
    names: the candidate's functions and classes that the tests use
    prepare: trusted source of `prepare(texts, **options) -> (program, facts)`, run in the candidate, where a crash
        does no harm: `program` is the source or syntax tree to run, or None; `facts` is plain data to report
    options: keyword arguments for `prepare`
    examples: trusted sources that each end in an `assert` whose outcome may be shown to the model; they do not count
    setup: trusted source that the tests need, such as functions that the task's prompt defines
    objects: whether the tests may use the candidate's classes and objects (call them, read and set attributes and
        items) and the files that it writes; if not, they can only pass objects back to it
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
    """The outcome of a job. `reason` is empty if and only if every test passed."""

    passed: int
    total: int  # at least 1; asserts that an error kept from running count as failed
    outcomes: list[bool]  # of each assert that ran, in order of execution
    reason: str
    facts: dict  # what `prepare` found; empty if it did not finish
    examples: list[str]  # per example: "" if it holds, else what happened instead
    seconds: float


def run_tests(jobs, timeout=10.0, allow_unsafe_code=False):
    """Runs the jobs on all cores and returns their Results, in order.

    One job runs per core, and beside these at most MOST_SLOW jobs that have already taken longer than SLOW; in all at
    most SHARE jobs per core. So quick jobs do not wait for endless loops, endless loops do not wait for each other,
    and a slow but correct answer keeps a third of a core, however many loops there are.

    timeout: seconds of wall clock for each job, from its start: one number for all, or one each
    allow_unsafe_code: run even if the kernel offers no protection (macOS): the code may then do whatever you may do
    Raises ValueError if there is no protection and allow_unsafe_code is not set, RuntimeError if no interpreter
    starts. Nothing that a job does raises.
    """
    jobs = list(jobs)
    if not jobs:
        return []
    cores = max(1, _cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    workers = min(len(jobs), cores)
    require_protection(allow_unsafe_code)
    _pool.give(_pool.take())  # start the first here, to raise its error; the others when needed
    _report()
    turns = threading.Semaphore(workers)
    with ThreadPoolExecutor(min(SHARE * workers, workers + MOST_SLOW)) as threads:
        timeouts = itertools.repeat(timeout) if isinstance(timeout, (int, float)) else timeout
        run = lambda job, seconds: _run_one(job, seconds, turns)
        results = list(threads.map(run, jobs, timeouts))
    _pool.close(cores)  # close all others: they were started for slow jobs
    return results


def _cores():
    """The cores that this process may use; in a container, not more than its quota of processor time is worth."""
    if sys.platform != "linux":
        return os.cpu_count()
    cores = len(os.sched_getaffinity(0))
    for files in CPU_QUOTA:
        if all(map(os.path.exists, files)):
            quota, period = " ".join(pathlib.Path(file).read_text() for file in files).split()
            if quota not in ("max", "-1"):
                cores = min(cores, math.ceil(int(quota) / int(period)))
    return cores


def require_protection(allow_unsafe_code=False):
    """Raises what run_tests would raise on this system, see there; the layers are probed once per process."""
    if not (_safe(_probed()) or allow_unsafe_code):
        raise ValueError(UNPROTECTED)


def close():
    """Ends the templates. They also end with the trainer; the next run_tests starts new ones."""
    _pool.close()


class _Pool:
    """The idle workers, and the number of those that are starting or run a job."""

    def __init__(self):
        self.idle, self.busy, self.changed, self.warned = [], 0, threading.Condition(), False

    def take(self, wait=False):
        """An idle worker or a new one; if none can start, the next that is given back, as long as others are busy.

        wait: do not try to start one while others are busy, as what a worker needs has just been too little
        """
        while True:
            with self.changed:
                if wait:  # if all are gone, this round is alone: it starts a worker, or raises
                    self.changed.wait_for(lambda: self.idle or not self.busy)
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
                wait = True

    def give(self, *workers):
        """Counts one busy worker less: it is given back here, or was closed."""
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
os.register_at_fork(after_in_child=_pool.__init__)  # a fork of the trainer must not talk to its templates


def _run_one(job, timeout, turns):
    if sum(map(len, job.texts)) > MAX_SOURCE:
        return Result(*_no_verdict(job, f"more than {MAX_SOURCE} characters"), 0.0)
    with contextlib.ExitStack() as turn:
        turn.enter_context(turns)
        worker, tries, verdict = None, 0, _no_verdict(job, "the sandbox was killed")
        while tries < TRIES:
            worker, back = _pool.take(wait=worker is not None), []
            start = time.monotonic()
            try:
                sockets = [*socket.socketpair(), *socket.socketpair()]
                tries += 1  # only now: where descriptors are too few, the job has not begun
                verdict = worker.run(job, sockets, start + timeout, turn.close)
                back = [worker]
                break
            except (OSError, EOFError, ValueError):  # or a template or the grader ended: too little memory?
                worker.close()
            finally:
                _pool.give(*back)
        return Result(*verdict, time.monotonic() - start)


def _no_verdict(job, reason, facts=None, outcomes=(), left=1):
    """The fields of a Result but the seconds, for when the grader does not report them; `left` asserts did not run."""
    outcomes = [*outcomes, *[False] * max(1, left)]
    return [sum(outcomes), len(outcomes), outcomes, reason, facts or {}, ["not run"] * len(job.examples)]


def _start(code, **options):
    """A fresh interpreter without site-packages or our environment, working directory and descriptors."""
    environment = {"PYTHONHASHSEED": "0"}  # fixed, so that sets keep their order, and the same code its reward
    environment["MALLOC_ARENA_MAX"] = "1"  # else each thread reserves 64 MB of a job's address space
    # some interpreters need the first to start; the second names a folder that can be written where /tmp cannot
    environment |= {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "TMPDIR") if name in os.environ}
    # -I would also ignore PYTHONHASHSEED.
    command = [sys.executable, "-S", "-s", "-B", "-c", code, ROOT]
    return subprocess.Popen(command, env=environment, cwd="/", start_new_session=True, **options)


@functools.cache
def _probed():
    """Which layers work, probed by a separate interpreter: cloning a process that holds torch would take longer."""
    with _start(PROBE, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        said = process.stdout.read()
    if process.returncode:
        raise RuntimeError(f"the sandbox's interpreter {sys.executable} did not start")
    return ast.literal_eval(said.decode())


def _safe(layers):
    return layers["namespaces"] or (layers["Landlock"] and layers["seccomp"])


@functools.cache
def _report():
    """Prints once which layers work."""
    held = ", ".join(f"{name} {'yes' if held else 'NO'}" for name, held in _probed().items())
    print(f"sandbox: {held}{'' if _safe(_probed()) else ': model-written code runs UNPROTECTED'}", file=sys.stderr)


@functools.cache
def _compiled(source):
    """The bytecode of trusted source as text: compiling the source takes longer than most jobs."""
    return marshal.dumps(compile(source, "<prepare>", "exec")).hex()


class _Worker:
    """The two templates that run one job at a time."""

    def __init__(self):
        kernel.hide_memory()
        self.templates, self.places = [], []
        try:
            for _ in "CG":
                ours, theirs = socket.socketpair()
                with theirs, contextlib.ExitStack() as on_error:
                    on_error.enter_context(ours)
                    process = _start(TEMPLATE, stdin=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                    on_error.pop_all()
                self.templates.append((process, ours))
            found = [receive(control, time.monotonic() + 60) for _, control in self.templates]
            self.places = [place for _, place in found if place]
        except (OSError, EOFError) as error:
            self.close()
            short = "are memory, processes, descriptors or the space in /tmp used up?"
            raise RuntimeError(f"the sandbox's interpreter {sys.executable} did not start: {short}") from error
        if any(held and not layers[name] for layers, _ in found for name, held in _probed().items()):
            self.close()  # a job that uses up what a probe needs must not weaken the sandbox of later jobs
            raise RuntimeError("the sandbox lost a layer that it had")

    def run(self, job, sockets, deadline, when_slow):
        candidate_end, grader_end, ours, grader_ours = sockets
        with candidate_end, grader_end, ours, grader_ours:
            seconds = struct.pack(">H", min(65535, max(1, int(deadline - time.monotonic()) + 2)))
            (_, c), (_, g) = self.templates
            socket.send_fds(c, [b"C" + seconds], [candidate_end.fileno()])
            socket.send_fds(g, [b"G" + seconds], [grader_end.fileno(), grader_ours.fileno()])
            candidate_end.close(), grader_end.close(), grader_ours.close()  # so ours reads EOF when the processes end
            # The grader keeps the deadline; this is in case it cannot, as when it sums up a range that the candidate
            # returned. What it has sent counts, even if this process was stopped in between and reads it late.
            keep_deadline = lambda: ours.settimeout(max(deadline + 1 - time.monotonic(), 1e-3))
            reply, slow_at = select.poll(), time.monotonic() + SLOW
            reply.register(ours, select.POLLIN)
            facts, outcomes, left, verdict = {}, [], 1, None
            try:
                keep_deadline()
                send(ours, [deadline, *job._replace(prepare=_compiled(job.prepare))])
                while not verdict:
                    if not reply.poll(max(0, 1000 * (slow_at - time.monotonic()))):
                        when_slow()
                    keep_deadline()
                    kind, *news = receive(ours)
                    if kind == "facts":
                        facts, left = news
                    elif kind == "outcome":
                        held, left = news
                        outcomes.append(held)
                    elif kind == "left":
                        (left,) = news
                    else:
                        verdict = news
            except TimeoutError:
                verdict = _no_verdict(job, "out of time", facts, outcomes, left)
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
            except subprocess.TimeoutExpired:  # the template is stopped; its clones die with it
                process.kill()
                process.wait()
        for place in self.places:  # what killed templates have left
            shutil.rmtree(place, ignore_errors=True)
