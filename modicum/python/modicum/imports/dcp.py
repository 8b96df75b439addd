"""Reads a directory written by torch.distributed.checkpoint's FileSystemWriter. A tensor is divided
into boxes (DCP's chunks). Each box is a zip archive of torch.save; a file holds many archives.

    DIR/.metadata        a pickle: dtypes, shapes, boxes, and the place of each box
    DIR/__0_0.distcp     written by rank 0
    DIR/__1_0.distcp     written by rank 1

Only tensors are read, and of them only the elements asked for. No pickle is executed (pickles.py).
"""

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from modicum import _modicum
from modicum.errors import IoError, UsageError
from modicum.imports.archives import (
    ITEM_BYTES,
    Archive,
    Line,
    Shape,
    compare_records,
    is_shape,
    is_size,
    strided,
)
from modicum.imports.pickles import (
    DTYPES,
    MOST_BYTES,
    Global,
    MadeObject,
    Pairs,
    malformed,
    read_pickle,
)
from modicum.upstream.torch_checkpoint import METADATA, STORAGE_INFO

FILE = ".metadata"
_MOST_CUT_DIMS = 6
"""The most dims along which the boxes of a tensor divide it; the axes of a mesh are fewer."""
Place = tuple[str | int, ...]


@dataclass(frozen=True)
class Box:
    """A box of a tensor's elements (DCP's chunk); row-major in one archive."""

    offsets: Shape
    sizes: Shape
    file: str
    begin: int
    """Offset of the archive in its file, in bytes."""
    length: int
    """Bytes of the archive."""


@dataclass(frozen=True)
class DirectoryTensor:
    """A tensor of a directory. Its boxes cover it, and none overlap."""

    dtype: str
    shape: Shape
    boxes: list[Box]
    begins: "array[int]"
    """For each box the offset of its first element in its file, in bytes; -1: not known yet. The
    array exists before the save is planned, so that reads do not add to the save's memory."""

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]


@dataclass
class Directory:
    """The tensors of a directory, by key of the flattened state dict."""

    path: Path
    tensors: dict[str, DirectoryTensor] = field(default_factory=dict)
    others: dict[str, tuple[str, int, int] | None] = field(default_factory=dict)
    """For each key of another value, which is pickled, its file, offset and length in bytes; None:
    not known."""
    places: dict[str, Place] = field(default_factory=dict)
    """For each key, if known, its path in the state dict before that was flattened."""

    @classmethod
    def open(cls, path: Path) -> "Directory":
        """Reads .metadata. Raises `FormatError` if torch did not write that file, `IoError` if it
        can't be read."""
        try:
            data = _modicum.read_file(path / FILE, too_long="FORMAT.LIMIT", most_bytes=MOST_BYTES)
        except IoError as error:
            others = ", ".join(sorted(file.parent.name for file in path.glob(f"*/{FILE}")))
            malformed(
                f"{path} has no {FILE} that can be read", path.name, "IO",
                expected="a directory that torch.distributed.checkpoint has written",
                got=f"{FILE} in {others}" if others else str(error),
            )  # fmt: skip
        return directory_of(data, path)

    def value(self, key: str) -> Any:
        """The value of a key of `others`, as `read_pickle` returns it. Raises the errors of
        `Archive.open` and `read_pickle`."""
        place = self.others[key]
        if place is None:
            malformed("storage_data lacks the place of a value", FILE, tensor=key)
        file, begin, length = place
        return Archive.open(self.path / file, begin, length).value()

    def compare(self, keys: Iterable[str]) -> None:
        """Compares the elements of the tensors `keys` with the CRC-32 in their boxes' archives:
        reads them once. Raises the errors of `compare_records` and `read`."""
        compare_records(
            self._line(self.tensors[key], number)
            for key in keys
            for number in range(len(self.tensors[key].boxes))
        )

    def read(self, key: str, first: int, view: memoryview) -> None:
        """Fills `view` with the elements of a tensor from index `first` on. Raises `FormatError` if
        a file lacks some, `IoError` if it can't be read."""
        tensor = self.tensors[key]
        count = len(view) // tensor.item_bytes
        left = count
        for number in range(len(tensor.boxes)):
            left -= self._read_box(tensor, number, first, view)
        if left != 0:
            malformed("the boxes of a tensor do not cover it", FILE, tensor=key)

    def _read_box(self, tensor: DirectoryTensor, number: int, first: int, view: memoryview) -> int:
        """Reads the elements that a box has of `view`'s range; returns their number."""
        runs = _Runs(tensor.shape, tensor.boxes[number])
        line: Line | None = None
        end, size, read = first + len(view) // tensor.item_bytes, tensor.item_bytes, 0
        run = runs.last_at_or_before(first)
        while run < runs.count and runs.begin(run) < end:
            begin = runs.begin(run)
            a, b = max(begin, first), min(begin + runs.numel, end)
            if a < b:
                at = run * runs.numel + a - begin
                line = line or self._line(tensor, number)
                line.read(at, view[(a - first) * size : (b - first) * size])
                read += b - a
            run += 1
        return read

    def _line(self, tensor: DirectoryTensor, number: int) -> Line:
        """Where a box's elements lie in its file; checks the dtype and shape of its archive."""
        box = tensor.boxes[number]
        path = self.path / box.file
        if tensor.begins[number] < 0:
            archive = Archive.open(path, box.begin, box.length)
            value = archive.value()
            try:
                line = archive.line(value)
            except UsageError as error:
                key = next(key for key, each in self.tensors.items() if each is tensor)
                raise strided(box.file, str(error.got), tensor=key) from None
            except ValueError as error:
                malformed(f"a box holds no tensor that can be read: {error}", box.file)
            if (line.dtype, line.shape) != (tensor.dtype, box.sizes):
                expected, got = f"{tensor.dtype} {[*box.sizes]}", f"{line.dtype} {[*line.shape]}"
                what = "the archive of a box holds another tensor"
                malformed(what, box.file, expected=expected, got=got)
            tensor.begins[number] = line.begin
            return line
        return Line(path, tensor.dtype, box.sizes, tensor.begins[number])


