"""The names that torch's wrappers put between a module and its parameters."""

# torch.compile, activation checkpointing, FSDP
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def canonical(fqn: str) -> str:
    """The FQN without the parts that torch's wrappers have put into it."""
    return ".".join(part for part in fqn.split(".") if part not in WRAPPERS)
