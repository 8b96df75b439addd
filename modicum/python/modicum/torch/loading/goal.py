"""The goal of a load: a checkpoint, and the recipe that makes the model's tensors from it."""

import json
import warnings
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modicum import _modicum
from modicum.errors import counted, refusal
from modicum.memory.recording import reset_peak
from modicum.options import dtype_text
from modicum.recipes import Recipe
from modicum.recipes.nodes import sources_of, stored_under
from modicum.recipes.recipe import build_recipe, text_with_callers, with_dtypes_of
from modicum.recipes.structure import Structure, structure_of
from modicum.torch.ranks.group import Ranks
from modicum.torch.shards.tensors import ModelTensor, tensors_of
from modicum.upstream.torch_fsdp import ManagedParameter, check_pinning, reshard
from modicum.upstream.wrappers import canonical
from modicum.walk.arguments import path_of

Source = str | Path | None


@dataclass(frozen=True)
class Model:
    """A model to load or save, and its tensors, collected once."""

    module: nn.Module
    structure: Structure
    tensors: dict[str, ModelTensor]
    """The tensors that a load may fill, by canonical name."""
    buffers_follow_fsdp: bool
    """Whether buffers on meta go to the device that FSDP2 computes on, even with CPU offloading."""

    @classmethod
    def of(
        cls,
        module: nn.Module,
        *,
        adapter: str | None = None,
        originals: bool = False,
        scratch: bool = False,
        buffers_follow_fsdp: bool = False,
        reshards: bool = False,
    ) -> "Model":
        """Collects the model's tensors.

        Args:
            adapter: the adapter into which an adapter's file is loaded; None: the only one.
            originals: whether the load may also fill the original rows that PEFT keeps for its
                trainable tokens.
            scratch: whether the load may also fill non-persistent buffers.
            buffers_follow_fsdp: see the attribute.
            reshards: whether FSDP2 first frees gathered parameters; otherwise they are refused.
        """
        if not isinstance(module, nn.Module):
            expected, got = "a torch.nn.Module", type(module).__name__
            raise refusal("USAGE", "model", expected=expected, got=got)
        if reshards:
            reshard(module)
        structure = structure_of(module, adapter)
        if originals:
            resized = structure.rows.keys() & structure.scratch.keys()
            structure.members.update({name: structure.scratch.pop(name) for name in resized})
        tensors = tensors_of(module, structure, scratch=scratch)
        model = cls(module, structure, tensors, buffers_follow_fsdp)
        check_pinning(model.managed)
        return model

    @cached_property
    def managed(self) -> dict[str, ManagedParameter]:
        """FSDP2's parameters, by name."""
        return {name: entry.managed for name, entry in self.tensors.items() if entry.managed}

    @cached_property
    def names(self) -> dict[int, str]:
        """By id of a tensor: its name in files of optimizer state, the first of tied names."""
        names: dict[int, str] = {}
        for name, entry in self.tensors.items():
            names.setdefault(id(entry.tensor), name)
        return names

    def facts(self) -> dict[str, str]:
        """For `Ranks.agree_on`: the facts about tensors that must be equal on all ranks, since they
        share one recipe."""
        facts: dict[str, str] = {}
        first: dict[int, str] = {}
        for name, entry in self.tensors.items():
            fact = f"{entry.tensor.dtype} {list(entry.tensor.shape)}"
            fact += " on meta" if entry.tensor.is_meta else " with values"
            tied = first.setdefault(id(entry.tensor), name)
            if tied != name:
                fact += f", tied to {tied} as by tie_weights()"
            facts[f"tensor {name}"] = fact
        return facts


@dataclass(frozen=True)
class Goal:
    """A checkpoint, and the recipe by which the model's tensors are made from it; equal on every
    rank."""

    checkpoint: _modicum.Checkpoint
    recipe: _modicum.Recipe
    memories: list[Any]
    """The results of `memory_before` of all ranks, by rank."""
    callers: list[str]
    """The names of tensors that are not stored and that the model's own rules make, in the order of
    the recipe's nodes `caller`."""
    grown: dict[str, int] = field(default_factory=dict)
    """The stored number of rows, for each tensor that has another number of rows in the model."""
    norms: dict[str, str] = field(default_factory=dict)
    """For each tensor of row norms (DoRA's magnitude) the name of its weight."""
    only_rank_0: bool = False
    """Whether the source is rank 0's memory."""
    text: str = ""
    """The text of recipe.json; empty for a goal from rank 0's memory."""

    def text_without(self, names: Collection[str]) -> str:
        """The text of recipe.json without the targets `names`."""
        document = json.loads(self.text)
        kept = {n: node for n, node in document["targets"].items() if n not in names}
        return json.dumps(document | {"targets": kept}, separators=(",", ":"), ensure_ascii=False)

    @cached_property
    def targets(self) -> list[dict[str, Any]]:
        return self.recipe.targets

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {target["name"]: getattr(torch, target["dtype"]) for target in self.targets}


