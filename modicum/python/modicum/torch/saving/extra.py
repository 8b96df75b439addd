"""What a program saves with a step: JSON that all ranks have in common, and of each rank JSON with
small tensors in it, as a safetensors file whose metadata are the JSON."""

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from modicum import _modicum
from modicum.errors import refusal
from modicum.torch.shards.tensors import as_bytes

FOLDER = "extra"
COMMON = f"{FOLDER}/extra.json"
_TENSOR = "__tensor__"
_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def file_of(rank: int) -> str:
    """Its name in the step."""
    return f"{FOLDER}/rank-{rank:05}.safetensors"


def text_of(extra: Any) -> str:
    """The JSON of `extra=`; `UsageError` unless it is a dict that JSON gives back as it is."""
    try:
        text = json.dumps(extra, sort_keys=True, allow_nan=True)
        is_same = json.loads(text) == extra
    except (TypeError, ValueError) as error:
        raise refusal("USAGE", "extra is no JSON", got=str(error)) from None
    if not isinstance(extra, Mapping) or not is_same:
        expected = "a dict of JSON values with str keys"
        raise refusal("USAGE", "extra", expected=expected, got=type(extra).__name__)
    return text


def bytes_of(own: Any) -> bytes:
    """The safetensors file of one rank's `extra_per_rank=`."""
    tensors: list[torch.Tensor] = []

    def told(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(_plain(value))
            return {_TENSOR: str(len(tensors) - 1)}
        if isinstance(value, Mapping):
            if _TENSOR in value or not all(isinstance(key, str) for key in value):
                raise refusal("USAGE", "extra_per_rank", expected="str keys", got=repr([*value]))
            return {key: told(of) for key, of in value.items()}
        return [told(of) for of in value] if isinstance(value, (list, tuple)) else value

    try:
        text = json.dumps(told(own))
    except (TypeError, ValueError) as error:
        raise refusal("USAGE", "extra_per_rank", got=str(error)) from None
    header: dict[str, Any] = {"__metadata__": {"extra": text}}
    at = 0
    for name, tensor in enumerate(tensors):
        entry = {"dtype": _NAMES[tensor.dtype], "shape": [*tensor.shape]}
        header[str(name)] = entry | {"data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    data = b"".join(as_bytes(tensor).numpy().tobytes() for tensor in tensors)
    return len(head).to_bytes(8, "little") + head + data


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is not torch.Tensor or tensor.dtype not in _NAMES:
        got = f"{type(tensor).__name__} of {tensor.dtype}"
        raise refusal("UNSUPPORTED", "extra_per_rank", expected="plain tensors", got=got)
    return tensor.detach().cpu().contiguous()


def write(path: Path, data: bytes) -> None:
    """Durable, but for its name in the directory."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> Any:
    """What `bytes_of` was given; tuples are lists. Errors of `open_checkpoint`."""
    _modicum.open_checkpoint(path)  # validates the header
    data = path.read_bytes()
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


def read_all(step: Path, saved_by: int, rank: int, ranks: int) -> tuple[Any, Any]:
    """`extra`, and of `extra_per_rank` this rank's own if `ranks` is the number that saved it, else
    the list of all; None for a part that was not given."""
    common = step / COMMON
    extra = json.loads(common.read_text()) if common.exists() else None
    if not (step / file_of(0)).exists():
        return extra, None
    if ranks == saved_by:
        return extra, read(step / file_of(rank))
    return extra, [read(step / file_of(one)) for one in range(saved_by)]
