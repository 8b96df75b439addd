"""A program that runs examples/zero2_offload.py and reads its memory without Modicum's functions.

    zero2_memory.py WORDS OF THE EXAMPLE...

Prints a line of JSON after each epoch: the example's own figures, and `tree_bytes`: by the kernel's
count, Pss_Anon, Pss_Shmem and VmPTE of its process and of its data loader's workers together.
"""

import importlib.util
import json
import multiprocessing
import os
import sys
import warnings
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/zero2_offload.py"


def sum_of_fields(path: str, names: tuple[str, ...]) -> int:
    """The sum of some fields of a file of /proc, in bytes."""
    lines = Path(path).read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.split(":")[0] in names) * 1024


def tree_bytes() -> int:
    pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
    return sum(
        sum_of_fields(f"/proc/{pid}/smaps_rollup", ("Pss_Anon", "Pss_Shmem"))
        + sum_of_fields(f"/proc/{pid}/status", ("VmPTE",))
        for pid in pids
    )


def example() -> Any:
    spec = importlib.util.spec_from_file_location("zero2_offload", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["zero2_offload"] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    program = example()
    program.join_group()
    for epoch in program.train(program.parsed(sys.argv[1:])):
        document = epoch["attribution"].document
        print(json.dumps(epoch | {"attribution": document, "tree_bytes": tree_bytes()}), flush=True)
    os._exit(0)  # skips the shutdown of DeepSpeed and torch
