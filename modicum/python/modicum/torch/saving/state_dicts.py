"""Splits a state dict of torch.distributed.checkpoint into the parts of a saved
checkpoint: the model's tensors, one optimizer's state dict as get_optimizer_state_dict returns it,
and other values.

    {"model": {"embed.weight": DTensor}}                         the model's files
    {"optim": {"state": {"embed.weight": {"exp_avg": DTensor,    optimizer/*.safetensors
                                          "step": 3.0}},         optimizer/state.json
               "param_groups": [{"params": [...], "lr": 1e-3}]}} optimizer/groups.json
    {"epoch": 3}                                                 extra/extra.json

The model's tensors may also be at the top level, or under one deeper key. The optimizer's state
dict may lie deeper, too, and may be flattened: `state.NAME.KEY` and `param_groups.NAME.OPTION`. A
state dict without a model's tensors is refused.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from modicum import _modicum
from modicum.errors import UsageError, refusal
from modicum.recipes import Recipe
from modicum.recipes.dtypes import dtype_name
from modicum.recipes.nodes import Node, caller
from modicum.recipes.recipe import text_with_callers
from modicum.torch.loading.goal import Goal, Model, memory_before
from modicum.torch.ranks.group import Ranks
from modicum.torch.saving import groups
from modicum.torch.saving.tensor_state import Entry
from modicum.torch.saving.texts import as_damage
from modicum.torch.saving.values import decode, encode
from modicum.torch.saving.weights import Form, LocalTensor, Writing, writing_of
from modicum.torch.shards.placements import Shardings
from modicum.upstream.torch_core import local_of
from modicum.upstream.wrappers import canonical
from modicum.walk.saving import split_keys_error

Place = tuple[str | int, ...]
"""The path of a value: keys and indices, the outermost first."""

KEY = "dcp"
"""The key in `extra` under which `SplitStateDict.facts` is saved."""


@dataclass(frozen=True)
class SplitStateDict:
    """The parts of a state dict."""

    model: dict[str, torch.Tensor]
    """The model's tensors by name; the names lack `model_at`."""
    model_at: Place
    """The path of the dict that holds the model's tensors."""
    optim: Mapping[str, Any] | None
    """A dict with the keys `state` and `param_groups`; never flattened."""
    optim_at: Place
    values: dict[str, Any]
    """All other values: by `flat_key`."""
    is_flat: bool = False
    """Whether the optimizer's state dict was flattened."""

    @property
    def facts(self) -> dict[str, Any]:
        """The entry of `extra` from which `modicum.torch.dcp.ModicumReader` restores the state
        dict."""
        facts: dict[str, Any] = {"model": [*self.model_at], "values": self.values}
        if self.optim is not None:
            facts |= {"optim": [*self.optim_at], "flat": self.is_flat}
            facts["param_groups"] = self.optim["param_groups"]
        return {KEY: facts}


def facts_in(extra: Any, file: str) -> SplitStateDict | None:
    """The parts that the facts in the `extra` of a checkpoint describe, without tensors; None
    without facts. Raises `IntegrityError`, which names `file`, for others than
    `SplitStateDict.facts` gives."""
    if not isinstance(extra, dict) or KEY not in extra:
        return None
    found = extra[KEY]
    with as_damage(file):
        at = found.get("optim")
        saved = found.get("param_groups", [])
        param_groups = [{**group, "params": [*group["params"]]} for group in saved]
        optim = None if at is None else {"state": {}, "param_groups": param_groups}
        return SplitStateDict(
            {}, (*found["model"],), optim, (*(at or ()),), {**found["values"]},
            is_flat=found.get("flat") is True,
        )  # fmt: skip


def flat_key(place: Place) -> str:
    """The key that torch.distributed.checkpoint gives a value at `place`."""
    return ".".join(map(str, place))


def nested(flat: Mapping[str, Any], mappings: Mapping[str, Place]) -> dict[str, Any]:
    """The state dict before torch.distributed.checkpoint flattened it, but a list is a dict with
    int keys. `mappings`: the path of each key; a key without one stays at the top."""
    whole: dict[Any, Any] = {}
    for key, value in flat.items():
        place = mappings.get(key, (key,))
        parent = whole
        for part in place[:-1]:
            parent = parent.setdefault(part, {})
        parent[place[-1]] = value
    return whole


