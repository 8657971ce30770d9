"""view.py: the page has the run's own numbers and texts, and works in a browser."""

import base64
import gzip
import json
import random
import re
import shutil
import subprocess
import sys
from itertools import accumulate, chain
from pathlib import Path
from string import Template

import pytest
from conftest import ROOT

FLAGS = ("--num-iterations", 2, "--num-generations", 3, "--num-tasks", 2, "--eval-every", 1, "--max-new-tokens", 12)
EVIL = "</script><script>document.body.id = 'broken'</script><img src=x onerror='document.body.id = 1'>"
ARGS = """{"script": "magrpo.py", "commit": "0123456789", "args": {"env": "letters", "num_agents": 2, "num_turns": 1,
    "gamma": 1.0, "seed": 1, "num_iterations": 9}}"""
METRICS = Template(
    '{"iteration": $k, "train/return": $k, "train/a_part_of_the_reward_that_has_quite_a_long_name": $k}'
)
NODE = Template(
    """{"iteration": $k, "split": "train", "turn": 1, "task_number": $n, "path": [],
    "task": {"question": "$task", "answer": "gold $evil"}, "joint": [[0, 0], [0, 1], [1, 0], [1, 1]],
    "rewards": [$n$k.0, $n$k.1, $n$k.2, $n$k.3], "parts": {"odd": [$odd, $odd, $odd, null]},
    "feedback": [null, {"said": "$evil"}, null, null], "agents": [
    {"prompt": "$noise", "completions": ["$evil 0 of A", "$evil 1 of A"], "stopped": [true, true],
     "returns": [$n$k.05, $n$k.25]},
    {"prompt": "$noise", "completions": ["$evil 0 of B", "$evil 1 of B"], "stopped": [true, false],
     "returns": [$n$k.1, $n$k.2]}]}""".replace("\n", "")
)


def make_run(folder, tasks=("easy", "hard"), iterations=5):
    """A run of two agents, written by hand. In iteration k, the joint actions of the first task have the rewards 1k.0
    to 1k.3, and those of the second one 2k.0 to 2k.3."""
    folder.mkdir()
    rng = random.Random(1)
    metrics = []
    nodes = []
    for k in range(1, iterations + 1):
        metrics.append(METRICS.substitute(k=k) + "\n")
        for n, task in enumerate(tasks, 1):
            noise = rng.randbytes(1000).hex()
            nodes.append(NODE.substitute(k=k, n=n, task=task, odd=k % 2, evil=EVIL, noise=noise) + "\n")
    (folder / "args.json").write_text(ARGS)
    (folder / "metrics.jsonl").write_text("".join(metrics))
    (folder / "rollouts.jsonl").write_text("".join(nodes))
    return folder


def page_of(folders, tmp_path, *flags):
    """Runs and texts of the page that the command line makes without a word on the terminal until the end."""
    output = tmp_path / "page.html"
    command = [sys.executable, ROOT / "view.py", *folders, "--output", output, *flags]
    done = subprocess.run([str(word) for word in command], check=True, capture_output=True)
    assert not done.stderr
    packed = re.search(r'<script id="data" type="text/plain">([^<]*)</script>', output.read_text(encoding="utf-8"))[1]
    lines = [gzip.decompress(base64.b64decode(line)).splitlines() for line in packed.split()]
    (head,), *levels = [[json.loads(line) for line in level] for level in lines]
    texts = [text for level in levels for text in level.pop(0)["texts"]]
    for node in sorted(chain(*levels), key=time_of):
        head["runs"][node.pop("run")]["nodes"].append(node)
    return head["runs"], texts


def time_of(node):
    return (node["iteration"], node["split"])


def lines_of(folder, name):
    lines = (Path(folder) / name).read_text().splitlines()
    return [json.loads(line, parse_float=lambda x: float(x) if "e" in x else round(float(x), 6)) for line in lines]


def unpack(node, texts):
    """A node of the page as it is in rollouts.jsonl, and its returns."""
    strings = [*texts, "null"]  # the last one for what is None
    returns = node.pop("returns", node["rewards"])
    node["feedback"] = [json.loads(strings[-1 if place is None else place]) for place in node["feedback"]]
    node["task"] = json.loads(strings[-1 if node["task"] is None else node["task"]])
    for agent in filter(None, node["agents"]):
        agent["prompt"] = strings[agent["prompt"]]
        agent["completions"] = [strings[place] for place in agent["completions"]]
    return node, returns


