"""From what a tensor is, plain or a DTensor, to the sharding that the core knows.

A DTensor says which mesh it lies on and what each mesh dim does to it. Two things are not said
there: what lies beyond its mesh, where that is a part of the world only; and in which order the
cuts were made, where FSDP2 cut what tensor parallelism had left. `Shardings` finds out both. Which
elements a rank then holds is the core's answer alone.
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
    """One tensor dim, cut along mesh axes by torch.chunk's rule."""

    axes: tuple[int, ...]
    """Of the mesh; several are flattened into one, outermost first."""
    dim: int
    """Of the tensor."""
    packed: int = 1
    """So many parts lie one behind the other along the dim, and each is cut by itself."""
    pads: bool = False
    """Every rank's buffer is as long as the longest one's."""


class Sharding(NamedTuple):
    """What each rank of the world holds of a tensor; as `_modicum` takes it."""

    mesh: tuple[int, ...]
    """Sizes of the axes, outermost first, over the whole world; rank = row-major coordinate."""
    cuts: tuple[Cut, ...]
    """As they are made: each cuts what those before it left."""

    def unpadded(self) -> "Sharding":
        """The same elements in buffers without padding."""
        return self._replace(cuts=tuple(cut._replace(pads=False) for cut in self.cuts))


def layout_of(
    recipe: _modicum.Recipe, shardings: Sequence[Sharding], world_size: int
) -> _modicum.Layout:
    """The layout of a recipe's targets, of which each has its sharding, in their order."""
    different = list(dict.fromkeys(shardings)) or [Sharding((world_size,), ())]
    number = {sharding: n for n, sharding in enumerate(different)}
    return _modicum.make_layout(
        recipe, shardings=different, sharding_of=[number[sharding] for sharding in shardings]
    )


