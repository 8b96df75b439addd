"""`resume` compares the values that it has loaded with the digests of the checkpoint, through any
recipe and in any layout: an error names a data file with values of an earlier checkpoint.

Catches: stale values are resumed; a tensor's elements are digested in the order of the target
instead of the stored tensor; the parts that replicas have read count as other elements; a tensor of
which only a part is loaded counts as changed; values are digested after they were cast; tensors are
neither compared nor reported.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from program import failure, header_of, joined, run_json, stored, write_recipe

LAYOUTS: tuple[tuple[object, ...], ...] = (
    ("--ranks", 3),
    ("--ranks", 4, "--layout", "hsdp", "--mesh", "2x2"),
    ("--ranks", 4, "--layout", "tp-fsdp", "--mesh", "2x2", "--tp-rowwise", "down|o_proj"),
    ("--ranks", 2, "--shard-dim", 1),
)
RECIPES = ("identity", "stacked", "permuted", "renamed", "unused")


@pytest.fixture(scope="module")
def moe(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small MoE with a tied head, in several files."""
    directory = tmp_path_factory.mktemp("values") / "moe"
    run_json(modicum, "synth", directory, "--arch", "tiny-moe", "--shard-size", 300)
    return directory


def weight_map_of(directory: Path) -> dict[str, str]:
    """The file of each tensor, by name."""
    return json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]


def recipe_of(moe: Path, how: str) -> tuple[dict[str, Any], list[str]]:
    """The targets and the unused tensors of one of RECIPES, which changes some expert weights."""
    targets = {name: stored(name) for name in weight_map_of(moe)}
    experts = [name for name in targets if ".experts." in name and "gate_proj" in name]
    assert len(experts) > 1
    if how == "stacked":
        targets["stacked"] = joined("stack", 0, [targets.pop(name) for name in experts])
    elif how == "permuted":
        for name in experts:
            targets[name] = {"op": "permute", "dims": [1, 0], "in": [stored(name)]}
    elif how == "renamed":
        targets["renamed"] = targets.pop(experts[0])
    elif how == "unused":
        del targets[experts[0]]
        return targets, experts[:1]
    return targets, []


@pytest.mark.parametrize("how", RECIPES)
def test_stale_values_are_not_resumed(modicum: Path, moe: Path, tmp_path: Path, how: str) -> None:
    """Stale: a data file with the right length and header, and the values of an earlier
    checkpoint."""
    targets, unused = recipe_of(moe, how)
    recipe = write_recipe(tmp_path / "r.json", targets, unused)
    words = ("--optimizer", "adamw:fp32-split", "--recipe", recipe, "--ranks", 2)
    for root, steps in ((tmp_path / "old", 1), (tmp_path / "root", 2)):
        run_json(modicum, "save", moe, root, "--step", 1, "--steps", steps, *words)
    root, step = tmp_path / "root", tmp_path / "root/step-1"
    for layout in LAYOUTS:
        resumed = run_json(modicum, "resume", root, *layout)
        assert resumed["not_compared"] == unused
    files = [path.relative_to(step) for path in sorted(step.rglob("*.safetensors"))]
    assert len({path.parent for path in files}) == 2
    for number, file in enumerate(files):
        fresh, stale = (step / file).read_bytes(), (tmp_path / "old/step-1" / file).read_bytes()
        tensors = set(header_of(step / file)[0]) - {"__metadata__"}
        if tensors <= set(unused):  # copied from the model by both saves
            assert fresh == stale
            continue
        assert fresh != stale and len(fresh) == len(stale)
        (step / file).write_bytes(stale)
        error = failure(modicum, 12, "resume", step, *LAYOUTS[number % len(LAYOUTS)])
        assert error["category"] == "INTEGRITY" and error["tensor"]
        assert error["file"] == str(file)
        if file.parent == Path("."):  # the state's digest covers the weights, too
            without = ("--optimizer", "none", "--recipe", recipe)
            failure(modicum, 12, "resume", step, *without, *LAYOUTS[number % len(LAYOUTS)])
        (step / file).write_bytes(fresh)


def test_a_changed_value_is_found_in_flat_groups(modicum: Path, moe: Path, tmp_path: Path) -> None:
    run_json(modicum, "save", moe, tmp_path / "root", "--step", 1)
    step = tmp_path / "root/step-1"
    file = min(step.glob("*.safetensors"))
    for layout in ("zero2", "zero3", "none"):
        run_json(modicum, "resume", tmp_path / "root", "--ranks", 3, "--layout", layout)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    for layout in ("zero2", "zero3", "none"):
        words = ("resume", step, "--ranks", 3, "--layout", layout)
        assert failure(modicum, 12, *words)["file"] == file.name


def test_values_are_compared_before_they_are_cast(modicum: Path, moe: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    run_json(modicum, "save", moe, root, "--step", 1)
    resumed = run_json(modicum, "resume", root, "--dtype", "float16", "--ranks", 3)
    assert resumed["not_compared"] == []
    file = max((root / "step-1").glob("*.safetensors"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    words = ("resume", root / "step-1", "--dtype", "float16", "--ranks", 3)
    assert failure(modicum, 12, *words)["file"] == file.name


def test_tensors_that_are_loaded_in_part_are_named(
    modicum: Path, moe: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    saved = run_json(modicum, "save", moe, root, "--step", 1)
    targets, _ = recipe_of(moe, "identity")
    name = max(targets)
    part = {"op": "slice", "dim": 0, "start": 0, "stop": 1, "in": [stored(name)]}
    recipe = write_recipe(tmp_path / "r.json", {**targets, name: part})
    resumed = run_json(modicum, "resume", root, "--recipe", recipe, "--ranks", 2)
    assert resumed["not_compared"] == [name]
    assert 0 < resumed["compared_bytes"] < saved["checkpoint"]["bytes"]
