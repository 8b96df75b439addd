"""Reads and validates a parameter's values in a state dict, or in an entry of `state` that a
program has changed. The optimizer sets them only after all are valid."""

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch

from modicum.errors import refusal
from modicum.torch.optim.parts import Part
from modicum.upstream.torch_core import local_of

IMPLEMENTATION = {"foreach": None, "capturable": False, "differentiable": False, "fused": None}
"""Group options that select one of torch's implementations, with torch's defaults."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_CHUNK = 1 << 15  # elements; a float32 copy of a piece is negligible memory

Values = dict[str, Any]
"""`step`, and one-dimensional tensors by name. A moment of None is all zeros."""
NotedEntry = Mapping[str, tuple[Any, int]]
"""`Slot.entry`."""


def chunks(line: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """(first element, elements) of consecutive pieces of at most 2^15 elements."""
    for at in range(0, line.numel(), _CHUNK):
        yield at, line[at : at + _CHUNK]


# ---- groups


def merged_groups(state_dict: Any, param_groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups `param_groups`, updated by a deep copy of the options in `state_dict`."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        keys, got = "keys 'state' and 'param_groups'", _keys_of(state_dict)
        raise refusal("USAGE", "the state dict", expected=keys, got=got)
    groups = state_dict["param_groups"]
    if not all(isinstance(group, Mapping) and "params" in group for group in groups):
        raise refusal("USAGE", "a parameter group of the state dict lacks 'params'")
    lengths = [len(group["params"]) for group in groups]
    if lengths != (expected := [len(group["params"]) for group in param_groups]):
        what = "the state dict has other parameter groups"
        raise refusal("MISMATCH", what, expected=str(expected), got=str(lengths))
    left_out = {"params", "param_names", *IMPLEMENTATION}
    merged = []
    for group, new in zip(param_groups, groups, strict=True):
        if new.get("amsgrad", group["amsgrad"]) != group["amsgrad"]:
            amsgrad = str(group["amsgrad"])
            got = str(new["amsgrad"])
            raise refusal("MISMATCH", "amsgrad of the state dict", expected=amsgrad, got=got)
        options = {key: value for key, value in new.items() if key not in left_out}
        merged.append(group | deepcopy(options))
    return merged


def _keys_of(value: Any) -> str:
    return str(sorted(map(str, value))) if isinstance(value, Mapping) else type(value).__name__


def saved_entries(state_dict: Mapping[str, Any]) -> list[Any]:
    """The entry of each parameter in a state dict, in the groups' order; {} if it has none."""
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    return [state_dict["state"].get(key, {}) for key in keys]


# ---- values


def saved_values(part: Part, saved: Any) -> Values:
    """The values of a parameter in a state dict. An empty entry means that no step was made; an
    entry with a step or a moment must have all of them."""
    if not isinstance(saved, Mapping):
        got = _keys_of(saved)
        raise refusal("USAGE", "its state", tensor=part.name, expected="a dict", got=got)
    values: Values = {"step": _step(part, saved.get("step", 0)), **dict.fromkeys(part.moments)}
    has_any = values["step"] > 0 or any(saved.get(name) is not None for name in part.moments)
    for name in part.moments if has_any else ():
        values[name] = _checked(part, saved, name)
    if has_any and "step" not in saved:
        raise refusal("MISMATCH", "its state lacks 'step'", tensor=part.name)
    # torch's optimizers cast a master that they load to the parameter's dtype, and never step it.
    if getattr(saved.get("master"), "dtype", None) == torch.float32:
        values["master"] = _checked(part, saved, "master")
    return values


def entry_values(part: Part, entry: Any, noted: NotedEntry) -> Values:
    """The values that a program has set in an entry of `state` since it was `noted`. An empty entry
    restarts the parameter's state from zero, as in torch's optimizers."""
    if not entry:
        return {"step": 0, **dict.fromkeys(part.moments)}
    values: Values = {}
    if "step" not in entry:
        raise refusal("MISMATCH", "its state lacks 'step'", tensor=part.name)
    values["step"] = _step(part, entry["step"])
    for name in part.moments:
        if name in entry and not _is_same(entry, name, noted):
            values[name] = _checked(part, entry, name)
        elif name not in entry and name in noted:
            raise refusal("MISMATCH", f"its state lacks '{name}'", tensor=part.name)
    return values


def is_noted(entry: Any, noted: NotedEntry) -> bool:
    """Whether an entry of `state` has exactly the tensors that the optimizer has put there, with
    unchanged addresses. Values are not compared."""
    return (
        entry is not None
        and len(entry) == len(noted)
        and all(_is_same(entry, name, noted) for name in noted)
    )


def _is_same(entry: Any, name: str, noted: NotedEntry) -> bool:
    if name not in noted or name not in entry:
        return False
    value, address = noted[name]
    return entry[name] is value and address_of(value) == address


def address_of(value: torch.Tensor | None) -> int:
    """The address of this rank's elements; 0 for None."""
    return 0 if value is None else local_of(value).data_ptr()


def _is_absent(value: Any) -> bool:
    """Whether a state dict lacks a value: torch.distributed.checkpoint unflattens it to {}."""
    return value is None or (isinstance(value, Mapping) and not value)


def is_begun(values: Values) -> bool:
    """Whether a parameter's values differ from the initial ones, step 0 and zeros."""
    return values["step"] > 0 or any(
        isinstance(value, torch.Tensor) and bool(value.any())
        for name, value in values.items()
        if name not in ("step", "master")
    )


def _step(part: Part, value: Any) -> int:
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not (0 <= number < 1 << 63 and number.is_integer()):
        expected = "a whole number, 0 or more and below 2**63"
        raise refusal("MISMATCH", "its step", tensor=part.name, expected=expected, got=repr(value))
    return int(number)


def _checked(part: Part, saved: Mapping[str, Any], name: str) -> torch.Tensor:
    """This rank's elements of a tensor. Raises `UsageError` unless they are finite as float32 and,
    in second moments, not negative."""
    value = saved.get(name)
    if not isinstance(value, torch.Tensor):
        is_absent = _is_absent(value)
        what = f"its state lacks '{name}'" if is_absent else f"its {name} is not a tensor"
        raise refusal("MISMATCH", what, tensor=part.name)
    line = part.local_like(value, name)
    if line.is_meta or line.dtype not in _DTYPES:
        expected = "float32, bfloat16, float16 or float64 in memory"
        got = f"{line.dtype} on {line.device}"
        raise refusal("MISMATCH", f"its {name}", tensor=part.name, expected=expected, got=got)
    line = line.to("cpu")
    least = -math.inf if name in ("exp_avg", "master") else 0.0
    for at, chunk in chunks(line):
        piece = chunk.float()
        low, high = (bound.item() for bound in piece.aminmax())  # both are NaN if any element is
        if math.isfinite(low) and math.isfinite(high) and low >= least:
            continue
        bad = ~piece.isfinite() | (piece < least)
        first = int(bad.nonzero()[0])
        expected = "finite values" + (", 0 or more" if least == 0 else "")
        got = f"{piece[first].item()} at local element {at + first}"
        raise refusal("MISMATCH", f"its {name}", tensor=part.name, expected=expected, got=got)
    return line
