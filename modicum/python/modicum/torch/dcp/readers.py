"""What `ModicumReader` reads by: a reader of Hugging Face files, or one of checkpoints that
`ModicumWriter` has written. Both have its methods for metadata, plans and data."""

import io
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor

from modicum import _modicum
from modicum.errors import Error, failure, refusal
from modicum.recipes import Recipe
from modicum.recipes.dtypes import dtype_name
from modicum.recipes.nodes import Node, stored_under
from modicum.recipes.reading import given_recipe
from modicum.recipes.recipe import build_recipe
from modicum.recipes.structure import structure_of
from modicum.torch.build.emptied import EmptiedMemory
from modicum.torch.dcp.boxes import Target, boxed, cast_to, check_place, described, described_tensor
from modicum.torch.loading.compared import compared_by_all
from modicum.torch.loading.origin import remember_read
from modicum.torch.loading.overwritten import defined
from modicum.torch.ranks.cpus import cpus_of_rank
from modicum.torch.ranks.group import Ranks
from modicum.torch.saving.choosing import ChosenCheckpoint, chosen_checkpoint
from modicum.torch.saving.extra import COMMON, common_of
from modicum.torch.saving.shared import is_gone
from modicum.torch.saving.state_dicts import SplitStateDict, facts_in, flat_key
from modicum.torch.saving.tensor_state import FILE as STATE
from modicum.torch.saving.tensor_state import numbers_of
from modicum.torch.saving.texts import json_in, read_files, text_in
from modicum.torch.shards.placements import Sharding, Shardings, layout_of
from modicum.torch.shards.tensors import copying_into, destination_of, memory_of
from modicum.upstream.torch_distributed import strided_shard
from modicum.upstream.wrappers import canonical

Source = str | os.PathLike[str]


@dataclass
class _Place:
    """A tensor of a state dict, or a box of one, and the recipe's node that fills it."""

    fqn: str
    node: Node
    tensor: torch.Tensor
    sharding: Sharding | None  # None: the tensor gets the complete result of the node


