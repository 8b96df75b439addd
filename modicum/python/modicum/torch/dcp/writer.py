"""`ModicumWriter`: writes checkpoints for torch.distributed.checkpoint (DCP)."""

import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from modicum import _modicum
from modicum.errors import refusal
from modicum.options import MemoryPolicy, SaveOptions, read_options
from modicum.options.renamed import refuse_old_keywords
from modicum.torch.loading.goal import Model
from modicum.torch.loading.origin import origin_of
from modicum.torch.optim import in_flight
from modicum.torch.optim.adamw import AdamW
from modicum.torch.ranks.group import Ranks
from modicum.torch.saving.planning import (
    Parts,
    PlannedSave,
    SaveRequest,
    planned_of,
    state_of,
)
from modicum.torch.saving.running import publish, write
from modicum.torch.saving.state_dicts import (
    SplitStateDict,
    common_facts,
    entries_of,
    goal_as_stored,
    groups_text,
    nested,
    split,
    with_values_of_all,
    writing_of_named,
)
from modicum.torch.saving.tensor_state import writing_of_entries
from modicum.torch.saving.vocabulary import SavedVocabulary, vocabulary_of
from modicum.torch.saving.weights import Form, goal_of
from modicum.torch.saving.writing import CheckpointInFlight, StateWriting
from modicum.upstream.wrappers import canonical, unwrapped
from modicum.walk.arguments import integer, root_of
from modicum.walk.saving import GROUPS_FILE, class_text

Size = int | str
Source = str | os.PathLike[str]


