"""Whether all ranks refuse a call because an operation of all of them has failed.

Each rank learns of the failure in some call. By then another rank may have raised the error
already, in an earlier call. So that all ranks refuse the same call, each rank
adds itself once to one of two counters in the process group's store:

    delivered   number of ranks that have raised the error in another call
    refused     number of ranks that are in the call and have not raised it

Once all ranks are counted, all refuse the call if any does.
"""

import time
from typing import Any

import torch.distributed as dist

from modicum.errors import Error, failure
from modicum.torch.ranks.store import LoadStore
from modicum.upstream.torch_distributed import default_store

_POLL_S = 0.02
_CONNECT_SLICES = 100
"""10 s: the rank that hosts the store may have raised the error and ended, and torch tries again
and again to connect."""


def note_delivery(name: str) -> None:
    """Counts this rank as one that has raised the error. `name`: of the failed operation."""
    if (store := _store(name)) is not None:
        try:
            store.count("delivered", 1)
        except Error:
            return
        finally:
            store.end()


def is_refused(name: str, world_size: int, limit_s: float, *, refuses: bool) -> bool:
    """Whether any rank refuses the call. Collective. Returns `refuses` if the others do not answer
    within `limit_s`. `refuses`: whether this rank does; False: it has called `note_delivery`."""
    if (store := _store(name)) is None:
        return refuses
    try:
        store.count("refused", int(refuses))
        deadline = time.monotonic() + limit_s
        while store.count("delivered") + store.count("refused") < world_size:
            if time.monotonic() > deadline:
                return refuses
            time.sleep(_POLL_S)
        return store.count("refused") > 0
    except Error:
        return refuses
    finally:
        store.end()


def _store(name: str) -> LoadStore | None:
    """None if the group is gone, or its store is lost."""

    def lost(why: str) -> Error:
        return failure("PEER", f"the store of the process group {why}")

    if not dist.is_available() or not dist.is_initialized():
        return None
    try:
        store: Any = default_store()
        return LoadStore(store, lost, f"modicum/{name}", _CONNECT_SLICES)
    except Error:
        return None
