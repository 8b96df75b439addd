"""A saved checkpoint of PEFT's adapters alone, in the files that PEFT writes:

    ROOT/step-100/adapter_model.safetensors     tensors under PEFT's names
    ROOT/step-100/adapter_config.json

`PeftModel.from_pretrained(base, "ROOT/step-100")` reads it. The base model is not saved.
"""

import copy
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from modicum import _modicum
from modicum.errors import UsageError, refusal
from modicum.recipes import Recipe
from modicum.recipes.dtypes import dtype_name
from modicum.recipes.nodes import Node, caller
from modicum.recipes.structure import class_before_sharding, inside_wrappers
from modicum.torch.loading.goal import Goal, Model, memory_before
from modicum.torch.ranks.group import Ranks
from modicum.torch.saving.weights import Form, LocalTensor, Writing, require_values, writing_of
from modicum.torch.shards.placements import Shardings
from modicum.upstream.wrappers import canonical

CONFIG = "adapter_config.json"
FILE = "adapter_model.safetensors"


def adapter_names(model: Model, asked: bool | None) -> dict[str, str] | None:
    """If a save writes only the adapters: the model's name of each tensor of PEFT's file, by its
    name there; else None. `asked`: the argument `adapters`; None: only the adapters if the model is
    a PeftModel that trains nothing else."""
    if not _is_wrapped(model.module):
        if asked:
            got = class_before_sharding(model.module).__name__
            raise refusal("USAGE", "adapters", expected="a PeftModel", got=got)
        return None
    if asked is False:
        return None
    names = names_of_peft(model)
    others = _trained_besides(model, names)
    if asked and others:
        what = "this tensor is trained, but PEFT's file lacks it: SaveOptions(adapters=False) "
        what += "saves all tensors"
        raise refusal("UNSUPPORTED", what, tensor=others[0])
    return None if others else names


def why_not_alone(module: nn.Module) -> str | None:
    """Why a save of a model with adapters can't write the adapters alone; None if it can."""
    if not _is_wrapped(module):
        return "PEFT's layers are in it, but no PeftModel is around it"
    model = Model.of(module)
    try:
        others = _trained_besides(model, names_of_peft(model))
    except UsageError as error:
        return str(error)
    return f"it trains {others[0]}, which PEFT's file lacks" if others else None


def whole_peft_warnings(module: nn.Module) -> list[str]:
    """A warning if a save of all tensors is that of a PeftModel."""
    if not _is_wrapped(module):
        return []
    what = "the checkpoint has adapters among the tensors of the model: modicum.torch.resume "
    what += "reads them, but from_pretrained would drop them, and initialise the tensors of "
    return [f"{what}modules_to_save anew: for it, save what merge_and_unload() returns"]


def _is_wrapped(module: nn.Module) -> bool:
    module = inside_wrappers(module)
    return hasattr(type(module), "get_base_model") and hasattr(module, "peft_config")


def _trained_besides(model: Model, names: dict[str, str]) -> Sequence[str]:
    """The model's names of tensors that are trained and not among the values of `names`."""
    saved = {id(model.tensors[name].tensor) for name in names.values()}
    return [
        name
        for name, entry in model.tensors.items()
        if entry.tensor.requires_grad and id(entry.tensor) not in saved
    ]


def names_of_peft(model: Model) -> dict[str, str]:
    """The model's name of each tensor, by its name in PEFT's file."""
    from peft import get_peft_model_state_dict

    wrapped = inside_wrappers(model.module)
    (adapter,) = _adapters_of(wrapped)
    model_names: dict[int, str] = {}
    for name, entry in model.tensors.items():
        model_names.setdefault(id(entry.tensor), name)
    state = get_peft_model_state_dict(
        wrapped,
        state_dict=_state_by_module(wrapped),
        adapter_name=adapter,
        save_embedding_layers=_trains_embeddings(wrapped),
    )
    names: dict[str, str] = {}
    for name, tensor in state.items():
        if id(tensor) not in model_names:
            what = "a tensor of PEFT's file is no tensor of the model: PEFT computes or gathers it"
            raise refusal("UNSUPPORTED", what, tensor=name)
        names[canonical(name)] = model_names[id(tensor)]
    return dict(sorted(names.items()))


