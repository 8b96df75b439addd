"""A checkpoint directory of DeepSpeed's ZeRO, stages 1 to 3, of one tensor-parallel rank:

    DIR/latest                                  the name of the newest step's folder
    DIR/global_step8/mp_rank_00_model_states.pt shapes, buffers, frozen parameters; of ZeRO-3:
                     zero_pp_rank_R_mp_rank_00_model_states.pt, with rank R's part of the frozen
    DIR/global_step8/bf16_zero_pp_rank_R_mp_rank_00_optim_states.pt
                                                rank R's part of masters and moments

In stages 1 and 2 the parameters of a group follow one another in a flat vector, which the ranks cut
in pieces. In stage 3 each parameter is cut in equal pieces, the last of them padded, and the pieces
of a rank follow one another, in one flat vector per sub-group.

Only elements that are asked for are read. Every pickle is read as data.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from modicum.errors import refusal
from modicum.torch.saving.archives import Archive, Line, Shape, is_shape, is_size, number_of
from modicum.torch.saving.pickles import Made, Pairs, malformed
from modicum.upstream.deepspeed_checkpoint import (
    BASE_STATE,
    EXPERT_FILE,
    LATEST,
    MASTERS,
    MODEL_FILE,
    MODEL_KEYS,
    OPTIMIZER_FILE,
    PICKLED,
    STAGE,
)

MASTER = "master"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Cut:
    """A tensor in pieces, whose order is that of `lines`."""

    lines: Sequence[Line]
    begins: Sequence[int]
    """Of each piece, ascending, and the end of the last."""
    at: int
    """The tensor's first element, counted as `begins` are."""
    base: int
    """The first element of the tensor's piece in each line."""

    def read(self, first: int, view: memoryview) -> None:
        """Fills `view` with the elements from `first` on."""
        size = self.lines[0].item_bytes
        begin, end = self.at + first, self.at + first + len(view) // size
        at = begin
        while at < end:
            piece = bisect_right(self.begins, at) - 1
            stop = min(end, self.begins[piece + 1])
            into = view[(at - begin) * size : (stop - begin) * size]
            self.lines[piece].read(self.base + at - self.begins[piece], into)
            at = stop


@dataclass(frozen=True)
class ZeroTensor:
    dtype: str
    """Of the model that was trained."""
    shape: Shape
    planes: Mapping[str, Cut]
    """Of a trained parameter, in float32: MASTER and, if the optimizer has them, MOMENTS; of
    others one plane in `dtype`, under an empty name."""
    steps: int = 0
    """That the optimizer has made with it."""

    @property
    def is_trained(self) -> bool:
        return MASTER in self.planes


@dataclass(frozen=True)
class Group:
    """The trained parameters of an optimizer's parameter group."""

    names: list[str]
    options: dict[str, Any]


@dataclass
class ZeroDirectory:
    """A step that DeepSpeed has saved."""

    global_steps: int
    tensors: dict[str, ZeroTensor] = field(default_factory=dict)
    """By name, as in the model's state dict."""
    ties: dict[str, str] = field(default_factory=dict)
    """Further names of parameters."""
    groups: list[Group] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    """Keys of what is left out, such as the state of a scheduler."""
    foreign: str = ""
    """The names of state that is not AdamW's, if there is any: no tensor then has moments."""

    @classmethod
    def open(cls, path: Path) -> "ZeroDirectory":
        """Reads the pickles of a directory with `latest`, or of one step's.

        Raises:
            IntegrityError: a rank's file is missing, or is of another step.
            FormatError: DeepSpeed did not write it, or it is damaged.
            UsageError: it has experts or tensor-parallel ranks.
        """
        models, optimizers = _files_of(_step_of(path))
        first = _Rank.of(Archive.open(optimizers[0]))
        _require_ranks(optimizers, first.world, first.file)
        if first.stage == 3:
            _require_ranks(models, first.world, first.file)
        world = range(first.world)
        of_models = [Archive.open(models[rank]) for rank in (world if first.stage == 3 else (0,))]
        return directory_of(of_models, [Archive.open(optimizers[rank]) for rank in world])


