#!/usr/bin/env python3
"""Measures memory and time of the strategies for the same end state.

Workload: a synthesised qwen3-0.6b (1.1 GiB of bf16, one file) is loaded into 8 ranks under FSDP2's
Shard(0). Rivals: the strategies, without `replica-striped`, since this layout has no replicas.
Other loaders commonly work like `full-per-rank` or `rank0-broadcast`. The strategies take turns,
ROUNDS times each, page cache warm. Measured memory and time are medians; the range is given for the
time only. Memory is given as promised, and as measured: PSS plus page tables of the ranks. The
bytes that a load reads are promised, not measured.

Writes the table into benchmarks/RESULTS.md between its markers.
"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.page import GIB, ROOT, machine, write_between_markers

MODICUM = ROOT / "build/release/modicum"
COMMAND = "python3 benchmarks/strategies.py"
ARCH, RANKS, ROUNDS = "qwen3-0.6b", 8, 5
STRATEGIES = ("own-shard", "node-reader", "rank0-broadcast", "full-per-rank")


def run(*args: str) -> dict:
    """The JSON document that a modicum verb prints."""
    done = subprocess.run([MODICUM, *args, "--json"], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def largest_tensor_bytes(model: Path) -> int:
    tensors = run("inspect", str(model))["tensors"]
    return max(tensor["end"] - tensor["begin"] for tensor in tensors)


def measure(model: Path) -> dict[str, list[dict]]:
    """Load reports by strategy. Strategies take turns, so that a slow minute affects all alike."""
    common = [str(model), "--ranks", str(RANKS), "--budget", "none"]
    # Not measured. Brings the file into the page cache. It also takes as much memory as the largest
    # of the loads after it, which a virtual machine may first have to get from its host.
    run("load", *common, "--strategy", "full-per-rank")
    reports: dict[str, list[dict]] = {name: [] for name in STRATEGIES}
    for _ in range(ROUNDS):
        for name in STRATEGIES:
            reports[name].append(run("load", *common, "--strategy", name))
    return reports


def node_peak(report: dict) -> int:
    return max(node["kernel_peak_bytes"] for node in report["nodes"])


def row(name: str, promise: dict, reports: list[dict], model_bytes: int) -> str:
    kernel = statistics.median(node_peak(report) for report in reports)
    seconds = sorted(report["elapsed_s"] for report in reports)
    median = statistics.median(seconds)
    promised = max(node["peak_bytes"] for node in promise["nodes"])
    # Under FSDP2 the shards of all ranks together have the size of the model.
    beyond_shards = (kernel - model_bytes) / model_bytes
    memory = f"{promised / GIB:.2f} | {kernel / GIB:.2f} | {beyond_shards:.2f}"
    speed = f"{median:.2f} ({seconds[0]:.2f}-{seconds[-1]:.2f}) | {model_bytes / median / 1e9:.2f}"
    promised_read = promise["storage_read_bytes"] / model_bytes
    return f"| `{name}` | {memory} | {promised_read:.2f} | {speed} |"


def table(model: Path) -> str:
    model_bytes = run("inspect", str(model))["checkpoint"]["bytes"]
    plan = run("plan", str(model), "--ranks", str(RANKS))
    promises = {strategy["name"]: strategy for strategy in plan["strategies"]}
    reports = measure(model)
    rows = [row(name, promises[name], reports[name], model_bytes) for name in STRATEGIES]
    version = subprocess.run([MODICUM, "--version"], check=True, capture_output=True, text=True)
    return "\n".join(
        [
            f"{ARCH}, {model_bytes / GIB:.2f} GiB, {RANKS} ranks on one node; "
            f"largest tensor {largest_tensor_bytes(model) / GIB:.2f} GiB:",
            "",
            "| strategy | predicted, GiB | measured, GiB | beyond the shards, x model size "
            "| promised read, x checkpoint size | seconds, median (range) | GB/s |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
            f"`{COMMAND}`: {ROUNDS} interleaved rounds, warm page cache; the seconds include the "
            f"allocation of memory by the kernel; {version.stdout.strip()}, {machine()}.",
        ]
    )


def main() -> int:
    if not MODICUM.is_file():
        print(f"{MODICUM} is not there; run `make build`", file=sys.stderr)
        return 1
    scratch = Path(tempfile.mkdtemp(prefix="modicum-bench-"))
    try:
        model = scratch / ARCH
        run("synth", str(model), "--arch", ARCH)
        text = table(model)
    finally:
        shutil.rmtree(scratch)
    write_between_markers(ROOT / "benchmarks/RESULTS.md", "strategies", text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
