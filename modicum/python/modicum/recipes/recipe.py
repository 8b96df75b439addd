"""Makes the explicit recipe of a model and a checkpoint."""

import contextlib
import copy
import difflib
import importlib.util
import json
import os
import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from modicum import _modicum
from modicum.errors import counted, refusal
from modicum.options import dtype_text
from modicum.recipes.adapters import RecipeRequest, begin_as_base
from modicum.recipes.dtypes import FLOATS, Dtypes, any_of, cast, described, dtype_name
from modicum.recipes.nodes import Node, caller, has_inner_caller, init
from modicum.recipes.patterns import Patterns, Rule, Rules
from modicum.recipes.structure import (
    Part,
    Structure,
    classes_before_sharding,
    structure_of,
    ties_of,
)
from modicum.recipes.translation import DescribedTensors, Translation, translate
from modicum.upstream.transformers import (
    embeddings_of,
    is_pretrained,
    may_be_missing,
    may_be_unexpected,
    renames_stored,
)
from modicum.upstream.wrappers import canonical

if TYPE_CHECKING:
    import torch
    import transformers


@dataclass
class Recipe:
    """A recipe as plain data that belongs to no checkpoint, from `recipe_for` or `read_recipe`.

    `modicum.torch.LoadRules` takes it. `modicum.walk.make_recipe(checkpoint, recipe.text())` makes
    and checks a `modicum.walk.Recipe`, which belongs to a checkpoint."""

    targets: dict[str, Node] = field(default_factory=dict)
    """The node of each target, by canonical name, in the model's order. A node `caller` is a tensor
    that the caller of the load makes by the model's own initialisation."""
    unused: list[str] = field(default_factory=list)
    """Stored tensors that are not read, sorted."""
    grown: dict[str, int] = field(default_factory=dict)
    """The stored number of rows of each target that has another number of rows (`resized`)."""
    norms: dict[str, str] = field(default_factory=dict)
    """By DoRA's magnitude that the checkpoint lacks: the weight whose row norms it begins with."""
    unexpected: list[str] = field(default_factory=list)
    """Those of `unused` that have no place in the model, and that transformers would warn of."""

    @property
    def missing(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """(dtype, shape) of each tensor that the model initialises."""
        callers = {name: node for name, node in self.targets.items() if node["op"] == "caller"}
        return {name: (node["dtype"], tuple(node["shape"])) for name, node in callers.items()}

    @property
    def document(self) -> dict[str, Any]:
        """The document of recipe.json."""
        return {"targets": self.targets, "unused": self.unused}

    def text(self) -> str:
        """The text of recipe.json, without whitespace and without tensors that the model
        initialises."""
        missing = self.missing
        targets = {
            name: node
            for name, node in self.targets.items()
            if name not in missing and node.get("of") not in missing
        }
        return _text_of(self.document | {"targets": targets})


def text_with_callers(recipe: Recipe) -> str:
    """The text of recipe.json with nodes `caller` and their aliases, for a load by a caller."""
    return _text_of(recipe.document)


def _text_of(document: dict[str, Any]) -> str:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False)


def with_dtypes_of(recipe: Recipe, model: Structure) -> Recipe:
    """The recipe with a model's dtypes. Raises `UsageError` if the model lacks a target, or if
    `caller` is an input of another node."""
    other = next((name for name in recipe.targets if name not in model.members), None)
    if other is not None:
        what = f"the recipe has a target that the model lacks{_near(other, model.members)}"
        raise refusal("MISMATCH", what, tensor=other)
    targets = {}
    for name, node in recipe.targets.items():
        if has_inner_caller(node):
            what = "the node of a target has `caller` as an input"
            raise refusal("UNSUPPORTED", what, tensor=name, expected="a target `caller`")
        dtype = dtype_name(model.members[name].tensor.dtype)
        is_cast = dtype in FLOATS and node["op"] not in ("alias", "init", "caller")
        targets[name] = node | ({"dtype": dtype} if is_cast else {})
    return Recipe(targets, recipe.unused, recipe.grown, recipe.norms)


