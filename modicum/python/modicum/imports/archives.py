"""Zip archives of torch.save: their pickle, and the place of each tensor's elements in the file."""

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from modicum.errors import Error, UsageError, refusal
from modicum.imports.pickles import (
    Global,
    MadeObject,
    StorageReference,
    malformed,
    open_regular,
    read_pickle,
    reading,
)
from modicum.upstream.torch_checkpoint import PICKLED, REBUILD_TENSOR, REBUILD_TYPED, STORAGES

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2,
    "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
_STRUCT_CODES = {"float32": "f", "float64": "d", "int64": "q", "int32": "i"}
# A damaged or hostile file may claim any size, and Python's integers have no limit. These limits
# are far above real sizes.
_MOST_ELEMENTS = 1 << 60
_MOST_DIMS = 64
_MOST_PICKLE_BYTES = 1 << 28
_LOCAL_HEADER_BYTES = 30
_CENTRAL_HEADER_BYTES = 46
_WINDOW_BYTES = 1 << 20
_ZIP_ERRORS = (
    zipfile.BadZipFile, KeyError, ValueError, IndexError, OverflowError, EOFError, RuntimeError,
    struct.error,
)  # fmt: skip
"""What zipfile raises for damaged archives; RuntimeError includes NotImplementedError."""

Shape = tuple[int, ...]


def is_size(value: Any) -> bool:
    """Whether `value` is an integer from 0 to below the limit; a bool is none."""
    return type(value) is int and 0 <= value < _MOST_ELEMENTS


def is_shape(value: Any) -> bool:
    """Whether `value` is a tuple of sizes whose product, without zeros, is below the limit."""
    if not isinstance(value, tuple) or len(value) > _MOST_DIMS or not all(map(is_size, value)):
        return False
    # With zeros the product would be 0 and limit nothing, but strides are products of some sizes.
    return prod(n or 1 for n in value) < _MOST_ELEMENTS


@dataclass(frozen=True, slots=True)
class Record:
    """A member of an archive, stored without compression."""

    path: Path
    name: str
    begin: int
    """Its offset in the file, in bytes."""
    nbytes: int
    crc: int
    """The CRC-32 of its bytes that the archive has recorded."""

    def require_crc(self, crc: int) -> None:
        """Raises `IntegrityError` unless `crc` is the recorded one."""
        if crc != self.crc:
            what = f"the bytes of the record {self.name} differ from its CRC-32"
            malformed(what, self.path.name, "INTEGRITY",
                      expected=f"{self.crc:08x}", got=f"{crc:08x}")  # fmt: skip

    def compare(self, window: memoryview) -> None:
        """Reads the record through `window`. Raises `IntegrityError` unless its bytes have the
        recorded CRC-32, `FormatError` if the file ends before them, `IoError` if it can't be
        read."""
        crc, done = 0, 0
        with reading(self.path):
            file = open_regular(self.path)
            try:
                while done < self.nbytes:
                    view = window[: self.nbytes - done]
                    _read_whole(self.path, file, self.begin + done, view)
                    crc = zlib.crc32(view, crc)
                    done += len(view)
            finally:
                os.close(file)
        self.require_crc(crc)


def compare_records(lines: "Iterable[Line]") -> None:
    """Compares each record of which a line is a part, once, in a window of 1 MiB. Raises the errors
    of `Record.compare`."""
    records = {
        (line.record.path, line.record.begin): line.record
        for line in lines
        if line.record is not None
    }
    window = memoryview(bytearray(_WINDOW_BYTES))
    for _, record in sorted(records.items()):
        record.compare(window)


def _read_whole(path: Path, file: int, begin: int, view: memoryview) -> None:
    """Fills `view` with the bytes of `file` from `begin` on. Raises `FormatError` if it ends before
    them, or OSError."""
    done = 0
    while done < len(view):
        got = os.preadv(file, [view[done:]], begin + done)
        if got == 0:
            what = "the file ends before the elements of a tensor"
            malformed(what, path.name, expected=f"{begin + len(view)} bytes or more",
                      got=f"{begin + done} bytes")  # fmt: skip
        done += got


