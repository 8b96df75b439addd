"""Reads the texts of a step (a saved checkpoint directory), which others may have changed."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from modicum import _modicum
from modicum.errors import Error, failure

_ERRORS = (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError)


def read_text(path: Path) -> str:
    """Raises `IntegrityError` if the file is too long or is not UTF-8, `IoError` if it can't be
    read."""
    data = _modicum.read_file(path)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise failure("INTEGRITY", "not UTF-8", file=path.name, got=str(error)) from None


def read_json(path: Path) -> Any:
    """As `read_text`; also raises `IntegrityError` if the text is not JSON."""
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise failure("INTEGRITY", "not JSON", file=path.name, got=str(error)) from None


@contextmanager
def as_damage(file: str) -> Iterator[None]:
    """A context that reads values of unknown types and sizes from the text `file`: Python's errors
    become `IntegrityError`."""
    try:
        yield
    except Error:
        raise
    except _ERRORS as error:
        got = f"{type(error).__name__}: {error}"[:200]
        raise failure("INTEGRITY", "not what Modicum writes", file=file, got=got) from None
