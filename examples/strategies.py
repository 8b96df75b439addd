"""Two strategies of FSDP2 with the same steps as twinkle: from_pretrained, an optimizer with two
parameter groups, then the wrap. *native* calls `fully_shard`, *accelerate* calls
`Accelerator.prepare`. Without `--memory-efficient-init` every rank first holds the complete model;
with it, Modicum loads each rank's shards after the wrap. Each run records the memory of its ranks
by phase; `draw` makes one HTML page with the charts of all runs.

    torchrun --nproc-per-node 4 examples/strategies.py DIRECTORY native
    torchrun --nproc-per-node 4 examples/strategies.py DIRECTORY native --memory-efficient-init
    torchrun --nproc-per-node 4 examples/strategies.py DIRECTORY accelerate
    torchrun --nproc-per-node 4 examples/strategies.py DIRECTORY accelerate --memory-efficient-init
    python examples/strategies.py DIRECTORY draw

DIRECTORY is a Hugging Face checkpoint. Modicum's lines end in `# modicum`.
"""

import argparse
import contextlib
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

import modicum.torch  # modicum
from modicum import memory  # modicum

Made = tuple[torch.nn.Module, Any]


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW over the model's parameters, with weight decay for matrices only. It is made before the
    wrap, as twinkle does."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-4)


# ---- native


def native(options: argparse.Namespace, dtype: torch.dtype, device: str) -> Made:
    with memory.phase("from_pretrained"):  # modicum
        if options.memory_efficient_init:
            config = AutoConfig.from_pretrained(options.directory)
            with modicum.torch.empty_parameters():  # modicum
                model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        else:
            model = AutoModelForCausalLM.from_pretrained(options.directory, dtype=dtype)
    with memory.phase("optimizer"):  # modicum
        optimizer = optimizer_of(model)
    with memory.phase("wrap"):  # modicum
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        with modicum.torch.rebind_parameters(model, optimizer):  # modicum
            for block in model.model.layers:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        if options.memory_efficient_init:
            modicum.torch.load(model, options.directory, budget=options.budget)  # modicum
    return model, optimizer


# ---- accelerate


def by_accelerate(options: argparse.Namespace, dtype: torch.dtype, device: str) -> Made:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate_fsdp2 import fsdp2_on_cpus  # examples/accelerate_fsdp2.py

    import modicum.torch.accelerate  # modicum

    if device == "cpu":
        fsdp2_on_cpus()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    around: Any = contextlib.nullcontext()
    if options.memory_efficient_init:
        around = modicum.torch.accelerate.loading(budget=options.budget)  # modicum
    with around:
        with memory.phase("from_pretrained"):  # modicum
            model = AutoModelForCausalLM.from_pretrained(options.directory, dtype=dtype)
        with memory.phase("optimizer"):  # modicum
            optimizer = optimizer_of(model)
        with memory.phase("wrap"):  # modicum
            model, optimizer = accelerator.prepare(model, optimizer)
    return model, optimizer


STRATEGIES = {"native": native, "accelerate": by_accelerate}


# ---- a run


def digest(model: torch.nn.Module) -> str:
    """A digest of all parameters and buffers, including non-persistent ones."""
    sha = hashlib.sha256()
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    for name in sorted(named):
        tensor = named[name].detach()
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        sha.update(f"{name} {whole.dtype}".encode())
        sha.update(whole.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return sha.hexdigest()[:16]


def train(model: torch.nn.Module, optimizer: Any, steps: int, device: str) -> list[float]:
    model.train()
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        tokens = torch.randint(model.config.vocab_size, (2, 32), generator=generator).to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def promised(options: argparse.Namespace) -> int:
    """This rank's memory at the begin of the wrap, which contains the load, plus the peak that
    `modicum plan` promises."""
    ranks = dist.get_world_size()
    plan = modicum.plan(options.directory, ranks=ranks, dtype=options.dtype)  # modicum
    (strategy,) = (one for one in plan["strategies"] if one["name"] == "own-shard")
    wrap = next(phase for phase in memory.phases() if phase.name == "wrap")  # modicum
    return wrap.begin_bytes + strategy["ranks"][dist.get_rank()]["peak_bytes"]


def run(options: argparse.Namespace, device: str) -> dict[str, Any]:
    dtype = getattr(torch, options.dtype)
    model, optimizer = STRATEGIES[options.what](options, dtype, device)
    setting = "memory_efficient_init" if options.memory_efficient_init else "as it is"
    name = f"{options.what} {setting}".replace(" ", "-")
    path = Path(options.record) / f"{name}-{{rank}}.jsonl"
    lines = {}
    if options.memory_efficient_init:
        lines = {"promise": promised(options)}  # modicum
    memory.write(path, label=f"{options.what}, {setting}", lines=lines)  # modicum
    peaks = {phase.name: phase.peak_bytes for phase in memory.phases()}  # modicum
    loaded = digest(model)
    losses = train(model, optimizer, options.steps, device)
    return {"peaks": peaks, "loaded": loaded, "losses": losses, "trained": digest(model)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("directory")
    parser.add_argument("what", choices=[*STRATEGIES, "draw"])
    parser.add_argument("--memory-efficient-init", action="store_true")
    parser.add_argument("--record", default=".", help="the folder of the recordings")
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"])
    parser.add_argument("--budget", help="host memory per node while loading, as in 8GiB")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    if options.what == "draw":
        recordings = sorted(Path(options.record).glob("*.jsonl"))
        print(memory.draw(Path(options.record) / "strategies.html", recordings))  # modicum
        return

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group()
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    done = run(options, device)
    if dist.get_rank() == 0:
        for name, peak in done["peaks"].items():
            print(f"{name}: {peak / 2**20:.0f} MiB at most")
        print(f"parameters and buffers {done['loaded']}, trained {done['trained']}")
        print(f"losses {done['losses']}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    if dist.is_torchelastic_launched():  # this process is a rank
        # A thread of Gloo may still hold a tensor, which would abort Python in its finalization.
        sys.stdout.flush()
        os._exit(0)
