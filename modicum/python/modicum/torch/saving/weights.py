"""The model's part of a save: planned as a load of the same tensors, and run in reverse."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from modicum import _modicum
from modicum.errors import Error, IoError, failure, refusal
from modicum.options import require_flag
from modicum.recipes import Recipe
from modicum.recipes.dtypes import FLOATS, dtype_name
from modicum.recipes.nodes import Node, caller
from modicum.recipes.recipe import build_recipe, text_with_callers
from modicum.torch.loading.goal import Goal, Model, Source, memory_before
from modicum.torch.loading.origin import Origin
from modicum.torch.loading.planning import charged, places_of
from modicum.torch.ranks.cpus import cpus_of_rank
from modicum.torch.ranks.group import Ranks
from modicum.torch.saving.texts import json_in
from modicum.torch.shards.placements import Sharding, layout_of
from modicum.torch.shards.tensors import (
    ModelTensor,
    await_streams,
    copy_run,
    destination_of,
    memory_of,
)
from modicum.walk.arguments import path_of

Fetch = Callable[[int, int, memoryview], None]
"""Called with a target's index, its first element, and a view to fill with elements."""


@dataclass(frozen=True)
class LocalTensor:
    """A tensor in a rank's memory, and its sharding over all ranks."""

    local: torch.Tensor
    """This rank's part."""
    sharding: Sharding
    tensor: torch.Tensor
    """The tensor of the model or the optimizer's state to which `local` belongs."""
    comes_from_first: bool = False
    """Whether, of the ranks that hold the same elements, the first one writes all of them, as for
    buffers, whose values may differ between ranks; otherwise these ranks divide the writing."""


@dataclass(frozen=True)
class Writing:
    """Tensors to write into files, in the order of the plan's targets."""

    plan: _modicum.SavePlan
    recipe: _modicum.Recipe
    local_tensors: Sequence[LocalTensor]

    @cached_property
    def memory(self) -> tuple[dict[int, torch.Tensor], Fetch | None]:
        """The bytes of row-major tensors on the host, by target, and the function that provides
        elements of all other tensors (None: there are none)."""
        return self._memory[0], fetching(self._memory[1])

    @cached_property
    def _memory(self) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        untied = [t for t, target in enumerate(self.recipe.targets) if target["alias_of"] is None]
        return memory_of({t: self.local_tensors[t].local for t in untied})

    def buffers_to_copy(self, rank: int) -> dict[int, torch.Tensor]:
        """The buffers that the rank writes from elsewhere than row-major memory of the host, by
        target. A forward may write to them during a save in the background."""
        found = {}
        for at, local in self._memory[1].items():
            tensor, shape = self.local_tensors[at], self.recipe.targets[at]["shape"]
            is_read = _modicum.Shard(tensor.sharding, shape, rank).replicas[0] == rank
            if is_read and local.numel() > 0 and not isinstance(tensor.tensor, nn.Parameter):
                found[at] = local
        return found

    def copy_buffers(self, rank: int, ledger: _modicum.Ledger) -> None:
        """Copies these buffers to memory of the host, charged to the ledger, from which they are
        written then."""
        for at, local in self.buffers_to_copy(rank).items():
            copy = charged(ledger, local.shape, local.dtype)
            self._memory[1][at] = copy.copy_(local)

    @property
    def part(self) -> _modicum.TensorsToSave:
        """The tensors and their memory."""
        return _modicum.TensorsToSave(self.plan, *self.memory)

    @property
    def is_on_device(self) -> bool:
        """Whether a function provides elements, as for tensors on a device."""
        return self.memory[1] is not None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
        """(name, tensor, bytes as in `memory` or None) of each target."""
        for at, (target, tensor) in enumerate(
            zip(self.recipe.targets, self.local_tensors, strict=True)
        ):
            yield target["name"], tensor.tensor, self.memory[0].get(at)

    def bytes_of(self, ranks: Ranks) -> int:
        """About how many bytes this rank writes: replicas share their elements, and all ranks share
        the copied tensors."""
        count = 0
        for target, tensor in zip(self.recipe.targets, self.local_tensors, strict=True):
            if target["alias_of"] is None:
                replicas = _modicum.Shard(tensor.sharding, target["shape"], ranks.rank).replicas
                if tensor.comes_from_first:
                    count += tensor.local.nbytes if replicas[0] == ranks.rank else 0
                else:
                    count += tensor.local.nbytes // len(replicas)
        return count + self.plan.copied_bytes // ranks.world_size


