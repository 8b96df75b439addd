"""Arguments that functions with and without torch take: the directory of a run, whole numbers."""

import operator
import os
from pathlib import Path
from typing import Any

from modicum.errors import refusal

LAST = (1 << 63) - 1
"""The largest number of a step."""


def path_of(name: str, value: Any) -> Path:
    """The argument `name` as a path. Raises `UsageError` unless it is one."""
    if not isinstance(value, (str, os.PathLike)):
        raise refusal("USAGE", name, expected="a path", got=repr(value))
    return Path(value)


def root_of(run: str | os.PathLike[str]) -> Path:
    """The absolute path of an argument `run`. Raises `UsageError` if it is none, or empty."""
    path = path_of("run", run)
    if os.fspath(run) == "":
        raise refusal("USAGE", "run", expected="a directory", got="''")
    return path.absolute()


def integer(name: str, value: Any, least: int) -> int:
    """The argument `name` as an integer, also of numpy's. Raises `UsageError` unless it is one from
    `least` to LAST."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if isinstance(value, bool) or not least <= number <= LAST:
        expected = f"an integer from {least} to {LAST}"
        raise refusal("USAGE", name, expected=expected, got=repr(value))
    return number
