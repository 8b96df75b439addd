"""torch's storages: calls that move or free the memory of a storage that is being read.

`share_memory_`, and whatever puts a tensor on a queue of torch.multiprocessing, copies a storage's
values to shared memory, lets the storage point there, and frees the memory before. `resize_` does
the same with new memory. A reference to the storage does not prevent either.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import torch

from modicum.upstream.known import TORCH_TESTED, KnownFacts
from modicum.upstream.patching import replace
from modicum.upstream.torch_core import local_of

_MOVES = (
    (
        torch.UntypedStorage,
        ("share_memory_", "_share_fd_cpu_", "_share_filename_cpu_", "resize_")
        + ("_resize_with_addr_", "_swap_data_ptr_"),
    ),
    (torch.Tensor, ("resize_", "resize_as_", "set_")),  # set_: may enlarge the other storage
    (torch, ("resize_as_",)),
)
"""Functions that move or free the memory of a storage among their arguments. Those that a version
of torch lacks are skipped."""
_POLL_S = 0.05


class StoragesInPlace:
    """Storages in host memory that exist, and stay where they are, until `release`. Functions of
    torch that would move or free their memory wait, on whatever thread."""

    def __init__(self, tensors: Iterable[tuple[str, Any]], settle: Callable[[], object]) -> None:
        """Waits until no thread moves one of the storages to shared memory.

        Args:
            tensors: (name, tensor), DTensors included; those on other devices, and values that are
                no tensors, are ignored.
            settle: called on this thread in place of waiting for `release`. This thread releases
                the storages, or `settle` returns after another thread has.
        """
        self._settle = settle
        self._pid, self._thread = os.getpid(), threading.get_ident()
        self._released = threading.Event()
        self._storages: dict[int, tuple[str, torch.UntypedStorage]] = {}
        for name, tensor in tensors:
            if (storage := _host_storage(tensor)) is not None:
                self._storages.setdefault(storage._cdata, (name, storage))
        self._sharing: frozenset[int | None] = frozenset()
        self._stack = ExitStack()
        for owner, names in _MOVES:
            for name in names:
                if hasattr(owner, name):
                    replace(self._stack, owner, name, self._waiting(getattr(owner, name)))
        # Threads that were sharing already, such as that of a queue, go on.
        locks = {key: lock for key in self._storages if (lock := _sharing_lock(key)) is not None}
        self._sharing = frozenset(locks)
        for lock in locks.values():
            with lock:
                pass
        self._sharing = frozenset()
        self._begins = {key: storage.data_ptr() for key, (_, storage) in self._storages.items()}

    def moved(self) -> str | None:
        """The name of the first tensor whose memory was moved all the same, or None."""
        storages = self._storages.items()
        return next(
            (name for key, (name, storage) in storages if storage.data_ptr() != self._begins[key]),
            None,
        )

    def release(self) -> None:
        """Lets the storages be moved and freed. On any thread; a second call does nothing."""
        self._released.set()
        self._stack.close()
        self._storages = {}

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            for value in (*args, *kwargs.values()):
                self._wait_for(value)
            return original(*args, **kwargs)

        return call

    def _wait_for(self, value: Any) -> None:
        storage = _host_storage(value)
        key = None if storage is None else storage._cdata
        if key not in self._storages or os.getpid() != self._pid:  # a fork reads nothing
            return
        if threading.get_ident() == self._thread:
            self._settle()
            return
        while key not in self._sharing and not self._released.wait(_POLL_S):
            pass


def _host_storage(value: Any) -> torch.UntypedStorage | None:
    """A storage in the host's memory, also of a tensor; None for any other value."""
    with suppress(RuntimeError, NotImplementedError):  # sparse, fake, or a wrapper subclass
        if isinstance(value, torch.TypedStorage):
            value = value.untyped()
        elif isinstance(value, torch.Tensor):
            value = local_of(value).untyped_storage()
        if isinstance(value, torch.UntypedStorage) and value.device.type == "cpu":
            return value
    return None


def _sharing_lock(key: int) -> Any:
    """The lock of the thread that moves a storage, by its `_cdata`, to shared memory; or
    None."""
    return torch.storage._share_memory_map.get(key)


# ---- known facts


class _StorageMove(Exception):
    """Ends a call before it moves memory."""


def _see() -> None:
    raise _StorageMove


def _moves_are_seen() -> bool:
    from torch.multiprocessing.reductions import reduce_storage

    with torch.inference_mode(False):
        tensor, other = (torch.zeros(2, device="cpu") for _ in range(2))
    before = vars(torch.Tensor).get("resize_")  # replaced already where a save is in flight
    storage = tensor.untyped_storage()
    calls: list[Callable[[], Any]] = [
        lambda: tensor.share_memory_(),
        lambda: reduce_storage(storage),
        lambda: storage._share_fd_cpu_(),
        lambda: storage._share_filename_cpu_(),
        lambda: storage.resize_(64),
        lambda: tensor.resize_(16),
        lambda: other.set_(storage, 0, (16,), (1,)),
    ]
    in_place = StoragesInPlace([("", tensor)], _see)
    try:
        for call in calls:
            with suppress(_StorageMove):
                call()
                return False
    finally:
        in_place.release()
    return vars(torch.Tensor).get("resize_") is before


def _sharing_is_noted() -> bool:
    noted = torch.storage._share_memory_lock_protected(
        lambda storage: _sharing_lock(storage._cdata)
    )
    return noted(SimpleNamespace(_cdata=-1)) is not None and _sharing_lock(-1) is None


KNOWN = KnownFacts(
    "torch",
    TORCH_TESTED,
    {
        "calls that move a storage's memory can be replaced": _moves_are_seen,
        "threads that share a storage are in torch.storage._share_memory_map": _sharing_is_noted,
    },
)
