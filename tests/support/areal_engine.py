"""Two ranks of AReaL's FSDP engine on CPUs: areal_engine.py FOLDER CASE. Each rank prints
"trained"."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import transformers
from families import FAMILIES
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from torch.distributed.tensor import DTensor

import modicum.torch

WORLD = 2
# By case: the family, changes of AReaL's configuration, and the class of transformers whose values
# are expected; None for a critic, whose head no file has.
CASES = {
    "causal-lm": ("qwen3", {}, "AutoModelForCausalLM"),
    "lora": ("qwen3", {"use_lora": True, "lora_rank": 4}, "AutoModelForCausalLM"),
    "value-head": ("qwen3", {"is_critic": True, "disable_dropout": True}, None),
    "vision": ("qwen2_5_vl", {}, "AutoModelForImageTextToText"),
}


def write(family: str, directory: Path) -> None:
    (one,) = [one for one in FAMILIES if one.name == family]
    one.write(one.build(), directory)
    write_tokenizer(directory)


def write_tokenizer(directory: Path) -> None:
    tokens = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="</s>")
    made.save_pretrained(directory)


class Engine:
    """AReaL's engine, made, sharded and loaded by its own methods."""

    def __init__(self, directory: str, changes: dict[str, Any]) -> None:
        from areal.api import FinetuneSpec
        from areal.api.cli_args import FSDPEngineConfig, OptimizerConfig, TrainEngineConfig
        from areal.engine.fsdp_engine import FSDPEngine

        config = TrainEngineConfig(
            experiment_name="test", trial_name="test", path=directory, attn_impl="sdpa",
            backend=f"fsdp:d{dist.get_world_size()}", dtype="float32",
            optimizer=OptimizerConfig(lr=1e-3),
            fsdp=FSDPEngineConfig(memory_efficient_load=True), **changes,
        )  # fmt: skip
        self.engine = FSDPEngine(config)
        self.engine.create_process_group()
        spec = FinetuneSpec(total_train_epochs=1, dataset_size=100, train_batch_size=10)
        with assert_loads_into_meta():
            self.engine.initialize(None, spec)

    @property
    def model(self) -> Any:
        return self.engine.model

    def step(self, seed: int) -> float:
        tokens = torch.randint(2, 60, (2, 11), generator=torch.Generator().manual_seed(seed))
        loss = self.model(input_ids=tokens).logits.float().square().mean()
        loss.backward()
        done = self.engine.optimizer_step()
        assert done["update_successful"] == 1.0 and done["grad_norm"] > 0
        self.engine.optimizer_zero_grad()
        self.engine.lr_scheduler_step()
        return float(loss.item())

    def tensors(self) -> dict[str, torch.Tensor]:
        named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in named.items()}


class assert_loads_into_meta:  # a context manager, named like a function
    """Asserts that each load within the context gets a model with all parameters on meta, and all
    buffers with values."""

    def __enter__(self) -> None:
        self.load = modicum.torch.load

        def load(model: Any, *args: Any, **how: Any) -> Any:
            assert all(parameter.is_meta for parameter in model.parameters())
            assert not any(buffer.is_meta for buffer in model.buffers())
            return self.load(model, *args, **how)

        modicum.torch.load = load

    def __exit__(self, *of: Any) -> None:
        modicum.torch.load = self.load


def assert_loaded(made: Engine, directory: str, oracle: str | None) -> None:
    """Compares with `from_pretrained` of the class `oracle` in one process, buffers included.
    `oracle` is None for a critic; see CASES."""
    assert isinstance(made.engine.optimizer, modicum.torch.AdamW)
    held = made.tensors()
    if oracle is None:  # the value head is new: no file has it
        kind = transformers.AutoModelForTokenClassification
        whole = kind.from_pretrained(directory, dtype=torch.float32, num_labels=1)
        new = {n for n in held if n.startswith("score")}
        assert new and all(torch.isfinite(held[n]).all() for n in new)
    else:
        whole = getattr(transformers, oracle).from_pretrained(directory, dtype=torch.float32)
        new = {n for n in held if "lora_" in n}
        assert all((held[n] == 0).all() for n in new if "lora_B" in n)
    theirs = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    loaded = 0
    for name, tensor in held.items():
        if name not in new:
            short = name.removeprefix("base_model.model.").replace(".base_layer", "")
            assert torch.equal(tensor, theirs[short]), name
            loaded += 1
    assert loaded == len(theirs) - len(new & theirs.keys())


def assert_recovers(made: Engine, folder: str, directory: str, changes: dict[str, Any]) -> None:
    """A new engine that recovers from the checkpoint takes the same next step, to the bit."""
    from areal.api import SaveLoadMeta

    meta = SaveLoadMeta(path=f"{folder}/recover", weight_format="dcp", with_optim=True)
    for _ in range(2):  # the second save replaces the first
        made.engine.save(meta)
    assert len(list(Path(meta.path).glob("step-*"))) == 1
    loss, expected = made.step(7), made.tensors()
    other = Engine(directory, changes)
    other.engine.load(meta)
    assert other.step(7) == loss
    got = other.tensors()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[n], expected[n]) for n in got)


def assert_exports(made: Engine, folder: str) -> None:
    """The files have the engine's values in its compute dtype, and an export replaces the previous
    one."""
    from areal.api import SaveLoadMeta

    made.engine.config.dtype = "bfloat16"
    meta = SaveLoadMeta(path=f"{folder}/export", weight_format="hf", with_optim=False)
    for _ in range(2):
        made.engine.save(meta)
    made.engine.config.dtype = "float32"
    files = [*Path(meta.path).glob("*.safetensors")]
    stored = {n: t for file in files for n, t in load_file(file).items()}
    assert not [*Path(meta.path).glob(".export")]
    held = made.tensors()
    if any("lora_" in name for name in held):
        held = {n.replace(".default", ""): t for n, t in held.items() if "lora_" in n}
    persistent = {n: t for n, t in held.items() if not n.endswith("inv_freq")}
    assert stored.keys() == persistent.keys(), stored.keys() ^ persistent.keys()
    for name, tensor in persistent.items():
        assert torch.equal(stored[name], tensor.to(torch.bfloat16)), name


def serve(rank: int, folder: str, case: str) -> None:
    family, changes, oracle = CASES[case]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD
    )
    directory = f"{folder}/model"
    if rank == 0:
        write(family, Path(directory))
    dist.barrier()
    made = Engine(directory, changes)
    assert_loaded(made, directory, oracle)
    if case != "vision":  # its forward needs images
        losses = [made.step(seed) for seed in (3, 3)]
        assert losses[0] > losses[1]
        assert_exports(made, folder)
        assert_recovers(made, folder, directory, changes)
    dist.barrier()
    print("trained", flush=True)
    os._exit(0)


if __name__ == "__main__":
    torch.multiprocessing.spawn(serve, tuple(sys.argv[1:]), nprocs=WORLD)
