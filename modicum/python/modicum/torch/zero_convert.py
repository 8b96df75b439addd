"""`convert`: writes a checkpoint directory of DeepSpeed's ZeRO as a step (a saved checkpoint)."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from modicum import _modicum
from modicum.errors import refusal
from modicum.imports.zero import Cut, ZeroDirectory, ZeroTensor
from modicum.imports.zero_files import MASTER, MOMENTS
from modicum.recipes.dtypes import FLOATS, dtype_name
from modicum.torch.saving import groups
from modicum.torch.saving.planning import Ask, Parts, root_of
from modicum.torch.saving.report import Saved
from modicum.torch.saving.streams import Read, goal_of_tensors, save_streams, streamed
from modicum.torch.saving.weights import Form
from modicum.torch.saving.writing import TensorsWriting

Size = int | str
Source = str | os.PathLike[str]

_FORMATS = ("fp32", "fp32-split")
_SPLIT = {row["name"] for row in _modicum.state_formats() if row["master_low"] is not None}
_WINDOW = 1 << 15
"""The most elements that are converted at once. For more, torch would start threads."""
_REST = 1 << 8
"""If the view has room for fewer float32 elements than this, up to this many are read into separate
memory; see `_room`."""
_SEED = 0
"""The default seed of AdamW, which `resume` compares. The formats in _FORMATS draw no random
bits."""


def convert(
    directory: Source, root: Source, *,
    step: int | None = None, source: Source | None = None, state_format: str | None = "fp32",
    dtype: torch.dtype | None = None, shard_size: Size | None = None,
    ledger: _modicum.Ledger | None = None, budget: Size | None = None, staging: Size | None = None,
) -> Saved:  # fmt: skip
    """Converts a checkpoint directory of DeepSpeed's ZeRO-1, -2 or -3 to a step: the model as
    Hugging Face files under the names of its state dict, and the optimizer's state in the form of
    `modicum.torch.AdamW`.

    Runs in one process and streams through staging: no complete tensor is in memory, and DeepSpeed
    need not be installed. Trained weights are made from DeepSpeed's float32 masters. No pickle is
    executed: pickles are read as data, and a name that neither torch nor DeepSpeed writes there is
    refused. A program's own entries, and the state of schedulers and loss scalers, are left out and
    reported.

    Args:
        directory: a directory of `save_checkpoint`, whose file `latest` names the newest
            global_step directory; or one global_step directory.
        root: the directory of all steps.
        step: the new step's number; None: DeepSpeed's `global_steps`.
        source: a checkpoint of the model, whose division into files, config and tokenizer the step
            gets.
        state_format: "fp32" or "fp32-split": the format of the `modicum.torch.AdamW`, with seed 0,
            that will resume the step; `modicum reshard` converts to other formats. None: only
            weights.
        dtype: the dtype of all tensors that can be cast; None: as trained. The state has the
            masters of bfloat16 and float16 weights.
        shard_size, ledger, budget, staging: as for `save`.

    Returns:
        The report, as from `save`. Its `left_out` also has the keys of DeepSpeed's files that were
        not converted.

    Raises:
        IntegrityError: a rank's file is missing, doubled or of another step, or a CRC-32 differs.
        FormatError: a file was not written by DeepSpeed, is damaged, or differs in form from those
            of version 0.19.
        UsageError: the checkpoint has experts or tensor-parallel ranks, or masters that are not
            float32; or, unless `state_format` is None, its optimizer is not Adam or has made no
            step.
        BudgetError, IoError: as for `save`.
    """
    if state_format not in (None, *_FORMATS):
        expected = "'fp32', 'fp32-split' or None"
        raise refusal("USAGE", "state_format", expected=expected, got=repr(state_format))
    form = Form(dtype, "drop", shard_size, staging, adapters=False)
    opened = ZeroDirectory.open(Path(directory))
    if opened.foreign and state_format is not None:
        expected, got = "Adam's exp_avg and exp_avg_sq, or state_format=None", opened.foreign
        raise refusal("UNSUPPORTED", "the saved state is not Adam's", expected=expected, got=got)
    number = opened.global_steps if step is None else step
    ask = Ask(root=root_of(root), step=number, keep=None, form=form, budget=budget, extra=None,
              ledger=ledger or _modicum.Ledger(), per_rank=None)  # fmt: skip
    dtypes = {name: _dtype_of(name, of, form) for name, of in opened.tensors.items()}
    shapes = {name: (dtypes[name], of.shape) for name, of in opened.tensors.items()}
    goal = goal_of_tensors(shapes, opened.ties, source)
    formats = {
        name: _modicum.state_format_of(dtypes[name], [*of.shape], state_format)
        for name, of in opened.tensors.items()
        if of.is_trained and state_format is not None
    }
    writing = streamed(goal.recipe, form, _weights_of(opened, dtypes, formats))
    parts = Parts(writing, None, [])
    if state_format is not None:
        state = _state_of(opened, dtypes, formats, state_format, form)
        parts = Parts(writing, state, [(groups.FILE, _groups_of(opened))])
    opened.compare(with_moments=state_format is not None)
    report = save_streams(ask, goal, parts)
    return replace(report, left_out=sorted({*report.left_out, *opened.others}))


def _dtype_of(name: str, of: ZeroTensor, form: Form) -> str:
    """The dtype in which the save gets a tensor: for a trained one the dtype of the step, for
    others the dtype in the model, which the save casts."""
    dtype = of.dtype if form.dtype is None or not of.is_trained else dtype_name(form.dtype)
    if of.is_trained and dtype not in FLOATS:
        expected = ", ".join(sorted(FLOATS))
        what = "the dtype of a trained parameter"
        raise refusal("UNSUPPORTED", what, tensor=name, expected=expected, got=dtype)
    return dtype


# ---- elements

Convert = Callable[[torch.Tensor, torch.Tensor], object]
"""Called with float32 elements, which it may overwrite, and the tensor to fill. Makes no temporary
tensors."""


def _upper(values: torch.Tensor, into: torch.Tensor) -> None:
    """The upper halves of split masters: bfloat16, rounded half up in magnitude."""
    values.view(torch.int32).add_(0x8000)
    into.view(torch.int16).copy_(values.view(torch.int16)[1::2])


def _lower(values: torch.Tensor, into: torch.Tensor) -> None:
    """The lower halves of split masters: int16."""
    into.copy_(values.view(torch.int16)[::2])


def _rounded(values: torch.Tensor, into: torch.Tensor) -> None:
    into.copy_(values)


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
    convert: Convert | None = None
    """None: the elements of the cut are written unchanged."""

    def read(self, first: int, view: memoryview) -> None:
        """Fills `view` with elements from index `first` on."""
        if self.convert is None:
            return self.cut.read(first, view)
        into, at = torch.frombuffer(view, dtype=getattr(torch, self.dtype)), 0
        size = into.element_size()
        while at < into.numel():
            room = _room(view[at * size :], size)
            self.cut.read(first + at, room)
            values = torch.frombuffer(room, dtype=torch.float32)
            self.convert(values, into[at : at + values.numel()])
            at += values.numel()
        return None


def _reader(planes: Mapping[str, _Plane]) -> Read:
    for convert, dtype in {(of.convert, of.dtype) for of in planes.values()}:
        if convert is not None:  # torch allocates at its first call: keep that out of the save
            zero = torch.zeros(1, dtype=torch.float32, device="cpu")
            convert(zero, torch.empty(1, dtype=getattr(torch, dtype), device="cpu"))
    return lambda name, first, view: planes[name].read(first, view)


def _weights_of(
    opened: ZeroDirectory, dtypes: Mapping[str, str], formats: Mapping[str, str]
) -> Read:
    """Reads the model's tensors. A trained weight is the rounded master, or its upper half."""
    planes = {}
    for name, of in opened.tensors.items():
        dtype = dtypes[name]
        if not of.is_trained:
            planes[name] = _Plane(of.planes[""], dtype)
        elif dtype == "float32":
            planes[name] = _Plane(of.planes[MASTER], dtype)
        else:
            convert = _upper if formats.get(name) in _SPLIT else _rounded
            planes[name] = _Plane(of.planes[MASTER], dtype, convert)
    return _reader(planes)