def _step_of(path: Path) -> Path:
    latest = path / LATEST
    if not latest.is_file():
        return path
    tag = latest.read_text().strip()
    if tag in ("", ".", "..") or "/" in tag or "\0" in tag:
        malformed("it names no folder next to it", LATEST, got=ascii(tag))
    return path / tag


_Files = dict[int, Path]


def _files_of(step: Path) -> tuple[_Files, _Files]:
    """Files of models and of optimizers, by rank. `UsageError` if there are none, or others."""
    models: _Files = {}
    optimizers: _Files = {}
    for path in sorted(step.iterdir()):
        if EXPERT_FILE.fullmatch(path.name):
            _unsupported("experts that DeepSpeed distributes", path.name)
        for of, pattern in ((models, MODEL_FILE), (optimizers, OPTIMIZER_FILE)):
            found = pattern.fullmatch(path.name)
            if found is None:
                continue
            if int(found[2]) != 0:
                _unsupported("tensor-parallel ranks of DeepSpeed", path.name)
            of[int(found[1] or 0)] = path
    if 0 not in models or not optimizers:
        expected = "*_model_states.pt and *_optim_states.pt of ZeRO"
        what = "no checkpoint of DeepSpeed's ZeRO"
        raise refusal("UNSUPPORTED", what, file=step.name, expected=expected)
    if 0 not in optimizers:
        _missing(_name_like(optimizers, 0))
    return models, optimizers


def _require_ranks(files: _Files, world: int, by: str) -> None:
    for rank in range(world):
        if rank not in files:
            _missing(_name_like(files, rank))
    if len(files) != world:
        expected, got = f"{world} ranks, as {by} tells", f"{len(files)}"
        _other_step("there are files of more ranks", files[max(files)].name, expected, got)


def _name_like(files: _Files, rank: int) -> str:
    other, path = next(iter(files.items()))
    return path.name.replace(f"pp_rank_{other}_", f"pp_rank_{rank}_")


def _missing(name: str) -> NoReturn:
    malformed("the file of a rank is missing", name, "INTEGRITY")


def _other_step(what: str, file: str, expected: Any, got: Any) -> NoReturn:
    malformed(what, file, "INTEGRITY", expected=str(expected), got=str(got))


def _unsupported(what: str, file: str, **facts: str) -> NoReturn:
    raise refusal("UNSUPPORTED", what, file=file, **facts)


# ---- one file


class _Table:
    """A dict in a pickle. A lookup is a `FormatError` unless it finds the kind that is expected."""

    def __init__(self, value: Any, archive: Archive, version: Any = None) -> None:
        self._archive, self.file = archive, archive.path.name
        self.version = version
        if not isinstance(value, Pairs):
            malformed("DeepSpeed writes a dict here", self.file)
        self.values = value.by_name()

    @classmethod
    def of(cls, archive: Archive) -> "_Table":
        found = cls(archive.value(PICKLED), archive)
        found.version = found.values.get("ds_version")
        return found

    def unknown(self, key: str) -> NoReturn:
        """Refuses what DeepSpeed has in another form."""
        got = f"DeepSpeed {self.version}" if isinstance(self.version, str) else "no version"
        expected = "the form of DeepSpeed 0.19"
        malformed(f"{key!r} is missing or has an unknown form", self.file,
                  expected=expected, got=got)  # fmt: skip

    def table(self, key: str) -> "_Table":
        if not isinstance(self.values.get(key), Pairs):
            self.unknown(key)
        return _Table(self.values[key], self._archive, self.version)

    def maybe_table(self, key: str) -> "_Table | None":
        return None if self.values.get(key) is None else self.table(key)

    def entries(self, key: str) -> list[Any]:
        value = self.values.get(key)
        if not isinstance(value, list):
            self.unknown(key)
        return value

    def tables(self, key: str) -> "list[_Table]":
        values = self.entries(key)
        if not all(isinstance(value, Pairs) for value in values):
            self.unknown(key)
        return [_Table(value, self._archive, self.version) for value in values]

    def count(self, key: str) -> int:
        value = self.values.get(key)
        if type(value) is not int or value < 0:
            self.unknown(key)
        return value

    def line(self, key: str, value: Any) -> Line:
        try:
            return self._archive.line(value)
        except ValueError as error:
            malformed(f"{key!r}: {error}", self.file)

    def shape(self, key: str) -> Shape:
        value = self.values.get(key)
        if isinstance(value, Made) and value.kind == "torch Size" and len(value.args) == 1:
            value = value.args[0]
        if not is_shape(value):
            self.unknown(key)
        shape: Shape = value
        return shape


