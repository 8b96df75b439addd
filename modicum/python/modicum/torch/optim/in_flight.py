"""The save that runs in the background, or none. Optimizer steps and loads must not overwrite
parameters and optimizer state that the save has not read yet."""

import os
from collections.abc import Iterable
from typing import Protocol

import torch

from modicum import _modicum


class Save(Protocol):
    """A save in the background. All methods are called by the thread that trains."""

    def before_step(self) -> _modicum.Snapshot | None:
        """Called before a step of Modicum's AdamW. Returns the snapshot that the step must ask
        before it overwrites memory, or None. Raises the save's error, once."""

    def after_step(self, parameters: Iterable[torch.Tensor]) -> None:
        """Called at the end of a step of Modicum's AdamW that has overwritten `parameters`: none if
        the step was skipped or has raised. Does nothing outside a step."""

    def before_other_step(self) -> None:
        """Called before a step of another optimizer. Returns when the save is over. Raises its
        error on all ranks or on none."""

    def settle(self) -> None:
        """Returns when this rank's memory may be overwritten, moved and freed. On any thread."""

    def finish(self) -> None:
        """Returns when the saved checkpoint is visible, or the save has failed."""

    def deliver(self) -> None:
        """Raises the save's error, once. Called after `finish`."""

    def explain(self) -> None:
        """Called when another rank has refused a call of the optimizer. Raises the save's error if
        the save has failed."""

    def leave(self) -> None:
        """Called when the process is about to exit: waits, and prints an error."""


_now: Save | None = None


def begin(save: Save) -> None:
    """Sets the running save, until `end`; no other may run."""
    global _now
    assert _now is None
    _now = save


def end(save: Save) -> None:
    """Notes that `save` is over."""
    global _now
    if _now is save:
        _now = None


def before_step() -> _modicum.Snapshot | None:
    return None if _now is None else _now.before_step()


def after_step(parameters: Iterable[torch.Tensor]) -> None:
    if _now is not None:
        _now.after_step(parameters)


def before_other_step() -> None:
    if _now is not None:
        _now.before_other_step()


def settle() -> None:
    """Returns when this rank's part of the running save is written: the memory of model and state
    may then be overwritten, moved and freed. On any thread."""
    if _now is not None:
        _now.settle()


def finish() -> None:
    """Returns when no save runs. Raises no error of the save: `deliver` must follow."""
    if _now is not None:
        _now.finish()


def deliver() -> None:
    """Raises the error of a save that has failed, unless it was raised before. All ranks call this
    where each learns of an error of another rank, since not all of them may have one to raise."""
    global _now
    save, _now = _now, None
    if save is not None:
        save.deliver()


def wait() -> None:
    """Both: called where ranks learn of the errors of others."""
    finish()
    deliver()


def explain() -> None:
    if _now is not None:
        _now.explain()


def leave() -> None:
    if _now is not None:
        _now.leave()


def _forget() -> None:
    # A forked child lacks the thread of the save.
    global _now
    _now = None


os.register_at_fork(after_in_child=_forget)
