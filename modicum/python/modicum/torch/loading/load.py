"""`load`: a checkpoint into a model whose parameters are on meta."""

import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modicum import _modicum
from modicum.errors import refusal
from modicum.memory.phases import reset_peak
from modicum.recipes import Recipe, recipe_for
from modicum.recipes.patterns import Rule
from modicum.torch.build.emptied import Emptied
from modicum.torch.build.initialiser import Initialiser
from modicum.torch.ranks.cpus import cpus_of_rank
from modicum.torch.ranks.group import Ranks
from modicum.torch.ranks.progress import progress_bar
from modicum.torch.shards.forks import require_fork
from modicum.upstream.wrappers import canonical
from modicum.torch.shards.placements import Shardings, layout_of
from modicum.torch.shards.tensors import ModelTensor, as_bytes, copying_into, tensors_of
from modicum.upstream.torch_fsdp import (
    check_pinning,
    check_replaceable,
    check_unit_dtypes,
    hand_over,
    pin,
)
from modicum.walk.calls import require_check
from modicum.walk.report import Report

__all__ = ["load"]

Size = int | str
Source = str | Path | None

_MIB = 1 << 20
_PAGE_BYTES = 4096


def load(
    model: nn.Module,
    source: Source,
    *,
    ledger: _modicum.Ledger | None = None,
    budget: Size | None = None,
    strategy: str = "own-shard",
    dtype: torch.dtype | None = None,
    keep_fp32: str | None = None,
    missing: str | Collection[str] | Mapping[str, Rule] = "error",
    unexpected: str | Collection[str] = "error",
    check: str | None = None,
    progress: bool = True,
    seed: int = 0,
    staging: Size | None = None,
    buffers: str | None = None,
    fork: str = "excluded",
) -> Report:
    """Loads a checkpoint into a model built under `empty_parameters()`, sharded or not.

    Every rank of torch's default process group calls it with the same arguments, after
    `fully_shard` (or `parallelize_module`, or neither) and before the first forward; without a
    process group there is one rank. Each rank reads its own bytes only (`own-shard`) into memory
    that becomes FSDP2's own. Parameter objects stay the same, ties stay one storage, and
    `requires_grad` is never changed. What is on meta is loaded or initialised; what has values
    already is overwritten where the source has it, and left alone where not.

    Args:
        model: any module; a transformers model, or one in a wrapper such as PEFT's, is loaded by
            its own conversion mapping.
        source: a directory, a safetensors file, or `org/name` in the local Hugging Face cache;
            None: everything on meta is initialised.
        ledger: with the node's limit; shows every parameter; None: a new one.
        budget: host memory per node, bytes or text ("200GiB"), the processes themselves included;
            "none": no limit; None: the ledger's limit, or what the cgroup and the node leave.
        strategy: own-shard, node-reader, replica-striped, rank0-broadcast or full-per-rank.
        dtype: for all that `from_pretrained` would load so; None: each parameter's own.
        keep_fp32: a regular expression (RE2, searched; here and below one that matches nothing is
            refused): names that it matches are loaded as float32.
        missing: of names that the source lacks, beyond those that the model itself lists: "error";
            "init": made by the model's own rule, the same bits at any world size; or patterns of
            names to be made so, or rules by pattern ("zeros", "ones", ("normal", std), "model").
        unexpected: of stored names that the model lacks: "error", "ignore", or patterns to drop.
        check: None, or "values": poison first, then compare every value with a second reading.
        progress, seed: whether rank 0 draws a bar on stderr; of what is initialised.
        staging: host memory that a rank streams through; None: 8 MiB, less if the budget needs it.
        buffers: real buffers that no state dict has, where they are not what the model's rule
            makes: "restore", "keep", or None: restored if nobody wrote them since `to_empty()`.
        fork: "excluded", "shared" or "inherited": what forked children find (docs/forks.md).

    Returns:
        The same report on every rank: promised, held and unexplained bytes of each. What in the
        source is optional and broken, unused or odd is a UserWarning on rank 0.

    Raises:
        BudgetError: it does not fit; before anything but headers is read.
        UsageError: model, source and arguments do not go together.
        FormatError, IntegrityError, IoError, PeerError: on every rank alike, naming the rank where
            it began. After an error the model's parameters are on meta, as before.
    """
    require_check(check)
    require_fork(fork)
    with Ranks.of_world().together() as ranks:
        walk = _Walk(model, ranks, seed, emptied=Emptied(model, buffers, ranks, seed))
        walk.read_source(source)
        walk.make_recipe(dtype, keep_fp32, "init" if source is None else missing, unexpected)
        walk.make_plan(strategy, staging, ledger, budget, fork)
        if ranks.rank == 0:
            print(f"modicum: {walk.headline()}", file=sys.stderr)
        return walk.load(check, progress)


