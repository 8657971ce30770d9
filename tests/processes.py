"""Runs programs in processes of their own, forked from one that has done the imports, which take seconds."""

import multiprocessing
import os
import pathlib
import runpy
import socket
import sys
import tempfile
import time

from conftest import ROOT

FORKING = multiprocessing.get_context("forkserver")
# with what torch and transformers import at their first use
FORKING.set_forkserver_preload(["torch._dynamo", "transformers.models.qwen2.modeling_qwen2", "peft", "tyro"])


def _become(program, args, code, cwd, environment, output):
    for number in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), number)
    sys.stdout, sys.stderr = open(1, "w"), open(2, "w", buffering=1)
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv = [program, *args]
    sys.path[:0] = [os.path.dirname(program), str(ROOT / "tests"), str(ROOT)]
    exec(code, {"sys": sys})
    runpy.run_path(program, run_name="__main__")


class Started:
    """Like subprocess.Popen, with output and errors as one text; several processes get torchrun's variables.

    code: Python to run before the program, to break something
    """

    def __init__(self, program, *args, cwd, code="", processes=1):
        handle, name = tempfile.mkstemp()
        os.close(handle)
        self.output = pathlib.Path(name)
        with socket.create_server(("localhost", 0)) as free:
            port = free.getsockname()[1]
        several = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        self.all = []
        for rank in range(processes):
            environment = several | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
            given = (str(program), list(map(str, args)), code, str(cwd), environment, str(self.output))
            self.all.append(FORKING.Process(target=_become, args=given))
            self.all[-1].start()

    def poll(self):
        """None while any process runs; then the exit code of the first that failed, or 0."""
        codes = [process.exitcode for process in self.all]
        return None if None in codes else next(filter(None, codes), 0)

    def send_signal(self, number):
        os.kill(self.all[0].pid, number)

    def read(self):
        return self.output.read_text()

    def communicate(self, timeout):
        """(what was printed, None) once all have ended; like torchrun, ends all if one fails. `timeout`: seconds."""
        end = time.monotonic() + timeout
        while self.poll() is None and time.monotonic() < end:
            if any(process.exitcode for process in self.all):
                time.sleep(1)  # the others may be about to say the same
                break
            time.sleep(0.02)
        late = self.poll() is None and time.monotonic() >= end
        for process in self.all:
            process.kill()
            process.join()
        self.returncode, printed = self.poll(), self.read()
        self.output.unlink()
        assert not late, f"not ended after {timeout} s: {printed}"
        return printed, None


def printed_by(program, *args, cwd=ROOT, **options):
    """What the program prints; it must exit with 0, within two minutes."""
    started = Started(program, *args, cwd=cwd, **options)
    printed, _ = started.communicate(timeout=120)
    assert started.returncode == 0, printed
    return printed
