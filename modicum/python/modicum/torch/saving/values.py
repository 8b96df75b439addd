"""The JSON form of Python values in a saved checkpoint: options of parameter
groups, `extra`, `extra_per_rank`, and the values of torch.distributed.checkpoint. `decode` gives
the values that `encode` got, or `encode` refuses them by name.

    null, true, 3, 0.5, NaN, Infinity, "text", [...], {"key": ...}      as in Python's json
    {"__tuple__": [...]}
    {"__dict__": [[KEY, VALUE], ...]}       keys other than strings, or one of these tags
    {"__counter__": [[KEY, COUNT], ...]}    collections.Counter
    {"__bytes__": BASE64}
    {"__dtype__": "float32"}                a torch.dtype
    {"__tensor__": {"dtype": "uint8", "shape": [16], "data": BASE64}}
    {"__tensor__": NAME}                    a tensor of the file that has the JSON in its metadata
    {"__array__": {"dtype": "<u4", "shape": [624], "data": BASE64}}     numpy.ndarray

A scalar of numpy becomes a number, an OrderedDict a dict, and a torch.Size a tuple.
"""

import base64
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from math import prod
from typing import Any

import torch

from modicum.errors import UsageError, refusal
from modicum.torch.saving.texts import as_damage
from modicum.torch.shards.tensors import as_bytes

# Complex dtypes and 8-bit floats are refused.
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
"""The dtypes of tensors, by name in safetensors."""
LARGEST_BYTES = 64 << 10
"""The size of the largest tensor or array in JSON."""
_LEVELS = 100
_INTEGER_BITS = 4096  # Python reads integers of 4300 digits
_DIMS = 64
_TUPLE, _DICT, _COUNTER, _BYTES = "__tuple__", "__dict__", "__counter__", "__bytes__"
_DTYPE, _TENSOR, _ARRAY = "__dtype__", "__tensor__", "__array__"
_TAGS = frozenset((_TUPLE, _DICT, _COUNTER, _BYTES, _DTYPE, _TENSOR, _ARRAY))
_ARRAY_DTYPES = re.compile(r"\|b1|[<>|][iu]1|[<>](?:[iu][248]|f[248]|c8|c16)")
_EXPECTED = "None, numbers, texts, bytes, dtypes, lists, tuples, dicts, tensors and numpy's arrays"

Place = tuple[Any, ...]
"""The name of the whole value, then keys and indices down to a part of it."""
Keep = Callable[[torch.Tensor], str]
"""Keeps a tensor in the file that will have the JSON, and returns its name there."""


def encode(value: Any, name: str, keep: Keep | None = None) -> Any:
    """The JSON form of a value. Raises `UsageError` for what `decode` would not give back. `name`:
    what the error calls the value. `keep`: takes the tensors, of any size; None: they are in the
    JSON."""
    return _encoded(value, (name,), keep)


def is_scalar(value: Any) -> bool:
    """Whether JSON has the value: None, or a bool, number or text that is no enum."""
    is_known = value is None or isinstance(value, (bool, int, float, str))
    return is_known and not isinstance(value, Enum)


def plain(value: Any) -> Any:
    """A scalar of numpy as a Python number; other values unchanged."""
    numpy = sys.modules.get("numpy")
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def _encoded(value: Any, at: Place, keep: Keep | None) -> Any:
    value = plain(value)
    if is_scalar(value):
        if isinstance(value, int) and value.bit_length() > _INTEGER_BITS:
            raise _refused(at, f"at most {_INTEGER_BITS} bits", f"{value.bit_length()} bits")
        return value
    if len(at) > _LEVELS:
        raise _refused(at, f"at most {_LEVELS} levels", "more")
    if isinstance(value, list) or type(value) in (tuple, torch.Size):
        items = [_encoded(item, (*at, index), keep) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    if isinstance(value, dict):
        return _encoded_dict(value, at, keep)
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {_DTYPE: str(value).removeprefix("torch.")}
    if isinstance(value, torch.Tensor):
        return {_TENSOR: _encoded_tensor(value, at, keep)}
    numpy = sys.modules.get("numpy")
    if numpy is not None and type(value) is numpy.ndarray:
        if not _ARRAY_DTYPES.fullmatch(value.dtype.str):
            expected = "an array of bools, integers, floats or complex numbers"
            raise _refused(at, expected, f"dtype {value.dtype}")
        _require_small(value.nbytes, at)
        return {_ARRAY: _with_data(value.dtype.str, value.shape, value.tobytes())}
    raise _refused(at, _EXPECTED, type(value).__name__)


def _encoded_dict(value: Mapping[Any, Any], at: Place, keep: Keep | None) -> dict[str, Any]:
    for key in value:
        if not is_scalar(plain(key)):
            expected, got = "keys that are texts or numbers", f"the key {key!r}"[:200]
            raise _refused(at, expected, got)
    items = [(plain(key), _encoded(item, (*at, key), keep)) for key, item in value.items()]
    is_object = all(isinstance(key, str) and key not in _TAGS for key, _ in items)
    if is_object and not isinstance(value, Counter):
        return dict(items)
    # In one order on all ranks, which compare texts.
    pairs = sorted(([key, item] for key, item in items), key=lambda pair: json.dumps(pair[0]))
    return {_COUNTER if isinstance(value, Counter) else _DICT: pairs}


def _encoded_tensor(tensor: torch.Tensor, at: Place, keep: Keep | None) -> Any:
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    if not is_plain or tensor.is_meta or tensor.dtype not in DTYPES.values():
        got = f"{type(tensor).__name__} of {tensor.dtype} on {tensor.device}"
        expected = f"a dense torch.Tensor, no subclass, of {', '.join(DTYPES)}, not on meta"
        raise _refused(at, expected, got)
    dense = tensor.detach().cpu().contiguous()
    if keep is not None:
        return keep(dense)
    _require_small(dense.nbytes, at)
    data = as_bytes(dense).numpy().tobytes()
    return _with_data(str(dense.dtype).removeprefix("torch."), dense.shape, data)


def _with_data(dtype: str, shape: Sequence[int], data: bytes) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [*shape], "data": base64.b64encode(data).decode()}


