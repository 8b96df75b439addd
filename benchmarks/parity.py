#!/usr/bin/env python3
"""Compares the losses of models that are trained with fewer bytes per parameter.

Workload: a byte-level transformer of 120 k parameters (bf16 weights and gradients, two layers)
learns the text of Python's own reference, once per seed and state format, with the same batches in
the same order. Rival: the format `fp32`, which is exact; a format's difference is taken seed by
seed. This is a coarse check: a second moment several times too large does not show in such a curve.
The tests of `kernels` detect it (docs/internals/numerics.md).

Writes its table into benchmarks/RESULTS.md between its markers.
"""

import argparse
import statistics
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from harness.page import ROOT, machine, write_between_markers
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from modicum.torch import AdamW

WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 64, 2, 4, 64, 16
FORMATS = ("fp32", "fp32-split", "bf16-moments", "int8-moments", "int8-moments-24")
BYTES = dict(zip(FORMATS, ("16", "14", "10", "8.06", "7.06"), strict=True))
COMMAND = "python benchmarks/parity.py"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.bytes(text) + self.places(torch.arange(CONTEXT))
        return functional.linear(self.norm(self.blocks(x)), self.bytes.weight)  # tied


def corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """The training and the validation text."""
    text = "".join(topics[name] for name in sorted(topics)).encode()
    line = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    cut = len(line) * 9 // 10
    return line[:cut], line[cut:]


def loss_of(model: Model, line: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    windows = torch.stack([line[i : i + CONTEXT + 1] for i in at.tolist()])
    wide = {name: p.float() for name, p in model.named_parameters()}
    logits = functional_call(model, wide, windows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def train(state_format: str, seed: int, steps: int) -> float:
    """The loss on the validation text."""
    torch.manual_seed(seed)
    model = Model().to(torch.bfloat16)
    learnt, tried = corpus()
    optimizer = AdamW(
        model.named_parameters(), lr=2e-3, weight_decay=0.1, state_format=state_format, seed=seed
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=2e-3, total_steps=steps, cycle_momentum=False
    )
    picks = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        at = torch.randint(len(learnt) - CONTEXT - 1, (BATCH,), generator=picks)
        loss_of(model, learnt, at).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with torch.no_grad():
        places = torch.arange(0, len(tried) - CONTEXT - 1, CONTEXT)
        losses = [loss_of(model, tried, at) for at in places.split(128)]
    return torch.stack(losses[:-1]).mean().item()


def table(losses: dict[str, list[float]], steps: int) -> str:
    exact = losses["fp32"]
    rows = []
    for name, of in losses.items():
        apart = [abs(a - b) for a, b in zip(of, exact, strict=True)]
        by_seed = ", ".join(f"{loss:.4f}" for loss in of)
        rows.append(
            f"| `{name}` | {BYTES[name]} | {by_seed} | {statistics.mean(apart):.4f} "
            f"| {max(apart):.4f} |"
        )
    spread = f"{statistics.stdev(exact):.4f}" if len(exact) > 1 else "-"
    parameters = sum(p.numel() for p in Model().parameters())
    return "\n".join(
        [
            f"{parameters / 1e3:.0f} k parameters, {steps} steps; the seeds' own spread at `fp32` "
            f"is {spread} (standard deviation):",
            "",
            "| state format | B/param | loss on held-out text, by seed "
            "| mean difference from `fp32` | largest |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"`{COMMAND}`: torch {torch.__version__}, Python {sys.version.split()[0]}; "
            f"{machine()}.",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    torch.set_num_threads(1)  # a second one does not help so small a model
    losses: dict[str, list[float]] = {name: [] for name in FORMATS}
    for seed in range(options.seeds):
        for name in FORMATS:
            losses[name].append(train(name, seed, options.steps))
            print(f"seed {seed}, {name}: {losses[name][-1]:.4f}", file=sys.stderr, flush=True)
    text = table(losses, options.steps)
    print(text)
    write_between_markers(Path(ROOT / "benchmarks/RESULTS.md"), "parity", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
