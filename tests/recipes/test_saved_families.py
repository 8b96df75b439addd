"""`modicum save` of a model that was not trained writes a checkpoint that `from_pretrained` loads
exactly like the source checkpoint: the same bits, buffers and ties. The checkpoint's files have the
source's tensors under their names, in their shapes and dtypes.

The oracle is transformers. Catches: a stored tensor of which only a part is loaded, and which
counts as loaded completely; a tie that loses one name; a `quantization_config` that is kept
although the codes are dequantised.
"""

from pathlib import Path
from typing import Any

import pytest
from program import joined, run_json, stored, write_checkpoint, write_recipe

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from families import FAMILIES, Family  # noqa: E402  (after torch is known to be there)
from more_families import MORE_FAMILIES  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from sharding import assert_same  # noqa: E402

from modicum import recipes  # noqa: E402

Tensors = dict[str, Any]
EVERY = FAMILIES + MORE_FAMILIES
# At least one family of each kind. The others, which take minutes together, are soak tests.
QUICK = {
    "llama", "llama_tied_both_stored", "llama_tied_head_stored", "gpt2", "qwen3_moe", "gpt_oss",
    "deepseek_v3_fp8", "jamba", "mamba2", "olmo_hybrid", "bert", "wav2vec2", "marian", "t5",
    "qwen3_vl_moe", "inkling", "kimi_k25", "beit",
}  # fmt: skip
WORLDS = (
    ("--ranks", 1),
    ("--ranks", 3),
    ("--ranks", 4, "--layout", "hsdp", "--mesh", "2x2"),
    ("--ranks", 2, "--layout", "zero2"),
    ("--ranks", 4, "--layout", "tp-fsdp", "--mesh", "2x2"),
    ("--ranks", 5, "--shard-size", 20_000),
)


def stored_in(directory: Path) -> Tensors:
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def from_pretrained(family: Family, directory: Path) -> tuple[Any, dict[str, list[str]]]:
    """The model, and the names that `from_pretrained` reports as missing, unexpected and so on."""
    model, info = family.model_class.from_pretrained(
        directory, dtype="auto", output_loading_info=True
    )
    return model, {kind: sorted(map(str, names)) for kind, names in info.items()}


def ties_of(model: Any) -> set[frozenset[str]]:
    """For each tied parameter, its names."""
    names: dict[int, set[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), set()).add(name)
    return {frozenset(tied) for tied in names.values() if len(tied) > 1}


def assert_same_model(saved: Any, source: Any) -> None:
    """Asserts that all tensors and ties are equal, including buffers that are not persistent."""
    ours = dict(saved.named_buffers()) | saved.state_dict()
    theirs = dict(source.named_buffers()) | source.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert_same(ours[name], tensor, name)
    assert ties_of(saved) == ties_of(source)


def assert_stored_alike(step: Tensors, source: Tensors, model: Tensors, left_out: set[str]) -> None:
    """Asserts that the files of `step` have the tensors of `source`, bit for bit if the dtype is
    the same. Only those in `left_out` may be missing or differ: the checkpoint then has tensors of
    `model`, under the names of its state dict."""
    assert source.keys() - step.keys() == left_out - step.keys()
    dtypes = {tensor.dtype for tensor in model.values()}
    for name, tensor in step.items():
        if name in source and name not in left_out:
            assert tensor.shape == source[name].shape, name
            if tensor.dtype == source[name].dtype:
                assert_same(tensor, source[name], name)
            else:
                assert tensor.dtype in dtypes, name
        else:
            assert_same(tensor, model[name], name)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(n, id=family.name, marks=() if family.name in QUICK else pytest.mark.soak)
        for n, family in enumerate(EVERY)
    ],
)
def test_an_untrained_checkpoint_loads_like_its_source(
    modicum: Path, tmp_path: Path, number: int
) -> None:
    family = EVERY[number]
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    directory = family.write(family.build(), tmp_path / "model")
    source, told = from_pretrained(family, directory)
    recipe = recipes.recipe_for(recipes.meta_model(directory), directory, dtype=source.dtype)
    path = tmp_path / "recipe.json"
    path.write_text(recipe.text())
    words = ("save", directory, tmp_path / "root", "--step", 1, "--recipe", path)
    report = run_json(modicum, *words, *WORLDS[number % len(WORLDS)])
    step = tmp_path / "root/step-1"
    saved, told_again = from_pretrained(family, step)
    assert_same_model(saved, source)
    assert told_again == told
    left_out = set(report["left_out"])
    assert_stored_alike(stored_in(step), stored_in(directory), source.state_dict(), left_out)
    is_dequantised = family.quantization is not None
    before, after = ((place / "config.json").read_bytes() for place in (directory, step))
    assert (before == after) is not is_dequantised
    print(family.name, "left out:", report["left_out"], "copied:", report["copied"])


