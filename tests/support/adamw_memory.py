"""A program that prints the memory of a process with `modicum.torch.AdamW`, from the kernel.

    adamw_memory.py FORMAT...

With a format whose name ends in fp32 the parameters are float32, else bfloat16. With the prefix
"torch:" they are in torch's own memory, which forked children inherit.

Prints a JSON object with an object of figures for each argument. `parameters` is a number of
elements; all other figures are bytes. `made` and `stepped` are RssAnon of the process after the
optimizer was made and after three steps, less the value from before it was made.
`written_with_children` is what two steps add to Pss_Anon of the process and its forked children
together.
"""

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from program import living_children
from torch import nn

import modicum
import modicum.torch

ROWS = 1664  # a multiple of 128, the elements of a block with one scale
LAYERS = 3


def rss_anon(pid: int | str = "self") -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def pss_anon(pids: list[int]) -> int:
    held = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        held += sum(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon")) * 1024
    return held


def layers(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(*(nn.Linear(ROWS, ROWS, bias=False, dtype=dtype) for _ in range(LAYERS)))


def loaded(dtype: torch.dtype) -> nn.Module:
    """A model loaded by Modicum, so that forked children do not inherit the parameters."""
    with modicum.torch.empty_parameters():
        model = layers(dtype)
    modicum.torch.load(model, None, progress=False, budget="none")
    return model


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        for parameter in model.parameters():  # unlike a matrix product, this takes no workspace
            (parameter * 0.5).sum().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


def measured(name: str) -> dict[str, int]:
    memory, _, state_format = name.rpartition(":")
    made_by = layers if memory == "torch" else loaded
    model = made_by(torch.float32 if state_format.endswith("fp32") else torch.bfloat16)
    asked = state_format.removesuffix("-fp32")
    gc.collect()
    numel = sum(p.numel() for p in model.parameters())
    before = rss_anon()
    optimizer = modicum.torch.AdamW(model.named_parameters(), state_format=asked)
    made = rss_anon() - before
    train(model, optimizer, 3)
    stepped = rss_anon() - before
    with living_children(2) as children:
        time.sleep(0.1)
        pids = [os.getpid(), *children]
        forked = pss_anon(pids)
        train(model, optimizer, 2)
        written = pss_anon(pids)
    held = optimizer.held[state_format]
    return {
        "parameters": numel,
        "parameter_bytes": sum(p.nbytes for p in model.parameters()),
        "made": made,
        "stepped": stepped,
        "ledger": sum(size for purpose, size in held.items() if purpose != "parameters"),
        "written_with_children": written - forked,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    # Takes the memory that torch and autograd's thread allocate at their first use.
    tiny = nn.Linear(256, 256, bias=False)
    train(tiny, modicum.torch.AdamW(tiny.parameters()), 1)
    del tiny
    print(json.dumps({name: measured(name) for name in sys.argv[1:]}))
