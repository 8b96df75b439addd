"""Chooses the step (saved checkpoint directory) to read: rank 0 decides, and all ranks read the
same."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modicum import _modicum
from modicum._modicum import exit_codes
from modicum.errors import Error, failure, from_json
from modicum.torch.optim.names import warn_script
from modicum.torch.ranks.group import Ranks
from modicum.torch.saving.examining import damage_of
from modicum.torch.saving.shared import is_gone, require_same, seen_by_all
from modicum.torch.saving.texts import read_files

NamesFor = Callable[[Path, dict[str, Any]], list[str]]
"""Returns the names of those files with other things than weights and state that a rank reads, from
the step and its facts."""


@dataclass(frozen=True)
class Chosen:
    """A step to read."""

    path: Path
    facts: dict[str, Any]
    """The dict of `_modicum.newest_step`."""
    files: dict[str, bytes]
    """The files of `NamesFor`. They were read before the step was seen whole: if the record lists
    one, it is here, though another process may remove the step meanwhile."""


def chosen_step(root: Path, ranks: Ranks, names_for: NamesFor, *, verify: bool) -> Chosen:
    """The newest step without damage of a root, or the step `root`. Collective. If another process
    removes the step meanwhile, chooses once more. Rank 0 warns of each skipped step.

    Args:
        verify: compares every byte, not only headers and texts.

    Raises:
        IntegrityError: there is no such step, or `root` is a damaged one.
        IoError: it can't be read, or was removed again.
        UsageError: a rank sees another step than rank 0.
    """
    skipped: list[dict[str, Any]] = []
    is_again = False

    def find() -> dict[str, Any]:
        if (root / "COMMIT").exists():
            return _modicum.check_step(str(root))
        return _modicum.newest_step(str(root), [(one["step"], one["reason"]) for one in skipped])

    def skip(one: dict[str, Any]) -> None:
        skipped.append(one)
        if ranks.rank == 0:
            warn_script(f"modicum: step {one['step']} is skipped: {one['reason']}")

    while True:
        facts, _ = ranks.once(find, lambda: None)
        for one in facts.get("skipped", []):
            skip(one)
        files = _files_of(facts, ranks, names_for)
        damage = "" if files is not None else None
        if verify and files is not None:
            damage = damage_of(Path(facts["path"]), ranks)
        if files is not None and damage == "":
            return Chosen(Path(facts["path"]), facts | {"skipped": skipped}, files)
        if damage is None:
            if is_again or "skipped" not in facts:
                raise removed(Path(facts["path"]))
            is_again = True
            skipped.clear()
        elif "skipped" not in facts:  # from check_step: `root` is the step itself
            told = {"category": "INTEGRITY", "code": exit_codes()["INTEGRITY"], "message": damage}
            raise from_json(json.dumps({"error": told}))
        else:
            skip({"step": facts["step"], "reason": damage})


def removed(step: Path) -> Exception:
    """The error of a step that another process has removed, twice."""
    return failure("IO", "the step was removed while it was read", file=step.name)


def _files_of(facts: dict[str, Any], ranks: Ranks, names_for: NamesFor) -> dict[str, bytes] | None:
    """This rank's files of the step; None if another process has removed the step. Collective."""
    path = Path(facts["path"])
    if not seen_by_all(path, ranks):
        return None
    files: dict[str, bytes] | None = None
    try:
        files = read_files(path, names_for(path, facts))
        # Last: a file of the record that was absent before is missing now, too.
        require_same(path, facts["uuid"], ranks)
    except (Error, OSError):
        if not is_gone(path):
            raise
        files = None
    return files if all(ranks.gather(files is not None)) else None
