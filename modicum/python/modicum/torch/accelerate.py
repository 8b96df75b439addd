"""Scripts of accelerate and of transformers' Trainer load through Modicum, by one line round them:

    import modicum.torch.accelerate

    with modicum.torch.accelerate.loading(budget="200GiB"):
        main()  # from_pretrained, an optimizer, Accelerator.prepare or Trainer.train

What is different within it, and until it ends, also by an exception:

- `from_pretrained` builds the model on every rank with its parameters on meta, in the dtypes that
  it would have, and with its buffers real. It reads no tensor.
- `Accelerator.prepare`, which Trainer calls, shards it as ever: accelerate's own code, so its
  units, upcasts, meshes, offloading and checkpointing. Then `modicum.torch.load` fills the shards,
  whether `cpu_ram_efficient_loading` is set or not, and optimizers are bound to them by FQN.

Importing this module imports neither accelerate nor transformers.
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
    """Within it a script of accelerate or Trainer with FSDP2 takes each rank's own bytes only. The
    values are those that accelerate would bring, bit for bit.

    It has to last until `prepare` or `Trainer.train` is through. Every rank enters it alike, and
    one thread uses it. Of contexts within each other, the innermost one builds.

    Args:
        source: a directory, a safetensors file, or `org/name` in the local Hugging Face cache;
            None (default): the files that each `from_pretrained` would read.
        budget: host memory per node while loading, bytes or text ("200GiB"), the processes
            themselves included; "none": no limit; None (default): the ledger's limit, or what the
            cgroup and the node leave.
        ledger: whose limit is the host memory of the node, and which shows every parameter until
            its last tensor dies; None (default): a new one for each load.
        strategy: own-shard (default), node-reader, replica-striped, rank0-broadcast or
            full-per-rank; the same bits by all of them. Rank 0 prints the one in force.
        missing: of names that the source lacks, beyond those that the model lists: "error"
            (default), or what `modicum.torch.load` takes. `from_pretrained` would only warn.
        unexpected: of stored names that the model has not: "error" (default), "ignore", or patterns
            of names that may be dropped. `from_pretrained` would only warn.
        check: None (default), or "values": compare every value with a second reading.
        progress: whether rank 0 draws a bar on stderr; True by default.
        seed: of what is initialised; 0 by default.
        staging: host memory of each rank that bytes stream through, bytes or text; None (default):
            8 MiB, less where the budget needs it.
        fork: "excluded" (default), "shared" or "inherited": as of `modicum.torch.load`.

    Yields:
        A `Loading`, whose `report` is there after `prepare`.

    Raises:
        UsageError: at once for an accelerate, transformers or PEFT that behaves differently from
            the tested ones (1.15.0, 5.23.0, 0.21.2). Later for whatever is not FSDP2, and wherever
            values would get lost or empty parameters be used.
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
    """What `loading` gives."""

    _source: Path | None
    _arguments: dict[str, Any]
    reports: list[Report] = field(default_factory=list)
    """One of each load, in their order."""
    _built: weakref.WeakKeyDictionary[nn.Module, "_Built"] = field(
        default_factory=weakref.WeakKeyDictionary, repr=False
    )

    @property
    def report(self) -> Report | None:
        """Of the last load; None before the first."""
        return self.reports[-1] if self.reports else None


@dataclass
class _Built:
    """A model that `from_pretrained` has built without values."""

    loading: Loading
    source: Path
    parameters: dict[str, tuple[torch.dtype, int]]
    """By name: the dtype that `from_pretrained` would have loaded, and the tensor's version."""
    filled: bool = False


def _refuse_unfilled(one: Loading) -> None:
    if not all(of.filled for of in one._built.values()):
        gc.collect()  # a model that nobody refers to any more is no reason to complain
    for model, of in one._built.items():
        if not of.filled:
            what = "a model that was built within loading() has no values yet: Accelerator.prepare "
            what += "or Trainer.train belongs within it too"
            raise refusal("USAGE", what, got=type(model).__name__)


# ---- what is replaced


