"""The number of tokens in the saved config.json: a model with other rows of its token embedding
than the source would not be built again from the source's config."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import nn

from modicum.errors import Error
from modicum.recipes.nodes import stored_under
from modicum.torch.loading.goal import Goal, Model
from modicum.upstream.transformers import embeddings_of, is_pretrained, vocabulary_in


@dataclass(frozen=True)
class SavedVocabulary:
    """What a save says about tokens in config.json."""

    entry: tuple[str, int, str, str] | None = None
    """(member of the config, tokens, its model_type, the model_type of the config around it); None:
    as in the source."""
    warning: str = ""


def vocabulary_of(model: Model, goal: Goal) -> SavedVocabulary:
    """The vocabulary of a save with the names of `goal`; the same on every rank. A model without a
    config of transformers has none, and a warning if its rows are not those of the source."""
    found = [(name, root) for name, root in _with_rows_of_tokens(model) if _is_in(name, goal)]
    if not found:
        return SavedVocabulary()
    stored = goal.checkpoint.stored
    rows = {name: model.tensors[name].tensor.shape[0] for name, _ in found}
    if all(name in stored and stored[name][1][:1] == [rows[name]] for name, _ in found):
        return SavedVocabulary()
    targets = json.loads(goal.text)["targets"]
    for name, root in found:
        sources = [*stored_under(targets[name])] or [name]
        before = {stored[source][1][0] for source in sources if source in stored}
        if before <= {rows[name]}:
            continue
        entry = vocabulary_in(getattr(root, "config", None))
        if entry is not None and entry[1] == rows[name]:
            return SavedVocabulary(entry)
        expected = "it has no config of transformers"
        if entry is not None:
            expected = f"its config has {entry[0]} {entry[1]}"
        what = f"config.json has the source's number of tokens, but the model's {name} has "
        what += f"{rows[name]} rows, and {expected}: correct config.json"
        return SavedVocabulary(warning=what)
    return SavedVocabulary()


def _is_in(name: str, goal: Goal) -> bool:
    return any(target["name"] == name and target["alias_of"] is None for target in goal.targets)


def _with_rows_of_tokens(model: Model) -> Iterator[tuple[str, Any]]:
    """(name, outermost model around it) for each tensor with a row for each token."""
    counted: set[int] = set()
    for part in model.structure.parts:
        with suppress(Error, NotImplementedError, AttributeError):
            counted |= {id(module) for module in embeddings_of(part.module)}
    for name, member in model.structure.members.items():
        is_plain = not is_pretrained(member.root) and isinstance(member.module, nn.Embedding)
        if name in model.tensors and (is_plain or id(member.module) in counted):
            yield name, member.root
