#!/usr/bin/env python3
"""Measures the memory of a whole job of accelerate: a load, three steps and a save.

Workload: a made-up bf16 checkpoint of qwen3's architecture, in fp32 parameters of FSDP2, in 4 gloo
ranks, with `modicum.torch.AdamW` within `modicum.torch.accelerate.loading`. The promise of each
phase is compared with the kernel's counters: high-water marks of the ranks, and the pages of the
model and of the optimizer. Memory that is not Modicum's has separate columns. Nothing is timed, so
other programs on the machine do not change the figures.

Writes its table into benchmarks/RESULTS.md between its markers.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from harness.page import GIB, ROOT, machine, write_between_markers
from systems import RANKS, make_checkpoints

sys.path.append(str(ROOT / "tests/support"))
from jobs import Held, held_by_phase, job_of
from ranks import ranks

COMMAND = "python benchmarks/job.py"
STEPS = 3
NAMES = {"load": "load", "step": f"{STEPS} steps", "save": "save"}


def row_of(phase: str, memory: Held) -> str:
    unheld = f"{100 * (memory.promised - memory.ours) / memory.promised:.2f} %"
    sizes = (memory.promised, memory.ours, memory.process, memory.kept, memory.passing)
    promised, ours, process, kept, passing = (f"{size / GIB:.3f}" for size in sizes)
    if phase == "save":  # all that a save adds counts as ours
        passing = "in ours"
    cells = (NAMES[phase], promised, ours, unheld, process, kept, passing)
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--modicum", type=Path, default=ROOT / "build/release/modicum")
    options = parser.parse_args()
    import accelerate
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        sizes = make_checkpoints(place, {"causal-lm"})
        model = place / "causal-lm"
        with ranks(RANKS, place / "ranks", fresh=True) as started:
            how = {"directory": str(model), "folder": str(place / "saved"), "steps": STEPS}
            answers = started.ask("job", **how)
        held = held_by_phase(job_of(options.modicum, model, RANKS), answers)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, "
    versions += f"accelerate {accelerate.__version__}"
    text = [
        f"{sizes['causal-lm'] / 1e6:.0f} M parameters, {RANKS} ranks on one node, AdamW `fp32`. "
        "The sizes are GiB of all ranks together. The memory of the last three columns is not "
        "Modicum's and not promised:",
        "",
        "| phase | predicted | ours, measured | predicted and not held | interpreters, libraries | "
        "the framework's own buffers, later imports | activations, gathers, gradients of the "
        "framework |",
        "|---|---|---|---|---|---|---|",
        *(row_of(phase, memory) for phase, memory in held.items()),
        "",
        f"`{COMMAND}`: {versions}; {machine()}.",
    ]
    print("\n".join(text))
    write_between_markers(ROOT / "benchmarks/RESULTS.md", "job", "\n".join(text))


if __name__ == "__main__":
    main()
