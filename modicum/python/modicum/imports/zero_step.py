"""A checkpoint directory of DeepSpeed's ZeRO as the contents of a saved
checkpoint: the optimizer's state in the form of `modicum.torch.AdamW`."""

from collections.abc import Callable, Mapping

from modicum import _modicum
from modicum.errors import refusal
from modicum.imports import groups
from modicum.imports.archives import ITEM_BYTES
from modicum.imports.streams import Contents, Read, Source, streams_of
from modicum.imports.zero import Cut, ZeroDirectory, ZeroTensor
from modicum.imports.zero_files import MASTER, MOMENTS
from modicum.recipes.dtypes import FLOATS
from modicum.walk.saving import GROUPS_FILE

FORMATS = ("fp32", "fp32-split")
"""The formats of AdamW's state that can be made; the first one is the default."""
_SPLIT = {row["name"] for row in _modicum.state_formats() if row["master_low"] is not None}
_WINDOW = 1 << 15
"""The most elements that are converted at once."""
_REST = 1 << 8
"""If the view has room for fewer float32 elements than this, up to this many are read into separate
memory; see `_room`."""
_SEED = 0
"""The default seed of AdamW, which `resume` compares. The formats in FORMATS draw no random
bits."""


def contents_of(
    opened: ZeroDirectory, source: Source, state_format: str | None, dtype: str | None
) -> Contents:
    """The contents of a checkpoint with the tensors of `opened`.

    Args:
        state_format: one of FORMATS; None: the checkpoint gets only weights.
        dtype: the dtype of all tensors that can be cast; None: as trained. The state has the
            masters of bfloat16 and float16 weights.

    Raises:
        IntegrityError: bytes that the checkpoint gets differ from the CRC-32 in their file.
        UsageError: with a `state_format`, the optimizer is not Adam or has made no step; or a
            trained parameter has an unknown dtype.
    """
    if opened.foreign and state_format is not None:
        expected, got = "Adam's exp_avg and exp_avg_sq, or optimizer='none'", opened.foreign
        raise refusal("UNSUPPORTED", "the saved state is not Adam's", expected=expected, got=got)
    dtypes = {name: _dtype_of(name, tensor, dtype) for name, tensor in opened.tensors.items()}
    shapes = {name: (dtypes[name], tensor.shape) for name, tensor in opened.tensors.items()}
    formats = {
        name: _modicum.state_format_of(dtypes[name], [*tensor.shape], state_format)
        for name, tensor in opened.tensors.items()
        if tensor.is_trained and state_format is not None
    }
    read = _weights_of(opened, dtypes, formats)
    weights = streams_of(shapes, read, ties=opened.ties, source=source, dtype=dtype)
    contents = Contents(weights, left_out=opened.others)
    if state_format is not None:
        state, facts = _state_of(opened, dtypes, formats, state_format)
        texts = [(GROUPS_FILE, groups.text_of("AdamW", opened.groups))]
        contents = Contents(weights, state, facts, texts, opened.others)
    opened.compare(with_moments=state_format is not None)
    return contents


def _dtype_of(name: str, tensor: ZeroTensor, asked: str | None) -> str:
    """The dtype in which the save gets a tensor: for a trained one the dtype of the checkpoint, for
    others the dtype in the model, which the save casts."""
    dtype = tensor.dtype if asked is None or not tensor.is_trained else asked
    if tensor.is_trained and dtype not in FLOATS:
        expected = ", ".join(sorted(FLOATS))
        what = "the dtype of a trained parameter"
        raise refusal("UNSUPPORTED", what, tensor=name, expected=expected, got=dtype)
    return dtype


# ---- elements


def _room(left: memoryview, size: int) -> memoryview:
    """Memory into which the next float32 elements are read. They are converted to elements of
    `size` bytes at the beginning of `left`. The memory is the end of `left`, as far as the two do
    not overlap; or new memory if there is room for fewer than _REST elements."""
    count = min(len(left) // (4 + size), _WINDOW)
    if count < _REST:
        return memoryview(bytearray(4 * min(len(left) // size, _REST)))
    return left[len(left) - 4 * count :]


Plane = Callable[[int, memoryview], None]
"""A tensor to write: fills a view with its elements from an index on."""


def _cast(cut: Cut, dtype: str, form: str) -> Plane:
    """The plane with the float32 elements of `cut` in `dtype`. `form`: that of
    `_modicum.cast_masters`."""
    size = ITEM_BYTES[dtype]

    def read(first: int, view: memoryview) -> None:
        at = 0
        while at * size < len(view):
            room = _room(view[at * size :], size)
            cut.read(first + at, room)
            end = at + len(room) // 4
            _modicum.cast_masters(room, view[at * size : end * size], form)
            at = end

    return read


def _reader(planes: Mapping[str, Plane]) -> Read:
    return lambda name, first, view: planes[name](first, view)


def _weights_of(
    opened: ZeroDirectory, dtypes: Mapping[str, str], formats: Mapping[str, str]
) -> Read:
    """Reads the model's tensors. A trained weight is the rounded master, or its upper half."""
    planes: dict[str, Plane] = {}
    for name, tensor in opened.tensors.items():
        dtype = dtypes[name]
        if not tensor.is_trained:
            planes[name] = tensor.planes[""].read
        elif dtype == "float32":
            planes[name] = tensor.planes[MASTER].read
        else:
            form = "upper" if formats.get(name) in _SPLIT else dtype
            planes[name] = _cast(tensor.planes[MASTER], dtype, form)
    return _reader(planes)


# ---- the state


def _state_of(
    opened: ZeroDirectory, dtypes: Mapping[str, str], formats: Mapping[str, str], asked: str
) -> tuple[_modicum.TensorsToSave, str]:
    """The planes of AdamW, and the text of state.json. `formats`: the state format of each trained
    parameter."""
    planes: dict[str, Plane] = {}
    for name, of_format in formats.items():
        cuts = opened.tensors[name].planes
        if of_format in _SPLIT:
            planes[f"{name}.master_low"] = _cast(cuts[MASTER], "int16", "lower")
        elif dtypes[name] != "float32":
            planes[f"{name}.master"] = cuts[MASTER].read
        for moment in MOMENTS:
            if moment not in cuts:
                what = "the optimizer has made no step, and has no state"
                raise refusal("USAGE", what, tensor=name, expected="optimizer='none'")
            planes[f"{name}.{moment}"] = cuts[moment].read
    shapes = {}
    for plane in planes:
        name, _, kind = plane.rpartition(".")
        dtype = "int16" if kind == "master_low" else "float32"
        shapes[plane] = dtype, opened.tensors[name].shape
    steps = [(name, opened.tensors[name].steps) for name in formats]
    without = [name for name in opened.tensors if name not in formats]
    return streams_of(shapes, _reader(planes)), _modicum.state_text(asked, _SEED, steps, without)
