#!/usr/bin/env python3
"""Measures the cost of the three values of `fork=`.

Workload: one process loads a synthesised qwen3-8b of 4 layers (3.76 GiB of bf16), then constructs
AdamW over 64 Mi bf16 parameters in format `fp32` (16 bytes each). Measured are the load, the
construction, a step, and how much longer torch.add takes in a child that is forked after the steps
than in its parent. Each value of each round is measured in a new process; the values take turns,
page cache warm; figures are medians with their range.

Writes the table into benchmarks/RESULTS.md between its markers.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.page import ROOT, machine, write_between_markers

MODICUM = ROOT / "build/release/modicum"
COMMAND = "python benchmarks/forks.py"
WAYS = ("excluded", "shared", "inherited")
PARAMS, STEPS, ROUNDS = 1 << 26, 6, 3
COLUMNS = {
    "load_s": "load, s",
    "made_s": "AdamW made, s",
    "step_ms": "step, ms",
    "call_us": "torch.add in a child, us more than in the parent",
}


def seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measured(directory: str, way: str) -> dict[str, float]:
    """The figures of one new process."""
    import torch
    import transformers

    import modicum.torch

    warnings.filterwarnings("ignore")
    config = transformers.AutoConfig.from_pretrained(directory)
    with modicum.torch.empty_parameters():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    report = modicum.torch.load(
        model, directory, memory=modicum.torch.MemoryPolicy(fork=way), budget="none"
    )
    del model
    parameter = torch.nn.Parameter(torch.randn(PARAMS).bfloat16())
    optimizers: list[Any] = []
    made_s = seconds(
        lambda: optimizers.append(
            modicum.torch.AdamW([parameter], memory=modicum.torch.MemoryPolicy(fork=way))
        )
    )
    steps = []
    for _ in range(STEPS):
        parameter.grad = torch.full_like(parameter, 1e-3)
        steps.append(seconds(optimizers[0].step) * 1e3)
    return {
        "load_s": report.document["elapsed_s"],
        "made_s": made_s,
        "step_ms": statistics.median(steps),
        "call_us": more_in_child_us(),
    }


def more_in_child_us() -> float:
    """Microseconds of torch.add in a forked child minus those in the parent. Both are the best of 7
    measurements."""
    import torch

    torch.set_num_threads(1)
    a, b = torch.randn(4), torch.randn(4)

    def call_us(calls: int = 10_000) -> float:
        best = min(seconds(lambda: [torch.add(a, b) for _ in range(calls)]) for _ in range(7))
        return best / calls * 1e6

    before = call_us()
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, str(call_us()).encode())
        os._exit(0)
    os.wait()
    return float(os.read(reader, 100)) - before


def text(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def table(rounds: dict[str, list[dict[str, float]]]) -> str:
    lines = [f"| `fork=` | {' | '.join(COLUMNS.values())} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for way, runs in rounds.items():
        cells = (text([run[column] for run in runs]) for column in COLUMNS)
        lines.append(f"| `{way}` | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"`{COMMAND}`, {ROUNDS} rounds; {machine()}."])


def main() -> None:
    if len(sys.argv) == 3:
        print(json.dumps(measured(*sys.argv[1:])))
        return
    folder = Path(tempfile.mkdtemp())
    try:
        model = folder / "model"
        words = [MODICUM, "synth", model, "--arch", "qwen3-8b", "--layers", "4", "-q"]
        subprocess.run(words, check=True)
        rounds: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(ROUNDS):
            for way in WAYS:
                one = [sys.executable, __file__, model, way]
                done = subprocess.run(one, check=True, capture_output=True, text=True)
                rounds[way].append(json.loads(done.stdout.splitlines()[-1]))
    finally:
        shutil.rmtree(folder)
    text_of_table = table(rounds)
    write_between_markers(ROOT / "benchmarks/RESULTS.md", "forks", text_of_table)
    print(text_of_table)


if __name__ == "__main__":
    main()
