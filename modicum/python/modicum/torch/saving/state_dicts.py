"""State dicts of torch.distributed.checkpoint as the parts of a step: the model's tensors, the
state of an optimizer as get_optimizer_state_dict returns it, and values.

    {"model": {"embed.weight": DTensor}}                         the model's files
    {"optim": {"state": {"embed.weight": {"exp_avg": DTensor,    optimizer/*.safetensors
                                          "step": 3.0}},         optimizer/state.json
               "param_groups": [{"params": [...], "lr": 1e-3}]}} optimizer/groups.json
    {"epoch": 3}                                                 extra/extra.json

A model's or an optimizer's state dict may also be the whole state dict, or lie deeper in it. An
optimizer's may be flattened: `state.NAME.KEY` and `param_groups.NAME.OPTION`.
"""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from modicum import _modicum
from modicum.errors import refusal
from modicum.recipes import Recipe
from modicum.recipes.dtypes import dtype_name
from modicum.recipes.nodes import Node, caller
from modicum.torch.loading.goal import Goal, Model, memory_before
from modicum.torch.ranks.group import Ranks
from modicum.torch.saving.tensor_state import Entry
from modicum.torch.saving.weights import Form, Held, Writing, writing_of
from modicum.torch.shards.placements import Shardings
from modicum.upstream.torch_core import local_of
from modicum.upstream.wrappers import canonical

Place = tuple[str | int, ...]
"""Keys and indices, from the outermost on."""

KEY = "dcp"
"""In `extra`: what the state dict was like."""


@dataclass(frozen=True)
class Split:
    """A state dict by parts."""

    model: dict[str, torch.Tensor]
    """By name, without `model_at`."""
    model_at: Place
    optim: Mapping[str, Any] | None
    """With `state` and `param_groups`."""
    optim_at: Place
    values: dict[str, Any]
    """By key of the flat state dict, as `told_value` gives them."""
    is_flat: bool = False
    """Whether the optimizer's state dict was flattened."""

    @property
    def facts(self) -> dict[str, Any]:
        """For `extra`, from which `dcp.load` restores the state dict."""
        facts: dict[str, Any] = {"model": [*self.model_at], "values": self.values}
        if self.optim is not None:
            groups = told_value(self.optim["param_groups"])
            facts |= {"optim": [*self.optim_at], "param_groups": groups, "flat": self.is_flat}
        return {KEY: facts}


def flat_key(place: Place) -> str:
    """As torch.distributed.checkpoint flattens it."""
    return ".".join(map(str, place))


def nested(flat: Mapping[str, Any], mappings: Mapping[str, Place]) -> dict[str, Any]:
    """The state dict before it was flattened; lists are dicts with int keys."""
    whole: dict[Any, Any] = {}
    for key, value in flat.items():
        place = mappings.get(key, (key,))
        into = whole
        for part in place[:-1]:
            into = into.setdefault(part, {})
        into[place[-1]] = value
    return whole


def split(state: Mapping[str, Any]) -> Split:
    """`UsageError`, naming the value, for what a step has no place for."""
    found = list(_leaves(state, ()))
    optims = [place for place, value in _mappings(state, ()) if _is_optimizer(value)]
    if len(optims) > 1:
        what = "a step has the state of one optimizer"
        raise refusal("UNSUPPORTED", what, got=", ".join(map(flat_key, optims)))
    at = optims[0] if optims else None
    given = {} if at is None else _at(state, at)
    is_flat = at is not None and {"state", "param_groups"} != given.keys()
    optim = None if at is None else _optimizer_of(_nested(given) if is_flat else given, at)
    rest = [of for of in found if at is None or of[0][: len(at)] != at]
    tensors = {place: value for place, value in rest if isinstance(value, torch.Tensor)}
    prefixes = {place[:-1] for place in tensors}
    if len(prefixes) != 1:
        what = "a step has the tensors of one model"
        got = ", ".join(sorted(flat_key(prefix) or "no prefix" for prefix in prefixes)) or "none"
        raise refusal("UNSUPPORTED", what, expected="tensors under one key", got=got)
    values = {
        flat_key(place): _json(value, flat_key(place))
        for place, value in rest
        if place not in tensors
    }
    model = {str(place[-1]): value for place, value in tensors.items()}
    return Split(model, prefixes.pop(), optim, at or (), values, is_flat)


