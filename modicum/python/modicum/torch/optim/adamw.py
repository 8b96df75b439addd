"""`AdamW`: a torch optimizer whose state is in the core's arenas, in a declared format."""

import math
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from modicum import _modicum
from modicum.errors import UsageError, refusal
from modicum.torch.optim.binding import (
    bound_parts,
    changed_since,
    hooks_of,
    is_in_place,
    meshes_of,
    names_of,
    refuse_lost,
    refuse_repeated,
)
from modicum.torch.optim.bound import MOMENTS, Bound
from modicum.torch.optim.parts import Part, global_sum, largest
from modicum.torch.optim.state_dicts import is_noted, merged_groups, saved_values
from modicum.torch.optim.states import is_own_master, options_of, require_seed
from modicum.torch.shards.forks import require_fork
from modicum.upstream.torch_core import load_hooks

# By plane, its owner in `memory.attribute`.
_OWNERS = {
    "master": "master",
    "master_low": "master",
    "grad": "gradient",
    **dict.fromkeys(MOMENTS, "moments"),
}


class AdamW(torch.optim.Optimizer):
    """AdamW that allocates all of its state, a declared number of bytes, when it is made.

    A `torch.optim.Optimizer`: groups, schedulers, hooks, `GradScaler`, `state_dict` with PyTorch's
    names and shapes. Parameters are plain tensors or DTensors of float32, bfloat16 or float16.

    On the CPU a float32 parameter is its own master, and the bfloat16 parameter of a split format
    is the upper half of its master: neither is held twice. When a backward has accumulated
    `parameter.grad`, it becomes a view of the state's gradient plane. A step skips parameters whose
    `grad` is None, as in torch.

    For parameters on a device the whole state is on the host. Gradients stay on the device and are
    copied to the host by a step or a norm; new parameters are copied back while the step runs. Both
    go through 512 KiB of staging per thread, or the state's own planes.

    Parameters of any dense strides are stepped in memory order. Parameters that were replaced in
    `param_groups` (accelerate's `prepare`, `fully_shard`) and memory that was moved (`model.to`,
    `share_memory`) are bound anew while there is no state, that is before the first step or load;
    afterwards they are refused by name. `state` may be changed as in torch: an entry that was
    removed starts anew, and new values are taken.

    The constructor, `step`, `clip_grad_norm_` and `load_state_dict` are collectives of all ranks of
    the parameters' meshes: if one raises on a rank, it raises on all of these ranks.

    Args:
        params: parameters, groups, or `model.named_parameters()`. Random bits are keyed by names
            ("param.N" without names), which must not depend on the rank.
        lr, betas, eps, weight_decay, amsgrad, maximize: as torch.optim.AdamW; by group, too.
        foreach, fused: ignored: they choose between torch's implementations.
        capturable, differentiable: must be False.
        state_format: fp32 (16 bytes per parameter, gradient and float32 parameter included),
            fp32-split (14), bf16-moments (10), int8-moments (8.0625) or int8-moments-24 (7.0625).
            All but fp32 are for bfloat16 parameters; the optimizer steps others in `fp32`.
        semantics: torch (the bits of torch.optim.AdamW's default path) or deepspeed.
        decoupled: False: the decay is added to the gradient (Adam). In a group:
            `decoupled_weight_decay`.
        bias_correction: whether to correct the bias of the moments.
        seed: of the random bits; the same on every rank.
        ledger: charged for all allocations; None: a new one.
        pin: whether to pin the memory that a device reads or writes, at its exact size; or an
            object with cudaHostRegister and cudaHostUnregister, instead of CUDA's runtime.
        fork: how forked children see the state: "excluded", "shared" or "inherited" (charged
            twice), as in `modicum.torch.load`.

    Attributes:
        skipped_steps: number of steps skipped because a gradient was not finite.

    Raises:
        BudgetError: the ledger lacks room; before anything is allocated.
        UsageError: a parameter that can't be stepped in place, that is given twice or shares
            memory with another; wrong options; another rank raised (names it).
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
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
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
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
        }
        require_fork(fork)
        super().__init__(params, defaults)
        self.state_format, self.semantics, self.seed = state_format, semantics, require_seed(seed)
        self.bias_correction = bias_correction
        self.ledger = ledger or _modicum.Ledger()
        self.skipped_steps = 0
        self._pin, self._fork = pin, fork
        self._max_norm: float | None = None
        self._has_loaded = self._has_warned = False
        self._is_first = True
        self._unhook: Any = lambda: None
        self._bound = Bound([], [])
        try:
            self._agreed(self._bind)
        except BaseException:
            self._release()
            raise

    # ---- binding to parameters

    @torch.no_grad()
    def _bind(self) -> None:
        """Allocates state for the parameters of param_groups; there must be no state to lose. On
        failure nothing stays allocated, and the next call tries again."""
        given = self._release()
        try:
            parts = bound_parts(self.param_groups)
            options = [self._options(group) for group in self.param_groups]
            self._bound = Bound(
                parts, self.param_groups, options=options, state_format=self.state_format,
                ledger=self.ledger, seed=self.seed, pin=self._pin, fork=self._fork,
            )  # fmt: skip
            self._unhook = weakref.finalize(self, hooks_of(parts).close)
            self._unhook.atexit = False
            for part in parts:  # entries that `rebinding` has moved to new parameters
                if part.parameter in given:
                    entry, moments = given[part.parameter], self._bound.moments(part)
                    self._bound.take(part, saved_values(part, entry, moments))
                    self._has_loaded = True
            self._bound.show(self.state, parts)
        except BaseException:
            self._release()
            self.state.update(given)
            raise

    def _release(self) -> dict[Any, Any]:
        """Unbinds all parameters and frees their state. Returns the entries of `state` that are not
        this optimizer's own."""
        parts = self._bound.parts
        own = {part.parameter for part in parts if self._is_untouched(part)}
        given = {key: entry for key, entry in self.state.items() if entry and key not in own}
        for part in parts:
            parameter = part.parameter
            if part.grad is None or parameter.grad is None:
                continue
            if not is_in_place(part, parameter.grad):
                continue
            if (parameter.shape, parameter.dtype) == (part.grad.shape, part.grad.dtype):
                parameter.grad = part.grad.clone()  # out of the plane, for the next step
        self._unhook()
        self._bound = Bound([], [])
        self._has_loaded = False
        self.state.clear()
        return given

    def _is_untouched(self, part: Part) -> bool:
        entry = self.state.get(part.parameter)
        return entry is not None and is_noted(part, entry) and entry["step"].item() == 0

    def _has_state(self) -> bool:
        """Whether binding anew would lose state."""
        counts = self._bound.counts.tolist()
        return any(
            (count > 0 or self._has_loaded) and bool(self.state.get(part.parameter))
            for part, count in zip(self._bound.parts, counts, strict=True)
        )

    def _follow(self) -> None:
        """Follows changes of param_groups and `state` since the last call, or refuses them."""
        changed = changed_since(self._bound.parts, self.param_groups)
        if changed is not None:
            if self._has_state():
                raise changed
            self._bind()
        self._has_loaded |= self._bound.follow(self.state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Called by the constructor only: afterwards all memory is allocated."""
        if "_bound" in self.__dict__:
            what = "AdamW takes no parameter group after its construction: all memory is allocated"
            raise refusal("UNSUPPORTED", what)
        super().add_param_group(refuse_repeated(param_group, self.param_groups))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise refusal("UNSUPPORTED", "AdamW is not copied or pickled: use its state_dict()")

    # ---- a step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One collective step with the current gradients: unscale, clip, update, cast in one pass.

        If a gradient is not finite on any rank of the parameters' meshes, no rank changes a byte
        and `skipped_steps` grows by 1 on all of them.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        unscale = clip = 1.0

        def prepare() -> tuple[list[float], bool]:
            nonlocal unscale
            unscale = self._unscale()
            self._follow()
            self._bound.settle()
            self._push_options()
            self._bound.refresh_on_device()
            self._bound.collect()
            self._check_gradients()
            found_inf = getattr(self, "found_inf", None)
            squares, is_bad = self._bound.norms()
            return squares, is_bad or (found_inf is not None and bool(found_inf.item()))

        try:
            squares, is_bad = self._agreed(prepare)
            if is_bad:
                self.skipped_steps += 1
            else:
                if self._max_norm is not None:
                    clip = _modicum.clip_factor(math.sqrt(squares) * unscale, self._max_norm)
                self._bound.step(unscale, clip)
        finally:
            self._forget()
        return loss

    def _unscale(self) -> float:
        """The inverse of the GradScaler's scale; 1 without one."""
        scale = getattr(self, "grad_scale", None)
        if scale is None:
            return 1.0
        scale = float(scale)
        unscale = 1.0 / scale if scale else math.inf
        if not (0 < scale < math.inf and unscale <= torch.finfo(torch.float32).max):
            expected = "finite and above 0, like its inverse"
            raise refusal("USAGE", "GradScaler's scale", expected=expected, got=str(scale))
        return unscale

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """The norm of the gradients of all ranks; the next step clips it to `max_norm`. Collective.

        The gradients in `parameter.grad` are not changed: the step applies the factor. It is
        computed from the unscaled norm, whether a `GradScaler` unscales before or in the step.

        Returns:
            The norm of the gradients as they are; NaN if one is not finite.
        """
        max_norm = float(max_norm)
        if not max_norm >= 0:
            raise refusal("USAGE", "max_norm", expected="0 or more", got=str(max_norm))

        def prepare() -> tuple[list[float], bool]:
            self._follow()
            self._bound.collect()
            return self._bound.norms()

        squares, is_bad = self._agreed(prepare)
        self._max_norm = max_norm
        return torch.tensor(math.nan if is_bad else math.sqrt(squares))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. The gradient plane stays allocated."""
        super().zero_grad(set_to_none)
        self._forget()

    def _agreed(self, prepare: Callable[[], tuple[list[float], bool] | None]) -> tuple[float, bool]:
        """Calls `prepare` on every rank of the parameters' meshes; collective. It returns a value
        for each parameter and a flag. Returns the sum of all ranks' values, and whether any rank
        has set the flag. If `prepare` raises on a rank all raise: that rank its own error, the
        others `UsageError` with its number. Otherwise they would wait for it in this collective or
        the next one."""
        values: list[float] = []
        flag, problem = False, None
        try:
            values, flag = prepare() or ([], False)
        except Exception as error:
            problem = error
        meshes = meshes_of(self._bound.parts, self.param_groups)
        values = values or [0.0] * len(meshes)
        total, (flag, refused) = global_sum(meshes, values, (flag, problem is not None))
        if not refused:
            return total, flag
        names = ["", *names_of(self.param_groups)]
        named = getattr(problem, "tensor", None)
        at = names.index(named) if named in names else 0
        rank = next((mesh.get_rank() for mesh in meshes if mesh is not None), 0)
        code = 0 if problem is None else 1 + rank * len(names) + at
        rank, at = divmod(largest(meshes, code) - 1, len(names))
        what = f"rank {rank} refused this call, and its error says why"
        raise problem or refusal("USAGE", what, tensor=names[at])

    def _check_gradients(self) -> None:
        """In the first step, and the first time that no parameter has a gradient: refuses
        parameters that lack one because the model has replaced them."""
        collected = zip(self._bound.parts, self._bound.collected, strict=True)
        lacking = [part for part, (grad, _) in collected if grad is None]
        has_none = len(lacking) == len(self._bound.parts)
        is_first, self._is_first = self._is_first, False
        if (is_first and lacking) or (has_none and not self._has_warned):
            try:
                refuse_lost([p for p in lacking if p.parameter.requires_grad], self._bound.parts)
            except UsageError:
                self._is_first = is_first
                raise
        if has_none and is_first:
            what = "AdamW's first step finds no gradient in any of its parameters and changes "
            what += "nothing: call backward before, and make AdamW after parameters are replaced"
            warnings.warn(what, stacklevel=7)
        self._has_warned |= has_none

    def _forget(self) -> None:
        self._bound.forget()
        self._max_norm = None

    def _push_options(self) -> None:
        for index, group in enumerate(self.param_groups):
            options = self._options(group)
            for state in self._bound.states.values():
                state.set_options(index, options)

    def _options(self, group: dict[str, Any]) -> _modicum.AdamOptions:
        return options_of(group, self.semantics, self.bias_correction)

    # ---- state dicts

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.AdamW's, which can load it: step, exp_avg, exp_avg_sq (max_exp_avg_sq) of
        each parameter's shape in float32; and `master` if the parameter is a rounded copy or the
        upper half of one. Planes of float32 are views; the others are exported, 4 bytes per element
        as long as the dict lives."""
        self._follow()
        self._bound.refresh_masters()
        lies = self.state
        try:
            exported: dict[torch.Tensor, Any] = {
                part.parameter: self._bound.exported(part, lies[part.parameter])
                for part in self._bound.parts
            }
            self.state = defaultdict(dict, exported)
            return super().state_dict()
        finally:
            self.state = lies

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class, of any state format, or of torch.optim.AdamW.
        Collective. Load the model before: without `master` the parameters' values are the masters.

        All values are validated before any is taken: a dict that is refused, with `UsageError`,
        changes nothing on any rank of the parameters' meshes.
        """
        if isinstance(state_dict, Mapping):
            state_dict = dict(state_dict)
        hooks_before, hooks_after = load_hooks(self)
        for before in hooks_before:
            state_dict = before(self, state_dict) or state_dict
        groups: list[dict[str, Any]] = []
        values: list[dict[str, Any]] = []

        def check() -> None:
            self._follow()
            groups.extend(merged_groups(state_dict, self.param_groups))
            options = [self._options(group) for group in groups]
            _modicum.adamw_footprint(
                [], options, format=self.state_format
            )  # refuses values out of range
            values.extend(self._saved(state_dict))

        self._agreed(check)
        self._forget()
        self._bound.settle()
        for group, new in zip(self.param_groups, groups, strict=True):
            group.update(new)
        self._push_options()
        for part, of in zip(self._bound.parts, values, strict=True):
            self._bound.take(part, of)
            self._bound.take_master(part, of.get("master"))
        self._has_loaded = any(map(_is_begun, values))
        self._bound.note_steps()
        self._bound.note_versions()
        for after in hooks_after:
            after(self)

    def _saved(self, state_dict: dict[str, Any]) -> list[dict[str, Any]]:
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        return [
            saved_values(part, state_dict["state"].get(key, {}), self._bound.moments(part))
            for part, key in zip(self._bound.parts, keys, strict=True)
        ]

    # ---- memory

    @property
    def held(self) -> dict[str, dict[str, int]]:
        """By state format: the number of elements as `parameters`, and the bytes allocated for them
        by purpose, without the parameters' own memory."""
        held: dict[str, dict[str, int]] = {}
        for part in self._bound.parts:
            of = held.setdefault(part.format, {"parameters": 0})
            of["parameters"] += part.local.numel()
            if part.shard == 0:
                for purpose, size in self._bound.states[part.state].footprint.items():
                    of[purpose] = of.get(purpose, 0) + size
        return held

    def _holdings(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """For `memory.attribute`: owner, name and memory of all tensors of a step."""
        for part in self._bound.parts:
            state = self._bound.states[part.state]
            yield ("master" if is_own_master(part) else "weights"), part.name, part.local
            for plane, owner in _OWNERS.items():
                for lies in (state.plane(part.shard, plane), state.scales(part.shard, plane)):
                    yield owner, f"{part.name}.{plane}", torch.from_dlpack(lies)

    def digest(self) -> dict[str, int]:
        """Digests of this rank's fp32 values, names and global indices: `state` (parameters and
        moments) and `master` (parameters). Their sum modulo 2^64 over ranks that hold different
        shards does not depend on the sharding."""
        self._follow()
        self._bound.refresh_masters()
        all_of = [state.digest() for state in self._bound.states.values()]
        return {name: sum(of[name] for of in all_of) % (1 << 64) for name in ("state", "master")}


def _is_begun(values: Mapping[str, Any]) -> bool:
    """Whether a parameter's values differ from those before its first step."""
    moments = [values.get(name) for name in MOMENTS]
    return values["step"] > 0 or any(of is not None and bool(of.any()) for of in moments)