def _options_of(group: _Table) -> dict[str, Any]:
    """Numbers, texts, truth values, None, and lists of them."""
    names = [name for name in group.values if name not in ("params", "param_names", "step")]
    return {name: group.values[name] for name in names if _is_option(group.values[name])}


def _is_option(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_option, value))
    return value is None or isinstance(value, (bool, int, float, str))


@dataclass(frozen=True)
class _Flat:
    """A rank's part of a flat vector."""

    planes: dict[str, Line]
    steps: int
    foreign: str = ""
    """State that is not AdamW's."""


@dataclass(frozen=True)
class _Rank:
    """The file of an optimizer."""

    file: str
    stage: int
    world: int
    version: Any
    flats: list[_Flat]
    groups: list[tuple[int, dict[str, Any]]]
    """The number of flat vectors of each parameter group, and its options."""
    paddings: list[list[int]]
    """Of stages 1 and 2: behind each parameter of each group; empty: none."""
    others: list[str]

    @classmethod
    def of(cls, archive: Archive) -> "_Rank":
        whole = _Table.of(archive)
        of = whole.table("optimizer_state_dict")
        stage = of.values.get("zero_stage")
        if isinstance(stage, Made) and stage.kind == STAGE and len(stage.args) == 1:
            stage = stage.args[0]
        if type(stage) is not int or stage not in MASTERS:
            of.unknown("zero_stage")
        if "ds_zero_partition_groups" in of.values:
            _unsupported("experts that DeepSpeed distributes", of.file)
        groups, states = _base_state(of, BASE_STATE[stage])
        masters = of.entries(MASTERS[stage])
        if len(masters) != len(states):
            of.unknown(MASTERS[stage])
        flats = [_flat_of(of, *pair) for pair in zip(masters, states, strict=True)]
        others = [key for key in ("loss_scaler", "dynamic_loss_scale") if key in of.values]
        return cls(of.file, stage, _world_of(of), whole.version, flats, groups, _paddings_of(of),
                   others)  # fmt: skip


def _world_of(of: _Table) -> int:
    count = of.values.get("partition_count")
    counts = count if isinstance(count, list) else [count]
    if not counts or not all(type(one) is int and one > 0 for one in counts):
        of.unknown("partition_count")
    if min(counts) != max(counts):
        what = "parameter groups over different ranks"
        _unsupported(what, of.file, got=", ".join(map(str, counts)))
    world: int = counts[0]
    return world


def _paddings_of(of: _Table) -> list[list[int]]:
    paddings = of.values.get("param_alignment_paddings") or []
    is_known = isinstance(paddings, list) and all(isinstance(group, list) for group in paddings)
    if not is_known or not all(is_size(one) for group in paddings for one in group):
        of.unknown("param_alignment_paddings")
    known: list[list[int]] = paddings
    return known


_State = dict[str, Any]


