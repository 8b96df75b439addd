"""Plans a load within its budget: the destination of each target, and the C++ library's plan."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from modicum import _modicum
from modicum.errors import UsageError, refusal
from modicum.options import require_flag
from modicum.torch.build.initialiser import Initialiser
from modicum.torch.loading.goal import Goal, Model, memory_before
from modicum.torch.optim.adamw import AdamW
from modicum.torch.optim.inner import unbind_changed
from modicum.torch.optim.names import names_of
from modicum.torch.optim.parts import Memory
from modicum.torch.optim.promise import Needs, needs_of
from modicum.torch.ranks.group import Ranks
from modicum.torch.shards.forks import require_fork
from modicum.torch.shards.placements import Sharding, Shardings, layout_of
from modicum.torch.shards.tensors import ModelTensor, destination_of, overlaps
from modicum.upstream.torch_fsdp import check_replaceable, check_unit_dtypes
from modicum.upstream.torch_rnn import without_weak_references
from modicum.upstream.wrappers import unwrapped

Size = int | str

MIB = 1 << 20
_PAGE_BYTES = 4096


@dataclass(frozen=True)
class Options:
    """The options of a load; see `load`."""

    ledger: _modicum.Ledger
    budget: Size | None
    strategy: str
    staging: Size | None
    fork: str
    seed: int
    check: bool
    progress: bool
    optimizers: Sequence[AdamW] = ()
    later: "StateToRead | None" = None
    """The state that the caller will read after the load."""
    rules: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments that must be equal on all ranks."""

    def __post_init__(self) -> None:
        require_flag("check", self.check)
        require_flag("progress", self.progress)
        require_fork(self.fork)


@dataclass(frozen=True)
class StateToRead:
    """A saved state that the caller of a load will read after it; given next to the optimizers. The
    load's promise (its greatest host memory, known before it starts) includes its memory."""

    needed: Mapping[str, int]
    """Bytes by purpose that it takes on this rank."""
    require: Callable[[Model, Mapping[int, torch.dtype], Sequence[Needs]], None]
    """Called before the load begins with the dtype that each parameter will have, by its id, and
    what each `modicum.torch.AdamW` will need. Raises `UsageError` if the state is not that of the
    parameters."""


def later_of(argument: Any) -> StateToRead | None:
    """The `StateToRead` in `argument`, which is `optimizer` of a load."""
    items = argument if isinstance(argument, (list, tuple)) else ()
    return next((item for item in items if isinstance(item, StateToRead)), None)


def optimizers_of(argument: Any) -> list[AdamW]:
    """The optimizers in `argument`, the argument `optimizer` of a load, which then allocates their
    state. Frees the state of parameters that were replaced, or raises `UsageError` if values would
    be lost."""
    several = isinstance(argument, Iterable) and not isinstance(argument, (str, bytes))
    optimizers: list[Any] = [*argument] if several else [] if argument is None else [argument]
    optimizers = [
        unwrapped(optimizer) for optimizer in optimizers if not isinstance(optimizer, StateToRead)
    ]
    for optimizer in optimizers:
        if not isinstance(optimizer, AdamW):
            what, got = "optimizer", f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
            if isinstance(optimizer, torch.optim.Optimizer):
                what += ": leave out optimizers that allocate their state in their first step"
            raise refusal("USAGE", what, expected="modicum.torch.AdamW", got=got)
        unbind_changed(optimizer)
    return optimizers


@dataclass(frozen=True)
class Place:
    """The destination of a target."""

    entry: ModelTensor
    dtype: torch.dtype
    sharding: Sharding
    device: torch.device
    destination: str
    """`cpu`: new host memory; `given`: host memory that the tensor has; `copy`: device memory, new
    or the tensor's own, or own host memory that is not row-major."""


