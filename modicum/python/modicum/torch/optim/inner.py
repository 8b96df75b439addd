"""What other rooms read and change of a `modicum.torch.AdamW` besides its public methods."""

from modicum.torch.optim.adamw import AdamW
from modicum.torch.optim.binding import Wants
from modicum.torch.optim.bound import BoundParameters


def bound_of(optimizer: AdamW) -> BoundParameters:
    """The parameters to which the optimizer is bound, with their state."""
    return optimizer._bound


def trained_by(optimizer: AdamW) -> Wants:
    """Whether a step of the optimizer would need a parameter's state."""
    return optimizer._trains


def unbind_changed(optimizer: AdamW) -> None:
    """Frees all state if parameters were replaced or moved. Raises `UsageError` if values would be
    lost."""
    optimizer._unbind_changed()


def note_loaded(optimizer: AdamW) -> None:
    """Notes that the state has loaded values, which a later unbinding would lose."""
    optimizer._has_loaded = True
