"""view.py: the page has the run's own numbers and texts, and works in a browser."""

import base64
import gzip
import importlib
import json
import random
import re
import shutil
import subprocess
import sys
from itertools import chain
from operator import itemgetter
from pathlib import Path
from runpy import run_path
from string import Template

import pytest
from conftest import ROOT

FLAGS = "--num-iterations 2 --num-generations 3 --num-tasks 2 --eval-every 1 --max-new-tokens 12"
EVIL = "</script><script>document.body.id = 'broken'</script><img src=x onerror='document.body.id = 1'>"
ARGS = """{"script": "magrpo.py", "commit": "0123456789", "args": {"env": "letters", "num_agents": 2, "num_turns": 1,
    "gamma": 1.0, "seed": 1, "num_iterations": 9, "eval_split": "test"}}"""
METRICS = Template("""{"iteration": $k, "train/return": $k, "eval/return": $k, "eval/return_se": 0.5, \
"time/iteration": $k, "agent_0/grad_norm": 0.0, "eval/agent_1/stopped": 0.0, \
"train/a_part_of_the_reward_that_has_quite_a_long_name": $k}
""")
NODE = Template("""{"iteration": $k, "split": "train", "turn": 1, "task_number": $n, "path": [], \
"task": {"question": "$task", "answer": "gold $evil"}, "joint": [[0, 0], [0, 1], [1, 0], [1, 1]], \
"rewards": [$n$k.0, $n$k.1, $n$k.2, $n$k.3], "parts": {"odd": [$odd, $odd, $odd, null]}, \
"feedback": [null, {"said": "$evil"}, null, null], "agents": [{"prompt": "$noise", \
"completions": ["$evil 0 of A", "$evil 1 of A"], "stopped": [true, true], "returns": [$n$k.05, $n$k.25]}, \
{"prompt": "$noise", "completions": ["$evil 0 of B", "$evil 1 of B"], "stopped": [true, false], \
"returns": [$n$k.1, $n$k.2], "advantages": null}]}
""")
BRANCH = Template("""{"iteration": $k, "split": "train", "turn": 2, "task_number": $n, "path": [$j], "task": {}, \
"joint": [[0, 0]], "rewards": [100.0], "parts": {"odd": [1.0]}, "feedback": [null], "agents": [null, {"prompt": "$j", \
"completions": ["branch $j"], "stopped": [true], "returns": [100.0], "advantages": [$j.0]}]}
""")
LONG = "a_run_whose_name_is_longer_than_a_narrow_screen_is_wide"
CHOSEN = ".tree >> nth=0 >> .on .text"
TIME = itemgetter("iteration", "split")
in_browser = pytest.mark.optional("playwright")


def make_run(folder, tasks=("easy", "hard"), iterations=5, branches=0):
    """A run of two agents, written by hand. In iteration k, the joint actions of the first task have the rewards 1k.0
    to 1k.3, and those of the second one 2k.0 to 2k.3. Some may lead to one more completion each."""
    folder.mkdir()
    (folder / "args.json").write_text(ARGS)
    with open(folder / "metrics.jsonl", "w") as metrics, open(folder / "rollouts.jsonl", "w") as rollouts:
        for k in range(1, iterations + 1):
            metrics.write(METRICS.substitute(k=k))
            for n, task in enumerate(tasks, 1):
                noise = random.randbytes(1000).hex()
                rollouts.write(NODE.substitute(k=k, n=n, task=task, odd=k % 2, evil=EVIL, noise=noise))
                rollouts.writelines(BRANCH.substitute(k=k, n=n, j=j) for j in range(branches))
    return folder


def view(folders, tmp_path, *flags, script=ROOT / "view.py"):
    command = [sys.executable, script, *folders, "--output", tmp_path / "page.html", *flags]
    return subprocess.run(command, capture_output=True, text=True)


def page_of(folders, tmp_path, *flags):
    """Runs and texts of the page that the command line makes, without a bar where there is no terminal."""
    assert not view(folders, tmp_path, *flags).stderr
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
        assert node == {"task": None} | line


