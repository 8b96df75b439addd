"""Binds an optimizer to the parameters of its groups, detects that they were replaced or moved, and
hooks their gradients."""

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.utils.hooks import unserializable_hook

from modicum.errors import UsageError, refusal
from modicum.torch.optim.names import fqns_of, listed_in, modules_alive
from modicum.torch.optim.parts import (
    Memory,
    Part,
    Slot,
    mesh_of,
    part_of,
    place_of,
    placement_of,
)
from modicum.torch.shards.placements import Shardings
from modicum.upstream.torch_core import local_of, parameters_of, require_known
from modicum.upstream.torch_fsdp import await_copies

Group = dict[str, Any]


# ---- binding


NeedsState = Callable[[nn.Parameter], bool]


def new_parts(
    groups: Sequence[Group],
    needs_state: NeedsState,
    bound: Collection[Part],
    state_format: str,
    memories: Mapping[int, Memory] | None = None,
) -> list[Part]:
    """A part for each parameter in `groups` that has none in `bound` and for which `needs_state` is
    true, in the groups' order. Raises `UsageError` for a parameter that can't be stepped in place,
    for equal names, and for shared memory.

    Args:
        state_format: as for `part_of`.
        memories: the memory that parameters on meta will have, by id of the parameter. A part
            with such a memory serves only to count bytes of state.
    """
    known = {id(part.parameter) for part in bound}
    memories = memories or {}
    if not any(id(p) not in known and needs_state(p) for group in groups for p in group["params"]):
        return []
    require_known()
    shardings = Shardings()
    parts: list[Part] = []
    names: set[str] = set()
    for listed in listed_in(groups):
        if listed.name in names:
            raise refusal("USAGE", "two parameters have the same name", tensor=listed.name)
        names.add(listed.name)
        parameter = listed.parameter
        if id(parameter) not in known and needs_state(parameter):
            parts.append(part_of(listed, state_format, shardings, memories.get(id(parameter))))
    _refuse_overlaps([*bound, *(part for part in parts if id(part.parameter) not in memories)])
    return parts


def on_meta(groups: Sequence[Group], needs_state: NeedsState) -> list[nn.Parameter]:
    """The parameters on meta for which `needs_state` is true."""
    parameters = (p for group in groups for p in group["params"])
    return [p for p in parameters if p.is_meta and needs_state(p)]


def meshes_of(groups: Iterable[Group]) -> list[Any]:
    """The distinct meshes of all parameters, frozen or not, in their order: the optimizer's
    collectives run over them."""
    params = (parameter for group in groups for parameter in group["params"])
    return [*dict.fromkeys(mesh_of(p[1] if isinstance(p, tuple) else p) for p in params)]


def _refuse_overlaps(parts: Iterable[Part]) -> None:
    """Raises `UsageError` if parameters share memory, which several threads would then step."""
    end_of: dict[torch.device, tuple[int, str]] = {}
    nonempty = (part for part in parts if part.local.numel() > 0)
    for part in sorted(nonempty, key=lambda part: part.place[0]):
        begin, device = part.place[0], part.local.device
        end, other = end_of.get(device, (begin, ""))
        if begin < end:
            what = f"a parameter shares memory with '{other}': give the optimizer one of them"
            raise refusal("USAGE", what, tensor=part.name)
        end_of[device] = begin + part.local.numel() * part.local.element_size(), part.name


def listed(group: Any) -> Any:
    """Returns `group` after converting its parameters to a list, as torch does. Leaves anything
    unchanged that torch would refuse."""
    if isinstance(group, dict) and "params" in group:
        params = group["params"]
        if isinstance(params, torch.Tensor):
            group["params"] = [params]
        elif not isinstance(params, set):
            group["params"] = list(params)
    return group


def refuse_repeated(group: Any, before: Iterable[Group]) -> None:
    """Raises `UsageError` if a parameter of a `listed` group is in it twice or in `before`."""
    if not isinstance(group, dict) or not isinstance(group.get("params"), list):
        return
    seen = {id(parameter) for other in before for parameter in other["params"]}
    count = len(seen)
    for at, param in enumerate(group["params"]):
        name, parameter = param if isinstance(param, tuple) else (f"param.{count + at}", param)
        if id(parameter) in seen:
            name = fqns_of([parameter]).get(id(parameter), str(name))
            raise refusal("USAGE", "a parameter is given twice", tensor=name)
        seen.add(id(parameter))


# ---- changes


def changed_since(parts: Collection[Part], groups: Sequence[Group]) -> UsageError | None:
    """An error that names the first parameter which was replaced or moved since `parts` were bound,
    or None. Parameters without a part may be replaced, but none may be removed or inserted before
    one with a part."""
    indexed = [(index, p) for index, group in enumerate(groups) for p in group["params"]]
    for part in parts:
        index, parameter = indexed[part.at] if part.at < len(indexed) else (-1, None)
        if parameter is None:
            what = "param_groups lacks a parameter for which AdamW has state"
            return refusal("USAGE", what, tensor=part.name)
        if parameter is not part.parameter or index != part.group:
            what = "param_groups holds another parameter than the one for which AdamW has state: "
            what += "create AdamW after fully_shard, prepare or any other call that replaces "
            what += "parameters"
            return refusal("USAGE", what, tensor=part.name)
        if place_of(parameter) != part.place:
            what = "the memory of a parameter for which AdamW has state was moved or replaced: "
            what += "create AdamW after that"
            return refusal("USAGE", what, tensor=part.name)
    ids = {id(part.parameter) for part in parts}
    if sum(id(p) in ids for _, p in indexed) != len(ids):
        return refusal("USAGE", "param_groups holds a parameter twice")
    return None


