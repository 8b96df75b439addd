"""From a model and a checkpoint to an explicit recipe.json.

    recipe = modicum.recipes.recipe_for(model, "path/of/a/checkpoint")
    Path("recipe.json").write_text(recipe.text())

`model` may be on meta, sharded already, and wrapped. What the installed transformers would rename,
stack, concatenate, cut, transpose or permute while loading is written down per tensor, with no
pattern left; `modicum plan` and `modicum load` take it with `--recipe`. From the command line:

    python -m modicum.recipes DIRECTORY -o recipe.json

Neither torch nor transformers is imported before they are needed.
"""

from modicum.recipes.operations import OPERATIONS
from modicum.recipes.recipe import Recipe, meta_model, recipe_for
from modicum.recipes.translation import Translation, natural_key, translate

__all__ = [
    "OPERATIONS",
    "Recipe",
    "Translation",
    "meta_model",
    "natural_key",
    "recipe_for",
    "translate",
]
