"""A saved checkpoint inside a directory to which other programs also write, such
as a checkpoint of accelerate or Trainer:

    DIR/.partial-*/                             the checkpoint while it is written; made first
    DIR/trainer_state.json, scheduler.pt, ...   files of the other programs
    DIR/model.safetensors, optimizer/, ...      its files, moved here once all are written
    DIR/tokenizer.json, ...                     copied from the source, if absent; not in the record
    DIR/COMMIT                                  made last

A directory with a .partial-* or Modicum's manifest.json, but without COMMIT, is an incomplete
checkpoint. One with none of them is not Modicum's, and is left alone.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modicum import _modicum
from modicum.errors import Error, is_damage, refusal
from modicum.torch.loading.around import taken
from modicum.torch.loading.goal import Model
from modicum.torch.loading.load import arguments_in, outside_inference
from modicum.torch.loading.origin import keeping_origin, origin_of
from modicum.torch.loading.planning import require_budget
from modicum.torch.optim.adamw import AdamW
from modicum.torch.optim.names import warn_script
from modicum.torch.ranks.group import Ranks
from modicum.torch.saving.adapters import FILE
from modicum.torch.saving.examining import damage_of
from modicum.torch.saving.planning import SaveRequest
from modicum.torch.saving.report import ResumeReport, SaveReport
from modicum.torch.saving.resume import find, load_state, resume_by, saved_state
from modicum.torch.saving.save import save_together
from modicum.torch.saving.shared import require_same, seen_by_all
from modicum.torch.saving.tensor_state import needed_by_tensors
from modicum.torch.saving.weights import Form
from modicum.torch.saving.writing import CheckpointInFlight
from modicum.upstream.checkpoints import folders_in
from modicum.upstream.torch_fsdp import reshard
from modicum.walk.arguments import LAST

_COMMIT = "COMMIT"
_MANIFEST = "manifest.json"
_RECORD = re.compile(rb'\{"version":\d+,"step":\d')
"""The beginning of Modicum's manifest.json."""
_IN_FLIGHT = ".partial-"
_TRASH = ".trash-"


class CheckpointInDirectory(CheckpointInFlight):
    """A checkpoint inside a directory, from its first file until it is published."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory.absolute()
        self._place: _modicum.PartialCheckpoint | None = None

    @property
    def number(self) -> int:
        """The number in the record: the digits at the end of the directory's name; 0 if there
        are none or the number is too large."""
        digits = re.search(r"\d+$", self.directory.name)
        number = int(digits.group()) if digits else 0
        return number if number <= LAST else 0

    def open(self, ranks: Ranks) -> None:
        """Makes the directory and its .partial-*: from now on it is an incomplete checkpoint.
        Collective."""
        ranks.agree_on({"argument directory": str(self.directory.absolute())})
        if ranks.rank == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
        arguments: dict[str, Any] = {
            "root": str(self.directory),
            "step": self.number,
            "inside": True,
        }
        self._place = super().begin(ranks, **arguments)

    def begin(self, ranks: Ranks, **arguments: Any) -> _modicum.PartialCheckpoint:
        """Makes the subdirectories, and syncs the other programs' files, which are all written by
        now. Collective. Returns the same as `CheckpointInFlight.begin`."""
        assert self._place is not None
        place = self._place

        def make() -> None:
            for name in arguments["directories"]:
                _modicum.make_directory(Path(place.directory) / name)
            _sync(self.directory)

        ranks.once(make, lambda: None)
        return place


def _sync(directory: Path) -> None:
    """Syncs the other programs' files: after a crash COMMIT must not exist without them."""
    for path in directory.iterdir():
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            try:
                os.fsync(file)
            finally:
                os.close(file)


def save_inside(
    model: nn.Module,
    flight: CheckpointInDirectory,
    optimizer: torch.optim.Optimizer | None,
    options: Mapping[str, Any],
    ranks: Ranks,
) -> SaveReport:
    """Saves into the directory of `flight`, which is open, and commits. Collective. The files have
    the model's tensors alone, as those of `save_pretrained`. `options`: ledger, budget, staging,
    shard_size and adapters, as for `save`."""
    form = Form(
        unused="drop",
        shard_size=options.get("shard_size"),
        staging=options["staging"],
        adapters=options["adapters"],
    )
    ask = SaveRequest(
        root=flight.directory, step=flight.number, keep=None, form=form,
        ledger=options["ledger"] or _modicum.Ledger(), budget=options["budget"], extra=None,
        per_rank=None,
    )  # fmt: skip
    return save_together(model, optimizer, ask, ranks, flight)


def load_inside(model: nn.Module, directory: Path, arguments: Mapping[str, Any]) -> ResumeReport:
    """Loads the model, and compares what it reads with the recorded digests. Collective.
    `arguments`: as of `resume_by`. The checkpoint does not become the model's origin, since a
    later save may remove it."""
    require_whole(directory)
    reshard(model)
    if (directory / FILE).exists():
        return resume_by(lambda: arguments, model, directory)
    with keeping_origin(model):
        resumed = resume_by(lambda: {**arguments, "unexpected": "ignore"}, model, directory)
        origin = origin_of(model)
        assert origin is not None
        filled = json.loads(origin.text)["targets"]
        tensors = Model.of(model).tensors
        known = {id(tensors[name].tensor) for name in filled}
        for name, entry in tensors.items():
            if id(entry.tensor) not in known:
                what = "the checkpoint lacks a tensor of the model: build the model that was "
                what += "saved, or build it by from_pretrained(CHECKPOINT) within "
                what += "loading(rules=LoadRules(missing=...))"
                raise refusal("MISMATCH", what, file=directory.name, tensor=name)
    return resumed


