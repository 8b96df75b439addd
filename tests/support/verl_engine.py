"""Two ranks of verl's FSDP engine on CPUs: verl_engine.py FOLDER. Each rank prints "trained"."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import transformers
from families import FAMILIES

import modicum.torch

WORLD = 2


def engine_of(directory: str, optimizer_impl: str = "modicum.torch") -> Any:
    """A verl engine with the attributes that the four tested methods read."""
    import verl.models.transformers.monkey_patch as patches
    import verl.utils.fsdp_utils as loading
    import verl.workers.engine.fsdp.transformer_impl as engines
    import verl.workers.engine.fsdp.utils as utils
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig

    utils.get_device_name = loading.get_device_id = lambda: "cpu"  # verl has no platform for CPUs
    patches.is_trl_available = lambda: False  # verl 0.9.1 needs an older TRL
    engine = object.__new__(engines.FSDPEngine)
    config = transformers.AutoConfig.from_pretrained(directory)
    engine.model_config = SimpleNamespace(
        local_path=directory, hf_config=config, trust_remote_code=False,
        model_type="language_model", use_liger=False, fused_kernel_options=None,
        use_fused_kernels=False, enable_gradient_checkpointing=False, lora_rank=0,
        enable_activation_offload=False,
    )  # fmt: skip
    precision = {"param_dtype": "fp32", "reduce_dtype": "fp32"}
    engine.engine_config = FSDPEngineConfig(strategy="fsdp2", mixed_precision=precision)
    engine.optimizer_config = FSDPOptimizerConfig(
        optimizer="AdamW", optimizer_impl=optimizer_impl, lr=1e-3, total_training_steps=10
    )
    engine.use_remove_padding = False
    return engine


def serve(rank: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD
    )
    directory = f"{folder}/model"
    if rank == 0:
        (family,) = [one for one in FAMILIES if one.name == "qwen3"]
        family.write(family.build(), Path(directory))
    dist.barrier()
    engine = engine_of(directory)
    engine._init_device_mesh()
    module = engine._build_module()
    assert all(parameter.is_meta for parameter in module.parameters())
    module = engine._build_fsdp_module(module)
    optimizer = engine._build_optimizer(module)
    assert isinstance(optimizer, modicum.torch.AdamW)
    kind = transformers.AutoModelForCausalLM
    whole = kind.from_pretrained(directory, dtype=torch.float32)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter.full_tensor(), whole.get_parameter(name)), name
    tokens = torch.arange(3, 14)[None]
    losses = []
    for _ in range(2):
        loss = module(input_ids=tokens, labels=tokens).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] == whole(input_ids=tokens, labels=tokens).loss.item() > losses[1]
    dist.barrier()
    print("trained", flush=True)
    os._exit(0)


if __name__ == "__main__":
    torch.multiprocessing.spawn(serve, (sys.argv[1],), nprocs=WORLD)
