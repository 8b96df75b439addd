"""Modicum's loader."""

from collections.abc import Callable

import torch
from rivals.model import empty_sharded
from rivals.rows import Case

from modicum.torch import empty_parameters, load


def modicum(case: Case, built: Callable[[], None]) -> torch.nn.Module:
    """Shards the model while it is empty, then fills it."""
    model = empty_sharded(case, empty_parameters)
    built()
    load(model, case.directory, budget="none", progress=False)
    return model
