"""Reads a recipe.json."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modicum import _modicum
from modicum.errors import refusal
from modicum.recipes.recipe import Recipe

# Arguments of a load that determine how tensors are made, as a recipe does; with their defaults.
IN_PLACE_OF_A_RECIPE = {
    "dtype": None, "keep_fp32": None, "missing": "error", "unexpected": "error",
    "key_mapping": None,
}  # fmt: skip


def given_recipe(recipe: Any, arguments: Mapping[str, Any]) -> Recipe | None:
    """The recipe that a load was given: a `Recipe`, or read from the path of a recipe.json.

    Raises `UsageError` for other objects, and if `arguments`, the load's arguments by name, have
    one that a recipe replaces; otherwise as `read_recipe`."""
    if recipe is None:
        return None
    for name, default in IN_PLACE_OF_A_RECIPE.items():
        if arguments.get(name, default) != default:
            what = f"{name}= has no effect with recipe=, which determines how every tensor is "
            what += "made: leave one of them out"
            raise refusal("USAGE", what)
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, (str, os.PathLike)):
        return read_recipe(recipe)
    kind = type(recipe)
    expected, got = "a modicum.recipes.Recipe, or the path of a recipe.json", kind.__qualname__
    got = got if kind.__module__ == "builtins" else f"{kind.__module__}.{got}"
    raise refusal("USAGE", "recipe", expected=expected, got=got)


def read_recipe(path: str | os.PathLike[str]) -> Recipe:
    """Reads a recipe from a file.

    Args:
        path: a recipe.json. Its ops are checked by the load.

    Raises:
        UsageError: the file is no recipe, or too long (`MISMATCH`).
        IoError: the file can't be read.
    """
    path, what = Path(path), "invalid recipe.json"
    text = _modicum.read_file(path, too_long="MISMATCH")
    try:
        document = json.loads(text.decode())
        result = Recipe(dict(document["targets"]), list(document.get("unused", [])))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise refusal("MISMATCH", what, file=path.name, got=repr(error)) from error
    for name, node in result.targets.items():
        if not _is_node(node):
            expected, got = 'an object with an "op"', json.dumps(node)
            raise refusal("MISMATCH", what, file=path.name, tensor=name, expected=expected, got=got)
    return result


def _is_node(value: Any) -> bool:
    """Whether a target of a document can be read as a node, whose op and inputs the load checks."""
    if not isinstance(value, dict) or not isinstance(value.get("op"), str):
        return False
    return value["op"] != "caller" or ("dtype" in value and isinstance(value.get("shape"), list))
