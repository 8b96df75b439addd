"""Makes the C++ states that step an optimizer's parameters: for parameters on the host one state
per format, for those on devices one per format, dtype and device."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from modicum import _modicum
from modicum.errors import refusal
from modicum.torch.optim.lanes import SLOTS
from modicum.torch.optim.parts import Part
from modicum.torch.ranks.cpus import cpus_of_rank
from modicum.upstream.torch_fsdp import register

_ROWS = {row["name"]: row for row in _modicum.state_formats()}
_SCALE_BLOCK = 128  # elements of a row with one scale per 8-bit moment


def dtype_of(part: Part, name: str) -> torch.dtype:
    """The dtype of `master`, `grad` or `moment` in the part's format."""
    return getattr(torch, _ROWS[part.format][name])


def tensor_dtype(part: Part, name: str) -> torch.dtype:
    """The dtype of any state tensor, as `_modicum.AdamW.plane` has it in
    memory: 8-bit codes of second moments are unsigned."""
    if name in ("master", "master_low", "grad"):
        return dtype_of(part, name)
    dtype = dtype_of(part, "moment")
    return torch.uint8 if dtype == torch.int8 and name != "exp_avg" else dtype


def is_own_master(part: Part) -> bool:
    """Whether the parameter's own memory is the master, or its upper half."""
    return part.on_host and dtype_of(part, "master") == part.local.dtype


def has_master(part: Part) -> bool:
    """Whether a state dict has the parameter's master besides the parameter."""
    return part.local.dtype != torch.float32


def stored_of(parts: Sequence[Part], name_of: Callable[[Part], str]) -> list[_modicum.StoredState]:
    """The parameters whose state is in files: the argument of `_modicum.StateFiles`. `name_of`:
    returns a part's name in files."""
    return [
        _modicum.StoredState(
            name_of(part),
            str(part.local.dtype).removeprefix("torch."),
            [*part.parameter.shape],
            part.format,
            is_own_master(part),
        )
        for part in parts
    ]


def require_storable(part: Part, name: str) -> None:
    """Raises `UsageError` if the part's state can't be in files. `name`: its name in files."""
    if len(part.moments) > 2:
        what = "the state of AdamW with amsgrad can't be saved by modicum.torch.save"
        raise refusal("UNSUPPORTED", what, tensor=name)
    if not part.is_row_major:
        what = "the state has the strides of the parameter, which are not row-major"
        raise refusal("UNSUPPORTED", what, tensor=name)
    if dtype_of(part, "moment") != torch.int8:
        return
    row, numel = _moment_row(part.shape), part.parameter.numel()
    for first, count in part.runs:
        ends = first, first + count
        if any(at != numel and at % row % _SCALE_BLOCK != 0 for at in ends):
            what = "this layout divides blocks of 8-bit moments between ranks; their state can't "
            what += "be saved"
            expected = f"shards that end at multiples of {_SCALE_BLOCK} within a row"
            got = f"elements {ends[0]} to {ends[1]}"
            raise refusal("UNSUPPORTED", what, tensor=name, expected=expected, got=got)


def _moment_row(shape: Sequence[int]) -> int:
    """The elements of a row of 8-bit moments, of a parameter that has such rows: the same as
    `moment_row` in modicum/spec/state_format.cc."""
    row = 1
    for size in reversed(shape[1:]):
        row *= size
        if row >= _SCALE_BLOCK:
            break
    return row


def options_of(group: dict[str, Any], semantics: str, bias_correction: bool) -> Any:
    """The options of a parameter group as numbers; `_modicum` checks their ranges later."""
    for name in ("capturable", "differentiable"):
        if group.get(name):
            what = f"{name}: AdamW steps on the host, outside of any graph"
            raise refusal("UNSUPPORTED", what, expected="False", got=repr(group[name]))
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise refusal("USAGE", "betas", expected="two numbers", got=repr(betas))
    return _modicum.AdamOptions(
        semantics=semantics,
        lr=number_of("lr", group["lr"]),
        betas=(number_of("betas", betas[0]), number_of("betas", betas[1])),
        eps=number_of("eps", group["eps"]),
        weight_decay=number_of("weight_decay", group["weight_decay"]),
        decoupled=bool(group["decoupled_weight_decay"]),
        amsgrad=bool(group["amsgrad"]),
        maximize=bool(group["maximize"]),
        bias_correction=bias_correction,
    )


