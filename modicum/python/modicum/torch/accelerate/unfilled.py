"""Models that were built in `modicum.torch.accelerate.loading` and have no values yet: facts about
them, guards against uses that would silently compute without values or lose values, and the errors
of such uses."""

import copy
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modicum.errors import Error, refusal
from modicum.recipes.structure import Structure, ties_of
from modicum.torch.shards.tensors import as_bytes
from modicum.upstream import accelerate
from modicum.upstream.frames import is_part_of
from modicum.upstream.torch_core import (
    buffers_of,
    drop_hooks,
    is_persistent,
    parameters_of,
    version_of,
)

# Packages whose frames are removed from the traceback of an error of Modicum.
_FRAMEWORKS = ("modicum", "accelerate", "transformers", "trl", "torch", "contextlib", "functools")
# Messages of torch's errors about tensors without values.
_WITHOUT_VALUES = re.compile(
    r"(?i)meta tensor|on meta|meta device|device meta|device='meta'|'Meta'|no data"
    r"|incompatible tensor type|invalid python storage|no storage"
)


@dataclass
class NotedParameter:
    """A parameter of a model without values, as it was built or resized."""

    tensor: nn.Parameter
    dtype: torch.dtype
    """The dtype in which `from_pretrained` would have loaded it."""
    version: int
    """Its version counter."""
    rows: int
    """Its number of rows when it was built."""
    kept: int
    """The least number of rows that it had since: later rows are new."""

    @classmethod
    def of(cls, name: str, tensor: nn.Parameter) -> "NotedParameter":
        rows = len(tensor) if tensor.dim() else 0
        return cls(tensor, tensor.dtype, _version(name, tensor), rows, rows)

    def carried(self, name: str, copy: nn.Parameter) -> "NotedParameter":
        """The same facts about a parameter that replaces this one; a write to this one counts as a
        write to it."""
        writes = version_of(self.tensor) - self.version
        return replace(self, tensor=copy, version=_version(name, copy) - writes)


def _version(name: str, parameter: nn.Parameter) -> int:
    if parameter.is_inference():
        what = "a model without values is copied or resized within torch.inference_mode(), which "
        what += "counts no writes: do it outside"
        raise refusal("UNSUPPORTED", what, tensor=name)
    return version_of(parameter)


@dataclass(eq=False)
class BuiltModel:
    """Facts about a model without values."""

    loading: Any
    """The `Loading` that loads it."""
    source: Path | None
    """The checkpoint; None: all tensors are initialised by the model's own rules."""
    parameters: dict[str, NotedParameter] = field(default_factory=dict)
    """The parameters by the names with which they were built; empty once the model has values."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """Copies of the persistent buffers as they were built, by name."""
    resized: str | None = None
    """How new rows are made, "mean" or "model"; None: no tensor was resized."""
    filled: bool = False
    """Whether the model has its values now."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the load."""
        return self.loading._arguments | {"resized": self.resized}


