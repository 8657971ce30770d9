"""view.py: the page has the run's own numbers and texts, and works in a browser."""

import base64
import gzip
import json
import re
import shutil
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import pytest
from conftest import ROOT
from toy import Sequential

FLAGS = ("--num-iterations", 2, "--num-generations", 3, "--num-tasks", 2, "--eval-every", 1, "--max-new-tokens", 12)
EVIL = "</script><script>document.body.id = 'broken'</script><img src=x onerror=\"document.body.id = 'broken'\">"


class Reviewed(Sequential):
    """Silent agents, and feedback that names its joint action."""

    def step(self, branches):
        steps = super().step(branches)
        return [step._replace(feedback={"said": "".join(step.actions)}) for step in steps]


def page_of(folders, tmp_path, *flags):
    """(the page's text, its data) as the command line makes it."""
    output = tmp_path / "page.html"
    command = [sys.executable, ROOT / "view.py", *folders, "--output", output, *flags]
    subprocess.run([str(word) for word in command], check=True, capture_output=True)
    page = output.read_text(encoding="utf-8")
    packed = re.search(r'<script id="data" type="text/plain">([^<]*)</script>', page)[1]
    return page, json.loads(gzip.decompress(base64.b64decode(packed)))


def lines_of(folder, name):
    return [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]


def near(x):
    """Equal up to the five digits that the page keeps."""
    if isinstance(x, list):
        return [near(value) for value in x]
    return x if x is None else pytest.approx(x, rel=1e-4, abs=1e-12)


def compare(folder, data):
    """Every number and text of a run's logs against the page's."""
    run, metrics, lines = data["runs"][0], lines_of(folder, "metrics.jsonl"), lines_of(folder, "rollouts.jsonl")
    for name in {name for line in metrics for name in line}:
        assert run["columns"][name] == near([line.get(name) for line in metrics])
    assert run["columns"]["sampled tokens"] == list(accumulate(line.get("tokens", 0) for line in metrics))
    nodes = {(x["iteration"], x["split"], x["task"], *x["path"]): x for x in run["nodes"]}
    assert len(nodes) == len(run["nodes"]) == len(lines) == run["logged"]
    for line in lines:
        node = nodes[line["iteration"], line["split"], line["task_number"], *line["path"]]
        assert node["turn"] == line["turn"] and node["joint"] == line["joint"]
        assert [x if len(x) > 1 else x[0] for x in node["rewards"]] == near(line["rewards"])
        assert node["parts"] == {name: near(values) for name, values in line["parts"].items()}
        shown = [None if place is None else data["texts"][place] for place in node["feedback"]]
        assert shown == [x if x is None else json.dumps(x, ensure_ascii=False) for x in line["feedback"]]
        assert [agent is None for agent in node["agents"]] == [agent is None for agent in line["agents"]]
        for i, (agent, logged) in enumerate(zip(node["agents"], line["agents"])):
            if agent:
                assert agent.keys() == logged.keys() and agent["stopped"] == logged["stopped"]
                assert data["texts"][agent["prompt"]] == logged["prompt"]
                assert [data["texts"][place] for place in agent["completions"]] == logged["completions"]
                for name in ("returns", "advantages"):
                    assert agent.get(name) == near(logged.get(name))
                # the returns of joint actions, which the page adds, have a text's return as their mean
                of = [[x[i % len(x)] for x, choice in zip(node["returns"], node["joint"]) if choice[i] == g]
                      for g in range(len(agent["completions"]))]  # fmt: skip
                assert [sum(values) / len(values) for values in of] == pytest.approx(
                    agent["returns"], rel=1e-3, abs=1e-3
                )


@pytest.mark.parametrize("script, env, agents, turns, more", [
    ("magrpo", "toy:Letters", 1, 1, ()),
    ("magrpo", "toy:Letters", 2, 1, ("--joint-mode", "cross")),
    ("magrpo", "toy:Letters", 3, 2, ("--gamma", 0.5, "--eval-generations", 2)),
    ("magrpo", "test_view:Reviewed", 2, 2, ("--joint-mode", "cross", "--gamma", 0.5)),
    ("magrpo", "toy:Selfish", 2, 2, ("--joint-mode", "align")),
    ("ippo", "toy:Letters", 2, 2, ()),
])  # fmt: skip
def test_the_page_has_the_runs_numbers(run, model_dir, tmp_path, script, env, agents, turns, more):
    """A column shifted by a line; a text, part or return at another agent, node or action; a discount left out."""
    flags = ("--model", model_dir, "--env", env, "--num-agents", agents, "--num-turns", turns, *more)
    folder = run(ROOT / f"{script}.py", *FLAGS, *flags)["run_dir"]
    compare(folder, page_of([folder], tmp_path, "--nodes", 10**6)[1])


def test_few_nodes_and_a_small_page(run, model_dir, tmp_path):
    """Children without their parent; other tasks in each evaluation; a thinned page that lacks its first or last."""
    flags = ("--model", model_dir, "--env", "toy:Letters", "--num-turns", 2, "--num-iterations", 5)
    longer = ("--max-new-tokens", 24, "--eval-generations", 3)  # some branches end after a turn
    folder = run(ROOT / "magrpo.py", *FLAGS, *flags, *longer)["run_dir"]
    _, data = page_of([folder], tmp_path, "--nodes", 2)
    nodes, seen = data["runs"][0]["nodes"], {}
    for node in nodes:
        seen.setdefault((node["iteration"], node["split"], node["turn"]), []).append((node["task"], *node["path"]))
    assert max(map(len, seen.values())) == 2 and data["every"] == 1 < len(nodes) < data["runs"][0]["logged"]
    for (iteration, split, turn), places in seen.items():
        assert turn == 1 or all(place[:-1] in seen[iteration, split, 1] for place in places)
    assert len({str(places) for key, places in seen.items() if key[1:] == ("test", 1)}) == 1
    _, least = page_of([folder], tmp_path, "--megabytes", 0.001)
    assert {node["iteration"] for node in least["runs"][0]["nodes"] if node["split"] == "test"} == {0, 5}
    assert least["runs"][0]["columns"] == data["runs"][0]["columns"] and len(least["texts"]) < len(
        page_of([folder], tmp_path)[1]["texts"]
    )


