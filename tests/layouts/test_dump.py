"""Each rank's shard equals torch.chunk of the stored tensor, byte for byte. The digest depends on
all of the model, and on nothing else. (`LoadExact` in modicum/stream/load_test.cc has all
strategies, worlds and casts.)

Catches: a transfer is omitted, repeated, shifted by one element or cast by truncation; each rank
gets n // W rows and the first ranks the remainder; the digest does not depend on a name, an index
or a bit.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from program import (
    STRATEGIES,
    failure,
    flip_bit,
    joined,
    offset_of,
    run_json,
    stored,
    write_checkpoint,
    write_recipe,
)

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file  # noqa: E402  (after torch is known to be there)
from sharding import Tensors, assert_same  # noqa: E402

FLOAT_SHAPES = {
    "even": (16, 6),
    "rows_7": (7, 5),
    "rows_17": (17, 3, 2),
    "one_row": (1, 33),
    "vector_13": (13,),
    "vector_1": (1,),
    "scalar": (),
    "no_rows": (0, 4),
    "no_columns": (5, 0),
    "tall": (4099, 3),
}


def some_bits(shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    """A tensor of random bits, so that floats include infinities, NaNs and subnormals."""
    rng = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=rng)
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def odd_tensors() -> Tensors:
    """The shapes of FLOAT_SHAPES in three float dtypes, integers, and bools."""
    made: Tensors = {}
    for number, (name, shape) in enumerate(FLOAT_SHAPES.items()):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            word = str(dtype).removeprefix("torch.")
            made[f"{name}.{word}"] = some_bits(shape, dtype, number)
    for number, dtype in enumerate((torch.int64, torch.int32, torch.int16, torch.int8)):
        made[f"ints.{number}"] = some_bits((11, 2), dtype, 100 + number)
    made["bytes"] = some_bits((9,), torch.uint8, 200)
    made["mask"] = torch.arange(21).reshape(7, 3) % 3 == 0
    return made


def shard_of(tensor: Any, rank: int, world: int, dim: int = 0) -> Any:
    """A rank's chunk of torch.chunk. Chunks of the last ranks may be empty: torch omits these."""
    if tensor.dim() == 0:
        return tensor
    chunks = torch.chunk(tensor, world, dim) if tensor.shape[dim] else ()
    if rank < len(chunks):
        return chunks[rank]
    return tensor.narrow(dim, 0, 0)


def assert_dumped(
    out: Path, whole: Tensors, world: int, cut: Callable[..., Any] = shard_of
) -> None:
    """Asserts that `out` has one file for each rank and nothing else, and that a file has exactly
    the rank's shards: `cut(tensor, rank, world)` of each tensor of `whole`."""
    names = {f"rank-{rank:05d}.safetensors" for rank in range(world)}
    assert {file.name for file in out.iterdir()} == names
    for rank in range(world):
        dumped = load_file(out / f"rank-{rank:05d}.safetensors")
        assert dumped.keys() == whole.keys()
        for name, tensor in whole.items():
            assert_same(dumped[name], cut(tensor, rank, world), f"{name} of rank {rank}/{world}")


def cast_by_torch(tensors: Tensors, dtype: str | None) -> Tensors:
    """The result of `--dtype`: floats are cast, other dtypes kept."""
    if dtype is None:
        return tensors
    to = getattr(torch, dtype)
    return {n: t.to(to) if t.is_floating_point() else t for n, t in tensors.items()}


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    """The tensors of `odd_tensors` in three files with an index."""
    tensors = odd_tensors()
    return write_checkpoint(tmp_path_factory.mktemp("odd") / "model", tensors, files=3), tensors


@pytest.fixture
def dump(modicum: Path, tmp_path: Path) -> Callable[..., Path]:
    """Loads with `--dump` into a new directory. Returns the directory."""

    def dump_into(directory: Path, *flags: object) -> Path:
        out = tmp_path / f"dump-{len(list(tmp_path.iterdir()))}"
        run_json(modicum, "load", directory, "--dump", out, *flags)
        return out

    return dump_into