@pytest.mark.parametrize("script, flags", [
    ("magrpo", "--env toy:Letters --num-agents 3 --joint-mode cross"),
    ("magrpo", "--env toy:Sequential --num-turns 2 --joint-mode cross --gamma 0.5"),
    ("ippo", "--env toy:Selfish --num-turns 2 --gamma 0.5 --eval-generations 2"),
])  # fmt: skip
def test_the_page_has_the_runs_numbers(run, model_dir, tmp_path, script, flags):
    """Fails if a column is shifted by a line, if a text, part or return is at another agent, node or action, if a
    discount is left out, or if a page with few nodes lacks parents or has other tasks in each evaluation."""
    folder = run(ROOT / f"{script}.py", "--model", model_dir, *f"{FLAGS} {flags}".split())["run_dir"]
    compare(folder, *page_of([folder], tmp_path, "--nodes=1000000"))
    ((few,), _) = page_of([folder], tmp_path, "--nodes=2")
    keys = [(x["iteration"], x["split"], x["task_number"], *x["path"]) for x in few["nodes"]]
    assert all(len(key) == 3 or key[:-1] in keys for key in keys)
    assert len({key[2] for key in keys if key[1] == "test"}) == 2


@pytest.mark.parametrize("megabytes", [0.001, 0.2, 20])
def test_a_page_with_too_many_iterations(tmp_path, megabytes):
    """Fails if the page is larger than asked, thinned without need, or lacks the first or the last iteration."""
    folder = make_run(tmp_path / "run", iterations=150)
    runs, texts = page_of([folder], tmp_path, f"--megabytes={megabytes}")
    times = {node["iteration"] for node in runs[0]["nodes"]}
    size = (tmp_path / "page.html").stat().st_size / 1e6
    assert {1, 150} <= times
    assert size <= megabytes or len(times) == 2
    if size < 0.5 * megabytes:
        compare(folder, runs, texts)


def test_a_cut_line_and_folders_without_rollouts(tmp_path):
    """Fails if a run in progress, or what else is in runs/, stops the page."""
    rollouts = make_run(tmp_path / "run") / "rollouts.jsonl"
    rollouts.write_bytes(rollouts.read_bytes()[:-9])
    ((cut,), _) = page_of([tmp_path, tmp_path / "run"], tmp_path)
    assert cut["logged"] == 9


PASSED = [  # turn, task, path, all_passed of the joint actions; two trajectories of a task
    (1, 1, [], [1.0, 0.0]), (1, 2, [], [1.0, 0.0]), (1, 3, [], [0.0, 1.0]), (1, 4, [], None),
    (2, 1, [1], [0.0]), (2, 2, [0], [0.0]), (2, 2, [1], [0.0]), (2, 3, [0], [1.0]),
]  # fmt: skip


def test_how_many_pass(tmp_path):
    """Fails if pass@n counts answers or tasks without tests, an earlier turn counts, or its iteration is another."""
    folder = make_run(tmp_path / "run", iterations=1)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 2, "eval/return": 2.4481, "eval/return_se": 0.0796}\n')
    with open(folder / "rollouts.jsonl", "a") as file:
        for turn, task, path, passed in PASSED:
            J = 3 - turn
            about = {"iteration": 2, "split": "test", "turn": turn, "task_number": task, "task": {}, "path": path}
            parts = {"all_passed": passed} if passed else {}
            scores = {"joint": [[j] for j in range(J)], "rewards": [0.0] * J, "parts": parts, "feedback": [None] * J}
            file.write(json.dumps({**about, **scores, "agents": []}) + "\n")
    (run,), _ = page_of([folder], tmp_path)
    assert run["columns"]["eval/pass@1"] == [None, 0.5]
    assert run["columns"]["eval/pass@2"] == [None, pytest.approx(2 / 3)]
    assert "2.448 +- 0.080" in run["result"]


@pytest.mark.parametrize("name, values, known", [
    ("train/zero_variance_groups", [None, 0.5, *[1.0] * 10], True),
    ("train/zero_variance_groups", [None, 1.0, 1.0], True),
    ("train/zero_variance_groups", [None, 0.9, *[1.0] * 9], False),
    ("eval/agent_1/stopped", [0.5, None, 0.0, None], True),
    ("eval/agent_1/stopped", [0.0, None, 0.1, None], False),
    ("train/agent_0/entropy", [None, 1.0, 2.0, 0.009], True),
    ("train/agent_0/entropy", [None, 1.0, 2.0, 0.011], False),
])  # fmt: skip
def test_why_the_reward_does_not_rise(name, values, known):
    """Fails if a cause that the metrics show is not told, or one that has passed is."""
    warnings = run_path(str(ROOT / "view.py"))["find_warnings"]("runs/x", {"tokens": values, name: values})
    assert [warning.startswith(f"runs/x: {name} ") for warning in warnings] == [True] * known


