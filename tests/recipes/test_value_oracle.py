"""Each rank's shards equal, bit for bit, those that torch's DTensor makes of the state dict of
`from_pretrained`, for every name and for families of every kind.

The oracles are transformers and torch. Catches: gate and up exchanged; experts stacked in another
order; a projection sharded before its conversion; a dropped tie; a scale block shifted by one; a
misplaced row of a rotary permutation; a cast of a name that is kept in float32.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from program import run_json

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from families import FAMILIES, Family  # noqa: E402  (after torch is known to be there)
from safetensors.torch import load_file  # noqa: E402
from sharding import Cut, Tensors, assert_same, dtensor_shards  # noqa: E402

from modicum import recipes  # noqa: E402

ROWWISE = r"(o_proj|down_proj|out_proj|fc2|wo|dense_4h_to_h|c_proj|output\.dense)\.weight$"
CUTS = (
    *(Cut("fsdp2", (world,)) for world in (1, 2, 3, 4)),
    Cut("fsdp2", (3,), dim=1),
    Cut("hsdp", (2, 2)),
    Cut("tp-fsdp", (2, 2), rowwise=ROWWISE),
)


# For each fault above a family that has what it needs. Soak has all families.
QUICK = {"llama_tied", "gpt2", "mixtral", "qwen3_fp8", "kimi_k25", "t5"}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(family, id=family.name, marks=() if family.name in QUICK else pytest.mark.soak)
        for family in FAMILIES
    ],
)
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Family, Path]:
    """A family and its checkpoint, as stored on the hub."""
    family = request.param
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    place = tmp_path_factory.mktemp(family.name) / "model"
    return family, family.write(family.build(), place)


def loaded_by_transformers(family: Family, directory: Path, dtype: Any) -> tuple[Tensors, Any]:
    """The state dict without the tensors that the model's class makes itself, and its dtype."""
    model, info = family.model_class.from_pretrained(
        directory, dtype=dtype, output_loading_info=True
    )
    made = family.made_by_class
    assert [n for n in info["missing_keys"] if not (made and re.search(made, n))] == []
    assert not info["mismatched_keys"] and not info["error_msgs"]
    whole = {n: t for n, t in model.state_dict().items() if not (made and re.search(made, n))}
    return whole, model.dtype


def write_recipe(directory: Path, dtype: Any, path: Path, whole: Tensors) -> Path:
    """Writes the recipe for a checkpoint, and asserts that its targets are the names of `whole`."""
    recipe = recipes.recipe_for(recipes.meta_model(directory, dtype), directory, dtype=dtype)
    assert recipe.targets.keys() - recipe.missing.keys() == whole.keys()
    path.write_text(recipe.text())
    return path


def assert_loads(
    modicum: Path, place: Path, directory: Path, recipe: Path, whole: Tensors, cuts: Iterable[Cut]
) -> None:
    """Loads the checkpoint with each cut, and compares each rank's dump with shards of `whole`."""
    for cut in cuts:
        out = place / str(cut)
        run_json(modicum, "load", directory, "--recipe", recipe, "--dump", out, *cut.flags)
        assert len(list(out.iterdir())) == cut.world
        for rank in range(cut.world):
            held = load_file(out / f"rank-{rank:05d}.safetensors")
            assert held.keys() == whole.keys()
            for name, shard in dtensor_shards(cut, whole, rank).items():
                assert_same(held[name], shard, f"{name} of rank {rank}, {cut}")


def test_shards_without_a_cast_equal_torchs(
    modicum: Path, written: tuple[Family, Path], tmp_path: Path
) -> None:
    family, directory = written
    whole, dtype = loaded_by_transformers(family, directory, "auto")
    assert dtype == getattr(torch, family.dtype)
    recipe = write_recipe(directory, dtype, tmp_path / "recipe.json", whole)
    assert_loads(modicum, tmp_path, directory, recipe, whole, CUTS)


def test_cast_shards_equal_torchs(
    modicum: Path, written: tuple[Family, Path], tmp_path: Path
) -> None:
    """The files are float32 and the target is bfloat16, or the reverse."""
    family, directory = written
    other = torch.bfloat16 if family.dtype == "float32" else torch.float32
    whole, _ = loaded_by_transformers(family, directory, other)
    assert other in {tensor.dtype for tensor in whole.values()}
    if family.quantization is not None:
        # If there are FP8 codes, transformers leaves every other `weight` in its stored dtype.
        assert other == torch.float32
        whole = {name: tensor.to(other) for name, tensor in whole.items()}
    recipe = write_recipe(directory, other, tmp_path / "recipe.json", whole)
    assert_loads(modicum, tmp_path, directory, recipe, whole, [Cut("fsdp2", (3,))])


def test_enough_families_are_tested() -> None:
    names = [family.name for family in FAMILIES]
    assert len(names) == len(set(names)) and len({family.cls for family in FAMILIES}) >= 40
    assert set(names) >= QUICK
