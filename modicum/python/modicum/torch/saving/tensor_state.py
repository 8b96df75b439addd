"""Saves and loads the state of any torch optimizer in a checkpoint: tensors
of the parameters' shapes in safetensors files, numbers in state.json."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from modicum import _modicum
from modicum.errors import refusal
from modicum.recipes.dtypes import FLOATS, dtype_name, require_exact
from modicum.recipes.nodes import Node, caller
from modicum.torch.loading.goal import Model
from modicum.torch.loading.planning import Size, device_of
from modicum.torch.optim.bound import shows_adamw
from modicum.torch.ranks.cpus import cpus_of_rank
from modicum.torch.ranks.group import Ranks
from modicum.torch.saving.groups import name_of
from modicum.torch.saving.texts import as_damage
from modicum.torch.saving.values import dtype_named, encode, is_scalar, plain
from modicum.torch.saving.weights import (
    Form,
    LocalTensor,
    Writing,
    writing_of,
)
from modicum.torch.shards.placements import Sharding, Shardings, is_whole, layout_of
from modicum.torch.shards.tensors import copying_into, destination_of, memory_of, overlaps
from modicum.upstream.torch_core import local_of
from modicum.upstream.torch_distributed import dtensor_like
from modicum.walk.saving import UNKNOWN_CLASS, class_text

_PAGE_BYTES = 4096
_MMAP_BYTES = 128 << 10  # glibc's default M_MMAP_THRESHOLD: larger blocks are mapped
_ALIGNMENT = 64  # torch's, for tensors on the CPU

FILE = "optimizer/state.json"
_DIMS = 64

Numbers = dict[str, dict[str, Any]]
"""For each parameter its numbers by name. In state.json a tensor of one element is
[dtype, value, shape]."""


def writing_of_state(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], ranks: Ranks, form: Form
) -> tuple[Writing | None, str]:
    """The tensors to write, or None if there are none, and the text of state.json. Raises
    `UsageError` for a value that is neither a number nor a tensor of the parameter's shape, for the
    state that a `modicum.torch.AdamW` shows, which lacks masters and 8-bit moments, and for a
    wrapper that does not show the state of the optimizer inside."""
    if shows_adamw(optimizer.state):
        what, got = "an unknown wrapper around modicum.torch.AdamW", type(optimizer).__name__
        raise refusal("UNSUPPORTED", what, expected="the modicum.torch.AdamW in it", got=got)
    _refuse_hidden(optimizer)
    entries: list[Entry] = [(name_of(p, names), p, entry) for p, entry in optimizer.state.items()]
    return writing_of_entries(entries, _kind(optimizer), ranks, form)


def _refuse_hidden(optimizer: torch.optim.Optimizer) -> None:
    for inner in vars(optimizer).values():
        is_inside = isinstance(inner, torch.optim.Optimizer) and inner.state is not optimizer.state
        if is_inside and inner.state:
            what, got = "a wrapper that hides the state of its optimizer", type(optimizer).__name__
            expected = f"the state of its {type(inner).__name__} in `state`"
            raise refusal("UNSUPPORTED", what, expected=expected, got=got)


Entry = tuple[str, torch.Tensor, Mapping[str, Any]]
"""A parameter's name, the parameter, and its state."""


def writing_of_entries(
    entries: Sequence[Entry], kind: str, ranks: Ranks, form: Form
) -> tuple[Writing | None, str]:
    """The tensors to write, or None if there are none, and the text of state.json. `kind`: the name
    of the optimizer's class in state.json."""
    shardings = Shardings()
    targets: dict[str, Node] = {}
    tensors: list[LocalTensor] = []
    numbers: Numbers = {}
    trained = ((fqn, dtype_name(parameter.dtype)) for fqn, parameter, _ in entries)
    require_exact(form.dtype, trained)
    for fqn, parameter, entry in entries:
        entry_numbers = numbers.setdefault(fqn, {})
        for key, value in entry.items():
            if "." in key:
                what = "state of an optimizer under a key with a dot"
                raise refusal("UNSUPPORTED", what, tensor=fqn, got=key)
            if _is_like(value, parameter):
                local = local_of(value)
                targets[f"{fqn}.{key}"] = caller(dtype_name(value.dtype), [*value.shape])
                sharding = shardings.of(parameter, fqn).unpadded()
                tensors.append(LocalTensor(local.detach(), sharding, value))
            else:
                entry_numbers[key] = _number(value, f"{fqn}.{key}")
    facts = text(kind, numbers)
    if not targets:
        return None, facts
    nothing = _modicum.open_checkpoint(None)
    recipe = _modicum.make_recipe(nothing, json.dumps({"targets": targets, "unused": []}))
    plain = Form(staging=form.staging, background=form.background, replicas=form.replicas)
    return writing_of(recipe, tensors, ranks, plain), facts