class FilesReader:
    """Reads Hugging Face files.

    DCP's plan determines which box (chunk) a rank reads. A strided shard (packed projections; FSDP2
    after tensor parallelism along the same dim) consists of several boxes, which a plan can't
    express: its elements are determined by the placements of the DTensor and, with `model`, by
    FSDP2's shards.
    """

    def __init__(
        self,
        source: Source,
        model: nn.Module | None,
        options: Mapping[str, Any],
        key_of: Callable[[str], str] = str,
        owners: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        """Opens headers and index.

        Args:
            source, model: as of `ModicumReader`.
            options: `rules`, the fields of `LoadRules` that act, by name; `staging` and `ledger` of
                `MemoryPolicy`.
            key_of: returns the state dict's key of a tensor's name.
            owners: for an optimizer's state: the parameters by name; the tensor NAME.KEY belongs to
                the parameter NAME. None: the tensors are those of the model.
        """
        self._model, self._key_of, self._owners = model, key_of, owners
        rules: Mapping[str, Any] = options["rules"]
        self._names = {name: rules[name] for name in ("missing", "unexpected", "key_mapping")}
        self._caller_recipe = given_recipe(rules["recipe"], self._names)
        self._staging, self._ledger = options["staging"], options["ledger"] or _modicum.Ledger()
        self._buffers = rules["buffers"]
        self.checkpoint_id = source
        self._checkpoint = _modicum.open_checkpoint(source)
        if _rank() == 0:
            for warning in self._checkpoint.warnings:
                warnings.warn(f"modicum: {warning}", stacklevel=2)
        recipe = self._recipe()
        for name in recipe.norms:
            what = "this reader can't compute DoRA's magnitudes, which the checkpoint lacks: load "
            what += "by modicum.torch.load, or keep the values that they have by "
            what += "LoadRules(missing={'lora_magnitude': 'model'}) and allow_partial_load"
            raise refusal("UNSUPPORTED", what, tensor=name)
        self._used_recipe = recipe
        self._targets = self._targets_of(recipe)

    # ---- the methods of ModicumReader

    def read_metadata(self) -> Metadata:
        """One chunk per tensor: the whole tensor."""
        return Metadata({name: described(target) for name, target in self._targets.items()})

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans, with the number of ranks that read."""
        return [replace(plan, storage_data=len(plans)) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Reads all items of this rank's plan in one pass over the files. Values of a checkpoint
        are compared with its record."""
        with _reading_by(plan.storage_data) as ranks:
            self._read(plan, planner)
            if ranks is not None:
                compared_by_all(self._checkpoint, self._compared, ranks)
        self._remember({canonical(name) for name in getattr(planner, "state_dict", {})})

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        self._compared = ""
        emptied = self._emptied()
        places = list(self._strided(getattr(planner, "state_dict", {})))
        strided = {place.fqn for place in places}
        items = [item for item in plan.items if item.dest_index.fqn not in strided]
        resolved = [(item, planner.resolve_tensor(item).detach()) for item in items]
        places += self._boxes(resolved)
        if places:
            self._fill(places)
        for item, tensor in resolved:
            planner.commit_tensor(item, tensor)
        if emptied is not None:
            emptied.restore(loaded=self._targets)

    # ---- the checkpoint's tensors

    def _emptied(self) -> EmptiedMemory | None:
        """What `to_empty` has left without values in this rank's model. Not collective: ranks may
        have different models. Only rank 0 warns."""
        if self._model is None:
            return None
        structure = structure_of(self._model)
        return EmptiedMemory(self._model, structure, self._buffers, Ranks(_rank(), 1), seed=0)

    def _recipe(self) -> Recipe:
        stored = self._checkpoint.stored
        if self._caller_recipe is not None:
            return self._caller_recipe
        if self._model is not None:
            return build_recipe(self._model, stored, **self._names)
        return Recipe({name: {"op": "stored", "name": name} for name in stored})

    def _targets_of(self, recipe: Recipe) -> dict[str, Target]:
        """The targets, by each key under which a state dict may have them: those of canonical
        names, and of names with the prefixes of wrappers."""
        nodes, targets = recipe.targets, {}
        for target in _modicum.make_recipe(self._checkpoint, recipe.text()).targets:
            node = nodes[target["alias_of"] or target["name"]]
            targets[target["name"]] = Target(node, target["dtype"], tuple(target["shape"]))
        wrapped = [] if self._model is None else self._model.state_dict(keep_vars=True)
        targets |= {n: targets[canonical(n)] for n in wrapped if canonical(n) in targets}
        return {self._key_of(name): target for name, target in targets.items()}

    def _remember(self, read: set[str]) -> None:
        if self._model is not None:
            remember_read(self._model, Path(self.checkpoint_id), self._used_recipe, read)
            defined(self._model, read)

    # ---- the places to fill

    def _boxes(self, resolved: list[tuple[ReadItem, torch.Tensor]]) -> Iterator[_Place]:
        """The places of the plan's items."""
        seen = set()  # tied names share memory
        for item, tensor in resolved:
            target = self._targets[item.storage_index.fqn]
            check_place(item.dest_index.fqn, target, tensor)
            memory = tensor.data_ptr(), tensor.shape, tensor.dtype
            if tensor.numel() > 0 and memory not in seen:
                seen.add(memory)
                node = boxed(cast_to(target.node, dtype_name(tensor.dtype)), target.shape, item)
                yield _Place(item.dest_index.fqn, node, tensor, None)

    def _strided(self, state: Mapping[str, Any]) -> Iterator[_Place]:
        """The places of DTensors with strided shards. Such a shard may consist of several boxes,
        but DCP's plan has at most one box for it, which may be wrong."""
        shardings, parameters = Shardings(), self._parameters()
        for fqn, value in state.items():
            if fqn not in self._targets or not isinstance(value, DTensor):
                continue
            parts = zip(value.placements, value.device_mesh.shape, strict=True)
            if not any(isinstance(placement, strided_shard()) and n > 1 for placement, n in parts):
                continue
            found = shardings.of(value, fqn, alias_of=parameters.get(canonical(fqn)))
            target, tensor = self._targets[fqn], value.to_local().detach()
            check_place(fqn, target, tensor)
            node = cast_to(target.node, dtype_name(tensor.dtype))
            yield _Place(fqn, node, tensor, found.unpadded())

    def _parameters(self) -> Mapping[str, nn.Parameter]:
        """By key of a tensor the parameter of the same sharding. FSDP2 knows its shards by
        parameter object; a state dict has other tensor objects of the same memory."""
        found = _parameters_of(self._model)
        if self._owners is not None:
            owners = {name: name.rpartition(".")[0] for name in self._checkpoint.stored}
            found = {n: self._owners[owner] for n, owner in owners.items() if owner in self._owners}
        return {self._key_of(name): parameter for name, parameter in found.items()}

    # ---- the load

    def _fill(self, places: list[_Place]) -> None:
        """Reads all places in one load. If any has a sharding, the plan is for all ranks of the
        world, of which this one executes only its part."""
        is_cut = any(place.sharding for place in places)
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if is_cut else (1, 0)
        whole = Sharding((ranks,), ())
        nodes = {f"{place.fqn}#{t}": place.node for t, place in enumerate(places)}
        used = {name for node in nodes.values() for name in stored_under(node)}
        unused = sorted(self._checkpoint.stored.keys() - used)
        recipe = _modicum.make_recipe(self._checkpoint, Recipe(nodes, unused).text())
        layout = layout_of(recipe, [place.sharding or whole for place in places], ranks)
        tensors = {t: place.tensor for t, place in enumerate(places)}
        given_bytes, copied = memory_of(tensors)
        plan = _modicum.make_plan(
            recipe,
            layout,
            strategy="own-shard",
            destinations=[destination_of(tensor) for tensor in tensors.values()],
            staging=self._staging,
        )
        loaded = _modicum.load(
            plan,
            rank,
            _modicum.Board(),
            self._ledger,
            given=given_bytes,
            copy=copying_into(copied) if copied else None,
            threads=cpus_of_rank(),
        )
        self._compared = loaded.outcome["compared"]


class StateDictReader:
    """Reads a checkpoint that `ModicumWriter` has written."""

    def __init__(
        self,
        root: Source,
        model: nn.Module | None,
        options: Mapping[str, Any],
    ) -> None:
        """`root`: a checkpoint of Modicum, or a run. Other arguments are as of `FilesReader`;
        `rules` has the defaults."""
        self._model, self._options = model, options
        self._open(Path(root))

    def _open(self, root: Path) -> None:
        """Opens a checkpoint, or the newest one of a run. If another process removes it meanwhile,
        chooses once more."""
        for is_last in (False, True):
            chosen = chosen_checkpoint(root, Ranks(_rank(), 1), _texts_of, [])
            try:
                self._open_chosen(chosen)
                return
            except (Error, OSError):
                if is_last or not is_gone(chosen.path):
                    raise

    def _open_chosen(self, chosen: ChosenCheckpoint) -> None:
        self.checkpoint_id = path = chosen.path
        self._opened = str(path.absolute()), chosen.facts["uuid"]
        facts = _facts_of(chosen)
        at = facts.model_at
        self._parts = [
            FilesReader(path, self._model, self._options, lambda name: flat_key((*at, name)))
        ]
        self._values = facts.values
        if facts.optim is not None:
            self._open_state(chosen, facts, facts.optim["param_groups"])

    def _open_state(
        self, chosen: ChosenCheckpoint, facts: SplitStateDict, param_groups: list[dict[str, Any]]
    ) -> None:
        at = facts.optim_at

        def key_of(name: str) -> str:
            return flat_key((*at, "state", name))

        if chosen.facts["has_state"]:
            folder, owners = chosen.path / "optimizer", _parameters_of(self._model)
            self._parts.append(FilesReader(folder, None, self._options, key_of, owners))
        numbers = numbers_of(text_in(chosen.files[STATE], STATE))
        for fqn, entry_numbers in numbers.items():
            self._values |= {key_of(f"{fqn}.{key}"): value for key, value in entry_numbers.items()}
        for index, group in enumerate(param_groups):
            # A flattened state dict has the options by parameter name, others by group index.
            names = group.pop("params") if facts.is_flat else [index]
            for name in names:
                for option, value in group.items():
                    self._values[flat_key((*at, "param_groups", name, option))] = value

    def read_metadata(self) -> Metadata:
        """One chunk per tensor: the whole tensor."""
        found: dict[str, Any] = {}
        for part in self._parts:
            found |= part.read_metadata().state_dict_metadata
        for key, value in self._values.items():
            is_tensor = isinstance(value, torch.Tensor)
            found[key] = described_tensor(value) if is_tensor else BytesStorageMetadata()
        return Metadata(found)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, with the checkpoint that this rank has opened."""
        return replace(plan, storage_data=self._opened)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans, all with the checkpoint of the coordinator, the first rank, and the number of
        ranks that read."""
        decided = (*plans[0].storage_data, len(plans))
        return [replace(plan, storage_data=decided) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Reads all items of this rank's plan, in one pass over the model's files and one over the
        state's files, and compares their values with the checkpoint's record. All ranks read the
        coordinator's checkpoint."""
        *decided, participants = plan.storage_data or (*self._opened, None)
        with _reading_by(participants) as ranks:
            self._follow(*decided)
            self._read(plan, planner)
            for part, folder in zip(self._parts, ("", "optimizer/"), strict=False):
                if ranks is not None:
                    compared_by_all(part._checkpoint, part._compared, ranks, folder)

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        left = {(item.dest_index, item.storage_index): item for item in plan.items}
        for item in plan.items:
            if item.storage_index.fqn in self._values:
                self._give(item, planner)
                left.pop((item.dest_index, item.storage_index))
        for part in self._parts:
            targets = part.read_metadata().state_dict_metadata
            items = [item for item in left.values() if item.storage_index.fqn in targets]
            part._read(LoadPlan(items), planner)

    def _follow(self, path: str, uuid: str) -> None:
        """Opens the coordinator's checkpoint, if this rank has chosen another one: a checkpoint may
        appear or vanish between the constructors of two ranks."""
        if uuid == self._opened[1]:
            return
        planned = self.read_metadata()
        self._open(Path(path))
        if self._opened[1] != uuid:
            what = f"rank {_rank()} sees another checkpoint than the coordinator"
            raise refusal("UNSUPPORTED", what, expected=uuid, got=self._opened[1])
        if self.read_metadata() != planned:
            what = f"rank {_rank()} has planned the load of another checkpoint, whose tensors or "
            what += "values differ: make another reader"
            raise failure("CONFLICT", what, file=Path(path).name)

    def _give(self, item: ReadItem, planner: LoadPlanner) -> None:
        value = self._values[item.storage_index.fqn]
        if item.type == LoadItemType.BYTE_IO:
            stream = io.BytesIO()
            torch.save(value, stream)
            stream.seek(0)
            planner.load_bytes(item, stream)
            return
        tensor = planner.resolve_tensor(item).detach()
        tensor.copy_(value)
        planner.commit_tensor(item, tensor)


def _parameters_of(model: nn.Module | None) -> dict[str, nn.Parameter]:
    """The model's parameters by name; none without a model."""
    named = [] if model is None else model.named_parameters(remove_duplicate=False)
    return {canonical(name): parameter for name, parameter in named}


@contextmanager
def _reading_by(participants: int | None) -> Iterator[Ranks | None]:
    """A context in which the ranks of a `torch.distributed.checkpoint.load` read; if one raises,
    all do. The ranks, for `compared_by_all`, if `participants`, the number of ranks that read, are
    all of the world; else None."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size == 1 or participants != size:
        yield None
        return
    with Ranks.of_world().together() as ranks:
        yield ranks


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _texts_of(path: Path, facts: Mapping[str, Any]) -> list[str]:
    return [name for name in (COMMON, STATE) if (path / name).exists()]


def is_written(path: Path) -> bool:
    """Whether `ModicumWriter` has written a complete checkpoint."""
    if not (path / COMMON).exists():
        return False
    document = json_in(read_files(path, [COMMON])[COMMON], COMMON)
    return facts_in(common_of(document), COMMON) is not None


def _facts_of(chosen: ChosenCheckpoint) -> SplitStateDict:
    """The facts about the state dict that `ModicumWriter` has saved."""
    document = json_in(chosen.files.get(COMMON, b"{}"), COMMON)
    facts = facts_in(common_of(document), COMMON)
    if facts is None:
        what = "the checkpoint was not written by ModicumWriter: read its model by its own "
        what += "directory, or resume it by modicum.torch.resume"
        raise refusal("UNSUPPORTED", what, file=chosen.path.name)
    return facts
