"""A program's own values in a step (a saved checkpoint directory): `extra` is JSON, the same on all
ranks; `extra_per_rank` is JSON with small tensors in it. Each rank's `extra_per_rank` is one
safetensors file: its metadata has the JSON, in which `{"__tensor__": NAME}` refers to a tensor.
"""

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from modicum.errors import failure, refusal
from modicum.torch.saving.texts import json_in
from modicum.torch.shards.tensors import as_bytes

FOLDER = "extra"
COMMON = f"{FOLDER}/extra.json"
_RANK = f"{FOLDER}/rank-"
LARGEST_HEADER = 100_000_000
"""Bytes of the longest header of a safetensors file that can be read."""
_TENSOR = "__tensor__"
# Complex dtypes and 8-bit floats are refused.
_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def file_of(rank: int) -> str:
    """The path of a rank's file in the step."""
    return f"{_RANK}{rank:05}.safetensors"


def text_of(extra: Any) -> str:
    """The JSON of `extra=`, a dict that a JSON round trip keeps; else raises `UsageError`."""
    expected = "a dict that a JSON round trip keeps"
    try:
        text = json.dumps(extra, sort_keys=True, allow_nan=True)
        again = json.loads(text)
    except (TypeError, ValueError) as error:
        raise refusal("USAGE", "extra: not JSON", expected=expected, got=str(error)) from None
    if not isinstance(extra, Mapping) or again != extra:
        raise refusal("USAGE", "extra", expected=expected, got=_changed(extra, again))
    return text


def _changed(extra: Any, again: Any) -> str:
    """The type of `extra` if it is no dict; else its first item that a JSON round trip changes."""
    if not isinstance(extra, Mapping):
        return type(extra).__name__
    key = next(key for key in extra if key not in again or again[key] != extra[key])
    return f"{key!r}: {extra[key]!r}"[:200]


def bytes_of(own: Any) -> bytes:
    """The safetensors file of one rank's `extra_per_rank=`. Raises `UsageError` for values that
    are neither JSON nor tensors, and for more JSON than `read` would take."""
    tensors: list[torch.Tensor] = []

    def told(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(_plain(value))
            return {_TENSOR: str(len(tensors) - 1)}
        if isinstance(value, Mapping):
            if _TENSOR in value:
                raise refusal("USAGE", f"extra_per_rank: the key {_TENSOR!r} is reserved")
            if not all(isinstance(key, str) for key in value):
                raise refusal("USAGE", "extra_per_rank", expected="str keys", got=repr([*value]))
            return {key: told(of) for key, of in value.items()}
        return [told(of) for of in value] if isinstance(value, (list, tuple)) else value

    document = told(own)  # outside of `try`: a refusal is a ValueError, too
    try:
        text = json.dumps(document)
    except (TypeError, ValueError) as error:
        expected = "JSON values and tensors"
        raise refusal("USAGE", "extra_per_rank", expected=expected, got=str(error)) from None
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


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is not torch.Tensor or tensor.dtype not in _NAMES:
        got = f"{type(tensor).__name__} of {tensor.dtype}"
        expected = f"a torch.Tensor, no subclass, of {', '.join(_DTYPES)}"
        raise refusal("UNSUPPORTED", "extra_per_rank", expected=expected, got=got)
    return tensor.detach().cpu().contiguous()


def write(path: Path, data: bytes) -> None:
    """Writes and syncs a new file. Publishing the step syncs its directory entry."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read(data: bytes) -> Any:
    """The value given to `bytes_of`, with lists in place of tuples. `data`: the bytes of its
    file."""
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])

    def made(value: Any) -> Any:
        if isinstance(value, dict):
            name = value.get(_TENSOR)
            return _tensor_of(header[name], data, begin) if name else _each(value)
        return [made(of) for of in value] if isinstance(value, list) else value

    def _each(value: dict[str, Any]) -> dict[str, Any]:
        return {key: made(of) for key, of in value.items()}

    return made(json.loads(header["__metadata__"]["extra"]))


def _tensor_of(entry: dict[str, Any], data: bytes, begin: int) -> torch.Tensor:
    dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
    if prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    first, last = (begin + offset for offset in entry["data_offsets"])
    return torch.frombuffer(bytearray(data[first:last]), dtype=dtype).reshape(shape)


def names_for(step: Path, saved_by: int, rank: int, ranks: int) -> list[str]:
    """The names of the files with the values that a rank gets.

    Args:
        saved_by: the number of ranks that saved the step. If it equals `ranks`, only this rank's
            `extra_per_rank` is read, otherwise that of all ranks.
    """
    names = [COMMON] if (step / COMMON).exists() else []
    if (step / file_of(0)).exists():
        names += [file_of(rank)] if ranks == saved_by else map(file_of, range(saved_by))
    return names


def values_of(files: Mapping[str, bytes], saved_by: int, ranks: int) -> tuple[Any, Any]:
    """`extra` and `extra_per_rank` in the files of `names_for`; None for one that was not saved.
    `extra_per_rank` is a list unless `saved_by` equals `ranks`. Raises `IntegrityError` for a file
    that `bytes_of` did not make."""
    extra = json_in(files[COMMON], COMMON) if COMMON in files else None
    own = [_read(data, name) for name, data in files.items() if name.startswith(_RANK)]
    if not own:
        return extra, None
    return extra, own[0] if ranks == saved_by else own


def _read(data: bytes, name: str) -> Any:
    try:
        return read(data)
    except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
        what = "not a file of extra_per_rank"
        raise failure("INTEGRITY", what, file=name, got=str(error)) from None
