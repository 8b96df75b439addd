"""`Loading`: what a script of accelerate or Trainer sees of its `loading` context."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from modicum.torch.accelerate.unfilled import BuiltModel
from modicum.torch.saving.report import SaveReport
from modicum.walk.load_report import LoadReport

Models = weakref.WeakKeyDictionary[nn.Module, BuiltModel | None]
"""The models that were built in open contexts; None: one that is left to transformers and
accelerate."""


@dataclass(eq=False)
class Loading:
    """The loads of one `loading` context."""

    _source: Path | None
    _arguments: dict[str, Any]
    _models: Models = field(repr=False)
    _fill: Callable[[nn.Module], None] = field(repr=False)
    reports: list[LoadReport] = field(default_factory=list)
    """The report of each load by `prepare`, `load_state`, Trainer or `fill`, in order. Calls of
    `modicum.torch.load` and `resume` return theirs."""
    saves: list[SaveReport] = field(default_factory=list)
    """The report of each model saved by accelerate or Trainer, in order; a checkpoint may have
    several. Calls of `modicum.torch.save` return theirs."""
    _is_exempt: bool = field(default=False, repr=False)

    @property
    def report(self) -> LoadReport | None:
        """The report of the last load; None before the first one."""
        return self.reports[-1] if self.reports else None

    def fill(self, model: nn.Module) -> None:
        """Loads a model that was built in the context and is not passed to `Accelerator.prepare`,
        with its present sharding. Does nothing if the model has values. The budget does not
        include an optimizer's state; that of `modicum.torch.load(optimizer=)` does. Collective.

        Raises:
            UsageError: several models in `model` were built without values.
            BudgetError, FormatError, IntegrityError, IoError, PeerError: as for
                `modicum.torch.load`.
        """
        self._fill(model)

    def unfilled(self) -> list[nn.Module]:
        """The models that were built in the context and have no values yet."""
        return [
            model
            for model, built in self._models.items()
            if built is not None and built.loading is self and not built.filled
        ]

    @contextmanager
    def exempt(self, *models: nn.Module) -> Iterator[None]:
        """A context that leaves `models`, and all models built in it, to transformers and
        accelerate: each rank reads and holds them as without Modicum. Not collective.

        Args:
            models: models that were built before the context.
        """
        for model in models:
            self._models.setdefault(model, None)
        before, self._is_exempt = self._is_exempt, True
        try:
            yield
        finally:
            self._is_exempt = before
