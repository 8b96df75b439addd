"""This rank's part of each parameter that an optimizer steps: the part's memory, the indices of its
elements in the complete tensor, and whether this rank counts it in sums over ranks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import Any

import torch
from torch import nn
from torch.utils import deterministic

from modicum import _modicum
from modicum.errors import refusal
from modicum.torch.optim.names import ListedParameter
from modicum.torch.ranks.collectives import reduce_over
from modicum.torch.shards.placements import Shardings
from modicum.upstream.torch_core import local_of, version_of
from modicum.upstream.torch_distributed import dtensor_like

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


@dataclass(frozen=True, eq=False)
class Part:
    """A rank's part of one parameter."""

    name: str
    parameter: nn.Parameter
    group: int
    """Index of the parameter's group."""
    at: int
    """Index of the parameter in the list of all groups' parameters, with and without state."""
    local: torch.Tensor
    """The parameter's own memory as a detached one-dimensional tensor."""
    order: tuple[int, ...]
    """The dims in the order, slowest first, in which the local elements are contiguous."""
    runs: list[tuple[int, int]]
    """This rank's elements: runs (first, number) of indices in the complete tensor, whose elements
    are numbered with the dims in `order`."""
    is_counted: bool
    """Whether this rank counts the part in a global norm. Of the ranks that hold the same part
    exactly one does."""
    place: tuple[Any, ...]
    """`place_of(parameter)` when the part was made."""
    format: str
    """The format of its state."""
    moments: tuple[str, ...]
    """The names of its moments."""

    @property
    def on_host(self) -> bool:
        """Whether the parameter's memory is on the host, where it is stepped in place."""
        return self.local.device.type == "cpu"

    @property
    def mesh(self) -> Any:
        """The device mesh of a DTensor; None for a plain tensor."""
        return mesh_of(self.parameter)

    def like_parameter(self, local: torch.Tensor) -> torch.Tensor:
        """`local`, one-dimensional, with the parameter's strides; a DTensor if the parameter is."""
        shape = local_of(self.parameter).shape
        if self.is_row_major:
            local = local.view(shape)
        else:
            back = [self.order.index(dim) for dim in range(len(shape))]
            local = local.view([shape[dim] for dim in self.order]).permute(back)
        return dtensor_like(self.parameter, local)

    def local_like(self, whole: torch.Tensor, what: str) -> torch.Tensor:
        """This rank's elements of `whole`, in the order of `local`. A DTensor with other placements
        is redistributed, which is collective.

        Raises `UsageError`, which calls `whole` by the name `what`, if `whole` is sparse, if only
        one of `whole` and the parameter is a DTensor, if their shapes differ, or if the storage of
        `whole` was freed.
        """
        if whole.is_sparse:
            raise refusal("UNSUPPORTED", f"its {what} is sparse", tensor=self.name)
        if whole.shape != self.parameter.shape or hasattr(whole, "placements") != (
            self.mesh is not None
        ):
            cls = "a DTensor" if self.mesh is not None else "a plain tensor"
            expected = f"{cls} of {list(self.parameter.shape)}"
            got = f"{type(whole).__name__} of {list(whole.shape)}"
            what = f"its {what} has another type or shape"
            raise refusal("MISMATCH", what, tensor=self.name, expected=expected, got=got)
        if self.mesh is not None:
            cut: Any = whole
            if placement_of(cut) != placement_of(self.parameter):
                cut = cut.redistribute(*placement_of(self.parameter))
            whole = local_of(cut)
        _require_stored(whole, f"its {what}", self.name)
        whole = whole.detach()
        return (whole if self.is_row_major else whole.permute(self.order)).reshape(-1)

    @property
    def is_row_major(self) -> bool:
        """Whether the local elements are contiguous in row-major order."""
        return self.order == tuple(range(len(self.order)))

    @property
    def shape(self) -> list[int]:
        """The complete parameter's shape, with dims in `order`."""
        return [self.parameter.shape[dim] for dim in self.order]


