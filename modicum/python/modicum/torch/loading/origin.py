"""Remembers from which checkpoint a model was loaded: a save writes files with the same names."""

from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from modicum.errors import refusal
from modicum.recipes import Recipe
from modicum.recipes.recipe import text_with_callers, with_dtypes_of
from modicum.recipes.structure import has_adapters, inside_wrappers, structure_of
from modicum.upstream.wrappers import canonical

_ATTRIBUTE = "modicum_origin"


@dataclass
class _NewestSave:
    """The newest save of a model or of one of its copies, which share this object."""

    saved: "Origin | None" = None


@dataclass(frozen=True)
class Origin:
    """The checkpoint from which a model was loaded, or as which it was saved."""

    source: str | Path | None
    """An absolute path, `org/name`, or None: all tensors were initialised."""
    text: str
    """The text of recipe.json: how the model's tensors were made from stored ones."""
    other: "Origin | None" = None
    """Serves as well, once this one has been removed."""
    later: _NewestSave = field(default_factory=_NewestSave, repr=False, compare=False)
    """Serves after `other`: a save of a copy of the model may have removed both."""

    def followed_by(self, saved: "Origin", *, is_next_to: bool) -> "Origin":
        """The origin after a save. `is_next_to`: whether the new checkpoint is in the same
        directory of checkpoints, which may remove the old one; otherwise the old one stays."""
        saved = self.later.saved = replace(saved, later=self.later)
        first, second = (saved, self) if is_next_to else (self, saved)
        return replace(first, other=replace(second, other=None))

    def present(self) -> "Origin":
        """This origin or, if its directory does not exist any more, the first of the others that is
        there; if none is, this one."""
        origins = (self, self.other, self.later.saved)
        return next((origin for origin in origins if origin and not origin._is_gone), self)

    @property
    def _is_gone(self) -> bool:
        path = Path(self.source or "")
        return path.is_absolute() and not path.exists()

    def __deepcopy__(self, memo: Any) -> "Origin":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a pickled model can be read without Modicum


def remember(model: nn.Module, origin: Origin) -> None:
    """Sets the model's origin. It is an attribute, which a deep copy of the model has, too; a model
    inside wrappers of torch.compile shares it with these, since its names are the same."""
    if origin.source is not None and Path(origin.source).exists():
        origin = replace(origin, source=Path(origin.source).absolute())
    vars(inside_wrappers(model))[_ATTRIBUTE] = origin


def remember_read(model: nn.Module, source: Path, recipe: Recipe, read: Set[str]) -> None:
    """Sets the model's origin, as after a load of `source` by the recipe, if all of the model's
    tensors that the source holds were read. `read`: canonical names."""
    structure, nodes = structure_of(model), recipe.targets
    stored = {name for name, node in nodes.items() if node["op"] not in ("alias", "caller")}
    if stored <= read and nodes.keys() <= structure.members.keys():
        remembered = with_dtypes_of(recipe, structure)
        # A save writes the present values of PEFT's tensors that began as rows of the base model.
        rows, targets = structure.rows, remembered.targets
        remembered.targets = {n: node for n, node in targets.items() if n not in rows}
        remember(model, Origin(source, text_with_callers(remembered)))


def origin_of(model: nn.Module) -> Origin | None:
    """The model's origin; None if `modicum.torch.load` has not loaded it."""
    origin: Origin | None = vars(inside_wrappers(model)).get(_ATTRIBUTE)
    return origin


def loaded_in(model: nn.Module) -> nn.Module:
    """The module that was loaded: the model or, if this is a wrapper with the same tensors such as
    DistributedDataParallel, the module in it. The model if none was loaded. Raises `UsageError` if
    the wrapper has more tensors."""
    modules = [*model.named_modules()] if isinstance(model, nn.Module) else []
    loaded = [(name, module) for name, module in modules if origin_of(module) is not None]
    if not loaded or any(has_adapters(module) for _, module in modules):
        return model
    name, inner = loaded[0]
    inside = {id(member.tensor) for member in structure_of(inner).members.values()}
    for member in structure_of(model).members.values():
        if id(member.tensor) not in inside:
            what = "only a part of the model was loaded by modicum.torch.load, and this tensor is "
            what += "outside of it: pass the module that was loaded"
            expected = f"model.{canonical(name)}"
            raise refusal("USAGE", what, tensor=member.name, expected=expected)
    return inner


def inside_ddp(model: nn.Module) -> nn.Module:
    """The module in DistributedDataParallel, whose names are those of a checkpoint; torch.compile
    may be around either. Any other model unchanged."""
    inner = inside_wrappers(model) if isinstance(model, nn.Module) else model
    is_wrapper = isinstance(inner, nn.parallel.DistributedDataParallel)
    return inside_ddp(inner.module) if is_wrapper else model


@contextmanager
def keeping_origin(model: nn.Module) -> Iterator[None]:
    """A context at whose end the model has the same origin as at the begin, whatever was loaded."""
    before = origin_of(model)
    try:
        yield
    finally:
        if before is None:
            vars(inside_wrappers(model)).pop(_ATTRIBUTE, None)
        else:
            remember(model, before)