def text(kind: str, numbers: Numbers) -> str:
    """The text of state.json."""
    return json.dumps({"optimizer": kind, "numbers": numbers})


def _is_like(value: Any, parameter: torch.Tensor) -> bool:
    """Whether a value of the state has the parameter's shape and sharding."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return False
    if value.dim() == 0:
        return False  # a number
    return local_of(value).shape == local_of(parameter).shape


def _number(value: Any, name: str) -> Any:
    is_one = isinstance(value, torch.Tensor) and value.numel() == 1 and is_whole(value)
    if is_one and not value.is_complex():
        return [str(value.dtype).removeprefix("torch."), local_of(value).item(), [*value.shape]]
    if is_scalar(plain(value)):
        return encode(value, name)
    got = f"{type(value).__name__} of {list(getattr(value, 'shape', []))}"
    expected = "a tensor of the parameter's shape, or a number"
    raise refusal("UNSUPPORTED", "state of an optimizer", tensor=name, expected=expected, got=got)


def _document(facts: str) -> Any:
    with as_damage(FILE):
        return json.loads(facts)


def numbers_of(facts: str) -> Numbers:
    """For each parameter its numbers by name, as `writing_of_state` found them; tensors are on the
    CPU. `facts`: the text of state.json. Raises `IntegrityError` for another text."""
    document = _document(facts)
    with as_damage(FILE):
        return {
            fqn: {key: _read(value) for key, value in entry.items()}
            for fqn, entry in document["numbers"].items()
        }


def _read(number: Any) -> Any:
    if not isinstance(number, list):
        if not is_scalar(number):
            raise TypeError(f"a {type(number).__name__} is no number")
        return number
    dtype, value, shape = number
    if not isinstance(shape, list) or len(shape) > _DIMS or any(extent != 1 for extent in shape):
        raise ValueError("a tensor of more than one element is no number")
    return torch.full(shape, value, dtype=dtype_named(dtype), device="cpu")


def require_kind(optimizer: torch.optim.Optimizer, facts: str) -> None:
    """Raises `UsageError` unless state.json, `facts`, names the optimizer's class."""
    saved, kind = kind_of(facts), _kind(optimizer)
    if saved == UNKNOWN_CLASS:
        what = "the checkpoint does not name the class of its optimizer: give optimizer= to "
        what += "ModicumWriter or import_checkpoint"
        raise refusal("MISMATCH", what, got=_class_name(kind))
    if saved != kind:
        what = "the state was saved from an optimizer of another class"
        raise refusal("MISMATCH", what, expected=_class_name(saved), got=_class_name(kind))


def kind_of(facts: str) -> str:
    """The optimizer's class in a state.json: "adamw" for Modicum's, "torch.NAME" for others."""
    with as_damage(FILE):
        return str(_document(facts)["optimizer"])


def _kind(optimizer: torch.optim.Optimizer) -> str:
    return class_text(type(optimizer).__name__)


def _class_name(kind: str) -> str:
    """The class of an optimizer as a program names it."""
    if kind == "adamw":
        return "modicum.torch.AdamW"
    name = kind.removeprefix("torch.")
    return f"torch.optim.{name}" if hasattr(torch.optim, name) else name


class SavedState(NamedTuple):
    """A state written by `writing_of_state`."""

    tensors: _modicum.Checkpoint
    facts: str
    """The text of state.json."""
    staging: Size | None
    """Host memory to stream it through; None: the default."""
    checkpoint: Path