# ---- the checkpoint


def stored_in(checkpoint: str | os.PathLike[str] | Mapping[str, Any]) -> DescribedTensors:
    """(dtype, shape) of each stored tensor. `checkpoint`: a path, or a mapping of names to (dtype,
    shape) or to objects with a `dtype` and a `shape`."""
    if isinstance(checkpoint, Mapping):
        pairs = {
            name: (value.dtype, value.shape) if hasattr(value, "shape") else value
            for name, value in checkpoint.items()
        }
        return {name: (dtype_name(d), tuple(shape)) for name, (d, shape) in pairs.items()}
    return _modicum.open_checkpoint(checkpoint).stored


def _quantizer_of(model: Any, targets: DescribedTensors) -> Any:
    """transformers' quantizer for the model; None if it is not quantized."""
    config = getattr(model.config, "quantization_config", None) or getattr(
        model.config.get_text_config(decoder=True), "quantization_config", None
    )
    if config is None:
        return None
    method = config["quant_method"] if isinstance(config, dict) else config.quant_method
    method = getattr(method, "value", method)
    if method == "compressed-tensors" and _is_fp8(config, targets):
        return None  # needs no conversions: codes and scales have the model's names
    if method not in ("fp8", "mxfp8"):
        what = f"the quantization '{method}' is not known"
        expected = "FP8 codes: fp8, mxfp8, or compressed-tensors of 8-bit floats"
        raise refusal("UNSUPPORTED", what, expected=expected, got=str(method))
    from transformers.quantizers.auto import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(copy.deepcopy(config), pre_quantized=True)
    keeps_codes = any(name.endswith("_scale_inv") for name in targets)
    quantizer.quantization_config.dequantize = not keeps_codes
    return quantizer


def _is_fp8(config: Any, targets: DescribedTensors) -> bool:
    """Whether a configuration of compressed-tensors has only 8-bit floats, and the model has no
    scales: then a load multiplies codes by scales."""
    if not isinstance(config, dict) or any(name.endswith("weight_scale") for name in targets):
        return False
    groups = config.get("config_groups")
    weights = [
        group.get("weights") if isinstance(group, dict) else None
        for group in (groups.values() if isinstance(groups, dict) else [None])
    ]
    return bool(weights) and all(
        isinstance(weight, dict) and (weight.get("type"), weight.get("num_bits")) == ("float", 8)
        for weight in weights
    )


# ---- ties


def _tie(recipe: Recipe, ties: Iterable[list[str]], untie: bool) -> list[list[str]]:
    """In each tie the first name that has a target keeps it, and the others become aliases. If an
    alias had a target, its node becomes `in`: the load compares both. Returns the ties without any
    target."""
    open_ties = []
    for names in ties:
        there = [name for name in names if name in recipe.targets]
        if not there:
            open_ties.append(names)
            continue
        for name in names:
            if name == there[0] or (untie and name in there):
                continue
            alias: Node = {"op": "alias", "of": there[0]}
            if name in there:
                alias["in"] = [{k: v for k, v in recipe.targets[name].items() if k != "dtype"}]
            recipe.targets[name] = alias
    return open_ties


# ---- unexpected and missing tensors


