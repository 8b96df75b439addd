"""Collectives over Gloo that return only after Gloo's threads have dropped the tensors."""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

LIMIT_S = 1.0
"""The longest wait for a reference that is normally dropped within microseconds."""


def settled(
    collective: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any
) -> None:
    """Calls `collective` on `tensor`, and returns once the collective holds no reference to the
    tensor any more, or after LIMIT_S.

    Gloo's worker thread drops its reference only after the collective has ended, and takes the
    GIL to do so. If the interpreter begins to finalize while the thread waits for the GIL, the
    process aborts (SIGABRT), even after a successful training. Tensors on a device do not go
    through Gloo, and are not waited for.
    """
    before = sys.getrefcount(tensor)
    collective(tensor, *args, **kwargs)
    if tensor.device.type != "cpu":
        return
    deadline = time.monotonic() + LIMIT_S
    while sys.getrefcount(tensor) > before and time.monotonic() < deadline:
        time.sleep(0.0001)


def reduce_over(mesh: Any, tensor: torch.Tensor, operation: str) -> None:
    """Reduces a tensor on the mesh's device, in place, over all ranks of the mesh. Collective.
    `operation`: "SUM" or "MAX"."""
    import torch.distributed as dist

    for dim in range(mesh.ndim):
        if mesh.size(dim) > 1:
            op = getattr(dist.ReduceOp, operation)
            settled(dist.all_reduce, tensor, op, group=mesh.get_group(dim))
