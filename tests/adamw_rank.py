"""What a rank does when it is asked about `modicum.torch.AdamW`: acts for `torch_rank.py`."""

import math
from collections.abc import Callable
from typing import Any

import modicum.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch_rank
from rounding import nearest_sqrt
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import distribute_tensor

from modicum import _modicum


def model_of(directory: str, mesh: list[int], dtype: str | None = None) -> Any:
    """Loaded by Modicum and sharded."""
    model = torch_rank.built(directory, dtype, mesh)
    as_dtype = getattr(torch, dtype) if dtype else None
    modicum.torch.load(model, directory, dtype=as_dtype, progress=False)
    return model


def five_steps(directory: str, mesh: list[int], by: str) -> dict[str, Any]:
    """Of an optimizer with three groups."""
    model = model_of(directory, mesh)
    make = modicum.torch.AdamW if by == "modicum" else torch.optim.AdamW
    optimizer = make(torch_rank.groups(model), lr=1e-3)
    before = torch_rank.whole_state(model)
    with nearest_sqrt():
        losses = torch_rank.steps(model, optimizer)
    after = torch_rank.whole_state(model)
    digest = optimizer.digest() if by == "modicum" else {}
    return {"before": before, "losses": losses, "after": after, "digest": digest}


def bring_gradients(model: Any, scale: float = 1.0) -> None:
    """Some that are the same in every world."""
    for i, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(i)
        whole = scale * torch.randn(parameter.shape, generator=generator)
        cut = distribute_tensor(
            whole.to(parameter.dtype), parameter.device_mesh, parameter.placements
        )
        parameter.grad = cut


def states(directory: str, mesh: list[int], state_format: str) -> dict[str, int]:
    """A digest after three steps."""
    model = model_of(directory, mesh, "bfloat16")
    optimizer = modicum.torch.AdamW(model.named_parameters(), state_format=state_format)
    for step in range(3):
        bring_gradients(model, scale=2.0**-step)
        optimizer.step()
    return optimizer.digest()


def norm(directory: str, mesh: list[int]) -> dict[str, Any]:
    model = model_of(directory, mesh)
    optimizer = modicum.torch.AdamW(model.parameters())
    bring_gradients(model)
    # The same on every rank, whatever it is cut into; each element once.
    fp64 = math.sqrt(
        math.fsum(p.grad.full_tensor().double().square().sum().item() for p in model.parameters())
    )
    factors = []
    clip_factor = _modicum.clip_factor
    _modicum.clip_factor = lambda *of: factors.append(clip_factor(*of)) or factors[-1]
    try:
        for of_norm in (0.25, 1.0, 4.0):
            got = optimizer.clip_grad_norm_(of_norm * fp64)
            optimizer.step()
    finally:
        _modicum.clip_factor = clip_factor
    by_torch = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return {
        "norm": got.item(),
        "fp64": fp64,
        "torch": by_torch.full_tensor().item(),
        "factor": factors,
        "expected_factor": [min(1.0, of * fp64 / (fp64 + 1e-6)) for of in (0.25, 1.0, 4.0)],
    }


def skip(directory: str, mesh: list[int], bad: str) -> dict[str, Any]:
    """The last rank has one gradient that is not finite."""
    model = model_of(directory, mesh)
    optimizer = modicum.torch.AdamW(model.parameters())
    bring_gradients(model)
    optimizer.step()
    before = optimizer.digest()
    if dist.get_rank() == 3:
        next(p for p in model.parameters() if p.to_local().numel()).grad.to_local().view(-1)[0] = (
            float(bad)
        )
    norm = optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    after, skipped = optimizer.digest(), optimizer.skipped_steps
    optimizer.zero_grad()
    bring_gradients(model)
    optimizer.step()
    return {
        "before": before,
        "after": after,
        "then": optimizer.digest(),
        "skipped": skipped,
        "norm": str(norm.item()),
    }


def checkpoint(directory: str, mesh: list[int], folder: str) -> dict[str, Any]:
    """Five steps, saved; five more by whoever has gone on, and by those that have loaded it."""
    model = model_of(directory, mesh)
    optimizer = modicum.torch.AdamW(model.parameters(), lr=1e-2)
    with nearest_sqrt():
        torch_rank.steps(model, optimizer)
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
        torch_rank.steps(model, optimizer)
        after = {"expected": torch_rank.whole_state(model)}
        for name, make in (("ours", modicum.torch.AdamW), ("torch", torch.optim.AdamW)):
            model = model_of(directory, mesh)
            optimizer = make(model.parameters(), lr=0.5)
            weights, state = get_state_dict(model, optimizer)
            dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
            torch_rank.steps(model, optimizer)
            after[name] = torch_rank.whole_state(model)
    return after


ACTS: dict[str, Callable[..., Any]] = {
    "adamw": five_steps,
    "adamw_states": states,
    "adamw_norm": norm,
    "adamw_skip": skip,
    "adamw_checkpoint": checkpoint,
}