def needed_by_tensors(
    optimizer: torch.optim.Optimizer,
    model: Model,
    names: Mapping[int, str],
    saved: SavedState,
    ranks: Ranks,
) -> dict[str, int]:
    """Host memory that `load_tensors` will take on this rank, bytes by purpose: new tensors, and
    staging to read them. Raises the `UsageError` of `load_tensors`, but not that of
    `require_dtypes`. Parameters may be on meta."""
    entries = {id(entry.tensor): entry for entry in model.tensors.values()}
    parameters = _parameters_of(optimizer, names, saved, numbers_of(saved.facts))
    shardings = Shardings()
    needed: Counter[str] = Counter()
    to: list[tuple[Sharding, str]] = []
    for name, (dtype, _) in saved.tensors.stored.items():
        fqn, _, key = name.rpartition(".")
        parameter = parameters[fqn]
        here = _value_here(optimizer, parameter, key, dtype)
        # A new tensor has the parameter's strides.
        is_row_major = local_of(parameter if here is None else here).is_contiguous()
        destination = "given" if is_row_major else "copy"
        to.append((shardings.of(parameter, fqn).unpadded(), destination))
        device = device_of(model, entries[id(parameter)]) if parameter.is_meta else parameter.device
        if device.type == "cpu" and here is None:
            nbytes = local_of(parameter).numel() * _dtype(dtype).itemsize
            needed["moments"] += _allocated(nbytes)
    if to:
        plan = _plan_of(_recipe_of(saved), to, ranks, saved.staging)
        needed["staging"] += plan.ledger_limit_bytes(ranks.rank)
    return dict(needed)


def _dtype(name: str) -> torch.dtype:
    with as_damage("optimizer/"):
        return dtype_named(name)


