"""torch's data loaders: the signals of their workers."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from modicum import _modicum
from modicum.upstream.patching import replace, wrap

_HANDLERS = "_set_worker_signal_handlers"
_ITERATOR = "_MultiProcessingDataLoaderIter"


def keep_workers_at_sigterm(stack: ExitStack) -> None:
    """Until `stack` ends, workers that data loaders start ignore SIGTERM, unless this process sends
    it or has ended. A scheduler signals all processes of a job, and torch ends the training by an
    error when a worker dies. Forked workers do so from their start, others once they have imported
    torch. Without effect if this torch has neither of the names."""
    from torch.utils.data import dataloader
    from torch.utils.data._utils import signal_handling

    original: Callable[[], Any] | None = getattr(signal_handling, _HANDLERS, None)
    trainer = os.getpid()

    def set_handlers() -> None:
        assert original is not None
        original()
        if os.getppid() == trainer:
            _modicum.heed_sigterm_of(trainer)

    if original is not None:
        replace(stack, signal_handling, _HANDLERS, set_handlers)
    if hasattr(dataloader, _ITERATOR):
        wrap(stack, getattr(dataloader, _ITERATOR), {"__init__": _with_worker_init})


def _with_worker_init(start: Callable[..., None], iterator: Any, loader: Any) -> None:
    users = loader.worker_init_fn
    loader.worker_init_fn = _WorkerInit(users, os.getpid())
    try:
        start(iterator, loader)
    finally:
        loader.worker_init_fn = users


class _WorkerInit:
    """The first function that a worker calls, which is pickled for a spawned one."""

    def __init__(self, users: Callable[[int], None] | None, trainer: int) -> None:
        self._users, self._trainer = users, trainer

    def __call__(self, worker_id: int) -> None:
        _modicum.heed_sigterm_of(self._trainer)
        if self._users is not None:
            self._users(worker_id)