@dataclass(frozen=True)
class Form:
    """The arguments of `save` that determine the files."""

    source: str | Path | None = None
    dtype: str | None = None
    unused: str = "copy"
    shard_size: int | str | None = None
    staging: int | str | None = None
    adapters: bool | None = None
    """Whether only PEFT's adapters are saved, in PEFT's files; None: not decided yet."""
    background: bool = False
    """Whether host memory is read through a snapshot."""
    replicas: str = "equal"

    def __post_init__(self) -> None:
        if self.adapters is not None:
            require_flag("adapters", self.adapters)
        if self.unused not in ("copy", "drop"):
            raise refusal("USAGE", "unused", expected="'copy' or 'drop'", got=repr(self.unused))
        if self.replicas not in ("equal", "first"):
            expected, got = "'equal' or 'first'", repr(self.replicas)
            raise refusal("USAGE", "replicas", expected=expected, got=got)
        if self.shard_size is not None and _modicum.parse_size(self.shard_size) == 0:
            got = repr(self.shard_size)
            raise refusal("USAGE", "shard_size", expected="a size above 0", got=got)


def goal_of(model: Model, ranks: Ranks, source: Source, origin: Origin | None, unused: str) -> Goal:
    """The checkpoint whose names and files the save gets, and the recipe of the model's tensors.
    Collective.

    Args:
        source: None: the origin's source.
        unused: see `save`.
    """
    require_values(model)
    if source is None and origin is None:
        what = "the model was not loaded by modicum.torch.load from files: give "
        what += "SaveOptions(source=...), a checkpoint with its names, or pass the module that was "
        what += "loaded"
        raise refusal("USAGE", what)
    origin = None if origin is None else origin.present()
    at = source if source is not None or origin is None else origin.source
    path = None if at is None else path_of("source", at)
    try:
        checkpoint = _modicum.open_checkpoint(path, in_save=True)
    except IoError as error:
        if source is not None:
            raise
        what = "the checkpoint from which the model was loaded can't be opened: give "
        what += "SaveOptions(source=...), a checkpoint with its names"
        raise failure(error.category, what, file=str(at), got=str(error)) from None

    def make() -> str:
        if source is None and origin is not None:
            return _fitted(origin.text, model)
        assert source is not None
        _require_architecture(model, origin, source)
        recipe = build_recipe(
            model.module, checkpoint.stored, structure=model.structure, missing="init",
            unexpected="ignore",
        )  # fmt: skip
        _require_names(recipe, model, source, unused)
        return _fitted(text_with_callers(recipe), model)

    text, memories = ranks.once(make, memory_before)
    return Goal(checkpoint, _modicum.make_recipe(checkpoint, text), memories, [], text=text)


def _require_architecture(model: Model, origin: Origin | None, source: str | Path) -> None:
    """Raises `UsageError` if config.json of the source has another `model_type` than the model's
    config or, if it has none, than the checkpoint from which it was loaded."""
    configs = [getattr(part.module, "config", None) for part in model.structure.parts]
    kinds = [
        kind for config in configs if isinstance(kind := getattr(config, "model_type", None), str)
    ]
    if not any(kinds) and origin is not None and origin.source is not None:
        with suppress(Error):
            kinds = [_modicum.inspect(origin.source)["model_type"]]
    other = _modicum.inspect(source)["model_type"]
    # The text model of a multimodal checkpoint has a type of its own, such as "gemma3_text".
    wholes = [kind.removesuffix("_model").removesuffix("_text") for kind in kinds]
    if other and any(kinds) and other not in (*kinds, *wholes):
        what, expected = "the source has another architecture (model_type)", " or ".join(kinds)
        raise refusal("MISMATCH", what, file=str(source), expected=expected, got=other)
    layers = {getattr(config, "num_hidden_layers", None) for config in configs} - {None}
    found = _layers_in(source)
    if layers and found is not None and found not in layers:
        what, expected = "the source has another number of layers", " or ".join(map(str, layers))
        raise refusal("MISMATCH", what, file=str(source), expected=expected, got=str(found))


def _layers_in(source: str | Path) -> int | None:
    """`num_hidden_layers` in the config.json of a directory; None if there is none."""
    path = Path(source) / "config.json"
    if not path.is_file():
        return None
    with suppress(Error):
        found = json_in(_modicum.read_file(path), path.name)
        layers = found.get("num_hidden_layers") if isinstance(found, dict) else None
        return layers if isinstance(layers, int) else None
    return None


def _require_names(recipe: Recipe, model: Model, source: str | Path, unused: str) -> None:
    """Raises `UsageError` if the source has none of the model's tensors, as if the model had names
    of its own: the save would hold the source's values under the source's names. Also raises it if
    that may be so for a part of the model."""
    new = recipe.missing
    if all(name in new or node["op"] == "alias" for name, node in recipe.targets.items()):
        what = "the source has no tensor of the model: give a checkpoint with the model's names, "
        what += "or load the model with LoadRules(recipe=...) or key_mapping= and leave out source="
        raise refusal("MISMATCH", what, file=str(source), tensor=next(iter(recipe.targets), ""))
    model_names = [name for name in new if model.structure.members[name].adapter is None]
    if model_names and recipe.unexpected and unused == "copy":
        what = f"the source lacks this tensor, and the model lacks '{recipe.unexpected[0]}' of the "
        what += "source: load the model with LoadRules(recipe=...) or key_mapping= and leave out "
        what += "source=; or, if they are no names of one tensor, leave out the source's by "
        what += "SaveOptions(unused='drop')"
        raise refusal("MISMATCH", what, file=str(source), tensor=model_names[0])


