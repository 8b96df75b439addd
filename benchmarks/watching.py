#!/usr/bin/env python3
"""Measures what `modicum watch` costs: its CPU time, and the waits of the program that it watches.

Workload: a program that holds a heap of malloc and a mapping of 4 KiB pages, and grows by 8 MiB
every second, half of it in the heap. All the time it maps a page, writes it and unmaps it; the
kernel lets it do so only while no other process reads its address space. A wait is such a turn in
which the kernel put the program to sleep. The rival is the same program alone. Runs that measure
waits have real-time priority (chrt, as root), since a program that was put to sleep would also wait
for a CPU. CPU time is `watch.cpu_s` of the record, by the seconds of a run without that priority.

Writes the table into benchmarks/RESULTS.md between its markers.

    sudo python3 benchmarks/watching.py
"""

import json
import statistics
import subprocess
import sys
from typing import Any

from harness.page import ROOT, machine, write_between_markers

MODICUM = ROOT / "build/release/modicum"
COMMAND = "sudo python3 benchmarks/watching.py"
ROUNDS, SECONDS, SECONDS_OF_WAITS = 3, 40, 5
REAL_TIME = ("chrt", "-f", "1")
SIZES_MIB = (256, 2048)  # of the heap and of the mapping, each
PROGRAM = """
import mmap, resource, sys, time
size, seconds = int(sys.argv[1]) << 20, float(sys.argv[2])
heap = [bytes(16 << 10) + b"x" for _ in range(size >> 14)]
block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
block.madvise(mmap.MADV_NOHUGEPAGE)
for at in range(0, size, 4096): block[at] = 1
grown, longest_s = [], 0.0
begin = grow_at = time.perf_counter()
switches = lambda: resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
turns = 0
while (then := time.perf_counter()) < begin + seconds:
    before = switches()
    page = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    page[0] = 1
    page.close()
    wait_s = time.perf_counter() - then
    if switches() != before: longest_s = max(longest_s, wait_s)
    turns += 1
    if turns % 200 == 0: time.sleep(0.002)  # the kernel stops real-time programs that never sleep
    if then > grow_at:
        grow_at += 0.1
        grown.append(mmap.mmap(-1, 400 << 10, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        grown[-1].write(bytes(400 << 10))
        heap += [bytes(16 << 10) + b"x" for _ in range(25)]
print(longest_s, file=sys.stderr)
"""


def words_of(size_mib: int, seconds: int) -> list[str]:
    return [sys.executable, "-c", PROGRAM, str(size_mib), str(seconds)]


def output(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, check=True, capture_output=True, text=True)


def watched(size_mib: int, seconds: int, *prefix: str) -> dict[str, Any]:
    """The longest wait in seconds, the share of a core, and the kind of memory that grows."""
    words = words_of(size_mib, seconds)
    done = output(*prefix, str(MODICUM), "watch", "--json", "--", *words)
    record = json.loads(done.stdout)
    growth = record["growth"] or {"owner": "none"}
    share = record["watch"]["cpu_s"] / record["elapsed_s"]
    return {"wait_s": json.loads(done.stderr), "share": share, "grows": growth["owner"]}


def milliseconds(waits_s: list[float]) -> str:
    """Median and maximum."""
    return f"{1e3 * statistics.median(waits_s):.2f} ({1e3 * max(waits_s):.2f})"


def row(size_mib: int) -> str:
    shares, alone, waits, grows = [], [], [], set()
    for _ in range(ROUNDS):
        run = watched(size_mib, SECONDS)
        shares.append(100 * run["share"])
        grows.add(run["grows"])
        words = words_of(size_mib, SECONDS_OF_WAITS)
        alone.append(json.loads(output(*REAL_TIME, *words).stderr))
        waits.append(watched(size_mib, SECONDS_OF_WAITS, *REAL_TIME)["wait_s"])
    return (
        f"| 2 x {size_mib} MiB | {statistics.median(shares):.2f} ({max(shares):.2f}) | "
        f"{milliseconds(waits)} | {milliseconds(alone)} | {', '.join(sorted(grows))} |"
    )


def main() -> int:
    if not MODICUM.is_file():
        print(f"{MODICUM} is not there; run `make build`", file=sys.stderr)
        return 1
    version = output(str(MODICUM), "--version")
    text = "\n".join(
        [
            "| heap and mapping | % of a core, median (most) | longest wait watched, ms | "
            "longest wait alone, ms | what grows |",
            "|---|---|---|---|---|",
            *map(row, SIZES_MIB),
            "",
            f"`{COMMAND}`: {ROUNDS} rounds of {SECONDS} s, and of {SECONDS_OF_WAITS} s for the "
            f"waits; {version.stdout.strip()}, {machine()}.",
        ]
    )
    write_between_markers(ROOT / "benchmarks/RESULTS.md", "watching", text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
