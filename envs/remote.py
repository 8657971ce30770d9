"""An environment on another machine: one that has the sandbox grades, one that has not trains.

    TUTTI_TOKEN=... python -m envs.remote humaneval --num-turns 2
    TUTTI_TOKEN=... python magrpo.py --env remote --env-kwargs url http://127.0.0.1:8765

The server keeps nothing between two requests: a client names a task by its number, and sends the branch's history
each time. So the branches of several clients cannot mix, and the tests of a task stay where they are.

All that crosses is JSON, so feedback has to be what JSON keeps. Who has the token can have answers graded, no more: a
Step that the server did not make changes only what its sender reads. Nothing is encrypted: between two machines, use
`ssh -L 8765:localhost:8765 HOST`, or a proxy with https.
"""

import hmac
import json
import os
import sys
import threading
import time
import traceback
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import tyro

import envs

TOKEN = "TUTTI_TOKEN"  # the environment variable with the token, on both machines
LIMIT = 64_000_000  # bytes of a request
PATIENCE = 60  # seconds in which the client tries a refused connection again: the server may be starting


@dataclass
class Args:
    env: tyro.conf.Positional[str]  # a name that envs/ knows, several joined by +, or module:Class of your own
    num_agents: int = 2
    num_turns: int = 1
    dataset: str = "sample"
    seed: int = 1  # of the sample tasks
    env_kwargs: dict[str, str] = field(default_factory=dict)  # its own options, such as: feedback plain
    host: str = "127.0.0.1"  # who can connect: this machine alone; 0.0.0.0: all machines
    port: int = 8765


class Remote:
    """The client of python -m envs.remote: asks a server for whatever the scripts ask an environment.

    url: where the server listens; its token is in the environment variable TUTTI_TOKEN
    num_agents, num_turns: have to be the server's; without --num-turns the server's is taken
    dataset, seed: have no effect here; the server's make the tasks

    Raises ValueError with one sentence where there is no server, or it refuses, or its environment raises.
    """

    def __init__(self, num_agents, num_turns, dataset, seed, url="http://127.0.0.1:8765"):
        self.url = urlsplit(url)
        if self.url.scheme not in ("http", "https"):
            raise ValueError(f"--env-kwargs url {url}: it has to start with http:// or https://.")
        about = self._ask("about")
        self.num_turns = about["num_turns"]
        if num_agents != about["num_agents"] or num_turns not in (1, self.num_turns):
            served = f"--num-agents {about['num_agents']} --num-turns {self.num_turns}"
            raise ValueError(f"--env-kwargs url {url}: what it serves has {served}; use these.")
        self.counts = about["tasks"]  # split -> how many
        self.observe = partial(self._ask, "observe")
        if about["state"]:
            self.state = partial(self._ask, "state")

    def tasks(self, split):
        return [{"split": split, "number": number} for number in range(self.counts[split])]

    def step(self, branches):
        return [envs.Step(*values) for values in self._ask("step", *branches)]

    def _ask(self, method, *arguments):
        for second in range(PATIENCE + 1):
            try:
                status, answer = self._exchange(method, arguments)
                break
            except (OSError, HTTPException, ValueError) as error:
                if second == PATIENCE or not isinstance(error, ConnectionRefusedError):
                    raise ValueError(
                        f"{self.url.geturl()}: no server of envs.remote answers there ({error!r})."
                    ) from None
                if second == 0:
                    print(
                        f"waits up to {PATIENCE} s for a server of envs.remote at {self.url.geturl()}", file=sys.stderr
                    )
                time.sleep(1)
        if status != 200:
            raise ValueError(f"{self.url.geturl()}: {answer}")
        return answer

    def _exchange(self, method, arguments):
        """(status, answer) of one request."""
        kind = HTTPSConnection if self.url.scheme == "https" else HTTPConnection
        headers = {"Authorization": f"Bearer {os.environ.get(TOKEN, '').strip()}"}
        with closing(kind(self.url.netloc, timeout=3600)) as connection:
            with suppress(BrokenPipeError, ConnectionResetError):  # it can refuse before it has read all
                connection.request("POST", f"{self.url.path}/{method}", json.dumps(arguments).encode(), headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())


class Server(ThreadingHTTPServer):
    """Serves one environment to all who know the token. Raises ValueError with one sentence."""

    def __init__(self, args):
        self.token = os.environ.get(TOKEN, "").strip()
        if not self.token:
            raise ValueError(f"set {TOKEN} to a long random text, here and at the client.")
        env = envs.make(args.env, args.num_agents, args.num_turns, args.dataset, args.seed, **args.env_kwargs)
        state = getattr(env, "state", None)  # only some have it
        self.env = env
        # dicts: a list would take -1 for a task
        self.splits = {split: dict(enumerate(env.tasks(split))) for split in ("train", "test")}
        self.readers = {"/observe": env.observe, "/state": state}
        self.about = {
            "num_agents": args.num_agents,
            "num_turns": getattr(env, "num_turns", args.num_turns),
            "tasks": {split: len(tasks) for split, tasks in self.splits.items()},
            "state": state is not None,
        }
        self.batch = threading.Lock()
        super().__init__((args.host, args.port), _Handler)

    def understand(self, path, body):
        """What a request asks for, as a function without arguments. Many types of errors mean that it is malformed."""
        arguments = json.loads(body)
        if path == "/about":
            return lambda: self.about
        if path == "/step":
            return partial(self._step, [(*self._restore(*place), actions) for *place, actions in arguments])
        return partial(self.readers[path], *self._restore(*arguments))

    def _step(self, branches):
        with self.batch:  # two at once would slow each other's tests down, beyond their limits of time
            steps = self.env.step(branches)
        feedback = [step.feedback for step in steps]
        if json.loads(json.dumps(feedback, default=str)) != feedback:
            raise ValueError("feedback has to consist of strings, numbers, lists, and dicts whose keys are strings")
        return [(step.reward, step.parts, step.done, step.feedback) for step in steps]

    def _restore(self, task, history):
        """The environment's own task and history."""
        own = self.splits[task["split"]][task["number"]]
        return own, [(actions, envs.Step(*step)) for actions, step in history]


class _Handler(BaseHTTPRequestHandler):
    timeout = 60  # seconds without a byte from the client

    def do_POST(self):
        status, answer = self._answer()
        body = json.dumps(answer, default=str).encode()  # as in rollouts.jsonl
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _answer(self):
        """(status, what is sent back)"""
        authorization = self.headers.get("Authorization", "")
        if not hmac.compare_digest(authorization.encode(), f"Bearer {self.server.token}".encode()):
            return 401, f"the token is wrong or missing; set {TOKEN} to the server's."
        try:
            size = int(self.headers.get("Content-Length", ""))
            if size > LIMIT:
                return 413, f"the request has {size} bytes, and {LIMIT} are allowed; use fewer --num-tasks."
            call = self.server.understand(self.path, self.rfile.read(max(0, size)))
        except (LookupError, RecursionError, TimeoutError, TypeError, ValueError) as error:
            return 400, f"the request is malformed ({type(error).__name__}: {error})."
        try:
            return 200, call()
        except (Exception, SystemExit) as error:  # an environment may raise any, and end the program
            traceback.print_exc()
            return 500, f"its environment raised {type(error).__name__}: {error}"


if __name__ == "__main__":
    args = tyro.cli(Args)
    try:
        server = Server(args)
    except (ModuleNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{args.env} is served at http://{args.host}:{server.server_port} until Ctrl-C", flush=True)
    with suppress(KeyboardInterrupt):
        server.serve_forever()
