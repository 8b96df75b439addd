"""The parameters of an optimizer bound to their states: state tensors, the
entries of `state`, and the transfer of values and gradients.

The calls for a parameter: add -> [collect -> norms -> step or forget]* -> drop. `collect` hands the
current gradients to the C++ states, which use them until the next `step` or `forget`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch

from modicum import _modicum
from modicum.errors import UsageError
from modicum.torch.optim import in_flight
from modicum.torch.optim.binding import is_in_place, leave_kept
from modicum.torch.optim.lanes import Lane
from modicum.torch.optim.parts import Part, versions_of
from modicum.torch.optim.state_dicts import address_of, chunks, entry_values, is_noted
from modicum.torch.optim.states import dtype_of, has_master, is_own_master, make_states

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

# The owner of each state tensor in `memory.attribute`.
_OWNERS = {
    "master": "master",
    "master_low": "master",
    "grad": "gradient",
    **dict.fromkeys(MOMENTS, "moments"),
}


def moments_of(group: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the moments of a group's parameters."""
    return MOMENTS if group["amsgrad"] else MOMENTS[:2]


def shows_adamw(state: Mapping[Any, Mapping[str, Any]]) -> bool:
    """Whether an optimizer's `state` has entries of a `modicum.torch.AdamW`, like the `state` of a
    wrapper around one."""
    entries = (part.entry for bound in _living for part in bound.parts if part.entry)
    shown = {id(entry["step"][0]) for entry in entries}
    return any(id(entry.get("step")) in shown for entry in state.values())


