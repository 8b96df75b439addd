"""`Shardings` reads from a DTensor or an FSDP2 parameter which elements each rank holds, in the
form of a `Sharding`: a mesh of all ranks, and cuts of dims along its axes.

The oracles are `fully_shard`, tensor parallelism and `distribute_tensor`. A fake process group lets
this process be each rank in turn. Catches: placements applied from left to right although FSDP2
shards the shard of tensor parallelism; flattened or omitted mesh axes in the wrong order; padding
for another cut than FSDP2's; packed parts that count as an order of cuts; runs of elements that are
not in the order of a rank's memory; elements that all replicas count in a sum, or none of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sharding import assert_same, placed, playing_new_rank  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed._composable.replicate_with_fsdp import replicate  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.fsdp._fully_shard._fsdp_api import DataParallelMeshDims  # noqa: E402
from torch.distributed.fsdp._fully_shard._fsdp_common import (  # noqa: E402
    FSDPMeshInfo,
    ShardPlacementResult,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard  # noqa: E402
from torch.distributed.tensor._dtensor_spec import (  # noqa: E402
    DTensorSpec,
    ShardOrderEntry,
    TensorMeta,
)
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402

from modicum import _modicum  # noqa: E402  (after torch is known to be there)
from modicum.errors import UsageError  # noqa: E402
from modicum.torch.shards.placements import Cut, Sharding, Shardings  # noqa: E402
from modicum.upstream.torch_fsdp import fsdp_params  # noqa: E402

# ---- our sharding against torch.chunk


def chunks(tensor: Any, parts: int, dim: int) -> list[Any]:
    """torch.chunk, with empty chunks at the end so that there are `parts`."""
    made = list(torch.chunk(tensor, parts, dim))
    return made + [tensor.narrow(dim, 0, 0)] * (parts - len(made))


def coordinate(mesh: tuple[int, ...], rank: int) -> list[int]:
    """The rank's index on each axis of a mesh that has all ranks in row-major order."""
    return [rank // prod(mesh[axis + 1 :]) % size for axis, size in enumerate(mesh)]


def held(sharding: Sharding, whole: Any, rank: int) -> tuple[Any, int]:
    """(a rank's shard by torch.chunk, the number of elements in FSDP2's padded buffer)."""
    at = coordinate(sharding.mesh, rank)
    rows = whole.shape[0] if whole.dim() else 1
    for cut in sharding.cuts:
        parts, part = 1, 0
        for axis in cut.axes:
            parts, part = parts * sharding.mesh[axis], part * sharding.mesh[axis] + at[axis]
        pieces = [chunks(piece, parts, cut.dim) for piece in chunks(whole, cut.packed, cut.dim)]
        rows = whole.shape[0]
        whole = torch.cat([piece[part] for piece in pieces], cut.dim)
        padded = cut.pads and cut.dim == 0
        rows = -(-rows // parts) if padded else whole.shape[0]
    return whole, rows * prod(whole.shape[1:])


def left_to_right(tensor: Any) -> Sharding:
    """The wrong reading of placements: all kinds apply from left to right."""
    mesh = tuple(tensor.device_mesh.mesh.shape)
    cuts = [Cut((axis,), p.dim) for axis, p in enumerate(tensor.placements) if hasattr(p, "dim")]
    return Sharding(mesh, tuple(cuts))


# ---- torch's own shards


def ids(shape: tuple[int, ...]) -> Any:
    """A tensor whose elements are 1, 2, ..., so that zeros are padding."""
    return torch.arange(1, prod(shape) + 1, dtype=torch.float32).reshape(shape)


def on_mesh(sizes: tuple[int, ...], names: str) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=tuple(names.split()))


def one_parameter(value: Any, **arguments: Any) -> Any:
    """A parameter sharded by FSDP2, and FSDP2's facts about it."""
    module = nn.Module()
    module.p = nn.Parameter(value)
    fully_shard(module, **arguments)
    return module.p, fsdp_params(module)[module.p]


def along(dim: int) -> Callable[[Any], Any]:
    """A `shard_placement_fn` of fully_shard."""
    return lambda _: Shard(dim)


def tp_then_fsdp(mesh: DeviceMesh, value: Any, tp: Any, dim: int = 0, over: str = "dp") -> Any:
    value = placed(value, mesh["tp"], tp)
    return one_parameter(value, mesh=mesh[over], shard_placement_fn=along(dim))


def packed(value: Any, mesh: DeviceMesh, parts: int) -> Any:
    """A DTensor of `parts` matrices that are packed along dim 0, such as gate and up. Tensor
    parallelism shards each matrix separately."""
    placement = _StridedShard(0, split_factor=parts)
    pieces, _ = placement._split_tensor(value, mesh.size(), with_padding=False)
    local = pieces[mesh.get_local_rank()]
    return DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=value.shape, stride=value.stride()
    )