def _state_by_module(module: nn.Module) -> dict[str, Any]:
    """The state dict with the names of `named_modules`, by which PEFT selects tensors. An ordinary
    state dict lacks the names' components of activation checkpointing, and PEFT would find nothing
    in it."""
    modules = {canonical(name): name for name, _ in module.named_modules(remove_duplicate=False)}
    state = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        path, _, attribute = canonical(name).rpartition(".")
        inside = modules.get(path, path)
        state[f"{inside}.{attribute}" if inside else attribute] = tensor
    return state


def _adapters_of(module: Any) -> list[str]:
    names = [*module.peft_config]
    if len(names) != 1:
        what = "a checkpoint of adapters alone: SaveOptions(adapters=False) saves all tensors"
        raise refusal("UNSUPPORTED", what, expected="one adapter", got=", ".join(names))
    return names


def _trains_embeddings(module: Any) -> bool:
    """The value for PEFT's `save_embedding_layers`: whether an embedding outside the adapters is
    trained. PEFT's default would ask the hub for the base model's config."""
    getters = ("get_input_embeddings", "get_output_embeddings")
    layers = [getattr(module, name)() for name in getters if hasattr(module, name)]
    return any(
        weight.requires_grad
        for layer in layers
        if layer is not None and hasattr(layer, "weight")
        for weight in [layer.weight]
        if not hasattr(type(layer), "adapter_layer_names")
    )


def config_text(module: Any) -> str:
    """adapter_config.json, as PEFT's `save_pretrained` writes it; the same on every rank."""
    module = inside_wrappers(module)
    (adapter,) = _adapters_of(module)
    config = copy.deepcopy(module.peft_config[adapter])
    base = module.get_base_model()
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = vars(base).get("name_or_path") or None
    for name, value in vars(config).items():
        if isinstance(value, set):  # the order of strings in a set differs between processes
            setattr(config, name, sorted(value))
    mapping = None
    if config.task_type is None:
        cls = class_before_sharding(base)
        mapping = {"base_model_class": cls.__name__, "parent_library": cls.__module__}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder, auto_mapping_dict=mapping)
        return (Path(folder) / CONFIG).read_text("utf-8")


def goal_of_adapters(model: Model, names: Mapping[str, str], ranks: Ranks) -> Goal:
    """The goal of PEFT's file, made of tensors of the model. Collective. `names`: as of
    `adapter_names`."""
    require_values(model)
    targets: dict[str, Node] = {}
    for name, model_name in names.items():
        tensor = model.tensors[model_name].tensor
        targets[name] = caller(dtype_name(tensor.dtype), [*tensor.shape])
    nothing = _modicum.open_checkpoint(None)
    text = json.dumps({"targets": targets, "unused": []})
    memories = ranks.gather(memory_before())
    return Goal(nothing, _modicum.make_recipe(nothing, text), memories, [], text=text)


def writing_of_adapters(
    model: Model, names: Mapping[str, str], goal: Goal, ranks: Ranks, form: Form
) -> Writing:
    """The `Writing` of the adapters' tensors into PEFT's file. `names`: as of `adapter_names`."""
    shardings = Shardings()
    tensors = []
    for name in names.values():
        entry = model.tensors[name]
        sharding = shardings.of(entry.tensor, name).unpadded()
        tensors.append(
            LocalTensor(
                entry.local, sharding, entry.tensor, comes_from_first=not entry.is_parameter
            )
        )
    return writing_of(goal.recipe, tensors, ranks, form)


def recipe_of_checkpoint(model: nn.Module, path: Path) -> Recipe | None:
    """The recipe that loads the model's adapters from a checkpoint of adapters; None for other
    checkpoints."""
    if not (path / FILE).exists():
        return None
    if not _is_wrapped(model):
        what = "the checkpoint holds adapters only: load the base model, and wrap it by PEFT"
        raise refusal("MISMATCH", what, file=path.name)
    targets: dict[str, Node] = {}
    again = []  # PEFT's further names of a tensor, under which the file has the same values
    for name, model_name in names_of_peft(Model.of(model)).items():
        if model_name in targets:
            again.append(name)
        targets.setdefault(model_name, {"op": "stored", "name": name})
    return Recipe(targets, again)