def test_a_resumed_run_a_cut_line_and_folders_without_rollouts(run, model_dir, tmp_path):
    """Lines doubled or lost by a resume; a page that fails on a run in progress, or on what else lies in runs/."""
    flags = ("--model", model_dir, "--env", "toy:Letters")
    folder = run(ROOT / "magrpo.py", *FLAGS, *flags)["run_dir"]
    run(ROOT / "magrpo.py", "--resume", folder, "--num-iterations", 4)
    _, whole = page_of([folder], tmp_path, "--nodes", 10**6)
    compare(folder, whole)
    assert whole["runs"][0]["columns"]["iteration"] == [0, 1, 2, 3, 4]
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        path = Path(folder) / name
        path.write_bytes(path.read_bytes()[:-9])
    (tmp_path / "empty").mkdir()
    _, cut = page_of([tmp_path / "empty", folder], tmp_path, "--nodes", 10**6)
    assert cut["runs"][0]["columns"]["iteration"] == [0, 1, 2, 3]
    assert [x["path"] for x in cut["runs"][0]["nodes"]] == [x["path"] for x in whole["runs"][0]["nodes"][:-1]]
    assert len(cut["runs"]) == 1


@pytest.fixture
def browser():
    """A page of a real browser, which records what it would fetch and what goes wrong."""
    api = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or shutil.which("google-chrome") or pytest.skip("no browser")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.errors, page.requests = [], []
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.on("request", lambda request: page.requests.append(request.url))
        yield page
        browser.close()


def test_the_page_in_a_browser(run, model_dir, tmp_path, browser):
    """A page that fails, fetches or runs what a model wrote; a cell, slider, search or link that shows other texts."""
    flags = ("--model", model_dir, "--env", "toy:Letters", "--joint-mode", "cross", "--learning-rate", 0)
    folder = Path(run(ROOT / "magrpo.py", *FLAGS, *flags)["run_dir"])
    lines = lines_of(folder, "rollouts.jsonl")
    node = next(x for x in lines if x["split"] == "train" and x["iteration"] == 2)
    for i, agent in enumerate(node["agents"]):
        agent["completions"] = [f"{EVIL} text {g} of agent {i}" for g in range(3)]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page_of([folder], tmp_path)
    browser.goto(f"file://{tmp_path}/page.html")
    browser.wait_for_selector("body[data-ready]")
    assert browser.inner_text("#where") == "iteration 2" and browser.locator(".chart svg").count() > 5
    tree = browser.locator(".tree").first
    for a, b in ((0, 2), (2, 1)):  # rows and columns are sorted by return
        rows = [int(x[1:]) for x in tree.locator(".grid tr th:first-child").all_inner_texts()[1:-1]]
        columns = [int(x[1:]) for x in tree.locator(".grid tr:first-child th").all_inner_texts()[1:-1]]
        k = node["joint"].index([a, b])
        tree.locator(".grid .cell").nth(3 * rows.index(a) + columns.index(b)).click()
        shown = tree.locator(".say.on .text").all_inner_texts()
        assert shown == [f"{EVIL} text {a} of agent 0", f"{EVIL} text {b} of agent 1"]
        share = float(tree.locator(".parts tr", has_text="share").locator("b").inner_text())
        assert share == pytest.approx(node["parts"]["share"][k], abs=0.01)
    edges = [float(x) for x in tree.locator(".grid .edge").all_inner_texts()]
    returns = [sorted(agent["returns"], reverse=True) for agent in node["agents"]]
    assert edges == pytest.approx(returns[0] + returns[1], abs=0.01)
    browser.fill("#find", "text 1 of AGENT 0")
    assert browser.inner_text("#count").startswith("1 of 2 tasks here; in 1 of 2")
    assert "text 1 of agent 0" in browser.locator("mark").all_inner_texts()
    browser.wait_for_function("location.hash.includes('find')")
    address = browser.url
    browser.fill("#find", "")
    browser.locator("h1").click()
    browser.keyboard.press("ArrowLeft")  # as the button
    assert browser.inner_text("#where") == "iteration 1" and "EVIL" not in browser.inner_text("#trees")
    browser.locator("#iteration").press("ArrowRight")
    assert browser.inner_text("#where") == "iteration 2"
    browser.goto("about:blank")
    browser.goto(address)
    browser.wait_for_selector("body[data-ready]")
    assert browser.inner_text("#where") == "iteration 2" and browser.locator(".tree").count() == 1
    browser.fill("#find", "")
    browser.select_option("#split", "test")
    browser.check("#learn")
    assert browser.locator(".learn").count() == 4
    browser.locator(".chart svg").first.hover()
    assert "evaluation" in browser.inner_text("#tip")
    assert browser.evaluate("[document.body.id, document.querySelectorAll('script, img').length]") == ["", 2]
    assert not browser.errors and {url.partition("#")[0] for url in browser.requests} <= {
        f"file://{tmp_path}/page.html",
        "about:blank",
    }