@dataclass(frozen=True)
class PlannedLoad:
    """A load that fits the budget, before it starts."""

    goal: Goal
    places: list[Place]
    """The places of all targets, in their order."""
    initialiser: Initialiser
    plan: _modicum.Plan
    buffers: list[dict[str, Any]]
    """This rank's buffers, by target."""
    options: Options
    budget: int | None
    budget_source: str
    ranks_per_node: int
    warning: str = ""
    """Why the promise does not include a save, if an optimizer's state can't be saved."""

    def headline(self) -> str:
        """The load in one line."""
        ranks = self.plan.ranks
        nodes = ranks // self.ranks_per_node
        where = "in rank 0's memory" if self.goal.only_rank_0 else "stored"
        most = max(self.plan.promised_bytes(rank) for rank in range(ranks))
        return (
            f"{self.plan.strategy}, {ranks} rank{'s' if ranks > 1 else ''} on "
            f"{nodes} node{'s' if nodes > 1 else ''}, "
            f"{self.goal.checkpoint.bytes / MIB:.2f} MiB {where}, "
            f"at most {most / MIB:.2f} MiB in a rank"
        )


def plan_of(
    model: Model, ranks: Ranks, goal: Goal, options: Options, before: PlannedLoad | None = None
) -> PlannedLoad:
    """Plans a load; the same plan on every rank. Collective.

    Args:
        before: the plan of another load into the same model that runs first; the memory that it
            allocates counts as held.

    Raises:
        BudgetError: the load does not fit.
    """
    strategy = "node-reader" if goal.only_rank_0 else options.strategy
    if ranks.ranks_per_node is None and strategy == "node-reader" and not goal.only_rank_0:
        expected = "the same number of consecutive ranks on every node"
        raise refusal("UNSUPPORTED", "strategy node-reader", expected=expected)
    per_node = ranks.ranks_per_node or ranks.world_size
    names = ("strategy", "staging", "fork", "check", "seed")
    equal = {name: getattr(options, name) for name in names} | {**options.rules}
    facts = {f"argument {name}": repr(value) for name, value in equal.items()}
    facts["argument optimizer"] = repr([optimizer.state_format for optimizer in options.optimizers])
    ranks.agree_on(facts)
    initialiser = Initialiser(
        model.module,
        goal.callers,
        seed=options.seed,
        structure=model.structure,
        empty=lambda shape, dtype: charged(options.ledger, shape, dtype),
    )
    _refuse_other_parameters(options.optimizers, model)
    refuse_two_values(model, goal)
    places = places_of(model, goal)
    baselines = [-(-memory[0] // MIB) * MIB for memory in goal.memories]
    budget, budget_source = budget_of(options, goal.memories, baselines, per_node)
    needs = _needs_of(options, places)
    if options.later is not None:
        dtypes = {id(place.entry.tensor): place.dtype for place in places}
        options.later.require(model, dtypes, needs)
    files, refused = _state_files(needs, model, ranks)
    warning = f"the memory of a save is not predicted: {refused}" if refused else ""
    if warning and ranks.rank == 0:
        warnings.warn(f"modicum: {warning}", stacklevel=3)
    plan = _modicum.make_plan(
        goal.recipe,
        layout_of(goal.recipe, [place.sharding for place in places], ranks.world_size),
        strategy=strategy,
        ranks_per_node=per_node,
        destinations=[place.destination for place in places],
        staging=options.staging,
        baseline=[b + kept_bytes(before, rank) for rank, b in enumerate(baselines)],
        init_bytes=_init_bytes(initialiser, model, goal),
        caller_sends=True,
        budget=budget,
        budget_source=budget_source,
        fork=options.fork,
        after=_after(options, needs, ranks),
        save=files,
    )
    if options.budget is not None:  # which does not lift the limit of the caller's ledger
        options.ledger.require_room(plan.ledger_peak(ranks.rank), "the load")
    buffers = plan.buffers(ranks.rank)
    return PlannedLoad(
        goal, places, initialiser, plan, buffers, options, budget, budget_source, per_node, warning
    )


def _init_bytes(initialiser: Initialiser, model: Model, goal: Goal) -> int:
    """The most memory of initialised tensors at once: those of a module, and the copy of one in
    another dtype."""
    copies = (
        model.tensors[name].tensor.numel() * goal.dtypes[name].itemsize + _PAGE_BYTES
        for name in goal.callers
        if goal.dtypes[name] != model.tensors[name].tensor.dtype
    )
    tensors = initialiser.largest_bytes + initialiser.most_tensors * _PAGE_BYTES
    return tensors + max(copies, default=0)


def _refuse_other_parameters(optimizers: Sequence[AdamW], model: Model) -> None:
    """Raises `UsageError` if an optimizer has a parameter on meta that is not in the model: a load
    would neither allocate nor promise any state of this optimizer."""
    loaded = {id(entry.tensor) for entry in model.tensors.values()}
    for groups in (optimizer.param_groups for optimizer in optimizers):
        parameters = [parameter for group in groups for parameter in group["params"]]
        for name, parameter in zip(names_of(groups), parameters, strict=True):
            if parameter.is_meta and parameter.requires_grad and id(parameter) not in loaded:
                what = "the optimizer has this parameter on meta, and the model does not have it"
                expected = "AdamW made after fully_shard, or within modicum.torch.rebind_parameters"
                raise refusal("USAGE", what, tensor=name, expected=expected)


def _needs_of(options: Options, places: Sequence[Place]) -> list[Needs]:
    """The memory that each optimizer needs after the load."""
    memories = {
        id(place.entry.tensor): Memory(place.dtype, place.device)
        for place in places
        if place.entry.tensor.is_meta
    }
    return [needs_of(optimizer, memories) for optimizer in options.optimizers]


def _after(options: Options, needs: Sequence[Needs], ranks: Ranks) -> list[dict[str, int]]:
    """For each rank the bytes by purpose of the optimizers' state and of `options.later`; an empty
    list if no rank has any."""
    needed = Counter(options.later.needed if options.later else {})
    for need in needs:
        needed.update(need.needed)
    of_ranks = ranks.gather(dict(needed))
    return of_ranks if any(of_ranks) else []


def _state_files(
    needs: Sequence[Needs], model: Model, ranks: Ranks
) -> tuple[_modicum.StateFiles | None, str]:
    """(the files of optimizer state in a save, whose memory the promise includes; the reason why
    its state can't be saved on some rank, or ""). None unless there is exactly one optimizer and
    its state can be saved on all ranks."""
    if len(needs) != 1:
        return None, ""
    stored: list[_modicum.StoredState] = []
    refused = ""
    try:
        stored = needs[0].stored(model.names)
    except UsageError as error:
        refused = str(error)
    refused = next(filter(None, ranks.gather(refused)), "")
    return _modicum.StateFiles(stored) if stored and not refused else None, refused


def kept_bytes(before: PlannedLoad | None, rank: int) -> int:
    """The bytes of host memory, in whole pages, that the load `before` leaves allocated on a rank;
    0 without a load."""
    if before is None:
        return 0
    buffers = before.plan.buffers(rank)
    kept: int = sum(b["bytes"] for t, b in enumerate(buffers) if b["holder"] == t)
    return in_pages(kept)


def in_pages(nbytes: int) -> int:
    """`nbytes`, rounded up to whole pages."""
    return -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES


def charged(ledger: _modicum.Ledger, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor on the host, charged to the ledger, in whole pages, as `init`."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if nbytes == 0:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    line = from_dlpack(_modicum.charge_init(ledger, nbytes))
    return line.view(dtype).view(tuple(shape))


def budget_of(
    options: Options, memories: list[Any], baselines: list[int], per_node: int
) -> tuple[int | None, str]:
    """(the budget of a node in bytes, or None for no limit; the name of its source). The budget
    includes the memory that the processes of the node hold before the load. Of several nodes the
    one with the least memory counts."""
    limit = options.ledger.limit_bytes
    if isinstance(options.budget, bool) or not isinstance(options.budget, (int, str, type(None))):
        expected, got = 'bytes, text such as "200GiB", "none" or None', repr(options.budget)
        raise refusal("USAGE", "budget", expected=expected, got=got)
    if options.budget == "none":
        return None, ""
    if options.budget not in (None, "auto"):
        return _modicum.parse_size(options.budget), "argument"
    if options.budget is None and limit is not None:
        return limit, "ledger"
    totals = []
    for rank, (_, available, source) in enumerate(memories):
        first = rank // per_node * per_node
        totals.append((available + sum(baselines[first : first + per_node]), source))
    return min(totals, key=lambda total: total[0])


def require_budget(
    needed: Mapping[str, int], ledger: _modicum.Ledger, budget: Size | None, ranks: Ranks
) -> None:
    """Raises `BudgetError` if memory that is not part of a load does not fit. Collective. `needed`:
    this rank's, bytes by purpose."""
    of_ranks, memories = ranks.gather(dict(needed)), ranks.gather(memory_before())
    baselines = [-(-memory[0] // MIB) * MIB for memory in memories]
    per_node = ranks.ranks_per_node or ranks.world_size
    options = Options(
        ledger, budget, "own-shard", None, "excluded", 0, check=False, progress=False
    )  # fmt: skip
    limit, source = budget_of(options, memories, baselines, per_node)
    recipe = _modicum.make_recipe(_modicum.open_checkpoint(None), '{"targets": {}, "unused": []}')
    _modicum.make_plan(
        recipe, layout_of(recipe, [], ranks.world_size), ranks_per_node=per_node,
        baseline=baselines, budget=limit, budget_source=source, after=of_ranks,
    )  # fmt: skip
    if budget is not None:  # which does not lift the limit of the caller's ledger
        ledger.require_room(needed, "the optimizer's state")


# ---- destinations


def refuse_two_values(model: Model, goal: Goal) -> None:
    """Raises `UsageError` if the recipe makes two values for one tensor of the model."""
    first: dict[int, str] = {}
    for target in goal.targets:
        entry = model.tensors[target["name"]]
        if (
            target["alias_of"] is None
            and first.setdefault(id(entry.tensor), entry.name) != entry.name
        ):
            what = "two targets of the recipe are one tensor in the model: make one an alias, or "
            what += "build the model untied"
            other = first[id(entry.tensor)]
            raise refusal("MISMATCH", what, tensor=entry.name, expected=f"an alias of {other}")


def places_of(model: Model, goal: Goal) -> list[Place]:
    """The destination of each target. Raises `UsageError` if a tensor can't be filled."""
    check_unit_dtypes(
        model.managed, lambda name: goal.dtypes.get(name, model.tensors[name].tensor.dtype)
    )
    shardings = Shardings()
    places = []
    for target in goal.targets:
        entry = model.tensors[target["name"]]
        if target["alias_of"] is not None:
            holder = model.tensors[target["alias_of"]]
            if entry.tensor is not holder.tensor and (entry.managed or holder.managed):
                what = "FSDP2 has two parameters for two tied names: tie them before fully_shard "
                what += "by model.tie_weights(), again after parallelize_module, to_empty or "
                what += "to('meta')"
                expected = f"the parameter of {holder.name}"
                raise refusal("UNSUPPORTED", what, tensor=entry.name, expected=expected)
        sharding = shardings.of(entry.tensor, entry.name)
        dtype = goal.dtypes[entry.name]
        if entry.tensor.is_meta:
            device = device_of(model, entry)
            destination = "cpu" if device.type == "cpu" else "copy"
            places.append(Place(entry, dtype, sharding, device, destination))
        else:
            places.append(_place_in_own_memory(entry, dtype, sharding))
    with without_weak_references(model.module):
        for place in places:
            if place.entry.tensor.is_meta and isinstance(place.entry.tensor, nn.Parameter):
                check_replaceable(place.entry.name, place.entry.tensor)
    return places


def device_of(model: Model, entry: ModelTensor) -> torch.device:
    """The device that a tensor on meta will have after the load."""
    if entry.managed:
        return entry.managed.device
    if model.buffers_follow_fsdp and model.managed and not entry.is_parameter:
        computes_on: torch.device = next(iter(model.managed.values())).fsdp_param.device
        return computes_on
    mesh = getattr(entry.tensor, "device_mesh", None)
    device = torch.device(mesh.device_type) if mesh is not None else torch.get_default_device()
    if device.type in ("cpu", "meta"):  # the default device may be meta, where models are built
        return torch.device("cpu")
    return torch.empty(0, device=device).device


def _place_in_own_memory(entry: ModelTensor, dtype: torch.dtype, sharding: Sharding) -> Place:
    local = entry.local
    if local.dtype != dtype:
        what = "a tensor that has values can't be loaded in another dtype"
        raise refusal(
            "MISMATCH", what, tensor=entry.name, expected=str(dtype), got=str(local.dtype)
        )
    if overlaps(local):
        what, got = "its elements overlap in memory, as in an expanded tensor", str(local.stride())
        raise refusal("UNSUPPORTED", what, tensor=entry.name, got=f"strides {got}")
    return Place(entry, dtype, sharding.unpadded(), local.device, destination_of(local))
