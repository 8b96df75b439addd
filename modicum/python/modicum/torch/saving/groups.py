"""The options of an optimizer's parameter groups in a saved checkpoint: its file
optimizer/groups.json."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from modicum.errors import refusal
from modicum.torch.saving.texts import as_damage
from modicum.torch.saving.values import decode, encode, is_scalar, plain
from modicum.walk.saving import GROUPS_FILE, NOT_OPTIONS, Options, groups_text

Group = dict[str, Any]


def text_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> str:
    """The text of groups.json. Raises `UsageError` for an option that can't be stored. `names`: the
    parameters' names by id."""
    groups = ((_names(group, names), group) for group in optimizer.param_groups)
    return text(type(optimizer).__name__, groups)


def text(kind: str, groups: Iterable[tuple[list[str], Options]]) -> str:
    """The text of groups.json. `kind`: the name of the optimizer's class; `groups`: the parameters
    and the options of each group."""
    documents: list[tuple[list[str], Options, Options]] = []
    for index, (params, options) in enumerate(groups):
        simple, exact = {}, {}
        for key, value in options.items():
            if key in NOT_OPTIONS:
                continue
            exact[key] = encode(value, f"optimizer.param_groups[{index}][{key!r}]")
            if _is_simple(value):
                simple[key] = _simple(value)
                if encode(_option(simple[key]), "") == exact[key]:
                    del exact[key]
        documents.append((params, simple, exact))
    return groups_text(kind, documents)


def restore(
    optimizer: torch.optim.Optimizer,
    document: Any,
    names: Mapping[int, str],
    left_out: Collection[str] = (),
) -> None:
    """Sets the options of each group to the saved ones of the group with the same parameters, but
    those that are `left_out`. `document`: of a groups.json. Raises the errors of `matching`, and
    changes nothing."""
    with as_damage(GROUPS_FILE):  # a tensor may be unable to have the value
        for group, options in matching(optimizer, document, names):
            for key, value in options.items():
                if key not in left_out:
                    _set(group, key, value)


def matching(
    optimizer: torch.optim.Optimizer, document: Any, names: Mapping[int, str]
) -> list[tuple[Group, Options]]:
    """Each group of the optimizer, and the saved options of the group with the same parameters.
    Raises `UsageError` if a group was not saved; `IntegrityError` for another document."""
    saved: dict[frozenset[str], list[Options]] = {}
    for params, options in _saved(document):
        saved.setdefault(frozenset(params), []).append(options)
    found = []
    for group in optimizer.param_groups:
        params = _names(group, names)
        same = saved.get(frozenset(params))
        if not same:
            what = "the checkpoint has no parameter group with the parameters of this group"
            raise refusal("MISMATCH", what, tensor=params[0] if params else "")
        found.append((group, same.pop(0)))  # several groups may have no parameters
    return found


def kind_in(document: Any) -> str:
    """The name of the optimizer's class in the document of a groups.json."""
    with as_damage(GROUPS_FILE):
        kind = document["optimizer"]
        if not isinstance(kind, str):
            raise TypeError(f"the optimizer is a {type(kind).__name__}")
        return kind


def _saved(document: Any) -> list[tuple[list[str], Options]]:
    """The parameters and the options of each group."""
    saved: list[tuple[list[str], Options]] = []
    with as_damage(GROUPS_FILE):
        for group in document["groups"]:
            params, simple, exact = group["params"], group["options"], group.get("exact", {})
            options = {key: _option(value) for key, value in simple.items()}
            options |= {key: decode(value, GROUPS_FILE) for key, value in exact.items()}
            if not isinstance(params, list) or not all(isinstance(name, str) for name in params):
                raise TypeError("params are no list of names")
            if not options.keys().isdisjoint(NOT_OPTIONS):
                raise ValueError("an option has the name of a group's parameters")
            saved.append((params, options))
    return saved


def _names(group: Group, names: Mapping[int, str]) -> list[str]:
    return [name_of(parameter, names) for parameter in group["params"]]


def name_of(parameter: torch.Tensor, names: Mapping[int, str]) -> str:
    """The name of an optimizer's parameter. Raises `UsageError` if the model lacks it. `names`: the
    names of the model's parameters by id."""
    name = names.get(id(parameter))
    if name is None:
        got = f"a parameter of shape {list(parameter.shape)}"
        raise refusal("MISMATCH", "the optimizer has a parameter that the model lacks", got=got)
    return name


# Modicum 0.1 knows "options" alone: there a list is read as a tuple, and a tensor without dims is a
# number. "exact" has the JSON form (values.py) of each option that would be read as another value.


def _is_simple(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_simple, value))
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    return is_scalar(plain(value))


def _simple(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_simple(item) for item in value]
    return value.item() if isinstance(value, torch.Tensor) else plain(value)


def _option(simple: Any) -> Any:
    return tuple(simple) if isinstance(simple, list) else simple


def _set(group: Group, key: str, value: Any) -> None:
    """Keeps a tensor that can have the value: a compiled step may refer to it."""
    present = group.get(key)
    if isinstance(present, torch.Tensor) and isinstance(value, (bool, int, float)):
        present.fill_(value)
    elif isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
        same = (present.shape, present.dtype) == (value.shape, value.dtype)
        group[key] = present.copy_(value) if same else value.to(present.device)
    else:
        group[key] = value
