"""Runs a planned save: the saved checkpoint becomes visible completely or not at
all."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modicum import _modicum
from modicum.errors import Error, IoError
from modicum.torch.ranks.group import Ranks
from modicum.torch.saving import extra
from modicum.torch.saving.planning import PlannedSave
from modicum.torch.saving.report import SaveReport
from modicum.torch.saving.states import Event
from modicum.torch.saving.writing import CheckpointInFlight

LOCK_LIMIT_S = 60.0
"""How long a save waits for another one that publishes in the same root."""
_POLL_S = 0.05
_newest: SaveReport | None = None


def newest() -> SaveReport | None:
    """The report of the last checkpoint that this process has saved; None if there is none."""
    return _newest


def run(planned: PlannedSave, ranks: Ranks, flight: CheckpointInFlight) -> SaveReport:
    """Saves in the foreground. Collective. Returns the same report on every rank."""
    begun = OpenSave(planned, ranks, flight)
    return begun.finish(begun.write())


def write(planned: PlannedSave, ranks: Ranks, flight: CheckpointInFlight) -> list[dict[str, Any]]:
    """Writes the files of all ranks without publishing the checkpoint. Collective. Returns the
    outcomes by rank."""
    return ranks.gather(OpenSave(planned, ranks, flight).write())


class OpenSave:
    """A planned save whose directory exists."""

    def __init__(self, planned: PlannedSave, ranks: Ranks, flight: CheckpointInFlight) -> None:
        """Makes the directory and, in the background, the files. Collective."""
        ask, self._began = planned.ask, time.monotonic()
        self.planned, self.ranks, self._flight = planned, ranks, flight
        snapshot = planned.snapshot
        if snapshot is not None:
            snapshot.charge(ask.ledger)
            planned.parts.model.copy_buffers(ranks.rank, ask.ledger)
        folders = {Path(name).parent.name for name, _ in planned.parts.texts}
        has_state = planned.parts.state is not None or "optimizer" in folders
        has_extra = ask.extra is not None or ask.per_rank is not None
        self._partial = flight.begin(
            ranks,
            root=str(ask.root),
            step=ask.step,
            directories=["optimizer"] * has_state + ["extra"] * has_extra,
            keep=ask.keep,
        )
        # In the background ranks do not meet while they write: the board is this process's own.
        self.board = _modicum.Board(ranks if snapshot is None else None)
        self._shared, self._warnings = shared_of(planned.written.gather_bytes, ranks)
        self._warnings += [damaged["warning"] for damaged in flight.damaged]
        self._outcomes: list[dict[str, Any]] = []  # of all ranks
        self._published: dict[str, Any] = {}  # of rank 0
        self._created = 0
        if snapshot is not None:
            rank_of = ranks.rank, ranks.world_size
            self._created = planned.written.create_files(rank_of, self.board, self._partial)
            ranks.barrier()

    def watched(self) -> Iterator[tuple[str, torch.Tensor]]:
        """For a save in the background: (name, tensor) for all tensors that only an optimizer of
        Modicum may write to during the save. Buffers, to which a forward may write, are left out:
        those on the host are copied now, as long as the snapshot's memory has room; the others
        have been copied already."""
        snapshot = self.planned.snapshot
        assert snapshot is not None
        for name, tensor, line in self.planned.parts.model.tensors():
            is_parameter = isinstance(tensor, nn.Parameter)
            if is_parameter or (line is not None and not snapshot.keep(line)):
                yield name, tensor
        if self.planned.parts.state is not None:
            yield from self.planned.parts.state.watched

    def write(self, on_begin: Callable[[], object] = lambda: None) -> dict[str, Any]:
        """Writes this rank's part. In the foreground this is collective; in the background it is
        not, and any thread may call it. `on_begin`: called once the save can be cancelled."""
        planned, ranks, snapshot = self.planned, self.ranks, self.planned.snapshot
        ledger, outside = planned.ask.ledger, planned.ask.ledger.limit_bytes
        if snapshot is None:
            ledger.limit_bytes = ledger.held_bytes + planned.promised[ranks.rank][1]
        try:
            check = planned.ask.sigterm.during(planned.own_bytes)
            with ranks.watching(self.board, check):
                on_begin()
                outcome = planned.written.write(
                    ranks.rank, self.board, ledger, self._partial, threads=planned.threads,
                    snapshot=snapshot, gather=self._gather(),
                )  # fmt: skip
            self._flight.require_in_place()
        finally:
            if snapshot is None:
                ledger.limit_bytes = outside
            self._flight.leave()
        outcome["written_bytes"] += self._created
        if planned.rank_extra is not None:
            extra.write(self._directory / extra.file_of(ranks.rank), planned.rank_extra)
        written_s = time.monotonic() - self._began
        return outcome | {"written_s": written_s, "held_bytes": _peak_bytes()}

    @property
    def _directory(self) -> Path:
        return Path(self._partial.directory)

    def _gather(self) -> _modicum.Gather | None:
        """This rank's end of the shared memory, if the node's ranks write together; else None."""
        if self._shared is None:
            return None
        rank, per_node = self.ranks.rank, self.ranks.ranks_per_node or 1
        return _modicum.Gather(
            self._shared, self.board, rank, rank % per_node, self.planned.ask.ledger
        )

    def finish(
        self, outcome: dict[str, Any], note: Callable[[Event], object] = lambda _: None
    ) -> SaveReport:
        """Publishes what all ranks have written. Collective. `outcome`: this rank's, from `write`.
        Returns the same report on every rank. `note`: called with the events of the commit."""
        self._outcomes = self.ranks.gather(outcome)

        def publish_timed() -> dict[str, Any]:
            note(Event.ALL_VOTED)
            published = publish(self.planned, self.ranks.world_size, self._flight)
            durable_s = time.monotonic() - self._began
            self._published = published | {"durable_s": durable_s, "held_bytes": _peak_bytes()}
            note(Event.PUBLISHED)
            return self._published

        published, _ = self.ranks.once(publish_timed, lambda: None)
        if not self._published:  # by this rank
            self._published = published
            note(Event.PUBLISHED)
        return self._report(self._outcomes, self._published)

    def report_alone(self, outcome: dict[str, Any]) -> SaveReport:
        """The report of a visible checkpoint whose ranks could not finish together: with what this
        rank knows. `outcome`: as for `finish`."""
        durable_s = time.monotonic() - self._began
        alone = "ranks ended before all had the report: its numbers are those of fewer ranks"
        known: dict[str, Any] = {
            "path": str(self._visible_path), "written_bytes": 0, "durable": True, "warnings": [],
            "durable_s": durable_s, "held_bytes": _peak_bytes(),
        } | self._published  # fmt: skip
        known["warnings"] = [*known["warnings"], alone]
        return self._report(self._outcomes or [outcome], known)

    @property
    def name(self) -> str:
        """The name of the save's directory, which no other save has."""
        return self._directory.name

    @property
    def _visible_path(self) -> Path:
        return self.planned.ask.root / f"step-{self.planned.ask.step}"

    def is_visible(self, limit_s: float) -> bool:
        """Whether the root has this save's checkpoint. As long as the save's own directory is
        there, rank 0 may still publish it: waits for that, `limit_s` at most."""
        deadline = time.monotonic() + limit_s
        while True:
            is_last = not self._directory.exists() or time.monotonic() >= deadline
            with suppress(Error, OSError):  # no checkpoint, or another save's, which is damaged
                uuid = _modicum.open_run_checkpoint(str(self._visible_path))["uuid"]
                if self.name.endswith(f"-{uuid}"):
                    return True
            if is_last:
                return False
            time.sleep(_POLL_S)

    def _report(self, outcomes: list[dict[str, Any]], published: dict[str, Any]) -> SaveReport:
        global _newest
        ask = self.planned.ask
        _newest = SaveReport(
            step=ask.step,
            path=published["path"],
            written_bytes=published["written_bytes"]
            + sum(outcome["written_bytes"] for outcome in outcomes),
            read_bytes=sum(outcome["read_bytes"] for outcome in outcomes),
            gathered_bytes=sum(outcome["gathered_bytes"] for outcome in outcomes),
            elapsed_s=max(outcome["written_s"] for outcome in outcomes),
            durable_s=published["durable_s"],
            durable=published["durable"],
            promised_bytes=max(promised for promised, _ in self.planned.promised),
            held_bytes=max(outcome["held_bytes"] for outcome in (*outcomes, published)),
            blocked_s=max(outcome.get("blocked_s", published["durable_s"]) for outcome in outcomes),
            kept_bytes=max(outcome.get("kept_bytes", 0) for outcome in outcomes),
            copied=self.planned.parts.model.plan.copied,
            left_out=self.planned.parts.model.plan.left_out,
            damaged=[
                {key: value for key, value in damaged.items() if key != "warning"}
                for damaged in self._flight.damaged
            ],
            warnings=published["warnings"] + self.planned.parts.warnings + self._warnings,
        )
        return _newest


