#!/usr/bin/env python3
"""Takes the pictures in docs:

watch.png: the page of `modicum watch --compare --report` of an accelerate script (FSDP2 with bf16
mixed precision, 4 ranks), without and with Modicum.
strategies.png: a page with the charts of five `modicum load --report`, one for each strategy. Each
loads a qwen3-0.6b (1.1 GiB of bf16) into HSDP on two nodes of two ranks.

picture.py [watch] [strategies] [--modicum PROGRAM]: takes both by default. PROGRAM is by default
build/release/modicum.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.page import ROOT
from harness.picture import take_picture
from systems import ENVIRONMENT, RANKS, TORCHRUN, make_checkpoints

sys.path.append(str(ROOT / "tests/support"))
from pages import drawn_on
from program import STRATEGIES

SCRIPT = "accelerate_fsdp2.py"
ARCH = "qwen3-0.6b"
LAYOUT = ("--ranks", "4", "--ranks-per-node", "2", "--layout", "hsdp", "--mesh", "2x2")


def watched(program: Path, checkpoint: Path, record: Path, words: list[str]) -> Path:
    """Runs the script under `modicum watch`, writes the JSON document to `record`, and returns
    `record`."""
    command = [sys.executable, *TORCHRUN, str(RANKS), SCRIPT, str(checkpoint), *words]
    with record.open("w") as document:
        subprocess.run(
            [program, "watch", "--json", "--", *command], check=True, stdout=document,
            cwd=ROOT / "examples", env=os.environ | ENVIRONMENT,
        )  # fmt: skip
    return record


def watch(program: Path, place: Path) -> Path:
    """The page that compares the script without and with Modicum."""
    make_checkpoints(place, ["causal-lm"])
    runs = [
        watched(program, place / "causal-lm", place / f"{label}.json", words)
        for label, words in (("as-it-is", []), ("with-modicum", ["--modicum"]))
    ]
    page = place / "watch.html"
    subprocess.run([program, "watch", "--compare", *runs, "--report", page], check=True)
    return page


def strategies(program: Path, place: Path) -> Path:
    """One page with the charts of the five loads, all on the same scale."""
    from modicum import _modicum

    model = place / ARCH
    subprocess.run([program, "synth", model, "--arch", ARCH, "-q"], check=True)
    runs = []
    for strategy in STRATEGIES:
        page = place / f"{strategy}.html"
        words = [*LAYOUT, "--strategy", strategy, "--budget", "none", "--digest", "-q"]
        subprocess.run([program, "load", model, *words, "--report", page], check=True)
        runs.append((strategy, json.dumps(drawn_on(page)["runs"][0]["document"])))
    page = place / "strategies.html"
    sentence = (
        f"{ARCH} into HSDP, two nodes of two ranks, by each strategy: the same shards, and the "
        "memory of all ranks on the way there"
    )
    page.write_text(_modicum.report_page("strategies", runs, sentence))
    return page


PAGES = {"watch": watch, "strategies": strategies}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("pictures", nargs="*", help="watch or strategies; both by default")
    parser.add_argument("--modicum", type=Path, default=ROOT / "build/release/modicum")
    options = parser.parse_args()
    if unknown := set(options.pictures) - set(PAGES):
        parser.error(f"expected {' or '.join(PAGES)}, got {' '.join(unknown)}")
    for name in options.pictures or PAGES:
        with tempfile.TemporaryDirectory() as place:
            page = PAGES[name](options.modicum.resolve(), Path(place))
            picture = ROOT / f"docs/{name}.png"
            take_picture(page, picture)
            print(picture)


if __name__ == "__main__":
    main()
