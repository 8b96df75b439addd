"""Carries out a planned save on one rank."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from modicum import _modicum
from modicum.torch.ranks.group import Ranks
from modicum.torch.saving.adamw_state import AdamWState
from modicum.torch.saving.shared import require_seen
from modicum.torch.saving.weights import Writing

Outcome = dict[str, int]
"""written_bytes and read_bytes."""


@dataclass(frozen=True)
class Where:
    """What the parts of a save on one rank have in common."""

    ranks: Ranks
    board: _modicum.Board
    ledger: _modicum.Ledger
    directory: Path
    """Of the step in flight."""
    point: int
    """Of the digests' proof."""
    threads: int


class StateWriting(Protocol):
    """An optimizer's state that is to be written."""

    @property
    def held(self) -> Mapping[str, int]:
        """What its save holds on each rank, bytes by purpose."""

    @property
    def facts(self) -> str:
        """state.json, the same on every rank."""

    @property
    def told(self) -> str:
        """All that ranks must have in common."""

    @property
    def published(self) -> dict[str, Any]:
        """Arguments of `StepSave.publish`."""

    def bytes_of(self, ranks: Ranks) -> int:
        """About what this rank writes."""

    def write(self, where: Where) -> Outcome:
        """Writes this rank's part. Collective."""


class AdamWWriting:
    """The planes of `modicum.torch.AdamW`."""

    def __init__(self, state: AdamWState) -> None:
        self._state = state
        self._files = _modicum.StateFiles(state.parameters)
        self.facts = state.facts()

    @property
    def held(self) -> Mapping[str, int]:
        return self._files.held

    @property
    def told(self) -> str:
        return f"{self._state.parameters} {self.facts}"

    @property
    def published(self) -> dict[str, Any]:
        return {"state": self._files, "facts": self.facts}

    def bytes_of(self, ranks: Ranks) -> int:
        return self._state.bytes_of_first_replicas()

    def write(self, where: Where) -> Outcome:
        return _modicum.save_state(
            self._files,
            where.ranks.rank,
            where.ranks.world_size,
            where.board,
            where.ledger,
            (str(where.directory), where.point),
            self._state.held(to_save=True),
        )


class TensorsWriting:
    """The tensors of any other optimizer's state."""

    def __init__(self, writing: Writing, facts: str) -> None:
        self._writing, self.facts = writing, facts

    @property
    def held(self) -> Mapping[str, int]:
        return self._writing.plan.held

    @property
    def told(self) -> str:
        return f"{self._writing.plan.digest} {self.facts}"

    @property
    def published(self) -> dict[str, Any]:
        return {"other_state": self._writing.plan, "facts": self.facts}

    def bytes_of(self, ranks: Ranks) -> int:
        return self._writing.bytes_of(ranks)

    def write(self, where: Where) -> Outcome:
        return write_tensors(self._writing, where)


def write_tensors(writing: Writing, where: Where) -> Outcome:
    """Writes this rank's part of them. Collective."""
    given, fetch = writing.memory()
    return _modicum.save_tensors(
        writing.plan,
        where.ranks.rank,
        where.board,
        where.ledger,
        (str(where.directory), where.point),
        given=given,
        fetch=fetch,
        threads=where.threads,
    )


class Flight:
    """The step in flight of rank 0, until it is published; on other ranks nothing."""

    def __init__(self) -> None:
        self.step: _modicum.StepSave | None = None

    def begin(self, ranks: Ranks, **how: Any) -> tuple[Path, int]:
        """Makes the step's directory. Collective. Returns it, and the point of the proof.
        `IoError` if a rank does not see it."""

        def make() -> list[Any]:
            self.step = _modicum.StepSave(**how)
            return [self.step.directory, str(self.step.point)]

        (directory, point), _ = ranks.once(make, lambda: None)
        require_seen(Path(directory), ranks)
        return Path(directory), int(point)

    def end(self) -> None:
        """Removes the files unless the step was published. Called on every rank, at last."""
        if self.step is not None:
            self.step.discard()
