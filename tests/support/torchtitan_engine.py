"""Two ranks of torchtitan's llama3, optimizers and checkpoint manager on CPUs, with the classes of
the block about torchtitan on a page: torchtitan_engine.py FOLDER PAGE. Each rank prints
"trained"."""

import dataclasses
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import transformers
from families import EVEN_TEXT, UNTIED
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

WORLD = 2
# torchtitan's adapter permutes rows within each head, so each rank must have whole heads.
SIZES = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}


def block_of(page: Path) -> dict[str, Any]:
    """The names that the page's block defines, from torchtitan's own classes."""
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

    found = re.search(r"^## torchtitan\n.*?```python\n(.*?)```", page.read_text(), re.M | re.S)
    assert found, page
    names: dict[str, Any] = {
        "CheckpointManager": CheckpointManager,
        "StateDictAdapter": Llama3StateDictAdapter,
        "Path": Path,
        "dataclass": dataclasses.dataclass,
    }
    exec(compile(found[1], str(page), "exec"), names)
    return names


def own() -> dict[str, Any]:
    """torchtitan's own classes, under the names that the block uses."""
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

    return {"Checkpoints": CheckpointManager, "Adapter": Llama3StateDictAdapter}


def config_of(hub: Any) -> Any:
    """torchtitan's configuration of a llama of transformers."""
    import torchtitan.models.llama3 as llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention

    llama3.get_attention_config = lambda _backend: ScaledDotProductAttention.Config()  # on CPUs
    rope = llama3.ComplexRoPE.Config(
        dim=hub.hidden_size // hub.num_attention_heads, max_seq_len=128,
        theta=hub.rope_parameters["rope_theta"], scaling="none",
    )  # fmt: skip
    layers = llama3._build_llama3_layers(
        n_layers=hub.num_hidden_layers, dim=hub.hidden_size, n_heads=hub.num_attention_heads,
        n_kv_heads=hub.num_key_value_heads, hidden_dim=hub.intermediate_size, rope=rope,
        attn_backend="sdpa",
    )  # fmt: skip
    head = llama3._output_linear_init(hub.hidden_size)
    return llama3.Llama3Model.Config(
        dim=hub.hidden_size, vocab_size=hub.vocab_size, layers=layers,
        tok_embeddings=llama3.Embedding.Config(
            num_embeddings=hub.vocab_size, embedding_dim=hub.hidden_size,
            param_init=llama3._EMBEDDING_INIT,
        ),
        norm=llama3.RMSNorm.Config(
            normalized_shape=hub.hidden_size, eps=hub.rms_norm_eps, param_init=llama3._NORM_INIT
        ),
        lm_head=llama3.Linear.Config(
            in_features=hub.hidden_size, out_features=hub.vocab_size, param_init=head
        ),
    )  # fmt: skip


class Trainer:
    """Makes model, optimizers and checkpoint manager as torchtitan's trainer does, which needs a
    GPU."""

    def __init__(self, directory: str, folder: str, classes: dict[str, Any]) -> None:
        import torchtitan.distributed.parallel_dims as parallel
        from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
        from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
        from torchtitan.models.llama3 import parallelize_llama

        parallel.device_type = "cpu"
        config = config_of(transformers.AutoConfig.from_pretrained(directory))
        parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
        with torch.device("meta"):
            model = config.build()
        self.model = parallelize_llama(
            model,
            parallel_dims=parallel.ParallelDims.from_config(
                dataclasses.replace(
                    parallelism, data_parallel_shard_degree=dist.get_world_size()
                ),
                dist.get_world_size(),
            ),
            training=TrainingConfig(mixed_precision_param="float32"), parallelism=parallelism,
            compile_config=CompileConfig(enable=False), ac_config=None, dump_folder=folder,
        )  # fmt: skip
        for unit in self.model.modules():
            if isinstance(unit, FSDPModule):
                unit.set_force_sum_reduction_for_comms(True)  # gloo has sums, no averages
        self.model.to_empty(device="cpu")
        with torch.no_grad():
            self.model.init_weights(buffer_device=None)
        self.optimizers = default_adamw(lr=1e-3).build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=1)
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=10)
        self.train_state = SimpleNamespace()
        self.manager = (
            classes["Checkpoints"]
            .Config(
                enable=True, folder=folder, interval=1, initial_load_path=directory,
                initial_load_in_hf=True, last_save_in_hf=True,
            )
            .build(
                dataloader=Loader(), model_parts=[self.model], optimizers=self.optimizers,
                lr_schedulers=self.schedulers, states={},
                sd_adapter=classes["Adapter"](config, directory),
            )
        )  # fmt: skip

    def step(self, seed: int) -> float:
        vocabulary = self.model.config.vocab_size
        tokens = torch.randint(vocabulary, (2, 12), generator=torch.Generator().manual_seed(seed))
        logits = self.model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        self.optimizers.step()
        self.schedulers.step()
        self.optimizers.zero_grad()
        return loss.item()

    def tensors(self) -> dict[str, torch.Tensor]:
        named = self.model.state_dict().items()
        return {n: t.full_tensor() if isinstance(t, DTensor) else t.clone() for n, t in named}


class Loader:
    """A data loader's state."""

    def state_dict(self) -> dict[str, Any]:
        return {f"dp_rank_{dist.get_rank()}": b"0", "world_size": dist.get_world_size()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state[f"dp_rank_{dist.get_rank()}"] == b"0"


def serve(rank: int, folder: str, page: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD
    )
    directory = f"{folder}/model"
    if rank == 0:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**EVEN_TEXT | UNTIED | SIZES)
        transformers.LlamaForCausalLM(config).save_pretrained(directory)
    dist.barrier()
    ours = block_of(Path(page))
    made = Trainer(directory, f"{folder}/ours", ours)
    assert made.manager.load()
    upstream = Trainer(directory, f"{folder}/theirs", own())
    assert upstream.manager.load()
    theirs = upstream.tensors()
    assert all(torch.equal(held, theirs[name]) for name, held in made.tensors().items())
    losses = [made.step(3) for _ in range(2)]
    assert losses[0] > losses[1]
    assert losses == [upstream.step(3) for _ in range(2)]
    made.manager.save(2)
    loss, expected = made.step(7), made.tensors()
    other = Trainer(directory, f"{folder}/ours", ours)
    assert other.manager.load()
    assert other.step(7) == loss
    got = other.tensors()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    made.manager.save(3, last_step=True)
    upstream.step(7)
    upstream.manager.save(3, last_step=True)
    dist.barrier()
    final, of_theirs = (read(f"{folder}/{who}/step-3") for who in ("ours", "theirs"))
    assert final.keys() == of_theirs.keys()
    assert all(torch.equal(final[name], of_theirs[name]) for name in final)
    os.write(1, b"trained\n")  # a single write of the line, since the ranks share the pipe
    os._exit(0)


def read(directory: str) -> dict[str, torch.Tensor]:
    files = sorted(Path(directory).glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


if __name__ == "__main__":
    torch.multiprocessing.spawn(serve, tuple(sys.argv[1:]), nprocs=WORLD)
