"""Temporary replacements of attributes of other packages; docs/reference/patches.md lists
them."""

import functools
import importlib.util
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_ABSENT = object()

Wrapper = Callable[..., Any]
"""What a wrapped function calls: `around(original, *args, **kwargs)` gets the original function and
the arguments of the call, and returns the result."""


def replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Until `stack` ends, `owner` has `value` under this name."""
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    stack.callback(_put_back, owner, name, before)


def replace_everywhere(stack: ExitStack, name: str, original: Any, value: Any) -> None:
    """Until `stack` ends, every module that has `original` under this name has `value`. Afterwards
    all have `original`, including modules that have imported `value` in between."""
    for module in _modules_with(name, original):
        setattr(module, name, value)

    def put_back() -> None:
        for module in _modules_with(name, value):
            setattr(module, name, original)

    stack.callback(put_back)


def wrap(stack: ExitStack, owner: Any, wraps: Mapping[str, Wrapper]) -> None:
    """Until `stack` ends, wraps methods of a class, or functions of a module, by name."""
    for name, around in wraps.items():
        replace(stack, owner, name, _wrapped(vars(owner)[name], around))


def wrap_everywhere(stack: ExitStack, owner: Any, wraps: Mapping[str, Wrapper]) -> None:
    """Until `stack` ends, wraps functions of the module `owner` by name, there and in every module
    that has imported them."""
    for name, around in wraps.items():
        original = vars(owner)[name]
        replace_everywhere(stack, name, original, _wrapped(original, around))


def _wrapped(original: Callable[..., Any], around: Wrapper) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    return wrapped


def after_imports(stack: ExitStack, names: Collection[str], call: Callable[[], Any]) -> None:
    """Until `stack` ends, calls `call` each time that one of the modules `names` has been
    imported."""
    finder = _Finder(names, call)
    sys.meta_path.insert(0, finder)

    def remove() -> None:
        with suppress(ValueError):  # the program has removed it
            sys.meta_path.remove(finder)

    stack.callback(remove)


class _Finder(MetaPathFinder):
    """Lets the other finders find a module, and has `call` called once it is executed."""

    def __init__(self, names: Collection[str], call: Callable[[], Any]) -> None:
        self._names, self._call = names, call
        self._sought: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._names or fullname in self._sought:
            return None
        self._sought.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._sought.discard(fullname)
        loader = None if spec is None else spec.loader
        if loader is None:
            return spec

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # replaced for this import only
            loader.exec_module(module)
            self._call()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _modules_with(name: str, value: Any) -> Iterator[Any]:
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is value:
            yield module


def _put_back(owner: Any, name: str, before: Any) -> None:
    if before is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, before)
