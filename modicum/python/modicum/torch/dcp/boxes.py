"""The boxes (chunks) of tensors that torch.distributed.checkpoint (DCP) reads, as a recipe's
nodes."""

from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from modicum.errors import refusal
from modicum.recipes.dtypes import FLOATS, dtype_name
from modicum.recipes.nodes import Node


@dataclass(frozen=True)
class Target:
    """A tensor that the checkpoint provides."""

    node: Node
    dtype: str
    shape: tuple[int, ...]


def described(target: Target) -> TensorStorageMetadata:
    size = torch.Size(target.shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    dtype = getattr(torch, target.dtype)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, [chunk])


def described_tensor(tensor: torch.Tensor) -> TensorStorageMetadata:
    chunk = ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.shape)
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, [chunk])


def check_place(fqn: str, target: Target, tensor: torch.Tensor) -> None:
    dtype = dtype_name(tensor.dtype)
    if dtype != target.dtype and not FLOATS.issuperset((dtype, target.dtype)):
        raise refusal("MISMATCH", "the dtype differs", tensor=fqn, expected=target.dtype, got=dtype)
    if not tensor.is_contiguous():
        raise refusal("UNSUPPORTED", "strides that are not row-major", tensor=fqn)


def cast_to(node: Node, dtype: str) -> Node:
    """The node with a cast to `dtype`, or without a cast if recipes can't cast to `dtype`."""
    if node["op"] != "init":
        node = {key: value for key, value in node.items() if key != "dtype"}
    return node | ({"dtype": dtype} if dtype in FLOATS else {})


def boxed(node: Node, shape: tuple[int, ...], item: ReadItem) -> Node:
    """The node that makes only the item's box of `node`'s result. A cast stays at the root: recipes
    allow it only there."""
    dtype = {} if node["op"] == "init" else {k: v for k, v in node.items() if k == "dtype"}
    inner = {k: v for k, v in node.items() if k not in dtype}
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        if length != shape[dim]:
            cut = {"op": "slice", "dim": dim, "start": start, "stop": start + length}
            inner = cut | {"in": [inner]}
    return inner | dtype