def compare(folder, runs, texts):
    """Every number and text of a run's logs against the page's."""
    (run,) = runs
    metrics = lines_of(folder, "metrics.jsonl")
    columns = {name: [line.get(name) for line in metrics] for name in run["columns"]}
    columns["sampled tokens"] = list(accumulate(line.get("tokens", 0) for line in metrics))
    assert run["columns"] == columns | {"seconds": run["columns"]["seconds"]}
    for packed, line in zip(run["nodes"], sorted(lines_of(folder, "rollouts.jsonl"), key=time_of), strict=True):
        node, returns = unpack(packed, texts)
        line["rewards"] = [x if isinstance(x, list) else [x] for x in line["rewards"]]
        assert node == {"task": None} | line
        for i, agent in enumerate(node["agents"]):
            for g, mean in enumerate(agent["returns"] if agent else []):
                of = [x[i % len(x)] for x, choice in zip(returns, node["joint"]) if choice[i] == g]
                assert sum(of) / len(of) == pytest.approx(mean, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("script, env, agents, turns, more", [
    ("magrpo", "toy:Letters", 3, 1, ("--joint-mode", "cross")),
    ("magrpo", "toy:Sequential", 2, 2, ("--joint-mode", "cross", "--gamma", 0.5)),
    ("ippo", "toy:Selfish", 2, 2, ("--gamma", 0.5, "--eval-generations", 2)),
])  # fmt: skip
def test_the_page_has_the_runs_numbers(run, model_dir, tmp_path, script, env, agents, turns, more):
    """Fails if a column is shifted by a line, if a text, part or return is at another agent, node or action, if a
    discount is left out, or if a page with few nodes lacks parents or has other tasks in each evaluation."""
    flags = ("--model", model_dir, "--env", env, "--num-agents", agents, "--num-turns", turns, *more)
    folder = run(ROOT / f"{script}.py", *FLAGS, *flags)["run_dir"]
    compare(folder, *page_of([folder], tmp_path, "--nodes", 10**6))
    ((few,), _) = page_of([folder], tmp_path, "--nodes", 2)
    keys = [(x["iteration"], x["split"], x["task_number"], *x["path"]) for x in few["nodes"]]
    assert all(len(key) == 3 or key[:-1] in keys for key in keys)
    roots = [key[2] for key in keys if len(key) == 3 and key[1] == "test"]
    assert (len(roots), len({*roots})) == (3 * 2, 2)


@pytest.mark.parametrize("megabytes", [0.001, 0.2, 20])
def test_a_page_with_too_many_iterations(tmp_path, megabytes):
    """Fails if the page is larger than asked, thinned without need, or lacks the first or the last iteration."""
    folder = make_run(tmp_path / "run", iterations=150)
    runs, texts = page_of([folder], tmp_path, "--megabytes", megabytes)
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


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or pytest.skip("no browser is installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, tmp_path):
    """The page of two runs. Whatever a test does there, no script may fail, fetch or come from a model."""
    folders = [make_run(tmp_path / "run"), make_run(tmp_path / "other", tasks=("hard", "new"))]
    page_of(folders, tmp_path)
    address = f"file://{tmp_path}/page.html"
    errors = []
    requests = []
    page = browser.new_page()
    page.on("pageerror", lambda error: errors.append(error))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(address)
    page.wait_for_selector("body[data-ready]")
    yield page
    assert page.evaluate("[document.body.id, document.querySelectorAll('script, img').length]") == ["", 2]
    assert not errors
    assert requests == [address]


def chosen_texts(page):
    return page.locator(".tree").first.locator(".completion.on .text").all_inner_texts()


def values_of(page, selector):
    return [float(value) for value in page.locator(selector).all_inner_texts()]


def test_clicks_and_the_slider(page):
    """Fails if a cell or the slider shows other texts, or if HTML from a model is more than text."""
    page.locator(".cell").nth(1).click()  # rows and columns are sorted by return
    assert chosen_texts(page) == [f"{EVIL} 1 of A", f"{EVIL} 0 of B"]
    page.locator(".chip").nth(1).click()
    assert chosen_texts(page) == [f"{EVIL} 0 of A", f"{EVIL} 0 of B"]
    page.locator("#iteration").press("ArrowLeft")
    assert page.inner_text("#where") == "iteration 4"


def test_the_task(page):
    """Fails if the gold answer is nowhere, or is that of another task."""
    text = page.locator(".tree >> nth=1 >> details >> nth=0").text_content()
    assert text.split("\n") == ["taskquestion hard", f"answer gold {EVIL}", ""]


def test_the_keyboard(page):
    """Fails if a text or a cell cannot be reached or chosen by keyboard, or if the choice loses the focus."""
    page.locator("#order").focus()
    for _ in range(7):  # task, prompt, two texts with a number each, a cell
        page.keyboard.press("Tab")
    for key in ("ArrowRight", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    assert chosen_texts(page) == [f"{EVIL} 0 of A", f"{EVIL} 0 of B"]
    assert page.evaluate("document.activeElement.className") == "cell on"
    page.locator(".completion").first.press(" ")
    assert chosen_texts(page) == [f"{EVIL} 1 of A", f"{EVIL} 0 of B"]


def test_arrows_with_a_filter(page):
    """Fails if the arrows stop at iterations without hits, or go on where there is none."""
    page.select_option("#part", "odd")
    page.fill("#than", "1")
    page.locator("h1").click()
    for iteration, trees in ((5, 0), (4, 2), (2, 2), (2, 2)):
        assert page.inner_text("#where") == f"iteration {iteration}"
        assert page.locator(".tree").count() == trees
        page.keyboard.press("ArrowLeft")


def test_the_order_over_the_whole_run(page):
    """Fails if a node of some iteration is not listed, if the order is wrong, or if the filters are left out."""
    page.select_option("#order", "run low")
    assert values_of(page, ".entry summary b") == [11, 12, 13, 14, 15, 21, 22, 23, 24, 25]
    page.select_option("#order", "run high")
    page.select_option("#part", "odd")
    page.fill("#than", "1")
    assert values_of(page, ".entry summary b") == [24.2, 22.2, 14.2, 12.2]  # the part of the fourth is not known
    page.locator(".entry summary").nth(1).click()
    page.wait_for_selector(".entry .tree")
    assert values_of(page, ".entry .cell.on") == [22.2]


def test_two_runs_side_by_side(page):
    """Fails if a task is next to another one, or next to another iteration."""
    page.select_option("#other", index=1)
    page.locator("#iteration").press("ArrowLeft")
    assert values_of(page, ".columns >> nth=0 >> .cell.on") == [14.3]  # the other run has no such task
    assert values_of(page, ".columns >> nth=1 >> .cell.on") == [24.3, 14.3]  # there, it has another number


def test_a_narrow_screen(page):
    """Fails if a chart's title loses its numbers, or if the page is wider than the screen."""
    page.set_viewport_size({"width": 390, "height": 800})
    for box in page.locator("html, .title").all():
        assert box.evaluate("box => box.scrollWidth <= box.clientWidth")
