"""The nodes of recipe.json, each with the shape and dtype of its result.

An `Array` only describes elements. The C++ RecipeBuilder checks each op and derives the dtype and
shape of its result. Negative dims count from the end. For an op that changes nothing the functions
return the input, so that recipe.json does not have it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from modicum._modicum import RecipeBuilder

Node = dict[str, Any]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Array:
    """An index map: from which stored elements a tensor is made."""

    node: Node
    shape: Shape
    dtype: str
    builder: RecipeBuilder = field(repr=False)
    number: int = field(repr=False)  # index among the builder's nodes


def _array_of(builder: RecipeBuilder, number: int, node: Node) -> Array:
    dtype, shape = builder.described(number)
    return Array(node, tuple(shape), dtype, builder, number)


def stored(name: str, builder: RecipeBuilder) -> Array:
    """A tensor of the checkpoint."""
    return _array_of(builder, builder.stored(name), {"op": "stored", "name": name})


def _from_front(dim: int, dims: int) -> int:
    return dim + dims if dim < 0 else dim


def cat(dim: int, arrays: Sequence[Array]) -> Array:
    """The inputs, concatenated along `dim`."""
    first = arrays[0]
    dim = _from_front(dim, len(first.shape))
    number = first.builder.cat(dim, [array.number for array in arrays])
    node = {"op": "cat", "dim": dim, "in": [array.node for array in arrays]}
    return _array_of(first.builder, number, node) if len(arrays) > 1 else first


def stack(dim: int, arrays: Sequence[Array]) -> Array:
    """The inputs, stacked along a new dim."""
    first = arrays[0]
    dim = _from_front(dim, len(first.shape) + 1)
    number = first.builder.stack(dim, [array.number for array in arrays])
    node = {"op": "stack", "dim": dim, "in": [array.node for array in arrays]}
    return _array_of(first.builder, number, node)


def cut(dim: int, start: int, stop: int, array: Array) -> Array:
    """The elements `[start, stop)` along `dim`: the op `slice`."""
    dim = _from_front(dim, len(array.shape))
    number = array.builder.slice(dim, start, stop, array.number)
    node = {"op": "slice", "dim": dim, "start": start, "stop": stop, "in": [array.node]}
    piece = _array_of(array.builder, number, node)
    return piece if piece.shape != array.shape else array


def with_rows(rows: int, array: Array) -> Array:
    """The first `rows` rows. If the array has fewer, its rows are repeated from the first on."""
    base_rows = array.shape[0]
    if rows <= base_rows:
        return cut(0, 0, rows, array)
    times, rest = divmod(rows, base_rows)
    return cat(0, [array] * times + ([cut(0, 0, rest, array)] if rest else []))


def permute(dims: Sequence[int], array: Array) -> Array:
    """Dim k of the output is dim `dims[k]` of the input."""
    number = array.builder.permute(dims, array.number)
    node = {"op": "permute", "dims": list(dims), "in": [array.node]}
    return _array_of(array.builder, number, node) if list(dims) != sorted(dims) else array


def transpose(dim0: int, dim1: int, array: Array) -> Array:
    """The array with two dims swapped."""
    count = len(array.shape)
    dim0, dim1 = _from_front(dim0, count), _from_front(dim1, count)
    return permute([{dim0: dim1, dim1: dim0}.get(dim, dim) for dim in range(count)], array)


def reshape(shape: Sequence[int], array: Array) -> Array:
    """The same row-major elements in another shape."""
    number = array.builder.reshape(shape, array.number)
    node = {"op": "reshape", "shape": list(shape), "in": [array.node]}
    reshaped = _array_of(array.builder, number, node)
    return reshaped if reshaped.shape != array.shape else array


def stored_under(node: Node) -> Iterator[str]:
    """Names of the stored tensors that a node reads."""
    if node["op"] == "stored":
        yield node["name"]
    for child in node.get("in", ()):
        yield from stored_under(child)


def sources_of(targets: Mapping[str, Node]) -> set[str]:
    """Names of the stored tensors that the targets read."""
    return {name for node in targets.values() for name in stored_under(node)}


def init(rule: str, std: float | None, dtype: str, shape: Sequence[int]) -> Node:
    """A tensor filled by a rule: `zeros`, `ones`, or `normal` with a standard deviation."""
    node: Node = {"op": "init", "rule": rule, "shape": list(shape), "dtype": dtype}
    return node | {"std": std} if rule == "normal" else node


def caller(dtype: str, shape: Sequence[int]) -> Node:
    """A tensor that the caller of the load provides."""
    return {"op": "caller", "shape": list(shape), "dtype": dtype}


def has_inner_caller(node: Node) -> bool:
    """Whether an input of a node, at any depth, is a tensor that the caller of the load
    provides."""
    nodes = [node]
    while nodes:
        inputs = nodes.pop().get("in")
        inner = [each for each in inputs if isinstance(each, dict)] if inputs else []
        if any(each.get("op") == "caller" for each in inner):
            return True
        nodes += inner
    return False
