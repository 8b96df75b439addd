"""Reads the pickle of one file in a checkpoint directory of DeepSpeed's ZeRO."""

from dataclasses import dataclass
from typing import Any, NoReturn

from modicum.errors import UsageError, refusal
from modicum.imports.archives import Archive, Line, Shape, is_shape, is_size, number_of, strided
from modicum.imports.groups import options_in
from modicum.imports.pickles import MadeObject, Pairs, malformed
from modicum.upstream.deepspeed_checkpoint import BASE_STATE, MASTERS, PICKLED, STAGE, STAGES

MASTER = "master"
MOMENTS = ("exp_avg", "exp_avg_sq")
_LONGEST_FACT = 200


def missing(name: str) -> NoReturn:
    malformed("the file of a rank is missing", name, "INTEGRITY")


def other_step(what: str, file: str, expected: Any, got: Any, **facts: str) -> NoReturn:
    """Raises `IntegrityError`: the file does not belong to the others."""
    expected, got = (str(fact)[:_LONGEST_FACT] for fact in (expected, got))
    malformed(what, file, "INTEGRITY", **facts, expected=expected, got=got)


def unsupported(what: str, file: str, **facts: str) -> NoReturn:
    raise refusal("UNSUPPORTED", what, file=file, **facts)


class Table:
    """A dict in a pickle. Lookups raise `FormatError` if the value is not of the expected kind."""

    def __init__(self, value: Any, archive: Archive, version: Any = None) -> None:
        self._archive, self.file = archive, archive.path.name
        self.version = version
        if not isinstance(value, Pairs):
            malformed("the pickle is no dict", self.file)
        self.values = value.by_name()

    @classmethod
    def of(cls, archive: Archive) -> "Table":
        found = cls(archive.value(PICKLED), archive)
        found.version = found.values.get("ds_version")
        return found

    def unknown(self, key: str) -> NoReturn:
        """Raises `FormatError`: `key` is missing, or its value is not in DeepSpeed 0.19's form."""
        got = f"DeepSpeed {self.version}" if isinstance(self.version, str) else "no version"
        expected = "the form of DeepSpeed 0.19"
        malformed(f"{key!r} is missing or has an unknown form", self.file,
                  expected=expected, got=got)  # fmt: skip

    def table(self, key: str) -> "Table":
        if not isinstance(self.values.get(key), Pairs):
            self.unknown(key)
        return Table(self.values[key], self._archive, self.version)

    def maybe_table(self, key: str) -> "Table | None":
        return None if self.values.get(key) is None else self.table(key)

    def entries(self, key: str) -> list[Any]:
        value = self.values.get(key)
        if not isinstance(value, list):
            self.unknown(key)
        return value

    def tables(self, key: str) -> "list[Table]":
        values = self.entries(key)
        if not all(isinstance(value, Pairs) for value in values):
            self.unknown(key)
        return [Table(value, self._archive, self.version) for value in values]

    def count(self, key: str) -> int:
        value: Any = self.values.get(key)
        if not is_size(value):
            self.unknown(key)
        count: int = value
        return count

    def line(self, key: str, value: Any) -> Line:
        try:
            return self._archive.line(value)
        except UsageError as error:
            raise strided(self.file, str(error.got), tensor=key) from None
        except ValueError as error:
            malformed(f"{key!r}: {error}", self.file)

    def shape(self, key: str) -> Shape:
        value: Any = self.values.get(key)
        if isinstance(value, MadeObject) and value.kind == "torch Size" and len(value.args) == 1:
            value = value.args[0]
        if not is_shape(value):
            self.unknown(key)
        shape: Shape = value
        return shape


@dataclass(frozen=True)
class FlatPart:
    """A rank's part of a flat vector (see zero.py)."""

    planes: dict[str, Line]
    """MASTER, and MOMENTS if the optimizer has made a step and has no foreign state."""
    steps: int
    foreign: str = ""
    """Names of state that AdamW does not have."""


