"""torch's data loaders: the signals of their workers."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from modicum import _modicum
from modicum.upstream.patching import replace

_NAME = "_set_worker_signal_handlers"


def keep_workers_at_sigterm(stack: ExitStack) -> None:
    """Until `stack` ends, forked workers that data loaders start ignore SIGTERM, unless their
    parent sends it or has ended. A scheduler signals all processes of a job, and torch ends the
    training by an error when a worker dies. Without effect if this torch has no such function."""
    from torch.utils.data._utils import signal_handling

    original: Callable[[], Any] | None = getattr(signal_handling, _NAME, None)
    if original is None:
        return

    def set_handlers() -> None:
        original()
        _modicum.heed_sigterm_of_parent()

    replace(stack, signal_handling, _NAME, set_handlers)