# ---- models that differ from the stored one


def test_adapters_around_a_model_change_no_name(modicum: Path, tmp_path: Path) -> None:
    """PEFT renames every tensor of the base model; the checkpoint has the source's names."""
    peft = pytest.importorskip("peft")
    family = next(family for family in FAMILIES if family.name == "llama_tied")
    directory = family.write(family.build(), tmp_path / "model")
    base = recipes.meta_model(directory)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    wrapped = peft.get_peft_model(base, config)
    path = tmp_path / "recipe.json"
    path.write_text(
        recipes.recipe_for(wrapped, directory, rules=recipes.LoadRules(missing="ignore")).text()
    )
    assert "base_layer" in path.read_text()
    words = ("save", directory, tmp_path / "root", "--step", 1, "--recipe", path, "--ranks", 3)
    assert run_json(modicum, *words)["left_out"] == []
    step = tmp_path / "root/step-1"
    assert_same_model(from_pretrained(family, step)[0], from_pretrained(family, directory)[0])
    assert stored_in(step).keys() == stored_in(directory).keys()


def test_resized_tensors_are_saved_in_the_models_shape(modicum: Path, tmp_path: Path) -> None:
    """Targets are a slice of a stored tensor ("cut"), one with additional rows ("grown"), and two
    slices that together are a stored tensor ("both")."""
    maker = torch.Generator().manual_seed(5)
    shapes = {"cut": (9, 4), "grown": (5, 4), "both": (6, 3), "plain": (7,)}
    tensors = {name: torch.randn(shape, generator=maker) for name, shape in shapes.items()}
    directory = write_checkpoint(tmp_path / "model", tensors, files=2)
    zeros = {"op": "init", "rule": "zeros", "shape": [2, 4], "dtype": "float32"}
    both = stored("both")
    targets = {
        "cut": {"op": "slice", "dim": 0, "start": 1, "stop": 7, "in": [stored("cut")]},
        "grown": joined("cat", 0, [stored("grown"), zeros]),
        "lower": {"op": "slice", "dim": 0, "start": 0, "stop": 2, "in": [both]},
        "upper": {"op": "slice", "dim": 0, "start": 2, "stop": 6, "in": [both]},
        "plain": stored("plain"),
    }
    recipe = write_recipe(tmp_path / "recipe.json", targets)
    words = ("save", directory, tmp_path / "root", "--step", 1, "--recipe", recipe, "--ranks", 2)
    report = run_json(modicum, *words)
    assert sorted(report["left_out"]) == ["cut", "grown"]
    expected = {
        "cut": tensors["cut"][1:7],
        "grown": torch.cat([tensors["grown"], torch.zeros(2, 4)]),
        "both": tensors["both"],
        "plain": tensors["plain"],
    }
    saved = stored_in(tmp_path / "root/step-1")
    assert saved.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same(saved[name], tensor, name)


def test_enough_families_are_tested() -> None:
    names = [family.name for family in EVERY]
    assert len(names) == len(set(names)) and len({family.model_type for family in EVERY}) >= 104
    assert set(names) >= QUICK
