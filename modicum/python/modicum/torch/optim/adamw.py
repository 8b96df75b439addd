"""`AdamW`: a torch optimizer whose state is in memory of the C++ library, in a declared format."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from modicum import _modicum
from modicum.errors import BudgetError, UsageError, refusal
from modicum.options import MemoryPolicy, read_options, require_flag, require_ledger, require_seed
from modicum.options.renamed import refuse_old_keywords
from modicum.torch.optim.agreement import Answer, agreed
from modicum.torch.optim.binding import (
    NeedsState,
    changed_since,
    hook,
    listed,
    meshes_of,
    new_parts,
    on_meta,
    refuse_lost,
    refuse_repeated,
    unbind,
)
from modicum.torch.optim.bound import BoundParameters
from modicum.torch.optim.items import StateItem, exported_items, stored_items
from modicum.torch.optim.names import called, names_of, naming_fqns, skip_warning, warn_script
from modicum.torch.optim.parts import Part, Slot
from modicum.torch.optim.state_dicts import (
    is_begun,
    is_noted,
    merged_groups,
    saved_entries,
    saved_values,
)
from modicum.torch.optim.states import number_of, options_of, require_text, unscale_of
from modicum.torch.shards.forks import require_fork
from modicum.upstream.torch_core import load_hooks, not_compiled


class AdamW(torch.optim.Optimizer):
    """AdamW with its state on the host. The constructor allocates the state tensors of all
    parameters that train. A frozen parameter has no state until it trains. While any parameter that
    trains is on meta, no state is allocated: `modicum.torch.load(..., optimizer=)`, `prepare`
    within `loading()`, `allocate` or a step does it later.

    It is a `torch.optim.Optimizer`, with groups, schedulers, hooks, `GradScaler`, and PyTorch's
    names and shapes in `state_dict`. Parameters are tensors or DTensors of 32 or 16 bits.

    On the CPU a float32 parameter is its own master (the float32 value that is stepped); in a split
    format a bfloat16 one is half of it: the master rounded to nearest, ties away from zero (torch
    casts ties to even). In both cases a backward makes `parameter.grad` a view of the state's
    memory, unless it has a graph (`create_graph=True`) or other placements than the parameter. Any
    other `grad` on the CPU (of bfloat16 with the default fp32; of float16) is torch's memory: 2
    bytes per element that no promise includes and forked children inherit. A step skips parameters
    without a `grad`.

    For parameters on a device the complete state is on the host. Gradients stay on the device until
    a step or a norm copies them to the host; new parameters are copied back while the step runs.
    Both go through 528 KiB of staging per thread or, if the dtypes are equal, directly.

    Parameters with any dense strides are stepped in memory order. If parameters are replaced in
    `param_groups` (as by accelerate's `prepare` or `rebind_parameters`) or their memory is moved
    (`model.to`, `share_memory`) before the first step or load, the optimizer adopts the new ones;
    afterwards it raises an error that names the parameter. A program may change `state` as in
    torch: a removed entry starts from zero, and new values are used.

    The constructor, `allocate`, `step`, `clip_grad_norm_`, `load_state_dict` and `add_param_group`
    are collective over all ranks of the parameters' meshes: if one raises on a rank, it raises on
    all. They, `state_dict`, `state_items` and `digest` allocate newly unfrozen parameters' state,
    or raise `BudgetError`. Make all calls on the thread that trains.

    Args:
        params: parameters, groups, or `model.named_parameters()`. Random bits are keyed by names
            ("param.N" without names), which must be the same on all ranks.
        lr, betas, eps, weight_decay, amsgrad, maximize: as for torch.optim.AdamW, also in groups.
        foreach, fused: ignored; they select one of torch's implementations.
        capturable, differentiable: must be False.
        state_format: fp32, fp32-split, bf16-moments, int8-moments or int8-moments-24. A bfloat16
            parameter takes 18 (and 2 of `grad`), 14, 10, 8.0625 or 7.0625 bytes per element with
            its gradient; a float32 one 16, 16, 12, 10.0625 or 10.0625. fp32-split has fp32's master
            and moments; the others round moments by random bits, -24 also the master. In the int8
            formats vectors, and tensors of fewer than 128 elements per row or 4096 in all, keep
            fp32 moments.
        semantics: deepspeed, or torch: torch.optim.AdamW's roundings, with square roots rounded to
            nearest. The roots of torch's vector code are not: up to a fifth of them by an ulp.
        decoupled_weight_decay: False: the decay is added to the gradient (Adam); also in groups.
        bias_correction: whether to correct the bias of the moments.
        seed: the seed of the random bits; the same on every rank.
        memory: `MemoryPolicy` with `ledger`, `fork` and `pin`. Inherited memory is charged twice.

    Attributes:
        skipped_steps: number of steps skipped because a gradient was not finite.

    Raises:
        BudgetError: the ledger lacks room; nothing has been allocated.
        UsageError: a parameter can't be stepped in place, is given twice or shares memory with
            another one; options are wrong; or another rank, which is named, raised.
    """

    _step_supports_amp_scaling = True  # GradScaler then leaves the unscaling to `step`

    @refuse_old_keywords(MemoryPolicy)
    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = True,
        bias_correction: bool = True,
        state_format: str = "fp32",
        semantics: str = "torch",
        seed: int = 0,
        memory: MemoryPolicy | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "decoupled_weight_decay": decoupled_weight_decay,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
        }
        holding = read_options("AdamW", MemoryPolicy, memory, ("ledger", "pin", "fork"))
        require_fork(holding["fork"])
        super().__init__(params, defaults)
        self.state_format = require_text("state_format", state_format)
        self.semantics, self.seed = require_text("semantics", semantics), require_seed(seed)
        self.bias_correction = require_flag("bias_correction", bias_correction)
        self.ledger = require_ledger(holding["ledger"]) or _modicum.Ledger()
        self.skipped_steps = 0
        self._pin, self._fork = require_flag("pin", holding["pin"]), holding["fork"]
        self._max_norm: float | None = None
        self._has_warned = self._has_warned_of_skip = False
        self._is_first, self._has_loaded = True, False
        self._bound = BoundParameters()

        def bind() -> None:
            _modicum.state_format_of("float32", [1], self.state_format)  # one that users can give
            self._checked(self.param_groups)
            self._follow()

        self._agreed(bind)

    # ---- binding to parameters

    def _release(self) -> None:
        """Unbinds all parameters; there must be no state to lose. Keeps the entries of `state` that
        the program has set: they are the values of the parameters that are bound next."""
        slots = self._bound.slots
        untouched = {
            part.parameter for part, slot in slots.items() if self._is_untouched(part, slot)
        }
        caller_entries = {
            key: entry for key, entry in self.state.items() if entry and key not in untouched
        }
        unbind(slots)
        self._bound.drop(0)
        self._has_loaded = False
        self.state.clear()
        self.state.update(caller_entries)

    def _is_untouched(self, part: Part, slot: Slot) -> bool:
        """Whether the part's entry of `state` is the optimizer's own, before the first step."""
        entry = self.state.get(part.parameter)
        return entry is not None and is_noted(entry, slot.entry) and entry["step"].item() == 0

    def _has_state(self) -> bool:
        """Whether unbinding the parameters would lose state."""
        counts = self._bound.counts.tolist()
        return any(
            (count > 0 or self._has_loaded) and bool(self.state.get(part.parameter))
            for part, count in zip(self._bound.slots, counts, strict=True)
        )

    def _unbind_changed(self) -> None:
        """Frees all state if parameters were replaced or moved; raises if values would be lost."""
        changed = changed_since(self._bound.slots, self.param_groups)
        if changed is not None:
            if self._has_state():
                raise changed
            self._release()

    def _follow(self, *, now: bool = False) -> None:
        """Adopts changes of param_groups and `state`, or raises. Then allocates state of parameters
        that have begun to train. If any is on meta, allocates none or, with `now`, raises."""
        self._unbind_changed()
        self._bound.meshes = meshes_of(self.param_groups)
        self._has_loaded |= self._bound.follow(self.state)
        if now or not on_meta(self.param_groups, self._trains):
            self._take_up(self._trains, self.param_groups)

    @torch.no_grad()
    def allocate(self) -> None:
        """Allocates the state of all parameters that train and have none, as the first step would.
        None of them may be on meta. Collective."""
        self._agreed(lambda: self._follow(now=True))

    def _trains(self, parameter: torch.Tensor) -> bool:
        """Whether a step would need the parameter's state, as in torch."""
        has_values = parameter.grad is not None or bool(self.state.get(parameter))
        return parameter.requires_grad or has_values

    @torch.no_grad()
    def _take_up(self, needs_state: NeedsState, groups: Sequence[dict[str, Any]]) -> None:
        """Allocates state, with the options of `groups`, for all parameters that have none and for
        which `needs_state` is true. Entries of `state` become its values. After an error
        `_all_or_none` frees the new state."""
        bound = self._bound
        parts = new_parts(self.param_groups, needs_state, bound.slots, self.state_format)
        if not parts:
            return
        try:
            bound.add(
                parts, groups, options=self._checked(groups), ledger=self.ledger, seed=self.seed,
                pin=self._pin, fork=self._fork, what=called(parts),
            )  # fmt: skip
        except BudgetError as error:
            error.tensor = error.tensor or parts[0].name
            raise
        for part in parts:
            if self.state.get(part.parameter):
                bound.take(part, saved_values(part, self.state[part.parameter]))
                self._has_loaded = True

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """A context for binding. On success it hooks parameters that train and are not hooked yet,
        and shows the state of new ones in `state`; on an error it frees their state. Suspends
        inference mode, whose tensors could not be written later."""
        with torch.inference_mode(False), torch.no_grad():
            try:
                yield
            except BaseException:
                self._bound.drop(sum(bool(slot.entry) for slot in self._bound.slots.values()))
                raise
            slots = self._bound.slots
            new = [part for part, slot in slots.items() if not slot.entry]  # not yet in `state`
            hook(slots)
            if new:
                self._bound.show(self.state, new)

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as in torch, and allocates its state by the constructor's rules. Collective
        over the meshes of all groups: a group that is refused on one rank is added on none."""
        param_group = listed(param_group)
        if "_bound" not in self.__dict__:
            refuse_repeated(param_group, self.param_groups)
            super().add_param_group(param_group)
            return
        count = len(self.param_groups)
        groups = [*self.param_groups, *([param_group] if isinstance(param_group, dict) else [])]

        def add() -> None:
            refuse_repeated(param_group, self.param_groups)
            super(AdamW, self).add_param_group(param_group)
            self._checked(self.param_groups)
            self._follow()

        try:
            self._agreed(add, groups)
        except BaseException:
            del self.param_groups[count:]
            raise

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise refusal("UNSUPPORTED", "AdamW is not copied or pickled: use its state_dict()")

    # ---- a step

    @not_compiled
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes a step: unscales, clips, updates and casts in one pass. Collective.

        If a gradient is not finite on any rank of the parameters' meshes, no rank changes anything
        and `skipped_steps` grows by 1 on all of them. `closure` computes the loss again, which is
        returned; it must not raise on some ranks only. If a save in the background has failed, the
        step raises its error, once.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        unscale = clip = 1.0

        def prepare() -> Answer:
            nonlocal unscale
            unscale = unscale_of(self)
            self._follow(now=True)
            self._bound.begin_step()
            self._bound.set_options(self._options(self.param_groups))
            self._bound.refresh_on_device()
            self._bound.collect()
            self._check_gradients()
            found_inf = getattr(self, "found_inf", None)
            squares, is_bad = self._bound.norms()
            return squares, is_bad or (found_inf is not None and bool(found_inf.item()))

        try:
            squares, is_bad = self._agreed(prepare)
            if is_bad:
                self._skip()
            else:
                if self._max_norm is not None:
                    clip = _modicum.clip_factor(math.sqrt(squares) * unscale, self._max_norm)
                self._bound.step(unscale, clip)
        finally:
            self._forget()
        return loss

    def _skip(self) -> None:
        self.skipped_steps += 1
        if self._has_warned_of_skip or hasattr(self, "found_inf"):  # skips by GradScaler are normal
            return
        self._has_warned_of_skip = True
        warn_script(skip_warning(self._bound.not_finite()))

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Computes the norm of all ranks' gradients; the next step clips to `max_norm`, and to the
        least of several calls. Collective.

        The gradients in `parameter.grad` are not changed: the step applies the factor, in float32.
        It follows from the unscaled norm, whether a `GradScaler` unscales before or in the step.

        Returns:
            The norm of the present gradients, scaled or not; NaN if one is not finite.
        """
        max_norm = number_of("max_norm", max_norm)
        if not max_norm >= 0:
            raise refusal("USAGE", "max_norm", expected="0 or more", got=str(max_norm))

        def prepare() -> Answer:
            self._follow(now=True)
            self._bound.collect()
            return self._bound.norms()

        squares, is_bad = self._agreed(prepare)
        self._max_norm = max_norm if self._max_norm is None else min(max_norm, self._max_norm)
        norm = math.nan if is_bad else math.sqrt(squares)
        return torch.tensor(norm, dtype=torch.float32, device="cpu")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients, as in torch. The gradient buffer stays allocated. If a program keeps a
        tensor that was `parameter.grad`, the tensor's values survive the next backward. A view of
        that tensor gets the new gradients: clone a view to keep its values."""
        super().zero_grad(set_to_none)
        self._forget()

    def _agreed(
        self, prepare: Callable[[], Answer | None], groups: Sequence[dict[str, Any]] = ()
    ) -> tuple[float, bool]:
        """Calls `agreed` over the meshes of `groups`, by default those of the optimizer. If any
        rank raises, all ranks free the state that `prepare` has allocated."""
        names = names_of(groups or self.param_groups)

        def meshes() -> list[Any]:
            return (not groups and self._bound.meshes) or meshes_of(groups or self.param_groups)

        with naming_fqns(self.param_groups), self._all_or_none():
            return agreed(prepare, meshes, names)

    def _check_gradients(self) -> None:
        """Raises if parameters lack gradients because the model has replaced them: checked in the
        first step, and in the first one without any gradient. Warns if these are the same step."""
        collected = zip(self._bound.slots, self._bound.collected, strict=True)
        lacking = [part for part, (grad, _) in collected if grad is None]
        has_none = len(lacking) == len(self._bound.slots)
        is_first, self._is_first = self._is_first, False
        if (is_first and lacking) or (has_none and not self._has_warned):
            try:
                refuse_lost([p for p in lacking if p.parameter.requires_grad], self._bound.slots)
            except UsageError:
                self._is_first = is_first
                raise
        if has_none and is_first:
            what = "AdamW's first step finds no gradient in any of its parameters and changes "
            what += "nothing: call backward before, and make AdamW after parameters are replaced"
            warn_script(what)
        self._has_warned |= has_none

    def _forget(self) -> None:
        self._bound.forget()
        self._max_norm = None

    def _options(self, groups: Sequence[dict[str, Any]]) -> list[_modicum.AdamOptions]:
        return [options_of(group, self.semantics, self.bias_correction) for group in groups]

    def _checked(self, groups: Sequence[dict[str, Any]]) -> list[_modicum.AdamOptions]:
        """The groups' options. Raises `UsageError` if one is out of range."""
        options = self._options(groups)
        _modicum.adamw_footprint([], options, format=self.state_format)
        return options

    # ---- state dicts

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """A state dict that torch.optim.AdamW can load: step, exp_avg, exp_avg_sq (max_exp_avg_sq)
        in float32 with each parameter's shape; and `master` if the parameter is its rounded copy.
        float32 ones are views. Others are exported to new memory, 4 bytes per element, which the
        dict holds."""
        with naming_fqns(self.param_groups), self._all_or_none():
            self._follow()
        self._bound.refresh_masters()
        own_state = self.state
        try:
            self.state = defaultdict(dict, self._bound.exported(own_state))
            return super().state_dict()
        finally:
            self.state = own_state

    def state_items(self, codes: bool = False) -> Iterator[StateItem]:
        """Iterates over the complete state as (parameter's name, name, tensor). `codes`: yields
        views of state tensors and scales in their own dtypes, to save or to fill without a copy."""
        require_flag("codes", codes)
        with naming_fqns(self.param_groups), self._all_or_none():
            self._follow()
        self._bound.refresh_masters()
        return stored_items(self._bound) if codes else exported_items(self._bound)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class, in any state format, or of torch.optim.AdamW.
        Collective. Load the model first: without `master` the masters get the parameters' values.

        All values are validated before any is set: if a dict is refused with `UsageError`, nothing
        changes on any rank of the parameters' meshes.
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
            self._checked(groups)
            saved = saved_entries(state_dict)
            ids = [id(p) for group in self.param_groups for p in group["params"]]
            has_values = {key for key, entry in zip(ids, saved, strict=True) if entry}
            self._take_up(lambda p: id(p) in has_values, groups)
            values.extend(saved_values(part, saved[part.at]) for part in self._bound.slots)

        self._agreed(check)
        self._forget()
        self._bound.settle()
        for group, new in zip(self.param_groups, groups, strict=True):
            group.update(new)
        self._bound.set_options(self._options(self.param_groups))
        for part, part_values in zip(self._bound.slots, values, strict=True):
            self._bound.take(part, part_values)
            self._bound.take_master(part, part_values.get("master"))
        self._has_loaded = any(map(is_begun, values))
        self._bound.note_steps()
        self._bound.note_versions()
        for after in hooks_after:
            after(self)

    # ---- memory

    @property
    def held(self) -> dict[str, dict[str, int]]:
        """For each state format the number of elements (`parameters`), and the bytes allocated by
        purpose, without the parameters' own memory. Frozen parameters are not included."""
        return self._bound.held()

    def holdings(self) -> Iterator[tuple[str, str, torch.Tensor]]:  # for `memory.attribute`
        return self._bound.holdings()

    def digest(self) -> dict[str, int]:
        """Digests, as ints, of this rank's fp32 values with their names and global indices: `state`
        (masters and moments) and `master` (masters). The sum modulo 2^64 over ranks with different
        shards does not depend on the sharding."""
        with naming_fqns(self.param_groups), self._all_or_none():
            self._follow()
        return self._bound.digest()
