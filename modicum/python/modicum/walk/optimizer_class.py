"""The name of an optimizer's class in the state.json of a saved checkpoint."""

NO_CLASS = "torch"
"""In place of a class that the writer does not know."""


def class_text(name: str | None) -> str:
    """The name for the class `name` of torch.optim, or of the program; None: unknown."""
    return NO_CLASS if name is None else f"torch.{name}"
