"""view.py: the page has the run's own numbers and texts, and works in a browser."""

import base64
import gzip
import json
import re
import shutil
import subprocess
import sys
from itertools import chain, product
from operator import itemgetter
from pathlib import Path

import pytest
from conftest import ROOT
from toy import rows_of

from view import choose, find_warnings, read_parts

FLAGS = "--num-iterations 2 --num-generations 3 --num-tasks 2 --eval-every 1 --max-new-tokens 12"
EVIL = "</script><script>document.body.id = 'broken'</script><img src=x onerror='document.body.id = 1'>"
ARGS = {"env": "tests.toy:Paying", "num_agents": 2, "num_turns": 1, "gamma": 1.0, "seed": 1, "num_iterations": 9}
TIME = itemgetter("iteration", "split")


def make_line(k, split, n, task):
    """A line of rollouts.jsonl: all joint actions of two agents with two completions each."""
    rewards = [10 * n + k + j / 10 for j in range(4)]
    agents = []
    for name in "AB":
        texts = [f"{EVIL} {g} of {name}" for g in range(2)]
        agent = {"prompt": f"Solve {task}", "completions": texts, "stopped": [True, True], "returns": rewards[:2]}
        agents.append(agent)
    return {
        "iteration": k,
        "split": split,
        "turn": 1,
        "task_number": n,
        "path": [],
        "task": {"question": task, "answer": f"gold {EVIL}"},
        "joint": list(product(range(2), repeat=2)),
        "rewards": rewards,
        "parts": [{"odd": 1, "size": k / 10}, {}, {}, {}],
        "feedback": [{"said": EVIL}] * 4,
        "agents": agents,
    }


def make_run(folder, iterations=5):
    """A run of two agents, written by hand: two tasks, for training and for testing. In iteration k, the joint actions
    of the first task have the rewards 1k.0 to 1k.3, and those of the second one 2k.0 to 2k.3."""
    folder.mkdir()
    about = {"script": "magrpo.py", "commit": "0123456789", "args": ARGS | {"eval_split": "test"}}
    (folder / "args.json").write_text(json.dumps(about))
    with open(folder / "metrics.jsonl", "w") as metrics, open(folder / "rollouts.jsonl", "w") as rollouts:
        for k in range(1, iterations + 1):
            means = dict.fromkeys(["iteration", "train/return", "train/odd", "train/size", "eval/return"], k)
            print(json.dumps(means | {"eval/return_se": 0.5}), file=metrics)
            for split in "train", "test":
                for n, task in enumerate(["easy", "hard"], 1):
                    print(json.dumps(make_line(k, split, n, task)), file=rollouts)
    return folder


