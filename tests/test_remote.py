"""An environment served to other processes: what comes back, and who is refused."""

import json
import threading
from http.client import HTTPConnection

import pytest
from conftest import ROOT, lines_of, metrics_of
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


@pytest.fixture
def url(serve):
    return serve("test_remote:Odd", num_turns=2)


# Environment | agents | what all of them write in turn 1, 2, 3
SERVED = r"""
humaneval | 2 | def aux(x): return x | def broken(:
debate | 3 | \boxed{3} | so \boxed{4}
reference | 3 | sister | \boxed{angry sister}
tools | 3 | plan | DONE | \boxed{3}
"""


@pytest.mark.parametrize("name, num_agents, texts", [[*row[:2], row[2:]] for row in rows_of(SERVED)])
def test_prompts_and_steps_are_those_of_the_local_environment(name, num_agents, texts, serve):
    """Fails if the feedback of an environment comes back as something else, of which prompts or rewards are made."""
    sizes = {"num_agents": int(num_agents), "num_turns": len(texts)}
    local = envs.make(name, **sizes)
    there = envs.make("remote", **sizes, url=serve(name, **sizes))
    traces = []
    for env in local, there:
        task = env.tasks("test")[5]
        history = []
        traces.append([len(env.tasks("train"))])
        for text in texts:
            traces[-1].append(env.observe(task, history))
            history.append(([text] * int(num_agents), env.step([(task, history, [text] * int(num_agents))])[0]))
        traces[-1].append(history)
    assert json.dumps(traces[0]) == json.dumps(traces[1])


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


def test_a_forged_request_is_one_sentence_and_the_server_goes_on(url):
    """Fails if a task has two numbers, a request ends the server, or what is wrong with it is not said.

    Or if a served environment reads lists where a local one reads tuples.
    """
    env = envs.make("remote", 2, 2, url=url)
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


def test_a_run_of_two_turns_is_the_same_as_the_local_one(url, run, model_dir):
    """Fails if floats or own rewards are rounded, JSON changes silent agents, or a server remembers a history."""
    flags = "--num-turns 2 --num-iterations 1 --eval-tasks 2 --max-new-tokens 12 --env"
    flags = (ROOT / "magrpo.py", "--model", model_dir, *flags.split())
    local = run(*flags, "test_remote:Odd")["run_dir"]
    there = run(*flags, "remote", "--env-kwargs", "url", url)["run_dir"]
    assert metrics_of(local) == metrics_of(there) != []
    one, two = lines_of(local), lines_of(there)
    for line in one + two:
        line.pop("task", None)  # a client knows only its number
    assert one == two
