#!/usr/bin/env python3
"""Measures the memory of real engines, without Modicum and with its patches.

Workload: the FSDP engines of verl and AReaL, twinkle's two strategies, and torchtitan's llama3 with
its checkpoint manager. Each loads a made-up bf16 checkpoint with its own code into fp32 parameters
of FSDP2, in 4 gloo ranks, and trains 3 steps. Of the configurations that the engine offers, the one
that needs the least memory is used, both without Modicum and with it. With Modicum, verl, AReaL and
twinkle have the patches of integrations/, and torchtitan has the block of docs/guide/engines.md.

A peak is the largest sampled sum over all ranks of anonymous memory, shared memory and page tables.
There are two: of the load (a run without steps, whose optimizer has no memory yet), and of a run
with training.

Makes an environment for the engines in build/engines/, on top of .venv, whose torch and
transformers it uses; this needs a package index. The losses without and with Modicum may differ by
1e-4, since torch's optimizer and Modicum's round in a different order. Writes its table into
benchmarks/RESULTS.md between its markers.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from harness.page import GIB, ROOT, machine, write_between_markers
from systems import RANKS, TORCHRUN, make_checkpoints, run

sys.path.append(str(ROOT / "tests/support"))
from engine_packages import make_environment, releases

COMMAND = "python benchmarks/engines.py"
PLACE = ROOT / "build/engines"
RANK = str(ROOT / "benchmarks/harness/engine_rank.py")
# Name of a distribution -> name of its package.
PACKAGES = {"verl": "verl", "areal": "areal", "twinkle_kit": "twinkle"}
# (distribution, ENGINE of engine_rank.py, description, checkpoint)
ROWS = (
    ("verl", "verl", "FSDP engine, `fsdp2`", "causal-lm"),
    ("areal", "areal", "FSDP engine, `memory_efficient_load`", "causal-lm"),
    ("twinkle_kit", "twinkle-native", "`memory_efficient_init`", "causal-lm"),
    ("twinkle_kit", "twinkle-accelerate", "`memory_efficient_init`", "causal-lm"),
    ("torchtitan", "torchtitan", "llama3, `initial_load_in_hf`", "llama"),
)


def patch(name: str, python: Path, into: Path) -> None:
    """Copies a package of the environment and patches the copy."""
    (package,) = python.parent.parent.glob(f"lib/python*/site-packages/{PACKAGES[name]}")
    (file,) = ROOT.glob(f"integrations/{name}-*.patch")
    shutil.copytree(package, into / package.name, dirs_exist_ok=True)
    words = ["patch", "-p1", "--fuzz=0", "--quiet", "-i", str(file)]
    subprocess.run(words, cwd=into, check=True)


def label_of(row: tuple[str, ...]) -> str:
    return f"{row[1]} {releases()[row[0]]}: {row[2]}"


def recorded(row: tuple[str, ...]) -> str:
    """The row of an earlier run, from the page's table."""
    lines = (ROOT / "benchmarks/RESULTS.md").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"| {label_of(row)} |")]
    return line


def row_of(row: tuple[str, ...], place: Path, model_bytes: int, python: Path) -> str:
    """Measures a row and returns it as a row of the page's table."""
    name, engine, _, checkpoint = row
    if name in PACKAGES and not (place / PACKAGES[name]).exists():
        patch(name, python, place)
    own_path = os.environ.get("PYTHONPATH", "")
    cells, losses = [], []
    for switch in ([], ["--modicum"]):
        # Only with Modicum are the patched copies found first.
        path = os.pathsep.join([str(place)] * bool(switch) + [own_path])
        peaks, printed = [], ""
        for steps in ("0", "3"):
            with tempfile.TemporaryDirectory() as folder:
                words = [*TORCHRUN, str(RANKS), RANK, engine, str(place / checkpoint), folder]
                os.environ["PYTHONPATH"] = path
                peak, printed = run([*words, f"--steps={steps}", *switch], str(python))
            peaks.append(f"{peak / GIB:.2f}")
        os.environ["PYTHONPATH"] = own_path
        cells.append(", ".join(peaks))
        losses.append([float(loss) for loss in re.findall(r"^step \d: loss (\S+)$", printed, re.M)])
    if len(losses[0]) != 3 or any(abs(a - b) > 1e-4 for a, b in zip(*losses, strict=True)):
        sys.exit(f"{engine}: losses {losses[0]} without Modicum, {losses[1]} with it")
    cells = [label_of(row), f"{model_bytes / GIB:.2f}", *cells, f"{losses[1][-1]:.4f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--python", type=Path, help="interpreter of an environment that has the engines already"
    )
    parser.add_argument(
        "--only", nargs="+", help="measure only these engines; the page keeps its other rows"
    )
    options = parser.parse_args()
    measured = [row for row in ROWS if not options.only or row[1] in options.only]
    from areal_engine import write_tokenizer

    PLACE.mkdir(parents=True, exist_ok=True)
    python = options.python or make_environment(PLACE / "venv", Path(sys.executable))
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        sizes = make_checkpoints(place, {row[3] for row in measured})
        for checkpoint in sizes:
            write_tokenizer(place / checkpoint)
        rows = [
            row_of(row, place, 4 * sizes[row[3]], python) if row in measured else recorded(row)
            for row in ROWS
        ]
    packages = ("torch", "transformers", "accelerate")
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    text = [
        f"{RANKS} ranks on one node. `as it is` and `with Modicum`: the peak of all ranks together "
        "in GiB, of the load without an optimizer's memory and of a run with 3 steps, interpreters "
        "and libraries included. `model`: GiB of its parameters:",
        "",
        "| engine | model | as it is | with Modicum | loss of the third step |",
        "|---|---|---|---|---|",
        *rows,
        "",
        "As they are, verl and AReaL train with torch's AdamW; with the patches they train with "
        "Modicum's. The other rows have torch's AdamW in both columns.",
        "",
        f"`{COMMAND}`: {versions}; {machine()}.",
    ]
    print("\n".join(text))
    write_between_markers(ROOT / "benchmarks/RESULTS.md", "engines", "\n".join(text))


if __name__ == "__main__":
    main()
