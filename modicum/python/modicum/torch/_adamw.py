"""`AdamW`: torch's optimizer over state that lies in Modicum's arenas, in a declared format."""

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from modicum import _modicum
from modicum.errors import refusal
from modicum.torch._forks import require_fork
from modicum.torch._lanes import Lane
from modicum.torch._names import canonical
from modicum.torch._parts import Part, global_sum, local_of, part_of, versions_of
from modicum.torch._placements import Meshes
from modicum.torch._states import dtype_of, is_own_master, make_states

__all__ = ["AdamW"]

_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
# Of each plane, as `memory.attribute` calls it.
_OWNERS = {
    "master": "master",
    "master_low": "master",
    "grad": "gradient",
    **dict.fromkeys(_MOMENTS, "moments"),
}
# What groups of torch's have besides, so that a checkpoint of one is a checkpoint of the other.
_NOT_OURS = {"foreach": None, "capturable": False, "differentiable": False, "fused": None}
_CHUNK = 1 << 20  # elements of what is cast on its way


class AdamW(torch.optim.Optimizer):
    """AdamW whose state is taken whole when it is made, in a declared number of bytes.

    A `torch.optim.Optimizer`: groups, schedulers, hooks, `GradScaler`, `state_dict` with PyTorch's
    names and shapes. Parameters are plain tensors or DTensors of float32, bfloat16 or float16.

    On the CPU a float32 parameter is its own master, and the bfloat16 parameter of a split format
    is the upper half of its master: neither is held twice. `parameter.grad` becomes a view of the
    gradients' plane when a backward brings it, and None is a step without it, as ever.

    Of parameters on a device the whole state is on the host. Their gradients stay on the device, as
    any optimizer's, and come to the host when a step or a norm needs them; new parameters leave
    while the step goes on. Nothing of their size is taken for either: 128 KiB of staging are,
    four times for each thread.

    Args:
        params: parameters, groups, or `model.named_parameters()`. Random bits are keyed by names
            ("param.N" where there are none), which must not depend on the rank.
        lr, betas, eps, weight_decay, amsgrad, maximize: as torch.optim.AdamW; by group, too.
        state_format: fp32 (16 bytes per parameter, gradient and float32 parameter included),
            fp32-split (14), bf16-moments (10), int8-moments (8.0625) or int8-moments-24 (7.0625).
            Those below fp32 are for bfloat16 parameters; others keep `fp32` beside them.
        semantics: torch (the bits of torch.optim.AdamW's default path) or deepspeed.
        decoupled: False: the decay is added to the gradient (Adam); of a group,
            `decoupled_weight_decay`.
        bias_correction: whether the averages' bias is corrected.
        seed: of the random bits; the same on every rank.
        ledger: what is taken is charged to it; None: a new one.
        pin: whether what a device would touch is pinned, by CUDA's runtime, at its exact size; or
            whatever has cudaHostRegister and cudaHostUnregister.
        fork: what forked children find of the state: "excluded", "shared" or "inherited" (charged
            twice), as of `modicum.torch.load`.

    Attributes:
        skipped_steps: steps that a gradient which was not finite has left out.

    Raises:
        BudgetError: the ledger has not enough left; before anything is taken.
        UsageError: a parameter that can't be stepped where it lies, and wrong options.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        state_format: str = "fp32",
        semantics: str = "torch",
        decoupled: bool = True,
        bias_correction: bool = True,
        seed: int = 0,
        ledger: _modicum.Ledger | None = None,
        pin: Any = False,
        fork: str = "excluded",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "decoupled_weight_decay": decoupled,
            **_NOT_OURS,
        }
        require_fork(fork)
        super().__init__(params, defaults)
        self.state_format, self.semantics, self.seed = state_format, semantics, seed
        self.bias_correction = bias_correction
        self.ledger = ledger or _modicum.Ledger()
        self.skipped_steps = 0
        self._max_norm: float | None = None
        self._looked: list[tuple[Any, int]] = []
        self._parts = list(self._make_parts())
        options = [self._options(group) for group in self.param_groups]
        self._states = make_states(
            self._parts, options, state_format, self.ledger, seed, pin, fork=fork
        )
        self._lanes: dict[str, Lane] = {}
        self._steps = torch.zeros(len(self._parts))
        with torch.no_grad():
            self._lay_out()
            self._note_what_is()
        handles = [
            part.parameter.register_post_accumulate_grad_hook(_taking(part))
            for part in self._parts
            if part.grad is not None and part.parameter.requires_grad
        ]
        weakref.finalize(self, _remove_all, handles).atexit = False

    # ---- making it

    def _make_parts(self) -> Iterator[Part]:
        meshes = Meshes()
        names: set[str] = set()
        for index, group in enumerate(self.param_groups):
            for at, parameter in enumerate(group["params"]):
                name = f"param.{len(names)}"
                if "param_names" in group:
                    name = canonical(group["param_names"][at])
                if name in names:
                    raise refusal("USAGE", "two parameters have one name", tensor=name)
                names.add(name)
                yield part_of(name, parameter, index, meshes)

    def _lay_out(self) -> None:
        """Views of the planes, and masters that are not the parameters' own memory."""
        for index, part in enumerate(self._parts):
            entry = self.state[part.parameter]
            entry["step"] = self._steps[index]
            if not part.on_host:
                part.plane = self._plane(part, "grad")
            elif part.local.numel() > 0 and dtype_of(part, "grad") == part.local.dtype:
                part.grad = part.like_parameter(self._plane(part, "grad"))
                part.plane = local_of(part.grad)
            if dtype_of(part, "moment") == torch.float32:
                for name in self._moments(part):
                    entry[name] = part.like_parameter(self._plane(part, name))
            if not is_own_master(part):
                self._import_parameter(part)
        for key, state in self._states.items():
            parts = [part for part in self._parts if part.state == key]
            if not parts[0].on_host:
                self._lanes[key] = Lane(state, parts, self._masters_that_leave(parts))

    def _masters_that_leave(self, parts: list[Part]) -> dict[int, torch.Tensor] | None:
        """By shard, where masters lie in the parameters' dtype."""
        if dtype_of(parts[0], "master") != parts[0].local.dtype:
            return None
        return {part.shard: self._plane(part, "master") for part in parts if part.local.numel()}

    def _moments(self, part: Part) -> tuple[str, ...]:
        return _MOMENTS if self.param_groups[part.group]["amsgrad"] else _MOMENTS[:2]

    def _plane(self, part: Part, name: str) -> torch.Tensor:
        """Of a plane that lies there as its dtype says, without scales."""
        dtype = dtype_of(part, "moment" if name in _MOMENTS else name)
        if part.local.numel() == 0:
            return torch.empty(0, dtype=dtype)
        lies = self._states[part.state].plane(part.shard, name)
        return torch.from_dlpack(lies).view(dtype)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not after construction: everything has been taken by then."""
        if "_parts" in self.__dict__:
            what = "a parameter group after AdamW has been made, when all its memory is taken"
            raise refusal("UNSUPPORTED", what)
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise refusal("UNSUPPORTED", "AdamW is not copied or pickled; its state_dict() is")

    # ---- a step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step with the gradients that are there: unscale, clip, update and cast in one pass.

        Where a gradient is not finite, on any rank that has a part of the same parameters, nothing
        is written on any of them and `skipped_steps` grows by 1.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        try:
            self._settle()
            self._push_options()
            self._refresh_masters()
            norm = self._norm(found_inf is None or not found_inf.item())
            unscale = 1.0 if scale is None else 1.0 / scale.item()
            clip = 1.0
            if self._max_norm is not None and norm is not None:
                clip = _modicum.clip_factor(norm * unscale, self._max_norm)
            if norm is None:
                self.skipped_steps += 1
            else:
                for key, state in self._states.items():
                    self._lanes.get(key, state).step(unscale, clip)
                self._has_stepped()
        finally:
            self._forget()
        return loss

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """The norm of all gradients over all ranks, to which the next step is clipped.

        The gradients in `parameter.grad` stay as they are: the factor is part of the step's pass.
        It is taken of what is stepped, so that a `GradScaler` may unscale before or in the step.

        Returns:
            The norm as it is now; NaN where a gradient is not finite.
        """
        max_norm = float(max_norm)
        if not max_norm >= 0:
            raise refusal("USAGE", "a norm to clip to is 0 or more", got=str(max_norm))
        norm = self._norm(True)
        self._max_norm = max_norm
        return torch.tensor(float("nan") if norm is None else norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of torch's. The gradients' plane stays taken."""
        super().zero_grad(set_to_none)
        self._forget()

    def _norm(self, finite: bool) -> float | None:
        """Over all ranks; None where a gradient is not finite. A collective of all of these."""
        if not self._is_as_looked():
            self._collect()
        sums: dict[str, list[float]] = {}
        for name, state in self._states.items():
            sums[name], is_finite = state.norms()
            finite = finite and is_finite
        of_parts = [sums[part.state][part.shard] for part in self._parts]
        total, finite = global_sum(self._parts, of_parts, finite)
        return math.sqrt(total) if finite else None

    def _collect(self) -> None:
        """Tells the states of every gradient that is there."""
        for state in self._states.values():
            state.skip()
        self._looked = []
        in_place: dict[str, list[int]] = {key: [] for key in self._states}
        coming: dict[str, list[tuple[Part, torch.Tensor]]] = {key: [] for key in self._lanes}
        for part in self._parts:
            grad = part.parameter.grad
            self._looked.append((grad, 0 if grad is None else versions_of(grad)))
            if local_of(part.parameter).data_ptr() != part.local.data_ptr():
                what = "a parameter has other memory than when AdamW was made: make it afterwards"
                raise refusal("USAGE", what, tensor=part.name)
            state = self._states[part.state]
            if grad is None:
                state.leave_out(part.shard)
            elif grad is part.grad and local_of(grad).data_ptr() == part.plane.data_ptr():
                in_place[part.state].append(part.shard)
            elif part.local.numel() > 0:
                line = part.local_like(grad, "gradient").contiguous()
                if part.on_host:
                    state.arrive(part.shard, line)
                else:
                    coming[part.state].append((part, line))
        for key, lane in self._lanes.items():
            in_place[key] += lane.bring(coming[key])
        for name, shards in in_place.items():
            self._states[name].arrived_in_place(shards)

    def _is_as_looked(self) -> bool:
        """Whether what the states were told of is what is there."""
        return len(self._looked) == len(self._parts) and all(
            part.parameter.grad is grad and (grad is None or versions_of(grad) == version)
            for part, (grad, version) in zip(self._parts, self._looked, strict=True)
        )

    def _settle(self) -> None:
        for lane in self._lanes.values():
            lane.settle()

    def _forget(self) -> None:
        if self._looked:
            for state in self._states.values():
                state.skip()
        self._looked, self._max_norm = [], None

    def _push_options(self) -> None:
        for index, group in enumerate(self.param_groups):
            options = self._options(group)
            for state in self._states.values():
                state.set_options(index, options)

    def _options(self, group: dict[str, Any]) -> _modicum.AdamOptions:
        return _modicum.AdamOptions(
            semantics=self.semantics,
            lr=float(group["lr"]),
            betas=(float(group["betas"][0]), float(group["betas"][1])),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=group["decoupled_weight_decay"],
            amsgrad=group["amsgrad"],
            maximize=group["maximize"],
            bias_correction=self.bias_correction,
        )

    def _has_stepped(self) -> None:
        stepped = [p.parameter for p, (grad, _) in zip(self._parts, self._looked, strict=True)
                   if grad is not None]  # fmt: skip
        torch.autograd.graph.increment_version(stepped)
        self._note_what_is()

    def _note_what_is(self) -> None:
        """Step counts for `state`, and which values of parameters are this optimizer's."""
        steps = {name: state.steps for name, state in self._states.items()}
        self._steps.copy_(torch.tensor([steps[p.state][p.shard] for p in self._parts]))
        self._versions = [versions_of(part.parameter) for part in self._parts]

    # ---- masters beside the parameter

    def _refresh_masters(self) -> None:
        """What somebody has written to a parameter that is a rounded copy goes to its master."""
        for part, version in zip(self._parts, self._versions, strict=True):
            if is_own_master(part) or versions_of(part.parameter) == version:
                continue
            state, master = self._states[part.state], self._plane(part, "master")
            for at, low in _chunks(part.local):
                low = low.to("cpu")
                is_rounded = master[at : at + low.numel()].to(low.dtype) == low
                values = torch.empty(low.numel())
                state.export_to(part.shard, "master", values, at=at)
                values = torch.where(is_rounded, values, low.float())
                state.import_from(part.shard, "master", values, at=at)

    def _import_parameter(self, part: Part) -> None:
        """The parameter's values as its master."""
        for at, values in _chunks(part.local):
            values = values.to("cpu").float()
            self._states[part.state].import_from(part.shard, "master", values, at=at)

    # ---- state dicts

    def state_dict(self) -> dict[str, Any]:
        """As of torch.optim.AdamW, which can load it: step, exp_avg, exp_avg_sq (max_exp_avg_sq)
        of each parameter's shape in float32; and `master` where the parameter is a rounded copy or
        the upper half. What lies there as float32 is a view; the rest is 4 bytes per element more
        as long as the dict lives."""
        lies = self.state
        try:
            self.state = defaultdict(dict, {p.parameter: self._exported(p) for p in self._parts})
            return super().state_dict()
        finally:
            self.state = lies

    def _exported(self, part: Part) -> dict[str, torch.Tensor]:
        entry = dict(self.state[part.parameter])
        names = [name for name in self._moments(part) if name not in entry]
        if part.local.dtype != torch.float32:
            names.append("master")
        for name in names:
            values = torch.empty(part.local.numel())
            if part.local.numel() > 0:
                self._states[part.state].export_to(part.shard, name, values)
            entry[name] = part.like_parameter(values)
        return entry

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What this class or torch.optim.AdamW has saved, of any state format. Load the model
        before: without `master` the parameters' values are taken for it."""
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        groups = deepcopy(state_dict["param_groups"])
        lengths = [len(group["params"]) for group in groups]
        if lengths != (own := [len(group["params"]) for group in self.param_groups]):
            what = "a state dict of other parameter groups"
            raise refusal("MISMATCH", what, expected=str(own), got=str(lengths))
        saved = [state_dict["state"].get(i, {}) for group in groups for i in group["params"]]
        values = [self._values(part, of) for part, of in zip(self._parts, saved, strict=True)]
        for group, new in zip(self.param_groups, groups, strict=True):
            if new.get("amsgrad", group["amsgrad"]) != group["amsgrad"]:
                raise refusal("MISMATCH", "a state dict with another amsgrad")
        for group, new in zip(self.param_groups, groups, strict=True):
            group.update({k: v for k, v in new.items() if k not in ("params", "param_names")})
        self._forget()
        self._settle()
        self._push_options()
        for part, of in zip(self._parts, values, strict=True):
            self._import(part, of)
        self._note_what_is()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _values(self, part: Part, saved: dict[str, Any]) -> dict[str, Any]:
        """What a state dict has of this rank's part; proven to fit."""
        names = [name for name in (*self._moments(part), "master") if name in saved]
        values = {name: part.local_like(saved[name], name).to("cpu") for name in names}
        return values | {"step": int(saved.get("step", 0))}

    def _import(self, part: Part, values: dict[str, Any]) -> None:
        state = self._states[part.state]
        state.set_steps(part.shard, values["step"])
        if part.local.numel() == 0:
            return
        for name in self._moments(part):
            of = values.get(name)
            of = torch.zeros(part.local.numel()) if of is None else of.float().contiguous()
            state.import_from(part.shard, name, of)
        if part.local.dtype == torch.float32 and is_own_master(part):
            return
        if "master" not in values:
            self._import_parameter(part)
            return
        state.import_from(part.shard, "master", values["master"].float().contiguous())
        if not is_own_master(part):
            for at, master in _chunks(self._plane(part, "master")):
                part.local[at : at + master.numel()].copy_(master.to(part.local.dtype))

    # ---- what it holds

    @property
    def held(self) -> dict[str, dict[str, int]]:
        """By state format: `parameters`, the elements that are in it, and bytes by purpose of what
        was taken for them; a parameter's own memory is not in it."""
        held: dict[str, dict[str, int]] = {}
        for part in self._parts:
            of = held.setdefault(part.format, {"parameters": 0})
            of["parameters"] += part.local.numel()
            if part.shard == 0:
                for purpose, size in self._states[part.state].footprint.items():
                    of[purpose] = of.get(purpose, 0) + size
        return held

    def _holdings(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """For `memory.attribute`: owner, name and memory of all that a step works on."""
        for part in self._parts:
            state = self._states[part.state]
            yield ("master" if is_own_master(part) else "weights"), part.name, part.local
            for plane, owner in _OWNERS.items():
                for lies in (state.plane(part.shard, plane), state.scales(part.shard, plane)):
                    yield owner, f"{part.name}.{plane}", torch.from_dlpack(lies)

    def digest(self) -> dict[str, int]:
        """`state` (parameters and moments) and `master` (parameters) of this rank, as fp32 values
        with names and global indices. Added up over ranks that hold different parts, modulo 2^64,
        they depend on no sharding."""
        all_of = [state.digest() for state in self._states.values()]
        return {name: sum(of[name] for of in all_of) % (1 << 64) for name in ("state", "master")}


def _taking(part: Part) -> Callable[[nn.Parameter], None]:
    """Brings a gradient to its plane as soon as it is there, and gives its memory back."""

    def take(parameter: nn.Parameter) -> None:
        grad = parameter.grad
        if grad is None or grad is part.grad or grad.is_sparse or grad.dtype != part.plane.dtype:
            return
        with torch.no_grad():
            part.plane.view(-1).copy_(part.local_like(grad, "gradient"))
        parameter.grad = part.grad

    return take


def _remove_all(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()


def _chunks(line: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    for at in range(0, line.numel(), _CHUNK):
        yield at, line[at : at + _CHUNK]
