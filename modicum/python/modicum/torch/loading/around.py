"""The account and the budget of the context around a call: `modicum.torch.accelerate.loading` gives
its own to the loads, saves and resumes that a script calls in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from modicum import _modicum
from modicum.torch.loading.planning import Size

_Pair = tuple[_modicum.Ledger | None, Size | None]

_around: ContextVar[_Pair] = ContextVar("modicum_around", default=(None, None))


@contextmanager
def giving(ledger: _modicum.Ledger | None, budget: Size | None) -> Iterator[None]:
    """A context whose calls take `ledger` and `budget`. The innermost context applies."""
    token = _around.set((ledger, budget))
    try:
        yield
    finally:
        _around.reset(token)


def taken(
    ledger: _modicum.Ledger | None, budget: Size | None
) -> tuple[_modicum.Ledger, Size | None]:
    """The arguments `ledger` and `budget` of a call: its own, or those of the context around it. A
    ledger of its own has a limit of its own, so the context's budget does not apply to it."""
    outer_ledger, outer_budget = _around.get()
    if ledger is None and budget is None:
        budget = outer_budget
    return ledger or outer_ledger or _modicum.Ledger(), budget
