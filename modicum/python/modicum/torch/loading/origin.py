"""Remembers from which checkpoint a model was loaded: a save writes files with the same names."""

from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakKeyDictionary

from torch import nn

from modicum.recipes import Recipe
from modicum.recipes.structure import structure_of


@dataclass(frozen=True)
class Origin:
    """The checkpoint from which a model was loaded, or as which it was saved."""

    source: str | Path | None
    """An absolute path, `org/name`, or None: all tensors were initialised."""
    text: str
    """The text of recipe.json: how the model's tensors were made from stored ones."""
    other: "Origin | None" = None
    """Serves as well, once this one has been removed."""

    def followed_by(self, saved: "Origin", *, is_next_to: bool) -> "Origin":
        """The origin after a save. `is_next_to`: whether the new checkpoint is in the same
        directory of checkpoints, which may remove the old one; otherwise the old one stays."""
        first, second = (saved, self) if is_next_to else (self, saved)
        return replace(first, other=replace(second, other=None))

    def present(self) -> "Origin":
        """This origin or, if its directory does not exist any more, the other one."""
        is_gone = Path(self.source or "").is_absolute() and not Path(self.source or "").exists()
        return self.other.present() if is_gone and self.other is not None else self


_origins: WeakKeyDictionary[nn.Module, Origin] = WeakKeyDictionary()


def remember(model: nn.Module, origin: Origin) -> None:
    """Sets the model's origin, which is kept as long as the model is alive."""
    if origin.source is not None and Path(origin.source).exists():
        origin = replace(origin, source=Path(origin.source).absolute())
    _origins[model] = origin


def remember_read(model: nn.Module, source: Path, recipe: Recipe, read: Set[str]) -> None:
    """Sets the model's origin, as after a load of `source` by the recipe, if all of the model's
    tensors that the source holds were read. `read`: canonical names."""
    structure, nodes = structure_of(model), recipe.targets
    stored = {name for name, node in nodes.items() if node["op"] not in ("alias", "caller")}
    if stored <= read and nodes.keys() <= structure.members.keys():
        made = recipe.into(structure)
        # A save writes the present values of PEFT's tensors that began as rows of the base model.
        made.targets = {n: node for n, node in made.targets.items() if n not in structure.rows}
        remember(model, Origin(source, made.text(callers=True)))


def origin_of(model: nn.Module) -> Origin | None:
    """The model's origin; None if `modicum.torch.load` has not loaded it."""
    return _origins.get(model)


@contextmanager
def keeping_origin(model: nn.Module) -> Iterator[None]:
    """A context at whose end the model has the same origin as at the begin, whatever was loaded."""
    before = origin_of(model)
    try:
        yield
    finally:
        if before is None:
            _origins.pop(model, None)
        else:
            remember(model, before)
