"""The program's dumps of layouts equal the shards of torch's DTensor and FSDP2, and those of
DeepSpeed's ZeRO, byte for byte, for every size of a dim from 0 to 40: one mesh of each layout.

modicum/layout/recorded_test.cc compares all meshes with recorded shards. Catches: TP shards after
FSDP does; mesh axes are swapped; tensors of another dtype are cut with the wrong number of bytes; a
shard is dumped under another name.
"""

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
from program import run_json, stored, write_checkpoint, write_recipe

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file  # noqa: E402  (after torch is known to be there)
from sharding import (  # noqa: E402
    Cut,
    Tensors,
    assert_same,
    dtensor_shards,
    experts_shards,
    flattened_shards,
    fsdp2_shards,
    packed_shards,
    zero3_shards,
    zero12_shards,
)

SIZES = range(41)

# By kind: the shape for a size n, and the dtype.
KINDS: dict[str, tuple[Callable[[int], tuple[int, ...]], Any]] = {
    "vector": (lambda n: (n,), torch.float32),
    "rows": (lambda n: (n, 3), torch.float32),
    "columns": (lambda n: (3, n), torch.bfloat16),
    "inner": (lambda n: (2, n, 3), torch.float16),
    "last": (lambda n: (5, 2, n), torch.float32),
    "square": (lambda n: (n, n), torch.float32),
    "rowwise": (lambda n: (7, n), torch.float32),
    "replicated": (lambda n: (n, 2), torch.float32),
    "ints": (lambda n: (n, 2), torch.int64),
    "bytes": (lambda n: (n,), torch.uint8),
}
ROWWISE, REPLICATED = r"^rowwise\.", r"^replicated\."
TP_KINDS = ["vector", "rows", "columns", "rowwise", "replicated"]
# The kinds for which `fully_shard` is an oracle, too: it takes up to a millisecond per parameter.
FSDP2_KINDS = ("rows.", "rowwise.")


class Ids:
    """Makes tensors of which every element has a value that is unique among those of its dtype, so
    that misplaced shards never compare equal. (Only those of uint8 repeat.)"""

    def __init__(self) -> None:
        self.given: dict[Any, int] = {}

    def tensor(self, shape: tuple[int, ...], dtype: Any) -> Any:
        begin = self.given.get(dtype, 1)
        self.given[dtype] = begin + prod(shape)
        ids = torch.arange(begin, begin + prod(shape)).reshape(shape)
        if dtype.itemsize == 2:
            assert self.given[dtype] <= 1 << 15  # bit patterns with a clear sign bit
            return ids.to(torch.int16).view(dtype)
        # A float32 is exact up to 2^24.
        assert self.given[dtype] <= 1 << 24 or not dtype.is_floating_point
        return ids.to(dtype)


def every_size(kinds: list[str]) -> Tensors:
    """For each size a tensor of each kind, in this order, and two tensors without dims."""
    ids = Ids()
    made: Tensors = {"scalar": ids.tensor((), torch.float32)}
    for size in SIZES:
        for kind in kinds:
            shape, dtype = KINDS[kind]
            made[f"{kind}.{size}"] = ids.tensor(shape(size), dtype)
    made["flag"] = torch.tensor(True)
    return made


Case = tuple[Path, Path, Tensors]  # a checkpoint, an identity recipe, and the tensors


def case_of(folder: Path, tensors: Tensors) -> Case:
    """Writes a checkpoint and a recipe. The recipe gives the targets the order of `tensors`, on
    which ZeRO's flat groups depend; the files mix it up."""
    directory = write_checkpoint(folder / "model", tensors, files=3)
    return directory, write_recipe(folder / "recipe.json", {n: stored(n) for n in tensors}), tensors


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return case_of(tmp_path_factory.mktemp("grid"), every_size(list(KINDS)))


