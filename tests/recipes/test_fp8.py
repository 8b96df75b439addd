"""With `--dtype`, FP8 codes with block scales are dequantized as by torch, bit for bit: code times
scale in fp32, then a cast to the dtype. Without it, codes and scales are loaded as stored.

Catches: scale blocks shifted by one; a scale cast to the target dtype before the multiplication;
the scale of another rank's rows; rows and columns of the scale grid exchanged.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from program import STRATEGIES, failure, joined, run_json, stored, write_checkpoint, write_recipe

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file  # noqa: E402  (after torch is known to be there)

BLOCK = 128
DTYPES = ("float32", "bfloat16", "float16")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Tensors = dict[str, Any]
Dump = Callable[..., Path]


def grid_of(rows: int, columns: int) -> tuple[int, int]:
    """The shape of the scales of a matrix: one scale per BLOCK x BLOCK codes."""
    return -(-rows // BLOCK), -(-columns // BLOCK)


def codes(shape: tuple[int, ...], seed: int, dtype: Any = E4M3) -> Any:
    """Random codes without NaN: a cast may choose any of NaN's bit patterns."""
    maker = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, shape, dtype=torch.uint8, generator=maker).view(dtype)
    is_nan = torch.isnan(raw.float())
    return raw.view(torch.uint8).masked_fill(is_nan, 0x35).view(dtype)


def scales(shape: tuple[int, ...], seed: int, dtype: Any = torch.float32) -> Any:
    """Random scales from 2^-24 to 2^9. In fp16 some products overflow and some are denormal."""
    maker = torch.Generator().manual_seed(1000 + seed)
    powers = torch.randint(-24, 9, shape, generator=maker).float()
    mantissas = 1 + torch.rand(shape, generator=maker)
    if dtype in (torch.uint8, torch.float8_e8m0fnu):
        return (powers + 127).to(torch.uint8).view(dtype)
    return (mantissas * powers.exp2()).to(dtype)


def wide(scale: Any) -> Any:
    """The scales as fp32. A byte b is 2^(b - 127), as in E8M0."""
    if scale.dtype == torch.uint8:
        return (scale.float() - 127).exp2()
    return scale.float()


def dequantised(code: Any, scale: Any, dtype: str, block: tuple[int, int] = (BLOCK, BLOCK)) -> Any:
    """The expected values, from scales that are repeated to the codes' shape."""
    rows, columns = code.shape[-2:]
    grown = wide(scale).repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return (code.float() * grown[..., :rows, :columns]).to(getattr(torch, dtype))


def bits(tensor: Any) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def assert_same(got: Any, expected: Any, what: str) -> None:
    assert got.dtype == expected.dtype, f"{what}: {got.dtype} instead of {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: {got.shape} instead of {expected.shape}"
    assert bits(got) == bits(expected), f"{what}: other bits"


def chunk(tensor: Any, rank: int, world: int, dim: int) -> Any:
    """A rank's shard along `dim`, or along the last dim if the tensor has fewer. May be empty."""
    dim = min(dim, tensor.dim() - 1)
    parts = torch.chunk(tensor, world, dim)
    return parts[rank] if rank < len(parts) else tensor.narrow(dim, 0, 0)


def assert_dumped(out: Path, whole: Tensors, world: int, dim: int = 0) -> None:
    """Asserts that each rank has dumped its shards of these tensors, and nothing else."""
    for rank in range(world):
        dumped = load_file(out / f"rank-{rank:05d}.safetensors")
        assert dumped.keys() == whole.keys()
        for name, tensor in whole.items():
            assert_same(dumped[name], chunk(tensor, rank, world, dim), f"{name}, {rank}/{world}")


def fp8_config(directory: Path, block: int = BLOCK) -> None:
    """Writes the config.json of a checkpoint whose scales are for `block` x `block` codes."""
    quantization = {"quant_method": "fp8", "weight_block_size": [block, block]}
    config = {"model_type": "deepseek_v3", "quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config))


# With incomplete blocks at the edges, and scale grids of one row, one column and one block. World
# sizes such as 3 cut through blocks, whose scale several ranks then need.
SHAPES = {
    "ragged": (200, 300),
    "tall": (1000, 130),
    "one_block": (100, 100),
    "one_row": (1, 400),
    "one_column": (300, 1),
    "even": (256, 384),
}
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.float8_e8m0fnu, torch.float16)


