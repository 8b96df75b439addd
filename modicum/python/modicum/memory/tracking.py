"""`track`: the same as `phase`, but also a decorator for functions."""

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar

from modicum.memory.recording import Phase, phase

_Function = TypeVar("_Function", bound=Callable[..., Any])


class track(AbstractContextManager[Phase]):
    """Records the memory of a block, or of each call of a function, as a phase.

        with modicum.memory.track("load") as load:
            model = build()
        print(load.text(limit="2 GiB"))

        @modicum.memory.track()
        def evaluate(): ...

    Each call of a function is a phase with its name in `modicum.memory.phases()`. A call of a
    coroutine function ends when it has been awaited. `Phase.text()` says who held what at the peak.

    Args:
        name: the name of the phase; by default the function's name, or "block".
        interval_s: the least number of seconds between samples; see `modicum.memory.phase`.
    """

    def __init__(self, name: str = "", *, interval_s: float = 0.01) -> None:
        self._name = name
        self._interval_s = interval_s
        self._open: list[AbstractContextManager[Phase]] = []

    def __enter__(self) -> Phase:
        opened = phase(self._name or "block", interval_s=self._interval_s)
        begun = opened.__enter__()
        self._open.append(opened)
        return begun

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return self._open.pop().__exit__(kind, error, trace)

    def __call__(self, function: _Function) -> _Function:
        name = self._name or function.__qualname__
        interval_s = self._interval_s
        tracked: Any
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def tracked(*arguments: Any, **named: Any) -> Any:
                with phase(name, interval_s=interval_s):
                    return await function(*arguments, **named)

        else:

            @functools.wraps(function)
            def tracked(*arguments: Any, **named: Any) -> Any:
                with phase(name, interval_s=interval_s):
                    return function(*arguments, **named)

        return tracked
