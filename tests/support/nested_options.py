"""Options of modicum.torch by the names of their fields, for tests that vary one of them."""

from collections.abc import Mapping
from typing import Any

from modicum.options import MemoryPolicy, Options, SaveOptions, names_in
from modicum.recipes import LoadRules

_KINDS: dict[str, type[Options]] = {
    "rules": LoadRules, "memory": MemoryPolicy, "options": SaveOptions
}  # fmt: skip


def nested(given: Mapping[str, Any], *takes: str) -> dict[str, Any]:
    """The keyword arguments `given`, with fields of options inside the options' classes. `takes`:
    the arguments "rules", "memory" and "options" that the function has."""
    left = {**given}
    for argument in takes:
        kind = _KINDS[argument]
        own = {name: left.pop(name) for name in names_in(kind) if name in left}
        if own:
            left[argument] = kind(**own)
    return left
