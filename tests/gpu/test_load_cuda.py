"""Shards that are copied to a GPU, and offloaded shards that are pinned in place."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA", allow_module_level=True)

import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard  # noqa: E402
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM  # noqa: E402

import modicum  # noqa: E402
import modicum.torch  # noqa: E402


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    config = Qwen3Config(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=96,
        vocab_size=1025,
        dtype="bfloat16",
    )
    directory = tmp_path_factory.mktemp("gpu")
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def loaded(checkpoint: Path, policy: OffloadPolicy, ledger: modicum.Ledger):
    whole = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    with modicum.torch.empty_parameters():
        model = AutoModelForCausalLM.from_config(whole.config, dtype=torch.bfloat16)
    mesh = init_device_mesh("cuda", (1,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    modicum.torch.load(model, checkpoint, ledger=ledger, progress=False)
    return model.to("cuda") if not isinstance(policy, CPUOffloadPolicy) else model, whole


def test_shards_on_a_device_leave_nothing_in_host_memory(checkpoint: Path) -> None:
    ledger = modicum.Ledger()
    model, whole = loaded(checkpoint, OffloadPolicy(), ledger)
    assert ledger.held_bytes == 0
    for name, parameter in model.named_parameters():
        assert parameter.device.type == "cuda", name
        assert torch.equal(parameter.full_tensor().cpu(), whole.state_dict()[name]), name


def test_offloaded_shards_are_pinned_in_place(checkpoint: Path) -> None:
    ledger = modicum.Ledger()
    model, whole = loaded(checkpoint, CPUOffloadPolicy(), ledger)
    places = {}
    for name, parameter in model.named_parameters():
        local = parameter.to_local()
        assert local.is_pinned(), name
        assert torch.equal(local, whole.state_dict()[name]), name
        places[name] = local.data_ptr()
    for buffer in model.buffers():
        buffer.data = buffer.data.cuda()
    model(torch.arange(9, device="cuda")[None])
    for name, parameter in model.named_parameters():
        assert parameter.to_local().data_ptr() == places[name], name
    assert ledger.held["shards"] > 0
