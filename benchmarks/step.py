#!/usr/bin/env python3
"""Measures the optimizer's step on the host against other optimizers, with the same gradients.

Workload: the work of a step with an offloaded optimizer: gradients times 1/scale, global norm,
clip, AdamW, and a bf16 copy of the new parameters for the device. Gradients are already in the
memory from which each optimizer reads them: in bf16 for every format of Modicum but `fp32`, in fp32
for all others.
Rivals: torch's fused and foreach AdamW with torch's unscale and clip; DeepSpeedCPUAdam in the order
of DeepSpeed's ZeRO-2 step, once with and once without the norm, which a GPU may compute instead;
torchao's AdamW8bit, compiled by torch (bitsandbytes steps only on a GPU); prime-rl's CPU AdamW, if
--prime-rl names its sources. A round is one step of each optimizer in turn, in one process. Figures
are medians over the rounds with their range, next to the machine's fastest copy, which each round
measures by `modicum step`.

Writes its table into benchmarks/RESULTS.md between its markers.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from harness.page import ROOT, machine, write_between_markers

THREADS = (1, 2)


def measure(options: argparse.Namespace, threads: int) -> dict:
    """The results of chains.py, in a new process with this number of threads."""
    command = [sys.executable, str(Path(__file__).with_name("optim") / "chains.py")]
    command += ["--threads", str(threads), "--params", str(options.params)]
    command += ["--rounds", str(options.rounds)]
    if options.prime_rl:
        command += ["--prime-rl", str(options.prime_rl)]
    # In the environment, since OpenMP and DeepSpeed read these variables when they are loaded.
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def cell(seconds: list[float], params: int) -> str:
    rates = sorted(params / each / 1e9 for each in seconds)
    return f"{statistics.median(rates):.2f} ({rates[0]:.2f}-{rates[-1]:.2f})"


def of_copy(row: dict, found: dict) -> str:
    """The row's bandwidth, from the least bytes that its step must move, as a fraction of the
    machine's fastest copy."""
    copy = statistics.median(found["copy_bytes_per_s"])
    median_s = statistics.median(row["seconds"])
    return f"{row['bytes_per_param'] * found['params'] / median_s / copy:.2f}"


def table(by_threads: dict[int, dict], command: str) -> str:
    first = by_threads[THREADS[0]]
    heads = [f"{t} thread{'s' if t > 1 else ''}, G params/s | of copy" for t in by_threads]
    lines = [
        f"AdamW over {first['params'] / 1e6:.0f} M parameters in {first['tensors']} tensors:",
        "",
        f"| chain: unscale, norm, clip, AdamW, bf16 copy | state, B/param | {' | '.join(heads)} |",
        "|---|---|" + "---|---|" * len(by_threads),
    ]
    for name, row in first["rows"].items():
        cells = []
        for found in by_threads.values():
            of = found["rows"][name]
            cells += [cell(of["seconds"], found["params"]), of_copy(of, found)]
        lines.append(f"| {row['what']} | {row['state_bytes']:g} | {' | '.join(cells)} |")
    copies = ", ".join(
        f"{statistics.median(found['copy_bytes_per_s']) / 1e9:.1f} GB/s with {t}"
        for t, found in by_threads.items()
    )
    rounds = len(next(iter(first["rows"].values()))["seconds"])
    lines += [
        "",
        f"`{command}`: medians (ranges) of {rounds} rounds; copy (read + write): {copies}; "
        f"{', '.join(first['versions'])}; {machine()}. "
        "`of copy`: the least bytes that the chain reads and writes, per second, as a fraction of "
        "the machine's best parallel copy (`copy_bytes_per_s` of `modicum step`).",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--params", type=int, default=64 << 20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prime-rl", type=Path, help="a checkout of PrimeIntellect-ai/prime-rl")
    options = parser.parse_args()
    found = {threads: measure(options, threads) for threads in THREADS}
    text = table(found, "python benchmarks/step.py" + (" --prime-rl DIR" * bool(options.prime_rl)))
    print(text)
    write_between_markers(ROOT / "benchmarks/RESULTS.md", "step", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
