"""The model of a case: makes it empty and sharded, and computes each rank's shards."""

import functools
import re
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from rivals.rows import Case
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoConfig, AutoModelForCausalLM

# transformers' TP plan for these models: (the sharded dim of the weight, torch's style) by module.
# The embedding is sharded along the vocabulary, like the head that is tied to it.
TP_PLAN = {
    # Of an embedding RowwiseParallel shards dim 0; of a linear layer it shards dim 1.
    "model.embed_tokens": (0, RowwiseParallel),
    "model.layers.*.self_attn.q_proj": (0, ColwiseParallel),
    "model.layers.*.self_attn.k_proj": (0, ColwiseParallel),
    "model.layers.*.self_attn.v_proj": (0, ColwiseParallel),
    "model.layers.*.self_attn.o_proj": (1, RowwiseParallel),
    "model.layers.*.mlp.gate_proj": (0, ColwiseParallel),
    "model.layers.*.mlp.up_proj": (0, ColwiseParallel),
    "model.layers.*.mlp.down_proj": (1, RowwiseParallel),
    "lm_head": (0, ColwiseParallel),
}

empty_parameters = functools.partial(init_empty_weights, include_buffers=False)


def dtype_of(case: Case) -> torch.dtype:
    return getattr(torch, case.dtype)


def mesh_of(case: Case) -> DeviceMesh:
    if case.tp == 1:
        return init_device_mesh("cpu", (case.world,), mesh_dim_names=("dp",))
    shape = (case.world // case.tp, case.tp)
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))


def parallelize(case: Case, model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Shards a model along the mesh's tensor-parallel axis, if it has one."""
    if case.tp > 1:
        plan = {name: style() for name, (_, style) in TP_PLAN.items()}
        # No broadcast from rank 0: either every rank has the complete tensor, or no rank has data.
        parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
        model.tie_weights()


def shard(case: Case, model: torch.nn.Module) -> None:
    """The end state's layout: TP if the case has it; each decoder layer is a unit of FSDP2."""
    mesh = mesh_of(case)
    parallelize(case, model, mesh)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def empty_sharded(
    case: Case, empty: Callable[[], AbstractContextManager[object]] = empty_parameters
) -> torch.nn.Module:
    """The sharded model, with parameters on the meta device and real buffers."""
    config = AutoConfig.from_pretrained(case.directory)
    with empty():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype_of(case))
    shard(case, model)
    return model


def materialize(model: torch.nn.Module) -> None:
    """Gives each parameter uninitialised memory."""
    model._apply(lambda t: torch.empty_like(t, device="cpu") if t.is_meta else t)
    model.tie_weights()  # again, since _apply gives tied names separate tensors


def chunk(size: int, parts: int, index: int) -> slice:
    """The indices of torch.chunk's chunk number `index`; empty if torch makes fewer chunks."""
    step = -(-size // parts)
    return slice(min(index * step, size), min((index + 1) * step, size))


def cuts(case: Case, name: str, rank: int) -> list[tuple[int, int, int]]:
    """(dim, parts, index) of each cut of a parameter, outermost first."""
    module = re.sub(r"\.\d+\.", ".*.", name.removesuffix(".weight"))
    made = []
    if case.tp > 1 and module in TP_PLAN:
        made.append((TP_PLAN[module][0], case.tp, rank % case.tp))
    return [*made, (0, case.world // case.tp, rank // case.tp)]


def region(case: Case, name: str, shape: torch.Size) -> tuple[slice, ...]:
    """This rank's shard of a parameter, as slices of the complete parameter."""
    found = [slice(0, size) for size in shape]
    for dim, parts, index in cuts(case, name, dist.get_rank()):
        inner = chunk(found[dim].stop - found[dim].start, parts, index)
        found[dim] = slice(found[dim].start + inner.start, found[dim].start + inner.stop)
    return tuple(found)


def local_of(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's elements as a plain tensor."""
    detached = parameter.detach()
    return detached.to_local() if hasattr(detached, "to_local") else detached


def touch(model: torch.nn.Module) -> None:
    """Writes to each page of each shard, like an optimizer's first step, but keeps the values."""
    for parameter in model.parameters():
        local = local_of(parameter)
        if local.is_contiguous():  # else the whole shard is written, as integers of its item size
            local.view(-1).view(torch.uint8)[::4096].bitwise_or_(0)
        else:
            local.view({2: torch.int16, 4: torch.int32}[local.itemsize]).bitwise_or_(0)