@dataclass(frozen=True)
class Case:
    """A way to shard a tensor, and the `mesh` and `cuts` of the expected `Sharding`."""

    name: str
    world: int
    mesh: tuple[int, ...]
    cuts: tuple[Cut, ...]
    make: Callable[[Any], Any]
    """Called on each rank with the unsharded tensor. Returns the rank's tensor, or a parameter and
    FSDP2's facts about it."""
    sizes: tuple[int, ...] = (1, 3, 7, 8, 14)
    """The arguments with which `shape` is called."""
    shape: Callable[[int], tuple[int, ...]] = lambda n: (n, 4)
    """Returns the shape of the unsharded tensor."""


# The functions below make tensors for `Case.make`.


def dp_cp_tp(value: Any, flat: str, order: str, tp: bool) -> Any:
    mesh = on_mesh((2, 2, 2), order)
    over = mesh[tuple(flat.split())]._flatten("flat")
    return one_parameter(placed(value, mesh["tp"], Shard(0)) if tp else value, mesh=over)


def spmd(value: Any, sizes: tuple[int, ...], names: str, tp: dict[str, Any], dims: Any) -> Any:
    mesh = on_mesh(sizes, names)
    value = placed(value, mesh, *[tp.get(name, Replicate()) for name in names.split()])
    return one_parameter(value, mesh=mesh, dp_mesh_dims=dims)


def other_mesh(value: Any) -> Any:
    """FSDP2 shards the module over the mesh axis dp, but this parameter over ep."""
    mesh = on_mesh((2, 2), "dp ep")
    elsewhere = ShardPlacementResult(Shard(0), FSDPMeshInfo(mesh["ep"], shard_mesh_dim=0))
    return one_parameter(value, mesh=mesh["dp"], shard_placement_fn=lambda _: elsewhere)


def experts(value: Any, dim: int) -> Any:
    mesh = on_mesh((2, 3), "dp ep")
    experts = placed(value, mesh["ep"], Shard(0))
    return one_parameter(experts, mesh=mesh["dp"], shard_placement_fn=along(dim))


def two_before_fsdp(value: Any, *placements: Any) -> Any:
    mesh = on_mesh((2, 2, 2), "dp ep tp")
    return one_parameter(placed(value, mesh["ep", "tp"], *placements), mesh=mesh["dp"])


def only_replicated(value: Any) -> Any:
    module = nn.Module()
    module.p = nn.Parameter(value)
    replicate(module, mesh=on_mesh((3,), "dp"))
    return module.p, fsdp_params(module)[module.p]


def ignored(value: Any) -> Any:
    module = nn.Module()
    module.p = nn.Parameter(value)
    module.q = nn.Parameter(torch.zeros(3))
    fully_shard(module, mesh=on_mesh((3,), "dp"), ignored_params={module.p})
    assert module.p not in fsdp_params(module)
    assert module.q in fsdp_params(module)
    return module.p


