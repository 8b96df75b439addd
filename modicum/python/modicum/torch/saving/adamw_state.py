"""Saves and loads the state of `modicum.torch.AdamW` in a saved checkpoint: its
state tensors, with the same bytes as in memory."""

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from modicum import _modicum
from modicum.errors import refusal
from modicum.torch.optim.adamw import AdamW
from modicum.torch.optim.inner import bound_of, note_loaded
from modicum.torch.optim.parts import Part
from modicum.torch.optim.states import require_storable, stored_of
from modicum.torch.saving.tensor_state import FILE, Numbers, kind_of, numbers_of
from modicum.torch.saving.texts import as_damage
from modicum.torch.shards.placements import Shardings


class AdamWState:
    """An optimizer's state, whose parameters have the names that the model gives them."""

    def __init__(self, optimizer: AdamW, names: Mapping[int, str]) -> None:
        """`names`: the name in files by id of a parameter. The state must be allocated."""
        self._optimizer, self._names = optimizer, names
        # Adopts what a program has written to parameters and `state` since the last step.
        optimizer.state_items(codes=True)
        for part in self._parts:
            require_storable(part, self._name_of(part))

    @property
    def _parts(self) -> list[Part]:
        return [*bound_of(self._optimizer).slots]

    def _name_of(self, part: Part) -> str:
        name = self._names.get(id(part.parameter))
        if name is None:
            what = "the optimizer has a parameter that the model lacks"
            raise refusal("MISMATCH", what, tensor=part.name)
        return name

    @property
    def parameters(self) -> list[_modicum.StoredState]:
        """The argument of `_modicum.StateFiles`: all parameters, the same on every rank."""
        return stored_of(self._parts, self._name_of)

    def held(
        self, among: Collection[str] | None = None, *, to_save: bool
    ) -> list[_modicum.HeldShard]:
        """This rank's shards, of the parameters `among` these names. `to_save`: only those of which
        this rank is the first replica."""
        shardings = Shardings()
        return [
            _modicum.HeldShard(slot.state, slot.shard, self._name_of(part))
            for part, slot in bound_of(self._optimizer).slots.items()
            if among is None or self._name_of(part) in among
            if not to_save or _is_first(part, shardings)
        ]

    def moments(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The moments that the optimizer's `state` shows, by name."""
        for part, slot in bound_of(self._optimizer).slots.items():
            for key, (tensor, _) in slot.entry.items():
                if key != "step" and tensor is not None:
                    yield f"{self._name_of(part)}.{key}", tensor

    def bytes_of_first_replicas(self) -> int:
        """About how many bytes of state this rank saves: its share of elements as first replica."""
        shardings = Shardings()
        first = sum(p.local.numel() for p in self._parts if _is_first(p, shardings))
        bytes_by_format = self._optimizer.held.values()
        saved = sum(
            purposes.get("moments", 0) + purposes.get("master", 0) for purposes in bytes_by_format
        )
        return saved * first // max(sum(p.local.numel() for p in self._parts), 1)

    def facts(self) -> str:
        """The text of state.json."""
        counted = zip(self._parts, bound_of(self._optimizer).counts.tolist(), strict=True)
        steps = [(self._name_of(part), int(count)) for part, count in counted]
        have = {name for name, _ in steps}
        without = [name for name in self._names.values() if name not in have]
        optimizer = self._optimizer
        return _modicum.state_text(optimizer.state_format, optimizer.seed, steps, without)

    def take_numbers(self, numbers: Numbers, stored: Collection[str]) -> None:
        """Sets the state of the parameters that torch's Adam has no tensors of, which are not in
        `stored`: those of one element, whose moments are numbers, and those without a step."""
        bound = bound_of(self._optimizer)
        for part in self._parts:
            if (name := self._name_of(part)) in stored:
                continue
            saved = numbers.get(name, {})
            moments = {key: saved[key].flatten() if key in saved else None for key in part.moments}
            bound.take(part, moments | {"step": int(saved.get("step", 0))})

    def note_loaded(self) -> None:
        """Adopts the state tensors and the step counts that were read into the states."""
        bound = bound_of(self._optimizer)
        bound.show_rounded_masters()
        bound.note_steps()
        bound.note_versions()
        note_loaded(self._optimizer)


def is_torchs(state: str) -> bool:
    """Whether torch's Adam or AdamW has saved the state. `state`: the text of its state.json."""
    return kind_of(state) in ("torch.AdamW", "torch.Adam")


def with_moments(
    parameters: Sequence[_modicum.StoredState], stored: Collection[str]
) -> list[_modicum.StoredState]:
    """Those of which torch's Adam has tensors. `stored`: the names of tensors of its state."""
    return [parameter for parameter in parameters if f"{parameter.fqn}.exp_avg" in stored]


def facts_for(optimizer: AdamW, state: str) -> str:
    """The text of a state.json for `optimizer`: `state`, or for the state of torch's optimizers one
    with the saved step counts, and the seed of `optimizer`."""
    if not is_torchs(state):
        return state
    with as_damage(FILE):
        steps = [(fqn, int(numbers["step"])) for fqn, numbers in numbers_of(state).items()]
    return _modicum.state_text("fp32", optimizer.seed, steps, [])


def _is_first(part: Part, shardings: Shardings) -> bool:
    sharding = shardings.of(part.parameter, part.name)
    replicas = _modicum.Shard(sharding, part.parameter.shape, shardings.rank).replicas
    return replicas[0] == shardings.rank
