"""A checkpoint directory of DeepSpeed's ZeRO as the contents of a saved
checkpoint: the optimizer's state in the form of `modicum.torch.AdamW`."""

from collections.abc import Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True)
class _Plane:
    """A tensor to write: a weight, or a plane of AdamW's state."""

    cut: Cut
    dtype: str
    form: str = ""
    """The form of `_modicum.cast_masters` in which elements are written; empty: unchanged."""

    def read(self, first: int, view: memoryview) -> None:
        """Fills `view` with elements from index `first` on."""
        if not self.form:
            return self.cut.read(first, view)
        size, at = ITEM_BYTES[self.dtype], 0
        while at * size < len(view):
            room = _room(view[at * size :], size)
            self.cut.read(first + at, room)
            end = at + len(room) // 4
            _modicum.cast_masters(room, view[at * size : end * size], self.form)
            at = end
        return None


def _reader(planes: Mapping[str, _Plane]) -> Read:
    return lambda name, first, view: planes[name].read(first, view)


def _weights_of(
    opened: ZeroDirectory, dtypes: Mapping[str, str], formats: Mapping[str, str]
) -> Read:
    """Reads the model's tensors. A trained weight is the rounded master, or its upper half."""
    planes = {}
    for name, tensor in opened.tensors.items():
        dtype = dtypes[name]
        if not tensor.is_trained:
            planes[name] = _Plane(tensor.planes[""], dtype)
        elif dtype == "float32":
            planes[name] = _Plane(tensor.planes[MASTER], dtype)
        else:
            form = "upper" if formats.get(name) in _SPLIT else dtype
            planes[name] = _Plane(tensor.planes[MASTER], dtype, form)
    return _reader(planes)


# ---- the state


def _state_of(
    opened: ZeroDirectory, dtypes: Mapping[str, str], formats: Mapping[str, str], asked: str
) -> tuple[_modicum.TensorsToSave, str]:
    """The planes of AdamW, and the text of state.json. `formats`: the state format of each trained
    parameter."""
    planes: dict[str, _Plane] = {}
    for name, of_format in formats.items():
        cuts = opened.tensors[name].planes
        if of_format in _SPLIT:
            planes[f"{name}.master_low"] = _Plane(cuts[MASTER], "int16", "lower")
        elif dtypes[name] != "float32":
            planes[f"{name}.master"] = _Plane(cuts[MASTER], "float32")
        for moment in MOMENTS:
            if moment not in cuts:
                what = "the optimizer has made no step, and has no state"
                raise refusal("USAGE", what, tensor=name, expected="optimizer='none'")
            planes[f"{name}.{moment}"] = _Plane(cuts[moment], "float32")
    shapes = {
        n: (plane.dtype, opened.tensors[n.rpartition(".")[0]].shape) for n, plane in planes.items()
    }
    steps = [(name, opened.tensors[name].steps) for name in formats]
    without = [name for name in opened.tensors if name not in formats]
    return streams_of(shapes, _reader(planes)), _modicum.state_text(asked, _SEED, steps, without)
