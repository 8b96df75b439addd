"""The options of an optimizer's parameter groups, in the form of modicum.torch."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

FILE = "optimizer/groups.json"
NOT_OPTIONS = ("params", "param_names")
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
    """The text of FILE. modicum.torch reads a list under "options" as a tuple, and takes lists from
    "exact". `kind`: the name of the optimizer's class."""
    documents: list[dict[str, Any]] = []
    for group in groups:
        exact = {key: value for key, value in group.options.items() if isinstance(value, list)}
        documents.append({"params": group.names, "options": group.options, "exact": exact})
    return json.dumps({"optimizer": kind, "groups": documents})
