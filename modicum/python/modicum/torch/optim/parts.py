"""What this rank holds of each parameter that an optimizer steps: its memory, which elements of the
whole these are, and who else holds them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import Any

import torch
from torch import nn

from modicum import _modicum
from modicum.errors import refusal
from modicum.torch.ranks.collectives import settled
from modicum.torch.shards.placements import Shardings
from modicum.upstream.torch_core import local_of, version_of
from modicum.upstream.torch_distributed import dtensor_like


@dataclass(eq=False)
class Part:
    """A rank's part of one parameter."""

    name: str
    parameter: nn.Parameter
    group: int
    """Index of the parameter's group."""
    local: torch.Tensor
    """The parameter's own memory, one-dimensional; an alias without a graph."""
    order: tuple[int, ...]
    """The dims, slowest first, by which the local elements are contiguous in memory."""
    runs: list[tuple[int, int]]
    """Of neighbouring elements of the whole, whose dims are in this order: (first, number)."""
    is_counted: bool
    """Whether it is this rank that counts it in a global norm: one of those that hold the same."""
    place: tuple[Any, ...] = ()
    """`place_of(parameter)` when the state was made."""
    format: str = ""
    """Of the state that steps it."""
    state: str = ""
    """The key of that state."""
    shard: int = 0
    """Its index there."""
    plane: torch.Tensor | None = None
    """Its part of the gradients' plane, one-dimensional."""
    grad: torch.Tensor | None = None
    """The same as `parameter.grad` can be it; None where gradients are copied there."""
    grad_place: tuple[Any, ...] = ()
    """`place_of(grad)` when the state was made."""
    entry: dict[str, tuple[torch.Tensor, int]] = field(default_factory=dict)
    """What the optimizer has put into `state[parameter]`, each with its address."""

    @property
    def on_host(self) -> bool:
        """Whether its memory can be stepped where it lies."""
        return self.local.device.type == "cpu"

    @property
    def mesh(self) -> Any:
        """That it is cut on; None for a plain tensor."""
        return mesh_of(self.parameter)

    def like_parameter(self, local: torch.Tensor) -> torch.Tensor:
        """`local`, one-dimensional, as the parameter is: of its strides, plain or a DTensor."""
        shape = local_of(self.parameter).shape
        if self.is_row_major:
            local = local.view(shape)
        else:
            back = [self.order.index(dim) for dim in range(len(shape))]
            local = local.view([shape[dim] for dim in self.order]).permute(back)
        return dtensor_like(self.parameter, local)

    def local_like(self, whole: torch.Tensor, what: str) -> torch.Tensor:
        """This rank's elements, in the order of `local`, of a tensor that is cut as the parameter
        is or can be brought there.

        `UsageError`, calling it `what`, where it is another tensor than the parameter's, or its
        storage was freed.
        """
        if whole.is_sparse:
            raise refusal("UNSUPPORTED", f"a sparse {what}", tensor=self.name)
        if whole.shape != self.parameter.shape or hasattr(whole, "placements") != (
            self.mesh is not None
        ):
            expected = f"{type(self.parameter).__name__} of {list(self.parameter.shape)}"
            got = f"{type(whole).__name__} of {list(whole.shape)}"
            raise refusal("MISMATCH", f"its {what}", tensor=self.name, expected=expected, got=got)
        if self.mesh is not None:
            to: Any = self.parameter
            cut: Any = whole
            if (cut.device_mesh, cut.placements) != (to.device_mesh, to.placements):
                cut = cut.redistribute(to.device_mesh, to.placements)
            whole = local_of(cut)
        _require_stored(whole, f"its {what}", self.name)
        whole = whole.detach()
        return (whole if self.is_row_major else whole.permute(self.order)).reshape(-1)

    @property
    def is_row_major(self) -> bool:
        """Whether the local elements are contiguous as they are."""
        return self.order == tuple(range(len(self.order)))


