"""Fine-tunes a causal language model with FSDP2. Modicum's lines end in `# modicum`.

    torchrun --nproc-per-node 4 examples/finetune_fsdp2.py DIRECTORY --budget 8GiB

DIRECTORY is a Hugging Face checkpoint (config.json and safetensors). Runs on CPUs and GPUs.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

import modicum.torch  # modicum


def sharded_model(directory: str, dtype: torch.dtype, device: str) -> torch.nn.Module:
    config = AutoConfig.from_pretrained(directory)
    with modicum.torch.empty_parameters():  # modicum
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(model: torch.nn.Module, steps: int, device: str) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(steps):
        tokens = torch.randint(model.config.vocab_size, (2, 32), generator=generator).to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {mean.item() / dist.get_world_size():.6f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--budget", help="host memory per node, as in 8GiB")
    parser.add_argument(
        "--check", action="store_true", help="compare every loaded value with the files"
    )
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group()
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    model = sharded_model(options.directory, getattr(torch, options.dtype), device)
    report = modicum.torch.load(  # modicum
        model,  # modicum
        options.directory,  # modicum
        dtype=getattr(torch, options.dtype),  # modicum
        budget=options.budget,  # modicum
        check=options.check,  # modicum
    )  # modicum
    report.print()  # modicum
    train(model, options.steps, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # A thread of Gloo may still hold a tensor, which would abort Python in its finalization.
    sys.stdout.flush()
    os._exit(0)
