"""What this rank holds of each parameter that an optimizer steps: its memory, which elements of the
whole these are, and who else holds them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import fsum, prod
from typing import Any

import torch
from torch import nn

from modicum.errors import refusal
from modicum.torch._gloo import settled
from modicum.torch._placements import Meshes, sharding_of

__all__ = ["Part", "global_sum", "local_of", "part_of", "versions_of"]

Interval = tuple[int, int]


@dataclass(eq=False)
class Part:
    """A rank's part of one parameter."""

    name: str
    parameter: nn.Parameter
    group: int
    """Index of the parameter's group."""
    local: torch.Tensor
    """The parameter's own memory, one-dimensional; an alias without a graph."""
    runs: list[tuple[int, int]]
    """Of neighbouring elements of the whole, row-major: (first, number)."""
    is_counted: bool
    """Whether it is this rank that counts it in a global norm: one of those that hold the same."""
    format: str = ""
    """Of the state that steps it."""
    state: str = ""
    """The key of that state."""
    shard: int = 0
    """Its index there."""
    plane: torch.Tensor | None = None
    """Its part of the gradients' plane, of the local shape, where `grad` may lie there."""
    grad: torch.Tensor | None = None
    """The same as `parameter.grad` can be it."""

    @property
    def on_host(self) -> bool:
        """Whether its memory can be stepped where it lies."""
        return self.local.device.type == "cpu"

    @property
    def mesh(self) -> Any:
        """That it is cut on; None for a plain tensor."""
        return getattr(self.parameter, "device_mesh", None)

    def like_parameter(self, local: torch.Tensor) -> torch.Tensor:
        """`local`, of the local number of elements, as the parameter is: plain, or a DTensor."""
        spec = getattr(self.parameter, "_spec", None)
        if spec is None:
            return local.view(self.parameter.shape)
        from torch.distributed.tensor import DTensor

        local = local.view(self.parameter._local_tensor.shape)
        if spec.tensor_meta.dtype != local.dtype:
            spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
        return DTensor(local, spec, requires_grad=False)

    def local_like(self, whole: torch.Tensor, what: str) -> torch.Tensor:
        """This rank's elements, one-dimensional, of a tensor that is cut as the parameter is or can
        be brought there.

        `UsageError`, calling it `what`, where it is another tensor than the parameter's.
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
            to = self.parameter
            if (whole.device_mesh, whole.placements) != (to.device_mesh, to.placements):
                whole = whole.redistribute(to.device_mesh, to.placements)
            whole = whole._local_tensor
        return whole.detach().reshape(-1)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that a tensor, plain or a DTensor, has on this rank."""
    return getattr(tensor, "_local_tensor", tensor)


def versions_of(tensor: torch.Tensor) -> int:
    """Grows whenever somebody writes to it through torch."""
    return tensor._version + local_of(tensor)._version


def part_of(name: str, parameter: nn.Parameter, group: int, meshes: Meshes) -> Part:
    """`UsageError` for what can't be stepped where it lies, or is cut in a way that no runs say."""
    local = local_of(parameter)
    if local.is_meta:
        what = "a parameter is on meta: load the model before its optimizer is made"
        raise refusal("USAGE", what, tensor=name)
    if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        what = "a parameter that is not float32, bfloat16 or float16"
        raise refusal("UNSUPPORTED", what, tensor=name, got=str(parameter.dtype))
    if not local.is_contiguous():
        got = str(list(local.stride()))
        raise refusal("UNSUPPORTED", "strides that are not row-major", tensor=name, got=got)
    runs, is_counted = _place(name, parameter, local, meshes)
    return Part(name, parameter, group, local.detach().view(-1), runs, is_counted)


# ---- which elements


