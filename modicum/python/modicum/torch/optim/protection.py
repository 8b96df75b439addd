"""`protect`: keeps an optimizer's buffers of other allocators out of forked children."""

import mmap
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from modicum import _modicum
from modicum.errors import BudgetError, refusal
from modicum.memory.holders import WEIGHTS, Holding, holdings, stepping
from modicum.torch.optim.adamw import AdamW

_PAGE_BYTES = mmap.PAGESIZE


@dataclass(frozen=True)
class Protected:
    """The protection of one tensor, in bytes."""

    owner: str
    name: str
    bytes: int
    """In whole pages of its own, which are left out of forks."""
    left_bytes: int
    """At its edges, in pages shared with other memory; or all, if the kernel refused."""


class Protection:
    """The result of `protect`. It lives as long as its optimizer or a reference to it; pages stay
    protected until `undo`, or until the tensor's memory is freed."""

    def __init__(self) -> None:
        self._sources: list[Any] = []  # weak references to those that may allocate more
        self._done: dict[tuple[int, int], tuple[Protected, Any]] = {}
        self._hooks: list[Any] = []

    @property
    def tensors(self) -> list[Protected]:
        """The protected tensors that still exist."""
        return [of for of, undone in self._done.values() if undone.alive]

    @property
    def bytes(self) -> int:
        """Bytes left out of forks."""
        return sum(of.bytes for of in self.tensors)

    @property
    def left_bytes(self) -> int:
        """Bytes of the same tensors that are still copied."""
        return sum(of.left_bytes for of in self.tensors)

    def renew(self) -> None:
        """Protects tensors allocated since; called after every step of an optimizer."""
        for source in self._sources:
            alive = source()
            if alive is not None:
                self._add(_protectable(alive))

    def undo(self) -> None:
        """Children forked from now on inherit the memory again. A child forked before still lacks
        it."""
        for hook in self._hooks:
            hook.remove()
        for (begin, _), (_, undone) in self._done.items():
            # In a child that lacks the pages, undoing would map zeros.
            if not _modicum.is_excluded_here(_first_page(begin)):
                undone()
        self._hooks, self._done, self._sources = [], {}, []

    def __str__(self) -> str:
        lines = [f"{of.bytes:>14} {of.left_bytes:>8}  {of.owner}  {of.name}" for of in self.tensors]
        return "\n".join([f"{'protected':>14} {'left':>8}  bytes", *lines])

    def _add(self, found: Iterator[Holding]) -> None:
        for of in found:
            known = self._done.get((of.begin, of.end))
            if known is not None and known[1].alive:
                continue
            begin = _first_page(of.begin)
            size = max(0, of.end // _PAGE_BYTES * _PAGE_BYTES - begin)
            exclusion = _exclude(begin, size)
            size = size if exclusion else 0
            left = of.end - of.begin - size
            # Freed memory may be allocated again: children must inherit it then, and a child that
            # has only the reservation must get pages again.
            storage = of.tensor.untyped_storage()
            undone = weakref.finalize(storage, _inherit, exclusion)
            undone.atexit = False
            self._done[of.begin, of.end] = (Protected(of.owner, of.name, size, left), undone)

    def _follow(self, source: Any) -> None:
        """Calls `renew` after each step of the optimizer that allocates the source's state."""
        optimizer = stepping(source)
        if optimizer is None:
            return
        self._sources.append(weakref.ref(source))
        self._hooks.append(optimizer.register_step_post_hook(lambda *_: self.renew()))


def protect(*sources: Any) -> Protection:
    """Keeps the buffers of an optimizer of torch or DeepSpeed out of forked children.

        engine, *_ = deepspeed.initialize(...)
        modicum.torch.protect(engine)

    Otherwise a forked child, such as a data loader's worker, keeps a copy of every page that the
    parent writes after the fork: 10 bytes per parameter with ZeRO-2 offload, and 18 if workers are
    forked for every epoch. Applies MADV_DONTFORK to the whole pages of masters, gradients, moments
    and staging, and of ZeRO-3's offloaded weights, but not of other weights, which a worker may
    use. Call it before workers are forked: copies in existing children stay. Tensors that are
    allocated later (DeepSpeed's moments, in the first step) are protected at the end of that step.
    Calling it twice is harmless.

    A child that uses a protected tensor gets a `UsageError`; an access that bypasses torch's
    functions ends the child with SIGSEGV, and never reads other data. Workers of a data loader do
    neither, nor does a program that the child starts; a child that trains on would.
    Linux; on Python 3.14 and later, data loaders fork only if asked to
    (`multiprocessing_context="fork"`).

    Args:
        sources: an engine of DeepSpeed's (ZeRO with `offload_optimizer`, tested with 0.19.8; a
            missing private attribute is refused by name), an optimizer of torch's (its
            state and gradients), tensors, or a mapping of names to tensors. Modicum's own AdamW is
            ignored: it has `fork=`.

    Returns:
        The protected tensors and bytes. Only whole pages can be protected, so up to two pages at
        the edges of each tensor stay, or all of a smaller one.

    Raises:
        UsageError: an unknown kind of source, or no tensor in host memory to protect.
    """
    protection = Protection()
    others = [source for source in sources if not isinstance(source, AdamW)]
    for source in others:
        protection._add(_protectable(source))
        protection._follow(source)
    if len(others) == len(sources) and not protection.tensors:
        raise refusal("USAGE", "the sources have nothing in host memory to protect")
    return protection


def _protectable(source: Any) -> Iterator[Holding]:
    return (of for of in holdings(source) if of.owner != WEIGHTS)


def _first_page(begin: int) -> int:
    return -(-begin // _PAGE_BYTES) * _PAGE_BYTES


def _exclude(begin: int, size: int) -> _modicum.Exclusion | None:
    """None if there is no whole page, or the kernel refuses, as for a driver's memory."""
    try:
        return _modicum.Exclusion(begin, size) if size > 0 else None
    except BudgetError:
        return None


def _inherit(exclusion: _modicum.Exclusion | None) -> None:
    if exclusion is not None:
        exclusion.undo()
