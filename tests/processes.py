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
    for number in (1, 2):
        os.dup2(os.open("printed.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT), number)
    sys.argv = [script, *args]
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    runpy.run_path(script, run_name="__main__")


def start(script, *args, cwd, count=1, code=0, **environment):
    """Runs it in the folder `cwd`, with torchrun's variables, until all processes have ended with that exit code."""
    with socket.create_server(("localhost", 0)) as free:
        environment |= {"WORLD_SIZE": count, "MASTER_ADDR": "localhost", "MASTER_PORT": free.getsockname()[1]}
    processes = []
    for rank in range(count):
        variables = environment | {"RANK": rank, "LOCAL_RANK": rank}
        variables = {key: str(value) for key, value in variables.items()}
        call = str(script), list(map(str, args)), str(cwd), variables
        processes.append(FORKING.Process(target=_become, args=call))
        processes[-1].start()
    for process in processes:
        process.join(120)  # seconds; one may wait for another that has failed
        process.kill()
        process.join()
    printed = pathlib.Path(cwd, "printed.txt").read_text()
    assert [process.exitcode for process in processes] == [code] * count, printed
    return printed
