"""Makes tensors that the checkpoint lacks by the model's own rules."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from modicum.errors import Error, refusal
from modicum.recipes.structure import Member, Structure, structure_of, ties_of
from modicum.torch.build.rules import (
    Region,
    Rule,
    Rules,
    is_whole,
    like,
    running,
    stand_ins,
    tensor_of,
)

_EMPTY: Callable[..., torch.Tensor] = partial(torch.empty, device="cpu")
"""Whatever the program's default device is."""


@dataclass
class _Group:
    """The tensors of one module that rules make; they are made together."""

    module: nn.Module
    label: str  # seeds the random numbers: the module's name without wrappers
    rules: list[Rule] = field(default_factory=list)
    members: dict[str, Member] = field(default_factory=dict)  # by the module's attribute

    @property
    def nbytes(self) -> int:
        tensors = [member.tensor for member in self.members.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Initialiser:
    """Makes tensors of a model by the model's own rules, those of one module at a time.

    The rules are transformers' `_init_weights`, PEFT's rules for adapters, and `reset_parameters`.
    The model may be on meta, sharded and wrapped; neither it nor the global random state is
    changed. Every rank makes the same complete tensors, whatever the world size.
    """

    largest_bytes: int
    """The most bytes from `empty` that exist at once; a rule's temporaries are not included."""
    most_tensors: int
    """The most tensors from `empty` that exist at once."""
    order: list[str]
    """The names in the model's order, but with the names of each module together."""

    def __init__(
        self,
        model: nn.Module,
        names: Iterable[str],
        *,
        seed: int = 0,
        empty: Callable[..., torch.Tensor] = _EMPTY,
        buffers_only: bool = False,
        structure: Structure | None = None,
    ) -> None:
        """Finds the rules for the tensors; makes no tensor.

        Args:
            model: any module.
            names: canonical names of the parameters and buffers to make.
            seed: the seed of the random numbers.
            empty: allocates a tensor, called as `empty(shape, dtype=dtype)`.
            buffers_only: the names are buffers: other tensors of their modules are not made, and
                names without a rule are left out of `order` instead of refused.
            structure: the model's structure, if already known.

        Raises:
            UsageError: UNSUPPORTED, naming the tensor, if no rule of the model makes it.
        """
        self._seed = seed
        self._empty = empty
        self._rules = Rules()
        structure = structure or structure_of(model)
        members = structure.members | structure.scratch
        siblings: dict[int, dict[str, Member]] = {}
        for member in members.values():
            siblings.setdefault(id(member.module), {}).setdefault(member.attribute, member)
        sources = {name: names[0] for names in ties_of(structure) for name in names}
        position = {name: i for i, name in enumerate(members)}
        groups: dict[int, _Group] = {}
        self._made_in: dict[str, tuple[_Group, str]] = {}  # by name: (group, attribute)
        for name in sorted(names, key=lambda name: position.get(name, -1)):
            if name not in members:
                raise refusal("USAGE", "the model has no such tensor", tensor=name)
            source = sources.get(name, name)
            member = members[structure.copies.get(source, source)]
            key = id(member.module)
            if key not in groups:
                try:
                    groups[key] = self._group_of(member, siblings[key], structure)
                except Error:
                    if not buffers_only:
                        raise
                    groups[key] = _Group(member.module, "")
            if member.attribute in groups[key].members:
                self._made_in[name] = groups[key], member.attribute
            elif not buffers_only:
                raise refusal("UNSUPPORTED", "no rule of the model makes this tensor", tensor=name)
        if buffers_only:
            self._drop_siblings()
        number = {key: i for i, key in enumerate(groups)}
        self.order = sorted(
            self._made_in, key=lambda name: number[id(self._made_in[name][0].module)]
        )
        self.largest_bytes = max((group.nbytes for group in groups.values()), default=0)
        self.most_tensors = max((len(group.members) for group in groups.values()), default=0)
        self._kept_group: _Group | None = None
        self._tensors: dict[str, torch.Tensor] = {}

    def whole(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The complete tensor, contiguous, on the CPU. It is valid until `free`, or the next call
        for a tensor of another module. `dtype`: of a copy, if it is not the tensor's own."""
        if name not in self._made_in:
            raise refusal("USAGE", "the Initialiser was not made for this tensor", tensor=name)
        group, attribute = self._made_in[name]
        if group is not self._kept_group:
            self.free()
            self._make(group, name)
            self._kept_group = group
        value = self._tensors[attribute]
        if dtype in (None, value.dtype):
            return value
        return self._empty(tuple(value.shape), dtype=dtype).copy_(value)

    def free(self) -> None:
        """Drops the tensors of the last module; a later call of `whole` makes them again."""
        self._kept_group = None
        self._tensors.clear()

    def _drop_siblings(self) -> None:
        """Removes tensors that were not asked for from the groups."""
        asked = {(id(group), attribute) for group, attribute in self._made_in.values()}
        for group in {id(group): group for group, _ in self._made_in.values()}.values():
            group.members = {a: m for a, m in group.members.items() if (id(group), a) in asked}

    def _group_of(self, asked: Member, siblings: dict[str, Member], structure: Structure) -> _Group:
        """The tensors that rules make in the module of `asked`, and these rules."""
        group = _Group(asked.module, _label_of(asked, structure))
        constructors, rules = self._rules.of(asked)
        regions_by_name = self._made_by(rules, asked)

        def is_made(attribute: str) -> bool:
            return is_whole(siblings[attribute].tensor.numel(), regions_by_name.get(attribute, []))

        if not all(is_made(attribute) for attribute in siblings):
            # The constructors' rules make tensors that the other rules do not.
            rules = [*constructors, *rules]
            regions_by_name = self._made_by(rules, asked)
        group.rules = [rule for rule in rules if self._made_by([rule], asked)]
        group.members = {name: member for name, member in siblings.items() if is_made(name)}
        return group

    def _made_by(self, rules: Iterable[Rule], asked: Member) -> dict[str, list[Region]]:
        """The regions that the rules write, by attribute of the module of `asked`."""
        regions_by_name: dict[str, list[Region]] = {}
        for rule in rules:
            try:
                slots = self._rules.made_by(rule)
            except Exception as error:  # the model's code, which may raise anything
                more = "" if asked.adapter is None else _FROM_BASE
                raise _failed(rule, error, asked.name, more) from error
            for (module, attribute), regions in slots.items():
                if module == id(asked.module):
                    regions_by_name.setdefault(attribute, []).extend(regions)
        return regions_by_name

    def _make(self, group: _Group, asked: str) -> None:
        """Makes the group's tensors. `asked`: the tensor that errors name."""
        tensors: dict[str, torch.Tensor] = {}
        for attribute, member in group.members.items():
            shape, dtype = tuple(member.tensor.shape), member.tensor.dtype
            self._tensors[attribute] = self._empty(shape, dtype=dtype)
            tensors[attribute] = like(member.tensor, self._tensors[attribute])

        def tensor_for(module: nn.Module, attribute: str, tensor: torch.Tensor) -> Any:
            if module is group.module and attribute in tensors:
                return tensors[attribute]
            return self._rules.outline_for(module, attribute, tensor)

        words = f"{self._seed} {group.label}".encode()
        digest = hashlib.blake2b(words, digest_size=8).digest()
        with running(int.from_bytes(digest, "little", signed=True)):
            for rule in group.rules:
                try:
                    copies = stand_ins(rule, tensor_for)
                    rule.run(copies[id(rule.module)])
                    _take_back(copies[id(group.module)], tensors)
                except Exception as error:  # the model's code, which may raise anything
                    raise _failed(rule, error, asked) from error


def _take_back(module: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Copies the values of tensors that a rule has replaced instead of written."""
    for attribute, tensor in tensors.items():
        result = tensor_of(module, attribute)
        if result is not None and result is not tensor:
            if result.shape != tensor.shape:
                expected = list(tensor.shape)
                raise ValueError(f"{attribute}: expected {expected}, got {list(result.shape)}")
            tensor.copy_(result)


def _label_of(member: Member, structure: Structure) -> str:
    """The name of the member's module in the model, without wrappers."""
    part = next(part for part in structure.parts if part.module is member.root)
    name = member.key if member.adapter is None else member.name.removeprefix(part.prefix)
    return (part.bare_prefix + name).rpartition(".")[0]


_FROM_BASE = (
    ". Adapters that are computed from the base's values are made in one process, by PEFT, and "
    "saved with their base: load both"
)


def _failed(rule: Rule, error: Exception, name: str, more: str = "") -> Error:
    what = f"the initialiser of {type(rule.module).__name__} fails: {error}{more}"
    return refusal("UNSUPPORTED", what, tensor=name)
