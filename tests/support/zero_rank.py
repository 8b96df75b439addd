"""A rank that trains and saves with the real DeepSpeed's ZeRO, on DeepSpeed's CPU accelerator.

torchrun --nproc-per-node 2 zero_rank.py FOLDER CASE...

For each case DeepSpeed saves to FOLDER/CASE after STEPS steps and, under another tag, after LATER
more. FOLDER/CASE-saved.safetensors has gathered tensors: master/NAME, exp_avg/NAME and
exp_avg_sq/NAME, which the engine holds at the first save; full/NAME, which DeepSpeed's own
conversion reads from the first save; and later/NAME, the masters after the last step.

The case "wide" is ZeRO-2 with 2 million parameters, saved once to FOLDER/wide after a step.
"""

import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu"}

import torch
import torch.distributed as dist
from torch import nn

STEPS, LATER = 3, 2
BETAS = (0.9, 0.95)
# Entries that each case adds to the common configuration, or overrides there.
CASES: dict[str, dict[str, Any]] = {
    "zero2": {"zero_optimization": {"stage": 2, "parameter_alignment": True,
                                    "round_robin_gradients": True}},
    "zero3": {"zero_optimization": {"stage": 3, "sub_group_size": 40,
                                    "stage3_param_persistence_threshold": 0}},
    "offloaded": {"zero_optimization": {
        "stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}}},
    "float32": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": False}},
}  # fmt: skip


class Cell(nn.Module):
    """A parameter whose gradient is the step's coefficients, which are exact in bfloat16."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, step: int) -> Any:
        return (self.weight.float() * coefficients(self.weight.shape, step)).sum()


def coefficients(shape: Any, step: int) -> torch.Tensor:
    index = torch.arange(shape.numel())
    return ((index * 37 + step * 11) % 17 - 8).div(8).reshape(shape)


class Small(nn.Module):
    """A model with sizes divisible and not divisible by the 2 ranks, a tie, a frozen parameter and
    buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.norm = Cell(11, 6), Cell(7, 5), Cell(7)
        self.gain, self.deep = Cell(1), Cell(3, 2, 5)
        self.frozen = Cell(5, 3)
        self.frozen.requires_grad_(False)
        self.head = Cell(11, 6)
        self.head.weight = self.embed.weight
        self.register_buffer("counts", torch.arange(6))
        self.register_buffer("scale", torch.tensor([0.5, 0.25]))

    def forward(self, step: int) -> Any:
        trained = (self.embed, self.up, self.norm, self.gain, self.deep)
        return sum(cell(step) for cell in trained)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = Cell(2048, 640), Cell(640, 1024), Cell(640)

    def forward(self, step: int) -> Any:
        return self.up(step) + self.down(step) + self.norm(step)


def small() -> Small:
    torch.manual_seed(5)
    return Small()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups of the trained parameters, as (name, parameter): matrices and vectors."""
    named = [(name, of) for name, of in model.named_parameters() if of.requires_grad]
    return [
        {"params": [of for of in named if of[1].dim() > 1], "lr": 1e-2, "weight_decay": 0.1},
        {"params": [of for of in named if of[1].dim() == 1], "lr": 3e-3, "weight_decay": 0.0},
    ]


def engine_of(case: str, model: nn.Module) -> Any:
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled
    groups = [group | {"params": [of for _, of in group["params"]]} for group in groups_of(model)]
    kind = DeepSpeedCPUAdam if case == "offloaded" else torch.optim.AdamW
    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000,
    } | CASES[case]  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=kind(groups, betas=BETAS), config=config
    )
    return engine


def held(engine: Any) -> dict[str, torch.Tensor]:
    """The gathered float32 masters and moments of the trained parameters. Collective."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        # DeepSpeed 0.19.8 links, at the step of the first group, the state of that group only.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    tensors = {}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        tensors[f"master/{name}"] = safe_get_full_fp32_param(parameter)
        for key in ("exp_avg", "exp_avg_sq"):
            tensors[f"{key}/{name}"] = safe_get_full_optimizer_state(parameter, key)
    return {key: of.detach().clone().reshape(shape_of(key)) for key, of in tensors.items()}


def shape_of(key: str) -> Any:
    return small().get_parameter(key.partition("/")[2]).shape


def pickle_stages(by_name: bool) -> None:
    """Makes pickles of `ZeroStageEnum` refer to members by name, as Python 3.11.0 to 3.11.2 do, or
    by value, as other versions do."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    ZeroStageEnum.__reduce_ex__ = lambda self, _: (
        (getattr, (type(self), self.name)) if by_name else (type(self), (self.value,))
    )


def run(case: str, folder: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from safetensors.torch import save_file

    pickle_stages(by_name=case in ("zero2", "float32"))
    engine = engine_of(case, small())

    def steps(numbers: range) -> None:
        for number in numbers:
            engine.backward(engine(number))
            engine.step()

    steps(range(STEPS))
    engine.save_checkpoint(str(folder / case), client_state={"epoch": 3})
    tensors = held(engine)
    steps(range(STEPS, STEPS + LATER))
    later = held(engine)
    engine.save_checkpoint(str(folder / case), save_latest=False)
    if dist.get_rank() == 0:
        full = get_fp32_state_dict_from_zero_checkpoint(str(folder / case))
        tensors |= {f"full/{name}": of.clone() for name, of in full.items()}
        of_later = {key: of for key, of in later.items() if key.startswith("master/")}
        tensors |= {key.replace("master", "later", 1): of for key, of in of_later.items()}
        save_file({key: of.contiguous() for key, of in tensors.items()},
                  folder / f"{case}-saved.safetensors")  # fmt: skip
    dist.barrier()


def save_wide(folder: Path) -> None:
    engine = engine_of("zero2", Wide())
    engine.backward(engine(0))
    engine.step()
    engine.save_checkpoint(str(folder / "wide"))
    dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for name in sys.argv[2:]:
        save_wide(Path(sys.argv[1])) if name == "wide" else run(name, Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)
