"""Fills a script's model: accelerate's own function shards the model, and Modicum loads the values
that accelerate would load."""

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modicum import _modicum
from modicum.errors import refusal
from modicum.recipes.structure import Structure, structure_of
from modicum.torch.accelerate.unfilled import BuiltModel, refuse_changed, rows_kept, written_buffers
from modicum.torch.loading.around import giving
from modicum.torch.loading.goal import Model
from modicum.torch.loading.load import load_by
from modicum.torch.loading.rows import fill_rows, require_rows
from modicum.torch.optim.adamw import AdamW
from modicum.torch.ranks.collectives import settled
from modicum.torch.shards.rebinding import Bindings
from modicum.torch.shards.tensors import as_bytes
from modicum.upstream.patching import replace
from modicum.upstream.torch_core import local_of
from modicum.upstream.torch_fsdp import is_sharded, is_unit
from modicum.upstream.wrappers import canonical

_CHUNK = 1 << 20  # elements


@dataclass(frozen=True)
class UnshardedFacts:
    """Facts about a model that is to be filled, from before it is sharded; by its names."""

    structure: Structure
    passed: dict[str, list[torch.dtype]]
    """From `dtypes_passed`."""
    written: set[str]
    """The persistent buffers to which the script has written."""
    kept: dict[str, int]
    """From `rows_kept`."""


def examined(model: nn.Module, root: nn.Module, built: BuiltModel) -> UnshardedFacts:
    """The facts about a model in which `root` was built without values. Raises `UsageError` if the
    script has changed what the load would overwrite or misplace."""
    structure = structure_of(model)
    keys = keys_of(structure, model, root)
    refuse_changed(structure, built, keys)
    passed = dtypes_passed(structure, built, keys)
    written = written_buffers(structure, built, keys)
    return UnshardedFacts(structure, passed, written, rows_kept(structure, built, keys))


@contextmanager
def _bound(bindings: Bindings | None) -> Iterator[list[AdamW]]:
    """A context in which the optimizers' groups hold the sharded parameters, for a load that
    allocates their state. Afterwards the groups hold accelerate's placeholders again, which
    accelerate will replace. Yields the optimizers that are `modicum.torch.AdamW`."""
    optimizers = bindings.optimizers if bindings else []
    placeholders = [
        [list(group["params"]) for group in optimizer.param_groups] for optimizer in optimizers
    ]
    if bindings:
        bindings.exchange()
    try:
        yield [optimizer for optimizer in optimizers if isinstance(optimizer, AdamW)]
    finally:
        for optimizer, lists in zip(optimizers, placeholders, strict=True):
            for group, params in zip(optimizer.param_groups, lists, strict=True):
                group["params"] = params


def shard_and_load(
    accelerator: Any,
    shard: Callable[..., Any],
    bindings: Bindings | None,
    model: nn.Module,
    found: tuple[nn.Module, BuiltModel],
) -> Any:
    """Shards a model by accelerate's function `shard`, and loads it; returns the sharded model.
    `found`: the module in `model` that was built without values, and facts about it."""
    root, built = found
    before = examined(model, root, built)
    plugin = accelerator.state.fsdp_plugin
    if plugin.cpu_ram_efficient_loading:
        _take_from_rank_0(model, accelerator.device)
    ignored, pattern = plugin.ignored_modules, None
    if isinstance(ignored, str):
        pattern = re.compile(ignored)
        ignored = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    with ExitStack() as stack:
        # With this flag accelerate would move buffers to meta and broadcast values of rank 0.
        replace(stack, plugin, "cpu_ram_efficient_loading", False)
        replace(stack, plugin, "ignored_modules", ignored)
        with _naming_tokens(before.structure):
            model = shard(accelerator, model)
    if not is_sharded(model):
        raise refusal("UNSUPPORTED", "fsdp2_prepare_model of this accelerate shards nothing")
    load_rounded(model, built, before, bindings)
    for module in ignored if pattern else ():
        module.to(accelerator.device)  # as accelerate does for a pattern of names
    return model


@contextmanager
def _naming_tokens(structure: Structure) -> Iterator[None]:
    """A context in which accelerate shards a model. accelerate shards the embedding first and reads
    its `weight` later. With PEFT's trainable tokens, PEFT computes this `weight` from one that is
    sharded by then, and fails. If sharding fails and the model has such tokens, the error names the
    first of them. `structure`: the model's structure before it is sharded."""
    try:
        yield
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        for name, (weight, _) in structure.rows.items():
            embedding = structure.members[weight]
            is_tied = sum(m.tensor is embedding.tensor for m in structure.members.values()) > 1
            if not is_tied and not is_unit(embedding.module):
                continue
            what = "accelerate can't shard a model with PEFT's trainable_token_indices if "
            if is_tied:
                what += "embedding and head are tied: call fully_shard on the layers and on the "
                what += "model before prepare"
            else:
                what += "the embedding is a unit of its own: leave its class out of "
                what += "transformer_cls_names_to_wrap"
            got = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            raise refusal("UNSUPPORTED", what, tensor=name, got=got) from error
        raise