@pytest.mark.parametrize(
    "world, strategy", [(1, "own-shard"), (8, "node-reader"), (3, "rank0-broadcast")]
)
def test_shards_are_chunks(odd: tuple[Path, Tensors], dump, world: int, strategy: str) -> None:
    directory, tensors = odd
    out = dump(directory, "--ranks", world, "--strategy", strategy, "--check", "values")
    assert_dumped(out, tensors, world)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_casts_are_torchs(tmp_path: Path, dump, dtype: str) -> None:
    """Bit for bit, including ties, overflow and subnormals, but without NaNs."""
    tensors = {n: without_nan(t) for n, t in odd_tensors().items()}
    directory = write_checkpoint(tmp_path / "model", tensors)
    out = dump(directory, "--ranks", 3, "--dtype", dtype)
    assert_dumped(out, cast_by_torch(tensors, dtype), 3)


def without_nan(tensor: Any) -> Any:
    """Replaces NaNs, since the bit pattern of a cast NaN is unspecified."""
    return torch.nan_to_num(tensor, nan=1.5) if tensor.is_floating_point() else tensor


def test_nan_stays_nan(tmp_path: Path, dump) -> None:
    stored_nans = torch.tensor([float("nan"), -float("nan"), 1.0]).repeat(7)
    directory = write_checkpoint(tmp_path / "model", {"x": stored_nans})
    for dtype in ("bfloat16", "float16"):
        out = dump(directory, "--dtype", dtype)
        (loaded,) = load_file(out / "rank-00000.safetensors").values()
        assert torch.equal(torch.isnan(loaded), torch.isnan(stored_nans))


def test_every_bfloat16_and_float16_widens_exactly(tmp_path: Path, dump) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    tensors = {n: without_nan(every.view(getattr(torch, n))) for n in ("bfloat16", "float16")}
    directory = write_checkpoint(tmp_path / "model", tensors)
    assert_dumped(dump(directory, "--dtype", "float32"), cast_by_torch(tensors, "float32"), 1)
    assert_dumped(dump(directory, "--dtype", "bfloat16"), cast_by_torch(tensors, "bfloat16"), 1)
    assert_dumped(dump(directory, "--dtype", "float16"), cast_by_torch(tensors, "float16"), 1)


def test_layout_none_replicates(odd: tuple[Path, Tensors], dump) -> None:
    directory, tensors = odd
    out = dump(directory, "--ranks", 3, "--layout", "none")
    assert_dumped(out, tensors, 3, lambda tensor, rank, world: tensor)


def test_shard_dim_1(tmp_path: Path, dump) -> None:
    tensors = {f"m{n}": some_bits((5, n, 3), torch.float32, n) for n in (1, 4, 7, 8, 300)}
    directory = write_checkpoint(tmp_path / "model", tensors)
    out = dump(directory, "--ranks", 4, "--shard-dim", 1)
    assert_dumped(out, tensors, 4, lambda t, rank, world: shard_of(t, rank, world, 1))


def test_hsdp_is_chunks_in_each_replica(odd: tuple[Path, Tensors], dump) -> None:
    directory, tensors = odd
    flags = ("--ranks", 6, "--layout", "hsdp", "--mesh", "2x3", "--strategy", "replica-striped")
    out = dump(directory, *flags)
    for rank in range(6):
        held = load_file(out / f"rank-{rank:05d}.safetensors")
        assert held.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert_same(held[name], shard_of(tensor, rank % 3, 3), f"{name} of rank {rank}")


def test_keep_fp32_keeps_the_dtype_of_matching_names(tmp_path: Path, dump) -> None:
    tensors = {"norm.weight": torch.randn(9), "mlp.weight": torch.randn(9, 3)}
    directory = write_checkpoint(tmp_path / "model", tensors)
    out = dump(directory, "--ranks", 2, "--dtype", "bfloat16", "--keep-fp32", "norm")
    tensors["mlp.weight"] = tensors["mlp.weight"].to(torch.bfloat16)
    assert_dumped(out, tensors, 2)


