"""A forked rank that holds a model and its optimizer's state, and saves them."""

import contextlib
import gc
import importlib.util
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import save_fsdp_model, save_fsdp_optimizer
from rivals.model import empty_sharded, local_of, region
from rivals.rank import Gate, report
from rivals.rank import preload as preload
from rivals.rows import Case
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files_on_every_rank,
)
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import modicum.torch
import modicum.torch.accelerate
from modicum import _modicum

Optimizer = torch.optim.Optimizer
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True)
class Saver:
    """A way to save: either `save` or `script` is set. `has_state`: it saves the optimizer's state.
    `is_durable`: it syncs its files itself. `is_readable`: `from_pretrained` can read the files."""

    save: Callable[[nn.Module, Optimizer | None, Path], dict[str, Any] | None] | None = None
    has_state: bool = False
    is_durable: bool = False
    is_readable: bool = True
    script: "Callable[[Case, Path], Script] | None" = None
    """Makes the model, the optimizer and the function that saves them, as a user's script does."""


@dataclass(frozen=True)
class Script:
    model: nn.Module
    save: Callable[[], object]


def by_modicum(model: nn.Module, optimizer: Optimizer | None, out: Path) -> dict[str, int]:
    before = _modicum.process_memory()["held_bytes"]
    saved = modicum.torch.save(model, out, step=1, optimizer=optimizer, budget="none")
    return {"promised": saved.promised_bytes, "before": before, "tensors_read": saved.read_bytes}


def by_modicum_in_the_background(
    model: nn.Module, optimizer: Optimizer | None, out: Path
) -> dict[str, Any]:
    begin = time.monotonic()
    saving = modicum.torch.async_save(model, out, step=1, optimizer=optimizer, budget="none")
    blocked = time.monotonic() - begin
    return {"blocked": blocked, "tensors_read": saving.result().read_bytes}


def by_dcp(model: nn.Module, optimizer: Optimizer | None, out: Path) -> None:
    dcp.save(_state_dict(model, optimizer), checkpoint_id=out)


def by_dcp_async(model: nn.Module, optimizer: Optimizer | None, out: Path) -> dict[str, Any]:
    begin = time.monotonic()
    future = dcp.async_save(_state_dict(model, optimizer), checkpoint_id=out)
    blocked = time.monotonic() - begin
    future.result()
    return {"blocked": blocked}


