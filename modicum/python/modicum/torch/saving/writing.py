"""Writes one rank's part of a planned save into a saved checkpoint."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from modicum import _modicum
from modicum.errors import refusal
from modicum.torch.optim import in_flight
from modicum.torch.ranks.group import Ranks
from modicum.torch.saving.adamw_state import AdamWState
from modicum.torch.saving.examining import set_damaged_aside
from modicum.torch.saving.shared import require_seen
from modicum.torch.saving.weights import Writing
from modicum.upstream.torch_storages import StoragesInPlace

Outcome = dict[str, int]
"""With the keys written_bytes, read_bytes and gathered_bytes."""


class MemoryReads(NamedTuple):
    """The host memory that a part of a save reads, as arguments of `_modicum.Snapshot`."""

    tensors: list[tuple[_modicum.SavePlan, dict[int, torch.Tensor]]]
    states: list[tuple[_modicum.StateFiles, list[_modicum.HeldShard]]]


@dataclass(frozen=True)
class WriteContext:
    """What one rank uses to write the model and the state."""

    ranks: Ranks
    board: _modicum.Board
    ledger: _modicum.Ledger
    directory: Path
    """Where the checkpoint is written before it is published."""
    point: int
    """The random number at which the fingerprints of written elements are evaluated
    (`CheckpointSave.point`)."""
    threads: int
    snapshot: _modicum.Snapshot | None = None
    """For a save in the background."""
    gather: _modicum.Gather | None = None
    """For a save in the foreground in which a node's ranks write together the rows that are divided
    among them."""

    @property
    def partial(self) -> _modicum.PartialCheckpoint:
        return _modicum.PartialCheckpoint(str(self.directory), self.point)


class StateWriting(Protocol):
    """An optimizer's state to write."""

    @property
    def held(self) -> Mapping[str, int]:
        """The bytes by purpose that its save holds on each rank."""

    @property
    def facts(self) -> str:
        """The text of state.json, the same on every rank."""

    @property
    def gather_bytes(self) -> int:
        """Bytes of memory that each rank needs to write rows that are divided among ranks together
        with the other ranks of its node; 0 if it needs none."""

    @property
    def shared_facts(self) -> str:
        """The facts that must be equal on all ranks, as one text."""

    @property
    def published(self) -> dict[str, Any]:
        """Keyword arguments of `CheckpointSave.publish`."""

    @property
    def files(self) -> _modicum.SavePlan | _modicum.StateFiles:
        """The plan of the files that hold the state."""

    @property
    def reads(self) -> MemoryReads:
        """The memory that a save in the background reads."""

    @property
    def writings(self) -> Sequence[Writing]:
        """The tensors whose writing replicas divide, as for the model's tensors."""

    def watched(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) for all tensors that a program could write to in place."""

    def bytes_of(self, ranks: Ranks) -> int:
        """About how many bytes this rank writes."""

    def write(self, where: WriteContext) -> Outcome:
        """Writes this rank's part. Collective, except in the background."""


