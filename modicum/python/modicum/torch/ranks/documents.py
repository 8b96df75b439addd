"""Errors as the JSON documents that ranks send to each other. They have the form that the command
line prints with `--json`."""

import json
from typing import Any

from modicum._modicum import exit_codes
from modicum.errors import Error, as_document


def document_with(category: str, what: str, **facts: Any) -> str:
    """The document of an error. `facts`: further fields; `expected` and `got` also become a part of
    the message."""
    details = ", ".join(f"{name} {facts[name]}" for name in ("expected", "got") if name in facts)
    message = f"{category}: {what}" + (f" ({details})" if details else "")
    fields = {"category": category, "code": exit_codes()[category], "message": message}
    return json.dumps({"error": fields | facts})


def document_of(error: BaseException) -> str:
    """The document of any exception. An `Error` keeps its category; Ctrl-C is CANCELLED; all other
    exceptions are INTERNAL."""
    if isinstance(error, Error):
        return as_document(error)
    if isinstance(error, KeyboardInterrupt):
        return document_with("CANCELLED", "interrupted")
    return document_with("INTERNAL", f"{type(error).__name__}: {first_line(error)}")


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