class _Runs:
    """The runs of elements, contiguous in the tensor, of which a box consists; ascending."""

    def __init__(self, shape: Shape, box: Box) -> None:
        # A run spans the innermost dims, those that the box covers fully, and the box's part of the
        # next dim.
        cut = len(shape)
        while cut > 0 and box.sizes[cut - 1] == shape[cut - 1]:
            cut -= 1
        self._outer = box.sizes[: max(cut - 1, 0)]
        self.numel = prod(box.sizes[max(cut - 1, 0) :])
        self.count = prod(self._outer) if self.numel else 0
        self._strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
        self._first = sum(o * s for o, s in zip(box.offsets, self._strides, strict=True))

    def begin(self, run: int) -> int:
        """The index in the tensor of the run's first element."""
        begin = self._first
        for dim in reversed(range(len(self._outer))):
            run, at = divmod(run, self._outer[dim])
            begin += at * self._strides[dim]
        return begin

    def last_at_or_before(self, index: int) -> int:
        """The last run that begins at or before `index`; 0 if none does."""
        return max(bisect_right(range(self.count), index, key=self.begin) - 1, 0)


# ---- .metadata


def directory_of(data: bytes, path: Path) -> Directory:
    """The directory that .metadata, `data`, describes. Raises `FormatError`."""
    root = read_pickle(data, FILE)
    if not isinstance(root, MadeObject) or root.kind != f"{METADATA} Metadata":
        malformed("the pickle is no Metadata of torch.distributed.checkpoint", FILE)
    infos = _infos_of(root.member("storage_data"))
    found = Directory(path)
    for key, value in _pairs(root.member("state_dict_metadata"), "state_dict_metadata"):
        if not isinstance(key, str) or not isinstance(value, MadeObject):
            malformed("state_dict_metadata holds something other than tensors and bytes", FILE)
        if value.kind == f"{METADATA} BytesStorageMetadata":
            found.others[key] = infos.get((key, None))
        elif value.kind == f"{METADATA} TensorStorageMetadata":
            found.tensors[key] = _tensor_of(key, value, infos)
        else:
            malformed("state_dict_metadata holds something other than tensors and bytes", FILE)
    mappings = root.member("planner_data")
    for key, place in mappings.items if isinstance(mappings, Pairs) else []:
        if isinstance(key, str) and _is_place(place):
            found.places[key] = place
    return found


def _is_place(value: Any) -> bool:
    parts = value if isinstance(value, tuple) else ()
    return len(parts) > 0 and all(type(part) in (str, int) for part in parts)


def _pairs(value: Any, name: str) -> list[tuple[Any, Any]]:
    if not isinstance(value, Pairs):
        malformed(f"{name} is missing or no dict", FILE)
    return value.items


def _shape(value: Any, key: str) -> Shape:
    args = value.args if isinstance(value, MadeObject) and value.kind == "torch Size" else None
    sizes: Any = args[0] if isinstance(args, tuple) and len(args) == 1 else None
    if not is_shape(sizes):
        malformed("a shape is no list of sizes", FILE, tensor=key)
    shape: Shape = sizes
    return shape


_Infos = Mapping[tuple[str, Shape | None], tuple[str, int, int]]


