"""The path components that torch's wrappers insert into FQNs."""

# torch.compile, activation checkpointing, FSDP
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def canonical(fqn: str) -> str:
    """The FQN without components of torch's wrappers."""
    return ".".join(part for part in fqn.split(".") if part not in WRAPPERS)