def _state_dict(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    return state


def by_hf_writer(consolidates: bool) -> Callable[[nn.Module, Optimizer | None, Path], None]:
    def save(model: nn.Module, optimizer: Optimizer | None, out: Path) -> None:
        writer = HuggingFaceStorageWriter(
            str(out),
            save_distributed=True,
            enable_consolidation=consolidates,
            thread_count_consolidation=os.cpu_count() or 1,
        )
        # Each tied tensor under one name: the writer refuses a tensor that has two.
        names = dict(model.named_parameters())
        state = get_model_state_dict(model)
        dcp.save({name: state[name] for name in names}, storage_writer=writer)

    return save


def by_torchtitan(model: nn.Module, optimizer: Optimizer | None, out: Path) -> None:
    """Makes the calls of torchtitan 0.3.0's CheckpointManager for `last_save_in_hf`, with all
    tensors in one file."""
    files = dict.fromkeys(dict(model.named_parameters()), 1)  # name -> number of its file
    writer = HuggingFaceStorageWriter(
        path=str(out / "sharded"), save_distributed=True, fqn_to_index_mapping=files,
        enable_consolidation=False,
    )  # fmt: skip
    state = get_model_state_dict(model)
    dcp.save({name: state[name] for name in files}, storage_writer=writer)
    consolidate_safetensors_files_on_every_rank(
        input_dir=str(out / "sharded"), output_dir=str(out), fqn_to_index_mapping=files,
        num_threads=5,
    )  # fmt: skip


def by_save_pretrained(model: nn.Module, optimizer: Optimizer | None, out: Path) -> None:
    whole = get_model_state_dict(model, options=WHOLE)
    state = get_optimizer_state_dict(model, optimizer, options=WHOLE) if optimizer else None
    if dist.get_rank() == 0:
        model.save_pretrained(out, state_dict=whole)
        if state is not None:
            torch.save(state, out / "optimizer.pt")


def by_accelerate(kind: str) -> Callable[[nn.Module, Optimizer | None, Path], None]:
    """Makes the calls that `Accelerator.save_state` makes for FSDP2. `Accelerator` itself cannot be
    used, since it replaces FSDP2 by DDP on CPUs."""

    def save(model: nn.Module, optimizer: Optimizer | None, out: Path) -> None:
        PartialState(cpu=True)  # accelerate's logging needs it
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
        # The only fields of an `Accelerator` that these functions read.
        here = SimpleNamespace(num_processes=dist.get_world_size(), process_index=dist.get_rank())
        save_fsdp_model(plugin, here, model, str(out))
        if optimizer is not None:
            save_fsdp_optimizer(plugin, here, optimizer, model, str(out))

    return save


def by_torch_checkpointing(model: nn.Module, optimizer: Optimizer | None, out: Path) -> None:
    from torch_checkpointing import CheckpointManager, SyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    # Without O_DIRECT: with it, version 0.1.1 fails on ext4 (EINVAL), as its lengths are unaligned.
    manager = CheckpointManager.Config(
        save=SyncCheckpointSaverConfig(),
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    ).build()
    manager.save(str(out / "step-1"), _state_dict(model, optimizer))
    manager.close()


# ---- scripts of accelerate and Trainer

_open_contexts = contextlib.ExitStack()
"""Never closed. A context to which nothing refers would be closed immediately."""


def of_script(make: Callable[[nn.Module, Path], Script], *, is_ours: bool) -> Saver:
    """A script of accelerate or Trainer. With `is_ours` Modicum's line is added to it, and the
    context of that line remains open until the process ends."""

    def script(case: Case, out: Path) -> Script:
        os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
        example("accelerate_fsdp2").fsdp2_on_cpus()
        if is_ours:
            _open_contexts.enter_context(
                modicum.torch.accelerate.loading(progress=False, budget="none")
            )
        dtype = getattr(torch, case.dtype)
        return make(AutoModelForCausalLM.from_pretrained(case.directory, dtype=dtype), out)

    return Saver(has_state=True, is_durable=is_ours, is_readable=is_ours, script=script)


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_save_state(model: nn.Module, out: Path) -> Script:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        state_dict_type="FULL_STATE_DICT",
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    step(model, optimizer)
    return Script(model, lambda: accelerator.save_state(str(out)))


def by_trainer(model: nn.Module, out: Path) -> Script:
    arguments = TrainingArguments(
        str(out), use_cpu=True, fsdp=True, max_steps=1, save_strategy="no", report_to="none",
        per_device_train_batch_size=1, disable_tqdm=True,
        fsdp_config={
            "version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "cpu_ram_efficient_loading": False, "state_dict_type": "FULL_STATE_DICT",
        },
    )  # fmt: skip
    row = torch.arange(8)
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row}] * 8)
    trainer.train()
    return Script(trainer.model, lambda: trainer._save_checkpoint(trainer.model, None))


