"""The tensors of a model that a load may give values to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from modicum.torch.shards.placements import Sharding
from modicum.upstream.torch_core import (
    buffers_of,
    is_persistent,
    local_of,
    parameters_of,
    require_known,
)
from modicum.upstream.torch_fsdp import Managed, fsdp_params
from modicum.upstream.wrappers import canonical

__all__ = ["ModelTensor", "as_bytes", "copying_into", "tensors_of"]


@dataclass
class ModelTensor:
    """A tensor of the model that will get values."""

    name: str
    tensor: torch.Tensor
    owners: list[tuple[nn.Module, str]]
    managed: Managed | None
    destination: str = "cpu"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    sharding: Sharding | None = None
    storage: torch.Tensor | None = None  # one-dimensional, of the parameter's elements

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.tensor, nn.Parameter)

    @property
    def is_persistent(self) -> bool:
        """In a state dict."""
        module, attribute = self.owners[0]
        return is_persistent(module, attribute)

    def put(self, tensor: torch.Tensor) -> None:
        """Under this name in every module that has it."""
        for module, attribute in self.owners:
            (parameters_of if self.is_parameter else buffers_of)(module)[attribute] = tensor
        self.tensor = tensor

    @property
    def local(self) -> torch.Tensor:
        return local_of(self.tensor)


def tensors_of(model: nn.Module, *, scratch: bool = False) -> dict[str, ModelTensor]:
    """What a state dict would have, by canonical name, one entry per name; with `scratch` also the
    buffers that a state dict lacks."""
    require_known()
    managed = fsdp_params(model)
    found: dict[str, ModelTensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        buffers = {
            name: buffer
            for name, buffer in buffers_of(module).items()
            if scratch or is_persistent(module, name)
        }
        for attribute, tensor in {**parameters_of(module), **buffers}.items():
            if tensor is None:
                continue
            name = canonical(f"{path}.{attribute}" if path else attribute)
            of = found.setdefault(name, ModelTensor(name, tensor, [], managed.get(tensor)))
            of.owners.append((module, attribute))
    return found


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as one line of bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def copying_into(
    lines: Mapping[int, tuple[torch.Tensor, int]],
) -> Callable[[int, int, memoryview], None]:
    """Elements out of the staging, for what lies on a device; by target, its line of bytes and the
    bytes of an element."""

    def copy(target: int, at: int, elements: memoryview) -> None:
        line, itemsize = lines[target]
        begin = at * itemsize
        staged = torch.frombuffer(elements, dtype=torch.uint8)
        line[begin : begin + len(elements)].copy_(staged)

    return copy
