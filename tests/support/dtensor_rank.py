"""Acts (functions that ranks run by name, see torch_rank.py) on models whose tensors a program
distributes itself, by `distribute_module` or `distribute_tensor`."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nested_options import nested
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)

import modicum.torch

PLACEMENTS = {"replicated": Replicate(), "sharded": Shard(0)}


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def told(error: modicum.Error) -> dict[str, str]:
    return {"refused": str(error), "tensor": error.tensor}


# ---- gradients


def rows_cut(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """Shards a module's parameters along dim 0."""
    for attribute, parameter in list(module.named_parameters(recurse=False)):
        cut = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
        module.register_parameter(attribute, nn.Parameter(cut))


def gradients_of_autograd(rows: int) -> tuple[float, bool]:
    """Two steps, the first with gradients accumulated by two backwards, of a model whose last layer
    has `rows` rows. Returns the largest difference from torch's steps of the complete model, and
    whether gradients had the placements that autograd gives them until the step."""
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, rows))
    inputs = torch.randn(3, 4, 8)
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, rows))
    model.load_state_dict(alone.state_dict())
    distribute_module(model, grid(), rows_cut)
    makes = (torch.optim.AdamW, alone), (modicum.torch.AdamW, model)
    for optimizer, of in [(make(of.parameters(), lr=0.1), of) for make, of in makes]:
        for at, given in enumerate(inputs):
            cut = distribute_tensor(given, grid(), [Shard(0)]) if of is model else given
            whole(of(cut).square().sum()).backward()
            if of is model:
                placements = {parameter.grad.placements for parameter in model.parameters()}
            if at > 0:
                optimizer.step()
                optimizer.zero_grad()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    difference = max((whole(one) - other).abs().max().item() for one, other in pairs)
    return difference, placements != {(Shard(0),)}


def gradients_by_hand(given: str) -> list[float]:
    """Returns two parameters of one row, which is on rank 0, after a step.

    Args:
        given: the first one's gradient: "partial", whose sum over ranks is 1; "none"; or "none on
            the empty shard", 1 on rank 0. The second one's is always 1.
    """
    mesh = grid()
    first, second = (
        nn.Parameter(distribute_tensor(torch.zeros(1, 8), mesh, [Shard(0)])) for _ in range(2)
    )
    optimizer = modicum.torch.AdamW([first, second], lr=0.1, weight_decay=0.0)
    one = distribute_tensor(torch.ones(1, 8), mesh, [Shard(0)])
    if given == "partial":
        share = torch.full((1, 8), 1.0 / mesh.size())
        first.grad = DTensor.from_local(share, mesh, [Partial()], run_check=False)
    elif given == "none on the empty shard" and dist.get_rank() == 0:
        first.grad = one.clone()
    second.grad = one
    optimizer.step()
    return [whole(of)[0, 0].item() for of in (first, second)]


# ---- buffers


class Buffered(nn.Module):
    """A parameter, a buffer of the state dict, and one that is in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 4))
        self.register_buffer("b", torch.ones(4, 2))
        self.register_buffer("scratch", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scratch.copy_(torch.arange(4.0))


VALUES = {"w": torch.arange(16.0).view(4, 4), "b": torch.arange(8.0).view(4, 2)}


def stored(folder: str, tensors: dict[str, torch.Tensor] = VALUES) -> str:
    """A checkpoint, which rank 0 writes; by default of `Buffered`."""
    path = Path(folder) / "model.safetensors"
    if dist.get_rank() == 0:
        save_file(tensors, path)
    dist.barrier()
    return str(path)


def held(model: nn.Module) -> dict[str, Any]:
    """Of each tensor its placements and its complete values."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: (str(list(of.placements)), whole(of).detach().flatten().tolist())
        if isinstance(of, DTensor)
        else ("plain", of.tolist())
        for name, of in tensors.items()
    }


