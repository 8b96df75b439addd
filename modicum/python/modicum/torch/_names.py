"""Names of parameters as a checkpoint knows them."""

from torch import nn

from modicum.errors import refusal

__all__ = ["canonical", "parameter_names"]

# What torch.compile, activation checkpointing and FSDP1 put into the path of what they wrap.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def canonical(fqn: str) -> str:
    """The FQN without the parts that torch's wrappers have put into it."""
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPERS)


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
