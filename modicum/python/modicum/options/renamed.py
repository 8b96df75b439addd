"""Names of 0.1, whose use raises an error that names the one of 0.2. To be deleted after 0.2."""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from modicum.errors import refusal
from modicum.options import Options, names_in

_Function = TypeVar("_Function", bound=Callable[..., Any])

_WALK = ("Checkpoint", "Layout", "Plan", "Recipe", "Shards", "load", "make_layout", "make_plan")
_NAMES = {
    "modicum": {name: f"modicum.walk.{name}" for name in (*_WALK, "make_recipe", "report")}
    | {"open_checkpoint": "modicum.walk.open_checkpoint", "Report": "modicum.walk.LoadReport"},
    "modicum.memory": {
        "track": "phase, which is also a decorator",
        "peaks": "attribute(..., interval_s=0.1), a context",
        "save": "write",
    },
    "modicum.torch": {
        "Resumed": "ResumeReport",
        "Saved": "SaveReport",
        "Saving": "AsyncSave",
        "rebinding": "rebind_parameters",
    },
    "modicum.torch.dcp": {
        "HuggingFaceReader": "ModicumReader",
        "Reader": "ModicumReader",
        "Writer": "ModicumWriter",
        "convert": "modicum.imports.import_checkpoint",
    },
    "modicum.torch.deepspeed": {"convert": "modicum.imports.import_checkpoint"},
}
_KEYWORDS = {
    "background": "modicum.torch.async_save",
    "check": "modicum.verify, or check= of modicum.torch.load",
    "decoupled": "decoupled_weight_decay=",
    "root": "run=, the second argument",
    "quantizer": "nothing: it is that of the model's config",
    "verify": "modicum.verify, after the report's not_compared",
}


def getattr_of(module: str, *submodules: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module, which refuses its old names with `UsageError`, and imports
    `submodules` at their first use."""

    def __getattr__(name: str) -> Any:
        if name in submodules:
            return importlib.import_module(f"{module}.{name}")
        if new := _NAMES[module].get(name):
            raise refusal("USAGE", f"{module}.{name} has another name since 0.2", expected=new)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__


def refuse_old_keywords(*kinds: type[Options]) -> Callable[[_Function], _Function]:
    """Decorates a function: keywords that it took in 0.1 raise `UsageError`, which names the field
    of the options or the keyword that replaces them. `kinds`: the options that the function takes.
    """

    def decorate(function: _Function) -> _Function:
        known = inspect.signature(function).parameters.keys()

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs.keys() - known:
                refuse_old(name, function.__qualname__.removesuffix(".__init__"), kinds)
            return function(*args, **kwargs)

        return cast(_Function, call)

    return decorate


def refuse_old(name: str, called: str, kinds: tuple[type[Options], ...]) -> None:
    """Raises `UsageError` if the function `called` took the keyword `name` in 0.1."""
    if new := _instead_of(name, kinds):
        raise refusal("USAGE", f"{name}= is no keyword of {called} since 0.2", expected=new)


def _instead_of(name: str, kinds: tuple[type[Options], ...]) -> str | None:
    for kind in kinds:
        if name in names_in(kind):
            return f"{kind._argument}=modicum.torch.{kind.__name__}({name}=...)"
    return _KEYWORDS.get(name)