@dataclass(frozen=True)
class Line:
    """A row-major tensor whose elements lie contiguously in a file."""

    path: Path
    dtype: str
    shape: Shape
    begin: int
    """Offset of the first element in the file, in bytes."""
    record: Record | None = None
    """The record that has the elements; None if it is not known."""

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def read(self, first: int, view: memoryview) -> None:
        """Fills `view` with elements, the first of which has the index `first`. Raises
        `FormatError` if the file ends before them, `IoError` if it can't be read."""
        with reading(self.path):
            file = open_regular(self.path)
            try:
                _read_whole(self.path, file, self.begin + first * self.item_bytes, view)
            finally:
                os.close(file)


def number_of(dtype: str, data: bytes | bytearray) -> float | int:
    """The number in `data`, the little-endian bytes of one element. Raises ValueError unless
    `dtype` is float32, float64, int32 or int64."""
    if dtype not in _STRUCT_CODES:
        raise ValueError(f"numbers of dtype {dtype} are not read")
    number: float | int = struct.unpack(f"<{_STRUCT_CODES[dtype]}", data)[0]
    return number


@dataclass(frozen=True)
class Archive:
    """An archive of torch.save, whose directory and pickle have been read."""

    path: Path
    pickle: bytes
    storages: Mapping[str, Record]
    """The elements of each storage, by the key that the pickle uses."""

    @classmethod
    def open(cls, path: Path, begin: int = 0, length: int | None = None) -> "Archive":
        """Reads the zip directory and the pickle. The archive is at the bytes [begin, begin +
        length) of the file; without `length` it ends with the file. Raises `FormatError`,
        `IntegrityError` if the pickle differs from its CRC-32, or `IoError` if the file can't be
        read."""
        with reading(path), os.fdopen(open_regular(path), "rb") as file:
            rest = os.fstat(file.fileno()).st_size - begin
            size = rest if length is None else length
            if size > rest:
                what, expected = "the file ends before an archive in it", f"{begin + size} bytes"
                malformed(what, path.name, expected=expected, got=f"{begin + rest} bytes")
            try:
                part = _Part(file, begin, size)
                records = _records_of(part, path, begin, size)
                pickle = _small(part, records, "data.pkl", _MOST_PICKLE_BYTES)
                if "byteorder" in records and _small(part, records, "byteorder", 6) != b"little":
                    raise ValueError("its elements are not little-endian")
            except Error:  # also a ValueError
                raise
            except _ZIP_ERRORS as error:
                malformed(f"it is no archive of torch.save: {error}"[:200], path.name)
        storages = {
            name.removeprefix("data/"): record
            for name, record in records.items()
            if name.startswith("data/")
        }
        return cls(path, pickle, storages)

    def value(self, names: frozenset[str] = PICKLED) -> Any:
        """The pickle's value, as `read_pickle` returns it."""
        return read_pickle(self.pickle, self.path.name, names)

    def line(self, value: Any) -> Line:
        """The place of a tensor's elements. `value`: the tensor, as `read_pickle` returns it.
        Raises ValueError if it is no tensor or not within its storage, and `UsageError` if it is
        not row-major."""
        args = _arguments_of(value)
        if (
            not isinstance(args, tuple)
            or len(args) < 4
            or not isinstance(args[0], StorageReference)
        ):
            raise ValueError("the value is no plain tensor")
        stored, offset, sizes, strides = args[:4]
        # The persistent ids of torch.save: ("storage", class, key, location, number of elements).
        is_known = isinstance(stored.id, tuple) and len(stored.id) == 5
        kind, key = stored.id[1:3] if is_known else (None, None)
        dtype = STORAGES.get(kind.name.partition(" ")[2]) if isinstance(kind, Global) else None
        if dtype is None or not isinstance(key, str) or key not in self.storages:
            raise ValueError("the tensor's storage has an unknown class or is not in the archive")
        if not is_size(offset) or not is_shape(sizes):
            raise ValueError("the tensor's offset or shape is invalid")
        if not _are_strides(strides, sizes):
            raise ValueError("the tensor's strides are invalid")
        if not _is_row_major(sizes, strides):
            raise strided(self.path.name, f"strides {[*strides]}")
        record, item_bytes = self.storages[key], ITEM_BYTES[dtype]
        if not is_size(stored.id[4]) or stored.id[4] * item_bytes > record.nbytes:
            raise ValueError("the tensor's storage is longer than its record")
        if offset + prod(sizes) > stored.id[4]:
            raise ValueError("the tensor is longer than its storage")
        return Line(self.path, dtype, sizes, record.begin + offset * item_bytes, record)


