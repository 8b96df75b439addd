"""Binds an optimizer to the parameters of its groups, detects that they were replaced or moved, and
hooks their gradients."""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from modicum.errors import UsageError, refusal
from modicum.torch.optim.parts import Part, mesh_of, part_of, place_of
from modicum.torch.shards.placements import Shardings
from modicum.upstream.torch_core import parameters_of, require_known
from modicum.upstream.wrappers import canonical

Group = dict[str, Any]


# ---- binding


def bound_parts(groups: Sequence[Group]) -> list[Part]:
    """A part of every parameter in `groups`, in their order. `UsageError` for a parameter that
    can't be stepped in place, for equal names, and for shared memory."""
    require_known()
    shardings = Shardings()
    parts: list[Part] = []
    names: set[str] = set()
    for name, index, parameter in _named(groups):
        if name in names:
            raise refusal("USAGE", "two parameters have one name", tensor=name)
        names.add(name)
        parts.append(part_of(name, parameter, index, shardings))
    _refuse_overlaps(parts)
    return parts


def _named(groups: Sequence[Group]) -> Iterator[tuple[str, int, nn.Parameter]]:
    count = 0
    for index, group in enumerate(groups):
        for at, parameter in enumerate(group["params"]):
            name = f"param.{count}"
            if "param_names" in group:
                name = canonical(group["param_names"][at])
            yield name, index, parameter
            count += 1


def names_of(groups: Sequence[Group]) -> list[str]:
    """The parameters' names in the groups' order, the same on every rank."""
    return [name for name, _, _ in _named(groups)]


def meshes_of(parts: Sequence[Part], groups: Sequence[Group]) -> list[Any]:
    """The meshes of the bound parameters, or of those to be bound: the optimizer's collectives run
    over them."""
    return [part.mesh for part in parts] or [mesh_of(p) for _, _, p in _named(groups)]


def _refuse_overlaps(parts: Iterable[Part]) -> None:
    """Refuses shared memory, whose elements several threads would step at the same time."""
    end_of: dict[torch.device, tuple[int, str]] = {}
    held = (part for part in parts if part.local.numel() > 0)
    for part in sorted(held, key=lambda part: part.place[0]):
        begin, device = part.place[0], part.local.device
        end, other = end_of.get(device, (begin, ""))
        if begin < end:
            what = f"a parameter shares memory with '{other}': give the optimizer one of them"
            raise refusal("USAGE", what, tensor=part.name)
        end_of[device] = begin + part.local.numel() * part.local.element_size(), part.name


def refuse_repeated(group: Group, before: Iterable[Group]) -> Group:
    """`group` with its parameters as a list; `UsageError` if one of them is in it twice, or in a
    group of `before`."""
    given = group["params"]
    if isinstance(given, (torch.Tensor, set)):
        return group  # a single one, or a set, which torch refuses
    given = list(given)
    seen = {id(parameter) for other in before for parameter in other["params"]}
    count = len(seen)
    for at, one in enumerate(given):
        name, parameter = one if isinstance(one, tuple) else (f"param.{count + at}", one)
        if id(parameter) in seen:
            raise refusal("USAGE", "a parameter is given twice", tensor=str(name))
        seen.add(id(parameter))
    return group | {"params": given}


# ---- changes


def changed_since(parts: Sequence[Part], groups: Sequence[Group]) -> UsageError | None:
    """The error that names the first parameter that was replaced or moved since `parts` were bound;
    None if there is none."""
    held = [(index, p) for index, group in enumerate(groups) for p in group["params"]]
    for part, (index, parameter) in zip(parts, held, strict=False):
        if parameter is not part.parameter or index != part.group:
            what = "param_groups holds another parameter than the one that AdamW has state of: "
            what += "make AdamW after what replaces parameters, as fully_shard and prepare do"
            return refusal("USAGE", what, tensor=part.name)
        if place_of(parameter) != part.place:
            what = "a parameter has other memory than when AdamW was made, and AdamW has state of "
            what += "it: make AdamW after what moves or replaces its memory"
            return refusal("USAGE", what, tensor=part.name)
    if len(held) != len(parts):
        what = "param_groups holds more or fewer parameters than AdamW has state of"
        return refusal("USAGE", what, expected=str(len(parts)), got=str(len(held)))
    return None


def refuse_lost(lacking: Sequence[Part], parts: Sequence[Part]) -> None:
    """Refuses a parameter without a gradient that is in no module any more, if a module has another
    one of its shape with a gradient that is not in `parts`: this one has replaced it in the module
    but not in the groups. Searches all objects of the process."""
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    live = {id(p): p for module in modules for p in parameters_of(module).values()}
    own = {id(part.parameter) for part in parts}
    strangers = [p for p in live.values() if p is not None and id(p) not in own]
    shapes = {p.shape for p in strangers if p.grad is not None}
    for part in lacking:
        if id(part.parameter) in live or part.parameter.shape not in shapes:
            continue
        what = "a parameter without a gradient is in no module any more, and one in its place has "
        what += "a gradient: make AdamW after what replaces parameters, as fully_shard does"
        raise refusal("USAGE", what, tensor=part.name)


# ---- gradients


def hooks_of(parts: Iterable[Part]) -> ExitStack:
    """Hooks, until the stack is closed, that move each gradient to its plane when autograd has
    accumulated it, and give its memory back."""
    hooks = ExitStack()
    for part in parts:
        if part.grad is not None and part.parameter.requires_grad:
            handle = part.parameter.register_post_accumulate_grad_hook(_taking(part))
            hooks.callback(handle.remove)
    return hooks


def _taking(part: Part) -> Callable[[nn.Parameter], None]:
    def take(parameter: nn.Parameter) -> None:
        grad, plane = parameter.grad, part.plane
        if grad is None or plane is None or part.grad is None or grad is part.grad:
            return
        if grad.is_sparse or grad.dtype != plane.dtype:
            return
        if grad.shape != part.grad.shape or place_of(part.grad) != part.grad_place:
            return  # the step compares both, and takes it or refuses it
        with torch.no_grad():
            plane.copy_(part.local_like(grad, "gradient"))
        parameter.grad = part.grad

    return take


def is_in_place(part: Part, grad: torch.Tensor) -> bool:
    """Whether a gradient is in the plane that the state reads."""
    return grad is part.grad and place_of(grad) == part.grad_place