class AdamWWriting:
    """The state of `modicum.torch.AdamW`: its state tensors."""

    def __init__(self, state: AdamWState, *, background: bool = False) -> None:
        self._state = state
        self._background = background
        self._shards = state.held(to_save=True)
        self.files = _modicum.StateFiles(state.parameters)
        self.facts = state.facts()

    @property
    def held(self) -> Mapping[str, int]:
        staging = {"staging": _modicum.SNAPSHOT_STAGING_BYTES} if self._background else {}
        return self.files.held | staging

    @property
    def gather_bytes(self) -> int:
        return 0  # uses the shared memory of the model's save: its rows are divided in the same way

    @property
    def shared_facts(self) -> str:
        states = self._state.parameters
        facts = [(s.fqn, s.dtype, s.shape, s.format, s.is_own_master) for s in states]
        return f"{facts} {self.facts}"

    @property
    def published(self) -> dict[str, Any]:
        return {"state": self.files, "facts": self.facts}

    @property
    def reads(self) -> MemoryReads:
        return MemoryReads([], [(self.files, self._shards)])

    @property
    def writings(self) -> Sequence[Writing]:
        return ()  # the first replica writes

    def watched(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._state.moments()

    def bytes_of(self, ranks: Ranks) -> int:
        return self._state.bytes_of_first_replicas()

    def write(self, where: WriteContext) -> Outcome:
        return _modicum.save_state(
            self.files,
            where.ranks.rank,
            where.ranks.world_size,
            where.board,
            where.ledger,
            where.partial,
            self._shards,
            where.snapshot,
            where.gather,
        )


class TensorsWriting:
    """The tensors of any other optimizer's state."""

    def __init__(self, writing: Writing, facts: str) -> None:
        self._writing, self.facts = writing, facts

    @property
    def held(self) -> Mapping[str, int]:
        return self._writing.bytes_held

    @property
    def gather_bytes(self) -> int:
        return self._writing.plan.gather_bytes

    @property
    def shared_facts(self) -> str:
        return f"{self._writing.plan.digest} {self.facts}"

    @property
    def published(self) -> dict[str, Any]:
        return {"other_state": self._writing.plan, "facts": self.facts}

    @property
    def files(self) -> _modicum.SavePlan:
        return self._writing.plan

    @property
    def reads(self) -> MemoryReads:
        return reads_of(self._writing)

    @property
    def writings(self) -> Sequence[Writing]:
        return (self._writing,)

    def watched(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor) for name, tensor, _ in self._writing.tensors())

    def bytes_of(self, ranks: Ranks) -> int:
        return self._writing.bytes_of(ranks)

    def write(self, where: WriteContext) -> Outcome:
        return write_tensors(self._writing, where)


def reads_of(writing: Writing) -> MemoryReads:
    return MemoryReads([(writing.plan, writing.memory[0])], [])


def write_tensors(writing: Writing, where: WriteContext) -> Outcome:
    """Writes this rank's part of the tensors. Collective, except in the background."""
    host_bytes, fetch = writing.memory
    return _modicum.save_tensors(
        writing.plan,
        where.ranks.rank,
        where.board,
        where.ledger,
        where.partial,
        given=host_bytes,
        fetch=fetch,
        threads=where.threads,
        snapshot=where.snapshot,
        gather=where.gather,
    )


class CheckpointInFlight:
    """On rank 0 the checkpoint of this save; empty on other ranks."""

    def __init__(self) -> None:
        self.saving: _modicum.CheckpointSave | None = None
        self.damaged: list[dict[str, Any]] = []
        """A damaged checkpoint of the same number, as `_modicum.set_aside` describes it; on every
        rank."""
        self._in_place: StoragesInPlace | None = None

    def hold(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Until this rank's part is written, tensors that the save reads stay where they are. Call
        before their addresses are taken. While a save in the background writes, calls of this
        thread that would move them wait as those of an optimizer do."""
        self._in_place = StoragesInPlace(tensors, in_flight.settle)

    def leave(self) -> None:
        """Ends `hold`. On any thread."""
        if self._in_place is not None:
            self._in_place.release()

    def require_in_place(self) -> None:
        """Raises `UsageError` if a call past torch's functions has moved memory that was read."""
        if self._in_place is not None and (name := self._in_place.moved()) is not None:
            what = "memory that the save was reading was moved or freed, past the functions of "
            what += "torch that wait for it"
            raise refusal("USAGE", what, tensor=name)

    def begin(self, ranks: Ranks, **arguments: Any) -> tuple[Path, int]:
        """Waits for a save in the background, then makes the checkpoint's directory, and first
        renames a damaged checkpoint of its name. Collective. Returns the directory, without links
        in its path on this node, and `WriteContext.point`. Raises `IoError` if an intact checkpoint
        has the name, or if a rank does not see the directory."""
        in_flight.wait()
        if not arguments.get("inside"):
            self.damaged = set_damaged_aside(Path(arguments["root"]), arguments["step"], ranks)

        def make() -> list[Any]:
            self.saving = _modicum.CheckpointSave(**arguments)
            return [self.saving.directory, str(self.saving.point)]

        (directory, point), _ = ranks.once(make, lambda: None)
        require_seen(Path(directory), ranks)
        return Path(directory).resolve(), int(point)

    def end(self) -> None:
        """Removes the files unless the checkpoint was published. Called last, on every rank."""
        self.leave()
        if self.saving is not None:
            self.saving.discard()
