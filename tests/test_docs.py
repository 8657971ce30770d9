"""The rendered pages are those of the scripts as they are."""

import subprocess
import sys

from conftest import ROOT


def test_pages_are_up_to_date():
    done = subprocess.run([sys.executable, "docs/build.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
