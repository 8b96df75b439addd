"""Wrappers: the path components that torch's ones insert into FQNs, and accelerate's one around
optimizers."""

from typing import Any

# torch.compile, activation checkpointing, FSDP
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def canonical(fqn: str) -> str:
    """The FQN without components of torch's wrappers."""
    return ".".join(part for part in fqn.split(".") if part not in WRAPPERS)


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside accelerate's wrapper or a subclass of it; anything else unchanged."""
    while hasattr(optimizer, "optimizer") and any(
        cls.__module__.startswith("accelerate.") for cls in type(optimizer).__mro__
    ):
        optimizer = optimizer.optimizer
    return optimizer
