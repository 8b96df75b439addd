"""Model state of sharded training, in little memory."""

from modicum._modicum import inspect, plan, version
from modicum.errors import (
    BudgetError,
    Error,
    FormatError,
    IntegrityError,
    IoError,
    PeerError,
    UsageError,
)

__all__ = [
    "BudgetError",
    "Error",
    "FormatError",
    "IntegrityError",
    "IoError",
    "PeerError",
    "UsageError",
    "inspect",
    "plan",
]
__version__ = version()