def load_state_inside(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    directory: Path,
    arguments: Mapping[str, Any],
) -> None:
    """Loads the optimizer's state of a checkpoint after `load_inside`. Collective. `arguments`: as
    of `load_inside`. Raises `BudgetError`, before it allocates, if the state does not fit."""
    require_whole(directory)
    ledger, budget = taken(arguments["ledger"], arguments["budget"])
    found = find(directory, optimizer, [], lambda: arguments_in("resume") | {**arguments})
    with outside_inference(model), Ranks.of_world().together() as ranks:
        if not isinstance(optimizer, AdamW):  # which has allocated its state already
            whole = Model.of(model)
            needed = needed_by_tensors(optimizer, whole, whole.names, saved_state(found), ranks)
            require_budget(needed, ledger, budget, ranks)
        load_state(model, optimizer, found, ledger, ranks)


# ---- directories


def is_checkpoint(directory: Path) -> bool:
    """Whether the directory is a checkpoint of Modicum, committed or not. Raises `OSError` if it
    can't be read."""
    if not directory.is_dir():
        return False
    if any(name == _COMMIT or name.startswith(_IN_FLIGHT) for name in os.listdir(directory)):
        return True
    # A save into the directory of an earlier one removes COMMIT first, and may have failed since.
    manifest = directory / _MANIFEST
    if not manifest.is_file():
        return False
    with manifest.open("rb") as file:
        return _RECORD.match(file.read(64)) is not None


def require_whole(
    directory: Path, check: Callable[[str], Any] = _modicum.open_run_checkpoint
) -> None:
    """Raises UNCOMMITTED or INTEGRITY if the directory holds an incomplete checkpoint."""
    if is_checkpoint(directory):
        check(str(directory))


def fault_of(directory: Path) -> str:
    """Why a run can't resume from a directory; empty if it can, or if the directory is another
    program's. Compares headers and files without tensors, not the values of tensors. Raises an
    error that is no damage, such as IO."""
    if not os.listdir(directory):
        return "it is empty"
    try:
        for folder in _checkpoints_in(directory):
            require_whole(folder, _modicum.check_run_checkpoint)
    except Error as error:
        if not is_damage(error):
            raise
        return str(error)
    return ""


def _checkpoints_in(directory: Path) -> list[Path]:
    """The checkpoints of Modicum in a directory: itself and, if accelerate has saved several
    models, the subdirectories of all but the first."""
    return [folder for folder in (directory, *folders_in(directory)) if is_checkpoint(folder)]


def fault_for_all(directory: Path, ranks: Ranks) -> str:
    """As `fault_of`, but also compares the values of tensors, a part on each rank. Collective; the
    result is the same on every rank."""

    def examine() -> tuple[str, list[tuple[str, str]]]:
        if reason := fault_of(directory):
            return reason, []
        folders = map(str, _checkpoints_in(directory))
        return "", [(folder, _modicum.open_run_checkpoint(folder)["uuid"]) for folder in folders]

    (reason, folders), _ = ranks.once(examine, lambda: None)
    for folder, uuid in folders:
        is_there = seen_by_all(Path(folder), ranks)
        damage = damage_of(Path(folder), ranks) if is_there else None
        if damage is None:
            return "it was removed while it was read"
        if damage:
            return damage
        require_same(Path(folder), uuid, ranks)
    return str(reason)


def rotate(
    directories: Sequence[Path], limit: int, best: Path | None, trash: Path, saved: str = ""
) -> None:
    """Removes checkpoints until `limit` are left: first incomplete ones, then those that an earlier
    run has saved under higher numbers than `saved`, then those with the lowest numbers. Keeps
    `saved`, `best`, and all checkpoints newer in time than `saved`; the newer ones do not count.
    "Incomplete" is as in `fault_of`. An OSError or another error is only a warning: one rank
    removes, and the others go on.

    Args:
        directories: by number, the lowest first.
        trash: a directory on the same file system. A checkpoint is moved there before its files are
            removed, so that none is ever seen partly removed.
        saved: the name of the checkpoint that was just saved; if empty, it is the newest complete
            one, and without a complete one none is removed.
    """
    with _warning():
        _empty(trash)
        for folder in _superfluous(directories, limit, best, saved):
            with _warning():
                _modicum.rename(folder, trash / f"{_TRASH}{folder.name}")
        _empty(trash)


def _superfluous(
    directories: Sequence[Path], limit: int, best: Path | None, saved: str
) -> list[Path]:
    """The checkpoints that `rotate` removes."""
    is_whole = {folder: not fault_of(folder) for folder in directories}
    age = {folder: (_saved_at(folder), at) for at, folder in enumerate(directories)}
    whole = [
        folder for folder in directories if (folder.name == saved if saved else is_whole[folder])
    ]
    newest = max(whole, key=lambda folder: age[folder], default=None)
    if newest is None:
        return []
    newer = [folder for folder in directories if age[folder] > age[newest]]
    kept = {newest, *newer, *([best] if best else [])}
    removable = [folder for folder in directories if folder not in kept]
    # Stable: the lowest number of each kind first.
    removable.sort(key=lambda folder: (is_whole[folder], age[folder][1] < age[newest][1]))
    return removable[: max(0, len(directories) - len(newer) - limit)]


def _saved_at(directory: Path) -> int:
    """When a checkpoint was saved, in nanoseconds: COMMIT is written last."""
    commit = directory / _COMMIT
    return (commit if commit.exists() else directory).stat().st_mtime_ns


@contextmanager
def _warning() -> Iterator[None]:
    """A context whose errors become a warning."""
    try:
        yield
    except (OSError, Error) as error:
        warn_script(f"modicum: an old checkpoint could not be removed: {error}")


def _empty(trash: Path) -> None:
    for path in trash.glob(f"{_TRASH}*"):
        with _warning():
            _modicum.remove_tree(path)
