"""Model state of sharded training, in little memory."""

from modicum import memory
from modicum._modicum import (
    Checkpoint,
    Layout,
    Ledger,
    Plan,
    Recipe,
    inspect,
    make_layout,
    make_recipe,
    open_checkpoint,
    plan,
    version,
)
from modicum.errors import (
    BudgetError,
    Error,
    FormatError,
    IntegrityError,
    IoError,
    PeerError,
    UsageError,
)
from modicum.walk.calls import Shards, load, make_plan, report
from modicum.walk.report import Report

__all__ = [
    "BudgetError",
    "Checkpoint",
    "Error",
    "FormatError",
    "IntegrityError",
    "IoError",
    "Layout",
    "Ledger",
    "PeerError",
    "Plan",
    "Recipe",
    "Report",
    "Shards",
    "UsageError",
    "inspect",
    "load",
    "make_layout",
    "make_plan",
    "make_recipe",
    "memory",
    "open_checkpoint",
    "plan",
    "report",
]
__version__ = version()
