"""The report of an import."""

from dataclasses import asdict, dataclass, field
from typing import Any

from modicum.walk.load_report import PrintableReport, named_text

_MIB = 1 << 20


@dataclass(frozen=True)
class ImportReport(PrintableReport):
    """The report of `import_checkpoint`."""

    step: int
    path: str
    """The checkpoint's directory."""
    kind: str
    """The program whose checkpoint it was: `torch.distributed.checkpoint`, `accelerate` or
    `DeepSpeed`."""
    written_bytes: int
    """Bytes written, including headers and records."""
    elapsed_s: float
    """From the plan until the checkpoint is visible."""
    durable: bool
    """Whether the checkpoint survives a power cut, as far as the kernel tells. False, with a
    warning, where the file system can't sync a directory."""
    promised_bytes: int
    """The predicted peak of this process's host memory."""
    held_bytes: int
    """Its peak by the kernel's count, Python objects included."""
    left_out: list[str] = field(default_factory=list)
    """Keys of the other program's values that the checkpoint lacks."""
    damaged: list[dict[str, Any]] = field(default_factory=list)
    """A damaged checkpoint of this number, which was renamed: a dict with `step`, `path`, `reason`
    and `bytes`."""
    warnings: list[str] = field(default_factory=list)
    """Warnings, which are also issued as UserWarnings."""

    @property
    def document(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.written_bytes / _MIB:.2f} MiB of {self.kind} written and visible "
            f"after {self.elapsed_s:.2f} s; {remainder_text(self)}"
        )


def remainder_text(report: ImportReport) -> str:
    """The end of a report's text: the memory of the process, and the names left out."""
    return (
        f"the process held at most {report.held_bytes / _MIB:.2f} MiB, "
        f"{report.promised_bytes / _MIB:.2f} MiB predicted{named_text('left out', report.left_out)}"
    )
