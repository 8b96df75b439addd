"""Plans a save in a budget; the same on every rank."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modicum import _modicum
from modicum.errors import counted
from modicum.recipes.dtypes import require_exact
from modicum.torch.loading.goal import Goal, Model
from modicum.torch.loading.planning import MIB, Options, Size, budget_of, in_pages
from modicum.torch.optim.adamw import AdamW
from modicum.torch.ranks.group import Ranks
from modicum.torch.saving import groups, tensor_state
from modicum.torch.saving.adamw_state import AdamWState
from modicum.torch.saving.adapters import (
    CONFIG,
    config_text,
    whole_peft_warnings,
    writing_of_adapters,
)
from modicum.torch.saving.extra import COMMON, bytes_of, file_of, text_of
from modicum.torch.saving.replicas import require_equal
from modicum.torch.saving.sigterm import Sigterm
from modicum.torch.saving.tensor_state import writing_of_state
from modicum.torch.saving.vocabulary import SavedVocabulary, vocabulary_of
from modicum.torch.saving.weights import Form, Writing, threads_of, writing_of_model
from modicum.torch.saving.writing import StateWriting, adamw_writing, tensors_writing
from modicum.upstream.wrappers import canonical
from modicum.walk.arguments import integer
from modicum.walk.saving import GROUPS_FILE

WINDOW_BYTES = 256 << 20
"""Per node: memory for copies of blocks that an optimizer step is about to overwrite before a save
in the background has read them."""

_NAMES_SHOWN = 4


@dataclass(frozen=True)
class SaveRequest:
    """The arguments of a save; see `save`."""

    root: Path
    step: int
    keep: int | None
    form: Form
    ledger: _modicum.Ledger
    budget: Size | None
    extra: Any
    per_rank: Any
    sigterm: Sigterm = field(default_factory=Sigterm)
    adapter_names: Mapping[str, str] | None = None
    """As of `adapters.adapter_names`, once it is known what the files hold."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "step", integer("step", self.step, 0))
        if self.keep is not None:
            object.__setattr__(self, "keep", integer("keep", self.keep, 1))

    @property
    def options(self) -> Options:
        """The ledger, budget and staging as options of a load, for `budget_of`."""
        staging = self.form.staging
        return Options(
            self.ledger, self.budget, "own-shard", staging, "excluded", 0,
            check=False, progress=False,
        )  # fmt: skip

    def facts(self) -> dict[str, str]:
        """What must be equal on all ranks, for `Ranks.agree_on`."""
        facts = {
            "argument run": str(self.root.absolute()),
            "argument extra_per_rank": "none" if self.per_rank is None else "given",
        }
        values = {**vars(self.form), "step": self.step, "keep": self.keep, "extra": self.common}
        values |= {"source": str(self.form.source), "grace": self.sigterm.grace_s}
        return facts | {f"argument {name}": repr(value) for name, value in values.items()}

    @cached_property
    def common(self) -> str | None:
        """The text of extra.json."""
        return None if self.extra is None else text_of(self.extra)

    @property
    def rank_extra(self) -> bytes | None:
        """This rank's file of `extra_per_rank`."""
        return None if self.per_rank is None else bytes_of(self.per_rank)


@dataclass(frozen=True)
class Parts:
    """What a save writes."""

    model: Writing
    state: StateWriting | None
    texts: list[tuple[str, str]]
    """Files that rank 0 writes: (path in the checkpoint, text)."""
    warnings: list[str] = field(default_factory=list)
    """About values of the model that are not written; the same on every rank."""
    vocabulary: SavedVocabulary = field(default_factory=SavedVocabulary)


@dataclass(frozen=True)
class PlannedSave:
    """A save that fits the budget, before it starts."""

    ask: SaveRequest
    parts: Parts
    written: _modicum.SaveParts
    """The tensors of `parts`, in this rank's memory."""
    rank_extra: bytes | None
    """This rank's file of `extra_per_rank`."""
    promised: list[tuple[int, int]]
    """By rank: (bytes of the process at its peak, limit of the ledger)."""
    snapshot: _modicum.Snapshot | None
    """For a save in the background; else None."""
    own_bytes: int
    """About how many bytes this rank writes."""
    threads: int
    """With which this rank writes; the promise includes their memory."""


