"""An environment served to other processes: what comes back, and who is refused."""

import threading

import pytest
from conftest import ROOT, lines_of, metrics_of
from toy import Sequential, Step

import envs
from envs import remote


class Odd(Sequential):
    """Each agent has rewards of its own; prompts hold the feedback, which JSON would change after "odd"."""

    def observe(self, task, history):
        told = [step.feedback for _, step in history]
        return [prompt and f"{prompt} {told}" for prompt in super().observe(task, history)]

    def step(self, branches):
        steps = []
        for _, _, actions in branches:
            worth = len("".join(actions)) / 7
            feedback = {"worth": (worth,) if "odd" in actions else [worth]}
            steps.append(Step([worth, 0.1], {"worth": worth / 3 + 0.1}, False, feedback))
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


def test_feedback_that_json_changes_is_refused(url):
    """Fails if a served environment reads lists where a local one reads tuples."""
    env = envs.make("remote", 2, 2, url=url)
    with pytest.raises(ValueError, match="feedback has to"):
        env.step([(env.tasks("train")[0], [], ["odd", ""])])
