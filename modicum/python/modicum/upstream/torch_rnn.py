"""torch's recurrent modules: their private weak references to their own parameters, by which a
forward finds out whether a parameter was replaced."""

import operator
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from modicum.upstream.known import KnownFacts
from modicum.upstream.torch_core import local_of


@contextmanager
def without_weak_references(model: nn.Module) -> Iterator[None]:
    """A context in which LSTM, GRU and RNN have no weak references to their parameters, so that
    these can get other memory. Raises `UsageError` if this torch's modules keep other ones."""
    modules = [m for m in model.modules() if isinstance(m, nn.RNNBase) and _refers(m)]
    if modules:
        KNOWN.require()
    before = [_addresses_of(module) for module in modules]
    for module in modules:
        _drop(module)
    try:
        yield
    finally:
        for module, addresses in zip(modules, before, strict=True):
            _restore(module, moved=_addresses_of(module) != addresses)


def _refers(module: nn.Module) -> bool:
    return any(weakref.getweakrefs(parameter) for parameter in module.parameters(recurse=False))


def _addresses_of(module: nn.Module) -> list[int]:
    locals_ = (local_of(parameter) for parameter in module.parameters(recurse=False))
    return [0 if local.is_meta else local.data_ptr() for local in locals_]


def _drop(module: Any) -> None:
    module._flat_weight_refs = []


def _restore(module: Any, *, moved: bool) -> None:
    """`moved`: whether the parameters have other memory, which CUDA wants to be in one piece."""
    if moved:
        module._init_flat_weights()
    else:
        weights = module._flat_weights
        module._flat_weight_refs = [None if w is None else weakref.ref(w) for w in weights]


# ---- known facts


def _are_dropped() -> bool:
    module = nn.RNN(1, 1, device="meta")
    had = _refers(module)
    _drop(module)
    return had and not _refers(module)


def _are_restored() -> bool:
    module: Any = nn.RNN(1, 1, device="meta")
    _drop(module)
    weights = []
    for moved in (False, True):
        _restore(module, moved=moved)
        weights.append([ref() for ref in module._flat_weight_refs])
    expected = [*module.parameters()]
    return all(
        len(found) == len(expected) and all(map(operator.is_, found, expected))
        for found in (*weights, module._flat_weights)
    )


KNOWN = KnownFacts(
    "torch",
    ("2.13.0",),
    {
        "RNNBase keeps weak references in _flat_weight_refs": _are_dropped,
        "RNNBase._init_flat_weights() refers to the present parameters": _are_restored,
    },
)
