"""Recomputes the figures in the tables of the documents from the files in results/; prints the cells that differ.

    python benchmarks/check.py

A table is checked if a comment of one line stands before it, such as

    <!-- figures {"rows": "results/tldr.csv: script == '{0}'", "columns": ["return mean end", "seconds range end"]} -->

rows: a file and the rows of it that count, with {0} for the first word of the table's row; or a list with one for each
row. columns, from the table's second: metric, statistic and place, as in "return range end" or, from another file,
"return mean end of results/tldr.csv"; null is not checked; a list: several in one cell. A statistic is mean, interval
(95% t), range or seeds; a place first, end, all rows or a number of tokens, between two evaluations.
"""

import json
import re
import sys
from glob import glob

import numpy as np
import pandas as pd
from plot import estimate_mean
from stamp import ROOT

DOCUMENTS = ["README.md", *sorted(glob("docs/*.md", root_dir=ROOT))]


def read_rows(source):
    """The rows of a file in results/ that count: "results/tldr.csv: script == 'magrpo'"."""
    path, _, query = source.partition(": ")
    rows = pd.read_csv(f"{ROOT}/{path}", skiprows=1)
    return rows.query(query) if query else rows


def read_values(rows, metric, place):
    """A number for each seed."""
    values = []
    for _, own in rows.dropna(subset=metric).groupby("seed"):
        numbers = own[metric]
        if place == "all":
            values.append(numbers.mean())
        elif place in ("first", "end"):
            values.append(numbers.iloc[0 if place == "first" else -1])
        else:
            values.append(np.interp(float(place), own["tokens"], numbers, np.nan, np.nan))
    return values


def compute_figures(column, source):
    """The numbers that a column shows of the source's rows, or of its own."""
    figure, _, own_source = column.partition(" of ")
    metric, statistic, place = figure.split()
    values = read_values(read_rows(own_source or source), metric, place)
    if statistic == "seeds":
        return values
    if statistic == "range":
        return [min(values), max(values)]
    return estimate_mean(values)[: 1 if statistic == "mean" else None]


def differs(cell, numbers):
    """Whether the numbers in a cell are others, after rounding to the digits that it shows."""
    figures = re.findall(r"(-?\d+(?:,\d{3})*(?:\.(\d+))?)", cell)
    if len(figures) != len(numbers):
        return True
    for (digits, decimals), number in zip(figures, numbers):
        if not abs(float(digits.replace(",", "")) - number) < 0.5001 * 10 ** -len(decimals):  # so that nan differs
            return True
    return False


def read_tables(document):
    """The marker of each table of a document, and its rows below the head."""
    with open(f"{ROOT}/{document}") as file:
        text = file.read()
    for marker, lines in re.findall(r"^<!-- figures (.*) -->\n+((?:^\|.*\n)+)", text, re.MULTILINE):
        _, _, *rows = lines.splitlines()
        yield json.loads(marker), [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def check(document):
    """Prints the cells of a document's tables that differ from their files; returns how many."""
    differences = 0
    for marker, table in read_tables(document):
        sources = marker["rows"] if isinstance(marker["rows"], list) else [marker["rows"]] * len(table)
        for (head, *cells), source in zip(table, sources, strict=True):
            words = re.findall(r"\w+", head)
            for cell, columns in zip(cells, marker["columns"]):
                if not cell or columns is None:
                    continue
                numbers = []
                for column in columns if isinstance(columns, list) else [columns]:
                    numbers += compute_figures(column.format(*words), source.format(*words))
                if differs(cell, numbers):
                    differences += 1
                    print(f"{document}: {head}: {cell}, but {columns}: {np.round(numbers, 4)}")
    return differences


if __name__ == "__main__":
    differences = sum(map(check, DOCUMENTS))
    print(f"{differences} cells differ")
    sys.exit(differences > 0)