def _require_small(nbytes: int, at: Place) -> None:
    if nbytes > LARGEST_BYTES:
        expected = f"at most {LARGEST_BYTES} bytes, or a tensor in extra_per_rank"
        raise _refused(at, expected, f"{nbytes} bytes")


def _refused(at: Place, expected: str, got: str) -> UsageError:
    name, *keys = at
    place = name + "".join(f"[{key!r}]" for key in keys)
    place = place if len(place) <= 200 else f"{place[:200]}..."
    return refusal("UNSUPPORTED", f"{place} can't be saved", expected=expected, got=got)


# ---- decoding

TensorOf = Callable[[str], torch.Tensor]
"""Returns the tensor that `Keep` has kept under a name."""


def decode(value: Any, file: str, tensor_of: TensorOf | None = None) -> Any:
    """The value whose JSON form is `value`. Raises `IntegrityError`, which names `file`, for what
    `encode` does not write. `tensor_of`: None if it got no `keep`."""
    with as_damage(file):
        return _decoded(value, 0, tensor_of)


def _decoded(value: Any, level: int, tensor_of: TensorOf | None) -> Any:
    if not isinstance(value, (list, dict)):
        return value
    if level > _LEVELS:
        raise ValueError(f"more than {_LEVELS} levels")
    if isinstance(value, list):
        return [_decoded(item, level + 1, tensor_of) for item in value]
    (tag,) = value if len(value) == 1 else ("",)
    body = value.get(tag)
    if tag == _TUPLE:
        return tuple(_decoded(_list(body), level, tensor_of))
    if tag in (_DICT, _COUNTER):
        pairs = {_key(key): _decoded(item, level + 1, tensor_of) for key, item in _list(body)}
        return Counter(pairs) if tag == _COUNTER else pairs
    if tag == _TENSOR and isinstance(body, str) and tensor_of is not None:
        return tensor_of(body)
    if tag in _READERS:
        return _READERS[tag](body)
    return {key: _decoded(item, level + 1, tensor_of) for key, item in value.items()}


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list, got {type(value).__name__}")
    return value


def _key(value: Any) -> Any:
    if not is_scalar(value):
        raise ValueError(f"the key of a dict is a {type(value).__name__}")
    return value


def dtype_named(name: str) -> torch.dtype:
    """Raises `ValueError` if torch has no such dtype."""
    dtype = vars(torch).get(name)  # `getattr` imports modules
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype of torch: {name!r}"[:100])
    return dtype


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _data_of(body: Mapping[str, Any], item_bytes: int) -> tuple[bytearray, list[int]]:
    """The bytes and the shape of a tensor or an array. Raises `ValueError` unless they fit."""
    data, shape = bytearray(_bytes(body["data"])), _list(body["shape"])
    is_shape = len(shape) <= _DIMS and all(type(n) is int and n >= 0 for n in shape)
    if not is_shape or prod(shape) * item_bytes != len(data):
        raise ValueError(f"{len(data)} bytes do not have the shape {shape}"[:200])
    return data, shape


def _tensor(body: Mapping[str, Any]) -> torch.Tensor:
    dtype = dtype_named(body["dtype"])
    if dtype not in DTYPES.values():
        raise ValueError(f"a tensor of {dtype}")
    data, shape = _data_of(body, dtype.itemsize)
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=dtype).reshape(shape)


def _array(body: Mapping[str, Any]) -> Any:
    import numpy  # torch works without it

    if not _ARRAY_DTYPES.fullmatch(body["dtype"]):
        raise ValueError(f"no dtype of an array: {body['dtype']!r}"[:100])
    dtype = numpy.dtype(body["dtype"])
    data, shape = _data_of(body, dtype.itemsize)
    return numpy.frombuffer(data, dtype).reshape(shape)


_READERS: dict[str, Callable[[Any], Any]] = {
    _BYTES: _bytes, _DTYPE: dtype_named, _TENSOR: _tensor, _ARRAY: _array,
}  # fmt: skip
