"""Chooses the saved checkpoint to read: rank 0 decides, and all ranks read the
same."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modicum import _modicum
from modicum.errors import Error, failure, refusal
from modicum.torch.optim.names import warn_script
from modicum.torch.ranks.group import Ranks
from modicum.torch.saving import groups, tensor_state
from modicum.torch.saving.shared import is_gone, require_same, seen_by_all
from modicum.torch.saving.texts import json_in, read_files, text_in
from modicum.walk.saving import GROUPS_FILE, class_text

NamesFor = Callable[[Path, dict[str, Any]], list[str]]
"""Returns the names of those files with other things than weights and state that a rank reads, from
the checkpoint and its facts."""


@dataclass(frozen=True)
class ChosenCheckpoint:
    """A checkpoint to read."""

    path: Path
    facts: dict[str, Any]
    """The dict of `_modicum.newest_checkpoint`."""
    files: dict[str, bytes]
    """The files of `NamesFor`. They were read before the checkpoint was seen whole: if the record
    lists one, it is here, though another process may remove the checkpoint meanwhile."""
    is_newest: bool
    """Whether it is the newest checkpoint of a run, not one that the caller named."""
    load_arguments: Mapping[str, Any] = field(default_factory=dict)
    """In a resume the arguments of `load_by`, by name."""

    @property
    def state(self) -> str:
        """The text of state.json. Trainer's checkpoints of modicum 0.1 have groups.json alone for
        an optimizer whose state had no tensors."""
        if tensor_state.FILE in self.files:
            return text_in(self.files[tensor_state.FILE], tensor_state.FILE)
        if self.has_options:
            return tensor_state.text(class_text(groups.kind_in(self.options)), {})
        what = "the checkpoint holds no optimizer state to go on from"
        raise refusal("MISMATCH", what, file=self.path.name)

    @property
    def has_options(self) -> bool:
        """Whether the checkpoint has options of groups: a run of the command line saves none."""
        return GROUPS_FILE in self.files

    @property
    def options(self) -> Any:
        """The document of the options of parameter groups."""
        return json_in(self.files[GROUPS_FILE], GROUPS_FILE)


def chosen_checkpoint(
    root: Path, ranks: Ranks, names_for: NamesFor, skipped: list[dict[str, Any]]
) -> ChosenCheckpoint:
    """The newest checkpoint of a run whose headers and texts are as recorded, or the checkpoint
    `root`. Collective. If another process removes the checkpoint meanwhile, chooses once more.

    Args:
        skipped: damaged checkpoints, older than which the checkpoint is to be; see `skip`. Those
            that are found are added.

    Raises:
        IntegrityError: there is no such checkpoint, or `root` is a damaged one.
        IoError: it can't be read, or was removed again.
        UsageError: a rank sees another checkpoint than rank 0.
    """
    is_again = False

    def find() -> dict[str, Any]:
        if (root / "COMMIT").exists():
            return _modicum.check_run_checkpoint(str(root))
        return _modicum.newest_checkpoint(
            str(root), [(entry["step"], entry["reason"]) for entry in skipped]
        )

    while True:
        facts, _ = ranks.once(find, lambda: None)
        for damaged in facts.get("skipped", []):
            skip(skipped, damaged, ranks)
        files = _files_of(facts, ranks, names_for)
        is_newest = "skipped" in facts
        if files is not None:
            path, facts = Path(facts["path"]), facts | {"skipped": [*skipped]}
            return ChosenCheckpoint(path, facts, files, is_newest=is_newest)
        if is_again or not is_newest:
            raise removed(Path(facts["path"]))
        is_again = True
        skipped.clear()


def skip(skipped: list[dict[str, Any]], damaged: dict[str, Any], ranks: Ranks) -> None:
    """Adds a damaged checkpoint, a dict of its number and the reason. Rank 0 warns of it."""
    skipped.append(damaged)
    if ranks.rank == 0:
        warn_script(
            f"modicum: the checkpoint of step {damaged['step']} is skipped: {damaged['reason']}"
        )


def removed(path: Path) -> Exception:
    """The error of a checkpoint that another process has removed, twice."""
    return failure("IO", "the checkpoint was removed while it was read", file=path.name)


def _files_of(facts: dict[str, Any], ranks: Ranks, names_for: NamesFor) -> dict[str, bytes] | None:
    """This rank's files of the checkpoint; None if another process has removed the checkpoint.
    Collective."""
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