def require_values(model: Model) -> None:
    """Raises `UsageError` if a tensor is on meta."""
    for name, entry in model.tensors.items():
        if entry.tensor.is_meta:
            what = "this tensor is on meta and has no values: load or resume the model first"
            raise refusal("USAGE", what, tensor=name)


def _fitted(text: str, model: Model) -> str:
    """The recipe `text`, made when the model was loaded or by its declared ties, with the model's
    present tensors: they have their present dtypes, one that the recipe lacks is added, and aliases
    are those names that now share a tensor."""
    document = json.loads(text)
    targets: dict[str, Node] = document["targets"]
    first: dict[int, str] = {}
    for name, node in targets.items():
        if name not in model.tensors:
            what = "the model has changed since it was loaded: it lacks this tensor"
            raise refusal("MISMATCH", what, tensor=name)
        if node["op"] != "alias":
            first.setdefault(id(model.tensors[name].tensor), name)
            # The model may have been cast since, as by model.float().
            if (dtype := dtype_name(model.tensors[name].tensor.dtype)) in FLOATS:
                targets[name] = node | {"dtype": dtype}
    for name, entry in model.tensors.items():
        node = targets.get(name, {"op": "alias"})
        if node["op"] != "alias":
            continue
        tied = first.setdefault(id(entry.tensor), name)
        targets[name] = _untied(node, entry) if tied == name else node | {"of": tied}
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False)


def _untied(alias: Node, entry: ModelTensor) -> Node:
    """The node of a tensor that is tied to no other: made of its own stored tensors if it has
    some, with which the load has compared the alias."""
    dtype = dtype_name(entry.tensor.dtype)
    for stored in alias.get("in", ()):
        return stored | ({"dtype": dtype} if dtype in FLOATS else {})
    return caller(dtype, [*entry.tensor.shape])


def writing_of_model(model: Model, goal: Goal, ranks: Ranks, form: Form) -> Writing:
    """The `Writing` of the model's tensors into files like those of the goal's checkpoint."""
    tensors = [
        LocalTensor(
            p.entry.local, p.sharding, p.entry.tensor, comes_from_first=not p.entry.is_parameter
        )
        for p in places_of(model, goal)
    ]
    return writing_of(goal.recipe, tensors, ranks, form)


def writing_of(
    recipe: _modicum.Recipe, tensors: Sequence[LocalTensor], ranks: Ranks, form: Form
) -> Writing:
    """The `Writing` of `tensors`, a tensor for each target of the recipe."""
    for target, tensor in zip(recipe.targets, tensors, strict=True):
        expected, got = [*target["shape"]], [*tensor.tensor.shape]
        if got != expected:
            what = "the tensor has another shape than in the source of this save: "
            what += "give SaveOptions(source=...), a checkpoint with the model's shapes"
            shapes = {"expected": str(expected), "got": str(got)}
            raise refusal("MISMATCH", what, tensor=target["name"], **shapes)
    if form.replicas == "first":
        tensors = [replace(tensor, comes_from_first=True) for tensor in tensors]
    loaded = _modicum.make_plan(
        recipe,
        layout_of(recipe, [tensor.sharding for tensor in tensors], ranks.world_size),
        ranks_per_node=ranks.ranks_per_node or ranks.world_size,
        destinations=[
            "copy" if form.background else destination_of(tensor.local) for tensor in tensors
        ],
        staging=form.staging,
    )
    gathers = not form.background and ranks.ranks_per_node is not None
    from_first = [t for t, tensor in enumerate(tensors) if tensor.comes_from_first]
    plan = save_plan_of(loaded, form, gathers=gathers, from_first=from_first)
    return Writing(plan, recipe, tensors)


def threads_of(ranks: Ranks, *, background: bool) -> int:
    """The threads with which a save writes on a rank. In the background there is one, since the
    training uses the CPUs."""
    return 1 if background else cpus_of_rank(ranks.ranks_per_node)


def save_plan_of(
    loaded: _modicum.Plan, form: Form, *, gathers: bool = False, from_first: Sequence[int] = ()
) -> _modicum.SavePlan:
    """The plan to save the tensors that `loaded` loads.

    Args:
        gathers: whether the ranks of a node may write together.
        from_first: the targets that come from the first replica.
    """
    return _modicum.make_save_plan(
        loaded,
        dtype=form.dtype,
        copies_unused=form.unused == "copy",
        shard_size=form.shard_size,
        adapters=bool(form.adapters),
        gathers=gathers,
        from_first=from_first,
    )


def fetching(tensors: Mapping[int, torch.Tensor]) -> Fetch | None:
    """The function that copies elements of `tensors` to the staging, on any thread."""
    if not tensors:
        return None
    await_streams(tensors.values())

    def fetch(target: int, at: int, view: memoryview) -> None:
        tensor = tensors[target]
        copy_run(tensor, at, torch.frombuffer(view, dtype=torch.uint8).view(tensor.dtype))

    return fetch
