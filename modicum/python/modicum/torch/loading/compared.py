"""The values of a saved checkpoint that a load has compared with its record."""

from typing import Any

from modicum import _modicum
from modicum.torch.ranks.group import Ranks


def compared_by_all(
    checkpoint: _modicum.Checkpoint, outcome: str, ranks: Ranks, folder: str = ""
) -> dict[str, Any]:
    """Compares the values that were divided among ranks: the dict of `_modicum.compared_values`.
    `outcome`: the outcome's `compared` of this rank. Raises `IntegrityError` on every rank, naming
    file and tensor, if a value differs. Collective, and a barrier."""
    found: dict[str, Any] = ranks.gather(
        outcome, lambda of_ranks: _modicum.compared_values(checkpoint, of_ranks, folder)
    )
    return found
