"""The options of an optimizer's parameter groups, in the form of modicum.torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from modicum.walk.saving import NOT_OPTIONS, groups_text

_MOST_BITS = 64


@dataclass(frozen=True)
class Group:
    """A parameter group."""

    names: list[str]
    options: dict[str, Any]


def options_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are numbers of at most 64 bits, strings, bools, None, or lists of them."""
    return {
        name: value
        for name, value in values.items()
        if name not in NOT_OPTIONS and _is_option(value)
    }


def _is_option(value: Any) -> bool:
    values = value if isinstance(value, (list, tuple)) else [value]
    is_known = all(value is None or isinstance(value, (bool, int, float, str)) for value in values)
    return is_known and not any(
        isinstance(value, int) and value.bit_length() > _MOST_BITS for value in values
    )


def text_of(kind: str, groups: Iterable[Group]) -> str:
    """The text of GROUPS_FILE. modicum.torch reads a list under "options" as a tuple, and takes
    lists from "exact". `kind`: the name of the optimizer's class."""
    return groups_text(kind, ((group.names, group.options, _lists(group)) for group in groups))


def _lists(group: Group) -> dict[str, Any]:
    return {key: value for key, value in group.options.items() if isinstance(value, list)}
