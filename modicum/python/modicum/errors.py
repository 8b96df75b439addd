"""The errors of Modicum: one base class, a class per kind, the facts as attributes."""

import json
from typing import Any

from modicum._modicum import exit_codes


class Error(Exception):
    """The base of Modicum's own errors. `str()` is the category and the message, one line; the
    attributes are the fields that the command line prints under `error` with `--json`. An attribute
    is None if it is unknown or does not apply."""

    category: str = "INTERNAL"
    """One of a closed list: `FORMAT.TRUNC`, `INDEX.PATH`, `BUDGET`, ..."""
    code: int = 70
    """The exit code of the command line for this category."""
    file: str | None = None
    """Base name of the file; of a saved checkpoint or a run, the path in it."""
    tensor: str | None = None
    """Name of the stored tensor or of the parameter."""
    offset: int | None = None
    """Byte offset in the file."""
    rank: int | None = None
    """The rank that reported the failure."""
    culprit_rank: int | None = None
    """The rank that caused the failure."""
    culprit_pid: int | None = None
    """The process that caused the failure."""
    expected: str | int | None = None
    """The expected value; for BUDGET the allowed bytes."""
    got: str | int | None = None
    """The value found; for BUDGET the needed bytes."""
    shortfall_bytes: int | None = None
    """For BUDGET: `got` - `expected`, on the node with the largest difference."""
    owners: list[dict[str, str | int]] | None = None
    """For BUDGET: needed bytes by purpose, as `{"purpose": ..., "bytes": ...}`, largest first."""
    document: dict[str, Any] | None = None
    """What the verb has printed besides the error; of `verify`, the results of all files."""

    @property
    def facts(self) -> dict[str, Any]:
        """The attributes from `file` to `owners` that are not None, by name."""
        return {name: value for name in _FACTS if (value := getattr(self, name)) is not None}


_FACTS = [name for name in Error.__annotations__ if name not in ("category", "code", "document")]


class FormatError(Error, ValueError):
    """A file or an index violates the safetensors format."""


class IntegrityError(Error, ValueError):
    """Data differs from the data that was written, or is incomplete."""


class BudgetError(Error, MemoryError):
    """More memory is needed than the budget allows or the host has."""


class IoError(Error, OSError):
    """A file can't be opened, read or written; or CONFLICT: a path exists already, or ranks have
    different inputs."""


class PeerError(Error, RuntimeError):
    """Another rank failed or stopped responding."""


class PreemptedError(Error, RuntimeError):
    """SIGTERM ended a save that would not have finished in time."""


class UsageError(Error, ValueError):
    """Arguments are invalid, unsupported or inconsistent."""


# The key is the part of the category before its dot; the whole category if it has no dot.
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
    "PREEMPTED": PreemptedError,
    "UNSUPPORTED": UsageError,
    "MISMATCH": UsageError,
    "USAGE": UsageError,
    "INTERNAL": Error,
    "CANCELLED": Error,
}


def is_damage(error: BaseException) -> bool:
    """Whether the files of a checkpoint are damaged or incomplete: FORMAT, INDEX, INTEGRITY or
    UNCOMMITTED. Only such an error lets another checkpoint take its place. Any other one, such as
    IO or UNSUPPORTED, says nothing about the files."""
    return isinstance(error, FormatError | IntegrityError)


def from_json(document: str) -> Error:
    """The error that `document` describes: `{"error": {...}}`, as the command line prints it."""
    facts = json.loads(document)["error"]
    message = facts.pop("message")
    error = _CLASSES[facts["category"].split(".")[0]](message)
    vars(error).update(facts)
    return error


def as_document(error: Error) -> str:
    """The document of an error, from which `from_json` makes it again."""
    known = {name: fact for name, fact in vars(error).items() if name in Error.__annotations__}
    known.pop("document", None)
    fields = {"category": error.category, "code": error.code, "message": str(error)}
    return json.dumps({"error": fields | known})


def failure(category: str, what: str, **facts: str | None) -> Error:
    """An error of any category. Its message has the same form as those from C++:
    `CATEGORY: what (tensor ..., expected ..., got ...)`."""
    known = {name: text for name, text in facts.items() if text}
    details = ", ".join(f"{name} {text}" for name, text in known.items())
    error = _CLASSES[category.split(".")[0]](
        f"{category}: {what}" + (f" ({details})" if details else "")
    )
    vars(error).update(known, category=category, code=exit_codes()[category])
    return error


def refusal(category: str, what: str, **facts: str) -> UsageError:
    """An error of category `UNSUPPORTED`, `MISMATCH` or `USAGE`; see `failure`."""
    error = failure(category, what, **facts)
    assert isinstance(error, UsageError), category
    return error


def counted(count: int, noun: str, *, verb: bool = False) -> str:
    """`1 tensor` or `2 tensors`; with `verb`: `1 tensor is` or `2 tensors are`."""
    text = f"{count} {noun}" + ("" if count == 1 else "es" if noun.endswith("s") else "s")
    return f"{text} {'is' if count == 1 else 'are'}" if verb else text
