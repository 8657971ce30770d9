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
    """The data of the page, as the command line makes it."""
    output = tmp_path / "page.html"
    command = [sys.executable, ROOT / "view.py", *folders, "--output", output, *flags]
    subprocess.run([str(word) for word in command], check=True, capture_output=True)
    page = output.read_text(encoding="utf-8")
    packed = re.search(r'<script id="data" type="text/plain">([^<]*)</script>', page)[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def lines_of(folder, name):
    return [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]


def near(x):
    """Equal up to the five digits that the page keeps."""
    if isinstance(x, list):
        return [near(value) for value in x]
    return x if x is None else pytest.approx(x, rel=1e-4, abs=1e-12)


def compare(folder, data):
    """Every number and text of a run's logs against the page's."""
    run, metrics = data["runs"][0], lines_of(folder, "metrics.jsonl")
    lines = lines_of(folder, "rollouts.jsonl")
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
        for i, (agent, logged) in enumerate(zip(node["agents"], line["agents"])):
            if logged:
                assert agent.keys() == logged.keys() and agent["stopped"] == logged["stopped"]
                assert data["texts"][agent["prompt"]] == logged["prompt"]
                assert [data["texts"][place] for place in agent["completions"]] == logged["completions"]
                for name in ("returns", "advantages"):
                    assert agent.get(name) == near(logged.get(name))
                for g, mean in enumerate(agent["returns"]):  # of the returns of joint actions, which the page adds
                    of = [x[i % len(x)] for x, choice in zip(node["returns"], node["joint"]) if choice[i] == g]
                    assert sum(of) / len(of) == pytest.approx(mean, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("script, env, agents, turns, more", [
    ("magrpo", "toy:Letters", 3, 1, ("--joint-mode", "cross")),
    ("magrpo", "test_view:Reviewed", 2, 2, ("--joint-mode", "cross", "--gamma", 0.5)),
    ("ippo", "toy:Selfish", 2, 2, ("--gamma", 0.5, "--eval-generations", 2)),
])  # fmt: skip
def test_the_page_has_the_runs_numbers(run, model_dir, tmp_path, script, env, agents, turns, more):
    """A column shifted by a line; a text, part or return at another agent, node or action; a discount left out."""
    flags = ("--model", model_dir, "--env", env, "--num-agents", agents, "--num-turns", turns, *more)
    folder = run(ROOT / f"{script}.py", *FLAGS, *flags)["run_dir"]
    compare(folder, page_of([folder], tmp_path, "--nodes", 10**6))


def test_few_nodes_and_a_small_page(run, model_dir, tmp_path):
    """Children without their parent; other tasks in each evaluation; a thinned page that lacks its first or last."""
    flags = ("--model", model_dir, "--env", "toy:Letters", "--num-turns", 2, "--num-iterations", 5)
    longer = ("--max-new-tokens", 24, "--eval-generations", 3)  # some branches end after a turn
    folder = run(ROOT / "magrpo.py", *FLAGS, *flags, *longer)["run_dir"]
    few = page_of([folder], tmp_path, "--nodes", 2)["runs"][0]
    keys = [(x["iteration"], x["split"], x["task"], *x["path"]) for x in few["nodes"]]
    assert all(len(key) == 3 or key[:-1] in keys for key in keys)
    roots = [key[2] for key in keys if len(key) == 3 and key[1] == "test"]
    assert len(roots) == 6 * 2 and len({*roots}) == 2
    least = page_of([folder], tmp_path, "--megabytes", 0.001)["runs"][0]
    assert {node["iteration"] for node in least["nodes"] if node["split"] == "test"} == {0, 5}


def test_a_cut_line_and_folders_without_rollouts(run, model_dir, tmp_path):
    """A page that fails on a run in progress, or on what else lies in runs/."""
    folder = run(ROOT / "magrpo.py", *FLAGS, "--model", model_dir, "--env", "toy:Letters")["run_dir"]
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        path = Path(folder) / name
        path.write_bytes(path.read_bytes()[:-9])
    (cut,) = page_of([tmp_path, folder], tmp_path, "--nodes", 10**6)["runs"]
    assert cut["columns"]["iteration"] == [0, 1]


def test_the_page_in_a_browser(run, model_dir, tmp_path):
    """A page that fails, fetches or runs what a model wrote; a cell or a slider that shows other texts."""
    api = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or shutil.which("google-chrome") or pytest.skip("no browser")
    flags = ("--model", model_dir, "--env", "toy:Letters", "--joint-mode", "cross", "--learning-rate", 0)
    folder = Path(run(ROOT / "magrpo.py", *FLAGS, *flags)["run_dir"])
    lines = lines_of(folder, "rollouts.jsonl")
    node = next(x for x in lines if x["split"] == "train" and x["iteration"] == 2)
    for i, agent in enumerate(node["agents"]):
        agent["completions"] = [f"{EVIL} text {g} of agent {i}" for g in range(3)]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page_of([folder], tmp_path)
    address = f"file://{tmp_path}/page.html"
    errors, requests = [], []
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("pageerror", lambda error: errors.append(error))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        page.wait_for_selector("body[data-ready]")
        assert page.inner_text("#where") == "iteration 2"
        tree = page.locator(".tree").first
        for a, b in ((0, 2), (2, 1)):  # rows and columns are sorted by return
            rows = tree.locator(".grid tr th:first-child").all_inner_texts()[1:-1]
            columns = tree.locator(".grid tr:first-child th").all_inner_texts()[1:-1]
            row = [int(x[1:]) for x in rows].index(a)
            column = [int(x[1:]) for x in columns].index(b)
            tree.locator(".grid .cell").nth(3 * row + column).click()
            shown = tree.locator(".say.on .text").all_inner_texts()
            assert shown == [f"{EVIL} text {a} of agent 0", f"{EVIL} text {b} of agent 1"]
        page.locator("#iteration").press("ArrowLeft")
        assert page.inner_text("#where") == "iteration 1"
        assert page.evaluate("[document.body.id, document.querySelectorAll('script, img').length]") == ["", 2]
        browser.close()
    assert not errors
    assert {url.partition("#")[0] for url in requests} == {address}
