"""Acts (functions that ranks run by name, see torch_rank.py) that step with
`modicum.torch.AdamW`."""

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch_front
import torch_rank
import transformers
from rounding import nearest_sqrt
from sharding import Cut, bits
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import modicum.torch
from modicum import _modicum
from modicum.torch.optim import states as optimizer_states
from modicum.torch.optim.names import listed_in
from modicum.torch.optim.parts import part_of
from modicum.torch.shards.placements import Shardings


def model_of(directory: str, mesh: list[int], dtype: str | None = None) -> Any:
    """A sharded model, loaded by Modicum."""
    model = torch_rank.built(directory, dtype, mesh)
    as_dtype = getattr(torch, dtype) if dtype else None
    modicum.torch.load(model, directory, dtype=as_dtype, progress=False)
    return model


def five_steps(directory: str, mesh: list[int], by: str) -> dict[str, Any]:
    """Five steps of an optimizer with three groups."""
    model = model_of(directory, mesh)
    make = modicum.torch.AdamW if by == "modicum" else torch.optim.AdamW
    optimizer = make(torch_rank.groups(model), lr=1e-3)
    before = torch_rank.whole_state(model)
    with nearest_sqrt():
        losses = torch_rank.steps(model, optimizer)
    after = torch_rank.whole_state(model)
    digest = optimizer.digest() if by == "modicum" else {}
    return {"before": before, "losses": losses, "after": after, "digest": digest}


def bring_gradients(model: Any, scale: float = 1.0) -> None:
    """Sets gradients that are the same for every world size, and without a process group."""
    for i, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(i)
        whole = scale * torch.randn(parameter.shape, generator=generator)
        grad = whole.to(parameter.dtype)
        if isinstance(parameter, DTensor):
            grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements)
        parameter.grad = grad


def three_steps(model: Any, state_format: str, threads: int) -> dict[str, int]:
    """The digest of the state after three steps on `threads` threads."""
    with patch.object(optimizer_states, "cpus_of_rank", lambda: threads):
        optimizer = modicum.torch.AdamW(model.named_parameters(), state_format=state_format)
    for step in range(3):
        bring_gradients(model, scale=2.0**-step)
        optimizer.step()
    return optimizer.digest()


def states(directory: str, mesh: list[int], state_format: str, threads: int) -> dict[str, int]:
    return three_steps(model_of(directory, mesh, "bfloat16"), state_format, threads)


def norm(directory: str, mesh: list[int]) -> dict[str, Any]:
    """Clips to a quarter of the gradients' norm, to the norm, and to four times the norm. Returns
    the norm by AdamW, by float64 and by torch, and the factors of the three clips."""
    model = model_of(directory, mesh)
    optimizer = modicum.torch.AdamW(model.parameters())
    bring_gradients(model)
    # Counts each element once: the same on every rank, for every sharding.
    fp64 = math.sqrt(
        math.fsum(p.grad.full_tensor().double().square().sum().item() for p in model.parameters())
    )
    factors = []
    clip_factor = _modicum.clip_factor
    _modicum.clip_factor = lambda *of: factors.append(clip_factor(*of)) or factors[-1]
    try:
        for of_norm in (0.25, 1.0, 4.0):
            got = optimizer.clip_grad_norm_(of_norm * fp64)
            optimizer.step()
    finally:
        _modicum.clip_factor = clip_factor
    by_torch = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return {
        "norm": got.item(),
        "fp64": fp64,
        "torch": by_torch.full_tensor().item(),
        "factor": factors,
        "expected_factor": [min(1.0, of * fp64 / (fp64 + 1e-6)) for of in (0.25, 1.0, 4.0)],
    }


def skip(directory: str, mesh: list[int], bad: str) -> dict[str, Any]:
    """A step in which rank 3 has a gradient with the value `bad`, which is not finite, between two
    finite steps."""
    model = model_of(directory, mesh)
    optimizer = modicum.torch.AdamW(model.parameters())
    bring_gradients(model)
    optimizer.step()
    before = optimizer.digest()
    if dist.get_rank() == 3:
        next(p for p in model.parameters() if p.to_local().numel()).grad.to_local().view(-1)[0] = (
            float(bad)
        )
    norm = optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    after, skipped = optimizer.digest(), optimizer.skipped_steps
    optimizer.zero_grad()
    bring_gradients(model)
    optimizer.step()
    return {
        "before": before,
        "after": after,
        "then": optimizer.digest(),
        "skipped": skipped,
        "norm": str(norm.item()),
    }