def _pretrained_model() -> Any:
    from transformers import PreTrainedModel

    return PreTrainedModel


class _Scripts:
    """What accelerate, transformers and PEFT call instead of their own functions. One for all
    `loading()` within each other; the innermost builds."""

    def __init__(self, stack: ExitStack) -> None:
        accelerate.KNOWN.require()
        transformers.KNOWN.require()
        self.loadings: list[Loading] = []
        self._stack = stack
        self._has_peft = peft.with_real_adapters(stack)
        transformers.replace_loading(stack, _pretrained_model(), self)
        accelerate.replace_prepare(stack, self._preparing, self._sharding)

    def contexts(self) -> list[AbstractContextManager[Any]]:
        """Of `from_pretrained`."""
        if not self._has_peft:  # imported since
            self._has_peft = peft.with_real_adapters(self._stack)
        accelerate.require_fsdp2_if_set()
        # The generator goes on as from where transformers leaves it, which draws nothing.
        return [torch.random.fork_rng(devices=[]), empty_parameters()]

    def built(self, model: Any, files: Sequence[str] | None, *given: Any) -> None:
        """Instead of reading: notes where the values are, and guards the model until they come."""
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
        """The outermost models in it that were built without values."""
        if built := self._record(model):
            return {model: built}
        return {m: of for child in model.children() for m, of in self._roots(child).items()}

    def _is_filled(self, model: nn.Module) -> bool:
        roots = self._roots(model)
        if not roots and not is_sharded(model):
            what = "from_pretrained has not built this model within loading(): prepare it outside"
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
                what = "this accelerate prepares a model without fsdp2_prepare_model"
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
                what = "a model of several that from_pretrained has built: only one can be loaded"
                raise refusal("UNSUPPORTED", what, got=names)
            ((root, built),) = roots.items()
            model = _shard_and_load(accelerator, model, root, built, original)
            for module in model.modules():
                drop_hooks(module, _refuse_forward, _refuse_state)
                if one := self._record(module):
                    one.filled = True
            return model

        return fsdp2_prepare_model


# ---- until there are values


def _refuse_forward(module: nn.Module, args: Any) -> None:
    """A hook: a forward of meta tensors gives meta tensors, without an error."""
    for name, parameter in parameters_of(module).items():
        if parameter is not None and parameter.is_meta:
            what = "a forward of a model that was built within loading() and never came to prepare"
            raise refusal("USAGE", what, tensor=name, got=type(module).__name__)


def _refuse_state(
    module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
) -> None:
    """A hook: values that are copied to meta are lost, without an error."""
    if local_metadata.get("assign_to_params_buffers", False):
        return
    for name, parameter in parameters_of(module).items():
        if parameter is not None and parameter.is_meta and prefix + name in state_dict:
            what = "load_state_dict into a model that has no values yet would be lost: "
            what += "call it after prepare"
            raise refusal("USAGE", what, tensor=prefix + name)


# ---- prepare


@contextmanager
def _kept(optimizers: Sequence[Any]) -> Iterator[None]:
    """accelerate tells parameters by their addresses, which on meta are all 0. What it has put into
    the groups goes, and what was in them comes back, for names to tell."""
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
        # It is on meta already, its buffers must not go there, and there is nothing to send.
        replace(stack, plugin, "cpu_ram_efficient_loading", False)
        replace(stack, plugin, "ignored_modules", ignored)
        model = shard(accelerator, model)
    if not is_sharded(model):
        raise refusal("UNSUPPORTED", "this accelerate's fsdp2_prepare_model shards nothing")
    narrow = _narrowings(model, passed, built.source)
    before = _values(model)
    built.loading.reports.append(load(model, built.source, **built.loading._arguments))
    _refuse_overwritten(before, _values(model))
    for parameter, dtypes in narrow:
        _round(parameter, dtypes)
    for module in ignored if pattern else ():
        module.to(accelerator.device)  # as accelerate does it, where it finds them by name
    return model


