"""`track`: a context like `phase` that is also a decorator for functions."""

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar, overload

from modicum.errors import refusal
from modicum.memory.recording import Phase, phase

_Function = TypeVar("_Function", bound=Callable[..., Any])


@overload
def track(name: _Function) -> _Function: ...
@overload
def track(name: str = "", *, interval_s: float = 0.01) -> "_Tracker": ...
def track(name: str | Callable[..., Any] = "", *, interval_s: float = 0.01) -> Any:
    """Records the memory of a block, or of each call of a function, as a phase.

        with modicum.memory.track("load") as load:
            model = build()
        print(load.text(limit="2 GiB"))

        @modicum.memory.track
        def evaluate(): ...

    Each call of a decorated function is a phase in `modicum.memory.phases()`. A call of a coroutine
    function ends when it has been awaited. A generator function is refused, because its call runs
    none of its code: use `track` as a context in its body. `Phase.text()` names the holders of the
    memory at the peak.

    Args:
        name: the name of the phase. By default it is the qualified name of the decorated function,
            or "block" for a context. With `@track` it is the function itself.
        interval_s: the least number of seconds between samples; see `modicum.memory.phase`.

    Raises:
        UsageError: the decorated object is a class, a generator function, or not callable.
    """
    if isinstance(name, str):
        return _Tracker(name, interval_s)
    return _Tracker("", interval_s)(name)


class _Tracker(AbstractContextManager[Phase]):
    """A context manager and decorator, which may be used several times."""

    def __init__(self, name: str, interval_s: float) -> None:
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
        _refuse_unless_call_runs_it(function)
        name = self._name or getattr(function, "__qualname__", "block")
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


def _refuse_unless_call_runs_it(function: Any) -> None:
    name = getattr(function, "__qualname__", "")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise refusal(
            "USAGE",
            "a call of a generator function runs none of its code: "
            "use `with modicum.memory.track():` in its body",
            expected="a function",
            got=f"the generator function {name}",
        )
    if isinstance(function, type) or not callable(function):
        got = f"the class {name}" if isinstance(function, type) else repr(function)
        raise refusal("USAGE", "modicum.memory.track", expected="a name or a function", got=got)
