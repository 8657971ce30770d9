"""An environment served to other processes: what comes back, and who is refused."""

import json
import threading
from http.client import HTTPConnection

import pytest
from conftest import MAGRPO, lines_of, metrics_of
from toy import SelfishInTurn, rows_of

import envs
from envs import remote


class Odd(SelfishInTurn):
    """Its feedback is a list, or after "odd" a tuple, which JSON would change."""

    def step(self, branches):
        kinds = [tuple if "odd" in actions else list for _, _, actions in branches]
        return [step._replace(feedback=kind("ab")) for step, kind in zip(super().step(branches), kinds)]


@pytest.fixture
def serve(monkeypatch):
    """A function (arguments of remote.Args) -> the address of a server in a thread of this process."""
    monkeypatch.setenv(remote.TOKEN, "sesame")
    servers = []

    def start(*args, **kwargs):
        servers.append(remote.Server(remote.Args(*args, port=0, **kwargs)))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


# What who has the token may send | the status that comes back. Every branch has one task and no history, or the like.
FORGED = """
step | [[{"split": "test", "number": 99}, [], ["", ""]]] | 400
step | [[{"split": "test", "number": -1}, [], ["", ""]]] | 400
step | [[{"split": "dev", "number": 0}, [], ["", ""]]] | 400
step | [[{"split": "test", "number": 0}, [[["", ""], [1, {}]]], ["", ""]]] | 400
step | [[{"split": "test", "number": 0}, [], [7, 7]]] | 500
step | [[{"split": "test", "number": 0}, [], ["odd", ""]]] | 500
observe | [{"split": "test", "number": 0}, 7] | 400
observe | [NESTED | 400
tasks | [] | 400
step | 7 | 400
about | | 400
"""


def test_a_forged_request_is_one_sentence_and_the_server_goes_on(serve):
    """Fails if a task has two numbers, a request ends the server, or what is wrong with it is not said.

    Or if a served environment reads lists where a local one reads tuples.
    """
    env = envs.make("remote", 2, 2, url=serve("test_remote:Odd", num_turns=2))
    for method, body, status in rows_of(FORGED):
        connection = HTTPConnection(env.url.netloc)
        connection.request(
            "POST", f"/{method}", body.replace("NESTED", "[" * 99_999), {"Authorization": "Bearer sesame"}
        )
        response = connection.getresponse()
        assert response.status == int(status), (method, body)
        assert len(json.loads(response.read()).splitlines()) == 1
        connection.close()
    assert env.step([(env.tasks("test")[0], [], ["", ""])])


# Environment | agents | turns
SERVED = """
test_remote:Odd | 2 | 2
humaneval | 2 | 2
debate | 3 | 3
reference | 3 | 2
tools | 3 | 3
"""


@pytest.mark.parametrize("name, num_agents, num_turns", rows_of(SERVED))
def test_a_run_is_the_same_as_the_local_one(name, num_agents, num_turns, serve, run, model_dir):
    """Fails if floats or own rewards are rounded, JSON changes silent agents, or a server remembers a history.

    Or if feedback, of which prompts or rewards are made, comes back as something else.
    """
    sizes = f"--num-agents {num_agents} --num-turns {num_turns} --num-tasks 2 --num-generations 3 --eval-tasks 2"
    flags = f"{sizes} --num-iterations 1 --max-new-tokens 12 --env"
    flags = (MAGRPO, "--model", model_dir, *flags.split())
    url = serve(name, num_agents=int(num_agents), num_turns=int(num_turns))
    local = run(*flags, name)["run_dir"]
    there = run(*flags, "remote", "--env-kwargs", "url", url)["run_dir"]
    assert metrics_of(local) == metrics_of(there) != []
    one, two = lines_of(local), lines_of(there)
    for line in one + two:
        line.pop("task", None)  # a client knows only its number
    assert one == two