def step(model: nn.Module, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad()


SAVERS = {
    "modicum": Saver(by_modicum, is_durable=True),
    "dcp-hf+consolidate": Saver(by_hf_writer(True)),
    "dcp-hf, shards only": Saver(by_hf_writer(False), is_readable=False),
    "full state dict": Saver(by_save_pretrained),
    "torchtitan's last_save_in_hf": Saver(by_torchtitan),
    "modicum, with state": Saver(by_modicum, has_state=True, is_durable=True),
    "modicum, background, with state": Saver(
        by_modicum_in_the_background, has_state=True, is_durable=True
    ),
    "dcp, with state": Saver(by_dcp, has_state=True, is_readable=False),
    "dcp, async, with state": Saver(by_dcp_async, has_state=True, is_readable=False),
    "full state dict, with state": Saver(by_save_pretrained, has_state=True),
    "accelerate, SHARDED, with state": Saver(
        by_accelerate("SHARDED_STATE_DICT"), has_state=True, is_readable=False
    ),
    "accelerate, FULL, with state": Saver(
        by_accelerate("FULL_STATE_DICT"), has_state=True, is_readable=False
    ),
    "torch_checkpointing, with state": Saver(
        by_torch_checkpointing, has_state=True, is_readable=False
    ),
    "save_state, with state": of_script(by_save_state, is_ours=False),
    "save_state with the line, with state": of_script(by_save_state, is_ours=True),
    "Trainer, with state": of_script(by_trainer, is_ours=False),
    "Trainer with the line, with state": of_script(by_trainer, is_ours=True),
}


def rank(rank: int, job: dict[str, Any]) -> None:
    """The body of a rank; the zygote calls this function in the forked process."""
    report(run, rank, job)


def run(rank: int, job: dict[str, Any], gate: Gate) -> None:
    case, saver, out = Case(**job["case"]), SAVERS[job["function"]], Path(job["out"])
    gc.unfreeze()
    gc.collect()
    dist.init_process_group("gloo")
    if saver.script is not None:
        script = saver.script(case, out)
        model, save = script.model, script.save
        gc.collect()
    else:
        model, optimizer = trained(case, saver, is_ours=job["function"].startswith("modicum"))
        save = partial(saver.save, model, optimizer, out)
    gate.say("ready")
    gate.wait()
    dist.barrier()
    begin, written = time.monotonic(), written_bytes()
    result = save()
    dist.barrier()
    if rank == 0 and not saver.is_durable:
        make_durable(out)
    dist.barrier()
    seconds, written = time.monotonic() - begin, written_bytes() - written
    elements = sum(parameter.numel() for parameter in model.parameters())
    facts = result if isinstance(result, dict) else {}
    gate.say("loaded", seconds=seconds, written=written, elements=elements, **facts)
    gate.wait()
    wrong = differences(case, model, out) if saver.is_readable else []
    if saver.is_durable and not any(out.rglob("COMMIT")):  # Modicum's mark of a complete checkpoint
        wrong.append("COMMIT")
    dist.barrier()
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    dist.barrier()
    if rank == 0:
        shutil.rmtree(out)
    gate.say("checked", wrong=wrong, size=size)


def trained(case: Case, saver: Saver, *, is_ours: bool) -> tuple[nn.Module, Optimizer | None]:
    """A loaded model, and an optimizer that has made one step (None for a saver without state)."""
    model = empty_sharded(case, modicum.torch.empty_parameters)
    dtype = getattr(torch, case.dtype)
    modicum.torch.load(model, case.directory, dtype=dtype, progress=False, budget="none")
    if not saver.has_state:
        return model, None
    optimizer: Optimizer
    if is_ours:
        optimizer = modicum.torch.AdamW(model.named_parameters())
    else:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step(model, optimizer)
    gc.collect()
    return model, optimizer


def written_bytes() -> int:
    """Bytes that this process has passed to write() and similar calls so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def make_durable(out: Path) -> None:
    """Syncs every file and directory of `out`, and its parent directory."""
    for path in [out, *out.rglob("*"), out.parent]:
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def differences(case: Case, model: nn.Module, out: Path) -> list[str]:
    """Names of parameters whose shard on this rank differs from the saved values, or that no file
    has."""
    saved = {}
    for path in sorted(out.rglob("*.safetensors")):
        # Files of optimizer state, and of by_torchtitan before it consolidates them, are left out.
        if path.parent.name not in ("optimizer", "sharded"):
            with safe_open(path, "pt") as file:
                saved |= dict.fromkeys(file.keys(), path)
    wrong = []
    for name, parameter in model.named_parameters():
        if name not in saved:
            wrong.append(f"{name} is missing")
            continue
        with safe_open(saved[name], "pt") as file:
            mine = file.get_slice(name)[region(case, name, parameter.shape)]
        if not torch.equal(mine, local_of(parameter)):
            wrong.append(name)
    return wrong
