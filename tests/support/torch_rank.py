"""Acts: functions that a rank of `ranks.py` runs by name. `ACTS` at the end has the name of each,
including those of the modules that are imported there."""

import contextlib
import gc
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from nested_options import nested
from ranks import example, failed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

# Imported here for the fork server; otherwise each rank would import them at their first use.
from transformers.models.llama import modeling_llama  # noqa: F401
from transformers.models.mixtral import modeling_mixtral  # noqa: F401
from transformers.models.qwen3 import modeling_qwen3  # noqa: F401
from transformers.models.qwen3_moe import modeling_qwen3_moe  # noqa: F401

import modicum.torch
from modicum.torch.ranks import group

with contextlib.suppress(ImportError):
    import accelerate  # noqa: F401

transformers.utils.logging.disable_progress_bar()

STEPS = 5
CONNECT_LIMIT = timedelta(seconds=120)

folder = Path()
"""Of the world, for marks."""


def join(rank: int, world: int, place: Path) -> None:
    """Joins the process group, as under torchrun. Rank 0 has the store."""
    global folder
    folder = place
    port = folder / "port"
    if rank == 0:
        store = dist.TCPStore("localhost", 0, world, True, CONNECT_LIMIT, wait_for_workers=False)
        (folder / "port.new").write_text(str(store.port))
        (folder / "port.new").rename(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        store = dist.TCPStore("localhost", int(port.read_text()), world, False, CONNECT_LIMIT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def greet() -> int:
    """A barrier: returns this process's pid once all ranks have joined."""
    dist.barrier()
    return os.getpid()


# ---- models


def built(
    directory: str, dtype: str | None, mesh: list[int], by: str = "modicum", masters: bool = False
) -> Any:
    """A sharded causal language model.

    Args:
        by: "modicum": on meta. "torch": loaded by `from_pretrained` before it is sharded.
            "to_empty": with uninitialised memory, filled with NaN.
        masters: whether FSDP2 casts the parameters to bfloat16 and reduces gradients in float32.
    """
    as_dtype = getattr(torch, dtype) if dtype else "auto"
    kind = transformers.AutoModelForCausalLM
    # On CPUs the default implementation of experts supports only even sizes.
    config = transformers.AutoConfig.from_pretrained(directory, experts_implementation="eager")
    if by == "torch":
        model = kind.from_pretrained(directory, config=config, dtype=as_dtype)
    elif by == "to_empty":
        with torch.device("meta"):
            model = kind.from_config(config, dtype=config.dtype if dtype is None else as_dtype)
        torch.use_deterministic_algorithms(True)  # fills uninitialised memory with NaN
        model = sharded(model.train(), mesh, masters).to_empty(device="cpu")
        torch.use_deterministic_algorithms(False)
        return model
    else:
        with modicum.torch.empty_parameters():
            model = kind.from_config(config, dtype=config.dtype if dtype is None else as_dtype)
    return sharded(model.train(), mesh, masters)


def sharded(model: Any, mesh: list[int], masters: bool = False) -> Any:
    """Shards each layer as a unit, and the rest; the first of two mesh axes replicates."""
    names = ("replica", "shard")[-len(mesh) :]
    arguments: dict[str, Any] = {"mesh": init_device_mesh("cpu", tuple(mesh), mesh_dim_names=names)}
    if masters:
        arguments["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, **arguments)
    return fully_shard(model, **arguments)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def told(tensor: torch.Tensor) -> str:
    """Dtype, shape and a digest of the bits."""
    digest = hashlib.sha256(bits(tensor)).hexdigest()[:16]
    return f"{tensor.dtype} {list(tensor.shape)} {digest}"


def local_state(model: Any) -> dict[str, str]:
    """Digests of this rank's shards and buffers, by FQN."""
    state = model.state_dict()
    return {n: told(t.to_local() if isinstance(t, DTensor) else t) for n, t in state.items()}


def whole_state(model: Any) -> dict[str, str]:
    """Digests of the gathered tensors, by FQN."""
    state = model.state_dict()
    return {n: told(t.full_tensor() if isinstance(t, DTensor) else t) for n, t in state.items()}


# ---- training


def groups(model: Any) -> list[dict[str, Any]]:
    """Three groups with different options, in another order than the model's; one norm is
    frozen."""
    named = dict(model.named_parameters())
    frozen = "model.layers.0.input_layernorm.weight"
    named.pop(frozen)
    model.get_parameter(frozen).requires_grad_(False)
    norms = [p for n, p in named.items() if "norm" in n]
    embeddings = [p for n, p in named.items() if "embed" in n or "lm_head" in n]
    rest = [p for n, p in named.items() if "norm" not in n and "embed" not in n and "lm_h" not in n]
    return [
        {"params": rest[::-1], "weight_decay": 0.1},
        {"params": norms, "weight_decay": 0.0, "lr": 3e-3},
        {"params": embeddings, "lr": 2e-3},
    ]


def train(
    directory: str,
    by: str,
    mesh: list[int],
    dtype: str | None = None,
    optimizer: str = "after",
    masters: bool = False,
) -> dict[str, Any]:
    """Five steps of AdamW.

    Args:
        by: "modicum"; "to_empty": a load by Modicum into memory with values; or "torch":
            `from_pretrained` on every rank.
        optimizer: when it is made: "before": before sharding, within `rebind_parameters`;
            "between": between
            sharding and the load; "after": after the load.
    """
    made = None
    if by == "torch":
        model = built(directory, dtype, mesh, by, masters)
    elif optimizer == "before":
        config = transformers.AutoConfig.from_pretrained(directory, experts_implementation="eager")
        with modicum.torch.empty_parameters():
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, dtype) if dtype else config.dtype
            ).train()
        made = torch.optim.AdamW(groups(model), lr=1e-3)
        with modicum.torch.rebind_parameters(model, made):
            sharded(model, mesh, masters)
    else:
        model = built(directory, dtype, mesh, by, masters)
    if by != "torch":
        if optimizer == "between":
            made = torch.optim.AdamW(groups(model), lr=1e-3)
        modicum.torch.load(
            model, directory, dtype=getattr(torch, dtype) if dtype else None, progress=False
        )
    before = whole_state(model)
    made = made or torch.optim.AdamW(groups(model), lr=1e-3)
    losses = steps(model, made)
    return {"before": before, "losses": losses, "after": whole_state(model)}


def steps(model: Any, optimizer: Any) -> list[str]:
    """The losses of this rank's batches, in hexadecimal, which shows all bits."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(model.config.vocab_size, (2, 16), generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


# ---- one load


def loaded(
    directory: str,
    mesh: list[int],
    by: str = "modicum",
    dtype: str | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """This rank's shards, the bytes that it read, and the report."""
    model = built(directory, dtype, mesh, by)
    if by == "torch":
        return {"state": local_state(model)}
    before = read_bytes()
    report = modicum.torch.load(
        model,
        directory,
        dtype=getattr(torch, dtype) if dtype else None,
        progress=False,
        **nested(arguments, "rules", "memory"),
    )
    read = read_bytes() - before
    return {"state": local_state(model), "read_bytes": read, "report": report.document}


def read_bytes() -> int:
    """Bytes that this process has read so far, by the kernel's count."""
    lines = Path("/proc/self/io").read_text().split()
    return int(lines[lines.index("rchar:") + 1])


# ---- loads that fail


def tried(
    directory: str,
    source: str,
    mesh: list[int],
    dtype: str | None = None,
    pause_s: float = 0,
    truncate: str | None = None,
    again: bool = True,
    **arguments: Any,
) -> dict[str, Any]:
    """A load from `source` that may fail and, if it does, a load from `directory` that must not.
    Returns the failure, whether the first load left the model on meta, and the final shards.

    Args:
        pause_s: sleep after all ranks have agreed on the plan, before this rank reads data.
        truncate: a file to truncate at that time.
        again: whether a failed load is followed by the second one.
    """
    model = built(directory, None, mesh)
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    as_dtype = getattr(torch, dtype, dtype) if dtype else None

    def when_agreed() -> None:
        (folder / f"begun-{dist.get_rank()}").touch()
        if truncate is not None:
            os.truncate(truncate, os.path.getsize(truncate) // 2)
        time.sleep(pause_s)

    failure, begin, before = None, time.monotonic(), read_bytes()
    try:
        with once_agreed(when_agreed):
            modicum.torch.load(
                model,
                source,
                dtype=as_dtype,
                progress=False,
                **nested(arguments, "rules", "memory"),
            )
    except (Exception, KeyboardInterrupt) as error:
        failure = failed(error, time.monotonic() - begin)
    made: dict[str, Any] = {"failure": failure, "read_bytes": read_bytes() - before}
    made["took_s"] = time.monotonic() - begin
    made["on_meta"] = all(p.is_meta for p in model.parameters()) and shapes == {
        n: tuple(p.shape) for n, p in model.named_parameters()
    }
    if again and failure is not None:
        modicum.torch.load(model, directory, progress=False)
    made["state"] = local_state(model) if again or failure is None else None
    return made


@contextlib.contextmanager
def once_agreed(call: Callable[[], None]) -> Iterator[None]:
    """Makes the call once, when all ranks have first agreed on the inputs of a load, before any
    data is read."""
    agree = group.Ranks.agree
    is_called = False

    def agree_and_call(self: group.Ranks, digest: str, facts: Any = ()) -> None:
        nonlocal is_called
        agree(self, digest, facts)
        if not is_called:
            is_called = True
            call()

    group.Ranks.agree = agree_and_call
    try:
        yield
    finally:
        group.Ranks.agree = agree


# ---- memory


def held_bytes(*names: str) -> int:
    """The sum of the lines of /proc/self/status with these names, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) for name in names) * 1024


def measured(
    directory: str, mesh: list[int], by: str, dtype: str | None = None, **arguments: Any
) -> dict[str, Any]:
    """The growth of this process's anonymous and shared memory, at the peak and at the end, from
    the kernel's counters.

    `by` "torch" is the naive loader: every rank loads the whole model, then shards it.
    """
    model = None if by == "torch" else built(directory, dtype, mesh)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins here
    before = held_bytes("RssAnon", "RssShmem")
    report = None
    if by == "torch":
        model = built(directory, dtype, mesh, by)
    else:
        as_dtype = getattr(torch, dtype) if dtype else None
        report = modicum.torch.load(
            model, directory, dtype=as_dtype, progress=False, **nested(arguments, "rules", "memory")
        )
    now, fallen = held_bytes("RssAnon", "RssShmem"), held_bytes("VmHWM") - held_bytes("VmRSS")
    answer: dict[str, Any] = {"grown_bytes": now + fallen - before, "kept_bytes": now - before}
    answer["local_bytes"] = sum(p.to_local().nbytes for p in model.parameters())
    if report is not None:
        answer["report"] = report.document
    return answer


# ---- more


def write(directory: str, family: str, **changes: Any) -> None:
    """Rank 0 writes a tiny model in three files, in the format of the hub."""
    import families

    if dist.get_rank() != 0:
        return
    (one,) = [one for one in families.FAMILIES if one.name == family]
    config = one.config | changes.pop("config", {})
    one = replace(one, config=config, **changes)
    one.write(one.build(), Path(directory))


def trained_by_example(directory: str, mesh: list[int], dtype: str, steps: int) -> None:
    """Trains a model that torch has loaded, by `train` of examples/finetune_fsdp2.py, which prints
    the losses."""
    model = built(directory, dtype, mesh, "torch")
    example("finetune_fsdp2").train(model, steps, "cpu")


ACTS: dict[str, Callable[..., Any]] = {
    "greet": greet,
    "train": train,
    "loaded": loaded,
    "tried": tried,
    "measured": measured,
    "write": write,
    "example": trained_by_example,
}

# At the end, since these modules import this one.
import accelerate_rank  # noqa: E402
import adamw_binding_rank  # noqa: E402
import adamw_rank  # noqa: E402
import background_memory  # noqa: E402
import background_rank  # noqa: E402
import background_states_rank  # noqa: E402
import checkpoint_rank  # noqa: E402
import dcp_rank  # noqa: E402
import dtensor_rank  # noqa: E402
import engine_rank  # noqa: E402
import hand_over_rank  # noqa: E402
import job_rank  # noqa: E402
import optimizer_rank  # noqa: E402
import preemption_rank  # noqa: E402
import saving_rank  # noqa: E402
import which_way_rank  # noqa: E402

ACTS |= adamw_binding_rank.ACTS | adamw_rank.ACTS | accelerate_rank.ACTS | engine_rank.ACTS
ACTS |= optimizer_rank.ACTS | saving_rank.ACTS | checkpoint_rank.ACTS | dcp_rank.ACTS
ACTS |= which_way_rank.ACTS | background_rank.ACTS | background_memory.ACTS | job_rank.ACTS
ACTS |= dtensor_rank.ACTS | background_states_rank.ACTS | hand_over_rank.ACTS
ACTS |= preemption_rank.ACTS
