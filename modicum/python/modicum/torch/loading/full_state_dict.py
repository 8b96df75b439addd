"""`fsdp2_load_full_state_dict`, with the signatures under which frameworks call it."""

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, overload

from torch import nn

from modicum import _modicum
from modicum.errors import refusal
from modicum.torch.loading.goal import Goal, Model, goal_of_source, refuse_gaps
from modicum.torch.loading.load import load, options_of, recipe_arguments
from modicum.torch.loading.memory import State, chosen_from, goal_of_memory, level
from modicum.torch.loading.planning import Planned, plan_of
from modicum.torch.loading.rows import fill_norms, fill_rows, require_rows, require_tokens
from modicum.torch.loading.running import run
from modicum.torch.ranks.group import Ranks

Full = State | str | Path | None

# The options of a call with a path, with their defaults: `on_report`, and the keyword arguments of
# `load` except `buffers`.
_OPTIONS: dict[str, Any] = {"on_report": None} | {
    name: of.default
    for name, of in signature(load).parameters.items()
    if of.kind is of.KEYWORD_ONLY and name != "buffers"
}
# The options of a call with a dict.
_WITH_DICT = {"ledger", "budget", "progress", "staging", "fork", "on_report", "consume"}


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
    """Loads a full state dict, or a checkpoint given by its path, into a model sharded by FSDP2.

    Replaces the functions of this name in frameworks. The first argument selects the signature: a
    module is the model (verl, SkyRL, AReaL), anything else an accelerator (accelerate 1.15,
    axolotl). Every rank of torch's default process group calls it, after `fully_shard` and before
    the first forward.

    Given a **path**, each rank reads its own bytes as in `modicum.torch.load`, with the model's
    conversions, and holds only its shards and the staging. A **dict** is rank 0's full state dict,
    with the names of `model.state_dict()`; the argument of other ranks (`{}`, None, tensors on
    meta) is ignored. Rank 0 reads its dict in chunks and sends each rank its part: other ranks hold
    only their shards and the staging. The dict itself is part of rank 0's baseline, which counts
    towards the budget. With `consume=True` each tensor is removed from the dict after it has been
    sent, which frees its memory unless something else refers to it.

    Ranks may have built the model on meta, under `empty_parameters()`, with values (commonly rank
    0), or with unwritten memory of `to_empty`. A tensor that is on meta on any rank is moved to
    meta on all ranks and then filled. Parameter objects stay the same, so optimizers remain valid.
    Tied tensors keep one storage, whether the dict has one of their names or all.

    - **dtypes** are the model's. Floating-point values are rounded to them as by torch; for other
      dtypes and FP8 the source must have the same dtype.
    - **Persistent buffers** come from the dict or the checkpoint, on every rank.
    - **Non-persistent buffers**: without an accelerator, every rank gets rank 0's values; they are
      compared first, and sent only if they differ. With an accelerator they are unchanged:
      accelerate restores them itself afterwards.
    - **Devices of parameters** are those of `fully_shard`: the CPU with CPUOffloadPolicy.

    Args:
        accelerator: ignored.
        model: as for `modicum.torch.load`.
        full_sd, full_state: a dict on rank 0; or the directory, file or `org/name` of a checkpoint,
            the same on every rank.
        device_mesh: ignored, since parameters have their mesh. But AReaL passes its policy here,
            and a policy counts as `cpu_offload`.
        cpu_offload: True, or any policy: USAGE if `fully_shard` does not offload a parameter.
            False and None, the defaults: not checked.
        tie_word_embeddings: ignored.
        strict: only for dicts. True or None (default): names of the dict must be in the model, and
            the dict must have all persistent tensors. False: other names are dropped, and a tensor
            that the dict lacks keeps its values, if it has any. With an accelerator, other names
            are always dropped.
        consume: only for dicts. True: the dict is emptied: on rank 0 each tensor is removed once it
            is sent, on other ranks all are removed after the load. After an error rank 0's dict has
            the tensors that were not sent completely. False by default.
        **options: with a path, the keyword arguments of `modicum.torch.load` except `buffers`. With
            a dict: ledger, budget, staging, progress, fork. With both: `on_report`, called on every
            rank with the report of each load. If buffers differ between ranks, a load of rank 0's
            buffers precedes that of a checkpoint.

    Returns:
        The model.

    Raises:
        BudgetError: the load exceeds the budget; no tensor has been read.
        UsageError: dict and model do not match (MISMATCH, naming the tensor), or arguments are
            invalid.
        IoError: the models or the arguments of the ranks differ (CONFLICT).
        The errors of `modicum.torch.load`. Every error is raised on all ranks; parameters are then
        on meta, except those that had values on every rank.
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
    rules = {"strict": True, "drops": True, "scratch": False}
    return _fill(model, full_sd, offload, rules, options)


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
    rules = {"strict": strict is not False, "drops": strict is False, "scratch": True}
    return _fill(model, full_state, offload, rules, options)


def _is_policy(given: Any) -> bool:
    """Whether the argument `device_mesh` is a policy, which AReaL passes there."""
    from torch.distributed.fsdp import OffloadPolicy

    return isinstance(given, OffloadPolicy)


def _fill(
    module: nn.Module, full: Full, offload: bool, rules: dict[str, bool], options: dict[str, Any]
) -> nn.Module:
    """Loads, for both signatures. `full`: a dict or a path. `rules`: `strict` and `drops` as for
    `chosen_from`, and `scratch`: whether to fill non-persistent buffers."""
    is_path = isinstance(full, (str, os.PathLike))
    known = _OPTIONS.keys() if is_path else _WITH_DICT
    if unknown := sorted(options.keys() - known):
        raise TypeError(f"fsdp2_load_full_state_dict: unknown argument '{unknown[0]}'")
    how = _OPTIONS | {"consume": False} | options
    with Ranks.of_world().together() as ranks:
        of_load = options_of(how, how["ledger"] or _modicum.Ledger(), how["budget"])
        if not is_path and not isinstance(full, (Mapping, type(None))):
            got = type(full).__name__
            what = "the full state has an unsupported type"
            raise refusal("USAGE", what, expected="a dict or a path", got=got)
        if how["consume"] and not isinstance(full, (MutableMapping, type(None))):
            what, got = "consume=True can't remove tensors from this dict", type(full).__name__
            raise refusal("USAGE", what, expected="a mutable mapping", got=got)
        scratch, adapter = rules["scratch"], how["adapter"]
        model = Model.of(module, adapter=adapter, scratch=scratch, buffers_follow_fsdp=True)
        _check_offload(model, offload)
        require_tokens(model)
        goals = _goals_of(model, ranks, full, rules, how)
        made = {name for goal in goals for name in goal.dtypes}
        refuse_gaps(model, made, buffers=rules["scratch"])
        planned: list[Planned] = []
        for goal in goals:  # all must fit before one runs
            require_rows(model, goal.grown, goal.norms)
            # The state of optimizers is allocated after the last load.
            own = of_load if goal is goals[-1] else replace(of_load, optimizers=(), later={})
            planned.append(plan_of(model, ranks, goal, own, planned[-1] if planned else None))
        for load in planned:
            report = run(load, model, ranks)
            fill_rows(model, load.goal.grown, how["resized"] or "", of_load.seed)
            fill_norms(model, load.goal.norms)
            if how["on_report"] is not None:
                how["on_report"](report)
    if how["consume"] and isinstance(full, MutableMapping):
        full.clear()
    return module


def _goals_of(
    model: Model, ranks: Ranks, full: Full, rules: dict[str, bool], how: dict[str, Any]
) -> list[Goal]:
    """The loads to run, in order: from rank 0's memory, then from a checkpoint."""
    kind = "path" if isinstance(full, (str, os.PathLike)) else "dict"
    facts = {"the form of the state": kind} | {name: str(rule) for name, rule in rules.items()}
    # `level` compares tensors by their order, so all ranks must have the same names.
    ranks.agree_on(facts | {f"tensor {name}": "in the model" for name in model.tensors})
    uneven = level(model, ranks)
    if full is None or isinstance(full, Mapping):
        strict, drops = rules["strict"], rules["drops"]
        choose = partial(chosen_from, model, full or {}, uneven, strict=strict, drops=drops)
        consumed = full if how["consume"] and isinstance(full, MutableMapping) else None
        return [goal_of_memory(model, ranks, choose, consumed)]
    if how["check"] and uneven:
        what = "check='values' is not supported if non-persistent buffers differ between ranks"
        raise refusal("UNSUPPORTED", what)
    first = [goal_of_memory(model, ranks, lambda: (uneven, {}))] if uneven else []
    return [*first, goal_of_source(model, ranks, full, recipe_arguments(how), ())]


def _check_offload(model: Model, offload: bool) -> None:
    for name, of in model.managed.items():
        if offload and of.device.type != "cpu":
            what = "cpu_offload without fully_shard's CPUOffloadPolicy"
            raise refusal("USAGE", what, tensor=name, expected="cpu", got=str(of.device))