def refuse_lost(lacking: Sequence[Part], parts: Collection[Part]) -> None:
    """Raises `UsageError` if a parameter of `lacking` was replaced in its module, but not in the
    groups. This is assumed if no module has the parameter any more, while some module has a
    parameter of the same shape that has a gradient and is not in `parts`. Searches all objects of
    the process."""
    live = {id(p): p for module in modules_alive() for p in parameters_of(module).values()}
    ids = {id(part.parameter) for part in parts}
    strangers = [p for p in live.values() if p is not None and id(p) not in ids]
    shapes = {p.shape for p in strangers if p.grad is not None}
    for part in lacking:
        if id(part.parameter) in live or part.parameter.shape not in shapes:
            continue
        what = "a parameter without a gradient is in no module any more, and another of its shape "
        what += "has a gradient: create AdamW after fully_shard or any other call that replaces "
        what += "parameters"
        raise refusal("USAGE", what, tensor=part.name)


# ---- gradients


def hook(slots: Mapping[Part, Slot]) -> None:
    """Registers hooks that move each gradient to its buffer (its part of the state's memory for
    gradients) once autograd has accumulated it, and free the gradient's own memory. A gradient that
    autograd adds to the program's tensor stays there: the program may go on to change it, and the
    step copies it."""
    for part, slot in slots.items():
        if not slot.hooks and slot.grad is not None and part.parameter.requires_grad:
            note, take = _noting(part, slot), _taking(part, slot)
            slot.hooks = (
                part.parameter.register_hook(note),
                part.parameter.register_post_accumulate_grad_hook(take),
            )


def unhook(slots: Iterable[Slot]) -> None:
    for slot in slots:
        for handle in slot.hooks:
            handle.remove()
        slot.hooks = ()


def leave_buffers(slots: Mapping[Part, Slot]) -> None:
    """Called before the buffers are freed. Moves gradients that are in them to memory of their
    own."""
    for part, slot in slots.items():
        parameter = part.parameter
        if slot.grad is None or parameter.grad is None:
            continue
        if not is_in_place(slot, parameter.grad):
            continue
        if (parameter.shape, parameter.dtype) == (slot.grad.shape, slot.grad.dtype):
            parameter.grad = slot.grad.clone()


def unbind(slots: Mapping[Part, Slot]) -> None:
    """Called when the state is freed, perhaps by the garbage collector in any other code."""
    unhook(slots.values())
    with torch.inference_mode(False), torch.no_grad():
        leave_buffers(slots)


def _noting(part: Part, slot: Slot) -> Callable[[torch.Tensor], None]:
    """A hook of the part's parameter, called before autograd accumulates its gradient. It keeps
    neither alive, as that of `_taking`."""
    part_of, slot_of = ref(part), ref(slot)

    def note(_: torch.Tensor) -> None:
        part, slot = part_of(), slot_of()
        if part is not None and slot is not None:
            grad = part.parameter.grad
            slot.is_programs = grad is not None and grad is not slot.grad

    return unserializable_hook(note)  # a pickled parameter lacks it, without a warning


def _taking(part: Part, slot: Slot) -> Callable[[nn.Parameter], None]:
    """A hook of the part's parameter. It keeps neither alive: Python does not collect a cycle
    through a tensor's hooks."""
    part_of, slot_of = ref(part), ref(slot)

    def take(parameter: nn.Parameter) -> None:
        part, slot = part_of(), slot_of()
        if part is None or slot is None:
            return
        grad, buffer = parameter.grad, slot.grad_buffer
        if grad is None or slot.grad is None or grad is slot.grad or slot.is_programs:
            return
        if grad.is_sparse or grad.dtype != buffer.dtype:
            return
        if grad.requires_grad:  # of backward(create_graph=True): the step copies its values
            return
        if place_of(slot.grad) != slot.grad_place:  # moved out of the buffer, as by `.data = x`
            slot.grad = part.like_parameter(buffer)
        if grad.shape != slot.grad.shape or place_of(slot.grad) != slot.grad_place:
            return  # the step compares shape and place, and copies the gradient or raises
        if placement_of(grad) != placement_of(parameter):
            return  # the step redistributes it; until then autograd adds to it as it is
        with torch.no_grad():
            leave_kept(part, slot)
            await_copies(grad)
            buffer.copy_(part.local_like(grad, "gradient"))
        parameter.grad = slot.grad

    return take


def is_in_place(slot: Slot, grad: torch.Tensor) -> bool:
    """Whether the gradient is the view of the state's gradient buffer."""
    return grad is slot.grad and place_of(grad) == slot.grad_place


def _references(holder: Any) -> int:
    return sys.getrefcount(holder.grad)


# The count for a tensor to which only its holder refers.
_ALONE = _references(SimpleNamespace(grad=object()))


def leave_kept(part: Part, slot: Slot) -> None:
    """Called before the buffer is overwritten. If the program has kept the tensor that was
    `parameter.grad`, as in `g = p.grad; optimizer.zero_grad()`, moves that tensor's values to new
    memory. Views of it are not detected."""
    if slot.grad is None or slot.grad is part.parameter.grad or _references(slot) <= _ALONE:
        return
    if place_of(slot.grad) != slot.grad_place:  # moved out of the buffer, as by share_memory_
        return
    kept = local_of(slot.grad)
    kept.data = kept.detach().clone()
    slot.set_grad(part)
