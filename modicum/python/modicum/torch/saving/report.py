"""The reports of `save` and `resume`."""

from dataclasses import asdict, dataclass, field
from typing import Any

from modicum.walk.load_report import LoadReport, PrintableReport, named_text

MIB = 1 << 20


@dataclass(frozen=True)
class SaveReport(PrintableReport):
    """The report of a save; the same on every rank."""

    step: int
    path: str
    """The checkpoint's directory."""
    written_bytes: int
    """Bytes written by all ranks, including headers and records."""
    read_bytes: int
    """Bytes of `copied` tensors, read from the source."""
    gathered_bytes: int
    """The part of `written_bytes` that the ranks of a node have written together: rows of which
    each rank has only a short run."""
    elapsed_s: float
    """From the agreement of all ranks until all data are written and synced."""
    durable_s: float
    """From the agreement until the checkpoint is visible."""
    durable: bool
    """Whether the checkpoint survives a power cut, as far as the kernel tells. False, with a
    warning, where the file system can't sync a directory."""
    promised_bytes: int
    """The predicted peak of host memory of a rank's process; the largest of all ranks."""
    held_bytes: int
    """The peak of a rank's process by the kernel's count, Python objects included; the largest."""
    blocked_s: float
    """How long the program has waited, on the rank that waited longest: in the call of `save` and,
    for `async_save`, in `result` and in optimizer steps."""
    kept_bytes: int
    """In the background: bytes copied before an optimizer step overwrote them, on the rank with the
    most."""
    damaged: list[dict[str, Any]] = field(default_factory=list)
    """A damaged checkpoint of this number, which the save has renamed: a dict with `step`, `path`,
    `reason` and `bytes`."""
    copied: list[str] = field(default_factory=list)
    """Names of stored tensors that the model does not use, copied from the source."""
    left_out: list[str] = field(default_factory=list)
    """Names in the source that are not saved, such as unused tensors with `unused="drop"`."""
    warnings: list[str] = field(default_factory=list)
    """Warnings, such as about files that other saves have left; rank 0 also issues them as
    UserWarnings."""

    @property
    def document(self) -> dict[str, Any]:
        """The report as a dict for JSON. Bytes are integers."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.written_bytes / MIB:.2f} MiB written in {self.elapsed_s:.2f} s, "
            f"visible after {self.durable_s:.2f} s; a rank held at most "
            f"{self.held_bytes / MIB:.2f} MiB, {self.promised_bytes / MIB:.2f} MiB predicted"
            f"{named_text('left out', self.left_out)}"
        )


@dataclass(frozen=True)
class ResumeReport(PrintableReport):
    """The report of a resume; the same on every rank, except `extra_per_rank`."""

    step: int
    path: str
    """The checkpoint's directory."""
    skipped: list[dict[str, Any]]
    """Newer checkpoints that are incomplete or damaged: a dict with `step` and `reason` for
    each."""
    load: LoadReport
    """The report of loading the weights; its prediction includes the optimizer's state."""
    read_bytes: int
    """Bytes of weights and state, read by all ranks."""
    elapsed_s: float
    """From the call until the slowest rank has all of its state."""
    extra: dict[str, Any] | None
    """The `extra` given to the save, or None."""
    extra_per_rank: Any
    """This rank's value if the checkpoint was saved by as many ranks, else the list of all ranks'
    values; None if none was saved."""
    compared_bytes: int = 0
    """Bytes of weights and state that were compared with the checkpoint's record while they were
    read."""
    not_compared: list[str] = field(default_factory=list)
    """Names of the checkpoint's tensors that were not read, or not compared as a whole."""

    @property
    def warnings(self) -> list[str]:
        """The warnings of the load."""
        return self.load.warnings

    @property
    def document(self) -> dict[str, Any]:
        """The report as a dict for JSON, without `extra` and `extra_per_rank`. Bytes are
        integers."""
        shown = {name: value for name, value in vars(self).items() if "extra" not in name}
        return shown | {"load": self.load.document}

    def __str__(self) -> str:
        skipped = "".join(
            f"skipped the checkpoint of step {checkpoint['step']}: {checkpoint['reason']}\n"
            for checkpoint in self.skipped
        )
        return (
            f"{skipped}{self.path}: step {self.step}, {self.read_bytes / MIB:.2f} MiB read in "
            f"{self.elapsed_s:.2f} s\n{self.load}"
        )
