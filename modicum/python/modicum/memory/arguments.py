"""Checks of arguments before they have an effect."""

import threading
from numbers import Real
from typing import Any

from modicum import _modicum
from modicum.errors import refusal

MOST_SECONDS = threading.TIMEOUT_MAX
MOST_BYTES = float(1 << 63)


def text(what: str, value: Any) -> str:
    """The value, if it is a str that UTF-8 can encode. `os.fsdecode` makes others, of file names
    that are not UTF-8."""
    if not isinstance(value, str):
        raise refusal("USAGE", f"{what} is not a str", expected="a str", got=repr(value))
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise refusal("USAGE", f"{what} is not UTF-8", got=ascii(value)) from error
    return value


def number(what: str, value: Any, most: float) -> Any:
    """The value, if it is a number from 0 to `most`."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= most:
        expected = f"a number from 0 to {most:g}"
        raise refusal("USAGE", f"{what} is out of range", expected=expected, got=repr(value))
    return value


def size(value: Any) -> int:
    """The bytes of a size such as "2 GiB" or 2048."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise refusal("USAGE", "not a size", expected='a size, such as "2 GiB"', got=repr(value))
    return _modicum.parse_size(value)
