"""The options of an optimizer's parameter groups in a step (a saved checkpoint directory): its file
optimizer/groups.json."""

import json
from collections.abc import Mapping
from typing import Any

import torch

from modicum.errors import refusal

FILE = "optimizer/groups.json"
_NOT_OPTIONS = ("params", "param_names")

Group = dict[str, Any]


def text_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> str:
    """The text of groups.json: all options that are numbers (tensors without dims, too), strings,
    bools, None, or lists of these. `names`: the parameters' names by id."""
    groups = []
    for group in optimizer.param_groups:
        options = {
            key: _plain(value)
            for key, value in group.items()
            if key not in _NOT_OPTIONS and _is_option(value)
        }
        groups.append({"params": _names(group, names), "options": options})
    return json.dumps({"optimizer": type(optimizer).__name__, "groups": groups})


def restore(
    optimizer: torch.optim.Optimizer, document: dict[str, Any], names: Mapping[int, str]
) -> None:
    """Sets the options of each group to the saved ones of the group with the same parameters.
    Raises `UsageError`, and changes nothing, if a group was not saved."""
    saved = {frozenset(of["params"]): of["options"] for of in document["groups"]}
    found = []
    for group in optimizer.param_groups:
        own = _names(group, names)
        options = saved.get(frozenset(own))
        if options is None:
            what = "the step has no parameter group with the parameters of this group"
            raise refusal("MISMATCH", what, tensor=own[0] if own else "")
        found.append((group, options))
    for group, options in found:
        for key, value in options.items():
            _set(group, key, value)


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


def _is_option(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_option, value))
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    return value is None or isinstance(value, (bool, int, float, str))


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(of) for of in value]
    return value.item() if isinstance(value, torch.Tensor) else value


def _set(group: Group, key: str, value: Any) -> None:
    own = group.get(key)
    if isinstance(own, torch.Tensor):
        own.fill_(value)
    else:
        # torch's options, such as betas, are tuples.
        group[key] = tuple(value) if isinstance(value, list) else value
