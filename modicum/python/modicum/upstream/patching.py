"""Temporary replacements of attributes of other packages; docs/reference/patches.md lists
them."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

_ABSENT = object()


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


def _modules_with(name: str, value: Any) -> Iterator[Any]:
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is value:
            yield module


def _put_back(owner: Any, name: str, before: Any) -> None:
    if before is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, before)
