"""What a load is meant to do: which tensors of a model get values, and what these are made of."""

import warnings
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modicum import _modicum
from modicum.errors import refusal
from modicum.memory.recording import reset_peak
from modicum.recipes import recipe_for
from modicum.recipes.structure import Structure, structure_of
from modicum.torch.ranks.group import Ranks
from modicum.torch.shards.tensors import ModelTensor, tensors_of
from modicum.upstream.torch_fsdp import Managed, check_pinning
from modicum.upstream.wrappers import canonical

Source = str | Path | None


@dataclass(frozen=True)
class Model:
    """The model that gets values, walked once."""

    module: nn.Module
    structure: Structure
    tensors: dict[str, ModelTensor]
    """Those that a load may fill, by canonical name."""
    buffers_follow_fsdp: bool
    """Buffers on meta go where FSDP2 computes, also where it offloads its parameters."""

    @classmethod
    def of(
        cls, module: nn.Module, *, scratch: bool = False, buffers_follow_fsdp: bool = False
    ) -> "Model":
        """`scratch`: buffers that no state dict has may be filled, too."""
        if not isinstance(module, nn.Module):
            expected, got = "a torch.nn.Module", type(module).__name__
            raise refusal("USAGE", "model", expected=expected, got=got)
        structure = structure_of(module)
        tensors = tensors_of(module, structure, scratch=scratch)
        model = cls(module, structure, tensors, buffers_follow_fsdp)
        check_pinning(model.managed)
        return model

    @cached_property
    def managed(self) -> dict[str, Managed]:
        """What FSDP2 says of its parameters, by name."""
        return {name: of.managed for name, of in self.tensors.items() if of.managed}

    def facts(self) -> dict[str, str]:
        """What a recipe for this model depends on, in words; as for `Ranks.agree_on`."""
        facts: dict[str, str] = {}
        first: dict[int, str] = {}
        for name, of in self.tensors.items():
            fact = f"{of.tensor.dtype} {list(of.tensor.shape)}"
            fact += " on meta" if of.tensor.is_meta else " with values"
            tied = first.setdefault(id(of.tensor), name)
            facts[f"tensor {name}"] = fact + (f", tied to {tied}" if tied != name else "")
        return facts


@dataclass(frozen=True)
class Goal:
    """A source, and a recipe that makes tensors of the model of it; the same on every rank."""

    checkpoint: _modicum.Checkpoint
    recipe: _modicum.Recipe
    memories: list[Any]
    """By rank, what `look_at_memory` saw there before the load."""
    callers: list[str]
    """The names that the model's own rules make."""
    only_rank_0: bool = False
    """The source is rank 0's memory."""

    @cached_property
    def targets(self) -> list[dict[str, Any]]:
        return self.recipe.targets

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {target["name"]: getattr(torch, target["dtype"]) for target in self.targets}


def goal_of_source(
    model: Model, ranks: Ranks, source: Source, how: Mapping[str, Any], unwritten: Collection[str]
) -> Goal:
    """A checkpoint into the model.

    Args:
        source: None: nothing is stored, and all is initialised.
        how: dtype, keep_fp32, missing and unexpected, as of `recipe_for`.
        unwritten: names that have memory and no values.
    """
    checkpoint = _modicum.open_checkpoint(None if source is None else Path(source))
    if ranks.rank == 0:
        for warning in checkpoint.warnings:
            warnings.warn(f"modicum: {warning}", stacklevel=3)
    how = {**how, "missing": "init"} if source is None else how
    if how["dtype"] is not None and not isinstance(how["dtype"], torch.dtype):
        expected = "a torch.dtype, such as torch.bfloat16, or None"
        raise refusal("USAGE", "dtype", expected=expected, got=repr(how["dtype"]))
    facts = {"the size of the checkpoint": f"{checkpoint.bytes} bytes"}
    facts |= {f"argument {name}": said(value) for name, value in how.items()}
    ranks.agree_on(facts | model.facts())
    present = [
        name
        for name, of in model.tensors.items()
        if not of.tensor.is_meta and name not in unwritten
    ]

    def make() -> list[Any]:
        stored, structure = checkpoint.stored, model.structure
        made = recipe_for(model.module, stored, structure=structure, present=present, **how)
        return [made.text(callers=True), made.callers]

    # Asking transformers takes seconds of every core; of equal questions one is enough. What it
    # leaves in rank 0's memory is not the load's; the other ranks look while it asks.
    (text, callers), memories = ranks.once(make, look_at_memory)
    return Goal(checkpoint, _modicum.make_recipe(checkpoint, text), memories, callers)


def said(argument: Any) -> str:
    """An argument in words: the same on every rank, although each orders a set in its own way."""
    return repr(sorted(argument) if isinstance(argument, Set) else argument)


def look_at_memory() -> list[Any]:
    """What this process holds before the load, what is left to it, and who says so."""
    reset_peak()
    return [_modicum.process_memory()["held_bytes"], *_modicum.available_memory()]


def refuse_gaps(model: Model, made: Collection[str], *, buffers: bool = True) -> None:
    """Every element has a source, or nothing is loaded.

    Args:
        made: the names that get values.
        buffers: whether buffers that no state dict has are refused, too.
    """
    for name, of in model.tensors.items():
        if of.tensor.is_meta and name not in made:
            raise refusal("MISMATCH", "nothing makes this tensor", tensor=name)
    for fqn, buffer in model.module.named_buffers() if buffers else ():
        if buffer.is_meta and canonical(fqn) not in made:
            what = "nothing computes this buffer: build the model under empty_parameters()"
            raise refusal("UNSUPPORTED", what, tensor=canonical(fqn))
