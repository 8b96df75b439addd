"""The shards that torch and DeepSpeed give each rank of a layout, computed in one process.

A rank is played under a fake process group, which has a rank and a world size and moves no data.
The tensors are sharded by the real code of torch's DTensor and FSDP2 and of DeepSpeed's ZeRO.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

Tensors = dict[str, Any]


def bits(tensor: Any) -> bytes:
    """A tensor's bytes, for any dtype (numpy has no bfloat16)."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def assert_same(got: Any, expected: Any, what: str) -> None:
    assert got.dtype == expected.dtype, f"{what}: {got.dtype} instead of {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: {got.shape} instead of {expected.shape}"
    assert bits(got) == bits(expected), f"{what}: other bits"


@contextmanager
def playing_rank(rank: int, world: int) -> Iterator[None]:
    """Within the context, this process is one rank of a fake process group."""
    hook = sys.excepthook
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        with torch.no_grad():
            yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # torch's puts the rank's name before every line


@contextmanager
def playing_new_rank(rank: int, world: int) -> Iterator[None]:
    """As `playing_rank`, but clears torch's caches of other ranks' meshes.

    torch caches the results of operations on DTensors by mesh, and mistakes an equal mesh of
    another rank for this one.
    """
    _clear_sharding_prop_cache()
    with playing_rank(rank, world):
        yield


# ---- torch


@dataclass(frozen=True)
class Cut:
    """A layout, as Modicum's flags and as torch's placements.

    `mesh` has torch's order, outermost first. TP shards before FSDP does: not at all if `replicate`
    finds the name, along dim 1 if `rowwise` does, else along dim 0.
    """

    layout: str
    mesh: tuple[int, ...]
    dim: int = 0
    rowwise: str = ""
    replicate: str = ""

    @property
    def world(self) -> int:
        return prod(self.mesh)

    @property
    def flags(self) -> list[object]:
        words: list[object] = ["--ranks", self.world, "--layout", self.layout]
        words += ["--mesh", "x".join(map(str, self.mesh))] if len(self.mesh) > 1 else []
        words += ["--shard-dim", self.dim] if self.dim else []
        words += ["--tp-rowwise", self.rowwise] if self.rowwise else []
        return words + (["--tp-replicate", self.replicate] if self.replicate else [])

    def __str__(self) -> str:
        return f"{self.layout}-{'x'.join(map(str, self.mesh))}-dim{self.dim}"

    def placement(self, tensor: Any) -> Any:
        """The placement of the innermost data-parallel axis: a tensor of fewer dims is sharded
        along dim 0."""
        if tensor.dim() == 0 or self.layout == "none":
            return Replicate()
        return Shard(self.dim if self.dim < tensor.dim() else 0)

    def tp_placement(self, name: str, tensor: Any) -> Any:
        if tensor.dim() == 0 or (self.replicate and re.search(self.replicate, name)):
            return Replicate()
        return Shard(1 if self.rowwise and re.search(self.rowwise, name) else 0)


AXES = {"none": ("dp",), "fsdp2": ("dp",), "hsdp": ("replica", "dp"), "tp-fsdp": ("dp", "tp")}


def mesh_of(cut: Cut) -> DeviceMesh:
    return init_device_mesh("cpu", cut.mesh, mesh_dim_names=AXES[cut.layout])


def placed(tensor: Any, mesh: DeviceMesh, *placements: Any) -> Any:
    """The DTensor of a tensor that every rank has unsharded."""
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def dtensor_shards(cut: Cut, tensors: Tensors, rank: int) -> Tensors:
    """The shards of a rank by DTensor."""
    with playing_rank(rank, cut.world):
        mesh = mesh_of(cut)
        if cut.layout == "hsdp":
            return {
                n: placed(t, mesh, Replicate(), cut.placement(t)).to_local()
                for n, t in tensors.items()
            }
        dp, made = mesh["dp"], tensors
        if cut.layout == "tp-fsdp":
            tp = mesh["tp"]
            made = {n: placed(t, tp, cut.tp_placement(n, t)).to_local() for n, t in tensors.items()}
        return {n: placed(t, dp, cut.placement(t)).to_local() for n, t in made.items()}


