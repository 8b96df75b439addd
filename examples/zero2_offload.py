"""ZeRO-2 or -3 with the optimizer in host memory: shows the memory by owner, and what forked
data-loader workers copy of it.

    python examples/zero2_offload.py --workers persistent
    python examples/zero2_offload.py --workers persistent --protect
    python examples/zero2_offload.py --workers persistent --stage 3 --offload-param
    python examples/zero2_offload.py --workers persistent --optimizer modicum:fp32

Trains a small model with DeepSpeed on its CPU accelerator (one process, or several with torchrun),
or the same model with the same data and seeds with Modicum's AdamW. At the end of each epoch it
prints the losses and a table of bytes per parameter. Lines that call Modicum end in `# modicum`.
"""

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import modicum.torch  # modicum
from modicum import memory  # modicum

Step = Callable[[torch.Tensor], None]

BATCH = 16
LAYERS = 6
ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}


class Vectors(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Pairs of an input vector and its target, computed from the index."""

    def __init__(self, count: int, width: int) -> None:
        self.count, self.width = count, width

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.randn(self.width, generator=torch.Generator().manual_seed(index))
        return values.bfloat16(), values.roll(1).tanh().bfloat16()


def model_of(width: int) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(width, width, bias=False), nn.GELU()]
    return nn.Sequential(*layers[:-1]).bfloat16()


def loader_of(options: argparse.Namespace) -> DataLoader[Any]:
    data = Vectors(options.steps * BATCH, options.width)
    if options.workers == "none":
        return DataLoader(data, BATCH)
    return DataLoader(
        data,
        BATCH,
        num_workers=2,
        persistent_workers=options.workers == "persistent",
        multiprocessing_context="fork",  # the default before Python 3.14
    )


# ---- the two ways to step


def deepspeed_here() -> Any:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    # No collectives through shared memory: they take a minute to compile, and gloo is fast enough.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def with_deepspeed(model: nn.Module, options: argparse.Namespace) -> tuple[Any, Any, Step]:
    """(sources to attribute, forward function, function that makes a step from a loss)."""
    zero: dict[str, Any] = {
        "stage": options.stage,
        "reduce_bucket_size": 2_000_000,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
    }
    if options.stage == 3:
        zero |= {"stage3_prefetch_bucket_size": 2_000_000, "stage3_param_persistence_threshold": 0}
    if options.offload_param:
        zero["offload_param"] = {"device": "cpu", "pin_memory": False}
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "bf16": {"enabled": True},
        "gradient_clipping": options.clip,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": zero,
        "steps_per_print": 1_000_000,
    }
    engine, *_ = deepspeed_here().initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    if options.protect:
        protection = modicum.torch.protect(engine)  # modicum
        if dist.get_rank() == 0:
            print(protection)

    def step(loss: torch.Tensor) -> None:
        engine.backward(loss)
        engine.step()

    return engine, engine, step


def with_modicum(model: nn.Module, options: argparse.Namespace) -> tuple[Any, Any, Step]:
    optimizer = modicum.torch.AdamW(  # modicum
        model.named_parameters(),
        state_format=options.optimizer.partition(":")[2],
        semantics="deepspeed",
        **ADAM,
    )

    if options.protect:  # only the weights: AdamW's own memory is excluded from forks already
        protection = modicum.torch.protect(dict(model.named_parameters()))  # modicum
        if dist.get_rank() == 0:
            print(protection)

    def step(loss: torch.Tensor) -> None:
        loss.backward()
        if options.clip:
            optimizer.clip_grad_norm_(options.clip)
        optimizer.step()
        optimizer.zero_grad()

    return [optimizer, model], model, step


# ---- training


def train(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the losses and the memory by owner at the end of each epoch, while the epoch's workers
    are alive."""
    ours = options.optimizer.startswith("modicum")
    if not ours:
        deepspeed_here()
    before = memory.held()  # modicum
    model = model_of(options.width)
    held, forward, step = (with_modicum if ours else with_deepspeed)(model, options)
    loader = loader_of(options)
    for epoch in range(options.epochs):
        losses = []
        for index, (inputs, targets) in enumerate(loader):
            with memory.phase(f"step {epoch}.{index}"):  # modicum
                loss = nn.functional.mse_loss(forward(inputs).float(), targets.float())
                step(loss)
            losses.append(loss.item())
            del loss
            if index + 1 == len(loader):
                who = memory.attribute(held, baseline=before)  # modicum
                yield {"epoch": epoch + 1, "losses": losses, "attribution": who}


def join_group() -> None:
    """Joins torchrun's process group, or makes one of a single process."""
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_SIZE": 1}.items():
        os.environ.setdefault(name, str(value))
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--workers", default="none", choices=["none", "persistent", "default"],
        help="none, two for all epochs (persistent), or two new ones for each epoch (default)",
    )  # fmt: skip
    parser.add_argument(
        "--protect", action="store_true", help="exclude the memory that steps write from forks"
    )
    parser.add_argument("--optimizer", default="deepspeed", help="deepspeed, or modicum:FORMAT")
    parser.add_argument("--stage", type=int, default=2, choices=[2, 3], help="of DeepSpeed's ZeRO")
    parser.add_argument("--offload-param", action="store_true", help="ZeRO-3's weights on the host")
    parser.add_argument("--width", type=int, default=2048, help="parameters are 6 x width x width")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="per epoch")
    parser.add_argument(
        "--clip", type=float, default=1.0, help="largest norm of the gradients; 0: no clipping"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON document per epoch")
    parser.add_argument("--picture", help="an HTML page of each step's memory")
    return parser.parse_args(words)


def main() -> None:
    options = parsed()
    warnings.filterwarnings("ignore")
    join_group()
    for epoch in train(options):
        if dist.get_rank() != 0:
            continue
        if options.json:
            print(json.dumps(epoch | {"attribution": epoch["attribution"].document}))
        else:
            losses = " ".join(f"{loss:.6f}" for loss in epoch["losses"])
            print(f"\nepoch {epoch['epoch']}: losses {losses}\n{epoch['attribution']}")
    if options.picture:
        memory.draw(options.picture)  # modicum
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # A thread of Gloo may still hold a tensor, which would abort Python in its finalization.
    sys.stdout.flush()
    os._exit(0)
