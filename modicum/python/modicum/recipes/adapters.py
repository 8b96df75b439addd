"""Tensors of PEFT whose first values come from the base model: copies of modules, rows of the
embedding, and norms of a weight's rows."""

from collections.abc import Container, Mapping
from dataclasses import dataclass

from modicum.recipes.dtypes import Dtypes, cast
from modicum.recipes.nodes import Array, Node, cat, cut, init
from modicum.recipes.patterns import Rules
from modicum.recipes.structure import Structure
from modicum.recipes.translation import DescribedTensors


@dataclass(frozen=True)
class RecipeRequest:
    """The targets of a recipe, and the user's rules for those that are not stored."""

    rules: Rules
    targets: DescribedTensors
    present: Container[str]
    """Names of targets that already have values."""

    def lacks_rule(self, name: str) -> bool:
        """Whether `name` is a target that has neither values nor a rule from the user. If there is
        a rule for every name, as with "init", no rule counts."""
        has_rule = not self.rules.take_all and self.rules.of(name) is not None
        return name in self.targets and name not in self.present and not has_rule


def begin_as_base(
    targets: dict[str, Node],
    structure: Structure,
    arrays: Mapping[str, Array],
    dtypes: Dtypes,
    asked: RecipeRequest,
) -> dict[str, str]:
    """Adds the tensors of PEFT that are not stored to `targets`. Copies (`modules_to_save`) and
    rows of the embedding get values of the base model's tensor, if that is in `arrays`. DoRA's
    magnitudes become zeros: the caller of the load computes them afterwards as the norms of a
    weight's rows. Returns the name of this weight by the name of the magnitude."""

    def base(name: str) -> Array | None:
        # A tied name is an alias: its values are those of the name in "of".
        return arrays.get(targets.get(name, {}).get("of", name))

    for name, original in structure.copies.items():
        array = base(original)
        if name not in targets and name not in asked.present and array is not None:
            targets[name] = cast(name, array, dtypes.of(name, name))
    for name, (weight, indices) in structure.rows.items():
        array = base(weight)
        if name not in targets and asked.lacks_rule(name) and array is not None:
            rows = [cut(0, index, index + 1, array) for index in indices]
            targets[name] = cast(name, cat(0, rows), dtypes.of(name, name))
    norms = {
        name: weight
        for name, weight in structure.norms.items()
        if name not in targets and asked.lacks_rule(name)
    }
    for name in norms:
        shape = structure.members[name].tensor.shape
        targets[name] = init("zeros", None, dtypes.of(name, name), shape)
    return norms
