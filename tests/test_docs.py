"""The rendered pages are those of the scripts as they are, and tables of figures those of the results."""

import csv
import re
import subprocess
import sys

from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import peers

PERFORMANCE = (ROOT / "docs" / "performance.md").read_text()


def test_pages_are_up_to_date():
    done = subprocess.run([sys.executable, "docs/build.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_table_against_peers_is_that_of_the_results():
    for workload in "abc":
        with open(ROOT / "results" / f"peers_{workload}.csv") as file:
            commit = re.match(r"# commit (\w+);", file.readline())[1]
            rows = list(csv.DictReader(file))
        for row in rows:
            row |= {key: float(row[key]) for key in ("seconds", "tokens_per_second", "peak_mib")}
        lines = peers.table(rows).splitlines()
        assert len(lines) == 2 + 4 and not [line for line in lines if line not in PERFORMANCE.splitlines()]
        assert commit in PERFORMANCE


def test_the_table_of_scaling_is_that_of_the_results():
    with open(ROOT / "results" / "scaling_curves.csv") as file:
        assert f"Commit {re.match(r'# commit (.*?);', file.readline())[1]}; torch" in PERFORMANCE
        curves = {}
        for row in csv.DictReader(file):
            curves.setdefault(row.pop("what"), []).append({key: float(row[key]) for key in row.keys() - {"part"}})
    assert len(curves) == 6
    for what, rows in curves.items():
        figures = (
            [1e6 * row["seconds"] / row["tokens"] for row in rows],
            [row["gflop"] / row["seconds"] for row in rows],
            [row["peak_mib"] for row in rows],
        )
        cells = [what.replace("_", " "), f"{rows[0]['value']:.0f}", f"{rows[-1]['value']:.0f}"]
        cells += [", ".join(f"{figure:.0f}" for figure in column) for column in figures]
        assert f"| {' | '.join(cells)} |" in PERFORMANCE.splitlines()


def test_the_numbers_of_lines():
    said = re.search(r"They have ([\d,]+) and\s([\d,]+): the target is missed", PERFORMANCE).groups()
    lengths = [len((ROOT / name).read_text().splitlines()) for name in ("magrpo.py", "ippo.py")]
    assert said == tuple(f"{length:,}" for length in lengths)
