"""Reads a checkpoint directory of DeepSpeed's ZeRO, stages 1 to 3, without tensor parallelism:

    DIR/latest                                  the name of the newest checkpoint's folder
    DIR/global_step8/mp_rank_00_model_states.pt
                                                shapes, buffers, frozen parameters (stages 1, 2)
    DIR/global_step8/zero_pp_rank_R_mp_rank_00_model_states.pt
                                                the same with rank R's pieces (stage 3)
    DIR/global_step8/bf16_zero_pp_rank_R_mp_rank_00_optim_states.pt
                                                rank R's part of masters and moments

In stages 1 and 2 the parameters of a group are concatenated into a flat vector, which is divided
among the ranks. In stage 3 each parameter is divided into equal pieces, the last one padded; the
pieces of a rank are concatenated, in one flat vector per sub-group.

Only the elements asked for are read. No pickle is executed (pickles.py).
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

from modicum import _modicum
from modicum.imports.archives import Archive, Line, Shape, compare_records
from modicum.imports.groups import Group
from modicum.imports.pickles import malformed, reading
from modicum.imports.zero_files import (
    MASTER,
    MOMENTS,
    FlatPart,
    Rank,
    Table,
    missing,
    other_step,
    unsupported,
)
from modicum.upstream.deepspeed_checkpoint import (
    EXPERT_FILE,
    LATEST,
    MODEL_FILE,
    MODEL_KEYS,
    OPTIMIZER_FILE,
)

_LONGEST_LATEST = 4096


@dataclass(frozen=True)
class Cut:
    """A tensor divided into pieces, one in each line."""

    lines: Sequence[Line]
    begins: Sequence[int]
    """The index of each piece's first element, ascending, and the end of the last piece. In stages
    1 and 2 they are indices in the group's flat vector, in stage 3 in the tensor."""
    at: int
    """The index of the tensor's first element, counted like `begins`."""
    base: int
    """The element of each line at which its piece begins."""

    def read(self, first: int, view: memoryview) -> None:
        """Fills `view` with elements, beginning at `first`."""
        size = self.lines[0].item_bytes
        begin, end = self.at + first, self.at + first + len(view) // size
        at = begin
        while at < end:
            piece = bisect_right(self.begins, at) - 1
            stop = min(end, self.begins[piece + 1])
            target = view[(at - begin) * size : (stop - begin) * size]
            self.lines[piece].read(self.base + at - self.begins[piece], target)
            at = stop


@dataclass(frozen=True)
class ZeroTensor:
    dtype: str
    """The dtype in the model."""
    shape: Shape
    planes: Mapping[str, Cut]
    """For a trained parameter in float32: MASTER and, if the optimizer has them, MOMENTS. For other
    tensors: one plane in `dtype` under an empty name."""
    steps: int = 0
    """How often the optimizer has stepped it."""

    @property
    def is_trained(self) -> bool:
        return MASTER in self.planes


@dataclass
class ZeroDirectory:
    """A checkpoint of one training step, saved by DeepSpeed."""

    global_steps: int
    tensors: dict[str, ZeroTensor] = field(default_factory=dict)
    """The tensors by their names in the model's state dict."""
    ties: dict[str, str] = field(default_factory=dict)
    """For each further name of a parameter the name that has the values."""
    groups: list[Group] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    """Keys that are not converted, such as the state of a scheduler."""
    foreign: str = ""
    """Names of optimizer state that AdamW does not have; empty if there are none. If there are any,
    no tensor has MOMENTS."""

    @classmethod
    def open(cls, path: Path) -> "ZeroDirectory":
        """Reads the pickles of a directory with a file `latest`, or of one global_step directory.

        Raises:
            IntegrityError: a rank's file is missing or does not belong to the others.
            FormatError: a file was not written by DeepSpeed, or is damaged.
            IoError: the directory or a file can't be read.
            UsageError: the directory is no checkpoint of ZeRO, or the model has experts or
                tensor-parallel ranks.
        """
        models, optimizers = _files_of(_step_of(path))
        first = Rank.of(Archive.open(optimizers[0]))
        _require_ranks(optimizers, first.world, first.file)
        if first.stage == 3:
            _require_ranks(models, first.world, first.file)
        world = range(first.world)
        of_models = [Archive.open(models[rank]) for rank in (world if first.stage == 3 else (0,))]
        return directory_of(of_models, [Archive.open(optimizers[rank]) for rank in world])

    def compare(self, with_moments: bool) -> None:
        """Compares the records of the tensors, of MOMENTS only if `with_moments`, with their
        CRC-32: reads them once. Raises the errors of `compare_records`."""
        compare_records(
            line
            for tensor in self.tensors.values()
            for plane, cut in tensor.planes.items()
            if with_moments or plane not in MOMENTS
            for line in cut.lines
        )