def by_style(value: Any, style: Any) -> Any:
    mesh = on_mesh((2, 2), "dp tp")
    layer = nn.Linear(value.shape[1], value.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(value)
    layer = parallelize_module(layer, mesh["tp"], style(), src_data_rank=None)
    fully_shard(layer, mesh=mesh["dp"])
    return layer.weight, fsdp_params(layer)[layer.weight]


def placed_on(sizes: tuple[int, ...], *placements: Any) -> Callable[[Any], Any]:
    names = " ".join("abcd"[: len(sizes)])
    return lambda value: placed(value, on_mesh(sizes, names), *placements)


FSDP = Cut((0,), 0, pads=True)
CASES = [
    *(
        Case(f"fsdp{world}", world, (world,), (FSDP,) if world > 1 else (), make=one_parameter)
        for world in (1, 2, 3, 5)
    ),
    Case(
        "fsdp along dim 1",
        3,
        (3,),
        (Cut((0,), 1),),
        lambda value: one_parameter(value, shard_placement_fn=along(1)),
        shape=lambda n: (n, 6),
    ),
    Case(
        "hsdp",
        6,
        (2, 3),
        (Cut((1,), 0, pads=True),),
        lambda value: one_parameter(value, mesh=on_mesh((2, 3), "replica dp")),
    ),
    Case("replicate", 3, (3,), (), only_replicated),
    Case("ignored_params", 3, (3,), (), ignored),
    Case(
        "dp x cp flattened",
        8,
        (4, 2),
        (FSDP,),
        lambda value: dp_cp_tp(value, "dp cp", "dp cp tp", tp=False),
    ),
    Case(
        "dp x cp flattened, after tp",
        8,
        (4, 2),
        (Cut((1,), 0), FSDP),
        lambda value: dp_cp_tp(value, "dp cp", "dp cp tp", tp=True),
    ),
    Case(
        "dp x cp flattened around tp",
        8,
        (2, 2, 2),
        (Cut((1,), 0), Cut((0, 2), 0, pads=True)),
        lambda value: dp_cp_tp(value, "dp cp", "dp tp cp", tp=True),
    ),
    Case(
        "the same dim, tp first",
        6,
        (3, 2),
        (Cut((1,), 0), FSDP),
        lambda value: tp_then_fsdp(on_mesh((3, 2), "dp tp"), value, Shard(0)),
    ),
    Case(
        "tp along dim 1",
        6,
        (2, 3),
        (Cut((1,), 1), FSDP),
        lambda value: tp_then_fsdp(on_mesh((2, 3), "dp tp"), value, Shard(1)),
    ),
    Case(
        "tp along dim 0, fsdp along dim 1",
        6,
        (2, 3),
        (Cut((1,), 0), Cut((0,), 1)),
        lambda value: tp_then_fsdp(on_mesh((2, 3), "dp tp"), value, Shard(0), dim=1),
    ),
    Case(
        "tp that replicates",
        6,
        (2, 3),
        (FSDP,),
        lambda value: tp_then_fsdp(on_mesh((2, 3), "dp tp"), value, Replicate()),
    ),
    Case(
        "colwise",
        4,
        (2, 2),
        (Cut((1,), 0), FSDP),
        lambda value: by_style(value, ColwiseParallel),
    ),
    Case(
        "rowwise",
        4,
        (2, 2),
        (Cut((1,), 1), FSDP),
        lambda value: by_style(value, RowwiseParallel),
    ),
    Case(
        "packed tp, then fsdp",
        6,
        (3, 2),
        (Cut((1,), 0, packed=2), FSDP),
        lambda value: one_parameter(
            packed(value, (mesh := on_mesh((3, 2), "dp tp"))["tp"], 2), mesh=mesh["dp"]
        ),
    ),
    Case(
        "tp inside hsdp",
        8,
        (2, 2, 2),
        (Cut((2,), 0), Cut((1,), 0, pads=True)),
        lambda value: one_parameter(
            placed(value, (mesh := on_mesh((2, 2, 2), "replica dp tp"))["tp"], Shard(0)),
            mesh=mesh["replica", "dp"],
        ),
    ),
    Case(
        "experts, fsdp along dim 0",
        6,
        (2, 3),
        (Cut((1,), 0), FSDP),
        lambda value: experts(value, 0),
    ),
    Case(
        "experts, fsdp along dim 1",
        6,
        (2, 3),
        (Cut((1,), 0), Cut((0,), 1)),
        lambda value: experts(value, 1),
    ),
    Case("another mesh than the unit's", 4, (2, 2), (Cut((1,), 0, pads=True),), other_mesh),
    Case(
        "ep and tp along dims of their own, then fsdp",
        8,
        (2, 2, 2),
        (Cut((1,), 0), Cut((2,), 1), FSDP),
        lambda value: two_before_fsdp(value, Shard(0), Shard(1)),
    ),
    Case(
        "ep, tp and fsdp along one dim",
        8,
        (2, 2, 2),
        (Cut((1,), 0), Cut((2,), 0), FSDP),
        lambda value: two_before_fsdp(value, Shard(0), Shard(0)),
    ),
    Case(
        "one mesh for all, tp inside",
        6,
        (3, 2),
        (Cut((1,), 0), FSDP),
        lambda value: spmd(
            value, (3, 2), "dp tp", {"tp": Shard(0)}, DataParallelMeshDims(shard="dp")
        ),
    ),
    Case(
        "one mesh for all, tp outside",
        6,
        (2, 3),
        (Cut((0,), 0), Cut((1,), 0, pads=True)),
        lambda value: spmd(
            value, (2, 3), "tp dp", {"tp": Shard(0)}, DataParallelMeshDims(shard="dp")
        ),
    ),
    Case(
        "one mesh for all, dp x cp",
        8,
        (4, 2),
        (Cut((1,), 1), FSDP),
        lambda value: spmd(
            value,
            (2, 2, 2),
            "dp cp tp",
            {"tp": Shard(1)},
            DataParallelMeshDims(shard=("dp", "cp")),
        ),
    ),
    Case(
        "left to right",
        6,
        (2, 3),
        (Cut((0,), 0), Cut((1,), 0)),
        placed_on((2, 3), Shard(0), Shard(0)),
    ),
    Case(
        "strided as the order 2, 0, 1",
        8,
        (2, 2, 2),
        (Cut((2,), 0), Cut((0,), 0), Cut((1,), 0)),
        placed_on((2, 2, 2), *[_StridedShard(0, split_factor=2)] * 2, Shard(0)),
        sizes=(2, 6, 8),  # for odd sizes torch's placements do not describe the shards
    ),
    Case(
        "packed inside a plain cut",
        4,
        (2, 2),
        (Cut((0,), 0), Cut((1,), 0, packed=3)),
        placed_on((2, 2), Shard(0), _StridedShard(0, split_factor=3)),
    ),
    Case("replicated", 4, (4,), (), placed_on((2, 2), Replicate(), Replicate())),
    Case("a dim by its negative number", 3, (3,), (Cut((0,), 1),), placed_on((3,), Shard(-1))),
    Case(
        "a mesh axis of one rank",
        3,
        (3,),
        (Cut((0,), 0),),
        placed_on((1, 3), Shard(1), Shard(0)),
    ),
    Case(
        "ranks across",
        4,
        (2, 2),
        (Cut((1, 0), 0),),
        lambda value: placed(value, DeviceMesh("cpu", [0, 2, 1, 3]), Shard(0)),
    ),
]


def elements(sharding: Sharding, shape: tuple[int, ...], rank: int) -> Any:
    """The values of `ids` at the indices in a rank's runs."""
    runs = _modicum.Shard(sharding, shape, rank).runs(range(len(shape)))
    return torch.tensor([i for first, n in runs for i in range(first + 1, first + n + 1)])


def made_of(case: Case, value: Any) -> tuple[Any, Any]:
    """(the rank's tensor, FSDP2's facts about it or None)."""
    made = case.make(value)
    return made if isinstance(made, tuple) else (made, None)


def read(tensor: Any) -> Sharding:
    return Shardings().of(tensor, "p")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_rank_holds_torchs_shard(case: Case) -> None:
    expected = Sharding(case.mesh, case.cuts)
    # By (size, ranks of the tensor's mesh): the elements that ranks count in a sum over the mesh.
    counted: dict[Any, list[int]] = {}
    for rank in range(case.world):
        with playing_new_rank(rank, case.world):
            for size in case.sizes:
                whole, shardings = ids(case.shape(size)), Shardings()
                tensor, managed = made_of(case, whole)
                assert shardings.of(tensor, "p") == expected
                mine, numel = held(expected, whole, rank)
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                # The cuts may give an empty shard the shape [4, 0] where FSDP2 gives it [0, 0].
                local = local.reshape(mine.shape) if mine.numel() == 0 else local
                assert_same(local, mine, f"{size} rows, rank {rank}")
                in_runs = elements(expected, whole.shape, rank).tolist()
                assert in_runs == local.reshape(-1).tolist(), f"runs of rank {rank}"
                if isinstance(tensor, DTensor):
                    key = (size, *tensor.device_mesh.mesh.ravel().tolist())
                    of_mesh = counted.setdefault(key, [])
                    of_mesh += in_runs if shardings.counts(tensor, expected) else []
                if managed:
                    assert managed.padded_numel == numel
                    flat = managed.fsdp_param._sharded_param_data
                    assert_same(flat[: mine.numel()], mine.reshape(-1), "the flat buffer")
                    assert not flat[mine.numel() :].any()
    for (size, *_), in_sum in counted.items():
        # The ranks of a mesh together count each element once.
        assert sorted(in_sum) == ids(case.shape(size)).reshape(-1).tolist()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_sharding_is_the_same_on_meta(case: Case) -> None:
    with playing_new_rank(case.world - 1, case.world):
        value = torch.empty(case.shape(8), device="meta")
        tensor, _managed = made_of(case, value)
        assert read(tensor) == Sharding(case.mesh, case.cuts)


def test_placements_read_from_left_to_right_are_wrong() -> None:
    """On the mesh dp 3 x tp 2 this reading gives rank 1 the rows 2 and 3, which FSDP2 has on rank
    2. Only for the first and the last rank it is right."""
    case = next(case for case in CASES if case.name == "the same dim, tp first")
    differ = []
    for rank in range(case.world):
        with playing_new_rank(rank, case.world):
            tensor, _managed = made_of(case, ids((12, 4)))
            wrong = left_to_right(tensor)
            if not torch.equal(held(wrong, ids((12, 4)), rank)[0], tensor.to_local()):
                differ.append(rank)
    assert differ == [1, 2, 3, 4]


def test_plain_tensors_are_unsharded() -> None:
    class Named(nn.Parameter):
        pass

    for tensor in (torch.zeros(3), nn.Parameter(torch.zeros(())), Named(torch.zeros(3))):
        with playing_new_rank(0, 6):
            assert read(tensor) == Sharding((6,), ())


def test_the_shard_order_of_a_spec_is_followed() -> None:
    """Newer versions of torch can give the order of plain placements in
    `DTensorSpec.shard_order`."""
    with playing_new_rank(0, 4):
        meta = TensorMeta(torch.Size([8]), (1,), torch.float32)
        order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
        mesh = on_mesh((2, 2), "a b")
        spec = DTensorSpec(mesh, (Shard(0), Shard(0)), meta, shard_order=order)
        tensor = DTensor(torch.zeros(2), spec, requires_grad=False)
        assert read(tensor).cuts == (Cut((1,), 0), Cut((0,), 0))


# ---- refusals


def placed_on_meta(sizes: tuple[int, ...], *placements: Any, rows: int = 12) -> Any:
    return placed_on(sizes, *placements)(torch.empty(rows, device="meta"))


def over(ranks: list[Any]) -> Any:
    """A tensor sharded over a mesh of these ranks."""
    return placed(torch.empty(12, device="meta"), DeviceMesh("cpu", ranks), Shard(0))


def partial() -> Any:
    return DTensor.from_local(torch.zeros(3), on_mesh((4,), "dp"), [Partial()], run_check=False)


def from_spec(local: Any, shape: Any) -> Any:
    """A DTensor whose spec says Shard(0), whatever the shape of `local`."""
    spec = DTensorSpec(on_mesh((4,), "dp"), (Shard(0),), TensorMeta(shape, (1,), local.dtype))
    return DTensor(local, spec, requires_grad=False)


# By name: a function that makes a DTensor, and a part of the error message.
REFUSED = {
    "partial": (partial, "the placement Partial"),
    "three of four": (lambda: over([0, 1, 2]), "a regular grid of 4 ranks"),
    "not this one": (lambda: over([2, 3]), "one with rank 0"),
    "shuffled": (lambda: over([0, 1, 3, 2]), "a regular grid of 4 ranks"),
    "downwards": (lambda: over([1, 0]), "a regular grid of 4 ranks"),
    "twisted": (
        lambda: placed(
            torch.empty(12, device="meta"),
            DeviceMesh("cpu", [[0, 1], [3, 2]]),
            Replicate(),
            Shard(0),
        ),
        "a regular grid of 4 ranks",
    ),
    "another local shape": (
        lambda: from_spec(torch.zeros(3), torch.Size([8])),
        "the local shape contradicts the placements (tensor p, expected [2], got [3])",
    ),
    "no such order": (
        lambda: placed_on_meta((2, 2), _StridedShard(0, split_factor=3), Shard(0)),
        "cuts of unknown order (tensor p, got [12] as [_StridedShard(dim=0, sf=3), Shard(dim=0)])",
    ),
    "uneven, and not FSDP2's": (
        lambda: placed_on_meta((2, 2), _StridedShard(0, split_factor=2), Shard(0), rows=7),
        "cuts of unknown order (tensor p, got [7] as [_StridedShard(dim=0, sf=2), Shard(dim=0)])",
    ),
    "packed, and not FSDP2's": (
        lambda: placed_on_meta((2, 2), *[_StridedShard(0, split_factor=2)] * 2),
        "cuts of unknown order (tensor p, got [12] as [_StridedShard(dim=0, sf=2), _Strided",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_dtensor_without_a_known_sharding_is_refused(what: str) -> None:
    make, why = REFUSED[what]
    with playing_new_rank(0, 4), pytest.raises(UsageError) as caught:
        read(make())
    assert (caught.value.category, caught.value.tensor) == ("UNSUPPORTED", "p")
    assert why in str(caught.value)


def test_fsdp2_over_ranks_in_another_order_is_refused() -> None:
    """FSDP2 shards in the order of ranks in the process group, and its DTensor has only the
    mesh."""
    with playing_new_rank(1, 4):
        mesh = DeviceMesh("cpu", [0, 2, 1, 3])
        tensor, _managed = one_parameter(ids((8, 4)), mesh=mesh)
        # Rank 1 has row 2, by the group's order, and not row 4, by the mesh's.
        assert tensor.to_local()[0, 0] == ids((8, 4))[2, 0]
        with pytest.raises(UsageError, match="FSDP2's ranks are no axis of the tensor's mesh"):
            read(tensor)
