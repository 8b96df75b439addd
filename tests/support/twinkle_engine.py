"""Two ranks of twinkle's TransformersModel on CPUs: twinkle_engine.py FOLDER STRATEGY. Each rank
prints "trained"."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import transformers
from accelerate_fsdp2 import fsdp2_on_cpus
from areal_engine import write
from torch.distributed.tensor import DTensor

WORLD = 2
# twinkle's accelerate strategy refuses "no". In bfloat16 losses of 4 to 8 are multiples of 1 / 32,
# so that strategy takes more steps until the loss has fallen.
PRECISION = {"native_fsdp": "no", "accelerate": "bf16"}
STEPS = {"native_fsdp": 2, "accelerate": 6}


def built(directory: str, strategy: str) -> Any:
    """A model as twinkle makes it, before it is wrapped."""
    import twinkle
    from twinkle.model.transformers import TransformersModel

    mesh = twinkle.DeviceMesh.from_sizes(fsdp_size=dist.get_world_size(), device_type="cpu")
    twinkle.initialize("local", global_device_mesh=mesh)
    return TransformersModel(
        model_id=directory, device_mesh=mesh, strategy=strategy, memory_efficient_init=True,
        mixed_precision=PRECISION[strategy], dtype=torch.float32,
    )  # fmt: skip


def wrap(model: Any) -> None:
    """Wraps the model with an optimizer whose groups twinkle makes by name."""
    model.set_optimizer("AdamW", lr=1e-3)
    model._lazy_wrap_model()


def made(directory: str, strategy: str) -> Any:
    model = built(directory, strategy)
    assert all(parameter.is_meta for parameter in model.model.parameters())
    assert not any(buffer.is_meta for buffer in model.model.buffers())
    wrap(model)
    return model


def tensors(model: Any) -> dict[str, torch.Tensor]:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {n: t.full_tensor() if isinstance(t, DTensor) else t.clone() for n, t in named.items()}


def step(model: Any, seed: int) -> float:
    tokens = torch.randint(2, 60, (2, 11), generator=torch.Generator().manual_seed(seed))
    loss = model.model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer = model.optimizer_group[""].optimizer
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def serve(rank: int, folder: str, strategy: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(WORLD), "MASTER_ADDR": "localhost"}
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD
    )
    directory = f"{folder}/model"
    if rank == 0:
        write("qwen3", Path(directory))
    dist.barrier()
    fsdp2_on_cpus()
    model = made(directory, strategy)
    whole = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    theirs = tensors(whole)
    held = tensors(model.model)
    assert held.keys() == theirs.keys()
    assert all(torch.equal(held[n], theirs[n]) for n in held)
    losses = [step(model, 3) for _ in range(STEPS[strategy])]
    assert losses[0] > losses[-1], losses
    folder_of_state = f"{folder}/checkpoint"
    if rank == 0:
        Path(folder_of_state).mkdir()
    dist.barrier()
    for _ in range(2):  # the second save replaces the first
        model._save_optimizer(folder_of_state, adapter_name="")
    assert len(list(Path(folder_of_state, "optimizer.pt").glob("step-*"))) == 1
    loss, expected = step(model, 7), tensors(model.model)
    other = made(directory, strategy)
    other._load_optimizer(folder_of_state, adapter_name="", strict=True)
    assert step(other, 7) == loss
    got = tensors(other.model)
    assert all(torch.equal(got[n], expected[n]) for n in got)
    dist.barrier()
    print("\ntrained", flush=True)  # after what the engine has printed
    os._exit(0)


if __name__ == "__main__":
    torch.multiprocessing.spawn(serve, tuple(sys.argv[1:]), nprocs=WORLD)
