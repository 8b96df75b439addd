"""Models that were built in `modicum.torch.accelerate.loading` and have no values yet: facts about
them, guards against uses that would silently compute without values or lose values, and the errors
of such uses."""

import copy
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modicum.errors import Error, refusal
from modicum.recipes.structure import Structure
from modicum.upstream.torch_core import drop_hooks, parameters_of, version_of

# Packages whose frames are removed from the traceback of an error of Modicum.
_FRAMEWORKS = re.compile(
    r"[/\\](modicum|accelerate|transformers|trl|torch|contextlib\.py|functools\.py)([/\\]|$)"
)
# Messages of torch's errors about tensors without values.
_WITHOUT_VALUES = re.compile(
    r"(?i)meta tensor|on meta|meta device|device meta|device='meta'|'Meta'|no data"
    r"|incompatible tensor type|invalid python storage|no storage"
)


@dataclass(eq=False)
class Built:
    """Facts about a model without values."""

    loading: Any
    """The `Loading` that loads it."""
    source: Path | None
    """The checkpoint; None: all tensors are initialised by the model's own rules."""
    parameters: dict[str, tuple[torch.dtype, int | None]]
    """For each name: the dtype in which `from_pretrained` would have loaded the parameter, and the
    version counter of the parameter when it was built; None: writes to it are allowed."""
    resized: str | None = None
    """How new rows are made, "mean" or "model"; None: no tensor was resized."""
    filled: bool = False
    """Whether the model has its values now."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the load."""
        return self.loading._arguments | {"resized": self.resized}


def note(model: nn.Module, built: Built, register: Callable[[nn.Module, Built], None]) -> None:
    """Calls `register(model, built)` and guards the model. A deep copy of it is registered and
    guarded as well."""
    named = model.named_parameters(remove_duplicate=False)
    built.parameters = {name: (p.dtype, version_of(p)) for name, p in named}
    register(model, built)
    for module in model.modules():
        if parameters_of(module):
            guard(module)

    def deepcopy(memo: dict[int, Any]) -> nn.Module:
        vars(model).pop("__deepcopy__")
        try:
            made = copy.deepcopy(model, memo)
        finally:
            vars(model)["__deepcopy__"] = deepcopy
        note(made, replace(built), register)
        return made

    vars(model)["__deepcopy__"] = deepcopy


def note_resized(model: nn.Module, built: Built, modules: Collection[nn.Module], how: str) -> None:
    """Notes that `modules` of the model were resized. `how`: "mean" or "model"."""
    if built.resized not in (None, how):
        what = "resize_token_embeddings with and without mean_resizing in one model"
        raise refusal("UNSUPPORTED", what)
    built.resized = how
    for prefix, module in model.named_modules():
        for name, parameter in parameters_of(module).items() if module in modules else ():
            if parameter is not None:
                built.parameters[f"{prefix}.{name}".lstrip(".")] = parameter.dtype, None
        if module in modules:
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


def refuse_changed(structure: Structure, built: Built, keys: Mapping[str, str]) -> None:
    """Raises `UsageError` if a parameter was written to while it had no values, or if an adapter is
    on meta that is not to begin as a base tensor. `keys`: from `keys_of`."""
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
        _, version = built.parameters.get(keys[name], (None, None))
        if hasattr(member.tensor, "placements"):  # the script has sharded it: a new tensor
            version = None
        is_copy = name in structure.copies or begins_as_base
        if not is_copy and version not in (None, version_of(member.tensor)):
            what = "a parameter was written to before it had values: write to it after prepare"
            raise refusal("USAGE", what, tensor=name)


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
        if not re.search(r"[/\\]torch[/\\]", code.co_filename):
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
    while at is not None and _FRAMEWORKS.search(at.tb_frame.f_code.co_filename):
        at = at.tb_next
    return at