def plan_of(
    ask: SaveRequest,
    model: Model,
    goal: Goal,
    optimizer: torch.optim.Optimizer | None,
    ranks: Ranks,
) -> PlannedSave:
    """The plan of a save. Collective.

    Raises:
        BudgetError: the save does not fit.
    """
    names = model.names
    texts, warnings = [] if ask.common is None else [(COMMON, ask.common)], []
    vocabulary = SavedVocabulary()
    if ask.adapter_names is not None:
        writing = writing_of_adapters(model, ask.adapter_names, goal, ranks, ask.form)
        texts.append((CONFIG, config_text(model.module)))
    else:
        writing = writing_of_model(model, goal, ranks, ask.form)
        warnings = [*_unsaved_states(model.module), *whole_peft_warnings(model.module)]
        vocabulary = vocabulary_of(model, goal)
    state: StateWriting | None = None
    if optimizer is not None:
        texts.append((GROUPS_FILE, groups.text_of(optimizer, names)))
    if isinstance(optimizer, AdamW):
        adamw_state = AdamWState(optimizer, names)
        trained = ((stored.fqn, stored.dtype) for stored in adamw_state.parameters)
        require_exact(ask.form.dtype, trained)
        state = adamw_writing(adamw_state)
    elif optimizer is not None:
        state = state_of(writing_of_state(optimizer, names, ranks, ask.form), texts, ranks)
    return planned_of(ask, goal, Parts(writing, state, texts, warnings, vocabulary), ranks)


def _unsaved_states(model: nn.Module) -> list[str]:
    """A warning if modules have a state by `get_extra_state`, which may be any object. It is not
    called: it may communicate."""
    names = [
        canonical(name) or "the model itself"
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    ]
    if not names:
        return []
    first = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
    what = f"the checkpoint lacks what get_extra_state returns for {counted(len(names), 'module')} "
    return [f"{what}({first}): save it by extra=, and call set_extra_state after the resume"]


def state_of(
    found: tuple[Writing | None, str], texts: list[tuple[str, str]], ranks: Ranks
) -> StateWriting | None:
    """The state to write. `found`: as from `writing_of_state`. A state without tensors is its
    state.json alone, which is added to `texts`."""
    writing, facts = found
    if writing is not None:
        return tensors_writing(writing, facts, ranks)
    texts.append((tensor_state.FILE, facts))
    return None


def planned_of(ask: SaveRequest, goal: Goal, parts: Parts, ranks: Ranks) -> PlannedSave:
    """The plan to save `parts`. Collective. Raises `BudgetError` if it does not fit, CONFLICT if
    replicas differ."""
    model, state, texts = parts.model, parts.state, parts.texts
    facts = state.facts if state else ""
    shared = f"{state.shared_facts} {facts}" if state else "none"
    ranks.agree_on({"the plan": model.plan.digest, "the state": shared} | dict(texts))
    written = _modicum.SaveParts(model.part, state.part if state else None, facts)
    rank_extra = ask.rank_extra
    files = [] if rank_extra is None else [file_of(rank) for rank in range(ranks.world_size)]
    written.require_recordable(texts, files)
    background = ask.form.background
    threads = threads_of(ranks, background=background)
    held_bytes = written.held(threads, background, len(rank_extra or b""))
    snapshot = None
    if background:
        window = WINDOW_BYTES // (ranks.ranks_per_node or ranks.world_size)
        snapshot = written.snapshot(window, ranks.rank)
        held_bytes["snapshot"] = snapshot.bytes
        copied = model.buffers_to_copy(ranks.rank).values()
        held_bytes["init"] = sum(in_pages(buffer.nbytes) for buffer in copied)
    own_bytes = model.bytes_of(ranks) + (state.own_bytes if state else 0)
    promised = _promised(ask, goal, held_bytes, ranks)
    if ask.budget is not None:  # which does not lift the limit of the caller's ledger
        ask.ledger.require_room(held_bytes, "the save")
    require_equal([model, *([state.writing] if state and state.writing else [])], ranks)
    return PlannedSave(ask, parts, written, rank_extra, promised, snapshot, own_bytes, threads)


def _promised(
    ask: SaveRequest, goal: Goal, held_bytes: Mapping[str, int], ranks: Ranks
) -> list[tuple[int, int]]:
    baselines = [-(-memory[0] // MIB) * MIB for memory in goal.memories]
    per_node = ranks.ranks_per_node or ranks.world_size
    budget, source = budget_of(ask.options, goal.memories, baselines, per_node)
    most = {purpose: max(by_rank) for purpose, by_rank in _of_ranks(held_bytes, ranks).items()}
    return _modicum.save_promise(
        most, baselines, ranks_per_node=per_node, budget=budget, budget_source=source
    )


def _of_ranks(held_bytes: Mapping[str, int], ranks: Ranks) -> dict[str, list[int]]:
    """The bytes of each rank, by purpose. Ranks differ by their extra files."""
    gathered = ranks.gather(dict(held_bytes))
    return {purpose: [purposes.get(purpose, 0) for purposes in gathered] for purpose in held_bytes}
