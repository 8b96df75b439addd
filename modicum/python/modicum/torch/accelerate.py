"""Loads through Modicum in scripts of accelerate and of transformers' Trainer, with one context:

    import modicum.torch.accelerate

    with modicum.torch.accelerate.loading(budget="200GiB"):
        main()  # from_pretrained, an optimizer, Accelerator.prepare or Trainer.train

Inside the context:

    from_pretrained          builds the model on every rank, parameters on meta in their final
      |                      dtypes, buffers real; reads no tensor
    Accelerator.prepare      (Trainer calls it)
      | fsdp2_prepare_model  accelerate's own: units, upcasts, mesh, offloading, checkpointing
      | modicum.torch.load   each rank reads the bytes of its shards
      | rebinding            optimizers get the sharded parameters, by FQN
    training

It does not matter whether `cpu_ram_efficient_loading` is set. When the context ends, with or
without an exception, every patched function is restored. Importing this module imports neither
accelerate nor transformers.
"""

import functools
import gc
import hashlib
import re
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modicum import _modicum
from modicum.errors import refusal
from modicum.recipes.patterns import Rule
from modicum.recipes.structure import Structure, structure_of
from modicum.torch.build.empty import empty_parameters
from modicum.torch.loading.load import load
from modicum.torch.ranks.collectives import settled
from modicum.torch.shards.forks import require_fork
from modicum.torch.shards.rebinding import rebinding
from modicum.torch.shards.tensors import as_bytes
from modicum.upstream import accelerate, peft, transformers
from modicum.upstream.patching import replace
from modicum.upstream.torch_core import drop_hooks, local_of, parameters_of, version_of
from modicum.upstream.torch_fsdp import is_sharded
from modicum.upstream.wrappers import canonical
from modicum.walk.calls import require_check
from modicum.walk.report import Report

_CHUNK = 1 << 20  # elements


@contextmanager
def loading(
    source: str | Path | None = None,
    *,
    budget: int | str | None = None,
    ledger: _modicum.Ledger | None = None,
    strategy: str = "own-shard",
    missing: str | Collection[str] | Mapping[str, Rule] = "error",
    unexpected: str | Collection[str] = "error",
    check: str | None = None,
    progress: bool = True,
    seed: int = 0,
    staging: int | str | None = None,
    fork: str = "excluded",
) -> Iterator["Loading"]:
    """Within it each rank of a script of accelerate or Trainer with FSDP2 reads its own bytes only.
    The values are bit for bit those that accelerate would load.

    It must enclose `from_pretrained` and `prepare` or `Trainer.train`. Every rank enters it with
    the same arguments, on one thread. Of nested contexts the innermost applies.

    Args:
        source: a directory, a safetensors file, or `org/name` in the local Hugging Face cache;
            None (default): the files that each `from_pretrained` would read.
        budget: host memory per node while loading, bytes or text ("200GiB"), the processes
            themselves included; "none": no limit; None (default): the ledger's limit, or the memory
            that the cgroup and the node have left.
        ledger: its limit is the host memory of the node; every parameter is charged to it until the
            last tensor of the parameter is freed; None (default): a new one for each load.
        strategy: own-shard (default), node-reader, replica-striped, rank0-broadcast or
            full-per-rank; all give the same bits. Rank 0 prints the one in use.
        missing: names that the source lacks, beyond those that the model lists: "error" (default),
            or as for `modicum.torch.load`. `from_pretrained` would only warn.
        unexpected: stored names that are not in the model: "error" (default), "ignore", or patterns
            of names to drop. `from_pretrained` would only warn.
        check: None (default), or "values": compare every value with a second reading.
        progress: whether rank 0 draws a bar on stderr; True by default.
        seed: of initialised parameters; 0 by default.
        staging: host memory per rank for bytes in flight, bytes or text; None (default): 8 MiB,
            less if the budget requires it.
        fork: "excluded" (default), "shared" or "inherited", as for `modicum.torch.load`.

    Yields:
        A `Loading`; it has a `report` after `prepare`.

    Raises:
        UsageError: on entry, if accelerate, transformers or PEFT behave differently from the tested
            versions (1.15.0, 5.23.0, 0.21.2). Later for plugins other than FSDP2, and wherever
            values would be lost or parameters without values used.
        BudgetError, FormatError, IntegrityError, IoError, PeerError: from `prepare`, as from
            `modicum.torch.load`.
    """
    require_check(check)
    require_fork(fork)
    one = Loading(
        None if source is None else Path(source),
        dict(
            budget=budget, ledger=ledger, strategy=strategy, missing=missing, fork=fork,
            unexpected=unexpected, check=check, progress=progress, seed=seed, staging=staging,
        ),
    )  # fmt: skip
    with ExitStack() as stack:
        scripts = transformers.builder(_pretrained_model()) or _Scripts(stack)
        scripts.loadings.append(one)
        stack.callback(scripts.loadings.remove, one)
        yield one
    _refuse_unfilled(one)


