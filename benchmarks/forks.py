"""The three ways of `fork=` beside each other: how long a load and a step take by each.

    python benchmarks/forks.py [--mib 512] [--rounds 7]

One rank, one model of bfloat16 linear layers, the file in the page cache; the ways take turns in
every round. Prints medians, and the least and most in brackets.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import modicum.torch

WAYS = ("excluded", "shared", "inherited")
COLUMNS = 4096
LAYERS = 8


def written(directory: Path, mib: int) -> int:
    """Rows of each layer."""
    rows = mib * (1 << 20) // (2 * COLUMNS * LAYERS)
    weight = torch.ones(rows, COLUMNS, dtype=torch.bfloat16)
    save_file(
        {f"{i}.weight": weight.clone() for i in range(LAYERS)}, directory / "model.safetensors"
    )
    return rows


def round_of(directory: Path, rows: int, fork: str) -> dict[str, float]:
    """Seconds of a load, of making the optimizer, and of a step."""
    with modicum.torch.empty_parameters():
        layers = [nn.Linear(COLUMNS, rows, bias=False, dtype=torch.bfloat16) for _ in range(LAYERS)]
        model = nn.Sequential(*layers)
    report = modicum.torch.load(model, directory, budget="none", progress=False, fork=fork)
    taken = {"load": report.elapsed_s}
    begin = time.perf_counter()
    optimizer = modicum.torch.AdamW(model.named_parameters(), state_format="fp32-split", fork=fork)
    taken["AdamW()"] = time.perf_counter() - begin
    steps = []
    for _ in range(4):
        for parameter in model.parameters():
            (parameter * 0.5).sum().backward()
        begin = time.perf_counter()
        optimizer.step()
        steps.append(time.perf_counter() - begin)
        optimizer.zero_grad()
    return taken | {"step": min(steps[1:])}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=512, help="of bfloat16 parameters")
    parser.add_argument("--rounds", type=int, default=7)
    of = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rows = written(Path(directory), of.mib)
        rounds: dict[str, list[dict[str, float]]] = {fork: [] for fork in WAYS}
        for _ in range(of.rounds):
            for fork in WAYS:
                rounds[fork].append(round_of(Path(directory), rows, fork))
    for fork, results in rounds.items():
        line = f"{fork:10}"
        for what in results[0]:
            seconds = sorted(result[what] for result in results)
            median = statistics.median(seconds)
            line += f"  {what} {median:.3f} s ({seconds[0]:.3f}-{seconds[-1]:.3f})"
        print(line)


if __name__ == "__main__":
    main()