@pytest.fixture(scope="module")
def tp_grid(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return case_of(tmp_path_factory.mktemp("tp_grid"), every_size(TP_KINDS))


@pytest.fixture
def dumped(modicum: Path, tmp_path: Path) -> Callable[..., list[Tensors]]:
    """Loads with `--dump`. Returns the shards of every rank."""

    def load(case: Case, *flags: object) -> list[Tensors]:
        directory, recipe, _ = case
        out = tmp_path / f"dump-{len(list(tmp_path.iterdir()))}"
        run_json(modicum, "load", directory, "--recipe", recipe, "--dump", out, *flags)
        return [load_file(file) for file in sorted(out.iterdir())]

    return load


def assert_shards(
    held: list[Tensors], tensors: Tensors, world: int, *oracles: Callable[[Tensors, int], Tensors]
) -> None:
    """Asserts that each rank holds exactly the tensors of the first oracle, and those of the other
    oracles, which may lack some. An oracle gives the shards of a rank."""
    assert len(held) == world
    for rank, mine in enumerate(held):
        for number, oracle in enumerate(oracles):
            expected = oracle(tensors, rank)
            assert expected
            if number == 0:
                assert mine.keys() == expected.keys()
            for name, shard in expected.items():
                assert_same(mine[name], shard, f"{name} of rank {rank} of {world}")


def assert_cut(held: list[Tensors], tensors: Tensors, cut: Cut) -> None:
    """Compares with DTensor, and with FSDP2 for some kinds."""
    some = {n: t for n, t in tensors.items() if n.startswith(FSDP2_KINDS)}
    oracles = (
        lambda whole, rank: dtensor_shards(cut, whole, rank),
        lambda whole, rank: fsdp2_shards(cut, some, rank),
    )
    assert_shards(held, tensors, cut.world, *oracles)


# ---- torch

CUTS = {
    "fsdp2": Cut("fsdp2", (5,)),
    "hsdp along dim 1": Cut("hsdp", (2, 3), 1),
    "tp-fsdp 2x3": Cut("tp-fsdp", (2, 3), 0, ROWWISE, REPLICATED),
}


@pytest.mark.parametrize("layout", CUTS)
def test_dumps_are_dtensors_and_fsdp2s(request, dumped, layout: str) -> None:
    cut = CUTS[layout]
    case = request.getfixturevalue("tp_grid" if cut.rowwise else "grid")
    assert_cut(dumped(case, *cut.flags), case[2], cut)


# By layout: flags, the number of ranks, and torch's shards.
PLACED: dict[str, tuple[str, int, Callable[[Tensors, int], Tensors]]] = {
    "packed": ("--layout tp-fsdp --mesh 3x2 --tp-packed .", 6, packed_shards((3, 2))),
    "experts": (
        r"--expert-mesh 2x2 --experts ^rows\. --shard-dim 1",
        4,
        experts_shards((2, 2), 1, lambda name: name.startswith("rows.")),
    ),
    "three axes": ("--layout tp-fsdp --mesh 2x2x2", 8, flattened_shards),
}


@pytest.mark.parametrize("layout", PLACED)
def test_dumps_are_those_of_placements(tp_grid: Case, dumped, layout: str) -> None:
    flags, world, oracle = PLACED[layout]
    held = dumped(tp_grid, "--ranks", world, *flags.split())
    assert_shards(held, tp_grid[2], world, oracle)


# ---- DeepSpeed


@pytest.mark.parametrize("order", ("in_order", "round_robin"))
def test_dumps_are_deepspeeds(grid: Case, dumped, order: str) -> None:
    pytest.importorskip("deepspeed")
    round_robin = order == "round_robin"
    flags = ("--layout", "zero2", "--ranks", 5, round_robin and "--round-robin")
    assert_shards(dumped(grid, *flags), grid[2], 5, zero12_shards(2, 5, round_robin))


def test_dumps_of_zero3_are_deepspeeds(grid: Case, dumped) -> None:
    pytest.importorskip("deepspeed")
    held = dumped(grid, "--layout", "zero3", "--ranks", 5)
    assert_shards(held, grid[2], 5, zero3_shards(5))


def test_another_strategy_dumps_the_same(grid: Case, dumped) -> None:
    flags = Cut("tp-fsdp", (3, 2), 0, ROWWISE, REPLICATED).flags
    own = dumped(grid, *flags, "--strategy", "own-shard")
    other = dumped(grid, *flags, "--strategy", "node-reader")
    for rank, (mine, theirs) in enumerate(zip(own, other, strict=True)):
        assert mine.keys() == theirs.keys()
        for name, shard in mine.items():
            assert_same(theirs[name], shard, f"{name} of rank {rank}")
