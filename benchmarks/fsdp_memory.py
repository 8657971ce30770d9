"""The most memory that the last process of magrpo_fsdp.py held on a CPU, with two agents of 39M parameters.

    python benchmarks/fsdp_memory.py

One iteration in 1, 2 and 4 processes, for results/fsdp_memory.csv. The first process holds a checkpoint in addition.
"""

import os
import subprocess
import sys
import tempfile

from stamp import ROOT, stamp, write_rows
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

TINY = f"{ROOT}/models/tiny"
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12, "dtype": "float32"}
SIZES["layer_types"] = ["full_attention"] * 12
FLAGS = "--num-iterations 1 --num-generations 2 --max-new-tokens 8 --eval-tasks 4 --max-batch-tokens 512"


def measure(folder, count):
    """The row of a run in that many processes."""
    command = [sys.executable, f"{ROOT}/magrpo_fsdp.py", *FLAGS.split(), "--model", folder, "--output-dir", folder]
    setup = {"WORLD_SIZE": str(count), "MASTER_ADDR": "localhost", "MASTER_PORT": "29511", "OMP_NUM_THREADS": "1"}
    for rank in range(count):
        process = subprocess.Popen(command, env=os.environ | setup | {"RANK": str(rank)})
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    return {"processes": count, "peak_mib": usage.ru_maxrss // 1024}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY, **SIZES))
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
        rows = [measure(folder, count) for count in (1, 2, 4)]
    write_rows(f"{ROOT}/results/fsdp_memory.csv", stamp(FLAGS), rows)
