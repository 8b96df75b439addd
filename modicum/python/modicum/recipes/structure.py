"""The structure of a model inside its wrappers: its tensors by name, and the models of transformers
in it, each with the names of its tensors without wrappers.

    base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight   name in a PeftModel
    base_model.model.                                                    prefix of the part
                     model.layers.0.self_attn.q_proj.weight              its key in the part

FSDP2 and `replicate` are recognised by a base class that they add, PEFT by `adapter_layer_names`
and `peft_config`, a model of transformers by `base_model_prefix`. Does not import torch.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from modicum.errors import refusal
from modicum.upstream.torch_core import buffers_of, children_of, is_persistent, parameters_of
from modicum.upstream.transformers import is_pretrained
from modicum.upstream.wrappers import WRAPPERS, canonical

TOKENS, TOKENS_BEFORE = "trainable_tokens_delta", "trainable_tokens_original"
"""Members of PEFT's layer of trainable tokens: the trained rows, and the original rows."""

# The prefix of every name in a file that PEFT writes.
_ADAPTER_PREFIX = "base_model.model."


# ---- classes


def class_before_sharding(module: Any) -> type:
    """The class that a module had before `fully_shard` or `replicate` changed it."""
    wrappers = {"FSDPModule", "DDP"}
    for cls in type(module).__mro__:
        if not any(base.__name__ in wrappers for base in cls.__mro__):
            return cls
    return type(module)


@contextlib.contextmanager
def classes_before_sharding(model: Any) -> Iterator[None]:
    """A context in which modules have their classes from before sharding. transformers finds
    conversions by class; for the classes of `fully_shard` it would silently find none."""
    changed = []
    try:
        for module in model.modules():
            before = class_before_sharding(module)
            if before is not type(module):
                changed.append((module, type(module)))
                module.__class__ = before
        yield
    finally:
        for module, cls in changed:
            module.__class__ = cls


def has_adapters(module: Any) -> bool:
    """Whether a model has PEFT's adapters, or is PEFT's wrapper around such a model."""
    return "peft_config" in vars(module) or hasattr(type(module), "peft_config")


def adapter_config(chain: Sequence[Any], adapter: str | None) -> Any:
    """PEFT's configuration of an adapter in the last module of `chain` (modules around each other,
    outermost first); None if it is unknown."""
    holder = next(module for module in reversed(chain) if has_adapters(module))
    return holder.peft_config.get(adapter)


def wrapped_by(module: Any) -> Any:
    """The module inside PEFT's wrapper of a layer; None for other modules."""
    if not hasattr(type(module), "adapter_layer_names"):
        return None
    original = getattr(module, "original_module", None)
    return original if original is not None else getattr(module, "base_layer", None)


def inside_wrappers(module: Any) -> Any:
    """The module inside all wrappers of torch.compile and activation checkpointing."""
    while names := WRAPPERS & children_of(module).keys():
        module = children_of(module)[next(iter(names))]
    return module


def unwrapped(module: Any) -> Any:
    """The module inside all wrappers of torch.compile, activation checkpointing and PEFT."""
    while (inner := wrapped_by(inside_wrappers(module))) is not None:
        module = inner
    return inside_wrappers(module)


# ---- members


@dataclass(frozen=True)
class Member:
    """A parameter or buffer."""

    name: str  # the canonical name in the model
    key: str  # the name in its root, without wrappers and without an adapter's name
    module: Any  # the module that has it as `attribute`
    attribute: str
    tensor: Any
    chain: tuple[Any, ...]  # the modules around it, outermost first
    root: Any  # the model of transformers around it, or None
    adapter: str | None  # its adapter; "": shared by all adapters; None: of the model itself

    @property
    def persistent(self) -> bool:
        """Whether a state dict has it."""
        return is_persistent(self.module, self.attribute)


