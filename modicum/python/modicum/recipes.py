"""From transformers' own conversion mapping to an explicit recipe.json.

    recipe = modicum.recipes.recipe_for(model, "path/of/a/checkpoint")
    Path("recipe.json").write_text(recipe.text())

`model` may be on meta, and sharded already. What the installed transformers would rename, stack,
concatenate, cut, transpose or permute while loading is written down per tensor, with no pattern
left; `modicum plan` and `modicum load` take it with `--recipe`. The same from the command line:

    python -m modicum.recipes DIRECTORY -o recipe.json

Neither torch nor transformers is imported before they are needed.
"""

import argparse
import contextlib
import copy
import difflib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modicum._index_maps import Array, Node, init
from modicum._operations import OPERATIONS
from modicum._translation import Described, Translation, natural_key, translate
from modicum.errors import Error, refusal

__all__ = [
    "OPERATIONS",
    "Recipe",
    "Translation",
    "meta_model",
    "natural_key",
    "recipe_for",
    "translate",
]

Rule = str | tuple[str, float]

# Casts that a recipe may ask for, by where they begin; every FP8 code has a scale.
_FLOATS = frozenset({"float32", "bfloat16", "float16"})
_CASTS = dict.fromkeys((*_FLOATS, "float8_e4m3fn", "float8_e5m2"), _FLOATS)
_SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


@dataclass
class Recipe:
    """How every tensor of a model is made of those of a checkpoint."""

    targets: dict[str, Node] = field(default_factory=dict)
    """By name in the model, in the model's order."""
    unused: list[str] = field(default_factory=list)
    """Stored tensors that are not read, sorted."""
    missing: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Dtype and shape of the model's tensors that no target makes: the model initialises them."""

    @property
    def document(self) -> dict[str, Any]:
        """What recipe.json holds."""
        return {"targets": self.targets, "unused": self.unused}

    def text(self) -> str:
        """recipe.json, as short as it can be."""
        return json.dumps(self.document, separators=(",", ":"), ensure_ascii=False)


# ---- what there is


