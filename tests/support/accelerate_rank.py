"""Acts (functions that ranks run by name, see torch_rank.py) that run accelerate or Trainer, with
or without `modicum.torch.accelerate.loading` around them."""

import contextlib
import ctypes
import gc
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from nested_options import nested
from ranks import example
from sharding import fsdp_groups

import modicum.torch.accelerate

STEPS = 2
M_MMAP_THRESHOLD = -3  # of malloc.h


@contextlib.contextmanager
def fsdp2_on_cpus() -> Iterator[Any]:
    """Makes accelerate use FSDP2 on CPUs, as examples/accelerate_fsdp2.py does. Resets accelerate's
    global state at both ends of the context. Yields the example's module."""
    from accelerate.state import AcceleratorState, GradientState

    module = example("accelerate_fsdp2")
    env, init = dict(os.environ), AcceleratorState.__init__
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
    os.environ |= {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    try:
        module.fsdp2_on_cpus()
        yield module
    finally:
        AcceleratorState.__init__ = init
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(env)


def accelerator_of(
    mixed_precision: str = "no", replicas: int = 1, offload: bool = False, **plugin: Any
) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
    from torch.distributed.fsdp import CPUOffloadPolicy

    plugin = {"auto_wrap_policy": "transformer_based_wrap"} | plugin
    if offload:
        plugin["cpu_offload"] = CPUOffloadPolicy(pin_memory=False)
    mesh = None
    if replicas > 1:
        shards = dist.get_world_size() // replicas
        mesh = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=shards)
    return Accelerator(
        mixed_precision=mixed_precision,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **plugin),
        parallelism_config=mesh,
    )


def groups_of(model: Any) -> list[dict[str, Any]]:
    """Up to three parameter groups, each with its parameters in the reverse of the model's order.
    Freezes one norm, which is in no group."""
    named = dict(model.named_parameters())
    frozen = next(n for n in named if "norm" in n or "ln_" in n)
    named.pop(frozen).requires_grad_(False)
    kinds: dict[str, list[Any]] = {"matrices": [], "vectors": [], "embeddings": []}
    for name, p in reversed(named.items()):
        embeds = re.search(r"embed|lm_head|wte|wpe", name)
        kinds["embeddings" if embeds else "vectors" if p.dim() < 2 else "matrices"].append(p)
    rates = {"matrices": 1e-3, "vectors": 3e-3, "embeddings": 2e-3}
    return [{"params": kinds[kind], "lr": rate} for kind, rate in rates.items() if kinds[kind]]


def with_adapters(model: Any, seed: int | None = None, **config: Any) -> Any:
    import peft

    if seed is not None:
        torch.manual_seed(seed)
    wanted = {"r": 3, "target_modules": ["q_proj", "down_proj"]} | config
    return peft.get_peft_model(model, peft.LoraConfig(**wanted))


def accelerated(
    directory: str,
    by: str,
    dtype: str | None = "bfloat16",
    cls: str = "AutoModelForCausalLM",
    grouped: bool = False,
    adapters: dict[str, Any] | None = None,
    checkpointing: bool = False,
    order: str = "model optimizer",
    options: dict[str, Any] | None = None,
    **how: Any,
) -> dict[str, Any]:
    """Makes two steps of torch's AdamW. Returns what the tests compare between two runs: units,
    groups, the state before and after the steps, and the numbers of each step.

    Args:
        by: "modicum": within `loading`; else without it.
        order: the arguments of `prepare`, in their order.
        options: arguments of `loading`.
        how: arguments of `accelerator_of`.
    """
    if adapters is not None:
        import peft  # noqa: F401  (loading() checks for it when the model is built)
    torch.manual_seed(dist.get_rank())
    around: Any = contextlib.nullcontext()
    if by == "modicum":
        around = modicum.torch.accelerate.loading(
            progress=False, **nested(options or {}, "rules", "memory")
        )
    with fsdp2_on_cpus(), around as loading:
        accelerator = accelerator_of(activation_checkpointing=checkpointing, **how)
        kind = getattr(transformers, cls)
        as_dtype = getattr(torch, dtype) if dtype else "auto"
        config = transformers.AutoConfig.from_pretrained(directory)
        # On CPUs the default implementation of experts supports only even sizes.
        is_mixture = hasattr(config, "num_experts_per_tok")
        experts = {"experts_implementation": "eager"} if is_mixture else {}
        model = kind.from_pretrained(directory, dtype=as_dtype, **experts)
        if adapters is not None:
            model = with_adapters(model, **adapters)
        model.train()
        optimizer = torch.optim.AdamW(groups_of(model) if grouped else model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=STEPS)
        made = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        words = order.split()
        made |= zip(words, accelerator.prepare(*(made[word] for word in words)), strict=True)
        model, optimizer = made["model"], made["optimizer"]
        told = {"units": units(model), "bound": bound(model, optimizer), "before": state(model)}
        told["numbers"] = steps(accelerator, model, optimizer, scheduler)
        told["after"] = state(model)
        if loading is not None:
            told["report"] = loading.report.document
    return told


def steps(accelerator: Any, model: Any, optimizer: Any, scheduler: Any) -> list[tuple[str, ...]]:
    """The loss, the gradients' norm and the groups' learning rates of each step, in hexadecimal,
    which shows all bits."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    vocabulary = model.config.get_text_config().vocab_size
    numbers = []
    for _ in range(STEPS):
        tokens = torch.randint(vocabulary, (1, 12), generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        rates = [group["lr"] for group in optimizer.param_groups]
        numbers.append((loss.item().hex(), whole.item().hex(), *map(float.hex, rates)))
    return numbers


def state(model: Any) -> dict[str, str]:
    """Digests of gathered parameters, with their `requires_grad` and placements, and of buffers."""
    import torch_rank  # which imports this module

    told = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        value = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        told[name] = f"{torch_rank.told(value)} {parameter.requires_grad} {placed(parameter)}"
    return told | {name: torch_rank.told(buffer) for name, buffer in model.named_buffers()}


def placed(parameter: Any) -> str:
    return str(getattr(parameter, "placements", "")) + str(parameter.device)


def units(model: Any) -> list[tuple[str, list[str]]]:
    """FSDP2's units in order: the module's name; its parameters with their dtypes, and at the end
    whether the unit reshards after a forward."""
    from torch.distributed.fsdp import FSDPModule

    found = []
    names = {p: name for name, p in model.named_parameters()}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            for group in fsdp_groups(module):
                mine = [p.sharded_param for p in group.fsdp_params]
                told = [f"{names[p]} {p.dtype}" for p in mine]
                found.append((name, [*told, str(group._reshard_after_forward)]))
    return found


def bound(model: Any, optimizer: Any) -> list[list[str]]:
    """The names of the parameters in each of the optimizer's groups."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


# ---- the complete example


def script(cage: str, words: list[str]) -> None:
    """Runs examples/accelerate_fsdp2.py unchanged in a memory cgroup. `cage` is the path of the
    cgroup's cgroup.procs. The output is in the rank's log."""
    Path(cage).write_text(str(os.getpid()))
    # With this threshold glibc unmaps the buffers of all-gathers when they are freed. Else they
    # would count as held.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 18)
    # Without this a garbage collection would write to every object from before the fork, and so
    # copy 50 MiB of pages.
    gc.freeze()
    with fsdp2_on_cpus() as module:
        sys.argv = [module.__file__, *words]
        module.main()


ACTS: dict[str, Callable[..., Any]] = {"accelerated": accelerated, "accelerate_script": script}
