#!/usr/bin/env python3
"""Watches an accelerate script, FSDP2 with bf16 mixed precision on 4 ranks, as it is and with
Modicum, and compares the two runs: docs/watch.png is the page of the comparison.

picture.py [--modicum PROGRAM]: build/release/modicum by default.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.page import ROOT
from harness.picture import take_picture
from systems import ENVIRONMENT, RANKS, TORCHRUN, make_checkpoints

SCRIPT = "accelerate_fsdp2.py"
PICTURE = ROOT / "docs/watch.png"


def watched(program: Path, checkpoint: Path, record: Path, words: list[str]) -> Path:
    """Runs the script under `modicum watch`; `record` becomes its document."""
    command = [sys.executable, *TORCHRUN, str(RANKS), SCRIPT, str(checkpoint), *words]
    with record.open("w") as document:
        subprocess.run(
            [program, "watch", "--json", "--", *command], check=True, stdout=document,
            cwd=ROOT / "examples", env=os.environ | ENVIRONMENT,
        )  # fmt: skip
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--modicum", type=Path, default=ROOT / "build/release/modicum")
    options = parser.parse_args()
    program = options.modicum.resolve()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        make_checkpoints(place, ["causal-lm"])
        runs = [
            watched(program, place / "causal-lm", place / f"{label}.json", words)
            for label, words in (("as-it-is", []), ("with-modicum", ["--modicum"]))
        ]
        page = place / "page.html"
        subprocess.run([program, "watch", "--compare", *runs, "--report", page], check=True)
        take_picture(page, PICTURE)
    print(PICTURE)


if __name__ == "__main__":
    main()
