"""The tensors of a model that a load may fill."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
from modicum.upstream.torch_fsdp import ManagedParameter, fsdp_params


@dataclass
class ModelTensor:
    """A parameter or buffer of a model."""

    name: str
    """The canonical name in the model."""
    tensor: torch.Tensor
    module: nn.Module
    """The module that has it as `attribute`."""
    attribute: str
    managed: ManagedParameter | None
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
    for name, member in members.items():
        if is_lazy(member.tensor):
            what = "a lazy tensor has no shape yet: build the module with its sizes"
            raise refusal("UNSUPPORTED", what, tensor=name)
    managed = fsdp_params(model)
    return {
        name: ModelTensor(
            name, member.tensor, member.module, member.attribute, managed.get(member.tensor)
        )
        for name, member in members.items()
    }


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as a one-dimensional tensor of bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8)


# ---- streams


def stream_of(device: torch.device) -> Any:
    """The device's current stream; None for a device without streams, whose copies are
    synchronous."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return None
    return torch.accelerator.current_stream(device)


def await_streams(tensors: Iterable[torch.Tensor]) -> None:
    """Waits for what this thread has enqueued on the current streams of the tensors' devices. Call
    before other threads copy the tensors: their current stream is the default one, which does not
    wait for a stream that the program has made."""
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        if stream := stream_of(device):
            stream.synchronize()


# ---- elements in row-major order, of tensors with any strides


def destination_of(local: torch.Tensor) -> str:
    """The plan's destination for a tensor that has memory: the library reads and writes row-major
    memory of the host itself (`given`); elements of other tensors are copied through staging."""
    return "given" if local.device.type == "cpu" and local.is_contiguous() else "copy"


def memory_of(
    tensors: Mapping[int, torch.Tensor],
) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """(bytes of the tensors whose destination is `given` and that have elements, all tensors whose
    destination is `copy`), each by target."""
    copied = {t: local.detach() for t, local in tensors.items() if destination_of(local) == "copy"}
    given_bytes = {
        t: as_bytes(local) for t, local in tensors.items() if t not in copied and local.numel() > 0
    }
    return given_bytes, copied


def overlaps(local: torch.Tensor) -> bool:
    """Whether some elements may share memory, as those of an expanded tensor do."""
    last = 0
    for stride, size in sorted(zip(local.stride(), local.shape, strict=True)):
        if size > 1 and stride <= last:
            return local.numel() > 0
        last += (size - 1) * stride
    return False


def copy_run(tensor: torch.Tensor, first: int, target: torch.Tensor) -> None:
    """Copies the elements [first, first + into.numel()) in row-major order. The tensor may have any
    strides, device and dtype; no temporary is larger than `target`."""
    for view in _views_of(tensor, first, target.numel()):
        target[: view.numel()].view(view.shape).copy_(view)
        target = target[view.numel() :]


def copying_into(
    tensors: Mapping[int, torch.Tensor],
) -> Callable[[int, int, memoryview], None]:
    """The function that copies elements from the staging to `tensors`, by target: detached, on a
    device, or with any strides but overlaps. Any thread may call it."""
    await_streams(tensors.values())

    def copy(target: int, at: int, elements: memoryview) -> None:
        tensor = tensors[target]
        staged = torch.frombuffer(elements, dtype=torch.uint8).view(tensor.dtype)
        for view in _views_of(tensor, at, staged.numel()):
            view.copy_(staged[: view.numel()].view(view.shape))
            staged = staged[view.numel() :]

    return copy


def _views_of(tensor: torch.Tensor, first: int, count: int) -> Iterator[torch.Tensor]:
    """Views that together have the elements [first, first + count) in row-major order.

    Example: in shape [3, 4] the elements 2 to 9 are in three views: the end of row 0, row 1, and
    the beginning of row 2.
    """
    if tensor.is_contiguous():
        yield tensor.view(-1)[first : first + count]
        return
    row = tensor[0].numel()
    while count > 0:
        at, within = divmod(first, row)
        n = min(row - within, count)
        if n < row:
            yield from _views_of(tensor[at], within, n)
        else:
            n = count // row * row
            yield tensor[at : at + n // row]
        first, count = first + n, count - n