def _base_state(of: _Table, key: str) -> tuple[list[tuple[int, dict[str, Any]]], list[_State]]:
    """The groups, and the state of each flat vector, with the step of its group where the vector
    has none."""
    if isinstance(of.values.get(key), list):  # elastic: a state per group
        states = [state.values for state in of.tables(key)]
        step = of.values.get("base_optimizer_state_step")
        return [(1, {}) for _ in states], [{"step": step} | state for state in states]
    base = of.table(key)
    state = base.values.get("state")
    by_id = {k: v for k, v in state.items if type(k) is int} if isinstance(state, Pairs) else {}
    groups, states = [], []
    for group in base.tables("param_groups"):
        ids = group.entries("params")
        groups.append((len(ids), _options_of(group)))
        for one in ids:
            found = by_id.get(one) if type(one) is int else None
            own = found.by_name() if isinstance(found, Pairs) else {}
            states.append({"step": group.values.get("step")} | own)
    return groups, states


def _flat_of(of: _Table, master: Any, state: _State) -> _Flat:
    """`state` has nothing but a step if the optimizer has made none."""
    planes = {MASTER: of.line(MASTER, master)}
    numel = planes[MASTER].numel
    foreign = ", ".join(sorted(state.keys() - {"step", *MOMENTS}))
    for name in MOMENTS if len(state) > 1 and not foreign else ():
        planes[name] = of.line(name, state.get(name))
        if planes[name].numel < numel:
            of.unknown(name)
    for name, line in planes.items():
        if line.dtype != "float32" or len(line.shape) != 1:
            got = f"{line.dtype} {[*line.shape]}"
            _unsupported("state that is no vector of float32", of.file, tensor=name, got=got)
    return _Flat(planes, _steps_of(of, state.get("step")) if len(planes) > 1 else 0, foreign)


def _steps_of(of: _Table, step: Any) -> int:
    if isinstance(step, Made):
        line = of.line("step", step)
        data = bytearray(line.item_bytes)
        if line.numel == 1:
            line.read(0, memoryview(data))
            try:
                step = number_of(line.dtype, data)
            except ValueError:
                of.unknown("step")
    if type(step) not in (int, float) or not 0 <= step < 1 << 53 or step != int(step):
        of.unknown("step")
    return int(step)


# ---- all files


def directory_of(of_models: Sequence[Archive], optimizers: Sequence[Archive]) -> ZeroDirectory:
    """From the files of models and optimizers, by rank; of stages 1 and 2 with the first model
    alone. As `ZeroDirectory.open`."""
    ranks = [_Rank.of(archive) for archive in optimizers]
    first, world = ranks[0], len(ranks)
    for rank in ranks:
        told = _in_common(rank)
        for (what, expected), (_, got) in zip(_in_common(first), told, strict=True):
            if got != expected:
                _other_step(f"it has other {what} than {first.file}", rank.file, expected, got)
    models = [_Table.of(archive) for archive in of_models]
    model = models[0]
    due = {"dp_world_size": world, "global_steps": model.count("global_steps")}
    for one in models:
        for key, expected in due.items():
            if one.count(key) != expected:
                _other_step(f"it has another {key}", one.file, expected, one.count(key))
    if model.count("mp_world_size") != 1:
        _unsupported("tensor-parallel ranks of DeepSpeed", model.file)
    others = [key for key, of in model.values.items() if key not in MODEL_KEYS and of is not None]
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


def _in_common(rank: _Rank) -> list[tuple[str, Any]]:
    return [
        ("stage", rank.stage), ("ranks", rank.world), ("version of DeepSpeed", rank.version),
        ("parameter groups", [count for count, _ in rank.groups]),
        ("state", [(*flat.planes,) for flat in rank.flats]),
        ("steps", [flat.steps for flat in rank.flats]),
    ]  # fmt: skip


def _ties_of(shared: _Table) -> dict[str, str]:
    for name, of in shared.values.items():
        if not isinstance(of, str):
            shared.unknown(name)
    return dict(shared.values)


def _require_complete(model: _Table, found: ZeroDirectory, left: Mapping[str, Any]) -> None:
    """Refuses a model without values of a name that it has."""
    for name, of in found.ties.items():
        if of not in found.tensors:
            malformed("a tie has no tensor", model.file, tensor=name)
    for name in left:
        malformed("the model lacks a trained parameter", model.file, tensor=name)
    buffers = model.entries("buffer_names")
    for name, tensor in found.tensors.items():
        is_placeholder = tensor.shape == (0,) and not tensor.is_trained and name not in buffers
        if is_placeholder:
            what = "the values of a frozen parameter were not saved"
            malformed(what, model.file, "INTEGRITY", tensor=name)