@dataclass(frozen=True)
class _Place:
    """A module that the walk has reached; `root` and `adapter` as in `Member`."""

    chain: tuple[Any, ...]  # the modules around it, outermost first, and itself
    path: tuple[str, ...] = ()  # the components of its name in the model
    key: tuple[str, ...] = ()  # the components of its key in the root
    root: Any = None
    root_depth: int = 0  # the number of components of the root's path
    adapter: str | None = None

    @property
    def module(self) -> Any:
        return self.chain[-1]


def _roots(model: Any) -> dict[int, Any]:
    """The outermost models of transformers; if there are none, PEFT's base model or the model."""
    found: dict[int, Any] = {}
    ahead = [model]
    while ahead:
        module = ahead.pop()
        if is_pretrained(module):
            found[id(module)] = module
        else:
            ahead += reversed([*module.children()])
    if not found:
        base = model.get_base_model() if hasattr(type(model), "get_base_model") else model
        found[id(base)] = base
    return found


class _Walk:
    """Visits all modules, in the order of a state dict."""

    def __init__(self, model: Any) -> None:
        self.roots = _roots(model)
        self.adapters = {
            adapter
            for module in model.modules()
            if has_adapters(module)
            for adapter in module.peft_config
        }
        self.places = list(self._below(self._enter(_Place((model,)))))

    def _enter(self, place: _Place) -> _Place:
        """Returns `place`; with an empty key if its module is an outermost root."""
        if id(place.module) not in self.roots or place.root is not None:
            return place
        return _Place(place.chain, place.path, (), place.module, len(place.path))

    def _below(self, place: _Place) -> Iterator[_Place]:
        yield place
        for name, child in children_of(place.module).items():
            if child is not None:
                yield from self._below(self._enter(self._child(place, name, child)))

    def _child(self, at: _Place, name: str, child: Any) -> _Place:
        path = at.path if name in WRAPPERS else (*at.path, name)
        chain = (*at.chain, child)
        wrapped = wrapped_by(at.module)
        if name in WRAPPERS or (
            wrapped is not None and (child is wrapped or wrapped_by(child) is wrapped)
        ):
            return _Place(chain, path, at.key, at.root, at.root_depth, at.adapter)
        key, adapter = self.named(at, name)
        return _Place(chain, path, key, at.root, at.root_depth, adapter)

    def named(self, at: _Place, name: str) -> tuple[tuple[str, ...], str | None]:
        """The key and the adapter of the attribute `name` of the module at `at`."""
        key, adapter = at.key, at.adapter
        if adapter is None and self._belongs_to_adapters(at, name):
            # Keys lack wrappers, so adapters of nested PEFT layers would share a key. Their paths
            # differ.
            key, adapter = at.path[at.root_depth :], ""
        if adapter == "" and name in self.adapters:
            return key, name
        return (*key, name), adapter

    def _belongs_to_adapters(self, at: _Place, name: str) -> bool:
        """Whether PEFT has added the attribute `name` to the module at `at`: to its wrapper of a
        layer, or to its wrapper of the model."""
        if wrapped_by(at.module) is not None:
            return True
        if at.root is not None or not has_adapters(at.module):
            return False
        child = children_of(at.module).get(name)
        return child is None or all(id(module) not in self.roots for module in child.modules())

    def members(self) -> Iterator[Member]:
        for at in self.places:
            module = at.module
            for name, tensor in (*parameters_of(module).items(), *buffers_of(module).items()):
                if tensor is not None:
                    key, adapter = self.named(at, name)
                    path = ".".join((*at.path, name))
                    yield Member(
                        path, ".".join(key), module, name, tensor, at.chain, at.root, adapter
                    )


# ---- parts