# ---- the state


def _state_of(
    opened: ZeroDirectory,
    dtypes: Mapping[str, str],
    formats: Mapping[str, str],
    asked: str,
    form: Form,
) -> TensorsWriting:
    """The planes of AdamW to write. `formats`: the state format of each trained parameter."""
    planes: dict[str, _Plane] = {}
    for name, of_format in formats.items():
        cuts = opened.tensors[name].planes
        if of_format in _SPLIT:
            planes[f"{name}.master_low"] = _Plane(cuts[MASTER], "int16", _lower)
        elif dtypes[name] != "float32":
            planes[f"{name}.master"] = _Plane(cuts[MASTER], "float32")
        for moment in MOMENTS:
            if moment not in cuts:
                what = "the optimizer has made no step, and has no state"
                raise refusal("USAGE", what, tensor=name, expected="state_format=None")
            planes[f"{name}.{moment}"] = _Plane(cuts[moment], "float32")
    shapes = {n: (of.dtype, opened.tensors[n.rpartition(".")[0]].shape) for n, of in planes.items()}
    recipe = goal_of_tensors(shapes, {}, None).recipe
    steps = [(name, opened.tensors[name].steps) for name in formats]
    without = [name for name in opened.tensors if name not in formats]
    facts = _modicum.state_text(asked, _SEED, steps, without)
    return TensorsWriting(streamed(recipe, Form(staging=form.staging), _reader(planes)), facts)


def _groups_of(opened: ZeroDirectory) -> str:
    """The text of optimizer/groups.json."""
    return groups.text("AdamW", ((of.names, of.options) for of in opened.groups))
