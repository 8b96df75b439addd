"""What saves and imports have in common: texts about an optimizer in a saved checkpoint, and a
refusal."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from modicum.errors import UsageError, refusal

NO_CLASS = "torch"
"""In place of a class that the writer does not know."""
GROUPS_FILE = "optimizer/groups.json"
"""The options of an optimizer's parameter groups."""
NOT_OPTIONS = ("params", "param_names")

Options = Mapping[str, Any]


def class_text(name: str | None) -> str:
    """The name in state.json for the class `name` of torch.optim, or of the program; None:
    unknown."""
    return NO_CLASS if name is None else f"torch.{name}"


def groups_text(kind: str, groups: Iterable[tuple[list[str], Options, Options]]) -> str:
    """The text of GROUPS_FILE. `kind`: the name of the optimizer's class; `groups`: for each group
    the names of its parameters, the options as Modicum 0.1 reads them, and the exact form of those
    that are then read as another value."""
    documents = [
        {"params": names, "options": options, "exact": exact} for names, options, exact in groups
    ]
    return json.dumps({"optimizer": kind, "groups": documents})


def not_under_one_key(what: str, prefixes: Iterable[str]) -> UsageError:
    """The error about tensors of one model or optimizer that have these prefixes."""
    got = ", ".join(sorted(prefix or "the top level" for prefix in prefixes)) or "no tensor"
    fault = f"the tensors of one {what} are not under one key"
    return refusal("UNSUPPORTED", fault, expected="one key", got=got)
