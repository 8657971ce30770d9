"""How many rows of public data sets an environment can use, and why it leaves out the others: a markdown table.

python benchmarks/public_sets.py FOLDER    (with files that have the names below)
"""

import contextlib
import io
import os
import sys
from collections import defaultdict

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import envs
from envs import data

FILES = {  # name of a file -> environment
    "scitldr.jsonl": "tldr",
    "arxiv.jsonl": "arxiv",
    "humaneval.jsonl": "humaneval",
    "mbpp_sanitized.jsonl": "mbpp",
    "coophumaneval.jsonl": "coophumaneval",
    "classeval.jsonl": "classeval",
    "gsm8k.jsonl": "gsm8k",
    "bfcl_parallel.jsonl": "bfcl",
    "humanevalfix.jsonl": "bugfix",
    "quixbugs.jsonl": "bugfix",
}


def judge_rows(name, path):
    """The rows of a file, of which those that the environment leaves out have a fault."""
    judged = []
    describe_faults = data.describe_faults

    def keep(rows):
        judged.extend(rows)
        return describe_faults(rows)

    data.describe_faults = keep
    with contextlib.redirect_stdout(io.StringIO()):
        envs.make(name, dataset=path)
    data.describe_faults = describe_faults
    return judged


if __name__ == "__main__":
    print("| file | environment | rows | used | left out |\n|---|---|---|---|---|")
    for file, name in FILES.items():
        path = os.path.join(sys.argv[1], file)
        if os.path.exists(path):
            rows = judge_rows(name, path)
            reasons = defaultdict(list)  # why -> the numbers of the rows in the file
            for number, row in enumerate(rows, 1):
                if row.fault:
                    reasons[row.fault].append(row.columns.get("task_id", number))
            shown = "; ".join(f"{', '.join(map(str, names))}: {reason}" for reason, names in reasons.items())
            print(f"| {file} | {name} | {len(rows)} | {len(rows) - sum(map(len, reasons.values()))} | {shown} |")