def _step_of(path: Path) -> Path:
    latest = path / LATEST
    if not latest.is_file():
        return path
    text = _modicum.read_file(latest, too_long="FORMAT.LIMIT", most_bytes=_LONGEST_LATEST)
    try:
        tag = text.decode().strip()
    except UnicodeDecodeError:
        tag = ""
    if tag in ("", ".", "..") or "/" in tag or "\0" in tag:
        malformed("its text is no name of a folder next to it", LATEST, got=ascii(tag or text[:64]))
    return path / tag


_Files = dict[int, Path]


def _files_of(directory: Path) -> tuple[_Files, _Files]:
    """The files of models and of optimizers, by rank. Raises `UsageError` for other files."""
    models: _Files = {}
    optimizers: _Files = {}
    with reading(directory):
        paths = sorted(directory.iterdir())
    for path in paths:
        if EXPERT_FILE.fullmatch(path.name):
            unsupported("experts that DeepSpeed distributes", path.name)
        for files, pattern in ((models, MODEL_FILE), (optimizers, OPTIMIZER_FILE)):
            found = pattern.fullmatch(path.name)
            if found is None:
                continue
            if int(found[2]) != 0:
                unsupported("tensor-parallel ranks of DeepSpeed", path.name)
            rank = int(found[1] or 0)
            if rank in files:
                what = f"rank {rank} has two files, of which one may be of an earlier save"
                other_step(what, path.name, f"it or {files[rank].name}", "both")
            files[rank] = path
    if 0 not in models or not optimizers:
        expected = "*_model_states.pt and *_optim_states.pt of ZeRO"
        unsupported("no checkpoint of DeepSpeed's ZeRO", directory.name, expected=expected)
    if 0 not in optimizers:
        missing(_name_like(optimizers, 0))
    return models, optimizers


def _require_ranks(files: _Files, world: int, by: str) -> None:
    for rank in range(world):
        if rank not in files:
            missing(_name_like(files, rank))
    if len(files) != world:
        expected, got = f"{world} ranks, as in {by}", f"{len(files)}"
        other_step("there are files of more ranks", files[max(files)].name, expected, got)


def _name_like(files: _Files, rank: int) -> str:
    other, path = next(iter(files.items()))
    return path.name.replace(f"pp_rank_{other}_", f"pp_rank_{rank}_")


# ---- all files


