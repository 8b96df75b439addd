"""A program's own values in a saved checkpoint, in the JSON form of values.py:
`extra` is the same on all ranks; each rank's `extra_per_rank` is one safetensors file, whose
metadata has the JSON, in which `{"__tensor__": NAME}` refers to a tensor of the file.
"""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from modicum import _modicum
from modicum.errors import refusal
from modicum.torch.saving.texts import as_damage, json_in
from modicum.torch.saving.values import DTYPES, decode, encode
from modicum.torch.shards.tensors import as_bytes

FOLDER = "extra"
COMMON = f"{FOLDER}/extra.json"
_RANK = f"{FOLDER}/rank-"
LARGEST_HEADER = 100_000_000
"""Bytes of the longest header of a safetensors file that can be read."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def file_of(rank: int) -> str:
    """The path of a rank's file in the checkpoint."""
    return f"{_RANK}{rank:05}.safetensors"


def text_of(extra: Any) -> str:
    """The text of extra.json. Raises `UsageError` unless `extra` is a dict of values that can be
    stored."""
    if not isinstance(extra, dict):
        raise refusal("USAGE", "extra", expected="a dict", got=type(extra).__name__)
    return json.dumps(encode(extra, "extra"), sort_keys=True)


def common_of(document: Any) -> Any:
    """The value given to `text_of`. `document`: of an extra.json."""
    return decode(document, COMMON)


def bytes_of(value: Any) -> bytes:
    """The safetensors file of one rank's `extra_per_rank=`. Raises `UsageError` for values that
    can't be stored, and for more JSON than `read` would take."""
    tensors: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> str:
        tensors.append(tensor)
        return str(len(tensors) - 1)

    text = json.dumps(encode(value, "extra_per_rank", keep))
    header: dict[str, Any] = {"__metadata__": {"extra": text}}
    at = 0
    for name, tensor in enumerate(tensors):
        entry = {"dtype": _NAMES[tensor.dtype], "shape": [*tensor.shape]}
        header[str(name)] = entry | {"data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    if len(head) > LARGEST_HEADER:
        expected, got = f"at most {LARGEST_HEADER} bytes", f"{len(head)} bytes"
        what = "extra_per_rank: too much JSON for a file's header; give large values as tensors"
        raise refusal("USAGE", what, expected=expected, got=got)
    data = b"".join(as_bytes(tensor).numpy().tobytes() for tensor in tensors)
    return len(head).to_bytes(8, "little") + head + data


def write(path: Path, data: bytes) -> None:
    """Writes and syncs a new file. Publishing the checkpoint syncs its directory entry."""
    _modicum.write_file(path, data)


def read(data: bytes, file: str) -> Any:
    """The value given to `bytes_of`. Raises `IntegrityError`, which names `file`, for bytes that it
    does not write."""
    begin = 8 + int.from_bytes(data[:8], "little")
    with as_damage(file):
        header = json.loads(data[8:begin])
        document = json.loads(header["__metadata__"]["extra"])
    return decode(document, file, lambda name: _tensor_of(header[name], data, begin))


def _tensor_of(entry: dict[str, Any], data: bytes, begin: int) -> torch.Tensor:
    dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
    if prod(shape) == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    first, last = (begin + offset for offset in entry["data_offsets"])
    return torch.frombuffer(bytearray(data[first:last]), dtype=dtype).reshape(shape)


def names_for(checkpoint: Path, saved_by: int, rank: int, ranks: int) -> list[str]:
    """The names of the files with the values that a rank gets.

    Args:
        saved_by: the number of ranks that saved the checkpoint. If it equals `ranks`, only this
            rank's `extra_per_rank` is read, otherwise that of all ranks.
    """
    names = [COMMON] if (checkpoint / COMMON).exists() else []
    if (checkpoint / file_of(0)).exists():
        names += [file_of(rank)] if ranks == saved_by else map(file_of, range(saved_by))
    return names


def values_of(files: Mapping[str, bytes], saved_by: int, ranks: int) -> tuple[Any, Any]:
    """`extra` and `extra_per_rank` in the files of `names_for`; None for one that was not saved.
    `extra_per_rank` is a list unless `saved_by` equals `ranks`. Raises `IntegrityError` for a file
    that `text_of` or `bytes_of` did not make."""
    extra = common_of(json_in(files[COMMON], COMMON)) if COMMON in files else None
    by_rank = [read(data, name) for name, data in files.items() if name.startswith(_RANK)]
    if not by_rank:
        return extra, None
    return extra, by_rank[0] if ranks == saved_by else by_rank