def load_rounded(
    model: nn.Module, built: BuiltModel, before: UnshardedFacts, bindings: Bindings | None
) -> None:
    """Loads the values that the model would have under accelerate, which casts each stored value to
    its dtypes in `before.passed`, one after the other."""
    _refuse_cast_norms(model, before)
    narrow = [] if built.source is None else _narrowings(model, before.passed, built.source)
    if before.kept:
        require_rows(Model.of(model), before.kept, {})
    digests = _digests_of(model, before.written)
    # Those of the context in which the model was built, even if the load happens in an inner one.
    account = giving(built.arguments["ledger"], built.arguments["budget"])
    with _bound(bindings) as optimizers, account:
        arguments = built.arguments | {"optimizer": optimizers}
        built.loading.reports.append(load_by(lambda: arguments, model, built.source))
    _refuse_overwritten(digests, _digests_of(model, before.written))
    if before.kept:
        fill_rows(Model.of(model), before.kept, arguments["resized"], arguments["seed"])
    for parameter, dtypes in narrow:
        _round(parameter, dtypes)


def _refuse_cast_norms(model: nn.Module, before: UnshardedFacts) -> None:
    """accelerate before 1.13 also casts weights that are not trained. PEFT has computed DoRA's
    magnitudes from the weights before that."""
    now = {canonical(name): parameter.dtype for name, parameter in model.named_parameters()}
    for name, weight in before.structure.norms.items():
        dtypes = [*before.passed.get(weight, ()), now[weight]]
        if len({*dtypes[-2:]}) > 1:
            what = "a magnitude of DoRA whose weight accelerate casts after PEFT computed it"
            got = f"{weight} as {dtypes[-2]}, then {dtypes[-1]}"
            raise refusal("UNSUPPORTED", what, tensor=name, expected="accelerate>=1.13", got=got)


def keys_of(structure: Structure, model: nn.Module, root: nn.Module) -> dict[str, str]:
    """For each name in `model` the name that the same parameter had in `root` when `root` was
    built. A tensor of PEFT that begins as a base tensor has the name of the base tensor."""
    path = next(canonical(path) for path, module in model.named_modules() if module is root)
    prefix = f"{path}." if path else ""
    keys = {}
    for name, member in structure.members.items():
        key = member.key if member.root is root else name.removeprefix(prefix)
        keys[name] = key
    bases = structure.copies | {name: weight for name, (weight, _) in structure.rows.items()}
    return keys | {name: keys[base] for name, base in bases.items()}


def _take_from_rank_0(model: nn.Module, device: torch.device) -> None:
    """Broadcasts rank 0's values of the parameters that the script made itself, as accelerate does
    with `cpu_ram_efficient_loading`."""
    for parameter in model.parameters():
        if not parameter.is_meta:
            value = parameter.detach().to(device).contiguous()
            settled(torch.distributed.broadcast, value, 0)
            parameter.data.copy_(value)


def _digests_of(model: nn.Module, buffers: Collection[str]) -> dict[str, bytes]:
    """A digest of this rank's part of each parameter that has values and of each buffer of
    `buffers`, by name."""
    digests = {}
    named_buffers = (
        (name, buffer) for name, buffer in model.named_buffers() if canonical(name) in buffers
    )
    for name, tensor in (*model.named_parameters(), *named_buffers):
        if not tensor.is_meta:
            values: Any = as_bytes(local_of(tensor).cpu().contiguous()).numpy()
            digests[name] = hashlib.blake2b(values, digest_size=16).digest()
    return digests


def _refuse_overwritten(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> None:
    for name, value in before.items():
        if after[name] != value:
            what = "a tensor that the script made itself was overwritten by the source: "
            what += "make it after prepare"
            raise refusal("USAGE", what, tensor=canonical(name))


# ---- dtypes


def dtypes_passed(
    structure: Structure, built: BuiltModel, keys: Mapping[str, str]
) -> dict[str, list[torch.dtype]]:
    """For each name of a floating-point tensor on meta the dtypes to which accelerate would cast
    the stored value, in order: the one in which `from_pretrained` loads it, and the present one."""
    passed = {}
    for name, member in structure.members.items():
        now = member.tensor.dtype
        if member.tensor.is_meta and now.is_floating_point:
            noted = built.parameters.get(keys[name])
            passed[name] = [now if noted is None else noted.dtype, now]
    return passed


def _narrowings(
    model: nn.Module, passed: Mapping[str, list[torch.dtype]], source: Path
) -> list[tuple[nn.Parameter, list[torch.dtype]]]:
    """(parameter, dtypes) for each float32 parameter that accelerate may first cast to these
    narrower dtypes. A load alone would keep bits that those casts round off, so `_round` repeats
    the casts.

        stored float32 -> built as bfloat16 -> upcast to float32    accelerate: 8 bits of mantissa
        stored float32 -> float32                                   load: 24 bits, then `_round`
    """
    stored = {dtype for dtype, _ in _modicum.open_checkpoint(source).stored.values()}
    floats = {dtype for dtype in stored if "float" in dtype}

    def narrows(dtype: torch.dtype) -> bool:
        return dtype != torch.float32 and bool(floats - {str(dtype).removeprefix("torch.")})

    found = []
    for fqn, parameter in model.named_parameters():
        name = canonical(fqn)
        dtypes = [d for d in passed.get(name, ()) if d != parameter.dtype and narrows(d)]
        if dtypes and parameter.dtype != torch.float32:
            what = "values that accelerate may round twice, to different dtypes"
            got = " then ".join(map(str, [*dtypes, parameter.dtype]))
            raise refusal("UNSUPPORTED", what, tensor=name, got=got)
        if dtypes:
            found.append((parameter, dtypes))
    return found


def _round(parameter: nn.Parameter, dtypes: Sequence[torch.dtype]) -> None:
    for dtype in dtypes:
        for chunk in local_of(parameter).detach().reshape(-1).split(_CHUNK):
            chunk.copy_(chunk.to(dtype))