class ModicumWriter(StorageWriter, AsyncStager):
    """The `storage_writer` of `torch.distributed.checkpoint.save` (torch 2.13).

    Writes the same checkpoint as `modicum.torch.save`, from the state dict's tensors: the model as
    final Hugging Face files, into which each rank writes its own elements, without a consolidation
    afterwards. The checkpoint becomes visible as `run/step-N` once all ranks have written.
    `ModicumReader` and `modicum.torch.resume` read it.

    The state dict must have the tensors of one model, under one key or at the top level. It may
    have one optimizer's state dict, as `get_state_dict` or `get_optimizer_state_dict` returns it,
    flattened or not. It may have values as `extra` of `modicum.torch.save`; a rank may have keys
    for these that other ranks lack. In a checkpoint of this writer the `extra` of
    `modicum.torch.resume` is `{"dcp": {"values": {...}, ...}}`: under "values" these values by key,
    a nested one under its path, such as "loop.epoch"; the other entries are for `ModicumReader`.

    All ranks of the default process group take part, with rank 0 as the coordinator. A writer saves
    one checkpoint; `reset` with another `checkpoint_id` begins the next. DCP's `async_save` is
    refused, since it would copy the complete state.
    """

    @refuse_old_keywords(SaveOptions, MemoryPolicy)
    def __init__(
        self,
        run: Source,
        *,
        step: int,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        keep: int | None = None,
        budget: Size | None = None,
        options: SaveOptions | None = None,
        memory: MemoryPolicy | None = None,
    ) -> None:
        """Sets the arguments; opens no file.

        Args:
            run: the directory of all checkpoints, on a file system that all ranks share.
            step: the number of the training step: N of `run/step-N`.
            model: the model of the state dict. The files get the names and shapes of the `source`
                in `options`, or of the checkpoint that `modicum.torch.load` or `ModicumReader` has
                loaded. None: the names and shapes of the state dict.
            optimizer: the optimizer of the state dict. Its class is recorded; without it
                `modicum.torch.resume` does not accept the state. A `modicum.torch.AdamW` is
                refused: a state dict lacks its state tensors.
            keep, budget: as for `modicum.torch.save`.
            options: `SaveOptions` with source, dtype, shard_size and replicas; without `model`
                buffers count as parameters.
            memory: `MemoryPolicy` with `staging` and `ledger`.

        Raises:
            UsageError: `optimizer` is a `modicum.torch.AdamW`, for which there is
                `modicum.torch.save`; `run` is no directory; or an option is invalid.
        """
        acting = ("source", "dtype", "shard_size", "replicas")
        files = read_options("ModicumWriter", SaveOptions, options, acting)
        holding = read_options("ModicumWriter", MemoryPolicy, memory, ("staging", "ledger"))
        optimizer = unwrapped(optimizer)
        if isinstance(optimizer, AdamW):
            what = "a state dict lacks the state tensors of modicum.torch.AdamW"
            raise refusal("UNSUPPORTED", what, expected="modicum.torch.save(model, optimizer=...)")
        self._model, self._optimizer = model, optimizer
        self._form = Form(**files, staging=holding["staging"], adapters=False)
        self._options: dict[str, Any] = {
            "keep": None if keep is None else integer("keep", keep, 1),
            "ledger": holding["ledger"] or _modicum.Ledger(),
            "budget": budget,
        }
        self._at = (root_of(run), integer("step", step, 0))
        self._flight = CheckpointInFlight()
        self._kept: tuple[PlannedSave, int] | None = None  # on rank 0, until `finish`
        self.path: str | None = None
        """The directory of the committed checkpoint, on rank 0; else None."""

    # ---- the interface of StorageWriter

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Source) -> bool:
        """Whether `checkpoint_id` is a path."""
        return isinstance(checkpoint_id, (str, os.PathLike))

    def reset(self, checkpoint_id: Source | None = None) -> None:
        """Begins a save. `checkpoint_id`: RUN/step-N, in place of `run` and `step`; or None."""
        self._flight.end()
        self._flight, self._kept, self.path = CheckpointInFlight(), None, None
        if checkpoint_id is not None:
            path = Path(checkpoint_id).absolute()
            number = path.name.removeprefix("step-")
            if number == path.name or not number.isdecimal():
                got = str(checkpoint_id)
                raise refusal("USAGE", "checkpoint_id", expected="RUN/step-N", got=got)
            self._at = (path.parent, int(number))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises `UsageError` on any thread but the main one, such as the thread of `async_save`
        with another stager. Also raises it unless rank 0, and no other rank, is the coordinator."""
        if threading.current_thread() is not threading.main_thread():
            what = "a save by DCP on another thread than the main one, while training may go on"
            expected = "torch.distributed.checkpoint.save on the main thread, or "
            expected += "modicum.torch.async_save"
            got = f"thread {threading.current_thread().name!r}"
            raise refusal("UNSUPPORTED", what, expected=expected, got=got)
        rank = dist.get_rank() if dist.is_initialized() else 0
        if is_coordinator != (rank == 0):
            what = "a save by some of the ranks, or without collectives"
            expected = "all ranks of the default process group, coordinated by rank 0"
            got = f"rank {rank} {'coordinates' if is_coordinator else 'does not coordinate'}"
            raise refusal("UNSUPPORTED", what, expected=expected, got=got)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan, unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans, unchanged."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's elements. DCP's plan is ignored: its boxes can't describe strided
        shards. On failure every rank raises, and the files are removed."""
        in_flight.finish()
        try:
            with Ranks.of_world().together() as ranks:
                in_flight.deliver()
                parts = with_values_of_all(split(_state_of(planner)), ranks)
                self._write(parts, ranks)
        except BaseException:
            self._flight.end()
            raise
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits the checkpoint. DCP calls it on rank 0, after all ranks have written."""
        assert self._kept is not None
        try:
            published = publish(*self._kept, self._flight)
        finally:
            self._kept = None  # it holds the memory of the state dict
            self._flight.end()
        self.path = published["path"]
        for warning in published["warnings"]:
            warnings.warn(f"modicum: {warning}", stacklevel=2)

    # ---- the interface of AsyncStager, by which async_save asks for its copy

    def stage(self, state_dict: Any) -> NoReturn:
        """Raises `UsageError`: `async_save` is refused before it copies."""
        _refuse_async()

    # ---- the save

    def _write(self, parts: SplitStateDict, ranks: Ranks) -> None:
        root, step = self._at
        self._flight.hold(_read(parts))
        ask = SaveRequest(root=root, step=step, form=self._form, extra=parts.facts, per_rank=None,
                  **self._options)  # fmt: skip
        ranks.agree_on(
            ask.facts() | {"argument source": str(self._form.source)} | common_facts(parts)
        )
        model = None if self._model is None else Model.of(self._model, reshards=True)
        tensors = {canonical(name): tensor for name, tensor in parts.model.items()}
        if model is None:
            goal = goal_as_stored(tensors, self._form.source, ranks)
        else:
            source = None if self._form.source is None else Path(self._form.source)
            origin = origin_of(model.module)
            goal = goal_of(model, ranks, source, origin, self._form.unused)
        writing = writing_of_named(tensors, model, goal, ranks, self._form)
        texts = [("extra/extra.json", ask.common or "")]
        state: StateWriting | None = None
        if parts.optim is not None:
            kind = class_text(None if self._optimizer is None else type(self._optimizer).__name__)
            entries = entries_of(parts.optim["state"], tensors, model)
            found = writing_of_entries(entries, kind, ranks, self._form)
            state = state_of(found, texts, ranks)
            texts.append((GROUPS_FILE, groups_text(parts, kind)))
        vocabulary = SavedVocabulary() if model is None else vocabulary_of(model, goal)
        saved = Parts(writing, state, texts, vocabulary=vocabulary)
        planned = planned_of(ask, goal, saved, ranks)
        write(planned, ranks, self._flight)
        self._kept = (planned, ranks.world_size) if ranks.rank == 0 else None


def _read(parts: SplitStateDict) -> Iterator[tuple[str, Any]]:
    """(name, value) for the tensors that the save reads, among other values of the state."""
    yield from parts.model.items()
    for name, entry in (parts.optim or {"state": {}})["state"].items():
        yield from ((f"{name}.{key}", value) for key, value in entry.items())


def _state_of(planner: SavePlanner) -> dict[str, Any]:
    """The state dict that DCP saves."""
    flat = getattr(planner, "state_dict", None)
    if flat is None:
        got = type(planner).__name__
        raise refusal("UNSUPPORTED", "planner", expected="a DefaultSavePlanner", got=got)
    return nested(flat, getattr(planner, "mappings", {}))


def _refuse_async() -> NoReturn:
    what = "async_save copies the whole state to the host before it writes"
    expected = "torch.distributed.checkpoint.save, or modicum.torch.save"
    raise refusal("UNSUPPORTED", what, expected=expected)
