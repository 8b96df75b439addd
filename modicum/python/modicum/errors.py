"""The errors of Modicum: one base, a class per kind, and what is known as attributes."""

import json

from modicum._modicum import exit_codes


class Error(Exception):
    """Whatever Modicum refuses or fails at. `str()` is one line that says it all; the attributes
    are what the command line prints under `error` with `--json`. None: not known, or not
    applicable."""

    category: str = "INTERNAL"
    """From a closed list: `FORMAT.TRUNC`, `INDEX.PATH`, `BUDGET`, ..."""
    code: int = 70
    """The exit code of the command line for this category."""
    file: str | None = None
    """Base name of the file."""
    tensor: str | None = None
    """Name of the tensor, as stored."""
    offset: int | None = None
    """Byte offset in the file."""
    rank: int | None = None
    """The rank that met the failure."""
    culprit_rank: int | None = None
    """The rank that caused it."""
    culprit_pid: int | None = None
    """The process that caused it."""
    expected: str | int | None = None
    """What should have been there; over budget: the bytes that are allowed."""
    got: str | int | None = None
    """What was there instead; over budget: the bytes that are needed."""
    shortfall_bytes: int | None = None
    """Over budget: `got` less `expected`, per node, of the worst node."""
    owners: list[dict[str, str | int]] | None = None
    """Over budget: who needs it, as `{"purpose": ..., "bytes": ...}`, largest first."""


class FormatError(Error, ValueError):
    """A file or an index is not what the safetensors format allows."""


class IntegrityError(Error, ValueError):
    """The bytes are not those that were written, or not all of them are there."""


class BudgetError(Error, MemoryError):
    """It does not fit the memory that is allowed or there."""


class IoError(Error, OSError):
    """The system would not open, read or write a file, or something else is in its place."""


class PeerError(Error, RuntimeError):
    """Another rank failed, or has stopped."""


class UsageError(Error, ValueError):
    """What was asked for makes no sense, is not supported, or does not go together."""


# By the category's first word.
_CLASSES: dict[str, type[Error]] = {
    "FORMAT": FormatError,
    "INDEX": FormatError,
    "INTEGRITY": IntegrityError,
    "IO": IoError,
    "NOSPACE": IoError,
    "BUDGET": BudgetError,
    "NOMEM": BudgetError,
    "PEER": PeerError,
    "STALL": PeerError,
    "UNCOMMITTED": IntegrityError,
    "CONFLICT": IoError,
    "PREEMPTED": Error,
    "UNSUPPORTED": UsageError,
    "MISMATCH": UsageError,
    "USAGE": UsageError,
    "INTERNAL": Error,
    "CANCELLED": Error,
}


def from_json(document: str) -> Error:
    """The error that `document`, `{"error": {...}}` as the command line prints it, is about."""
    facts = json.loads(document)["error"]
    message = facts.pop("message")
    error = _CLASSES[facts["category"].split(".")[0]](message)
    vars(error).update(facts)
    return error


def refusal(category: str, what: str, **facts: str) -> UsageError:
    """The error of category `UNSUPPORTED`, `MISMATCH` or `USAGE` about `tensor`, with what was
    `expected` and what there is (`got`), in the words that the library would use."""
    known = {name: text for name, text in facts.items() if text}
    told = ", ".join(f"{name} {text}" for name, text in known.items())
    error = UsageError(f"{category}: {what}" + (f" ({told})" if told else ""))
    vars(error).update(known, category=category, code=exit_codes()[category])
    return error