def _place(
    name: str, parameter: Any, local: torch.Tensor, meshes: Meshes
) -> tuple[list[tuple[int, int]], bool]:
    """The runs, and whether this rank counts them."""
    mesh = getattr(parameter, "device_mesh", None)
    shape = tuple(parameter.shape)
    if mesh is None:
        return list(_runs(shape, [[(0, size)] for size in shape])), True
    import torch.distributed as dist

    sharding = sharding_of(parameter, dist.get_world_size(), name=name, meshes=meshes)
    held = [[(0, size)] for size in shape]
    for cut in sharding.cuts:
        parts = prod(sharding.mesh[axis] for axis in cut.axes)
        index = 0
        for axis in cut.axes:
            size = sharding.mesh[axis]
            index = index * size + dist.get_rank() // prod(sharding.mesh[axis + 1 :]) % size
        held[cut.dim] = list(_cut(held[cut.dim], parts, index, cut.packed))
    got = [sum(end - begin for begin, end in of) for of in held]
    if got != list(local.shape) and (prod(got) or local.numel()):
        what = "torch cuts this tensor in another way"
        expected, got = str(got), str(list(local.shape))
        raise refusal("UNSUPPORTED", what, tensor=name, expected=expected, got=got)
    coordinate = mesh.get_coordinate()
    replicas = (at for at, how in zip(coordinate, parameter.placements, strict=True)
                if how.is_replicate())  # fmt: skip
    return list(_runs(shape, held)), not any(replicas)


def _cut(held: list[Interval], parts: int, index: int, packed: int) -> Iterator[Interval]:
    """One of so many parts, as torch.chunk counts; of packed halves one of each."""
    size = sum(end - begin for begin, end in held) // packed
    step = -(-size // parts)
    for half in range(packed):
        begin, end = (half * size + min(size, step * i) for i in (index, index + 1))
        at = 0
        for first, last in held:
            here = max(begin - at, 0), min(end - at, last - first)
            if here[0] < here[1]:
                yield first + here[0], first + here[1]
            at += last - first


def _runs(shape: tuple[int, ...], held: list[list[Interval]]) -> Iterator[tuple[int, int]]:
    """Row-major, of a box whose sides may have gaps; neighbouring ones as one."""
    if not all(held) or 0 in shape:
        return
    whole = [of == [(0, size)] for of, size in zip(held, shape, strict=True)]
    dim = max((d for d in range(len(shape)) if not whole[d]), default=-1)
    if dim < 0:
        yield 0, prod(shape)
        return
    inner = prod(shape[dim + 1 :])
    outer = [[i for begin, end in of for i in range(begin, end)] for of in held[:dim]]
    first = n = 0
    for at in product(*outer):
        row = 0
        for index, size in zip(at, shape, strict=False):
            row = row * size + index
        for begin, end in held[dim]:
            begin_at = (row * shape[dim] + begin) * inner
            if n and begin_at != first + n:
                yield first, n
                n = 0
            first = first if n else begin_at
            n += (end - begin) * inner
    yield first, n


# ---- all together


def global_sum(parts: Iterable[Part], sums: Iterable[float], finite: bool) -> tuple[float, bool]:
    """Adds up over the ranks that hold the parameters, each element once, and says whether all of
    these ranks are `finite`. What is on no mesh is this rank's own and adds up nowhere."""
    of_mesh: dict[Any, list[float]] = {}
    for part, value in zip(parts, sums, strict=True):
        of_mesh.setdefault(part.mesh, []).append(value if part.is_counted else 0.0)
    total = fsum(of_mesh.pop(None, []))
    meshes = list(of_mesh)
    for mesh in meshes:
        value, finite = _reduced(mesh, fsum(of_mesh[mesh]), finite)
        total += value
    for mesh in meshes[:-1] if len(meshes) > 1 else ():  # what the last ones have said
        _, finite = _reduced(mesh, 0.0, finite)
    return total, finite


def _reduced(mesh: Any, value: float, finite: bool) -> tuple[float, bool]:
    import torch.distributed as dist

    both = torch.tensor(
        [value, 0.0 if finite else 1.0], dtype=torch.float64, device=mesh.device_type
    )
    for dim in range(mesh.ndim):
        if mesh.size(dim) > 1:
            settled(dist.all_reduce, both, group=mesh.get_group(dim))
    value, bad = both.tolist()
    return value, bad == 0
