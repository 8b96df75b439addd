"""A step (a saved checkpoint directory) inside a directory to which other programs also write, such
as a checkpoint of accelerate or Trainer:

    DIR/.partial-*/                             the step while it is written; made first
    DIR/trainer_state.json, scheduler.pt, ...   files of the other programs
    DIR/model.safetensors, optimizer/, ...      the step's files, moved here once all are written
    DIR/tokenizer.json, ...                     copied from the source, if absent; not in the record
    DIR/COMMIT                                  made last

A directory with a .partial-* but without COMMIT is an incomplete checkpoint. One with neither is
not Modicum's, and is left alone.
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
from modicum.torch.loading.goal import Model
from modicum.torch.loading.origin import keeping_origin, origin_of
from modicum.torch.optim.adamw import AdamW
from modicum.torch.optim.bound import shows_adamw
from modicum.torch.optim.names import warn_script
from modicum.torch.ranks.group import Ranks
from modicum.torch.saving import groups
from modicum.torch.saving.adapters import FILE
from modicum.torch.saving.planning import LAST, Ask
from modicum.torch.saving.report import Resumed, Saved
from modicum.torch.saving.resume import find, load_state, resume
from modicum.torch.saving.save import Given, save_together
from modicum.torch.saving.texts import read_json
from modicum.torch.saving.weights import Form
from modicum.torch.saving.writing import Flight
from modicum.upstream.torch_fsdp import reshard

_COMMIT = "COMMIT"
_IN_FLIGHT = ".partial-"
_TRASH = ".trash-"


class Inside(Flight):
    """A step inside a directory, from its first file until it is published."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory.absolute()
        self._place: tuple[Path, int] | None = None

    @property
    def number(self) -> int:
        """The step's number: the digits at the end of the directory's name; 0 if there are none or
        the number is too large."""
        digits = re.search(r"\d+$", self.directory.name)
        number = int(digits.group()) if digits else 0
        return number if number <= LAST else 0

    def open(self, ranks: Ranks) -> None:
        """Makes the directory and its .partial-*: from now on it is an incomplete checkpoint.
        Collective."""
        ranks.agree_on({"argument directory": str(self.directory.absolute())})
        if ranks.rank == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
        how: dict[str, Any] = {"root": str(self.directory), "step": self.number, "inside": True}
        self._place = super().begin(ranks, **how)

    def begin(self, ranks: Ranks, **how: Any) -> tuple[Path, int]:
        """Makes the subdirectories, and syncs the other programs' files, which are all written by
        now. Collective. Returns the same as `Flight.begin`."""
        assert self._place is not None
        place = self._place

        def make() -> None:
            for name in how["directories"]:
                (place[0] / name).mkdir()
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
    flight: Inside,
    optimizer: torch.optim.Optimizer | None,
    how: Mapping[str, Any],
    ranks: Ranks,
) -> Saved:
    """Saves into the directory of `flight`, which is open, and commits. Collective. `how`: ledger,
    budget, staging, shard_size and adapters, as for `save`."""
    options = None
    if optimizer is not None and not _has_tensors(optimizer):
        options = groups.text_of(optimizer, Model.of(model, reshards=True).names)
        optimizer = None
    form = Form(shard_size=how.get("shard_size"), staging=how["staging"], adapters=how["adapters"])
    ask = Ask(
        root=flight.directory, step=flight.number, keep=None, form=form,
        ledger=how["ledger"] or _modicum.Ledger(), budget=how["budget"], extra=None, per_rank=None,
        groups=options,
    )  # fmt: skip
    return save_together(model, Given(optimizer, None), ask, ranks, flight)


