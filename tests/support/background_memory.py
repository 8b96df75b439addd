"""Acts (functions that ranks run by name, see torch_rank.py) that train with a pause before each
step, in place of forward and backward, and save meanwhile: by Modicum, or by DCP's
async_save."""

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch_rank
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import modicum.torch

ROUNDS = 5
PAUSE = 1.0
"""The pause, as a multiple of the duration of a save in the foreground."""


def trained(directory: str, by: str) -> tuple[Any, Any]:
    """An FSDP2 model and its optimizer after one step. Masters, gradients and moments are float32:
    16 bytes a parameter."""
    model = torch_rank.built(directory, "float32", [dist.get_world_size()])
    how: dict[str, Any] = {"dtype": torch.float32, "progress": False}
    optimizer: torch.optim.Optimizer
    if by == "modicum":
        optimizer = modicum.torch.AdamW(model.named_parameters())
        modicum.torch.load(model, directory, optimizer=optimizer, **how)
    else:
        modicum.torch.load(model, directory, **how)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step(model, optimizer, 0)
    return model, optimizer


def step(model: Any, optimizer: torch.optim.Optimizer, pause_s: float) -> float:
    """Pauses, sets gradients and steps. Returns the seconds until all ranks have stepped."""
    begin = time.monotonic()
    time.sleep(pause_s)
    for parameter in model.parameters():
        # One gradient at a time, as FSDP2 makes them.
        parameter.backward(torch.full_like(parameter, 1e-3))
    optimizer.step()
    optimizer.zero_grad()
    dist.barrier()
    return time.monotonic() - begin


def settled() -> float:
    """Waits until, on all ranks, no data is left to be written to the disk. Returns the time."""
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()
    return time.monotonic()


def by_modicum(directory: str, root: str) -> dict[str, Any]:
    """With the pause, during which a save can be written: `ROUNDS` steps without a save, then
    `ROUNDS` steps, each during a save in the background. Then without the pause: `ROUNDS`
    steps without a save, and one during a save."""
    model, optimizer = trained(directory, "modicum")

    def save(number: int, by: Any = modicum.torch.save) -> Any:
        return by(model, root, step=number, optimizer=optimizer, keep=1)

    blocking = []
    for number in range(ROUNDS):
        settled()
        blocking.append(save(number).durable_s)
    pause_s = PAUSE * statistics.median(blocking)
    plain = [step(model, optimizer, pause_s) for _ in range(ROUNDS)]
    during, reports = [], []
    for number in range(ROUNDS, 2 * ROUNDS):
        begin = settled()
        saving = save(number, modicum.torch.async_save)
        step(model, optimizer, pause_s)
        during.append(time.monotonic() - begin)
        reports.append(vars(saving.result()))
    alone = [step(model, optimizer, 0) for _ in range(ROUNDS)]
    settled()
    saving = save(2 * ROUNDS, modicum.torch.async_save)
    first = step(model, optimizer, 0)
    return {
        "blocking": blocking, "pause_s": pause_s, "plain": plain, "during": during,
        "reports": reports, "alone": alone, "first": first, "last": vars(saving.result()),
    }  # fmt: skip


def by_dcp(directory: str, root: str) -> dict[str, Any]:
    """Steps without the pause, then makes one save by DCP. Makes the directory `root` just before
    the save: the directory shows that a rank was not killed earlier."""
    model, optimizer = trained(directory, "torch")
    for _ in range(ROUNDS):
        step(model, optimizer, 0)
    begin = settled()
    Path(root).mkdir(exist_ok=True)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    future = dcp.async_save(state, checkpoint_id=root)
    blocked_s = time.monotonic() - begin
    future.result()
    dist.barrier()
    return {"blocked_s": blocked_s, "durable_s": time.monotonic() - begin}


ACTS: dict[str, Callable[..., Any]] = {
    "background_by_modicum": by_modicum,
    "background_by_dcp": by_dcp,
}