def fp8_tensors() -> Tensors:
    """Codes of both FP8 dtypes with scales of each dtype, stacked experts, codes without scales,
    and a tensor that is not quantized."""
    made: Tensors = {"norm.weight": torch.randn(33), "bare.weight": codes((20, 30), 99)}
    for number, (name, shape) in enumerate(SHAPES.items()):
        made[f"{name}.weight"] = codes(shape, number, E5M2 if number % 3 == 2 else E4M3)
        dtype = SCALE_DTYPES[number % len(SCALE_DTYPES)]
        made[f"{name}.weight_scale_inv"] = scales(grid_of(*shape), number, dtype)
    made["experts.gate_up_proj"] = codes((3, 200, 140), 50)
    made["experts.gate_up_proj_scale_inv"] = scales((3, 2, 2), 50)
    return made


def numbers_of(tensors: Tensors, dtype: str) -> Tensors:
    """The tensors after `--dtype`: codes with a scale are dequantized, scales dropped."""
    made: Tensors = {}
    for name, tensor in tensors.items():
        scale = tensors.get(f"{name}_scale_inv")
        if scale is not None:
            made[name] = dequantised(tensor, scale, dtype)
        elif not name.endswith("_scale_inv"):
            is_bare = tensor.dtype in (E4M3, E5M2)  # codes without a scale are kept
            made[name] = tensor if is_bare else tensor.to(getattr(torch, dtype))
    return made


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    """(checkpoint, its tensors). Two files: some codes and their scales are in different files."""
    tensors = fp8_tensors()
    directory = write_checkpoint(tmp_path_factory.mktemp("fp8") / "model", tensors, files=2)
    fp8_config(directory)
    return directory, tensors


