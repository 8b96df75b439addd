"""docs/reference/recipes.md: each example equals the installed transformers' conversion of the
tensors that it names, and `modicum plan` accepts it."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from program import run_json, write_recipe

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import numpy as np  # noqa: E402
from recipe_oracle import evaluate  # noqa: E402
from transformers.conversion_mapping import get_checkpoint_conversion_mapping  # noqa: E402

from modicum import recipes  # noqa: E402
from modicum.recipes.translation import translate  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/recipes.md"
CONFIG = SimpleNamespace(vision_config=SimpleNamespace(num_attention_heads=2))
SMALL = {
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}


def examples() -> Iterator[tuple[str, dict[str, Any]]]:
    """(op, example) of each example on the page. An example has the keys `family` (a key of the
    conversion mapping, or a model's class), `stored` (shapes by name) and `targets` (nodes)."""
    page = PAGE.read_text()
    for op, block in re.findall(r"^\*\*`(\w+)`\*\*.*?^```json\n(.*?)^```", page, re.S | re.M):
        yield op, json.loads(block)


EXAMPLES = dict(examples())


def test_the_page_shows_every_op(root: Path) -> None:
    source = (root / "modicum/recipe/recipe.h").read_text()
    ops = re.findall(r"^  (\w+), +// ", source.split("enum class Op")[1].split("};")[0], re.M)
    assert len(ops) == 10
    assert EXAMPLES.keys() == set(ops) - {"caller"}
    assert sorted(re.findall(r"^\*\*`(\w+)`\*\*", PAGE.read_text(), re.M)) == sorted(ops)
    for op, example in EXAMPLES.items():
        assert f'"op": "{op}"' in json.dumps(example["targets"])


def shape_of(node: dict[str, Any], stored: dict[str, list[int]]) -> tuple[int, ...]:
    """The shape of a node's result."""
    return evaluate(node, {name: np.zeros(shape) for name, shape in stored.items()}).shape


def of_the_mapping(family: str, stored: dict[str, Any], targets: dict[str, Any]) -> dict[str, Any]:
    """The nodes that a family's conversion mapping gives for these tensors."""
    legacy = get_checkpoint_conversion_mapping("legacy")
    translation = translate(
        (get_checkpoint_conversion_mapping(family) or []) + legacy,
        {name: ("bfloat16", tuple(shape)) for name, shape in stored.items()},
        {name: ("bfloat16", shape_of(node, stored)) for name, node in targets.items()},
        config=CONFIG,
    )
    assert translation.unexpected == {}
    return {name: array.node for name, array in translation.arrays.items()}


def of_the_model(name: str, stored: dict[str, Any], targets: dict[str, Any]) -> dict[str, Any]:
    """The nodes of `targets` in the recipe of a model of class `name`."""
    cls = getattr(transformers, name)
    with torch.device("meta"):
        config = cls.config_class(**SMALL, tie_word_embeddings=True)
        model = cls._from_config(config, dtype=torch.bfloat16)
    complete = {n: ("bfloat16", tuple(t.shape)) for n, t in model.state_dict().items()}
    assert {n: list(shape) for n, (_, shape) in complete.items() if n in stored} == stored
    # The checkpoint has all tensors except those that the example makes of others.
    kept = {n: t for n, t in complete.items() if n in stored or n not in targets}
    missing = {"score": ("normal", 0.02)} if any("score" in n for n in complete) else "error"
    recipe = recipes.recipe_for(model, kept, rules=recipes.LoadRules(missing=missing))
    return {n: node for n, node in recipe.targets.items() if n in targets}


@pytest.mark.parametrize("op", sorted(EXAMPLES.keys() - {"gather"}))
def test_an_example_equals_transformers_conversion(op: str) -> None:
    example = EXAMPLES[op]
    family, stored, targets = example["family"], example["stored"], example["targets"]
    nodes_of = of_the_model if family[0].isupper() else of_the_mapping
    assert nodes_of(family, stored, targets) == targets


def test_the_example_of_gather_equals_that_of_reshape() -> None:
    (name,) = EXAMPLES["reshape"]["stored"]
    ids = {name: np.arange(24).reshape(8, 3)}
    maps = [next(iter(EXAMPLES[op]["targets"].values())) for op in ("reshape", "gather")]
    assert np.array_equal(evaluate(maps[0], ids), evaluate(maps[1], ids))


@pytest.mark.parametrize("op", sorted(EXAMPLES))
def test_an_example_is_planned(op: str, modicum: Path, tmp_path: Path) -> None:
    example = EXAMPLES[op]
    header, end = {}, 0
    for name, shape in example["stored"].items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
    used = json.dumps(example["targets"])
    unused = [name for name in example["stored"] if f'"{name}"' not in used]
    path = write_recipe(tmp_path / "recipe.json", example["targets"], unused)
    planned = run_json(modicum, "plan", file, "--recipe", path, "--ranks=2")
    assert planned["checkpoint"]["tensors"] == len(header)
