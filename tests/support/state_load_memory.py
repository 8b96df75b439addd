"""A program that prints the memory of a load of an embedding with `modicum.torch.AdamW`, from the
kernel.

    state_load_memory.py FORMAT

The embedding is bfloat16 and initialised by the model's own rules. Prints a JSON object of bytes:
`promised`, by the load's report; `peak`, the most that the process holds during the load.
"""

import gc
import json
import sys
from pathlib import Path

import torch
from torch import nn

import modicum.torch

ROWS, COLUMNS = 32768, 512
FREED_BYTES = 30 << 20


def held_bytes(*names: str) -> int:
    """The sum of the lines of /proc/self/status with these names, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) for name in names) * 1024


def measured(state_format: str) -> dict[str, int]:
    with modicum.torch.empty_parameters():
        model = nn.Sequential(nn.Embedding(ROWS, COLUMNS, dtype=torch.bfloat16))
    optimizer = modicum.torch.AdamW(model.named_parameters(), state_format=state_format)
    # From now on malloc keeps freed blocks of this size instead of unmapping them, as in a program
    # that has worked on large tensors.
    torch.empty(FREED_BYTES, dtype=torch.uint8)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins here
    report = modicum.torch.load(model, None, optimizer=optimizer, budget="none", progress=False)
    now = held_bytes("RssAnon", "RssShmem", "VmPTE")
    fallen = held_bytes("VmHWM") - held_bytes("VmRSS")
    return {"promised": report.ranks[0]["promised_bytes"], "peak": now + fallen}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(measured(sys.argv[1])))
