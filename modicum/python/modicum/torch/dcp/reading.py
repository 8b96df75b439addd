"""What the readers of torch.distributed.checkpoint have in common."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from modicum.torch.ranks.group import Ranks


class PathReader(StorageReader):
    """A StorageReader of a path that leaves DCP's plans unchanged."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether `checkpoint_id` is a path."""
        return isinstance(checkpoint_id, (str, os.PathLike))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Does nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans, unchanged."""
        return plans


@contextmanager
def reading_by(participants: int | None) -> Iterator[Ranks | None]:
    """A context in which the ranks of a `torch.distributed.checkpoint.load` read; if one raises,
    all do. The ranks, for `compared_by_all`, if `participants`, the number of ranks that read, are
    all of the world; else None."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size == 1 or participants != size:
        yield None
        return
    with Ranks.of_world().together() as ranks:
        yield ranks


def done() -> Future[None]:
    """A future that is completed."""
    future: Future[None] = Future()
    future.set_result(None)
    return future
