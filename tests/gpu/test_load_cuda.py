"""Shards that are copied to a GPU, and offloaded shards that are pinned in place."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA", allow_module_level=True)

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_model_state_dict  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import modicum  # noqa: E402
import modicum.torch  # noqa: E402
from modicum.torch.dcp import ModicumReader  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_rank")


def loaded(checkpoint: Path, policy: OffloadPolicy, ledger: modicum.Ledger):
    """(a model sharded with this policy and loaded by Modicum, the model of `from_pretrained`)."""
    whole = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    with modicum.torch.empty_parameters():
        model = AutoModelForCausalLM.from_config(whole.config, dtype=torch.bfloat16)
    mesh = init_device_mesh("cuda", (1,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    modicum.torch.load(
        model, checkpoint, memory=modicum.torch.MemoryPolicy(ledger=ledger), progress=False
    )
    # The load puts parameters on the device; `to` moves the buffers.
    return model.to("cuda") if not isinstance(policy, CPUOffloadPolicy) else model, whole


def test_shards_on_a_device_leave_no_charge_for_host_memory(checkpoint: Path) -> None:
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
    model.reshard()  # a root module stays gathered after a forward without a backward
    for name, parameter in model.named_parameters():
        assert parameter.to_local().data_ptr() == places[name], name
    assert ledger.held["shards"] > 0


def test_a_model_on_the_device_has_the_loss_and_gradients_of_from_pretrained(
    checkpoint: Path,
) -> None:
    """Catches: a rotary buffer that stays on the CPU or on meta; other values in the forward."""
    model, whole = loaded(checkpoint, OffloadPolicy(), modicum.Ledger())
    whole.cuda()
    tokens = torch.arange(40, device="cuda")[None]
    losses = [each(input_ids=tokens, labels=tokens).loss for each in (model, whole)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad.full_tensor(), whole.get_parameter(name).grad), name


@pytest.mark.parametrize("strategy", ["own-shard", "rank0-broadcast", "full-per-rank"])
def test_a_load_overwrites_parameters_on_the_device(checkpoint: Path, strategy: str) -> None:
    model, whole = loaded(checkpoint, OffloadPolicy(), modicum.Ledger())
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    modicum.torch.load(
        model,
        checkpoint,
        memory=modicum.torch.MemoryPolicy(strategy=strategy),
        check=True,
        progress=False,
    )
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor().cpu(), whole.state_dict()[name]), name


def test_dcp_reads_a_checkpoint_into_parameters_on_the_device(checkpoint: Path) -> None:
    model, whole = loaded(checkpoint, OffloadPolicy(), modicum.Ledger())
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    dcp.load(get_model_state_dict(model), storage_reader=ModicumReader(checkpoint))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor().cpu(), whole.state_dict()[name]), name
