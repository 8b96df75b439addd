"""An act (a function that ranks run by name, see torch_rank.py): a whole job of accelerate, with
load, steps and save, and the memory of each phase as the kernel counts it."""

import ctypes
import gc
from pathlib import Path
from typing import Any

import checkpoint_rank
import torch
import torch.distributed as dist
from accelerate_rank import M_MMAP_THRESHOLD
from torch_rank import held_bytes

import modicum.memory


def held() -> int:
    """The anonymous memory, shared memory and page tables of this process, in bytes."""
    return held_bytes("RssAnon", "RssShmem", "VmPTE")


class Phase:
    """The most that this process holds within the context, and what it holds at the end."""

    def __enter__(self) -> "Phase":
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins here
        return self

    def __exit__(self, *_: object) -> None:
        fallen = held_bytes("VmHWM") - held_bytes("VmRSS")
        self.peak_bytes = held() + fallen
        gc.collect()
        self.end_bytes = held()


def job(directory: str, folder: str, steps: int) -> dict[str, Any]:
    """Loads, trains with `modicum.torch.AdamW` in float32, and saves to `folder`. Returns the bytes
    that this process holds, and the reports of the load and of the save."""
    # For mallopt and freeze see accelerate_rank.script.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 18)
    gc.collect()
    gc.freeze()
    baseline = held()
    phases: dict[str, Phase] = {name: Phase() for name in ("load", "step", "save")}
    with checkpoint_rank.script_context("modicum") as loading:
        with phases["load"]:
            made = checkpoint_rank.prepared(directory, "modicum")
        torch.manual_seed(7 + dist.get_rank())
        with phases["step"]:
            checkpoint_rank.trained(made, steps)
        _, model, optimizer, _ = made
        owners = modicum.memory.attribute(model, optimizer.optimizer).document["owners"]
        with phases["save"]:
            made[0].save_state(folder)
        return {
            "baseline_bytes": baseline,
            "phases": {name: vars(phase) for name, phase in phases.items()},
            "owners": {owner["name"]: owner["held_bytes"] for owner in owners},
            "load": loading.report.document,
            "saves": checkpoint_rank.reports(loading),
        }


ACTS = {"job": job}
