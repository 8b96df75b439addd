"""Reads the texts of a step (a saved checkpoint directory), which others may have changed."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from modicum import _modicum
from modicum.errors import failure

_ANY = 1 << 62
"""A limit of bytes for files whose length the record limits already."""


def read_text(path: Path) -> str:
    """Raises `IntegrityError` if the file is too long or is not UTF-8, `IoError` if it can't be
    read."""
    return text_in(_modicum.read_file(path), path.name)


def read_json(path: Path) -> Any:
    """As `read_text`; also raises `IntegrityError` if the text is not JSON."""
    return json_in(_modicum.read_file(path), path.name)


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


def read_files(step: Path, names: Iterable[str]) -> dict[str, bytes]:
    """The bytes of files of a step, by name. Raises the errors of `read_text`."""
    return {
        name: _modicum.read_file(step / name, most_bytes=_ANY)
        if name.endswith(".safetensors")
        else _modicum.read_file(step / name)
        for name in names
    }