def split(state: Mapping[str, Any]) -> SplitStateDict:
    """The parts of a state dict. Raises `UsageError` if they do not fit into a checkpoint."""
    found = list(_leaves(state, ()))
    optims = [place for place, value in _mappings(state, ()) if _is_optimizer(value)]
    if len(optims) > 1:
        what, got = "the state dict has several optimizers", ", ".join(map(flat_key, optims))
        raise refusal("UNSUPPORTED", what, expected="the state dict of one optimizer", got=got)
    at = optims[0] if optims else None
    optim_dict = {} if at is None else _at(state, at)
    is_flat = at is not None and "param_groups" not in optim_dict
    optim = (
        None if at is None else _optimizer_of(_nested(optim_dict) if is_flat else optim_dict, at)
    )
    rest = [leaf for leaf in found if at is None or leaf[0][: len(at)] != at]
    tensors = {place: value for place, value in rest if isinstance(value, torch.Tensor)}
    prefixes = {place[:-1] for place in tensors}
    if len(prefixes) != 1:
        raise _several_places(prefixes, tensors)
    values = {flat_key(place): value for place, value in rest if place not in tensors}
    model = {str(place[-1]): value for place, value in tensors.items()}
    return SplitStateDict(model, prefixes.pop(), optim, at or (), values, is_flat)


def _several_places(prefixes: Collection[Place], tensors: Collection[Place]) -> UsageError:
    """The error of a state dict with tensors at several places, such as a model's next to the state
    of a random number generator. It names a tensor at the top level."""
    error = split_keys_error("model", map(flat_key, prefixes))
    first = next((place for place in tensors if len(place) == 1), None)
    if first is None or len(prefixes) == 1:
        return error
    what = f"the state dict has the tensor '{flat_key(first)}' at its top level, next to the model"
    expected = "its .numpy(), which is a value, or the tensor in extra_per_rank of "
    expected += "modicum.torch.save"
    return refusal("UNSUPPORTED", what, expected=expected)


def with_values_of_all(split_: SplitStateDict, ranks: Ranks) -> SplitStateDict:
    """`split_` with the values of all ranks: a rank may have keys that others lack, such as the
    state of its data loader. Collective. Raises `UsageError` if ranks have different values for a
    key."""
    encoded = {key: encode(value, f"value of {key}") for key, value in split_.values.items()}
    values: dict[str, Any] = {}
    for rank, found in enumerate(ranks.gather(encoded)):
        for key, value in found.items():
            # Not ==, which takes 1, 1.0 and True for equal.
            if repr(values.setdefault(key, value)) != repr(value):
                expected, got = (repr(decode(text, key))[:200] for text in (values[key], value))
                what = f"value of {key} differs on rank {rank}"
                raise refusal("MISMATCH", what, expected=expected, got=got)
    return replace(split_, values={key: decode(value, key) for key, value in values.items()})


