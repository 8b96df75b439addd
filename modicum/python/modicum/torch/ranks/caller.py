"""Calls that may block for ever, made where nobody is held up by them."""

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any


class Call:
    """A call under way on another thread."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._function = function
        self._arguments = arguments
        self._ended = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def wait(self, seconds: float) -> bool:
        """True once it has ended. Ctrl-C ends the wait, not the call."""
        return self._ended.wait(seconds)

    def result(self) -> Any:
        """What it returned; raises what it raised. Only once it has ended."""
        if self._error is not None:
            raise self._error
        return self._value

    def run(self) -> None:
        call = partial(self._function, *self._arguments)
        # Nothing may keep a caller's memory beyond the call.
        del self._function, self._arguments
        try:
            self._value = call()
        except BaseException as error:  # is raised again by result(), where it is waited for
            self._error = error
        finally:
            del call
            self._ended.set()


class Caller:
    """A thread that makes calls one after the other. It is a daemon: a call that never returns
    holds up no exit."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def begin(self, function: Callable[..., Any], *arguments: Any) -> Call:
        call = Call(function, arguments)
        self._calls.put(call)
        return call

    def end(self) -> None:
        """No more calls; the thread ends after those that were begun."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()
            del call