class BoundParameters:
    """The parameters of an optimizer that have state, and their states. Parameters that are
    unfrozen or added later get additional states."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        """In the order of the groups; the parts of each later `add` follow."""
        self.states: dict[str, _modicum.AdamW] = {}
        """By key (`Part.state`)."""
        self.lanes: dict[str, Lane] = {}
        """The transfers of each state whose parameters are on a device, by the same key."""
        self.meshes: list[Any] = []
        """The meshes over which the optimizer's collectives run."""
        self.collected: list[tuple[Any, int]] = []
        """(gradient that the state has collected, its version) of each part."""
        self.counts = _float32(0)
        """The step counts of the states, by part."""
        self._steps: list[torch.Tensor] = []  # for each `add` the counts shown in `state`
        # By part: the parameter's `versions_of` when its master last agreed with it.
        self._versions: list[int] = []
        self._groups: dict[str, int] = {}  # the number of groups that each state knows
        self._read: _modicum.Snapshot | None = None  # of a save that reads memory during the step
        self._stepped: list[torch.Tensor] = []  # the parameters that the step has overwritten
        _living.add(self)

    @property
    def steps(self) -> torch.Tensor:
        """The step counts shown in `state`, which a program may change; by part."""
        return torch.cat([_float32(0), *self._steps])

    def add(self, parts: list[Part], groups: Sequence[dict[str, Any]], **arguments: Any) -> None:
        """Allocates states for more parts. `arguments`: those of `make_states`. If they do not fit,
        nothing changes; after any other error call `drop`."""
        states = make_states(parts, **arguments)
        later = f" #{len(self._steps)}" if self._steps else ""
        steps = _float32(len(parts)).zero_()
        for index, part in enumerate(parts):
            part.state += later
            part.moments = moments_of(groups[part.group])
            part.steps = steps, index
        self.parts += parts  # in place: the optimizer's finalizer unhooks this list
        self._steps.append(steps)
        self.states |= {key + later: state for key, state in states.items()}
        self._groups |= {key + later: len(groups) for key in states}
        self._lay_out(parts)
        self.counts = torch.cat([self.counts, steps])
        self._versions += [versions_of(part.parameter) for part in parts]

    def drop(self, count: int) -> None:
        """Removes all parts after the first `count`, and frees their states. `count` must be a
        boundary between two calls of `add`."""
        in_flight.settle()
        del self.parts[count:], self.collected[count:], self._versions[count:]
        kept = {part.state for part in self.parts}
        self.states = {key: state for key, state in self.states.items() if key in kept}
        self.lanes = {key: lane for key, lane in self.lanes.items() if key in kept}
        while sum(map(len, self._steps)) > count:
            self._steps.pop()
        self.counts = self.counts[:count]

    def _lay_out(self, parts: list[Part]) -> None:
        """Sets the parts' gradient buffers, and fills masters that are separate from parameters."""
        of_state: dict[str, list[Part]] = {}
        for part in parts:
            of_state.setdefault(part.state, []).append(part)
            part.grad_buffer = self.state_tensor(part, "grad")
            is_there = part.on_host and part.local.numel() > 0
            if is_there and dtype_of(part, "grad") == part.local.dtype:
                part.set_grad()
            if not is_own_master(part):
                self._import_parameter(part)
        for key, state_parts in of_state.items():
            if not state_parts[0].on_host:
                masters = self._masters_to_copy(state_parts)
                self.lanes[key] = Lane(self.states[key], state_parts, masters)

    def set_options(self, options: Sequence[_modicum.AdamOptions]) -> None:
        """Sets the groups' options for the next steps."""
        for key, state in self.states.items():
            for group, group_options in enumerate(options[: self._groups[key]]):
                state.set_options(group, group_options)

    def _masters_to_copy(self, parts: list[Part]) -> dict[int, torch.Tensor] | None:
        """The masters by shard if they have the parameters' dtype, so that a step can copy them to
        the device; else None."""
        if dtype_of(parts[0], "master") != parts[0].local.dtype:
            return None
        return {
            part.shard: self.state_tensor(part, "master") for part in parts if part.local.numel()
        }

    def state_tensor(self, part: Part, name: str) -> torch.Tensor:
        """A view of the part's elements in the state tensor `name`: master, grad or a moment."""
        dtype = dtype_of(part, "moment" if name in MOMENTS else name)
        if part.local.numel() == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        memory = self.states[part.state].plane(part.shard, name)
        return torch.from_dlpack(memory).view(dtype)

    # ---- the optimizer's `state`

    def show(self, state: Any, parts: Sequence[Part]) -> None:
        """Sets the entries of `parts` in `state`: steps, views of float32 moments, and None for the
        values that only a state dict has: torch.distributed.checkpoint needs their names."""
        self.note_steps()
        for part in parts:
            entry = state.get(part.parameter)
            if not entry:  # none, or the empty one that torch's defaultdict has made
                entry = state[part.parameter] = {}
            assert part.steps is not None
            steps, index = part.steps
            entry["step"] = steps[index]
            for name in part.moments:
                is_view = dtype_of(part, "moment") == torch.float32
                entry[name] = (
                    part.like_parameter(self.state_tensor(part, name)) if is_view else None
                )
            if has_master(part):
                entry["master"] = None
            shown = (name for name in ("step", *part.moments, "master") if name in entry)
            part.entry = {name: (entry[name], address_of(entry[name])) for name in shown}

    def follow(self, state: Mapping[Any, Any]) -> bool:
        """Adopts all changes that the program made to `state` since `show`; returns whether they
        set any step count above 0 or any moment. Raises `UsageError`, and adopts none, if one is
        invalid."""
        has_other_step = (self.steps != self.counts).tolist()
        taken = []
        for part, is_other in zip(self.parts, has_other_step, strict=True):
            entry = state.get(part.parameter)
            if is_other or not is_noted(part, entry):
                taken.append((part, entry_values(part, entry)))
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
        steps = {name: state.steps for name, state in self.states.items()}
        counts = [float(steps[part.state][part.shard]) for part in self.parts]
        tensor = torch.tensor(counts, dtype=torch.float32, device="cpu")
        for shown, count in zip(self._steps, tensor.split([*map(len, self._steps)]), strict=True):
            shown.copy_(count)
        self.counts = tensor

    # ---- values

    def take(self, part: Part, values: Mapping[str, Any]) -> None:
        """Sets the step and the moments that are in `values`. A moment of None is set to 0."""
        in_flight.settle()
        state = self.states[part.state]
        if "step" in values:
            state.set_steps(part.shard, values["step"])
        for name in part.moments if part.local.numel() > 0 else ():
            moment = values.get(name)
            if moment is not None:
                if not self._has(part, name, moment):
                    state.import_from(part.shard, name, moment.float().contiguous())
            elif name in values:
                for memory in (state.plane(part.shard, name), state.scales(part.shard, name)):
                    torch.from_dlpack(memory).zero_()

    def _has(self, part: Part, name: str, values: torch.Tensor) -> bool:
        """Whether a moment in a format smaller than float32 exports exactly these values. If so,
        they must not be imported: that would round them again."""
        if dtype_of(part, "moment") == torch.float32:
            return False
        for at, piece in chunks(values):
            exported = _float32(piece.numel())
            self.states[part.state].export_to(part.shard, name, exported, at=at)
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
        self.states[part.state].import_from(part.shard, "master", master.float().contiguous())
        if not is_own_master(part):
            self._show_rounded_master(part)

    def show_rounded_masters(self) -> None:
        """Sets parameters on a device from their masters."""
        for part in self.parts:
            if not part.on_host and not is_own_master(part):
                self._show_rounded_master(part)

    def _show_rounded_master(self, part: Part) -> None:
        for at, piece in chunks(self.state_tensor(part, "master")):
            part.local[at : at + piece.numel()].copy_(piece.to(part.local.dtype))

    def exported(self, part: Part, entry: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """`entry`, completed by exported tensors: those that are not float32, and the master."""
        names = [name for name in part.moments if entry.get(name) is None]
        if has_master(part):
            names.append("master")
        return dict(entry) | {name: self.values(part, name) for name in names}

    def values(self, part: Part, name: str) -> torch.Tensor:
        """A state tensor in float32, of the parameter's shape: a view, or a copy in new memory."""
        is_view = name in MOMENTS and dtype_of(part, "moment") == torch.float32
        line = self.state_tensor(part, name) if is_view else _float32(part.local.numel())
        if not is_view and line.numel() > 0:
            self.states[part.state].export_to(part.shard, name, line)
        return part.like_parameter(line)

    def _import_parameter(self, part: Part) -> None:
        for at, values in chunks(part.local):
            values = values.to("cpu").float()
            self.states[part.state].import_from(part.shard, "master", values, at=at)

    # ---- masters that are not the parameter's memory

    def note_versions(self) -> None:
        """Notes that the masters agree with the parameters' present values."""
        self._versions = [versions_of(part.parameter) for part in self.parts]

    def refresh_masters(self) -> None:
        """Copies values that a program has written to parameters to their masters. For parameters
        on the host a step does this itself."""
        in_flight.settle()
        for key, state in self.states.items():
            if key not in self.lanes:
                state.refresh_masters()
        self.settle()
        self.refresh_on_device()
        self.note_versions()

    def refresh_on_device(self) -> None:
        """Does what `refresh_masters` does, only for parameters on a device, where a changed
        version counter indicates a write. Elements that are still the rounded masters keep their
        masters."""
        for part, version in zip(self.parts, self._versions, strict=True):
            if part.on_host or versions_of(part.parameter) == version:
                continue
            state, master = self.states[part.state], self.state_tensor(part, "master")
            for at, piece in chunks(part.local):
                piece = piece.to("cpu")
                is_rounded = master[at : at + piece.numel()].to(piece.dtype) == piece
                values = _float32(piece.numel())
                state.export_to(part.shard, "master", values, at=at)
                values = torch.where(is_rounded, values, piece.float())
                state.import_from(part.shard, "master", values, at=at)

    # ---- gradients

    def collect(self) -> None:
        """Hands all current gradients to the states. Gradients on the host are read again at each
        call, since writes through `.data` do not change a version counter."""
        kept = {key for key in self.lanes if self._is_as_collected(key)}
        for key, state in self.states.items():
            if key not in kept:
                state.skip()
        self.collected = []
        in_place: dict[str, list[int]] = {key: [] for key in self.states}
        coming: dict[str, list[tuple[Part, torch.Tensor]]] = {key: [] for key in self.lanes}
        problem = None
        for part in self.parts:
            grad = part.parameter.grad
            self.collected.append((grad, 0 if grad is None else versions_of(grad)))
            if part.state in kept:
                continue
            try:
                self._collect_one(part, in_place, coming)
            except UsageError as error:
                # Raised after the loop: redistributing the next gradients is collective.
                problem = problem or error
        if problem is not None:
            self.collected = []
            raise problem
        for key, lane in self.lanes.items():
            in_place[key] += lane.bring(coming[key])
        for name, shards in in_place.items():
            self.states[name].arrived_in_place(shards)

    def _collect_one(
        self,
        part: Part,
        in_place: dict[str, list[int]],
        coming: dict[str, list[tuple[Part, torch.Tensor]]],
    ) -> None:
        grad = part.parameter.grad
        if grad is None:
            self.states[part.state].leave_out(part.shard)
        elif is_in_place(part, grad):
            in_place[part.state].append(part.shard)
        else:  # an empty shard, too: the ranks redistribute its gradient together
            line = part.local_like(grad, "gradient").contiguous()
            if part.on_host:
                leave_kept(part)
                self.states[part.state].arrive(part.shard, line)
            else:
                coming[part.state].append((part, line))

    def _is_as_collected(self, key: str) -> bool:
        """Whether the gradients that a state has collected are unchanged."""
        return len(self.collected) == len(self.parts) and all(
            part.parameter.grad is grad and (grad is None or versions_of(grad) == version)
            for part, (grad, version) in zip(self.parts, self.collected, strict=True)
            if part.state == key
        )

    def norms(self) -> tuple[list[tuple[Any, float]], bool]:
        """For each part (its mesh; the sum of its gradient's squares, or 0 if another replica
        counts it); and whether any gradient is not finite."""
        sums, is_bad = {}, False
        for name, state in self.states.items():
            sums[name], is_finite = state.norms()
            is_bad |= not is_finite
        return [
            (part.mesh, sums[part.state][part.shard] if part.is_counted else 0.0)
            for part in self.parts
        ], is_bad

    def not_finite(self) -> str:
        """The name of the first part whose gradient in its buffer is not finite; "" if none is."""
        pairs = zip(self.parts, self.collected, strict=True)
        buffers = ((part, part.grad_buffer) for part, (grad, _) in pairs if grad is not None)
        return next(
            (part.name for part, buffer in buffers if buffer is not None and _is_bad(buffer)), ""
        )

    def forget(self) -> None:
        """Drops the collected gradients. Ends a step that `begin_step` has begun."""
        if self.collected:
            for state in self.states.values():
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
            self.lanes[key].stepping()
            if key in self.lanes
            else (state, None, None, "bfloat16", True)
            for key, state in self.states.items()
        ]
        _modicum.step_all(steps, unscale, clip, self._read)
        for lane in self.lanes.values():
            lane.stepped()
        pairs = zip(self.parts, self.collected, strict=True)
        self._stepped = [part.parameter for part, (grad, _) in pairs if grad is not None]
        torch.autograd.graph.increment_version(self._stepped)
        self.note_steps()
        self.note_versions()

    # ---- memory

    def held(self) -> dict[str, dict[str, int]]:
        """Elements and bytes by purpose, for each format; see `AdamW.held`."""
        by_format: dict[str, dict[str, int]] = {}
        for part in self.parts:
            purposes = by_format.setdefault(part.format, {"parameters": 0})
            purposes["parameters"] += part.local.numel()
            if part.shard == 0:  # once per state: the footprint is that of all its parts
                for purpose, size in self.states[part.state].footprint.items():
                    purposes[purpose] = purposes.get(purpose, 0) + size
        return by_format

    def holdings(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """(owner, name, memory) of all tensors that a step uses."""
        for part in self.parts:
            state = self.states[part.state]
            yield ("master" if is_own_master(part) else "weights"), part.name, part.local
            for name, owner in _OWNERS.items():
                for memory in (state.plane(part.shard, name), state.scales(part.shard, name)):
                    yield owner, f"{part.name}.{name}", torch.from_dlpack(memory)

    def digest(self) -> dict[str, int]:
        """The sums of all states' digests, by name."""
        self.refresh_masters()
        all_of = [state.digest() for state in self.states.values()]
        return {
            name: sum(digests[name] for digests in all_of) % (1 << 64)
            for name in ("state", "master")
        }


_living: WeakSet[BoundParameters] = WeakSet()


def _float32(numel: int) -> torch.Tensor:
    """An uninitialised tensor on the host, whatever torch's default dtype and device are."""
    return torch.empty(numel, dtype=torch.float32, device="cpu")


def _is_bad(tensor: torch.Tensor) -> bool:
    return not all(piece.isfinite().all() for _, piece in chunks(tensor))