def with_values_of_all(split_: Split, ranks: Ranks) -> Split:
    """With the values of all ranks: each may have keys of its own, as that of its data loader.
    Collective. `UsageError` for a key of which ranks have different values."""
    values: dict[str, Any] = {}
    for rank, own in enumerate(ranks.gather(split_.values)):
        for key, value in own.items():
            if repr(values.setdefault(key, value)) != repr(value):  # NaN is NaN
                what = f"rank {rank} has another value than the ranks before it"
                raise refusal("MISMATCH", what, tensor=key)
    return replace(split_, values=values)


def _leaves(value: Any, at: Place) -> Iterator[tuple[Place, Any]]:
    if isinstance(value, Mapping):
        for key, of in value.items():
            yield from _leaves(of, (*at, key))
    else:
        yield at, value


def _mappings(value: Any, at: Place) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    if isinstance(value, Mapping):
        yield at, value
        for key, of in value.items():
            yield from _mappings(of, (*at, key))


def _at(value: Any, place: Place) -> Any:
    for key in place:
        value = value[key]
    return value


def _is_optimizer(value: Mapping[str, Any]) -> bool:
    return {"state", "param_groups"} == value.keys() or (
        bool(value) and all(str(key).startswith(("state.", "param_groups.")) for key in value)
    )


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A flattened state dict as it was before, but for groups with the same options: they are
    one."""
    parts: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for key, value in flat.items():
        part, _, rest = key.partition(".")
        name, _, last = rest.rpartition(".")
        parts[part].setdefault(name, {})[last] = value
    groups: dict[str, dict[str, Any]] = {}
    for name, options in parts["param_groups"].items():
        groups.setdefault(repr(options), options | {"params": []})["params"].append(name)
    return {"state": parts["state"], "param_groups": [*groups.values()]}


def _optimizer_of(value: Mapping[str, Any], at: Place) -> dict[str, Any]:
    groups = value["param_groups"]
    listed = [*groups.values()] if isinstance(groups, Mapping) else groups
    made = [{**group, "params": _listed(group["params"])} for group in listed]
    _json(made, flat_key((*at, "param_groups")))
    state: dict[str, Any] = value["state"]
    return {"state": state, "param_groups": made}


def _listed(value: Any) -> list[str]:
    return [*value.values()] if isinstance(value, Mapping) else [*value]


def _json(value: Any, key: str) -> Any:
    try:
        told = told_value(value)
        is_same = made_value(json.loads(json.dumps(told))) == value
    except (TypeError, ValueError):
        is_same = False
    if not is_same:
        expected = "the tensors of one model, one optimizer's state, or JSON values"
        what, got = "a step has no place for this value", type(value).__name__
        raise refusal("UNSUPPORTED", what, tensor=key, expected=expected, got=got)
    return told


_TUPLE, _BYTES = "__tuple__", "__bytes__"


def told_value(value: Any) -> Any:
    """A value of a state dict as JSON, in which tuples and bytes are marked."""
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return {key: told_value(of) for key, of in value.items()}
    if isinstance(value, tuple):
        return {_TUPLE: [told_value(of) for of in value]}
    return [told_value(of) for of in value] if isinstance(value, list) else value


def made_value(told: Any) -> Any:
    """The value that `told_value` was given."""
    if isinstance(told, dict):
        if told.keys() == {_TUPLE}:
            return tuple(made_value(of) for of in told[_TUPLE])
        if told.keys() == {_BYTES}:
            return base64.b64decode(told[_BYTES])
        return {key: made_value(of) for key, of in told.items()}
    return [made_value(of) for of in told] if isinstance(told, list) else told


def groups_text(split_: Split, kind: str) -> str:
    """optimizer/groups.json."""
    assert split_.optim is not None
    groups = [
        {
            "params": group["params"],
            "options": {
                key: of for key, of in group.items() if key not in ("params", "param_names")
            },
        }
        for group in split_.optim["param_groups"]
    ]
    return json.dumps({"optimizer": kind.removeprefix("torch."), "groups": groups})


# ---- the model's files


@dataclass(frozen=True)
class Named:
    """The tensors of a state dict, with the model that they are of, if it is known."""

    tensors: Mapping[str, torch.Tensor]
    model: Model | None

    def parameter(self, name: str) -> torch.Tensor | None:
        """The model's own, which knows how FSDP2 cuts it."""
        of = None if self.model is None else self.model.tensors.get(name)
        return None if of is None else of.tensor

    def held(self, name: str, shardings: Shardings) -> Held:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise refusal("MISMATCH", "the state dict lacks a tensor of the model", tensor=name)
        local = local_of(tensor).detach()
        if not local.is_contiguous():
            raise refusal("UNSUPPORTED", "strides that are not row-major", tensor=name)
        own = self.parameter(name)
        alias = own if isinstance(own, nn.Parameter) else None
        return Held(local, shardings.of(tensor, name, alias_of=alias).unpadded(), tensor)

    def entries(self, state: Mapping[str, Any]) -> list[Entry]:
        """Those of an optimizer's state dict."""
        entries: list[Entry] = []
        for fqn, entry in state.items():
            name = canonical(fqn)
            parameter = self.parameter(name)
            parameter = self.tensors.get(name) if parameter is None else parameter
            if parameter is None and self.model is None:
                # A state dict may have parts of it, as of torchtitan's fused projections.
                parameter = next(filter(_is_moment, entry.values()), None)
            if parameter is None:
                what = "the optimizer has a parameter that the model lacks"
                raise refusal("MISMATCH", what, tensor=fqn)
            entries.append((name, parameter, entry))
        return entries


