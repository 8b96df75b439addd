"""Acts (functions that ranks run by name, see torch_rank.py) that check whether
`modicum.torch.AdamW` steps the parameters that the model trains."""

import contextlib
from collections.abc import Callable
from typing import Any

import accelerate_rank
import torch
import torch.distributed as dist
import torch_rank
import transformers
from rounding import nearest_sqrt

import modicum.torch
import modicum.torch.accelerate

STEPS = 5
LR = 3e-2


def losses_of(model: Any, optimizer: Any, backward: Any) -> list[float]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(model.config.vocab_size, (2, 16), generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def losses_and_refusal(body: Callable[[list[float]], None]) -> dict[str, Any]:
    """Calls `body` with a list, to which it adds the losses. Returns the losses, and the message of
    the modicum.Error that `body` raises, or ""."""
    losses: list[float] = []
    try:
        with nearest_sqrt():
            body(losses)
    except modicum.Error as error:
        return {"losses": losses, "refused": str(error)}
    return {"losses": losses, "refused": ""}


def from_pretrained(directory: str) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.train()


def prepared(directory: str, way: str, sent: bool = False) -> dict[str, Any]:
    """Trains by a script of accelerate.

    Args:
        way: "torch", "zero" (torch with lr 0), "modicum", "loading" (Modicum's AdamW within
            `loading`), or "loading, named lines" (the lines that the refusal of "modicum" names).
        sent: accelerate's `cpu_ram_efficient_loading`.
    """

    def body(losses: list[float]) -> None:
        around: Any = contextlib.nullcontext()
        if way.startswith("loading"):
            around = modicum.torch.accelerate.loading(progress=False)
        with accelerate_rank.fsdp2_on_cpus(), around:
            accelerator = accelerate_rank.accelerator_of(cpu_ram_efficient_loading=sent)
            model = from_pretrained(directory)
            if way == "loading, named lines":
                # With FSDP2 accelerate prepares a model only together with an optimizer. This one
                # is thrown away.
                model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
                made = modicum.torch.AdamW(model.named_parameters(), lr=LR)
                optimizer = accelerator.prepare_optimizer(made)
            else:
                make = torch.optim.AdamW if way in ("torch", "zero") else modicum.torch.AdamW
                made = make(model.parameters(), lr=0.0 if way == "zero" else LR)
                model, optimizer = accelerator.prepare(model, made)
            losses += losses_of(model, optimizer, accelerator.backward)

    return losses_and_refusal(body)


def by_hand(directory: str, when: str, by: str = "modicum") -> dict[str, Any]:
    """Trains with `fully_shard`.

    Args:
        when: when the optimizer is made: "after" sharding; "before" sharding; or "before, told":
            before sharding, after which its groups get the sharded parameters.
    """

    def body(losses: list[float]) -> None:
        model = from_pretrained(directory)
        make = modicum.torch.AdamW if by == "modicum" else torch.optim.AdamW
        optimizer = make(model.parameters(), lr=LR) if when != "after" else None
        torch_rank.sharded(model, [dist.get_world_size()], False)
        optimizer = optimizer or make(model.parameters(), lr=LR)
        if when == "before, told":
            optimizer.param_groups[0]["params"] = list(model.parameters())
        losses += losses_of(model, optimizer, lambda loss: loss.backward())

    return losses_and_refusal(body)


def one_rank_refuses(directory: str, what: str) -> dict[str, Any]:
    """After some steps, only the last rank refuses a call. The others must not wait for it."""
    torch.manual_seed(0)
    model = from_pretrained(directory)
    torch_rank.sharded(model, [dist.get_world_size()], False)
    optimizer = modicum.torch.AdamW(model.named_parameters(), lr=LR)
    losses_of(model, optimizer, lambda loss: loss.backward())
    saved = optimizer.state_dict()
    before = optimizer.digest()
    name, parameter = next((n, p) for n, p in model.named_parameters() if "q_proj" in n)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    model(input_ids=torch.ones(1, 4, dtype=int), labels=torch.ones(1, 4, dtype=int)).loss.backward()
    if what == "load_state_dict":
        saved["state"][0]["exp_avg_sq"] = -1 - saved["state"][0]["exp_avg_sq"].abs()
        if not is_last:
            saved = optimizer.state_dict()
    elif is_last and what == "memory":
        parameter._local_tensor.share_memory_()
    elif is_last and what == "options":
        optimizer.param_groups[0]["lr"] = -1.0
    elif is_last and what == "state":
        optimizer.state[parameter].pop("exp_avg")
    refused = ""
    try:
        optimizer.load_state_dict(saved) if what == "load_state_dict" else optimizer.step()
    except modicum.Error as error:
        refused = str(error)
    told = {"refused": refused, "name": name}
    if not is_last:
        optimizer.zero_grad()
        told["same"] = optimizer.digest() == before
    return told


def one_rank_lacks_memory(directory: str) -> dict[str, Any]:
    """Only the last rank's ledger has no room for the state. The others must not be left with an
    optimizer whose first step waits for that rank."""
    model = from_pretrained(directory)
    torch_rank.sharded(model, [dist.get_world_size()], False)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    ledger = modicum.Ledger("1KiB" if is_last else None)
    try:
        modicum.torch.AdamW(
            model.named_parameters(), lr=LR, memory=modicum.torch.MemoryPolicy(ledger=ledger)
        )
    except modicum.Error as error:
        return {"refused": str(error), "held": ledger.held_bytes}
    return {"refused": "", "held": ledger.held_bytes}


def one_rank_cannot_unfreeze(directory: str, how: str) -> dict[str, Any]:
    """Only the last rank's ledger has no room for parameters that are first trained after some
    steps.

    Args:
        how: "unfreeze": the optimizer gets these parameters at the start, frozen.
            "add_param_group": it gets them after the steps.
    """
    torch.manual_seed(0)
    model = from_pretrained(directory)
    torch_rank.sharded(model, [dist.get_world_size()], False)
    late = {name: p for name, p in model.named_parameters() if "layers.0" in name}
    for p in late.values():
        p.requires_grad_(False)
    ledger = modicum.Ledger()
    first = [p for p in model.parameters() if how == "unfreeze" or p.requires_grad]
    optimizer = modicum.torch.AdamW(first, lr=LR, memory=modicum.torch.MemoryPolicy(ledger=ledger))
    losses_of(model, optimizer, lambda loss: loss.backward())
    is_last = dist.get_rank() == dist.get_world_size() - 1
    ledger.limit_bytes = ledger.held_bytes if is_last else None
    held, before = ledger.held_bytes, optimizer.digest()
    for p in late.values():
        p.requires_grad_(True)
    refused = ""
    try:
        if how == "unfreeze":
            optimizer.step()
        else:
            optimizer.add_param_group({"params": list(late.values())})
    except modicum.Error as error:
        refused = str(error)
    ledger.limit_bytes = None
    told = {"refused": refused, "name": next(iter(late)), "same": ledger.held_bytes == held}
    if how == "add_param_group":
        told["same"] &= len(optimizer.param_groups) == 1 and optimizer.digest() == before
        optimizer.add_param_group({"params": list(late.values())})
    losses_of(model, optimizer, lambda loss: loss.backward())
    steps = {float(optimizer.state[p]["step"]) for p in late.values()}
    return told | {"steps": sorted(steps), "grew": ledger.held_bytes > held}


ACTS: dict[str, Callable[..., Any]] = {
    "binding_prepared": prepared,
    "binding_by_hand": by_hand,
    "binding_one_refuses": one_rank_refuses,
    "binding_one_lacks_memory": one_rank_lacks_memory,
    "binding_one_cannot_unfreeze": one_rank_cannot_unfreeze,
}
