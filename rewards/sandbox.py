"""Runs model-written Python against tests, and trusts nothing that it reports.

Code that is trained to raise a reward will sooner or later attack whatever computes the reward. So every job has two
processes: the *candidate* holds the model's code and never sees a test; the *grader* holds the tests and calls the
candidate through a socket, as one calls a server. Only plain data crosses, so no object of the candidate's can pretend
to equal an expected value, and only what the grader reports counts: exit codes and output mean nothing.

    trainer --- template --- grader --- candidate        rewards/jail.py: these three

Around both are layers of the Linux kernel's: limits on memory, processor time, files and descriptors; seccomp (no
system call but those that Python needs for memory, plain files, threads and time); Landlock or, where that is missing,
namespaces (no file can be opened but Python's own and those in the job's folder).
"""

import atexit
import contextlib
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from rewards import jail
from rewards.jail import Job as Job  # what run_tests takes

MAX_SOURCE = 1_000_000  # characters of model text in one job
SHARE, MOST = 3, 96  # jobs at once: per core, so that endless loops do not keep quick jobs waiting, and in all


class Result(NamedTuple):
    """The outcome of a job. `reason` is empty if and only if every test passed."""

    passed: int
    total: int  # at least 1
    reason: str
    facts: dict  # what `prepare` found; empty if it did not finish
    examples: list[str]  # per example: "" if it holds, else what happened instead
    passing: list[int] | tuple = ()  # the numbers of the tests that passed


def run_tests(jobs, timeout=10.0, allow_unsafe_code=False):
    """Runs the jobs on all cores and returns their Results, in order.

    timeout: seconds of processor time for each job, so that a reward does not depend on what else the machine does;
        jail.WALL times as many may pass by the clock

    Raises ValueError if the system cannot contain the code and allow_unsafe_code is not set, and RuntimeError if no
    sandbox starts. Nothing that a job does raises.
    """
    require_protection(allow_unsafe_code)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))  # torchrun's processes share them
    with ThreadPoolExecutor(min(SHARE * cores, MOST)) as threads:
        return list(threads.map(functools.partial(_run_one, timeout=timeout, unsafe=allow_unsafe_code), jobs))


def require_protection(allow_unsafe_code=False):
    """The socket of the template, which is started unless it runs. Raises what run_tests does."""
    with _lock:
        if _running and _running[0].process.poll() is not None:
            close()
        if not _running:
            _start(allow_unsafe_code)
        template = _running[0]
        if template.missing and not allow_unsafe_code:
            close()
            raise ValueError(
                f"nothing contains model-written code here, as this system lacks {template.missing}; "
                "--env-kwargs allow_unsafe_code yes runs it regardless, with all your rights"
            )
        return template.control


def close():
    """Ends the template and with it all jobs. It also ends with the trainer; the next run_tests starts another."""
    if _running:
        template = _running.pop()
        template.control.close()
        template.process.kill()
        template.process.wait()


class _Template(NamedTuple):
    process: subprocess.Popen
    control: socket.socket
    missing: str  # what this system lacks to contain code


_running = []  # at most one _Template
_lock = threading.Lock()
atexit.register(close)
os.register_at_fork(after_in_child=_running.clear)  # a fork of the trainer must not talk to its template


def _start(unsafe):
    if sys.platform == "linux":  # so that no child of the same user can read our memory and environment (HF_TOKEN)
        jail.call(jail.libc.prctl, jail.PR_SET_DUMPABLE, 0, 0, 0, 0)
    # -S -s: no site-packages. A fixed hash seed: sets keep their order, and the same code its reward. Without
    # MALLOC_ARENA_MAX, each thread would reserve 64 MB.
    command = [sys.executable, "-S", "-s", "-B", jail.__file__, *["--unsafe"] * unsafe]
    environment = {key: os.environ[key] for key in ["LD_LIBRARY_PATH"] if key in os.environ}
    environment |= {"PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1"}
    control, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
    _running.append(_Template(process, control, ""))
    try:
        layers = jail.Channel(control).receive()  # the names of those that were tried, and whether they hold
    except (OSError, EOFError):
        close()
        raise RuntimeError(f"the sandbox's interpreter {sys.executable} did not start") from None
    missing = [] if layers["seccomp"] else ["seccomp (libseccomp.so.2)"]
    missing += [] if layers.get("Landlock") or layers.get("namespaces") else ["Landlock (Linux 5.13) and namespaces"]
    _running[0] = _Template(process, control, " and ".join(missing))
    if unsafe or not missing:
        states = ", ".join(f"{name} {'yes' if holds else 'NO'}" for name, holds in layers.items())
        print(f"sandbox: {states}{': model-written code is NOT CONTAINED' if missing else ''}", file=sys.stderr)


def _run_one(job, timeout, unsafe):
    """The Result of a job, from what its grader reports: see _run_grader in rewards/jail.py for the messages."""
    if sum(map(len, job.texts)) > MAX_SOURCE:
        return Result(0, 1, f"more than {MAX_SOURCE} characters", {}, ["not run"] * len(job.examples))
    for _ in range(3):  # again if the kernel kills template or grader, as for want of memory
        report = {"tests": (1, []), "facts": {}, "examples": ["not run"] * len(job.examples)}
        outcomes = {}  # number of a test -> (whether it passed, why not)
        start = time.monotonic()
        for kind, content in _receive_messages(job, timeout, require_protection(unsafe)):
            if kind == "outcome":
                number, passed, why = content
                outcomes[number] = passed, why
            else:
                report[kind] = content
        late = time.monotonic() - start >= timeout
        if late or "end" in report:
            break
    total, straight = report["tests"]
    end = report.get("end", "out of time" if late else "the grader was killed")  # "" if nothing ended the tests
    passing = sorted(number for number, (passed, _) in outcomes.items() if passed and (not end or number in straight))
    reason = end
    if not end and not len(passing) == total > 0:
        reasons = [why for passed, why in outcomes.values() if not passed]
        reason = [*reasons, "an assert did not run"][0]
    return Result(len(passing), max(1, total), reason, report["facts"], report["examples"], passing)


def _receive_messages(job, timeout, control):
    """The messages of the grader of a job until it ends."""
    folder = tempfile.mkdtemp() if job.folder else ""
    ours, theirs = socket.socketpair()
    with ours, contextlib.suppress(OSError, EOFError, ValueError):  # ValueError: it was killed within a message
        with theirs:
            socket.send_fds(control, [b"J"], [theirs.fileno()])
        ours.settimeout(jail.WALL * timeout + 60)  # the kernel ends the grader long before, unless it was stopped
        channel = jail.Channel(ours)
        channel.send(jail.write_job(job, timeout, folder))
        while True:
            yield channel.receive()
    for _ in range(100 * job.folder):  # the candidate dies an instant after the grader
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            break
        time.sleep(0.01)
