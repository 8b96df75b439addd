"""Loaders in which at least one rank holds complete tensors before they are sharded."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from rivals.model import dtype_of, empty_sharded, mesh_of, parallelize, shard
from rivals.rows import Case
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import AutoModelForCausalLM


def whole(case: Case, dtype: torch.dtype) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(case.directory, dtype=dtype)


def from_pretrained(case: Case, built: Callable[[], None]) -> torch.nn.Module:
    """Every rank loads the model, then shards it."""
    model = whole(case, dtype_of(case))
    shard(case, model)
    return model


def accelerate(
    case: Case, built: Callable[[], None], mixed_precision: str = "no"
) -> torch.nn.Module:
    """accelerate's FSDP2 with cpu_ram_efficient_loading.

    On CPUs `Accelerator` silently replaces an FSDP2 plugin by DDP, so the function that
    `Accelerator.prepare` would call on a GPU is called here. With mixed precision this function
    makes fp32 masters of a bf16 model.
    """
    PartialState(cpu=True)  # accelerate's logging needs it
    stored = mixed_precision != "no"
    model = whole(case, torch.bfloat16 if stored else dtype_of(case))
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=True
    )
    mesh = mesh_of(case)
    parallelize(case, model, mesh)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        mixed_precision=mixed_precision,
        is_main_process=dist.get_rank() == 0,
        device=torch.device("cpu"),
        torch_device_mesh=mesh,
        parallelism_config=SimpleNamespace(fsdp_dim_names=("dp",)),
    )
    return fsdp2_prepare_model(accelerator, model)


def torch_broadcast(case: Case, built: Callable[[], None]) -> torch.nn.Module:
    """Rank 0 loads the model, and torch broadcasts it tensor by tensor."""
    model = empty_sharded(case)
    built()
    # named_parameters() has a tied tensor under one name only, so the tensor is sent once.
    state = dict(whole(case, dtype_of(case)).named_parameters()) if dist.get_rank() == 0 else {}
    options = StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True, strict=False
    )
    set_model_state_dict(model, state, options=options)
    model.tie_weights()
    return model
