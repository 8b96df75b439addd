"""Reads the texts of a saved checkpoint, which others may have changed."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from modicum import _modicum
from modicum.errors import Error, failure

_ERRORS = (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError)

_TEXT, _ANY = 100_000_000, 1 << 62
"""The most bytes of a text, and of a file of tensors, whose length the record limits."""


def text_in(data: bytes, file: str) -> str:
    """The text of a file's bytes. Raises `IntegrityError` if they are not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise failure("INTEGRITY", "not UTF-8", file=file, got=str(error)) from None


def json_in(data: bytes, file: str) -> Any:
    """As `text_in`; also raises `IntegrityError` if the text is not JSON."""
    text = text_in(data, file)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise failure("INTEGRITY", "not JSON", file=file, got=str(error)) from None


def read_files(checkpoint: Path, names: Iterable[str]) -> dict[str, bytes]:
    """The bytes of files of a checkpoint, by name. Raises `IntegrityError` if a text is too long,
    `IoError` if a file can't be read."""
    files = {}
    for name in names:
        most = _ANY if name.endswith(".safetensors") else _TEXT
        files[name] = _modicum.read_file(checkpoint / name, most_bytes=most)
    return files


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