@dataclass
class Part:
    """One model of transformers in a model, or the complete model if it contains none. The last
    part has all members that are in no other part."""

    module: Any  # None: the last part
    prefix: str = ""  # the prefix of its names in the model, with a dot
    keys: dict[str, str] = field(default_factory=dict)  # of its members, by name in the model
    saved_as: dict[str, str] = field(default_factory=dict)  # keys, by name in an adapter's file

    @property
    def bare_prefix(self) -> str:
        """The prefix without the names of PEFT's wrapper."""
        return self.prefix.replace(_ADAPTER_PREFIX, "")

    def stored_names(self, names: Set[str]) -> set[str]:
        """Those of `names` that are keys, in the form that most of them have: as they are, or with
        or without the prefix of transformers' base model."""
        keys, base = {*self.keys.values()}, f"{getattr(self.module, 'base_model_prefix', '')}."
        shorter = {key.removeprefix(base) for key in keys}
        return max(
            (form & names for form in (keys, shorter, {base + key for key in keys})), key=len
        )

    def key_of(self, name: str) -> str | None:
        """The key of a stored name that begins with this part's prefix, with or without the names
        of PEFT's wrapper, or with the prefix in PEFT's files; None for other names."""
        for prefix in (self.prefix, self.bare_prefix, _ADAPTER_PREFIX):
            if prefix and name.startswith(prefix):
                rest = name.removeprefix(prefix)
                of_adapter = prefix.endswith(_ADAPTER_PREFIX)
                return self.saved_as.get(rest, rest) if of_adapter else rest
        return None


@dataclass
class Structure:
    """The members of a model's state dict, in its order, and the parts of the model."""

    members: dict[str, Member]
    scratch: dict[str, Member]  # non-persistent buffers
    parts: list[Part]
    copies: dict[str, str] = field(default_factory=dict)
    """The name of the original member, by name of its copy by PEFT (`modules_to_save`)."""
    norms: dict[str, str] = field(default_factory=dict)
    """For each magnitude of PEFT's DoRA, by name, the weight whose row norms are its first
    values."""
    rows: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    """For each tensor of PEFT's trainable tokens, and of the original rows that PEFT keeps, by
    name: the embedding, and the indices of its rows that are the first values."""
    undecided: tuple[str, ...] = ()
    """The adapters of a model with several, if the caller has named none."""

    def split(self, stored: Iterable[str]) -> list[dict[str, str]]:
        """Returns a dict for each part: by name of a stored tensor, its key in the part.

        A stored name may be the name in the complete model, in a part, or in an adapter's file. A
        file without any name of the only inner part in the complete model has that part's names: a
        tensor outside does not get one of them, even if it has the same name.
        """
        keys: list[dict[str, str]] = [{} for _ in self.parts]
        *inner, outside = self.parts
        outside_keys = set(outside.keys.values())
        names = {name: canonical(name) for name in stored}
        inner_names: set[str] = set()
        if len(inner) == 1 and inner[0].keys.keys().isdisjoint(names.values()):
            inner_names = inner[0].stored_names({*names.values()})

        def place(name: str) -> tuple[int, str]:
            if name in inner_names:
                return 0, name
            for i, part in enumerate(self.parts):
                if name in part.keys:
                    return i, part.keys[name]
            if name in outside_keys:
                return len(inner), name
            for i, part in enumerate(inner):
                key = part.key_of(name)
                if key is not None:
                    return i, key
            # A name that the model lacks: the only inner part may rename it.
            return (0 if len(inner) == 1 else len(inner)), name

        for stored_name, name in names.items():
            i, key = place(name)
            keys[i][stored_name] = key
        return keys


def _note_copies(walk: _Walk, adapter: str | None, structure: Structure) -> None:
    """Notes PEFT's copies of modules that are trained completely (`modules_to_save`). PEFT saves a
    copy under the name of the original."""
    by_root = {id(part.module): part for part in structure.parts}
    for at in walk.places:
        if not hasattr(type(at.module), "adapter_state_dict_load_map"):
            continue
        part, path = by_root[id(at.root)], ".".join(at.path)
        for adapter_name in walk.adapters:
            for saved, model_name in at.module.adapter_state_dict_load_map(adapter_name).items():
                name = f"{path}.{canonical(model_name)}"
                original = f"{path}.original_module.{saved}"
                if adapter_name == adapter and name in part.keys:
                    saved_as = ".".join((*at.path[at.root_depth :], canonical(saved)))
                    part.saved_as[saved_as] = part.keys[name]
                if name in structure.members and original in structure.members:
                    structure.copies[name] = original


