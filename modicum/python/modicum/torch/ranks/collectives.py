"""Collectives over Gloo that leave nothing behind in Gloo's threads."""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

LIMIT_S = 1.0
"""Of waiting for a reference that is normally dropped within microseconds."""


def settled(
    collective: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any
) -> None:
    """Calls `collective` on `tensor`, and waits until nobody but the caller holds the tensor.

    Gloo's worker thread drops its reference only after the collective has ended, and takes the
    interpreter's lock to do so. If the interpreter begins to finalize while the thread waits for
    the lock, the process aborts (SIGABRT), also after a training that went well. Only tensors of
    the CPU are Gloo's here.
    """
    before = sys.getrefcount(tensor)
    collective(tensor, *args, **kwargs)
    if tensor.device.type != "cpu":
        return
    deadline = time.monotonic() + LIMIT_S
    while sys.getrefcount(tensor) > before and time.monotonic() < deadline:
        time.sleep(0.0001)
