"""The sharding of a plain tensor or a DTensor in the terms of the C++ library: a mesh and a
sequence of cuts.

A DTensor has a mesh and a placement per mesh axis. It lacks two facts: the position of the mesh in
the world, if the mesh has only some of the ranks; and the order of the cuts, if FSDP2 has cut the
local tensor of a DTensor of tensor parallelism. `Shardings` finds these facts. From the resulting
sharding the C++ library computes which elements a rank holds.

For example 8 rows on a mesh (dp 2, tp 2) with the placements [_StridedShard(0, split_factor=2),
Shard(0)]: tp cuts first, then FSDP2 cuts each half along dp:

    rows      0 1 | 2 3 | 4 5 | 6 7
    tp        0     0     1     1
    dp        0     1     0     1
    rank      0     2     1     3        cuts: axis tp along dim 0, then axis dp along dim 0
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch

from modicum import _modicum
from modicum.errors import refusal
from modicum.upstream.torch_core import local_of
from modicum.upstream.torch_distributed import shard_order, strided_shard
from modicum.upstream.torch_fsdp import cut_by_fsdp, shard_ranks


class Cut(NamedTuple):
    """One tensor dim, cut along mesh axes as torch.chunk cuts."""

    axes: tuple[int, ...]
    """Indices of mesh axes, outermost first. Several are cut as one, flattened axis."""
    dim: int
    """The tensor dim."""
    packed: int = 1
    """The number of equal parts along the dim that are each cut separately: 2 for gate_up."""
    pads: bool = False
    """Whether the buffers of all ranks are padded to the longest one."""


class Sharding(NamedTuple):
    """How a tensor is divided among all ranks of the world; `_modicum` functions take it."""

    mesh: tuple[int, ...]
    """Sizes of the axes, outermost first. The mesh has every rank of the world, in row-major
    order."""
    cuts: tuple[Cut, ...]
    """The cuts in order: each divides the shards of the previous one."""

    def unpadded(self) -> "Sharding":
        """The same sharding with buffers without padding."""
        return self._replace(cuts=tuple(cut._replace(pads=False) for cut in self.cuts))


def layout_of(
    recipe: _modicum.Recipe, shardings: Sequence[Sharding], world_size: int
) -> _modicum.Layout:
    """The layout of a recipe's targets. `shardings`: one per target, in the recipe's order."""
    different = list(dict.fromkeys(shardings)) or [Sharding((world_size,), ())]
    number = {sharding: n for n, sharding in enumerate(different)}
    return _modicum.make_layout(
        recipe, shardings=different, sharding_of=[number[sharding] for sharding in shardings]
    )


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether each rank's local tensor is the complete tensor, as for a plain one."""
    mesh: Any = getattr(tensor, "device_mesh", None)
    placements: Any = getattr(tensor, "placements", ())
    return all(
        placement.is_replicate() or mesh.size(dim) == 1 for dim, placement in enumerate(placements)
    )


def whole_of(tensor: torch.Tensor, name: str, hint: str = "") -> torch.Tensor:
    """The complete tensor, which is this rank's local tensor. Raises `UsageError` if ranks hold
    different parts of it. `name`: its name in errors; `hint`: what they add."""
    if not is_whole(tensor):
        got = str(list(getattr(tensor, "placements", ())))
        what = f"this buffer is in no file and is divided among ranks{hint}"
        raise refusal("UNSUPPORTED", what, tensor=name, expected="[Replicate()]", got=got)
    whole: torch.Tensor = local_of(tensor)
    return whole


