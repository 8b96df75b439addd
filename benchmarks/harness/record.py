#!/usr/bin/env python3
"""Records a run of `make bench` in benchmarks/RESULTS.md.

record.py RUN.tsv: RUN.tsv has a line per program: its name, its begin and its end in seconds since
the epoch, separated by tabs.
"""

import subprocess
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))
from harness.page import ROOT, machine, write_between_markers


def commit() -> str:
    """The abbreviated hash of the commit that is checked out."""
    words = ["git", "describe", "--always", "--exclude", "*"]
    done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def main() -> None:
    lines = [line.split("\t") for line in Path(sys.argv[1]).read_text().splitlines()]
    runs = [(name, int(begin), int(end)) for name, begin, end in lines]
    times = ", ".join(f"`{name}` {(end - begin) / 60:.1f}" for name, begin, end in runs)
    day = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(runs[0][1]))
    text = f"Last run: {day}, commit {commit()}; minutes: {times}; {machine()}."
    write_between_markers(ROOT / "benchmarks/RESULTS.md", "run", text)


if __name__ == "__main__":
    main()
