"""For every size of a dim from 0 to 40 and every world size from 1 to 9, each rank's shards equal
those of torch's DTensor and FSDP2, or those of DeepSpeed's ZeRO, byte for byte.

Must fail for these mutants: any shard, strided ones included, is one element off; TP shards after
FSDP does; chunks are rounded down; mesh axes are swapped; a ZeRO partition lacks its alignment or
padding, or has another order.
"""

from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path
from typing import Any

import pytest
from program import STRATEGIES, run_json, stored, write_checkpoint, write_recipe

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file  # noqa: E402  (after torch is known to be there)
from sharding import (  # noqa: E402
    Cut,
    Tensors,
    assert_same,
    dtensor_shards,
    fsdp2_shards,
    placed,
    playing_rank,
    zero3_shards,
    zero12_shards,
)
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Replicate, Shard  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402

SIZES = range(41)
WORLDS = range(1, 10)
HSDP_MESHES = [(1, 5), (2, 1), (2, 2), (2, 3), (2, 4), (3, 1), (3, 2), (3, 3), (4, 2)]
TP_MESHES = [(dp, tp) for dp in WORLDS for tp in WORLDS if 1 < dp * tp <= 9]
# Of TP's meshes and ZeRO's worlds these run always, and soak has all.
QUICK_MESHES, QUICK_WORLDS = ((1, 3), (2, 2), (2, 3), (3, 2), (5, 1)), (1, 2, 3, 5, 8)


