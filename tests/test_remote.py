"""An environment served to other processes: what comes back, and who is refused."""

import base64
import hmac
import pathlib
import pickle
import threading
from fractions import Fraction

import pytest
from conftest import ROOT, lines_of, metrics_of
from toy import Sequential, Step

import envs
from envs import remote

TASK = {"split": "train", "number": 0}


class Odd(Sequential):
    """Each agent has rewards of its own; prompts hold the feedback, which JSON would change."""

    def observe(self, task, history):
        told = [step.feedback for _, step in history]
        return [prompt and f"{prompt} {told}" for prompt in super().observe(task, history)]

    def step(self, branches):
        steps = []
        for _, _, actions in branches:
            worth = Fraction(len("".join(actions)), 7)
            steps.append(Step([float(worth), 0.1], {"worth": worth / 3 + 0.1}, False, {1: worth}))
        return steps


@pytest.fixture
def url(monkeypatch):
    """Of a server of Odd, which answers in threads of this process until the test ends."""
    monkeypatch.setenv(remote.TOKEN, "sesame")
    server = remote.Server(remote.Args("test_remote:Odd", port=0, num_turns=2))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_run_of_two_turns_is_the_same_as_the_local_one(url, run, model_dir):
    """Fails if floats are rounded, JSON changes feedback or silent agents, or a server remembers a history."""
    flags = "--num-turns 2 --num-iterations 1 --eval-tasks 2 --max-new-tokens 12 --env"
    flags = (ROOT / "magrpo.py", "--model", model_dir, *flags.split())
    local = run(*flags, "test_remote:Odd")["run_dir"]
    there = run(*flags, "remote", "--env-kwargs", "url", url)["run_dir"]
    assert metrics_of(local) == metrics_of(there) != []
    one, two = lines_of(local), lines_of(there)
    for line in one + two:
        line.pop("task", None)  # a client knows only its number
    assert one == two


def test_a_step_that_the_server_did_not_make_is_not_loaded(url, tmp_path):
    """Fails if a client's code runs on the server."""
    env = envs.make("remote", 2, 2, url=url)
    (step,) = env.step([(TASK, [], ["a", "b"])])
    touch = type("Touch", (), {"__reduce__": lambda self: (pathlib.Path.touch, (tmp_path / "loaded",))})
    data = pickle.dumps(touch())
    for seal in b"", base64.b64decode(step.sealed)[:32], hmac.digest(b"sesame", data, "sha256"):
        with pytest.raises(ValueError, match="no such Step"):
            forged = step._replace(sealed=base64.b64encode(seal + data).decode())
            env.observe(TASK, [(["a", "b"], forged)])
    assert not (tmp_path / "loaded").exists()
    assert env.observe(TASK, [(["a", "b"], step)])[1].endswith("[{1: Fraction(2, 7)}]")