def _dtype_name(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    return _SAFETENSORS_DTYPES.get(name, name)


def stored_in(checkpoint: str | os.PathLike[str] | Mapping[str, Any]) -> Described:
    """Dtype and shape of each stored tensor: of a path, by `modicum.inspect`; or of a mapping of
    names to (dtype, shape), or to anything that has a `dtype` and a `shape`."""
    if isinstance(checkpoint, Mapping):
        pairs = {
            name: (value.dtype, value.shape) if hasattr(value, "shape") else value
            for name, value in checkpoint.items()
        }
        return {name: (_dtype_name(d), tuple(shape)) for name, (d, shape) in pairs.items()}
    from modicum import inspect

    tensors = inspect(checkpoint)["tensors"]
    return {t["name"]: (t["dtype"], tuple(t["shape"])) for t in tensors}


def _class_before_sharding(module: Any) -> type:
    wrappers = {"FSDPModule", "DDP"}
    for cls in type(module).__mro__:
        if not any(base.__name__ in wrappers for base in cls.__mro__):
            return cls
    return type(module)


@contextlib.contextmanager
def _classes_before_sharding(model: Any) -> Iterator[None]:
    """transformers knows a module by its class, which `fully_shard` changes: nothing would be said,
    and the conversions of every wrapped model left out."""
    changed = []
    try:
        for module in model.modules():
            before = _class_before_sharding(module)
            if before is not type(module):
                changed.append((module, type(module)))
                module.__class__ = before
        yield
    finally:
        for module, cls in changed:
            module.__class__ = cls


def _quantizer_of(model: Any, targets: Described) -> Any:
    """What transformers would load a quantized checkpoint by; None where it is not quantized."""
    config = getattr(model.config, "quantization_config", None) or getattr(
        model.config.get_text_config(decoder=True), "quantization_config", None
    )
    if config is None:
        return None
    method = config["quant_method"] if isinstance(config, dict) else config.quant_method
    method = getattr(method, "value", method)
    if method not in ("fp8", "mxfp8"):
        raise refusal("UNSUPPORTED", f"the quantization '{method}' is not known")
    from transformers.quantizers.auto import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(copy.deepcopy(config), pre_quantized=True)
    keeps_codes = any(name.endswith("_scale_inv") for name in targets)
    quantizer.quantization_config.dequantize = not keeps_codes
    return quantizer


# ---- dtypes


class _Dtypes:
    """The dtype that each target is loaded as."""

    def __init__(self, model: Any, targets: Described, dtype: str | None) -> None:
        self._targets = targets
        self._wanted = dtype
        self._own = _dtype_name(model.dtype)
        self._float32: re.Pattern[str] | None = None
        if dtype is not None:
            import torch

            patterns = model._get_dtype_plan(getattr(torch, dtype))
            body = "|".join(f"(?:{pattern.replace('*', '.*')})" for pattern in patterns)
            self._float32 = re.compile(body) if body else None

    def of(self, target: str, first: str) -> str:
        """`first`: the target whose dtype all that one conversion makes has."""
        if self._wanted is None:
            return self._targets[target][0]
        if self._float32 is not None and self._float32.search(first):
            return "float32"
        dtype = self._targets[first][0]
        return self._wanted if dtype == self._own else dtype


def _cast(target: str, array: Array, dtype: str) -> Node:
    if dtype == array.dtype:
        return array.node
    if dtype not in _CASTS.get(array.dtype, ()):
        raise refusal(
            "UNSUPPORTED",
            "a cast that is not between float32, bfloat16 and float16",
            tensor=target,
            expected=dtype,
            got=array.dtype,
        )
    return {**array.node, "dtype": dtype}


# ---- ties


def _ties_of(model: Any, tensors: Mapping[str, Any]) -> list[list[str]]:
    """Groups of names of one tensor, each with the one that the others are tied to first: what the
    model declares, and names that share a tensor."""
    declared = {
        name: source
        for name, source in getattr(model, "all_tied_weights_keys", {}).items()
        if name in tensors and source in tensors
    }
    by_identity: dict[int, str] = {}
    for name, tensor in tensors.items():
        source = by_identity.setdefault(id(tensor), name)
        if source != name and name not in declared and source not in declared:
            declared[name] = source
    groups: dict[str, list[str]] = {}
    for name in declared:
        source = declared[name]
        while source in declared:
            source = declared[source]
        groups.setdefault(source, [source]).append(name)
    return list(groups.values())


def _tie(recipe: Recipe, ties: Iterable[list[str]], untie: bool) -> list[list[str]]:
    """The first name that is there has the tensor, the others are aliases. One that is stored too
    says by what, and is compared. Returns the ties of which nothing is there."""
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
                kept = {k: v for k, v in recipe.targets[name].items() if k != "dtype"}
                alias["in"] = [kept]
            recipe.targets[name] = alias
    return open_ties


# ---- what is left over, and what is missing


def _any_of(patterns: Iterable[str]) -> re.Pattern[str] | None:
    body = "|".join(f"(?:{pattern})" for pattern in patterns)
    return re.compile(body) if body else None


def _droppable(model: Any) -> list[str]:
    """What transformers drops without a word."""
    patterns = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.append(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.append(r"(^|\.)position_ids$")
    return patterns


def _near(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    return f"nearest '{near[0]}'" if near else ""


def _check_unexpected(
    translation: Translation, model: Any, unexpected: str | Iterable[str], targets: Described
) -> None:
    if unexpected == "ignore":
        return
    listed = [unexpected] if isinstance(unexpected, str) else [*unexpected]
    named = _any_of([] if unexpected == "error" else listed)
    droppable = _any_of(_droppable(model))

    def may_be_dropped(name: str, would_be: list[str]) -> bool:
        by_caller = named is not None and named.search(name)
        return bool(by_caller) or (
            droppable is not None and all(droppable.search(one) for one in would_be)
        )

    refused = {
        name: would_be
        for name, would_be in translation.unexpected.items()
        if not may_be_dropped(name, would_be)
    }
    if refused:
        name, would_be = next(iter(refused.items()))
        raise refusal(
            "MISMATCH",
            f"{len(refused)} stored tensors are no part of the model, the first of them "
            f"as '{would_be[0]}'",
            tensor=name,
            got=_near(would_be[0], targets),
        )
    for name, target in translation.doubled.items():
        if named is None or not named.search(name):
            what = f"another stored tensor is '{target}' already"
            raise refusal("MISMATCH", what, tensor=name)


def _made_by_rule(rule: Rule, dtype: str, shape: tuple[int, ...], name: str) -> Node:
    kind, std = (rule, None) if isinstance(rule, str) else rule
    if kind not in ("zeros", "ones", "normal") or (kind == "normal") != (std is not None):
        raise refusal("USAGE", f"no rule to make a tensor by: {rule!r}", tensor=name)
    return init(kind, std, dtype, shape).node


def _initialise(
    recipe: Recipe, targets: Described, dtypes: _Dtypes, rules: Mapping[str, Rule]
) -> None:
    """What is missing and has a rule: its node, or left to the model."""
    for name, (_, shape) in targets.items():
        rule = next((r for p, r in rules.items() if name == p or re.search(p, name)), None)
        if name in recipe.targets or rule is None:
            continue
        dtype = dtypes.of(name, name)
        if rule == "model":
            recipe.missing[name] = (dtype, shape)
        else:
            recipe.targets[name] = _made_by_rule(rule, dtype, shape, name)


def _lacking(recipe: Recipe, model: Any, targets: Described, dtypes: _Dtypes) -> list[str]:
    """What nothing makes; first leaves to the model what the model says may be missing."""
    left_to_model = _any_of(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    lacking = []
    for name, (_, shape) in targets.items():
        if name in recipe.targets or name in recipe.missing:
            continue
        if left_to_model is not None and left_to_model.search(name):
            recipe.missing[name] = (dtypes.of(name, name), shape)
        else:
            lacking.append(name)
    return lacking


# ---- the whole


def recipe_for(
    model: Any,
    checkpoint: str | os.PathLike[str] | Mapping[str, Any],
    *,
    dtype: Any = None,
    missing: str | Mapping[str, Rule] = "error",
    unexpected: str | Iterable[str] = "error",
    untie: bool = False,
    key_mapping: Mapping[str, str] | None = None,
    quantizer: Any = None,
) -> Recipe:
    """The recipe by which `checkpoint` is loaded into `model` as `from_pretrained` would load it.

    Args:
        model: a transformers model, on meta or not, sharded or not. Nothing of it is changed.
        checkpoint: a directory or file, or a mapping of stored names to (dtype, shape).
        dtype: None: each tensor as the model has it. A dtype, best the one that the model was
            built with: as `from_pretrained(dtype=...)`, float32 for what the model lists so.
        missing: "error"; "ignore": left to the model; or what to do by name or regular expression:
            "zeros", "ones", ("normal", std), or "model" to leave it to the model. What the model
            itself says may be missing is left to it.
        unexpected: "error"; "ignore"; or regular expressions of stored names that may be dropped,
            beside those that the model itself lists.
        untie: where a tied name is stored too, load both rather than compare them.
        key_mapping: further renamings, as `from_pretrained` takes them.
        quantizer: None: by the model's config.

    Raises:
        UsageError: MISMATCH where model and checkpoint do not go together, UNSUPPORTED for an
            operation, a quantization or a cast that is not known.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    stored = stored_in(checkpoint)
    tensors = {n: t for n, t in model.state_dict(keep_vars=True).items() if hasattr(t, "shape")}
    targets = {name: (_dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items()}
    with _classes_before_sharding(model):
        quantizer = quantizer or _quantizer_of(model, targets)
        transforms = get_model_conversion_mapping(model, key_mapping, quantizer)
    translation = translate(
        transforms,
        stored,
        targets,
        config=model.config,
        base_model_prefix=model.base_model_prefix,
    )
    _check_unexpected(translation, model, unexpected, targets)
    dtypes = _Dtypes(model, targets, None if dtype is None else _dtype_name(dtype))
    recipe = Recipe()
    for name in targets:
        if name in translation.made:
            wanted = dtypes.of(name, translation.first[name])
            recipe.targets[name] = _cast(name, translation.made[name], wanted)
    open_ties = _tie(recipe, _ties_of(model, tensors), untie)
    if not isinstance(missing, str):
        _initialise(recipe, targets, dtypes, missing)
        _tie(recipe, open_ties, untie=False)
    lacking = _lacking(recipe, model, targets, dtypes)
    if lacking and missing != "ignore":
        what = f"the checkpoint lacks {len(lacking)} tensors of the model"
        raise refusal("MISMATCH", what, tensor=lacking[0], got=_near(lacking[0], stored))
    recipe.missing |= {name: (dtypes.of(name, name), targets[name][1]) for name in lacking}
    left = [*translation.dropped, *translation.unexpected, *translation.doubled]
    recipe.unused = sorted(left)
    return recipe


# ---- the command line


def meta_model(directory: str | os.PathLike[str], dtype: Any = None) -> Any:
    """The model that a directory's config.json describes, without memory for its weights.

    `dtype`: None: what the config says, else float32.
    """
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory)
    dtype = dtype or config.dtype or torch.float32
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    names = config.architectures or []
    cls = getattr(transformers, names[0], None) if names else None
    if cls is None:
        what = f"transformers {transformers.__version__} has no class of this name"
        raise refusal("UNSUPPORTED", what, tensor=names[0] if names else "no 'architectures'")
    with contextlib.ExitStack() as stack:
        for context in cls.get_init_context(dtype, False, False, None):
            stack.enter_context(context)
        return cls(config)


def main(arguments: list[str] | None = None) -> int:
    """Writes the recipe.json of a directory."""
    parser = argparse.ArgumentParser(prog="python -m modicum.recipes", description=main.__doc__)
    parser.add_argument("directory", help="a Hugging Face directory: config.json and safetensors")
    parser.add_argument("-o", "--output", help="where to write it; stdout if not given")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16; as the config says if not")
    parser.add_argument("--untie", action="store_true", help="load both names of a tie")
    parser.add_argument("--ignore-missing", action="store_true", help="leave them to the model")
    parser.add_argument("--ignore-unexpected", action="store_true", help="do not read them")
    options = parser.parse_args(arguments)
    try:
        model = meta_model(options.directory, options.dtype)
        recipe = recipe_for(
            model,
            options.directory,
            dtype=options.dtype or model.dtype,
            missing="ignore" if options.ignore_missing else "error",
            unexpected="ignore" if options.ignore_unexpected else "error",
            untie=options.untie,
        )
    except Error as error:
        print(f"modicum: {error}", file=sys.stderr)
        return error.code
    if options.output:
        Path(options.output).write_text(recipe.text())
    else:
        print(recipe.text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