def _infos_of(value: Any) -> _Infos:
    """File, begin and length of each box, by key and offsets (None for values without offsets)."""
    infos: dict[tuple[str, Shape | None], tuple[str, int, int]] = {}
    for index, info in _pairs(value, "storage_data"):
        kinds = [
            instance.kind if isinstance(instance, MadeObject) else "" for instance in (index, info)
        ]
        if kinds != [f"{METADATA} MetadataIndex", STORAGE_INFO]:
            malformed("storage_data has something other than places of boxes", FILE)
        key, offset = index.member("fqn"), index.member("offset")
        name, begin, length = (
            info.member(attribute) for attribute in ("relative_path", "offset", "length")
        )
        if not isinstance(key, str) or not isinstance(name, str):
            malformed("the place of a box lacks the tensor's or the file's name", FILE)
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            what = "the file of a box is outside the directory"
            malformed(what, FILE, tensor=key, got=ascii(name))
        if not (is_size(begin) and is_size(length)):
            malformed("the place of a box is no range of bytes", FILE, tensor=key)
        if info.member("transform_descriptors") not in (None, []):
            malformed("the bytes of a box are transformed, as by compression", FILE, tensor=key)
        at = None if offset is None else _shape(offset, key)
        infos[key, at] = name, begin, length
    return infos


def _tensor_of(key: str, value: MadeObject, infos: _Infos) -> DirectoryTensor:
    shape = _shape(value.member("size"), key)
    boxes = []
    chunks = value.member("chunks")
    for chunk in chunks if isinstance(chunks, list) else []:
        if not isinstance(chunk, MadeObject) or chunk.kind != f"{METADATA} ChunkStorageMetadata":
            malformed("a box is no ChunkStorageMetadata", FILE, tensor=key)
        offsets, sizes = (_shape(chunk.member(name), key) for name in ("offsets", "sizes"))
        ends = [o + n for o, n in zip(offsets, sizes, strict=False)]
        is_within = len(offsets) == len(sizes) == len(shape) and all(
            end <= size for end, size in zip(ends, shape, strict=True)
        )
        if not is_within:
            malformed("a box is not within its tensor", FILE, tensor=key)
        if prod(sizes) == 0:
            continue
        if (key, offsets) not in infos:
            malformed("storage_data lacks the place of a box", FILE, tensor=key)
        boxes.append(Box(offsets, sizes, *infos[key, offsets]))
    _require_tiles(key, shape, boxes)
    begins = array("q", [-1]) * len(boxes)
    return DirectoryTensor(_dtype_of(key, value.member("properties")), shape, boxes, begins)


def _dtype_of(key: str, properties: Any) -> str:
    """The dtype of a TensorProperties, whose state is a tuple that begins with the dtype, or a
    dict."""
    state = properties.state if isinstance(properties, MadeObject) else None
    first = state[0] if isinstance(state, tuple) and state else None
    if isinstance(state, Pairs):
        first = properties.member("dtype")
    name = first.name.partition(" ")[2] if isinstance(first, Global) else ""
    if name not in DTYPES:
        malformed("a tensor has no known dtype", FILE, tensor=key)
    if name not in ITEM_BYTES:
        expected = ", ".join(ITEM_BYTES)
        malformed("the dtype of a tensor", FILE, tensor=key, expected=expected, got=name)
    return name


def _require_tiles(key: str, shape: Shape, boxes: list[Box]) -> None:
    """Raises `FormatError` unless the boxes cover the tensor exactly once: together they have its
    number of elements, and no two overlap. Takes time in proportion to the boxes."""
    if sum(prod(box.sizes) for box in boxes) != prod(shape):
        malformed("the boxes of a tensor do not cover it", FILE, tensor=key)
    if not boxes:  # a tensor without elements
        return
    cut = [d for d, size in enumerate(shape) if any(box.sizes[d] != size for box in boxes)]
    if len(cut) > _MOST_CUT_DIMS:
        expected, got = f"{_MOST_CUT_DIMS} or fewer", str(len(cut))
        malformed("the dims in which a tensor is divided", FILE, tensor=key,
                  expected=expected, got=got)  # fmt: skip
    # Count the boxes at each element. The counts are all 1 exactly if their differences along each
    # of the dims are those of one box as large as the tensor: a box has them at its corners.
    corners: Counter[Shape] = Counter()
    whole = Box((0,) * len(shape), shape, "", 0, 0)
    for box, sign in ((whole, -1), *((box, 1) for box in boxes)):
        edges = [((box.offsets[d], 1), (box.offsets[d] + box.sizes[d], -1)) for d in cut]
        for corner in product(*edges):
            corners[tuple(at for at, _ in corner)] += sign * prod(factor for _, factor in corner)
    if any(corners.values()):
        malformed("two boxes of a tensor overlap", FILE, tensor=key)