def test_tied_head_is_dumped_under_both_names(tmp_path: Path, dump) -> None:
    tensors = {"model.embed_tokens.weight": torch.randn(13, 4), "model.norm.weight": torch.randn(4)}
    directory = write_checkpoint(tmp_path / "model", tensors)
    config = {"model_type": "qwen3", "tie_word_embeddings": True}
    (directory / "config.json").write_text(json.dumps(config))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    assert_dumped(dump(directory, "--ranks", 3), tensors, 3)


# ---- recipes


def recipe_tensors() -> Tensors:
    made = {"a": some_bits((6, 4), torch.float32, 1), "b": some_bits((5, 4), torch.float32, 2)}
    made |= {"c": some_bits((4, 3, 5), torch.bfloat16, 3), "left": torch.ones(3)}
    return made


def recipe_nodes() -> dict[str, Any]:
    """A recipe's targets: each op, and some with ops inside ops. It leaves out `left`."""
    a, b, c = stored("a"), stored("b"), stored("c")
    turned = {"op": "permute", "dims": [2, 0, 1], "in": [c]}
    return {
        "cat": joined("cat", 0, [a, b]),
        "cat_inner": joined("cat", 1, [a, a]),
        "stack": joined("stack", 1, [a, a, a]),
        "slice": {"op": "slice", "dim": 1, "start": 1, "stop": 3, "in": [b]},
        "permute": turned,
        "gather": {"op": "gather", "dim": 0, "index": [5, 0, 0, 3, 1], "in": [a]},
        "reshape": {"op": "reshape", "shape": [2, 30], "in": [c]},
        "nested": {"op": "slice", "dim": 0, "start": 2, "stop": 5, "in": [turned]},
        "cast": {"op": "stored", "name": "a", "dtype": "float16"},
        "tied": {"op": "alias", "of": "cat"},
        "zeros": {"op": "init", "rule": "zeros", "shape": [7, 2], "dtype": "float32"},
        "ones": {"op": "init", "rule": "ones", "shape": [5], "dtype": "bfloat16"},
    }


def recipe_expected(of: Tensors) -> Tensors:
    """The targets of `recipe_nodes` by torch."""
    a, b, c = of["a"], of["b"], of["c"]
    turned = c.permute(2, 0, 1)
    cat = torch.cat([a, b])
    return {
        "cat": cat,
        "cat_inner": torch.cat([a, a], 1),
        "stack": torch.stack([a, a, a], 1),
        "slice": b[:, 1:3],
        "permute": turned,
        "gather": a[[5, 0, 0, 3, 1]],
        "reshape": c.reshape(2, 30),
        "nested": turned[2:5],
        "cast": a.to(torch.float16),
        "tied": cat,
        "zeros": torch.zeros(7, 2),
        "ones": torch.ones(5, dtype=torch.bfloat16),
    }


@pytest.mark.parametrize("world, strategy", [(3, "own-shard"), (8, "node-reader")])
def test_recipe_ops_are_torchs(tmp_path: Path, dump, world: int, strategy: str) -> None:
    tensors = {n: without_nan(t) for n, t in recipe_tensors().items()}
    directory = write_checkpoint(tmp_path / "model", tensors)
    recipe = write_recipe(tmp_path / "recipe.json", recipe_nodes(), unused=["left"])
    out = dump(directory, "--ranks", world, "--strategy", strategy, "--recipe", recipe)
    assert_dumped(out, recipe_expected(tensors), world)


def test_init_is_the_same_at_any_world(tmp_path: Path, dump) -> None:
    directory = write_checkpoint(tmp_path / "model", {"x": torch.ones(2)})
    node = {"op": "init", "rule": "normal", "std": 0.5, "shape": [301, 7], "dtype": "float32"}
    recipe = write_recipe(tmp_path / "recipe.json", {"x": stored("x"), "new": node})
    (whole,) = whole_of(dump(directory, "--recipe", recipe), ["new"])
    for world in (2, 3, 5, 8):
        out = dump(directory, "--ranks", world, "--recipe", recipe)
        (joined_up,) = whole_of(out, ["new"])
        assert_same(joined_up, whole, f"init at {world} ranks")
    assert abs(whole.std().item() - 0.5) < 0.05
    assert abs(whole.mean().item()) < 0.05


