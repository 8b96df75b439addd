"""What a save and a resume tell of themselves."""

from dataclasses import dataclass, field
from typing import Any

from modicum.walk.report import Report

MIB = 1 << 20


@dataclass(frozen=True)
class Saved:
    """A step that is saved; the same on every rank."""

    step: int
    path: str
    """The step's directory."""
    written_bytes: int
    """By all ranks, headers and records included."""
    read_bytes: int
    """Of tensors that were copied from the source: 0 unless the model leaves some unused."""
    gathered_bytes: int
    """Of the written ones: short runs of divided rows, which the ranks of a node wrote together."""
    elapsed_s: float
    """From the agreement of all ranks until all data are written and synced."""
    durable_s: float
    """From the agreement until the step is visible."""
    promised_bytes: int
    """The most that a rank's process was to hold during the save."""
    held_bytes: int
    """The most that one has held, by the kernel's count: with Python's own objects."""
    blocked_s: float
    """How long the program has waited, on the rank where it did longest: for the call and, in the
    background, for `wait` and in steps."""
    kept_bytes: int
    """In the background: what a rank has copied at most, since a step was about to overwrite it."""
    copied: list[str] = field(default_factory=list)
    """Names of stored tensors that no tensor of the model is made of, copied from the source."""
    left_out: list[str] = field(default_factory=list)
    """Names of stored tensors that are not saved."""
    warnings: list[str] = field(default_factory=list)
    """As what other saves have left over; UserWarnings on rank 0, too."""

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.written_bytes / MIB:.2f} MiB written in {self.elapsed_s:.2f} s, "
            f"visible after {self.durable_s:.2f} s; a rank held at most "
            f"{self.held_bytes / MIB:.2f} MiB, {self.promised_bytes / MIB:.2f} MiB promised"
        )


@dataclass(frozen=True)
class Resumed:
    """A step that is loaded; the same on every rank."""

    step: int
    path: str
    skipped: list[dict[str, Any]]
    """The newer steps that are not whole: `step` and `reason` each."""
    load: Report
    """Of the weights, with the promise of the optimizer's state."""
    read_bytes: int
    """By all ranks: weights and state."""
    elapsed_s: float
    """From the call until the slowest rank has all of its state."""
    extra: dict[str, Any] | None
    """As given to the save; None if nothing was."""
    extra_per_rank: Any
    """This rank's own if as many ranks saved it, else the list of all by rank; None without any."""