@pytest.fixture(scope="module")
def browser():
    api = importlib.import_module("playwright.sync_api")
    path = shutil.which("chromium") or pytest.skip("no browser is installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, tmp_path):
    """The page of two runs. Whatever a test does there, no script may fail, fetch or come from a model."""
    folders = [make_run(tmp_path / "run"), make_run(tmp_path / LONG, tasks=("hard", "new"), branches=4)]
    view(folders, tmp_path, "--nodes=2")
    address = f"file://{tmp_path}/page.html"
    events = []
    page = browser.new_page()
    page.on("pageerror", lambda error: events.append(error))
    page.on("request", lambda request: events.append(request.url))
    page.goto(address)
    page.wait_for_selector("body[data-ready]")
    yield page
    assert page.evaluate("[document.body.id, document.querySelectorAll('script, img').length]") == ["", 2]
    assert events == [address]


def texts_of(page, selector):
    return " ".join(page.locator(selector).all_inner_texts()).replace(EVIL, "evil")


@in_browser
def test_clicks_and_the_slider(page):
    """Fails if a cell or the slider shows other texts, or if HTML from a model is more than text."""
    page.click(".cell >> nth=1")  # rows and columns are sorted by return
    assert texts_of(page, CHOSEN) == "evil 1 of A evil 0 of B"
    page.click(".chip >> nth=1")
    assert texts_of(page, CHOSEN) == "evil 0 of A evil 0 of B"
    page.press("#iteration", "ArrowLeft")
    assert page.inner_text("#where") == "iteration 4"


@in_browser
def test_the_task(page):
    """Fails if the gold answer is nowhere, or is that of another task."""
    text = page.text_content(".tree >> nth=1 >> details >> nth=0")
    assert text == f"taskquestion hard\nanswer gold {EVIL}\n"


@in_browser
def test_the_keyboard(page):
    """Fails if a text or a cell cannot be reached or chosen by keyboard, or if the choice loses the focus."""
    page.focus("#order")
    tabs = ["Tab"] * 7  # task, prompt, two texts with a number each, a cell
    for key in (*tabs, "ArrowRight", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    assert texts_of(page, CHOSEN) == "evil 0 of A evil 0 of B"
    assert page.evaluate("document.activeElement.className") == "cell on"
    page.press(".completion >> nth=0", " ")
    assert texts_of(page, CHOSEN) == "evil 1 of A evil 0 of B"


@in_browser
def test_the_order_over_the_whole_run(page):
    """Fails if a node of some iteration is not listed, if the order is wrong, or if the filters are left out."""
    page.select_option("#order", "run low")
    assert texts_of(page, ".entry summary b") == "11.0 12.0 13.0 14.0 15.0 21.0 22.0 23.0 24.0 25.0"
    page.select_option("#order", "run high")
    page.select_option("#part", "odd")
    page.fill("#than", "1")
    assert texts_of(page, ".entry summary b") == "24.2 22.2 14.2 12.2"  # the part of the fourth is not known
    page.click(".entry >> nth=1")
    page.wait_for_selector(".entry .tree")
    assert texts_of(page, ".entry .cell.on") == "22.2"


@in_browser
def test_two_runs_side_by_side(page):
    """Fails if a task is next to another one, or next to another iteration."""
    page.select_option("#other", index=1)
    page.press("#iteration", "ArrowLeft")
    assert texts_of(page, ".columns >> nth=0 >> .cell.on") == "14.3"  # the other run has no such task
    assert texts_of(page, ".columns >> nth=1 >> .cell.on") == "24.3 114"  # there, it has another number


@in_browser
def test_branches_of_a_turn(page):
    """Fails if completions of a task that were compared with each other are on pages of their own, are left out of a
    page with few nodes, or lead to another one's branch."""
    page.select_option("#run", index=1)
    page.click("text=branch 1 >> nth=0")
    assert texts_of(page, CHOSEN) == "evil 0 of A evil 1 of B branch 1"


@in_browser
def test_what_a_metric_means(page):
    """Fails if a metric that never changes is nowhere, or if the docs know a metric and its chart does not."""
    assert page.inner_text("section > p >> nth=0") == "constant: agent 0: grad_norm 0, agent 1: stopped 0"
    assert texts_of(page, ".title b[title]") == "return"


@in_browser
def test_what_was_spent(page):
    """Fails if curves over seconds or tokens start anew at each line."""
    columns = page.evaluate("data.runs[0].columns")
    assert (columns["seconds"], columns["sampled tokens"]) == ([1, 3, 6, 10, 15], [0] * 5)


@in_browser
def test_warnings_are_seen(page, tmp_path):
    """Fails if a run's warning is not at its charts, or not in the terminal."""
    _, *lines = view([tmp_path / "run", tmp_path / LONG], tmp_path).stdout.splitlines()
    assert [line.endswith("return 5.000 +- 0.500") for line in lines] == [True, False] * 2
    assert page.locator("section:has(.chart) > .warning").all_inner_texts() == lines[1::2]
