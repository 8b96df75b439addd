"""The names of an optimizer's parameters. Messages have them, and the random bits of stochastic
rounding are keyed by them."""

import gc
import inspect
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from modicum.errors import Error
from modicum.upstream.frames import is_part_of
from modicum.upstream.torch_core import children_of, parameters_of
from modicum.upstream.wrappers import canonical

_UNNAMED = re.compile(r"\bparam\.(\d+)\b")


class ListedParameter(NamedTuple):
    """A parameter in the groups of an optimizer."""

    name: str
    parameter: nn.Parameter
    group: int
    """Index of its group."""
    at: int
    """Its index in the list of all groups' parameters."""
    has_amsgrad: bool


def listed_in(groups: Sequence[dict[str, Any]]) -> Iterator[ListedParameter]:
    """All parameters. The name is the one in the group's `param_names`, or "param.N" with the
    parameter's index. A group that is not added yet may hold (name, parameter) pairs."""
    count = 0
    for index, group in enumerate(groups):
        names = group.get("param_names", ())
        for at, param in enumerate(group["params"]):
            name = canonical(names[at]) if at < len(names) else f"param.{count}"
            if isinstance(param, tuple):
                name, param = canonical(str(param[0])), param[1]
            yield ListedParameter(name, param, index, count, bool(group.get("amsgrad")))
            count += 1


def names_of(groups: Sequence[dict[str, Any]]) -> list[str]:
    """The parameters' names in the groups' order, the same on every rank."""
    return [listed.name for listed in listed_in(groups)]


def called(parts: Sequence[Any]) -> str:
    """What errors call the state of `parts`: the first part's name, and the number of others."""
    others = f" and {len(parts) - 1} more parameters" if len(parts) > 1 else ""
    return f"AdamW's state of '{parts[0].name}'{others}" if parts else "AdamW's state"


@contextmanager
def naming_fqns(groups: Sequence[dict[str, Any]]) -> Iterator[None]:
    """A context in which an `Error` that names "param.N" gets the parameter's FQN instead, if the
    parameter has one. This needs a scan of all objects of the process, but only after an error."""
    try:
        yield
    except Error as error:
        unnamed_parameters = {
            listed.name: listed.parameter
            for listed in listed_in(groups)
            if _UNNAMED.fullmatch(listed.name)
        }
        unnamed = [
            name[0] for name in _UNNAMED.finditer(str(error)) if name[0] in unnamed_parameters
        ]
        fqns = fqns_of([unnamed_parameters[name] for name in unnamed]) if unnamed else {}
        fqn_of = {
            name: fqns[id(unnamed_parameters[name])]
            for name in unnamed
            if id(unnamed_parameters[name]) in fqns
        }
        if fqn_of:
            error.args = (_UNNAMED.sub(lambda name: fqn_of.get(name[0], name[0]), str(error)),)
            error.tensor = fqn_of.get(error.tensor or "", error.tensor)
        raise


def fqns_of(parameters: Sequence[nn.Parameter]) -> dict[int, str]:
    """The FQNs of parameters, by id. A parameter has an FQN if all root modules that hold it (those
    that are in no other module) give it the same name."""
    modules = modules_alive()
    inner = {id(child) for module in modules for child in children_of(module).values()}
    wanted = {id(parameter) for parameter in parameters}
    found: dict[int, set[str]] = {}
    for root in modules:
        if id(root) in inner or not (children_of(root) or parameters_of(root)):
            continue
        for name, parameter in root.named_parameters():
            if id(parameter) in wanted:
                found.setdefault(id(parameter), set()).add(canonical(name))
    return {parameter: names.pop() for parameter, names in found.items() if len(names) == 1}


def modules_alive() -> list[nn.Module]:
    """All modules of the process, including those whose constructor has not run."""
    return [candidate for candidate in gc.get_objects() if issubclass(type(candidate), nn.Module)]


def skip_warning(name: str | None) -> str:
    """The warning about the first skipped step. `name`: the parameter whose gradient is not finite;
    empty if every gradient on this rank is finite."""
    what = f"that of '{name}'" if name else "on another rank"
    what = f"AdamW skipped a step, on all ranks: a gradient is not finite ({what}). Further "
    return what + "skips are not reported: `skipped_steps` counts them"


def warn_script(what: str) -> None:
    """Issues a UserWarning at the innermost line of the call stack that is outside of torch and
    Modicum."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and _is_internal(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(what, stacklevel=level)


def _is_internal(file: str) -> bool:
    # "<" begins the file name of generated code, such as "<string>".
    return file.startswith("<") or is_part_of(file, ("modicum", "torch"))
