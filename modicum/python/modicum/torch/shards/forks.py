"""Memory that this process was forked without: whoever uses it gets an error that says so.

What Modicum takes with `fork="excluded"` is not in forked children; its range stays reserved there,
without access. A tensor knows nothing of that, nor does any view, `.data` or state dict that was
made before the fork. So a child that lacks such memory runs under a mode of torch's which looks at
the address of every tensor that a torch function is called with. The parent, and children that lack
nothing, have no such mode.

The mode belongs to the thread that was forked. What does not pass through torch's functions (NumPy
views made before the fork, compiled code, threads that the child starts) is not seen; there the
kernel ends the child with SIGSEGV, and nothing is ever read.
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
    """Refuses a `fork=` that is not "excluded", "shared" or "inherited"."""
    _modicum.require_fork(str(fork))


class _Guard(TorchFunctionMode):
    """Refuses torch functions over memory that this process was forked without."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        found = _lacking(args) or _lacking(kwargs.values())
        if found and _name_of(func) not in METADATA:
            tensor = found[0]
            raise refusal(
                "UNSUPPORTED",
                "this tensor's memory was left out when the process was forked "
                '(fork="excluded"): load the model, and make AdamW, with fork="shared" to use '
                "live values in forked children",
                got=f"{_name_of(func)} of {tensor.dtype} {list(tensor.shape)}",
            )
        return func(*args, **kwargs)


def _name_of(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", "") if name in _ACCESSORS else name


def _lacking(values: Iterable[Any]) -> list[torch.Tensor]:
    """The first tensor among them whose memory is not here; or none."""
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
    """Whether its storage is not here, or not all of it: of other allocators' memory only the pages
    in its middle can be left out."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        tensor = local_of(tensor)  # a DTensor's
    if tensor.device.type != "cpu":
        return False
    try:
        storage = tensor.untyped_storage()
        begin, size = storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError):  # fake, sparse, or made of other tensors
        return False
    page = -(-begin // _PAGE_BYTES) * _PAGE_BYTES
    is_excluded = _modicum.is_excluded_here
    return is_excluded(begin) or (page < begin + size and is_excluded(page))


def _guard_child() -> None:
    """After a fork, in the child. Has no effect in the child of a child, which has the guard."""
    if not _modicum.has_exclusions_here():
        return
    push_lowest(_Guard())  # below the modes that are there, whose contexts will pop them


os.register_at_fork(after_in_child=_guard_child)