def mesh_of(tensor: torch.Tensor) -> Any:
    """The device mesh of a DTensor; None for a plain tensor."""
    return getattr(tensor, "device_mesh", None)


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where this rank's elements lie, and as what: two such values differ when the memory behind a
    tensor was exchanged, moved, freed or shortened in between. No version counter tells that."""
    local = local_of(tensor)
    stored = local.untyped_storage().nbytes()
    return local.data_ptr(), local.dtype, local.shape, local.stride(), stored


def _require_stored(local: torch.Tensor, what: str, name: str) -> None:
    """Refuses a tensor on the host whose storage is too short: reading it is a crash."""
    if local.device.type != "cpu" or local.numel() == 0:
        return
    last = sum((n - 1) * stride for n, stride in zip(local.shape, local.stride(), strict=True))
    expected = (local.storage_offset() + last + 1) * local.element_size()
    got = local.untyped_storage().nbytes()
    if got < expected:
        what += " has lost its memory: its storage was resized"
        raise refusal("USAGE", what, tensor=name, expected=f"{expected} bytes", got=f"{got}")


def versions_of(tensor: torch.Tensor) -> int:
    """Grows whenever somebody writes to it through torch."""
    return version_of(tensor) + version_of(local_of(tensor))


def part_of(name: str, parameter: nn.Parameter, group: int, shardings: Shardings) -> Part:
    """`UsageError` for what can't be stepped where it lies, and as from `Shardings.of`."""
    local = local_of(parameter)
    if local.is_meta:
        what = "a parameter is on meta: load the model before its optimizer is made; accelerate's "
        what += "within loading(): model, _ = accelerator.prepare(model, torch.optim.SGD("
        what += "model.parameters())), then optimizer = accelerator.prepare_optimizer(AdamW("
        what += "model.named_parameters()))"
        raise refusal("USAGE", what, tensor=name)
    if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        what = "a parameter that is not float32, bfloat16 or float16"
        raise refusal("UNSUPPORTED", what, tensor=name, got=str(parameter.dtype))
    _require_stored(local, "a parameter", name)
    order = _memory_order(local)
    if not local.is_contiguous() and not local.permute(order).is_contiguous():
        what = "a parameter whose elements overlap in memory, or have others between them"
        got = f"strides {list(local.stride())} of shape {list(local.shape)}"
        raise refusal("UNSUPPORTED", what, tensor=name, got=got)
    sharding = shardings.of(parameter, name)
    runs = _modicum.Shard(sharding, parameter.shape, shardings.rank).runs(order)
    is_counted = shardings.counts(parameter, sharding)
    line = local.detach()
    line = line.view(-1) if local.is_contiguous() else line.permute(order).view(-1)
    return Part(name, parameter, group, line, order, runs, is_counted, place_of(parameter))


def _memory_order(local: torch.Tensor) -> tuple[int, ...]:
    dims, strides = range(local.dim()), local.stride()
    if local.is_contiguous():
        return tuple(dims)
    return tuple(sorted(dims, key=lambda dim: (local.shape[dim] > 1, -strides[dim])))


# ---- all together


def global_sum(
    meshes: Sequence[Any], values: Sequence[float], flags: Sequence[bool]
) -> tuple[float, list[bool]]:
    """Adds `values` up, each over the ranks of its mesh, and says of each flag whether any of these
    ranks has it. What is on no mesh is this rank's own and adds up nowhere.

    A collective over all of the meshes, which the ranks must have in the same order."""
    of_mesh: dict[Any, list[float]] = {}
    for mesh, value in zip(meshes, values, strict=True):
        of_mesh.setdefault(mesh, []).append(value)
    total = fsum(of_mesh.pop(None, []))
    told = [float(flag) for flag in flags]
    for mesh in of_mesh:
        value, *told = _reduced(mesh, [fsum(of_mesh[mesh]), *told])
        total += value
    for mesh in list(of_mesh)[:-1]:  # has not heard of the meshes behind it
        _, *told = _reduced(mesh, [0.0, *told])
    return total, [flag > 0 for flag in told]


def largest(meshes: Iterable[Any], value: int) -> int:
    """The largest of the values that the ranks of these meshes have. A collective as `global_sum`;
    for few ranks that differ, as it goes over the meshes twice."""
    distinct = [mesh for mesh in dict.fromkeys(meshes) if mesh is not None]
    for mesh in distinct * 2:
        (value,) = map(int, _reduced(mesh, [float(value)], "MAX"))
    return value


def _reduced(mesh: Any, values: list[float], how: str = "SUM") -> list[float]:
    import torch.distributed as dist

    both = torch.tensor(values, dtype=torch.float64, device=mesh.device_type)
    for dim in range(mesh.ndim):
        if mesh.size(dim) > 1:
            op = getattr(dist.ReduceOp, how)
            settled(dist.all_reduce, both, op, group=mesh.get_group(dim))
    return both.tolist()
