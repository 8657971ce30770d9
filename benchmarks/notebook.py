"""Makes docs/lesson.ipynb of sections 0 to 3 of docs/teaching.md: each block of commands becomes a cell.

    pip install nbclient ipykernel
    python benchmarks/notebook.py

The cells are run from top to bottom in a new clone, and the notebook keeps what they print and draw.
"""

import os
import re
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START = """
# A lesson, as a notebook
Sections 0 to 3 of teaching.md, for a CPU or a T4. Write the address of the repository into the next cell, and run the
cells from top to bottom. Guess before you run. What is printed is of one seed; the answers have three, and only what
holds in all of them counts.
"""
INSTALL = """
!git clone <this repository> tutti
%cd tutti
!pip install -q -r requirements.txt matplotlib
"""


def code_of(commands):
    """The commands of a block for a notebook, which shows the picture that they draw."""
    lines = [f"!{command}" for command in commands.splitlines()]
    for picture in re.findall(r"plot\.py .*--output (\S+)", commands):
        lines += ["from IPython.display import Image", f'Image("{picture}.png")']
    return "\n".join(lines)


def cells():
    """Pairs of kind and text."""
    sections = re.split(r"^(?=## \d\. )", (ROOT / "docs/teaching.md").read_text(), flags=re.MULTILINE)[1:5]
    # a notebook that is opened alone has no pictures
    text = re.sub(r"<!--.*?-->\n|!\[.*?\]\(.*?\)\n\n", "", "".join(sections), flags=re.DOTALL)
    made = [("markdown", START.strip()), ("code", INSTALL.strip())]
    # the tree and the patches stay in the text
    for k, piece in enumerate(re.split(r"^```\n((?:python|cp) .*?)^```\n", text, flags=re.MULTILINE | re.DOTALL)):
        if k % 2:
            made.append(("code", code_of(piece)))
        else:
            parts = re.split(r"^(?=## )", piece, flags=re.MULTILINE)
            made += [("markdown", part.strip()) for part in parts if part.strip()]
    return made


def main():
    import nbclient
    from nbformat import v4, write

    os.environ["TQDM_DISABLE"] = "1"  # no progress bars
    made = [getattr(v4, f"new_{kind}_cell")(text) for kind, text in cells()]
    notebook = v4.new_notebook(cells=made, metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    with tempfile.TemporaryDirectory() as clone:
        subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
        made[1].source = ""  # the installation needs an address
        nbclient.execute(notebook, clone, timeout=None, coalesce_streams=True, record_timing=False)
        made[1].source = INSTALL.strip()
    for cell in made:
        for output in cell.get("outputs", []):
            if output.output_type == "stream":
                output.text = output.text.replace("\r\n", "\n").replace(f"{clone}/", "")
    write(notebook, ROOT / "docs/lesson.ipynb")


if __name__ == "__main__":
    main()