def _peak_bytes() -> int:
    peak: int = _modicum.process_memory()["peak_bytes"]
    return peak


def shared_of(part_bytes: int, ranks: Ranks) -> tuple[_modicum.SharedGather | None, list[str]]:
    """Memory shared by the ranks of this rank's node: the node's first rank makes it, and the
    others map it by its address. Collective. Returns the memory, and warnings, which are the same
    on every rank. The memory is None if the save needs none; or, with a warning, if a rank of the
    node can't map it."""
    if part_bytes == 0:
        return None, []
    per_node = ranks.ranks_per_node or 1
    first, count = ranks.rank - ranks.rank % per_node, per_node
    gather = None
    if ranks.rank == first:
        with suppress(IoError):
            gather = _modicum.SharedGather(count, part_bytes)
    addresses = ranks.gather([ranks.rank, gather.address if gather else ""])
    if [rank for rank, _ in addresses] != [*range(ranks.world_size)]:  # torch's fake process group
        return None, []
    shared = gather or _modicum.SharedGather.open(addresses[first][1], count, part_bytes)
    mapped = ranks.gather(shared is not None)
    failed = [rank for rank, is_mapped in enumerate(mapped) if not is_mapped]
    warnings = [
        f"rank {rank} can't map memory of the first rank of its node: each rank of this node wrote "
        "its short runs of divided rows by itself"
        for rank in failed
    ]
    if any(first <= rank < first + count for rank in failed):
        return None, warnings
    return shared, warnings


def publish(planned: PlannedSave, world_size: int, flight: CheckpointInFlight) -> dict[str, Any]:
    """Publishes what all ranks have written. Called on rank 0."""
    assert flight.saving is not None
    more: list[tuple[str, str | None]] = [*planned.parts.texts]
    if planned.rank_extra is not None:
        more += [(extra.file_of(rank), None) for rank in range(world_size)]
    lock_limit_s = LOCK_LIMIT_S
    if planned.ask.sigterm.grace_s is not None:
        lock_limit_s = min(lock_limit_s, planned.ask.sigterm.grace_s / 2)
    vocabulary = planned.parts.vocabulary
    published = flight.saving.publish(
        planned.written, more=more, lock_limit_s=lock_limit_s, vocabulary=vocabulary.entry
    )
    published["warnings"] += [vocabulary.warning] if vocabulary.warning else []
    return published
