"""What a load promised beside what happened."""

from collections.abc import Mapping
from typing import Any


class Report:
    """Of all ranks of one load, the same on each of them. `str()` is the table that `modicum load`
    prints."""

    def __init__(self, document: Mapping[str, Any], text: str) -> None:
        self.document = dict(document)
        """As `modicum load --json`; bytes are integers, seconds numbers."""
        self._text = text

    def __str__(self) -> str:
        return self._text

    @property
    def strategy(self) -> str:
        """The strategy that was in force."""
        return self.document["strategy"]

    @property
    def coverage(self) -> str:
        """`proven`: every element of every local buffer was written exactly once. The proof is a
        fingerprint of the places written, at a random point of each load: it misses a wrong with a
        probability of at most elements / 2^61."""
        return self.document["coverage"]

    @property
    def warnings(self) -> list[str]:
        """What of the checkpoint is optional and broken, unused or odd."""
        return self.document["warnings"]

    @property
    def check(self) -> str:
        """`ok`: every value was compared with a second reading; `off`: not asked for."""
        return self.document["check"]

    @property
    def elapsed_s(self) -> float:
        """From the commit of memory to the last byte in place, of the slowest rank."""
        return self.document["elapsed_s"]

    @property
    def ranks(self) -> list[dict[str, int]]:
        """By rank: promised_bytes, ledger_peak_bytes, kernel_peak_bytes, baseline_bytes,
        unexplained_bytes, page_cache_peak_bytes, storage_read_bytes, exchanged_bytes."""
        return self.document["ranks"]
