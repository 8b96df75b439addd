"""What a model was loaded from: a save writes the files of the same checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

from torch import nn


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a model's tensors come from."""

    source: str | Path | None
    """None: every tensor was initialised."""
    text: str
    """recipe.json: how the tensors were made of the stored ones."""


_origins: WeakKeyDictionary[nn.Module, Origin] = WeakKeyDictionary()


def remember(model: nn.Module, origin: Origin) -> None:
    """Notes it as long as the model is alive."""
    _origins[model] = origin


def origin_of(model: nn.Module) -> Origin | None:
    """None for a model that Modicum has not loaded from files."""
    return _origins.get(model)


@contextmanager
def keeping_origin(model: nn.Module) -> Iterator[None]:
    """Loads within it do not change what the model is remembered to come from."""
    before = origin_of(model)
    try:
        yield
    finally:
        if before is None:
            _origins.pop(model, None)
        else:
            remember(model, before)
