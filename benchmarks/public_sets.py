"""What an environment makes of public data sets: how many rows it uses, and why it leaves out the others.

python benchmarks/public_sets.py FOLDER    (with files that have the names below)
"""

import os
import sys

import stamp  # noqa: F401, finds envs

import envs

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

if __name__ == "__main__":
    for file, name in FILES.items():
        path = os.path.join(sys.argv[1], file)
        if os.path.exists(path):
            envs.make(name, dataset=path)  # prints it
