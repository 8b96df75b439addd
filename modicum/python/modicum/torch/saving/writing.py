"""What a save writes of an optimizer's state, and the checkpoint while it is written."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modicum import _modicum
from modicum.errors import refusal
from modicum.torch.optim import in_flight
from modicum.torch.ranks.group import Ranks
from modicum.torch.saving.adamw_state import AdamWState
from modicum.torch.saving.examining import set_damaged_aside
from modicum.torch.saving.shared import require_seen
from modicum.torch.saving.weights import Writing
from modicum.upstream.torch_storages import StoragesInPlace


@dataclass(frozen=True)
class StateWriting:
    """An optimizer's state to write."""

    part: _modicum.StateToSave | _modicum.TensorsToSave
    facts: str
    """The text of state.json, the same on every rank."""
    shared_facts: str
    """Further facts that must be equal on all ranks."""
    watched: Sequence[tuple[str, torch.Tensor]]
    """(name, tensor) for all tensors that a program could write to in place."""
    own_bytes: int
    """About how many bytes this rank writes."""
    writing: Writing | None = None
    """Of tensors whose writing replicas divide, as for the model's."""


def adamw_writing(state: AdamWState) -> StateWriting:
    """The state of `modicum.torch.AdamW`: its state tensors."""
    parameters = state.parameters
    return StateWriting(
        part=_modicum.StateToSave(_modicum.StateFiles(parameters), state.held(to_save=True)),
        facts=state.facts(),
        shared_facts=str(
            [(s.fqn, s.dtype, s.shape, s.format, s.is_own_master) for s in parameters]
        ),
        watched=[*state.moments()],
        own_bytes=state.bytes_of_first_replicas(),
    )


def tensors_writing(writing: Writing, facts: str, ranks: Ranks) -> StateWriting:
    """The tensors of any other optimizer's state."""
    return StateWriting(
        part=writing.part,
        facts=facts,
        shared_facts=writing.plan.digest,
        watched=[(name, tensor) for name, tensor, _ in writing.tensors()],
        own_bytes=writing.bytes_of(ranks),
        writing=writing,
    )


class CheckpointInFlight:
    """On rank 0 the checkpoint of this save; empty on other ranks."""

    def __init__(self) -> None:
        self.saving: _modicum.CheckpointSave | None = None
        self.damaged: list[dict[str, Any]] = []
        """A damaged checkpoint of the same number, as `_modicum.set_aside` describes it; on every
        rank."""
        self._in_place: StoragesInPlace | None = None

    def hold(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Until this rank's part is written, tensors that the save reads stay where they are. Call
        before their addresses are taken. While a save in the background writes, calls of this
        thread that would move them wait as those of an optimizer do."""
        self._in_place = StoragesInPlace(tensors, in_flight.settle)

    def leave(self) -> None:
        """Ends `hold`. On any thread."""
        if self._in_place is not None:
            self._in_place.release()

    def require_in_place(self) -> None:
        """Raises `UsageError` if a call past torch's functions has moved memory that was read."""
        if self._in_place is not None and (name := self._in_place.moved()) is not None:
            what = "memory that the save was reading was moved or freed, past the functions of "
            what += "torch that wait for it"
            raise refusal("USAGE", what, tensor=name)

    def begin(self, ranks: Ranks, **arguments: Any) -> _modicum.PartialCheckpoint:
        """Waits for a save in the background, then makes the checkpoint's directory, and first
        renames a damaged checkpoint of its name. Collective. Returns where to write: the directory
        without links in its path on this node. Raises `IoError` if an intact checkpoint has the
        name, or if a rank does not see the directory."""
        in_flight.wait()
        if not arguments.get("inside"):
            self.damaged = set_damaged_aside(Path(arguments["root"]), arguments["step"], ranks)

        def make() -> list[Any]:
            self.saving = _modicum.CheckpointSave(**arguments)
            return [self.saving.directory, str(self.saving.point)]

        (directory, point), _ = ranks.once(make, lambda: None)
        require_seen(Path(directory), ranks)
        return _modicum.PartialCheckpoint(str(Path(directory).resolve()), int(point))

    def end(self) -> None:
        """Removes the files unless the checkpoint was published. Called last, on every rank."""
        self.leave()
        if self.saving is not None:
            self.saving.discard()
