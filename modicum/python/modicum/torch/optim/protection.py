"""`protect`: buffers that others have allocated, left out of forks."""

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
    """What has been done for one tensor, in bytes."""

    owner: str
    name: str
    bytes: int
    """In pages that are its alone: these are left out of forks."""
    left_bytes: int
    """At its edges, in pages that it shares with its neighbours; or all, if the kernel refused."""


class Protection:
    """What `protect` has done. Lives as long as the optimizer that it looks after, or as somebody
    holds it; what it has done stays until `undo`, or until a tensor's memory is freed."""

    def __init__(self) -> None:
        self._sources: list[Any] = []  # weakly, where they may make more
        self._done: dict[tuple[int, int], tuple[Protected, Any]] = {}
        self._hooks: list[Any] = []

    @property
    def tensors(self) -> list[Protected]:
        """Those that are protected and still there."""
        return [of for of, undone in self._done.values() if undone.alive]

    @property
    def bytes(self) -> int:
        """Left out of forks."""
        return sum(of.bytes for of in self.tensors)

    @property
    def left_bytes(self) -> int:
        """Of the same tensors, still copied."""
        return sum(of.left_bytes for of in self.tensors)

    def renew(self) -> None:
        """Protects what has been made since; of an optimizer's it is called after every step."""
        for source in self._sources:
            alive = source()
            if alive is not None:
                self._add(_protectable(alive))

    def undo(self) -> None:
        """Children that are forked from now on inherit everything again. A child that was forked
        before still lacks it."""
        for hook in self._hooks:
            hook.remove()
        for (begin, _), (_, undone) in self._done.items():
            # A child that lacks the pages would read zeros.
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
            # Memory that is freed may go to anyone: the children of this process must find it, and
            # a child that has only the reservation gets pages again.
            storage = of.tensor.untyped_storage()
            undone = weakref.finalize(storage, _inherit, exclusion)
            undone.atexit = False
            self._done[of.begin, of.end] = (Protected(of.owner, of.name, size, left), undone)

    def _follow(self, source: Any) -> None:
        """Looks again after each step of the optimizer that makes the source's state."""
        optimizer = stepping(source)
        if optimizer is None:
            return
        self._sources.append(weakref.ref(source))
        self._hooks.append(optimizer.register_step_post_hook(lambda *_: self.renew()))


def protect(*sources: Any) -> Protection:
    """Leaves the buffers of an optimizer that others have allocated out of forks.

        engine, *_ = deepspeed.initialize(...)
        modicum.torch.protect(engine)

    A forked child, such as a data loader's worker, otherwise keeps a copy of whatever is written
    after the fork: 10 bytes per parameter with ZeRO-2 offload, and 18 where workers are forked for
    every epoch. Applies MADV_DONTFORK to the whole pages of masters, gradients, moments and
    staging; weights are left alone, as a worker may use the model. Call it before workers are
    forked: copies that children hold already stay. What is made later (DeepSpeed's moments are, at
    the first step) is protected at the end of the step that made it. Calling it twice is harmless.

    A child that uses a protected tensor gets a `UsageError`; what reads the memory past torch's
    functions ends the child with SIGSEGV, and never finds anything else there. Workers of a data
    loader do neither, nor does a program that the child starts; a child that trains on would.
    Linux; on Python 3.14 and later, data loaders fork only if asked to
    (`multiprocessing_context="fork"`).

    Args:
        sources: an engine of DeepSpeed's (ZeRO-1 or ZeRO-2 with `offload_optimizer`, tested with
            0.19.8; its private attributes are looked for, and refused by name where missing), an
            optimizer of torch's (its state and gradients), tensors, or a mapping of names to them.
            Modicum's own AdamW is left as it is: its `fork=` says what children find.

    Returns:
        What is protected and what is not: only whole pages can be, so that up to two pages of each
        tensor stay, and the whole of one that is smaller.

    Raises:
        UsageError: a source that is not known, or nothing in host memory to protect.
    """
    protection = Protection()
    others = [source for source in sources if not isinstance(source, AdamW)]
    for source in others:
        protection._add(_protectable(source))
        protection._follow(source)
    if len(others) == len(sources) and not protection.tensors:
        raise refusal("USAGE", "there is nothing in host memory to protect")
    return protection


def _protectable(source: Any) -> Iterator[Holding]:
    return (of for of in holdings(source) if of.owner != WEIGHTS)


def _first_page(begin: int) -> int:
    return -(-begin // _PAGE_BYTES) * _PAGE_BYTES


def _exclude(begin: int, size: int) -> _modicum.Exclusion | None:
    """None where no page is its alone, or the kernel refuses, as of a driver's memory."""
    try:
        return _modicum.Exclusion(begin, size) if size > 0 else None
    except BudgetError:
        return None


def _inherit(exclusion: _modicum.Exclusion | None) -> None:
    if exclusion is not None:
        exclusion.undo()