def fsdp2_buffers(cut: Cut, tensors: Tensors, rank: int) -> dict[str, tuple[Any, Any]]:
    """(the shard of a rank, the flat buffer that holds it and its padding) by `fully_shard`, for
    the tensors that it supports.

    `fully_shard` supports neither tensors without dims nor uneven shards along another dim than 0.
    Tensors without elements are left out, too, since `fully_shard` reports other shapes for them
    ([0, 0] for [3, 0]).
    """
    with playing_rank(rank, cut.world):
        mesh = mesh_of(cut)
        over, tp = (mesh["dp"], mesh["tp"]) if cut.layout == "tp-fsdp" else (mesh, None)
        module = torch.nn.Module()
        names = {}
        for name, tensor in tensors.items():
            value, local = tensor, tensor
            if tp is not None:
                value = placed(tensor, tp, cut.tp_placement(name, tensor))
                local = value.to_local()
            if fully_shard_takes(cut, local):
                names[f"p{len(names)}"] = name
                trains = tensor.is_floating_point()
                parameter = torch.nn.Parameter(value, requires_grad=trains)
                module.register_parameter(f"p{len(names) - 1}", parameter)
        fully_shard(module, mesh=over, shard_placement_fn=cut.placement)
        params = [param for group in fsdp_groups(module) for param in group.fsdp_params]
        return {
            names[of._module_info.param_name]: (of.sharded_param.to_local(), of._sharded_param_data)
            for of in params
        }


def fsdp_groups(module: Any) -> list[Any]:
    """FSDP2's groups of parameters of one of its units; torch 2.11 has one group per unit."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group]


def fsdp2_shards(cut: Cut, tensors: Tensors, rank: int) -> Tensors:
    """The shards of a rank by `fully_shard`, for the tensors that it supports."""
    return {name: local for name, (local, _) in fsdp2_buffers(cut, tensors, rank).items()}


def fully_shard_takes(cut: Cut, local: Any) -> bool:
    if local.dim() == 0 or local.numel() == 0:
        return False
    dim = cut.placement(local).dim
    shards = cut.mesh[AXES[cut.layout].index("dp")]
    return dim == 0 or local.shape[dim] % shards == 0


def along(tensor: Any, dim: int) -> Any:
    """A placement along `dim`, or along dim 0 if the tensor has too few dims."""
    if tensor.dim() == 0:
        return Replicate()
    return Shard(dim if dim < tensor.dim() else 0)


def packed_shards(mesh: tuple[int, int], dim: int = 0) -> Callable[[Tensors, int], Tensors]:
    """For gate and up in one tensor: each rank has its part of both halves. Then FSDP shards along
    `dim`."""
    dp, tp = mesh

    def shards(tensors: Tensors, rank: int) -> Tensors:
        made = {}
        for name, tensor in tensors.items():
            if tensor.dim():
                halves = _StridedShard(0, split_factor=2)
                parts, _ = halves._split_tensor(tensor, tp, with_padding=False)
                tensor = parts[rank % tp]
            made[name] = tensor
        with playing_rank(rank, dp * tp):
            over = init_device_mesh("cpu", mesh, mesh_dim_names=("dp", "tp"))["dp"]
            return {n: placed(t, over, along(t, dim)).to_local() for n, t in made.items()}

    return shards


def experts_shards(
    mesh: tuple[int, int], dim: int, is_expert: Callable[[str], bool] = lambda _: True
) -> Callable[[Tensors, int], Tensors]:
    """Experts are sharded over an (fsdp, ep) mesh, other tensors over all ranks."""

    def shards(tensors: Tensors, rank: int) -> Tensors:
        made = {}
        with playing_rank(rank, prod(mesh)):
            experts = init_device_mesh("cpu", mesh, mesh_dim_names=("fsdp", "ep"))
            others = init_device_mesh("cpu", (prod(mesh),))
            for name, tensor in tensors.items():
                over = others
                if is_expert(name):
                    tensor = placed(tensor, experts["ep"], along(tensor, 0)).to_local()
                    over = experts["fsdp"]
                made[name] = placed(tensor, over, along(tensor, dim)).to_local()
        return made

    return shards


def flattened_shards(tensors: Tensors, rank: int) -> Tensors:
    """TP shards first, then FSDP does over dp x cp, which torch flattens into one axis: eight
    ranks on a (dp, cp, tp) mesh."""
    with playing_rank(rank, 8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
        over = mesh["dp", "cp"]._flatten("fsdp")
        local = {n: placed(t, mesh["tp"], along(t, 0)).to_local() for n, t in tensors.items()}
        return {n: placed(t, over, along(t, 0)).to_local() for n, t in local.items()}


# ---- DeepSpeed


@contextmanager
def playing_deepspeed_rank(rank: int, world: int) -> Iterator[None]:
    """As `playing_rank`, with DeepSpeed's own communication layer over the fake process group.

    DeepSpeed would compile a shared-memory kernel for its collectives. The tests need none, so
    nothing is compiled.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import deepspeed.comm.comm as communication

    backend = import_module("deepspeed.comm.torch")  # the attribute of this name is torch itself
    words = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": 0}
    before = dict(os.environ)
    shared_memory = backend.build_shm_op
    try:
        os.environ.update({name: str(word) for name, word in words.items()})
        deepspeed.utils.logger.setLevel("ERROR")
        backend.build_shm_op = lambda: None
        with playing_rank(rank, world):
            communication.cdb = None
            deepspeed.init_distributed("fake", auto_mpi_discovery=False, verbose=False)
            yield
    finally:
        communication.cdb = None
        backend.build_shm_op = shared_memory
        os.environ.clear()
        os.environ.update(before)


