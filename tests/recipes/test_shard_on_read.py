"""Families whose weights are silently wrong if each rank first shards the stored tensors and then
converts its shards. With Modicum, a model filled with the gathered shards gives the outputs of the
unsharded model, bit for bit.

Catches: sharding before a conversion; a conversion that depends on the shape of a shard; ranks that
initialise different rows from the same random numbers.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from program import run_json, write_index

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from families import FAMILIES, Family  # noqa: E402  (after torch is known to be there)
from safetensors.torch import load_file, save_file  # noqa: E402
from sharding import Tensors, assert_same  # noqa: E402

from modicum import recipes  # noqa: E402

RANKS = 2
BY_NAME = {family.name: family for family in FAMILIES}
Outputs = Callable[[Any], Any]


def numbers(*shape: int) -> Any:
    """A fixed input."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def of_tokens(model: Any) -> Any:
    return model(input_ids=torch.arange(3, 14).reshape(1, 11))


def of_an_image(model: Any) -> Any:
    return model(pixel_values=numbers(1, 3, 15, 15))


def kimi_vision(model: Any) -> Any:
    return model.model.vision_tower(numbers(16, 3, 2, 2), torch.tensor([[1, 4, 4]]))


def step_vision(model: Any) -> Any:
    return model.model.vision_model(numbers(1, 3, 15, 15))


def mistral_vision(model: Any) -> Any:
    return model.model.vision_tower(numbers(1, 3, 15, 15), torch.tensor([[15, 15]]))


# By family: functions from the model to the outputs that depend on its conversion.
CASES: dict[str, tuple[Outputs, ...]] = {
    "olmo_hybrid": (of_tokens,),  # Concatenate(0): q, k, v convolutions, unequal rows
    "olmo_hybrid_alike": (of_tokens,),  # with equal rows: no shape shows an error
    "nomic_bert": (of_tokens,),  # Chunk(0): q, k, v
    "jina_embeddings_v3": (of_tokens,),  # Chunk(0): q, k, v, their biases too
    "dinov2": (of_an_image,),  # Chunk(0): gate and up
    "hrm_text": (of_tokens,),  # Chunk(0) in two and in four, of odd rows
    "kimi_k25": (kimi_vision, of_tokens),  # Chunk(0), then PermuteForRope; stacked experts
    "step3p7": (step_vision,),  # Chunk(0), then PermuteForRope, of biases too
    "mistral_large4": (mistral_vision, of_tokens),  # PermuteForRope alone
    "inkling": (of_tokens,),  # Interleave, then Chunk
    "ernie4_5_vl_moe": (of_tokens,),  # experts of two towers; Chunk(0), Transpose
    # Transpose(check_dims). Files of the hub are transposed; those that transformers 5 has saved
    # are not. If experts are square, the shapes do not show whether a file is transposed.
    "qwen3_vl_moe": (of_tokens,),
    "qwen3_vl_moe_saved_by_v5": (of_tokens,),
    "qwen3_vl_moe_square": (of_tokens,),
}


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def joined(out: Path, ranks: int) -> Tensors:
    """The dumped shards concatenated along dim 0; scalars are equal on every rank."""
    held = [load_file(out / f"rank-{rank:05d}.safetensors") for rank in range(ranks)]
    return {n: torch.cat([h[n] for h in held]) if t.dim() else t for n, t in held[0].items()}


def run(model: Any, outputs: tuple[Outputs, ...]) -> list[Tensors]:
    """Every tensor of every output. Experts run one by one, since fused kernels need certain
    sizes."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    with torch.no_grad():
        made = [output(model.eval()).items() for output in outputs]
    return [{n: t for n, t in items if isinstance(t, torch.Tensor)} for items in made]


def filled(family: Family, tensors: Tensors) -> Any:
    """A model filled with these tensors, which must be all of its state dict."""
    model = family.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    model.load_state_dict(tensors, strict=True)
    return model


@pytest.mark.parametrize("name", CASES)
def test_outputs_equal_the_unsharded_models(modicum: Path, tmp_path: Path, name: str) -> None:
    family, outputs = BY_NAME[name], CASES[name]
    directory = family.write(family.build(), tmp_path / "model")
    unsharded = family.model_class.from_pretrained(directory, dtype="auto")
    # These tensors are copied into a model as Modicum's are below, since the last bit of a matrix
    # product may depend on the alignment of its memory.
    expected = run(filled(family, unsharded.state_dict()), outputs)

    recipe = tmp_path / "recipe.json"
    recipe.write_text(recipes.recipe_for(recipes.meta_model(directory), directory).text())
    flags = ("--recipe", recipe, "--ranks", RANKS, "--dump", tmp_path / "out")
    run_json(modicum, "load", directory, *flags)
    got = run(filled(family, joined(tmp_path / "out", RANKS)), outputs)

    for wanted, made in zip(expected, got, strict=True):
        assert made.keys() == wanted.keys() and wanted
        for what, tensor in wanted.items():
            assert torch.isfinite(tensor).all() and tensor.std() > 0, what
            assert_same(made[what], tensor, what)


def test_a_head_that_is_not_stored_is_initialised_once(modicum: Path, tmp_path: Path) -> None:
    """Two ranks together initialise the rows that one rank would, and not the first rows twice."""
    family = BY_NAME["qwen3"]
    directory = family.write(family.build(), tmp_path / "model")
    take_out(directory, "lm_head.weight")
    missing = {"lm_head.weight": ("normal", 0.02)}
    recipe = tmp_path / "recipe.json"
    made = recipes.recipe_for(
        recipes.meta_model(directory), directory, rules=recipes.LoadRules(missing=missing)
    )
    recipe.write_text(made.text())
    results = []
    for ranks in (1, RANKS):
        out = tmp_path / f"out-{ranks}"
        run_json(modicum, "load", directory, "--recipe", recipe, "--ranks", ranks, "--dump", out)
        results.append(filled(family, joined(out, ranks)))
    head = results[1].lm_head.weight
    assert len(head.unique(dim=0)) == len(head)
    (whole,), (sharded,) = (run(model, (of_tokens,)) for model in results)
    assert_same(sharded["logits"], whole["logits"], "logits")
    (stored,), (loaded,) = (run(m, (hidden_states,)) for m in (family.build(), results[1]))
    assert_same(loaded["last_hidden_state"], stored["last_hidden_state"], "last_hidden_state")


def hidden_states(model: Any) -> Any:
    """The output before the head."""
    return model.model(input_ids=torch.arange(3, 14).reshape(1, 11))


def take_out(directory: Path, name: str) -> None:
    """Removes a tensor from its file and from the index."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    file = directory / index.pop(name)
    save_file({n: t for n, t in load_file(file).items() if n != name}, file)
    write_index(directory, index, 0)
