"""Two ranks of verl's FSDP engine on CPUs: verl_engine.py FOLDER CASE. Each rank prints
"trained"."""

import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import peft
import torch
import torch.distributed as dist
import torch.multiprocessing
import transformers
from families import FAMILIES

import modicum.torch

WORLD = 2
# By case: changes of verl's model configuration, its engine, and the class of transformers that
# reads the same files.
CASES = {
    "language-model": ({}, "FSDPEngineWithLMHead", "AutoModelForCausalLM"),
    "lora": ({"lora_rank": 4}, "FSDPEngineWithLMHead", "AutoModelForCausalLM"),
    "value-head": (
        {"model_type": "value_model"}, "FSDPEngineWithValueHead", "AutoModelForTokenClassification",
    ),
}  # fmt: skip
CONTENTS = ["model", "optimizer", "extra"]


def run_on_cpus() -> None:
    """Gives verl a platform for CPUs, before it is imported elsewhere."""
    from verl.plugin.platform import set_platform
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class Cpus(PlatformCUDA):
        device_name = "cpu"
        device_module = torch.cpu

        def current_device(self) -> Any:
            return "cpu"

    set_platform(Cpus())

    import verl.models.transformers.monkey_patch as patches

    patches.is_trl_available = lambda: False  # verl 0.9.1 needs an older TRL
    # verl builds value models with flash attention, which needs a GPU.
    kind = transformers.AutoModelForTokenClassification
    read = kind.from_pretrained
    kind.from_pretrained = lambda *of, **how: read(*of, **how | {"attn_implementation": "sdpa"})


def engine_of(
    directory: str, optimizer_impl: str = "modicum.torch", case: str = "language-model"
) -> Any:
    """A verl engine before its `initialize`."""
    run_on_cpus()
    import verl.workers.engine.fsdp.transformer_impl as engines
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

    changes, kind, _ = CASES[case]
    precision = {"param_dtype": "fp32", "reduce_dtype": "fp32"}
    return getattr(engines, kind)(
        HFModelConfig(
            path=directory, load_tokenizer=False, use_remove_padding=False,
            enable_gradient_checkpointing=False, override_config={"attn_implementation": "sdpa"},
            **changes,
        ),
        FSDPEngineConfig(strategy="fsdp2", mixed_precision=precision, use_torch_compile=False),
        FSDPOptimizerConfig(
            optimizer="AdamW", optimizer_impl=optimizer_impl, lr=1e-3, lr_warmup_steps=0,
            lr_scheduler_type="cosine", total_training_steps=10,
        ),
        CheckpointConfig(save_contents=[*CONTENTS, "hf_model"], load_contents=CONTENTS),
    )  # fmt: skip


class Run:
    """verl's engine with the handler of its trainer that saves and resumes."""

    def __init__(self, directory: str, folder: str, case: str) -> None:
        self.engine = engine_of(directory, case=case)
        build = self.engine._build_fsdp_module

        def checked(module: Any) -> Any:
            names = {name for name, tensor in module.named_parameters() if not tensor.is_meta}
            assert not names if case != "lora" else all("lora_" in name for name in names)
            return build(module)

        self.engine._build_fsdp_module = checked
        self.engine.initialize()
        assert isinstance(self.engine.optimizer, modicum.torch.AdamW)
        from verl.utils.checkpoint.checkpoint_handler import CheckpointHandler

        self.data = SimpleNamespace(state_dict=dict, load_state_dict=lambda _: None)
        self.handler = CheckpointHandler(
            self.engine, self.data, default_local_dir=f"{folder}/checkpoints", max_ckpt_to_keep=1
        )

    def step(self) -> list[float]:
        """A step on random tokens. Returns its loss and rate, and numbers of other generators."""
        tokens = torch.randint(2, 60, (2, 11))
        loss = self.engine.module(input_ids=tokens).logits.float().square().mean()
        loss.backward()
        assert self.engine.optimizer_step() > 0
        self.engine.optimizer_zero_grad()
        rate = self.engine.lr_scheduler_step()
        return [float(loss.item()), rate, random.random(), float(np.random.rand())]

    def tensors(self) -> dict[str, torch.Tensor]:
        named = self.engine.module.named_parameters()
        return {n: t.full_tensor().detach().clone() for n, t in named}


