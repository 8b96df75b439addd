"""The nodes of recipe.json, each with the shape and dtype of what it makes.

An `Array` is described, never computed: no op here touches an element. Shapes are checked as
numpy or torch would check them; what changes nothing adds no node.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from modicum.errors import refusal

Node = dict[str, Any]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Array:
    """An index map: what its elements are made of."""

    node: Node
    shape: Shape
    dtype: str


def stored(name: str, dtype: str, shape: Sequence[int]) -> Array:
    """A tensor of the checkpoint."""
    return Array({"op": "stored", "name": name}, tuple(shape), dtype)


def _dim_of(array: Array, dim: int, op: str) -> int:
    if not -len(array.shape) <= dim < len(array.shape):
        raise refusal("MISMATCH", f"'{op}' along dim {dim} of {list(array.shape)}")
    return dim % len(array.shape)


def cat(dim: int, arrays: Sequence[Array]) -> Array:
    """The inputs one after the other along `dim`."""
    first = arrays[0]
    dim = _dim_of(first, dim, "cat")
    for array in arrays:
        met = (
            array.shape[:dim] == first.shape[:dim]
            and array.shape[dim + 1 :] == (first.shape[dim + 1 :])
        )
        if len(array.shape) != len(first.shape) or not met or array.dtype != first.dtype:
            raise refusal(
                "MISMATCH",
                "'cat' of tensors that do not meet",
                expected=f"{first.dtype} {list(first.shape)}",
                got=f"{array.dtype} {list(array.shape)}",
            )
    if len(arrays) == 1:
        return first
    total = sum(array.shape[dim] for array in arrays)
    shape = (*first.shape[:dim], total, *first.shape[dim + 1 :])
    node = {"op": "cat", "dim": dim, "in": [array.node for array in arrays]}
    return Array(node, shape, first.dtype)


def stack(dim: int, arrays: Sequence[Array]) -> Array:
    """The inputs along a new dim."""
    first = arrays[0]
    if not -len(first.shape) - 1 <= dim <= len(first.shape):
        raise refusal("MISMATCH", f"'stack' along dim {dim} of {list(first.shape)}")
    dim %= len(first.shape) + 1
    for array in arrays:
        if (array.shape, array.dtype) != (first.shape, first.dtype):
            raise refusal(
                "MISMATCH",
                "'stack' of tensors that differ",
                expected=f"{first.dtype} {list(first.shape)}",
                got=f"{array.dtype} {list(array.shape)}",
            )
    node = {"op": "stack", "dim": dim, "in": [array.node for array in arrays]}
    shape = (*first.shape[:dim], len(arrays), *first.shape[dim:])
    return Array(node, shape, first.dtype)


def cut(dim: int, start: int, stop: int, array: Array) -> Array:
    """`[start, stop)` of `dim`: the op `slice`."""
    dim = _dim_of(array, dim, "slice")
    if not 0 <= start <= stop <= array.shape[dim]:
        raise refusal("MISMATCH", f"'slice' [{start}, {stop}) of a dim of {array.shape[dim]}")
    if stop - start == array.shape[dim]:
        return array
    node = {"op": "slice", "dim": dim, "start": start, "stop": stop, "in": [array.node]}
    shape = (*array.shape[:dim], stop - start, *array.shape[dim + 1 :])
    return Array(node, shape, array.dtype)


def permute(dims: Sequence[int], array: Array) -> Array:
    """Dim k of the output is dim `dims[k]` of the input."""
    if list(dims) == list(range(len(array.shape))):
        return array
    node = {"op": "permute", "dims": list(dims), "in": [array.node]}
    return Array(node, tuple(array.shape[dim] for dim in dims), array.dtype)


def transpose(dim0: int, dim1: int, array: Array) -> Array:
    """Two dims change places."""
    dim0, dim1 = _dim_of(array, dim0, "permute"), _dim_of(array, dim1, "permute")
    dims = list(range(len(array.shape)))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return permute(dims, array)


def reshape(shape: Sequence[int], array: Array) -> Array:
    """The same row-major elements under another shape."""
    if math.prod(shape) != math.prod(array.shape):
        raise refusal(
            "MISMATCH",
            "'reshape' changes the number of elements",
            expected=str(list(array.shape)),
            got=str(list(shape)),
        )
    if tuple(shape) == array.shape:
        return array
    node = {"op": "reshape", "shape": list(shape), "in": [array.node]}
    return Array(node, tuple(shape), array.dtype)


def init(rule: str, std: float | None, dtype: str, shape: Sequence[int]) -> Array:
    """Made by a rule: `zeros`, `ones`, or `normal` with a standard deviation."""
    node: Node = {"op": "init", "rule": rule, "shape": list(shape), "dtype": dtype}
    if rule == "normal":
        node["std"] = std
    return Array(node, tuple(shape), dtype)


def caller(dtype: str, shape: Sequence[int]) -> Array:
    """Handed over by whoever loads."""
    return Array({"op": "caller", "shape": list(shape), "dtype": dtype}, tuple(shape), dtype)