def goal_of_source(
    model: Model,
    ranks: Ranks,
    source: Source,
    arguments: Mapping[str, Any],
    unwritten: Collection[str],
) -> Goal:
    """The goal of loading a checkpoint into the model. Collective.

    Args:
        source: None: all tensors are initialised.
        arguments: those of `build_recipe` (dtype, missing, ...); and `recipe`, which if not None is
            used instead of making one.
        unwritten: names of tensors that have memory but no values, as after `to_empty()`.
    """
    checkpoint = _modicum.open_checkpoint(None if source is None else path_of("source", source))
    if ranks.rank == 0:
        for warning in checkpoint.warnings:
            warnings.warn(f"modicum: {warning}", stacklevel=3)
    arguments = {**arguments, "missing": "init"} if source is None else {**arguments}
    caller_recipe: Recipe | None = arguments.pop("recipe", None)
    arguments["dtype"] = dtype_text(arguments["dtype"])
    facts = {"the size of the checkpoint": f"{checkpoint.bytes} bytes"}
    facts |= {f"argument {name}": _repr_of(value) for name, value in arguments.items()}
    facts["argument recipe"] = "" if caller_recipe is None else text_with_callers(caller_recipe)
    ranks.agree_on(facts | model.facts())
    present = [
        name
        for name, entry in model.tensors.items()
        if not entry.tensor.is_meta and name not in unwritten
    ]

    def make() -> list[Any]:
        stored, structure = checkpoint.stored, model.structure
        if caller_recipe is not None:
            recipe = with_dtypes_of(caller_recipe, structure)
        else:
            recipe = build_recipe(
                model.module, stored, structure=structure, present=present, **arguments
            )
            _warn_of_names(recipe, stored, model)
        return [text_with_callers(recipe), list(recipe.missing), recipe.grown, recipe.norms]

    # Only rank 0 makes the recipe, which takes transformers seconds of CPU. Memory is measured
    # after that, so that the memory that transformers keeps counts as baseline.
    (text, callers, grown, norms), memories = ranks.once(make, memory_before)
    recipe = _modicum.make_recipe(checkpoint, text)
    _require_shapes(model, recipe)
    return Goal(checkpoint, recipe, memories, callers, grown, norms, text=text)


def _require_shapes(model: Model, recipe: _modicum.Recipe) -> None:
    """Raises `UsageError` if a target has another shape than the model's tensor. The load itself
    compares only numbers of elements."""
    for target in recipe.targets:
        expected, got = list(model.tensors[target["name"]].tensor.shape), list(target["shape"])
        if expected != got:
            what = "the recipe makes another shape than the model has"
            raise refusal(
                "MISMATCH", what, tensor=target["name"], expected=str(expected), got=str(got)
            )


def _warn_of_names(recipe: Recipe, stored: Collection[str], model: Model) -> None:
    """Warns about stored tensors that `missing` replaces because their shapes differ, and about
    tensors of the model with the name of a stored one that another tensor gets."""
    sources = sources_of(recipe.targets)
    members = model.structure.members
    inner = {
        read: name
        for name, node in recipe.targets.items()
        if members[name].root is not None
        for read in stored_under(node)
    }
    for name in sorted(inner.keys() & members.keys()):
        if members[name].root is None:
            what = (
                f"the model's tensor '{name}' is not the stored one of this name, which is loaded "
            )
            what += f"into '{inner[name]}': a save of both is refused; another name is not"
            warnings.warn(f"modicum: {what}", stacklevel=3)
    made_anew = (name for name, node in recipe.targets.items() if node["op"] in ("init", "caller"))
    if lost := [name for name in made_anew if name in stored and name not in sources]:
        what = f"{counted(len(lost), 'stored tensor', verb=True)} of another shape and not used, "
        what += (
            f"because of missing=: {lost[0]}; LoadRules(resized='mean') keeps the stored rows of "
        )
        what += "token embeddings"
        warnings.warn(f"modicum: {what}", stacklevel=3)


def _repr_of(argument: Any) -> str:
    """The repr of an argument, with sets sorted: their order differs between ranks."""
    return repr(sorted(argument) if isinstance(argument, Set) else argument)


def memory_before() -> list[Any]:
    """[bytes that this process holds before the load, bytes that it may still allocate, the name of
    the limit that determines the latter]. Also resets this process's VmHWM, from which the peak of
    the load is read."""
    reset_peak()
    return [_modicum.process_memory()["held_bytes"], *_modicum.available_memory()]


def refuse_gaps(model: Model, filled: Collection[str], *, buffers: bool = True) -> None:
    """Raises `UsageError` if a tensor that is on meta would get no values by the load.

    Args:
        filled: names of the tensors that get values.
        buffers: whether to check non-persistent buffers, too.
    """
    for name, entry in model.tensors.items():
        if entry.tensor.is_meta and name not in filled:
            what = "this tensor is on meta and gets no values"
            others = (n for n in filled if n in model.tensors)
            if tied := next((n for n in others if model.tensors[n].tensor is entry.tensor), None):
                what = f"this tensor is tied to '{tied}': it needs a target of its own, an alias"
            elif filled and all(model.structure.members[n].adapter is not None for n in filled):
                what += ": the source has adapters only, load the base model first"
            raise refusal("MISMATCH", what, tensor=name)
    for fqn, buffer in model.module.named_buffers() if buffers else ():
        if buffer.is_meta and canonical(fqn) not in filled:
            what = "this buffer is on meta: build the model under empty_parameters()"
            raise refusal("UNSUPPORTED", what, tensor=canonical(fqn))
