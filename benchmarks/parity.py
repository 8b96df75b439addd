#!/usr/bin/env python3
"""Compares the losses of models that are trained with fewer bytes per parameter.

Workload: a byte-level transformer of 438 k parameters (two layers) learns the text of Python's
reference manual, once per seed and optimizer, with the same batches in the same order and torch's
OneCycleLR as the schedule of the learning rate. A fifth of the text is held out. All rows compute
with weights and gradients that are rounded to bf16: if the parameters are fp32 masters, the forward
pass rounds them. Every row is compared seed by seed with the format `fp32`, whose state is not
rounded to fewer bits. Rivals: torchao's 8-bit AdamW; and torch's AdamW whose moments are converted
to bitsandbytes' 8-bit codes and back after each step, since bitsandbytes steps only on a GPU.

Two runs that differ in a single rounding drift apart. So every difference has noise; the standard
error of its mean over the seeds shows how much. An example of mere noise is `fp32-split`: it has
the same values as `fp32` and only rounds ties in another direction. This is a coarse check: a
second moment that is several times too large does not show in such a curve. The tests of `kernels`
detect that (docs/internals/numerics.md).

Writes its table into benchmarks/RESULTS.md between its markers.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from harness.page import ROOT, machine, write_between_markers
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from modicum.torch import AdamW

WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 128, 2, 4, 64, 16
LR, DECAY = 1e-3, 0.1
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
    """The training text and the validation text, as the values of their bytes."""
    text = "".join(topics[name] for name in sorted(topics)).encode()
    line = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    cut = len(line) * 4 // 5
    return line[:cut], line[cut:]


def loss_of(model: Model, line: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """The mean loss over the windows of the text `line` that begin at `at`."""
    windows = torch.stack([line[i : i + CONTEXT + 1] for i in at.tolist()])
    wide = {name: p.bfloat16().float() for name, p in model.named_parameters()}
    logits = functional_call(model, wide, windows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


class BitsandbytesCodes(torch.optim.AdamW):
    """torch's AdamW whose moments are rounded to bitsandbytes' dynamic 8-bit codes, in blocks of
    256. Like in bitsandbytes, parameters of fewer than 4,096 elements keep fp32 moments."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        from bitsandbytes import functional as bnb

        super().step()
        for state in self.state.values():
            for name, is_signed in (("exp_avg", True), ("exp_avg_sq", False)):
                moment = state[name]
                if moment.numel() < 4096:
                    continue
                code = bnb.create_dynamic_map(signed=is_signed)
                codes, scales = bnb.quantize_blockwise(moment, code=code, blocksize=256)
                moment.copy_(bnb.dequantize_blockwise(codes, scales))


Named = Sequence[tuple[str, nn.Parameter]]


def ours(state_format: str) -> Callable[[Named, int], torch.optim.Optimizer]:
    return lambda named, seed: AdamW(
        named, lr=LR, weight_decay=DECAY, state_format=state_format, seed=seed
    )


def torchao(named: Named, seed: int) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit([p for _, p in named], lr=LR, weight_decay=DECAY)


def bitsandbytes(named: Named, seed: int) -> torch.optim.Optimizer:
    return BitsandbytesCodes([p for _, p in named], lr=LR, weight_decay=DECAY)


@dataclass
class Row:
    what: str
    bytes_per_param: str  # for a matrix: weight, gradient and state together
    dtype: torch.dtype  # dtype of the parameters
    make: Callable[[Named, int], torch.optim.Optimizer]


BF16, FP32 = torch.bfloat16, torch.float32
ROWS = (
    Row("`fp32`", "16", BF16, ours("fp32")),
    Row("`fp32-split`", "14", BF16, ours("fp32-split")),
    Row("`bf16-moments`", "10", BF16, ours("bf16-moments")),
    Row("`int8-moments`", "8.06", BF16, ours("int8-moments")),
    Row("`int8-moments-24`", "7.06", BF16, ours("int8-moments-24")),
    Row("`bf16-moments`, fp32 parameters", "12", FP32, ours("bf16-moments")),
    Row("`int8-moments`, fp32 parameters", "10.06", FP32, ours("int8-moments")),
    Row("torchao `AdamW8bit`, fp32 parameters", "10.03", FP32, torchao),
    Row("bitsandbytes' 8-bit codes, fp32 parameters", "10.03", FP32, bitsandbytes),
)


def train(row: Row, seed: int, steps: int) -> float:
    """Trains a model; returns its loss on the validation text."""
    torch.manual_seed(seed)
    model = Model().to(BF16).to(row.dtype)  # all rows begin with the same values
    training, validation = corpus()
    optimizer = row.make(list(model.named_parameters()), seed)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=LR, total_steps=steps, cycle_momentum=False
    )
    picks = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        at = torch.randint(len(training) - CONTEXT - 1, (BATCH,), generator=picks)
        loss_of(model, training, at).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with torch.no_grad():
        windows = torch.arange(0, len(validation) - CONTEXT - 1, CONTEXT)
        losses = [loss_of(model, validation, at).item() * len(at) for at in windows.split(128)]
    return sum(losses) / len(windows)


def trained_by_all(seed: int, steps: int) -> list[float]:
    """The loss of each row for one seed. Runs in a worker process."""
    torch.set_num_threads(1)  # a model this small gains nothing from more threads
    losses = []
    for row in ROWS:
        losses.append(train(row, seed, steps))
        print(f"seed {seed}, {row.what}: {losses[-1]:.4f}", file=sys.stderr, flush=True)
    return losses


def table(losses: dict[str, list[float]], steps: int) -> str:
    exact = losses[ROWS[0].what]
    lines = []
    for row in ROWS:
        of = losses[row.what]
        apart = [a - b for a, b in zip(of, exact, strict=True)]
        error = statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else 0.0
        lines.append(
            f"| {row.what} | {row.bytes_per_param} | {statistics.mean(of):.4f} "
            f"| {statistics.mean(apart):+.4f} | {error:.4f} | {max(apart, key=abs):+.4f} |"
        )
    spread = f"{statistics.stdev(exact):.4f}" if len(exact) > 1 else "-"
    parameters = sum(p.numel() for p in Model().parameters())
    return "\n".join(
        [
            f"{parameters / 1e3:.0f} k parameters, {len(exact)} seeds, {steps} steps; the seeds' "
            f"own spread at `fp32` is {spread} (standard deviation):",
            "",
            "| optimizer state | B/param | loss on held-out text | mean difference from `fp32` "
            "| its standard error | largest difference of a seed |",
            "|---|---|---|---|---|---|",
            *lines,
            "",
            f"`{COMMAND}`: torch {torch.__version__}, torchao {metadata.version('torchao')}, "
            f"bitsandbytes {metadata.version('bitsandbytes')}, Python {sys.version.split()[0]}; "
            f"{machine()}.",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each")
    options = parser.parse_args()
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        steps = [options.steps] * options.seeds
        by_seed = list(pool.map(trained_by_all, range(options.seeds), steps))
    losses = {row.what: [of[at] for of in by_seed] for at, row in enumerate(ROWS)}
    text = table(losses, options.steps)
    print(text)
    write_between_markers(Path(ROOT / "benchmarks/RESULTS.md"), "parity", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
