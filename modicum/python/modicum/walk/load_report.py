"""The report of a load: predicted and measured memory."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

_NAMES_SHOWN = 16


class PrintableReport:
    """A report whose `str()` is a table."""

    def print(self) -> None:
        """Prints the report on rank 0, and nothing on other ranks of torch's process group."""
        distributed: Any = sys.modules.get("torch.distributed")
        has_ranks = distributed is not None and distributed.is_available()
        if not has_ranks or not distributed.is_initialized() or distributed.get_rank() == 0:
            print(self)


class LoadReport(PrintableReport):
    """The report of a load on all ranks. Every rank gets the same report. `str()` is the table that
    `modicum load` prints, `print()` prints it on rank 0, and `document` is the document of `modicum
    load --json`, whose bytes are integers."""

    def __init__(
        self,
        document: Mapping[str, Any],
        text: str,
        *,
        initialised: Sequence[str] = (),
        unused: Sequence[str] = (),
    ) -> None:
        self.document = dict(document)
        """The document of `modicum load --json`. Bytes are integers."""
        self._text = text
        self.initialised = list(initialised)
        """Names of the model's tensors that the source lacks and a rule has made."""
        self.unused = list(unused)
        """Names of the source's tensors that were not read."""

    def __str__(self) -> str:
        return self._text

    @property
    def strategy(self) -> str:
        """The strategy of the load."""
        return self.document["strategy"]

    @property
    def warnings(self) -> list[str]:
        """Warnings about optional parts of the checkpoint that are broken, unused or unusual, and
        about an optimizer's state that can't be saved."""
        return self.document["warnings"]

    @property
    def check(self) -> str:
        """`ok`: a second reading of the checkpoint gave every value again; `off`: the check was not
        requested."""
        return self.document["check"]

    @property
    def digest(self) -> str | None:
        """16 hex digits of the names, dtypes, shapes and values of the loaded tensors, equal for
        any world size and layout, as `modicum load --digest` prints. None without `check=True`,
        whose pass over the values computes it, and if a tensor is on a device."""
        return self.document["digest"]

    @property
    def full_per_rank_bytes(self) -> int:
        """Predicted memory of the fullest node if each rank read the whole model, as `modicum plan
        --compare` predicts for `full-per-rank`; to be compared with the largest `promised_bytes` of
        `document["nodes"]`. For models of a few MB the staging outweighs what the load saves."""
        return self.document["full_per_rank_bytes"]

    @property
    def compared_bytes(self) -> int:
        """If the source is a saved checkpoint: bytes of its values that were
        compared with its record while they were read; the load raises if a value differs."""
        return self.document["compared_bytes"]

    @property
    def not_compared(self) -> list[str]:
        """Names of the saved checkpoint's tensors that were not read, or not compared as a
        whole."""
        return self.document["not_compared"]

    @property
    def elapsed_s(self) -> float:
        """Seconds from the commit of memory to the last byte in place, on the slowest rank."""
        return self.document["elapsed_s"]

    @property
    def ranks(self) -> list[dict[str, int]]:
        """A dict per rank: promised_bytes (predicted, in the table), ledger_peak_bytes (charged),
        kernel_peak_bytes (measured), baseline_bytes (before), unexplained_bytes (not explained),
        page_cache_peak_bytes, storage_read_bytes, exchanged_bytes."""
        return self.document["ranks"]


def named_text(what: str, names: Sequence[str]) -> str:
    """The line of a report that counts the names and shows the first ones; empty without any."""
    if not names:
        return ""
    more = len(names) - _NAMES_SHOWN
    rest = f" and {more} more" if more > 0 else ""
    return f"\n{what} {len(names)}: {', '.join(names[:_NAMES_SHOWN])}{rest}"
