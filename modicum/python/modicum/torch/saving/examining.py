"""Compares all of a saved checkpoint with its digests, divided among ranks."""

from pathlib import Path
from typing import Any

from modicum import _modicum
from modicum.errors import Error, failure
from modicum.torch.ranks.group import Ranks
from modicum.torch.saving.shared import is_gone, require_same, require_seen


def damage_of(path: Path, ranks: Ranks) -> str | None:
    """The first damage in a checkpoint, of which each rank compares a part; an empty text if there
    is none; None if another process has removed the checkpoint meanwhile. Collective; the result is
    the same on every rank."""
    board = _modicum.Board(ranks)
    damage: str | None = None
    try:
        with ranks.watching(board):
            damage = _modicum.checkpoint_fault(str(path), ranks.rank, ranks.world_size, board)
    except Error:
        if not is_gone(path):
            raise
    damages = ranks.gather(None if damage != "" and is_gone(path) else damage)
    return None if None in damages else next(filter(None, damages), "")


def set_damaged_aside(root: Path, step: int, ranks: Ranks) -> list[dict[str, Any]]:
    """Before a save: if the root has a checkpoint of this number, reads all of it, and renames it
    if it is damaged. Returns what `_modicum.set_aside` returns, the same on every rank; an empty
    list if there is none. Collective. Raises CONFLICT if the checkpoint is intact."""
    found, _ = ranks.once(lambda: _modicum.examine_checkpoint(str(root), step), lambda: None)
    if found is None:  # CheckpointSave refuses a link or a file of this name
        return []
    path, damage = Path(found["path"]), found["reason"]
    if not damage:
        require_seen(path, ranks)
        require_same(path, found["uuid"], ranks)
        damage = damage_of(path, ranks)
        if damage is None:
            return []
    if not damage:
        raise failure("CONFLICT", "the checkpoint has been saved already", file=path.name)
    arguments = (str(root), step, damage, found["uuid"])
    aside, _ = ranks.once(lambda: _modicum.set_aside(*arguments), lambda: None)
    return [aside]
