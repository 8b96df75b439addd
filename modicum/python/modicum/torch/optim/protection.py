"""`protect`: keeps buffers of optimizers of torch and DeepSpeed out of forked children."""

import mmap
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from modicum import _modicum
from modicum.errors import BudgetError, refusal
from modicum.memory.holders import DEVICE_GRADIENTS, WEIGHTS, Holding, holdings, stepping
from modicum.torch.optim.adamw import AdamW
from modicum.upstream.wrappers import unwrapped

_PAGE_BYTES = mmap.PAGESIZE


@dataclass(frozen=True)
class ProtectedTensor:
    """A tensor, and how many of its bytes are protected."""

    owner: str
    name: str
    bytes: int
    """Bytes in pages that hold only this tensor; these pages are left out of forks."""
    left_bytes: int
    """Bytes in pages shared with other memory, at the tensor's edges; or all, if the kernel has
    refused."""


class Protection:
    """The result of `protect`. Pages stay protected until `undo`, or until the tensor's memory is
    freed, even if the program drops this object: the optimizer refers to it."""

    def __init__(self) -> None:
        self._sources: list[Any] = []  # weak references to sources that may allocate more
        # By [begin, end) of a tensor's memory: the entry, and the finalizer of the storage.
        self._done: dict[tuple[int, int], tuple[ProtectedTensor, Any]] = {}
        self._hooks: list[Any] = []

    @property
    def tensors(self) -> list[ProtectedTensor]:
        """The protected tensors that still exist."""
        return [tensor for tensor, undone in self._done.values() if undone.alive]

    @property
    def bytes(self) -> int:
        """Bytes left out of forks."""
        return sum(tensor.bytes for tensor in self.tensors)

    @property
    def left_bytes(self) -> int:
        """Bytes of these tensors that forked children still inherit."""
        return sum(tensor.left_bytes for tensor in self.tensors)

    def _renew(self) -> None:
        """Protects tensors that the sources have allocated since the last call. Called after every
        step of a source's optimizer."""
        for source in self._sources:
            alive = source()
            if alive is not None:
                self._add(_protectable(alive))

    def undo(self) -> None:
        """Ends the protection: children forked from now on inherit the memory. Children forked
        earlier still lack it. Call it in the process that called `protect`."""
        for hook in self._hooks:
            hook.remove()
        for (begin, _), (_, undone) in self._done.items():
            # A child that lacks the pages must not undo: it would map pages of zeros.
            if not _modicum.is_excluded_here(_first_page(begin)):
                undone()
        self._hooks, self._done, self._sources = [], {}, []

    def __str__(self) -> str:
        lines = [
            f"{tensor.bytes:>14} {tensor.left_bytes:>8}  {tensor.owner}  {tensor.name}"
            for tensor in self.tensors
        ]
        return "\n".join([f"{'protected':>14} {'left':>8}  bytes", *lines])

    def _add(self, found: Iterable[Holding]) -> None:
        for holding in found:
            known = self._done.get((holding.begin, holding.end))
            if known is not None and known[1].alive:
                continue
            begin = _first_page(holding.begin)
            size = max(0, holding.end // _PAGE_BYTES * _PAGE_BYTES - begin)
            exclusion = _exclude(begin, size)
            size = size if exclusion else 0
            left = holding.end - holding.begin - size
            # Freed memory may be allocated again for something else. Children forked after that
            # must inherit it. A child forked before that has only a reserved address range there:
            # if it frees the memory itself, `undo` maps pages into the range.
            storage = holding.tensor.untyped_storage()
            undone = weakref.finalize(storage, _inherit, exclusion)
            undone.atexit = False
            self._done[holding.begin, holding.end] = (
                ProtectedTensor(holding.owner, holding.name, size, left),
                undone,
            )

    def _follow(self, source: Any) -> None:
        """Calls `_renew` after each step of the optimizer that allocates the source's state."""
        optimizer = stepping(source)
        if optimizer is None:
            return
        self._sources.append(weakref.ref(source))
        self._hooks.append(optimizer.register_step_post_hook(lambda *_: self._renew()))


def protect(*sources: Any) -> Protection:
    """Keeps the buffers of an optimizer of torch or DeepSpeed out of forked children.

    Call it before workers are forked: copies in existing children stay.

        engine, *_ = deepspeed.initialize(...)
        modicum.torch.protect(engine)

    Without it a forked child, such as a data loader's worker, keeps a copy of every page that the
    parent overwrites after the fork: 10 bytes per parameter with ZeRO-2 offload, and 18 if workers
    are forked for every epoch; 0 and 8 of pinned buffers. Applies MADV_DONTFORK to pages that hold
    only masters, gradients, moments, staging or ZeRO-3's offloaded weights; not to other weights,
    which a worker may use.
    Tensors that an optimizer allocates later (its moments, in the first step) are protected at the
    end of that step. A gradient that a later backward allocates is not: keep them with
    `zero_grad(set_to_none=False)`. Calling it twice is harmless.

    If a child uses a protected tensor, torch's functions raise `UsageError`; an access that
    bypasses them ends the child with SIGSEGV, and never reads other data. Workers of a data loader
    and programs that the child starts don't use such tensors; a child that continues training does.
    Linux only. From Python 3.14 on, data loaders fork only with `multiprocessing_context="fork"`.

    Args:
        sources: DeepSpeed's engine (ZeRO with `offload_optimizer`, tested with 0.19.8; if it lacks
            a private attribute, the error names it), a torch optimizer (its state and gradients),
            tensors, or a mapping of names to tensors. Modicum's AdamW is ignored (`MemoryPolicy`).

    Returns:
        The protected tensors and bytes. Only complete pages can be protected: parts of up to two
        pages at a tensor's edges are not, nor is a tensor smaller than a page. Empty for an
        optimizer without state, until its first step.

    Raises:
        UsageError: a source is of an unknown kind, or there is no tensor in host memory to protect,
            and no optimizer that allocates one in its step.
    """
    others = [source for source in map(unwrapped, sources) if not isinstance(source, AdamW)]
    found = [list(_protectable(source)) for source in others]
    is_in_vain = not any(found) and all(stepping(source) is None for source in others)
    if len(others) == len(sources) and is_in_vain:
        raise refusal("USAGE", "the sources have nothing in host memory to protect")
    protection = Protection()
    for source, tensors in zip(others, found, strict=True):
        protection._add(tensors)
        protection._follow(source)
    return protection


def _protectable(source: Any) -> Iterator[Holding]:
    inherited = (WEIGHTS, DEVICE_GRADIENTS)
    return (holding for holding in holdings(source) if holding.owner not in inherited)


def _first_page(begin: int) -> int:
    return -(-begin // _PAGE_BYTES) * _PAGE_BYTES


def _exclude(begin: int, size: int) -> _modicum.Exclusion | None:
    """Excludes pages from forks; None without pages, or if the kernel refuses (driver memory)."""
    try:
        return _modicum.Exclusion(begin, size) if size > 0 else None
    except BudgetError:
        return None


def _inherit(exclusion: _modicum.Exclusion | None) -> None:
    if exclusion is not None:
        exclusion.undo()
