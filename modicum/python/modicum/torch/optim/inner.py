"""Access for other rooms to those parts of a `modicum.torch.AdamW` without a public method."""

from modicum.torch.optim.adamw import AdamW
from modicum.torch.optim.binding import NeedsState
from modicum.torch.optim.bound import BoundParameters


def bound_of(optimizer: AdamW) -> BoundParameters:
    """The parameters to which the optimizer is bound, with their state."""
    return optimizer._bound


def trained_by(optimizer: AdamW) -> NeedsState:
    """The predicate: whether a step of the optimizer would need a parameter's state."""
    return optimizer._trains


def unbind_changed(optimizer: AdamW) -> None:
    """Frees all state if parameters were replaced or moved. Raises `UsageError` if that would
    lose values."""
    optimizer._unbind_changed()


def note_loaded(optimizer: AdamW) -> None:
    """Records that the state contains loaded values, which a later unbinding would lose."""
    optimizer._has_loaded = True
