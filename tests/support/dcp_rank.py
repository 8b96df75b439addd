"""Acts (functions that ranks run by name, see torch_rank.py) that save and load by
torch.distributed.checkpoint through Modicum."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from saving_rank import STEPS_AFTER, made, steps, whole
from sharding import Cut
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import modicum.torch
from modicum import _modicum
from modicum.torch import LoadRules
from modicum.torch.dcp import ModicumReader, ModicumWriter


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
        "epoch": 3,
        "seen": {"tokens": 1.5, "names": ["a", "b"]},
    }


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def flat_state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    """A state dict as torchtitan makes it: tensors at the top, and bytes under a key of each
    rank."""
    return get_model_state_dict(model) | {
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
        "dataloader": {f"dp_rank_{dist.get_rank()}": b"\0 of %d" % dist.get_rank(), "world": 2},
        "train_state": {"step": 2},
    }


def trained(directory: str, cut: Cut) -> tuple[Any, Any]:
    """A loaded model and its optimizer, after two steps. No parameter is frozen, since
    get_optimizer_state_dict needs an optimizer state for each parameter."""
    model, _ = made(directory, cut, "adamw", "float32")
    model.get_parameter("model.norm.weight").requires_grad_(True)
    modicum.torch.load(model, directory, progress=False)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.5}]
    stepping = torch.optim.AdamW(groups, lr=1e-2)
    steps(model, stepping, cut, range(2))
    return model, stepping


def dcp_saves(directory: str, root: str, cut: Cut, plain: bool = False) -> dict[str, Any]:
    """Saves by DCP, and trains on. `plain`: the writer gets neither model nor optimizer."""
    model, stepping = trained(directory, cut)
    known = {} if plain else {"model": model, "optimizer": stepping}
    writer = ModicumWriter(root, step=2, **known)
    dcp.save(state_of(model, stepping), storage_writer=writer)
    saved = whole(model, stepping)
    steps(model, stepping, cut, range(2, 2 + STEPS_AFTER))
    return {"path": writer.path, "saved": saved, "end": whole(model, stepping)}


def dcp_loads(directory: str, root: str, cut: Cut, plain: bool = False) -> dict[str, Any]:
    """Loads by DCP into a model and optimizer that have trained on, and trains on from there. Also
    returns the loaded entries that are neither the model's nor the optimizer's."""
    model, stepping = trained(directory, cut)
    steps(model, stepping, cut, range(7, 9))
    stepping.param_groups[0]["lr"] = 1.0
    state = state_of(model, stepping)
    state |= {"epoch": 0, "seen": {"tokens": 0.0, "names": []}}
    dcp.load(state, storage_reader=ModicumReader(root, None if plain else model))
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, stepping, state["optim"])
    before = whole(model, stepping)
    steps(model, stepping, cut, range(2, 2 + STEPS_AFTER))
    values = {key: of for key, of in state.items() if key not in ("model", "optim")}
    return {"before": before, "end": whole(model, stepping), "values": values}


def dcp_error(directory: str, step: str, cut: Cut, reader: str) -> str:
    """The text of the error of a load of a checkpoint, "" if there is none."""
    model, stepping = trained(directory, cut)
    state: dict[str, Any] = get_model_state_dict(model)
    rules = LoadRules()  # the Hugging Face files
    if reader == "saved":
        state, rules = state_of(model, stepping), None
    try:
        dcp.load(state, storage_reader=ModicumReader(step, model, rules=rules))
    except dcp.CheckpointException as error:
        return str(error)
    return ""


def dcp_saves_flat(directory: str, root: str, cut: Cut) -> dict[str, Any]:
    model, stepping = trained(directory, cut)
    dcp.save(flat_state_of(model, stepping), storage_writer=ModicumWriter(root, step=2))
    saved = whole(model, stepping)
    steps(model, stepping, cut, range(2, 2 + STEPS_AFTER))
    return {"saved": saved, "end": whole(model, stepping)}


def dcp_loads_flat(directory: str, root: str, cut: Cut) -> dict[str, Any]:
    model, stepping = trained(directory, cut)
    steps(model, stepping, cut, range(7, 9))
    stepping.param_groups[0]["lr"] = 1.0
    state = flat_state_of(model, stepping)
    state["dataloader"] = dict.fromkeys(state["dataloader"], b"")
    state["train_state"] = {"step": 0}
    dcp.load(state, storage_reader=ModicumReader(root))
    loader, told = state.pop("dataloader"), state.pop("train_state")
    set_optimizer_state_dict(model, stepping, state.pop("optimizer"), options=FLAT)
    set_model_state_dict(model, state)
    before = whole(model, stepping)
    steps(model, stepping, cut, range(2, 2 + STEPS_AFTER))
    return {"before": before, "end": whole(model, stepping), "loader": loader, "step": told["step"]}


def dcp_resumes(directory: str, root: str, cut: Cut) -> dict[str, Any]:
    """Resumes by `modicum.torch.resume` from a checkpoint that DCP has saved."""
    model, stepping = trained(directory, cut)
    report = modicum.torch.resume(model, root, optimizer=stepping, progress=False)
    before = whole(model, stepping)
    steps(model, stepping, cut, range(2, 2 + STEPS_AFTER))
    return {"before": before, "end": whole(model, stepping), "step": report.step}


def dcp_loads_apart(directory: str, root: str, cut: Cut) -> dict[str, Any]:
    """Saves three steps, the last with another key. Rank 0 chooses step 1; rank 1 chooses step 2,
    then step 3. Returns the weights of step 1, those loaded, the loaded epoch, and the error."""
    model, stepping = trained(directory, cut)

    def weights() -> dict[str, str]:
        return {name: of for name, of in whole(model, stepping).items() if " " not in name}

    saved = weights()
    for step in (1, 2, 3):
        state = {"model": get_model_state_dict(model), "epoch": step}
        state |= {"more": 0} if step == 3 else {}
        dcp.save(state, storage_writer=ModicumWriter(root, step=step, model=model))
        steps(model, stepping, cut, [step])
    state = {"model": get_model_state_dict(model), "epoch": 0}
    chosen = [f"{root}/step-{1 if dist.get_rank() == 0 else other}" for other in (2, 3)]
    dcp.load(state, storage_reader=ModicumReader(chosen[0], model))
    told = {"saved": saved, "loaded": weights(), "epoch": state["epoch"], "error": ""}
    try:
        dcp.load(state, storage_reader=ModicumReader(chosen[1], model))
    except BaseException as error:  # DCP's CheckpointException does not derive from Exception
        told["error"] = str(error)
    return told


def on_a_thread(state: dict[str, Any], **how: Any) -> None:
    """`dcp.save` on a thread of this program."""
    with ThreadPoolExecutor(thread_name_prefix="own") as threads:
        threads.submit(dcp.save, state, **how).result()


def dcp_fails(directory: str, root: str, cut: Cut, how: str) -> str:
    """Makes a save that must fail on every rank. Returns the message."""
    model, stepping = trained(directory, cut)
    state = state_of(model, stepping)
    writer = ModicumWriter(root, step=2, model=model)
    write, save = _modicum.SaveParts.write, dcp.save
    if how == "disk" and dist.get_rank() == 1:

        def full(*arguments: Any, **more: Any) -> Any:
            raise OSError("no disk here")

        _modicum.SaveParts.write = full
    if how == "async":
        save = dcp.async_save
    if how == "thread":
        save = on_a_thread
    if how == "value":
        state["rng"] = {"state": object()}
    if how == "models":
        state["ema"] = dict(state["model"])
    if how == "ranks":
        state["epoch"] = dist.get_rank()
    if how == "adamw":
        stepping = modicum.torch.AdamW(model.named_parameters(), lr=1e-2)
    try:
        if how == "adamw":
            writer = ModicumWriter(root, step=2, model=model, optimizer=stepping)
        save(state, storage_writer=writer)
    except BaseException as error:  # DCP's CheckpointException does not derive from Exception
        return f"{type(error).__name__}: {error}"
    finally:
        _modicum.SaveParts.write = write
    return ""


ACTS = {
    "dcp_saves": dcp_saves, "dcp_loads": dcp_loads, "dcp_resumes": dcp_resumes,
    "dcp_fails": dcp_fails, "dcp_saves_flat": dcp_saves_flat, "dcp_loads_flat": dcp_loads_flat,
    "dcp_loads_apart": dcp_loads_apart, "dcp_error": dcp_error,
}  # fmt: skip
