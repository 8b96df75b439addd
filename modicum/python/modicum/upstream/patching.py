"""Temporary replacements of attributes of other packages; docs/reference/patches.md lists
them."""

from contextlib import ExitStack
from typing import Any

_ABSENT = object()


def replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Until `stack` ends, `owner` has `value` under this name."""
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    stack.callback(_put_back, owner, name, before)


def _put_back(owner: Any, name: str, before: Any) -> None:
    if before is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, before)