def _note_norms(walk: _Walk, structure: Structure) -> None:
    """Notes DoRA's magnitudes of linear layers whose weight has one row per output."""
    for at in walk.places:
        magnitudes = children_of(at.module).get("lora_magnitude_vector")
        path = ".".join(at.path)
        for adapter, layer in ({} if magnitudes is None else children_of(magnitudes)).items():
            name = f"{path}.lora_magnitude_vector.{adapter}.weight"
            weight = structure.members.get(f"{path}.base_layer.weight")
            is_transposed = getattr(layer, "fan_in_fan_out", True)
            if weight is not None and len(weight.tensor.shape) == 2 and not is_transposed:
                structure.norms[name] = weight.name


def _note_rows(walk: _Walk, structure: Structure) -> None:
    """Notes PEFT's trainable tokens. A layer that is tied to another one uses the tokens of that
    layer."""
    for at in walk.places:
        if TOKENS not in children_of(at.module) or wrapped_by(at.module) is None:
            continue
        path = ".".join(at.path)
        weight = next(
            f"{inner}.weight"
            for inner in (f"{path}.base_layer", f"{path.rpartition('.')[0]}.original_module")
            if f"{inner}.weight" in structure.members
        )
        for adapter, indices in at.module.token_indices.items():
            for kind in (TOKENS, TOKENS_BEFORE):
                structure.rows[f"{path}.{kind}.{adapter}"] = weight, [*indices]


def structure_of(model: Any, adapter: str | None = None) -> Structure:
    """The structure of a model. `adapter`: the adapter to which names in an adapter's file belong;
    None: the model's only one."""
    walk = _Walk(model)
    if adapter is not None and adapter not in walk.adapters:
        known = ", ".join(sorted(walk.adapters))
        raise refusal("USAGE", f"no adapter '{adapter}' in the model, which has: {known or 'none'}")
    if adapter is None and len(walk.adapters) == 1:
        (adapter,) = walk.adapters
    everything = list(walk.members())
    members = {m.name: m for m in everything if m.persistent}
    scratch = {m.name: m for m in everything if not m.persistent}
    parts: dict[int, Part] = {}
    for at in walk.places:
        if at.module is at.root and id(at.root) not in parts:
            parts[id(at.root)] = Part(at.root, "".join(f"{name}." for name in at.path))
    # Modules and members outside of all roots have the root None.
    outside = parts[id(None)] = Part(None)
    for member in members.values():
        part = parts.get(id(member.root), outside)
        if member.adapter not in (None, "", adapter):
            part.keys[member.name] = member.name  # of an adapter that is not in the file
            continue
        part.keys[member.name] = member.key
        if member.adapter is not None:
            # In PEFT's files some tensors have only the name of their module.
            part.saved_as[member.key.removesuffix(".weight")] = member.key
    undecided = tuple(sorted(walk.adapters)) if adapter is None else ()
    structure = Structure(members, scratch, list(parts.values()), undecided=undecided)
    _note_copies(walk, adapter, structure)
    _note_norms(walk, structure)
    _note_rows(walk, structure)
    return structure


def ties_of(structure: Structure) -> list[list[str]]:
    """Groups of names of the same tensor: ties that the models declare, and names that share a
    tensor object. All names of a group are tied to its first one."""
    declared: dict[str, str] = {}
    for part in structure.parts:
        names = {key: name for name, key in part.keys.items()}
        for key, source in getattr(part.module, "all_tied_weights_keys", {}).items():
            if key in names and source in names:
                declared[names[key]] = names[source]
    by_identity: dict[int, str] = {}
    for name, member in structure.members.items():
        source = by_identity.setdefault(id(member.tensor), name)
        if source != name and name not in declared and source not in declared:
            declared[name] = source
    groups: dict[str, list[str]] = {}
    for name in declared:
        source = declared[name]
        while source in declared:
            source = declared[source]
        groups.setdefault(source, [source]).append(name)
    return list(groups.values())
