"""The parameters that an optimizer has state of, with that state: what lies where, and how values
and gradients come and go."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from modicum import _modicum
from modicum.errors import UsageError
from modicum.torch.optim.binding import is_in_place
from modicum.torch.optim.lanes import Lane
from modicum.torch.optim.parts import Part, place_of, versions_of
from modicum.torch.optim.state_dicts import chunks, entry_values, is_noted
from modicum.torch.optim.states import dtype_of, is_own_master, make_states
from modicum.upstream.torch_core import local_of

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class Bound:
    """All parameters of an optimizer, in the order of its groups, and their states."""

    def __init__(self, parts: list[Part], groups: Sequence[dict[str, Any]], **how: Any) -> None:
        """Takes the states, which `how` describes as for `make_states`. Without parts: nothing."""
        self.parts = parts
        self.states: dict[str, _modicum.AdamW] = {}
        self.lanes: dict[str, Lane] = {}
        self.looked: list[tuple[Any, int]] = []
        """Of each part: the gradient that its state was told of, and its version."""
        self.steps = torch.zeros(len(parts))
        """The counts that `state` shows: somebody may have changed them there."""
        self.counts = self.steps.clone()
        """Those that are in force."""
        self._has_max = [bool(group["amsgrad"]) for group in groups]
        if parts:
            self.states = make_states(parts, **how)
            self._lay_out()
            self.note_versions()

    def _lay_out(self) -> None:
        """Views of the planes, and masters that are not the parameters' own memory."""
        for part in self.parts:
            part.plane = self.plane(part, "grad")
            is_there = part.on_host and part.local.numel() > 0
            if is_there and dtype_of(part, "grad") == part.local.dtype:
                part.grad = part.like_parameter(part.plane)
                part.grad_place = place_of(part.grad)
            if not is_own_master(part):
                self._import_parameter(part)
        for key, state in self.states.items():
            parts = [part for part in self.parts if part.state == key]
            if not parts[0].on_host:
                self.lanes[key] = Lane(state, parts, self._masters_that_leave(parts))

    def _masters_that_leave(self, parts: list[Part]) -> dict[int, torch.Tensor] | None:
        """By shard, where masters lie in the parameters' dtype."""
        if dtype_of(parts[0], "master") != parts[0].local.dtype:
            return None
        return {part.shard: self.plane(part, "master") for part in parts if part.local.numel()}

    def moments(self, part: Part) -> tuple[str, ...]:
        return MOMENTS if self._has_max[part.group] else MOMENTS[:2]

    def plane(self, part: Part, name: str) -> torch.Tensor:
        """Of a plane that lies there as its dtype says, without scales."""
        dtype = dtype_of(part, "moment" if name in MOMENTS else name)
        if part.local.numel() == 0:
            return torch.empty(0, dtype=dtype)
        lies = self.states[part.state].plane(part.shard, name)
        return torch.from_dlpack(lies).view(dtype)

    # ---- what an optimizer's `state` shows

    def show(self, state: Any, parts: Sequence[Part]) -> None:
        """Puts into `state` the entries of `parts`: steps, and moments that lie as float32."""
        self.note_steps()
        index_of = {id(part): index for index, part in enumerate(self.parts)}
        for part in parts:
            entry = state.get(part.parameter)
            if not entry:  # some mappings make an empty one when they are asked
                entry = state[part.parameter] = {}
            entry["step"] = self.steps[index_of[id(part)]]
            for name in self.moments(part):
                entry.pop(name, None)
                if dtype_of(part, "moment") == torch.float32:
                    entry[name] = part.like_parameter(self.plane(part, name))
            shown = ((name, entry[name]) for name in ("step", *self.moments(part)) if name in entry)
            part.entry = {name: (tensor, local_of(tensor).data_ptr()) for name, tensor in shown}

    def follow(self, state: Mapping[Any, Any]) -> bool:
        """Takes what somebody has changed in `state` since it was shown, all of it or, with
        `UsageError`, none. Returns whether values were put there."""
        is_counted = (self.steps != self.counts).tolist()
        taken = []
        for part, counted in zip(self.parts, is_counted, strict=True):
            entry = state.get(part.parameter)
            if counted or not is_noted(part, entry):
                taken.append((part, entry_values(part, entry, self.moments(part))))
        for part, values in taken:
            self.take(part, values)
        if taken:
            self.show(state, [part for part, _ in taken])
        return any(
            values.get("step", 0) > 0 or any(values.get(name) is not None for name in MOMENTS)
            for _, values in taken
        )

    def note_steps(self) -> None:
        steps = {name: state.steps for name, state in self.states.items()}
        made = [float(steps[part.state][part.shard]) for part in self.parts]
        self.steps.copy_(torch.tensor(made))
        self.counts = self.steps.clone()

    # ---- values

    def take(self, part: Part, values: Mapping[str, Any]) -> None:
        """The step and those moments that are in `values`; None: zeros."""
        state = self.states[part.state]
        if "step" in values:
            state.set_steps(part.shard, values["step"])
        for name in self.moments(part) if part.local.numel() > 0 else ():
            of = values.get(name)
            if of is not None:
                state.import_from(part.shard, name, of.float().contiguous())
            elif name in values:
                for lies in (state.plane(part.shard, name), state.scales(part.shard, name)):
                    torch.from_dlpack(lies).zero_()

    def take_master(self, part: Part, master: torch.Tensor | None) -> None:
        """And the parameter with it; None: the parameter's own values."""
        if part.local.numel() == 0 or (part.local.dtype == torch.float32 and is_own_master(part)):
            return
        if master is None:
            self._import_parameter(part)
            return
        self.states[part.state].import_from(part.shard, "master", master.float().contiguous())
        if not is_own_master(part):
            for at, low in chunks(self.plane(part, "master")):
                part.local[at : at + low.numel()].copy_(low.to(part.local.dtype))

    def exported(self, part: Part, entry: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """`entry`, with what it has not because it does not lie there as float32."""
        exported = dict(entry)
        names = [name for name in self.moments(part) if name not in exported]
        if part.local.dtype != torch.float32:
            names.append("master")
        for name in names:
            values = torch.empty(part.local.numel())
            if part.local.numel() > 0:
                self.states[part.state].export_to(part.shard, name, values)
            exported[name] = part.like_parameter(values)
        return exported

    def _import_parameter(self, part: Part) -> None:
        for at, values in chunks(part.local):
            values = values.to("cpu").float()
            self.states[part.state].import_from(part.shard, "master", values, at=at)

    # ---- masters beside the parameter

    def note_versions(self) -> None:
        """Which values of parameters on a device are this optimizer's."""
        self._versions = [versions_of(part.parameter) for part in self.parts]

    def refresh_masters(self) -> None:
        """What somebody has written to a parameter that is a rounded copy goes to its master. A
        step does so to parameters on the host itself."""
        for key, state in self.states.items():
            if key not in self.lanes:
                state.refresh_masters()
        self.settle()
        self.refresh_on_device()
        self.note_versions()

    def refresh_on_device(self) -> None:
        """The same of parameters on a device, whose writes a version tells."""
        for part, version in zip(self.parts, self._versions, strict=True):
            if part.on_host or versions_of(part.parameter) == version:
                continue
            state, master = self.states[part.state], self.plane(part, "master")
            for at, low in chunks(part.local):
                low = low.to("cpu")
                is_rounded = master[at : at + low.numel()].to(low.dtype) == low
                values = torch.empty(low.numel())
                state.export_to(part.shard, "master", values, at=at)
                values = torch.where(is_rounded, values, low.float())
                state.import_from(part.shard, "master", values, at=at)

    # ---- gradients

    def collect(self) -> None:
        """Tells the states of every gradient that is there. What lies on the host is read again at
        each call, for no version tells of writes through `.data`."""
        kept = {key for key in self.lanes if self._is_as_looked(key)}
        for key, state in self.states.items():
            if key not in kept:
                state.skip()
        self.looked = []
        in_place: dict[str, list[int]] = {key: [] for key in self.states}
        coming: dict[str, list[tuple[Part, torch.Tensor]]] = {key: [] for key in self.lanes}
        problem = None
        for part in self.parts:
            grad = part.parameter.grad
            self.looked.append((grad, 0 if grad is None else versions_of(grad)))
            if part.state in kept:
                continue
            try:
                self._collect_one(part, in_place, coming)
            except UsageError as error:  # other ranks may be bringing the next gradient together
                problem = problem or error
        if problem is not None:
            self.looked = []
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
        elif part.local.numel() > 0:
            line = part.local_like(grad, "gradient").contiguous()
            if part.on_host:
                self.states[part.state].arrive(part.shard, line)
            else:
                coming[part.state].append((part, line))

    def _is_as_looked(self, key: str) -> bool:
        """Whether what a state was told of is what is there."""
        return len(self.looked) == len(self.parts) and all(
            part.parameter.grad is grad and (grad is None or versions_of(grad) == version)
            for part, (grad, version) in zip(self.parts, self.looked, strict=True)
            if part.state == key
        )

    def norms(self) -> tuple[list[float], bool]:
        """Sums of squares of the parts that this rank counts, and whether any is not finite."""
        sums, is_bad = {}, False
        for name, state in self.states.items():
            sums[name], is_finite = state.norms()
            is_bad |= not is_finite
        return [
            sums[part.state][part.shard] if part.is_counted else 0.0 for part in self.parts
        ], is_bad

    def forget(self) -> None:
        if self.looked:
            for state in self.states.values():
                state.skip()
        self.looked = []

    # ---- a step

    def settle(self) -> None:
        """Waits until parameters that were sent to a device have left."""
        for lane in self.lanes.values():
            lane.settle()

    def step(self, unscale: float, clip: float) -> None:
        for key, state in self.states.items():
            if key in self.lanes:
                self.lanes[key].step(unscale, clip)
            else:
                state.step(unscale, clip, refresh_masters=True)
        stepped = [part.parameter for part, (grad, _) in zip(self.parts, self.looked, strict=True)
                   if grad is not None]  # fmt: skip
        torch.autograd.graph.increment_version(stepped)
        self.note_steps()
        self.note_versions()
