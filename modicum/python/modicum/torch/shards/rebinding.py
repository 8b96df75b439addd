"""Gives an optimizer the new parameters, by FQN, when a model's parameters are replaced.

`fully_shard` and tensor parallelism replace the parameters that an optimizer was made with. Neither
addresses nor order match old parameters with new ones: an address is 0 on meta, and the order in
the model differs from that in an optimizer's groups.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from modicum.errors import refusal
from modicum.options import require_flag
from modicum.upstream.torch_core import local_of
from modicum.upstream.wrappers import canonical

Names = dict[nn.Parameter, list[str]]


@contextmanager
def rebind_parameters(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], *, resuming: bool = False
) -> Iterator[None]:
    """A context in which parameters of `model` may be replaced; on exit `optimizer` gets the new
    ones. Not collective.

        with modicum.torch.rebind_parameters(model, optimizer):
            fully_shard(model)

    On success each parameter in each group is replaced by the one that now has its FQN; name
    components of `torch.compile`'s and activation checkpointing's wrappers are ignored. On failure
    the optimizer is unchanged. Within the context the optimizer keeps the old parameters alive; if
    they are on meta, they take no memory.

    Args:
        model: the model that the block changes in place.
        optimizer: one optimizer, or several.
        resuming: whether optimizers of torch may have state. The state moves to the new parameters,
            whose shape and placements it must have. That of a `modicum.torch.AdamW` that has
            stepped does not move. False by default.

    Raises:
        UsageError: an optimizer has state and `resuming` is False, or it is the state of a
            `modicum.torch.AdamW`; an optimizer has a parameter that the model lacks; an FQN no
            longer exists; tied parameters are no longer tied, or two parameters have become one; or
            state does not fit the new parameter.
    """
    require_flag("resuming", resuming)
    if not isinstance(model, nn.Module):
        raise refusal("USAGE", "model", expected="a torch.nn.Module", got=type(model).__name__)
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    for each in optimizers:
        if not isinstance(each, Optimizer):
            expected, got = "a torch.optim.Optimizer, or several", repr(each)
            raise refusal("USAGE", "optimizer", expected=expected, got=got)
    bindings = Bindings(model, optimizers, resuming=resuming)
    yield
    bindings.exchange()


class Bindings:
    """The parameters of optimizers, by name, before a model's parameters are replaced."""

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], *, resuming: bool = False
    ) -> None:
        """Raises `UsageError` if an optimizer has state and `resuming` is False, or has a parameter
        that the model lacks."""
        self.optimizers = optimizers
        self._model = model
        self._names = parameter_names(model)
        for optimizer in optimizers:
            _check_before(optimizer, self._names, resuming)
        self._lists = [
            [group["params"] for group in optimizer.param_groups] for optimizer in optimizers
        ]
        self._before = [[list(each) for each in lists] for lists in self._lists]

    def exchange(self) -> None:
        """Gives the groups the parameters that now have these names. The lists in the groups stay
        the same objects, since some optimizers keep references to them. State moves to the new
        parameters, but is dropped if no step was made yet. Raises `UsageError`, and changes
        nothing, for the other reasons of `rebind_parameters`."""
        after = {name: p for p, fqns in parameter_names(self._model).items() for name in fqns}
        self.restore()
        exchanged = [_exchanged(optimizer, self._names, after) for optimizer in self.optimizers]
        for optimizer, new_of in zip(self.optimizers, exchanged, strict=True):
            for group in optimizer.param_groups:
                group["params"][:] = [new_of[parameter] for parameter in group["params"]]
            found: dict[Any, Any] = dict(optimizer.state)
            moved = {
                new_of.get(key, key): state
                for key, state in found.items()
                if new_of.get(key, key) is key or not _is_fresh(state)
            }
            optimizer.state.clear()
            optimizer.state.update(moved)

    def restore(self) -> None:
        """Gives the groups their original parameters again."""
        for optimizer, lists, before in zip(
            self.optimizers, self._lists, self._before, strict=True
        ):
            for group, each, were in zip(optimizer.param_groups, lists, before, strict=True):
                each[:] = were
                group["params"] = each


def _is_fresh(state: Any) -> bool:
    """Whether an entry of `state` holds nothing of a step: it is empty, or its step count and all
    its tensors are zero or on meta."""
    if not state or "step" not in state:
        return not state
    tensors = (local_of(value) for value in state.values() if isinstance(value, Tensor))
    has_values = any(not tensor.is_meta and bool(tensor.any()) for tensor in tensors)
    return not has_values and (isinstance(state["step"], Tensor) or float(state["step"]) == 0)


def _check_before(optimizer: Optimizer, names: Names, resuming: bool) -> None:
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if parameter not in names:
                got = f"parameter {place} of group {number}, {list(parameter.shape)}"
                raise refusal("USAGE", "a parameter of the optimizer is not in the model", got=got)
            if _is_fresh(optimizer.state.get(parameter)):
                continue
            if not resuming:
                what = "the optimizer has state: expected resuming=True"
                raise refusal("USAGE", what, tensor=names[parameter][0])
            if hasattr(type(optimizer), "state_items"):  # modicum.torch.AdamW
                what = "AdamW has state in memory of its own, which stays with this parameter"
                expected = "a new AdamW of the new parameters, and load_state_dict"
                raise refusal("USAGE", what, tensor=names[parameter][0], expected=expected)


def _exchanged(
    optimizer: Optimizer, names: Names, after: dict[str, nn.Parameter]
) -> dict[nn.Parameter, nn.Parameter]:
    """For each parameter of the optimizer the one that has its names now."""
    new_of: dict[nn.Parameter, nn.Parameter] = {}
    old_of: dict[nn.Parameter, nn.Parameter] = {}
    for old in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        for name in names[old]:
            if name not in after:
                raise refusal("MISMATCH", "the model no longer has this parameter", tensor=name)
            if new_of.setdefault(old, after[name]) is not after[name]:
                what, tied = "tied parameters are no longer tied", f"one with {names[old][0]}"
                raise refusal("MISMATCH", what, tensor=name, expected=tied)
        if (other := old_of.setdefault(new_of[old], old)) is not old:
            two = f"another parameter than {names[other][0]}"
            what = "two parameters are now one"
            raise refusal("MISMATCH", what, tensor=names[old][0], expected=two)
        for key, value in optimizer.state.get(old, {}).items():
            if not _is_fresh(optimizer.state[old]) and not _fits(value, old, new_of[old]):
                what = f"the state '{key}' has another shape or other placements than the parameter"
                raise refusal("MISMATCH", what, tensor=names[old][0])
    return new_of


def _fits(value: Any, old: nn.Parameter, new: nn.Parameter) -> bool:
    """Whether a value of an optimizer's state fits the new parameter: it is a number or has the
    parameter's shape, placements and mesh, or the parameter was not replaced."""
    if new is old or getattr(value, "ndim", 0) == 0:
        return True
    return all(
        getattr(value, fact, None) == getattr(new, fact, None)
        for fact in ("shape", "placements", "device_mesh")
    )


def parameter_names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """The canonical FQNs of every parameter, in the model's order; a tied one has several. Raises
    `UsageError` if two parameters have one name."""
    owner_of: dict[str, nn.Parameter] = {}
    names: dict[nn.Parameter, list[str]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        name = canonical(fqn)
        if name not in owner_of:
            owner_of[name] = parameter
            names.setdefault(parameter, []).append(name)
        elif owner_of[name] is not parameter:
            raise refusal("UNSUPPORTED", "two parameters have one name", tensor=name)
    return names