def _arguments_of(value: Any) -> Any:
    """The arguments with which torch would rebuild a plain tensor; None for other values."""
    if not isinstance(value, MadeObject):
        return None
    if value.kind == REBUILD_TYPED and len(value.args) == 4:
        # A tensor with attributes, such as DeepSpeed's ds_id.
        function, _, arguments, _ = value.args
        return arguments if function == Global(REBUILD_TENSOR) else None
    return value.args if value.kind == REBUILD_TENSOR else None


def strided(file: str, got: str, **facts: str) -> UsageError:
    what = "a tensor with strides that are not row-major"
    return refusal("UNSUPPORTED", what, file=file, **facts, expected="row-major", got=got)


def _are_strides(value: Any, sizes: Shape) -> bool:
    return isinstance(value, tuple) and len(value) == len(sizes) and all(map(is_size, value))


def _is_row_major(sizes: Shape, strides: Shape) -> bool:
    if prod(sizes) == 0:  # no element depends on the strides
        return True
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _records_of(part: "_Part", path: Path, begin: int, size: int) -> dict[str, Record]:
    """The members of an archive by their names without its folder. `begin`: the archive's offset in
    the file; `size`: its bytes. Raises one of _ZIP_ERRORS."""
    records: dict[str, Record] = {}
    left = size
    for info in zipfile.ZipFile(part).infolist():
        name = info.filename.partition("/")[2]
        if info.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{name!a} is compressed")
        part.seek(info.header_offset)
        local = part.read(_LOCAL_HEADER_BYTES)
        if len(local) != _LOCAL_HEADER_BYTES:
            raise ValueError(f"{name!a} exceeds the archive")
        # The file's name and extra field lie between the local header and the elements. The
        # header's last four bytes are their lengths.
        at = info.header_offset + len(local) + sum(struct.unpack("<HH", local[-4:]))
        # All members together fit into the archive: were bytes shared, they would be read again for
        # each member.
        left -= _LOCAL_HEADER_BYTES + info.file_size + _CENTRAL_HEADER_BYTES
        if at + info.file_size > size or left < 0:
            raise ValueError(f"{name!a} exceeds the archive")
        if name in records:
            raise ValueError(f"it has {name!a} twice")
        records[name] = Record(path, info.filename, begin + at, info.file_size, info.CRC)
    return records


def _small(part: "_Part", records: Mapping[str, Record], name: str, most: int) -> bytes:
    """The bytes of a record that has at most `most`. Raises one of _ZIP_ERRORS, or
    `IntegrityError` if its CRC-32 differs."""
    if name not in records:
        raise ValueError(f"it has no {name}")
    record = records[name]
    if record.nbytes > most:
        raise ValueError(f"{name} is too large")
    part.seek(record.begin - part.begin)
    data = part.read(record.nbytes)
    record.require_crc(zlib.crc32(data))
    return data


class _Part(io.RawIOBase):
    """A range of a file's bytes as a file, for zipfile."""

    def __init__(self, file: Any, begin: int, length: int) -> None:
        self._file, self.begin, self._length, self._at = file, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = (0, self._at, self._length)[whence] + offset
        if self._at < 0:
            raise ValueError("an offset in it is negative")
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(self._length - self._at, 0)
        self._file.seek(self.begin + self._at)
        data: bytes = self._file.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data
