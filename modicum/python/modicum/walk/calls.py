"""The calls of the walk."""

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from modicum import _modicum
from modicum._modicum import Checkpoint, Layout, Ledger, Plan, Recipe
from modicum.errors import refusal
from modicum.memory.recording import reset_peak
from modicum.options import require_flag, require_ledger
from modicum.walk.load_report import LoadReport

Size = int | str


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a checkpoint: reads and validates headers, index and config.json.

    Args:
        path: a directory, a safetensors file, or `org/name` in the local Hugging Face cache.

    Returns:
        The checkpoint. Only `load` reads tensor data.

    Raises:
        FormatError: a header or the index is malformed, or there are only pickles.
        IntegrityError: a file differs from its record; or a save into the directory is in flight,
            or was interrupted (`UNCOMMITTED`).
        IoError: a file can't be read.
        UsageError: the directory has headers only (`UNSUPPORTED`).
    """
    return _modicum.open_checkpoint(path)


def make_layout(
    recipe: Recipe,
    ranks: int,
    layout: str = "fsdp2",
    *,
    mesh: str | None = None,
    shard_dim: int = 0,
    tp_rowwise: str | None = None,
) -> Layout:
    """Maps the elements of each target to local buffers of all ranks.

    Args:
        recipe: from `make_recipe`.
        ranks: the number of ranks.
        layout, mesh, shard_dim, tp_rowwise: as for `modicum.plan`.

    Raises:
        UsageError: the layout is unknown, `mesh` does not have `ranks` ranks, or `tp_rowwise` is
            invalid or matches no name.
    """
    return _modicum.make_layout(
        recipe, ranks, layout, mesh=mesh, shard_dim=shard_dim, tp_rowwise=tp_rowwise
    )


def make_plan(
    recipe: Recipe,
    layout: Layout,
    *,
    strategy: str = "own-shard",
    ranks_per_node: int | None = None,
    given: Iterable[str] = (),
    staging: Size | None = None,
    baseline: Size | None = None,
    budget: Size | None = None,
    fork: str = "excluded",
) -> Plan:
    """Plans the reads and the memory of every rank. Reads no tensor data.

    Args:
        recipe: from `make_recipe`.
        layout: from `make_layout`.
        strategy: own-shard, node-reader, replica-striped, rank0-broadcast or full-per-rank.
        ranks_per_node: None: all ranks are on one node.
        given: names of the targets that `load(into=...)` reads into the caller's memory.
        staging: bytes per rank, committed before the load; None: 8 MiB, less if the budget requires
            it.
        baseline: bytes that each rank's process holds before the load; None: 2 MiB.
        budget: host memory per node, bytes or "1.5GiB"; None: not checked.
        fork: how forked children see the shards: "excluded" (not mapped: an access raises SIGSEGV),
            "shared" (the same memory) or "inherited" (copies, which the promise includes).

    Returns:
        The plan. Equal arguments give equal plans on every rank (`Plan.digest`).

    Raises:
        BudgetError: the plan exceeds the budget. The error has the shortfall and the bytes by
            purpose.
        UsageError: a name in `given` is not a target; or strategy, fork, a size or
            `ranks_per_node` is invalid.
    """
    if isinstance(given, str):
        raise refusal("USAGE", "given", expected="names of targets", got=repr(given))
    wanted = set(given)
    return _modicum.make_plan(
        recipe,
        layout,
        strategy=strategy,
        ranks_per_node=ranks_per_node,
        destinations=["given" if name in wanted else "cpu" for name in _numbers(recipe, wanted)],
        staging=staging,
        baseline=baseline,
        budget=budget,
        fork=fork,
    )


def _numbers(recipe: Recipe, named: Iterable[str] = ()) -> dict[str, int]:
    """The index of each target by name. Raises USAGE if a name in `named` is not a target."""
    numbers = {target["name"]: t for t, target in enumerate(recipe.targets)}
    if unknown := set(named) - numbers.keys():
        raise refusal("USAGE", "no such target", tensor=min(unknown))
    return numbers


class Shards(Mapping[str, Any]):
    """A rank's local buffers by name: one-dimensional arrays of bytes, padded at the end, which
    support DLPack and the buffer protocol. An array owns its memory and its charge in the ledger.
    The memory of a buffer that was never accessed lives as long as this object. Take the arrays on
    one thread; an array may be used on any."""

    outcome: dict[str, Any]
    """This rank's number, pid, bytes and seconds, for `modicum.walk.report`."""

    def __init__(self, plan: Plan, rank: int, loaded: Any, ledger: Ledger) -> None:
        self.ledger = ledger
        self._loaded = loaded
        self._buffers = plan.buffers(rank)
        self._index = _numbers(plan.recipe)
        self._taken: dict[int, Any] = {}
        self.outcome = loaded.outcome

    def __getitem__(self, name: str) -> Any:
        holder = self._buffers[self._index[name]]["holder"]
        if holder not in self._taken:
            self._taken[holder] = self._loaded.storage(holder)
        return self._taken[holder]

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of this rank's shard, without padding."""
        return self._buffers[self._index[name]]["shape"]