def _is_moment(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def goal_as_stored(tensors: Mapping[str, torch.Tensor], source: Any, ranks: Ranks) -> Goal:
    """Files with the names and shapes of a state dict. `source`: a checkpoint of the same names,
    whose files and companions the step gets, or None. Collective."""
    checkpoint = _modicum.open_checkpoint(source)
    stored = checkpoint.stored

    def node(name: str, tensor: torch.Tensor) -> Node:
        if name in stored:
            return {"op": "stored", "name": name}
        return caller(dtype_name(tensor.dtype), [*tensor.shape])

    targets = {name: node(name, tensor) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        if name in stored and [*stored[name][1]] != [*tensor.shape]:
            expected, got = str([*stored[name][1]]), str([*tensor.shape])
            raise refusal("MISMATCH", "the shape", tensor=name, expected=expected, got=got)
    unused = sorted(stored.keys() - targets.keys())
    text = Recipe(targets, unused).text(callers=True)
    memories = ranks.gather(memory_before())
    return Goal(checkpoint, _modicum.make_recipe(checkpoint, text), memories, [], text=text)


def writing_of_named(named: Named, goal: Goal, ranks: Ranks, form: Form) -> Writing:
    """The state dict's tensors, in the files of the goal's checkpoint."""
    shardings = Shardings()
    names = [target["name"] for target in goal.recipe.targets]
    held = [named.held(name, shardings) for name in names]
    left = sorted(named.tensors.keys() - set(names))
    if left:
        what = "the state dict has a tensor that the model lacks"
        raise refusal("MISMATCH", what, tensor=left[0])
    return writing_of(goal.recipe, held, ranks, form)


def told(split_: Split) -> dict[str, str]:
    """What ranks must have in common, for `Ranks.agree_on`."""
    facts = {f"tensor {n}": f"{t.dtype} {[*t.shape]}" for n, t in split_.model.items()}
    kinds: Sequence[str] = ()
    if split_.optim is not None:
        kinds = [f"{fqn}: {sorted(of)}" for fqn, of in split_.optim["state"].items()]
    return facts | {"the optimizer's state": str(kinds)}
