"""The elements of a parameter that a rank steps, against torch.chunk.

Must fail for these mutants: runs that begin at the
local tensor's offset; a shard of a shard treated as a shard of the whole, or derived from its
placements alone; replicas that are all counted.
"""

import copy
from math import prod

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from sharding import Cut, playing_new_rank  # noqa: E402  (after torch is known to be there)
from torch_front import from_pretrained, local_part, shard  # noqa: E402

import modicum  # noqa: E402
from modicum.torch.optim.parts import part_of  # noqa: E402
from modicum.torch.shards.placements import Shardings  # noqa: E402

CUTS = [
    Cut("none", (2,)),
    Cut("fsdp2", (3,)),
    Cut("fsdp2", (4,), dim=1),
    Cut("hsdp", (2, 3)),
    Cut("tp-fsdp", (2, 2)),
    Cut("tp-fsdp", (2, 2), dim=1),
]


@pytest.mark.parametrize(
    ("name", "cut"),
    [(name, cut) for name in ("llama", "mixtral") for cut in CUTS],
    ids=str,
)
def test_runs_are_the_elements_that_a_rank_holds(name: str, cut: Cut) -> None:
    """Each element's value is its index in the whole parameter."""
    whole = copy.deepcopy(from_pretrained(name)).float()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.copy_(torch.arange(float(parameter.numel())).view(parameter.shape))
    counted = {n: 0 for n, _ in whole.named_parameters()}
    world = prod(cut.mesh)
    for rank in range(world):
        with playing_new_rank(rank, world):
            model = shard(copy.deepcopy(whole), cut)
            shardings = Shardings()
            for n, parameter in model.named_parameters():
                part = part_of(n, parameter, 0, shardings)
                runs = [torch.arange(float(first), float(first + k)) for first, k in part.runs]
                got = torch.cat(runs) if runs else torch.empty(0)
                held = local_part(n, whole.get_parameter(n).detach(), cut, rank)
                assert torch.equal(got, held.reshape(-1)), f"{n} of rank {rank}"
                ends = [first + k for first, k in part.runs[:-1]]
                assert all(a < b[0] for a, b in zip(ends, part.runs[1:], strict=True)), n
                counted[n] += got.numel() if part.is_counted else 0
    if cut.layout == "none":
        return  # plain parameters belong to every rank
    for n, parameter in whole.named_parameters():
        # A parameter on some mesh axes only is counted once per coordinate of the others.
        assert counted[n] % parameter.numel() == 0 and counted[n] > 0, n
        if cut.layout != "tp-fsdp":
            assert counted[n] == parameter.numel(), n


def test_an_alias_of_an_uneven_cut_is_refused() -> None:
    """An alias's placements alone don't show that FSDP2 has cut it after tensor parallelism: for 53
    rows they would name other elements."""
    whole = copy.deepcopy(from_pretrained("llama"))
    with playing_new_rank(0, 4):
        model = shard(whole, Cut("tp-fsdp", (2, 2)))
        parameter = model.get_parameter("model.layers.0.mlp.up_proj.weight")
        alias = torch.nn.Parameter(parameter.detach())
        with pytest.raises(modicum.UsageError, match=r"cuts of unknown order.*up_proj"):
            part_of("up_proj", alias, 0, Shardings())