def directory_of(of_models: Sequence[Archive], optimizers: Sequence[Archive]) -> ZeroDirectory:
    """The directory with these files of models and optimizers, by rank; `of_models` has only rank
    0's in stages 1 and 2. Raises the errors of `ZeroDirectory.open`."""
    ranks = [Rank.of(archive) for archive in optimizers]
    first, world = ranks[0], len(ranks)
    due_of_ranks = _in_common(first)
    for rank in ranks:
        for (what, expected), (_, got) in zip(due_of_ranks, _in_common(rank), strict=True):
            if got != expected:
                other_step(f"it has other {what} than {first.file}", rank.file, expected, got)
    models = [Table.of(archive) for archive in of_models]
    model = models[0]
    due = {"dp_world_size": world, "global_steps": model.count("global_steps")}
    for table in models:
        for key, expected in due.items():
            if table.count(key) != expected:
                other_step(f"it has another {key}", table.file, expected, table.count(key))
    if model.count("mp_world_size") != 1:
        unsupported("tensor-parallel ranks of DeepSpeed", model.file)
    _require_steps(model, first)
    others = [
        key for key, value in model.values.items() if key not in MODEL_KEYS and value is not None
    ]
    found = ZeroDirectory(due["global_steps"], others=sorted({*others, *first.others}))
    found.foreign = next((flat.foreign for flat in first.flats if flat.foreign), "")
    trained = dict(_trained(model, ranks, found.groups))
    shared = model.maybe_table("shared_params")
    found.ties = {} if shared is None else _ties_of(shared)
    frozen = {} if first.stage < 3 else dict(_frozen(models))
    for name, value in model.table("module").values.items():
        if name in found.ties:
            continue
        line = model.line(name, value)
        if name in trained:
            shape, planes, steps = trained.pop(name)
            found.tensors[name] = ZeroTensor(line.dtype, shape, planes, steps)
        elif name in frozen:
            found.tensors[name] = frozen[name]
        else:
            found.tensors[name] = ZeroTensor(line.dtype, line.shape, {"": _whole(line)})
    _require_complete(model, found, trained)
    return found


def _require_steps(model: Table, first: Rank) -> None:
    """Raises `IntegrityError` unless the optimizer has made all of the model's steps but those that
    DeepSpeed skipped. Without state its steps are unknown."""
    finished, skipped = model.count("global_steps"), model.count("skipped_steps")
    for flat in first.flats:
        if len(flat.planes) > 1 and flat.steps != finished - skipped:
            expected = f"{finished - skipped} steps: {finished} of {model.file}, of which "
            expected += f"{skipped} skipped"
            other_step("the optimizer is at another step", first.file, expected, flat.steps)


def _in_common(rank: Rank) -> list[tuple[str, Any]]:
    return [
        ("stage", rank.stage), ("ranks", rank.world), ("version of DeepSpeed", rank.version),
        ("parameter groups", [count for count, _ in rank.groups]),
        ("state", [(*flat.planes,) for flat in rank.flats]),
        ("steps", [flat.steps for flat in rank.flats]),
    ]  # fmt: skip


def _ties_of(shared: Table) -> dict[str, str]:
    for name, original in shared.values.items():
        if not isinstance(original, str):
            shared.unknown(name)
    return dict(shared.values)


def _require_complete(model: Table, found: ZeroDirectory, left: Mapping[str, Any]) -> None:
    """Raises `FormatError` if a tie or a trained parameter has no tensor in the model, and
    `IntegrityError` if a frozen parameter has no values. `left`: the trained parameters that the
    model lacks."""
    for name, original in found.ties.items():
        if original not in found.tensors:
            malformed("a tie has no tensor", model.file, tensor=name)
    for name in left:
        malformed("the model lacks a trained parameter", model.file, tensor=name)
    buffers = {name for name in model.entries("buffer_names") if isinstance(name, str)}
    for name, tensor in found.tensors.items():
        is_placeholder = tensor.shape == (0,) and not tensor.is_trained and name not in buffers
        if is_placeholder:
            what = "the values of a frozen parameter were not saved"
            malformed(what, model.file, "INTEGRITY", tensor=name)


def _whole(line: Line) -> Cut:
    return Cut([line], (0, line.numel), 0, 0)


_TrainedTensor = tuple[str, tuple[Shape, dict[str, Cut], int]]