def number_of(name: str, value: Any) -> float:
    """The number `value`, which may be a tensor. Raises `UsageError` for any other."""
    if not isinstance(value, (str, bytes)):
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            pass
    raise refusal("USAGE", name, expected="a number", got=repr(value))


def unscale_of(optimizer: Any) -> float:
    """The inverse of the scale that a GradScaler has set on the optimizer; 1 without one."""
    scale = getattr(optimizer, "grad_scale", None)
    if scale is None:
        return 1.0
    scale = float(scale)
    unscale = 1.0 / scale if scale else math.inf
    if not (0 < scale < math.inf and unscale <= torch.finfo(torch.float32).max):
        expected = "finite and above 0, like its inverse"
        raise refusal("USAGE", "GradScaler's scale", expected=expected, got=str(scale))
    return unscale


def require_text(name: str, value: Any) -> str:
    """Returns `value`. Raises `UsageError` unless it is a string; `_modicum` checks which."""
    if not isinstance(value, str):
        raise refusal("USAGE", name, expected="a string", got=repr(value))
    return value


def make_states(
    parts: Sequence[Part],
    options: Sequence[_modicum.AdamOptions],
    ledger: _modicum.Ledger,
    seed: int,
    pin: bool,
    *,
    fork: str,
    what: str,
) -> list[tuple[_modicum.AdamW, list[Part]]]:
    """The states, each with its parts in the order of its shards. Charges all of the memory or
    none. `what`: what a `BudgetError` calls the memory."""
    plans = _state_plans(parts, fork)
    ledger.require_room(_footprint(plans, options), what)  # all must fit, or none
    pins, unpins = _registrar(pin)
    return [
        (
            _modicum.AdamW(
                shards, options, ledger=ledger, seed=seed, pin=pins, unpin=unpins, **arguments
            ),
            state_parts,
        )
        for state_parts, shards, arguments in plans
    ]


def footprint(
    parts: Sequence[Part], options: Sequence[_modicum.AdamOptions], *, fork: str
) -> Counter[str]:
    """The bytes that `make_states` would charge, by purpose."""
    return _footprint(_state_plans(parts, fork), options)


_StatePlans = list[tuple[list[Part], list[_modicum.AdamWShard], dict[str, Any]]]
"""Of each state the parts, their shards, and the other arguments with which it is made."""


def _state_plans(parts: Sequence[Part], fork: str) -> _StatePlans:
    by_state: dict[tuple[Any, ...], list[Part]] = {}
    for part in parts:
        where = () if part.on_host else (part.local.dtype, part.local.device)
        by_state.setdefault((part.format, *where), []).append(part)
    return [
        (state_parts, [*map(_shard_of, state_parts)], _arguments(state_parts[0], fork))
        for state_parts in by_state.values()
    ]


def _footprint(plans: _StatePlans, options: Sequence[_modicum.AdamOptions]) -> Counter[str]:
    needed: Counter[str] = Counter()
    for _, shards, arguments in plans:
        needed.update(_modicum.adamw_footprint(shards, options, **arguments))
    return needed


def _shard_of(part: Part) -> _modicum.AdamWShard:
    """On the host the state steps the parameter in place as the master, or writes to it (`out`)."""
    master = out = None
    if part.on_host and part.local.numel() > 0:
        master, out = (part.local, None) if is_own_master(part) else (None, part.local)
    return _modicum.AdamWShard(part.name, part.shape, part.runs, part.group, master, out)


def _arguments(part: Part, fork: str) -> dict[str, Any]:
    """Arguments of the state that has `part`."""
    slots = 0 if part.on_host else SLOTS
    return {"format": part.format, "slots": slots, "threads": cpus_of_rank(), "fork": fork}


def _registrar(pin: bool) -> tuple[Any, Any]:
    """The functions that pin and unpin memory, called with (address, bytes); None: no pinning."""
    if not pin:
        return None, None
    if not torch.cuda.is_available():
        raise refusal("UNSUPPORTED", "pinning needs CUDA: use MemoryPolicy(pin=False)")
    cudart = torch.cuda.cudart()
    return partial(register, cudart), lambda address, _: cudart.cudaHostUnregister(address)
