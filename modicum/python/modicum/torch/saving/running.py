"""Runs a planned save: on success the step is visible, on failure nothing of it is."""

import time
from typing import Any

from modicum import _modicum
from modicum.torch.ranks.cpus import cpus_of_rank
from modicum.torch.ranks.group import Ranks
from modicum.torch.saving import extra
from modicum.torch.saving.planning import Planned
from modicum.torch.saving.report import Saved
from modicum.torch.saving.writing import Flight, Where, write_tensors


def run(planned: Planned, ranks: Ranks, flight: Flight) -> Saved:
    """Collective. The same report on every rank."""
    ask, begin = planned.ask, time.monotonic()
    outcomes = write(planned, ranks, flight)

    def publish_timed() -> dict[str, Any]:
        written_s = time.monotonic() - begin
        published = publish(planned, ranks.world_size, flight)
        return published | {"elapsed_s": written_s, "durable_s": time.monotonic() - begin}

    published, _ = ranks.once(publish_timed, lambda: None)
    return Saved(
        step=ask.step,
        path=published["path"],
        written_bytes=published["written_bytes"] + sum(of["written_bytes"] for of in outcomes),
        read_bytes=sum(of["read_bytes"] for of in outcomes),
        elapsed_s=published["elapsed_s"],
        durable_s=published["durable_s"],
        promised_bytes=max(promised for promised, _ in planned.promised),
        held_bytes=max(of["held_bytes"] for of in outcomes),
        copied=planned.model.plan.copied,
        left_out=planned.model.plan.left_out,
        warnings=published["warnings"],
    )


def write(planned: Planned, ranks: Ranks, flight: Flight) -> list[dict[str, int]]:
    """Writes all files of the ranks, which stay invisible. Collective. Returns the outcomes by
    rank."""
    ask = planned.ask
    directory, point = flight.begin(
        ranks,
        root=str(ask.root),
        step=ask.step,
        has_state=planned.state is not None,
        has_extra=ask.extra is not None or ask.per_rank is not None,
    )
    board = _modicum.Board(ranks)
    threads = cpus_of_rank(ranks.ranks_per_node)
    where = Where(ranks, board, ask.ledger, directory, point, threads)
    outcomes: list[dict[str, int]] = ranks.gather(_written(planned, where))
    return outcomes


def _written(planned: Planned, where: Where) -> dict[str, int]:
    """Writes this rank's part."""
    ledger, outside = where.ledger, where.ledger.limit_bytes
    ledger.limit_bytes = ledger.held_bytes + planned.promised[where.ranks.rank][1]
    try:
        check = planned.ask.sigterm.during(planned.own_bytes)
        with where.ranks.watching(where.board, check):
            outcome = write_tensors(planned.model, where)
            if planned.state is not None:
                folder = where.directory / "optimizer"
                state = planned.state.write(_in(where, folder))
                outcome = {name: of + state[name] for name, of in outcome.items()}
    finally:
        ledger.limit_bytes = outside
    if planned.own is not None:
        name = extra.file_of(where.ranks.rank)
        extra.write(where.directory / name, planned.own)
    return outcome | {"held_bytes": _modicum.process_memory()["peak_bytes"]}


def _in(where: Where, folder: Any) -> Where:
    return Where(where.ranks, where.board, where.ledger, folder, where.point, where.threads)


def publish(planned: Planned, world_size: int, flight: Flight) -> dict[str, Any]:
    """Publishes what all ranks have written; on rank 0."""
    assert flight.step is not None
    more: list[tuple[str, str | None]] = [*planned.texts]
    if planned.own is not None:
        more += [(extra.file_of(rank), None) for rank in range(world_size)]
    state = planned.state.published if planned.state else {}
    return flight.step.publish(planned.model.plan, more=more, keep=planned.ask.keep, **state)