class Shardings:
    """Finds the shardings of tensors. For a tensor every rank of the world finds the same sharding.

    An object caches meshes and FSDP2's parameters: use one object for many tensors.
    """

    def __init__(self) -> None:
        is_alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        self.world_size = 1 if is_alone else torch.distributed.get_world_size()
        self.rank = 0 if is_alone else torch.distributed.get_rank()
        self._by_fsdp: dict[torch.Tensor, Any] | None = None
        # Ranks and shapes of meshes by id: torch recomputes them on every access, and flattened
        # meshes of different ranks compare equal.
        self._meshes: dict[int, tuple[Any, tuple[int, ...], tuple[int, ...]]] = {}

    def of(
        self, tensor: torch.Tensor, name: str, *, alias_of: torch.Tensor | None = None
    ) -> Sharding:
        """The sharding of a tensor, plain (whole on every rank) or a DTensor, on meta or not.

        Args:
            tensor: a tensor of a model, an optimizer or a state dict.
            name: its name in errors.
            alias_of: the parameter for which FSDP2's shards are known, if `tensor` is another
                object for the same memory.

        Raises:
            UsageError: no sharding describes the tensor: the mesh is no regular grid of the world,
                or lacks this rank; a placement is not Replicate, Shard or _StridedShard; the order
                of the cuts of strided placements is unknown; or the local shape contradicts the
                placements.
        """
        whole = Sharding((self.world_size,), ())
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):  # avoids the import of DTensor
            return whole
        from torch.distributed.tensor import DTensor

        if not isinstance(tensor, DTensor):
            return whole
        if self._by_fsdp is None:
            self._by_fsdp = cut_by_fsdp()
        managed = self._by_fsdp.get(tensor if alias_of is None else alias_of)
        sharding = self._read(tensor, shard_ranks(managed) if managed else (), name)
        expected = _modicum.Shard(sharding, tensor.shape, self.rank).shape
        got = local_of(tensor).shape
        # FSDP2 gives an empty shard the shape [0, 0] where the cuts give [4, 0].
        if got != expected and (got.numel() or prod(expected)):
            what = "the local shape contradicts the placements"
            shapes = {"expected": str(list(expected)), "got": str(list(got))}
            raise refusal("UNSUPPORTED", what, tensor=name, **shapes)
        return sharding

    def counts(self, tensor: torch.Tensor, sharding: Sharding) -> bool:
        """Whether this rank counts its elements in a sum over the tensor's mesh. Of the ranks in
        the mesh that hold the same elements, the first one does. Always true for a tensor without a
        mesh."""
        mesh = getattr(tensor, "device_mesh", None)
        if mesh is None:
            return True
        ranks, _ = self._mesh(mesh)
        replicas = _modicum.Shard(sharding, tensor.shape, self.rank).replicas
        return self.rank == next(rank for rank in replicas if rank in ranks)

    def _mesh(self, mesh: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ranks of a mesh in row-major order, and its shape."""
        if id(mesh) not in self._meshes:
            ranks = mesh.mesh  # the cache holds the mesh, so that its id stays unique
            self._meshes[id(mesh)] = mesh, tuple(ranks.flatten().tolist()), tuple(ranks.shape)
        return self._meshes[id(mesh)][1:]

    def _read(self, tensor: Any, fsdp_ranks: tuple[int, ...], name: str) -> Sharding:
        """The sharding from mesh and placements. `fsdp_ranks`: the ranks among which FSDP2 divides
        the tensor, or ()."""
        mesh = tensor.device_mesh
        ranks, shape = self._mesh(mesh)
        if self.rank not in ranks:
            expected = f"one with rank {self.rank}"
            what = "the tensor's mesh lacks this rank"
            raise refusal("UNSUPPORTED", what, tensor=name, expected=expected, got=str(mesh))
        shards = list(_shards(tensor.placements, shape, name))
        grid = _grid(ranks, shape, tuple(shard.mesh_dim for shard in shards), self.world_size)
        if grid is None:
            what = "the tensor's mesh is no regular grid of the world"
            expected = f"a regular grid of {self.world_size} ranks"
            raise refusal("UNSUPPORTED", what, tensor=name, expected=expected, got=str(mesh))
        world, axes_of = grid
        axes = dict(zip((shard.mesh_dim for shard in shards), axes_of, strict=True))
        lines = {s.mesh_dim: _line_of(self.rank, ranks, shape, s.mesh_dim) for s in shards}
        by_fsdp = [shard for shard in shards if lines[shard.mesh_dim] == fsdp_ranks]
        if len(fsdp_ranks) > 1 and not by_fsdp:
            what = "FSDP2's ranks are no axis of the tensor's mesh"
            raise refusal("UNSUPPORTED", what, tensor=name, got=str(mesh))
        others = _as_made(tensor, [shard for shard in shards if shard not in by_fsdp], name)
        cuts = [Cut(axes[shard.mesh_dim], shard.dim, packed) for shard, packed in others]
        # FSDP2 cuts last, whatever its placement says: it cuts the local tensor.
        cuts += [Cut(axes[s.mesh_dim], s.dim, pads=s.dim == 0) for s in by_fsdp]
        return Sharding(world, tuple(cuts))


# ---- placements


@dataclass(frozen=True)
class _Shard:
    """A mesh axis along which a DTensor is cut."""

    mesh_dim: int
    parts: int
    """The number of ranks along the axis."""
    dim: int
    """The tensor dim that is cut."""
    split_factor: int
    """The split factor of the placement; 1 for a plain Shard."""


def _shards(placements: Iterable[Any], shape: Sequence[int], name: str) -> Iterator[_Shard]:
    """The mesh axes that cut the tensor, in the mesh's order, without axes of size 1."""
    from torch.distributed.tensor import Replicate, Shard

    kinds: Any = (Shard, strided_shard())
    for mesh_dim, (placement, parts) in enumerate(zip(placements, shape, strict=True)):
        if isinstance(placement, kinds):
            if parts > 1:
                split_factor = getattr(placement, "split_factor", 1)
                yield _Shard(mesh_dim, parts, placement.dim, split_factor)
        elif not isinstance(placement, Replicate):
            raise refusal("UNSUPPORTED", f"the placement {placement!r}", tensor=name)


def _as_made(tensor: Any, shards: list[_Shard], name: str) -> list[tuple[_Shard, int]]:
    """The cuts in the order in which they were made, each with its number of packed parts.

    Mesh axes cut from left to right, unless a placement has a split factor. That is the number of
    parts into which the tensor dim was divided before this cut: by mesh axes further right or, if
    none of them cuts this dim, as packed parts.
    """
    order = shard_order(tensor)
    cuts_by_dim: dict[int, list[tuple[_Shard, int]]] = {}
    for shard in reversed(shards):
        same_dim = cuts_by_dim.setdefault(shard.dim, [])
        if order or not same_dim:
            same_dim.insert(0, (shard, shard.split_factor))
            continue
        parts = [prod(s.parts for s, _ in same_dim[:i]) for i in range(len(same_dim) + 1)]
        place = parts.index(shard.split_factor) if shard.split_factor in parts else -1
        # DTensor computes a strided cut as if it were made first, which gives the same shards only
        # if the parts are even.
        is_uneven = tensor.shape[shard.dim] % shard.split_factor != 0
        is_packed = any(packed > 1 for _, packed in same_dim[:place])
        if place < 0 or (place > 0 and (is_uneven or is_packed)):
            got = f"{list(tensor.shape)} as {list(tensor.placements)}"
            raise refusal("UNSUPPORTED", "cuts of unknown order", tensor=name, got=got)
        same_dim.insert(place, (shard, 1))
    for entry in order:
        by_order = cuts_by_dim.get(entry.tensor_dim, [])
        by_order.sort(key=lambda cut: entry.mesh_dims.index(cut[0].mesh_dim))
    return [cut for dim in sorted(cuts_by_dim) for cut in cuts_by_dim[dim]]


# ---- meshes


@lru_cache(maxsize=256)  # a model has thousands of tensors, but few meshes
def _grid(
    ranks: tuple[int, ...], shape: tuple[int, ...], dims: tuple[int, ...], world_size: int
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]] | None:
    """The world as a grid whose axes include the axes `dims` of a mesh. Returns the grid's sizes,
    and for each of `dims` its axes in the grid (several if it is flattened); or None if there is no
    such grid.

    `ranks`: the mesh's ranks, row-major over `shape`. The rest of the world is assumed to repeat
    the mesh: ranks (0, 2) of a world of 4 are axis 0 of the grid 2 x 2.
    """
    steps = {dim: prod(shape[dim + 1 :]) for dim in dims}
    strides = {dim: _strides(ranks[: shape[dim] * steps[dim] : steps[dim]]) for dim in dims}
    for position, rank in enumerate(ranks):
        for dim in dims:
            if _part(rank, strides[dim]) != position // steps[dim] % shape[dim]:
                return None
    mesh: list[int] = []
    axis_at: dict[int, int] = {}  # the axis of each stride, counted from the innermost
    inner = 1
    for stride, size in sorted(pair for pairs in strides.values() for pair in pairs):
        if stride % inner != 0:
            return None
        if stride > inner:
            mesh.append(stride // inner)
        axis_at[stride] = len(mesh)
        mesh.append(size)
        inner = stride * size
    if world_size % inner != 0:
        return None
    if world_size > inner or not mesh:
        mesh.append(world_size // inner)
    outermost = len(mesh) - 1
    axes = (tuple(outermost - axis_at[stride] for stride, _ in strides[dim]) for dim in dims)
    return tuple(reversed(mesh)), tuple(axes)


def _strides(line: Sequence[int]) -> list[tuple[int, int]]:
    """(stride, size) of axes, outermost first, that enumerate the ranks of `line`; empty if no axes
    do. [0, 1, 4, 5] gives [(4, 2), (1, 2)]."""
    axes: list[tuple[int, int]] = []
    while len(line) > 1:
        stride = line[1] - line[0]
        ups = (i for i, rank in enumerate(line) if rank != line[0] + i * stride)
        size = next(ups, len(line))
        if stride < 1 or len(line) % size != 0:
            return []
        axes.insert(0, (stride, size))
        line = line[::size]
    return axes


def _part(rank: int, strides: Sequence[tuple[int, int]]) -> int:
    """The index of a rank along a mesh dim whose axes have these (stride, size)."""
    part = 0
    for stride, size in strides:
        part = part * size + rank // stride % size
    return part


def _line_of(rank: int, ranks: tuple[int, ...], shape: Sequence[int], dim: int) -> tuple[int, ...]:
    """The ranks of a mesh along its axis `dim` through `rank`, in the order of the axis."""
    step = prod(shape[dim + 1 :])
    position = ranks.index(rank)
    first = position - position // step % shape[dim] * step
    return ranks[first : first + shape[dim] * step : step]