def assert_loaded(run: Run, directory: str, case: str) -> None:
    """The values are those of the files; a head or adapters that no file has are initialised."""
    kind = getattr(transformers, CASES[case][2])
    whole = kind.from_pretrained(directory, dtype=torch.float32, num_labels=1)
    held = run.tensors()
    new = {name for name in held if name.startswith("score") or "lora_" in name}
    assert bool(new) == (case != "language-model")
    assert all(held[n].abs().max() < 1 for n in new)
    zeros = {n for n in new if "lora_B" in n or n.endswith("bias")}
    assert all(held[n].any() == (n not in zeros) for n in new)
    loaded = held.keys() - new
    for name in loaded:
        short = name.removeprefix("base_model.model.").replace(".base_layer", "")
        assert torch.equal(held[name], whole.get_parameter(short)), name
    assert len(loaded) == len(dict(whole.named_parameters()).keys() - new)


def assert_saved(run: Run, folder: str, case: str) -> None:
    """The checkpoint is one step. transformers, or PEFT, reads its weights, and those of verl's
    folder of hf_model, which has the same files."""
    where = Path(folder, "checkpoints/global_step_2")
    assert [path.name for path in where.parent.glob("global_step_*")] == [where.name]
    assert not [*where.glob("*_world_size_*")]
    (step,) = where.glob("step-*")
    files = [*step.glob("*.safetensors")]
    assert files and all(of.samefile(where / "huggingface" / of.name) for of in files)
    held = run.tensors()
    for place in (step, where / "huggingface"):
        read = dict(read_of(place, case).named_parameters())
        assert read.keys() == held.keys()
        assert all(torch.equal(read[n], t) for n, t in held.items())


def read_of(place: Path, case: str) -> Any:
    """The model that transformers makes of the files; all of their tensors must be in it."""
    kind = getattr(transformers, CASES[case][2])
    how = {"num_labels": 1} if case == "value-head" else {}
    if case == "lora":
        base = kind.from_pretrained(place.parents[2] / "model", dtype=torch.float32)
        return peft.PeftModel.from_pretrained(base, place)
    whole, told = kind.from_pretrained(place, output_loading_info=True, **how)
    assert not any(told.values()), told
    return whole


def train_and_resume(directory: str, folder: str, case: str) -> None:
    random.seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    torch.manual_seed(dist.get_rank())
    run = Run(directory, folder, case)
    assert run.handler.load_checkpoint() == 0
    assert_loaded(run, directory, case)
    loaded = run.tensors()
    for step in (1, 2):
        run.step()
        run.handler.save_checkpoint(step)
    assert_saved(run, folder, case)
    expected = [run.step(), run.step()]
    weights = run.tensors()
    assert any(not torch.equal(loaded[n], weights[n]) for n in weights)

    other = Run(directory, folder, case)
    assert other.handler.load_checkpoint() == 2
    other.handler.save_checkpoint(2)  # replaces the checkpoint from which it was resumed
    assert_saved(other, folder, case)
    assert [other.step(), other.step()] == expected
    got = other.tensors()
    assert got.keys() == weights.keys()
    assert all(torch.equal(got[n], weights[n]) for n in got)


def resume_alone(directory: str, folder: str, case: str) -> None:
    """In another world the generators keep their state, since each rank had its own."""
    run = Run(directory, folder, case)
    torch.manual_seed(7)
    assert run.handler.load_checkpoint() == 2
    assert torch.initial_seed() == 7
    assert_saved(run, folder, case)
    assert run.step()[1] == run.engine.optimizer.param_groups[0]["lr"] < 1e-3


def serve(rank: int, folder: str, case: str, world: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    store = f"file://{folder}/store-{world}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    directory = f"{folder}/model"
    if rank == 0 and world == WORLD:
        (family,) = [one for one in FAMILIES if one.name == "qwen3"]
        family.write(family.build(), Path(directory))
    dist.barrier()
    if world == WORLD:
        train_and_resume(directory, folder, case)
        print("trained", flush=True)
    else:
        resume_alone(directory, folder, case)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    worlds = (WORLD, 1) if sys.argv[2] == "language-model" else (WORLD,)
    for world in worlds:
        torch.multiprocessing.spawn(serve, (*sys.argv[1:], world), nprocs=world)