@dataclass(eq=False)
class Slot:
    """Where the state of a part is, and what the program sees of it."""

    state: _modicum.AdamW
    shard: int
    """The part's index in `state`."""
    grad_buffer: torch.Tensor
    """Its elements in the state's gradient buffer, one-dimensional."""
    steps: torch.Tensor
    """The step counts of several parts, of which the optimizer's `state` shows views. A program may
    change them."""
    index: int
    """The part's index in `steps`."""
    grad: torch.Tensor | None = None
    """A view of `grad_buffer` that can be `parameter.grad`; None if gradients are copied there."""
    grad_place: tuple[Any, ...] = ()
    """`place_of(grad)` when it was made."""
    hooks: tuple[Any, ...] = ()
    """The handles of the hooks that move gradients to `grad_buffer`."""
    is_programs: bool = False
    """Whether the parameter had a gradient of the program when autograd last began to add to it."""
    entry: dict[str, tuple[torch.Tensor | None, int]] = field(default_factory=dict)
    """The values that the optimizer has put into `state[parameter]`, each with its address."""
    shown: dict[str, Any] | None = None
    """`state[parameter]` itself, into which it has put them."""

    @property
    def step(self) -> torch.Tensor:
        """A new view of its step count."""
        return self.steps[self.index]

    def set_grad(self, part: Part) -> None:
        """Sets `grad` to a new view of `grad_buffer`."""
        self.grad = part.like_parameter(self.grad_buffer)
        self.grad_place = place_of(self.grad)


def mesh_of(tensor: torch.Tensor) -> Any:
    """The device mesh of a DTensor; None for a plain tensor."""
    return getattr(tensor, "device_mesh", None)


def placement_of(tensor: torch.Tensor) -> tuple[Any, Any]:
    """The device mesh and the placements of a DTensor; (None, None) for a plain tensor."""
    return mesh_of(tensor), getattr(tensor, "placements", None)


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Address, dtype, shape, strides and storage size of this rank's elements. At least one of them
    changes if the tensor's memory is replaced, moved, freed or shortened. The version counter need
    not change then."""
    local = local_of(tensor)
    stored = local.untyped_storage().nbytes()
    return local.data_ptr(), local.dtype, local.shape, local.stride(), stored


def _require_stored(local: torch.Tensor, what: str, name: str) -> None:
    """Raises `UsageError` if a tensor's storage on the host is too short: reading would crash."""
    if local.device.type != "cpu" or local.numel() == 0:
        return
    last = sum((n - 1) * stride for n, stride in zip(local.shape, local.stride(), strict=True))
    expected = (local.storage_offset() + last + 1) * local.element_size()
    got = local.untyped_storage().nbytes()
    if got < expected:
        what += " has lost its memory: its storage was resized"
        needed, left = f"{expected} bytes", f"{got} bytes"
        raise refusal("USAGE", what, tensor=name, expected=needed, got=left)


def versions_of(tensor: torch.Tensor) -> int:
    """A number that grows with every write by an operator of torch, except through `.data`."""
    return version_of(tensor) + version_of(local_of(tensor))


@dataclass(frozen=True)
class Memory:
    """The memory that a parameter on meta will have."""

    dtype: torch.dtype
    device: torch.device

    def in_place_of(self, local: torch.Tensor) -> torch.Tensor:
        """A placeholder for `local`, from which footprints are computed. On the host its pages are
        never touched, and so never committed."""
        where = "cpu" if self.device.type == "cpu" else "meta"
        flags: Any = deterministic
        fills = flags.fill_uninitialized_memory  # in torch's deterministic mode
        flags.fill_uninitialized_memory = False
        try:
            return torch.empty_like(local, dtype=self.dtype, device=where)
        finally:
            flags.fill_uninitialized_memory = fills


