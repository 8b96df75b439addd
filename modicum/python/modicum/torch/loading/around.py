"""The context around a call: `modicum.torch.accelerate.loading` gives its ledger and its budget to
the loads, saves and resumes that a script calls in it, and is told which models have been loaded.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import nn

from modicum import _modicum
from modicum.options import require_ledger
from modicum.torch.loading.planning import Size

_Context = tuple[_modicum.Ledger | None, Size | None, Callable[[nn.Module], None] | None]
"""The arguments of `giving`."""
_around: ContextVar[_Context] = ContextVar("modicum_around", default=(None, None, None))


@contextmanager
def giving(
    ledger: _modicum.Ledger | None,
    budget: Size | None,
    loaded: Callable[[nn.Module], None] | None = None,
) -> Iterator[None]:
    """A context whose calls take `ledger` and `budget`. Calls `loaded` with each model after its
    load. The innermost context applies."""
    token = _around.set((ledger, budget, loaded))
    try:
        yield
    finally:
        _around.reset(token)


def taken(
    ledger: _modicum.Ledger | None, budget: Size | None
) -> tuple[_modicum.Ledger, Size | None]:
    """The arguments `ledger` and `budget` of a call: its own, or those of the context around it. A
    ledger of its own has a limit of its own, so the context's budget does not apply to it."""
    outer_ledger, outer_budget, _ = _around.get()
    if ledger is None and budget is None:
        budget = outer_budget
    return require_ledger(ledger) or outer_ledger or _modicum.Ledger(), budget


def note_loaded(model: nn.Module) -> None:
    """Tells the context around the call that a model was loaded."""
    _, _, loaded = _around.get()
    if loaded is not None:
        loaded(model)
