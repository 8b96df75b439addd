"""An act (a function that ranks run by name, see torch_rank.py): a model that was sharded on meta
and filled by `hand_over` trains like one that FSDP2 sharded with its values, bit for bit, and FSDP2
does not copy the memory handed over."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from modicum.torch.shards.rebinding import rebind_parameters
from modicum.upstream.torch_fsdp import fsdp_params, hand_over

WORLD = 2
STEPS = 2


class Tiny(nn.Module):
    """Sizes that 2 does not divide, a row that only one rank has, a tie, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.row = nn.Linear(4, 1, bias=False)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[0].bias.requires_grad_(False)

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return (self.head(x) * self.row(x)).logsumexp(-1).mean()


def whole() -> Tiny:
    torch.manual_seed(7)
    return Tiny()


def shard(model: Tiny) -> Tiny:
    """Shards each block as a unit, and the rest; the second block's weight along dim 1."""
    sideways = model.blocks[1].weight
    for block in model.blocks:
        fully_shard(block, shard_placement_fn=lambda p: Shard(1) if p is sideways else None)
    return fully_shard(model)


def fill(model: Tiny, source: Tiny) -> dict[str, int]:
    """Hands each parameter its shard of `source`; returns the addresses."""
    managed = fsdp_params(model)
    for name, parameter in model.named_parameters():
        facts, value = managed[parameter], source.get_parameter(name).detach()
        chunks = value.chunk(WORLD, parameter.placements[0].dim)
        storage = torch.zeros(facts.padded_numel)
        if dist.get_rank() < len(chunks):
            mine = chunks[dist.get_rank()].reshape(-1)
            storage[: len(mine)] = mine
        hand_over(name, parameter, storage, facts)
    return addresses(model)


def addresses(model: Tiny) -> dict[str, int]:
    """The addresses of FSDP2's buffers; asserts that they are those of the parameters."""
    made = {}
    for parameter, facts in fsdp_params(model).items():
        flat = facts.fsdp_param._sharded_param_data.untyped_storage().data_ptr()
        assert parameter._local_tensor.untyped_storage().data_ptr() == flat
        made[str(facts.fsdp_param._module_info)] = flat
    return made


def train(model: Tiny, optimizer: Any) -> list[float]:
    tokens = torch.arange(6).reshape(2, 3) + dist.get_rank()
    losses = []
    for _ in range(STEPS):
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def groups_of(model: Tiny) -> list[dict[str, Any]]:
    """Two parameter groups with different options, in another order than the model's."""
    blocks = [p for block in model.blocks for p in block.parameters()]
    rest = [model.row.weight, model.embed.weight]
    return [{"params": blocks[::-1], "lr": 0.3}, {"params": rest, "weight_decay": 0.2}]


def trains_as_fsdp2_would() -> None:
    usual = shard(whole())
    expected = train(usual, torch.optim.AdamW(groups_of(usual), lr=0.1))

    with torch.device("meta"):
        model = Tiny()
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.1)  # before parameters have values
    with rebind_parameters(model, optimizer):
        shard(model)
    before = fill(model, whole())
    with torch.no_grad():
        model(torch.arange(3))
    model.reshard()
    assert addresses(model) == before, "copied at the first forward"
    assert train(model, optimizer) == expected
    assert addresses(model) == before, "copied by a step"
    assert model.head.weight is model.embed.weight
    for (name, mine), theirs in zip(model.named_parameters(), usual.parameters(), strict=True):
        assert torch.equal(mine.to_local(), theirs.to_local()), name
        assert mine.requires_grad == theirs.requires_grad


ACTS = {"hand_over": trains_as_fsdp2_would}
