"""`convert`: writes a directory of torch.distributed.checkpoint as a step (a saved checkpoint)."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from modicum import _modicum
from modicum.errors import refusal
from modicum.imports.archives import number_of
from modicum.imports.dcp import Directory, Place
from modicum.torch.saving.planning import Ask, Parts, root_of, state_of
from modicum.torch.saving.report import Saved
from modicum.torch.saving.state_dicts import flat_key, not_under_one_key
from modicum.torch.saving.streams import goal_of_tensors, save_streams, streamed
from modicum.torch.saving.tensor_state import text
from modicum.torch.saving.weights import Form, Writing

Size = int | str
Source = str | os.PathLike[str]


def convert(
    directory: Source, root: Source, *,
    step: int, source: Source | None = None, optimizer: str | None = None,
    dtype: torch.dtype | None = None, shard_size: Size | None = None,
    ledger: _modicum.Ledger | None = None, budget: Size | None = None, staging: Size | None = None,
) -> Saved:  # fmt: skip
    """Converts a directory of torch.distributed.checkpoint's FileSystemWriter to a step: the model
    as Hugging Face files under the names of the state dict, and the state of its optimizer.

    Runs in one process and streams through staging: no complete tensor is in memory. No pickle is
    executed: names, shapes and places in `.metadata` and in the archives are read as data, and a
    name that torch does not write there is refused. Values other than tensors, such as the options
    of parameter groups, are arbitrary pickles: they are left out and reported.

    Args:
        directory: a directory with `.metadata`, written by `torch.distributed.checkpoint.save` or
            by accelerate (`pytorch_model_fsdp_0`).
        root: the directory of all steps.
        step: the new step's number.
        source: a checkpoint of the model, whose config and tokenizer the step gets.
        optimizer: the name of the optimizer's class in torch.optim, such as "AdamW"; without it
            `modicum.torch.resume` does not accept the state.
        dtype, shard_size, ledger, budget, staging: as for `save`.

    Returns:
        The report, as from `save`. Its `left_out` has the keys of values that were left out.

    Raises:
        FormatError: the directory was not written by torch, or is damaged.
        IntegrityError: bytes that are read differ from the CRC-32 in their file.
        UsageError: the directory has the tensors of several models, or of none; or a number of the
            optimizer's state has another dtype than float32, float64, int32 and int64.
        BudgetError, IoError: as for `save`.
    """
    opened = Directory.open(Path(directory))
    model, state = _parts_of(opened)
    opened.compare()
    form = Form(dtype, "drop", shard_size, staging, adapters=False)
    ask = Ask(root=root_of(root), step=step, keep=None, form=form, budget=budget, extra=None,
              ledger=ledger or _modicum.Ledger(), per_rank=None)  # fmt: skip
    tensors = {n: (opened.tensors[k].dtype, opened.tensors[k].shape) for n, k in model.items()}
    goal = goal_of_tensors(tensors, {}, source)

    def read(name: str, first: int, view: memoryview) -> None:
        opened.read(model[name], first, view)

    writing = streamed(goal.recipe, form, read)
    texts: list[tuple[str, str]] = []
    to_write = None
    if state:
        to_write = state_of(_state_of(opened, model, state, optimizer, form), texts)
    report = save_streams(ask, goal, Parts(writing, to_write, texts))
    return replace(report, left_out=sorted(opened.others))


def _parts_of(opened: Directory) -> tuple[dict[str, str], dict[tuple[str, str], str]]:
    """The directory's keys of the model's tensors, by name; and of the optimizer's tensors, by
    (parameter, key)."""
    places: dict[str, Place] = {key: opened.places.get(key, (key,)) for key in opened.tensors}
    # The path of an optimizer's tensor has "state" before the parameter's name and a key.
    state = {key: place for key, place in places.items() if "state" in place[:-2]}
    model = {key: place for key, place in places.items() if key not in state}
    if state and not model:
        expected = "the model's directory, such as accelerate's pytorch_model_fsdp_0"
        raise refusal(
            "UNSUPPORTED", "the directory has no model", expected=expected,
            got="optimizer state alone",
        )  # fmt: skip
    # The last component of a path, or the last two, name the tensor; those before are the prefix.
    for what, of, ending in (("model", model, 1), ("optimizer", state, 2)):
        prefixes = {flat_key(place[:-ending]) for place in of.values()}
        if len(prefixes) > 1 or (not prefixes and what == "model"):
            raise not_under_one_key(what, prefixes)
    named = {str(place[-1]): key for key, place in model.items()}
    return named, {(str(p[-2]), str(p[-1])): key for key, p in state.items()}


def _state_of(
    opened: Directory,
    model: dict[str, str],
    state: dict[tuple[str, str], str],
    optimizer: str | None,
    form: Form,
) -> tuple[Writing | None, str]:
    trained = {fqn: opened.tensors[model[fqn]].dtype for fqn, _ in state if fqn in model}
    form.require_exact(trained.items())
    keys: dict[str, str] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for (fqn, name), key in state.items():
        of = opened.tensors[key]
        own = numbers.setdefault(fqn, {})
        if of.shape:
            keys[f"{fqn}.{name}"] = key
        else:
            own[name] = [of.dtype, _number(opened, key), []]
    facts = text("torch" if optimizer is None else f"torch.{optimizer}", numbers)
    if not keys:
        return None, facts
    tensors = {n: (opened.tensors[k].dtype, opened.tensors[k].shape) for n, k in keys.items()}
    recipe = goal_of_tensors(tensors, {}, None).recipe

    def read(name: str, first: int, view: memoryview) -> None:
        opened.read(keys[name], first, view)

    return streamed(recipe, Form(staging=form.staging), read), facts


def _number(opened: Directory, key: str) -> float | int:
    of = opened.tensors[key]
    data = bytearray(of.item_bytes)
    opened.read(key, 0, memoryview(data))
    try:
        return number_of(of.dtype, data)
    except ValueError:
        what, expected = "the dtype of a number", "float32, float64, int32 or int64"
        raise refusal("UNSUPPORTED", what, tensor=key, expected=expected, got=of.dtype) from None
