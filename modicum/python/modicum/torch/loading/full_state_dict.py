"""`load_full_state_dict`, also with the name and signatures by which frameworks call it."""

import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn

from modicum.errors import refusal
from modicum.options import MemoryPolicy, names_in, read_options, require_flag
from modicum.options.renamed import refuse_old, refuse_old_keywords
from modicum.recipes import LoadRules
from modicum.torch.loading.around import note_loaded
from modicum.torch.loading.goal import Goal, Model, goal_of_source, refuse_gaps
from modicum.torch.loading.load import (
    arguments_in,
    collective_load,
    options_of,
    recipe_arguments,
)
from modicum.torch.loading.memory import State, chosen_from, goal_of_memory, level
from modicum.torch.loading.planning import PlannedLoad, Size, plan_of
from modicum.torch.loading.rows import fill_norms, fill_rows, require_rows, require_tokens
from modicum.torch.loading.running import run
from modicum.torch.optim.adamw import AdamW
from modicum.torch.ranks.group import Ranks
from modicum.walk.load_report import LoadReport

Full = State | str | Path | None


@refuse_old_keywords(LoadRules, MemoryPolicy)
def load_full_state_dict(
    model: nn.Module, state: Full, *,
    strict: bool = True, consume: bool = False,
    optimizer: AdamW | Sequence[AdamW] | None = None, budget: Size | None = None,
    dtype: torch.dtype | str | None = None, rules: LoadRules | None = None,
    memory: MemoryPolicy | None = None, progress: bool = True,
) -> LoadReport:  # fmt: skip
    """Collectively loads a full state dict of rank 0, or a checkpoint given by its path, into a
    model sharded by FSDP2.

    Every rank of torch's default process group calls it, after `fully_shard` and before
    the first forward.

    Given a **path**, each rank reads its own bytes as in `load`, with the model's conversions, and
    holds only its shards and the staging. A **dict** is rank 0's full state dict, with the names of
    `model.state_dict()`; the argument of other ranks (`{}`, None, tensors on meta) is ignored. Rank
    0 reads its dict in chunks and sends each rank its part: other ranks hold only their shards and
    the staging. The dict itself is part of rank 0's baseline, which counts towards the budget.

    Ranks may have built the model on meta, under `empty_parameters()`, with values (commonly rank
    0), or with unwritten memory of `to_empty`. A tensor that is on meta on any rank is moved to
    meta on all ranks and then filled. Parameter objects stay the same, so optimizers remain valid.
    Tied tensors keep one storage, whether the dict has one of their names or all.

    - **dtypes** are the model's. Floating-point values are rounded to them as by torch; for other
      dtypes and FP8 the source must have the same dtype.
    - **Persistent buffers** come from the dict or the checkpoint, on every rank.
    - **Non-persistent buffers**: every rank gets rank 0's values; they are compared first, and sent
      only if they differ.
    - **Devices of parameters** are those of `fully_shard`: the CPU with CPUOffloadPolicy.

    Args:
        model: as for `load`.
        state: a dict on rank 0; or the directory, file or `org/name` of a checkpoint, the same on
            every rank.
        strict: only for dicts. True: names of the dict must be in the model, and the dict must have
            all persistent tensors. False: other names are dropped, and a tensor that the dict lacks
            keeps its values; one that is on meta, and so has none, is an error. (Rules, which would
            initialise it, apply to files: pass a path.)
        consume: only for dicts. True: the dict is emptied: on rank 0 each tensor is removed once it
            is sent, which frees its memory unless something else refers to it; on other ranks all
            are removed after the load. After an error rank 0's dict has the tensors that were not
            sent completely.
        optimizer, budget, progress: as for `load`.
        dtype: as for `load`; only with a path.
        rules: `LoadRules` without `buffers`; only with a path.
        memory: `MemoryPolicy` without `pin`; with a dict also without `strategy`.

    Returns:
        The report of the load, the same on every rank. Where buffers differ between ranks, those
        of rank 0 are loaded before a checkpoint; the report does not count them.

    Raises:
        BudgetError: the load exceeds the budget; no tensor has been read.
        UsageError: dict and model do not match (MISMATCH, naming the tensor), or arguments are
            invalid.
        IoError: the models or the arguments of the ranks differ (CONFLICT).
        FormatError, IntegrityError, PeerError: as for `load`. Every error is raised on all ranks;
            parameters are then on meta, except those that had values on every rank.
    """

    def arguments() -> dict[str, Any]:
        require_flag("strict", strict)
        require_flag("consume", consume)
        named = {"optimizer": optimizer, "budget": budget, "dtype": dtype, "progress": progress}
        return _arguments_in("load_full_state_dict", state, rules, memory, **named)

    full_options = FullOptions(strict=strict, drops=not strict, consume=consume)
    return _fill(model, state, full_options, arguments)[-1]


