"""Translates stored tensors to index maps of model tensors, by transformers' conversion mapping.

The mapping's own objects match names (`rename_source_key`). The order of names, their groups and
the fallbacks are implemented here, as in `transformers.core_model_loading`:

    stored names, naturally sorted      experts.0.up  experts.1.up  ...  experts.10.up
      renamings, then converters        a converter maps experts.*.up to experts.gate_up
    groups by first target              {experts.gate_up: {pattern: [arrays in order]}}
      the converter's operations        operations.py
    index maps by target                checked against the model's shapes

Does not import torch.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from modicum._modicum import RecipeBuilder
from modicum.errors import UsageError, refusal
from modicum.recipes.nodes import Array, Shape, stored, stored_under, with_rows
from modicum.recipes.operations import Chain, Value, Values, nodes_of

DescribedTensors: TypeAlias = Mapping[str, tuple[str, Shape]]  # (dtype, shape) by name


@dataclass
class Translation:
    """The result of a translation."""

    arrays: dict[str, Array] = field(default_factory=dict)  # by target
    # By target: the first target of its group, to whose dtype the group's targets are cast.
    first: dict[str, str] = field(default_factory=dict)
    # Stored names from which no element is used: an operation consumes the tensor, or its target
    # has another shape and is left out.
    dropped: list[str] = field(default_factory=list)
    # By stored name that matches no target: the names that its targets would have in the model.
    unexpected: dict[str, list[str]] = field(default_factory=dict)
    # By stored name: its target, if another stored tensor already makes that target.
    doubled: dict[str, str] = field(default_factory=dict)
    # By target that has another number of rows than stored: the stored number.
    grown: dict[str, int] = field(default_factory=dict)

    def renamed(self, names: Mapping[str, str]) -> "Translation":
        """This translation with other names of the targets. `names`: the new ones, by old name."""
        return Translation(
            {names[key]: array for key, array in self.arrays.items()},
            {names[key]: names[first] for key, first in self.first.items()},
            self.dropped,
            self.unexpected,
            {name: names[key] for name, key in self.doubled.items()},
            {names[key]: rows for key, rows in self.grown.items()},
        )

    def add(self, part: "Translation") -> None:
        """Adds the translation of another part of a model."""
        self.arrays |= part.arrays
        self.first |= part.first
        self.dropped += part.dropped
        self.unexpected |= part.unexpected
        self.doubled |= part.doubled
        self.grown |= part.grown


@dataclass
class _Group:
    """The stored tensors from which one target is made, or from which a converter makes several
    targets."""

    converter: Any  # None: the stored tensor is the target
    collected: dict[str, list[Array]] = field(default_factory=dict)  # by source pattern


def natural_key(name: str) -> list[tuple[int, int] | tuple[int, str] | tuple[int, str, int]]:
    """The sort key by which names are matched and experts stacked: "2" before "10"."""
    key: list[tuple[int, int] | tuple[int, str] | tuple[int, str, int]] = []
    for part in name.split("."):
        letters = part.rstrip("0123456789")
        digits = part[len(letters) :]
        if part.isdigit():
            key.append((0, int(part)))
        else:
            key.append((1, letters, int(digits)) if digits else (1, letters))
    return key


def _is_a(transform: Any, class_name: str) -> bool:
    return any(cls.__name__ == class_name for cls in type(transform).__mro__)


class _Names:
    """Renames stored names. Names must be passed in order: some renamings keep state."""

    def __init__(
        self, transforms: Iterable[Any], targets: DescribedTensors, base_prefix: str
    ) -> None:
        transforms = list(transforms)
        self._renamings = [t for t in transforms if _is_a(t, "WeightRenaming")]
        self._converters = [t for t in transforms if _is_a(t, "WeightConverter")]
        for transform in transforms:
            name = type(transform).__name__
            if name != "WeightConverter" and not _is_a(transform, "WeightRenaming"):
                raise refusal("UNSUPPORTED", f"unknown weight transform '{name}'")
        # If several converters share a pattern, the last one applies.
        self.converter_of = {p: c for c in self._converters for p in c.source_patterns}
        self.targets = targets
        self._base_prefix = base_prefix

    def _with_base_prefix(self, name: str) -> str:
        """`name` with the base model's prefix added or removed, if there is a target of the
        resulting name; else `name`."""
        if not self._base_prefix:
            return name
        if name.startswith(self._base_prefix):
            # The dot matches any character, as in transformers.
            shorter = re.sub(f"^{self._base_prefix}.", "", name, count=1)
            if shorter in self.targets:
                return shorter
        longer = f"{self._base_prefix}.{name}"
        return longer if longer in self.targets else name

    def rename(self, name: str) -> tuple[str, str | None]:
        """(the target's name in the model, or that of the first target of a converter; the source
        pattern of the converter that matched, or None)."""
        renamed, pattern = name, None
        for renaming in self._renamings:
            renamed, _ = renaming.rename_source_key(renamed)
        for converter in self._converters:
            renamed, pattern = converter.rename_source_key(renamed)
            if pattern is not None:
                break
        renamed = self._with_base_prefix(renamed)
        if renamed not in self.targets and name in self.targets:
            return self._with_base_prefix(name), None
        return renamed, pattern


def _collect(
    stored_tensors: DescribedTensors, keys: Mapping[str, str], names: _Names, result: Translation
) -> dict[str, _Group]:
    """Groups the stored tensors by their first target."""
    groups: dict[str, _Group] = {}
    builder = RecipeBuilder(stored_tensors)
    for name in sorted(stored_tensors, key=lambda name: natural_key(keys.get(name, name))):
        target, pattern = names.rename(keys.get(name, name))
        converter = None if pattern is None else names.converter_of[pattern]
        if target not in names.targets:
            patterns = [""] if converter is None else converter.target_patterns
            result.unexpected[name] = [target.replace(patterns[0], p) for p in patterns]
            continue
        group = groups.setdefault(target, _Group(converter))
        # Without a converter a target has exactly one stored tensor.
        is_plain = converter is None and not group.collected
        if not is_plain and (group.converter is None or converter is None):
            result.doubled[name] = target
            continue
        group.collected.setdefault(pattern or name, []).append(stored(name, builder))
    return groups


def _full_names(first_target: str, values: Values) -> dict[str, Value]:
    """Replaces the converter's target patterns by names in the model: each gets the prefix and
    suffix that the first target has around its own pattern."""
    whole = first_target.replace("*.", "0.")
    for pattern in values:
        if pattern in whole:
            before, _, after = whole.partition(pattern)
            return {before + name + after: value for name, value in values.items()}
    return values


def _convert(first_target: str, group: _Group, chain: Chain, result: Translation) -> None:
    values: Values = dict(group.collected)
    try:
        for op in group.converter.operations:
            values = nodes_of(op, values, chain)
    except UsageError:
        _refuse_gaps(first_target, group)
        raise
    used: set[str] = set()
    for name, value in _full_names(first_target, values).items():
        if not isinstance(value, Array) and len(value) != 1:
            raise refusal(
                "MISMATCH", "a conversion makes several tensors for one target", tensor=name
            )
        array = value if isinstance(value, Array) else value[0]
        used.update(stored_under(array.node))
        if name in result.arrays:
            raise refusal("MISMATCH", "two conversions make the same target", tensor=name)
        result.arrays[name] = array
        result.first[name] = first_target
    result.dropped += [array.node["name"] for array in chain.dropped]
    accounted = used.union(array.node["name"] for array in chain.dropped + chain.scales)
    for array in (array for arrays in group.collected.values() for array in arrays):
        if array.node["name"] not in accounted:
            what = f"the conversion into '{first_target}' uses no element of a stored tensor"
            raise refusal("MISMATCH", what, tensor=array.node["name"])


def _refuse_gaps(first_target: str, group: _Group) -> None:
    """Raises MISMATCH, naming the missing tensor, if one source pattern has fewer tensors than
    another."""
    most = max(group.collected, key=lambda pattern: len(group.collected[pattern]))
    complete = group.collected[most]
    for pattern, arrays in group.collected.items():
        if len(arrays) == len(complete):
            continue
        there = {array.node["name"] for array in arrays}
        # The names of both patterns differ only after the "*", as in experts.0.up, experts.0.gate.
        ends = most.rpartition("*")[2], pattern.rpartition("*")[2]
        for array in complete:
            wanted = array.node["name"].replace(*ends)
            if wanted not in there:
                what = f"the source lacks a tensor that '{first_target}' is made of: complete "
                what += "the checkpoint, since missing= does not fill a part of a tensor"
                expected = f"as many as of {most}, {len(complete)}"
                raise refusal(
                    "MISMATCH", what, tensor=wanted, expected=expected, got=str(len(arrays))
                )


def _check_shape(name: str, array: Array, targets: DescribedTensors) -> None:
    if name not in targets:
        sources = ", ".join(sorted(set(stored_under(array.node)))[:3])
        what = f"a conversion of {sources} makes a tensor that is not in the model"
        raise refusal("MISMATCH", what, tensor=name)
    shape = targets[name][1]
    if array.shape != shape:
        raise refusal(
            "MISMATCH",
            "the stored tensors give another shape than the model's",
            tensor=name,
            expected=str(list(shape)),
            got=str(list(array.shape)),
        )


def _has_other_rows(array: Array, shape: Shape) -> bool:
    """Whether the shapes differ only in their first dim."""
    return len(shape) > 0 and array.shape[:1] != shape[:1] and array.shape[1:] == shape[1:]


def translate(
    transforms: Iterable[Any],
    stored_tensors: DescribedTensors,
    targets: DescribedTensors,
    *,
    config: Any = None,
    base_model_prefix: str = "",
    keys: Mapping[str, str] | None = None,
    may_differ: Callable[[str], bool] = lambda target: False,
    may_grow: Callable[[str], bool] = lambda target: False,
) -> Translation:
    """Applies `transforms` (of `get_model_conversion_mapping`) to the stored tensors for a model
    with these targets. Pass a new list each time: its renamings keep state.

    Args:
        keys: by stored name, the name to match in place of it.
        may_differ: returns whether a target is left out, instead of an error, if the stored tensors
            give another shape.
        may_grow: returns whether a target may have more or fewer rows than stored; additional rows
            repeat the first ones.
    """
    result = Translation()
    names = _Names(transforms, targets, base_model_prefix)
    shapes = {name: shape for name, (_, shape) in targets.items()}
    for target, group in _collect(stored_tensors, keys or {}, names, result).items():
        if group.converter is None:
            (arrays,) = group.collected.values()
            result.arrays[target], result.first[target] = arrays[0], target
            continue
        sources, patterns = group.converter.source_patterns, group.converter.target_patterns
        chain = Chain(sources, patterns, target, shapes, config)
        _convert(target, group, chain, result)
    left_out: set[str] = set()  # stored tensors of targets that may differ
    for name, array in list(result.arrays.items()):
        if name in targets and may_grow(name) and _has_other_rows(array, targets[name][1]):
            result.grown[name] = array.shape[0]
            result.arrays[name] = with_rows(targets[name][1][0], array)
        elif name in targets and array.shape != targets[name][1] and may_differ(name):
            left_out.update(stored_under(result.arrays.pop(name).node))
        else:
            _check_shape(name, array, targets)
    used = {name for array in result.arrays.values() for name in stored_under(array.node)}
    result.dropped += sorted(left_out - used)
    return result