def checkpoint(directory: str, mesh: list[int], folder: str) -> dict[str, Any]:
    """Makes five steps, saves by DCP and makes five more. Then loads the save, into Modicum's AdamW
    and into torch's, and makes the same five steps with each."""
    model = model_of(directory, mesh)
    optimizer = modicum.torch.AdamW(model.parameters(), lr=1e-2)
    with nearest_sqrt():
        torch_rank.steps(model, optimizer)
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
        torch_rank.steps(model, optimizer)
        after = {"expected": torch_rank.whole_state(model)}
        for name, make in (("ours", modicum.torch.AdamW), ("torch", torch.optim.AdamW)):
            model = model_of(directory, mesh)
            optimizer = make(model.parameters(), lr=0.5)
            weights, state = get_state_dict(model, optimizer)
            dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
            torch_rank.steps(model, optimizer)
            after[name] = torch_rank.whole_state(model)
    return after


def tp_fsdp(directory: str, mesh: list[int], dtype: str, state_format: str) -> dict[str, Any]:
    """Three steps of a model that tensor parallelism shards first, then FSDP2. Returns this rank's
    part of every parameter and of its state, by name, and the norm of one more gradient."""
    cut, rank = Cut("tp-fsdp", tuple(mesh)), dist.get_rank()
    config = transformers.AutoConfig.from_pretrained(directory)
    as_dtype = getattr(torch, dtype)
    with modicum.torch.empty_parameters():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=as_dtype)
    torch_front.shard(model, cut)
    modicum.torch.load(model, directory, dtype=as_dtype, progress=False)
    optimizer = modicum.torch.AdamW(model.named_parameters(), lr=1e-2, state_format=state_format)

    def bring(step: int) -> None:
        for name, parameter in model.named_parameters():
            whole = torch_front.whole_gradient(name, parameter.shape, step).to(as_dtype)
            local = torch_front.local_part(name, whole, cut, rank).contiguous()
            parameter.grad = DTensor(local, parameter._spec, requires_grad=False)

    for step in range(3):
        bring(step)
        optimizer.step()
        optimizer.zero_grad()
    bring(3)
    norm = optimizer.clip_grad_norm_(math.inf).item()
    held = dict(model.named_parameters())
    for name, entry in zip(list(held), optimizer.state_dict()["state"].values(), strict=True):
        held |= {f"{name} {of}": entry[of] for of in ("exp_avg", "exp_avg_sq")}
    return {"held": {n: bits(t.to_local()) for n, t in held.items()}, "norm": norm}


def elements(mesh: list[int]) -> list[str]:
    """Describes each shard whose elements differ from those that `full_tensor` has at the indices
    that AdamW gives them."""
    grid, wrong = init_device_mesh("cpu", tuple(mesh), mesh_dim_names=("dp", "tp")), []
    for rows in (*range(1, 14), 53):
        whole = torch.arange(rows * 3.0).view(rows, 3)
        for tp in (Shard(0), Shard(1), Replicate()):
            module = torch.nn.Module()
            cut = distribute_tensor(whole, grid["tp"], [tp], src_data_rank=None)
            module.p = torch.nn.Parameter(cut)
            fully_shard(module, mesh=grid["dp"])
            (listed,) = listed_in([{"params": [("p", module.p)]}])
            part = part_of(listed, "fp32", Shardings())
            full = module.p.full_tensor().reshape(-1)
            mine = torch.cat([full[first : first + n] for first, n in part.runs] or [full[:0]])
            if not torch.equal(mine, part.local) or not torch.equal(full, whole.reshape(-1)):
                wrong.append(f"{rows} rows, {tp}, of rank {dist.get_rank()}")
    return wrong


ACTS: dict[str, Callable[..., Any]] = {
    "adamw": five_steps,
    "adamw_states": states,
    "adamw_norm": norm,
    "adamw_skip": skip,
    "adamw_checkpoint": checkpoint,
    "adamw_tp_fsdp": tp_fsdp,
    "adamw_elements": elements,
}
