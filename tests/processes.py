"""Runs a script in processes of their own, forked from one that has done the imports, which take seconds."""

import multiprocessing
import os
import pathlib
import runpy
import socket
import sys

from conftest import ROOT

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["torch._dynamo", "transformers.models.qwen2.modeling_qwen2", "tyro"])


def _become(script, args, cwd, environment):
    os.environ.update(environment)
    os.chdir(cwd)
    sys.stdout = sys.stderr = open("printed.txt", "a", buffering=1)
    sys.argv = [str(script), *map(str, args)]
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    runpy.run_path(sys.argv[0], run_name="__main__")


def start(script, *args, cwd, count=1, code=0, **environment):
    """Runs it in the folder `cwd`, with torchrun's variables, until all processes have ended with that exit code."""
    with socket.create_server(("localhost", 0)) as free:
        environment |= {"WORLD_SIZE": count, "MASTER_ADDR": "localhost", "MASTER_PORT": free.getsockname()[1]}
    processes = []
    for rank in range(count):
        environment |= {"RANK": rank, "LOCAL_RANK": rank}
        variables = {key: str(value) for key, value in environment.items()}
        processes.append(FORKING.Process(target=_become, args=(script, args, cwd, variables)))
        processes[-1].start()
    for process in processes:
        process.join(120)  # seconds; one may wait for another that has failed
        process.kill()
        process.join()
    printed = pathlib.Path(cwd, "printed.txt").read_text()
    assert [process.exitcode for process in processes] == [code] * count, printed
