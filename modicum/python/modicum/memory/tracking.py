"""`phase`: a context that records memory, and a decorator for functions."""

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar, overload

from modicum.errors import refusal
from modicum.memory.recording import Phase, recorded_phase

_Function = TypeVar("_Function", bound=Callable[..., Any])


@overload
def phase(name: _Function) -> _Function: ...
@overload
def phase(name: str = "", *, interval_s: float = 0.01) -> "PhaseContext": ...
def phase(
    name: str | Callable[..., Any] = "", *, interval_s: float = 0.01
) -> "Callable[..., Any] | PhaseContext":
    """Samples the memory of this process and its children during a block, or during each call of a
    function.

        with modicum.memory.phase("wrap") as wrap:
            fully_shard(model)
        print(wrap.text(limit="2 GiB"))

        @modicum.memory.phase
        def evaluate(): ...

    Phases may nest, also those of several threads. A thread takes the samples, at a rate that uses
    at most 2 % of a core (5 % with children). A sample reads one file of /proc in 0.1 ms; with
    children, whose shared pages the kernel must count, it takes up to 50 ms per GiB. While the
    block holds the GIL there are no samples, but the kernel's high-water mark still records the
    peak of this process. If the program runs under `modicum watch`, the phase is recorded there,
    too. Linux only.

    A recording keeps at most 16,384 samples for `write` and `draw`. When there are more, it keeps
    every second one, of two neighbours the one with more bytes, and so on. The figures of a `Phase`
    count all samples. A sample that can't be read, as without a free file descriptor, is left out.
    `Phase.text()` names the holders of the memory at the peak.

    A call of a coroutine function ends when it has been awaited. A generator function is refused,
    because its call runs none of its code: use a context in its body.

    Args:
        name: the label in tables and pictures; UTF-8. By default it is the qualified name of the
            decorated function, or "block" for a context. With `@phase` it is the function itself.
        interval_s: the least number of seconds between samples. Nested phases use the value of the
            outermost one.

    Yields:
        The `Phase`, which is complete after the block, with or without an exception.

    Raises:
        UsageError: the name is not UTF-8, `interval_s` is not a number from 0, or the decorated
            object is a class, a generator function, or not callable.
        IoError: /proc can't be read at the begin or the end; a phase that has begun is over.
    """
    if isinstance(name, str):
        return PhaseContext(name, interval_s)
    return PhaseContext("", interval_s)(name)


class PhaseContext(AbstractContextManager[Phase]):
    """A context manager and decorator, which may be used several times."""

    def __init__(self, name: str, interval_s: float) -> None:
        self._name = name
        self._interval_s = interval_s
        self._open: list[AbstractContextManager[Phase]] = []

    def __enter__(self) -> Phase:
        opened = recorded_phase(self._name or "block", self._interval_s)
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
                with recorded_phase(name, interval_s):
                    return await function(*arguments, **named)

        else:

            @functools.wraps(function)
            def tracked(*arguments: Any, **named: Any) -> Any:
                with recorded_phase(name, interval_s):
                    return function(*arguments, **named)

        return tracked


def _refuse_unless_call_runs_it(function: Any) -> None:
    name = getattr(function, "__qualname__", "")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise refusal(
            "USAGE",
            "a call of a generator function runs none of its code: "
            "use `with modicum.memory.phase():` in its body",
            expected="a function",
            got=f"the generator function {name}",
        )
    if isinstance(function, type) or not callable(function):
        got = f"the class {name}" if isinstance(function, type) else repr(function)
        raise refusal("USAGE", "modicum.memory.phase", expected="a name or a function", got=got)
