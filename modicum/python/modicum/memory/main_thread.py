"""Calls of the main thread that another thread asks for."""

import ctypes
import os
import threading
from collections.abc import Callable

_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_pending: set["MainThreadCall"] = set()
"""Their callbacks must live until the interpreter has called them."""


class MainThreadCall:
    """A function that the main thread runs between two of its bytecodes.

    There no backward of torch is in flight. A backward replaces gradients without the GIL: another
    thread that reads `grad` meanwhile may use memory that has been freed.
    """

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._pid = os.getpid()
        self._ended = threading.Event()
        self._callback = _CALLBACK(self._run)

    def request(self, timeout_s: float) -> None:
        """Waits until the main thread has run the function, or for `timeout_s`, as while it is in a
        call of C. The function then runs later, and a request before that adds no second run."""
        if self not in _pending:
            self._ended.clear()
            _pending.add(self)
            if ctypes.pythonapi.Py_AddPendingCall(self._callback, None) != 0:  # the queue is full
                _pending.discard(self)
                return
        self._ended.wait(timeout_s)

    def _run(self, _: object) -> int:
        if os.getpid() == self._pid:  # a forked child inherits the queue, and locks of any state
            _pending.discard(self)
            self._function()
            self._ended.set()
        return 0
