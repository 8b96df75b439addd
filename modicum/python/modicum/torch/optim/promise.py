"""What an optimizer without memory will take: its part of a load's promise."""

from collections.abc import Mapping
from typing import Any

from modicum.torch.optim.adamw import AdamW
from modicum.torch.optim.binding import new_parts, on_meta
from modicum.torch.optim.names import called
from modicum.torch.optim.parts import Memory
from modicum.torch.optim.states import footprint


def needed_by(optimizer: AdamW, memories: Mapping[int, Memory]) -> dict[str, int]:
    """The bytes by purpose that `optimizer.allocate()` would charge if the parameters on meta had
    these memories, by id; none while another parameter is on meta.

    `BudgetError` if the optimizer's ledger lacks room.
    """
    groups, wants, bound = optimizer.param_groups, optimizer._trains, optimizer._bound.parts
    if any(id(one) not in memories for one in on_meta(groups, wants)):
        return {}
    parts = new_parts(groups, wants, bound, memories)
    options = optimizer._checked(groups)
    needed: Any = footprint(parts, options, optimizer.state_format, fork=optimizer._fork)
    optimizer.ledger.require_room(needed, called(parts))
    return dict(needed)


def held_by(optimizer: AdamW) -> int:
    """The bytes of its state."""
    held = optimizer.held.values()
    return sum(size for of in held for purpose, size in of.items() if purpose != "parameters")