def load(
    plan: Plan,
    rank: int = 0,
    *,
    into: Mapping[str, Any] | None = None,
    ledger: Ledger | None = None,
    check: bool = False,
    threads: int = 0,
    seed: int = 0,
) -> Shards:
    """Executes one rank's part of a plan. Ranks do not communicate here: a plan in which this rank
    exchanges bytes with others raises USAGE.

    All memory is charged to `ledger` and committed before the first data byte is read. The GIL is
    released; on the main thread Ctrl-C cancels the load. Its threads have ended when it returns.
    Run one at a time in a process: the measured peak is the process's.

    Args:
        plan: from `make_plan`.
        rank: this rank.
        into: memory for the targets that were planned as `given`: contiguous host arrays of the
            local buffer's size, by DLPack or the buffer protocol. After an error their contents are
            undefined.
        ledger: the account to charge; None: a new one, whose limit is this rank's promise.
        check: whether to fill the buffers with a pattern before the load, and to read the
            checkpoint again afterwards and compare it with every value in the buffers.
        threads: the number of threads, or fewer if staging has no room for them; 0: one per usable
            CPU.
        seed: the seed of `init` rules.

    Returns:
        The rank's buffers. `report` needs their `outcome`.

    Raises:
        BudgetError: the ledger lacks room, or the kernel refuses memory.
        FormatError: a file ends early.
        IntegrityError: a value differs from its record, or from the file with `check`.
        IoError: a file can't be read, or has changed since it was opened (`CONFLICT`).
        UsageError: `rank`, `into` or `seed` is invalid, or the strategy sends bytes between ranks.
    """
    require_flag("check", check)
    if len(plan.exchange_group(rank)) > 1:
        what = f"strategy {plan.strategy} sends bytes between ranks: modicum.walk.load has one rank"
        raise refusal("USAGE", what)
    index = _numbers(plan.recipe, into or ())
    account = require_ledger(ledger) or Ledger(plan.ledger_limit_bytes(rank))
    reset_peak()
    before = _modicum.process_memory()["held_bytes"]
    loaded = _modicum.load(
        plan,
        rank,
        _modicum.Board(),
        account,
        given={index[name]: array for name, array in (into or {}).items()},
        threads=threads,
        check=check,
        seed=seed,
    )
    shards = Shards(plan, rank, loaded, account)
    peak = _modicum.process_memory()["peak_bytes"]
    shards.outcome |= {"baseline_bytes": before, "kernel_peak_bytes": peak}
    return shards


def report(plan: Plan, outcomes: Iterable[dict[str, Any]], *, checked: bool = False) -> LoadReport:
    """The report of a load.

    Args:
        plan: the plan that all ranks have executed.
        outcomes: `Shards.outcome` of all ranks, rank 0 first.
        checked: whether the ranks loaded with `check=True`.

    Returns:
        The report, the same for equal outcomes.

    Raises:
        IntegrityError: a value of a saved checkpoint differs from its record; chunks that no rank
            has read whole are compared here.
        UsageError: the outcome of a rank is missing.
    """
    return LoadReport(*_modicum.load_report(plan, list(outcomes), checked))
