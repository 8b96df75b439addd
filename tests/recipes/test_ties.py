"""If both names of a tie are stored, a load compares their values: equal values become one tensor,
different values are an error.

Catches: a stored alias that is dropped without a comparison; a comparison that one rank, one
strategy or one destination omits.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from program import (
    STRATEGIES,
    failure,
    node_peak,
    run_json,
    stored,
    strategy_of,
    write_checkpoint,
    write_recipe,
)

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file  # noqa: E402  (after torch is known to be there)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DESTINATIONS = ("cpu", "discard")
Tensors = dict[str, Any]


def parts() -> Tensors:
    """The tensors of a model whose embedding is stored and whose head is not."""
    made = torch.Generator().manual_seed(7)
    return {
        EMBEDDING: torch.randn(1031, 6, generator=made),
        "model.layers.0.mlp.weight": torch.randn(5, 6, generator=made),
        "model.norm.weight": torch.randn(6, generator=made),
    }


def write_model(directory: Path, tensors: Tensors, files: int = 1, tied: bool = True) -> Path:
    """A checkpoint with a config that states whether head and embedding are tied."""
    write_checkpoint(directory, tensors, files)
    config = {"model_type": "llama", "tie_word_embeddings": tied}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """A checkpoint with both names of the tie and equal values, in two files."""
    tensors = parts()
    return write_model(tmp_path / "both", tensors | {HEAD: tensors[EMBEDDING].clone()}, files=2)


@pytest.fixture
def differing(tmp_path: Path) -> Path:
    """A checkpoint with both names of the tie; their last elements differ in the last bit."""
    tensors = parts()
    head = tensors[EMBEDDING].clone()
    head.view(torch.int32)[-1, -1] ^= 1
    return write_model(tmp_path / "differing", tensors | {HEAD: head})


def digest(modicum: Path, directory: Path, *flags: object) -> str:
    return run_json(modicum, "load", directory, "--digest", *flags)["digest"]


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_names_with_equal_values_are_one_tensor(
    modicum: Path, tmp_path: Path, both: Path, dtype
) -> None:
    """The digest equals that of a checkpoint with only the embedding."""
    cast = ("--dtype", dtype) if dtype else ()
    one = digest(modicum, write_model(tmp_path / "one", parts()), *cast)
    for strategy, where in itertools.product(STRATEGIES, DESTINATIONS):
        how = ("--ranks", 3, "--strategy", strategy, "--destination", where, *cast)
        assert digest(modicum, both, *how, "--check", "values") == one


def test_names_with_equal_values_are_held_once(modicum: Path, tmp_path: Path, both: Path) -> None:
    """The head is read for the comparison, but has no memory of its own."""
    whole = parts()
    flags = ("--ranks", 2, "--strategy", "own-shard")
    one = run_json(modicum, "load", write_model(tmp_path / "one", whole), *flags)
    two = run_json(modicum, "load", both, *flags, "--dump", tmp_path / "dump")
    assert two["bytes_loaded"] == one["bytes_loaded"]
    head_bytes = whole[EMBEDDING].numel() * whole[EMBEDDING].itemsize
    assert two["storage_read_bytes"] - one["storage_read_bytes"] == head_bytes
    tied = strategy_of(run_json(modicum, "plan", both, *flags), "own-shard")
    assert tied["storage_read_bytes"] == two["storage_read_bytes"]
    assert [rank["promised_bytes"] for rank in two["ranks"]] == [
        rank["peak_bytes"] for rank in tied["ranks"]
    ]
    for rank in (0, 1):
        dumped = load_file(tmp_path / f"dump/rank-{rank:05d}.safetensors")
        assert torch.equal(dumped[HEAD], torch.chunk(whole[EMBEDDING], 2)[rank])
        assert torch.equal(dumped[EMBEDDING], dumped[HEAD])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_differing_names_are_an_error(modicum: Path, differing: Path, strategy: str) -> None:
    for ranks, where in itertools.product((1, 4), DESTINATIONS):
        how = ("--ranks", ranks, "--strategy", strategy, "--destination", where)
        error = failure(modicum, 2, "load", differing, *how)
        assert error["category"] == "MISMATCH"
        assert error["tensor"] == HEAD and EMBEDDING in error["message"]
        assert "--untie" in error["message"]


def test_names_are_compared_after_the_cast(modicum: Path, tmp_path: Path, differing: Path) -> None:
    """The cast to bfloat16 rounds the differing bit away, so the values are equal."""
    how = ("--ranks", 2, "--dtype", "bfloat16")
    assert digest(modicum, differing, *how) == digest(
        modicum, write_model(tmp_path / "one", parts()), *how
    )


def test_untie_loads_both(modicum: Path, tmp_path: Path, differing: Path) -> None:
    flags = ("--ranks", 2, "--untie")
    plan = run_json(modicum, "plan", differing, *flags)
    tied = run_json(modicum, "plan", differing, "--ranks", 2)
    assert node_peak(plan, "own-shard") > node_peak(tied, "own-shard")
    out = tmp_path / "dump"
    done = run_json(modicum, "load", differing, *flags, "--check", "values", "--dump", out)
    stored_bytes = done["checkpoint"]["bytes"]
    assert done["bytes_loaded"] == stored_bytes
    whole = load_file(differing / "model.safetensors")
    for rank in (0, 1):
        dumped = load_file(out / f"rank-{rank:05d}.safetensors")
        for name in (EMBEDDING, HEAD):
            assert torch.equal(dumped[name], torch.chunk(whole[name], 2)[rank]), name
    untied = write_model(tmp_path / "untied", whole, tied=False)
    assert digest(modicum, differing, *flags) == digest(modicum, untied)


def test_tied_names_of_different_shapes_are_an_error(modicum: Path, tmp_path: Path) -> None:
    """The shapes are in the headers, so `plan` refuses as well."""
    tensors = parts()
    tensors[HEAD] = tensors[EMBEDDING][:-1].clone()
    directory = write_model(tmp_path / "shapes", tensors)
    for verb in ("plan", "load"):
        error = failure(modicum, 2, verb, directory)
        assert error["category"] == "MISMATCH" and error["tensor"] == HEAD
        assert error["expected"] == "float32 [1031, 6]" and error["got"] == "float32 [1030, 6]"
        run_json(modicum, verb, directory, "--untie")


def test_a_head_that_is_stored_alone_is_the_embeddings_source(
    modicum: Path, tmp_path: Path
) -> None:
    """A tie has no direction: here the embedding is the alias."""
    tensors = parts()
    one = digest(modicum, write_model(tmp_path / "one", tensors))
    tensors[HEAD] = tensors.pop(EMBEDDING)
    directory = write_model(tmp_path / "head", tensors)
    assert digest(modicum, directory, "--ranks", 2) == one


def test_a_recipe_may_declare_ties(modicum: Path, tmp_path: Path) -> None:
    """The stored alias may need a conversion before the comparison: here it is transposed."""
    tensors = parts()
    turned = tensors[EMBEDDING].t().contiguous()
    directory = write_checkpoint(tmp_path / "model", tensors | {"turned": turned})
    compared = {"op": "permute", "dims": [1, 0], "in": [stored("turned")]}
    nodes = {name: stored(name) for name in tensors}
    nodes[HEAD] = {"op": "alias", "of": EMBEDDING, "in": [compared]}
    recipe = write_recipe(tmp_path / "recipe.json", nodes)
    one = digest(modicum, write_model(tmp_path / "one", tensors))
    for strategy, where in itertools.product(STRATEGIES, DESTINATIONS):
        how = ("--ranks", 3, "--strategy", strategy, "--destination", where, "--recipe", recipe)
        assert digest(modicum, directory, *how) == one
    two = run_json(modicum, "load", directory, "--recipe", recipe, "--untie", "--digest")
    assert two["digest"] == one  # equal values under equal names
    turned[0, 0] += 1
    wrong = write_checkpoint(tmp_path / "wrong", tensors | {"turned": turned})
    error = failure(modicum, 2, "load", wrong, "--recipe", recipe, "--ranks", 2)
    assert error["category"] == "MISMATCH" and error["tensor"] == HEAD
    run_json(modicum, "load", wrong, "--recipe", recipe, "--untie", "--ranks", 2)