def _keys(structure: Structure, model: nn.Module, root: nn.Module) -> dict[str, str]:
    """By name in the model: the name that a parameter had when `root` was built."""
    path = next(canonical(path) for path, module in model.named_modules() if module is root)
    prefix = f"{path}." if path else ""
    keys = {}
    for name, member in structure.members.items():
        key = member.key if member.root is root else name.removeprefix(prefix)
        keys[name] = key
    return keys | {copy: keys[original] for copy, original in structure.copies.items()}


def _refuse_changed(structure: Structure, built: _Built, keys: Mapping[str, str]) -> None:
    """What a script has done with values that were not there."""
    for name, member in structure.members.items():
        if not isinstance(member.tensor, nn.Parameter) or not member.tensor.is_meta:
            continue
        if member.adapter is not None and name not in structure.copies:
            what = "an adapter that is made of its base's values, or by a PEFT that was imported "
            what += "after from_pretrained: import peft before"
            raise refusal("UNSUPPORTED", what, tensor=name)
        _, version = built.parameters.get(keys[name], (None, None))
        if name not in structure.copies and version not in (None, version_of(member.tensor)):
            what = "a parameter was written to while it had no values: do it after prepare"
            raise refusal("USAGE", what, tensor=name)


def _take_from_rank_0(model: nn.Module, device: torch.device) -> None:
    """What the script has made itself, as accelerate has it with `cpu_ram_efficient_loading`."""
    for parameter in model.parameters():
        if not parameter.is_meta:
            value = parameter.detach().to(device).contiguous()
            settled(torch.distributed.broadcast, value, 0)
            parameter.data.copy_(value)


def _values(model: nn.Module) -> dict[str, bytes]:
    """A digest of each parameter that has values."""
    return {
        name: hashlib.blake2b(
            as_bytes(local_of(parameter).cpu().contiguous()).numpy(), digest_size=16
        ).digest()
        for name, parameter in model.named_parameters()
        if not parameter.is_meta
    }


def _refuse_overwritten(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> None:
    for name, value in before.items():
        if after[name] != value:
            what = "a parameter that the script has made itself is in the source too, and has that "
            what += "value now: make it after prepare"
            raise refusal("USAGE", what, tensor=canonical(name))


# ---- dtypes


def _dtypes_passed(
    structure: Structure, built: _Built, keys: Mapping[str, str]
) -> dict[str, list[torch.dtype]]:
    """By name: the dtypes that accelerate's values would have had on their way, in order."""
    passed = {}
    for name, member in structure.members.items():
        now = member.tensor.dtype
        if member.tensor.is_meta and now.is_floating_point:
            passed[name] = [built.parameters.get(keys[name], (now, 0))[0], now]
    return passed


def _narrowings(
    model: nn.Module, passed: Mapping[str, list[torch.dtype]], source: Path
) -> list[tuple[nn.Parameter, list[torch.dtype]]]:
    """Parameters that are stored in a wider dtype than one of those on the way: a load would bring
    bits that accelerate rounds off."""
    stored = {dtype for dtype, _ in _modicum.open_checkpoint(source).stored.values()}
    floats = {dtype for dtype in stored if "float" in dtype}

    def narrows(dtype: torch.dtype) -> bool:
        return dtype != torch.float32 and bool(floats - {str(dtype).removeprefix("torch.")})

    found = []
    for fqn, parameter in model.named_parameters():
        name = canonical(fqn)
        dtypes = [d for d in passed.get(name, ()) if d != parameter.dtype and narrows(d)]
        if dtypes and parameter.dtype != torch.float32:
            what = "values that are rounded twice, to other dtypes"
            got = " then ".join(map(str, [*dtypes, parameter.dtype]))
            raise refusal("UNSUPPORTED", what, tensor=name, got=got)
        if dtypes:
            found.append((parameter, dtypes))
    return found


def _round(parameter: nn.Parameter, dtypes: Sequence[torch.dtype]) -> None:
    for dtype in dtypes:
        for chunk in local_of(parameter).detach().reshape(-1).split(_CHUNK):
            chunk.copy_(chunk.to(dtype))
