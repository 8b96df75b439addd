"""The parameters of an optimizer bound to their states: state tensors, the
entries of `state`, and the transfer of values and gradients.

The calls for a parameter: add -> [collect -> norms -> step or forget]* -> drop. `collect` hands the
current gradients to the C++ states, which use them until the next `step` or `forget`.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch

from modicum import _modicum
from modicum.errors import UsageError
from modicum.torch.optim import in_flight
from modicum.torch.optim.binding import is_in_place, leave_kept, unbind
from modicum.torch.optim.lanes import Lane
from modicum.torch.optim.parts import MOMENTS, Part, Slot, versions_of
from modicum.torch.optim.state_dicts import address_of, chunks, entry_values, is_noted
from modicum.torch.optim.states import dtype_of, has_master, is_own_master, make_states

# The owner of each state tensor in `memory.attribute`.
_OWNERS = {
    "master": "master",
    "master_low": "master",
    "grad": "gradient",
    **dict.fromkeys(MOMENTS, "moments"),
}


def shows_adamw(state: Mapping[Any, Mapping[str, Any]]) -> bool:
    """Whether an optimizer's `state` has entries of a `modicum.torch.AdamW`, like the `state` of a
    wrapper around one. Not an optimizer that has loaded its state dict: it shares tensors only."""
    shown = {id(slot.shown) for bound in _living for slot in bound.slots.values() if slot.shown}
    return any(id(entry) in shown for entry in state.values())


class BoundParameters:
    """The parameters of an optimizer that have state, and their states. Parameters that are
    unfrozen or added later get additional states."""

    def __init__(self) -> None:
        self.slots: dict[Part, Slot] = {}
        """In the order of the groups; the parts of each later `add` follow."""
        self.lanes: dict[_modicum.AdamW, Lane] = {}
        """The transfers of each state whose parameters are on a device."""
        self.meshes: list[Any] = []
        """The meshes over which the optimizer's collectives run."""
        self.collected: list[tuple[Any, int]] = []
        """(gradient that the state has collected, its version) of each part."""
        self.counts = _float32(0)
        """The step counts of the states, by part."""
        self._steps: list[torch.Tensor] = []  # for each `add` the counts that its slots show
        # By part: the parameter's `versions_of` when its master last agreed with it.
        self._versions: list[int] = []
        self._groups: dict[_modicum.AdamW, int] = {}  # the number of groups that each state knows
        self._read: _modicum.Snapshot | None = None  # of a save that reads memory during the step
        self._stepped: list[torch.Tensor] = []  # the parameters that the step has overwritten
        _living.add(self)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            unbind(self.slots)

    @property
    def states(self) -> list[_modicum.AdamW]:
        return [*self._groups]

    @property
    def steps(self) -> torch.Tensor:
        """The step counts shown in `state`, which a program may change; by part."""
        return torch.cat([_float32(0), *self._steps])

    def add(self, parts: list[Part], groups: Sequence[dict[str, Any]], **arguments: Any) -> None:
        """Allocates states for more parts. `arguments`: those of `make_states`. If they do not fit,
        nothing changes; after any other error call `drop`."""
        states = make_states(parts, **arguments)
        steps = _float32(len(parts)).zero_()
        index = {part: index for index, part in enumerate(parts)}
        slots = {
            part: Slot(state, shard, _state_tensor(state, shard, part, "grad"), steps, index[part])
            for state, state_parts in states
            for shard, part in enumerate(state_parts)
        }
        # In place: the optimizer's finalizer unhooks this dict.
        self.slots |= {part: slots[part] for part in parts}
        self._steps.append(steps)
        self._groups |= {state: len(groups) for state, _ in states}
        for state, state_parts in states:
            self._lay_out(state, state_parts)
        self.counts = torch.cat([self.counts, steps])
        self._versions += [versions_of(part.parameter) for part in parts]

    def drop(self, count: int) -> None:
        """Removes all parts after the first `count`, and frees their states. `count` must be a
        boundary between two calls of `add`."""
        in_flight.settle()
        for part in [*self.slots][count:]:
            del self.slots[part]
        del self.collected[count:], self._versions[count:]
        kept = {slot.state for slot in self.slots.values()}
        self._groups = {state: known for state, known in self._groups.items() if state in kept}
        self.lanes = {state: lane for state, lane in self.lanes.items() if state in kept}
        while sum(map(len, self._steps)) > count:
            self._steps.pop()
        self.counts = self.counts[:count]

    def _lay_out(self, state: _modicum.AdamW, parts: list[Part]) -> None:
        """Sets the views of gradients of a state's parts, and fills masters that are separate from
        parameters."""
        for part in parts:
            is_there = part.on_host and part.local.numel() > 0
            if is_there and dtype_of(part, "grad") == part.local.dtype:
                self.slots[part].set_grad(part)
            if not is_own_master(part):
                self._import_parameter(part)
        if not parts[0].on_host:
            self.lanes[state] = Lane(state, parts, self._masters_to_copy(parts))

    def set_options(self, options: Sequence[_modicum.AdamOptions]) -> None:
        """Sets the groups' options for the next steps."""
        for state, known in self._groups.items():
            for group, group_options in enumerate(options[:known]):
                state.set_options(group, group_options)

    def _masters_to_copy(self, parts: list[Part]) -> dict[int, torch.Tensor] | None:
        """The masters by shard if they have the parameters' dtype, so that a step can copy them to
        the device; else None."""
        if dtype_of(parts[0], "master") != parts[0].local.dtype:
            return None
        shards = enumerate(parts)
        return {
            shard: self.state_tensor(part, "master") for shard, part in shards if part.local.numel()
        }

    def state_tensor(self, part: Part, name: str) -> torch.Tensor:
        """A view of the part's elements in the state tensor `name`: master, grad or a moment."""
        slot = self.slots[part]
        return _state_tensor(slot.state, slot.shard, part, name)

    # ---- the optimizer's `state`

    def show(self, state: Any, parts: Sequence[Part]) -> None:
        """Sets the entries of `parts` in `state`: steps, views of float32 moments, and None for the
        values that only a state dict has: torch.distributed.checkpoint needs their names."""
        self.note_steps()
        for part in parts:
            entry = state.get(part.parameter)
            if not entry:  # none, or the empty one that torch's defaultdict has made
                entry = state[part.parameter] = {}
            slot = self.slots[part]
            slot.shown, entry["step"] = entry, slot.step
            for name in part.moments:
                is_view = dtype_of(part, "moment") == torch.float32
                entry[name] = (
                    part.like_parameter(self.state_tensor(part, name)) if is_view else None
                )
            if has_master(part):
                entry["master"] = None
            shown = (name for name in ("step", *part.moments, "master") if name in entry)
            slot.entry = {name: (entry[name], address_of(entry[name])) for name in shown}

    def follow(self, state: Mapping[Any, Any]) -> bool:
        """Adopts all changes that the program made to `state` since `show`; returns whether they
        set any step count above 0 or any moment. Raises `UsageError`, and adopts none, if one is
        invalid."""
        has_other_step = (self.steps != self.counts).tolist()
        taken = []
        for (part, slot), is_other in zip(self.slots.items(), has_other_step, strict=True):
            entry = state.get(part.parameter)
            if is_other or not is_noted(entry, slot.entry):
                taken.append((part, entry_values(part, entry, slot.entry)))
        for part, values in taken:
            self.take(part, values)
        if taken:
            self.show(state, [part for part, _ in taken])
        return any(
            values.get("step", 0) > 0 or any(values.get(name) is not None for name in MOMENTS)
            for _, values in taken
        )

    def note_steps(self) -> None:
        """Copies the states' step counts to `state` and `counts`."""
        steps = {state: state.steps for state in self.states}
        counts = [float(steps[slot.state][slot.shard]) for slot in self.slots.values()]
        tensor = torch.tensor(counts, dtype=torch.float32, device="cpu")
        for shown, count in zip(self._steps, tensor.split([*map(len, self._steps)]), strict=True):
            shown.copy_(count)
        self.counts = tensor

    # ---- values

    def take(self, part: Part, values: Mapping[str, Any]) -> None:
        """Sets the step and the moments that are in `values`. A moment of None is set to 0."""
        in_flight.settle()
        slot = self.slots[part]
        if "step" in values:
            slot.state.set_steps(slot.shard, values["step"])
        for name in part.moments if part.local.numel() > 0 else ():
            moment = values.get(name)
            if moment is not None:
                if not self._has(part, name, moment):
                    slot.state.import_from(slot.shard, name, moment.float().contiguous())
            elif name in values:
                for memory in _memories(slot, name):
                    memory.zero_()

    def _has(self, part: Part, name: str, values: torch.Tensor) -> bool:
        """Whether a moment in a format smaller than float32 exports exactly these values. If so,
        they must not be imported: that would round them again."""
        if dtype_of(part, "moment") == torch.float32:
            return False
        slot = self.slots[part]
        for at, piece in chunks(values):
            exported = _float32(piece.numel())
            slot.state.export_to(slot.shard, name, exported, at=at)
            if not torch.equal(exported, piece.float()):
                return False
        return True

    def take_master(self, part: Part, master: torch.Tensor | None) -> None:
        """Sets the master, and the parameter from it. None: sets the master from the parameter."""
        if part.local.numel() == 0 or (part.local.dtype == torch.float32 and is_own_master(part)):
            return
        in_flight.settle()
        if master is None:
            self._import_parameter(part)
            return
        slot = self.slots[part]
        slot.state.import_from(slot.shard, "master", master.float().contiguous())
        if not is_own_master(part):
            self._show_rounded_master(part)

    def show_rounded_masters(self) -> None:
        """Sets parameters from their masters. Otherwise a difference between them counts as a
        program's write to the parameter, for which its master is given up."""
        for part in self.slots:
            if not is_own_master(part):
                self._show_rounded_master(part)

    def _show_rounded_master(self, part: Part) -> None:
        for at, piece in chunks(self.state_tensor(part, "master")):
            shown, rounded = part.local[at : at + piece.numel()], piece.to(part.local.dtype)
            if not part.on_host or not torch.equal(shown, rounded):
                shown.copy_(rounded)

    def exported(self, state: Mapping[Any, Mapping[str, Any]]) -> dict[torch.Tensor, Any]:
        """The entries of `state`, completed by copies: of moments that are not float32, and of
        masters."""
        entries: dict[torch.Tensor, Any] = {}
        for part in self.slots:
            entry = dict(state[part.parameter])
            names = [name for name in part.moments if entry.get(name) is None]
            names += ["master"] * has_master(part)
            entries[part.parameter] = entry | {name: self.values(part, name) for name in names}
        return entries

    def values(self, part: Part, name: str) -> torch.Tensor:
        """A state tensor in float32, of the parameter's shape: a view, or a copy in new memory."""
        is_view = name in MOMENTS and dtype_of(part, "moment") == torch.float32
        line = self.state_tensor(part, name) if is_view else _float32(part.local.numel())
        if not is_view and line.numel() > 0:
            slot = self.slots[part]
            slot.state.export_to(slot.shard, name, line)
        return part.like_parameter(line)

    def _import_parameter(self, part: Part) -> None:
        slot = self.slots[part]
        for at, values in chunks(part.local):
            slot.state.import_from(slot.shard, "master", values.to("cpu").float(), at=at)

    # ---- masters that are not the parameter's memory

    def note_versions(self) -> None:
        """Notes that the masters agree with the parameters' present values."""
        self._versions = [versions_of(part.parameter) for part in self.slots]

    def refresh_masters(self) -> None:
        """Copies values that a program has written to parameters to their masters. For parameters
        on the host a step does this itself."""
        in_flight.settle()
        for state in self.states:
            if state not in self.lanes:
                state.refresh_masters()
        self.settle()
        self.refresh_on_device()
        self.note_versions()

    def refresh_on_device(self) -> None:
        """Does what `refresh_masters` does, only for parameters on a device, where a changed
        version counter indicates a write. Elements that are still the rounded masters keep their
        masters."""
        for (part, slot), version in zip(self.slots.items(), self._versions, strict=True):
            if part.on_host or versions_of(part.parameter) == version:
                continue
            master = self.state_tensor(part, "master")
            for at, piece in chunks(part.local):
                piece = piece.to("cpu")
                is_rounded = master[at : at + piece.numel()].to(piece.dtype) == piece
                values = _float32(piece.numel())
                slot.state.export_to(slot.shard, "master", values, at=at)
                values = torch.where(is_rounded, values, piece.float())
                slot.state.import_from(slot.shard, "master", values, at=at)

    # ---- gradients

    def collect(self) -> None:
        """Hands all current gradients to the states. Gradients on the host are read again at each
        call, since writes through `.data` do not change a version counter."""
        kept = {state for state in self.lanes if self._is_as_collected(state)}
        for state in self.states:
            if state not in kept:
                state.skip()
        self.collected = []
        in_place: dict[_modicum.AdamW, list[int]] = {state: [] for state in self.states}
        coming: dict[_modicum.AdamW, list[tuple[Slot, torch.Tensor]]]
        coming = {state: [] for state in self.lanes}
        problem = None
        for part, slot in self.slots.items():
            grad = part.parameter.grad
            self.collected.append((grad, 0 if grad is None else versions_of(grad)))
            if slot.state in kept:
                continue
            try:
                _collect_one(part, slot, in_place, coming)
            except UsageError as error:
                # Raised after the loop: redistributing the next gradients is collective.
                problem = problem or error
        if problem is not None:
            self.collected = []
            raise problem
        for state, lane in self.lanes.items():
            in_place[state] += lane.bring(coming[state])
        for state, shards in in_place.items():
            state.arrived_in_place(shards)

    def _is_as_collected(self, state: _modicum.AdamW) -> bool:
        """Whether the gradients that a state has collected are unchanged."""
        return len(self.collected) == len(self.slots) and all(
            part.parameter.grad is grad and (grad is None or versions_of(grad) == version)
            for (part, slot), (grad, version) in zip(
                self.slots.items(), self.collected, strict=True
            )
            if slot.state is state
        )

    def norms(self) -> tuple[list[tuple[Any, float]], bool]:
        """For each part (its mesh; the sum of its gradient's squares, or 0 if another replica
        counts it); and whether any gradient is not finite."""
        sums, is_bad = {}, False
        for state in self.states:
            sums[state], is_finite = state.norms()
            is_bad |= not is_finite
        return [
            (part.mesh, sums[slot.state][slot.shard] if part.is_counted else 0.0)
            for part, slot in self.slots.items()
        ], is_bad

    def not_finite(self) -> str:
        """The name of the first part whose gradient in its buffer is not finite; "" if none is."""
        pairs = zip(self.slots.items(), self.collected, strict=True)
        buffers = (
            (part.name, slot.grad_buffer) for (part, slot), (grad, _) in pairs if grad is not None
        )
        return next((name for name, buffer in buffers if _is_bad(buffer)), "")

    def forget(self) -> None:
        """Drops the collected gradients. Ends a step that `begin_step` has begun."""
        if self.collected:
            for state in self.states:
                state.skip()
        self.collected, self._read = [], None
        stepped, self._stepped = self._stepped, []
        in_flight.after_step(stepped)

    # ---- a step

    def settle(self) -> None:
        """Waits until copies of parameters to a device are done."""
        for lane in self.lanes.values():
            lane.settle()

    def begin_step(self) -> None:
        """Called before `step`, and always followed by `forget`. The error of a save in the
        background is raised here."""
        self._read = in_flight.before_step()
        self.settle()

    def step(self, unscale: float, clip: float) -> None:
        """Steps all states. If this raises before anything is sent to a device, no state was
        stepped."""
        steps = [
            self.lanes[state].stepping()
            if state in self.lanes
            else _modicum.StateStep(state, refresh_masters=True)
            for state in self.states
        ]
        _modicum.step_all(steps, unscale, clip, self._read)
        for lane in self.lanes.values():
            lane.stepped()
        pairs = zip(self.slots, self.collected, strict=True)
        self._stepped = [part.parameter for part, (grad, _) in pairs if grad is not None]
        torch.autograd.graph.increment_version(self._stepped)
        self.note_steps()
        self.note_versions()

    # ---- memory

    def held(self) -> dict[str, dict[str, int]]:
        """Elements and bytes by purpose, for each format; see `AdamW.held`."""
        by_format: dict[str, dict[str, int]] = {}
        for part, slot in self.slots.items():
            purposes = by_format.setdefault(part.format, {"parameters": 0})
            purposes["parameters"] += part.local.numel()
            if slot.shard == 0:  # once per state: the footprint is that of all its parts
                for purpose, size in slot.state.footprint.items():
                    purposes[purpose] = purposes.get(purpose, 0) + size
        return by_format

    def holdings(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """(owner, name, memory) of all tensors that a step uses."""
        for part, slot in self.slots.items():
            yield ("master" if is_own_master(part) else "weights"), part.name, part.local
            for name, owner in _OWNERS.items():
                for memory in _memories(slot, name):
                    yield owner, f"{part.name}.{name}", memory

    def digest(self) -> dict[str, int]:
        """The sums of all states' digests, by name."""
        self.refresh_masters()
        all_of = [state.digest() for state in self.states]
        return {
            name: sum(digests[name] for digests in all_of) % (1 << 64)
            for name in ("state", "master")
        }


_living: WeakSet[BoundParameters] = WeakSet()


def _float32(numel: int) -> torch.Tensor:
    """An uninitialised tensor on the host, whatever torch's default dtype and device are."""
    return torch.empty(numel, dtype=torch.float32, device="cpu")


def _state_tensor(state: _modicum.AdamW, shard: int, part: Part, name: str) -> torch.Tensor:
    """As `BoundParameters.state_tensor`."""
    dtype = dtype_of(part, "moment" if name in MOMENTS else name)
    if part.local.numel() == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.from_dlpack(state.plane(shard, name)).view(dtype)


def _memories(slot: Slot, name: str) -> list[torch.Tensor]:
    """The bytes of a state tensor and of its scales."""
    state, shard = slot.state, slot.shard
    return [*map(torch.from_dlpack, (state.plane(shard, name), state.scales(shard, name)))]


def _collect_one(
    part: Part,
    slot: Slot,
    in_place: Mapping[_modicum.AdamW, list[int]],
    coming: Mapping[_modicum.AdamW, list[tuple[Slot, torch.Tensor]]],
) -> None:
    """Hands the gradient of `part` to its state, or adds the shard to `in_place` or the gradient to
    `coming`."""
    grad = part.parameter.grad
    if grad is None:
        slot.state.leave_out(slot.shard)
    elif is_in_place(slot, grad):
        in_place[slot.state].append(slot.shard)
    else:  # an empty shard, too: the ranks redistribute its gradient together
        line = part.local_like(grad, "gradient").contiguous()
        if part.on_host:
            leave_kept(part, slot)
            slot.state.arrive(slot.shard, line)
        else:
            coming[slot.state].append((slot, line))


def _is_bad(tensor: torch.Tensor) -> bool:
    return not all(piece.isfinite().all() for _, piece in chunks(tensor))