def view(folders, tmp_path, *flags):
    """What the command line prints. There is no progress bar where there is no terminal."""
    command = [sys.executable, ROOT / "view.py", *folders, "--output", tmp_path / "page.html", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.stderr
    return done.stdout


def page_of(folders, tmp_path, *flags):
    """Runs and texts of the page that the command line makes."""
    view(folders, tmp_path, *flags)
    page = (tmp_path / "page.html").read_text()
    packed = re.search(r'<script id="data" type="text/plain">([^<]*)</script>', page)[1]
    lines = [gzip.decompress(base64.b64decode(line)).splitlines() for line in packed.split()]
    (head,), *levels = [map(json.loads, level) for level in lines]
    texts = {None: "null"}
    for level in levels:
        texts |= enumerate(next(level)["texts"], len(texts) - 1)
    for node in sorted(chain(*levels), key=TIME):
        head["runs"][node.pop("run")].setdefault("nodes", []).append(node)
    return head["runs"], texts


def lines_of(folder, name):
    lines = Path(folder, name).read_text().splitlines()
    return [json.loads(line, parse_float=lambda x: float(f"{float(x):.7g}")) for line in lines]


def compare(folder, runs, texts):
    """Every number and text of a run's logs against the page's."""
    (run,) = runs
    metrics = lines_of(folder, "metrics.jsonl")
    columns = {name: [line.get(name) for line in metrics] for name in run["columns"]}
    assert run["columns"] == columns
    for node, line in zip(run["nodes"], sorted(lines_of(folder, "rollouts.jsonl"), key=TIME), strict=True):
        line["rewards"] = [x if isinstance(x, list) else [x] for x in line["rewards"]]
        returns = node.pop("returns")
        node["feedback"] = [json.loads(texts[place]) for place in node["feedback"]]
        node["task"] = json.loads(texts[node["task"]])
        for i, agent in enumerate(node["agents"]):
            if agent:
                agent["prompt"] = texts[agent["prompt"]]
                agent["completions"] = [texts[place] for place in agent["completions"]]
                for g, mean in enumerate(agent["returns"]):
                    of = [x[i % len(x)] for x, choice in zip(returns, node["joint"]) if choice[i] == g]
                    assert sum(of) / len(of) == pytest.approx(mean, abs=1e-3)
        assert node == line


@pytest.mark.parametrize("script, flags", [
    ("magrpo", "--env toy:Letters --num-agents 3 --joint-mode cross"),
    ("magrpo", "--env toy:Sequential --num-turns 2 --joint-mode cross --gamma 0.5"),
    ("ippo", "--env toy:Selfish --num-turns 2 --gamma 0.5 --eval-generations 2"),
])  # fmt: skip
def test_the_page_has_the_runs_numbers(run, model_dir, tmp_path, script, flags):
    """Fails if a column is shifted by a line, if a text, part or return is at another agent, node or action, or if a
    discount is left out."""
    folder = run(ROOT / f"{script}.py", "--model", model_dir, *f"{FLAGS} {flags}".split())["run_dir"]
    compare(folder, *page_of([folder], tmp_path, "--nodes=1000000"))


def test_chosen_nodes_have_their_parents():
    """Fails if a page with few nodes has one whose parent is left out, or other tasks than those spread evenly."""
    roots = [{"turn": 1, "task_number": n, "path": [], "joint": [[0], [1]]} for n in range(4)]
    children = [root | {"turn": 2, "path": [0]} for root in roots[1:]]
    chosen = [(node["turn"], node["task_number"]) for node in choose(roots + children, 2)]
    assert chosen == [(1, 0), (1, 2), (2, 2)]


def test_a_cut_line_and_folders_without_rollouts(tmp_path):
    """Fails if a run in progress, or what else is in runs/, stops the page."""
    rollouts = make_run(tmp_path / "run") / "rollouts.jsonl"
    rollouts.write_bytes(rollouts.read_bytes()[:-9])
    ((cut,), _) = page_of([tmp_path, tmp_path / "run"], tmp_path)
    assert cut["logged"] == 19


def test_what_parts_pay(capsys):
    """Fails if an environment that has no PARTS, or is not here, stops the page or is passed over in silence."""
    assert [*read_parts(["nowhere:Own", "tests.toy:Letters", "tests.toy:Paying"])] == ["tests.toy:Paying"]
    assert capsys.readouterr().out.count("\n") == 2


# Turn | task | path | the parts of its joint actions; two trajectories of a task
PASSED = """
1 | 1 | [] | [{"all_passed": 1.0}, {"all_passed": 0.0}]
1 | 2 | [] | [{"all_passed": 1.0}, {"all_passed": 0.0}]
1 | 3 | [] | [{"all_passed": 0.0}, {"all_passed": 0.0}]
1 | 4 | [] | [{}, {}]
2 | 1 | [1] | [{"all_passed": 0.0}]
2 | 2 | [0] | [{"all_passed": 0.0}]
2 | 2 | [1] | [{"all_passed": 0.0}]
2 | 3 | [1] | [{"all_passed": 1.0}]
"""
MEASURED = """{"iteration": 1}
{"iteration": 2, "eval/return": 2.4481, "eval/return_se": 0.0796}
"""


def test_how_many_pass(tmp_path):
    """Fails if pass@n counts answers or tasks without tests, an earlier turn counts, or its iteration is another."""
    folder = make_run(tmp_path / "run", iterations=0)
    (folder / "metrics.jsonl").write_text(MEASURED)
    with open(folder / "rollouts.jsonl", "w") as rollouts:
        for row in rows_of(PASSED):
            turn, n, path, parts = map(json.loads, row)
            line = make_line(2, "test", n, "") | {"turn": turn, "path": path, "parts": parts}
            print(json.dumps(line), file=rollouts)
    (run,), _ = page_of([folder], tmp_path)
    assert run["columns"]["eval/pass@1"] == [None, pytest.approx(1 / 3)]
    assert run["columns"]["eval/pass@2"] == [None, pytest.approx(2 / 3)]
    assert "2.448 +- 0.080" in run["result"]


# A metric | its values, from iteration 0 on | whether there is a warning
SEEN = """
train/zero_variance_groups | [null, 0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1] | 1
train/zero_variance_groups | [null, 0.9, 1, 1, 1, 1, 1, 1, 1, 1, 1] | 0
eval/agent_1/stopped | [0.5, 0, null] | 1
eval/agent_1/stopped | [0, 0.1, null] | 0
train/agent_0/entropy | [null, 1, 0.009] | 1
train/agent_0/entropy | [null, 1, 0.011] | 0
"""


@pytest.mark.parametrize("name, values, known", rows_of(SEEN))
def test_why_the_reward_does_not_rise(name, values, known):
    """Fails if a cause that the metrics show is not told, or one that has passed is."""
    values = json.loads(values)
    warnings = find_warnings("runs/x", {"tokens": values, name: values})
    assert [warning.startswith(f"runs/x: {name} ") for warning in warnings] == [True] * int(known)


@pytest.mark.optional("playwright")
def test_the_page_in_a_browser(tmp_path):
    """Fails if a script fails, fetches or comes from a model, if a cell shows other texts, if a curve or its standard
    errors are missing, if a paid part is not marked or stands behind a diagnostic, or if the button does not show the
    same task at the first and the last evaluation, its prompts once, and the next one with an arrow key."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or pytest.skip("no browser is installed")
    view([make_run(tmp_path / "run")], tmp_path)
    address = f"file://{tmp_path}/page.html"
    events = []
    with sync_playwright() as playwright:
        page = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"]).new_page()
        page.on("pageerror", lambda error: events.append(error))
        page.on("request", lambda request: events.append(request.url))
        page.goto(address)
        page.click(".cell >> nth=1")  # rows and columns are sorted by return
        chosen = page.locator(".tree >> nth=0 >> .on .text")
        assert chosen.all_inner_texts() == [f"{EVIL} 1 of A", f"{EVIL} 0 of B"]
        dots = page.locator(".big title").all_text_contents()
        assert dots[-1].endswith("evaluation, iteration 5\nreturn 5.00 \u00b1 0.500")
        bars = page.locator(".big .error").last.get_attribute("d")
        assert bars.count("M") == 5
        assert page.inner_text(".title b >> nth=1") == "size paid, at most 0.5"
        page.click("#pair")
        page.keyboard.press("ArrowRight")
        assert page.locator(".tree pre").count() == 3  # the task, and the prompt of each agent
        assert page.inner_text(".parts tr >> nth=1") == "reward\t21.3\t25.3\t+4.00"
        page.click("#pair")
        assert page.inner_text("#where") == "iteration 5"
        assert page.evaluate("[document.body.id, document.querySelectorAll('script, img').length]") == ["", 2]
    assert events == [address]