@dataclass(eq=False)
class Loading:
    """The loads of one `loading` context."""

    _source: Path | None
    _arguments: dict[str, Any]
    reports: list[Report] = field(default_factory=list)
    """One per load, in order."""
    _built: weakref.WeakKeyDictionary[nn.Module, "_Built"] = field(
        default_factory=weakref.WeakKeyDictionary, repr=False
    )

    @property
    def report(self) -> Report | None:
        """That of the last load; None before the first."""
        return self.reports[-1] if self.reports else None


@dataclass
class _Built:
    """A model that `from_pretrained` has built without values."""

    loading: Loading
    source: Path
    parameters: dict[str, tuple[torch.dtype, int]]
    """By name: the dtype that `from_pretrained` would have loaded, the tensor's version counter."""
    filled: bool = False


def _refuse_unfilled(one: Loading) -> None:
    if not all(of.filled for of in one._built.values()):
        gc.collect()  # a model without references is no error
    for model, of in one._built.items():
        if not of.filled:
            what = "a model that was built within loading() has no values yet: call "
            what += "Accelerator.prepare or Trainer.train before the context ends"
            raise refusal("USAGE", what, got=type(model).__name__)


# ---- patched functions


def _pretrained_model() -> Any:
    from transformers import PreTrainedModel

    return PreTrainedModel