def _has_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's state has tensors to save. False for a torch optimizer before its
    first step, and for one such as SGD without momentum. Then only its group options are saved:
    Trainer reads the state of its scheduler only if the checkpoint has a directory "optimizer"."""
    values = (value for entry in optimizer.state.values() for value in entry.values())
    has_some = any(isinstance(value, torch.Tensor) and value.dim() > 0 for value in values)
    return has_some or isinstance(optimizer, AdamW) or shows_adamw(optimizer.state)


def load_inside(model: nn.Module, directory: Path, how: Mapping[str, Any]) -> Resumed:
    """Compares every byte of the step with its digests, and loads the model. Collective. `how`: as
    for `resume`. The step does not become the model's origin, since a later save may remove it."""
    require_whole(directory)
    reshard(model)
    if (directory / FILE).exists():
        return resume(model, directory, **how)
    with keeping_origin(model):
        resumed = resume(model, directory, unexpected="ignore", **how)
        origin = origin_of(model)
        assert origin is not None
        filled = json.loads(origin.text)["targets"]
        tensors = Model.of(model).tensors
        known = {id(tensors[name].tensor) for name in filled}
        for name, of in tensors.items():
            if id(of.tensor) not in known:
                what = "the checkpoint lacks a tensor of the model: build the model that was "
                what += "saved, or pass the checkpoint to from_pretrained and missing= to loading()"
                raise refusal("MISMATCH", what, file=directory.name, tensor=name)
    return resumed


def load_state_inside(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    directory: Path,
    ledger: _modicum.Ledger | None,
) -> None:
    """Loads the optimizer's state of a step whose model `load_inside` has loaded. Collective."""
    require_whole(directory)
    if not _modicum.open_step(str(directory))["has_state"] and not isinstance(optimizer, AdamW):
        return _restore_groups(model, optimizer, directory)
    found = find(directory, optimizer, verify=False)
    with Ranks.of_world().together() as ranks:
        load_state(model, optimizer, found, ledger or _modicum.Ledger(), ranks)
    return None


def _restore_groups(model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
    """Restores an optimizer whose state had no tensors."""
    saved = directory / groups.FILE
    if not saved.exists():
        what = "the checkpoint holds no optimizer state to go on from"
        raise refusal("MISMATCH", what, file=directory.name)
    groups.restore(optimizer, read_json(saved), Model.of(model).names)
    optimizer.state.clear()


# ---- directories


def is_step(directory: Path) -> bool:
    """Whether the directory holds a step of Modicum, committed or not. Raises `OSError` if it can't
    be read."""
    if not directory.is_dir():
        return False
    return any(name == _COMMIT or name.startswith(_IN_FLIGHT) for name in os.listdir(directory))


def require_whole(directory: Path, check: Callable[[str], Any] = _modicum.open_step) -> None:
    """Raises UNCOMMITTED or INTEGRITY if the directory holds an incomplete step."""
    if is_step(directory):
        check(str(directory))


def fault_of(directory: Path) -> str:
    """Why a run can't resume from a directory; empty if it can, or if the directory is another
    program's. Compares headers and files without tensors, not the values of tensors. Raises an
    error that is no damage, such as IO."""
    if not os.listdir(directory):
        return "it is empty"
    try:
        require_whole(directory, _modicum.check_step)
    except Error as error:
        if not is_damage(error):
            raise
        return str(error)
    return ""


def rotate(directories: Sequence[Path], limit: int, best: Path | None, trash: Path) -> None:
    """Removes checkpoints until `limit` are left: first incomplete ones, then the oldest. Keeps the
    newest complete checkpoint, `best`, and all checkpoints newer than the newest complete one; the
    newer ones do not count. If none is complete, removes none. "Complete" is as in `fault_of`. An
    OSError or another error is only a warning: one rank removes, and the others go on.

    Args:
        directories: oldest first.
        trash: a directory on the same file system. A checkpoint is moved there before its files are
            removed, so that none is ever seen partly removed.
    """
    with _warning():
        _empty(trash)
        for one in _superfluous(directories, limit, best):
            with _warning():
                _modicum.rename(one, trash / f"{_TRASH}{one.name}")
        _empty(trash)


def _superfluous(directories: Sequence[Path], limit: int, best: Path | None) -> list[Path]:
    """The checkpoints that `rotate` removes."""
    is_whole = {one: not fault_of(one) for one in directories}
    newest = max((at for at, one in enumerate(directories) if is_whole[one]), default=0)
    kept = {*directories[newest:], *([best] if best else [])}
    removable = [one for one in directories if one not in kept]
    removable.sort(key=lambda one: is_whole[one])  # stable: the oldest of each kind first
    count = len(directories) - len(directories[newest + 1 :])
    return removable[: max(0, count - limit)]


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
