"""Runs a planned load. On failure tensors on meta stay on meta; tensors that had values, which the
load overwrites in place, may be partly overwritten."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from modicum import _modicum
from modicum.torch.loading.compared import compared_by_all
from modicum.torch.loading.goal import Model
from modicum.torch.loading.overwritten import overwriting
from modicum.torch.loading.planning import Place, PlannedLoad, kept_bytes
from modicum.torch.optim.binding import on_meta
from modicum.torch.optim.inner import trained_by
from modicum.torch.optim.promise import held_by
from modicum.torch.ranks.cpus import cpus_of_rank
from modicum.torch.ranks.group import Ranks
from modicum.torch.ranks.progress import progress_bar
from modicum.torch.shards.tensors import as_bytes, copying_into, memory_of
from modicum.upstream.torch_distributed import dtensor_like
from modicum.upstream.torch_fsdp import hand_over, pin
from modicum.upstream.torch_rnn import without_weak_references
from modicum.walk.load_report import LoadReport, named_text

Storages = dict[int, torch.Tensor]


def run(planned: PlannedLoad, model: Model, ranks: Ranks) -> LoadReport:
    """Runs the load; returns the same report on every rank. Collective. If a rank fails, all raise,
    and every tensor on meta stays on meta."""
    if planned.options.progress and ranks.rank == 0:
        print(f"modicum: {planned.headline()}", file=sys.stderr)
    plan, options, rank = planned.plan, planned.options, ranks.rank
    ledger = options.ledger
    storages = _storages_of(planned)
    given_bytes, copied = memory_of(storages)
    board = _modicum.Board(ranks)
    group = plan.exchange_group(rank)
    if len(group) > 1:
        ranks.exchange_among(group, whole=plan.strategy != "node-reader")
    own_targets = list(_own_targets(planned))
    _modicum.report_budget(planned.budget or 0)
    # During the load the ledger's limit is what the plan allows this rank; then the caller's again.
    outside = ledger.limit_bytes
    ledger.limit_bytes = ledger.held_bytes + plan.ledger_limit_bytes(rank)
    try:
        with (
            # What the model's own rules make has the same values after each load.
            overwriting(model, rank, planned.goal.dtypes.keys() - set(planned.goal.callers)),
            progress_bar(
                sum(planned.buffers[t]["bytes"] for t, _ in own_targets),
                shown=options.progress and rank == 0,
            ) as bar,
            ranks.watching(board, bar),
        ):
            loaded = _modicum.load(
                plan,
                rank,
                board,
                ledger,
                given=given_bytes,
                copy=copying_into(copied) if copied else None,
                caller=_maker(planned),
                broadcast=ranks.broadcast if len(group) > 1 else None,
                threads=cpus_of_rank(planned.ranks_per_node),
                check=options.check,
                seed=options.seed,
            )
            _pin(model, loaded)
            compared = compared_by_all(plan.checkpoint, loaded.outcome["compared"], ranks)
    finally:
        ledger.limit_bytes = outside
        planned.initialiser.free()  # before the optimizers allocate
    # Now all ranks have loaded: tensors on meta may get memory.
    with without_weak_references(model.module):
        _hand_over(planned, model, loaded, storages)
    if options.optimizers:
        ranks.barrier()  # a rank that has failed does not call their collectives
    for optimizer in options.optimizers:
        if not on_meta(optimizer.param_groups, trained_by(optimizer)):
            optimizer.allocate()
    return _report(planned, ranks, loaded, compared)


def _own_targets(planned: PlannedLoad) -> Iterator[tuple[int, Place]]:
    """(index, place) of each target that is no alias."""
    for t, (target, place) in enumerate(zip(planned.goal.targets, planned.places, strict=True)):
        if target["alias_of"] is None:
            yield t, place


def _storages_of(planned: PlannedLoad) -> Storages:
    """Tensors by index of a target: the target's own if it has values, or one-dimensional ones of
    new device memory. Targets in new host memory have no entry: the load itself allocates it."""
    storages = {}
    for t, place in _own_targets(planned):
        if not place.entry.tensor.is_meta:
            storages[t] = place.entry.local.detach()
        elif place.destination == "copy":
            numel = planned.buffers[t]["padded_numel"]
            storages[t] = torch.empty(numel, dtype=place.dtype, device=place.device)
    return storages


def _maker(planned: PlannedLoad) -> Callable[[int], torch.Tensor]:
    """A function that makes tensors by the model's own rules when the load asks for them; it keeps
    only the last one."""
    goal = planned.goal
    last: dict[str, torch.Tensor] = {}

    def make(ordinal: int) -> torch.Tensor:
        name = goal.callers[ordinal]
        if name not in last:
            last.clear()  # freed before the next one is made
            last[name] = planned.initialiser.whole(name, goal.dtypes[name])
        return as_bytes(last[name])

    return make


def _pin(model: Model, loaded: _modicum.Loaded) -> None:
    """Pins the new host memory, if FSDP2 wants it. That may fail on one rank alone."""
    if any(managed.pins for managed in model.managed.values()):
        memory = from_dlpack(loaded.whole())  # of all targets in new host memory
        pin(memory)
        loaded.keep(memory)


def _hand_over(
    planned: PlannedLoad, model: Model, loaded: _modicum.Loaded, storages: Storages
) -> None:
    for t, place in _own_targets(planned):
        entry = place.entry
        if entry.tensor.is_meta:
            storage = storages.get(t)
            if storage is None:
                storage = from_dlpack(loaded.storage(t)).view(place.dtype)
            if isinstance(entry.tensor, nn.Parameter):
                hand_over(entry.name, entry.tensor, storage, entry.managed)
            else:
                entry.put(dtensor_like(entry.tensor, storage.view(entry.local.shape)))
        torch.autograd.graph.increment_version(entry.tensor)  # as every write through torch does
    for target, place in zip(planned.goal.targets, planned.places, strict=True):
        if target["alias_of"] is not None:
            place.entry.put(model.tensors[target["alias_of"]].tensor)


def _report(
    planned: PlannedLoad, ranks: Ranks, loaded: _modicum.Loaded, compared: dict[str, Any]
) -> LoadReport:
    outcome = loaded.outcome | {
        "baseline_bytes": planned.goal.memories[ranks.rank][0],
        "kernel_peak_bytes": _modicum.process_memory()["peak_bytes"],
    }
    if planned.options.optimizers:
        states = sum(map(held_by, planned.options.optimizers))
        kept = kept_bytes(planned, ranks.rank) + states
        # The state is allocated after the load, whose outcome lacks it.
        outcome["ledger_peak_bytes"] = max(outcome["ledger_peak_bytes"], kept)
    del outcome["compared"]  # merged already
    outcomes = ranks.gather(outcome)
    is_checked, budget = planned.options.check, planned.budget
    source = planned.budget_source
    document, text = _modicum.load_report(
        planned.plan, outcomes, is_checked, budget, source, compared
    )
    if planned.warning:
        document["warnings"].append(planned.warning)
        text += f"warning: {planned.warning}\n"
    initialised = [
        target["name"] for target in planned.goal.targets if target["op"] in ("init", "caller")
    ]
    unused = planned.goal.recipe.unused
    text = (
        text.rstrip("\n")
        + named_text("initialised", initialised)
        + named_text("not read", unused)
        + "\n"
    )
    return LoadReport(document, text, initialised=initialised, unused=unused)