@dataclass(frozen=True)
class FullOptions:
    """What differs between the callers of a load of a full state."""

    strict: bool = True
    """Whether a dict must have all persistent tensors."""
    drops: bool = False
    """Whether names of a dict that the model lacks are dropped."""
    scratch: bool = True
    """Whether non-persistent buffers are filled."""
    offload: bool = False
    """Whether all parameters must be offloaded to the CPU."""
    consume: bool = False


_DICT_RULES = tuple(name for name in names_in(LoadRules) if name != "buffers")


def _arguments_in(
    function: str, state: Full, rules: Any, memory: Any, **keywords: Any
) -> dict[str, Any]:
    """As `arguments_in`, for a load of `state`."""
    if isinstance(state, (str, os.PathLike)):
        return arguments_in(function, rules, memory, _DICT_RULES, **keywords)
    called = f"{function} with a dict"
    for name, default in (("dtype", None), ("check", False)):
        if keywords.get(name, default) != default:
            raise refusal("USAGE", f"{name} has no effect in {called}", expected=repr(default))
    read_options(called, MemoryPolicy, memory, ("staging", "ledger", "fork"))
    expected = "None: change the dict, or save it to a file and pass its path"
    read_options(called, LoadRules, rules, (), expected=expected)
    return arguments_in(called, memory=memory, **keywords)


@overload
def fsdp2_load_full_state_dict(
    accelerator: Any, model: nn.Module, full_sd: Full, cpu_offload: bool = False, **options: Any
) -> nn.Module: ...


@overload
def fsdp2_load_full_state_dict(
    model: nn.Module,
    full_state: Full,
    device_mesh: Any = None,
    cpu_offload: Any = None,
    *,
    tie_word_embeddings: bool = False,
    strict: bool | None = None,
    **options: Any,
) -> nn.Module: ...


def fsdp2_load_full_state_dict(*arguments: Any, **named: Any) -> nn.Module:
    """`load_full_state_dict` under the name and with the signatures by which frameworks call it.
    Collective.

    The first argument selects the signature: a module is the model (verl, SkyRL, AReaL), anything
    else an accelerator (accelerate 1.15, axolotl). With an accelerator, names of the dict that the
    model lacks are dropped, and non-persistent buffers are unchanged: accelerate restores them.

    Args:
        accelerator, tie_word_embeddings: ignored.
        full_sd, full_state: as `state` of `load_full_state_dict`.
        device_mesh: ignored, since parameters have their mesh. But AReaL passes its policy here,
            and a policy counts as `cpu_offload`.
        cpu_offload: True, or any policy: USAGE if `fully_shard` does not offload a parameter.
            False and None, the defaults: not checked.
        **options: the keyword arguments of `load_full_state_dict`; with a path also `check`, as for
            `load`; and `on_report`, called on every rank with the report of each load.

    Returns:
        The model.

    Raises:
        BudgetError, FormatError, IntegrityError, IoError, PeerError, UsageError: as for
            `load_full_state_dict`.
        TypeError: an unknown argument.
    """
    is_accelerates = bool(arguments) and not isinstance(arguments[0], nn.Module)
    if is_accelerates or "accelerator" in named:
        return _of_accelerate(*arguments, **named)
    return _of_engines(*arguments, **named)


def _of_accelerate(
    accelerator: Any,
    model: nn.Module,
    full_sd: Full,
    cpu_offload: bool = False,
    *,
    offload_to_cpu: bool = False,  # axolotl's name for cpu_offload
    **options: Any,
) -> nn.Module:
    """The call with an accelerator, as in accelerate and axolotl."""
    offload = cpu_offload or offload_to_cpu
    full_options = FullOptions(drops=True, scratch=False, offload=offload)
    return _fill_by_name(model, full_sd, full_options, options)


def _of_engines(
    model: nn.Module,
    full_state: Full,
    device_mesh: Any = None,
    cpu_offload: Any = None,
    tie_word_embeddings: bool = False,
    strict: bool | None = None,
    **options: Any,
) -> nn.Module:
    """The call with a model first, as in verl, SkyRL and AReaL."""
    offload = bool(cpu_offload) or _is_policy(device_mesh)
    is_strict = strict is None or bool(strict)
    full_options = FullOptions(strict=is_strict, drops=not is_strict, offload=offload)
    return _fill_by_name(model, full_state, full_options, options)


def _is_policy(mesh: Any) -> bool:
    """Whether the argument `device_mesh` is a policy, which AReaL passes there."""
    from torch.distributed.fsdp import OffloadPolicy

    return isinstance(mesh, OffloadPolicy)