def filled(model: nn.Module, folder: str, by: str, **how: Any) -> dict[str, Any]:
    """Loads `VALUES` from a file, or from a dict of rank 0. Returns what the model holds then, or
    the error."""
    path = stored(folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if by == "file":
                modicum.torch.load(model, path, progress=False, **nested(how, "rules", "memory"))
            else:
                full = dict(VALUES) if dist.get_rank() == 0 else {}
                modicum.torch.fsdp2_load_full_state_dict(model, full, progress=False)
    except modicum.Error as error:
        return told(error)
    return held(model)


def buffers_on_meta(folder: str, by: str, placement: str) -> dict[str, Any]:
    """The state dict's buffer is a DTensor on meta."""
    with torch.device("meta"):
        model = Buffered()
    model.scratch = torch.arange(4.0)
    model.b = distribute_tensor(model.b, grid(), [PLACEMENTS[placement]])
    return filled(model, folder, by)


def scratch_buffers(folder: str, by: str, placement: str) -> dict[str, Any]:
    """The other buffer is a DTensor. For a load from a dict it has values, which differ between
    ranks unless they are sharded; for one from a file it is as `to_empty` leaves it."""
    mesh = grid()
    with torch.device("meta" if by == "file" else "cpu"):
        model = Buffered()
    if by == "dict" and placement == "replicated":
        model.scratch.add_(dist.get_rank())
    local = model.scratch if placement == "replicated" else model.scratch[:2].clone()
    model.scratch = DTensor.from_local(local, mesh, [PLACEMENTS[placement]], run_check=False)
    if by == "file":
        model.to_empty(device="cpu")
        local_of_scratch = model.scratch._local_tensor
        local_of_scratch.fill_(9)
    return filled(model, folder, by)


# ---- state of optimizers


def scalar_parameters(folder: str, resumed: str) -> bool:
    """Saves a model with a 0-d replicated DTensor and resumes it, its tensors distributed again or
    ("plain") not. Returns whether both then make the same next steps."""

    path, root = stored(folder, {"w": torch.ones(4, 4), "scale": torch.tensor(2.0)}), f"{folder}/r"

    def made(placed: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Module()
        with modicum.torch.empty_parameters():
            model.w, model.scale = nn.Parameter(torch.empty(4, 4)), nn.Parameter(torch.empty(()))
        if placed != "plain":
            distribute_module(model, grid())
        modicum.torch.load(model, path, progress=False)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        (model.w.square().sum() * model.scale.square()).backward()
        optimizer.step()
        optimizer.zero_grad()
        return [whole(of).tolist() for of in (model.w, model.scale)]

    first, second = ("plain", "distributed")[:: 1 if resumed == "distributed" else -1]
    before, after = made(first), made(second)
    step(*before)
    modicum.torch.save(before[0], root, step=1, optimizer=before[1])
    modicum.torch.resume(after[0], root, optimizer=after[1], progress=False)
    return all(step(*before) == step(*after) for _ in range(2))


def divided_blocks(folder: str, columns: int) -> dict[str, Any]:
    """Loads a weight of `columns` columns, sharded by columns, with an optimizer that has 8-bit
    moments, makes a step and saves. Returns the promise's warnings, and the error of the save."""
    path = stored(folder, {"w": torch.ones(48, columns)})
    model = nn.Module()
    empty = distribute_tensor(torch.empty(48, columns, device="meta"), grid(), [Shard(1)])
    model.w = nn.Parameter(empty)
    optimizer = modicum.torch.AdamW(model.named_parameters(), state_format="int8-moments")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = modicum.torch.load(model, path, optimizer=optimizer, progress=False)
    model.w.grad = torch.ones_like(model.w)
    optimizer.step()
    refused = ""
    try:
        modicum.torch.save(model, f"{folder}/{columns}", step=1, optimizer=optimizer)
    except modicum.UsageError as error:
        refused = str(error)
    issued = [str(w.message) for w in caught if "predicted" in str(w.message)]
    return {"warnings": report.warnings, "text": str(report), "issued": issued, "refused": refused}


ACTS: dict[str, Callable[..., Any]] = {
    "dtensor_autograd": gradients_of_autograd,
    "dtensor_by_hand": gradients_by_hand,
    "dtensor_on_meta": buffers_on_meta,
    "dtensor_scratch": scratch_buffers,
    "dtensor_scalars": scalar_parameters,
    "dtensor_blocks": divided_blocks,
}
