"""`ModicumReader`, the reader of torch.distributed.checkpoint (DCP):

reader = modicum.torch.dcp.ModicumReader("path/of/a/checkpoint", model)
state = model.state_dict()
torch.distributed.checkpoint.load(state, storage_reader=reader)
model.load_state_dict(state, assign=True)
"""

import os
import re
from typing import Any

from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from modicum.options import MemoryPolicy, read_options
from modicum.options.renamed import refuse_old_keywords
from modicum.recipes import LoadRules
from modicum.torch.dcp.readers import FilesReader, Source, StateDictReader, is_written
from modicum.walk.arguments import path_of

_RULING = ("missing", "unexpected", "key_mapping", "recipe", "buffers")


class ModicumReader(StorageReader):
    """The `storage_reader` of `torch.distributed.checkpoint.load`, for Hugging Face files and for
    checkpoints that `ModicumWriter` has written (torch 2.13).

    Each rank reads its own bytes of each tensor, through staging of a fixed size. World size and
    sharding may differ from those of a save. Values of a saved checkpoint are compared with its
    record; 4 MiB of which no rank reads all, only if all ranks of the world read. Tensors and
    DTensors are filled in place, on CPUs or devices; they must be row-major.

    - **Hugging Face files** are read under the model's FQNs as the keys of the state dict, at its
      top level, with the model's conversions: experts that are stored separately; renamed, joined
      or transposed tensors; FP8 codes with their scales. torch's HuggingFaceStorageReader reads
      only tensors that are stored under the same name and shape.
      Values are rounded to the tensors' dtypes. A tensor that `missing` leaves to the model's own
      rule is not in the reader's metadata: DCP reports it as missing, and with
      `DefaultLoadPlanner(allow_partial_load=True)` it keeps its values. When all tensors of `model`
      that the checkpoint holds were read, the checkpoint is the source of `modicum.torch.save`, as
      after `modicum.torch.load`.
    - **A checkpoint of `ModicumWriter`** is read under all keys of the saved state dict, or some of
      them. It is recognised by its COMMIT. A directory without COMMIT that holds `step-N`
      directories is a run: its newest complete checkpoint is read. Rank 0 chooses for all ranks of
      a load, and warns of damaged ones that it skips. With `rules=LoadRules()`, or with any rule
      but `buffers`, the Hugging Face files in one checkpoint are read instead.
    """

    @refuse_old_keywords(LoadRules, MemoryPolicy)
    def __init__(
        self,
        source: Source,
        model: nn.Module | None = None,
        *,
        rules: LoadRules | None = None,
        memory: MemoryPolicy | None = None,
    ) -> None:
        """Opens headers and index; reads no tensor.

        Args:
            source: a directory, a safetensors file, `org/name` in the local Hugging Face cache, or
                a run.
            model: the model of the state dict, already sharded; the conversions of the installed
                transformers apply. It may be on meta: DCP then allocates the state dict's tensors,
                for which torch needs a process group, and `model.load_state_dict(state,
                assign=True)` hands them over. Give it for a checkpoint of `ModicumWriter` if the
                writer was given one. None: names and shapes as stored.
            rules: `LoadRules` with missing, unexpected, key_mapping and buffers, for which a model
                is needed; or with recipe, for names of the state dict's own. DCP's `get_state_dict`
                with an optimizer writes to the parameters, so that after `to_empty()` and that
                call nothing shows which buffers are empty: buffers="restore" restores those that
                no state dict has, such as tables of rotary embeddings; give it in such a program.
            memory: `MemoryPolicy` with `staging` (None: 8 MiB) and `ledger`.

        Raises:
            UsageError: model and checkpoint do not match.
            IntegrityError: the checkpoint is incomplete.
            FormatError, IoError: as for `modicum.torch.load`.
        """
        values = read_options("ModicumReader", LoadRules, rules, _RULING)
        if model is None and values["recipe"] is None:
            read_options("ModicumReader without a model", LoadRules, rules, ())
        policy = read_options("ModicumReader", MemoryPolicy, memory, ("staging", "ledger"))
        self._model, self._options = model, {"rules": values, **policy}
        # No other rule than `buffers` acts on a saved state dict.
        self._may_read_state = rules is None or (
            rules.buffers is not None and rules == LoadRules(buffers=rules.buffers)
        )
        self._open(source)

    def _open(self, source: Source) -> None:
        kind = StateDictReader if self._may_read_state and _is_saved(source) else FilesReader
        self._reader: FilesReader | StateDictReader = kind(source, self._model, self._options)

    @property
    def checkpoint_id(self) -> Source:
        """The checkpoint that is read: for a run, the one that was chosen."""
        return self._reader.checkpoint_id

    # ---- the interface of StorageReader

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether `checkpoint_id` is a path."""
        return isinstance(checkpoint_id, (str, os.PathLike))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Does nothing."""

    def reset(self, checkpoint_id: Source | None = None) -> None:
        """Opens another checkpoint for the same model and rules."""
        if checkpoint_id is not None:
            self._open(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """One chunk per tensor: the whole tensor."""
        return self._reader.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, with the checkpoint that this rank has opened."""
        return self._reader.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans, all with the checkpoint of the coordinator, the first rank."""
        return self._reader.prepare_global_plan(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads all items of this rank's plan, and compares values of a saved checkpoint with its
        record."""
        self._reader.read_data(plan, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _is_saved(source: Source) -> bool:
    """Whether `source` is a run, or a checkpoint that `ModicumWriter` has written."""
    path = path_of("source", source)
    if not path.is_dir():
        return False
    if (path / "COMMIT").exists():
        return is_written(path)
    return any(re.fullmatch(r"step-\d+", entry.name) for entry in path.iterdir())