def _allocated(nbytes: int) -> int:
    """The bytes that malloc takes for a tensor, malloc's header included; whole pages if the tensor
    is large."""
    unit = _PAGE_BYTES if nbytes >= _MMAP_BYTES else _ALIGNMENT
    return -(-nbytes // unit) * unit + unit


def _parameters_of(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    saved: SavedState,
    numbers: Numbers,
) -> dict[str, torch.Tensor]:
    """The optimizer's parameters by name. Raises `UsageError` unless they have the saved names and
    shapes."""
    groups = optimizer.param_groups
    parameters = {name_of(p, names): p for group in groups for p in group["params"]}
    of_tensors = (name.rpartition(".")[0] for name in saved.tensors.stored)
    for fqn in (*numbers, *of_tensors):
        if fqn not in parameters:
            what = "the optimizer lacks a parameter of the saved state"
            raise refusal("MISMATCH", what, tensor=fqn)
    for name, (_, shape) in saved.tensors.stored.items():
        expected = [*parameters[name.rpartition(".")[0]].shape]
        if [*shape] != expected:
            got = str([*shape])
            raise refusal("MISMATCH", "a saved shape", tensor=name, expected=str(expected), got=got)
    return parameters


def require_dtypes(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    saved: SavedState,
    loaded: Mapping[int, torch.dtype],
) -> None:
    """Raises `UsageError` if a parameter has another dtype than when it was saved, and the state
    was made for the former: torch's optimizers step only state of the parameter's own dtype.
    `loaded`: the dtype that a load will give a parameter, by its id."""
    weights: dict[str, str] | None = None
    parameters = _parameters_of(optimizer, names, saved, {})
    for name, (dtype, _) in saved.tensors.stored.items():
        fqn = name.rpartition(".")[0]
        parameter = parameters[fqn]
        parameter_dtype = dtype_name(loaded.get(id(parameter), parameter.dtype))
        if dtype == parameter_dtype or dtype not in FLOATS or parameter_dtype not in FLOATS:
            continue
        if weights is None:
            stored = _modicum.open_checkpoint(saved.checkpoint).stored
            weights = {weight: weight_dtype for weight, (weight_dtype, _) in stored.items()}
        # A parameter that the load renames or stacks is compared with all weights.
        if parameter_dtype not in ({weights[fqn]} if fqn in weights else weights.values()):
            what = "the state was saved with a parameter of another dtype: build the model with "
            what += "the saved dtype, or resume without optimizer="
            raise refusal("MISMATCH", what, tensor=fqn, expected=dtype, got=parameter_dtype)


def _value_here(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, key: str, dtype: str
) -> torch.Tensor | None:
    """The tensor that the optimizer's state has already for this key and dtype, or None."""
    value = optimizer.state.get(parameter, {}).get(key)
    is_same = _is_like(value, parameter) and value.dtype == _dtype(dtype)
    return value if is_same and not value.is_meta and not overlaps(local_of(value)) else None


def _recipe_of(saved: SavedState) -> _modicum.Recipe:
    """The recipe for every tensor of the state, unchanged."""
    targets = {name: {"op": "stored", "name": name} for name in saved.tensors.stored}
    return _modicum.make_recipe(saved.tensors, json.dumps({"targets": targets, "unused": []}))


def _plan_of(
    recipe: _modicum.Recipe,
    to: Sequence[tuple[Sharding, str]],
    ranks: Ranks,
    staging: Size | None,
) -> _modicum.Plan:
    """`to`: (sharding, destination) of each target."""
    return _modicum.make_plan(
        recipe,
        layout_of(recipe, [sharding for sharding, _ in to], ranks.world_size),
        ranks_per_node=ranks.ranks_per_node or ranks.world_size,
        destinations=[destination for _, destination in to],
        staging=staging,
    )


def load_tensors(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    saved: SavedState,
    ledger: _modicum.Ledger,
    ranks: Ranks,
) -> dict[str, Any] | None:
    """Reads a saved state into the tensors of `optimizer.state`, or into new tensors where there is
    none or it does not fit, and sets the numbers. The optimizer's groups have their saved options
    already. Returns the outcome of this rank's load, None without tensors. Collective."""
    numbers = numbers_of(saved.facts)
    parameters = _parameters_of(optimizer, names, saved, numbers)
    require_dtypes(optimizer, names, saved, {})
    shardings = Shardings()
    state: dict[str, dict[str, Any]] = {}
    tensors: list[LocalTensor] = []
    devices = devices_of_numbers(optimizer)
    # Keys of tensors like their parameters; those of 0-d parameters are among the numbers.
    like = {name.rpartition(".")[2] for name in saved.tensors.stored}
    for fqn, entry_numbers in numbers.items():
        parameter = parameters[fqn]
        state[fqn] = {
            key: _like(parameter, value)
            if key in like and parameter.dim() == 0
            else _placed(value, devices[parameter])
            for key, value in entry_numbers.items()
        }
    for name, (dtype, _) in saved.tensors.stored.items():
        fqn, _, key = name.rpartition(".")
        parameter = parameters[fqn]
        value = _value_here(optimizer, parameter, key, dtype)
        if value is None:
            value = torch.empty_like(parameter, dtype=_dtype(dtype), requires_grad=False)
        tensors.append(LocalTensor(local_of(value), shardings.of(parameter, fqn).unpadded(), value))
        state.setdefault(fqn, {})[key] = value
    outcome = _filled(_recipe_of(saved), tensors, ledger, ranks, saved.staging) if tensors else None
    optimizer.state.clear()
    for fqn, entry in state.items():
        optimizer.state[parameters[fqn]] = entry
    return outcome


def devices_of_numbers(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, torch.device]:
    """For each parameter the device of the numbers in its state, such as `step`: the CPU, or with
    `fused` or `capturable`, whose kernels read them, the parameter's own device."""
    return {
        parameter: parameter.device
        if group.get("fused") or group.get("capturable")
        else torch.device("cpu")
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def _placed(number: Any, device: torch.device) -> Any:
    return number.to(device) if isinstance(number, torch.Tensor) else number


def _like(parameter: torch.Tensor, number: Any) -> Any:
    """A number as a tensor like the parameter, which is 0-d: on its device, a DTensor if it is."""
    tensor = _placed(number, local_of(parameter).device)
    is_like = isinstance(tensor, torch.Tensor) and tensor.shape == parameter.shape
    return dtensor_like(parameter, tensor) if is_like else tensor


def _filled(
    recipe: _modicum.Recipe,
    tensors: list[LocalTensor],
    ledger: _modicum.Ledger,
    ranks: Ranks,
    staging: Size | None,
) -> dict[str, Any]:
    """Reads this rank's part of the recipe's targets into `tensors`; returns the load's outcome."""
    to = [(tensor.sharding, destination_of(tensor.local)) for tensor in tensors]
    plan = _plan_of(recipe, to, ranks, staging)
    given_bytes, copied = memory_of({t: tensor.local for t, tensor in enumerate(tensors)})
    board = _modicum.Board(ranks)
    with ranks.watching(board):
        loaded = _modicum.load(
            plan, ranks.rank, board, ledger, given=given_bytes,
            copy=copying_into(copied) if copied else None,
            threads=cpus_of_rank(ranks.ranks_per_node),
        )  # fmt: skip
    outcome: dict[str, Any] = loaded.outcome
    return outcome