_NAMED = {
    "consume": False, "on_report": None, "optimizer": None, "budget": None, "dtype": None,
    "rules": None, "memory": None, "check": False, "progress": True,
}  # fmt: skip


def _fill_by_name(
    model: nn.Module, state: Full, full_options: FullOptions, options: dict[str, Any]
) -> nn.Module:
    """Loads, for the frameworks' signatures."""
    function = "fsdp2_load_full_state_dict"
    if unknown := sorted(options.keys() - _NAMED):
        refuse_old(unknown[0], function, (LoadRules, MemoryPolicy))
        raise TypeError(f"{function}: unknown argument '{unknown[0]}'")
    named = _NAMED | options

    def arguments() -> dict[str, Any]:
        names = ("rules", "memory", "optimizer", "budget", "dtype", "check", "progress")
        return _arguments_in(function, state, **{name: named[name] for name in names})

    reports = _fill(model, state, replace(full_options, consume=named["consume"]), arguments)
    for report in reports if named["on_report"] else ():
        named["on_report"](report)
    return model


def _fill(
    module: nn.Module,
    full: Full,
    full_options: FullOptions,
    arguments: Callable[[], dict[str, Any]],
) -> list[LoadReport]:
    """Loads a dict or a path. `arguments`: as for `load_by`. Returns a report for each load."""
    reports = []
    with collective_load(module) as ranks:
        named = arguments()
        options = options_of(named)
        _require_full(full, full_options)
        model = Model.of(
            module, adapter=named["adapter"], scratch=full_options.scratch, buffers_follow_fsdp=True
        )
        _check_offload(model, full_options.offload)
        require_tokens(model)
        goals = _goals_of(model, ranks, full, full_options, named)
        refuse_gaps(
            model, {name for goal in goals for name in goal.dtypes}, buffers=full_options.scratch
        )
        planned: list[PlannedLoad] = []
        for goal in goals:  # all must fit before one runs
            require_rows(model, goal.grown, goal.norms)
            # The state of optimizers is allocated after the last load.
            last = options if goal is goals[-1] else replace(options, optimizers=(), later=None)
            planned.append(plan_of(model, ranks, goal, last, planned[-1] if planned else None))
        for load in planned:
            reports.append(run(load, model, ranks))
            fill_rows(model, load.goal.grown, named["resized"] or "", options.seed)
            fill_norms(model, load.goal.norms)
        note_loaded(module)
    if full_options.consume and isinstance(full, MutableMapping):
        full.clear()
    return reports


def _require_full(full: Full, options: FullOptions) -> None:
    """Raises `UsageError` if `full` is neither a dict nor a path, or can't be consumed."""
    got = type(full).__name__
    if not isinstance(full, (Mapping, str, os.PathLike, type(None))):
        what = "the full state has an unsupported type"
        raise refusal("USAGE", what, expected="a dict or a path", got=got)
    if not options.consume:
        return
    if isinstance(full, (str, os.PathLike)):
        raise refusal("USAGE", "consume=True", expected="a dict", got=got)
    if not isinstance(full, (MutableMapping, type(None))):
        what = "consume=True can't remove tensors from this dict"
        raise refusal("USAGE", what, expected="a mutable mapping", got=got)


def _goals_of(
    model: Model, ranks: Ranks, full: Full, options: FullOptions, arguments: Mapping[str, Any]
) -> list[Goal]:
    """The loads to run, in order: from rank 0's memory, then from a checkpoint."""
    kind = "path" if isinstance(full, (str, os.PathLike)) else "dict"
    rules = {"strict": options.strict, "drops": options.drops, "scratch": options.scratch}
    facts = {"the form of the state": kind} | {name: str(rule) for name, rule in rules.items()}
    # `level` compares tensors by their order, so all ranks must have the same names.
    ranks.agree_on(facts | {f"tensor {name}": "in the model" for name in model.tensors})
    uneven = level(model, ranks)
    if full is None or isinstance(full, Mapping):
        choose = partial(
            chosen_from, model, full or {}, uneven, strict=options.strict, drops=options.drops
        )
        consumed = full if options.consume and isinstance(full, MutableMapping) else None
        return [goal_of_memory(model, ranks, choose, consumed)]
    if arguments["check"] and uneven:
        what = "check=True is not supported if non-persistent buffers differ between ranks"
        raise refusal("UNSUPPORTED", what)
    first = [goal_of_memory(model, ranks, lambda: (uneven, {}))] if uneven else []
    return [*first, goal_of_source(model, ranks, full, recipe_arguments(arguments), ())]


def _check_offload(model: Model, offload: bool) -> None:
    for name, managed in model.managed.items():
        if offload and managed.device.type != "cpu":
            what = "cpu_offload without fully_shard's CPUOffloadPolicy"
            raise refusal("USAGE", what, tensor=name, expected="cpu", got=str(managed.device))
