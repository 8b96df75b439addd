"""Names of parameters as a checkpoint knows them."""

from torch import nn

from modicum.errors import refusal
from modicum.upstream.wrappers import canonical

__all__ = ["parameter_names"]


def parameter_names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Every parameter with its canonical FQNs in the model's order: a tied one has several.

    A parameter is a key by its identity. `UsageError` where two parameters have one name.
    """
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
