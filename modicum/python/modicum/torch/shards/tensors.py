"""The tensors of a model that a load may fill."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from modicum.errors import refusal
from modicum.recipes.structure import Structure, structure_of
from modicum.upstream.torch_core import (
    buffers_of,
    is_persistent,
    local_of,
    parameters_of,
    require_known,
)
from modicum.upstream.torch_fsdp import Managed, fsdp_params


@dataclass
class ModelTensor:
    """A parameter or buffer of a model."""

    name: str
    """The canonical name in the model."""
    tensor: torch.Tensor
    module: nn.Module
    """The module that has it as `attribute`."""
    attribute: str
    managed: Managed | None
    """FSDP2's object for the parameter; None if FSDP2 does not shard it."""

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.tensor, nn.Parameter)

    @property
    def is_persistent(self) -> bool:
        """Whether a state dict has the tensor."""
        return is_persistent(self.module, self.attribute)

    def put(self, tensor: torch.Tensor) -> None:
        """Replaces the tensor in its module."""
        (parameters_of if self.is_parameter else buffers_of)(self.module)[self.attribute] = tensor
        self.tensor = tensor

    @property
    def local(self) -> torch.Tensor:
        return local_of(self.tensor)


def tensors_of(
    model: nn.Module, structure: Structure | None = None, *, scratch: bool = False
) -> dict[str, ModelTensor]:
    """The tensors of the model's state dict, by canonical name; a tied one under each of its names.

    Args:
        structure: the model's structure, if already known.
        scratch: whether to include non-persistent buffers.

    Raises:
        UsageError: a tensor is lazy.
    """
    require_known()
    structure = structure or structure_of(model)
    members = structure.members | (structure.scratch if scratch else {})
    for name, of in members.items():
        if is_lazy(of.tensor):
            what = "a lazy tensor has no shape yet: build the module with its sizes"
            raise refusal("UNSUPPORTED", what, tensor=name)
    managed = fsdp_params(model)
    return {
        name: ModelTensor(name, of.tensor, of.module, of.attribute, managed.get(of.tensor))
        for name, of in members.items()
    }


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as a one-dimensional tensor of bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def copying_into(
    lines: Mapping[int, tuple[torch.Tensor, int]],
) -> Callable[[int, int, memoryview], None]:
    """The function that copies elements from the staging to tensors on a device. `lines`: for each
    target, by index, its memory from `as_bytes` and the size of its elements in bytes."""

    def copy(target: int, at: int, elements: memoryview) -> None:
        line, itemsize = lines[target]
        begin = at * itemsize
        staged = torch.frombuffer(elements, dtype=torch.uint8)
        line[begin : begin + len(elements)].copy_(staged)

    return copy
