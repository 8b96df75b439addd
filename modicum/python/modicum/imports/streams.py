"""Writes a saved checkpoint of tensors that are not in memory: this process
reads their elements from other files while it writes them. Without torch."""

import json
import os
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modicum import _modicum
from modicum.errors import failure
from modicum.imports.report import ImportReport
from modicum.memory.recording import reset_peak
from modicum.recipes.dtypes import FLOATS
from modicum.recipes.nodes import Node, caller

STATE_FILE = "optimizer/state.json"
_MIB = 1 << 20

Source = str | os.PathLike[str] | None
Size = int | str
DescribedTensors = Mapping[str, tuple[str, tuple[int, ...]]]
"""(dtype, shape) of tensors by name."""
Read = Callable[[str, int, memoryview], None]
"""Called with a tensor's name, its first element to read, and a view to fill with elements; on any
thread."""


@dataclass(frozen=True)
class Contents:
    """What a checkpoint gets."""

    model: _modicum.TensorsToSave
    state: _modicum.TensorsToSave | None = None
    """The tensors of the optimizer's state."""
    facts: str = ""
    """The text of optimizer/state.json; empty: there is none."""
    texts: list[tuple[str, str]] = field(default_factory=list)
    """Further files: (path in the checkpoint, text)."""
    left_out: list[str] = field(default_factory=list)


def streams_of(
    tensors: DescribedTensors, read: Read, *,
    ties: Mapping[str, str] | None = None, source: Source = None, dtype: str | None = None,
) -> _modicum.TensorsToSave:  # fmt: skip
    """Tensors with these names, dtypes and shapes, which `read` reads while they are written.

    Args:
        ties: for each further name of a tensor its name in `tensors`. Further names get no bytes in
            files.
        source: a checkpoint of the same model, whose division into files, config and tokenizer the
            checkpoint gets.
        dtype: the dtype in the files of tensors that can be cast; None: as read.
    """
    checkpoint = _modicum.open_checkpoint(source)
    recipe = _modicum.make_recipe(checkpoint, _recipe_text(checkpoint.stored, tensors, ties or {}))
    names = [target["name"] for target in recipe.targets]
    layout = _modicum.make_layout(recipe, shardings=[((1,), ())], sharding_of=[0] * len(names))
    loaded = _modicum.make_plan(recipe, layout, destinations=["copy"] * len(names))
    plan = _modicum.make_save_plan(loaded, dtype=dtype, copies_unused=False)

    def fetch(target: int, first: int, view: memoryview) -> None:
        read(names[target], first, view)

    return _modicum.TensorsToSave(plan, fetch=fetch)


def _recipe_text(
    stored: Mapping[str, Any], tensors: DescribedTensors, ties: Mapping[str, str]
) -> str:
    """A recipe.json of the tensors: those that the source stores, too, go into its files."""

    def node(name: str, dtype: str, shape: tuple[int, ...]) -> Node:
        has, stored_shape = stored.get(name, ("", ()))
        is_castable = dtype in FLOATS and has in FLOATS
        if (*stored_shape,) != shape or not (is_castable or has == dtype):
            return caller(dtype, [*shape])
        cast = {"dtype": dtype} if has != dtype else {}
        return {"op": "stored", "name": name, **cast}

    targets = {name: node(name, *described) for name, described in tensors.items()}
    used = {target["name"] for target in targets.values() if target["op"] == "stored"}
    targets |= {name: {"op": "alias", "of": original} for name, original in ties.items()}
    return json.dumps({"targets": targets, "unused": sorted(stored.keys() - used)})


def _threads() -> int:
    return max(1, _modicum.granted_cpus())


def memory_before() -> list[Any]:
    """[bytes that this process holds, bytes that it may still allocate, the name of the limit that
    determines the latter]. Also resets VmHWM, from which the peak of the import is read."""
    reset_peak()
    return [_modicum.process_memory()["held_bytes"], *_modicum.available_memory()]


# ---- the checkpoint


def write_step(
    root: Path, step: int, contents: Contents, budget: Size | None, kind: str
) -> ImportReport:
    """Writes a checkpoint, which becomes visible completely or not at all.

    Raises:
        BudgetError: it does not fit; nothing was written.
        IoError: a file can't be written; or CONFLICT: an intact checkpoint has this number.
    """
    began = time.monotonic()
    texts = [*contents.texts]
    if contents.facts and contents.state is None:  # numbers alone
        texts.append((STATE_FILE, contents.facts))
    parts = _modicum.SaveParts(contents.model, contents.state, contents.facts)
    parts.require_recordable(texts, [])
    promised, limit = _promised(parts, budget)
    damaged = _set_damaged_aside(root, step)
    folders = ["optimizer"] if contents.facts or texts else []
    saving = _modicum.CheckpointSave(str(root), step, folders)
    try:
        directory = str(Path(saving.directory).resolve())
        partial = _modicum.PartialCheckpoint(directory, saving.point)
        ledger = _modicum.Ledger(limit)
        written = parts.write(0, _modicum.Board(), ledger, partial, threads=_threads())
        published = saving.publish(parts, more=texts)
    finally:
        saving.discard()
    messages = [*published["warnings"], *(old_step.pop("warning") for old_step in damaged)]
    for warning in messages:
        warnings.warn(f"modicum: {warning}", stacklevel=3)
    return ImportReport(
        step=step,
        path=published["path"],
        kind=kind,
        written_bytes=written["written_bytes"] + published["written_bytes"],
        elapsed_s=time.monotonic() - began,
        durable=published["durable"],
        promised_bytes=promised,
        held_bytes=_modicum.process_memory()["peak_bytes"],
        left_out=sorted({*contents.model.plan.left_out, *contents.left_out}),
        damaged=damaged,
        warnings=messages,
    )


def _promised(parts: _modicum.SaveParts, budget: Size | None) -> tuple[int, int]:
    """(bytes of the process at its peak, limit of the ledger). The process is measured here: names
    and places of many tensors are Python objects of unknown size. The plans count twice: they are
    held already, and the save charges them."""
    held_bytes = parts.held(_threads())
    before, available, source = memory_before()
    baseline = -(-before // _MIB) * _MIB
    allowed: int | None = available + baseline
    if budget not in (None, "auto"):
        allowed, source = _modicum.parse_size(budget) if budget != "none" else None, "argument"
    (promise,) = _modicum.save_promise(
        held_bytes, [baseline], ranks_per_node=1, budget=allowed, budget_source=source
    )
    return promise


def _set_damaged_aside(root: Path, step: int) -> list[dict[str, Any]]:
    """If the root has a damaged checkpoint of this number, renames it. Returns what
    `_modicum.set_aside` returns; an empty list if there is none. Raises CONFLICT if the checkpoint
    is intact."""
    found = _modicum.examine_checkpoint(str(root), step)
    if found is None:
        return []
    damage = found["reason"] or _modicum.checkpoint_fault(found["path"], 0, 1, _modicum.Board())
    if not damage:
        what = "the checkpoint has been saved already"
        raise failure("CONFLICT", what, file=Path(found["path"]).name)
    return [_modicum.set_aside(str(root), step, damage, found["uuid"])]
