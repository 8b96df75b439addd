"""An act (a function that ranks run by name, see torch_rank.py) that runs a block of a page."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate_rank
import torch
import torch.distributed as dist
import torch_rank
import transformers
from optimizer_rank import arguments, rows
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import modicum.torch

STEPS = 2


class TitanModel:
    """A stand-in for torchtitan's ModelWrapper, with one model part."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return dict(self.model.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state, strict=False)


class TitanManager:
    """A stand-in that calls the hooks of torchtitan 0.3.0's CheckpointManager as the manager
    does."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        folder: str = "checkpoint"
        last_save_in_hf: bool = False

    def __init__(self, config: Config, states: dict[str, Any], sd_adapter: Any) -> None:
        self.folder, self.last_save_in_hf = config.folder, config.last_save_in_hf
        self.states = states | {"model": TitanModel(states["model"])}
        self.sd_adapter = sd_adapter

    def save(self, step: int, last_step: bool = False) -> None:
        checkpoint_id, model = f"{self.folder}/step-{step}", self.states["model"].state_dict()
        if last_step:
            self.dcp_save(model, checkpoint_id=checkpoint_id, async_mode="disabled",
                          enable_garbage_collection=True, to_hf=self.last_save_in_hf)  # fmt: skip
            return
        others = {key: of for key, of in self.states.items() if key != "model"}
        self.dcp_save(others | model, checkpoint_id=checkpoint_id, async_mode="disabled",
                      enable_garbage_collection=True)  # fmt: skip

    def load(self, step: int = -1) -> int:
        found = self._find_load_step() if step == -1 else step
        others = {key: of for key, of in self.states.items() if key != "model"}
        states = others | self.states["model"].state_dict()
        checkpoint_id = f"{self.folder}/step-{found}"
        self.dcp_load(states, checkpoint_id=checkpoint_id, from_hf=False, from_quantized=False)
        return found


def page_block(text: str, directory: str, folder: str, family: str = "") -> dict[str, Any]:
    """Runs a block with the names that it needs. Returns the losses of its training, the files in
    `folder`, and digests of this rank's part of `model`."""
    losses: list[float] = []

    def train(model: Any, optimizer: Any) -> None:
        for row in rows(model.get_input_embeddings().num_embeddings, STEPS)[:, None]:
            loss = model(input_ids=row, labels=row).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

    config = transformers.AutoConfig.from_pretrained(directory)
    names: dict[str, Any] = {
        "AutoModelForCausalLM": transformers.AutoModelForCausalLM,
        "Trainer": transformers.Trainer,
        "CheckpointManager": TitanManager,
        "Path": Path,
        "StateDictAdapter": object,
        "config": config,
        "dataclass": dataclass,
        "dist": dist,
        "fully_shard": fully_shard,
        "init_device_mesh": init_device_mesh,
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
        "modicum": modicum,
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
        "shard": lambda model: sharded(model, names["offload_policy"]),
        "torch": torch,
        "train": train,
    }
    for old, new in {"DIR": directory, "ROOT": f"{folder}/root", "checkpoint": folder}.items():
        text = text.replace(f'"{old}"', repr(new))
    with accelerate_rank.fsdp2_on_cpus(), tempfile.TemporaryDirectory() as own:
        names |= MAKERS.get(family, lambda *_: {})(config, own)
        exec(compile(text, "a page", "exec"), names)
        names |= names.get("made", {})
        if "trainer" in names:
            losses += [
                line["loss"] for line in names["trainer"].state.log_history if "loss" in line
            ]
    told = {"losses": losses, "files": sorted(os.listdir(folder))}
    if "model" in names:
        told["state"] = torch_rank.local_state(names["model"])
    return told


def sharded(model: Any, policy: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer, offload_policy=policy)
    return fully_shard(model, offload_policy=policy)


def for_accelerate(config: Any, folder: str) -> dict[str, Any]:
    return {"accelerator": accelerate_rank.accelerator_of()}


def for_main(config: Any, folder: str) -> dict[str, Any]:
    """`main` of a script; it defines `model`, as a block at the top of a script would."""
    names: dict[str, Any] = {}

    def main() -> None:
        accelerator = accelerate_rank.accelerator_of()
        model = transformers.AutoModelForCausalLM.from_pretrained(config.name_or_path)
        names["model"], _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))

    return {"main": main, "made": names}


def for_trainer(config: Any, folder: str) -> dict[str, Any]:
    data = rows(config.vocab_size, STEPS * dist.get_world_size())
    return {
        "arguments": arguments(transformers.TrainingArguments, folder, STEPS),
        "data": [{"input_ids": row, "labels": row} for row in data],
    }


def for_trl(config: Any, folder: str) -> dict[str, Any]:
    import datasets
    import trl
    from optimizer_rank import tokenizer_of

    data = rows(config.vocab_size, STEPS * dist.get_world_size()).tolist()
    return {
        "sft_arguments": arguments(trl.SFTConfig, folder, STEPS, max_length=12, bf16=False),
        "tokens": datasets.Dataset.from_dict({"input_ids": data}),
        "tokenizer": tokenizer_of(config.vocab_size),
    }


def for_dcp(config: Any, folder: str) -> dict[str, Any]:
    with modicum.torch.empty_parameters():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return {"model": sharded(model, None).to_empty(device="cpu")}


MAKERS: dict[str, Callable[[Any, str], dict[str, Any]]] = {
    "accelerate": for_accelerate,
    "main": for_main,
    "Trainer": for_trainer,
    "TRL": for_trl,
    "torch.distributed.checkpoint": for_dcp,
}

ACTS: dict[str, Callable[..., Any]] = {"page_block": page_block}
