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


StoredStates = list[tuple[str, str, list[int], str, bool]]
"""(name, dtype, shape, format, whether it is its own master) of each parameter whose state is in
files: the argument of `_modicum.StateFiles`."""


def stored_of(parts: Sequence[Part], name_of: Callable[[Part], str]) -> StoredStates:
    """`name_of`: returns a part's name in files. The parts' `format` must be set."""
    return [
        (
            name_of(part),
            str(part.local.dtype).removeprefix("torch."),
            [*part.parameter.shape],
            part.format,
            is_own_master(part),
        )
        for part in parts
    ]


def require_storable(part: Part, name: str) -> None:
    """Raises `UsageError` if the part's state can't be in files. `format` and `moments` must be
    set. `name`: the part's name in files."""
    if len(part.moments) > 2:
        what = "the state of AdamW with amsgrad can't be saved by modicum.torch.save"
        raise refusal("UNSUPPORTED", what, tensor=name)
    if not part.is_row_major:
        what = "the state has the strides of the parameter, which are not row-major"
        raise refusal("UNSUPPORTED", what, tensor=name)
    if dtype_of(part, "moment") != torch.int8:
        return
    row, numel = part.shape[-1], part.parameter.numel()
    for first, count in part.runs:
        ends = first, first + count
        if any(at != numel and at % row % _SCALE_BLOCK != 0 for at in ends):
            what = "this layout divides blocks of 8-bit moments between ranks; their state can't "
            what += "be saved"
            expected = f"shards that end at multiples of {_SCALE_BLOCK} within a row"
            got = f"elements {ends[0]} to {ends[1]}"
            raise refusal("UNSUPPORTED", what, tensor=name, expected=expected, got=got)


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
        lr=_number("lr", group["lr"]),
        betas=(_number("betas", betas[0]), _number("betas", betas[1])),
        eps=_number("eps", group["eps"]),
        weight_decay=_number("weight_decay", group["weight_decay"]),
        decoupled=bool(group["decoupled_weight_decay"]),
        amsgrad=bool(group["amsgrad"]),
        maximize=bool(group["maximize"]),
        bias_correction=bias_correction,
    )


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise refusal("USAGE", name, expected="a number", got=repr(value)) from None


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


def require_ledger(ledger: Any) -> _modicum.Ledger:
    """Returns `ledger`, or a new one for None. Raises `UsageError` unless it is a ledger."""
    if ledger is not None and not isinstance(ledger, _modicum.Ledger):
        raise refusal("USAGE", "ledger", expected="a modicum.Ledger", got=repr(ledger))
    return ledger or _modicum.Ledger()


def require_seed(seed: Any) -> int:
    """Returns `seed`. Raises `UsageError` unless it is an unsigned 64-bit integer."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 64:
        raise refusal("USAGE", "seed", expected="an integer from 0 to 2**64 - 1", got=repr(seed))
    return seed


def make_states(
    parts: Sequence[Part],
    options: Sequence[_modicum.AdamOptions],
    state_format: str,
    ledger: _modicum.Ledger,
    seed: int,
    pin: Any,
    *,
    fork: str,
    what: str,
) -> dict[str, _modicum.AdamW]:
    """Makes the states, by key, and sets `format`, `state` and `shard` of each part. `state_format`
    determines the format of a part by its dtype and shape. Charges all of the memory or none.
    `what`: what a `BudgetError` calls the memory."""
    shards, made_with = _grouped(parts, options, state_format, fork)
    ledger.require_room(_footprint(shards, made_with, options), what)  # all must fit, or none
    pins, unpins = _registrar(pin)
    return {
        key: _modicum.AdamW(
            shard_list, options, ledger=ledger, seed=seed, pin=pins, unpin=unpins, **made_with[key]
        )
        for key, shard_list in shards.items()
    }


def footprint(
    parts: Sequence[Part],
    options: Sequence[_modicum.AdamOptions],
    state_format: str,
    *,
    fork: str,
) -> Counter[str]:
    """The bytes that `make_states` would charge, by purpose. Sets `format`, `state` and `shard` of
    each part, too."""
    return _footprint(*_grouped(parts, options, state_format, fork), options)


Shards = dict[str, list[Any]]
MadeWith = dict[str, dict[str, Any]]


def _footprint(
    shards: Shards, made_with: MadeWith, options: Sequence[_modicum.AdamOptions]
) -> Counter[str]:
    needed: Counter[str] = Counter()
    for key, shard_list in shards.items():
        needed.update(_modicum.adamw_footprint(shard_list, options, **made_with[key]))
    return needed


def _grouped(
    parts: Sequence[Part], options: Sequence[_modicum.AdamOptions], state_format: str, fork: str
) -> tuple[Shards, MadeWith]:
    """The shards of each state, and the arguments with which it is made. Sets `format`, `state` and
    `shard` of each part."""
    _modicum.adamw_footprint([], options, format=state_format)  # refuses an unknown format
    shards: Shards = {}
    made_with: MadeWith = {}
    threads = cpus_of_rank()
    for part in parts:
        dtype = str(part.local.dtype).removeprefix("torch.")
        part.format = _modicum.state_format_of(dtype, part.shape, state_format)
        part.state = part.format
        if not part.on_host:
            part.state += f" of {part.local.dtype} on {part.local.device}"
        # On the host the state steps the parameter in place as the master, or writes to it (`out`).
        master = out = None
        if part.on_host and part.local.numel() > 0:
            master, out = (part.local, None) if is_own_master(part) else (None, part.local)
        of_state = shards.setdefault(part.state, [])
        part.shard = len(of_state)
        of_state.append((part.name, part.shape, part.runs, part.group, master, out))
        slots = 0 if part.on_host else SLOTS
        made_with[part.state] = {
            "format": part.format, "slots": slots, "threads": threads, "fork": fork,
        }  # fmt: skip
    return shards, made_with


def _registrar(pin: Any) -> tuple[Any, Any]:
    """The functions that pin and unpin memory, called with (address, bytes); None: no pinning."""
    if pin is False or pin is None:
        return None, None
    if pin is True and not torch.cuda.is_available():
        raise refusal("UNSUPPORTED", "pinning needs CUDA: use pin=False")
    cudart = torch.cuda.cudart() if pin is True else pin
    return partial(register, cudart), lambda address, _: cudart.cudaHostUnregister(address)