class Shardings:
    """Finds the sharding of one tensor after the other, as every rank of the world finds it.

    Between two tensors it remembers the meshes that it has seen and what FSDP2 has cut.
    """

    def __init__(self) -> None:
        is_alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        self.world_size = 1 if is_alone else torch.distributed.get_world_size()
        self.rank = 0 if is_alone else torch.distributed.get_rank()
        self._by_fsdp: dict[torch.Tensor, Any] | None = None
        # By identity: torch works ranks and shape out at every look, and flattened meshes of other
        # ranks are equal to each other.
        self._meshes: dict[int, tuple[Any, tuple[int, ...], tuple[int, ...]]] = {}

    def of(
        self, tensor: torch.Tensor, name: str, *, alias_of: torch.Tensor | None = None
    ) -> Sharding:
        """The sharding of a tensor, plain (every rank has it whole) or a DTensor, on meta or not.

        Args:
            tensor: of the model, of an optimizer or of a state dict.
            name: what to call it in an error.
            alias_of: the parameter whose memory it shows, where it is another object.

        `UsageError` for what no sharding describes: a mesh that is no regular grid of the world or
        lacks this rank, placements other than Replicate, Shard and those strided ones that FSDP2
        and packed projections make, strided ones whose order nothing tells, and local elements of
        another shape than the one that follows.
        """
        whole = Sharding((self.world_size,), ())
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):  # DTensor need not be imported
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
        # FSDP2 calls a shard [0, 0] of which another cut left [4, 0].
        if got != expected and (got.numel() or prod(expected)):
            raise refusal(
                "UNSUPPORTED",
                "torch cuts this tensor in another way",
                tensor=name,
                expected=str(list(expected)),
                got=str(list(got)),
            )
        return sharding

    def counts(self, tensor: torch.Tensor, sharding: Sharding) -> bool:
        """Whether it is this rank that counts its elements in a sum over the tensor's mesh: the
        first of those ranks of the mesh that hold the same. Always of a tensor without a mesh."""
        mesh = getattr(tensor, "device_mesh", None)
        if mesh is None:
            return True
        ranks, _ = self._mesh(mesh)
        replicas = _modicum.Shard(sharding, tensor.shape, self.rank).replicas
        return self.rank == next(rank for rank in replicas if rank in ranks)

    def _mesh(self, mesh: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Its ranks, row-major, and its shape."""
        if id(mesh) not in self._meshes:
            ranks = mesh.mesh  # and the mesh itself, which must live as long as its identity
            self._meshes[id(mesh)] = mesh, tuple(ranks.flatten().tolist()), tuple(ranks.shape)
        return self._meshes[id(mesh)][1:]

    def _read(self, tensor: Any, fsdp_ranks: tuple[int, ...], name: str) -> Sharding:
        """By its mesh and placements; FSDP2 has cut it among `fsdp_ranks`, if it has."""
        mesh = tensor.device_mesh
        ranks, shape = self._mesh(mesh)
        if self.rank not in ranks:
            expected = f"one with rank {self.rank}"
            raise refusal("UNSUPPORTED", "a mesh", tensor=name, expected=expected, got=str(mesh))
        shards = list(_shards(tensor.placements, shape, name))
        grid = _grid(ranks, shape, tuple(shard.mesh_dim for shard in shards), self.world_size)
        if grid is None:
            expected = f"a regular grid of {self.world_size} ranks"
            raise refusal("UNSUPPORTED", "a mesh", tensor=name, expected=expected, got=str(mesh))
        world, axes_of = grid
        axes = dict(zip((shard.mesh_dim for shard in shards), axes_of, strict=True))
        lines = {s.mesh_dim: _line_of(self.rank, ranks, shape, s.mesh_dim) for s in shards}
        by_fsdp = [shard for shard in shards if lines[shard.mesh_dim] == fsdp_ranks]
        if len(fsdp_ranks) > 1 and not by_fsdp:
            raise refusal(
                "UNSUPPORTED", "FSDP2 cuts along no mesh axis", tensor=name, got=str(mesh)
            )
        others = _as_made(tensor, [shard for shard in shards if shard not in by_fsdp], name)
        cuts = [Cut(axes[shard.mesh_dim], shard.dim, packed) for shard, packed in others]
        # FSDP2 cuts what a rank holds by then, however its placement describes that.
        cuts += [Cut(axes[s.mesh_dim], s.dim, pads=s.dim == 0) for s in by_fsdp]
        return Sharding(world, tuple(cuts))


# ---- placements


@dataclass(frozen=True)
class _Shard:
    """A mesh dim along which a DTensor is cut."""

    mesh_dim: int
    parts: int
    dim: int
    split_factor: int


def _shards(placements: Iterable[Any], shape: Sequence[int], name: str) -> Iterator[_Shard]:
    """The mesh dims that cut, in the mesh's order; those of one rank cut nothing."""
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
    """The cuts in the order in which they are made, each with its number of packed parts.

    Mesh dims cut from left to right. A split factor says that so many parts were there before: made
    by later mesh dims that cut the same tensor dim or, where there are none of these, packed.
    """
    told = shard_order(tensor)
    made: dict[int, list[tuple[_Shard, int]]] = {}
    for shard in reversed(shards):
        same_dim = made.setdefault(shard.dim, [])
        if told or not same_dim:
            same_dim.insert(0, (shard, shard.split_factor))
            continue
        parts = [prod(s.parts for s, _ in same_dim[:i]) for i in range(len(same_dim) + 1)]
        place = parts.index(shard.split_factor) if shard.split_factor in parts else -1
        # A strided cut is described as if it came first. That is the same only for even parts.
        is_uneven = tensor.shape[shard.dim] % shard.split_factor != 0
        is_packed = any(packed > 1 for _, packed in same_dim[:place])
        if place < 0 or (place > 0 and (is_uneven or is_packed)):
            got = f"{list(tensor.shape)} as {list(tensor.placements)}"
            raise refusal("UNSUPPORTED", "a strided cut", tensor=name, got=got)
        same_dim.insert(place, (shard, 1))
    for entry in told:
        by_order = made.get(entry.tensor_dim, [])
        by_order.sort(key=lambda cut: entry.mesh_dims.index(cut[0].mesh_dim))
    return [cut for dim in sorted(made) for cut in made[dim]]


# ---- meshes


@lru_cache(maxsize=256)  # a model has thousands of tensors and a handful of meshes
def _grid(
    ranks: tuple[int, ...], shape: tuple[int, ...], dims: tuple[int, ...], world_size: int
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]] | None:
    """The world as a grid of which the `dims` of a mesh are axes: its sizes, and by dim the axes;
    None where there is no such grid.

    `ranks` are the mesh's, row-major over `shape`. A mesh dim that is several axes flattened gives
    them all. What the mesh leaves out of the world is taken to be more of the same.
    """
    steps = {dim: prod(shape[dim + 1 :]) for dim in dims}
    strides = {dim: _strides(ranks[: shape[dim] * steps[dim] : steps[dim]]) for dim in dims}
    for position, rank in enumerate(ranks):
        for dim in dims:
            if _part(rank, strides[dim]) != position // steps[dim] % shape[dim]:
                return None
    mesh: list[int] = []
    axis_at: dict[int, int] = {}  # by stride, counted from the innermost
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
    """(stride, size) of the axes, outermost first, along which ranks go up one after the other;
    none where they do not."""
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
    part = 0
    for stride, size in strides:
        part = part * size + rank // stride % size
    return part


def _line_of(rank: int, ranks: tuple[int, ...], shape: Sequence[int], dim: int) -> tuple[int, ...]:
    """The ranks that differ from one of them only along `dim`, in their order."""
    step = prod(shape[dim + 1 :])
    position = ranks.index(rank)
    first = position - position // step % shape[dim] * step
    return ranks[first : first + shape[dim] * step : step]
