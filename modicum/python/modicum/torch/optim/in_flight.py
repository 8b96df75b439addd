"""The save in the background that is in flight, if there is one: it reads parameters and optimizer
state that steps and loads are about to overwrite."""

import os
from collections.abc import Iterable
from typing import Protocol

import torch

from modicum import _modicum


class Save(Protocol):
    """All of it is called by the thread that trains."""

    def before_step(self) -> _modicum.Snapshot | None:
        """What a step of Modicum's must ask before it overwrites memory; None: nothing. Raises the
        save's error, once."""

    def after_step(self, parameters: Iterable[torch.Tensor]) -> None:
        """A step of Modicum's has overwritten these."""

    def settle(self) -> None:
        """Returns when this rank's memory may be overwritten."""

    def wait(self) -> object:
        """Returns when the step is visible. Collective. Raises the save's error."""

    def explain(self) -> None:
        """Another rank has refused a step: raises the save's error if that may be why."""

    def leave(self) -> None:
        """The process is about to exit: as `wait`, but prints the error."""


_now: Save | None = None


def begin(save: Save) -> None:
    """`save` is in flight until `end`; there must be no other."""
    global _now
    assert _now is None
    _now = save


def end(save: Save) -> None:
    """`save` is over."""
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
    global _now
    _now = None


os.register_at_fork(after_in_child=_forget)