def note(
    model: nn.Module, built: BuiltModel, register: Callable[[nn.Module, BuiltModel], None]
) -> None:
    """Notes the model's parameters and persistent buffers, calls `register(model, built)` and
    guards the model. A deep copy of it is noted, registered and guarded as well."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        built.parameters[name] = NotedParameter.of(name, parameter)
    for path, module in model.named_modules():
        for leaf, buffer in buffers_of(module).items():
            if buffer is not None and is_persistent(module, leaf):
                built.buffers[f"{path}.{leaf}".lstrip(".")] = buffer.detach().clone()
    _watch(model, built, register)


def _watch(
    model: nn.Module, built: BuiltModel, register: Callable[[nn.Module, BuiltModel], None]
) -> None:
    register(model, built)
    for module in model.modules():
        if parameters_of(module):
            guard(module)

    def deepcopy(memo: dict[int, Any]) -> nn.Module:
        vars(model).pop("__deepcopy__")
        try:
            duplicate = copy.deepcopy(model, memo)
        finally:
            vars(model)["__deepcopy__"] = deepcopy
        copied = {
            name: record.carried(name, memo[id(record.tensor)])
            for name, record in built.parameters.items()
            if id(record.tensor) in memo
        }
        _watch(duplicate, replace(built, parameters=copied), register)
        return duplicate

    vars(model)["__deepcopy__"] = deepcopy


def note_resized(
    model: nn.Module, built: BuiltModel, modules: Collection[nn.Module], rule: str
) -> None:
    """Notes that `modules` of the model were resized. `rule`: "mean" or "model"."""
    if built.resized not in (None, rule):
        what = "resize_token_embeddings with and without mean_resizing in one model"
        raise refusal("UNSUPPORTED", what)
    built.resized = rule
    resized = {id(parameter) for module in modules for parameter in parameters_of(module).values()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in resized:
            record = built.parameters.get(name, NotedParameter.of(name, parameter))
            if record.tensor is not parameter:
                record = record.carried(name, parameter)
            built.parameters[name] = replace(record, kept=min(record.kept, len(parameter)))
    for module in modules:
        guard(module)


def guard(module: nn.Module) -> None:
    """Registers hooks that refuse a forward and load_state_dict."""
    drop_hooks(module, _refuse_forward, _refuse_state)  # a deep copy has them already
    module.register_forward_pre_hook(_refuse_forward)
    module.register_load_state_dict_pre_hook(_refuse_state)


def release(module: nn.Module) -> None:
    """Removes the guards of a module whose model has its values."""
    drop_hooks(module, _refuse_forward, _refuse_state)
    vars(module).pop("__deepcopy__", None)


def _refuse_forward(module: nn.Module, args: Any) -> None:
    """A hook. Without it a forward on meta tensors would silently return meta tensors."""
    for name, parameter in parameters_of(module).items():
        if parameter is not None and parameter.is_meta:
            what = "a forward without values: pass the model to prepare within loading()"
            raise refusal("USAGE", what, tensor=name, got=type(module).__name__)


def _refuse_state(
    module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
) -> None:
    """A hook. Without it values that are copied to meta tensors would silently be lost."""
    if local_metadata.get("assign_to_params_buffers", False):
        return
    for name, parameter in parameters_of(module).items():
        if parameter is not None and parameter.is_meta and prefix + name in state_dict:
            what = "load_state_dict would be lost in a model without values: call it after prepare"
            raise refusal("USAGE", what, tensor=prefix + name)


def refuse_changed(structure: Structure, built: BuiltModel, keys: Mapping[str, str]) -> None:
    """Raises `UsageError` if a parameter was written to while it had no values, if it is no longer
    where it was built, or if an adapter is on meta that is not to begin as a base tensor. `keys`:
    from `keys_of`."""
    names: dict[int, list[str]] = {}
    for name, record in built.parameters.items():
        names.setdefault(id(record.tensor), []).append(name)
    sources = {name: group[0] for group in ties_of(structure) for name in group}
    for name, member in structure.members.items():
        if not isinstance(member.tensor, nn.Parameter) or not member.tensor.is_meta:
            continue
        begins_as_base = name in structure.norms or name in structure.rows
        if member.adapter is not None and name not in structure.copies and not begins_as_base:
            what = (
                "an adapter on meta: it is computed from the base's values, or peft was imported "
            )
            what += "after from_pretrained (import it before)"
            raise refusal("UNSUPPORTED", what, tensor=name)
        noted = built.parameters.get(keys[name])
        is_copy = name in structure.copies or begins_as_base
        # A tensor that the script has sharded is a new one.
        if noted is None or is_copy or hasattr(member.tensor, "placements"):
            continue
        built_names = names.get(id(member.tensor), ["a parameter that was not in the built model"])
        is_source = sources.get(name, name) == name
        if built.source is not None and is_source and keys[name] not in built_names:
            what = "a parameter was moved or copied before it had values, and would get those of "
            what += "its present name: do it after prepare, or build the model within "
            what += "loading.exempt()"
            raise refusal("USAGE", what, tensor=name, expected=keys[name], got=built_names[0])
        if built.parameters.get(built_names[0], noted).version != version_of(member.tensor):
            what = "a parameter was written to before it had values: write to it (or merge "
            what += "adapters) after prepare, or build the model within loading.exempt()"
            raise refusal("USAGE", what, tensor=name)


def written_buffers(structure: Structure, built: BuiltModel, keys: Mapping[str, str]) -> set[str]:
    """The names of persistent buffers that do not have the values with which they were built, at
    most cast to another dtype."""
    written = set()
    for name, member in structure.members.items():
        now, before = member.tensor, built.buffers.get(keys[name])
        if isinstance(now, nn.Parameter) or now.is_meta or hasattr(now, "placements"):
            continue
        if before is None or not torch.equal(
            *(
                as_bytes(tensor.detach().to("cpu", now.dtype).contiguous())
                for tensor in (now, before)
            )
        ):
            written.add(name)
    return written


def rows_kept(structure: Structure, built: BuiltModel, keys: Mapping[str, str]) -> dict[str, int]:
    """The number of rows that keep stored values, for each parameter that was resized to fewer rows
    and then to more."""
    kept = {}
    for name, member in structure.members.items():
        record = built.parameters.get(keys[name])
        if record is None or name in structure.rows or not member.tensor.is_meta:
            continue
        if record.kept < min(record.rows, member.tensor.shape[0] if member.tensor.dim() else 0):
            kept[name] = record.kept
    return kept


# ---- errors


@contextmanager
def told_to_users(has_unfilled: Callable[[], bool]) -> Iterator[None]:
    """A context that makes errors readable. If a model has no values, torch's errors about tensors
    without values become a `UsageError`. Tracebacks of an `Error` show only the script's frames."""
    try:
        yield
    except Error as error:
        _shorten(error)
        raise
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        if not (_WITHOUT_VALUES.search(str(error)) and has_unfilled()):
            raise
        accelerate.require_fsdp2_if_set()  # otherwise no call would give the model its values
        what = "values of a model were used before it has any: use them after prepare, or build "
        what += "the model within loading.exempt()"
        frame = _last_frame(error)
        refused = refusal("USAGE", what, got=f"{str(error).splitlines()[0]} in {frame}")
        raise refused from error


def _last_frame(error: BaseException) -> str:
    """The function and line of the last frame outside of torch."""
    frame, at = "", error.__traceback__
    while at is not None:
        code = at.tb_frame.f_code
        if not is_part_of(code.co_filename, ("torch",)):
            frame = f"{code.co_name}, line {at.tb_lineno}"
        at = at.tb_next
    return frame


def _shorten(error: Error) -> None:
    """Removes frames of frameworks from the traceback, and hides the error's context."""
    error.__suppress_context__ = error.__cause__ is None
    at = error.__traceback__
    while at is not None:
        at.tb_next = _next_of_script(at.tb_next)
        at = at.tb_next


def _next_of_script(at: types.TracebackType | None) -> types.TracebackType | None:
    while at is not None and is_part_of(at.tb_frame.f_code.co_filename, _FRAMEWORKS):
        at = at.tb_next
    return at