def soak_but(quick: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """The values as parameters of a test, those that are not in `quick` for the soak run."""
    return [pytest.param(v, marks=() if v in quick else pytest.mark.soak) for v in values]


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


def mesh_id(mesh: tuple[int, int]) -> str:
    return f"{mesh[0]}x{mesh[1]}"


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


@pytest.fixture(scope="module")
def one_group(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Tensors of one floating-point dtype, so that ZeRO makes one group."""
    kinds = ["vector", "rows", "last", "ints"]
    return case_of(tmp_path_factory.mktemp("one_group"), every_size(kinds))


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


@pytest.mark.parametrize("dim", (0, 1))
@pytest.mark.parametrize("world", WORLDS)
def test_fsdp2_is_torchs(grid: Case, dumped, world: int, dim: int) -> None:
    cut = Cut("fsdp2", (world,), dim)
    assert_cut(dumped(grid, *cut.flags), grid[2], cut)


@pytest.mark.parametrize("world", (2, 3, 7))
def test_fsdp2_of_dim_2_is_torchs(grid: Case, dumped, world: int) -> None:
    cut = Cut("fsdp2", (world,), 2)
    assert_cut(dumped(grid, *cut.flags), grid[2], cut)


@pytest.mark.parametrize("mesh", HSDP_MESHES, ids=mesh_id)
def test_hsdp_is_torchs(grid: Case, dumped, mesh: tuple[int, int]) -> None:
    cut = Cut("hsdp", mesh)
    assert_cut(dumped(grid, *cut.flags), grid[2], cut)


@pytest.mark.parametrize("mesh", ((2, 2), (2, 3), (3, 2)), ids=mesh_id)
def test_hsdp_of_dim_1_is_torchs(grid: Case, dumped, mesh: tuple[int, int]) -> None:
    cut = Cut("hsdp", mesh, 1)
    assert_cut(dumped(grid, *cut.flags), grid[2], cut)


@pytest.mark.parametrize("mesh", soak_but(QUICK_MESHES, TP_MESHES), ids=mesh_id)
def test_tp_fsdp_is_torchs(tp_grid: Case, dumped, mesh: tuple[int, int]) -> None:
    """TP shards first, then FSDP does, although the placements of a DTensor on a (dp, tp) mesh
    list FSDP's first."""
    cut = Cut("tp-fsdp", mesh, 0, ROWWISE, REPLICATED)
    assert_cut(dumped(tp_grid, *cut.flags), tp_grid[2], cut)


@pytest.mark.parametrize(
    "mesh", soak_but(QUICK_MESHES, [m for m in TP_MESHES if prod(m) <= 6]), ids=mesh_id
)
def test_tp_fsdp_of_dim_1_is_torchs(tp_grid: Case, dumped, mesh: tuple[int, int]) -> None:
    cut = Cut("tp-fsdp", mesh, 1, ROWWISE, REPLICATED)
    assert_cut(dumped(tp_grid, *cut.flags), tp_grid[2], cut)


@pytest.mark.parametrize("world", WORLDS)
def test_none_replicates(grid: Case, dumped, world: int) -> None:
    cut = Cut("none", (world,))
    held = dumped(grid, *cut.flags)
    assert_shards(held, grid[2], world, lambda whole, rank: dtensor_shards(cut, whole, rank))


def along(tensor: Any, dim: int) -> Any:
    """A placement along `dim`, or along dim 0 if the tensor has too few dims."""
    if tensor.dim() == 0:
        return Replicate()
    return Shard(dim if dim < tensor.dim() else 0)


@pytest.mark.parametrize("mesh", ((1, 2), (2, 2), (3, 2), (2, 4)), ids=mesh_id)
def test_tp_packed_is_torchs_strided_shard(tp_grid: Case, dumped, mesh: tuple[int, int]) -> None:
    """For gate and up in one tensor: each rank has its part of both halves. Then FSDP shards."""
    dp, tp = mesh

    def oracle(tensors: Tensors, rank: int) -> Tensors:
        made = {}
        for name, tensor in tensors.items():
            if tensor.dim():
                halves = _StridedShard(0, split_factor=2)
                parts, _ = halves._split_tensor(tensor, tp, with_padding=False)
                tensor = parts[rank % tp]
            made[name] = tensor
        with playing_rank(rank, dp * tp):
            over = init_device_mesh("cpu", mesh, mesh_dim_names=("dp", "tp"))["dp"]
            return {n: placed(t, over, along(t, 0)).to_local() for n, t in made.items()}

    flags = ("--layout", "tp-fsdp", "--mesh", f"{dp}x{tp}", "--tp-packed", ".")
    held = dumped(tp_grid, "--ranks", dp * tp, *flags)
    assert_shards(held, tp_grid[2], dp * tp, oracle)


@pytest.mark.parametrize("dim", (0, 1))
@pytest.mark.parametrize("mesh", ((1, 3), (2, 2), (3, 2), (2, 4)), ids=mesh_id)
def test_expert_mesh_is_torchs(tp_grid: Case, dumped, mesh: tuple[int, int], dim: int) -> None:
    """Experts (here "rows") are sharded over an (fsdp, ep) mesh, other tensors over all ranks."""
    world = prod(mesh)

    def oracle(tensors: Tensors, rank: int) -> Tensors:
        made = {}
        with playing_rank(rank, world):
            experts = init_device_mesh("cpu", mesh, mesh_dim_names=("fsdp", "ep"))
            others = init_device_mesh("cpu", (world,))
            for name, tensor in tensors.items():
                over = others
                if name.startswith("rows."):
                    tensor = placed(tensor, experts["ep"], along(tensor, 0)).to_local()
                    over = experts["fsdp"]
                made[name] = placed(tensor, over, along(tensor, dim)).to_local()
        return made

    flags = ("--expert-mesh", f"{mesh[0]}x{mesh[1]}", "--experts", r"^rows\.")
    held = dumped(tp_grid, "--ranks", world, "--shard-dim", dim, *flags)
    assert_shards(held, tp_grid[2], world, oracle)


def test_three_axes_are_torchs_with_two_flattened(tp_grid: Case, dumped) -> None:
    """TP shards first, then FSDP does over dp x cp, which torch flattens into one axis."""

    def oracle(tensors: Tensors, rank: int) -> Tensors:
        with playing_rank(rank, 8):
            mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
            over = mesh["dp", "cp"]._flatten("fsdp")
            local = {n: placed(t, mesh["tp"], along(t, 0)).to_local() for n, t in tensors.items()}
            return {n: placed(t, over, along(t, 0)).to_local() for n, t in local.items()}

    held = dumped(tp_grid, "--ranks", 8, "--layout", "tp-fsdp", "--mesh", "2x2x2")
    assert_shards(held, tp_grid[2], 8, oracle)


# ---- DeepSpeed


@pytest.mark.parametrize("groups, stage", (("one_group", 1), ("one_group", 2), ("grid", 2)))
@pytest.mark.parametrize("order", ("in_order", "round_robin"))
@pytest.mark.parametrize("world", soak_but(QUICK_WORLDS, WORLDS))
def test_zero12_is_deepspeeds(
    request, dumped, world: int, stage: int, order: str, groups: str
) -> None:
    pytest.importorskip("deepspeed")
    case = request.getfixturevalue(groups)
    round_robin = order == "round_robin"
    flags = ("--layout", f"zero{stage}", "--ranks", world, round_robin and "--round-robin")
    oracle = zero12_shards(stage, world, round_robin)
    assert_shards(dumped(case, *flags), case[2], world, oracle)


@pytest.mark.parametrize("world", soak_but(QUICK_WORLDS, WORLDS))
def test_zero3_is_deepspeeds(grid: Case, dumped, world: int) -> None:
    pytest.importorskip("deepspeed")
    held = dumped(grid, "--layout", "zero3", "--ranks", world)
    assert_shards(held, grid[2], world, zero3_shards(world))


# ---- strategies


STRATEGY_CASES = (
    Cut("fsdp2", (5,)).flags,
    Cut("hsdp", (2, 3), 1).flags,
    Cut("tp-fsdp", (3, 2), 0, ROWWISE, REPLICATED).flags,
    ["--layout", "zero1", "--ranks", 5],
    ["--layout", "zero2", "--ranks", 3, "--round-robin"],
    ["--layout", "zero3", "--ranks", 5],
)


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "own-shard"])
@pytest.mark.parametrize("flags", STRATEGY_CASES, ids=lambda flags: " ".join(map(str, flags)))
def test_every_strategy_dumps_the_same(grid: Case, dumped, flags, strategy: str) -> None:
    own = dumped(grid, *flags, "--strategy", "own-shard")
    other = dumped(grid, *flags, "--strategy", strategy)
    assert len(own) == len(other)
    for rank, (mine, theirs) in enumerate(zip(own, other, strict=True)):
        assert mine.keys() == theirs.keys()
        for name, shard in mine.items():
            assert_same(theirs[name], shard, f"{name} of rank {rank}")
