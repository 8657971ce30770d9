"""Makes docs/lesson.ipynb of sections 0 to 3 of docs/teaching.md: each block of commands becomes a cell to run.

python benchmarks/notebook.py
"""

import json
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
START = """
# A lesson, as a notebook
Sections 0 to 3 of teaching.md, for a CPU or a T4. Write the address of the repository into the next cell, and run the
cells from top to bottom. Guess before you open an answer.
"""
INSTALL = """
!git clone <this repository> tutti
%cd tutti
!pip install -q -r requirements.txt matplotlib
"""


def cell_of(kind, text):
    cell = {"cell_type": kind, "metadata": {}, "source": text.strip().splitlines(keepends=True)}
    return cell | {"outputs": [], "execution_count": None} if kind == "code" else cell


def code_of(commands):
    """The commands of a block for a notebook, which shows the picture that they draw."""
    lines = [f"!{command}" for command in commands.splitlines()]
    pictures = re.findall(r"plot\.py .*--output (\S+)", commands)
    if pictures:
        lines.append("from IPython.display import Image")
        lines += [f'Image("{picture}.png")' for picture in pictures]
    return "\n".join(lines)


def cells():
    sections = re.split(r"^(?=## \d\. )", (DOCS / "teaching.md").read_text(), flags=re.MULTILINE)[1:5]
    # a notebook that is opened alone has no pictures
    text = re.sub(r"<!--.*?-->\n|!\[.*?\]\(.*?\)\n\n", "", "".join(sections), flags=re.DOTALL)
    made = [cell_of("markdown", START), cell_of("code", INSTALL)]
    # the tree and the patches stay in the text
    for k, piece in enumerate(re.split(r"^```\n((?:python|cp) .*?)^```\n", text, flags=re.MULTILINE | re.DOTALL)):
        if k % 2:
            made.append(cell_of("code", code_of(piece)))
            continue
        made += [
            cell_of("markdown", section) for section in re.split(r"^(?=## )", piece, flags=re.M) if section.strip()
        ]
    return made


def notebook():
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells(), "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 4}


if __name__ == "__main__":
    (DOCS / "lesson.ipynb").write_text(json.dumps(notebook(), indent=1, ensure_ascii=False) + "\n")
