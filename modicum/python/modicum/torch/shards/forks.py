"""The guard in forked children: raises if a torch function gets memory that the fork left out.

Memory allocated with `fork="excluded"` is not mapped in forked children: there its address range is
reserved without access. Tensors, views, `.data` and state dicts from before the fork still point to
it. A child that lacks such memory therefore runs under a torch function mode that checks the
address of every tensor argument. The parent, and children that lack nothing, run without the mode.

The mode applies to the thread that called fork. Accesses that bypass it (NumPy views from before
the fork, compiled code, threads that the child starts) end the child with SIGSEGV; they never read
other data.
"""

import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from modicum import _modicum
from modicum.errors import refusal
from modicum.upstream.torch_core import local_of
from modicum.upstream.torch_dispatch import METADATA, push_lowest

_PAGE_BYTES = mmap.PAGESIZE
_ACCESSORS = ("__get__", "__set__", "__delete__")


def require_fork(fork: str) -> None:
    """Raises `UsageError` unless `fork` is "excluded", "shared" or "inherited"."""
    _modicum.require_fork(str(fork))


class _Guard(TorchFunctionMode):
    """Raises `UsageError` if a torch function gets memory that was left out of this process."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        found = _lacking(args) or _lacking(kwargs.values())
        if found and _name_of(func) not in METADATA:
            what = "this tensor's memory was left out when the process was forked "
            what += '(fork="excluded", or `protect`): load the model, and make AdamW, with '
            what += (
                'MemoryPolicy(fork="shared") to use live values in forked children; read the state '
            )
            what += "of an optimizer that was passed to protect() before the fork"
            got = f"{_name_of(func)} of {found[0].dtype} {list(found[0].shape)}"
            raise refusal("UNSUPPORTED", what, got=got)
        return func(*args, **kwargs)


def _name_of(func: Callable[..., Any]) -> str:
    # The accessor of an attribute has its name in __self__.
    name = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", "") if name in _ACCESSORS else name


def _lacking(values: Iterable[Any]) -> list[torch.Tensor]:
    """A list with the first tensor in `values` whose memory is missing here; else an empty list."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if _is_lacking(value):
                return [value]
        elif isinstance(value, (list, tuple)):
            if found := _lacking(value):
                return found
        elif isinstance(value, Mapping) and (found := _lacking(value.values())):
            return found
    return []


def _is_lacking(tensor: torch.Tensor) -> bool:
    """Whether the fork left out the tensor's storage. `protect` leaves out only complete pages, so
    the edges of the storage may still be mapped."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        tensor = local_of(tensor)  # the local tensor of a DTensor
    if tensor.device.type != "cpu":
        return False
    try:
        storage = tensor.untyped_storage()
        begin, size = storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError):  # a fake or sparse tensor, or a wrapper subclass
        return False
    page = -(-begin // _PAGE_BYTES) * _PAGE_BYTES
    is_excluded = _modicum.is_excluded_here
    return is_excluded(begin) or (page < begin + size and is_excluded(page))


def _guard_child() -> None:
    """Runs in the child after a fork."""
    if not _modicum.has_exclusions_here():
        return
    push_lowest(_Guard())  # below the active modes: their contexts will pop the top of the stack


os.register_at_fork(after_in_child=_guard_child)
