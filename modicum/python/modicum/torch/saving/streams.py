"""Saves a step (a saved checkpoint directory) of tensors that are not in memory: one process reads
their elements, such as from other files, while it writes them."""

import json
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace

from modicum import _modicum
from modicum.recipes.dtypes import FLOATS
from modicum.recipes.nodes import Node, caller
from modicum.torch.loading.goal import Goal, memory_before
from modicum.torch.ranks.cpus import cpus_of_rank
from modicum.torch.ranks.group import Ranks
from modicum.torch.saving.planning import Ask, Parts, planned_of
from modicum.torch.saving.report import Saved
from modicum.torch.saving.running import run
from modicum.torch.saving.weights import Form, Writing, save_plan_of
from modicum.torch.saving.writing import Flight
from modicum.torch.shards.placements import Sharding, layout_of

Source = str | os.PathLike[str] | None
Read = Callable[[str, int, memoryview], None]
"""Called with a tensor's name, its first element to read, and a view to fill with elements."""


def goal_of_tensors(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], ties: Mapping[str, str], source: Source
) -> Goal:
    """The goal of files with tensors of these names, dtypes and shapes.

    Args:
        ties: for each further name of a tensor its name in `tensors`. Further names get no bytes in
            files.
        source: a checkpoint of the same model, whose division into files, config and tokenizer the
            step gets.
    """
    checkpoint = _modicum.open_checkpoint(source)
    stored = checkpoint.stored

    def node(name: str, dtype: str, shape: tuple[int, ...]) -> Node:
        has, of = stored.get(name, ("", ()))
        is_castable = dtype in FLOATS and has in FLOATS
        if (*of,) != shape or not (is_castable or has == dtype):
            return caller(dtype, [*shape])
        cast = {"dtype": dtype} if has != dtype else {}
        return {"op": "stored", "name": name, **cast}

    targets = {name: node(name, *of) for name, of in tensors.items()}
    used = {of["name"] for of in targets.values() if of["op"] == "stored"}
    targets |= {name: {"op": "alias", "of": of} for name, of in ties.items()}
    text = json.dumps({"targets": targets, "unused": sorted(stored.keys() - used)})
    recipe = _modicum.make_recipe(checkpoint, text)
    return Goal(checkpoint, recipe, [memory_before()], [], text=text)


def streamed(recipe: _modicum.Recipe, form: Form, read: Read) -> Writing:
    """The `Writing` of a recipe's targets, whose elements `read` provides; it is called on any
    thread."""
    names = [target["name"] for target in recipe.targets]
    loaded = _modicum.make_plan(
        recipe,
        layout_of(recipe, [Sharding((1,), ())] * len(names), 1),
        destinations=["copy"] * len(names),
        staging=form.staging,
    )
    plan = save_plan_of(loaded, form)
    fetch_bytes = plan.fetching_bytes(cpus_of_rank(1))
    return Writing(plan, recipe, [], lambda t, at, view: read(names[t], at, view), fetch_bytes)


def save_streams(ask: Ask, goal: Goal, parts: Parts) -> Saved:
    """Saves the parts as a step from this process alone. Raises `BudgetError` or `IoError`."""
    flight, ranks = Flight(), Ranks(0, 1)
    # Memory is measured again: names and places of many tensors are Python objects of unknown size.
    # The plans count twice: they are held already, and the save charges them.
    goal = replace(goal, memories=[memory_before()])
    try:
        report = run(planned_of(ask, goal, parts, ranks), ranks, flight)
    finally:
        flight.end()
    for warning in report.warnings:
        warnings.warn(f"modicum: {warning}", stacklevel=4)
    return report
