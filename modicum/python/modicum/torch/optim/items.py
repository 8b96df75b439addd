"""Iterates over an optimizer's state by tensor: exported to float32, or as views of memory."""

from collections.abc import Iterator

import torch

from modicum.torch.optim.bound import BoundParameters
from modicum.torch.optim.parts import MOMENTS
from modicum.torch.optim.states import has_master, is_own_master, tensor_dtype

StateItem = tuple[str, str, torch.Tensor]
"""A parameter's name, the name of a value, and the value."""


def exported_items(bound: BoundParameters) -> Iterator[StateItem]:
    """The values of a state dict, one by one. Does not keep a tensor that it has yielded."""
    for part, slot in bound.slots.items():
        step = float(slot.state.steps[slot.shard])
        yield part.name, "step", torch.tensor(step, dtype=torch.float32, device="cpu")
        for name in part.moments:
            yield part.name, name, bound.values(part, name)
        if has_master(part):
            yield part.name, "master", bound.values(part, "master")


def stored_items(bound: BoundParameters) -> Iterator[StateItem]:
    """One-dimensional views of this rank's state tensors and scales, in
    memory order, under the names of the tensors in a checkpoint."""
    for part, slot in bound.slots.items():
        yield part.name, "step", slot.step
        state, shard = slot.state, slot.shard
        names = [] if is_own_master(part) else ["master"]
        for name in (*names, "master_low", *part.moments):
            tensor = torch.from_dlpack(state.plane(shard, name))
            if tensor.numel() > 0:
                yield part.name, name, tensor.view(tensor_dtype(part, name))
            if name in MOMENTS:
                scales = torch.from_dlpack(state.scales(shard, name))
                if scales.numel() > 0:
                    yield part.name, "_".join((name, "scale")), scales.view(torch.float32)