def _leaves(value: Any, at: Place) -> Iterator[tuple[Place, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, (*at, key))
    else:
        yield at, value


def _mappings(value: Any, at: Place) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    if isinstance(value, Mapping):
        yield at, value
        for key, item in value.items():
            yield from _mappings(item, (*at, key))


def _at(value: Any, place: Place) -> Any:
    for key in place:
        value = value[key]
    return value


def _is_optimizer(value: Mapping[str, Any]) -> bool:
    # A flattened one is known only by its prefixes: a model whose names all begin with "state."
    # would count as an optimizer. DCP leaves out a "state" that is empty.
    has_groups = "param_groups" in value and value.keys() <= {"state", "param_groups"}
    return has_groups or (
        bool(value) and all(str(key).startswith(("state.", "param_groups.")) for key in value)
    )


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict before it was flattened, except that parameter groups with the same
    options become one group."""
    parts: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for key, value in flat.items():
        part, _, rest = key.partition(".")
        name, _, last = rest.rpartition(".")
        parts[part].setdefault(name, {})[last] = value
    merged: dict[str, dict[str, Any]] = {}
    for name, options in parts["param_groups"].items():
        merged.setdefault(repr(options), options | {"params": []})["params"].append(name)
    return {"state": parts["state"], "param_groups": [*merged.values()]}


def _optimizer_of(value: Mapping[str, Any], at: Place) -> dict[str, Any]:
    saved = value["param_groups"]
    listed = [*saved.values()] if isinstance(saved, Mapping) else saved
    param_groups = [{**group, "params": _listed(group["params"])} for group in listed]
    encode(param_groups, f"value of {flat_key((*at, 'param_groups'))}")  # only checks
    state: dict[str, Any] = value.get("state", {})
    return {"state": state, "param_groups": param_groups}


def _listed(value: Any) -> list[str]:
    return [*value.values()] if isinstance(value, Mapping) else [*value]


def groups_text(split_: SplitStateDict, kind: str) -> str:
    """The text of optimizer/groups.json. `kind`: as state.json names the optimizer's class."""
    assert split_.optim is not None
    saved = ((group["params"], group) for group in split_.optim["param_groups"])
    return groups.text(kind.removeprefix("torch."), saved)


# ---- the model's files


def _parameter(name: str, model: Model | None) -> torch.Tensor | None:
    """The tensor in the model, from which FSDP2's sharding is known; None without it."""
    entry = None if model is None else model.tensors.get(name)
    return None if entry is None else entry.tensor


def entries_of(
    state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], model: Model | None
) -> list[Entry]:
    """The state of each parameter in an optimizer's state dict. `tensors`: the model's of the state
    dict; `model`: the model itself if it is known."""
    entries: list[Entry] = []
    for fqn, entry in state.items():
        name = canonical(fqn)
        parameter = _parameter(name, model)
        parameter = tensors.get(name) if parameter is None else parameter
        if parameter is None and model is None:
            # The state dict may have the parameter in parts, as torchtitan's fused projections. A
            # moment is used instead: it has the same shape and sharding.
            parameter = next(filter(_is_moment, entry.values()), None)
        if parameter is None:
            what = "the optimizer has a parameter that the model lacks"
            raise refusal("MISMATCH", what, tensor=fqn)
        entries.append((name, parameter, entry))
    return entries


def _is_moment(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def goal_as_stored(tensors: Mapping[str, torch.Tensor], source: Any, ranks: Ranks) -> Goal:
    """The goal of files with the names and shapes of a state dict. `source`: a checkpoint with the
    same names, whose division into files, config and tokenizer the checkpoint gets, or None.
    Collective."""
    checkpoint = _modicum.open_checkpoint(source, in_save=True)
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
    text = text_with_callers(Recipe(targets, unused))
    memories = ranks.gather(memory_before())
    return Goal(checkpoint, _modicum.make_recipe(checkpoint, text), memories, [], text=text)


def writing_of_named(
    tensors: Mapping[str, torch.Tensor], model: Model | None, goal: Goal, ranks: Ranks, form: Form
) -> Writing:
    """The `Writing` of the state dict's tensors into files like those of the goal's checkpoint.
    `tensors` and `model`: as of `entries_of`."""
    shardings = Shardings()
    names = [target["name"] for target in goal.recipe.targets]
    local_tensors = []
    for name in names:
        tensor = tensors.get(name)
        if tensor is None:
            what = "the state dict lacks a tensor of the model: save all of model.state_dict()"
            raise refusal("MISMATCH", what, tensor=name)
        # FSDP2's sharding is looked up by the model's Parameter; a state dict has another object.
        parameter = _parameter(name, model)
        alias = parameter if isinstance(parameter, nn.Parameter) else None
        sharding = shardings.of(tensor, name, alias_of=alias).unpadded()
        is_buffer = parameter is not None and alias is None
        local_tensors.append(
            LocalTensor(local_of(tensor).detach(), sharding, tensor, comes_from_first=is_buffer)
        )
    left = sorted(tensors.keys() - set(names))
    if left:
        what = "the state dict has a tensor that the model lacks"
        raise refusal("MISMATCH", what, tensor=left[0])
    return writing_of(goal.recipe, local_tensors, ranks, form)


def common_facts(split_: SplitStateDict) -> dict[str, str]:
    """What must be equal on all ranks, for `Ranks.agree_on`."""
    facts = {f"tensor {n}": f"{t.dtype} {[*t.shape]}" for n, t in split_.model.items()}
    kinds: Sequence[str] = ()
    if split_.optim is not None:
        kinds = [f"{fqn}: {sorted(entry)}" for fqn, entry in split_.optim["state"].items()]
    return facts | {"the optimizer's state": str(kinds)}