def _trained(model: Table, ranks: Sequence[Rank], groups: list[Group]) -> Iterator[_TrainedTensor]:
    """(name, (shape, planes, steps)) of each trained parameter; appends the groups to `groups`."""
    first = ranks[0]
    shapes = model.tables("param_shapes")
    if len(shapes) != len(first.flats):
        model.unknown("param_shapes")
    flats = iter(shapes)
    for count, options in first.groups:
        names = [name for _ in range(count) for name in next(flats).values]
        groups.append(Group(names, options))
    for number, table in enumerate(shapes):
        sizes = {name: table.shape(name) for name in table.values}
        rank_flats = [rank.flats[number] for rank in ranks]
        cuts = _equal_cuts if first.stage == 3 else _flat_cuts
        padding = first.paddings[number] if number < len(first.paddings) else [0] * len(sizes)
        if len(padding) != len(sizes):
            what = "a group has another number of paddings than of parameters"
            other_step(what, first.file, len(sizes), len(padding))
        for name, begins, at, base in cuts(sizes, rank_flats, padding, model):
            lines = {
                plane: [flat.planes[plane] for flat in rank_flats] for plane in rank_flats[0].planes
            }
            planes = {plane: Cut(of_ranks, begins, at, base) for plane, of_ranks in lines.items()}
            yield name, (sizes[name], planes, rank_flats[0].steps)


_Cuts = Iterator[tuple[str, Sequence[int], int, int]]


def _flat_cuts(
    sizes: Mapping[str, Shape],
    rank_flats: Sequence[FlatPart],
    padding: Sequence[int],
    model: Table,
) -> _Cuts:
    """For stages 1 and 2: (name, `begins`, `at`, `base`) of the `Cut` of each parameter."""
    begins = [0, *accumulate(flat.planes[MASTER].numel for flat in rank_flats)]
    at = 0
    for (name, shape), more in zip(sizes.items(), padding, strict=True):
        yield name, begins, at, 0
        at += prod(shape) + more
    _require_filled(model, at, begins[-1])


def _equal_cuts(
    sizes: Mapping[str, Shape],
    rank_flats: Sequence[FlatPart],
    padding: Sequence[int],
    model: Table,
) -> _Cuts:
    """For stage 3: (name, `begins`, `at`, `base`) of the `Cut` of each parameter."""
    base, world = 0, len(rank_flats)
    for name, shape in sizes.items():
        piece = -(-prod(shape) // world)
        yield name, _begins(piece, world), 0, base
        base += piece
    for flat in rank_flats:
        _require_filled(model, base, flat.planes[MASTER].numel)


def _begins(piece: int, world: int) -> Sequence[int]:
    return range(0, (world + 1) * piece, piece) if piece else (0,) * (world + 1)


def _require_filled(model: Table, expected: int, got: int) -> None:
    """`expected`: elements of the parameters with padding; `got`: elements of the flat vectors."""
    if expected != got:
        what = "the flat vectors have another length than the parameters and their padding"
        other_step(what, model.file, f"{expected} elements", f"{got} elements")


def _frozen(models: Sequence[Table]) -> Iterator[tuple[str, ZeroTensor]]:
    """The frozen parameters of stage 3, each divided among all ranks."""
    shapes = models[0].maybe_table("frozen_param_shapes")
    if shapes is None:
        return
    fragments = [table.table("frozen_param_fragments") for table in models]
    for name in shapes.values:
        shape, world = shapes.shape(name), len(models)
        lines = [table.line(name, table.values.get(name)) for table in fragments]
        piece = -(-prod(shape) // world)
        for table, line in zip(fragments, lines, strict=True):
            if line.dtype != lines[0].dtype:
                what = f"a frozen parameter has another dtype than in {models[0].file}"
                other_step(what, table.file, lines[0].dtype, line.dtype, tensor=name)
            if line.numel < piece:
                what, got = "a frozen parameter has too few elements", line.numel
                other_step(what, table.file, f"{piece} or more", got, tensor=name)
        cut = Cut(lines, _begins(piece, world), 0, 0)
        yield name, ZeroTensor(lines[0].dtype, shape, {"": cut})
