"""The tensors that a load fills. From its first byte until it has succeeded, the values that it
overwrites are undefined: a save refuses them."""

import math
from collections.abc import Iterator, Set
from contextlib import contextmanager

import torch
from torch import nn

from modicum.errors import BudgetError, UsageError, refusal
from modicum.recipes.structure import inside_wrappers
from modicum.torch.loading.goal import Model
from modicum.torch.shards.tensors import ModelTensor

_ATTRIBUTE = "modicum_overwritten"


# Of builtin types, so that a pickled model can be read without Modicum.
_Filled = tuple[frozenset[str], dict[str, int]]
"""The tensors of the last load, by canonical name, and those whose values are undefined: name ->
the tensor's version counter, which each write through torch increments, as by `load_state_dict`."""


@contextmanager
def overwriting(model: Model, rank: int, names: Set[str] = frozenset()) -> Iterator[None]:
    """A context in which the values of the tensors `names` are replaced; by default of those that
    the last load has filled. An exception in the context leaves them undefined, unless this rank
    refused its arguments or lacked the memory, which it does before it reads the first byte.

    Raises `UsageError`, before the context begins, if another tensor is undefined, which would stay
    so."""
    names = frozenset(names or _filled(model.module)[0])
    for name in _undefined(model):
        if name not in names:
            what = "the tensor's value is undefined since a load of it has failed, and the source "
            what += "lacks it: load a checkpoint that has it"
            raise refusal("MISMATCH", what, tensor=name)
    try:
        yield
    except BaseException as error:
        is_early = isinstance(error, BudgetError | UsageError)
        if not is_early or getattr(error, "culprit_rank", None) not in (None, rank):
            _set(model.module, (names, _versions(model, names)))
        raise
    _set(model.module, (names, {}))


def defined(module: nn.Module, names: Set[str]) -> None:
    """Call after another load than `modicum.torch.load` has filled the tensors `names`."""
    filled, undefined = _filled(module)
    if undefined:
        left = {name: version for name, version in undefined.items() if name not in names}
        _set(module, (filled, left))


def require_defined(model: Model) -> None:
    """Raises `UsageError` if the last load into the model has failed and a tensor that it was to
    overwrite has not been written since."""
    for name in _undefined(model):
        what = "the model's values are undefined since a load into it has failed"
        raise refusal("USAGE", what, tensor=name, expected="a load that succeeds before a save")


def _undefined(model: Model) -> list[str]:
    """The tensors whose values are undefined, and that torch has not written since."""
    undefined = _filled(model.module)[1]
    return [
        name
        for name, entry in model.tensors.items()
        if name in undefined and _version(entry) == undefined[name]
    ]


@torch.no_grad()
def fill_undefined(module: nn.Module) -> bool:
    """Makes undefined floating-point values NaN. Returns whether the model has undefined values."""
    filled, undefined = _filled(module)
    if undefined:
        model = Model.of(module, originals=True)
        for name, entry in model.tensors.items():
            if name in undefined and entry.local.is_floating_point():
                entry.local.fill_(math.nan)
        _set(module, (filled, _versions(model, undefined.keys())))
    return bool(undefined)


def _filled(module: nn.Module) -> _Filled:
    found: _Filled = vars(inside_wrappers(module)).get(_ATTRIBUTE, (frozenset(), {}))
    return found


def _set(module: nn.Module, filled: _Filled) -> None:
    vars(inside_wrappers(module))[_ATTRIBUTE] = filled


def _versions(model: Model, names: Set[str]) -> dict[str, int]:
    return {
        name: _version(entry)
        for name, entry in model.tensors.items()
        if name in names and not entry.tensor.is_meta
    }


def _version(entry: ModelTensor) -> int:
    """0 for tensors of inference mode, which count no versions."""
    return 0 if entry.tensor.is_inference() else entry.tensor._version