def part_of(
    listed: ListedParameter,
    state_format: str,
    shardings: Shardings,
    memory: Memory | None = None,
) -> Part:
    """The part of a parameter. Raises `UsageError` if it can't be stepped in place, and for the
    reasons of `Shardings.of`.

    Args:
        state_format: the format that the user asks for.
        memory: the future memory of a parameter on meta, to count its state.
    """
    name, parameter = listed.name, listed.parameter
    local = local_of(parameter)
    if memory is not None:
        local = memory.in_place_of(local)
    elif local.is_meta:
        what = "a parameter is on meta: AdamW allocates its state when the parameter has memory: "
        what += "after modicum.torch.load(model, source, optimizer=...), or after "
        what += "Accelerator.prepare within loading()"
        raise refusal("USAGE", what, tensor=name)
    if parameter.is_inference():
        what = "a parameter was made in inference mode and can't be trained"
        raise refusal("UNSUPPORTED", what, tensor=name)
    if local.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        expected = "float32, bfloat16 or float16"
        got = str(local.dtype)
        raise refusal("UNSUPPORTED", "its dtype", tensor=name, expected=expected, got=got)
    _require_stored(local, "a parameter", name)
    order = _memory_order(local)
    if not local.is_contiguous() and not local.permute(order).is_contiguous():
        what = "its elements overlap in memory, or have gaps between them"
        got = f"strides {list(local.stride())} of shape {list(local.shape)}"
        raise refusal("UNSUPPORTED", what, tensor=name, got=got)
    sharding = shardings.of(parameter, name)
    runs = _modicum.Shard(sharding, parameter.shape, shardings.rank).runs(order)
    is_counted = shardings.counts(parameter, sharding)
    line = local.detach()
    line = line.view(-1) if local.is_contiguous() else line.permute(order).view(-1)
    dtype, shape = str(local.dtype).removeprefix("torch."), [parameter.shape[dim] for dim in order]
    return Part(
        name, parameter, listed.group, listed.at, line, order, runs, is_counted,
        place=place_of(parameter),
        format=_modicum.state_format_of(dtype, shape, state_format),
        moments=MOMENTS if listed.has_amsgrad else MOMENTS[:2],
    )  # fmt: skip


def _memory_order(local: torch.Tensor) -> tuple[int, ...]:
    """The dims, slowest first. Unless the tensor is contiguous, dims of size 1 come first, since
    their strides mean nothing."""
    dims, strides = range(local.dim()), local.stride()
    if local.is_contiguous():
        return tuple(dims)
    return tuple(sorted(dims, key=lambda dim: (local.shape[dim] > 1, -strides[dim])))


# ---- all together


def global_sum(
    meshes: Sequence[Any], values: Sequence[float], flags: Sequence[bool]
) -> tuple[float, list[bool]]:
    """The sum of `values`, each also summed over the ranks of its mesh; and for each flag whether
    any rank of the meshes has set it. A value without a mesh (None) is not summed over ranks.

    Collective over all meshes, which must be in the same order on all ranks."""
    of_mesh: dict[Any, list[float]] = {}
    for mesh, value in zip(meshes, values, strict=True):
        of_mesh.setdefault(mesh, []).append(value)
    total = fsum(of_mesh.pop(None, []))
    any_set = [float(flag) for flag in flags]
    for mesh in of_mesh:
        value, *any_set = _reduced(mesh, [fsum(of_mesh[mesh]), *any_set])
        total += value
    # Ranks of an earlier mesh lack the flags that were set on ranks of later meshes only.
    for mesh in list(of_mesh)[:-1]:
        _, *any_set = _reduced(mesh, [0.0, *any_set])
    return total, [flag > 0 for flag in any_set]


def largest(meshes: Iterable[Any], value: int) -> int:
    """The largest value of all ranks of these meshes. Collective, like `global_sum`. Reduces over
    the meshes twice: in the second round, ranks of earlier meshes get values of later ones."""
    distinct = [mesh for mesh in dict.fromkeys(meshes) if mesh is not None]
    for mesh in distinct * 2:
        (value,) = map(int, _reduced(mesh, [float(value)], "MAX"))
    return value


def _reduced(mesh: Any, values: list[float], operation: str = "SUM") -> list[float]:
    """`values`, reduced over the mesh's ranks; unchanged on a rank outside the mesh."""
    if mesh.get_coordinate() is None:
        return values
    reduced = torch.tensor(values, dtype=torch.float64, device=mesh.device_type)
    reduce_over(mesh, reduced, operation)
    return reduced.tolist()
