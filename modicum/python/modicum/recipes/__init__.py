"""Makes an explicit recipe.json from a model and a checkpoint.

    recipe = modicum.recipes.recipe_for(model, "path/of/a/checkpoint")
    Path("recipe.json").write_text(recipe.text())

`model` may be on meta, sharded and wrapped. The recipe lists for each tensor the stored tensors and
ops of which it is made: everything that the installed transformers renames, stacks, concatenates,
cuts, transposes or permutes while it loads, written without name patterns. `modicum plan` and
`modicum load` accept it with `--recipe`.

From the command line:

    python -m modicum.recipes DIRECTORY -o recipe.json

torch and transformers are imported when they are first needed.
"""

from modicum.recipes.reading import read_recipe as read_recipe
from modicum.recipes.recipe import Recipe as Recipe
from modicum.recipes.recipe import meta_model as meta_model
from modicum.recipes.rules import LoadRules as LoadRules
from modicum.recipes.rules import recipe_for as recipe_for
