"""One parameter's way, in the order of the calls:

    checkpoint = modicum.open_checkpoint("path/of/a/checkpoint")
    recipe = modicum.make_recipe(checkpoint)
    layout = modicum.make_layout(recipe, ranks=4)
    plan = modicum.make_plan(recipe, layout, budget="8GiB")
    loaded = modicum.load(plan, rank=0, ledger=modicum.Ledger("8GiB"))
    loaded["model.norm.weight"]  # DLPack and the buffer protocol

No torch is needed.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from modicum import _modicum
from modicum._modicum import Ledger, Plan, Recipe
from modicum.errors import refusal
from modicum.memory.recording import reset_peak
from modicum.walk.report import Report

Size = int | str


def make_plan(
    recipe: Recipe,
    layout: _modicum.Layout,
    *,
    strategy: str = "own-shard",
    ranks_per_node: int | None = None,
    given: Iterable[str] = (),
    staging: Size | None = None,
    baseline: Size | None = None,
    budget: Size | None = None,
    fork: str = "excluded",
) -> Plan:
    """Who reads what, and what every rank will hold. Touches nothing.

    Args:
        recipe: of `make_recipe`.
        layout: of `make_layout`.
        strategy: own-shard, node-reader, replica-striped, rank0-broadcast or full-per-rank.
        ranks_per_node: None: all on one node.
        given: names of the targets that `load(into=...)` will put into the caller's memory.
        staging: bytes per rank, committed whole; None: 8 MiB, less where a budget needs it.
        baseline: what a rank process holds before the load; None: 2 MiB.
        budget: host memory per node, bytes or "1.5GiB"; None: no verdict.
        fork: what forked children find of the shards: "excluded" (nothing: who reads is ended by
            SIGSEGV), "shared" (live values) or "inherited" (copies, which are promised).

    Raises:
        BudgetError: it does not fit; says by how much and who holds most.
        UsageError: `given` names no target.
    """
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
    """Of each target by its name. USAGE where `named` has another name."""
    numbers = {target["name"]: t for t, target in enumerate(recipe.targets)}
    if unknown := set(named) - numbers.keys():
        raise refusal("USAGE", "no such target", tensor=min(unknown))
    return numbers


class Shards(Mapping[str, Any]):
    """A rank's local buffers by name: one-dimensional arrays of bytes, padding at the end, that
    speak DLPack and the buffer protocol. An array keeps its memory, and its entry in the ledger,
    until it dies; one that was never taken keeps it as long as this object."""

    def __init__(self, plan: Plan, rank: int, loaded: Any, ledger: Ledger) -> None:
        self.ledger = ledger
        self._loaded = loaded
        self._buffers = plan.buffers(rank)
        self._index = _numbers(plan.recipe)
        self._taken: dict[int, Any] = {}
        self.outcome: dict[str, Any] = loaded.outcome
        """What this rank read and held, as in a report."""

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
        """This rank's part, without padding."""
        return self._buffers[self._index[name]]["shape"]


def require_check(check: str | None) -> None:
    """Refuses a `check=` that there is none of."""
    if check not in (None, "values"):
        raise refusal("USAGE", "unknown check", expected="values", got=str(check))


def load(
    plan: Plan,
    rank: int = 0,
    *,
    into: Mapping[str, Any] | None = None,
    ledger: Ledger | None = None,
    check: str | None = None,
    threads: int = 0,
    seed: int = 0,
) -> Shards:
    """Carries out one rank's part of a plan. Ranks need not know of each other: a plan whose
    strategy sends bytes between them is refused.

    Everything that is held is charged to `ledger` and committed before the first data byte is read.
    The interpreter's lock is released; Ctrl-C ends the load.

    Args:
        plan: of `make_plan`.
        rank: whose part.
        into: memory for the targets that the plan has as `given`: contiguous host arrays of the
            local buffer's bytes, by DLPack or the buffer protocol. After an error it holds nothing
            of use.
        ledger: None: one whose limit is this rank's line of the promise.
        check: None, or "values": poison first, then compare every value with a second reading.
        threads: 0: one per usable CPU; staging decides how many fit.
        seed: of `init` rules.

    Raises:
        BudgetError, FormatError, IntegrityError, IoError, UsageError.
    """
    require_check(check)
    if len(plan.exchange_group(rank)) > 1:
        what = f"strategy {plan.strategy} sends bytes between ranks, and there is one"
        raise refusal("USAGE", what)
    index = _numbers(plan.recipe, into or ())
    ledger = ledger or Ledger(plan.ledger_limit_bytes(rank))
    reset_peak()
    before = _modicum.process_memory()["held_bytes"]
    loaded = _modicum.load(
        plan,
        rank,
        _modicum.Board(),
        ledger,
        given={index[name]: array for name, array in (into or {}).items()},
        threads=threads,
        check=check is not None,
        seed=seed,
    )
    shards = Shards(plan, rank, loaded, ledger)
    peak = _modicum.process_memory()["peak_bytes"]
    shards.outcome |= {"baseline_bytes": before, "kernel_peak_bytes": peak}
    return shards


def report(plan: Plan, outcomes: Iterable[dict[str, Any]], *, checked: bool = False) -> Report:
    """The report of all ranks' outcomes (`Shards.outcome`), rank 0 first."""
    return Report(*_modicum.load_report(plan, list(outcomes), checked))
