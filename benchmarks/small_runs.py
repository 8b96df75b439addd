#!/usr/bin/env python3
"""Measures saves whose ranks hold small pieces of rows, next to a save of whole rows.

Workload: RANKS ranks load a synthesised qwen3-0.6b (bf16, rows of 2 to 6 KiB) and save it durably
with the state of AdamW. If the layout divides rows among ranks, a rank writes long stretches of a
file; if it divides columns, the rank has one short run for each row. The layouts are the rivals.
They take turns, ROUNDS times each, on each of the file systems; seconds are medians with their
range. `writes` is the number of pwrite64 calls of one save, counted by perf.

Writes the table into benchmarks/RESULTS.md between its markers.

    python3 benchmarks/small_runs.py [FOLDER...]    default: /dev/shm and the temporary folder
"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness.page import GIB, ROOT, machine, write_between_markers

MODICUM = ROOT / "build/release/modicum"
COMMAND = "python3 benchmarks/small_runs.py"
ARCH, LAYERS, STATE = "qwen3-0.6b", 6, "fp32-split"
RANKS, ROUNDS = 4, 3
ROWWISE = "o_proj|down_proj"
LAYOUTS: dict[str, tuple[str, ...]] = {
    "FSDP2, rows": ("--layout", "fsdp2"),
    "TP 4, o_proj and down_proj by columns": ("--layout", "tp-fsdp", "--mesh", f"1x{RANKS}",
                                              "--tp-rowwise", ROWWISE),
    "TP 2 x FSDP 2, o_proj and down_proj by columns": ("--layout", "tp-fsdp", "--mesh", "2x2",
                                                       "--tp-rowwise", ROWWISE),
    "FSDP2, every matrix by columns": ("--layout", "fsdp2", "--shard-dim", "1"),
}  # fmt: skip


def run(*args: str, prefix: tuple[str, ...] = ()) -> dict[str, Any]:
    """The JSON document that a modicum verb prints."""
    command = [*prefix, str(MODICUM), *args, "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def save(model: Path, root: Path, layout: str, prefix: tuple[str, ...] = ()) -> dict[str, Any]:
    flags = ("--step", "1", "--ranks", str(RANKS), "--budget", "none", *LAYOUTS[layout])
    flags += ("--optimizer", f"adamw:{STATE}")
    report = run("save", str(model), str(root), *flags, prefix=prefix)
    shutil.rmtree(root)
    return report


def calls(model: Path, root: Path, layout: str) -> int:
    """The number of pwrite64 calls of all processes of one save."""
    counts = root.with_name("calls")
    event = "syscalls:sys_enter_pwrite64"
    save(model, root, layout, ("perf", "stat", "-x", ",", "-e", event, "-o", str(counts)))
    (line,) = [line for line in counts.read_text().splitlines() if event in line]
    return int(line.split(",")[0])


def measure(model: Path, root: Path) -> dict[str, list[float]]:
    """By layout, the seconds of each round until the checkpoint was durable."""
    seconds: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
    for _ in range(ROUNDS):
        for layout, of in seconds.items():
            of.append(save(model, root, layout)["durable_s"])
    return seconds


def cells(seconds: list[float], base: list[float]) -> str:
    median, least = statistics.median(seconds), min(seconds)
    ratio = median / statistics.median(base)
    return f"{median:.2f} ({least:.2f}-{max(seconds):.2f}) | {ratio:.2f}"


def table(folders: list[Path]) -> str:
    columns: dict[str, list[str]] = {layout: [] for layout in LAYOUTS}
    for number, folder in enumerate(folders):
        with tempfile.TemporaryDirectory(prefix="modicum-bench-", dir=folder) as scratch:
            model, root = Path(scratch) / ARCH, Path(scratch) / "root"
            run("synth", str(model), "--arch", ARCH, "--layers", str(LAYERS))
            # This save is also the warm-up.
            written = save(model, root, next(iter(LAYOUTS)))["written_bytes"]
            seconds = measure(model, root)
            for layout, of in columns.items():
                if number == 0:
                    made = calls(model, root, layout)
                    of += [f"{made:,}", f"{written / made / 1024:.1f}"]
                of.append(cells(seconds[layout], seconds[next(iter(LAYOUTS))]))
    names = " | ".join(
        f"seconds on {kind_of(folder)}, median (range) | x first layout" for folder in folders
    )
    version = subprocess.run([MODICUM, "--version"], check=True, capture_output=True, text=True)
    return "\n".join(
        [
            f"{ARCH} of {LAYERS} layers with `{STATE}` state, {written / GIB:.2f} GiB, "
            f"{RANKS} ranks on one node, to durable files:",
            "",
            f"| layout | writes | KiB per write | {names} |",
            "|---|---|---|" + "---|---|" * len(folders),
            *(f"| {layout} | {' | '.join(of)} |" for layout, of in columns.items()),
            "",
            f"`{COMMAND}`: {ROUNDS} interleaved rounds; {version.stdout.strip()}, {machine()}.",
        ]
    )


def kind_of(folder: Path) -> str:
    words = ["findmnt", "-n", "-o", "FSTYPE", "-T", str(folder)]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()[0]


def main() -> int:
    if not MODICUM.is_file():
        print(f"{MODICUM} is not there; run `make build`", file=sys.stderr)
        return 1
    folders = [Path(word) for word in sys.argv[1:]] or [
        Path("/dev/shm"),
        Path(tempfile.gettempdir()),
    ]
    text = table(folders)
    write_between_markers(ROOT / "benchmarks/RESULTS.md", "small-runs", text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