class _Scripts:
    """The functions that replace those of accelerate, transformers and PEFT. Nested `loading()`
    contexts share one object; the innermost builds models."""

    def __init__(self, stack: ExitStack) -> None:
        accelerate.KNOWN.require()
        transformers.KNOWN.require()
        self.loadings: list[Loading] = []
        self._stack = stack
        self._has_peft = peft.with_real_adapters(stack)
        transformers.replace_loading(stack, _pretrained_model(), self)
        accelerate.replace_prepare(stack, self._preparing, self._sharding)

    def contexts(self) -> list[AbstractContextManager[Any]]:
        """The contexts in which `from_pretrained` builds a model."""
        if not self._has_peft:  # may have been imported since
            self._has_peft = peft.with_real_adapters(self._stack)
        accelerate.require_fsdp2_if_set()
        # from_pretrained draws no random number: the generator must not move here either.
        return [torch.random.fork_rng(devices=[]), empty_parameters()]

    def built(self, model: Any, files: Sequence[str] | None, *given: Any) -> None:
        """Instead of reading: records the source of the values, guards the model until the load."""
        transformers.check_arguments(model, *given)
        one = self.loadings[-1]
        source = one._source or transformers.source_of(files)
        named = model.named_parameters(remove_duplicate=False)
        parameters = {name: (p.dtype, version_of(p)) for name, p in named}
        one._built[model] = _Built(one, source, parameters)
        for module in model.modules():
            if parameters_of(module):
                module.register_forward_pre_hook(_refuse_forward)
                module.register_load_state_dict_pre_hook(_refuse_state)

    def _record(self, module: nn.Module) -> _Built | None:
        return next((of for one in self.loadings if (of := one._built.get(module))), None)

    def _roots(self, model: nn.Module) -> dict[nn.Module, _Built]:
        """The outermost models inside `model` that were built without values."""
        if built := self._record(model):
            return {model: built}
        return {m: of for child in model.children() for m, of in self._roots(child).items()}

    def _is_filled(self, model: nn.Module) -> bool:
        roots = self._roots(model)
        if not roots and not is_sharded(model):
            what = "from_pretrained did not build this model within loading(): prepare it outside"
            raise refusal("USAGE", what, got=type(model).__name__)
        return all(built.filled for built in roots.values())

    # ---- prepare

    def _preparing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def prepare(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
            models = [one for one in args if isinstance(one, nn.Module)]
            empty = [model for model in models if not self._is_filled(model)]
            if not empty:
                return original(accelerator, *args, **kwargs)
            accelerate.require_fsdp2(accelerator.state)
            optimizers = [
                getattr(one, "optimizer", one)
                for one in args
                if isinstance(one, torch.optim.Optimizer)
            ]
            with rebinding(empty[0], optimizers), _kept(optimizers):
                prepared = original(accelerator, *args, **kwargs)
            if not all(map(self._is_filled, empty)):
                what = "Accelerator.prepare of this accelerate does not call fsdp2_prepare_model"
                expected = f"accelerate {' or '.join(accelerate.KNOWN.tested)}"
                raise refusal("UNSUPPORTED", what, expected=expected)
            return prepared

        return prepare

    def _sharding(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def fsdp2_prepare_model(accelerator: Any, model: nn.Module) -> Any:
            roots = self._roots(model)
            if all(built.filled for built in roots.values()):
                return original(accelerator, model)
            if len(roots) > 1:
                names = " and ".join(type(root).__name__ for root in [*roots][:2])
                what = "a model with several inside that from_pretrained has built: expected one"
                raise refusal("UNSUPPORTED", what, got=names)
            ((root, built),) = roots.items()
            model = _shard_and_load(accelerator, model, root, built, original)
            for module in model.modules():
                drop_hooks(module, _refuse_forward, _refuse_state)
                if one := self._record(module):
                    one.filled = True
            return model

        return fsdp2_prepare_model


# ---- guards of models without values


def _refuse_forward(module: nn.Module, args: Any) -> None:
    """A hook: without it a forward on meta tensors would return meta tensors, without an error."""
    for name, parameter in parameters_of(module).items():
        if parameter is not None and parameter.is_meta:
            what = "a forward without values: pass the model to prepare within loading()"
            raise refusal("USAGE", what, tensor=name, got=type(module).__name__)


def _refuse_state(
    module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
) -> None:
    """A hook: without it values copied to meta would be lost, without an error."""
    if local_metadata.get("assign_to_params_buffers", False):
        return
    for name, parameter in parameters_of(module).items():
        if parameter is not None and parameter.is_meta and prefix + name in state_dict:
            what = "load_state_dict would be lost in a model without values: call it after prepare"
            raise refusal("USAGE", what, tensor=prefix + name)


# ---- prepare


@contextmanager
def _kept(optimizers: Sequence[Any]) -> Iterator[None]:
    """Restores the parameter lists of all groups. accelerate exchanges parameters by their
    addresses, which on meta are all 0; `rebinding` does it by name afterwards."""
    lists = [[group["params"] for group in one.param_groups] for one in optimizers]
    parameters = [[list(each) for each in of] for of in lists]
    try:
        yield
    finally:
        for one, of, before in zip(optimizers, lists, parameters, strict=True):
            for group, each, were in zip(one.param_groups, of, before, strict=True):
                each[:] = were
                group["params"] = each


def _shard_and_load(
    accelerator: Any, model: nn.Module, root: nn.Module, built: _Built, shard: Callable[..., Any]
) -> Any:
    structure = structure_of(model)
    keys = _keys(structure, model, root)
    _refuse_changed(structure, built, keys)
    passed = _dtypes_passed(structure, built, keys)
    plugin = accelerator.state.fsdp_plugin
    if plugin.cpu_ram_efficient_loading:
        _take_from_rank_0(model, accelerator.device)
    ignored, pattern = plugin.ignored_modules, None
    if isinstance(ignored, str):
        pattern = re.compile(ignored)
        ignored = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    with ExitStack() as stack:
        # Its parameters are on meta already, buffers must stay real, and nothing is to be sent.
        replace(stack, plugin, "cpu_ram_efficient_loading", False)
        replace(stack, plugin, "ignored_modules", ignored)
        model = shard(accelerator, model)
    if not is_sharded(model):
        raise refusal("UNSUPPORTED", "fsdp2_prepare_model of this accelerate shards nothing")
    narrow = _narrowings(model, passed, built.source)
    before = _values(model)
    built.loading.reports.append(load(model, built.source, **built.loading._arguments))
    _refuse_overwritten(before, _values(model))
    for parameter, dtypes in narrow:
        _round(parameter, dtypes)
    for module in ignored if pattern else ():
        module.to(accelerator.device)  # as accelerate does if it is given names
    return model


def _keys(structure: Structure, model: nn.Module, root: nn.Module) -> dict[str, str]:
    """By name in the model: the name of the parameter when `root` was built."""
    path = next(canonical(path) for path, module in model.named_modules() if module is root)
    prefix = f"{path}." if path else ""
    keys = {}
    for name, member in structure.members.items():
        key = member.key if member.root is root else name.removeprefix(prefix)
        keys[name] = key
    return keys | {copy: keys[original] for copy, original in structure.copies.items()}


def _refuse_changed(structure: Structure, built: _Built, keys: Mapping[str, str]) -> None:
    """Refuses parameters that were written to, or copied, while they had no values."""
    for name, member in structure.members.items():
        if not isinstance(member.tensor, nn.Parameter) or not member.tensor.is_meta:
            continue
        if member.adapter is not None and name not in structure.copies:
            what = (
                "an adapter on meta: it is computed from the base's values, or peft was imported "
            )
            what += "after from_pretrained (import it before)"
            raise refusal("UNSUPPORTED", what, tensor=name)
        _, version = built.parameters.get(keys[name], (None, None))
        if name not in structure.copies and version not in (None, version_of(member.tensor)):
            what = "a parameter was written to before it had values: write to it after prepare"
            raise refusal("USAGE", what, tensor=name)


def _take_from_rank_0(model: nn.Module, device: torch.device) -> None:
    """Broadcasts parameters that the script made itself, as `cpu_ram_efficient_loading` does."""
    for parameter in model.parameters():
        if not parameter.is_meta:
            value = parameter.detach().to(device).contiguous()
            settled(torch.distributed.broadcast, value, 0)
            parameter.data.copy_(value)


def _values(model: nn.Module) -> dict[str, bytes]:
    """A digest of each parameter that has values."""
    digests = {}
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            values: Any = as_bytes(local_of(parameter).cpu().contiguous()).numpy()
            digests[name] = hashlib.blake2b(values, digest_size=16).digest()
    return digests


def _refuse_overwritten(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> None:
    for name, value in before.items():
        if after[name] != value:
            what = "a parameter that the script made itself was overwritten by the source: "
            what += "make it after prepare"
            raise refusal("USAGE", what, tensor=canonical(name))


# ---- dtypes


def _dtypes_passed(
    structure: Structure, built: _Built, keys: Mapping[str, str]
) -> dict[str, list[torch.dtype]]:
    """By name: the dtypes that accelerate would cast a value to, in order."""
    passed = {}
    for name, member in structure.members.items():
        now = member.tensor.dtype
        if member.tensor.is_meta and now.is_floating_point:
            passed[name] = [built.parameters.get(keys[name], (now, 0))[0], now]
    return passed


def _narrowings(
    model: nn.Module, passed: Mapping[str, list[torch.dtype]], source: Path
) -> list[tuple[nn.Parameter, list[torch.dtype]]]:
    """Parameters whose stored dtype is wider than one that accelerate would cast to on the way: a
    load keeps bits that accelerate rounds off.

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
            what = "values that accelerate would round twice, to different dtypes"
            got = " then ".join(map(str, [*dtypes, parameter.dtype]))
            raise refusal("UNSUPPORTED", what, tensor=name, got=got)
        if dtypes:
            found.append((parameter, dtypes))
    return found


def _round(parameter: nn.Parameter, dtypes: Sequence[torch.dtype]) -> None:
    for dtype in dtypes:
        for chunk in local_of(parameter).detach().reshape(-1).split(_CHUNK):
            chunk.copy_(chunk.to(dtype))
