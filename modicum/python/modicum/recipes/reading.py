"""Reads a recipe.json."""

import json
import os
from pathlib import Path
from typing import Any

from modicum.errors import failure, refusal
from modicum.recipes.recipe import Recipe


def read_recipe(path: str | os.PathLike[str]) -> Recipe:
    """Reads a recipe.json. Raises `UsageError` for other files, and `IoError` if the file can't be
    read. Ops are checked by the load."""
    path, what = Path(path), "invalid recipe.json"
    try:
        document = json.loads(path.read_text())
        made = Recipe(dict(document["targets"]), list(document.get("unused", [])))
    except OSError as error:
        raise failure("IO", "can't read the recipe", file=path.name, got=error.strerror) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise refusal("MISMATCH", what, file=path.name, got=repr(error)) from error
    for name, node in made.targets.items():
        if not _is_node(node):
            expected, got = 'an object with an "op"', json.dumps(node)
            raise refusal("MISMATCH", what, file=path.name, tensor=name, expected=expected, got=got)
    return made


def _is_node(value: Any) -> bool:
    """Whether a target of a document can be read as a node, whose op and inputs the load checks."""
    if not isinstance(value, dict) or not isinstance(value.get("op"), str):
        return False
    return value["op"] != "caller" or ("dtype" in value and isinstance(value.get("shape"), list))