def _whole(line: Line) -> Cut:
    return Cut([line], (0, line.numel), 0, 0)


_Trained = tuple[str, tuple[Shape, dict[str, Cut], int]]


def _trained(model: _Table, ranks: Sequence[_Rank], into: list[Group]) -> Iterator[_Trained]:
    """Shape, planes and steps of each trained parameter, and `into` the groups."""
    first = ranks[0]
    shapes = model.tables("param_shapes")
    if len(shapes) != len(first.flats):
        model.unknown("param_shapes")
    flats = iter(shapes)
    for count, options in first.groups:
        names = [name for _ in range(count) for name in next(flats).values]
        into.append(Group(names, options))
    for number, of in enumerate(shapes):
        sizes = {name: of.shape(name) for name in of.values}
        own = [rank.flats[number] for rank in ranks]
        cuts = _equal_cuts if first.stage == 3 else _flat_cuts
        padding = first.paddings[number] if number < len(first.paddings) else [0] * len(sizes)
        if len(padding) != len(sizes):
            _other_step("padding", model.file, len(sizes), len(padding))
        for name, begins, at, base in cuts(sizes, own, padding, model):
            lines = {plane: [flat.planes[plane] for flat in own] for plane in own[0].planes}
            planes = {plane: Cut(of_ranks, begins, at, base) for plane, of_ranks in lines.items()}
            yield name, (sizes[name], planes, own[0].steps)


_Cuts = Iterator[tuple[str, Sequence[int], int, int]]


def _flat_cuts(
    sizes: Mapping[str, Shape], own: Sequence[_Flat], padding: Sequence[int], model: _Table
) -> _Cuts:
    """Of stages 1 and 2: (name, begins, at, base) as of `Cut`."""
    begins = [0, *accumulate(flat.planes[MASTER].numel for flat in own)]
    at = 0
    for (name, shape), more in zip(sizes.items(), padding, strict=True):
        yield name, begins, at, 0
        at += prod(shape) + more
    _require_filled(model, at, begins[-1])


def _equal_cuts(
    sizes: Mapping[str, Shape], own: Sequence[_Flat], padding: Sequence[int], model: _Table
) -> _Cuts:
    """Of stage 3."""
    base, world = 0, len(own)
    for name, shape in sizes.items():
        piece = -(-prod(shape) // world)
        yield name, _begins(piece, world), 0, base
        base += piece
    for flat in own:
        _require_filled(model, base, flat.planes[MASTER].numel)


def _begins(piece: int, world: int) -> Sequence[int]:
    return range(0, (world + 1) * piece, piece) if piece else (0,) * (world + 1)


def _require_filled(model: _Table, expected: int, got: int) -> None:
    if expected != got:
        what = "the flat vectors have other lengths than the parameters together"
        _other_step(what, model.file, f"{expected} elements", f"{got} elements")


def _frozen(models: Sequence[_Table]) -> Iterator[tuple[str, ZeroTensor]]:
    """The frozen parameters of stage 3, of which each rank has a piece."""
    shapes = models[0].maybe_table("frozen_param_shapes")
    if shapes is None:
        return
    fragments = [one.table("frozen_param_fragments") for one in models]
    for name in shapes.values:
        shape, world = shapes.shape(name), len(models)
        lines = [of.line(name, of.values.get(name)) for of in fragments]
        piece = -(-prod(shape) // world)
        for of, line in zip(fragments, lines, strict=True):
            if line.numel < piece or line.dtype != lines[0].dtype:
                _other_step("a frozen parameter has another length", of.file, piece, line.numel)
        cut = Cut(lines, _begins(piece, world), 0, 0)
        yield name, ZeroTensor(lines[0].dtype, shape, {"": cut})
