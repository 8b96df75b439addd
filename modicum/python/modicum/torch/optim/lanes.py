"""Transfers between a state on the host and its parameters on a device: gradients to the host, and
new parameters to the device. They go directly to and from the state tensors (arrays of one
kind of value, such as the gradients) if the dtypes are equal, else through a small staging."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from modicum import _modicum
from modicum.torch.optim.parts import Part, Slot
from modicum.torch.shards.tensors import stream_of

SLOTS = 4
"""Staging slots per thread."""


class Lane:
    """The transfers of one state, whose parameters have one dtype and are on one device.

    Copies are enqueued on the stream that is current on the device, in order with the caller's own
    work. They overlap with work on other streams if the state's memory is pinned.
    """

    def __init__(
        self,
        state: _modicum.AdamW,
        parts: Sequence[Part],
        masters: Mapping[int, torch.Tensor] | None,
    ) -> None:
        """
        Args:
            parts: in the order of the state's shards.
            masters: the masters by shard, if they have the parameters' dtype: new parameters are
                copied from them. None: new parameters are rounded into slots of the staging, and
                copied from there.
        """
        self._state = state
        self._masters = masters
        self._parts = parts
        self._device = parts[0].local.device
        self._dtype = parts[0].local.dtype
        staging = torch.from_dlpack(state.staging)
        self._staging = staging.view(self._dtype)
        self._slots = self._staging.view(-1, _modicum.SLOT_BYTES // self._dtype.itemsize)
        self._copied: Any = None  # the event after the copies of `masters`

    def bring(self, grads: Sequence[tuple[Slot, torch.Tensor]]) -> list[int]:
        """Copies one-dimensional gradients to the state: into its buffer, or through the staging if
        the dtype differs. Returns the shards whose gradients are in the buffer."""
        in_place = []
        for slot, grad in grads:
            if grad.dtype == slot.grad_buffer.dtype:
                slot.grad_buffer.copy_(grad, non_blocking=True)
                in_place.append(slot.shard)
            else:
                self._bring_in_pieces(slot, grad)
        if in_place and (stream := stream_of(self._device)):
            stream.synchronize()
        return in_place

    def _bring_in_pieces(self, slot: Slot, grad: torch.Tensor) -> None:
        staging = self._staging.view(torch.uint8).view(grad.dtype)
        for at in range(0, grad.numel(), staging.numel()):
            piece = grad[at : at + staging.numel()]
            staged = staging[: piece.numel()]
            staged.copy_(piece)
            self._state.arrive(slot.shard, staged, at=at)

    def stepping(self) -> _modicum.StateStep:
        """This state's step, for `_modicum.step_all`; call `stepped` after that."""
        if self._masters is not None:
            return _modicum.StateStep(self._state)
        stream = stream_of(self._device)
        sent: dict[int, Any] = {}  # an event by slot; a slot belongs to one thread

        def send(shard: int, at: int, n: int, slot: int) -> None:
            # This runs on a worker thread, whose own current stream is the default one.
            with stream or nullcontext():
                to = self._parts[shard].local[at : at + n]
                to.copy_(self._slots[slot, :n], non_blocking=True)
                if stream:
                    sent[slot] = stream.record_event()

        def wait(slot: int) -> None:
            if slot in sent:
                sent.pop(slot).synchronize()

        dtype = str(self._dtype).removeprefix("torch.")
        return _modicum.StateStep(self._state, send, wait, dtype)

    def stepped(self) -> None:
        """Starts to copy new masters to the device; `settle` waits for the copies."""
        if self._masters is None:
            return
        for shard, master in self._masters.items():
            self._parts[shard].local.copy_(master, non_blocking=True)
        stream = stream_of(self._device)
        self._copied = stream.record_event() if stream else None

    def settle(self) -> None:
        """Waits for the copies of masters. Call it before a master is overwritten."""
        if self._copied is not None:
            self._copied.synchronize()
        self._copied = None
