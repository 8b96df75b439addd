"""`fsdp2_load_full_state_dict`, with the arguments by which frameworks know it."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, overload

from torch import nn

from modicum.errors import refusal
from modicum.torch.loading.dealing import Dealing, State
from modicum.torch.ranks.group import Ranks
from modicum.torch.shards.forks import require_fork
from modicum.walk.calls import require_check

__all__ = ["fsdp2_load_full_state_dict"]

Full = State | str | Path | None

# Those of `load`, with its defaults.
_OPTIONS: dict[str, Any] = {
    "ledger": None,
    "budget": None,
    "strategy": "own-shard",
    "dtype": None,
    "keep_fp32": None,
    "missing": "error",
    "unexpected": "error",
    "check": None,
    "progress": True,
    "seed": 0,
    "staging": None,
    "fork": "excluded",
}
_WITH_DICT = {"ledger", "progress", "fork"}  # rank 0 has the whole model: no budget says anything


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
    """Brings a full state dict, or a checkpoint by its path, into a model sharded by FSDP2.

    In the place of the functions of this name. Its first argument says which is meant: a module is
    the model (verl, SkyRL, AReaL), anything else an accelerator (accelerate 1.15, axolotl). Every
    rank of torch's default process group calls it, after `fully_shard` and before the first
    forward.

    A **path** is the lean way: each rank reads its own bytes as `modicum.torch.load` does, with the
    model's own conversions, and no rank holds more than its shards and the staging. A **dict** is
    rank 0's, whole, under the names of `model.state_dict()`; what the others give (`{}`, None,
    tensors on meta) is not looked at. It stays rank 0's, who deals it out in pieces of 8 MiB: the
    others hold their shards and one piece.

    It does not matter how ranks have built the model: on meta, under `empty_parameters()`, with
    values (rank 0, commonly), or with memory of `to_empty` that nobody has written. What is on meta
    in one rank is emptied in all, and filled. Parameter objects stay the same, and with them
    optimizers; ties stay one storage, whether the dict has one of the names or all.

    - **dtypes** are those that the model has; floating-point values are rounded to them as torch
      rounds. Other dtypes and FP8 must be equal.
    - **Persistent buffers** come from the dict or the checkpoint, on every rank.
    - **Other buffers** become rank 0's on every rank in the form without an accelerator; compared
      first, and sent only where they differ. With an accelerator they are left alone: accelerate
      puts its own back afterwards.
    - **Where parameters lie** is what `fully_shard` was told, with CPUOffloadPolicy the CPU.

    Args:
        accelerator: is not looked at.
        model: as of `modicum.torch.load`.
        full_sd, full_state: a dict on rank 0; or the directory, file or `org/name` of a checkpoint,
            the same on every rank.
        device_mesh: is not looked at: the model's parameters know theirs. AReaL's `cpu_offload`
            stands here.
        cpu_offload: True, or any policy: parameters that `fully_shard` would not offload are
            refused. False and None, the defaults, say nothing.
        tie_word_embeddings: is not looked at; False by default.
        strict: False: names of the dict that the model has not are dropped, and what the dict lacks
            keeps its values. None, the default, is True; with an accelerator such names are dropped
            in any case. Of dicts only.
        **options: with a path those of `modicum.torch.load`: dtype, missing, unexpected, budget,
            strategy, seed, fork and so on, with its defaults. With a dict: ledger, progress, fork.

    Returns:
        The model.

    Raises:
        UsageError: MISMATCH where dict and model don't go together, naming the tensor; CONFLICT
            where the ranks' models or arguments don't.
        What `modicum.torch.load` raises. On every rank alike; the model's parameters are on meta
        then, but for those that had values on every rank.
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
    offload_to_cpu: bool = False,  # axolotl's word
    **options: Any,
) -> nn.Module:
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
    offload = bool(cpu_offload) or _is_policy(device_mesh)
    rules = {"strict": strict is not False, "drops": strict is False, "scratch": True}
    return _fill(model, full_state, offload, rules, options)


def _is_policy(given: Any) -> bool:
    """What AReaL has in the place of a mesh."""
    from torch.distributed.fsdp import OffloadPolicy

    return isinstance(given, OffloadPolicy)


def _fill(
    model: nn.Module, full: Full, offload: bool, rules: dict[str, bool], options: dict[str, Any]
) -> nn.Module:
    """Both forms, from here on."""
    is_path = isinstance(full, (str, os.PathLike))
    how = _OPTIONS | ({} if is_path else {"budget": "none"})
    known = _OPTIONS.keys() if is_path else _WITH_DICT
    if unknown := sorted(options.keys() - known):
        raise TypeError(f"fsdp2_load_full_state_dict: unknown argument '{unknown[0]}'")
    how |= options
    require_check(how["check"])
    require_fork(how["fork"])
    with Ranks.of_world().together() as ranks:
        if not is_path and not isinstance(full, (Mapping, type(None))):
            got = type(full).__name__
            raise refusal("USAGE", "a state dict", expected="a dict, or a path", got=got)
        state = None if is_path else full or {}
        walk = Dealing(model, ranks, how["seed"], state=state, **rules)
        _check_offload(walk, offload)
        walk.level()
        walk.read_source(full if is_path else None)
        walk.make_recipe(how["dtype"], how["keep_fp32"], how["missing"], how["unexpected"])
        walk.make_plan(how["strategy"], how["staging"], how["ledger"], how["budget"], how["fork"])
        if how["check"] and walk.pieces:
            what = "check='values' where ranks have other buffers than rank 0"
            raise refusal("UNSUPPORTED", what)
        if ranks.rank == 0:
            print(f"modicum: {walk.headline()}", file=sys.stderr)
        walk.load(how["check"], how["progress"])
    return model


def _check_offload(walk: Dealing, offload: bool) -> None:
    for name, of in walk.managed.items():
        if offload and of.device.type != "cpu":
            what, got = "cpu_offload of what fully_shard does not offload", str(of.device)
            raise refusal("USAGE", what, tensor=name, expected="CPUOffloadPolicy", got=got)