def said(arguments: Mapping[str, Any]) -> str:
    """The same on every rank, where what is in a set comes in another order."""
    return repr([sorted(of) if isinstance(of, Set) else of for of in arguments.values()])


class _Walk:
    """One load, in the order of the calls."""

    def __init__(
        self,
        model: nn.Module,
        ranks: Ranks,
        seed: int,
        *,
        scratch: bool = False,
        emptied: Emptied | None = None,
    ) -> None:
        self.emptied = emptied
        self.model = model
        self.ranks = ranks
        self.per_node = ranks.ranks_per_node or ranks.world_size
        self.seed = seed
        self.tensors = tensors_of(model, scratch=scratch)
        self.managed = {name: of.managed for name, of in self.tensors.items() if of.managed}
        check_pinning(self.managed)

    # ---- what is meant

    def read_source(self, source: Source) -> None:
        path = None if source is None else Path(source)
        self.checkpoint = _modicum.open_checkpoint(path)
        if self.ranks.rank == 0:
            for warning in self.checkpoint.warnings:
                warnings.warn(f"modicum: {warning}", stacklevel=3)

    def make_recipe(self, dtype: Any, keep_fp32: str | None, missing: Any, unexpected: Any) -> None:
        unwritten = self.emptied.unwritten if self.emptied else ()
        present = [
            name
            for name, of in self.tensors.items()
            if not of.tensor.is_meta and name not in unwritten
        ]
        how = {
            "dtype": dtype, "keep_fp32": keep_fp32, "missing": missing, "unexpected": unexpected,
        }  # fmt: skip
        wanted = json.dumps([said(how), self._own_tensors()])
        self.ranks.agree(hashlib.blake2b(wanted.encode(), digest_size=16).hexdigest())

        def make() -> list[Any]:
            made = self.recipe_of(present=present, **how)
            return [made.text(callers=True), made.callers]

        # Asking transformers takes seconds of every core; of equal questions one is enough. What
        # it leaves in that rank's memory is not the load's; the others look while it asks.
        (text, self.callers), self.memories = self.ranks.once(make, self._look_at_memory)
        self.recipe = _modicum.make_recipe(self.checkpoint, text)
        self.targets = self.recipe.targets
        self.dtypes = {t["name"]: getattr(torch, t["dtype"]) for t in self.targets}
        self.last_made: tuple[str, torch.Tensor | None] = "", None
        self.initialiser = Initialiser(
            self.model, self.callers, seed=self.seed, empty=self._empty_for_init
        )
        self._refuse_what_nothing_makes()

    def recipe_of(self, **how: Any) -> Recipe:
        """On rank 0."""
        return recipe_for(self.model, self.checkpoint.stored, **how)

    def _look_at_memory(self) -> list[Any]:
        """What this process holds before the load, what is left to it, and by whose word."""
        reset_peak()
        self.held = _modicum.process_memory()["held_bytes"]
        return [self.held, *_modicum.available_memory()]

    def _own_tensors(self) -> list[Any]:
        """What a recipe for this model depends on; of tied names, also the first."""
        first: dict[int, str] = {}
        return [
            [
                name,
                str(of.tensor.dtype),
                list(of.tensor.shape),
                of.tensor.is_meta,
                first.setdefault(id(of.tensor), name),
            ]
            for name, of in self.tensors.items()
        ]

    def _refuse_what_nothing_makes(self) -> None:
        """Every element has a source, or nothing is loaded."""
        for name, of in self.tensors.items():
            if of.tensor.is_meta and name not in self.dtypes:
                raise refusal("MISMATCH", "nothing makes this tensor", tensor=name)
        self._refuse_empty_buffers()

    def _refuse_empty_buffers(self) -> None:
        for fqn, buffer in self.model.named_buffers():
            if buffer.is_meta and canonical(fqn) not in self.dtypes:
                what = "nothing computes this buffer: build the model under empty_parameters()"
                raise refusal("UNSUPPORTED", what, tensor=canonical(fqn))

    def _empty_for_init(self, shape: Collection[int], dtype: torch.dtype) -> torch.Tensor:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if nbytes == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        line = torch.from_dlpack(_modicum.charge_init(self.ledger, nbytes))
        return line.view(dtype).view(tuple(shape))

    # ---- what will be done

    def make_plan(
        self,
        strategy: str,
        staging: Size | None,
        ledger: _modicum.Ledger | None,
        budget: Size | None,
        fork: str,
    ) -> None:
        if self.ranks.ranks_per_node is None and strategy == "node-reader":
            what = "node-reader needs nodes of as many ranks each, which follow each other"
            raise refusal("UNSUPPORTED", what)
        places = self._place_targets()
        layout = layout_of(self.recipe, [of.sharding for of in places], self.ranks.world_size)
        self._choose_budget(ledger, budget)
        self.plan = _modicum.make_plan(
            self.recipe,
            layout,
            strategy=strategy,
            ranks_per_node=self.per_node,
            destinations=[of.destination for of in places],
            staging=staging,
            baseline=self.baseline,
            init_bytes=self._init_bytes(),
            caller_sends=True,
            budget=self.budget,
            budget_source=self.budget_source,
            fork=fork,
        )
        self.buffers = self.plan.buffers(self.ranks.rank)

    def _init_bytes(self) -> int:
        """The most that is made here at once; whole pages for each tensor."""
        return self.initialiser.largest_bytes + self.initialiser.most_tensors * _PAGE_BYTES

    def _place_targets(self) -> list[ModelTensor]:
        """Where each target goes."""
        check_unit_dtypes(
            self.managed, lambda name: self.dtypes.get(name, self.tensors[name].tensor.dtype)
        )
        shardings = Shardings()
        places = []
        for target in self.targets:
            of = self.tensors[target["name"]]
            places.append(of)
            if target["alias_of"] is not None:
                self._check_tie(of, self.tensors[target["alias_of"]])
            of.sharding = shardings.of(of.tensor, of.name)
            if of.tensor.is_meta:
                of.device = self._device_of(of)
                of.destination = "cpu" if of.device.type == "cpu" else "copy"
                if of.is_parameter:
                    check_replaceable(of.name, of.tensor)
            else:
                self._place_in_what_is_there(of)
        return places

    @staticmethod
    def _check_tie(of: ModelTensor, holder: ModelTensor) -> None:
        if of.tensor is not holder.tensor and (of.managed or holder.managed):
            what = "two tied names are two parameters of FSDP2: tie them before fully_shard"
            raise refusal("UNSUPPORTED", what, tensor=of.name, expected=f"that of {holder.name}")

    def _device_of(self, of: ModelTensor) -> torch.device:
        if of.managed:
            return of.managed.device
        mesh = getattr(of.tensor, "device_mesh", None)
        device = torch.device(mesh.device_type) if mesh is not None else torch.get_default_device()
        if device.type in ("cpu", "meta"):  # meta is where a model is built, not where it lives
            return torch.device("cpu")
        return torch.empty(0, device=device).device

    def _place_in_what_is_there(self, of: ModelTensor) -> None:
        local, dtype = of.local, self.dtypes[of.name]
        if local.dtype != dtype:
            what = "a tensor that has values already has another dtype"
            raise refusal(
                "MISMATCH", what, tensor=of.name, expected=str(dtype), got=str(local.dtype)
            )
        if not local.is_contiguous():
            raise refusal("UNSUPPORTED", "strides that are not row-major", tensor=of.name)
        of.device = local.device
        of.destination = "given" if local.device.type == "cpu" else "copy"
        of.sharding = of.sharding.unpadded()
        of.storage = local.detach().reshape(-1)

    def _choose_budget(self, ledger: _modicum.Ledger | None, budget: Size | None) -> None:
        """The node's, the processes that are there already included."""
        # The same on all ranks, and small changes make no difference.
        self.baseline = -(-max(of[0] for of in self.memories) // _MIB) * _MIB
        limit = None if ledger is None else ledger.limit_bytes
        if budget == "none":
            self.budget, self.budget_source = None, ""
        elif budget not in (None, "auto"):
            self.budget, self.budget_source = _modicum.parse_size(budget), "argument"
        elif budget is None and limit is not None:
            self.budget, self.budget_source = limit, "ledger"
        else:
            _, available, source = min(self.memories, key=lambda of: of[1])
            self.budget = available + self.per_node * self.baseline
            self.budget_source = source
        self.ledger = ledger or _modicum.Ledger()

    def headline(self) -> str:
        """What is about to happen, in a line."""
        nodes = self.ranks.world_size // self.per_node
        most = max(self.plan.promised_bytes(rank) for rank in range(self.ranks.world_size))
        return (
            f"{self.plan.strategy}, {self.ranks.world_size} ranks on {nodes} "
            f"node{'s' if nodes > 1 else ''}, {self.checkpoint.bytes / _MIB:.2f} MiB stored, "
            f"at most {most / _MIB:.2f} MiB in a rank"
        )

    # ---- doing it

    def load(self, check: str | None, progress: bool) -> Report:
        board = _modicum.Board(self.ranks)
        group = self.plan.exchange_group(self.ranks.rank)
        if len(group) > 1:
            self.ranks.exchange_among(group, whole=self.plan.strategy != "node-reader")
        outside = self.ledger.limit_bytes
        rank = self.ranks.rank
        self.ledger.limit_bytes = self.ledger.held_bytes + self.plan.ledger_limit_bytes(rank)
        try:
            with (
                progress_bar(self._bytes_due(), shown=progress and rank == 0) as bar,
                self.ranks.watching(board, bar),
            ):
                loaded = _modicum.load(
                    self.plan,
                    rank,
                    board,
                    self.ledger,
                    given=self._given(),
                    copy=self._copies(),
                    caller=self._made,
                    broadcast=self.ranks.broadcast if len(group) > 1 else None,
                    threads=cpus_of_rank(self.per_node),
                    check=check is not None,
                    seed=self.seed,
                )
                self._end_making()
                self.ranks.barrier()  # all have theirs: from here on nothing is undone
        finally:
            self.ledger.limit_bytes = outside
        self._hand_over(loaded)
        if self.emptied:
            self.emptied.restore(loaded=self.dtypes)
        return self._report(loaded, check)

    def _bytes_due(self) -> int:
        return sum(b["bytes"] for t, b in enumerate(self.buffers) if b["holder"] == t)

    def _given(self) -> dict[int, Any]:
        return {
            t: as_bytes(of.storage)
            for t, of in self._own_targets()
            if of.destination == "given" and of.storage.numel() > 0
        }

    def _own_targets(self) -> Iterator[tuple[int, ModelTensor]]:
        for t, target in enumerate(self.targets):
            if target["alias_of"] is None:
                yield t, self.tensors[target["name"]]

    def _copies(self) -> Callable[[int, int, memoryview], None] | None:
        """Elements out of the staging, for what lies on a device."""
        lines = {}
        for t, of in self._own_targets():
            if of.destination != "copy":
                continue
            dtype = self.dtypes[of.name]
            if of.storage is None:
                numel = self.buffers[t]["padded_numel"]
                of.storage = torch.empty(numel, dtype=dtype, device=of.device)
            lines[t] = as_bytes(of.storage), dtype.itemsize
        return copying_into(lines) if lines else None

    def _made(self, ordinal: int) -> torch.Tensor:
        name = self.callers[ordinal]
        if self.last_made[0] != name:
            self.last_made = "", None  # frees it before there is another
            self.last_made = name, self.initialiser.whole(name).to(self.dtypes[name])
        return as_bytes(self.last_made[1])

    def _end_making(self) -> None:
        """Nobody will ask for anything more."""
        self.last_made = "", None

    def _hand_over(self, loaded: Any) -> None:
        if any(of.pins for of in self.managed.values()):
            arena = torch.from_dlpack(loaded.whole())
            pin(arena)
            loaded.keep(arena)
        for t, of in self._own_targets():
            if of.tensor.is_meta:
                self._fill(t, of, loaded)
            torch.autograd.graph.increment_version(of.tensor)  # as any write of torch's own
        for target in self.targets:
            of = self.tensors[target["name"]]
            if target["alias_of"] is not None:
                of.put(self.tensors[target["alias_of"]].tensor)

    def _fill(self, t: int, of: ModelTensor, loaded: Any) -> None:
        if of.storage is None:
            of.storage = torch.from_dlpack(loaded.storage(t)).view(self.dtypes[of.name])
        if of.is_parameter:
            hand_over(of.name, of.tensor, of.storage, of.managed)
        else:
            of.put(of.storage.view(of.tensor.shape))

    def _report(self, loaded: Any, check: str | None) -> Report:
        outcome = loaded.outcome | {
            "baseline_bytes": self.held,
            "kernel_peak_bytes": _modicum.process_memory()["peak_bytes"],
        }
        outcomes = self.ranks.gather(outcome)
        return Report(
            *_modicum.load_report(
                self.plan, outcomes, check is not None, self.budget, self.budget_source
            )
        )
