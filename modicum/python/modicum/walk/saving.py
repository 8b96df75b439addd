"""What saves and imports share: texts about an optimizer's state in a saved checkpoint."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from modicum.errors import UsageError, refusal

UNKNOWN_CLASS = "torch"
"""Stands in state.json for a class that the writer does not know."""
GROUPS_FILE = "optimizer/groups.json"
"""The options of an optimizer's parameter groups."""
NOT_OPTIONS = ("params", "param_names")

Options = Mapping[str, Any]


def class_text(name: str | None) -> str:
    """The optimizer's name in state.json. `name`: that of its class; None: unknown."""
    return UNKNOWN_CLASS if name is None else f"torch.{name}"


def groups_text(kind: str, groups: Iterable[tuple[list[str], Options, Options]]) -> str:
    """The text of GROUPS_FILE. `kind`: the name of the optimizer's class; `groups`: for each group
    the names of its parameters, the options in the simple form that Modicum 0.1 reads, and the
    exact form of each option that the simple form changes."""
    documents = [
        {"params": names, "options": options, "exact": exact} for names, options, exact in groups
    ]
    return json.dumps({"optimizer": kind, "groups": documents})


def split_keys_error(what: str, prefixes: Iterable[str]) -> UsageError:
    """The error for a model or an optimizer whose tensors are under several keys."""
    got = ", ".join(sorted(prefix or "the top level" for prefix in prefixes)) or "no tensor"
    fault = f"the tensors of one {what} are under several keys"
    return refusal("UNSUPPORTED", fault, expected="one key", got=got)