def _droppable(model: Any) -> list[str]:
    """Patterns of stored names that transformers silently drops."""
    if model is None:
        return []
    patterns = may_be_unexpected(model)
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.append(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.append(r"(^|\.)position_ids$")
    return patterns


def _near(name: str, names: Iterable[str]) -> str:
    """The end of an error's sentence: the nearest of `names`, if one is similar."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    return f"; nearest is '{near[0]}'" if near else ""


@dataclass
class _AllowedShapes:
    """Whether the target of a name may have another shape than the stored tensors give."""

    differ: Callable[[str], bool]  # any other shape; the target then counts as missing
    grow: Callable[[str], bool]  # another number of rows, which the load adapts


def _translate(
    structure: Structure,
    stored: DescribedTensors,
    targets: DescribedTensors,
    ask: Callable[[Part], list[Any]],
    may: _AllowedShapes,
) -> Translation:
    """Translates the stored tensors of each part to its targets, and names in a part to names in
    the complete model. `ask`: returns transformers' transforms for a part."""
    whole = Translation()
    for part, keys in zip(structure.parts, structure.split(stored), strict=True):
        names = {key: name for name, key in part.keys.items()}
        translated = translate(
            ask(part),
            {name: stored[name] for name in keys},
            {key: targets[name] for key, name in names.items()},
            config=getattr(part.module, "config", None),
            base_model_prefix=getattr(part.module, "base_model_prefix", ""),
            keys=keys,
            may_differ=lambda key: may.differ(names[key]),
            may_grow=lambda key: may.grow(names[key]),
        )
        _drop(translated, any_of(_droppable(part.module)), stored)
        whole.add(translated.renamed(names))
    return whole


def _drop(translation: Translation, droppable: Any, stored: DescribedTensors) -> None:
    """Takes from the unexpected names the scales of FP8 codes that are loaded, since a load reads a
    scale with its codes, and moves to the dropped ones those that the model lists as `droppable`,
    a pattern or None."""
    unexpected = translation.unexpected
    translation.unexpected = {}
    for name, would_be in unexpected.items():
        codes = _codes_of(name, stored)
        if codes is not None and codes not in unexpected:
            continue
        if droppable is not None and all(droppable.search(key) for key in would_be):
            translation.dropped.append(name)
        else:
            translation.unexpected[name] = would_be


def _codes_of(scale: str, stored: DescribedTensors) -> str | None:
    """The name of the stored FP8 codes to which the name `scale` belongs, or None."""
    for ending in ("scale_inv", "scale"):
        codes = scale.removesuffix(f"_{ending}")
        if codes != scale and codes in stored and stored[codes][0].startswith("float8"):
            return codes
    return None


def _check_unexpected(
    translation: Translation,
    unexpected: str | Iterable[str],
    structure: Structure,
    stored: Iterable[str],
) -> None:
    if unexpected == "ignore":
        return
    listed = [unexpected] if isinstance(unexpected, str) else [*unexpected]
    named = Patterns("unexpected", [] if unexpected == "error" else listed)
    named.require_match(stored, "stored tensors")
    refused = [name for name in translation.unexpected if not named.finds(name)]
    if refused:
        would_be = translation.unexpected[refused[0]][0]
        keys = (key for part in structure.parts for key in part.keys.values())
        if structure.undecided:
            adapters = ", ".join(structure.undecided)
            what = f"{counted(len(refused), 'stored tensor', verb=True)} not in the model, which "
            what += f"has several adapters ({adapters}): if the tensors are of one, pass `adapter`"
            raise refusal("MISMATCH", what, tensor=refused[0])
        raise refusal(
            "MISMATCH",
            f"{counted(len(refused), 'stored tensor', verb=True)} not in the model (the first "
            f"would be '{would_be}'); `key_mapping` renames them, `recipe` makes tensors of them, "
            "`unexpected` drops them" + _near(would_be, keys),
            tensor=refused[0],
        )
    for name, target in translation.doubled.items():
        if not named.finds(name):
            what = f"two stored tensors are '{target}' in the model"
            raise refusal("MISMATCH", what, tensor=name)


def _made_by_rule(rule: Rule, dtype: str, shape: tuple[int, ...], name: str) -> Node:
    kind, std = (rule, None) if isinstance(rule, str) else rule
    if kind == "model":
        return caller(dtype, shape)
    if kind not in ("zeros", "ones", "normal") or (kind == "normal") != (std is not None):
        raise refusal("USAGE", f"unknown initialisation rule {rule!r}", tensor=name)
    return init(kind, std, dtype, shape)


def _left_to_model(structure: Structure, names: Iterable[str]) -> set[str]:
    """Names that the model lists as possibly missing, and tensors of adapters of which nothing is
    stored."""
    left: set[str] = set()
    for part in structure.parts:
        listed = any_of(may_be_missing(part.module))
        left |= {name for name, key in part.keys.items() if listed and listed.search(key)}
    stored = {structure.members[name].adapter for name in names}
    return left | {
        name
        for name, member in structure.members.items()
        if member.adapter is not None and member.adapter not in stored
    }


def _fill_gaps(
    recipe: Recipe,
    targets: DescribedTensors,
    dtypes: Dtypes,
    ties: list[list[str]],
    *,
    rules: Rules,
    left_to_model: Container[str],
    present: Container[str],
) -> list[str]:
    """Gives each target that is not stored a rule from `rules` or, if it is in `left_to_model`, the
    model's own initialisation. Returns the names that get neither."""
    tied = {name: names for names in ties for name in names}

    def has_source(name: str) -> bool:
        names = tied.get(name, [name])
        return any(other in recipe.targets or other in present for other in names)

    for name, (_, shape) in targets.items():
        rule = rules.of(name)
        if rule is not None and not has_source(name):
            recipe.targets[name] = _made_by_rule(rule, dtypes.of(name, name), shape, name)
    lacking = []
    for name, (_, shape) in targets.items():
        if has_source(name):
            continue
        if name in left_to_model:
            recipe.targets[name] = caller(dtypes.of(name, name), shape)
        else:
            lacking.append(name)
    _tie(recipe, ties, untie=False)
    return lacking


def _check_lacking(lacking: list[str], structure: Structure, stored: DescribedTensors) -> None:
    if lacking:
        key = next(part.keys[lacking[0]] for part in structure.parts if lacking[0] in part.keys)
        what = f"the checkpoint lacks {counted(len(lacking), 'tensor')} of the model: "
        what += "LoadRules(missing='init'), or missing=[patterns of names], initialises it"
        raise refusal("MISMATCH", what + _near(key, stored.keys() - {key}), tensor=lacking[0])


# ---- model and checkpoint


def _check_mapping(key_mapping: Mapping[str, str]) -> None:
    is_mapping = isinstance(key_mapping, Mapping)
    pairs = [*key_mapping.items()] if is_mapping else []
    if not is_mapping or not all(isinstance(text, str) for pair in pairs for text in pair):
        expected = "a dict of replacements by regular expression"
        raise refusal("USAGE", "key_mapping", expected=expected, got=repr(key_mapping))
    for pattern, replacement in pairs:
        try:
            re.compile(pattern)
        except re.error as error:
            what = f"key_mapping: an invalid regular expression: {error}"
            raise refusal("USAGE", what, got=repr(pattern)) from error
        # A reference to a group (a backslash before a digit or `g`) other than \1.
        if re.search(r"\\(?!1(?!\d))[\dg]", replacement):
            expected = r"no reference but \1, the pattern's first group"
            what = "transformers does not replace this in key_mapping: write more patterns"
            raise refusal("UNSUPPORTED", what, expected=expected, got=replacement)


def _transforms(part: Part, targets: DescribedTensors, key_mapping: Any) -> list[Any]:
    """The transforms that transformers applies to the stored tensors of a part."""
    if not is_pretrained(part.module):
        if part.module is None or not key_mapping:
            return []
        from transformers.core_model_loading import WeightRenaming

        return [WeightRenaming(source, target) for source, target in key_mapping.items()]
    if importlib.util.find_spec("transformers.conversion_mapping") is None:  # before version 5
        if key_mapping or renames_stored(part.module):
            what = f"transformers 4 renames stored tensors of {type(part.module).__name__}"
            raise refusal("UNSUPPORTED", what, expected="transformers 5")
        return []
    from transformers.conversion_mapping import get_model_conversion_mapping

    with classes_before_sharding(part.module):
        quantizer = _quantizer_of(part.module, targets)
        transforms = get_model_conversion_mapping(part.module, key_mapping, quantizer)
    for transform in transforms:
        # The path of the nested model to which the transform applies, in names without wrappers.
        if scope := getattr(transform, "scope_prefix", None):  # transformers 5.3 has none
            transform.scope_prefix = canonical(scope)
    return transforms


def build_recipe(
    model: Any, checkpoint: str | os.PathLike[str] | Mapping[str, Any], *,
    dtype: Any = None, keep_fp32: str | None = None,
    missing: str | Iterable[str] | Mapping[str, Rule] = "error",
    unexpected: str | Iterable[str] = "error", present: Iterable[str] = (), untie: bool = False,
    key_mapping: Mapping[str, str] | None = None, adapter: str | None = None,
    structure: Structure | None = None, resized: bool = False,
) -> Recipe:  # fmt: skip
    """As `recipe_for`, with the rules by name.

    Args:
        missing: "ignore" is as "init".
        structure: the model's structure, if already known.
        resized: whether token embeddings and heads may have another number of rows than stored.
    """
    _check_mapping(key_mapping or {})
    stored = stored_in(checkpoint)
    structure = structure or structure_of(model, adapter)
    targets = described(structure)
    rules = Rules(missing, targets)
    translation = _translate(
        structure,
        stored,
        targets,
        ask=lambda part: _transforms(part, targets, key_mapping),
        may=_AllowedShapes(
            differ=lambda name: not rules.take_all and rules.of(name) is not None,
            grow=(_of_tokens(structure) if resized else frozenset()).__contains__,
        ),
    )
    _check_unexpected(translation, unexpected, structure, stored)
    dtypes = Dtypes(structure, targets, dtype_text(dtype), keep_fp32)
    recipe = Recipe(grown=translation.grown, unexpected=sorted(translation.unexpected))
    for name, array in translation.arrays.items():
        recipe.targets[name] = cast(name, array, dtypes.of(name, translation.first[name]))
    open_ties = _tie(recipe, ties_of(structure), untie)
    asked = RecipeRequest(rules, targets, frozenset(present))
    recipe.norms = begin_as_base(recipe.targets, structure, translation.arrays, dtypes, asked)
    left = _left_to_model(structure, translation.arrays)
    lacking = _fill_gaps(
        recipe, targets, dtypes, open_ties, rules=rules, left_to_model=left, present=asked.present
    )
    _check_lacking(lacking, structure, stored)
    recipe.targets = {name: recipe.targets[name] for name in targets if name in recipe.targets}
    recipe.unused = sorted([*translation.dropped, *translation.unexpected, *translation.doubled])
    return recipe


def _of_tokens(structure: Structure) -> frozenset[str]:
    """Names of the tensors of token embeddings and output heads."""
    roots = {id(m.root): m.root for m in structure.members.values() if m.root is not None}
    modules = {id(module) for root in roots.values() for module in embeddings_of(root)}
    return frozenset(n for n, member in structure.members.items() if id(member.module) in modules)


# ---- the model of a directory


def meta_model(
    directory: str | os.PathLike[str], dtype: "torch.dtype | str | None" = None
) -> "transformers.PreTrainedModel":
    """The model of a directory's config.json on meta, without memory for its weights.

    Args:
        directory: what transformers' AutoConfig accepts; it raises OSError for others.
        dtype: a torch.dtype or its name; None: the config's, or float32 if it has none.

    Raises:
        UsageError: transformers lacks the class of the architecture, or `dtype` is invalid.
    """
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory)
    dtype = getattr(torch, dtype_text(dtype) or dtype_name(config.dtype or torch.float32))
    names = config.architectures or []
    cls = getattr(transformers, names[0], None) if names else None
    if cls is None:
        what = f"transformers {transformers.__version__} lacks the class of this architecture"
        raise refusal("UNSUPPORTED", what, got=names[0] if names else "no 'architectures'")
    with contextlib.ExitStack() as stack:
        for context in cls.get_init_context(dtype, False, False, None):
            stack.enter_context(context)
        return cls(config)
