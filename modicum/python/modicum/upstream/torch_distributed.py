"""torch.distributed: the store of the default group, DTensor's specification, and Gloo."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from modicum.errors import refusal

# A tag that no message uses. Gloo has one connection per network interface, and selects it by the
# tag modulo their number. 5040 is divisible by 1 to 10, so with up to ten interfaces this tag
# selects the same connection as tag 0. Tested with the Gloo of torch 2.11.0, 2.13.0 and 2.15.0.
_UNSENT_TAG = 5040
_SHORTEST = timedelta(milliseconds=1)


# ---- the store


def default_store() -> Any:
    """The store of the default process group. Raises UNSUPPORTED if it can't be cloned."""
    find = getattr(dist.distributed_c10d, "_get_default_store", None)
    store = find() if find is not None else None
    if store is None or not hasattr(store, "clone"):
        what = f"PyTorch {torch.__version__} shows no store of the group that can be cloned"
        raise refusal("UNSUPPORTED", what, got=f"backend {dist.get_backend()}")
    return store


# ---- DTensor, imported only if a caller has one


def strided_shard() -> type:
    """DTensor's placement class for a tensor dim that FSDP2 shards although another mesh axis, such
    as that of tensor parallelism, shards it already."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard


def shard_order(tensor: Any) -> tuple[Any, ...]:
    """For each sharded tensor dim an entry with `tensor_dim` and the `mesh_dims` that cut it, in
    the order of the cuts. Empty if a placement is strided, or if this torch does not record it."""
    return getattr(tensor._spec, "shard_order", None) or ()


def dtensor_like(tensor: Any, local: torch.Tensor) -> Any:
    """A DTensor with the mesh, placements and global shape of `tensor` and with the local tensor
    `local`, which may have any dtype. Returns `local` itself if `tensor` is no DTensor."""
    spec = getattr(tensor, "_spec", None)
    if spec is None:
        return local
    from torch.distributed.tensor import DTensor

    if spec.tensor_meta.dtype != local.dtype:
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    # `DTensor.from_local` would move an offloaded tensor to the mesh's device.
    return DTensor(local, spec, requires_grad=False)


# ---- Gloo


def require_gloo() -> None:
    """Raises UNSUPPORTED if torch was built without Gloo."""
    if not dist.is_gloo_available():
        raise refusal("UNSUPPORTED", f"PyTorch {torch.__version__} was built without Gloo")


def break_connections(group: Any) -> None:
    """Ends a group's connections; its peers get an error. Gloo has no call for this, but ends all
    connections when a wait exceeds its time limit. So this waits 1 ms for a message that no rank
    sends."""
    peer = 1 if group.rank() == 0 else 0
    never = torch.empty(1, dtype=torch.uint8, device="cpu")
    try:
        group.recv([never], peer, _UNSENT_TAG).wait(_SHORTEST)
    except RuntimeError:  # the wait exceeded its limit, or the connections had ended before
        return
