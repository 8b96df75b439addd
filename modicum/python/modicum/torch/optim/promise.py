"""The memory that an optimizer will take once its parameters have memory: its part of a load's
promise (the greatest host memory of the load, known before it starts)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from modicum import _modicum
from modicum.torch.optim.adamw import AdamW
from modicum.torch.optim.binding import new_parts, on_meta
from modicum.torch.optim.names import called
from modicum.torch.optim.parts import Memory, Part
from modicum.torch.optim.states import footprint, require_storable, stored_of


@dataclass(frozen=True)
class Needs:
    """The memory that an optimizer takes once its parameters have memory."""

    needed: Mapping[str, int] = field(default_factory=dict)
    """Bytes by purpose."""
    parts: Sequence[Part] = ()
    """The parameters that will have state."""

    def stored(self, names: Mapping[int, str]) -> list[_modicum.StoredState]:
        """The parts' state in files; empty if `names` lacks a parameter. `names`: the name in files
        by id of a parameter. Raises `UsageError` if a save does not support a part's state."""
        if any(id(part.parameter) not in names for part in self.parts):
            return []
        for part in self.parts:
            require_storable(part, names[id(part.parameter)])
        return stored_of(self.parts, lambda part: names[id(part.parameter)])


def needs_of(optimizer: AdamW, memories: Mapping[int, Memory]) -> Needs:
    """The bytes that `optimizer.allocate()` would charge if the parameters on meta had `memories`,
    by id of the parameter; no bytes if `memories` lacks a parameter on meta that trains. Raises
    `BudgetError` if the optimizer's ledger lacks room."""
    groups, needs_state, bound = optimizer.param_groups, optimizer._trains, optimizer._bound.slots
    if any(id(parameter) not in memories for parameter in on_meta(groups, needs_state)):
        return Needs()
    parts = new_parts(groups, needs_state, bound, optimizer.state_format, memories)
    options = optimizer._checked(groups)
    needed: Any = footprint(parts, options, fork=optimizer._fork)
    optimizer.ledger.require_room(needed, called(parts))
    return Needs(dict(needed), [*bound, *parts])


def held_by(optimizer: AdamW) -> int:
    """The bytes of the optimizer's state on this rank, for all purposes together."""
    by_format = optimizer.held.values()
    return sum(
        size
        for purposes in by_format
        for purpose, size in purposes.items()
        if purpose != "parameters"
    )
