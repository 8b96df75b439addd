"""A thread for calls that may block forever, so that another thread can wait with a time limit."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any


class Caller:
    """A thread that makes calls one after the other. It is a daemon thread: a call that never
    returns does not delay the process's exit."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._calls = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def begin(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Queues a call; does not wait for it. The thread drops its references to the arguments
        before the future is done, so that the caller may free their memory then. After an error,
        its traceback may still refer to them."""
        call: Future[Any] = Future()
        self._calls.put((call, partial(function, *arguments)))
        return call

    def end(self) -> None:
        """Lets the thread end after all queued calls; does not wait for it."""
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, work = item
            del item
            try:
                finish = partial(call.set_result, work())
            except BaseException as error:  # raised again by result()
                finish = partial(call.set_exception, error)
            del work
            finish()
            del call, finish