@dataclass(frozen=True)
class Rank:
    """A rank's file of the optimizer."""

    file: str
    stage: int
    world: int
    version: Any
    flats: list[FlatPart]
    groups: list[tuple[int, dict[str, Any]]]
    """The number of flat vectors of each parameter group, and its options."""
    paddings: list[list[int]]
    """Stages 1 and 2: the padding after each parameter of each group; empty: none."""
    others: list[str]

    @classmethod
    def of(cls, archive: Archive) -> "Rank":
        whole = Table.of(archive)
        state = whole.table("optimizer_state_dict")
        stage = state.values.get("zero_stage")
        if stage is None and MASTERS[1] in state.values:
            what = (
                "the state of DeepSpeed's BF16_Optimizer, which ZeRO-1 has with bf16 and float32 "
            )
            what += "gradients"
            unsupported(what, state.file, expected="another data_types.grad_accum_dtype, or ZeRO-2")
        if isinstance(stage, MadeObject) and stage.kind == STAGE and len(stage.args) == 1:
            recorded = stage.args[0]
            stage = STAGES.get(recorded) if isinstance(recorded, str) else recorded
        if type(stage) is not int or stage not in MASTERS:
            state.unknown("zero_stage")
        if "ds_zero_partition_groups" in state.values:
            unsupported("experts that DeepSpeed distributes", state.file)
        groups, states = _base_state(state, BASE_STATE[stage])
        masters = state.entries(MASTERS[stage])
        if len(masters) != len(states):
            state.unknown(MASTERS[stage])
        flats = [_flat_of(state, *pair) for pair in zip(masters, states, strict=True)]
        others: list[str] = [
            key for key in ("loss_scaler", "dynamic_loss_scale") if key in state.values
        ]
        return cls(state.file, stage, _world_of(state), whole.version, flats, groups,
                   _paddings_of(state), others)  # fmt: skip


def _world_of(table: Table) -> int:
    count: Any = table.values.get("partition_count")
    counts: list[Any] = count if isinstance(count, list) else [count]
    if not counts or not all(type(number) is int and number > 0 for number in counts):
        table.unknown("partition_count")
    if min(counts) != max(counts):
        what = "parameter groups over different ranks"
        unsupported(what, table.file, got=", ".join(map(str, counts)))
    world: int = counts[0]
    return world


def _paddings_of(table: Table) -> list[list[int]]:
    paddings = table.values.get("param_alignment_paddings") or []
    is_known = isinstance(paddings, list) and all(isinstance(group, list) for group in paddings)
    if not is_known or not all(is_size(padding) for group in paddings for padding in group):
        table.unknown("param_alignment_paddings")
    known: list[list[int]] = paddings
    return known


_State = dict[str, Any]


def _base_state(table: Table, key: str) -> tuple[list[tuple[int, dict[str, Any]]], list[_State]]:
    """The groups as in `Rank.groups`, and the state of each flat vector, as values by name. A
    vector without a step count gets that of its group."""
    if isinstance(table.values.get(key), list):  # elastic checkpoint: one state per group
        states = [state.values for state in table.tables(key)]
        step = table.values.get("base_optimizer_state_step")
        return [(1, {}) for _ in states], [{"step": step} | state for state in states]
    base = table.table(key)
    state = base.values.get("state")
    # Integers beyond the limit of sizes may all have the same hash.
    by_id = {k: v for k, v in state.items if is_size(k)} if isinstance(state, Pairs) else {}
    groups, states = [], []
    for group in base.tables("param_groups"):
        ids = group.entries("params")
        options = {name: value for name, value in group.values.items() if name != "step"}
        groups.append((len(ids), options_in(options)))
        for index in ids:
            found = by_id.get(index) if is_size(index) else None
            entries = found.by_name() if isinstance(found, Pairs) else {}
            states.append({"step": group.values.get("step")} | entries)
    return groups, states


def _flat_of(table: Table, master: Any, state: _State) -> FlatPart:
    """The flat vector with this state. Before the optimizer's first step the state has at most a
    step count."""
    planes = {MASTER: table.line(MASTER, master)}
    numel = planes[MASTER].numel
    foreign = ", ".join(sorted(state.keys() - {"step", *MOMENTS}))
    for name in MOMENTS if len(state) > 1 and not foreign else ():
        planes[name] = table.line(name, state.get(name))
        if planes[name].numel < numel:
            table.unknown(name)
    for name, line in planes.items():
        if line.dtype != "float32" or len(line.shape) != 1:
            got = f"{line.dtype} {[*line.shape]}"
            unsupported("state that is no vector of float32", table.file, tensor=name, got=got)
    return FlatPart(planes, _steps_of(table, state.get("step")) if len(planes) > 1 else 0, foreign)


def _steps_of(table: Table, step: Any) -> int:
    """The step count from `step`, a number or a tensor of one element. It must be below 2^53, up to
    which float64 is exact."""
    if isinstance(step, MadeObject):
        line = table.line("step", step)
        data = bytearray(line.item_bytes)
        if line.numel == 1:
            line.read(0, memoryview(data))
            try:
                step = number_of(line.dtype, data)
            except ValueError:
                table.unknown("step")
    if type(step) not in (int, float) or not 0 <= step < 1 << 53 or step != int(step):
        table.unknown("step")
    return int(step)