def parameters_of(tensors: Tensors) -> list[Any]:
    return [torch.nn.Parameter(tensor.clone()) for tensor in tensors.values()]


def floats(tensors: Tensors) -> Tensors:
    return {n: t for n, t in tensors.items() if t.is_floating_point()}


def by_dtype(tensors: Tensors) -> list[Tensors]:
    """One group for each dtype, in the order in which they first appear."""
    dtypes = list(dict.fromkeys(t.dtype for t in tensors.values()))
    return [{n: t for n, t in tensors.items() if t.dtype == dtype} for dtype in dtypes]


def zero12_shards(stage: int, world: int, round_robin: bool) -> Callable[[Tensors, int], Tensors]:
    """The shards of a rank by `DeepSpeedZeroOptimizer`: its partition of every group, without
    padding.

    DeepSpeed drops parameters without elements before it assigns the others round robin.
    """

    def shards(tensors: Tensors, rank: int) -> Tensors:
        with playing_deepspeed_rank(rank, world):
            from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

            groups = [parameters_of(group) for group in by_dtype(floats(tensors))]
            optimizer = DeepSpeedZeroOptimizer(
                torch.optim.SGD([{"params": group} for group in groups], lr=0.1),
                {p: str(n) for n, p in enumerate(p for group in groups for p in group)},
                None,
                {},
                dp_process_group=dist.group.WORLD,
                partition_grads=stage == 2,
                round_robin_gradients=round_robin,
            )
            made = {n: t for n, t in tensors.items() if not t.is_floating_point()}
            for number, parts in enumerate(optimizer.parallel_partitioned_bit16_groups):
                whole = parts[rank].detach()
                name = "flat" if len(groups) == 1 else f"flat.{number}"
                made[name] = whole[: len(whole) - optimizer.groups_padding[number]]
            return made

    return shards


def zero3_shards(world: int) -> Callable[[Tensors, int], Tensors]:
    """The shards of a rank by `deepspeed.zero.Init`, without padding.

    Tensors without dims and those that aren't floating point are not partitioned.
    """

    def shards(tensors: Tensors, rank: int) -> Tensors:
        with playing_deepspeed_rank(rank, world):
            from deepspeed.runtime.zero.partition_parameters import Init

            cut = {n: t for n, t in floats(tensors).items() if t.dim()}
            module = torch.nn.Module()
            for number, parameter in enumerate(parameters_of(cut)):
                module.register_parameter(f"p{number}", parameter)
            config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
            Init(module, remote_device="cpu", pin_memory=False, config_dict_or_path=config)
            made = {n: t for n, t in tensors.items() if n not in cut}
            for name, parameter in zip(cut, module.parameters(), strict=False):
                held = parameter.ds_tensor.detach()
                real = max(0, min(len(held), parameter.ds_numel - rank * len(held)))
                made[name] = held[:real]
            return made

    return shards
