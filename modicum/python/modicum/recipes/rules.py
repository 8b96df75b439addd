"""`LoadRules`, and `recipe_for`, which makes a recipe by them."""

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from modicum.errors import refusal
from modicum.options import Options, read_options, require_flag
from modicum.options.renamed import refuse_old_keywords
from modicum.recipes.patterns import Rule
from modicum.recipes.recipe import Recipe, build_recipe

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class LoadRules(Options):
    """What may differ between a checkpoint and the model that is loaded from it."""

    _argument = "rules"
    _defaults = {"missing": "error", "unexpected": "error", "seed": 0}

    keep_fp32: str | None = None
    """A regular expression (RE2, matches anywhere in a name): tensors with matching names are
    loaded as float32. Here and in `missing` and `unexpected` a pattern must match some name. In
    FSDP2 a module with such a tensor must be sharded by itself: a unit trains one dtype."""
    missing: str | Collection[str] | Mapping[str, Rule] | None = None
    """For names that are not in the checkpoint though the model needs them: "error" (the default);
    "init": initialise them by the model's own rule, with the same bits at any world size; patterns
    of names to initialise; or rules by pattern ("zeros", "ones", ("normal", std), "model")."""
    unexpected: str | Collection[str] | None = None
    """For stored names that the model lacks: "error" (the default), "ignore", or patterns of names
    to drop."""
    key_mapping: Mapping[str, str] | None = None
    """New names of stored tensors by regular expression, as transformers replaces them: \\1 is the
    first group, and the only reference; write more patterns in place of a second one. Every
    pattern that matches is applied, in their order."""
    recipe: Recipe | str | Path | None = None
    """How tensors are made of stored ones, from `modicum.recipes` or a recipe.json, for a model
    with other names. Not with keep_fp32, missing, unexpected, key_mapping, or a `dtype`."""
    adapter: str | None = None
    """The adapter into which an adapter's directory is loaded, if the model has several."""
    resized: Literal["mean", "model"] | None = None
    """For token embeddings and heads with another number of rows than stored: "mean": new rows are
    the mean of the stored ones; "model": made by the model's rule; None: an error. On meta
    transformers resizes with `model.resize_token_embeddings(rows, mean_resizing=False)`."""
    buffers: Literal["restore", "keep"] | None = None
    """What happens to a non-persistent buffer whose values are not those of the model's own rule:
    "restore" them, or "keep" it. None: restored if nothing was written to its module since
    `to_empty()`."""
    seed: int | None = None
    """The seed of initialised tensors; 0 by default."""


IN_A_RECIPE = ("keep_fp32", "missing", "unexpected", "key_mapping", "adapter", "resized")
"""The rules by which a recipe is made."""


@refuse_old_keywords(LoadRules)
def recipe_for(
    model: "nn.Module", checkpoint: str | os.PathLike[str] | Mapping[str, Any], *,
    dtype: "torch.dtype | str | None" = None, rules: LoadRules | None = None,
    present: Iterable[str] = (), untie: bool = False,
) -> Recipe:  # fmt: skip
    """The recipe that loads `checkpoint` into `model`: like `from_pretrained` for a transformers
    model, by name for any other module.

    Args:
        model: any module, on meta or not, sharded or not; it is not changed. Wrappers (PEFT,
            torch.compile, an outer module) change only the names of the targets.
        checkpoint: a directory or file, or a mapping of stored names to (dtype, shape). The names
            are those in the unwrapped model, in the wrapped one, or in an adapter's file.
        dtype: None: the dtype of each tensor in the model. Otherwise the dtype with which the model
            was built, a torch.dtype or its name: tensors get it as in `from_pretrained`, which
            keeps listed ones in float32.
        rules: `LoadRules`: keep_fp32, missing, unexpected, key_mapping, adapter, resized. Without a
            rule for missing tensors the model still initialises those that it lists as possibly
            missing, and adapters of which nothing is stored. A tensor that `missing` names also
            counts as missing if its shape differs. With `resized`, `Recipe.grown` lists tensors
            with another number of rows; additional rows repeat the first ones.
        present: canonical names of tensors that have values already, and so are not missing.
        untie: if both names of a tie are stored, load both instead of comparing them.

    Returns:
        The recipe, for `LoadRules(recipe=)` or, as text, for a file.

    Raises:
        UsageError: model and checkpoint differ (MISMATCH); an operation, quantization or cast is
            unknown (UNSUPPORTED); a regular expression is invalid (USAGE).
        FormatError, IntegrityError, IoError: the checkpoint can't be opened.
    """
    if isinstance(present, str):
        raise refusal("USAGE", "present", expected="names of tensors", got=repr(present))
    require_flag("untie", untie)
    values = read_options("recipe_for", LoadRules, rules, IN_A_RECIPE)
    values["resized"] = values["resized"] is not None
    return build_recipe(model, checkpoint, dtype=dtype, present=present, untie=untie, **values)