@pytest.fixture
def dump(modicum: Path, tmp_path: Path) -> Dump:
    def dump_into(directory: Path, *flags: object) -> Path:
        """Loads a checkpoint with these flags; returns the directory of the dumped shards."""
        out = tmp_path / f"dump-{len(list(tmp_path.iterdir()))}"
        run_json(modicum, "load", directory, "--dump", out, "--check", "values", *flags)
        return out

    return dump_into


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantised_shards_equal_codes_times_scales(
    fp8, dump: Dump, dtype: str, strategy: str
) -> None:
    directory, tensors = fp8
    whole = numbers_of(tensors, dtype)
    for world in (1, 2, 3, 5):
        flags = ("--ranks", world, "--strategy", strategy, "--dtype", dtype)
        assert_dumped(dump(directory, *flags), whole, world)
    flags = ("--ranks", 3, "--strategy", strategy, "--dtype", dtype, "--shard-dim", 1)
    assert_dumped(dump(directory, *flags), whole, 3, dim=1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_dtype_codes_and_scales_are_kept(fp8, dump: Dump, strategy: str) -> None:
    directory, tensors = fp8
    assert_dumped(dump(directory, "--ranks", 3, "--strategy", strategy), tensors, 3)


def test_keep_fp32_dequantises_the_named_tensors(fp8, dump: Dump) -> None:
    directory, tensors = fp8
    out = dump(directory, "--ranks", 2, "--dtype", "bfloat16", "--keep-fp32", "^ragged")
    whole = numbers_of(tensors, "bfloat16")
    whole["ragged.weight"] = numbers_of(tensors, "float32")["ragged.weight"]
    assert_dumped(out, whole, 2)


def test_digest_equals_that_of_the_dequantised_model(modicum: Path, fp8, tmp_path: Path) -> None:
    """Compares with a checkpoint that stores the dequantized numbers; also with `discard`."""
    directory, tensors = fp8
    plain = write_checkpoint(tmp_path / "plain", numbers_of(tensors, "bfloat16"))
    flags = ("--digest", "--dtype", "bfloat16")
    expected = run_json(modicum, "load", plain, "--digest")["digest"]
    for strategy in STRATEGIES:
        for destination in ("cpu", "discard"):
            how = ("--ranks", 3, "--strategy", strategy, "--destination", destination)
            found = run_json(modicum, "load", directory, "--check", "values", *flags, *how)
            assert found["digest"] == expected, f"{strategy} {destination}"
    assert run_json(modicum, "load", directory, "--digest")["digest"] != expected


def test_scales_of_compressed_tensors_per_row_tensor_and_group(tmp_path: Path, dump: Dump) -> None:
    """`weight_scale` of a row, of the tensor, and of 32 codes of a row, without a config."""
    tensors = {"row.weight": codes((37, 50), 1), "row.weight_scale": scales((37, 1), 1)}
    tensors |= {"one.weight": codes((37, 50), 2), "one.weight_scale": scales((1,), 2)}
    tensors |= {"group.weight": codes((64, 96), 3)}
    tensors |= {"group.weight_scale": scales((64, 3), 3, torch.uint8)}
    directory = write_checkpoint(tmp_path / "model", tensors)
    one = tensors["one.weight_scale"].reshape(1, 1)
    blocks = {  # (scales, rows and columns of codes for each scale)
        "row.weight": (tensors["row.weight_scale"], (1, 50)),
        "one.weight": (one, (37, 50)),
        "group.weight": (tensors["group.weight_scale"], (1, 32)),
    }
    whole = {n: dequantised(tensors[n], s, "bfloat16", b) for n, (s, b) in blocks.items()}
    assert_dumped(dump(directory, "--ranks", 3, "--dtype", "bfloat16"), whole, 3)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_experts_are_stacked_and_dequantised(tmp_path: Path, dump: Dump, strategy: str) -> None:
    tensors: Tensors = {}
    made: dict[str, list[Any]] = {"gate": [], "up": [], "down": []}
    for expert in range(3):
        for number, kind in enumerate(made):
            shape = (130, 200) if kind == "down" else (200, 130)
            name = f"experts.{expert}.{kind}_proj.weight"
            tensors[name] = codes(shape, 10 * expert + number)
            tensors[f"{name}_scale_inv"] = scales((2, 2), 10 * expert + number)
            made[kind].append(dequantised(tensors[name], tensors[f"{name}_scale_inv"], "bfloat16"))

    def stack(kind: str) -> dict[str, Any]:
        return joined("stack", 0, [stored(f"experts.{e}.{kind}_proj.weight") for e in range(3)])

    turned = {"op": "permute", "dims": [0, 2, 1], "in": [stack("down")], "dtype": "bfloat16"}
    nodes = {"gate_up": joined("cat", 1, [stack("gate"), stack("up")]) | {"dtype": "bfloat16"}}
    nodes["down"] = turned
    whole = {
        "gate_up": torch.cat([torch.stack(made["gate"]), torch.stack(made["up"])], 1),
        "down": torch.stack(made["down"]).permute(0, 2, 1),
    }
    directory = write_checkpoint(tmp_path / "model", tensors)
    fp8_config(directory)
    recipe = write_recipe(tmp_path / "recipe.json", nodes)
    for world in (1, 2, 4):
        out = dump(directory, "--ranks", world, "--strategy", strategy, "--recipe", recipe)
        assert_dumped(out, whole, world)


def test_dequantised_values_equal_those_of_transformers(tmp_path: Path, dump: Dump) -> None:
    """For shapes that transformers' Fp8Dequantize accepts: multiples of the block."""
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    upstream = finegrained.Fp8Dequantize(None)
    tensors: Tensors = {}
    for number, dtype in enumerate(SCALE_DTYPES):
        name = f"w{number}.weight"
        tensors[name] = codes((256, 384), number, E5M2 if number == 3 else E4M3)
        tensors[f"{name}_scale_inv"] = scales((2, 3), number, dtype)
    directory = write_checkpoint(tmp_path / "model", tensors)
    for dtype in DTYPES:
        whole = {
            name: upstream._dequantize_one(
                tensor, tensors[f"{name}_scale_inv"], output_dtype=getattr(torch, dtype)
            )
            for name, tensor in tensors.items()
            if not name.endswith("_scale_inv")
        }
        assert_dumped(dump(directory, "--ranks", 3, "--dtype", dtype), whole, 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_scales_give_torchs_values(tmp_path: Path, dump: Dump, dtype: str) -> None:
    """Multiplies every code by zero, denormal, huge and infinite scales, and by all E8M0 scales."""
    every = torch.arange(256, dtype=torch.uint8)
    values = [0.0, -0.0, 1e-45, 1.1754942e-38, 1.17549435e-38, 3.4e38, float("inf"), -1.5]
    tensors: Tensors = {}
    for kind in (E4M3, E5M2):
        name = f"{str(kind).split('_')[-1]}.weight"
        tensors[name] = every.view(kind).repeat(len(values), 1).contiguous()
        tensors[f"{name}_scale"] = torch.tensor(values).reshape(-1, 1)
    powers = torch.arange(256, dtype=torch.uint8).reshape(-1, 1)
    tensors["power.weight"] = every.view(E4M3).repeat(256, 1).contiguous()
    tensors["power.weight_scale"] = powers.view(torch.float8_e8m0fnu)
    out = dump(write_checkpoint(tmp_path / "model", tensors), "--dtype", dtype)
    dumped = load_file(out / "rank-00000.safetensors")
    for name in (n for n in tensors if n.endswith("weight")):
        scale = tensors[f"{name}_scale"]
        expected = (tensors[name].float() * scale.float()).to(getattr(torch, dtype))
        is_nan = torch.isnan(expected)
        assert torch.equal(torch.isnan(dumped[name]), is_nan), name
        as_int = torch.int32 if dtype == "float32" else torch.int16
        assert torch.unique(dumped[name][is_nan].view(as_int)).numel() == 1, (
            "NaNs differ in their bits"
        )
        assert_same(dumped[name].masked_fill(is_nan, 0), expected.masked_fill(is_nan, 0), name)


def test_a_scale_grid_that_fits_no_block_size_is_refused_with_dtype(
    modicum: Path, tmp_path: Path, dump: Dump
) -> None:
    """Without it the codes are loaded as stored, and no block size is needed."""
    tensors = {"w.weight": codes((200, 300), 1), "w.weight_scale_inv": scales((2, 7), 1)}
    directory = write_checkpoint(tmp_path / "model", tensors)
    assert_dumped(dump(directory), tensors, 1)
    error = failure(modicum, 2, "load", directory, "--dtype", "bfloat16")
    assert error["category"] == "MISMATCH"
    assert error["tensor"] == "w.weight"
    assert "w.weight_scale_inv" in error["message"]


def test_codes_without_a_scale_are_not_cast(modicum: Path, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", {"w": codes((8, 8), 1)})
    recipe = write_recipe(tmp_path / "recipe.json", {"w": stored("w") | {"dtype": "bfloat16"}})
    error = failure(modicum, 2, "load", directory, "--recipe", recipe)
    assert error["category"] == "UNSUPPORTED"


def test_plan_promises_the_bytes_that_load_reads(modicum: Path, fp8) -> None:
    """Includes the scales, which ranks read in addition to the codes of their shards."""
    directory, _tensors = fp8
    for strategy in STRATEGIES:
        flags = ("--ranks", 3, "--strategy", strategy, "--dtype", "bfloat16")
        plan = run_json(modicum, "plan", directory, *flags)
        (row,) = [r for r in plan["strategies"] if r["name"] == strategy]
        load = run_json(modicum, "load", directory, *flags)
        assert load["storage_read_bytes"] == row["storage_read_bytes"]


def test_the_block_size_of_the_config_applies(modicum: Path, fp8, tmp_path: Path) -> None:
    """Some shapes have the same scale grid for blocks of 127: then the config decides."""
    directory, _tensors = fp8
    other = shutil.copytree(directory, tmp_path / "other")
    fp8_config(other, 127)
    digests = {
        run_json(modicum, "load", d, "--digest", "--dtype", "bfloat16")["digest"]
        for d in (directory, other)
    }
    assert len(digests) == 2
