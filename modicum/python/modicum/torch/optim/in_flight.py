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
        """Called after a step of Modicum's AdamW has overwritten `parameters`."""

    def settle(self) -> None:
        """Returns when this rank's memory may be overwritten."""

    def wait(self) -> object:
        """Returns when the saved checkpoint is visible. Collective. Raises the save's error."""

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


def settle() -> None:
    if _now is not None:
        _now.settle()


def wait() -> None:
    if _now is not None:
        _now.wait()


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