def whole_of(out: Path, names: list[str]) -> Iterator[Any]:
    """Each of these tensors, concatenated along dim 0 from the ranks' files."""
    ranks = [load_file(file) for file in sorted(out.iterdir())]
    for name in names:
        yield torch.cat([rank[name] for rank in ranks])


def moe_nodes(stored_tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """The targets of a recipe that stacks experts and concatenates gate and up, and the same
    tensors by torch. `stored_tensors` has the tensors of the model."""
    nodes: dict[str, Any] = {n: stored(n) for n in stored_tensors if ".experts." not in n}
    whole: Tensors = {n: stored_tensors[n] for n in nodes}
    for layer in (0, 1):
        prefix = f"model.layers.{layer}.mlp.experts"

        def names(kind: str, prefix: str = prefix) -> list[str]:
            return [f"{prefix}.{expert}.{kind}_proj.weight" for expert in range(4)]

        stacks = {k: joined("stack", 0, map(stored, names(k))) for k in ("gate", "up", "down")}
        made = {
            k: torch.stack([stored_tensors[n] for n in names(k)]) for k in ("gate", "up", "down")
        }
        nodes[f"{prefix}.gate_up_proj"] = joined("cat", 1, [stacks["gate"], stacks["up"]])
        nodes[f"{prefix}.down_proj"] = stacks["down"]
        whole[f"{prefix}.gate_up_proj"] = torch.cat([made["gate"], made["up"]], 1)
        whole[f"{prefix}.down_proj"] = made["down"]
    return nodes, whole


@pytest.fixture(scope="module")
def tiny_moe(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Tensors]:
    """A synthesised MoE, its recipe, and torch's result of it."""
    folder = tmp_path_factory.mktemp("moe")
    run_json(modicum, "synth", folder / "model", "--arch", "tiny-moe")
    nodes, whole = moe_nodes(load_file(folder / "model/model.safetensors"))
    return folder / "model", write_recipe(folder / "recipe.json", nodes), whole


@pytest.mark.parametrize("world, strategy", [(5, "own-shard"), (3, "node-reader")])
def test_stacked_experts_are_torchs(tiny_moe, dump, world: int, strategy: str) -> None:
    directory, recipe, whole = tiny_moe
    flags = ("--strategy", strategy, "--recipe", recipe, "--check", "values")
    assert_dumped(dump(directory, "--ranks", world, *flags), whole, world)


# ---- the digest


def digest(modicum: Path, directory: Path, *flags: object) -> str:
    """The digest of a load, a hexadecimal number of at least 64 bits."""
    found = run_json(modicum, "load", directory, "--digest", *flags)["digest"]
    assert len(found) >= 16 and int(found, 16) >= 0
    return found


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32"])
def test_digest_depends_only_on_the_model(modicum: Path, odd, tmp_path: Path, dtype) -> None:
    """It is the same with all strategies, worlds and destinations, with two layouts, and for one
    file or several."""
    directory, tensors = odd
    single = write_checkpoint(tmp_path / "single", dict(reversed(tensors.items())))
    cast = ("--dtype", dtype) if dtype else ()
    seen = {digest(modicum, directory, *cast), digest(modicum, single, *cast)}
    for strategy in STRATEGIES:
        how = ("--strategy", strategy, *cast)
        seen |= {digest(modicum, directory, "--ranks", world, *how) for world in (2, 3, 8)}
        for destination in ("cpu", "discard"):
            flags = ("--ranks", 3, "--destination", destination, *how)
            seen.add(digest(modicum, directory, *flags))
            seen.add(digest(modicum, directory, "--layout", "none", *flags))
    assert len(seen) == 1, seen


def test_digest_differs_per_dtype(modicum: Path, odd: tuple[Path, Tensors]) -> None:
    casts = [("--dtype", dtype) for dtype in ("float32", "bfloat16", "float16")]
    assert len({digest(modicum, odd[0], *cast) for cast in [(), *casts]}) == 4


def test_digest_of_hsdp_is_that_of_fsdp2(modicum: Path, odd: tuple[Path, Tensors]) -> None:
    directory, _ = odd
    replicated = ("--ranks", 4, "--layout", "hsdp", "--mesh", "2x2")
    assert digest(modicum, directory, *replicated) == digest(modicum, directory, "--ranks", 2)


def test_digest_of_shard_dim_1(modicum: Path, tmp_path: Path) -> None:
    tensors = {"m": some_bits((5, 8, 3), torch.float32, 1)}
    directory = write_checkpoint(tmp_path / "model", tensors)
    flags = ("--ranks", 4, "--shard-dim", 1)
    one = digest(modicum, directory)
    assert digest(modicum, directory, *flags) == one
    assert digest(modicum, directory, *flags, "--destination", "discard") == one


def test_digest_of_recipe(modicum: Path, tiny_moe) -> None:
    directory, recipe, _ = tiny_moe
    every = itertools.product((1, 3), STRATEGIES, ("cpu", "discard"))
    seen = set()
    for world, strategy, destination in every:
        flags = ("--ranks", world, "--strategy", strategy, "--destination", destination)
        seen.add(digest(modicum, directory, "--recipe", recipe, *flags))
    assert len(seen) == 1
    assert seen != {digest(modicum, directory)}


def changed(tensors: Tensors) -> Iterator[tuple[str, Tensors]]:
    """What is changed, and the changed model. Each differs from `tensors` in one detail."""
    last_bit = {n: t.clone() for n, t in tensors.items()}
    last_bit["a"].view(torch.int32)[-1, -1] ^= 1
    yield "one bit", last_bit
    yield (
        "the order of two rows",
        tensors | {"a": tensors["a"][[1, 0, *range(2, len(tensors["a"]))]]},
    )
    yield "the order of elements", tensors | {"a": tensors["a"].roll(1, dims=1)}
    yield "which tensor has which name", tensors | {"a": tensors["b"], "b": tensors["a"]}
    yield "a name", {"aa" if n == "a" else n: t for n, t in tensors.items()}
    yield "a shape", tensors | {"a": tensors["a"].reshape(4, 6)}
    yield "a dtype", tensors | {"a": tensors["a"].view(torch.int32)}


def test_digest_changes_with_every_change(modicum: Path, tmp_path: Path) -> None:
    tensors = {"a": some_bits((6, 4), torch.float32, 1), "b": some_bits((6, 4), torch.float32, 2)}
    models = [("nothing", tensors), *changed(tensors)]
    seen: dict[str, str] = {}
    for number, (what, model) in enumerate(models):
        contiguous = {n: t.contiguous().clone() for n, t in model.items()}
        found = digest(modicum, write_checkpoint(tmp_path / str(number), contiguous), "--ranks", 2)
        assert found not in seen, f"changing {what} gives the digest of changing {seen[found]}"
        seen[found] = what


# ---- --check values


def test_check_names_the_wrong_tensor(modicum: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    run_json(modicum, "synth", directory, "--arch", "tiny-moe")
    assert run_json(modicum, "load", directory, "--check", "values")["check"] == "ok"
    wrong = "model.layers.1.self_attn.k_proj.weight"
    file = directory / "model.safetensors"
    flip_bit(file, offset_of(file, wrong) + 3)
    for strategy in STRATEGIES:
        flags = ("--ranks", 3, "--strategy", strategy, "--check", "values")
        error = failure(modicum, 12, "load", directory, *flags)
        assert error["category"] == "INTEGRITY"
        assert error["tensor"] == wrong


def test_sparse_synth_passes_the_check(modicum: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    run_json(modicum, "synth", directory, "--arch", "qwen2.5-0.5b", "--layers", 1, "--sparse")
    done = run_json(modicum, "load", directory, "--ranks", 2, "--check", "values")
    assert done["check"] == "ok" and done["coverage"] == "proven"
